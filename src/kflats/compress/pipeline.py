"""The pipeline on one page: select -> measure -> allocate -> factorize -> swap -> report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from kflats.calibration.measurements import Statistics
from kflats.calibration.objectives import Objective
from kflats.common.errors import KflatsError
from kflats.common.release import version
from kflats.compress.fitting import factorize
from kflats.compress.provenance import data_used
from kflats.compress.result import CompressedWeight
from kflats.compress.resume import measured_once, model_fingerprint, work_fingerprint
from kflats.evaluation.comparing import load_tokenizer, weight_file_bytes
from kflats.evaluation.encoding import Batch
from kflats.io import annotate_, load_model, save_model
from kflats.io.atomic_folder import new_folder
from kflats.io.partial import Partial
from kflats.io.sources import copy_companions, module_bytes, resolve_model, weights_folder
from kflats.methods import Method
from kflats.model.swap import Weight, swap_, unchanged_on_error
from kflats.planning.calibration_data import SAMPLES, CalibrationData, gather
from kflats.planning.decide import decide
from kflats.planning.strategies import Allocation
from kflats.recipe.budget import Budget, one_budget
from kflats.recipe.plan import Plan
from kflats.recipe.recipe import Recipe, Recipes, as_recipe
from kflats.report.analysis import stored_bytes
from kflats.report.model_card import compressed_card, hub_name, rewrite_
from kflats.report.report import REPORT_FILE, Report
from kflats.trim.trimming import trim as trimmed_to
from kflats.trim.trimming import write_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def compress_(
    model: nn.Module,
    recipes: Recipes | Plan = None,
    *,
    keep: str | Budget | None = None,
    size: str | Budget | None = None,
    texts: Iterable[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    calibration: Iterable[str | Batch] | None = None,
    objective: Objective | None = None,
    statistics: Statistics | None = None,
    samples: int = SAMPLES,
    allocation: Allocation = "auto",
    seed: int = 0,
    quiet: bool = False,
) -> Report:
    """Replace the named weights of ``model`` by factored ones, in place, within the budget.

        minimise  sum_i w_i dist(a_i, S_c(i))^2   with   stored bytes <= budget

    All weights are fitted before the first is swapped: after an error the model is as it was.

    Args:
        model, recipes, keep, size, texts, tokenizer, calibration, objective, statistics, samples, allocation: as
            ``plan``; or ``recipes`` is a ``Plan``, without a budget.
        seed: of every random step. Equal seed, data and threads give equal factors.
        quiet: no progress bar.

    Inputs of linear layers are centred where importance asks for it: the mean's error goes into the bias.

    Returns:
        What was done, for ``print``, ``report.save`` and ``kflats report``. The model then saves itself
        with ``model.save_pretrained`` (transformers) or ``kflats.save`` (plain torch).

    Raises:
        KflatsError: as ``plan``; NaN in a weight; a budget too small for its method.

    >>> import kflats, torch
    >>> model = torch.nn.ModuleDict({"words": torch.nn.Embedding(200, 16)})
    >>> report = kflats.compress_(model, {"words": kflats.Flats(k=2)}, keep="50%", quiet=True)
    >>> report.weights[0].bytes_after <= 0.5 * 200 * 16 * 4
    True
    """
    budget = None if isinstance(recipes, Plan) and keep is size is None else one_budget(keep, size)
    given = gather(texts, tokenizer, calibration, objective, statistics, samples)
    decided = decide(model, recipes, budget, given, allocation=allocation, quiet=quiet)
    done = factorize(model, decided.plan, decided.data, seed, quiet, None)
    return _finish(model, decided.plan, done, seed)


def compress_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    keep: str | Budget | None = None,
    size: str | Budget | None = None,
    method: Recipe | Method | None = None,
    weights: tuple[str, ...] = (),
    plan: Plan | None = None,
    texts: Iterable[str] | None = None,
    calibration: Iterable[Any] | Callable[[nn.Module, Any], Iterable[Any]] | None = None,
    objective: Objective | None = None,
    statistics: Statistics | None = None,
    keep_statistics: str | os.PathLike[str] | None = None,
    samples: int = SAMPLES,
    allocation: Allocation = "auto",
    trim: int | None = None,
    seed: int = 0,
    force: bool = False,
    quiet: bool = False,
) -> Report:
    """Compress a model folder (or hub name) into a new folder that transformers loads after ``import kflats``.

    Finished weights are kept beside ``out`` until the end, so an interrupted run resumes; ``out`` itself
    appears whole or not at all. Tokenizer, pooling and all else that is no weight are copied. The model card
    says what was done and keeps the original's.

    Args:
        source: a local folder or a hub name. out: the folder to be.
        keep, size, method, weights: as ``compress_``: ``method`` may be a recipe, ``weights`` names, patterns and
            words. Or a ``plan``.
        texts: what importance counts, with the folder's own tokenizer; default: calibration texts.
        calibration, objective, statistics, samples, allocation: as ``plan``; calibration may also be a function that
            makes batches for the model and its tokenizer. What was measured is kept beside ``out`` until the end too.
        keep_statistics: a file to keep it in for later (``Statistics.load``).
        trim: keep this many of the commonest tokens first, counted in ``texts``: as ``trimming.trim``. Budgets in per
            cent are then of the trimmed model.
        force: replace an existing folder that kflats wrote and nobody changed since.

    Raises:
        KflatsError: as ``compress_``; ``out`` exists, overlaps the original or is written by another run, a full
            disk, a folder without a model.
    """
    allowed = None if plan is not None and keep is size is None else one_budget(keep, size)
    folder = resolve_model(source)
    if trim is not None and plan is not None:
        raise KflatsError(
            "a plan is of one vocabulary, and trimming makes another",
            hint="trim the model first (kflats trim), then plan and compress what that made",
        )
    make = calibration if callable(calibration) else None
    data = gather(texts, None, None if callable(calibration) else calibration, objective, statistics, samples)
    calibration_texts = tuple(item for item in data.calibration or () if isinstance(item, str))
    made_before = len(calibration_texts) < len(data.calibration or ())
    if trim is not None and (statistics is not None or made_before):
        raise KflatsError(
            f"{'statistics' if statistics is not None else 'batches of ids'} are of one vocabulary, and trimming makes "
            "another",
            hint="give texts, or trim the model first (kflats trim) and measure what that made",
        )
    if data.texts is None and data.calibration and not made_before:
        data = replace(data, texts=calibration_texts)
    with new_folder(out, force, [folder]) as aside:
        model = load_model(folder)
        data = replace(data, tokenizer=_tokenizer(folder, data, method, plan))
        before = weight_file_bytes(folder)
        trimmed = None if trim is None else trimmed_to(model, data.tokenizer, keep=trim, texts=data.texts)
        if trimmed is not None:
            model, data = trimmed.model, replace(data, tokenizer=trimmed.tokenizer)
            before -= trimmed.report.saved
        if make is not None:
            made = gather(None, None, make(model, data.tokenizer), None, None)
            data = replace(data, calibration=made.calibration)
        about = model_fingerprint(folder, data, trim)

        def measured(recipes: Sequence[tuple[Weight, Recipe]]) -> CalibrationData:
            return measured_once(model, recipes, data, Partial(out, about), quiet)

        recipes = plan or (dict.fromkeys(weights, method) if weights else method)
        others = module_bytes(folder)  # these stay as they are
        asked: dict[str, Any] = {"allocation": allocation, "file_bytes": before, "beside": others}
        decided = decide(model, recipes, allowed, data, measured=measured, **asked)
        if keep_statistics is not None and decided.data.statistics is not None:
            decided.data.statistics.save(keep_statistics)
        partial = Partial(out, work_fingerprint(about, decided, seed))
        limit = _file_limit(decided.plan, before)
        _check_shares(decided.plan, limit, before)
        own_limit = None if limit is None else limit - others
        done = factorize(model, decided.plan, decided.data, seed, quiet, partial, own_limit)
        report = _finish(model, decided.plan, done, seed, name=_called(source))
        report = replace(
            report,
            trimming=None if trimmed is None else trimmed.report,
            model_bytes_before=report.model_bytes_before + others,
            model_bytes_after=report.model_bytes_after + others,
        )
        inner = aside / weights_folder(folder).relative_to(folder)
        save_model(model, inner)
        if trimmed is None:
            copy_companions(folder, aside)
        else:
            write_vocabulary(trimmed, folder, aside)
        after = _check_file(aside, decided.plan, before)
        report.save(aside / REPORT_FILE)
        by_texts = trimmed is not None and data.texts is not None
        used = data_used(decided, data, trimmed_by_texts=by_texts)
        _write_card(aside, report, (weight_file_bytes(folder), after), used, hub_name(source))
    return report


def _finish(model: nn.Module, decided: Plan, done: list[CompressedWeight], seed: int, name: str = "") -> Report:
    before = stored_bytes(model)
    with unchanged_on_error(model):
        for one in done:
            if one.matrix is not None:
                rows = one.decision.recipe.matrix_rows
                swap_(model, one.decision.weight, one.matrix, matrix_rows=rows, bias_shift=one.bias_shift)
        annotate_(model)
    return Report(
        model=name or str(getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__),
        budget=str(decided.budget),
        weights=tuple(one.report for one in done),
        model_bytes_before=before,
        model_bytes_after=stored_bytes(model) - sum(one.packed for one in done),
        seed=seed,
        version=version(),
    )


def _called(source: str | os.PathLike[str]) -> str:
    """A hub name as it is; of a local folder the end of its path: where it lay is nobody else's business."""
    folder = Path(source)
    return "/".join(folder.resolve().parts[-2:]) if folder.is_dir() else str(source)


def _tokenizer(folder: Path, data: CalibrationData, method: Recipe | Method | None, plan: Plan | None) -> Any:
    """The folder's tokenizer; missing is an error only where something needs it."""
    recipes = [d.recipe for d in plan.decisions] if plan else [as_recipe(method)] if method is not None else []
    wanted = data.texts is not None or any(r.importance.needs_tokenizer for r in recipes)
    try:
        return load_tokenizer(folder)
    except KflatsError:
        if wanted:
            raise
        return None


def _file_limit(decided: Plan, before: int) -> int | None:
    """Bytes that all weight files may take, of ``before``; None where the budget bounds the named weights."""
    budget = decided.budget
    if budget.scope != "file":
        return None
    return int(budget.amount * before if budget.kind == "fraction" else budget.amount)


def _check_shares(decided: Plan, limit: int | None, before: int) -> None:
    """Refuse, before any work, shares that cannot be within ``limit``: a plan may have been edited."""
    shares = sum(d.weight.nbytes if d.recipe.is_dense else d.budget_bytes for d in decided.decisions)
    most = before - sum(d.weight.nbytes for d in decided.decisions) + shares
    if limit is not None and most > limit:
        raise KflatsError(
            f"the plan's weights and all that is not named take {most:,} bytes, more than the {limit:,} asked for",
            cause="a plan that was edited by hand",
            hint="make the plan again: kflats plan",
        )


def _check_file(folder: Path, decided: Plan, before: int) -> int:
    """Bytes of the new weight files; refuses more than there were, or than were asked for."""
    after = weight_file_bytes(folder)
    if after > before:
        raise KflatsError(
            f"the new weight files take {after:,} bytes, more than the original's {before:,}",
            cause="the model was stored in a narrower type than it was loaded in",
            hint="a smaller budget, or a codec such as Float('float16')",
            command="a smaller budget, or --codec float16",
        )
    limit = _file_limit(decided, before)
    if limit is not None and after > limit:
        raise KflatsError(
            f"the new weight files take {after:,} bytes, more than the {limit:,} asked for",
            cause="more tensors are stored than the original's files had",
            hint="a slightly smaller size",
        )
    return after


def _write_card(folder: Path, report: Report, files: tuple[int, int], used: list[str], base_model: str | None) -> None:
    loader = "sentence-transformers" if (folder / "modules.json").is_file() else "transformers"
    rewrite_(folder, lambda original: compressed_card(report, files, used, base_model, original, loader))
