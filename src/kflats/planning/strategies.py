"""Shares: a budget divided among weights, uniformly or by what the loss says; some stay dense."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from kflats.common.errors import KflatsError
from kflats.common.formatting import number, size, visible
from kflats.model.weights import dense_weight
from kflats.planning.calibration_data import CalibrationData
from kflats.planning.candidates import Candidates, curve_of, offers
from kflats.planning.costs import WeightCosts, bias_bytes
from kflats.planning.fixed_decisions import check_casts, joined, left_dense, settle
from kflats.planning.knapsack import Choice, Curve, allocate
from kflats.planning.proportional import bias_of, counted, uniform
from kflats.planning.selection import Selected, weighting_form
from kflats.recipe.budget import Budget
from kflats.recipe.plan import Decision, as_cast
from kflats.recipe.recipe import brief

__all__ = ["Allocation", "Shares", "bias_bytes", "share_out"]

Allocation = Literal["auto", "uniform", "loss"]
"""How weights share a budget: "uniform": the same share of bytes (or ranks) for each; "loss": where they save most
loss, weights being left dense where that pays; "auto": by loss where every importance is in its units."""

_REFILLS = 4
_UNJUDGED = "the data says nothing about it: its share of the budget, every row counting the same"


@dataclass(frozen=True)
class Shares:
    """What each weight gets, and how that was decided: "uniform" or "loss"."""

    decisions: tuple[Decision, ...]
    allocation: str


def share_out(
    model: nn.Module,
    selected: Sequence[Selected],
    notes: Sequence[str],
    budget: Budget,
    data: CalibrationData,
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
        WeightCosts(chosen.weight, chosen.recipe, chosen.named, budget.counts_labels, note)
        for chosen, note in zip(selected, notes, strict=True)
    ]
    settled = {item.weight.name: made for item in items if (made := settle(item, data)) is not None}
    open_items = [item for item in items if item.weight.name not in settled]
    kept = sum(_price(item, settled[item.weight.name]) for item in items if item.weight.name in settled)
    sizes = {item.itemsize for item in open_items or items}
    if budget.kind in ("params", "ranks") and any(item.recipe.is_coded or item.recipe.chooses for item in open_items):
        raise KflatsError(
            f"a budget of {budget} says nothing of codes",
            cause="integers of different lengths are stored, not numbers",
            hint='a budget in bytes or per cent: "4MB", "10%"',
        )
    if budget.kind in ("params", "ranks") and any(made.recipe.is_cast for made in settled.values()):
        raise KflatsError(
            f"a budget of {budget} says nothing of types",
            cause="a weight has as many numbers in float16 as in float32",
            hint='a budget in bytes or per cent: "4MB", "60%"',
        )
    if budget.kind == "params" and len(sizes) > 1:
        raise KflatsError("a budget of parameters needs weights of one stored type", hint="a budget in bytes")
    by_loss = _by_loss(open_items, allocation)
    if budget.kind == "ranks":
        shared = _at_ranks(model, open_items, budget.amount, data, by_loss)
        return _shares(items, settled | shared, by_loss)
    allowed = budget.stored_bytes([item.weight for item in items], model_bytes, sizes.pop())
    check_casts(settled, budget, kept, allowed)
    total = sum(item.dense for item in items)
    ready = [_settle_bias(model, item, allowed * item.dense // total, data) for item in open_items]
    if by_loss:

        def room(found: dict[str, Decision]) -> int:
            """Bytes for the open weights if ``found`` is what becomes of them."""
            whole = _of_one_tensor([*settled.values(), *found.values()])
            return budget.stored_bytes([item.weight for item in items], model_bytes, items[0].itemsize, whole) - kept

        found = _loss(model, ready, allowed - kept, data, room if budget.scope == "file" else None)
    else:
        found = uniform(counted(model, ready, allowed - kept), allowed - kept, data)
    return _shares(items, settled | found, by_loss)


def _price(item: WeightCosts, decision: Decision) -> int:
    """What a decision takes of the budget, as that counts."""
    return item.dense if decision.recipe.is_dense else decision.budget_bytes


def _by_loss(items: Sequence[WeightCosts], allocation: str) -> bool:
    """Whether errors are in units of the loss; refused where that is asked for and is not so."""
    if any(item.recipe.chooses for item in items):
        if allocation == "uniform":
            raise KflatsError("Auto() chooses by what each byte saves", hint='allocation="auto", or another method')
        return True
    strange = _strange(items)
    if allocation == "loss" and strange:
        raise KflatsError(
            f'allocation="loss" cannot compare {brief(strange[0].recipe.importance)} of {strange[0].weight.name!r}',
            cause="its errors are not in units of a loss",
            hint='KroneckerFisher(), TwoSided() or RowFisher() for every weight, or allocation="uniform"',
        )
    return allocation == "loss" or (allocation == "auto" and not strange and len(items) > 1)


def _strange(items: Sequence[WeightCosts]) -> list[WeightCosts]:
    """Those whose errors are not in units of a loss."""
    return [item for item in items if not weighting_form(item.recipe, item.weight).loss_units]


def _settle_bias(model: nn.Module, item: WeightCosts, share: int, data: CalibrationData) -> WeightCosts:
    """A layer without a bias gets one where that loses less in ``share`` bytes than doing without."""
    if not item.recipe.importance.needs:
        return item
    weighting = data.weigh(item.weight, item.recipe)
    price = bias_bytes(item.weight, item.recipe, weighting, item.counts_labels)
    if not price:
        return item
    bare = replace(item, recipe=replace(item.recipe, importance=item.recipe.importance.uncentred()))
    with_bias, without = item.rank_within(share - price), item.rank_within(share)
    if with_bias:
        table, other = dense_weight(model, item.weight), data.weigh(item.weight, bare.recipe)
        gained = data.curve(table, item.weight, item.recipe, weighting)[with_bias]
        if gained < data.curve(table, item.weight, bare.recipe, other)[without]:
            return item
    return bare


def _of_one_tensor(decisions: Iterable[Decision]) -> frozenset[str]:
    """Names of weights that a file holds as it did, under one name, if in another type."""
    return frozenset(made.weight.name for made in decisions if made.recipe.is_dense or made.recipe.is_cast)


def _loss(
    model: nn.Module,
    items: Sequence[WeightCosts],
    allowed: int,
    data: CalibrationData,
    room: Callable[[dict[str, Decision]], int] | None = None,
) -> dict[str, Decision]:
    """Where bytes save most loss; weights of which the data says nothing get their share of bytes.

    For ``Auto()`` without units of a loss: where they save most of the sum of relative errors. ``room``: more than
    ``allowed`` where decisions are such that a file's header needs less than was kept free for it.
    """
    relative = any(item.recipe.chooses for item in items) and bool(_strange(items))
    judged = [item for item in items if relative or data.weigh(item.weight, item.recipe).loss_units]
    unjudged = [replace(item, note=joined(item.note, _UNJUDGED)) for item in items if item not in judged]
    part = allowed * sum(item.dense for item in unjudged) // max(1, sum(item.dense for item in items))
    equal = uniform(counted(model, unjudged, part), part, data) if unjudged else {}
    made = [offers(model, item, data) for item in judged]
    curves = [curve_of(item, offered, relative) for item, offered in zip(judged, made, strict=True)]

    def shared(nbytes: int) -> dict[str, Decision]:
        rest, found = nbytes - sum(decision.budget_bytes for decision in equal.values()), dict(equal)
        for item, curve, offered, choice in zip(judged, curves, made, allocate(curves, rest).choices, strict=True):
            found[item.weight.name] = _chosen(item, curve, offered, choice)
        return _topped_up(found, rest - sum(found[item.weight.name].budget_bytes for item in judged))

    found = shared(allowed)
    return found if room is None else _refilled(shared, found, allowed, room)


def _chosen(item: WeightCosts, curve: Curve, offered: Candidates, choice: Choice) -> Decision:
    if choice.rank is None:
        what = "codes" if item.recipe.is_coded or item.recipe.chooses else "factors"
        return left_dense(item, f"dense: {what} of it would lose more than they save elsewhere")
    chosen, whole = offered.candidates[choice.rank - 1], float(curve.errors[0])
    lost = number(choice.error / whole if whole > 0 else 0.0)
    note = joined(item.note, chosen.note + (f", {chosen.error_kind} {lost}" if chosen.error_kind else ""))
    recipe = as_cast(item.weight, replace(item.recipe, method=chosen.method, codec=chosen.codec))
    return Decision(item.weight, recipe, choice.cost, note)


def _refilled(
    shared: Callable[[int], dict[str, Decision]],
    found: dict[str, Decision],
    allowed: int,
    room: Callable[[dict[str, Decision]], int],
) -> dict[str, Decision]:
    """Shared out again while the header needs less than was kept free for it: it is for codes that most is kept."""
    more = room(found)
    for _ in range(_REFILLS):
        if more <= allowed:
            break
        other = shared(more)
        able = room(other)
        if able >= more:  # what was chosen of more bytes leaves them free
            found, allowed = other, more
        more = able
    return found


def _topped_up(found: dict[str, Decision], spare: int) -> dict[str, Decision]:
    """What the steps between sizes leave over goes to the largest weight that can have any size."""
    largest = max((d for d in found.values() if d.recipe.codec.any_size), key=lambda d: d.budget_bytes, default=None)
    if largest is None:
        return found
    nbytes = min(largest.budget_bytes + max(spare, 0), largest.weight.nbytes)
    return found | {largest.weight.name: replace(largest, budget_bytes=nbytes)}


def _at_ranks(
    model: nn.Module, items: Sequence[WeightCosts], ratio: float, data: CalibrationData, by_loss: bool
) -> dict[str, Decision]:
    """The same share of the full rank for each (FWSVD's rank ratio); by loss, all of these bytes shared out anew."""
    settled, found = [], {}
    for item in items:
        rank = max(1, round(ratio * item.full))
        one = _settle_bias(model, item, item.cost(rank), data)
        price = item.cost(rank) + bias_of(one, data)
        settled.append(one)
        if price >= item.dense:
            what = f"rank {rank} of {item.full} takes {size(price)} of {size(item.dense)}"
            found[item.weight.name] = left_dense(item, f"dense: {what}, so it would not shrink")
        else:
            note = joined(item.note, f"rank {rank} of {item.full}")
            found[item.weight.name] = Decision(one.weight, one.recipe, price, note)
    if by_loss:
        allowed = sum(
            item.dense if _is_dense(found[item.weight.name]) else found[item.weight.name].budget_bytes
            for item in settled
        )
        found = _loss(model, settled, allowed, data)
    return found


def _is_dense(decision: Decision | None) -> bool:
    return decision is None or decision.recipe.is_dense


def _shares(items: Sequence[WeightCosts], found: dict[str, Decision], by_loss: bool) -> Shares:
    """All decisions in the order of ``items``, with a warning where small heads were cut without being judged."""
    whole = {name for name, decision in found.items() if decision.recipe.is_dense or decision.recipe.is_cast}
    few = [i for i in items if i.is_small_head and not i.named and i.weight.name not in whole]
    if few and not by_loss:
        names = ", ".join(visible(item.weight.name) for item in few[:3]) + (", ..." if len(few) > 3 else "")
        warnings.warn(
            f"{names}: of so few outputs some are lost with the ranks, and shares are equal whatever that costs; "
            'KeepDense() keeps such a head, allocation="loss" weighs it',
            stacklevel=2,
        )
    return Shares(tuple(found[item.weight.name] for item in items), "loss" if by_loss else "uniform")
