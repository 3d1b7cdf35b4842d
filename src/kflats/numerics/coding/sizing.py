"""Codes at a step, their size by a sample, and the step whose codes meet a budget: of a matrix, or of its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.coding.basis import CodedBasis
from kflats.numerics.coding.frame import Frame, Source
from kflats.numerics.coding.quantizers import TRADE, Quantizer, design
from kflats.numerics.coding.transform import TransformCode, label_bits, side_bytes

_PASSES = 3
"""Quantise, redesign, quantise, ...: after the third pass the size changes by less than .1 %."""
_TRIES = 12
"""Corrections of the step, at most: on the sample, and again on all rows."""
_WINDOW = 0.99
"""A budget counts as met from this share of it on."""
_AIM = 0.996
_BASIS_ROW = 8 * 5
"""Bits a basis row costs beside its levels: its scale and which distribution it follows."""


@dataclass(frozen=True)
class Estimate:
    """By a sample: ``size`` bytes of all rows at ``step``, how many symbols are not 0, the weighted squared ``error``,
    the ``price`` (bits and the error at its trade for bits), and the basis that pays."""

    step: float
    size: float
    live: float
    error: float
    price: float
    basis: CodedBasis


def estimate(source: Source, scale: Tensor, step: float) -> Estimate:
    """What a code at ``step`` takes and leaves, from a sample of rows; ``scale`` (C,): rows that each stands for."""
    basis = source.code_axes(step)
    frame = source.frame(basis, step)
    quantizer: Quantizer | None = None
    for _ in range(_PASSES):
        tally, _ = frame.survey(quantizer)
        quantizer = design(tally, scale=scale)
    assert quantizer is not None
    cost, each = tally.prices(quantizer), scale.unsqueeze(1)
    error = tally.errors(quantizer)
    # A centre other than 0 is lost with its direction.
    whole = tally.uu + tally.rows.unsqueeze(1) * frame.centers.square()
    counts = frame.counts.unsqueeze(1)
    gain = (((whole - error) * counts - TRADE * cost) * each).sum(0)
    pays = gain > TRADE * (basis.bits + _BASIS_ROW)
    kept = pays.nonzero().squeeze(1)
    basis = basis.kept(kept)
    sizes = torch.bincount(source.labels, minlength=len(scale)) * scale
    total = float((cost[:, kept] * each).sum() + basis.bits.sum()) + label_bits(sizes)
    centers, contexts = frame.centers[:, kept], quantizer.contexts[:, kept]
    live = float((tally.knots[:, kept, 1:].sum(2) * each).sum())
    size = total / 8 + side_bytes(centers, contexts, quantizer.tables, basis.tables)
    left = float((torch.where(pays, error, whole) * counts * each).sum())
    return Estimate(step, size, live, left * step**2, 8 * size + left / TRADE, basis)


def _designed(frame: Frame) -> Quantizer:
    quantizer = design(frame.survey(None)[0])
    for _ in range(_PASSES - 2):
        quantizer = design(frame.survey(quantizer)[0])
    return quantizer


def _code(frame: Frame, quantizer: Quantizer) -> TransformCode:
    tally, levels = frame.survey(quantizer, keep=True)
    final, basis = design(tally, kill=False), frame.basis
    return TransformCode(
        labels=frame.source.labels.to(torch.uint8),
        levels=levels,
        steps=frame.steps,
        centers=frame.centers.to(torch.int16),
        contexts=final.contexts.to(torch.uint8),
        tables=final.tables,
        shrink=final.shrink,
        basis=basis.levels,
        basis_scale=basis.scale,
        basis_contexts=basis.contexts,
        basis_tables=basis.tables,
    )


def at_step(source: Source, step: float) -> TransformCode:
    """The code at ``step``, on the axes that pay there."""
    sample, scale = source.sample()
    frame = source.frame(estimate(sample, scale, step).basis, step)
    return _code(frame, _designed(frame))


def at_size(sources: Sequence[Source], budget: int, *, beside: int = 0) -> tuple[TransformCode, ...]:
    """Codes of all sources at one step, of ``budget`` bytes together at most; ``beside``: bytes of them not the codes'.

    Raises:
        KflatsError: a budget below what every code needs.
    """
    budget -= beside
    bases, step = _search(sources, budget)
    finest = _finest(sources)
    pairs = list(zip(sources, bases, strict=True))
    # One quantizer for all tries: the size is then a falling function of the step.
    quantizers = [_designed(source.frame(basis, step)) for source, basis in pairs]
    best: tuple[TransformCode, ...] | None = None
    low, high, most = 0.0, math.inf, 0  # the coarsest step known to be too fine, the finest known to fit
    for _ in range(_TRIES):
        frames = [source.frame(basis, step) for source, basis in pairs]
        codes = tuple(_code(frame, quantizer) for frame, quantizer in zip(frames, quantizers, strict=True))
        size = sum(code.stored_bytes for code in codes)
        if size <= budget:
            if best is None or size > most:
                best, most = codes, size
            high = min(high, step)
            if size >= _WINDOW * budget or step <= finest * 1.01 or not any(code.rank for code in codes):
                break
        else:
            low = max(low, step)
        # Bits fall by about one a live coordinate for each doubling of the step.
        live = sum(float((q != 0).sum()) for code in codes for q in code.levels) + 1.0
        step = max(finest, step * 2 ** max(-1.0, min(1.0, 8 * (size - _AIM * budget) / live)))
        if not low < step < high:
            step = math.sqrt(low * high) if low > 0 and high < math.inf else min(step, high / 1.1)
    if best is None:
        raise KflatsError(f"no step gives a code of at most {budget} bytes", hint="a larger budget")
    return best


def _search(sources: Sequence[Source], budget: int) -> tuple[list[CodedBasis], float]:
    """The step whose size, by samples, is the budget within half a percent (false position on the logarithms), and
    the bases that pay there."""
    samples = [source.sample() for source in sources]

    def estimates(step: float) -> list[Estimate]:
        return [estimate(sample, scale, step) for sample, scale in samples]

    reach = max(source.reach for source in sources)
    # So coarse that not one coordinate is coded: what is left is what every code needs.
    coarse = 64 * reach if reach > 0 else 1.0
    found = estimates(coarse)
    least = sum(one.size for one in found)
    if least > budget:
        raise KflatsError(
            f"{budget} bytes are fewer than the {math.ceil(least)} that labels and scales alone need",
            hint="a larger budget, fewer classes, or leave this matrix to a cheaper codec",
        )
    if reach == 0:
        return [one.basis for one in found], coarse
    finest = low = math.log2(_finest(sources))
    high = math.log2(coarse)
    at = max(low, math.log2(max(*(source.first_step for source in sources), 1e-300)))
    for _ in range(_TRIES):
        found, here = estimates(2.0**at), at
        size = sum(one.size for one in found)
        if abs(size - budget) <= 0.005 * budget or (size <= budget and at <= finest):
            break
        low, high = (low, at) if size <= budget else (at, high)
        # A live coordinate loses about one bit for each doubling of its step.
        move = 8 * (size - budget) / max(sum(one.live for one in found), 1.0)
        at += max(-2.0, min(2.0, move))
        if not low < at < high:
            at = (low + high) / 2 if low > finest or size > budget else finest
        if high - low < 1e-3:
            break
    return [one.basis for one in found], 2.0**here


def _finest(sources: Sequence[Source]) -> float:
    """The step from which on a smaller one changes nothing; 0 for zeros alone."""
    return min((source.finest for source in sources if source.finest > 0), default=0.0)
