"""The whole fit: sample, seed, EM on the sample, moves, EM on all rows, best of r restarts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.assign import assign, squared_norms
from kflats.numerics.coreset import Coreset, draw_sample
from kflats.numerics.flats import FlatsFit, Progress, RankSpec, WeightedRows, affordable, em
from kflats.numerics.initialization import FILL_SAMPLE, SAMPLE, Start, start_filled, start_uniform
from kflats.numerics.loss import Loss, Power, Squared, absolute, is_relative, stages
from kflats.numerics.robust_bound import losses, reweighted, true_loss
from kflats.numerics.robust_em import distances_of, robust_em
from kflats.numerics.rows import Rows, as_rows, check_finite, check_rank, check_spread, check_weights

_SQUARED = Squared()
_SPREAD = 1e12  # beside rows so much longer float64 leaves nothing of the others, once losses have weighed them


def fit_flats(
    matrix: Tensor | Rows,
    k: int,
    *,
    rank: int | None = None,
    budget: int | None = None,
    exact: bool = False,
    weights: Tensor | None = None,
    error: Loss = _SQUARED,
    start: str = "auto",
    restarts: int = 1,
    tolerance: float = 1e-3,
    max_iterations: int = 100,
    sample: int = SAMPLE,
    coreset: Coreset | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> FlatsFit:
    """Flats S_1..S_k that minimise  sum_i w_i rho(dist(a_i, S_c(i))),  rho(t) = t^2 by default (MESSI, section 2).

    Args:
        matrix: (n, d), a tensor or any ``Rows``; read in blocks, never copied.
        k: number of flats.
        rank: dimension of every flat, or
        budget: numbers to store instead, which fills ranks flat by flat (never exceeded).
        exact: with a budget: let rows be kept as they are, where that pays.
        weights: (n,) w_i >= 0; rows of weight 0 are assigned but judge nothing.
        error: rho, a loss of ``numerics.loss``. Those that are not convex in t, and thresholds in medians of
            distances, begin with a whole fit under ``Power(1)`` and with one to the rows brought to length 1, which
            far rows cannot turn: with a rank they go on from where their own sum is lower, with a budget from both.
        start: a name in ``seeding.SEEDINGS``; "auto": the better of greedy and k-means seeds at low rank, then
            continuation (uniform), or weighted norms with a growing budget (filled).
        restarts: best of so many.
        sample: rows that seeds are found on (uniform ranks).
        coreset: with equal ranks, let EM converge on so many rows before it sees all.
        tolerance: stop when an iteration lowers the objective by less than this share of it.
        seed: every random step follows it; equal seed, order and threads give an equal fit.

    Choose a rank to compare with the paper, a budget to get the least error for the bytes. EM finds a
    local minimum: the global problem is Max-SNP-hard.

    Raises:
        KflatsError: NaN or infinity, more flats than rows, a rank outside 1..d, a budget below k flats of rank 1; with
            another error than squares, a row so long that the others are rounding beside it.

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
    if not isinstance(error, Loss):
        raise KflatsError(f"no loss of distances is {error!r}", hint="Squared(), Power(1), Huber(...), Truncated(...)")
    if coreset is not None and rank is None:
        raise KflatsError(
            "a coreset is for flats of equal rank",
            cause="ranks that fill a budget are found on a sample of their own",
            hint="give a rank, or leave the coreset out",
        )
    if rank is not None:
        check_rank(rank, d)
    if coreset is not None and rank is not None and coreset.rows < min(n, 2 * k * (rank + 1)):
        raise KflatsError(
            f"a coreset of {coreset.rows} rows cannot show {k} flats of rank {rank}",
            hint=f"at least {2 * k * (rank + 1)} rows, better many times that",
        )
    check_finite(rows)
    check_weights(weights, n)
    scale = 1.0
    if weights is not None:
        # The scale of w must not matter: rows and prices are compared in float32.
        scale = float(weights.sum(dtype=torch.float64)) / n
        weights = (weights.to(torch.float64) / scale).to(rows.dtype).to(rows.device)
    cloud = WeightedRows(rows, squared_norms(rows), weights)
    if not isinstance(error, Squared):
        check_spread(cloud.norms2.to(torch.float64), weights, _SPREAD)
    shape = RankSpec(k, rank, budget, exact)
    first, *later = (_SQUARED,) if error == Power(2) else stages(error)
    best: FlatsFit | None = None
    for restart in range(max(restarts, 1)):
        generator = torch.Generator().manual_seed(seed + 7919 * restart)
        if rank is not None:
            fit = _fit_uniform(
                cloud, shape, first, start, sample, coreset, tolerance, max_iterations, generator, progress
            )
        else:
            fit = _fit_filled(cloud, shape, first, start, restart, tolerance, max_iterations, generator, progress)
        if best is None or fit.error < best.error:
            best = fit
    assert best is not None
    for loss in later:
        loss = _resolved(loss, cloud, best)
        generator = torch.Generator().manual_seed(seed)
        begun, alike = Start(best.labels, best.bases), _by_direction(cloud)
        if rank is None:
            fit = _fit_filled(alike, shape, _SQUARED, start, 0, tolerance, max_iterations, generator, progress)
            # Ranks that are still to be filled differ: the sum at a start says little of where it ends.
            ends = [robust_em(cloud, shape, loss, begun, tolerance, max_iterations, progress, price=best.price)]
            other = Start(fit.labels, fit.bases)
            if _within_reach(loss, cloud, other):
                ends.append(robust_em(cloud, shape, loss, other, tolerance, max_iterations, progress, price=None))
            best = min(ends, key=lambda end: end.error)
        else:
            fit = _fit_uniform(
                alike, shape, _SQUARED, start, sample, coreset, tolerance, max_iterations, generator, progress
            )
            begun = min(begun, Start(fit.labels, fit.bases), key=lambda flats: _reached(loss, cloud, flats))
            best = robust_em(cloud, shape, loss, begun, tolerance, max_iterations, progress)
    if not isinstance(best.loss, Squared):
        reached = true_loss(best.loss, cloud, best.bases, best.labels)
        best = replace(best, objective=(*(value for value in best.objective[:-1] if value > reached), reached))
    objective = tuple(scale * value for value in best.objective)
    return replace(best, objective=objective, spectra=scale * best.spectra, price=scale * best.price)


def _em(
    cloud: WeightedRows,
    shape: RankSpec,
    loss: Loss,
    first: Start,
    tolerance: float,
    limit: int,
    progress: Progress | None,
) -> FlatsFit:
    if not isinstance(loss, Squared):
        return robust_em(cloud, shape, loss, first, tolerance, limit, progress)
    return em(
        cloud,
        shape,
        first.labels,
        bases=first.bases,
        grams=first.grams,
        tolerance=tolerance,
        max_iterations=limit,
        progress=progress,
    )


def _fit_uniform(
    cloud: WeightedRows,
    shape: RankSpec,
    loss: Loss,
    start: str,
    sample: int,
    coreset: Coreset | None,
    tolerance: float,
    limit: int,
    generator: torch.Generator,
    progress: Progress | None,
) -> FlatsFit:
    first = start_uniform(cloud, shape, loss, start, sample, coreset, generator, progress)
    return _em(cloud, shape, loss, first, tolerance, limit, progress)


def _fit_filled(
    cloud: WeightedRows,
    shape: RankSpec,
    loss: Loss,
    start: str,
    restart: int,
    tolerance: float,
    limit: int,
    generator: torch.Generator,
    progress: Progress | None,
) -> FlatsFit:
    part = draw_sample(cloud, FILL_SAMPLE, generator, loss)
    labels = start_filled(part.seen_by(loss), shape, cloud.rows.shape[0], start, restart, generator, progress)
    if part is not cloud:
        fit = _em(part, shape, loss, Start(labels), tolerance, limit, progress)

        def everyone(exact: bool) -> Tensor:
            return assign(
                cloud.rows, fit.bases, cloud.norms2, weights=cloud.weights, price=fit.price, exact=exact, loss=loss
            ).labels

        labels = everyone(shape.exact)
        if not affordable(cloud, shape, labels):  # the sample guessed too few rows worth keeping exactly
            labels = everyone(False)
    return _em(cloud, shape, loss, Start(labels), tolerance, limit, progress)


def _by_direction(cloud: WeightedRows) -> WeightedRows:
    """The rows brought to length 1, as which far rows are no farther than others."""
    inverse = torch.where(cloud.norms2 > 0, 1 / cloud.norms2.to(torch.float64), 0.0)
    mass = inverse if cloud.weights is None else inverse * cloud.weights
    if not bool(mass.any()):
        mass = torch.ones_like(mass)
    return replace(cloud, weights=(mass / mass.mean()).to(cloud.norms2.dtype))


def _reached(loss: Loss, cloud: WeightedRows, start: Start) -> float:
    """The sum of losses at the flats of a start."""
    step = assign(cloud.rows, start.bases or (), cloud.norms2)
    return float(losses(loss, step.dist2, cloud).sum(dtype=torch.float64))


def _within_reach(loss: Loss, cloud: WeightedRows, start: Start) -> bool:
    """Whether any row counts at the flats of a start: a truncated loss may lie below all distances."""
    assert start.labels is not None
    assert start.bases is not None
    dist2 = distances_of(cloud, start.bases, start.labels)
    return bool((reweighted(loss, dist2, cloud)[start.labels < len(start.bases)] > 0).any())


def _resolved(loss: Loss, cloud: WeightedRows, fit: FlatsFit) -> Loss:
    """``loss`` with a threshold in medians of the distances of ``fit`` as a distance."""
    if not is_relative(loss):
        return loss
    k = len(fit.bases)
    dist2 = distances_of(cloud, fit.bases, fit.labels)
    # Rows kept exactly have no distance, and rows of zeros lie on every flat.
    near = (fit.labels < k) & (cloud.norms2 > 0)
    if cloud.weights is not None:
        near &= cloud.weights > 0
    if not bool(near.any()):
        near = torch.ones_like(near)
    return absolute(loss, dist2[near], cloud.norms2[near])
