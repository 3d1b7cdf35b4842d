"""Integers of any width: a scale for each row or group of columns, by its largest entry."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.codecs.cluster_coordinates import ClusterCoordinates, flat_layout, rounded_basis
from kflats.codecs.fixed_rate import FixedRateCodec, Layout
from kflats.codecs.protocol import Codec, Table
from kflats.common.errors import KflatsError
from kflats.matrices.coded import CodedMatrix
from kflats.matrices.coded_build import from_integers
from kflats.methods import SVD, KeepDense
from kflats.methods.matrix_error import weighted_error
from kflats.methods.problem import Problem
from kflats.methods.protocol import Method
from kflats.numerics.coding.absmax import absmax_code
from kflats.numerics.rows import Rows


@dataclass(frozen=True)
class Integer(FixedRateCodec):
    """Integers of ``bits`` bits and a scale for each row, or for every ``group`` columns of it.

        a_ij  ~  scale_ig q_ij,      |q_ij| <= 2^(bits - 1) - 1,      scale_ig = max_j |a_ij| / (2^(bits - 1) - 1)

    With ``KeepDense()`` the matrix itself: nearly lossless at 8 bits, a little over a quarter of float32. With any
    other method the coordinates in its flats, each column divided by its own size, of bases that have 8 bits; of
    ``Flats`` all rows are rounded, none is kept exactly.

    Args:
        bits: 2 to 8.
        group: None: one scale a row. Otherwise as few groups as have at most this number of columns, equal but for the
            last. 8 bits need no groups; 4 bits want groups of 32 to 128.

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
        if isinstance(self.bits, bool) or self.bits not in range(2, 9):
            raise KflatsError(f"Integer cannot store numbers in {self.bits!r} bits", hint="2 to 8")
        if self.group is not None and (
            isinstance(self.group, bool) or not isinstance(self.group, int) or self.group < 1
        ):
            raise KflatsError(
                f"Integer cannot group {self.group!r} columns", hint="a whole number from 1, or None for whole rows"
            )

    def groups(self, columns: int) -> int:
        """How many scales a row of so many columns has."""
        return 1 if self.group is None else -(-columns // self.group)

    @property
    def bits_per_number(self) -> int:
        """As ``FixedRateCodec.bits_per_number``."""
        return self.bits

    def layout(self, columns: int) -> Layout:
        """As ``FixedRateCodec.layout``."""
        return Layout(self.bits, self.groups(columns))

    def rounding_share(self, method: Method, table: Table) -> float:
        """As ``FixedRateCodec.rounding_share``: measured on an SVD of all ranks."""
        if float(table.spectrum[0]) <= 0:
            return 0.0
        shape, itemsize = table.rows.shape, table.dtype.itemsize
        # Twice: of a small matrix the header of a file is most.
        room = 2 * (self.memory_bytes(shape, itemsize, min(shape)) + self.min_bytes(method, shape, itemsize))
        stored = self.encode(SVD(), Problem(table.rows, room, itemsize, table.weighting), table.dtype)
        return min(1.0, weighted_error(table.rows, stored.matrix, table.weighting).relative)

    def round_rows(self, rows: Rows, dtype: torch.dtype, seed: int) -> CodedMatrix:
        """As ``FixedRateCodec.round_rows``."""
        groups = self.groups(rows.shape[1])
        code = absmax_code(rows, self.bits, -(-rows.shape[1] // groups), dtype=dtype)
        scales = code.scales
        return from_integers([code.levels], None, scales.values, scales="row", groups=groups, unit=scales.unit)

    def round_coordinates(self, coordinates: ClusterCoordinates, dtype: torch.dtype, seed: int) -> CodedMatrix:
        """As ``FixedRateCodec.round_coordinates``.

        Raises:
            KflatsError: flats of rank 0 alone.
        """
        if not coordinates.rank:
            raise KflatsError("no flat has a rank", cause="a matrix of zeros", hint="KeepDense(), or leave it as it is")
        sizes = [_sizes(coordinates, flat) for flat in range(len(coordinates.bases))]
        whole = torch.zeros(len(coordinates.labels), coordinates.rank)
        for c, (table, flat) in enumerate(zip(coordinates.tables, coordinates.flat_of, strict=True)):
            rank = table.shape[1]
            whole[coordinates.members(c), :rank] = (table / sizes[flat][:rank]).to(torch.float32)
        groups = self.groups(coordinates.rank)
        code = absmax_code(whole, self.bits, -(-coordinates.rank // groups), dtype=dtype)
        basis = rounded_basis(
            torch.cat([basis * size.unsqueeze(1) for basis, size in zip(coordinates.bases, sizes, strict=True)]), dtype
        )
        several = len(coordinates.tables) > 1
        return from_integers(
            [code.levels[coordinates.members(c)] for c in range(len(coordinates.tables))],
            coordinates.labels if several else None,
            code.scales.values,
            scales="row",
            groups=groups,
            basis=basis.levels,
            basis_scale=basis.scales.values,
            flats=flat_layout(coordinates),
            unit=code.scales.unit + basis.scales.unit,
        )

    @classmethod
    def automatic(cls, shape: tuple[int, int]) -> tuple[tuple[Method, Codec], ...]:
        """The matrix itself in 8 and in 4 bits."""
        return (KeepDense(), cls(8)), (KeepDense(), cls(4, group=64))


def _sizes(coordinates: ClusterCoordinates, flat: int) -> Tensor:
    """(r,) the root mean square of each coordinate of a flat, over the rows that have it; 1 for those of zeros."""
    sums, counts = torch.zeros(2, len(coordinates.bases[flat]), dtype=torch.float64)
    for table, of in zip(coordinates.tables, coordinates.flat_of, strict=True):
        if of == flat:
            sums[: table.shape[1]] += table.square().sum(0)
            counts[: table.shape[1]] += len(table)
    size = (sums / counts.clamp_min(1.0)).sqrt()
    return torch.where(size > 0, size, torch.ones_like(size))
