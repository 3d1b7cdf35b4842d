"""Claim (the paper's figure 3 and tables 2 and 3): with the embedding table of fine-tuned models compressed and no
fine-tuning afterwards, the lp low rank (p = 1) loses less of the task score than SVD and than pruning. Beside it: fits
that lower l1 error far more, and what plain SVD does once it knows which tokens are common.

    python experiments/robust_tasks.py --cache FOLDER --parts FOLDER --write experiments/results

The paper: Tukan, Maalouf, Weksler & Feldman, Sensors 2021. Models are fine-tuned first where the cache has none
(``fine_tune.py``); judged on the dev split. Public text and the vocabulary are all that weights are made of.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

from _results import kept, markdown, parsed, publish
from _robust import HALF, PRUNED, SYNFLOW, Known, options, row_weights_of
from _robust_tables import STORED, sweep, unfinished
from _sentences import sentences
from _train import SHORT, TaskModel, arguments_of_models, quick_models_, task_model
from baselines.synflow import encoder_flow
from task_scores import constant
from torch import nn

from kflats import find_weights
from kflats.demo import packaged_model
from kflats.evaluation.outputs import load_tokenizer
from kflats.tasks.scoring import score

OURS = "ellipsoid 1"
"""What the paper calls RE-X: its algorithm 1 at p = 1, here through Lewis weights."""

METHODS = [
    *(HALF, "SVD", OURS, "ellipsoid 1.5", "entrywise 1", "subspace 1", "l1-pca fixed point", "l1-pca together"),
    *(*PRUNED, *SYNFLOW),
    *("SVD + zipf", "SVD + counts", "ellipsoid 1 + counts", "subspace 1 + counts", "flats", "flats + zipf"),
    "flats + counts",
]
TABLE_3 = ["SVD", "l1-pca fixed point", "l1-pca together", *PRUNED, *SYNFLOW, OURS]


def judged(model: nn.Module, made: TaskModel, task: str, asked: argparse.Namespace) -> dict[str, Any]:
    """The main score on the dev split, in points (of 100)."""
    length = made.settings["max_length"]
    limit = asked.judged or None
    found = score(
        model, made.tokenizer, task, task_data=asked.data, max_length=length, limit=limit, batch=64, costs=False
    )
    return {"score": 100 * found.value, "metric": found.metric, "n": found.n}


QUICK: dict[str, Any] = {"tasks": "cola", "rates": "0.41", "methods": "SVD,ellipsoid 1,magnitude bitmap"}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    options(parser, seed=False)
    arguments_of_models(parser)
    parser.add_argument("--tasks", default=",".join(SHORT))
    parser.add_argument("--judged", type=int, default=0, help="judge on this many dev examples only (0: all)")
    asked = parsed(parser, argv, QUICK)
    quick_models_(asked, asked.tasks)
    names = asked.methods.split(",") if asked.methods else METHODS
    if max(map(float, asked.rates.split(","))) > 0.5:
        names = [name for name in names if name != HALF]
    rows: list[dict[str, Any]] = []
    about: dict[str, dict[str, Any]] = {}
    row_weights = {}
    if any(" + " in name for name in names):
        tokenizer = load_tokenizer(asked.source or packaged_model())
        row_weights = row_weights_of(tokenizer, len(tokenizer), sentences("wikitext2"))
    for task in asked.tasks.split(","):
        made = task_model(task, asked)
        settings = {"model": made.folder.name, "judged": asked.judged}
        original = partial(judged, made.model, made, task, asked)
        about[task] = {**kept(asked.parts, (f"{task}-original", settings), original), "training": made.said}
        (weight,) = [w for w in find_weights(made.model) if w.name.endswith("word_embeddings")]
        known = Known(row_weights=row_weights, column_flow=encoder_flow(made.model.bert))
        judge = partial(judged, made=made, task=task, asked=asked)
        found = sweep(asked, task, settings, made.model, [weight], names, known, judge)
        rows += [{**row, "drop": about[task]["score"] - row["score"]} for row in found]
    publish_tables(asked, names, rows, about)


def publish_tables(
    asked: argparse.Namespace, names: list[str], rows: list[dict[str, Any]], about: dict[str, dict[str, Any]]
) -> None:
    at = {(r["of"], r["method"], r["rate"]): r["drop"] for r in rows}
    rates = sorted({r["rate"] for r in rows})

    def mean(name: str, rate: float) -> float:
        return statistics.mean(at[task, name, rate] for task in about)

    told = [
        f"- {task}: {a['metric']} {a['score']:.2f} before (always the commonest answer: "
        f"{100 * constant(task, asked):.2f}), {a['n']:,} dev examples, fine-tuned {a['training']}"
        for task, a in about.items()
    ]
    tables = []
    for rate in rates:
        lines = [[n, *(f"{at[t, n, rate]:.2f}" for t in about), f"{mean(n, rate):.2f}"] for n in names]
        tables += [f"**{rate:.0%} of the table saved**", markdown(["method", *about, "average"], lines)]
    second = [
        [f"RE-MiniLM, {rate:.0%}", *(f"{at[t, OURS, rate]:.2f}" for t in about), f"{mean(OURS, rate):.2f}"]
        for rate in rates
        if OURS in names
    ]
    third = [[n, *(f"{at['mrpc', n, rate]:.2f}" for rate in rates)] for n in TABLE_3 if n in names and "mrpc" in about]
    whole = "whole dev splits" if not asked.judged else f"**samples**: at most {asked.judged} dev examples each"
    body = "\n\n".join(
        [
            "all-MiniLM-L6-v2 fine-tuned on each task, then its embedding table (30522 x 384, half of the model) "
            f"compressed; no fine-tuning afterwards. Judged on {whole}; one seed ({asked.seed}). Numbers are drops of "
            "the score in points: less is better, below 0 is above the original. "
            f"{STORED} "
            '"+ zipf" weighs rows by the vocabulary alone, "+ counts" by the '
            "tokens of WikiText-2: public text, none of the tasks'.",
            ("" if asked.full else "**Training was short, not the paper's recipe:**\n\n") + "\n".join(told),
            "## All methods",
            *tables,
            remarks(names, rates, at, list(about), mean),
            unfinished(rows),
            "## The paper's table 2: drops of its method (p = 1) by task",
            markdown(["model, saved", *about, "average"], second) if second else "Not run.",
            "## The paper's table 3: drops on MRPC",
            markdown(["method", *(f"{rate:.0%} saved" for rate in rates)], third) if third else "Not run.",
        ]
    )

    title = "Tasks after compressing the embedding table, without fine-tuning"
    publish("robust_tasks", title, body, {"tasks": about, "rows": rows}, asked)


def remarks(names: list[str], rates: list[float], at: dict[Any, float], tasks: list[str], mean: Any) -> str:
    """The paper's orderings, and the best by rate, from the numbers."""
    lines = []
    for worse in [n for n in ("SVD", "l1-pca fixed point", "magnitude csr", "magnitude bitmap") if n in names]:
        if OURS not in names:
            break
        for rate in rates:
            lost = [task for task in tasks if at[task, OURS, rate] > at[task, worse, rate]]
            average = f"on average {mean(OURS, rate):.2f} against {mean(worse, rate):.2f}"
            verdict = f"it loses more on {', '.join(lost)}" if lost else "it loses more on no task"
            lines.append(f"- {OURS} against {worse} at {rate:.0%}: {average}; {verdict}.")
    for rate in rates:
        order = sorted((n for n in names if n != HALF and not n.endswith("values")), key=lambda n: mean(n, rate))
        best = ", ".join(f"{n} {mean(n, rate):.2f}" for n in order[:4])
        lines.append(f"- least average drop at {rate:.0%}, of what can be stored: {best}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
