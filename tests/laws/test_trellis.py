"""Paths of a trellis: the cheapest is found, subsets follow from free bits, errors are smaller at equal bytes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from table import crossed
from test_feedback import cost, damp, gram, normal, steps_of

from kflats import Feedback, KeepDense
from kflats.codecs import feedback as codec
from kflats.codecs.streams import STATIC, encode
from kflats.common.errors import KflatsError
from kflats.importance.protocol import Weighting
from kflats.methods.matrix_error import weighted_error
from kflats.methods.protocol import Problem
from kflats.numerics.coding import feedback, trellis
from kflats.numerics.coding.feedback import Rounded, ToRound, designed, rounded_together, side_of
from kflats.numerics.coding.tables import table_for
from kflats.numerics.coding.trellis import PathRounding, best_subsets, bits_in_subset, free_bits, pays, subsets_of
from kflats.numerics.rows import TensorRows

CONTEXT_MODEL_AT = 13
"""The byte of a stream that names its context model (docs/files.md)."""


def round_with_feedback(*given: Any) -> Rounded:
    """Of one matrix alone."""
    (made,) = rounded_together([ToRound(*given)])
    return made


def subsets_one_by_one(bits: tuple[int, ...]) -> list[int]:
    """From the definition."""
    subsets, before = [], [0, 0, 0]
    for u in bits:
        subsets.append((before[0] ^ before[1]) + 2 * (u ^ before[0] ^ before[2]))
        before = [u, *before[:2]]
    return subsets


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 11])
def test_the_cheapest_path_is_found(length: int) -> None:
    draw, entries = np.random.default_rng(length), np.arange(length)
    paths = np.array([subsets_one_by_one(bits) for bits in itertools.product((0, 1), repeat=length)])
    all_costs = draw.integers(0, 1 << 17, (4, 30, length)).astype(np.int32)
    for costs, found in zip(all_costs.swapaxes(0, 1), best_subsets(all_costs), strict=True):
        assert costs[found, entries].sum() == costs[paths, entries].sum(1).min()


def test_the_longest_path_does_not_overflow() -> None:
    costs = np.full((4, 1, trellis.PATH_BLOCK), int(trellis._DEAREST * trellis._UNIT), dtype=np.int32)
    costs[0] = 0
    assert not best_subsets(costs).any()


@pytest.mark.parametrize(("n", "d"), [(1, 1), (1, 9), (9, 1), (5, 7), (12, 12), (20, 45), (45, 20)])
def test_subsets_are_those_of_the_definition_and_give_the_bits_back(
    n: int, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trellis, "PATH_BLOCK", 12)
    draw = torch.Generator().manual_seed(n + d)
    free = torch.randint(0, 2, (n, d), generator=draw, dtype=torch.uint8)
    subsets, expected = subsets_of(free), torch.zeros_like(free)
    for top, left in itertools.product(range(0, n, 12), range(0, d, 12)):
        height, width = min(12, n - top), min(12, d - left)
        for s in range(height + width - 1):
            path = [(top + i, left + s - i) for i in range(height) if 0 <= s - i < width]
            for at, subset in zip(path, subsets_one_by_one(tuple(int(free[at]) for at in path)), strict=True):
                expected[at] = subset
    assert torch.equal(subsets, expected)
    levels = 4 * torch.randint(-9, 9, (n, d), generator=draw) + subsets
    found = free_bits(levels)
    assert found is not None
    assert torch.equal(found, free)
    levels[n // 2, d // 2] += 1
    assert free_bits(levels) is None


def test_bits_in_a_subset_are_those_of_its_distribution() -> None:
    tables = table_for((5 * normal(4000, 1)).round().clamp(-30, 30).to(torch.int16))
    reach = int(tables.reach[0])
    symbols = torch.arange(-reach, reach + 1)
    share = (-bits_in_subset(tables)[0, symbols.abs()]).exp2()
    for remainder in range(4):
        assert float(share[symbols % 4 == remainder].sum()) == pytest.approx(1.0)


def test_paths_pay_for_large_integers_only() -> None:
    for spread, expected in ((0.4, False), (4.0, True)):
        levels = (spread * normal(300, 40)).round().to(torch.int64)
        assert pays(levels, torch.zeros_like(levels), table_for(levels.to(torch.int16))) == expected


def test_uniform_numbers_lose_a_fifth_less_than_on_a_grid_of_the_same_rate() -> None:
    """1.06 dB: the gain of eight states."""
    targets = 8 * torch.rand(384, 384, generator=torch.Generator().manual_seed(0)) - 4
    how = PathRounding.plain((384, 384))
    lost = float((targets - how.values(how.levels(targets))).square().mean())
    assert 10 * math.log10(4 / 12 / lost) > 1.0


@pytest.mark.parametrize(("n", "d"), [(7, 5), (40, 33), (1, 20), (20, 1)])
@pytest.mark.parametrize("sides", ["both", "left", "right", "none"])
def test_paths_with_feedback(n: int, d: int, sides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is that of the targets; each path is the best for its targets; integers follow paths."""
    for module in (trellis, feedback):
        monkeypatch.setattr(module, "PATH_BLOCK", 16)
    matrix = normal(n, d)
    left = gram(n, 1) if sides in ("both", "left") and n > 1 else None
    right = gram(d, 2) if sides in ("both", "right") and d > 1 else None
    rows, columns = side_of(left, n, ordered=False), side_of(right, d, ordered=False)
    row_steps, column_steps = steps_of(rows, 0.4), steps_of(columns, 0.5)
    labels = torch.arange(n) % 2 if n > 1 else torch.zeros(1, dtype=torch.int64)
    plain = round_with_feedback(matrix, rows, columns, row_steps, column_steps, PathRounding.plain((n, d)))
    how = PathRounding.priced(designed(Rounded(plain.levels, plain.targets), labels), labels)
    made = round_with_feedback(matrix, rows, columns, row_steps, column_steps, how)
    assert free_bits(made.levels.to(torch.int64)) is not None
    assert torch.equal(how.levels(made.targets), made.levels)
    steps = torch.outer(row_steps, column_steps)
    lost = matrix - how.values(made.levels) * steps
    sizes = steps * torch.outer(rows.scale, columns.scale)
    by_targets = float((sizes * (made.targets - how.values(made.levels))).square().sum())
    assert cost(lost, left, right) == pytest.approx(by_targets, rel=1e-6)


def test_priced_paths_are_never_worse_than_plain_ones_by_error_and_bits() -> None:
    targets = 3 * normal(64, 64).float()
    labels, plain = torch.zeros(64, dtype=torch.int64), PathRounding.plain((64, 64))
    how = PathRounding.priced(designed(Rounded(plain.levels(targets), targets), labels), labels)

    def total(levels: torch.Tensor) -> float:
        errors = (targets - how.values(levels)).square()
        return float((errors + how.price[how.contexts.long(), levels.abs().long()]).sum())

    assert total(how.levels(targets)) <= total(plain.levels(targets)) + 64 * 64 * 2 / trellis._UNIT


def test_sides_in_another_order_are_refused() -> None:
    ordered = side_of(gram(8, 1), 8)
    assert not torch.equal(ordered.order, torch.arange(8))
    with pytest.raises(KflatsError, match="follow the order of the matrix"):
        round_with_feedback(
            normal(3, 8), side_of(None, 3), ordered, torch.ones(3), torch.ones(8), PathRounding.plain((3, 8))
        )


# The codec --------------------------------------------------------------------------------------

WEIGHTINGS = {
    "uniform": Weighting(),
    "inputs": Weighting(right=gram(96, 1)),
    "both": Weighting(left=gram(128, 2), right=gram(96, 1)),
    "few samples": Weighting(left=gram(128, 2, rank=5), right=gram(96, 1, rank=5)),
}


@pytest.mark.parametrize(("kind", "bits"), crossed(WEIGHTINGS, [1.5, 3.0, 6.0]))
def test_at_equal_bytes_paths_lose_less_and_are_left_where_they_do_not(
    kind: str, bits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("constriction")
    rows, weighting = TensorRows(normal(128, 96).float()), WEIGHTINGS[kind]
    problem = Problem(rows, int(bits * 128 * 96 / 8), 4, weighting)
    made = Feedback(damping=0.05).encode(KeepDense(), problem, torch.float32).matrix
    monkeypatch.setattr(codec, "_PATH_BITS", (math.inf, math.inf))
    grid = Feedback(damping=0.05).encode(KeepDense(), problem, torch.float32).matrix
    damped = Weighting(*(None if side is None else damp(side, 0.05) for side in (weighting.left, weighting.right)))
    share = weighted_error(rows, made, damped).error / weighted_error(rows, grid, damped).error
    assert int(encode(grid)[CONTEXT_MODEL_AT]) == STATIC
    if int(encode(made)[CONTEXT_MODEL_AT]) == STATIC:
        assert bits == 1.5
        assert torch.equal(encode(made), encode(grid))
    else:
        assert share < (1.0 if bits == 1.5 else 0.87)
