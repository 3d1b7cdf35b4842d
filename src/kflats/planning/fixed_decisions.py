"""Decisions that do not depend on the budget: a weight stays as it is, or is stored in the type that was asked for."""

from __future__ import annotations

from dataclasses import replace

from kflats.codecs import Integer
from kflats.common.errors import KflatsError, NoGradientSignalError
from kflats.common.formatting import visible
from kflats.methods import KeepDense
from kflats.planning.calibration_data import CalibrationData
from kflats.planning.costs import WeightCosts
from kflats.recipe.budget import Budget
from kflats.recipe.plan import Decision, as_cast
from kflats.recipe.recipe import Recipe

_NO_SIGNAL = "the calibration data does not reach it, or no loss depends on it"


def fixed_decision(item: WeightCosts, data: CalibrationData) -> Decision | None:
    """The decision for a weight that takes no share of the budget, else None.

    The weight stays as it is, or is stored in another type. ``Auto()`` rounds a weight to 8 bits if no gradient reached
    it.
    """
    if item.recipe.is_dense:
        return replace(left_dense(item, ""), note=item.note or "dense: asked for")
    if item.recipe.is_cast:
        return _cast(item)
    if not item.recipe.importance.needs:
        return None
    try:
        data.weigh(item.weight, item.recipe)
    except NoGradientSignalError:
        if item.named:
            raise
        rounded = Recipe(KeepDense(), codec=Integer(bits=8))
        nbytes = rounded.codec.fixed_bytes(rounded.method, item.weight.shape, item.itemsize) or item.dense
        if item.recipe.chooses and item.weight.places[0].role != "conv2d" and nbytes < item.dense:
            return Decision(item.weight, rounded, nbytes, f"8 bits: {_NO_SIGNAL}")
        return replace(left_dense(item, ""), note=f"dense: {_NO_SIGNAL}")
    return None


def _cast(item: WeightCosts) -> Decision:
    """All numbers in the type that is asked for; the weight as it is if that takes no fewer bytes."""
    kind, (n, d) = item.recipe.torch_dtype(item.weight.dtype), item.weight.shape
    name, nbytes = str(kind).removeprefix("torch."), n * d * kind.itemsize
    if nbytes >= item.weight.nbytes:
        why = f"it is {name} already" if name == item.weight.dtype else f"{name} would not make it smaller"
        return replace(left_dense(item, ""), note=joined(item.note, f"dense: {why}"))
    return Decision(item.weight, as_cast(item.weight, item.recipe), nbytes, joined(item.note, f"{name}: asked for"))


def check_casts(fixed: dict[str, Decision], budget: Budget, kept: int, allowed: int) -> None:
    """Refuse fixed decisions of ``kept`` bytes that the ``allowed`` bytes do not hold, if a type was asked for."""
    casts = [name for name, decision in fixed.items() if decision.recipe.is_cast]
    if casts and kept > allowed:
        raise KflatsError(
            f"a budget of {budget} ({allowed:,} bytes) cannot hold {', '.join(visible(name) for name in casts[:3])} "
            "in the type that is asked for",
            cause=f"all numbers in that type take {kept:,} bytes",
            hint="a larger budget, Integer(bits=8), or Auto()",
            command="a larger budget, --codec int8, or --method auto",
        )


def left_dense(item: WeightCosts, note: str) -> Decision:
    """The decision for a weight that stays as it is; ``note`` says why."""
    return Decision(item.weight, Recipe(KeepDense()), item.weight.nbytes, joined(item.note, note))


def joined(*notes: str) -> str:
    """Notes as one; empty ones are left out."""
    return "; ".join(note for note in notes if note)
