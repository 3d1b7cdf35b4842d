"""Row classes: rows that share a step and variances.

A row of weight w codes best with a step proportional to w^(-1/2), a row of norm s with distributions as wide as s.
Where either is off by a factor exp(x), about x^2 nats a coordinate are lost (for a Gaussian, to second order in x). So
classes are a clustering of the points (1/2 ln w_i, ln s_i), and the sum of squares that it leaves is the price in nats.
"""

from __future__ import annotations

import heapq
import math

import torch
from torch import Tensor

_LEAST_WEIGHT = 1e-8
"""Weights are floored here, in units of the largest: below, a row is as good as free."""

_FEWEST = 32
"""Rows below which a class is not split: its distributions would be guesses."""


def row_classes(weights: Tensor, norms: Tensor, classes: int, active: float) -> Tensor:
    """(n,) int64 class of each row, at most ``classes`` of them, none empty.

    Starts from one class and splits, at the mean of its wider axis, the one that this helps most, as long as the nats
    saved in ``active`` coordinates a row exceed what one more class is to store: labels, and a byte or so for each
    coordinate. Depends on the rows' weights and norms alone, not on their order.

    Args:
        weights, norms: (n,), not negative.
        active: about how many coordinates of a row are not zero.
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
        if saved > 8 * active + len(index):
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
