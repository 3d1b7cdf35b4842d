"""Select, measure, allocate: which weight is treated how, in how many bytes. Nothing is fitted, nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from kflats.calibration.measurements import Statistics
from kflats.calibration.objectives import Objective
from kflats.common.errors import KflatsError
from kflats.common.texts import SAMPLES, Tokenizer
from kflats.common.torch_settings import usual_settings
from kflats.common.workers import Workers
from kflats.evaluation.running import Batch
from kflats.model.weights import Weight, find_weight
from kflats.planning.calibration_data import CalibrationData, gather
from kflats.planning.candidates import WeightCosts
from kflats.planning.selection import Selected, check, check_calls, select
from kflats.planning.strategies import check_allocation, share_out
from kflats.recipe.budget import Allocation, Budget, one_budget
from kflats.recipe.recipe import Plan, Recipe, Recipes
from kflats.report.report import stored_bytes, stored_numbers

Measuring = Callable[[Sequence[tuple[Weight, Recipe]]], CalibrationData]


@dataclass(frozen=True)
class Sharing:
    """How the bytes of a budget are shared among weights.

    Args:
        allocation: as ``plan``.
        file_bytes: all weight files with the weights as they are loaded, which a size bounds; None: the model's bytes.
        beside: bytes of other modules' weight files, which belong to the whole model and are left as they are.
        quiet: no progress bar. workers: who list the ways to store each weight.
    """

    allocation: Allocation = "auto"
    file_bytes: int | None = None
    beside: int = 0
    quiet: bool = True
    workers: Workers | None = None


@dataclass(frozen=True)
class Decided:
    """A plan, the data with all that was measured, and the recipes before the budget decided.

    The budget may turn a recipe into another (``Auto()``, or "keep dense"); ``recipes`` says whose errors it compared.
    """

    plan: Plan
    data: CalibrationData
    recipes: tuple[tuple[Weight, Recipe], ...]


def plan(
    model: nn.Module,
    recipes: Recipes | Plan = None,
    *,
    keep: str | Budget | None = None,
    size: str | Budget | None = None,
    texts: Iterable[str] | None = None,
    tokenizer: Tokenizer | None = None,
    calibration: Iterable[str | Batch] | None = None,
    objective: Objective | None = None,
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
            else ``Flats(k=5)`` (convolutions: ``SVD``) with ``Uniform``. ``KeepDense()`` keeps a weight as it is,
            ``Recipe(KeepDense(), codec=Float("float16"))`` all of its numbers in that type.
        keep: "60%", "12MB", "5.2M params" of the *named weights*, kept; or "33% ranks": that share of each
            weight's full rank (FWSVD's rank ratio).
        size: "8MB", "10%" or "2 bits" (a number): of all weight files, in place of ``keep``. For a model in memory it
            bounds the tensors; ``compress_folder`` counts the header of the file too.
        texts: running text, cut into windows (``kflats.calibration.windows``): what importance may count, and what it
            measures with if there is no other data. Some windows are held out. tokenizer: the model's own.
        calibration: texts or batches (mappings for ``model(**batch)``) to measure Fisher information and
            activations with, as they are. samples: use so many windows, or so many of these texts, evenly spaced.
        objective: what gradients are taken of; default: the task's loss where batches have labels, else random
            projections of the output.
        statistics: what ``kflats.measure`` found; then nothing is measured.
        allocation: "uniform": weights share the budget in proportion to their bytes. "loss": ranks go where they
            save most loss, and weights stay dense where that pays; every importance must be in units of a loss.
            "auto": "loss" where that holds for all of several weights.
        file_bytes: all weight files of the original, to which ``size`` belongs; default: the model's own bytes.
        quiet: no progress bar while measuring.

    Raises:
        KflatsError: unknown names, a budget that cannot be met, an importance without its data, or one that its
            method cannot take.
    """
    data = gather(texts, tokenizer, calibration, objective, statistics, samples).windowed(model, quiet)
    budget = one_budget(keep, size)
    return decide(model, recipes, budget, data, Sharing(allocation, file_bytes, quiet=quiet)).plan


def decide(
    model: nn.Module,
    recipes: Recipes | Plan,
    budget: Budget | None,
    data: CalibrationData,
    sharing: Sharing = Sharing(),
    *,
    measured: Measuring | None = None,
) -> Decided:
    """A plan for ``model``: a new one, or the given ``Plan`` checked against the model's own weights.

    Args:
        budget: None is for a ``Plan`` only, which has its own.
        sharing: how a new plan shares the budget.
        measured: how the data gets its statistics; default: by measuring.
    """
    measured = measured or (lambda pairs: data.measured(model, pairs, sharing.quiet))
    if isinstance(recipes, Plan):
        resolved = _checked(model, recipes, budget, data)
        planned = tuple((d.weight, d.recipe) for d in resolved.decisions)
        return Decided(resolved, measured(planned), planned)
    allowed = (budget or one_budget(None, None)).in_bytes(stored_numbers(model))
    selected = select(model, recipes, data)
    pairs = tuple((chosen.weight, chosen.recipe) for chosen in selected)
    total = stored_bytes(model) + sharing.beside
    check_allocation((recipe for _, recipe in pairs), sharing.allocation)
    file_bytes = sharing.file_bytes or total
    if allowed.kind in ("bytes", "fraction"):  # refused before anything is measured
        allowed.stored_bytes([weight for weight, _ in pairs], file_bytes, itemsize=1)
    data = measured(pairs)
    items = [WeightCosts(s.weight, s.recipe, s.named, allowed.counts_labels, _note(s, data)) for s in selected]
    with usual_settings():
        decisions, shared_by = share_out(
            model, items, allowed, data, sharing.allocation, file_bytes, sharing.quiet, sharing.workers
        )
    return Decided(Plan(decisions, allowed, total, shared_by), data, pairs)


def _checked(model: nn.Module, plan: Plan, budget: Budget | None, data: CalibrationData) -> Plan:
    if budget is not None and budget.in_bytes(stored_numbers(model)) != plan.budget:
        raise KflatsError(
            f"the plan was made for a budget of {plan.budget}, not {budget}", hint="no budget beside a plan"
        )
    resolved = plan.resolve(lambda name: find_weight(model, name))
    if not resolved.decisions:
        raise KflatsError("no weight is named", hint="kflats inspect MODEL lists what can be")
    for decision in resolved.decisions:
        check(decision.weight, decision.recipe, data)
        check_calls(decision.weight, decision.recipe, data.trial(model))
    return resolved


def _note(chosen: Selected, data: CalibrationData) -> str:
    recipe = chosen.recipe
    embedding = chosen.weight.places[0].role == "embedding"
    if not embedding or recipe.importance.form(one_hot=True).kinds or recipe.is_dense or recipe.is_cast:
        return ""
    if data.texts is not None:
        return "the texts are not counted: every row counts the same"
    no_words = recipe.method.produces == "clusters" and data.tokenizer is None
    return "no texts and no tokenizer: every row counts the same" if no_words else ""
