"""Algorithm A1: an ellipsoid around {x : ||Ax||_p <= 1} by the ellipsoid method, for any p >= 1 and small d.

Tukan, Maalouf, Weksler & Feldman, Sensors 2021, appendix A, after Groetschel, Lovasz & Schrijver 1993 (section 4.6).
E = {x : (x - c)' F^-1 (x - c) <= 1} always contains L = {x : ||Ax||_p <= 1}; it shrinks until a contracted copy's
2 d vertices lie in L. Differences from the printed algorithm, with reasons (docs/robust-svd.md has the numbers):

- line 1's ||Ax||_1 is ||Ax||_p; line 4's F = r I is r^2 I, else the first ball need not contain L;
- lines 8 and 18: the gradient of ||Ax||_p is A' (sign(y) |y|^(p-1)) / ||y||_p^(p-1), y = Ax;
- lines 20-23 are the smallest ellipsoid after a cut at depth 1/(d+1) of E's width. A vertex of E/d may allow only
  up to 1/d: then the same formulas with the depth that there is, since the printed ones would lose a part of L;
- theorem 2's contraction 1/sqrt(d) cannot be reached by cuts on one side: each is mirrored, L being symmetric;
- p = 2, one column and a square invertible A are not iterated: there the answer is the SVD.

The constant that is proved: 2 d vertices at distance 1 span a cross-polytope, and that holds a ball of 1/sqrt(d).
So K = sqrt(d) max ||A u_j||_p over the semi-axes u_j, at most d^(3/2) with the contraction 1/d, d with 1/sqrt(d).

    python experiments/loewner.py        # beside Lewis weights, on 8 columns of the table of all-MiniLM-L6-v2
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
from _results import embedding_table, markdown, parsed, publish
from distortion import distortion_found
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.gram import narrow, row_lengths, row_space
from kflats.numerics.robust_svd import Ellipsoid, Lewis, check_extreme, no_axes
from kflats.numerics.rows import GRAM_BLOCK, Rows, checked_rows

Contraction = Literal["1/sqrt(d)", "1/d"]

_FLATTEST = 2e-7  # least singular value, of the largest: F holds their squares, and below loses the shortest axes


@dataclass(frozen=True)
class Loewner:
    """The ellipsoid of algorithm A1. It is here for comparison: ``Lewis`` is far faster and its proved bound
    is lower. On a given table the distortion of this one may still be a little lower.
    ``robust_svd(a, rank, p, ellipsoid=Loewner())`` uses it.

    Args:
        contraction: "1/d" is A1 as printed, one-sided cuts with its constants; proves ((1 + tolerance) d^(3/2))^p.
            "1/sqrt(d)" is theorem 2's, by mirrored cuts, much faster; proves ((1 + tolerance) d)^p.
        tolerance: how far vertices may lie outside. Every step then takes a share of the volume, which bounds their
            number.
        max_steps: limit of steps; a fit that needs more is refused. A step costs 4 n d^2.
        max_columns: larger ranks are refused: with "1/d" the number of steps grows like d^4.

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> ellipsoid = Loewner().fit(a, 1.0)
    >>> ellipsoid.bound <= 2.02, ellipsoid.converged
    (True, True)
    """

    contraction: Contraction = "1/sqrt(d)"
    tolerance: float = 0.01
    max_steps: int = 200_000
    max_columns: int = 32

    def __post_init__(self) -> None:
        if self.contraction not in ("1/sqrt(d)", "1/d"):
            raise KflatsError(f"no contraction {self.contraction!r}", hint='choose "1/sqrt(d)" or "1/d"')
        counts = (self.max_steps, self.max_columns)
        whole = all(isinstance(count, int) and not isinstance(count, bool) and count >= 1 for count in counts)
        if not whole or not isinstance(self.tolerance, int | float) or not 0 < self.tolerance < math.inf:
            raise KflatsError(f"{self} is not possible", hint="tolerance > 0, max_steps >= 1 and max_columns >= 1")

    def fit(self, matrix: Tensor | Rows, p: float) -> Ellipsoid:
        """The ellipsoid of ``matrix`` (n, d) at power p >= 1; a float64 copy of it is held, in its r directions.

        Raises:
            KflatsError: p < 1 or infinite, values that are not finite, singular values of too different size, a rank
                above ``max_columns``, too many steps.
        """
        rows = checked_rows(matrix)
        check_extreme(p, *rows.shape)
        if p < 1:
            raise KflatsError(f"p={p:g} is below 1", cause="the unit ball is not convex", hint="use Lewis()")
        rows, lift = narrow(rows)
        lengths = row_lengths(rows)
        if not bool(lengths.any()):
            return no_axes(rows, p).lifted(lift)
        left, scales, _ = torch.linalg.svd(row_space(rows, torch.ones_like(lengths), lengths), full_matrices=False)
        directions, singular = left.flip(1).T, 1 / scales.flip(0)
        exact = _exact(rows, p, directions, singular, lengths)
        if exact is not None:
            return exact.lifted(lift)
        r = len(singular)
        if r > self.max_columns:
            raise KflatsError(
                f"algorithm A1 on {r} columns is refused above {self.max_columns}",
                cause="its steps grow like d^4, and each costs a product with the matrix",
                hint="use Lewis(), or Loewner(max_columns=...) with patience",
            )
        if float(singular[-1]) < _FLATTEST * float(singular[0]):
            raise KflatsError(
                f"algorithm A1 refuses singular values from {float(singular[0]):.0e} to {float(singular[-1]):.0e}",
                cause="columns in different units, or a direction that is all but missing: squares of such lie too far "
                "apart for double precision",
                hint="use Lewis(), or bring the columns to one scale",
            )
        work = torch.cat([block.to(torch.float64) @ directions.T for _, block in rows.blocks(GRAM_BLOCK)])
        # ||Ax||_p >= n^min(0, 1/p - 1/2) ||Ax||_2
        radius = len(work) ** max(0.0, 0.5 - 1 / p) / float(singular[-1])
        shape, steps = self._shrink(work, p, radius)
        values, vectors = torch.linalg.eigh(shape)
        widest = float(_norms(work @ (vectors * values.sqrt()), p).max())
        bound = (widest * math.sqrt(r)) ** p
        return Ellipsoid(values.rsqrt(), vectors.T @ directions, float(p), bound, steps, True).lifted(lift)

    def _shrink(self, a: Tensor, p: float, radius: float) -> tuple[Tensor, int]:
        """F (r, r) of the last ellipsoid, moved back to the origin, and how many steps it took."""
        d = a.shape[1]
        mirrored = self.contraction == "1/sqrt(d)"
        contraction = d**-0.5 if mirrored else 1 / d
        shape = radius**2 * torch.eye(d, dtype=a.dtype, device=a.device)
        center = torch.zeros(d, dtype=a.dtype, device=a.device)
        for step in range(self.max_steps):
            if float(_norms(a @ center, p)) > 1:
                shape, center = _cut(shape, center, _gradient(a, center, p), 0.0)
                continue
            values, vectors = torch.linalg.eigh(shape)
            spokes = contraction * vectors * values.clamp_min(0.0).sqrt()
            vertices = center.unsqueeze(1) + (spokes if mirrored else torch.cat([spokes, -spokes], dim=1))
            norms = _norms(a @ vertices, p)
            if float(norms.max()) <= 1 + self.tolerance:
                # L = -L lies in E - c and in E + c, so in the ellipsoid at 0 with F (1 - c' F^-1 c).
                offset = float(center @ torch.linalg.solve(shape, center))
                return shape * (1 - offset), step
            slope = _gradient(a, vertices[:, int(norms.argmax())], p)
            width = float((slope @ shape @ slope).sqrt())
            if mirrored:
                shape = _cut_both(shape, slope, 1 / width)
            else:
                depth = max((1 - float(slope @ center)) / width, 1 / (d + 1))
                shape, center = _cut(shape, center, slope, depth)
        raise KflatsError(
            f"algorithm A1 did not end within {self.max_steps} steps on {d} columns",
            cause='the volume falls by little per step, with the contraction "1/d" by about 1 / (2 d^3)',
            hint='use Lewis(), contraction="1/sqrt(d)", a larger tolerance or max_steps',
        )


def _exact(rows: Rows, p: float, directions: Tensor, singular: Tensor, lengths: Tensor) -> Ellipsoid | None:
    """Where the ellipsoid is known: p = 2, one direction, and n = r, where it is the image of the one of an lp ball."""
    r = len(singular)
    if p == 2:
        return Ellipsoid(singular, directions, 2.0, 1.0, 0, True)
    if r == 1:
        norms = [_norms(block.to(torch.float64) @ directions[0], p) for _, block in rows.blocks(GRAM_BLOCK)]
        return Ellipsoid(_norms(torch.stack(norms), p).unsqueeze(0), directions, float(p), 1.0, 0, True)
    if int((lengths > 0).sum()) == r:
        shrunk = r ** min(0.0, 1 / p - 0.5)
        return Ellipsoid(shrunk * singular, directions, float(p), r ** abs(1 - p / 2), 0, True)
    return None


def _norms(y: Tensor, p: float) -> Tensor:
    """||y||_p of the columns, by way of the largest entry, so that no power overflows."""
    largest = y.abs().amax(0)
    safe = torch.where(largest > 0, largest, 1.0)
    norms: Tensor = largest * (y.abs() / safe).pow(p).sum(0).pow(1 / p)
    return norms


def _gradient(a: Tensor, x: Tensor, p: float) -> Tensor:
    """g with g'x = ||Ax||_p and g'z <= ||Az||_p for all z: the (sub)gradient, L's supporting halfspace {g'z <= 1}."""
    y = a @ x
    return a.T @ (y.sign() * (y.abs() / _norms(y, p)).pow(p - 1))


def _cut(shape: Tensor, center: Tensor, slope: Tensor, depth: float) -> tuple[Tensor, Tensor]:
    """The smallest ellipsoid around E and {x : slope'(x - c) <= depth * width}, for 0 <= depth < 1/d.

    Depth 0 is lines 10-12 of A1, depth 1/(d+1) lines 20-26 with zeta, its margin for rounding; shallower cuts take
    less volume than zeta would add.
    """
    d = len(center)
    b = shape @ slope / (slope @ shape @ slope).sqrt()
    share = 1 - d * depth
    margin = 1 + 1 / (2 * d**2 * (d + 1) ** 2) if depth <= 1 / (d + 1) else 1.0
    stretch = d**2 * (1 - depth**2) / (d**2 - 1)
    new = stretch * (shape - 2 * share / ((d + 1) * (1 - depth)) * torch.outer(b, b))
    return margin * (new + new.T) / 2, center - share / (d + 1) * b


def _cut_both(shape: Tensor, slope: Tensor, depth: float) -> Tensor:
    """The smallest ellipsoid around E and {x : |slope'x| <= depth * width}, centred at 0, for depth < 1/sqrt(d)."""
    d = len(slope)
    b = shape @ slope / (slope @ shape @ slope).sqrt()
    across = d * (1 - depth**2) / (d - 1)
    new = across * shape + (d * depth**2 - across) * torch.outer(b, b)
    return (new + new.T) / 2


QUICK = {"rows": 60}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000)
    asked, table = parsed(parser, argv, QUICK), embedding_table()
    small = table[:: max(1, len(table) // asked.rows), :8].contiguous()
    ways: dict[str, Any] = {"Lewis": Lewis(), "A1, mirrored cuts": Loewner(), "A1 as printed": Loewner("1/d")}
    lines, fastest = [], 0.0
    for name, way in ways.items():
        start = time.perf_counter()
        ellipsoid = way.fit(small, 1.0)
        seconds = time.perf_counter() - start
        fastest = fastest or seconds
        ratio = distortion_found(small, ellipsoid, directions=16, steps=60).ratio
        lines.append(
            [name, ellipsoid.iterations, f"{1000 * seconds:.1f} ms", f"**{seconds / fastest:,.0f}**"]
            + [f"{ellipsoid.bound:.4g}", f"{ratio:.4f}"]
        )
    head = [f"{len(small)} x 8, p = 1", "steps", "time", "x Lewis", "proved constant", "distortion met"]
    publish("loewner", "Algorithm A1 beside Lewis weights", markdown(head, lines), {"rows": lines}, asked)


if __name__ == "__main__":
    main()
