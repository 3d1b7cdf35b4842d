"""CodedMatrix: rows as short strings of bits, decoded when they are read; the whole table is never decoded at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.common.hashing import crc32
from kflats.common.schema import JsonObject
from kflats.matrices.base import Matrix
from kflats.matrices.coded_geometry import CodedGeometry, contradiction
from kflats.matrices.decoding import Reading, Tile, integers, limited, reading_of
from kflats.matrices.flats import refresh_after_load
from kflats.matrices.lookup import FEW, distinct, inverse_of, is_exporting, is_recording
from kflats.matrices.low_rank import check_rows, copy_trainable
from kflats.numerics.coding.packing import places_of

TILE = 2**20  # numbers that are decoded at a time
MANY = 1024
"""Rows of an input from which on a small matrix is put together before it is multiplied by."""
_BASIS_UNIT = 128.0
"""An integer basis is divided by this number, so that coordinates in it are about as large as the numbers they stand
for: half precision, in which products may be taken, does not hold much smaller ones. A power of two is exact."""


class CodedMatrix(Matrix):
    """Row i of class c is ``(scale * value(q_i)) @ basis``. It stores r integers q_i; the class says how many bits each
    of them takes. Where there are several flats, ``basis`` is the one of the class' flat.

        value(q) = center + q - sign(q) shrink      uniform steps; shrink: from an interval's middle to its mean
        value(q) = levels[q + L // 2]               L levels of any kind (Lloyd-Max)

    Rows of one class lie together, each in the same number of bytes (``numerics.coding.packing``): a batch is decoded
    class by class, all columns at once. In memory the matrix takes its codes and ``position``, 4 bytes a row.

    Args:
        geometry: all sizes.
        tensors: by name, of the shapes and types the geometry states:
            weight: the scales, flat: (class or row) x group, in units of 2^unit.
            codes: uint8, the packed rows of class 0, then of class 1, ...; inside a class by row number.
            labels: (n,) uint8, the class of each row; absent where there is one class.
            bits, low: (C, r), column j of class c holds low .. low + 2^bits - 1.
            centers, contexts: (C, r), the center of a column, and the index of its ``shrink``.
            shrink: (K,); or levels: (L,).
            basis: (r, d) int8, with basis_scale (r,), or floating-point; absent where it is the identity. The bases of
                several flats stand one below the other, and r is the sum of their ranks.

    Codes, labels, layouts and an int8 basis are constants. Scales, shrink, levels and a floating-point basis are
    parameters; training through ``matvec`` (a tied head) keeps decoded tiles for the backward pass.

    Raises:
        KflatsError: tensors that do not fit the geometry or contradict it.

    >>> geometry = CodedGeometry((2, 2), 2, ((2, 1),), scales="row")
    >>> four = {"bits": torch.tensor([[4, 4]], dtype=torch.uint8), "low": torch.tensor([[0, -8]], dtype=torch.int16),
    ...         "centers": torch.zeros(1, 2, dtype=torch.int16), "contexts": torch.zeros(1, 2, dtype=torch.uint8)}
    >>> m = CodedMatrix(geometry, {"weight": torch.tensor([1.0, 0.5]), "shrink": torch.zeros(1),
    ...                            "codes": torch.tensor([0x91, 0x62], dtype=torch.uint8), **four})
    >>> m.dense().tolist()
    [[1.0, 1.0], [1.0, -1.0]]
    """

    kind = "coded"

    def __init__(self, geometry: CodedGeometry, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.geometry = geometry
        self.ready = False
        self.streamed = False  # True while ``codes`` holds the stream of a file, see kflats.codecs.streams
        self.readings: list[Reading] = []  # of each class
        dtype = tensors["weight"].dtype
        for name, shape in geometry.shapes.items():
            found = tensors.get(name)
            wanted = geometry.dtype_of(name, dtype)
            if found is None or tuple(found.shape) != shape or found.dtype != wanted:
                there = "absent" if found is None else f"{found.dtype} of shape {tuple(found.shape)}"
                raise KflatsError(
                    f"{name!r} of a coded matrix is {there}, not {wanted} of shape {shape}",
                    cause="a damaged file, or tensors of another matrix",
                )
            if wanted.is_floating_point:
                self.register_parameter(name, nn.Parameter(found))
            else:
                self.register_buffer(name, found)
        if unknown := sorted(tensors.keys() - geometry.shapes.keys()):
            raise KflatsError(
                f"a coded matrix of this geometry has no {unknown[0]!r}",
                cause="a damaged file, or tensors of another matrix",
            )
        empty = torch.empty(0, dtype=torch.int32, device=tensors["codes"].device)
        self.position: Tensor
        self.fields: Tensor
        self.register_buffer("position", empty, persistent=False)
        self.register_buffer("fields", empty, persistent=False)
        self.register_load_state_dict_post_hook(refresh_after_load)  # type: ignore[no-untyped-call]
        self.refresh()

    @property
    def shape(self) -> tuple[int, int]:
        return self.geometry.shape

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name in self.geometry.shapes if (value := self._get(name)) is not None}

    def refresh(self) -> None:
        """Compute again where rows and columns lie; refuse labels and layouts that contradict the geometry."""
        if self.streamed or self.get_buffer("codes").is_meta:
            return
        geometry, codes, labels = self.geometry, self.get_buffer("codes"), self._get("labels")
        if problem := contradiction(geometry, self.tensors()):
            raise KflatsError(problem, cause="a damaged or mixed-up file", hint="restore the file, or compress again")
        bits, low = self.get_buffer("bits").to(torch.int64), self.get_buffer("low")
        starts, shifts, masks = places_of(bits)
        self.fields = torch.stack([starts, shifts, masks, low.to(torch.int32)])
        lows, centers, kept = low.cpu(), self.get_buffer("centers").cpu(), shifts.cpu()
        self.readings = [
            reading_of(bits[c].cpu(), lows[c], centers[c], kept[c], geometry.levels, rank)
            for c, rank in enumerate(geometry.rank_of)
        ]
        n = geometry.shape[0]
        ordered = torch.arange(n, device=codes.device) if labels is None else torch.argsort(labels, stable=True)
        self.position = inverse_of(ordered).to(torch.int32)
        self.ready = True

    def checksum(self) -> int:
        """CRC-32 of all integers. They are constants: training and casts change floating-point tensors only."""
        integers = {name: value for name, value in self.tensors().items() if not value.is_floating_point()}
        return crc32(part for item in sorted(integers.items()) for part in item)

    def spec(self) -> JsonObject:
        return self.geometry.spec()

    def rows(self, index: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        self._check_ready()
        flat = index.reshape(-1)
        dtype = dtype or self.weight.dtype
        # The sorted form gathers bytes in blocks, but makes calls for every class: few rows are quicker without it.
        if is_recording() or index.device.type != "cpu" or flat.numel() < FEW:
            out = self._recorded_rows(flat, dtype)
        else:
            values, inverse = distinct(self.position.index_select(0, flat))
            out = self._sorted_rows(values, dtype).index_select(0, inverse)
        return out.reshape(*index.shape, self.shape[1])

    def vecmat(self, x: Tensor) -> Tensor:
        self._check_ready()
        if self._is_many(x):
            return self._project(0, x @ self._all_coordinates(x).T)
        one = self._get("labels") is None
        ordered = x if one else x.index_select(-1, inverse_of(self.position))
        found: dict[int, Tensor] = {}
        for tile in self._tiles(_product_type(x)):
            left = ordered[..., tile.first : tile.first + tile.numbers.shape[1]]
            if tile.rows is not None:
                left = left * tile.rows
            product = left @ tile.numbers.T
            if tile.centers is not None:
                product = product + left.sum(-1, keepdim=True) * tile.centers
            if tile.columns is not None:
                product = product * tile.columns
            wide = F.pad(product, (0, self.geometry.parts[tile.flat][1] - product.shape[-1]))
            found[tile.flat] = found[tile.flat] + wide if tile.flat in found else wide
        parts = [self._project(flat, product) for flat, product in found.items()]
        return sum(parts[1:], start=parts[0])

    def matvec(self, x: Tensor) -> Tensor:
        self._check_ready()
        bases = self._bases(x.dtype)
        if self._is_many(x):
            return (x if bases[0] is None else x @ bases[0].T) @ self._all_coordinates(x)
        inner = [x if basis is None else x @ basis.T for basis in bases]
        found = []
        for tile in self._tiles(_product_type(x)):
            right = inner[tile.flat][..., : tile.numbers.shape[0]]
            if tile.columns is not None:
                right = right * tile.columns
            product = right @ tile.numbers
            if tile.centers is not None:
                product = product + (right * tile.centers).sum(-1, keepdim=True)
            found.append(product if tile.rows is None else product * tile.rows)
        joined = torch.cat(found, dim=-1)
        return joined if self._get("labels") is None else joined.index_select(-1, self.position)

    def dense(self) -> Tensor:
        self._check_ready()
        dtype = self.weight.dtype
        parts = [self._ended(self._project(tile.flat, tile.whole().T), dtype) for tile in self._tiles(self._wide)]
        return torch.cat(parts).index_select(0, self.position)

    def resized(self, n: int) -> CodedMatrix:
        """The first n rows.

        Raises:
            KflatsError: n < 1, or more rows than there are: new rows must be trained, and codes are constants.
        """
        check_rows(n)
        self._check_ready()
        geometry = self.geometry
        if n > geometry.shape[0]:
            raise KflatsError(
                f"a coded table of {geometry.shape[0]} rows cannot grow to {n}",
                cause="new rows have to be trained, and codes are constants",
                hint="resize before compressing, or kflats.restore_(model) first",
                command="resize the original model, then compress it",
            )
        kept = {name: value.detach().clone() for name, value in self.tensors().items()}
        counts = [n]
        if "labels" in kept:
            kept["labels"] = kept["labels"][:n]
            counts = torch.bincount(kept["labels"], minlength=len(geometry.classes)).tolist()
        if geometry.scales == "row":
            kept["weight"] = kept["weight"][: n * geometry.groups]
        # Inside a class rows stand by row number: the rows that are dropped are its last.
        parts = torch.split(kept["codes"], [rows * row_bytes for rows, row_bytes in geometry.classes])
        sizes = tuple((count, row_bytes) for count, (_, row_bytes) in zip(counts, geometry.classes, strict=True))
        kept["codes"] = torch.cat([part[: rows * size] for part, (rows, size) in zip(parts, sizes, strict=True)])
        smaller = CodedGeometry(**{**vars(geometry), "shape": (n, geometry.shape[1]), "classes": sizes})
        return copy_trainable(self, CodedMatrix(smaller, kept))

    def extra_repr(self) -> str:
        n, d = self.shape
        return f"{n}, {d}, rank={self.geometry.rank}, classes={len(self.geometry.classes)}, bytes={self.nbytes}"

    def _get(self, name: str) -> Tensor | None:
        found = self._parameters.get(name)
        return self._buffers.get(name) if found is None else found

    def _is_many(self, x: Tensor) -> bool:
        """Whether ``x`` has enough rows for one product to be quicker than a product for each class."""
        small = self.geometry.shape[0] * self.geometry.rank <= TILE and not self.geometry.flats
        return small and not is_recording() and len(self.geometry.classes) > 1 and x.numel() >= MANY * x.shape[-1]

    def _all_coordinates(self, x: Tensor) -> Tensor:
        """(r, n) for products with ``x``, rows in their order."""
        rank, parts = self.geometry.rank, []
        for tile in self._tiles(self._wide):
            numbers = tile.whole()
            parts.append(F.pad(numbers, (0, 0, 0, rank - numbers.shape[0])))
        return torch.cat(parts, dim=1).index_select(1, self.position).to(_product_type(x))

    @property
    def _wide(self) -> torch.dtype:
        """The type of decoded integers: half precision does not hold all integers of 15 bits."""
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
        """Numbers of the table as ``dtype``: limited to its range where it is the table's own type, else as a cast."""
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
                # Half precision only at the end: it may hold the numbers of a row and not its small coordinates.
                parts.append(self._ended(self._project(flat, torch.cat(found, dim=1).T), dtype))
        return torch.cat(parts)

    def _tile(
        self, c: int, flat: int, first: int, packed: Tensor, rows: Tensor | None, tables: tuple[Tensor, ...]
    ) -> Tile:
        """(m, bytes) of class ``c`` as numbers; ``rows``: their row numbers, where each row has scales."""
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
        """Whether a ``shrink`` may be other than 0; also True where reading it is slow, or where it needs gradients."""
        shrink = self._get("shrink")
        if shrink is None or shrink.device.type != "cpu" or is_recording():
            return shrink is not None
        return (torch.is_grad_enabled() and shrink.requires_grad) or bool(shrink.detach().any())

    def _tables(self) -> tuple[Tensor, ...]:
        """Three tables, (C, r) each: shrink, center and scale of every class and column."""
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
                # The masks drop all bits of bytes beyond the last one, so it may be read in their place.
                here = (at + byte).clamp(max=codes.numel() - 1).reshape(-1)
                word = word | (codes.index_select(0, here).to(torch.int32).view(at.shape) << 8 * byte)
        tables = (table.index_select(0, label) for table in self._tables())
        # The exporter of ONNX knows this name and not the operator.
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


def _product_type(x: Tensor) -> torch.dtype:
    """The type of a product with ``x``: that of autocast where it is enabled, else the type of ``x``."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
