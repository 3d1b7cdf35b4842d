"""One factor under the entrywise l1 error, the other one held: least absolute deviations for all rows at once.

    minimise over U (n, r):   sum_i w_i sum_j |A - U V|_ij      with V held, or over V (r, d) with U held

Convex, and every row (every column of V) is a problem of its own. All share their matrix, so the alternating
direction method (Boyd et al. 2011, section 6.1) solves a block of rows by two matrix products a step: with V
orthonormal, L = (A - E + Y) V' V, the rest as in ``entrywise_admm``. Its multipliers y, made orthogonal to V and
brought to |y| <= 1, prove that no factor reaches less than <a, y>: the fit ends on that proof.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.errors import KflatsError
from kflats.numerics.rows import BLOCK, Rows, ScaledRows, TensorRows, as_rows, check_finite, check_weights

_RANK = 1e-10
"""Directions of a factor whose energy is below this share of the largest are no directions: they stay 0."""

_CHECK = 10
"""Steps between two proofs: a proof costs as much as a step."""

_NUMBERS = 2**24
"""Numbers of a block of columns: columns are long, and few of them would make no matrix product."""


@dataclass(frozen=True)
class Refit:
    """``coordinates`` (n, r) and ``basis`` (r, d), one of them as given; ``error``: the sum they leave; ``bound``: what
    no choice of the other one goes below, proved; ``converged``: they meet within the tolerance."""

    coordinates: Tensor
    basis: Tensor
    error: float
    bound: float
    converged: bool


def refit_l1(
    matrix: Tensor | Rows,
    *,
    basis: Tensor | None = None,
    coordinates: Tensor | None = None,
    weights: Tensor | None = None,
    tolerance: float = 1e-3,
    max_iterations: int = 500,
) -> Refit:
    """The factor that is not given, so that  sum_i w_i sum_j |A - U V|_ij  is least.

    Args:
        matrix: (n, d), a tensor or any ``Rows``.
        basis: V (r, d), orthonormal or not, or
        coordinates: U (n, r); one of the two.
        weights: (n,) w_i >= 0. With V given they change nothing but the sums; rows of U where they are 0 are fitted
            all the same.
        tolerance: the error may exceed the least one by this share.
        max_iterations: steps for a block of rows, at most; ``converged`` says whether they sufficed.

    A step costs 4 n d r. With V given the matrix is read once, by blocks; with U given a transposed copy is held.
    Choose it to bring a basis found otherwise (an SVD, an ellipsoid) to coordinates that ignore wrong entries, or a
    damaged table back to a basis that is known.

    Raises:
        KflatsError: both factors or none, shapes that do not fit, NaN or infinity, unusable weights.

    >>> a, v = torch.tensor([[2.0, 2.0, 2.0, 90.0]]), torch.ones(1, 4)
    >>> refit_l1(a, basis=v).coordinates.round(decimals=2).tolist()
    [[2.0]]
    """
    rows = as_rows(matrix)
    n, d = rows.shape
    if (basis is None) == (coordinates is None):
        raise KflatsError("give the basis or the coordinates, one of the two")
    if not 0 < tolerance < 1 or max_iterations < 1:
        raise KflatsError("tolerance lies in (0, 1), max_iterations starts at 1")
    check_finite(rows)
    check_weights(weights, n)
    factors = None if weights is None else weights.to(rows.device, torch.float64)
    if basis is not None:
        held = _checked(basis, (None, d), "basis").to(rows.device)
        turned, lift = _orthonormal(held, rows.dtype)
        found = [_fit(block, turned, tolerance, max_iterations) for _, block in rows.blocks(BLOCK)]
        made = torch.cat([part.coordinates for part in found]) @ lift
        return _done(made, held.to(rows.dtype), found, factors, tolerance)
    assert coordinates is not None
    held = _checked(coordinates, (n, None), "coordinates").to(rows.device)
    weighed = held.to(torch.float64) if factors is None else held.to(torch.float64) * factors.unsqueeze(1)
    whole: Rows = rows if factors is None else ScaledRows(rows, factors)
    table = TensorRows(torch.cat([block for _, block in whole.blocks(BLOCK)]).T)
    turned, lift = _orthonormal(weighed.T, rows.dtype)
    size = max(1, _NUMBERS // n)
    found = [_fit(block, turned, tolerance, max_iterations) for _, block in table.blocks(size)]
    made = (torch.cat([part.coordinates for part in found]) @ lift).T.contiguous()
    return _done(held.to(rows.dtype), made, found, None, tolerance)


def _done(coordinates: Tensor, basis: Tensor, found: list[_Block], weights: Tensor | None, tolerance: float) -> Refit:
    sums = [torch.cat([getattr(part, name) for part in found]) for name in ("errors", "bounds", "rounding")]
    error, bound, rounding = (float(x.sum() if weights is None else (weights * x).sum()) for x in sums)
    return Refit(coordinates, basis, error, bound, error - bound <= tolerance * error + rounding)


@dataclass(frozen=True)
class _Block:
    """Coordinates (m, q) of the rows of a block, what they leave, what no others go below, and what is rounding."""

    coordinates: Tensor
    errors: Tensor
    bounds: Tensor
    rounding: Tensor


def _fit(block: Tensor, basis: Tensor, tolerance: float, limit: int) -> _Block:
    """The best of all steps, row by row, for an orthonormal basis; sums in float64."""
    coordinates = block @ basis.T
    rest = torch.addmm(block, coordinates, basis, alpha=-1)
    errors, bounds = _sums(rest), torch.zeros(len(block), dtype=torch.float64, device=block.device)
    size = (errors / block.shape[1]).clamp_min(torch.finfo(block.dtype).tiny).to(block.dtype).unsqueeze(1)
    part = rest
    rounding = 8 * torch.finfo(block.dtype).eps * _sums(block)
    for step in range(limit):
        held = part.clamp(-size, size)
        made = torch.sub(block, part).add_(held, alpha=2.0) @ basis.T
        rest = torch.addmm(block, made, basis, alpha=-1)
        part = rest + held
        found = _sums(rest)
        better = found < errors
        errors = torch.where(better, found, errors)
        coordinates = torch.where(better.unsqueeze(1), made, coordinates)
        if step % _CHECK == _CHECK - 1 or step + 1 == limit:
            bounds = torch.maximum(bounds, _proved(block, basis, part.clamp(-size, size) / size))
            if bool((errors - bounds <= tolerance * errors + rounding).all()):
                break
    return _Block(coordinates, errors, torch.minimum(bounds, errors), rounding)


def _proved(block: Tensor, basis: Tensor, multipliers: Tensor) -> Tensor:
    """A lower bound on min_u ||a - u V||_1 for every row: <a, y> for a y with y V' = 0 and |y| <= 1 (weak duality)."""
    y = multipliers.to(torch.float64)
    v = basis.to(torch.float64)
    y = y - (y @ v.T) @ v
    value = (block.to(torch.float64) * y).sum(1) / y.abs().amax(1).clamp_min(1.0)
    return value.clamp_min(0.0)


def _sums(rest: Tensor) -> Tensor:
    return rest.abs().sum(1, dtype=torch.float64)


def _orthonormal(factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Orthonormal rows (q, c) of what the rows of ``factor`` (r, c) span, and what brings their coordinates back to
    it, (q, r); r - q directions that are not there get 0."""
    f = factor.to(torch.float64)
    values, vectors = torch.linalg.eigh(f @ f.T)
    there = values > _RANK * values[-1].clamp_min(torch.finfo(torch.float64).tiny)
    lift = vectors[:, there] / values[there].sqrt()
    return (lift.T @ f).to(dtype), lift.T.to(dtype)


def _checked(factor: Tensor, shape: tuple[int | None, int | None], what: str) -> Tensor:
    fits = factor.ndim == 2 and all(want in (None, size) for want, size in zip(shape, factor.shape, strict=True))
    if not fits:
        raise KflatsError(f"{what} of shape {tuple(factor.shape)} do not fit the matrix")
    if not bool(torch.isfinite(factor).all()):
        raise KflatsError(f"the {what} have NaN or infinite values")
    return factor.detach()
