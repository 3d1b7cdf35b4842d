"""One flat under any loss: falling, a local optimum against all directions, the truth under outliers, bad input."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kflats.common.errors import KflatsError
from kflats.numerics.flats import Stopping
from kflats.numerics.loss import Huber, Power, Squared, Truncated
from kflats.numerics.subspace import robust_subspace
from kflats.numerics.svd import truncated_svd

F64 = torch.float64
LOSSES = (Power(1), Power(0.5), Power(1.5), Huber(0.7), Truncated(1.0), Huber(1.0, "median"), Truncated(2.0, "median"))
losses = st.sampled_from(LOSSES)


def draw(n, d, seed, dtype=F64):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def planted(n, d, rank, share, noise, seed, size=20.0):
    """Rows of a flat, with noise, a share of them replaced by far ones; (matrix, clean, replaced)."""
    gen = torch.Generator().manual_seed(seed)
    clean = torch.randn(n, rank, generator=gen, dtype=F64) @ torch.randn(rank, d, generator=gen, dtype=F64) / rank**0.5
    noisy = clean + noise * torch.randn(n, d, generator=gen, dtype=F64)
    gone = torch.zeros(n, dtype=torch.bool)
    gone[torch.randperm(n, generator=gen)[: int(share * n)]] = True
    return torch.where(gone[:, None], size * torch.randn(n, d, generator=gen, dtype=F64).sign(), noisy), clean, gone


def sum_of(loss, a, basis, weights=None):
    a, basis = a.to(F64), basis.to(F64)
    costs = loss.rho((a - a @ basis.T @ basis).square().sum(1))
    return float(costs.sum() if weights is None else (weights * costs).sum())


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 25), d=st.integers(1, 10), seed=st.integers(0, 10**6), loss=losses, data=st.data())
def test_the_sum_never_rises_and_is_that_of_the_flat(n, d, seed, loss, data):
    rank = data.draw(st.integers(1, min(n, d)))
    dtype = data.draw(st.sampled_from([torch.float32, F64]))
    a = draw(n, d, seed, dtype)
    if loss == Truncated(1.0):  # else every row may lie out of its reach, which is refused
        a = a / d**0.5
    weights = data.draw(st.sampled_from([None, torch.rand(n, generator=torch.Generator().manual_seed(seed)) + 0.01]))
    runs = []  # what every iteration reports, kept or not, from every start and stage

    def note(_, iteration, value):
        if iteration == 0:
            runs.append([])
        runs[-1].append(value)

    made = robust_subspace(a, rank, loss, weights=weights, stop=Stopping(0.0, 30, note))
    whole = float(a.double().square().sum(1).pow(0.25).sum()) + float(a.double().square().sum())
    for run in runs:
        assert all(later <= earlier + 1e-5 * whole for earlier, later in pairwise(run))
    total = sum_of(made.loss, a, torch.zeros(0, d), weights)
    assert made.error == pytest.approx(sum_of(made.loss, a, made.basis, weights), rel=1e-3, abs=1e-3 * total)
    torch.testing.assert_close(made.basis @ made.basis.T, torch.eye(rank, dtype=dtype), atol=1e-5, rtol=0)
    torch.testing.assert_close(made.coordinates, a @ made.basis.T, atol=1e-5, rtol=1e-5)
    assert made.coordinates.dtype == made.basis.dtype == dtype


@pytest.mark.parametrize("loss", [Power(1), Power(0.5), Power(1.5), Huber(0.7), Truncated(1.0)])
def test_lines_in_the_plane_against_all_directions(loss):
    """Always a local optimum, near the least; the least itself where rho is nearly a square."""
    for seed in range(5):
        a = draw(40, 2, seed) * torch.tensor([1.0, 0.4], dtype=F64)
        a[:4] = 6 * draw(4, 2, seed + 100)
        # The minima of sums of distances are lines through rows: these directions belong to the grid.
        through = torch.atan2(a[:, 1], a[:, 0]) % torch.pi
        angle = torch.cat([torch.linspace(0, torch.pi, 20_001, dtype=F64)[:-1], through]).sort().values
        normal = torch.stack([-angle.sin(), angle.cos()], dim=1)
        curve = loss.rho((a @ normal.T).square()).sum(0)
        hollow = (curve <= curve.roll(1)) & (curve <= curve.roll(-1))
        made = robust_subspace(a, 1, loss, stop=Stopping(0.0, 2000))
        least, nearest = float(curve.min()), float((curve[hollow] - made.error).abs().min())
        assert made.error >= least * (1 - 1e-5)
        assert made.error <= 1.1 * least
        assert nearest <= 2e-3 * made.error
        if loss in (Power(1.5), Huber(0.7)):
            assert made.error <= least * (1 + 1e-4)


@pytest.mark.parametrize("loss", [Squared(), Power(2)])
def test_squares_are_the_svd(loss):
    for n, d, rank in ((30, 8, 3), (5, 9, 2), (6, 6, 6)):
        a, weights = draw(n, d, 1), torch.rand(n, generator=torch.Generator().manual_seed(2), dtype=F64) + 0.1
        made, svd = robust_subspace(a, rank, loss, weights=weights), truncated_svd(a, rank, left=weights)
        assert made.error == pytest.approx(svd.error, rel=1e-9, abs=1e-12)
        torch.testing.assert_close(made.basis.T @ made.basis, svd.basis.T @ svd.basis, atol=1e-9, rtol=0)
        assert made.converged
        assert len(made.objective) == 1


@pytest.mark.parametrize("loss", [Power(1), Power(0.5), Truncated(3.0, "median")])
def test_a_flat_without_noise_is_found_exactly_under_far_rows(loss):
    a, clean, gone = planted(400, 30, 4, 0.2, 0.0, seed=3)
    made = robust_subspace(a, 4, loss, stop=Stopping(0.0, 300))
    found = clean @ made.basis.T @ made.basis
    assert float((found - clean).norm() / clean.norm()) < 1e-6
    svd = truncated_svd(a, 4).basis
    assert float((clean @ svd.T @ svd - clean).norm() / clean.norm()) > 0.5
    assert not gone.all()


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_five_per_cent_of_far_rows(dtype):
    a, clean, gone = planted(1000, 60, 10, 0.05, 0.1, seed=4)

    def distance(basis):
        return float((a @ basis.T @ basis - clean)[~gone].norm())

    of_svd, floor = distance(truncated_svd(a, 10).basis), distance(truncated_svd(a[~gone], 10).basis)
    for loss, most in ((Power(1), 1.25), (Power(0.5), 1.05), (Truncated(3, "median"), 1.05)):
        basis = robust_subspace(a.to(dtype), 10, loss).basis.to(F64)
        assert distance(basis) < of_svd / 5
        assert distance(basis) < most * floor


def test_truncated_fits_the_rows_within_the_threshold_as_if_the_others_were_not_there():
    a, _, gone = planted(900, 40, 5, 0.03, 0.2, seed=5)
    made = robust_subspace(a, 5, Truncated(3.0, "median"))
    alone = robust_subspace(a[~gone], 5, Power(1))
    inliers = sum_of(Power(1), a[~gone], made.basis)
    assert inliers <= 1.05 * alone.error
    assert inliers == pytest.approx(alone.error, rel=1e-3)
    assert made.error == pytest.approx(inliers + made.loss.threshold * int(gone.sum()), rel=1e-2)


def test_rows_of_zeros_do_not_make_a_median_of_0():
    a, _, _ = planted(300, 12, 3, 0.05, 0.1, seed=6)
    holed = torch.cat([a, torch.zeros(400, 12, dtype=F64)])
    made, alone = (robust_subspace(m, 3, Truncated(3.0, "median")) for m in (holed, a))
    assert made.loss.threshold == pytest.approx(alone.loss.threshold, rel=1e-9)
    assert made.error == pytest.approx(alone.error, rel=1e-9)


@pytest.mark.parametrize("loss", [Power(1), Power(0.5), Huber(0.7), Truncated(1.0)])
def test_weights_are_multiplicities(loss):
    a, times = draw(12, 5, 6), torch.tensor([1, 2, 3] * 4)
    weighted = robust_subspace(a, 2, loss, weights=times.double(), stop=Stopping(1e-12, 3000))
    repeated = robust_subspace(a.repeat_interleave(times, 0), 2, loss, stop=Stopping(1e-12, 3000))
    assert weighted.error == pytest.approx(repeated.error, rel=1e-6)


def test_rows_of_no_weight_judge_nothing_and_are_projected():
    a = torch.cat([draw(20, 5, 7), 1e9 * draw(2, 5, 8)])
    weights = torch.cat([torch.full((20,), 3.0), torch.zeros(2)])
    made, alone = robust_subspace(a, 2, weights=weights), robust_subspace(a[:20], 2)
    assert made.error == pytest.approx(3 * alone.error, rel=1e-9)
    torch.testing.assert_close(made.basis.T @ made.basis, alone.basis.T @ alone.basis, atol=1e-7, rtol=0)
    torch.testing.assert_close(made.coordinates, a @ made.basis.T)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-6, 1e6), losses)
def test_scale_turn_and_order_change_nothing_else(seed, c, loss):
    a = draw(20, 5, seed)
    turn = torch.linalg.qr(draw(5, 5, seed + 1)).Q
    order = torch.randperm(20, generator=torch.Generator().manual_seed(seed))
    other = loss
    if getattr(loss, "unit", "median") == "absolute":
        other = type(loss)(c * loss.threshold)
    power = loss.q if isinstance(loss, Power) else 2 if isinstance(loss, Huber) else 1
    made, moved = robust_subspace(a, 2, loss), robust_subspace(c * (a @ turn)[order], 2, other)
    assert moved.error == pytest.approx(c**power * made.error, rel=1e-4)


def test_blocks_do_not_matter(monkeypatch):
    a = draw(300, 6, 9)
    made = robust_subspace(a, 2)
    monkeypatch.setattr("kflats.numerics.rows.BLOCK", 7)
    assert robust_subspace(a, 2).error == pytest.approx(made.error, rel=1e-10)


def test_more_columns_than_rows():
    a = draw(8, 50, 10)
    made = robust_subspace(a, 3, stop=Stopping(1e-10, 500))
    turn = torch.linalg.qr(a.T).Q  # the same rows in their own eight dimensions
    assert made.error == pytest.approx(robust_subspace(a @ turn, 3, stop=Stopping(1e-10, 500)).error)
    assert robust_subspace(a, 8).error < 1e-10


@pytest.mark.parametrize("loss", LOSSES)
def test_hollow_matrices(loss):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, F64):
        zero = robust_subspace(torch.zeros(6, 4, dtype=dtype), 2, loss)
        assert zero.error == 0
        assert zero.converged
        assert not zero.coordinates.any()
        # Rank 1, with columns of zeros.
        thin = torch.outer(torch.arange(1.0, 9), torch.tensor([1.0, 0.0, 2.0, 0.0])).to(dtype)
        flat = robust_subspace(thin, 2, loss)
        assert flat.error <= 1e-4 * float(thin.double().abs().sum())
        torch.testing.assert_close(flat.coordinates @ flat.basis, thin.to(flat.basis.dtype), atol=1e-3, rtol=1e-4)
        same = torch.cat([draw(10, 3, 11), torch.ones(10, 1, dtype=F64)], dim=1).to(dtype)  # a constant column
        assert robust_subspace(same, 4, loss).error <= 1e-3
        assert robust_subspace(same, 2, loss).error > 0


def test_far_rows_do_not_take_the_others_digits():
    a, clean, _ = planted(500, 20, 3, 0.02, 0.0, seed=12, size=1e6)
    for dtype in (torch.float32, F64):
        made = robust_subspace(a.to(dtype), 3, Truncated(3.0, "median"))
        assert float((clean @ made.basis.T.to(F64) @ made.basis.to(F64) - clean).norm() / clean.norm()) < 1e-4


def test_one_row_of_1e30_is_named():
    a = draw(20, 5, 13)
    a[7] = 1e30
    with pytest.raises(KflatsError, match=r"row 7 is .* times as long as the median row"):
        robust_subspace(a, 2)
    with pytest.raises(KflatsError, match="too large to be squared"):
        robust_subspace(a.float(), 2)
    with pytest.raises(KflatsError, match="infinite"):
        robust_subspace(a.half(), 2)
    weights = torch.ones(20)
    weights[7] = 0
    assert robust_subspace(a, 2, weights=weights).converged


def test_the_limit_is_kept_and_said():
    a = draw(200, 10, 14)
    phases = []
    made = robust_subspace(a, 3, stop=Stopping(0.0, 2, lambda *step: phases.append(step)))
    assert not made.converged
    assert len(phases) == 4  # two starts
    assert phases[0][:2] == ("power 1", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "outside 1..4"),
        ({"rank": 5}, "outside 1..4"),
        ({"weights": torch.ones(3)}, "6 row weights"),
        ({"weights": torch.zeros(6)}, "all row weights are zero"),
        ({"weights": -torch.ones(6)}, "not negative"),
        ({"loss": "power 1"}, "no loss of distances is 'power 1'"),
        ({"loss": Truncated(1e-9)}, "every row is farther than 1e-09 from every flat"),
        ({"stop": Stopping(1.0)}, "tolerance"),
        ({"stop": Stopping(0.1, 0)}, "max_iterations"),
        ({"matrix": torch.full((6, 4), torch.nan)}, "NaN"),
        ({"matrix": torch.ones(6)}, "non-empty matrix"),
        ({"matrix": torch.ones(6, 4, dtype=torch.int8)}, "floating-point"),
    ],
)
def test_bad_input_is_refused(change, message):
    with pytest.raises(KflatsError, match=message):
        robust_subspace(**{"matrix": draw(6, 4, 15), "rank": 2, **change})
