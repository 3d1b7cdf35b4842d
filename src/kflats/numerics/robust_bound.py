"""The bound that ``robust_em`` lowers in place of its loss: squares, weighted by the tangents of rho in t^2.

    rho(t)  <=  rho(t_i) + u_i (t^2 - t_i^2),      u_i = rho'(t_i) / (2 t_i)                      for every t.

A reweighting changes all u_i, so the rows that moved are not enough to update the Grams. Between two reweightings the
u_i are fixed: the bound is then an EM on squares, with whole and partial E-steps, and Grams are updated by the rows
that moved.

Below ``FLOOR`` of a row's squared norm, rho is replaced by its tangent at the floor, as the weights are. The sum that
falls is therefore the sum that the weights belong to. It is never below the loss itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kflats.numerics.assign import Assignment, assign
from kflats.numerics.flats import PARTIAL, Stopping, WeightedRows, doubtful_rows, update_grams
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
    """sum_i m_i w_i rho(dist_i) without a floor, from residuals in float64; rows that are kept exactly add nothing.

    For a long row ||a||^2 - ||Va||^2 is only rounding, and for powers below 1 the floor can be half of the sum.
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
    """(n,) m_i w_i u_i: the weight of row i in Grams, at the squared distances ``dist2``."""
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

    def lower_(self, step: Assignment, stop: Stopping, done: int) -> int:
        """An M-step, then partial E-steps over the doubtful rows of ``step`` while they help. ``done``: iterations so
        far. Returns the number of partial E-steps."""
        self._relabel_(step.labels)
        self._improve_()
        if step.margin is None:
            return 0
        doubtful = doubtful_rows(step.margin, self.cloud.norms2)
        part, norms2 = PartOfRows(self.cloud.rows, doubtful), self.cloud.norms2[doubtful]
        limit = min(PARTIAL, stop.max_iterations - done)
        for count in range(limit):
            new = self.labels.clone()
            new[doubtful] = assign(part, self.bases, norms2).labels
            self._relabel_(new)
            before = self.bound
            outside = (energy_outside(gram, basis) for gram, basis in zip(self.grams, self.bases, strict=True))
            self.bound = self.constant + sum(outside)
            stop.report("em", done + count, self.bound)
            if before - self.bound <= stop.tolerance * self.bound:
                return count + 1
            self._improve_()
        return limit

    def _relabel_(self, new: Tensor) -> None:
        moved = (new != self.labels).nonzero().squeeze(1)
        self.grams = update_grams(self.grams, self.cloud.rows, moved, self.labels, new, self.weights)
        self.stale |= set(torch.cat([self.labels[moved], new[moved]]).unique().tolist())
        self.labels = new

    def _improve_(self) -> None:
        bases = enumerate(self.bases)
        self.bases = tuple(improve_basis(self.grams[c], b) if c in self.stale else b for c, b in bases)
        self.stale = set()


def check_alive(loss: Loss, weights: Tensor, cloud: WeightedRows) -> None:
    if isinstance(loss, Truncated) and not bool((weights > 0).any()) and bool((cloud.norms2 > 0).any()):
        raise out_of_reach(loss)
