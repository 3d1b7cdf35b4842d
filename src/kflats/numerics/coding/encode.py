"""Transform coding of a matrix under row weights, to a budget.

    minimise   sum_i w_i || (a_i - a^_i) R ||^2      subject to   stored bytes <= budget

Principal axes of the weighted rows; in each class of rows a step proportional to w^(-1/2); entropy-constrained
quantizers with one trade between squared steps and bits everywhere, which is what reverse water-filling asks for: at
one slope in every coordinate, those below the water level fall into the dead zone by themselves (Gersho and Gray,
Vector Quantization and Signal Compression, ch. 8; Goyal, Theoretical foundations of transform coding, IEEE Signal
Processing Magazine 18, 2001). One number, the step, then sets the size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.errors import KflatsError
from kflats.numerics.coding.basis import CodedBasis
from kflats.numerics.coding.frame import Frame, Source, source_of
from kflats.numerics.coding.quantizers import TRADE, Quantizer, design
from kflats.numerics.coding.transform import TransformCode, label_bits, side_bytes
from kflats.numerics.rows import Rows, as_rows, check_finite, check_weights

_PASSES = 3
"""Quantise, redesign, quantise, ...: after the third pass the size changes by less than .1 %."""
_TRIES = 12
"""Corrections of the step, at most: on the sample, and again on all rows."""
_ROWS_A_CLASS = 96
"""Fewer rows than that do not pay for a class of their own, nor for looking."""
_WINDOW = 0.99
"""A budget counts as met from this share of it on."""
_AIM = 0.996
_BASIS_ROW = 8 * 5
"""Bits a basis row costs beside its levels: its scale and which distribution it follows."""


def transform_code(
    matrix: Tensor | Rows,
    *,
    weights: Tensor | None = None,
    right: Tensor | None = None,
    nbytes: int | None = None,
    bits: float | None = None,
    step: float | None = None,
    classes: int = 32,
) -> TransformCode:
    """Code ``matrix`` (n, d) in ``nbytes`` stored bytes, in ``bits`` per weight, or at a given ``step``: one of them.

    Args:
        matrix: a tensor of any float type, or any ``Rows``.
        weights: (n,) row weights; None: all alike. A row of weight 0 gets next to no bits.
        right: a Gram R R' of the columns, (d, d), or its diagonal (d,).
        nbytes: ``TransformCode.stored_bytes`` is at most this, and at least 99 % of it unless the matrix is coded as
            finely as float32 or 16383 steps to either side allow in less.
        step: the step of a row of weight 1, in the matrix' unit. Codes of several matrices at one step lose the
            same for the last bit, so that together they are optimal. Weights and metric are then taken as they are;
            elsewhere only their ratios count.
        classes: at most so many classes of rows, 1 to 256.

    Choose it for whatever is to be small on disk: from half a bit to about eight per weight. Nothing is random.

    Raises:
        KflatsError: NaN or infinite values, weights or metrics that are none, no or several targets, a budget below
            what labels and distributions alone need, or one for which floats are the better choice.

    >>> matrix = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
    >>> code = transform_code(matrix, bits=3)
    >>> code.shape, code.stored_bytes <= 500 * 8 * 3 / 8
    ((500, 8), True)
    """
    rows = as_rows(matrix)
    n, d = rows.shape
    kind, value = _target(nbytes, bits, step)
    if not isinstance(classes, int) or not 1 <= classes <= 256:
        raise KflatsError(f"{classes!r} classes of rows", hint="a whole number from 1 to 256")
    check_finite(rows)
    check_weights(weights, n)
    budget = int(value) if kind == "nbytes" else int(value * n * d / 8)
    target = (kind, value) if kind == "step" else ("bits", 8 * budget / (n * d))
    source = _classed(source_of(rows, weights, right, target), classes)
    return _at_step(source, value) if kind == "step" else _at_budget(source, budget)


def transform_codes(
    matrix: Tensor | Rows,
    steps: Sequence[float],
    *,
    weights: Tensor | None = None,
    right: Tensor | None = None,
    classes: int = 32,
) -> Iterator[TransformCode]:
    """Codes of ``matrix`` at several ``steps``, as ``transform_code(step=...)`` makes them, with the classes of one.

    Rows are told apart once, for the middle step, which takes most of the time. Steps so fine that the longest row
    would have no integers are left out. Choose it to learn what a matrix loses at every size.

    Raises:
        KflatsError: as ``transform_code``.

    >>> matrix = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
    >>> [code.stored_bytes > 500 for code in transform_codes(matrix, [0.1, 1.0, 8.0])]
    [True, True, False]
    """
    rows = as_rows(matrix)
    for step in steps:
        _target(None, None, step)
    check_finite(rows)
    check_weights(weights, rows.shape[0])
    middle = sorted(steps)[len(steps) // 2]
    source = _classed(source_of(rows, weights, right, ("step", middle)), classes)
    for step in steps:
        if step >= source.finest:
            yield _at_step(source, step)


def _target(nbytes: int | None, bits: float | None, step: float | None) -> tuple[str, float]:
    given = [(name, v) for name, v in (("nbytes", nbytes), ("bits", bits), ("step", step)) if v is not None]
    if len(given) != 1:
        raise KflatsError("a transform code needs one target", hint="nbytes=, bits= (per weight) or step=")
    name, value = given[0]
    if isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise KflatsError(f"a target of {name}={value!r}", hint="a finite number above zero")
    return name, float(value)


@dataclass(frozen=True)
class _Estimate:
    """``size`` bytes of all rows at ``step``, how many symbols are not 0, their ``price`` (bits and the error at its
    trade for bits), and the basis that pays, by a sample."""

    step: float
    size: float
    live: float
    price: float
    basis: CodedBasis


def _estimate(source: Source, scale: Tensor, step: float) -> _Estimate:
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
    gain = ((whole - error - TRADE * cost) * each).sum(0)
    pays = gain > TRADE * (basis.bits + _BASIS_ROW)
    kept = pays.nonzero().squeeze(1)
    basis = basis.kept(kept)
    sizes = torch.bincount(source.labels, minlength=len(scale)) * scale
    total = float((cost[:, kept] * each).sum() + basis.bits.sum()) + label_bits(sizes)
    centers, contexts = frame.centers[:, kept], quantizer.contexts[:, kept]
    live = float((tally.knots[:, kept, 1:].sum(2) * each).sum())
    size = total / 8 + side_bytes(centers, contexts, quantizer.tables, basis.tables)
    left = float((torch.where(pays, error, whole) * each).sum())
    return _Estimate(step, size, live, 8 * size + left / TRADE, basis)


def _classed(source: Source, classes: int) -> Source:
    """The source with those classes that cost least, error and bytes together, at the step where the search begins."""
    classes = min(classes, max(1, len(source.labels) // _ROWS_A_CLASS))
    if source.first_step == 0 or classes == 1:
        return source
    ways = source.candidates(classes)
    step = max(source.first_step, *(way.finest for way in ways))
    return ways[min(range(len(ways)), key=lambda i: _estimate(*ways[i].sample(), step).price)]


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


def _at_step(source: Source, step: float) -> TransformCode:
    sample, scale = source.sample()
    frame = source.frame(_estimate(sample, scale, step).basis, step)
    return _code(frame, _designed(frame))


def _at_budget(source: Source, budget: int) -> TransformCode:
    found = _search(source, budget)
    step, finest = found.step, source.finest
    # One quantizer for all tries: the size is then a falling function of the step.
    quantizer = _designed(source.frame(found.basis, step))
    best: TransformCode | None = None
    low, high = 0.0, math.inf  # the coarsest step known to be too fine, the finest known to fit
    for _ in range(_TRIES):
        code = _code(source.frame(found.basis, step), quantizer)
        size = code.stored_bytes
        if size <= budget:
            if best is None or size > best.stored_bytes:
                best = code
            high = min(high, step)
            if size >= _WINDOW * budget or step <= finest * 1.01 or not code.rank:
                break
        else:
            low = max(low, step)
        # Bits fall by about one a live coordinate for each doubling of the step.
        live = sum(float((q != 0).sum()) for q in code.levels) + 1.0
        step = max(finest, step * 2 ** max(-1.0, min(1.0, 8 * (size - _AIM * budget) / live)))
        if not low < step < high:
            step = math.sqrt(low * high) if low > 0 and high < math.inf else min(step, high / 1.1)
    if best is None:
        raise KflatsError(f"no step was found whose code has {budget} bytes", hint="another budget")
    return best


def _search(source: Source, budget: int) -> _Estimate:
    """The step whose size, by a sample, is the budget within half a percent: false position on the logarithms."""
    sample, scale = source.sample()
    # So coarse that not one coordinate is coded: what is left is what every code needs.
    coarse = _estimate(sample, scale, 64 * source.reach if source.reach > 0 else 1.0)
    if coarse.size > budget:
        raise KflatsError(
            f"{budget} bytes are fewer than the {math.ceil(coarse.size)} that labels and scales alone need",
            hint="a larger budget, fewer classes, or leave this matrix to a cheaper codec",
        )
    if source.reach == 0:
        return coarse
    least = low = math.log2(source.finest)
    high, found = math.log2(coarse.step), coarse
    at = max(low, math.log2(max(source.first_step, 1e-300)))
    for _ in range(_TRIES):
        found = _estimate(sample, scale, 2.0**at)
        if abs(found.size - budget) <= 0.005 * budget or (found.size <= budget and at <= least):
            break
        low, high = (low, at) if found.size <= budget else (at, high)
        # A live coordinate loses about one bit for each doubling of its step.
        move = 8 * (found.size - budget) / max(found.live, 1.0)
        at += max(-2.0, min(2.0, move))
        if not low < at < high:
            at = (low + high) / 2 if low > least or found.size > budget else least
        if high - low < 1e-3:
            break
    return found
