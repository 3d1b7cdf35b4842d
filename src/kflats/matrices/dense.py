"""DenseMatrix: all numbers of the matrix itself, in a smaller type than the model computes in."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.common.schema import JsonObject
from kflats.matrices.base import Matrix, check_rows, copy_trainable, with_rows


class DenseMatrix(Matrix):
    """M = weight (n, d), unfactored: half the bytes in float16, widened to the model's type where it is used.

    Its tensor has the name and the shape of the dense layer's own. So it must also have the orientation of that table
    (``own_matrix_rows``): a program without kflats then loads the right values.

    Raises:
        KflatsError: a weight that is no matrix.

    >>> m = DenseMatrix(torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float16))
    >>> m.rows(torch.tensor([1]), dtype=torch.float32), m.nbytes
    (tensor([[3., 4.]], grad_fn=<ToCopyBackward0>), 8)
    """

    kind = "dense"

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        if weight.ndim != 2:
            raise KflatsError(
                f"a weight of shape {tuple(weight.shape)} is no matrix", cause="a matrix has two dimensions, (n, d)"
            )
        self.weight = nn.Parameter(weight)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d), of the stored numbers."""
        return self.weight.shape[0], self.weight.shape[1]

    def rows(self, index: Tensor, *, dtype: torch.dtype | None = None, sparse: bool = False) -> Tensor:
        """As ``Matrix.rows``; ``sparse`` asks for a sparse gradient."""
        return F.embedding(index, self.weight, sparse=sparse).to(dtype or self.weight.dtype)

    def vecmat(self, x: Tensor) -> Tensor:
        """x W, n d products a vector."""
        return x @ self.weight.to(x.dtype)

    def matvec(self, x: Tensor) -> Tensor:
        """x W', n d products a vector."""
        return x @ self.weight.T.to(x.dtype)

    def dense(self) -> Tensor:
        """A copy of W."""
        return self.weight.clone()

    def spec(self) -> JsonObject:
        """Kind and shape."""
        return {"kind": self.kind, "shape": list(self.shape)}

    def resized(self, n: int) -> DenseMatrix:
        """As ``Matrix.resized``; new rows are the mean of all."""
        check_rows(n)
        return copy_trainable(self, DenseMatrix(with_rows(self.weight.detach(), n)))
