"""The whole fit: sample, seed, EM on the sample, moves, EM on all rows, best of r restarts.

Seeds are found on a sample because EM's local minimum is decided there at a fraction of the cost; the
full table then needs a handful of iterations.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kflats.errors import KflatsError
from kflats.numerics.assign import assign, squared_norms
from kflats.numerics.flats import Cloud, FlatsFit, Progress, Shape, affordable, em
from kflats.numerics.moves import split_and_merge
from kflats.numerics.rows import Rows, TensorRows, as_rows, check_finite, check_weights
from kflats.numerics.seeding import climb, greedy, kmeans, norms, random_partition, seeding

SAMPLE = 8192
"""Rows that seeds are found on (uniform ranks)."""

_LOW = 20  # rank at which the default decides between seeds

FILL_SAMPLE = 65536
"""Rows that filled ranks are found on: they need every row's share of the budget, so a longer sample."""


def fit_flats(
    matrix: Tensor | Rows,
    k: int,
    *,
    rank: int | None = None,
    budget: int | None = None,
    exact: bool = False,
    weights: Tensor | None = None,
    start: str = "auto",
    restarts: int = 1,
    tolerance: float = 1e-3,
    max_iterations: int = 100,
    sample: int = SAMPLE,
    seed: int = 0,
    progress: Progress | None = None,
) -> FlatsFit:
    """Flats S_1..S_k that minimise  sum_i w_i dist(a_i, S_c(i))^2  (MESSI, section 2).

    Args:
        matrix: (n, d), a tensor or any ``Rows``; read in blocks, never copied.
        k: number of flats.
        rank: dimension of every flat, or
        budget: numbers to store instead, which fills ranks flat by flat (never exceeded).
        exact: with a budget: let rows be kept as they are, where that pays.
        weights: (n,) w_i >= 0; rows of weight 0 are assigned but judge nothing.
        start: a name in ``seeding.SEEDINGS``; "auto": the better of greedy and k-means seeds at low rank, then
            continuation (uniform), or weighted norms with a growing budget (filled).
        restarts: best of so many.
        tolerance: stop when an iteration lowers the objective by less than this share of it.
        seed: every random step follows it; equal seed, order and threads give an equal fit.

    Choose a rank to compare with the paper, a budget to get the least error for the bytes. EM finds a
    local minimum: the global problem is Max-SNP-hard.

    Raises:
        KflatsError: NaN or infinity, more flats than rows, a rank outside 1..d, a budget below k flats of rank 1.

    >>> a = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    >>> fit_flats(a, 2, rank=1).error < 1e-9
    True
    """
    rows = as_rows(matrix)
    n, d = rows.shape
    if (rank is None) == (budget is None):
        raise KflatsError("give a rank or a budget, one of the two")
    if not 1 <= k <= n:
        raise KflatsError(f"{k} flats do not fit {n} rows", hint=f"choose k in 1..{n}")
    if rank is not None and not 1 <= rank <= d:
        raise KflatsError(f"rank {rank} is outside 1..{d}")
    check_finite(rows)
    check_weights(weights, n)
    scale = 1.0
    if weights is not None:
        # The scale of w must not matter: rows and prices are compared in float32.
        scale = float(weights.sum(dtype=torch.float64)) / n
        weights = (weights.to(torch.float64) / scale).to(rows.dtype).to(rows.device)
    cloud = Cloud(rows, squared_norms(rows), weights)
    shape = Shape(k, rank, budget, exact)
    best: FlatsFit | None = None
    for restart in range(max(restarts, 1)):
        generator = torch.Generator().manual_seed(seed + 7919 * restart)
        if rank is not None:
            fit = _fit_uniform(cloud, shape, start, sample, tolerance, max_iterations, generator, progress)
        else:
            fit = _fit_filled(cloud, shape, start, restart, tolerance, max_iterations, generator, progress)
        if best is None or fit.error < best.error:
            best = fit
    assert best is not None
    objective = tuple(scale * value for value in best.objective)
    return replace(best, objective=objective, spectra=scale * best.spectra, price=scale * best.price)


def _fit_uniform(
    cloud: Cloud,
    shape: Shape,
    start: str,
    sample: int,
    tolerance: float,
    limit: int,
    generator: torch.Generator,
    progress: Progress | None,
) -> FlatsFit:
    k, rank = shape.k, shape.rank or 1
    if start == "random" or k == 1:
        labels = random_partition(cloud, k, rank, generator)
        return em(cloud, shape, labels, tolerance=tolerance, max_iterations=limit, progress=progress)
    part = draw_sample(cloud, sample, generator)
    if progress:
        progress(f"seeding: {start}", 0, 0.0)
    if start == "auto":
        seed_fit = _seeds(part, k, rank, generator)
        # At full rank a short sample is overfitted: the climb needs more rows than the seeds.
        middle = draw_sample(cloud, FILL_SAMPLE, generator)
        labels = assign(middle.rows, seed_fit.bases, middle.norms2, weights=middle.weights).labels
        climbed = climb(middle, k, _LOW, rank, labels, steps=2)
        labels, grams = (labels, None) if climbed is None else (climbed.labels, climbed.grams)
        if middle is cloud:
            return em(cloud, shape, labels, grams=grams, tolerance=tolerance, max_iterations=limit, progress=progress)
        seed_fit = em(middle, shape, labels, grams=grams, tolerance=1e-3, max_iterations=10, refit=False)
    else:
        labels = seeding(start)(part, k, rank, generator)
        seed_fit = em(part, shape, labels, tolerance=1e-3, max_iterations=10, refit=False)
    return em(cloud, shape, None, bases=seed_fit.bases, tolerance=tolerance, max_iterations=limit, progress=progress)


def _seeds(part: Cloud, k: int, rank: int, generator: torch.Generator) -> FlatsFit:
    """The default: decide at a low rank, where fits are cheap and local minima few, and climb from there.

    Greedy seeds find flats that are really there; k-means is as good on clouds without any.
    """
    low = Shape(k, rank=min(rank, _LOW))
    fits = [
        em(part, low, start(part, k, rank, generator), tolerance=1e-3, max_iterations=12, refit=False)
        for start in (greedy, kmeans)
    ]
    best = min(fits, key=lambda fit: fit.error)
    return split_and_merge(part, low, best, generator, tolerance=1e-3)


def _fit_filled(
    cloud: Cloud,
    shape: Shape,
    start: str,
    restart: int,
    tolerance: float,
    limit: int,
    generator: torch.Generator,
    progress: Progress | None,
) -> FlatsFit:
    """Grow the budget, from seeds by weighted norm: low budgets decide which rows are cheap."""
    n, d = cloud.rows.shape
    k, budget = shape.k, shape.budget or 0
    part = draw_sample(cloud, FILL_SAMPLE, generator)
    if start != "auto":
        labels = seeding(start)(part, k, max(1, min(d, budget // (n + k * d))), generator)
    else:
        labels = norms(part, k, 1, generator)
        if restart:  # other starts: the same quantiles with a part of the rows scattered
            scattered = torch.rand(len(labels), generator=generator).to(labels.device) < 0.25 * restart
            labels = torch.where(scattered, random_partition(part, k, 1, generator), labels)
    least = n + k * d
    for share in (0.3, 0.6) if start == "auto" else ():
        grown = replace(shape, budget=max(int(budget * share), least), exact=False)
        labels = em(part, grown, labels, tolerance=1e-2, max_iterations=8, progress=progress).labels
    if part is not cloud:
        fit = em(part, shape, labels, tolerance=tolerance, max_iterations=limit, progress=progress)
        labels = assign(
            cloud.rows, fit.bases, cloud.norms2, weights=cloud.weights, price=fit.price, exact=shape.exact
        ).labels
        if not affordable(cloud, shape, labels):  # the sample guessed too few rows worth keeping exactly
            labels = assign(cloud.rows, fit.bases, cloud.norms2, weights=cloud.weights, price=fit.price).labels
    return em(cloud, shape, labels, tolerance=tolerance, max_iterations=limit, progress=progress)


def draw_sample(cloud: Cloud, size: int, generator: torch.Generator) -> Cloud:
    """At most ``size`` rows, drawn half by their share of the weighted energy and half evenly, each with
    the number of rows it stands for (Horvitz-Thompson); the whole cloud if it is no larger."""
    n = cloud.rows.shape[0]
    if n <= size:
        return cloud
    # float32 and in place: with ten million rows these vectors are the peak of the memory.
    chance = (cloud.norms2 if cloud.weights is None else cloud.norms2 * cloud.weights).to(torch.float32, copy=True)
    total = float(chance.sum(dtype=torch.float64))
    chance.mul_(0.5 * size / total if total > 0 else 0.0).add_((0.5 if total > 0 else 1.0) * size / n).clamp_(max=1.0)
    taken = (torch.rand(n, generator=generator).to(chance.device) < chance).nonzero().squeeze(1)
    rows = TensorRows(cloud.rows.take(taken))
    weights = None if cloud.weights is None else cloud.weights[taken]
    stands_for = 1.0 / chance[taken].to(torch.float64)
    # Together they stand for all rows, and not for one more: what a budget must hold is counted by them.
    stands_for *= (1 - 1e-6) * n / stands_for.sum()
    return Cloud(rows, cloud.norms2[taken], weights, stands_for.to(rows.dtype))
