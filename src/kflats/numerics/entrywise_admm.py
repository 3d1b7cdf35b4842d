"""Entrywise lp low rank, 1 <= p < 2, by the alternating direction method of multipliers.

    minimise  sum |E|_ij^p   over   A = L + E,  rank L = r

With a penalty on what is violated, given as the threshold s of ``entrywise_prox``, and Y the multipliers in its units,
an iteration is (Boyd et al. 2011, sections 3.1.1 and 9.1; the rank is a constraint, so it finds a local minimum)

    L <- the best rank r of  A - E + Y,    T = A - L + Y,    Y <- pull(T, s),    E <- T - Y.

One pass over blocks of rows does an iteration: with V from the Gram of the M = A - E + Y gathered in the pass before,
each block makes its L = M V' V, its E and Y, and its part of the next Gram. For p = 1 Y is T held within +-s.

Rows with weights w come as diag(w^1/2) A with ``sizes`` c = w^1/2: then sum c^(2-p) |E|^p is the weighted sum, and the
threshold of a row is s c, a penalty of its own in proportion to its weight, with which the best rank r is that of the
rows as they come. One threshold for all rows takes thousands of iterations to move those of little weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kflats.numerics.entrywise_prox import Pull
from kflats.numerics.factors import Factors, powers_, size_of_errors, sized_, stalled
from kflats.numerics.flats import Progress
from kflats.numerics.gram import top_eigenvectors
from kflats.numerics.rows import BLOCK, Rows

START, SHRINK, LEAST = 1.25, 1.005, 0.1
"""The threshold s in units of the start's ``size_of_errors``: where it starts, what divides it every iteration, where
it stays. What falls faster ends higher; what falls more slowly takes more iterations, and gains little."""

SPLIT = 0.1
"""Converged only where L + E misses A by less than this share of the sum of |A - L|."""


def admm(
    rows: Rows,
    start: Factors,
    p: float,
    tolerance: float,
    limit: int,
    progress: Progress | None,
    *,
    entries: int | None = None,
    shrink: float = SHRINK,
    sizes: Tensor | None = None,
) -> Factors:
    """The lowest L = U V on the way, 1 <= p < 2; the ``entries`` of A that count, by default all,
    are about 1 in size. ``sizes`` (n, 1), or (1, d) of the transpose: c of the module's last lines, by default 1."""
    n, d = rows.shape
    best, history = start, [start.error(rows, p, sizes)]
    unit = start.error(rows, 1.0) / (entries or n * d)
    if unit <= 8 * torch.finfo(rows.dtype).eps:  # rounding: the rank is large enough to hold A
        return Factors(start.coordinates, start.basis, (history[0],), True)
    if sizes is not None:
        unit = start.error(rows, 1.0, sizes) / (float(sizes.square().sum(dtype=torch.float64)) * n * d / sizes.numel())
    unit = size_of_errors(rows, start, unit, sizes)
    apart = torch.empty(n, d, dtype=rows.dtype, device=rows.device)  # E
    held = torch.empty_like(apart)  # Y
    gram = torch.zeros(d, d, dtype=torch.float64, device=rows.device)
    size, pull = START * unit, Pull(p, rows.device)
    for first, block in rows.blocks(BLOCK):
        here = slice(first, first + len(block))
        rest = torch.addmm(block, start.coordinates[here], start.basis, alpha=-1)
        held[here] = pull(rest, _of(sizes, here, size))
        torch.sub(rest, held[here], out=apart[here])
        _add(gram, block - apart[here] + held[here])
    spare = torch.empty_like(start.coordinates)
    seen = list(history)
    for iteration in range(limit):
        basis = top_eigenvectors(gram, len(start.basis))[1].to(rows.dtype)
        smaller = max(size / shrink, LEAST * unit)
        turn = (smaller / size) ** (2 - p)  # Y, in units of the new s
        gram.zero_()
        found = torch.zeros(3, dtype=torch.float64, device=rows.device)
        for first, block in rows.blocks(BLOCK):
            here = slice(first, first + len(block))
            e, y = apart[here], held[here]
            torch.mm(torch.sub(block, e).add_(y), basis.T, out=spare[here])
            rest = torch.addmm(block, spare[here], basis, alpha=-1)
            now = pull(torch.add(rest, y, alpha=turn), _of(sizes, here, smaller))
            found[1] += torch.sub(now, y, alpha=turn).abs_().sum(dtype=torch.float64)
            torch.add(rest, y, alpha=turn, out=e).sub_(now)
            y.copy_(now)
            _add(gram, torch.sub(block, e).add_(y))
            found[2] += rest.abs_().sum(dtype=torch.float64)
            found[0] += sized_(powers_(rest, p), p, sizes, here).sum(dtype=torch.float64)
        size = smaller
        error, missed, sum_of_rest = found.tolist()
        seen.append(error)
        if progress:
            progress("admm", iteration, error)
        if error < history[-1]:
            history.append(error)
            kept = best.coordinates if best is not start else torch.empty_like(spare)
            best, spare = Factors(spare, basis), kept
        if stalled(seen, tolerance) and missed <= SPLIT * sum_of_rest:
            return Factors(best.coordinates, best.basis, tuple(history), True)
    return Factors(best.coordinates, best.basis, tuple(history), False)


def _of(sizes: Tensor | None, here: slice, size: float) -> float | Tensor:
    if sizes is None:
        return size
    return size * (sizes[here] if len(sizes) > 1 else sizes)


def _add(gram: Tensor, block: Tensor) -> None:
    gram += block.T @ block
