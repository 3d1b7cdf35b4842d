"""The bound that ``robust_em`` lowers in place of its loss: squares, weighted by the tangents of rho in t^2.

    rho(t)  <=  rho(t_i) + u_i (t^2 - t_i^2),      u_i = rho'(t_i) / (2 t_i)                      for every t.

All u_i change from one reweighting to the next, so Grams cannot be updated by what moved, as they are for squares; but
between two reweightings the bound is an EM on squares of its own, and the same whole E-steps, and partial ones over
doubtful rows, lower it cheaply, with Grams by what moved.

Below ``FLOOR`` of a row's squared norm rho is replaced by its tangent at the floor, as the weights are: the sum
that falls is the one that they belong to. It is never less than the loss itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kflats.numerics.assign import Assignment, assign
from kflats.numerics.flats import PARTIAL, Progress, WeightedRows, doubtful_rows, update_grams
from kflats.numerics.gram import cluster_grams, energy_outside, improve_basis
from kflats.numerics.loss import Loss, Truncated, floored, out_of_reach
from kflats.numerics.rows import GRAM_BLOCK, PartOfRows


def losses(loss: Loss, dist2: Tensor, cloud: WeightedRows) -> Tensor:
    """(n,) m_i w_i rho(dist_i), rho continued below the floor by its tangent there."""
    at = floored(dist2, cloud.norms2)
    cost = loss.rho(at) + loss.weight(at, cloud.norms2) * (dist2 - at)
    cost = torch.where(cloud.norms2 > 0, cost, 0.0)
    return cost if cloud.mass is None else cost * cloud.mass


def total_loss(loss: Loss, dist2: Tensor, cloud: WeightedRows) -> float:
    return float(losses(loss, dist2, cloud).sum(dtype=torch.float64))


def true_loss(loss: Loss, cloud: WeightedRows, bases: tuple[Tensor, ...], labels: Tensor) -> float:
    """sum_i m_i w_i rho(dist_i) without a floor, from residuals in float64; rows kept exactly lose nothing.

    Beside a long row ||a||^2 - ||Va||^2 is rounding, and of a power below 1 the floor can be half of the sum.
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
    """(n,) m_i w_i u_i: what row i counts in Grams at the distances reached."""
    weights = loss.weight(dist2, cloud.norms2)
    return weights if cloud.mass is None else weights * cloud.mass


class Squares:
    """The bound of the loss at the distances of an E-step, constant + sum_i weights_i dist_i^2, and EM on it."""

    def __init__(self, cloud: WeightedRows, loss: Loss, bases: tuple[Tensor, ...], step: Assignment) -> None:
        self.cloud, self.bases, self.labels = cloud, bases, step.labels
        self.weights = reweighted(loss, step.dist2, cloud)
        check_alive(loss, self.weights, cloud)
        self.bound = total_loss(loss, step.dist2, cloud)
        self.constant = 0.0
        self.constant = self.bound - self.bound_at(step.dist2)
        self.grams = cluster_grams(cloud.rows, step.labels, len(bases), self.weights, halved=True)
        self.stale = set(range(len(bases)))

    def bound_at(self, dist2: Tensor) -> float:
        return self.constant + float((self.weights * dist2).sum(dtype=torch.float64))

    def lower_(self, step: Assignment, tolerance: float, limit: int, said: int, progress: Progress | None) -> int:
        """M-step, then partial E-steps over the doubtful rows of ``step`` while they help; how many."""
        self._relabel_(step.labels)
        self._improve_()
        if step.margin is None:
            return 0
        doubtful = doubtful_rows(step.margin, self.cloud.norms2)
        part, norms2 = PartOfRows(self.cloud.rows, doubtful), self.cloud.norms2[doubtful]
        for done in range(min(PARTIAL, limit)):
            found = self.labels.clone()
            found[doubtful] = assign(part, self.bases, norms2).labels
            self._relabel_(found)
            before = self.bound
            outside = (energy_outside(gram, basis) for gram, basis in zip(self.grams, self.bases, strict=True))
            self.bound = self.constant + sum(outside)
            if progress:
                progress("em", said + done, self.bound)
            if before - self.bound <= tolerance * self.bound:
                return done + 1
            self._improve_()
        return min(PARTIAL, limit)

    def _relabel_(self, found: Tensor) -> None:
        moved = (found != self.labels).nonzero().squeeze(1)
        self.grams = update_grams(self.grams, self.cloud.rows, moved, self.labels, found, self.weights)
        self.stale |= set(torch.cat([self.labels[moved], found[moved]]).unique().tolist())
        self.labels = found

    def _improve_(self) -> None:
        bases = enumerate(self.bases)
        self.bases = tuple(improve_basis(self.grams[c], b) if c in self.stale else b for c, b in bases)
        self.stale = set()


def check_alive(loss: Loss, weights: Tensor, cloud: WeightedRows) -> None:
    if isinstance(loss, Truncated) and not bool((weights > 0).any()) and bool((cloud.norms2 > 0).any()):
        raise out_of_reach(loss)
