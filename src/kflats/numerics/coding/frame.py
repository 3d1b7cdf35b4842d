"""A matrix prepared for transform coding: its classes and principal axes (``Source``), its coordinates (``Frame``), and
its axes in few bits (``CodedBasis``), each as finely as its coordinates deserve.

An error e in direction r of the basis costs lambda_r |e|^2, with lambda_r the weighted energy of its coordinates: as
much as an error in them. Both are cut at the same water level, so the step of direction r is proportional to
step / sqrt(lambda_r). Coordinates are computed against the coded basis (least squares), so that as long as no
direction is left out an error of the basis costs nothing but its slant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from kflats.numerics.coding.classes import candidate_classes
from kflats.numerics.coding.quantizers import Quantizer, Tally, first_symbols, symbols
from kflats.numerics.coding.tables import FARTHEST, Tables, tables_for
from kflats.numerics.gram import principal_axes
from kflats.numerics.large_matrices import room_like, rows_at, stripes, zero_matrix
from kflats.numerics.rows import MetricRows, PartOfRows, Rows, TensorRows, gram_block, slices, whole_matrix
from kflats.numerics.svd import Metric, right_metric, triangular_metric

RowBlock: TypeAlias = tuple[int, int, Tensor]
"""A class, the first of some rows in it, and their coordinates u (r, m) float32."""

_BLOCK = 4096
_HALVINGS = 80
_SAMPLE = 4096
"""Rows in the sample for the search of a step."""
_FEWEST = 64
"""The least rows of each class in that sample, if it has as many."""
_RANK = 1e-10
"""Energies below this, in units of the largest, are rounding."""
_DEPENDENT = 1e-4
"""An axis that lies in the span of the others up to this share of its length is dependent."""
_MARGIN = 1.25
"""The range of a class, in lengths of its longest row. It exceeds 1 because coded axes are not quite orthogonal."""
_SLACK = 1.05
"""The same in lengths that no row has from the mean of its class."""
_UNLIKE = 16
"""Median lengths from which on a row is unlike the others: the first guess of the step ignores it, and where all rows
are too long for the step, classes are those of lengths."""
_APART = 4
"""Long rows whose lengths, or steps, differ by more than this factor get different classes, if there are enough."""
_COARSENESS = 1.5
"""Steps of the basis in units of step / sqrt(lambda). Best 1 where directions are left out, 2 to 3 where none."""


@dataclass(frozen=True)
class CodedBasis:
    """``levels`` (r, d) int8 and ``scale`` (r,) float32; ``tables``: distributions of levels (``basis_contexts``);
    ``bits`` (r,) float64, what each row costs."""

    levels: Tensor
    scale: Tensor
    tables: Tables
    bits: Tensor

    @property
    def directions(self) -> Tensor:
        """(r, d) float64."""
        return room_like(self.levels, torch.float64).copy_(self.levels).mul_(self.scale.to(torch.float64).unsqueeze(1))

    def kept(self, index: Tensor) -> CodedBasis:
        """The rows at ``index`` alone."""
        return _coded(rows_at(index, self.levels), self.scale[index])


def code_basis(directions: Tensor, energies: Tensor, step: float) -> CodedBasis:
    """Round ``directions`` (r, d), of weighted energies (r,), for coordinates of this step.

    Steps are never finer than int8 holds, nor so coarse that a direction is lost.
    """
    levels, scale = room_like(directions, torch.int8), torch.empty(len(directions), dtype=torch.float32)
    for here in stripes(directions):
        part = directions[here]
        size, largest = part.square().mean(1).sqrt(), part.abs().amax(1)
        wanted = _COARSENESS * step * size * part.shape[1] ** 0.5 / energies[here].clamp_min(1e-300).sqrt()
        scale[here] = torch.maximum(torch.minimum(wanted, size), largest / 127).to(torch.float32)
        levels[here] = (part / scale[here].to(torch.float64).unsqueeze(1)).round_().clamp_(-127, 127).to(torch.int8)
    return _coded(levels, scale)


def basis_contexts(levels: Tensor) -> Tensor:
    """(r,) int64, the distribution that each row of integers (r, d) follows: rows of about one mean magnitude share
    one."""
    parts = [levels[here].to(torch.float64).abs().mean(1) for here in stripes(levels)]
    means = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
    contexts: Tensor = torch.unique((means.clamp_min(1e-9).log2() * 2).floor(), return_inverse=True)[1]
    return contexts


def _coded(levels: Tensor, scale: Tensor) -> CodedBasis:
    contexts = basis_contexts(levels)
    number = int(contexts.max()) + 1 if len(contexts) else 0
    tables = tables_for(levels, contexts.unsqueeze(1).expand_as(levels), number)
    bits = torch.zeros(len(levels), dtype=torch.float64)
    for here in stripes(levels):
        bits[here] = tables.bits[contexts[here]].gather(1, levels[here].to(torch.int64).abs()).sum(1)
    return CodedBasis(levels, scale, tables, bits)


@dataclass(frozen=True)
class Source:
    """The part of transform coding that does not depend on the step.

    Args:
        rows: (n, x); times ``reader``, (x, d) or its diagonal, they are the matrix in the metric.
        turned: (n, r), the rows in principal axes.
        row_weights, norms: (n,), of the rows.
        axes: (r, d), unit rows in the metric, with their weighted ``energies`` (r,).
        directions: (r, d), the axes without the metric.
        first_step: where to begin to look for a step.
        labels: (n,), the class of each row; ``members``, the rows of each of C classes.
        weights, means, longest: of each class, the mean weight (C,), the mean row (C, d) and the largest norm (C,).
        cap: the weighted norm from which on a row is expected to need a coarser step than the others.
    """

    rows: Rows
    turned: Rows
    reader: Tensor
    metric: Metric
    row_weights: Tensor
    norms: Tensor
    axes: Tensor
    directions: Tensor
    energies: Tensor
    first_step: float
    labels: Tensor
    members: tuple[Tensor, ...]
    weights: Tensor
    means: Tensor
    longest: Tensor
    cap: float

    @property
    def reach(self) -> float:
        """A bound of all weighted norms."""
        return float((self.longest * self.weights.sqrt()).max())

    def candidates(self, classes: int, most: int) -> tuple[Source, ...]:
        """This source in every way of parting its rows that is worth trying: into ``classes``, and ``most`` together
        with those of long rows."""
        level = self.first_step**2 / 12
        long = self._long(most - 1)
        near, far = (long == 0).nonzero().squeeze(1), long > 0
        apart = int(long.max()) if len(near) else 0
        if not apart:
            weighted = self.norms * self.row_weights.sqrt()
            if not len(near) and float(weighted.max()) > _UNLIKE * float(weighted.median()):
                return (self.classed(long - 1),)  # so fine a step is too fine for all rows, and much more so for some
            ways = candidate_classes(self.turned, self.row_weights, self.norms, classes, level)
            return tuple(self.classed(labels) for labels in ways)
        others = PartOfRows(self.turned, near)
        sources, count = [], max(1, min(classes, most - apart))
        for way in candidate_classes(others, self.row_weights[near], self.norms[near], count, level):
            labels = torch.empty_like(long)
            labels[near], labels[far] = way, int(way.max()) + long[far]
            sources.append(self.classed(labels))
        return tuple(sources)

    def _long(self, most: int) -> Tensor:
        """(n,) int64: 0, or from 1 the class of a row that is too long for the step of the others; ``most`` at most."""
        classes = torch.zeros(len(self.norms), dtype=torch.int64)
        weighted = self.norms * self.row_weights.sqrt()
        far = (weighted > self.cap).nonzero().squeeze(1)
        if not len(far) or most < 1:
            return classes
        lengths, weights = (weighted[far] / self.cap).log2(), self.row_weights[far].log2() / 2
        width = math.log2(_APART)
        while True:
            cells = torch.stack([lengths / width, (weights - weights.max()) / width], dim=1).floor()
            used, labels = torch.unique(cells, dim=0, return_inverse=True)
            if len(used) <= most:
                break
            width *= 2
            if width > 4096:
                labels = torch.zeros_like(labels)
                break
        classes[far] = labels + 1
        return classes

    def classed(self, labels: Tensor) -> Source:
        """This source with other classes."""
        members = tuple((labels == c).nonzero().squeeze(1) for c in range(int(labels.max()) + 1))
        means = torch.stack([sum_of(self.rows, part) / len(part) for part in members])
        weights = torch.stack([self.row_weights[part].mean() for part in members])
        # A class of weight 0 has no step of its own: so coarse a one that it gets no bits.
        weights = weights.clamp_min(1e-9 * float(weights.max()))
        longest = torch.stack([self.norms[part].max() for part in members])
        return replace(self, labels=labels, members=members, weights=weights, means=means, longest=longest)

    @property
    def floors(self) -> Tensor:
        """(C,) the least step of each class: coordinates, counted from its mean, are in range of the integers."""
        middles = (self.means * self.reader if self.reader.ndim == 1 else self.means @ self.reader).norm(dim=1)
        return torch.maximum(_MARGIN * self.longest, _SLACK * (self.longest + middles)) / FARTHEST

    @property
    def finest(self) -> float:
        """The step from which on every class is at its least, so that a smaller one changes nothing."""
        least = self.floors * self.weights.sqrt()
        return float(least[least > 0].min()) if bool((least > 0).any()) else 0.0

    def sample(self) -> tuple[Source, Tensor]:
        """Evenly spaced rows of every class, in principal axes, and (C,) how many rows each of them stands for."""
        n = len(self.labels)
        parts, scale = [], []
        for part in self.members:
            count = min(len(part), max(_FEWEST, math.ceil(len(part) * _SAMPLE / n)))
            parts.append(part[(torch.arange(count) * len(part)) // count])
            scale.append(len(part) / count)
        index = torch.cat(parts)
        places = torch.arange(len(index)).split([len(part) for part in parts])
        rows = TensorRows(self.turned.take(index))
        means = torch.stack([sum_of(self.turned, part) / len(part) for part in self.members])
        chosen = replace(
            self,
            rows=rows,
            turned=rows,
            reader=self.axes,
            labels=self.labels[index],
            members=tuple(places),
            means=means,
        )
        return chosen, torch.tensor(scale, dtype=torch.float64)

    def code_axes(self, step: float) -> CodedBasis:
        """All axes, coded for this step."""
        return code_basis(self.directions, self.energies, step)

    def frame(self, basis: CodedBasis, step: float) -> Frame:
        """Coordinates against a coded basis B, in steps: least squares in the metric, a R ~ y B R."""
        steps = torch.maximum(step / self.weights.sqrt(), self.floors).to(torch.float32)
        measured = _times(basis.directions, self.metric.factor)
        read = _read(measured, self.reader)
        inside = self.reader is self.axes and len(self.axes) < self.axes.shape[1]
        encoder = _least_squares_(measured, room_like(read).copy_(read) if inside else read).T
        centers = (self.means @ encoder / steps.to(torch.float64).unsqueeze(1)).round().clamp(-FARTHEST, FARTHEST)
        counts = (steps.to(torch.float64) * self.weights.sqrt() / step).square()
        outside = 0.0
        if inside:
            lost = 1.0 - (encoder * read.T).sum(1)
            outside = float((self.energies * lost.clamp_min(0.0)).sum())
        return Frame(self, basis, steps, encoder, centers, counts, outside)


@dataclass(frozen=True)
class Frame:
    """Coordinates of a source in steps: u = a ``encoder`` / ``steps`` - ``centers`` for the rows a of each class.

    ``counts`` (C,): weighted squared error of a squared step of each class, in units of step^2: 1, more for long rows.
    ``outside``: of rows in principal axes, their weighted energy outside the span of the coded basis; else 0.
    """

    source: Source
    basis: CodedBasis
    steps: Tensor
    encoder: Tensor
    centers: Tensor
    counts: Tensor
    outside: float

    def blocks(self) -> Iterator[RowBlock]:
        """All coordinates, class by class."""
        size = min(_BLOCK, gram_block(self.source.rows))
        for c, members in enumerate(self.source.members):
            encoder = room_like(self.encoder.T, torch.float32)
            for here in stripes(encoder):
                encoder[here] = self.encoder.T[here] / float(self.steps[c])
            center = self.centers[c].to(torch.float32).unsqueeze(1)
            for start in range(0, len(members), size):
                block = self.source.rows.take(members[start : start + size]).to(torch.float32)
                yield c, start, encoder @ block.T - center

    def survey(
        self, quantizer: Quantizer | None, blocks: Iterable[RowBlock] | None = None, *, keep: bool = False
    ) -> tuple[Tally, tuple[Tensor, ...]]:
        """Quantise every row, by a plain dead zone where there is no quantizer yet; and the symbols, if to keep.

        Args:
            blocks: what ``blocks`` gave; None: computed here.
        """
        r, members = len(self.basis.levels), self.source.members
        tally = Tally(len(members), r)
        counts = [len(part) if keep else 0 for part in members]
        levels = zero_matrix(sum(counts), r, torch.int16).split(counts)
        thresholds = [] if quantizer is None else quantizer.thresholds()
        for c, start, u in self.blocks() if blocks is None else blocks:
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
    right = torch.ones(d, dtype=torch.float32) if right is None else right
    metric = triangular_metric(right, d) if n < d and right.ndim == 2 else right_metric(right, d)
    w = torch.ones(n, dtype=torch.float64) if weights is None else weights.detach().to("cpu", torch.float64)
    kind, value = target
    if kind == "step":
        metric = Metric(metric.factor * metric.scale**0.5, metric.inverse / metric.scale**0.5, 1.0)
    else:
        w = w * (n / w.sum())
    measured = MetricRows(rows, metric.factor)
    norms = torch.cat([block.norm(dim=1) for _, block in measured.blocks(gram_block(measured))]).to(torch.float64)
    lengths = norms * w.sqrt()
    longest = float(lengths.max())

    def principal(cap: float) -> tuple[Tensor, Tensor, float]:
        """Energies, axes and the first step where no row counts more than one of weighted length ``cap``."""
        v = w if cap >= longest else w * (cap / lengths.clamp_min(cap)).square()
        energies, axes = principal_axes(measured, v)
        known = max(1, int((energies[: min(n, d)] > _RANK * energies[0]).sum()))
        energies, axes = energies[:known], axes[:known]
        # Directions without energy leave their bits to the others.
        level = 0.0
        if kind == "step":
            level = value**2 / 12
        elif energies[0] > 0:
            level = water_level(energies / n, value * d / known)
        return energies, axes, math.sqrt(12 * level)

    live = lengths[lengths > 0]
    cap = max(longest, 1.0) if not len(live) else min(longest, _UNLIKE * float(live.median()))
    energies, axes, first_step = principal(cap)
    # Half of what the integers reach: the step that is found may be smaller than this one.
    held = max(cap, FARTHEST / _MARGIN / 2 * first_step)
    if cap < longest or held < longest:
        cap = FARTHEST / _MARGIN / 2 * first_step
        energies, axes, first_step = principal(cap)
    if cap < longest:
        # Axes are those of rows that count alike; what an error of an axis costs, all rows say as they are.
        energies = torch.zeros(len(axes), dtype=torch.float64)
        for here, block in slices(measured, gram_block(measured)):
            z = block.to(torch.float64) @ axes.to(torch.float64).T
            energies += w[here] @ z.square()
    none = torch.zeros(0, dtype=torch.float32)
    directions, reader = _times(axes, metric.inverse), metric.factor
    read = _read(axes, reader)
    if read.dtype != rows.dtype:
        read = room_like(read, rows.dtype).copy_(read)
    turned: Rows = MetricRows(rows, read.T)
    if n <= _SAMPLE:
        turned = TensorRows(whole_matrix(turned))
    bare = Source(
        rows, turned, reader, metric, w, norms, axes, directions, energies, first_step, none, (), none, none, none, cap
    )
    return bare.classed(torch.zeros(n, dtype=torch.int64))


def _read(directions: Tensor, reader: Tensor) -> Tensor:
    """(m, x) float64: what rows are multiplied by to give their products with ``directions`` (m, d) in the metric."""
    return _times(directions, reader if reader.ndim == 1 else reader.T)


def _times(directions: Tensor, factor: Tensor) -> Tensor:
    """``directions`` times a matrix or a diagonal. They may be most of the memory: no copy is made by ones."""
    if factor.ndim == 2:
        made = zero_matrix(len(directions), factor.shape[1], directions.dtype, directions.device)
        return torch.mm(directions, factor, out=made)
    if bool((factor == 1).all()):
        return directions
    return torch.mul(directions, factor, out=room_like(directions))


def _least_squares_(basis: Tensor, read: Tensor) -> Tensor:
    """(B B')^+ C for B (r, d) and C = B R' (r, x): coordinates of a row a R against B are a times its transpose.

    C, which may be B, is overwritten: of a wide matrix it is as large as the matrix.
    """
    gram = basis @ basis.T
    factor, failed = torch.linalg.cholesky_ex(gram)
    roots = factor.diagonal()
    # Coded axes are nearly orthonormal; integers may turn two of them into one.
    if bool(failed) or not len(roots) or float(roots.min()) < _DEPENDENT * float(roots.max()):
        inverse: Tensor = torch.linalg.pinv(gram, hermitian=True)
        return inverse @ read
    for columns in stripes(read.T):
        read[:, columns] = torch.cholesky_solve(read[:, columns], factor)
    return read


def sum_of(rows: Rows, index: Tensor) -> Tensor:
    """(d,) float64 sum of the rows at ``index``."""
    parts = (rows.take(part).to(torch.float64).sum(0) for part in index.split(gram_block(rows)))
    return torch.stack(list(parts)).sum(0)


def water_level(variances: Tensor, bits: float) -> float:
    """The t at which reverse water-filling takes ``bits`` a number: mean 1/2 log2 max(1, variance / t) = ``bits``.

    Cover and Thomas, Elements of Information Theory, 10.3.3.
    """
    variances = variances.to(torch.float64).flatten()
    high = math.log(float(variances.max()))
    low = high - 200.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fewer = float((variances / math.exp(middle)).clamp_min(1.0).log2().mean()) / 2 < bits
        low, high = (low, middle) if fewer else (middle, high)
    return math.exp((low + high) / 2)
