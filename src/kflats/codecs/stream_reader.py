"""Streams opened: what their head says, and their blocks one after the other, each decoded only when that is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kflats.codecs.blocks import blocks_of, decode_block
from kflats.codecs.entropy import AGAIN, DAMAGED, Model, Reader, model_of, models_of
from kflats.common.errors import KflatsError
from kflats.common.hashing import crc32
from kflats.matrices.coded_geometry import CodedGeometry
from kflats.numerics.coding.packing import Layout

STREAM_VERSION = 1
MAGIC = b"kflats codes" + bytes([STREAM_VERSION])


@dataclass(frozen=True)
class StreamReader:
    """A stream whose head is read: all integers but the codes, and where the blocks of those are."""

    geometry: CodedGeometry
    found: dict[str, Tensor]
    layouts: list[Layout]
    models: list[Model]
    head: Reader
    body: Reader

    def blocks(self) -> Iterator[tuple[tuple[int, int, int], Callable[[], Tensor]]]:
        """(class, rows a..b) of every block in turn, and what decodes it into packed rows; then the end is checked."""
        for number, place in enumerate(blocks_of(self.geometry)):
            coded, size, checksum = self.head.get("<BII")
            yield place, partial(self._read, number, place, bool(coded), self.body.take(size), checksum)
        if self.head.left or self.body.left:
            raise KflatsError("the codes are followed by something else", cause=DAMAGED, hint=AGAIN)

    def _read(self, number: int, place: tuple[int, int, int], coded: bool, part: memoryview, checksum: int) -> Tensor:
        c, a, b = place
        row_bytes = self.geometry.classes[c][1]
        if coded:
            goal = decode_block(part, b - a, self.layouts[c], self.found["contexts"][c], self.models)
        else:
            goal = torch.zeros(b - a, row_bytes, dtype=torch.uint8)
            if len(part) == goal.numel():
                goal.copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8).view(goal.shape))
        if crc32([goal]) != checksum:
            raise KflatsError(
                f"block {number} of the codes (class {c}) is damaged: its checksum differs", cause=DAMAGED, hint=AGAIN
            )
        return goal


@contextmanager
def fitting() -> Iterator[None]:
    """The head is whole where something else fails inside, so that the stream was written for another matrix."""
    try:
        yield
    except KflatsError:
        raise
    except (ValueError, IndexError, RuntimeError, OverflowError) as error:
        raise KflatsError(f"the codes do not fit this matrix: {str(error)[:80]}", cause=DAMAGED, hint=AGAIN) from error


def open_stream(stream: Tensor, geometry: CodedGeometry) -> StreamReader:
    """Read all but the blocks.

    Raises:
        KflatsError: a damaged or truncated head, another version or another geometry; inside ``fitting`` always this.
    """
    data = memoryview(stream.detach().cpu().numpy().tobytes())
    reader = Reader(data)
    if bytes(reader.take(len(MAGIC) - 1)) != MAGIC[:-1]:
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
    if crc32([top]) != checksum:
        raise KflatsError("the head of the codes is damaged: its checksum differs", cause=DAMAGED, hint=AGAIN)
    head = Reader(top)
    n, count, r = geometry.shape[0], len(geometry.classes), geometry.rank
    found: dict[str, Tensor] = {}
    if count > 1:
        (labels,) = head.symbols([n], [label_model(geometry)])
        found["labels"] = torch.from_numpy(labels.astype(np.uint8))
    bits = head.array((count, r)).cumsum(1)
    low = head.array((count, r)) + middle_of(bits)
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
    return StreamReader(geometry, found, layouts, models, head, reader)


def label_model(geometry: CodedGeometry) -> Model:
    """The distribution of the rows' classes."""
    return model_of(0, torch.tensor([rows for rows, _ in geometry.classes]))


def middle_of(bits: Tensor) -> Tensor:
    """Where a range of 2^bits integers begins that has zero in its middle."""
    half = torch.div(1 << bits.to(torch.int64), 2, rounding_mode="floor")
    return -half


def _get_basis(head: Reader, d: int, scales: Tensor) -> Tensor:
    found = torch.empty(len(scales), d, dtype=torch.int8)
    for k in range(int(scales.max()) + 1 if len(scales) else 0):
        rows = (scales == k).nonzero().squeeze(1)
        found[rows] = head.array((len(rows), d)).to(torch.int8)
    return found
