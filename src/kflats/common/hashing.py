"""Digests of files, texts and tensors: SHA-256 compares them, CRC-32 detects damaged bytes."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Hashed: TypeAlias = "str | bytes | bytearray | memoryview | Tensor"
_BYTES = (str, bytes, bytearray, memoryview)


def sha256(parts: Iterable[Hashed]) -> str:
    """SHA-256 of a sequence of texts, bytes and tensors, as 64 hexadecimal digits.

    The length of each part is hashed before the part, and of a tensor its dtype and shape: the digest also depends on
    where one part ends and the next begins. Tensors are hashed in row-major order, on any device.

    >>> import torch
    >>> sha256(["ab", "c"]) == sha256(["a", "bc"]), sha256([torch.zeros(2)]) == sha256([torch.zeros(1, 2)])
    (False, False)
    """
    total = hashlib.sha256()
    for part in parts:
        data = _buffer(part)
        kind = type(part).__name__ if isinstance(part, _BYTES) else f"{part.dtype} {tuple(part.shape)}"
        total.update(f"{kind} {data.nbytes} ".encode())
        total.update(data)
    return total.hexdigest()


def sha256_of_file(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes, as ``sha256sum`` prints it.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def crc32(parts: Iterable[Hashed]) -> int:
    """CRC-32 of the bytes of all parts, one after the other; of tensors only their numbers.

    >>> import torch
    >>> crc32(["ab", b"c"]) == crc32(["a", "bc"]) == crc32([torch.tensor([97, 98, 99], dtype=torch.uint8)])
    True
    """
    total = 0
    for part in parts:
        total = zlib.crc32(_buffer(part), total)
    return total


def _buffer(part: Hashed) -> memoryview:
    if isinstance(part, _BYTES):
        return memoryview(part.encode() if isinstance(part, str) else part)
    import torch  # files are hashed without it

    data: memoryview = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data
