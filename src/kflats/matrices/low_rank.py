"""Matrices of one or two dense factors: a dense matrix, a low-rank pair, and its interpolative form."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.common.schema import JsonObject
from kflats.matrices.base import (
    Matrix,
    check_rows,
    copy_trainable,
    each_once,
    inverse_of,
    refresh_after_load,
    with_rows,
)
from kflats.matrices.flats import order_dtype


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

    def rows(self, index: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """As ``Matrix.rows``."""
        return F.embedding(index, self.weight).to(dtype or self.weight.dtype)

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


def _check_product(weight: Tensor, basis: Tensor) -> None:
    if weight.ndim != 2 or basis.ndim != 2 or weight.shape[1] != basis.shape[0]:
        raise KflatsError(
            f"factors of shapes {tuple(weight.shape)} and {tuple(basis.shape)} cannot be multiplied",
            cause="the second must have as many rows as the first has columns",
        )


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
        _check_product(weight, basis)
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

    def rows(self, index: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """As ``Matrix.rows``: coordinates times the basis."""
        dtype = dtype or self.weight.dtype
        basis = self.basis.to(dtype)
        return each_once(index, lambda ids: F.embedding(ids, self.weight).to(dtype) @ basis)

    def vecmat(self, x: Tensor) -> Tensor:
        """(x U) V: r (n + d) products a vector."""
        return (x @ self.weight.to(x.dtype)) @ self.basis.to(x.dtype)

    def matvec(self, x: Tensor) -> Tensor:
        """(x V') U': r (n + d) products a vector."""
        return (x @ self.basis.T.to(x.dtype)) @ self.weight.T.to(x.dtype)

    def dense(self) -> Tensor:
        """U V, in the type of the factors."""
        return self.weight @ self.basis

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """As ``Matrix.factors``."""
        return self.weight.to(dtype), self.basis.to(dtype)

    def spec(self) -> JsonObject:
        """Kind, shape and rank."""
        return {"kind": self.kind, "shape": list(self.shape), "rank": self.basis.shape[0]}

    def resized(self, n: int) -> LowRankMatrix:
        """As ``Matrix.resized``; new rows have the mean coordinates of all rows."""
        check_rows(n)
        resized = LowRankMatrix(with_rows(self.weight.detach(), n), self.basis.detach().clone())
        return copy_trainable(self, resized)


class InterpolativeMatrix(Matrix):
    """M[:, order] = [weight, weight @ basis]: r columns of M are stored, the others are mixtures of them.

    Args:
        weight: the r columns, (n, r).
        basis: (r, d - r), column j holds the r numbers that mix the stored columns to one other column.
        order: (d,) int16 (int32 beyond 32768 columns), the columns of M, the stored ones first.

    Stores r (n + d - r) numbers and the order: the matrix of a ``LowRankMatrix`` with r^2 numbers less. Rounding
    ``weight`` costs more by the norm of [I, basis], which ``condition`` bounds. Choose it where bytes count, and for
    full rank, where it is as large as the dense matrix and no larger. Fine-tuning leaves the identity block as it is.

    Raises:
        KflatsError: shapes that do not fit, or an order that is no permutation.

    >>> m = InterpolativeMatrix(torch.tensor([[4.0], [8.0]]), torch.tensor([[0.25, 0.5]]),
    ...                         torch.tensor([1, 0, 2], dtype=torch.int16))
    >>> m.dense().tolist(), m.condition
    ([[1.0, 4.0, 2.0], [2.0, 8.0, 4.0]], 0.5)
    """

    kind = "interpolative"

    def __init__(self, weight: Tensor, basis: Tensor, order: Tensor) -> None:
        super().__init__()
        _check_product(weight, basis)
        d = weight.shape[1] + basis.shape[1]
        if tuple(order.shape) != (d,) or order.dtype != order_dtype(d):
            raise KflatsError(
                f"an order of {order.dtype} and shape {tuple(order.shape)} does not fit {d} columns",
                cause=f"expected {order_dtype(d)} and {(d,)}",
            )
        self.weight = nn.Parameter(weight)
        self.basis = nn.Parameter(basis)
        self.order: Tensor
        self.register_buffer("order", order)
        self.register_load_state_dict_post_hook(refresh_after_load)  # type: ignore[no-untyped-call]
        self.refresh()

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d): d columns in ``order``."""
        return self.weight.shape[0], self.order.shape[0]

    @property
    def condition(self) -> float:
        """Largest absolute entry of ``basis``, the block beside the identity: rounding errors grow with it."""
        return float(self.basis.detach().abs().max()) if self.basis.numel() else 0.0

    def refresh(self) -> None:
        """Refuse an order that is no permutation."""
        if self.order.is_meta:
            return
        order = self.order.to(torch.int64)
        if not torch.equal(order.sort().values, torch.arange(len(order), device=order.device)):
            raise KflatsError("the columns' order is no permutation", hint="restore the file, or compress again")

    def rows(self, index: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """As ``Matrix.rows``: the stored columns of a row, and the others as their combinations."""
        dtype = dtype or self.weight.dtype
        return each_once(index, lambda ids: self._columns(F.embedding(ids, self.weight).to(dtype)))

    def vecmat(self, x: Tensor) -> Tensor:
        """x C, then the other columns as x C T: r (n + d - r) products a vector."""
        return self._columns(x @ self.weight.to(x.dtype))

    def matvec(self, x: Tensor) -> Tensor:
        """(x_stored + x_others T') C': r (n + d - r) products a vector."""
        # Two gathers instead of a split of one: a recorded graph then knows both sizes.
        rank = self.weight.shape[1]
        order = self.order.to(torch.int64)
        stored, made = x.index_select(-1, order[:rank]), x.index_select(-1, order[rank:])
        return (stored + made @ self.basis.T.to(x.dtype)) @ self.weight.T.to(x.dtype)

    def dense(self) -> Tensor:
        """C [I, T], its columns in their own order."""
        return self._columns(self.weight)

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """As ``Matrix.factors``."""
        return self.weight.to(dtype), self._columns(torch.eye(self.weight.shape[1]).to(self.weight)).to(dtype)

    def spec(self) -> JsonObject:
        """Kind, shape and rank; the order is a tensor."""
        return {"kind": self.kind, "shape": list(self.shape), "rank": self.weight.shape[1]}

    def resized(self, n: int) -> InterpolativeMatrix:
        """As ``Matrix.resized``; new rows are the mean of all rows of C."""
        check_rows(n)
        weight = with_rows(self.weight.detach(), n)
        resized = InterpolativeMatrix(weight, self.basis.detach().clone(), self.order.clone())
        return copy_trainable(self, resized)

    def _columns(self, coordinates: Tensor) -> Tensor:
        """``(*b, r)`` values of the stored columns -> ``(*b, d)``, all columns in M's own order."""
        made = torch.cat([coordinates, coordinates @ self.basis.to(coordinates.dtype)], dim=-1)
        return made.index_select(-1, inverse_of(self.order))
