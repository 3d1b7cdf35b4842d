"""The same share of bytes for every weight: the division of a budget where errors cannot be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import nn

from kflats.common.errors import KflatsError
from kflats.common.formatting import visible
from kflats.model.weights import dense_weight
from kflats.numerics.rows import TensorRows
from kflats.planning.calibration_data import CalibrationData
from kflats.planning.costs import WeightCosts, gained_bias_bytes
from kflats.planning.fixed_decisions import left_dense
from kflats.recipe.plan import Decision
from kflats.recipe.recipe import brief


def counted(model: nn.Module, items: Sequence[WeightCosts], allowed: int) -> list[WeightCosts]:
    """The items; the bytes of their codes are counted if the bounds fit neither ``allowed`` nor the weights' bytes."""
    sizes = [(item.fixed_bytes, item.dense) for item in items if item.fixed_bytes is not None]
    if sum(bound for bound, _ in sizes) <= allowed and all(bound < dense for bound, dense in sizes):
        return list(items)
    return [item if item.fixed_bytes is None else replace(item, counted=_counted(model, item)) for item in items]


def _counted(model: nn.Module, item: WeightCosts) -> int | None:
    table = dense_weight(model, item.weight)
    if table.is_meta:
        return None
    rows = TensorRows(table.T if item.recipe.matrix_rows == "out_features" else table)
    try:
        return item.recipe.codec.counted_bytes(item.recipe.method, rows, getattr(torch, item.weight.dtype))
    except KflatsError as error:
        raise error.about(item.weight.name) from error


def equal_shares(items: Sequence[WeightCosts], allowed: int, data: CalibrationData) -> dict[str, Decision]:
    """The same share of bytes for each. A weight of a pattern stays dense if its share is too small for its recipe."""
    decisions: dict[str, Decision] = {}
    least = {item.weight.name: item.least + gained_bias_bytes(item, data) for item in items if not item.named}
    for item in items:
        if item.fixed_bytes is not None:
            nbytes = item.fixed_bytes + gained_bias_bytes(item, data)
            decisions[item.weight.name] = (
                Decision(item.weight, item.recipe, nbytes, item.note)
                if nbytes < item.dense
                else left_dense(item, "dense: codes would not shrink it")
            )
            allowed -= decisions[item.weight.name].budget_bytes
    if decisions and allowed < 0:
        raise KflatsError(
            f"{', '.join(visible(name) for name in list(decisions)[:3])}: codes of a fixed rate take {-allowed:,} "
            "bytes more than the budget has",
            hint="a larger budget, or Transform(), which takes any size",
            command="a larger budget, or --codec transform, which takes any size",
        )
    while True:
        rest = [item for item in items if item.weight.name not in decisions]
        if allowed < (1 if rest else 0):
            raise KflatsError(
                "the budget is spent on weights that stay dense; nothing is left for the others",
                cause=f"the shares of {len(decisions)} weights are too small for their recipes",
                hint="a larger budget, or fewer weights",
            )
        if not rest:
            return decisions
        sizes = [item.dense for item in rest]
        shares = split(min(allowed, sum(sizes)), sizes)
        stuck = [item for item, share in zip(rest, shares, strict=True) if share < least.get(item.weight.name, 0)]
        if not stuck:
            pairs = zip(rest, shares, strict=True)
            return decisions | {
                item.weight.name: Decision(item.weight, item.recipe, share, item.note) for item, share in pairs
            }
        for item in stuck:
            reason = f"dense: its share of the budget holds no {brief(item.recipe.method)} of it"
            decisions[item.weight.name] = left_dense(item, reason)
            allowed -= item.dense


def split(allowed: int, sizes: Sequence[int]) -> list[int]:
    """``allowed`` bytes in proportion to ``sizes``: whole numbers whose sum is ``allowed``.

    >>> split(10, [1, 1, 1])
    [3, 3, 4]
    """
    # Differences of a rounded running total sum exactly, and each is within one byte of its share.
    ends = [allowed * done // sum(sizes) for done in accumulate(sizes)]
    return [end - start for start, end in pairwise([0, *ends])]
