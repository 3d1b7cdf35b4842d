"""Claim: ellipsoids of ||Ax||_p from sketches are hundreds of times farther off than A'A itself; from sampled rows they
are nearly as good as those of Lewis weights, in less than half of the time.

    Sketch        R of the QR of Pi A, Pi sparse with heavy-tailed entries   (Tukan et al., theorems 6-7)
    LewisSample   Lewis weights of about 10 d sampled rows, then one full iteration

The theorems hold with some probability and up to an unknown scale. Here every ellipsoid gets a certificate computed on
the whole matrix, so what is returned holds for every draw. ``robust_svd(a, rank, p, ellipsoid=Sketch())`` takes both.

The second table shows how times grow with rows and columns of random matrices. "sketch" is what theorem 6 counts as
n d log n: the sums of rows in Pi A, and its QR. Our ellipsoids of sketches take more: a Gram matrix, the rows times its
root, and a certificate, n d^2 each. Times are medians of three.

    python experiments/sketched_ellipsoids.py        # on the embedding table of all-MiniLM-L6-v2
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from _results import embedding_table, markdown, parsed, publish
from distortion import certified, distortion_found
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.gram import narrow, row_lengths, row_space, too_different
from kflats.numerics.robust_svd import Ellipsoid, Lewis, LewisState, check_extreme, iterate, no_axes, sweep
from kflats.numerics.rows import GRAM_BLOCK, PartOfRows, Rows, ScaledRows, checked_rows

_LOST = 1e-13  # of a sketch's largest singular value: below, only rounding is left of a direction


@dataclass(frozen=True)
class Sketch:
    """An ellipsoid from a sketch of ``rows_per_column`` x r rows, each row of A in one of them at random.

    "cauchy" multiplies row i by a Cauchy variable (Meng & Mahoney 2013), p = 1 only; "exponential" by +-E^(-1/p),
    E exponential (Woodruff & Zhang 2013), any p > 0. Both give ellipsoids far worse than A'A itself: no reason to
    choose one, other than to see that.

    >>> found = Sketch("cauchy", seed=1).fit(torch.eye(30)[:, :4].repeat(20, 1), 1.0)
    >>> found.rank, found.bound > 2.0
    (4, True)
    """

    kind: Literal["cauchy", "exponential"] = "exponential"
    rows_per_column: int = 20
    seed: int = 0

    def fit(self, matrix: Tensor | Rows, p: float) -> Ellipsoid:
        """The ellipsoid of ``matrix`` (n, d) at power p, certified; equal for equal seeds.

        Raises:
            KflatsError: an impossible p, "cauchy" with p other than 1, values that are not finite, or a draw that
                loses a direction of the matrix.
        """
        rows = checked_rows(matrix)
        check_extreme(p, *rows.shape)
        if self.kind == "cauchy" and p != 1:
            raise KflatsError(f"Cauchy variables are stable for p = 1, not for {p:g}", hint='use Sketch("exponential")')
        rows, lift = narrow(rows)
        lengths = row_lengths(rows)
        if not bool(lengths.any()):
            return no_axes(rows, p).lifted(lift)
        whitening = row_space(rows, torch.ones_like(lengths), lengths)
        _, values, turn = torch.linalg.svd(self._sketch(rows, whitening, p, lengths > 0), full_matrices=False)
        if not float(values[-1]) > _LOST * float(values[0]):
            raise KflatsError(
                f"this sketch of {self.rows_per_column} rows a column has lost a direction of the matrix",
                cause="rows that alone have some direction met in one row of it, or one row was drawn far too long",
                hint="another seed, more rows_per_column, or Lewis()",
            )
        # Q = L^-T (Pi A L)'(Pi A L) L^-1, and its eigenvectors by the SVD of a square root of its inverse.
        left, inverse, _ = torch.linalg.svd(whitening @ (turn.T / values), full_matrices=False)
        raw = Ellipsoid(1 / inverse.flip(0), left.flip(1).T.contiguous(), float(p), math.inf, 1, True)
        return certified(rows, raw).lifted(lift)

    def _sketch(self, rows: Rows, whitening: Tensor | None, p: float, alive: Tensor) -> Tensor:
        """Pi A, or Pi A L: (rows_per_column r, r) float64.

        Args:
            whitening: L (d, r). alive: (n,) the rows that are not all zeros.
        """
        n, r = rows.shape[0], rows.shape[1] if whitening is None else whitening.shape[1]
        generator = torch.Generator().manual_seed(self.seed)
        count = self.rows_per_column * r
        # Few enough rows have one of the sketch's each: no two must meet. Rows of zeros may lie anywhere.
        few = int(alive.sum()) <= count
        place = alive.to("cpu", torch.int64).cumsum(0).sub(1).clamp_(0, count - 1)
        buckets = place if few else torch.randint(count, (n,), generator=generator)
        uniform = torch.rand(n, generator=generator, dtype=torch.float64).clamp_min(1e-300)
        if self.kind == "cauchy":
            factors = torch.tan(math.pi * (uniform - 0.5))
        else:
            signs = 2.0 * torch.randint(2, (n,), generator=generator) - 1
            factors = signs * (-uniform.log()).clamp_min(1e-300).pow(-1 / p)
        buckets, factors = buckets.to(rows.device), factors.to(rows.device)
        sketch = torch.zeros(count, r, dtype=torch.float64, device=rows.device)
        for start, block in rows.blocks(GRAM_BLOCK):
            part = slice(start, start + len(block))
            wide = block.to(torch.float64)
            wide = wide if whitening is None else wide @ whitening
            sketch.index_add_(0, buckets[part], wide * factors[part].unsqueeze(1))
        return sketch


@dataclass(frozen=True)
class LewisSample:
    """Lewis weights of ``rows_per_column`` x d sampled rows, then one iteration on all: less than half of its time.

    Half of the rows are drawn evenly, half by |a|^min(p, 2), and scaled so that sums of powers keep their expectation.
    The ellipsoid is certified on the whole matrix, with a constant tens of per cent above r^|1-p/2| (a row, not the
    sum, decides it); the distortion found is that of ``Lewis``, for p > 2 somewhat more. A matrix with no more rows
    than that is taken whole.

    >>> rows = torch.randn(4000, 5, generator=torch.Generator().manual_seed(0))
    >>> LewisSample().fit(rows, 1.0).bound < 1.5 * 5**0.5
    True
    """

    rows_per_column: int = 10
    seed: int = 0

    def fit(self, matrix: Tensor | Rows, p: float) -> Ellipsoid:
        """The ellipsoid of ``matrix`` (n, d) at power p; equal for equal seeds.

        Raises:
            KflatsError: as ``Lewis.fit``, or a sample that misses directions of the matrix.
        """
        rows = checked_rows(matrix)
        count = self.rows_per_column * rows.shape[1]
        if rows.shape[0] <= count:
            return Lewis().fit(rows, p)
        check_extreme(p, *rows.shape)
        lengths = row_lengths(rows)
        if not bool(lengths.any()):
            return no_axes(rows, p)
        state = LewisState(torch.zeros_like(lengths), self._sampled(rows, p, lengths, count).whitening, lengths)
        if state.whitening.shape[1] < rows.shape[1]:
            true = row_space(rows, torch.ones_like(lengths), lengths).shape[1]
            if true > state.whitening.shape[1]:
                raise KflatsError(
                    f"{count} sampled rows span {state.whitening.shape[1]} of {true} directions",
                    cause="few rows have some direction to themselves",
                    hint="raise rows_per_column, or use Lewis()",
                )
        swept = sweep(rows, p, state, rows.dtype)
        state = LewisState(swept.log_weights, state.whitening @ swept.turn, lengths)
        return iterate(rows, p, Lewis(iterations=1), state)

    def _sampled(self, rows: Rows, p: float, lengths: Tensor, count: int) -> Ellipsoid:
        powers = (lengths / lengths.max()).pow(min(p, 2.0))
        chance = 0.5 * (lengths > 0) / (lengths > 0).sum() + 0.5 * powers / powers.sum()
        generator = torch.Generator().manual_seed(self.seed)
        draws = torch.rand(count, generator=generator, dtype=torch.float64).to(rows.device)
        sums = chance.cumsum(0)
        index = torch.searchsorted(sums, draws * sums[-1]).clamp_max(len(chance) - 1).sort().values
        index = index[chance[index] > 0]
        factors = (chance[index] / chance[index].min()).pow(-1 / p)  # up to a common one, which no weight depends on
        try:
            # The sample itself is farther off than this tolerance.
            return Lewis(tolerance=0.01).fit(ScaledRows(PartOfRows(rows, index), factors), p)
        except KflatsError as error:
            raise too_different(lengths) from error  # by its number in the whole matrix


QUICK = {"every": 20, "columns": 12, "most": 4096}
_TURNS = 3


def seconds_of(call: Callable[[], object]) -> float:
    """The median of three calls, after one."""
    call()
    found = []
    for _ in range(_TURNS):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def times(n: int, d: int) -> dict[str, Any]:
    """Of a random matrix (n, d), in seconds."""
    table = torch.randn(n, d, generator=torch.Generator().manual_seed(0))
    rows, alive, sketch = checked_rows(table), torch.ones(n, dtype=torch.bool), Sketch("cauchy")
    return {
        "rows": n,
        "columns": d,
        "sketch": seconds_of(lambda: torch.linalg.qr(sketch._sketch(rows, None, 1.0, alive))),
        "its ellipsoid, certified": seconds_of(lambda: sketch.fit(table, 1.0)),
        "Lewis": seconds_of(lambda: Lewis().fit(table, 1.0)),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="of the table's rows, every such one")
    parser.add_argument("--columns", type=int, default=384, help="of the table")
    parser.add_argument("--most", type=int, default=2**18, help="rows of the largest random matrix")
    asked = parsed(parser, argv, QUICK)
    table = embedding_table()[:: asked.every, : asked.columns].contiguous()
    ways = {
        "Lewis": lambda: Lewis().fit(table, 1.0),
        "LewisSample": lambda: LewisSample().fit(table, 1.0),
        "A'A itself": lambda: certified(table, replace(Lewis().fit(table, 2.0), p=1.0)),
        "Sketch, Cauchy": lambda: Sketch("cauchy").fit(table, 1.0),
        "Sketch, exponential": lambda: Sketch("exponential").fit(table, 1.0),
    }
    rows: list[dict[str, Any]] = []
    for name, fit in ways.items():
        seconds, ellipsoid = seconds_of(fit), fit()
        ratio = distortion_found(table, ellipsoid, directions=8, steps=20).ratio
        rows.append({"way": name, "seconds": seconds, "bound": ellipsoid.bound, "distortion": ratio})
    lines = [[r["way"], f"{r['seconds']:.2f} s", f"{r['bound']:.4g}", f"{r['distortion']:.4g}"] for r in rows]
    body = markdown(["way, p = 1", "time", "proved constant", "largest distortion met"], lines)
    most = asked.most
    shapes = [(most // 8, 64), (most // 4, 64), (most // 2, 64), (most, 64)]
    shapes += [(most // 4, 32), (most // 4, 128), (most // 4, 256)]
    grown = [times(n, d) for n, d in shapes]
    ways_timed = [name for name in grown[0] if name not in ("rows", "columns")]
    lines = [
        [f"{of['rows']:,} x {of['columns']}", *(f"{of[name]:.4f} s" for name in ways_timed)]
        for of in sorted(grown, key=lambda of: (of["columns"], of["rows"]))
    ]
    body = (
        f"The embedding table of all-MiniLM-L6-v2, {len(table):,} x {table.shape[1]}.\n\n{body}\n\n"
        f"Random matrices.\n\n{markdown(['shape', *ways_timed], lines)}"
    )
    publish("sketched_ellipsoids", "Ellipsoids by sketches", body, {"rows": rows, "times": grown}, asked)


if __name__ == "__main__":
    main()
