"""Transform coding: principal axes, bits by reverse water-filling, rate-distortion optimised rounding.

For methods that minimise squares the code replaces the fit: the method gives the number of flats, and axes, ranks and
bits follow from the bytes. Other methods fit flats whose rank is the number of axes that get bits, and the fitted rows
are coded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from kflats.codecs.protocol import Candidate, Codec, Table
from kflats.codecs.row_scales import HEADER_BYTES
from kflats.codecs.streams import coded
from kflats.common.errors import DoesNotFitError, KflatsError, check_arguments, is_whole
from kflats.importance.protocol import WeightingForm
from kflats.matrices.coded import CodedMatrix, from_integers
from kflats.matrices.flats import FlatsMatrix
from kflats.methods import SVD, Flats
from kflats.methods.matrix_error import weighted_error
from kflats.methods.protocol import Factored, Method, Problem, check_accepts
from kflats.numerics.coding.encode import FlatsCode, TransformCode, transform_code, transform_rates
from kflats.numerics.coding.frame import water_level
from kflats.numerics.coding.quantizers import CONTEXTS_AN_OCTAVE
from kflats.numerics.coding.rounding import scales_of
from kflats.numerics.rows import Rows, TensorRows, check_finite, check_weights

_POWERS = (12, 9, 6, 4, 2, 1, 0, -1, -2)  # binary logarithms of the root mean square of coordinates, in steps
_LONG = 300
"""Rows a column from which several flats pay for their axes: benchmarks/results/coded_flats_long.md."""
_SIZES_A_BIT = 8  # candidates for each bit between two that were measured


@dataclass(frozen=True)
class Transform(Codec):
    """Principal axes, bits by reverse water-filling, rate-distortion optimised rounding.

        minimise   sum_i w_i || (a_i - a^_i) R ||^2      subject to   stored bytes <= budget

    With ``SVD()`` the rank is the number of axes that get bits. With ``Flats(k)`` each flat has its own axes, for
    tables with hundreds of times as many rows as columns. A metric that couples rows is replaced by its diagonal.
    Methods that minimise other errors (``Entrywise()``, ``Flats(error=Power(1))``, ...) fit flats whose rank is the
    number of axes that get bits, and the fitted rows are coded. Stored bytes are those of the entropy-coded file; in
    memory the codes have a fixed rate and take more.

    Args:
        classes: the largest number of classes, 1 to 256, into which the rows of all flats are divided by weight and
            shape; each flat has one at least. Rows that are too long for the common step get classes of their own with
            coarser steps: they lose about 1e-4 of their length, and the other rows lose nothing by them. With one class
            the longest row bounds the precision of all.

    Choose it where bytes on disk count and values are continuous: for those weights it loses least at every measured
    size (benchmarks/results/frontier_error.md). Weights on a grid (ternary, 15 levels) are whole numbers times a scale,
    which turned axes do not keep: ``KeepDense()`` with ``Integer(8)`` loses a fraction of that, and nothing of ternary
    weights. Pruned weights also lose less with ``Integer(8)`` in its bytes. ``Auto()`` tries both.
    """

    classes: int = 32

    any_size = True

    def __post_init__(self) -> None:
        check_arguments(self, classes=(is_whole(self.classes, 1, 256), "1 to 256"))

    def refusal(self, method: Method) -> tuple[str, str] | None:
        """As ``Codec.refusal``."""
        if method.stores_skeleton:
            return (
                "the interpolative form stores an identity block, which other axes would not keep",
                "the form factors",
            )
        if method.produces == "dense":
            return "Transform chooses axes, and the matrix itself has none", "SVD(), which may use all axes"
        if method.nested_ranks > 1:
            hint = f"nested_ranks=1, or Integer(8) for {method.nested_ranks} ranks"
            return "bits take the place of nested ranks", hint
        if method.most_classes > 256:
            return "a label is a byte, for 256 classes of rows", "fewer flats, or a floating-point codec"
        return None

    def replaces_fit(self, method: Method) -> bool:
        """As ``Codec.replaces_fit``: the code minimises squares."""
        return method.minimizes_squares

    def accepts(self, method: Method) -> frozenset[str]:
        """As ``Codec.accepts``."""
        return frozenset({"rows", "left", "right"}) if method.minimizes_squares else method.accepts

    def min_bytes(self, method: Method, shape: tuple[int, int], itemsize: int, *, counts_labels: bool = True) -> int:
        """A bound with one axis: the bytes of classes and distributions are known after the fit."""
        return HEADER_BYTES + shape[1] + max(64, shape[0] // 64)

    def candidates(self, method: Method, table: Table) -> Iterator[Candidate]:
        """Codes at a few steps, and candidates between each two of them.

        Steps are a factor of two apart, where every coordinate with bits gains or loses about one bit, and farther
        apart where all coordinates have bits. Between two steps the logarithm of the error is interpolated linearly in
        the bytes (D ~ 2^(-2 R)).
        """
        if table.total > 0:
            yield from between(self._counted(method, table), table.numbers)

    def _counted(self, method: Method, table: Table) -> list[Candidate]:
        size = math.sqrt(table.total / table.numbers)
        counted: list[Candidate] = []
        kind = "relative error" + (
            "" if method.prefix_optimal else " of one flat" if method.produces == "clusters" else " of squares"
        )
        rates = transform_rates(
            table.rows,
            [size * 2.0**-power for power in _POWERS],
            weights=table.weighting.uncoupled().row_weights,
            right=table.weighting.right,
            classes=self.classes,
        )
        for rate in rates:
            if not len(rate.basis.levels):  # labels and scales alone
                break
            nbytes = math.ceil(rate.size) + HEADER_BYTES
            counted.append(Candidate(method, self, nbytes, rate.error, error_kind=kind))
        return counted

    def encode(self, method: Method, problem: Problem, dtype: torch.dtype) -> Factored:
        """As ``Codec.encode``."""
        name = type(self if method.minimizes_squares else method).__name__
        check_accepts(name, self.accepts(method), problem.weighting)
        encode = _of_rows if method.minimizes_squares else _of_fit
        return encode(method, self, problem, dtype)

    @classmethod
    def automatic(cls, shape: tuple[int, int], form: WeightingForm) -> tuple[tuple[Method, Codec], ...]:
        """One flat; for long tables the number of flats that loses least, whose error one flat's bounds. Nothing where
        rows and columns are coupled: ``Feedback`` then loses less from .5 bits a number on (benchmarks/feedback.py)."""
        if form.left == form.right == "full":
            return ()
        return ((Flats(k=None) if shape[0] >= _LONG * shape[1] else SVD(), cls()),)


def _of_rows(method: Method, codec: Transform, problem: Problem, dtype: torch.dtype) -> Factored:
    """The code of the rows themselves, in the method's flats: of several numbers of flats the one that loses least."""
    problem = replace(problem, weighting=problem.weighting.uncoupled())
    rows, weighting = problem.rows, problem.weighting
    check_finite(rows)
    check_weights(problem.row_weights, rows.shape[0])
    first, *others = method.flat_counts()
    best = _on_flats(rows, _labels(method, problem, first), codec, problem, dtype)
    error = weighted_error(rows, best.matrix, weighting).error if others else 0.0
    for k in others:
        if rows.shape[0] < 2 * k:
            break
        try:
            made = _on_flats(rows, _labels(method, problem, k), codec, problem, dtype)
        except KflatsError:  # mostly, the axes of k flats need more bytes than there are
            break
        if (less := weighted_error(rows, made.matrix, weighting).error) >= error:
            break
        best, error = made, less
    return best


def _of_fit(method: Method, codec: Transform, problem: Problem, dtype: torch.dtype) -> Factored:
    """The code of the rows that the method fits, in its flats."""
    method = method.all_in_flats()
    nbytes = method.cost(problem.rows.shape, _axes_with_bits(method, problem, method.flats), 4)
    fit = method.fit(replace(problem, nbytes=nbytes, itemsize=4, free_labels=False))
    labels = fit.matrix.labels.detach().cpu().to(torch.int64) if isinstance(fit.matrix, FlatsMatrix) else None
    with torch.no_grad():
        rows = TensorRows(fit.matrix.rows(torch.arange(fit.matrix.shape[0], device=fit.matrix.weight.device)))
    made = _on_flats(rows, labels, codec, problem, dtype)
    return replace(made, norm=fit.norm, converged=fit.converged)


def _labels(method: Method, problem: Problem, k: int) -> Tensor:
    """(n,) int64, the flat of each row in a fit of the method whose rank is the number of axes with bits."""
    n, d = problem.rows.shape
    if k == 1:
        return torch.zeros(n, dtype=torch.int64)
    if n < 2 * k:
        raise DoesNotFitError(
            f"{k} flats are not supported with {n} rows", cause="each takes two rows", hint="fewer flats, or SVD()"
        )
    rank = max(1, min(_axes_with_bits(method, problem, k), d // 2))
    room = replace(problem, nbytes=4 * rank * (n + k * d), itemsize=4, free_labels=True)
    matrix = method.with_flats(k).fit(room).matrix
    if not isinstance(matrix, FlatsMatrix):  # one flat holds all rows exactly
        return torch.zeros(n, dtype=torch.int64)
    return matrix.labels.detach().cpu().to(torch.int64)


def _axes_with_bits(method: Method, problem: Problem, k: int) -> int:
    """The number of axes to which reverse water-filling gives bits, by the method's spectrum."""
    n, d = problem.rows.shape
    energies = -method.spectrum(problem.rows, problem.weighting).diff().clamp_max(0.0) / n
    level = water_level(energies, 8 * problem.nbytes / (n * len(energies))) if float(energies.max()) > 0 else 0.0
    return max(1, min(int((energies > level).sum()), d, n // k))


def _on_flats(rows: Rows, labels: Tensor | None, codec: Transform, problem: Problem, dtype: torch.dtype) -> Factored:
    """The code of ``rows`` in the flats that ``labels`` tell apart, or in one flat, whose file takes at most the
    problem's bytes."""
    last: list[tuple[FlatsCode, Factored]] = []

    def size_of(code: FlatsCode) -> int:
        last.clear()  # before memory holds another
        last.append((code, coded(from_codes(code, dtype=dtype))))
        return last[0][1].nbytes

    code = transform_code(
        rows,
        problem.nbytes,
        size_of,
        weights=problem.row_weights,
        right=problem.weighting.right,
        classes=codec.classes,
        labels=labels,
    )
    return next((made for tried, made in last if tried is code), None) or coded(from_codes(code, dtype=dtype))


def from_codes(code: FlatsCode, *, dtype: torch.dtype = torch.float32) -> CodedMatrix:
    """The matrix of a code: the classes of all flats, one after the other. Steps and other floats become ``dtype``.

    Raises:
        KflatsError: steps that ``dtype`` cannot hold; more than 256 classes.
    """
    codes = code.codes
    rank = max(one.rank for one in codes)
    steps, scales = torch.cat([one.steps for one in codes]), torch.cat([one.basis_scale for one in codes])
    shift = _balance(steps, scales)
    held, held_scales = scales_of(steps * shift, dtype), scales_of(scales / shift, dtype)
    labels, first = torch.empty(len(code.flats), dtype=torch.int64), 0
    for flat, one in enumerate(codes):
        labels[code.flats == flat] = one.labels.to(torch.int64) + first
        first += len(one.levels)
    contexts, shrink = _common_contexts(codes)

    def wide(values: Tensor) -> Tensor:
        return values if values.shape[1] == rank else F.pad(values, (0, rank - values.shape[1]))

    return from_integers(
        [wide(levels) for one in codes for levels in one.levels],
        labels,
        held.values,
        centers=torch.cat([wide(one.centers) for one in codes]),
        contexts=torch.cat([wide(of) for of in contexts]).to(torch.uint8),
        shrink=shrink.to(dtype),
        basis=torch.cat([one.basis for one in codes]),
        basis_scale=held_scales.values,
        flats=tuple((len(one.levels), one.rank) for one in codes) if len(codes) > 1 else (),
        unit=held.unit + held_scales.unit,
    )


def _balance(steps: Tensor, scales: Tensor) -> float:
    """The power of two by which steps grow and scales of the basis shrink, so that both have about one magnitude.

    The matrix depends on their product only. In units of a loss the steps may be 1e-8 and the scales 1e4; float16 holds
    neither.
    """
    middles = []
    for values in (steps, scales):
        live = values[values > 0].to(torch.float64).log2()
        if not live.numel():
            return 1.0
        middles.append((float(live.min()) + float(live.max())) / 2)
    return float(2.0 ** round((middles[1] - middles[0]) / 2))


def _common_contexts(codes: Sequence[TransformCode]) -> tuple[Sequence[Tensor], Tensor]:
    """The contexts of each code among distributions of all codes, those of like mean magnitude as one; their shrink."""
    if len(codes) == 1:
        return [codes[0].contexts], codes[0].shrink
    shrink = torch.cat([code.shrink for code in codes]).to(torch.float64)
    firsts = [0, *accumulate(len(code.shrink) for code in codes)]
    own = [code.contexts.to(torch.int64) + first for code, first in zip(codes, firsts, strict=False)]
    sums = torch.zeros(3, len(shrink), dtype=torch.float64)
    for code, contexts in zip(codes, own, strict=True):
        for levels, of in zip(code.levels, contexts, strict=True):
            size = levels.abs()
            rows = torch.full((len(of),), len(levels), dtype=torch.float64)
            counts = size.sum(0, dtype=torch.float64), (size > 0).sum(0, dtype=torch.float64), rows
            sums.index_add_(1, of, torch.stack(counts))
    total, live, cells = sums
    octaves = ((total / cells.clamp_min(1.0)).clamp_min(1e-30).log2() * CONTEXTS_AN_OCTAVE).floor()
    used, common = torch.unique(torch.where(live > 0, octaves, -math.inf), return_inverse=True)
    pooled = torch.zeros(2, len(used), dtype=torch.float64).index_add_(1, common, torch.stack([shrink * live, live]))
    return [common[contexts] for contexts in own], (pooled[0] / pooled[1].clamp_min(1.0)).to(torch.float32)


def between(measured: Sequence[Candidate], numbers: int) -> list[Candidate]:
    """The measured candidates, and others on the line of log errors between each two; ``numbers``: of the matrix."""
    candidates = []
    for fine, coarse in pairwise(measured):
        whole = fine.nbytes - coarse.nbytes
        if whole <= 0 or not 0 < fine.error < coarse.error:
            continue
        parts = max(2, round(_SIZES_A_BIT * math.log(coarse.error / fine.error, 4)))
        for part in range(parts):
            share = part / parts
            error = fine.error ** (1 - share) * coarse.error**share
            candidates.append(replace(fine, nbytes=fine.nbytes - int(whole * share), error=error))
    candidates += list(measured[-1:])
    return [replace(one, note=f"{8 * one.nbytes / numbers:.2f} bits a number") for one in candidates]
