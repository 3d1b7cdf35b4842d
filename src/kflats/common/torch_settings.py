"""Torch's settings of a process or a thread: what is computed must not depend on those that a caller has made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def usual_settings() -> Iterator[None]:
    """Inside, torch is as it is by itself: no autocast, new tensors of float32 on the CPU. Afterwards as before.

    For computations with their own types: autocast would round their products, and a default type or device would make
    tensors that do not fit theirs.

    >>> with torch.autocast("cpu", dtype=torch.bfloat16), usual_settings():
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if (dtype := torch.get_default_dtype()) != torch.float32:
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
