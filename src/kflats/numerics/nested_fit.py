"""The whole fit with nested ranks: k flats to begin with, ranks that the rows want, EM from two starts.

The first ranks decide which local minimum EM finds, and neither of two ways is always better: all L rank groups at
once (good for unweighted rows), or a few rank groups that are doubled up to L (good for weights that differ much). Both
are tried for a few iterations, and EM goes on from the better one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.assign import assign
from kflats.numerics.coreset import draw_sample
from kflats.numerics.fit import fit_flats
from kflats.numerics.flats import Progress, Stopping, WeightedRows, weighted_rows
from kflats.numerics.gram import cluster_grams, top_eigenvectors
from kflats.numerics.initialization import FILL_SAMPLE
from kflats.numerics.nested import SPREAD, NestedFit, em_nested, settle
from kflats.numerics.ordered import Ordered
from kflats.numerics.rows import Rows, as_rows, check_finite, check_weights, slices

WIDE = 4.0
"""The range of multipliers for a few rank groups: their ranks are far from those that the budget allows."""


def fit_nested(
    matrix: Tensor | Rows,
    k: int,
    levels: int,
    *,
    budget: int,
    exact: bool = False,
    weights: Tensor | None = None,
    start: str = "auto",
    restarts: int = 1,
    tolerance: float = 1e-3,
    max_iterations: int = 60,
    seed: int = 0,
    progress: Progress | None = None,
) -> NestedFit:
    """k flats with ``levels`` nested ranks each, within a budget of numbers (never exceeded).

    Args:
        matrix: (n, d), a tensor or any ``Rows``; read in blocks.
        exact: keep single rows exactly where that lowers the error.
        weights: (n,) w_i >= 0.
        start, restarts: as ``fit_flats``, for the flats to begin with.
        tolerance: EM stops when iterations lower the error by less than this share of it.

    Choose it when rows differ much in importance, or in how many directions they need. With one flat and 8 to 16
    levels all rows share one basis. Memory: k * levels Grams of d x d numbers.

    Raises:
        KflatsError: as ``fit_flats``; k * levels above 32766.

    >>> a = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [0.5, 3.0]])
    >>> fit = fit_nested(a, 1, 2, budget=12)      # 8 coordinates for the rows, 4 numbers for the basis
    >>> fit.used, fit.error < 1e-6
    (12, True)
    """
    rows = as_rows(matrix)
    n, d = rows.shape
    if levels < 1 or k * levels > 32766:
        raise KflatsError(
            f"{k} flats of {levels} levels are not supported",
            cause="levels begin at 1, and k * levels ends at 32766",
            hint="fewer levels",
        )
    check_finite(rows)
    check_weights(weights, n)
    cloud, scale = weighted_rows(rows, weights)
    first = fit_flats(
        rows, k, budget=budget, weights=cloud.weights, start=start, restarts=restarts, tolerance=1e-2, seed=seed
    )
    part = draw_sample(cloud, FILL_SAMPLE, torch.Generator().manual_seed(seed))
    labels = assign(part.rows, first.bases, part.norms2, weights=part.weights, multiplier=first.multiplier).labels.to(
        torch.int64
    )
    grams = cluster_grams(part.rows, labels, k, part.mass)
    flats = tuple(Ordered(top_eigenvectors(gram, d)[1], (1,)) for gram in grams)
    tried = [
        _climb(part, flats, labels, ladder, budget, first.multiplier, exact, spread, Stopping(1e-2, 15, progress))
        for ladder, spread in zip(_ladders(min(levels, d)), (SPREAD, WIDE), strict=False)
    ]
    best = min(tried, key=lambda fit: fit.error)
    stop = Stopping(tolerance, max_iterations, progress)
    fit = em_nested(cloud, best.flats, budget, best.multiplier, stop, exact=exact)
    if part is cloud and best.error < fit.error:
        fit = replace(best, converged=fit.converged)
    fit = settle(cloud, fit, budget)
    return replace(fit, objective=tuple(scale * value for value in fit.objective), multiplier=scale * fit.multiplier)


def _ladders(levels: int) -> list[list[int]]:
    """Numbers of rank groups to try one after the other: all at once, and from 2 up by doubling.

    >>> _ladders(8), _ladders(2)
    ([[8], [2, 4, 8]], [[2]])
    """
    ladder = [levels]
    while ladder[0] > 3:
        ladder.insert(0, -(-ladder[0] // 2))
    return [[levels]] if len(ladder) == 1 else [[levels], ladder]


def _climb(
    cloud: WeightedRows,
    flats: tuple[Ordered, ...],
    labels: Tensor,
    ladder: list[int],
    budget: int,
    multiplier: float,
    exact: bool,
    spread: float,
    stop: Stopping,
) -> NestedFit:
    """EM with each number of rank groups of the ladder, from the ranks that the rows want."""
    fit: NestedFit | None = None
    for levels in ladder:
        wanted = wanted_ranks(cloud, flats, labels, multiplier)
        flats = tuple(replace(f, ranks=quantiles(h, levels)) for f, h in zip(flats, wanted, strict=True))
        fit = em_nested(cloud, flats, budget, multiplier, stop, exact=exact, spread=spread)
        flats, multiplier, labels = fit.flats, fit.multiplier, fit.labels.to(torch.int64) // levels
    assert fit is not None
    return fit


def wanted_ranks(cloud: WeightedRows, flats: tuple[Ordered, ...], labels: Tensor, multiplier: float) -> Tensor:
    """(k, d + 1): how many rows of each flat want r coordinates, r = argmin w tail(r) + multiplier r.

    ``labels`` (n,): the flat of each row; rows labelled k or more are left out.
    """
    rows, d = cloud.rows, cloud.rows.shape[1]
    wanted = torch.zeros(len(flats), d + 1, dtype=torch.float64)
    steps = torch.arange(d + 1, dtype=rows.dtype, device=rows.device) * multiplier
    bases = [flat.basis.to(rows.dtype) for flat in flats]
    for here, block in slices(rows):
        for c, basis in enumerate(bases):
            mine = (labels[here] == c).nonzero().squeeze(1)
            gain = (block[mine] @ basis.T).square_().cumsum(1)
            if cloud.weights is not None:
                gain *= cloud.weights[here][mine].to(gain.dtype).unsqueeze(1)
            best = (torch.nn.functional.pad(gain, (1, 0)) - steps).argmax(1).cpu()
            counted = None if cloud.multiplicity is None else cloud.multiplicity[here][mine].to(torch.float64).cpu()
            wanted[c] += torch.bincount(best, weights=counted, minlength=d + 1)
    return wanted


def quantiles(wanted: Tensor, levels: int) -> tuple[int, ...]:
    """The middles of ``levels`` equal parts of the rows, by the rank (d + 1,) they want; at least 1.

    >>> quantiles(torch.tensor([0., 4., 0., 2., 2.]), 2)
    (1, 3)
    """
    share = wanted.cumsum(0)
    if float(share[-1]) <= 0:
        return (1,) * levels
    middles = (torch.arange(levels, dtype=share.dtype) + 0.5) / levels * share[-1]
    return tuple(torch.searchsorted(share, middles).clamp(1, len(wanted) - 1).tolist())
