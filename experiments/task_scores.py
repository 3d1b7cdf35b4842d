"""Claim: with every encoder linear layer of a fine-tuned MiniLM at 33 % of its rank, FWSVD scores far above SVD, and
Fisher information with correlations recovers at least half of what FWSVD still loses; no fine-tuning afterwards.

    python experiments/task_scores.py --cache FOLDER --write experiments/results

Models are fine-tuned first where the cache has none (``fine_tune.py``). Calibrated on a few hundred training
examples with the task's own loss, judged on the dev split. "allocated" shares the same parameters out by loss;
"(logits)" takes gradients of random projections of the logits in place of the loss, without labels.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections import Counter
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from _results import (
    ENCODER,
    OBJECTIVES,
    Variant,
    kept,
    markdown,
    needs,
    parameters_kept,
    parsed,
    publish,
    variants,
)
from _train import SHORT, TaskModel, arguments_of_models, quick_models_, task_model

from kflats import compress_, find_weights, measure
from kflats.tasks.batches import load_examples, task_batches
from kflats.tasks.scoring import measure as measure_scores
from kflats.tasks.scoring import score

METHODS = (
    "SVD,RowFisher,TwoSided,InputGram,KroneckerFisher,KroneckerFisher@logits,"
    "RowFisher+loss,TwoSided+loss,KroneckerFisher+loss,KroneckerFisher@logits+loss"
)


def calibration(made: TaskModel, task: str, asked: argparse.Namespace, model: Any) -> list[dict[str, Any]]:
    """Batches of training examples, as ``model`` numbers their labels."""
    settings = made.settings
    chosen = {"split": settings["split"], "max_length": settings["max_length"], "limit": asked.samples}
    return task_batches(task, made.tokenizer, task_data=asked.data, model=model, seed=asked.seed, **chosen)


def measured(
    made: TaskModel, task: str, asked: argparse.Namespace, fields: frozenset[str], objective: str = "task"
) -> Any:
    """Statistics of the encoder's linear layers, from training examples."""
    batches = calibration(made, task, asked, made.model)
    chosen = [w for w in find_weights(made.model) if w.name.startswith(ENCODER.rstrip("*"))]
    return measure(made.model, chosen, batches, needs=fields, objective=OBJECTIVES[objective], quiet=True)


class Bench:
    """One task's model, statistics and results, each made when it is first needed."""

    def __init__(self, task: str, asked: argparse.Namespace, fields: frozenset[str]) -> None:
        self.task, self.asked, self.fields = task, asked, fields
        self._statistics: dict[str, Any] = {}

    @cached_property
    def made(self) -> TaskModel:
        return task_model(self.task, self.asked)

    def statistics(self, objective: str = "task") -> Any:
        if objective not in self._statistics:
            self._statistics[objective] = measured(self.made, self.task, self.asked, self.fields, objective)
        return self._statistics[objective]

    def score(self, model: Any) -> float:
        return judged(model, self.made, self.task, self.asked)[1]

    def kept(self, name: str, settings: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """``_results.kept`` by everything that decides this bench."""
        of = {"model": self.made.folder.name, "samples": self.asked.samples, "judged": self.asked.judged}
        return kept(self.asked.cache / "results", (f"{self.task}-{name}", {**of, **settings}), make)

    def before(self) -> dict[str, Any]:
        """The metric, the original's score, the number of examples, and how it was trained."""

        def make() -> dict[str, Any]:
            metric, value, n = judged(self.made.model, self.made, self.task, self.asked)
            return {"metric": metric, "before": value, "n": n, "training": self.made.said}

        return self.kept("original", {}, make)


def judged(model: Any, made: TaskModel, task: str, asked: argparse.Namespace) -> tuple[str, float, int]:
    """Metric, value and number of dev examples."""
    length = made.settings["max_length"]
    limit = asked.judged or None
    found = score(
        model, made.tokenizer, task, task_data=asked.data, max_length=length, limit=limit, batch=64, costs=False
    )
    return found.metric, found.value, found.n


def compressed(made: TaskModel, variant: Variant, found: Any, budget: str) -> tuple[Any, Any]:
    """A compressed copy, and the report."""
    model = copy.deepcopy(made.model)
    report = compress_(
        model,
        {ENCODER: variant.recipe},
        keep=budget,
        statistics=found,
        allocation=variant.allocation,
        quiet=True,
    )
    return model, report


def options(parser: argparse.ArgumentParser, samples: int = 256) -> None:
    """What the experiments on task models have in common."""
    arguments_of_models(parser)
    parser.add_argument("--samples", type=int, default=samples, help="training examples to calibrate on")
    parser.add_argument("--judged", type=int, default=0, help="judge on this many dev examples only (0: all)")


def one(bench: Bench, variant: Variant, ratio: str = "") -> dict[str, Any]:
    """Compress and judge."""
    model, report = compressed(
        bench.made, variant, bench.statistics(variant.objective), f"{ratio or bench.asked.ratio} ranks"
    )
    return {
        "score": bench.score(model),
        "parameters": parameters_kept(report),
        "dense": sum(w.bytes_after == w.bytes_before for w in report.weights),
    }


QUICK: dict[str, Any] = {"tasks": "cola,stsb", "samples": 32}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    options(parser)
    parser.add_argument("--tasks", default=",".join(SHORT))
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--ratio", default="33%")
    asked = parsed(parser, argv, QUICK)
    quick_models_(asked, asked.tasks)
    chosen = variants(asked.methods.split(","))
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for task in asked.tasks.split(","):
        bench = Bench(task, asked, needs([v.importance for v in chosen]))
        about[task] = bench.before()
        for variant in chosen:
            made = bench.kept(
                "compressed", {"variant": variant.name, "ratio": asked.ratio}, partial(one, bench, variant)
            )
            rows.append({"task": task, "method": variant.name, **made})
    publish_table(asked, rows, about)


def constant(task: str, asked: argparse.Namespace) -> float:
    """The score on the dev split of answering always the same, the commonest class; 0 where that has no score."""
    examples = load_examples(task, "dev", asked.data)
    if examples.task.kind != "classification":
        return 0.0
    commonest = Counter(examples.labels).most_common(1)[0][0]
    found = measure_scores(examples.task.metrics, [commonest] * len(examples), list(examples.labels))
    return found[examples.task.metrics[0]]


def publish_table(asked: argparse.Namespace, rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Tables of scores and of what they say."""
    at = {(r["task"], r["method"]): r["score"] for r in rows}
    names = list(dict.fromkeys(r["method"] for r in rows))
    sizes = {r["parameters"] for r in rows}
    same = {task: constant(task, asked) for task in about}
    # What the original has not learned cannot be lost, and would only add noise to averages.
    learned = [task for task, a in about.items() if a["before"] > same[task]]
    scores = {"before": {task: a["before"] for task, a in about.items()}, "always the commonest answer": same}
    scores |= {name: {task: at[task, name] for task in about} for name in names}
    lines = [
        [name, *(f"{row[task]:.3f}" for task in about), mean([row[task] for task in learned])]
        for name, row in scores.items()
    ]
    limits = (
        f"judged on at most {asked.judged} dev examples of each" if asked.judged else "judged on the whole dev split"
    )
    body = "\n\n".join(
        [
            f"36 encoder linear layers at rank ratio {asked.ratio}: {min(sizes):,} to {max(sizes):,} parameters of "
            "10,616,832; embeddings, pooler and head untouched. Calibrated on "
            f"{asked.samples} training examples, {limits}. One seed ({asked.seed}).",
            ("Training was the full 3 epochs." if asked.full else "**Training was short, not the paper's recipe:**")
            + f"\n\n{originals(about)}",
            markdown(["method", *about, "average"], lines),
            "A score at or below that of the commonest answer says that nothing of the task is left."
            + "".join(
                f" {task} is left out of averages and of what follows: the original itself is not above it."
                for task in about
                if task not in learned
            ),
            remarks(at, {task: about[task] for task in learned}, names),
        ]
    )

    title = "Task scores after compression, before any fine-tuning"
    publish("task_scores", title, body, {"tasks": about, "rows": rows}, asked)


def originals(about: dict[str, Any]) -> str:
    """A line for each task: the original's score, the number of examples, and how it was trained."""
    return "\n".join(
        f"- {task}: {a['metric']} {a['before']:.3f} before, {a['n']:,} dev examples, fine-tuned {a['training']}"
        for task, a in about.items()
    )


def mean(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f}"


def remarks(at: dict[tuple[str, str], float], about: dict[str, Any], names: list[str]) -> str:
    """What the numbers say about the orderings, ties and failures included."""
    tasks = list(about)
    averages = {name: statistics.mean(at[task, name] for task in tasks) for name in names}
    lines = []
    if {"SVD", "RowFisher"} <= set(names):
        worse = [task for task in tasks if at[task, "RowFisher"] <= at[task, "SVD"]]
        lines.append(
            f"- FWSVD (RowFisher) above SVD: on average {averages['RowFisher']:.3f} against {averages['SVD']:.3f}; "
            + (f"NOT on {', '.join(worse)}." if worse else "on every task.")
        )
    if "RowFisher" in names:
        lines.append("- Share of what RowFisher loses that others recover, nothing above the original counted:")
        lost = {task: about[task]["before"] - at[task, "RowFisher"] for task in tasks}
        for name in names:
            if name in ("SVD", "RowFisher"):
                continue
            gained = {t: min(at[t, name], about[t]["before"]) - at[t, "RowFisher"] for t in tasks}
            each = ", ".join(f"{t} {gained[t] / lost[t]:.0%}" for t in tasks if lost[t] > 0)
            lines.append(f"    - {name}: {sum(gained.values()) / sum(lost.values()):.0%} of the average ({each})")
        above = [f"{name} on {t}" for name in names for t in tasks if at[t, name] > about[t]["before"]]
        if above:
            lines.append(
                f"- Above the original itself: {'; '.join(above)}. The original's training was short or its dev split "
                "is small; such a score shows no fidelity."
            )
    for name in names:
        if name.endswith(", allocated") and (even := name.removesuffix(", allocated")) in names:
            worse = [task for task in tasks if at[task, name] < at[task, even]]
            lines.append(
                f"- Allocation of {even}: {averages[name]:.3f} against {averages[even]:.3f} at the uniform ratio; "
                + (f"below it on {', '.join(worse)}." if worse else "at or above it on every task.")
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
