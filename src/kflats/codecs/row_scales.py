"""Codecs of integers with a scale for each row, or for each group of its columns."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from kflats.codecs.cluster_coordinates import ClusterCoordinates, RoundedRows, flat_layout, rounded_basis
from kflats.codecs.fixed_rate import FixedRateCodec
from kflats.codecs.protocol import Table
from kflats.common.errors import KflatsError
from kflats.matrices.coded import CodedMatrix
from kflats.matrices.coded_build import from_integers
from kflats.methods import SVD
from kflats.methods.matrix_error import weighted_error
from kflats.methods.problem import Problem
from kflats.methods.protocol import Method
from kflats.numerics.rows import Rows, TensorRows


class RowScaleCodec(FixedRateCodec, Protocol):
    """Integers times a scale of their row; a subclass rounds the rows.

    Each column of a method's coordinates is first divided by its size, by which the rows of the bases are multiplied;
    bases have 8 bits.
    """

    @abstractmethod
    def rounded(self, rows: Rows, dtype: torch.dtype) -> RoundedRows:
        """The integers and scales of all rows; scales as ``dtype``."""

    def rounding_share(self, method: Method, table: Table) -> float:
        """As ``FixedRateCodec.rounding_share``: measured on an SVD of all ranks."""
        if float(table.spectrum[0]) <= 0:
            return 0.0
        shape, itemsize = table.rows.shape, table.dtype.itemsize
        # The room is doubled because the header is most of a small file.
        room = 2 * (self.memory_bytes(shape, itemsize, min(shape)) + self.min_bytes(method, shape, itemsize))
        stored = self.encode(SVD(), Problem(table.rows, room, itemsize, table.weighting), table.dtype)
        return min(1.0, weighted_error(table.rows, stored.matrix, table.weighting).relative)

    def round_rows(self, rows: Rows, dtype: torch.dtype, seed: int) -> CodedMatrix:
        """As ``FixedRateCodec.round_rows``."""
        table = self.rounded(rows, dtype)
        scales = table.scales
        return from_integers(
            [table.levels], None, scales.values, scales="row", groups=scales.values.shape[1], unit=scales.unit
        )

    def round_coordinates(self, coordinates: ClusterCoordinates, dtype: torch.dtype, seed: int) -> CodedMatrix:
        """As ``FixedRateCodec.round_coordinates``.

        Raises:
            KflatsError: all flats have rank 0.
        """
        if not coordinates.rank:
            raise KflatsError(
                "a matrix of zeros cannot be coded in flats",
                cause="all flats have rank 0",
                hint="KeepDense()",
                command="--method keep-dense",
            )
        sizes = [_sizes(coordinates, flat) for flat in range(len(coordinates.bases))]
        whole = torch.zeros(len(coordinates.labels), coordinates.rank)
        for c, (table, flat) in enumerate(zip(coordinates.tables, coordinates.flat_of, strict=True)):
            rank = table.shape[1]
            whole[coordinates.members(c), :rank] = (table / sizes[flat][:rank]).to(torch.float32)
        code = self.rounded(TensorRows(whole), dtype)
        basis = rounded_basis(
            torch.cat([basis * size.unsqueeze(1) for basis, size in zip(coordinates.bases, sizes, strict=True)]), dtype
        )
        several = len(coordinates.tables) > 1
        return from_integers(
            [code.levels[coordinates.members(c)] for c in range(len(coordinates.tables))],
            coordinates.labels if several else None,
            code.scales.values,
            scales="row",
            groups=code.scales.values.shape[1],
            basis=basis.levels,
            basis_scale=basis.scales.values,
            flats=flat_layout(coordinates),
            unit=code.scales.unit + basis.scales.unit,
        )


def _sizes(coordinates: ClusterCoordinates, flat: int) -> Tensor:
    """(r,) the root mean square of each coordinate of a flat over the rows that have it, 1 in place of 0."""
    sums, counts = torch.zeros(2, len(coordinates.bases[flat]), dtype=torch.float64)
    for table, of in zip(coordinates.tables, coordinates.flat_of, strict=True):
        if of == flat:
            sums[: table.shape[1]] += table.square().sum(0)
            counts[: table.shape[1]] += len(table)
    size = (sums / counts.clamp_min(1.0)).sqrt()
    return torch.where(size > 0, size, torch.ones_like(size))
