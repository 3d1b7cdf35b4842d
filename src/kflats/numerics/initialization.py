"""Where EM on all rows begins: seeds on a sample, split and merge, EM on a longer sample.

EM's local minimum is decided by its seeds. On a sample they cost a fraction of a pass over all rows, and the full table
then needs only a few iterations.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kflats.numerics.assign import assign
from kflats.numerics.coreset import Coreset, draw_sample
from kflats.numerics.flats import FlatsFit, Progress, RankSpec, Start, Stopping, WeightedRows, affordable, em
from kflats.numerics.loss import Loss
from kflats.numerics.robust_em import robust_em
from kflats.numerics.seeding import climb, greedy, kmeans, norms, random_partition, seeding
from kflats.numerics.split_merge import split_and_merge

SAMPLE = 8192
"""Rows in the sample for seeds (equal ranks)."""

FILL_SAMPLE = 65536
"""Rows in the sample for ranks that fill a budget: a longer one, because every row's share of the budget matters."""

_LOW = 20  # rank at which the default compares its seeds


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
    """For flats of one rank: the flats of a fit to a sample, or labels where the matrix is no longer than the sample.

    With a ``coreset``, the fit is to the coreset, and EM converges on it. For a ``loss`` other than squares, rows have
    the weights that it gives them at a distance of their own norm.
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
        seeds = _seeds(part, k, rank, generator)
        # At full rank a fit to a short sample overfits it: the climb needs more rows than the seeds.
        longer = core if coreset is not None else draw_sample(cloud, FILL_SAMPLE, generator, loss)
        middle = longer.seen_by(loss)
        labels = assign(middle.rows, seeds.bases, middle.norms2, weights=middle.weights).labels
        climbed = climb(middle, k, _LOW, rank, labels, steps=2)
        labels, grams = (labels, None) if climbed is None else (climbed.labels, climbed.grams)
        if longer is cloud:
            return Start(labels, grams=grams)
    else:
        labels = seeding(start)(part, k, rank, generator)
        middle = part
        if coreset is not None:
            middle = core.seen_by(loss)
            seeds = em(part, shape, Start(labels), Stopping(1e-3, 10), refit=False)
            labels = assign(middle.rows, seeds.bases, middle.norms2).labels
    stop = Stopping(1e-3, 10 if coreset is None else 60)
    return Start(bases=em(middle, shape, Start(labels, grams=grams), stop, refit=False).bases)


def start_filled(
    cloud: WeightedRows,
    shape: RankSpec,
    loss: Loss,
    start: str,
    restart: int,
    generator: torch.Generator,
    stop: Stopping,
) -> Start:
    """For ranks that fill a budget: labels by the flats of a fit to a sample, or the labels that EM begins from where
    the matrix is no longer than the sample."""
    part = draw_sample(cloud, FILL_SAMPLE, generator, loss)
    labels = _filled_labels(part.seen_by(loss), shape, cloud.rows.shape[0], start, restart, generator, stop)
    if part is cloud:
        return Start(labels)
    fit = robust_em(part, shape, loss, Start(labels), stop)

    def nearest(exact: bool) -> Tensor:
        return assign(
            cloud.rows,
            fit.bases,
            cloud.norms2,
            weights=cloud.weights,
            multiplier=fit.multiplier,
            exact=exact,
            loss=loss,
        ).labels

    labels = nearest(shape.exact)
    if not affordable(cloud, labels, shape.k, shape.k, shape.budget):  # the sample has too few exact rows
        labels = nearest(False)
    return Start(labels)


def _filled_labels(
    part: WeightedRows,
    shape: RankSpec,
    rows: int,
    start: str,
    restart: int,
    generator: torch.Generator,
    stop: Stopping,
) -> Tensor:
    """Labels of a sample that stands for ``rows`` rows: seeds by weighted norm, then EM at growing budgets, because low
    budgets decide which rows need few numbers."""
    d, k, budget = part.rows.shape[1], shape.k, shape.budget or 0
    least = rows + k * d
    if start != "auto":
        return seeding(start)(part, k, max(1, min(d, budget // least)), generator)
    labels = norms(part, k, 1, generator)
    if restart:  # other seeds: the same quantiles with a part of the rows scattered
        scattered = torch.rand(len(labels), generator=generator).to(labels.device) < 0.25 * restart
        labels = torch.where(scattered, random_partition(part, k, 1, generator), labels)
    for share in (0.3, 0.6):
        grown = replace(shape, budget=max(int(budget * share), least), exact=False)
        labels = em(part, grown, Start(labels), Stopping(1e-2, 8, stop.progress)).labels
    return labels


def _seeds(part: WeightedRows, k: int, rank: int, generator: torch.Generator) -> FlatsFit:
    """The default seeds: the better of greedy and k-means at a low rank, where fits are cheap and local minima few.

    Greedy seeds find flats that are really there; k-means is as good where there are none.
    """
    low = RankSpec(k, rank=min(rank, _LOW))
    fits = [
        em(part, low, Start(start(part, k, rank, generator)), Stopping(1e-3, 12), refit=False)
        for start in (greedy, kmeans)
    ]
    best = min(fits, key=lambda fit: fit.error)
    return split_and_merge(part, low, best, generator, tolerance=1e-3)
