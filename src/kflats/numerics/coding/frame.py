"""The two things transform coding looks at a matrix through: its classes and principal axes, its coordinates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kflats.numerics.coding.basis import CodedBasis, code_basis
from kflats.numerics.coding.classes import candidate_classes
from kflats.numerics.coding.gaussian_bound import water_level
from kflats.numerics.coding.quantizers import Quantizer, Tally, first_symbols, symbols
from kflats.numerics.coding.tables import FARTHEST
from kflats.numerics.gram import cluster_grams, top_eigenvectors
from kflats.numerics.metric import Metric, right_metric
from kflats.numerics.rows import GRAM_BLOCK, MetricRows, PartOfRows, Rows

_BLOCK = 4096
_SAMPLE = 4096
"""Rows on which a step is searched for."""
_FEWEST = 64
"""Rows of each class in that sample, if it has so many."""
_FINEST = 2.0**-20
_RANK = 1e-10
"""Energies below this, in units of the largest, are rounding."""


@dataclass(frozen=True)
class Source:
    """What does not depend on the step.

    ``row_weights`` and ``norms`` (n,); ``axes`` (r, d) unit rows in the metric, with their weighted ``energies`` (r,);
    ``first_step``, where to begin to look for a step; ``labels`` (n,) and ``members``, the rows of each of C classes;
    ``weights`` (C,) their mean weights, ``means`` (C, d) their mean rows; ``reach``, a bound of all weighted norms.
    """

    rows: Rows
    metric: Metric
    row_weights: Tensor
    norms: Tensor
    axes: Tensor
    energies: Tensor
    first_step: float
    labels: Tensor
    members: tuple[Tensor, ...]
    weights: Tensor
    means: Tensor
    reach: float

    @property
    def spread(self) -> float:
        """Root mean square of the largest coordinate, weighted; 0 for a matrix of zeros."""
        return math.sqrt(float(self.energies[0]) / len(self.labels)) if len(self.energies) else 0.0

    def candidates(self, classes: int) -> tuple[Source, ...]:
        """This source in every way of parting its rows that is worth trying."""
        measured, level = MetricRows(self.rows, self.metric.factor), self.first_step**2 / 12
        ways = candidate_classes(measured, self.axes, self.row_weights, self.norms, classes, level)
        return tuple(self.classed(labels) for labels in ways)

    def classed(self, labels: Tensor) -> Source:
        """This source with other classes."""
        members = tuple((labels == c).nonzero().squeeze(1) for c in range(int(labels.max()) + 1))
        means = torch.stack([sum_of(self.rows, part) / len(part) for part in members])
        weights = torch.stack([self.row_weights[part].mean() for part in members])
        # A class of weight 0 has no step of its own: so coarse a one that it gets no bits.
        weights = weights.clamp_min(1e-9 * float(weights.max()))
        longest = torch.stack([self.norms[part].max() for part in members])
        reach = float((longest * weights.sqrt()).max())
        return replace(self, labels=labels, members=members, weights=weights, means=means, reach=reach)

    @property
    def finest(self) -> float:
        """The least step at which float32 rows still have something to give, and every coordinate is in range."""
        return max(self.spread * _FINEST, 1.25 * self.reach / FARTHEST)

    def sample(self) -> tuple[Source, Tensor]:
        """Evenly spaced rows of every class, and (C,) how many rows each of them stands for."""
        n = len(self.labels)
        parts, scale = [], []
        for part in self.members:
            count = min(len(part), max(_FEWEST, math.ceil(len(part) * _SAMPLE / n)))
            parts.append(part[(torch.arange(count) * len(part)) // count])
            scale.append(len(part) / count)
        index = torch.cat(parts)
        places = torch.arange(len(index)).split([len(part) for part in parts])
        chosen = replace(self, rows=PartOfRows(self.rows, index), labels=self.labels[index], members=tuple(places))
        return chosen, torch.tensor(scale, dtype=torch.float64)

    def code_axes(self, step: float) -> CodedBasis:
        """All axes, coded for this step."""
        return code_basis(self.metric.decoder(self.axes), self.energies, step)

    def outside(self, step: float) -> float:
        """Weighted energy of all rows outside the span of the axes as they are coded for this step: nothing where they
        span everything, what integers turn them by where they do not."""
        measured = self.metric.measured(self.code_axes(step).directions)
        span = torch.linalg.qr(measured.to(torch.float64).T).Q
        lost = 1.0 - (self.axes.to(torch.float64) @ span).square().sum(1)
        return float((self.energies * lost.clamp_min(0.0)).sum())

    def frame(self, basis: CodedBasis, step: float) -> Frame:
        """Coordinates against a coded basis B, in steps: least squares in the metric, a R ~ y B R."""
        steps = (step / self.weights.sqrt()).to(torch.float32)
        measured = self.metric.measured(basis.directions)
        encoder = self.metric.encoder(torch.linalg.pinv(measured @ measured.T, hermitian=True) @ measured)
        centers = (self.means @ encoder / steps.to(torch.float64).unsqueeze(1)).round().clamp(-FARTHEST, FARTHEST)
        return Frame(self, basis, steps, encoder, centers)


@dataclass(frozen=True)
class Frame:
    """Coordinates of a source in steps: u = a ``encoder`` / ``steps`` - ``centers`` for the rows a of each class."""

    source: Source
    basis: CodedBasis
    steps: Tensor
    encoder: Tensor
    centers: Tensor

    def blocks(self) -> Iterator[tuple[int, int, Tensor]]:
        """(class, first row in it, u (r, m) float32), class by class."""
        for c, members in enumerate(self.source.members):
            encoder = (self.encoder / float(self.steps[c])).to(torch.float32).T.contiguous()
            center = self.centers[c].to(torch.float32).unsqueeze(1)
            for start in range(0, len(members), _BLOCK):
                block = self.source.rows.take(members[start : start + _BLOCK]).to(torch.float32)
                yield c, start, encoder @ block.T - center

    def survey(self, quantizer: Quantizer | None, *, keep: bool = False) -> tuple[Tally, tuple[Tensor, ...]]:
        """Quantise every row, by a plain dead zone where there is no quantizer yet; and the symbols, if to keep."""
        r, members = len(self.basis.levels), self.source.members
        tally = Tally(len(members), r)
        levels = tuple(torch.empty(len(part) if keep else 0, r, dtype=torch.int16) for part in members)
        thresholds = [] if quantizer is None else quantizer.thresholds()
        for c, start, u in self.blocks():
            q = first_symbols(u) if quantizer is None else symbols(u, quantizer.contexts[c], thresholds)
            tally.add_(c, u, q)
            if keep:
                levels[c][start : start + u.shape[1]] = q.T
        return tally, levels


def source_of(rows: Rows, weights: Tensor | None, right: Tensor | None, target: tuple[str, float]) -> Source:
    """Principal axes of the weighted rows in the metric, all rows in one class.

    Args:
        target: ("step", its value), which takes weights as they are; or ("bits", per weight): their mean is then 1.
    """
    n, d = rows.shape
    metric = right_metric(torch.ones(d) if right is None else right, d)
    w = torch.ones(n, dtype=torch.float64) if weights is None else weights.detach().to("cpu", torch.float64)
    kind, value = target
    if kind == "step":
        metric = Metric(metric.factor * metric.scale**0.5, metric.inverse / metric.scale**0.5, 1.0)
    else:
        w = w * (n / w.sum())
    measured = MetricRows(rows, metric.factor)
    gram = cluster_grams(measured, torch.zeros(n, dtype=torch.int64), 1, w)[0]
    energies, axes = top_eigenvectors(gram, d)
    known = int((energies[: min(n, d)] > _RANK * energies[0]).sum()) if float(energies[0]) > 0 else 0
    energies, axes = energies[:known], axes[:known]
    norms = torch.cat([block.norm(dim=1) for _, block in measured.blocks(GRAM_BLOCK)]).to(torch.float64)
    # Directions without energy leave their bits to the others.
    level = value**2 / 12 if kind == "step" else water_level(energies / n, value * d / known) if known else 0.0
    none = torch.zeros(0)
    bare = Source(rows, metric, w, norms, axes, energies, math.sqrt(12 * level), none, (), none, none, 0.0)
    return bare.classed(torch.zeros(n, dtype=torch.int64))


def sum_of(rows: Rows, index: Tensor) -> Tensor:
    """(d,) float64 sum of the rows at ``index``."""
    parts = (rows.take(part).to(torch.float64).sum(0) for part in index.split(GRAM_BLOCK))
    return torch.stack(list(parts)).sum(0)
