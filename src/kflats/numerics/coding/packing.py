"""Integers at fixed rates: every row of a class in the same number of bytes, each column in the bits it needs.

A row is one string of bits, least significant first: column after column, without gaps, and zeros up to a whole byte.
A column therefore begins at the same byte and bit of every row of its class, so that unpacking is one gather of
bytes, a shift and a mask for all columns at once. A column of 0 bits costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.common.errors import KflatsError

MOST_BITS = 15
_AT_ONCE = 2**22  # integers that are packed at a time


@dataclass(frozen=True)
class PackedLayout:
    """How rows of r integers are stored: column j holds ``low[j]`` .. ``low[j] + 2**bits[j] - 1``.

    Args:
        bits: (r,) uint8, at most 15.
        low: (r,) int16.

    Raises:
        KflatsError: more than 15 bits, or a range that leaves int16.

    >>> PackedLayout(torch.tensor([3, 0, 1], dtype=torch.uint8), torch.tensor([-4, 7, 0], dtype=torch.int16)).row_bytes
    1
    """

    bits: Tensor
    low: Tensor

    def __post_init__(self) -> None:
        if bool((self.bits > MOST_BITS).any()):
            raise KflatsError(f"a column of more than {MOST_BITS} bits", cause="a damaged file")
        if bool((self.low.to(torch.int64) + (1 << self.bits.to(torch.int64)) - 1 > 32767).any()):
            raise KflatsError("a column whose numbers leave 16 bits", cause="a damaged file")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return -(-int(self.bits.sum(dtype=torch.int64)) // 8)


def layout_of(levels: Tensor) -> PackedLayout:
    """The smallest layout for all rows of ``levels`` (m, r): bits = ceil(log2(range)) of each column.

    A column that never varies gets 0 bits and its value as ``low``.

    >>> layout_of(torch.tensor([[1, 5, -1], [1, 5, 1]])).bits.tolist()
    [0, 0, 2]
    """
    r = levels.shape[1]
    if not len(levels):
        return PackedLayout(torch.zeros(r, dtype=torch.uint8), torch.zeros(r, dtype=torch.int16))
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
    return PackedLayout(bits, low.to(torch.int16))


def pack(levels: Tensor, layout: PackedLayout) -> Tensor:
    """(m, r) integers as (m, row_bytes) uint8. Exact: ``unpack(pack(x, layout), layout) == x``.

    Raises:
        KflatsError: a level outside its column's range.
    """
    packed = torch.empty(len(levels), layout.row_bytes, dtype=torch.uint8, device=levels.device)
    step = max(1, _AT_ONCE // max(1, levels.shape[1]))
    for first in range(0, len(levels), step):
        packed[first : first + step] = _packed(levels[first : first + step], layout)
    return packed


def _packed(levels: Tensor, layout: PackedLayout) -> Tensor:
    # Columns first: a column is then one contiguous block, which is checked, shifted and added as a whole.
    outside = False
    if levels.dtype != torch.int16 and levels.numel():
        outside = int(levels.min()) < -32768 or int(levels.max()) > 32767
    # Differences wrap around in 16 bits, and none into its range: low + 2^bits - 1 is at most 32767.
    codes = levels.T.to(torch.int16).contiguous() - layout.low.unsqueeze(1)
    if codes.numel():
        outside |= bool(((codes.amin(1) < 0) | (codes.amax(1) >> layout.bits.to(torch.int16) != 0)).any())
    if outside:
        raise KflatsError(
            "a level lies outside the range of its column", cause="damaged codes, or the layout of another matrix"
        )
    # What begins at one of 8 bits and has at most 15 lies in 3 bytes, most in 2. No two codes share a bit.
    starts, shifts, _ = places_of(layout.bits)
    span = int((shifts + layout.bits + 7 >> 3).max()) if len(shifts) else 0
    kind = torch.int16 if span <= 2 else torch.int32
    words = torch.zeros(layout.row_bytes + 3, len(levels), dtype=kind, device=levels.device)  # that begin at each byte
    words.index_add_(0, starts, codes.to(kind) << shifts.to(kind).unsqueeze(1))
    packed = words.to(torch.uint8)
    for byte in range(1, span):
        packed[byte:] |= (words[:-byte] >> 8 * byte).to(torch.uint8)
    return packed[: layout.row_bytes].T


def unpack(packed: Tensor, layout: PackedLayout) -> Tensor:
    """(m, row_bytes) uint8 as (m, r) int16, a transposed view: columns are contiguous."""
    starts, shifts, masks = places_of(layout.bits)
    codes = read_codes(packed, starts, shifts, masks)
    return (codes + layout.low.to(torch.int32).unsqueeze(1)).to(torch.int16).T


def places_of(bits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(..., r) bits of each column -> where it lies in a row, each (..., r) int32: first byte, shift in it, mask.

    >>> [t.tolist() for t in places_of(torch.tensor([3, 7, 0]))]
    [[0, 0, 1], [0, 3, 2], [7, 127, 0]]
    """
    bits = bits.to(torch.int32)
    first = bits.cumsum(-1, dtype=torch.int32) - bits
    return first >> 3, first & 7, (1 << bits) - 1


def read_codes(packed: Tensor, starts: Tensor, shifts: Tensor, masks: Tensor, span: int = 3) -> Tensor:
    """(m, row_bytes) uint8 -> (k, m), the codes of the k columns that lie at ``starts`` (see ``places_of``).

    ``span`` is in how many bytes a code may lie, 3 at most; up to 2, codes are int16, and int32 otherwise.
    """
    # Columns first: the gather then moves whole blocks. Columns of 0 bits may begin where the row ends.
    size, kind = packed.shape[1], torch.int16 if span <= 2 else torch.int32
    padded = torch.empty(size + span, len(packed), dtype=kind, device=packed.device)
    padded[:size] = packed.T
    padded[size:] = 0
    words = padded[: size + 1]
    if span > 1:
        words = words | (padded[1 : size + 2] << 8)
    if span > 2:
        words |= padded[2 : size + 3] << 16
    # A sign that a shift to the right draws in lies above every mask.
    columns = words.index_select(0, starts)
    return columns.bitwise_right_shift_(shifts.to(kind).unsqueeze(1)).bitwise_and_(masks.to(kind).unsqueeze(1))
