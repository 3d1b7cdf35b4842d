"""A pair of factors on its way through an iteration, and the entrywise error it leaves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.numerics.rows import BLOCK, Rows


@dataclass(frozen=True)
class Factors:
    """U = ``coordinates`` (n, r) and V = ``basis`` (r, d); ``objective``: the falling sums on the way here."""

    coordinates: Tensor
    basis: Tensor
    objective: tuple[float, ...] = ()
    converged: bool = False

    def error(self, rows: Rows, p: float) -> float:
        """sum_ij |A - U V|_ij^p, by blocks."""
        total = torch.zeros((), dtype=torch.float64, device=rows.device)
        for first, block in rows.blocks(BLOCK):
            rest = torch.addmm(block, self.coordinates[first : first + len(block)], self.basis, alpha=-1).abs_()
            total += (rest if p == 1 else rest.pow_(p)).sum(dtype=torch.float64)
        return float(total)


def stalled(objective: list[float], tolerance: float, window: int = 10) -> bool:
    """Whether the best of ``objective`` fell by less than ``tolerance`` of itself an iteration, over the last
    ``window`` of them.

    >>> stalled([2.0, 1.0], 0.1, window=2), stalled([1.0, 1.0, 1.0], 0.1, window=2)
    (False, True)
    """
    if len(objective) <= window:
        return False
    best = min(objective)
    return min(objective[:-window]) - best <= window * tolerance * best
