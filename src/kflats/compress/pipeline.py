"""The pipeline on one page: select -> measure -> allocate -> factorize -> swap -> report."""

from __future__ import annotations

import gc
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from torch import nn

from kflats.calibration.measurements import Statistics
from kflats.calibration.objectives import Objective
from kflats.common.errors import KflatsError, KflatsWarning, NotFiniteError, check_seed
from kflats.common.formatting import share
from kflats.common.formatting import size as shown_size
from kflats.common.machine import available_bytes, is_out_of_memory, return_memory_when_freed
from kflats.common.paths import expanded
from kflats.common.run_forms import RunAs, RunForm, check_run_form
from kflats.common.texts import SAMPLES, Tokenizer, packaged_texts
from kflats.common.workers import Workers
from kflats.compress.fitting import (
    Partial,
    copies_fingerprint,
    kept_streams,
    measured_once,
    model_fingerprint,
    swapped,
    work_fingerprint,
)
from kflats.compress.flats_search import best_flats, searched
from kflats.compress.quality import smallest
from kflats.compress.sequential import fitted
from kflats.evaluation.outputs import Judge, load_tokenizer, weight_file_bytes
from kflats.evaluation.proof import compare, settle_form_
from kflats.evaluation.running import Batch, modality_of
from kflats.io import load_model, save_model
from kflats.io.atomic import beside as beside_out
from kflats.io.atomic import new_folder
from kflats.io.mapped import Spill
from kflats.io.saving import damage_named
from kflats.io.sources import (
    copy_companions,
    module_bytes,
    read_config,
    resolve_model,
    static_folder,
    trusts_remote_code,
    weights_folder,
)
from kflats.io.static import StaticModel
from kflats.methods import Auto, Method
from kflats.model.run_as import set_run_form_, warn_without_effect
from kflats.model.weights import Weight, compute_dtype, factored_layers, held_matrices
from kflats.numerics.large_matrices import all_finite, large_matrices_in
from kflats.numerics.svd import forget_metric
from kflats.planning.calibration_data import CalibrationData, gather, needed
from kflats.planning.decide import Decided, Sharing, decide
from kflats.recipe.budget import DEFAULT_QUALITY, Allocation, Budget, check_quality, one_budget
from kflats.recipe.recipe import Plan, Recipe, Recipes, as_recipe
from kflats.report.model_card import compressed_card, hub_name, note_proof, rewrite_
from kflats.report.report import REPORT_FILE, Report, stored_bytes, stored_numbers
from kflats.trimming.trimming import trim as trimmed_to
from kflats.trimming.trimming import write_vocabulary

Calibration: TypeAlias = Iterable[Any] | Callable[[nn.Module, Any], Iterable[Any]] | None
"""Texts or batches to measure with, or a function that makes batches for a model and its tokenizer."""


_MANY, _ROOM = 8, 4_000_000_000
"""Memory is given back as soon as it is free, unless a folder fits into it so many times, and it has so many bytes."""
_MODELS = 0.75
"""The share of the memory that models may take which are run whole; outputs, libraries and the system take the rest."""
_SHARD, _SHARD_BYTES = "5GB", 5_000_000_000  # of one weight file, as the hub's largest models have them
_SHARD_HEADER = 256  # bytes of a header but for its tensors


@dataclass
class Prepared:
    """What calls of ``compress_folder`` for several sizes of one model share: measurements, and the candidates of each
    weight. Empty at first; the first call fills it, and the next ones only fit.

    Args:
        about: a fingerprint of the model and the data. data: the data with all that was computed of them.
    """

    about: str = ""
    data: CalibrationData | None = None

    def known(self, about: str) -> CalibrationData | None:
        """The data of an earlier call, with all that was computed; None before the first.

        Raises:
            KflatsError: an earlier call was of another model, or of other data.
        """
        if self.data is not None and self.about != about:
            raise KflatsError(
                "the prepared measurements are of another model or of other data",
                hint="measurements of their own for these",
            )
        return self.data


def compress_(
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
    sequential: bool = True,
    seed: int = 0,
    quiet: bool = False,
) -> Report:
    """Replace the named weights of ``model`` by factored ones, in place, within the budget.

        minimise  sum_i w_i dist(a_i, S_c(i))^2   with   stored bytes <= budget

    All weights are fitted before the first is swapped: after an error the model is as it was.

    Args:
        model, recipes, keep, size, texts, tokenizer, calibration, objective, statistics, samples, allocation: as
            ``plan``; or ``recipes`` is a ``Plan``, without a budget.
        sequential: whether linear layers are coded one after another, each for what it reads behind coded tables and
            layers (docs/codecs.md). It needs texts or batches, and a model that is a chain of blocks. False: each by
            itself, which takes less time, and loses more.
        seed: of every random step. Equal seed, data and threads give equal factors.
        quiet: no progress bar.

    Inputs of linear layers are centred where importance asks for it: the mean's error goes into the bias.

    Returns:
        A report of the run, for ``print``, ``report.save`` and ``kflats report``. The model then saves itself
        with ``model.save_pretrained`` (transformers) or ``kflats.save`` (plain torch).

    Raises:
        KflatsError: as ``plan``; NaN in a weight; a budget too small for its method.

    >>> import kflats, torch
    >>> model = torch.nn.ModuleDict({"words": torch.nn.Embedding(200, 16)})
    >>> report = kflats.compress_(model, {"words": kflats.Flats(k=2)}, keep="50%", quiet=True)
    >>> report.weights[0].bytes_after <= 0.5 * 200 * 16 * 4
    True
    """
    check_seed(seed)
    budget = None if isinstance(recipes, Plan) and keep is size is None else one_budget(keep, size)
    data = gather(texts, tokenizer, calibration, objective, statistics, samples).windowed(model, quiet)
    decided = decide(model, recipes, budget, data, Sharing(allocation, quiet=quiet))
    return swapped(model, decided.plan, fitted(model, decided, seed, quiet, None, sequential=sequential), seed)


def compress_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    keep: str | Budget | None = None,
    size: str | Budget | None = None,
    quality: float | None = None,
    method: Recipe | Method | None = None,
    weights: tuple[str, ...] = (),
    plan: Plan | None = None,
    texts: Iterable[str] | None = None,
    calibration: Calibration = None,
    objective: Objective | None = None,
    statistics: Statistics | None = None,
    keep_statistics: str | os.PathLike[str] | None = None,
    prepared: Prepared | None = None,
    samples: int = SAMPLES,
    allocation: Allocation = "auto",
    sequential: bool = True,
    score: Callable[[nn.Module, Any], float] | None = None,
    trim: int | None = None,
    seed: int = 0,
    run_as: RunAs = "dense",
    force: bool = False,
    quiet: bool = False,
    proof: bool = False,
    eval_texts: Sequence[str] | None = None,
    workers: Workers | None = None,
) -> Report:
    """Compress a model folder (or hub name) into a new folder that transformers loads after ``import kflats``.

    Finished weights are kept beside ``out`` until the end, so an interrupted run resumes; ``out`` itself
    appears whole or not at all. Tokenizer, pooling and all else that is no weight are copied. The model card
    says what was done and keeps the original's.

    Args:
        source: a local folder or a hub name. out: the folder to be.
        keep, size, method, weights: as ``compress_``: ``method`` may be a recipe, ``weights`` names, patterns and
            words. Without ``keep`` the default is ``Auto()`` for all weights. Or a ``plan``.
        quality: in place of a size: the smallest folder whose outputs lose at most 1 - quality (docs/proof.md). .99
            where no size, no quality and no plan are given. Sizes are tried in memory, with one measurement, and judged
            on every other of the texts that the proof compares on; the proof compares on the rest.
        texts: running text, as ``plan``; default: calibration texts, which are counted.
        calibration, objective, statistics, samples, allocation: as ``plan``; calibration may also be a function that
            makes batches for the model and its tokenizer. The statistics are kept beside ``out`` until the end too.
        keep_statistics: a file to keep them in for later (``Statistics.load``).
        prepared: for several sizes of one model with the same data: one ``Prepared()`` given to each call, so that
            the model is measured once.
        sequential: as ``compress_``.
        score: of a model and its tokenizer, higher is better: with ``Flats(k=None)`` or ``MESSI(k=None)`` the number
            of flats is the one whose model scores best (``search_flats``), not the one of least error. Needs a size.
        trim: keep this many of the commonest tokens first, counted in ``texts``: as ``trimming.trim``. Budgets in per
            cent are then of the trimmed model.
        run_as: the run-time form that the folder loads in, as ``run_as_``. The proof is of this form. "auto": the
            fastest on this machine that loses at most .002 more than "dense", which ``quality`` then bounds.
        seed: of every random step: an equal seed gives equal bytes.
        force: replace an existing folder that kflats wrote and nobody changed since.
        quiet: show no progress and no notes.
        proof: compare the folder with the original at the end (``kflats.compare``), and write the result into its
            report and its card. The folder is whole before: interrupted, it lacks the proof alone. Where both models do
            not fit into memory, a warning says so in place of the proof.
        eval_texts: to compare on. None: texts that were held out, or the sentences of the package.
        workers: who divide measuring, planning and fitting (docs/scale.md); each of them makes the same call. All of
            them get the report; the first writes the folder, whose bytes do not depend on how many they are.

    Raises:
        KflatsError: as ``compress_``; ``out`` exists, overlaps the original or is written by another run, a full
            disk, a folder without a model; ``prepared`` by another model or other data; ``eval_texts`` or
            ``run_as="auto"`` without a proof; ``score`` with a quality; a quality of a model of which memory holds no
            copy; ``trim`` with a plan, statistics or batches of ids, or of a static model.
    """
    check_seed(seed)
    check_quality(quality, keep or plan, size)
    check_run_form(run_as, auto=True)
    _check_proof(proof, eval_texts, run_as)
    workers = workers or Workers()
    workers.quiet = quiet = quiet or not workers.first
    if plan is None and keep is size is None and quality is None:
        quality = DEFAULT_QUALITY
    budget = None if (plan is not None or quality is not None) and keep is size is None else one_budget(keep, size)
    folder = resolve_model(source)
    if score is not None:
        _check_search(method, quality)
    data = _read(texts, calibration, objective, statistics, samples)
    if trim is not None:
        _check_trim(folder, data, plan)
    named = _recipes(method, weights, whole=keep is None)
    recipes, form = plan or named, _form_to_fit(run_as)
    if available_bytes() < max(_ROOM, _MANY * weight_file_bytes(folder)):
        return_memory_when_freed()
    with (
        new_folder(out, force, [folder], workers) as aside,
        damage_named(folder),
        large_matrices_in(beside_out(expanded(out).resolve(), "partial")),
    ):
        mapped = _is_own(calibration) and _is_own(objective)
        model = load_model(folder, mapped=mapped)
        if workers.first:
            _check_numbers(model)
        _check_fresh(folder, model, whole=keep is None and plan is None)
        data = replace(data, tokenizer=_tokenizer(folder, model, data, recipes)).windowed(model, quiet)
        if mapped and (trim is not None or quality is not None):
            data.trial(model)  # before it is run unwatched: a write into a mapped weight would end the process
        files, trimmed = _FileBytes.of(folder, model), None
        if quality is not None:
            _check_copy(files.loaded)
        whole = _Whole(files.loaded, compute_dtype(model))
        if trim is not None:
            width = files.loaded_width(folder, model)
            trimmed = trimmed_to(model, data.tokenizer, keep=trim, texts=data.texts)
            model, data = trimmed.model, replace(data, tokenizer=trimmed.tokenizer)
            files = files.less(trimmed.report.saved, width)
        budget = None if budget is None else files.budget_in_bytes(budget, model)
        data = _with_batches(data, model, calibration)
        about = model_fingerprint(folder, data, trim)
        if workers.count > 1:
            alike = {"fingerprint": copies_fingerprint(folder, data, trim), "output": os.fspath(aside)}
            workers.agree("the model, the data or its files", alike)
            # What was kept of an interrupted run is the first worker's.
            ((_, about),) = workers.in_turn(["naming the model"], lambda _: ({}, about))
        if prepared is not None:
            data = prepared.known(about) or data

        def measured(pairs: Sequence[tuple[Weight, Recipe]]) -> CalibrationData:
            return measured_once(model, pairs, data, Partial(out, about), quiet, workers)

        def finished(decided: Decided) -> Partial:
            return Partial(out, work_fingerprint(about, decided, seed))

        sharing = Sharing(allocation, files.loaded, files.beside, quiet, workers)
        if score is not None and method is not None and budget is not None:
            tokenizer = data.tokenizer
            found = best_flats(
                model,
                method,
                lambda small: score(small, tokenizer),
                budget,
                data,
                sharing,
                weights=weights,
                measured=measured,
                seed=seed,
            )
            recipes = _recipes(found.recipe, weights, whole=keep is None)
        judged: Sequence[str] | None = data.held_out if eval_texts is None else tuple(eval_texts)
        if quality is None:
            decided = decide(model, recipes, budget, data, sharing, measured=measured)
            limit = files.limit(decided.plan)
            files.check_plan(decided.plan, limit)
            room = None if limit is None else limit - files.beside - limit // _SHARD_BYTES * _SHARD_HEADER
            done = fitted(model, decided, seed, quiet, finished(decided), room, workers, sequential=sequential)
        else:
            judge, judged = _judge(model, data, judged)
            decided, done, limit = smallest(
                model, named, data, measured, finished, judge, quality, seed, form, files.before, sharing, sequential
            )
        if prepared is not None:
            prepared.about, prepared.data = about, decided.data
        if workers.first:
            _keep(decided, keep_statistics)
        spill = Spill(Partial(out, about).folder)
        streams = kept_streams(done if workers.first else ())
        report = swapped(
            model, decided.plan, done, seed, _called(source), files.beside, spill if workers.first else None
        )
        forget_metric()
        set_run_form_(model, form)
        warn_without_effect(model, form)
        report = report if trimmed is None else replace(report, trimming=trimmed.report)
        workers.meet()  # the others have read what they need of the unfinished run
        if not workers.first:
            return report
        inner = aside / weights_folder(folder).relative_to(folder)
        save_model(model, inner, spill=spill, shard=_SHARD, streams=streams)
        if trimmed is None:
            copy_companions(folder, aside)
        else:
            write_vocabulary(trimmed, folder, aside)
        files.check(weight_file_bytes(aside), limit, decided.plan.budget)
        report.save(aside / REPORT_FILE)
        used = data_used(decided, data, trimmed_by_texts=trimmed is not None and data.texts is not None)
        _write_card(folder, aside, report, used, hub_name(source))
    return _proved(report, whole, folder, out, source, judged, run_as, quiet) if proof else report


def plan_folder(
    source: str | os.PathLike[str],
    *,
    keep: str | Budget | None = None,
    size: str | Budget | None = None,
    method: Recipe | Method | None = None,
    weights: tuple[str, ...] = (),
    texts: Iterable[str] | None = None,
    calibration: Calibration = None,
    objective: Objective | None = None,
    statistics: Statistics | None = None,
    keep_statistics: str | os.PathLike[str] | None = None,
    samples: int = SAMPLES,
    allocation: Allocation = "auto",
    quiet: bool = False,
) -> Plan:
    """Plan what ``compress_folder`` would do with the same arguments; nothing is fitted.

    Raises:
        KflatsError: as ``plan``, and a folder without a model.
    """
    budget, folder = one_budget(keep, size), resolve_model(source)
    recipes = _recipes(method, weights, whole=keep is None)
    data = _read(texts, calibration, objective, statistics, samples)
    model = load_model(folder, mapped=_is_own(calibration) and _is_own(objective))
    with damage_named(folder):
        _check_numbers(model)
    _check_fresh(folder, model, whole=keep is None)
    data = replace(data, tokenizer=_tokenizer(folder, model, data, recipes)).windowed(model, quiet)
    data = _with_batches(data, model, calibration)
    files = _FileBytes.of(folder, model)
    budget = files.budget_in_bytes(budget, model)
    decided = decide(model, recipes, budget, data, Sharing(allocation, files.loaded, files.beside, quiet))
    _keep(decided, keep_statistics)
    return decided.plan


def _check_numbers(model: nn.Module) -> None:
    """Refuse NaN and infinity in any weight, also in those that stay as they are, before anything takes long."""
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not weight.is_meta and not all_finite(weight.detach()):
            raise NotFiniteError(
                f"the weight {name} has NaN or infinite values",
                cause="diverged training or a damaged checkpoint",
                hint="load another checkpoint, or replace them",
            )


def _form_to_fit(run_as: RunAs) -> RunForm:
    """The form that sizes are judged in: of "auto", which is settled at the end, the dense one."""
    return "dense" if run_as == "auto" else run_as


def _check_proof(proof: bool, eval_texts: Sequence[str] | None, run_as: RunAs) -> None:
    """Refuse what only a proof uses, without one."""
    if eval_texts is not None and not proof:
        raise KflatsError("eval_texts is not supported without a proof", hint="a proof, or no texts for it")
    if run_as == "auto" and not proof:
        raise KflatsError(
            "the run-time form auto is not supported without a proof", hint="a proof, or a form by name such as int8"
        )


def _check_search(method: Recipe | Method | None, quality: float | None) -> None:
    """Refuse a search by score without flats to count, or with a quality."""
    searched(method)
    if quality is not None:
        raise KflatsError(
            "a search by score is not supported with a quality",
            cause="numbers of flats are compared in the same bytes",
            hint="keep or size",
        )


def _check_trim(folder: Path, data: CalibrationData, plan: Plan | None) -> None:
    """Refuse to trim a vocabulary that something else was made for, and one that is not in the folder."""
    if static_folder(folder) is not None:
        raise KflatsError(
            "trim is not supported with a static model", hint="no trim, or the library that made the model"
        )
    batches = any(not isinstance(item, str) for item in data.calibration or ())
    given = {"a plan": plan is not None, "statistics": data.statistics is not None, "batches of ids": batches}
    if any(given.values()):
        raise KflatsError(
            f"trim is not supported with {next(name for name, there in given.items() if there)}",
            cause="it is of one vocabulary, and trimming makes another",
            hint="trim the model first (kflats trim), then plan, measure and compress what that made",
        )


def _judge(model: nn.Module, data: CalibrationData, judged: Sequence[str] | None) -> tuple[Judge, Sequence[str] | None]:
    """The judge of sizes, on every other of the texts, and the texts that are left for the proof."""
    if judged is None and modality_of(model) != "input_ids":
        return Judge(model, data.tokenizer, seed=1), None  # the proof draws others
    sentences = packaged_texts("judge") if judged is None else judged
    return Judge(model, data.tokenizer, sentences[::2]), sentences[1::2] or sentences


def _write_card(folder: Path, aside: Path, report: Report, used: Sequence[str], base_model: str | None) -> None:
    """Put what was done before the text of the original's model card."""
    files = weight_file_bytes(folder), weight_file_bytes(aside)
    loader = "sentence-transformers" if (aside / "modules.json").is_file() else "transformers"
    own_code = trusts_remote_code() and bool(read_config(weights_folder(aside)).get("auto_map"))
    rewrite_(aside, lambda original: compressed_card(report, files, used, base_model, original, loader, own_code))


def _proved(
    report: Report,
    whole: _Whole,
    folder: Path,
    out: str | os.PathLike[str],
    source: str | os.PathLike[str],
    judged: Sequence[str] | None,
    run_as: RunAs,
    quiet: bool,
) -> Report:
    """The report with the comparison of both folders, which is written into the new one; without it, if that fails."""
    command = f"kflats compare {source} {os.fspath(out)} --card"
    elsewhere = f"{command}, on a machine with more memory"
    try:
        needs, there = whole.compared(run_as) + weight_file_bytes(out), available_bytes()
        if needs > _MODELS * there:
            raise KflatsError(
                f"comparing takes {shown_size(needs)} for models, and of {shown_size(there)} of memory "
                f"{share(_MODELS)} are for them",
                cause="both models are run as a whole",
                hint=elsewhere,
            )
        if run_as == "auto":
            settle_form_(folder, out, judged, quiet=quiet)
            gc.collect()  # its models, which hold methods of their own
        proof = compare(folder, out, judged, quiet=quiet)
        note_proof(out, proof)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the model in {os.fspath(out)} is whole, without a proof: {command}") from None
    except KflatsError as error:
        warnings.warn(KflatsWarning(f"no proof: {error}"), stacklevel=3)
        return report
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        full = KflatsError("memory ran out while the models were compared", hint=elsewhere)
        warnings.warn(KflatsWarning(f"no proof: {full}"), stacklevel=3)
        return report
    return replace(report, proof=proof)


def _check_copy(loaded: int) -> None:
    """Refuse a quality of a model of ``loaded`` bytes of which no copy fits into memory."""
    there = available_bytes()
    if loaded > _MODELS * there:
        raise KflatsError(
            f"a quality is not supported with a model of {shown_size(loaded)} in {shown_size(there)} of memory",
            cause="each size is judged by running a copy of the model as a whole",
            hint='size="30%", or another size: that needs no copy',
        )


@dataclass(frozen=True)
class _Whole:
    """The original as it is loaded: its bytes and the type that it computes in."""

    nbytes: int
    dtype: torch.dtype

    def compared(self, run_as: RunAs) -> int:
        """Bytes of it and its copies while it is compared with what was made of it, codes apart: itself and the decoded
        model; while a float32 one is copied to be timed in bfloat16, the copy; with "auto" two to time forms with."""
        return self.nbytes * (4 if run_as == "auto" else 3 if self.dtype == torch.float32 else 2)


@dataclass(frozen=True)
class _FileBytes:
    """Bytes of a folder's weight files.

    Args:
        before: of all weight files as they are. beside: of modules' files that stay as they are.
        loaded: of files with the weights as they are loaded: those that files lack are written too, and all that a
            static model's file holds beside its table has become part of that.
    """

    before: int
    beside: int
    loaded: int

    @classmethod
    def of(cls, folder: Path, model: nn.Module) -> _FileBytes:
        """Those of the folder that ``model`` was loaded from."""
        before, beside = weight_file_bytes(folder), module_bytes(folder)
        loaded = stored_bytes(model) + beside
        return cls(before, beside, loaded if isinstance(model, StaticModel) else max(before, loaded))

    def loaded_width(self, folder: Path, model: nn.Module) -> float:
        """Bytes of a number in the files, as a share of those that it is loaded in."""
        count = 0
        for path in weights_folder(folder).glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        return min(1.0, (self.before - self.beside) / max(1, count) / (stored_bytes(model) / stored_numbers(model)))

    def less(self, saved: int, width: float) -> _FileBytes:
        """Without ``saved`` bytes of the loaded weights, of which the files hold the share ``width``."""
        return replace(self, before=self.before - round(saved * width), loaded=self.loaded - saved)

    def budget_in_bytes(self, budget: Budget, model: nn.Module) -> Budget:
        """A budget of all files in bytes, where the weights take others there than as they are loaded.

        Raises:
            KflatsError: more than the files take.
        """
        if budget.scope != "file" or self.before == self.loaded:
            return budget
        budget = budget.in_bytes(stored_numbers(model))
        nbytes = budget.amount_of(self.before)
        if nbytes > self.before:
            raise KflatsError(
                f"a budget of {budget} ({nbytes:,} bytes) is more than the model's files take now "
                f"({self.before:,} bytes)",
                hint="a smaller budget",
            )
        return Budget("bytes", nbytes, "file")

    def limit(self, plan: Plan) -> int | None:
        """Bytes that all weight files may take; None if the budget bounds the named weights."""
        return plan.budget.amount_of(self.before) if plan.budget.scope == "file" else None

    def check_plan(self, plan: Plan, limit: int | None) -> None:
        """As ``check``, of the files that a plan makes."""
        changed = [one for one in plan.decisions if not one.recipe.is_dense]
        grown = sum(one.budget_bytes - one.weight.nbytes for one in changed)
        self.check(self.loaded + grown, limit, plan.budget)

    def check(self, after: int, limit: int | None, budget: Budget) -> None:
        """Refuse weight files of ``after`` bytes if that is more than there were, or more than ``limit``."""
        if after > self.before and not budget.larger:
            raise KflatsError(
                f"the new weight files take {after:,} bytes, more than the original's {self.before:,}",
                cause="the model was stored in a narrower type than it was loaded in",
                hint="a smaller budget, or a codec of fewer bits a number",
            )
        if limit is not None and after > limit:
            raise KflatsError(
                f"the new weight files take {after:,} bytes, more than the {limit:,} of the budget",
                cause="a plan that was edited by hand, or more tensors than the original's files had",
                hint="a slightly smaller size, or make the plan again: kflats plan",
            )


def _check_fresh(folder: Path, model: nn.Module, *, whole: bool) -> None:
    """Refuse to compress the ``whole`` of a folder that kflats wrote: what it lost would be lost once more."""
    done = [name for name, layer in factored_layers(model) if layer.owns_matrix]
    done += [name for name, _ in held_matrices(model)]
    if whole and done:
        raise KflatsError(
            f"the model in {folder} is compressed already",
            cause=f"{len(done)} of its weights hold codes or factors of the original's, the first of them {done[0]!r}",
            hint="the original model; or kflats export --dense and compress what that writes; or a share to keep of "
            "weights that are dense still, by their names",
        )


def _recipes(method: Recipe | Method | None, weights: tuple[str, ...], whole: bool) -> Recipes:
    """What is done with which weights; the default under a budget for the ``whole`` folder: all, as they lose least."""
    if whole and method is None:
        method, weights = Auto(), weights or ("all",)
    return dict.fromkeys(weights, method) if weights else method


def _read(
    texts: Iterable[str] | None,
    calibration: Calibration,
    objective: Objective | None,
    statistics: Statistics | None,
    samples: int,
) -> CalibrationData:
    """The data of a folder, without a tokenizer; calibration texts are counted if there are no others."""
    data = gather(texts, None, None if callable(calibration) else calibration, objective, statistics, samples)
    read = tuple(item for item in data.calibration or () if isinstance(item, str))
    return (
        replace(data, texts=read) if data.texts is None and read and len(read) == len(data.calibration or ()) else data
    )


def _is_own(value: object) -> bool:
    """Whether no code of another author is in it, which may write into the model: mapped weights are read-only."""
    return str(getattr(value, "__module__", "kflats")).startswith("kflats")


def _with_batches(data: CalibrationData, model: nn.Module, calibration: Calibration) -> CalibrationData:
    """The data with the batches that a function makes for the model and its tokenizer."""
    if not callable(calibration):
        return data
    return replace(data, calibration=gather(None, None, calibration(model, data.tokenizer), None, None).calibration)


def _keep(decided: Decided, path: str | os.PathLike[str] | None) -> None:
    if path is not None and decided.data.statistics is not None:
        decided.data.statistics.save(path)


def _called(source: str | os.PathLike[str]) -> str:
    """A hub name as it is; of a local folder the end of its path: a report does not say where it lay."""
    folder = Path(source)
    return "/".join(folder.resolve().parts[-2:]) if folder.is_dir() else str(source)


def _tokenizer(folder: Path, model: nn.Module, data: CalibrationData, recipes: Recipes | Plan) -> Any:
    """The folder's tokenizer; a missing one is an error only if a recipe or a text needs it."""
    data.check_reader(model)
    if isinstance(recipes, Plan):
        values = [decision.recipe for decision in recipes.decisions]
    else:
        named = recipes.values() if isinstance(recipes, Mapping) else [recipes]
        values = [as_recipe(value) for value in named if value is not None]
    try:
        return load_tokenizer(folder)
    except KflatsError:
        if data.texts is not None or any(value.importance.needs_tokenizer for value in values):
            raise
        return None


_LABELS = {
    "": "no gradients taken",
    "TaskLoss": "gradients of the task's loss, with labels",
    "SampledLabels": "gradients under labels that the model drew itself: label-free",
    "Projections": "gradients of random projections of the output: label-free",
}


def data_used(decided: Decided, data: CalibrationData, *, trimmed_by_texts: bool = False) -> list[str]:
    """Phrases for the model card, one for each use of data: texts that were counted, the source of a prior, samples
    that were passed through the model.

    Args:
        decided: the plan, the recipes it was made from, and the data with what was measured.
        data: before anything was measured.
        trimmed_by_texts: whether a vocabulary was trimmed first by the tokens of the texts.
    """
    importances = [recipe.importance for _, recipe in decided.recipes if not recipe.is_dense]
    used, items = [], "texts" if data.windows is None else "windows"
    if data.texts is not None and (trimmed_by_texts or any(value.needs_texts for value in importances)):
        used.append(f"{len(data.texts):,} {items}, counted")
    if data.tokenizer is not None and any(value.reads_prior for value in importances):
        used.append("a Zipf prior of the tokenizer's vocabulary")
    statistics = decided.data.statistics
    if statistics is not None and needed(decided.recipes):
        # Custom objectives are known by name alone: only their authors know whether they read labels.
        kind = str(statistics.objective.get("type", ""))
        labels = _LABELS.get(kind, f"gradients of {kind}")
        samples = f"{statistics.samples:,} samples"
        if data.statistics is not None:
            used.append(f"statistics measured before on {samples} ({labels})")
            return used
        passed = data.calibration or data.texts or ()
        if not passed:
            samples = f"{statistics.samples:,} sentences of kflats and sequences drawn by a Zipf prior,"
        elif not isinstance(passed[0], str):
            samples += f", in {len(passed):,} batches,"
        else:
            kept = items if data.calibration in (None, data.texts) else "calibration texts"
            drawn = 0 if data.windows is None or data.calibration is not None else data.windows.drawn
            samples = f"{statistics.samples - drawn:,} of {len(passed):,} {kept}"
            samples += f" and {drawn:,} drawn ones" if drawn else ""
        used.append(f"{samples} passed through the model ({labels})")
    if data.windows is not None and any(items in phrase for phrase in used):
        used.append(f"the windows are of {data.windows.summary}")
    return used
