"""k-flats EM (projective clustering; MESSI, Maalouf et al., ICLR 2021, sections 2 and 2.1).

    minimise over flats S_1..S_k (dim j_c) and labels c(i):   sum_i  w_i dist(a_i, S_c(i))^2

E-step: nearest flat (``assign``). M-step: leading eigenvectors of each cluster's weighted Gram
(``gram``), updated only by the rows that moved. With ranks left free, a budget of numbers

    sum_c j_c (n_c + d)  +  d * (rows kept exactly)  <=  budget

is filled in every M-step (``allocation.fill``), and its water level mu prices coordinates in the next
E-step: w_i dist^2 + mu j_c. Reallocating only after EM is much weaker, since it is the price that moves
unimportant rows into small flats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kflats.numerics.allocation import fill
from kflats.numerics.assign import assign
from kflats.numerics.gram import (
    cluster_grams,
    energy_outside,
    improve_basis,
    leading_basis,
    move_rows,
    refined_eigenvectors,
    top_eigenvectors,
)
from kflats.numerics.loss import Loss, Squared
from kflats.numerics.rows import PartOfRows, Rows

Progress = Callable[[str, int, float], None]
"""Called with (phase, iteration, objective)."""


DOUBTFUL = 0.1
"""Share of the rows, those with the least to lose by another flat, that partial E-steps look at."""

PARTIAL = 6
"""Partial E-steps after a whole one. Nearly all rows that move are doubtful ones: several cheap iterations
come first, and convergence is judged by a whole one."""


@dataclass(frozen=True)
class RankSpec:
    """What is fitted: ``rank`` for all k flats, or a ``budget`` of numbers that fills ranks (and buys
    rows kept exactly, if ``exact``)."""

    k: int
    rank: int | None = None
    budget: int | None = None
    exact: bool = False


@dataclass(frozen=True)
class WeightedRows:
    """The rows with all that weighs on them: weights w, squared norms, and, for a sample, how many rows
    each stands for (``multiplicity``)."""

    rows: Rows
    norms2: Tensor
    weights: Tensor | None = None
    multiplicity: Tensor | None = None

    @property
    def mass(self) -> Tensor | None:
        """w_i m_i: what row i counts in Grams."""
        if self.multiplicity is None:
            return self.weights
        return self.multiplicity if self.weights is None else self.weights * self.multiplicity

    def seen_by(self, loss: Loss) -> WeightedRows:
        """The cloud whose squares stand for ``loss`` while no flat is known: rows weighted as it weighs them at the
        distance of their own norm, the mean weight kept."""
        if isinstance(loss, Squared):
            return self
        tilt = loss.weight(self.norms2, self.norms2).to(torch.float64)
        total = float(tilt.sum())
        if total <= 0:
            return self
        tilt = (tilt * (len(tilt) / total)).to(self.norms2.dtype)
        return replace(self, weights=tilt if self.weights is None else self.weights * tilt)

    def counts(self, labels: Tensor, k: int) -> Tensor:
        """Rows (with multiplicity) of each of k clusters, rounded down: their sum never exceeds all rows."""
        if self.multiplicity is None:
            return torch.bincount(labels.to(torch.int64), minlength=k)
        mass = self.multiplicity.to(torch.float64)
        return torch.bincount(labels.to(torch.int64), weights=mass, minlength=k).to(torch.int64)


@dataclass(frozen=True)
class FlatsFit:
    """``labels`` (n,): flat of each row, k = kept exactly. ``bases``: orthonormal (j_c, d), leading
    directions first. ``objective``: the weighted squared error after each accepted iteration, falling.
    ``spectra`` (k, d): eigenvalues of the clusters' Grams, or (equal ranks far
    below d) the leading ones and the mean of the others. ``converged``: False if the iteration limit cut it off.
    ``grams`` (k, d, d): the clusters' own, where a further EM may go on with them (``refit=False``).
    ``loss``: what was minimised, its threshold a distance; spectra are then of the reweighted Grams, and
    ``objective`` and ``price`` in units of the loss. Of other losses than squares the last of ``objective`` is the sum
    at what is returned; those before it are upper bounds (``robust_bound``)."""

    labels: Tensor
    bases: tuple[Tensor, ...]
    spectra: Tensor
    objective: tuple[float, ...]
    converged: bool
    price: float = 0.0
    grams: Tensor | None = None
    loss: Loss = Squared()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Dimension of each flat."""
        return tuple(len(basis) for basis in self.bases)

    @property
    def error(self) -> float:
        """The objective reached."""
        return self.objective[-1]


def em(
    cloud: WeightedRows,
    shape: RankSpec,
    labels: Tensor | None,
    *,
    bases: tuple[Tensor, ...] | None = None,
    grams: Tensor | None = None,
    tolerance: float = 1e-4,
    max_iterations: int = 100,
    progress: Progress | None = None,
    refit: bool = True,
) -> FlatsFit:
    """EM from ``labels`` until the objective falls by less than ``tolerance`` of itself.

    Uniform ranks may start from ``bases`` instead, or spare a pass with the ``grams`` of ``labels``, which are
    changed; ``refit=False`` leaves out their exact final M-step (and
    the spectra): for seeds, which are only compared.
    """
    if shape.rank is not None:
        return _em_uniform(cloud, shape.k, shape.rank, labels, bases, grams, tolerance, max_iterations, progress, refit)
    assert labels is not None
    return _em_filled(cloud, shape, labels, tolerance, max_iterations, progress)


def _em_uniform(
    cloud: WeightedRows,
    k: int,
    rank: int,
    labels: Tensor | None,
    bases: tuple[Tensor, ...] | None,
    grams: Tensor | None,
    tolerance: float,
    limit: int,
    progress: Progress | None,
    refit: bool,
) -> FlatsFit:
    rows, mass = cloud.rows, cloud.mass
    if labels is None:
        assert bases is not None
        labels = assign(rows, bases, cloud.norms2, weights=cloud.weights).labels
    grams = cluster_grams(rows, labels, k, mass) if grams is None else grams
    bases = tuple(leading_basis(gram, rank, rows.dtype) for gram in grams)
    history: list[float] = []
    converged = False
    doubtful: Tensor | None = None  # rows that partial E-steps look at
    partial = 0
    for iteration in range(limit):
        if doubtful is None:
            step = assign(
                rows, bases, cloud.norms2, weights=cloud.weights, multiplicity=cloud.multiplicity, margins=k > 1
            )
            found, objective, known = step.labels, step.objective, True
            if history and objective >= history[-1]:
                converged = True
                break
        else:
            found = labels.clone()
            found[doubtful] = assign(PartOfRows(rows, doubtful), bases, cloud.norms2[doubtful]).labels
        moved = (found != labels).nonzero().squeeze(1)
        grams = update_grams(grams, rows, moved, labels, found, mass)
        touched = set(torch.cat([labels[moved], found[moved]]).unique().tolist())
        labels = found
        if doubtful is not None:
            objective = sum(energy_outside(gram, basis) for gram, basis in zip(grams, bases, strict=True))
            # A difference of large numbers: next to nothing left outside would be rounding.
            known = objective > 1e-5 * float(grams.diagonal(dim1=1, dim2=2).sum())
        small = bool(history) and history[-1] - objective <= tolerance * history[-1]
        if not history or (known and objective < history[-1]):
            history.append(objective)
        if progress:
            progress("em", iteration, objective)
        if doubtful is not None:
            partial += 1
            if small or partial == PARTIAL or not known:
                doubtful = None
        elif small:
            converged = True
            break
        elif step.margin is not None:
            doubtful, partial = doubtful_rows(step.margin, cloud.norms2), 0
        bases = tuple(improve_basis(grams[c], b) if c in touched else b for c, b in enumerate(bases))
    if not refit:
        return FlatsFit(labels, bases, torch.empty(0), tuple(history), converged, grams=grams)
    solved = [refined_eigenvectors(gram, basis, rank) for gram, basis in zip(grams, bases, strict=True)]
    spectra = torch.stack([values for values, _ in solved])
    final = float(spectra[:, rank:].sum())
    if not history or final < history[-1]:
        history.append(final)
    return FlatsFit(labels, tuple(v.to(rows.dtype) for _, v in solved), spectra, tuple(history), converged)


def doubtful_rows(margin: Tensor, norms2: Tensor) -> Tensor:
    """The rows nearest to changing their flat."""
    share = margin / norms2.clamp_min(torch.finfo(norms2.dtype).tiny)
    cut = share.kthvalue(max(1, int(DOUBTFUL * len(share)))).values
    return (share <= cut).nonzero().squeeze(1)


def _em_filled(
    cloud: WeightedRows, shape: RankSpec, labels: Tensor, tolerance: float, limit: int, progress: Progress | None
) -> FlatsFit:
    rows, mass, k = cloud.rows, cloud.mass, shape.k
    grams = cluster_grams(rows, labels, k, mass)
    best = fit = _fill_fit(cloud, shape, labels, grams)
    history = [fit.error]
    stale = 0
    for iteration in range(limit):
        step = assign(
            rows,
            fit.bases,
            cloud.norms2,
            weights=cloud.weights,
            multiplicity=cloud.multiplicity,
            price=fit.price,
            exact=shape.exact,
        )
        if not affordable(cloud, shape, step.labels):  # keep to the exact rows chosen before
            kept = torch.where((step.labels == k) | (labels == k), labels, step.labels)
            step = replace(step, labels=kept)
        moved = (step.labels != labels).nonzero().squeeze(1)
        grams = update_grams(grams, rows, moved, labels, step.labels, mass)
        labels = step.labels
        fit = _fill_fit(cloud, shape, labels, grams)
        if progress:
            progress("em", iteration, fit.error)
        fell = history[-1] - fit.error
        if fell > 0:
            best = fit
            history.append(fit.error)
        # The price moves with the budget's filling, so one small step is no proof of convergence.
        stale = stale + 1 if fell <= tolerance * history[-1] else 0
        if stale >= 2 or not len(moved):
            return replace(best, objective=tuple(history), converged=True)
    return replace(best, objective=tuple(history), converged=False)


def _fill_fit(cloud: WeightedRows, shape: RankSpec, labels: Tensor, grams: Tensor) -> FlatsFit:
    """Exact M-step: eigenvectors, and ranks that fill the budget."""
    k, d = shape.k, cloud.rows.shape[1]
    counts = cloud.counts(labels, k + 1)
    left = (shape.budget or 0) - int(counts[k]) * d
    solved = [top_eigenvectors(gram, d) for gram in grams]
    spectra = torch.stack([values for values, _ in solved])
    filling = fill(spectra, counts[:k] + d, left)
    bases = tuple(v[:r].to(cloud.rows.dtype) for (_, v), r in zip(solved, filling.ranks, strict=True))
    error = float(sum(spectra[c, r:].sum() for c, r in enumerate(filling.ranks)))
    return FlatsFit(labels, bases, spectra, (error,), False, filling.price)


def affordable(cloud: WeightedRows, shape: RankSpec, labels: Tensor) -> bool:
    """Whether the rows kept exactly leave enough of the budget for every flat to have rank 1."""
    k, d = shape.k, cloud.rows.shape[1]
    counts = cloud.counts(labels, k + 1)
    return int(counts[k]) * d + int(counts[:k].sum()) + k * d <= (shape.budget or 0)


def update_grams(grams: Tensor, rows: Rows, moved: Tensor, old: Tensor, new: Tensor, mass: Tensor | None) -> Tensor:
    """Grams after the rows ``moved`` went from clusters ``old`` (n,) to ``new`` (n,); may change ``grams``."""
    # Below a third moved, taking them out and in again (two products a row) beats one pass over all rows.
    if 3 * len(moved) > rows.shape[0]:
        return cluster_grams(rows, new, grams.shape[0], mass)
    move_rows(grams, rows, moved, old[moved], new[moved], mass)
    return grams
