"""Nested ranks: k flats, each with one ordered basis of which every row keeps a prefix.

    minimise  sum_i w_i (||a_i||^2 - ||first r_i coordinates of a_i in flat c(i)||^2)
    with      sum_i r_i  +  d sum_c R_c  +  d * (rows kept exactly)  <=  budget,
              r_i in {r_c1 <= ... <= r_cL = R_c}

The rows of one flat with one rank are a rank group; each flat has L of them. A flat of one rank treats all its rows
alike. With nested ranks an important row keeps more coordinates of the same basis than a rare one, and no second basis
is stored. E-step: one product with all bases, energies of the prefixes by segment sums, then the (flat, rank group)
that minimises w dist^2 + mu r. M-step: ``ordered``. As in ``flats``, mu is the Lagrange multiplier of the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.flats import Stopping, WeightedRows, affordable, update_grams
from kflats.numerics.gram import cluster_grams
from kflats.numerics.ordered import Ordered, captured, spend, sweep, turn
from kflats.numerics.rows import BLOCK, Rows

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
    def groups_in_use(self) -> int:
        """How many different (flat, rank) the rows have; exact rows count as one more."""
        kinds = [(c, rank) for c, ranks in enumerate(self.levels) for rank in ranks] + [(-1, 0)]
        return len({kinds[label] for label in self.labels.unique().tolist()})

    @property
    def error(self) -> float:
        """The objective reached."""
        return self.objective[-1]


def assign_nested(
    rows: Rows,
    bases: Sequence[Tensor],
    levels: Sequence[Sequence[int]],
    norms2: Tensor,
    multipliers: Sequence[float] = (0.0,),
    *,
    weights: Tensor | None = None,
    multiplicity: Tensor | None = None,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """The flat and rank group of every row that minimise w dist^2 + multiplier * rank, for several multipliers at once.

    Args:
        bases: orthonormal (R_c, d). levels: L rising ranks <= R_c for each.
        norms2: squared norms of the rows.
        multipliers: G numbers. One pass serves all of them, because the product with the bases does not depend on them.
        exact: allow label k * L: the row is kept exactly, for d numbers.

    Returns labels (G, n), c * L + l, and the numbers (G,) that the rows store at each multiplier. Equal costs go to the
    lower label.
    """
    n, d = rows.shape
    per = len(levels[0])
    groups = len(bases) * per
    stacked = torch.cat(list(bases)).to(rows.dtype).T.contiguous()
    ranks = torch.tensor([r for flat in levels for r in flat] + [d], dtype=rows.dtype, device=rows.device)
    segments, first = [], 0
    for basis, flat in zip(bases, levels, strict=True):
        segments.append([(first + low, first + high) for low, high in zip([0, *flat], flat, strict=False)])
        first += len(basis)
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
        loss = (norms2[here] - kept).clamp_min_(0.0)
        if weights is not None:
            loss *= weights[here].to(loss.dtype)
        for g, multiplier in enumerate(multipliers):
            best, chosen = torch.add(loss, ranks[:groups].unsqueeze(1), alpha=multiplier).min(dim=0)
            if exact:
                chosen = torch.where(best > multiplier * d, groups, chosen)
            labels[g, here] = chosen
            stored = ranks[chosen]
            if multiplicity is not None:
                stored = stored * multiplicity[here].to(stored.dtype)
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
    choices, used = assign_nested(
        cloud.rows,
        [flat.basis[: flat.ranks[-1]] for flat in flats],
        [flat.ranks for flat in flats],
        cloud.norms2,
        multipliers,
        weights=cloud.weights,
        multiplicity=cloud.multiplicity,
        exact=exact,
    )
    left = budget - cloud.rows.shape[1] * sum(flat.ranks[-1] for flat in flats)
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
    table, kept_exactly = counts[:-1].view(k, levels), d * int(counts[-1])
    parts = grams.view(k, levels, d, d)
    ordered = list(flats)
    for c in range(k):
        for _ in range(sweeps):
            ordered[c] = sweep(turn(ordered[c], parts[c]), parts[c], table[c].tolist(), multiplier)
    energy = torch.stack([captured(flat, part) for flat, part in zip(ordered, parts, strict=True)])
    found = spend(energy, table, budget - kept_exactly)
    if found is None:
        raise KflatsError(
            f"a budget of {budget:,} numbers cannot hold {k} flats of rank 1",
            cause="each flat of rank 1 stores a basis vector and a coordinate a row",
            hint="a larger budget, or fewer flats",
        )
    total = float(grams.diagonal(dim1=1, dim2=2).sum())
    kept = sum(float(energy[c, q, :r].sum()) for c, flat in enumerate(found.ranks) for q, r in enumerate(flat))
    done = tuple(replace(flat, ranks=ranks) for flat, ranks in zip(ordered, found.ranks, strict=True))
    error = max(total - kept, 0.0)
    return NestedFit(labels, done, (error,), found.used + kept_exactly, found.multiplier, grams=grams)


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
