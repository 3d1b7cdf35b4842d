"""One flat under any loss: the fast median subspace and its relatives.

    minimise over flats S (dim r):   sum_i  w_i rho( dist(a_i, S) )

Every iteration measures the distances, weighs each row by w_i rho'(t_i) / (2 t_i) and takes the leading
eigenvectors of the weighted Gram (Lerman & Maunu, Fast, robust and non-convex subspace recovery, 2018, algorithm 1,
for rho = t^q). Both happen in one pass over blocks of rows. The sum never rises, because the weighted squares lie
above it and touch it where they were taken; where it ends depends on the start, as the problem is not convex.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.flats import Progress
from kflats.numerics.gram import cluster_grams, complement, top_eigenvectors
from kflats.numerics.loss import Loss, Power, Squared, Truncated, absolute, out_of_reach, stages
from kflats.numerics.rows import (
    BLOCK,
    MetricRows,
    Rows,
    TensorRows,
    as_rows,
    check_finite,
    check_rank,
    check_spread,
    check_weights,
)
from kflats.numerics.svd import project

_SPREAD = 1e8  # a row on the flat weighs 1 / (floor of its distance): beyond, float64 leaves nothing of the others
_SINGLE = 1e3  # the same for float32


@dataclass(frozen=True)
class SubspaceFit:
    """``coordinates`` (n, r), orthonormal ``basis`` (r, d), directions that hold most of the weighted rows first;
    ``objective``: the sum after each iteration under ``loss``, falling; ``loss`` has its threshold as a distance.
    ``converged``: False if the iteration limit cut it off."""

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
    loss: Loss | None = None,
    *,
    weights: Tensor | None = None,
    start: Tensor | None = None,
    tolerance: float = 1e-5,
    max_iterations: int = 100,
    progress: Progress | None = None,
) -> SubspaceFit:
    """The flat of dimension ``rank`` that minimises  sum_i w_i rho(dist(a_i, S)).

    Args:
        matrix: (n, d), a tensor or any ``Rows``; read in blocks.
        rank: dimension of the flat, 1..min(n, d).
        loss: rho, by default ``Power(1)``, the sum of distances. ``Squared()`` is the SVD, without iterations.
        weights: (n,) w_i >= 0; rows of weight 0 get their coordinates and judge nothing.
        start: (rank, d) orthonormal. By default the fit is made from two starts, the SVD of the rows and that of the
            rows brought to length 1 (far rows cannot turn it), and the lower one is kept.
        tolerance: stop when an iteration lowers the sum by less than this share of it.
        max_iterations: a start and a stage (see ``loss.stages``) are left there in any case.

    An iteration costs n d (d + r) multiplications and an eigenproblem of the smaller side; memory is a block of rows
    and a d x d Gram (where n < d, a copy of the matrix). Choose it when whole rows may be wrong; where single entries
    are, ``entrywise_low_rank``. Limit: with few rows a sum of distances may be least on a flat through the far rows
    themselves, as each of r directions can hold one; smaller powers and ``Truncated`` resist longer.

    Raises:
        KflatsError: NaN or infinity, a rank outside 1..min(n, d), unusable weights or start, a row so long that the
            others are rounding beside it, or a truncated loss whose threshold is below every row's distance.

    >>> a = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 0.0], [0.0, 6.0]])    # SVD: the last row wins
    >>> fit = robust_subspace(a, 1, Power(1))
    >>> fit.basis.abs().round(decimals=2).tolist(), round(fit.error, 3)
    ([[1.0, 0.0]], 6.0)
    """
    loss = Power(1.0) if loss is None else loss
    if not isinstance(loss, Loss):
        raise KflatsError(f"no loss of distances is {loss!r}", hint="Power(1), Huber(...), Truncated(...)")
    rows = as_rows(matrix)
    n, d = rows.shape
    check_rank(rank, min(n, d))
    if not 0 <= tolerance < 1 or max_iterations < 1:
        raise KflatsError("tolerance lies in [0, 1), max_iterations starts at 1")
    check_finite(rows)
    check_weights(weights, n)
    if start is not None:
        start = _checked_start(start, rank, d).to(rows.device, rows.dtype)
    inside, lift = _narrowed(rows)
    cloud = _cloud(inside, weights)
    if start is not None and lift is not None:
        start = torch.linalg.qr(lift @ start.T).Q.T
    if start is not None:
        start = start.to(cloud.rows.dtype)
    best = _fit(cloud, rank, loss, start, tolerance, max_iterations, progress)
    basis = (best.basis if lift is None else best.basis @ lift.to(best.basis.dtype)).to(rows.dtype)
    return SubspaceFit(project(rows, basis), basis, best.history, best.converged, best.loss)


@dataclass(frozen=True)
class _Cloud:
    rows: Rows
    norms2: Tensor
    weights: Tensor | None
    scale: float = 1.0
    """Weights are as given once multiplied by it."""


@dataclass(frozen=True)
class _Stage:
    """Where one stage from one start ended."""

    basis: Tensor
    history: tuple[float, ...]
    converged: bool
    loss: Loss


def _fit(
    cloud: _Cloud,
    rank: int,
    loss: Loss,
    start: Tensor | None,
    tolerance: float,
    limit: int,
    progress: Progress | None,
) -> _Stage:
    starts = _starts(cloud, rank) if start is None else [start]
    if isinstance(loss, Squared) or loss == Power(2.0):
        basis = _svd(cloud, rank, cloud.weights)
        return _Stage(basis, (_measured(cloud, basis, loss),), True, loss)
    *before, last = stages(loss)
    if not before:
        return min((_descend(cloud, v, last, tolerance, limit, progress) for v in starts), key=_reached)
    ends = starts
    for stage in before:
        fits = [_descend(cloud, v, stage, tolerance, limit, progress) for v in starts]
        starts = [min(fits, key=_reached).basis]
        ends = ends + [fit.basis for fit in fits]
    last = absolute(last, _distances2(cloud, starts[0]), cloud.norms2, cloud.weights)
    # A loss that ignores far rows may judge the starts otherwise than the stage before it did.
    nearest = min(ends, key=lambda v: _measured(cloud, v, last))
    return _descend(cloud, nearest, last, tolerance, limit, progress)


def _reached(stage: _Stage) -> float:
    return stage.history[-1]


def _descend(
    cloud: _Cloud, basis: Tensor, loss: Loss, tolerance: float, limit: int, progress: Progress | None
) -> _Stage:
    """Reweighting from ``basis`` until it no longer pays; what is returned is the lowest seen."""
    found, gram = _pass(cloud, basis, loss)
    if isinstance(loss, Truncated) and not bool(gram.any()) and bool((cloud.norms2 > 0).any()):
        raise out_of_reach(loss)
    history, best = [found], basis
    for iteration in range(limit):
        basis = top_eigenvectors(gram, len(basis))[1].to(basis.dtype)
        found, gram = _pass(cloud, basis, loss)
        if progress:
            progress(loss.name, iteration, found)
        fell = history[-1] - found
        if fell > 0:
            history.append(found)
            best = basis
        if fell <= tolerance * history[-1]:
            return _Stage(best, tuple(history), True, loss)
    return _Stage(best, tuple(history), False, loss)


def _pass(cloud: _Cloud, basis: Tensor, loss: Loss) -> tuple[float, Tensor]:
    """The objective at ``basis`` and the Gram of the rows weighted there, in one reading."""
    d = cloud.rows.shape[1]
    gram = torch.zeros(d, d, dtype=torch.float64, device=basis.device)
    total = torch.zeros((), dtype=torch.float64, device=basis.device)
    measure = _Distance(basis)
    for first, block in cloud.rows.blocks(BLOCK):
        here = slice(first, first + len(block))
        dist2 = measure(block)
        cost, weight = loss.rho(dist2), loss.weight(dist2, cloud.norms2[here], measure.floor)
        if cloud.weights is not None:
            cost, weight = cost * cloud.weights[here], weight * cloud.weights[here]
        total += cost.sum(dtype=torch.float64)
        block = block * weight.sqrt().unsqueeze(1)
        gram += block.T @ block
    return cloud.scale * float(total), gram


class _Distance:
    """Squared distances of a block to a flat, by its residuals: exact near the flat, where ||a||^2 - ||Va||^2 is not.

    ``floor`` is then far below the one that distances by differences need."""

    def __init__(self, basis: Tensor) -> None:
        self.through = complement(basis) if 2 * len(basis) > basis.shape[1] else None
        self.basis = basis
        self.floor = 1e-10 if basis.dtype == torch.float32 else 1e-16

    def __call__(self, block: Tensor) -> Tensor:
        if self.through is not None:
            return (block @ self.through.T).square().sum(1)
        return torch.addmm(block, block @ self.basis.T, self.basis, alpha=-1).square_().sum(1)


def _distances2(cloud: _Cloud, basis: Tensor) -> Tensor:
    measure = _Distance(basis)
    return torch.cat([measure(block) for _, block in cloud.rows.blocks(BLOCK)])


def _measured(cloud: _Cloud, basis: Tensor, loss: Loss) -> float:
    cost = loss.rho(_distances2(cloud, basis)).to(torch.float64)
    return cloud.scale * float(cost.sum() if cloud.weights is None else (cost * cloud.weights).sum())


def _starts(cloud: _Cloud, rank: int) -> list[Tensor]:
    """The SVD of the rows, and of the rows at length 1."""
    inverse = torch.where(cloud.norms2 > 0, 1 / cloud.norms2.clamp_min(torch.finfo(cloud.norms2.dtype).tiny), 0.0)
    masses = (cloud.weights, inverse if cloud.weights is None else inverse * cloud.weights)
    return [_svd(cloud, rank, mass) for mass in masses]


def _svd(cloud: _Cloud, rank: int, mass: Tensor | None) -> Tensor:
    one = torch.zeros(cloud.rows.shape[0], dtype=torch.uint8, device=cloud.rows.device)
    return top_eigenvectors(cluster_grams(cloud.rows, one, 1, mass)[0], rank)[1].to(cloud.rows.dtype)


def _cloud(rows: Rows, weights: Tensor | None) -> _Cloud:
    norms2 = torch.cat([block.to(torch.float64).square().sum(1) for _, block in rows.blocks(BLOCK)])
    spread = check_spread(norms2, weights, _SPREAD)
    if spread > _SINGLE and rows.dtype != torch.float64:
        rows = MetricRows(rows, torch.ones(rows.shape[1]), torch.float64)
    scale = 1.0
    if weights is not None:
        weights = weights.to(rows.device, torch.float64)
        scale = float(weights.max())
        weights = (weights / scale).to(rows.dtype)
    return _Cloud(rows, norms2.to(rows.dtype), weights, scale)


def _narrowed(rows: Rows) -> tuple[Rows, Tensor | None]:
    """Where n < d, the rows in an orthonormal basis (n, d) of all they span: all distances stay, d x d Grams do not."""
    n, d = rows.shape
    if n >= d:
        return rows, None
    whole = torch.cat([block for _, block in rows.blocks(n)]).to(torch.float64)
    q, t = torch.linalg.qr(whole.T)
    return TensorRows(t.T.contiguous().to(rows.dtype)), q.T.to(rows.dtype).contiguous()


def _checked_start(start: Tensor, rank: int, d: int) -> Tensor:
    if tuple(start.shape) != (rank, d):
        raise KflatsError(f"a start of shape {tuple(start.shape)} does not fit a flat of rank {rank} in {d} columns")
    found = start.detach().to(torch.float64)
    if not torch.allclose(found @ found.T, torch.eye(rank, dtype=torch.float64, device=found.device), atol=1e-3):
        raise KflatsError("the rows of a start must be orthonormal", hint="torch.linalg.qr(start.T).Q.T")
    return found
