"""Row classes: rows that share a step and variances.

A row of weight w codes best with a step proportional to w^(-1/2), a row of norm s with distributions as wide as s.
Where either is off by a factor exp(x), about x^2 nats a coordinate are lost (for a Gaussian, to second order in x). So
classes begin as a clustering of the points (1/2 ln w_i, ln s_i), and its sum of squares is the cost in bits.

Rows of one norm still differ in where their energy lies. So rows may move to the class in which they cost least, with
z the row in principal axes, v_c the mean squares of the class there, w_c its mean weight, t_c = level / w_c:

    cost_ic = (w_i / w_c) sum_r v_cr / (v_cr + t_c)  +  sum_r ln(1 + v_cr / t_c) + (z_ir^2 - v_cr) / (v_cr + t_c)
              + 2 ln(n / n_c)          (squared error and twice the nats, in units of t_c w_c)

which is hard EM for a mixture of Gaussians seen through the noise that quantisation adds.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.numerics.rows import Rows, TensorRows, slices

_LEAST_WEIGHT = 1e-8
"""The least weight that counts, in units of the largest."""

_FEWEST = 32
"""A class of fewer rows is not split: its distributions would be guesses."""


_ROUNDS = 6
_SAMPLE = 16384
"""Rows in the sample on which classes are fitted; then every row gets a class."""
_PER_CLASS = 1000
"""A class of this many rows may be split before the split is known to pay."""
_CELL = 9
"""Bits of one coordinate of one class beside its symbols: for its centre and its distribution."""


def candidate_classes(rows: Rows, weights: Tensor, norms: Tensor, classes: int, level: float) -> tuple[Tensor, ...]:
    """Ways to part the rows, (n,) int64 labels 0 .. C - 1 each with C <= ``classes``, none empty: one class; as many as
    pay by weight and norm; many; and many whose rows have moved. Only coding shows which one is best.

    Args:
        rows: (n, r) in principal axes.
        weights, norms: (n,), not negative.
        level: weighted squared error of a coded coordinate, the water level.
    """
    n = rows.shape[0]
    one = torch.zeros(n, dtype=torch.int64)
    if classes == 1 or level <= 0 or not rows.shape[1]:
        return (one,)
    chosen = torch.arange(n) if n <= _SAMPLE else torch.arange(_SAMPLE) * n // _SAMPLE
    part, w = TensorRows(rows.take(chosen)), weights[chosen]
    active = float((_stats(part, w, torch.zeros_like(chosen), 1).squares > level).sum())
    few, many = (split_classes(weights, norms, classes, active, patience) for patience in (math.inf, _PER_CLASS))
    stats = _stats(part, w, many[chosen], int(many.max()) + 1)
    for _ in range(_ROUNDS):
        stats = _stats(part, w, _cheapest(part, w, stats, level), len(stats.counts))
    moved = torch.unique(_cheapest(rows, weights, stats, level), return_inverse=True)[1]
    ways: list[Tensor] = []
    for labels in (one, few, many, moved):
        if not any(torch.equal(labels, other) for other in ways):
            ways.append(labels)
    return tuple(ways)


def split_classes(weights: Tensor, norms: Tensor, classes: int, active: float, patience: float = math.inf) -> Tensor:
    """(n,) int64 classes by weight and norm alone, 0 .. C - 1 with C <= ``classes``, none empty.

    Starts from one class and splits, at the mean of its wider axis, the one that this helps most, as long as the bits
    saved in ``active`` coordinates a row exceed what one more class is to store, or it has ``patience`` rows.
    """
    weights, norms = weights.to(torch.float64), norms.to(torch.float64)
    floor = _LEAST_WEIGHT * float(weights.max())
    points = torch.stack(
        [weights.clamp_min(floor).log() / 2, norms.clamp_min(1e-8 * max(float(norms.max()), 1e-300)).log()], dim=1
    )
    labels = torch.zeros(len(points), dtype=torch.int64)
    queue: list[tuple[float, int, Tensor, Tensor]] = []

    def consider(label: int, index: Tensor) -> None:
        if len(index) < 2 * _FEWEST:
            return
        part = points[index]
        axis = int(part.var(0).argmax())
        above = part[:, axis] > part[:, axis].mean()
        sides = [part[above], part[~above]]
        if min(map(len, sides)) < 1:
            return
        left = sum(float((side - side.mean(0)).square().sum()) for side in sides)
        saved = (float((part - part.mean(0)).square().sum()) - left) * active / math.log(2)
        if saved > _CELL * active + len(index) or (saved > 0 and len(index) >= patience):
            heapq.heappush(queue, (-saved, label, index[above], index[~above]))

    consider(0, torch.arange(len(points)))
    count = 1
    while queue and count < classes:
        _, label, above, below = heapq.heappop(queue)
        labels[above] = count
        consider(label, below)
        consider(count, above)
        count += 1
    return labels


@dataclass(frozen=True)
class _Stats:
    counts: Tensor
    weights: Tensor
    squares: Tensor  # (C, r) mean squares in principal axes


def _stats(rows: Rows, weights: Tensor, labels: Tensor, classes: int) -> _Stats:
    squares = torch.zeros(classes, rows.shape[1], dtype=torch.float64)
    for here, block in slices(rows):
        z = block.square().to(torch.float64)
        squares.index_add_(0, labels[here], z)
    counts = torch.bincount(labels, minlength=classes).to(torch.float64)
    sums = torch.zeros(classes, dtype=torch.float64).index_add_(0, labels, weights.to(torch.float64))
    each = counts.clamp_min(1.0)
    return _Stats(counts, sums / each, squares / each.unsqueeze(1))


def _cheapest(rows: Rows, weights: Tensor, stats: _Stats, level: float) -> Tensor:
    """(n,) the class in which each row costs least."""
    floor = _LEAST_WEIGHT * float(weights.max())
    at = stats.weights.clamp_min(floor)
    noise = (level / at).unsqueeze(1)
    v = stats.squares
    share = v / (v + noise)
    fixed = (
        (1 + v / noise).log().sum(1) - share.sum(1) - 2 * (stats.counts / stats.counts.sum()).clamp_min(1e-300).log()
    )
    fixed = torch.where(stats.counts >= _FEWEST, fixed, torch.full_like(fixed, math.inf))
    if bool(fixed.isinf().all()):
        fixed = torch.where(stats.counts == stats.counts.max(), torch.zeros_like(fixed), fixed)
    slope, per_weight = (1 / (v + noise)).T, share.sum(1) / at
    labels = []
    for here, block in slices(rows):
        z = block.square().to(torch.float64)
        w = weights[here].to(torch.float64).unsqueeze(1)
        labels.append((z @ slope + fixed + w * per_weight).argmin(1))
    return torch.cat(labels)
