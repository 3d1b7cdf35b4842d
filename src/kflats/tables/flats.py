"""The flats of a table in files, found by EM in passes over its rows, and how rows are told apart before coding.

Each pass gives every row the flat in which its code is shortest (``numerics.coding.clusters``) and sums, for each flat,
the Gram matrix of the shapes of its rows, from which the next pass has axes and variances, and that of its rows, whose
eigenvectors are the axes of the code. EM starts on a sample. The sum of all lengths falls from pass to pass; when it
hardly falls, EM ends.

A row with weight w, as a share of the largest, is coded after it was multiplied by the root of its weight, rounded to a
power of the root of two: rows that count four times as much get steps half as large. Weights change no axes: every row
takes bits, and axes of the heaviest rows alone would make those of all others more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kflats.common.workers import Workers
from kflats.numerics.coding.clusters import (
    FEWEST,
    CodedFlat,
    add_rows_,
    add_shapes_,
    cluster_rows,
    costs_in,
    flats_of,
)
from kflats.numerics.fit import fit_flats
from kflats.numerics.rows import TensorRows
from kflats.tables.axes import Axes
from kflats.tables.layout import Coordinates

MOST_FLATS = 16
_LEVELS = 16  # of weights; those below 2^-15 of the largest count as that
_MEMORY, _COPIES = 2**29, 5  # of the Gram matrices of all flats that a pass holds
_PASSES = 4
_STILL = 0.002
"""EM ends when the sum of all lengths falls by less."""

Blocks = Callable[[int], Iterator[tuple[int, Tensor, Tensor | None]]]
"""The blocks of a unit: the number of the first row, rows (m, d) float32 less their mean, their weights."""


@dataclass(frozen=True)
class Parting:
    """How rows are told apart: by flat, and by level of weight.

    Args:
        axes: of each flat, by falling energy.
        weight_levels: how many levels of weight there are. heaviest: the largest weight.
        shapes: what a row costs in each flat; () for one flat. noise: the squared error of a coded coordinate, on which
            costs depend.
    """

    axes: Axes
    weight_levels: int = 1
    heaviest: float = 1.0
    shapes: tuple[CodedFlat, ...] = ()
    noise: float = 0.0

    @property
    def groups(self) -> int:
        """How many groups of rows there are."""
        return len(self.axes) * self.weight_levels

    @property
    def roots(self) -> Tensor:
        """The root of each level of weight."""
        return 2.0 ** (-torch.arange(self.weight_levels, dtype=torch.float32) / 2)

    def coordinates(self, near: Tensor, weights: Tensor | None = None) -> Coordinates:
        """The coordinates of rows (m, d) float32, less their mean."""
        if self.groups == 1:
            return Coordinates(near @ self.axes.analysis[0], None, weights)
        levels = self.levels_of(near, weights)
        labels = self.labels(near, levels)
        values = torch.empty_like(near)
        for flat in labels.unique().tolist():
            mine = labels == flat
            values[mine] = near[mine] @ self.axes.analysis[flat]
        return Coordinates(values.mul_(self.roots[levels].unsqueeze(1)), labels * self.weight_levels + levels, weights)

    def labels(self, near: Tensor, levels: Tensor) -> Tensor:
        """(m,) the flat in which each row costs least."""
        if not self.shapes:
            return torch.zeros(len(near), dtype=torch.int64)
        return self._costs(near, levels).argmin(1)

    def costs(self, near: Tensor, weights: Tensor | None) -> tuple[float, Tensor]:
        """The sum of what rows cost where they cost least, in nats, and (m,) their flats."""
        least = self._costs(near, self.levels_of(near, weights)).min(dim=1)
        return float(least.values.sum(dtype=torch.float64)), least.indices

    def _costs(self, near: Tensor, levels: Tensor) -> Tensor:
        return costs_in(near, self.roots.to(torch.float64)[levels], list(self.shapes), self.noise)

    def levels_of(self, near: Tensor, weights: Tensor | None) -> Tensor:
        """(m,) int64, the levels of the weights of rows."""
        if weights is None or self.weight_levels == 1:
            return torch.zeros(len(near), dtype=torch.int64)
        return halvings(weights, self.heaviest).clamp_max(self.weight_levels - 1)


def halvings(weights: Tensor, heaviest: float) -> Tensor:
    """(m,) int64, how many times each weight is half of the largest one, rounded, 15 at most.

    >>> halvings(torch.tensor([8.0, 3.0, 0.0]), 8.0).tolist()
    [0, 1, 15]
    """
    shares = (weights.to(torch.float64) / heaviest).clamp_min(2.0 ** (1 - _LEVELS))
    return (-shares.log2()).round().clamp(0, _LEVELS - 1).to(torch.int64)


def parted(
    sample: Tensor,
    sample_weights: Tensor | None,
    flats: int,
    *,
    one: Parting,
    noise: float,
    seed: int,
    blocks: Blocks,
    units: int,
    workers: Workers,
    show: Callable[[str, int], None],
) -> tuple[Parting, tuple[float, ...]]:
    """The flats of a table, and the mean length of a row in nats after each pass over all rows.

    Args:
        sample: (m, d) float32 rows of the table, less the mean of all. sample_weights: theirs.
        flats: how many are sought. Those of few rows are given up.
        one: the parting with one flat, whose levels of weights it keeps. noise: as of ``Parting``.
        blocks: of each of the ``units`` of rows. workers: who divide the units.
        show: is told the pass and the rows of it that were read.
    """
    d = sample.shape[1]
    flats = min(flats, len(sample) // (FEWEST * d), _MEMORY // (_COPIES * 8 * d * d))
    if flats < 2:
        return one, ()
    energies = one.coordinates(sample, sample_weights).values.square().mean(0)
    rank = max(1, min(d // 2, int((energies > noise).sum())))  # the axes that get bits
    start = fit_flats(TensorRows(sample), flats, rank=rank, seed=seed).labels.to(torch.int64)
    weights = one.roots[one.levels_of(sample, sample_weights)].to(torch.float64).square()
    labels = cluster_rows(TensorRows(sample), start, weights, noise)
    count = int(labels.max()) + 1
    add_shapes_(grams := torch.zeros(count, d, d, dtype=torch.float64), sample, labels)
    fitted, _ = flats_of(grams, torch.bincount(labels, minlength=count), FEWEST * d)
    made = replace(one, shapes=tuple(fitted), noise=noise)
    lengths = list[float]()
    for number in range(_PASSES):
        if len(made.shapes) == 1:
            return one, tuple(lengths)
        sums = _pass(made, blocks, units, workers, partial(show, f"EM, pass {number + 1}"))
        lengths.append(sums.nats / max(1, int(sums.counts.sum())))
        found, kept = flats_of(sums.shapes, sums.counts, FEWEST * d)
        axes = Axes.of(eigenvectors(sums.rows[kept]))
        made = Parting(axes, one.weight_levels, one.heaviest, tuple(found), noise)
        if number and lengths[-1] > (1 - _STILL) * lengths[-2]:
            break
    return made if len(made.shapes) > 1 else one, tuple(lengths)


def eigenvectors(grams: Tensor) -> Tensor:
    """(k, d, d) float32, the eigenvectors of Gram matrices as rows, by falling energy."""
    return torch.stack([torch.linalg.eigh(gram).eigenvectors.T.flip(0) for gram in grams]).to(torch.float32)


@dataclass(frozen=True)
class _Sums:
    nats: float
    counts: Tensor  # (k,)
    shapes: Tensor  # (k, d, d)
    rows: Tensor  # (k, d, d)


def _pass(made: Parting, blocks: Blocks, units: int, workers: Workers, show: Callable[[int], None]) -> _Sums:
    """The sums of all units, added in their order."""
    k, d = len(made.shapes), made.axes.scales.shape[1]

    def unit(number: int) -> tuple[dict[str, Tensor], str]:
        nats, counts = 0.0, torch.zeros(k, dtype=torch.int64)
        shapes, rows = (torch.zeros(k, d, d, dtype=torch.float64) for _ in range(2))
        for start, near, weights in blocks(number):
            cost, labels = made.costs(near, weights)
            nats += cost
            counts += torch.bincount(labels, minlength=k)
            add_shapes_(shapes, near, labels)
            add_rows_(rows, near, labels)
            show(start + len(near))
        return {"counts": counts, "shapes": shapes, "rows": rows}, json.dumps(nats)

    counts = torch.zeros(k, dtype=torch.int64)
    shapes, rows = (torch.zeros(k, d, d, dtype=torch.float64) for _ in range(2))
    nats = 0.0
    for tensors, text in workers.in_turn([f"unit {number} of EM" for number in range(units)], unit):
        nats += json.loads(text)
        for total, part in ((counts, "counts"), (shapes, "shapes"), (rows, "rows")):
            total += tensors[part]
    return _Sums(nats, counts, shapes, rows)
