"""Codes as files hold them: the integers of a CodedMatrix, entropy coded in blocks of rows, each with a checksum.

    magic, checksum of the head, head: labels, layouts, centers, contexts, basis, distributions, list of blocks
    block after block: the integers of some rows of one class

A model in memory holds fixed-rate codes, of which it can read any row. A stream is smaller, because the integers of a
column are not equally frequent. It is decoded block by block straight into the fixed-rate form. A checksum is over the
integers that a block decodes to: it covers the coder, too.

Integers as bytes: entropy coding by the ``constriction`` library, and the parts of a stream's head.

The coder is asymmetric numeral systems (Duda, arXiv:1311.2540). Its models are whole numbers, which all machines read
alike (``numerics.coding.tables``). A checksum of the coded integers shows damage, and a coder that differs.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kflats.common.errors import KflatsError
from kflats.common.hashing import crc32
from kflats.common.release import needed
from kflats.matrices.coded import CodedGeometry, CodedMatrix
from kflats.methods.protocol import Factored
from kflats.numerics.coding.encode import context_moves
from kflats.numerics.coding.frame import basis_contexts
from kflats.numerics.coding.packing import Layout, pack, unpack
from kflats.numerics.coding.tables import FARTHEST, KNOTS, Tables, knots_up_to, nearest_knot, table_for, tables_of

AGAIN = "restore the file or compress again"
Integers = npt.NDArray[np.int32]


def damaged(symptom: str) -> KflatsError:
    """The error for a stream that is not as it was written."""
    return KflatsError(f"the codes are damaged: {symptom}", cause="a damaged or truncated file", hint=AGAIN)


@dataclass(frozen=True)
class Model:
    """A distribution of integers from ``first`` on; ``coder`` is the library's, None for a single integer."""

    first: int
    coder: Any


def model_of(first: int, frequencies: Tensor) -> Model:
    """The model of these whole-number frequencies; 0 counts as the least frequency that can be coded."""
    if len(frequencies) < 2:
        return Model(first, None)
    # Sums of whole numbers below 2^53 are exact in any order.
    return Model(first, _library().model.Categorical(frequencies.to(torch.float64).numpy(), perfect=False))


def models_of(tables: Tables) -> list[Model]:
    """The models of all tables."""
    return [model_of(-reach, tables.frequencies(k)) for k, reach in enumerate(tables.reach.tolist())]


def encode_symbols(parts: Sequence[Integers], models: Sequence[Model]) -> bytes:
    """Integers, part after part, each by its own model.

    Raises:
        KflatsError: ``constriction`` is not installed.
    """
    coder = _library().stack.AnsCoder()
    for part, model in zip(reversed(parts), reversed(models), strict=True):  # the coder is a stack
        if model.coder is not None:
            coder.encode_reverse(np.ascontiguousarray(part.reshape(-1) - model.first, dtype=np.int32), model.coder)
    data: bytes = coder.get_compressed().astype("<u4").tobytes()
    return data


def decode_symbols(data: memoryview, counts: Sequence[int], models: Sequence[Model]) -> list[Integers]:
    """The integers that ``encode_symbols`` wrote; damaged ``data`` gives other integers, or an error.

    Raises:
        KflatsError: ``constriction`` is not installed, or no coder wrote ``data``.
    """
    if len(data) % 4:
        raise damaged("they end inside a word")
    try:
        coder = _library().stack.AnsCoder(np.frombuffer(data, dtype="<u4").astype(np.uint32))
        return [
            np.full(count, model.first, dtype=np.int32)
            if model.coder is None or not count
            else coder.decode(model.coder, count) + np.int32(model.first)
            for count, model in zip(counts, models, strict=True)
        ]
    except (ValueError, AssertionError) as error:
        raise damaged(str(error)[:80]) from error


class Writer:
    """The head of a stream, part after part."""

    def __init__(self) -> None:
        self.data = bytearray()

    def put(self, form: str, *values: int) -> None:
        """Whole numbers, in ``struct``'s form."""
        self.data += struct.pack(form, *values)

    def symbols(self, parts: Sequence[Integers], models: Sequence[Model]) -> None:
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
        self.symbols([values.to(torch.int32).numpy()], models_of(table))


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

    def symbols(self, counts: Sequence[int], models: Sequence[Model]) -> list[Integers]:
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

    def array(self, shape: Sequence[int]) -> Tensor:
        """Integers of this shape, int32."""
        models, count = models_of(self.tables()), int(np.prod(shape, dtype=np.int64))
        (integers,) = self.symbols([count], models)
        return torch.from_numpy(integers).view(*shape)


def _checksum(parts: Sequence[Integers]) -> int:
    return crc32(np.ascontiguousarray(part, dtype="<i4").reshape(-1).data for part in parts)


def _library() -> Any:
    return needed("constriction", "kflats[codes]", "a file of entropy codes").stream


STREAM_VERSION = 1
BLOCK = 2**18  # integers a block, about: what decoding needs memory for
_MAGIC = b"kflats codes"


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
    if "labels" in tensors:
        head.symbols([tensors["labels"].to(torch.int32).numpy()], [_label_model(geometry)])
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
    models = models_of(tables)
    for c, a, b in _blocks_of(geometry):
        packed = geometry.part(tensors["codes"], c)[a:b]
        layout = Layout(tensors["bits"][c], low[c])
        order, groups = _groups_of(layout, tensors["contexts"][c])
        levels = unpack(packed, layout).T[order].to(torch.int32).numpy()
        parts = np.split(levels, np.cumsum([count for _, count in groups])[:-1])
        raw, part = packed.numpy().tobytes(), encode_symbols(parts, [models[k] for k, _ in groups])
        coded = len(part) < len(raw)
        head.put("<BII", coded, len(part) if coded else len(raw), crc32([raw]))
        body += part if coded else raw
    top = bytes(head.data)
    start = _MAGIC + struct.pack("<BII", STREAM_VERSION, len(top), crc32([top]))
    return torch.frombuffer(bytearray(start + top + bytes(body)), dtype=torch.uint8)


def decode(stream: Tensor, geometry: CodedGeometry) -> dict[str, Tensor]:
    """The integer tensors of a CodedMatrix of this geometry, by name.

    Memory: the result, the stream, and about ``BLOCK`` integers.

    Raises:
        KflatsError: ``constriction`` is not installed; a damaged or truncated stream, one of another version or of
            another geometry.
    """
    body = Reader(memoryview(stream.detach().cpu().numpy().tobytes()))
    if bytes(body.take(len(_MAGIC))) != _MAGIC:
        raise damaged("these are no kflats codes")
    version, size, checksum = body.get("<BII")
    if version != STREAM_VERSION:
        raise KflatsError(
            f"codes of version {version} are unknown here (this kflats reads {STREAM_VERSION})",
            hint="pip install -U kflats",
        )
    top = body.take(size)
    if crc32([top]) != checksum:
        raise damaged("the checksum of their head differs")
    try:
        return _decoded(Reader(top), body, geometry)
    except KflatsError:
        raise
    except (ValueError, IndexError, RuntimeError, OverflowError) as error:
        # The head is as it was written, so that the stream belongs to another matrix.
        raise damaged(f"they do not fit this matrix ({str(error)[:80]})") from error


def _decoded(head: Reader, body: Reader, geometry: CodedGeometry) -> dict[str, Tensor]:
    n, count, r = geometry.shape[0], len(geometry.classes), geometry.rank
    tensors = {"codes": torch.empty(geometry.shapes["codes"], dtype=torch.uint8)}
    if count > 1:
        (labels,) = head.symbols([n], [_label_model(geometry)])
        tensors["labels"] = torch.from_numpy(labels.astype(np.uint8))
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
            tensors["basis"][rows] = head.array((len(rows), geometry.shape[1])).to(torch.int8)
    if geometry.basis != "diagonal":
        tables = head.tables()
    models = models_of(tables)
    for c, a, b in _blocks_of(geometry):
        coded, size, checksum = head.get("<BII")
        goal, part = geometry.part(tensors["codes"], c)[a:b], body.take(size)
        if coded:
            layout = Layout(tensors["bits"][c], tensors["low"][c])
            order, groups = _groups_of(layout, tensors["contexts"][c])
            chosen = [models[k] for k, _ in groups]
            parts = decode_symbols(part, [columns * (b - a) for _, columns in groups], chosen)
            levels = layout.low.to(torch.int32).unsqueeze(1).repeat(1, b - a)
            levels[order] = torch.from_numpy(np.concatenate(parts)).view(len(order), b - a)
            goal.copy_(pack(levels.T, layout))
        else:
            goal.copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8).view(goal.shape))
        if crc32([goal]) != checksum:
            raise damaged(f"the checksum of rows {a} to {b} of class {c} differs")
    if head.left or body.left:
        raise damaged("they are followed by something else")
    return tensors


def coded(matrix: CodedMatrix, fit: Factored | None = None) -> Factored:
    """The result of ``Codec.encode``: the code of a ``fit``, or of the rows themselves.

    Raises:
        KflatsError: ``constriction`` is not installed.
    """
    fit = Factored(matrix) if fit is None else fit
    return Factored(matrix, norm=fit.norm, converged=fit.converged, stored_bytes=stored_bytes(matrix))


def stored_bytes(matrix: CodedMatrix) -> int:
    """Bytes that a file holds of ``matrix``: its integers as a stream, and the floating-point tensors.

    Raises:
        KflatsError: ``constriction`` is not installed.
    """
    floats = sum(t.numel() * t.element_size() for t in matrix.tensors().values() if t.is_floating_point())
    return len(encode(matrix)) + floats


# Heads and blocks --------------------------------------------------------------------------------


def _label_model(geometry: CodedGeometry) -> Model:
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


def _blocks_of(geometry: CodedGeometry) -> list[tuple[int, int, int]]:
    """(class, and the rows a..b of it) of each block."""
    most = max(1, BLOCK // max(1, geometry.rank))
    return [
        (c, a, min(a + most, rows))
        for c, (rows, row_bytes) in enumerate(geometry.classes)
        for a in range(0, rows if row_bytes else 0, most)
    ]


def _groups_of(layout: Layout, contexts: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """Columns that have bits, those of one context together, and (context, how many) in that order."""
    columns = layout.bits.nonzero().squeeze(1)
    order = columns[torch.argsort(contexts[columns], stable=True)]
    used, counts = torch.unique_consecutive(contexts[order], return_counts=True)
    return order, list(zip(used.tolist(), counts.tolist(), strict=True))


def _tables_of(geometry: CodedGeometry, tensors: dict[str, Tensor]) -> Tables:
    """The distribution of the integers of each context."""
    counts = torch.zeros(geometry.contexts, len(KNOTS), dtype=torch.float64)
    reach, knots = torch.zeros(geometry.contexts, dtype=torch.int64), nearest_knot()
    for c, a, b in _blocks_of(geometry):
        layout = Layout(tensors["bits"][c], tensors["low"][c])
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
