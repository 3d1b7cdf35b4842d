"""Nested bands: k flats, in each a prefix rank per row of one ordered basis.

    minimise  sum_i w_i (||a_i||^2 - ||first r_i coordinates of a_i in flat c(i)||^2)
    with      sum_i r_i  +  d sum_c R_c  +  d * (rows kept exactly)  <=  budget,
              r_i in {r_c1 <= ... <= r_cL = R_c}

A flat of rank j serves all its rows alike; here an important row keeps more coordinates of the same basis
than a rare one, at no basis of its own. E-step: one product with all bases, energies of the prefixes by
segment sums, the cheapest (flat, level) at w dist^2 + mu r. M-step: ``ordered``. As in ``flats``, the price
mu is the one at which the budget just holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.flats import Progress, WeightedRows, update_grams
from kflats.numerics.gram import cluster_grams
from kflats.numerics.ordered import Ordered, captured, spend, sweep, turn
from kflats.numerics.rows import BLOCK, Rows

SWEEPS = 2
"""Sweeps over all boundaries in an M-step: the first gains most, EM's next iteration goes on."""


PATIENCE = 3
"""Iterations in a row that may bring next to nothing before EM stops: ranks and price must settle together."""

SPREAD = 1.5
"""An E-step looks for its price within this factor of the M-step's, unless told otherwise."""


@dataclass(frozen=True)
class NestedFit:
    """``labels`` (n,): c * L + l for level l of flat c, k * L = kept exactly. ``flats``: the ordered bases
    with their L ranks. ``objective``: the weighted squared error at the budget after each accepted iteration,
    falling. ``used``: numbers stored. ``price``: the saving per number at which the budget ran out."""

    labels: Tensor
    flats: tuple[Ordered, ...]
    objective: tuple[float, ...]
    used: int
    price: float
    converged: bool

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Prefix ranks of each flat, rising."""
        return tuple(flat.ranks for flat in self.flats)

    @property
    def bands_in_use(self) -> int:
        """How many different (flat, rank) the rows have, rows kept exactly included."""
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
    prices: Sequence[float] = (0.0,),
    *,
    weights: Tensor | None = None,
    multiplicity: Tensor | None = None,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Cheapest flat and prefix of every row, min over (c, l) of w dist^2 + price * rank, at several prices at once.

    Args:
        bases: orthonormal (R_c, d). levels: L rising ranks <= R_c for each.
        norms2: squared norms of the rows.
        prices: G prices; one pass serves all, since the product with the bases does not depend on them.
        exact: offer label k * L: kept exactly, for price * d.

    Returns labels (G, n), c * L + l, and the numbers (G,) that the rows store at each price. Equal costs go
    to the lower label.
    """
    n, d = rows.shape
    per = len(levels[0])
    bands = len(bases) * per
    stacked = torch.cat(list(bases)).to(rows.dtype).T.contiguous()
    ranks = torch.tensor([r for flat in levels for r in flat] + [d], dtype=rows.dtype, device=rows.device)
    segments, first = [], 0
    for basis, flat in zip(bases, levels, strict=True):
        segments.append([(first + low, first + high) for low, high in zip([0, *flat], flat, strict=False)])
        first += len(basis)
    dtype = torch.uint8 if bands + exact <= 256 else torch.int16
    labels = torch.empty(len(prices), n, dtype=dtype, device=rows.device)
    used = torch.zeros(len(prices), dtype=torch.float64, device=rows.device)
    buffer = torch.empty(BLOCK, stacked.shape[1], dtype=rows.dtype, device=rows.device)
    for start, block in rows.blocks(BLOCK):
        here = slice(start, start + len(block))
        y = torch.mm(block, stacked, out=buffer[: len(block)])
        energy = y.new_zeros(len(segments), per, len(block))
        for c, flat_segments in enumerate(segments):
            for level, (low, high) in enumerate(flat_segments):
                if low < high:
                    energy[c, level] = torch.linalg.vector_norm(y[:, low:high], dim=1)
        kept = energy.square_().cumsum(1).view(bands, len(block))
        loss = (norms2[here] - kept).clamp_min_(0.0)
        if weights is not None:
            loss *= weights[here].to(loss.dtype)
        for g, price in enumerate(prices):
            best, chosen = torch.add(loss, ranks[:bands].unsqueeze(1), alpha=price).min(dim=0)
            if exact:
                chosen = torch.where(best > price * d, bands, chosen)
            labels[g, here] = chosen
            stored = ranks[chosen]
            if multiplicity is not None:
                stored = stored * multiplicity[here].to(stored.dtype)
            used[g] += stored.sum(dtype=torch.float64)
    return labels, used


@dataclass(frozen=True)
class _State:
    """Everything an iteration hands on."""

    labels: Tensor
    grams: Tensor
    flats: tuple[Ordered, ...]
    error: float
    used: int
    price: float


def em_nested(
    cloud: WeightedRows,
    flats: Sequence[Ordered],
    budget: int,
    price: float,
    *,
    exact: bool = False,
    tolerance: float = 1e-3,
    max_iterations: int = 60,
    spread: float = SPREAD,
    progress: Progress | None = None,
) -> NestedFit:
    """EM from ordered bases until the error at the budget falls by less than ``tolerance`` of itself twice.

    ``spread``: an E-step takes the price that fits the budget if it lies within this factor of the M-step's.
    Memory: k L Grams of d x d float64 numbers. ``price`` need only be of the right order: every step corrects
    it by what fits the budget.

    Raises:
        KflatsError: the budget does not hold k flats of rank 1.
    """
    rows, bands = cloud.rows, len(flats) * len(flats[0].ranks)
    state: _State | None = None
    best: _State | None = None
    history: list[float] = []
    here, reach, stale, converged = tuple(flats), spread, 0, False
    for iteration in range(max(max_iterations, 1)):
        if state is not None:
            state = _revive(state)
            here, price = state.flats, state.price
        labels, price, inside = _within(cloud, here, budget, price, reach, exact)
        reach = max(reach**0.5, 1.02) if inside else min(reach**2, spread)
        if exact:
            labels = _affordable(cloud, labels, None if state is None else state.labels, bands, len(here), budget)
        if state is None:
            grams, still = cluster_grams(rows, labels, bands, cloud.mass), False
        else:
            moved = (labels != state.labels).nonzero().squeeze(1)
            still = not len(moved)
            grams = update_grams(state.grams, rows, moved, state.labels, labels, cloud.mass)
        state = _maximise(cloud, labels, grams, here, price, budget)
        if progress:
            progress("em", iteration, state.error)
        fell = history[-1] - state.error if history else 0.0
        if not history or fell > 0:
            best = replace(state, grams=state.grams[:0])
            history.append(state.error)
        # The price moves with the budget's filling, so one small step is no proof of convergence.
        stale = stale + 1 if iteration and fell <= tolerance * history[-1] else 0
        if stale >= PATIENCE or still:
            converged = True
            break
    assert best is not None
    return NestedFit(best.labels, best.flats, tuple(history), best.used, best.price, converged)


def settle(cloud: WeightedRows, fit: NestedFit, budget: int, *, sweeps: int = 12) -> NestedFit:
    """A longer last M-step for the labels found: EM's own are short. Kept if the error falls."""
    bands = len(fit.flats) * len(fit.flats[0].ranks)
    grams = cluster_grams(cloud.rows, fit.labels, bands, cloud.mass)
    done = _maximise(cloud, fit.labels, grams, fit.flats, fit.price, budget, sweeps)
    if done.error >= fit.error:
        return fit
    history = (*fit.objective, done.error)
    return replace(fit, flats=done.flats, objective=history, used=done.used, price=done.price)


def _within(
    cloud: WeightedRows, flats: Sequence[Ordered], budget: int, price: float, spread: float, exact: bool
) -> tuple[Tensor, float, bool]:
    """E-step at the lowest of some prices near ``price`` whose rows fit the budget, so that labels and budget
    agree: labels, that price, and whether it lies between those tried. Near, because the ranks move too: ranks
    that are too low for now must not be answered by a price so low that all rows take the highest."""
    prices = [price * spread ** (g / 4) for g in range(-4, 5)]
    choices, used = assign_nested(
        cloud.rows,
        [flat.basis[: flat.ranks[-1]] for flat in flats],
        [flat.ranks for flat in flats],
        cloud.norms2,
        prices,
        weights=cloud.weights,
        multiplicity=cloud.multiplicity,
        exact=exact,
    )
    left = budget - cloud.rows.shape[1] * sum(flat.ranks[-1] for flat in flats)
    over = int((used > left).sum())
    pick = min(over, len(prices) - 1)
    return choices[pick], prices[pick], 0 < over < len(prices)


def _maximise(
    cloud: WeightedRows,
    labels: Tensor,
    grams: Tensor,
    flats: Sequence[Ordered],
    price: float,
    budget: int,
    sweeps: int = SWEEPS,
) -> _State:
    """M-step: order and ranks at the price, then the ranks that just fit the budget."""
    k, levels, d = len(flats), len(flats[0].ranks), cloud.rows.shape[1]
    counts = cloud.counts(labels, k * levels + 1).cpu()
    table, kept_exactly = counts[:-1].view(k, levels), d * int(counts[-1])
    parts = grams.view(k, levels, d, d)
    ordered = list(flats)
    for c in range(k):
        for _ in range(sweeps):
            ordered[c] = sweep(turn(ordered[c], parts[c]), parts[c], table[c].tolist(), price)
    energy = torch.stack([captured(flat, part) for flat, part in zip(ordered, parts, strict=True)])
    found = spend(energy, table, budget - kept_exactly)
    if found is None:
        raise KflatsError(
            f"a budget of {budget:,} numbers cannot hold {k} flats of rank 1",
            cause="too many flats for the size asked",
            hint="raise the budget or lower k",
        )
    total = float(grams.diagonal(dim1=1, dim2=2).sum())
    kept = sum(float(energy[c, q, :r].sum()) for c, flat in enumerate(found.ranks) for q, r in enumerate(flat))
    done = tuple(replace(flat, ranks=ranks) for flat, ranks in zip(ordered, found.ranks, strict=True))
    return _State(labels, grams, done, max(total - kept, 0.0), found.used + kept_exactly, found.price)


def _revive(state: _State) -> _State:
    """Give levels that no row uses a rank in the middle of the widest gap, and sort levels by rank."""
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
    grams = state.grams[torch.argsort(new)[:-1].to(state.grams.device)]
    return replace(state, flats=tuple(flats), labels=labels, grams=grams)


def _affordable(cloud: WeightedRows, labels: Tensor, before: Tensor | None, bands: int, k: int, budget: int) -> Tensor:
    """If exact rows leave too little for rank 1 everywhere, keep to the choice of exact rows made before."""
    d = cloud.rows.shape[1]
    counts = cloud.counts(labels, bands + 1)
    if int(counts[bands]) * d + int(counts[:bands].sum()) + k * d <= budget:
        return labels
    if before is None:
        return torch.where(labels == bands, bands - 1, labels)
    return torch.where((labels == bands) | (before == bands), before, labels)
