"""CodedMatrix: rows as short strings of bits, decoded when they are read; the whole table never is."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.errors import KflatsError
from kflats.nn.abstract import Matrix
from kflats.nn.coded_geometry import CodedGeometry, contradiction
from kflats.nn.flats import refresh_after_load
from kflats.nn.lookup import FEW, distinct, inverse_of, is_jit_tracing
from kflats.nn.low_rank import check_rows, copy_trainable
from kflats.numerics.coding.packing import places_of, read_codes

TILE = 2**20  # numbers that vecmat, matvec and dense decode at a time


class CodedMatrix(Matrix):
    """Row i of class c is ``(scale * value(q_i)) @ basis``: r integers q_i, in as many bits as its class gives each.

        value(q) = center + q - sign(q) shrink      uniform steps; shrink: from an interval's middle to its mean
        value(q) = levels[q + L // 2]               L levels of any kind (Lloyd-Max)

    Rows of one class lie together, each in the same number of bytes (``numerics.coding.packing``): a batch is decoded
    class by class, all columns at once. The matrix takes its codes' memory and ``position``, 4 bytes a row.

    Args:
        geometry: all sizes.
        tensors: by name, of the shapes and types the geometry states:
            weight: the scales, flat: (class or row) x group.
            codes: uint8, the packed rows of class 0, then of class 1, ...; inside a class by row number.
            labels: (n,) uint8, the class of each row; absent where there is one class.
            bits, low: (C, r), column j of class c holds low .. low + 2^bits - 1.
            centers, contexts: (C, r), the center of a column, and which ``shrink`` is its.
            shrink: (K,); or levels: (L,).
            basis: (r, d) int8, with basis_scale (r,), or floating-point; absent where it is the identity.

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
        self.ready = False  # nothing is known of the codes yet
        self.streamed = False  # ``codes`` are those of a file, see kflats.streams
        self.used: list[int] = []  # of each class, how many leading columns can be other than zero
        self.span = 3  # bytes that a code may lie in
        dtype = tensors["weight"].dtype
        for name, shape in geometry.shapes.items():
            found = tensors.get(name)
            wanted = geometry.dtype_of(name, dtype)
            if found is None or tuple(found.shape) != shape or found.dtype != wanted:
                there = "absent" if found is None else f"{found.dtype} of shape {tuple(found.shape)}"
                raise KflatsError(
                    f"{name!r} of a coded matrix is {there}, not {wanted} of shape {shape}", cause="a damaged file"
                )
            if wanted.is_floating_point:
                self.register_parameter(name, nn.Parameter(found))
            else:
                self.register_buffer(name, found)
        if unknown := sorted(tensors.keys() - geometry.shapes.keys()):
            raise KflatsError(f"a coded matrix has no {unknown[0]!r}", cause="a damaged file")
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
        """Recompute where rows and columns lie; refuse labels and layouts that contradict the geometry."""
        if self.streamed or self.get_buffer("codes").is_meta:
            return
        geometry, codes, labels = self.geometry, self.get_buffer("codes"), self._get("labels")
        if problem := contradiction(geometry, self.tensors()):
            raise KflatsError(problem, cause="a damaged or mixed-up file", hint="restore the file or compress again")
        bits, low = self.get_buffer("bits").to(torch.int64), self.get_buffer("low")
        starts, shifts, masks = places_of(bits)
        if bits.numel():
            self.span = max(1, int(((shifts + bits + 7) >> 3).max()))
        self.fields = torch.stack([starts, shifts, masks, low.to(torch.int32)])
        # Columns behind the last that can be other than zero are not decoded.
        used = (bits > 0) | (low != 0) | (self.get_buffer("centers") != 0) | bool(geometry.levels)
        here = torch.arange(1, geometry.rank + 1, device=bits.device)
        self.used = (used * here).amax(1).tolist() if geometry.rank else [0] * len(geometry.classes)
        n = geometry.shape[0]
        ordered = torch.arange(n, device=codes.device) if labels is None else torch.argsort(labels, stable=True)
        self.position = inverse_of(ordered).to(torch.int32)
        self.ready = True

    def checksum(self) -> int:
        """CRC-32 of all integers: they never change, in whatever type the rest is loaded or trained."""
        total = 0
        for name, value in sorted(self.tensors().items()):
            if not value.is_floating_point():
                data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                total = zlib.crc32(data.numpy().tobytes(), zlib.crc32(name.encode(), total))
        return total

    def rows(self, index: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        self._check_filled()
        flat = index.reshape(-1)
        dtype = dtype or self.weight.dtype
        recorded = torch.compiler.is_compiling() or is_jit_tracing()
        # Class by class bytes are gathered in blocks, and not one by one, but every class has its own calls.
        if recorded or index.device.type != "cpu" or flat.numel() < FEW:
            out = self._project(self._coordinates(flat).to(dtype))
        else:
            values, inverse = distinct(self.position.index_select(0, flat))
            out = self._project(self._sorted_coordinates(values).to(dtype)).index_select(0, inverse)
        return out.reshape(*index.shape, self.shape[1])

    def vecmat(self, x: Tensor) -> Tensor:
        self._check_filled()
        ordered = x.index_select(-1, inverse_of(self.position))
        found: Tensor | None = None
        for c, a, b in self._tiles():
            product = ordered[..., a:b] @ self._tile(c, a, b).to(x.dtype).T
            wide = F.pad(product, (0, self.geometry.rank - self.used[c]))
            found = wide if found is None else found + wide
        assert found is not None
        return self._project(found)

    def matvec(self, x: Tensor) -> Tensor:
        self._check_filled()
        basis = self._get("basis")
        inner = x if basis is None else x @ basis.T.to(x.dtype)
        parts = [inner[..., : self.used[c]] @ self._tile(c, a, b).to(inner.dtype) for c, a, b in self._tiles()]
        return torch.cat(parts, dim=-1).index_select(-1, self.position)

    def dense(self) -> Tensor:
        self._check_filled()
        dtype = self.weight.dtype
        parts = [self._project(self._tile(c, a, b).T.to(dtype)) for c, a, b in self._tiles()]
        return torch.cat(parts).index_select(0, self.position)

    def spec(self) -> dict[str, Any]:
        return self.geometry.spec()

    def resized(self, n: int) -> CodedMatrix:
        """The first n rows.

        Raises:
            KflatsError: n < 1, or more rows than there are: codes cannot be learned, as rows that are new must be.
        """
        check_rows(n)
        self._check_filled()
        geometry = self.geometry
        if n > geometry.shape[0]:
            raise KflatsError(
                f"a coded table of {geometry.shape[0]} rows cannot grow to {n}",
                cause="new rows have to be trained, and codes are constants",
                hint="resize before compressing, or kflats.surgery.restore_(model) first",
            )
        kept = {name: value.detach().clone() for name, value in self.tensors().items()}
        counts = [n]
        if "labels" in kept:
            kept["labels"] = kept["labels"][:n]
            counts = torch.bincount(kept["labels"], minlength=len(geometry.classes)).tolist()
        if geometry.scales == "row":
            kept["weight"] = kept["weight"][: n * geometry.groups]
        # Inside a class rows stand by row number: those that go are its last.
        parts = torch.split(kept["codes"], [rows * row_bytes for rows, row_bytes in geometry.classes])
        sizes = tuple((count, row_bytes) for count, (_, row_bytes) in zip(counts, geometry.classes, strict=True))
        kept["codes"] = torch.cat([part[: rows * size] for part, (rows, size) in zip(parts, sizes, strict=True)])
        smaller = CodedGeometry(**{**vars(geometry), "shape": (n, geometry.shape[1]), "classes": sizes})
        return copy_trainable(self, CodedMatrix(smaller, kept))

    def extra_repr(self) -> str:
        n, d = self.shape
        return f"{n}, {d}, rank={self.geometry.rank}, classes={len(self.geometry.classes)}, bytes={self.nbytes}"

    # Decoding -----------------------------------------------------------------------------------

    @property
    def _wide(self) -> torch.dtype:
        """Integers of up to 15 bits are no numbers of half precision."""
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32

    def _get(self, name: str) -> Tensor | None:
        found = self._parameters.get(name)
        return self._buffers.get(name) if found is None else found

    def _check_filled(self) -> None:
        if not self.ready:
            raise KflatsError(
                "the matrix has no codes yet",
                cause="it was built empty and its tensors were set without load_state_dict",
                hint="call matrix.refresh() once they are filled",
            )

    def _tiles(self) -> Iterator[tuple[int, int, int]]:
        """(class, and the places a..b of its rows in class order), ``TILE`` numbers each."""
        most, first = max(1, TILE // max(1, self.geometry.rank)), 0
        for c, (rows, _) in enumerate(self.geometry.classes):
            for a in range(first, first + rows, most):
                yield c, a, min(a + most, first + rows)
            first += rows

    def _packed(self, c: int) -> Tensor:
        """(rows, bytes) of class ``c``."""
        (rows, row_bytes), before = self.geometry.classes[c], self.geometry.classes[:c]
        first = sum(rows * row_bytes for rows, row_bytes in before)
        return self.get_buffer("codes")[first : first + rows * row_bytes].view(rows, row_bytes)

    def _tile(self, c: int, a: int, b: int) -> Tensor:
        """(columns in use, b - a): coordinates of the rows at places a..b, all in class ``c``."""
        first = sum(rows for rows, _ in self.geometry.classes[:c])
        rows = inverse_of(self.position)[a:b] if self.geometry.scales == "row" else None
        return self._decode(c, self._packed(c)[a - first : b - first], rows, self._tables())

    def _sorted_coordinates(self, places: Tensor) -> Tensor:
        """(t,) ascending places in class order -> (t, r)."""
        starts = [0, *accumulate(rows for rows, _ in self.geometry.classes)]
        bounds = torch.tensor(starts, device=places.device, dtype=places.dtype)
        cuts = torch.searchsorted(places, bounds).tolist()
        ordered = inverse_of(self.position).index_select(0, places) if self.geometry.scales == "row" else None
        tables, parts = self._tables(), []
        for c, (a, b) in enumerate(pairwise(cuts)):
            if a < b:
                packed = self._packed(c).index_select(0, places[a:b] - starts[c])
                part = self._decode(c, packed, None if ordered is None else ordered[a:b], tables)
                parts.append(F.pad(part, (0, 0, 0, self.geometry.rank - self.used[c])))
        return torch.cat(parts, dim=1).T

    def _decode(self, c: int, packed: Tensor, rows: Tensor | None, tables: tuple[Tensor, ...]) -> Tensor:
        """(m, bytes) of class ``c`` -> (columns in use, m), scaled; ``rows``: their numbers, for scales by row."""
        starts, shifts, masks, low = self.fields[:, c, : self.used[c]]
        q = read_codes(packed, starts, shifts, masks, self.span).add_(low.unsqueeze(1))
        values = self._values(q, *(table[c, : self.used[c]].unsqueeze(1) for table in tables))
        return values if rows is None else values * self._row_scales(rows)[:, : self.used[c]].T

    def _tables(self) -> tuple[Tensor, ...]:
        """Of every class and column, each (C, r): shrink, center and scale."""
        geometry, dtype = self.geometry, self._wide
        centers, shrink = self.get_buffer("centers").to(dtype), self._get("shrink")
        scales = torch.ones_like(centers)
        if geometry.scales == "class":
            steps = self.weight.to(dtype).view(-1, geometry.groups)
            scales = steps.repeat_interleave(geometry.rank // geometry.groups, dim=1)
        if (basis_scale := self._get("basis_scale")) is not None:
            scales = scales * basis_scale.to(dtype)
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
        groups = self.geometry.groups
        scales = self.weight.to(self._wide).view(-1, groups).index_select(0, rows)
        return scales if groups == 1 else scales.repeat_interleave(self.geometry.rank // groups, dim=1)

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
            for byte in range(self.span):
                # Beyond the last byte lies nothing that a mask would keep.
                here = (at + byte).clamp(max=codes.numel() - 1).reshape(-1)
                word = word | (codes.index_select(0, here).to(torch.int32).view(at.shape) << 8 * byte)
        tables = (table.index_select(0, label) for table in self._tables())
        # By this name, not as an operator: ONNX's exporter knows no other.
        codes_here = word.bitwise_right_shift(shifts) & masks
        values = self._values(codes_here + low, *tables)
        return values if geometry.scales == "class" else values * self._row_scales(index)

    def _project(self, coordinates: Tensor) -> Tensor:
        """(..., columns in use) -> (..., d), in the coordinates' type."""
        basis, used = self._get("basis"), coordinates.shape[-1]
        if basis is None:
            return F.pad(coordinates, (0, self.geometry.rank - used))
        return coordinates @ basis[:used].to(coordinates.dtype)
