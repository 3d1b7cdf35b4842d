"""Algorithm 1 of the Robust SVD paper does what its (corrected) theorems say, and what the printed ones get wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("loewner", reason="experiments/ is not here")

from loewner import Loewner, _cut, _gradient, _norms

from kflats.common.errors import KflatsError
from kflats.numerics import gram
from kflats.numerics import robust_svd as module
from kflats.numerics.entrywise import entrywise_low_rank
from kflats.numerics.fit import fit_flats
from kflats.numerics.robust_svd import Lewis, robust_svd
from kflats.numerics.rows import TensorRows
from kflats.numerics.subspace import robust_subspace
from kflats.numerics.svd import truncated_svd

F64 = torch.float64
WAYS = {"lewis": Lewis(), "loewner": Loewner()}


def draw(n, d, seed=0, dtype=F64):
    a = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=F64) * torch.linspace(
        2, 0.2, d, dtype=F64
    )
    return a.to(dtype)


def powers(a, p):
    return float((np.abs(a.to(F64).numpy()) ** p).sum())


def built(found):
    return found.coordinates.to(F64) @ found.basis.to(F64)


# Algorithm 1


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0])
def test_the_error_lies_between_its_bounds(way, p):
    a = draw(300, 6)
    for k in (1, 3, 5):
        found = robust_svd(a, k, p, ellipsoid=way)
        assert found.error == pytest.approx(powers(a - built(found), p))
        assert found.total == pytest.approx(powers(a, p))
        assert found.error_at_least <= found.error * (1 + 1e-9)
        assert found.error <= found.error_at_most * (1 + 1e-9)
        assert found.error_at_most == pytest.approx(found.bound * found.error_at_least)
        # Theorem 5, with the sigma its proof gives.
        assert found.error_at_most <= found.bound * 6 * float(found.axes[k]) ** p * (1 + 1e-9)


@settings(max_examples=25)
@given(p=st.floats(0.3, 4), seed=st.integers(0, 10**6), k=st.integers(1, 4), n=st.integers(5, 60))
def test_the_bounds_hold_on_any_matrix(p, seed, k, n):
    a = draw(n, 5, seed)
    found = robust_svd(a, k, p, ellipsoid=Lewis(iterations=5))
    assert found.error_at_least * (1 - 1e-6) <= powers(a - built(found), p) <= found.error_at_most * (1 + 1e-6)


@pytest.mark.parametrize("p", [0.5, 1.0, 3.0])
def test_the_split_is_of_u_d_v(p):
    """U = A V D^-1, and each factor takes the root of D."""
    a, k = draw(200, 6), 4
    found = robust_svd(a, k, p)
    d, v = found.ellipsoid.axes, found.ellipsoid.directions
    u = a @ v.T / d
    torch.testing.assert_close(u * d @ v, a)
    torch.testing.assert_close(found.coordinates, u[:, :k] * d[:k].sqrt())
    torch.testing.assert_close(found.basis, d[:k].sqrt().unsqueeze(1) * v[:k])
    torch.testing.assert_close(built(found), a @ v[:k].T @ v[:k])  # an orthogonal projection of the rows


def test_at_2_it_is_the_svd():
    a = draw(80, 7)
    for k in (1, 4):
        ours, svd = robust_svd(a, k, 2.0), truncated_svd(a, k)
        torch.testing.assert_close(built(ours), svd.coordinates @ svd.basis)
        assert ours.error == pytest.approx(svd.error)
        assert ours.error_at_least == pytest.approx(ours.error_at_most)


@pytest.mark.parametrize("p", [0.5, 1.0, 3.0])
def test_at_full_rank_nothing_is_lost(p):
    for a in (draw(60, 5), draw(5, 60), draw(6, 6)):
        torch.testing.assert_close(built(robust_svd(a, min(a.shape), p)), a)


@pytest.mark.parametrize("p", [0.5, 1.0, 1.5, 3.0])
def test_remark_8_on_a_tall_matrix_is_the_svd(p):
    a = draw(90, 6)
    found, svd = robust_svd(a.T, 3, p), truncated_svd(a, 3)
    torch.testing.assert_close(built(found).T, svd.coordinates @ svd.basis)
    assert found.error_at_least <= found.error <= found.error_at_most


def test_a_weight_of_3_is_three_copies():
    a = draw(60, 4)
    weights = torch.randint(0, 4, (60,), generator=torch.Generator().manual_seed(1)).to(F64)
    copies = a.repeat_interleave(weights.to(torch.int64), dim=0)
    for p in (0.5, 1.0, 3.0):
        weighted = robust_svd(a, 2, p, weights=weights, ellipsoid=Lewis(tolerance=1e-10))
        repeated = robust_svd(copies, 2, p, ellipsoid=Lewis(tolerance=1e-10))
        torch.testing.assert_close(weighted.axes, repeated.axes, rtol=1e-6, atol=0)
        assert weighted.error == pytest.approx(repeated.error, rel=1e-6)
        assert weighted.total == pytest.approx(repeated.total)
        assert weighted.error_at_least <= weighted.error <= weighted.error_at_most
        # A row that counts nothing still gets its projection.
        v = weighted.ellipsoid.directions[:2]
        torch.testing.assert_close(built(weighted), a @ v.T @ v)


@pytest.mark.parametrize(("p", "least"), [(0.2, -12), (0.5, -30), (1.0, -30)])
def test_weights_that_their_root_takes_beyond_float32(p, least):
    """w^(1/p) of 1e-12 is 1e-60 at p = 0.2; all that counts is w."""
    a, w = draw(300, 6, dtype=torch.float32), torch.logspace(least, 0, 300, dtype=F64)
    found = robust_svd(a, 2, p, weights=w)
    wide = robust_svd(a.double(), 2, p, weights=w)
    assert found.error == pytest.approx(wide.error, rel=1e-4)
    assert found.error_at_least * 0.999 <= found.error <= found.error_at_most


@pytest.mark.parametrize(("weight", "p"), [(1e-26, 0.5), (1e-20, 0.25), (1e30, 0.5), (1e30, 1.0), (1e-26, 1.0)])
def test_equal_weights_of_any_size_only_scale(weight, p):
    for dtype in (torch.float32, F64):
        a = draw(100, 5, dtype=dtype)
        plain, found = robust_svd(a, 2, p), robust_svd(a, 2, p, weights=torch.full((100,), weight, dtype=F64))
        torch.testing.assert_close(built(found), built(plain), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.axes, weight ** (1 / p) * plain.axes, rtol=1e-5, atol=0)
        for ours, theirs in zip(
            (found.error, found.total, found.error_at_least, found.error_at_most),
            (plain.error, plain.total, plain.error_at_least, plain.error_at_most),
            strict=True,
        ):
            assert ours == pytest.approx(weight * theirs, rel=1e-4)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_dead_columns_leave_the_bounds_and_the_svd(way):
    for size in (1e-6, 1e-9, 1e-11, 1e-15, 1e-20, 1e-30, 0.0):
        for dtype in (F64, torch.float32):
            a = (draw(150, 5) / torch.linspace(2, 0.2, 5) * torch.tensor([1, 1, size, 0.5, size], dtype=F64)).to(dtype)
            for p in (0.5, 1.0, 1.5, 2.0, 3.0):
                if isinstance(way, Loewner) and (p < 1 or (size == 1e-9 and p != 2)):  # what it refuses
                    continue
                found = robust_svd(a, 2, p, ellipsoid=way)
                assert found.error == pytest.approx(powers(a - built(found), p), rel=1e-4)
                assert found.error_at_least <= found.error * (1 + 1e-6)
                assert found.error <= found.error_at_most * (1 + 1e-6)
                if p == 2:
                    assert found.error == pytest.approx(truncated_svd(a, 2).error, rel=1e-5)


def test_a_matrix_of_ones_has_one_axis():
    for shape in ((8, 30), (30, 8), (6, 6)):
        for p in (0.5, 1.0, 3.0):
            found = robust_svd(torch.ones(shape), 3, p)
            assert len(found.axes) == 1
            torch.testing.assert_close(built(found), torch.ones(shape, dtype=F64), atol=1e-5, rtol=0)


def test_axes_beyond_single_precision_are_refused():
    a = torch.randn(100_000, 2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(KflatsError, match=r"single precision no room.*p nearer to 2"):
        robust_svd(a, 1, 0.045)
    assert robust_svd(a, 1, 0.1).error > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_stored_types(dtype):
    a = draw(200, 5, dtype=dtype)
    found = robust_svd(a, 3, 1.0)
    assert found.coordinates.dtype == found.basis.dtype == torch.float32
    assert found.error == pytest.approx(robust_svd(a.to(F64), 3, 1.0).error, rel=1e-4)
    assert robust_svd(TensorRows(a), 3, 1.0).error == found.error


def test_beyond_the_rank_there_are_zeros():
    a = draw(40, 2) @ draw(2, 6, 1)
    found = robust_svd(a, 4, 1.0)
    assert len(found.axes) == 2
    assert (found.basis[2:] == 0).all()
    torch.testing.assert_close(built(found), a)
    nothing = robust_svd(torch.zeros(9, 3), 2, 1.0)
    assert nothing.error == nothing.total == nothing.error_at_most == 0


@pytest.mark.parametrize(
    ("size", "p", "weight"), [(1e8, 40.0, None), (1e-8, 64.0, None), (1.0, 0.1, 1e40), (1.0, 0.1, 1e-40)]
)
def test_sums_beyond_double_precision_are_refused(size, p, weight):
    weights = None if weight is None else torch.full((60,), weight, dtype=F64)
    with pytest.raises(KflatsError, match=rf"leave double precision: p = {p:g}.*p nearer to 2"):
        robust_svd(size * draw(60, 5), 2, p, weights=weights)


RANKED = {
    "robust_svd": robust_svd,
    "robust_subspace": robust_subspace,
    "entrywise_low_rank": entrywise_low_rank,
    "truncated_svd": truncated_svd,
    "fit_flats": lambda matrix, rank, **more: fit_flats(matrix, 2, rank=rank, **more),
}


@pytest.mark.parametrize("fit", RANKED.values(), ids=RANKED.keys())
def test_what_is_no_matrix_and_no_rank_is_named(fit):
    a = draw(60, 5)
    with pytest.raises(KflatsError, match=r"expected a torch tensor of shape \(n, d\), found ndarray.*a tensor"):
        fit(a.numpy(), 1)
    for rank in (2.0, "2", True):
        with pytest.raises(KflatsError, match=r"a rank is a whole number, not .*1\.\.5"):
            fit(a, rank)
    with pytest.raises(KflatsError, match="a rank"):
        fit(a, None)
    if fit is not truncated_svd:
        with pytest.raises(KflatsError, match=r"carry gradients.*detach"):
            fit(a, 1, weights=torch.ones(60, requires_grad=True))


def test_bad_requests():
    a = draw(30, 4)
    for rank in (0, 5):
        with pytest.raises(KflatsError, match=r"outside 1\.\.4"):
            robust_svd(a, rank, 1.0)
    for p in (0.0, -2.0, math.inf, math.nan):
        with pytest.raises(KflatsError, match="a power of p="):
            robust_svd(a, 2, p)
    with pytest.raises(KflatsError, match="NaN"):
        robust_svd(a.log(), 2, 1.0)
    with pytest.raises(KflatsError, match="all row weights are zero"):
        robust_svd(a, 2, 1.0, weights=torch.zeros(30))


# Robustness


def test_outlying_rows_hardly_move_it():
    """Rank 20 plus noise, 5 % of the rows replaced: at p = 1/2 a fifth of the SVD's distance to the clean matrix."""
    gen = torch.Generator().manual_seed(0)
    signal = torch.randn(1500, 20, generator=gen) @ torch.randn(20, 60, generator=gen)
    clean = signal + 0.1 * signal.std() * torch.randn(1500, 60, generator=gen)
    noise = float((clean - signal).norm())
    a = clean.clone()
    hit = torch.randperm(1500, generator=gen)[:75]
    a[hit] = 20 * signal.std() * (2.0 * torch.randint(2, (75, 60), generator=gen) - 1)
    kept = torch.ones(1500, dtype=torch.bool)
    kept[hit] = False

    def far(found):
        return float((built(found) - signal)[kept].norm()) / noise

    svd = truncated_svd(a, 20)
    by_svd = float((svd.coordinates @ svd.basis - signal)[kept].norm()) / noise
    assert far(robust_svd(a, 20, 0.5)) <= by_svd / 5
    assert far(robust_svd(a, 20, 0.5)) <= 1.0
    assert far(robust_svd(a, 20, 1.0)) < by_svd


# What the paper prints, and what is so


def test_theorem_5s_lower_bound_is_false():
    """d sigma_d^p <= error: at p = 2, k = d - 1 the error is sigma_d^2 itself, d times less."""
    a = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    found = robust_svd(a, 2, 2.0)
    assert found.error == pytest.approx(1.0)
    assert 3 * float(found.axes[-1]) ** 2 == pytest.approx(3.0)
    assert found.error < 3 * float(found.axes[-1]) ** 2


def test_theorem_5s_upper_bound_needs_the_next_sigma():
    """Printed with sigma_k; its proof gives sigma_(k+1), smaller by what the cut is made at."""
    a = torch.diag(torch.tensor([100.0, 1.0])).repeat(2, 1)
    found = robust_svd(a, 1, 1.0)
    printed, proved = (2**1.5 * float(found.axes[k]) for k in (0, 1))
    assert found.error <= found.error_at_most <= proved < printed / 90


@pytest.mark.parametrize("p", [1.0, 1.5, 3.0])
def test_theorem_5s_upper_bound_holds_with_the_next_sigma(p):
    """d^(1+p/2) sigma_(k+1)^p, on matrices with steep and flat spectra; a factor of the dimension is needed."""
    d, shares = 5, []
    for seed in range(6):
        a = draw(60, d, seed) * torch.logspace(0, -seed / 2, d, dtype=F64)
        for k in range(1, d):
            found = robust_svd(a, k, p)
            shares.append(powers(a - built(found), p) / float(found.axes[k]) ** p)
    assert max(shares) <= d ** (1 + p / 2)
    assert max(shares) > 1


def test_claim_3_does_not_say_what_theorem_5_uses():
    """|Dx| >= sigma_d holds for unit x; of D - D_k, whose least singular value is 0, it does not."""
    axes = robust_svd(draw(60, 5), 2, 1.0, ellipsoid=Lewis()).ellipsoid.axes
    x = torch.nn.functional.normalize(torch.cat([draw(200, 5, 1), torch.eye(5, dtype=F64)]), dim=1)
    assert float((x * axes).norm(dim=1).min()) >= float(axes[-1]) * (1 - 1e-12)
    rest = axes.clone()
    rest[:2] = 0
    assert float((x * rest).norm(dim=1).min()) < float(axes[-1]) / 10


def test_line_4_must_square_the_radius():
    """For A = (I; I)/20, ||Ax||_1 <= 1 reaches 10: its ball is F = 100 I, and F = r I stops at sqrt 10."""
    a, x = torch.eye(2, dtype=F64).repeat(2, 1) / 20, torch.tensor([10.0, 0.0], dtype=F64)
    assert float(_norms(a @ x, 1.0)) == pytest.approx(1)
    found = Loewner().fit(a, 1.0)
    assert float((found.factor @ x).norm()) <= 1 + 1e-9
    assert float(x @ x) / float(1 / found.axes[-1]) > 1  # the same radius, not squared


def test_the_printed_cut_loses_a_part_of_the_body():
    """A vertex of E/d allows a cut as shallow as 1/d of the width; the printed step supposes 1/(d+1)."""
    depth = 0.45  # between 1/3 and 1/2
    ball, slope, center = torch.eye(2, dtype=F64), torch.tensor([1.0, 0.0], dtype=F64), torch.zeros(2, dtype=F64)
    point = torch.tensor([depth, math.sqrt(1 - depth**2)], dtype=F64)  # in the ball and in the halfspace

    def place(shape, moved):
        return float((point - moved) @ torch.linalg.solve(shape, point - moved))

    assert place(*_cut(ball, center, slope, 1 / 3)) == pytest.approx(1.057, abs=1e-3)
    assert place(*_cut(ball, center, slope, depth)) <= 1


def test_the_printed_constants_are_those_of_a_cut_at_one_over_d_plus_1():
    for d in (2, 5, 8):
        ball, slope = torch.eye(d, dtype=F64), torch.eye(d, dtype=F64)[0]
        z, tau = 1 / (d + 1) ** 2, 2 / (d * (d + 1))
        sigma, zeta = d**3 * (d + 2) / ((d + 1) ** 3 * (d - 1)), 1 + 1 / (2 * d**2 * (d + 1) ** 2)
        shape, moved = _cut(ball, torch.zeros(d, dtype=F64), slope, 1 / (d + 1))
        torch.testing.assert_close(shape, zeta * sigma * (ball - tau * torch.outer(slope, slope)))
        torch.testing.assert_close(moved, -z * slope)


def test_the_printed_gradient_is_not_one():
    """Lines 8 and 18 divide |a_ij x_j| by |a_i'x|: near a row's zero that grows without bound, where the gradient's
    norm stays that of a row."""
    a = torch.tensor([[1.0, 1.0], [1.0, 2.0]], dtype=F64)
    for gap in (1e-2, 1e-4, 1e-6):
        x = torch.tensor([1.0, gap - 1.0], dtype=F64)
        y = a @ x
        printed = (a * x / y.abs().unsqueeze(1)).sum(0)
        assert float(printed.norm()) > 1 / gap
        slope = _gradient(a, x, 1.0)
        assert float(slope.norm()) <= 4
        assert float(slope @ x) == pytest.approx(float(_norms(y, 1.0)))


def test_a_square_matrix_leaves_nothing_to_iterate():
    """The body is the image of an lp ball, and the ball around that is the image of a ball: the SVD, for every p."""
    a = draw(5, 5)
    for p in (1.0, 1.5, 3.0):
        found, svd = robust_svd(a, 2, p, ellipsoid=Loewner()), truncated_svd(a, 2)
        torch.testing.assert_close(built(found), svd.coordinates @ svd.basis)
        torch.testing.assert_close(built(robust_svd(a, 2, p)), svd.coordinates @ svd.basis)


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_a_wide_matrix_in_pieces_is_the_whole(p, monkeypatch):
    """Its directions are made some columns at a time, its basis some rows at a time."""
    a = torch.randn(12, 70, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    whole = robust_svd(a, 5, p)
    monkeypatch.setattr(module, "_PANEL", 9)
    monkeypatch.setattr(module, "stripes", lambda matrix: (slice(i, i + 2) for i in range(0, len(matrix), 2)))
    parts = robust_svd(a, 5, p)
    torch.testing.assert_close(parts.coordinates @ parts.basis, whole.coordinates @ whole.basis)
    assert parts.error == pytest.approx(whole.error)
    assert parts.error_at_least == pytest.approx(whole.error_at_least)


@pytest.mark.parametrize("p", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("kind", ["full", "low rank", "short rows", "a row of zeros"])
def test_a_wide_matrix_that_is_held_once_has_the_same_ellipsoid(kind, p, monkeypatch):
    """Its row space is that of its Gram, repaired, in place of a QR of it."""
    a = torch.randn(9, 70, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    if kind == "low rank":
        a = a[:, :4] @ a[:4]
    elif kind == "short rows":
        a = a * torch.logspace(0, -9, 9, dtype=torch.float64).unsqueeze(1)
    elif kind == "a row of zeros":
        a[3] = 0
    rank = 4 if kind == "low rank" else 8
    whole = robust_svd(a, 3, p)
    monkeypatch.setattr(gram, "LARGE", 0)
    once = robust_svd(a, 3, p)
    assert once.ellipsoid.rank == whole.ellipsoid.rank >= rank
    torch.testing.assert_close(once.axes, whole.axes, rtol=1e-6, atol=0)
    directions = once.ellipsoid.directions
    torch.testing.assert_close(
        directions @ directions.T, torch.eye(len(directions), dtype=torch.float64), atol=1e-9, rtol=0
    )
    torch.testing.assert_close(once.coordinates @ once.basis, whole.coordinates @ whole.basis, rtol=1e-6, atol=1e-9)
    # Rows that are kept exactly leave their rounding, and small powers of it are not small.
    rounding = a.numel() * (1e-15 * float(a.abs().max())) ** p
    assert once.error == pytest.approx(whole.error, rel=1e-6, abs=rounding)
    assert once.error_at_least == pytest.approx(whole.error_at_least, rel=1e-6)


def test_a_large_wide_matrix_of_zeros_has_no_axes(monkeypatch):
    monkeypatch.setattr(gram, "LARGE", 0)
    assert robust_svd(torch.zeros(3, 20), 2).ellipsoid.rank == 0
