"""Layers that eat a Matrix: embeddings, linear layers, and output heads tied to an embedding.

A layer *adopts* its matrix: both share one table of parameters and one of buffers, so the state
dict says ``layer.weight``, ``layer.basis``, ``layer.labels`` while all arithmetic stays in Matrix.
A tied place *borrows*: it refers to the owner's matrix and has no parameters of its own, so a tie
cannot come apart in saving, loading or training.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from kflats.errors import KflatsError
from kflats.nn.matrix import LowRankMatrix, Matrix


class _HasMatrix:
    """What adopting and borrowing layers share."""

    @property
    def matrix(self) -> Matrix:
        """The Matrix behind this layer."""
        return cast(Matrix, self.__dict__["_matrix"])

    def _take(self, matrix: Matrix, *, own: bool) -> None:
        # Not a registered child: its tensors would appear under two names.
        self.__dict__["_matrix"] = matrix
        self.__dict__["owns_matrix"] = own
        if own:
            self.__dict__["_parameters"] = matrix._parameters
            self.__dict__["_buffers"] = matrix._buffers
            self.__dict__["_non_persistent_buffers_set"] = matrix._non_persistent_buffers_set
            cast(nn.Module, self).register_load_state_dict_post_hook(_refresh)

    @property
    def weight(self) -> Tensor:
        """The first factor (coordinates), for code that reads a layer's dtype or device."""
        return self.matrix.weight


def _refresh(module: nn.Module, _: object) -> None:
    cast(_HasMatrix, module).matrix.refresh()


class FactoredEmbedding(_HasMatrix, nn.Embedding):  # type: ignore[misc]
    """An ``nn.Embedding`` whose table is a Matrix: ``rows(ids)``, times ``scale`` where the model has one.

    Args:
        matrix: the (n, d) table.
        padding_idx: ids there receive no gradient, in coordinates or bases.
        scale: factor on the output, rounded to the table's dtype (Gemma, BART).
        sparse: sparse gradients for the coordinates; only a LowRankMatrix can give them.
        own: False when another layer owns the matrix (a tied table).

    Raises:
        KflatsError: sparse gradients asked of flats.

    >>> layer = FactoredEmbedding(LowRankMatrix(torch.ones(5, 1), torch.ones(1, 3)))
    >>> layer(torch.tensor([[0, 4]])).shape
    torch.Size([1, 2, 3])
    """

    def __init__(
        self,
        matrix: Matrix,
        *,
        padding_idx: int | None = None,
        scale: float | None = None,
        sparse: bool = False,
        own: bool = True,
    ) -> None:
        nn.Module.__init__(self)
        if sparse and not isinstance(matrix, LowRankMatrix):
            raise KflatsError(
                "flats give no sparse gradients",
                cause="the coordinates of a FlatsMatrix are slices of one tensor",
                hint="build the original layer with sparse=False, or compress with SVD",
            )
        self.num_embeddings, self.embedding_dim = matrix.shape
        if padding_idx is not None and padding_idx < 0:
            padding_idx += matrix.shape[0]
        self.padding_idx = cast(int, padding_idx)
        self.max_norm, self.norm_type, self.scale_grad_by_freq = None, 2.0, False
        self.sparse, self.scale = sparse, scale
        self._take(matrix, own=own)

    def reset_parameters(self) -> None:
        """Nothing: a factored table has no random start."""

    def forward(self, input: Tensor) -> Tensor:
        matrix = self.matrix
        if self.sparse and isinstance(matrix, LowRankMatrix):
            out = nn.functional.embedding(input, matrix.weight, sparse=True) @ matrix.basis
        else:
            out = matrix.rows(input)
        if self.padding_idx is not None and out.requires_grad:
            out = torch.where((input == self.padding_idx).unsqueeze(-1), out.detach(), out)
        if self.scale is not None:
            out = out * torch.full((), self.scale, dtype=out.dtype, device=out.device)
        return out

    def extra_repr(self) -> str:
        n, d = self.matrix.shape
        return f"{n}, {d}, {self.matrix.kind}, values={self.matrix.num_values}, own={self.__dict__['owns_matrix']}"


class FactoredLinear(_HasMatrix, nn.Module):
    """A linear layer whose (in, out) matrix is a Matrix: x @ M + bias.

    ``rows="outputs"`` says that M's rows are output neurons (M is torch's own (out, in) weight), and
    the layer computes x @ M.T instead.
    """

    def __init__(self, matrix: Matrix, bias: Tensor | None = None, *, rows: str = "inputs") -> None:
        nn.Module.__init__(self)
        if rows not in ("inputs", "outputs"):
            raise KflatsError(f"rows={rows!r} is neither 'inputs' nor 'outputs'")
        self.row_side = rows
        self.in_features, self.out_features = matrix.shape if rows == "inputs" else matrix.shape[::-1]
        self._take(matrix, own=True)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))

    def forward(self, x: Tensor) -> Tensor:
        out = self.matrix.vecmat(x) if self.row_side == "inputs" else self.matrix.matvec(x)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.matrix.kind}, rows={self.row_side}"


class FactoredHead(_HasMatrix, nn.Module):
    """An output head tied to a factored embedding: logits = h @ M.T + bias, M borrowed from the embedding."""

    def __init__(self, matrix: Matrix, bias: nn.Parameter | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = matrix.shape
        self._take(matrix, own=False)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        out = self.matrix.matvec(x)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, tied {self.matrix.kind}"
