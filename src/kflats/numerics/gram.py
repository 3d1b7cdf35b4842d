"""Grams of clusters, whole or updated by the rows that moved; their eigenvectors; coordinates that whiten them.

G_c = sum over rows i of cluster c of w_i a_i a_i'  (d x d). An M-step needs the k d^2 numbers of the Grams and no rows.
``whiten`` finds the row space of a matrix, and coordinates in which one of its Grams is the identity:

    L (d, r):   L' G L = I,   r = the rank that the numbers of G show

Where rows differ in length by many powers of ten, G may show a lower rank than the rows have. This is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.large_matrices import zero_matrix
from kflats.numerics.rows import (
    GRAM_BLOCK,
    Rows,
    ScaledRows,
    TensorRows,
    WidenedRows,
    all_rows,
    gram_block,
    slices,
    whole_matrix,
)

_STRIPS = 4  # stripes of columns in a halved product: the fastest of 2..6 at 384 columns
_WIDE = 128  # columns; with fewer, one whole product is as fast


def cluster_grams(rows: Rows, labels: Tensor, k: int, weights: Tensor | None = None, *, halved: bool = False) -> Tensor:
    """(k, d, d) float64 Grams of all clusters in one pass; rows labelled >= k are left out.

    Products of blocks are float32 (float64 if the rows are), their sums float64. ``halved`` computes little more than
    the upper triangle, which takes two thirds of the time; the last bits differ from those of ``move_rows``.
    """
    d = rows.shape[1]
    grams = torch.zeros(k, d, d, dtype=torch.float64, device=rows.device)
    for start, block in rows.blocks(gram_block(rows)):
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


def axes_of_few(gram: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """``top_eigenvectors`` of the Gram (d, d) of at most ``rows`` rows: d eigenvalues, and min(rows, d) eigenvectors.

    The products of the Gram with as many random vectors span its range (Halko, Martinsson, Tropp, 2011), which costs
    d^2 rows in place of eigh's d^3.

    >>> values, axes = axes_of_few(torch.diag(torch.tensor([0.0, 3.0, 0.0, 0.0, 5.0])), 2)
    >>> values.round(decimals=6).tolist(), axes.abs().round(decimals=6).tolist()
    ([5.0, 3.0, 0.0, 0.0, 0.0], [[0.0, 0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0, 0.0]])
    """
    d = gram.shape[0]
    if 2 * rows >= d:
        return top_eigenvectors(gram, min(rows, d))
    wide = gram.to(torch.float64)
    draws = torch.randn(d, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    span = torch.linalg.qr(wide @ draws.to(wide.device)).Q
    values, axes = top_eigenvectors(span.T @ wide @ span, rows)
    return torch.cat([values, values.new_zeros(d - rows)]), axes @ span.T


def principal_axes(rows: Rows, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending, and r <= min(n, d) eigenvectors (r, d) of the weighted Gram of ``rows`` (n, d), float64.

    Of fewer rows than columns by the Gram of the rows, without directions that are its rounding: n^2 d in place of d^3.
    """
    n, d = rows.shape
    if n >= d:
        return top_eigenvectors(gram_of(rows, weights), d)
    block = all_rows(rows)
    block.mul_(weights.to(block).sqrt().unsqueeze(1))
    energies, turn = top_eigenvectors(block @ block.T, n)
    known = max(1, int((energies > RANK_FLOOR * energies[0]).sum()))
    axes = torch.mm(turn[:known], block, out=zero_matrix(known, d, device=block.device))
    return energies[:known], axes.div_(axes.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny))


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


RANK_FLOOR = 1e-12
"""Least eigenvalue that counts, in units of the largest, of a Gram with unit diagonal: 1e-6 of a singular value."""

COLUMN_FLOOR = 1e-10
"""Shortest column that counts, in units of the longest. Shorter ones are dead neurons, or the rounding of a QR in
directions without energy. They would spoil the leading axes: an SVD is as exact as its largest value, here the
reciprocal."""

_PANEL = 128  # columns of a Gram at once: wide enough for a fast product
LARGE = 2**22
"""Numbers of a matrix of fewer rows than columns that is held once, as ``WideRows``, and not for a QR in float64."""
_PANEL_NUMBERS = 2**22  # of rows that are read at once where a row is long


def row_lengths(rows: Rows) -> Tensor:
    """(n,) Euclidean lengths, in float64."""
    parts = [torch.linalg.vector_norm(block.to(torch.float64), dim=1) for _, block in rows.blocks(gram_block(rows))]
    return torch.cat(parts)


def narrow(rows: Rows) -> tuple[Rows, Tensor | None]:
    """A wide matrix (n < d) as C (n, r) and orthonormal K (r, d) with A = C K, r its rank where its rows have length 1;
    others as they are, and None."""
    n, d = rows.shape
    if n >= d:
        return rows, None
    if n * d > LARGE:
        core, weights = _own_space(rows)
        if bool(weights.any()):
            return _narrowed(rows, core, weights)
    q, t = torch.linalg.qr(all_rows(rows).T)
    lengths = torch.linalg.vector_norm(t, dim=0)
    # The rounding of a QR, in directions that the rows do not have, would look like short columns.
    _, values, turn = torch.linalg.svd((t / torch.where(lengths > 0, lengths, 1.0)).T, full_matrices=False)
    kept = values.square() > RANK_FLOOR * float(values[0]) ** 2
    if bool(kept.all()) or not bool(lengths.any()):
        return TensorRows(t.T.contiguous()), q.T
    return TensorRows(t.T @ turn[kept].T), turn[kept] @ q.T


def _narrowed(rows: Rows, core: Tensor, turn: Tensor) -> tuple[Rows, Tensor]:
    """As ``narrow``, from ``_own_space``: C and K in float64, and nothing else of the size of K."""
    counts = turn.any(dim=1)
    # As of a QR of A' the rows of C end at their number, so that short ones keep their digits.
    q, t = torch.linalg.qr(core[:, counts].T)
    lift = _times_rows(q.T @ turn[counts], rows)
    # Orthonormal but for the rounding of squares, which the factor of its Gram repairs.
    lower = torch.linalg.cholesky(lift @ lift.T)
    for part in torch.arange(lift.shape[1], device=lift.device).split(_PANEL):
        lift[:, part] = torch.linalg.solve_triangular(lower, lift[:, part], upper=False)
    return TensorRows(t.T @ lower), lift


def _own_space(rows: Rows) -> tuple[Tensor, Tensor]:
    """C (n, n) and what K is of A, (n, n), both float64, as ``WideRows`` says.

    n^2 d operations; the rows are held once, and three n x n matrices in float64.
    """
    n, d = rows.shape
    lengths = row_lengths(rows)
    inverse = torch.where(lengths > 0, 1 / lengths, 0.0)
    whole = whole_matrix(rows)
    total = torch.zeros(n, n, dtype=torch.float64, device=rows.device)
    for part in torch.arange(d, device=rows.device).split(_PANEL):
        wide = whole[:, part].to(torch.float64) * inverse.unsqueeze(1)
        total += wide @ wide.T
    del whole
    values, vectors = torch.linalg.eigh(total)
    values, vectors = values.flip(0).clamp_min(0.0), vectors.flip(1)
    counts = values > RANK_FLOOR * values[0]
    root = torch.where(counts, values, 0.0).sqrt()
    turn = torch.where(counts, 1 / root, 0.0).unsqueeze(1) * vectors.T * inverse
    return vectors * root * lengths.unsqueeze(1), turn


def _times_rows(weights: Tensor, rows: Rows) -> Tensor:
    """(m, d) float64: ``weights`` (m, n) times a wide matrix."""
    made = zero_matrix(len(weights), rows.shape[1], device=weights.device)
    for here, block in slices(rows, max(1, _PANEL_NUMBERS // rows.shape[1])):
        made.addmm_(weights[:, here], block.to(torch.float64))
    return made


@dataclass(frozen=True)
class WideRows:
    """A matrix A (n, d) of fewer rows than columns, and its rows in coordinates of their own space:

        A = C K,    C = D^-1 U diag(l)^1/2  (n, n),    K = diag(l)^-1/2 U' D A,    D A A' D = U diag(l) U'

    D divides rows by their lengths, so that short ones keep their digits. A row is as far from a flat V (j, n) of C as
    from the flat V K of A: k flats are found among n numbers a row in place of d.
    """

    source: Rows
    inside: Rows
    turn: Tensor

    @classmethod
    def of(cls, rows: Rows) -> WideRows:
        """What it takes is that of ``_own_space``: the rows, and three n x n matrices in float64."""
        core, turn = _own_space(rows)
        return cls(rows, TensorRows(core.to(rows.dtype)), turn)

    def lifted(self, basis: Tensor) -> Tensor:
        """(j, d), orthonormal: the flat of A for an orthonormal ``basis`` (j, n) of a flat of C, in its order."""
        flat = _times_rows(basis.to(torch.float64) @ self.turn, self.source)
        # Directions without rows are completed, and the rounding of nearly empty ones is repaired.
        q, r = torch.linalg.qr(flat.T)
        signs = torch.where(r.diagonal() < 0, -1.0, 1.0)
        lifted: Tensor = (q * signs).T.to(basis.dtype).contiguous()
        return lifted


def scaled_gram(rows: Rows, factors: Tensor | None = None) -> Tensor:
    """(d, d) A' diag(factors)^2 A, products and sums in float64."""
    total = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64, device=rows.device)
    for here, block in slices(rows, gram_block(rows)):
        wide = block.to(torch.float64)
        if factors is not None:
            wide = wide * factors[here].unsqueeze(1)
        add_lower_gram_(total, wide)
    mirror_(total)
    return total


def lower_gram(x: Tensor) -> Tensor:
    """X'X (P, n) -> (n, n), its lower blocks only: half the work; ``mirror_`` completes a sum of them."""
    n = x.shape[1]
    lower = zero_matrix(n, n, x.dtype, x.device)
    add_lower_gram_(lower, x)
    return lower


def add_lower_gram_(total: Tensor, x: Tensor, y: Tensor | None = None) -> None:
    """Add ``lower_gram`` to ``total`` (n, n) in place, without another matrix of that size; also where ``total`` is
    float64 and X is not."""
    n = x.shape[1]
    for start in range(0, n, _PANEL):
        end = min(start + _PANEL, n)
        total[start:, start:end] += x[:, start:].T @ (x if y is None else y)[:, start:end]


def mirror_(total: Tensor) -> None:
    """Complete a sum of ``lower_gram`` in place."""
    n = len(total)
    for start in range(0, n, _PANEL):
        end = min(start + _PANEL, n)
        total[:start, start:end] = total[start:end, :start].T


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
    whitening = whiten(scaled_gram(rows, factors))
    if whitening.shape[1] == rows.shape[1]:
        return whitening
    inverse = torch.where(lengths > 0, 1 / lengths, 0.0)
    # In float64, because the factors of the shortest rows overflow float32.
    unit = ScaledRows(WidenedRows(rows), inverse)
    # Only a column well above the floor here is missing there; a column near the floor is short in both.
    if whiten(scaled_gram(unit), 1e3 * COLUMN_FLOOR).shape[1] > whitening.shape[1]:
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
