"""lp Lewis weights: the ellipsoid of ||Ax||_p for any p > 0, in a few weighted Grams.

    w_i = (a_i' Q^-1 a_i)^(p/2),     Q = sum_i w_i^(1 - 2/p) a_i a_i',     sum w = r = rank A

D. R. Lewis 1978; the fixed point of Cohen & Peng, STOC 2015. Proof of the definition in ``ellipsoid``, for *any*
positive w, with rho = max_i (a_i'Q^-1 a_i)^(p/2) / w_i and S = sum w:

    (1)  |a_i'x|  <=  (rho w_i)^(1/p) ||x||_Q                                                 (Cauchy-Schwarz)
    (2)  p <= 2:  ||x||_Q^2 = sum |a_i'x|^p (w_i^(-1/p) |a_i'x|)^(2-p)  <=  ||Ax||_p^p rho^((2-p)/p) ||x||_Q^(2-p)
         and      ||Ax||_p^p = sum w_i (w_i^(-2/p) (a_i'x)^2)^(p/2)  <=  S^(1-p/2) ||x||_Q^p           (Jensen)
    (3)  p >= 2:  both the other way round.

So the distortion is at most S^|1-p/2| rho^(|2-p|/p): the *certificate*, computed in every iteration and r^|1-p/2|
at the fixed point, where definition 1 asks for d^(p/2). p >= 1 is nowhere needed. This is not the Loewner ellipsoid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kflats.errors import KflatsError
from kflats.numerics.ellipsoid import Ellipsoid, check_power
from kflats.numerics.rows import GRAM_BLOCK, Rows, as_rows, check_finite
from kflats.numerics.whitening import narrow, row_lengths, row_space, too_different

Precision = Literal["mixed", "float64"]

_LOST = 1e-3  # sum w^(1-2/p) a'Q^-1 a is r; farther off than this part of it, rounding has eaten the digits


@dataclass(frozen=True)
class Lewis:
    """The ellipsoid of lp Lewis weights, for any p > 0: the default.

    Args:
        iterations: at most so many; the ellipsoid is certified after any number, ``converged`` says if it is the last.
        tolerance: stops when the certificate is within this part of its limit r^|1-p/2|.
        precision: "mixed" multiplies float32 matrices in float32 while that improves the certificate, then in float64;
            "float64" always does, in about twice the time.

    An iteration is one pass of 4 n d^2 operations. It converges like |1-p/2|^t for p <= 2 at worst, usually far faster;
    for p > 2 it is damped and converges like ((p-2)/(p+2))^t.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> found = Lewis().fit(a, 1.0)
    >>> round(found.bound, 5), found.converged
    (1.41421, True)
    """

    iterations: int = 1000
    tolerance: float = 1e-6
    precision: Precision = "mixed"

    def __post_init__(self) -> None:
        if self.iterations < 1 or not self.tolerance > 0 or self.precision not in ("mixed", "float64"):
            raise KflatsError(f"{self} makes no sense", hint="choose iterations >= 1 and tolerance > 0")

    def fit(self, matrix: Tensor | Rows, p: float) -> Ellipsoid:
        """The ellipsoid of ``matrix`` (n, d) at power p.

        Raises:
            KflatsError: an impossible p, values that are not finite, or rows of too different lengths.
        """
        return lewis_weights(matrix, p, self).ellipsoid


@dataclass(frozen=True)
class LewisWeights:
    """``weights`` (n,) float64 with sum r, each at most about 1 when converged: how much row i matters to ||Ax||_p."""

    weights: Tensor
    ellipsoid: Ellipsoid


def lewis_weights(matrix: Tensor | Rows, p: float, settings: Lewis | None = None) -> LewisWeights:
    """The weights and their ellipsoid: what ``Lewis.fit`` computes, for those who sample rows by it.

    Rows of zeros get weight 0, duplicate rows share, and directions in which A has no rank have no axis.
    At p = 2 these are the leverage scores, exactly: the weights are one step past those of the ellipsoid.

    >>> lewis_weights(torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 5.0]]), 1.0).weights.round(decimals=4).tolist()
    [0.5, 0.5, 1.0]
    """
    settings = settings or Lewis()
    rows = as_rows(matrix)
    check_power(p, *rows.shape)
    check_finite(rows)
    rows, lift = narrow(rows)
    lengths = row_lengths(rows)
    if not bool(lengths.any()):
        return LewisWeights(lengths, lifted(empty(rows, p), lift))
    found = iterate(rows, p, settings, start(rows, p, lengths))
    return LewisWeights(found.weights, lifted(found.ellipsoid, lift))


@dataclass(frozen=True)
class State:
    """Weights by their logarithm (n,), -inf for rows of zeros; L (d, r) with L'QL = I; the rows' ``lengths`` (n,)."""

    log_weights: Tensor
    whitening: Tensor
    lengths: Tensor


def start(rows: Rows, p: float, lengths: Tensor) -> State:
    """w = |a|^p, right if rows point everywhere alike; w = 1 where no more rows than columns are not zero, exact."""
    rank_at_most = int((lengths > 0).sum())
    log_w = torch.log(lengths / lengths.max())
    log_w = torch.where(lengths > 0, 0.0 if rank_at_most <= rows.shape[1] else p * log_w, -math.inf)
    whitening = row_space(rows, _factors(log_w, p), lengths)
    shift = math.log(whitening.shape[1]) - float(torch.logsumexp(log_w, 0))
    return State(log_w + shift, whitening * math.exp((1 / p - 0.5) * shift), lengths)


def iterate(rows: Rows, p: float, settings: Lewis, state: State) -> LewisWeights:
    """Fixed-point iterations from ``state`` until the certificate says so; the best certified ellipsoid of them."""
    r = state.whitening.shape[1]
    limit = abs(1 - p / 2) * math.log(r)
    best, after, least, converged, bounds = state, state, math.inf, False, []
    dtype = torch.float64 if settings.precision == "float64" else rows.dtype
    for _ in range(settings.iterations):
        swept = sweep(rows, p, state, dtype)
        if not swept.log_rho < least and dtype != torch.float64:
            dtype, swept = torch.float64, sweep(rows, p, state, torch.float64)
        if swept.next is None:
            raise too_different(state.lengths)
        excess = abs(2 - p) / p * swept.log_rho
        bounds.append(math.exp(limit + excess))
        if swept.log_rho < least:
            best, after, least = state, swept.next, swept.log_rho
        converged = excess <= math.log1p(settings.tolerance)
        if converged:
            break
        state = swept.next
    return LewisWeights(after.log_weights.exp(), _certified(best, p, least, tuple(bounds), converged))


@dataclass(frozen=True)
class Swept:
    """``log_rho`` of the state that went in, and the ``next`` one; infinite and None where rounding ate the digits."""

    log_rho: float
    next: State | None


def sweep(rows: Rows, p: float, state: State, dtype: torch.dtype) -> Swept:
    """One pass: certify ``state``, and form the next weights and their Gram in coordinates where the last is I.

    There the Gram is close to the identity, so rounding is relative to every direction's own scale; and rows are
    brought to unit length first, so nothing over- or underflows.
    """
    r = state.whitening.shape[1]
    whitening = state.whitening.to(dtype)
    alive = state.lengths > 0
    inverse = torch.where(alive, 1 / state.lengths, 0.0)
    gram = torch.zeros(r, r, dtype=torch.float64, device=rows.device)
    parts = []
    damping = 1.0 if p <= 2 else 2 / (1 + p / 2)
    for first, block in rows.blocks(GRAM_BLOCK):
        part = slice(first, first + len(block))
        white = (block.to(dtype) * inverse[part].to(dtype).unsqueeze(1)) @ whitening
        log_tau = 2 * (torch.linalg.vector_norm(white, dim=1).to(torch.float64).log() + state.lengths[part].log())
        old = state.log_weights[part]
        new = torch.where(alive[part], old + damping * (p / 2 * log_tau - old), -math.inf)
        white *= (_factors(new, p) * state.lengths[part]).to(dtype).unsqueeze(1)
        gram += white.T @ white
        parts.append(torch.stack([log_tau, new]))
    log_tau, new = torch.cat(parts, dim=1)
    old = state.log_weights
    trace = float(torch.where(alive, (1 - 2 / p) * old + log_tau, -math.inf).exp().sum())
    if not abs(trace - r) <= _LOST * r:
        return Swept(math.inf, None)
    log_rho = float(torch.where(alive, p / 2 * log_tau - old, -math.inf).max())
    shift = math.log(r) - float(torch.logsumexp(new, 0))
    values, vectors = torch.linalg.eigh(gram)
    if not float(values[0]) > 0:
        return Swept(math.inf, None)
    turn = vectors / values.sqrt() * math.exp((1 / p - 0.5) * shift)
    return Swept(max(log_rho, 0.0), State(new + shift, state.whitening @ turn, state.lengths))


def _factors(log_weights: Tensor, p: float) -> Tensor:
    """w^(1/2 - 1/p) (n,), 0 for rows of zeros: what rows are multiplied by in Q."""
    return torch.where(log_weights > -math.inf, ((0.5 - 1 / p) * log_weights).exp(), 0.0)


def _certified(state: State, p: float, log_rho: float, bounds: tuple[float, ...], converged: bool) -> Ellipsoid:
    """Q scaled so that the left inequality holds: rho^(-(2-p)/p^2) for p <= 2, S^(1/p - 1/2) for p > 2."""
    left, lengths, _ = torch.linalg.svd(state.whitening, full_matrices=False)
    r = len(lengths)
    log_scale = -(2 - p) / p**2 * log_rho if p <= 2 else (1 / p - 0.5) * math.log(r)
    bound = math.exp(abs(1 - p / 2) * math.log(r) + abs(2 - p) / p * log_rho)
    axes = math.exp(log_scale) / lengths.flip(0)
    return Ellipsoid(axes, left.flip(1).T.contiguous(), float(p), bound, len(bounds), converged, bounds)


def lifted(ellipsoid: Ellipsoid, basis: Tensor | None) -> Ellipsoid:
    """An ellipsoid of C as one of C K, for K with orthonormal rows."""
    if basis is None:
        return ellipsoid
    e = ellipsoid
    return Ellipsoid(e.axes, e.directions @ basis, e.p, e.bound, e.iterations, e.converged, e.bounds)


def empty(rows: Rows, p: float) -> Ellipsoid:
    """Of a matrix of zeros: no axes, and 0 <= 0 <= 0."""
    none = torch.zeros(0, rows.shape[1], dtype=torch.float64, device=rows.device)
    return Ellipsoid(none[:, 0], none, float(p), 1.0, 0, True)
