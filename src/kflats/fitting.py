"""Measure and factorize: every decision of a plan becomes a matrix, resumably, with progress shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from kflats.analysis import analyse
from kflats.budget import parse_budget
from kflats.errors import KflatsError
from kflats.folders import Partial
from kflats.importance import Uniform
from kflats.measured import Measured
from kflats.methods import Factored, Problem
from kflats.nn.matrix import Matrix, matrix_from_spec
from kflats.numerics.flats import Progress
from kflats.numerics.rows import TensorRows
from kflats.plan import Decision, Plan, Recipe
from kflats.report import Report, WeightReport
from kflats.statistics import count_tokens, zipf_prior
from kflats.surgery import Weight, dense_weight


@dataclass(frozen=True)
class Done:
    """One weight, fitted: what was decided, the matrix to swap in, and what to report of it."""

    decision: Decision
    matrix: Matrix
    report: WeightReport


def factorize(
    model: nn.Module,
    decided: Plan,
    texts: tuple[str, ...] | None,
    tokenizer: Any,
    seed: int,
    quiet: bool,
    partial: Partial | None,
) -> list[Done]:
    """Fit every decision of a plan, or take what an interrupted run left in ``partial``; the model is not changed."""
    found = []
    free = not parse_budget(decided.budget).counts_labels if decided.budget else False
    with _progress(quiet) as told:
        for decision in decided.decisions:
            stored = partial.get(decision.weight.name) if partial else None
            done = None if stored is None else _restored(decision, *stored)
            if done is None:
                done = _fit(model, decision, texts, tokenizer, seed, free, told(decision.weight.name))
                if partial:
                    meta = {"spec": done.matrix.spec(), "report": _alone(done.report).to_json()}
                    partial.put(decision.weight.name, done.matrix.tensors(), meta)
            found.append(done)
    return found


def _fit(
    model: nn.Module,
    decision: Decision,
    texts: tuple[str, ...] | None,
    tokenizer: Any,
    seed: int,
    free_labels: bool,
    progress: Progress | None,
) -> Done:
    weight, recipe = decision.weight, decision.recipe
    table = dense_weight(model, weight)
    rows = TensorRows(table)
    w = _weigh(weight, recipe, texts, tokenizer)
    w = None if w is None else w.to(table.device)
    dtype = recipe.codec.torch_dtype(weight.dtype)
    problem = Problem(rows, decision.budget_bytes, dtype.itemsize, w, free_labels, seed, progress)
    try:
        factored = recipe.method.fit(problem)
    except KflatsError as error:
        raise KflatsError(f"{weight.name}: {error.symptom}", cause=error.cause, hint=error.hint) from error
    matrix = factored.matrix.to(dtype)
    if not all(bool(torch.isfinite(t).all()) for t in matrix.tensors().values()):
        raise KflatsError(
            f"{weight.name}: its coordinates overflow {str(dtype).removeprefix('torch.')}",
            cause="rows with very large values",
            hint="a type of more range: Float('bfloat16') or Float('float32')",
        )
    if not free_labels and matrix.nbytes > decision.budget_bytes:
        raise AssertionError(f"{weight.name}: {matrix.nbytes} bytes exceed the budget of {decision.budget_bytes}")
    if matrix.num_values >= weight.shape[0] * weight.shape[1]:
        raise KflatsError(
            f"{weight.name}: a budget of {decision.budget_bytes:,} bytes holds the whole table in {dtype}",
            cause="nothing is left to factorize",
            hint="a smaller budget, or cast the model to that type",
        )
    report = analyse(
        decision, rows, Factored(matrix, factored.objective, factored.seconds), w, _tokens(weight, tokenizer)
    )
    return Done(decision, matrix, report)


def _weigh(weight: Weight, recipe: Recipe, texts: tuple[str, ...] | None, tokenizer: Any) -> Tensor | None:
    importance = recipe.importance
    if isinstance(importance, Uniform):
        return None
    n = weight.shape[0]
    counts = prior = None
    if tokenizer is not None:
        prior = zipf_prior(tokenizer, n)
        if texts is not None:
            counts = count_tokens(texts, tokenizer, n)
    head = any(place.role == "head" for place in weight.places)
    return importance.weigh(Measured(n, counts, prior, head)).rows


def _tokens(weight: Weight, tokenizer: Any) -> list[str] | None:
    if tokenizer is None or weight.places[0].role != "embedding":
        return None
    names = [""] * weight.shape[0]
    for token, row in tokenizer.get_vocab().items():
        if 0 <= row < len(names):
            names[row] = token
    return names


def _restored(decision: Decision, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Done | None:
    """A finished weight from an interrupted run; None if it does not fit, and it is fitted again."""
    try:
        report = Report.from_json(meta["report"]).weights[0]
        matrix = matrix_from_spec(meta["spec"], dtype=tensors["weight"].dtype, device="cpu")
        with torch.no_grad():
            for name, tensor in matrix.tensors().items():
                tensor.copy_(tensors[name])
        matrix.refresh()
    except (KflatsError, KeyError, IndexError, RuntimeError):
        return None
    return Done(decision, matrix, report) if matrix.shape == decision.weight.shape else None


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


def version() -> str:
    """kflats' own version, "0" for a checkout that was never installed."""
    try:
        return installed_version("kflats")
    except PackageNotFoundError:
        return "0"
