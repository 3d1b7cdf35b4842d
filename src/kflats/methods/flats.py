"""The method of several flats, fitted by EM. From a fit to its matrix: unused bytes go to ranks, and the coordinates of
the rows are computed in groups of one flat and rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kflats.common.errors import KflatsError, check_arguments, is_whole
from kflats.matrices.registry import FlatsMatrix, LowRankMatrix, Matrix, RankGroup, label_dtype
from kflats.methods.matrix_error import Distances, Norm
from kflats.methods.protocol import ClusterMethod, Factored, Problem, refuse_bytes
from kflats.numerics.fit import Seeds, fit_flats
from kflats.numerics.flats import FlatsFit, Stopping, fill
from kflats.numerics.gram import WideRows, cluster_grams, least_squares, top_eigenvectors
from kflats.numerics.loss import Loss, Squared, check_loss
from kflats.numerics.nested import NestedFit, fit_nested
from kflats.numerics.rows import GRAM_BLOCK, MetricRows, Rows, TensorRows, check_steps
from kflats.numerics.svd import Metric, right_metric

_IN_MEMORY = 2**28  # numbers of a table that is multiplied by a metric once and kept in memory
COUNTS = (1, 2, 3, 4, 5, 7, 10, 15)
"""The numbers of flats that a search tries."""


@dataclass(frozen=True)
class Flats(ClusterMethod):
    """k flats through the rows (MESSI, section 2), each row in the nearest; by default with a rank for each flat.

        minimise  sum_i w_i rho(dist(a_i, S_c(i)))   with   sum_c j_c (n_c + d) + d n_exact + labels <= bytes

    Under a right metric R the distances are those of A R, dist(a_i R, S R)^2: the flats are fitted to the rows of A R
    and mapped back.

    Args:
        k: number of flats, 1 to 4096. None: the search of appendix D, which compares objectives; all of them have the
            threshold (if any) of the first fit.
        ranks: "filled": a rank for each flat, by water-filling inside EM. "uniform": all flats have rank
            j = (numbers) / (n + k d), as published.
        exact: with filled ranks, whether rows are kept exactly where that lowers the objective.
        nested_ranks: with filled ranks, how many ranks the rows of one flat may have, 1 to 256, each a prefix of the
            flat's ordered basis. ``Flats(k=1, nested_ranks=8)`` is one basis with a rank for each row.
        start: how EM starts: "auto", or "random" as published.
        tolerance: EM stops when an iteration lowers the objective by less than this share.
        max_iterations: EM stops after this many iterations.
        error: rho, the cost of a distance: ``Squared()``, or ``Power(1)``, ``Huber(...)``, ``Truncated(...)`` where
            some rows lie far from all others (MESSI, appendix E.1); with one nested rank only.
        restarts: how many starts EM makes, 1 to 1000, each with a seed of its own; the fit of least error is kept. One
            flat is the same from every start, and is fitted once.

    Choose it for tables with many more rows than columns. Limit: each flat stores a basis, so a short table is stored
    better with fewer flats, or with ``SVD``.

    >>> Flats(k=5)
    Flats(k=5, ranks='filled', exact=True, nested_ranks=1, start='auto', tolerance=0.001, \
max_iterations=60, error=Squared(), restarts=1)
    """

    k: int | None = 5
    ranks: Literal["filled", "uniform"] = "filled"
    exact: bool = True
    nested_ranks: int = 1
    start: Seeds = "auto"
    tolerance: float = 1e-3
    max_iterations: int = 60
    error: Loss = Squared()
    restarts: int = 1

    accepts: ClassVar[frozenset[str]] = frozenset({"rows", "right"})

    def __post_init__(self) -> None:
        check_steps(self.tolerance, self.max_iterations)
        check_loss(self.error)
        check_arguments(
            self,
            k=(self.k is None or is_whole(self.k, 1, 4096), "1 to 4096, or None for a search"),
            ranks=(self.ranks in ("filled", "uniform"), '"filled" or "uniform"'),
            nested_ranks=(is_whole(self.nested_ranks, 1, 256), "1 to 256"),
            start=(self.start in ("auto", "random"), '"auto" or "random"'),
            restarts=(is_whole(self.restarts, 1, 1000), "1 to 1000"),
        )
        if self.nested_ranks > 1 and (self.ranks == "uniform" or not self.minimizes_squares):
            raise KflatsError(
                f"nested_ranks={self.nested_ranks} is not supported with {self.ranks} ranks and error={self.error!r}",
                cause="the rank of a row is chosen by its squared error, under a budget that all ranks share",
                hint="filled ranks under squared errors, or no nested ranks",
            )

    @property
    def flats(self) -> int:
        """As ``Method.flats``; one where the number is searched."""
        return self.k or 1

    @property
    def most_classes(self) -> int:
        """As ``Method.most_classes``."""
        return (self.k or COUNTS[-1]) * self.nested_ranks

    @property
    def minimizes_squares(self) -> bool:
        """As ``Method.minimizes_squares``."""
        return self.error.is_squared

    @property
    def equal_ranks(self) -> bool:
        """As ``Method.equal_ranks``."""
        return self.ranks == "uniform"

    def all_in_flats(self) -> Flats:
        """As ``Method.all_in_flats``."""
        return replace(self, exact=False)

    def flat_counts(self) -> tuple[int, ...]:
        """As ``Method.flat_counts``."""
        return (1, 2, 4, 8) if self.k is None else (self.k,)

    def with_flats(self, k: int) -> Flats:
        """As ``Method.with_flats``."""
        return replace(self, k=k, ranks="uniform")

    def _fit(self, problem: Problem) -> Factored:
        inside, metric = _in_metric(problem)
        method = replace(self, error=_measured(self.error, metric))
        fit = method._searched(inside)
        norm: Norm | None = None
        if isinstance(fit, FlatsFit):
            if self.minimizes_squares:
                fit = spent(inside, fit, uniform=self.ranks == "uniform")
            elif metric is None:
                norm = Distances(fit.loss)
        scale = 1.0 if metric is None else metric.scale ** (self.error.degree / 2)
        objective = tuple(scale * value for value in fit.objective)
        return Factored(from_flats(problem.rows, fit, metric), objective, norm, fit.converged)

    def _searched(self, problem: Problem) -> FlatsFit | NestedFit:
        method, fits = self, []
        n, d = problem.rows.shape
        counts = [k for k in COUNTS if k <= n and problem.values(k) >= n + k * d] if self.k is None else [self.k]
        tried = [(k, start) for k in counts for start in problem.starts(self.restarts if k > 1 else 1)]
        for k, start in tried:
            fits.append(fit := method._fit_groups(start, k))
            if isinstance(fit, FlatsFit) and fit.loss != method.error:
                # A threshold in medians differs from fit to fit, and objectives under two cannot be compared.
                method = replace(self, error=fit.loss)
        if not fits:
            raise too_few(problem, 1)
        return min(fits, key=lambda fit: fit.error)

    def _fit_groups(self, problem: Problem, k: int, exact: bool | None = None) -> FlatsFit | NestedFit:
        n, d = problem.rows.shape
        exact = self.exact and self.ranks == "filled" if exact is None else exact
        settings: dict[str, Any] = {
            "weights": problem.row_weights,
            "start": self.start,
            "stop": Stopping(self.tolerance, self.max_iterations, problem.progress),
            "seed": problem.seed,
        }
        values = problem.values(k * self.nested_ranks + exact)
        if self.nested_ranks > 1 and k <= n and values >= n + k * d:
            nested = fit_nested(problem.rows, k, self.nested_ranks, budget=values, exact=exact, **settings)
            if nested.groups_in_use > 1:  # one group needs no labels: the fit below uses their bytes
                return nested
        values = problem.values(k + exact)
        if exact and values < n + k * d:  # rows kept exactly are one more group, which may need labels or wider ones
            exact, values = False, problem.values(k)
        rank = min(values // (n + k * d), n, d)
        if rank < 1:
            raise too_few(problem, k)
        if self.ranks == "filled":
            fit = fit_flats(problem.rows, k, budget=values, exact=exact, error=self.error, **settings)
        else:
            fit = fit_flats(problem.rows, k, rank=rank, error=self.error, **settings)
        if self.minimizes_squares:
            return fit
        # Flats without rows, and labels of one group, are not stored: one more fit uses their bytes for the others.
        counts = torch.bincount(fit.labels.to(torch.int64), minlength=k + 1)
        used, kept = int((counts[:k] > 0).sum()), int(counts[k]) > 0
        fewer = max(used, 1) < k or (k == 1 and exact and not kept)
        return self._fit_groups(problem, max(used, 1), exact and kept) if fewer else fit


def _measured(error: Loss, metric: Metric | None) -> Loss:
    """``error`` for the distances in ``metric``, divided by sqrt(metric.scale)."""
    return error if metric is None else error.scaled(1 / metric.scale**0.5)


def _in_metric(problem: Problem) -> tuple[Problem, Metric | None]:
    """The same problem for the rows of A R, without R."""
    rows, right = problem.rows, problem.weighting.right
    if right is None:
        return problem, None
    metric = right_metric(right.to(rows.device), rows.shape[1])
    inside: Rows = MetricRows(rows, metric.factor)
    if rows.shape[0] * rows.shape[1] <= _IN_MEMORY:  # EM reads its rows many times
        inside = TensorRows(torch.cat([block for _, block in inside.blocks(rows.shape[0])]))
    return replace(problem, rows=inside, weighting=replace(problem.weighting, right=None)), metric


# The matrix of a fit -----------------------------------------------------------------------------

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
    wide = WideRows.of(rows) if n < d else None
    grams = cluster_grams(rows if wide is None else wide.inside, fit.labels, k, problem.row_weights)
    bases = list(fit.bases)
    for rank, c in zip(ranks, used, strict=True):
        basis = top_eigenvectors(grams[c], rank)[1].to(rows.dtype)
        bases[c] = basis if wide is None else wide.lifted(basis)
    error = float(sum(spectrum[rank:].sum() for rank, spectrum in zip(ranks, spectra, strict=True)))
    history = fit.objective + ((error,) if error < fit.error else ())
    return replace(fit, bases=tuple(bases), objective=history)
