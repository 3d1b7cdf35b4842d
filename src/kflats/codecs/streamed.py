"""A CodedMatrix whose codes are decoded from a stream when rows of their block are read, each block once.

A text reads few rows of a long table: its output comes sooner, and blocks that no text asks for take no memory but that
of their stream.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from kflats.codecs.streams import PATHS, StreamReader
from kflats.common.errors import KflatsError, first_line
from kflats.common.torch_settings import one_thread
from kflats.matrices.base import Matrix, complete_first, moves_integers
from kflats.matrices.coded import CodedGeometry, CodedMatrix
from kflats.matrices.kept_rows import may_keep_rows


class _Blocks:
    """The blocks of a stream that are not decoded yet.

    ``left``: these, by class and index in it. ``codes``: of all rows; nothing is written to the places of blocks that
    are left, so that pages of memory which they fill are never touched. ``buffer``: the matrix', empty until then.
    ``checksum``: of all integers, as ``CodedMatrix.checksum`` gives it.
    """

    def __init__(self, stream: Tensor, geometry: CodedGeometry, checksum: int) -> None:
        self._stream, self._geometry, self.checksum = stream, geometry, checksum
        with torch.inference_mode(False):  # other threads write into it
            self.buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._begin()
        self._all = self.left = frozenset(self.source.blocks)

    def _begin(self) -> None:
        self._source: StreamReader | None = None
        with torch.inference_mode(False):  # as ``buffer``
            self.codes = torch.empty(self._geometry.shapes["codes"], dtype=torch.uint8, device="cpu")

    @property
    def source(self) -> StreamReader:
        """The stream with its head read."""
        if self._source is None:
            self._source = StreamReader.of(self._stream, self._geometry)
        return self._source

    def decode_(self, wanted: Set[tuple[int, int]]) -> None:
        """Write the codes of these blocks. Two threads may decode one block: both write the same bytes, before either
        says that they are there."""
        if wanted := wanted & self.left:
            with one_thread():
                for key in wanted:
                    block = self.source.blocks[key]
                    self._geometry.part(self.codes, block.label)[block.rows] = self.source.packed(block)
                    self.left = self.left - {key}

    def __getstate__(self) -> dict[str, object]:
        # A copy begins anew. Views of memory, and the coder's models, cannot be copied. Codes would take memory that
        # was never written to into a pickle.
        return {name: self.__dict__[name] for name in ("_stream", "_geometry", "checksum", "buffer", "_all")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.left = self._all
        self._begin()


_WAITING: WeakSet[StreamedMatrix] = WeakSet()


def _complete_all() -> None:
    for matrix in list(_WAITING):
        matrix.complete_()


# As ``torch.compiler.assume_constant_result`` does, which imports the compiler: the function runs while a graph is
# recorded, and is no part of it.
_complete_all.__dict__["_dynamo_marked_constant"] = True


class StreamedMatrix(CodedMatrix):
    """A CodedMatrix that is decoded late: ``rows`` decodes the blocks of the rows that it reads, and every other use
    all blocks. In memory it takes the stream, and the codes of the blocks that were read.

    Choose it where a first row must come soon. While blocks are left, the buffer ``codes`` has no numbers: code that
    reads the buffers of a module finds none, instead of some that were never written. Limit: integers that follow paths
    are decoded at once, because each block needs free bits of all rows, which take more memory than the codes.
    """

    _blocks: _Blocks | None = None

    def __init__(self, geometry: CodedGeometry, tensors: dict[str, Tensor]) -> None:
        super().__init__(geometry, tensors)
        self.register_state_dict_pre_hook(complete_first)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(complete_first)  # type: ignore[no-untyped-call]

    def hold_(self, stream: Tensor) -> None:
        """Take ``stream`` itself, without a copy, in place of filling what ``expect_`` made room for."""
        self._buffers["codes"] = stream

    def open_(self, checksum: int) -> None:
        """Read the head of the stream in ``self``, filled after ``expect_`` (``expand_`` would decode all blocks).

        Args:
            checksum: of all integers. The caller has made sure that it belongs to this stream.

        Raises:
            KflatsError: a damaged stream, or one of another geometry.
        """
        try:
            blocks = _Blocks(self.get_buffer("codes"), self.geometry, checksum)
        except (ValueError, IndexError, RuntimeError, OverflowError) as error:
            raise KflatsError(
                f"the codes do not fit their description ({first_line(error)[:80]})",
                cause="a damaged file",
                hint="restore the file or compress again",
            ) from error
        self._buffers.update({**blocks.source.tensors, "codes": blocks.codes})
        self.streamed = False
        self.refresh()
        self._buffers["codes"], self._blocks = blocks.buffer, blocks
        _WAITING.add(self)
        if blocks.source.context.number == PATHS:
            self.complete_()

    def complete_(self) -> None:
        """As ``Matrix.complete_``: decode the blocks that are left."""
        if torch.compiler.is_dynamo_compiling():
            _complete_all()  # before ``_blocks`` is read: what was read may not change until the graph is made
        if (blocks := self._blocks) is not None:
            with ThreadPoolExecutor(1) as other:  # no mode of this thread changes or records what is computed there
                other.submit(self._decode, blocks, blocks.left).result()

    def _decode(self, blocks: _Blocks, wanted: Set[tuple[int, int]]) -> None:
        blocks.decode_(wanted)
        if not blocks.left:
            # The same tensor, for those that have read it before; hooks, and ``torch.export``, put others in its place.
            blocks.buffer.set_(blocks.codes.to(blocks.buffer.device))  # type: ignore[call-overload]
            if not len(held := self.get_buffer("codes")):
                self._buffers["codes"] = blocks.codes.to(held.device)
            self._blocks = None  # last: another thread that finds None reads the buffer
            _WAITING.discard(self)

    def _left(self) -> _Blocks | None:
        """The blocks that are left, unless codes were put in place of the buffer, as ``functional_call`` does."""
        if (blocks := self._blocks) is None:
            return None
        if (held := self.get_buffer("codes")) is not blocks.buffer:
            for other in list(_WAITING):  # whose buffer it may be
                if other is not self and (its := other._blocks) is not None and its.buffer is held:
                    other.complete_()
        return None if len(held) else blocks

    def _prepare(self, index: Tensor) -> None:
        if not may_keep_rows() or not index.is_cpu or (blocks := self._left()) is None:
            self._check_ready()
            return
        rows, labels = index.reshape(-1).unique(), self._get("labels")
        of = torch.zeros_like(rows) if labels is None else labels[rows].to(torch.int64)
        sizes = torch.tensor([0, *(count for count, _ in self.geometry.classes)], device="cpu")
        places = (self.position[rows] - sizes.cumsum(0)[of]) // blocks.source.rows_a_block
        self._decode(blocks, set(zip(of.tolist(), places.tolist(), strict=True)))

    def _packed(self) -> Tensor:
        blocks = self._left()
        return super()._packed() if blocks is None else blocks.codes

    def _check_ready(self) -> None:
        self.complete_()
        super()._check_ready()

    def row_sources(self) -> list[Tensor]:
        """As ``Matrix.row_sources``. Codes that are written when their block is read are no change."""
        return super().row_sources() if self._left() is None else Matrix.row_sources(self)

    def tensors(self) -> dict[str, Tensor]:
        """As ``CodedMatrix.tensors``, all decoded."""
        self.complete_()
        return super().tensors()

    def floats(self) -> dict[str, Tensor]:
        """As ``Matrix.floats``. No block is decoded for it."""
        return {name: value for name, value in super().tensors().items() if value.is_floating_point()}

    def checksum(self) -> int:
        """As ``CodedMatrix.checksum``."""
        return super().checksum() if (blocks := self._left()) is None else blocks.checksum

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if moves_integers(fn):
            self.complete_()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._blocks is not None:
            _WAITING.add(self)

    def _decoded_table(self) -> Tensor | None:
        return super()._decoded_table() if self._left() is None else None
