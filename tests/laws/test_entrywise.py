"""Entrywise lp low rank and refits: falling, optimal where that can be known, the truth under wrong entries."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table import crossed

from kflats.common.errors import KflatsError
from kflats.numerics.entrywise import HeldBackRows, entrywise_low_rank
from kflats.numerics.flats import Stopping
from kflats.numerics.rows import TensorRows
from kflats.numerics.svd import truncated_svd

F64 = torch.float64
POWERS = (1.0, 1.5, 0.5)


def draw(n, d, seed, dtype=F64):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def planted(n, d, rank, share, noise, seed):
    """(matrix, clean): low rank and noise, a share of the entries replaced by +-20."""
    gen = torch.Generator().manual_seed(seed)
    clean = torch.randn(n, rank, generator=gen, dtype=F64) @ torch.randn(rank, d, generator=gen, dtype=F64) / rank**0.5
    noisy = clean + noise * torch.randn(n, d, generator=gen, dtype=F64)
    wrong = torch.rand(n, d, generator=gen) < share
    return torch.where(wrong, 20 * torch.randn(n, d, generator=gen, dtype=F64).sign(), noisy), clean


def sum_of(a, made, p, weights=None):
    rest = (a.to(F64) - made.coordinates.to(F64) @ made.basis.to(F64)).abs().pow(p).sum(1)
    return float(rest.sum() if weights is None else (weights * rest).sum())


def least_l1(a, v):
    """min_u |a - u V|_1 for every row, by linear programming: (sums, coordinates)."""
    r, d = v.shape
    sums, found = [], []
    for row in a.numpy():
        cost = np.concatenate([np.zeros(r), np.ones(d)])
        table = np.block([[v.numpy().T, -np.eye(d)], [-v.numpy().T, -np.eye(d)]])
        bounds = [(None, None)] * r + [(0, None)] * d
        done = scipy.optimize.linprog(cost, table, np.concatenate([row, -row]), bounds=bounds)
        assert done.status == 0
        sums.append(done.fun)
        found.append(done.x[:r])
    return np.array(sums), np.array(found)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 20), d=st.integers(1, 12), seed=st.integers(0, 10**6), data=st.data())
def test_the_sum_is_that_of_the_factors(n, d, seed, data):
    rank = data.draw(st.integers(1, min(n, d)))
    p = data.draw(st.sampled_from(POWERS))
    dtype = data.draw(st.sampled_from([torch.float32, F64]))
    a = draw(n, d, seed, dtype)
    weights = data.draw(st.sampled_from([None, torch.rand(n, generator=torch.Generator().manual_seed(seed)) + 0.1]))
    made = entrywise_low_rank(a, rank, p=p, weights=weights, stop=Stopping(2e-5, 30))
    total = float(a.double().abs().pow(p).sum())
    slack = 1e-3 * total if p < 1 else 1e-5 * total
    assert made.error == pytest.approx(sum_of(a, made, p, weights), rel=1e-4, abs=slack)
    assert made.coordinates.dtype == made.basis.dtype == dtype
    torch.testing.assert_close(made.basis @ made.basis.T, torch.eye(rank, dtype=dtype), atol=1e-5, rtol=0)


@pytest.mark.parametrize("weights", [None, torch.arange(1.0, 13.0, dtype=F64)])
def test_it_starts_at_the_svd_and_at_two_it_is_the_svd(weights):
    a = draw(12, 7, 1)
    svd = truncated_svd(a, 3, left=weights)
    square = entrywise_low_rank(a, 3, p=2, weights=weights)
    assert square.error == pytest.approx(svd.error, rel=1e-9)
    torch.testing.assert_close(square.coordinates @ square.basis, svd.coordinates @ svd.basis)
    if weights is None:
        for p in POWERS:
            made = entrywise_low_rank(a, 3, p=p)
            assert made.objective[0] == pytest.approx(sum_of(a, svd, p), rel=1e-9)
            assert made.error < made.objective[0]


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.0, *(pytest.param(p, marks=pytest.mark.slow) for p in (1.5, 0.5))])
def test_rank_one_of_two_columns_against_all_directions(p):
    """For each direction (c, s) the best coordinate of a row meets one of its two entries if p <= 1: enumerate them;
    else search it. The sum found is one of the local minima of that curve, and near the least."""
    for seed in range(6):
        for turned in (False, True):
            a = draw(12, 2, seed)
            through = torch.atan2(a[:, 1], a[:, 0]) % torch.pi
            angle = torch.cat([torch.linspace(0, torch.pi, 6001, dtype=F64)[:-1], through]).sort().values
            c, s = angle.cos(), angle.sin()
            cross = (a[:, :1] * s - a[:, 1:] * c).abs()
            if p <= 1:
                curve = (cross / torch.maximum(c.abs(), s.abs())).pow(p).sum(0)
            else:  # by duality the distance in lp to a line is |<a, normal>| over the normal's norm in the dual space
                q = p / (p - 1)
                curve = (cross / (c.abs().pow(q) + s.abs().pow(q)).pow(1 / q)).pow(p).sum(0)
            made = entrywise_low_rank(a.T if turned else a, 1, p=p, stop=Stopping(1e-7, 3000))
            least = float(curve.min())
            assert made.error >= least * (1 - 1e-3)
            assert made.error <= 1.15 * least
            if p > 1:
                hollow = (curve <= curve.roll(1)) & (curve <= curve.roll(-1))
                assert float((curve[hollow] - made.error).abs().min()) <= 1e-3 * made.error


@pytest.mark.slow
def test_no_factor_alone_can_be_much_better():
    """The end of the descent, judged by linear programs: with either factor held the other one is nearly the best."""
    for n, d, rank in ((12, 6, 2), (6, 12, 2), (15, 5, 3)):
        a = draw(n, d, 5)
        made = entrywise_low_rank(a, rank, stop=Stopping(1e-8, 2000))
        rows, _ = least_l1(a, made.basis)
        columns, _ = least_l1(a.T.contiguous(), made.coordinates.T.contiguous())
        assert made.error <= 1.02 * min(rows.sum(), columns.sum())


@pytest.mark.parametrize("p", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_three_per_cent_of_wrong_entries(p, dtype):
    a, clean = planted(1000, 120, 10, 0.03, 0.1, seed=2)

    def distance(made):
        return float((made.coordinates.to(F64) @ made.basis.to(F64) - clean).norm())

    made = entrywise_low_rank(a.to(dtype), 10, p=p)
    assert made.converged
    assert distance(made) < distance(truncated_svd(a, 10)) / 15
    floor = distance(truncated_svd(clean + (0.1 * draw(1000, 120, 3)), 10))
    # Under Gaussian noise the median's variance is pi / 2 of the mean's; below p = 1 it is larger still.
    assert distance(made) < (1.45 if p == 1 else 1.8) * floor


@pytest.mark.parametrize("p", [1.0, 0.5])
def test_wrong_entries_of_any_size_are_forgotten(p):
    """An SVD holds nothing but them: started there, all of these end farther from the truth than zero is."""
    for size in (60.0, 1e3, 1e5):
        a, clean = planted(300, 60, 4, 0.03, 0.1, seed=2)
        a = torch.where(a.abs() == 20, size / 20 * a, a)
        made, svd = entrywise_low_rank(a, 4, p=p), truncated_svd(a, 4)
        floor = truncated_svd(clean + 0.1 * draw(300, 60, 3), 4)
        far, worst, least = (float((m.coordinates @ m.basis - clean).norm()) for m in (made, svd, floor))
        assert far < (1.45 if p == 1 else 1.8) * least
        assert worst > float(clean.norm())
        assert made.objective[0] == pytest.approx(sum_of(a, svd, p), rel=1e-9)
        assert made.objective[1] < made.objective[0] / 1.5


def test_far_entries_are_held_back_by_rows_and_columns():
    gen = torch.Generator().manual_seed(1)
    rows, columns = torch.logspace(-3, 3, 90, dtype=F64), torch.logspace(2, -2, 40, dtype=F64)
    a = (1 + torch.rand(90, 40, generator=gen, dtype=F64)) * rows[:, None] * columns
    wrong = torch.rand(90, 40, generator=gen) < 0.05
    held = HeldBackRows(TensorRows(torch.where(wrong, -1e4 * a, a)))
    found = torch.cat([block for _, block in held.blocks(7)])
    assert torch.equal(found[~wrong], a[~wrong])  # none is thrice the median of its own, whatever the scales
    ratio = (found / a)[wrong]
    assert bool(((ratio < -1) & (ratio > -12)).all())
    assert torch.equal(held.take(torch.tensor([3, 80])), found[[3, 80]])
    assert float(found.abs().max()) <= held.largest
    assert HeldBackRows(TensorRows(torch.zeros(5, 3))).largest == 0


@pytest.mark.parametrize("p", POWERS)
def test_tables_of_which_nothing_would_be_held(p):
    sparse = torch.zeros(30, 9, dtype=F64)
    sparse[::3, 2], sparse[1, 7] = 5.0, -3.0
    made = entrywise_low_rank(sparse, 2, p=p)
    torch.testing.assert_close(made.coordinates @ made.basis, sparse)
    tiny = torch.full((30, 9), 1e-25, dtype=F64)
    tiny[torch.arange(30), torch.arange(30) % 9] = draw(1, 30, 31)[0]
    made = entrywise_low_rank(tiny, 2, p=p)
    assert made.error == pytest.approx(sum_of(tiny, made, p), rel=1e-4)


def test_without_noise_the_truth_is_found():
    a, clean = planted(300, 60, 4, 0.05, 0.0, seed=4)
    made = entrywise_low_rank(a, 4, stop=Stopping(1e-7, 600))
    assert float((made.coordinates @ made.basis - clean).norm() / clean.norm()) < 2e-3


@pytest.mark.parametrize("p", POWERS)
def test_scale_signs_and_order_change_nothing_else(p):
    a = draw(30, 8, 6)
    made = entrywise_low_rank(a, 3, p=p)
    exact = entrywise_low_rank(2.0**-40 * a, 3, p=p)
    assert exact.objective == pytest.approx([2.0 ** (-40 * p) * value for value in made.objective], rel=1e-12)
    torch.testing.assert_close(2.0**40 * exact.coordinates, made.coordinates)
    signs = draw(1, 8, 7).sign()
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    moved = entrywise_low_rank(3e5 * (a * signs)[order], 3, p=p)
    assert moved.error == pytest.approx(3e5**p * made.error, rel=2e-2)  # another path may end in another hollow


@pytest.mark.parametrize("p", POWERS)
def test_weights(p):
    a, times = draw(12, 5, 8), torch.tensor([1, 2, 3] * 4)
    weighted = entrywise_low_rank(a, 2, p=p, weights=times.double())
    assert weighted.error == pytest.approx(sum_of(a, weighted, p, times), rel=1e-9)
    repeated = entrywise_low_rank(a.repeat_interleave(times, 0), 2, p=p)
    assert weighted.error == pytest.approx(repeated.error, rel=0.05)
    idle = torch.cat([torch.full((12,), 2.0), torch.zeros(3)])
    more = torch.cat([a, 1e9 * draw(3, 5, 9)])
    made, alone = (entrywise_low_rank(m, 2, p=p, weights=idle[: len(m)]) for m in (more, a))
    assert made.error == pytest.approx(alone.error, rel=1e-6)
    torch.testing.assert_close(made.coordinates[12:], more[12:] @ made.basis.T)


@pytest.mark.parametrize("p", POWERS)
def test_blocks_do_not_matter(monkeypatch, p):
    a = draw(100, 6, 10)
    made = entrywise_low_rank(a, 2, p=p, stop=Stopping(2e-5, 20))
    monkeypatch.setattr("kflats.numerics.rows.BLOCK", 7)
    other = entrywise_low_rank(a, 2, p=p, stop=Stopping(2e-5, 20))
    assert other.error == pytest.approx(made.error, rel=1e-8)


@pytest.mark.parametrize("p", POWERS)
def test_hollow_matrices(p):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, F64):
        zero = entrywise_low_rank(torch.zeros(5, 4, dtype=dtype), 2, p=p)
        assert zero.error == 0
        assert zero.converged
        # Rank 1, with columns of zeros.
        thin = torch.outer(torch.arange(1.0, 9), torch.tensor([1.0, 0.0, 2.0, 0.0])).to(dtype)
        for shape in (thin, thin.T):
            flat = entrywise_low_rank(shape, 2, p=p)
            torch.testing.assert_close(flat.coordinates @ flat.basis, shape.to(flat.basis.dtype), atol=1e-4, rtol=1e-4)
            assert flat.converged
        same = torch.cat([draw(10, 3, 11), torch.ones(10, 1, dtype=F64)], dim=1).to(dtype)  # a constant column
        full = entrywise_low_rank(same, 4, p=p)
        torch.testing.assert_close(full.coordinates @ full.basis, same.to(full.basis.dtype), atol=1e-4, rtol=1e-4)
        assert entrywise_low_rank(same, 2, p=p).error > 0


def test_one_row_of_1e30_is_named():
    a = draw(20, 5, 13)
    a[7] = 1e30
    with pytest.raises(KflatsError, match=r"row 7 is .* times as long as the median row"):
        entrywise_low_rank(a, 2)
    with pytest.raises(KflatsError, match="too large to be squared"):
        entrywise_low_rank(a.float(), 2)
    weights = torch.ones(20)
    weights[7] = 0
    made = entrywise_low_rank(a, 2, weights=weights)
    torch.testing.assert_close(made.coordinates[7], a[7] @ made.basis.T)


@pytest.mark.parametrize("p", POWERS)
def test_the_limit_is_kept_and_said(p):
    steps = []
    made = entrywise_low_rank(draw(40, 8, 14), 3, p=p, stop=Stopping(0, 4, lambda *s: steps.append(s)))
    assert not made.converged
    assert [step[:2] for step in steps] == [("irls", i) for i in range(4)]
    assert made.error == min(made.objective[0], *(step[2] for step in steps))


@pytest.mark.parametrize(("p", "shape"), crossed(POWERS, [(60, 12), (12, 60)]))
def test_no_iteration_raises_the_sum(p, shape):
    """As reported by every iteration, kept or not; for p < 1 the smoothing falls too, and its bound a little behind."""
    for weighted in (False, True):
        for seed in range(4):
            a = draw(shape[0], 3, seed) @ draw(3, shape[1], seed + 9) + draw(*shape, seed + 50)
            w = torch.rand(shape[0], generator=torch.Generator().manual_seed(seed)) + 0.1 if weighted else None
            sums = []
            entrywise_low_rank(
                a, 3, p=p, weights=w, stop=Stopping(2e-5, 300, lambda *step, to=sums: to.append(step[2]))
            )
            assert len(sums) > 10
            assert all(later <= earlier * (1 + (1e-4 if p < 1 else 1e-9)) for earlier, later in pairwise(sums))


@pytest.mark.parametrize(("p", "least"), [(0.1, -5), (0.1, -9), (0.25, -12), (0.5, -6)])
def test_rows_whose_factor_single_precision_has_not_still_count(p, least):
    a, _ = planted(300, 40, 4, 0.03, 0.05, seed=2)
    weights = torch.logspace(least, 0, 300)
    made = entrywise_low_rank(a.float(), 4, p=p, weights=weights)
    assert made.coordinates.dtype == torch.float32
    assert made.error == pytest.approx(sum_of(a.float(), made, p, weights), rel=1e-4)
    assert torch.isfinite(made.coordinates).all()


def test_weights_without_a_root_are_refused():
    a, weights = draw(30, 6, 1), torch.ones(30)
    weights[4] = 1e-5
    with pytest.raises(KflatsError, match=r"row weights of 1e-05 of the largest have no root.*p=0\.01"):
        entrywise_low_rank(a, 2, p=0.01, weights=weights)


@pytest.mark.parametrize("p", [0, -1, 2.5, math.inf, math.nan, True, "1"])
def test_exponents_out_of_range_are_refused(p):
    with pytest.raises(KflatsError, match="is not supported"):
        entrywise_low_rank(draw(4, 3, 0), 1, p=p)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "outside 1..4"),
        ({"rank": 5}, "outside 1..4"),
        ({"weights": torch.ones(3)}, "6 row weights"),
        ({"weights": torch.zeros(6)}, "all row weights are zero"),
        ({"stop": Stopping(1.0)}, "tolerance"),
        ({"stop": Stopping(0.1, 0)}, "max_iterations"),
        ({"matrix": torch.full((6, 4), torch.nan)}, "NaN"),
        ({"matrix": torch.full((6, 4), torch.inf)}, "infinite"),
        ({"matrix": torch.ones(6)}, "non-empty matrix"),
    ],
)
def test_bad_input_is_refused(change, message):
    with pytest.raises(KflatsError, match=message):
        entrywise_low_rank(**{"matrix": draw(6, 4, 15), "rank": 2, **change})
