"""k-flats EM for losses other than squares (MESSI, sections 2.1 and E.1-E.2).

    minimise over flats S_1..S_k and labels c(i):   sum_i  w_i rho( dist(a_i, S_c(i)) )

Every rho of ``loss`` is concave in t^2, so at the distances reached its tangent there lies above it:

    rho(t)  <=  rho(t_i) + u_i (t^2 - t_i^2),      u_i = rho'(t_i) / (2 t_i)                      for every t.

With these u_i the sum is bounded by squares, whatever flats and labels follow. Lowering the squares lowers
the loss, so there is nothing to gain from solving them: one whole E-step, one reweighting, one pass for the
weighted Grams, one step of subspace iteration. Between two reweightings the bound is an EM on squares of its own
(``robust_bound``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kflats.numerics.allocation import fill
from kflats.numerics.assign import Assignment, assign
from kflats.numerics.flats import FlatsFit, Progress, RankSpec, WeightedRows, affordable
from kflats.numerics.gram import cluster_grams, leading_basis, refined_eigenvectors, top_eigenvectors
from kflats.numerics.initialization import Start
from kflats.numerics.loss import Loss
from kflats.numerics.robust_bound import Squares, check_alive, losses, reweighted, total_loss
from kflats.numerics.rows import PartOfRows

LOOSE, BEHIND = 0.5, 0.2
"""Weights, and all Grams, are made anew once the bound exceeds the loss by more than this share of the tolerance, and
of what the loss fell by since the last whole E-step: a bound that is off by less has no other minimum to speak of.
It seldom is off by more, so a pass over the rows is saved nearly every time."""


def robust_em(
    cloud: WeightedRows,
    shape: RankSpec,
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
    cloud: WeightedRows,
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
        value = total_loss(loss, step.dist2, cloud)
        if progress:
            progress("em", iteration, value)
        iteration += 1
        if not history or value < history[-1]:
            history.append(value)
        best, small = step, False
        squares = Squares(cloud, loss, bases, step)
        while iteration < limit and not small:
            iteration += squares.lower_(step, tolerance, limit - iteration, iteration, progress)
            if iteration >= limit:
                break
            step = assign(rows, squares.bases, norms2, margins=k > 1)
            value = total_loss(loss, step.dist2, cloud)
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
                squares = Squares(cloud, loss, bases, step)
        last = history[-1]
        solved = _solved(cloud, k, rank, loss, bases, best)
        value = total_loss(loss, solved.dist2, cloud)
        if value < last:
            history.append(value)
            bases = solved.bases
        # Subspace iteration creeps where eigenvalues are close: converged only where solving gains nothing either.
        converged = small and last - value <= tolerance * last
        if converged or iteration >= limit:
            return FlatsFit(best.labels, bases, solved.spectra, tuple(history), converged, loss=loss)


@dataclass(frozen=True)
class _Solved:
    """``bases`` of an exact M-step, the ``spectra`` they come from, and (n,) squared distances ``dist2`` to them."""

    bases: tuple[Tensor, ...]
    spectra: Tensor
    dist2: Tensor


def _solved(cloud: WeightedRows, k: int, rank: int, loss: Loss, bases: tuple[Tensor, ...], step: Assignment) -> _Solved:
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
    cloud: WeightedRows,
    shape: RankSpec,
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


def distances_of(cloud: WeightedRows, bases: tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """(n,) squared distances of rows to their own flats; of rows kept exactly, to the last one."""
    step = assign(cloud.rows, bases, cloud.norms2, before=labels.clamp(max=len(bases) - 1))
    assert step.stayed is not None
    return step.stayed


def _fill_fit(cloud: WeightedRows, shape: RankSpec, loss: Loss, labels: Tensor, dist2: Tensor) -> FlatsFit:
    """M-step: eigenvectors of the reweighted Grams, and ranks that fill the budget by what they save there."""
    weights = reweighted(loss, dist2, cloud)
    check_alive(loss, weights, cloud)
    k, d = shape.k, cloud.rows.shape[1]
    grams = cluster_grams(cloud.rows, labels, k, weights)
    counts = cloud.counts(labels, k + 1)
    solved = [top_eigenvectors(gram, d) for gram in grams]
    spectra = torch.stack([values for values, _ in solved])
    filling = fill(spectra, counts[:k] + d, (shape.budget or 0) - int(counts[k]) * d)
    bases = tuple(v[:r].to(cloud.rows.dtype) for (_, v), r in zip(solved, filling.ranks, strict=True))
    return FlatsFit(labels, bases, spectra, (), False, filling.price, loss=loss)
