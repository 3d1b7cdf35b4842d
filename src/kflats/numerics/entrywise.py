"""Low rank under the entrywise lp error, fitted directly.

    minimise over U (n, r), V (r, d):   sum_i w_i sum_j |A - U V|_ij^p          0 < p <= 2

A single wrong entry counts by its square in a squared error, and by its size at p = 1. The problem is not convex (and
NP-hard for p = 1: Gillis & Vavasis 2018). Both solvers, ``entrywise_admm`` (1 <= p < 2) and ``entrywise_irls`` (any p),
begin from the SVD, or from the SVD of the matrix with its far entries held back (``winsorize``) where its sum is lower.
They return the factors of the lowest sum on their way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.entrywise_admm import admm
from kflats.numerics.entrywise_irls import irls
from kflats.numerics.factors import Factors, powers_
from kflats.numerics.flats import Progress, Stopping
from kflats.numerics.rows import (
    Rows,
    ScaledRows,
    TensorRows,
    WidenedRows,
    all_rows,
    as_rows,
    check_finite,
    check_rank,
    check_spread,
    check_steps,
    check_weights,
    row_factors,
    slices,
)
from kflats.numerics.svd import project, truncated_svd
from kflats.numerics.winsorize import HeldBackRows

Solver = Literal["irls", "admm"]

_SPREAD = 1e6  # the squares of longer rows leave float64 few digits for those of the others
SINGLE = 1e3
"""In float32, the longest row may be this many times as long as the median row."""

SMALL = 1e-12
"""The least row factor. Rows of smaller factors are projected onto the flat but do not change it."""

_ROUNDED = 1e-5  # the least row factor for float32

_NOTHING = 1e-6  # of the mean size of an entry


@dataclass(frozen=True)
class EntrywiseFit:
    """``coordinates`` (n, r), orthonormal ``basis`` (r, d), directions of most energy first; ``objective``: the sum
    of the SVD, of a better start if there is one, and after every iteration that lowered it; ``solver``: "admm",
    "irls", or "svd" (p = 2). ``converged``: False if the iteration limit cut it off."""

    coordinates: Tensor
    basis: Tensor
    objective: tuple[float, ...]
    converged: bool
    solver: str

    @property
    def error(self) -> float:
        """The objective reached."""
        return self.objective[-1]


def entrywise_low_rank(
    matrix: Tensor | Rows,
    rank: int,
    *,
    p: float = 1.0,
    solver: Solver = "irls",
    weights: Tensor | None = None,
    tolerance: float = 2e-5,
    max_iterations: int = 300,
    progress: Progress | None = None,
) -> EntrywiseFit:
    """A local minimum of  sum_i w_i sum_j |A - U V|_ij^p  below the SVD.

    Args:
        matrix: (n, d), a tensor or any ``Rows``; read in blocks.
        rank: 1..min(n, d).
        p: 0 < p <= 2. 1 already ignores outliers; below 1 the start matters more; 2 is the SVD, without iterations.
        solver: "irls" for any p. "admm" for 1 <= p < 2: on trained tables its sum is as low or lower, in a fraction of
            the time; where entries are grossly wrong it ends a few per cent farther from the truth. With row weights
            choose "irls": on matrices wider than long, or where a few rows have nearly all the weight, the sum of
            ADMM was up to 45 % higher although it had converged. Below 1 the step of ADMM is not convex.
        weights: (n,) w_i >= 0. A row of weight 0 does not change the fit and gets its projection. With "irls" the same
            holds for rows of w^(1/p) below 1e-12 of the largest, but the last sum includes them.
        tolerance: stop when iterations lower the sum by less than this share each, over the last ten.
        max_iterations: limit of iterations.

    An iteration of ADMM costs 2 n d (d + 2 r) operations and an eigenproblem of the smaller side; one of IRLS costs
    about 40 n d r. Both are matrix products. Memory beside the source: a table n x d of its type, for ADMM two (where
    n < d one more), and four of n x r. Choose it where single entries may be wrong, or where absolute errors count;
    where whole rows are wrong, ``robust_subspace``. Limit: outliers must be few in each row and column.

    Raises:
        KflatsError: p outside (0, 2], ADMM for p < 1, NaN or infinity, a rank outside 1..min(n, d), unusable weights,
            or a row so long that the others are only rounding beside it.

    >>> a = torch.outer(torch.arange(1.0, 9.0), torch.ones(6))
    >>> a[3, 2] = 30.0                                                        # one wrong entry
    >>> fit = entrywise_low_rank(a, 1)
    >>> (fit.coordinates @ fit.basis)[3].round(decimals=1).tolist()
    [4.0, 4.0, 4.0, 4.0, 4.0, 4.0]
    """
    rows = as_rows(matrix)
    n, d = rows.shape
    chosen = _checked_solver(p, solver)
    check_rank(rank, min(n, d))
    check_steps(tolerance, max_iterations)
    check_finite(rows)
    check_weights(weights, n)
    scaled = _scaled(rows, weights, p, 0.5 if chosen == "admm" else 1 / p)
    if scaled is None:
        basis = torch.eye(rank, d, dtype=rows.dtype, device=rows.device)
        return EntrywiseFit(project(rows, basis), basis, (0.0,), True, chosen)
    inside, sizes = scaled.rows, scaled.sizes
    begun = _begun(inside, rank, p, sizes)
    stop = Stopping(tolerance, max_iterations, progress)
    if chosen == "svd":
        found = replace(begun, converged=True)
    elif chosen == "admm":
        found = admm(inside, begun, p, stop, entries=scaled.entries, sizes=sizes)
    else:
        found = irls(inside, begun, p, stop, entries=scaled.entries)
    coordinates, basis = (found.basis.T, found.coordinates.T) if scaled.turned else (found.coordinates, found.basis)
    coordinates, basis = _ordered(coordinates, basis)
    coordinates, basis = (coordinates * scaled.back.unsqueeze(1)).to(rows.dtype), basis.to(rows.dtype)
    if weights is not None and bool((scaled.back == 0).any()):
        idle = (scaled.back == 0).nonzero().squeeze(1)
        coordinates[idle] = rows.take(idle) @ basis.T
    sums = begun.objective + tuple(value for value in found.objective if value < begun.objective[-1])
    objective = tuple(scaled.unit * value for value in sums)
    faint = weights is not None and bool((weights.to(rows.device)[scaled.back == 0] > 0).any())
    if scaled.widened or faint:  # a small p enlarges the rounding of the narrower type
        error = _stored(rows, coordinates, basis, p, weights)
        objective = (*(value for value in objective if value > error), error)
    return EntrywiseFit(coordinates, basis, objective, found.converged, chosen)


def _stored(rows: Rows, coordinates: Tensor, basis: Tensor, p: float, weights: Tensor | None) -> float:
    """The sum at the returned factors, in float64."""
    total = 0.0
    for here, block in slices(rows):
        rest = block.to(torch.float64) - coordinates[here].to(torch.float64) @ basis.to(torch.float64)
        sums = powers_(rest.abs_(), p).sum(1)
        total += float(sums.sum() if weights is None else (sums * weights[here].to(sums)).sum())
    return total


def _begun(rows: Rows, rank: int, p: float, sizes: Tensor | None) -> Factors:
    """The SVD, or the SVD of the rows with far entries held back if its sum is lower; ``objective``: both, falling."""

    def of(source: Rows) -> Factors:
        svd = truncated_svd(source, rank)
        pair = Factors(svd.coordinates, svd.basis)
        return replace(pair, objective=(pair.error(rows, p, sizes),))

    plain, inside = of(rows), HeldBackRows(rows)
    if p == 2 or inside.largest < _NOTHING:
        return plain
    held = of(inside)
    lower = held.objective < plain.objective
    return replace(held, objective=plain.objective + held.objective) if lower else plain


@dataclass(frozen=True)
class _Scaled:
    """diag(w^e) A / s, whose entries have a mean size of about 1.

    ``back`` (n,): factors that bring coordinates back to the given rows (0 for idle rows). ``unit``: the factor for
    objectives. ``entries``: how many count. ``turned``: the transpose is fitted, because n < d. ``widened``: the type
    is wider than the rows'. ``sizes``: c where e is not 1/p, so that the sum to minimise is sum c^(2-p) |.|^p.
    """

    rows: Rows
    back: Tensor
    unit: float
    entries: int
    turned: bool
    widened: bool
    sizes: Tensor | None


def _scaled(rows: Rows, weights: Tensor | None, p: float, power: float) -> _Scaled | None:
    n, d = rows.shape
    factor = torch.ones(n, dtype=torch.float64, device=rows.device)
    if weights is not None:
        factor = row_factors(weights.to(rows.device), power)
        factor = torch.where(factor > SMALL, factor, 0.0)  # smaller ones would be rounding beside the largest
    total, lengths2 = 0.0, []
    for here, block in slices(rows):
        total += float((block.abs().sum(1, dtype=torch.float64) * factor[here]).sum())
        lengths2.append(block.to(torch.float64).square().sum(1))
    spread = check_spread(torch.cat(lengths2), weights, _SPREAD)
    if total == 0:
        return None
    # A power of two, so that a matrix scaled by a power of two gives the same bits.
    entries = int((factor > 0).sum()) * d
    size = 2.0 ** round(math.log2(total / entries))
    unit = size**p * (1.0 if weights is None else float(weights.max()))
    back = torch.where(factor > 0, size / factor.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    wide = rows.dtype == torch.float64
    tiny = float(factor[factor > 0].min()) < _ROUNDED
    inside: Rows = ScaledRows(WidenedRows(rows) if tiny and not wide else rows, factor / size)
    if spread > SINGLE and inside.dtype != torch.float64:
        inside = WidenedRows(inside)
    sizes = None
    if weights is not None and power != 1 / p:
        sizes = factor.clamp_min(torch.finfo(inside.dtype).tiny).to(inside.dtype).unsqueeze(0 if n < d else 1)
    if n < d:
        inside = TensorRows(all_rows(inside).to(inside.dtype).T.contiguous())
    return _Scaled(inside, back, unit, entries, n < d, tiny and not wide, sizes)


def _ordered(coordinates: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The same product with an orthonormal basis and orthogonal columns of coordinates, the longest first."""
    q, t = torch.linalg.qr(basis.T.to(torch.float64))
    turn = t.T
    gram = turn.T @ (coordinates.T.to(torch.float64) @ coordinates.to(torch.float64)) @ turn
    vectors = torch.linalg.eigh((gram + gram.T) / 2).eigenvectors.flip(1)
    left = (turn @ vectors).to(coordinates.dtype)
    return coordinates @ left, (vectors.T @ q.T).to(basis.dtype).contiguous()


def _checked_solver(p: float, solver: str) -> str:
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 < p <= 2:
        raise KflatsError(
            f"an entrywise error with p={p!r} cannot be minimised here",
            cause="above 2 the largest errors decide alone, and at 0 and below there is no sum to minimise",
            hint="0 < p <= 2, for example p=1",
            command="a number above 0 and at most 2, such as --p 1",
        )
    if solver not in ("irls", "admm"):
        raise KflatsError(f"no solver is called {solver!r}", hint='"irls" or "admm"')
    if solver == "admm" and p < 1:
        raise KflatsError(
            f"ADMM is for 1 <= p < 2, not for p={p:g}",
            cause="below 1 the step of |x|^p is not convex, and its solution jumps",
            hint='solver="irls"',
            command="--p from 1 to 2",
        )
    if p == 2:
        return "svd"
    return solver
