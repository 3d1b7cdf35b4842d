"""Tables of any number of rows, coded within a size, in a few passes over their rows.

The axes are those of all rows; steps and distributions are those of a sample (``tables.statistics``). The last pass
encodes block by block and writes file after file; it is repeated where the sample misjudged the size. Several workers
write different files.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from kflats.common.errors import DoesNotFitError, KflatsError, KflatsWarning, check_seed, is_whole
from kflats.common.formatting import announce, progress_bar
from kflats.common.paths import expanded
from kflats.common.torch_settings import usual_settings
from kflats.common.workers import Packed, Workers
from kflats.io.atomic import new_folder, replaced
from kflats.io.tables import RowWeights, open_rows, open_weights
from kflats.recipe.budget import Budget, parse_budget
from kflats.tables.compact import CompactCode, Design, finest_step, step_for, usual
from kflats.tables.fast import FastCode
from kflats.tables.flats import MOST_FLATS
from kflats.tables.index import INDEX_BYTES, MOST_COLUMNS, SHARD_ENTRY, Layout, TableIndex, save_head
from kflats.tables.layout import RowCode
from kflats.tables.partial import PartialTable, TablePart
from kflats.tables.shards import ShardRecord, ShardWriter, file_bytes
from kflats.tables.statistics import UNIT, TableStatistics, WeightedTable, statistics_of, with_flats

_BLOCK = 16384  # rows that are encoded at once; files begin at multiples of it
_SHARD_ROWS, _SHARD_BYTES = 2**22, 2**31
_SHARDS = 16
"""Files at least of a long table: workers write different ones, and an interrupted run keeps the finished ones."""
_SEARCHED = 8192  # rows of the sample on which the step is searched
_AIM, _LEAST, _ENOUGH = 0.996, 0.98, 0.95  # of the budget: what is tried, and taken the first time and later
_DEAR = 0.002
"""Share of a size that axes take from which on those of half as many bits may lose less in the same bytes."""
_TRIES = 4
_SHORT = 2**20
"""Rows of a table that is tried twice as often: its sample says less of its size, and a try takes seconds."""
_SEARCHES = 7
_CUT = 0.5
"""Share of the squared error beyond which rows that are cut off are spoken of."""
_HEADS = 16  # times as large as about a head: a smaller table's steps are searched with the head of each
_LITTLE = 0.25  # octaves by which the steps of a code become finer and all else stays


@usual_settings()
def compress_table(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    size: str | Budget,
    layout: Layout = "compact",
    flats: int = 1,
    row_weights: RowWeights | None = None,
    name: str = "",
    seed: int = 0,
    shard_rows: int | None = None,
    force: bool = False,
    quiet: bool = False,
    workers: Workers | None = None,
) -> TableIndex:
    """Code a table in files into a folder that ``open_table`` reads row by row.

    With a_i the rows less their mean, w_i their weights, f(i) the flat of a row, and V_f the principal axes of a flat
    (eigenvectors of the Gram matrix of its rows):

        minimise   sum_i w_i || a_i - a^_i ||^2   subject to   bytes of the folder <= size,  a^_i = q(V_f(i) a_i) V_f(i)

    Coordinates get bits by reverse water-filling (Cover and Thomas, Elements of Information Theory, section 10.3.3).
    Flats are found by EM in passes over all rows, from a start on a sample: each row has the flat in which its code is
    shortest (the k flats of MESSI, Maalouf et al., ICLR 2021, section 2, with lengths of codes for distances).

    Args:
        source: a file, a folder or several files, as of ``kflats.io.open_rows``: safetensors, ``.npy``, Parquet, Arrow,
            of float16, bfloat16, float32 or float64, which is rounded to float32 before errors are summed.
        out: the new folder.
        size: of the folder: "2 bits" a number, or "8GB". It is never exceeded.
        layout: "compact", entropy coded in lanes of a few rows, the smallest; or "fast", every row in the same bytes,
            of which random rows are read 25 to 50 times as fast. In equal bytes compact loses less, most below 3 bits a
            number.
        flats: how many sets of axes, 1 to 16, in the compact layout. They pay where rows are of several kinds and
            there are hundreds of rows a column; those of few rows are given up, and all where one flat loses less in
            these bytes. EM reads the rows up to four times more.
        row_weights: (n,) how much the squared error of each row counts, such as how often it is read: numbers from 0
            in a ``.npy`` file, which is mapped, or in memory. None: all rows count the same. Steps shrink with the root
            of the weight, in levels, to 2^-15 of the largest weight; axes are those of all rows. In the compact layout.
            The errors in the index are weighted.
        name: of the tensor or the column, where a file has several.
        seed: of the sample.
        shard_rows: rows a file, a multiple of 16384. By default a power of two from 2^18 to 2^22 that makes 16 files or
            more of a long table, or fewer rows if they take more than 2 GiB.
        force: replace ``out``, if it is as kflats wrote it.
        quiet: show no progress.
        workers: who divide all passes (docs/scale.md); each of them makes the same call, and sees ``out`` and
            ``source``, or a copy of it. The bytes do not depend on how many they are.

    Memory is that of a block of 16384 rows, a sample of 32768, and five times k x d x d numbers; time is linear in the
    rows. Workers encode different files: fewer files than workers leave some idle.
    The folder is whole or not there. A run that is killed leaves its finished files of rows in ``.NAME.kflats-partial``
    beside ``out``: the same command repeats the passes before, and takes over those whose bytes are as they were.

    Raises:
        KflatsError: a source that cannot be read, or that changes meanwhile; weights that are negative, not finite, all
            zero, or of another number; several flats or weights in the fast layout; NaN, infinite or huge numbers,
            named by file and row; a longest row below 1e-15; a size that cannot be met; workers whose codes differ; as
            ``kflats.io.new_folder``.

    Warns:
        KflatsWarning: a row is 10,000 times as long as the middle one, beside which the others lose more, in the fast
            layout most. Or rows unlike the others, which the fast layout cuts off, hold most of the error.
    """
    if layout not in ("compact", "fast"):
        raise KflatsError(f"layout={layout!r} is not supported", hint='layout="compact" or layout="fast"')
    check_seed(seed)
    if shard_rows is not None and (not is_whole(shard_rows, _BLOCK) or shard_rows % _BLOCK):
        raise KflatsError(f"shard_rows={shard_rows!r} is not supported", hint=f"a multiple of {_BLOCK}")
    if not is_whole(flats, 1, MOST_FLATS):
        raise KflatsError(
            f"flats={flats!r} is not supported with a table", hint=f"a whole number from 1 to {MOST_FLATS}"
        )
    if flats > 1 and layout == "fast":
        raise KflatsError(
            f"flats={flats} is not supported with the fast layout",
            cause="its rows have no room for the label of a flat",
            hint='layout="compact", or one flat',
        )
    if row_weights is not None and layout == "fast":
        raise KflatsError(
            "weights of rows are not supported with the fast layout",
            cause="all its rows take the same bytes",
            hint='layout="compact", or no weights',
        )
    rows = open_rows(source, name=name)
    n, d = rows.shape
    table = WeightedTable(rows, None if row_weights is None else open_weights(row_weights, n))
    budget = _bytes(size, n * d)
    _check_shape(n, d, budget, layout)
    per_shard = _rows_a_shard(n, budget) if shard_rows is None else min(shard_rows, -(-n // _BLOCK) * _BLOCK)
    workers = workers or Workers()
    workers.quiet = quiet or not workers.first
    asked = {"rows": f"{n} x {d}", "bytes": str(budget), "layout": layout, "seed": str(seed), "file": str(per_shard)}
    asked |= {"flats": str(flats), "weights": str(table.weights is not None)}
    workers.agree("the table or its options", asked)
    with (
        new_folder(out, force, [Path(name) for name in rows.names], workers) as folder,
        progress_bar(quiet=quiet or not workers.first) as show,
    ):
        seen = statistics_of(table, seed, lambda done: show("measuring", done, n), workers)

        def run_of(seen: TableStatistics) -> _Run:
            kept = partial(PartialTable, expanded(out).resolve(), seen.checksums, per_shard)
            return _Run(
                table, folder, layout, budget, per_shard, seen, lambda done: show("encoding", done, n), workers, kept
            )

        found = [seen]
        if seen.parting.weight_levels > 1:  # steps of one size may be better in many bytes, which heavy rows cannot use
            found.append(replace(seen, parting=replace(seen.parting, weight_levels=1)))
        if flats > 1:
            noise = step_for(seen.sample.values, 8 * budget / n) ** 2 / 12
            several = with_flats(table, seen, flats, noise, seed, lambda what, done: show(what, done, n), workers)
            if (count := len(several.parting.axes)) > 1:
                found.append(several)
            if count < flats:
                announce(f"{count} of {flats} flats have rows and memory enough", quiet=workers.quiet)
        if layout == "compact":  # axes take much of a short table
            found += [one.coarser() for one in found if one.parting.axes.nbytes > _DEAR * budget]
        runs = [run_of(one) for one in found]
        if len(runs) > 1:
            runs.sort(key=_Run.expected_error)
        index, taken = _first_that_fits(runs)
        if flats > 1 and 1 < count != len(taken.seen.parting.axes):
            announce(f"one flat does better than {count} in these bytes", quiet=workers.quiet)
        if workers.first:
            index.save(folder)
    return index


@dataclass(frozen=True)
class _Run:
    """The pass that encodes, and again where the sample misjudged the size."""

    table: WeightedTable
    folder: Path
    layout: Layout
    budget: int
    shard_rows: int
    seen: TableStatistics
    show: Callable[[int], None]
    workers: Workers
    kept: Callable[[RowCode], PartialTable]

    def whole(self) -> TableIndex:
        """The table of the budget."""
        seen, overhead, room = self.seen, self._overhead, self._room
        if self.layout == "fast":
            fast = FastCode.of(seen.sample.values, seen.parting.axes, seen.mean, self._row_bytes(overhead))
            files, _ = self._agreed(fast)
            index = self._taken(self._written(fast, files), files)
            if self.workers.first:
                self._tell_of_cut_rows(fast.error_within(seen.sample.values), index.squared_error)
            return index
        small, reached = None, 0  # the largest code that fits so far, and its bytes
        aim, totals = _AIM, list[int]()
        tries = _TRIES if self.table.shape[0] > _SHORT else 2 * _TRIES
        while len(totals) < tries and (code := self._compact(room * aim) if totals else self._first) is not None:
            files, total = self._agreed(code)
            if total is None:
                index = self._written(code, files)
                total = overhead + index.nbytes
                enough = _LEAST if not totals else _ENOUGH
                if enough * self.budget <= total <= self.budget:
                    return self._taken(index, files)
                if self.workers.first:
                    files.reject(total)
            if reached < total <= self.budget:
                small, reached = code, total
            totals.append(total)
            aim *= _AIM * self.budget / total
        if small is not None:  # a short table: all other codes are too large, by an axis more or a lane more
            files, _ = self._agreed(small)
            return self._taken(self._written(small, files), files)
        if totals and self.workers.first:
            files.remove_all()
        least = max(self.budget + 1, self.budget - room + seen.parting.axes.nbytes)
        raise self._too_small(min(totals, default=least), tried=len(totals))

    def _tell_of_cut_rows(self, within: float, error: float) -> None:
        share = 1 - within * self.table.shape[0] / error if error > 0 else 0.0
        if share > _CUT:
            warnings.warn(
                KflatsWarning(
                    f"{share:.0%} of the squared error is that of rows unlike the others, which the fast layout cuts "
                    "off: take the compact layout, which keeps them, or leave them out of the table"
                ),
                stacklevel=6,
            )

    def expected_error(self) -> float:
        """The squared error of the sample in the first code that is tried; infinite where there is none."""
        try:
            code = self._first
        except DoesNotFitError:
            return math.inf
        if code is None:
            return math.inf
        bits, error = code.measured(self.seen.sample)
        return error if code.head_bytes + bits * self.table.shape[0] / 8 <= self._room / _ENOUGH else math.inf

    @cached_property
    def _first(self) -> CompactCode | None:
        """The code that is tried first."""
        return self._compact(self._room * _AIM)

    @property
    def _shards(self) -> int:
        return -(-self.table.shape[0] // self.shard_rows)

    @property
    def _overhead(self) -> int:
        return INDEX_BYTES + self._shards * SHARD_ENTRY

    @property
    def _room(self) -> int:
        """For the head and the rows of a compact table."""
        return self.budget - self._overhead - self._shards * file_bytes(0, 64)

    def _about_head(self) -> int:
        return CompactCode.about_head(self.seen.parting.axes)

    def _row_bytes(self, overhead: int) -> int:
        n, d = self.table.shape
        head = FastCode.head_bytes(self.seen.parting.axes)
        counts = [min(self.shard_rows, n - first) for first in range(0, n, self.shard_rows)]

        def total(row_bytes: int) -> int:
            return overhead + head + sum(file_bytes(count * row_bytes) for count in counts)

        row_bytes = min((self.budget - overhead - head) // n, FastCode.most_bytes(d))
        while row_bytes > 0 and total(row_bytes) > self.budget:
            row_bytes -= 1
        if row_bytes < 1:
            raise self._too_small(total(1))
        return row_bytes

    def _too_small(self, least: int, tried: int = 0) -> DoesNotFitError:
        n, d = self.table.shape
        cause = f"at least {least:,} bytes are needed for what does not depend on the rows, and for the least of them"
        if tried:
            cause = f"none of {tried} codes is small enough; one of about {least:,} bytes is the smallest"
        return _does_not_fit(n, d, self.budget, self.layout, cause)

    def _compact(self, nbytes: float) -> CompactCode | None:
        """The code whose head and rows take about ``nbytes``, by the sample; None where no code does."""
        seen, n = self.seen, self.table.shape[0]
        whole = usual(seen.sample)
        few = whole.part(slice(None, None, max(1, len(whole.values) // _SEARCHED)))
        if nbytes <= seen.parting.axes.nbytes:
            return None

        def made(power: float) -> CompactCode:
            return CompactCode.of(whole, seen.parting, seen.mean, 2.0**power, seen.longest)

        def with_head(power: float) -> float:
            code = made(power)
            return code.row_bits(seen.sample) + 8 * code.head_bytes / n

        def without(power: float) -> float:
            return Design.of(few, seen.parting, 2.0**power, seen.longest).row_bits

        if nbytes < _HEADS * self._about_head():
            spent, bits = with_head, 8 * nbytes / n
        else:
            spent, bits = without, 8 * (nbytes - self._about_head()) / n
        step, finest = step_for(few.values, bits), math.log2(finest_step(whole))
        first, columns = max(finest, math.log2(step)), few.values.shape[1]
        power, slope = _falling_to(bits, spent, first, finest, -float(columns))
        code = made(power)
        # Steps that are a little finer or coarser change nothing else.
        left = 8 * (nbytes - code.head_bytes) / n - code.row_bits(seen.sample)
        return code.scaled(2.0 ** max(finest - power, -_LITTLE, min(1.0, left / slope)))

    def _agreed(self, code: RowCode) -> tuple[PartialTable, int | None]:
        """The files in this code, and what their bytes were if these did not suit: the same for all workers, whenever
        each of them comes here."""
        files = self.kept(code)
        packed = Packed[tuple[str, int | None]](json.dumps, lambda _, text: (json.loads(text)[0], json.loads(text)[1]))
        (said,) = self.workers.divided(["reading notes"], lambda _: (files.folder.name, files.rejected()), packed)
        if said[0] != files.folder.name:
            raise KflatsError(
                "the workers made different codes of one table",
                cause="other versions of libraries, another kind of processor, or another number of threads",
                hint="equal workers, or one worker",
            )
        return files, said[1]

    def _taken(self, index: TableIndex, kept: PartialTable) -> TableIndex:
        if self.workers.first:
            kept.move_to(self.folder, len(index.shard_bytes))
        return index

    def _written(self, code: RowCode, kept: PartialTable) -> TableIndex:
        """All files of rows, and the head."""
        n, d = self.table.shape
        firsts = range(0, n, self.shard_rows)
        if self.workers.first:
            kept.remove_others()
        self.workers.meet()  # nobody writes what the first worker would remove
        tasks = ["writing the head", *(f"encoding rows {first} and on" for first in firsts)]

        def work(index: int) -> TablePart:
            if index == 0:
                return TablePart(save_head(self.folder, code.tensors()), 0.0)
            return self._shard(code, index - 1, kept)

        packed = Packed[TablePart](
            lambda made: json.dumps([made.record.bytes, made.record.checksum, made.error]),
            lambda _, text: TablePart(ShardRecord(*json.loads(text)[:2]), json.loads(text)[2]),
        )
        head, *made = self.workers.divided(tasks, work, packed)
        parts = tuple(part.record.bytes for part in made), tuple(part.record.checksum for part in made)
        error = math.fsum(part.error for part in made)
        return TableIndex(self.layout, n, d, self.shard_rows, error, self.seen.squares, head.record, *parts)

    def _shard(self, code: RowCode, number: int, kept: PartialTable) -> TablePart:
        """One file of rows, written or taken over."""
        first, seen, error = number * self.shard_rows, self.seen, 0.0
        last = min(first + self.shard_rows, self.table.shape[0])
        if (there := kept.get(number)) is not None:
            self.show(last)
            return there
        with replaced(kept.path(number)) as aside, ShardWriter(aside) as file:
            writer = code.writer(file)
            for start, block, weights in self.table.between(first, last, _BLOCK):
                seen.check(start, block, weights)
                error += writer.add(seen.parting.coordinates(block.to(torch.float32) - seen.mean, weights))
                self.show(start + len(block))
            part = TablePart(writer.finish(), error)
        kept.put(number, part)
        return part


def _falling_to(
    wanted: float, spent: Callable[[float], float], first: float, least: float, slope: float
) -> tuple[float, float]:
    """Where a falling function is about ``wanted``, at ``least`` or above it, and its slope there, by false position.

    >>> x, slope = _falling_to(10.0, lambda x: 50 - 8 * x if x < 4 else 26 - 2 * x, 0.0, -9.0, -2.0)
    >>> round(x, 1), round(slope)
    (8.0, -2)
    """
    above: tuple[float, float] | None = None  # where it is more than wanted, and where less
    below: tuple[float, float] | None = None
    best, at = (math.inf, first), first
    for _ in range(_SEARCHES):
        value = spent(at)
        best = min(best, (abs(value - wanted), at))
        if abs(value - wanted) <= 0.01 * wanted or (at == least and value < wanted):
            break
        before = above if value > wanted else below
        if value > wanted:
            above = at, value
        else:
            below = at, value
        ends = (above, below) if above and below else (before, (at, value)) if before else None
        if ends and (ends[1][1] - ends[0][1]) * (ends[1][0] - ends[0][0]) < 0:
            slope = (ends[1][1] - ends[0][1]) / (ends[1][0] - ends[0][0])
        step = (wanted - value) / slope
        if above and below:
            width = below[0] - above[0]
            at = min(max(at + step, above[0] + 0.1 * width), below[0] - 0.1 * width)
        else:
            at = max(least, at + max(-3.0, min(3.0, step)))
    return best[1], slope


def _first_that_fits(runs: Sequence[_Run]) -> tuple[TableIndex, _Run]:
    """The table of the first run whose bytes are enough; the error of the last where none is."""
    for run in runs[:-1]:
        with suppress(DoesNotFitError):
            return run.whole(), run
    return runs[-1].whole(), runs[-1]


def _check_shape(n: int, d: int, budget: int, layout: Layout) -> None:
    """Refuse, before anything is read, what no table of this shape can be coded in: axes alone take d x d integers."""
    turned = f"; a table of {n:,} rows and {d:,} columns may be transposed" if d > n else ""
    if d > MOST_COLUMNS:
        raise KflatsError(
            f"a table of {d:,} columns is not supported", hint=f"at most {MOST_COLUMNS:,} columns{turned}"
        )
    least = d * d * (2 if layout == "fast" else 1)
    if budget <= least:
        raise _does_not_fit(
            n, d, budget, layout, f"its axes alone take {least:,} bytes in this layout", f"a larger size{turned}"
        )


def _does_not_fit(n: int, d: int, budget: int, layout: str, cause: str, hint: str = "a larger size") -> DoesNotFitError:
    return DoesNotFitError(
        f"{budget:,} bytes cannot hold a table of {n:,} x {d} in the {layout} layout", cause=cause, hint=hint
    )


def _bytes(size: str | Budget, numbers: int) -> int:
    hint = '"2 bits" a number, or "8GB"'
    try:
        budget = parse_budget(size, "file")
        nbytes = int(budget.in_bytes(numbers).amount)
    except KflatsError as error:
        raise KflatsError(error.symptom, cause=error.cause, hint=hint) from error
    if budget.kind not in ("bits", "bytes"):
        raise KflatsError(f"size={str(budget)!r} is not supported with a table", hint=hint)
    return nbytes


def _rows_a_shard(rows: int, budget: int) -> int:
    """Rows a file, which must not depend on how many workers there are."""
    few = min(_SHARD_ROWS, max(UNIT, rows // _SHARDS))
    most = max(_BLOCK, min(few, _SHARD_BYTES * rows // max(1, budget)))
    return 1 << most.bit_length() - 1
