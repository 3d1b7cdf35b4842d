"""The candidates of one weight: the ways to store it, with bytes and error, from which a budget chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import nn

from kflats.codecs import CODECS, Candidate, Table
from kflats.common.formatting import number
from kflats.model.weights import dense_weight
from kflats.numerics.rows import TensorRows
from kflats.planning.calibration_data import CalibrationData
from kflats.planning.costs import WeightCosts, gained_bias_bytes
from kflats.planning.fixed_decisions import joined, left_dense
from kflats.planning.knapsack import Choice, Options
from kflats.recipe.plan import Decision, as_cast
from kflats.recipe.recipe import Recipe


@dataclass(frozen=True)
class WeightCandidates:
    """The ways to store one weight.

    Args:
        candidates: the ways. bias: bytes of a bias that the layer gains with each of them.
        total: the error of a matrix of zeros.
    """

    item: WeightCosts
    candidates: tuple[Candidate, ...]
    bias: int
    total: float

    def options(self, relative: bool) -> Options:
        """The candidates as options of a budget; ``relative``: with errors as shares of ``total``."""
        unit = self.total if relative and self.total > 0 else 1.0
        errors = [candidate.error / unit for candidate in self.candidates]
        costs = [candidate.nbytes + self.bias for candidate in self.candidates]
        return Options(self.item.weight.name, errors, costs, self.item.dense)

    def decision(self, choice: Choice) -> Decision:
        """The decision for the chosen candidate."""
        item = self.item
        if choice.option is None:
            what = "codes" if item.recipe.is_coded or item.recipe.chooses else "factors"
            return left_dense(item, f"dense: {what} of it would lose more than they save elsewhere")
        chosen = self.candidates[choice.option]
        lost = number(chosen.error / self.total if self.total > 0 else 0.0)
        note = joined(item.note, chosen.note + (f", {chosen.error_kind} {lost}" if chosen.error_kind else ""))
        recipe = as_cast(item.weight, replace(item.recipe, method=chosen.method, codec=chosen.codec))
        return Decision(item.weight, recipe, choice.cost, note)


def weight_candidates(model: nn.Module, item: WeightCosts, data: CalibrationData) -> WeightCandidates:
    """All ways to store one weight by its recipe."""
    recipe, table = item.recipe, dense_weight(model, item.weight)
    bias, spectrum = gained_bias_bytes(item, data), data.spectrum(table, item.weight, recipe).clamp_min(0)
    total = float(spectrum[0])
    if recipe.is_coded or recipe.chooses:
        turned, weighting = recipe.matrix_rows == "out_features", data.weigh(item.weight, recipe)
        rows = TensorRows(table.T if turned else table)
        weighting = (weighting.transposed() if turned else weighting).to(table.device)
        view = Table(rows, weighting, getattr(torch, item.weight.dtype), spectrum)
        pairs_only = item.weight.places[0].role == "conv2d"
        return WeightCandidates(item, candidates(recipe, view, pairs_only=pairs_only), bias, total)
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
    return WeightCandidates(item, tuple(ranks), bias, total)


def candidates(recipe: Recipe, table: Table, *, pairs_only: bool = False) -> tuple[Candidate, ...]:
    """Ways to store ``table`` by the codec of ``recipe``, or by all codecs if its method chooses.

    Args:
        pairs_only: without integers, because a convolution becomes two convolutions.

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
    """The recipe; or, if its method chooses, the recipes that the codecs offer a weight of this shape."""
    if not recipe.chooses:
        yield recipe
        return
    for codec in CODECS.all_kinds():
        for method, value in codec.automatic(shape):
            yield replace(recipe, method=method, codec=value)
