"""Entrywise lp low rank, 1 <= p < 2, by the alternating direction method of multipliers.

    minimise  sum |E|_ij^p   over   A = L + E,  rank L = r

With a penalty on A - L - E, given by the threshold s of ``entrywise_prox``, and Y the multipliers in its units, an
iteration is (Boyd et al. 2011, sections 3.1.1 and 9.1; the rank is a constraint, so it finds a local minimum)

    L <- the best rank r of  A - E + Y,    T = A - L + Y,    Y <- pull(T, s),    E <- T - Y.

An iteration is one pass over blocks of rows. V comes from the Gram of M = A - E + Y of the pass before. Each block
computes its L = M V' V, its E and Y, and its part of the next Gram. For p = 1, Y is T clamped to +-s.

Rows with weights w are given as diag(w^1/2) A with ``sizes`` c = w^1/2: then sum c^(2-p) |E|^p is the weighted sum. The
threshold of a row is s c, so that its penalty is proportional to its weight, and the best rank r is that of the scaled
rows. With one threshold for all rows, rows of little weight take thousands of iterations to converge.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kflats.numerics.entrywise_prox import Pull
from kflats.numerics.factors import Factors, powers_, size_of_errors, sized_, stalled
from kflats.numerics.flats import Stopping
from kflats.numerics.gram import top_eigenvectors
from kflats.numerics.rows import Rows, slices

START, SHRINK, LEAST = 1.25, 1.005, 0.1
"""The threshold s in units of the start's ``size_of_errors``: its first value, its divisor in an iteration, its least
value. A threshold that falls faster ends at a higher sum; a slower one takes more iterations and gains little."""

SPLIT = 0.1
"""ADMM has converged only where |A - L - E| sums to less than this share of |A - L|."""


def admm(
    rows: Rows,
    start: Factors,
    p: float,
    stop: Stopping,
    *,
    entries: int | None = None,
    shrink: float = SHRINK,
    sizes: Tensor | None = None,
) -> Factors:
    """The L = U V of the least sum, 1 <= p < 2.

    The mean size of the ``entries`` of A that count, by default all, is about 1. ``sizes`` (n, 1), or (1, d) where the
    transpose is fitted: c above, by default 1.
    """
    n, d = rows.shape
    best, history = start, [start.error(rows, p, sizes)]
    unit = start.error(rows, 1.0) / (entries or n * d)
    if unit <= 8 * torch.finfo(rows.dtype).eps:  # only rounding: the rank is large enough for A
        return Factors(start.coordinates, start.basis, (history[0],), True)
    if sizes is not None:
        unit = start.error(rows, 1.0, sizes) / (float(sizes.square().sum(dtype=torch.float64)) * n * d / sizes.numel())
    unit = size_of_errors(rows, start, unit, sizes)
    apart = torch.empty(n, d, dtype=rows.dtype, device=rows.device)  # E
    held = torch.empty_like(apart)  # Y
    gram = torch.zeros(d, d, dtype=torch.float64, device=rows.device)
    size, pull = START * unit, Pull(p, rows.device)
    for here, block in slices(rows):
        rest = torch.addmm(block, start.coordinates[here], start.basis, alpha=-1)
        held[here] = pull(rest, _of(sizes, here, size))
        torch.sub(rest, held[here], out=apart[here])
        block = block - apart[here] + held[here]
        gram += block.T @ block
    spare = torch.empty_like(start.coordinates)
    seen = list(history)
    for iteration in range(stop.max_iterations):
        basis = top_eigenvectors(gram, len(start.basis))[1].to(rows.dtype)
        smaller = max(size / shrink, LEAST * unit)
        turn = (smaller / size) ** (2 - p)  # Y, in units of the new s
        gram.zero_()
        sums = torch.zeros(3, dtype=torch.float64, device=rows.device)
        for here, block in slices(rows):
            e, y = apart[here], held[here]
            torch.mm(torch.sub(block, e).add_(y), basis.T, out=spare[here])
            rest = torch.addmm(block, spare[here], basis, alpha=-1)
            now = pull(torch.add(rest, y, alpha=turn), _of(sizes, here, smaller))
            sums[1] += torch.sub(now, y, alpha=turn).abs_().sum(dtype=torch.float64)
            torch.add(rest, y, alpha=turn, out=e).sub_(now)
            y.copy_(now)
            block = torch.sub(block, e).add_(y)
            gram += block.T @ block
            sums[2] += rest.abs_().sum(dtype=torch.float64)
            sums[0] += sized_(powers_(rest, p), p, sizes, here).sum(dtype=torch.float64)
        size = smaller
        error, missed, sum_of_rest = sums.tolist()
        seen.append(error)
        stop.report("admm", iteration, error)
        if error < history[-1]:
            history.append(error)
            kept = best.coordinates if best is not start else torch.empty_like(spare)
            best, spare = Factors(spare, basis), kept
        if stalled(seen, stop.tolerance) and missed <= SPLIT * sum_of_rest:
            return Factors(best.coordinates, best.basis, tuple(history), True)
    return Factors(best.coordinates, best.basis, tuple(history), False)


def _of(sizes: Tensor | None, here: slice, size: float) -> float | Tensor:
    if sizes is None:
        return size
    return size * (sizes[here] if len(sizes) > 1 else sizes)
