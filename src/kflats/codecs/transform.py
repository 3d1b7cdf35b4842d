"""Transform coding: principal axes, bits by reverse water-filling, rate-distortion optimised rounding.

Of methods that minimise squares the code takes the place of the fit: the method says how many flats there are, and
axes, ranks and bits follow from the bytes. Other methods keep their fit: they fit flats of the rank that the bytes
would give bits to, and the code is one of the rows that lie in these flats.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from kflats.codecs.cluster_coordinates import MatrixRows
from kflats.codecs.fixed_rate import HEADER_BYTES, Rounded
from kflats.codecs.protocol import Candidate, Codec, Table
from kflats.codecs.streams import stored_bytes
from kflats.common.errors import KflatsError
from kflats.importance.weighting import Weighting
from kflats.matrices.coded import CodedMatrix
from kflats.matrices.coded_build import from_flats, from_transform
from kflats.matrices.flats import FlatsMatrix
from kflats.methods import SVD, Flats
from kflats.methods.matrix_error import weighted_error
from kflats.methods.problem import Factored, Problem, check_accepts
from kflats.methods.protocol import Method
from kflats.numerics.coding.encode import transform_code, transform_rates
from kflats.numerics.coding.flats import flats_code
from kflats.numerics.coding.gaussian_bound import water_level
from kflats.numerics.rows import Rows

_ATTEMPTS = 6
_SMALL = 48
"""Bytes that are not worth another code."""
_SLACK = 0.01
"""Share of the bytes that may stay unused; a second code makes use of more."""
_POWERS = (12, 9, 6, 4, 2, 1, 0, -1, -2)  # binary logarithms of the root mean square of coordinates, in steps
_LONG = 300
"""Rows a column from which flats of their own pay for their axes: benchmarks/results/coded_flats_long.md."""
_SIZES_A_BIT = 8  # candidates for each bit between two that were measured


@dataclass(frozen=True)
class Transform(Codec):
    """Principal axes, bits by reverse water-filling, rate-distortion optimised rounding.

        minimise   sum_i w_i || (a_i - a^_i) R ||^2      subject to   stored bytes <= budget

    With ``SVD()`` it chooses the rank itself: axes that do not pay get no bits; with ``Flats(k)`` each flat has axes of
    its own, for tables of many hundred times as many rows as columns. Of a metric that couples rows only the diagonal
    is used. Methods that minimise other errors (``Entrywise()``, ``Flats(error=Power(1))``, ...) fit flats of the rank
    that the bytes give bits to, and their own rows are coded. Stored bytes are those of the entropy-coded file; in
    memory codes have a fixed rate, which takes more.

    Args:
        classes: rows are told apart by weight and shape into at most so many classes, 1 to 256, of all flats together
            (each has one at least). Rows so long that their integers would not fit the others' step are classes of
            their own, with coarser steps: they lose about 1e-4 of their length, the others as much as without them.
            With one class the longest row bounds how finely all are coded.

    Choose it wherever bytes on disk count and values are continuous: of those it loses least at every size that is
    measured (benchmarks/results/frontier_error.md). Weights on a grid (ternary, 15 levels) are whole numbers times a
    scale, which turned axes do not keep: ``KeepDense()`` with ``Integer(8)`` loses a fraction of that, and nothing of
    ternary weights. Pruned weights, too, lose less with ``Integer(8)`` in its bytes. ``Auto()`` tries both.
    """

    classes: int = 32

    any_size = True

    def __post_init__(self) -> None:
        if isinstance(self.classes, bool) or not isinstance(self.classes, int) or not 1 <= self.classes <= 256:
            raise KflatsError(f"Transform cannot use {self.classes!r} classes of rows", hint="a whole number, 1 to 256")

    def refusal(self, method: Method) -> tuple[str, str] | None:
        """As ``Codec.refusal``."""
        if method.stores_skeleton:
            return "the interpolative form stores an identity block, which other axes would undo", "SVD()"
        if method.produces == "dense":
            return (
                "Transform chooses axes, and the matrix as it is has none",
                "SVD() as the method: it may use all axes",
            )
        if method.nested_ranks > 1:
            return (
                "bits take the place of nested ranks",
                f"nested_ranks=1, or Integer(8) for {method.nested_ranks} ranks",
            )
        if method.most_classes > 256:
            return "a label is a byte, which tells 256 classes of rows apart", "fewer flats, or a floating-point codec"
        return None

    def replaces_fit(self, method: Method) -> bool:
        """As ``Codec.replaces_fit``: squares are minimised by the code."""
        return method.minimizes_squares

    def accepts(self, method: Method) -> frozenset[str]:
        """As ``Codec.accepts``."""
        return frozenset({"rows", "left", "right"}) if method.minimizes_squares else method.accepts

    def min_bytes(self, method: Method, shape: tuple[int, int], itemsize: int, *, counts_labels: bool = True) -> int:
        """A bound only, with one axis: what classes and distributions need is known after the fit."""
        return HEADER_BYTES + shape[1] + max(64, shape[0] // 64)

    def candidates(self, method: Method, table: Table) -> Iterator[Candidate]:
        """Codes at a few steps, and sizes between each two of them.

        Codes are counted a factor of two apart, where every live coordinate gains or loses about one bit, and farther
        apart where all are live. Between two of them the logarithm of the error is nearly straight in the bytes
        (D ~ 2^(-2 R)), and is taken to be.
        """
        if float(table.spectrum[0]) > 0:
            yield from _between(self._counted(method, table), table.numbers)

    def _counted(self, method: Method, table: Table) -> list[Candidate]:
        size = math.sqrt(float(table.spectrum[0]) / table.numbers)
        counted: list[Candidate] = []
        kind = "relative error" + (
            "" if method.prefix_optimal else " of one flat" if method.produces == "clusters" else " of squares"
        )
        rates = transform_rates(
            table.rows,
            [size * 2.0**-power for power in _POWERS],
            weights=row_weights(table.weighting),
            right=table.weighting.right,
            classes=self.classes,
        )
        for rate in rates:
            if not rate.rank:  # nothing but labels and scales, a size that is not one to ask for
                break
            counted.append(Candidate(method, self, rate.nbytes + HEADER_BYTES, rate.error, error_kind=kind))
        return counted

    def encode(self, method: Method, problem: Problem, dtype: torch.dtype) -> Factored:
        """As ``Codec.encode``; row weights and a right metric count."""
        start = time.perf_counter()
        name = type(self if method.minimizes_squares else method).__name__
        check_accepts(name, self.accepts(method), problem.weighting)
        rounded = (
            _of_rows(method, self, problem, dtype)
            if method.minimizes_squares
            else _of_fit(method, self, problem, dtype)
        )
        return rounded.stored(time.perf_counter() - start)

    @classmethod
    def automatic(cls, shape: tuple[int, int]) -> tuple[tuple[Method, Codec], ...]:
        """One flat, or for long tables as many as lose least: the error of one flat is then a bound."""
        return ((Flats(k=None) if shape[0] >= _LONG * shape[1] else SVD(), cls()),)


@dataclass(frozen=True)
class _Coded:
    """A matrix, and what its code takes without the container of a file."""

    matrix: CodedMatrix
    nbytes: int


def _of_rows(method: Method, codec: Transform, problem: Problem, dtype: torch.dtype) -> Rounded:
    """The code of the rows themselves, on the method's flats; of several numbers of flats the best in turn."""
    weighting = Weighting(left=row_weights(problem.weighting), right=problem.weighting.right)
    rows, problem = problem.rows, replace(problem, weighting=weighting)
    if method.produces == "pair":
        return Rounded(_on_one_flat(rows, codec, problem, dtype))
    first, *others = method.flat_counts()
    best = _on_flats(rows, _labels(method, problem, first), codec, problem, dtype)
    error = weighted_error(rows, best, weighting).error if others else 0.0
    for k in others:
        if rows.shape[0] < 2 * k:
            break
        try:
            matrix = _on_flats(rows, _labels(method, problem, k), codec, problem, dtype)
        except KflatsError:  # so many flats alone need more bytes than there are
            break
        if (less := weighted_error(rows, matrix, weighting).error) >= error:
            break
        best, error = matrix, less
    return Rounded(best)


def _of_fit(method: Method, codec: Transform, problem: Problem, dtype: torch.dtype) -> Rounded:
    """The code of what the method fits, in its flats."""
    method = method.all_in_flats()
    nbytes = method.cost(problem.rows.shape, _rank_in_reach(method, problem, method.flats), 4)
    factored = method.fit(replace(problem, nbytes=nbytes, itemsize=4, free_labels=False))
    rows = MatrixRows(factored.matrix)
    if isinstance(factored.matrix, FlatsMatrix):
        labels = factored.matrix.labels.detach().cpu().to(torch.int64)
        matrix = _on_flats(rows, labels, codec, problem, dtype)
    else:
        matrix = _on_one_flat(rows, codec, problem, dtype)
    return Rounded(matrix, factored.norm, factored.converged)


def _on_one_flat(rows: Rows, codec: Transform, problem: Problem, dtype: torch.dtype) -> CodedMatrix:
    """The code of ``rows`` on one flat."""
    weighting = problem.weighting

    def build(aim: int) -> _Coded:
        code = transform_code(rows, weights=weighting.left, right=weighting.right, nbytes=aim, classes=codec.classes)
        return _Coded(from_transform(code, dtype=dtype), code.stored_bytes)

    return _within(problem, build)


def _on_flats(rows: Rows, labels: Tensor, codec: Transform, problem: Problem, dtype: torch.dtype) -> CodedMatrix:
    """The code of ``rows`` on the flats that ``labels`` tell apart, or fewer where some are given up."""
    weighting = problem.weighting

    def build(aim: int) -> _Coded:
        code = flats_code(
            rows, labels, nbytes=aim, weights=weighting.left, right=weighting.right, classes=codec.classes
        )
        return _Coded(from_flats(code, dtype=dtype), code.stored_bytes)

    return _within(problem, build)


def row_weights(weighting: Weighting) -> Tensor | None:
    """(n,) how much the error of each row counts where errors of different rows do not go together."""
    left = weighting.left
    return left if left is None or left.ndim == 1 else left.diagonal()


def _labels(method: Method, problem: Problem, k: int) -> Tensor:
    """(n,) int64, the flat of each row as the method finds it, at a rank that the bytes can give bits to."""
    n, d = problem.rows.shape
    if k == 1:
        return torch.zeros(n, dtype=torch.int64)
    if n < 2 * k:
        raise KflatsError(f"{k} flats for {n} rows", cause="each takes two rows at least", hint="fewer flats, or SVD()")
    rank = max(1, min(_rank_in_reach(method, problem, k), d // 2))
    room = replace(problem, nbytes=4 * rank * (n + k * d), itemsize=4, free_labels=True)
    matrix = method.with_flats(k).fit(room).matrix
    if not isinstance(matrix, FlatsMatrix):  # one flat holds all rows exactly
        return torch.zeros(n, dtype=torch.int64)
    return matrix.labels.detach().cpu().to(torch.int64)


def _rank_in_reach(method: Method, problem: Problem, k: int) -> int:
    """How many axes get bits in the bytes that there are, by the method's spectrum."""
    n, d = problem.rows.shape
    energies = -method.spectrum(problem.rows, problem.weighting).diff().clamp_max(0.0) / n
    level = water_level(energies, 8 * problem.nbytes / (n * len(energies))) if float(energies.max()) > 0 else 0.0
    return max(1, min(int((energies > level).sum()), d, n // k))


def _within(problem: Problem, build: Callable[[int], _Coded]) -> CodedMatrix:
    """A container and the ends of blocks come on top of a code's own bytes."""
    aim, best, left = problem.nbytes, None, problem.nbytes + 1
    for _ in range(_ATTEMPTS):
        try:
            made = build(aim)
        except KflatsError:
            if aim == problem.nbytes:
                raise
            break  # less than labels and scales need, once the container has its bytes
        over = stored_bytes(made.matrix) - problem.nbytes
        if over <= 0:
            if -over >= left:  # no code lies between
                break
            best, left = made.matrix, -over
            if left <= max(_SLACK * problem.nbytes, _SMALL):
                break
            aim += left
            continue
        # A code may lie anywhere in the last hundredth below its aim: the next must not come out higher in it.
        aim = min(aim - over, made.nbytes) - over // 4 - 1
        if aim < 1:
            break
    if best is not None:
        return best
    raise KflatsError(
        f"a budget of {problem.nbytes:,} bytes cannot hold codes of this matrix",
        cause=f"the container takes {over:,} bytes more",
        hint="a larger budget, or fewer classes",
    )


def _between(measured: Sequence[Candidate], numbers: int) -> list[Candidate]:
    """The measured ones and, between each two, those on the straight line of log errors; ``numbers`` of the matrix."""
    sized = []
    for fine, coarse in pairwise(measured):
        whole = fine.nbytes - coarse.nbytes
        if whole <= 0 or not 0 < fine.error < coarse.error:
            continue
        parts = max(2, round(_SIZES_A_BIT * math.log(coarse.error / fine.error, 4)))
        for part in range(parts):
            share = part / parts
            error = fine.error ** (1 - share) * coarse.error**share
            sized.append(replace(fine, nbytes=fine.nbytes - int(whole * share), error=error))
    sized += list(measured[-1:])
    return [replace(one, note=f"{8 * one.nbytes / numbers:.2f} bits a number") for one in sized]
