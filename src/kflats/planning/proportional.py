"""The same share of bytes for every weight: how a budget is divided where errors cannot be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from kflats.common.errors import KflatsError
from kflats.common.formatting import visible
from kflats.model.weights import dense_weight
from kflats.numerics.rows import TensorRows
from kflats.planning.calibration_data import CalibrationData
from kflats.planning.costs import WeightCosts, bias_bytes
from kflats.planning.fixed_decisions import left_dense
from kflats.recipe.budget import split
from kflats.recipe.plan import Decision
from kflats.recipe.recipe import brief


def bias_of(item: WeightCosts, data: CalibrationData) -> int:
    """Bytes of the bias that a weight's layer gains under its importance; 0 for most."""
    if not item.recipe.importance.needs:
        return 0
    weighting = data.weigh(item.weight, item.recipe)
    return bias_bytes(item.weight, item.recipe, weighting, item.counts_labels)


def counted(model: nn.Module, items: Sequence[WeightCosts], allowed: int) -> list[WeightCosts]:
    """The items, with the sizes of their codes counted where the bounds do not fit ``allowed`` or a weight's bytes."""
    sizes = [(item.whole, item.dense) for item in items if item.whole is not None]
    if sum(whole for whole, _ in sizes) <= allowed and all(whole < dense for whole, dense in sizes):
        return list(items)
    return [item if item.whole is None else replace(item, counted=_counted(model, item)) for item in items]


def _counted(model: nn.Module, item: WeightCosts) -> int | None:
    table = dense_weight(model, item.weight)
    if table.is_meta:
        return None
    rows = TensorRows(table.T if item.recipe.matrix_rows == "out_features" else table)
    try:
        return item.recipe.codec.counted_bytes(item.recipe.method, rows, getattr(torch, item.weight.dtype))
    except KflatsError as error:
        raise error.about(item.weight.name) from error


def uniform(items: Sequence[WeightCosts], allowed: int, data: CalibrationData) -> dict[str, Decision]:
    """The same share of bytes for each; those found by a pattern that cannot live on theirs stay dense."""
    found: dict[str, Decision] = {}
    least = {item.weight.name: item.least + bias_of(item, data) for item in items if not item.named}
    for item in items:
        if item.whole is not None:
            price = item.whole + bias_of(item, data)
            made = Decision(item.weight, item.recipe, min(price, item.dense), item.note)
            found[item.weight.name] = (
                made if price < item.dense else left_dense(item, "dense: codes would not shrink it")
            )
            allowed -= found[item.weight.name].budget_bytes
    if found and allowed < 0:
        raise KflatsError(
            f"{', '.join(visible(name) for name in list(found)[:3])}: codes of a fixed rate take {-allowed:,} bytes "
            "more than the budget has",
            hint="a larger budget, or Transform(), which takes any size",
        )
    while True:
        rest = [item for item in items if item.weight.name not in found]
        if allowed < (1 if rest else 0):
            raise KflatsError(
                "the budget is spent on weights that stay dense; nothing is left for the others",
                cause=f"{len(found)} weights cannot be factored in their share" if found else "weights left dense",
                hint="a larger budget, or fewer weights",
            )
        if not rest:
            return found
        total = sum(item.dense for item in rest)
        if allowed >= total:
            shares: Sequence[int] = [item.dense for item in rest]
        else:
            shares = split(allowed, [item.weight for item in rest]) if rest[0].counts_labels else _parts(allowed, rest)
        stuck = [item for item, share in zip(rest, shares, strict=True) if share < least.get(item.weight.name, 0)]
        if not stuck:
            pairs = zip(rest, shares, strict=True)
            return found | {
                item.weight.name: Decision(item.weight, item.recipe, share, item.note) for item, share in pairs
            }
        for item in stuck:
            reason = f"dense: its share of the budget holds no {brief(item.recipe.method)} of it"
            found[item.weight.name] = left_dense(item, reason)
            allowed -= item.dense


def _parts(allowed: int, items: Sequence[WeightCosts]) -> list[int]:
    total, done = sum(item.dense for item in items), 0
    parts: list[int] = []
    for item in items:
        done += item.dense
        parts.append(allowed * done // total - sum(parts))
    return parts
