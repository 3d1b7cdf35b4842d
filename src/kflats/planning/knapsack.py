"""One option for each of many weights within one budget: the multiple-choice knapsack problem.

    minimise  sum_i error_i(option_i)   with   sum_i cost_i(option_i) <= budget,   or weight i stays dense

Errors are added, so they must be in one unit (that of a loss). On the lower convex hull of each weight's (cost, error)
points the greedy choice by error saved per byte is optimal for the budgets that it meets exactly (Sinha & Zoltners,
"The multiple-choice knapsack problem", 1979). The rest of the budget is then spent on steps that fit.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kflats.common.errors import DoesNotFitError, KflatsError
from kflats.common.formatting import size

_ROUNDS = 8


@dataclass(frozen=True)
class Options:
    """The ways to store one weight.

    Args:
        name: of the weight, for messages.
        errors: of each option, in one unit for all weights. costs: bytes of each option.
        dense_bytes: of the weight kept as it is, with error 0.

    Raises:
        KflatsError: an error that is negative or not finite.
    """

    name: str
    errors: Sequence[float]
    costs: Sequence[int]
    dense_bytes: int

    def __post_init__(self) -> None:
        if not all(math.isfinite(error) and error >= 0 for error in self.errors):
            raise KflatsError(
                f"{self.name}: its errors hold NaN, infinity or negative values",
                hint="a model in float32, and other calibration data",
            )


@dataclass(frozen=True)
class Choice:
    """The choice for one weight: the index of an ``option`` (None: it stays dense), its bytes and its error."""

    name: str
    option: int | None
    cost: int
    error: float


def allocate(weights: Sequence[Options], budget: int) -> list[Choice]:
    """Choose for all weights at once: at most ``budget`` bytes, and short of it by less than the cheapest step.

    The error is never above that of the same share of bytes for every weight.

    Raises:
        KflatsError: the budget does not hold the cheapest option of every weight.

    >>> flat = Options("flat", [3.0, 2.0], [10, 20], 30)
    >>> steep = Options("steep", [1.0, 0.5], [10, 20], 30)
    >>> [(choice.option, choice.cost) for choice in allocate([flat, steep], 40)]
    [(None, 30), (0, 10)]
    """
    tables = [_table(options) for options in weights]
    least = sum(table[0].cost for table in tables)
    if least > budget:
        dear = max(tables, key=lambda table: table[0].cost)[0]
        raise DoesNotFitError(
            f"a budget of {budget:,} bytes cannot hold the least of all {len(weights)} weights",
            cause=f"rank 1 or the coarsest codes take {least:,} bytes, {size(dear.cost)} of them for {dear.name!r}",
            hint="a larger budget, or fewer weights",
        )
    forced: dict[int, int] = {}
    states: list[list[int]] = []
    while len(states) < _ROUNDS and _cost(tables, _start(tables, forced)) <= budget:
        state, stopped = _greedy(tables, budget, forced)
        states.append(state)
        if stopped is None:
            break
        # The first step that did not fit may be a long one: the next walk starts with it.
        forced |= [stopped]
    equal = _proportional(tables, [options.dense_bytes for options in weights], budget)
    best = min([*states, *equal], key=lambda state: _error(tables, state))
    return [table[i] for table, i in zip(tables, best, strict=True)]


def _table(options: Options) -> list[Choice]:
    """The choices that lose less than every cheaper one, cheapest first."""
    pairs = enumerate(zip(options.costs, options.errors, strict=True))
    choices = [Choice(options.name, i, cost, error) for i, (cost, error) in pairs if cost < options.dense_bytes]
    choices.insert(0, Choice(options.name, None, options.dense_bytes, 0.0))
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.cost, choice.error)):
        if not kept or choice.error < kept[-1].error:
            kept.append(choice)
    return kept


def _hull(table: Sequence[Choice]) -> list[int]:
    """Indices of the lower convex hull of (cost, error)."""
    kept: list[int] = []
    for place, point in enumerate(table):
        while len(kept) >= 2:
            a, b = table[kept[-2]], table[kept[-1]]
            if (a.error - b.error) * (point.cost - a.cost) > (a.error - point.error) * (b.cost - a.cost):
                break
            kept.pop()
        kept.append(place)
    return kept


def _greedy(
    tables: Sequence[Sequence[Choice]], budget: int, forced: Mapping[int, int]
) -> tuple[list[int], tuple[int, int] | None]:
    """The choices, and the first step that did not fit: the index of its weight, and of its choice."""
    state = _start(tables, forced)
    spare = budget - _cost(tables, state)
    steps = [
        ((table[there].error - table[here].error) / (table[there].cost - table[here].cost), t, there)
        for t, table in enumerate(tables)
        if t not in forced
        for here, there in pairwise(_hull(table))
    ]
    stopped: dict[int, int] = {}
    for _, t, there in sorted(steps):
        price = tables[t][there].cost - tables[t][state[t]].cost
        if t in stopped or price <= 0:
            continue
        if price > spare:
            stopped[t] = there
        else:
            state[t], spare = there, spare - price
    _fill(tables, state, spare)
    return state, next(iter(stopped.items()), None)


def _fill(tables: Sequence[Sequence[Choice]], state: list[int], spare: int) -> None:
    """Spend ``spare`` on the steps that save most error per byte, until no step of any weight fits."""
    while steps := list(_steps(tables, state, spare)):
        _, t, there = max(steps, key=lambda step: step[0])
        spare -= tables[t][there].cost - tables[t][state[t]].cost
        state[t] = there


def _steps(tables: Sequence[Sequence[Choice]], state: Sequence[int], spare: int) -> Iterator[tuple[float, int, int]]:
    """The error saved per byte by each step of at most ``spare`` bytes, its weight and its choice."""
    for t, (table, at) in enumerate(zip(tables, state, strict=True)):
        for there in range(at + 1, len(table)):
            price = table[there].cost - table[at].cost
            if price > spare:
                break
            yield (table[at].error - table[there].error) / price, t, there


def _proportional(tables: Sequence[Sequence[Choice]], sizes: Sequence[int], budget: int) -> list[list[int]]:
    """The same share of bytes for every weight; none if one share does not hold the cheapest choice."""
    state = [
        bisect_right(table, budget * nbytes // sum(sizes), key=lambda choice: choice.cost) - 1
        for table, nbytes in zip(tables, sizes, strict=True)
    ]
    if any(at < 0 for at in state):
        return []
    _fill(tables, state, budget - _cost(tables, state))
    return [state]


def _start(tables: Sequence[Sequence[Choice]], forced: Mapping[int, int]) -> list[int]:
    return [forced.get(t, 0) for t in range(len(tables))]


def _cost(tables: Sequence[Sequence[Choice]], state: Sequence[int]) -> int:
    return sum(table[i].cost for table, i in zip(tables, state, strict=True))


def _error(tables: Sequence[Sequence[Choice]], state: Sequence[int]) -> float:
    return sum(table[i].error for table, i in zip(tables, state, strict=True))
