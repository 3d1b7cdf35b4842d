"""Types of numbers by their names in files: "float32" for ``torch.float32``."""

from __future__ import annotations

import torch

from kflats.common.errors import KflatsError


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The type of a name.

    Raises:
        KflatsError: torch has no such type.

    >>> dtype_of("bfloat16")
    torch.bfloat16
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise KflatsError(
            f"{name[:40]!r} is not a type of numbers",
            cause="a damaged or hand-edited file, or one of another version of torch",
        )
    return found
