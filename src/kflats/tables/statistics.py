"""What is known of a table in files before it is coded: sums over all its rows, a sample, and how rows are parted.

One pass sums the mean, the Gram matrix and the largest norm, refuses what is not finite, and draws the sample. Several
flats take some passes more (``tables.flats``). None holds more than a block of rows, the sample and k x d x d numbers.

Sums are those of units of 2^18 rows, added in their order: they do not depend on how the source is cut into files, nor
on who sums a unit. Several workers sum different units.
"""

from __future__ import annotations

import json
import math
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kflats.common.errors import KflatsError, KflatsWarning
from kflats.common.workers import Workers
from kflats.io.tables import JoinedRows
from kflats.numerics.rows import GRAM_BLOCK
from kflats.tables.axes import Axes
from kflats.tables.compact import MOST_NARROW
from kflats.tables.flats import Parting, eigenvectors, halvings, parted
from kflats.tables.layout import Coordinates

UNIT = 2**18
"""Rows whose sums are one term of the whole."""
_SAMPLE = 32768
_LONGEST, _SHORTEST = 1e15, 1e-15  # of a row: squares, their sums and products of these stay in float32
_LIGHTEST = 1e-15  # weight
_FAR = 1e4
"""A row so many times as long as the middle one sets the steps of all."""


@dataclass(frozen=True)
class WeightedTable:
    """The rows (n, d) of a table, and their weights (n,), which may be mapped; None: all are 1."""

    rows: JoinedRows
    weights: Tensor | None

    def between(self, first: int, last: int, size: int) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Rows ``first`` to ``last`` in blocks: the number of the first row, the rows, their weights in float64.

        Raises:
            KflatsError: a weight that is negative, not finite, too small or too large.
        """
        for start, block in self.rows.between(first, last, size):
            yield start, block, self.weights_of(torch.arange(start, start + len(block)))

    def weights_of(self, ids: Tensor) -> Tensor | None:
        """(m,) float64, the weights of some rows.

        Raises:
            KflatsError: a weight that is negative, not finite, too small or too large.
        """
        if self.weights is None:
            return None
        found = self.weights[ids].to(torch.float64)
        good = (found == 0) | ((found >= _LIGHTEST) & (found <= _LONGEST))
        if not bool(good.all()):
            place = int((~good).nonzero()[0])
            raise KflatsError(
                f"the weight {float(found[place])} of row {int(ids[place])} is not supported",
                hint=f"0, or numbers from {_LIGHTEST:.0e} to {_LONGEST:.0e}",
            )
        return found

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d)."""
        return self.rows.shape


@dataclass(frozen=True)
class TableStatistics:
    """What is known of a table before it is coded: the mean, the weighted sum of squares, a bound of the norms of rows
    less their mean, how rows are parted, a sample of rows ``near`` (m, d), less the mean, with their weights, and the
    ``checksums`` of each ``GRAM_BLOCK`` of rows and their weights."""

    mean: Tensor
    squares: float
    longest: float
    parting: Parting
    near: Tensor
    weights: Tensor | None
    checksums: tuple[int, ...]

    @cached_property
    def sample(self) -> Coordinates:
        """The sample as it is coded."""
        return self.parting.coordinates(self.near, self.weights)

    def coarser(self) -> TableStatistics:
        """The same with axes of 8 bits, in whose coordinates a row may be a little longer."""
        axes = self.parting.axes.coarser()
        longer = float(torch.linalg.matrix_norm(axes.analysis.to(torch.float64), 2).max())
        return replace(self, longest=self.longest * max(1.0, longer), parting=replace(self.parting, axes=axes))

    def check(self, first: int, block: Tensor, weights: Tensor | None) -> None:
        """Refuse rows that are no longer those that were summed, and only then looked through for NaN.

        Raises:
            KflatsError: see above.
        """
        for start in range(0, len(block), GRAM_BLOCK):
            part = slice(start, start + GRAM_BLOCK)
            own = None if weights is None else weights[part]
            if _checksum(block[part], own) != self.checksums[(first + start) // GRAM_BLOCK]:
                raise KflatsError(
                    f"rows {first + start} and on of the table changed while it was read",
                    cause="another program writes into its files",
                    hint="a source that nobody writes into, or a copy of it",
                )


def statistics_of(table: WeightedTable, seed: int, show: Callable[[int], None], workers: Workers) -> TableStatistics:
    """The pass over all rows, with one flat.

    Args:
        seed: of the sample. show: is told how many rows were read. workers: who divide the units.

    Raises:
        KflatsError: rows that are not finite, too long or all too short; as ``weights_of``; weights all 0.

    Warns:
        KflatsWarning: a row is 10,000 times as long as the middle one.
    """
    rows, (n, d) = table.rows, table.shape
    count = min(n, _SAMPLE)
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ids = ((torch.arange(count) + drawn) * (n / count)).to(torch.int64).clamp_max(n - 1)  # one of each n / count rows
    shift = next(rows.between(0, min(n, GRAM_BLOCK), GRAM_BLOCK))[1].mean(0)

    def sums(unit: int) -> tuple[dict[str, Tensor], str]:
        total, gram = torch.zeros(d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)
        first, last = unit * UNIT, min((unit + 1) * UNIT, n)
        mine = ids[(ids >= first) & (ids < last)]
        sample, squares, longest, place, checksums = (
            torch.empty(len(mine), d, dtype=torch.float32),
            0.0,
            -1.0,
            0,
            list[int](),
        )
        heaviest = 0.0
        for start, block, own in table.between(first, last, GRAM_BLOCK):
            norms = block.square().sum(1)
            most = norms.max(dim=0)
            if not float(most.values) <= _LONGEST**2:
                raise _not_finite(rows, start, block)
            if float(most.values) > longest:
                longest, place = float(most.values), start + int(most.indices)
            checksums.append(_checksum(block, own))
            if own is not None:
                heaviest = max(heaviest, float(own.max()))
            here = slice(*torch.searchsorted(mine, torch.tensor([start, start + len(block)])).tolist())
            sample[here] = block[mine[here] - start].to(torch.float32)
            near = block - shift
            total += near.sum(0, dtype=torch.float64)
            gram += near.T @ near
            squares += float(norms.sum(dtype=torch.float64) if own is None else norms.to(torch.float64) @ own)
            show(start + len(block))
        numbers = [squares, longest, place, checksums, heaviest]
        return {"total": total, "gram": gram, "sample": sample}, json.dumps(numbers)

    total, gram = torch.zeros(d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)
    samples, squares, checksums = list[Tensor](), 0.0, list[int]()
    longest, place, heaviest = -1.0, 0, 0.0
    tasks = [f"measuring rows {a} and on" for a in range(0, n, UNIT)]
    for tensors, numbers in workers.in_turn(tasks, sums):
        total, gram = total + tensors["total"], gram + tensors["gram"]
        samples.append(tensors["sample"])
        unit_squares, *far, of_unit, unit_heaviest = json.loads(numbers)
        checksums += of_unit
        heaviest = max(heaviest, unit_heaviest)
        squares, (longest, place) = squares + unit_squares, max((longest, place), tuple(far), key=lambda one: one[0])
    if table.weights is not None and not heaviest > 0:
        raise KflatsError("all weights of rows are 0", hint="weights of which some are positive")
    mean = total / n
    axes = Axes.of(eigenvectors((gram / n - mean.outer(mean)).unsqueeze(0)))
    mean, whole = (mean + shift).to(torch.float32), torch.cat(samples)
    middle = float(whole.norm(dim=1).median())
    largest = float(whole.abs().max())
    if longest < _SHORTEST**2 and largest > 0:
        raise KflatsError(
            f"the numbers of this table, of up to {largest:.0e}, are too small",
            cause=f"squares of rows shorter than {_SHORTEST:.0e} are lost in float32",
            hint=f"the table times {10.0 ** -round(math.log10(largest)):.0e}",
        )
    if middle > 0 and longest > (_FAR * middle) ** 2 and workers.first:
        far = f"{rows.place(place)} is {longest**0.5 / middle:.1e} times as long as the middle row"
        warnings.warn(
            KflatsWarning(f"{far}: beside it the others lose more; leave it out of the table"),
            stacklevel=4,
        )
    weights = table.weights_of(ids)
    levels = 1 if weights is None else int(halvings(weights, heaviest).max()) + 1
    longest, parting = longest**0.5 + float(mean.norm()), Parting(axes, levels, heaviest)
    return TableStatistics(mean, squares, longest, parting, whole - mean, weights, tuple(checksums))


def with_flats(
    table: WeightedTable,
    seen: TableStatistics,
    flats: int,
    noise: float,
    seed: int,
    show: Callable[[str, int], None],
    workers: Workers,
) -> TableStatistics:
    """The same with rows parted into flats, by EM in passes over all rows."""
    n = table.shape[0]
    one = replace(seen.parting, weight_levels=min(seen.parting.weight_levels, MOST_NARROW // flats))

    def blocks(unit: int) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        for start, block, weights in table.between(unit * UNIT, min((unit + 1) * UNIT, n), GRAM_BLOCK):
            yield start, block.to(torch.float32) - seen.mean, weights

    parting, _ = parted(
        seen.near,
        seen.weights,
        flats,
        one=one,
        noise=noise,
        seed=seed,
        blocks=blocks,
        units=-(-n // UNIT),
        workers=workers,
        show=show,
    )
    return replace(seen, parting=parting)


def _checksum(rows: Tensor, weights: Tensor | None) -> int:
    """The checksum of rows and their weights."""
    checksum = zlib.crc32(rows.contiguous().numpy().data)
    return checksum if weights is None else zlib.crc32(weights.numpy().data, checksum)


def _not_finite(rows: JoinedRows, start: int, block: Tensor) -> KflatsError:
    bad = (~(block.square().sum(1) <= _LONGEST**2)).nonzero().squeeze(1) + start
    more = f", and {len(bad) - 1} more up to {rows.place(int(bad[-1]))}" if len(bad) > 1 else ""
    return KflatsError(
        f"NaN, infinite or huge numbers (rows longer than {_LONGEST:.0e}) in {rows.place(int(bad[0]))}{more}",
        cause=f"a damaged source; rows {start} to {start + len(block)} of the table were read",
        hint="repair these rows, or leave them out",
    )
