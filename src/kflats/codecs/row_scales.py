"""Integers with a scale for each row, or each group of columns of a row: ``Integer`` and the base of such codecs.

They round coordinates in flats, in the order in which a ``CodedMatrix`` stores them (``ClusterCoordinates``).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kflats.codecs.protocol import Candidate, Codec, Table
from kflats.codecs.streams import coded
from kflats.common.errors import KflatsError, check_arguments, is_whole
from kflats.importance.protocol import WeightingForm
from kflats.matrices.coded import MAX_CLASSES, CodedMatrix, from_integers
from kflats.matrices.flats import FlatsMatrix, tables_of
from kflats.matrices.registry import LowRankMatrix, Matrix
from kflats.methods import SVD, KeepDense
from kflats.methods.matrix_error import weighted_error
from kflats.methods.protocol import Factored, Method, Problem, largest_rank, refuse_bytes
from kflats.numerics.coding.rounding import RoundedRows, absmax_code, rounded_basis
from kflats.numerics.rows import Rows, TensorRows, check_finite


@dataclass(frozen=True)
class ClusterCoordinates:
    """Rows of class c are ``tables[c]`` (n_c, r_c) times the first r_c rows of ``bases[flat_of[c]]``.

    ``labels``: (n,) int64, the class of each row; inside a class rows stand by row number. ``flat_of``: ascending, a
    flat or more for each class. ``bases``: of each flat (r, d), orthonormal. All in float64.
    """

    labels: Tensor
    tables: tuple[Tensor, ...]
    flat_of: tuple[int, ...]
    bases: tuple[Tensor, ...]

    @property
    def rank(self) -> int:
        """The largest rank of all flats."""
        return max(len(basis) for basis in self.bases)

    @property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """(classes, rank) of each flat; empty if all classes share one basis."""
        if len(self.bases) == 1:
            return ()
        return tuple((self.flat_of.count(flat), len(basis)) for flat, basis in enumerate(self.bases))

    @property
    def are_full(self) -> bool:
        """Whether no flat can have a larger rank."""
        rows = torch.bincount(torch.tensor(self.flat_of)[self.labels], minlength=len(self.bases)).tolist()
        return all(len(basis) >= min(basis.shape[1], count) for basis, count in zip(self.bases, rows, strict=True))

    def first(self, rank: int) -> ClusterCoordinates:
        """The first ``rank`` coordinates of every row: the best of that rank for methods with optimal prefixes."""
        kept = tuple(part[:, :rank] for part in self.tables)
        return ClusterCoordinates(self.labels, kept, self.flat_of, tuple(basis[:rank] for basis in self.bases))


def cluster_coordinates(matrix: Matrix) -> ClusterCoordinates:
    """The same rows in orthonormal bases, from a low-rank pair or flats.

    For an oblique basis T Q with T lower triangular, every prefix of Q spans the rows of the same prefix of T Q.

    Raises:
        KflatsError: a matrix of another kind, or one that keeps rows exactly.

    >>> pair = cluster_coordinates(LowRankMatrix(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0]])))
    >>> (pair.tables[0] @ pair.bases[0]).round(decimals=6).tolist(), round(float(pair.bases[0].norm()), 6)
    ([[3.0, 4.0], [6.0, 8.0]], 1.0)
    """
    flat_of: tuple[int, ...]
    bases: Sequence[Tensor]
    if isinstance(matrix, LowRankMatrix):
        labels, tables, flat_of = torch.zeros(matrix.shape[0], dtype=torch.int64), [matrix.weight.detach()], (0,)
        bases = [matrix.basis]
    elif isinstance(matrix, FlatsMatrix) and all(band.flat is not None for band in matrix.bands):
        labels, tables = matrix.labels.cpu().to(torch.int64), tables_of(matrix.weight.detach(), matrix.bands)
        flat_of = tuple(band.flat for band in matrix.bands if band.flat is not None)
        bases = torch.split(matrix.basis, list(matrix.flat_ranks))
    else:
        raise KflatsError(
            f"a matrix of kind {matrix.kind!r} cannot be coded in flats",
            cause="some of its rows have no coordinates in a flat",
            hint="Float(), or a method whose rows are all in flats",
        )
    turned = [torch.linalg.qr(basis.detach().cpu().to(torch.float64).T) for basis in bases]
    coordinates = [
        table.cpu().to(torch.float64) @ turned[flat][1].T[: table.shape[1], : table.shape[1]]
        for table, flat in zip(tables, flat_of, strict=True)
    ]
    return ClusterCoordinates(labels, tuple(coordinates), flat_of, tuple(q.T.contiguous() for q, _ in turned))


HEADER_BYTES = 160
"""Bytes of a stream's header, at most."""
_BASIS_HEADER_BYTES = 400
"""The same for a stream with a basis, whose rows have distributions of their own."""
_FITS = 5
"""Fits until the codes fill the bytes: the size of codes in a file, and of flats of different ranks, is known
afterwards."""
_SPENT_SHARE = 0.9
"""Share of the spare bytes that the next fit is given: a fit that is one byte too large is discarded."""
_NOISE = 1e-6
"""Coordinates below this share of the largest ones are rounding: fits are in float32."""
_SLACK = 0.01
"""Share of the bytes that may stay unused."""


class RowScaleCodec(Codec, Protocol):
    """Integers times a scale of their row, or of a group of its columns.

    A subclass has ``bits`` and ``rounded``, and ``groups`` if a row has several scales. With ``KeepDense()`` the rows
    of the matrix itself are rounded. With any other method the coordinates in its flats are rounded: each column is
    first divided by its size, by which the rows of the bases are multiplied; bases have 8 bits.
    """

    bits: int
    """Bits of one integer."""

    def groups(self, columns: int) -> int:
        """The number of scales in a row with this number of columns."""
        return 1

    @abstractmethod
    def rounded(self, rows: Rows, dtype: torch.dtype) -> RoundedRows:
        """The integers and scales of all rows; scales as ``dtype``."""

    # Sizes ------------------------------------------------------------------------------------------

    def memory_bytes(self, shape: tuple[int, int], itemsize: int, rank: int | None = None, flats: int = 1) -> int:
        """Bytes in memory of an (n, d) matrix.

        Args:
            itemsize: bytes of a scale.
            rank: of every flat; None: of the matrix itself.
            flats: how many there are.
        """
        n, d = shape
        r = d if rank is None else rank
        labels, layout = n if flats > 1 else 0, 6 * flats * r + itemsize
        table = n * (self.groups(r) * itemsize + -(-r * self.bits // 8)) + labels + layout
        return table if rank is None else table + flats * rank * (d + itemsize)

    def min_bytes(self, method: Method, shape: tuple[int, int], itemsize: int, *, counts_labels: bool = True) -> int:
        """As ``Codec.min_bytes``, with the header of a file, which is most of a small one."""
        rank = None if method.produces == "dense" else 1
        return self.memory_bytes(shape, itemsize, rank, method.flats) + _BASIS_HEADER_BYTES

    def fixed_bytes(self, method: Method, shape: tuple[int, int], itemsize: int) -> int | None:
        """As ``Codec.fixed_bytes``: the codes of the matrix itself have one size."""
        if method.produces != "dense":
            return None
        return self.memory_bytes(shape, itemsize) + shape[0] * shape[1] // 2**14 + HEADER_BYTES

    def refusal(self, method: Method) -> tuple[str, str] | None:
        """As ``Codec.refusal``."""
        if method.stores_skeleton:
            return (
                "the interpolative form stores an identity block, which would be rounded with its columns",
                "the form factors",
            )
        if method.most_classes > MAX_CLASSES:
            cause = f"a label is a byte, for {MAX_CLASSES} classes of rows, and there may be {method.most_classes}"
            return cause, "fewer flats or nested ranks, or a floating-point codec"
        return None

    # Candidates -------------------------------------------------------------------------------------

    def candidates(self, method: Method, table: Table) -> Iterator[Candidate]:
        """As ``Codec.candidates``: the code of the matrix itself, or of flats of every rank."""
        if method.produces != "dense":
            yield from self._ranks(method, table)
            return
        problem = Problem(table.rows, table.nbytes, table.dtype.itemsize, table.weighting)
        try:
            stored = self.encode(method, problem, table.dtype)
        except KflatsError:  # the scales of a small matrix may take more bytes than the matrix
            return
        error = weighted_error(table.rows, stored.matrix, table.weighting, table.total).error
        yield Candidate(method, self, stored.nbytes, error, f"{8 * stored.nbytes / table.numbers:.2f} bits a number")

    def _ranks(self, method: Method, table: Table) -> Iterator[Candidate]:
        """A candidate for every rank: its error is that of a pair, and that of rounding the rest."""
        shape, itemsize, spectrum = table.rows.shape, table.dtype.itemsize, table.spectrum
        kind = "relative error" if method.prefix_optimal else "relative error of an SVD"
        least, total, share = self.min_bytes(method, shape, itemsize), float(spectrum[0]), self._lost(method, table)
        for rank in range(1, min(shape) + 1):
            nbytes = self.memory_bytes(shape, itemsize, rank, method.flats) + HEADER_BYTES
            if nbytes >= least:  # otherwise a fit might be refused
                error = float(spectrum[rank]) + share * (total - float(spectrum[rank]))
                note = f"rank {rank} of {min(shape)}, {self.bits} bits a number"
                yield Candidate(method, self, nbytes, error, note, kind)

    def _lost(self, method: Method, table: Table) -> float:
        """The share of the energy kept by a rank that rounding loses, measured on an SVD of all ranks."""
        if table.total <= 0:
            return 0.0
        shape, itemsize = table.rows.shape, table.dtype.itemsize
        # The room is doubled because the header is most of a small file.
        room = 2 * (self.memory_bytes(shape, itemsize, min(shape)) + self.min_bytes(method, shape, itemsize))
        stored = self.encode(SVD(), Problem(table.rows, room, itemsize, table.weighting), table.dtype)
        return min(1.0, weighted_error(table.rows, stored.matrix, table.weighting, table.total).relative)

    # Encoding ---------------------------------------------------------------------------------------

    def encode(self, method: Method, problem: Problem, dtype: torch.dtype) -> Factored:
        """As ``Codec.encode``."""
        if method.produces != "dense":
            return self._encode_flats(method.all_in_flats(), problem, dtype)
        check_finite(problem.rows)
        code = self.rounded(problem.rows, dtype)
        scales = code.scales
        matrix = from_integers(
            [code.levels], None, scales.values, scales="row", groups=scales.values.shape[1], unit=scales.unit
        )
        # The file may be smaller than the codes in memory, or larger by its header.
        result = coded(matrix)
        if result.nbytes > problem.nbytes:
            raise refuse_bytes(problem, result.nbytes, f"{self.bits} bits a number")
        return result

    def _encode_flats(self, method: Method, problem: Problem, dtype: torch.dtype) -> Factored:
        """The code of one or several flats: fits with more or fewer numbers, until their codes fill the bytes."""
        shape, itemsize, k, budget = problem.rows.shape, dtype.itemsize, method.flats, problem.nbytes

        def memory(rank: int) -> int:
            return self.memory_bytes(shape, itemsize, rank, k)

        full = largest_rank(memory, min(shape), budget)
        numbers_a_rank = shape[0] + k * shape[1]
        step = numbers_a_rank if method.equal_ranks else 1
        numbers = max(1, full) * numbers_a_rank
        # The price of a number is a mean over several ranks: with codes of 4 bits every other rank takes no more bytes.
        few, many = max(1, full // 2), max(2, full)
        more = memory(many) if many <= min(shape) else 2 * memory(1)
        price = max(1.0, (more - memory(few)) / (many - few)) / numbers_a_rank
        # In a search of the number of flats labels count as numbers, because one flat has none.
        free_labels = len(method.flat_counts()) == 1

        def size_of(result: Factored) -> int:
            # A file of rank 1 may fit where its codes in memory do not: then only the file's bytes count.
            return max(result.nbytes, result.matrix.nbytes) if full else result.nbytes

        best: Factored | None = None
        too_large: Factored | None = None  # the smallest fit whose codes are too large
        low, high, size, fullest, excesses, still = 0, math.inf, 0, -1, 0, 0
        for _ in range(_FITS):
            fit = method.fit(replace(problem, nbytes=numbers, itemsize=1, free_labels=free_labels))
            coordinates = cluster_coordinates(fit.matrix)
            result = coded(self._round_coordinates(coordinates, dtype), fit)
            before, size = size, size_of(result)
            spare = budget - size
            if spare < 0:
                high, too_large, excesses = numbers, fit, excesses + 1
            else:
                low = numbers
                if size > fullest:
                    best, fullest = result, size
                still = still + 1 if size == before else 0
                if spare <= _SLACK * budget or still == 2 or (still and coordinates.are_full):
                    break
            # The price is a guess: fewer numbers are added than it allows, and each time more are taken away.
            wanted = numbers + (_SPENT_SHARE * spare if spare > 0 else 2**excesses * spare) / price
            if not low < wanted < high:
                wanted = (low + high) / 2
            steps = int(wanted // step) if spare > 0 else min(int(wanted // step), numbers // step - 1)
            if not max(low, numbers_a_rank - 1) < steps * step < high:
                break
            numbers = steps * step
        if best is None and too_large is not None:
            # The largest rank to which the smallest fit can be cut, so that its codes fit.
            coordinates = cluster_coordinates(too_large.matrix)

            def cut(rank: int) -> Factored:
                return coded(self._round_coordinates(coordinates.first(rank), dtype), too_large)

            fitting = bisect_right(range(1, coordinates.rank), budget, key=lambda rank: size_of(cut(rank)))
            best = cut(fitting) if fitting else None
        if best is None:
            raise refuse_bytes(problem, max(size, memory(1)), f"{k} flat{'s' * (k > 1)} of rank 1")
        return best

    def _round_coordinates(self, coordinates: ClusterCoordinates, dtype: torch.dtype) -> CodedMatrix:
        if not coordinates.rank:
            raise KflatsError("a matrix of zeros cannot be coded in flats", hint="KeepDense()")
        sizes = [_sizes(coordinates, flat) for flat in range(len(coordinates.bases))]
        whole = torch.zeros(len(coordinates.labels), coordinates.rank, dtype=torch.float32)
        members = [(coordinates.labels == c).nonzero().squeeze(1) for c in range(len(coordinates.tables))]
        for rows, table, flat in zip(members, coordinates.tables, coordinates.flat_of, strict=True):
            rank = table.shape[1]
            whole[rows, :rank] = (table / sizes[flat][:rank]).to(torch.float32)
        code = self.rounded(TensorRows(whole), dtype)
        scaled = [basis * size.unsqueeze(1) for basis, size in zip(coordinates.bases, sizes, strict=True)]
        basis = rounded_basis(torch.cat(scaled), dtype)
        return from_integers(
            [code.levels[rows] for rows in members],
            coordinates.labels,
            code.scales.values,
            scales="row",
            groups=code.scales.values.shape[1],
            basis=basis.levels,
            basis_scale=basis.scales.values,
            flats=coordinates.layout,
            unit=code.scales.unit + basis.scales.unit,
        )


def _sizes(coordinates: ClusterCoordinates, flat: int) -> Tensor:
    """(r,) the root mean square of each coordinate of a flat over the rows that have it; 1, so that it is rounded to 0,
    where that is 0 or the rounding of the others."""
    sums, counts = torch.zeros(2, len(coordinates.bases[flat]), dtype=torch.float64)
    for table, of in zip(coordinates.tables, coordinates.flat_of, strict=True):
        if of == flat:
            sums[: table.shape[1]] += table.square().sum(0)
            counts[: table.shape[1]] += len(table)
    size = (sums / counts.clamp_min(1.0)).sqrt()
    return torch.where(size > _NOISE * size.max(), size, torch.ones_like(size)) if len(size) else size


@dataclass(frozen=True)
class Integer(RowScaleCodec):
    """Integers of ``bits`` bits and a scale for each row, or for every ``group`` columns of it.

        a_ij  ~  scale_ig q_ij,      |q_ij| <= 2^(bits - 1) - 1,      scale_ig = max_j |a_ij| / (2^(bits - 1) - 1)

    With ``KeepDense()`` the matrix itself is rounded: at 8 bits it is nearly lossless and takes a little over a quarter
    of float32. With any other method the coordinates in its flats are rounded, each column divided by its size, and the
    bases have 8 bits. With ``Flats`` all rows are rounded, and none is kept exactly.

    Args:
        bits: 2 to 8.
        group: None: one scale a row. Otherwise a scale for each group of this number of columns; the last group may
            have fewer. 8 bits need no groups; 4 bits need groups of 32 to 128.

    Choose 8 bits where nothing may be lost and a quarter of float32 is small enough. At fewer bits ``Transform`` is
    smaller at equal error for weights with a smooth distribution; for weights on a grid (ternary, 15 levels, pruned)
    integers whose grid is that of the weights are lossless and smaller.

    >>> Integer(bits=8).groups(384), Integer(4, group=64).groups(384), Integer(8, group=64).groups(100)
    (1, 6, 2)
    >>> Integer(8).memory_bytes((100, 8), 4), Integer(8).memory_bytes((100, 8), 4, rank=2, flats=2)
    (1252, 776)
    """

    bits: int = 8
    group: int | None = None

    def __post_init__(self) -> None:
        whole = "a number of columns from 1, or no group for whole rows"
        check_arguments(self, bits=(is_whole(self.bits, 2, 8), "2 to 8"))
        check_arguments(self, group=(self.group is None or is_whole(self.group, 1), whole))

    def groups(self, columns: int) -> int:
        """The number of scales in a row with this number of columns."""
        return 1 if self.group is None else -(-columns // self.group)

    def rounded(self, rows: Rows, dtype: torch.dtype) -> RoundedRows:
        """As ``RowScaleCodec.rounded``."""
        return absmax_code(rows, self.bits, self.groups(rows.shape[1]), dtype)

    @classmethod
    def automatic(cls, shape: tuple[int, int], form: WeightingForm) -> tuple[tuple[Method, Codec], ...]:
        """The matrix itself in 8 and in 4 bits."""
        return (KeepDense(), cls(8)), (KeepDense(), cls(4, group=64))
