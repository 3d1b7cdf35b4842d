"""The distortion of an ellipsoid of ||Ax||_p: constants proved for any ellipsoid, and a lower bound by search.

    least ||D V'x||_2^p  <=  ||Ax||_p^p  <=  greatest ||D V'x||_2^p        for every x

``loewner.py`` and ``sketched_ellipsoids.py`` compare ellipsoids by it. Two tables: on the embedding table of
all-MiniLM-L6-v2, the proved constants, the ratios that the search meets, and the l1 error at half rank; and definition
1, tried on random matrices with random and adversarial directions.

    python experiments/distortion.py
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from _results import embedding_table, markdown, parsed, publish
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.robust_svd import Ellipsoid, Lewis, robust_svd
from kflats.numerics.rows import GRAM_BLOCK, Rows, as_rows


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


def distortion_bound(matrix: Tensor | Rows, ellipsoid: Ellipsoid) -> Distortion:
    """Constants proved for *any* ellipsoid, by one pass over (n, d) and an r x r eigenproblem.

    With q_i = a_i'Q^-1 a_i, S = sum q_i^(p/2) and m <= M the extreme eigenvalues of
    Q^-1/2 (sum q_i^(p/2 - 1) a_i a_i') Q^-1/2, where Q = V D^2 V':

        p <= 2:   m ||x||_Q^p                  <= ||Ax||_p^p <=  S^(1-p/2) M^(p/2) ||x||_Q^p
        p >= 2:   S^(1-p/2) m^(p/2) ||x||_Q^p  <= ||Ax||_p^p <=  M ||x||_Q^p

    At Lewis weights m = M = 1 and the ratio is r^|1-p/2|. ``numerics.robust_svd`` has the two inequalities it comes
    from; for rows as they are (no weights) and x in the row space of A. Exact up to rounding, about 1e-12.

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
    >>> met = distortion_found(torch.eye(2), square)
    >>> round(met.least, 6), round(met.greatest, 6)
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


class Fixed:
    """An ellipsoid that is known already, as a way to one."""

    def __init__(self, ellipsoid: Ellipsoid) -> None:
        self.ellipsoid = ellipsoid

    def fit(self, _matrix: object, p: float) -> Ellipsoid:
        return replace(self.ellipsoid, p=p)


def on_the_table(table: Tensor) -> str:
    """The proved constant of each way, the ratios that the search meets, and the gain in l1 error at half rank."""
    squares = Lewis().fit(table, 2.0)
    ways: dict[str, Any] = {"Lewis": Lewis(), "Lewis, 3 iterations": Lewis(iterations=3), "A'A itself": Fixed(squares)}
    plain = robust_svd(table, table.shape[1] // 2, 1.0, ellipsoid=Fixed(squares)).error
    lines = []
    for name, way in ways.items():
        start = time.perf_counter()
        ellipsoid = certified(table, way.fit(table, 1.0))
        seconds = time.perf_counter() - start
        met = distortion_found(table, ellipsoid, directions=8, steps=20)
        gain = 1 - robust_svd(table, table.shape[1] // 2, 1.0, ellipsoid=Fixed(ellipsoid)).error / plain
        lines.append(
            [name, f"{seconds:.2f} s", f"{ellipsoid.bound:.4g}", f"{met.least:.4g} .. {met.greatest:.4g}"]
            + [f"{met.ratio:.4g}", f"{100 * gain:+.2f} %"]
        )
    head = ["way, p = 1", "time", "proved constant", "ratios met", "distortion met", "l1 error at rank d/2 below SVD's"]
    return markdown(head, lines)


def on_random_matrices(trials: int = 60) -> str:
    """Random matrices of three kinds: the worst ratios of both sides of definition 1."""
    lines = []
    for p in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0):
        least, greatest = math.inf, 0.0
        for seed in range(trials):
            gen = torch.Generator().manual_seed(seed)
            n, d = int(torch.randint(10, 400, (), generator=gen)), int(torch.randint(2, 9, (), generator=gen))
            a = torch.randn(n, d, generator=gen, dtype=torch.float64)
            if seed % 3 == 1:
                a *= torch.rand(n, 1, generator=gen, dtype=torch.float64).pow(-1)  # heavy-tailed rows
            if seed % 3 == 2:
                a *= torch.rand(n, d, generator=gen) < 0.3
            ellipsoid = Lewis().fit(a, p)
            met = distortion_found(a, ellipsoid, directions=8, steps=30, seed=seed)
            least = min(least, met.least)
            greatest = max(greatest, met.greatest / ellipsoid.rank ** abs(1 - p / 2))
        held = "yes" if least > 1 - 1e-5 and greatest < 1 + 1e-5 else "no"
        lines.append([p, trials, f"{least:.6f}", f"{greatest:.6f}", held])
    return markdown(["p", "matrices", "least ratio met (>= 1)", "greatest / r^abs(1-p/2) (<= 1)", "held"], lines)


QUICK = {"every": 100, "columns": 12, "trials": 3}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="of the table's rows, every such one")
    parser.add_argument("--columns", type=int, default=384, help="of the table")
    parser.add_argument("--trials", type=int, default=60, help="random matrices for each p")
    asked = parsed(parser, argv, QUICK)
    table = embedding_table()[:: asked.every, : asked.columns].contiguous()
    body = f"{on_the_table(table)}\n\n{on_random_matrices(asked.trials)}"
    publish("distortion", "Distortion of ellipsoids", body, {}, asked)


if __name__ == "__main__":
    main()
