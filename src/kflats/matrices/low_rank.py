"""LowRankMatrix: one flat, the result of an SVD."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.common.schema import JsonObject
from kflats.matrices.base import Matrix
from kflats.matrices.lookup import FEW, distinct, is_jit_tracing

M = TypeVar("M", bound=Matrix)


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
        return self.weight.shape[0], self.basis.shape[1]

    def rows(self, index: Tensor, *, dtype: torch.dtype | None = None, sparse: bool = False) -> Tensor:
        """As ``Matrix.rows``; ``sparse`` asks for a sparse gradient of ``weight``."""
        dtype = dtype or self.weight.dtype
        recorded = torch.compiler.is_compiling() or is_jit_tracing()
        # On CUDA the search for distinct rows would make the host wait; one large product is quicker there.
        if recorded or index.device.type != "cpu" or index.numel() < FEW:
            return F.embedding(index, self.weight, sparse=sparse).to(dtype) @ self.basis.to(dtype)
        values, inverse = distinct(index)
        return F.embedding(inverse, F.embedding(values, self.weight, sparse=sparse).to(dtype) @ self.basis.to(dtype))

    def vecmat(self, x: Tensor) -> Tensor:
        return (x @ self.weight.to(x.dtype)) @ self.basis.to(x.dtype)

    def matvec(self, x: Tensor) -> Tensor:
        return (x @ self.basis.T.to(x.dtype)) @ self.weight.T.to(x.dtype)

    def dense(self) -> Tensor:
        return self.weight @ self.basis

    def factors(self) -> tuple[Tensor, Tensor]:
        """(n, r) and (r, d), whose product is M."""
        return self.weight, self.basis

    def spec(self) -> JsonObject:
        return {"kind": self.kind, "shape": list(self.shape), "rank": self.basis.shape[0]}

    def resized(self, n: int) -> LowRankMatrix:
        check_rows(n)
        found = LowRankMatrix(with_rows(self.weight.detach(), n), self.basis.detach().clone())
        return copy_trainable(self, found)


def check_rows(n: int) -> None:
    """Refuse to resize a matrix to nothing."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise KflatsError(f"a matrix cannot be resized to {n!r} rows", hint="a whole number, at least 1")


def with_rows(table: Tensor, n: int) -> Tensor:
    """A copy of the first n rows of ``table``, continued by its mean row where n exceeds it."""
    extra = n - table.shape[0]
    if extra <= 0:
        return table[:n].clone()
    mean = table.mean(0, dtype=torch.float32).to(table.dtype)
    return torch.cat([table, mean.expand(extra, -1)])


def copy_trainable(source: Matrix, target: M) -> M:
    """``target`` with the ``requires_grad`` flags of ``source``'s factors."""
    for name, parameter in target.named_parameters():
        parameter.requires_grad_(source.get_parameter(name).requires_grad)
    return target
