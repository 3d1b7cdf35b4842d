"""Matrices that may be most of the memory: where they lie, and operations that make no second one.

The Gram matrix of n inputs takes 8 n^2 bytes, of 28,672 inputs 6.6 GB, and codecs hold the numbers of a weight several
times. Inside of ``large_matrices_in`` what takes more than a quarter of what the process may still take lies in files
without a name, which are mapped into memory: their pages are no private memory, and the system writes them to disk when
it needs room. The numbers are the same on both ways.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import isfinite, isqrt
from typing import IO

import torch
from torch import Tensor

from kflats.common.machine import unused_bytes

_AT_ONCE = 1 << 20  # numbers of a temporary: a matrix of 1,024 x 1,024 is one stripe
_TILE = isqrt(_AT_ONCE)
_SMALL = 1 << 26  # bytes of a matrix that is in memory in any case
_CPU = torch.device("cpu")
_ZEROS = bytes(1 << 20)
_NOT_SUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_folder: ContextVar[str | None] = ContextVar("folder of large matrices", default=None)


@contextmanager
def large_matrices_in(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, ``zero_matrix`` may put large matrices into ``folder``, which is made where it is needed. The files have
    no names, and the system removes them with the last tensor, or with the process."""
    before = _folder.set(os.fspath(folder))
    try:
        yield
    finally:
        _folder.reset(before)


def zero_matrix(
    rows: int, columns: int, dtype: torch.dtype = torch.float64, device: torch.device | None = None
) -> Tensor:
    """(rows, columns) zeros, in a file where the module's first lines say so.

    Raises:
        OSError: no room on the disk. A search that tries several sizes must not take it for a size that is too small.
        MemoryError: the process may map no more.

    >>> with large_matrices_in("."):
    ...     zero_matrix(1, 2).tolist()
    [[0.0, 0.0]]
    """
    nbytes, folder, device = rows * columns * dtype.itemsize, _folder.get(), device or _CPU
    if device.type != "cpu" or folder is None or nbytes <= _SMALL or nbytes <= unused_bytes() // 4:
        return torch.zeros(rows, columns, dtype=dtype, device=device)
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            _reserve(file, nbytes)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), folder) from error
        try:
            data = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            raise MemoryError(f"cannot allocate memory: {nbytes:,} bytes of a file cannot be mapped") from error
    return torch.frombuffer(data, dtype=dtype).view(rows, columns)


def room_like(given: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the shape of ``given``, of its type or another, to be written over. It lies where ``zero_matrix``
    would.

    >>> room_like(torch.ones(2, 3, 4), torch.int16).shape
    torch.Size([2, 3, 4])
    """
    rows = max(1, len(given))
    return zero_matrix(rows, given.numel() // rows, dtype or given.dtype, given.device).view(given.shape)


def rows_at(index: Tensor, table: Tensor) -> Tensor:
    """The rows ``index`` (n,) of ``table`` (m, d), which lie where ``zero_matrix`` would.

    >>> rows_at(torch.tensor([1, 0, 1]), torch.tensor([[1.0], [2.0]])).flatten().tolist()
    [2.0, 1.0, 2.0]
    """
    made = zero_matrix(len(index), table.shape[1], table.dtype, table.device)
    return torch.index_select(table, 0, index, out=made)


def _reserve(file: IO[bytes], nbytes: int) -> None:
    """Make the file so long, of blocks that the disk has: a full disk would end the process when a page is written."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
    for start in range(0, nbytes, len(_ZEROS)):
        file.write(_ZEROS[: nbytes - start])
    file.flush()


def stripes(matrix: Tensor, numbers: int = 0) -> Iterator[slice]:
    """Rows of a matrix, as many at once as make a temporary of 8 MB in float64; or as have so many ``numbers``.

    >>> [(part.start, part.stop) for part in stripes(torch.empty(5, 1 << 19, device="meta"))]
    [(0, 2), (2, 4), (4, 5)]
    """
    height = max(1, (numbers or _AT_ONCE) // max(1, matrix[:1].numel()))
    for start in range(0, len(matrix), height):
        yield slice(start, min(start + height, len(matrix)))


def all_finite(values: Tensor) -> bool:
    """Whether no number is NaN or infinite, without a copy of them, unless they are of one byte.

    >>> [all_finite(torch.tensor([1.0, end, 2.0])) for end in (1.0, torch.inf, -torch.inf, torch.nan)]
    [True, False, False, False]
    """
    if not values.numel():
        return True
    if values.dtype.itemsize == 1:  # float8, for which torch has no such operator
        values = values.to(torch.float32)
    # NaN passes through. It takes a fifteenth of the time of isfinite, which makes tensors of its own.
    return all(isfinite(end) for end in torch.aminmax(values))


def symmetric(matrix: Tensor) -> Tensor:
    """(M + M') / 2 in float64, in memory of its own.

    >>> symmetric(torch.tensor([[1.0, 2.0], [4.0, 3.0]])).tolist()
    [[1.0, 3.0], [3.0, 3.0]]
    """
    made = zero_matrix(len(matrix), len(matrix), device=matrix.device)
    n = len(matrix)
    for first in range(0, n, _TILE):
        rows = slice(first, first + _TILE)
        for second in range(first, n, _TILE):
            columns = slice(second, second + _TILE)
            half = (matrix[rows, columns].to(torch.float64) + matrix[columns, rows].T.to(torch.float64)).div_(2)
            made[rows, columns] = half
            made[columns, rows] = half.T
    return made


def permuted(matrix: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """The ``rows`` and ``columns`` of ``matrix``, all or some, in these orders and in memory of its own.

    >>> permuted(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([1, 0]), torch.tensor([2, 0, 1]), torch.int16)
    tensor([[6, 4, 5],
            [3, 1, 2]], dtype=torch.int16)
    """
    made = zero_matrix(len(rows), len(columns), dtype, matrix.device)
    for part in stripes(made):
        made[part] = matrix[rows[part]][:, columns]
    return made


def factorize_(gram: Tensor) -> bool:
    """Overwrite a symmetric matrix, of which the upper triangle is read, by R, upper triangular, with R'R = it; zeros
    below. False: it has a direction that is not positive, and its numbers are lost.

    >>> gram = torch.tensor([[4.0, 2.0], [2.0, 5.0]])
    >>> factorize_(gram), gram.round(decimals=4).tolist(), factorize_(-torch.eye(2))
    (True, [[2.0, 1.0], [0.0, 2.0]], False)
    """
    lower, failed = gram.mT, torch.empty((), dtype=torch.int32, device=gram.device)
    torch.linalg.cholesky_ex(lower, out=(lower, failed))  # column by column, as LAPACK wants it: no copy is made
    return not int(failed)


def turn_(matrix: Tensor) -> None:
    """Reverse the order of rows and of columns in place, of a matrix whose rows lie one after the other.

    >>> matrix = torch.arange(6).view(2, 3)
    >>> turn_(matrix)
    >>> matrix.tolist()
    [[5, 4, 3], [2, 1, 0]]
    """
    flat = matrix.view(-1)
    for first in range(0, len(flat) // 2, _AT_ONCE):
        end = min(first + _AT_ONCE, len(flat) // 2)
        head, tail = flat[first:end], flat[len(flat) - end : len(flat) - first]
        swapped = head.flip(0)
        head.copy_(tail.flip(0))
        tail.copy_(swapped)
