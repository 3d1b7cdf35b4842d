"""The smallest size that keeps a quality: the search over sizes, and whole folders."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kflats
from kflats.common.errors import (
    DoesNotFitError,
    KflatsError,
    NoGradientSignalError,
    NotFiniteError,
    NotWrittenError,
)
from kflats.compress import fitting, pipeline
from kflats.compress import quality as quality_module
from kflats.compress.quality import _copied, smallest_size
from kflats.evaluation.outputs import Judge, load_tokenizer, weight_file_bytes
from kflats.io import load_model
from kflats.io.atomic import explained

CURVES: dict[str, Callable[[float], float]] = {
    "squares": lambda bits: 4 * 4.0**-bits,
    "steeper": lambda bits: 60 * 9.0**-bits,
    "flatter": lambda bits: 0.3 * 2.0**-bits,
    "bent": lambda bits: 1 / (1 + math.exp(2.2 * bits - 5)),
    "flat below": lambda bits: min(0.9, 8 * 4.0**-bits),
    "a step": lambda bits: 0.05 if bits < 3 else 0.001,
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("quality", [0.9, 0.98, 0.99, 0.999])
def test_the_smallest_size_that_keeps_a_quality(name: str, quality: float) -> None:
    numbers, beside, most = 8_000_000, 50_000, 32_000_000
    sizes: list[int] = []

    def attempt(nbytes: int) -> tuple[float, int]:
        sizes.append(nbytes)
        return (0.0 if nbytes >= most else CURVES[name](8 * (nbytes - beside) / numbers)), nbytes

    best = smallest_size(attempt, quality, numbers, beside, most)
    assert best.loss <= 1 - quality
    assert best.fitted == best.nbytes
    assert len(sizes) <= 5
    if name != "a step":
        smaller = CURVES[name](8 * (0.9 * best.nbytes - beside) / numbers)
        assert smaller > 1 - quality, "a tenth less would have been enough"


@pytest.mark.parametrize("enough", [500, 2100, 3900])
def test_where_five_tries_find_none_sizes_grow(enough: int) -> None:
    """A tiny CLIP was refused, "no size keeps a quality of 0.99", and 60 % of its size kept all of it."""
    tried: list[int] = []

    def attempt(nbytes: int) -> tuple[float, int]:
        tried.append(nbytes)
        return (0.0 if nbytes >= enough else 0.03 + 0.001 * len(tried)), nbytes

    assert smallest_size(attempt, 0.99, 1000, 0, 4000).nbytes >= enough
    assert len(tried) <= 10


def test_many_sizes_that_hold_nothing_are_passed_over() -> None:
    """After five of them the search ended in an error of Python's about an empty sequence."""

    def attempt(nbytes: int) -> tuple[float, int]:
        if nbytes < 50_000:
            raise DoesNotFitError("too small")
        return 0.001, nbytes

    assert 50_000 <= smallest_size(attempt, 0.9, 1000, 0, 200_000).nbytes <= 100_000


def test_sizes_that_hold_nothing_are_passed_over() -> None:
    def attempt(nbytes: int) -> tuple[float, int]:
        if nbytes < 900:
            raise DoesNotFitError("too small")
        return (0.0 if nbytes == 4000 else 0.001), nbytes

    best = smallest_size(attempt, 0.9, 1000, 0, 4000)
    assert 900 <= best.nbytes <= 2000
    with pytest.raises(KflatsError, match="too small"):
        smallest_size(lambda nbytes: attempt(min(nbytes, 100)), 0.9, 1000, 0, 4000)


@pytest.mark.parametrize("kind", [KflatsError, NoGradientSignalError, NotFiniteError, NotWrittenError])
def test_what_no_size_mends_ends_the_search(kind: type[KflatsError]) -> None:
    """A full disk was taken for a size that is too small, and the folder became larger without a word."""
    tried: list[int] = []

    def attempt(nbytes: int) -> tuple[float, int]:
        tried.append(nbytes)
        if len(tried) == 1:
            raise kind("not here").about("a weight")
        return 0.001, nbytes

    with pytest.raises(kind, match="a weight: not here"):
        smallest_size(attempt, 0.9, 1000, 0, 4000)
    assert len(tried) == 1


@pytest.mark.slow
def test_outputs_that_are_not_finite_are_those_of_a_size_that_is_too_small(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged, losses = Judge.__call__, list[float]()

    def overflowing_once(self: Judge, model: Any) -> Any:
        losses.append(judged(self, model).loss)
        if len(losses) == 2:
            raise KeyboardInterrupt  # the rest of the search is that of other tests
        raise NotFiniteError("the outputs overflow")

    monkeypatch.setattr(Judge, "__call__", overflowing_once)
    with pytest.raises(KeyboardInterrupt):
        kflats.compress_folder(tiny_folder, tmp_path / "out", quality=0.9, proof=False, quiet=True)
    assert losses[1] < losses[0], "the size was doubled"


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_moment_makes_no_larger_folder(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, calls = fitting.Partial.put, []

    def full_once(self: fitting.Partial, name: str, *given: Any) -> None:
        calls.append(name)
        if len(calls) == 1:
            with explained(self.folder):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(self, name, *given)

    monkeypatch.setattr(fitting.Partial, "put", full_once)
    settings: dict[str, Any] = {"quality": 0.98, "proof": False, "quiet": True}
    with pytest.raises(NotWrittenError, match="no space left on device"):
        kflats.compress_folder(tiny_folder, tmp_path / "out", **settings)
    assert len(calls) == 1


def test_states_of_a_run_with_gradients_are_copied_by_value() -> None:
    model = torch.nn.Linear(3, 2)
    model.state = model(torch.ones(1, 3))  # type: ignore[assignment]
    twin: Any = _copied(model)
    assert torch.equal(twin.state, model.state)  # type: ignore[arg-type]
    assert not twin.state.requires_grad
    assert twin.weight is not model.weight


def test_a_quality_that_no_size_keeps() -> None:
    with pytest.raises(KflatsError, match=r"no size below the original's keeps a quality of 0.99"):
        smallest_size(lambda nbytes: (0.5, None), 0.99, 1000, 0, 4000)


@pytest.mark.slow
def test_a_model_that_draws_random_numbers_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first size, which it does not keep."""
    fit, tried = quality_module.fitted, list[object]()
    monkeypatch.setattr(quality_module, "fitted", lambda *given, **more: tried.append(given) or fit(*given, **more))
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.ViTMAEConfig(image_size=24, patch_size=6, decoder_num_attention_heads=2, **sizes)
    transformers.ViTMAEModel(config).save_pretrained(tmp_path / "model")  # masks patches at random
    with pytest.raises(KflatsError, match=r"0.99 is not supported with ViTMAEModel.* it draws random numbers"):
        kflats.compress_folder(tmp_path / "model", tmp_path / "out", samples=8, quiet=True)
    assert len(tried) == 1


@pytest.mark.parametrize("quality", [0.0, 1.0, 1.5, -1, float("nan"), "high"])
def test_a_quality_that_means_nothing_is_refused(quality: float, tmp_path) -> None:
    with pytest.raises(KflatsError, match="is not supported"):
        kflats.compress_folder(tmp_path / "none", tmp_path / "out", quality=quality)


@pytest.mark.parametrize("other", [{"keep": "50%"}, {"size": "8MB"}])
def test_a_quality_beside_a_size_is_refused(other: dict[str, str], tmp_path) -> None:
    with pytest.raises(KflatsError, match="beside a size"):
        kflats.compress_folder(tmp_path / "none", tmp_path / "out", quality=0.9, **other)


def test_a_quality_of_a_model_that_memory_cannot_hold_is_refused(tiny_folder, tmp_path, monkeypatch) -> None:
    """Before it is measured; a share to keep is still supported."""
    monkeypatch.setattr(pipeline, "available_bytes", lambda: weight_file_bytes(tiny_folder))
    with pytest.raises(KflatsError, match=r"a quality is not supported with a model of .* in .* of memory"):
        kflats.compress_folder(tiny_folder, tmp_path / "out", quality=0.9, proof=False, quiet=True)
    assert not (tmp_path / "out").exists()
    kflats.compress_folder(tiny_folder, tmp_path / "out", keep="60%", proof=False, quiet=True)


@pytest.mark.slow
def test_folders_keep_the_quality_that_was_asked_for(tiny_folder, tmp_path) -> None:
    sizes = []
    for quality in (0.9, None):
        out = tmp_path / f"{quality}"
        kflats.compress_folder(tiny_folder, out, quality=quality, proof=False, quiet=True)
        loss = Judge(load_model(tiny_folder), load_tokenizer(tiny_folder))(load_model(out)).loss
        assert loss <= 1.3 * (1 - (quality or 0.99))  # judged on other sentences than those of the search
        sizes.append(weight_file_bytes(out))
    assert sizes[0] < sizes[1] < weight_file_bytes(tiny_folder)


@pytest.mark.slow
def test_an_interrupted_search_fits_nothing_twice(tiny_folder, tmp_path, monkeypatch) -> None:
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "copy_companions", stop)
        with pytest.raises(KeyboardInterrupt):
            kflats.compress_folder(tiny_folder, tmp_path / "out", quality=0.9, quiet=True)
    fitted = []
    fit = fitting._fit
    monkeypatch.setattr(fitting, "_fit", lambda *args: fitted.append(1) or fit(*args))
    kflats.compress_folder(tiny_folder, tmp_path / "out", quality=0.9, quiet=True)
    assert fitted == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
