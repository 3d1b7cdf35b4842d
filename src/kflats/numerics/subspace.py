"""One flat under any loss: the fast median subspace and its relatives.

    minimise over flats S (dim r):   sum_i  w_i rho( dist(a_i, S) )

Every iteration computes the distances t_i, weights each row by w_i rho'(t_i) / (2 t_i) and takes the leading
eigenvectors of the weighted Gram (Lerman & Maunu, Fast, robust and non-convex subspace recovery, 2018, algorithm 1,
for rho = t^q). One pass over blocks of rows does both. The sum never rises, because the weighted squares bound it and
equal it at the current flat. The problem is not convex, so the result depends on the start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.numerics.flats import Stopping, WeightedRows
from kflats.numerics.gram import LARGE, WideRows, complement, gram_of, top_eigenvectors
from kflats.numerics.loss import Loss, Power, check_loss
from kflats.numerics.rows import (
    Rows,
    TensorRows,
    WidenedRows,
    all_rows,
    check_rank,
    check_spread,
    check_steps,
    checked_rows,
    slices,
)
from kflats.numerics.svd import project

_SPREAD = 1e8  # longer rows leave nothing of the others in float64: a row on the flat weighs 1 / (its floored distance)
_DEFAULT = Stopping(1e-5)
_SINGLE = 1e3  # the same for float32


@dataclass(frozen=True)
class SubspaceFit:
    """``coordinates`` (n, r); orthonormal ``basis`` (r, d), the directions that hold most of the weighted rows first;
    ``objective``: the sum after each iteration under ``loss``, falling; ``loss``: its threshold is a distance;
    ``converged``: False if the iteration limit ended the fit."""

    coordinates: Tensor
    basis: Tensor
    objective: tuple[float, ...]
    converged: bool
    loss: Loss

    @property
    def error(self) -> float:
        """The objective reached."""
        return self.objective[-1]


def robust_subspace(
    matrix: Tensor | Rows,
    rank: int,
    loss: Loss = Power(1.0),
    *,
    weights: Tensor | None = None,
    stop: Stopping = _DEFAULT,
) -> SubspaceFit:
    """The flat of dimension ``rank`` that minimises  sum_i w_i rho(dist(a_i, S)).

    Args:
        matrix: (n, d), a tensor or any ``Rows``; read in blocks.
        rank: dimension of the flat, 1..min(n, d).
        loss: rho, by default ``Power(1)``, the sum of distances. ``Squared()`` is the SVD, without iterations.
        weights: (n,) w_i >= 0. A row of weight 0 gets its coordinates but does not change the flat.
        stop: of each start and each stage (see ``loss.stages``).

    The fit begins from two flats, the SVD of the rows and the SVD of the rows scaled to length 1, which far rows cannot
    turn. The lower sum is kept. An iteration costs n d (d + r) multiplications and an eigenproblem of the smaller side.
    Memory: a block of rows and a d x d Gram (where n < d, a copy of the matrix). Choose it when whole rows may be
    wrong; where single entries may be, ``entrywise_low_rank``. Limit: with few rows, the flat of least sum may go
    through the far rows themselves, since each of its r directions can hold one. Smaller powers and ``Truncated``
    resist longer.

    Raises:
        KflatsError: NaN or infinity, a rank outside 1..min(n, d), unusable weights, a row so long that the others are
            only rounding beside it, or a truncated loss whose threshold is below every row's distance.

    >>> a = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 0.0], [0.0, 6.0]])    # SVD: the last row wins
    >>> fit = robust_subspace(a, 1, Power(1))
    >>> fit.basis.abs().round(decimals=2).tolist(), round(fit.error, 3)
    ([[1.0, 0.0]], 6.0)
    """
    check_loss(loss)
    check_steps(stop.tolerance, stop.max_iterations)
    rows = checked_rows(matrix, weights)
    check_rank(rank, min(rows.shape))
    inside, lift = _narrowed(rows)
    cloud, scale = _weighted(inside, weights)
    best = _fit(cloud, rank, loss, stop)
    basis = (best.basis if lift is None else lift(best.basis)).to(rows.dtype)
    objective = tuple(scale * value for value in best.history)
    return SubspaceFit(project(rows, basis), basis, objective, best.converged, best.loss)


@dataclass(frozen=True)
class _Stage:
    """Where one stage from one start ended."""

    basis: Tensor
    history: tuple[float, ...]
    converged: bool
    loss: Loss


def _fit(cloud: WeightedRows, rank: int, loss: Loss, stop: Stopping) -> _Stage:
    if loss.is_squared:
        basis = _svd(cloud, rank, cloud.weights)
        return _Stage(basis, (_sum_of_losses(cloud, basis, loss),), True, loss)
    starts = _starts(cloud, rank)
    *before, last = loss.stages()
    if not before:
        return min((_descend(cloud, basis, last, stop) for basis in starts), key=_reached)
    ends = starts
    for stage in before:
        fits = [_descend(cloud, basis, stage, stop) for basis in starts]
        starts = [min(fits, key=_reached).basis]
        ends = ends + [fit.basis for fit in fits]
    last = last.absolute(_distances2(cloud, starts[0]), cloud.norms2, cloud.weights)
    # A loss that ignores far rows may order the flats otherwise than the stage before it did.
    nearest = min(ends, key=lambda basis: _sum_of_losses(cloud, basis, last))
    return _descend(cloud, nearest, last, stop)


def _reached(stage: _Stage) -> float:
    return stage.history[-1]


def _descend(cloud: WeightedRows, basis: Tensor, loss: Loss, stop: Stopping) -> _Stage:
    """Reweighting from ``basis`` until the sum falls by too little. Returns the lowest flat."""
    total, gram = _pass(cloud, basis, loss)
    loss.check_reach(gram.diagonal(), cloud.norms2)
    history, best = [total], basis
    for iteration in range(stop.max_iterations):
        basis = top_eigenvectors(gram, len(basis))[1].to(basis.dtype)
        total, gram = _pass(cloud, basis, loss)
        stop.report(loss.name, iteration, total)
        fell = history[-1] - total
        if fell > 0:
            history.append(total)
            best = basis
        if fell <= stop.tolerance * history[-1]:
            return _Stage(best, tuple(history), True, loss)
    return _Stage(best, tuple(history), False, loss)


def _pass(cloud: WeightedRows, basis: Tensor, loss: Loss) -> tuple[float, Tensor]:
    """The sum of losses at ``basis`` and the Gram of the rows weighted there, in one pass."""
    d = cloud.rows.shape[1]
    gram = torch.zeros(d, d, dtype=torch.float64, device=basis.device)
    total = torch.zeros((), dtype=torch.float64, device=basis.device)
    distance = _Distance(basis)
    for here, block in slices(cloud.rows):
        dist2 = distance(block)
        cost, weight = loss.rho(dist2), loss.weight(dist2, cloud.norms2[here], distance.floor)
        if cloud.weights is not None:
            cost, weight = cost * cloud.weights[here], weight * cloud.weights[here]
        total += cost.sum(dtype=torch.float64)
        block = block * weight.sqrt().unsqueeze(1)
        gram += block.T @ block
    return float(total), gram


class _Distance:
    """Squared distances of a block to a flat, by residuals, which are exact near the flat, unlike ||a||^2 - ||Va||^2.

    ``floor``, for weights, can therefore be far below ``loss.FLOOR``.
    """

    def __init__(self, basis: Tensor) -> None:
        self.through = complement(basis) if 2 * len(basis) > basis.shape[1] else None
        self.basis = basis
        self.floor = 1e-10 if basis.dtype == torch.float32 else 1e-16

    def __call__(self, block: Tensor) -> Tensor:
        if self.through is not None:
            return (block @ self.through.T).square().sum(1)
        return torch.addmm(block, block @ self.basis.T, self.basis, alpha=-1).square_().sum(1)


def _distances2(cloud: WeightedRows, basis: Tensor) -> Tensor:
    distance = _Distance(basis)
    return torch.cat([distance(block) for _, block in slices(cloud.rows)])


def _sum_of_losses(cloud: WeightedRows, basis: Tensor, loss: Loss) -> float:
    cost = loss.rho(_distances2(cloud, basis)).to(torch.float64)
    return float(cost.sum() if cloud.weights is None else (cost * cloud.weights).sum())


def _starts(cloud: WeightedRows, rank: int) -> list[Tensor]:
    """The SVD of the rows, and of the rows at length 1."""
    inverse = torch.where(cloud.norms2 > 0, 1 / cloud.norms2.clamp_min(torch.finfo(cloud.norms2.dtype).tiny), 0.0)
    weights = (cloud.weights, inverse if cloud.weights is None else inverse * cloud.weights)
    return [_svd(cloud, rank, one) for one in weights]


def _svd(cloud: WeightedRows, rank: int, weights: Tensor | None) -> Tensor:
    return top_eigenvectors(gram_of(cloud.rows, weights), rank)[1].to(cloud.rows.dtype)


def _weighted(rows: Rows, weights: Tensor | None) -> tuple[WeightedRows, float]:
    """The rows with weights divided by the largest, and the largest; in float64 where lengths differ much."""
    norms2 = torch.cat([block.to(torch.float64).square().sum(1) for _, block in slices(rows)])
    spread = check_spread(norms2, weights, _SPREAD)
    if spread > _SINGLE and rows.dtype != torch.float64:
        rows = WidenedRows(rows)
    scale = 1.0
    if weights is not None:
        weights = weights.to(rows.device, torch.float64)
        scale = float(weights.max())
        weights = (weights / scale).to(rows.dtype)
    return WeightedRows(rows, norms2.to(rows.dtype), weights), scale


def _narrowed(rows: Rows) -> tuple[Rows, Callable[[Tensor], Tensor] | None]:
    """Where n < d: the rows in an orthonormal basis (n, d) of their span, and what turns a basis (r, n) of a flat into
    one of columns. Distances stay, and Grams are n x n."""
    n, d = rows.shape
    if n >= d:
        return rows, None
    if n * d > LARGE:
        wide = WideRows.of(rows)
        return wide.inside, wide.lifted
    q, t = torch.linalg.qr(all_rows(rows).T)
    lift = q.T.to(rows.dtype).contiguous()
    return TensorRows(t.T.contiguous().to(rows.dtype)), lambda basis: basis @ lift.to(basis.dtype)
