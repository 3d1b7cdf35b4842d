"""Squared gradients of single samples, from what enters a layer and the gradient of what leaves it.

For Z = X M the gradient of sample s is D_s = X_s' G_s, positions added; wanted are sums over s of its squares:

    row  (n,)  sum_s sum_j (D_s)_ij^2          column  (d,)  sum_s sum_i (D_s)_ij^2

A batch's own gradient, sum_s D_s, says nothing of them. Rows alone do not need D_s either:
sum_j (D_s)_ij^2 = (X_s' K X_s)_ii with K = G_s G_s' (T x T), cheaper while positions are fewer than neurons.
Products are float32 (float64 if the layer is), sums over batches float64.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

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
    sample, row, gradient = _by_row(index, g)
    del sample
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
