"""The whole nested fit: flats to begin with, ranks from what each row would keep, EM by several ladders.

Where levels begin decides which local minimum EM finds, and neither way is always the better: all L
levels at once (unweighted rows), or a few levels that are doubled up to L (weights that differ much).
Both are tried shortly, the better one is fitted to the end.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.assign import assign, squared_norms
from kflats.numerics.coreset import draw_sample
from kflats.numerics.fit import fit_flats
from kflats.numerics.flats import Progress, WeightedRows
from kflats.numerics.gram import cluster_grams, top_eigenvectors
from kflats.numerics.initialization import FILL_SAMPLE
from kflats.numerics.nested import SPREAD, NestedFit, em_nested, settle
from kflats.numerics.ordered import Ordered
from kflats.numerics.rows import BLOCK, Rows, as_rows, check_finite, check_weights

WIDE = 4.0
"""How far ladders look for prices: few levels are far from the ranks that the budget would let them have."""


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
    """k flats, in each ``levels`` prefix ranks of one ordered basis, at a budget of numbers (never exceeded).

    Args:
        matrix: (n, d), a tensor or any ``Rows``; read in blocks.
        exact: let rows be kept as they are, where that pays.
        weights: (n,) w_i >= 0.
        start, restarts: how the flats to begin with are found (``fit_flats``).
        tolerance: stop when iterations lower the error by less than this share of it.

    Choose it when rows differ much in importance or in how many directions they need; one flat with
    8 to 16 levels is the extreme where all rows share one basis. Memory: k L Grams of d x d numbers.

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
        raise KflatsError(f"{k} flats of {levels} levels are not possible", hint="fewer levels")
    check_finite(rows)
    check_weights(weights, n)
    scale = 1.0
    if weights is not None:
        # The scale of w must not matter: rows and prices are compared in float32.
        scale = float(weights.sum(dtype=torch.float64)) / n
        weights = (weights.to(torch.float64) / scale).to(rows.dtype).to(rows.device)
    first = fit_flats(
        rows, k, budget=budget, weights=weights, start=start, restarts=restarts, tolerance=1e-2, seed=seed
    )
    cloud = WeightedRows(rows, squared_norms(rows), weights)
    part = draw_sample(cloud, FILL_SAMPLE, torch.Generator().manual_seed(seed))
    labels = assign(part.rows, first.bases, part.norms2, weights=part.weights, price=first.price).labels.to(torch.int64)
    grams = cluster_grams(part.rows, labels, k, part.mass)
    flats = tuple(Ordered(top_eigenvectors(gram, d)[1], (1,)) for gram in grams)
    tried = [
        _climb(part, flats, labels, ladder, budget, first.price, exact, spread, progress)
        for ladder, spread in zip(_ladders(min(levels, d)), (SPREAD, WIDE), strict=False)
    ]
    best = min(tried, key=lambda fit: fit.error)
    fit = em_nested(
        cloud,
        best.flats,
        budget,
        best.price,
        exact=exact,
        tolerance=tolerance,
        max_iterations=max_iterations,
        progress=progress,
    )
    if part is cloud and best.error < fit.error:
        fit = replace(best, converged=fit.converged)
    fit = settle(cloud, fit, budget)
    return replace(fit, objective=tuple(scale * value for value in fit.objective), price=scale * fit.price)


def _ladders(levels: int) -> list[list[int]]:
    """All levels at once, and from 2 up by doubling.

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
    price: float,
    exact: bool,
    spread: float,
    progress: Progress | None,
) -> NestedFit:
    """EM at each number of levels of the ladder, from ranks that the rows themselves would choose."""
    fit: NestedFit | None = None
    for levels in ladder:
        wanted = wanted_ranks(cloud, flats, labels, price)
        flats = tuple(replace(f, ranks=quantiles(h, levels)) for f, h in zip(flats, wanted, strict=True))
        fit = em_nested(
            cloud,
            flats,
            budget,
            price,
            exact=exact,
            tolerance=1e-2,
            max_iterations=15,
            spread=spread,
            progress=progress,
        )
        flats, price, labels = fit.flats, fit.price, fit.labels.to(torch.int64) // levels
    assert fit is not None
    return fit


def wanted_ranks(cloud: WeightedRows, flats: tuple[Ordered, ...], labels: Tensor, price: float) -> Tensor:
    """(k, d + 1): how many rows of each flat would best keep r coordinates, argmin_r w tail(r) + price r.

    ``labels`` (n,): flat of each row; rows labelled k or more are left out.
    """
    rows, d = cloud.rows, cloud.rows.shape[1]
    found = torch.zeros(len(flats), d + 1, dtype=torch.float64)
    steps = torch.arange(d + 1, dtype=rows.dtype, device=rows.device) * price
    bases = [flat.basis.to(rows.dtype) for flat in flats]
    for start, block in rows.blocks(BLOCK):
        here = slice(start, start + len(block))
        for c, basis in enumerate(bases):
            mine = (labels[here] == c).nonzero().squeeze(1)
            gain = (block[mine] @ basis.T).square_().cumsum(1)
            if cloud.weights is not None:
                gain *= cloud.weights[here][mine].to(gain.dtype).unsqueeze(1)
            best = (torch.nn.functional.pad(gain, (1, 0)) - steps).argmax(1).cpu()
            counted = None if cloud.multiplicity is None else cloud.multiplicity[here][mine].to(torch.float64).cpu()
            found[c] += torch.bincount(best, weights=counted, minlength=d + 1)
    return found


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
