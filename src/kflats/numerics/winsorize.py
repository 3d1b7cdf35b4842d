"""A matrix with its far entries held back (winsorized): the start of a fit under gross errors.

    limit_ij = HELD m_i c_j,    m_i = median_j |a_ij|,    c_j = median_i |a_ij| / m_i

The leading directions of an SVD follow entries that are a hundred times too large, and a fit that begins there keeps
these directions. Winsorized (Tukey 1962) to the size of their rows and columns, such entries are ordinary noise. Rows
and columns may differ in scale, and medians tolerate that a part of the entries is wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kflats.numerics.rows import BLOCK, MappedRows, Rows

HELD = 3.0
"""The limit in medians. Of normal entries it holds back those beyond two standard deviations, one in twenty."""

SAMPLE = 4096
"""Rows in the sample for the medians of columns."""

_WIDEST = 1e6  # a column's entries in medians of their rows: beyond, a row's median is rounding


class HeldBackRows(MappedRows):
    """Rows with every entry within HELD times the size that its row and column suggest.

    >>> from kflats.numerics.rows import TensorRows
    >>> a = torch.ones(4, 3)
    >>> a[0, 0] = 100.0
    >>> HeldBackRows(TensorRows(a)).take(torch.tensor([0])).tolist()
    [[3.0, 1.0, 1.0]]
    """

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows, rows.shape[1], rows.dtype)
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
        """A bound of all entries; 0 where most entries are 0, and nothing is left."""
        return float(self.sizes.max() * self.columns.max())

    def changed(self, block: Tensor, index: slice | Tensor) -> Tensor:
        limit = self.sizes[index].unsqueeze(1) * self.columns
        return torch.minimum(torch.maximum(block, -limit), limit)
