"""Random pruning: entries drawn without looking; what every choice of entries must beat."""

from __future__ import annotations

import torch
from torch import Tensor


def random_mask(matrix: Tensor, entries: int, seed: int = 0) -> Tensor:
    """Boolean, of the matrix's shape, True at ``entries`` places drawn by ``seed``.

    >>> int(random_mask(torch.zeros(5, 4), 7).sum())
    7
    """
    mask = torch.zeros(matrix.numel(), dtype=torch.bool)
    mask[torch.randperm(matrix.numel(), generator=torch.Generator().manual_seed(seed))[:entries]] = True
    return mask.view(matrix.shape)
