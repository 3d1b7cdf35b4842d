"""The pipeline on one page: select -> measure -> allocate -> factorize -> swap -> report."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from kflats.analysis import analyse, stored_bytes
from kflats.budget import Budget, parse_budget
from kflats.errors import KflatsError
from kflats.evaluate import load_tokenizer, weight_file_bytes
from kflats.files import annotate_, load_model
from kflats.folders import Partial, new_folder
from kflats.importance import Measured, Uniform
from kflats.methods import Factored, Problem
from kflats.nn.matrix import Matrix, matrix_from_spec
from kflats.numerics.flats import Progress
from kflats.numerics.rows import TensorRows
from kflats.plan import Decision, Plan, Recipe, as_recipe, to_json
from kflats.planning import decide, required
from kflats.planning import plan as make_plan
from kflats.report import REPORT_FILE, Report, WeightReport
from kflats.sources import copy_companions, resolve_model, weights_folder
from kflats.statistics import count_tokens, zipf_prior
from kflats.surgery import Weight, dense_weight, swap_, unchanged_on_error


def compress_(
    model: nn.Module,
    recipes: Any = None,
    *,
    budget: str | Budget | None = None,
    data: Iterable[str] | None = None,
    tokenizer: Any = None,
    seed: int = 0,
    quiet: bool = False,
) -> Report:
    """Replace the named weights of ``model`` by factored ones, in place, within the budget.

        minimise  sum_i w_i dist(a_i, S_c(i))^2   with   stored bytes <= budget

    All weights are fitted before the first is swapped: after an error the model is as it was.

    Args:
        model, recipes, budget, data, tokenizer: as ``plan``; or ``recipes`` is a ``Plan``, without a budget.
        seed: of every random step. Equal seed, data and threads give equal factors.
        quiet: no progress bar.

    Returns:
        What was done, for ``print``, ``report.save`` and ``kflats report``. The model then saves itself
        with ``model.save_pretrained`` (transformers) or ``kflats.save`` (plain torch).

    Raises:
        KflatsError: as ``plan``; NaN in a weight; a budget too small for its method.

    >>> import kflats, torch
    >>> model = torch.nn.ModuleDict({"words": torch.nn.Embedding(200, 16)})
    >>> report = kflats.compress_(model, {"words": kflats.Flats(k=2)}, budget="50%", quiet=True)
    >>> report.weights[0].bytes_after <= 0.5 * 200 * 16 * 4
    True
    """
    texts = None if data is None else _kept(data)
    decided = decide(model, recipes, budget, texts, tokenizer)
    done = _factorize(model, decided, texts, tokenizer, seed, quiet, None)
    return _finish(model, decided, done, seed)


def compress_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    budget: str | Budget | None = None,
    method: Any = None,
    weights: tuple[str, ...] = (),
    plan: Plan | None = None,
    texts: Iterable[str] | None = None,
    seed: int = 0,
    force: bool = False,
    quiet: bool = False,
) -> Report:
    """Compress a model folder (or hub name) into a new folder that transformers loads after ``import kflats``.

    Finished weights are kept beside ``out`` until the end, so an interrupted run resumes; ``out`` itself
    appears whole or not at all. Tokenizer, pooling and all else that is no weight are copied.

    Args:
        source: a local folder or a hub name. out: the folder to be.
        budget, method, weights: as ``compress_``: ``method`` may be a recipe. Or a ``plan``.
        texts: what importance counts, with the folder's own tokenizer.
        force: replace an existing model folder.

    Raises:
        KflatsError: as ``compress_``; ``out`` exists, a full disk, a folder without a model.
    """
    folder = resolve_model(source)
    counted = None if texts is None else _kept(texts)
    with new_folder(out, force) as aside:
        model = load_model(folder)
        tokenizer = _tokenizer(folder, counted, method, plan)
        before = weight_file_bytes(folder)
        if plan is None:
            recipes = dict.fromkeys(weights, method) if weights else method
            allowed = required(budget)
            decided = make_plan(model, recipes, budget=allowed, data=counted, tokenizer=tokenizer, file_bytes=before)
        else:
            decided = decide(model, plan, budget, counted, tokenizer)
        partial = Partial(out, _fingerprint(folder, decided, counted, seed))
        done = _factorize(model, decided, counted, tokenizer, seed, quiet, partial)
        report = _finish(model, decided, done, seed, name=str(source))
        model.save_pretrained(aside / weights_folder(folder).relative_to(folder))
        copy_companions(folder, aside)
        _check_file(aside, decided, before)
        report.save(aside / REPORT_FILE)
    partial.discard()
    return report


@dataclass(frozen=True)
class _Done:
    decision: Decision
    matrix: Matrix
    report: WeightReport


def _factorize(
    model: nn.Module,
    decided: Plan,
    texts: tuple[str, ...] | None,
    tokenizer: Any,
    seed: int,
    quiet: bool,
    partial: Partial | None,
) -> list[_Done]:
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
) -> _Done:
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
    return _Done(decision, matrix, report)


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
    found = importance.weigh(Measured(n, counts, prior, head))
    return found if isinstance(found, Tensor) else None


def _finish(model: nn.Module, decided: Plan, done: list[_Done], seed: int, name: str = "") -> Report:
    before = stored_bytes(model)
    with unchanged_on_error(model):
        for one in done:
            swap_(model, one.decision.weight, one.matrix)
        annotate_(model)
    return Report(
        model=name or str(getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__),
        budget=decided.budget,
        weights=tuple(one.report for one in done),
        model_bytes_before=before,
        model_bytes_after=stored_bytes(model),
        seed=seed,
        version=_version(),
    )


def _kept(data: Iterable[str]) -> tuple[str, ...]:
    if isinstance(data, str | bytes):
        raise KflatsError("texts must be a sequence of strings, not one string", hint="data=[text]")
    texts = tuple(data)
    for text in texts:
        if not isinstance(text, str):
            raise KflatsError(f"expected texts, found {type(text).__name__}", hint="a list of strings")
    return texts


def _tokenizer(folder: Path, texts: tuple[str, ...] | None, method: Any, plan: Plan | None) -> Any:
    """The folder's tokenizer; missing is an error only where something needs it."""
    recipes = [d.recipe for d in plan.decisions] if plan else [as_recipe(method)] if method is not None else []
    needed = texts is not None or any(getattr(r.importance, "needs_tokenizer", False) for r in recipes)
    try:
        return load_tokenizer(folder)
    except KflatsError:
        if needed:
            raise
        return None


def _tokens(weight: Weight, tokenizer: Any) -> list[str] | None:
    if tokenizer is None or weight.places[0].role != "embedding":
        return None
    names = [""] * weight.shape[0]
    for token, row in tokenizer.get_vocab().items():
        if 0 <= row < len(names):
            names[row] = token
    return names


def _fingerprint(folder: Path, decided: Plan, texts: tuple[str, ...] | None, seed: int) -> str:
    """Everything the factors depend on."""
    # The weights, and the tokenizer's files: counts and priors come from those.
    kinds = (".safetensors", ".json", ".txt", ".model")
    files = sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.suffix in kinds)
    recipes = [
        [d.weight.name, d.weight.shape, d.weight.dtype, to_json(d.recipe), d.budget_bytes] for d in decided.decisions
    ]
    counted = hashlib.sha256("\0".join(texts or ()).encode()).hexdigest()
    about = [str(folder), files, recipes, decided.budget, counted, texts is None, seed, _version()]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def _restored(decision: Decision, tensors: dict[str, Tensor], meta: dict[str, Any]) -> _Done | None:
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
    return _Done(decision, matrix, report) if matrix.shape == decision.weight.shape else None


def _alone(report: WeightReport) -> Report:
    return Report("", "", (report,), 0, 0, 0, _version())


def _check_file(folder: Path, decided: Plan, before: int) -> None:
    after = weight_file_bytes(folder)
    if after > before:
        raise KflatsError(
            f"the new weight files take {after:,} bytes, more than the original's {before:,}",
            cause="the model was stored in a narrower type than it was loaded in",
            hint="a smaller budget, or a codec such as Float('float16')",
        )
    budget = parse_budget(decided.budget) if decided.budget else None
    if budget is None or budget.scope != "file":
        return
    limit = budget.amount * before if budget.kind == "fraction" else budget.amount
    if after > limit:
        raise KflatsError(
            f"the new weight files take {after:,} bytes, more than the {int(limit):,} asked for",
            cause="more tensors are stored than the original's files had",
            hint="a slightly smaller file budget",
        )


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


def _version() -> str:
    try:
        return installed_version("kflats")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0"
