"""Entrywise lp low rank by iteratively reweighted least squares.

    |x|^p  <=  (p/2) (z^2 + e^2)^(p/2 - 1) (x^2 - z^2) + (z^2 + e^2)^(p/2)       for every z, e and 0 < p <= 2

so with the weights f_ij = (R_ij^2 + e^2)^(p/2-1) of the residuals R reached, a step that lowers sum f (A - U V)^2
lowers the smoothed sum of (R^2 + e^2)^(p/2) (Daubechies, DeVore, Fornasier & Gunturk 2010, section 2; here for two
factors in turn). The least squares are not solved, which would take a system of r x r a row, but improved by a few
steps of conjugate gradients for all rows at once: two matrix products each. e falls from a third of the start's usual
error to .003 of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kflats.numerics.factors import Factors, size_of_errors, stalled
from kflats.numerics.flats import Progress
from kflats.numerics.rows import BLOCK, Rows

STEPS = 3
"""Conjugate gradients a half step: six end no lower in as much time, one does (measured)."""

START, SHRINK, LEAST = 0.3, 0.93, 0.003
"""The smoothing e in units of the start's ``size_of_errors``. Falling faster, it leaves entries where they happen to
be: .8 an iteration ends 1 % higher."""


def irls(
    rows: Rows,
    start: Factors,
    p: float,
    tolerance: float,
    limit: int,
    progress: Progress | None,
    *,
    entries: int | None = None,
) -> Factors:
    """The lowest U V on the way; the ``entries`` of A that count, by default all,
    are about 1 in size."""
    n, d = rows.shape
    unit = start.error(rows, 1.0) / (entries or n * d)
    best, history = start, [start.error(rows, p)]
    if unit <= 8 * torch.finfo(rows.dtype).eps:  # rounding: the rank is large enough to hold A
        return Factors(start.coordinates, start.basis, (history[0],), True)
    unit = size_of_errors(rows, start, unit)
    table = torch.empty(n, d, dtype=rows.dtype, device=rows.device)
    u, v = _orthonormal(start.coordinates, start.basis)
    seen: list[float] = list(history)
    smooth = START * unit
    for iteration in range(limit):
        improve_coordinates_(rows, u, v, p, smooth)
        v, u = _orthonormal(v.T, u.T)
        v, u = v.T, u.T.contiguous()
        v = _improved_basis(rows, u, v, p, smooth, table)
        u, v = _orthonormal(u, v)
        error = Factors(u, v).error(rows, p)
        seen.append(error)
        if progress:
            progress("irls", iteration, error)
        if error < history[-1]:
            history.append(error)
            best = Factors(u.clone(), v)
        least = smooth <= LEAST * unit
        if least and stalled(seen, tolerance):
            return Factors(best.coordinates, best.basis, tuple(history), True)
        smooth = max(smooth * SHRINK, LEAST * unit)
    return Factors(best.coordinates, best.basis, tuple(history), False)


def improve_coordinates_(rows: Rows, u: Tensor, v: Tensor, p: float, smooth: float) -> None:
    """Half a step, block by block: rows are apart once V (orthonormal) is held."""
    squares = v.square().T.contiguous()
    for first, block in rows.blocks(BLOCK):
        part = u[first : first + len(block)]
        rest = torch.addmm(block, part, v, alpha=-1)
        f = _weights(rest, p, smooth)
        gradient, diagonal = (f * rest) @ v.T, f @ squares
        part += _conjugate(gradient, diagonal, partial(_image, f, v))


def _image(f: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Rows x_i (V diag(f_i) V')."""
    return (f * (x @ v)) @ v.T


def _improved_basis(rows: Rows, u: Tensor, v: Tensor, p: float, smooth: float, table: Tensor) -> Tensor:
    """The other half: columns are apart once U (orthonormal) is held, and their products are sums over blocks."""
    gradient = torch.zeros(v.shape[1], v.shape[0], dtype=torch.float64, device=v.device)
    diagonal = torch.zeros_like(gradient)
    for first, block in rows.blocks(BLOCK):
        here = slice(first, first + len(block))
        rest = torch.addmm(block, u[here], v, alpha=-1)
        table[here] = f = _weights(rest, p, smooth)
        gradient += (f * rest).T @ u[here]
        diagonal += f.T @ u[here].square()

    def product(x: Tensor) -> Tensor:
        out = torch.zeros_like(gradient)
        turned = x.T.to(u.dtype)
        for first in range(0, len(u), BLOCK):
            here = slice(first, first + BLOCK)
            out += (table[here] * (u[here] @ turned)).T @ u[here]
        return out

    return v + _conjugate(gradient, diagonal, product).T.to(v.dtype)


def _weights(rest: Tensor, p: float, smooth: float) -> Tensor:
    """(R^2 + e^2)^(p/2-1), at most 1 by a common factor."""
    return rest.square().div_(smooth * smooth).add_(1.0).pow_(p / 2 - 1)


def _conjugate(gradient: Tensor, diagonal: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """What a few preconditioned conjugate gradients add to every row; each row's squares fall with each step."""
    tiny = torch.finfo(gradient.dtype).tiny
    inverse = torch.where(diagonal > 0, 1 / diagonal.clamp_min(tiny), 0.0)
    out = torch.zeros_like(gradient)
    toward = inverse * gradient
    along, power = toward, (gradient * toward).sum(1, keepdim=True)
    for step in range(STEPS):
        image = product(along)
        bend = (along * image).sum(1, keepdim=True)
        length = torch.where(bend > 0, power / bend.clamp_min(tiny), 0.0)
        out += length * along
        if step + 1 == STEPS:
            break
        gradient = gradient - length * image
        toward = inverse * gradient
        before, power = power, (gradient * toward).sum(1, keepdim=True)
        along = toward + torch.where(before > 0, power / before.clamp_min(tiny), 0.0) * along
    return out


def _orthonormal(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same product with the rows of ``v`` orthonormal."""
    q, t = torch.linalg.qr(v.T)
    return u @ t.T, q.T.contiguous()
