"""Filling ranks under a budget: never above it, short by less than a step, optimal up to the last coordinate."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kflats.common.errors import KflatsError
from kflats.numerics.flats import fill


@st.composite
def problems(draw):
    """Tiny spectra (k, d), descending, costs and a budget that holds the floor."""
    k, d = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    level = st.floats(0, 100, width=32)
    spectra = torch.tensor([sorted(draw(st.lists(level, min_size=d, max_size=d)), reverse=True) for _ in range(k)])
    costs = torch.tensor(draw(st.lists(st.integers(1, 12), min_size=k, max_size=k)))
    floor = draw(st.integers(0, 1))
    least = int(costs.sum()) * floor
    budget = draw(st.integers(least, int(costs.sum()) * d + 5))
    return spectra, costs, budget, floor


def kept(spectra, ranks):
    return sum(float(spectra[c, :r].sum(dtype=torch.float64)) for c, r in enumerate(ranks))


def best(spectra, costs, budget, floor):
    """The most that any ranks within the budget keep, by trying them all."""
    k, d = spectra.shape
    choices = itertools.product(range(floor, d + 1), repeat=k)
    affordable = [r for r in choices if sum(a * int(b) for a, b in zip(r, costs, strict=True)) <= budget]
    return max(kept(spectra, r) for r in affordable)


@settings(max_examples=300)
@given(problems())
def test_it_is_optimal_up_to_the_last_coordinate(problem):
    spectra, costs, budget, floor = problem
    k, d = spectra.shape
    found = fill(spectra, costs, budget, floor=floor)
    assert all(min(floor, d) <= r <= d for r in found.ranks)
    assert found.used == sum(r * int(c) for r, c in zip(found.ranks, costs, strict=True))
    assert found.used <= budget
    steps = [int(costs[c]) for c in range(k) if found.ranks[c] < d]
    assert not steps or budget - found.used < min(steps)
    # Only the one coordinate that did not fit whole may be missing: price is its saving per number.
    least = found.multiplier * max(int(c) for c in costs)
    assert kept(spectra, found.ranks) >= best(spectra, costs, budget, floor) - least - 1e-6


@settings(max_examples=100)
@given(problems())
def test_more_budget_never_keeps_less_than_a_coordinate_less(problem):
    spectra, costs, budget, floor = problem
    less, more = fill(spectra, costs, budget, floor=floor), fill(spectra, costs, budget + 7, floor=floor)
    assert more.multiplier <= less.multiplier + 1e-9
    assert kept(spectra, more.ranks) >= kept(spectra, less.ranks) - less.multiplier * float(costs.max()) - 1e-6


@settings(max_examples=100)
@given(problems(), st.integers(1, 30))
def test_equal_costs_are_filled_optimally(problem, cost):
    spectra, costs, _, floor = problem
    costs = torch.full_like(costs, cost)
    budget = cost * (len(costs) * floor + 2)
    assert kept(spectra, fill(spectra, costs, budget, floor=floor).ranks) == pytest.approx(
        best(spectra, costs, budget, floor), rel=1e-6, abs=1e-6
    )


def test_what_is_left_goes_where_it_saves_most():
    # Flat 2's next coordinate saves most but does not fit into the ten numbers left; flat 0 has nothing to give.
    spectra = torch.tensor([[90.0, 0.0, 0.0], [80.0, 50.0, 30.0], [7000.0, 6500.0, 0.0]])
    costs = torch.tensor([10, 4, 40])
    found = fill(spectra, costs, 10 + 4 + 40 + 10)
    assert found.ranks == (1, 3, 1)


def test_equal_ratios_are_filled_in_order_of_flats():
    spectra = torch.ones(3, 4)
    assert fill(spectra, torch.tensor([2, 2, 2]), 2 * 6).ranks == (4, 1, 1)


def test_a_budget_below_the_floor_is_refused():
    with pytest.raises(KflatsError, match="cannot hold 2 flats of rank 1"):
        fill(torch.ones(2, 3), torch.tensor([5, 5]), 9)
