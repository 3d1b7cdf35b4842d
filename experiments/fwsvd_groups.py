"""Claims (FWSVD, sections 3 and 5.5.1, figures 1 and 6 to 9, table 4): without the smallest tenth of all singular
values a task model loses more than without larger ones; weighted by Fisher information (row sums) it does not.

    python experiments/fwsvd_groups.py --resume

The singular values of every linear layer in a block are put into ten groups, from the largest to the smallest. One
group at a time is removed from all layers together and the model is judged on the dev split, without fine-tuning.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from _quick import quick
from _runs import Asked, Cell, Log, Run, Scores, asked_for, conduct, model_of
from _tables import Results, by_size, drop, figure, markdown, orderings, paired, publish, told
from _task_models import TRAINING, TaskExperiment, TaskModel, block_weights
from torch import Tensor

from kflats import RowFisher, TaskLoss, measure
from kflats.calibration.objectives import describe
from kflats.model.weights import dense_weight
from kflats.recipe.recipe import brief

GROUPS = 10
METHODS = {"SVD": "svd", "FWSVD": "row-fisher"}
OWN: dict[str, Any] = {"samples": 512}
OWN |= TRAINING
QUICK: dict[str, Any] = {"tasks": "sst2", "seeds": "0,1", "samples": 64, "lr": 2e-3}
Removals = dict[str, tuple[list[Tensor], list[float]]]
"""What ``groups`` gives, by the name of a layer."""
TITLE = "Grouped truncation: which singular values matter"


def groups(table: Tensor, left: Tensor | None) -> tuple[list[Tensor], list[float]]:
    """What is to be subtracted from M (n, d) to remove each group, and the mean singular value of each.

    The group is U_g S_g V_g' of L M with L undone, L the diagonal of the roots of the row weights: M V_g V_g', so that
    nothing is divided by. Rows of weight zero get their projection on V_g, as in FWSVD's limit of small weights.
    """
    scaled = table if left is None else table * left.clamp_min(0).sqrt().to(table.dtype)[:, None]
    _, values, v = torch.linalg.svd(scaled, full_matrices=False)
    means = [float(part.mean()) for part in values.tensor_split(GROUPS)]
    return [table @ part.T @ part for part in v.tensor_split(GROUPS)], means


class Groups(TaskExperiment):
    """The cells of one command."""

    name = "fwsvd_groups"

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        recipe: dict[str, Any] = {"samples": self.own.samples, "groups": GROUPS}
        measured = {"importance": brief(RowFisher()), "objective": describe(TaskLoss())}
        self.recipes = {"SVD": recipe, "FWSVD": recipe | measured}

    def removals(self, model: TaskModel, method: str) -> Removals:
        """What ``groups`` gives for each linear layer, by its name."""
        chosen = block_weights(model.model)
        measured = None
        if method == "FWSVD":
            batches = model.batches(model.model, self.own.samples, 16)
            fields = frozenset({"row_fisher"})
            measured = measure(model.model, chosen, batches, needs=fields, objective=TaskLoss(), quiet=True)
        found = {}
        for weight in chosen:
            left = None if measured is None else RowFisher().weigh(measured.of(weight.name)).left
            found[weight.name] = groups(dense_weight(model.model, weight).float(), left)
        return found

    @staticmethod
    def compute(model: TaskModel, removals: Callable[[], Removals], group: int) -> Scores:
        """The score without one group."""
        removed = removals()
        small = model.copy()
        total = lost = 0.0
        with torch.no_grad():
            for weight in block_weights(small):
                part = removed[weight.name][0][group]
                layer = small.get_submodule(weight.name)
                total += float(dense_weight(small, weight).square().sum())
                lost += float(part.square().sum())
                # A linear layer of torch keeps its M transposed, a Conv1D as it is.
                layer.weight -= (part if weight.places[0].role == "conv1d" else part.T).to(layer.weight)
        value = statistics.fmean(means[group] for _, means in removed.values())
        return Scores(
            metric=model.metric,
            original=model.original,
            compressed=model.score(small),
            error=lost / total,
            more={"singular_value": value},
        )

    def cells(self, log: Log) -> Iterator[tuple[Cell, Callable[[], Scores]]]:
        """Task by task, seed by seed."""
        for model in self.models():
            for method, algorithm in METHODS.items():
                removals = cache(partial(self.removals, model, method))
                for group in range(GROUPS):
                    place = self.place(model, method, f"group {group + 1}", 0, self.recipes[method], (algorithm,))
                    yield place, partial(self.compute, model, removals, group)

    def publish(self, log: Log) -> None:
        """The page and the figure of what has run."""
        asked = self.asked
        runs = self.runs_of(log, lambda run: run.recipe == self.recipes.get(run.method))
        results, errors = Results(runs, drop), Results(runs, lambda run: 100 * (run.error or 0.0))
        largest = {_place(run): run.more["singular_value"] for run in runs if run.size == "group 1"}
        known = [run for run in runs if largest.get(_place(run))]
        values = Results(known, lambda run: 100 * run.more["singular_value"] / largest[_place(run)])
        sizes = [(f"group {g}", f"{g}") for g in range(1, GROUPS + 1)]
        places = [(size, float(g)) for size, g in sizes]
        parts = [
            f"Ten groups of singular values, 1 the largest, one removed at a time from all linear layers in the blocks "
            f"of {self.source.name}. No fine-tuning. Mean ± standard deviation over seeds.",
            told(runs) if runs else "",
        ]
        shown = (
            ("Drop of the score, points", results),
            ("Relative squared error of the reconstruction, %", errors),
            ("Mean singular value (those of FWSVD are scaled by Fisher information), % of the first group's", values),
        )
        for (title, found), task in itertools.product(shown, asked.tasks):
            parts += [f"## {title}: {task}", by_size(found, list(METHODS), sizes, [task], len(asked.seeds))]
        picture = asked.results / f"{self.page}.png"
        if figure(picture, results, list(METHODS), places, asked.tasks, ("group removed", "drop, points")):
            parts.append(f"![Drop by group]({picture.name})")
        parts += ["## What holds", self.claims(results, runs, sizes)]
        publish(self.page, TITLE, parts, asked, self.name)

    def claims(self, results: Results, runs: list[Run], sizes: list[tuple[str, str]]) -> str:
        """FWSVD against SVD for the groups that go first; and the last group against those before it."""
        tail = [(size, f"group {shown}") for size, shown in sizes[GROUPS // 2 :]]
        rows = []
        last, before = f"group {GROUPS}", f"group {GROUPS - 1}"
        for task, method in itertools.product(self.asked.tasks, METHODS):
            found = paired(results.by_model(method, last, task), results.by_model(method, before, task))
            if found is not None:
                rows.append([task, method, found.judged])
        first = orderings(results, [("FWSVD", "SVD")], tail, self.asked.tasks)
        last_costs = markdown(["task", "method", "the last group costs more than the one before"], rows)
        return f"{first}\n\n{last_costs}" if rows else first


def _place(run: Run) -> tuple[object, ...]:
    """What the groups of one decomposition have in common."""
    return run.task, run.method, model_of(run)


def main(argv: list[str] | None = None) -> None:
    conduct(Groups, quick(asked_for(__doc__, "stsb,cola,mrpc", OWN, argv=argv, quick=QUICK)))


if __name__ == "__main__":
    main()
