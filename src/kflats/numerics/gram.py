"""Weighted Gram matrices of clusters, computed whole or updated by the rows that moved.

G_c = sum over rows i of cluster c of w_i a_i a_i'  (d x d). An M-step needs the k d^2 numbers of the Grams and no rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kflats.numerics.rows import GRAM_BLOCK, Rows

_STRIPS = 4  # stripes of columns in a halved product: the fastest of 2..6 at 384 columns
_WIDE = 128  # columns; with fewer, one whole product is as fast


def cluster_grams(rows: Rows, labels: Tensor, k: int, weights: Tensor | None = None, *, halved: bool = False) -> Tensor:
    """(k, d, d) float64 Grams of all clusters in one pass; rows labelled >= k are left out.

    Products of blocks are float32 (float64 if the rows are), their sums float64. ``halved`` computes little more than
    the upper triangle, which takes two thirds of the time; the last bits differ from those of ``move_rows``.
    """
    d = rows.shape[1]
    grams = torch.zeros(k, d, d, dtype=torch.float64, device=rows.device)
    for start, block in rows.blocks(GRAM_BLOCK):
        here = labels[start : start + len(block)]
        _add(grams, block, here, None if weights is None else weights[start : start + len(block)], 1.0, halved)
    return torch.triu(grams) + torch.triu(grams, 1).transpose(1, 2) if halved else grams


def gram_of(rows: Rows, weights: Tensor | None = None) -> Tensor:
    """(d, d) float64 weighted Gram of all rows."""
    return cluster_grams(rows, torch.zeros(rows.shape[0], dtype=torch.uint8, device=rows.device), 1, weights)[0]


def move_rows(
    grams: Tensor, rows: Rows, moved: Tensor, old: Tensor, new: Tensor, weights: Tensor | None = None
) -> None:
    """Update ``grams`` in place for the rows ``moved`` that went from clusters ``old`` to ``new``."""
    for part in torch.arange(len(moved), device=moved.device).split(GRAM_BLOCK):
        index = moved[part]
        block = rows.take(index)
        w = None if weights is None else weights[index]
        _add(grams, block, old[part], w, -1.0)
        _add(grams, block, new[part], w, 1.0)


def _add(
    grams: Tensor, block: Tensor, labels: Tensor, weights: Tensor | None, sign: float, halved: bool = False
) -> None:
    if weights is not None:
        block = block * weights.to(block.dtype).sqrt().unsqueeze(1)
    k = grams.shape[0]
    if k == 1 and not bool(labels.any()):
        _add_product(grams[0], block, sign, halved)
        return
    order = torch.argsort(labels.to(torch.int64))
    counts = torch.bincount(labels.to(torch.int64), minlength=k).tolist()
    block = block[order]
    start = 0
    for c, count in enumerate(counts[:k]):
        if count:
            _add_product(grams[c], block[start : start + count], sign, halved)
        start += count


def _add_product(gram: Tensor, part: Tensor, sign: float, halved: bool) -> None:
    d = part.shape[1]
    width = -(-d // _STRIPS) if halved and d >= _WIDE else d
    for first in range(0, d, width):
        stripe = slice(first, first + width)
        gram[stripe, first:].add_(part[:, stripe].T @ part[:, first:], alpha=sign)


def top_eigenvectors(gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """All eigenvalues, descending and clipped at 0, and the ``rank`` leading eigenvectors as rows (rank, d).

    eigh in float64, because a Cholesky factorization fails on the rank-deficient Gram of a small cluster.
    """
    values, vectors = torch.linalg.eigh(gram.to(torch.float64))
    return values.flip(0).clamp_min(0.0), vectors.flip(1)[:, :rank].T.contiguous()


def refined_eigenvectors(gram: Tensor, start: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """``top_eigenvectors``, from a ``start`` (r, d) near them; the last eigenvalues are replaced by their mean.

    For ranks far below d this is subspace iteration in float64, until the residual is 1e-6 of the largest eigenvalue
    (the error of the objective is its square). It costs a fraction of eigh's d^3. Without a gap behind the leading
    eigenvalues it converges too slowly, and eigh is used.
    """
    d = gram.shape[0]
    if 8 * rank > d:
        return top_eigenvectors(gram, rank)
    g = gram.to(torch.float64)
    longest = g[g.diagonal().topk(8).indices]
    block = torch.linalg.qr(torch.cat([start.to(torch.float64), longest]).T).Q
    for _ in range(10):
        product = g @ block
        values, turn = torch.linalg.eigh(block.T @ product)
        values, turn = values.flip(0), turn.flip(1)
        residual = product @ turn[:, :rank] - (block @ turn[:, :rank]) * values[:rank]
        if float(residual.square().sum()) <= 1e-12 * float(values[0]) ** 2:
            rest = (gram.trace() - values.sum()).clamp_min(0.0) / (d - len(values))
            spectrum = torch.cat([values.clamp_min(0.0), rest.expand(d - len(values))])
            return spectrum, (block @ turn[:, :rank]).T.contiguous()
        block = torch.linalg.qr(product).Q
    return top_eigenvectors(gram, rank)


def leading_basis(gram: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """An orthonormal (rank, d) basis close to the leading eigenvectors: a start for EM.

    For ranks well below d: subspace iteration from the Gram's longest rows, at a fraction of eigh's cost; else eigh.
    """
    d = gram.shape[0]
    if 4 * rank > d:
        return top_eigenvectors(gram, rank)[1].to(dtype)
    width = min(d, rank + 8)
    longest = gram.diagonal().topk(width).indices
    basis = improve_basis(gram, torch.linalg.qr(gram[longest].to(dtype).T).Q.T, steps=4)
    small = basis @ gram.to(dtype) @ basis.T
    turn: Tensor = torch.linalg.eigh(small).eigenvectors.flip(1)[:, :rank]
    return (turn.T @ basis).contiguous()


def improve_basis(gram: Tensor, basis: Tensor, steps: int = 1) -> Tensor:
    """Subspace iteration from ``basis``, V <- orth(G V), in its type, at a fraction of eigh's cost.

    trace(V G V') never falls, since it is convex and G V is its gradient.
    """
    g = gram.to(basis.dtype)
    for _ in range(steps):
        basis = torch.linalg.qr(g @ basis.T).Q.T
    return basis.contiguous()


def energy_outside(gram: Tensor, basis: Tensor) -> float:
    """trace(G) - trace(V G V'): the squared distances of a cluster's rows to its flat, from its Gram alone."""
    inside = ((basis @ gram.to(basis.dtype)) * basis).sum(dtype=torch.float64)
    return float(gram.trace() - inside)


def complement(basis: Tensor) -> Tensor:
    """An orthonormal basis (d - j, d) of the orthogonal complement of the rows of ``basis`` (j, d)."""
    j = basis.shape[0]
    full: Tensor = torch.linalg.qr(basis.T.to(torch.float64), mode="complete").Q
    return full[:, j:].T.to(basis.dtype).contiguous()
