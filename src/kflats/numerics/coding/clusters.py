"""Rows parted into flats for coding: each with principal axes and variances of its own.

A row x (weighted, in the metric) of norm s_i has shape u = x / s_i. With v_f the mean squares of the shapes of flat f
in its own principal axes V_f, and t the squared error of a coded coordinate, a row costs there, in nats,

    cost_if = 1/2 sum_r [ (u_i V_f')_r^2 / (v_fr + t / s_i^2)  +  ln(1 + v_fr s_i^2 / t) ]  -  ln(n_f / n)

the length of its Gaussian code at that error: what reverse water-filling counts, without its corner. Assigning every
row where it costs least and taking V_f, v_f anew is hard EM for a mixture of Gaussians of which each has a flat of its
own, seen through the noise that quantisation adds (Effros, Chou and Gray, Weighted universal image compression, IEEE
Trans. Image Processing 8, 1999, do so with transforms and real codes). Mean squares are what costs least where noise is
small beside them; elsewhere the sum of all costs may rise a little, so rounds end when few rows move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.numerics.rows import PartOfRows, Rows, slices

_ROUNDS = 20
_STILL = 0.002
"""EM ends when a smaller share of the rows moves."""
_SAMPLE_A_FLAT = 16384
"""Rows in the sample for each flat; then every row gets its flat once."""
FEWEST = 2
"""Times the columns: rows below which a flat is given up, since its axes would not pay for themselves."""


@dataclass(frozen=True)
class CodedFlat:
    """What a row costs in a flat: principal ``axes`` (d, d) as columns and ``variances`` (d,), of the shapes of its
    rows; ``label_nats``, what its label takes."""

    axes: Tensor
    variances: Tensor
    label_nats: float


def cluster_rows(rows: Rows, labels: Tensor, weights: Tensor, level: float) -> Tensor:
    """(n,) int64 flats 0 .. k - 1, none of them empty, at most as many as in ``labels``, from which EM starts.

    Args:
        rows: (n, d), in the metric.
        labels: (n,), a first guess.
        weights: (n,) row weights.
        level: t, the weighted squared error of a coded coordinate.
    """
    n, d = rows.shape
    labels = torch.unique(labels, return_inverse=True)[1]
    count = int(labels.max()) + 1
    if count == 1 or level <= 0 or n < FEWEST * d:  # no flat of so few rows has enough of them, but the largest
        return torch.zeros_like(labels)
    roots = weights.to(torch.float64).sqrt()
    most = count * _SAMPLE_A_FLAT
    chosen = torch.arange(n) if n <= most else torch.arange(most) * n // most
    part, part_roots, here = PartOfRows(rows, chosen), roots[chosen], labels[chosen]
    fewest = FEWEST * d * len(chosen) // n
    flats = _fitted(part, here, count, fewest)
    for _ in range(_ROUNDS):
        moved = _cheapest(part, part_roots, flats, level)
        share = float((moved != here).to(torch.float64).mean())
        here, flats = moved, _fitted(part, moved, len(flats), fewest)
        if share < _STILL:
            break
    kept: Tensor = torch.unique(_cheapest(rows, roots, flats, level), return_inverse=True)[1]
    return kept


def _shapes(block: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
    """Unit rows, and the squared norms of the weighted ones; rows of no weight or length have norm 0."""
    norms = block.norm(dim=1)
    sizes = norms.to(torch.float64) * roots
    # The norm of a row whose squares vanish is not its length.
    return block / norms.clamp_min(torch.finfo(block.dtype).tiny ** 0.5).unsqueeze(1), sizes.square()


def add_shapes_(grams: Tensor, block: Tensor, labels: Tensor) -> None:
    """Add to ``grams`` (k, d, d) float64 the Gram matrices of the unit rows of each label."""
    add_rows_(grams, _shapes(block, torch.ones((), dtype=torch.float64))[0], labels)


def add_rows_(grams: Tensor, block: Tensor, labels: Tensor) -> None:
    """Add to ``grams`` (k, d, d) float64 the Gram matrices of the rows of each label."""
    for flat in labels.unique().tolist():
        mine = block[labels == flat]
        grams[flat] += (mine.T @ mine).to(torch.float64)


def flats_of(grams: Tensor, counts: Tensor, fewest: int) -> tuple[list[CodedFlat], list[int]]:
    """The flats that have ``fewest`` rows, the largest at least, and which of all they are.

    Args:
        grams: (k, d, d), sums of ``add_shapes_``. counts: (k,) rows.
    """
    kept = [f for f in range(len(counts)) if counts[f] >= max(1, fewest)] or [int(counts.argmax())]
    flats = []
    for flat in kept:
        values, vectors = torch.linalg.eigh(grams[flat] / counts[flat])
        label_nats = -math.log(float(counts[flat]) / float(counts[kept].sum()))
        flats.append(CodedFlat(vectors, values.clamp_min(0.0), label_nats))
    return flats, kept


def costs_in(block: Tensor, roots: Tensor, flats: list[CodedFlat], level: float) -> Tensor:
    """(m, k) nats that each row of a block costs in each flat.

    Args:
        block: (m, d). roots: (m,) float64, square roots of weights. level: as ``cluster_rows``.
    """
    shapes, squares = _shapes(block, roots)
    # Rows of no size cost the same everywhere; the noise of the others is in units of their own.
    noise = (level / squares.clamp_min(1e-12 * level)).to(block.dtype).unsqueeze(1)
    costs = []
    for flat in flats:
        z = (shapes @ flat.axes.to(block.dtype)).square_()
        spread = flat.variances.to(block.dtype) + noise
        costs.append(0.5 * (z.div_(spread) + spread.div_(noise).log_()).sum(1) + flat.label_nats)
    return torch.stack(costs, dim=1)


def _fitted(rows: Rows, labels: Tensor, count: int, fewest: int) -> list[CodedFlat]:
    """The flats of these labels that have rows enough; the largest at least."""
    d = rows.shape[1]
    grams = torch.zeros(count, d, d, dtype=torch.float64)
    for here, block in slices(rows):
        add_shapes_(grams, block, labels[here])
    return flats_of(grams, torch.bincount(labels, minlength=count), fewest)[0]


def _cheapest(rows: Rows, roots: Tensor, flats: list[CodedFlat], level: float) -> Tensor:
    """(n,) the flat in which each row costs least."""
    return torch.cat([costs_in(block, roots[here], flats, level).argmin(1) for here, block in slices(rows)])
