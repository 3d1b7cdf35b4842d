"""The candidates of one weight: the ways to store it, with bytes and error, from which a budget chooses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import cast

from torch import nn

from kflats.codecs import CODECS, Candidate, Codec, Float, Table
from kflats.common.formatting import number
from kflats.common.workers import Packed
from kflats.importance.protocol import Weighting
from kflats.methods import SVD, KeepDense, Method
from kflats.model.weights import Weight
from kflats.planning.calibration_data import CalibrationData
from kflats.planning.knapsack import Choice, Options
from kflats.recipe.recipe import Decision, Recipe, as_cast, from_json, to_json

_FEW = 10  # outputs of a small head
_LOPSIDED = 10  # inputs to an output


@dataclass(frozen=True)
class WeightCosts:
    """One weight and its costs, in the bytes that the budget counts.

    Args:
        named: whether its own name was given, and not a pattern.
        counts_labels: whether the budget counts row labels.
        note: for the plan.
        counted: bytes of its codes, if they have one size and were counted because their bound did not fit.
    """

    weight: Weight
    recipe: Recipe
    named: bool
    counts_labels: bool
    note: str = ""
    counted: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix that the method is given."""
        n, d = self.weight.shape
        return (d, n) if self.recipe.matrix_rows == "out_features" else (n, d)

    @property
    def itemsize(self) -> int:
        """Bytes of one stored number."""
        return self.recipe.torch_dtype(self.weight.dtype).itemsize

    @property
    def full(self) -> int:
        """The largest rank."""
        return min(self.shape)

    @property
    def dense(self) -> int:
        """Bytes of the weight as it is."""
        n, d = self.shape
        return self.weight.nbytes if self.counts_labels else n * d * self.itemsize

    @property
    def low_rank(self) -> Method:
        """The method that turns ranks into bytes: other methods are given the bytes of a pair."""
        return self.recipe.method if self.recipe.method.produces == "pair" else SVD()

    def cost(self, rank: int) -> int:
        """Bytes of a pair of ``rank``, without a bias."""
        index = 0 if self.counts_labels else self.low_rank.index_bytes(self.shape)
        return self.low_rank.cost(self.shape, rank, self.itemsize) - index

    def is_choice(self, rank: int) -> bool:
        """Whether the bytes of ``rank`` are enough for the method, and fewer numbers than the weight's are stored."""
        n, d = self.shape
        numbers = self.low_rank.cost(self.shape, rank, 1) - self.low_rank.index_bytes(self.shape)
        return self.cost(rank) >= self.least and numbers < n * d

    @property
    def is_small_head(self) -> bool:
        """Whether a pattern or a word chose this layer from many inputs to a few outputs, such as a classifier."""
        n, d = self.weight.shape
        linear = self.weight.places[0].role in ("linear", "conv1d") and not self.named
        return linear and 1 < d <= _FEW and n >= _LOPSIDED * d

    @property
    def least(self) -> int:
        """The least bytes that codec and method can be given."""
        recipe = self.recipe
        return recipe.codec.min_bytes(recipe.method, self.shape, self.itemsize, counts_labels=self.counts_labels)

    @property
    def fixed_bytes(self) -> int | None:
        """The bytes of its codes if they do not depend on its share, else None; a bound until they are counted."""
        if self.counted is not None:
            return self.counted
        return self.recipe.codec.fixed_bytes(self.recipe.method, self.shape, self.itemsize)

    def bias_bytes(self, data: CalibrationData) -> int:
        """Bytes of the bias that the layer gains under its importance; 0 for most layers."""
        if not self.recipe.importance.needs:
            return 0
        return bias_bytes(self.weight, self.recipe, data.weigh(self.weight, self.recipe), self.counts_labels)

    def decided(self, recipe: Recipe, nbytes: int, why: str = "") -> Decision:
        """The decision for ``recipe`` in ``nbytes``."""
        return Decision(self.weight, recipe, nbytes, "; ".join(filter(None, (self.note, why))))

    def left_dense(self, why: str) -> Decision:
        """The decision for a weight that stays as it is."""
        return self.decided(Recipe(KeepDense()), self.weight.nbytes, why)


def bias_bytes(weight: Weight, recipe: Recipe, weighting: Weighting, counts_labels: bool) -> int:
    """Bytes of a bias that the layer gains because its inputs are centred; 0 if it has or needs none."""
    if weighting.mean is None or weight.bias or weight.places[0].role == "embedding":
        return 0
    n, d = weight.shape
    return d * (weight.nbytes // (n * d) if counts_labels else recipe.torch_dtype(weight.dtype).itemsize)


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
            coded = item.recipe.is_coded or item.recipe.chooses
            stored = "codes" if coded else "factors"
            return item.left_dense(f"dense: {stored} of it would lose more than they save elsewhere")
        chosen = self.candidates[choice.option]
        lost = number(chosen.error / self.total if self.total > 0 else 0.0)
        recipe = as_cast(item.weight, replace(item.recipe, method=chosen.method, codec=chosen.codec))
        return item.decided(
            recipe, choice.cost, chosen.note + (f", {chosen.error_kind} {lost}" if chosen.error_kind else "")
        )


def passed_on(items: Sequence[WeightCosts], data: CalibrationData) -> Packed[WeightCandidates]:
    """How the candidates of a weight pass to other workers, who keep them in ``data`` for other budgets, and its
    spectra for reports."""

    values: dict[str, Method | Codec] = {}  # a weight has thousands of candidates, of a few values

    def value(text: str) -> Method | Codec:
        if text not in values:
            values[text] = cast(Method | Codec, from_json(json.loads(text)))
        return values[text]

    def pack(made: WeightCandidates) -> str:
        ways = [
            [json.dumps(to_json(one.method)), json.dumps(to_json(one.codec))]
            + [one.nbytes, one.error, one.note, one.error_kind]
            for one in made.candidates
        ]
        return json.dumps([ways, made.bias, made.total, data.spectra_of(made.item.weight)])

    def unpack(index: int, text: str) -> WeightCandidates:
        ways, bias, total, spectra = json.loads(text)
        data.take_spectra(spectra)
        made = tuple(
            Candidate(cast(Method, value(method)), cast(Codec, value(codec)), *rest) for method, codec, *rest in ways
        )
        return WeightCandidates(items[index], data.candidates(_key(items[index]), lambda: made), bias, total)

    return Packed(pack, unpack)


def _key(item: WeightCosts) -> str:
    return f"{item.weight.name} {item.recipe}"


def weight_candidates(model: nn.Module, item: WeightCosts, data: CalibrationData) -> WeightCandidates:
    """All ways to store one weight by its recipe."""
    recipe, table, full = item.recipe, data.table(model, item.weight, item.recipe), item.full
    total = table.total
    if recipe.is_coded or recipe.chooses:
        pairs_only = item.weight.places[0].role == "conv2d"
        own_type = item.weight.type_is_read
        ways = data.candidates(_key(item), lambda: candidates(recipe, table, pairs_only=pairs_only, own_type=own_type))
        return WeightCandidates(item, ways, item.bias_bytes(data), total)
    method = recipe.method
    pair = method.produces == "pair"
    kind = "relative error" if method.prefix_optimal else "relative error of an SVD" if pair else ""
    ranks = [
        Candidate(
            method,
            recipe.codec,
            item.cost(rank),
            float(table.spectrum[rank]),
            f"{'' if pair else 'the bytes of '}rank {rank} of {full}",
            kind,
        )
        for rank in filter(item.is_choice, range(1, full + 1))
    ]
    return WeightCandidates(item, tuple(ranks), item.bias_bytes(data), total)


def candidates(
    recipe: Recipe, table: Table, *, pairs_only: bool = False, own_type: bool = False
) -> tuple[Candidate, ...]:
    """Ways to store ``table`` by the codec of ``recipe``, or by all codecs if its method chooses.

    Args:
        pairs_only: without several flats of floating-point numbers, because a convolution becomes two convolutions.
        own_type: where the method chooses, with the table's own floating-point type in place of float16.

    >>> import torch
    >>> from kflats.methods import SVD, Auto
    >>> from kflats.numerics.rows import TensorRows
    >>> rows = TensorRows(torch.randn(64, 16, generator=torch.Generator().manual_seed(0)))
    >>> table = Table(rows, Weighting(), torch.float32, SVD().spectrum(rows, Weighting()))
    >>> sorted({type(candidate.codec).__name__ for candidate in candidates(Recipe(Auto()), table)})
    ['Feedback', 'Float', 'Integer', 'Transform']
    """
    ways = [recipe]
    if recipe.chooses:
        offers = (
            offer for codec in CODECS.all_kinds() for offer in codec.automatic(table.rows.shape, table.weighting.form)
        )
        ways = [replace(recipe, method=method, codec=codec) for method, codec in offers]
        if own_type:
            ways = [one if one.is_coded else replace(one, codec=Float()) for one in ways]
    listed = [
        candidate
        for one in ways
        if not (pairs_only and one.method.produces == "clusters" and not one.is_coded)
        and table.weighting.kinds <= one.codec.accepts(one.method)
        for candidate in one.codec.candidates(one.method, table)
    ]
    return tuple(one for one in listed if 0 < one.nbytes < table.nbytes and isfinite(one.error))
