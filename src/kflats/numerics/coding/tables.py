"""Distributions of integers an encoder and a decoder agree on bit for bit: costs in sixteenths of a bit, one byte each.

A table holds, for every magnitude j = |symbol|, a cost c_j; a symbol +-j then has the integer frequency
2^(24 - c_j / 16), rounded by a fixed list of sixteen constants and a shift. No floating-point function is involved, so
that every machine finds the same frequencies. Sixteenths are fine enough: the rounding costs some .0002 bits a symbol.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.errors import KflatsError

NEVER = 255
"""The cost of a magnitude that does not occur; frequency 0."""

_SIXTEENTHS = (
    16777216, 16065888, 15384718, 14732430, 14107797, 13509648, 12936860, 12388357,
    11863109, 11360131, 10878478, 10417246, 9975569, 9552619, 9147602, 8759757,
)  # fmt: skip
"""2^(24 - k / 16), rounded."""


@dataclass(frozen=True)
class Tables:
    """K distributions over symbols -m .. m, symmetric: ``costs`` (K, m + 1) uint8, 255 where a magnitude never occurs.

    >>> Tables(torch.tensor([[0, 16]], dtype=torch.uint8)).frequencies(0).tolist()
    [8388608, 16777216, 8388608]
    """

    costs: Tensor

    def __post_init__(self) -> None:
        if self.costs.ndim != 2 or self.costs.dtype != torch.uint8 or not self.costs.shape[1]:
            raise KflatsError(f"tables of shape {tuple(self.costs.shape)}, {self.costs.dtype}", cause="a damaged file")
        if bool((self.costs == NEVER).all(1).any()):
            raise KflatsError("a table without any symbol", cause="a damaged file")

    def __len__(self) -> int:
        return len(self.costs)

    @property
    def reach(self) -> Tensor:
        """(K,) int64, the largest magnitude of each table."""
        places = torch.arange(self.costs.shape[1], device=self.costs.device)
        return torch.where(self.costs != NEVER, places, -1).amax(1)

    @property
    def magnitudes(self) -> Tensor:
        """(K, m + 1) int64, the frequency of one symbol of each magnitude (of +j alone, not of +-j)."""
        cost = self.costs.to(torch.int64)
        found = torch.tensor(_SIXTEENTHS, device=cost.device)[cost % 16] >> (cost // 16)
        return torch.where(cost == NEVER, torch.zeros_like(found), found)

    def frequencies(self, table: int) -> Tensor:
        """(2 reach + 1,) int64, the frequencies of symbols -reach .. reach of one table."""
        half = self.magnitudes[table, : int(self.reach[table]) + 1]
        return torch.cat([half.flip(0), half[1:]])

    @property
    def bits(self) -> Tensor:
        """(K, m + 1) float64, bits of one symbol of each magnitude; infinite where it never occurs."""
        found = self.magnitudes.to(torch.float64)
        total = 2 * found.sum(1, keepdim=True) - found[:, :1]
        return -(found / total).log2()

    @property
    def stored_bytes(self) -> int:
        """One byte for each cost up to the reach, and two for the reach."""
        return int((self.reach + 3).sum())


def tables_of(counts: Tensor) -> Tables:
    """The nearest tables to counts of magnitudes (K, m + 1); a magnitude of j >= 1 counts both signs.

    Magnitudes below the largest seen get half a count more, so that each of them can be coded.
    """
    counts = counts.to(torch.float64)
    seen = counts > 0
    seen[:, 0] |= ~seen.any(1)
    reachable = seen.flip(1).cumsum(1).flip(1) > 0
    each = counts + 0.5
    each[:, 1:] /= 2
    each = torch.where(reachable, each, torch.zeros_like(each))
    costs = ((each.amax(1, keepdim=True) / each).log2() * 16).round().clamp(0, NEVER - 1)
    return Tables(torch.where(reachable, costs, torch.full_like(costs, float(NEVER))).to(torch.uint8))
