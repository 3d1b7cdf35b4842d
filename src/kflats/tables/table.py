"""A coded table that is read: rows at any places, decoded when they are asked for."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.common.paths import expanded
from kflats.common.torch_settings import usual_settings
from kflats.numerics.coding.lanes import Ints
from kflats.tables.compact import CompactCode
from kflats.tables.fast import FastCode
from kflats.tables.index import TableIndex, load_head, shard_name
from kflats.tables.layout import RowCode
from kflats.tables.shards import Shard

_CODES: dict[str, type[CompactCode] | type[FastCode]] = {"compact": CompactCode, "fast": FastCode}


class CodedTable:
    """The rows (n, d) of a folder that ``compress_table`` wrote; ``open_table`` makes it.

    It is also ``Rows``: a source for every method. Files are mapped when a row of them is first asked for. A copy that
    is sent to another process opens the folder there, so that workers of a DataLoader, forked or spawned, read it.

    Args:
        folder: of the table. index, code: what its index and its head say.
    """

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, folder: Path, index: TableIndex, code: RowCode) -> None:
        self.folder, self.index = folder, index
        self.shape = (index.rows, index.columns)
        self._code, self._shards = code, dict[int, Shard]()

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def flats(self) -> int:
        """How many sets of axes the rows have."""
        return self._code.flats

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return open_table, (str(self.folder),)

    def __repr__(self) -> str:
        n, d = self.shape
        return f"CodedTable({str(self.folder)!r}, {n} x {d}, {self.index.layout})"

    @overload
    def rows(self, ids: Tensor | Sequence[int]) -> Tensor: ...

    @overload
    def rows(self, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]: ...

    def rows(self, ids: Tensor | npt.NDArray[np.integer] | Sequence[int]) -> Tensor | npt.NDArray[np.float32]:
        """The rows ``ids`` (...) as (..., d) float32: an array for an array, otherwise a tensor on the device of ids.

        Many rows at once take less time a row: the compact layout decodes them side by side.

        Raises:
            KflatsError: ids that are no whole numbers or that the table does not have; a missing, truncated or damaged
                file, which the message names.
        """
        if torch.compiler.is_dynamo_compiling():  # files are read outside of graphs
            found: Tensor | npt.NDArray[np.float32] = torch.compiler.disable(self._asked)(ids)
            return found
        return self._asked(ids)

    def _asked(self, ids: Tensor | npt.NDArray[np.integer] | Sequence[int]) -> Tensor | npt.NDArray[np.float32]:
        """As ``rows``."""
        if isinstance(ids, np.ma.MaskedArray):
            raise KflatsError(
                "ids with a mask are not supported, because a masked place has no row",
                hint="ids.compressed(), or ids.data",
            )
        if isinstance(ids, np.ndarray):
            ids = np.asarray(ids)  # one of a class of its own, as np.matrix, keeps two dimensions
            return self._rows(ids.reshape(-1)).view(*ids.shape, self.shape[1]).numpy()
        try:
            given = (
                ids
                if isinstance(ids, Tensor)
                else torch.tensor(ids, dtype=None if len(ids) else torch.int64, device="cpu")
            )
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise KflatsError(
                f"rows are asked for by several ids, not by {repr(ids)[:80]}", hint="a list, an array or a tensor"
            ) from error
        rows = self._rows(_numbers(given).reshape(-1))
        return rows.view(*given.shape, self.shape[1]).to(given.device)

    def take(self, index: Tensor) -> Tensor:
        """As ``Rows.take``: the rows ``index`` (m,)."""
        if index.ndim != 1:
            raise KflatsError(f"ids of shape {tuple(index.shape)} are not supported by take", hint="table.rows(ids)")
        return self._rows(_numbers(index))

    def blocks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """As ``Rows.blocks``."""
        for start in range(0, len(self), size):
            yield start, self._rows(np.arange(start, min(start + size, len(self))))

    def __getitem__(self, row: int) -> Tensor:
        try:
            row = operator.index(row)
        except TypeError as error:
            raise KflatsError(
                f"one row is asked for by a whole number, not by {row!r}", hint="table.rows(ids) for several"
            ) from error
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a table of {len(self):,} rows")  # which ends a loop over the rows
        return self._rows(np.array([row]))[0]

    def __getitems__(self, rows: list[int]) -> list[Tensor]:
        """The rows of a batch, decoded together; a DataLoader asks for them so."""
        return list(self._rows(np.array(rows, dtype=np.int64)))

    def _rows(self, ids: npt.NDArray[np.generic]) -> Tensor:
        if not np.issubdtype(ids.dtype, np.integer):
            raise KflatsError(f"rows are asked for by whole numbers, not by {ids.dtype}", hint="ids of type int64")
        n = len(self)
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
        if not 0 <= low <= high < n:
            raise KflatsError(
                f"rows {low} to {high} are not all in a table of {n:,} rows", hint=f"ids from 0 to {n - 1}"
            )
        return self._decoded(ids.astype(np.int64, copy=False))

    def _decoded(self, ids: Ints) -> Tensor:
        with usual_settings():
            out = torch.empty(len(ids), self.shape[1], dtype=torch.float32)
            numbers = ids // self.index.shard_rows
            inside = ids - numbers * self.index.shard_rows
            apart = len(ids) > 0 and bool((numbers != numbers[0]).any())
            # File after file, so that a batch reads few of them. numpy sorts integers of 16 bits by digits: quicker.
            small = len(self.index.shard_bytes) < 2**16
            order = np.argsort(numbers.astype(np.uint16) if small else numbers, kind="stable") if apart else None
            for start in range(0, len(ids), self._code.batch):
                part = slice(start, start + self._code.batch)
                if order is None:
                    self._code.decode([(self._shard(int(numbers[0])), inside[part])], out[part])
                else:
                    mine = order[part]
                    rows = torch.empty(len(mine), self.shape[1], dtype=torch.float32)
                    self._code.decode(self._pieces(numbers[mine], inside[mine]), rows)
                    out.index_copy_(0, torch.from_numpy(mine), rows)
        return out

    def _pieces(self, numbers: Ints, inside: Ints) -> list[tuple[Shard, Ints]]:
        """Rows by their places ``inside`` files of ascending ``numbers``, for each file."""
        cuts = [0, *((numbers[1:] != numbers[:-1]).nonzero()[0] + 1).tolist(), len(numbers)]
        return [(self._shard(int(numbers[a])), inside[a:b]) for a, b in pairwise(cuts)]

    def _shard(self, number: int) -> Shard:
        if (shard := self._shards.get(number)) is None:
            shard = Shard(self.folder / shard_name(number), self.index.shard(number))
            self._code.check(shard, self.index.rows_of(number))
            self._shards[number] = shard
        return shard


def _numbers(ids: Tensor) -> npt.NDArray[np.generic]:
    """The numbers of a tensor.

    Raises:
        KflatsError: it has none of its own, or keeps them in another way than one after the other.
    """
    if ids.is_meta or ids.is_nested or ids.layout != torch.strided:
        raise KflatsError(
            "ids without numbers, or with a layout of their own, are not supported", hint="a dense tensor"
        )
    found: npt.NDArray[np.generic] = ids.detach().cpu().numpy()
    return found


def open_table(path: str | os.PathLike[str]) -> CodedTable:
    """Open a table that ``compress_table`` wrote. Files are mapped, and only what the asked rows need is decoded.

    Nothing but the index and the head is read here. Private memory is that of the rows that are returned, and some
    megabytes, for a table of any size; each 8 KiB of codes are checked when a row in them is first asked for.

    Args:
        path: the folder of the table.

    Choose it for tables that are larger than memory, or that many processes read: the pages of the files are shared.
    Rows cannot be changed; a layer that trains needs ``nn.Embedding``.

    Raises:
        KflatsError: no coded table, one of another version, a damaged index or head.

    >>> import tempfile
    >>> from kflats.tables.compress import compress_table
    >>> folder = tempfile.mkdtemp()
    >>> np.save(f"{folder}/rows.npy", np.random.default_rng(0).normal(size=(1000, 16)).astype(np.float32))
    >>> made = compress_table(f"{folder}/rows.npy", f"{folder}/coded", size="8 bits", layout="fast", quiet=True)
    >>> table = open_table(f"{folder}/coded")
    >>> table, table.rows(torch.tensor([[5, 7, 5]])).shape
    (CodedTable(..., 1000 x 16, fast), torch.Size([1, 3, 16]))
    """
    if not isinstance(path, str | os.PathLike):
        raise KflatsError(f"a table is opened by the name of its folder, not by {path!r:.80}", hint="a path")
    folder = expanded(path).absolute()  # files are opened when they are read, whatever the working directory is then
    index = TableIndex.load(folder)
    try:
        code = _CODES[index.layout].from_tensors(load_head(folder, index.head), index.columns)
    except KflatsError as error:
        raise error.about(str(folder)) from error
    return CodedTable(folder, index, code)
