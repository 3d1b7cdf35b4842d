"""Transform coding of a matrix under row weights, to a number of bytes.

    minimise   sum_i w_i || (a_i - a^_i) R ||^2      subject to   stored bytes <= nbytes

Principal axes of the weighted rows; in each class of rows a step proportional to w^(-1/2); entropy-constrained
quantizers with one trade between squared steps and bits everywhere, which is what reverse water-filling asks for: at
one slope in every coordinate, those below the water level fall into the dead zone by themselves (Gersho and Gray,
Vector Quantization and Signal Compression, ch. 8; Goyal, Theoretical foundations of transform coding, IEEE Signal
Processing Magazine 18, 2001). One number, the step, then sets the size.

Several flats have principal axes of their own. At one step every flat loses the same for its last bit, so that the
flats together are optimal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.common.errors import DoesNotFitError
from kflats.numerics.coding.clusters import cluster_rows
from kflats.numerics.coding.frame import CodedBasis, Frame, Source, source_of
from kflats.numerics.coding.quantizers import TRADE, Quantizer, design
from kflats.numerics.coding.tables import FARTHEST, Tables, table_for
from kflats.numerics.rows import MetricRows, PartOfRows, Rows

_ROWS_A_CLASS = 96
"""A class of fewer rows does not pay for itself, and is not tried."""
_PASSES = 3
"""Quantise, redesign, quantise, ...: after the third pass the size changes by less than .1 %."""
_GUESSES = 2
"""Passes where only the size and the error are asked for; one of them tells which classes cost least."""
_TRIES = 12
"""Corrections of the step, at most: on the sample, and again on all rows."""
_ROUNDS = 8
"""The most rounds of such tries while none of them fits."""
_FINER = 8
"""How much finer than the step where the search begins the found step may be: classes must allow it."""
_WINDOW = 0.99
"""A budget counts as met from this share of it on."""
_AIM = 0.996
_SMALL, _SMALL_WINDOW = 50_000, 0.996
"""Up to so many bytes a budget counts as met from a larger share of it on."""
_FAR = 0.98
"""Below this share of the budget a first code was made for too coarse a step."""
_UNLIKE, _GUESSED_AGAIN = 2.0, 3
"""Classes and axes are chosen for a guessed step, and again, so often at most, where the step that is found is so many
times larger or smaller. The guess takes all rows as alike: where most have little weight it is far too large."""
_BASIS_ROW = 8 * 5
"""Bits a basis row costs beside its levels: its scale and which distribution it follows."""


@dataclass(frozen=True)
class TransformCode:
    """A matrix as integers: coordinates in a shared basis, rows in classes.

        row i of class c  ~  t_c ( m_c + q_i - sign(q_i) s_c ) B          q_i (r,) integers, the only numbers per row

    with t_c the step of the class (proportional to 1 / sqrt(weight)), m_c its whole-numbered centre, s_c how far the
    mean of an interval lies from its middle, and B an integer basis times one scale a row.

    Args:
        labels: (n,) uint8, the class c of each row.
        levels: for each class, (n_c, r) int16: the symbols q of its rows, in the order of their row numbers.
        steps: (C,) float32, t_c.
        centers: (C, r) int16, m_c.
        contexts: (C, r) uint8, which of K distributions the symbols of a class's column follow.
        shrink: (K,) float32 in [0, 1/2), s for the symbols of each distribution.
        basis: (r, d) int8 and ``basis_scale`` (r,) float32: B = basis * basis_scale[:, None].
    """

    labels: Tensor
    levels: tuple[Tensor, ...]
    steps: Tensor
    centers: Tensor
    contexts: Tensor
    shrink: Tensor
    basis: Tensor
    basis_scale: Tensor

    @property
    def rank(self) -> int:
        """r, the number of coordinates."""
        return self.basis.shape[0]


@dataclass(frozen=True)
class FlatsCode:
    """``codes``: of each flat; ``flats`` (n,) int64, the flat of each row; rows keep their order inside a flat."""

    codes: tuple[TransformCode, ...]
    flats: Tensor


def transform_code(
    rows: Rows,
    nbytes: int,
    size_of: Callable[[FlatsCode], int],
    *,
    weights: Tensor | None = None,
    right: Tensor | None = None,
    classes: int = 32,
    labels: Tensor | None = None,
) -> FlatsCode:
    """Code ``rows`` (n, d), all finite, in at most ``nbytes``.

    Args:
        nbytes: at least 99 % of them are used unless the matrix is coded as finely as 16383 steps to either side allow
            in less.
        size_of: the bytes that a code takes, in a file for instance.
        weights: (n,) row weights, not negative; None: all alike. A row of weight 0 gets next to no bits. Only ratios
            count, of weights and of the metric.
        right: a Gram R R' of the columns, (d, d), or its diagonal (d,).
        classes: the largest number of classes of rows of all flats together, 1 to 256; each flat has one at least.
        labels: (n,) a first guess of the rows' flats; EM moves rows to the flat in which they cost least, and gives up
            flats of too few rows. None: one flat.

    A row is coded in at most 16383 steps to either side of its class' centre. Rows that are too long for the step of
    the others are apart, in classes of coarser steps: each loses about 1e-4 of its length, which may be most of the
    error, and the others are coded as finely as without them. With ``classes=1`` the longest row sets the
    least step of all.

    Choose it for whatever is to be small on disk: from half a bit to about eight per weight. Several flats pay for
    tables of many hundred times as many rows as columns whose rows lie near several flats, because each flat has a
    basis to store. Nothing is random.

    Raises:
        KflatsError: a metric that is not a Gram matrix, a budget below what labels and distributions alone need, or one
            for which floats are the better choice.

    >>> from kflats.numerics.rows import TensorRows
    >>> gen = torch.Generator().manual_seed(0)
    >>> parts = [torch.randn(2000, 2, generator=gen) @ torch.randn(2, 8, generator=gen) for _ in range(2)]
    >>> from kflats.codecs.streams import stored_bytes
    >>> from kflats.codecs.transform import from_codes
    >>> size_of, labels = lambda code: stored_bytes(from_codes(code)), torch.arange(4000) // 2000
    >>> code = transform_code(TensorRows(torch.cat(parts)), 4000, size_of, labels=labels)
    >>> size_of(code) <= 4000, [one.rank for one in code.codes]
    (True, [2, 2])
    """
    n, d = rows.shape
    whole = source_of(rows, weights, right, ("bits", 8 * nbytes / (n * d)))
    flats, w = torch.zeros(n, dtype=torch.int64), whole.row_weights
    if labels is not None:
        measured = MetricRows(rows, whole.metric.factor)
        flats = cluster_rows(measured, labels.to("cpu", torch.int64), w, whole.first_step**2 / 12)
    count = int(flats.max()) + 1

    def parted(step: float) -> list[Source]:
        """The rows of each flat in classes, by axes and ranges for this ``step``, in the matrix' unit."""
        if count == 1:
            return [_classed(source_of(rows, w, right, ("step", step)), classes)]
        sources = []
        for flat in range(count):
            mine = (flats == flat).nonzero().squeeze(1)
            source = source_of(PartOfRows(rows, mine), w[mine], right, ("step", step))
            sources.append(_classed(source, 1 + max(0, classes - count) * len(mine) // n))
        return sources

    first = whole.first_step * math.sqrt(whole.metric.scale)
    sources = [_classed(whole, classes)] if count == 1 else parted(first or 1.0)
    beside = _flat_bytes(flats)
    found = _search(sources, nbytes, beside)
    for _ in range(_GUESSED_AGAIN):
        scale = math.sqrt(sources[0].metric.scale)
        if first == 0 or 1 / _UNLIKE < found.step * scale / first < _UNLIKE:
            break
        first = found.step * scale
        try:
            others = parted(first)
            other = _search(others, nbytes, beside)
        except DoesNotFitError:
            break
        if other.error * others[0].metric.scale >= found.error * sources[0].metric.scale:
            break
        sources, found = others, other
    return _at_size(sources, found, flats, nbytes, size_of)


def transform_rates(
    rows: Rows, steps: Sequence[float], *, weights: Tensor | None, right: Tensor | None, classes: int
) -> Iterator[Estimate]:
    """Bytes and errors of codes of ``rows`` at several ``steps``, from a sample of at most 4096 rows of all classes.

    A step is that of a row of weight 1, in the matrix' unit. Matrices of up to 4096 rows are counted whole; sizes and
    errors of longer ones are right within some per cent. Rows are parted into classes once, for the middle step. Steps
    that are too fine for every row are left out. Choose it to compare sizes without coding the whole matrix at each.

    >>> from kflats.numerics.rows import TensorRows
    >>> matrix = TensorRows(torch.randn(500, 8, generator=torch.Generator().manual_seed(0)))
    >>> [rate.size > 500 for rate in transform_rates(matrix, [0.1, 1.0, 8.0], weights=None, right=None, classes=32)]
    [True, True, False]
    """
    middle = sorted(steps)[len(steps) // 2]
    source = _classed(source_of(rows, weights, right, ("step", middle)), classes)
    sample, scale = source.sample()
    for step in steps:
        if step >= source.finest:
            yield _estimate(sample, scale, step)


@dataclass(frozen=True)
class Estimate:
    """By a sample: ``size`` bytes of all rows at a step, how many symbols are not 0, the weighted squared ``error``,
    the ``price`` (bits and the error at its trade for bits), and the basis that pays."""

    size: float
    live: float
    error: float
    price: float
    basis: CodedBasis


def _classed(source: Source, classes: int) -> Source:
    """The source with those classes that cost least, error and bytes together, at the step where the search begins."""
    if source.first_step == 0 or classes == 1:
        return source
    ways = source.candidates(min(classes, max(1, len(source.labels) // _ROWS_A_CLASS)), classes)
    if len(ways) == 1:
        return ways[0]
    # A way whose long rows lie beside short ones of large weight has a coarse least step, and stops there.
    reach = max(source.first_step / _FINER, min(way.finest for way in ways))
    able = [way for way in ways if way.finest <= reach]
    step = max(source.first_step, reach)

    def price(way: Source) -> float:
        return _estimate(*way.sample(), step, 1).price

    return min(able, key=price)


def label_bits(sizes: Tensor) -> float:
    """Ideal bits of all labels of classes of these sizes (C,)."""
    sizes = sizes[sizes > 0].to(torch.float64)
    return -float((sizes * (sizes / sizes.sum()).log2()).sum())


def _flat_bytes(flats: Tensor) -> int:
    """Ideal bytes of the flats (n,) of all rows."""
    return math.ceil(label_bits(torch.bincount(flats)) / 8)


def context_moves(contexts: Tensor) -> Tensor:
    """(C, r) int16: contexts as they are stored, each less the one before it in its row; ``cumsum(1)`` undoes it.

    >>> context_moves(torch.tensor([[5, 5, 4, 0]], dtype=torch.uint8)).tolist()
    [[5, 0, -1, -4]]
    """
    whole = contexts.to(torch.int16)
    return torch.cat([whole[:, :1], whole.diff(dim=1)], dim=1)


def side_bytes(centers: Tensor, contexts: Tensor, tables: Tables, basis_tables: Tables) -> int:
    """Bytes beside labels and symbols: centres (C, r) and context moves coded by a table each, the rest as it is."""
    coded, stored = 0.0, tables.stored_bytes + basis_tables.stored_bytes
    for symbols in (centers.to(torch.int16), context_moves(contexts)):
        table = table_for(symbols)
        coded += float(table.bits[0][symbols.flatten().to(torch.int64).abs()].sum())
        stored += table.stored_bytes
    c, r = contexts.shape
    return stored + math.ceil(coded / 8) + 8 * c + 4 * len(tables) + 5 * r


def _estimate(source: Source, scale: Tensor, step: float, passes: int = _GUESSES) -> Estimate:
    """Bits and error of a code at ``step``, from a sample of rows that each stand for ``scale`` (C,) rows."""
    basis = source.code_axes(step)
    frame = source.frame(basis, step)
    blocks = list(frame.blocks())
    quantizer: Quantizer | None = None
    for _ in range(passes):
        tally, _ = frame.survey(quantizer, blocks)
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
    left = float((torch.where(pays, error, whole) * counts * each).sum()) + frame.outside / step**2
    return Estimate(size, live, left * step**2, 8 * size + left / TRADE, basis)


def _designed(frame: Frame) -> Quantizer:
    quantizer: Quantizer | None = None
    for _ in range(_PASSES - 1):
        tally, _ = frame.survey(quantizer)
        tally.most = (tally.most + (tally.most + 7) // 8).clamp_max(FARTHEST)  # room for finer steps
        quantizer = design(tally)
    assert quantizer is not None
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
        shrink=final.shrink,
        basis=basis.levels,
        basis_scale=basis.scale,
    )


def _at_size(
    sources: Sequence[Source], found: _Found, flats: Tensor, budget: int, size_of: Callable[[FlatsCode], int]
) -> FlatsCode:
    """The code of all sources at one step, of ``budget`` bytes at most; by samples that is the step ``found``."""
    beside = _flat_bytes(flats)
    finest = _finest(sources)
    # A small code is quick to make again, and is most of a small file, which its bytes must fill.
    window, aim = (_WINDOW, _AIM) if budget > _SMALL else (_SMALL_WINDOW, (1 + _SMALL_WINDOW) / 2)

    def begun(found: _Found) -> tuple[list[tuple[Source, CodedBasis, Quantizer]], float]:
        """Quantizers for all tries that follow, so that the size falls with the step; and the first step."""
        pairs, step = zip(sources, found.bases, strict=True), found.step
        return [(source, basis, _designed(source.frame(basis, step))) for source, basis in pairs], step

    best: FlatsCode | None = None
    fine: tuple[float, int] | None = None  # the coarsest step known to be too fine, and its size
    fits: tuple[float, int] | None = None  # the finest known to fit
    quantizers, step = begun(found)
    first, rounds, sizes = step, 1, list[int]()
    for attempt in range(_ROUNDS * _TRIES):
        codes = tuple(_code(source.frame(basis, step), quantizer) for source, basis, quantizer in quantizers)
        code = FlatsCode(codes, flats)
        sizes.append(size := size_of(code))
        if size > budget:
            fine = step, size
        else:
            if fits is None or size > fits[1]:
                best, fits = code, (step, size)
            dead = fine is None and not any(one.rank for one in codes)
            if size >= window * budget or step <= finest * 1.01 or dead:
                break
            if attempt == 0 and size < _FAR * budget:
                # A file may take less than what was counted; so much finer a step asks for other quantizers.
                beside += size - int(aim * budget)
                quantizers, first = begun(_search(sources, budget, beside))
                step = first
                continue
        if attempt >= rounds * _TRIES - 1 and best is not None:
            break
        # Bits fall by about one a live coordinate for each doubling of the step; between two sizes, on a line.
        live = sum(float((q != 0).sum()) for one in codes for q in one.levels) + 1.0
        rise = 8 / live
        if fine is not None and fits is not None and fine[0] < fits[0]:
            rise = math.log2(fits[0] / fine[0]) / (fine[1] - fits[1])
        step = max(finest, step * 2 ** max(-1.0, min(1.0, rise * (size - aim * budget))))
        if best is None and rounds < _ROUNDS and (step > 2 * first or attempt >= rounds * _TRIES - 1):
            # Axes and distributions are most of a small code, and a coarser step does not change them: other ones.
            more = beside + size - int(aim * budget)
            try:
                quantizers, first = begun(_search(sources, budget, more))
            except DoesNotFitError:
                rounds = _ROUNDS
            else:
                beside, step, fine, rounds = more, first, None, rounds + 1
    if best is None:
        raise DoesNotFitError(
            f"a budget of {budget:,} bytes cannot hold codes of this matrix",
            cause=f"the least that was found takes {min(sizes):,} bytes",
            hint="a larger budget, or fewer classes",
        )
    return best


@dataclass(frozen=True)
class _Found:
    """By samples: the ``step`` of a size, the ``bases`` that pay there, and the weighted squared ``error``."""

    bases: list[CodedBasis]
    step: float
    error: float


def _search(sources: Sequence[Source], budget: int, beside: int) -> _Found:
    """The step whose size, by samples and ``beside`` together, is the aim within half a percent (false position on the
    logarithms)."""
    samples = [source.sample() for source in sources]

    def estimates(step: float) -> tuple[list[Estimate], float]:
        rates = [_estimate(sample, scale, step) for sample, scale in samples]
        return rates, beside + sum(one.size for one in rates)

    reach = max(source.reach for source in sources)
    # So coarse that not one coordinate is coded: what is left is what every code needs.
    coarse = 64 * reach if reach > 0 else 1.0
    finest = low = math.log2(_finest(sources) or coarse)
    high = math.log2(coarse)
    at = max(low, math.log2(max(*(source.first_step for source in sources), 1e-300)))
    before: tuple[float, float] | None = None
    for _ in range(_TRIES):
        (rates, size), here = estimates(2.0**at), at
        if abs(size - _AIM * budget) <= 0.005 * budget or (size <= budget and at <= finest):
            break
        low, high = (low, at) if size <= _AIM * budget else (at, high)
        # A live coordinate loses about one bit for each doubling of its step; then the last two sizes say how many do.
        slope = -max(sum(one.live for one in rates), 1.0) / 8
        if before is not None and (size - before[1]) * (at - before[0]) < 0:
            slope = (size - before[1]) / (at - before[0])
        before = at, size
        at += max(-2.0, min(2.0, (_AIM * budget - size) / slope))
        if not low < at < high:
            at = (low + high) / 2 if low > finest or size > budget else finest
        if high - low < 1e-3:
            break
    if size > budget and (least := estimates(coarse)[1]) > budget:
        raise DoesNotFitError(
            f"a budget of {budget:,} bytes cannot hold the {math.ceil(least):,} that labels and scales alone need",
            hint="a larger budget, fewer classes, or leave this matrix to a cheaper codec",
        )
    return _Found([one.basis for one in rates], 2.0**here, sum(one.error for one in rates))


def _finest(sources: Sequence[Source]) -> float:
    """The step from which on a smaller one changes nothing; 0 for zeros alone."""
    return min((source.finest for source in sources if source.finest > 0), default=0.0)
