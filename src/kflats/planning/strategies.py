"""A budget divided among weights, uniformly or by the loss; some weights stay dense."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TypeAlias, get_args

from torch import nn

from kflats.codecs import Integer
from kflats.common.dtypes import dtype_name, dtype_of
from kflats.common.errors import DoesNotFitError, KflatsError, KflatsWarning, NoGradientSignalError
from kflats.common.formatting import progress_bar, size, visible
from kflats.common.workers import Workers
from kflats.methods import KeepDense
from kflats.model.weights import dense_weight
from kflats.numerics.rows import TensorRows
from kflats.planning.calibration_data import CalibrationData
from kflats.planning.candidates import WeightCandidates, WeightCosts, passed_on, weight_candidates
from kflats.planning.knapsack import Choice, allocate
from kflats.planning.selection import weighting_form
from kflats.recipe.budget import Allocation, Budget
from kflats.recipe.recipe import Decision, Recipe, as_cast, brief, largest_of_any_size

Decisions: TypeAlias = dict[str, Decision]
"""Decisions by the weight's name."""

_NO_SIGNAL = "the calibration data does not reach it, or no loss depends on it"
_UNJUDGED = "no gradient reached it: an equal share of the budget, and every row counts the same"


def share_out(
    model: nn.Module,
    items: Sequence[WeightCosts],
    budget: Budget,
    data: CalibrationData,
    allocation: Allocation,
    file_bytes: int,
    quiet: bool = True,
    workers: Workers | None = None,
) -> tuple[tuple[Decision, ...], str]:
    """Decide the bytes of every weight; also how they were shared, "uniform" or "loss".

    Args:
        file_bytes: all weight files, for budgets that bound those.
        quiet: no progress bar.
        workers: who list the ways to store each weight.

    Raises:
        KflatsError: a budget that cannot be met, or shared by errors that cannot be compared.
    """
    fixed: Decisions = {}
    bits = 8.0
    if budget.kind in ("bytes", "fraction"):
        numbers = sum(math.prod(item.weight.shape) for item in items)
        bits = 8 * budget.stored_bytes([item.weight for item in items], file_bytes, itemsize=1) / numbers
    with progress_bar(quiet=quiet) as update:
        for place, item in enumerate(items):
            update(f"weighing {item.weight.name}", place, len(items))
            if (decision := fixed_decision(item, data, bits)) is not None:
                fixed[item.weight.name] = decision
    open_items = [item for item in items if item.weight.name not in fixed]
    itemsizes = {item.itemsize for item in open_items or items}
    _check_kind(budget, open_items, fixed, itemsizes)
    by_loss = _by_loss(open_items, allocation)
    if budget.kind == "ranks":
        shared = _at_ranks(model, open_items, budget.amount, data, by_loss, quiet, workers)
    else:
        allowed = budget.stored_bytes([item.weight for item in items], file_bytes, itemsizes.pop())
        rest = allowed - sum(_cost(item, fixed[item.weight.name]) for item in items if item.weight.name in fixed)
        if rest < 0:
            first = list(fixed)[:3]
            why = "; ".join(dict.fromkeys(fixed[name].note for name in first))
            raise DoesNotFitError(
                f"a budget of {budget} leaves {allowed:,} bytes for these weights, "
                "and those that stay dense or are stored in a type take more",
                cause=f"{', '.join(map(visible, first))} take {allowed - rest:,} bytes ({why})",
                hint="a larger budget, Integer(bits=8), or Auto()",
            )
        shared = (
            _least_loss(model, open_items, rest, data, quiet, workers)
            if by_loss
            else equal_shares(model, open_items, rest, data, budget.most)
        )
    decisions = fixed | shared
    if not by_loss:
        _warn_of_small_heads(open_items, shared)
    return tuple(decisions[item.weight.name] for item in items), "loss" if by_loss else "uniform"


def fixed_decision(item: WeightCosts, data: CalibrationData, bits: float = 8.0) -> Decision | None:
    """The decision for a weight that takes no share of the budget, else None.

    The weight stays as it is, or is stored in another type. ``Auto()`` rounds a weight that no gradient reached to 8
    bits; to 4 bits if the budget has fewer than 4 for each number.

    Args:
        bits: those that the budget has for each number.
    """
    weight, recipe = item.weight, item.recipe
    if recipe.is_dense:
        return item.left_dense("dense: asked for")
    if recipe.is_cast:
        kind = recipe.torch_dtype(weight.dtype)
        name, nbytes = dtype_name(kind), weight.shape[0] * weight.shape[1] * kind.itemsize
        if nbytes >= weight.nbytes:
            return item.left_dense(f"dense: {name} would not make it smaller")
        return item.decided(as_cast(weight, recipe), nbytes, f"{name}: asked for")
    if not recipe.importance.needs:
        return None
    try:
        data.weigh(weight, recipe)
    except NoGradientSignalError:
        if item.named:
            raise
        codec = Integer(8) if bits >= 4 else Integer(4, group=64)
        rounded = Recipe(KeepDense(), codec=codec)
        nbytes = codec.fixed_bytes(rounded.method, weight.shape, item.itemsize) or item.dense
        if recipe.chooses and nbytes < item.dense:
            return item.decided(rounded, nbytes, f"{codec.bits} bits: {_NO_SIGNAL}")
        return item.left_dense(f"dense: {_NO_SIGNAL}")
    return None


def _check_kind(budget: Budget, open_items: Sequence[WeightCosts], fixed: Decisions, itemsizes: set[int]) -> None:
    """Refuse a budget of parameters or ranks for weights whose size it does not determine."""
    what = cause = ""
    if any(item.recipe.is_coded or item.recipe.chooses for item in open_items):
        what, cause = "codes", "they store integers of different lengths"
    elif any(decision.recipe.is_cast for decision in fixed.values()):
        what, cause = "types", "a weight has as many numbers in float16 as in float32"
    elif budget.kind == "params" and len(itemsizes) > 1:
        what, cause = "weights of different types", "their numbers differ in bytes"
    if what and budget.kind in ("params", "ranks"):
        raise KflatsError(f"a budget of {budget} is not supported with {what}", cause=cause, hint="4MB or 10%")


def _cost(item: WeightCosts, decision: Decision) -> int:
    """The bytes of the budget that a decision takes."""
    return item.dense if decision.recipe.is_dense else decision.budget_bytes


def _by_loss(items: Sequence[WeightCosts], allocation: str) -> bool:
    """Whether bytes go where they save most loss.

    Raises:
        KflatsError: ``allocation`` asks for what the methods or importances do not allow.
    """
    if any(item.recipe.chooses for item in items):
        return True
    others = _without_loss_units(items)
    if allocation == "loss" and others:
        raise KflatsError(
            f'allocation="loss" cannot compare {brief(others[0].recipe.importance)} of {others[0].weight.name!r}',
            cause="its errors are not in units of a loss",
            hint='KroneckerFisher(), TwoSided() or RowFisher() for every weight, or allocation="uniform"',
        )
    return allocation == "loss" or (allocation == "auto" and not others and len(items) > 1)


def check_allocation(recipes: Iterable[Recipe], allocation: str) -> None:
    """Refuse, before anything is measured, an unknown allocation, and equal shares for methods that are chosen by the
    loss."""
    if allocation not in get_args(Allocation):
        raise KflatsError(f"allocation={allocation!r} is unknown", hint=f"one of: {', '.join(get_args(Allocation))}")
    if allocation == "uniform" and any(recipe.chooses for recipe in recipes):
        raise KflatsError(
            'allocation="uniform" is not supported with Auto()', hint='allocation="auto", or another method'
        )


def _without_loss_units(items: Sequence[WeightCosts]) -> list[WeightCosts]:
    """The items whose errors are not in units of a loss."""
    return [item for item in items if not weighting_form(item.recipe, item.weight).loss_units]


def _counted(model: nn.Module, items: Sequence[WeightCosts], allowed: int) -> list[WeightCosts]:
    """The items; codes of one size are counted by encoding if their bounds fit neither ``allowed`` nor the weights."""
    sizes = [(item.fixed_bytes, item.dense) for item in items if item.fixed_bytes is not None]
    if sum(bound for bound, _ in sizes) <= allowed and all(bound < dense for bound, dense in sizes):
        return list(items)
    counted = []
    for item in items:
        weight, recipe, table = item.weight, item.recipe, dense_weight(model, item.weight)
        if item.fixed_bytes is not None and not table.is_meta:
            rows = TensorRows(table.T if recipe.matrix_rows == "out_features" else table)
            try:
                nbytes = recipe.codec.counted_bytes(recipe.method, rows, dtype_of(weight.dtype))
            except KflatsError as error:
                raise error.about(weight.name) from error
            item = replace(item, counted=nbytes)
        counted.append(item)
    return counted


def equal_shares(
    model: nn.Module, items: Sequence[WeightCosts], allowed: int, data: CalibrationData, most: int = 1
) -> Decisions:
    """The same share of bytes for each. A weight of a pattern stays dense if its share is too small for its recipe.

    Args:
        most: times the bytes that a weight takes now.
    """
    decisions: Decisions = {}
    items = _counted(model, items, allowed)
    for item in items:
        if item.fixed_bytes is None:
            continue
        nbytes = item.fixed_bytes + item.bias_bytes(data)
        shrinks = nbytes < item.dense
        decision = item.decided(item.recipe, nbytes) if shrinks else item.left_dense("dense: codes would not shrink it")
        decisions[item.weight.name] = decision
        allowed -= decision.budget_bytes
    if decisions and allowed < 0:
        raise DoesNotFitError(
            f"{', '.join(visible(name) for name in list(decisions)[:3])}: codes of a fixed rate take {-allowed:,} "
            "bytes more than the budget has",
            hint="a larger budget, or SVD() with Transform(), which takes any size",
        )
    rest = [item for item in items if item.weight.name not in decisions]
    least = {item.weight.name: 0 if item.named else item.least + item.bias_bytes(data) for item in rest}
    while rest or allowed < 0:
        if allowed < 1:
            raise DoesNotFitError(
                "the budget is spent on weights that stay dense; nothing is left for the others",
                hint="a larger budget, or fewer weights",
            )
        sizes = [item.dense for item in rest]
        shares = dict(
            zip((item.weight.name for item in rest), split(min(allowed, most * sum(sizes)), sizes), strict=True)
        )
        stuck = [item for item in rest if shares[item.weight.name] < least[item.weight.name]]
        if not stuck:
            return decisions | {
                name: item.decided(item.recipe, shares[name]) for item in rest for name in [item.weight.name]
            }
        for item in stuck:
            reason = f"dense: its share of the budget holds no {brief(item.recipe.method)} of it"
            decisions[item.weight.name] = item.left_dense(reason)
            allowed -= item.dense
        rest = [item for item in rest if item.weight.name not in decisions]
    return decisions


def _warn_of_small_heads(items: Iterable[WeightCosts], decisions: Decisions) -> None:
    """Warn if equal shares cut the rank of small heads that a pattern chose."""
    names = [item.weight.name for item in items if item.is_small_head]
    cut = [name for name in names if decisions[name].recipe.method.produces != "dense"]
    if cut:
        listed = ", ".join(visible(name) for name in cut[:3]) + (", ..." if len(cut) > 3 else "")
        effect = "equal shares cut the rank of a layer with few outputs, and some outputs are lost"
        remedy = 'allocation="loss" weighs its loss, and a layer that is not among the weights stays as it is'
        warnings.warn(KflatsWarning(f"{listed}: {effect}; {remedy}"), stacklevel=3)


def split(allowed: int, sizes: Sequence[int]) -> list[int]:
    """``allowed`` bytes in proportion to ``sizes``: whole numbers whose sum is ``allowed``.

    >>> split(10, [1, 1, 1])
    [3, 3, 4]
    """
    # Differences of a rounded running total sum exactly, and each is within one byte of its share.
    ends = [allowed * done // sum(sizes) for done in accumulate(sizes)]
    return [end - start for start, end in pairwise([0, *ends])]


def _least_loss(
    model: nn.Module,
    items: Sequence[WeightCosts],
    allowed: int,
    data: CalibrationData,
    quiet: bool,
    workers: Workers | None,
) -> Decisions:
    """Bytes where they save most loss; weights that no gradient reached get an equal share of bytes.

    ``Auto()`` without units of a loss minimises the sum of relative errors.
    """
    layers = [item for item in items if item.weight.places[0].role != "parameter"]  # nothing is measured of the others
    relative = any(item.recipe.chooses for item in items) and bool(_without_loss_units(layers) or not layers)
    judged = [item for item in items if relative or data.weigh(item.weight, item.recipe).loss_units]
    unjudged = [item for item in items if item not in judged]
    part = allowed * sum(item.dense for item in unjudged) // max(1, sum(item.dense for item in items))
    unjudged, equal = _best_in_shares(model, unjudged, part, data)
    part -= sum(decision.budget_bytes for decision in equal.values())
    equal |= equal_shares(model, [replace(i, note=_UNJUDGED) for i in unjudged], part, data) if unjudged else {}
    tasks = [f"planning {item.weight.name}" for item in judged]
    largest_first = sorted(range(len(judged)), key=lambda index: -math.prod(judged[index].shape))
    with progress_bar(quiet=quiet) as update:

        def listed(index: int) -> WeightCandidates:
            update(tasks[index], largest_first.index(index), len(judged))
            return weight_candidates(model, judged[index], data)

        weights = (workers or Workers()).divided(tasks, listed, passed_on(judged, data), largest_first)
    rest = allowed - sum(decision.budget_bytes for decision in equal.values())
    choices = allocate([weight.options(relative) for weight in weights], rest)
    chosen = [weight.decision(choice) for weight, choice in zip(weights, choices, strict=True)]
    spare = rest - sum(decision.budget_bytes for decision in chosen)
    return _topped_up(equal | {decision.weight.name: decision for decision in chosen}, spare)


def _best_in_shares(
    model: nn.Module, items: Sequence[WeightCosts], allowed: int, data: CalibrationData
) -> tuple[list[WeightCosts], Decisions]:
    """The same share of bytes for each item whose method is chosen, and what loses least in it; the other items.

    ``allowed``: for all items.
    """
    decisions: Decisions = {}
    total = sum(item.dense for item in items)
    for item in items:
        if item.recipe.chooses:
            ways = weight_candidates(model, item, data)
            share = allowed * item.dense // total
            fitting = [place for place, way in enumerate(ways.candidates) if way.nbytes + ways.bias <= share]
            if fitting:
                place = min(fitting, key=lambda index: ways.candidates[index].error)
                way = ways.candidates[place]
                decided = ways.decision(Choice(item.weight.name, place, way.nbytes + ways.bias, way.error))
            else:
                decided = item.left_dense(f"dense: its share of the budget, {size(share)}, holds no code of it")
            decisions[item.weight.name] = decided
    return [item for item in items if item.weight.name not in decisions], decisions


def _topped_up(decisions: Decisions, spare: int) -> Decisions:
    """The decisions with ``spare`` bytes for the largest weight whose codes can have any size."""
    largest = largest_of_any_size(decisions.values())
    if largest is None:
        return decisions
    nbytes = min(largest.budget_bytes + max(spare, 0), largest.weight.nbytes)
    return decisions | {largest.weight.name: replace(largest, budget_bytes=nbytes)}


def _at_ranks(
    model: nn.Module,
    items: Sequence[WeightCosts],
    ratio: float,
    data: CalibrationData,
    by_loss: bool,
    quiet: bool,
    workers: Workers | None,
) -> Decisions:
    """The same share of the full rank for each weight (FWSVD's rank ratio); by loss, the sum of their bytes."""
    decisions = {}
    for item in items:
        rank = max(1, round(ratio * item.full))
        nbytes, name = item.cost(rank) + item.bias_bytes(data), f"rank {rank} of {item.full}"
        decisions[item.weight.name] = (
            item.decided(item.recipe, nbytes, name)
            if nbytes < item.dense
            else item.left_dense(f"dense: {name} takes {size(nbytes)} of {size(item.dense)}, so it would not shrink")
        )
    if by_loss:
        allowed = sum(_cost(item, decisions[item.weight.name]) for item in items)
        return _least_loss(model, items, allowed, data, quiet, workers)
    return decisions
