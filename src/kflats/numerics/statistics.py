"""Sums over calibration data, added a few rows at a time: products x x', and squared gradients of single samples.

Products are float32 (float64 if the layer is), sums over batches float64. For Z = X M the gradient of sample s is
D_s = X_s' G_s, positions added. The squared gradients are summed over s:

    row  (n,)  sum_s sum_j (D_s)_ij^2          column  (d,)  sum_s sum_i (D_s)_ij^2

A batch's own gradient, sum_s D_s, does not tell these sums. Row sums alone do not need D_s either:
sum_j (D_s)_ij^2 = (X_s' K X_s)_ii with K = G_s G_s' (T x T), which is cheaper while positions are fewer than neurons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kflats.numerics.gram import add_lower_gram_, lower_gram
from kflats.numerics.large_matrices import zero_matrix

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
            rows = _joined(parts)
            self._parts, self._found = parts, (lower_gram(rows), rows.sum(0))
        return self._found


class Moments:
    """sum x x' (n, n) and sum x (n,) of all rows added; rows wait until there are enough for a good product.

    ``products``: where the last product is kept for others that are given the same rows; None: it is not.
    """

    def __init__(self, n: int, products: Products | None, device: torch.device) -> None:
        self._gram = zero_matrix(n, n, device=device)
        self._sum = torch.zeros(n, dtype=torch.float64, device=device)
        self._products = products
        self._waiting: list[Tensor] = []
        self._others: list[Tensor] = []
        self._limit = min(_ROWS, n)

    @staticmethod
    def nbytes(n: int, copies: int = 1) -> int:
        """At most: the sums and the rows that wait, 2 ``copies`` of them where others are added with them."""
        return 8 * (n * n + n) + 4 * copies * n * min(_ROWS, n)

    def add(self, rows: Tensor, others: Tensor | None = None) -> None:
        """Rows (P, n), at least float32; they must not change any more.

        Args:
            others: (P, n), always or never given: sum x y' of both is then the Gram, and there is no sum x.
        """
        self._waiting.append(rows)
        self._others += [] if others is None else [others]
        if sum(map(len, self._waiting)) >= self._limit:
            self._flush()

    def finish(self) -> tuple[Tensor, Tensor]:
        """(sum x x', sum x), float64; of the Gram its lower blocks only, which ``mirror_`` completes."""
        self._flush()
        return self._gram, self._sum

    def _flush(self) -> None:
        if self._waiting and self._products is not None and not self._others:
            gram, total = self._products.of(self._waiting)
            self._gram += gram
            self._sum += total
        elif self._waiting:
            rows, others = _joined(self._waiting), _joined(self._others) if self._others else None
            add_lower_gram_(self._gram, rows, others)
            if others is None:
                self._sum += rows.sum(0)
        self._waiting, self._others = [], []


def gradient_rows(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and others whose sum x y' is sum_s D_s D_s' (n, n), D_s = X_s' G_s the gradient of sample s by the weight
    (n, d): positions add first.

    The diagonal of the sum is the row Fisher information. With K = G_s G_s' it is X_s' K X_s, which is cheaper while
    positions are fewer than neurons.

    Args:
        x: (B, T, n) what enters; the rows may share its memory. g: (B, T, d) the gradient of each sample's loss by its
            outputs.
    """
    reached = torch.linalg.vector_norm(wide(g), dim=(0, 2)) != 0  # a loss may read one position
    if not bool(reached.all()):
        x, g = x[:, reached], g[:, reached]
    x, g = _together(wide(x), wide(g))
    positions, n, d = x.shape[1], x.shape[2], g.shape[2]
    if positions * (positions * (n + d) + n * n) < (positions + n) * n * d:
        live = torch.linalg.vector_norm(g, dim=2) != 0  # padding adds nothing
        return _chosen(x, live), _chosen(torch.bmm(torch.bmm(g, g.mT), x), live)
    rows = torch.bmm(g.mT, x).flatten(0, 1)
    return rows, rows


def _joined(parts: list[Tensor]) -> Tensor:
    """The rows of all ``parts``, without a copy of a single one."""
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _chosen(x: Tensor, live: Tensor) -> Tensor:
    """The rows (P, n) of ``x`` (B, T, n) where ``live`` (B, T), without a copy of all."""
    return x.flatten(0, 1) if bool(live.all()) else x[live]


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


_TEMPORARY = 1 << 24  # numbers in a temporary: 64 MB
_SWEEP = 32  # reading and squaring one gradient takes as long as multiplying this many positions into it

ROW, COLUMN = "row_fisher", "column_fisher"


def wide(x: Tensor) -> Tensor:
    """At least float32: squares of half precision overflow beyond 256."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def add_squares(sums: Mapping[str, Tensor], x: Tensor, g: Tensor) -> None:
    """Add a batch's squared per-sample gradients of M, with Z = X M, to ``sums`` in place.

    Args:
        sums: float64 sums by name; of row_fisher (n,) and column_fisher (d,) those wanted.
        x: (B, T, n) what enters. g: (B, T, d) the gradient of each sample's loss by its outputs.
    """
    x, g = wide(x), wide(g)
    x, g = _together(x, g)
    positions, n, d = x.shape[1], x.shape[2], g.shape[2]
    sides = (ROW in sums) + (COLUMN in sums)
    if sides * positions * positions * (n + d) < (positions + _SWEEP) * n * d:
        step = max(1, _TEMPORARY // max(1, positions * (positions + max(n, d))))
        for part_x, part_g in zip(x.split(step), g.split(step), strict=True):
            if ROW in sums:
                sums[ROW] += _quadratic(part_x, part_g)
            if COLUMN in sums:
                sums[COLUMN] += _quadratic(part_g, part_x)
        return
    step = max(1, _TEMPORARY // max(1, n * d))
    for part_x, part_g in zip(x.split(step), g.split(step), strict=True):
        add_gradients(sums, torch.bmm(part_x.mT, part_g))


def add_gradients(sums: Mapping[str, Tensor], gradients: Tensor) -> None:
    """Add the squares of whole per-sample gradients (B, n, d), which are overwritten."""
    if COLUMN not in sums:
        sums[ROW] += torch.linalg.vector_norm(gradients, dim=2).square().sum(0)
        return
    squares = gradients.square_().sum(0)
    if ROW in sums:
        sums[ROW] += squares.sum(1)
    if COLUMN in sums:
        sums[COLUMN] += squares.sum(0)


def add_lookup_squares(sums: Mapping[str, Tensor], index: Tensor, g: Tensor) -> None:
    """The same where inputs are one-hot: ``index`` (B, T) rows that were read, g (B, T, d).

    A row read twice by one sample has one gradient, the sum of both.
    """
    _, row, gradient = _by_row(index, g)
    squares = gradient.square_()
    if ROW in sums:
        sums[ROW].index_add_(0, row, squares.sum(1).double())
    if COLUMN in sums:
        sums[COLUMN] += squares.sum(0)


def add_tied_squares(sums: Mapping[str, Tensor], index: Tensor, g: Tensor, hidden: Tensor, logits: Tensor) -> None:
    """The same for a table that is read and is the output head too: its gradients of one sample add before squaring.

    Args:
        sums: as ``add_squares``.
        index: (B, T) rows read; g: (B, T, d) the gradient of what was read.
        hidden: (B, P, d) what enters the head, of logits = hidden @ M'; logits: (B, P, n) their gradient.
    """
    hidden, logits = _together(wide(hidden), wide(logits))
    sample, row, gradient = _by_row(index, g)
    gradient = gradient.to(hidden.dtype)
    rows_only = set(sums) == {ROW}
    for s in range(len(hidden)):
        h, p = hidden[s], logits[s]
        here = sample == s
        r, e = row[here], gradient[here]
        if rows_only and len(h) < h.shape[1]:
            # ||head + read||^2 = ||head||^2 + 2 <head, read> + ||read||^2, without an n x d temporary.
            squares = _quadratic(p.unsqueeze(0), h.unsqueeze(0))
            cross = ((p[:, r].T @ h) * e).sum(1)
            sums[ROW] += squares
            sums[ROW].index_add_(0, r, (2 * cross + e.square().sum(1)).double())
        else:
            add_gradients(sums, (p.T @ h).index_add_(0, r, e).unsqueeze(0))
    if ROW in sums:
        sums[ROW].clamp_min_(0)  # rounding of a sum that cancels


def _quadratic(x: Tensor, g: Tensor) -> Tensor:
    """sum_s diag(X_s' G_s G_s' X_s), (n,)."""
    inner = torch.bmm(torch.bmm(g, g.mT), x)
    return inner.mul_(x).sum((0, 1)).clamp_min_(0)


def _by_row(index: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sample, row, summed gradient) of every row that a sample read; negative indices are left out."""
    g = wide(g)
    samples = torch.arange(len(index), device=index.device).unsqueeze(1).expand_as(index)
    read = index >= 0
    rows = index[read].long()
    width = int(rows.max()) + 1 if len(rows) else 1
    keys, place = torch.unique(samples[read] * width + rows, return_inverse=True)
    gradient = g.new_zeros(len(keys), g.shape[2]).index_add_(0, place, g[read])
    return keys // width, keys % width, gradient


def _together(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, g.dtype)
    return x.to(dtype), g.to(dtype)
