"""LowRankMatrix: one flat, the result of an SVD."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.common.schema import JsonObject
from kflats.matrices.base import Matrix, check_rows, copy_trainable, each_once, with_rows


class LowRankMatrix(Matrix):
    """M = weight @ basis with weight (n, r), basis (r, d): one flat, the result of an SVD.

    Stores r (n + d) numbers. Use it where one subspace fits the rows, or for the smallest lookups.

    Raises:
        KflatsError: factors that cannot be multiplied, or r > d.

    >>> m = LowRankMatrix(torch.ones(4, 1), torch.tensor([[1.0, 2.0]]))
    >>> m.rows(torch.tensor([3])).tolist()
    [[1.0, 2.0]]
    """

    kind = "low_rank"

    def __init__(self, weight: Tensor, basis: Tensor) -> None:
        super().__init__()
        if weight.ndim != 2 or basis.ndim != 2 or weight.shape[1] != basis.shape[0]:
            raise KflatsError(
                f"factors of shapes {tuple(weight.shape)} and {tuple(basis.shape)} cannot be multiplied",
                cause="the first must be (n, r), the second (r, d)",
            )
        if basis.shape[0] > basis.shape[1]:
            raise KflatsError(
                f"rank {basis.shape[0]} exceeds the {basis.shape[1]} columns of the matrix",
                cause="such factors take more numbers than the matrix itself",
            )
        self.weight = nn.Parameter(weight)
        self.basis = nn.Parameter(basis)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d), from both factors."""
        return self.weight.shape[0], self.basis.shape[1]

    def rows(self, index: Tensor, *, dtype: torch.dtype | None = None, sparse: bool = False) -> Tensor:
        """As ``Matrix.rows``; ``sparse`` asks for a sparse gradient of ``weight``."""
        dtype = dtype or self.weight.dtype
        basis = self.basis.to(dtype)
        return each_once(index, lambda ids: F.embedding(ids, self.weight, sparse=sparse).to(dtype) @ basis)

    def vecmat(self, x: Tensor) -> Tensor:
        """(x U) V: r (n + d) products a vector."""
        return (x @ self.weight.to(x.dtype)) @ self.basis.to(x.dtype)

    def matvec(self, x: Tensor) -> Tensor:
        """(x V') U': r (n + d) products a vector."""
        return (x @ self.basis.T.to(x.dtype)) @ self.weight.T.to(x.dtype)

    def dense(self) -> Tensor:
        """U V, in the type of the factors."""
        return self.weight @ self.basis

    def factors(self) -> tuple[Tensor, Tensor]:
        """(n, r) and (r, d), whose product is M."""
        return self.weight, self.basis

    def spec(self) -> JsonObject:
        """Kind, shape and rank."""
        return {"kind": self.kind, "shape": list(self.shape), "rank": self.basis.shape[0]}

    def resized(self, n: int) -> LowRankMatrix:
        """As ``Matrix.resized``; new rows have the mean coordinates of all rows."""
        check_rows(n)
        resized = LowRankMatrix(with_rows(self.weight.detach(), n), self.basis.detach().clone())
        return copy_trainable(self, resized)
