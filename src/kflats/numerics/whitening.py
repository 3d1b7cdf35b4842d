"""The row space of a matrix, and coordinates in which one of its Grams is the identity.

    L (d, r):   L' G L = I,   r = the rank that the numbers of G show

Where rows differ in length by many powers of ten, G may show a lower rank than the rows have. This is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.rows import GRAM_BLOCK, Rows, ScaledRows, TensorRows, WidenedRows, all_rows, slices

RANK_FLOOR = 1e-12
"""Least eigenvalue that counts, in units of the largest, of a Gram with unit diagonal: 1e-6 of a singular value."""

COLUMN_FLOOR = 1e-10
"""Shortest column that counts, in units of the longest. Shorter ones are dead neurons, or the rounding of a QR in
directions without energy. They would spoil the leading axes: an SVD is as exact as its largest value, here the
reciprocal."""

_PANEL = 96  # columns: wide enough for a fast product


def row_lengths(rows: Rows) -> Tensor:
    """(n,) Euclidean lengths, in float64."""
    parts = [torch.linalg.vector_norm(block.to(torch.float64), dim=1) for _, block in rows.blocks(GRAM_BLOCK)]
    return torch.cat(parts)


def narrow(rows: Rows) -> tuple[Rows, Tensor | None]:
    """A wide matrix (n < d) as C (n, r) and orthonormal K (r, d) with A = C K, r its rank where its rows have length 1;
    others as they are, and None."""
    n, d = rows.shape
    if n >= d:
        return rows, None
    q, t = torch.linalg.qr(all_rows(rows).T)
    lengths = torch.linalg.vector_norm(t, dim=0)
    # The rounding of a QR, in directions that the rows do not have, would look like short columns.
    _, values, turn = torch.linalg.svd((t / torch.where(lengths > 0, lengths, 1.0)).T, full_matrices=False)
    kept = values.square() > RANK_FLOOR * float(values[0]) ** 2
    if bool(kept.all()) or not bool(lengths.any()):
        return TensorRows(t.T.contiguous()), q.T
    return TensorRows(t.T @ turn[kept].T), turn[kept] @ q.T


def gram(rows: Rows, factors: Tensor | None = None) -> Tensor:
    """(d, d) A' diag(factors)^2 A, products and sums in float64."""
    total = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64, device=rows.device)
    for here, block in slices(rows, GRAM_BLOCK):
        wide = block.to(torch.float64)
        if factors is not None:
            wide = wide * factors[here].unsqueeze(1)
        total += symmetric(wide)
    return total


def symmetric(x: Tensor) -> Tensor:
    """x'x (d, d) by panels of columns; of two mirrored panels only one is multiplied."""
    d = x.shape[1]
    product = x.new_empty(d, d)
    for start in range(0, d, _PANEL):
        end = min(start + _PANEL, d)
        product[:end, start:end] = x[:, :end].T @ x[:, start:end]
        product[start:end, :start] = product[:start, start:end].T
    return product


def whiten(matrix: Tensor, floor: float = COLUMN_FLOOR) -> Tensor:
    """L (d, r) with L' ``matrix`` L = I; columns are scaled to one length first, so their units hardly matter; columns
    below ``floor`` of the longest count as zeros."""
    lengths = matrix.diagonal().clamp_min(0.0).sqrt()
    counts = lengths > floor * lengths.max()
    scale = torch.where(counts, lengths, 1.0)
    values, vectors = torch.linalg.eigh(
        torch.where(counts & counts.unsqueeze(1), matrix / scale / scale.unsqueeze(1), 0.0)
    )
    kept = values > RANK_FLOOR * float(values[-1])
    whitening: Tensor = vectors[:, kept] / values[kept].sqrt() / scale.unsqueeze(1)
    if whitening.shape[1] < len(matrix):  # back into the row space, which the scales have left
        space = torch.linalg.qr(torch.where(counts.unsqueeze(1), vectors[:, kept] * scale.unsqueeze(1), 0.0)).Q
        whitening = space @ (space.T @ whitening)
    return whitening


def least_squares(pairs: Iterable[tuple[Tensor, Tensor]], rank: int, d: int) -> Tensor:
    """X (rank, d) of the least sum of || a - c X ||^2 over blocks of coordinates c (b, rank) and rows a (b, d).

    In float64. Columns of coordinates that are zero, or repeat others, get rows of zeros in X.
    """
    inner: Tensor | None = None
    for coordinates, block in pairs:
        wide = coordinates.to(torch.float64)
        if inner is None:
            inner, outer = wide.new_zeros(rank, rank), wide.new_zeros(rank, d)
        inner += wide.T @ wide
        outer += wide.T @ block.to(torch.float64)
    if inner is None:
        return torch.zeros(rank, d, dtype=torch.float64)
    whitening = whiten(inner)
    return whitening @ (whitening.T @ outer)


def row_space(rows: Rows, factors: Tensor, lengths: Tensor) -> Tensor:
    """L (d, r) of A' diag(factors)^2 A, where r is the rank of the rows whatever their lengths (n,), not all zero.

    Raises:
        KflatsError: the longest rows hide directions that the others have.
    """
    whitening = whiten(gram(rows, factors))
    if whitening.shape[1] == rows.shape[1]:
        return whitening
    inverse = torch.where(lengths > 0, 1 / lengths, 0.0)
    # In float64, because the factors of the shortest rows overflow float32.
    unit = ScaledRows(WidenedRows(rows), inverse)
    # Only a column well above the floor here is missing there; a column near the floor is short in both.
    if whiten(gram(unit), 1e3 * COLUMN_FLOOR).shape[1] > whitening.shape[1]:
        raise too_different(lengths)
    return whitening


def too_different(lengths: Tensor) -> KflatsError:
    """The error where the shorter of very different rows are lost in rounding."""
    alive = lengths[lengths > 0]
    ratio = float(alive.max() / alive.median())
    return KflatsError(
        f"row {int(lengths.argmax())} is {ratio:.1e} times as long as the median row, which is lost in its rounding",
        cause="a damaged row, or columns or rows in different units",
        hint="remove or shorten that row, or bring columns and rows to one scale",
    )
