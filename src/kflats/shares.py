"""Shares: a budget divided among weights, uniformly or by what the loss says; some stay dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from kflats.allocate import Curve, allocate
from kflats.budget import Budget, split
from kflats.calibration import Data
from kflats.errors import KflatsError, UnreachedError
from kflats.methods import SVD, Dense
from kflats.nn.matrix import label_dtype
from kflats.places import Weight, dense_weight
from kflats.plan import Decision
from kflats.recipe import Recipe, brief
from kflats.selection import Selected, weighting_of
from kflats.tables import number, size
from kflats.weighting import Weighting

Allocation = Literal["auto", "uniform", "loss"]
"""How weights share a budget: "uniform": the same share of bytes (or ranks) for each; "loss": where they save most
loss, weights being left dense where that pays; "auto": by loss where every importance is in its units."""


@dataclass(frozen=True)
class Shares:
    """What each weight gets, and how that was decided: "uniform" or "loss"."""

    decisions: tuple[Decision, ...]
    allocation: str


@dataclass(frozen=True)
class _Item:
    """One weight with its prices, in the bytes that the budget counts."""

    weight: Weight
    recipe: Recipe
    named: bool
    counts_labels: bool
    note: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix that the method is given."""
        n, d = self.weight.shape
        return (d, n) if self.recipe.rows == "outputs" else (n, d)

    @property
    def itemsize(self) -> int:
        return int(self.recipe.codec.itemsize(self.weight.dtype))

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
    def low_rank(self) -> SVD:
        """The method whose ranks measure bytes: other methods are given the bytes of a low-rank pair."""
        return self.recipe.method if isinstance(self.recipe.method, SVD) else SVD()

    def cost(self, rank: int) -> int:
        """Bytes of a pair of ``rank``, without a bias."""
        index = 0 if self.counts_labels else self.low_rank.index_bytes(self.shape)
        return self.low_rank.cost(self.shape, rank, self.itemsize) - index

    def is_choice(self, rank: int) -> bool:
        """Whether the method can live on the bytes of ``rank``, and stores fewer numbers than the weight has."""
        n, d = self.shape
        numbers = self.low_rank.cost(self.shape, rank, 1) - self.low_rank.index_bytes(self.shape)
        return self.cost(rank) >= self.least and numbers < n * d

    @property
    def least(self) -> int:
        """The least bytes that the method can live on."""
        k = getattr(self.recipe.method, "k", None) or 1
        n, d = self.shape
        labels = n * label_dtype(k).itemsize if k > 1 and self.counts_labels else 0
        return max(self.cost(1), (n + k * d) * self.itemsize + labels) if k > 1 else self.cost(1)


def bias_bytes(weight: Weight, recipe: Recipe, weighting: Weighting, counts_labels: bool) -> int:
    """What a bias costs that the layer gains because its inputs are centred; 0 where it has one, or needs none."""
    if weighting.mean is None or weight.bias or weight.places[0].role == "embedding":
        return 0
    n, d = weight.shape
    return d * (weight.nbytes // (n * d) if counts_labels else recipe.codec.itemsize(weight.dtype))


def share_out(
    model: nn.Module,
    selected: Sequence[Selected],
    notes: Sequence[str],
    budget: Budget,
    data: Data,
    allocation: Allocation,
    model_bytes: int,
) -> Shares:
    """Decide the bytes of every weight; ``notes`` are kept with them.

    Args:
        model_bytes: of all weight files, for budgets that bound those.

    Raises:
        KflatsError: a budget that cannot be met, or shared by errors that cannot be compared.
    """
    if allocation not in ("auto", "uniform", "loss"):
        raise KflatsError(f"allocation={allocation!r} is unknown", hint='"auto", "uniform" or "loss"')
    items = [
        _Item(chosen.weight, chosen.recipe, chosen.named, budget.counts_labels, note)
        for chosen, note in zip(selected, notes, strict=True)
    ]
    reasons = {item.weight.name: reason for item in items if (reason := _left_dense(item, data)) is not None}
    open_items = [item for item in items if item.weight.name not in reasons]
    kept = sum(item.dense for item in items if item.weight.name in reasons)
    sizes = {item.itemsize for item in open_items or items}
    if budget.kind == "params" and len(sizes) > 1:
        raise KflatsError("a budget of parameters needs weights of one stored type", hint="a budget in bytes")
    by_loss = _by_loss(open_items, allocation)
    if budget.kind == "ranks":
        return _at_ranks(model, items, reasons, budget.amount, data, by_loss)
    allowed = budget.stored_bytes([item.weight for item in items], model_bytes, sizes.pop())
    total = sum(item.dense for item in items)
    settled = [_settle_bias(model, item, allowed * item.dense // total, data) for item in open_items]
    if by_loss:
        found = _loss(model, settled, allowed - kept, data)
    else:
        found = _uniform(settled, allowed - kept, data)
    return Shares(_in_order(items, reasons, found), "loss" if by_loss else "uniform")


def _left_dense(item: _Item, data: Data) -> str | None:
    """Why a weight is left as it is whatever the budget; None where it is not."""
    if isinstance(item.recipe.method, Dense):
        return item.note or "dense: asked for"
    if item.recipe.importance.needs:
        try:
            data.weigh(item.weight, item.recipe)
        except UnreachedError:
            if item.named:
                raise
            return "dense: the calibration data says nothing about it (the loss does not depend on it)"
    return None


def _by_loss(items: Sequence[_Item], allocation: str) -> bool:
    """Whether errors are in units of the loss; refused where that is asked for and is not so."""
    strange = [item for item in items if not weighting_of(item.recipe, item.weight).loss_units]
    if allocation == "loss" and strange:
        raise KflatsError(
            f'allocation="loss" cannot compare {brief(strange[0].recipe.importance)} of {strange[0].weight.name!r}',
            cause="its errors are not in units of a loss",
            hint='KroneckerFisher(), TwoSided() or RowFisher() for every weight, or allocation="uniform"',
        )
    return allocation == "loss" or (allocation == "auto" and not strange and len(items) > 1)


def _settle_bias(model: nn.Module, item: _Item, share: int, data: Data) -> _Item:
    """A layer without a bias gets one where that loses less in ``share`` bytes than doing without."""
    if not item.recipe.importance.needs:
        return item
    weighting = data.weigh(item.weight, item.recipe)
    price = bias_bytes(item.weight, item.recipe, weighting, item.counts_labels)
    if not price:
        return item
    bare = replace(item, recipe=replace(item.recipe, importance=replace(item.recipe.importance, centred=False)))
    with_bias, without = _rank(item, share - price), _rank(item, share)
    if with_bias:
        table, other = dense_weight(model, item.weight), data.weigh(item.weight, bare.recipe)
        gained = data.curve(table, item.weight, item.recipe, weighting)[with_bias]
        if gained < data.curve(table, item.weight, bare.recipe, other)[without]:
            return item
    return bare


def _rank(item: _Item, nbytes: int) -> int:
    """The largest rank that ``nbytes`` hold."""
    return next((r for r in range(item.full, 0, -1) if item.cost(r) <= nbytes), 0)


def _bias(item: _Item, data: Data) -> int:
    if not item.recipe.importance.needs:
        return 0
    weighting = data.weigh(item.weight, item.recipe)
    return bias_bytes(item.weight, item.recipe, weighting, item.counts_labels)


def _uniform(items: Sequence[_Item], allowed: int, data: Data) -> dict[str, Decision]:
    """The same share of bytes for each; those found by a pattern that cannot live on theirs stay dense."""
    found: dict[str, Decision] = {}
    least = {item.weight.name: item.least + _bias(item, data) for item in items if not item.named}
    while True:
        rest = [item for item in items if item.weight.name not in found]
        if not rest:
            return found
        if allowed < 1:
            raise KflatsError(
                "the budget is spent on weights that stay dense; nothing is left for the others",
                cause=f"{len(found)} weights cannot be factored in their share" if found else "weights left dense",
                hint="a larger budget, or fewer weights",
            )
        total = sum(item.dense for item in rest)
        if allowed >= total:
            shares: Sequence[int] = [item.dense for item in rest]
        else:
            shares = split(allowed, [item.weight for item in rest]) if rest[0].counts_labels else _parts(allowed, rest)
        stuck = [item for item, share in zip(rest, shares, strict=True) if share < least.get(item.weight.name, 0)]
        if not stuck:
            pairs = zip(rest, shares, strict=True)
            made = {item.weight.name: Decision(item.weight, item.recipe, share, item.note) for item, share in pairs}
            return found | made
        for item in stuck:
            reason = f"dense: its share of the budget holds no {brief(item.recipe.method)} of it"
            found[item.weight.name] = _dense(item, reason)
            allowed -= item.dense


def _parts(allowed: int, items: Sequence[_Item]) -> list[int]:
    total, done = sum(item.dense for item in items), 0
    parts: list[int] = []
    for item in items:
        done += item.dense
        parts.append(allowed * done // total - sum(parts))
    return parts


def _loss(model: nn.Module, items: Sequence[_Item], allowed: int, data: Data) -> dict[str, Decision]:
    """Where bytes save most loss."""
    curves, extras = [], []
    for item in items:
        weighting = data.weigh(item.weight, item.recipe)
        if not weighting.loss_units:
            raise KflatsError(
                f"the importance of {item.weight.name!r} is uniform, which cannot be compared with the others",
                cause="the calibration data never reached it",
                hint='allocation="uniform", other data, or leave the weight out',
            )
        bias = bias_bytes(item.weight, item.recipe, weighting, item.counts_labels)
        errors = data.curve(dense_weight(model, item.weight), item.weight, item.recipe, weighting)
        ranks = [r for r in range(item.full + 1) if r == 0 or item.is_choice(r)]
        costs = [item.cost(r) + bias for r in ranks]
        curves.append(_curve(item, ranks, errors, costs))
        extras.append(ranks)
    found = {}
    for item, curve, ranks, choice in zip(items, curves, extras, allocate(curves, allowed).choices, strict=True):
        if choice.rank is None:
            found[item.weight.name] = _dense(item, "dense: factors of it would lose more than they save elsewhere")
            continue
        rank = ranks[choice.rank]
        whole = float(curve.errors[0])
        lost = number(choice.error / whole if whole > 0 else 0.0)
        note = f"rank {rank} of {item.full}, relative error {lost}"
        if not isinstance(item.recipe.method, SVD):
            note = f"the bytes of rank {rank} of {item.full}"
        found[item.weight.name] = Decision(item.weight, item.recipe, choice.cost, _joined(item.note, note))
    return found


def _curve(item: _Item, ranks: Sequence[int], errors: Tensor, costs: Sequence[int]) -> Curve:
    return Curve(item.weight.name, errors[list(ranks)].clamp_min(0), torch.tensor(costs), item.dense)


def _at_ranks(
    model: nn.Module, items: Sequence[_Item], reasons: dict[str, str], ratio: float, data: Data, by_loss: bool
) -> Shares:
    """The same share of the full rank for each (FWSVD's rank ratio); by loss, all of these bytes shared out anew."""
    settled, found = [], {}
    for item in items:
        if item.weight.name in reasons:
            continue
        rank = max(1, round(ratio * item.full))
        one = _settle_bias(model, item, item.cost(rank), data)
        price = item.cost(rank) + _bias(one, data)
        settled.append(one)
        if price >= item.dense:
            what = f"rank {rank} of {item.full} takes {size(price)} of {size(item.dense)}"
            found[item.weight.name] = _dense(item, f"dense: {what}, so it would not shrink")
        else:
            note = _joined(item.note, f"rank {rank} of {item.full}")
            found[item.weight.name] = Decision(one.weight, one.recipe, price, note)
    if by_loss:
        allowed = sum(
            item.dense if _is_dense(found[item.weight.name]) else found[item.weight.name].budget_bytes
            for item in settled
        )
        found = _loss(model, settled, allowed, data)
    return Shares(_in_order(items, reasons, found), "loss" if by_loss else "uniform")


def _is_dense(decision: Decision) -> bool:
    return isinstance(decision.recipe.method, Dense)


def _dense(item: _Item, note: str) -> Decision:
    return Decision(item.weight, Recipe(Dense()), item.weight.nbytes, _joined(item.note, note))


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _in_order(items: Sequence[_Item], reasons: dict[str, str], found: dict[str, Decision]) -> tuple[Decision, ...]:
    return tuple(
        replace(_dense(item, ""), note=reasons[item.weight.name])
        if item.weight.name in reasons
        else found[item.weight.name]
        for item in items
    )
