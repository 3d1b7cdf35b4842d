"""Allocation over weights: exact budgets, near the optimum, and dense where that pays."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kflats.common.errors import KflatsError
from kflats.planning.knapsack import Choice, Options, allocate


def curve(n: int, d: int, scale: float, decay: float, form: str = "factors", itemsize: int = 4) -> Options:
    """A matrix with geometrically falling singular values, stored in one of two forms."""
    ranks = torch.arange(min(n, d) + 1)
    values = scale * decay ** ranks[1:].to(torch.float64)
    errors = torch.cat([values.flip(0).cumsum(0).flip(0), torch.zeros(1, dtype=torch.float64)])
    ranks = ranks[1:]
    numbers = ranks * (n + d) if form == "factors" else ranks * (n + d - ranks)
    return Options(f"{n}x{d}", errors[1:].tolist(), (numbers * itemsize).tolist(), n * d * itemsize)


CURVES = st.builds(
    curve,
    n=st.integers(2, 40),
    d=st.integers(2, 40),
    scale=st.floats(0.01, 100),
    decay=st.floats(0.3, 0.99),
    form=st.sampled_from(["factors", "interpolative"]),
    itemsize=st.sampled_from([2, 4]),
)


def cheapest(c: Options) -> int:
    return min([int(v) for v in c.costs] + [c.dense_bytes])


def total(found: list[Choice]) -> tuple[int, float]:
    """Bytes and error of all choices."""
    return sum(choice.cost for choice in found), sum(choice.error for choice in found)


def bound(curves: list[Options], budget: int) -> float:
    """The Lagrangian bound: any price of a byte gives an error that no choices within the budget are below."""
    tables = [[*zip(c.costs, c.errors, strict=True), (c.dense_bytes, 0.0)] for c in curves]
    best, low, high = 0.0, 1e-12, 1e6
    for _ in range(80):
        price = (low * high) ** 0.5
        chosen = [min(table, key=lambda o: o[1] + price * o[0]) for table in tables]
        cost, error = sum(o[0] for o in chosen), sum(o[1] for o in chosen)
        best = max(best, error + price * (cost - budget))
        low, high = (price, high) if cost > budget else (low, price)
    return best


def steps(found: list[Choice], curves: list[Options]) -> list[int]:
    """What every next better choice would cost more."""
    out = []
    for choice, c in zip(found, curves, strict=True):
        options = [(int(cost), float(error)) for cost, error in zip(c.costs, c.errors, strict=True)]
        options = [o for o in options if o[0] < c.dense_bytes] + [(c.dense_bytes, 0.0)]
        out += [cost - choice.cost for cost, error in options if error < choice.error]
    return out


@settings(max_examples=150)
@given(curves=st.lists(CURVES, min_size=1, max_size=6), share=st.floats(0, 1))
def test_budgets_are_kept_and_used_up_to_the_cheapest_step(curves: list[Options], share: float) -> None:
    low, high = sum(map(cheapest, curves)), sum(c.dense_bytes for c in curves)
    budget = low + int(share * (high - low))
    found = allocate(curves, budget)
    cost, error = total(found)
    assert cost <= budget
    assert all(step > budget - cost for step in steps(found, curves))
    for choice, c in zip(found, curves, strict=True):
        assert choice.name == c.name
        if choice.option is None:
            assert (choice.cost, choice.error) == (c.dense_bytes, 0.0)
        else:
            assert (choice.cost, choice.error) == (c.costs[choice.option], c.errors[choice.option])
            assert choice.cost < c.dense_bytes
    assert bound(curves, budget) <= error * (1 + 1e-9) + 1e-12
    uniform = equal_shares(curves, budget)
    assert uniform is None or error <= uniform * (1 + 1e-9)


def equal_shares(curves: list[Options], budget: int) -> float | None:
    """The error when every weight gets the same share of its bytes."""
    total, error = sum(c.dense_bytes for c in curves), 0.0
    for c in curves:
        part = budget * c.dense_bytes // total
        fits = [float(e) for cost, e in zip(c.costs, c.errors, strict=True) if cost <= part]
        fits += [0.0] if c.dense_bytes <= part else []
        if not fits:
            return None
        error += min(fits)
    return error


@settings(max_examples=60)
@given(
    curves=st.lists(
        st.builds(curve, st.integers(2, 7), st.integers(2, 7), st.floats(0.1, 10), st.floats(0.3, 0.99)),
        min_size=1,
        max_size=3,
    ),
    share=st.floats(0, 1),
)
def test_every_allocation_there_is_has_the_least_error_or_more(curves: list[Options], share: float) -> None:
    low, high = sum(map(cheapest, curves)), sum(c.dense_bytes for c in curves)
    budget = low + int(share * (high - low))
    found = allocate(curves, budget)
    tables = [[*zip(c.costs, c.errors, strict=True), (c.dense_bytes, 0.0)] for c in curves]
    sums = [(sum(o[0] for o in picked), sum(o[1] for o in picked)) for picked in itertools.product(*tables)]
    best = min(error for cost, error in sums if cost <= budget)
    assert bound(curves, budget) <= best * (1 + 1e-9) + 1e-12
    assert best <= total(found)[1] * (1 + 1e-9) + 1e-12


def test_many_layers_are_nearly_optimal() -> None:
    generator = torch.Generator().manual_seed(0)
    curves = [
        curve(64, 64 * (1 + i % 4), float(torch.rand(1, generator=generator)) * 10, 0.9 + 0.002 * i) for i in range(36)
    ]
    whole = sum(c.dense_bytes for c in curves)
    for budget in (int(share * whole) for share in (0.1, 0.33, 0.6, 0.9)):
        error = total(allocate(curves, budget))[1]
        assert error <= 1.01 * bound(curves, budget)
        uniform = equal_shares(curves, budget)
        assert uniform is not None
        assert error < 0.9 * uniform


def test_a_weight_of_no_account_pays_for_one_that_matters() -> None:
    idle, vital = curve(20, 20, 1e-9, 0.9), curve(20, 20, 1.0, 0.99)
    found = allocate([idle, vital], idle.costs[0] + vital.dense_bytes)
    assert [choice.option for choice in found] == [0, None]
    assert total(found)[1] < 1e-7


def test_concave_costs_end_at_dense() -> None:
    c = curve(12, 20, 1.0, 0.99, form="interpolative")
    costs = [0, *c.costs]
    rises = [b - a for a, b in itertools.pairwise(costs)]
    assert rises == sorted(rises, reverse=True)
    assert costs[-1] == c.dense_bytes
    options = {allocate([c], budget)[0].option for budget in range(cheapest(c), c.dense_bytes + 1)}
    assert options == {*range(11), None}


def test_ranks_that_cost_more_than_the_dense_table_are_never_chosen() -> None:
    c = curve(10, 10, 1.0, 0.999)  # a pair of rank 5 takes as much as the table
    assert allocate([c], c.dense_bytes)[0].option is None
    assert allocate([c], c.dense_bytes - 1)[0].option == 3


def test_a_narrow_weight_has_no_factors_worth_having() -> None:
    head = curve(50, 1, 1.0, 0.9)
    body = curve(50, 50, 1.0, 0.9)
    found = allocate([head, body], 50 * 4 + 3 * 100 * 4)
    assert [choice.option for choice in found] == [None, 2]


def test_a_long_step_is_taken_first_where_that_is_better() -> None:
    # Only dense helps the first; greedy by error per byte would spend on the second what the first then lacks.
    first = Options("first", [10.0], [1], 100)
    second = Options("second", [2.0, 1.0], [1, 9], 1000)
    found = allocate([first, second], 101)
    assert [choice.option for choice in found] == [None, 0]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(KflatsError, match="cannot hold the least of all 2 weights"):
        allocate([curve(5, 5, 1, 0.5), curve(9, 9, 1, 0.5)], 100)
    for errors in ([1.0, float("nan")], [1.0, -1.0], [float("inf"), 0.0]):
        with pytest.raises(KflatsError, match="a: its errors"):
            Options("a", errors, [0, 1], 5)
