"""Claim (Robust SVD, figure 3, tables 2 and 3): with the embedding table of fine-tuned models compressed and no
fine-tuning afterwards, the lp low rank (p = 1) loses less of the task score than SVD and than pruning. Beside it: fits
that lower l1 error far more, and what rows weighed by the vocabulary or by public text bring.

    python experiments/robust_scores.py --resume
    python experiments/robust_scores.py --source bert-base-uncased --lr 2e-5 --task-data hub --resume

The paper: Tukan, Maalouf, Weksler & Feldman, Sensors 2021. Low rank stores two factors, a mask what its format stores
(csr: values, column indices, row pointers; bitmap: values and a bit for each place). "+ zipf" weighs rows by the
vocabulary alone, "+ counts" by the tokens of WikiText-2: public text, none of the tasks'. The average is over all
tasks but WNLI, which has 71 dev examples and which these models do not learn; it stands apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from typing import Any

from _quick import quick
from _results import sentences
from _robust import Known, compressed, row_weights_of
from _runs import Asked, Cell, Log, Scores, asked_for, conduct
from _tables import Results, by_size, by_task, drop, figure, markdown, orderings, publish, told
from _task_models import TRAINING, TaskExperiment, TaskModel
from baselines.synflow import encoder_flow
from messi_tasks import kept

from kflats import find_weights
from kflats.common.errors import KflatsError
from kflats.common.hashing import sha256

OURS = "ellipsoid 1"
"""What the paper calls RE-X: its algorithm 1 at p = 1, here through Lewis weights."""
METHODS = (
    *("SVD", OURS, "subspace 1", "l1-pca fixed point", "magnitude csr", "magnitude bitmap", "random csr"),
    *("synflow bitmap", "SVD + zipf", "SVD + counts", "flats + zipf"),
)
COUNTS = "+ counts"
WIKITEXT_2 = "d1050cbe2e913b8c"
"""The digest of the training part of WikiText-2, lines without spaces at their ends: texts of the runs in the log."""
APART = "wnli"
OWN: dict[str, Any] = {"rates": "41,28,15", "methods": ",".join(METHODS)}
OWN |= TRAINING
QUICK: dict[str, Any] = {"tasks": "sst2,wnli", "seeds": "0,1", "rates": "41", "lr": 2e-3}
QUICK |= {"methods": f"SVD,{OURS},magnitude bitmap,SVD + zipf"}
TITLE = "Tasks after compressing the embedding table, without fine-tuning"


class Robust(TaskExperiment):
    """The cells of one command."""

    name = "robust_scores"

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self.rates, self.methods = self.own.rates.split(","), self.own.methods.split(",")
        if unknown := [name for name in self.methods if name not in METHODS]:
            raise KflatsError(f"--methods {unknown[0]!r} is not known", hint=f"some of: {', '.join(METHODS)}")

    def known(self, model: TaskModel) -> Known:
        """What methods may know besides the table."""
        base = model.model.base_model
        flow = encoder_flow(base) if any(name.startswith("synflow") for name in self.methods) else None
        needed = any(" + " in name for name in self.methods)
        return Known(row_weights=self.row_weights if needed else {}, column_flow=flow)

    @cached_property
    def texts(self) -> list[str] | None:
        """Those that "+ counts" counts; None where it is not asked for."""
        if not any(name.endswith(COUNTS) for name in self.methods):
            return None
        return [text.strip() for text in sentences("wikitext2")]

    @cached_property
    def row_weights(self) -> dict[str, Any]:
        """By name; all tasks have the tokenizer of the source."""
        tokenizer = self.model(self.asked.tasks[0], self.asked.seeds[0]).tokenizer
        return row_weights_of(tokenizer, len(tokenizer), self.texts)

    def recipe(self, method: str) -> dict[str, str]:
        """What decides the result; other texts than WikiText-2's training part are named, and their runs on no page."""
        found = {"method": method}
        if method.endswith(COUNTS) and self.texts is not None and self.digest != WIKITEXT_2:
            found["texts"] = self.digest
        return found

    @cached_property
    def digest(self) -> str:
        """Of the texts."""
        return sha256(["\n".join(self.texts or ())])[:16]

    @staticmethod
    def compute(model: TaskModel, known: Callable[[], Known], method: str, rate: str) -> Scores:
        """Approximate the table, judge."""
        table = model.model.get_input_embeddings()
        (weight,) = [w for w in find_weights(model.model) if model.model.get_submodule(w.places[0].name) is table]
        small, found = next(compressed(model.model, [weight], method, [float(rate) / 100], known(), model.seed))
        return Scores(
            metric=model.metric,
            original=model.original,
            compressed=model.score(small),
            held_out={"original": model.original_held_out, "compressed": model.score(small, held_out=True)},
            nbytes=round(found["kept"] * weight.nbytes),
            error=found["frobenius"] ** 2,
            more={"l1": found["l1"], "l21": found["l21"], "note": found["note"]},
        )

    def cells(self, log: Log) -> Iterator[tuple[Cell, Callable[[], Scores]]]:
        """Task by task, seed by seed."""
        for model in self.models():
            known = cache(partial(self.known, model))
            for rate in self.rates:
                for method in self.methods:
                    place = self.place(model, method, kept(rate), 0, self.recipe(method), ("robust",))
                    yield place, partial(self.compute, model, known, method, rate)

    def publish(self, log: Log) -> None:
        """The page and the figure of what has run."""
        asked, methods, seeds = self.asked, self.methods, len(self.asked.seeds)
        runs = self.runs_of(log, lambda run: run.method in methods and "texts" not in run.recipe)
        results = Results(runs, drop)
        rates = sorted(self.rates, key=float)
        sizes, places = [(kept(r), f"{r} % saved") for r in rates], [(kept(r), float(r)) for r in rates]
        tasks = [task for task in asked.tasks if task != APART]
        claims = [(OURS, other) for other in methods if other != OURS and OURS in methods]
        parts = [
            f"The embedding table of {self.source.name}, trained on each task. Drops of the main metric on the dev "
            "split in points, mean ± standard deviation over seeds: less is better, below 0 is above the original.",
            told(runs) if runs else "",
            "## By task (figure 3)",
        ]
        parts += [by_task(results, methods, size, tasks, seeds) for size in sizes]
        if APART in asked.tasks:
            parts += [f"{APART}, which is in no average:", by_size(results, methods, sizes, [APART], seeds)]
        picture = asked.results / f"{self.page}.png"
        if figure(picture, results, methods, places, tasks, ("% of the table saved", "drop, points")):
            parts.append(f"![Drops by task]({picture.name})")
        second = [[t, *(results.cell(OURS, size, [task], seeds) for task in tasks)] for size, t in sizes]
        second = [[*row, results.cell(OURS, size, tasks, seeds)] for row, (size, _) in zip(second, sizes, strict=True)]
        parts += ["## The paper's method by task (table 2)", markdown(["size", *tasks, "average"], second)]
        if "mrpc" in tasks:
            parts += ["## MRPC (table 3)", by_size(results, methods, sizes, ["mrpc"], seeds)]
        parts += ["## What holds", orderings(results, claims, sizes, tasks)]
        publish(self.page, TITLE, parts, asked, self.name)


def main(argv: list[str] | None = None) -> None:
    conduct(Robust, quick(asked_for(__doc__, "cola,mrpc,rte,stsb,sst2,conll2003,wnli", OWN, argv=argv, quick=QUICK)))


if __name__ == "__main__":
    main()
