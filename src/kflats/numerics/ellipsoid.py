"""The lp ellipsoid of a matrix, and its distortion: a proved bound, and a lower bound by search.

    ||D V'x||_2^p  <=  ||Ax||_p^p  <=  bound * ||D V'x||_2^p        for every x

Tukan, Maalouf, Weksler & Feldman, Sensors 2021, definition 1 ("||.||_p-SVD"), where bound = d^(p/2). For a
matrix of rank r < d, D has r axes and V' r rows: both sides vanish on the same x.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.rows import GRAM_BLOCK, Rows, as_rows


@dataclass(frozen=True)
class Ellipsoid:
    """``axes`` D (r,), descending and positive, and ``directions`` V' (r, d) with orthonormal rows, both float64.

    The axes are the reciprocals of the ellipsoid's semi-axes, in the units of ||Ax||_p. ``bound`` is the proved
    constant of the definition above, in p-th powers; ``bounds`` holds it for each iteration that was certified.
    """

    axes: Tensor
    directions: Tensor
    p: float
    bound: float
    iterations: int
    converged: bool
    bounds: tuple[float, ...] = field(default=(), repr=False)

    @property
    def rank(self) -> int:
        """Axes, and so the rank of A as far as its numbers show it."""
        return len(self.axes)

    @property
    def factor(self) -> Tensor:
        """D V' (r, d)."""
        return self.axes.unsqueeze(1) * self.directions

    @property
    def whitening(self) -> Tensor:
        """V D^-1 (d, r): A times it is U of the ||.||_p-SVD A = U D V'."""
        return self.directions.T / self.axes

    def norm(self, x: Tensor) -> Tensor:
        """||D V'x||_2 of the columns of ``x``: (d,) gives a number, (d, m) gives (m,)."""
        norms: Tensor = torch.linalg.vector_norm(self.factor @ x.to(self.axes), dim=0)
        return norms


@dataclass(frozen=True)
class Distortion:
    """``least`` * ||D V'x||_2^p <= ||Ax||_p^p <= ``greatest`` * ||D V'x||_2^p.

    From ``distortion_bound`` it holds for every x. From ``distortion_found``, some x attains each side.
    """

    least: float
    greatest: float

    @property
    def ratio(self) -> float:
        """greatest / least, which does not depend on the scale of the ellipsoid."""
        return self.greatest / self.least


def check_power(p: float, n: int, d: int, *, least: float = 0.0) -> None:
    """Refuse a power that has no norm here, or one whose constants do not fit into double precision.

    Raises:
        KflatsError: p is not positive, infinite, below ``least``, or too extreme for an (n, d) matrix.
    """
    number = isinstance(p, int | float) and not isinstance(p, bool)
    if not (number and math.isfinite(p) and p > 0):
        raise KflatsError(
            f"p = {p!r} is no power of a norm",
            cause="a maximum norm (p = inf) has no sum of powers" if p == math.inf else "p must be positive",
            hint="choose 0 < p < inf, for instance p=1",
            command="a positive number, such as --p 1",
        )
    if p < least:
        raise KflatsError(
            f"p = {p:g} is below {least:g}",
            cause="the unit ball is not convex",
            hint="use Lewis()",
            command="--ellipsoid lewis",
        )
    if 2 / p * math.log10(max(n, 2)) > 250 or p / 2 * math.log10(max(d, 2)) > 250:
        raise KflatsError(
            f"p = {p:g} is too extreme for a {n} x {d} matrix",
            cause="n^(1/p) or d^(p/2) exceeds double precision",
            hint="choose p between 0.1 and 64",
        )


def distortion_bound(matrix: Tensor | Rows, ellipsoid: Ellipsoid) -> Distortion:
    """Constants proved for *any* ellipsoid, by one pass over (n, d) and an r x r eigenproblem.

    With q_i = a_i'Q^-1 a_i, S = sum q_i^(p/2) and m <= M the extreme eigenvalues of
    Q^-1/2 (sum q_i^(p/2 - 1) a_i a_i') Q^-1/2, where Q = V D^2 V':

        p <= 2:   m ||x||_Q^p                  <= ||Ax||_p^p <=  S^(1-p/2) M^(p/2) ||x||_Q^p
        p >= 2:   S^(1-p/2) m^(p/2) ||x||_Q^p  <= ||Ax||_p^p <=  M ||x||_Q^p

    At Lewis weights m = M = 1 and the ratio is r^|1-p/2|. ``numerics.lewis`` has the two inequalities it comes from;
    for rows as they are (no weights) and x in the row space of A. Exact up to rounding, about 1e-12.

    >>> square = Ellipsoid(torch.ones(2).double(), torch.eye(2).double(), 1.0, 2.0, 0, True)
    >>> distortion_bound(torch.eye(2), square)
    Distortion(least=1.0, greatest=1.414...)
    """
    rows, p = as_rows(matrix), ellipsoid.p
    whitening = ellipsoid.whitening.to(rows.device)
    gram = torch.zeros(ellipsoid.rank, ellipsoid.rank, dtype=torch.float64, device=rows.device)
    total = 0.0
    if ellipsoid.rank == 0:
        return Distortion(1.0, 1.0)
    for _, block in rows.blocks(GRAM_BLOCK):
        white = block.to(torch.float64) @ whitening
        lengths = torch.linalg.vector_norm(white, dim=1)
        total += float(lengths.pow(p).sum())
        unit = white / torch.where(lengths > 0, lengths, 1.0).unsqueeze(1)
        unit *= lengths.pow(p / 2).unsqueeze(1)  # q^(p/4 - 1/2) a, without a negative power of a zero row
        gram += unit.T @ unit
    values = torch.linalg.eigvalsh(gram)
    low, high = float(values[0]), float(values[-1])
    if not low > 0:
        raise KflatsError(
            "the ellipsoid has an axis along which the matrix vanishes",
            cause="the ellipsoid belongs to another matrix",
            hint="fit it to this one",
        )
    spread: float = total ** (1 - p / 2)
    return Distortion(low, spread * high ** (p / 2)) if p <= 2 else Distortion(spread * low ** (p / 2), high)


def lifted(ellipsoid: Ellipsoid, basis: Tensor | None) -> Ellipsoid:
    """An ellipsoid of C as one of C K, for K with orthonormal rows."""
    if basis is None:
        return ellipsoid
    return replace(ellipsoid, directions=ellipsoid.directions @ basis)


def empty(rows: Rows, p: float) -> Ellipsoid:
    """The ellipsoid of a matrix of zeros: no axes, and 0 <= 0 <= 0."""
    none = torch.zeros(0, rows.shape[1], dtype=torch.float64, device=rows.device)
    return Ellipsoid(none[:, 0], none, float(p), 1.0, 0, True)


def certified(matrix: Tensor | Rows, ellipsoid: Ellipsoid) -> Ellipsoid:
    """The same directions, scaled so that the left inequality holds, with the bound of ``distortion_bound``."""
    proved = distortion_bound(matrix, ellipsoid)
    axes = ellipsoid.axes * proved.least ** (1 / ellipsoid.p)
    return replace(ellipsoid, axes=axes, bound=proved.ratio, bounds=(proved.ratio,))


def distortion_found(
    matrix: Tensor | Rows, ellipsoid: Ellipsoid, *, directions: int = 16, steps: int = 40, seed: int = 0
) -> Distortion:
    """The least and greatest ||Ax||_p^p / ||D V'x||_2^p by search: a lower bound of an ellipsoid's true distortion.

    The search begins from ``directions`` random x, the longest rows and the axes, and goes downhill and uphill for
    ``steps`` gradient steps on the sphere ||D V'x|| = 1. A step that does not help is undone, and the next is shorter.
    Costs about 4 n d (2 directions) a step. The extrema are local, so the true distortion may be larger.

    >>> square = Ellipsoid(torch.ones(2).double(), torch.eye(2).double(), 1.0, 2.0, 0, True)
    >>> found = distortion_found(torch.eye(2), square)
    >>> round(found.least, 6), round(found.greatest, 6)
    (1.0, 1.414214)
    """
    rows, p = as_rows(matrix), ellipsoid.p
    if ellipsoid.rank == 0:
        return Distortion(1.0, 1.0)
    start = _starts(rows, ellipsoid, directions, seed)
    least = _climb(rows, ellipsoid, start, steps, -1.0)
    greatest = _climb(rows, ellipsoid, start, steps, 1.0)
    return Distortion(math.exp(p * float(least.min())), math.exp(p * float(greatest.max())))


def _starts(rows: Rows, ellipsoid: Ellipsoid, count: int, seed: int) -> Tensor:
    """(r, m) unit columns z = D V'x: axes, the longest whitened rows of each block, and random ones."""
    r, generator = ellipsoid.rank, torch.Generator().manual_seed(seed)
    device, whitening = rows.device, ellipsoid.whitening.to(rows.device)
    far: list[tuple[float, Tensor]] = []
    for _, block in rows.blocks(GRAM_BLOCK):
        white = block.to(torch.float64) @ whitening
        lengths = torch.linalg.vector_norm(white, dim=1)
        for value, index in zip(*lengths.topk(min(4, len(block))), strict=True):
            far.append((float(value), white[index]))
    far.sort(key=lambda item: -item[0])
    axes = torch.eye(r, dtype=torch.float64, device=device)[:, [*range(min(r, 2)), r - 1]]
    random = torch.randn(r, count, generator=generator, dtype=torch.float64).to(device)
    columns = torch.cat([axes, torch.stack([white for _, white in far[:4]], dim=1), random], dim=1)
    return columns[:, columns.abs().amax(0) > 0]


def _climb(rows: Rows, ellipsoid: Ellipsoid, start: Tensor, steps: int, sign: float) -> Tensor:
    """log ||A x||_p, x = V D^-1 z on the unit sphere of z, after ``steps`` of ascent (sign 1) or descent (-1)."""
    z = start / torch.linalg.vector_norm(start, dim=0)
    value, slope = _log_norm(rows, ellipsoid, z)
    length = torch.full_like(value, 0.5)
    for _ in range(steps):
        slope = slope - z * (slope * z).sum(0)
        size = torch.linalg.vector_norm(slope, dim=0)
        trial = z + sign * length * slope / torch.where(size > 0, size, 1.0)
        trial = trial / torch.linalg.vector_norm(trial, dim=0)
        new, new_slope = _log_norm(rows, ellipsoid, trial)
        better = sign * (new - value) > 0
        z, slope, value = (torch.where(better, a, b) for a, b in ((trial, z), (new_slope, slope), (new, value)))
        length = torch.where(better, 1.5 * length, 0.4 * length)
    return value


def _log_norm(rows: Rows, ellipsoid: Ellipsoid, z: Tensor) -> tuple[Tensor, Tensor]:
    """log ||A V D^-1 z||_p of each column, and its gradient by z, smoothed where terms are near zero (p < 2)."""
    p, whitening = ellipsoid.p, ellipsoid.whitening.to(rows.device)
    x = whitening @ z
    total = torch.zeros(z.shape[1], dtype=torch.float64, device=z.device)
    slope = torch.zeros_like(x)
    for _, block in rows.blocks(GRAM_BLOCK):
        wide = block.to(torch.float64)
        y = wide @ x
        size = y.abs()
        total += size.pow(p).sum(0)
        near = 1e-3 * size.mean(0)  # at a kink, the exact slope leads away from its lowest point
        slope += wide.T @ (y * torch.maximum(size, near).clamp_min(1e-150).pow(p - 2))
    return total.log() / p, whitening.T @ slope / total
