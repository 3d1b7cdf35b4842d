"""Rounding to 2 to 8 bits with a scale for each row, or for each group of columns in a row.

    a_ij  ~  scale_ig q_ij,      q_ij whole, |q_ij| <= 2^(bits-1) - 1,      scale_ig = max_j |a_ij| / (2^(bits-1) - 1)

Scales are stored in one floating-point type, float16 where it holds all of them (``scales``), and entries are rounded
by the stored scales. Where a scale is rounded down, by at most 2^-11 in float16, the largest entry loses as much: a
sixteenth of a step. In bfloat16 it is 2^-9, a quarter of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.coding.scales import Scales, scales_of
from kflats.numerics.rows import GRAM_BLOCK, Rows, as_rows, check_finite, slices


@dataclass(frozen=True)
class AbsmaxCode:
    """``levels`` (n, d) int8, ``scales`` (n, groups); ``bits`` of a level, 2 to 8; ``group`` columns share a scale (the
    last of them may be fewer)."""

    levels: Tensor
    scales: Scales
    bits: int
    group: int

    @property
    def stored_bits(self) -> int:
        """Levels and scales."""
        return self.levels.numel() * self.bits + 8 * self.scales.values.nbytes

    def rows(self, index: Tensor) -> Tensor:
        """The rows at ``index`` (m,), decoded, (m, d) float32."""
        index = index.to(torch.int64)
        scales = self.scales.wide[index].to(torch.float32)
        wide = scales.repeat_interleave(self.group, 1)[:, : self.levels.shape[1]]
        return self.levels[index].to(torch.float32) * wide

    def dense(self) -> Tensor:
        """(n, d) float32."""
        return self.rows(torch.arange(len(self.levels)))


def absmax_code(
    matrix: Tensor | Rows, bits: int, group: int | None = None, *, dtype: torch.dtype | None = None
) -> AbsmaxCode:
    """Round every row, or every ``group`` columns of it, by its largest entry.

    Args:
        matrix: (n, d), finite.
        bits: 2 to 8.
        group: None: one scale a row. 8 bits are nearly lossless either way; 4 bits want groups of 32 to 128.
        dtype: of the scales; None: float16, or float32 where rows are so unlike that float16 does not hold all of them.

    Raises:
        KflatsError: other bits or groups; NaN or infinite values.

    >>> absmax_code(torch.tensor([[7.0, -3.0], [0.0, 0.0]]), 4).dense().tolist()
    [[7.0, -3.0], [0.0, 0.0]]
    """
    if bits not in range(2, 9):
        raise KflatsError(f"rounding to {bits!r} bits is not supported", hint="2 to 8 bits")
    rows = as_rows(matrix)
    n, d = rows.shape
    if group is not None and (isinstance(group, bool) or not isinstance(group, int) or group < 1):
        raise KflatsError(
            f"groups of {group!r} columns are not supported",
            hint="a whole number from 1, or None for whole rows",
            command="a whole number from 1: 'int4 64'",
        )
    check_finite(rows)
    size = min(group or d, d)
    groups, most = -(-d // size), 2 ** (bits - 1) - 1
    wanted = torch.cat([_grouped(block, groups, size).abs().amax(2) for _, block in rows.blocks(GRAM_BLOCK)])
    scales = scales_of(wanted.to(torch.float64) / most, dtype)
    held, levels = scales.wide, torch.empty(n, d, dtype=torch.int8)
    for here, block in slices(rows, GRAM_BLOCK):
        padded = _grouped(block, groups, size).to(torch.float64)
        step = held[here].unsqueeze(2)
        q = torch.where(step > 0, padded / step, torch.zeros_like(padded)).round().clamp(-most, most)
        levels[here] = q.flatten(1)[:, :d].to(torch.int8)
    return AbsmaxCode(levels, scales, bits, size)


def _grouped(block: Tensor, groups: int, size: int) -> Tensor:
    """(m, d) -> (m, groups, size), zeros at the end."""
    return torch.nn.functional.pad(block, (0, groups * size - block.shape[1])).view(len(block), groups, size)
