"""Rounding with error feedback: vector operations do the recursion, which loses less than rounding alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import pytest
import torch
from gaussian_bound import bound_bits
from table import crossed, slow
from torch import nn

import kflats
from kflats import SVD, Auto, Feedback, InputGram, KeepDense, KroneckerFisher, Recipe, Transform
from kflats.codecs import Table
from kflats.codecs import feedback as codec
from kflats.codecs.feedback import _Source
from kflats.codecs.streams import PATHS, STATIC, stored_bytes
from kflats.common.errors import DoesNotFitError, KflatsError
from kflats.importance.protocol import Importance, Weighting, WeightingForm
from kflats.methods.matrix_error import weighted_error
from kflats.methods.protocol import Factored, Problem
from kflats.numerics.coding.feedback import (
    MetricSide,
    Rounded,
    Rounding,
    ToRound,
    designed,
    rounded_together,
    side_of,
)
from kflats.numerics.coding.quantizers import TRADE
from kflats.numerics.coding.tables import tables_for
from kflats.numerics.coding.trellis import PATH_TRADE, PathRounding, bits_in_subset
from kflats.numerics.rows import TensorRows


def round_with_feedback(*given: Any) -> Rounded:
    """Of one matrix alone."""
    (made,) = rounded_together([ToRound(*given)])
    return made


def gram(size: int, seed: int, *, rank: int | None = None) -> torch.Tensor:
    """A Gram matrix with a falling spectrum."""
    gen = torch.Generator().manual_seed(seed)
    rows = torch.randn(rank or 2 * size, size, generator=gen, dtype=torch.float64)
    rows *= torch.linspace(2.0, 0.2, size, dtype=torch.float64)
    return rows.T @ rows / len(rows)


def damp(metric: torch.Tensor, share: float) -> torch.Tensor:
    return metric + share * metric.diagonal().mean() * torch.eye(len(metric), dtype=metric.dtype)


@pytest.mark.slow
def test_damping_keeps_errors_out_of_directions_that_data_did_not_show() -> None:
    """Grams of half as many samples as directions: what is lost under those of many samples."""
    pytest.importorskip("constriction")
    n, d = 96, 96
    rows = TensorRows(normal(n, d).float())
    few, many = (Weighting(left=gram(n, 1, rank=k), right=gram(d, 2, rank=k)) for k in (n // 2, 100 * n))
    lost = []
    for damping in (1e-4, 0.3):
        problem = Problem(rows, n * d // 3, 4, few)
        made = Feedback(damping=damping).encode(KeepDense(), problem, torch.float32)
        lost.append(weighted_error(rows, made.matrix, many).error)
    assert lost[1] < 0.5 * lost[0]


def normal(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def factor(metric: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Upper triangular, in the order of the matrix whose last entry is rounded first."""
    most_first = order.flip(0)
    return torch.linalg.cholesky(metric[most_first][:, most_first]).T


def scalar_loop(matrix, left, right, rows, columns, row_steps, column_steps, how):
    """One entry after the other, from the definition."""
    a, b = rows.order.flip(0), columns.order.flip(0)
    lower, upper = factor(left, rows.order), factor(right, columns.order)
    n, d = matrix.shape
    error, levels = torch.zeros(n, d, dtype=torch.float64), torch.zeros(n, d, dtype=torch.int16)
    for o in reversed(range(n)):
        for i in reversed(range(d)):
            row, column = int(a[o]), int(b[i])
            seen = (lower[o, o:].unsqueeze(1) * error[o:, i:] * upper[i, i:].unsqueeze(0)).sum()
            target = float(matrix[row, column] + seen / (lower[o, o] * upper[i, i]))
            step, context = float(row_steps[row] * column_steps[column]), int(how.contexts[row, column])
            u, shrink = target / step, float(how.shrink[context])
            low = max(0, int((abs(u) + shrink) // 1))
            last = how.up.shape[1] - 1
            q = low + int(abs(u) + shrink - low > float(how.up[context, min(low, last)]))
            q = q if abs(u) > float(how.live[context, min(q, last)]) else 0
            q = q if u > 0 else -q
            levels[row, column] = q
            value = (q - (q > 0) * shrink + (q < 0) * shrink) * step
            error[o, i] = matrix[row, column] - value
    return levels


def steps_of(side: MetricSide, c: float) -> torch.Tensor:
    return c / side.scale


def cost(error: torch.Tensor, left: torch.Tensor | None, right: torch.Tensor | None) -> float:
    measured = error if right is None else error @ right
    return float(((measured if left is None else left @ measured) * error).sum())


def decoded(made: Rounded, how: Rounding, row_steps: torch.Tensor, column_steps: torch.Tensor) -> torch.Tensor:
    return how.values(made.levels) * torch.outer(row_steps, column_steps)


SHAPES = [(7, 5), (4, 9), (1, 6), (6, 1), (1, 1), (8, 8)]


@pytest.mark.parametrize(("n", "d"), [*SHAPES, (40, 7), (7, 40)])
@pytest.mark.parametrize("priced", [False, True])
@pytest.mark.parametrize("block", [3, 384])
def test_blocks_and_anti_diagonals_are_the_scalar_loop(
    n: int, d: int, priced: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kflats.numerics.coding.feedback, "_BLOCK", block)
    matrix, left, right = normal(n, d), gram(n, 1), gram(d, 2)
    rows, columns = side_of(left, n), side_of(right, d)
    row_steps, column_steps = steps_of(rows, 0.7), steps_of(columns, 0.9)
    labels = torch.arange(n) % 2
    how = Rounding.plain((n, d))
    if priced:
        made = round_with_feedback(matrix, rows, columns, row_steps, column_steps, how)
        how = Rounding.priced(designed(made, labels), labels)
    made = round_with_feedback(matrix, rows, columns, row_steps, column_steps, how)
    expected = scalar_loop(matrix, left, right, rows, columns, row_steps, column_steps, how)
    assert torch.equal(made.levels, expected)


@pytest.mark.parametrize("block", [3, 384])
def test_matrices_that_are_rounded_together_are_those_rounded_alone(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, in any company: of their shape with other distributions, of another one, along paths, not coupled."""
    for name in ("_BLOCK", "PATH_BLOCK"):
        monkeypatch.setattr(kflats.numerics.coding.feedback, name, block)
    given = []
    for seed, (n, d, coupled, paths, priced) in enumerate(
        [
            (8, 10, "both", False, False),
            (8, 10, "both", True, True),
            (8, 10, "both", False, True),
            (8, 10, "right", True, False),
            (8, 10, "both", True, True),
            (8, 10, "both", False, True),
            (8, 10, "right", True, True),
            (8, 10, "right", True, True),
            (7, 10, "both", False, True),
            (8, 10, "none", False, True),
            (8, 10, "left", False, True),
            (8, 10, "right", False, True),
        ]
    ):
        matrix, labels = normal(n, d, seed).float(), torch.arange(n) % 2
        rows = side_of(gram(n, seed + 20) if coupled in ("both", "left") else None, n, ordered=not paths)
        columns = side_of(gram(d, seed + 40) if coupled in ("both", "right") else None, d, ordered=not paths)
        steps = steps_of(rows, 0.5 + 0.1 * seed), steps_of(columns, 0.9)
        kind = PathRounding if paths else Rounding
        how: Rounding | PathRounding = kind.plain((n, d))
        if priced:
            how = kind.priced(designed(round_with_feedback(matrix, rows, columns, *steps, how), labels), labels)
        given.append(ToRound(matrix, rows, columns, *steps, how))
    for one, made in zip(given, rounded_together(given), strict=True):
        alone = round_with_feedback(one.matrix, one.rows, one.columns, one.row_steps, one.column_steps, one.how)
        assert torch.equal(made.levels, alone.levels)
        assert torch.equal(made.targets, alone.targets)
    assert rounded_together([]) == []


@pytest.mark.slow
def test_matrices_that_are_encoded_together_are_those_encoded_alone() -> None:
    """To the byte, whatever each one's budget asks for: three ways on the grid, one, paths, both, or a search that ends
    sooner."""
    pytest.importorskip("constriction")
    n, d = 64, 48
    problems = [
        Problem(TensorRows(normal(n, d, seed).float()), round(bits * n * d / 8), 4, Weighting(left, right))
        for seed, (bits, left, right) in enumerate(
            [
                (0.7, gram(n, 8), gram(d, 9)),
                (1.2, gram(n, 1), gram(d, 2)),
                (2.0, gram(n, 3), gram(d, 4)),
                (4.0, gram(n, 5), gram(d, 6)),
                (6.0, gram(n, 7), None),
                (3.0, None, None),
            ]
        )
    ]
    together = Feedback().encode_together(KeepDense(), problems, torch.float32)
    for problem, made in zip(problems, together, strict=True):
        alone = Feedback().encode(KeepDense(), problem, torch.float32)
        assert made.nbytes == alone.nbytes <= problem.nbytes
        assert torch.equal(made.matrix.dense(), alone.matrix.dense())


@pytest.mark.parametrize(("bits", "sources"), [(4.0, 3), (0.7, 1)])
def test_what_a_search_made_is_gone_when_the_next_begins(
    bits: float, sources: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Factors of Gram matrices may be most of the memory: at a time there are those of one source for each matrix."""
    pytest.importorskip("constriction")
    alive: list[tuple[int, int]] = []
    made_of, rounded = _Source.of.__func__, kflats.codecs.feedback.rounded_together

    def count() -> tuple[int, int]:
        kinds = [type(one) for one in gc.get_objects()]
        return kinds.count(_Source), kinds.count(ToRound)

    def source_of(cls: Any, *args: Any, **named: Any) -> _Source:
        alive.append(count())
        return made_of(cls, *args, **named)

    def rounding(given: list[ToRound]) -> list[Rounded]:
        assert count() == (len(given), len(given))
        return rounded(given)

    gc.collect()
    monkeypatch.setattr(_Source, "of", classmethod(source_of))
    monkeypatch.setattr(kflats.codecs.feedback, "rounded_together", rounding)
    monkeypatch.setattr(kflats.codecs.feedback, "_CLEARLY", 0.0)  # the grid is tried again after the paths
    n, d = 64, 48
    problem = Problem(TensorRows(normal(n, d).float()), int(bits * n * d / 8), 4, Weighting(gram(n, 1), gram(d, 2)))
    Feedback().encode(KeepDense(), problem, torch.float32)
    assert alive == [(0, 0)] * sources


def test_large_matrices_are_encoded_one_at_a_time() -> None:
    codec = Feedback()
    assert codec.together((384, 384)) > 1
    assert codec.together((4096, 4096)) == codec.together((8, 50_000)) == 1


@pytest.mark.parametrize(("n", "d"), SHAPES)
@pytest.mark.parametrize("sides", ["left", "right", "none", "weights"])
@pytest.mark.parametrize("block", [3, 384])
def test_a_side_without_couplings_is_the_same_recursion(
    n: int, d: int, sides: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kflats.numerics.coding.feedback, "_BLOCK", block)
    weights = torch.linspace(0.5, 2.0, n, dtype=torch.float64)
    left = gram(n, 1) if sides == "left" else weights.diag() if sides == "weights" else torch.eye(n).double()
    right = gram(d, 2) if sides in ("right", "weights") else torch.eye(d).double()
    matrix, how = normal(n, d), Rounding.plain((n, d))
    rows = side_of(weights if sides == "weights" else left if sides == "left" else None, n)
    columns = side_of(right if sides in ("right", "weights") else None, d)
    row_steps, column_steps = steps_of(rows, 0.7), steps_of(columns, 0.9)
    made = round_with_feedback(matrix, rows, columns, row_steps, column_steps, how)
    expected = scalar_loop(matrix, left, right, rows, columns, row_steps, column_steps, how)
    assert torch.equal(made.levels, expected)


def test_the_error_is_that_of_the_targets_and_bounded_by_the_steps() -> None:
    n, d = 12, 20
    matrix, left, right = normal(n, d), gram(n, 1), gram(d, 2)
    rows, columns, how = side_of(left, n), side_of(right, d), Rounding.plain((n, d))
    row_steps, column_steps = steps_of(rows, 0.7), torch.linspace(0.1, 3.0, d).double()
    made = round_with_feedback(matrix, rows, columns, row_steps, column_steps, how)
    sizes = torch.outer(row_steps * rows.scale, column_steps * columns.scale)
    by_targets = float((sizes * (made.targets - made.levels)).square().sum())
    error = matrix - decoded(made, how, row_steps, column_steps)
    assert cost(error, left, right) == pytest.approx(by_targets, rel=1e-9)
    alone = round_with_feedback(matrix, side_of(None, n), columns, torch.ones(n), column_steps, how)
    error = matrix - decoded(alone, how, torch.ones(n).double(), column_steps)
    bound = float((columns.scale * column_steps).square().sum()) / 4
    for row in error:
        assert float(row @ right @ row) <= bound * (1 + 1e-9)


def test_it_loses_less_than_rounding_alone_and_the_same_where_nothing_is_coupled() -> None:
    with_feedback = without = 0.0
    for seed in range(100):
        matrix, left, right = normal(6, 10, seed), gram(6, seed + 1), gram(10, seed + 2)
        how, steps = Rounding.plain((6, 10)), (torch.full((6,), 0.5).double(), torch.ones(10).double())
        made = round_with_feedback(matrix, side_of(left, 6), side_of(right, 10), *steps, how)
        nearest = (matrix / 0.5).round() * 0.5
        with_feedback += cost(matrix - decoded(made, how, *steps), left, right)
        without += cost(matrix - nearest, left, right)
        apart = round_with_feedback(matrix, side_of(left.diag(), 6), side_of(right.diag().diag(), 10), *steps, how)
        assert torch.equal(decoded(apart, how, *steps), nearest)
    assert with_feedback < 0.85 * without


@pytest.mark.parametrize("c", [0.3, 1.0, 3.0])
def test_priced_rounding_is_never_worse_than_the_nearest_symbol(c: float) -> None:
    n, d = 60, 40
    matrix, labels = normal(n, d), torch.arange(n) % 3
    rows, columns = side_of(gram(n, 1), n), side_of(gram(d, 2), d)
    steps = steps_of(rows, c), steps_of(columns, 1.0)
    made = round_with_feedback(matrix, rows, columns, *steps, Rounding.plain((n, d), 0.6))
    quantizer = designed(made, labels)
    how = Rounding.priced(quantizer, labels)
    made = round_with_feedback(matrix, rows, columns, *steps, how)
    u, q = made.targets.abs(), made.levels.abs().to(torch.int64)
    prices, shrink = quantizer.tables.bits[how.contexts.long()], how.shrink.double()[how.contexts.long()]
    reach = quantizer.tables.reach.to(torch.int64)[how.contexts.long()]

    def objective(levels: torch.Tensor) -> torch.Tensor:
        paid = prices.gather(2, torch.minimum(levels, reach).unsqueeze(2)).squeeze(2)
        return (u - (levels - shrink * (levels > 0))).square() + TRADE * paid

    for other in (u.round().to(torch.int64), torch.zeros_like(q), q + 1, (q - 1).clamp_min(0)):
        assert bool((objective(q) <= objective(other) + 1e-6).all())
    assert float(objective(q).sum()) < float(objective(u.round().to(torch.int64)).sum())


@pytest.mark.parametrize("rank", [1, 3, 9])
def test_grams_that_do_not_reach_all_directions(rank: int) -> None:
    n, d = 9, 10
    matrix, left, right = normal(n, d), gram(n, 1, rank=rank), gram(d, 2, rank=rank)
    right[4] = right[:, 4] = 0.0  # a dead input
    rows, columns = side_of(left, n), side_of(right, d)
    made = round_with_feedback(
        matrix, rows, columns, torch.ones(n), torch.full((d,), 0.01), how := Rounding.plain((n, d))
    )
    left_over = matrix - decoded(made, how, torch.ones(n).double(), torch.full((d,), 0.01).double())
    assert cost(left_over, left, right) < 1e-3 * cost(matrix, left, right)


def test_a_gram_of_zeros_is_the_identity() -> None:
    assert torch.equal(side_of(torch.zeros(4, 4), 4).scale, torch.ones(4).double())
    assert side_of(torch.zeros(4), 4).couplings is None


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (torch.full((3, 3), float("nan")), "holds NaN"),
        (-torch.eye(3), "negative diagonal"),
        (torch.tensor([[1.0, 2.0], [2.0, 1.0]]), "no Gram matrix"),
    ],
)
def test_metrics_that_are_none_are_refused(metric: torch.Tensor, said: str) -> None:
    with pytest.raises(KflatsError, match=said):
        side_of(metric, len(metric))


@pytest.mark.parametrize("value", [1e6, float("nan"), float("inf")])
def test_what_cannot_be_coded_is_limited_or_refused(value: float) -> None:
    matrix, columns, how = torch.ones(2, 3), side_of(gram(3, 1), 3), Rounding.plain((2, 3))
    matrix[1, 1] = value
    if value == 1e6:
        made = round_with_feedback(matrix, side_of(None, 2), columns, torch.ones(2), torch.ones(3), how)
        assert made.levels.abs().max() == 16383
        return
    with pytest.raises(KflatsError, match="NaN or infinity"):
        round_with_feedback(matrix, side_of(None, 2), columns, torch.ones(2), torch.ones(3), how)


# The codec --------------------------------------------------------------------------------------


def coded(matrix: torch.Tensor, bits: float, weighting: Weighting, recipe: Recipe, dtype=torch.float32):
    nbytes = int(bits * matrix.numel() / 8)
    made = recipe.encode(Problem(TensorRows(matrix), nbytes, dtype.itemsize, weighting), dtype)
    assert made.nbytes == stored_bytes(made.matrix) <= nbytes
    return made, weighted_error(matrix, made.matrix, weighting).relative


FEEDBACK = Recipe(KeepDense(), codec=Feedback())


@pytest.mark.parametrize(("bits", "sides"), crossed([1.5, 3.0], ["both", "left", "right"]))
def test_in_equal_bytes_it_loses_less_than_axes(bits: float, sides: str) -> None:
    pytest.importorskip("constriction")
    n, d = 96, 80
    weighting = Weighting(left=None if sides == "right" else gram(n, 1), right=None if sides == "left" else gram(d, 2))
    matrix = normal(n, d).float()
    _, ours = coded(matrix, bits, weighting, FEEDBACK)
    _, axes = coded(matrix, bits, weighting, Recipe(SVD(), codec=Transform()))
    assert ours < 0.7 * axes


Search = Callable[..., Generator[ToRound, Rounded, Any]]


def few_bits(n: int, d: int, bits: float, seed: int = 1) -> Problem:
    """Under the damped Gram of the columns, so that a codec without damping minimises the weighted error itself."""
    weighting = Weighting(right=damp(gram(d, seed), 0.2))
    return Problem(TensorRows(normal(n, d).float()), int(bits * n * d / 8), 4, weighting)


def test_of_few_bits_the_best_of_three_codes_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the second prices, by the first ones, or to the nearest."""
    pytest.importorskip("constriction")
    search: Search = codec._at_size
    least, found = 0, list[Any]()

    def seen(*given: Any) -> Generator[ToRound, Rounded, Any]:
        code = yield from search(*given)
        found.append(replace(code, error=0.0) if len(found) == least else code)
        return found[-1]

    def encoded(problem: Problem) -> Factored:
        found.clear()
        return Feedback(damping=0.0).encode(KeepDense(), problem, torch.float32)

    monkeypatch.setattr(codec, "_at_size", seen)
    problem = few_bits(64, 96, 0.5)
    for least in range(3):
        made = encoded(problem)
        assert made is found[least].stored
        assert len({code.stored.matrix.checksum() for code in found}) == 3
    least = 3  # none is pretended
    made, errors = encoded(problem), [code.error for code in found]
    assert made is found[errors.index(min(errors))].stored
    assert weighted_error(problem.rows, made.matrix, problem.weighting).error == pytest.approx(min(errors), rel=1e-3)
    assert min(errors) < 0.99 * errors[0]
    encoded(few_bits(160, 128, 0.8))
    assert len(found) == 1


@pytest.mark.parametrize(("n", "d", "bits"), [(64, 96, 0.8), (16, 64, 3.0), (48, 40, 4.0)])
def test_a_small_matrix_never_loses_more_than_rounded_to_the_nearest(
    n: int, d: int, bits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same bytes, on grids and on paths: the nearest integers are kept otherwise."""
    pytest.importorskip("constriction")
    search: Search = codec._at_size
    found, nearest = list[Any](), list[Any]()
    worse = 1.0

    def seen(*given: Any) -> Generator[ToRound, Rounded, Any]:
        code = yield from search(*given)
        if given[-1].keywords in ({"times": 0}, {"priced": False}):
            nearest.append(code)
        else:
            code = replace(code, error=worse * code.error)
        found.append(code)
        return code

    monkeypatch.setattr(codec, "_at_size", seen)
    for worse in (1.0, 1e6, 1e-6):
        found.clear()
        nearest.clear()
        made = Feedback().encode(KeepDense(), few_bits(n, d, bits), torch.float32)
        best = min(found, key=lambda code: code.error)
        assert made is best.stored
        assert nearest
        if worse != 1.0:
            assert (best in nearest) == (worse > 1)


@pytest.mark.parametrize(
    ("paths", "c", "most"),
    [
        (False, 2.0, 1.0),
        (False, 1.0, 1.0),
        (False, 0.5, 1.005),
        (True, 1.0, 1.0),
        (True, 0.3, 1.0),
        (True, 0.1, 1.005),
    ],
)
def test_prices_pay(paths: bool, c: float, most: float) -> None:
    """Error and bits together, by the trade that prices were made for, against the nearest symbols in equal steps: of
    matrices that are rounded by prices alone. A grid is kept at most up to 2.3 bits; c = .3 are 3 bits on paths."""
    n, d = 132, 128
    assert n * d > codec._SMALL_MATRIX
    labels = torch.zeros(n, dtype=torch.int64)
    kind, trade = (PathRounding, PATH_TRADE) if paths else (Rounding, TRADE)
    rows, columns = side_of(gram(n, 1), n, 0.2, ordered=not paths), side_of(gram(d, 2), d, 0.2, ordered=not paths)
    matrix, steps = normal(n, d).float(), (steps_of(rows, c), steps_of(columns, 1.0))
    likely = matrix / torch.outer(*steps).float()
    first = Rounding.plain((n, d), 0.5 if paths else 0.6)
    quantizer = designed(Rounded(first.levels(likely), likely), labels)
    if not paths:
        how = Rounding.priced(quantizer, labels)
        quantizer = designed(Rounded(how.levels(likely), likely), labels)
    costs = []
    for how in (kind.priced(quantizer, labels), kind.nearest(quantizer, labels)):
        made, contexts = round_with_feedback(matrix, rows, columns, *steps, how), how.contexts.long()
        tables = tables_for(made.levels, contexts, len(how.shrink))
        bits = bits_in_subset(tables) + 1 if paths else tables.bits
        error = float((made.targets - how.values(made.levels)).square().sum())
        costs.append(error + trade * float(bits[contexts, made.levels.abs().long()].sum()))
    assert costs[0] < most * costs[1]


def test_a_budget_that_one_way_cannot_meet_goes_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("constriction")
    search: Search = codec._at_size
    refused = DoesNotFitError("no", cause="none")
    calls, failing = list[Any](), 0

    def first_fails(*given: Any) -> Generator[ToRound, Rounded, Any]:
        calls.append(given)
        if len(calls) <= failing:
            raise refused
        return (yield from search(*given))

    monkeypatch.setattr(codec, "_at_size", first_fails)
    problem = few_bits(64, 64, 0.5)
    for one in (1, 2):
        calls, failing = [], one
        assert Feedback().encode(KeepDense(), problem, torch.float32).nbytes <= problem.nbytes
        assert len(calls) == 3
    calls, failing = [], 3
    with pytest.raises(DoesNotFitError) as raised:
        Feedback().encode(KeepDense(), problem, torch.float32)
    assert raised.value is refused


def test_the_nearest_integers_with_the_values_of_a_quantizer() -> None:
    targets, labels = 3 * normal(40, 30).float(), torch.arange(40) % 2
    plain = Rounding.plain((40, 30))
    quantizer = designed(Rounded(plain.levels(targets), targets), labels)
    nearest = Rounding.nearest(quantizer, labels)
    assert bool((quantizer.shrink > 0).any())
    assert torch.equal(nearest.levels(targets), targets.round().to(torch.int16))
    error, without = ((targets - how.values(how.levels(targets))).square().sum() for how in (nearest, plain))
    assert error < without


@pytest.mark.parametrize("bits", [2.0, *(pytest.param(bits, marks=slow) for bits in (3.0, 4.0, 6.0))])
def test_gaussian_numbers_are_near_the_bound(bits: float) -> None:
    pytest.importorskip("constriction")
    n, d = 512, 256
    turn = torch.linalg.qr(normal(d, d, 1)).Q
    spectrum = torch.logspace(0, -1, d, dtype=torch.float64)
    weighting = Weighting(right=turn * spectrum @ turn.T)
    made, lost = coded(normal(n, d).float(), bits, weighting, FEEDBACK)
    used = 8 * made.nbytes / (n * d)
    assert used - bound_bits(spectrum, lost) < 0.33


@pytest.mark.parametrize(("dtype", "damping"), crossed([torch.float32, torch.float16, torch.bfloat16], [0.0, 0.5]))
def test_candidates_lose_what_they_say(dtype: torch.dtype, damping: float) -> None:
    """Under the damped Grams, of which they speak."""
    pytest.importorskip("constriction")
    codec = Feedback(damping=damping)
    n, d = 48, 64
    matrix, weighting = normal(n, d).to(dtype), Weighting(left=1e-6 * gram(n, 1), right=gram(d, 2))
    rows = TensorRows(matrix.float())
    table = Table(rows, weighting, dtype, SVD().spectrum(rows, weighting))
    found = sorted(codec.candidates(KeepDense(), table), key=lambda one: one.nbytes)
    assert len(found) > 10
    assert [one.error for one in found] == sorted((one.error for one in found), reverse=True)
    for one in found[len(found) // 4 :: len(found) // 4]:
        made = codec.encode(KeepDense(), Problem(rows, one.nbytes, dtype.itemsize, weighting), dtype)
        damped = Weighting(left=damp(weighting.left, damping), right=damp(weighting.right, damping))
        error = weighted_error(matrix.float(), made.matrix, damped).error
        assert 0.75 * one.error < error < 1.2 * one.error


@pytest.mark.parametrize(
    ("form", "shape", "offered"),
    [
        (WeightingForm("identity", "diagonal"), (96, 128), {"Transform"}),
        (WeightingForm("full", "full"), (96, 128), {"Feedback"}),
        (WeightingForm("full", "full"), (2, 768), {"Feedback"}),
        (WeightingForm("identity", "full"), (96, 128), {"Feedback", "Transform"}),
        (WeightingForm("diagonal", "full"), (9600, 128), {"Transform"}),
        (WeightingForm(), (96, 128), {"Feedback", "Transform"}),
        (WeightingForm(), (9600, 128), {"Transform"}),
    ],
)
def test_who_is_offered_feedback(form: WeightingForm, shape: tuple[int, int], offered: set[str]) -> None:
    offers = [*Feedback.automatic(shape, form), *Transform.automatic(shape, form)]
    assert {type(codec).__name__ for _, codec in offers} == offered


def test_without_data_a_square_layer_is_not_coded_in_axes_that_cost_more_than_they_save() -> None:
    """At the same bytes; ``Auto()`` finds it."""
    pytest.importorskip("constriction")
    lost = {}
    for name, method in (("auto", Auto()), ("axes", Recipe(SVD(), codec=Transform()))):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256)).requires_grad_(False)
        report = kflats.compress_(model, {"linear": method}, keep="16%", quiet=True)
        lost[name] = report.weights[0].error
        assert report.bytes_after <= 0.16 * report.bytes_before
    assert lost["auto"] < 0.3 * lost["axes"]


@pytest.mark.parametrize(("matrix_rows", "bias"), crossed(["in_features", "out_features"], [True, False]))
def test_a_calibrated_layer_is_coded_saved_and_loaded(matrix_rows, bias: bool, tmp_path) -> None:
    pytest.importorskip("constriction")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48, bias=bias))
    mixing = torch.randn(64, 64)
    batches = [{"input": torch.randn(16, 64) @ mixing + 3.0} for _ in range(8)]
    x, lost = batches[0]["input"], {}
    model.requires_grad_(False)
    expected = model(x)
    for recipe in (FEEDBACK, Recipe(SVD(), codec=Transform())):
        small = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48, bias=bias))
        small.load_state_dict(model.state_dict())
        asked = Recipe(recipe.method, KroneckerFisher(), recipe.codec, matrix_rows)
        report = kflats.compress_(small, {"linear": asked}, keep="14%", calibration=batches, quiet=True)
        assert report.bytes_after <= 0.14 * report.bytes_before
        lost[recipe] = float((small(x) - expected).detach().square().mean())
        kflats.save(small, tmp_path / type(recipe.codec).__name__)
        fresh = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48, bias=bias))
        kflats.load_(fresh, tmp_path / type(recipe.codec).__name__)
        assert torch.equal(fresh(x), small(x))
    assert lost[FEEDBACK] < 0.5 * lost[Recipe(SVD(), codec=Transform())]


def test_a_layer_of_gpt2s_kind_is_coded_as_the_linear_layer_of_its_matrix() -> None:
    pytest.importorskip("constriction")
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    x, lost = normal(64, 48).float() + 1.0, []
    models = [nn.Sequential(layer).requires_grad_(False) for layer in (nn.Linear(48, 40), conv1d(40, 48))]
    models[1][0].weight.copy_(models[0][0].weight.T)
    models[1][0].bias.copy_(models[0][0].bias)
    expected = models[0](x)
    asked = {"linear": Recipe(KeepDense(), KroneckerFisher(), Feedback())}
    for model in models:
        kflats.compress_(model, asked, keep="30%", calibration=[{"input": x}], quiet=True)
        lost.append(float((model(x) - expected).norm()))
    assert 0 < lost[1] < 1.2 * lost[0] < 0.01 * float(expected.norm())
    decoded = models[1][0].matrix.dense()
    kflats.restore_(models[1])
    assert type(models[1][0]) is conv1d
    assert torch.equal(models[1][0].weight, decoded)


@pytest.mark.parametrize("importance", [KroneckerFisher(), InputGram()])
def test_a_single_token_calibrates(importance: Importance) -> None:
    """All other directions of inputs count by the damping alone, and are not lost."""
    pytest.importorskip("constriction")
    model = nn.Sequential(nn.Linear(64, 96)).requires_grad_(False)
    token, others = normal(1, 64).float(), normal(50, 64, 1).float()
    expected = model(token), model(others)
    asked = {"linear": Recipe(KeepDense(), importance, Feedback())}
    kflats.compress_(model, asked, keep="20%", calibration=[{"input": token}], quiet=True)
    for x, outputs, most in zip((token, others), expected, (1e-4, 0.05), strict=True):
        assert float((model(x) - outputs).norm()) < most * float(outputs.norm())


def test_inputs_that_are_not_finite_name_their_layer() -> None:
    model = nn.Sequential()
    model.add_module("layer", nn.Linear(8, 8))
    x = normal(4, 8).float()
    x[2, 3] = float("nan")
    asked = Recipe(KeepDense(), InputGram(), Feedback())
    with pytest.raises(KflatsError, match="the input gram of layer holds NaN or infinity"):
        kflats.compress_(model, {"linear": asked}, keep="90%", calibration=[{"input": x}], quiet=True)


@pytest.mark.parametrize("normalised", [True, False])
def test_inputs_with_a_mean_far_from_zero(normalised: bool) -> None:
    """They vary by a thousandth of it. Without normalisation all outputs are 0 or 1 after a softmax, and no gradient is
    left."""
    pytest.importorskip("constriction")
    layers = [nn.LayerNorm(64), nn.Linear(64, 96)] if normalised else [nn.Linear(64, 96)]
    model = nn.Sequential(*layers).requires_grad_(False)
    x = normal(64, 64).float() + 1e3
    asked = {"linear": Recipe(KeepDense(), KroneckerFisher(), Feedback())}
    if not normalised:
        with pytest.raises(DoesNotFitError, match="does not reach it, or no loss depends on it"):
            kflats.compress_(model, asked, keep="20%", calibration=[{"input": x}], quiet=True)
        return
    expected = model(x)
    kflats.compress_(model, asked, keep="20%", calibration=[{"input": x}], quiet=True)
    assert float((model(x) - expected).norm()) < 0.1 * float((expected - expected.mean(0)).norm())


@pytest.mark.parametrize(("budget", "offset"), crossed([("5%", False), ("14%", True)], [0.0, 1e4]))
def test_a_calibrated_layer_on_a_grid_is_exact_where_the_bits_allow(budget: tuple[str, bool], offset: float) -> None:
    keep, exact = budget
    """Weights of 15 levels; inputs around zero, or around one mean that is 10,000 times as large as they vary."""
    pytest.importorskip("constriction")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(192, 256)).requires_grad_(False)
    levels = torch.randint(-7, 8, model[0].weight.shape).to(torch.float32)
    model[0].weight.copy_(0.02 * levels)
    mean = offset * torch.randn(192)
    batches = [{"input": torch.randn(32, 192) + mean} for _ in range(4)]
    asked = {"linear": Recipe(Auto(), InputGram())}
    report = kflats.compress_(model, asked, keep=keep, calibration=batches, quiet=True)
    assert report.weights[0].error < (1e-9 if exact else 0.2)
    assert torch.equal((model[0].matrix.dense() / 0.02).round(), levels.T) == exact


def planted(n: int, d: int) -> tuple[torch.Tensor, Weighting, torch.Tensor]:
    """A matrix (n, d), Grams of both sides, and the quarter of columns that count nothing."""
    dead, right = torch.arange(d) % 4 == 1, gram(d, 2)
    right[dead] = right[:, dead] = 0.0
    return normal(n, d).float(), Weighting(left=gram(n, 1), right=right), dead


@pytest.mark.parametrize(("paths", "side", "sides"), crossed([True, False], ["columns", "rows"], ["both", "one"]))
def test_dead_inputs_are_zeros_and_take_next_to_no_bytes(
    paths: bool, side: str, sides: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In equal bytes about as much is lost as if the matrix had only the live ones, which are coded the same."""
    pytest.importorskip("constriction")
    matrix, weighting, dead = planted(128, 96)
    live = (~dead).nonzero().squeeze(1)
    if sides == "one":
        weighting = replace(weighting, left=None)
    alone = replace(weighting, right=weighting.right[live][:, live])
    inside = matrix[:, live].contiguous()
    if side == "rows":
        matrix, inside, weighting, alone = (
            matrix.T.contiguous(),
            inside.T.contiguous(),
            *(each.transposed() for each in (weighting, alone)),
        )
    if not paths:
        monkeypatch.setattr(codec, "_PATH_BITS", (99.0, 99.0))
    made, lost = coded(matrix, 3.0, weighting, FEEDBACK)
    _, least = coded(inside, 3.0 * matrix.numel() / inside.numel(), alone, FEEDBACK)
    dense = made.matrix.dense()
    zeros = (dense == 0).all(0 if side == "columns" else 1)
    assert torch.equal(zeros, dead)
    assert lost < 1.2 * least
    assert int(made.stream[13]) == (PATHS if paths else STATIC)


def test_dead_inputs_do_not_change_what_others_become() -> None:
    matrix, weighting, dead = planted(64, 48)
    found = []
    for scale in (0.0, 1e3):
        source = _Source.of(TensorRows(torch.where(dead, scale * matrix, matrix)), weighting, 0.2)
        how = source.rounding(source.likely(0.3, torch.float32), torch.float32)
        (made,) = rounded_together([source.to_round(0.3, torch.float32, how)])
        found.append(source.code(0.3, torch.float32, how, made).stored.matrix.dense())
    assert torch.equal(*found)
    assert not found[0][:, dead].any()


@pytest.mark.parametrize("side", ["columns", "rows"])
def test_an_input_that_is_damped_and_alone_is_coded_where_bits_are_left(side: str) -> None:
    """An importance may say that inputs which the data never had count a little."""
    pytest.importorskip("constriction")
    matrix, weighting, dead = planted(64, 48)
    weighting = replace(weighting, right=damp(weighting.right, 1e-3))
    if side == "rows":
        matrix, weighting = matrix.T.contiguous(), weighting.transposed()
    few, many = (coded(matrix, bits, weighting, FEEDBACK)[0].matrix.dense() for bits in (2.5, 8.0))
    if side == "rows":
        matrix, few, many = matrix.T, few.T, many.T
    assert not few[:, dead].any()
    assert bool(few[:, ~dead].any(0).all())
    left_over = (matrix - many)[:, dead].square().sum() / matrix[:, dead].square().sum()
    assert 1e-4 < left_over < 0.1


def test_what_counts_nothing_at_all_is_coded_as_without_a_gram() -> None:
    pytest.importorskip("constriction")
    matrix = normal(40, 33).float()
    streams = [
        coded(matrix, 3.0, weighting, FEEDBACK)[0].stream
        for weighting in (Weighting(), Weighting(left=torch.zeros(40, 40), right=torch.zeros(33)))
    ]
    assert torch.equal(*streams)


@pytest.mark.parametrize(("matrix_rows", "damping"), crossed(["in_features", "out_features"], [0.0, 1e-3]))
def test_a_layer_behind_dead_units_is_coded_saved_and_loaded(matrix_rows, damping: float, tmp_path) -> None:
    """Units that are 0 on all data: as inputs of one layer, and as outputs that no loss depends on."""
    pytest.importorskip("constriction")

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 56), nn.ReLU(), nn.Linear(56, 8))
        with torch.no_grad():
            made[0].bias[:20], made[2].bias[5:15] = -100.0, -100.0
        return made.requires_grad_(False)

    batches = [{"input": torch.randn(32, 40)} for _ in range(6)]
    model, x = network(), batches[0]["input"]
    expected = model(x)
    asked = Recipe(KeepDense(), KroneckerFisher(damping=damping), Feedback(), matrix_rows)
    kflats.compress_(model, {"2": asked}, keep="10%", calibration=batches, quiet=True)
    dense = model[2].matrix.dense()
    dense = dense.T if matrix_rows == "in_features" else dense  # (outputs, inputs)
    assert (dense == 0).all(0).nonzero().flatten().tolist() == list(range(20))
    assert (dense == 0).all(1).nonzero().flatten().tolist() == list(range(5, 15))
    assert float((model(x) - expected).square().mean()) < 1e-3 * float(expected.square().mean())
    kflats.save(model, tmp_path / "small")
    kflats.load_(fresh := network(), tmp_path / "small")
    assert torch.equal(fresh(x), model(x))


@pytest.mark.parametrize("rank", [1, 5])
def test_few_samples_and_dead_inputs_are_coded(rank: int) -> None:
    pytest.importorskip("constriction")
    n, d = 64, 80
    left, right = gram(n, 1, rank=rank), gram(d, 2, rank=rank)
    right[7] = right[:, 7] = 0.0
    matrix = normal(n, d).float()
    matrix[:, 7] *= 1e4
    _, lost = coded(matrix, 2.0, Weighting(left=left, right=right), FEEDBACK)
    assert lost < 0.02
