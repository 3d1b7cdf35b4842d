"""What a pruned matrix takes when it is stored: nothing is saved by a zero that is written down.

Three counts of an (n, d) matrix with m entries left, in bytes:

- ``csr``: m values, m column indices of the smallest unsigned type, n + 1 row pointers of the smallest type that
  holds m (compressed sparse rows, as ``scipy.sparse.csr_array`` keeps them, there with int32 for both);
- ``bitmap``: m values and one bit for every entry: smaller than CSR wherever more than one entry in 8 (d <= 256) or in
  16 (d <= 65,536) is left, and slower to multiply with;
- ``values``: m values alone, as papers count. No file is that small; it shows what the places cost.
"""

from __future__ import annotations

from collections.abc import Callable


def unsigned_bytes(largest: int) -> int:
    """Bytes of the smallest of uint8, uint16, uint32 and uint64 that holds ``largest``.

    >>> unsigned_bytes(255), unsigned_bytes(256), unsigned_bytes(2**32)
    (1, 2, 8)
    """
    return next(size for size in (1, 2, 4, 8) if largest < 256**size)


def csr(n: int, d: int, entries: int, itemsize: int = 4) -> int:
    """Values, column indices and row pointers.

    >>> csr(100, 300, 5000)      # 4 and 2 bytes an entry; 101 pointers of 2 bytes
    30202
    """
    return entries * (itemsize + unsigned_bytes(d - 1)) + (n + 1) * unsigned_bytes(entries)


def bitmap(n: int, d: int, entries: int, itemsize: int = 4) -> int:
    """Values and a bit for every place.

    >>> bitmap(100, 300, 5000)
    23750
    """
    return entries * itemsize + (n * d + 7) // 8


def values(n: int, d: int, entries: int, itemsize: int = 4) -> int:
    """Values alone."""
    return entries * itemsize


FORMATS: dict[str, Callable[..., int]] = {"csr": csr, "bitmap": bitmap, "values": values}


def entries_that_fit(form: str, n: int, d: int, nbytes: int, itemsize: int = 4) -> int:
    """The most entries of an (n, d) matrix that ``nbytes`` hold; 0 where not one does.

    >>> entries_that_fit("bitmap", 100, 300, 23750)
    5000
    """
    low, high = 0, n * d
    while low < high:
        middle = (low + high + 1) // 2
        if FORMATS[form](n, d, middle, itemsize) <= nbytes:
            low = middle
        else:
            high = middle - 1
    return low
