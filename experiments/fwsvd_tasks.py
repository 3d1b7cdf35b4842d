"""Claims (FWSVD, tables 1 to 3 and figure 5): linear layers factorized under row sums of Fisher information score above
plain SVD at every rank ratio without fine-tuning, and above it or near the original after fine-tuning.

    python experiments/fwsvd_tasks.py --resume                                             # tables 1 to 3, figure 5
    python experiments/fwsvd_tasks.py --tasks conll2003,sst2 --resume                      # a page of their own
    python experiments/fwsvd_tasks.py --source shared --paths task --tasks cola,stsb --resume        # shared parameters
    python experiments/fwsvd_tasks.py --source bert-base-uncased --lr 2e-5 --task-data hub \
        --tasks conll2003,cola,mnli,mrpc,qnli,qqp,sst2,stsb --resume                       # path 2 of a large model

A model trained on a task is compressed and trained again with the same settings: the paper's path 2 from a large
model, path 3 from one that is compact already, as the packaged MiniLM is, or whose blocks share their parameters like
ALBERT's: ``--source shared`` uses MiniLM's first block for all and trains it. "generic first" compresses the generic
model without labels, by random projections of its sentence vectors on the task's texts, and then trains it once. "no
compression" is the original trained again, for comparison. ``--before`` are the rank ratios without fine-tuning.

"kflats, default" is what ``compress_`` does with labelled examples: ``KroneckerFisher`` of the task's loss, one budget
shared by loss, in the parameters that the rank ratio leaves. "kflats" is the same of the logits: of eleven ways the one
that scored highest on the dev splits of these tasks, with seed 0, before these runs. So its rows are not independent of
what they are judged on; those of the default are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from _quick import quick
from _runs import Asked, Cell, Log, Scores, asked_for, conduct
from _tables import Results, Value, by_size, by_task, drop, figure, orderings, publish, told, tuned_drop
from _task_models import TRAINING, TaskExperiment, TaskModel, block_weights, with_head

import kflats
from kflats import SVD, KroneckerFisher, Projections, Recipe, RowFisher, TaskLoss, Uniform
from kflats.calibration.objectives import Objective, describe
from kflats.common.errors import KflatsError
from kflats.importance import Importance
from kflats.recipe.budget import Allocation
from kflats.recipe.recipe import brief

OWN: dict[str, Any] = {"ratios": "33", "before": "10,20,33,45,60", "epochs": 3, "samples": 512}
OWN |= {"paths": "task,generic"}
OWN |= TRAINING
QUICK: dict[str, Any] = {"tasks": "sst2", "seeds": "0,1", "before": "33", "epochs": 1, "samples": 64, "lr": 2e-3}
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

    def decides(self, objective: Objective, samples: int) -> dict[str, Any]:
        """What the log keeps of the recipe; gradients where the importance is measured."""
        shown = {"samples": samples, "importance": brief(self.importance), "allocation": self.allocation}
        return shown | ({"objective": describe(objective)} if self.importance.needs else {})


DEFAULT = "kflats, default"
WAYS = {
    "SVD": Way(Uniform(), TaskLoss(), "uniform", "svd"),
    "FWSVD": Way(RowFisher(), TaskLoss(), "uniform", "row-fisher"),
    DEFAULT: Way(KroneckerFisher(), TaskLoss(), "loss", "kronecker"),
    "kflats": Way(KroneckerFisher(), Projections(of="logits", seed=0, normalized=False), "loss", "kronecker"),
}
GENERIC = ", generic first"
WITHOUT_LABELS = ("SVD", "FWSVD", "kflats")
"""The ways that differ where there are no labels."""
UNLABELLED = Projections(of="pooled", seed=0)
"""The gradients of those."""


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
        self.ratios, self.before = (list(filter(None, of.split(","))) for of in (self.own.ratios, self.own.before))
        self.paths = self.own.paths.split(",")
        if unknown := [word for word in self.paths if word not in ("task", "generic")]:
            raise KflatsError(f"--paths {unknown[0]} is not known", hint="task or generic, or both")
        self.recipes: dict[str, dict[str, Any]] = {NONE: {"samples": self.own.samples}}
        for name, way in WAYS.items():
            self.recipes[name] = way.decides(way.objective, self.own.samples)
            self.recipes[name + GENERIC] = way.decides(UNLABELLED, self.own.samples)

    def from_task(self, model: TaskModel, way: Way | None, keep: str, epochs: int) -> Scores:
        """Compress the trained model (or not), judge, train, judge."""
        small = model.copy()
        report, after = None, model.original
        if way is not None:
            batches = model.batches(small, self.own.samples, 16) if way.importance.needs else []
            report = compress(small, way, keep, batches, way.objective)
            after = model.score(small)
        tuned = None
        if epochs:
            model.train_(small, epochs)
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
        report = compress(base, way, keep, unlabelled, UNLABELLED)
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
        epochs = self.own.epochs
        for model in self.models():
            if epochs:
                place = self.place(model, NONE, "100%", epochs, self.recipes[NONE], ())
                yield place, partial(self.from_task, model, None, "", epochs)
            asked = [(ratio, 0) for ratio in self.before] + [(ratio, epochs) for ratio in self.ratios if epochs]
            for (ratio, trained), (name, way) in itertools.product(asked, WAYS.items()):
                keep = f"{ratio}% ranks"
                if "task" in self.paths:
                    place = self.place(model, name, keep, trained, self.recipes[name], (way.algorithm,))
                    yield place, partial(self.from_task, model, way, keep, trained)
                if "generic" in self.paths and trained and name in WITHOUT_LABELS:
                    other = name + GENERIC
                    place = self.place(model, other, keep, trained, self.recipes[other], (way.algorithm,))
                    yield place, partial(self.from_generic, model, way, keep)

    def publish(self, log: Log) -> None:
        """The page and the figures of what has run."""
        asked, own = self.asked, self.own
        runs = self.runs_of(log, lambda run: run.recipe == self.recipes.get(run.method))
        claims = [("FWSVD", "SVD"), (DEFAULT, "FWSVD"), (DEFAULT, "SVD"), ("kflats", "FWSVD"), ("kflats", "SVD")]
        generic = [(a + GENERIC, b + GENERIC) for a, b in claims if a != DEFAULT] + [(f"SVD{GENERIC}", "SVD")]
        seeds = len(asked.seeds)
        parts = [
            f"The linear layers in the blocks of {self.source.name}, trained on each task; Fisher information from "
            f"{own.samples} training examples. Drops of the main metric on the dev split in points, mean ± standard "
            "deviation over seeds: less is better, below 0 is above the original. The gradients of the rows 'kflats' "
            "were chosen before by dev scores of seed 0; those of 'kflats, default' were not.",
            told(runs) if runs else "",
        ]
        again = [*WAYS, *(name + GENERIC for name in WITHOUT_LABELS)]
        before, after = "Without fine-tuning (tables 1 to 3, figure 5)", "After fine-tuning (tables 1 to 3)"
        views: tuple[tuple[str, str, Value, list[str], list[tuple[str, str]], list[str]], ...] = (
            ("before", before, drop, list(WAYS), claims, [*self.before, *self.ratios]),
            ("after", after, tuned_drop, again, claims + generic, self.ratios),
        )
        for when, title, value, names, ordered, asked_ratios in views:
            results = Results(runs, value)
            ratios = sorted(set(asked_ratios), key=float)
            sizes = [(f"{ratio}% ranks", f"{ratio} % of ranks") for ratio in ratios]
            places = [(size, float(ratio)) for (size, _), ratio in zip(sizes, ratios, strict=True)]
            picture = asked.results / f"{self.page}_{when}.png"
            parts += [f"## {title}", by_size(results, names, sizes, asked.tasks, seeds)]
            if figure(picture, results, names, places, asked.tasks, ("% of ranks kept", "drop, points")):
                parts.append(f"![{title}]({picture.name})")
            parts += ["What holds:", orderings(results, ordered, sizes, asked.tasks)]
        trained = by_task(Results(runs, tuned_drop), [NONE], ("100%", "method"), asked.tasks, seeds)
        parts += ["## The original trained again", trained]
        publish(self.page, TITLE, parts, asked, self.name)


def main(argv: list[str] | None = None) -> None:
    conduct(Factorized, quick(asked_for(__doc__, ",".join(TASKS), OWN, argv=argv, quick=QUICK)))


if __name__ == "__main__":
    main()
