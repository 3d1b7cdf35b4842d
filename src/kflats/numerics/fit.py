"""The whole fit of k flats: a sample, seeds, EM on the sample, split and merge, EM on all rows.

EM's local minimum is decided by its seeds. On a sample they cost a fraction of a pass over all rows, and the full table
then needs only a few iterations. A row is drawn by its share of the weighted energy, and weighs 1 / (its chance):

    sum over drawn rows of  m_i w_i rho(dist(a_i, S))      estimates      sum_i w_i rho(dist(a_i, S)),   m_i = 1 / p_i

The estimate is unbiased for every S (Horvitz & Thompson 1952) up to the last step, which scales the m_i to the number
of rows. Half of the chances are even, so no row stands for more than 2n / size rows. No sample shorter than the rows
serves all k flats at once (Har-Peled, No coreset, no cry, 2006). The sample is therefore a start, not a substitute: EM
goes on with all rows.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from kflats.common.errors import DoesNotFitError, KflatsError
from kflats.numerics.flats import (
    FlatsFit,
    RankSpec,
    Start,
    Stopping,
    WeightedRows,
    affordable,
    assign,
    distances,
    em,
    weighted_rows,
)
from kflats.numerics.gram import WideRows
from kflats.numerics.loss import Loss, Squared, check_loss
from kflats.numerics.robust_em import distances_of, reweighted, robust_em, total_loss, true_loss
from kflats.numerics.rows import (
    GRAM_BLOCK,
    Rows,
    TensorRows,
    check_rank,
    check_spread,
    check_steps,
    checked_rows,
)

Seeds = Literal["auto", "random"]
"""How EM starts: "auto", or from a random partition as MESSI does."""

SAMPLE = 8192
"""Rows in the sample for seeds (equal ranks)."""

FILL_SAMPLE = 65536
"""Rows in the sample for ranks that fill a budget: a longer one, because every row's share of the budget matters."""

_LOW = 20  # rank at which seeds are compared
_MOVES, _GAIN = 8, 1e-3  # split and merge: how many moves are tried, and what share of the error one must gain
_CANDIDATES = 4
_ENOUGH = 4096  # rows among which greedy seeds are searched
_SPREAD = 1e12  # longer rows, once a loss has weighted them, leave nothing of the others in float64
_SQUARED = Squared()
_DEFAULT = Stopping()


def chances(scores: Tensor, size: int) -> Tensor:
    """(n,) float32 chances to be drawn that sum to at most ``size``: half by ``scores``, half even."""
    n = len(scores)
    # float32 and in place: with ten million rows these vectors are the peak of the memory.
    chance = scores.to(torch.float32, copy=True)
    total = float(chance.sum(dtype=torch.float64))
    chance.mul_(0.5 * size / total if total > 0 else 0.0).add_((0.5 if total > 0 else 1.0) * size / n)
    return chance.clamp_(max=1.0)


def draw_sample(cloud: WeightedRows, size: int, generator: torch.Generator, loss: Loss = _SQUARED) -> WeightedRows:
    """At most ``size`` rows, drawn half by their share of the weighted energy (``loss``: of what it sees) and half
    evenly, each with the number of rows it stands for (Horvitz-Thompson); the whole cloud if it is no larger."""
    if cloud.rows.shape[0] <= size:
        return cloud
    seen = cloud.seen_by(loss)
    chance = chances(seen.norms2 if seen.weights is None else seen.norms2 * seen.weights, size)
    taken = (
        (torch.rand(len(chance), generator=generator, dtype=torch.float32).to(chance.device) < chance)
        .nonzero()
        .squeeze(1)
    )
    # Together the rows stand for all rows, and not for one more: a budget is divided by their number.
    stands_for = 1.0 / chance[taken].to(torch.float64)
    stands_for *= (1 - 1e-6) * len(chance) / stands_for.sum()
    weights = None if cloud.weights is None else cloud.weights[taken]
    rows = TensorRows(cloud.rows.take(taken))
    return WeightedRows(rows, cloud.norms2[taken], weights, stands_for.to(rows.dtype), cloud.stored)


def random_partition(cloud: WeightedRows, k: int, generator: torch.Generator) -> Tensor:
    """Equal parts of a random permutation (MESSI's start)."""
    n = cloud.rows.shape[0]
    return _labels(torch.randperm(n, generator=generator) % k, k).to(cloud.rows.device)


def norms(cloud: WeightedRows, k: int) -> Tensor:
    """Quantiles of w_i ||a_i||^2, smallest first: for ranks that differ, rows with little to lose share a flat."""
    n = cloud.rows.shape[0]
    size = cloud.norms2 if cloud.weights is None else cloud.norms2 * cloud.weights
    labels = torch.empty(n, dtype=torch.int64, device=size.device)
    labels[torch.argsort(size, stable=True)] = torch.arange(n, device=size.device) * k // n
    return _labels(labels, k)


def kmeans(cloud: WeightedRows, k: int, generator: torch.Generator, *, iterations: int = 25) -> Tensor:
    """Lloyd's algorithm from k rows drawn at random; an emptied cluster takes the row farthest from its centre."""
    rows = cloud.rows
    n = rows.shape[0]
    centres = rows.take(torch.randperm(n, generator=generator)[:k].to(rows.device))
    labels = torch.zeros(n, dtype=torch.int64, device=rows.device)
    for _ in range(iterations):
        sums = torch.zeros_like(centres, dtype=torch.float64)
        counts = torch.zeros(k, dtype=torch.float64, device=rows.device)
        farthest, worst = 0, -1.0
        before = labels.clone()
        for start, block in rows.blocks(GRAM_BLOCK):
            part = slice(start, start + len(block))
            far = centres.square().sum(1) - 2 * (block @ centres.T)
            near = far.min(dim=1)
            labels[part] = near.indices
            members = torch.nn.functional.one_hot(near.indices, k).to(block.dtype)
            if cloud.mass is not None:
                members *= cloud.mass[part].to(block.dtype).unsqueeze(1)
            sums += members.T @ block
            counts += members.sum(0, dtype=torch.float64)
            gap = near.values + cloud.norms2[part]
            if float(gap.max()) > worst:
                worst, farthest = float(gap.max()), start + int(gap.argmax())
        centres = (sums / counts.clamp_min(1e-300).unsqueeze(1)).to(centres.dtype)
        for c in (counts <= 0).nonzero().flatten().tolist():
            centres[c] = rows.take(torch.tensor([farthest], device=rows.device))[0]
        if torch.equal(before, labels):
            break
    return _labels(labels, k)


def greedy(cloud: WeightedRows, k: int, rank: int, generator: torch.Generator) -> Tensor:
    """Flats one after another, each the best of a few through the neighbours of a badly fitted row."""
    # A part of the rows is enough to find a flat; all rows are then assigned.
    among = torch.arange(0, cloud.rows.shape[0], -(-cloud.rows.shape[0] // _ENOUGH), device=cloud.rows.device)
    a, norms2 = cloud.rows.take(among), cloud.norms2[among]
    mass = None if cloud.mass is None else cloud.mass[among]
    unit = a / norms2.sqrt().clamp_min(torch.finfo(a.dtype).tiny).unsqueeze(1)
    residual = norms2.clone()
    bases: list[Tensor] = []
    for _ in range(k):
        chance = (residual if mass is None else residual * mass).to(torch.float64)
        if float(chance.sum()) <= 0:  # every row already lies on a flat: any row will do
            chance = torch.ones_like(chance)
        picked = torch.multinomial(chance.cpu(), _CANDIDATES, replacement=True, generator=generator).to(a.device)
        flats = [_local_flat(a, unit, residual, int(row), rank) for row in picked]
        lefts = [torch.minimum(residual, distances(TensorRows(a), (flat,), norms2)[:, 0]) for flat in flats]
        scores = [float((left if mass is None else left * mass).sum(dtype=torch.float64)) for left in lefts]
        best = scores.index(min(scores))
        bases.append(flats[best])
        residual = lefts[best]
    return assign(cloud, tuple(bases)).labels


def _local_flat(a: Tensor, unit: Tensor, residual: Tensor, row: int, rank: int) -> Tensor:
    """A flat through ``row``: its nearest lines first, then thrice the rows nearest to the flat of those."""
    n = len(a)
    # A seed need not have full rank: EM widens it, and short neighbourhoods are purer.
    rank = min(rank, 20)
    near = (unit @ unit[row]).abs() * (residual > 0)
    size = min(n, rank + 1)
    chosen = near.topk(size).indices
    basis = unit[:0]
    for growth in (1, 2, 3):
        basis = _leading_directions(unit[chosen], rank)
        if growth < 3:
            fit = (unit @ basis.T).square_().sum(dim=1)
            chosen = fit.topk(min(n, growth * 2 * rank + 2)).indices
    return basis


def _leading_directions(part: Tensor, rank: int) -> Tensor:
    """Right singular vectors of a few rows: QR first, so that directions they lack are orthonormal as well."""
    q, r = torch.linalg.qr(part.T)
    turn: Tensor = torch.linalg.eigh(r @ r.T).eigenvectors.flip(1)[:, :rank]
    return torch.mm(q, turn).T.contiguous()


def _labels(labels: Tensor, k: int) -> Tensor:
    return labels.to(torch.uint8 if k < 256 else torch.int16)


def split_and_merge(cloud: WeightedRows, shape: RankSpec, fit: FlatsFit, generator: torch.Generator) -> FlatsFit:
    """A way out of EM's local minima (after Ueda et al., Neural Computation 2000), for equal ranks and rows in memory.

    Remove the flat whose rows lose least by going to their second nearest flat, and give its place to half of the flat
    that gains most by being split. Then run EM, and keep the result only if the objective fell. Removing an empty or
    tiny flat costs nothing, so these flats get new seeds in the same way.
    """
    assert shape.rank is not None
    if shape.k < 2:
        return fit
    for _ in range(_MOVES):
        labels = _proposal(cloud, shape.k, shape.rank, fit, generator)
        if labels is None:
            break
        moved = em(cloud, shape, Start(labels), Stopping(_GAIN, 20), refit=False)
        if moved.error >= fit.error * (1 - _GAIN):
            break
        fit = moved
    return fit


def _proposal(cloud: WeightedRows, k: int, rank: int, fit: FlatsFit, generator: torch.Generator) -> Tensor | None:
    labels = fit.labels.to(torch.int64)
    far = distances(cloud.rows, fit.bases, cloud.norms2)
    own = far.gather(1, labels.unsqueeze(1)).squeeze(1)
    second = far.scatter(1, labels.unsqueeze(1), torch.inf).min(dim=1)
    mass = torch.ones_like(own) if cloud.mass is None else cloud.mass.to(own.dtype)
    loss = torch.zeros(k, dtype=own.dtype, device=own.device).index_add_(0, labels, (second.values - own) * mass)
    best: tuple[float, Tensor] | None = None
    # Only the two worst flats are tried, because each split takes an EM of its own.
    errors = torch.zeros_like(loss).index_add_(0, labels, own * mass)
    for wide in errors.topk(min(2, k)).indices.tolist():
        inside = (labels == wide).nonzero().squeeze(1)
        if len(inside) < 4:
            continue
        part = WeightedRows(
            TensorRows(cloud.rows.take(inside)), cloud.norms2[inside], None if cloud.mass is None else mass[inside]
        )
        begin = Start(greedy(part, 2, rank, generator))
        halves = em(part, RankSpec(2, rank=rank), begin, Stopping(3e-3, 8), refit=False)
        gain = float(errors[wide]) - halves.error
        others = loss.clone()
        others[wide] = torch.inf
        gone = int(others.argmin())
        if gain > float(others[gone]) and (best is None or gain - float(others[gone]) > best[0]):
            proposal = torch.where(labels == gone, second.indices, labels)
            proposal[inside[halves.labels == 1]] = gone
            best = (gain - float(others[gone]), proposal.to(fit.labels.dtype))
    return None if best is None else best[1]


def start_uniform(
    cloud: WeightedRows, shape: RankSpec, loss: Loss, start: Seeds, generator: torch.Generator, stop: Stopping
) -> Start:
    """For flats of one rank: the flats of a fit to a sample, or labels where the matrix is no longer than the sample.

    For a ``loss`` other than squares, rows have the weights that it gives them at a distance of their own norm.
    """
    k, rank = shape.k, shape.rank or 1
    if start == "random" or k == 1:
        return Start(random_partition(cloud, k, generator))
    part = draw_sample(cloud, SAMPLE, generator, loss).seen_by(loss)
    stop.report("seeding", 0, 0.0)
    seeds = _seeds(part, k, rank, generator)
    # At full rank a fit to a short sample overfits it: the climb needs more rows than the seeds.
    longer = draw_sample(cloud, FILL_SAMPLE, generator, loss)
    middle = longer.seen_by(loss)
    labels, grams, low = assign(middle, seeds.bases).labels, None, _LOW
    while 2 * low < rank:  # dimension continuation: short EMs at ranks 40, 80, ..., each from the last
        low *= 2
        climbed = em(middle, RankSpec(k, low), Start(labels, grams=grams), Stopping(3e-3, 2), refit=False)
        labels, grams = climbed.labels, climbed.grams
    if longer is cloud:
        return Start(labels, grams=grams)
    return Start(bases=em(middle, shape, Start(labels, grams=grams), Stopping(1e-3, 10), refit=False).bases)


def start_filled(
    cloud: WeightedRows, shape: RankSpec, loss: Loss, start: Seeds, generator: torch.Generator, stop: Stopping
) -> Start:
    """For ranks that fill a budget: labels by the flats of a fit to a sample, or the labels that EM begins from where
    the matrix is no longer than the sample.

    The sample begins from seeds by weighted norm and EM at growing budgets, because low budgets decide which rows need
    few numbers.
    """
    part = draw_sample(cloud, FILL_SAMPLE, generator, loss)
    seen, least = part.seen_by(loss), cloud.rows.shape[0] + shape.k * cloud.width
    if start == "random":
        labels = random_partition(seen, shape.k, generator)
    else:
        labels = norms(seen, shape.k)
        for share in (0.3, 0.6):
            grown = replace(shape, budget=max(int((shape.budget or 0) * share), least), exact=False)
            labels = em(seen, grown, Start(labels), Stopping(1e-2, 8, stop.progress)).labels
    if part is cloud:
        return Start(labels)
    fit = robust_em(part, shape, loss, Start(labels), stop)
    nearest = partial(assign, cloud, fit.bases, multiplier=fit.multiplier, loss=loss)
    labels = nearest(exact=shape.exact).labels
    if not affordable(cloud, labels, shape.k, shape.k, shape.budget):  # the sample has too few exact rows
        labels = nearest().labels
    return Start(labels)


def _seeds(part: WeightedRows, k: int, rank: int, generator: torch.Generator) -> FlatsFit:
    """The default seeds: the better of greedy and k-means at a low rank, where fits are cheap and local minima few.

    Greedy seeds find flats that are really there; k-means is as good where there are none.
    """
    low = RankSpec(k, rank=min(rank, _LOW))
    fits = [
        em(part, low, Start(labels), Stopping(1e-3, 12), refit=False)
        for labels in (greedy(part, k, rank, generator), kmeans(part, k, generator))
    ]
    best = min(fits, key=lambda fit: fit.error)
    return split_and_merge(part, low, best, generator)


def fit_flats(
    matrix: Tensor | Rows,
    k: int,
    *,
    rank: int | None = None,
    budget: int | None = None,
    exact: bool = False,
    weights: Tensor | None = None,
    error: Loss = _SQUARED,
    start: Seeds = "auto",
    stop: Stopping = _DEFAULT,
    seed: int = 0,
) -> FlatsFit:
    """Flats S_1..S_k that minimise  sum_i w_i rho(dist(a_i, S_c(i))),  rho(t) = t^2 by default (MESSI, section 2).

    Args:
        matrix: (n, d), a tensor or any ``Rows``; read in blocks, and copied once where n < d.
        k: number of flats.
        rank: dimension of every flat, or
        budget: numbers to store instead: ranks are filled flat by flat, and the budget is never exceeded.
        exact: with a budget: keep single rows exactly where that lowers the error.
        weights: (n,) w_i >= 0. A row of weight 0 gets a label but does not change the flats.
        error: rho, a loss of ``numerics.loss``. A loss that is not convex in t, or has a threshold in medians of
            distances, begins from two fits: one under ``Power(1)``, and one to the rows scaled to length 1, which far
            rows cannot turn. With a rank, EM goes on from the fit whose sum of losses is lower; with a budget, from
            both.
        start: "auto": with a rank, the better of greedy and k-means seeds at a low rank, then continuation; with a
            budget, weighted norms and a growing budget. "random": a random partition, as published.
        stop: when EM stops.
        seed: of every random step; equal seed, row order and threads give an equal fit.

    Choose a rank to compare with the paper, a budget to get the least error for the bytes. EM finds a local minimum;
    the global problem is Max-SNP-hard.

    Raises:
        KflatsError: NaN or infinity, more flats than rows, a rank outside 1..d, a budget below k flats of rank 1; under
            a loss other than squares, a row so long that the others are only rounding beside it.

    >>> a = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    >>> fit_flats(a, 2, rank=1).error < 1e-9
    True
    """
    check_steps(stop.tolerance, stop.max_iterations)
    rows = checked_rows(matrix, weights)
    n, d = rows.shape
    if (rank is None) == (budget is None):
        raise KflatsError("k flats need either a rank or a budget", hint="one of rank and budget")
    try:
        k = operator.index(k)
    except TypeError:
        raise KflatsError(f"{k!r} flats are not supported", hint="a whole number of flats") from None
    if not 1 <= k <= n:
        raise DoesNotFitError(f"{k} flats do not fit {n} rows", hint=f"choose k in 1..{n}")
    if start not in ("auto", "random"):
        raise KflatsError(f"EM cannot start from {start!r}", hint='start="auto" or "random"')
    check_loss(error)
    if rank is not None:
        check_rank(rank, d)
    shape, wide = RankSpec(k, rank, budget, exact), WideRows.of(rows) if n < d else None
    if wide is not None and rank is not None:
        shape = replace(shape, rank=min(rank, n))
    cloud, scale = weighted_rows(rows if wide is None else wide.inside, weights, d)
    if not error.is_squared:
        check_spread(cloud.norms2.to(torch.float64), cloud.weights, _SPREAD)
    best = fit_cloud(cloud, shape, error, start, stop, seed)
    objective = tuple(scale * value for value in best.objective)
    bases = best.bases if wide is None else tuple(map(wide.lifted, best.bases))
    return replace(
        best, bases=bases, objective=objective, spectra=scale * best.spectra, multiplier=scale * best.multiplier
    )


def fit_cloud(cloud: WeightedRows, shape: RankSpec, error: Loss, start: Seeds, stop: Stopping, seed: int) -> FlatsFit:
    """``fit_flats`` of rows that are checked, in their own coordinates and at their own weights."""

    def fit(cloud: WeightedRows, loss: Loss) -> FlatsFit:
        generator = torch.Generator().manual_seed(seed)
        if shape.rank is None:
            begin = start_filled(cloud, shape, loss, start, generator, stop)
        else:
            begin = start_uniform(cloud, shape, loss, start, generator, stop)
        return robust_em(cloud, shape, loss, begin, stop)

    first, *later = error.stages()
    best = fit(cloud, first)
    for loss in later:
        loss = _resolved(loss, cloud, best)
        alike = fit(_by_direction(cloud), _SQUARED)
        starts = [Start(best.labels, best.bases, multiplier=best.multiplier), Start(alike.labels, alike.bases)]
        if shape.rank is not None:
            starts = [min(starts, key=lambda begin: _reached(loss, cloud, begin))]
        elif not _within_reach(loss, cloud, starts[1]):
            starts = starts[:1]
        # With a budget, ranks are still to be filled, so the sum at a start says little of the sum at its end.
        best = min((robust_em(cloud, shape, loss, begin, stop) for begin in starts), key=lambda fit: fit.error)
    if not best.loss.is_squared:
        reached = true_loss(best.loss, cloud, best.bases, best.labels)
        best = replace(best, objective=(*(value for value in best.objective[:-1] if value > reached), reached))
    return best


def _by_direction(cloud: WeightedRows) -> WeightedRows:
    """The rows with the weights that scale each of them to length 1: far rows are then no farther than others."""
    inverse = torch.where(cloud.norms2 > 0, 1 / cloud.norms2.to(torch.float64), 0.0)
    mass = inverse if cloud.weights is None else inverse * cloud.weights
    if not bool(mass.any()):
        mass = torch.ones_like(mass)
    return replace(cloud, weights=(mass / mass.mean()).to(cloud.norms2.dtype))


def _reached(loss: Loss, cloud: WeightedRows, start: Start) -> float:
    """The sum of losses at the flats of a start."""
    return total_loss(loss, assign(cloud, start.bases or ()).dist2, cloud)


def _within_reach(loss: Loss, cloud: WeightedRows, start: Start) -> bool:
    """Whether any row has a weight at the flats of a start: the threshold may be below all distances."""
    assert start.labels is not None
    assert start.bases is not None
    dist2 = distances_of(cloud, start.bases, start.labels)
    return bool((reweighted(loss, dist2, cloud)[start.labels < len(start.bases)] > 0).any())


def _resolved(loss: Loss, cloud: WeightedRows, fit: FlatsFit) -> Loss:
    """``loss`` with its threshold as a distance, where it is in medians of the distances of ``fit``."""
    if not loss.is_relative:
        return loss
    near = fit.labels < len(fit.bases)  # rows that are kept exactly have no distance
    near = near if bool(near.any()) else ~near
    weights = None if cloud.weights is None else cloud.weights[near]
    return loss.absolute(distances_of(cloud, fit.bases, fit.labels)[near], cloud.norms2[near], weights)
