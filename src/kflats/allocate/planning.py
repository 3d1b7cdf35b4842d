"""Select, measure, allocate: which weight is treated how, in how many bytes. Nothing is fitted, nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from kflats.allocate.calibration import SAMPLES, Data, gather
from kflats.allocate.selection import Selected, check, select, token_embedding
from kflats.allocate.shares import Allocation, share_out
from kflats.errors import KflatsError
from kflats.measure.measurements import Statistics
from kflats.recipes.budget import Budget, parse_budget
from kflats.recipes.plan import Plan
from kflats.recipes.recipe import Recipe
from kflats.report.analysis import stored_bytes
from kflats.swap.surgery import Weight, find_weight

__all__ = ["Decided", "decide", "plan", "required", "token_embedding"]

Measure = Callable[[Sequence[tuple[Weight, Recipe]]], Data]


@dataclass(frozen=True)
class Decided:
    """A plan, the data it was made from, with all that was measured, and the recipes as they were asked for.

    A budget may turn a recipe into another (``Best``, or "keep dense"); ``asked`` says whose error was judged.
    """

    plan: Plan
    data: Data
    asked: tuple[tuple[Weight, Recipe], ...]


def plan(
    model: nn.Module,
    recipes: Any = None,
    *,
    budget: str | Budget,
    data: Iterable[str] | None = None,
    tokenizer: Any = None,
    calibration: Iterable[Any] | None = None,
    objective: Any = None,
    statistics: Statistics | None = None,
    samples: int = SAMPLES,
    allocation: Allocation = "auto",
    file_bytes: int | None = None,
    quiet: bool = True,
) -> Plan:
    """Decide which weight is treated how, in how many bytes; nothing is changed and nothing is fitted.

    Args:
        model: any torch module; transformers models know their token embedding.
        recipes: {name: recipe or method}; one recipe or method for the token embedding; None for the default
            recipe on it: ``Flats(k=5)`` with ``TokenCounts`` if there are texts, ``ZipfPrior`` if there is only a
            tokenizer, ``Uniform`` without both. A name may be a pattern ("encoder.layer.*.attention.*") or one of
            the words "linear", "conv", "embeddings" and "all". A value of None in a mapping means the default for
            the token embedding; for other layers ``SVD`` with ``KroneckerFisher`` if there is calibration data,
            else ``Flats(k=5)`` (convolutions: ``SVD``) with ``Uniform``. ``Dense()`` keeps a weight as it is,
            ``Recipe(Dense(), codec=Float("float16"))`` all of its numbers in that type.
        budget: "60%", "12MB", "5.2M params" of the *named weights*, kept; or "33% ranks": that share of each
            weight's full rank (FWSVD's rank ratio).
        data: texts that importance may count. tokenizer: the model's own.
        calibration: texts or batches (mappings for ``model(**batch)``) to measure Fisher information and
            activations with; default: ``data``. samples: use so many of the texts, evenly spaced.
        objective: what gradients are taken of; default: the task's loss where batches have labels, else random
            projections of the output.
        statistics: what ``kflats.measure`` found; then nothing is measured.
        allocation: "uniform": weights share the budget in proportion to their bytes. "loss": ranks go where they
            save most loss, and weights stay dense where that pays; every importance must be in units of a loss.
            "auto": "loss" where that holds for all of several weights.
        file_bytes: all weight files of the original, for budgets of ``scope="file"``.
        quiet: no progress bar while measuring.

    Raises:
        KflatsError: unknown names, a budget that cannot be met, an importance without its data, or one that its
            method cannot take.
    """
    given = gather(data, tokenizer, calibration, objective, statistics, samples)
    return decide(model, recipes, budget, given, allocation=allocation, file_bytes=file_bytes, quiet=quiet).plan


def decide(
    model: nn.Module,
    recipes: Any,
    budget: str | Budget | None,
    data: Data,
    *,
    allocation: Allocation = "auto",
    file_bytes: int | None = None,
    beside: int = 0,
    quiet: bool = True,
    measured: Measure | None = None,
) -> Decided:
    """A plan for ``model``: a new one, or the given ``Plan`` checked against the model's own weights.

    Args:
        beside: bytes of other modules' weight files: of the whole model, too, and left as they are.
        measured: how the data gets its statistics; default: by measuring.
    """
    measured = measured or (lambda pairs: data.measured(model, pairs, quiet))
    if isinstance(recipes, Plan):
        resolved = _checked(model, recipes, budget, data)
        planned = tuple((d.weight, d.recipe) for d in resolved.decisions)
        return Decided(resolved, measured(planned), planned)
    allowed = parse_budget(required(budget))
    selected = select(model, recipes, data.given)
    asked = tuple((chosen.weight, chosen.recipe) for chosen in selected)
    data = measured(asked)
    total = stored_bytes(model) + beside
    notes = [_note(chosen, data) for chosen in selected]
    shares = share_out(model, selected, notes, allowed, data, allocation, file_bytes or total)
    return Decided(Plan(shares.decisions, allowed, total, shares.allocation), data, asked)


def required(budget: str | Budget | None) -> str | Budget:
    """The budget, or a clear error where none is given."""
    if budget is None:
        raise KflatsError("no budget is given", hint='budget="60%", "12MB" or "5.2M params"')
    return budget


def _checked(model: nn.Module, made: Plan, budget: str | Budget | None, data: Data) -> Plan:
    if budget is not None and str(parse_budget(budget)) != str(made.budget):
        raise KflatsError(f"the plan was made for {made.budget}, not {budget}", hint="leave the budget out")
    resolved = made.resolve(lambda name: find_weight(model, name))
    if not resolved.decisions:
        raise KflatsError("no weight is named", hint="kflats inspect MODEL lists what can be")
    for decision in resolved.decisions:
        check(decision.weight, decision.recipe, data.given)
    return resolved


def _note(chosen: Selected, data: Data) -> str:
    recipe = chosen.recipe
    embedding = chosen.weight.places[0].role == "embedding"
    if not embedding or recipe.importance.form(one_hot=True).kinds or recipe.is_dense or recipe.is_cast:
        return ""
    if data.texts is not None:
        return "the texts are not counted: every row counts the same"
    if recipe.method.produces == "clusters" and data.tokenizer is None:
        return "no texts and no tokenizer: every row counts the same"
    return ""
