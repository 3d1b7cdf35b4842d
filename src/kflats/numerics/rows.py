"""The rows of a matrix, read in blocks: from a tensor, a memory-mapped file, or any other source.

Every algorithm here reads its (n, d) matrix through ``Rows``, block by block, so n is limited by disk and not by
memory. Computation is in float32 (float64 if the source is), whatever the stored type.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kflats.common.errors import KflatsError, NotFiniteError
from kflats.numerics.large_matrices import zero_matrix

BLOCK = 1024
"""Rows per E-step block: the block and its coordinates stay in cache (measured best of 256..16384)."""

_BLOCK_NUMBERS = 2**21
"""Numbers of such a block at most: of wide rows it has fewer."""

GRAM_BLOCK = 8192
"""Rows per Gram block: long enough that adding the float64 sum costs little beside the product."""

_GRAM_NUMBERS = 2**23
"""Numbers of a Gram block at most: of wide rows it has fewer."""

_SMALL_NORM = 1e-10  # below it squares may vanish, and the norm with them, so that single values must be checked


@runtime_checkable
class Rows(Protocol):
    """A readable (n, d) matrix."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d)."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the blocks: float32 or float64."""

    @property
    def device(self) -> torch.device:
        """The device of the blocks."""

    def blocks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Consecutive blocks of at most ``size`` rows, each with the number of its first row."""

    def take(self, index: Tensor) -> Tensor:
        """The rows at ``index``, in that order."""


class TensorRows:
    """Rows of a tensor, which may be memory-mapped (``torch.from_file``) and of any float type.

    >>> [block.shape[0] for _, block in TensorRows(torch.zeros(5, 2)).blocks(2)]
    [2, 2, 1]
    """

    def __init__(self, matrix: Tensor) -> None:
        if matrix.ndim != 2 or 0 in matrix.shape:
            raise KflatsError(
                f"expected a non-empty matrix, found shape {tuple(matrix.shape)}",
                hint="a tensor of shape (n, d) with at least one row and one column",
            )
        if not matrix.is_floating_point():
            raise KflatsError(
                f"expected floating-point numbers, found {matrix.dtype}", hint="load the model in float32 or bfloat16"
            )
        self.matrix = matrix.detach()
        self.dtype = torch.float64 if matrix.dtype == torch.float64 else torch.float32
        self.shape = (matrix.shape[0], matrix.shape[1])
        self.device = matrix.device

    def blocks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """At most ``size`` rows at a time, with the number of the first."""
        for start in range(0, self.shape[0], size):
            yield start, self.matrix[start : start + size].to(self.dtype)

    def take(self, index: Tensor) -> Tensor:
        """A copy of the rows at ``index``."""
        return self.matrix.index_select(0, index.to(torch.int64)).to(self.dtype)


class MappedRows(ABC):
    """Rows of ``source``, each block of them changed on its way by ``changed``; a subclass says how."""

    def __init__(self, source: Rows, columns: int, dtype: torch.dtype) -> None:
        self.source, self.dtype, self.device = source, dtype, source.device
        self.shape = (source.shape[0], columns)

    @abstractmethod
    def changed(self, block: Tensor, index: slice | Tensor) -> Tensor:
        """The rows at ``index`` of this matrix, from the same rows of the source."""

    def blocks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """The inner blocks, each changed."""
        for start, block in self.source.blocks(size):
            yield start, self.changed(block, slice(start, start + len(block)))

    def take(self, index: Tensor) -> Tensor:
        """The inner rows at ``index``, changed."""
        return self.changed(self.source.take(index), index)


class MetricRows(MappedRows):
    """Rows of A R for a right factor R, (d, m) or a diagonal (d,), formed block by block.

    ``dtype`` is the type to multiply in, by default the rows' own.
    """

    def __init__(self, rows: Rows, factor: Tensor, dtype: torch.dtype | None = None) -> None:
        super().__init__(rows, factor.shape[-1], dtype or rows.dtype)
        self.factor = factor.to(rows.device, self.dtype)

    def changed(self, block: Tensor, index: slice | Tensor) -> Tensor:
        """The rows of a block times the factor of the metric."""
        block = block.to(self.dtype)
        return block * self.factor if self.factor.ndim == 1 else block @ self.factor


class WidenedRows(MappedRows):
    """The same rows in float64."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows, rows.shape[1], torch.float64)

    def changed(self, block: Tensor, index: slice | Tensor) -> Tensor:
        """The rows of a block in the wider type."""
        return block.to(torch.float64)


class ScaledRows(MappedRows):
    """Rows of diag(s) A for factors s (n,), formed block by block.

    >>> ScaledRows(TensorRows(torch.ones(2, 2)), torch.tensor([1.0, 3.0])).take(torch.tensor([1])).tolist()
    [[3.0, 3.0]]
    """

    def __init__(self, rows: Rows, factors: Tensor) -> None:
        super().__init__(rows, rows.shape[1], rows.dtype)
        self.factors = factors.to(rows.device, rows.dtype)

    def changed(self, block: Tensor, index: slice | Tensor) -> Tensor:
        """The rows of a block, each times its factor."""
        return block * self.factors[index].unsqueeze(1)


class PartOfRows:
    """The rows at ``index``, gathered block by block."""

    def __init__(self, rows: Rows, index: Tensor) -> None:
        self.source, self.index = rows, index
        self.dtype, self.device = rows.dtype, rows.device
        self.shape = (len(index), rows.shape[1])

    def blocks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Blocks of the chosen rows."""
        for start in range(0, len(self.index), size):
            yield start, self.source.take(self.index[start : start + size])

    def take(self, index: Tensor) -> Tensor:
        """The chosen rows at ``index``."""
        return self.source.take(self.index[index])


def slices(rows: Rows, size: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """The blocks of ``rows``, each with the slice of its row numbers; by default of ``BLOCK`` rows, fewer of rows
    beyond 2,048 columns."""
    for start, block in rows.blocks(size or min(BLOCK, max(1, _BLOCK_NUMBERS // rows.shape[1]))):
        yield slice(start, start + len(block)), block


def gram_block(rows: Rows) -> int:
    """Rows of a block of work that costs many operations a number: ``GRAM_BLOCK``, fewer of rows beyond 1,024 columns.

    >>> gram_block(TensorRows(torch.zeros(1, 384))), gram_block(TensorRows(torch.zeros(1, 8192)))
    (8192, 1024)
    """
    return min(GRAM_BLOCK, max(1, _GRAM_NUMBERS // rows.shape[1]))


def whole_matrix(rows: Rows, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of the whole matrix (n, d), in its own type or another; it lies where ``zero_matrix`` would."""
    n, d = rows.shape
    whole = zero_matrix(n, d, dtype or rows.dtype, rows.device)
    for here, block in slices(rows, gram_block(rows)):
        whole[here] = block
    return whole


def all_rows(rows: Rows) -> Tensor:
    """``whole_matrix`` in float64."""
    return whole_matrix(rows, torch.float64)


def as_rows(matrix: Tensor | Rows) -> Rows:
    """A tensor as ``Rows``; a source as it is.

    Raises:
        KflatsError: ``matrix`` is neither of the two.
    """
    if isinstance(matrix, Tensor):
        return TensorRows(matrix)
    if not isinstance(matrix, Rows):
        raise KflatsError(
            f"expected a torch tensor of shape (n, d), found {type(matrix).__name__}",
            hint="a tensor, or an object with the methods of Rows",
        )
    return matrix


def checked_rows(matrix: Tensor | Rows, weights: Tensor | None = None) -> Rows:
    """A tensor or a source as ``Rows``, refused where a fit of it, with row weights (n,), would be spoilt.

    Raises:
        KflatsError: as ``as_rows``, ``check_finite`` and ``check_weights``.
    """
    rows = as_rows(matrix)
    check_finite(rows)
    check_weights(weights, rows.shape[0])
    return rows


def check_power(power: float, most: float = math.inf, name: str = "p") -> None:
    """Refuse what is not a power of errors: a finite number above 0, at most ``most``. ``name``: of the argument.

    Raises:
        KflatsError: otherwise.
    """
    number = isinstance(power, int | float) and not isinstance(power, bool)
    if not number or not 0 < power <= most or power == math.inf:
        raise KflatsError(
            f"a power of {name}={power!r} is not supported",
            hint=f"a number above 0{'' if most == math.inf else f' and at most {most:g}'}, for example 1",
        )


def check_rank(rank: int, most: int) -> None:
    """Refuse a rank outside 1..``most``, the number of rows or columns, whichever is smaller.

    Raises:
        KflatsError: not a whole number in 1..``most``.
    """
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise KflatsError(f"a rank is a whole number, not {rank!r}", hint=f"one in 1..{most}")
    if not 1 <= rank <= most:
        raise KflatsError(
            f"rank {rank} is outside 1..{most}", hint="choose a rank in that range, or a budget instead of a rank"
        )


def check_finite(rows: Rows) -> None:
    """Refuse NaN, infinity, numbers whose squares overflow, and a matrix whose squares all vanish.

    One such row would spoil a whole flat without a sign, and vanished squares would be reported as no error. A matrix
    of zeros passes.

    Raises:
        KflatsError: with the first bad row's number; ``NotFiniteError`` for NaN and infinity.
    """
    largest = 0.0
    for start, block in rows.blocks(gram_block(rows)):
        # A norm is finite only if every entry is, and their squares.
        norm = float(torch.linalg.vector_norm(block))
        largest = max(largest, norm)
        if not math.isfinite(norm):
            bad = (~torch.isfinite(block).all(dim=1)).nonzero()
            if len(bad):
                raise NotFiniteError(
                    f"the matrix has NaN or infinite values, first in row {start + int(bad[0])}",
                    cause="diverged training or a damaged checkpoint",
                    hint="load another checkpoint, or replace them",
                )
            raise KflatsError(
                f"the matrix has values as large as {float(block.abs().max()):.1e}, too large to be squared",
                cause="diverged training or a damaged checkpoint",
                hint="load another checkpoint, or scale them down",
            )
    if largest > _SMALL_NORM:
        return
    smallest = torch.finfo(rows.dtype).tiny ** 0.5
    values = max((float(block.abs().max()) for _, block in rows.blocks(gram_block(rows))), default=0.0)
    if 0 < values < smallest:
        raise KflatsError(
            f"the matrix has no value larger than {values:.1e}, too small to be squared",
            hint="leave it dense, or scale the matrix up",
        )


def check_steps(tolerance: float, limit: int) -> None:
    """Refuse a tolerance or a limit of iterations that no fit can have.

    Raises:
        KflatsError: a tolerance outside [0, 1), or a limit that is not a whole number from 1.
    """
    possible = isinstance(tolerance, int | float) and 0 <= tolerance < 1
    if not possible or not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise KflatsError(
            f"tolerance={tolerance!r} with at most {limit!r} iterations is not supported",
            hint="a tolerance in [0, 1), and for max_iterations a whole number from 1",
        )


def check_spread(norms2: Tensor, weights: Tensor | None, limit: float) -> float:
    """How many times the longest row is as long as the median row, by squared lengths (n,) in float64.

    Rows of zeros and rows of weight 0 are left out.

    Raises:
        KflatsError: more than ``limit`` times, so that the other rows are lost in its rounding.

    >>> check_spread(torch.tensor([1.0, 9.0, 1.0, 0.0]), None, 100.0)
    3.0
    """
    alive = norms2 > 0
    if weights is not None:
        alive &= weights.to(norms2.device) > 0
    if not bool(alive.any()):
        return 1.0
    spread = float(norms2[alive].max().sqrt() / norms2[alive].median().sqrt())
    if spread > limit:
        raise KflatsError(
            f"row {int(torch.where(alive, norms2, 0.0).argmax())} is {spread:.0e} times as long as the median row",
            cause="a damaged or diverged row; the others are lost in its rounding",
            hint="give that row weight 0, or repair it",
        )
    return spread


def check_weights(weights: Tensor | None, n: int) -> None:
    """Row weights: (n,), finite, none negative, not all zero.

    Raises:
        KflatsError: otherwise.
    """
    if weights is None:
        return
    if tuple(weights.shape) != (n,):
        raise KflatsError(f"expected {n} row weights, found shape {tuple(weights.shape)}", hint=f"shape ({n},)")
    if weights.requires_grad:
        raise KflatsError("row weights carry gradients", hint="detached weights")
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
        raise KflatsError("row weights must be finite and not negative", hint="other calibration data, or Uniform()")
    if float(weights.sum()) <= 0:
        raise KflatsError("all row weights are zero", hint="more calibration data, or Uniform()")


_IDLE = 1e-12  # of the largest weight: a weight whose root vanishes must be smaller


def row_factors(weights: Tensor, power: float) -> Tensor:
    """(w / max w)^power (n,) in float64. It is 0 where it underflows, for weights below 1e-12 of the largest.

    Raises:
        KflatsError: it underflows for a larger weight.

    >>> row_factors(torch.tensor([4.0, 0.0, 1.0]), 2.0).tolist()
    [1.0, 0.0, 0.0625]
    """
    shares = weights.to(torch.float64) / float(weights.max())
    factors = shares.pow(power)
    factors = torch.where(factors > torch.finfo(torch.float64).tiny, factors, 0.0)
    lost = shares[factors == 0]
    if len(lost) and float(lost.max()) > _IDLE:
        raise KflatsError(
            f"row weights of {float(lost.max()):.0e} of the largest have no root in double precision: p={1 / power:g}",
            cause="rows are scaled by their weights to the power 1/p",
            hint="a p nearer to 2, or weights that are zero or nearer to each other",
        )
    return factors
