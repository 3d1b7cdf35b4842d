"""Methods without a geometry of their own: the matrix as it is, and the choice of another method by the budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.importance.protocol import Weighting
from kflats.matrices.registry import DenseMatrix
from kflats.methods.protocol import Factored, Method, Problem, Produces, refuse_bytes
from kflats.methods.svd import SVD
from kflats.numerics.rows import Rows, whole_matrix


@dataclass(frozen=True)
class KeepDense(Method):
    """The matrix itself. With ``Float()`` the weight stays unchanged, which a plan writes where factors would save
    nothing; with another codec all numbers are stored in its type or as its integers.

    >>> KeepDense().cost((10, 4), 3, 4)
    160
    """

    accepts: ClassVar[frozenset[str]] = frozenset({"rows", "left", "right"})
    produces: ClassVar[Produces] = "dense"

    def _fit(self, problem: Problem) -> Factored:
        least = self.cost(problem.rows.shape, 0, problem.itemsize)
        if problem.nbytes < least:
            raise refuse_bytes(problem, least, f"all numbers at {problem.itemsize} bytes")
        return Factored(DenseMatrix(whole_matrix(problem.rows)))

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


@dataclass(frozen=True)
class Auto(Method):
    """The way to store each weight that loses least for its bytes, chosen for all weights together.

    The candidates are transform codes and integers with error feedback of many sizes, integers of 8 and 4 bits, all
    numbers in float16, low-rank pairs in float16, and the weight unchanged. Where the model casts inputs to the type of
    a weight, pairs have that type, and not float16. In a table with 300 times as many rows as columns a transform code
    has up to 8 flats. The error of a candidate is measured by encoding, that of a pair by the spectrum, both under the
    importance; then bytes go where they save most. A plan names the chosen methods and codecs.

    Choose it for a budget in bytes over a whole model.
    """

    accepts: ClassVar[frozenset[str]] = frozenset({"rows", "left", "right"})
    produces: ClassVar[Produces] = "choice"

    def _fit(self, problem: Problem) -> Factored:
        raise KflatsError("Auto() cannot fit rows", hint="another method")

    def cost(self, shape: tuple[int, int], rank: int, itemsize: int) -> int:
        """As a low-rank pair."""
        return SVD().cost(shape, rank, itemsize)
