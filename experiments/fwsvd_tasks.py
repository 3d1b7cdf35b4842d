"""Claims (FWSVD, tables 1 to 3 and figure 5): linear layers factorized under row sums of Fisher information score above
plain SVD at every rank ratio without fine-tuning, and above it or near the original after fine-tuning.

    python experiments/fwsvd_tasks.py --resume                                             # tables 1 to 3
    python experiments/fwsvd_tasks.py --tasks conll2003,sst2 --resume                      # a page of their own
    python experiments/fwsvd_tasks.py --ratios 10,20,33,45,60 --epochs 0 --tasks cola,stsb --resume      # figure 5
    python experiments/fwsvd_tasks.py --source shared --paths task --tasks cola,stsb --resume        # shared parameters
    python experiments/fwsvd_tasks.py --source bert-base-uncased --lr 2e-5 --task-data hub \
        --tasks conll2003,cola,mnli,mrpc,qnli,qqp,sst2,stsb --resume                       # path 2 of a large model

A model trained on a task is compressed and trained again with the same settings: the paper's path 2 from a large
model, path 3 from one that is compact already, as the packaged MiniLM is, or whose blocks share their parameters like
ALBERT's: ``--source shared`` uses MiniLM's first block for all and trains it. "generic first" compresses the generic
model without labels, by random projections of its sentence vectors on the task's texts, and then trains it once. "no
compression" is the original trained again, for comparison. "kflats" is ``KroneckerFisher`` of the logits with one
budget shared by loss, in the parameters that the rank ratio leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from _quick import quick
from _runs import Asked, Cell, Log, Run, Scores, asked_for, conduct
from _tables import Results, Value, by_size, by_task, drop, figure, orderings, publish, told, tuned_drop
from _task_models import TRAINING, TaskExperiment, TaskModel, block_weights, with_head

import kflats
from kflats import SVD, KroneckerFisher, Projections, Recipe, RowFisher, TaskLoss, Uniform
from kflats.calibration.objectives import Objective
from kflats.importance import Importance
from kflats.recipe.budget import Allocation

OWN: dict[str, Any] = {"ratios": "33", "epochs": 3, "samples": 512, "paths": "task,generic"}
OWN |= TRAINING
QUICK: dict[str, Any] = {"tasks": "sst2", "seeds": "0,1", "epochs": 1, "samples": 64, "lr": 2e-3}
TASKS = ("cola", "mrpc", "rte", "stsb")
TITLE = "Linear layers factorized under Fisher information: scores of tasks"
NONE = "no compression"


@dataclass(frozen=True)
class Way:
    """One way to compress: whose errors count, by which gradients, and how layers share the budget."""

    importance: Importance
    objective: Objective
    allocation: Allocation
    algorithm: str


WAYS = {
    "SVD": Way(Uniform(), TaskLoss(), "uniform", "svd"),
    "FWSVD": Way(RowFisher(), TaskLoss(), "uniform", "row-fisher"),
    "kflats": Way(KroneckerFisher(), Projections(of="logits", seed=0, normalized=False), "loss", "kronecker"),
}
GENERIC = ", generic first"


def compress(model: Any, way: Way, keep: str, batches: list[Any], objective: Objective) -> Any:
    """Compress the linear layers of all blocks in place; the report."""
    recipe = Recipe(SVD(), way.importance)
    data = {"calibration": batches, "objective": objective} if way.importance.needs else {}
    names = {weight.name: recipe for weight in block_weights(model)}
    return kflats.compress_(model, names, keep=keep, allocation=way.allocation, quiet=True, **data)


class Factorized(TaskExperiment):
    """The cells of one command."""

    name = "fwsvd_tasks"

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self.ratios = self.own.ratios.split(",")
        self.recipe = {"samples": self.own.samples}

    @property
    def page(self) -> str:
        """As for other experiments; other tasks than the usual ones have a page of their own."""
        others = self.asked.tasks if set(self.asked.tasks) - set(TASKS) and not self.asked.quick else ()
        return "_".join([super().page, *others])

    def from_task(self, model: TaskModel, way: Way | None, keep: str) -> Scores:
        """Compress the trained model (or not), judge, train, judge."""
        small = model.copy()
        report, after = None, model.original
        if way is not None:
            batches = model.batches(small, self.own.samples, 16) if way.importance.needs else []
            report = compress(small, way, keep, batches, way.objective)
            after = model.score(small)
        tuned = None
        if self.own.epochs:
            model.train_(small, self.own.epochs)
            tuned = model.score(small)
        return self.scores(model, report, after, tuned)

    def from_generic(self, model: TaskModel, way: Way, keep: str) -> Scores:
        """Compress the generic model without labels, put the task's head on it, train it once."""
        small = with_head(model.task, model.seed, self.source.folder)
        base = small.base_model
        unlabelled = [
            {name: tensor for name, tensor in batch.items() if name != "labels"}
            for batch in (model.batches(small, self.own.samples, 16) if way.importance.needs else [])
        ]
        report = compress(base, way, keep, unlabelled, Projections(of="pooled", seed=0))
        model.train_(small, model.training.epochs)
        return self.scores(model, report, None, model.score(small))

    @staticmethod
    def scores(model: TaskModel, report: Any, after: float | None, tuned: float | None) -> Scores:
        """Of one cell."""
        sizes = {} if report is None else {"parameters": report.bytes_after // 4, "before": report.bytes_before // 4}
        return Scores(
            metric=model.metric,
            original=model.original,
            compressed=after,
            tuned=tuned,
            nbytes=0 if report is None else report.bytes_after,
            more=sizes,
        )

    def cells(self, log: Log) -> Iterator[tuple[Cell, Callable[[], Scores]]]:
        """Task by task, seed by seed."""
        paths, epochs = self.own.paths.split(","), self.own.epochs
        for model in self.models():
            if epochs:
                place = self.place(model, NONE, "100%", epochs, self.recipe, ())
                yield place, partial(self.from_task, model, None, "")
            for ratio in self.ratios:
                keep = f"{ratio}% ranks"
                for name, way in WAYS.items():
                    if "task" in paths:
                        place = self.place(model, name, keep, epochs, self.recipe, (way.algorithm,))
                        yield place, partial(self.from_task, model, way, keep)
                    if "generic" in paths and epochs:
                        place = self.place(model, name + GENERIC, keep, epochs, self.recipe, (way.algorithm,))
                        yield place, partial(self.from_generic, model, way, keep)

    def publish(self, log: Log) -> None:
        """The page and the figures of what has run."""
        asked, own = self.asked, self.own
        runs = self.runs_of(log, lambda run: run.recipe == self.recipe)
        ratios = list(dict.fromkeys([*self.ratios, *_ratios(runs)]))
        ratios.sort(key=float)
        sizes = [(f"{ratio}% ranks", f"{ratio} % of ranks") for ratio in ratios]
        places = [(size, float(ratio)) for (size, _), ratio in zip(sizes, ratios, strict=True)]
        claims = [("FWSVD", "SVD"), ("kflats", "FWSVD"), ("kflats", "SVD")]
        generic = [(a + GENERIC, b + GENERIC) for a, b in claims] + [(f"SVD{GENERIC}", "SVD")]
        seeds = len(asked.seeds)
        parts = [
            f"The linear layers in the blocks of {self.source.name}, trained on each task; Fisher information from "
            f"{own.samples} training examples. Drops of the main metric on the dev split in points, mean ± standard "
            "deviation over seeds: less is better, below 0 is above the original.",
            told(runs) if runs else "",
        ]
        views: tuple[tuple[str, str, Value, list[str], list[tuple[str, str]]], ...] = (
            ("before", "Without fine-tuning (tables 1 to 3, figure 5)", drop, list(WAYS), claims),
            (
                "after",
                "After fine-tuning (tables 1 to 3)",
                tuned_drop,
                [*WAYS, *(name + GENERIC for name in WAYS)],
                claims + generic,
            ),
        )
        for when, title, value, names, ordered in views:
            results = Results(runs, value)
            picture = asked.results / f"{self.page}_{when}.png"
            parts += [f"## {title}", by_size(results, names, sizes, asked.tasks, seeds)]
            if figure(picture, results, names, places, asked.tasks, ("% of ranks kept", "drop, points")):
                parts.append(f"![{title}]({picture.name})")
            parts += ["What holds:", orderings(results, ordered, sizes, asked.tasks)]
        again = by_task(Results(runs, tuned_drop), [NONE], ("100%", "method"), asked.tasks, seeds)
        parts += ["## The original trained again", again]
        publish(self.page, TITLE, parts, asked, self.name)


def _ratios(runs: list[Run]) -> list[str]:
    return [run.size.removesuffix("% ranks") for run in runs if run.size.endswith("% ranks")]


def main(argv: list[str] | None = None) -> None:
    conduct(Factorized(quick(asked_for(__doc__, ",".join(TASKS), OWN, argv=argv, quick=QUICK))))


if __name__ == "__main__":
    main()
