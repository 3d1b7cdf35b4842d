"""k-flats EM for losses other than squares (MESSI, Maalouf et al., ICLR 2021, sections 2.1 and E.1-E.2).

    minimise over flats S_1..S_k and labels c(i):   sum_i  w_i rho( dist(a_i, S_c(i)) )

Every rho of ``loss`` is concave in t^2, so its tangent at the current distances t_i lies above it:

    rho(t)  <=  rho(t_i) + u_i (t^2 - t_i^2),      u_i = rho'(t_i) / (2 t_i)                      for every t.

With these u_i, weighted squares bound the sum for all flats and labels. A step that lowers the squares lowers the loss,
so an iteration need not solve them: it takes one whole E-step, one reweighting, one pass for the weighted Grams, and
one step of subspace iteration.

A reweighting changes all u_i, so the rows that moved are not enough to update the Grams. Between two reweightings the
u_i are fixed: the bound is then an EM on squares, with whole and partial E-steps, and Grams are updated by the rows
that moved.

Below ``FLOOR`` of a row's squared norm, rho is replaced by its tangent at the floor, as the weights are. The sum that
falls is therefore the sum that the weights belong to. It is never below the loss itself.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kflats.numerics.flats import (
    PARTIAL,
    Assignment,
    FlatsFit,
    RankSpec,
    Start,
    Stopping,
    WeightedRows,
    affordable,
    assign,
    doubtful_rows,
    em,
    filled_fit,
    update_grams,
)
from kflats.numerics.gram import cluster_grams, energy_outside, improve_basis, leading_basis, refined_eigenvectors
from kflats.numerics.loss import Loss, floored
from kflats.numerics.rows import GRAM_BLOCK


def losses(loss: Loss, dist2: Tensor, cloud: WeightedRows) -> Tensor:
    """(n,) m_i w_i rho(dist_i), rho continued below the floor by its tangent there."""
    at = floored(dist2, cloud.norms2)
    cost = loss.rho(at) + loss.weight(at, cloud.norms2) * (dist2 - at)
    cost = torch.where(cloud.norms2 > 0, cost, 0.0)
    return cost if cloud.mass is None else cost * cloud.mass


def total_loss(loss: Loss, dist2: Tensor, cloud: WeightedRows) -> float:
    """sum_i w_i rho(dist_i), in float64."""
    return float(losses(loss, dist2, cloud).sum(dtype=torch.float64))


def true_loss(loss: Loss, cloud: WeightedRows, bases: tuple[Tensor, ...], labels: Tensor) -> float:
    """sum_i m_i w_i rho(dist_i) without a floor, from residuals in float64; rows that are kept exactly add nothing.

    For a long row ||a||^2 - ||Va||^2 is only rounding, and for powers below 1 the floor can be half of the sum.
    """
    total, mass = 0.0, cloud.mass
    for start, block in cloud.rows.blocks(GRAM_BLOCK):
        here = labels[start : start + len(block)]
        for c, basis in enumerate(bases):
            inside = (here == c).nonzero().squeeze(1)
            part, wide = block[inside].to(torch.float64), basis.to(torch.float64)
            cost = loss.rho((part - (part @ wide.T) @ wide).square().sum(1))
            total += float((cost if mass is None else cost * mass[start + inside]).sum())
    return total


def reweighted(loss: Loss, dist2: Tensor, cloud: WeightedRows) -> Tensor:
    """(n,) m_i w_i u_i: the weight of row i in Grams, at the squared distances ``dist2``."""
    weights = loss.weight(dist2, cloud.norms2)
    return weights if cloud.mass is None else weights * cloud.mass


class Squares:
    """The bound of the loss at the distances of an E-step, constant + sum_i weights_i dist_i^2, and EM on it."""

    def __init__(self, cloud: WeightedRows, loss: Loss, bases: tuple[Tensor, ...], step: Assignment) -> None:
        self.cloud, self.bases, self.labels = cloud, bases, step.labels
        self.weights = reweighted(loss, step.dist2, cloud)
        loss.check_reach(self.weights, cloud.norms2)
        self.bound = total_loss(loss, step.dist2, cloud)
        self.constant = 0.0
        self.constant = self.bound - self.bound_at(step.dist2)
        self.grams = cluster_grams(cloud.rows, step.labels, len(bases), self.weights, halved=True)
        self.stale = set(range(len(bases)))

    def bound_at(self, dist2: Tensor) -> float:
        """The quadratic bound of the sum of losses at these squared distances."""
        return self.constant + float((self.weights * dist2).sum(dtype=torch.float64))

    def lower_(self, step: Assignment, stop: Stopping, done: int) -> int:
        """An M-step, then partial E-steps over the doubtful rows of ``step`` while they help. ``done``: iterations so
        far. Returns the number of partial E-steps."""
        self._relabel_(step.labels)
        self._improve_()
        if step.margin is None:
            return 0
        doubtful = doubtful_rows(step.margin, self.cloud.norms2)
        part = self.cloud.bare(doubtful)
        limit = min(PARTIAL, stop.max_iterations - done)
        for count in range(limit):
            new = self.labels.clone()
            new[doubtful] = assign(part, self.bases).labels
            self._relabel_(new)
            before = self.bound
            outside = (energy_outside(gram, basis) for gram, basis in zip(self.grams, self.bases, strict=True))
            self.bound = self.constant + sum(outside)
            stop.report("em", done + count, self.bound)
            if before - self.bound <= stop.tolerance * self.bound:
                return count + 1
            self._improve_()
        return limit

    def _relabel_(self, new: Tensor) -> None:
        moved = (new != self.labels).nonzero().squeeze(1)
        self.grams = update_grams(self.grams, self.cloud.rows, moved, self.labels, new, self.weights)
        self.stale |= set(torch.cat([self.labels[moved], new[moved]]).unique().tolist())
        self.labels = new

    def _improve_(self) -> None:
        bases = enumerate(self.bases)
        self.bases = tuple(improve_basis(self.grams[c], b) if c in self.stale else b for c, b in bases)
        self.stale = set()


LOOSE, BEHIND = 0.5, 0.2
"""Weights and Grams are computed anew once the bound exceeds the loss by more than LOOSE of the tolerance and by more
than BEHIND of the fall of the loss since the last whole E-step. A closer bound has nearly the same minimum, and the
bound is seldom off by more, so this saves a pass over the rows in most iterations."""


_DEFAULT = Stopping()


def robust_em(cloud: WeightedRows, shape: RankSpec, loss: Loss, start: Start, stop: Stopping = _DEFAULT) -> FlatsFit:
    """EM under any loss; on squares it is ``em``. Thresholds are distances (``loss.absolute``).

    Whole and partial E-steps count as iterations alike; ``objective`` has a value for each whole one.

    Raises:
        KflatsError: a truncated loss whose threshold is below the distance of every row.
    """
    if loss.is_squared:
        return em(cloud, shape, start, stop)
    if shape.rank is not None:
        return _uniform(cloud, shape.k, shape.rank, loss, start, stop)
    return _filled(cloud, shape, loss, start, stop)


def _uniform(cloud: WeightedRows, k: int, rank: int, loss: Loss, start: Start, stop: Stopping) -> FlatsFit:
    rows, norms2, bases, limit = cloud.rows, cloud.norms2, start.bases, stop.max_iterations
    bare = WeightedRows(rows, norms2)
    if bases is None:
        assert start.labels is not None
        grams = start.grams
        if grams is None:
            grams = cluster_grams(rows, start.labels, k, reweighted(loss, norms2, cloud), halved=True)
        bases = tuple(leading_basis(gram, rank, rows.dtype) for gram in grams)
    history: list[float] = []
    iteration = 0
    while True:
        step = assign(bare, bases, margins=k > 1)
        value = total_loss(loss, step.dist2, cloud)
        stop.report("em", iteration, value)
        iteration += 1
        if not history or value < history[-1]:
            history.append(value)
        best, small = step, False
        squares = Squares(cloud, loss, bases, step)
        while iteration < limit and not small:
            iteration += squares.lower_(step, stop, iteration)
            if iteration >= limit:
                break
            step = assign(bare, squares.bases, margins=k > 1)
            value = total_loss(loss, step.dist2, cloud)
            stop.report("em", iteration, value)
            iteration += 1
            small = squares.bound - value <= stop.tolerance * value or value >= history[-1]
            fell = history[-1] - value
            if value < history[-1]:
                history.append(value)
                best, bases = step, squares.bases
            allowed = max(LOOSE * stop.tolerance * value, BEHIND * fell)
            if not small and squares.bound_at(step.dist2) - value > allowed:
                squares = Squares(cloud, loss, bases, step)
        last = history[-1]
        solved, spectra, dist2 = _solved(cloud, k, rank, loss, bases, best)
        value = total_loss(loss, dist2, cloud)
        if value < last:
            history.append(value)
            bases = solved
        # Subspace iteration is slow where eigenvalues are close: only an exact M-step that gains nothing is the end.
        converged = small and last - value <= stop.tolerance * last
        if converged or iteration >= limit:
            return FlatsFit(best.labels, bases, spectra, tuple(history), converged, loss=loss)


def _solved(
    cloud: WeightedRows, k: int, rank: int, loss: Loss, bases: tuple[Tensor, ...], step: Assignment
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """The exact M-step at the distances of ``step``: bases, their spectra, and (n,) squared distances to them."""
    rows, labels = cloud.rows, step.labels
    grams = cluster_grams(rows, labels, k, reweighted(loss, step.dist2, cloud), halved=True)
    solved = [refined_eigenvectors(gram, basis, rank) for gram, basis in zip(grams, bases, strict=True)]
    exact = tuple(vectors.to(rows.dtype) for _, vectors in solved)
    dist2 = torch.zeros_like(step.dist2)
    for c, basis in enumerate(exact):
        inside = (labels == c).nonzero().squeeze(1)
        if len(inside):
            dist2[inside] = assign(cloud.bare(inside), (basis,)).dist2
    return exact, torch.stack([values for values, _ in solved]), dist2


def _filled(cloud: WeightedRows, shape: RankSpec, loss: Loss, start: Start, stop: Stopping) -> FlatsFit:
    assert start.labels is not None
    k, labels = shape.k, start.labels
    if start.bases is None:
        fit = _filled_fit(cloud, shape, loss, labels, cloud.norms2)
    elif start.multiplier is None:
        fit = _filled_fit(cloud, shape, loss, labels, distances_of(cloud, start.bases, labels))
    else:
        fit = FlatsFit(labels, start.bases, torch.empty(0, dtype=torch.float32), (), False, start.multiplier, loss=loss)
    best = fit
    history: list[float] = []
    stale = 0
    for iteration in range(stop.max_iterations):
        step = assign(cloud, fit.bases, multiplier=fit.multiplier, exact=shape.exact, loss=loss, before=labels)
        assert step.stayed is not None
        value = float(losses(loss, step.stayed, cloud)[labels < k].sum(dtype=torch.float64))
        stop.report("em", iteration, value)
        small = bool(history) and history[-1] - value <= stop.tolerance * history[-1]
        if not history or value < history[-1]:
            history.append(value)
            best = fit
        # The multiplier changes with every filling of the budget, so one small step does not prove convergence.
        stale = stale + 1 if small else 0
        if stale >= 2:
            return replace(best, objective=tuple(history), converged=True)
        new, dist2 = step.labels, step.dist2
        if not affordable(cloud, new, k, k, shape.budget):  # keep the rows exact that were exact before
            new = torch.where((new == k) | (labels == k), labels, new)
            dist2 = torch.where(new == step.labels, dist2, step.stayed)
        labels = new
        fit = _filled_fit(cloud, shape, loss, labels, dist2)
    return replace(best, objective=tuple(history), converged=False)


def distances_of(cloud: WeightedRows, bases: tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """(n,) squared distances of rows to their own flats; for a row that is kept exactly, to the last flat."""
    step = assign(cloud, bases, before=labels.clamp(max=len(bases) - 1))
    assert step.stayed is not None
    return step.stayed


def _filled_fit(cloud: WeightedRows, shape: RankSpec, loss: Loss, labels: Tensor, dist2: Tensor) -> FlatsFit:
    """The M-step at the distances ``dist2`` (n,): its ``objective`` is the bound."""
    weights = reweighted(loss, dist2, cloud)
    loss.check_reach(weights, cloud.norms2)
    return filled_fit(cloud, shape, labels, cluster_grams(cloud.rows, labels, shape.k, weights), loss)
