"""Claim (MESSI, appendix D, figure 11): the best of the models that a search for the number of flats tries loses less
than SVD at every rate.

    python experiments/messi_search.py --resume
    python experiments/messi_search.py --choose before,after --resume       # as published: every model tried is trained

For each task, rate and seed ``kflats.search_flats`` looks for k by halving among ``--counts``, all in the same bytes.
The paper trains the models that it tries for two epochs and takes the best on the training set, on which all of them
were trained. Here a held-out tenth of the training set decides, on which none was: by the scores before fine-tuning
("before"), or after it ("after", which takes two epochs for each k that is tried). The chosen model is fine-tuned for
two epochs and judged once on the dev split. SVD is k = 1; its runs are taken from the log of ``messi_tasks.py`` where
that has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from _quick import quick
from _runs import Asked, Cell, Log, Run, Scores, asked_for, conduct
from _tables import markdown, publish
from _task_models import TRAINING, TaskExperiment, TaskModel
from messi_tasks import compressed, drops_of_tables, kept, way

from kflats import MESSI, Recipe, Uniform, search_flats
from kflats.common.errors import KflatsError

METHODS = {"before": "MESSI, k searched", "after": "MESSI, k searched after training"}
OWN: dict[str, Any] = {
    "rates": "40,60,20",
    "counts": "1,2,3,4,5,7,10,15",
    "choose": "before",
    "epochs": 2,
    "restarts": 10,
}
OWN |= TRAINING
QUICK: dict[str, Any] = {"tasks": "sst2", "seeds": "0,1", "rates": "60", "counts": "1,2,3,4", "choose": "before,after"}
QUICK |= {"epochs": 1, "restarts": 2, "lr": 2e-3}
TITLE = "The number of flats, searched by the score on held-out examples"


class Search(TaskExperiment):
    """The cells of one command."""

    name = "messi_search"

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self.rates = self.own.rates.split(",")
        self.counts = tuple(int(k) for k in self.own.counts.split(","))
        self.chosen = self.own.choose.split(",")
        if unknown := [word for word in self.chosen if word not in METHODS]:
            raise KflatsError(f"--choose {unknown[0]} is not known", hint="before or after, or both")
        self.recipe = {"counts": list(self.counts), "restarts": self.own.restarts}
        self.svd = way(1, 1)

    def compute(self, model: TaskModel, rate: str, choose: str) -> Scores:
        """Search by held-out scores; judge the chosen model."""

        def score(small: Any) -> float:
            if choose == "after":
                model.train_(small, self.own.epochs)
            return model.score(small, held_out=True)

        recipe = Recipe(MESSI(k=None, restarts=self.own.restarts), Uniform())
        found = search_flats(
            model.model, recipe, score, keep=kept(rate), counts=self.counts, seed=model.seed, quiet=True
        )
        scores = compressed(model, found.recipe, kept(rate), self.own.epochs)
        tried = {str(k): value for k, value in found.scores.items()}
        return replace(scores, more={**scores.more, "k": found.k, "tried": tried})

    def cells(self, log: Log) -> Iterator[tuple[Cell, Callable[[], Scores]]]:
        """Rate by rate, so that pairs are complete early."""
        elsewhere, epochs = self.others(), self.own.epochs
        for rate in self.rates:
            for model in self.models():
                by = self.svd
                place = self.place(model, by.name, kept(rate), epochs, by.decides, (by.algorithm,))
                if elsewhere.find(place.key) is None:
                    yield place, partial(compressed, model, by.recipe, kept(rate), epochs)
                for choose in self.chosen:
                    place = self.place(model, METHODS[choose], kept(rate), epochs, self.recipe, ("messi", "search"))
                    yield place, partial(self.compute, model, rate, choose)

    def others(self) -> Log:
        """The log of ``messi_tasks.py``."""
        return Log(self.asked.results / "messi_tasks.jsonl")

    def publish(self, log: Log) -> None:
        """The page and the figures of what has run."""

        def same(run: Run) -> bool:
            known = self.recipe if run.method in METHODS.values() else self.svd.decides
            return run.recipe == known and run.epochs == self.own.epochs and run.task in self.asked.tasks

        runs = [*self.runs_of(self.others(), same), *self.runs_of(log, same)]
        ran = [name for name in METHODS.values() if any(run.method == name for run in runs)]
        methods = [self.svd.name, *(ran or (METHODS[choose] for choose in self.chosen))]
        titles = "Before fine-tuning", f"After {self.own.epochs} epochs of fine-tuning (figure 11)"
        claims = [(method, self.svd.name) for method in methods[1:]]
        parts = drops_of_tables(self, runs, methods, claims, self.rates, titles)
        parts += ["## What was tried", tried(runs)]
        publish(self.page, TITLE, parts, self.asked, self.name)


def tried(runs: list[Run]) -> str:
    """Held-out scores by k, the chosen one in bold."""
    rows = [
        [
            *(run.task, run.method, run.size, run.seed),
            ", ".join(
                f"**{k}: {100 * score:.2f}**" if int(k) == run.more["k"] else f"{k}: {100 * score:.2f}"
                for k, score in run.more["tried"].items()
            ),
        ]
        for run in runs
        if "tried" in run.more
    ]
    return markdown(["task", "method", "kept", "seed", "k: score on held-out examples"], rows) if rows else "Not run."


def main(argv: list[str] | None = None) -> None:
    conduct(Search, quick(asked_for(__doc__, "cola,mrpc", OWN, argv=argv, quick=QUICK, parts=("choose",))))


if __name__ == "__main__":
    main()
