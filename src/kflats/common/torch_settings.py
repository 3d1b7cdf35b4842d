"""Torch's settings of a thread: what is computed must not depend on those that a caller has made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Thread

import torch


@contextmanager
def usual_settings() -> Iterator[None]:
    """Inside, there is no autocast, and new tensors are on the CPU. Afterwards as before, and in other threads always.

    For computations with their own types: autocast would round their products, and on another device new tensors would
    not fit theirs. The default type is that of the whole process, and is left alone: tensors are made with a type.

    >>> with torch.autocast("cpu", dtype=torch.bfloat16), usual_settings():
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes in the thread that calls it. Afterwards as before, and in other threads always.

    For many operations of a few microseconds. Sharing each among threads takes two to five times as long, and far
    longer where other processes run on the same cores: at the end of each operation all threads wait for one that the
    system has paused.

    >>> before = torch.get_num_threads()
    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    if count > 1:
        # torch keeps the last number that any thread set for threads that begin later, which would keep 1 for good.
        others = Thread(target=torch.set_num_threads, args=(count,))
        others.start()
        others.join()
    try:
        yield
    finally:
        torch.set_num_threads(count)
