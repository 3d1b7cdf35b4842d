"""Codes as files hold them: the integers of a CodedMatrix, entropy coded in blocks of rows, each with a checksum.

    magic, version, context model, integers a block, bytes of the head (64 bits), checksum of the head
    head: layouts, centers, contexts, basis, distributions; form, bytes and checksum of each block
    block after block: the classes of some rows; then the integers of some rows of one class

A model in memory holds fixed-rate codes, of which it can read any row. A stream is smaller, because the integers of a
column are not equally frequent. It is decoded block by block straight into the fixed-rate form. A block ends with the
state that its decoder starts from, so that it is read without the others: ``decode_rows`` reads some rows. Of integers
that follow paths it needs the free bits of all rows too.

The coder is that of the ``constriction`` library, asymmetric numeral systems (Duda, arXiv:1311.2540). Its models are
whole numbers, which all machines read alike (``numerics.coding.tables``). A checksum is over the integers that a block
decodes to: it shows damage, and a coder that differs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kflats.common.errors import KflatsError
from kflats.common.hashing import crc32, sha256
from kflats.common.release import needed
from kflats.matrices.coded import CodedGeometry, CodedMatrix
from kflats.methods.protocol import Factored
from kflats.numerics.coding.encode import context_moves
from kflats.numerics.coding.frame import basis_contexts
from kflats.numerics.coding.packing import PackedLayout, pack, unpack
from kflats.numerics.coding.tables import FARTHEST, KNOTS, Tables, knots_up_to, nearest_knot, table_for, tables_of
from kflats.numerics.coding.trellis import free_bits, pays, subsets_of
from kflats.numerics.large_matrices import permuted, stripes, zero_matrix

AGAIN = "restore the file or compress again"
Integers = npt.NDArray[np.int32]
_AnyIntegers = npt.NDArray[np.integer[Any]]
_PIECE = 2**20
"""Integers that are widened at once: the axes of a wide matrix are as large as the matrix."""


def damaged(symptom: str) -> KflatsError:
    """The error for a stream that is not as it was written."""
    return KflatsError(f"the codes are damaged: {symptom}", cause="a damaged or truncated file", hint=AGAIN)


@dataclass(frozen=True)
class ContextModel:
    """A distribution of integers from ``first`` on; ``coder`` is the library's, None for a single integer."""

    first: int
    coder: Any


def model_of(first: int, frequencies: Tensor) -> ContextModel:
    """The model of these whole-number frequencies; 0 counts as the least frequency that can be coded."""
    if len(frequencies) < 2:
        return ContextModel(first, None)
    # Sums of whole numbers below 2^53 are exact in any order.
    return ContextModel(first, _library().model.Categorical(frequencies.to(torch.float64).numpy(), perfect=False))


def models_of(tables: Tables) -> list[ContextModel]:
    """The models of all tables."""
    return [model_of(-reach, tables.frequencies(k)) for k, reach in enumerate(tables.reach.tolist())]


def encode_symbols(parts: Sequence[_AnyIntegers], models: Sequence[ContextModel]) -> bytes:
    """Integers, part after part, each by its own model.

    Raises:
        KflatsError: ``constriction`` is not installed.
    """
    coder = _library().stack.AnsCoder()
    for part, model in zip(reversed(parts), reversed(models), strict=True):  # the coder is a stack
        if model.coder is not None:
            coder.encode_reverse(np.subtract(part.reshape(-1), model.first, dtype=np.int32), model.coder)
    data: bytes = coder.get_compressed().astype("<u4").tobytes()
    return data


def decode_symbols(data: memoryview, counts: Sequence[int], models: Sequence[ContextModel]) -> list[Integers]:
    """The integers that ``encode_symbols`` wrote; damaged ``data`` gives other integers, or an error.

    Raises:
        KflatsError: ``constriction`` is not installed, or no coder wrote ``data``.
    """
    return list(_decoded(data, counts, models))


def _decoded(data: memoryview, counts: Iterable[int], models: Iterable[ContextModel]) -> Iterator[Integers]:
    """As ``decode_symbols``, part after part."""
    if len(data) % 4:
        raise damaged("they end inside a word")
    try:
        coder = _library().stack.AnsCoder(np.frombuffer(data, dtype="<u4").astype(np.uint32))
        for count, model in zip(counts, models, strict=True):
            if model.coder is None or not count:
                yield np.full(count, model.first, dtype=np.int32)
            else:
                part: Integers = coder.decode(model.coder, count)
                part += np.int32(model.first)
                yield part
    except (ValueError, AssertionError) as error:
        raise damaged(str(error)[:80]) from error


class Writer:
    """The head of a stream, part after part."""

    def __init__(self) -> None:
        self.data = bytearray()

    def put(self, form: str, *values: int) -> None:
        """Whole numbers, in ``struct``'s form."""
        self.data += struct.pack(form, *values)

    def symbols(self, parts: Sequence[_AnyIntegers], models: Sequence[ContextModel]) -> None:
        """Integers, each part by its own model."""
        coded = encode_symbols(parts, models)
        self.put("<II", len(coded), _checksum(parts))
        self.data += coded

    def tables(self, tables: Tables) -> None:
        """Distributions."""
        self.put("<H", len(tables))
        for reach, costs in zip(tables.reach.tolist(), tables.costs, strict=True):
            self.put("<H", reach)
            self.data += costs[: knots_up_to(reach)].numpy().tobytes()

    def array(self, values: Tensor) -> None:
        """Integers of any shape, by a distribution of their own."""
        table = table_for(values)
        self.tables(table)
        # The coder is a stack: pieces of one model take the bytes of the whole.
        pieces = [piece.numpy() for piece in values.flatten().split(_PIECE)]
        self.symbols(pieces, models_of(table) * len(pieces))


class Reader:
    """Reads the head that a ``Writer`` wrote, and never beyond its end.

    Raises (all methods):
        KflatsError: the data ends too early, or a checksum differs.
    """

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return len(self.data) - self.at

    def take(self, size: int) -> memoryview:
        """The next ``size`` bytes."""
        if size > self.left:
            raise damaged(f"they end {size - self.left} bytes too early")
        self.at += size
        return self.data[self.at - size : self.at]

    def get(self, form: str) -> tuple[int, ...]:
        """Whole numbers, in ``struct``'s form."""
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def symbols(self, counts: Sequence[int], models: Sequence[ContextModel]) -> list[Integers]:
        """Integers, each part by its own model."""
        size, checksum = self.get("<II")
        parts = decode_symbols(self.take(size), counts, models)
        if _checksum(parts) != checksum:
            raise damaged("a checksum differs")
        return parts

    def tables(self) -> Tables:
        """Distributions."""
        (count,) = self.get("<H")
        rows, reaches = [], []
        for _ in range(count):
            (reach,) = self.get("<H")
            reaches.append(reach)
            rows.append(torch.frombuffer(bytearray(self.take(knots_up_to(reach))), dtype=torch.uint8))
        costs = pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 1, dtype=torch.uint8)
        return Tables(torch.tensor(reaches, dtype=torch.int16), costs)

    def array(self, shape: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        """Integers of this shape, some at a time: the axes of a wide matrix are as large as the matrix. Numbers that
        ``dtype`` does not hold wrap."""
        models, (size, checksum) = models_of(self.tables()), self.get("<II")
        if len(models) != 1:
            raise damaged(f"{len(models)} distributions of one array")
        made = torch.empty(*shape, dtype=dtype)
        pieces = made.view(-1).split(_PIECE)
        parts = _decoded(self.take(size), [len(piece) for piece in pieces], models * len(pieces))

        def stored() -> Iterator[memoryview]:
            for piece, part in zip(pieces, parts, strict=True):
                piece.copy_(torch.from_numpy(part))
                yield np.ascontiguousarray(part, dtype="<i4").data

        if crc32(stored()) != checksum:
            raise damaged("a checksum differs")
        return made


def _checksum(parts: Sequence[_AnyIntegers]) -> int:
    return crc32(np.ascontiguousarray(part, dtype="<i4").reshape(-1).data for part in parts)


def _library() -> Any:
    return needed("constriction", "kflats[codes]", "a file of entropy codes").stream


STREAM_VERSION = 1
STATIC = 1
"""The context model: a column of a class follows one distribution, which the head holds, for all rows."""
PATHS = 2
"""The same for integers that follow paths (``numerics.coding.trellis``): first the free bits of all rows, a bit each;
then of each integer its place in its subset."""
BLOCK = 2**18  # integers a block, about: what decoding needs memory for
_MOST = 2**24  # integers a block of a file that is read
_MAGIC = b"kflats codes"
_START = "<BBIQI"


def encode(matrix: CodedMatrix) -> Tensor:
    """All integers of ``matrix`` as one stream, (bytes,) uint8. Its floating-point parts are not in it.

    Raises:
        KflatsError: ``constriction`` is not installed.

    >>> from kflats.matrices.coded import from_integers
    >>> matrix = from_integers([torch.zeros(900, 8, dtype=torch.int16)], None, torch.ones(1))
    >>> stream = encode(matrix)
    >>> torch.equal(decode(stream, matrix.geometry)["codes"], matrix.get_buffer("codes"))
    True
    """
    geometry = matrix.geometry
    tensors = {name: value.detach().cpu() for name, value in matrix.tensors().items()}
    head, body = Writer(), bytearray()
    bits, low, tables = tensors["bits"].to(torch.int16), tensors["low"], _tables_of(geometry, tensors)
    # An offset is mostly that of a range with zero in its middle, a context that of the column before.
    moves, offsets = context_moves(tensors["contexts"]), low - _middle_of(bits)
    if geometry.basis == "diagonal":
        # Classes differ by a constant, mostly; columns of one context have the bits of its distribution.
        head.tables(tables)
        for values in (tensors["column_steps"], moves[:1], moves[1:] - moves[:1]):
            head.array(values)
        for values in (bits - _bits_of(tables)[tensors["contexts"].to(torch.int64)], offsets, tensors["centers"]):
            head.array(values)
    else:
        for values in (context_moves(bits), offsets, tensors["centers"], moves):
            head.array(values)
    if geometry.basis == "int8":
        scales = basis_contexts(tensors["basis"])
        head.array(scales.unsqueeze(0))
        for k in range(int(scales.max()) + 1 if len(scales) else 0):
            head.array(tensors["basis"][scales == k])
    if geometry.basis != "diagonal":
        head.tables(tables)

    def put(raw: Tensor, coded: bytes) -> None:
        plain = raw.numpy().tobytes()
        smaller = len(coded) < len(plain)
        head.put("<BII", smaller, len(coded) if smaller else len(plain), crc32([plain]))
        body.extend(coded if smaller else plain)

    for a, b in _label_blocks(geometry, BLOCK):
        labels = tensors["labels"][a:b]
        put(labels, encode_symbols([labels.to(torch.int32).numpy()], [_label_model(geometry)]))
    free = _free_bits_of(geometry, tensors, tables)
    context: _Static | _Paths
    if free is None:
        context = _Static(models_of(tables))
    else:
        for a, b in _bit_blocks(len(free), geometry, BLOCK):
            plain = np.packbits(free[a:b].numpy(), axis=1).tobytes()
            head.put("<I", crc32([plain]))
            body.extend(plain)
        context = _Paths.of(tables, geometry, tensors, free)
    for c, a, b in _row_blocks(geometry, BLOCK):
        packed = geometry.part(tensors["codes"], c)[a:b]
        layout = PackedLayout(tensors["bits"][c], low[c])
        groups = context.groups(layout, tensors["contexts"][c], c, slice(a, b))
        put(packed, encode_symbols(groups.parts(unpack(packed, layout)), groups.models))
    top = bytes(head.data)
    stream = bytearray(
        _MAGIC + struct.pack(_START, STREAM_VERSION, context.number, BLOCK, len(top), crc32([top])) + top
    )
    stream += body
    return torch.frombuffer(stream, dtype=torch.uint8)


def decode(stream: Tensor, geometry: CodedGeometry) -> dict[str, Tensor]:
    """The integer tensors of a CodedMatrix of this geometry, by name.

    Memory: the result, the stream, and about ``BLOCK`` integers; of integers that follow paths two bytes a number
    more.

    Raises:
        KflatsError: ``constriction`` is not installed; a damaged or truncated stream, one of another version or of
            another geometry.
    """
    with _fitting():
        source = StreamReader.of(stream, geometry)
        codes = torch.empty(geometry.shapes["codes"], dtype=torch.uint8)
        for block in source.blocks.values():
            geometry.part(codes, block.label)[block.rows] = source.packed(block)
        return {"codes": codes, **source.tensors}


def decode_rows(stream: Tensor, geometry: CodedGeometry, rows: Tensor) -> Tensor:
    """(m, r) int16, the integers q of ``rows`` (m,) int64, in any order. Blocks without these rows are not decoded.

    Choose it to read some rows of a stream that is larger than memory: of a memory-mapped file, only pages of these
    blocks, of the head and of the rows' classes are read. Of integers that follow paths the free bits of all rows are
    read too.

    Raises:
        KflatsError: as ``decode``; a row that is not there.

    >>> from kflats.matrices.coded import from_integers
    >>> matrix = from_integers([torch.arange(40).view(10, 4).to(torch.int16)], None, torch.ones(1))
    >>> decode_rows(encode(matrix), matrix.geometry, torch.tensor([9, 0])).tolist()
    [[36, 37, 38, 39], [0, 1, 2, 3]]
    """
    n = geometry.shape[0]
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= n):
        raise KflatsError(
            f"rows {int(rows.min())} to {int(rows.max())} are not all in a table of {n} rows",
            hint=f"rows from 0 to {n - 1}",
        )
    with _fitting():
        source = StreamReader.of(stream, geometry)
        labels = source.tensors.get("labels", torch.zeros(n, dtype=torch.uint8))
        wanted = labels[rows].to(torch.int64)
        found = source.tensors["low"][wanted]  # of a class of rows without bits
        places = torch.empty(len(rows), dtype=torch.int64)  # inside their classes
        for label in wanted.unique().tolist():
            mine = wanted == label
            places[mine] = (labels == label).cumsum(0)[rows[mine]] - 1
        blocks = wanted * n + places // source.rows_a_block
        for number in blocks.unique().tolist():
            label, index = divmod(number, n)
            if (block := source.blocks.get((label, index))) is not None:
                here = blocks == number
                packed = source.packed(block)[places[here] - block.rows.start]
                found[here] = unpack(packed, source.layout(label))
        return found


@contextmanager
def _fitting() -> Iterator[None]:
    """Errors of tensors that do not fit as errors of the stream."""
    try:
        yield
    except KflatsError:
        raise
    except (ValueError, IndexError, RuntimeError, OverflowError) as error:
        # The head is as it was written, so that the stream belongs to another matrix.
        raise damaged(f"they do not fit this matrix ({str(error)[:80]})") from error


@dataclass(frozen=True)
class _Block:
    """``rows`` of the class ``label``: ``data`` is entropy coded, or as packed; ``checksum`` is of the packed rows."""

    label: int
    rows: slice
    coded: bool
    data: memoryview
    checksum: int


@dataclass(frozen=True)
class StreamReader:
    """A stream whose head is read, and whose blocks can be decoded one at a time.

    Args:
        tensors: all but the codes. blocks: by class and index in it. rows_a_block: of each class.
    """

    geometry: CodedGeometry
    tensors: dict[str, Tensor]
    context: _Static | _Paths
    rows_a_block: int
    blocks: dict[tuple[int, int], _Block]

    @classmethod
    def of(cls, stream: Tensor, geometry: CodedGeometry) -> StreamReader:
        """Read the head of ``stream`` and find its blocks, which stay as they are.

        Raises:
            KflatsError: as ``decode``.
        """
        body = Reader(stream.detach().cpu().contiguous().numpy().data)
        if bytes(body.take(len(_MAGIC))) != _MAGIC:
            raise damaged("these are no kflats codes")
        version, number, most, size, checksum = body.get(_START)
        if version != STREAM_VERSION or number not in (STATIC, PATHS):
            raise KflatsError(
                f"codes of version {version} with context model {number} are unknown here "
                f"(this kflats reads {STREAM_VERSION} with {STATIC} or {PATHS})",
                hint="pip install -U kflats",
            )
        if not 1 <= most <= _MOST:
            raise damaged(f"blocks of {most} integers")
        top = body.take(size)
        if crc32([top]) != checksum:
            raise damaged("the checksum of their head differs")
        head = Reader(top)
        tensors, tables = _layouts(head, geometry)
        labels = []
        for a, b in _label_blocks(geometry, most):
            coded, size, checksum = head.get("<BII")
            data = body.take(size)
            (part,) = (
                decode_symbols(data, [b - a], [_label_model(geometry)]) if coded else [np.frombuffer(data, np.uint8)]
            )
            labels.append(torch.from_numpy(part.astype(np.uint8)))
            if len(part) != b - a or crc32([labels[-1]]) != checksum:
                raise damaged(f"the checksum of the classes of rows {a} to {b} differs")
        if labels:
            tensors["labels"] = torch.cat(labels)
        context: _Static | _Paths
        if number == PATHS:
            free = _read_free_bits(head, body, geometry, tensors, most)
            context = _Paths.of(tables, geometry, tensors, free)
        else:
            context = _Static(models_of(tables))
        blocks, many = {}, _rows_a_block(geometry, most)
        for c, a, b in _row_blocks(geometry, most):
            coded, size, checksum = head.get("<BII")
            blocks[c, a // many] = _Block(c, slice(a, b), bool(coded), body.take(size), checksum)
        if head.left or body.left:
            raise damaged("they are followed by something else")
        return cls(geometry, tensors, context, many, blocks)

    def layout(self, label: int) -> PackedLayout:
        """Where the columns of a class lie in a row."""
        return PackedLayout(self.tensors["bits"][label], self.tensors["low"][label])

    def packed(self, block: _Block) -> Tensor:
        """(rows, bytes a row) uint8.

        Raises:
            KflatsError: they are not as they were written.
        """
        count, row_bytes = block.rows.stop - block.rows.start, self.geometry.classes[block.label][1]
        if block.coded:
            layout = self.layout(block.label)
            groups = self.context.groups(layout, self.tensors["contexts"][block.label], block.label, block.rows)
            levels = groups.levels(decode_symbols(block.data, groups.counts, groups.models), layout, count)
            rows = pack(levels, layout)
        else:
            rows = torch.frombuffer(bytearray(block.data), dtype=torch.uint8)
        rows = rows.view(count, row_bytes)
        if crc32([rows]) != block.checksum:
            a, b = block.rows.start, block.rows.stop
            raise damaged(f"the checksum of rows {a} to {b} of class {block.label} differs")
        return rows


def _layouts(head: Reader, geometry: CodedGeometry) -> tuple[dict[str, Tensor], Tables]:
    """The integer tensors but codes and labels, and the distributions."""
    count, r = len(geometry.classes), geometry.rank
    tensors: dict[str, Tensor] = {}
    if geometry.basis == "diagonal":
        tables = head.tables()
        tensors["column_steps"] = head.array((r,)).to(torch.int8)
        first, others = head.array((1, r)), head.array((count - 1, r))
        contexts = torch.cat([first, others + first]).cumsum(1)
        bits = head.array((count, r)) + _bits_of(tables)[contexts]
        low, centers = head.array((count, r)) + _middle_of(bits), head.array((count, r))
    else:
        bits = head.array((count, r)).cumsum(1)
        low = head.array((count, r)) + _middle_of(bits)
        centers, contexts = head.array((count, r)), head.array((count, r)).cumsum(1)
    tensors |= {"bits": bits.to(torch.uint8), "low": low.to(torch.int16)}
    tensors |= {"centers": centers.to(torch.int16), "contexts": contexts.to(torch.uint8)}
    if geometry.basis == "int8":
        scales = head.array((1, geometry.axes))[0]
        tensors["basis"] = torch.empty(geometry.shapes["basis"], dtype=torch.int8)
        for k in range(int(scales.max()) + 1 if len(scales) else 0):
            rows = (scales == k).nonzero().squeeze(1)
            tensors["basis"][rows] = head.array((len(rows), geometry.shape[1]), torch.int8)
    if geometry.basis != "diagonal":
        tables = head.tables()
    return tensors, tables


def coded(matrix: CodedMatrix, fit: Factored | None = None) -> Factored:
    """The result of ``Codec.encode``: the code of a ``fit``, or of the rows themselves.

    Raises:
        KflatsError: ``constriction`` is not installed.
    """
    fit = Factored(matrix) if fit is None else fit
    return Factored(matrix, norm=fit.norm, converged=fit.converged, stream=encode(matrix))


def stored_bytes(matrix: CodedMatrix) -> int:
    """Bytes that a file holds of ``matrix``: its integers as a stream, and the floating-point tensors.

    Raises:
        KflatsError: ``constriction`` is not installed.
    """
    return coded(matrix).nbytes


class KeptStreams:
    """Streams that were made before, so that a file of the same matrices needs no coding again. A matrix has the stream
    that was kept of the same integers and the same geometry, whatever it is called now.

    >>> from kflats.matrices.coded import from_integers
    >>> one, other = (from_integers([torch.full((9, 8), k, dtype=torch.int16)], None, torch.ones(1)) for k in (1, 2))
    >>> streams = KeptStreams()
    >>> streams.keep(one, encode(one))
    >>> streams.of(one) is None, streams.of(other) is None
    (False, True)
    """

    def __init__(self) -> None:
        self._streams: dict[str, Tensor] = {}

    def keep(self, matrix: CodedMatrix, stream: Tensor) -> None:
        """Keep what ``encode`` made of ``matrix``."""
        self._streams[self._key(matrix)] = stream

    def of(self, matrix: CodedMatrix) -> Tensor | None:
        """The stream of ``matrix``; None if none was kept."""
        return self._streams.get(self._key(matrix)) if self._streams else None

    @staticmethod
    def _key(matrix: CodedMatrix) -> str:
        return sha256([json.dumps(matrix.spec()), *matrix.integers()])


def stream_checksum(stream: Tensor, integers: int) -> int:
    """CRC-32 of the bytes of a stream and of the checksum of its integers: a stream that has it is whole and belongs to
    them, though none of its blocks is decoded."""
    return crc32([stream, str(integers)])


# Heads and blocks --------------------------------------------------------------------------------


def _label_model(geometry: CodedGeometry) -> ContextModel:
    """The distribution of the rows' classes."""
    return model_of(0, torch.tensor([rows for rows, _ in geometry.classes]))


def _bits_of(tables: Tables) -> Tensor:
    """(K,) the bits of a column that holds all integers of each distribution, zero in the middle."""
    reach = tables.reach.to(torch.int64)
    return torch.bucketize(2 * reach + 1, 2 ** torch.arange(16))


def _middle_of(bits: Tensor) -> Tensor:
    """Where a range of 2^bits integers begins that has zero in its middle."""
    half = torch.div(1 << bits.to(torch.int64), 2, rounding_mode="floor")
    return -half


def _label_blocks(geometry: CodedGeometry, most: int) -> list[tuple[int, int]]:
    """The rows a..b of each block of classes; none where there is one class."""
    n = geometry.shape[0]
    return [(a, min(a + most, n)) for a in range(0, n, most)] if len(geometry.classes) > 1 else []


def _row_blocks(geometry: CodedGeometry, most: int) -> list[tuple[int, int, int]]:
    """(class, and the rows a..b of it) of each block of ``most`` integers, or of one row."""
    many = _rows_a_block(geometry, most)
    return [
        (c, a, min(a + many, rows))
        for c, (rows, row_bytes) in enumerate(geometry.classes)
        for a in range(0, rows if row_bytes else 0, many)
    ]


def _rows_a_block(geometry: CodedGeometry, most: int) -> int:
    return max(1, most // max(1, geometry.rank))


@dataclass(frozen=True)
class _Groups:
    """The integers of a block in the order in which they are coded, those of one model together.

    ``columns`` are those that have bits; ``order`` the places of the integers among these columns, one column after the
    other; ``counts``, how many follow each of the ``models``; ``remainders``, each model's integers modulo ``every``.
    """

    columns: Tensor
    order: npt.NDArray[np.intp] | None
    counts: list[int]
    models: list[ContextModel]
    remainders: list[int]
    every: int

    def parts(self, levels: Tensor) -> list[Integers]:
        """The symbols of integers (rows, r), for each model."""
        flat = levels.T[self.columns].to(torch.int32).numpy().reshape(-1)
        parts = np.split(flat if self.order is None else flat[self.order], np.cumsum(self.counts)[:-1])
        return [(part - less) // self.every for part, less in zip(parts, self.remainders, strict=True)]

    def levels(self, parts: list[Integers], layout: PackedLayout, rows: int) -> Tensor:
        """The integers (rows, r) int16 of these symbols, which may be overwritten."""
        if self.every > 1:
            for part, more in zip(parts, self.remainders, strict=True):
                part *= self.every
                part += more
        symbols = np.concatenate(parts, dtype=np.int16, casting="unsafe")  # FARTHEST at most
        if self.order is not None:
            placed = np.empty_like(symbols)
            placed[self.order] = symbols
            symbols = placed
        coded = torch.from_numpy(symbols).view(len(self.columns), rows)
        if self.order is not None and len(coded) == len(layout.low):
            return coded.T  # columns stand in order, and all have bits
        levels = layout.low.unsqueeze(1).repeat(1, rows)
        levels[self.columns] = coded
        return levels.T


@dataclass(frozen=True)
class _Static:
    """``models`` of all distributions."""

    models: list[ContextModel]
    number = STATIC

    def groups(self, layout: PackedLayout, contexts: Tensor, label: int, rows: slice) -> _Groups:
        """Columns of one context together."""
        columns = layout.bits.nonzero().squeeze(1)
        columns = columns[torch.argsort(contexts[columns], stable=True)]
        used, counts = torch.unique_consecutive(contexts[columns], return_counts=True)
        numbers = (counts * (rows.stop - rows.start)).tolist()
        return _Groups(columns, None, numbers, [self.models[k] for k in used.tolist()], [0] * len(numbers), 1)


@dataclass(frozen=True)
class _Paths:
    """``models`` of the places in each subset of each distribution; ``subsets`` (n, d); ``rows`` of each class."""

    models: list[ContextModel]
    subsets: npt.NDArray[np.uint8]
    rows: list[npt.NDArray[np.intp]]
    number = PATHS

    @classmethod
    def of(cls, tables: Tables, geometry: CodedGeometry, tensors: dict[str, Tensor], free: Tensor) -> _Paths:
        models = []
        for k, reach in enumerate(tables.reach.tolist()):
            frequencies = tables.frequencies(k)
            for remainder in range(4):
                first = (remainder + reach) % 4
                part = frequencies[first::4]
                models.append(model_of((first - reach - remainder) // 4, part) if len(part) else ContextModel(0, None))
        subsets, labels = subsets_of(free), tensors.get("labels")
        if subsets.shape != geometry.shape:
            rows, columns = _on_paths(geometry, tensors)
            subsets = zero_matrix(*geometry.shape, torch.uint8).index_put_((rows.unsqueeze(1), columns), subsets)
        return cls(models, subsets.numpy(), [rows.numpy() for rows in _rows_by_class(geometry, labels)])

    def groups(self, layout: PackedLayout, contexts: Tensor, label: int, rows: slice) -> _Groups:
        """Integers of one context and subset together."""
        columns = layout.bits.nonzero().squeeze(1)
        remainders = self.subsets[self.rows[label][rows]].T[columns.numpy()]
        # Numbers of one byte are sorted in one pass, and a whole encoder is loaded in a twentieth less time.
        number = np.uint8 if len(self.models) <= 2**8 else np.uint16
        kinds = (4 * contexts[columns].numpy().astype(number)[:, None] + remainders).reshape(-1)
        order = np.argsort(kinds, kind="stable")
        counts = np.bincount(kinds, minlength=len(self.models))
        used = counts.nonzero()[0]
        of_each = (used % 4).tolist()
        return _Groups(columns, order, counts[used].tolist(), [self.models[k] for k in used.tolist()], of_each, 4)


def _rows_by_class(geometry: CodedGeometry, labels: Tensor | None) -> list[Tensor]:
    if labels is None:
        return [torch.arange(geometry.shape[0])]
    return [(labels == label).nonzero().squeeze(1) for label in range(len(geometry.classes))]


def _on_paths(geometry: CodedGeometry, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The rows and columns that paths run through, ascending: those that have bits."""
    live = tensors["bits"] > 0
    labels = tensors.get("labels", torch.zeros(geometry.shape[0], dtype=torch.uint8))
    return live.any(1)[labels.to(torch.int64)].nonzero().squeeze(1), live.any(0).nonzero().squeeze(1)


def _bit_blocks(rows: int, geometry: CodedGeometry, most: int) -> list[tuple[int, int]]:
    """The rows a..b of each block of free bits, which so many rows have."""
    many = _rows_a_block(geometry, most)
    return [(a, min(a + many, rows)) for a in range(0, rows, many)]


def _read_free_bits(
    head: Reader, body: Reader, geometry: CodedGeometry, tensors: dict[str, Tensor], most: int
) -> Tensor:
    """Of the rows and columns on paths, uint8."""
    if geometry.basis != "diagonal":
        raise damaged("paths through a matrix of axes")
    n, d = map(len, _on_paths(geometry, tensors))
    free = zero_matrix(n, d, torch.uint8)
    for a, b in _bit_blocks(n, geometry, most):
        (checksum,) = head.get("<I")
        plain = body.take((b - a) * -(-d // 8))
        if crc32([plain]) != checksum:
            raise damaged(f"the checksum of the free bits of rows {a} to {b} differs")
        bits = np.unpackbits(np.frombuffer(plain, np.uint8).reshape(b - a, -1), axis=1, count=d)
        free[a:b] = torch.from_numpy(bits)
    return free


def _free_bits_of(geometry: CodedGeometry, tensors: dict[str, Tensor], tables: Tables) -> Tensor | None:
    """The free bits of integers that follow paths, of the rows and columns on them, where that takes fewer bytes."""
    if geometry.basis != "diagonal":
        return None
    n, d = geometry.shape
    levels, contexts = zero_matrix(n, d, torch.int16), zero_matrix(n, d, torch.uint8)
    for c, rows in enumerate(_rows_by_class(geometry, tensors.get("labels"))):
        layout = PackedLayout(tensors["bits"][c], tensors["low"][c])
        for part in stripes(rows.unsqueeze(1).expand(-1, d)):
            levels[rows[part]] = unpack(geometry.part(tensors["codes"], c)[part], layout)
            contexts[rows[part]] = tensors["contexts"][c]
    on_paths = _on_paths(geometry, tensors)
    if (n, d) != (size := tuple(map(len, on_paths))):
        if 0 in size:
            return None
        levels, contexts = (permuted(of, *on_paths, of.dtype) for of in (levels, contexts))
    free = free_bits(levels)
    return free if free is not None and pays(levels, contexts, tables) else None


def _tables_of(geometry: CodedGeometry, tensors: dict[str, Tensor]) -> Tables:
    """The distribution of the integers of each context."""
    counts = torch.zeros(geometry.contexts, len(KNOTS), dtype=torch.float64)
    reach, knots = torch.zeros(geometry.contexts, dtype=torch.int64), nearest_knot()
    for c, a, b in _row_blocks(geometry, BLOCK):
        layout = PackedLayout(tensors["bits"][c], tensors["low"][c])
        columns = layout.bits.nonzero().squeeze(1)
        levels = unpack(geometry.part(tensors["codes"], c)[a:b], layout).T[columns].to(torch.int64).abs()
        if int(levels.max()) > FARTHEST:
            raise KflatsError(f"integers of more than {FARTHEST} cannot be entropy coded", hint="larger steps")
        of = tensors["contexts"][c][columns].to(torch.int64)
        places = (of.unsqueeze(1) * len(KNOTS) + knots[levels]).flatten()
        counts += torch.bincount(places, minlength=counts.numel()).view_as(counts)
        reach.scatter_reduce_(0, of, levels.amax(1), "amax")
    return tables_of(counts, reach)


# Models -----------------------------------------------------------------------------------------


def expect_(matrix: CodedMatrix, size: int) -> None:
    """Make room in ``matrix`` for a stream of ``size`` bytes in place of its integers; ``codes`` will be the stream."""
    device = matrix.get_buffer("codes").device
    for name in matrix.geometry.shapes:
        if name in matrix._buffers:
            matrix._buffers[name] = None
    matrix._buffers["codes"] = torch.empty(size, dtype=torch.uint8, device=device)
    matrix.ready, matrix.streamed = False, True


def expand_(matrix: CodedMatrix) -> None:
    """Turn the stream in ``matrix``, filled after ``expect_``, into fixed-rate codes.

    Raises:
        KflatsError: as ``decode``; a damaged matrix.
    """
    stream = matrix.get_buffer("codes")
    for name, value in decode(stream, matrix.geometry).items():
        matrix._buffers[name] = value.to(stream.device)
    matrix.streamed = False
    matrix.refresh()
