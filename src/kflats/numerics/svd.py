"""Truncated SVD under row weights and a right metric: closed forms, never full matrices.

    minimise over U (n, r), V (r, d):   || W^{1/2} (A - U V) R ||_F^2

With P the r leading eigenvectors of the smaller Gram of W^{1/2} A R, the minimiser is U = A R P',
V = P R^{-1}: the row weights are never undone, so rows of weight zero get their projection instead of
0 / 0. Only R is inverted; it is floored (see ``inverse_metric``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.errors import KflatsError
from kflats.numerics.gram import cluster_grams, top_eigenvectors
from kflats.numerics.rows import GRAM_BLOCK, MetricRows, Rows, as_rows, check_finite, check_weights


@dataclass(frozen=True)
class LowRank:
    """``coordinates`` (n, r) and ``basis`` (r, d) with A ~ coordinates @ basis; ``spectrum`` holds all
    eigenvalues of the weighted Gram, descending; ``error`` = the minimised sum, ``total`` = its value at rank 0."""

    coordinates: Tensor
    basis: Tensor
    spectrum: Tensor
    error: float
    total: float


def truncated_svd(
    matrix: Tensor | Rows, rank: int, *, weights: Tensor | None = None, metric: Tensor | None = None
) -> LowRank:
    """Best rank-``rank`` approximation under row weights (n,) and a right metric (d, d).

    Goes through the smaller Gram (d x d, or n x n when n < d), in float64, and reads the matrix by
    blocks. Choose it when d is at most a few thousand; ``range_finder_svd`` is for wider matrices.

    Accuracy: singular values below about 1e-7 of the largest (float32 sources) are noise; they carry
    1e-14 of the energy.

    Raises:
        KflatsError: rank outside 1..min(n, d), NaN or infinite values, unusable weights.

    >>> a = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    >>> truncated_svd(a, 1).error
    1.0
    """
    rows = as_rows(matrix)
    n, d = rows.shape
    _check_rank(rank, n, d)
    check_finite(rows)
    check_weights(weights, n)
    work: Rows = rows if metric is None else MetricRows(rows, metric)
    if n < d:
        spectrum, basis = _through_row_gram(work, rank, weights)
    else:
        gram = cluster_grams(work, torch.zeros(n, dtype=torch.uint8, device=rows.device), 1, weights)[0]
        spectrum, basis = top_eigenvectors(gram, rank)
    return _finish(work, spectrum, basis.to(work.dtype), metric)


def range_finder_svd(
    matrix: Tensor | Rows,
    rank: int,
    *,
    weights: Tensor | None = None,
    oversample: int = 16,
    passes: int = 4,
    seed: int = 0,
) -> LowRank:
    """Randomized range finder (Halko, Martinsson & Tropp 2011, algorithms 4.4 and 5.1): costs
    O(n d (r + oversample)) a pass and never forms a d x d Gram. Choose it for rank much below d;
    the error exceeds the best by a factor that ``passes`` power iterations bring close to 1.

    ``spectrum`` holds the rank + oversample values found, not all d.

    >>> range_finder_svd(torch.eye(6)[:, :3], 3).error < 1e-5
    True
    """
    rows = as_rows(matrix)
    n, d = rows.shape
    _check_rank(rank, n, d)
    check_finite(rows)
    check_weights(weights, n)
    generator = torch.Generator().manual_seed(seed)
    width = min(rank + oversample, n, d)
    basis = torch.randn(width, d, generator=generator).to(rows.device, rows.dtype)
    basis = torch.linalg.qr(basis.T).Q.T
    total = 0.0
    for step in range(passes + 1):
        product = torch.zeros(d, width, dtype=torch.float64, device=rows.device)
        small = torch.zeros(width, width, dtype=torch.float64, device=rows.device)
        total = 0.0
        for start, block in rows.blocks(GRAM_BLOCK):
            if weights is not None:
                block = block * weights[start : start + len(block)].to(block.dtype).sqrt().unsqueeze(1)
            coordinates = block @ basis.T
            total += float(block.square().sum(dtype=torch.float64))
            small += coordinates.T @ coordinates
            if step < passes:
                product += block.T @ coordinates
        if step < passes:
            basis = torch.linalg.qr(product.to(rows.dtype)).Q.T
    values, turn = torch.linalg.eigh(small)
    leading = (turn.flip(1).T @ basis.to(torch.float64))[:rank]
    return _finish(rows, values.flip(0).clamp_min(0), leading.to(rows.dtype), None, total=total)


def inverse_metric(metric: Tensor, floor: float = 1e-6) -> Tensor:
    """R^{-1} of a right metric, singular values below ``floor`` of the largest raised to it.

    A metric is measured on data and often singular (an input that never fires); without a floor its
    inverse would send noise to infinity in directions that the data never judged.
    """
    u, s, vh = torch.linalg.svd(metric.to(torch.float64), full_matrices=False)
    if float(s[0]) <= 0:
        raise KflatsError("a right metric of zeros judges nothing", cause="calibration data never reached the layer")
    inverse: Tensor = (vh.T / s.clamp_min(floor * float(s[0]))) @ u.T
    return inverse.to(metric.dtype)


def project(rows: Rows, basis: Tensor) -> Tensor:
    """Coordinates (n, r) of all rows in an orthonormal ``basis`` (r, d), by blocks."""
    out = torch.empty(rows.shape[0], basis.shape[0], dtype=rows.dtype, device=rows.device)
    for start, block in rows.blocks(GRAM_BLOCK):
        torch.matmul(block, basis.T, out=out[start : start + len(block)])
    return out


def _finish(work: Rows, spectrum: Tensor, basis: Tensor, metric: Tensor | None, total: float | None = None) -> LowRank:
    total = float(spectrum.sum()) if total is None else total
    error = max(total - float(spectrum[: len(basis)].sum()), 0.0)
    coordinates = project(work, basis)
    out = basis if metric is None else basis @ inverse_metric(metric.to(basis.dtype))
    return LowRank(coordinates, out, spectrum, error, total)


def _through_row_gram(rows: Rows, rank: int, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    n, d = rows.shape
    a = rows.take(torch.arange(n, device=rows.device)).to(torch.float64)
    if weights is not None:
        a = a * weights.to(torch.float64).sqrt().unsqueeze(1)
    values, vectors = top_eigenvectors(a @ a.T, rank)
    # Right vectors u'A / sigma; QR repairs those of a null singular value into an orthonormal completion.
    basis = torch.linalg.qr((vectors @ a).T).Q.T
    spectrum = torch.zeros(d, dtype=torch.float64, device=rows.device)
    spectrum[:n] = values
    return spectrum, basis


def _check_rank(rank: int, n: int, d: int) -> None:
    if not 1 <= rank <= min(n, d):
        raise KflatsError(
            f"rank {rank} is outside 1..{min(n, d)} for a {n} x {d} matrix",
            hint="choose a rank in that range, or a budget instead of a rank",
        )
