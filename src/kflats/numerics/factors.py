"""A pair of factors during an iteration, and its entrywise error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.numerics.rows import Rows, slices

_SAMPLE = 4096  # rows
_LEAST = 1e-4  # of the mean error: where most entries are fitted exactly, the median is only rounding


@dataclass(frozen=True)
class Factors:
    """U = ``coordinates`` (n, r) and V = ``basis`` (r, d); ``objective``: the falling sums of the iterations so far."""

    coordinates: Tensor
    basis: Tensor
    objective: tuple[float, ...] = ()
    converged: bool = False

    def error(self, rows: Rows, p: float, sizes: Tensor | None = None) -> float:
        """sum_ij s_ij^(2-p) |A - U V|_ij^p, by blocks; ``sizes`` s (n, 1) or (1, d), by default 1."""
        total = torch.zeros((), dtype=torch.float64, device=rows.device)
        for here, block in slices(rows):
            rest = torch.addmm(block, self.coordinates[here], self.basis, alpha=-1).abs_()
            total += sized_(powers_(rest, p), p, sizes, here).sum(dtype=torch.float64)
        return float(total)

    def usual(self, rows: Rows, sizes: Tensor | None = None) -> float:
        """Twice the median |A - U V|_ij / s_ij that is not 0, of a sample of rows: a size of errors that a few gross
        errors do not change. For normal errors it exceeds the mean."""
        step = max(1, -(-rows.shape[0] // _SAMPLE))
        index = torch.arange(0, rows.shape[0], step, device=rows.device)
        rest = (rows.take(index) - self.coordinates[index] @ self.basis).abs()
        if sizes is not None:
            here = sizes[index] if len(sizes) > 1 else sizes
            rest = torch.where(here > 0, rest / here, 0.0)
        rest = rest[rest > 0]
        return 2 * float(rest.median()) if len(rest) else 0.0


def powers_(x: Tensor, p: float) -> Tensor:
    """x^p of x >= 0, in place; quarters by square roots, which take a fifth of the time.

    >>> powers_(torch.tensor([16.0]), 1.25).tolist(), powers_(torch.tensor([16.0]), 1.75).tolist()
    ([32.0], [128.0])
    """
    if p == 1:
        return x
    if p not in (1.25, 1.5, 1.75):
        return x.pow_(p)
    half = x.sqrt()
    if p == 1.5:
        return x.mul_(half)
    quarter = half.sqrt()
    return x.mul_(quarter) if p == 1.25 else x.mul_(half).mul_(quarter)


def sized_(powers: Tensor, p: float, sizes: Tensor | None, here: slice) -> Tensor:
    """Powers (m, d) of the rows ``here`` times s^(2-p), in place."""
    if sizes is None or p == 2:
        return powers
    part = sizes[here] if len(sizes) > 1 else sizes
    return powers.mul_(part if p == 1 else part.pow(2 - p))


def size_of_errors(rows: Rows, start: Factors, mean: float, sizes: Tensor | None = None) -> float:
    """The unit of thresholds and of smoothing: the ``mean`` error, or the usual one if gross errors dominate."""
    return min(mean, max(start.usual(rows, sizes), _LEAST * mean))


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
