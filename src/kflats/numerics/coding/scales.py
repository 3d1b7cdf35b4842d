"""Scales of coded rows in few bytes: floating-point numbers of one type, in a unit that suits all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_NARROW = torch.float16
_WIDE = torch.float32


@dataclass(frozen=True)
class Scales:
    """``values``, of some floating-point type, in units of 2^``unit``."""

    values: Tensor
    unit: int = 0

    @property
    def wide(self) -> Tensor:
        """The scales themselves, float64."""
        return self.values.to(torch.float64) * 2.0**self.unit


def scales_of(values: Tensor, dtype: torch.dtype | None = None) -> Scales:
    """``values``, none negative, as ``dtype``, in a unit of their own where it does not hold all of them in full.

    Where even that does not, because the largest is more than 2^28 times the least in float16, the least are rounded
    up: none becomes 0, and what is divided by one stays as small as it was.

    Args:
        dtype: None: float16, or float32 where float16 does not hold all of them in full.

    >>> scales_of(torch.tensor([1.0, 0.5]), torch.float16).unit, scales_of(torch.tensor([3e-6]), torch.float16).unit
    (0, -19)
    >>> scales_of(torch.tensor([1e8, 1.0])).values.dtype, scales_of(torch.tensor([1e9, 1.0])).values.dtype
    (torch.float16, torch.float32)
    """
    wide = values.to(torch.float64)
    live = wide[wide > 0]
    if not live.numel() or not bool(torch.isfinite(live).all()):
        return Scales(values.to(dtype or _NARROW))
    least, most = float(live.min()), float(live.max())
    if dtype is None:
        dtype = _NARROW if _octave(most) - _octave(least) <= _octaves(_NARROW) else _WIDE
    limits = torch.finfo(dtype)
    if least >= limits.smallest_normal and most <= limits.max:
        return Scales(values.to(dtype))
    # The largest between 1 and 2, or as much larger as the least need.
    unit = min(_octave(most), _octave(least) - _octave(limits.smallest_normal))
    unit = max(unit, _octave(most) - _octave(limits.smallest_normal) - _octaves(dtype))
    smallest = limits.smallest_normal * limits.eps
    held = wide * 2.0**-unit
    held = torch.where(held < limits.smallest_normal, (held / smallest).ceil() * smallest, held)
    return Scales(held.to(dtype), unit)


def _octave(value: float) -> int:
    return math.floor(math.log2(value))


def _octaves(dtype: torch.dtype) -> int:
    """How many octaves a type holds in full, but the last: numbers there may be rounded beyond its largest."""
    limits = torch.finfo(dtype)
    return _octave(limits.max) - 1 - _octave(limits.smallest_normal)
