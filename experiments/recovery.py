"""Claim (FWSVD, tables 1 to 3): after fine-tuning the factored model, FWSVD is at or above SVD, and nears the original.

    python experiments/recovery.py --cache FOLDER --write experiments/results

Two ways to a small model of a task, both end to end:

- task: fine-tune, compress with the task's own loss, fine-tune again. That is FWSVD's path 2 from a large model, and
  its path 3 from one that is compact already, as the packaged MiniLM is (``--source FOLDER`` for another model).
- generic: compress the generic model first, label-free (random projections of its sentence embeddings on the
  task's texts), then put the task's head on and fine-tune once.

Each is judged before and after its last fine-tuning on the dev split, which chooses nothing: the last epoch is kept.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from functools import partial
from typing import Any

from _results import IMPORTANCES, Variant, markdown, needs, parsed, publish, variants
from _train import TaskModel, with_head
from task_scores import Bench, calibration, compressed, options, originals

from kflats import SVD, Projections, Recipe, compress_
from kflats.recover.recover import recover_


def trained(model: Any, made: TaskModel, task: str, asked: argparse.Namespace) -> Any:
    """The last fine-tuning, in place."""
    return recover_(
        model,
        task,
        tokenizer=made.tokenizer,
        task_data=asked.data,
        split=made.settings["split"],
        eval_split=None,
        patience=None,
        lr=asked.lr,
        epochs=asked.epochs,
        max_length=made.settings["max_length"],
        limit=asked.limit or None,
        seed=asked.seed,
        quiet=True,
    )


def generic(made: TaskModel, task: str, variant: Variant, asked: argparse.Namespace) -> Any:
    """The generic model compressed label-free, with the task's untrained head."""
    model = with_head(task, asked.seed, asked.source)
    batches = calibration(made, task, asked, model)
    unlabelled = [{k: t for k, t in batch.items() if k != "labels"} for batch in batches]
    compress_(
        model.base_model,
        {"encoder.layer.*": Recipe(SVD(), IMPORTANCES[variant.importance])},
        keep=f"{asked.ratio} ranks",
        calibration=unlabelled,
        objective=Projections(of="pooled", seed=asked.seed),
        allocation=variant.allocation,
        quiet=True,
    )
    return model


def further(bench: Bench, variant: Variant | None, path: str) -> dict[str, Any]:
    """Compress (or not), judge, fine-tune, judge."""
    asked, first = bench.asked, None
    if variant is None:
        model = copy.deepcopy(bench.made.model)
    elif path == "task":
        model = compressed(bench.made, variant, bench.statistics(variant.objective), f"{asked.ratio} ranks")[0]
        first = bench.score(model)
    else:
        model = generic(bench.made, bench.task, variant, asked)
    done = trained(model, bench.made, bench.task, asked)
    loss = done.epochs[-1].loss
    return {"compressed": first, "recovered": bench.score(model), "loss": loss, "seconds": done.seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser)
    parser.add_argument("--tasks", default="cola,stsb")
    parser.add_argument("--paths", default="task,generic")
    parser.add_argument("--methods", default="SVD,RowFisher,KroneckerFisher")
    parser.add_argument("--ratio", default="33%")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-5, help="FWSVD's; 1e-4 tears factors apart")
    parser.add_argument("--limit", type=int, default=0, help="fine-tune on this many training examples (0: all)")
    parser.add_argument("--name", default="recovery", help="of the table, where several are kept")
    asked = parsed(parser)
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    chosen = variants(asked.methods.split(","))
    training = {"epochs": asked.epochs, "limit": asked.limit, "lr": asked.lr, "ratio": asked.ratio}
    for task in asked.tasks.split(","):
        bench = Bench(task, asked, needs([v.importance for v in chosen]))
        more = bench.kept("more", training, partial(further, bench, None, ""))
        about[task] = {**bench.before(), "trained_more": more["recovered"]}
        for path in asked.paths.split(","):
            for variant in chosen:
                settings = {**training, "path": path, "variant": variant.name}
                found = bench.kept("recovered", settings, partial(further, bench, variant, path))
                rows.append({"task": task, "path": path, "method": variant.name, **found})
    write_up(asked, rows, about)


def write_up(asked: argparse.Namespace, rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Table, remarks, figure."""
    lines = []
    for task, what in about.items():
        lines.append([task, "-", "original", f"{what['before']:.3f}", f"{what['trained_more']:.3f}"])
        for r in rows:
            if r["task"] == task:
                first = "-" if r["compressed"] is None else f"{r['compressed']:.3f}"
                lines.append([task, r["path"], r["method"], first, f"{r['recovered']:.3f}"])
    of = f"{asked.limit:,} examples of the training split" if asked.limit else "the whole training split"
    body = "\n\n".join(
        [
            f"Rank ratio {asked.ratio} in all 36 encoder linear layers; the last fine-tuning: {asked.epochs} "
            f"epoch(s) of {of}, Adam, lr {asked.lr:g}, batch 32, last epoch kept. One seed ({asked.seed}): small "
            "differences may be chance."
            + ("" if asked.full and asked.epochs >= 3 and not asked.limit else " **Short, not the paper's recipe.**"),
            originals(about),
            "The original's last column is its own score after the same further training.",
            markdown(["task", "path", "method", "compressed", "after fine-tuning"], lines),
            remarks(rows),
        ]
    )

    title = "Recovery: fine-tuning after compression"
    publish(asked.name, title, body, {"tasks": about, "rows": rows}, asked)


def remarks(rows: list[dict[str, Any]]) -> str:
    """Averages by path, and whether FWSVD is at or above SVD."""
    lines = []
    for path in dict.fromkeys(r["path"] for r in rows):
        at: dict[str, list[float]] = {}
        for r in rows:
            if r["path"] == path:
                at.setdefault(r["method"], []).append(r["recovered"])
        means = {name: statistics.mean(values) for name, values in at.items()}
        said = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
        verdict = ""
        if {"SVD", "RowFisher"} <= set(means):
            holds = means["RowFisher"] >= means["SVD"]
            verdict = f" FWSVD (RowFisher) is {'at or above' if holds else 'BELOW'} SVD."
        lines.append(f"- {path}, average after fine-tuning: {said}.{verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
