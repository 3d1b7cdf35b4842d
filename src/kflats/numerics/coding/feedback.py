"""Rounding with error feedback under a metric on both sides: entries are rounded one after another, and each takes back
what the errors before it did to the output.

    minimise   trace(E' G E H) = || L E R' ||^2,      E = A - A^,   G = L' L,   H = R' R,   L and R upper triangular

Entry (o, i) of L E R' is L_oo R_ii (E_oi + f_oi), where f_oi reads errors of the rows p >= o and columns j >= i only.
From the last row and column on, the target a_oi + f_oi is therefore known when it is rounded, and

    || L E R' ||^2  =  sum_oi (L_oo R_ii)^2 (target_oi - a^_oi)^2

With a step c / (L_oo R_ii) all entries lose alike, which is what reverse water-filling asks for. Rows and columns that
count least are rounded first: the factors then fall as steeply as a triangle's can, and few bits go where they pay.

These are the nearest planes of Babai (Combinatorica 6, 1986). Without G, with nearest rounding and given steps, they
are GPTQ (Frantar et al., arXiv:2210.17323); with both factors YAQA (Tseng et al., arXiv:2505.22988).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.coding.quantizers import CONTEXTS_AN_OCTAVE, TRADE, Quantizer
from kflats.numerics.coding.tables import FARTHEST, KNOTS, nearest_knot, tables_of

_JITTER = 1e-8
"""Share of a Gram's mean diagonal that is added until its factor has no smaller pivots; ten times more each time."""
_LEAST_PIVOT = 3e-4
"""The least diagonal of a factor, as a share of the largest: what lies below is next to dead, and would set the range
of the steps."""
_JITTERS = 8
_LEAST_OCTAVE = -3
"""Cells whose targets have a smaller mean magnitude, in steps, share one distribution."""
_TINY = 1e-30
_FARTHEST_OCTAVE = 16
"""Classes whose targets are smaller than the mean by more octaves count as if they were not."""
_LISTED = 64
"""Magnitudes from here on are rounded to the nearest: neighbours cost nearly the same."""


@dataclass(frozen=True)
class Side:
    """The triangular factor of one side of a metric.

    Args:
        order: (k,) int64, rows (or columns) in the order of rounding, those that count least first.
        scale: (k,) float64, the diagonal of the factor, in the order of the matrix.
        couplings: (k, k) rows of the factor over their diagonal, in the order of rounding and without the diagonal:
            strictly lower triangular. None: nothing is coupled.
    """

    order: Tensor
    scale: Tensor
    couplings: Tensor | None


def side_of(gram: Tensor | None, size: int) -> Side:
    """The factor of a Gram (k, k), of a diagonal (k,), or of the identity. A Gram of zeros counts as the identity.

    Raises:
        KflatsError: a Gram that is not finite, or has a negative direction.

    >>> side = side_of(torch.tensor([[1.25, 1.0], [1.0, 4.0]]), 2)
    >>> side.order.tolist(), side.scale.tolist(), side.couplings.tolist()
    ([0, 1], [1.0, 2.0], [[0.0, 0.0], [0.25, 0.0]])
    """
    natural = torch.arange(size)
    if gram is None:
        return Side(natural, torch.ones(size, dtype=torch.float64), None)
    gram = gram.detach().to("cpu", torch.float64)
    if not bool(torch.isfinite(gram).all()):
        raise KflatsError("a metric holds NaN or infinity", cause="statistics of a model whose loss is not finite")
    diagonal = gram if gram.ndim == 1 else gram.diagonal()
    if float(diagonal.min()) < 0:
        raise KflatsError("a metric has a negative diagonal", cause="it is no Gram matrix")
    if not bool(gram.any()):
        return side_of(None, size)
    if gram.ndim == 1 or not bool((gram - gram.diagonal().diag()).any()):
        return Side(natural, diagonal.sqrt(), None)
    order = torch.argsort(diagonal, stable=True)
    most_first = order.flip(0)
    sorted_gram = gram[most_first][:, most_first]
    for power in range(_JITTERS):
        sorted_gram.diagonal().add_((0.0 if power == 0 else _JITTER * 10**power) * float(diagonal.mean()))
        factor, failed = torch.linalg.cholesky_ex(sorted_gram)
        pivots = factor.diagonal()
        if not int(failed) and float(pivots.min()) > _LEAST_PIVOT * float(pivots.max()):
            scale = torch.empty(size, dtype=torch.float64)
            scale[most_first] = pivots
            couplings = (factor.T / pivots.unsqueeze(1)).flip(0, 1).tril(-1)
            return Side(order, scale, couplings.contiguous())
    raise KflatsError("a metric is no Gram matrix", cause="one of its directions has a negative weight")


@dataclass(frozen=True)
class Rounding:
    """How targets, in steps, become symbols; the value of a symbol q is q - sign(q) shrink.

    Args:
        contexts: (n, d) int64, which of K distributions an entry follows.
        shrink: (K,) as ``Quantizer``.
        up: (K, J) how far beyond j the magnitude of a target, plus shrink, is when j + 1 becomes better than j.
        live: (K, J) the magnitude of a target from which on j is better than 0.
    """

    contexts: Tensor
    shrink: Tensor
    up: Tensor
    live: Tensor

    @classmethod
    def plain(cls, shape: tuple[int, ...], part: float = 0.5) -> Rounding:
        """Without prices: up from a ``part`` of a step on, which is to the nearest by default."""
        zero = torch.zeros(1, 1)
        return cls(torch.zeros(shape, dtype=torch.int64), zero[0], zero + part, zero)

    @classmethod
    def priced(cls, quantizer: Quantizer, labels: Tensor) -> Rounding:
        """The best of 0 and the two nearest symbols, by squared steps and ``TRADE`` times the bits together.

        Args:
            quantizer: with contexts (C, d) and shrink of 0 or more. labels: (n,) the class of each row.
        """
        bits, shrink = quantizer.tables.bits, quantizer.shrink.to(torch.float64).unsqueeze(1)
        reach = quantizer.tables.reach.to(torch.int64).clamp_max(_LISTED).unsqueeze(1)
        j = torch.arange(_LISTED + 2)
        # What lies beyond a table's reach costs as much as its end: this table is not yet the one that codes it.
        price = bits.gather(1, torch.minimum(j, reach))
        value = (j - shrink).index_fill_(1, j[:1], 0.0)
        rise, gap = price.diff(dim=1), value.diff(dim=1)
        up = (value[:, :-1] + value[:, 1:]) / 2 + TRADE * rise / (2 * gap) - j[:-1] + shrink
        live = value / 2 + TRADE * (price - price[:, :1]) / (2 * value.clamp_min(0.1))
        return cls(quantizer.contexts[labels], quantizer.shrink, up, live[:, :-1])

    def turned(self) -> Rounding:
        """For the transposed matrix."""
        return replace(self, contexts=self.contexts.T)

    def levels(self, targets: Tensor) -> Tensor:
        """(n, d) int16, the symbols of targets that are given."""
        listed, dtype = self.up.shape[1], targets.dtype
        up, live, shrink = (of.to(dtype) for of in (self.up, self.live, self.shrink))
        places = self.contexts.to(dtype) * listed
        found = _magnitudes(targets.abs(), shrink[self.contexts], places, up, live, listed - 1)
        return (found * targets.sign()).to(torch.int16)

    def values(self, levels: Tensor) -> Tensor:
        """(n, d) float64, the values of symbols in steps."""
        levels = levels.to(torch.float64)
        return levels - levels.sign() * self.shrink.to(torch.float64)[self.contexts]


@dataclass(frozen=True)
class Rounded:
    """``levels`` (n, d) int16; ``targets`` (n, d), what they were rounded from, in steps."""

    levels: Tensor
    targets: Tensor


def round_with_feedback(
    matrix: Tensor, rows: Side, columns: Side, row_steps: Tensor, column_steps: Tensor, how: Rounding
) -> Rounded:
    """Round ``matrix`` (n, d) to symbols up to 16383; the step of an entry is that of its row times that of its column.

    Computed in the type of the matrix. Entries of one anti-diagonal do not depend on each other, so that n + d - 1
    vector operations do it; d operations if only columns are coupled. Nothing is random.

    Raises:
        KflatsError: numbers that are not finite.

    >>> matrix, metric = torch.full((1, 2), 0.4), side_of(torch.tensor([[1.0, 0.9], [0.9, 1.0]]), 2)
    >>> steps = torch.ones(1), torch.ones(2)
    >>> round_with_feedback(matrix, side_of(None, 1), metric, *steps, Rounding.plain((1, 2))).levels.tolist()
    [[0, 1]]
    """
    if rows.couplings is not None and columns.couplings is None:
        made = round_with_feedback(matrix.T, columns, rows, column_steps, row_steps, how.turned())
        return Rounded(made.levels.T, made.targets.T)
    if not bool(torch.isfinite(matrix).all()):
        raise KflatsError(
            "a matrix to be coded holds NaN or infinity", cause="damaged weights, or a training that failed"
        )
    (n, d), dtype = matrix.shape, matrix.dtype
    grid = rows.order.unsqueeze(1), columns.order.unsqueeze(0)
    # All that follows is in steps.
    steps = torch.outer(row_steps, column_steps).to(dtype)
    wanted = (matrix / steps)[grid]
    across, down = _in_steps(columns, column_steps, dtype), _in_steps(rows, row_steps, dtype)
    across_reversed = None if across is None else across.flip(0)  # so that an anti-diagonal reads consecutive rows
    shrink, places = how.shrink.to(dtype)[how.contexts[grid]], how.contexts[grid].to(dtype) * how.up.shape[1]
    up, live, last = how.up.to(dtype).reshape(-1), how.live.to(dtype).reshape(-1), how.up.shape[1] - 1
    errors = torch.zeros(n, d, dtype=dtype)
    mixed = torch.zeros(d, n, dtype=dtype)  # errors and what columns couple to them, columns first and reversed
    for a, b, column, count in _parts(n, d, coupled=down is not None):
        # Rows a .. b - 1; in the first of them this column, in each further one the column before, or the same.
        here = slice(d - 1 - column, d - 1 - column + count)
        one = (b - a,), (d - 1 if down is not None else d,), a * d + column
        own = wanted.as_strided(*one)
        mine = own
        if across_reversed is not None and column:
            mine = own + (errors[a:b, :column] * across_reversed[here, :column]).sum(1)
        target = mine
        if down is not None and b > 1:
            target = mine + (down[a:b, : b - 1] * mixed[here, : b - 1]).sum(1)
        less = shrink.as_strided(*one)
        q = _magnitudes(target.abs(), less, places.as_strided(*one), up, live, last)
        value = q.sub_(less).clamp_(0).copysign_(target)
        errors.as_strided(*one).copy_(own - value)
        if down is not None:
            mixed.as_strided((b - a,), (n + 1,), here.start * n + a).copy_(mine - value)
    values, seen = wanted - errors, errors
    seen = seen if across is None else torch.addmm(seen, seen, across.T)
    seen = seen if down is None else torch.addmm(seen, down, seen)
    levels, targets = torch.empty(n, d, dtype=torch.int16), torch.empty_like(wanted)
    levels[grid] = ((values.abs() + shrink).round() * values.sign()).to(torch.int16)
    targets[grid] = values + seen
    return Rounded(levels, targets)


def _in_steps(side: Side, steps: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The couplings of a side between errors in these steps."""
    if side.couplings is None:
        return None
    ordered = steps[side.order].to(torch.float64)
    return (side.couplings * ordered / ordered.unsqueeze(1)).to(dtype)


def _magnitudes(size: Tensor, shrink: Tensor, place: Tensor, up: Tensor, live: Tensor, last: int) -> Tensor:
    """Magnitudes of the symbols of targets of this ``size``; ``place``: where the lists ``up`` and ``live`` of an
    entry's distribution begin."""
    shifted = size + shrink
    q = shifted.floor().clamp_(0, FARTHEST - 1)
    q += shifted.sub_(q) > up.take((q.clamp(max=last) + place).to(torch.int64))
    return q.mul_(size > live.take((q.clamp(max=last) + place).to(torch.int64)))


def _parts(n: int, d: int, *, coupled: bool) -> Iterator[tuple[int, int, int, int]]:
    """(first row, end of rows, column of the first row, number of columns) of the entries that are rounded at once: an
    anti-diagonal where rows are coupled, else a column."""
    if not coupled:
        yield from ((0, n, column, 1) for column in range(d))
        return
    for s in range(n + d - 1):
        a, b = max(0, s - d + 1), min(n, s + 1)
        yield a, b, s - a, b - a


def designed(made: Rounded, labels: Tensor) -> Quantizer:
    """The quantizer that ``made`` asks for. Cells (a column of a class of rows) whose targets have about one magnitude
    share a distribution: that of the column times that of the class, so that the contexts of all classes differ by
    constants, which take no bytes.

    Args:
        labels: (n,) int64, the class of each row, from 0 on.
    """
    count, sizes = int(labels.max()) + 1, made.targets.abs().to(torch.float64)
    by_class = torch.zeros(count, dtype=torch.float64).index_add_(0, labels, sizes.mean(1))
    by_class /= torch.bincount(labels, minlength=count).clamp_min(1) * sizes.mean().clamp_min(_TINY)
    # Not clamped where classes add to columns: their contexts would no longer differ by constants.
    classes = (by_class.clamp_min(_TINY).log2().clamp_min(-_FARTHEST_OCTAVE) * CONTEXTS_AN_OCTAVE).round()
    columns = (sizes.mean(0).clamp_min(_TINY).log2() * CONTEXTS_AN_OCTAVE).floor()
    columns = columns.clamp_min(_LEAST_OCTAVE * CONTEXTS_AN_OCTAVE - float(classes.max()))
    bins = (columns + classes.unsqueeze(1)).to(torch.int64)
    contexts = bins - bins.min()
    number = int(contexts.max()) + 1
    each, magnitudes = contexts[labels], made.levels.abs().to(torch.int64)
    places = (each * len(KNOTS) + nearest_knot()[magnitudes]).flatten()
    counts = torch.bincount(places, minlength=number * len(KNOTS)).view(number, len(KNOTS)).to(torch.float64)
    live = magnitudes > 0
    beyond = torch.zeros(number, dtype=torch.float64).index_add_(0, each[live], magnitudes[live] - sizes[live])
    shrink = (beyond / counts[:, 1:].sum(1).clamp_min(1.0)).clamp(0.0, 0.45)
    most = torch.zeros(number, dtype=torch.int64)
    most.scatter_reduce_(0, each.flatten(), magnitudes.flatten(), "amax")
    return Quantizer(contexts, tables_of(counts, most), shrink.to(torch.float32))
