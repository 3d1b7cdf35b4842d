"""Codecs of a fixed rate: every number in so many bits, in memory; entropy coding makes files smaller.

The method fits as it would for floating-point numbers, given as many of them as the bytes hold codes of; then its
coordinates are rounded. Two sizes matter: *fixed* bytes, what the codes take in memory, and *stored* bytes, what a file
holds after entropy coding. A budget counts stored bytes; rank and bits are chosen by fixed bytes.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kflats.codecs.cluster_coordinates import ClusterCoordinates, cluster_coordinates
from kflats.codecs.protocol import Candidate, Codec, Table
from kflats.codecs.streams import stored_bytes
from kflats.common.errors import KflatsError
from kflats.matrices.coded import CodedMatrix
from kflats.matrices.coded_geometry import MAX_CLASSES, CodedGeometry
from kflats.methods.matrix_error import Norm, weighted_error
from kflats.methods.problem import Factored, Problem, refuse_bytes
from kflats.methods.protocol import Method
from kflats.numerics.rows import Rows

HEADER_BYTES = 160
"""Bytes that a stream's header takes beside its payload, at most."""
BASIS_HEADER_BYTES = 400
"""The same for a stream with a basis, whose rows have distributions of their own."""
_FITS = 5
"""Fits of several flats until their codes fill the bytes: each has its own rank, so that sizes are known afterwards."""
_SPENT_SHARE = 0.9
"""Share of the spare bytes that the next fit is given: a fit that is one byte too large is discarded."""
_SLACK = 0.01
"""Share of the bytes that may stay unused."""


@dataclass(frozen=True)
class Layout:
    """How the codes of one number are laid out: bits, scales a row, and values in a table of levels (0: none)."""

    bits: int
    groups: int = 1
    levels: int = 0


class FixedRateCodec(Codec, Protocol):
    """Integers of a fixed rate; a subclass says how numbers are laid out and rounded."""

    @property
    @abstractmethod
    def bits_per_number(self) -> int:
        """Bits of one code."""

    @abstractmethod
    def layout(self, columns: int) -> Layout:
        """Of rows of so many columns."""

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

    def largest_rank(self, shape: tuple[int, int], itemsize: int, flats: int, nbytes: int) -> int:
        """The largest rank whose codes take ``nbytes`` in memory, 0 if none."""
        ranks = range(min(shape), 0, -1)
        return next((r for r in ranks if self.memory_bytes(shape, itemsize, r, flats) <= nbytes), 0)

    def min_bytes(self, method: Method, shape: tuple[int, int], itemsize: int, *, counts_labels: bool = True) -> int:
        """As ``Codec.min_bytes``, with the header of a file: of a few hundred bytes it is most."""
        if method.produces == "dense":
            return self.choices()[-1].memory_bytes(shape, itemsize) + BASIS_HEADER_BYTES
        return self.choices()[0].memory_bytes(shape, itemsize, 1, method.flats) + BASIS_HEADER_BYTES

    def fixed_bytes(self, method: Method, shape: tuple[int, int], itemsize: int) -> int | None:
        """As ``Codec.fixed_bytes``: codes of the matrix itself have one size."""
        if method.produces != "dense" or len(self.choices()) > 1:
            return None
        header = BASIS_HEADER_BYTES if self.layout(shape[1]).levels else HEADER_BYTES
        return self.memory_bytes(shape, itemsize) + shape[0] * shape[1] // 2**14 + header

    def refusal(self, method: Method) -> tuple[str, str] | None:
        """As ``Codec.refusal``."""
        if method.stores_skeleton:
            return (
                "the interpolative form stores an identity block, which rounding of whole columns would undo",
                "SVD()",
            )
        if method.most_classes > MAX_CLASSES:
            cause = f"it tells {MAX_CLASSES} classes of rows apart by a byte, and there may be {method.most_classes}"
            return cause, "fewer flats or nested ranks, or a floating-point codec"
        return None

    # Candidates -------------------------------------------------------------------------------------

    def candidates(self, method: Method, table: Table) -> Iterator[Candidate]:
        """As ``Codec.candidates``: the matrix itself, or flats of every rank."""
        if method.produces != "dense":
            yield from self._ranks(method, table)
            return
        problem = Problem(table.rows, table.nbytes, table.dtype.itemsize, table.weighting)
        try:
            stored = self.encode(method, problem, table.dtype)
        except KflatsError:  # a matrix so small that its scales alone outgrow it
            return
        error = weighted_error(table.rows, stored.matrix, table.weighting).error
        yield Candidate(method, self, stored.nbytes, error, f"{8 * stored.nbytes / table.numbers:.2f} bits a number")

    def _ranks(self, method: Method, table: Table) -> Iterator[Candidate]:
        """At every rank: what a pair of that rank loses, and what rounding loses of the rest."""
        shape, itemsize, spectrum = table.rows.shape, table.dtype.itemsize, table.spectrum
        kind = "relative error" if method.prefix_optimal else "relative error of an SVD"
        least, total = self.min_bytes(method, shape, itemsize), float(spectrum[0])
        sized: list[Candidate] = []
        for codec in reversed(self.choices()):
            share = codec.rounding_share(method, table)
            for rank in range(1, min(shape) + 1):
                nbytes = codec.memory_bytes(shape, itemsize, rank, method.flats) + HEADER_BYTES
                if nbytes < least:
                    continue  # a fit in so few bytes might be refused
                error = float(spectrum[rank]) + share * (total - float(spectrum[rank]))
                note = f"rank {rank} of {min(shape)}, {codec.bits_per_number} bits a number"
                sized.append(Candidate(method, self, nbytes, error, note, kind))
        yield from sorted(sized, key=lambda candidate: candidate.nbytes)

    # Encoding ---------------------------------------------------------------------------------------

    def encode(self, method: Method, problem: Problem, dtype: torch.dtype) -> Factored:
        """As ``Codec.encode``."""
        if method.produces == "dense":
            return self._encode_rows(problem, dtype)
        start = time.perf_counter()
        codec = self._settled(method, problem, dtype)
        if method.produces == "pair":
            rounded = _encode_pair(codec, method, problem, dtype)
        else:
            rounded = _encode_clusters(codec, method.all_in_flats(), problem, dtype)
        return rounded.stored(time.perf_counter() - start)

    def _settled(self, method: Method, problem: Problem, dtype: torch.dtype) -> FixedRateCodec:
        """The bits a number at which least is lost: by the rank they leave room for, and by rounding.

            minimise over b   E_r(b) + D_b (E_0 - E_r(b)),     r(b) the largest rank in the bytes,   D_b of rounding

        E_r is the method's ``spectrum``: where that is one flat's, several lose less of it at every b alike.
        """
        choices = self.choices()
        if len(choices) == 1:
            return self
        table = Table(problem.rows, problem.weighting, dtype, method.spectrum(problem.rows, problem.weighting))

        def loss(codec: FixedRateCodec) -> float:
            rank = codec.largest_rank(problem.rows.shape, dtype.itemsize, method.flats, problem.nbytes)
            left = float(table.spectrum[rank])
            return left + codec.rounding_share(method, table) * (float(table.spectrum[0]) - left)

        return min(reversed(choices), key=loss)

    def _encode_rows(self, problem: Problem, dtype: torch.dtype) -> Factored:
        start, least, choices = time.perf_counter(), 0, self.choices()
        for codec in choices:
            fixed = codec.memory_bytes(problem.rows.shape, dtype.itemsize)
            if fixed > problem.nbytes and codec is not choices[-1]:
                continue
            # A file may be smaller than fixed bytes, or larger: its header may take more than the coder saves.
            matrix = codec.round_rows(problem.rows, dtype, problem.seed)
            if (least := stored_bytes(matrix)) <= problem.nbytes:
                return Rounded(matrix).stored(time.perf_counter() - start)
        raise refuse_bytes(problem, least, f"{choices[-1].bits_per_number} bits a number")


@dataclass(frozen=True)
class Rounded:
    """A coded matrix, what was minimised where that is not the squared error, and whether the fit converged."""

    matrix: CodedMatrix
    norm: Norm | None = None
    converged: bool = True

    def stored(self, seconds: float) -> Factored:
        """The result of ``Codec.encode``."""
        nbytes = stored_bytes(self.matrix)
        return Factored(self.matrix, (), seconds, self.norm, stored_bytes=nbytes, converged=self.converged)


@dataclass(frozen=True)
class _Fit:
    """What a method has fitted, before it is rounded."""

    coordinates: ClusterCoordinates
    norm: Norm | None = None
    converged: bool = True

    def rounded(self, matrix: CodedMatrix) -> Rounded:
        """The fit in its rounded form."""
        return Rounded(matrix, self.norm, self.converged)


def _fitted(method: Method, problem: Problem) -> _Fit:
    factored = method.fit(problem)
    return _Fit(cluster_coordinates(factored.matrix), factored.norm, factored.converged)


def _encode_pair(codec: FixedRateCodec, method: Method, problem: Problem, dtype: torch.dtype) -> Rounded:
    """The size of a pair is known beforehand, but for the header of its file."""
    shape, itemsize = problem.rows.shape, dtype.itemsize
    # Where not even rank 1 fits at a fixed rate, its file may.
    rank = max(1, codec.largest_rank(shape, itemsize, 1, problem.nbytes))

    def fit_at(rank: int) -> _Fit:
        return _fitted(method, replace(problem, nbytes=method.cost(shape, rank, 4), itemsize=4))

    fit = fit_at(rank)
    while True:
        coordinates = fit.coordinates.first(rank) if rank < fit.coordinates.rank else fit.coordinates
        matrix = codec.round_coordinates(coordinates, dtype, problem.seed)
        over = (least := stored_bytes(matrix)) - problem.nbytes
        if over <= 0:
            return fit.rounded(matrix)
        if rank == 1:
            raise refuse_bytes(problem, least, "1 flat of rank 1")
        # Headers shrink with the rank, too: rank 1 may fit where none below it seems to.
        rest = codec.memory_bytes(shape, itemsize, rank) - over
        rank = min(rank - 1, max(1, codec.largest_rank(shape, itemsize, 1, rest)))
        if not method.prefix_optimal:
            fit = fit_at(rank)


def _encode_clusters(codec: FixedRateCodec, method: Method, problem: Problem, dtype: torch.dtype) -> Rounded:
    """Fits that are given more or fewer numbers until their codes fill the bytes."""
    shape, itemsize, k = problem.rows.shape, dtype.itemsize, method.flats
    rank = codec.largest_rank(shape, itemsize, k, problem.nbytes)
    what, least = f"{k} flat{'s' * (k > 1)} of rank 1", codec.memory_bytes(shape, itemsize, 1, k)
    # Where not even rank 1 fits at a fixed rate, its file may: then only the file's bytes count.
    size_of = _size if rank else stored_bytes
    rank = max(1, rank)
    numbers_a_rank = shape[0] + k * shape[1]
    # Over several ranks: where four bits make half bytes, every other one costs next to nothing.
    low, high = max(1, rank // 2), max(2, rank)
    more = codec.memory_bytes(shape, itemsize, high, k) if high <= min(shape) else 2 * least
    price = max(1.0, (more - codec.memory_bytes(shape, itemsize, low, k)) / (high - low))
    step = numbers_a_rank if method.equal_ranks else 1
    search = _Search(rank * numbers_a_rank, price / numbers_a_rank, step, problem.nbytes)
    best: Rounded | None = None
    smallest: _Fit | None = None  # of those that are too large
    searches_flats = len(method.flat_counts()) > 1
    for _ in range(_FITS):
        # Where the number of flats is searched, a label counts as a number: one flat has none.
        fit = _fitted(method, replace(problem, nbytes=search.numbers, itemsize=1, free_labels=not searches_flats))
        matrix = codec.round_coordinates(fit.coordinates, dtype, problem.seed)
        size = size_of(matrix)
        if search.took_(size):
            best = fit.rounded(matrix)
        elif size > problem.nbytes and (smallest is None or search.numbers == search.high):
            smallest = fit
        if not search.moves_(numbers_a_rank):
            break
    if best is None and smallest is not None:
        best = _cut(smallest, codec, problem, dtype, size_of)
    if best is None:
        raise refuse_bytes(problem, max(search.size, least), what)
    return best


def _size(matrix: CodedMatrix) -> int:
    """In memory, or in a file where its header is longer than what the coder saves."""
    return max(stored_bytes(matrix), matrix.nbytes)


def _cut(
    fit: _Fit,
    codec: FixedRateCodec,
    problem: Problem,
    dtype: torch.dtype,
    size_of: Callable[[CodedMatrix], int],
) -> Rounded | None:
    """The largest of a fit's ranks, cut down until its codes fit; None where not even rank 1 does."""
    fits, over = 0, fit.coordinates.rank
    best: Rounded | None = None
    while over - fits > 1:
        rank = (fits + over) // 2
        matrix = codec.round_coordinates(fit.coordinates.first(rank), dtype, problem.seed)
        if size_of(matrix) <= problem.nbytes:
            fits, best = rank, fit.rounded(matrix)
        else:
            over = rank
    return best


@dataclass
class _Search:
    """How many ``numbers``, in whole ``step``s, take at most ``nbytes``; ``price``: about what one takes."""

    numbers: int
    price: float
    step: int
    nbytes: int
    size: int = 0  # of the last
    low: int = 0  # numbers that took too little
    high: int | None = None  # and too much
    fullest: int = -1
    pushes: int = 0

    def took_(self, size: int) -> bool:
        """Note what the last took, and say whether it is the best so far."""
        same = size == self.size
        self.size = size
        if size > self.nbytes:
            self.high, self.pushes = self.numbers, self.pushes + 1
            return False
        # As large as with fewer numbers: all ranks are whole.
        self.low, self.high = self.numbers, self.numbers if same else self.high
        better, self.fullest = size > self.fullest, max(size, self.fullest)
        return better

    def moves_(self, least: int) -> bool:
        """Set other ``numbers`` that may fill the bytes better; False where there are none."""
        spare = self.nbytes - self.size
        if 0 <= spare <= _SLACK * self.nbytes:
            return False
        # Prices are guesses: less is added than seems to fit, and more taken away each time that it was too little.
        wanted = self.numbers + (_SPENT_SHARE * spare if spare > 0 else 2**self.pushes * spare) / self.price
        if self.high is not None and not self.low < wanted < self.high:
            wanted = (self.low + self.high) / 2
        steps = int(wanted // self.step) if spare > 0 else min(int(wanted // self.step), self.numbers // self.step - 1)
        goes = steps * self.step >= least and steps * self.step != self.numbers
        if goes and steps * self.step > self.low and (self.high is None or steps * self.step < self.high):
            self.numbers = steps * self.step
            return True
        return False
