"""Measure and factorize: every decision of a plan becomes a matrix, resumably, with progress shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.common.release import version
from kflats.common.schema import JsonObject
from kflats.compress.file_headroom import room_in_file
from kflats.compress.result import CompressedWeight, bytes_of_one, gained_numbers
from kflats.importance.weighting import Weighting
from kflats.io.partial import Partial
from kflats.matrices.registry import Matrix, matrix_from_spec
from kflats.methods.problem import Problem
from kflats.model.swap import Weight, dense_weight
from kflats.numerics.flats import Progress
from kflats.numerics.rows import TensorRows
from kflats.planning.calibration_data import CalibrationData
from kflats.planning.costs import bias_bytes
from kflats.recipe.plan import Decision, Plan, as_cast
from kflats.report.analysis import analyse, left_dense
from kflats.report.report import Report, WeightReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHIFT = "bias shift"


def factorize(
    model: nn.Module,
    decided: Plan,
    data: CalibrationData,
    seed: int,
    quiet: bool,
    partial: Partial | None,
    file_limit: int | None = None,
) -> list[CompressedWeight]:
    """Fit every decision of a plan, or take what an interrupted run left in ``partial``; the model is not changed.

    ``file_limit``: bytes of the one weight file that the model will be, header and all; what the others leave of it is
    the last weight's, if its codes can have any size.
    """
    found: dict[str, CompressedWeight] = {}
    free = not decided.budget.counts_labels
    last = _filler(decided)
    spare = 0
    with _progress(quiet) as told:
        for planned in sorted(decided.decisions, key=lambda one: one is last):
            name = planned.weight.name
            decision = replace(planned, recipe=as_cast(planned.weight, planned.recipe))
            if decision.recipe.is_dense:
                found[name] = CompressedWeight(decision, None, left_dense(decision))
                continue
            if planned is last:
                room = None if file_limit is None else room_in_file(model, found, decision, file_limit)
                room = decision.budget_bytes + spare if room is None else room
                decision = replace(decision, budget_bytes=min(room, decision.weight.nbytes))
            stored = partial.get(decision.weight.name) if partial else None
            done = None if stored is None else _restored(decision, *stored)
            if done is None:
                done = _fit(model, decision, data, seed, free, told(name))
                if partial and done.matrix is not None:
                    meta: JsonObject = {"spec": done.matrix.spec(), "report": _alone(done.report).to_json()}
                    shift = {} if done.bias_shift is None else {_SHIFT: done.bias_shift}
                    partial.put(decision.weight.name, done.matrix.tensors() | shift, meta)
            found[name] = done
            spare += decision.budget_bytes - done.report.bytes_after
    return [found[decision.weight.name] for decision in decided.decisions]


def _filler(decided: Plan) -> Decision | None:
    """The weight that takes what the others leave of a budget they share: the largest whose codes can have any size."""
    open_ones = [d for d in decided.decisions if d.recipe.codec.any_size]
    return max(open_ones, key=lambda d: d.budget_bytes, default=None) if decided.allocation == "loss" else None


def _fit(
    model: nn.Module, decision: Decision, data: CalibrationData, seed: int, free_labels: bool, progress: Progress | None
) -> CompressedWeight:
    weight, recipe = decision.weight, decision.recipe
    turned = recipe.matrix_rows == "out_features"
    table = dense_weight(model, weight)
    if table.is_meta:
        raise KflatsError(
            f"{weight.name} has a shape but no values",
            cause="the model is on the meta device, or offloaded by a device_map",
            hint="load it with its weights, on one device",
        )
    rows = TensorRows(table.T if turned else table)
    weighting = data.weigh(weight, recipe)
    nbytes = decision.budget_bytes - bias_bytes(weight, recipe, weighting, not free_labels)
    spectrum = data.spectrum(table, weight, recipe)
    weighting = (weighting.transposed() if turned else weighting).to(table.device)
    dtype = recipe.torch_dtype(weight.dtype)
    problem = Problem(rows, nbytes, dtype.itemsize, weighting, free_labels, seed, progress)
    try:
        factored = recipe.encode(problem, dtype)
    except KflatsError as error:
        raise error.about(weight.name) from error
    matrix = factored.matrix
    if not free_labels and factored.nbytes > nbytes:
        raise AssertionError(f"{weight.name}: {factored.nbytes} bytes exceed the budget of {nbytes}")
    if not (recipe.is_coded or recipe.is_cast) and matrix.num_values >= weight.shape[0] * weight.shape[1]:
        raise KflatsError(
            f"{weight.name}: a budget of {decision.budget_bytes:,} bytes holds the whole table in {dtype}",
            cause="nothing is left to factorize",
            hint="a smaller budget, or cast the model to that type",
        )
    report = analyse(decision, rows, factored, weighting, spectrum, _tokens(weight, data.tokenizer))
    shift = _bias_shift(rows, matrix, weighting, turned) if weight.places[0].role != "embedding" else None
    gained, itemsize = gained_numbers(weight, shift), bytes_of_one(weight)
    report = replace(
        report,
        bytes_after=factored.nbytes + gained * itemsize,
        memory_bytes=matrix.memory_bytes + gained * itemsize,
        values_after=matrix.num_values + gained,
    )
    return CompressedWeight(decision, matrix, report, shift)


def _bias_shift(rows: TensorRows, matrix: Matrix, weighting: Weighting, turned: bool) -> Tensor | None:
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


def _tokens(weight: Weight, tokenizer: PreTrainedTokenizerBase | None) -> list[str] | None:
    if tokenizer is None or weight.places[0].role != "embedding":
        return None
    names = [""] * weight.shape[0]
    for token, row in tokenizer.get_vocab().items():
        if 0 <= row < len(names):
            names[row] = token
    return names


def _restored(decision: Decision, tensors: dict[str, Tensor], meta: dict[str, Any]) -> CompressedWeight | None:
    """A finished weight from an interrupted run; None if it does not fit, and it is fitted again."""
    try:
        report = Report.from_json(meta["report"]).weights[0]
        shift = tensors.get(_SHIFT)
        matrix = matrix_from_spec(meta["spec"], dtype=tensors["weight"].dtype, device="cpu")
        with torch.no_grad():
            for name, tensor in matrix.tensors().items():
                tensor.copy_(tensors[name])
        matrix.refresh()
    except (KflatsError, KeyError, IndexError, RuntimeError):
        return None
    shape = decision.weight.shape
    fits = matrix.shape == (shape[::-1] if decision.recipe.matrix_rows == "out_features" else shape)
    return CompressedWeight(decision, matrix, report, shift) if fits else None


def _alone(report: WeightReport) -> Report:
    return Report("", "", (report,), 0, 0, 0, version())


@contextmanager
def _progress(quiet: bool) -> Iterator[Any]:
    """A function that, given a weight's name, gives the callback that a method reports to."""
    if quiet:
        yield lambda name: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:

        def told(name: str) -> Progress:
            task = bar.add_task(name, total=None)

            def tell(phase: str, iteration: int, objective: float) -> None:
                value = f", objective {objective:.6g}" if objective else ""
                bar.update(task, description=f"{name}: {phase}, step {iteration}{value}")

            return tell

        yield told
