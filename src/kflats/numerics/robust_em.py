"""k-flats EM for losses other than squares (MESSI, sections 2.1 and E.1-E.2).

    minimise over flats S_1..S_k and labels c(i):   sum_i  w_i rho( dist(a_i, S_c(i)) )

Every rho of ``loss`` is concave in t^2, so at the distances reached its tangent there lies above it:

    rho(t)  <=  rho(t_i) + u_i (t^2 - t_i^2),      u_i = rho'(t_i) / (2 t_i)                      for every t.

With these u_i the sum is bounded by squares, whatever flats and labels follow. Lowering the squares lowers
the loss, so there is nothing to gain from solving them: one whole E-step, one reweighting, one pass for the
weighted Grams, one step of subspace iteration. All weights change, so Grams cannot be updated by what moved,
as they are for squares; but between two reweightings the bound is an EM on squares of its own, and the same
whole E-steps, and partial ones over doubtful rows, lower it cheaply, with Grams by what moved.

Below ``FLOOR`` of a row's squared norm rho is replaced by its tangent at the floor, as the weights are: the sum
that falls is the one that they belong to. It is never less than the loss itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kflats.numerics.allocation import fill
from kflats.numerics.assign import Assignment, assign
from kflats.numerics.flats import (
    PARTIAL,
    Cloud,
    FlatsFit,
    Progress,
    Shape,
    affordable,
    doubtful_rows,
    update_grams,
)
from kflats.numerics.gram import (
    cluster_grams,
    energy_outside,
    improve_basis,
    leading_basis,
    refined_eigenvectors,
    top_eigenvectors,
)
from kflats.numerics.loss import Loss, Truncated, floored, out_of_reach
from kflats.numerics.rows import PartOfRows
from kflats.numerics.starts import Start

LOOSE, BEHIND = 0.5, 0.2
"""Weights, and all Grams, are made anew once the bound exceeds the loss by more than this share of the tolerance, and
of what the loss fell by since the last whole E-step: a bound that is off by less has no other minimum to speak of.
Measured: it is off by a thirtieth after the first whole E-step, so a pass over the rows is saved nearly every time."""


def losses(loss: Loss, dist2: Tensor, cloud: Cloud) -> Tensor:
    """(n,) m_i w_i rho(dist_i), rho continued below the floor by its tangent there."""
    at = floored(dist2, cloud.norms2)
    cost = loss.rho(at) + loss.weight(at, cloud.norms2) * (dist2 - at)
    cost = torch.where(cloud.norms2 > 0, cost, 0.0)
    return cost if cloud.mass is None else cost * cloud.mass


def _total(loss: Loss, dist2: Tensor, cloud: Cloud) -> float:
    return float(losses(loss, dist2, cloud).sum(dtype=torch.float64))


def reweighted(loss: Loss, dist2: Tensor, cloud: Cloud) -> Tensor:
    """(n,) m_i w_i u_i: what row i counts in Grams at the distances reached."""
    weights = loss.weight(dist2, cloud.norms2)
    return weights if cloud.mass is None else weights * cloud.mass


def robust_em(
    cloud: Cloud,
    shape: Shape,
    loss: Loss,
    start: Start,
    tolerance: float = 1e-3,
    max_iterations: int = 100,
    progress: Progress | None = None,
    *,
    price: float | None = 0.0,
) -> FlatsFit:
    """EM from ``start`` until a whole iteration lowers the loss by less than ``tolerance`` of itself.

    Thresholds are distances (``loss.absolute``). Uniform ranks may start from bases; ranks that fill a budget
    from labels, and from bases with their ``price`` as well, or (None) with ranks filled anew. Whole and partial
    E-steps alike count as iterations; ``objective`` has the whole ones.

    Raises:
        KflatsError: a truncated loss whose threshold is below the distance of every row.
    """
    if shape.rank is not None:
        return _uniform(cloud, shape.k, shape.rank, loss, start, tolerance, max_iterations, progress)
    return _filled(cloud, shape, loss, start, tolerance, max_iterations, progress, price)


def _uniform(
    cloud: Cloud,
    k: int,
    rank: int,
    loss: Loss,
    start: Start,
    tolerance: float,
    limit: int,
    progress: Progress | None,
) -> FlatsFit:
    rows, norms2, bases = cloud.rows, cloud.norms2, start.bases
    if bases is None:
        assert start.labels is not None
        grams = start.grams
        if grams is None:
            grams = cluster_grams(rows, start.labels, k, reweighted(loss, norms2, cloud), halved=True)
        bases = tuple(leading_basis(gram, rank, rows.dtype) for gram in grams)
    history: list[float] = []
    iteration = 0
    while True:
        step = assign(rows, bases, norms2, margins=k > 1)
        value = _total(loss, step.dist2, cloud)
        if progress:
            progress("em", iteration, value)
        iteration += 1
        if not history or value < history[-1]:
            history.append(value)
        best, small = step, False
        squares = _Squares(cloud, loss, bases, step)
        while iteration < limit and not small:
            iteration += squares.lower_(step, tolerance, limit - iteration, iteration, progress)
            if iteration >= limit:
                break
            step = assign(rows, squares.bases, norms2, margins=k > 1)
            value = _total(loss, step.dist2, cloud)
            if progress:
                progress("em", iteration, value)
            iteration += 1
            small = squares.bound - value <= tolerance * value or value >= history[-1]
            fell = history[-1] - value
            if value < history[-1]:
                history.append(value)
                best, bases = step, squares.bases
            allowed = max(LOOSE * tolerance * value, BEHIND * fell)
            if not small and squares.bound_at(step.dist2) - value > allowed:
                squares = _Squares(cloud, loss, bases, step)
        last = history[-1]
        solved = _solved(cloud, k, rank, loss, bases, best)
        value = _total(loss, solved.dist2, cloud)
        if value < last:
            history.append(value)
            bases = solved.bases
        # Subspace iteration creeps where eigenvalues are close: converged only where solving gains nothing either.
        converged = small and last - value <= tolerance * last
        if converged or iteration >= limit:
            return FlatsFit(best.labels, bases, solved.spectra, tuple(history), converged, loss=loss)


class _Squares:
    """The bound of the loss at the distances of an E-step, constant + sum_i weights_i dist_i^2, and EM on it."""

    def __init__(self, cloud: Cloud, loss: Loss, bases: tuple[Tensor, ...], step: Assignment) -> None:
        self.cloud, self.bases, self.labels = cloud, bases, step.labels
        self.weights = reweighted(loss, step.dist2, cloud)
        _check_alive(loss, self.weights, cloud)
        self.bound = _total(loss, step.dist2, cloud)
        self.constant = 0.0
        self.constant = self.bound - self.bound_at(step.dist2)
        self.grams = cluster_grams(cloud.rows, step.labels, len(bases), self.weights, halved=True)
        self.stale = set(range(len(bases)))

    def bound_at(self, dist2: Tensor) -> float:
        return self.constant + float((self.weights * dist2).sum(dtype=torch.float64))

    def lower_(self, step: Assignment, tolerance: float, limit: int, said: int, progress: Progress | None) -> int:
        """M-step, then partial E-steps over the doubtful rows of ``step`` while they help; how many."""
        self._relabel_(step.labels)
        self._improve_()
        if step.margin is None:
            return 0
        doubtful = doubtful_rows(step.margin, self.cloud.norms2)
        part, norms2 = PartOfRows(self.cloud.rows, doubtful), self.cloud.norms2[doubtful]
        for done in range(min(PARTIAL, limit)):
            found = self.labels.clone()
            found[doubtful] = assign(part, self.bases, norms2).labels
            self._relabel_(found)
            before = self.bound
            outside = (energy_outside(gram, basis) for gram, basis in zip(self.grams, self.bases, strict=True))
            self.bound = self.constant + sum(outside)
            if progress:
                progress("em", said + done, self.bound)
            if before - self.bound <= tolerance * self.bound:
                return done + 1
            self._improve_()
        return min(PARTIAL, limit)

    def _relabel_(self, found: Tensor) -> None:
        moved = (found != self.labels).nonzero().squeeze(1)
        self.grams = update_grams(self.grams, self.cloud.rows, moved, self.labels, found, self.weights)
        self.stale |= set(torch.cat([self.labels[moved], found[moved]]).unique().tolist())
        self.labels = found

    def _improve_(self) -> None:
        bases = enumerate(self.bases)
        self.bases = tuple(improve_basis(self.grams[c], b) if c in self.stale else b for c, b in bases)
        self.stale = set()


@dataclass(frozen=True)
class _Solved:
    """``bases`` of an exact M-step, the ``spectra`` they come from, and (n,) squared distances ``dist2`` to them."""

    bases: tuple[Tensor, ...]
    spectra: Tensor
    dist2: Tensor


def _solved(cloud: Cloud, k: int, rank: int, loss: Loss, bases: tuple[Tensor, ...], step: Assignment) -> _Solved:
    """The exact M-step at the distances of ``step``."""
    rows, labels = cloud.rows, step.labels
    grams = cluster_grams(rows, labels, k, reweighted(loss, step.dist2, cloud), halved=True)
    found = [refined_eigenvectors(gram, basis, rank) for gram, basis in zip(grams, bases, strict=True)]
    exact = tuple(vectors.to(rows.dtype) for _, vectors in found)
    dist2 = torch.zeros_like(step.dist2)
    for c, basis in enumerate(exact):
        inside = (labels == c).nonzero().squeeze(1)
        if len(inside):
            dist2[inside] = assign(PartOfRows(rows, inside), (basis,), cloud.norms2[inside]).dist2
    return _Solved(exact, torch.stack([values for values, _ in found]), dist2)


def _filled(
    cloud: Cloud,
    shape: Shape,
    loss: Loss,
    start: Start,
    tolerance: float,
    limit: int,
    progress: Progress | None,
    price: float | None,
) -> FlatsFit:
    assert start.labels is not None
    rows, k = cloud.rows, shape.k
    labels = start.labels
    if start.bases is None:
        fit = _fill_fit(cloud, shape, loss, labels, cloud.norms2)
    elif price is None:
        fit = _fill_fit(cloud, shape, loss, labels, distances_of(cloud, start.bases, labels))
    else:
        fit = FlatsFit(labels, start.bases, torch.empty(0), (), False, price, loss=loss)
    best = fit
    history: list[float] = []
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
            loss=loss,
            before=labels,
        )
        assert step.stayed is not None
        value = float(losses(loss, step.stayed, cloud)[labels < k].sum(dtype=torch.float64))
        if progress:
            progress("em", iteration, value)
        small = bool(history) and history[-1] - value <= tolerance * history[-1]
        if not history or value < history[-1]:
            history.append(value)
            best = fit
        # The price moves with the budget's filling, so one small step is no proof of convergence.
        stale = stale + 1 if small else 0
        if stale >= 2:
            return replace(best, objective=tuple(history), converged=True)
        found, dist2 = step.labels, step.dist2
        if not affordable(cloud, shape, found):  # keep to the exact rows chosen before
            found = torch.where((found == k) | (labels == k), labels, found)
            dist2 = torch.where(found == step.labels, dist2, step.stayed)
        labels = found
        fit = _fill_fit(cloud, shape, loss, labels, dist2)
    return replace(best, objective=tuple(history), converged=False)


def distances_of(cloud: Cloud, bases: tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """(n,) squared distances of rows to their own flats; of rows kept exactly, to the last one."""
    step = assign(cloud.rows, bases, cloud.norms2, before=labels.clamp(max=len(bases) - 1))
    assert step.stayed is not None
    return step.stayed


def _fill_fit(cloud: Cloud, shape: Shape, loss: Loss, labels: Tensor, dist2: Tensor) -> FlatsFit:
    """M-step: eigenvectors of the reweighted Grams, and ranks that fill the budget by what they save there."""
    weights = reweighted(loss, dist2, cloud)
    _check_alive(loss, weights, cloud)
    k, d = shape.k, cloud.rows.shape[1]
    grams = cluster_grams(cloud.rows, labels, k, weights)
    counts = cloud.counts(labels, k + 1)
    solved = [top_eigenvectors(gram, d) for gram in grams]
    spectra = torch.stack([values for values, _ in solved])
    filling = fill(spectra, counts[:k] + d, (shape.budget or 0) - int(counts[k]) * d)
    bases = tuple(v[:r].to(cloud.rows.dtype) for (_, v), r in zip(solved, filling.ranks, strict=True))
    return FlatsFit(labels, bases, spectra, (), False, filling.price, loss=loss)


def _check_alive(loss: Loss, weights: Tensor, cloud: Cloud) -> None:
    if isinstance(loss, Truncated) and not bool((weights > 0).any()) and bool((cloud.norms2 > 0).any()):
        raise out_of_reach(loss)
