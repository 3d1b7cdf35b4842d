"""Entrywise l1 low rank by the alternating direction method of multipliers.

    minimise  sum |E|_ij   over   A = L + E,  rank L = r

With a penalty 1 / (2 s) on what is violated and Y the multipliers times s, an iteration is (Boyd et al. 2011,
sections 3.1.1 and 9.1; the rank is a constraint, so it finds a local minimum)

    L <- the best rank r of  A - E + Y,    T = A - L + Y,    Y <- clip(T, -s, s),    E <- T - Y.

E and Y are both functions of T, so T is all that is kept, and one pass over blocks of rows does an iteration: with
V from the Gram of the M = A - E + Y gathered in the pass before, each block makes its L = M V' V, its T and its part
of the next Gram.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kflats.numerics.factors import Factors, size_of_errors, stalled
from kflats.numerics.flats import Progress
from kflats.numerics.gram import top_eigenvectors
from kflats.numerics.rows import BLOCK, Rows

START, SHRINK, LEAST = 1.25, 1.02, 0.1
"""The threshold s in units of the start's ``size_of_errors``: where it starts, what divides it every iteration, where
it stays. Measured: falling this slowly ends .3 % lower than any fixed s does in as many iterations."""

SPLIT = 0.1
"""Converged only where L + E misses A by less than this share of the sum of |A - L|."""


def admm(
    rows: Rows,
    start: Factors,
    tolerance: float,
    limit: int,
    progress: Progress | None,
    *,
    entries: int | None = None,
) -> Factors:
    """The lowest L = U V on the way; the ``entries`` of A that count, by default all,
    are about 1 in size."""
    n, d = rows.shape
    best, history = start, [start.error(rows, 1.0)]
    unit = history[0] / (entries or n * d)
    if unit <= 8 * torch.finfo(rows.dtype).eps:  # rounding: the rank is large enough to hold A
        return Factors(start.coordinates, start.basis, (history[0],), True)
    unit = size_of_errors(rows, start, unit)
    table = torch.empty(n, d, dtype=rows.dtype, device=rows.device)
    gram = torch.zeros(d, d, dtype=torch.float64, device=rows.device)
    size = START * unit
    for first, block in rows.blocks(BLOCK):
        part = table[first : first + len(block)]
        torch.addmm(block, start.coordinates[first : first + len(block)], start.basis, alpha=-1, out=part)
        _add(gram, _target(block, part, size))
    spare = torch.empty_like(start.coordinates)
    seen = list(history)
    for iteration in range(limit):
        basis = top_eigenvectors(gram, len(start.basis))[1].to(rows.dtype)
        smaller = max(size / SHRINK, LEAST * unit)
        gram.zero_()
        found = torch.zeros(2, dtype=torch.float64, device=rows.device)
        for first, block in rows.blocks(BLOCK):
            here = slice(first, first + len(block))
            part = table[here]
            torch.mm(_target(block, part, size), basis.T, out=spare[here])
            rest = torch.addmm(block, spare[here], basis, alpha=-1)
            held = part.clamp(-size, size).mul_(smaller / size)  # Y, in units of the new s
            torch.add(rest, held, out=part)
            found[0] += rest.abs_().sum(dtype=torch.float64)
            found[1] += held.sub_(part.clamp(-smaller, smaller)).abs_().sum(dtype=torch.float64)
            _add(gram, _target(block, part, smaller))
        size = smaller
        error, missed = found.tolist()
        seen.append(error)
        if progress:
            progress("admm", iteration, error)
        if error < history[-1]:
            history.append(error)
            kept = best.coordinates if best is not start else torch.empty_like(spare)
            best, spare = Factors(spare, basis), kept
        if stalled(seen, tolerance) and missed <= SPLIT * error:
            return Factors(best.coordinates, best.basis, tuple(history), True)
    return Factors(best.coordinates, best.basis, tuple(history), False)


def _target(block: Tensor, part: Tensor, size: float) -> Tensor:
    """M = A - E + Y = A - T + 2 clip(T)."""
    return part.clamp(-size, size).mul_(2.0).sub_(part).add_(block)


def _add(gram: Tensor, block: Tensor) -> None:
    gram += block.T @ block
