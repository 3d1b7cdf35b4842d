"""Claims (MESSI, appendix E: figures 12 to 15, table 3): an embedding table covered by k flats loses less than by
k-means with an SVD in each cluster; distances in place of their squares lose less before fine-tuning.

    python experiments/messi_variants.py --resume
    python experiments/messi_variants.py --source distilbert-base-uncased --lr 2e-5 --task-data hub --resume

All three fit ``--k`` flats of equal ranks to the same table and keep the best of ``--restarts`` starts by their own
objective. Drops are points (of 100) of the task's main metric on the dev split, before and after two epochs of
fine-tuning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from _quick import quick
from _runs import Asked, Cell, Log, Scores, asked_for, conduct
from _tables import publish
from _task_models import TRAINING, TaskExperiment
from messi_tasks import Way, compressed, drops_of_tables, kept, way

from kflats import MESSI, KMeansSVD, Power, Recipe, Uniform

TITLE = "k flats beside k-means with SVDs, squares beside distances: scores of tasks"
OWN: dict[str, Any] = {"rates": "40,60,20", "k": 5, "epochs": 2, "restarts": 10} | TRAINING
QUICK: dict[str, Any] = {"tasks": "sst2,stsb", "seeds": "0,1", "rates": "60", "k": 3, "epochs": 1, "restarts": 3}
QUICK |= {"lr": 2e-3}


def ways(k: int, restarts: int) -> tuple[Way, Way, Way]:
    """MESSI, and what its appendix E compares it with."""
    decides = {"k": k, "restarts": restarts}
    return (
        way(k, restarts),
        Way(f"k-means, k = {k}", Recipe(KMeansSVD(k=k, restarts=restarts), Uniform()), decides, "k-means"),
        Way(
            f"MESSI l1, k = {k}",
            Recipe(MESSI(k=k, error=Power(1.0), restarts=restarts), Uniform()),
            decides,
            "messi l1",
        ),
    )


class Variants(TaskExperiment):
    """The cells of one command."""

    name = "messi_variants"

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self.rates = self.own.rates.split(",")
        self.ways = ways(self.own.k, self.own.restarts)

    def cells(self, log: Log) -> Iterator[tuple[Cell, Callable[[], Scores]]]:
        """Each rate with all seeds."""
        epochs = self.own.epochs
        models = list(self.models())
        for rate in self.rates:
            for model in models:
                for by in self.ways:
                    place = self.place(model, by.name, kept(rate), epochs, by.decides, (by.algorithm,))
                    yield place, partial(compressed, model, by.recipe, kept(rate), epochs)

    def publish(self, log: Log) -> None:
        """The page and the figures of what has run."""
        runs = self.runs_of(log, lambda run: run.recipe == self.ways[0].decides and run.epochs == self.own.epochs)
        flats, k_means, distances = methods = [by.name for by in self.ways]
        titles = "Before fine-tuning", f"After {self.own.epochs} epochs of fine-tuning"
        claims = [(flats, k_means), (distances, flats)]
        parts = drops_of_tables(self, runs, methods, claims, self.rates, titles)
        publish(self.page, TITLE, parts, self.asked, self.name)


def main(argv: list[str] | None = None) -> None:
    conduct(Variants, quick(asked_for(__doc__, "rte,mrpc", OWN, argv=argv, quick=QUICK)))


if __name__ == "__main__":
    main()
