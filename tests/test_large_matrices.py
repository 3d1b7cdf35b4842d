"""Large square matrices: no second one is made, and where they lie changes no bits."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kflats import SVD, Feedback, InputGram, KeepDense, KroneckerFisher, Recipe, Transform, compress_folder
from kflats.common.errors import KflatsError
from kflats.common.machine import is_out_of_memory
from kflats.importance.protocol import Measured
from kflats.numerics import large_matrices
from kflats.numerics.coding.feedback import side_of
from kflats.numerics.gram import lower_gram
from kflats.numerics.large_matrices import (
    all_finite,
    factorize_,
    large_matrices_in,
    permuted,
    stripes,
    symmetric,
    turn_,
    zero_matrix,
)
from kflats.numerics.svd import scaled_metric

transformers = pytest.importorskip("transformers", minversion="5.0")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporaries of 64 numbers, so that matrices of a few rows are in many pieces."""
    monkeypatch.setattr(large_matrices, "_AT_ONCE", 64)
    monkeypatch.setattr(large_matrices, "_TILE", 8)


@pytest.fixture
def in_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """All of them are too large for memory; gives the bytes of the files that were made."""
    made: list[int] = []

    def reserve(descriptor: int, start: int, nbytes: int) -> None:
        made.append(nbytes)
        os.ftruncate(descriptor, nbytes)

    monkeypatch.setattr(large_matrices, "_SMALL", 0)
    monkeypatch.setattr(large_matrices, "unused_bytes", lambda: 0)
    monkeypatch.setattr(os, "posix_fallocate", reserve)
    return made


def drawn(n: int) -> Tensor:
    """A Gram of more rows than columns, symmetric up to its last bits."""
    rows = torch.randn(2 * n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    return rows.T @ rows


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 33])
@pytest.mark.usefixtures("small_pieces")
def test_each_operation_is_its_plain_form_bit_for_bit(n: int) -> None:
    gram = drawn(n)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    uneven = gram + torch.rand(n, n, dtype=torch.float64)
    assert torch.equal(symmetric(uneven), (uneven + uneven.T) / 2)
    assert torch.equal(symmetric(uneven.float()), (uneven.float().double() + uneven.float().double().T) / 2)
    turned = permuted(uneven, order, order.flip(0), torch.float32)
    assert torch.equal(turned, uneven[order][:, order.flip(0)].float())
    turned = uneven.clone()
    turn_(turned)
    assert torch.equal(turned, uneven.flip(0, 1))
    factor = gram.triu() + torch.full((n, n), 7.0, dtype=torch.float64).tril(-1)  # what lies below is not read
    assert factorize_(factor)
    torch.testing.assert_close(factor, torch.linalg.cholesky(gram.triu().T).T, rtol=1e-12, atol=0)
    assert [row for part in stripes(gram) for row in range(part.start, part.stop)] == list(range(n))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.usefixtures("small_pieces")
def test_one_number_that_is_not_finite_is_found(wrong: float) -> None:
    gram = drawn(33)
    assert all_finite(gram)
    assert all_finite(gram[0])
    for row in (0, 32):
        spoilt = gram.clone()
        spoilt[row, row] = wrong
        assert not all_finite(spoilt)
        assert not all_finite(spoilt[row])


def test_what_is_no_gram_has_no_factor() -> None:
    gram = drawn(9)
    gram[4, 4] = -1.0
    assert not factorize_(gram)


class Counted(TorchDispatchMode):
    """Counts the new pieces of memory of at least ``numbers`` numbers of four bytes."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.count = numbers, 0
        self._seen: list[Tensor] = []  # kept, so that no memory is used a second time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        known = {id(one) for one in self._seen}
        given = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Tensor)]
        old = {one.untyped_storage().data_ptr() for one in (*self._seen, *given)}
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, Tensor) and id(one) not in known and one.untyped_storage().data_ptr() not in old:
                self.count += one.untyped_storage().nbytes() >= 4 * self.numbers
                self._seen.append(one)
        return made


def measured(n: int) -> Measured:
    gram = drawn(n + 1)
    return Measured(
        n, input_gram=gram[:n, :n].contiguous(), input_mean=gram[0, :n] / 9, fisher_gram=gram, output_gram=torch.ones(2)
    )


@pytest.mark.parametrize(
    ("most", "work"),
    [
        (1, lambda: lambda gram: side_of(gram, len(gram), 0.2)),
        (1, lambda: lambda gram: side_of(gram, len(gram), 0.2, ordered=False)),
        (1, lambda: lambda gram: scaled_metric(gram, len(gram), "left", "rows")),
        (1, lambda: lambda gram: lower_gram(gram)),
        (2, lambda: (lambda known: lambda gram: InputGram().weigh(known))(measured(48))),
        (2, lambda: (lambda known: lambda gram: KroneckerFisher().weigh(known))(measured(48))),
    ],
    ids=["factor", "factor in order", "metric", "gram", "InputGram", "KroneckerFisher"],
)
@pytest.mark.usefixtures("small_pieces")
def test_few_matrices_as_large_as_the_gram_are_made(
    most: int, work: Callable[[], Callable[[Tensor], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kflats.numerics.gram._PANEL", 8)
    run, gram = work(), symmetric(drawn(48))
    with Counted(48 * 48) as counted:
        run(gram)
    assert counted.count == most


@pytest.mark.usefixtures("small_pieces")
def test_one_factor_at_a_time_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Gram of few rows has a factor only after a few tries."""
    made: list[weakref.ref[Tensor]] = []

    def noted(matrix: Tensor, *how: Any) -> Tensor:
        assert all(one() is None for one in made)
        found = permuted(matrix, *how)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr("kflats.numerics.coding.feedback.permuted", noted)
    rows = torch.randn(5, 48, dtype=torch.float64)
    side_of(rows.T @ rows, 48)
    assert len(made) > 1


def test_a_large_matrix_lies_in_a_file_that_leaves_nothing(in_files: list[int], tmp_path: Path) -> None:
    assert not in_files
    inside = zero_matrix(3, 2)  # outside of the context: in memory
    with large_matrices_in(tmp_path):
        made = zero_matrix(3, 2, torch.float32)
        assert in_files == [24]
        assert not any(tmp_path.iterdir())
    made += 1
    assert made.tolist() == [[1.0, 1.0]] * 3
    assert inside.dtype == torch.float64
    assert not inside.any()
    zero_matrix(3, 2)
    assert in_files == [24]


def test_what_fits_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_matrices.tempfile, "TemporaryFile", lambda **_: pytest.fail("a file was made"))
    with large_matrices_in(tmp_path):
        assert zero_matrix(1000, 1000).shape == (1000, 1000)


def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(
    in_files: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with (
        large_matrices_in(tmp_path),
        pytest.raises(OSError, match="No space left on device") as raised,
    ):
        zero_matrix(3, 2)
    assert raised.value.filename == str(tmp_path)


@pytest.mark.usefixtures("in_files")
@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, None])
def test_a_disk_that_reserves_no_room_is_written_with_zeros(
    number: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, "not here")

    if number is None:
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", refused)
    monkeypatch.setattr(large_matrices, "_ZEROS", bytes(7))
    with large_matrices_in(tmp_path / "new"):
        made = zero_matrix(3, 2)
    assert made.tolist() == [[0.0, 0.0]] * 3
    made[2, 1] = 1


@pytest.mark.usefixtures("in_files")
def test_a_process_that_may_map_no_more_is_short_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(large_matrices.mmap, "mmap", refused)
    with large_matrices_in(tmp_path), pytest.raises(MemoryError) as raised:
        zero_matrix(3, 2)
    assert is_out_of_memory(raised.value)


@pytest.mark.usefixtures("in_files")
@pytest.mark.parametrize("first", [1, 60])
def test_a_full_disk_is_no_size_that_is_too_small(
    first: int, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search by quality would otherwise go on with a larger size."""
    reserve, calls = os.posix_fallocate, []

    def full_once(*given: Any) -> None:
        calls.append(given)
        if len(calls) == first:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(*given)

    monkeypatch.setattr(os, "posix_fallocate", full_once)
    with pytest.raises(KflatsError, match="no space left on device"):
        compress_folder(tiny_folder, tmp_path / "out", quality=0.98, proof=False, quiet=True)
    assert len(calls) == first
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "least"),
    [
        pytest.param(Recipe(KeepDense(), InputGram(), Feedback()), 20, marks=pytest.mark.slow),
        (Recipe(KeepDense(), KroneckerFisher(), Feedback()), 20),
        pytest.param(Recipe(SVD(), KroneckerFisher(), Transform()), 20, marks=pytest.mark.slow),
    ],
    ids=["InputGram", "KroneckerFisher", "SVD"],
)
def test_a_folder_has_the_same_bytes_with_all_matrices_in_files(
    recipe: Recipe,
    least: int,
    tiny_folder: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    texts = [f"word{i} the word{2 * i} of word{3 * i}" for i in range(40)]
    settings: dict[str, Any] = {"method": recipe, "weights": ("linear",), "keep": "80%", "texts": texts, "samples": 8}
    settings |= {"quiet": True}
    compress_folder(tiny_folder, tmp_path / "memory", **settings)
    made = request.getfixturevalue("in_files")
    compress_folder(tiny_folder, tmp_path / "files", **settings)
    assert len(made) >= least
    one, other = (tmp_path / name / "model.safetensors" for name in ("memory", "files"))
    assert one.read_bytes() == other.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir() if "kflats" in path.name and "lock" not in path.name) == []
