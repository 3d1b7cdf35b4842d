"""CodedMatrix: rows as short strings of bits, decoded when they are read; the whole table is never decoded at once.

Its sizes without its numbers are a ``CodedGeometry``. A file states them, and they are checked before use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.common.hashing import crc32
from kflats.common.run_forms import RunForm
from kflats.common.schema import JsonObject, check_version, decode
from kflats.matrices.base import (
    FEW,
    Matrix,
    State,
    check_rows,
    check_shape,
    copy_trainable,
    distinct,
    inverse_of,
    is_exporting,
    is_recording,
    refresh_after_load,
    settle,
)
from kflats.matrices.running import DenseProduct, IntegerProduct, Product, evening_scales
from kflats.numerics.coding.packing import MOST_BITS, PackedLayout, layout_of, pack, places_of, read_codes

VERSION = 1
MAX_CLASSES = MAX_CONTEXTS = 256  # labels and contexts are bytes
_FARTHEST_UNIT = 300  # of what float64 can hold, products included
_DAMAGED = "a damaged or hand-edited file"
STEPS_AN_OCTAVE = 8
"""Column steps are 2^(k / 8) for whole k: half an eighth of an octave off costs .001 bits a number."""
INTEGERS = {
    "codes": torch.uint8,
    "labels": torch.uint8,
    "bits": torch.uint8,
    "low": torch.int16,
    "centers": torch.int16,
    "contexts": torch.uint8,
    "basis": torch.int8,
    "column_steps": torch.int8,
}
"""Types of the stored integers."""
_Tables: TypeAlias = tuple[Tensor | None, Tensor, Tensor]


@dataclass(frozen=True)
class CodedGeometry:
    """Sizes of a CodedMatrix.

    Args:
        shape: (n, d).
        rank: r, the number of integers of a row; d where the basis is the identity or diagonal.
        classes: (rows, bytes a row) of each class.
        contexts: how many distributions the integers of columns follow.
        scales: "class" or "row": ``weight`` holds scales of each class or of each row.
        groups: how many scales a class or row has; each serves ceil(r / groups) columns, the last one the rest.
        basis: "int8", "identity" (none is stored), or "diagonal" (a step for each column).
        flats: (classes, rank) of each flat, in order: the first flat has the first classes and the first rows of the
            basis, and so on; ``rank`` is then the largest. Empty where all classes share one basis.
        unit: all numbers of the matrix are 2^unit times those of the tensors, so that half precision holds the scales
            of small numbers.

    Raises:
        KflatsError: sizes that no matrix has.

    >>> CodedGeometry((2, 8), 8, ((2, 4),), scales="row").shapes["codes"]
    (8,)
    """

    shape: tuple[int, int]
    rank: int
    classes: tuple[tuple[int, int], ...]
    contexts: int = 1
    scales: str = "class"
    groups: int = 1
    basis: str = "identity"
    flats: tuple[tuple[int, int], ...] = ()
    unit: int = 0

    def __post_init__(self) -> None:
        n, d = self.shape
        check_shape(n, d)
        rows, most = sum(rows for rows, _ in self.classes), -(-self.rank * MOST_BITS // 8)
        counts, ranks = zip(*self.parts, strict=True)
        problem = ""
        if not 1 <= len(self.classes) <= MAX_CLASSES:
            problem = f"{len(self.classes)} classes, not 1..{MAX_CLASSES}"
        elif rows != n or any(rows < 0 for rows, _ in self.classes):
            problem = f"classes hold {rows} rows of {n}"
        elif self.scales not in ("class", "row") or self.basis not in ("int8", "identity", "diagonal"):
            problem = f"scales {self.scales!r}, basis {self.basis!r}"
        elif not 0 <= self.rank <= d or (self.basis != "int8" and (self.rank != d or self.flats)):
            problem = f"{self.rank} integers a row of {d} columns"
        elif any(not 0 <= row_bytes <= most for _, row_bytes in self.classes):
            problem = f"rows of more than {most} bytes"
        elif not 1 <= self.contexts <= MAX_CONTEXTS:
            problem = f"{self.contexts} contexts"
        elif not 1 <= self.groups <= max(1, self.rank) or (self.rank and -(-self.rank // self.group) != self.groups):
            problem = f"{self.groups} groups of {self.rank} columns"
        elif abs(self.unit) > _FARTHEST_UNIT:
            problem = f"numbers in units of 2^{self.unit}"
        elif min(counts) < 1 or sum(counts) != len(self.classes) or min(ranks) < 0 or max(ranks) != self.rank:
            problem = f"flats {self.flats[:8]} of {len(self.classes)} classes and rank {self.rank}"
        if problem:
            raise KflatsError(f"impossible coded matrix: {problem}", cause=_DAMAGED)

    @property
    def group(self) -> int:
        """Columns that share a scale; the last group may have fewer."""
        return -(-self.rank // self.groups)

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """(classes, rank) of each flat, one or several."""
        return self.flats or ((len(self.classes), self.rank),)

    @property
    def axes(self) -> int:
        """Rows of the basis: the ranks of all flats."""
        return sum(rank for _, rank in self.parts)

    @property
    def flat_of(self) -> tuple[int, ...]:
        """The flat of each class."""
        return tuple(flat for flat, (count, _) in enumerate(self.parts) for _ in range(count))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every stored tensor, by name. Tensors that a matrix does not need are absent."""
        (n, d), r, c = self.shape, self.rank, len(self.classes)
        shapes: dict[str, tuple[int, ...]] = {
            "weight": ((c if self.scales == "class" else n) * self.groups,),
            "codes": (sum(rows * row_bytes for rows, row_bytes in self.classes),),
            **dict.fromkeys(("bits", "low", "centers", "contexts"), (c, r)),
        }
        if c > 1:
            shapes["labels"] = (n,)
        shapes["shrink"] = (self.contexts,)
        if self.basis == "int8":
            shapes |= {"basis": (self.axes, d), "basis_scale": (self.axes,)}
        if self.basis == "diagonal":
            shapes["column_steps"] = (d,)
        return shapes

    def part(self, codes: Tensor, c: int) -> Tensor:
        """(rows, bytes a row), the packed rows of class ``c``: a view of the codes of all classes."""
        (rows, row_bytes), before = self.classes[c], self.classes[:c]
        first = sum(rows * row_bytes for rows, row_bytes in before)
        return codes[first : first + rows * row_bytes].view(rows, row_bytes)

    def spec(self) -> JsonObject:
        """As JSON."""
        lists: JsonObject = {
            "shape": list(self.shape),
            "classes": list(map(list, self.classes)),
            "flats": list(map(list, self.flats)),
        }
        return {"kind": "coded", "version": VERSION, **vars(self), **lists}


def read_geometry(spec: JsonObject) -> CodedGeometry:
    """The geometry that ``CodedGeometry.spec`` wrote.

    Raises:
        KflatsError: another version, fields of another form, or impossible numbers.
    """
    check_version(spec.get("version"), VERSION, "coded matrices")
    fields = {name: value for name, value in spec.items() if name not in ("kind", "version")}
    geometry: CodedGeometry = decode(CodedGeometry, fields, "matrix", signed=frozenset({"matrix.unit"}))
    return geometry


def contradiction(geometry: CodedGeometry, tensors: dict[str, Tensor]) -> str:
    """How the integers of a matrix, of the right shapes, contradict its geometry; "" where they do not."""
    bits, low = tensors["bits"].to(torch.int64), tensors["low"].to(torch.int64)
    sizes = [rows for rows, _ in geometry.classes]
    counts = torch.bincount(tensors["labels"], minlength=len(sizes)).tolist() if "labels" in tensors else sizes
    if counts != sizes:
        return f"row labels do not match the classes ({counts[:8]} rows instead of {sizes[:8]})"
    if (-(-bits.sum(1) // 8)).tolist() != [row_bytes for _, row_bytes in geometry.classes]:
        return "the bits of the columns do not add up to the bytes of a row"
    if not bits.numel():
        return ""
    ranks = torch.tensor([geometry.parts[flat][1] for flat in geometry.flat_of], device=bits.device).unsqueeze(1)
    beyond = torch.arange(geometry.rank, device=bits.device) >= ranks
    if bool(((bits != 0) | (low != 0) | (tensors["centers"] != 0))[beyond].any()):
        return "a class has more columns than its flat"
    if int(bits.max()) > MOST_BITS:
        return f"a column of more than {MOST_BITS} bits"
    if int(tensors["contexts"].max()) >= geometry.contexts:
        return "a column follows a distribution that is not there"
    return ""


TILE = 2**20  # numbers that are decoded at a time
_PIECE = 2**17
"""Numbers that are decoded at a time where all rows are wanted: what that takes is small beside the rows."""
_SMALL = 2**18
"""Numbers of a table that is kept decoded: of positions or types, whose lookups would take a tenth of a short text."""
_A_CLASS = 20
"""Rows a class from which on it is quicker to read a batch class by class."""
MANY = 1024
"""Rows of an input from which on a small matrix is put together before it is multiplied by."""
_BASIS_UNIT = 128.0
"""An integer basis is divided by this number, so that coordinates in it are about as large as the numbers they stand
for: half precision, in which products may be taken, does not hold much smaller ones. A power of two is exact."""
_ALIGNED = 1.125
"""How many times the bytes of the smallest layout one of equal columns may take."""


class CodedMatrix(Matrix):
    """Row i of class c is ``(scale * (center + q_i - sign(q_i) shrink)) @ basis``. It stores r integers q_i; the class
    says how many bits each of them takes. Where there are several flats, ``basis`` is the one of the class' flat.
    ``shrink`` leads from an interval's middle to its mean.

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
            shrink: (K,).
            basis: (r, d) int8, with basis_scale (r,); absent where it is the identity or diagonal. The bases of several
                flats stand one below the other, and r is the sum of their ranks.
            column_steps: (d,) int8, k of the diagonal 2^(k / 8); absent where the basis is not diagonal.

    Codes, labels, layouts and the basis are constants. Scales and shrink are parameters; training through ``matvec`` (a
    tied head) keeps decoded tiles for the backward pass.

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
    has_integers = True
    one_operator = True

    def __init__(self, geometry: CodedGeometry, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.geometry = geometry
        self.ready = False
        self.streamed = False  # True while ``codes`` holds the stream of a file, see kflats.codecs.streams
        self.readings: list[Reading] = []  # of each class
        self._known: tuple[State, Lookup] | None = None
        shapes, dtype = geometry.shapes, tensors["weight"].dtype
        wanted = {name: (INTEGERS.get(name, dtype), shape) for name, shape in shapes.items()}
        there = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        for name in sorted(wanted.keys() | there.keys()):
            if wanted.get(name) != there.get(name):
                raise KflatsError(
                    f"{name!r} of a coded matrix is {there.get(name, 'absent')}, not {wanted.get(name, 'absent')}",
                    cause="a damaged file, or tensors of another matrix",
                )
        for name in shapes:
            if name in INTEGERS:
                self.register_buffer(name, tensors[name])
            else:
                self.register_parameter(name, nn.Parameter(tensors[name]))
        empty = torch.empty(0, dtype=torch.int32, device=tensors["codes"].device)
        self.position: Tensor
        self.fields: Tensor
        self.register_buffer("position", empty, persistent=False)
        # A tensor of its own: accelerate brings one of two names of a tensor to the devices of a device_map.
        self.register_buffer("fields", empty.clone(), persistent=False)
        self.register_load_state_dict_post_hook(refresh_after_load)  # type: ignore[no-untyped-call]
        self.refresh()

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d), from the geometry."""
        return self.geometry.shape

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the geometry names: codes, bits, offsets and scales, and labels where there are several
        classes."""
        return {name: value for name in self.geometry.shapes if (value := self._get(name)) is not None}

    def refresh(self) -> None:
        """Compute again where rows and columns lie; refuse labels and layouts that contradict the geometry."""
        self._known = None
        if self.streamed or self.get_buffer("codes").is_meta:
            return
        geometry, codes, labels = self.geometry, self.get_buffer("codes"), self._get("labels")
        if problem := contradiction(geometry, self.tensors()):
            raise KflatsError(problem, cause="a damaged or mixed-up file", hint="restore the file, or compress again")
        bits, low = self.get_buffer("bits"), self.get_buffer("low")
        starts, shifts, masks = places_of(bits.to(torch.int64))
        self.fields = torch.stack([starts, shifts, masks, low.to(torch.int32)])
        layouts = bits.cpu().to(torch.int32), low.cpu(), self.get_buffer("centers").cpu(), shifts.cpu()
        self.readings = [Reading.of(*(each[c] for each in layouts)) for c in range(len(geometry.classes))]
        n = geometry.shape[0]
        ordered = torch.arange(n, device=codes.device) if labels is None else torch.argsort(labels, stable=True)
        self.position = inverse_of(ordered).to(torch.int32)
        self.ready = True

    def row_sources(self) -> list[Tensor]:
        """As ``Matrix.row_sources``."""
        return [*super().row_sources(), self.get_buffer("codes")]

    @property
    def keeps_rows(self) -> bool:
        """As ``Matrix.keeps_rows``. A small table keeps all of its rows itself."""
        return math.prod(self.shape) > _SMALL

    def checksum(self) -> int:
        """CRC-32 of all integers and the unit. They are constants: training and casts change other tensors only."""
        return crc32([*self.integers(), f"2^{self.geometry.unit}"])

    def integers(self) -> list[str | Tensor]:
        """The name and the numbers of each tensor of integers, by name."""
        named = sorted((name, value) for name, value in self.tensors().items() if not value.is_floating_point())
        return [part for item in named for part in item]

    def spec(self) -> JsonObject:
        """The geometry as JSON; the integers are tensors."""
        return self.geometry.spec()

    def rows(self, index: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """As ``Matrix.rows``. Only the bytes of these rows are read: many rows class by class, few rows and recorded
        graphs at once."""
        self._prepare(index)
        flat = index.reshape(-1)
        dtype = dtype or self.weight.dtype
        if (table := self._decoded_table()) is not None:
            return self._ended(F.embedding(index, table), dtype)
        if is_recording() or index.device.type != "cpu" or flat.numel() < FEW:
            out = self._recorded_rows(flat, dtype)
        else:
            values, inverse = distinct(flat)
            # The sorted form gathers bytes in blocks, but makes calls for every class: few rows are quicker without it.
            if len(values) < _A_CLASS * len(self.geometry.classes):
                out = self._recorded_rows(values, dtype).index_select(0, inverse)
            else:
                places, order = self.position.index_select(0, values).sort()
                out = self._sorted_rows(places, dtype).index_select(0, inverse_of(order).index_select(0, inverse))
        return out.reshape(*index.shape, self.shape[1])

    def vecmat(self, x: Tensor) -> Tensor:
        """As ``Matrix.vecmat``, tile by tile: only the integers of one tile of rows are decoded at a time."""
        self._check_ready()
        if is_exporting():
            return x @ self._every_row(x)
        if self._is_many(x):
            return self._project(0, x @ self._all_coordinates(x).T)
        ordered = x if self._get("labels") is None else x.index_select(-1, inverse_of(self.position))
        sums: dict[int, Tensor] = {}
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
            sums[tile.flat] = sums[tile.flat] + wide if tile.flat in sums else wide
        parts = [self._project(flat, product) for flat, product in sums.items()]
        return sum(parts[1:], start=parts[0])

    def matvec(self, x: Tensor) -> Tensor:
        """As ``Matrix.matvec``, tile by tile: x times the axes first, then times the integers of each tile."""
        self._check_ready()
        if is_exporting():
            return x @ self._every_row(x).T
        bases = self._bases(x.dtype)
        if self._is_many(x):
            return (x if bases[0] is None else x @ bases[0].T) @ self._all_coordinates(x)
        inner = [x if basis is None else x @ basis.T for basis in bases]
        products = []
        for tile in self._tiles(_product_type(x)):
            right = inner[tile.flat][..., : tile.numbers.shape[0]]
            if tile.columns is not None:
                right = right * tile.columns
            product = right @ tile.numbers
            if tile.centers is not None:
                product = product + (right * tile.centers).sum(-1, keepdim=True)
            products.append(product if tile.rows is None else product * tile.rows)
        joined = torch.cat(products, dim=-1)
        return joined if self._get("labels") is None else joined.index_select(-1, self.position)

    def dense(self) -> Tensor:
        """As ``Matrix.dense``: every tile decoded in float32 and returned in the stored type."""
        return self.factors(self.weight.dtype)[0]

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """As ``Matrix.factors``: the matrix itself, decoded."""
        self._check_ready()
        if is_exporting():
            return (self._recorded_rows(torch.arange(self.shape[0], device=self.position.device), dtype),)
        parts = [self._ended(self._project(tile.flat, tile.whole().T), dtype) for tile in self._tiles(self._wide)]
        return (torch.cat(parts).index_select(0, self.position),)

    @torch.no_grad()
    def product(self, form: RunForm, dtype: torch.dtype, *, transposed: bool) -> Product | None:
        """As ``Matrix.product``. Where two factors take fewer multiplications than the matrix, dense forms keep two."""
        if form == "compact":
            return None
        self._check_ready()
        (n, d), r = self.shape, self.geometry.rank
        if form == "int8":
            return IntegerProduct.of(*self.scaled(transposed=transposed))
        kept = torch.bfloat16 if form == "bfloat16" else dtype
        basis = None if self.geometry.flats or r * (n + d) >= n * d else self._bases(self._wide)[0]
        if basis is None:
            factors = [self._whole(kept)]
        else:
            factors = [self._all_coordinates(basis).T.to(kept), basis.to(kept)]
        turned = factors[::-1] if transposed else [factor.T for factor in factors]
        return DenseProduct(tuple(factor.contiguous() for factor in turned))

    @torch.no_grad()
    def scaled(self, *, transposed: bool, power: float = 0.5) -> tuple[Tensor, Tensor]:
        """As ``Matrix.scaled``. Without steps of columns, or where rows are inputs, their sizes give the scales."""
        self._check_ready()
        whole, steps = self._whole(torch.float32), self._get("column_steps")
        weight = whole if transposed else whole.T
        if steps is not None and transposed:
            return weight, torch.exp2(power * steps.to(torch.float32) / STEPS_AN_OCTAVE)
        return weight, evening_scales(weight)

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
                hint="resize the original model, then compress it",
            )
        kept = {name: value.detach().clone() for name, value in self.tensors().items()}
        counts = [n]
        if "labels" in kept:
            kept["labels"] = kept["labels"][:n]
            counts = torch.bincount(kept["labels"], minlength=len(geometry.classes)).tolist()
        if geometry.scales == "row":
            kept["weight"] = kept["weight"][: n * geometry.groups]
        # Inside a class rows stand by row number: the rows that are dropped are its last.
        parts = [geometry.part(kept["codes"], c)[:count].reshape(-1) for c, count in enumerate(counts)]
        kept["codes"] = torch.cat(parts)
        sizes = tuple((count, row_bytes) for count, (_, row_bytes) in zip(counts, geometry.classes, strict=True))
        smaller = replace(geometry, shape=(n, geometry.shape[1]), classes=sizes)
        return copy_trainable(self, CodedMatrix(smaller, kept))

    def _prepare(self, index: Tensor) -> None:
        """Called before the rows at ``index`` are read."""
        self._check_ready()

    def _packed(self) -> Tensor:
        """The codes that rows are read from, after ``_prepare``."""
        return self.get_buffer("codes")

    def _get(self, name: str) -> Tensor | None:
        tensor = self._parameters.get(name)
        return self._buffers.get(name) if tensor is None else tensor

    def _is_many(self, x: Tensor) -> bool:
        """Whether ``x`` has enough rows for one product to be quicker than a product for each class."""
        small = self.geometry.shape[0] * self.geometry.rank <= TILE and not self.geometry.flats
        return small and not is_recording() and len(self.geometry.classes) > 1 and x.numel() >= MANY * x.shape[-1]

    def _all_coordinates(self, x: Tensor) -> Tensor:
        """(r, n) for products with ``x``, rows in their order."""
        parts = [_padded(tile.whole(), self.geometry.rank) for tile in self._tiles(self._wide)]
        return torch.cat(parts, dim=1).index_select(1, self.position).to(_product_type(x))

    @property
    def _wide(self) -> torch.dtype:
        """The type of decoded integers: half precision does not hold all integers of 15 bits."""
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32

    def _tiles(self, dtype: torch.dtype) -> Iterator[Tile]:
        """All rows, ``TILE`` numbers at a time."""
        geometry, tables = self.geometry, self._tables()
        most, first = max(1, TILE // max(1, geometry.rank)), 0
        final = geometry.basis != "int8" and dtype == self.weight.dtype
        by_row = inverse_of(self.position) if geometry.scales == "row" else None
        for c, flat in enumerate(geometry.flat_of):
            rows, packed = geometry.classes[c][0], geometry.part(self.get_buffer("codes"), c)
            for a in range(0, rows, most):
                part = packed[a : a + most]
                at = None if by_row is None else by_row[first + a : first + a + len(part)]
                yield self._tile(flat, c, first + a, part, at, tables).as_type(dtype, final=final)
            first += rows

    def _ended(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Numbers of the table as ``dtype``: limited to its range where it is the table's own type, else as a cast."""
        return limited(numbers, dtype) if dtype == self.weight.dtype else numbers.to(dtype)

    def _whole(self, dtype: torch.dtype) -> Tensor:
        """All rows, as ``rows`` gives them."""
        position = self.position
        whole = torch.empty(self.shape, dtype=dtype, device=position.device)
        order = None if self._get("labels") is None else inverse_of(position)
        many = max(1, _PIECE // max(1, *self.shape[1:], self.geometry.rank))
        for first in range(0, len(position), many):
            piece = slice(first, min(first + many, len(position)))
            places = torch.arange(piece.start, piece.stop, dtype=position.dtype, device=position.device)
            rows = self._sorted_rows(places, dtype)
            if order is None:
                whole[piece] = rows
            else:
                whole.index_copy_(0, order[piece], rows.contiguous())  # a third of the time that indexing takes
        return whole

    def _sorted_rows(self, places: Tensor, dtype: torch.dtype) -> Tensor:
        """(t,) ascending places in class order -> (t, d)."""
        starts = [0, *accumulate(rows for rows, _ in self.geometry.classes)]
        bounds = torch.tensor(starts, device=places.device, dtype=places.dtype)
        cuts = torch.searchsorted(places, bounds).tolist()
        ordered = inverse_of(self.position).index_select(0, places) if self.geometry.scales == "row" else None
        tables, by_flat = self._tables(), dict[int, list[Tensor]]()
        for c, flat in enumerate(self.geometry.flat_of):
            a, b = cuts[c], cuts[c + 1]
            if a < b:
                packed = self.geometry.part(self._packed(), c).index_select(0, places[a:b] - starts[c])
                at = None if ordered is None else ordered[a:b]
                numbers = self._tile(flat, c, a, packed, at, tables).whole()
                by_flat.setdefault(flat, []).append(_padded(numbers, self.geometry.parts[flat][1]))
        # float16 only at the end: it may hold the numbers of a row and not its small coordinates. bfloat16 has the
        # range of float32, its products are summed in float32, and CPUs with units for it take a fifth of the time.
        kind = dtype if dtype == torch.bfloat16 else self._wide
        parts = [self._project(flat, _joined(numbers, 1).T.to(kind)) for flat, numbers in by_flat.items()]
        return self._ended(_joined(parts, 0), dtype)

    def _tile(self, flat: int, c: int, first: int, packed: Tensor, rows: Tensor | None, tables: _Tables) -> Tile:
        """(m, bytes) of class ``c`` as numbers; ``rows``: their row numbers, where each row has scales."""
        how, (less, centers, each) = self.readings[c], tables
        q = how.integers(packed, self.fields[:, c], self._wide)
        if less is not None:
            q = q.sub_(q.sign().mul_(less[c, : how.used].unsqueeze(1)))
        middle, scales = centers[c, : how.used] if how.centered else None, each[c, : how.used]
        by_class = scales if self.geometry.scales == "class" or self.geometry.basis != "identity" else None
        if rows is None:
            return Tile(flat, first, q, None, by_class, middle)
        by_row = self._scales().index_select(0, rows)
        if self.geometry.groups == 1:
            return Tile(flat, first, q, by_row.squeeze(1), by_class, middle)
        q = q if middle is None else q + middle.unsqueeze(1)
        return Tile(flat, first, q * self._spread(by_row)[:, : how.used].T, None, by_class, None)

    def _factor(self, name: str) -> Tensor:
        """A parameter, or the tensor that ``torch.func.functional_call`` puts in its place."""
        return cast(Tensor, self._parameters[name])

    def _is_shrunk(self) -> bool:
        """Whether a ``shrink`` may be other than 0; also True where reading it is slow, or where it needs gradients."""
        shrink = self._factor("shrink")
        if shrink.device.type != "cpu" or is_recording():
            return True
        return (torch.is_grad_enabled() and shrink.requires_grad) or bool(shrink.detach().any())

    def _tables(self) -> _Tables:
        """Three tables, (C, r) each: shrink (None where it is 0), center and scale of every class and column."""
        geometry, dtype = self.geometry, self._wide
        centers, contexts = self.get_buffer("centers").to(dtype), self.get_buffer("contexts").to(torch.int32)
        scales = self._spread(self._scales()) if geometry.scales == "class" else torch.ones_like(centers)
        if geometry.basis == "int8":
            whole = self._factor("basis_scale").to(dtype) * _BASIS_UNIT
            parts = zip(geometry.parts, whole.split([rank for _, rank in geometry.parts]), strict=True)
            each = [F.pad(of, (0, geometry.rank - rank)).expand(count, -1) for (count, rank), of in parts]
            scales = scales * torch.cat(each)
        if geometry.basis == "diagonal":
            scales = scales * 2.0 ** (self.get_buffer("column_steps").to(dtype) / STEPS_AN_OCTAVE)
        if not self._is_shrunk():
            return None, centers, scales
        less = self._factor("shrink").to(dtype).index_select(0, contexts.reshape(-1)).view(contexts.shape)
        return less, centers, scales

    def _scales(self) -> Tensor:
        """(classes or rows, groups), wide."""
        scales = self.weight.to(self._wide).view(-1, self.geometry.groups)
        return scales * 2.0**self.geometry.unit if self.geometry.unit else scales

    def _spread(self, scales: Tensor) -> Tensor:
        """(m, groups) -> (m, r)."""
        return scales.repeat_interleave(self.geometry.group, dim=1)[:, : self.geometry.rank]

    def _coordinates(self, index: Tensor, known: Lookup) -> Tensor:
        """(t,) rows -> (t, r) coordinates: one gather for all classes, in plain operators whose sizes are known."""
        geometry, codes, labels = self.geometry, self._packed(), self._get("labels")
        place = self.position.index_select(0, index).to(torch.int64)
        label = torch.zeros_like(place) if labels is None else labels.index_select(0, index).to(torch.int64)
        begin = known.begin.index_select(0, label) + place * known.row_bytes.index_select(0, label)
        starts, shifts, masks, low = self.fields.index_select(1, label)
        at = begin.unsqueeze(1) + starts
        word = starts if codes.numel() else torch.zeros_like(starts)
        if codes.numel():
            for byte in range(max(how.span for how in self.readings)):
                # The masks drop all bits of bytes beyond the last one, so it may be read in their place.
                here = (at + byte if byte else at).clamp(max=codes.numel() - 1).reshape(-1)
                part = codes.index_select(0, here).to(torch.int32).view(at.shape)
                word = word | (part << 8 * byte) if byte else part
        # The exporter of ONNX knows this name and not the operator.
        q = (word.bitwise_right_shift(shifts) & masks).add(low).to(self._wide)
        if known.less is not None:
            q = q - q.sign() * known.less.index_select(0, label)
        if known.centers is not None:
            q = q + known.centers.index_select(0, label)
        values: Tensor = q * known.scales.index_select(0, label)
        return values if geometry.scales == "class" else values * self._spread(self._scales().index_select(0, index))

    def _lookup(self) -> Lookup:
        """What lookups of few rows share. It is kept until a scale changes, and made in every call that is recorded or
        whose gradients reach the scales."""
        parameters = [p for p in self._parameters.values() if p is not None]
        if is_recording() or (torch.is_grad_enabled() and any(p.requires_grad for p in parameters)):
            return self._new_lookup()
        read = [*parameters, self._packed()]
        known = self._known  # another thread may replace it, for other tensors
        if known is None or not known[0].holds_for(read):
            state = State(read)
            with torch.inference_mode(False), torch.no_grad():
                made = self._new_lookup()
            less, centers = (None if t is None or not bool(t.any()) else t for t in (made.less, made.centers))
            settle(made.begin.device)
            self._known = known = state, replace(made, less=less, centers=centers)
        return known[1]

    def _decoded_table(self) -> Tensor | None:
        """All rows of a small matrix, kept from its first lookup on; None for a larger one, and in calls that are
        recorded or whose gradients reach the scales."""
        if is_recording():
            return None
        if torch.is_grad_enabled() and any(p.requires_grad for p in self._parameters.values() if p is not None):
            return None
        if math.prod(self.shape) > _SMALL:
            return None
        known = self._lookup()
        if known.table is None:
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.position.device.type, enabled=False):
                made = replace(known, table=self._whole(self._wide))
            settle(made.begin.device)
            if (held := self._known) is not None and held[1] is known:
                self._known = held[0], made
            known = made
        return known.table

    def _new_lookup(self) -> Lookup:
        classes, device = self.geometry.classes, self.position.device
        begin, rows_before, bytes_before = [], 0, 0
        for rows, row_bytes in classes:
            begin.append(bytes_before - rows_before * row_bytes)
            rows_before, bytes_before = rows_before + rows, bytes_before + rows * row_bytes
        sizes = torch.tensor([row_bytes for _, row_bytes in classes], device=device)
        return Lookup(torch.tensor(begin, device=device), sizes, *self._tables(), self._bases(self._wide))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}

    def _recorded_rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """(t,) rows -> (t, d), in plain operators whose sizes are known."""
        known = self._lookup()
        coordinates = self._coordinates(index, known)
        if not self.geometry.flats:
            return self._ended(self._project(0, coordinates, known.bases), dtype)
        labels = self._get("labels")
        flat_of = torch.tensor(self.geometry.flat_of, device=index.device)
        flats = flat_of[torch.zeros_like(index) if labels is None else labels.index_select(0, index).to(torch.int64)]
        products = []
        for flat, (_, rank) in enumerate(self.geometry.flats):
            own = torch.where((flats == flat).unsqueeze(1), coordinates[:, :rank], 0.0)
            products.append(self._project(flat, own, known.bases))
        return self._ended(sum(products[1:], start=products[0]), dtype)

    def _every_row(self, x: Tensor) -> Tensor:
        """(n, d) for products with ``x`` in graphs for export: they take minutes to record class by class, and ONNX
        cannot shift integers of 16 bits."""
        return self._recorded_rows(torch.arange(self.shape[0], device=x.device), _product_type(x))

    def _bases(self, dtype: torch.dtype) -> list[Tensor | None]:
        """The basis of each flat, without its scales, integers in units of 1/128; None for the identity."""
        basis = self._get("basis")
        if basis is None:
            return [None]
        parts = basis.split([rank for _, rank in self.geometry.parts])
        return [part.to(dtype).mul_(1.0 / _BASIS_UNIT) for part in parts]

    def _project(self, flat: int, coordinates: Tensor, bases: Sequence[Tensor | None] | None = None) -> Tensor:
        """(..., columns in use) -> (..., d), in the coordinates' type; ``bases``: where they are known."""
        basis, used = (bases or self._bases(coordinates.dtype))[flat], coordinates.shape[-1]
        if basis is None:
            missing = self.geometry.rank - used
            return F.pad(coordinates, (0, missing)) if missing else coordinates
        return coordinates @ basis[:used]


@dataclass(frozen=True)
class Lookup:
    """Row p of all rows in class order, of class c, begins at byte ``begin[c] + p row_bytes[c]`` of the codes.

    ``begin``, ``row_bytes``: (C,). ``less``, ``centers``, ``scales``: (C, r) as ``_tables`` gives them; None where all
    are zero. ``bases``: of each flat, as ``_bases`` gives them. ``table``: all rows, where they are kept.
    """

    begin: Tensor
    row_bytes: Tensor
    less: Tensor | None
    centers: Tensor | None
    scales: Tensor
    bases: list[Tensor | None]
    table: Tensor | None = None


def _product_type(x: Tensor) -> torch.dtype:
    """The type of a product with ``x``: that of autocast where it is enabled, else the type of ``x``."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _padded(numbers: Tensor, rank: int) -> Tensor:
    """(columns in use, m) -> (rank, m), zeros at the end."""
    return F.pad(numbers, (0, 0, 0, rank - numbers.shape[0])) if numbers.shape[0] < rank else numbers


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """One after the other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


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
class Reading:
    """How the rows of a class are read, in as few passes over its integers as their layout allows.

    ``used``: how many leading columns can be other than zero; ``span``: most bytes that one code lies in; ``width``: 4
    or 8 where every column has this number of bits, else 0; ``centered``: whether a center is other than zero.
    """

    used: int
    span: int
    width: int
    centered: bool

    @classmethod
    def of(cls, bits: Tensor, low: Tensor, centers: Tensor, shifts: Tensor) -> Reading:
        """How a class of this layout, (r,) each, is read; ``shifts`` as ``places_of`` gives them."""
        moved = (bits > 0) | (low != 0) | (centers != 0)
        used = int(moved.nonzero().max()) + 1 if bool(moved.any()) else 0
        span = max(1, int(((shifts + bits + 7) >> 3).max())) if bits.numel() else 1
        widths = set(bits.tolist())
        same = len(widths) == 1 and widths <= {4, 8} and used == len(bits) and used % 2 == 0
        return cls(used, span, widths.pop() if same else 0, bool((centers != 0).any()))

    def integers(self, packed: Tensor, fields: Tensor, dtype: torch.dtype) -> Tensor:
        """(m, bytes) -> (columns in use, m) integers as ``dtype``; ``fields`` (4, r): as ``CodedMatrix`` has them."""
        starts, shifts, masks, low = fields[:, : self.used]
        if not self.width:
            codes = read_codes(packed, starts, shifts, masks, self.span)
            return codes.to(dtype).add_(low.to(dtype).unsqueeze(1))
        if self.width == 4:
            packed = torch.stack([packed & 15, packed >> 4], dim=-1).view(len(packed), -1)
        numbers: Tensor = packed.to(dtype).add_(low.to(dtype)).T
        return numbers


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
        numbers = self.numbers if self.centers is None else self.numbers + self.centers.unsqueeze(1)
        numbers = numbers if self.columns is None else numbers * self.columns.unsqueeze(1)
        return numbers if self.rows is None else numbers * self.rows


def from_integers(
    integers: Sequence[Tensor],
    labels: Tensor | None,
    weight: Tensor,
    *,
    scales: str = "class",
    groups: int = 1,
    flats: tuple[tuple[int, int], ...] = (),
    unit: int = 0,
    **others: Tensor,
) -> CodedMatrix:
    """Pack the integers of each class, (n_c, r), at the smallest fixed rate.

    Args:
        integers: of every class, its rows by row number.
        labels: (n,) the class of each row; None for one class.
        weight: scales, flat: (class or row) x group, of the type that all floating-point parts get.
        scales, groups, flats, unit: as ``CodedGeometry``.
        others: centers, contexts, shrink, basis, basis_scale and column_steps as ``CodedMatrix``; zeros, or absent, by
            default.

    Raises:
        KflatsError: sizes that do not fit, scales that are not finite, or integers beyond 15 bits.

    >>> m = from_integers([torch.tensor([[3, -4], [1, 0]])], None, torch.tensor([0.5, 2.0]), scales="row")
    >>> m.dense().tolist(), m.get_buffer("codes").numel()
    ([[1.5, -2.0], [2.0, 0.0]], 2)
    """
    if not bool(torch.isfinite(weight).all()):
        raise KflatsError(
            f"the scales of a coded matrix are not finite in {weight.dtype}", cause="values beyond its range"
        )
    r, count = integers[0].shape[1], len(integers)
    if "column_steps" in others and "contexts" in others:
        layouts = _of_contexts(integers, others["contexts"])
    else:
        layouts = [_centered(part) if flats else _aligned(_centered(part)) for part in integers]
    zeros = torch.zeros(count, r, dtype=torch.int16)
    kept = {
        "weight": weight.reshape(-1),
        "codes": torch.cat([pack(part, at).reshape(-1) for part, at in zip(integers, layouts, strict=True)]),
        "bits": torch.stack([at.bits for at in layouts]),
        "low": torch.stack([at.low for at in layouts]),
        "centers": zeros,
        "contexts": zeros.to(torch.uint8),
        "shrink": torch.zeros(1, dtype=weight.dtype),
        **others,
    }
    if labels is not None and count > 1:
        kept["labels"] = labels.to(torch.uint8)
    basis = others.get("basis")
    geometry = CodedGeometry(
        (sum(len(part) for part in integers), r if basis is None else basis.shape[1]),
        r,
        tuple((len(part), at.row_bytes) for part, at in zip(integers, layouts, strict=True)),
        contexts=len(kept["shrink"]),
        scales=scales,
        groups=groups,
        basis="int8" if basis is not None else "diagonal" if "column_steps" in others else "identity",
        flats=flats,
        unit=unit,
    )
    return CodedMatrix(geometry, kept)


def _centered(integers: Tensor) -> PackedLayout:
    """The smallest layout, with zero in the middle of a column's range where the integers allow it."""
    layout = layout_of(integers)
    if not integers.numel():
        return layout
    middle = -((1 << layout.bits.to(torch.int64)) // 2)
    fits = (integers.amin(0) >= middle) & (integers.amax(0) < middle + (1 << layout.bits.to(torch.int64)))
    return PackedLayout(layout.bits, torch.where(fits, middle, layout.low.to(torch.int64)).to(torch.int16))


def _of_contexts(integers: Sequence[Tensor], contexts: Tensor) -> list[PackedLayout]:
    """Layouts in which the columns of a context have the same bits, zero in the middle: a file need not list them."""
    places = contexts.to(torch.int64)
    ends = [(part.amin(0), part.amax(0)) if len(part) else (places[0] * 0,) * 2 for part in integers]
    largest = torch.stack([torch.maximum(-least.to(torch.int64), most.to(torch.int64)) for least, most in ends])
    reach = torch.zeros(int(places.max()) + 1, dtype=torch.int64)
    reach.scatter_reduce_(0, places.flatten(), largest.flatten(), "amax")
    bits = torch.bucketize(2 * reach + 1, 2 ** torch.arange(MOST_BITS + 1))[places]
    return [PackedLayout(wide.to(torch.uint8), (-((1 << wide) // 2)).to(torch.int16)) for wide in bits]


def _aligned(layout: PackedLayout) -> PackedLayout:
    """4 or 8 bits for all columns where this takes little more bytes: such codes are read several times as fast."""
    width = int(layout.bits.max()) if layout.bits.numel() else 0
    if width not in (4, 8) or layout.bits.numel() % 2 or layout.bits.numel() * width > _ALIGNED * 8 * layout.row_bytes:
        return layout
    low = torch.where(layout.bits < width, torch.full_like(layout.low, -(1 << width - 1)), layout.low)
    inside = (layout.low >= low) & (layout.low + (1 << layout.bits.to(torch.int64)) <= low + (1 << width))
    return PackedLayout(torch.full_like(layout.bits, width), torch.where(inside, low, layout.low))
