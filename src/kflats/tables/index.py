"""The index of a coded table, ``table.json``, and its head, ``head.safetensors``: all that is read when it is opened.

    {"format": "kflats-table", "version": 2, "layout": "fast", "rows": 20000000, "columns": 64, "shard_rows": 4194304,
     "squared_error": ..., "squared_sum": ..., "head": {...}, "shard_bytes": [...], "shard_checksums": [...],
     "checksum": ...}

The files of the rows are ``rows-00000.safetensors`` and following, each of ``shard_rows`` rows, the last of what is
left. Their names follow from their numbers: no path stands in the index.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kflats.common.errors import KflatsError, first_line, is_whole
from kflats.common.hashing import crc32
from kflats.common.schema import Json, decode, read_json
from kflats.io.atomic import write_json
from kflats.io.sources import TABLE_INDEX
from kflats.tables.shards import ShardRecord, check_size

Layout = Literal["compact", "fast"]
HEAD = "head.safetensors"
INDEX_BYTES, SHARD_ENTRY = 4096, 512
"""Room for the index and the manifest of a table, and for the entries of each of its files."""
_FORM, _VERSION = "kflats-table", 2
_MOST_ROWS, MOST_COLUMNS = 2**48, 2**16


@dataclass(frozen=True)
class TableIndex:
    """What is known of a coded table without its rows.

    Args:
        layout: how rows are stored. rows, columns: the shape. shard_rows: rows a file.
        squared_error, squared_sum: sums over all rows of the squared error and of the squared numbers, weighted where
            rows have weights.
        head: bytes and checksum of the head. shard_bytes, shard_checksums: those of the files of rows.

    Raises:
        KflatsError: numbers that do not belong together.
    """

    layout: Layout
    rows: int
    columns: int
    shard_rows: int
    squared_error: float
    squared_sum: float
    head: ShardRecord
    shard_bytes: tuple[int, ...]
    shard_checksums: tuple[int, ...]

    def __post_init__(self) -> None:
        whole = is_whole(self.rows, 1, _MOST_ROWS) and is_whole(self.columns, 1, MOST_COLUMNS)
        counts = {len(self.shard_bytes), len(self.shard_checksums)}
        if not whole or not is_whole(self.shard_rows, 1, 2**62) or counts != {-(-self.rows // self.shard_rows)}:
            raise KflatsError("an index of a table with impossible numbers", cause="a damaged file")

    @property
    def relative_error(self) -> float:
        """The sum of squared errors by the sum of squares."""
        return self.squared_error / self.squared_sum if self.squared_sum else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the head and of the files of rows."""
        return self.head.bytes + sum(self.shard_bytes)

    def shard(self, number: int) -> ShardRecord:
        """What is known of the file of this number."""
        return ShardRecord(self.shard_bytes[number], self.shard_checksums[number])

    def rows_of(self, number: int) -> int:
        """Rows in the file of this number."""
        return min(self.shard_rows, self.rows - number * self.shard_rows)

    def check_files(self, folder: Path) -> None:
        """Whether all files of the table are in ``folder``, with as many bytes as they were written with.

        Raises:
            KflatsError: a file that is missing, or longer or shorter; the message names it.
        """
        records = {HEAD: self.head.bytes, **{shard_name(i): nbytes for i, nbytes in enumerate(self.shard_bytes)}}
        for name, nbytes in records.items():
            check_size(folder / name, nbytes)

    def save(self, folder: Path) -> None:
        """Write the index into ``folder``."""
        content = json.loads(json.dumps(asdict(self)))
        write_json(folder / TABLE_INDEX, _FORM, _VERSION, **content, checksum=_checksum(content))

    @classmethod
    def load(cls, folder: Path) -> TableIndex:
        """The index in ``folder``.

        Raises:
            KflatsError: no table, one of another version, a damaged index.
        """
        path = folder / TABLE_INDEX
        if not path.is_file():
            raise KflatsError(f"{folder} is no coded table", hint="a folder that kflats compress --table wrote")
        content = read_json(path, _FORM, _VERSION, "table")
        checksum = content.pop("checksum", None)
        if checksum != _checksum(content):
            raise KflatsError(f"{path} is damaged: its checksum differs", hint="restore the file")
        try:
            index: TableIndex = decode(cls, content, "table")
        except KflatsError as error:
            raise error.about(str(path)) from error
        return index


def shard_name(number: int) -> str:
    """The name of the file of rows of this number.

    >>> shard_name(3)
    'rows-00003.safetensors'
    """
    return f"rows-{number:05d}.safetensors"


def save_head(folder: Path, tensors: Mapping[str, Tensor]) -> ShardRecord:
    """Write the head into ``folder``."""
    path = folder / HEAD
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return ShardRecord(os.stat(path).st_size, _head_checksum(tensors))


def load_head(folder: Path, record: ShardRecord) -> dict[str, Tensor]:
    """The head in ``folder``.

    Raises:
        KflatsError: a missing, truncated or damaged head.
    """
    path = folder / HEAD
    check_size(path, record.bytes)
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise KflatsError(f"{path} cannot be read: {first_line(error)}", cause="a damaged file") from error
    if _head_checksum(tensors) != record.checksum:
        raise KflatsError(f"{path} is damaged: its checksum differs", hint="restore the file or compress again")
    return tensors


def _head_checksum(tensors: Mapping[str, Tensor]) -> int:
    parts: list[str | Tensor] = []
    for name, tensor in sorted(tensors.items()):
        parts += [f"{name} {tensor.dtype} {tuple(tensor.shape)} ", tensor.reshape(-1).view(torch.uint8)]
    return crc32(parts)


def _checksum(content: Mapping[str, Json]) -> int:
    return crc32([json.dumps(content, sort_keys=True)])
