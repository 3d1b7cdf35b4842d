"""Low rank under a weight for every element, by alternating weighted least squares.

    minimise over U (n, r), V (r, d):   sum_ij F_ij (A - U V)_ij^2

No closed form: the problem is not convex, and NP-hard already for rank 1 (Gillis & Glineur 2011). With V held,
every row of U is a least-squares problem of its own, and the other way round (Srebro & Jaakkola, ICML 2003,
section 2). Each step is held back a little by what it would change (proximal), so that elements of almost no
weight cannot drag a row far away, and is taken only where it lowers that row's share: the objective never rises.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.errors import KflatsError
from kflats.numerics.rows import GRAM_BLOCK, Rows, as_rows, check_finite

_BATCH = 2**22  # numbers in the largest temporary: memory of this size is kept and reused between batches
_LINES = 8


@dataclass(frozen=True)
class Elementwise:
    """``coordinates`` (n, r), orthonormal ``basis`` (r, d), the ``objective`` at the start and after every
    iteration, falling, and whether it ``converged`` before the iteration limit."""

    coordinates: Tensor
    basis: Tensor
    objective: tuple[float, ...]
    converged: bool

    @property
    def error(self) -> float:
        """The objective reached."""
        return self.objective[-1]


def weighted_low_rank(
    matrix: Tensor | Rows,
    elements: Tensor,
    coordinates: Tensor,
    basis: Tensor,
    *,
    tolerance: float = 1e-3,
    max_iterations: int = 20,
    proximal: float = 1e-4,
) -> Elementwise:
    """A local minimum near the factors given.

    Args:
        matrix: (n, d), held in memory in float64.
        elements: F (n, d) >= 0. Rows and columns of zeros keep the start's factors.
        coordinates, basis: the start, (n, r) and (r, d): ``truncated_svd`` with F's row and column sums.
        tolerance: stop when an iteration lowers the objective by less than this share.
        proximal: weight of the change of a row's coordinates, in units of its least-squares problem's mean eigenvalue.

    An iteration costs 2 n d r^2. Choose it where F is far from rank one; else the start is nearly as good.

    Raises:
        KflatsError: weights that are negative, not finite, all zero or of another shape.

    >>> a, f = torch.tensor([[1.0, 2.0], [2.0, 9.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    >>> found = weighted_low_rank(a, f, torch.ones(2, 1), torch.ones(1, 2), max_iterations=100, tolerance=0)
    >>> (found.coordinates @ found.basis).round(decimals=2).tolist()      # 9 does not count, 4 fits the others
    [[1.0, 2.0], [2.0, 4.0]]
    """
    rows = as_rows(matrix)
    n, d = rows.shape
    check_finite(rows)
    weights = check_elements(elements, n, d).to(rows.device)
    if coordinates.shape[0] != n or basis.shape[1] != d or coordinates.shape[1] != basis.shape[0]:
        raise KflatsError(f"a start of {tuple(coordinates.shape)} and {tuple(basis.shape)} does not fit {(n, d)}")
    scale = float(weights.max())
    weights = weights / scale
    a = torch.cat([block for _, block in rows.blocks(GRAM_BLOCK)]).to(torch.float64)
    u, v = _orthonormal(coordinates.to(torch.float64), basis.to(torch.float64))
    history = [_objective(a, weights, u, v)]
    best, converged = (u, v), False
    for _ in range(max_iterations):
        u = _improved(a, weights, u, v, proximal, rows.dtype)
        turned, held = _orthonormal(v.T, u.T)
        v = _improved(a.T, weights.T, turned, held, proximal, rows.dtype).T
        u, v = _orthonormal(held.T, v)
        found = _objective(a, weights, u, v)
        fell = history[-1] - found
        if fell > 0:
            best = u, v
            history.append(found)
        if fell <= tolerance * history[-1]:
            converged = True
            break
    u, v = best
    return Elementwise(u.to(rows.dtype), v.to(rows.dtype), tuple(scale * h for h in history), converged)


def prefix_errors(matrix: Tensor | Rows, elements: Tensor, coordinates: Tensor, basis: Tensor) -> Tensor:
    """(r + 1,) sum_ij F_ij (A - U_q V_q)_ij^2 for the first q = 0..r columns of U and rows of V, by blocks.

    >>> prefix_errors(torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.eye(2), torch.eye(2)).tolist()
    [4.0, 3.0, 0.0]
    """
    rows = as_rows(matrix)
    weights = check_elements(elements, *rows.shape).to(rows.device)
    found = torch.zeros(len(basis) + 1, dtype=torch.float64, device=rows.device)
    for start, block in rows.blocks(64):  # short: a block stays in cache while all ranks pass over it
        here = slice(start, start + len(block))
        rest, f = block.to(torch.float64), weights[here]
        found[0] += (f * rest.square()).sum()
        for q, direction in enumerate(basis.to(torch.float64), start=1):
            rest = torch.addr(rest, coordinates[here, q - 1].to(torch.float64), direction, alpha=-1)
            found[q] += (f * rest.square()).sum()
    return found


def check_elements(elements: Tensor, n: int, d: int) -> Tensor:
    """Element weights (n, d) in float64: finite, none negative, not all zero.

    Raises:
        KflatsError: otherwise.
    """
    if tuple(elements.shape) != (n, d):
        raise KflatsError(f"expected a weight for each of {n} x {d} elements, found shape {tuple(elements.shape)}")
    found = elements.detach().to(torch.float64)
    if not bool(torch.isfinite(found).all()) or bool((found < 0).any()):
        raise KflatsError("element weights must be finite and not negative", cause="an importance measure went wrong")
    if not bool(found.any()):
        raise KflatsError("all element weights are zero", cause="the data never touched this matrix", hint="more data")
    return found


def _improved(a: Tensor, weights: Tensor, u: Tensor, v: Tensor, proximal: float, dtype: torch.dtype) -> Tensor:
    """``u`` with every row moved to its weighted least squares under orthonormal ``v``, where that is lower.

    Normal equations are formed in ``dtype``, their right side and what is gained in float64.
    """
    rank = len(v)
    out = u.clone()
    table = v.to(dtype)
    for start in range(0, len(a), max(1, _BATCH // (rank * rank))):
        here = slice(start, start + max(1, _BATCH // (rank * rank)))
        f = weights[here]
        f = f / f.amax(1, keepdim=True).clamp_min(torch.finfo(f.dtype).tiny)  # rows are apart: so are their scales
        rest = a[here] - u[here] @ v
        step = _solved(_normal(f.to(dtype), table), ((f * rest) @ v.T).to(dtype), proximal).to(torch.float64)
        better = (f * (rest - step @ v).square()).sum(1) < (f * rest.square()).sum(1)
        out[here] += torch.where(better.unsqueeze(1), step, 0.0)
    return out


def _normal(weights: Tensor, v: Tensor) -> Tensor:
    """(c, r, r) matrices sum_j f_ij v_j v_j' for the rows f_i (c, d) of ``weights``, v_j the columns of ``v`` (r, d).

    Products of lines of v, eight lines against those that follow, turn all of them into a few large
    multiplications of half the work.
    """
    rank, d = v.shape
    found = torch.empty(len(weights), rank, rank, dtype=v.dtype, device=v.device)
    for first in range(0, rank, _LINES):
        lines = v[first : first + _LINES]
        pairs = (lines.unsqueeze(1) * v[first:]).reshape(-1, d)
        part = (weights @ pairs.T).view(len(weights), len(lines), -1)
        found[:, first : first + _LINES, first:] = part
        found[:, first:, first : first + _LINES] = part.transpose(1, 2)
    return found


def _solved(grams: Tensor, target: Tensor, proximal: float) -> Tensor:
    """(H + lambda I)^-1 g for a batch, lambda in units of each H's mean eigenvalue; ``grams`` are overwritten."""
    diagonal = grams.diagonal(dim1=1, dim2=2)
    mean = diagonal.mean(1, keepdim=True)
    mean = torch.where(mean > 0, mean, torch.ones_like(mean))  # no weight at all: g is 0, and so is the answer
    while True:
        diagonal.add_(proximal * mean)
        factor, failed = torch.linalg.cholesky_ex(grams)
        if not bool(failed.any()):
            return torch.cholesky_solve(target.unsqueeze(2), factor).squeeze(2)
        proximal = max(10 * proximal, torch.finfo(grams.dtype).eps)  # held back more, until rounding is outweighed


def _orthonormal(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same product with the rows of ``v`` orthonormal: least squares are then as well posed as F lets them be."""
    q, t = torch.linalg.qr(v.T)
    return u @ t.T, q.T


def _objective(a: Tensor, weights: Tensor, u: Tensor, v: Tensor) -> float:
    return float((weights * (a - u @ v).square()).sum())
