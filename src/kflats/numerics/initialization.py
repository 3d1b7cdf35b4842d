"""Where EM on all rows starts from: seeds on a sample, moves, EM on a longer sample.

Seeds are found on a sample because EM's local minimum is decided there at a fraction of the cost; the
full table then needs a handful of iterations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kflats.numerics.assign import assign
from kflats.numerics.coreset import Coreset, draw_sample
from kflats.numerics.flats import FlatsFit, Progress, RankSpec, WeightedRows, em
from kflats.numerics.loss import Loss
from kflats.numerics.seeding import climb, greedy, kmeans, norms, random_partition, seeding
from kflats.numerics.split_merge import split_and_merge

SAMPLE = 8192
"""Rows that seeds are found on (uniform ranks)."""

_LOW = 20  # rank at which the default decides between seeds

FILL_SAMPLE = 65536
"""Rows that filled ranks are found on: they need every row's share of the budget, so a longer sample."""


@dataclass(frozen=True)
class Start:
    """``labels`` (n,) of all rows, with their ``grams`` if known; or the ``bases`` of flats."""

    labels: Tensor | None = None
    bases: tuple[Tensor, ...] | None = None
    grams: Tensor | None = None


def start_uniform(
    cloud: WeightedRows,
    shape: RankSpec,
    loss: Loss,
    start: str,
    sample: int,
    coreset: Coreset | None,
    generator: torch.Generator,
    progress: Progress | None,
) -> Start:
    """For flats of one rank: the flats of a fit to a sample, or, of a cloud no longer than that, labels.

    With a ``coreset`` it is that sample, and EM converges on it. Another ``loss`` than squares is seen as weights,
    those it gives to rows as far away as they are long.
    """
    k, rank = shape.k, shape.rank or 1
    if start == "random" or k == 1:
        return Start(random_partition(cloud, k, rank, generator))
    core = cloud if coreset is None else coreset.draw(cloud, min(k * rank, cloud.rows.shape[1]), generator, loss)
    part = draw_sample(core, sample, generator, loss).seen_by(loss)
    if progress:
        progress(f"seeding: {start}", 0, 0.0)
    grams = None
    if start == "auto":
        seed_fit = _seeds(part, k, rank, generator)
        # At full rank a short sample is overfitted: the climb needs more rows than the seeds.
        longer = core if coreset is not None else draw_sample(cloud, FILL_SAMPLE, generator, loss)
        middle = longer.seen_by(loss)
        labels = assign(middle.rows, seed_fit.bases, middle.norms2, weights=middle.weights).labels
        climbed = climb(middle, k, _LOW, rank, labels, steps=2)
        labels, grams = (labels, None) if climbed is None else (climbed.labels, climbed.grams)
        if longer is cloud:
            return Start(labels, grams=grams)
    else:
        labels = seeding(start)(part, k, rank, generator)
        middle = part
        if coreset is not None:
            middle = core.seen_by(loss)
            fit = em(part, shape, labels, tolerance=1e-3, max_iterations=10, refit=False)
            labels = assign(middle.rows, fit.bases, middle.norms2).labels
    steps = 10 if coreset is None else 60
    seed_fit = em(middle, shape, labels, grams=grams, tolerance=1e-3, max_iterations=steps, refit=False)
    return Start(bases=seed_fit.bases)


def start_filled(
    part: WeightedRows,
    shape: RankSpec,
    rows: int,
    start: str,
    restart: int,
    generator: torch.Generator,
    progress: Progress | None,
) -> Tensor:
    """Labels of a sample that stands for ``rows`` rows, for ranks that fill a budget: seeds by weighted norm and a
    growing budget, since low budgets decide which rows are cheap."""
    d, k, budget = part.rows.shape[1], shape.k, shape.budget or 0
    if start != "auto":
        return seeding(start)(part, k, max(1, min(d, budget // (rows + k * d))), generator)
    labels = norms(part, k, 1, generator)
    if restart:  # other starts: the same quantiles with a part of the rows scattered
        scattered = torch.rand(len(labels), generator=generator).to(labels.device) < 0.25 * restart
        labels = torch.where(scattered, random_partition(part, k, 1, generator), labels)
    least = rows + k * d
    for share in (0.3, 0.6):
        grown = replace(shape, budget=max(int(budget * share), least), exact=False)
        labels = em(part, grown, labels, tolerance=1e-2, max_iterations=8, progress=progress).labels
    return labels


def _seeds(part: WeightedRows, k: int, rank: int, generator: torch.Generator) -> FlatsFit:
    """The default: decide at a low rank, where fits are cheap and local minima few, and climb from there.

    Greedy seeds find flats that are really there; k-means is as good on clouds without any.
    """
    low = RankSpec(k, rank=min(rank, _LOW))
    fits = [
        em(part, low, start(part, k, rank, generator), tolerance=1e-3, max_iterations=12, refit=False)
        for start in (greedy, kmeans)
    ]
    best = min(fits, key=lambda fit: fit.error)
    return split_and_merge(part, low, best, generator, tolerance=1e-3)
