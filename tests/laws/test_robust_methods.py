"""Methods whose error is no square: what they minimise is what they are judged by, and outliers do not turn them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table import METHODS, each_method

from kflats.common.errors import KflatsError
from kflats.importance.protocol import Weighting
from kflats.matrices.registry import LowRankMatrix
from kflats.methods import SVD, Entrywise, Problem, RobustSVD, Subspace, from_name
from kflats.methods.matrix_error import Distances, EntryPowers, norm_error
from kflats.numerics.loss import Huber, Power, Squared, Truncated
from kflats.numerics.robust_svd import Lewis
from kflats.numerics.rows import TensorRows
from kflats.recipe.recipe import Recipe, as_recipe, brief, from_json, to_json

F64 = torch.float64
DESCENDING = {name: METHODS[name] for name in ("entrywise", "entrywise, p = 0.7", "median flat", "huber flat")} | {
    "truncated flat": METHODS["truncated flat"],
    "half power": Subspace(Power(0.5)),
    "truncated at a distance": Subspace(Truncated(2.0)),
}
ROBUST = DESCENDING | {
    "robust svd": METHODS["robust svd"],
    "robust svd, p = 0.5": RobustSVD(p=0.5),
    "robust svd, p = 4": METHODS["robust svd, p = 4"],
}
"""Those that minimise their norm from the SVD on are in the first table."""

EVERY = each_method(ROBUST, {"entrywise", "median flat", "huber flat", "truncated at a distance", "robust svd"})


def table(n=120, d=9, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=gen) * torch.logspace(0, -1, d)


def solve(method, a, rank, weights=None, itemsize=4, **options):
    n, d = a.shape
    return method.fit(Problem(TensorRows(a), rank * (n + d) * itemsize, itemsize, Weighting(left=weights), **options))


def planted(kind, seed=0):
    """A clean table of rank 6 with noise, and the same with 3 % wrong entries or 5 % wrong rows of +-20 deviations."""
    gen = torch.Generator().manual_seed(seed)
    signal = torch.randn(400, 6, generator=gen) @ torch.randn(6, 80, generator=gen)
    clean = signal + 0.1 * torch.randn(400, 80, generator=gen)
    signs = torch.randint(2, clean.shape, generator=gen) * 2.0 - 1
    wrong = torch.rand(clean.shape, generator=gen) < 0.03
    if kind == "rows":
        wrong = (torch.rand(len(clean), 1, generator=gen) < 0.05).expand_as(clean)
    return clean, torch.where(wrong, 20 * float(clean.std()) * signs, clean), wrong


@EVERY
@settings(max_examples=8)
@given(
    n=st.integers(3, 60),
    d=st.integers(1, 9),
    spare=st.integers(0, 200),
    weighted=st.booleans(),
    seed=st.integers(0, 100),
)
def test_the_largest_rank_that_fits_and_not_a_byte_more(method, n, d, spare, weighted, seed):
    a = table(n, d, seed)
    w = torch.rand(n, dtype=F64) + 0.01 if weighted else None
    nbytes = 4 * (n + d) + spare
    made = method.fit(Problem(TensorRows(a), nbytes, 4, Weighting(left=w)))
    rank = made.matrix.weight.shape[1]
    assert isinstance(made.matrix, LowRankMatrix)
    assert made.matrix.nbytes == method.cost((n, d), rank, 4) <= nbytes
    assert rank == method.rank((n, d), nbytes, 4)
    assert rank == min(n, d) or method.cost((n, d), rank + 1, 4) > nbytes
    assert all(later <= earlier for earlier, later in zip(made.objective, made.objective[1:], strict=False))
    found = norm_error(a, made.matrix, made.norm, w)
    whole = norm_error(a, LowRankMatrix(torch.zeros(n, 1), torch.zeros(1, d)), made.norm, w)
    assert made.objective[-1] == pytest.approx(found.error, rel=1e-3, abs=2e-3 * found.total)
    assert found.total == pytest.approx(whole.error)


@pytest.mark.parametrize("method", DESCENDING.values(), ids=DESCENDING.keys())
def test_never_worse_than_the_svd_in_its_own_norm(method):
    for seed in range(3):
        a = table(seed=seed)
        a[::20] *= 15
        made, svd = solve(method, a, 3), solve(SVD(), a, 3)
        theirs = norm_error(a, svd.matrix, made.norm).relative
        assert norm_error(a, made.matrix, made.norm).relative <= theirs * (1 + 1e-5)


@EVERY
def test_a_weight_is_a_row_given_so_many_times(method):
    a = table()
    counts = torch.randint(1, 4, (len(a),), generator=torch.Generator().manual_seed(1))
    if isinstance(getattr(method, "error", None), Huber | Truncated) and method.error.unit == "median":
        pytest.skip("a row counts once in the median, whatever its weight")
    weighted, repeated = solve(method, a, 3, counts.double()), solve(method, a.repeat_interleave(counts, 0), 3)
    near = 0.02 if isinstance(method, Entrywise) else 1e-3  # of two local minima
    assert weighted.objective[-1] == pytest.approx(repeated.objective[-1], rel=near)
    twice = solve(method, a, 3, 2.0 * counts)
    assert twice.objective[-1] == pytest.approx(2 * weighted.objective[-1], rel=1e-3)


@EVERY
def test_equal_seeds_give_equal_factors_and_nothing_given_is_changed(method):
    a, w = table(), torch.rand(120)
    kept = a.clone(), w.clone(), torch.get_rng_state()
    first, again = solve(method, a, 3, w, seed=2), solve(method, a, 3, w, seed=2)
    assert torch.equal(first.matrix.dense().detach(), again.matrix.dense().detach())
    assert all(torch.equal(was, now) for was, now in zip(kept, (a, w, torch.get_rng_state()), strict=True))


@EVERY
def test_half_precision_rows_are_fitted_at_their_own_values(method):
    stored = table().to(torch.bfloat16)
    assert torch.equal(
        solve(method, stored, 3).matrix.dense().detach(), solve(method, stored.float(), 3).matrix.dense().detach()
    )
    in_half = solve(method, table(), 3).matrix.to(torch.float16)
    torch.testing.assert_close(
        in_half.dense().float(), solve(method, table(), 3).matrix.dense().detach(), atol=5e-3, rtol=5e-3
    )


@EVERY
def test_matrices_of_less_rank_than_columns(method):
    for kind in ("zeros", "constant columns", "low rank", "duplicates", "wide", "zero rows"):
        a = table(seed=3)
        a = {
            "zeros": a * 0,
            "constant columns": torch.ones_like(a) * torch.arange(9.0),
            "low rank": a[:, :2] @ a[:2],
            "duplicates": a[:2].repeat(30, 1),
            "wide": a.T.contiguous(),
            "zero rows": a * (torch.arange(120) % 3 == 0)[:, None],
        }[kind]
        dense = solve(method, a, 2).matrix.dense().detach()
        assert torch.isfinite(dense).all()
        if kind not in ("wide", "zero rows"):
            torch.testing.assert_close(dense, a, atol=2e-3, rtol=1e-3)
        if kind == "zero rows":
            assert dense[1].abs().max() < 1e-5


@pytest.mark.parametrize(
    ("method", "kind", "share"),
    [
        (Entrywise(), "entries", 0.1),
        (Entrywise(p=0.7), "entries", 0.1),
        (Subspace(), "rows", 0.2),
        (Subspace(Truncated(3.0, "median")), "rows", 0.2),
        (Subspace(Huber(2.0, "median")), "rows", 0.3),
        (RobustSVD(p=1.0), "rows", 0.9),
        (RobustSVD(p=0.5), "rows", 0.2),
    ],
    ids=repr,
)
def test_outliers_do_not_turn_the_flat(method, kind, share):
    clean, given, wrong = planted(kind)
    rows = ~wrong.any(1) if kind == "rows" else torch.ones(len(clean), dtype=torch.bool)

    def distance(one):
        return float((solve(one, given, 6).matrix.dense().detach() - clean)[rows].norm())

    assert distance(method) < share * distance(SVD())


@pytest.mark.parametrize("method", [RobustSVD(p=2.0), Entrywise(p=2.0), Subspace(Squared()), Subspace(Power(2.0))])
def test_squares_are_the_svd(method):
    a, w = table(), torch.rand(120, dtype=F64) + 0.1
    for weights in (None, w):
        found, svd = solve(method, a, 4, weights), solve(SVD(), a, 4, weights)
        torch.testing.assert_close(found.matrix.dense().detach(), svd.matrix.dense().detach(), atol=1e-3, rtol=1e-3)
        assert found.objective[-1] == pytest.approx(svd.objective[-1], rel=1e-3)


@EVERY
def test_the_spectrum_is_that_of_squares_which_no_pair_undercuts(method):
    a, w = table(), torch.rand(120, dtype=F64)
    spectrum = method.spectrum(TensorRows(a), Weighting(left=w))
    torch.testing.assert_close(spectrum, SVD().spectrum(TensorRows(a), Weighting(left=w)))
    made = solve(method, a, 3, w).matrix.dense().detach()
    assert float((w * (a - made).double().square().sum(1)).sum()) >= float(spectrum[3]) * (1 - 1e-5)


@EVERY
def test_only_row_weights_are_taken(method):
    for field in ("left", "right"):
        a = table()
        weighting = Weighting(**{field: {"left": torch.eye(120), "right": torch.eye(9)}[field]})
        with pytest.raises(KflatsError, match=f"{type(method).__name__} cannot take"):
            method.fit(Problem(TensorRows(a), 3000, 4, weighting))


def test_norms_by_definition():
    a, w = table(30, 5), torch.rand(30, dtype=F64)
    stored = LowRankMatrix(a[:, :2] * 0.9, torch.eye(2, 5))
    rest = a.double() - stored.dense().detach().double()
    for p in (0.5, 1.0, 3.0):
        found = norm_error(a, stored, EntryPowers(p), w)
        assert found.error == pytest.approx(float((w[:, None] * rest.abs() ** p).sum()))
        assert found.total == pytest.approx(float((w[:, None] * a.double().abs() ** p).sum()))
    for loss in (Power(1.0), Power(0.5), Huber(0.4), Truncated(0.3)):
        found = norm_error(a, stored, Distances(loss), w)
        assert found.error == pytest.approx(float((w * loss.rho(rest.square().sum(1))).sum()))
    assert norm_error(a * 0, stored, EntryPowers(1.0)).relative == 0


# As values


NESTED = [
    *ROBUST.values(),
    RobustSVD(p=1.5, ellipsoid=Lewis(iterations=3)),
    Entrywise(p=1),
    Subspace(Squared()),
]


@pytest.mark.parametrize("method", NESTED, ids=repr)
def test_values_inside_methods_survive_json(method):
    recipe = Recipe(method)
    assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe
    assert hash(from_json(to_json(method))) == hash(method)
    assert brief(recipe).startswith(type(method).__name__)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"type": "RobustSVD", "ellipsoid": {"type": "Power", "q": 1.0}}, "is called .Power."),
        ({"type": "RobustSVD", "ellipsoid": "lewis"}, "ellipsoid should be an object.*found .lewis."),
        ({"type": "RobustSVD", "ellipsoid": {"type": "Lewiss"}}, "is called .Lewiss."),
        (
            {"type": "RobustSVD", "ellipsoid": {"type": "Lewis", "steps": 3}},
            "unknown fields .*steps",
        ),
        (
            {"type": "RobustSVD", "ellipsoid": {"type": "Lewis", "iterations": 2.5}},
            "iterations should be a whole",
        ),
        ({"type": "RobustSVD", "ellipsoid": {"iterations": 3}}, 'an object with a "type"'),
        ({"type": "RobustSVD", "ellipsoid": None}, "ellipsoid should be an object.*found .None."),
        ({"type": "RobustSVD", "p": "1"}, "recipe.p should be a finite number, found .1."),
        ({"type": "RobustSVD", "p": float("inf")}, "recipe.p should be a finite number, found .inf."),
        ({"type": "RobustSVD", "p": 0}, "p=0.0 is not supported"),
        ({"type": "Subspace", "error": {"type": "Power", "q": 3}}, "q=3"),
        ({"type": "Subspace", "error": {"type": "Huber"}}, "recipe.error lacks .*threshold"),
        (
            {"type": "Subspace", "error": {"type": "Huber", "threshold": 1, "unit": "inch"}},
            "unit should be one of",
        ),
        ({"type": "Subspace", "error": {"type": "Lewis"}}, "is called .Lewis."),
        ({"type": "Subspace", "error": {"type": "SVD"}}, "recipe.error should be one of Huber, Power"),
    ],
    ids=str,
)
def test_malformed_values_are_refused_with_the_place_named(data, message):
    with pytest.raises(KflatsError, match=message):
        from_json(data)


@pytest.mark.parametrize("part", [Lewis(), Power(1.0)], ids=repr)
def test_a_part_of_a_method_is_no_method(part):
    with pytest.raises(KflatsError, match=r"is not an? (method|importance)"):
        as_recipe(part)
    with pytest.raises(KflatsError, match="is not an importance"):
        Recipe(SVD(), part)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((lambda p=p: RobustSVD(p=p), "a power of p=.*at most 16") for p in (0, -1.0, 17, math.inf, math.nan, True)),
        *((lambda p=p: Entrywise(p=p), "a power of p=.*at most 2") for p in (0, 2.5, math.inf, "1")),
        (lambda: RobustSVD(ellipsoid=SVD()), "ellipsoid=SVD"),
        (lambda: RobustSVD(ellipsoid="lewis"), "ellipsoid=.lewis."),
        (lambda: RobustSVD(ellipsoid=Lewis), "ellipsoid=<class"),
        (lambda: Entrywise(max_iterations=0), "max_iterations"),
        (lambda: Subspace(tolerance=1.0), "tolerance"),
        (lambda: Subspace(tolerance="x"), "tolerance"),
        (lambda: Entrywise(tolerance=None), "tolerance"),
        (lambda: Subspace("power 1"), "no loss of distances is .power 1."),
        (lambda: Subspace(Lewis()), "no loss of distances is Lewis"),
        (lambda: from_name("robust-svd", k=3), "'robust-svd' has no k.*p, ellipsoid"),
        (lambda: from_name("l1", p=2), "'l1' has no p"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_when_the_value_is_made(make, message):
    with pytest.raises(KflatsError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "options", "value"),
    [
        ("robust-svd", {"p": 1}, RobustSVD(p=1)),
        ("Robust-SVD", {}, RobustSVD()),
        ("entrywise", {"p": 0.5}, Entrywise(p=0.5)),
        ("l1", {}, Entrywise(p=1.0)),
        ("subspace", {"error": Power(1.0)}, Subspace()),
    ],
)
def test_names_of_the_command_line(name, options, value):
    assert from_name(name, **options) == value


# Bad input


@EVERY
def test_a_row_that_cannot_be_used_is_refused(method):
    for entry, message in ((float("nan"), "row 17"), (float("inf"), "row 17"), (1e30, "too large to be squared")):
        a = table()
        a[17, 2] = entry
        with pytest.raises(KflatsError, match=message):
            solve(method, a, 2)


@EVERY
def test_too_few_bytes_are_refused_with_the_least_that_would_do(method):
    a = table(50, 6)
    with pytest.raises(KflatsError, match="cannot hold 1 flat of rank 1") as caught:
        method.fit(Problem(TensorRows(a), 223, 4))
    assert "224 bytes" in str(caught.value)
    assert method.fit(Problem(TensorRows(a), 224, 4)).matrix.nbytes == 224


@EVERY
def test_weights_that_weigh_nothing_are_refused(method):
    for weights in (torch.zeros(120), -torch.ones(120), torch.ones(119), torch.full((120,), torch.nan)):
        with pytest.raises(KflatsError, match="row weights"):
            solve(method, table(), 2, weights)


@dataclass(frozen=True)
class Leverages:
    """The ellipsoid of squares, whatever the power."""

    def fit(self, matrix, p):
        return replace(Lewis().fit(matrix, 2.0), p=p)


def test_an_ellipsoid_of_one_s_own_is_taken():
    a = table()
    ours, svd = solve(RobustSVD(ellipsoid=Leverages()), a, 3), solve(SVD(), a, 3)
    torch.testing.assert_close(ours.matrix.dense().detach(), svd.matrix.dense().detach(), atol=1e-4, rtol=1e-4)


def test_powers_that_leave_the_range_of_numbers_are_refused():
    a = table(40, 4, seed=1).double() * 1e30
    with pytest.raises(KflatsError, match="double precision"):
        solve(RobustSVD(p=16.0), a, 1, itemsize=8)
