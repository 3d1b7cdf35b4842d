"""Claims (MESSI, figures 5, 6 and 8, table 1): with the embedding table of a task's model covered by k flats instead
of one subspace of the same size, the score falls less, before and after two epochs of fine-tuning.

    python experiments/messi_tasks.py --resume
    python experiments/messi_tasks.py --source distilbert-base-uncased --lr 2e-5 --task-data hub \
        --tasks cola,mrpc,rte,stsb,sst2,qnli,qqp,mnli,wnli --rates 20,40,50,60 --tuned 1,2,3,5,10 --resume

k = 1 is SVD. MESSI is as published: equal ranks, random partitions to start from, of ten local minima the smallest.
"k chosen" is, for each seed, the k whose model scores best on a held-out tenth of the training set, before fine-tuning.
Beside them stands kflats' default for an embedding table in the same bytes; it counts the tokens of the training
sentences, without labels. What appendix E compares is in ``messi_variants.py``. Drops are points (of 100) of the task's
main metric on the dev split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from _quick import quick
from _runs import Asked, Cell, Log, Run, Scores, asked_for, conduct, model_of
from _tables import (
    Results,
    best_of,
    by_size,
    drop,
    figure,
    markdown,
    orderings,
    publish,
    spread,
    told,
    tuned_drop,
)
from _task_models import TRAINING, TaskExperiment, TaskModel

import kflats
from kflats import MESSI, SVD, Recipe, Uniform
from kflats.common.errors import KflatsError

OURS, CHOSEN = "kflats", "MESSI, k chosen"
TITLE = "Embedding tables covered by k flats: scores of tasks"
OWN: dict[str, Any] = {
    "rates": "40,60,20",
    "ks": "1,5,2,3,10",
    "tuned": "1,5",
    "epochs": 2,
    "restarts": 10,
}
OWN |= TRAINING
QUICK: dict[str, Any] = {
    "tasks": "sst2,stsb",
    "seeds": "0,1",
    "rates": "40,60",
    "ks": "1,3",
    "tuned": "1,3",
    "epochs": 1,
}
QUICK |= {"restarts": 3, "lr": 2e-3}


def method_name(k: int) -> str:
    """As in tables."""
    return "SVD" if k == 1 else f"MESSI, k = {k}"


@dataclass(frozen=True)
class Way:
    """One way to compress the table, as tables and the log call it.

    Args:
        recipe: None: kflats' own defaults. decides: what the log keeps of the recipe.
    """

    name: str
    recipe: Recipe | None
    decides: Mapping[str, Any]
    algorithm: str


DEFAULT = Way(OURS, None, {"default": True}, "flats")


def way(k: int, restarts: int) -> Way:
    """k flats as published; one flat is the SVD."""
    if k == 1:
        return Way("SVD", Recipe(SVD(), Uniform()), {"k": 1, "restarts": 1}, "svd")
    decides = {"k": k, "restarts": restarts}
    return Way(method_name(k), Recipe(MESSI(k=k, restarts=restarts), Uniform()), decides, "messi")


def compressed(model: TaskModel, recipe: Recipe | None, size: str, epochs: int) -> Scores:
    """The scores of a copy whose token table keeps ``size``; without a recipe by kflats' own defaults."""
    small = model.copy()
    texts = model.data.texts if recipe is None else None
    tokenizer = model.tokenizer if recipe is None else None
    report = kflats.compress_(
        small, recipe, keep=size, texts=texts, tokenizer=tokenizer, seed=model.seed, quiet=True
    ).weights[0]
    held_out = {"original": model.original_held_out, "compressed": model.score(small, held_out=True)}
    after, tuned = model.score(small), None
    if epochs:
        model.train_(small, epochs)
        tuned = model.score(small)
        held_out["tuned"] = model.score(small, held_out=True)
    return Scores(
        metric=model.metric,
        original=model.original,
        compressed=after,
        tuned=tuned,
        held_out=held_out,
        nbytes=report.bytes_after,
        error=report.error_unweighted,
        more={"rank": report.mean_rank, "bytes_before": report.bytes_before},
    )


def kept(rate: str) -> str:
    """ "40" saved is "60%" kept."""
    return f"{100 - float(rate):g}%"


class Tables(TaskExperiment):
    """The cells of one command."""

    name = "messi_tasks"

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        own = self.own
        self.rates = own.rates.split(",")
        self.ks = [int(k) for k in own.ks.split(",")]
        self.tuned = {int(k) for k in own.tuned.split(",")}
        if not self.tuned & set(self.ks):
            raise KflatsError(f"--tuned {own.tuned} holds none of --ks {own.ks}", hint="some of --ks")

    def cell(self, model: TaskModel, by: Way, rate: str, epochs: int) -> tuple[Cell, Callable[[], Scores]]:
        """One cell."""
        place = self.place(model, by.name, kept(rate), epochs, by.decides, (by.algorithm,))
        return place, partial(compressed, model, by.recipe, kept(rate), epochs)

    def cells(self, log: Log) -> Iterator[tuple[Cell, Callable[[], Scores]]]:
        """What is compared first: each rate with all seeds. Then what chooses k, and the chosen ones."""
        epochs, restarts = self.own.epochs, self.own.restarts
        first = [*(way(k, restarts) for k in self.ks if k in self.tuned), DEFAULT]
        models = {(t, s): self.model(t, s) for t in self.asked.tasks for s in self.asked.seeds}
        for task in self.asked.tasks:
            for rate in self.rates:
                for seed in self.asked.seeds:
                    for by in first:
                        yield self.cell(models[task, seed], by, rate, epochs)
            for rate in self.rates:
                for seed in self.asked.seeds:
                    for k in self.ks:
                        if k not in self.tuned:
                            yield self.cell(models[task, seed], way(k, restarts), rate, 0)
                    k = self.best_so_far(log, models[task, seed], rate)
                    if k is not None and k not in self.tuned:
                        yield self.cell(models[task, seed], way(k, restarts), rate, epochs)

    def best_so_far(self, log: Log, model: TaskModel, rate: str) -> int | None:
        """``best_k`` by the runs that this command would keep."""
        places = [
            self.cell(model, way(k, self.own.restarts), rate, self.own.epochs * (k in self.tuned)) for k in self.ks
        ]
        of = [run for place, _ in places if (run := log.find(place.key)) is not None]
        return best_k(of, self.ks)

    def runs(self, log: Log) -> list[Run]:
        """Those of this model, training and number of restarts."""
        restarts, epochs = (1, self.own.restarts), (0, self.own.epochs)
        return self.runs_of(log, lambda run: run.recipe.get("restarts", 1) in restarts and run.epochs in epochs)

    def publish(self, log: Log) -> None:
        """The page and the figures of what has run."""
        publish_tables(self, with_chosen(self.runs(log), self.ks))


def best_k(runs: Iterable[Run], ks: Sequence[int]) -> int | None:
    """The k of the best held-out score before fine-tuning, the smallest of equals; None unless all ``ks`` have run.

    Args:
        runs: of one trained model and size.
    """
    scores = {run.method: run.held_out["compressed"] for run in runs}
    known = {k: scores[method_name(k)] for k in sorted(ks) if method_name(k) in scores}
    return max(known, key=lambda k: (known[k], -k)) if len(known) == len(ks) else None


def by_trained_model(runs: Iterable[Run]) -> dict[tuple[str, str, tuple[int, float]], list[Run]]:
    """The runs of each task, size and trained model, by seed and score."""
    found: dict[tuple[str, str, tuple[int, float]], list[Run]] = {}
    for run in runs:
        found.setdefault((run.task, run.size, model_of(run)), []).append(run)
    return dict(sorted(found.items()))


def with_chosen(runs: list[Run], ks: Sequence[int]) -> list[Run]:
    """Also the runs of the chosen k, as a method of their own."""
    found = list(runs)
    for of in by_trained_model(runs).values():
        k = best_k(of, ks)
        if k is not None:
            chosen = [run for run in of if run.method == method_name(k)]
            found += [replace(run, method=CHOSEN, more={**run.more, "k": k}) for run in chosen]
    return found


def publish_tables(experiment: Tables, runs: list[Run]) -> None:
    """The page and the figures of ``runs``, among them those of the chosen k."""
    asked = experiment.asked
    methods = [*map(method_name, sorted(experiment.ks)), CHOSEN, OURS]
    drawn = ["SVD", *(method_name(k) for k in sorted(experiment.tuned) if k > 1), CHOSEN, OURS]
    claims = [(method_name(k), "SVD") for k in sorted(experiment.tuned) if k > 1]
    claims += [(CHOSEN, "SVD"), *((OURS, m) for m in drawn if m != OURS)]
    titles = "Before fine-tuning (figure 8)", f"After {asked.more.epochs} epochs of fine-tuning (figures 5 and 6)"
    parts = drops_of_tables(experiment, runs, methods, claims, experiment.rates, titles, drawn)
    tasks, seeds, sizes = asked.tasks, len(asked.seeds), sizes_of(experiment.rates)
    parts += ["## The best of each size (table 1)", table_1(runs, sizes, tasks, seeds)]
    parts += ["## Half of the loss", halves(runs, sizes, tasks, list(map(method_name, sorted(experiment.ks))))]
    publish(experiment.page, TITLE, parts, asked, experiment.name)


def sizes_of(rates: Sequence[str]) -> list[tuple[str, str]]:
    """What is kept, and how it is shown, from the lowest rate on."""
    return [(kept(rate), f"{rate} % saved") for rate in sorted(rates, key=float)]


def drops_of_tables(
    experiment: TaskExperiment,
    runs: Sequence[Run],
    methods: Sequence[str],
    claims: Sequence[tuple[str, str]],
    rates: Sequence[str],
    titles: tuple[str, str],
    drawn: Sequence[str] = (),
) -> list[str]:
    """The parts of a page on tables of tokens: drops by rate before and after fine-tuning, with a figure each.

    Args:
        claims: which method is better than which. titles: of both parts. drawn: methods in the figures; default: all.
    """
    asked, sizes = experiment.asked, sizes_of(rates)
    places = [(size, float(rate)) for rate, (size, _) in zip(sorted(rates, key=float), sizes, strict=True)]
    counted = [run for run in runs if run.method != CHOSEN]  # the chosen ones are runs of some k
    parts = [
        f"The embedding table of {experiment.source.name}, trained on each task. Drops of the main metric on the dev "
        "split in points, mean ± standard deviation over seeds: less is better, below 0 is above the original.",
        told(counted) if counted else "",
    ]
    for when, title, value in zip(("before", "after"), titles, (drop, tuned_drop), strict=True):
        results = Results(runs, value)
        parts += [f"## {title}", by_size(results, methods, sizes, asked.tasks, len(asked.seeds))]
        picture = asked.results / f"{experiment.page}_{when}.png"
        if figure(picture, results, drawn or methods, places, asked.tasks, ("% of the table saved", "drop, points")):
            parts.append(f"![{title}]({picture.name})")
        parts += ["What holds:", orderings(results, claims, sizes, asked.tasks)]
    return parts


def table_1(runs: list[Run], sizes: list[tuple[str, str]], tasks: tuple[str, ...], seeds: int) -> str:
    """Drops of the chosen k after fine-tuning, and which k and j they are."""
    results = Results([run for run in runs if run.method == CHOSEN], tuned_drop)
    rows = []
    for size, shown in sizes:
        rows.append([shown, "drop", *(results.cell(CHOSEN, size, [task], seeds) for task in tasks)])
        chosen = {
            task: ", ".join(
                f"{run.more['k']} ({run.more['rank']:.0f})"
                for run in sorted(runs, key=lambda run: run.seed)
                if (run.method, run.size, run.task) == (CHOSEN, size, task) and run.tuned is not None
            )
            for task in tasks
        }
        rows.append(["", "k (j) by seed", *(chosen[task] or "-" for task in tasks)])
    return markdown(["size", "", *tasks], rows)


def halves(runs: list[Run], sizes: list[tuple[str, str]], tasks: tuple[str, ...], theirs: list[str]) -> str:
    """Whether kflats loses at most half of what the best of ``theirs`` loses before fine-tuning."""
    before = Results(runs, drop)
    rows = []
    for (size, shown), task in ((size, task) for size in sizes for task in tasks):
        best = best_of(before, OURS, theirs, size, task)
        if best is None or best.half is None:
            continue
        lost, own = (spread(list(values.values()), len(values)) for values in (best.lost, best.ours))
        missing = ", ".join(method.removeprefix("MESSI, ") for method in best.missing) or "-"
        rows.append([task, shown, own, lost, best.name, best.half.judged, missing])
    head = ["task", "size", OURS, "the best of the paper", "which", "half of it less ours", "not run for all seeds"]
    return markdown(head, rows) if rows else "Not run."


def main(argv: list[str] | None = None) -> None:
    conduct(Tables, quick(asked_for(__doc__, "cola,mrpc,rte,stsb", OWN, argv=argv, quick=QUICK)))


if __name__ == "__main__":
    main()
