"""A random rotation before rounding, so that the error does not depend on the matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kflats.codecs.cluster_coordinates import ClusterCoordinates, flat_layout, rounded_basis
from kflats.codecs.fixed_rate import FixedRateCodec, Layout
from kflats.codecs.protocol import Table
from kflats.common.arguments import is_whole
from kflats.common.errors import KflatsError
from kflats.matrices.coded import CodedMatrix
from kflats.matrices.coded_build import from_integers
from kflats.methods.protocol import Method
from kflats.numerics.coding.rotation import RotationCode, gaussian_share, rotation_code
from kflats.numerics.coding.scales import scales_of
from kflats.numerics.rows import Rows


@dataclass(frozen=True)
class Rotation(FixedRateCodec):
    """A random rotation, then the 2^bits values of least squared error for a Gaussian.

    The error is that of a Gaussian source for every matrix: a share of .363, .117, .035, .0095 at 1 to 4 bits (Max, IRE
    Trans. IT 6, 1960). With ``KeepDense()`` the matrix itself is rotated, and nothing depends on data. With any other
    method the coordinates in each of its flats are rotated.

    Args:
        bits: 1 to 8. None: the most bits that the budget holds; with a method of flats, the bits at which its rank and
            rounding lose least together.

    Choose it where the error must be known before the weights are. ``Transform`` loses less in the same bytes.
    """

    bits: int | None = None

    def __post_init__(self) -> None:
        if self.bits is not None and not is_whole(self.bits, 1, 8):
            raise KflatsError(
                f"bits={self.bits!r} is not supported with Rotation",
                hint="1 to 8, or no bits for a choice by the budget",
            )

    def choices(self) -> tuple[FixedRateCodec, ...]:
        """As ``FixedRateCodec.choices``."""
        return (self,) if self.bits is not None else tuple(Rotation(bits) for bits in range(8, 0, -1))

    @property
    def bits_per_number(self) -> int:
        """As ``FixedRateCodec.bits_per_number``; 1 where the budget chooses."""
        return self.bits or 1

    def layout(self, columns: int) -> Layout:
        """As ``FixedRateCodec.layout``."""
        return Layout(self.bits_per_number, levels=2**self.bits_per_number)

    def rounding_share(self, method: Method, table: Table) -> float:
        """As ``FixedRateCodec.rounding_share``: that of a Gaussian source."""
        return gaussian_share(self.bits_per_number)

    def refusal(self, method: Method) -> tuple[str, str] | None:
        """As ``FixedRateCodec.refusal``."""
        if method.nested_ranks > 1:
            cause = "a rotation mixes all columns, and nested ranks need columns in order"
            return cause, "nested_ranks=1, or Integer(8)"
        return super().refusal(method)

    def counted_bytes(self, method: Method, rows: Rows, dtype: torch.dtype) -> int:
        """As ``Codec.counted_bytes``: a bound, because the bytes depend a little on the seed."""
        return super().counted_bytes(method, rows, dtype) + rows.shape[1] ** 2 // 16 + 200

    def round_rows(self, rows: Rows, dtype: torch.dtype, seed: int) -> CodedMatrix:
        """As ``FixedRateCodec.round_rows``."""
        code = rotation_code(rows, self.bits_per_number, seed=seed, dtype=torch.float64)
        return _rotated([code], None, [code.rotation.matrix()], (), (rows.shape[0],), dtype)

    def round_coordinates(self, coordinates: ClusterCoordinates, dtype: torch.dtype, seed: int) -> CodedMatrix:
        """As ``FixedRateCodec.round_coordinates``: each flat has a rotation of its own."""
        codes, bases = [], []
        for number, (table, basis) in enumerate(zip(coordinates.tables, coordinates.bases, strict=True)):
            code = rotation_code(table.to(torch.float32), self.bits_per_number, seed=seed + number, dtype=torch.float64)
            codes.append(code)
            bases.append(code.rotation.matrix().to(torch.float64) @ basis)
        labels = coordinates.labels if len(codes) > 1 else None
        counts = tuple(len(table) for table in coordinates.tables)
        return _rotated(codes, labels, bases, flat_layout(coordinates), counts, dtype)


def _rotated(
    codes: Sequence[RotationCode],
    labels: Tensor | None,
    bases: Sequence[Tensor],
    flats: tuple[tuple[int, int], ...],
    counts: Sequence[int],
    dtype: torch.dtype,
) -> CodedMatrix:
    rank = max(code.levels.shape[1] for code in codes)
    values = codes[0].values
    lengths = torch.empty(sum(counts), dtype=torch.float64)
    for c, code in enumerate(codes):
        mine = slice(None) if labels is None else (labels == c).nonzero().squeeze(1)
        lengths[mine] = code.scales.wide
    scales = scales_of(lengths, dtype)
    basis = rounded_basis(torch.cat([basis.to(torch.float64) for basis in bases]), dtype)
    integers = [code.levels.to(torch.int16) - len(values) // 2 for code in codes]
    return from_integers(
        [F.pad(one, (0, rank - one.shape[1])) for one in integers],
        labels,
        scales.values,
        levels=values.to(dtype),
        scales="row",
        basis=basis.levels,
        basis_scale=basis.scales.values,
        flats=flats,
        unit=scales.unit + basis.scales.unit,
    )
