"""What a way to store a table makes of it: the numbers as they are decoded, and every byte that a decoder needs.

Sizes include codebooks, scales, rotations and labels: these decide for small tables.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.importance.protocol import Weighting
from kflats.numerics.rows import TensorRows, check_finite

UNIT_BYTES = 4
"""A power of two beside numbers in float16."""


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
        """sum_i w_i |a_i - b_i|^2 / sum_i w_i |a_i|^2; all rows alike without weights.

        >>> Coded("halves", torch.tensor([[1.0], [0.0]]), 1).error(torch.tensor([[2.0], [0.0]]))
        0.25
        """
        w = torch.ones(len(original)).double() if weights is None else weights.double()
        lost, whole = (
            float(w @ torch.linalg.vector_norm(x, dim=1, dtype=torch.float64).square())
            for x in (original - self.table, original)
        )
        return lost / whole if whole else 0.0


class Baseline(ABC):
    """A way to store a table of numbers, at one size; a frozen value."""

    family: str
    """The way without its size: the name of its curve."""
    accepts: ClassVar[frozenset[str]] = frozenset()
    """The kinds of weighting that it can use (``Weighting.kinds``)."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The way and its size."""

    @property
    def curve(self) -> object:
        """What sizes have in common that are read as one curve."""
        return self.family

    @abstractmethod
    def _code(self, table: Tensor, weighting: Weighting, seed: int) -> tuple[Tensor, int]:
        """The decoded table, and the bytes of its file."""

    def code(self, table: Tensor, weighting: Weighting | None = None, seed: int = 0) -> Coded:
        """Code and decode (n, d) ``table``.

        Raises:
            KflatsError: values that are not finite, a weighting that it cannot use, or a size that it cannot have.
        """
        weighting = weighting or Weighting()
        if not weighting.kinds <= self.accepts:
            raise KflatsError(f"{self.name} cannot use weights of {', '.join(sorted(weighting.kinds - self.accepts))}")
        given = table.detach().to("cpu", torch.float32).contiguous()
        check_finite(TensorRows(given))
        return Coded(self.name, *self._code(given, weighting, seed))


def unit_of(values: Tensor) -> float:
    """The power of two that brings the largest magnitude to 1/2 .. 1, so that float16 holds numbers of any table.

    >>> unit_of(torch.tensor([3.0, -1.0])), unit_of(torch.zeros(2))
    (4.0, 1.0)
    """
    largest = float(values.abs().max())
    return 2.0 ** math.ceil(math.log2(largest)) if largest > 0 else 1.0


def halved(values: Tensor) -> Tensor:
    """``values`` as float16 stores them.

    Raises:
        KflatsError: float16 cannot hold them.
    """
    found = values.to(torch.float16).to(torch.float32)
    if not bool(torch.isfinite(found).all()):
        raise KflatsError("float16 cannot hold the numbers of this table")
    return found
