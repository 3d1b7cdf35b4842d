"""The compact layout: integers of one step in principal axes, entropy coded in lanes of a few rows.

Rows are divided into classes by their flat, the level of their weight, and their norm. The integers of a column of a
class follow one distribution; rounding counts bits (``numerics.coding.quantizers``). A row whose integers leave these
distributions is of a wide class of its flat, in which each number takes 16 bits: so no row is cut off, however unlike
the sample it is.

Lanes are of about 512 numbers. A file holds lane after lane, and of each lane its length in a byte: what is above
``floor``, from 0 to 255; what does not fit is in a list (``odd``, and the sums ``beyond`` of it). Of every 64 lanes it
holds where the first of them begins, without what is in the list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kflats.common.errors import DoesNotFitError, KflatsError
from kflats.numerics.coding.encode import label_bits
from kflats.numerics.coding.lanes import (
    MOST_SYMBOLS,
    PRECISION,
    Bytes,
    Ints,
    LaneCode,
    decode,
    encode,
    whole_frequencies,
)
from kflats.numerics.coding.quantizers import TRADE, Quantizer, Tally, design, first_symbols, symbols
from kflats.tables.axes import Axes
from kflats.tables.flats import Parting
from kflats.tables.layout import NAMES, Coordinates, distinct, tensor_of
from kflats.tables.shards import PIECE, Shard, ShardRecord, ShardWriter

_LANE = 512  # numbers a lane, about
_GROUP = 64  # lanes between two whole offsets
_PASSES = 3  # of the quantizer's design
_MOST_CLASSES = 16  # by norm
MOST_NARROW = 160  # classes that are not wide
_SYMBOLS = 128  # of a distribution at most: each takes 1 / 4096 at least
_FAR = 4.0  # times as long as 99.8 % of the rows
_MOST_STEPS = 12000.0
_WIDE = 2**15 - 1  # steps that a number of a wide class may be large
_COARSER = 64  # how much coarser the step of each wide class is than that of the one before
_WIDE_BITS = 17
_STATE_BITS, _PLACE_BITS = 4.0, 8 + 64 / _GROUP  # of a lane beside its integers: its state, and where it lies
_ARRAYS = ("offsets", "floor", "odd", "beyond")
_ENCODED = 32768  # rows that are encoded at once
_DECODED = 2**20  # numbers that are decoded at once


def lane_rows(columns: int) -> int:
    """Rows in a lane: a power of two.

    >>> lane_rows(64), lane_rows(300), lane_rows(1024)
    (8, 2, 1)
    """
    return 1 << max(0, round(math.log2(_LANE / columns)))


@dataclass(frozen=True)
class Design:
    """A quantizer of classes: ``edges`` of the norms in each group of rows, ``limits`` (C, r) the largest integers,
    ``thresholds`` of each table; ``wide`` classes of each flat beyond; ``tally``, what it makes of the sample."""

    step: float
    wide_step: float
    parting: Parting
    edges: tuple[Tensor, ...]
    quantizer: Quantizer
    limits: Tensor
    thresholds: list[Tensor]
    wide: int
    tally: Tally

    @classmethod
    def of(cls, sample: Coordinates, parting: Parting, step: float, longest: float) -> Design:
        """The design for rows like ``sample``, none longer than ``longest``.

        Raises:
            DoesNotFitError: more classes than a label can tell apart.
        """
        values, groups = sample.values, sample.groups
        most = max(1, min(_MOST_CLASSES, MOST_NARROW // parting.groups))
        of_groups = [values] if groups is None else [values[groups == g] for g in range(parting.groups)]
        edges = tuple(_edges(mine, step, most) for mine in of_groups)
        labels = _labels(sample, edges)
        classes = sum(len(of_group) + 1 for of_group in edges)
        parts = [(values[labels == c].T / step).contiguous() for c in range(classes)]
        quantizer: Quantizer | None = None
        for _ in range(_PASSES):
            tally = _tally(parts, quantizer, values.shape[1])
            quantizer = design(tally)
        assert quantizer is not None
        tally = _tally(parts, quantizer, values.shape[1])
        limits = quantizer.tables.reach.to(torch.int64)[quantizer.contexts]
        wide = 1 + max(0, math.ceil(math.log(max(longest / (step * _WIDE), 1e-9), _COARSER)))
        if (count := classes + wide * len(parting.axes)) > MOST_SYMBOLS:
            raise DoesNotFitError(
                f"{count} classes of rows are more than {MOST_SYMBOLS}",
                hint="fewer flats, or weights of a smaller range",
            )
        return cls(step, step, parting, edges, quantizer, limits, quantizer.thresholds(), wide, tally)

    @cached_property
    def group_of(self) -> Tensor:
        """(C,) the group of each class."""
        return torch.repeat_interleave(
            torch.arange(len(self.edges)), torch.tensor([len(of_group) + 1 for of_group in self.edges])
        )

    @property
    def flat_of(self) -> Tensor:
        """The flat of each class, the wide ones too."""
        wide = torch.arange(len(self.parting.axes)).repeat_interleave(self.wide)
        return torch.cat([self.group_of // self.parting.weight_levels, wide])

    @property
    def steps(self) -> Tensor:
        """The step of each class, the wide ones too."""
        narrow = self.step / self.parting.roots[self.group_of % self.parting.weight_levels]
        wide = [self.wide_step * _COARSER**i for i in range(self.wide)] * len(self.parting.axes)
        return torch.cat([narrow, torch.tensor(wide)]).to(torch.float32)

    @property
    def row_bits(self) -> float:
        """About the bits that a row of the sample takes, with those of its class and of its lane's place."""
        rows, columns = float(self.tally.rows.sum()), len(self.limits[0])
        labels = label_bits(self.tally.rows)
        return (float(self.tally.prices(self.quantizer).sum()) + labels) / rows + (
            _STATE_BITS + _PLACE_BITS
        ) / lane_rows(columns)

    def quantized(self, rows: Coordinates) -> tuple[Tensor, Tensor]:
        """Classes (m,) uint8 and integers (m, r) int32 of rows."""
        labels = _labels(rows, self.edges)
        levels = torch.empty(rows.values.shape, dtype=torch.int32)
        narrow = len(self.group_of)
        for c in labels.unique().tolist():
            mine = (labels == c).nonzero().squeeze(1)
            u = (rows.values[mine] / self.step).T.contiguous()
            levels[mine] = symbols(u, self.quantizer.contexts[c], self.thresholds).T.to(torch.int32)
            beyond = (u.abs() - (self.limits[c] + 1).unsqueeze(1)).clamp_min_(0).square_().sum(0)
            out = (beyond > TRADE * _WIDE_BITS * len(u)).nonzero().squeeze(1)
            if len(out):
                group = int(self.group_of[c])
                z = rows.values[mine[out]].T / (self.wide_step * self.parting.roots[group % self.parting.weight_levels])
                reach = (z.abs().amax(0) / _WIDE).clamp_min(1e-9).log2() / math.log2(_COARSER)
                exponent = reach.ceil().clamp(0, self.wide - 1)
                coarse = (z / _COARSER**exponent).round().clamp(-_WIDE, _WIDE)
                levels[mine[out]] = coarse.T.to(torch.int32)
                labels[mine[out]] = narrow + group // self.parting.weight_levels * self.wide + exponent.to(torch.int64)
        return labels.to(torch.uint8), levels


def _labels(rows: Coordinates, edges: Sequence[Tensor]) -> Tensor:
    """(m,) int64, the class of each row by its group and norm."""
    norms, firsts = rows.values.norm(dim=1), 0
    if rows.groups is None:
        return torch.bucketize(norms, edges[0])
    labels = torch.empty(len(norms), dtype=torch.int64)
    for group, of_group in enumerate(edges):
        mine = rows.groups == group
        labels[mine] = firsts + torch.bucketize(norms[mine], of_group)
        firsts += len(of_group) + 1
    return labels


def _tally(parts: list[Tensor], quantizer: Quantizer | None, rank: int) -> Tally:
    tally = Tally(len(parts), rank)
    thresholds = [] if quantizer is None else quantizer.thresholds()
    for c, u in enumerate(parts):
        if u.shape[1]:
            tally.add_(c, u, first_symbols(u) if quantizer is None else symbols(u, quantizer.contexts[c], thresholds))
    return tally


def _edges(sample: Tensor, step: float, most: int) -> Tensor:
    """Norms between at most ``most`` classes, equal ratios apart: the classes cost as much in labels as finer ones
    would save.

    With a coordinates that have bits and classes exp(w) wide, w^2 / 12 nats a coordinate are lost and ln(1 / w) nats of
    labels saved: the sum is least at w = sqrt(6 / a) or so.
    """
    if len(sample) < 2:
        return torch.empty(0, dtype=torch.float32)
    active = float((sample.square().mean(0) > step**2).sum())
    logs = sample.norm(dim=1).clamp_min(1e-30).log()
    low, high = (float(logs.quantile(q)) for q in (0.002, 0.998))
    count = min(most, math.floor((high - low) / math.sqrt(6 / max(active, 1.0))))
    if count < 1:
        return torch.empty(0, dtype=torch.float32)
    return (
        torch.linspace(low, high, count + 1, dtype=torch.float32)[1:-1].exp()
        if count > 1
        else torch.empty(0, dtype=torch.float32)
    )


@dataclass(frozen=True)
class CompactCode:
    """A code of lanes, the step of each class, the axes of k flats, and the flat of each class. ``design`` is what
    encodes; None where a table is read."""

    lanes: LaneCode
    steps: Tensor
    axes: Axes
    mean: Tensor
    flat_of: Tensor
    design: Design | None = None

    @classmethod
    def of(cls, sample: Coordinates, parting: Parting, mean: Tensor, step: float, longest: float) -> CompactCode:
        """The code of step ``step`` for rows like ``sample``, none longer than ``longest``."""
        made = Design.of(sample, parting, step, longest)
        wide = made.wide * len(parting.axes)
        final = made.quantizer
        classes, columns = final.contexts.shape
        live = (final.contexts > 0).any(0).nonzero()
        main = int(live.max()) + 1 if len(live) else 0
        counts = made.tally.rows.numpy()
        labels = np.concatenate([counts + 0.5, np.full(wide, 0.5)])
        rows = [_context(whole_frequencies(labels))]
        for k in range(len(final.tables)):
            reach = int(final.tables.reach[k])
            rows.append(_symmetric(final.tables.frequencies(k).numpy(), reach, float(final.shrink[k])))
        even = np.full(MOST_SYMBOLS, 2**PRECISION // MOST_SYMBOLS, dtype=np.int64)
        rows.append(_context(even, shift=8))
        contexts = np.concatenate([1 + final.contexts.numpy(), np.full((wide, columns), len(rows) - 1)])
        frequencies, offsets, shifts = (np.stack(part) for part in zip(*rows, strict=True))
        lanes = LaneCode(frequencies, offsets.astype(np.float32), shifts, contexts, lane_rows(columns), main, classes)
        return cls(lanes, made.steps, parting.axes, mean, made.flat_of, made)

    @property
    def batch(self) -> int:
        """Rows that are decoded at once, each perhaps of a lane of its own."""
        return max(1, _DECODED // (self.lanes.rows * len(self.mean)))

    @property
    def flats(self) -> int:
        """As ``RowCode.flats``."""
        return len(self.axes)

    def tensors(self) -> dict[str, Tensor]:
        """As ``RowCode.tensors``."""
        code = self.lanes
        numbers = torch.tensor([code.rows, code.main, code.first_wide])
        return {
            **self.axes.tensors(),
            "flats": self.flat_of.to(torch.uint8),
            "mean": self.mean,
            "steps": self.steps,
            "frequencies": torch.from_numpy(code.frequencies.astype(np.int16)),
            "offsets": torch.from_numpy(code.offsets),
            "shifts": torch.from_numpy(code.shifts),
            "contexts": torch.from_numpy(code.contexts.astype(np.uint8)),
            "numbers": numbers,
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], columns: int) -> CompactCode:
        """The code that ``tensors`` came from.

        Raises:
            KflatsError: they are no code of so many columns.
        """
        frequencies = tensor_of(tensors, "frequencies", torch.int16, -1, MOST_SYMBOLS)
        contexts = tensor_of(tensors, "contexts", torch.uint8, -1, columns)
        numbers = tensor_of(tensors, "numbers", torch.int64, 3).tolist()
        code = LaneCode(
            frequencies.numpy().astype(np.int64),
            tensor_of(tensors, "offsets", torch.float32, -1).numpy(),
            tensor_of(tensors, "shifts", torch.int64, -1).numpy(),
            contexts.numpy().astype(np.int64),
            *numbers,
        )
        axes = Axes.from_tensors(tensors, columns)
        flat_of = tensor_of(tensors, "flats", torch.uint8, len(contexts)).to(torch.int64)
        if not int(flat_of.max()) < len(axes):
            raise KflatsError("the head of the table has classes of flats that are not there", cause="a damaged file")
        return cls(
            code,
            tensor_of(tensors, "steps", torch.float32, len(contexts)),
            axes,
            tensor_of(tensors, "mean", torch.float32, columns),
            flat_of,
        )

    @staticmethod
    def about_head(axes: Axes) -> int:
        """About the bytes of the head."""
        return axes.nbytes + 2 * MOST_SYMBOLS * _MOST_CLASSES + NAMES

    @property
    def head_bytes(self) -> int:
        """The bytes of the head, and a little more."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values()) + NAMES

    def scaled(self, factor: float) -> CompactCode:
        """The same code with steps ``factor`` times as large, but for those of wide classes: these reach all rows."""
        assert self.design is not None
        scaled = replace(self.design, step=self.design.step * factor)
        return replace(self, steps=scaled.steps, design=scaled)

    def row_bits(self, sample: Coordinates) -> float:
        """Bits a row of files with rows like ``sample``."""
        return self.measured(sample)[0]

    def measured(self, sample: Coordinates) -> tuple[float, float]:
        """Bits a row of files with rows like ``sample``, and the weighted squared error of the sample."""
        parts = [self.encoded(part)[1:] for part in sample.split(_ENCODED)]
        counts = np.concatenate([counts for counts, _ in parts])
        bits = (8 * float(counts.sum()) * (1 + 4 / PIECE) + len(counts) * _PLACE_BITS) / len(sample.values)
        return bits, sum(error for _, error in parts)

    def encoded(self, rows: Coordinates) -> tuple[Bytes, Ints, float]:
        """The bytes of rows, how many each lane has, and the weighted squared error."""
        code, design = self.lanes, self.design
        assert design is not None
        labels, levels = design.quantized(rows)
        classes = labels.to(torch.int64)
        offsets = torch.from_numpy(code.offsets[code.contexts])[classes]
        numbers = levels - levels.sign() * offsets
        values = rows.values
        if design.parting.weight_levels > 1 and rows.groups is not None:
            values = values / design.parting.roots[rows.groups % design.parting.weight_levels].unsqueeze(1)
        errors = self.axes.errors(values - numbers * self.steps[classes].unsqueeze(1), self.flat_of[classes])
        error = float(errors.sum() if rows.weights is None else errors.to(torch.float64) @ rows.weights)
        if spare := -len(labels) % code.rows:
            labels = torch.cat([labels, labels.new_zeros(spare)])
            levels = torch.cat([levels, levels.new_zeros(spare, levels.shape[1])])
        shape = -1, code.rows, levels.shape[1]
        data, counts = encode(code, labels.view(shape[:2]).numpy(), levels.view(shape).numpy())
        return data, counts, error

    def writer(self, file: ShardWriter) -> CompactWriter:
        """As ``RowCode.writer``."""
        return CompactWriter(self, file)

    def check(self, shard: Shard, rows: int) -> None:
        """As ``RowCode.check``."""
        lanes = -(-rows // self.lanes.rows)
        shard.array("sizes", np.uint8, lanes)
        odd = shard.array("odd", np.int64, 0)
        for name, least in zip(_ARRAYS, (-(-lanes // _GROUP), 1, 0, len(odd) + 1), strict=True):
            shard.array(name, np.int64, least)

    def _fetch(self, shard: Shard, rows: Ints) -> _Lanes:
        lanes, lane = distinct(rows // self.lanes.rows)
        starts, ends = _places(shard, lanes)
        shard.check(starts, ends)
        return _Lanes(shard.data, starts, ends, lane, rows % self.lanes.rows)

    def decode(self, pieces: Sequence[tuple[Shard, Ints]], out: Tensor) -> None:
        """As ``RowCode.decode``."""
        parts = [self._fetch(shard, rows) for shard, rows in pieces]
        part = parts[0] if len(parts) == 1 else _together(parts)
        labels, numbers = decode(self.lanes, part.data, part.starts, part.ends, part.lane, part.row)
        main = len(self.mean) if bool((labels >= self.lanes.first_wide).any()) else self.lanes.main
        z = torch.from_numpy(numbers[:, :main]) * self.steps[torch.from_numpy(labels).to(torch.int64)].unsqueeze(1)
        axes = self.axes.dense[:, :main]
        if len(axes) == 1:
            torch.addmm(self.mean, z, axes[0], out=out)
            return
        flats = self.flat_of[torch.from_numpy(labels).to(torch.int64)]
        for flat in flats.unique().tolist():
            mine = (flats == flat).nonzero().squeeze(1)
            out[mine] = torch.addmm(self.mean, z[mine], axes[flat])


@dataclass(frozen=True)
class _Lanes:
    """Lanes ``data[start:end]``; row i asked for is row ``row[i]`` of lane ``lane[i]``."""

    data: Bytes
    starts: Ints
    ends: Ints
    lane: Ints
    row: Ints


def _together(parts: Sequence[_Lanes]) -> _Lanes:
    """Lanes of several files, copied into one array."""
    data, lanes, first = [], [], 0
    for part in parts:
        counts = part.ends - part.starts
        before = np.cumsum(counts) - counts
        data.append(part.data.take(np.arange(int(counts.sum())) + np.repeat(part.starts - before, counts)))
        lanes.append(part.lane + first)
        first += len(counts)
    counts = np.concatenate([part.ends - part.starts for part in parts])
    ends = np.cumsum(counts)
    row = np.concatenate([part.row for part in parts])
    return _Lanes(np.concatenate(data), ends - counts, ends, np.concatenate(lanes), row)


def _places(shard: Shard, lanes: Ints) -> tuple[Ints, Ints]:
    """Where each lane begins and ends in a file."""
    sizes = shard.array("sizes", np.uint8, 0)
    offsets, floor, odd, beyond = (shard.array(name, np.int64, 0) for name in _ARRAYS)
    inside = (lanes % _GROUP)[:, None]
    near = np.arange(_GROUP)
    those = sizes.take(lanes[:, None] - inside + near, mode="clip")
    before = np.where(near < inside, those, 0).sum(1, dtype=np.int64) + floor * inside[:, 0]
    starts = offsets.take(lanes // _GROUP) + before
    counts = sizes.take(lanes) + floor
    if len(odd):
        left, right = np.searchsorted(odd, lanes), np.searchsorted(odd, lanes, side="right")
        starts += beyond.take(left)
        counts += beyond.take(right) - beyond.take(left)
    return starts, starts + counts


class CompactWriter:
    """Encodes the rows of one file, ``_ENCODED`` at a time."""

    def __init__(self, code: CompactCode, file: ShardWriter) -> None:
        self.code, self.file, self.counts = code, file, list[Ints]()

    def add(self, rows: Coordinates) -> float:
        """As ``RowWriter.add``; of all calls but the last the rows fill whole lanes."""
        error = 0.0
        for part in rows.split(_ENCODED):
            data, counts, left = self.code.encoded(part)
            self.file.add(data)
            self.counts.append(counts)
            error += left
        return error

    def finish(self) -> ShardRecord:
        """As ``RowWriter.finish``."""
        counts = np.concatenate(self.counts)
        floor = max(0, int(np.median(counts)) - 100)
        sizes = np.clip(counts - floor, 0, 255)
        odd = np.flatnonzero(counts != sizes + floor)
        arrays = {
            "sizes": sizes.astype(np.uint8),
            "offsets": (np.cumsum(sizes + floor) - sizes - floor)[::_GROUP],
            "floor": np.array([floor]),
            "odd": odd,
            "beyond": np.concatenate([[0], np.cumsum((counts - sizes - floor)[odd])]),
        }
        return self.file.finish(arrays)


def usual(sample: Coordinates) -> Coordinates:
    """The rows of a sample without those that are far longer than all others: distributions are not made for them."""
    norms = sample.values.norm(dim=1)
    most = norms.quantile(0.998)
    return sample.part(norms <= _FAR * most) if float(most) > 0 else sample


def finest_step(sample: Coordinates) -> float:
    """The least step for rows like ``sample``, without far ones: their integers are then as large as entropy coding is
    good for."""
    return float(sample.values.norm(dim=1).max()) / _MOST_STEPS


def step_for(sample: Tensor, bits: float) -> float:
    """The step at which reverse water-filling spends about ``bits`` a row on coordinates (m, r)."""
    energies = sample.square().mean(0, dtype=torch.float64)
    low, high = 0.0, float(energies.max())
    if high <= 0:
        raise KflatsError("the table has no numbers but one row many times", hint="keep that row")
    for _ in range(60):
        level = (low + high) / 2
        spent = 0.5 * float((energies / max(level, 1e-300)).clamp_min(1.0).log2().sum())
        low, high = (level, high) if spent > bits else (low, level)
    return math.sqrt(12 * high)


def _context(frequencies: Ints, offset: float = 0.0, shift: int = 0) -> tuple[Ints, float, int]:
    return np.pad(frequencies, (0, MOST_SYMBOLS - len(frequencies))), offset, shift


def _symmetric(frequencies: Ints, reach: int, shrink: float) -> tuple[Ints, float, int]:
    """The context of integers -reach .. reach: so many low bits as they are that few symbols are left."""
    shift = 0
    while (reach >> shift) - (-reach >> shift) >= _SYMBOLS:
        shift += 1
    high = np.arange(-reach, reach + 1) >> shift
    weights = np.bincount(high << 1 ^ high >> 63, weights=frequencies.astype(np.float64)).astype(np.float64)
    return _context(whole_frequencies(weights), 0.0 if shift else shrink, shift)
