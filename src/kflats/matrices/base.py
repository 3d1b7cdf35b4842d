"""Matrix: the form in which every method hands over its result, and which every layer computes with.

A ``Matrix`` stands for a dense (n, d) matrix M that is never formed. Row i belongs to one input of a
layer: a token of an embedding table, or an input neuron of a linear layer.

The first factor is always called ``weight``, as the table of a dense layer is. Where kflats is not imported, loading
a checkpoint of factors then stops with a size mismatch, instead of leaving random weights in place.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.common.schema import JsonObject


class Matrix(nn.Module):
    """A factored (n, d) matrix M that is never formed: methods make it and layers compute with it.

    ``rows``, ``vecmat`` and ``matvec`` are differentiable with respect to the stored factors, in
    eager mode, under ``torch.compile(fullgraph=True)`` and in ``torch.export`` with dynamic shapes.
    Factors stored in a smaller type than the model's are widened before they are multiplied: half
    precision products are slow on most CPUs, and would round twice.
    """

    kind: str
    weight: nn.Parameter
    ready = True
    """False while a matrix that was built empty waits for ``refresh``."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(n, d), the shape of the dense matrix."""

    @abstractmethod
    def rows(self, index: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """``(*b,)`` integers -> ``(*b, d)``: the rows of M at ``index``, as an embedding returns them.

        ``dtype`` is the type to multiply in and to return, by default the stored one.

        Raises:
            IndexError: an index outside 0..n-1 (negative ones included), as ``nn.Embedding`` does.
        """

    @abstractmethod
    def vecmat(self, x: Tensor) -> Tensor:
        """``(*b, n)`` -> ``(*b, d)``: x @ M, as a linear layer computes it, in x's type."""

    @abstractmethod
    def matvec(self, x: Tensor) -> Tensor:
        """``(*b, d)`` -> ``(*b, n)``: x @ M.T, as a tied output head computes it, in x's type."""

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
        """The tensors that a file stores, by name: factors, and labels or an order where there are any."""
        tensors: dict[str, Tensor] = {"weight": self.weight}
        for name in ("basis", "labels", "order"):
            if isinstance(value := getattr(self, name, None), Tensor):
                tensors[name] = value
        return tensors

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
        """Bytes of all parameters and buffers, which include tensors that are derived from stored ones."""
        return sum(t.numel() * t.element_size() for t in [*self.parameters(), *self.buffers()])

    def refresh(self) -> None:
        """Compute again all that is derived from stored tensors (call after loading into them)."""

    def _check_ready(self) -> None:
        if not self.ready:
            raise KflatsError(
                f"a matrix of kind {self.kind!r} cannot be used before its tensors are filled",
                cause="it was built empty, and its tensors were set without load_state_dict",
                hint="matrix.refresh() once they are filled",
                command="load the model again",
            )

    def extra_repr(self) -> str:
        n, d = self.shape
        return f"{n}, {d}, values={self.num_values}"
