"""Codes as files hold them: the integers of a CodedMatrix, entropy coded in blocks of rows, each with a checksum.

    magic, checksum of the head, head: labels, layouts, centers, contexts, int8 basis, distributions, list of blocks
    block after block: the integers of some rows of one class

A model in memory holds fixed-rate codes, of which it can read any row; a stream is smaller by what the integers'
distributions leave to save, and is decoded block by block straight into the fixed-rate form. A checksum is over what
a block decodes to: it covers the coder, too.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import torch
from torch import Tensor

from kflats.codecs.entropy import (
    AGAIN,
    DAMAGED,
    Model,
    Reader,
    Writer,
    decode_symbols,
    encode_symbols,
    model_of,
    models_of,
)
from kflats.errors import KflatsError
from kflats.nn.coded import CodedMatrix
from kflats.nn.coded_geometry import CodedGeometry
from kflats.numerics.coding.packing import Layout, pack, unpack
from kflats.numerics.coding.tables import FARTHEST, KNOTS, Tables, nearest_knot, tables_of
from kflats.numerics.coding.transform import context_moves

STREAM_VERSION = 1
BLOCK = 2**18  # integers a block, about: what decoding needs memory for
_MAGIC = b"kflats codes" + bytes([STREAM_VERSION])


def encode(matrix: CodedMatrix) -> Tensor:
    """All integers of ``matrix`` as one stream, (bytes,) uint8. Its floating-point parts are not in it.

    Raises:
        KflatsError: ``constriction`` is not installed.

    >>> from kflats.nn.coded_build import from_integers
    >>> matrix = from_integers([torch.zeros(900, 8, dtype=torch.int16)], None, torch.ones(1))
    >>> stream = encode(matrix)
    >>> torch.equal(decode(stream, matrix.geometry)["codes"], matrix.get_buffer("codes"))
    True
    """
    matrix = _on_cpu(matrix)
    geometry, found = matrix.geometry, matrix.tensors()
    head = Writer()
    if "labels" in found:
        head.symbols([found["labels"].to(torch.int32).numpy()], [_label_model(geometry)])
    bits, low = found["bits"].to(torch.int16), found["low"].to(torch.int16)
    # An offset is mostly that of a range with zero in its middle, a context that of the column before.
    for values in (context_moves(bits), low - _middle(bits), found["centers"], context_moves(found["contexts"])):
        head.array(values)
    if geometry.basis == "int8":
        scales = _scale_contexts(found["basis"])
        head.array(scales.unsqueeze(0))
        _put_basis(head, found["basis"], scales)
    tables = None if geometry.levels else _tables_of(matrix)
    if tables is not None:
        head.tables(tables)
    body = bytearray()
    models = [] if tables is None else models_of(tables)
    for c, a, b in _blocks(geometry):
        packed = _block_of(found["codes"], geometry, c, a, b)
        raw = packed.numpy().tobytes()
        layout = Layout(found["bits"][c], low[c])
        part = b"" if tables is None else _encode_block(packed, layout, found["contexts"][c], models)
        coded = tables is not None and len(part) < len(raw)
        head.put("<BII", coded, len(part) if coded else len(raw), zlib.crc32(raw))
        body += part if coded else raw
    top = bytes(head.data)
    start = _MAGIC + struct.pack("<II", len(top), zlib.crc32(top))
    return torch.frombuffer(bytearray(start + top + bytes(body)), dtype=torch.uint8)


def decode(stream: Tensor, geometry: CodedGeometry) -> dict[str, Tensor]:
    """The integer tensors of a CodedMatrix of this geometry, by name.

    Memory: the result, the stream, and about ``BLOCK`` integers.

    Raises:
        KflatsError: ``constriction`` is not installed; a damaged or truncated stream, one of another version or of
            another geometry.
    """
    data = memoryview(stream.detach().cpu().numpy().tobytes())
    reader = Reader(data)
    if bytes(reader.take(len(_MAGIC) - 1)) != _MAGIC[:-1]:
        raise KflatsError("these are no kflats codes", cause=DAMAGED, hint=AGAIN)
    (version,) = reader.get("<B")
    if version != STREAM_VERSION:
        raise KflatsError(
            f"codes of version {version} are unknown here (this kflats reads {STREAM_VERSION})",
            cause="a file of a newer kflats, or a damaged one",
            hint="pip install -U kflats",
        )
    size, checksum = reader.get("<II")
    top = reader.take(size)
    if zlib.crc32(top) != checksum:
        raise KflatsError("the head of the codes is damaged: its checksum differs", cause=DAMAGED, hint=AGAIN)
    try:
        return _decode(Reader(top), reader, geometry)
    except KflatsError:
        raise
    except (ValueError, IndexError, RuntimeError, OverflowError) as error:
        # The head is whole, so this stream was written for something else.
        raise KflatsError(f"the codes do not fit this matrix: {str(error)[:80]}", cause=DAMAGED, hint=AGAIN) from error


def _decode(head: Reader, body: Reader, geometry: CodedGeometry) -> dict[str, Tensor]:
    n, count, r = geometry.shape[0], len(geometry.classes), geometry.rank
    found: dict[str, Tensor] = {}
    if count > 1:
        (labels,) = head.symbols([n], [_label_model(geometry)])
        found["labels"] = torch.from_numpy(labels.astype(np.uint8))
    bits = head.array((count, r)).cumsum(1)
    low = head.array((count, r)) + _middle(bits)
    centers, contexts = head.array((count, r)), head.array((count, r)).cumsum(1)
    for name, values, limit in (("bits", bits, 15), ("contexts", contexts, geometry.contexts - 1)):
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) <= limit:
            raise KflatsError(f"impossible {name} of columns", cause=DAMAGED, hint=AGAIN)
    found |= {"bits": bits.to(torch.uint8), "low": low.to(torch.int16)}
    found |= {"centers": centers.to(torch.int16), "contexts": contexts.to(torch.uint8)}
    layouts = [Layout(found["bits"][c], found["low"][c]) for c in range(count)]
    if [layout.row_bytes for layout in layouts] != [row_bytes for _, row_bytes in geometry.classes]:
        raise KflatsError("the codes are those of another matrix", cause=DAMAGED, hint=AGAIN)
    if geometry.basis == "int8":
        scales = head.array((1, geometry.axes))[0]
        found["basis"] = _get_basis(head, geometry.shape[1], scales)
    models = [] if geometry.levels else models_of(head.tables())
    found["codes"] = torch.empty(geometry.shapes["codes"], dtype=torch.uint8)
    for number, (c, a, b) in enumerate(_blocks(geometry)):
        coded, size, checksum = head.get("<BII")
        goal = _block_of(found["codes"], geometry, c, a, b)
        part = body.take(size)
        if coded:
            goal.copy_(_decode_block(part, b - a, layouts[c], found["contexts"][c], models))
        elif size == goal.numel():
            goal.copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8).view(goal.shape) if size else goal)
        if zlib.crc32(goal.numpy().tobytes()) != checksum:
            raise KflatsError(
                f"block {number} of the codes (class {c}) is damaged: its checksum differs", cause=DAMAGED, hint=AGAIN
            )
    if head.left or body.left:
        raise KflatsError("the codes are followed by something else", cause=DAMAGED, hint=AGAIN)
    return found


def stored_bytes(matrix: CodedMatrix) -> int:
    """Bytes that a file holds of ``matrix``: its integers as a stream, and the floating-point tensors.

    Raises:
        KflatsError: ``constriction`` is not installed.
    """
    floats = sum(t.numel() * t.element_size() for t in matrix.tensors().values() if t.is_floating_point())
    return len(encode(matrix)) + floats


# Blocks -----------------------------------------------------------------------------------------


def _blocks(geometry: CodedGeometry) -> list[tuple[int, int, int]]:
    """(class, and the rows a..b of it)."""
    most = max(1, BLOCK // max(1, geometry.rank))
    return [
        (c, a, min(a + most, rows))
        for c, (rows, row_bytes) in enumerate(geometry.classes)
        for a in range(0, rows if row_bytes else 0, most)
    ]


def _block_of(codes: Tensor, geometry: CodedGeometry, c: int, a: int, b: int) -> Tensor:
    first = sum(rows * row_bytes for rows, row_bytes in geometry.classes[:c])
    row_bytes = geometry.classes[c][1]
    return codes[first + a * row_bytes : first + b * row_bytes].view(b - a, row_bytes)


def _groups(layout: Layout, contexts: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """Columns that have bits, those of one context together, and (context, how many) in that order."""
    columns = layout.bits.nonzero().squeeze(1)
    order = columns[torch.argsort(contexts[columns], stable=True)]
    used, counts = torch.unique_consecutive(contexts[order], return_counts=True)
    return order, list(zip(used.tolist(), counts.tolist(), strict=True))


def _encode_block(packed: Tensor, layout: Layout, contexts: Tensor, models: list[Model]) -> bytes:
    order, groups = _groups(layout, contexts)
    levels = unpack(packed, layout).T[order].to(torch.int32).numpy()
    sizes = [count for _, count in groups]
    parts = np.split(levels, np.cumsum(sizes)[:-1])
    return encode_symbols(parts, [models[k] for k, _ in groups])


def _decode_block(data: memoryview, rows: int, layout: Layout, contexts: Tensor, models: list[Model]) -> Tensor:
    order, groups = _groups(layout, contexts)
    chosen = [models[k] for k, _ in groups]
    parts = decode_symbols(data, [count * rows for _, count in groups], chosen)
    levels = layout.low.to(torch.int32).unsqueeze(1).repeat(1, rows)
    levels[order] = torch.from_numpy(np.concatenate(parts)).view(len(order), rows)
    try:
        return pack(levels.T, layout)
    except KflatsError as error:
        raise KflatsError(f"the codes are damaged: {error.symptom}", cause=DAMAGED, hint=AGAIN) from error


def _label_model(geometry: CodedGeometry) -> Model:
    return model_of(0, torch.tensor([rows for rows, _ in geometry.classes]))


def _put_basis(head: Writer, levels: Tensor, scales: Tensor) -> None:
    """Rows of about one size share a distribution."""
    groups = [levels[scales == k] for k in range(int(scales.max()) + 1 if len(scales) else 0)]
    for group in groups:
        head.array(group)


def _get_basis(head: Reader, d: int, scales: Tensor) -> Tensor:
    found = torch.empty(len(scales), d, dtype=torch.int8)
    for k in range(int(scales.max()) + 1 if len(scales) else 0):
        rows = (scales == k).nonzero().squeeze(1)
        found[rows] = head.array((len(rows), d)).to(torch.int8)
    return found


def _tables_of(matrix: CodedMatrix) -> Tables:
    """The distribution of the integers of each context."""
    geometry, found = matrix.geometry, matrix.tensors()
    counts = torch.zeros(geometry.contexts, len(KNOTS), dtype=torch.float64)
    reach, knots = torch.zeros(geometry.contexts, dtype=torch.int64), nearest_knot().to(torch.int64)
    for c, a, b in _blocks(geometry):
        layout = Layout(found["bits"][c], found["low"][c])
        order, groups = _groups(layout, found["contexts"][c])
        levels = unpack(_block_of(found["codes"], geometry, c, a, b), layout).T[order].to(torch.int64).abs()
        if int(levels.max()) > FARTHEST:
            raise KflatsError(f"integers of more than {FARTHEST} cannot be entropy coded", hint="larger steps")
        for (k, _), part in zip(groups, torch.split(levels, [count for _, count in groups]), strict=True):
            counts[k] += torch.bincount(knots[part.reshape(-1)], minlength=len(KNOTS))
            reach[k] = max(int(reach[k]), int(part.max()))
    return tables_of(counts, reach)


def _middle(bits: Tensor) -> Tensor:
    """Where a range of 2^bits integers begins that has zero in its middle."""
    half = torch.div(1 << bits.to(torch.int64), 2, rounding_mode="floor")
    return -half


def _scale_contexts(levels: Tensor) -> Tensor:
    """(r,) int64, which rows of a basis share a distribution: those of about one mean magnitude."""
    means = levels.to(torch.float64).abs().mean(1)
    sizes = (means.clamp_min(1e-9).log2() * 2).floor()
    return torch.searchsorted(sizes.unique(), sizes)


def _on_cpu(matrix: CodedMatrix) -> CodedMatrix:
    found = {name: value.detach().cpu() for name, value in matrix.tensors().items()}
    return CodedMatrix(matrix.geometry, found)


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
