"""Low rank through the ellipsoid of ||Ax||_p: Tukan, Maalouf, Weksler & Feldman, Sensors 2021, algorithm 1.

    ||D V'x||_2^p  <=  ||Ax||_p^p  <=  bound * ||D V'x||_2^p        for every x                   (definition 1)
    A = U D V',   A_k = U D_k V',   stored as (U D_k^1/2) (D_k^1/2 V')

For a matrix of rank r < d, D has r axes and V' r rows: both sides vanish on the same x. The error is bounded on both
sides, in the entrywise p-th power:

    sum_j |(D - D_k) V' e_j|^p  <=  ||A - A_k||_p,p^p  <=  bound * sum_j |(D - D_k) V' e_j|^p

which theorem 5 relaxes to d sigma_k+1^p. Note that U D_k V' = A V_k V_k': an orthogonal projection of the rows.

The ellipsoid is that of lp Lewis weights, for any p > 0, in a few weighted Grams (``Lewis``):

    w_i = (a_i' Q^-1 a_i)^(p/2),     Q = V D^2 V' = sum_i w_i^(1 - 2/p) a_i a_i',     sum w = r = rank A

D. R. Lewis 1978; the fixed point of Cohen & Peng, STOC 2015. Proof of the definition for *any* positive w, with
rho = max_i (a_i'Q^-1 a_i)^(p/2) / w_i and S = sum w:

    (1)  |a_i'x|  <=  (rho w_i)^(1/p) ||x||_Q                                                 (Cauchy-Schwarz)
    (2)  p <= 2:  ||x||_Q^2 = sum |a_i'x|^p (w_i^(-1/p) |a_i'x|)^(2-p)  <=  ||Ax||_p^p rho^((2-p)/p) ||x||_Q^(2-p)
         and      ||Ax||_p^p = sum w_i (w_i^(-2/p) (a_i'x)^2)^(p/2)  <=  S^(1-p/2) ||x||_Q^p           (Jensen)
    (3)  p >= 2:  both the other way round.

The distortion is therefore at most S^|1-p/2| rho^(|2-p|/p): the *certificate*, computed in every iteration. It is
r^|1-p/2| at the fixed point, where definition 1 asks for d^(p/2). p >= 1 is nowhere needed. This is not the Loewner
ellipsoid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.entrywise import sum_of_powers
from kflats.numerics.gram import lower_gram, narrow, row_lengths, row_space, too_different
from kflats.numerics.large_matrices import stripes, zero_matrix
from kflats.numerics.rows import (
    GRAM_BLOCK,
    Rows,
    ScaledRows,
    WidenedRows,
    check_power,
    check_rank,
    check_steps,
    checked_rows,
    row_factors,
    slices,
)
from kflats.numerics.svd import project

_SMALL = 1e-12  # the least row factor for float32
_ROOTS = 1e-24, 1e24  # the range of roots of axes for float32
_LOST = 1e-3  # sum w^(1-2/p) a'Q^-1 a is r; a larger relative difference shows that rounding has lost the digits
_HUGE = 1e30  # the largest factor that brings a row to length 1 in float32
_PANEL = 1024  # columns of a wide matrix whose directions are made at a time: they are most of the memory


@dataclass(frozen=True)
class Ellipsoid:
    """``axes`` D (r,), descending and positive, and ``directions`` V' (r, d) with orthonormal rows, both float64.

    The axes are the reciprocals of the ellipsoid's semi-axes, in the units of ||Ax||_p. ``bound`` is the proved
    constant of the definition above, in p-th powers; ``bounds`` holds it for each iteration that was certified.
    ``weights`` (n,) float64, of ``Lewis``: how much row i matters to ||Ax||_p, with sum r and each at most about 1 when
    converged; use them to sample rows. Rows of zeros get weight 0, and duplicate rows share. At p = 2 these are the
    leverage scores, exactly: the weights are one step past those of the ellipsoid.
    """

    axes: Tensor
    directions: Tensor
    p: float
    bound: float
    iterations: int
    converged: bool
    bounds: tuple[float, ...] = field(default=(), repr=False)
    weights: Tensor | None = field(default=None, repr=False)

    @property
    def rank(self) -> int:
        """Axes, and so the rank of A as far as its numbers show it."""
        return len(self.axes)

    @property
    def factor(self) -> Tensor:
        """D V' (r, d)."""
        return self.axes.unsqueeze(1) * self.directions

    @property
    def whitening(self) -> Tensor:
        """V D^-1 (d, r): A times it is U of the ||.||_p-SVD A = U D V'."""
        return self.directions.T / self.axes

    def lifted(self, lift: Tensor | None) -> Ellipsoid:
        """The ellipsoid of a matrix whose row space ``gram.narrow`` turned by ``lift`` (r', d)."""
        if lift is None:
            return self
        turned = zero_matrix(self.rank, lift.shape[1], device=lift.device)
        for first in range(0, lift.shape[1], _PANEL):
            part = slice(first, first + _PANEL)
            turned[:, part] = self.directions @ lift[:, part].to(self.directions)
        return replace(self, directions=turned)


@runtime_checkable
class EllipsoidWay(Protocol):
    """An algorithm that finds the ellipsoid of a matrix: ``Lewis``, or a value of your own."""

    def fit(self, matrix: Tensor | Rows, p: float) -> Ellipsoid:
        """The certified ellipsoid of ||Ax||_p."""
        ...


@dataclass(frozen=True)
class Lewis:
    """The ellipsoid of lp Lewis weights, for any p > 0.

    Args:
        iterations: limit. Any number gives a certified ellipsoid; ``converged`` says whether the tolerance was met.
        tolerance: iterations stop when the certificate is within this share of its limit r^|1-p/2|.

    An iteration is one pass of 4 n d^2 operations. It converges like |1-p/2|^t for p <= 2 at worst, usually far faster;
    for p > 2 it is damped and converges like ((p-2)/(p+2))^t. float32 matrices are multiplied in float32 while that
    improves the certificate, then in float64.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> ellipsoid = Lewis().fit(a, 1.0)
    >>> round(ellipsoid.bound, 5), ellipsoid.converged
    (1.41421, True)
    >>> Lewis().fit(torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 5.0]]), 1.0).weights.round(decimals=4).tolist()
    [0.5, 0.5, 1.0]
    """

    iterations: int = 1000
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        check_steps(self.tolerance, self.iterations)

    def fit(self, matrix: Tensor | Rows, p: float) -> Ellipsoid:
        """The ellipsoid of ``matrix`` (n, d) at power p; directions in which it has no rank have no axis.

        Raises:
            KflatsError: an impossible p, values that are not finite, or rows of too different lengths.
        """
        rows = checked_rows(matrix)
        check_extreme(p, *rows.shape)
        rows, lift = narrow(rows)
        lengths = row_lengths(rows)
        if not bool(lengths.any()):
            return replace(no_axes(rows, p), weights=lengths).lifted(lift)
        return iterate(rows, p, self, _start(rows, p, lengths)).lifted(lift)


def check_extreme(p: float, n: int, d: int) -> None:
    """Refuse a power that has no norm, or one whose constants do not fit into double precision.

    Raises:
        KflatsError: p is not positive, is infinite, or is too extreme for an (n, d) matrix.
    """
    check_power(p)
    if 2 / p * math.log10(max(n, 2)) > 250 or p / 2 * math.log10(max(d, 2)) > 250:
        raise KflatsError(f"p={p:g} is too extreme for a {n} x {d} matrix", hint="choose p between 0.1 and 64")


def no_axes(rows: Rows, p: float) -> Ellipsoid:
    """The ellipsoid of a matrix of zeros: no axes, and 0 <= 0 <= 0."""
    none = torch.zeros(0, rows.shape[1], dtype=torch.float64, device=rows.device)
    return Ellipsoid(none[:, 0], none, float(p), 1.0, 0, True)


@dataclass(frozen=True)
class LewisState:
    """Weights by their logarithm (n,), -inf for rows of zeros; L (d, r) with L'QL = I; the rows' ``lengths`` (n,)."""

    log_weights: Tensor
    whitening: Tensor
    lengths: Tensor


def _start(rows: Rows, p: float, lengths: Tensor) -> LewisState:
    """w = |a|^p, right if rows point everywhere alike and p < 2; else w = 1, which is exact for n = r."""
    few = int((lengths > 0).sum()) <= rows.shape[1]
    log_w = (0.0 if few or p > 2 else p) * torch.log(torch.where(lengths > 0, lengths / lengths.max(), 1.0))
    log_w = torch.where(lengths > 0, log_w, -math.inf)
    factors = torch.where(log_w > -math.inf, ((0.5 - 1 / p) * log_w).exp(), 0.0)  # w^(1/2 - 1/p): of rows in Q
    whitening = row_space(rows, factors, lengths)
    shift = math.log(whitening.shape[1]) - float(torch.logsumexp(log_w, 0))
    return LewisState(log_w + shift, whitening * math.exp((1 / p - 0.5) * shift), lengths)


def iterate(rows: Rows, p: float, settings: Lewis, state: LewisState) -> Ellipsoid:
    """Fixed-point iterations from ``state`` until the certificate says so; the best certified ellipsoid of them."""
    r = state.whitening.shape[1]
    limit = abs(1 - p / 2) * math.log(r)
    least, converged, bounds = math.inf, False, []
    best, weights = state, state.log_weights
    dtype = rows.dtype
    damping = 1.0 if p <= 2 else 2 / (1 + p / 2)  # the best for every matrix
    for step in range(settings.iterations):
        last = step == settings.iterations - 1
        swept = sweep(rows, p, state, dtype, damping, last=last)
        if not swept.log_rho < least and dtype != torch.float64:
            dtype, swept = torch.float64, sweep(rows, p, state, torch.float64, damping, last=last)
        if not math.isfinite(swept.log_rho):
            raise too_different(state.lengths)
        excess = abs(2 - p) / p * swept.log_rho
        bounds.append(math.exp(limit + excess))
        if swept.log_rho < least:
            best, weights, least = state, swept.log_weights, swept.log_rho
        converged = excess <= math.log1p(settings.tolerance)
        if converged or last:
            break
        state = LewisState(swept.log_weights, state.whitening @ swept.turn, state.lengths)
    return replace(_certified(best, p, least, tuple(bounds), converged), weights=weights.exp())


@dataclass(frozen=True)
class Swept:
    """``log_rho`` of the state that went in, infinite where rounding dominates; the next ``log_weights``, and
    the ``turn`` (r, r) by which their whitening is the last one's."""

    log_rho: float
    log_weights: Tensor
    turn: Tensor


def sweep(
    rows: Rows, p: float, state: LewisState, dtype: torch.dtype, damping: float = 1.0, *, last: bool = False
) -> Swept:
    """One pass: certify ``state``, form the next weights w^(1-t) (tau^(p/2))^t, t = ``damping``, and their Gram.

    The Gram is formed in coordinates where the last one is the identity, so its rounding is relative to every
    direction's own scale, and of rows brought to unit length, so nothing overflows. ``last`` leaves it out.
    """
    alive = state.lengths > 0
    inverse = torch.where(alive, 1 / state.lengths, 0.0)
    if float(inverse.max()) > _HUGE:
        dtype = torch.float64
    largest = state.whitening.abs().max()
    whitening = (state.whitening / largest).to(dtype)
    gram = torch.zeros(whitening.shape[1], whitening.shape[1], dtype=torch.float64, device=rows.device)
    parts = []
    for part, block in slices(rows, GRAM_BLOCK):
        white = (block.to(dtype) * inverse[part].to(dtype).unsqueeze(1)) @ whitening
        sizes = torch.linalg.vector_norm(white, dim=1).to(torch.float64)
        log_tau = 2 * (sizes / inverse[part] * largest).log()
        new = (1 - damping) * state.log_weights[part] + damping * p / 2 * log_tau if damping < 1 else p / 2 * log_tau
        parts.append(torch.stack([log_tau, new]))
        if not last:
            norms = torch.where(alive[part], ((0.5 - 1 / p) * new + log_tau / 2).exp() / sizes, 0.0)
            white *= norms.to(dtype).unsqueeze(1)
            gram += lower_gram(white)
    log_tau, new = torch.cat(parts, dim=1).where(alive, -math.inf)
    shift = math.log(len(gram)) - float(torch.logsumexp(new, 0))
    turn = gram
    if not last:
        values, vectors = torch.linalg.eigh(gram)  # reads the lower half alone
        turn = vectors / values.sqrt() * math.exp((1 / p - 0.5) * shift)
    return Swept(_log_rho(state.log_weights, log_tau, p, len(gram)), new + shift, turn)


def _log_rho(log_weights: Tensor, log_tau: Tensor, p: float, r: int) -> float:
    """log max tau^(p/2) / w; infinite if sum w^(1-2/p) tau, r in exact arithmetic, shows that rounding dominates."""
    alive = log_tau > -math.inf
    trace = float(((1 - 2 / p) * log_weights[alive] + log_tau[alive]).exp().sum())
    if not abs(trace - r) <= _LOST * r:
        return math.inf
    return max(float((p / 2 * log_tau[alive] - log_weights[alive]).max()), 0.0)


def _certified(state: LewisState, p: float, log_rho: float, bounds: tuple[float, ...], converged: bool) -> Ellipsoid:
    """Q scaled so that the left inequality holds: rho^(-(2-p)/p^2) for p <= 2, S^(1/p - 1/2) for p > 2."""
    left, lengths, _ = torch.linalg.svd(state.whitening, full_matrices=False)
    r = len(lengths)
    log_scale = -(2 - p) / p**2 * log_rho if p <= 2 else (1 / p - 0.5) * math.log(r)
    bound = math.exp(abs(1 - p / 2) * math.log(r) + abs(2 - p) / p * log_rho)
    axes = math.exp(log_scale) / lengths.flip(0)
    return Ellipsoid(axes, left.flip(1).T.contiguous(), float(p), bound, len(bounds), converged, bounds)


@dataclass(frozen=True)
class RobustLowRank:
    """``coordinates`` U D_k^1/2 (n, k) and ``basis`` D_k^1/2 V' (k, d) with A ~ coordinates @ basis; ``axes`` (r,) all
    of D, descending; ``bound`` the ellipsoid's constant.

    ``error`` = sum_i w_i sum_j |A - A_k|_ij^p, between ``error_at_least`` and ``error_at_most``; ``total`` = its value
    at rank 0. Beyond the matrix's rank, columns of ``coordinates`` and rows of ``basis`` are zero.
    """

    coordinates: Tensor
    basis: Tensor
    axes: Tensor
    bound: float
    error: float
    total: float
    error_at_least: float
    error_at_most: float
    ellipsoid: Ellipsoid


def robust_svd(
    matrix: Tensor | Rows,
    rank: int,
    p: float = 1.0,
    *,
    ellipsoid: EllipsoidWay = Lewis(),
    weights: Tensor | None = None,
) -> RobustLowRank:
    """Algorithm 1: keep the ``rank`` longest axes of the ellipsoid of ||Ax||_p.

    Args:
        matrix: (n, d), a tensor or any ``Rows``.
        p: the power, > 0. At p = 2 this is the SVD.
        ellipsoid: the algorithm for the ellipsoid.
        weights: (n,) row weights w_i >= 0; the ellipsoid is that of sum_i w_i |a_i'x|^p, by rows scaled by w^(1/p).

    Choose it for matrices with outlying rows and p <= 1; on trained tables it lowers the l1 error by a per cent at
    most, and minimising that error directly lowers it by more. The paper's remark 8 decomposes A' instead. With
    n >= d = rank A' is wide, all its Lewis weights are 1, and the result is the SVD for every p.

    Raises:
        KflatsError: a rank outside 1..min(n, d), an impossible p, values or weights, or what the ellipsoid refuses.

    >>> a = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.6]])
    >>> robust_svd(a, 1, 1.0).basis[0].abs().argmax().item(), robust_svd(a, 1, 4.0).basis[0].abs().argmax().item()
    (0, 1)
    """
    rows = checked_rows(matrix, weights)
    n, d = rows.shape
    check_rank(rank, min(n, d))
    check_power(p)
    largest, scaled_rows = 1.0, rows
    if weights is not None:
        largest, factors = float(weights.max()), row_factors(weights.to(rows.device), 1 / p)
        if float(factors[factors > 0].min()) < _SMALL:  # float32 would lose these rows
            scaled_rows = WidenedRows(rows)
        scaled_rows = ScaledRows(scaled_rows, factors)
    shape = ellipsoid.fit(scaled_rows, p)
    kept = min(rank, shape.rank)
    roots, leading = shape.axes[:kept].sqrt(), shape.directions[:kept]
    if kept and rows.dtype == torch.float32 and not _ROOTS[0] < float(roots[-1]) <= float(roots[0]) < _ROOTS[1]:
        raise KflatsError(
            f"axes from {float(shape.axes[0]):.0e} to {float(shape.axes[kept - 1]):.0e} have roots that leave single "
            "precision no room",
            cause=f"p = {p:g} is too small for {n} rows, or the matrix has values of extreme size",
            hint="a p nearer to 2, or scale the matrix",
        )
    coordinates = torch.zeros(n, rank, dtype=rows.dtype, device=rows.device)
    basis = zero_matrix(rank, d, rows.dtype, rows.device)
    readers = zero_matrix(kept, d, rows.dtype, rows.device)
    for part in stripes(leading):
        basis[part] = roots[part].unsqueeze(1) * leading[part]
        readers[part] = leading[part] / roots[part].unsqueeze(1)
    coordinates[:, :kept] = project(rows, readers)
    del readers
    wide = WidenedRows(rows)
    error = sum_of_powers(wide, coordinates, basis, p, weights)
    total = sum_of_powers(wide, coordinates[:, :0], basis[:0], p, weights)
    left_out = shape.axes[kept:].unsqueeze(1)
    norms = [torch.linalg.vector_norm(left_out * part, dim=0) for part in shape.directions[kept:].split(_PANEL, 1)]
    least = largest * float(torch.cat(norms).pow(p).sum())
    axes = shape.axes * torch.tensor(largest, dtype=torch.float64).pow(1 / p)
    vanished = total == 0 and shape.rank > 0
    if vanished or not math.isfinite(error) or not bool(((axes > 0) & (axes < math.inf)).all()):
        raise KflatsError(
            f"sums of p-th powers leave double precision: p = {p:g}, and the largest row weight is {largest:.0e}",
            cause="extreme values or weights: axes go with weights to the power 1/p, errors with values to the power p",
            hint="divide the weights by their largest, scale the matrix to values near 1, or take a p nearer to 2",
        )
    scaled = replace(shape, axes=axes)
    return RobustLowRank(coordinates, basis, axes, shape.bound, error, total, least, shape.bound * least, scaled)
