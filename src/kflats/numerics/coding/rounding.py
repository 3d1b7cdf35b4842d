"""Rounding to 2 to 8 bits with a scale for each row, or for each group of columns in a row.

    a_ij  ~  scale_ig q_ij,      q_ij whole, |q_ij| <= 2^(bits-1) - 1,      scale_ig = max_j |a_ij| / (2^(bits-1) - 1)

Scales are stored in one floating-point type, in a unit in which it holds all of them, and entries are rounded
by the stored scales. Where a scale is rounded down, by at most 2^-11 in float16, the largest entry loses as much: a
sixteenth of a step. In bfloat16 it is 2^-9, a quarter of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.numerics.rows import Rows, slices

_IN_CACHE = 2**18  # numbers that are rounded at a time


@dataclass(frozen=True)
class Scales:
    """``values``, of some floating-point type, in units of 2^``unit``."""

    values: Tensor
    unit: int = 0

    @property
    def wide(self) -> Tensor:
        """The scales themselves, float64."""
        return self.values.to(torch.float64) * 2.0**self.unit


@dataclass(frozen=True)
class RoundedRows:
    """``levels`` (n, d) integers and ``scales`` (n, groups): a group is d / groups columns, rounded up."""

    levels: Tensor
    scales: Scales


def absmax_code(rows: Rows, bits: int, groups: int, dtype: torch.dtype) -> RoundedRows:
    """Round every row, or each of its ``groups`` of columns, by the largest entry; scales as ``dtype``.

    >>> from kflats.numerics.rows import TensorRows
    >>> code = absmax_code(TensorRows(torch.tensor([[7.0, -3.0], [0.0, 0.0]])), 4, 1, torch.float32)
    >>> code.levels.tolist(), code.scales.values.tolist()
    ([[7, -3], [0, 0]], [[1.0], [0.0]])
    """
    n, d = rows.shape
    most = 2 ** (bits - 1) - 1

    def grouped(block: Tensor) -> Tensor:
        """(m, d) -> (m, groups, columns of a group), zeros at the end."""
        size = -(-d // groups)
        return torch.nn.functional.pad(block, (0, groups * size - d)).view(len(block), groups, size)

    size = max(1, _IN_CACHE // d)
    wanted = torch.cat([grouped(block).abs().amax(2) for _, block in rows.blocks(size)])
    scales = scales_of(wanted.to(torch.float64) / most, dtype)
    steps = torch.where(scales.wide > 0, scales.wide, torch.inf).unsqueeze(2)  # of a group of zeros
    levels = torch.empty(n, d, dtype=torch.int8)
    for here, block in slices(rows, size):
        q = (grouped(block).to(torch.float64) / steps[here]).round_().clamp_(-most, most)
        levels[here] = q.flatten(1)[:, :d].to(torch.int8)
    return RoundedRows(levels, scales)


def rounded_basis(rows: Tensor, dtype: torch.dtype) -> RoundedRows:
    """(m, d) rows of bases as 8-bit integers with one scale a row, as ``dtype``."""
    scale = rows.abs().amax(1) / 127
    safe = torch.where(scale > 0, scale, torch.ones_like(scale)).unsqueeze(1)
    return RoundedRows((rows / safe).round().to(torch.int8), scales_of(scale, dtype))


def scales_of(values: Tensor, dtype: torch.dtype) -> Scales:
    """``values``, none negative, as ``dtype``, in a unit of their own where the type does not hold all of them in full.

    If the largest is more than 2^28 times the least, float16 does not hold both in any unit. The least are then rounded
    up: none becomes 0, and numbers that are divided by one stay as small as they were.

    >>> scales_of(torch.tensor([1.0, 0.5]), torch.float16).unit, scales_of(torch.tensor([3e-6]), torch.float16).unit
    (0, -19)
    """
    wide = values.to(torch.float64)
    live = wide[wide > 0]
    if not live.numel() or not bool(torch.isfinite(live).all()):
        return Scales(values.to(dtype))
    least, most = float(live.min()), float(live.max())
    limits = torch.finfo(dtype)
    if least >= limits.smallest_normal and most <= limits.max:
        return Scales(values.to(dtype))
    # The largest between 1 and 2, or as much larger as the least need. Numbers in the type's last octave may be rounded
    # beyond its largest.
    unit = min(_octave(most), _octave(least) - _octave(limits.smallest_normal))
    unit = max(unit, _octave(most) - _octave(limits.max) + 1)
    smallest = limits.smallest_normal * limits.eps
    held = wide * 2.0**-unit
    held = torch.where(held < limits.smallest_normal, (held / smallest).ceil() * smallest, held)
    return Scales(held.to(dtype), unit)


def _octave(value: float) -> int:
    return math.floor(math.log2(value))
