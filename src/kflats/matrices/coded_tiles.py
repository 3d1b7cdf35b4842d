"""Codes decoded: class by class, a tile at a time, or row by row in a recorded graph; never the whole table at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from kflats.matrices.codes import Codes
from kflats.matrices.decoding import Tile, integers, limited
from kflats.matrices.lookup import inverse_of, is_exporting, is_recording

TILE = 2**20  # numbers that are decoded at a time
_BASIS_UNIT = 128.0
"""What an integer basis is divided by, so that coordinates in it are about as large as the numbers they stand for: half
precision, in which products may be taken, does not hold much smaller ones. A power of two: exact."""


class TiledCodes(Codes):
    """Codes as coordinates and as rows; what products are made of them is in ``CodedMatrix``."""

    @property
    def _wide(self) -> torch.dtype:
        """Integers of up to 15 bits are no numbers of half precision."""
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32

    def _tiles(self, dtype: torch.dtype) -> Iterator[Tile]:
        """All rows, ``TILE`` numbers at a time."""
        most, first, tables = max(1, TILE // max(1, self.geometry.rank)), 0, self._tables()
        flat_of, final = self.geometry.flat_of, self.geometry.basis == "identity" and dtype == self.weight.dtype
        by_row = inverse_of(self.position) if self.geometry.scales == "row" else None
        for c, (rows, _) in enumerate(self.geometry.classes):
            packed = self._packed(c)
            for a in range(0, rows, most):
                part = packed[a : a + most]
                at = None if by_row is None else by_row[first + a : first + a + len(part)]
                yield self._tile(c, flat_of[c], first + a, part, at, tables).as_type(dtype, final=final)
            first += rows

    def _ended(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Numbers of the table as ``dtype``; what another type than the table's own does not hold is infinite there."""
        return limited(numbers, dtype) if dtype == self.weight.dtype else numbers.to(dtype)

    def _packed(self, c: int) -> Tensor:
        """(rows, bytes) of class ``c``."""
        (rows, row_bytes), before = self.geometry.classes[c], self.geometry.classes[:c]
        first = sum(rows * row_bytes for rows, row_bytes in before)
        return self.get_buffer("codes")[first : first + rows * row_bytes].view(rows, row_bytes)

    def _sorted_rows(self, places: Tensor, dtype: torch.dtype) -> Tensor:
        """(t,) ascending places in class order -> (t, d)."""
        starts = [0, *accumulate(rows for rows, _ in self.geometry.classes)]
        bounds = torch.tensor(starts, device=places.device, dtype=places.dtype)
        cuts = torch.searchsorted(places, bounds).tolist()
        ordered = inverse_of(self.position).index_select(0, places) if self.geometry.scales == "row" else None
        tables, parts, first = self._tables(), [], 0
        for flat, (count, rank) in enumerate(self.geometry.parts):
            found = []
            for c in range(first, first + count):
                a, b = cuts[c], cuts[c + 1]
                if a < b:
                    packed = self._packed(c).index_select(0, places[a:b] - starts[c])
                    at = None if ordered is None else ordered[a:b]
                    numbers = self._tile(c, flat, a, packed, at, tables).whole()
                    found.append(F.pad(numbers, (0, 0, 0, rank - numbers.shape[0])))
            first += count
            if found:
                # In half precision only at the end: coordinates may be too small for it where numbers are not.
                parts.append(self._ended(self._project(flat, torch.cat(found, dim=1).T), dtype))
        return torch.cat(parts)

    def _tile(
        self, c: int, flat: int, first: int, packed: Tensor, rows: Tensor | None, tables: tuple[Tensor, ...]
    ) -> Tile:
        """(m, bytes) of class ``c`` as numbers; ``rows``: their row numbers, where scales are by row."""
        how = self.readings[c].plain if is_exporting() else self.readings[c]
        less, centers, scales = (table[c, : how.used] for table in tables)
        q = integers(packed, self.fields[:, c], how, self._wide)
        levels, groups = self._get("levels"), self.geometry.groups
        if levels is not None:
            at = (q.to(torch.int64) + self.geometry.levels // 2).reshape(-1)
            q = levels.to(self._wide).index_select(0, at).view(q.shape)
        elif self._is_shrunk():
            q = q.sub_(q.sign().mul_(less.unsqueeze(1)))
        middle = centers if how.centered else None
        by_class = scales if self.geometry.scales == "class" or self._get("basis_scale") is not None else None
        if rows is None:
            return Tile(flat, first, q, None, by_class, middle)
        if groups == 1:
            return Tile(flat, first, q, self._row_scales(rows).squeeze(1), by_class, middle)
        q = q if middle is None else q + middle.unsqueeze(1)
        if how.used < self.geometry.rank or self.geometry.rank % groups:
            return Tile(flat, first, q * self._row_scales(rows)[:, : how.used].T, None, by_class, None)
        by_group = self._scales().index_select(0, rows).T.unsqueeze(1)
        return Tile(flat, first, (q.unflatten(0, (groups, -1)) * by_group).flatten(0, 1), None, by_class, None)

    def _is_shrunk(self) -> bool:
        """Whether any ``shrink`` can be other than 0; where looking is not free, or gradients are wanted, yes."""
        shrink = self._get("shrink")
        if shrink is None or shrink.device.type != "cpu" or is_recording():
            return shrink is not None
        return (torch.is_grad_enabled() and shrink.requires_grad) or bool(shrink.detach().any())

    def _tables(self) -> tuple[Tensor, ...]:
        """Of every class and column, each (C, r): shrink, center and scale."""
        geometry, dtype = self.geometry, self._wide
        centers, shrink = self.get_buffer("centers").to(dtype), self._get("shrink")
        scales = torch.ones_like(centers)
        if geometry.scales == "class":
            scales = self._spread(self._scales())
        if (basis_scale := self._get("basis_scale")) is not None:
            whole = basis_scale.to(dtype) * _BASIS_UNIT
            parts = zip(geometry.parts, whole.split([rank for _, rank in geometry.parts]), strict=True)
            each = [F.pad(of, (0, geometry.rank - rank)).expand(count, -1) for (count, rank), of in parts]
            scales = scales * torch.cat(each)
        if shrink is None:
            return centers, centers, scales
        contexts = self.get_buffer("contexts").to(torch.int32)
        less = shrink.to(dtype).index_select(0, contexts.reshape(-1)).view(contexts.shape)
        return less, centers, scales

    def _values(self, q: Tensor, less: Tensor, centers: Tensor, scales: Tensor) -> Tensor:
        """Numbers for the integers ``q``; the tables broadcast to its shape."""
        levels = self._get("levels")
        if levels is not None:
            at = (q + self.geometry.levels // 2).reshape(-1)
            return levels.to(self._wide).index_select(0, at).view(q.shape) * scales
        found = q.to(self._wide)
        return (found - found.sign() * less + centers) * scales

    def _row_scales(self, rows: Tensor) -> Tensor:
        """(m,) rows -> (m, r), or (m, 1) where all columns have one scale."""
        scales = self._scales().index_select(0, rows)
        return scales if self.geometry.groups == 1 else self._spread(scales)

    def _scales(self) -> Tensor:
        """(classes or rows, groups), wide."""
        scales = self.weight.to(self._wide).view(-1, self.geometry.groups)
        return scales * 2.0**self.geometry.unit if self.geometry.unit else scales

    def _spread(self, scales: Tensor) -> Tensor:
        """(m, groups) -> (m, r)."""
        return scales.repeat_interleave(self.geometry.group, dim=1)[:, : self.geometry.rank]

    def _coordinates(self, index: Tensor) -> Tensor:
        """(t,) rows -> (t, r) coordinates: one gather for all classes, in plain operators whose sizes are known."""
        geometry, codes = self.geometry, self.get_buffer("codes")
        labels, device = self._get("labels"), codes.device
        place = self.position.index_select(0, index).to(torch.int64)
        rows = [rows for rows, _ in geometry.classes]
        sizes = [rows * row_bytes for rows, row_bytes in geometry.classes]
        first = torch.tensor([0, *accumulate(rows)][:-1], device=device)
        start = torch.tensor([0, *accumulate(sizes)][:-1], device=device)
        each = torch.tensor([row_bytes for _, row_bytes in geometry.classes], device=device)
        label = torch.zeros_like(place) if labels is None else labels.index_select(0, index).to(torch.int64)
        begin = start[label] + (place - first[label]) * each[label]
        starts, shifts, masks, low = (field.index_select(0, label) for field in self.fields)
        at = begin.unsqueeze(1) + starts
        word = torch.zeros_like(starts)
        if codes.numel():
            for byte in range(max(how.span for how in self.readings)):
                # Beyond the last byte lies nothing that a mask would keep.
                here = (at + byte).clamp(max=codes.numel() - 1).reshape(-1)
                word = word | (codes.index_select(0, here).to(torch.int32).view(at.shape) << 8 * byte)
        tables = (table.index_select(0, label) for table in self._tables())
        # By this name, not as an operator: ONNX's exporter knows no other.
        codes_here = word.bitwise_right_shift(shifts) & masks
        values = self._values(codes_here + low, *tables)
        return values if geometry.scales == "class" else values * self._row_scales(index)

    def _recorded_rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """(t,) rows -> (t, d), in plain operators whose sizes are known."""
        coordinates = self._coordinates(index)
        if not self.geometry.flats:
            return self._ended(self._project(0, coordinates), dtype)
        labels = self._get("labels")
        flat_of = torch.tensor(self.geometry.flat_of, device=index.device)
        flats = flat_of[torch.zeros_like(index) if labels is None else labels.index_select(0, index).to(torch.int64)]
        found = []
        for flat, (_, rank) in enumerate(self.geometry.flats):
            own = torch.where((flats == flat).unsqueeze(1), coordinates[:, :rank], 0.0)
            found.append(self._project(flat, own))
        return self._ended(sum(found[1:], start=found[0]), dtype)

    def _bases(self, dtype: torch.dtype) -> list[Tensor | None]:
        """The basis of each flat, without its scales, integers in units of 1/128; None for the identity."""
        basis = self._get("basis")
        if basis is None:
            return [None]
        unit = 1.0 if basis.is_floating_point() else 1.0 / _BASIS_UNIT
        parts = basis.split([rank for _, rank in self.geometry.parts])
        return [part.to(dtype) if unit == 1.0 else part.to(dtype) * unit for part in parts]

    def _project(self, flat: int, coordinates: Tensor) -> Tensor:
        """(..., columns in use) -> (..., d), in the coordinates' type."""
        basis, used = self._bases(coordinates.dtype)[flat], coordinates.shape[-1]
        if basis is None:
            return F.pad(coordinates, (0, self.geometry.rank - used))
        return coordinates @ basis[:used]
