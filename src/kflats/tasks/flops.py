"""Floating-point operations of one forward pass, counted as they run, not estimated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kflats.evaluation.encoding import Batch, evaluating
from kflats.model.roles import FactoredLayer


@dataclass(frozen=True)
class Flops:
    """Of one forward pass; a multiplication and the addition after it are 2. ``total`` is the sum of the others.

    Args:
        factored: inside factored layers (an embedding's depend on how many distinct tokens it sees).
        dense: inside the linear and convolution layers that are dense.
        other: everything else, above all the products of attention.
    """

    total: int
    factored: int
    dense: int
    other: int


def count_flops(model: nn.Module, inputs: Batch) -> Flops:
    """Count one ``model(**inputs)`` in eval mode: matrix products and convolutions, as torch's own counter does.

    A dense (n, d) layer takes 2 n d a position, a rank-r pair 2 r (n + d). Element-wise work (biases,
    normalisation, activations) and lookups count nothing. Attention is counted as its plain products,
    also where a fused kernel would run.

    >>> import torch
    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = nn.Linear(4, 3)
    ...     def forward(self, x):
    ...         return self.layer(x)
    >>> count_flops(Model(), {"x": torch.ones(5, 4)}).dense == 2 * 5 * 4 * 3
    True
    """
    counter = FlopCounterMode(display=False)
    # Fused attention on a CPU has no formula in torch's counter: it would count as nothing.
    with evaluating(model), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(**inputs)
    counts: dict[str, dict[Any, int]] = counter.get_flop_counts()
    root = type(model).__name__
    factored = dense = 0
    for name, module in model.named_modules():
        inside = sum(counts.get(f"{root}.{name}" if name else root, {}).values())
        if isinstance(module, FactoredLayer):
            factored += inside
        elif isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) or type(module).__name__ == "Conv1D":
            dense += inside
    total = counter.get_total_flops()
    return Flops(total, factored, dense, total - factored - dense)
