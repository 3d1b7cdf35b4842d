"""Statistics on disk: what comes back is what was measured, and what is damaged is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kflats.calibration.collect import measure
from kflats.calibration.measurements import FIELDS, Statistics, Sums, merge
from kflats.common.errors import KflatsError
from kflats.importance.protocol import Measured
from kflats.model.weights import find_weights

ALL = frozenset(FIELDS)


class Tied(nn.Module):
    """A table that is the head too, a table, and a linear layer."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(9, width), nn.Embedding(3, width)
        self.inner, self.head = nn.Linear(width, width), nn.Linear(width, 9, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.words(ids) + self.kinds(ids % 3)).tanh())


def test_statistics_are_saved_whole(tmp_path: Path) -> None:
    model, path = Tied(), tmp_path / "new" / "statistics.safetensors"
    ids = torch.randint(9, (4, 5))
    found = measure(model, find_weights(model), [{"ids": ids, "labels": ids}], needs=ALL, quiet=True)
    found.save(path)
    back = Statistics.load(path)
    assert (back.samples, back.objective, back.unreached) == (4, {"type": "TaskLoss", "kind": "tokens"}, ())
    assert [one.head for one in back.measured.values()] == [True, False, False]
    for name, one in found.measured.items():
        other = back.of(name)
        assert (one.rows, one.columns, one.positions) == (other.rows, other.columns, other.positions)
        for key in ALL:
            a, b = getattr(one, key), getattr(other, key)
            assert (a is None) == (key == "counts" and name == "inner")
            assert (a is None and b is None) or torch.equal(a, b)
    back.check(model)
    with pytest.raises(KflatsError, match="another model"):
        back.check(Tied(7))
    with pytest.raises(KflatsError, match=r"nothing was measured of 'iner'.*inner"):
        back.of("iner")
    assert str(back) == str(found)
    assert "4 samples, TaskLoss" in str(found)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_damaged_statistics_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "statistics.safetensors"
    model = nn.Sequential(nn.Linear(3, 2))
    batch = {"input": torch.randn(4, 3), "labels": torch.tensor([0, 1, 0, 1])}
    measure(model, find_weights(model), [batch], needs=ALL, quiet=True).save(path)
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    damage: list[tuple[dict[str, Tensor], dict[str, str]]] = [
        (tensors, header | {"kflats_statistics": header["kflats_statistics"].replace('"rows": 3', '"rows": 4')}),
        (tensors, header | {"kflats_statistics": "[" * 100_000}),
        (tensors, {"kflats_statistics": header["kflats_statistics"]}),
        ({k: v for k, v in tensors.items() if "row" not in k}, header),
        (tensors | {"0.row_fisher": tensors["0.row_fisher"] * math.nan}, header),
        (tensors | {"0.column_fisher": tensors["0.column_fisher"].bool()}, header),
        (tensors | {"0.fisher_gram": tensors["0.fisher_gram"].triu()}, header),
    ]
    for changed, text in damage:
        save_file(changed, path, metadata=text)
        with pytest.raises(KflatsError, match="cannot be read"):
            Statistics.load(path)
    save_file(tensors, path)
    with pytest.raises(KflatsError, match="holds no statistics"):
        Statistics.load(path)
    path.write_bytes(b"junk")
    with pytest.raises(KflatsError, match="cannot be read"):
        Statistics.load(path)
    with pytest.raises(KflatsError, match=r"cannot be read.*No such file"):
        Statistics.load(tmp_path / "nothing")


def test_weights_that_share_a_tensor_are_saved_and_read_apart(tmp_path: Path) -> None:
    gram, path = torch.eye(3, dtype=torch.float64), tmp_path / "statistics.safetensors"
    Statistics({"a": Measured(3, input_gram=gram), "b": Measured(3, input_gram=gram)}, 1).save(path)
    first, second = (Statistics.load(path).of(name).input_gram for name in "ab")
    assert first is not None
    first.add_(1)  # what is read may be changed
    assert second is not None
    assert torch.equal(second, gram)
    mapped = Statistics.load(path, mapped=True).of("a").input_gram
    assert mapped is not None
    assert torch.equal(mapped, gram)


def test_blocks_of_other_weights_are_not_merged() -> None:
    sums = [{name: Sums({"reads": torch.ones(1)}, {}) for name in names} for names in ("ab", "a")]
    with pytest.raises(KflatsError, match="block 1 of the statistics has other weights"):
        merge(enumerate(sums))
