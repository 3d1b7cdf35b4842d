"""Magnitude pruning: the largest entries stay (Han, Pool, Tran & Dally, NeurIPS 2015; Han, Mao & Dally, ICLR 2016).

    minimise over matrices B with m entries:   || A - B ||, in any entrywise norm

Of all masks this one has the least l1, l2 and lp error at once: nothing below is closer with the same entries.
"""

from __future__ import annotations

import torch
from torch import Tensor


def magnitude_mask(matrix: Tensor, entries: int) -> Tensor:
    """Boolean, of the matrix's shape, True at the ``entries`` largest magnitudes (at equals, any of them).

    >>> import torch
    >>> magnitude_mask(torch.tensor([[3.0, -1.0], [0.5, -2.0]]), 2).tolist()
    [[True, False], [False, True]]
    """
    mask = matrix.new_zeros(matrix.numel(), dtype=torch.bool)
    mask[matrix.abs().flatten().topk(entries).indices] = True
    return mask.view(matrix.shape)
