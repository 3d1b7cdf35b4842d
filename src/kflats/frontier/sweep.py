"""Size against quality: one table of a model stored in many ways at many sizes, and the model judged each time."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from kflats.allocate.calibration import gather
from kflats.allocate.selection import token_embedding
from kflats.errors import KflatsError
from kflats.evaluate.comparing import load_tokenizer
from kflats.files import load_model
from kflats.files.atomic_folder import new_folder
from kflats.files.partial import Partial
from kflats.files.sources import resolve_model
from kflats.frontier.entries import (
    COUNTED,
    SIZES,
    UNCOUNTED,
    UNWEIGHED,
    Entry,
    check_installed,
    entries,
    importance_of,
)
from kflats.frontier.judge import Judge
from kflats.frontier.page import draw
from kflats.frontier.records import FRONTIER_FILE, Frontier, Point, Refused
from kflats.frontier.rivals.transformed import Transformed
from kflats.frontier.trimmed import Trim
from kflats.hashing import sha256
from kflats.importance.weighting import Weighting
from kflats.methods import SVD
from kflats.recipes.recipe import Recipe
from kflats.records import decode
from kflats.release import version
from kflats.swap.surgery import Weight, dense_weight, find_weight
from kflats.tables import visible
from kflats.texts import check_texts, packaged_texts

__all__ = ["SIZES", "Frontier", "Point", "frontier"]


def frontier(
    model: str | os.PathLike[str],
    *,
    texts: Sequence[str] | None = None,
    judge: Sequence[str] | None = None,
    sizes: Sequence[float] = SIZES,
    methods: Sequence[str] | None = None,
    task: str | None = None,
    data: str | os.PathLike[str] | None = None,
    split: str = "dev",
    weight: str | None = None,
    out: str | os.PathLike[str] | None = None,
    seed: int = 0,
    batch: int = 32,
    force: bool = False,
    quiet: bool = False,
) -> Frontier:
    """Store an embedding table in every way at every size, and judge the model with what comes back.

    What was asked is a point, or it is told why it cannot be (``Frontier.refused``). All bytes that a decoder needs are
    counted: codebooks, scales, rotations, labels, distributions. kflats' own entries are measured as the streams that
    their files hold.

    Args:
        model: a folder or a hub name.
        texts: what is counted, for row weights and for ``weighted_error``; None: the Zipf prior. Words that they
            show are not taken for rare.
        judge: sentences to judge on, of another kind than ``texts``; None: those that come with kflats.
        sizes: bits per number of the original.
        methods: of ``frontier.entries.METHODS``, each alone or with "+counts" or "+zipf" (transform: or "+fisher");
            None: all, and two rivals with weights, too.
        task, data, split: a task to score, as ``kflats.score``.
        weight: the embedding's name; None: the token embedding. Of one that tokens do not enter (of positions, say)
            every row counts the same.
        out: a folder to write: JSON, Markdown, PNG and one HTML page. Finished points are kept beside it until the
            end, so that an interrupted run resumes.
        seed: of rotations, codebooks and random starts.
        batch: sentences at once.
        force: replace an existing folder that kflats wrote and nobody changed since.
        quiet: no progress bar.

    Choose it before deciding on a size. Limit: tables are decoded to judge them; latency is not measured here.

    Raises:
        KflatsError: as the loaders; methods, sizes, tasks or weights that are none; an extra that is missing; nothing
            that was asked is possible.
    """
    for given in (texts, judge):
        if given is not None:
            check_texts(given)
    folder = resolve_model(model)
    with nullcontext() if out is None else new_folder(out, force, [folder]) as aside:
        original, tokenizer = load_model(folder), load_tokenizer(folder)
        chosen = _embedding(original, weight)
        judged = list(packaged_texts("judge") if judge is None else judge)
        counted = None if texts is None else list(texts)
        tokens = _enter_tokens(original, chosen)
        usual = UNWEIGHED if not tokens else UNCOUNTED if counted is None else COUNTED
        wanted = usual if methods is None else methods
        asked, refused = entries(chosen.shape, sizes, wanted, counted=bool(counted), tokens=tokens)
        check_installed(asked, drawn=out is not None)
        table = dense_weight(original, chosen).detach().float().clone()
        scale = "" if not tokens else "zipf" if counted is None else "counts"
        weights = _weights(original, chosen, counted, tokenizer, {scale, *(entry.importance for entry in asked)})
        about = _fingerprint(folder, chosen.name, counted, judged, task, data, split, seed)
        partial = None if out is None else Partial(out, about)
        panel = Judge(original, tokenizer, judged, counted or (), task=task, data=data, split=split, batch=batch)
        coded = copy.deepcopy(original)
        bench = _Bench(original, coded, tokenizer, chosen, table, weights, scale, counted, judged, panel, seed, partial)
        points: list[Point] = []
        with _bar(quiet) as bar:
            going = bar.add_task("", total=len(asked))
            for entry in asked:
                bar.update(going, description=visible(entry.name))
                found = _point(entry, bench)
                if isinstance(found, Point):
                    points.append(found)
                else:
                    refused.append(found)
                bar.advance(going)
        if not points:
            if partial is not None:
                partial.discard()
            raise KflatsError(
                "nothing that was asked is possible",
                cause="; ".join(f"{one.name}: {one.reason}" for one in refused),
                hint="other sizes or methods",
            )
        made = Frontier(
            model="/".join(folder.parts[-2:]) if Path(model).is_dir() else str(model),
            weight=chosen.name,
            shape=chosen.shape,
            importance=repr(importance_of(scale)),
            counted=len(counted or ()) if tokens else 0,
            judged=len(judged),
            task=task or "",
            metric=panel.metric,
            score=panel.original.score,
            points=tuple(sorted(points, key=lambda p: (-p.bits, p.name))),
            refused=tuple(refused),
            seed=seed,
            version=version(),
        )
        if aside is not None:
            _write(made, aside)
    return made


def _embedding(model: nn.Module, name: str | None) -> Weight:
    if name is None:
        return token_embedding(model)
    found = find_weight(model, name)
    if found.places[0].role != "embedding":
        raise KflatsError(f"{found.name} is no embedding", hint="kflats inspect MODEL lists them")
    return found


def _enter_tokens(model: nn.Module, weight: Weight) -> bool:
    """Whether token ids are what enters the table, and not positions or types."""
    try:
        return token_embedding(model).name == weight.name
    except KflatsError:  # the model's own is factored already
        return False


def _weights(
    model: nn.Module, weight: Weight, texts: list[str] | None, tokenizer: Any, wanted: set[str]
) -> dict[str, Weighting]:
    """What each wanted importance says: row weights, and a right metric where it has one."""
    recipes = {name: Recipe(SVD(), importance_of(name)) for name in sorted(wanted)}
    data = gather(texts, tokenizer, None, None, None)
    data = data.measured(model, [(weight, recipe) for recipe in recipes.values() if recipe.importance.needs])
    return {name: data.weigh(weight, recipe) for name, recipe in recipes.items()}


@dataclass(frozen=True)
class _Bench:
    """What every point is measured on."""

    original: nn.Module
    coded: nn.Module  # the same, with a table that changes
    tokenizer: Any
    weight: Weight
    table: Tensor
    weights: dict[str, Weighting]
    scale: str
    counted: list[str] | None
    judged: list[str]
    judge: Judge
    seed: int
    partial: Partial | None


def _point(entry: Entry, bench: _Bench) -> Point | Refused:
    """The entry's point, from an interrupted run where it is there."""
    if bench.partial is not None and (kept := bench.partial.get(entry.name)) is not None:
        kind = Refused if kept[1].get("refused") else Point
        return decode(kind, kept[1]["found"], "a kept point")  # type: ignore[no-any-return]
    try:
        found: Point | Refused = _measured(entry, bench)
    except KflatsError as error:
        found = Refused(entry.name, error.symptom)
    if bench.partial is not None:
        bench.partial.put(entry.name, {}, {"refused": isinstance(found, Refused), "found": asdict(found)})
    return found


def _measured(entry: Entry, bench: _Bench) -> Point:
    began = time.perf_counter()
    errors: tuple[float | None, float | None] = (None, None)
    if isinstance(entry.rival, Trim):
        small = entry.rival.make(bench.original, bench.weight, bench.tokenizer, bench.counted, bench.judged)
        nbytes, seconds = small.nbytes, time.perf_counter() - began
        verdict = bench.judge(small.model, small.tokenizer)
    else:
        weighting = bench.weights[entry.importance]
        if isinstance(entry.rival, Transformed):
            made = entry.rival.code(bench.table, bench.seed, weights=weighting.left, right=weighting.right)
        else:
            made = entry.rival.code(bench.table, bench.seed, weights=weighting.left)
        nbytes, seconds = made.nbytes, time.perf_counter() - began
        errors = (made.error(bench.table), made.error(bench.table, bench.weights[bench.scale].left))
        with torch.no_grad():
            dense_weight(bench.coded, bench.weight).copy_(made.table)
        verdict = bench.judge(bench.coded)
    near = verdict.fidelity
    return Point(
        name=entry.name,
        family=entry.family,
        ours=entry.ours,
        bits=8 * nbytes / bench.table.numel(),
        nbytes=nbytes,
        error=errors[0],
        weighted_error=errors[1],
        mean_cosine=near.mean_cosine,
        p5_cosine=near.p5_cosine,
        rare_cosine=near.rare_mean_cosine,
        neighbours=near.neighbour_overlap,
        score=verdict.score,
        seconds=seconds,
    )


def _write(made: Frontier, folder: Path) -> None:
    text = json.dumps(made.to_json(), indent=1, allow_nan=False, ensure_ascii=False)
    (folder / FRONTIER_FILE).write_text(text + "\n", encoding="utf-8")
    (folder / "frontier.md").write_text(made.markdown() + "\n", encoding="utf-8", errors="backslashreplace")
    draw(made, folder)


def _fingerprint(folder: Path, *about: object) -> str:
    """Everything that a point depends on beside its own name: the model's files, and what was asked."""
    files = sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.glob("**/*") if p.is_file())
    return sha256([json.dumps([str(folder), files, *map(str, about), version()])])


def _bar(quiet: bool) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet)
