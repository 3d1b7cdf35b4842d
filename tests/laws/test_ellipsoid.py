"""Every ellipsoid holds what it promises: its left inequality, its constant, and on any matrix that has numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("distortion", reason="experiments/ is not here")

from distortion import certified, distortion_bound, distortion_found
from loewner import Loewner, _cut, _cut_both, _gradient, _norms

from kflats.common.errors import KflatsError
from kflats.numerics.gram import COLUMN_FLOOR
from kflats.numerics.robust_svd import Ellipsoid, Lewis
from kflats.numerics.rows import ScaledRows, TensorRows

F64 = torch.float64
POWERS = (0.3, 0.5, 1.0, 1.25, 1.5, 1.75, 2.0, 3.0, 4.0, 8.0)


def gaussian(n, d, seed=0, dtype=F64):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def outlier(size):
    a = gaussian(200, 6)
    a[11] *= size
    return a


def holed():
    a = gaussian(120, 5)
    a[::3] = 0
    return a


def constant_columns():
    a = gaussian(90, 6)
    a[:, 2], a[:, 4] = 3.0, 0.0
    return a


# matrix, its rank
MATRICES = {
    "tall": (gaussian(300, 8), 8),
    "columns of many sizes": (gaussian(200, 6) * torch.logspace(0, -9, 6, dtype=F64), 6),
    "an outlying row": (outlier(1e3), 6),
    "a huge row": (outlier(1e6), 6),
    "rows of many sizes": (gaussian(150, 4) * torch.logspace(-8, 0, 150, dtype=F64).unsqueeze(1), 4),
    "rows of zeros": (holed(), 5),
    "duplicate rows": (gaussian(40, 5).repeat(4, 1), 5),
    "constant columns": (constant_columns(), 5),
    "rank 3": (gaussian(100, 3) @ gaussian(3, 9, 1), 3),
    "rank 3 in float32": (gaussian(100, 3).float() @ gaussian(3, 9, 1).float(), 3),
    "wide": (gaussian(4, 30), 4),
    "wide, rank 5": (gaussian(60, 5) @ gaussian(5, 200, 1), 5),
    "wide, rank 5 in float32": ((gaussian(60, 5) @ gaussian(5, 200, 1)).float(), 5),
    "wide ones": (torch.ones(8, 30), 1),
    "wide, repeated rows": (gaussian(4, 40).repeat(5, 1), 4),
    "wide, few columns": (torch.cat([gaussian(9, 3), torch.zeros(9, 30, dtype=F64)], 1), 3),
    "square": (gaussian(7, 7), 7),
    "one row": (gaussian(1, 5), 1),
    "one column": (gaussian(50, 1), 1),
    "float32": (gaussian(400, 10, dtype=torch.float32), 10),
    "float16": (gaussian(300, 6, dtype=torch.float16), 6),
    "bfloat16": (gaussian(300, 6, dtype=torch.bfloat16), 6),
    "sparse": (gaussian(400, 5) * (gaussian(400, 5, 3) > 1), 5),
}
LEWIS_POWERS = (
    dict.fromkeys(MATRICES, POWERS)
    | {name: (0.5, 1.0, 3.0) for name in MATRICES if name.startswith("wide, ")}
    | {"a huge row": (0.5, 1.0, 1.5), "rows of many sizes": POWERS[:7]}
)


def ratios(a, ellipsoid, x):
    """||Ax||_p^p / ||D V'x||_2^p of the columns of x, from the definition and in numpy alone."""
    a, x = a.to(F64).numpy(), x.to(F64).numpy()
    above = (np.abs(a @ x) ** ellipsoid.p).sum(0)
    below = np.linalg.norm(ellipsoid.axes.numpy()[:, None] * (ellipsoid.directions.numpy() @ x), axis=0) ** ellipsoid.p
    return above / below


def directions_for(a, ellipsoid):
    """x at random, along axes and as every row sees most of it, all in the row space."""
    inside = ellipsoid.directions.T @ ellipsoid.directions
    at_rows = ellipsoid.whitening @ (a.to(F64) @ ellipsoid.whitening).T
    at_rows = at_rows[:, torch.linalg.vector_norm(at_rows, dim=0) > 0][:, :300]
    return torch.cat([inside @ gaussian(a.shape[1], 200, 5), ellipsoid.whitening, at_rows], dim=1)


def holds(a, ellipsoid, slack=1e-6):
    """Definition 1 with the ellipsoid's own constant, on all those x and on the worst that climbing finds."""
    found = ratios(a, ellipsoid, directions_for(a, ellipsoid))
    worst = distortion_found(a, ellipsoid, directions=6, steps=15)
    assert min(found.min(), worst.least) >= 1 - slack
    assert max(found.max(), worst.greatest) <= ellipsoid.bound * (1 + slack)
    if ellipsoid.p >= 1:  # below, minima are cusps, and climbing down to the lowest is luck
        assert worst.least <= found.min() * 1.1
    vectors = ellipsoid.directions @ ellipsoid.directions.T
    torch.testing.assert_close(vectors, torch.eye(ellipsoid.rank, dtype=F64), atol=1e-9, rtol=0)
    assert (ellipsoid.axes[:-1] >= ellipsoid.axes[1:]).all()


# Lewis weights


@pytest.mark.parametrize("name", LEWIS_POWERS)
def test_definition_1_holds_with_the_tight_constant(name):
    a, rank = MATRICES[name]
    for p in LEWIS_POWERS[name]:
        found = Lewis().fit(a, p)
        assert found.rank == rank
        assert found.converged
        assert found.bound == pytest.approx(rank ** abs(1 - p / 2), rel=2e-6)
        assert found.bound <= max(1.0, rank ** (p / 2)) * (1 + 2e-6) or p < 1
        holds(a, found)


@pytest.mark.parametrize("name", ["tall", "an outlying row", "rows of zeros", "duplicate rows", "rank 3", "square"])
def test_the_weights_are_the_fixed_point(name):
    for p in POWERS:
        a, rank = MATRICES[name]
        w = Lewis(tolerance=1e-9).fit(a, p).weights.numpy()
        a = a.to(F64).numpy()
        scale = np.where(w > 0, np.where(w > 0, w, 1.0) ** (1 - 2 / p), 0.0)
        inverse = np.linalg.pinv((a * scale[:, None]).T @ a, rcond=1e-10, hermitian=True)
        expected = np.einsum("nd,de,ne->n", a, inverse, a).clip(0) ** (p / 2)
        np.testing.assert_allclose(w, expected, atol=1e-6)
        assert w.sum() == pytest.approx(rank)
        assert w.max() <= 1 + 1e-6


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_the_certificate_holds_before_convergence(iterations):
    for p in (0.5, 1.0, 1.5, 3.0, 8.0):
        for name in ("tall", "an outlying row", "sparse"):
            a, rank = MATRICES[name]
            found = Lewis(iterations=iterations).fit(a, p)
            assert not found.converged
            assert found.iterations == len(found.bounds) == iterations
            assert found.bound == min(found.bounds) > rank ** abs(1 - p / 2)
            holds(a, found)


@pytest.mark.parametrize("p", [1.0, 1.25, 1.5, 1.75, 2.0])
def test_a_dozen_iterations_reach_a_millionth(p):
    found = Lewis().fit(gaussian(5000, 24, dtype=torch.float32), p)
    assert found.converged
    assert found.iterations <= 12
    assert Lewis(iterations=3).fit(gaussian(5000, 24), p).bound <= 1.02 * 24 ** (1 - p / 2)


@pytest.mark.parametrize(("p", "most"), [(4, 25), (8, 45), (64, 400)])
def test_damping_converges_for_large_powers(p, most):
    found = Lewis().fit(gaussian(400, 8), p)
    assert found.converged
    assert found.iterations <= most


@pytest.mark.parametrize("p", [0.1, 0.2, 64.0])
def test_extreme_powers(p):
    a = gaussian(60, 4)
    found = Lewis().fit(a, p)
    assert found.converged
    assert found.bound == pytest.approx(4 ** abs(1 - p / 2), rel=1e-5)
    ratio = ratios(a, found, directions_for(a, found))
    assert ratio.min() >= 1 - 1e-6
    assert ratio.max() <= found.bound * (1 + 1e-6)


def test_at_2_it_is_the_svd_and_weights_are_leverages():
    a = gaussian(60, 5) * torch.linspace(1, 3, 5, dtype=F64)
    found = Lewis().fit(a, 2.0)
    u, s, v = np.linalg.svd(a.numpy(), full_matrices=False)
    assert found.bound == 1.0
    np.testing.assert_allclose(found.axes, s)
    np.testing.assert_allclose(np.abs(v @ found.directions.numpy().T), np.eye(5), atol=1e-9)
    np.testing.assert_allclose(found.weights, (u**2).sum(1))


def test_of_a_square_matrix_it_is_the_svd_for_every_p():
    for p in (0.5, 1.0, 1.5, 3.0):
        a = gaussian(6, 6)
        found = Lewis().fit(a, p)
        s = torch.linalg.svdvals(a)
        torch.testing.assert_close(found.axes / found.axes[0], s / s[0])
        assert found.iterations == 1
        both = Loewner().fit(a, p) if p >= 1 else found
        torch.testing.assert_close(both.axes, found.axes)


def test_weights_mind_neither_the_columns_nor_the_order():
    a = gaussian(150, 5)
    change = gaussian(5, 5, 9) @ torch.diag(torch.logspace(0, 6, 5, dtype=F64))
    order = torch.randperm(150)
    for p in (0.5, 1.0, 3.0):
        w = Lewis(tolerance=1e-10).fit(a, p).weights
        torch.testing.assert_close(Lewis(tolerance=1e-10).fit(a @ change, p).weights, w, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(Lewis(tolerance=1e-10).fit(a[order], p).weights, w[order])


def test_zero_rows_add_nothing_and_copies_share():
    a = gaussian(50, 4)
    alone = Lewis(tolerance=1e-10).fit(a, 1.0)
    padded = Lewis(tolerance=1e-10).fit(torch.cat([a, torch.zeros(9, 4, dtype=F64)]), 1.0)
    assert (padded.weights[50:] == 0).all()
    torch.testing.assert_close(padded.weights[:50], alone.weights)
    twice = Lewis(tolerance=1e-10).fit(torch.cat([a, a]), 1.0)
    torch.testing.assert_close(twice.weights, torch.cat([alone.weights, alone.weights]) / 2)


def test_float32_products_give_what_float64_does():
    a = gaussian(9000, 12, dtype=torch.float32) * torch.logspace(0, -3, 12)
    for p in (0.5, 1.0, 4.0):
        mixed, double = Lewis().fit(a, p), Lewis().fit(a.to(F64), p)
        torch.testing.assert_close(mixed.axes, double.axes, rtol=3e-5, atol=0)
        assert distortion_bound(a, mixed).least >= 1 - 1e-5


def test_float64_finishes_what_float32_cannot():
    a = gaussian(3000, 6, dtype=torch.float32) * torch.logspace(0, -5, 6)
    found = Lewis(tolerance=1e-9).fit(a, 1.0)
    assert found.converged
    assert found.bound == pytest.approx(6**0.5, rel=1e-8)


def test_rows_are_read_by_blocks():
    """A source that never shows itself whole, longer than a block, gives the tensor's answer."""
    a = gaussian(20000, 4)
    factors = torch.linspace(1, 2, 20000, dtype=F64)
    whole = Lewis().fit(a * factors.unsqueeze(1), 1.0)
    torch.testing.assert_close(Lewis().fit(ScaledRows(TensorRows(a), factors), 1.0).axes, whole.axes)


@settings(max_examples=30)
@given(
    n=st.integers(1, 40),
    d=st.integers(1, 8),
    p=st.floats(0.25, 4),
    seed=st.integers(0, 10**6),
    spread=st.floats(0, 1),
    zeros=st.floats(0, 0.9),
    inner=st.none() | st.integers(1, 3),
    tiny=st.sampled_from([1.0, 1e-3, 1e-6, 1e-12, 1e-20, 1e-30]),
    width=st.sampled_from([1, 1, 9]),
)
def test_any_matrix_at_all(n, d, p, seed, spread, zeros, inner, tiny, width):
    """Among them wide ones, ones of low rank, and ones of which every other column is tiny."""
    gen = torch.Generator().manual_seed(seed)
    d *= width
    a = torch.randn(n, d, generator=gen, dtype=F64)
    if inner is not None:
        a = a[:, :1].expand(n, inner) * torch.randn(n, inner, generator=gen, dtype=F64) @ a[:1].expand(inner, d)
        a = a + torch.randn(n, inner, generator=gen, dtype=F64) @ torch.randn(inner, d, generator=gen, dtype=F64)
    a = a * 10 ** (spread * torch.randn(n, 1, generator=gen, dtype=F64) / 2)
    if inner is None:
        a *= torch.rand(n, d, generator=gen, dtype=F64) >= zeros
    a[:, 1::2] *= tiny
    found = Lewis(iterations=60).fit(a, p)
    if inner is not None:
        assert found.rank <= min(inner + 1, n, d)
    if found.rank:
        ratio = ratios(a, found, found.directions.T @ torch.randn(found.rank, 50, generator=gen, dtype=F64))
        assert ratio.min() >= 1 - 1e-6
        assert ratio.max() <= found.bound * (1 + 1e-6)
        assert found.bound >= found.rank ** abs(1 - p / 2) * (1 - 1e-9)
    else:
        assert not a.any()


# What is proved of any ellipsoid, and what is found


def any_ellipsoid(a, p, seed):
    """A random one of the right row space: whatever the proof says must hold of it."""
    axes, turn = torch.linalg.eigh((lambda x: x @ x.T)(gaussian(a.shape[1], a.shape[1] + 2, seed)))
    return Ellipsoid(axes.flip(0), turn.flip(1).T.contiguous(), p, math.nan, 0, True)


def scanned(a, ellipsoid, steps=20001):
    """Extreme ratios in the plane, by looking everywhere."""
    angle = torch.linspace(0, math.pi, steps, dtype=F64)
    found = ratios(a, ellipsoid, torch.stack([angle.cos(), angle.sin()]))
    return found.min(), found.max()


@pytest.mark.parametrize("p", [0.5, 1.0, 1.5, 2.0, 3.0, 8.0])
def test_in_the_plane_found_is_the_truth_and_proved_is_beyond_it(p):
    a = gaussian(9, 2)
    for ellipsoid in (any_ellipsoid(a, p, 4), Lewis().fit(a, p)):
        low, high = scanned(a, ellipsoid)
        found, proved = distortion_found(a, ellipsoid, steps=80), distortion_bound(a, ellipsoid)
        assert found.greatest == pytest.approx(high, rel=1e-4)
        # Below p = 1 minima are cusps where the gradient points elsewhere: near them is what can be asked.
        assert found.least == pytest.approx(low, rel=1e-3 if p >= 1 else 0.1)
        assert low * (1 - (1e-4 if p >= 1 else 1e-2)) <= found.least
        assert proved.least <= low * (1 + 1e-9)
        assert high <= proved.greatest * (1 + 1e-9)


@pytest.mark.parametrize("p", [0.5, 1.0, 1.5, 2.0, 3.0, 8.0])
def test_any_ellipsoid_can_be_certified(p):
    for seed in range(4):
        a = gaussian(80, 5, seed)
        made = certified(a, any_ellipsoid(a, p, seed + 10))
        holds(a, made, slack=1e-9)
        assert distortion_bound(a, made).least == pytest.approx(1)
        assert distortion_bound(a, made).ratio == pytest.approx(made.bound)


def test_climbing_finds_more_than_chance():
    a = gaussian(500, 12)
    ellipsoid = Lewis().fit(a, 1.0)
    chance = distortion_found(a, ellipsoid, steps=0)
    climbed = distortion_found(a, ellipsoid, steps=40)
    assert climbed.ratio - 1 > 2 * (chance.ratio - 1)
    assert climbed == distortion_found(a, ellipsoid, steps=40)


def test_another_matrix_has_another_ellipsoid():
    a = gaussian(50, 3)
    flat = replace(Lewis().fit(a, 1.0), directions=torch.eye(4, dtype=F64)[1:])
    with pytest.raises(KflatsError, match="vanishes"):
        distortion_bound(torch.cat([gaussian(50, 3), torch.zeros(50, 1, dtype=F64)], 1), flat)


# Algorithm A1


@pytest.mark.parametrize(("contraction", "power"), [("1/sqrt(d)", 1.0), ("1/d", 1.5)])
def test_a1_proves_its_constant(contraction, power):
    for p in (1.0, 1.5, 3.0):
        wide = (gaussian(80, 4) * torch.logspace(0, -1, 4, dtype=F64), 4), (holed(), 5)
        for a, d in ((gaussian(60, 2), 2), (outlier(10)[:, :3], 3), *(wide if power == 1 else ())):
            found = Loewner(contraction).fit(a, p)
            assert found.converged
            assert found.rank == d
            assert 1 <= found.bound <= (1.01 * d**power) ** p
            holds(a, found, slack=1e-9)


def test_a1_in_few_directions_of_many():
    a = gaussian(60, 3) @ gaussian(3, 20, 1)
    found = Loewner().fit(a, 1.0)
    assert found.rank == 3
    holds(a, found)


def test_a1_stops_before_the_loewner_ellipsoid():
    """Around {2 |x|_1 <= 1} in the plane that is the circle of radius 1/2. A1's test is passed by its first ball, of
    radius 1/sqrt(2), already: what it returns has twice the area."""
    a = torch.eye(2, dtype=F64).repeat(2, 1)
    found = Loewner(tolerance=1e-6).fit(a, 1.0)
    torch.testing.assert_close(1 / found.axes, torch.full((2,), 0.5**0.5, dtype=F64))
    assert found.iterations == 0
    holds(a, found)
    torch.testing.assert_close(1 / Lewis().fit(a, 1.0).axes, torch.full((2,), 0.5, dtype=F64))


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 4.0])
def test_the_gradient_is_that_of_the_norm(p):
    a, x = gaussian(30, 4), gaussian(4, 1, 2)[:, 0]
    slope = _gradient(a, x, p)
    assert float(slope @ x) == pytest.approx(float(_norms(a @ x, p)))
    step = 1e-6 * torch.eye(4, dtype=F64)
    moved = (_norms(a @ (x.unsqueeze(1) + step), p) - _norms(a @ (x.unsqueeze(1) - step), p)) / 2e-6
    torch.testing.assert_close(slope, moved, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("d", [2, 3, 8])
def test_cuts_keep_what_they_must_and_take_volume(d):
    gen = torch.Generator().manual_seed(d)
    x = torch.randn(d, 20000, generator=gen, dtype=F64)
    x /= torch.linalg.vector_norm(x, dim=0)
    slope, ball, center = torch.eye(d, dtype=F64)[0], torch.eye(d, dtype=F64), torch.zeros(d, dtype=F64)
    for depth in (0.0, 1 / (d + 1), 0.99 / d):
        shape, moved = _cut(ball, center, slope, depth)
        inside = x[:, x[0] <= depth] - moved.unsqueeze(1)
        assert float((inside * torch.linalg.solve(shape, inside)).sum(0).max()) <= 1
        if depth <= 1 / (d + 1):
            assert float(torch.linalg.det(shape)) < 1
    for depth in (0.1 / d, 0.99 / math.sqrt(d)):
        shape = _cut_both(ball, slope, depth)
        inside = x[:, x[0].abs() <= depth]
        assert float((inside * torch.linalg.solve(shape, inside)).sum(0).max()) <= 1 + 1e-12
        assert float(torch.linalg.det(shape)) < 1


def test_a1_ends_with_a_clear_error():
    with pytest.raises(KflatsError, match=r"did not end within 5 steps on 4 columns.*Lewis"):
        Loewner("1/d", max_steps=5).fit(gaussian(60, 4) * torch.logspace(0, -2, 4, dtype=F64), 1.0)
    with pytest.raises(KflatsError, match="refused above 32"):
        Loewner().fit(gaussian(100, 40), 1.0)
    with pytest.raises(KflatsError, match=r"below 1.*Lewis"):
        Loewner().fit(gaussian(100, 4), 0.5)
    with pytest.raises(KflatsError, match="no contraction"):
        Loewner("1/2")
    with pytest.raises(KflatsError, match="is not possible"):
        Loewner(tolerance=0.0)


# Columns that are nearly or altogether dead

WAYS = {"lewis": Lewis(), "loewner": Loewner()}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_columns_below_the_floor_count_as_zeros(way):
    for size in (1e-6, 1e-9, 1e-11, 1e-15, 1e-20, 1e-30, 0.0):
        for dtype in (F64, torch.float32):
            a = (gaussian(150, 5) * torch.tensor([1, 1, size, 0.5, size], dtype=F64)).to(dtype)
            for p in (0.5, 1.0, 3.0):
                if isinstance(way, Loewner) and p < 1:
                    continue
                if isinstance(way, Loewner) and size == 1e-9:  # not below the floor, and squared beyond float64
                    with pytest.raises(KflatsError, match="algorithm A1 refuses singular values"):
                        way.fit(a, p)
                    continue
                found = way.fit(a, p)
                assert found.rank == (5 if size > COLUMN_FLOOR else 3)
                assert torch.isfinite(found.axes).all()
                holds(a, found, slack=1e-6 if dtype == F64 else 1e-5)


# Bad input


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_what_cannot_be_done_is_refused_clearly(way):
    a = gaussian(200, 4)
    for p in (0.0, -1.0, math.inf, math.nan, "1", True, None):
        with pytest.raises(KflatsError, match="a power of p="):
            way.fit(a, p)
    with pytest.raises(KflatsError, match=r"too extreme|below 1"):
        way.fit(a, 0.01)
    with pytest.raises(KflatsError, match="too extreme"):
        way.fit(a, 2000.0)
    broken = a.clone()
    broken[5, 1] = math.nan
    with pytest.raises(KflatsError, match="NaN or infinite values, first in row 5"):
        way.fit(broken, 1.5)
    with pytest.raises(KflatsError, match="expected floating-point"):
        way.fit(torch.ones(3, 2, dtype=torch.int64), 1.5)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_row_of_1e30(way):
    """float32 cannot square it, and float64 keeps no digit of the other rows beside it: both say so."""
    a = gaussian(200, 4)
    a[3] = 1e30
    with pytest.raises(KflatsError, match="too large to be squared"):
        way.fit(a.float(), 1.0)
    with pytest.raises(KflatsError, match=r"row 3 is 1.*e\+30 times as long as the median row"):
        way.fit(a, 1.0)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_zeros_have_no_axes(way):
    found = way.fit(torch.zeros(300, 3), 1.5)
    assert found.rank == 0
    assert found.directions.shape == (0, 3)
    assert found.bound == 1
    assert len(found.factor) == 0
    assert distortion_bound(torch.zeros(300, 3), found) == distortion_found(torch.zeros(300, 3), found)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_odd_shapes_and_types(way):
    wide = [name for name in MATRICES if "wide" in name]
    for name in (*wide, "constant columns", "one row", "one column", "float16"):
        a, rank = MATRICES[name]
        found = way.fit(a, 1.5)
        assert found.rank == rank
        assert found.axes.dtype == F64
        holds(a, found)


def test_settings_make_sense():
    for way, bad in (
        (Lewis, {"iterations": 0}),
        (Lewis, {"iterations": "3"}),
        (Lewis, {"iterations": 2.5}),
        (Lewis, {"tolerance": 1.0}),
        (Lewis, {"tolerance": math.nan}),
        (Lewis, {"tolerance": "small"}),
        (Loewner, {"tolerance": math.inf}),
        (Loewner, {"max_steps": 1.5}),
    ):
        with pytest.raises(KflatsError, match=r"is not (possible|supported)"):
            way(**bad)


@pytest.mark.parametrize("p", [0.5, 1.0, 3.0])
def test_rows_that_float32_cannot_bring_to_length_1(p):
    a = gaussian(200, 4, dtype=torch.float32)
    a[:3] *= 1e-40
    a[3] = 0
    holds(a, Lewis().fit(a, p), slack=1e-5)
    deficient = torch.cat([a, a[:, :1]], 1)
    assert Lewis().fit(deficient, p).rank == 4


# Theorem 2


def smallest_around(points, weights, steps=4000):
    """M of {x'M^-1 x <= d}, the smallest ellipsoid around points and their mirror images, from positive weights."""
    d = points.shape[1]
    for _ in range(steps):
        m = points.T @ (points * weights[:, None])
        weights = weights * np.einsum("nd,dn->n", points, np.linalg.solve(m, points.T)) / d
    return points.T @ (points * weights[:, None])


def test_theorem_2_the_smallest_ellipsoid_is_one_from_any_start():
    """L is the hull of points and their mirror images: L lies in E, and E/sqrt(d) in L, by their support functions."""
    draw = np.random.default_rng(0)
    points, d = draw.normal(size=(12, 3)), 3
    first, other = (smallest_around(points, draw.dirichlet(np.full(12, spread))) for spread in (100.0, 0.5))
    np.testing.assert_allclose(first, other, rtol=1e-3, atol=1e-3 * np.abs(first).max())
    assert np.einsum("nd,dn->n", points, np.linalg.solve(first, points.T)).max() <= d * (1 + 1e-3)
    y = draw.normal(size=(2000, d))
    width = np.abs(y @ points.T).max(1) / np.sqrt(np.einsum("nd,de,ne->n", y, first, y))
    assert width.min() >= 1 - 1e-3


def test_theorem_2_others_lie_between_as_well():
    """Around the unit ball of R^3 two larger balls: definition 1 holds of both, though neither is the smallest."""
    a, x = torch.eye(3, dtype=F64), gaussian(3, 200)
    for radius in (1.2, 1.7):
        ball = Ellipsoid(torch.full((3,), 1 / radius, dtype=F64), torch.eye(3, dtype=F64), 2.0, 3.0, 0, True)
        ratio = ratios(a, ball, x)
        assert 1 < ratio.min() <= ratio.max() < 3
    ball = Ellipsoid(torch.full((3,), 1 / 1.8, dtype=F64), torch.eye(3, dtype=F64), 2.0, 3.0, 0, True)
    assert ratios(a, ball, x).max() > 3, "beyond sqrt(3) it does not"


# The real table


@pytest.mark.slow
def test_on_the_real_table(minilm):
    """Twelve iterations to a millionth, two per cent after three, definition 1 in adversarial directions."""
    from safetensors import safe_open

    with safe_open(minilm / "model.safetensors", framework="pt") as file:
        table = file.get_tensor("embeddings.word_embeddings.weight").float()
    d = table.shape[1]
    found = Lewis().fit(table, 1.0)
    assert found.converged
    assert found.iterations <= 12
    assert found.bounds[2] <= 1.02 * d**0.5
    worst = distortion_found(table, found, directions=4, steps=2)
    assert worst.least >= 1 - 1e-6
    assert worst.greatest <= found.bound
