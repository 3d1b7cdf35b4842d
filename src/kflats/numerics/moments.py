"""Sums of x x' over many rows that come a few at a time, and of x; float32 products, float64 sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 256  # columns of a Gram at once
_ROWS = 1024  # rows worth a product of their own; fewer wait, since adding up takes as long as 100 rows


class Products:
    """The last product: layers that are given one tensor (queries, keys, values) share it."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._found: tuple[Tensor, Tensor] | None = None

    def of(self, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        """(lower Gram, sum) of the rows of all ``parts``."""
        same = len(parts) == len(self._parts) and all(a is b for a, b in zip(parts, self._parts, strict=True))
        if not same or self._found is None:
            rows = torch.cat(parts) if len(parts) > 1 else parts[0]
            self._parts, self._found = parts, (lower_gram(rows), rows.sum(0))
        return self._found


class Moments:
    """sum x x' (n, n) and sum x (n,) of all rows added; rows wait until there are enough for a good product.

    ``products``: where the last product is kept for others that are given the same rows; None: it is not.
    """

    def __init__(self, n: int, products: Products | None, device: torch.device) -> None:
        self._gram = torch.zeros(n, n, dtype=torch.float64, device=device)
        self._sum = torch.zeros(n, dtype=torch.float64, device=device)
        self._products = products
        self._waiting: list[Tensor] = []
        self._limit = min(_ROWS, n)
        self.rows = 0

    @staticmethod
    def nbytes(n: int) -> int:
        """At most: the sums and the rows that wait."""
        return 8 * (n * n + n) + 4 * n * min(_ROWS, n)

    def add(self, rows: Tensor) -> None:
        """Rows (P, n), at least float32; they must not change any more."""
        self.rows += len(rows)
        self._waiting.append(rows)
        if sum(map(len, self._waiting)) >= self._limit:
            self._flush()

    def finish(self) -> tuple[Tensor, Tensor]:
        """(sum x x', sum x), float64; of the Gram its lower blocks only, which ``mirror_`` completes."""
        self._flush()
        return self._gram, self._sum

    def _flush(self) -> None:
        if self._waiting:
            gram, total = (self._products or Products()).of(self._waiting)
            self._gram += gram
            self._sum += total
            self._waiting = []


def lower_gram(x: Tensor) -> Tensor:
    """X'X (P, n) -> (n, n), its lower blocks only: half the work; ``mirror_`` completes a sum of them."""
    n = x.shape[1]
    found = x.new_zeros(n, n)
    for start in range(0, n, _BLOCK):
        end = min(start + _BLOCK, n)
        found[start:, start:end] = x[:, start:].T @ x[:, start:end]
    return found


def mirror_(total: Tensor) -> None:
    """Complete a sum of ``lower_gram`` in place."""
    n = len(total)
    for start in range(0, n, _BLOCK):
        end = min(start + _BLOCK, n)
        total[:start, start:end] = total[start:end, :start].T


def nearest_product(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(l, R) with l (x) R nearest to sum_k l_k (x) R_k in Frobenius norm (Van Loan and Pitsianis 1993), sum l = 1.

    Args:
        pairs: (n,) >= 0 and (d, d) positive semidefinite, float64; so are the answers.

    >>> l, r = nearest_product([(torch.tensor([1.0, 3.0]), torch.eye(2)), (torch.tensor([1.0, 3.0]), torch.eye(2))])
    >>> l.tolist(), r.diagonal().tolist()
    ([0.25, 0.75], [8.0, 8.0])
    """
    left = torch.stack([one for one, _ in pairs], 1)
    right = torch.stack([other.flatten() for _, other in pairs], 1)
    # The leading singular vectors are left @ x and right @ (a @ x), x from Grams as small as pairs are many.
    a, b = left.T @ left, right.T @ right
    values, vectors = torch.linalg.eig(b @ a)
    top = vectors[:, values.real.argmax()].real.abs()  # Perron: all of one sign
    r = right @ (a @ top)
    # l that goes with this R: the least squares answer.
    el = left @ (right.T @ r) / (r @ r).clamp_min(torch.finfo(r.dtype).tiny)
    total = el.sum().clamp_min(torch.finfo(r.dtype).tiny)
    return el / total, (r * total).view_as(pairs[0][1])
