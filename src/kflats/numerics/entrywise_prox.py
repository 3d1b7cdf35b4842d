"""The proximal step of |x|^p, 1 <= p < 2, for whole tables at the cost of some additions.

    E  =  argmin_x  s^(2-p) |x|^p / p  +  (x - t)^2 / 2         <=>         t = E + Y,    Y = s^(2-p) |E|^(p-1) sign E

For p = 1, Y is t clamped to +-s. For most other p there is no closed form. In units of s, however, Y / t = r(|t| / s)
is a falling function of one number, which ``Pull`` tabulates: the leading bits of a float32 are its index in the table,
and the other bits interpolate, to 1e-6 of Y. The problem is convex, so E and Y are continuous in t. Below p = 1 it is
not convex: the minimum jumps from 0, and the multipliers of exactly fitted entries do not converge.
"""

from __future__ import annotations

import torch
from torch import Tensor

_KEPT = 9
"""Bits of the mantissa in the index. Neighbouring nodes differ by 1/512, and lines between them err by its square."""

_DROPPED = 23 - _KEPT
_LEAST, _LARGEST = 2.0**-40, 2.0**24
"""The table's range. Outside it r is constant: these entries are next to 0, or larger than 1e7 thresholds."""


class Pull:
    """Y of t, with its sign and never larger: the multiplier of ADMM for a residual.

    >>> Pull(1.0)(torch.tensor([-3.0, 0.5]), 1.0).tolist()
    [-1.0, 0.5]
    >>> Pull(1.5)(torch.tensor([6.0]), 1.0).tolist()        # 4 + 4^.5
    [2.0]
    """

    def __init__(self, p: float, device: torch.device | None = None) -> None:
        self.p = p
        if p > 1:
            bits = torch.arange(_place(_LEAST), _place(_LARGEST) + 2, dtype=torch.int32)
            nodes = (bits << _DROPPED).view(torch.float32).to(torch.float64)
            share = _share(nodes, p)
            self._first = int(bits[0])
            self._slopes = (share.diff() / nodes.diff()).to(device, torch.float32)
            self._shares = share[:-1].to(device, torch.float32)

    def __call__(self, t: Tensor, size: float | Tensor) -> Tensor:
        if self.p == 1:
            return torch.minimum(torch.maximum(t, -size), size) if isinstance(size, Tensor) else t.clamp(-size, size)
        x = (t.abs() / size).to(torch.float32).clamp_(_LEAST, _LARGEST)
        bits = x.view(torch.int32) >> _DROPPED
        x.sub_((bits << _DROPPED).view(torch.float32))
        place = bits.sub_(self._first).flatten()
        share = self._shares.index_select(0, place).addcmul_(self._slopes.index_select(0, place), x.flatten())
        return share.view(t.shape).to(t.dtype).mul_(t)


def _place(x: float) -> int:
    return int(torch.tensor(x).view(torch.int32)) >> _DROPPED


def _share(x: Tensor, p: float) -> Tensor:
    """r(x) = u^(p-1) / x where u + u^(p-1) = x, float64: Newton's method for log u. Its function is convex
    with slopes from p-1 to 1, so after the first step log u only falls."""
    goal = x.log()
    z = goal
    for _ in range(100):
        above = torch.logaddexp(z, (p - 1) * z)
        inside = (z - above).exp()  # u's share of u + u^(p-1)
        step = (above - goal) / (inside + (p - 1) * (1 - inside))
        z = z - step
        if bool((step.abs() <= 1e-12 * z.abs().clamp_min(1.0)).all()):
            break
    return ((p - 1) * z - goal).exp()
