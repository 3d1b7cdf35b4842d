"""Split and merge: a way out of EM's local minima (after Ueda et al., Neural Computation 2000).

Remove the flat whose rows lose least by going to their second nearest flat, and give its place to half of the flat that
gains most by being split. Then run EM, and keep the result only if the objective fell. Removing an empty or tiny flat
costs nothing, so these flats get new seeds in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kflats.numerics.assign import distances
from kflats.numerics.flats import FlatsFit, RankSpec, Start, Stopping, WeightedRows, em
from kflats.numerics.rows import TensorRows
from kflats.numerics.seeding import greedy


def split_and_merge(
    cloud: WeightedRows,
    shape: RankSpec,
    fit: FlatsFit,
    generator: torch.Generator,
    *,
    rounds: int = 8,
    tolerance: float = 1e-4,
) -> FlatsFit:
    """For equal ranks and rows in memory (a sample): one move after another, at most ``rounds``, while a move helps."""
    assert shape.rank is not None
    if shape.k < 2:
        return fit
    for _ in range(rounds):
        labels = _proposal(cloud, shape.k, shape.rank, fit, generator)
        if labels is None:
            break
        moved = em(cloud, shape, Start(labels), Stopping(tolerance, 20), refit=False)
        if moved.error >= fit.error * (1 - tolerance):
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
