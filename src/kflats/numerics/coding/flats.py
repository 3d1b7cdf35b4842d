"""Transform codes of several flats at one step, as one code: each flat's rows in principal axes of its own.

At one step every flat loses the same for its last bit, so that the flats together are optimal. Their symbols follow
common distributions: cells of like mean magnitude share one, in whichever flat they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.coding.clusters import cluster_rows
from kflats.numerics.coding.encode import classed
from kflats.numerics.coding.frame import source_of
from kflats.numerics.coding.sizing import at_size
from kflats.numerics.coding.transform import TransformCode, label_bits
from kflats.numerics.rows import MetricRows, PartOfRows, Rows, as_rows, check_finite, check_weights

_PER_OCTAVE = 3
"""Distributions by mean magnitude, as many an octave as in a single code."""


@dataclass(frozen=True)
class FlatsCode:
    """``codes``: of each flat; ``flats`` (n,) int64, the flat of each row; rows keep their order inside a flat."""

    codes: tuple[TransformCode, ...]
    flats: Tensor

    @property
    def stored_bytes(self) -> int:
        """Bytes of all codes, and of the labels that tell the flats apart."""
        return sum(code.stored_bytes for code in self.codes) + _label_bytes(self.flats)

    def members(self, flat: int) -> Tensor:
        """(n_f,) int64, the rows of a flat, ascending."""
        return (self.flats == flat).nonzero().squeeze(1)

    def dense(self) -> Tensor:
        """The whole matrix, decoded, (n, d) float32."""
        found = torch.empty(len(self.flats), self.codes[0].shape[1])
        for flat, code in enumerate(self.codes):
            found[self.members(flat)] = code.dense()
        return found


@dataclass(frozen=True)
class Contexts:
    """Distributions that several codes share: ``of`` maps each code's contexts to common ones, ``shrink`` is theirs."""

    of: tuple[Tensor, ...]
    shrink: Tensor


def flats_code(
    matrix: Tensor | Rows,
    labels: Tensor,
    *,
    nbytes: int,
    weights: Tensor | None = None,
    right: Tensor | None = None,
    classes: int = 32,
) -> FlatsCode:
    """Code ``matrix`` (n, d) in at most ``nbytes`` bytes, each flat's rows in axes of its own.

        minimise   sum_i w_i || (a_i - a^_i) R ||^2      subject to   stored bytes <= nbytes

    Args:
        labels: (n,) a first guess of the rows' flats; EM moves rows to where they cost least, and gives up flats of
            too few rows.
        weights, right: as ``transform_code``; only ratios count.
        classes: of all flats together, at most; one a flat at least.

    Choose it for tables of many hundred times as many rows as columns whose rows lie near several flats: each flat has
    a basis to store. Elsewhere ``transform_code`` is smaller. Nothing is random.

    Raises:
        KflatsError: as ``transform_code``.

    >>> gen = torch.Generator().manual_seed(0)
    >>> parts = [torch.randn(2000, 2, generator=gen) @ torch.randn(2, 8, generator=gen) for _ in range(2)]
    >>> code = flats_code(torch.cat(parts), torch.arange(4000) // 2000, nbytes=4000)
    >>> code.stored_bytes <= 4000, [one.rank for one in code.codes]
    (True, [2, 2])
    """
    rows = as_rows(matrix)
    n = rows.shape[0]
    if labels.shape != (n,) or labels.is_floating_point():
        raise KflatsError(f"labels of shape {tuple(labels.shape)} do not fit {n} rows", hint="one whole number a row")
    if isinstance(nbytes, bool) or nbytes < 1:
        raise KflatsError(f"a budget of {nbytes!r} bytes is not possible", hint="a whole number above zero")
    check_finite(rows)
    check_weights(weights, n)
    w = torch.ones(n, dtype=torch.float64) if weights is None else weights.detach().to("cpu", torch.float64)
    w = w * (n / w.sum())
    whole = source_of(rows, w, right, ("bits", 8 * nbytes / (n * rows.shape[1])))
    measured = MetricRows(rows, whole.metric.factor)
    flats = cluster_rows(measured, labels.to("cpu", torch.int64), w, whole.first_step**2 / 12)
    count = int(flats.max()) + 1
    step = whole.first_step * math.sqrt(whole.metric.scale) or 1.0
    sources = []
    for flat in range(count):
        mine = (flats == flat).nonzero().squeeze(1)
        source = source_of(PartOfRows(rows, mine), w[mine], right, ("step", step))
        sources.append(classed(source, 1 + max(0, classes - count) * len(mine) // n))
    return FlatsCode(at_size(sources, nbytes, beside=_label_bytes(flats)), flats)


def common_contexts(codes: tuple[TransformCode, ...]) -> Contexts:
    """One set of distributions for all codes: those of like mean magnitude become one."""
    octaves, weights, shrinks, empty = [], [], [], -(10**6)
    for code in codes:
        total, live, cells = (torch.zeros(len(code.shrink), dtype=torch.float64) for _ in range(3))
        for c, levels in enumerate(code.levels):
            of = code.contexts[c].to(torch.int64)
            size = levels.abs()
            total.index_add_(0, of, size.sum(0, dtype=torch.float64))
            live.index_add_(0, of, (size > 0).sum(0, dtype=torch.float64))
            cells.index_add_(0, of, torch.full((len(of),), float(len(levels)), dtype=torch.float64))
        mean = total / cells.clamp_min(1.0)
        octave = (mean.clamp_min(1e-30).log2() * _PER_OCTAVE).floor().to(torch.int64)
        octaves.append(torch.where(live > 0, octave, torch.full_like(octave, empty)))
        weights.append(live)
        shrinks.append(code.shrink.to(torch.float64))
    used, common = torch.unique(torch.cat(octaves), return_inverse=True)
    live = torch.cat(weights)
    sums = torch.zeros(2, len(used), dtype=torch.float64)
    sums.index_add_(1, common, torch.stack([torch.cat(shrinks) * live, live]))
    shrink = (sums[0] / sums[1].clamp_min(1.0)).to(torch.float32)
    return Contexts(common.split([len(one) for one in octaves]), shrink)


def _label_bytes(flats: Tensor) -> int:
    return math.ceil(label_bits(torch.bincount(flats)) / 8)
