"""The M-step of one ordered basis: an order of coordinates that serves rows of several nested ranks.

Rows of rank group l keep the first r_l coordinates, r_1 <= ... <= r_L. With T_l the Gram of these rows, the basis V
(orthonormal, all d directions) and the ranks minimise, at the Lagrange multiplier mu of a stored number,

    sum_l  tr T_l - tr(V_{:r_l} T_l V_{:r_l}')  +  mu n_l r_l        +  mu d r_L

Boundary r_l divides U, the coordinates between r_{l-1} and r_{l+1} (d for the last). Rows of the other groups use
either none or all of U, so the division matters to T_l alone, and the best one has a closed form: first the
eigenvectors of U T_l U' whose eigenvalue exceeds mu n_l (mu (n_L + d) for the last). ``sweep`` divides one boundary
after another: the objective never rises, and order and ranks are found together. It stops where only a change of three
blocks at once would gain; ``turn`` moves all blocks at fixed ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.numerics.gram import complement


@dataclass(frozen=True)
class Ordered:
    """``basis`` (d, d) orthonormal, of which the first ``ranks[-1]`` rows are stored; ``ranks`` rising."""

    basis: Tensor
    ranks: tuple[int, ...]


def sweep(ordered: Ordered, grams: Tensor, counts: list[int], multiplier: float) -> Ordered:
    """Divide every boundary anew, from the last to the first. The objective above never rises.

    Args:
        grams: (L, d, d), the Gram T_l of each rank group. counts: its number of rows n_l.
        multiplier: mu. Every group keeps at least the first coordinate.
    """
    basis, ranks = ordered.basis.clone(), list(ordered.ranks)
    d, top = basis.shape[0], len(ranks) - 1
    for level in range(top, -1, -1):
        low = ranks[level - 1] if level else 0
        high = d if level == top else ranks[level + 1]
        # A rank group without rows stays between its neighbours, free for rows that come later.
        if high - low < 1 or not counts[level]:
            continue
        part = basis[low:high]
        values, vectors = torch.linalg.eigh(part @ grams[level].to(basis.dtype) @ part.T)
        basis[low:high] = vectors.flip(1).T @ part
        cost = multiplier * (counts[level] + (d if level == top else 0))
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


def spend(energy: Tensor, counts: Tensor, budget: int) -> NestedFilling | None:
    """Ranks that keep the most energy with sum_cl n_cl r_cl + d sum_c r_cL <= budget.

    Bisection finds the multiplier at which the groups' best ranks just fit. The rest of the budget is spent one
    coordinate at a time, on the coordinate that saves most per number and still fits.

    Args:
        energy: (k, L, d), ``captured`` of each flat. counts: (k, L) rows.

    Returns None if rank 1 everywhere exceeds the budget.
    """
    k, levels, d = energy.shape
    counts = counts.cpu()
    # Groups without rows go first, where they cost nothing. The highest group in use pays for the basis; the basis of
    # a flat without rows is not stored.
    order = torch.argsort((counts > 0).to(torch.int8), dim=1, stable=True)
    cost = counts.gather(1, order).to(torch.float64)
    cost[:, -1] += d * (cost[:, -1] > 0)
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
