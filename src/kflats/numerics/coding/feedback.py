"""Rounding with error feedback under a metric on both sides: entries are rounded one after another, and each takes back
what the errors before it did to the output.

    minimise   trace(E' G E H) = || L E R' ||^2,      E = A - A^,   G = L' L,   H = R' R,   L and R upper triangular

Entry (o, i) of L E R' is L_oo R_ii (E_oi + f_oi), where f_oi reads errors of the rows p >= o and columns j >= i only.
From the last row and column on, the target a_oi + f_oi is therefore known when it is rounded, and

    || L E R' ||^2  =  sum_oi (L_oo R_ii)^2 (target_oi - a^_oi)^2

With a step c / (L_oo R_ii) all entries lose alike, which is what reverse water-filling asks for. Rows and columns that
count least are rounded first: the factors then fall as steeply as a triangle's can, and few bits go where they pay.
Integers that follow paths of a trellis keep the order of the matrix, which the paths need.

These are the nearest planes of Babai (Combinatorica 6, 1986). Without G, with nearest rounding and given steps, they
are GPTQ (Frantar et al., arXiv:2210.17323); with both factors YAQA (Tseng et al., arXiv:2505.22988).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.common.torch_settings import one_thread
from kflats.numerics.coding.quantizers import CONTEXTS_AN_OCTAVE, TRADE, Quantizer
from kflats.numerics.coding.tables import FARTHEST, KNOTS, nearest_knot, tables_of
from kflats.numerics.coding.trellis import PATH_BLOCK, PathRounding, symbols_of
from kflats.numerics.large_matrices import (
    all_finite,
    factorize_,
    permuted,
    room_like,
    rows_at,
    stripes,
    turn_,
    zero_matrix,
)

Floats: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Indices: TypeAlias = npt.NDArray[np.int64]
Numbers = TypeVar("Numbers", Floats, Indices, npt.NDArray[np.float32])

_ALL = slice(None)
_JITTER = 1e-7
"""Share of a Gram's mean diagonal that the second try of a factor adds, whose pivots were too small; each further try
adds ten times as much."""
_LEAST_PIVOT = 3e-4
"""The least diagonal of a factor, as a share of the largest: what lies below is next to dead, and would set the range
of the steps."""
_JITTERS = 8
_DESIGNED = 2**20  # numbers that a quantizer looks at together
_LEAST_OCTAVE = -3
"""Cells whose targets have a smaller mean magnitude, in steps, share one distribution."""
_TINY = 1e-30
_FARTHEST_OCTAVE = 16
"""Classes whose targets are smaller than the mean by more octaves count as if they were not."""
_LISTED = 64
"""Magnitudes from here on are rounded to the nearest: neighbours cost nearly the same."""
_ROUNDED = 2**24
"""Numbers that are rounded together where rows are not coupled."""
_NOTHING = torch.empty(0)
_NONE = torch.empty(0, dtype=torch.int64)
_BLOCK = 384
"""Rows and columns that are rounded by vector operations before their errors go on by products of matrices."""


@dataclass(frozen=True)
class MetricSide:
    """The triangular factor of one side of a metric.

    Args:
        order: (k,) int64, rows (or columns) in the order of rounding, those that count least first.
        scale: (k,) float64, the diagonal of the factor, in the order of the matrix.
        couplings: (k, k) rows of the factor over their diagonal, in the order of rounding and without the diagonal:
            strictly lower triangular. None: nothing is coupled.
        alone: (m,) int64, what is coupled with nothing, where others are coupled.
    """

    order: Tensor
    scale: Tensor
    couplings: Tensor | None
    alone: Tensor = _NONE


def side_of(gram: Tensor | None, size: int, damping: float = 0.0, *, ordered: bool = True) -> MetricSide:
    """The factor of a Gram (k, k), of a diagonal (k,), or of the identity. A Gram of zeros counts as the identity.

    Args:
        damping: share of a Gram's mean diagonal that is added to its diagonal; nothing is added where nothing is
            coupled, as at an input that was always 0: no error can cancel there.
        ordered: False: rounded in the order of the matrix, which paths follow.

    Raises:
        KflatsError: a Gram that is not finite, or has a negative direction.

    >>> side = side_of(torch.tensor([[1.25, 1.0], [1.0, 4.0]]), 2)
    >>> side.order.tolist(), side.scale.tolist(), side.couplings.tolist()
    ([0, 1], [1.0, 2.0], [[0.0, 0.0], [0.25, 0.0]])
    """
    natural = torch.arange(size)
    if gram is None:
        return MetricSide(natural, torch.ones(size, dtype=torch.float64), None)
    gram = gram.detach().to("cpu", torch.float64)
    if not all_finite(gram):
        raise KflatsError("a metric holds NaN or infinity", cause="statistics of a model whose loss is not finite")
    diagonal = gram if gram.ndim == 1 else gram.diagonal()
    if float(diagonal.min()) < 0:
        raise KflatsError("a metric has a negative diagonal", cause="it is no Gram matrix")
    if not bool(gram.any()):
        return side_of(None, size)
    coupled = _coupled(gram) if gram.ndim == 2 else _NOTHING
    if not bool(coupled.any()):
        return MetricSide(natural, diagonal.sqrt(), None)
    order = torch.argsort(diagonal, stable=True) if ordered else natural
    most_first = order.flip(0)
    mean = float(diagonal.mean())
    added = diagonal[most_first] + damping * mean * coupled[most_first]
    for power in range(_JITTERS):
        # One matrix in memory: the Gram in the order of the factor, which becomes the factor, and then the couplings.
        factor = permuted(gram.T, most_first, most_first, torch.float64)
        added += (0.0 if power == 0 else _JITTER * 10 ** (power - 1)) * mean
        factor.diagonal().copy_(added)
        pivots = factor.diagonal().clone() if factorize_(factor) else torch.zeros(size)
        if float(pivots.min()) > _LEAST_PIVOT * float(pivots.max()):
            scale = torch.empty(size, dtype=torch.float64)
            scale[most_first] = pivots
            turn_(factor.div_(pivots.unsqueeze(1)))
            return MetricSide(order, scale, factor.tril_(-1), (~coupled).nonzero().squeeze(1))
        del factor  # before the next one is made
    raise KflatsError("a metric is no Gram matrix", cause="one of its directions has a negative weight")


def counting(gram: Tensor | None, size: int) -> Tensor:
    """(k,) int64, ascending: which rows of a Gram (size, size), or entries of a diagonal (size,), are not all zeros.
    The others count nothing. All, if there is no Gram, or one of zeros, which counts as the identity.

    >>> counting(torch.tensor([[2.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 2.0]]), 3).tolist()
    [0, 2]
    """
    if gram is None or not bool(gram.any()):
        return torch.arange(size)
    rows = gram.unsqueeze(1) if gram.ndim == 1 else gram
    return torch.cat([rows[part].any(1) for part in stripes(rows)]).nonzero().squeeze(1)


def _coupled(gram: Tensor) -> Tensor:
    """(k,) bool, which rows have a number beside the diagonal that is not 0."""
    counts = torch.cat([gram[part].count_nonzero(1) for part in stripes(gram)])
    return counts > (gram.diagonal() != 0)


@dataclass(frozen=True)
class Rounding:
    """How targets, in steps, become symbols; the value of a symbol q is q - sign(q) shrink.

    Args:
        contexts: (n, d) int16, which of K distributions an entry follows.
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
        zero = torch.zeros(1, 1, dtype=torch.float32)
        return cls(torch.zeros(1, dtype=torch.int16).expand(shape), zero[0], zero + part, zero)

    @classmethod
    def nearest(cls, quantizer: Quantizer, labels: Tensor) -> Rounding:
        """To the nearest integer, with the values of ``quantizer``, which is as for ``priced``."""
        contexts, zero = rows_at(labels, quantizer.contexts.to(torch.int16)), torch.zeros(len(quantizer.shrink), 1)
        return cls(contexts, quantizer.shrink, 0.5 + quantizer.shrink.unsqueeze(1), zero)

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
        contexts = rows_at(labels, quantizer.contexts.to(torch.int16))
        return cls(contexts, quantizer.shrink, up, live[:, :-1])

    def turned(self) -> Rounding:
        """For the transposed matrix."""
        return replace(self, contexts=self.contexts.T)

    def levels(self, targets: Tensor) -> Tensor:
        """(n, d) int16, the symbols of targets that are given."""
        lists, levels = _Lists.of(self, targets.dtype), room_like(targets, torch.int16)
        for here in stripes(targets):
            given = targets[here]
            magnitudes = lists.magnitudes(given.numpy(), *lists.of_contexts(self.contexts[here]))
            levels[here] = torch.from_numpy(magnitudes) * given.sign()
        return levels

    def values(self, levels: Tensor, rows: slice = _ALL) -> Tensor:
        """float64, the values in steps of the symbols of some ``rows``."""
        levels = levels[rows].to(torch.float64)
        return levels - levels.sign() * self.shrink.to(torch.float64)[self.contexts[rows].long()]


@dataclass(frozen=True)
class Rounded:
    """``levels`` (n, d) int16; ``targets`` (n, d), what they were rounded from, in steps."""

    levels: Tensor
    targets: Tensor


@dataclass(frozen=True)
class ToRound:
    """A ``matrix`` (n, d) that is to be rounded: ``rows`` and ``columns``, how its two sides are coupled; ``row_steps``
    (n,) and ``column_steps`` (d,), the step of an entry is the product of both; ``how`` entries are rounded."""

    matrix: Tensor
    rows: MetricSide
    columns: MetricSide
    row_steps: Tensor
    column_steps: Tensor
    how: Rounding | PathRounding


def rounded_together(given: Sequence[ToRound]) -> list[Rounded]:
    """Each matrix rounded with feedback to symbols up to 16383; the bits are those of one matrix alone.

    Computed in the type of the matrix: n d (n + d) multiplications, nearly all of them in products of blocks. If only
    columns are coupled, it takes d vector operations. Else, or along paths, it takes about 2 (n + d), because blocks on
    one anti-diagonal do not depend on each other, nor do entries on one anti-diagonal of a block. Paths follow these
    entries, so that both sides must be in the order of the matrix. Nothing is random. Matrices of one shape take their
    vector operations together: those of one alone are so short that most of their time goes into calls.

    Raises:
        KflatsError: numbers that are not finite; paths with sides in another order.

    >>> matrix, metric = torch.full((1, 2), 0.4), side_of(torch.tensor([[1.0, 0.9], [0.9, 1.0]]), 2)
    >>> steps = torch.ones(1), torch.ones(2)
    >>> (made,) = rounded_together([ToRound(matrix, side_of(None, 1), metric, *steps, Rounding.plain((1, 2)))])
    >>> made.levels.tolist()
    [[0, 1]]
    """
    begun = [_begun(one) for one in given]
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, one in enumerate(begun):
        if isinstance(one, _Blocks):
            alike.setdefault(one.kind, []).append(place)
    made: dict[int, Rounded] = {place: one for place, one in enumerate(begun) if isinstance(one, Rounded)}
    for places in alike.values():
        several = [one for place in places if isinstance(one := begun[place], _Blocks)]
        for place, one, found in zip(places, several, _by_blocks(several), strict=True):
            made[place] = one.finished(*found)
    return [made[place] for place in range(len(given))]


@dataclass(frozen=True)
class _Blocks:
    """A matrix to be rounded in blocks of size x size.

    ``shape`` of the matrix; ``wanted``, ``across`` and ``down``, the matrix and the couplings of its columns and rows,
    in blocks (``_tiles``), in steps and in the order of rounding; ``order``: of its rows and columns.
    """

    shape: torch.Size
    wanted: Tensor
    across: Tensor | None
    down: Tensor | None
    symbols: _Symbols
    how: Rounding | PathRounding
    order: tuple[Tensor, Tensor]

    @property
    def kind(self) -> tuple[object, ...]:
        """Those of one kind are rounded together."""
        sides = self.across is None, self.down is None
        return self.shape, self.wanted.shape, self.wanted.dtype, sides, self.symbols.kind

    def finished(self, values: Tensor, seen: Tensor) -> Rounded:
        """Of values and targets in blocks: integers and targets in the order of the matrix."""
        n, d = self.shape
        levels, targets = zero_matrix(n, d, torch.int16), zero_matrix(n, d, seen.dtype)
        shrinks, size = self.how.shrink.to(values.dtype), values.shape[-1]
        for r, c in itertools.product(*(range(count) for count in values.shape[:2])):
            rows, columns = (order[i * size : (i + 1) * size] for order, i in zip(self.order, (r, c), strict=True))
            at = rows.unsqueeze(1), columns
            made, own = (of[r, c, : len(rows), : len(columns)] for of in (values, seen))
            shrink = shrinks[self.how.contexts[at].long()]
            levels[at], targets[at] = symbols_of(made, shrink), own
        return Rounded(levels, targets)


def _begun(one: ToRound) -> Rounded | _Blocks:
    """What goes into blocks, or else what is rounded already."""
    matrix, rows, columns, how = one.matrix, one.rows, one.columns, one.how
    if not all_finite(matrix):
        raise KflatsError(
            "a matrix to be coded holds NaN or infinity", cause="damaged weights, or a training that failed"
        )
    natural = all(torch.equal(side.order, torch.arange(len(side.order))) for side in (rows, columns))
    if isinstance(how, PathRounding) and not natural:
        raise KflatsError(
            "paths are not supported with rows or columns in another order",
            cause="they follow the order of the matrix",
        )
    if rows.couplings is None and columns.couplings is None:
        wanted = _matrix_in_steps(one)
        return Rounded(how.levels(wanted), wanted)
    if isinstance(how, Rounding) and columns.couplings is None:
        turned = how.turned()
        made = _by_columns(ToRound(matrix.T, columns, rows, one.column_steps, one.row_steps, turned), turned)
        return Rounded(made.levels.T, made.targets.T)
    if isinstance(how, Rounding) and rows.couplings is None:
        return _by_columns(one, how)
    size = min(PATH_BLOCK if isinstance(how, PathRounding) else _BLOCK, max(matrix.shape))
    order, contexts, wanted = (rows.order, columns.order), how.contexts, _matrix_in_steps(one)
    if not natural:
        contexts, wanted = (permuted(of, *order, of.dtype) for of in (contexts, wanted))
    blocks, contexts = _tiles(wanted, size), _tiles(contexts, size)
    del wanted
    across, down = (
        None if side.couplings is None else _tiles(_in_steps(side.couplings, steps[side.order], matrix.dtype), size)
        for side, steps in ((columns, one.column_steps), (rows, one.row_steps))
    )
    if isinstance(how, PathRounding):
        return _Blocks(matrix.shape, blocks, across, down, _Paths(how, contexts), how, order)
    return _Blocks(matrix.shape, blocks, across, down, _Entries(_Lists.of(how, matrix.dtype), contexts), how, order)


def _matrix_in_steps(one: ToRound) -> Tensor:
    wanted = room_like(one.matrix)
    for here in stripes(wanted):
        wanted[here] = _rows_in_steps(one, here)
    return wanted


def _rows_in_steps(one: ToRound, rows: slice) -> Tensor:
    return one.matrix[rows] / torch.outer(one.row_steps[rows], one.column_steps).to(one.matrix.dtype)


def _in_steps(couplings: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    """The couplings of a side between errors in these steps, which are in the order of rounding."""
    ordered = steps.to(torch.float64)
    made = zero_matrix(len(ordered), len(ordered), dtype)
    for part in stripes(made):
        made[part] = couplings[part] * ordered / ordered[part].unsqueeze(1)
    return made


@dataclass(frozen=True)
class _Lists:
    """``up`` and ``live`` of a ``Rounding``, one distribution after the other; ``last`` index of each one's list;
    ``shrink`` of each. In NumPy, whose calls for a few numbers take less time."""

    up: Floats
    live: Floats
    shrink: Floats
    last: int

    @classmethod
    def of(cls, how: Rounding, dtype: torch.dtype) -> _Lists:
        up, live, shrink = (of.to(dtype).reshape(-1) for of in (how.up, how.live, how.shrink))
        return cls(up.numpy(), live.numpy(), shrink.numpy(), how.up.shape[1] - 1)

    def of_contexts(self, contexts: Tensor) -> tuple[Floats, Indices]:
        """``shrink`` and ``places`` of entries that follow these distributions."""
        wide = contexts.numpy().astype(np.int64)
        return self.shrink[wide], wide * (self.last + 1)

    def magnitudes(self, targets: Floats, shrink: Floats, places: Indices) -> Floats:
        """Of the symbols of ``targets``; ``places``: where the lists of an entry's distribution begin."""
        size = np.abs(targets)
        shifted = size + shrink
        q = np.minimum(np.floor(shifted), FARTHEST - 1)
        shifted -= q
        q += shifted > self.up.take(np.minimum(q, self.last).astype(np.int64) + places)
        q *= size > self.live.take(np.minimum(q, self.last).astype(np.int64) + places)
        return q

    def values(self, targets: Floats, shrink: Floats, places: Indices) -> Floats:
        """Of the symbols of ``targets``, in steps."""
        magnitudes = self.magnitudes(targets, shrink, places)
        magnitudes -= shrink
        return np.copysign(np.maximum(magnitudes, 0, out=magnitudes), targets, out=magnitudes)


def _by_columns(one: ToRound, how: Rounding) -> Rounded:
    """If rows are not coupled. So they are rounded in parts, which fit into memory."""
    couplings, order, lists = one.columns.couplings, one.columns.order, _Lists.of(how, one.matrix.dtype)
    assert couplings is not None
    across = _in_steps(couplings, one.column_steps[order], one.matrix.dtype)
    levels, targets = room_like(one.matrix, torch.int16), room_like(one.matrix)
    for rows in stripes(one.matrix, _ROUNDED):
        wanted, contexts = _rows_in_steps(one, rows)[:, order], how.contexts[rows][:, order]
        seen, errors = wanted.clone(), torch.empty_like(wanted)
        for start in range(0, len(order), _BLOCK):
            block = slice(start, start + _BLOCK)
            mine, inside = seen[:, block], across[block, block]
            shrink, places = lists.of_contexts(contexts[:, block])
            mine += errors[:, :start] @ across[block, :start].T
            for i in range(mine.shape[1]):
                at = start + i
                made = torch.from_numpy(lists.values(mine[:, i].numpy(), shrink[:, i], places[:, i]))
                torch.sub(wanted[:, at], made, out=errors[:, at])
                mine[:, i + 1 :].addr_(errors[:, at], inside[i + 1 :, i])
            levels[rows, order[block]] = symbols_of(wanted[:, block] - errors[:, block], torch.from_numpy(shrink))
        targets[rows, order] = seen
    return Rounded(levels, targets)


_Values: TypeAlias = Callable[[Floats, int], Floats]
"""The values (K, m) for the targets (K, m) of anti-diagonal ``s`` of each of K blocks, rows ascending."""


class _Symbols(Protocol):
    """The values of symbols in blocks of one size."""

    @property
    def kind(self) -> tuple[object, ...]:
        """Those of one kind can be joined."""
        ...

    def joined(self, others: Sequence[Self]) -> Self:
        """Of several matrices, the blocks of this one first."""
        ...

    def of(self, at: tuple[Tensor, Tensor], heights: list[int], widths: list[int]) -> _Values:
        """Of the K blocks ``at`` these places, of which only so many rows and columns are in the matrix."""
        ...


@dataclass(frozen=True)
class _Entries:
    """Each entry is rounded by itself; ``contexts`` in blocks."""

    lists: _Lists
    contexts: Tensor

    @property
    def kind(self) -> tuple[object, ...]:
        return _Entries, self.lists.last

    def joined(self, others: Sequence[_Entries]) -> _Entries:
        every = (self, *others)
        lists = [one.lists for one in every]
        joined = _Lists(
            np.concatenate([one.up for one in lists]),
            np.concatenate([one.live for one in lists]),
            np.concatenate([one.shrink for one in lists]),
            self.lists.last,
        )
        return _Entries(joined, _joined_contexts([(one.contexts, len(one.lists.shrink)) for one in every]))

    def of(self, at: tuple[Tensor, Tensor], heights: list[int], widths: list[int]) -> _Values:
        shrink, places = self.lists.of_contexts(self.contexts[:, at[0], at[1]].flatten(0, 1))
        return lambda targets, s: self.lists.values(targets, _anti_diagonal(shrink, s), _anti_diagonal(places, s))


@dataclass(frozen=True)
class _Paths:
    """The entries of an anti-diagonal are rounded together; ``contexts`` in blocks."""

    how: PathRounding
    contexts: Tensor

    @property
    def kind(self) -> tuple[object, ...]:
        return _Paths, self.how.price.shape[1]

    def joined(self, others: Sequence[_Paths]) -> _Paths:
        every = (self, *others)
        how = replace(
            self.how,
            shrink=torch.cat([one.how.shrink for one in every]),
            price=torch.cat([one.how.price for one in every]),
        )
        return _Paths(how, _joined_contexts([(one.contexts, len(one.how.shrink)) for one in every]))

    def of(self, at: tuple[Tensor, Tensor], heights: list[int], widths: list[int]) -> _Values:
        alike: dict[tuple[int, int], list[int]] = {}
        for block, shape in enumerate(list(zip(heights, widths, strict=True)) * len(self.contexts)):
            alike.setdefault(shape, []).append(block)
        # Views where all blocks have one shape.
        shapes = [(shape, blocks if len(alike) > 1 else _ALL) for shape, blocks in alike.items()]
        wide = self.contexts[:, at[0], at[1]].flatten(0, 1).numpy().astype(np.int64)

        def values(targets: Floats, s: int) -> Floats:
            contexts, made = _anti_diagonal(wide, s), np.zeros_like(targets)
            first = max(0, s - wide.shape[-1] + 1)
            for (height, width), blocks in shapes:
                # What lies beyond the matrix is on no path.
                path = slice(max(0, s - width + 1) - first, max(0, min(height, s + 1) - first))
                if path.start < path.stop:
                    own = targets[blocks, path].astype(np.float32, copy=False)
                    made[blocks, path] = self.how.along(own, contexts[blocks, path])
            return made

        return values


def _joined_contexts(given: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Of several matrices, the distributions of each after those of the ones before; given are their numbers too."""
    begins = itertools.accumulate((number for _, number in given[:-1]), initial=0)
    shifted = [contexts + begin if begin else contexts for (contexts, _), begin in zip(given, begins, strict=True)]
    return _stacked(shifted)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Of one it is a view: a large matrix is not copied."""
    return torch.stack(list(parts)) if len(parts) > 1 else parts[0].unsqueeze(0)


def _by_blocks(given: Sequence[_Blocks]) -> list[tuple[Tensor, Tensor]]:
    """Values and targets of matrices of one kind, in blocks.

    With errors e, and m = e + e across', the targets are wanted + e across' + down m.
    """
    one, count = given[0], len(given)
    (n, d), size = one.shape, one.wanted.shape[-1]
    symbols = one.symbols.joined([other.symbols for other in given[1:]])
    tall, wide = -(-n // size), -(-d // size)
    own = _stacked([each.wanted for each in given])  # (count, tall, wide, size, size)
    across = [each.across for each in given if each.across is not None]
    down = [each.down for each in given if each.down is not None]
    errors, targets = room_like(own), room_like(own)
    mixed = room_like(own) if down else None
    for diagonal in range(tall + wide - 1):
        i = range(max(0, diagonal - wide + 1), min(tall, diagonal + 1))
        rows = torch.tensor(i)
        columns = diagonal - rows
        here = own[:, rows, columns]
        mine, coupled = here.clone(), torch.zeros_like(here)
        for matrix in range(count):
            for block, r in enumerate(i):
                c = diagonal - r
                if across:
                    for before in range(c):
                        mine[matrix, block].addmm_(errors[matrix, r, before], across[matrix][c, before].T)
                if mixed is not None:
                    for above in range(r):
                        coupled[matrix, block].addmm_(down[matrix][r, above], mixed[matrix, above, c])
        heights, widths = [n - r * size for r in i], [d - (diagonal - r) * size for r in i]
        chosen = symbols.of((rows, columns), [min(size, h) for h in heights], [min(size, w) for w in widths])
        here, mine, coupled = (of.flatten(0, 1) for of in (here, mine, coupled))
        with one_thread():
            made = _within(
                here,
                mine,
                coupled,
                torch.cat([of[columns, columns] for of in across]) if across else None,
                torch.cat([of[rows, rows] for of in down]) if down else None,
                chosen,
            )
        errors[:, rows, columns] = (here - made).unflatten(0, (count, len(i)))
        targets[:, rows, columns] = (mine + coupled).unflatten(0, (count, len(i)))
        if mixed is not None:
            mixed[:, rows, columns] = (mine - made).unflatten(0, (count, len(i)))
    return list(zip(own.sub_(errors), targets, strict=True))


def _tiles(of: Tensor, size: int) -> Tensor:
    """(tall, wide, size, size), with zeros beyond the matrix."""
    tall, wide = (-(-count // size) for count in of.shape)
    made = zero_matrix(tall * wide, size * size, of.dtype).view(tall, wide, size, size)
    for r in range(tall):
        for c in range(wide):
            block = of[r * size : (r + 1) * size, c * size : (c + 1) * size]
            made[r, c, : block.shape[0], : block.shape[1]] = block
    return made


def _anti_diagonal(of: Numbers, s: int) -> Numbers:
    """(K, m) a view of the entries of anti-diagonal ``s`` of K blocks (K, B, B), rows ascending."""
    count, size, _ = of.shape
    a, b = max(0, s - size + 1), min(size, s + 1)
    step = max(1, size - 1)
    return of.reshape(count, -1)[:, a * size + s - a :: step][:, : b - a]


def _within(
    own: Tensor, mine: Tensor, coupled: Tensor, across: Tensor | None, down: Tensor | None, values_of: _Values
) -> Tensor:
    """The values (K, B, B) of K blocks whose targets are ``mine`` + ``coupled``. What the errors of a block add to its
    own targets is added to both."""
    count, size, _ = own.shape
    values = torch.empty_like(own)
    # Rows of an anti-diagonal ascend while its columns descend. With columns reversed both are slices, and an
    # anti-diagonal is a diagonal.
    pushed = coupled.transpose(1, 2).flip(1).contiguous()
    across = None if across is None else across.transpose(1, 2).flip(1).contiguous()
    down = None if down is None else down.transpose(1, 2).contiguous()
    # Views of the same memory in NumPy, whose calls for a few numbers take less time.
    owns, seens, chosen = own.numpy(), mine.numpy(), values.numpy()
    added = pushed.view(count, size * size).numpy()
    square = size * size, size, 1
    for s in range(2 * size - 1):
        a, b = max(0, s - size + 1), min(size, s + 1)
        turned = size - 1 - s + a  # the reversed columns, from here on as many as there are rows
        seen = _anti_diagonal(seens, s)
        made = values_of(seen + added[:, turned * size + a :: size + 1][:, : b - a], s)
        _anti_diagonal(chosen, s)[:] = made
        first = s - b + 2  # the columns that read errors of these, and their rows, begin here and at a + 1
        if across is not None and first < size:
            error = torch.from_numpy((_anti_diagonal(owns, s) - made)[..., None])
            shape = count, b - a, size - first
            read = across.as_strided(shape, square, turned * size + first)
            mine.as_strided(shape, square, a * size + first).addcmul_(error, read)
        if down is not None and a + 1 < size:
            passed = torch.from_numpy((seen - made)[..., None])
            shape = count, b - a, size - a - 1
            read = down.as_strided(shape, square, a * size + a + 1)
            pushed.as_strided(shape, square, turned * size + a + 1).addcmul_(passed, read)
    coupled.copy_(pushed.flip(1).transpose(1, 2))
    return values


def designed(made: Rounded, labels: Tensor) -> Quantizer:
    """The quantizer that ``made`` asks for. Cells (a column of a class of rows) whose targets have about one magnitude
    share a distribution: that of the column times that of the class, so that the contexts of all classes differ by
    constants, which take no bytes.

    Args:
        labels: (n,) int64, the class of each row, from 0 on.
    """
    count, (n, d) = int(labels.max()) + 1, made.targets.shape
    parts = list(stripes(made.targets, _DESIGNED))
    by_class, columns = torch.zeros(count, dtype=torch.float64), torch.zeros(d, dtype=torch.float64)
    for here in parts:
        sizes = made.targets[here].abs().to(torch.float64)
        by_class.index_add_(0, labels[here], sizes.mean(1))
        columns += sizes.sum(0)
    mean = columns.sum() / (n * d)
    by_class /= torch.bincount(labels, minlength=count).clamp_min(1) * mean.clamp_min(_TINY)
    # Not clamped where classes add to columns: their contexts would no longer differ by constants.
    classes = (by_class.clamp_min(_TINY).log2().clamp_min(-_FARTHEST_OCTAVE) * CONTEXTS_AN_OCTAVE).round()
    columns = ((columns / n).clamp_min(_TINY).log2() * CONTEXTS_AN_OCTAVE).floor()
    columns = columns.clamp_min(_LEAST_OCTAVE * CONTEXTS_AN_OCTAVE - float(classes.max()))
    bins = (columns + classes.unsqueeze(1)).to(torch.int64)
    contexts = bins - bins.min()
    number = int(contexts.max()) + 1
    counts, most = torch.zeros(number * len(KNOTS), dtype=torch.float64), torch.zeros(number, dtype=torch.int64)
    beyond = torch.zeros(number, dtype=torch.float64)
    for here in parts:
        each, magnitudes = contexts[labels[here]].flatten(), made.levels[here].flatten().abs().to(torch.int64)
        counts += torch.bincount(each * len(KNOTS) + nearest_knot()[magnitudes], minlength=len(counts))
        gaps = (magnitudes - made.targets[here].flatten().abs().to(torch.float64)).masked_fill_(magnitudes == 0, 0.0)
        beyond += torch.bincount(each, gaps, minlength=number)
        most.scatter_reduce_(0, each, magnitudes, "amax")
    counts = counts.view(number, len(KNOTS))
    shrink = (beyond / counts[:, 1:].sum(1).clamp_min(1.0)).clamp(0.0, 0.45)
    return Quantizer(contexts, tables_of(counts, most), shrink.to(torch.float32))
