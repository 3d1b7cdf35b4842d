"""Entropy coding in many short streams that are decoded side by side: what reads random rows of a long table.

A stream holds a few rows, so that one row is decoded without the others. One stream is a *lane*: each step of the
decoder takes one integer from every lane, in a dozen operations on whole arrays. The coder is the range variant of
asymmetric numeral systems (Duda, arXiv:1311.2540) with a state x of 32 bits and bytes w. With f and c the frequency of
a symbol and the sum of those before it, out of 2^12:

    slot = x mod 2^12,    x <- f floor(x / 2^12) + slot - c,    x <- 2^8 x + w   while x < 2^24 and bytes are left

The encoder does the inverse, from the last integer to the first, and begins with x = 0: a lane takes 4 bits more than
its integers need on average. Whole numbers alone are used, so that all machines decode alike.

A row is its class, coded first, and the integers of its columns: each follows the distribution that its class and its
column ask for. Symbols 0, 1, 2, 3, ... stand for the integers 0, -1, 1, -2, ...: while x is less than the frequency of
0, zeros leave it as it is. Beyond ``main`` columns only the classes from ``first_wide`` on have integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kflats.common.errors import KflatsError

PRECISION = 12
MOST_SYMBOLS = 256
MOST_SHIFT = 8
_MOST_CONTEXTS, _MOST_ROWS = 2**8, 2**12
_LEAST = 2**24  # of a state between two symbols, once a byte has been written
_MASK = np.uint32(2**PRECISION - 1)
_SCALAR = 24
"""Fewer lanes are decoded one after the other: an operation on an array takes as long as three steps of one lane."""
_SLOT_BITS = 20  # a slot of any context; the bits above hold what a shift leaves out
_SLOT = np.uint32(2**_SLOT_BITS - 1)

Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Slots: TypeAlias = npt.NDArray[np.uint32]
Floats: TypeAlias = npt.NDArray[np.float32]
_Number = TypeVar("_Number", bound=np.generic)


def whole_frequencies(weights: npt.NDArray[np.float64]) -> Ints:
    """(S,) whole numbers from 1 that sum to 2^12, nearest to the shares of ``weights``, S at most 256.

    >>> whole_frequencies(np.array([3.0, 1.0, 0.0])).tolist()
    [3072, 1023, 1]
    """
    shares = weights / weights.sum() * 2**PRECISION
    whole: Ints = np.maximum(1, np.floor(shares)).astype(np.int64)
    while (spare := 2**PRECISION - int(whole.sum())) != 0:
        order = np.argsort((whole - shares) / whole, kind="stable")
        if spare > 0:
            whole[order[:spare]] += 1
        else:
            able = order[::-1][whole[order[::-1]] > 1]
            whole[able[:-spare]] -= 1
    return whole


@dataclass(frozen=True)
class LaneCode:
    """The distributions of a table, and which one each column of each class follows.

    Args:
        frequencies: (K, 256) int64, of the symbols of each context, 0 beyond its last; each sums to 2^12. Context 0 is
            that of the classes.
        offsets: (K,) float32, how far towards zero a number lies from its integer; 0 where there is a shift.
        shifts: (K,) how many low bits of an integer follow its symbol as they are, 0 to 8.
        contexts: (C, r) of each column of each class. rows: in a lane.
        main: columns that classes before ``first_wide`` have.

    Raises:
        KflatsError: numbers that are no code.
    """

    frequencies: Ints
    offsets: Floats
    shifts: Ints
    contexts: Ints
    rows: int
    main: int
    first_wide: int

    def __post_init__(self) -> None:
        count, (classes, columns) = len(self.frequencies), self.contexts.shape
        if not (
            self.frequencies.shape == (count, MOST_SYMBOLS)
            and self.shifts.shape == self.offsets.shape == (count,)
            and (abs(self.offsets) < np.where(self.shifts > 0, 1e-9, 0.5)).all()
            and 1 <= count <= _MOST_CONTEXTS
            and (self.frequencies >= 0).all()
            and (self.frequencies.sum(1) == 2**PRECISION).all()
            and ((self.shifts >= 0) & (self.shifts <= MOST_SHIFT)).all()
            and ((self.contexts >= 0) & (self.contexts < count)).all()
            and 1 <= classes <= int((self.frequencies[0] > 0).sum())
            and 1 <= self.rows <= _MOST_ROWS
            and 0 <= self.main <= columns
            and 0 <= self.first_wide <= classes
        ):
            raise KflatsError("a code of rows with impossible numbers", cause="a damaged file")

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.contexts)

    @cached_property
    def entries(self) -> Slots:
        """(slot - c) * 2^16 + f of each slot of each context, (K * 2^12,)."""
        frequencies = self.frequencies.astype(np.uint32)
        before = np.cumsum(frequencies, 1, dtype=np.uint32) - frequencies
        entries: Slots = self._of_slots(frequencies - (before << np.uint32(16)))
        entries.reshape(-1, 2**PRECISION)[:] += np.arange(2**PRECISION, dtype=np.uint32) << np.uint32(16)
        return entries

    @cached_property
    def numbers(self) -> Floats:
        """What each slot stands for, its integer less the offset; low bits left out by a shift are added later."""
        symbols = np.arange(MOST_SYMBOLS)
        integers = (symbols >> 1 ^ -(symbols & 1)) << self.shifts[:, None]
        integers[0] = symbols
        return self._of_slots((integers - np.sign(integers) * self.offsets[:, None]).astype(np.float32))

    def _of_slots(self, of_symbols: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
        return np.repeat(of_symbols.reshape(-1), self.frequencies.reshape(-1))

    @cached_property
    def bases(self) -> Slots:
        """(r, C) the first slot of the context of each column of each class."""
        return np.ascontiguousarray(self.contexts.T << PRECISION).astype(np.uint32)

    @cached_property
    def column_shifts(self) -> Slots:
        """(r, C) the shift of each column of each class."""
        return np.ascontiguousarray(self.shifts[self.contexts].T).astype(np.uint32)

    @cached_property
    def narrow_shifted(self) -> list[bool]:
        """(main,) whether a class before the wide ones has a shift in this column."""
        return [bool(column.any()) for column in self.column_shifts[: self.main, : self.first_wide]]

    @cached_property
    def shifted(self) -> list[bool]:
        """(r,) whether a class has a shift in this column."""
        return [bool(column.any()) for column in self.column_shifts]


# Decoding ---------------------------------------------------------------------------------------


def decode(
    code: LaneCode, data: Bytes, starts: Ints, ends: Ints, lanes: Ints, rows: Ints
) -> tuple[npt.NDArray[np.uint8], Floats]:
    """The classes (m,) and numbers (m, r) of row ``rows[i]`` of lane ``lanes[i]``; a lane is ``data[start:end]``.

    Damaged bytes give other numbers, never an error.

    Args:
        starts, ends: (lanes,) int64. lanes, rows: (m,) int64; every lane is in it.
    """
    needed = np.zeros(len(starts), dtype=np.int64)
    np.maximum.at(needed, lanes, rows + 1)
    order = np.argsort(-needed, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    run = _Lanes(code, data, starts[order], ends[order])
    labels = np.zeros((code.rows, len(starts)), dtype=np.uint8)
    slots = np.zeros((code.rows, len(code.bases), len(starts)), dtype=np.uint32)
    counts = np.searchsorted(-needed[order], -np.arange(code.rows), side="left")  # lanes with more rows than this
    for row, count in enumerate(counts.tolist()):
        if len(starts) < _SCALAR:
            for lane in range(count):
                run.one_row(row, lane, labels, slots)
        elif count:
            run.all_rows(row, count, labels, slots)
    taken = slots[rows, :, place[lanes]]
    numbers = code.numbers.take(taken & _SLOT, mode="clip")
    if any(code.shifted):
        numbers += (taken >> np.uint32(_SLOT_BITS)).astype(np.float32)
    label = labels[rows, place[lanes]]
    if code.main < len(code.bases):
        numbers[label < code.first_wide, code.main :] = 0.0
    return label, numbers


class _Lanes:
    """The states of all lanes: ``x``, and the byte that each reads next."""

    def __init__(self, code: LaneCode, data: Bytes, starts: Ints, ends: Ints) -> None:
        self.code, self.data = code, data
        self.at, self.ends = starts + 4, ends
        self.x = np.zeros(len(starts), dtype=np.uint32)
        for place in range(4):
            self.x = self.x << np.uint32(8) | data.take(starts + place, mode="clip")
        self.entries = code.entries

    def all_rows(self, row: int, count: int, labels: npt.NDArray[np.uint8], slots: Slots) -> None:
        """One row of each of the first ``count`` lanes."""
        code = self.code
        x, at, ends = self.x[:count], self.at[:count], self.ends[:count]
        first = np.empty(count, dtype=np.uint32)
        self._step(x, at, ends, np.uint32(0), first)
        label = np.minimum(code.numbers.take(first, mode="clip").astype(np.int32), code.classes - 1)
        labels[row, :count] = label
        wide = np.flatnonzero(label >= code.first_wide)
        x2, at2 = x[wide], at[wide]
        # All lanes together, as if no row were wide; then wide rows again, from where they began.
        self._columns(code.narrow_shifted, x, at, ends, label, slots[row, :, :count])
        if len(wide):
            out = np.empty((len(code.bases), len(wide)), dtype=np.uint32)
            self._columns(code.shifted, x2, at2, ends[wide], label[wide], out)
            slots[row, :, wide] = out.T
            x[wide], at[wide] = x2, at2

    def _columns(
        self, shifted: list[bool], x: Slots, at: Ints, ends: Ints, label: npt.NDArray[np.int32], out: Slots
    ) -> None:
        code = self.code
        bases = code.bases[: len(shifted)].take(label, axis=1)
        for column, has_shift in enumerate(shifted):
            self._step(x, at, ends, bases[column], out[column])
            if has_shift:
                shift = code.column_shifts[column].take(label)
                low = x & ((np.uint32(1) << shift) - np.uint32(1))
                out[column] |= low << np.uint32(_SLOT_BITS)
                x >>= shift
                self._refill(x, at, ends)

    def _step(self, x: Slots, at: Ints, ends: Ints, base: Slots | np.uint32, out: Slots) -> None:
        np.bitwise_and(x, _MASK, out=out)
        np.bitwise_or(out, base, out=out)
        entry = self.entries.take(out, mode="clip")
        x >>= np.uint32(PRECISION)
        x *= entry & np.uint32(0xFFFF)
        x += entry >> np.uint32(16)
        self._refill(x, at, ends)

    def _refill(self, x: Slots, at: Ints, ends: Ints) -> None:
        low = (x < _LEAST).nonzero()[0]
        while len(low):
            place = at[low]
            left = place < ends[low]
            low, place = low[left], place[left]
            more = x[low] << np.uint32(8) | self.data.take(place, mode="clip")
            x[low], at[low] = more, place + 1
            low = low[more < _LEAST]

    def one_row(self, row: int, lane: int, labels: npt.NDArray[np.uint8], slots: Slots) -> None:
        """One row of one lane: the same steps on Python's integers."""
        code, entries, data, mask = self.code, self.entries.data, self.data, int(_MASK)
        x, at, end = int(self.x[lane]), int(self.at[lane]), int(self.ends[lane])
        base, shift, label = 0, 0, 0
        bases = shifts = [0]
        taken: list[int] = []
        column, columns = -1, code.main
        while column < columns:
            slot = x & mask | base
            entry = entries[slot]
            x = (entry & 0xFFFF) * (x >> PRECISION) + (entry >> 16)
            while x < _LEAST and at < end:
                x, at = x << 8 | int(data[at]), at + 1
            if shift:
                slot |= (x & (1 << shift) - 1) << _SLOT_BITS
                x >>= shift
                while x < _LEAST and at < end:
                    x, at = x << 8 | int(data[at]), at + 1
            if column < 0:
                label = min(int(code.numbers[slot]), code.classes - 1)
                bases, shifts = code.bases[:, label].tolist(), code.column_shifts[:, label].tolist()
                columns = len(bases) if label >= code.first_wide else code.main
            else:
                taken.append(slot)
            column += 1
            if column < columns:
                base, shift = bases[column], shifts[column]
        labels[row, lane] = label
        slots[row, : len(taken), lane] = taken
        self.x[lane], self.at[lane] = x, at


# Encoding ---------------------------------------------------------------------------------------


def encode(code: LaneCode, labels: npt.NDArray[np.uint8], values: npt.NDArray[np.int32]) -> tuple[Bytes, Ints]:
    """The bytes of all lanes, one after the other, and how many each has.

    Args:
        labels: (lanes, rows). values: (lanes, rows, r), each in the range of its context.
    """
    lanes, rows, columns = values.shape
    before = np.cumsum(code.frequencies, 1) - code.frequencies
    table = (before << 16 | code.frequencies).astype(np.uint32).reshape(-1)
    contexts = (code.contexts * MOST_SYMBOLS).T.astype(np.int32)
    coder = _Encoder(lanes, rows * (3 * columns + 2) + 4)

    def put(who: slice | Ints, row: int, shifted: list[bool]) -> None:
        label, end = labels[who, row], len(shifted)
        shifts = code.column_shifts[:end].take(label, axis=1)
        whole = np.ascontiguousarray(values[who, row, :end].T)
        high = whole >> shifts.astype(np.int32)
        entries = table.take((high << 1 ^ high >> 31) + contexts[:end].take(label, axis=1))
        for column in reversed(range(end)):
            if shifted[column]:
                low = whole[column].astype(np.uint32) & ((np.uint32(1) << shifts[column]) - np.uint32(1))
                coder.put_low(who, low, shifts[column])
            coder.put(who, entries[column])

    for row in reversed(range(rows)):
        wide = np.flatnonzero(labels[:, row] >= code.first_wide)
        x, at = coder.x[wide], coder.at[wide]
        put(slice(None), row, code.narrow_shifted)  # as if no row were wide
        if len(wide):
            coder.x[wide], coder.at[wide] = x, at
            put(wide, row, code.shifted)
        coder.put(slice(None), table.take(labels[:, row]))
    return coder.finish()


class _Encoder:
    """States, and the bytes of each lane from the last to the first."""

    def __init__(self, lanes: int, most: int) -> None:
        self.x = np.zeros(lanes, dtype=np.uint32)
        self.data = np.zeros((lanes, most), dtype=np.uint8)
        self.at = np.full(lanes, most, dtype=np.int64)
        self.lanes = np.arange(lanes)

    def put(self, who: slice | Ints, entry: Slots) -> None:
        """One symbol each of the lanes ``who``: c * 2^16 + f."""
        frequency = entry & np.uint32(0xFFFF)
        x = self.x[who]
        self._emit(who, x, np.uint32(32 - PRECISION), frequency)
        x += x // frequency * (np.uint32(2**PRECISION) - frequency) + (entry >> np.uint32(16))
        self.x[who] = x

    def put_low(self, who: slice | Ints, low: Slots, shift: Slots) -> None:
        """``shift`` bits each as they are."""
        x = self.x[who]
        self._emit(who, x, np.uint32(24), np.uint32(2**8) >> shift)
        self.x[who] = x << shift | low

    def _emit(self, who: slice | Ints, x: Slots, bits: np.uint32, limit: Slots) -> None:
        """Write bytes of the lanes whose x / 2^bits is ``limit`` or more."""
        full = (x >> bits >= limit).nonzero()[0]
        while len(full):
            lanes = self.lanes[who][full]
            state = x[full]
            self.at[lanes] -= 1
            self.data[lanes, self.at[lanes]] = state & np.uint32(0xFF)
            state >>= np.uint32(8)
            x[full] = state
            full = full[state >> bits >= limit[full]]

    def finish(self) -> tuple[Bytes, Ints]:
        """All bytes in the order in which they are read."""
        self.at -= 4
        for place in range(4):
            self.data[self.lanes, self.at + place] = self.x >> np.uint32(24 - 8 * place) & np.uint32(0xFF)
        kept = np.arange(self.data.shape[1]) >= self.at[:, None]
        return self.data[kept], self.data.shape[1] - self.at
