"""Fewer rows that stand for all: samples by what a row may cost, each row weighted by 1 / (its chance).

    sum over drawn rows of  m_i w_i rho(dist(a_i, S))      estimates      sum_i w_i rho(dist(a_i, S)),   m_i = 1 / p_i

The estimate is unbiased for every S (Horvitz & Thompson 1952). How far it strays is a matter of the rows' largest
possible share of the sum, their *sensitivity*; chances in proportion to an upper bound of it keep the estimates of all
S good at once (Feldman & Langberg 2011). For one flat leverage is such a bound. For k flats none is small: a row that
lies alone on a line of its own is all that two others leave, and in general no sample shorter than the rows serves all
k flats at once (Har-Peled, No coreset, no cry, 2006). So what is drawn here, with kj for the rank, is a start, not a
substitute: EM goes on with all rows.

``Coreset`` draws by the ridge leverage w_i a_i' (G + lambda I)^-1 a_i, with G = sum_i w_i a_i a_i' and lambda =
(eigenvalues beyond kj) / kj (Cohen et al. 2017). ``draw_sample`` draws by the energy w_i ||a_i||^2 and needs no pass
over the rows: EM's seeds are computed on it. Both give every row a chance of at least size / 2n, so no weight exceeds
2n / size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.flats import WeightedRows
from kflats.numerics.gram import cluster_grams
from kflats.numerics.loss import Loss, Squared
from kflats.numerics.rows import GRAM_BLOCK, TensorRows

_SQUARED = Squared()


@dataclass(frozen=True)
class Coreset:
    """``rows`` rows, drawn by their ridge leverage: EM converges on them before it sees the others.

    Choose it for millions of rows, where whole passes are what a fit costs. Limit: what few rows do not show, the
    full EM must still find; a coreset as long as the table is the table.

    Raises:
        KflatsError: fewer than 2 rows.

    >>> Coreset(rows=1000)
    Coreset(rows=1000)
    """

    rows: int = 32768

    def __post_init__(self) -> None:
        if isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 2:
            raise KflatsError(f"a coreset of {self.rows!r} rows is not possible", hint="a whole number, at least 2")

    def draw(self, cloud: WeightedRows, rank: int, generator: torch.Generator, loss: Loss = _SQUARED) -> WeightedRows:
        """About ``rows`` rows of ``cloud`` for flats that span ``rank`` dimensions together; all of them if fewer."""
        if cloud.rows.shape[0] <= self.rows:
            return cloud
        chance = chances(ridge_leverage(cloud.seen_by(loss), rank), self.rows)
        # Rows that bring the sum of chances, in random order, past a whole number: exactly the expected number.
        order = torch.randperm(len(chance), generator=generator).to(chance.device)
        passed = chance[order].cumsum(0, dtype=torch.float64).add_(float(torch.rand((), generator=generator))).floor_()
        taken = order[passed.diff(prepend=passed.new_zeros(1)) > 0].sort().values
        return _drawn(cloud, chance, taken)


def ridge_leverage(cloud: WeightedRows, rank: int) -> Tensor:
    """(n,) not negative: each row's ridge leverage, for flats that span ``rank`` dimensions together."""
    mass = cloud.mass
    n, d = cloud.rows.shape
    gram = cluster_grams(cloud.rows, torch.zeros(n, dtype=torch.uint8, device=cloud.rows.device), 1, mass)[0]
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp_min(0.0)
    ridge = float(values[: max(d - rank, 0)].sum()) / max(rank, 1)
    # Directions that hold nothing but rounding have no leverage to give.
    alive = values > d * torch.finfo(cloud.rows.dtype).eps * float(values[-1])
    scale = torch.where(alive, (values + ridge).clamp_min(torch.finfo(torch.float64).tiny).rsqrt(), 0.0)
    turned = (vectors * scale).to(cloud.rows.dtype)
    out = torch.empty(n, dtype=cloud.rows.dtype, device=cloud.rows.device)
    for start, block in cloud.rows.blocks(GRAM_BLOCK):
        out[start : start + len(block)] = torch.linalg.vector_norm(block @ turned, dim=1).square_()
    return out if mass is None else out * mass.to(out.dtype)


def chances(scores: Tensor, size: int) -> Tensor:
    """(n,) float32 chances to be drawn that sum to at most ``size``: half by ``scores``, half even."""
    n = len(scores)
    # float32 and in place: with ten million rows these vectors are the peak of the memory.
    chance = scores.to(torch.float32, copy=True)
    total = float(chance.sum(dtype=torch.float64))
    return (
        chance.mul_(0.5 * size / total if total > 0 else 0.0)
        .add_((0.5 if total > 0 else 1.0) * size / n)
        .clamp_(max=1.0)
    )


def draw_sample(cloud: WeightedRows, size: int, generator: torch.Generator, loss: Loss = _SQUARED) -> WeightedRows:
    """At most ``size`` rows, drawn half by their share of the weighted energy (``loss``: of what it sees) and half
    evenly, each with the number of rows it stands for (Horvitz-Thompson); the whole cloud if it is no larger."""
    if cloud.rows.shape[0] <= size:
        return cloud
    seen = cloud.seen_by(loss)
    chance = chances(seen.norms2 if seen.mass is None else seen.norms2 * seen.mass, size)
    taken = (torch.rand(len(chance), generator=generator).to(chance.device) < chance).nonzero().squeeze(1)
    return _drawn(cloud, chance, taken)


def _drawn(cloud: WeightedRows, chance: Tensor, taken: Tensor) -> WeightedRows:
    rows = TensorRows(cloud.rows.take(taken))
    weights = None if cloud.weights is None else cloud.weights[taken]
    stands_for = 1.0 / chance[taken].to(torch.float64)
    total = float(len(chance))
    if cloud.multiplicity is not None:
        stands_for *= cloud.multiplicity[taken].to(torch.float64)
        total = float(cloud.multiplicity.sum(dtype=torch.float64))
    # Together they stand for all rows, and not for one more: what a budget must hold is counted by them.
    stands_for *= (1 - 1e-6) * total / stands_for.sum()
    return WeightedRows(rows, cloud.norms2[taken], weights, stands_for.to(rows.dtype))
