"""Codecs: frozen values that say how a Matrix's numbers are stored. One axis of a recipe, independent of the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kflats.errors import KflatsError

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Float:
    """Every factor in one floating-point type.

    Args:
        dtype: "same" keeps the type the model was loaded in; "float32", "float16" or "bfloat16" chooses one.
            A half-sized type buys twice the coordinates in the same bytes: worth it when the model
            runs in that type anyway.

    Raises:
        KflatsError: an unknown type.

    >>> Float("bfloat16").itemsize("float32"), Float().itemsize(torch.float16)
    (2, 2)
    """

    dtype: str = "same"

    def __post_init__(self) -> None:
        if self.dtype not in ("same", *_DTYPES):
            raise KflatsError(
                f"no codec stores numbers as {self.dtype!r}",
                hint=f"Float(dtype) with one of: same, {', '.join(_DTYPES)}",
            )

    def torch_dtype(self, original: torch.dtype | str) -> torch.dtype:
        """The stored type of a weight whose own type is ``original`` (a torch dtype or its name).

        >>> Float().torch_dtype("float16")
        torch.float16
        """
        if self.dtype != "same":
            return _DTYPES[self.dtype]
        kept = getattr(torch, original.removeprefix("torch."), None) if isinstance(original, str) else original
        if not isinstance(kept, torch.dtype) or not kept.is_floating_point or kept.itemsize < 2:
            raise KflatsError(
                f"factors cannot be kept in the weight's own type, {original}",
                cause="the weight is quantized already, or not floating point",
                hint="load the model in float32 or bfloat16, or name a type: Float('float16')",
            )
        return kept

    def itemsize(self, original: torch.dtype | str) -> int:
        """Bytes of one stored number."""
        return self.torch_dtype(original).itemsize


VALUES = (Float,)
"""The codecs a plan file may name."""
