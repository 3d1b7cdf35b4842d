"""The candidates of one weight: the ways to store it, with bytes and error, from which a budget chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import nn

from kflats.codecs import CODECS, Candidate, Table
from kflats.model.weights import dense_weight
from kflats.numerics.rows import TensorRows
from kflats.planning.calibration_data import CalibrationData
from kflats.planning.costs import WeightCosts, bias_bytes
from kflats.planning.knapsack import Curve
from kflats.recipe.recipe import Recipe


@dataclass(frozen=True)
class Candidates:
    """Ways to store one weight.

    Args:
        candidates: the ways. bias: bytes of a bias that the layer gains with each. whole: the error if nothing were
            stored.
    """

    candidates: tuple[Candidate, ...]
    bias: int
    whole: float


def offers(model: nn.Module, item: WeightCosts, data: CalibrationData) -> Candidates:
    """All that the budget may choose from for one weight."""
    recipe, weighting, table = item.recipe, data.weigh(item.weight, item.recipe), dense_weight(model, item.weight)
    bias = bias_bytes(item.weight, recipe, weighting, item.counts_labels)
    spectrum = data.curve(table, item.weight, recipe, weighting).clamp_min(0)
    if recipe.is_coded or recipe.chooses:
        turned = recipe.matrix_rows == "out_features"
        rows, here = TensorRows(table.T if turned else table), weighting.transposed() if turned else weighting
        dtype = getattr(torch, item.weight.dtype)
        seen = Table(rows, here.to(table.device), dtype, spectrum)
        pairs_only = item.weight.places[0].role == "conv2d"
        return Candidates(candidates(recipe, seen, pairs_only=pairs_only), bias, float(spectrum[0]))
    method = recipe.method
    pair = method.produces == "pair"
    kind = "relative error" if method.prefix_optimal else "relative error of an SVD" if pair else ""
    ranks = [
        Candidate(
            method,
            recipe.codec,
            item.cost(rank),
            float(spectrum[rank]),
            f"rank {rank} of {item.full}" if pair else f"the bytes of rank {rank} of {item.full}",
            kind,
        )
        for rank in filter(item.is_choice, range(1, item.full + 1))
    ]
    return Candidates(tuple(ranks), bias, float(spectrum[0]))


def candidates(recipe: Recipe, table: Table, *, pairs_only: bool = False) -> tuple[Candidate, ...]:
    """Ways to store ``table`` by the codec of ``recipe``, or by all codecs where its method chooses.

    Args:
        pairs_only: no integers: a convolution becomes two convolutions.

    >>> from kflats.importance.weighting import Weighting
    >>> from kflats.methods import SVD, Auto
    >>> rows = TensorRows(torch.randn(64, 16, generator=torch.Generator().manual_seed(0)))
    >>> table = Table(rows, Weighting(), torch.float32, SVD().spectrum(rows, Weighting()))
    >>> sorted({type(candidate.codec).__name__ for candidate in candidates(Recipe(Auto()), table)})
    ['Float', 'Integer', 'Transform']
    """
    listed = [
        candidate
        for one in alternatives(recipe, table.rows.shape)
        if not (pairs_only and one.is_coded) and table.weighting.kinds <= one.codec.accepts(one.method)
        for candidate in one.codec.candidates(one.method, table)
    ]
    return tuple(one for one in listed if 0 < one.nbytes < table.nbytes and isfinite(one.error))


def alternatives(recipe: Recipe, shape: tuple[int, int]) -> Iterator[Recipe]:
    """The recipe, or the recipes that it stands for: what every codec offers a weight of this shape."""
    if not recipe.chooses:
        yield recipe
        return
    for codec in CODECS.all_kinds():
        for method, value in codec.automatic(shape):
            yield replace(recipe, method=method, codec=value)


def curve_of(item: WeightCosts, offers: Candidates, relative: bool) -> Curve:
    """The errors and costs of all candidates. Index 0 stands for storing nothing, which cannot be chosen."""
    unit = offers.whole if relative and offers.whole > 0 else 1.0
    errors = (
        torch.tensor([offers.whole, *(candidate.error for candidate in offers.candidates)], dtype=torch.float64) / unit
    )
    costs = torch.tensor([0, *(candidate.nbytes + offers.bias for candidate in offers.candidates)])
    return Curve(item.weight.name, errors, costs, item.dense)
