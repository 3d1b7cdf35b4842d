"""Codecs of a fixed rate: every number has the same bits in memory, and entropy coding makes files smaller.

The method fits floating-point numbers, as many as the bytes hold codes; then its coordinates are rounded. Codes have
two sizes: *fixed* bytes in memory, and *stored* bytes in a file, after entropy coding. A budget counts stored bytes;
rank and bits are chosen by fixed bytes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kflats.codecs.cluster_coordinates import ClusterCoordinates, cluster_coordinates
from kflats.codecs.protocol import Candidate, Codec, Table
from kflats.codecs.streams import stored_bytes
from kflats.common.errors import KflatsError
from kflats.matrices.coded import CodedMatrix
from kflats.matrices.coded_geometry import MAX_CLASSES, CodedGeometry
from kflats.methods.matrix_error import weighted_error
from kflats.methods.problem import Factored, Problem, refuse_bytes
from kflats.methods.protocol import Method, largest_rank
from kflats.numerics.rows import Rows

HEADER_BYTES = 160
"""Bytes of a stream's header, at most."""
BASIS_HEADER_BYTES = 400
"""The same for a stream with a basis, whose rows have distributions of their own."""
_FITS = 5
"""Fits of several flats until their codes fill the bytes: the size of flats of different ranks is known afterwards."""
_SPENT_SHARE = 0.9
"""Share of the spare bytes that the next fit is given: a fit that is one byte too large is discarded."""
_SLACK = 0.01
"""Share of the bytes that may stay unused."""


@dataclass(frozen=True)
class Layout:
    """The layout of codes: bits a number, scales a row, and values in a table of levels (0: no table)."""

    bits: int
    groups: int = 1
    levels: int = 0


class FixedRateCodec(Codec, Protocol):
    """Integers of a fixed rate; a subclass lays out and rounds the numbers."""

    @property
    @abstractmethod
    def bits_per_number(self) -> int:
        """Bits of one code."""

    @abstractmethod
    def layout(self, columns: int) -> Layout:
        """The layout of rows with this number of columns."""

    @abstractmethod
    def round_rows(self, rows: Rows, dtype: torch.dtype, seed: int) -> CodedMatrix:
        """All numbers of the matrix itself; scales as ``dtype``."""

    @abstractmethod
    def round_coordinates(self, coordinates: ClusterCoordinates, dtype: torch.dtype, seed: int) -> CodedMatrix:
        """Coordinates in flats; scales as ``dtype``."""

    @abstractmethod
    def rounding_share(self, method: Method, table: Table) -> float:
        """The share of the energy kept by a rank that rounding loses."""

    def choices(self) -> tuple[FixedRateCodec, ...]:
        """The codecs with a number of bits from which the budget chooses, most bits first."""
        return (self,)

    # Sizes ------------------------------------------------------------------------------------------

    def memory_bytes(self, shape: tuple[int, int], itemsize: int, rank: int | None = None, flats: int = 1) -> int:
        """Bytes in memory of an (n, d) matrix.

        Args:
            itemsize: bytes of a scale.
            rank: of every flat; None: of the matrix itself.
            flats: how many there are, of equal numbers of rows.
        """
        n, d = shape
        r = d if rank is None else rank
        layout = self.layout(r)
        geometry = CodedGeometry(
            shape,
            r,
            tuple((n * (c + 1) // flats - n * c // flats, -(-r * layout.bits // 8)) for c in range(flats)),
            levels=layout.levels,
            scales="row",
            groups=layout.groups,
            basis="int8" if rank is not None or layout.levels else "identity",
            flats=((1, r),) * flats if flats > 1 else (),
        )
        total = 0
        for name, size in geometry.shapes.items():
            kind = geometry.dtype_of(name, torch.float32)
            total += math.prod(size) * (itemsize if kind.is_floating_point else kind.itemsize)
        return total

    def rank_within(self, nbytes: int, shape: tuple[int, int], itemsize: int, flats: int = 1) -> int:
        """The largest rank whose codes take at most ``nbytes`` in memory, 0 if there is none."""
        return largest_rank(lambda rank: self.memory_bytes(shape, itemsize, rank, flats), min(shape), nbytes)

    def min_bytes(self, method: Method, shape: tuple[int, int], itemsize: int, *, counts_labels: bool = True) -> int:
        """As ``Codec.min_bytes``, with the header of a file, which is most of a small one."""
        if method.produces == "dense":
            return self.choices()[-1].memory_bytes(shape, itemsize) + BASIS_HEADER_BYTES
        return self.choices()[0].memory_bytes(shape, itemsize, 1, method.flats) + BASIS_HEADER_BYTES

    def fixed_bytes(self, method: Method, shape: tuple[int, int], itemsize: int) -> int | None:
        """As ``Codec.fixed_bytes``: the codes of the matrix itself have one size."""
        if method.produces != "dense" or len(self.choices()) > 1:
            return None
        header = BASIS_HEADER_BYTES if self.layout(shape[1]).levels else HEADER_BYTES
        return self.memory_bytes(shape, itemsize) + shape[0] * shape[1] // 2**14 + header

    def refusal(self, method: Method) -> tuple[str, str] | None:
        """As ``Codec.refusal``."""
        if method.stores_skeleton:
            return (
                "the interpolative form stores an identity block, which would be rounded with its columns",
                "SVD()",
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
        error = weighted_error(table.rows, stored.matrix, table.weighting).error
        yield Candidate(method, self, stored.nbytes, error, f"{8 * stored.nbytes / table.numbers:.2f} bits a number")

    def _ranks(self, method: Method, table: Table) -> Iterator[Candidate]:
        """A candidate for every rank: its error is that of a pair, and that of rounding the rest."""
        shape, itemsize, spectrum = table.rows.shape, table.dtype.itemsize, table.spectrum
        kind = "relative error" if method.prefix_optimal else "relative error of an SVD"
        least, total = self.min_bytes(method, shape, itemsize), float(spectrum[0])
        sized: list[Candidate] = []
        for codec in reversed(self.choices()):
            share = codec.rounding_share(method, table)
            for rank in range(1, min(shape) + 1):
                nbytes = codec.memory_bytes(shape, itemsize, rank, method.flats) + HEADER_BYTES
                if nbytes < least:
                    continue  # a fit might be refused
                error = float(spectrum[rank]) + share * (total - float(spectrum[rank]))
                note = f"rank {rank} of {min(shape)}, {codec.bits_per_number} bits a number"
                sized.append(Candidate(method, self, nbytes, error, note, kind))
        yield from sorted(sized, key=lambda candidate: candidate.nbytes)

    # Encoding ---------------------------------------------------------------------------------------

    def encode(self, method: Method, problem: Problem, dtype: torch.dtype) -> Factored:
        """As ``Codec.encode``."""
        if method.produces == "dense":
            return self._encode_rows(problem, dtype)
        codec = self._best_bits(method, problem, dtype)
        if method.produces == "pair":
            return _encode_pair(codec, method, problem, dtype)
        return _encode_clusters(codec, method.all_in_flats(), problem, dtype)

    def _best_bits(self, method: Method, problem: Problem, dtype: torch.dtype) -> FixedRateCodec:
        """The codec with the bits a number at which the truncation to a rank and rounding lose least together.

            minimise over b   E_r(b) + D_b (E_0 - E_r(b)),     r(b) the largest rank in the bytes,   D_b of rounding

        E_r is the method's ``spectrum``. For several flats it is that of one flat: they lose less at every b.
        """
        choices = self.choices()
        if len(choices) == 1:
            return self
        table = Table(problem.rows, problem.weighting, dtype, method.spectrum(problem.rows, problem.weighting))

        def loss(codec: FixedRateCodec) -> float:
            rank = codec.rank_within(problem.nbytes, problem.rows.shape, dtype.itemsize, method.flats)
            truncated = float(table.spectrum[rank])
            return truncated + codec.rounding_share(method, table) * (float(table.spectrum[0]) - truncated)

        return min(reversed(choices), key=loss)

    def _encode_rows(self, problem: Problem, dtype: torch.dtype) -> Factored:
        choices = self.choices()
        for codec in choices:
            last = codec is choices[-1]
            if not last and codec.memory_bytes(problem.rows.shape, dtype.itemsize) > problem.nbytes:
                continue
            # The file may be smaller than the codes in memory, or larger by its header.
            result = coded(codec.round_rows(problem.rows, dtype, problem.seed))
            if result.nbytes <= problem.nbytes:
                return result
        raise refuse_bytes(problem, result.nbytes, f"{choices[-1].bits_per_number} bits a number")


def coded(matrix: CodedMatrix, fit: Factored | None = None) -> Factored:
    """The result of ``Codec.encode``: the code of a ``fit``, or of the rows themselves."""
    norm, converged = (None, True) if fit is None else (fit.norm, fit.converged)
    return Factored(matrix, norm=norm, stored_bytes=stored_bytes(matrix), converged=converged)


def _encode_pair(codec: FixedRateCodec, method: Method, problem: Problem, dtype: torch.dtype) -> Factored:
    """The code of a pair, whose rank falls until its file fits: only the file's header is unknown beforehand."""
    shape, itemsize = problem.rows.shape, dtype.itemsize
    # A file of rank 1 may fit where its codes in memory do not.
    rank = max(1, codec.rank_within(problem.nbytes, shape, itemsize))
    fit: Factored | None = None
    while True:
        if fit is None or not method.prefix_optimal:
            fit = method.fit(replace(problem, nbytes=method.cost(shape, rank, 4), itemsize=4))
            coordinates = cluster_coordinates(fit.matrix)
        result = coded(codec.round_coordinates(coordinates.first(rank), dtype, problem.seed), fit)
        if result.nbytes <= problem.nbytes:
            return result
        if rank == 1:
            raise refuse_bytes(problem, result.nbytes, "1 flat of rank 1")
        # The header shrinks with the rank: rank 1 may fit where no rank seems to.
        over = result.nbytes - problem.nbytes
        fitting = codec.rank_within(codec.memory_bytes(shape, itemsize, rank) - over, shape, itemsize)
        rank = min(rank - 1, max(1, fitting))


def _encode_clusters(codec: FixedRateCodec, method: Method, problem: Problem, dtype: torch.dtype) -> Factored:
    """The code of several flats: fits with more or fewer numbers, until their codes fill the bytes."""
    shape, itemsize, k = problem.rows.shape, dtype.itemsize, method.flats
    rank = codec.rank_within(problem.nbytes, shape, itemsize, k)
    what, least = f"{k} flat{'s' * (k > 1)} of rank 1", codec.memory_bytes(shape, itemsize, 1, k)
    # A file of rank 1 may fit where its codes in memory do not: then only the file's bytes count.
    file_only = not rank

    def size_of(result: Factored) -> int:
        return result.nbytes if file_only else max(result.nbytes, result.matrix.nbytes)

    rank = max(1, rank)
    numbers_a_rank = shape[0] + k * shape[1]
    # The price is a mean over several ranks: with codes of 4 bits every other rank takes no more bytes.
    low, high = max(1, rank // 2), max(2, rank)
    more = codec.memory_bytes(shape, itemsize, high, k) if high <= min(shape) else 2 * least
    price = max(1.0, (more - codec.memory_bytes(shape, itemsize, low, k)) / (high - low))
    step = numbers_a_rank if method.equal_ranks else 1
    search = _Search(rank * numbers_a_rank, price / numbers_a_rank, step, problem.nbytes)
    best: Factored | None = None
    smallest: Factored | None = None  # of the fits whose codes are too large
    searches_flats = len(method.flat_counts()) > 1
    for _ in range(_FITS):
        # In a search of the number of flats labels count as numbers, because one flat has none.
        fit = method.fit(replace(problem, nbytes=search.numbers, itemsize=1, free_labels=not searches_flats))
        result = coded(codec.round_coordinates(cluster_coordinates(fit.matrix), dtype, problem.seed), fit)
        size = size_of(result)
        if search.took_(size):
            best = result
        elif size > problem.nbytes and (smallest is None or search.numbers == search.high):
            smallest = fit
        if not search.moves_(numbers_a_rank):
            break
    if best is None and smallest is not None:
        # The largest rank to which the smallest fit can be cut, so that its codes fit.
        coordinates = cluster_coordinates(smallest.matrix)
        fits, over = 0, coordinates.rank
        while over - fits > 1:
            rank = (fits + over) // 2
            result = coded(codec.round_coordinates(coordinates.first(rank), dtype, problem.seed), smallest)
            if size_of(result) <= problem.nbytes:
                fits, best = rank, result
            else:
                over = rank
    if best is None:
        raise refuse_bytes(problem, max(search.size, least), what)
    return best


@dataclass
class _Search:
    """A search of how many ``numbers``, in whole ``step``s, take at most ``nbytes``.

    Args:
        price: the bytes of one number, about.
    """

    numbers: int
    price: float
    step: int
    nbytes: int
    size: int = 0  # of the last codes
    low: int = 0  # numbers whose codes fit
    high: int | None = None  # numbers whose codes are too large
    fullest: int = -1
    pushes: int = 0

    def took_(self, size: int) -> bool:
        """Enter the size of the last codes; whether they are the best so far."""
        same = size == self.size
        self.size = size
        if size > self.nbytes:
            self.high, self.pushes = self.numbers, self.pushes + 1
            return False
        # More numbers made no difference: every flat has its full rank.
        self.low, self.high = self.numbers, self.numbers if same else self.high
        better, self.fullest = size > self.fullest, max(size, self.fullest)
        return better

    def moves_(self, least: int) -> bool:
        """Change ``numbers`` to fill the bytes better; False where no other number can."""
        spare = self.nbytes - self.size
        if 0 <= spare <= _SLACK * self.nbytes:
            return False
        # The price is a guess: fewer numbers are added than it allows, and each time more are taken away.
        wanted = self.numbers + (_SPENT_SHARE * spare if spare > 0 else 2**self.pushes * spare) / self.price
        if self.high is not None and not self.low < wanted < self.high:
            wanted = (self.low + self.high) / 2
        steps = int(wanted // self.step) if spare > 0 else min(int(wanted // self.step), self.numbers // self.step - 1)
        goes = steps * self.step >= least and steps * self.step != self.numbers
        if goes and steps * self.step > self.low and (self.high is None or steps * self.step < self.high):
            self.numbers = steps * self.step
            return True
        return False
