"""What a rival makes of a table: the numbers as they come back, and every byte that a decoder needs.

A rival is a frozen value. ``rival.code(table, seed)`` fits, rounds, counts and decodes; a few can be told how much each
row counts. Sizes never leave out codebooks, scales, rotations or labels: that is where small tables are lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kflats.errors import KflatsError
from kflats.numerics.rows import BLOCK, TensorRows, check_finite, check_weights


@dataclass(frozen=True, eq=False)
class Coded:
    """A table after coding: ``table`` (n, d) float32 as it is decoded, and the ``nbytes`` that a file of it needs."""

    name: str
    table: Tensor
    nbytes: int

    @property
    def bits(self) -> float:
        """Stored bits per number of the original."""
        return 8 * self.nbytes / self.table.numel()

    def error(self, original: Tensor, weights: Tensor | None = None) -> float:
        """sum_i w_i |a_i - a^_i|^2 / sum_i w_i |a_i|^2; all rows alike without weights.

        >>> Coded("halves", torch.tensor([[1.0], [0.0]]), 1).error(torch.tensor([[2.0], [0.0]]))
        0.25
        """
        lost = whole = 0.0
        for start in range(0, len(original), BLOCK):
            here = slice(start, start + BLOCK)
            a, b = original[here].double(), self.table[here].double()
            w = torch.ones(len(a)).double() if weights is None else weights[here].double()
            lost += float((w * (a - b).square().sum(1)).sum())
            whole += float((w * a.square().sum(1)).sum())
        return lost / whole if whole else 0.0


class Rival(Protocol):
    """A way to store a table of numbers, at one size."""

    @property
    def name(self) -> str:
        """What it is called in a table: the way and its size."""

    @property
    def family(self) -> str:
        """What its curve is called: the way without its size."""

    @property
    def weighs(self) -> bool:
        """Whether it can take row weights."""

    def code(self, table: Tensor, seed: int = 0, *, weights: Tensor | None = None) -> Coded:
        """Code and decode (n, d) ``table``, row i counting ``weights[i]`` where it can."""


def checked(rival: Rival, table: Tensor, weights: Tensor | None) -> Tensor:
    """``table`` as contiguous float32 on the CPU.

    Raises:
        KflatsError: no matrix, NaN or infinite values, weights that are none, or that this rival cannot take.
    """
    if table.ndim != 2 or not table.numel():
        raise KflatsError(f"{rival.name} codes a matrix, not a tensor of shape {tuple(table.shape)}")
    if weights is not None:
        if not rival.weighs:
            raise KflatsError(f"{rival.name} cannot weigh rows", hint="weights=None")
        check_weights(weights, len(table))
    found = table.detach().to("cpu", torch.float32).contiguous()
    check_finite(TensorRows(found))
    return found


def unit_of(values: Tensor) -> float:
    """The power of two that brings the largest magnitude to 1/2 .. 1, so that float16 holds numbers of any table.

    >>> unit_of(torch.tensor([3.0, -1.0])), unit_of(torch.zeros(2))
    (4.0, 1.0)
    """
    largest = float(values.abs().max()) if values.numel() else 0.0
    return 2.0 ** math.ceil(math.log2(largest)) if largest > 0 else 1.0


def halved(values: Tensor) -> Tensor:
    """``values`` as float16 stores them."""
    return values.to(torch.float16).to(torch.float32)


UNIT_BYTES = 4
"""A power of two beside numbers in float16."""
