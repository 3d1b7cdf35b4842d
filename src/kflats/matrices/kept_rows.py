"""Rows of a coded table that lookups have put together, kept for the next lookups: text repeats its words.

To put a row together takes many times as long as to copy it. Few distinct words are most of any text, so that a small
part of a table serves nearly all lookups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kflats.matrices.base import is_recording

KEPT = 2**21
"""Numbers that are kept at most: 8 MB in float32, of 384 columns 5,461 rows."""


_FEW = 32
_ALLOWED = ContextVar("kflats_keeps_rows", default=True)


@contextmanager
def no_kept_rows() -> Iterator[None]:
    """Inside, lookups keep no rows and read none that are kept: their last digits depend on what was read before.

    >>> with no_kept_rows():
    ...     may_keep_rows()
    False
    """
    token = _ALLOWED.set(False)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def may_keep_rows() -> bool:
    """Whether what a lookup does may depend on the values of its index: not in graphs that are recorded, under
    transforms of ``torch.func``, nor where a mode watches every operator (fake tensors, counts of operations)."""
    plain = torch._C._functorch.peek_interpreter_stack() is None and not is_in_torch_dispatch_mode()
    return plain and _ALLOWED.get() and not is_recording()


class KeptRows:
    """A store of rows of one table, in one type. Threads may share it.

    When it is full it begins anew: words that texts repeat are soon back. Memory grows with what is kept, because pages
    that no row was written to take none.

    Args:
        n, d: the shape of the table. dtype: of the rows.

    >>> table = torch.arange(12.0).view(4, 3)
    >>> kept = KeptRows(4, 3, torch.float32)
    >>> kept.look_up(torch.tensor([[1, 1, 3]]), lambda rows: table[rows])[0, 2].tolist()
    [9.0, 10.0, 11.0]
    """

    def __init__(self, n: int, d: int, dtype: torch.dtype) -> None:
        self._shape, self._dtype, self._lock = (n, d), dtype, threading.Lock()
        self._used, self._store = 0, self._new()

    def look_up(self, index: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor | None:
        """``(*b,)`` -> ``(*b, d)``, of which ``compute``, ``(t,) -> (t, d)``, gives those that are not kept yet.

        None: there was no room for these.

        Raises:
            IndexError: an index outside 0..n-1.
        """
        flat = index.reshape(-1)
        places, rows = store = self._store  # another thread may replace it
        found = places.index_select(0, flat)
        missing = found < 0
        if bool(missing.any()):
            new = flat[missing].to(torch.int64)
            new = new.unique() if len(new) > _FEW else new  # of few, a row that is kept twice costs less than a search
            if not self._has_room(len(new)):
                return None
            computed = compute(new)
            with self._lock:
                if self._store is not store or self._used + len(new) > len(rows):
                    return None
                first, self._used = self._used, self._used + len(new)
                rows.narrow(0, first, len(new)).copy_(computed)
                taken = torch.arange(first, self._used, dtype=places.dtype, device="cpu")
                places.index_copy_(0, new, taken)  # last: a row that is found is there
            found = places.index_select(0, flat)
        return rows.index_select(0, found).reshape(*index.shape, self._shape[1])

    def _has_room(self, many: int) -> bool:
        with self._lock:
            if self._used + many <= len(self._store[1]):
                return True
            if many <= len(self._store[1]):
                self._used, self._store = 0, self._new()
            return False

    def _new(self) -> tuple[Tensor, Tensor]:
        """The place of each row, -1 where there is none, and the rows."""
        n, d = self._shape
        with torch.inference_mode(False):  # later calls with gradients could not use inference tensors
            places = torch.full((n,), -1, dtype=torch.int32, device="cpu")
            return places, torch.empty(min(n, KEPT // d), d, dtype=self._dtype, device="cpu")
