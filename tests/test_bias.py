"""A swap may shift a layer's bias, or give it one: what is computed, what is saved, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kflats
from kflats.common.errors import KflatsError
from kflats.matrices.registry import FlatsMatrix, InterpolativeMatrix, LowRankMatrix, Matrix, RankGroup
from kflats.model.swap import restore_, swap_, unchanged_on_error
from kflats.model.weights import find_weight, find_weights


def low_rank(n: int, d: int) -> Matrix:
    return LowRankMatrix(torch.randn(n, 2), torch.randn(2, d))


def flats(n: int, d: int) -> Matrix:
    labels = (torch.arange(n) % 2).to(torch.uint8)
    bands = (RankGroup(-(-n // 2), 2, 0), RankGroup(n // 2, 1, 1))
    return FlatsMatrix(torch.randn(2 * bands[0].rows + bands[1].rows), torch.randn(3, d), labels, bands, (2, 1))


def interpolative(n: int, d: int) -> Matrix:
    return InterpolativeMatrix(torch.randn(n, 2), torch.randn(2, d - 2), torch.randperm(d).to(torch.int16))


KINDS = {"low_rank": low_rank, "flats": flats, "interpolative": interpolative}


class Model(nn.Module):
    """A layer with a bias, one without, a convolution without, and a head that lists its bias twice, as BERT's does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, bias=False)
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 5, bias=False)
        self.words = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 9)
        self.bias = self.head.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.conv(x).mean((2, 3)))))


def swapped(model: Model, name: str, matrix: Matrix, shift: Tensor | None, rows: str = "in_features") -> Matrix:
    swap_(model, find_weight(model, name), matrix, matrix_rows=rows, bias_shift=shift)
    return matrix


@pytest.mark.parametrize("rows", ["in_features", "out_features"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_shift_is_added_and_a_missing_bias_made(kind: Any, rows: str) -> None:
    model = Model()
    bias, shift = model.first.bias, torch.randn(8)
    assert [(w.name, w.bias) for w in find_weights(model)] == [
        ("conv", False),
        ("first", True),
        ("second", False),
        ("words", False),
        ("head", True),
    ]
    before = bias.detach().clone()
    turn = rows == "out_features"
    matrix = swapped(model, "first", kind(8, 6) if turn else kind(6, 8), shift, rows)
    x, dense = torch.randn(3, 6), matrix.dense().T if turn else matrix.dense()
    torch.testing.assert_close(model.first(x), x @ dense + before + shift)
    assert not model.first.gained_bias
    assert torch.equal(bias, before)  # the old parameter is not written to

    matrix, shift = swapped(model, "second", kind(5, 8) if turn else kind(8, 5), torch.randn(5), rows), torch.randn(5)
    x, dense = torch.randn(3, 8), matrix.dense().T if turn else matrix.dense()
    assert model.second.gained_bias
    torch.testing.assert_close(model.second(x) - model.second.bias, x @ dense)
    assert "second.bias" in model.state_dict()

    shift = torch.randn(6)
    matrix = swapped(model, "conv", low_rank(6, 18) if turn else low_rank(18, 6), shift, rows)
    x, dense = torch.randn(1, 2, 4, 4), matrix.dense().T if turn else matrix.dense()
    expected = nn.functional.conv2d(x, dense.T.reshape(6, 2, 3, 3), shift)
    torch.testing.assert_close(model.conv(x), expected)


def test_a_bias_that_is_listed_twice_stays_one() -> None:
    model = Model()
    swapped(model, "head", low_rank(5, 9), torch.ones(9))
    assert model.bias is model.head.bias
    other = Model()
    other.second = nn.Linear(8, 9)
    other.second.bias = other.head.bias
    with pytest.raises(KflatsError, match="another layer has the same bias"):
        swap_(other, find_weight(other, "head"), low_rank(5, 9), bias_shift=torch.ones(9))
    assert type(other.head) is nn.Linear


def test_an_error_later_on_brings_the_old_biases_back() -> None:
    model = Model()
    bias, before = model.head.bias, model.head.bias.detach().clone()
    with pytest.raises(RuntimeError), unchanged_on_error(model):  # noqa: PT012
        swapped(model, "head", low_rank(5, 9), torch.ones(9))
        swapped(model, "second", low_rank(8, 5), torch.ones(5))
        raise RuntimeError
    assert model.head.bias is model.bias is bias
    assert torch.equal(bias, before)
    assert model.second.bias is None


def test_frozen_stays_frozen() -> None:
    model = Model()
    for layer in (model.first, model.second):
        layer.weight.requires_grad_(False)
    swapped(model, "first", low_rank(6, 8), torch.ones(8))
    swapped(model, "second", low_rank(8, 5), torch.ones(5))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "first.bias" in trained
    assert not trained & {"first.weight", "first.basis", "second.weight", "second.basis", "second.bias"}


@pytest.mark.parametrize(
    ("name", "shift", "message"),
    [
        ("words", torch.ones(5), "an embedding has no bias"),
        ("first", torch.ones(6), r"shape \(6,\) does not fit .*a number for each output"),
        ("first", torch.full((8,), float("nan")), "not finite"),
    ],
)
def test_bad_shifts_are_refused(name: str, shift: Tensor, message: str) -> None:
    model = Model()
    weight = find_weight(model, name)
    with pytest.raises(KflatsError, match=message):
        swap_(model, weight, low_rank(*weight.shape), bias_shift=shift)
    assert find_weight(model, name) == weight


def test_bad_rows_are_refused() -> None:
    model = Model()
    with pytest.raises(KflatsError, match="outputs as rows are not supported"):
        swap_(model, find_weight(model, "words"), low_rank(5, 7), matrix_rows="out_features")


def all_swapped(model: Model) -> Model:
    swapped(model, "conv", interpolative(18, 6), torch.randn(6))
    swapped(model, "first", flats(8, 6), torch.randn(8), "out_features")
    swapped(model, "second", flats(8, 5), torch.randn(5))
    swapped(model, "head", low_rank(5, 9), torch.randn(9))
    return model


def test_a_plain_folder_keeps_what_a_layer_gained(tmp_path: Path) -> None:
    model = all_swapped(Model())
    kflats.save(model, tmp_path)
    loaded = Model()
    kflats.load_(loaded, tmp_path)
    x = torch.randn(2, 2, 5, 5)
    assert torch.equal(loaded(x), model(x))
    assert loaded.bias is loaded.head.bias
    assert (loaded.conv.gained_bias, loaded.first.gained_bias, loaded.second.gained_bias) == (True, False, True)
    kflats.save(loaded, tmp_path / "again")
    third = Model()
    kflats.load_(third, tmp_path / "again")
    assert torch.equal(third(x), model(x))

    biased = Model()
    biased.second = nn.Linear(8, 5)
    with pytest.raises(KflatsError, match="gets a bias beside its own"):
        kflats.load_(biased, tmp_path)


def test_restoring_removes_what_a_layer_gained_and_nothing_else() -> None:
    model = all_swapped(Model())
    x = torch.randn(2, 2, 5, 5)
    with torch.no_grad():
        gained = model.conv.bias.clone(), model.second.bias.clone()
        for bias in (model.conv.bias, model.second.bias):
            bias.zero_()
    expected = model.double()(x.double())  # a product of factors and their dense matrix differ in the last digits
    restore_(model)
    assert model.conv.bias is None
    assert model.second.bias is None
    assert all(bool(bias.abs().sum() > 0) for bias in gained)
    torch.testing.assert_close(model(x.double()), expected)
    assert model.state_dict().keys() == Model().state_dict().keys()
    assert model.bias is model.head.bias
