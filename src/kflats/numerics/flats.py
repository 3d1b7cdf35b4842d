"""k-flats EM for squared errors (projective clustering; MESSI, Maalouf et al., ICLR 2021, sections 2 and 2.1).

    minimise over flats S_1..S_k (dim j_c) and labels c(i):   sum_i  w_i dist(a_i, S_c(i))^2

The E-step gives every row to its nearest flat (``assign``). The M-step takes the leading eigenvectors of each cluster's
weighted Gram (``gram``); only the rows that moved change a Gram. Where a budget of numbers sets the ranks,

    sum_c j_c (n_c + d)  +  d * (rows kept exactly)  <=  budget

every M-step fills the budget (``fill``) and finds its Lagrange multiplier mu. The next E-step minimises
w_i dist^2 + mu j_c, which moves unimportant rows into flats of low rank. Filling the budget only once, after EM with
equal ranks, leaves a much larger error.

**E-step.** dist^2(a, S_c) = ||a||^2 - ||V_c a||^2 for an orthonormal V_c (j_c x d). One matrix product serves all
flats, in blocks of rows. A flat of rank above d/2 is measured through its complement, dist^2 = ||N_c a||^2, which is
cheaper and does not cancel. With a Lagrange multiplier mu per coordinate, flats of low rank attract rows with little
to lose.

**Ranks under a budget.** For given clusters, coordinate r of flat c saves the weighted eigenvalue lambda_cr of its Gram
and costs n_c numbers for the cluster's rows plus d for its basis vector. Inside a flat all coordinates cost the same,
and the saving falls with r. Taking the best ratios of saving to cost first (water-filling) is therefore optimal up to
the last coordinate. The rest of the budget is filled greedily with the coordinates that still fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kflats.common.errors import DoesNotFitError
from kflats.numerics.gram import (
    axes_of_few,
    cluster_grams,
    complement,
    energy_outside,
    improve_basis,
    leading_basis,
    move_rows,
    refined_eigenvectors,
)
from kflats.numerics.loss import Loss, Squared
from kflats.numerics.rows import BLOCK, PartOfRows, Rows, slices

_SQUARED = Squared()


@dataclass(frozen=True)
class Assignment:
    """``labels`` (n,) uint8 or int16 (of equal costs the lower flat); squared distances ``dist2`` (n,) to the chosen
    flat; ``objective`` = sum_i m_i (w_i rho(dist_i) + multiplier * rank of its flat). On request, ``margin`` (n,): how
    much more the second choice costs, and ``stayed`` (n,): squared distances to the flats of earlier labels."""

    labels: Tensor
    dist2: Tensor
    objective: float
    margin: Tensor | None = None
    stayed: Tensor | None = None


def squared_norms(rows: Rows) -> Tensor:
    """(n,) squared row norms."""
    return torch.cat([torch.linalg.vector_norm(block, dim=1).square_() for _, block in slices(rows)])


def assign(
    cloud: WeightedRows,
    bases: tuple[Tensor, ...],
    *,
    multiplier: float = 0.0,
    exact: bool = False,
    margins: bool = False,
    loss: Loss = _SQUARED,
    before: Tensor | None = None,
) -> Assignment:
    """The flat of least cost for every row, block by block.

    Args:
        bases: orthonormal (j_c, d), one for each flat.
        multiplier: cost of a stored number, in units of the weighted squared error.
        exact: allow one more choice, label k: the row is kept as it is, for d numbers.
        margins: whether to return margins.
        loss: rho of a distance. It changes the choice where there is a multiplier, and the objective always.
        before: (n,) labels for ``stayed``.
    """
    rows, n, k = cloud.rows, cloud.rows.shape[0], len(bases)
    measure = _Measure(bases, rows.shape[1], rows.dtype)
    kept = [cloud.width] if exact else []
    ranks = torch.tensor([len(b) for b in bases] + kept, dtype=rows.dtype, device=rows.device)
    labels = torch.empty(n, dtype=torch.uint8 if k + exact <= 256 else torch.int16, device=rows.device)
    dist2 = torch.empty(n, dtype=rows.dtype, device=rows.device)
    margin = torch.empty(n, dtype=rows.dtype, device=rows.device) if margins else None
    stayed = torch.empty(n, dtype=rows.dtype, device=rows.device) if before is not None else None
    objective = torch.zeros((), dtype=torch.float64, device=rows.device)
    for part, block in slices(rows):
        distances = measure(block, cloud.norms2[part], exact)
        cost = distances if loss.is_squared else loss.rho(distances)
        if cloud.weights is not None:
            cost = cost * cloud.weights[part].to(rows.dtype).unsqueeze(1)
        if multiplier:
            cost = cost + multiplier * ranks
        best, chosen = cost.min(dim=1)
        labels[part] = chosen
        dist2[part] = distances.gather(1, chosen.unsqueeze(1)).squeeze(1)
        if stayed is not None and before is not None:
            old = before[part].to(torch.int64).unsqueeze(1)
            stayed[part] = distances.gather(1, old).squeeze(1)
        if margin is not None:
            margin[part] = cost.scatter_(1, chosen.unsqueeze(1), torch.inf).min(dim=1).values.sub_(best)
        if cloud.multiplicity is not None:
            best = best * cloud.multiplicity[part].to(best.dtype)
        objective += best.sum(dtype=torch.float64)
    return Assignment(labels, dist2, float(objective), margin, stayed)


def distances(rows: Rows, bases: tuple[Tensor, ...], norms2: Tensor) -> Tensor:
    """(n, k) squared distances of all rows to all flats, in memory: for samples."""
    measure = _Measure(bases, rows.shape[1], rows.dtype)
    return torch.cat([measure(block, norms2[here], False).clone() for here, block in slices(rows)])


class _Measure:
    """Squared distances of a block to all flats by one matrix product, directly or through complements."""

    def __init__(self, bases: tuple[Tensor, ...], d: int, dtype: torch.dtype) -> None:
        self.through = [2 * len(b) > d for b in bases]
        parts = [complement(b) if flip else b for b, flip in zip(bases, self.through, strict=True)]
        self.sizes = [len(p) for p in parts]
        self.stacked = torch.cat(parts).to(dtype)
        self.uniform = len(set(self.sizes)) == 1 and self.sizes[0] > 0
        self.flip = torch.tensor(self.through, device=self.stacked.device)
        self.buffer = torch.empty(BLOCK, len(self.stacked), dtype=dtype, device=self.stacked.device)

    def __call__(self, block: Tensor, norms2: Tensor, exact: bool) -> Tensor:
        k = len(self.sizes)
        y = torch.mm(block, self.stacked.T, out=self.buffer[: len(block)])
        out = y.new_zeros(len(block), k + exact)
        if self.uniform:
            torch.linalg.vector_norm(y.view(len(block), k, -1), dim=2, out=out[:, :k])
        else:
            for c, part in enumerate(y.split(self.sizes, dim=1)):
                if part.shape[1]:
                    out[:, c] = torch.linalg.vector_norm(part, dim=1)
        energies = out[:, :k].square_()
        inside = (norms2.unsqueeze(1) - energies).clamp_min_(0.0)
        if not any(self.through):
            out[:, :k] = inside
        elif not all(self.through):
            out[:, :k] = torch.where(self.flip, energies, inside)
        return out


@dataclass(frozen=True)
class Filling:
    """``ranks`` of each flat, numbers ``used`` of the budget, and the Lagrange ``multiplier`` mu: the saving per number
    at which the budget ran out."""

    ranks: tuple[int, ...]
    used: int
    multiplier: float


def fill(spectra: Tensor, costs: Tensor, budget: int, *, floor: int = 1) -> Filling:
    """Ranks that maximise sum of kept eigenvalues with sum_c rank_c cost_c <= budget.

    Args:
        spectra: (k, d), descending, not negative.
        costs: (k,) whole numbers: what one coordinate of flat c costs.
        budget: numbers to spend. It is never exceeded, and falls short by less than the cheapest coordinate that still
            saves something.
        floor: rank that every flat gets first.

    Raises:
        KflatsError: the floor alone exceeds the budget.

    >>> fill(torch.tensor([[9., 4., 1.], [8., 2., 0.]]), torch.tensor([2, 3]), 9).ranks
    (3, 1)
    """
    k, d = spectra.shape
    costs = costs.to(spectra.device)
    floor = min(floor, d)
    used = int(costs.sum()) * floor
    if used > budget:
        raise DoesNotFitError(
            f"a budget of {budget:,} numbers cannot hold {k} flats of rank {floor} ({used:,} numbers)",
            hint="a larger budget, or fewer flats",
        )
    ratio = (spectra.to(torch.float64) / costs.to(torch.float64).unsqueeze(1))[:, floor:]
    flat = torch.arange(k, device=spectra.device).unsqueeze(1).expand(k, d - floor).reshape(-1)
    # Stable, so that equal ratios keep the order of flats and of coordinates: reproducible ties.
    values, order = torch.sort(ratio.reshape(-1), descending=True, stable=True)
    flat = flat[order]
    spend = torch.cumsum(costs.to(torch.int64)[flat], 0) + used
    whole = int((spend <= budget).sum())
    ranks = torch.full((k,), floor, dtype=torch.int64)
    ranks += torch.bincount(flat[:whole].cpu(), minlength=k)
    used = int(spend[whole - 1]) if whole else used
    multiplier = float(values[whole]) if whole < len(values) else 0.0
    # Water-filling ends at the first coordinate that does not fit. Cheaper ones may still fit: best ratio first.
    next_ratio = torch.cat([ratio, ratio.new_full((k, 1), -1.0)], 1).cpu()  # -1: the flat is full
    while True:
        open_flats = [c for c in range(k) if int(ranks[c]) < d and int(costs[c]) <= budget - used]
        if not open_flats:
            break
        best = max(open_flats, key=lambda c: (float(next_ratio[c, int(ranks[c]) - floor]), int(costs[c])))
        ranks[best] += 1
        used += int(costs[best])
    return Filling(tuple(ranks.tolist()), used, multiplier)


Progress = Callable[[str, int, float], None]
"""Called with (phase, iteration, objective)."""


DOUBTFUL = 0.1
"""Share of the rows that a partial E-step assigns anew: the rows that are nearest to changing their flat."""

PARTIAL = 6
"""Partial E-steps after a whole one. They are cheap, and nearly all rows that move are among the doubtful rows. Only a
whole E-step decides whether EM has converged."""


@dataclass(frozen=True)
class Stopping:
    """When EM stops: after an iteration that lowers the objective by less than ``tolerance`` of it, at the latest after
    ``max_iterations``. ``progress`` is called in every iteration."""

    tolerance: float = 1e-3
    max_iterations: int = 100
    progress: Progress | None = None

    def report(self, phase: str, iteration: int, objective: float) -> None:
        """Call ``progress``, if there is one."""
        if self.progress:
            self.progress(phase, iteration, objective)


_CLOSE = Stopping(1e-4)


@dataclass(frozen=True)
class RankSpec:
    """The ranks of ``k`` flats: one ``rank`` for all of them, or a ``budget`` of numbers that is filled flat by flat.
    With ``exact``, the budget may also keep single rows exactly."""

    k: int
    rank: int | None = None
    budget: int | None = None
    exact: bool = False


@dataclass(frozen=True)
class Start:
    """Where EM begins: ``labels`` (n,) of all rows, with the clusters' ``grams`` where they are known; or ``bases``.

    EM with a budget needs labels. With bases it also takes their Lagrange ``multiplier``; None: the first M-step fills
    the budget anew.
    """

    labels: Tensor | None = None
    bases: tuple[Tensor, ...] | None = None
    grams: Tensor | None = None
    multiplier: float | None = None


@dataclass(frozen=True)
class WeightedRows:
    """Rows with their weights w (n,) and squared norms (n,). In a sample, ``multiplicity`` (n,) says how many rows of
    the matrix each row stands for. ``stored``: numbers of a row of the matrix, where ``rows`` are coordinates of it;
    0: as many as columns."""

    rows: Rows
    norms2: Tensor
    weights: Tensor | None = None
    multiplicity: Tensor | None = None
    stored: int = 0

    @property
    def width(self) -> int:
        """Numbers that a whole row, or a direction of a flat, takes."""
        return self.stored or self.rows.shape[1]

    @property
    def mass(self) -> Tensor | None:
        """w_i m_i: the weight of row i in Grams."""
        if self.multiplicity is None:
            return self.weights
        return self.multiplicity if self.weights is None else self.weights * self.multiplicity

    def seen_by(self, loss: Loss) -> WeightedRows:
        """The rows with the weights that ``loss`` gives them at a distance of their own norm: squares that stand for
        the loss while no flat is known. The mean weight stays."""
        if loss.is_squared:
            return self
        tilt = loss.weight(self.norms2, self.norms2).to(torch.float64)
        total = float(tilt.sum())
        if total <= 0:
            return self
        tilt = (tilt * (len(tilt) / total)).to(self.norms2.dtype)
        return replace(self, weights=tilt if self.weights is None else self.weights * tilt)

    def bare(self, index: Tensor) -> WeightedRows:
        """The rows at ``index``, without weights."""
        return WeightedRows(PartOfRows(self.rows, index), self.norms2[index], stored=self.stored)

    def counts(self, labels: Tensor, k: int) -> Tensor:
        """Rows (with multiplicity) of each of k clusters, rounded down: their sum never exceeds all rows."""
        if self.multiplicity is None:
            return torch.bincount(labels.to(torch.int64), minlength=k)
        mass = self.multiplicity.to(torch.float64)
        return torch.bincount(labels.to(torch.int64), weights=mass, minlength=k).to(torch.int64)


def weighted_rows(rows: Rows, weights: Tensor | None, stored: int = 0) -> tuple[WeightedRows, float]:
    """The rows with weights (n,) divided by their mean, and that mean. ``stored``: as ``WeightedRows``.

    The scale of w must not matter, because errors and the Lagrange multiplier are compared in float32.
    """
    scale = 1.0
    if weights is not None:
        scale = float(weights.sum(dtype=torch.float64)) / rows.shape[0]
        weights = (weights.to(torch.float64) / scale).to(rows.dtype).to(rows.device)
    return WeightedRows(rows, squared_norms(rows), weights, stored=stored), scale


@dataclass(frozen=True)
class FlatsFit:
    """The result of k-flats EM.

    ``labels`` (n,): the flat of each row; k for a row that is kept exactly. ``bases``: orthonormal (j_c, d), leading
    directions first. ``spectra`` (k, d): eigenvalues of the clusters' Grams; for equal ranks far below d, the leading
    eigenvalues and the mean of the others. ``objective``: the weighted error after each accepted iteration, falling.
    ``converged``: False if the iteration limit ended EM. ``multiplier``: the Lagrange multiplier of the budget.
    ``grams`` (k, d, d): the clusters' Grams, where a further EM may go on with them (``refit=False``).
    ``loss``: the loss that was minimised, its threshold a distance. For a loss other than squares, ``spectra`` belong
    to the reweighted Grams, the last value of ``objective`` is the sum at the returned flats, and the values before it
    are upper bounds (``robust_em``).
    """

    labels: Tensor
    bases: tuple[Tensor, ...]
    spectra: Tensor
    objective: tuple[float, ...]
    converged: bool
    multiplier: float = 0.0
    grams: Tensor | None = None
    loss: Loss = Squared()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Dimension of each flat."""
        return tuple(len(basis) for basis in self.bases)

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each flat's rows: one alone."""
        return tuple((rank,) for rank in self.ranks)

    @property
    def error(self) -> float:
        """The objective reached."""
        return self.objective[-1]


def em(cloud: WeightedRows, shape: RankSpec, start: Start, stop: Stopping = _CLOSE, *, refit: bool = True) -> FlatsFit:
    """EM on squared errors.

    For equal ranks it begins from labels or bases, and changes the Grams of ``start``. ``refit=False`` leaves out the
    exact last M-step and the spectra: for seeds, which are only compared.
    """
    if shape.rank is not None:
        return _em_uniform(cloud, shape.k, shape.rank, start, stop, refit)
    assert start.labels is not None
    return _em_filled(cloud, shape, start.labels, stop)


def _em_uniform(cloud: WeightedRows, k: int, rank: int, start: Start, stop: Stopping, refit: bool) -> FlatsFit:
    rows, mass, labels = cloud.rows, cloud.mass, start.labels
    if labels is None:
        assert start.bases is not None
        labels = assign(cloud, start.bases).labels
    grams = cluster_grams(rows, labels, k, mass) if start.grams is None else start.grams
    bases = tuple(leading_basis(gram, rank, rows.dtype) for gram in grams)
    history: list[float] = []
    converged = False
    doubtful: Tensor | None = None  # the rows of partial E-steps
    partial = 0
    for iteration in range(stop.max_iterations):
        if doubtful is None:
            step = assign(cloud, bases, margins=k > 1)
            new, objective, known = step.labels, step.objective, True
            if history and objective >= history[-1]:
                converged = True
                break
        else:
            new = labels.clone()
            new[doubtful] = assign(cloud.bare(doubtful), bases).labels
        moved = (new != labels).nonzero().squeeze(1)
        grams = update_grams(grams, rows, moved, labels, new, mass)
        touched = set(torch.cat([labels[moved], new[moved]]).unique().tolist())
        labels = new
        if doubtful is not None:
            objective = sum(energy_outside(gram, basis) for gram, basis in zip(grams, bases, strict=True))
            # A difference of large numbers: a tiny one is only rounding.
            known = objective > 1e-5 * float(grams.diagonal(dim1=1, dim2=2).sum())
        small = bool(history) and history[-1] - objective <= stop.tolerance * history[-1]
        if not history or (known and objective < history[-1]):
            history.append(objective)
        stop.report("em", iteration, objective)
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
        return FlatsFit(labels, bases, torch.empty(0, dtype=torch.float32), tuple(history), converged, grams=grams)
    solved = [refined_eigenvectors(gram, basis, rank) for gram, basis in zip(grams, bases, strict=True)]
    spectra = torch.stack([values for values, _ in solved])
    final = float(spectra[:, rank:].sum())
    if not history or final < history[-1]:
        history.append(final)
    return FlatsFit(labels, tuple(v.to(rows.dtype) for _, v in solved), spectra, tuple(history), converged)


def doubtful_rows(margin: Tensor, norms2: Tensor) -> Tensor:
    """The rows that are nearest to changing their flat."""
    share = margin / norms2.clamp_min(torch.finfo(norms2.dtype).tiny)
    cut = share.kthvalue(max(1, int(DOUBTFUL * len(share)))).values
    return (share <= cut).nonzero().squeeze(1)


def _em_filled(cloud: WeightedRows, shape: RankSpec, labels: Tensor, stop: Stopping) -> FlatsFit:
    rows, mass, k = cloud.rows, cloud.mass, shape.k
    grams = cluster_grams(rows, labels, k, mass)
    best = fit = filled_fit(cloud, shape, labels, grams)
    history = [fit.error]
    stale = 0
    for iteration in range(stop.max_iterations):
        step = assign(cloud, fit.bases, multiplier=fit.multiplier, exact=shape.exact)
        new = step.labels
        if not affordable(cloud, new, k, k, shape.budget):  # keep the rows exact that were exact before
            new = torch.where((new == k) | (labels == k), labels, new)
        moved = (new != labels).nonzero().squeeze(1)
        grams = update_grams(grams, rows, moved, labels, new, mass)
        labels = new
        fit = filled_fit(cloud, shape, labels, grams)
        stop.report("em", iteration, fit.error)
        fell = history[-1] - fit.error
        if fell > 0:
            best = fit
            history.append(fit.error)
        # The multiplier changes with every filling of the budget, so one small step does not prove convergence.
        stale = stale + 1 if fell <= stop.tolerance * history[-1] else 0
        if stale >= 2 or not len(moved):
            return replace(best, objective=tuple(history), converged=True)
    return replace(best, objective=tuple(history), converged=False)


def filled_fit(cloud: WeightedRows, shape: RankSpec, labels: Tensor, grams: Tensor, loss: Loss = _SQUARED) -> FlatsFit:
    """The exact M-step: eigenvectors of the clusters' Grams, and the ranks that fill the budget."""
    k, n, width = shape.k, cloud.rows.shape[0], cloud.width
    counts = cloud.counts(labels, k + 1)
    solved = [axes_of_few(gram, n) for gram in grams]
    spectra = torch.stack([values for values, _ in solved])
    filling = fill(spectra, counts[:k] + width, (shape.budget or 0) - int(counts[k]) * width)
    bases = tuple(v[:r].to(cloud.rows.dtype) for (_, v), r in zip(solved, filling.ranks, strict=True))
    error = float(sum(spectra[c, r:].sum() for c, r in enumerate(filling.ranks)))
    return FlatsFit(labels, bases, spectra, (error,), False, filling.multiplier, loss=loss)


def affordable(cloud: WeightedRows, labels: Tensor, groups: int, k: int, budget: int | None) -> bool:
    """Whether the rows kept exactly (label ``groups``) leave enough of the budget for rank 1 in each of k flats."""
    counts = cloud.counts(labels, groups + 1)
    return int(counts[groups] + k) * cloud.width + int(counts[:groups].sum()) <= (budget or 0)


def update_grams(grams: Tensor, rows: Rows, moved: Tensor, old: Tensor, new: Tensor, mass: Tensor | None) -> Tensor:
    """Grams after the rows ``moved`` went from clusters ``old`` (n,) to ``new`` (n,); may change ``grams``."""
    # A row that moved costs two products. Where fewer than a third moved, that beats one pass over all rows.
    if 3 * len(moved) > rows.shape[0]:
        return cluster_grams(rows, new, grams.shape[0], mass)
    move_rows(grams, rows, moved, old[moved], new[moved], mass)
    return grams
