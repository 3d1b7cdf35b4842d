"""The coordinates of rows in orthonormal bases, which codecs of integers round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.matrices.flats import FlatsMatrix, tables_of
from kflats.matrices.registry import LowRankMatrix, Matrix


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
    labels, tables, flat_of, bases = _in_flats(matrix)
    turned = [torch.linalg.qr(basis.detach().cpu().to(torch.float64).T) for basis in bases]
    coordinates = [
        table.detach().cpu().to(torch.float64) @ turned[flat][1].T[: table.shape[1], : table.shape[1]]
        for table, flat in zip(tables, flat_of, strict=True)
    ]
    return ClusterCoordinates(labels, tuple(coordinates), flat_of, tuple(q.T.contiguous() for q, _ in turned))


def _in_flats(matrix: Matrix) -> tuple[Tensor, Sequence[Tensor], tuple[int, ...], Sequence[Tensor]]:
    """The labels of all rows, the coordinates and the flat of each class, and the bases, which may be oblique."""
    if isinstance(matrix, LowRankMatrix):
        return torch.zeros(matrix.shape[0], dtype=torch.int64), [matrix.weight], (0,), [matrix.basis]
    if not isinstance(matrix, FlatsMatrix) or any(band.flat is None for band in matrix.bands):
        raise KflatsError(
            f"a matrix of kind {matrix.kind!r} cannot be coded in flats",
            cause="some of its rows have no coordinates in a flat",
            hint="Float(), or a method whose rows are all in flats",
        )
    flats = tuple(band.flat for band in matrix.bands if band.flat is not None)
    bases = torch.split(matrix.basis, list(matrix.flat_ranks))
    return matrix.labels.cpu().to(torch.int64), tables_of(matrix.weight, matrix.bands), flats, bases
