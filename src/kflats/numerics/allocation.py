"""The ranks of flats under a budget.

For given clusters, coordinate r of flat c saves the weighted eigenvalue lambda_cr of its Gram and costs n_c numbers
for the cluster's rows plus d for its basis vector. Inside a flat all coordinates cost the same, and the saving falls
with r. Taking the best ratios of saving to cost first (water-filling) is therefore optimal up to the last coordinate.
The rest of the budget is filled greedily with the coordinates that still fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.common.errors import KflatsError


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
        raise KflatsError(
            f"a budget of {budget:,} numbers cannot hold {k} flats of rank {floor} ({used:,} numbers)",
            cause="each coordinate stores a basis vector and a number a row",
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
