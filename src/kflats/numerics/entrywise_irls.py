"""Entrywise lp low rank by iteratively reweighted least squares.

    |x|^p  <=  (p/2) (z^2 + e^2)^(p/2 - 1) (x^2 - z^2) + (z^2 + e^2)^(p/2)       for every z, e and 0 < p <= 2

so with the weights f_ij = (R_ij^2 + e^2)^(p/2-1) of the current residuals R, a step that lowers sum f (A - U V)^2
lowers the smoothed sum of (R^2 + e^2)^(p/2) (Daubechies, DeVore, Fornasier & Gunturk 2010, section 2; here for two
factors in turn). Solving the least squares would take an r x r system for every row. Instead, a few steps of conjugate
gradients improve all rows at once; each step takes two matrix products. e falls from a third of the start's usual error
to .003 of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kflats.numerics.factors import Factors, size_of_errors, stalled
from kflats.numerics.flats import Stopping
from kflats.numerics.rows import BLOCK, Rows, slices

STEPS = 3
"""Conjugate gradients in a half step. In equal time six reach no lower sum, and one ends higher (measured)."""

START, SHRINK, LEAST = 0.3, 0.93, 0.003
"""The smoothing e in units of the start's ``size_of_errors``: its first value, its factor in every iteration, its least
value. If it falls faster the sum ends higher: 1 % with a factor of .8."""


def irls(
    rows: Rows,
    start: Factors,
    p: float,
    stop: Stopping,
    *,
    entries: int | None = None,
) -> Factors:
    """The U V of the least sum. The mean size of the ``entries`` of A that count, by default all, is about 1."""
    n, d = rows.shape
    unit = start.error(rows, 1.0) / (entries or n * d)
    best, history = start, [start.error(rows, p)]
    if unit <= 8 * torch.finfo(rows.dtype).eps:  # only rounding: the rank is large enough for A
        return Factors(start.coordinates, start.basis, (history[0],), True)
    unit = size_of_errors(rows, start, unit)
    table = torch.empty(n, d, dtype=rows.dtype, device=rows.device)
    u, v = _orthonormal(start.coordinates, start.basis)
    seen: list[float] = list(history)
    smooth = START * unit
    for iteration in range(stop.max_iterations):
        improve_coordinates_(rows, u, v, p, smooth)
        v, u = _orthonormal(v.T, u.T)
        v, u = v.T, u.T.contiguous()
        v = _improved_basis(rows, u, v, p, smooth, table)
        u, v = _orthonormal(u, v)
        error = Factors(u, v).error(rows, p)
        seen.append(error)
        stop.report("irls", iteration, error)
        if error < history[-1]:
            history.append(error)
            best = Factors(u.clone(), v)
        if smooth <= LEAST * unit and stalled(seen, stop.tolerance):
            return Factors(best.coordinates, best.basis, tuple(history), True)
        smooth = max(smooth * SHRINK, LEAST * unit)
    return Factors(best.coordinates, best.basis, tuple(history), False)


def improve_coordinates_(rows: Rows, u: Tensor, v: Tensor, p: float, smooth: float) -> None:
    """Half a step, block by block: with V (orthonormal) fixed, rows are independent."""
    squares = v.square().T.contiguous()
    for here, block in slices(rows):
        part = u[here]
        rest = torch.addmm(block, part, v, alpha=-1)
        f = _weights(rest, p, smooth)
        gradient, diagonal = (f * rest) @ v.T, f @ squares
        part += _conjugate(gradient, diagonal, partial(_image, f, v))


def _image(f: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Rows x_i (V diag(f_i) V')."""
    return (f * (x @ v)) @ v.T


def _improved_basis(rows: Rows, u: Tensor, v: Tensor, p: float, smooth: float, table: Tensor) -> Tensor:
    """The other half: with U (orthonormal) fixed, columns are independent, and their products are sums over blocks."""
    gradient = torch.zeros(v.shape[1], v.shape[0], dtype=torch.float64, device=v.device)
    diagonal = torch.zeros_like(gradient)
    for here, block in slices(rows):
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
    """The sum of a few preconditioned conjugate gradients for every row. Each step lowers each row's squares."""
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
