"""What holds for every method: within the bytes and close to them, reproducible, clear about bad input."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kflats_toys import SketchedSVD
from table import METHODS, QUICK_METHODS, each_method
from torch.utils._python_dispatch import TorchDispatchMode

from kflats.codecs import Transform
from kflats.common.errors import KflatsError
from kflats.importance.protocol import Weighting
from kflats.matrices.registry import FlatsMatrix, InterpolativeMatrix, LowRankMatrix
from kflats.methods import (
    MESSI,
    SVD,
    Entrywise,
    Flats,
    KeepDense,
    KMeansSVD,
    Method,
    Problem,
    RobustSVD,
    Subspace,
    from_name,
)
from kflats.methods.matrix_error import norm_error, row_errors
from kflats.numerics.loss import Huber
from kflats.numerics.rows import TensorRows
from kflats.recipe.recipe import from_json, to_json

F64 = torch.float64
PAIRS = (SVD, RobustSVD, Entrywise, Subspace, SketchedSVD)
"""Methods of one flat, stored as two factors."""

EVERY = each_method()
EACH_FIT = each_method(quick=QUICK_METHODS - {"flats, searched"})
"""For laws that hold of a search over fits because they hold of each fit."""
KINDS = ("gauss", "low rank", "duplicates", "zeros", "zero rows", "wild norms")


def table(kind, n, d, seed):
    gen = torch.Generator().manual_seed(seed)
    a = torch.randn(n, d, generator=gen)
    if kind == "low rank":
        return a[:, :1] @ torch.randn(1, d, generator=gen)
    if kind == "duplicates":
        return a[torch.randint(0, max(1, n // 10), (n,), generator=gen)]
    if kind == "zeros":
        return a * 0
    if kind == "zero rows":
        return a * (torch.arange(n) % 2)[:, None]
    if kind == "wild norms":
        return a * torch.logspace(-3, 3, n)[:, None]
    return a


class Largest(TorchDispatchMode):
    """``numbers``: of the largest tensor that an operation returns inside."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, torch.Tensor):
                self.numbers = max(self.numbers, one.untyped_storage().nbytes() // one.element_size())
        return made


@EVERY
@pytest.mark.parametrize("weighted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_of_few_rows_no_matrix_of_all_pairs_of_columns_is_made(method, weighted):
    """A layer of 4,096 inputs and 128,000 outputs would need 131 GB for one."""
    n, d = 24, 900
    with Largest() as largest:
        solve(method, table("gauss", n, d, 0), 4 * 9 * d, weights=torch.rand(n) + 0.1 if weighted else None)
    assert largest.numbers <= 12 * n * d < d * d / 3


def test_codes_of_few_rows_in_several_flats_need_none_either():
    pytest.importorskip("constriction")
    n, d = 24, 900
    problem = Problem(TensorRows(table("gauss", n, d, 0)), 3 * n * d // 8, 4)
    with Largest() as largest:
        Transform().encode(Flats(k=3), problem, torch.float32)
    assert largest.numbers <= 12 * n * d < d * d / 3


def solve(method, a, nbytes, *, weights=None, seed=0, itemsize=4, **options):
    return method.fit(Problem(TensorRows(a), nbytes, itemsize, Weighting(left=weights), seed=seed, **options))


def least_bytes(method, n, d, itemsize=4):
    """Bytes of rank 1 everywhere, labels or the order of columns included."""
    if isinstance(method, SVD) and method.form == "interpolative":
        return (n + d - 1) * itemsize + 2 * d
    k = getattr(method, "k", 1) or 1
    labels = 0 if isinstance(method, PAIRS) or (k == 1 and not getattr(method, "exact", False)) else n
    if isinstance(method, Flats) and method.ranks == "uniform" and k == 1:
        labels = 0
    return (n + k * d) * itemsize + labels


def cheapest_step(matrix, method, itemsize):
    """Bytes of the cheapest coordinate that could still be added, None where nothing is left to add."""
    n, d = matrix.shape
    if isinstance(matrix, InterpolativeMatrix):
        rank = matrix.weight.shape[1]
        return None if rank >= min(n, d) else (n + d - 2 * rank - 1) * itemsize
    if isinstance(matrix, LowRankMatrix):
        return None if matrix.basis.shape[0] >= min(n, d) else (n + d) * itemsize
    costs = [
        sum(band.rows for band in matrix.bands if band.flat == flat) + d
        for flat, rank in enumerate(matrix.flat_ranks)
        if rank < min(n, d)
    ]
    if not costs:
        return None
    uniform = isinstance(method, KMeansSVD) or method.ranks == "uniform"
    return (sum(costs) if uniform else min(costs)) * itemsize


@EVERY
@settings(max_examples=15)
@given(
    n=st.integers(4, 70),
    d=st.integers(1, 10),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    share=st.floats(0, 1),
    weighted=st.booleans(),
    free=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_bytes_are_never_exceeded_and_short_by_less_than_a_step(method, n, d, kind, dtype, share, weighted, free, seed):
    a = table(kind, n, d, seed).to(dtype)
    w = torch.rand(n, dtype=F64) ** 4 + 1e-6 if weighted else None
    least = least_bytes(method, n, d, dtype.itemsize)
    nbytes = int(least + share * max(n * d * dtype.itemsize - least, 0))
    made = solve(method, a, nbytes, weights=w, itemsize=dtype.itemsize, free_labels=free, seed=seed)
    matrix = made.matrix.to(dtype)
    assert matrix.shape == (n, d)
    spent = matrix.num_values * dtype.itemsize if free else matrix.nbytes
    assert spent <= nbytes
    step = cheapest_step(matrix, method, dtype.itemsize)
    assert step is None or nbytes - spent < step
    assert torch.isfinite(matrix.dense()).all()
    assert all(later <= earlier for earlier, later in zip(made.objective, made.objective[1:], strict=False))


@EVERY
def test_the_objective_ends_at_the_error_of_the_matrix(method):
    a = table("gauss", 200, 10, 0)
    for w in (None, torch.rand(200, dtype=F64) * 5 + 0.1):
        made = solve(method, a, 5000, weights=w)
        far = row_errors(a, made.matrix)
        found = float(far.sum() if w is None else (w * far).sum())
        if made.norm is not None:
            found = norm_error(a, made.matrix, made.norm, w).error
        assert made.objective[-1] == pytest.approx(found, rel=1e-4)
        assert made.seconds > 0


@EVERY
def test_no_row_is_stored_worse_than_as_zero(method):
    if isinstance(method, Entrywise):
        return  # its rows are no projections: their absolute errors are least together, not each one's squares
    a = table("gauss", 150, 8, 1)
    far = row_errors(a, solve(method, a, 3500).matrix)
    assert (far <= a.double().square().sum(1) * (1 + 1e-5)).all()


@EACH_FIT
def test_more_bytes_give_less_error(method):
    a = table("gauss", 200, 10, 2)
    errors = [solve(method, a, nbytes).objective[-1] for nbytes in (2000, 4000, 6000)]
    assert errors[0] > errors[1] > errors[2]


@EACH_FIT
def test_the_scale_of_weights_and_of_rows_does_not_matter(method):
    a, w = table("gauss", 150, 8, 3), torch.rand(150, dtype=F64) + 0.1
    usual = solve(method, a, 3000, weights=w)
    for factor in (2.0**-40, 2.0**40):
        scaled = solve(method, a, 3000, weights=w * factor)
        assert scaled.objective[-1] == pytest.approx(usual.objective[-1] * factor, rel=1e-3)
        torch.testing.assert_close(scaled.matrix.dense(), usual.matrix.dense(), rtol=1e-3, atol=1e-3)
    larger = solve(method, a * 1024, 3000, weights=w)
    torch.testing.assert_close(larger.matrix.dense() / 1024, usual.matrix.dense(), rtol=1e-3, atol=1e-3)


@EACH_FIT
def test_equal_weights_are_no_weights(method):
    a = table("gauss", 150, 8, 4)
    plain, weighted = solve(method, a, 3000), solve(method, a, 3000, weights=torch.full((150,), 7.0))
    assert weighted.objective[-1] == pytest.approx(7 * plain.objective[-1], rel=1e-3)


@EVERY
def test_equal_seeds_give_equal_factors_and_the_global_generator_is_left_alone(method):
    a, w = table("gauss", 200, 10, 5), torch.rand(200)
    before = torch.get_rng_state()
    first, again = solve(method, a, 4000, weights=w, seed=3), solve(method, a, 4000, weights=w, seed=3)
    assert torch.equal(before, torch.get_rng_state())
    assert first.objective == again.objective
    for name, tensor in first.matrix.tensors().items():
        assert torch.equal(tensor, again.matrix.tensors()[name])


@EVERY
def test_the_rows_given_are_not_changed(method):
    a, w = table("gauss", 100, 8, 5), torch.rand(100)
    kept, kept_w = a.clone(), w.clone()
    matrix = solve(method, a, 2500, weights=w).matrix
    with torch.no_grad():
        for parameter in matrix.parameters():
            parameter.zero_()
    assert torch.equal(a, kept)
    assert torch.equal(w, kept_w)


@EVERY
def test_more_weight_means_less_error(method):
    a = table("gauss", 300, 10, 6)
    w = torch.ones(300)
    w[:30] = 500
    heavy = row_errors(a, solve(method, a, 4500, weights=w).matrix)[:30].sum()
    even = row_errors(a, solve(method, a, 4500).matrix)[:30].sum()
    assert heavy < (0.9 if isinstance(method, KMeansSVD) else 0.8) * even


@EVERY
def test_rows_of_weight_zero_are_stored_too(method):
    a, w = table("gauss", 120, 8, 7), torch.ones(120)
    w[::3] = 0
    matrix = solve(method, a, 3000, weights=w).matrix
    far, size = row_errors(a, matrix)[::3], a[::3].double().square().sum(1)
    assert far.sum() < size.sum()


@EVERY
def test_a_zero_matrix_and_zero_rows_come_back_as_zeros(method):
    assert not solve(method, torch.zeros(60, 6), 1200).matrix.dense().any()
    a = table("zero rows", 60, 6, 0)
    torch.testing.assert_close(solve(method, a, 1200).matrix.dense()[::2], torch.zeros(30, 6), atol=1e-6, rtol=0)


@EVERY
def test_equal_rows_are_stored_alike_and_cost_one_coordinate(method):
    a = torch.randn(1, 7).repeat(50, 1)
    torch.testing.assert_close(solve(method, a, 1000).matrix.dense(), a, atol=1e-5, rtol=1e-4)


@EVERY
def test_fewer_rows_than_k_times_j_are_no_trouble(method):
    for shape in ((4, 30), (7, 7), (3, 1)):
        a = torch.randn(*shape)
        n, d = shape
        nbytes = least_bytes(method, n, d) + 8 * d
        matrix = solve(method, a, nbytes).matrix
        assert matrix.shape == shape
        assert matrix.nbytes <= nbytes
        assert row_errors(a, matrix).sum() <= a.square().sum() * (1 + 1e-5)


@pytest.mark.parametrize("method", [m for m in METHODS.values() if (getattr(m, "k", 1) or 1) >= 3], ids=repr)
def test_more_flats_than_rows_are_refused(method):
    with pytest.raises(KflatsError, match=r"3 flats|k=3 is not supported"):
        solve(method, torch.randn(2, 5), 10_000)


@EVERY
def test_a_row_that_is_not_finite_is_named(method):
    for bad in (float("nan"), float("inf"), -float("inf")):
        a = torch.randn(50, 6)
        a[17, 2] = bad
        with pytest.raises(KflatsError, match="row 17"):
            solve(method, a, 1500)


@EVERY
def test_numbers_too_large_to_square_are_refused_not_answered_with_nan(method):
    with pytest.raises(KflatsError, match="too large"):
        solve(method, torch.randn(50, 6) * 1e30, 1500)


@EVERY
def test_too_few_bytes_are_refused_with_the_least_that_would_do(method):
    for nbytes in (1, 100):
        a = torch.randn(50, 6)
        with pytest.raises(KflatsError, match="cannot hold") as caught:
            solve(method, a, nbytes)
        assert f"{nbytes:,} bytes" in str(caught.value)
        needed = int(caught.value.cause.split("takes ")[1].split(" bytes")[0].replace(",", ""))
        assert solve(method, a, needed).matrix.nbytes <= needed
        with pytest.raises(KflatsError, match="cannot hold"):
            solve(method, a, needed - 1)


@EVERY
def test_weights_that_weigh_nothing_are_refused(method):
    for weights, message in [
        (torch.zeros(50), "all row weights are zero"),
        (-torch.ones(50), "not negative"),
        (torch.ones(49), "expected 50 row weights"),
        (torch.full((50,), float("nan")), "finite"),
    ]:
        with pytest.raises(KflatsError, match=message):
            solve(method, torch.randn(50, 6), 1500, weights=weights)


@EVERY
def test_a_method_is_a_frozen_value_of_json_scalars(method, toys):
    assert isinstance(method, Method)
    assert from_json(json.loads(json.dumps(to_json(method)))) == method
    assert hash(method) == hash(dataclasses.replace(method))
    if dataclasses.fields(method):
        with pytest.raises(dataclasses.FrozenInstanceError):
            method.k = 4


@EACH_FIT
def test_half_precision_rows_are_fitted_at_their_own_values(method):
    a = table("gauss", 100, 8, 8)
    for dtype in (torch.float16, torch.bfloat16):
        stored = a.to(dtype)
        assert torch.equal(
            solve(method, stored, 2500).matrix.dense(), solve(method, stored.float(), 2500).matrix.dense()
        )


@settings(max_examples=15)
@given(n=st.integers(8, 60), d=st.integers(1, 8), seed=st.integers(0, 100), data=st.data(), weighted=st.booleans())
def test_one_flat_is_the_svd(n, d, seed, data, weighted):
    a = table("gauss", n, d, seed)
    w = torch.rand(n, dtype=F64) + 0.01 if weighted else None
    nbytes = data.draw(st.integers((n + d) * 4, (n + d) * 4 * d + 3))
    expected = solve(SVD(), a, nbytes, weights=w)
    total = float(a.double().square().sum())
    for method in (Flats(k=1, ranks="uniform"), Flats(k=1, exact=False), KMeansSVD(k=1), MESSI(k=1)):
        found = solve(method, a, nbytes, weights=w)
        assert isinstance(found.matrix, LowRankMatrix)
        assert found.matrix.spec() == expected.matrix.spec()
        assert found.objective[-1] == pytest.approx(expected.objective[-1], rel=1e-4, abs=1e-6 * total)


def test_flats_beat_one_flat_at_equal_bytes_where_there_are_flats():
    gen = torch.Generator().manual_seed(0)
    parts = [torch.randn(200, 3, generator=gen) @ torch.randn(3, 24, generator=gen) for _ in range(3)]
    a = torch.cat(parts) + 0.05 * torch.randn(600, 24, generator=gen)
    nbytes = (600 + 3 * 24) * 3 * 4 + 600
    errors = {name: solve(method, a, nbytes).objective[-1] for name, method in METHODS.items()}
    assert all(errors[name] < 0.2 * errors["svd"] for name in ("flats", "flats, uniform", "flats, searched"))
    assert errors["flats, searched"] <= errors["flats"] * (1 + 1e-6)


def test_the_paper_s_j_is_what_uniform_ranks_get():
    n, d, k = 500, 20, 3
    matrix = solve(MESSI(k=k), torch.randn(n, d), 4 * 4000 + n).matrix
    assert isinstance(matrix, FlatsMatrix)
    assert set(matrix.flat_ranks) == {4000 // (n + k * d)}  # j = numbers / (n + k d), appendix D
    assert matrix.weight.shape == (n, 4000 // (n + k * d))


def test_rows_that_weigh_enough_are_kept_as_they_are():
    a, w = torch.randn(300, 10), torch.ones(300)
    w[:60] = 1e4
    matrix = solve(Flats(k=2), a, 5000, weights=w).matrix
    kept = [label for label, band in enumerate(matrix.bands) if band.flat is None]
    assert kept
    rows = (matrix.labels.long() == kept[0]).nonzero().squeeze(1)
    heavy = int((rows < 60).sum())
    assert heavy >= 25
    assert heavy / 60 >= 4 * (len(rows) - heavy) / 240  # bytes that are left may keep light rows too
    assert torch.equal(matrix.dense()[rows], a[rows])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Flats(k=0), "k=0 is not supported"),
        (lambda: Flats(k=5000), "k=5000 is not supported"),
        (lambda: Flats(ranks="some"), "ranks='some'"),
        (lambda: Flats(start="greedy"), "start=.greedy. is not supported"),
        (lambda: Flats(max_iterations=0), "max_iterations"),
        (lambda: Flats(tolerance=-1), "tolerance"),
        (lambda: Flats(tolerance="x"), "tolerance"),
        (lambda: Flats(tolerance=None), "tolerance"),
        (lambda: Flats(tolerance=float("nan")), "tolerance"),
        (lambda: KMeansSVD(k=0), "k=0 is not supported"),
        (lambda: SVD(form="some"), "form='some' is not supported"),
        (lambda: from_name("keep-dense", k=3), "'keep-dense' has no k"),
        (lambda: from_name("robust"), "svd, flats"),
        (lambda: from_name("svd", k=3), "'svd' has no k"),
    ],
)
def test_nonsense_is_refused_when_the_value_is_made(make, message):
    with pytest.raises(KflatsError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SVD", SVD()),
        ("flats", Flats()),
        (" kmeans-svd ", KMeansSVD()),
        ("messi", MESSI()),
        ("keep-dense", KeepDense()),
    ],
)
def test_names_of_the_command_line(name, value):
    assert from_name(name) == value


@pytest.mark.parametrize(
    "method",
    [
        MESSI(k=3, restarts=1),
        KMeansSVD(k=3),
        Flats(k=3, start="random"),
        pytest.param(MESSI(k=None, restarts=1), marks=pytest.mark.slow),
        MESSI(k=3, error=Huber(1.0, "median"), restarts=1),
    ],
    ids=["messi", "k-means", "flats", "searched", "huber"],
)
def test_of_several_restarts_the_fit_of_least_error_is_kept(method):
    table = torch.randn(90, 8, generator=torch.Generator().manual_seed(3))
    problem = Problem(TensorRows(table), 4 * 500, 4, seed=5)
    starts = problem.starts(6)
    assert starts[0] is problem
    assert len({one.seed for one in starts}) == 6
    assert problem.starts(3) == starts[:3]

    def errors(count):
        fit = dataclasses.replace(method, restarts=count).fit(problem)
        return fit.objective[-1], fit.matrix.dense()

    (one, first), (several, best) = errors(1), errors(6)
    torch.testing.assert_close(errors(6)[1], best, atol=0, rtol=0)
    if not method.minimizes_squares:  # single fits have thresholds of their own
        assert several <= one
        return
    alone = [method.fit(start).objective[-1] for start in starts]
    assert alone[0] == one
    assert max(alone) > min(alone), "the starts must differ for this law to mean something"
    assert several == min(alone)
    torch.testing.assert_close(method.fit(problem).matrix.dense(), first, atol=0, rtol=0)


@pytest.mark.parametrize("make", [Flats, KMeansSVD, MESSI])
@pytest.mark.parametrize("restarts", [0, -1, 1001, 1.5, True, "many"])
def test_restarts_are_a_whole_number(make, restarts):
    with pytest.raises(KflatsError, match="restarts="):
        make(k=2, restarts=restarts)
