"""The E-step: the nearest flat of each row.

    dist^2(a, S_c) = ||a||^2 - ||V_c a||^2        (V_c orthonormal, j_c x d)

One matrix product serves all flats, in blocks of rows. A flat of rank above d/2 is measured through its complement,
dist^2 = ||N_c a||^2, which is cheaper and does not cancel. With a Lagrange multiplier mu per coordinate the choice
minimises w_i dist^2 + mu j_c, so that flats of low rank attract rows with little to lose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.numerics.gram import complement
from kflats.numerics.loss import Loss, Squared
from kflats.numerics.rows import BLOCK, Rows, slices

_SQUARED = Squared()


@dataclass(frozen=True)
class Assignment:
    """``labels`` (n,) uint8 or int16 (of equal costs the lower flat); squared distances ``dist2`` (n,) to the chosen
    flat; ``objective`` = sum_i m_i (w_i rho(dist_i) + multiplier * rank of its flat). On request, ``margin`` (n,): how
    much more the second choice costs, and ``stayed`` (n,): squared distances to the flats of earlier labels."""

    labels: Tensor
    dist2: Tensor
    objective: float
    margin: Tensor | None = None
    stayed: Tensor | None = None


def squared_norms(rows: Rows) -> Tensor:
    """(n,) squared row norms."""
    return torch.cat([torch.linalg.vector_norm(block, dim=1).square_() for _, block in rows.blocks(BLOCK)])


def assign(
    rows: Rows,
    bases: tuple[Tensor, ...],
    norms2: Tensor,
    *,
    weights: Tensor | None = None,
    multiplicity: Tensor | None = None,
    multiplier: float = 0.0,
    exact: bool = False,
    margins: bool = False,
    loss: Loss = _SQUARED,
    before: Tensor | None = None,
) -> Assignment:
    """The flat of least cost for every row, block by block.

    Args:
        bases: orthonormal (j_c, d), one for each flat.
        norms2: ``squared_norms(rows)``.
        weights: (n,) w_i. multiplicity: (n,) number of rows of the matrix that each row of a sample stands for.
        multiplier: cost of a stored number, in units of the weighted squared error.
        exact: allow one more choice, label k: the row is kept as it is, for d numbers.
        margins: whether to return margins.
        loss: rho of a distance. It changes the choice where there is a multiplier, and the objective always.
        before: (n,) labels for ``stayed``.
    """
    n, d = rows.shape
    measure = _Measure(bases, d, rows.dtype)
    k = len(bases)
    ranks = torch.tensor([len(b) for b in bases] + [d] * exact, dtype=rows.dtype, device=rows.device)
    labels = torch.empty(n, dtype=torch.uint8 if k + exact <= 256 else torch.int16, device=rows.device)
    dist2 = torch.empty(n, dtype=rows.dtype, device=rows.device)
    margin = torch.empty(n, dtype=rows.dtype, device=rows.device) if margins else None
    stayed = torch.empty(n, dtype=rows.dtype, device=rows.device) if before is not None else None
    objective = torch.zeros((), dtype=torch.float64, device=rows.device)
    for part, block in slices(rows):
        distances = measure(block, norms2[part], exact)
        cost = distances if isinstance(loss, Squared) else loss.rho(distances)
        if weights is not None:
            cost = cost * weights[part].to(rows.dtype).unsqueeze(1)
        if multiplier:
            cost = cost + multiplier * ranks
        best, chosen = cost.min(dim=1)
        labels[part] = chosen
        dist2[part] = distances.gather(1, chosen.unsqueeze(1)).squeeze(1)
        if stayed is not None and before is not None:
            old = before[part].to(torch.int64).unsqueeze(1)
            stayed[part] = distances.gather(1, old).squeeze(1)
        if margin is not None:
            margin[part] = cost.scatter_(1, chosen.unsqueeze(1), torch.inf).min(dim=1).values.sub_(best)
        if multiplicity is not None:
            best = best * multiplicity[part].to(best.dtype)
        objective += best.sum(dtype=torch.float64)
    return Assignment(labels, dist2, float(objective), margin, stayed)


def distances(rows: Rows, bases: tuple[Tensor, ...], norms2: Tensor) -> Tensor:
    """(n, k) squared distances of all rows to all flats, in memory: for samples."""
    measure = _Measure(bases, rows.shape[1], rows.dtype)
    return torch.cat([measure(block, norms2[here], False).clone() for here, block in slices(rows)])


class _Measure:
    """Squared distances of a block to all flats by one matrix product, directly or through complements."""

    def __init__(self, bases: tuple[Tensor, ...], d: int, dtype: torch.dtype) -> None:
        self.through = [2 * len(b) > d for b in bases]
        parts = [complement(b) if flip else b for b, flip in zip(bases, self.through, strict=True)]
        self.sizes = [len(p) for p in parts]
        self.stacked = torch.cat(parts).to(dtype)
        self.uniform = len(set(self.sizes)) == 1 and self.sizes[0] > 0
        self.flip = torch.tensor(self.through, device=self.stacked.device)
        self.buffer = torch.empty(BLOCK, len(self.stacked), dtype=dtype, device=self.stacked.device)

    def __call__(self, block: Tensor, norms2: Tensor, exact: bool) -> Tensor:
        k = len(self.sizes)
        y = torch.mm(block, self.stacked.T, out=self.buffer[: len(block)])
        out = y.new_zeros(len(block), k + exact)
        if self.uniform:
            torch.linalg.vector_norm(y.view(len(block), k, -1), dim=2, out=out[:, :k])
        else:
            for c, part in enumerate(y.split(self.sizes, dim=1)):
                if part.shape[1]:
                    out[:, c] = torch.linalg.vector_norm(part, dim=1)
        found = out[:, :k].square_()
        inside = (norms2.unsqueeze(1) - found).clamp_min_(0.0)
        if not any(self.through):
            out[:, :k] = inside
        elif not all(self.through):
            out[:, :k] = torch.where(self.flip, found, inside)
        return out
