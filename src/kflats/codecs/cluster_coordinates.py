"""The coordinates of rows in orthonormal bases, which codecs of integers round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.matrices.flats import FlatsMatrix
from kflats.matrices.geometry import tables_of
from kflats.matrices.registry import LowRankMatrix, Matrix
from kflats.numerics.coding.scales import Scales, scales_of


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

    def members(self, c: int) -> Tensor:
        """(n_c,) int64, the rows of class ``c``, ascending."""
        return (self.labels == c).nonzero().squeeze(1)

    def first(self, rank: int) -> ClusterCoordinates:
        """The first ``rank`` coordinates of every row: the best of that rank for methods with optimal prefixes."""
        kept = tuple(part[:, :rank] for part in self.tables)
        return ClusterCoordinates(self.labels, kept, self.flat_of, tuple(basis[:rank] for basis in self.bases))


def cluster_coordinates(matrix: Matrix) -> ClusterCoordinates:
    """The same rows in orthonormal bases, from a low-rank pair or flats.

    Raises:
        KflatsError: a matrix of another kind, or one that keeps rows exactly.

    >>> pair = cluster_coordinates(LowRankMatrix(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0]])))
    >>> (pair.tables[0] @ pair.bases[0]).round(decimals=6).tolist(), round(float(pair.bases[0].norm()), 6)
    ([[3.0, 4.0], [6.0, 8.0]], 1.0)
    """
    if isinstance(matrix, LowRankMatrix):
        labels = torch.zeros(matrix.shape[0], dtype=torch.int64)
        return _orthonormal(labels, [matrix.weight], (0,), [matrix.basis])
    if not isinstance(matrix, FlatsMatrix) or any(band.flat is None for band in matrix.bands):
        raise KflatsError(
            f"a matrix of kind {matrix.kind!r} cannot be coded in flats",
            cause="some of its rows have no coordinates in a flat",
            hint="Float(), or a method whose rows are all in flats",
            command="--codec float, or --method svd",
        )
    flats = tuple(band.flat for band in matrix.bands if band.flat is not None)
    tables = tables_of(matrix.weight, matrix.bands)
    bases = torch.split(matrix.basis, list(matrix.flat_ranks))
    return _orthonormal(matrix.labels.cpu().to(torch.int64), tables, flats, bases)


def _orthonormal(
    labels: Tensor, tables: list[Tensor], flat_of: tuple[int, ...], bases: list[Tensor] | tuple[Tensor, ...]
) -> ClusterCoordinates:
    """For an oblique basis T Q with T lower triangular, every prefix of Q spans the rows of the same prefix of T Q."""
    turned = []
    for basis in bases:
        q, t = torch.linalg.qr(basis.detach().cpu().to(torch.float64).T)
        turned.append((q.T.contiguous(), t.T))
    coordinates = []
    for table, flat in zip(tables, flat_of, strict=True):
        rank = table.shape[1]
        coordinates.append(table.detach().cpu().to(torch.float64) @ turned[flat][1][:rank, :rank])
    return ClusterCoordinates(labels, tuple(coordinates), flat_of, tuple(q for q, _ in turned))


class MatrixRows:
    """The rows of a stored matrix, decoded block by block.

    >>> pair = LowRankMatrix(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0]]))
    >>> [block.tolist() for _, block in MatrixRows(pair).blocks(1)]
    [[[3.0, 4.0]], [[6.0, 8.0]]]
    """

    def __init__(self, matrix: Matrix) -> None:
        self.matrix, self.shape = matrix, matrix.shape
        first = next(iter(matrix.parameters()))
        self.dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self.device = first.device

    def blocks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """As ``Rows.blocks``."""
        for start in range(0, self.shape[0], size):
            yield start, self.take(torch.arange(start, min(start + size, self.shape[0]), device=self.device))

    def take(self, index: Tensor) -> Tensor:
        """As ``Rows.take``."""
        with torch.no_grad():
            return self.matrix.rows(index.to(torch.int64), dtype=self.dtype)


def flat_layout(coordinates: ClusterCoordinates) -> tuple[tuple[int, int], ...]:
    """(classes, rank) of each flat; empty if all classes share one basis."""
    if len(coordinates.bases) == 1:
        return ()
    return tuple((coordinates.flat_of.count(flat), len(basis)) for flat, basis in enumerate(coordinates.bases))


@dataclass(frozen=True)
class RoundedRows:
    """``levels`` (n, d) integers and ``scales`` (n, groups): a group is d / groups columns, rounded up."""

    levels: Tensor
    scales: Scales


def rounded_basis(rows: Tensor, dtype: torch.dtype) -> RoundedRows:
    """(m, d) rows of bases as 8-bit integers with one scale a row, as ``dtype``."""
    scale = rows.abs().amax(1) / 127
    safe = torch.where(scale > 0, scale, torch.ones_like(scale)).unsqueeze(1)
    return RoundedRows((rows / safe).round().to(torch.int8), scales_of(scale, dtype))
