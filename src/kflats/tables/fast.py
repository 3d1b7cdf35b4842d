"""The fast layout: every row in the same number of bytes, so that a row is found by its number and read at once.

A coordinate in principal axes gets b bits, which stand for 2^b values a step apart around 0. The bits are shared one by
one: each goes where it lowers the squared error of the sample most. Steps and bits are those of rows in units of their
scale; the scale of a row is a power of 2^(1/8), and a byte. Where rows are of one length, scales are left out.

Rows are read by a gather of bytes, a shift and a mask for all columns at once, and one matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.coding.lanes import Bytes, Ints
from kflats.numerics.coding.packing import PackedLayout, pack, places_of, read_codes
from kflats.tables.axes import Axes
from kflats.tables.layout import NAMES, Coordinates, tensor_of
from kflats.tables.shards import Shard, ShardRecord, ShardWriter

_MOST_BITS = 9  # bits that lie in two bytes wherever they begin
_WIDTHS = torch.linspace(0.5, 6.0, 23, dtype=torch.float32)
"""Largest values, in root mean squares, among which that of a step is chosen."""
_SAMPLE = 8192  # rows on which bits and steps are chosen
_COLUMNS = 16
_OCTAVE = 8  # scales an octave
_DECODED = 4096  # rows that are decoded at once
_AT_ONCE = 2048  # rows that are rounded at once: they stay in the processor's cache
_FAR = 2.0  # largest values: the best steps for few bits leave out what lies nearer


@dataclass(frozen=True)
class FastCode:
    """``bits`` (r,) uint8 and ``steps`` (r,) of the coordinates; ``top``, the largest scale of a row, 0 where rows have
    none; ``weights`` (r,), by which the scale of a row is found when it is encoded."""

    bits: Tensor
    steps: Tensor
    weights: Tensor
    top: Tensor
    axes: Axes
    mean: Tensor

    batch = _DECODED
    flats = 1

    @classmethod
    def of(cls, sample: Tensor, axes: Axes, mean: Tensor, row_bytes: int) -> FastCode:
        """The code of ``row_bytes`` a row that loses least on ``sample`` (m, r), rows in principal axes."""
        sample = _few(sample)
        energies = sample.square().mean(0)
        if float(energies.max()) <= 0:
            raise KflatsError("the table has no numbers but one row many times", hint="keep that row")
        # A row that is s times a row of these energies has this scale; coordinates without energy say nothing.
        weights = torch.where(energies > 1e-6 * energies.max(), 1 / energies.clamp_min(1e-38), 0.0)
        weights = weights / (weights > 0).sum()
        ways = []
        for scaled in (True, False):
            if 8 * row_bytes > 8 * scaled:
                scales = (sample.square() @ weights).sqrt() if scaled else torch.ones(len(sample), dtype=torch.float32)
                error, bits, steps = _shared(sample, scales.clamp_min(1e-30), 8 * row_bytes - 8 * scaled)
                ways.append((error, bits, steps, 2 * scales.max() if scaled else torch.zeros((), dtype=torch.float32)))
        _, bits, steps, top = min(ways, key=lambda way: way[0])
        return cls(bits, steps, weights, top.view(1).to(torch.float32), axes, mean)

    def __post_init__(self) -> None:
        if int(self.bits.max()) > _MOST_BITS or not int(self.bits.max()):
            raise KflatsError("a fixed-rate code with impossible bits", cause="a damaged file")

    @staticmethod
    def most_bytes(columns: int) -> int:
        """The most bytes that a row may take."""
        return 1 + -(-_MOST_BITS * columns // 8)

    @staticmethod
    def head_bytes(axes: Axes) -> int:
        """Bytes of the head, and a little more."""
        return axes.nbytes + 16 * axes.scales.shape[1] + NAMES

    @property
    def scaled(self) -> bool:
        """Whether rows have scales."""
        return float(self.top) > 0

    @cached_property
    def packed_layout(self) -> PackedLayout:
        """Where coordinates lie in a row, after its scale."""
        return PackedLayout(self.bits, torch.zeros(len(self.bits), dtype=torch.int16))

    @cached_property
    def row_bytes(self) -> int:
        """Bytes a row."""
        return self.packed_layout.row_bytes + self.scaled

    @cached_property
    def _live(self) -> tuple[Tensor, ...]:
        """Starts, shifts and masks of the coordinates with bits, the rows of axes times their steps, and what stands
        for the middle of their values."""
        live = self.bits.nonzero().squeeze(1)
        starts, shifts, masks = (part[live] for part in places_of(self.bits))
        axes = self.axes.dense[0][live] * self.steps[live].unsqueeze(1)
        middle = ((1 << self.bits[live].to(torch.int32)) - 1).to(torch.float32) / 2
        return starts, shifts, masks, axes, -(middle @ axes)

    @cached_property
    def _scales(self) -> Tensor:
        """(256,) the scale that each byte stands for; 0 stands for rows of zeros."""
        scales = self.top * 2 ** ((torch.arange(256, dtype=torch.float32) - 255) / _OCTAVE)
        scales[0] = 0.0
        return scales

    def tensors(self) -> dict[str, Tensor]:
        """As ``RowCode.tensors``."""
        names = ("bits", "steps", "weights", "top", "mean")
        return {**self.axes.tensors(), **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], columns: int) -> FastCode:
        """The code that ``tensors`` came from.

        Raises:
            KflatsError: they are no code of so many columns.
        """
        return cls(
            tensor_of(tensors, "bits", torch.uint8, columns),
            tensor_of(tensors, "steps", torch.float32, columns),
            tensor_of(tensors, "weights", torch.float32, columns),
            tensor_of(tensors, "top", torch.float32, 1),
            Axes.from_tensors(tensors, columns),
            tensor_of(tensors, "mean", torch.float32, columns),
        )

    def writer(self, file: ShardWriter) -> FastWriter:
        """As ``RowCode.writer``."""
        return FastWriter(self, file)

    def check(self, shard: Shard, rows: int) -> None:
        """As ``RowCode.check``."""
        if not rows * self.row_bytes <= len(shard.data) < rows * self.row_bytes + 8:
            raise shard.damaged("it has another number of rows")

    def _fetch(self, shard: Shard, rows: Ints) -> Bytes:
        """(m, row_bytes)."""
        if not shard.checked:
            starts = rows * self.row_bytes
            shard.check(starts, starts + self.row_bytes)
        whole = len(shard.data) // self.row_bytes
        return shard.data[: whole * self.row_bytes].reshape(whole, self.row_bytes).take(rows, 0)

    def decode(self, pieces: Sequence[tuple[Shard, Ints]], out: Tensor) -> None:
        """As ``RowCode.decode``."""
        packed = torch.from_numpy(np.concatenate([self._fetch(shard, rows) for shard, rows in pieces]))
        starts, shifts, masks, axes, middle = self._live
        codes = read_codes(packed[:, self.scaled :], starts, shifts, masks, 2).to(torch.float32)
        if self.scaled:
            torch.addmm(middle, codes.T, axes, out=out)
            out.mul_(self._scales[packed[:, 0].to(torch.int64)].unsqueeze(1)).add_(self.mean)
        else:
            torch.addmm(middle + self.mean, codes.T, axes, out=out)

    def error_within(self, sample: Tensor) -> float:
        """The squared error of a row but for coordinates far beyond the largest value of their column, as in the rows
        of the ``sample`` by which the code was chosen."""
        total = 0.0
        chosen = _few(sample)
        _, scales = self._labels(chosen)
        for here in range(0, len(chosen), _AT_ONCE):
            part = slice(here, here + _AT_ONCE)
            units, lost = self._units(chosen[part], scales[part]), chosen[part].clone()
            far = units.abs() > _FAR * self._parts.half
            self._round_(units, lost, scales[part])
            total += float(torch.where(far & (self.bits > 0), 0.0, lost.square_()).sum(dtype=torch.float64))
        return total / len(chosen)

    def encoded(self, rows: Tensor) -> tuple[Tensor, float]:
        """(m, row_bytes) uint8 of rows in principal axes, and their squared error; changes ``rows``."""
        labels, scales = self._labels(rows)
        codes, error = torch.empty(rows.shape, dtype=torch.int16), 0.0
        for here in range(0, len(rows), _AT_ONCE):
            part = slice(here, here + _AT_ONCE)
            units = self._units(rows[part], scales[part])
            codes[part] = self._round_(units, rows[part], scales[part])
            error += float(torch.linalg.vector_norm(rows[part])) ** 2
        return torch.cat([*labels, pack(codes, self.packed_layout)], dim=1), error

    def _labels(self, rows: Tensor) -> tuple[list[Tensor], Tensor]:
        """The bytes of the rows' scales (m, 1), if they have any, and their scales (m, 1)."""
        if not self.scaled:
            return [], torch.ones(len(rows), 1, dtype=torch.float32)
        wanted = (rows.square() @ self.weights).sqrt()
        label = (255 + _OCTAVE * (wanted / self.top).clamp_min(1e-38).log2()).round().clamp(0, 255)
        return [label.to(torch.uint8).unsqueeze(1)], self._scales[label.to(torch.int64)].unsqueeze(1)

    def _units(self, rows: Tensor, scales: Tensor) -> Tensor:
        """(m, r) the rows in steps."""
        return (rows / torch.where(scales > 0, scales, torch.inf)).div_(self._parts.steps)

    def _round_(self, units: Tensor, rows: Tensor, scales: Tensor) -> Tensor:
        """(m, r) int16 codes of ``units``, which they overwrite; ``rows`` become their errors."""
        parts = self._parts
        codes = torch.minimum(units.add_(parts.half).floor_().clamp_min_(0), parts.most, out=units)
        made = codes.to(torch.int16)
        rows -= codes.sub_(parts.most / 2).mul_(parts.stored).mul_(scales)
        return made

    @cached_property
    def _parts(self) -> _Columns:
        count = (1 << self.bits.to(torch.int32)).to(torch.float32)
        live = self.bits > 0
        steps = torch.where(live, self.steps, 1.0)
        return _Columns(steps, torch.where(live, self.steps, 0.0), count / 2, count - 1)


@dataclass(frozen=True)
class _Columns:
    """What rounding reads of each column (r,): its ``steps``, 1 where it has no bits, and 0 there as ``stored``;
    ``half`` the number of its codes; the ``most`` that a code may be."""

    steps: Tensor
    stored: Tensor
    half: Tensor
    most: Tensor


class FastWriter:
    """Encodes the rows of one file."""

    def __init__(self, code: FastCode, file: ShardWriter) -> None:
        self.code, self.file = code, file

    def add(self, rows: Coordinates) -> float:
        """As ``RowWriter.add``."""
        packed, error = self.code.encoded(rows.values)
        self.file.add(packed.numpy())
        return error

    def finish(self) -> ShardRecord:
        """As ``RowWriter.finish``."""
        return self.file.finish({})


def _few(sample: Tensor) -> Tensor:
    """The rows by which a code is chosen."""
    return sample[:: max(1, len(sample) // _SAMPLE)]


def _shared(sample: Tensor, scales: Tensor, total: int) -> tuple[float, Tensor, Tensor]:
    """The squared error, and bits (r,) uint8 and steps (r,) of ``total`` bits a row, each bit where it saves most."""
    units, squares = sample / scales.unsqueeze(1), scales.square().unsqueeze(1)
    sizes = units.square().mean(0).sqrt()
    columns = torch.arange(len(sizes))
    # Some columns at a time: what is computed of them stays in the processor's cache, and neighbours get like bits.
    groups = [(ids, units[:, ids].contiguous()) for ids in columns.split(_COLUMNS)]
    errors, steps = torch.zeros(2, _MOST_BITS + 1, len(sizes), dtype=torch.float32)
    errors[0], priced = (units.square() * squares).sum(0), [0] * len(groups)
    bits_of = torch.zeros(len(sizes), dtype=torch.int64)

    def price(group: int) -> None:
        """One bit more for the columns of a group, where one of them has all that was priced."""
        ids, part = groups[group]
        if int(bits_of[ids].max()) == priced[group] < _MOST_BITS:
            priced[group] += 1
            least, steps[priced[group], ids] = _best(part, sizes[ids], squares, priced[group])
            errors[priced[group], ids] = torch.minimum(least, errors[priced[group] - 1, ids])

    for group in range(len(groups)):
        price(group)
    for _ in range(min(total, _MOST_BITS * len(sizes))):
        saved = errors[bits_of, columns] - errors[(bits_of + 1).clamp_max(_MOST_BITS), columns]
        place = int(torch.where(bits_of < _MOST_BITS, saved, -1.0).argmax())
        bits_of[place] += 1
        price(place // _COLUMNS)
    return float(errors[bits_of, columns].sum()), bits_of.to(torch.uint8), steps[bits_of, columns]


def _best(units: Tensor, sizes: Tensor, squares: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(r,) least squared errors of columns in so many bits, and their steps; ``sizes`` (r,) are the columns' roots of
    mean squares, ``squares`` (m, 1) those of the rows' scales.

    Every third of the largest values is tried, and then, of each column, the two on each side of the best of these.
    """
    third = torch.arange(1, len(_WIDTHS), 3)
    coarse = [_error(units, squares, _steps(place.expand(len(sizes)), sizes, bits), bits) for place in third]
    least, which = torch.stack(coarse).min(0)
    near = (third[which] + torch.tensor([[0], [-2], [-1], [1], [2]])).clamp(0, len(_WIDTHS) - 1)
    fine = [_error(units, squares, _steps(places, sizes, bits), bits) for places in near[1:]]
    best, which = torch.stack([least, *fine]).min(0)
    return best, _steps(near.gather(0, which.unsqueeze(0))[0], sizes, bits)


def _steps(places: Tensor, sizes: Tensor, bits: int) -> Tensor:
    """(r,) steps whose largest values are those at ``places`` (r,) of ``_WIDTHS``."""
    steps: Tensor = (2 * _WIDTHS[places] * sizes / 2**bits).clamp_min(1e-30)
    return steps


def _error(units: Tensor, squares: Tensor, steps: Tensor, bits: int) -> Tensor:
    """(r,) squared errors of columns in so many bits."""
    code = (units / steps).floor_().add_(0.5).clamp_(0.5 - 2 ** (bits - 1), 2 ** (bits - 1) - 0.5)
    error: Tensor = code.mul_(steps).sub_(units).square_().mul_(squares).sum(0)
    return error
