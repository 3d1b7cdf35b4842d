"""Nested ranks: k flats, each with one ordered basis of which every row keeps a prefix.

    minimise  sum_i w_i (||a_i||^2 - ||first r_i coordinates of a_i in flat c(i)||^2)
    with      sum_i r_i  +  d sum_c R_c  +  d * (rows kept exactly)  <=  budget,
              r_i in {r_c1 <= ... <= r_cL = R_c}

The rows of one flat with one rank are a rank group; each flat has L of them. A flat of one rank treats all its rows
alike. With nested ranks an important row keeps more coordinates of the same basis than a rare one, and no second basis
is stored. E-step: one product with all bases, energies of the prefixes by segment sums, then the (flat, rank group)
that minimises w dist^2 + mu r. As in ``flats``, mu is the Lagrange multiplier of the budget.

**M-step of one flat.** Rows of rank group l keep the first r_l coordinates, r_1 <= ... <= r_L. With T_l the Gram of
these rows, the basis V (orthonormal, all d directions) and the ranks minimise, at the Lagrange multiplier mu of a
stored number,

    sum_l  tr T_l - tr(V_{:r_l} T_l V_{:r_l}')  +  mu n_l r_l        +  mu d r_L

Boundary r_l divides U, the coordinates between r_{l-1} and r_{l+1} (d for the last). Rows of the other groups use
either none or all of U, so the division matters to T_l alone, and the best one has a closed form: first the
eigenvectors of U T_l U' whose eigenvalue exceeds mu n_l (mu (n_L + d) for the last). ``sweep`` divides one boundary
after another: the objective never rises, and order and ranks are found together. It stops where only a change of three
blocks at once would gain; ``turn`` moves all blocks at fixed ranks.

**Start.** The first ranks decide which local minimum EM finds, and neither of two ways is always better: all L rank
groups at once (good for unweighted rows), or a few rank groups that are doubled up to L (good for weights that differ
much). Both are tried for a few iterations, and EM goes on from the better one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from kflats.common.errors import DoesNotFitError, KflatsError, is_whole
from kflats.numerics.fit import FILL_SAMPLE, Seeds, draw_sample, fit_cloud
from kflats.numerics.flats import RankSpec, Stopping, WeightedRows, affordable, assign, update_grams, weighted_rows
from kflats.numerics.gram import WideRows, cluster_grams, complement, top_eigenvectors
from kflats.numerics.loss import Squared
from kflats.numerics.rows import BLOCK, Rows, checked_rows, slices


@dataclass(frozen=True)
class Ordered:
    """``basis`` (min(n, d), d) orthonormal, of which the first ``ranks[-1]`` rows are stored; ``ranks`` rising."""

    basis: Tensor
    ranks: tuple[int, ...]


def sweep(ordered: Ordered, grams: Tensor, counts: list[int], multiplier: float, width: int | None = None) -> Ordered:
    """Divide every boundary anew, from the last to the first. The objective above never rises.

    Args:
        grams: (L, d, d), the Gram T_l of each rank group. counts: its number of rows n_l.
        multiplier: mu. Every group keeps at least the first coordinate.
        width: numbers that a direction takes; None: d.
    """
    basis, ranks = ordered.basis.clone(), list(ordered.ranks)
    d, top = basis.shape[0], len(ranks) - 1
    width = width or d
    for level in range(top, -1, -1):
        low = ranks[level - 1] if level else 0
        high = d if level == top else ranks[level + 1]
        # A rank group without rows stays between its neighbours, free for rows that come later.
        if high - low < 1 or not counts[level]:
            continue
        part = basis[low:high]
        values, vectors = torch.linalg.eigh(part @ grams[level].to(basis.dtype) @ part.T)
        basis[low:high] = vectors.flip(1).T @ part
        cost = multiplier * (counts[level] + (width if level == top else 0))
        ranks[level] = max(low + int((values > cost).sum()), 1)
    return Ordered(basis, tuple(ranks))


def captured(ordered: Ordered, grams: Tensor) -> Tensor:
    """(L, d): weighted energy of the rows of each rank group along each coordinate, diag(V T_l V')."""
    basis = ordered.basis
    return torch.stack([((basis @ gram.to(basis.dtype)) * basis).sum(1) for gram in grams]).clamp_min_(0.0)


@dataclass(frozen=True)
class NestedFilling:
    """``ranks`` of all rank groups, flat by flat, the numbers ``used``, and the Lagrange ``multiplier``."""

    ranks: tuple[tuple[int, ...], ...]
    used: int
    multiplier: float


def spend(energy: Tensor, counts: Tensor, budget: int, width: int | None = None) -> NestedFilling | None:
    """Ranks that keep the most energy with sum_cl n_cl r_cl + d sum_c r_cL <= budget.

    Bisection finds the multiplier at which the groups' best ranks just fit. The rest of the budget is spent one
    coordinate at a time, on the coordinate that saves most per number and still fits.

    Args:
        energy: (k, L, d), ``captured`` of each flat. counts: (k, L) rows.
        width: numbers that a direction takes; None: d.

    Returns None if rank 1 everywhere exceeds the budget.
    """
    k, levels, d = energy.shape
    counts = counts.cpu()
    # Groups without rows go first, where they cost nothing. The highest group in use pays for the basis; the basis of
    # a flat without rows is not stored.
    order = torch.argsort((counts > 0).to(torch.int8), dim=1, stable=True)
    cost = counts.gather(1, order).to(torch.float64)
    cost[:, -1] += (width or d) * (cost[:, -1] > 0)
    kept = torch.nn.functional.pad(energy.to(torch.float64).cpu().cumsum(2), (1, 0))
    kept = kept.gather(1, order.unsqueeze(2).expand(-1, -1, d + 1))
    steps = torch.arange(d + 1, dtype=torch.float64)

    def at(multiplier: float) -> tuple[Tensor, int]:
        ranks = (kept - multiplier * cost.unsqueeze(2) * steps).argmax(2).clamp_min(1)
        ranks[cost == 0] = 1
        ranks = ranks.cummax(1).values  # a prefix of the next group's
        return ranks, int((ranks * cost).sum())

    low, high = 0.0, float((kept[:, :, 1:] / cost.clamp_min(1).unsqueeze(2)).max()) + 1e-300
    if at(high)[1] > budget:
        ranks = torch.ones(k, levels, dtype=torch.int64)
        if int((ranks * cost).sum()) > budget:
            return None
    elif at(low)[1] <= budget:
        high = low
        ranks = at(low)[0]
    else:
        for _ in range(60):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if at(middle)[1] > budget else (low, middle)
        ranks = at(high)[0]
    used = _grow(ranks, kept, cost, budget)
    ranks = torch.zeros_like(ranks).scatter(1, order, ranks).cummax(1).values
    return NestedFilling(tuple(map(tuple, ranks.tolist())), used, high)


def _grow(ranks: Tensor, kept: Tensor, cost: Tensor, budget: int) -> int:
    """Raise ranks in place while a coordinate fits. Returns the numbers used."""
    k, levels, width = kept.shape
    used = int((ranks * cost).sum())
    for _ in range(k * levels * width):
        ceiling = torch.cat([ranks[:, 1:], torch.full((k, 1), width - 1)], dim=1)
        open_ = (ranks < ceiling) & (cost <= budget - used) & (cost > 0)
        if not bool(open_.any()):
            break
        gain = kept.gather(2, (ranks + 1).clamp_max(width - 1).unsqueeze(2)) - kept.gather(2, ranks.unsqueeze(2))
        score = torch.where(open_, gain.squeeze(2) / cost.clamp_min(1), -torch.inf)
        best = int(score.argmax())
        ranks.view(-1)[best] += 1
        used += int(cost.view(-1)[best])
    return used


def turn(ordered: Ordered, grams: Tensor) -> Ordered:
    """Turn all blocks at once at fixed ranks, where ``sweep``, which changes two blocks at a time, may have stopped.

    With S_l the Gram of the rows of group l or above, the energy kept, sum_l tr V_l S_l V_l' over the blocks
    V_l between ranks, is convex, so the orthonormal matrix nearest to its gradient [S_1 V_1', S_2 V_2', ...]'
    never lowers it (generalized power method; Journee et al., JMLR 2010).
    """
    basis, top = ordered.basis, ordered.ranks[-1]
    above = grams.to(basis.dtype).flip(0).cumsum(0).flip(0)
    starts = (0, *ordered.ranks[:-1])
    parts = [basis[low:high] @ gram for low, high, gram in zip(starts, ordered.ranks, above, strict=True)]
    u, _, vh = torch.linalg.svd(torch.cat(parts), full_matrices=False)
    turned = u @ vh
    return Ordered(torch.cat([turned, complement(turned)]) if top < len(basis) else turned, ordered.ranks)


SWEEPS = 2
"""Sweeps over all boundaries in an M-step: the first gains most, and the next iteration of EM goes on."""

PATIENCE = 3
"""Iterations in a row with next to no gain before EM stops: ranks and multiplier must settle together."""

SPREAD = 1.5
"""By default, an E-step looks for its multiplier within this factor of the M-step's."""

_DEFAULT = Stopping(1e-3, 60)


@dataclass(frozen=True)
class NestedFit:
    """The result of EM with nested ranks.

    ``labels`` (n,): c * L + l for rank group l of flat c; k * L for a row that is kept exactly. ``flats``: the ordered
    bases with their L ranks. ``objective``: the weighted squared error within the budget after each accepted iteration,
    falling. ``used``: numbers stored. ``multiplier``: the saving per number at which the budget ran out. ``converged``:
    False if the iteration limit ended EM. ``grams`` (k L, d, d): the rank groups' Grams, between iterations of EM.
    """

    labels: Tensor
    flats: tuple[Ordered, ...]
    objective: tuple[float, ...]
    used: int
    multiplier: float
    converged: bool = False
    grams: Tensor | None = None

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Nested ranks of each flat, rising."""
        return tuple(flat.ranks for flat in self.flats)

    @property
    def bases(self) -> tuple[Tensor, ...]:
        """What is stored of each flat's basis."""
        return tuple(flat.basis[: flat.ranks[-1]] for flat in self.flats)

    @property
    def groups_in_use(self) -> int:
        """How many different (flat, rank) the rows have; exact rows count as one more."""
        kinds = [(c, rank) for c, ranks in enumerate(self.levels) for rank in ranks] + [(-1, 0)]
        return len({kinds[label] for label in self.labels.unique().tolist()})

    @property
    def error(self) -> float:
        """The objective reached."""
        return self.objective[-1]


def assign_nested(
    cloud: WeightedRows, flats: Sequence[Ordered], multipliers: Sequence[float], *, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """The flat and rank group of every row that minimise w dist^2 + multiplier * rank, for several multipliers at once.

    Args:
        flats: with L ranks each.
        multipliers: G numbers. One pass serves all of them, because the product with the bases does not depend on them.
        exact: allow label k * L: the row is kept exactly, for d numbers.

    Returns labels (G, n), c * L + l, and the numbers (G,) that the rows store at each multiplier. Equal costs go to the
    lower label.
    """
    rows, n, per, width = cloud.rows, cloud.rows.shape[0], len(flats[0].ranks), cloud.width
    groups = len(flats) * per
    stacked = torch.cat([flat.basis[: flat.ranks[-1]] for flat in flats]).to(rows.dtype).T.contiguous()
    ranks = torch.tensor([r for flat in flats for r in flat.ranks] + [width], dtype=rows.dtype, device=rows.device)
    segments, first = [], 0
    for flat in flats:
        segments.append([(first + low, first + high) for low, high in pairwise([0, *flat.ranks])])
        first += flat.ranks[-1]
    dtype = torch.uint8 if groups + exact <= 256 else torch.int16
    labels = torch.empty(len(multipliers), n, dtype=dtype, device=rows.device)
    used = torch.zeros(len(multipliers), dtype=torch.float64, device=rows.device)
    buffer = torch.empty(BLOCK, stacked.shape[1], dtype=rows.dtype, device=rows.device)
    for start, block in rows.blocks(BLOCK):
        here = slice(start, start + len(block))
        y = torch.mm(block, stacked, out=buffer[: len(block)])
        energy = y.new_zeros(len(segments), per, len(block))
        for c, flat_segments in enumerate(segments):
            for level, (low, high) in enumerate(flat_segments):
                if low < high:
                    energy[c, level] = torch.linalg.vector_norm(y[:, low:high], dim=1)
        kept = energy.square_().cumsum(1).view(groups, len(block))
        loss = (cloud.norms2[here] - kept).clamp_min_(0.0)
        if cloud.weights is not None:
            loss *= cloud.weights[here].to(loss.dtype)
        for g, multiplier in enumerate(multipliers):
            best, chosen = torch.add(loss, ranks[:groups].unsqueeze(1), alpha=multiplier).min(dim=0)
            if exact:
                chosen = torch.where(best > multiplier * width, groups, chosen)
            labels[g, here] = chosen
            stored = ranks[chosen]
            if cloud.multiplicity is not None:
                stored = stored * cloud.multiplicity[here].to(stored.dtype)
            used[g] += stored.sum(dtype=torch.float64)
    return labels, used


def em_nested(
    cloud: WeightedRows,
    flats: Sequence[Ordered],
    budget: int,
    multiplier: float,
    stop: Stopping = _DEFAULT,
    *,
    exact: bool = False,
    spread: float = SPREAD,
) -> NestedFit:
    """EM from ordered bases, until ``PATIENCE`` iterations in a row gain next to nothing.

    Args:
        multiplier: of the first E-step. The right order is enough, since each E-step corrects it to fit the budget.
        spread: an E-step takes the multiplier that fits the budget if it lies within this factor of the M-step's.

    Memory: k L Grams of d x d float64 numbers.

    Raises:
        KflatsError: the budget does not hold k flats of rank 1.
    """
    rows, groups = cloud.rows, len(flats) * len(flats[0].ranks)
    state: NestedFit | None = None
    best: NestedFit | None = None
    history: list[float] = []
    here, reach, stale, converged = tuple(flats), spread, 0, False
    for iteration in range(max(stop.max_iterations, 1)):
        if state is not None:
            state = _revive(state)
            here, multiplier = state.flats, state.multiplier
        labels, multiplier, inside = _within(cloud, here, budget, multiplier, reach, exact)
        reach = max(reach**0.5, 1.02) if inside else min(reach**2, spread)
        if exact and not affordable(cloud, labels, groups, len(here), budget):
            # Exact rows leave too little for rank 1 everywhere: keep the rows exact that were exact before.
            if state is None:
                labels = torch.where(labels == groups, groups - 1, labels)
            else:
                labels = torch.where((labels == groups) | (state.labels == groups), state.labels, labels)
        if state is None or state.grams is None:
            grams, still = cluster_grams(rows, labels, groups, cloud.mass), False
        else:
            moved = (labels != state.labels).nonzero().squeeze(1)
            still = not len(moved)
            grams = update_grams(state.grams, rows, moved, state.labels, labels, cloud.mass)
        state = _maximise(cloud, labels, grams, here, multiplier, budget)
        stop.report("em", iteration, state.error)
        fell = history[-1] - state.error if history else 0.0
        if not history or fell > 0:
            best = replace(state, grams=None)
            history.append(state.error)
        # The multiplier changes with every filling of the budget, so one small step does not prove convergence.
        stale = stale + 1 if iteration and fell <= stop.tolerance * history[-1] else 0
        if stale >= PATIENCE or still:
            converged = True
            break
    assert best is not None
    return replace(best, objective=tuple(history), converged=converged)


def settle(cloud: WeightedRows, fit: NestedFit, budget: int, *, sweeps: int = 12) -> NestedFit:
    """A longer last M-step for the labels of ``fit``, whose own are short. It is kept if the error falls."""
    groups = len(fit.flats) * len(fit.flats[0].ranks)
    grams = cluster_grams(cloud.rows, fit.labels, groups, cloud.mass)
    done = _maximise(cloud, fit.labels, grams, fit.flats, fit.multiplier, budget, sweeps)
    if done.error >= fit.error:
        return fit
    return replace(done, objective=(*fit.objective, done.error), converged=fit.converged, grams=None)


def _within(
    cloud: WeightedRows, flats: Sequence[Ordered], budget: int, multiplier: float, spread: float, exact: bool
) -> tuple[Tensor, float, bool]:
    """The E-step at the lowest of some multipliers near ``multiplier`` at which the rows fit the budget.

    Returns labels, that multiplier, and whether it lies between those tried. It must be near ``multiplier`` because the
    ranks change too: where ranks are too low for now, a very low multiplier would give all rows the highest rank.
    """
    multipliers = [multiplier * spread ** (g / 4) for g in range(-4, 5)]
    choices, used = assign_nested(cloud, flats, multipliers, exact=exact)
    left = budget - cloud.width * sum(flat.ranks[-1] for flat in flats)
    over = int((used > left).sum())
    pick = min(over, len(multipliers) - 1)
    return choices[pick], multipliers[pick], 0 < over < len(multipliers)


def _maximise(
    cloud: WeightedRows,
    labels: Tensor,
    grams: Tensor,
    flats: Sequence[Ordered],
    multiplier: float,
    budget: int,
    sweeps: int = SWEEPS,
) -> NestedFit:
    """The M-step: order and ranks at the multiplier ``multiplier``, then the ranks that just fit the budget."""
    k, levels, d = len(flats), len(flats[0].ranks), cloud.rows.shape[1]
    counts = cloud.counts(labels, k * levels + 1).cpu()
    table, kept_exactly = counts[:-1].view(k, levels), cloud.width * int(counts[-1])
    parts = grams.view(k, levels, d, d)
    ordered = list(flats)
    for c in range(k):
        for _ in range(sweeps):
            ordered[c] = sweep(turn(ordered[c], parts[c]), parts[c], table[c].tolist(), multiplier, cloud.width)
    energy = torch.stack([captured(flat, part) for flat, part in zip(ordered, parts, strict=True)])
    filling = spend(energy, table, budget - kept_exactly, cloud.width)
    if filling is None:
        raise DoesNotFitError(
            f"a budget of {budget:,} numbers cannot hold {k} flats of rank 1", hint="a larger budget, or fewer flats"
        )
    total = float(grams.diagonal(dim1=1, dim2=2).sum())
    kept = sum(float(energy[c, q, :r].sum()) for c, flat in enumerate(filling.ranks) for q, r in enumerate(flat))
    done = tuple(replace(flat, ranks=ranks) for flat, ranks in zip(ordered, filling.ranks, strict=True))
    error = max(total - kept, 0.0)
    return NestedFit(labels, done, (error,), filling.used + kept_exactly, filling.multiplier, grams=grams)


def _revive(state: NestedFit) -> NestedFit:
    """Give each rank group without rows a rank in the middle of the widest gap, and sort the groups by rank."""
    k, levels = len(state.flats), len(state.flats[0].ranks)
    counts = torch.bincount(state.labels.to(torch.int64), minlength=k * levels + 1).tolist()
    new = torch.arange(k * levels + 1)
    flats = []
    for c, flat in enumerate(state.flats):
        own = counts[c * levels : (c + 1) * levels]
        ranks = {q: flat.ranks[q] for q in range(levels) if own[q]} or {levels - 1: flat.ranks[-1]}
        for q in range(levels):
            if q not in ranks:
                marks = sorted({0, *ranks.values()})
                gap, low = max((b - a, a) for a, b in pairwise(marks))
                ranks[q] = max(low + gap // 2, 1)
        order = sorted(range(levels), key=lambda q: (ranks[q], q))
        for place, q in enumerate(order):
            new[c * levels + q] = c * levels + place
        flats.append(replace(flat, ranks=tuple(ranks[q] for q in order)))
    if torch.equal(new, torch.arange(k * levels + 1)):
        return replace(state, flats=tuple(flats))
    labels = new.to(state.labels.device)[state.labels.to(torch.int64)].to(state.labels.dtype)
    assert state.grams is not None
    grams = state.grams[torch.argsort(new)[:-1].to(state.grams.device)]
    return replace(state, flats=tuple(flats), labels=labels, grams=grams)


WIDE = 4.0
"""The range of multipliers for a few rank groups: their ranks are far from those that the budget allows."""


def fit_nested(
    matrix: Tensor | Rows,
    k: int,
    levels: int,
    *,
    budget: int,
    exact: bool = False,
    weights: Tensor | None = None,
    start: Seeds = "auto",
    stop: Stopping = _DEFAULT,
    seed: int = 0,
) -> NestedFit:
    """k flats with ``levels`` nested ranks each, within a budget of numbers (never exceeded).

    Args:
        matrix: (n, d), a tensor or any ``Rows``; read in blocks.
        k: number of flats. levels: number of nested ranks in each; at most d of them differ.
        budget: numbers to store in all, coordinates and bases.
        exact: keep single rows exactly where that lowers the error.
        weights: (n,) w_i >= 0.
        start: as ``fit_flats``, for the flats to begin with.
        stop: when EM stops.
        seed: of every random step.

    Choose it when rows differ much in importance, or in how many directions they need. With one flat and 8 to 16
    levels all rows share one basis. Memory: k * levels Grams of d x d numbers.

    Raises:
        KflatsError: as ``fit_flats``; no whole numbers, k * levels above 32766.

    >>> a = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [0.5, 3.0]])
    >>> fit = fit_nested(a, 1, 2, budget=12)      # 8 coordinates for the rows, 4 numbers for the basis
    >>> fit.used, fit.error < 1e-6
    (12, True)
    """
    rows = checked_rows(matrix, weights)
    d = rows.shape[1]
    if not is_whole(k, 1) or not is_whole(levels, 1, 32766 // k) or not is_whole(budget, 1):
        raise KflatsError(
            f"{k} flats of {levels} levels in a budget of {budget} numbers are not supported",
            hint="whole numbers from 1 on, and at most 32766 for k * levels",
        )
    wide = WideRows.of(rows) if rows.shape[0] < d else None
    cloud, scale = weighted_rows(rows if wide is None else wide.inside, weights, d)
    d = cloud.rows.shape[1]
    first = fit_cloud(cloud, RankSpec(k, budget=budget), Squared(), start, Stopping(1e-2), seed)
    part = draw_sample(cloud, FILL_SAMPLE, torch.Generator().manual_seed(seed))
    labels = assign(part, first.bases, multiplier=first.multiplier).labels.to(torch.int64)
    grams = cluster_grams(part.rows, labels, k, part.mass)
    flats = tuple(Ordered(top_eigenvectors(gram, d)[1], (1,)) for gram in grams)
    tried = [
        _climb(part, flats, labels, ladder, budget, first.multiplier, exact, spread, Stopping(1e-2, 15, stop.progress))
        for ladder, spread in zip(_ladders(min(levels, d)), (SPREAD, WIDE), strict=False)
    ]
    best = min(tried, key=lambda fit: fit.error)
    fit = em_nested(cloud, best.flats, budget, best.multiplier, stop, exact=exact)
    if part is cloud and best.error < fit.error:
        fit = replace(best, converged=fit.converged)
    fit = settle(cloud, fit, budget)
    if wide is not None:
        fit = replace(fit, flats=tuple(replace(flat, basis=wide.lifted(flat.basis)) for flat in fit.flats))
    return replace(fit, objective=tuple(scale * value for value in fit.objective), multiplier=scale * fit.multiplier)


def _ladders(levels: int) -> list[list[int]]:
    """Numbers of rank groups to try one after the other: all at once, and from 2 up by doubling.

    >>> _ladders(8), _ladders(2)
    ([[8], [2, 4, 8]], [[2]])
    """
    ladder = [levels]
    while ladder[0] > 3:
        ladder.insert(0, -(-ladder[0] // 2))
    return [[levels]] if len(ladder) == 1 else [[levels], ladder]


def _climb(
    cloud: WeightedRows,
    flats: tuple[Ordered, ...],
    labels: Tensor,
    ladder: list[int],
    budget: int,
    multiplier: float,
    exact: bool,
    spread: float,
    stop: Stopping,
) -> NestedFit:
    """EM with each number of rank groups of the ladder, from the ranks that the rows want."""
    fit: NestedFit | None = None
    for levels in ladder:
        wanted = wanted_ranks(cloud, flats, labels, multiplier)
        flats = tuple(replace(f, ranks=quantiles(h, levels)) for f, h in zip(flats, wanted, strict=True))
        fit = em_nested(cloud, flats, budget, multiplier, stop, exact=exact, spread=spread)
        flats, multiplier, labels = fit.flats, fit.multiplier, fit.labels.to(torch.int64) // levels
    assert fit is not None
    return fit


def wanted_ranks(cloud: WeightedRows, flats: tuple[Ordered, ...], labels: Tensor, multiplier: float) -> Tensor:
    """(k, d + 1): how many rows of each flat want r coordinates, r = argmin w tail(r) + multiplier r.

    ``labels`` (n,): the flat of each row; rows labelled k or more are left out.
    """
    rows, d = cloud.rows, cloud.rows.shape[1]
    wanted = torch.zeros(len(flats), d + 1, dtype=torch.float64)
    steps = torch.arange(d + 1, dtype=rows.dtype, device=rows.device) * multiplier
    bases = [flat.basis.to(rows.dtype) for flat in flats]
    for here, block in slices(rows):
        for c, basis in enumerate(bases):
            mine = (labels[here] == c).nonzero().squeeze(1)
            gain = (block[mine] @ basis.T).square_().cumsum(1)
            if cloud.weights is not None:
                gain *= cloud.weights[here][mine].to(gain.dtype).unsqueeze(1)
            best = (torch.nn.functional.pad(gain, (1, 0)) - steps).argmax(1).cpu()
            counted = None if cloud.multiplicity is None else cloud.multiplicity[here][mine].to(torch.float64).cpu()
            wanted[c] += torch.bincount(best, weights=counted, minlength=d + 1)
    return wanted


def quantiles(wanted: Tensor, levels: int) -> tuple[int, ...]:
    """The middles of ``levels`` equal parts of the rows, by the rank (d + 1,) they want; at least 1.

    >>> quantiles(torch.tensor([0., 4., 0., 2., 2.]), 2)
    (1, 3)
    """
    share = wanted.cumsum(0)
    if float(share[-1]) <= 0:
        return (1,) * levels
    middles = (torch.arange(levels, dtype=share.dtype) + 0.5) / levels * share[-1]
    return tuple(torch.searchsorted(share, middles).clamp(1, len(wanted) - 1).tolist())
