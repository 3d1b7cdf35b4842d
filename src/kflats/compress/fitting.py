"""Measure and factorize: every decision of a plan becomes a matrix, resumably, with progress shown."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kflats.calibration.measurements import Statistics
from kflats.codecs.streams import KeptStreams
from kflats.common.errors import DoesNotFitError, KflatsError
from kflats.common.formatting import Update, progress_bar, some
from kflats.common.hashing import sha256
from kflats.common.paths import expanded
from kflats.common.release import version
from kflats.common.schema import JsonObject, decode
from kflats.common.torch_settings import usual_settings
from kflats.common.workers import Packed, Workers
from kflats.importance.protocol import Weighting
from kflats.io import annotate_
from kflats.io.atomic import beside, replaced
from kflats.io.mapped import Spill, mapped_tensors, read_header
from kflats.io.saving import header_bytes
from kflats.matrices.registry import CodedMatrix, Matrix, matrix_of
from kflats.methods.protocol import Factored, Problem
from kflats.model.run_as import forget_losses_
from kflats.model.swap import Swaps, unchanged_on_error
from kflats.model.weights import Weight, WeightUse, factored_layers, held_matrices, is_parameter, parameter
from kflats.numerics.rows import Rows, TensorRows
from kflats.planning.calibration_data import CalibrationData, needed
from kflats.planning.candidates import bias_bytes
from kflats.planning.decide import Decided
from kflats.recipe.budget import Budget
from kflats.recipe.recipe import Decision, Plan, Recipe, as_cast, largest_of_any_size, to_json
from kflats.report.report import Report, WeightReport, analyse, left_dense, stored_bytes

_SHIFT, _STREAM = "bias shift", "stream of the file"
_SVD_SIDE = 768
"""Reports compare weights with an SVD that takes seconds: those that are stored by no axes, up to this side."""
_CODES = ("codes", "weight", "shrink", "basis_scale")
_NO_TARGETS: Mapping[str, Target] = MappingProxyType({})


@dataclass(frozen=True)
class CompressedWeight:
    """A decision that is carried out: the matrix to swap in, and its report.

    ``matrix`` is None for a weight that stays dense. ``bias_shift`` (d,) is what the layer's bias takes over of the
    error of the matrix: its mean, mean' (M - M^). ``stream``: the integers of a coded matrix as the file will hold
    them, on disk; None: not kept.
    """

    decision: Decision
    matrix: Matrix | None
    report: WeightReport
    bias_shift: Tensor | None = None
    stream: Tensor | None = None

    def dense(self) -> Tensor:
        """(n, d) float32: the matrix as it is stored, with inputs as rows."""
        assert self.matrix is not None
        with torch.no_grad():
            every = torch.arange(self.matrix.shape[0], device=self.matrix.weight.device)
            rows = self.matrix.rows(every, dtype=torch.float32)
        return rows.T if self.decision.recipe.matrix_rows == "out_features" else rows

    @property
    def packed(self) -> int:
        """Bytes of the model's state that a file of streams does not hold."""
        if self.matrix is None:
            return 0
        weight = self.decision.weight
        if is_parameter(weight.places[0].role):
            return weight.nbytes - self.report.bytes_after
        gained = _gained_numbers(weight, self.bias_shift) * weight.nbytes // math.prod(weight.shape)
        return self.matrix.nbytes + gained - self.report.bytes_after


def factorize(
    model: nn.Module,
    plan: Plan,
    data: CalibrationData,
    seed: int,
    quiet: bool,
    partial: Partial | None,
    file_limit: int | None = None,
    workers: Workers | None = None,
) -> list[CompressedWeight]:
    """Fit every decision of a plan, or take what an interrupted run left in ``partial``; the model is not changed.

    ``file_limit``: bytes of the one weight file that the model will be, header and all. The last weight takes the bytes
    that the others leave of it, if its codes can have any size.

    ``workers`` fit different weights, the largest first, and take those of others from ``partial``, which all of them
    must see.
    """
    with progress_bar(quiet=quiet) as update:
        fits = Fits.of(model, plan, data, seed, partial, update, workers or Workers(), file_limit)
        done, open_ones = fits.begun()
        fits.finish_(done, open_ones)
    return [done[decision.weight.name] for decision in plan.decisions]


@dataclass(frozen=True)
class Target:
    """What is coded in place of a layer's own matrix: ``matrix`` (n, d), inputs as rows.

    ``shift``: what the bias gains, (d,), from what was made of it, (n, d); None: nothing. ``note``: for the report.
    """

    matrix: Tensor
    shift: Callable[[Tensor], Tensor] | None
    note: str


@dataclass(frozen=True)
class Fits:
    """What the fits of one plan share."""

    model: nn.Module
    plan: Plan
    data: CalibrationData
    seed: int
    partial: Partial | None
    update: Update
    workers: Workers
    file: _File | None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        plan: Plan,
        data: CalibrationData,
        seed: int,
        partial: Partial | None,
        update: Update,
        workers: Workers,
        file_limit: int | None,
    ) -> Fits:
        """``file_limit``: as ``factorize``."""
        file = None if file_limit is None else _File.of(model, file_limit)
        return cls(model, plan, data, seed, partial, update, workers, file)

    def begun(self) -> tuple[dict[str, CompressedWeight], list[Decision]]:
        """Weights that stay dense, by name, and the decisions that are to be carried out."""
        chosen = [replace(one, recipe=as_cast(one.weight, one.recipe)) for one in self.plan.decisions]
        done = {one.weight.name: CompressedWeight(one, None, left_dense(one)) for one in chosen if one.recipe.is_dense}
        return done, [one for one in chosen if not one.recipe.is_dense]

    def finish_(self, done: dict[str, CompressedWeight], decisions: Sequence[Decision]) -> None:
        """Carry out all that is left, and add it to ``done``. The largest weight whose codes can have any size comes
        last."""
        adjusted = self.adjusted(decisions)
        self.add_to_(done, [one for one in decisions if one is not adjusted])
        if adjusted is not None:
            self.add_to_(done, self.with_room(done, [adjusted], [adjusted]))

    def adjusted(self, decisions: Sequence[Decision]) -> Decision | None:
        """The weight that takes what the others leave of the budget."""
        return largest_of_any_size(decisions) if self.plan.allocation == "loss" else None

    def with_room(
        self, done: Mapping[str, CompressedWeight], waiting: Sequence[Decision], given: Sequence[Decision]
    ) -> list[Decision]:
        """The ``given`` decisions among those ``waiting``, each with its share of the bytes that all that is ``done``
        leaves of the budget. Weights whose codes cannot have any size keep theirs."""
        able = [one for one in waiting if one.recipe.codec.any_size]
        planned = sum(one.budget_bytes for one in able)
        if self.plan.allocation != "loss" or not planned:
            return list(given)
        made = [done[one.weight.name] for one in self.plan.decisions if one.weight.name in done]
        first = {one.weight.name: one.budget_bytes for one in self.plan.decisions}
        spare = sum(first[one.decision.weight.name] - one.report.bytes_after for one in made if one.matrix is not None)
        room = None if self.file is None else self.file.room(done, waiting)
        room = planned + spare if room is None else room - sum(one.budget_bytes for one in waiting if one not in able)
        return [
            replace(one, budget_bytes=min(max(room, 0) * one.budget_bytes // planned, one.weight.nbytes))
            if one.recipe.codec.any_size
            else one
            for one in given
        ]

    def add_to_(
        self,
        done: dict[str, CompressedWeight],
        decisions: Sequence[Decision],
        targets: Mapping[str, Target] = _NO_TARGETS,
    ) -> None:
        """Carry out these decisions, the largest weights first, with ``targets`` by name, and add them to ``done``.
        Where a target does not fit, the weight itself is coded."""
        groups = _groups(decisions, self.workers.count)
        places = list(accumulate(map(len, groups), initial=len(done)))
        tasks = [f"fitting {_names(group)}" for group in groups]
        packed = Packed[list[CompressedWeight]](
            lambda made: some([one.decision.weight.name for one in made]),
            lambda index, names: [self.written(decision) for decision in groups[index]],
        )
        made = self.workers.divided(tasks, lambda index: self._group(groups[index], places[index], targets), packed)
        done.update({one.decision.weight.name: one for group in made for one in group})

    def _group(self, group: Sequence[Decision], place: int, targets: Mapping[str, Target]) -> list[CompressedWeight]:
        """What ``_groups`` puts together: each weight is fitted and written, or taken from an interrupted run."""
        made = {one.weight.name: self.stored(one) for one in group}
        open_ones = [one for one in group if made[one.weight.name] is None]
        self.update(f"fitting {_names(open_ones or group)}", place, len(self.plan.decisions))
        fitted = self._fitted_together(open_ones, place, targets) if len(open_ones) > 1 else None
        for one in open_ones:
            # No name holds what was fitted: it is gone once it is written.
            target = targets.get(one.weight.name)
            made[one.weight.name] = self.kept(
                self._reported(one, *fitted.pop(0), target) if fitted else self._alone(one, place, target)
            )
        return [one for one in made.values() if one is not None]

    def _alone(self, one: Decision, place: int, target: Target | None) -> CompressedWeight:
        if target is not None:
            with suppress(DoesNotFitError):  # integers of one width may take more bytes than those of the weight
                return self._reported(one, *self._fitted([one], place, {one.weight.name: target})[0], target)
        return self._reported(one, *self._fitted([one], place, {})[0], None)

    def _fitted_together(
        self, decisions: Sequence[Decision], place: int, targets: Mapping[str, Target]
    ) -> list[tuple[Problem, Factored]] | None:
        """None: one of them cannot be fitted. The error of a fit of that one alone names it."""
        try:
            return self._fitted(decisions, place, targets)
        except KflatsError:
            return None

    def _fitted(
        self, decisions: Sequence[Decision], place: int, targets: Mapping[str, Target]
    ) -> list[tuple[Problem, Factored]]:
        def show(name: str, phase: str, iteration: int, objective: float) -> None:
            value = f", objective {objective:.6g}" if objective else ""
            self.update(f"{name}: {phase}, step {iteration}{value}", place, len(self.plan.decisions))

        with usual_settings():
            return _fit(self.model, decisions, self.data, self.seed, self.plan.budget, show, targets)

    def _reported(
        self, decision: Decision, problem: Problem, factored: Factored, target: Target | None
    ) -> CompressedWeight:
        """What was made of a weight, with its report."""
        with usual_settings():
            made = _compressed(self.model, decision, self.data, self.plan.budget, problem, factored)
        if target is None:
            return made
        shift = made.bias_shift if target.shift is None else target.shift(made.dense()).to(torch.float32)
        note = "; ".join(filter(None, (made.report.note, target.note)))
        return replace(made, bias_shift=shift, report=replace(made.report, note=note))

    def kept(self, one: CompressedWeight) -> CompressedWeight:
        """The same, written and mapped, where there is a ``partial`` run."""
        if self.partial is None or one.matrix is None:
            return replace(one, stream=None)
        decision, matrix = one.decision, one.matrix
        meta: JsonObject = {"spec": matrix.spec(), "report": asdict(one.report)}
        beside = {_SHIFT: one.bias_shift, _STREAM: one.stream}
        given = {key: tensor for key, tensor in beside.items() if tensor is not None}
        self.partial.put(decision.weight.name, matrix.tensors() | given, meta)
        del one, matrix, beside, given  # what was written takes its place, and stays on disk
        return self.written(decision)

    def stored(self, decision: Decision) -> CompressedWeight | None:
        """What was written of this weight, if anything was."""
        stored = self.partial.get(decision.weight.name) if self.partial else None
        return None if stored is None else _restored(decision, *stored)

    def written(self, decision: Decision) -> CompressedWeight:
        """What this or another worker wrote of this weight.

        Raises:
            KflatsError: it cannot be read.
        """
        made = self.stored(decision)
        if made is None:
            raise KflatsError(
                f"{decision.weight.name}, which was fitted and written, cannot be read",
                cause="a failing disk, or several workers that do not see one folder",
                hint="an output on another disk, in a folder that all workers see",
            )
        return made


def swapped(
    model: nn.Module,
    plan: Plan,
    done: list[CompressedWeight],
    seed: int,
    name: str = "",
    beside: int = 0,
    spill: Spill | None = None,
) -> Report:
    """Swap what was fitted into ``model``, in place; after an error it is as it was. Returns the report of the run.

    ``beside``: bytes of other modules' weight files, which belong to the whole model and stay as they are. ``spill``:
    where the numbers of parameters that their modules read go; None: they stay in memory.
    """
    before = stored_bytes(model) + beside
    with unchanged_on_error(model):
        with Swaps(model) as swaps:
            for one in done:
                if one.matrix is not None:
                    rows = one.decision.recipe.matrix_rows
                    swaps.swap_(one.decision.weight, one.matrix, matrix_rows=rows, bias_shift=one.bias_shift)
                    table = parameter(model, one.decision.weight.name)
                    if spill is not None and table is not None:
                        table.data = spill.kept({"dense": table.data})["dense"]
        forget_losses_(model)
        annotate_(model)
    return Report(
        model=name or str(getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__),
        budget=str(plan.budget),
        weights=tuple(one.report for one in done),
        model_bytes_before=before,
        model_bytes_after=stored_bytes(model) + beside - sum(one.packed for one in done),
        seed=seed,
        version=version(),
    )


def kept_streams(done: Sequence[CompressedWeight]) -> KeptStreams:
    """The streams of all weights that have one."""
    streams = KeptStreams()
    for one in done:
        if one.stream is not None and isinstance(one.matrix, CodedMatrix):
            streams.keep(one.matrix, one.stream)
    return streams


@dataclass(frozen=True)
class _File:
    """The one safetensors file that a model will be: its bytes at most, and the model's tensors before any swap: the
    identity of each, its name, type, shape and bytes, by the length of names."""

    limit: int
    tensors: tuple[tuple[int, str, str, torch.Size, int], ...]

    @classmethod
    def of(cls, model: nn.Module, limit: int) -> _File | None:
        """None for a model with factored layers, whose entries in a file are not known."""
        if any(True for _ in (*factored_layers(model), *held_matrices(model))):
            return None
        named = sorted(model.state_dict(keep_vars=True).items(), key=lambda item: len(item[0]))
        return cls(
            limit,
            tuple((id(one), name, str(one.dtype), one.shape, one.numel() * one.element_size()) for name, one in named),
        )

    def room(self, done: Mapping[str, CompressedWeight], last: Sequence[Decision]) -> int | None:
        """Bytes for the codes of the ``last`` weights, with all else in the file; None if nothing is left.

        Args:
            done: every other named weight, fitted or left dense, by name.
        """
        fitted = [one for one in done.values() if one.matrix is not None]
        swapped = [*(one.weight for one in last), *(one.decision.weight for one in fitted)]
        gone = {_table_name(place) for weight in swapped for place in weight.places}
        # Of several names of one tensor a file holds one: the longest needs most.
        kept = {key: (name, dtype, shape, n) for key, name, dtype, shape, n in self.tensors if name not in gone}
        beside = sum(nbytes for *_, nbytes in kept.values()) + sum(one.report.bytes_after for one in fitted)
        if beside >= self.limit:
            return None
        entries: dict[str, tuple[str, Sequence[int]]]
        entries = {name: (dtype, shape) for name, dtype, shape, _ in kept.values()}
        for one in fitted:
            coded = isinstance(one.matrix, CodedMatrix)
            parts = one.matrix.tensors() if one.matrix is not None else {}
            entries |= {
                f"{one.decision.weight.name}.{key}": (str(tensor.dtype), tensor.shape)
                for key, tensor in parts.items()
                if not coded or key == "codes" or tensor.is_floating_point()
            }
        entries |= {f"{one.weight.name}.{key}": ("BF16", (self.limit,)) for one in last for key in _CODES}
        gained = [*(one.weight for one in last), *(one.decision.weight for one in fitted if one.bias_shift is not None)]
        entries |= {f"{one.name}.bias": ("BF16", (one.shape[1],)) for one in gained if not one.bias}
        return max(0, self.limit - beside - header_bytes(entries, self.limit)) or None


def _table_name(place: WeightUse) -> str:
    """The name of a place's dense table in the model's state."""
    return place.name if is_parameter(place.role) else f"{place.name}.weight"


def _groups(decisions: Iterable[Decision], workers: int) -> list[list[Decision]]:
    """The largest weights first. In a group are weights that are encoded together: of one shape and type, with one
    method and codec, no more than leaves every worker a group. Their importances may differ."""
    kinds: list[list[Decision]] = []
    of_shape: dict[tuple[object, ...], list[list[Decision]]] = {}
    for one in decisions:
        known = of_shape.setdefault((one.weight.shape, one.weight.dtype, one.recipe.matrix_rows), [])
        kind = next((kind for kind in known if _encoded_alike(kind[0].recipe, one.recipe)), None)
        if kind is None:
            kinds.append(kind := [])
            if _together(one) > 1:  # other codecs may not be comparable
                known.append(kind)
        kind.append(one)
    groups = []
    for kind in kinds:
        count = min(_together(kind[0]), math.ceil(len(kind) / workers))
        groups += [kind[start : start + count] for start in range(0, len(kind), count)]
    return sorted(groups, key=lambda group: -math.prod(group[0].weight.shape))


def _together(one: Decision) -> int:
    shape, recipe = one.weight.shape, one.recipe
    return max(1, recipe.codec.together(shape[::-1] if recipe.matrix_rows == "out_features" else shape))


def _encoded_alike(one: Recipe, other: Recipe) -> bool:
    return type(one.codec) is type(other.codec) and (one.codec, one.method) == (other.codec, other.method)


def _names(decisions: Iterable[Decision]) -> str:
    return some([one.weight.name for one in decisions], 1)


def _fit(
    model: nn.Module,
    decisions: Sequence[Decision],
    data: CalibrationData,
    seed: int,
    budget: Budget,
    show: Callable[[str, str, int, float], None],
    targets: Mapping[str, Target],
) -> list[tuple[Problem, Factored]]:
    """Fit weights of one shape and type with one method and codec, or their ``targets``, by name; ``show`` is given the
    name of one and its progress. Problems are those of the weights themselves.

    Raises:
        KflatsError: one of them cannot be fitted; it names the first.
    """
    recipe, dtype = decisions[0].recipe, decisions[0].recipe.torch_dtype(decisions[0].weight.dtype)
    problems = []
    for one in decisions:
        rows, weighting = data.matrix(model, one.weight, one.recipe)
        nbytes = one.budget_bytes - bias_bytes(one.weight, one.recipe, weighting, budget.counts_labels)
        progress = functools.partial(show, one.weight.name)
        problems.append(Problem(rows, nbytes, dtype.itemsize, weighting, not budget.counts_labels, seed, progress))
    wanted = [_aimed(problem, one, targets) for problem, one in zip(problems, decisions, strict=True)]
    try:
        return list(zip(problems, recipe.encode_together(wanted, dtype), strict=True))
    except KflatsError as error:
        raise error.about(decisions[0].weight.name) from error


def _aimed(problem: Problem, decision: Decision, targets: Mapping[str, Target]) -> Problem:
    """The problem with the target of its weight, where it has one."""
    target = targets.get(decision.weight.name)
    if target is None:
        return problem
    turned = decision.recipe.matrix_rows == "out_features"
    return replace(problem, rows=TensorRows(target.matrix.T if turned else target.matrix))


def _compressed(
    model: nn.Module, decision: Decision, data: CalibrationData, budget: Budget, problem: Problem, factored: Factored
) -> CompressedWeight:
    """What was made of a weight, checked, with its shift of the bias and its report."""
    weight, recipe, matrix = decision.weight, decision.recipe, factored.matrix
    rows, weighting = problem.rows, problem.weighting
    turned = recipe.matrix_rows == "out_features"
    if not problem.free_labels and factored.nbytes > problem.nbytes:
        raise AssertionError(f"{weight.name}: {factored.nbytes} bytes exceed the budget of {problem.nbytes}")
    if (
        not (recipe.is_coded or recipe.is_cast or budget.larger)
        and matrix.num_values >= weight.shape[0] * weight.shape[1]
    ):
        raise KflatsError(
            f"{weight.name}: a budget of {decision.budget_bytes:,} bytes holds the whole table in"
            f" {recipe.torch_dtype(weight.dtype)}",
            hint="a smaller budget, or cast the model to that type",
        )
    shift = _bias_shift(rows, matrix, weighting, turned) if weight.places[0].role != "embedding" else None
    beside_svd = recipe.method.produces != "dense" or min(rows.shape) <= _SVD_SIDE
    tails = data.spectrum(model, weight, recipe) if beside_svd else None
    report = analyse(decision, rows, factored, weighting, tails, _gained_numbers(weight, shift))
    return CompressedWeight(decision, matrix, report, shift, factored.stream)


def _bias_shift(rows: Rows, matrix: Matrix, weighting: Weighting, turned: bool) -> Tensor | None:
    """mean' (M - M^): what the bias must add so that the mean input keeps its output."""
    if weighting.mean is None:
        return None
    everything = torch.arange(rows.shape[0], device=rows.device)
    with torch.no_grad():
        whole = rows.take(everything)
        # Factors are widened before they are multiplied, as in the layer.
        error = (whole - matrix.rows(everything, dtype=whole.dtype)).to(torch.float64)
        mean = weighting.mean.to(torch.float64)
        return (error @ mean if turned else mean @ error).to(torch.float32)


def _restored(decision: Decision, tensors: dict[str, Tensor], meta: dict[str, Any]) -> CompressedWeight | None:
    """A finished weight from an interrupted run; None if it does not fit, and it is fitted again."""
    try:
        report: WeightReport = decode(WeightReport, meta["report"], "report")
        shift, stream = tensors.pop(_SHIFT, None), tensors.pop(_STREAM, None)
        matrix = matrix_of(meta["spec"], tensors)
    except (KflatsError, KeyError):
        return None
    shape = decision.weight.shape
    fits = matrix.shape == (shape[::-1] if decision.recipe.matrix_rows == "out_features" else shape)
    return CompressedWeight(decision, matrix, report, shift, stream) if fits else None


def _gained_numbers(weight: Weight, shift: Tensor | None) -> int:
    """Numbers of a bias that the layer did not have before."""
    return 0 if shift is None or weight.bias else len(shift)


def measured_once(
    model: nn.Module,
    recipes: Sequence[tuple[Weight, Recipe]],
    data: CalibrationData,
    partial: Partial,
    quiet: bool,
    workers: Workers | None = None,
) -> CalibrationData:
    """The data with its statistics: measured, by all ``workers``, or what an interrupted run measured of the same."""
    workers = workers or Workers()
    needs = needed(recipes)
    if not needs or data.statistics is not None:
        return data
    fields = json.dumps({name: sorted(fields) for name, fields in sorted(needs.items())})
    name = sha256([partial.fingerprint, fields])[:24]
    path = partial.folder / f"statistics-{name}.safetensors"

    def looked_for(_: int) -> tuple[dict[str, Tensor], str]:
        if path.is_file() and not path.is_symlink():
            with suppress(KflatsError):  # damaged: measured again
                Statistics.load(path, mapped=True)
                return {}, "found"
        return {}, "absent"

    # The first worker alone looks: a network's folder may remember for others that there was no such file.
    ((_, kept),) = workers.in_turn(["looking for what an interrupted run measured"], looked_for)
    if kept == "found":
        return replace(data, statistics=Statistics.load(path, mapped=True))
    return data.measured(model, recipes, quiet, workers, partial.folder if workers.first else None, path)


def model_fingerprint(folder: Path, data: CalibrationData, trim: int | None) -> str:
    """The model, and all data: what measurements depend on."""
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in _model_files(folder))
    about = [str(folder), files, data.digest(), version(), trim]
    return sha256([json.dumps(about)])


def copies_fingerprint(folder: Path, data: CalibrationData, trim: int | None) -> str:
    """The same for copies of a model in other places, made at other times.

    Of files of weights the head, the end and places between are read, not all: two models of one shape differ there,
    unless somebody has changed single numbers.
    """
    files = sorted((path.name, path.stat().st_size, _sample_digest(path)) for path in _model_files(folder))
    return sha256([json.dumps([files, data.digest(), version(), trim])])


def _model_files(folder: Path) -> list[Path]:
    """The weights, and the tokenizer's files: counts and priors come from those."""
    kinds = (".safetensors", ".json", ".txt", ".model")
    paths = [path for path in folder.rglob("*") if path.suffix in kinds]
    # Hidden files and folders are not the model's.
    return [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


_SAMPLES, _SAMPLE = 64, 2**16  # places of a file, and bytes at each


def _sample_digest(path: Path) -> str:
    """Of a file's bytes; of a long one's at evenly spaced places, the first and the last among them."""
    size = path.stat().st_size
    last = max(0, size - _SAMPLE)
    places = sorted({last * place // (_SAMPLES - 1) for place in range(_SAMPLES)}) if last else [0]
    parts = []
    with path.open("rb") as file:
        for place in places:
            file.seek(place)
            parts.append(file.read(_SAMPLE))
    return sha256(parts)


def work_fingerprint(about: str, decided: Decided, seed: int) -> str:
    """Everything the factors depend on."""
    plan = decided.plan
    recipes = [
        [d.weight.name, d.weight.shape, d.weight.dtype, to_json(d.recipe), d.budget_bytes] for d in plan.decisions
    ]
    names = needed((d.weight, d.recipe) for d in plan.decisions)
    parts = [about, recipes, str(plan.budget), decided.data.statistics_digest(names), seed]
    return sha256([json.dumps(parts)])


class Partial:
    """Finished weights of an unfinished run, in ``.<name>.kflats-partial`` beside ``out``, so that it can resume.

    One safetensors file per weight and ``fingerprint`` of all input, written aside, made durable, and renamed. A file
    that is damaged counts as absent and is overwritten.

    >>> import tempfile, torch
    >>> partial = Partial(Path(tempfile.mkdtemp()) / "small", "model and settings")
    >>> partial.put("words", {"weight": torch.ones(2)}, {"seconds": 1.5})
    >>> partial.get("words")
    ({'weight': tensor([1., 1.])}, {'seconds': 1.5})
    """

    def __init__(self, out: str | os.PathLike[str], fingerprint: str) -> None:
        out = expanded(out).resolve()
        self.folder = beside(out, "partial")
        self.fingerprint = fingerprint

    def get(self, name: str) -> tuple[dict[str, Tensor], JsonObject] | None:
        """Tensors, mapped, and meta that ``put`` stored under ``name``; None where there are none, or damaged ones."""
        path = self._path(name)
        if path.is_symlink() or not path.is_file():
            return None
        try:
            with path.open("rb") as file:
                header, _ = read_header(file, path)
            tensors = mapped_tensors(path)
            if header["digest"] == self._digest(name, header["meta"], tensors):
                return tensors, json.loads(header["meta"])
        except (KflatsError, OSError, KeyError, ValueError):
            pass
        return None

    def put(self, name: str, tensors: dict[str, Tensor], meta: JsonObject) -> None:
        """Store ``tensors`` and JSON-able ``meta`` under ``name``.

        Raises:
            KflatsError: the disk is full, or the folder cannot be written.
        """
        path = self._path(name)
        stored = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        text = json.dumps(meta, allow_nan=False)
        header = {"meta": text, "digest": self._digest(name, text, stored)}
        with replaced(path) as aside:
            save_file(stored, aside, metadata=header)

    def beside(self, name: str) -> Partial:
        """What is kept of the same run under another name: no name here is one there."""
        other = copy.copy(self)
        other.fingerprint = sha256([self.fingerprint, name])
        return other

    def _path(self, name: str) -> Path:
        return self.folder / f"{sha256([self.fingerprint, name])[:24]}.safetensors"

    def _digest(self, name: str, meta: str, tensors: dict[str, Tensor]) -> str:
        """SHA-256 of all that is stored: it shows a disk's errors, which a renamed file may still have."""
        parts = (part for item in sorted(tensors.items()) for part in item)
        return sha256([self.fingerprint, name, meta, *parts])
