"""From a fit of flats to its matrix: unused bytes given to ranks, and coordinates of the rows in groups of one flat and
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.matrices.registry import FlatsMatrix, LowRankMatrix, Matrix, RankGroup, label_dtype
from kflats.methods.protocol import Problem, refuse_bytes
from kflats.numerics.flats import FlatsFit, fill
from kflats.numerics.gram import cluster_grams, least_squares, top_eigenvectors
from kflats.numerics.nested import NestedFit
from kflats.numerics.rows import GRAM_BLOCK, Rows
from kflats.numerics.svd import Metric

_Kind = tuple[int | None, int]
"""The meaning of a label: (flat or None for rows kept exactly, rank)."""


def from_flats(rows: Rows, fit: FlatsFit | NestedFit, metric: Metric | None = None) -> Matrix:
    """A group of rows for each rank of each flat, and one for the rows kept exactly.

    Args:
        metric: in which the flats were fitted.
    """
    kinds: list[_Kind] = [(c, rank) for c, ranks in enumerate(fit.levels) for rank in ranks]
    bases = [basis.to(rows.dtype) for basis in fit.bases]
    return _stored(rows, fit.labels, bases, [*kinds, (None, rows.shape[1])], metric)


@dataclass(frozen=True)
class _Frame:
    """An orthonormal ``basis`` (r, d) of a flat, and the matrices that turn rows into coordinates in it."""

    basis: Tensor
    directions: Tensor
    turn: Tensor | None = None

    def encoder(self, rank: int) -> Tensor:
        """(d, rank): rows times this matrix are coordinates in the first ``rank`` rows of ``basis``."""
        columns = self.directions[:, :rank]
        return columns if self.turn is None else columns @ self.turn[:rank, :rank]


def _frame(rows: Rows, basis: Tensor, ranks: Tensor, metric: Metric | None) -> _Frame:
    """The orthonormal basis in A for a basis P (r, d) that is orthonormal in A R.

    P R^-1 = T Q with T lower triangular: coordinates A R P' T in Q give the same rows, for every prefix, and they round
    as well as without a metric. Directions that a singular metric maps to zero are chosen by least squares.

    Args:
        ranks: (n,) the number of coordinates of each row in this flat, 0 for rows of other flats.
    """
    if metric is None:
        return _Frame(basis.to(rows.dtype), basis.T.to(rows.dtype))
    wide = basis.to(torch.float64)
    encoder, decoder = metric.encoder(wide), metric.decoder(wide)
    if metric.is_singular:
        places = torch.arange(len(basis), device=basis.device)
        pairs = (
            (block.to(torch.float64) @ encoder * (places < ranks[index].unsqueeze(1)), block)
            for index in ranks.nonzero().squeeze(1).split(GRAM_BLOCK)
            for block in [rows.take(index)]
        )
        decoder = metric.completed(decoder, least_squares(pairs, *decoder.shape))
    q, t = torch.linalg.qr(decoder.T)
    return _Frame(q.T.contiguous().to(rows.dtype), encoder, t.T)


def _stored(
    rows: Rows,
    labels: Tensor,
    bases: Sequence[Tensor],
    kinds: Sequence[_Kind],
    metric: Metric | None,
) -> Matrix:
    """The coordinates of the rows' projections by groups; one flat that holds all rows becomes a low-rank pair."""
    d = rows.shape[1]
    labels = labels.to(torch.int64)
    counts = torch.bincount(labels, minlength=len(kinds)).tolist()
    # Labels without rows and bases without labels are not stored; labels of one meaning become one.
    used = {kind for kind, count in zip(kinds, counts, strict=True) if count}
    flats = sorted({c for c, _ in used if c is not None})
    stored_kinds = sorted(used, key=lambda kind: (len(bases) if kind[0] is None else kind[0], kind[1]))
    new_labels = [stored_kinds.index(kind) if kind in used else 0 for kind in kinds]
    labels = torch.tensor(new_labels, device=labels.device)[labels]
    sizes = torch.bincount(labels, minlength=len(stored_kinds)).tolist()
    frames = []
    for c in flats:
        ranks = torch.tensor([rank if flat == c else 0 for flat, rank in stored_kinds], device=labels.device)
        frames.append(_frame(rows, bases[c][: int(ranks.max())], ranks[labels], metric))
    stored = [frame.basis for frame in frames]
    groups = [
        RankGroup(size, rank, None if c is None else flats.index(c))
        for size, (c, rank) in zip(sizes, stored_kinds, strict=True)
    ]
    parts: list[Tensor] = []
    for i, group in enumerate(groups):
        index = (labels == i).nonzero().squeeze(1)
        columns = None if group.flat is None else frames[group.flat].encoder(group.rank)
        part = torch.empty(len(index), group.rank, dtype=rows.dtype, device=rows.device)
        for piece in torch.arange(len(index), device=labels.device).split(GRAM_BLOCK):
            block = rows.take(index[piece])
            part[piece] = block if columns is None else (block.to(columns.dtype) @ columns).to(rows.dtype)
        parts.append(part)
    basis = torch.cat(stored) if stored else torch.empty(0, d, dtype=rows.dtype, device=rows.device)
    if len(groups) == 1 and groups[0].flat is not None:
        return LowRankMatrix(parts[0], basis)
    uniform = len({group.rank for group in groups}) == 1
    weight = torch.cat(parts) if uniform else torch.cat([part.reshape(-1) for part in parts])
    kept = tuple(len(b) for b in stored)
    return FlatsMatrix(weight, basis, labels.to(label_dtype(len(groups))), tuple(groups), kept)


def too_few(problem: Problem, k: int) -> KflatsError:
    """The error for a budget that does not hold k flats of rank 1."""
    n, d = problem.rows.shape
    least = (n + k * d) * problem.itemsize + n * (k > 1)
    return refuse_bytes(problem, least, f"{k} flat{'s' * (k > 1)} of rank 1")


def spent(problem: Problem, fit: FlatsFit, *, uniform: bool) -> FlatsFit:
    """The fit with higher ranks, where flats without rows, or labels of a single group, need not be stored."""
    rows, k = problem.rows, len(fit.bases)
    n, d = rows.shape
    counts = torch.bincount(fit.labels.to(torch.int64), minlength=k + 1).cpu()
    used = counts[:k].nonzero().squeeze(1).tolist()
    exact = int(counts[k])
    if not used or (len(used) == k and k + bool(exact) > 1):
        return fit
    # One flat that holds all rows becomes a low-rank pair, without labels.
    numbers = problem.values(1 if len(used) == 1 and not exact else max(len(used) + bool(exact), 2)) - exact * d
    costs = counts[used] + d
    spectra = fit.spectra[used]
    if uniform:
        ranks = [min(numbers // int(costs.sum()), n, d)] * len(used)
    else:
        ranks = list(fill(spectra, costs, numbers).ranks)
    if all(rank <= len(fit.bases[c]) for rank, c in zip(ranks, used, strict=True)):
        return fit
    grams = cluster_grams(rows, fit.labels, k, problem.row_weights)
    bases = list(fit.bases)
    for rank, c in zip(ranks, used, strict=True):
        bases[c] = top_eigenvectors(grams[c], rank)[1].to(rows.dtype)
    error = float(sum(spectrum[rank:].sum() for rank, spectrum in zip(ranks, spectra, strict=True)))
    history = fit.objective + ((error,) if error < fit.error else ())
    return replace(fit, bases=tuple(bases), objective=history)
