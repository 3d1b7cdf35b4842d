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

from kflats.common.errors import KflatsError
from kflats.numerics.ellipsoid import Ellipsoid, check_power, empty, lifted
from kflats.numerics.rows import GRAM_BLOCK, Rows, as_rows, check_finite, slices
from kflats.numerics.whitening import narrow, row_lengths, row_space, symmetric, too_different

Precision = Literal["mixed", "float64"]

_LOST = 1e-3  # sum w^(1-2/p) a'Q^-1 a is r; a larger relative difference shows that rounding has lost the digits
_HUGE = 1e30  # the largest factor that brings a row to length 1 in float32


@dataclass(frozen=True)
class Lewis:
    """The ellipsoid of lp Lewis weights, for any p > 0: the default.

    Args:
        iterations: limit. Any number gives a certified ellipsoid; ``converged`` says whether the tolerance was met.
        tolerance: iterations stop when the certificate is within this share of its limit r^|1-p/2|.
        precision: "mixed" multiplies float32 matrices in float32 while that improves the certificate, then in float64;
            "float64" always multiplies in float64, in about twice the time.

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
        whole = isinstance(self.iterations, int) and not isinstance(self.iterations, bool)
        positive = isinstance(self.tolerance, int | float) and 0 < self.tolerance < math.inf
        if not whole or self.iterations < 1 or not positive or self.precision not in ("mixed", "float64"):
            raise KflatsError(
                f"{self} is not possible", hint='iterations >= 1, tolerance > 0, and precision "mixed" or "float64"'
            )

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
    """The weights and their ellipsoid: as ``Lewis.fit`` computes them; use them to sample rows.

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
    fit = iterate(rows, p, settings, start(rows, p, lengths))
    return LewisWeights(fit.weights, lifted(fit.ellipsoid, lift))


@dataclass(frozen=True)
class State:
    """Weights by their logarithm (n,), -inf for rows of zeros; L (d, r) with L'QL = I; the rows' ``lengths`` (n,)."""

    log_weights: Tensor
    whitening: Tensor
    lengths: Tensor


def start(rows: Rows, p: float, lengths: Tensor) -> State:
    """w = |a|^p, right if rows point everywhere alike and p < 2; else w = 1, which is exact for n = r."""
    few = int((lengths > 0).sum()) <= rows.shape[1]
    log_w = (0.0 if few or p > 2 else p) * torch.log(torch.where(lengths > 0, lengths / lengths.max(), 1.0))
    log_w = torch.where(lengths > 0, log_w, -math.inf)
    whitening = row_space(rows, _factors(log_w, p), lengths)
    shift = math.log(whitening.shape[1]) - float(torch.logsumexp(log_w, 0))
    return State(log_w + shift, whitening * math.exp((1 / p - 0.5) * shift), lengths)


def iterate(rows: Rows, p: float, settings: Lewis, state: State) -> LewisWeights:
    """Fixed-point iterations from ``state`` until the certificate says so; the best certified ellipsoid of them."""
    r = state.whitening.shape[1]
    limit = abs(1 - p / 2) * math.log(r)
    least, converged, bounds = math.inf, False, []
    best, weights = state, state.log_weights
    dtype = torch.float64 if settings.precision == "float64" else rows.dtype
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
        state = State(swept.log_weights, state.whitening @ swept.turn, state.lengths)
    return LewisWeights(weights.exp(), _certified(best, p, least, tuple(bounds), converged))


@dataclass(frozen=True)
class Swept:
    """``log_rho`` of the state that went in, infinite where rounding dominates; the next ``log_weights``, and
    the ``turn`` (r, r) by which their whitening is the last one's."""

    log_rho: float
    log_weights: Tensor
    turn: Tensor


def sweep(rows: Rows, p: float, state: State, dtype: torch.dtype, damping: float = 1.0, *, last: bool = False) -> Swept:
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
            gram += symmetric(white)
    log_tau, new = torch.cat(parts, dim=1).where(alive, -math.inf)
    shift = math.log(len(gram)) - float(torch.logsumexp(new, 0))
    turn = gram if last else _inverse_root(gram) * math.exp((1 / p - 0.5) * shift)
    return Swept(_log_rho(state.log_weights, log_tau, p, len(gram)), new + shift, turn)


def _log_rho(log_weights: Tensor, log_tau: Tensor, p: float, r: int) -> float:
    """log max tau^(p/2) / w; infinite if sum w^(1-2/p) tau, r in exact arithmetic, shows that rounding dominates."""
    alive = log_tau > -math.inf
    trace = float(((1 - 2 / p) * log_weights[alive] + log_tau[alive]).exp().sum())
    if not abs(trace - r) <= _LOST * r:
        return math.inf
    return max(float((p / 2 * log_tau[alive] - log_weights[alive]).max()), 0.0)


def _inverse_root(gram: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(gram)
    root: Tensor = vectors / values.sqrt()
    return root


def _factors(log_weights: Tensor, p: float) -> Tensor:
    """w^(1/2 - 1/p) (n,), 0 for rows of zeros: the factors of rows in Q."""
    return torch.where(log_weights > -math.inf, ((0.5 - 1 / p) * log_weights).exp(), 0.0)


def _certified(state: State, p: float, log_rho: float, bounds: tuple[float, ...], converged: bool) -> Ellipsoid:
    """Q scaled so that the left inequality holds: rho^(-(2-p)/p^2) for p <= 2, S^(1/p - 1/2) for p > 2."""
    left, lengths, _ = torch.linalg.svd(state.whitening, full_matrices=False)
    r = len(lengths)
    log_scale = -(2 - p) / p**2 * log_rho if p <= 2 else (1 / p - 0.5) * math.log(r)
    bound = math.exp(abs(1 - p / 2) * math.log(r) + abs(2 - p) / p * log_rho)
    axes = math.exp(log_scale) / lengths.flip(0)
    return Ellipsoid(axes, left.flip(1).T.contiguous(), float(p), bound, len(bounds), converged, bounds)
