"""Truncated SVD under metrics on both sides: closed forms, never full matrices.

    minimise over U (n, r), V (r, d):   || L (A - U V) R ||_F^2

With P the r leading eigenvectors of (L A R)' (L A R), the minimiser is U = A R P', V = P R^{-1} (FWSVD, Hsu et al.,
ICLR 2022, eq. 6, is L = diag(sqrt I), R = 1). Only the Gram L'L of L is needed, and L is never inverted, so rows of
weight zero get their projection instead of 0 / 0. R is inverted. Its small singular values are floored, and V is
chosen by least squares along the directions to which R gives next to no weight (see ``Metric.completed``). Where n < d,
an n x n problem has the same solution.

A metric is given by its Gram, the weight of errors along columns (right) or between rows (left):

    || L E R ||_F^2 = trace(R' E' (L'L) E R),   left = L'L (n, n),   right = R R' (d, d)

A left Gram is only multiplied with. A right Gram is split into R and R^-1, because bases are computed in A R and must
be brought back; only its small singular values are floored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.gram import LARGE, WideRows, gram_of, least_squares, row_lengths, top_eigenvectors
from kflats.numerics.large_matrices import all_finite, stripes, symmetric
from kflats.numerics.rows import (
    MetricRows,
    Rows,
    all_rows,
    check_rank,
    check_weights,
    checked_rows,
    gram_block,
    slices,
)

FLOOR = 1e-6
"""Least singular value of R in units of its largest: below, a measured metric holds noise."""

JUDGED = 1e-4
"""Singular values of R above this share of its largest judge; what lies below is chosen by plain least squares."""

_ASYMMETRY = 1e-5
_NOTHING = 1e-8  # a share of a plain decoder that is not worth a pass over the rows
NEGATIVE = 1e-5
"""How far below zero rounding may take an eigenvalue of a Gram, in units of its largest."""


@dataclass(frozen=True)
class Metric:
    """R with ``scale`` * R R' = the right Gram: ``factor`` = R and ``inverse`` = R^-1, (d,) where it is diagonal."""

    factor: Tensor
    inverse: Tensor
    scale: float

    def measured(self, block: Tensor) -> Tensor:
        """``block @ R``, in the block's type."""
        factor = self.factor.to(block.device, block.dtype)
        return block * factor if factor.ndim == 1 else block @ factor

    def encoder(self, basis: Tensor) -> Tensor:
        """R P' (d, r): coordinates are rows times it, for a basis P (r, d) found in A R."""
        return self.factor.unsqueeze(1) * basis.T if self.factor.ndim == 1 else self.factor @ basis.T

    def decoder(self, basis: Tensor) -> Tensor:
        """P R^-1 (r, d): what those coordinates are multiplied by to give rows of A again."""
        return basis * self.inverse if self.inverse.ndim == 1 else basis @ self.inverse

    @property
    def is_singular(self) -> bool:
        """Whether some directions are judged by next to nothing, and a decoder of theirs may have any size."""
        return bool((self._plain_share() > _NOTHING).any())

    def completed(self, decoder: Tensor, plain: Tensor) -> Tensor:
        """``decoder`` (r, d) along the directions that the metric judges, ``plain`` (r, d) along the others.

        P R^-1 is fitted to the rows that weigh, where a direction counts next to nothing: on the other rows it may
        be wrong by R^-1. There ``plain``, the decoder of least squares over all rows, costs nothing and is bounded.
        """
        share = self._plain_share()
        rest = plain - decoder
        if self.factor.ndim == 1:
            return decoder + rest * share
        directions = self.factor / self._roots()
        return decoder + (rest @ directions * share) @ directions.T

    def _roots(self) -> Tensor:
        return self.factor if self.factor.ndim == 1 else torch.linalg.vector_norm(self.factor, dim=0)

    def _plain_share(self) -> Tensor:
        """(d,) from 0 where the metric judges to 1 where it does not."""
        roots = self._roots()
        return 1 / (1 + (roots / (JUDGED * roots.max())) ** 4)


def right_metric(right: Tensor, d: int) -> Metric:
    """R and R^-1 of a right Gram, (d, d) or its diagonal (d,), in float64; singular values of R are floored.

    A metric is measured on data and is often singular, for instance because an input never fires. The floor gives such
    a direction a weight far below the measured ones, instead of an infinite inverse.

    Raises:
        KflatsError: a wrong shape, NaN, a matrix that is no Gram, or all zeros.

    >>> right_metric(torch.tensor([9.0, 0.0]), 2).factor.tolist(), right_metric(torch.tensor([9.0, 0.0]), 2).scale
    ([1.5, 1.5e-06], 4.0)
    """
    # A tensor made in inference mode has no version, and cannot be changed outside of it.
    return _metric(right, 0 if right.is_inference() else right._version, d)


@lru_cache(maxsize=1)  # plans and fits ask for the metric of one weight several times in a row
def _metric(right: Tensor, version: int, d: int) -> Metric:
    gram, scale = scaled_metric(right, d, "right", "columns")
    if gram.ndim == 1:
        root = gram.clamp_min(FLOOR**2 * float(gram.max())).sqrt()
        return Metric(root, 1 / root, scale)
    root, vectors = _roots(gram)
    return Metric(vectors * root, (vectors / root).T, scale)


def forget_metric() -> None:
    """Free the metric of the weight that was last asked for."""
    _metric.cache_clear()


def _roots(gram: Tensor) -> tuple[Tensor, Tensor]:
    """The roots of the eigenvalues of a right metric, floored, and its eigenvectors as columns."""
    values, vectors = torch.linalg.eigh(gram)
    largest = float(values[-1])
    if float(values[0]) < -NEGATIVE * largest:
        raise KflatsError("the right metric is not positive semidefinite", cause="it is not a Gram matrix")
    return values.clamp_min(FLOOR**2 * largest if largest > 0 else 1.0).sqrt(), vectors


def triangular_metric(right: Tensor, d: int) -> Metric:
    """As ``right_metric`` of a full Gram (d, d), by a Cholesky factorization in a tenth of the time.

    The floor is added to every direction. The columns of R are not eigenvectors, which ``completed`` needs.

    >>> triangular_metric(torch.tensor([[4.0, 0.0], [0.0, 4.0]]), 2).factor.round(decimals=6).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    gram, scale = scaled_metric(right, d, "right", "columns")
    gram.diagonal().add_(FLOOR**2 * float(torch.linalg.matrix_norm(gram)))
    factor, failed = torch.linalg.cholesky_ex(gram)
    if bool(failed):
        return right_metric(right, d)
    eye = torch.eye(d, dtype=torch.float64, device=gram.device)
    return Metric(factor, torch.linalg.solve_triangular(factor, eye, upper=False), scale)


def left_gram(left: Tensor | None, n: int) -> tuple[Tensor | None, float]:
    """A left Gram (n, n), or row weights (n,), checked, in float64 with a mean diagonal near 1; and its scale.

    Raises:
        KflatsError: a wrong shape, NaN, negative weights, a matrix that is no Gram, or all zeros.
    """
    if left is None:
        return None, 1.0
    if left.ndim < 2:
        check_weights(left, n)
    return scaled_metric(left, n, "left", "rows")


def scaled_metric(gram: Tensor, size: int, side: str, what: str) -> tuple[Tensor, float]:
    """A Gram or its diagonal in float64, exactly symmetric, over its scale; and that scale.

    The scale is a power of 4 near the mean of the diagonal: neither it nor its root is rounded, and squares do not
    underflow.

    Raises:
        KflatsError: what cannot be a Gram.
    """
    if tuple(gram.shape) not in ((size,), (size, size)):
        raise KflatsError(
            f"a {side} metric for {size} {what} cannot have shape {tuple(gram.shape)}",
            hint=f"({size},) or ({size}, {size})",
        )
    wide = gram.detach().to(torch.float64)
    if not all_finite(wide):
        raise KflatsError(f"the {side} metric has NaN or infinite values", cause="an importance measure went wrong")
    diagonal = wide if wide.ndim == 1 else wide.diagonal()
    if bool((diagonal < 0).any()):
        raise KflatsError(f"the {side} metric has negative values", cause="it is not a Gram matrix")
    if wide.ndim == 2:
        largest = max((float(wide[part].abs().max()) for part in stripes(wide)), default=0.0)
        uneven = (float((wide[part] - wide[:, part].T).abs().max()) for part in stripes(wide))
        if max(uneven, default=0.0) > _ASYMMETRY * largest:
            raise KflatsError(f"the {side} metric is not symmetric", cause="it is not a Gram matrix")
    if float(diagonal.sum()) <= 0:
        raise KflatsError(
            f"a {side} metric of zeros judges nothing", cause="the data never touched this matrix", hint="more data"
        )
    scale = 4.0 ** math.floor(math.log(float(diagonal.mean()), 4))
    return wide / scale if wide.ndim == 1 else symmetric(wide).div_(scale), scale


@dataclass(frozen=True)
class LowRank:
    """``coordinates`` (n, r) and ``basis`` (r, d) with A ~ coordinates @ basis; ``spectrum`` (d,) holds all
    eigenvalues of (LAR)'(LAR), descending; ``error`` = the minimised sum, ``total`` = its value at rank 0.

    Basis rows have length 1 (0 where the matrix has no such rank), leading directions first: the first q columns
    and rows are the best of rank q. Without a right metric the basis is orthonormal."""

    coordinates: Tensor
    basis: Tensor
    spectrum: Tensor
    error: float
    total: float


def truncated_svd(
    matrix: Tensor | Rows, rank: int, *, left: Tensor | None = None, right: Tensor | None = None
) -> LowRank:
    """Best rank-``rank`` approximation under a left Gram L'L and a right Gram R R'.

    Args:
        matrix: (n, d), a tensor or any ``Rows``.
        left: (n, n), or (n,) where it is diagonal (row weights).
        right: (d, d), or (d,) where it is diagonal.

    Solves an eigenproblem of the smaller side, in float64. Full metrics are multiplied in float64; else the matrix is
    read by blocks in its own type. Choose it when the smaller side is at most a few thousand.

    Accuracy: of a float32 matrix, singular values below about 1e-7 of the largest are noise. They hold 1e-14 of the
    energy. Where n < d and the matrix has more than 4 M numbers, those below 1e-6 of the largest count as zeros.

    Raises:
        KflatsError: rank outside 1..min(n, d), NaN or infinite values, unusable weights or metrics.

    >>> a = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    >>> truncated_svd(a, 1).error
    1.0
    >>> truncated_svd(a, 1, left=torch.tensor([1.0, 16.0])).error      # now the second row counts most
    9.0
    """
    rows = checked_rows(matrix)
    check_rank(rank, min(rows.shape))
    small = _small_problem(rows, left, right)
    spectrum, vectors = top_eigenvectors(small.gram, rank)
    full = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    full[: len(spectrum)] = small.scale * spectrum
    coordinates, basis = small.finish(vectors)
    lengths = torch.linalg.vector_norm(basis, dim=1)
    basis = basis / torch.where(lengths > 0, lengths, 1.0).unsqueeze(1)
    coordinates = (coordinates * lengths).to(rows.dtype)
    return LowRank(coordinates, basis.to(rows.dtype), full, float(full[rank:].sum()), float(full.sum()))


def weighted_spectrum(matrix: Tensor | Rows, *, left: Tensor | None = None, right: Tensor | None = None) -> Tensor:
    """(min(n, d),) squared singular values of L A R, descending: what each rank of ``truncated_svd`` saves.

    >>> weighted_spectrum(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), right=torch.tensor([1.0, 4.0])).tolist()
    [9.0, 4.0]
    """
    rows = checked_rows(matrix)
    small = _small_problem(rows, left, right)
    values: Tensor = torch.linalg.eigvalsh(small.gram).flip(0).clamp_min(0.0)
    return small.scale * values


def longest_by(rows: Rows, right: Tensor) -> float:
    """A bound of the sums, over the parts of any ``truncated_svd`` of ``rows`` (n, d) under a right Gram R R', of the
    lengths of what a part gives a row: max_i ||a_i R|| ||R^-1||_F. Part k gives row i a_i R v_k v_k' R^-1, for
    orthonormal v_k. Infinite where they are other ones: n < d, or a metric that does not judge all directions.

    >>> round(longest_by(checked_rows(torch.tensor([[3.0, 0.0], [0.0, 1.0]])), torch.tensor([1.0, 4.0])), 4)  # of 3
    3.3541
    """
    n, d = rows.shape
    metric = right_metric(right.to(rows.device), d) if n >= d else None
    if metric is None or metric.is_singular:
        return math.inf
    factor = metric.factor
    return float(row_lengths(MetricRows(rows, factor)).max()) * float(torch.linalg.vector_norm(metric.inverse))


def project(rows: Rows, basis: Tensor) -> Tensor:
    """Coordinates (n, r) of all rows by ``basis`` (r, d): rows times its transpose, by blocks."""
    out = torch.empty(rows.shape[0], basis.shape[0], dtype=rows.dtype, device=rows.device)
    for here, block in slices(rows, gram_block(rows)):
        torch.matmul(block, basis.T, out=out[here])
    return out


@dataclass(frozen=True)
class _Small:
    """An eigenproblem of the smaller side: ``scale`` * ``gram`` has the eigenvalues of (LAR)'(LAR), and ``finish``
    turns its eigenvectors (r, m) into coordinates (n, r) and a basis (r, d)."""

    gram: Tensor
    scale: float
    finish: Callable[[Tensor], tuple[Tensor, Tensor]]


def _small_problem(rows: Rows, left: Tensor | None, right: Tensor | None) -> _Small:
    n, d = rows.shape
    weights, scale = left_gram(None if left is None else left.to(rows.device), n)
    right = None if right is None else right.to(rows.device)
    if right is not None and right.ndim == 2 and n < d:
        return _through_rows(rows, weights, right, scale)
    metric = None if right is None else right_metric(right, d)
    scale *= 1.0 if metric is None else metric.scale
    gram, lift = _through_columns(rows, weights, metric)

    def finish(vectors: Tensor) -> tuple[Tensor, Tensor]:
        basis = vectors if lift is None else lift(vectors)
        if metric is None:
            return project(rows, basis.to(rows.dtype)), basis
        coordinates, decoder = project(rows, metric.encoder(basis).T.to(rows.dtype)), metric.decoder(basis)
        if metric.is_singular and n >= d:  # a wide matrix needs no completion: its own rows span the basis
            pairs = ((coordinates[here], block) for here, block in slices(rows, gram_block(rows)))
            decoder = metric.completed(decoder, least_squares(pairs, *decoder.shape))
        return coordinates, decoder

    return _Small(gram, scale, finish)


def _through_columns(
    rows: Rows, weights: Tensor | None, metric: Metric | None
) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """(LB)'(LB) for B = A R, or its n x n core T G T' and what lifts the core's eigenvectors.

    A QR in float64 holds the matrix three times. A large one is held once, in its own type (``WideRows``).
    """
    n, d = rows.shape
    full = metric is not None and metric.factor.ndim == 2
    work = rows if metric is None else MetricRows(rows, metric.factor, torch.float64 if full else None)
    if n >= d and (weights is None or weights.ndim == 1):
        return gram_of(work, weights), None
    if n < d and n * d > LARGE:
        wide = WideRows.of(work)
        t = all_rows(wide.inside).T
        return _symmetric(_times(t, weights) @ t.T), wide.lifted
    b = all_rows(work)
    if n >= d and weights is not None:
        return _symmetric(b.T @ (weights @ b)), None
    q, t = torch.linalg.qr(b.T)  # B' = Q T: (LB)'(LB) = Q (T G T') Q', with G = L'L as it is
    return _symmetric(_times(t, weights) @ t.T), lambda vectors: vectors @ q.T


def _through_rows(rows: Rows, weights: Tensor | None, right: Tensor, scale: float) -> _Small:
    """The same, where the right Gram S is larger than the problem: only C = A S A' (n, n) is decomposed, and not S.

    C = Q c Q', K = c^1/2 Q' G Q c^1/2: with w its eigenvectors, U = Q c^1/2 w, V = w' c^-1/2 Q' A (c floored).
    """
    a = all_rows(rows)
    gram, measure = scaled_metric(right, rows.shape[1], "right", "columns")
    core = _symmetric(a @ gram @ a.T)
    root, q = _roots(core)
    spread = q * root
    nothing = not bool(core.any())  # the floor of nothing is no size
    return _Small(
        torch.zeros_like(core) if nothing else _symmetric(_times(spread.T, weights) @ spread),
        scale * measure,
        lambda vectors: (spread @ vectors.T, (vectors / root) @ (q.T @ a)),
    )


def _times(matrix: Tensor, weights: Tensor | None) -> Tensor:
    return matrix if weights is None else matrix * weights if weights.ndim == 1 else matrix @ weights


def _symmetric(gram: Tensor) -> Tensor:
    return (gram + gram.T) / 2
