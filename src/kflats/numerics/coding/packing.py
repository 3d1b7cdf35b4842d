"""Integers at fixed rates: every row of a class in the same number of bytes, each column in the bits it needs.

A column of b bits is split into planes of 8, 4, 2 and 1 bits (b = 5 is 4 + 1), and a row stores plane after plane.
Within a plane a byte holds 8 / width columns, so that packing and unpacking are shifts of whole blocks: no gather
of bytes, no loop over columns. A column of 0 bits costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.errors import KflatsError

PLANES = (8, 4, 2, 1)
MOST_BITS = sum(PLANES)


@dataclass(frozen=True)
class Layout:
    """How rows of r integers are stored: column j holds ``low[j]`` .. ``low[j] + 2**bits[j] - 1``.

    Args:
        bits: (r,) uint8, at most 15.
        low: (r,) int16.

    Raises:
        KflatsError: shapes or types that differ from these, more than 15 bits, or a range that leaves int16.

    >>> Layout(torch.tensor([3, 0, 1], dtype=torch.uint8), torch.tensor([-4, 7, 0], dtype=torch.int16)).row_bytes
    2
    """

    bits: Tensor
    low: Tensor

    def __post_init__(self) -> None:
        if self.bits.ndim != 1 or self.low.shape != self.bits.shape:
            raise KflatsError(f"a layout of {tuple(self.bits.shape)} bits and {tuple(self.low.shape)} offsets")
        if self.bits.dtype != torch.uint8 or self.low.dtype != torch.int16:
            raise KflatsError(f"a layout of {self.bits.dtype} bits and {self.low.dtype} offsets")
        if bool((self.bits > MOST_BITS).any()):
            raise KflatsError(f"a column of more than {MOST_BITS} bits", cause="a damaged file")
        if bool((self.low.to(torch.int64) + (1 << self.bits.to(torch.int64)) - 1 > 32767).any()):
            raise KflatsError("a column whose numbers leave 16 bits", cause="a damaged file")

    def columns(self, plane: int) -> Tensor:
        """The columns that have a plane of this width, ascending."""
        return (self.bits & plane).nonzero().squeeze(1)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return sum(-(-int((self.bits & plane).ne(0).sum()) * plane // 8) for plane in PLANES)


def layout_of(levels: Tensor) -> Layout:
    """The smallest layout for all rows of ``levels`` (m, r): bits = ceil(log2(range)) of each column.

    A column that never varies gets 0 bits and its value as ``low``.

    >>> layout_of(torch.tensor([[1, 5, -1], [1, 5, 1]])).bits.tolist()
    [0, 0, 2]
    """
    r = levels.shape[1]
    if not len(levels):
        return Layout(torch.zeros(r, dtype=torch.uint8), torch.zeros(r, dtype=torch.int16))
    low, high = (levels.amin(0).to(torch.int64), levels.amax(0).to(torch.int64))
    if r and (int(low.min()) < -32768 or int(high.max() - low.min()) > 32767 or int(high.max()) > 32767):
        raise KflatsError(
            f"levels from {int(low.min())} to {int(high.max())} cannot be packed",
            cause="steps far too small for the range of the matrix",
            hint="fewer bits, or leave the matrix in float16",
        )
    powers = 2 ** torch.arange(MOST_BITS, device=levels.device)
    bits = torch.bucketize(high - low, powers - 1).to(torch.uint8)  # least b with 2^b - 1 >= range
    # A range may not end beyond int16 where its power of two does.
    low = torch.minimum(low, 32768 - (1 << bits.to(torch.int64)))
    return Layout(bits, low.to(torch.int16))


def pack(levels: Tensor, layout: Layout) -> Tensor:
    """(m, r) integers as (m, row_bytes) uint8. Exact: ``unpack(pack(x, layout), layout) == x``.

    Raises:
        KflatsError: another number of columns, or a level outside its column's range.
    """
    if levels.ndim != 2 or levels.shape[1] != len(layout.bits):
        raise KflatsError(f"levels of shape {tuple(levels.shape)} do not fit a layout of {len(layout.bits)} columns")
    codes = levels.to(torch.int32) - layout.low.to(torch.int32)
    if bool(((codes < 0) | (codes >= 1 << layout.bits.to(torch.int32))).any()):
        raise KflatsError("a level lies outside the range of its column")
    parts = []
    for plane, columns, below in _planes(layout):
        part = (codes[:, columns] >> below) & ((1 << plane) - 1)
        each = 8 // plane
        part = torch.nn.functional.pad(part, (0, -part.shape[1] % each)).view(len(levels), -1, each)
        shifts = torch.arange(0, 8, plane, device=levels.device, dtype=torch.int32)
        parts.append((part << shifts).sum(2).to(torch.uint8))
    return torch.cat(parts, 1) if parts else levels.new_zeros(len(levels), 0, dtype=torch.uint8)


def unpack(packed: Tensor, layout: Layout) -> Tensor:
    """(m, row_bytes) uint8 as (m, r) int16, a transposed view: columns are contiguous.

    Raises:
        KflatsError: another number of bytes a row than the layout's.
    """
    if packed.ndim != 2 or packed.dtype != torch.uint8 or packed.shape[1] != layout.row_bytes:
        raise KflatsError(
            f"{packed.dtype} codes of shape {tuple(packed.shape)} are not rows of {layout.row_bytes} bytes",
            cause="a damaged or truncated file",
        )
    # Column by column: what lies beside each other in memory is then one column of all rows, which is added as a whole.
    columns_first = packed.T.contiguous()
    levels = layout.low.unsqueeze(1).repeat(1, len(packed))
    taken = 0
    for plane, columns, below in _planes(layout):
        each = 8 // plane
        width = -(-len(columns) // each)
        part = columns_first[taken : taken + width].unsqueeze(1)
        shifts = torch.arange(0, 8, plane, device=packed.device, dtype=torch.uint8).unsqueeze(1)
        part = ((part >> shifts) & ((1 << plane) - 1)).flatten(0, 1)[: len(columns)]
        levels[columns] += part.to(torch.int16) << below.unsqueeze(1)
        taken += width
    return levels.T


def _planes(layout: Layout) -> list[tuple[int, Tensor, Tensor]]:
    """(width, its columns, bits of each column in wider planes), widest first."""
    found = []
    for plane in PLANES:
        columns = layout.columns(plane)
        if len(columns):
            found.append((plane, columns, (layout.bits[columns] & ~(2 * plane - 1) & MOST_BITS).to(torch.int16)))
    return found
