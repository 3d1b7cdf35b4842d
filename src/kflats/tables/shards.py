"""One file of coded rows: written as a stream, mapped when it is read, checked where it is read.

A safetensors file: ``data``, the codes; ``checks``, a CRC-32 of each 8 KiB of them; and the arrays that say where rows
lie in them. The arrays are checked when the file is opened, the codes of a piece when one of its rows is first asked
for. Pages of a mapped file belong to the system: they are no private memory of the process.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kflats.common.errors import KflatsError, first_line
from kflats.common.hashing import crc32
from kflats.io.mapped import mapped_tensors
from kflats.numerics.coding.lanes import Bytes, Ints

PIECE = 2**13
"""Bytes of codes under one checksum."""
_HEADER = 4096  # bytes of a header, known before the lengths that it holds
_TYPES = {"uint8": "U8", "uint32": "U32", "int64": "I64"}

Array: TypeAlias = npt.NDArray[np.generic]
_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True)
class ShardRecord:
    """What the index of a table says of one file: its bytes, and the checksum of all its arrays but the codes."""

    bytes: int
    checksum: int


class ShardWriter:
    """Writes one file, piece after piece: at no time is more than a piece of it in memory.

    Args:
        path: of the new file.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115  (closed by ``finish``, or at the end of a ``with``)
        self._file.write(bytes(_HEADER))
        self._bytes, self._checks, self._rest = 0, list[int](), b""

    def add(self, codes: Bytes) -> None:
        """More codes."""
        self._put(self._rest + codes.tobytes())

    def _put(self, data: bytes, *, last: bool = False) -> None:
        whole = len(data) if last else len(data) // PIECE * PIECE
        view = memoryview(data)
        self._checks += [zlib.crc32(view[at : min(at + PIECE, whole)]) for at in range(0, whole, PIECE)]
        self._file.write(view[:whole])
        self._bytes += whole
        self._rest = data[whole:]

    def finish(self, arrays: Mapping[str, Array]) -> ShardRecord:
        """Write the arrays behind the codes, and the header before them."""
        self._put(self._rest + bytes(-(self._bytes + len(self._rest)) % 8), last=True)
        behind = {"checks": np.array(self._checks, dtype=np.uint32), **arrays}
        behind = dict(sorted(behind.items(), key=lambda item: -item[1].dtype.itemsize))
        header: dict[str, object] = {"data": _entry(np.dtype(np.uint8), self._bytes, 0)}
        at = self._bytes
        for name, values in behind.items():
            header[name] = _entry(values.dtype, len(values), at)
            self._file.write(values.tobytes())
            at += values.nbytes
        text = json.dumps(header, separators=(",", ":")).encode().ljust(_HEADER - 8)
        self._file.seek(0)
        self._file.write(struct.pack("<Q", len(text)) + text)
        self._file.close()
        return ShardRecord(_HEADER + at, _checksum(behind))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def file_bytes(codes: int, *arrays: int) -> int:
    """Bytes of a file with so many bytes of codes, and with ``arrays`` of so many bytes beside the checksums.

    >>> file_bytes(16384, 24)
    20512
    """
    padded = codes + -codes % 8
    return _HEADER + padded + 4 * -(-padded // PIECE) + sum(arrays)


def _entry(dtype: np.dtype[np.generic], count: int, at: int) -> dict[str, object]:
    return {"dtype": _TYPES[dtype.name], "shape": [count], "data_offsets": [at, at + count * dtype.itemsize]}


def missing(path: Path) -> KflatsError:
    """The error for a file of a table that is not there."""
    hint = "restore the file or compress the table again"
    return KflatsError(f"{path} is missing", cause="the folder was moved, or copied in part", hint=hint)


def check_size(path: Path, nbytes: int) -> None:
    """Whether a file of a table is there, with as many bytes as it was written with.

    Raises:
        KflatsError: it is missing, longer or shorter, or cannot be looked at.
    """
    try:
        there = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError) as error:
        raise missing(path) from error
    except OSError as error:
        raise KflatsError(f"{path} cannot be read: {first_line(error)}", hint="look at its permissions") from error
    if there != nbytes:
        raise KflatsError(
            f"{path} is damaged: it has {there:,} bytes in place of {nbytes:,}",
            cause="a truncated file, or one of another table",
            hint="restore the file or compress the table again",
        )


def _checksum(arrays: Mapping[str, Array]) -> int:
    named = sorted(arrays.items())
    return crc32(part for name, values in named for part in (name, np.ascontiguousarray(values).view(np.uint8).data))


class Shard:
    """One file, mapped.

    Args:
        path: of the file. record: what the index says of it.

    Raises:
        KflatsError: no such file, a truncated or damaged one; the message names it.
    """

    def __init__(self, path: Path, record: ShardRecord) -> None:
        self.path = path
        check_size(path, record.bytes)
        try:
            tensors = mapped_tensors(path)
        except KflatsError as error:
            if isinstance(error.__cause__, OSError):  # says nothing of what the file holds
                raise
            raise self.damaged(first_line(error)) from error
        if any(tensor.ndim != 1 for tensor in tensors.values()) or not {"data", "checks"} <= tensors.keys():
            raise self.damaged("other arrays than a shard has")
        self.data: Bytes = tensors.pop("data").numpy()
        self.arrays: dict[str, Array] = {name: tensor.numpy() for name, tensor in tensors.items()}
        if _checksum(self.arrays) != record.checksum:
            raise self.damaged("the checksum of its arrays differs")
        self._checks = self.array("checks", np.uint32, 0)
        if self.data.dtype != np.uint8 or len(self._checks) != -(-self.data.nbytes // PIECE):
            raise self.damaged("other arrays than a shard has")
        self._seen = np.zeros(len(self._checks), dtype=np.bool_)
        self.checked = not len(self._checks)
        """Whether all codes were; several threads may check one piece."""

    def damaged(self, symptom: str) -> KflatsError:
        """The error that names this file."""
        return KflatsError(
            f"{self.path} is damaged: {symptom}",
            cause="a damaged or truncated file",
            hint="restore the file or compress the table again",
        )

    def array(self, name: str, dtype: type[_Scalar], least: int) -> npt.NDArray[_Scalar]:
        """An array beside the codes, of this type and at least so long.

        Raises:
            KflatsError: the file has another.
        """
        values = self.arrays.get(name)
        if values is None or values.dtype != dtype or len(values) < least:
            raise self.damaged(f"the array {name!r} is not that of this table")
        return values.view(dtype)

    def check(self, starts: Ints, ends: Ints) -> None:
        """Check the pieces that hold bytes ``starts`` to ``ends`` of the codes, those not checked before.

        Raises:
            KflatsError: a range that leaves the file, or a checksum that differs.
        """
        if len(starts) and (int(starts.min()) < 0 or int(ends.max()) > self.data.nbytes or bool((starts > ends).any())):
            raise self.damaged("its arrays point outside of its codes")
        if self.checked:
            return
        first, last = starts // PIECE, (np.maximum(ends, starts + 1) - 1) // PIECE
        while len(first):
            for piece in sorted(set(first[~self._seen[first]].tolist())):
                view = self.data.data[piece * PIECE : (piece + 1) * PIECE]
                if zlib.crc32(view) != int(self._checks[piece]):
                    raise self.damaged(f"a checksum of bytes {piece * PIECE:,} and following of its codes differs")
                self._seen[piece] = True
            more = first < last
            first, last = first[more] + 1, last[more]
        self.checked = bool(self._seen.all())

    def check_all(self) -> None:
        """Check every byte of the codes.

        Raises:
            KflatsError: a checksum that differs.
        """
        pieces = np.arange(len(self._checks), dtype=np.int64) * PIECE
        self.check(pieces, np.minimum(pieces + PIECE, self.data.nbytes))
