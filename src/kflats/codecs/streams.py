"""Codes as files hold them: the integers of a CodedMatrix, entropy coded in blocks of rows, each with a checksum.

    magic, checksum of the head, head: labels, layouts, centers, contexts, int8 basis, distributions, list of blocks
    block after block: the integers of some rows of one class

A model in memory holds fixed-rate codes, of which it can read any row; a stream is smaller by what the integers'
distributions leave to save, and is decoded block by block straight into the fixed-rate form. A checksum is over what
a block decodes to: it covers the coder, too.
"""

from __future__ import annotations

import struct
from dataclasses import replace

import torch
from torch import Tensor

from kflats.codecs.blocks import block_in, blocks_of, encode_block, groups_of
from kflats.codecs.entropy import Writer, models_of
from kflats.codecs.stream_reader import MAGIC, fitting, label_model, middle_of, open_stream
from kflats.common.errors import KflatsError
from kflats.common.hashing import crc32
from kflats.matrices.coded import CodedMatrix
from kflats.matrices.coded_geometry import CodedGeometry
from kflats.numerics.coding.packing import Layout, unpack
from kflats.numerics.coding.tables import FARTHEST, KNOTS, Tables, nearest_knot, tables_of
from kflats.numerics.coding.transform import context_moves


def encode(matrix: CodedMatrix) -> Tensor:
    """All integers of ``matrix`` as one stream, (bytes,) uint8. Its floating-point parts are not in it.

    Raises:
        KflatsError: ``constriction`` is not installed.

    >>> from kflats.matrices.coded_build import from_integers
    >>> matrix = from_integers([torch.zeros(900, 8, dtype=torch.int16)], None, torch.ones(1))
    >>> stream = encode(matrix)
    >>> torch.equal(decode(stream, matrix.geometry)["codes"], matrix.get_buffer("codes"))
    True
    """
    matrix = _on_cpu(matrix)
    geometry, found = matrix.geometry, matrix.tensors()
    head = Writer()
    if "labels" in found:
        head.symbols([found["labels"].to(torch.int32).numpy()], [label_model(geometry)])
    bits, low = found["bits"].to(torch.int16), found["low"].to(torch.int16)
    # An offset is mostly that of a range with zero in its middle, a context that of the column before.
    for values in (context_moves(bits), low - middle_of(bits), found["centers"], context_moves(found["contexts"])):
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
    for c, a, b in blocks_of(geometry):
        packed = block_in(found["codes"], geometry, c, a, b)
        raw = packed.numpy().tobytes()
        layout = Layout(found["bits"][c], low[c])
        part = b"" if tables is None else encode_block(packed, layout, found["contexts"][c], models)
        coded = tables is not None and len(part) < len(raw)
        head.put("<BII", coded, len(part) if coded else len(raw), crc32([raw]))
        body += part if coded else raw
    top = bytes(head.data)
    start = MAGIC + struct.pack("<II", len(top), crc32([top]))
    return torch.frombuffer(bytearray(start + top + bytes(body)), dtype=torch.uint8)


def decode(stream: Tensor, geometry: CodedGeometry) -> dict[str, Tensor]:
    """The integer tensors of a CodedMatrix of this geometry, by name.

    Memory: the result, the stream, and about ``BLOCK`` integers.

    Raises:
        KflatsError: ``constriction`` is not installed; a damaged or truncated stream, one of another version or of
            another geometry.
    """
    with fitting():
        opened = open_stream(stream, geometry)
        opened.found["codes"] = torch.empty(geometry.shapes["codes"], dtype=torch.uint8)
        for place, read in opened.blocks():
            block_in(opened.found["codes"], geometry, *place).copy_(read())
        return opened.found


def decode_rows(stream: Tensor, geometry: CodedGeometry, index: Tensor) -> tuple[CodedGeometry, dict[str, Tensor]]:
    """The rows at ``index`` alone, as the geometry and the integer tensors of a CodedMatrix that has just these.

    Only blocks that hold one of them are decoded. Floating-point tensors are the whole matrix', but for scales of rows:
    ``weight.view(n, -1)[index].view(-1)``.

    Args:
        index: (m,) whole numbers of 0..n-1, m > 0, in any order; some may be there twice.

    Raises:
        KflatsError: as ``decode``; damage in blocks that are not read is not seen. IndexError: rows that are none.

    >>> from kflats.matrices.coded_build import from_integers
    >>> matrix = from_integers([torch.arange(900).view(900, 1).to(torch.int16)], None, torch.ones(1))
    >>> part, found = decode_rows(encode(matrix), matrix.geometry, torch.tensor([7, 3]))
    >>> CodedMatrix(part, found | {"weight": torch.ones(1), "shrink": torch.zeros(1)}).dense().tolist()
    [[7.0], [3.0]]
    """
    n, index = geometry.shape[0], index.detach().cpu().to(torch.int64)
    if index.ndim != 1 or not len(index) or not 0 <= int(index.min()) <= int(index.max()) < n:
        raise IndexError(f"rows {index.tolist()[:8]} of {n}")
    with fitting():
        opened = open_stream(stream, geometry)
        labels = opened.found.get("labels", torch.zeros(n, dtype=torch.uint8)).to(torch.int64)
        chosen, starts = labels[index], torch.tensor([0, *(rows for rows, _ in geometry.classes)]).cumsum(0)
        within = torch.argsort(torch.argsort(labels, stable=True))[index] - starts[chosen]
        # Inside a class rows stand by row number, here by their place in the index.
        members = [(chosen == c).nonzero().squeeze(1) for c in range(len(geometry.classes))]
        sizes = [size for _, size in geometry.classes]
        packed = [torch.empty(len(m), size, dtype=torch.uint8) for m, size in zip(members, sizes, strict=True)]
        for (c, a, b), read in opened.blocks():
            at = within[members[c]]
            here = (at >= a) & (at < b)
            if bool(here.any()):
                packed[c][here] = read()[at[here] - a]
    if "labels" in opened.found:
        opened.found["labels"] = opened.found["labels"][index]
    opened.found["codes"] = torch.cat([part.reshape(-1) for part in packed])
    classes = tuple((len(m), size) for m, (_, size) in zip(members, geometry.classes, strict=True))
    return replace(geometry, shape=(len(index), geometry.shape[1]), classes=classes), opened.found


def stored_bytes(matrix: CodedMatrix) -> int:
    """Bytes that a file holds of ``matrix``: its integers as a stream, and the floating-point tensors.

    Raises:
        KflatsError: ``constriction`` is not installed.
    """
    floats = sum(t.numel() * t.element_size() for t in matrix.tensors().values() if t.is_floating_point())
    return len(encode(matrix)) + floats


# Heads -------------------------------------------------------------------------------------------


def _put_basis(head: Writer, levels: Tensor, scales: Tensor) -> None:
    """Rows of about one size share a distribution."""
    groups = [levels[scales == k] for k in range(int(scales.max()) + 1 if len(scales) else 0)]
    for group in groups:
        head.array(group)


def _tables_of(matrix: CodedMatrix) -> Tables:
    """The distribution of the integers of each context."""
    geometry, found = matrix.geometry, matrix.tensors()
    counts = torch.zeros(geometry.contexts, len(KNOTS), dtype=torch.float64)
    reach, knots = torch.zeros(geometry.contexts, dtype=torch.int64), nearest_knot()
    for c, a, b in blocks_of(geometry):
        layout = Layout(found["bits"][c], found["low"][c])
        order, groups = groups_of(layout, found["contexts"][c])
        levels = unpack(block_in(found["codes"], geometry, c, a, b), layout).T[order].to(torch.int64).abs()
        if int(levels.max()) > FARTHEST:
            raise KflatsError(f"integers of more than {FARTHEST} cannot be entropy coded", hint="larger steps")
        for (k, _), part in zip(groups, torch.split(levels, [count for _, count in groups]), strict=True):
            counts[k] += torch.bincount(knots[part.reshape(-1)], minlength=len(KNOTS))
            reach[k] = max(int(reach[k]), int(part.max()))
    return tables_of(counts, reach)


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
