"""Allocation: one budget, many weights; which rank each gets, and which stay dense. Pure numbers.

    minimise  sum_i error_i(rank_i)   with   sum_i cost_i(rank_i) <= budget,   rank_i >= 1 or "dense"

Errors must be in one unit (that of a loss) to be added. The problem is a knapsack with choices. On the lower
convex hull of each weight's (cost, error) points, greedy by error saved per byte is optimal for the budgets it
meets exactly, and bounds the optimum for all others (the Lagrangian dual; Sinha & Zoltners, "The
multiple-choice knapsack problem", 1979). What is left of the budget is then filled with whatever fits.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.common.formatting import size

_ROUNDS = 8


@dataclass(frozen=True)
class Curve:
    """What every rank of one weight costs and loses.

    Args:
        name: for messages.
        errors: (R + 1,) error at rank 0..R, in units shared by all curves.
        costs: (R + 1,) stored bytes at rank 0..R.
        dense_bytes: of the weight kept as it is, with error 0.
    """

    name: str
    errors: Tensor
    costs: Tensor
    dense_bytes: int

    def __post_init__(self) -> None:
        if self.errors.shape != self.costs.shape or self.errors.ndim != 1:
            raise KflatsError(f"{self.name}: {tuple(self.errors.shape)} errors for {tuple(self.costs.shape)} costs")
        if not bool(torch.isfinite(self.errors).all()) or bool((self.errors < 0).any()):
            raise KflatsError(f"{self.name}: its errors hold NaN, infinity or negative values")


@dataclass(frozen=True)
class Choice:
    """What one weight gets: ``rank`` (None: it stays dense), the bytes that takes and the error it leaves."""

    name: str
    rank: int | None
    cost: int
    error: float


@dataclass(frozen=True)
class Allocation:
    """The choices, in the order of the curves, and ``bound``: no allocation within the budget loses less."""

    choices: tuple[Choice, ...]
    budget: int
    bound: float

    @property
    def cost(self) -> int:
        """Bytes in all; never above the budget."""
        return sum(choice.cost for choice in self.choices)

    @property
    def error(self) -> float:
        """The sum that is minimised."""
        return sum(choice.error for choice in self.choices)


def allocate(curves: Sequence[Curve], budget: int) -> Allocation:
    """Ranks for all weights at once: never above ``budget``, and short of it by less than the cheapest step.

    Never worse than the same share of bytes for every weight. How far from the best possible it can be is known:
    ``error - bound``.

    Raises:
        KflatsError: the budget does not hold rank 1 of every weight.

    >>> flat = Curve("flat", torch.tensor([4.0, 3.0, 2.0]), torch.tensor([0, 10, 20]), 30)
    >>> steep = Curve("steep", torch.tensor([9.0, 1.0, 0.5]), torch.tensor([0, 10, 20]), 30)
    >>> [(choice.rank, choice.cost) for choice in allocate([flat, steep], 40).choices]
    [(None, 30), (1, 10)]
    """
    tables = [_options(curve) for curve in curves]
    least = sum(table[0].cost for table in tables)
    if least > budget:
        dear = max(tables, key=lambda table: table[0].cost)[0]
        raise KflatsError(
            f"a budget of {budget:,} bytes cannot hold the least of all {len(curves)} weights",
            cause=f"rank 1 or the coarsest codes take {least:,} bytes, {size(dear.cost)} of them for {dear.name!r}",
            hint="a larger budget, or fewer weights",
        )
    forced: dict[int, int] = {}
    best, bound = None, 0.0
    for turn in range(_ROUNDS):
        found = _greedy(tables, budget, forced)
        if turn == 0:
            bound = found.bound
        if best is None or _error(tables, found.state) < _error(tables, best):
            best = found.state
        # Greedy stopped before a step that did not fit, perhaps a long one: also try what comes of taking it first.
        if found.stopped is None or found.stopped[0] in forced:
            break
        forced[found.stopped[0]] = found.stopped[1]
        if _cost(tables, _start(tables, forced)) > budget:
            break
    equal = _proportional(tables, [curve.dense_bytes for curve in curves], budget)
    if best is None or (equal is not None and _error(tables, equal) < _error(tables, best)):
        best = equal
    assert best is not None
    return Allocation(tuple(table[i] for table, i in zip(tables, best, strict=True)), budget, bound)


def _options(curve: Curve) -> list[Choice]:
    """The choices worth having, cheapest first: each loses less than every cheaper one."""
    ranks: list[int | None] = [None, *range(1, len(curve.errors))]
    costs, errors = curve.costs.tolist(), curve.errors.tolist()
    found = [
        Choice(curve.name, None, curve.dense_bytes, 0.0)
        if rank is None
        else Choice(curve.name, rank, int(costs[rank]), float(errors[rank]))
        for rank in ranks
        if rank is None or costs[rank] < curve.dense_bytes
    ]
    found.sort(key=lambda choice: (choice.cost, choice.error))
    kept: list[Choice] = []
    for choice in found:
        if not kept or choice.error < kept[-1].error:
            kept.append(choice)
    return kept


def _hull(table: Sequence[Choice]) -> list[int]:
    """Places of the lower convex hull of (cost, error)."""
    kept: list[int] = []
    for place, point in enumerate(table):
        while len(kept) >= 2:
            a, b = table[kept[-2]], table[kept[-1]]
            if (a.error - b.error) * (point.cost - a.cost) > (a.error - point.error) * (b.cost - a.cost):
                break
            kept.pop()
        kept.append(place)
    return kept


@dataclass(frozen=True)
class _Walk:
    state: list[int]
    bound: float
    stopped: tuple[int, int] | None  # the first step that did not fit: which weight, to which option


def _greedy(tables: Sequence[Sequence[Choice]], budget: int, forced: Mapping[int, int]) -> _Walk:
    state = _start(tables, forced)
    hulls = [[i for i in _hull(table) if i >= state[t]] for t, table in enumerate(tables)]
    spare = budget - _cost(tables, state)
    bound, stopped = None, None
    steps: list[tuple[float, int, int]] = []

    def offer(t: int, at: int) -> None:
        if at + 1 < len(hulls[t]):
            here, there = tables[t][hulls[t][at]], tables[t][hulls[t][at + 1]]
            heapq.heappush(steps, (-(here.error - there.error) / (there.cost - here.cost), t, at))

    for t in range(len(tables)):
        if t not in forced:
            offer(t, 0)
    while steps:
        slope, t, at = heapq.heappop(steps)
        there = tables[t][hulls[t][at + 1]]
        price = there.cost - tables[t][state[t]].cost
        if price > spare:
            if stopped is None:
                stopped = (t, hulls[t][at + 1])
                bound = _error(tables, state) + slope * spare
            continue
        state[t], spare = hulls[t][at + 1], spare - price
        offer(t, at + 1)
    _fill(tables, state, spare)
    return _Walk(state, _error(tables, state) if bound is None else max(bound, 0.0), stopped)


def _fill(tables: Sequence[Sequence[Choice]], state: list[int], spare: int) -> None:
    """Spend what is left, most error saved per byte first, until no step of any weight fits."""
    costs = [[choice.cost for choice in table] for table in tables]
    values = [torch.tensor([(c.cost, c.error) for c in table], dtype=torch.float64) for table in tables]
    while True:
        best: tuple[float, int, int] | None = None
        for t, at in enumerate(state):
            end = bisect_right(costs[t], costs[t][at] + spare)
            if end <= at + 1:
                continue
            step = values[t][at + 1 : end] - values[t][at]
            gains = -step[:, 1] / step[:, 0]
            place = int(gains.argmax())
            if best is None or float(gains[place]) > best[0]:
                best = (float(gains[place]), t, at + 1 + place)
        if best is None:
            return
        _, t, place = best
        spare -= costs[t][place] - costs[t][state[t]]
        state[t] = place


def _proportional(tables: Sequence[Sequence[Choice]], sizes: Sequence[int], budget: int) -> list[int] | None:
    """The same share of bytes for every weight, None where one of them cannot live on it."""
    state = []
    for table, nbytes in zip(tables, sizes, strict=True):
        end = bisect_right([choice.cost for choice in table], budget * nbytes // sum(sizes))
        if not end:
            return None
        state.append(end - 1)
    _fill(tables, state, budget - _cost(tables, state))
    return state


def _start(tables: Sequence[Sequence[Choice]], forced: Mapping[int, int]) -> list[int]:
    return [forced.get(t, 0) for t in range(len(tables))]


def _cost(tables: Sequence[Sequence[Choice]], state: Sequence[int]) -> int:
    return sum(table[i].cost for table, i in zip(tables, state, strict=True))


def _error(tables: Sequence[Sequence[Choice]], state: Sequence[int]) -> float:
    return sum(table[i].error for table, i in zip(tables, state, strict=True))
