"""Robust PCA by principal component pursuit (Candes, Li, Ma & Wright, J. ACM 2011), by the inexact augmented Lagrange
multiplier method (Lin, Chen & Ma, arXiv:1009.5055, algorithm 5).

    minimise over L, S:   || L ||_* + lambda || S ||_1   with L + S = A,   lambda = 1 / sqrt(max(n, d))

Exact under incoherence for a low rank and few gross errors anywhere. No compression: S must be stored too, and the
rank of L follows from A. A reference for what can be told apart from gross errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pursuit:
    """``low_rank`` + ``sparse`` ~ the matrix; ``residual`` = ||A - L - S||_F / ||A||_F at the end."""

    low_rank: Tensor
    sparse: Tensor
    rank: int
    residual: float
    iterations: int
    converged: bool


def principal_component_pursuit(matrix: Tensor, *, tolerance: float = 1e-7, max_iterations: int = 500) -> Pursuit:
    """L and S of an (n, d) matrix; converged where the residual is below ``tolerance``. One thin SVD an iteration.

    >>> a = torch.outer(torch.arange(1.0, 21.0), torch.ones(15))
    >>> spoilt = a.clone()
    >>> spoilt[3, 4] += 100
    >>> bool((principal_component_pursuit(spoilt).low_rank - a).abs().max() < 1e-3)
    True
    """
    a = matrix.to(torch.float64)
    size = float(torch.linalg.vector_norm(a))
    if size == 0:
        return Pursuit(matrix.clone(), torch.zeros_like(matrix), 0, 0.0, 0, True)
    weight = max(a.shape) ** -0.5
    spectral = float(torch.linalg.matrix_norm(a, 2))
    dual = a / max(spectral, float(a.abs().max()) / weight)
    penalty = 1.25 / spectral
    limit = penalty * 1e7
    low, sparse = torch.zeros_like(a), torch.zeros_like(a)
    rank, residual, step = 0, 1.0, 0
    while residual >= tolerance and step < max_iterations:
        step += 1
        sparse = _shrink(a - low + dual / penalty, weight / penalty)
        u, s, v = torch.linalg.svd(a - sparse + dual / penalty, full_matrices=False)
        s = (s - 1 / penalty).clamp_min(0)
        rank = int((s > 0).sum())
        low = (u[:, :rank] * s[:rank]) @ v[:rank]
        left = a - low - sparse
        dual = dual + penalty * left
        penalty = min(1.5 * penalty, limit)
        residual = float(torch.linalg.vector_norm(left)) / size
    return Pursuit(low.to(matrix.dtype), sparse.to(matrix.dtype), rank, residual, step, residual < tolerance)


def _shrink(x: Tensor, by: float) -> Tensor:
    return x.sign() * (x.abs() - by).clamp_min(0)
