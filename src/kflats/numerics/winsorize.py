"""A matrix with its far entries held back: where a fit under gross errors starts from.

    limit_ij = HELD m_i c_j,    m_i = median_j |a_ij|,    c_j = median_i |a_ij| / m_i

An SVD follows entries that are a hundred times too large, and what starts from it stays with them: they are the
directions it has. Brought down to the size of their rows and columns (winsorized; Tukey 1962) they are noise among
others. Rows and columns may differ in scale; medians bear with a part of the entries being wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kflats.numerics.rows import BLOCK, Rows

HELD = 3.0
"""Limits in medians: of normal entries those beyond two standard deviations are held back, one in twenty."""

SAMPLE = 4096
"""Rows that columns' medians are taken of."""

_WIDEST = 1e6  # a column's entries in medians of their rows: beyond, a row's median is rounding


class HeldBackRows:
    """Rows with every entry within HELD times the size that its row and column suggest.

    >>> from kflats.numerics.rows import TensorRows
    >>> a = torch.ones(4, 3)
    >>> a[0, 0] = 100.0
    >>> HeldBackRows(TensorRows(a)).take(torch.tensor([0])).tolist()
    [[3.0, 1.0, 1.0]]
    """

    def __init__(self, rows: Rows) -> None:
        self.source, self.shape, self.dtype, self.device = rows, rows.shape, rows.dtype, rows.device
        self.sizes = torch.cat([block.abs().median(1).values for _, block in rows.blocks(BLOCK)])
        alive = (self.sizes > 0).nonzero().squeeze(1)
        chosen = alive[:: max(1, -(-len(alive) // SAMPLE))]
        if len(chosen):
            relative = rows.take(chosen).abs() / self.sizes[chosen].unsqueeze(1)
            self.columns = HELD * relative.median(0).values.clamp_max(_WIDEST)
        else:
            self.columns = torch.zeros(rows.shape[1], dtype=rows.dtype, device=rows.device)

    @property
    def largest(self) -> float:
        """No entry is larger; 0 where most entries are 0, and nothing is left."""
        return float(self.sizes.max() * self.columns.max())

    def blocks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        for start, block in self.source.blocks(size):
            yield start, self._held(block, self.sizes[start : start + len(block)])

    def take(self, index: Tensor) -> Tensor:
        return self._held(self.source.take(index), self.sizes[index])

    def _held(self, block: Tensor, sizes: Tensor) -> Tensor:
        limit = sizes.unsqueeze(1) * self.columns
        return torch.minimum(torch.maximum(block, -limit), limit)
