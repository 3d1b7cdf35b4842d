"""Rounding to 8 or 4 bits with a scale a row, or a group of columns in a row: what a user picks today.

    a_ij  ~  scale_ig q_ij,      q_ij whole, |q_ij| <= 2^(bits-1) - 1,      scale_ig = max_j |a_ij| / (2^(bits-1) - 1)

Scales are kept in float16, in units of ``unit``, a power of two, so that tables of any magnitude have them. Where that
rounds a scale down, by 2^-11 of it at most, the largest entry loses as much: a sixteenth of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.errors import KflatsError
from kflats.numerics.rows import GRAM_BLOCK, Rows, as_rows, check_finite


@dataclass(frozen=True)
class AbsmaxCode:
    """``levels`` (n, d) int8, ``scales`` (n, groups) float16 in units of ``unit``; ``bits`` of a level, 8 or 4;
    ``group`` columns share a scale (the last of them may be fewer)."""

    levels: Tensor
    scales: Tensor
    unit: float
    bits: int
    group: int

    @property
    def stored_bits(self) -> int:
        """Levels and scales."""
        return self.levels.numel() * self.bits + self.scales.numel() * 16

    def rows(self, index: Tensor) -> Tensor:
        """The rows at ``index`` (m,), decoded, (m, d) float32."""
        index = index.to(torch.int64)
        scales = self.scales[index].to(torch.float32) * self.unit
        wide = scales.repeat_interleave(self.group, 1)[:, : self.levels.shape[1]]
        return self.levels[index].to(torch.float32) * wide

    def dense(self) -> Tensor:
        """(n, d) float32."""
        return self.rows(torch.arange(len(self.levels)))


def absmax_code(matrix: Tensor | Rows, bits: int, group: int | None = None) -> AbsmaxCode:
    """Round every row, or every ``group`` columns of it, by its largest entry.

    Args:
        matrix: (n, d), finite.
        bits: 8 or 4.
        group: None: one scale a row. 8 bits are nearly lossless either way; 4 bits want groups of 32 to 128.

    Raises:
        KflatsError: other bits or groups; NaN or infinite values.

    >>> absmax_code(torch.tensor([[7.0, -3.0], [0.0, 0.0]]), 4).dense().tolist()
    [[7.0, -3.0], [0.0, 0.0]]
    """
    if bits not in (4, 8):
        raise KflatsError(f"rounding to {bits!r} bits", hint="8 or 4")
    rows = as_rows(matrix)
    n, d = rows.shape
    if group is not None and (isinstance(group, bool) or not isinstance(group, int) or group < 1):
        raise KflatsError(f"groups of {group!r} columns", hint="a whole number from 1, or None for whole rows")
    check_finite(rows)
    size = min(group or d, d)
    groups, most = -(-d // size), 2 ** (bits - 1) - 1
    largest = max(float(block.abs().max()) for _, block in rows.blocks(GRAM_BLOCK))
    # The largest scale in the middle of float16's range, so that small ones are not lost.
    unit = 2.0 ** (math.ceil(math.log2(largest)) - 8) if largest > 0 else 1.0
    levels = torch.empty(n, d, dtype=torch.int8)
    scales = torch.empty(n, groups, dtype=torch.float16)
    for start, block in rows.blocks(GRAM_BLOCK):
        padded = torch.nn.functional.pad(block, (0, groups * size - d)).view(len(block), groups, size)
        here = (padded.abs().amax(2) / (most * unit)).to(torch.float16)
        real = here.to(block.dtype).unsqueeze(2) * unit
        q = torch.where(real > 0, padded / real, torch.zeros_like(padded)).round().clamp(-most, most)
        levels[start : start + len(block)] = q.flatten(1)[:, :d].to(torch.int8)
        scales[start : start + len(block)] = here
    return AbsmaxCode(levels, scales, unit, bits, size)
