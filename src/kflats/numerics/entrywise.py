"""Low rank under the entrywise lp error, fitted directly by iteratively reweighted least squares.

    minimise over U (n, r), V (r, d):   sum_i w_i sum_j |A - U V|_ij^p          0 < p <= 2

A single wrong entry counts by its square in a squared error, and by its size at p = 1. The problem is not convex (and
NP-hard for p = 1: Gillis & Vavasis 2018). Each power lies below a parabola that touches it:

    |x|^p  <=  (p/2) (z^2 + e^2)^(p/2 - 1) (x^2 - z^2) + (z^2 + e^2)^(p/2)       for every z, e and 0 < p <= 2

The weights f_ij = (R_ij^2 + e^2)^(p/2-1) belong to the current residuals R. A step that lowers sum f (A - U V)^2 lowers
the smoothed sum of (R^2 + e^2)^(p/2) as well (Daubechies, DeVore, Fornasier & Gunturk 2010, section 2; here for two
factors in turn). Solving the least squares would take an r x r system for every row. Instead, a few steps of conjugate
gradients improve all rows at once; each step takes two matrix products. e falls from a third of the start's usual
error to .003 of it.

The fit begins from the SVD, or from the SVD of the matrix with its far entries held back (``HeldBackRows``) where its
sum is lower. It returns the factors of the lowest sum on its way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kflats.numerics.flats import Stopping
from kflats.numerics.rows import (
    BLOCK,
    MappedRows,
    Rows,
    ScaledRows,
    TensorRows,
    WidenedRows,
    all_rows,
    check_power,
    check_rank,
    check_spread,
    check_steps,
    checked_rows,
    row_factors,
    slices,
)
from kflats.numerics.svd import project, truncated_svd

STEPS = 3
"""Conjugate gradients in a half step. In equal time six reach no lower sum, and one ends higher (measured)."""

START, SHRINK, LEAST = 0.3, 0.93, 0.003
"""The smoothing e in units of the start's usual error: its first value, its factor in every iteration, its least
value. If it falls faster the sum ends higher: 1 % with a factor of .8."""

HELD = 3.0
"""The limit of ``HeldBackRows`` in medians. Of normal entries it holds back one in twenty: those beyond two standard
deviations."""

SAMPLE = 4096
"""Rows in the samples for medians."""

SINGLE = 1e3
"""In float32, the longest row may be this many times as long as the median row."""

SMALL = 1e-12
"""The least row factor. Rows of smaller factors are projected onto the flat but do not change it."""

_SPREAD = 1e6  # the squares of longer rows leave float64 few digits for those of the others
_ROUNDED = 1e-5  # the least row factor for float32
_NOTHING = 1e-6  # of the mean size of an entry
_LEAST_ERROR = 1e-4  # of the mean error: where most entries are fitted exactly, the median is only rounding
_WIDEST = 1e6  # a column's entries in medians of their rows: beyond, a row's median is rounding
_DEFAULT = Stopping(2e-5, 300)
_WINDOW = 10  # iterations over which the fall of the sum is judged


@dataclass(frozen=True)
class EntrywiseFit:
    """``coordinates`` U (n, r) and ``basis`` V (r, d), orthonormal in a result, with directions of most energy first;
    ``objective``: the sum of the SVD, of a better start if there is one, and after every iteration that lowered it.
    ``converged``: False if the iteration limit cut it off."""

    coordinates: Tensor
    basis: Tensor
    objective: tuple[float, ...] = ()
    converged: bool = False

    @property
    def error(self) -> float:
        """The objective reached."""
        return self.objective[-1]


def entrywise_low_rank(
    matrix: Tensor | Rows,
    rank: int,
    *,
    p: float = 1.0,
    weights: Tensor | None = None,
    stop: Stopping = _DEFAULT,
) -> EntrywiseFit:
    """A local minimum of  sum_i w_i sum_j |A - U V|_ij^p  below the SVD.

    Args:
        matrix: (n, d), a tensor or any ``Rows``; read in blocks.
        rank: 1..min(n, d).
        p: 0 < p <= 2. 1 already ignores outliers; below 1 the start matters more; 2 is the SVD, without iterations.
        weights: (n,) w_i >= 0. A row of weight 0 does not change the fit and gets its projection. The same holds for
            rows of w^(1/p) below 1e-12 of the largest, but the last sum includes them.
        stop: its tolerance is the share by which each iteration lowers the sum, over the last ten.

    An iteration costs about 40 n d r operations, in matrix products. Memory beside the source: a table n x d of its
    type (where n < d one more), and four of n x r. Choose it where single entries may be wrong, or where absolute
    errors count; where whole rows are wrong, ``robust_subspace``. Limit: outliers must be few in each row and column.

    Raises:
        KflatsError: p outside (0, 2], NaN or infinity, a rank outside 1..min(n, d), unusable weights, or a row so long
            that the others are only rounding beside it.

    >>> a = torch.outer(torch.arange(1.0, 9.0), torch.ones(6))
    >>> a[3, 2] = 30.0                                                        # one wrong entry
    >>> fit = entrywise_low_rank(a, 1)
    >>> (fit.coordinates @ fit.basis)[3].round(decimals=1).tolist()
    [4.0, 4.0, 4.0, 4.0, 4.0, 4.0]
    """
    check_power(p, 2.0)
    check_steps(stop.tolerance, stop.max_iterations)
    rows = checked_rows(matrix, weights)
    check_rank(rank, min(rows.shape))
    scaled = _scaled(rows, weights, p)
    if scaled is None:
        basis = torch.eye(rank, rows.shape[1], dtype=rows.dtype, device=rows.device)
        return EntrywiseFit(project(rows, basis), basis, (0.0,), True)
    start = _start(scaled.rows, rank, p)
    fit = replace(start, converged=True) if p == 2 else irls(scaled.rows, start, p, stop, entries=scaled.entries)
    pair = (fit.basis.T, fit.coordinates.T) if scaled.turned else (fit.coordinates, fit.basis)
    coordinates, basis = _ordered(*pair)
    coordinates, basis = (coordinates * scaled.back.unsqueeze(1)).to(rows.dtype), basis.to(rows.dtype)
    idle = (scaled.back == 0).nonzero().squeeze(1)
    if len(idle):
        coordinates[idle] = rows.take(idle) @ basis.T
    sums = start.objective + tuple(value for value in fit.objective if value < start.objective[-1])
    objective = tuple(scaled.unit * value for value in sums)
    faint = weights is not None and bool((weights.to(rows.device)[idle] > 0).any())
    if scaled.widened or faint:  # a small p enlarges the rounding of the narrower type
        error = sum_of_powers(WidenedRows(rows), coordinates, basis, p, weights)
        objective = (*(value for value in objective if value > error), error)
    return EntrywiseFit(coordinates, basis, objective, fit.converged)


def irls(rows: Rows, start: EntrywiseFit, p: float, stop: Stopping, *, entries: int | None = None) -> EntrywiseFit:
    """The U V of the least sum, from the factors of ``start``. The mean size of the ``entries`` of A that count, by
    default all, is about 1."""
    n, d = rows.shape
    mean = sum_of_powers(rows, start.coordinates, start.basis, 1.0) / (entries or n * d)
    best, history = start, [sum_of_powers(rows, start.coordinates, start.basis, p)]
    if mean <= 8 * torch.finfo(rows.dtype).eps:  # only rounding: the rank is large enough for A
        return replace(start, objective=(history[0],), converged=True)
    unit = min(mean, max(_usual_error(rows, start), _LEAST_ERROR * mean))
    table = torch.empty(n, d, dtype=rows.dtype, device=rows.device)
    u, v = _orthonormal(start.coordinates, start.basis)
    seen = list(history)
    smooth = START * unit
    converged = False
    for iteration in range(stop.max_iterations):
        _improve_coordinates_(rows, u, v, p, smooth)
        v, u = _orthonormal(v.T, u.T)
        v, u = v.T, u.T.contiguous()
        v = _improved_basis(rows, u, v, p, smooth, table)
        u, v = _orthonormal(u, v)
        error = sum_of_powers(rows, u, v, p)
        seen.append(error)
        stop.report("irls", iteration, error)
        if error < history[-1]:
            history.append(error)
            best = EntrywiseFit(u.clone(), v)
        least = min(seen)
        stalled = len(seen) > _WINDOW and min(seen[:-_WINDOW]) - least <= _WINDOW * stop.tolerance * least
        if smooth <= LEAST * unit and stalled:
            converged = True
            break
        smooth = max(smooth * SHRINK, LEAST * unit)
    return EntrywiseFit(best.coordinates, best.basis, tuple(history), converged)


def sum_of_powers(rows: Rows, coordinates: Tensor, basis: Tensor, p: float, weights: Tensor | None = None) -> float:
    """sum_i w_i sum_j |A - U V|_ij^p, by blocks in the type of ``rows``.

    >>> sum_of_powers(TensorRows(torch.tensor([[3.0, -4.0]])), torch.zeros(1, 1), torch.zeros(1, 2), 1.0)
    7.0
    """
    total, basis = torch.zeros((), dtype=torch.float64, device=rows.device), basis.to(rows.dtype)
    for here, block in slices(rows):
        rest = torch.addmm(block, coordinates[here].to(block.dtype), basis, alpha=-1).abs_()
        powers = rest if p == 1 else rest.pow_(p)
        if weights is not None:
            powers = powers * weights[here].to(powers).unsqueeze(1)
        total += powers.sum(dtype=torch.float64)
    return float(total)


def _usual_error(rows: Rows, fit: EntrywiseFit) -> float:
    """Twice the median |A - U V|_ij that is not 0, of a sample of rows: a size of errors that a few gross errors do not
    change. For normal errors it exceeds the mean."""
    index = torch.arange(0, rows.shape[0], max(1, -(-rows.shape[0] // SAMPLE)), device=rows.device)
    rest = (rows.take(index) - fit.coordinates[index] @ fit.basis).abs()
    rest = rest[rest > 0]
    return 2 * float(rest.median()) if len(rest) else 0.0


def _start(rows: Rows, rank: int, p: float) -> EntrywiseFit:
    """The SVD, or the SVD of the rows with far entries held back if its sum is lower; ``objective``: both, falling."""

    def of(source: Rows) -> EntrywiseFit:
        svd = truncated_svd(source, rank)
        return EntrywiseFit(svd.coordinates, svd.basis, (sum_of_powers(rows, svd.coordinates, svd.basis, p),))

    plain, inside = of(rows), HeldBackRows(rows)
    if p == 2 or inside.largest < _NOTHING:
        return plain
    held = of(inside)
    return replace(held, objective=plain.objective + held.objective) if held.error < plain.error else plain


class HeldBackRows(MappedRows):
    """Rows with every entry within HELD times the size that its row and column suggest.

        limit_ij = HELD m_i c_j,    m_i = median_j |a_ij|,    c_j = median_i |a_ij| / m_i

    The leading directions of an SVD follow entries that are a hundred times too large, and a fit that begins there
    keeps these directions. Winsorized (Tukey 1962) to the size of their rows and columns, such entries are ordinary
    noise. Rows and columns may differ in scale, and medians tolerate that a part of the entries is wrong.

    >>> a = torch.ones(4, 3)
    >>> a[0, 0] = 100.0
    >>> HeldBackRows(TensorRows(a)).take(torch.tensor([0])).tolist()
    [[3.0, 1.0, 1.0]]
    """

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows, rows.shape[1], rows.dtype)
        self.sizes = torch.cat([block.abs().median(1).values for _, block in slices(rows)])
        self.columns = torch.zeros(rows.shape[1], dtype=rows.dtype, device=rows.device)
        alive = (self.sizes > 0).nonzero().squeeze(1)
        chosen = alive[:: max(1, -(-len(alive) // SAMPLE))]
        if len(chosen):
            relative = rows.take(chosen).abs() / self.sizes[chosen].unsqueeze(1)
            self.columns = HELD * relative.median(0).values.clamp_max(_WIDEST)

    @property
    def largest(self) -> float:
        """A bound of all entries; 0 where most entries are 0, and nothing is left."""
        return float(self.sizes.max() * self.columns.max())

    def changed(self, block: Tensor, index: slice | Tensor) -> Tensor:
        """The rows of a block with every far entry held back."""
        limit = self.sizes[index].unsqueeze(1) * self.columns
        return torch.minimum(torch.maximum(block, -limit), limit)


@dataclass(frozen=True)
class _Scaled:
    """diag(w^(1/p)) A / s, whose entries have a mean size of about 1.

    ``back`` (n,): factors that bring coordinates back to the given rows (0 for idle rows). ``unit``: the factor for
    objectives. ``entries``: how many count. ``turned``: the transpose is fitted, because n < d. ``widened``: the type
    is wider than the rows'.
    """

    rows: Rows
    back: Tensor
    unit: float
    entries: int
    turned: bool
    widened: bool


def _scaled(rows: Rows, weights: Tensor | None, p: float) -> _Scaled | None:
    n, d = rows.shape
    factor = torch.ones(n, dtype=torch.float64, device=rows.device)
    if weights is not None:
        factor = row_factors(weights.to(rows.device), 1 / p)
        factor = torch.where(factor > SMALL, factor, 0.0)  # smaller ones would be rounding beside the largest
    total, lengths2 = 0.0, []
    for here, block in slices(rows):
        total += float((block.abs().sum(1, dtype=torch.float64) * factor[here]).sum())
        lengths2.append(block.to(torch.float64).square().sum(1))
    spread = check_spread(torch.cat(lengths2), weights, _SPREAD)
    if total == 0:
        return None
    # A power of two, so that a matrix scaled by a power of two gives the same bits.
    entries = int((factor > 0).sum()) * d
    size = 2.0 ** round(math.log2(total / entries))
    unit = size**p * (1.0 if weights is None else float(weights.max()))
    back = torch.where(factor > 0, size / factor.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    widened = rows.dtype != torch.float64 and float(factor[factor > 0].min()) < _ROUNDED
    inside: Rows = ScaledRows(WidenedRows(rows) if widened else rows, factor / size)
    if spread > SINGLE and inside.dtype != torch.float64:
        inside = WidenedRows(inside)
    if n < d:
        inside = TensorRows(all_rows(inside).to(inside.dtype).T.contiguous())
    return _Scaled(inside, back, unit, entries, n < d, widened)


def _ordered(coordinates: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The same product with an orthonormal basis and orthogonal columns of coordinates, the longest first."""
    q, t = torch.linalg.qr(basis.T.to(torch.float64))
    turn = t.T
    gram = turn.T @ (coordinates.T.to(torch.float64) @ coordinates.to(torch.float64)) @ turn
    vectors = torch.linalg.eigh((gram + gram.T) / 2).eigenvectors.flip(1)
    left = (turn @ vectors).to(coordinates.dtype)
    return coordinates @ left, (vectors.T @ q.T).to(basis.dtype).contiguous()


def _improve_coordinates_(rows: Rows, u: Tensor, v: Tensor, p: float, smooth: float) -> None:
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
