"""Matrix: the one noun. Every method makes one, every layer eats one.

A ``Matrix`` stands for a dense (n, d) matrix M that is never formed. Row i is what enters a
layer: a token of an embedding table, an input neuron of a linear layer.

The first factor is always called ``weight``: under that name a torch state dict carries a
layer's matrix, so a checkpoint of factors collides with the dense shape (a loud size mismatch)
wherever kflats is not imported, instead of leaving random weights in place.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from kflats.common.schema import JsonObject


class Matrix(nn.Module):
    """A factored (n, d) matrix M that is never formed: what methods make and layers eat.

    ``rows``, ``vecmat`` and ``matvec`` are differentiable with respect to the stored factors, in
    eager mode, under ``torch.compile(fullgraph=True)`` and in ``torch.export`` with dynamic shapes.
    Factors stored in a smaller type than the model's are widened before they are multiplied: half
    precision products are slow on most CPUs, and would round twice.
    """

    kind: str
    weight: nn.Parameter

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(n, d), the shape of the dense matrix."""

    @abstractmethod
    def rows(self, index: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """``(*b,)`` integers -> ``(*b, d)``: the rows of M at ``index``, all that an embedding does.

        ``dtype`` is the type to multiply in and to return, by default the stored one.

        Raises:
            IndexError: an index outside 0..n-1 (negative ones included), as ``nn.Embedding`` does.
        """

    @abstractmethod
    def vecmat(self, x: Tensor) -> Tensor:
        """``(*b, n)`` -> ``(*b, d)``: x @ M, what a linear layer computes, in x's type."""

    @abstractmethod
    def matvec(self, x: Tensor) -> Tensor:
        """``(*b, d)`` -> ``(*b, n)``: x @ M.T, what a tied output head computes, in x's type."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The whole (n, d) matrix, for tests, export and error reports."""

    @abstractmethod
    def spec(self) -> JsonObject:
        """JSON-able geometry: with it ``matrix_from_spec`` builds an empty matrix of the same shapes."""

    @abstractmethod
    def resized(self, n: int) -> Matrix:
        """A new, independent Matrix of ``n`` rows, for a vocabulary that shrinks or grows.

        The last rows are dropped, or new ones are appended at the mean coordinates of the rows
        they join. Rows that stay are unchanged, bit for bit.

        Raises:
            KflatsError: n < 1.
        """

    def tensors(self) -> dict[str, Tensor]:
        """What a file stores, by name: factors, and labels or an order where there are any."""
        found: dict[str, Tensor] = {"weight": self.weight}
        for name in ("basis", "labels", "order"):
            if isinstance(value := getattr(self, name, None), Tensor):
                found[name] = value
        return found

    @property
    def num_values(self) -> int:
        """Stored floating-point numbers (labels not counted)."""
        return sum(t.numel() for t in self.tensors().values() if t.is_floating_point())

    @property
    def nbytes(self) -> int:
        """Stored bytes, labels included."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    @property
    def memory_bytes(self) -> int:
        """Bytes held in memory: of all parameters and buffers, those that are derived from stored tensors included."""
        return sum(t.numel() * t.element_size() for t in [*self.parameters(), *self.buffers()])

    def refresh(self) -> None:
        """Recompute what is derived from stored tensors (call after loading into them)."""

    def extra_repr(self) -> str:
        n, d = self.shape
        return f"{n}, {d}, values={self.num_values}"
