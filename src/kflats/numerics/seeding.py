"""How EM begins. Every seeding gives each row of a sample a label; benchmarks/seeding.py compares them.

``continuation``: fit rank 4, then 8, 16, ... up to j, each from the last: few local minima at low rank.
``greedy``: one flat after another, through the neighbourhood of a badly fitted row; finds planted flats.
``plus_plus``: k-means++ (Arthur & Vassilvitskii 2007) with distances to flats instead of centres.
``kmeans``: Lloyd's clusters (MESSI appendix E's alternative). ``random``: the paper's random partition.
``norms``: quantiles of weighted norm, the start for ranks that differ: rows with little to lose share a flat.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.assign import assign, distances
from kflats.numerics.flats import FlatsFit, RankSpec, Start, Stopping, WeightedRows, em
from kflats.numerics.rows import GRAM_BLOCK, TensorRows

Seeding = Callable[[WeightedRows, int, int, torch.Generator], Tensor]
"""(cloud, k, rank, generator) -> labels (n,) uint8 or int16."""


_ENOUGH = 4096  # rows among which greedy seeds are searched


def random_partition(cloud: WeightedRows, k: int, rank: int, generator: torch.Generator) -> Tensor:
    """Equal parts of a random permutation (MESSI's start)."""
    n = cloud.rows.shape[0]
    return _labels(torch.randperm(n, generator=generator) % k, k).to(cloud.rows.device)


def norms(cloud: WeightedRows, k: int, rank: int, generator: torch.Generator) -> Tensor:
    """Quantiles of w_i ||a_i||^2, smallest first."""
    n = cloud.rows.shape[0]
    size = cloud.norms2 if cloud.weights is None else cloud.norms2 * cloud.weights
    labels = torch.empty(n, dtype=torch.int64, device=size.device)
    labels[torch.argsort(size, stable=True)] = torch.arange(n, device=size.device) * k // n
    return _labels(labels, k)


def kmeans(cloud: WeightedRows, k: int, rank: int, generator: torch.Generator, *, iterations: int = 25) -> Tensor:
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


def continuation(cloud: WeightedRows, k: int, rank: int, generator: torch.Generator) -> Tensor:
    """EM at rank 4, 8, 16, ... below j, from the better of two short random starts at the lowest rank."""
    start, stop = min(4, rank), Stopping(1e-3, 12)
    seeds = [Start(random_partition(cloud, k, rank, generator)) for _ in range(2)]
    fits = [em(cloud, RankSpec(k, rank=start), begin, stop, refit=False) for begin in seeds]
    labels = min(fits, key=lambda fit: fit.error).labels
    climbed = climb(cloud, k, start, rank, labels)
    return labels if climbed is None else climbed.labels


def climb(cloud: WeightedRows, k: int, low: int, rank: int, labels: Tensor, *, steps: int = 6) -> FlatsFit | None:
    """Dimension continuation: short EMs at ranks 2 low, 4 low, ... below ``rank``, each from the last."""
    fit: FlatsFit | None = None
    while 2 * low < rank:
        low *= 2
        begin = Start(labels, grams=None if fit is None else fit.grams)
        fit = em(cloud, RankSpec(k, low), begin, Stopping(3e-3, steps), refit=False)
        labels = fit.labels
    return fit


def greedy(cloud: WeightedRows, k: int, rank: int, generator: torch.Generator) -> Tensor:
    """Flats one after another, each the best of a few through the neighbours of a badly fitted row."""
    return _grow(cloud, k, rank, generator, candidates=4)


def plus_plus(cloud: WeightedRows, k: int, rank: int, generator: torch.Generator) -> Tensor:
    """As ``greedy``, one random candidate a flat, drawn by squared distance to the flats so far."""
    return _grow(cloud, k, rank, generator, candidates=1)


def _grow(cloud: WeightedRows, k: int, rank: int, generator: torch.Generator, *, candidates: int) -> Tensor:
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
        picked = torch.multinomial(chance.cpu(), candidates, replacement=True, generator=generator).to(a.device)
        best: tuple[float, Tensor, Tensor] | None = None
        for row in picked:
            basis = _local_flat(a, unit, residual, int(row), rank)
            left = torch.minimum(residual, distances(TensorRows(a), (basis,), norms2)[:, 0])
            score = float((left if mass is None else left * mass).sum(dtype=torch.float64))
            if best is None or score < best[0]:
                best = (score, basis, left)
        assert best is not None
        bases.append(best[1])
        residual = best[2]
    return assign(cloud.rows, tuple(bases), cloud.norms2, weights=cloud.weights).labels


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


SEEDINGS: dict[str, Seeding] = {
    "continuation": continuation,
    "greedy": greedy,
    "plus_plus": plus_plus,
    "kmeans": kmeans,
    "random": random_partition,
    "norms": norms,
}


def seeding(name: str) -> Seeding:
    """The seeding called ``name``.

    Raises:
        KflatsError: unknown name.
    """
    if name not in SEEDINGS:
        raise KflatsError(f"unknown seeding {name!r}", hint="one of " + ", ".join(SEEDINGS))
    return SEEDINGS[name]
