"""Claim (MESSI, table 2): an embedding table like ALBERT's (128 numbers a token) covered by k = 7 flats of dimension
j = 125, which takes as many numbers, scores higher than the table itself, without fine-tuning.

    python experiments/messi_same_size.py --resume
    python experiments/messi_same_size.py --source albert-base-v2 --width 0 --lr 2e-5 --task-data hub \
        --tasks mrpc,cola,sst2,stsb,rte,wnli,qqp,mnli --resume

n j + k j d numbers are a little more than n d, and labels come on top: a budget above 100 %, asked for by k and j. A
model whose table is wider gets one like ALBERT's first: rank ``--width`` by SVD, as a table and a projection, and is
trained with it (``--width 0``: the model's own table). Beside the flats stands noise with the error of their fit: what
any change of that size does to the score.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from _quick import quick
from _runs import Asked, Cell, Log, Scores, asked_for, conduct, model_of
from _tables import Results, by_size, drop, figure_by_task, orderings, publish, told
from _task_models import TRAINING, TaskExperiment, TaskModel, with_head
from torch import Tensor, nn

from kflats.matrices.layers import FactoredEmbedding
from kflats.methods import MESSI, Problem
from kflats.methods.protocol import label_bytes
from kflats.numerics.rows import TensorRows
from kflats.numerics.svd import truncated_svd

OWN: dict[str, Any] = {"width": 128, "k": 7, "j": 125, "restarts": 10}
OWN |= TRAINING
QUICK: dict[str, Any] = {"tasks": "sst2", "seeds": "0,1", "width": 16, "k": 2, "j": 15, "restarts": 2, "lr": 2e-3}
NOISE = "noise of the same error"
TITLE = "An embedding table of the same size, covered by k flats"


class Projected(nn.Module):
    """A table (n, w) and a projection (w, d), as ALBERT has them: rows of their product, of rank w."""

    def __init__(self, table: Tensor, width: int) -> None:
        super().__init__()
        found = truncated_svd(table.float(), width)
        self.table = nn.Embedding.from_pretrained(found.coordinates.to(table.dtype), freeze=False)
        self.projection = nn.Linear(width, table.shape[1], bias=False)
        self.projection.weight.data = found.basis.T.contiguous().to(table.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.projection(self.table(ids))


def place_of_table(model: Any) -> tuple[nn.Module, str]:
    """The module that holds the token table, and its name there."""
    table = model.get_input_embeddings()
    table = table.table if isinstance(table, Projected) else table
    return next((module, name) for module in model.modules() for name, one in module.named_children() if one is table)


class SameSize(TaskExperiment):
    """The cells of one command."""

    name = "messi_same_size"

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self.flats = f"MESSI, k = {self.own.k}, j = {self.own.j}"
        self.recipe = {name: getattr(self.own, name) for name in ("width", "k", "j", "restarts")}
        self.trained: dict[tuple[str, int], tuple[Any, float]] = {}

    def original(self, model: TaskModel) -> tuple[Any, float]:
        """The trained model with its narrow table, and its score; the last one is kept in memory."""
        if (model.task, model.seed) not in self.trained:
            made = with_head(model.task, model.seed, self.source.folder)
            if self.own.width:
                holder, name = place_of_table(made)
                setattr(holder, name, Projected(getattr(holder, name).weight.data, self.own.width))
            made.to("cuda" if torch.cuda.is_available() else "cpu")
            model.train_(made, model.training.epochs)
            self.trained = {(model.task, model.seed): (made, model.score(made))}
        return self.trained[model.task, model.seed]

    def compute(self, model: TaskModel, method: str) -> Scores:
        """The score with the table covered by flats, or with noise in it."""
        original, before = self.original(model)
        small = copy.deepcopy(original)
        holder, name = place_of_table(small)
        table = getattr(holder, name).weight.data
        n, d = table.shape
        nbytes = 4 * self.own.j * (n + self.own.k * d) + label_bytes(n, self.own.k)
        fit = MESSI(k=self.own.k, restarts=self.own.restarts).fit(
            Problem(TensorRows(table.float()), nbytes, 4, seed=model.seed)
        )
        change = fit.matrix.dense().detach().to(table) - table
        if method == NOISE:
            noise = torch.randn(n, d, generator=torch.Generator().manual_seed(model.seed)).to(table)
            noise *= change.norm() / noise.norm()
            getattr(holder, name).weight.data = table + noise
        else:
            setattr(holder, name, FactoredEmbedding(fit.matrix))
        return Scores(
            metric=model.metric,
            original=before,
            compressed=model.score(small),
            nbytes=fit.nbytes,
            error=float(change.double().square().sum() / table.double().square().sum()),
            more={"share": fit.nbytes / (4 * n * d)},
        )

    def cells(self, log: Log) -> Iterator[tuple[Cell, Callable[[], Scores]]]:
        """Task by task, seed by seed."""
        for model in self.models():
            for method in (self.flats, NOISE):
                place = self.place(model, method, "same", 0, self.recipe, ("svd", "messi"))
                yield place, partial(self.compute, model, method)

    def publish(self, log: Log) -> None:
        """The page and the figure of what has run."""
        runs = self.runs_of(log, lambda run: run.recipe == self.recipe)
        gains = Results(runs, lambda run: -(drop(run) or 0.0))
        for run in runs:
            gains.at["the table itself", "same", run.task, model_of(run)] = 0.0
        sizes, tasks = [("same", "gain")], self.asked.tasks
        shares = sorted({f"{run.more['share']:.2%}" for run in runs})
        parts = [
            f"The table takes {', '.join(shares) or 'not run'} of its bytes, labels included. Gains of the main metric "
            "on the dev split in points, mean ± standard deviation over seeds; above 0 is better than the table.",
            told(runs) if runs else "",
            by_size(gains, [self.flats, NOISE], sizes, tasks, len(self.asked.seeds)),
        ]
        picture = self.asked.results / f"{self.page}.png"
        if figure_by_task(picture, gains, [self.flats, NOISE], "same", tasks, "gain, points"):
            parts.append(f"![Gains by task]({picture.name})")
        claims = [(self.flats, "the table itself"), (self.flats, NOISE)]
        parts += ["What holds:", orderings(gains, claims, sizes, tasks, lower_is_better=False)]
        publish(self.page, TITLE, parts, self.asked, self.name)


def main(argv: list[str] | None = None) -> None:
    conduct(SameSize, quick(asked_for(__doc__, "cola,mrpc", OWN, argv=argv, quick=QUICK)))


if __name__ == "__main__":
    main()
