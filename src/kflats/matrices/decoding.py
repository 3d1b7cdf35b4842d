"""Packed integers of one class as numbers, in as few passes over the integers as their layout allows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.numerics.coding.packing import read_codes


@dataclass(frozen=True)
class Reading:
    """How the rows of a class are read.

    ``used``: how many leading columns can be other than zero; ``span``: most bytes that one code lies in; ``width``: 4
    or 8 where every column has this number of bits, else 0; ``centered``: whether a center is other than zero.
    """

    used: int
    span: int
    width: int
    centered: bool

    @property
    def plain(self) -> Reading:
        """The same in operators that ONNX has, too: it cannot shift integers of 16 bits."""
        return Reading(self.used, 3, 0, self.centered)


def reading_of(bits: Tensor, low: Tensor, centers: Tensor, shifts: Tensor, levels: int, rank: int) -> Reading:
    """How a class of this layout, (r,) each, is read; ``shifts`` as ``places_of`` gives them, ``rank`` of its flat."""
    moved = (bits > 0) | (low != 0) | (centers != 0) | bool(levels)
    used = min(int(moved.nonzero().max()) + 1, rank) if bool(moved.any()) else 0
    span = max(1, int(((shifts + bits.to(torch.int32) + 7) >> 3).max())) if bits.numel() else 1
    widths = set(bits.tolist())
    same = len(widths) == 1 and used == len(bits)
    width = widths.pop() if same and widths <= {4, 8} and len(bits) % 2 == 0 else 0
    return Reading(used, span, width, bool((centers != 0).any()))


def integers(packed: Tensor, fields: Tensor, how: Reading, dtype: torch.dtype) -> Tensor:
    """(m, bytes) -> (columns in use, m) integers as numbers of ``dtype``; ``fields`` (4, r): as ``CodedMatrix`` has."""
    starts, shifts, masks, low = fields[:, : how.used]
    if not how.width:
        codes = read_codes(packed, starts, shifts, masks, how.span)
        return codes.to(dtype).add_(low.to(dtype).unsqueeze(1))
    if how.width == 4:
        packed = torch.stack([packed & 15, packed >> 4], dim=-1).view(len(packed), -1)
    return packed.to(dtype).add_(low.to(dtype)).T


def limited(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """``numbers`` as ``dtype``, limited to its range. Decoded numbers may exceed the largest number of a table a
    little; where that number is near the end of the type's range, they would become infinite.

    >>> limited(torch.tensor([70000.0, -1.0]), torch.float16).tolist()
    [65504.0, -1.0]
    """
    if dtype.itemsize >= numbers.dtype.itemsize:
        return numbers.to(dtype)
    limit = torch.finfo(dtype).max
    return numbers.clamp(-limit, limit).to(dtype)


@dataclass(frozen=True)
class Tile:
    """Rows of one class of one flat, from place ``first`` on. Coordinate j of row i is

        rows_i columns_j (numbers_ji + centers_j)          factors of 1 and centers of 0 are None

    ``numbers`` (columns in use, m). Products apply the factors to their inputs or results, which are smaller.
    """

    flat: int
    first: int
    numbers: Tensor
    rows: Tensor | None
    columns: Tensor | None
    centers: Tensor | None

    def as_type(self, dtype: torch.dtype, *, final: bool) -> Tile:
        """For products in ``dtype``; half types hold the sums of coordinates, but not the sums of integers.

        ``final``: the coordinates are the numbers of a table of this type, and are limited to its range. Other
        coordinates become infinite beyond the range, so that a wrong product is seen.
        """
        if dtype == self.numbers.dtype:
            return self
        if dtype.itemsize < 4:
            whole = limited(self.whole(), dtype) if final else self.whole().to(dtype)
            return Tile(self.flat, self.first, whole, None, None, None)
        others = (None if t is None else t.to(dtype) for t in (self.rows, self.columns, self.centers))
        return Tile(self.flat, self.first, self.numbers.to(dtype), *others)

    def whole(self) -> Tensor:
        """(columns in use, m), with all factors applied."""
        found = self.numbers if self.centers is None else self.numbers + self.centers.unsqueeze(1)
        found = found if self.columns is None else found * self.columns.unsqueeze(1)
        return found if self.rows is None else found * self.rows
