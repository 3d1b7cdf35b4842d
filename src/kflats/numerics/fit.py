"""The whole fit of k flats: a sample, seeds, EM on the sample, split and merge, EM on all rows; the best restart."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.assign import assign
from kflats.numerics.coreset import Coreset
from kflats.numerics.flats import FlatsFit, Progress, RankSpec, Start, Stopping, WeightedRows, weighted_rows
from kflats.numerics.initialization import SAMPLE, start_filled, start_uniform
from kflats.numerics.loss import Loss, Power, Squared, absolute, is_relative, stages
from kflats.numerics.robust_bound import losses, reweighted, true_loss
from kflats.numerics.robust_em import distances_of, robust_em
from kflats.numerics.rows import Rows, as_rows, check_finite, check_rank, check_spread, check_weights

_SQUARED = Squared()
_SPREAD = 1e12  # longer rows, once a loss has weighted them, leave nothing of the others in float64


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
        budget: numbers to store instead: ranks are filled flat by flat, and the budget is never exceeded.
        exact: with a budget: keep single rows exactly where that lowers the error.
        weights: (n,) w_i >= 0. A row of weight 0 gets a label but does not change the flats.
        error: rho, a loss of ``numerics.loss``. A loss that is not convex in t, or has a threshold in medians of
            distances, begins from two fits: one under ``Power(1)``, and one to the rows scaled to length 1, which far
            rows cannot turn. With a rank, EM goes on from the fit whose sum of losses is lower; with a budget, from
            both.
        start: a name in ``seeding.SEEDINGS``; "auto": with a rank, the better of greedy and k-means seeds at a low
            rank, then continuation; with a budget, weighted norms and a growing budget.
        restarts: number of fits with other seeds; the best one is returned.
        tolerance: EM stops when an iteration lowers the objective by less than this share of it.
        sample: rows in the sample for seeds (with a rank).
        coreset: with a rank, EM converges on a coreset of the rows before it sees all of them.
        seed: of every random step; equal seed, row order and threads give an equal fit.

    Choose a rank to compare with the paper, a budget to get the least error for the bytes. EM finds a local minimum;
    the global problem is Max-SNP-hard.

    Raises:
        KflatsError: NaN or infinity, more flats than rows, a rank outside 1..d, a budget below k flats of rank 1; under
            a loss other than squares, a row so long that the others are only rounding beside it.

    >>> a = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    >>> fit_flats(a, 2, rank=1).error < 1e-9
    True
    """
    rows = as_rows(matrix)
    n, d = rows.shape
    if (rank is None) == (budget is None):
        raise KflatsError(
            "k flats need either a rank or a budget",
            hint="rank=..., or budget=...",
            command="a budget: --keep or --size",
        )
    if not 1 <= k <= n:
        raise KflatsError(f"{k} flats do not fit {n} rows", hint=f"choose k in 1..{n}")
    if not isinstance(error, Loss):
        raise KflatsError(
            f"no loss of distances is {error!r}",
            hint="Squared(), Power(1), Huber(...), Truncated(...)",
            command="squared, 'power 1', 'huber 0.5' or 'truncated 3 median'",
        )
    if rank is not None:
        check_rank(rank, d)
    if coreset is not None and rank is None:
        raise KflatsError(
            "a coreset is not supported with a budget",
            cause="ranks that fill a budget are found on a sample of their own",
            hint="give a rank, or leave the coreset out",
        )
    if coreset is not None and rank is not None and coreset.rows < min(n, 2 * k * (rank + 1)):
        raise KflatsError(
            f"a coreset of {coreset.rows} rows cannot show {k} flats of rank {rank}",
            hint=f"at least {2 * k * (rank + 1)} rows, better many times that",
        )
    check_finite(rows)
    check_weights(weights, n)
    cloud, scale = weighted_rows(rows, weights)
    if not isinstance(error, Squared):
        check_spread(cloud.norms2.to(torch.float64), cloud.weights, _SPREAD)
    shape, stop = RankSpec(k, rank, budget, exact), Stopping(tolerance, max_iterations, progress)

    def fit(cloud: WeightedRows, loss: Loss, restart: int) -> FlatsFit:
        generator = torch.Generator().manual_seed(seed + 7919 * restart)
        if rank is None:
            begin = start_filled(cloud, shape, loss, start, restart, generator, stop)
        else:
            begin = start_uniform(cloud, shape, loss, start, sample, coreset, generator, progress)
        return robust_em(cloud, shape, loss, begin, stop)

    first, *later = (_SQUARED,) if error == Power(2) else stages(error)
    best = min((fit(cloud, first, restart) for restart in range(max(restarts, 1))), key=_error)
    for loss in later:
        loss = _resolved(loss, cloud, best)
        alike = fit(_by_direction(cloud), _SQUARED, 0)
        starts = [Start(best.labels, best.bases, multiplier=best.multiplier), Start(alike.labels, alike.bases)]
        if rank is not None:
            starts = [min(starts, key=lambda begin: _reached(loss, cloud, begin))]
        elif not _within_reach(loss, cloud, starts[1]):
            starts = starts[:1]
        # With a budget, ranks are still to be filled, so the sum at a start says little of the sum at its end.
        best = min((robust_em(cloud, shape, loss, begin, stop) for begin in starts), key=_error)
    if not isinstance(best.loss, Squared):
        reached = true_loss(best.loss, cloud, best.bases, best.labels)
        best = replace(best, objective=(*(value for value in best.objective[:-1] if value > reached), reached))
    objective = tuple(scale * value for value in best.objective)
    return replace(best, objective=objective, spectra=scale * best.spectra, multiplier=scale * best.multiplier)


def _error(fit: FlatsFit) -> float:
    return fit.error


def _by_direction(cloud: WeightedRows) -> WeightedRows:
    """The rows with the weights that scale each of them to length 1: far rows are then no farther than others."""
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
    """Whether any row has a weight at the flats of a start: the threshold may be below all distances."""
    assert start.labels is not None
    assert start.bases is not None
    dist2 = distances_of(cloud, start.bases, start.labels)
    return bool((reweighted(loss, dist2, cloud)[start.labels < len(start.bases)] > 0).any())


def _resolved(loss: Loss, cloud: WeightedRows, fit: FlatsFit) -> Loss:
    """``loss`` with its threshold as a distance, where it is in medians of the distances of ``fit``."""
    if not is_relative(loss):
        return loss
    k = len(fit.bases)
    dist2 = distances_of(cloud, fit.bases, fit.labels)
    # Rows that are kept exactly have no distance, and rows of zeros lie on every flat.
    near = (fit.labels < k) & (cloud.norms2 > 0)
    if cloud.weights is not None:
        near &= cloud.weights > 0
    if not bool(near.any()):
        near = torch.ones_like(near)
    return absolute(loss, dist2[near], cloud.norms2[near])
