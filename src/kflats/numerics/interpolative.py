"""A low-rank pair as some of its own columns, and what the others are made of.

    U V = M,   M[:, order] = C [I, T]:   C = r columns of M (n, r),   T (r, d - r)

The same matrix with r^2 numbers less. Columns are chosen by LU with partial pivoting, then exchanged as long
as one exchange enlarges the volume |det V_J| by more than a hundredth (maximal volume: Goreinov & Tyrtyshnikov
2001; a column interpolative decomposition, Cheng et al. 2005): then no entry of T exceeds 1.01, so rounding
C costs little.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROWTH = 1.01
"""Exchanges stop when no entry of T is larger."""


@dataclass(frozen=True)
class Interpolative:
    """``skeleton`` C (n, r), ``mixing`` T (r, d - r), ``order`` (d,) int64: the columns in C, then the others."""

    skeleton: Tensor
    mixing: Tensor
    order: Tensor


def interpolate(coordinates: Tensor, basis: Tensor) -> Interpolative:
    """``coordinates`` (n, r) @ ``basis`` (r, d) with 1 <= r <= d in interpolative form, exact to rounding.

    Costs r^2 d and a pass over (r, d) for each exchange, in float64. A basis of lower rank than r is possible. Limit:
    the entries of T are bounded, but its norm grows with sqrt(r (d - r)) at worst.

    >>> form = interpolate(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0, 4.0, 2.0]]))
    >>> form.skeleton.squeeze(1).tolist(), form.mixing.tolist(), form.order.tolist()
    ([4.0, 8.0], [[0.25, 0.5]], [1, 0, 2])
    """
    r, wide = len(basis), basis.detach().to(torch.float64)
    # An orthonormal row space has full rank even where the basis has not; the rest goes into the coordinates.
    q, t = torch.linalg.qr(wide.T)
    order = _enlarge(q, _pivots(q))
    mixing = torch.linalg.solve(q[order[:r]].T, q[order[r:]].T)
    skeleton = coordinates.detach().to(torch.float64) @ (t.T @ q[order[:r]].T)
    return Interpolative(skeleton.to(coordinates.dtype), mixing.to(basis.dtype), order)


def _pivots(tall: Tensor) -> Tensor:
    """All rows of ``tall`` (d, r) in the order in which LU with partial pivoting takes them, (d,)."""
    _, pivots = torch.linalg.lu_factor(tall)
    order = list(range(len(tall)))
    for row, other in enumerate((pivots - 1).tolist()):
        order[row], order[other] = order[other], order[row]
    return torch.tensor(order, device=tall.device)


def _enlarge(tall: Tensor, order: Tensor) -> Tensor:
    """Exchange a chosen and another row of ``tall`` while that multiplies the chosen ones' volume by ``GROWTH``."""
    d, r = tall.shape
    if r == d:
        return order
    mixing = torch.linalg.solve(tall[order[:r]].T, tall[order[r:]].T)
    order = order.clone()
    # Every exchange multiplies the volume by the growth at least, and no volume exceeds 1: this ends.
    for _ in range(64 * d):
        place = int(mixing.abs().argmax())
        inside, outside = divmod(place, d - r)
        pivot = float(mixing[inside, outside])
        if abs(pivot) <= GROWTH:
            break
        column, row = mixing[:, outside].clone(), mixing[inside].clone()
        column[inside] -= 1.0
        row[outside] += 1.0
        # With column j in place of i: T' = T - (T_j - e_i)(T_i + e_j)' / T_ij.
        mixing.addr_(column, row, alpha=-1.0 / pivot)
        order[[inside, r + outside]] = order[[r + outside, inside]]
    return order
