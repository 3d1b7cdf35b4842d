"""``Int8``, ``Int4`` and ``Rotation`` carried out: the largest rank whose numbers, so many bits each, fit the bytes.

The method fits as it would for numbers, given as many of them as the bytes hold codes of; then they are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kflats.codecs.codec import Int4, Int8, Rotation
from kflats.codecs.streams import stored_bytes
from kflats.factorize.parts import Parts, parts_of
from kflats.factorize.rounding import rotated_parts, rotated_table, rounded_parts, rounded_table
from kflats.factorize.sizes import fixed_bytes
from kflats.methods import PAIRS, SVD, Dense, Flats, KMeansSVD
from kflats.methods.judging import Norm
from kflats.methods.problem import Factored, Problem, refuse_bytes
from kflats.nn.coded import CodedMatrix
from kflats.nn.matrix import LowRankMatrix
from kflats.numerics.coding.rotation import gaussian_share
from kflats.numerics.svd import truncated_svd

FixedRate = Int8 | Int4 | Rotation
_FITS = 5
"""Fits of several flats until their codes fill the bytes: each has its own rank, so that sizes are known afterwards."""
_CAREFUL = 0.9
"""Share of what is spare that the next fit is given: one that is too large by a byte is lost."""
_SLACK = 0.01
"""Share of the bytes that may be left over; of more, another fit makes use."""


@dataclass(frozen=True)
class Rounded:
    """A coded matrix, what was minimised where that is not the squared error, and whether the fit came to its end."""

    matrix: CodedMatrix
    norm: Norm | None = None
    converged: bool = True


def at_fixed_rate(method: object, codec: FixedRate, problem: Problem, dtype: torch.dtype) -> Rounded:
    """Codes of what the method makes of ``problem``, in at most its bytes; scales as ``dtype``.

    Raises:
        KflatsError: too few bytes, or whatever the method refuses.
    """
    if isinstance(method, Dense):
        return Rounded(_table(codec, problem, dtype))
    if isinstance(codec, Rotation) and codec.bits is None:
        codec = Rotation(best_bits(method, problem, dtype))
    if isinstance(method, PAIRS):
        return _pair(method, codec, problem, dtype)
    assert isinstance(method, Flats | KMeansSVD)
    return _flats(method, codec, problem, dtype)


def best_bits(method: object, problem: Problem, dtype: torch.dtype) -> int:
    """The bits a number, 1 to 8, at which least is lost: by the rank they leave room for, and by rounding.

        minimise over b   E_r(b) + D_b (E_0 - E_r(b)),     r(b) the largest rank in the bytes,   D_b a Gaussian's share

    E_r is the method's ``spectrum``: where that is one flat's, several lose less of it at every b alike.
    """
    shape, k = problem.rows.shape, getattr(method, "k", None) or 1
    tails = method.spectrum(problem.rows, problem.weighting)  # type: ignore[attr-defined]
    lost = {}
    for bits in range(1, 9):
        rank = _largest_rank(Rotation(bits), shape, dtype.itemsize, k, problem.nbytes)
        tail = float(tails[rank])
        lost[bits] = tail + gaussian_share(bits) * (float(tails[0]) - tail)
    return min(lost, key=lambda bits: lost[bits])


def _table(codec: FixedRate, problem: Problem, dtype: torch.dtype) -> CodedMatrix:
    if isinstance(codec, Int8 | Int4):
        matrix = rounded_table(codec, problem.rows, dtype)
        if (least := stored_bytes(matrix)) > problem.nbytes:
            raise refuse_bytes(problem, least, f"{codec.bits} bits a number")
        return matrix
    tried = range(8, 0, -1) if codec.bits is None else [codec.bits]
    least = 0
    for bits in tried:
        least = fixed_bytes(Rotation(bits), problem.rows.shape, dtype.itemsize)
        if least > problem.nbytes and bits != tried[-1]:
            continue
        matrix = rotated_table(bits, problem.rows, dtype, problem.seed)
        # A file may be smaller than fixed bytes, or larger: its head may be longer than what the coder saves.
        if (least := stored_bytes(matrix)) <= problem.nbytes:
            return matrix
    raise refuse_bytes(problem, least, f"a rotation at {tried[-1]} bits")


def _coded(codec: FixedRate, parts: Parts, dtype: torch.dtype, seed: int) -> CodedMatrix:
    if isinstance(codec, Rotation):
        return rotated_parts(codec.bits or 1, parts, dtype, seed)
    return rounded_parts(codec, parts, dtype)


def _largest_rank(codec: FixedRate, shape: tuple[int, int], itemsize: int, k: int, nbytes: int) -> int:
    ranks = range(min(shape), 0, -1)
    return next((r for r in ranks if fixed_bytes(codec, shape, itemsize, r, k) <= nbytes), 0)


# A pair ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fit:
    """What a method has fitted, before it is rounded."""

    parts: Parts
    norm: Norm | None = None
    converged: bool = True

    def as_codes(self, matrix: CodedMatrix) -> Rounded:
        """The fit in its rounded form."""
        return Rounded(matrix, self.norm, self.converged)


def _pair(method: object, codec: FixedRate, problem: Problem, dtype: torch.dtype) -> Rounded:
    """Sizes of a pair are known beforehand, but for the head of its file."""
    shape, itemsize = problem.rows.shape, dtype.itemsize
    # Where not even rank 1 fits at a fixed rate, its file may.
    rank = max(1, _largest_rank(codec, shape, itemsize, 1, problem.nbytes))
    fit = _fitter(method, problem, rank)
    while True:
        found = fit(rank)
        matrix = _coded(codec, found.parts, dtype, problem.seed)
        # The head of a file may be longer than what the coder saves of a small matrix.
        over = (least := stored_bytes(matrix)) - problem.nbytes
        if over <= 0:
            return found.as_codes(matrix)
        if rank == 1:
            raise refuse_bytes(problem, least, "1 flat of rank 1")
        # Heads shrink with the rank, too: rank 1 may fit where none below it seems to.
        most = fixed_bytes(codec, shape, itemsize, rank) - over
        rank = min(rank - 1, max(1, _largest_rank(codec, shape, itemsize, 1, most)))


def _fitter(method: object, problem: Problem, most: int) -> Callable[[int], _Fit]:
    """What fits the method's pair of a rank up to ``most``."""
    if isinstance(method, SVD):
        # Of a closed form the best pair of every lower rank is part of a higher one's.
        weighting = problem.weighting
        found = truncated_svd(problem.rows, most, left=weighting.left, right=weighting.right)
        coordinates, basis = found.coordinates, found.basis
        return lambda rank: _Fit(parts_of(LowRankMatrix(coordinates[:, :rank], basis[:rank])))

    def fit(rank: int) -> _Fit:
        nbytes = method.cost(problem.rows.shape, rank, 4)  # type: ignore[attr-defined]
        made: Factored = method.fit(replace(problem, nbytes=nbytes, itemsize=4))  # type: ignore[attr-defined]
        return _Fit(parts_of(made.matrix), made.norm, made.converged)

    return fit


# Several flats --------------------------------------------------------------------------------------


def _flats(method: Flats | KMeansSVD, codec: FixedRate, problem: Problem, dtype: torch.dtype) -> Rounded:
    """Fits that are given more or fewer numbers until their codes fill the bytes."""
    shape, itemsize, k = problem.rows.shape, dtype.itemsize, method.k or 1
    if isinstance(method, Flats):
        method = replace(method, exact=False)  # all rows are rounded
    rank = _largest_rank(codec, shape, itemsize, k, problem.nbytes)
    what, least = f"{k} flat{'s' * (k > 1)} of rank 1", fixed_bytes(codec, shape, itemsize, 1, k)
    # Where not even rank 1 fits at a fixed rate, its file may: then that alone is counted.
    size_of = _size if rank else stored_bytes
    rank = max(1, rank)
    a_rank = shape[0] + k * shape[1]
    # Over several ranks: where four bits make half bytes, every other one costs next to nothing.
    low, high = max(1, rank // 2), max(2, rank)
    more = fixed_bytes(codec, shape, itemsize, high, k) if high <= min(shape) else 2 * least
    price = max(1.0, (more - fixed_bytes(codec, shape, itemsize, low, k)) / (high - low))
    search = _Search(rank * a_rank, price / a_rank, a_rank if _is_uniform(method) else 1, problem.nbytes)
    best: Rounded | None = None
    smallest: _Fit | None = None  # of those that are too large
    for _ in range(_FITS):
        # Where flats are searched, a label counts as a number: one flat has none.
        made = method.fit(replace(problem, nbytes=search.numbers, itemsize=1, free_labels=method.k is not None))
        fit = _Fit(parts_of(made.matrix), made.norm, made.converged)
        matrix = _coded(codec, fit.parts, dtype, problem.seed)
        size = size_of(matrix)
        if search.took_(size):
            best = fit.as_codes(matrix)
        elif size > problem.nbytes and (smallest is None or search.numbers == search.high):
            smallest = fit
        if not search.moves_(a_rank):
            break
    if best is None and smallest is not None:
        best = _cut(smallest, codec, problem, dtype, size_of)
    if best is None:
        raise refuse_bytes(problem, max(search.size, least), what)
    return best


def _size(matrix: CodedMatrix) -> int:
    """In memory, or in a file where its head is longer than what the coder saves."""
    return max(stored_bytes(matrix), matrix.nbytes)


def _cut(
    fit: _Fit, codec: FixedRate, problem: Problem, dtype: torch.dtype, size_of: Callable[[CodedMatrix], int]
) -> Rounded | None:
    """The largest of a fit's ranks, cut down until its codes fit; None where not even rank 1 does."""
    fits, over = 0, fit.parts.rank
    best: Rounded | None = None
    while over - fits > 1:
        rank = (fits + over) // 2
        matrix = _coded(codec, fit.parts.first(rank), dtype, problem.seed)
        if size_of(matrix) <= problem.nbytes:
            fits, best = rank, fit.as_codes(matrix)
        else:
            over = rank
    return best


def _is_uniform(method: Flats | KMeansSVD) -> bool:
    return isinstance(method, KMeansSVD) or method.ranks == "uniform"


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
        wanted = self.numbers + (_CAREFUL * spare if spare > 0 else 2**self.pushes * spare) / self.price
        if self.high is not None and not self.low < wanted < self.high:
            wanted = (self.low + self.high) / 2
        steps = int(wanted // self.step) if spare > 0 else min(int(wanted // self.step), self.numbers // self.step - 1)
        goes = steps * self.step >= least and steps * self.step != self.numbers
        if goes and steps * self.step > self.low and (self.high is None or steps * self.step < self.high):
            self.numbers = steps * self.step
            return True
        return False
