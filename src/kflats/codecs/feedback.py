"""Integers with error feedback: each number takes back what the rounding of others did to the output.

The algorithm is in ``numerics.coding.feedback``. A code stores integers, a step for each class of rows and one for each
column; steps follow from one number c, which sets the size. From 1.4 bits a number on, the integers follow paths of a
trellis (``numerics.coding.trellis``) where that loses less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from kflats.codecs.protocol import Candidate, Codec, Table
from kflats.codecs.row_scales import HEADER_BYTES
from kflats.codecs.streams import coded
from kflats.codecs.transform import between
from kflats.common.errors import DoesNotFitError, KflatsError, is_number
from kflats.importance.protocol import Weighting, WeightingForm
from kflats.matrices.coded import STEPS_AN_OCTAVE, from_integers
from kflats.methods.keep_dense import KeepDense
from kflats.methods.protocol import Factored, Method, Problem
from kflats.numerics.coding.classes import split_classes
from kflats.numerics.coding.feedback import (
    MetricSide,
    Rounded,
    Rounding,
    ToRound,
    counting,
    designed,
    rounded_together,
    side_of,
)
from kflats.numerics.coding.quantizers import Quantizer
from kflats.numerics.coding.rounding import Scales, scales_of
from kflats.numerics.coding.tables import FARTHEST
from kflats.numerics.coding.trellis import SHORTEST, PathRounding
from kflats.numerics.large_matrices import permuted, room_like, rows_at, stripes, zero_matrix
from kflats.numerics.rows import Rows, whole_matrix

_LONG = 16
"""Rows a column, or columns a row, up to which ``Auto()`` tries it where not both sides are coupled."""
_CLASSES = 32
_LEAST_SCALE = 1e-4
"""Rows and columns that count less than this share of the most important one count as much."""
_FINE = (-12.0, -8.0, -4.0, -1.5, -0.5)
"""Binary logarithms of c in root mean squares of the numbers, for candidates. What is fed back is little beside numbers
of so many steps, and they are rounded as they are: sizes are then right to 3 % (measured at -.5: 1.7 to 2.5 bits)."""
_POWERS = (0.75, 2.25)
"""The same, with feedback: about 1 bit and .15 bits a number."""
_FIRST_PART = 0.6
"""The part of a step from which on a target is rounded up where there are no prices yet."""
_NEAR = 0.05
"""A code whose size is the budget within this share of it shows how to round the others."""
_TRIES = 14
_AIM = 0.997
_GUESSES = 4
_GUESS_AIM, _GUESS_NEAR = 0.993, 0.003
"""What guessed codes aim at, and how near they come."""
_GUESSED_WELL = 2.3
"""Bits a number from which on codes with feedback have the guessed size within 1 %."""
_WINDOW = 0.99
"""A budget counts as met from this share of it on."""
_SMALL = 48
"""Unused bytes for which no other code is tried."""
_PATH_BITS = 1.4, 12.0
"""Bits a number between which integers may follow paths. Below, most are 0, and a free bit costs more than it gives."""
_CLEARLY = 0.9
"""Paths whose squared error is at most this share of what was guessed for the grid are kept without trying the grid."""
_PATH_SHARE = 0.8
"""The squared error of paths as a share of that of a grid, at equal bytes, about: ``benchmarks/paths.py``."""
_FEW_BITS = 0.75
"""Bits a number below which numbers are also rounded by the first prices, and to the nearest. The best of the three is
kept, which takes two to three times as long. Where most integers are 0, prices may raise later targets by more than
they save: ``benchmarks/few_bits.py``. From .5 bits on this was seen in small matrices alone."""
_LITTLE = 0.25
"""Mean square, in steps of a grid, of numbers that cost more bits than they save: what is coupled with nothing and has
no more becomes zeros. Prices do that on a grid; on paths even a zero takes a bit."""
_SMALL_MATRIX = 2**14
"""Numbers of a matrix up to which they are rounded to the nearest too at every size: in so few, prices may by chance
lose more than they save. In larger ones they save more where both ways differ at all (``test_prices_pay``), and a
second search takes as long as the first."""
_MOST_OCTAVES = math.log2(FARTHEST / 2)
"""The steps of a column's largest number: targets may be twice as large."""
_TOGETHER, _TOGETHER_BYTES = 4, 3 * 2**25
"""How many matrices are encoded together at most, and the bytes of their numbers and Gram matrices at most. What is
derived from these takes up to eight times as much."""

_AT_ONCE = 2**20
"""Numbers whose squares are summed in float64 at a time."""

_Places: TypeAlias = tuple[Tensor, Tensor]
"""Rows and columns of a matrix, ascending."""
_Result = TypeVar("_Result")
_Search: TypeAlias = Generator[ToRound, Rounded, _Result]
"""A search of a code, which hands out what is to be rounded and is sent what came of it."""


@dataclass(frozen=True)
class Feedback(Codec):
    """Integers with error feedback: rounded one after another, each target corrected by the errors before it.

        minimise   || L (A - A^) R ||^2      subject to   stored bytes <= budget

        a^_oi = (q_oi - sign(q_oi) shrink) r_o s_i,      s_i = 1 / R_ii,   r_o = c / L_oo of a class of rows

    L and R are triangular factors of the importance: of the Grams of inputs and of output gradients, where it measured
    both. One number c sets the rate. Rounding counts error and bits together; below .75 bits a number it is also tried
    to the nearest and by the first prices, and the least error is kept; matrices of up to 16,384 numbers are tried to
    the nearest at all rates. Values are the means of their intervals; the integers are entropy coded. Beside them a
    file holds distributions, for each column which one it follows and a step (to an eighth of an octave), and a step
    for each class of rows. From 1.4 to 12 bits a number, and from 32 rows and columns on, integers follow paths of a
    trellis (``numerics.coding.trellis``) where that leaves less error. From 2.3 bits on, integers rounded one by one
    are tried only if paths do not clearly lose less than was guessed for these.

    Rows and columns that count nothing, as inputs that were always 0, become zeros. Those that are coupled with none,
    and count little, become zeros where that costs less than their bits.

    Without couplings (no data, or a diagonal importance) it is entropy-coded rounding with steps by importance.

    Choose it for linear layers with calibration data: at equal bytes its error under the importance is a fraction of
    that of ``Transform``, which stores axes, under ``KroneckerFisher`` from one bit a number on, under ``InputGram``
    from two (``benchmarks/feedback.py``). Long embedding tables are better off with
    ``Transform``, whose axes are shared by many rows; weights on a grid with ``Integer(8)``, which keeps the grid.

    Args:
        damping: share of each Gram's mean diagonal that is added to its diagonal, beside what the importance adds: the
            plain error of the matrix then counts too. Without it errors in directions of little weight become as large
            as the matrix itself, where an importance, which is of second order, says little. Nothing is added for
            inputs that are coupled with none. Chosen on sentences of CoLA (dev) and paragraphs of WikiText-2 (valid).

    Raises:
        KflatsError: a damping that is no number of 0 or more.
    """

    damping: float = 0.2

    any_size = True

    def __post_init__(self) -> None:
        if not is_number(self.damping, 0):
            raise KflatsError(
                f"damping={self.damping!r} is not supported with Feedback", hint="a share of 0 or more, such as 0.2"
            )

    def refusal(self, method: Method) -> tuple[str, str] | None:
        """As ``Codec.refusal``."""
        if method.produces == "dense":
            return None
        return "feedback rounds the numbers of the matrix itself", "KeepDense()"

    def min_bytes(self, method: Method, shape: tuple[int, int], itemsize: int, *, counts_labels: bool = True) -> int:
        """A bound with zeros alone: the bytes of distributions and contexts are known after the fit."""
        return HEADER_BYTES + shape[1] + max(64, shape[0] // 64)

    def candidates(self, method: Method, table: Table) -> Iterator[Candidate]:
        """Codes at a few c, and candidates between each two of them, with errors under the damped Grams. Those whose
        integers will follow paths are made without them, and their error is corrected. Of few bits they are rounded by
        prices alone, and codes lose up to a tenth less."""
        if table.total <= 0:
            return
        source = _Source.of(table.rows, table.weighting, self.damping)
        measured: list[Candidate] = []
        before: tuple[float, Rounded] | None = None
        for power in (*_FINE, *_POWERS):
            c = source.size * 2.0**power
            if c < source.finest:
                continue
            if power in _FINE or before is None:
                targets = source.likely(c, table.dtype)
            else:
                targets = source.moved_(before[1].targets, before[0], c)
            how = source.rounding(targets, table.dtype)
            if power in _FINE:
                made = Rounded(how.levels(targets), targets)
            else:
                del before, targets
                (made,) = rounded_together([source.to_round(c, table.dtype, how)])
            code, before = source.code(c, table.dtype, how, made), (c, made)
            share = _PATH_SHARE if _takes_paths(source.matrix.shape, code.nbytes) else 1.0
            measured.append(Candidate(method, self, code.nbytes, share * code.error))
        yield from between(measured, table.numbers)

    def encode(self, method: Method, problem: Problem, dtype: torch.dtype) -> Factored:
        """As ``Codec.encode``."""
        (made,) = self.encode_together(method, [problem], dtype)
        return made

    def together(self, shape: tuple[int, int]) -> int:
        """As ``Codec.together``: up to four small matrices. A class that inherits from this one and has another
        ``encode`` takes one."""
        n, d = shape
        if type(self).encode is not Feedback.encode:
            return 1
        return max(1, min(_TOGETHER, _TOGETHER_BYTES // (4 * n * d + 8 * (n * n + d * d))))

    def encode_together(self, method: Method, problems: Sequence[Problem], dtype: torch.dtype) -> list[Factored]:
        """As ``Codec.encode_together``: matrices of one shape that wait for their rounding are rounded together."""
        for problem in problems:
            problem.check(type(self).__name__, method.accepts)
        return [best.stored for best in _found([self._encoded(problem, dtype) for problem in problems])]

    def _encoded(self, problem: Problem, dtype: torch.dtype) -> _Search[_Code]:
        """The code of one matrix."""
        # Factors of Gram matrices may be most of the memory: a source lives no longer than its codes are made.
        source = _Source.of(problem.rows, problem.weighting, self.damping)
        guess, how = _guessed(source, problem.nbytes, dtype)
        kept = source.worth(guess.c)
        if tuple(map(len, kept)) != source.matrix.shape:
            source = _Source.of(problem.rows, problem.weighting, self.damping, kept)
            guess, how = _guessed(source, problem.nbytes, dtype)

        def on_grid(source: _Source) -> _Search[_Code]:
            designs = [partial(source.rounding, times=times) for times in source.ways(problem.nbytes)]
            return (yield from _least(source, problem.nbytes, dtype, guess.c, how, designs))

        if not _takes_paths(source.matrix.shape, problem.nbytes):
            return (yield from on_grid(source))
        grid = (yield from on_grid(source)) if 8 * problem.nbytes < _GUESSED_WELL * source.matrix.numel() else None
        c = max(source.finest, (grid or guess).c / 2)  # at equal rates steps of paths are half as large
        del source
        best = yield from self._along_paths(problem, dtype, c, kept)
        if grid is None and best.error > _CLEARLY * guess.error:
            grid = yield from on_grid(_Source.of(problem.rows, problem.weighting, self.damping, kept))
        return min(best, grid or best, key=lambda code: code.error)

    def _along_paths(self, problem: Problem, dtype: torch.dtype, c: float, kept: _Places) -> _Search[_Code]:
        """The code whose integers follow paths, by tries that begin at ``c``."""
        # In the order of the matrix, paths lose more where most rows or columns hardly count.
        source = _Source.of(problem.rows, problem.weighting, self.damping, kept, paths=True)
        first = source.path_rounding(source.likely(c, dtype), dtype)
        designs = [partial(source.path_rounding, priced=bool(times)) for times in source.ways(problem.nbytes)]
        return (yield from _least(source, problem.nbytes, dtype, c, first, designs))

    @classmethod
    def automatic(cls, shape: tuple[int, int], form: WeightingForm) -> tuple[tuple[Method, Codec], ...]:
        """The matrix itself, where both rows and columns are coupled; and where one side is, or where all numbers count
        the same, unless many rows share the axes of ``Transform``. A square matrix needs more bits for axes."""
        sides = {form.left, form.right}
        few = max(shape) <= _LONG * min(shape) and ("full" in sides or sides == {"identity"})
        return ((KeepDense(), cls()),) if sides == {"full"} or few else ()


@dataclass(frozen=True)
class _Code:
    """``stored``: the code at ``c``, of ``numbers`` numbers. ``error``: weighted, squared. ``live``: how many integers
    are not 0."""

    stored: Factored
    c: float
    numbers: int
    error: float
    live: int

    @property
    def nbytes(self) -> int:
        """Of the code in a file."""
        return self.stored.nbytes

    def moved(self, nbytes: float, before: _Code | None = None) -> float:
        """The c at which a code has about ``nbytes``, at most an octave away; ``before``: a code at another c.

        Each octave takes a bit from every number, and less where few bits are left; two codes say how many.
        """
        slope = -min(self.numbers / 8, 1.5 * max(nbytes, self.nbytes))
        if before is not None and (self.nbytes - before.nbytes) * (self.c - before.c) < 0:
            slope = (self.nbytes - before.nbytes) / math.log2(self.c / before.c)
        return float(self.c * 2.0 ** max(-1.0, min(1.0, (nbytes - self.nbytes) / slope)))


@dataclass(frozen=True)
class _Source:
    """What does not depend on c, of the rows and columns that count.

    ``shape`` of the whole matrix; ``kept``: which of its rows and columns count, ascending. Of these alone, n and d:
    ``matrix`` (n, d) float32; the factors of both sides; ``labels`` (n,), the class of each row; the steps at c = 1 of
    classes, ``row_steps`` (C,), and of columns, ``column_steps`` (d,) float64, as binary logarithms; ``longest`` (d,)
    float64, that of the largest number of a column in row steps; ``size``, the root mean square of the numbers in
    these steps.
    """

    shape: tuple[int, int]
    kept: _Places
    matrix: Tensor
    rows: MetricSide
    columns: MetricSide
    labels: Tensor
    row_steps: Tensor
    column_steps: Tensor
    longest: Tensor
    size: float

    @classmethod
    def of(
        cls, given: Rows, weighting: Weighting, damping: float, kept: _Places | None = None, *, paths: bool = False
    ) -> _Source:
        """``kept``: the rows and columns that are not zeros; by default those that count anything. ``paths``: in the
        order of the matrix, for integers that follow paths."""
        matrix = whole_matrix(given, torch.float32).detach().to("cpu")
        shape = (len(matrix), matrix.shape[1])
        left, right = (None if gram is None else gram.detach().to("cpu") for gram in (weighting.left, weighting.right))
        kept = kept or (counting(left, shape[0]), counting(right, shape[1]))
        if tuple(map(len, kept)) != shape:
            matrix = permuted(matrix, *kept, torch.float32)
            left, right = (_part(gram, here) for gram, here in zip((left, right), kept, strict=True))
        n, d = matrix.shape
        rows = side_of(left, n, damping, ordered=not paths)
        columns = side_of(right, d, damping, ordered=not paths)
        by_row, by_column = (
            side.scale.clamp_min(_LEAST_SCALE * float(side.scale.max())).log2() for side in (rows, columns)
        )
        column_steps = by_column.median() - by_column
        middle = 2.0 ** -float(by_column.median())
        sizes = columns.scale.to(torch.float32)
        norms = torch.cat([(matrix[here] * sizes).norm(dim=1) for here in stripes(matrix)]).to(torch.float64)
        labels = split_classes((2 * by_row).exp2(), norms, _CLASSES, float(d))
        sums = torch.zeros(int(labels.max()) + 1, dtype=torch.float64).index_add_(0, labels, by_row)
        row_steps = middle * (-sums / torch.bincount(labels)).exp2()
        longest, total = torch.zeros(d, dtype=torch.float64), 0.0
        for here in stripes(matrix, _AT_ONCE):
            relative = matrix[here].to(torch.float64).abs_().div_(row_steps[labels[here]].unsqueeze(1))
            longest = torch.maximum(longest, relative.amax(0))
            total += float(relative.div_(column_steps.exp2()).square_().sum())
        size = math.sqrt(total / (n * d))
        return cls(shape, kept, matrix, rows, columns, labels, row_steps, column_steps, longest.log2(), size)

    def ways(self, budget: int) -> tuple[int, ...]:
        """How often prices are taken, as ``rounding`` says, in each of the codes of ``budget`` bytes that are tried."""
        if 8 * budget < _FEW_BITS * self.matrix.numel():
            return 2, 1, 0
        return (2, 0) if self.matrix.numel() <= _SMALL_MATRIX else (2,)

    def worth(self, c: float) -> _Places:
        """What of ``kept`` is worth its bits at ``c``: all that is coupled, and what is large enough."""
        kept = list[Tensor]()
        for side, (own, other) in enumerate(((self.rows, self.columns), (self.columns, self.rows))):
            stays, order = torch.ones(len(own.order), dtype=torch.bool), other.order
            matrix = self.matrix.T if side else self.matrix
            for here in own.alone.split(max(1, _AT_ONCE // len(order))):
                lost = matrix[here][:, order].to(torch.float64)  # errors of zeros are the numbers themselves
                if other.couplings is not None:
                    lost = lost + lost @ other.couplings.T
                squares = lost.mul_(torch.outer(own.scale[here] / c, other.scale[order])).square_().mean(1)
                stays[here[squares <= _LITTLE]] = False
            kept.append(self.kept[side][stays])
        return kept[0], kept[1]

    @property
    def finest(self) -> float:
        """The c from which on a smaller one changes nothing; 0 for zeros alone."""
        limits = self.longest - self.column_steps - _MOST_OCTAVES
        return float(limits[limits.isfinite()].min().exp2()) if self.size > 0 else 0.0

    def exponents(self, c: float) -> Tensor:
        """(d,) int8, the steps of columns in eighths of an octave; a column of too many steps has larger ones."""
        least = self.longest - math.log2(c) - _MOST_OCTAVES
        rounded = (self.column_steps * STEPS_AN_OCTAVE).round().maximum((least * STEPS_AN_OCTAVE).ceil())
        return rounded.clamp(-127, 127).to(torch.int8)

    def steps(self, c: float, dtype: torch.dtype) -> tuple[Scales, Tensor, Tensor]:
        """The steps of classes as they are stored, those of rows (n,) and those of columns (d,), float64."""
        held = scales_of(c * self.row_steps, dtype)
        return held, held.wide[self.labels], (self.exponents(c).to(torch.float64) / STEPS_AN_OCTAVE).exp2()

    def moved_(self, targets: Tensor, before: float, c: float) -> Tensor:
        """What the targets of a code at ``before`` will be like at ``c``; they are written over."""
        moved = (self.exponents(before).to(torch.float32) - self.exponents(c)) / STEPS_AN_OCTAVE
        return targets.mul_(moved.exp2()).mul_(before / c)

    def likely(self, c: float, dtype: torch.dtype) -> Tensor:
        """(n, d) the numbers in steps at ``c``, which targets will be like."""
        _, row_steps, column_steps = self.steps(c, dtype)
        likely = room_like(self.matrix)
        for here in stripes(likely):
            steps = torch.outer(row_steps[here], column_steps).to(torch.float32)
            torch.div(self.matrix[here], steps, out=likely[here])
        return likely

    def rounding(self, targets: Tensor, dtype: torch.dtype, times: int = 2) -> Rounding:
        """The rounding of ``targets`` by error and bits.

        Args:
            times: how often prices are taken from the integers that were chosen before; the first ones are chosen
                without prices. 0: to the nearest integers.
        """
        if not times:
            nearest = Rounding.plain(targets.shape)
            return Rounding.nearest(self._quantizer(nearest, targets, dtype), self.labels)
        how = Rounding.plain(targets.shape, _FIRST_PART)
        for _ in range(times):
            how = Rounding.priced(self._quantizer(how, targets, dtype), self.labels)
        return how

    def path_rounding(self, targets: Tensor, dtype: torch.dtype, *, priced: bool = True) -> PathRounding:
        """The same along paths. The nearest integers have nearly the distribution of those that will be chosen."""
        design = PathRounding.priced if priced else PathRounding.nearest
        return design(self._quantizer(Rounding.plain(targets.shape), targets, dtype), self.labels)

    def _quantizer(self, how: Rounding, targets: Tensor, dtype: torch.dtype) -> Quantizer:
        quantizer = designed(Rounded(how.levels(targets), targets), self.labels)
        return replace(quantizer, shrink=quantizer.shrink.to(dtype).to(torch.float32))

    def to_round(self, c: float, dtype: torch.dtype, how: Rounding | PathRounding) -> ToRound:
        """The matrix with its steps at ``c``."""
        _, row_steps, column_steps = self.steps(c, dtype)
        return ToRound(self.matrix, self.rows, self.columns, row_steps, column_steps, how)

    def code(self, c: float, dtype: torch.dtype, how: Rounding | PathRounding, made: Rounded) -> _Code:
        """The code at ``c`` of the integers that were ``made`` by ``how``."""
        held, row_steps, column_steps = self.steps(c, dtype)
        of_rows, of_columns = self.rows.scale * row_steps, self.columns.scale * column_steps
        error = 0.0
        for here in stripes(made.levels, _AT_ONCE):
            sizes = torch.outer(of_rows[here], of_columns)
            error += float(sizes.mul_(made.targets[here] - how.values(made.levels, here)).square_().sum())
        count, d = len(self.row_steps), self.matrix.shape[1]
        contexts = torch.zeros(count, d, dtype=torch.uint8)
        contexts[self.labels] = how.contexts.to(torch.uint8)
        whole = _Whole(made.levels, self.labels, held.values, contexts, how.shrink.to(dtype), self.exponents(c))
        if made.levels.shape != self.shape:
            whole = whole.with_zeros(self.shape, self.kept)
        by_class = rows_at(torch.argsort(whole.labels, stable=True), whole.levels)
        matrix = from_integers(
            by_class.split(torch.bincount(whole.labels).tolist()),
            whole.labels,
            whole.steps,
            contexts=whole.contexts,
            shrink=whole.shrink,
            column_steps=whole.exponents,
            unit=held.unit,
        )
        return _Code(coded(matrix), c, made.levels.numel(), error, int(made.levels.count_nonzero()))


@dataclass(frozen=True)
class _Whole:
    """What is stored of a matrix: ``levels`` (n, d); ``labels`` (n,), the class of each row; ``steps`` (C,) of classes;
    ``contexts`` (C, d); ``shrink`` (K,) of each context; ``exponents`` (d,)."""

    levels: Tensor
    labels: Tensor
    steps: Tensor
    contexts: Tensor
    shrink: Tensor
    exponents: Tensor

    def with_zeros(self, shape: tuple[int, int], kept: _Places) -> _Whole:
        """The same with rows and columns of zeros beside those that are ``kept``. Zeros have contexts of their own, and
        rows of zeros a class, so that they take no bits. Columns of zeros have the commonest step, and contexts that
        differ between classes as the others do, which takes the fewest bytes."""
        rows, columns = kept
        levels, count, known = zero_matrix(*shape, torch.int16), len(self.steps), len(self.shrink)
        for here in stripes(self.levels):
            levels[rows[here].unsqueeze(1), columns] = self.levels[here]
        labels = torch.full(shape[:1], count).index_copy_(0, rows, self.labels)
        steps = torch.cat([self.steps, self.steps[:1]])[: int(labels.max()) + 1]
        contexts = torch.full((len(steps), shape[1]), known, dtype=torch.uint8)
        contexts[:count] += self.contexts[:, :1] - self.contexts[:, :1].min()
        contexts[:count, columns] = self.contexts
        exponents = self.exponents.mode().values.expand(shape[1]).index_copy(0, columns, self.exponents)
        shrink = torch.cat([self.shrink, self.shrink.new_zeros(int(contexts.max()) + 1 - known)])
        return _Whole(levels, labels, steps, contexts, shrink, exponents)


def _part(gram: Tensor | None, here: Tensor) -> Tensor | None:
    """The rows and columns ``here`` of a Gram, or its diagonal."""
    if gram is None:
        return None
    return gram[here] if gram.ndim == 1 else permuted(gram, here, here, gram.dtype)


def _found(searches: Sequence[_Search[_Result]]) -> list[_Result]:
    """What searches find that go on side by side: all that waits for its rounding is rounded together."""
    found: dict[int, _Result] = {}
    waiting = {place: next(search) for place, search in enumerate(searches)}
    while waiting:
        rounded = dict(zip(waiting, rounded_together(list(waiting.values())), strict=True))
        waiting.clear()
        for place in list(rounded):
            try:
                waiting[place] = searches[place].send(rounded.pop(place))  # which alone holds it from now on
            except StopIteration as end:
                found[place] = end.value
    return [found[place] for place in range(len(searches))]


def _takes_paths(shape: Sequence[int], nbytes: int) -> bool:
    least, most = _PATH_BITS
    return min(shape) >= SHORTEST and least <= 8 * nbytes / (shape[0] * shape[1]) <= most


def _at_size(
    source: _Source,
    budget: int,
    dtype: torch.dtype,
    c: float,
    how: Rounding | PathRounding,
    design: Callable[[Tensor, torch.dtype], Rounding | PathRounding],
) -> _Search[_Code]:
    """The code of at most ``budget`` bytes in a file that uses most of them, by tries that begin at ``c`` and ``how``;
    ``design``: the rounding for such targets."""
    best: _Code | None = None
    before: _Code | None = None
    code: _Code | None = None
    low, high, near = source.finest, math.inf, False  # the coarsest c known to be too fine, the finest known to fit
    made: Rounded | None = None
    for attempt in range(_TRIES):
        if code is not None and made is not None:
            c = code.moved(_AIM * budget, before)
            if not low < c < high:
                c = math.sqrt(low * high) if low > 0 and high < math.inf else max(source.finest, min(c, high / 1.1))
            if not near:
                how = design(source.moved_(made.targets, code.c, c), dtype)
            made = None  # before the next one is made
        made = yield source.to_round(c, dtype, how)
        before, code = code, source.code(c, dtype, how, made)
        fits = code.nbytes <= budget
        if fits and (best is None or code.nbytes > best.nbytes):
            best = code
        # Near the size the rounding stays: the size is then a falling function of c.
        if near:
            low, high = (low, min(high, c)) if fits else (max(low, c), high)
        near = near or (attempt > 0 and abs(code.nbytes - budget) <= _NEAR * budget) or attempt >= _TRIES // 2
        full = code.nbytes >= _WINDOW * budget or budget - code.nbytes <= _SMALL
        if (fits and (full or c <= 1.01 * source.finest)) or not code.live:
            break
    if best is None:
        assert code is not None
        raise DoesNotFitError(
            f"a budget of {budget:,} bytes cannot hold codes of this matrix",
            cause=f"its distributions and steps alone take about {code.nbytes:,} bytes",
            hint="a larger budget",
        )
    return best


def _least(
    source: _Source,
    budget: int,
    dtype: torch.dtype,
    c: float,
    how: Rounding | PathRounding,
    designs: Sequence[Callable[[Tensor, torch.dtype], Rounding | PathRounding]],
) -> _Search[_Code]:
    """The code of least error of those that ``_at_size`` finds by each of ``designs``, the first from ``how`` on."""
    best: _Code | None = None
    refused: DoesNotFitError | None = None
    for number, design in enumerate(designs):
        try:
            code = yield from _at_size(
                source,
                budget,
                dtype,
                c,
                design(source.likely(c, dtype), dtype) if number else how,  # no name here keeps it
                design,
            )
        except DoesNotFitError as error:
            refused = refused or error.with_traceback(None)  # which would keep what was tried
            continue
        best = min(best or code, code, key=lambda each: each.error)
        c = best.c
    if best is None:
        assert refused is not None
        raise refused
    return best


def _guessed(source: _Source, budget: int, dtype: torch.dtype) -> tuple[_Code, Rounding]:
    """A code of about ``budget`` bytes without feedback, and its rounding."""
    c = max(source.finest, 4 * source.size * 2.0 ** (-8 * budget / source.matrix.numel())) or 1.0
    # Codes of guessed targets take no recursion, and are a little smaller than those with feedback.
    for _ in range(_GUESSES):
        targets = source.likely(c, dtype)
        how = source.rounding(targets, dtype)
        code = source.code(c, dtype, how, Rounded(how.levels(targets), targets))
        if abs(code.nbytes - _GUESS_AIM * budget) <= _GUESS_NEAR * budget:
            break
        c = max(source.finest, code.moved(_GUESS_AIM * budget))
    return code, how
