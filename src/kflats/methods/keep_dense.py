"""No factorization: the matrix itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kflats.importance.protocol import Weighting
from kflats.matrices.registry import DenseMatrix
from kflats.methods.protocol import Fit, Method, Problem, Product, refuse_bytes
from kflats.numerics.rows import GRAM_BLOCK, Rows


@dataclass(frozen=True)
class KeepDense(Method):
    """The matrix itself. With ``Float()`` the weight stays unchanged, which a plan writes where factors would save
    nothing; with another codec all numbers are stored in its type or as its integers.

    >>> KeepDense().cost((10, 4), 3, 4)
    160
    """

    accepts: ClassVar[frozenset[str]] = frozenset({"rows", "left", "right"})
    produces: ClassVar[Product] = "dense"

    def _fit(self, problem: Problem) -> Fit:
        least = self.cost(problem.rows.shape, 0, problem.itemsize)
        if problem.nbytes < least:
            raise refuse_bytes(problem, least, f"all numbers at {problem.itemsize} bytes")
        return Fit(DenseMatrix(torch.cat([block for _, block in problem.rows.blocks(GRAM_BLOCK)])))

    def cost(self, shape: tuple[int, int], rank: int, itemsize: int) -> int:
        """Bytes of the whole matrix, whatever the rank."""
        return shape[0] * shape[1] * itemsize

    def spectrum(self, rows: Rows, weighting: Weighting) -> Tensor:
        """(min(n, d) + 1,) zeros: no error."""
        return torch.zeros(min(rows.shape) + 1, dtype=torch.float64, device=rows.device)

    @classmethod
    def automatic(cls, shape: tuple[int, int]) -> tuple[Method, ...]:
        """As ``Method.automatic``."""
        return (cls(),)
