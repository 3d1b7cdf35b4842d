"""Integers of any width: a scale for each row or group of columns, by its largest entry."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kflats.codecs.protocol import Codec
from kflats.codecs.row_scales import RowScaleCodec
from kflats.common.arguments import is_whole
from kflats.common.errors import KflatsError
from kflats.methods import KeepDense, Method
from kflats.numerics.coding.rounding import RoundedRows, absmax_code
from kflats.numerics.rows import Rows


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
        if not is_whole(self.bits, 2, 8):
            raise KflatsError(f"bits={self.bits!r} is not supported with Integer", hint="2 to 8")
        if self.group is not None and not is_whole(self.group, 1):
            raise KflatsError(
                f"group={self.group!r} is not supported with Integer",
                hint="a number of columns from 1, or no group for whole rows",
            )

    def groups(self, columns: int) -> int:
        """The number of scales in a row with this number of columns."""
        return 1 if self.group is None else -(-columns // self.group)

    def rounded(self, rows: Rows, dtype: torch.dtype) -> RoundedRows:
        """As ``RowScaleCodec.rounded``."""
        return absmax_code(rows, self.bits, self.groups(rows.shape[1]), dtype)

    @classmethod
    def automatic(cls, shape: tuple[int, int]) -> tuple[tuple[Method, Codec], ...]:
        """The matrix itself in 8 and in 4 bits."""
        return (KeepDense(), cls(8)), (KeepDense(), cls(4, group=64))
