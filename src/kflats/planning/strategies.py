"""A budget divided among weights, uniformly or by the loss; some weights stay dense."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from torch import nn

from kflats.common.errors import KflatsError
from kflats.common.formatting import size, visible
from kflats.model.weights import dense_weight
from kflats.planning.calibration_data import CalibrationData
from kflats.planning.candidates import weight_candidates
from kflats.planning.costs import WeightCosts, gained_bias_bytes
from kflats.planning.fixed_decisions import check_casts, fixed_decision, joined, left_dense
from kflats.planning.knapsack import allocate
from kflats.planning.proportional import counted, equal_shares
from kflats.planning.selection import weighting_form
from kflats.recipe.budget import Budget
from kflats.recipe.plan import Decision
from kflats.recipe.recipe import brief

Allocation = Literal["auto", "uniform", "loss"]
"""How weights share a budget. "uniform": each gets the same share of bytes (or ranks). "loss": bytes go where they save
most loss, and weights may stay dense. "auto": "loss" if every importance is in units of the loss."""

Decisions: TypeAlias = dict[str, Decision]
"""Decisions by the weight's name."""

_REFILLS = 4
_UNJUDGED = "no gradient reached it: an equal share of the budget, and every row counts the same"


def share_out(
    model: nn.Module,
    items: Sequence[WeightCosts],
    budget: Budget,
    data: CalibrationData,
    allocation: Allocation,
    file_bytes: int,
) -> tuple[tuple[Decision, ...], str]:
    """Decide the bytes of every weight; also how they were shared, "uniform" or "loss".

    Args:
        file_bytes: all weight files, for budgets that bound those.

    Raises:
        KflatsError: a budget that cannot be met, or shared by errors that cannot be compared.
    """
    if allocation not in ("auto", "uniform", "loss"):
        raise KflatsError(f"allocation={allocation!r} is unknown", hint="auto, uniform or loss")
    fixed = {item.weight.name: decision for item in items if (decision := fixed_decision(item, data)) is not None}
    open_items = [item for item in items if item.weight.name not in fixed]
    kept = sum(_cost(item, fixed[item.weight.name]) for item in items if item.weight.name in fixed)
    itemsizes = {item.itemsize for item in open_items or items}
    _check_kind(budget, open_items, fixed, itemsizes)
    by_loss = _by_loss(open_items, allocation)
    if budget.kind == "ranks":
        shared = _at_ranks(model, open_items, budget.amount, data, by_loss)
    else:
        weights, itemsize = [item.weight for item in items], itemsizes.pop()
        allowed = budget.stored_bytes(weights, file_bytes, itemsize)
        check_casts(fixed, budget, kept, allowed)
        total = sum(item.dense for item in items)
        ready = [_with_bias_decided(model, item, allowed * item.dense // total, data) for item in open_items]

        def room(decisions: Decisions) -> int:
            """Bytes for the open weights under these decisions."""
            whole = _of_one_tensor([*fixed.values(), *decisions.values()])
            return budget.stored_bytes(weights, file_bytes, items[0].itemsize, whole) - kept

        if by_loss:
            shared = _least_loss(model, ready, allowed - kept, data, room if budget.scope == "file" else None)
        else:
            shared = equal_shares(counted(model, ready, allowed - kept), allowed - kept, data)
    decisions = fixed | shared
    if not by_loss:
        _warn_of_small_heads(items, decisions)
    return tuple(decisions[item.weight.name] for item in items), "loss" if by_loss else "uniform"


def _check_kind(budget: Budget, open_items: Sequence[WeightCosts], fixed: Decisions, itemsizes: set[int]) -> None:
    """Refuse a budget of parameters or ranks for weights whose size it does not determine."""
    if budget.kind not in ("params", "ranks"):
        return
    for refused, what, cause in (
        (
            any(item.recipe.is_coded or item.recipe.chooses for item in open_items),
            "codes",
            "they store integers of different lengths",
        ),
        (
            any(decision.recipe.is_cast for decision in fixed.values()),
            "types",
            "a weight has as many numbers in float16 as in float32",
        ),
        (budget.kind == "params" and len(itemsizes) > 1, "weights of different types", "their numbers differ in bytes"),
    ):
        if refused:
            raise KflatsError(
                f"a budget of {budget} is not supported with {what}",
                cause=cause,
                hint="a budget in bytes or per cent: 4MB, 10%",
            )


def _cost(item: WeightCosts, decision: Decision) -> int:
    """The bytes of the budget that a decision takes."""
    return item.dense if decision.recipe.is_dense else decision.budget_bytes


def _by_loss(items: Sequence[WeightCosts], allocation: str) -> bool:
    """Whether bytes go where they save most loss.

    Raises:
        KflatsError: ``allocation`` asks for what the methods or importances do not allow.
    """
    if any(item.recipe.chooses for item in items):
        if allocation == "uniform":
            raise KflatsError(
                'allocation="uniform" is not supported with Auto()',
                cause="it chooses by the error that each byte saves",
                hint='allocation="auto", or another method',
                command="--allocation auto, or another --method",
            )
        return True
    others = _without_loss_units(items)
    if allocation == "loss" and others:
        raise KflatsError(
            f'allocation="loss" cannot compare {brief(others[0].recipe.importance)} of {others[0].weight.name!r}',
            cause="its errors are not in units of a loss",
            hint='KroneckerFisher(), TwoSided() or RowFisher() for every weight, or allocation="uniform"',
            command="--importance kronecker, two-sided or row-fisher, or --allocation uniform",
        )
    return allocation == "loss" or (allocation == "auto" and not others and len(items) > 1)


def _without_loss_units(items: Sequence[WeightCosts]) -> list[WeightCosts]:
    """The items whose errors are not in units of a loss."""
    return [item for item in items if not weighting_form(item.recipe, item.weight).loss_units]


def _with_bias_decided(model: nn.Module, item: WeightCosts, share: int, data: CalibrationData) -> WeightCosts:
    """A layer without a bias gains one if a pair in the rest of ``share`` bytes then loses less."""
    bias = gained_bias_bytes(item, data)
    if not bias:
        return item
    bare = replace(item, recipe=replace(item.recipe, importance=item.recipe.importance.uncentred()))
    with_bias, without = item.rank_within(share - bias), item.rank_within(share)
    table = dense_weight(model, item.weight)
    if with_bias and (
        data.spectrum(table, item.weight, item.recipe)[with_bias]
        < data.spectrum(table, item.weight, bare.recipe)[without]
    ):
        return item
    return bare


def _of_one_tensor(decisions: Iterable[Decision]) -> frozenset[str]:
    """The names of weights that a file holds as one tensor, as before, perhaps in another type."""
    return frozenset(d.weight.name for d in decisions if d.recipe.is_dense or d.recipe.is_cast)


def _least_loss(
    model: nn.Module,
    items: Sequence[WeightCosts],
    allowed: int,
    data: CalibrationData,
    room: Callable[[Decisions], int] | None = None,
) -> Decisions:
    """Bytes where they save most loss; weights that no gradient reached get an equal share of bytes.

    ``Auto()`` without units of a loss minimises the sum of relative errors.

    Args:
        room: the bytes that decisions may take, given how much of a file's header they need; None: ``allowed``.
    """
    relative = any(item.recipe.chooses for item in items) and bool(_without_loss_units(items))
    judged = [item for item in items if relative or data.weigh(item.weight, item.recipe).loss_units]
    unjudged = [replace(item, note=joined(item.note, _UNJUDGED)) for item in items if item not in judged]
    part = allowed * sum(item.dense for item in unjudged) // max(1, sum(item.dense for item in items))
    equal = equal_shares(counted(model, unjudged, part), part, data) if unjudged else {}
    weights = [weight_candidates(model, item, data) for item in judged]
    options = [weight.options(relative) for weight in weights]

    def share(nbytes: int) -> Decisions:
        rest = nbytes - sum(decision.budget_bytes for decision in equal.values())
        choices = allocate(options, rest).choices
        chosen = [weight.decision(choice) for weight, choice in zip(weights, choices, strict=True)]
        spare = rest - sum(decision.budget_bytes for decision in chosen)
        return _topped_up(equal | {decision.weight.name: decision for decision in chosen}, spare)

    decisions = share(allowed)
    return decisions if room is None else _refilled(share, decisions, allowed, room)


def _refilled(
    share: Callable[[int], Decisions], decisions: Decisions, allowed: int, room: Callable[[Decisions], int]
) -> Decisions:
    """Decisions for more bytes, while those of today leave free some that were kept for the file's header."""
    more = room(decisions)
    for _ in range(_REFILLS):
        if more <= allowed:
            break
        other = share(more)
        able = room(other)
        if able >= more:
            decisions, allowed = other, more
        more = able
    return decisions


def _topped_up(decisions: Decisions, spare: int) -> Decisions:
    """The decisions with ``spare`` bytes for the largest weight whose codes can have any size."""
    any_size = [decision for decision in decisions.values() if decision.recipe.codec.any_size]
    largest = max(any_size, key=lambda decision: decision.budget_bytes, default=None)
    if largest is None:
        return decisions
    nbytes = min(largest.budget_bytes + max(spare, 0), largest.weight.nbytes)
    return decisions | {largest.weight.name: replace(largest, budget_bytes=nbytes)}


def _at_ranks(
    model: nn.Module, items: Sequence[WeightCosts], ratio: float, data: CalibrationData, by_loss: bool
) -> Decisions:
    """The same share of the full rank for each weight (FWSVD's rank ratio); by loss, the sum of their bytes."""
    with_bias, decisions = [], {}
    for item in items:
        rank = max(1, round(ratio * item.full))
        one = _with_bias_decided(model, item, item.cost(rank), data)
        nbytes = item.cost(rank) + gained_bias_bytes(one, data)
        with_bias.append(one)
        if nbytes >= item.dense:
            what = f"rank {rank} of {item.full} takes {size(nbytes)} of {size(item.dense)}"
            decisions[item.weight.name] = left_dense(item, f"dense: {what}, so it would not shrink")
        else:
            note = joined(item.note, f"rank {rank} of {item.full}")
            decisions[item.weight.name] = Decision(one.weight, one.recipe, nbytes, note)
    if by_loss:
        allowed = sum(_cost(item, decisions[item.weight.name]) for item in with_bias)
        return _least_loss(model, with_bias, allowed, data)
    return decisions


def _warn_of_small_heads(items: Sequence[WeightCosts], decisions: Decisions) -> None:
    """Warn if equal shares cut the rank of small heads, whose loss they do not weigh."""
    whole = _of_one_tensor(decisions.values())
    few = [item for item in items if item.is_small_head and not item.named and item.weight.name not in whole]
    if few:
        names = ", ".join(visible(item.weight.name) for item in few[:3]) + (", ..." if len(few) > 3 else "")
        warnings.warn(
            f"{names}: equal shares cut the rank of a layer with few outputs, and some outputs are lost; "
            'KeepDense() keeps the layer, allocation="loss" weighs its loss',
            stacklevel=3,
        )
