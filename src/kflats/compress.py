"""The pipeline on one page: select -> measure -> allocate -> factorize -> swap -> report."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from kflats.analysis import stored_bytes
from kflats.budget import Budget, parse_budget
from kflats.errors import KflatsError
from kflats.evaluate import load_tokenizer, weight_file_bytes
from kflats.files import annotate_, load_model
from kflats.fitting import Done, factorize, version
from kflats.folders import Partial, new_folder
from kflats.plan import Plan, as_recipe, to_json
from kflats.planning import decide, required
from kflats.planning import plan as make_plan
from kflats.report import REPORT_FILE, Report
from kflats.sources import copy_companions, resolve_model, weights_folder
from kflats.surgery import swap_, unchanged_on_error


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
    done = factorize(model, decided, texts, tokenizer, seed, quiet, None)
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
        done = factorize(model, decided, counted, tokenizer, seed, quiet, partial)
        report = _finish(model, decided, done, seed, name=str(source))
        model.save_pretrained(aside / weights_folder(folder).relative_to(folder))
        copy_companions(folder, aside)
        _check_file(aside, decided, before)
        report.save(aside / REPORT_FILE)
    partial.discard()
    return report


def _finish(model: nn.Module, decided: Plan, done: list[Done], seed: int, name: str = "") -> Report:
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
        version=version(),
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


def _fingerprint(folder: Path, decided: Plan, texts: tuple[str, ...] | None, seed: int) -> str:
    """Everything the factors depend on."""
    # The weights, and the tokenizer's files: counts and priors come from those.
    kinds = (".safetensors", ".json", ".txt", ".model")
    files = sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.suffix in kinds)
    recipes = [
        [d.weight.name, d.weight.shape, d.weight.dtype, to_json(d.recipe), d.budget_bytes] for d in decided.decisions
    ]
    counted = hashlib.sha256("\0".join(texts or ()).encode()).hexdigest()
    about = [str(folder), files, recipes, decided.budget, counted, texts is None, seed, version()]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


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
