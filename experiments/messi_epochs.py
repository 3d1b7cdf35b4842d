"""Claim (MESSI, section 3.2 and appendix B): k flats are a better start than SVD, so that fewer epochs of fine-tuning
suffice.

    python experiments/messi_epochs.py --resume
    python experiments/messi_epochs.py --source distilbert-base-uncased --lr 2e-5 --task-data hub --resume

An embedding table is factorized in the same bytes by SVD and by ``--k`` flats as published. The model is trained again
for each number of ``--epochs``, each time from the start, with a learning rate that ends at 0. Fewer epochs suffice
where flats lose less after the fewest epochs than SVD after the most. Whether SVD needs these is seen beside it. Drops
are points (of 100) of the task's main metric on the dev split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from _quick import quick
from _runs import Asked, Cell, Log, Run, Scores, asked_for, conduct
from _tables import Results, by_size, figure, orderings, publish, told, tuned_drop
from _task_models import TRAINING, TaskExperiment
from messi_tasks import Way, compressed, kept, sizes_of, way

from kflats.common.errors import KflatsError

TITLE = "How many epochs of fine-tuning k flats and SVD need: scores of tasks"
OWN: dict[str, Any] = {"rates": "40", "k": 5, "epochs": "1,2", "restarts": 10} | TRAINING
QUICK: dict[str, Any] = {"tasks": "sst2", "seeds": "0,1", "rates": "60", "k": 3, "epochs": "1,2", "restarts": 3}
QUICK |= {"lr": 2e-3}


def after(method: str, epochs: int) -> str:
    """As in tables."""
    return f"{method}, {epochs} epoch{'s' * (epochs > 1)}"


def by_epochs(run: Run) -> Run:
    """Its method with the number of epochs, so that these stand beside each other."""
    return replace(run, method=after(run.method, run.epochs))


class Epochs(TaskExperiment):
    """The cells of one command."""

    name = "messi_epochs"

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self.rates = self.own.rates.split(",")
        if self.own.k < 2:
            raise KflatsError(f"--k {self.own.k} is not supported: one flat is the SVD", hint="2 or more")
        self.ways: tuple[Way, Way] = way(self.own.k, self.own.restarts), way(1, 1)
        self.epochs = sorted({int(word) for word in self.own.epochs.split(",")})
        if len(self.epochs) < 2:
            raise KflatsError(f"--epochs {self.own.epochs} compares nothing", hint="two numbers or more, such as 1,2")

    def cells(self, log: Log) -> Iterator[tuple[Cell, Callable[[], Scores]]]:
        """Each rate with all seeds."""
        models = list(self.models())
        for rate in self.rates:
            for model in models:
                for epochs in self.epochs:
                    for by in self.ways:
                        place = self.place(model, by.name, kept(rate), epochs, by.decides, (by.algorithm,))
                        yield place, partial(compressed, model, by.recipe, kept(rate), epochs)

    def publish(self, log: Log) -> None:
        """The page and the figure of what has run."""
        asked, sizes, seeds = self.asked, sizes_of(self.rates), len(self.asked.seeds)
        recipes = {by.name: by.decides for by in self.ways}
        runs = self.runs_of(log, lambda run: run.recipe == recipes.get(run.method) and run.epochs in self.epochs)
        flats, svd = (by.name for by in self.ways)
        few, many = self.epochs[0], self.epochs[-1]
        results = Results([by_epochs(run) for run in runs], tuned_drop)
        methods = [after(method, epochs) for method in (svd, flats) for epochs in self.epochs]
        claims = [(after(flats, few), after(svd, many))]
        claims += [(after(flats, epochs), after(svd, epochs)) for epochs in self.epochs]
        claims += [(after(method, many), after(method, few)) for method in (svd, flats)]
        parts = [
            f"The embedding table of {self.source.name}, trained on each task. Drops of the main metric on the dev "
            "split after fine-tuning in points, mean ± standard deviation over seeds: less is better, below 0 is above "
            "the original.",
            told(runs) if runs else "",
            by_size(results, methods, sizes, asked.tasks, seeds),
        ]
        picture = asked.results / f"{self.page}.png"
        places = [(size, float(rate)) for rate, (size, _) in zip(sorted(self.rates, key=float), sizes, strict=True)]
        if figure(picture, results, methods, places, asked.tasks, ("% of the table saved", "drop, points")):
            parts.append(f"![{TITLE}]({picture.name})")
        parts += ["What holds:", orderings(results, claims, sizes, asked.tasks)]
        publish(self.page, TITLE, parts, asked, self.name)


def main(argv: list[str] | None = None) -> None:
    conduct(Epochs, quick(asked_for(__doc__, "mrpc,rte", OWN, argv=argv, quick=QUICK)))


if __name__ == "__main__":
    main()
