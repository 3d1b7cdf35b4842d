"""Low rank under element weights: falling, at least as good as its start, and the optimum where that can be known."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kflats.errors import KflatsError
from kflats.importance.weighting import Weighting
from kflats.methods import SVD, Problem
from kflats.numerics import elementwise
from kflats.numerics.elementwise import prefix_errors, weighted_low_rank
from kflats.numerics.rows import TensorRows
from kflats.numerics.svd import truncated_svd

F64 = torch.float64


def draw(n, d, seed, holes=0.0):
    gen = torch.Generator().manual_seed(seed)
    a = torch.randn(n, d, generator=gen, dtype=F64)
    f = torch.rand(n, d, generator=gen, dtype=F64) ** 4 * torch.rand(n, 1, generator=gen, dtype=F64) ** 4
    return a, f * (torch.rand(n, d, generator=gen) >= holes)


def begun(a, f, rank):
    """The closed form with F's row and column sums, which has to be beaten."""
    columns = f.sum(0).clamp_min(1e-4 * float(f.sum(0).mean()))
    found = truncated_svd(a, rank, left=f.sum(1), right=columns / f.sum())
    return found.coordinates, found.basis


def objective(a, f, coordinates, basis):
    return float((f * (a.to(F64) - coordinates.to(F64) @ basis.to(F64)).square()).sum())


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 20), d=st.integers(1, 12), seed=st.integers(0, 10**6), data=st.data())
def test_the_objective_never_rises_and_is_that_of_the_factors(n, d, seed, data):
    rank, holes = data.draw(st.integers(1, min(n, d))), data.draw(st.sampled_from([0.0, 0.3, 0.8]))
    dtype = data.draw(st.sampled_from([torch.float32, F64]))
    a, f = draw(n, d, seed, holes)
    f[0, 0] = 1.0
    a = a.to(dtype)
    start = begun(a, f, rank)
    made = weighted_low_rank(a, f, *start, tolerance=0, max_iterations=8)
    assert made.objective[0] == pytest.approx(objective(a, f, *start), rel=1e-6, abs=1e-12)
    assert all(later < earlier for earlier, later in zip(made.objective, made.objective[1:], strict=False))
    reached = objective(a, f, made.coordinates, made.basis)
    assert made.error == pytest.approx(reached, rel=1e-4, abs=1e-6 * made.objective[0] + 1e-12)
    assert made.coordinates.dtype == made.basis.dtype == dtype
    torch.testing.assert_close(made.basis @ made.basis.T, torch.eye(rank, dtype=dtype), atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n", [2, 6])
@pytest.mark.parametrize("wild", [False, True], ids=["mild", "wild"])
def test_rank_one_of_two_columns_against_all_directions(n, seed, wild):
    """The global optimum where weights differ by a factor of five; a local one, always, where they differ by 1e6."""
    a, f = draw(n, 2, seed)
    if not wild:
        f = 0.2 + 0.8 * f / f.max()
    angle = torch.linspace(0, torch.pi, 200_001, dtype=F64)[:-1, None]
    v = torch.cat([angle.cos(), angle.sin()], dim=1)
    # For each direction the best coordinate of every row is known: sum_j f a v / sum_j f v^2.
    gain = (v @ (f * a).T).square() / (v.square() @ f.T).clamp_min(1e-300)
    curve = float((f * a.square()).sum()) - gain.sum(1)
    hollow = (curve <= curve.roll(1)) & (curve <= curve.roll(-1))
    made = weighted_low_rank(a, f, *begun(a, f, 1), tolerance=0, max_iterations=2000)
    least, nearest = float(curve.min()), float((curve[hollow] - made.error).abs().min())
    slack = 1e-6 * float(curve.max())
    assert made.error >= least - slack
    assert nearest <= slack + 1e-3 * made.error
    if not wild:
        assert made.error <= least + slack


@pytest.mark.parametrize(("n", "d", "rank"), [(4, 3, 1), (4, 4, 2), (5, 4, 2)])
def test_no_quasi_newton_search_from_its_end_or_from_anywhere_near_finds_less(n, d, rank):
    a, f = draw(n, d, 11)
    f += 0.02
    made = weighted_low_rank(a, f, *begun(a, f, rank), tolerance=1e-12, max_iterations=3000)

    def loss(x):
        u, v = x[: n * rank].reshape(n, rank), x[n * rank :].reshape(rank, d)
        rest = u @ v - a.numpy()
        slope = 2 * f.numpy() * rest
        return (f.numpy() * rest**2).sum(), np.concatenate([(slope @ v.T).ravel(), (u.T @ slope).ravel()])

    here = np.concatenate([made.coordinates.numpy().ravel(), made.basis.numpy().ravel()])
    noise = np.random.default_rng(0)
    found = [
        scipy.optimize.minimize(
            loss, here + size * noise.standard_normal(len(here)), jac=True, options={"gtol": 1e-9}
        ).fun
        for size in (0.0, 0.05, 0.05, 0.05)
    ]
    assert made.error <= min(found) * 1.001 + 1e-9


def test_weights_of_rank_one_are_solved_by_the_start():
    a, _ = draw(30, 10, 0)
    rows, columns = torch.rand(30, dtype=F64) + 0.1, torch.rand(10, dtype=F64) + 0.1
    f = rows[:, None] * columns
    start = truncated_svd(a, 4, left=rows, right=columns)
    made = weighted_low_rank(a, f, start.coordinates, start.basis)
    assert made.objective[0] == pytest.approx(start.error, rel=1e-9)
    assert made.error == pytest.approx(start.error, rel=1e-9)
    assert made.converged


def test_what_is_of_that_rank_where_it_counts_is_completed():
    gen = torch.Generator().manual_seed(0)
    truth = torch.randn(30, 3, generator=gen, dtype=F64) @ torch.randn(3, 20, generator=gen, dtype=F64)
    seen = (torch.rand(30, 20, generator=gen) < 0.7).to(F64)
    a = torch.where(seen > 0, truth, torch.randn(30, 20, generator=gen, dtype=F64))
    made = weighted_low_rank(a, seen, *begun(a, seen, 3), tolerance=0, max_iterations=1000)
    torch.testing.assert_close(made.coordinates @ made.basis, truth, atol=1e-3, rtol=1e-3)


def test_rows_and_columns_of_weight_zero_keep_the_start_and_stay_small():
    a, f = draw(20, 8, 1)
    f[3] = f[7] = 0
    f[:, 2] = 0
    start = begun(a, f, 3)
    made = weighted_low_rank(a, f, *start, tolerance=0, max_iterations=30)
    assert torch.isfinite(made.coordinates).all()
    size = torch.linalg.vector_norm(made.coordinates, dim=1)
    assert float(size[[3, 7]].max()) < 10 * float(a.norm(dim=1).max())
    # A column without weight has no say in the basis, and no reason to leave where it began.
    begun_at, ended_at = (c @ b for c, b in (start, (made.coordinates, made.basis)))
    assert float(ended_at[:, 2].abs().max()) <= 10 * max(1.0, float(begun_at[:, 2].abs().max()))


def test_almost_no_weight_drags_no_row_far_away():
    """Elements of weight 1e-9 would be fitted exactly, at any price elsewhere, were steps not held back."""
    a, f = draw(40, 12, 2)
    f[:, 4:] *= 1e-9
    made = weighted_low_rank(a, f, *begun(a, f, 6), max_iterations=50, tolerance=0)
    assert float((made.coordinates @ made.basis).abs().max()) < 20 * float(a.abs().max())


def test_batches_do_not_change_the_result(monkeypatch):
    a, f = draw(50, 12, 3)
    whole = weighted_low_rank(a, f, *begun(a, f, 4))
    monkeypatch.setattr(elementwise, "_BATCH", 100)
    parts = weighted_low_rank(a, f, *begun(a, f, 4))
    torch.testing.assert_close(whole.coordinates @ whole.basis, parts.coordinates @ parts.basis)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_huge_and_tiny_weights_are_the_same_problem(dtype):
    a, f = draw(30, 10, 4)
    a = a.to(dtype)
    usual = weighted_low_rank(a, f, *begun(a, f, 3), tolerance=0, max_iterations=5)
    for factor in (1e-40, 1e40):
        other = weighted_low_rank(a, f * factor, *begun(a, f, 3), tolerance=0, max_iterations=5)
        assert other.error == pytest.approx(factor * usual.error, rel=1e-4)
    rows = torch.logspace(-30, 0, 30, dtype=F64)[:, None]  # rows that differ by any factor are solved apart
    wild = weighted_low_rank(a, f * rows, *begun(a, f * rows, 3), tolerance=0, max_iterations=5)
    assert torch.isfinite(wild.coordinates).all()
    assert wild.error <= wild.objective[0]


def test_the_method_ends_below_its_closed_form():
    a, f = draw(60, 20, 5)
    w = Weighting(left=f.sum(1), right=f.sum(0) / f.sum(), elements=f)
    made = SVD().fit(Problem(TensorRows(a.float()), SVD().cost((60, 20), 6, 4), 4, w))
    two_sided = SVD().fit(
        Problem(TensorRows(a.float()), SVD().cost((60, 20), 6, 4), 4, Weighting(left=w.left, right=w.right))
    )
    stored = two_sided.matrix.dense().detach().to(F64)
    assert made.objective[0] == pytest.approx(float((f * (a - stored).square()).sum()), rel=1e-5)
    assert made.objective[-1] < 0.97 * made.objective[0]


def test_errors_of_prefixes_are_those_of_their_factors():
    a, f = draw(150, 7, 6)
    coordinates, basis = begun(a, f, 5)
    errors = prefix_errors(a, f, coordinates, basis)
    for q in range(6):
        assert float(errors[q]) == pytest.approx(objective(a, f, coordinates[:, :q], basis[:q]), rel=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, f, u, v: (a, -f, u, v), "not negative"),
        (lambda a, f, u, v: (a, f * torch.nan, u, v), "finite"),
        (lambda a, f, u, v: (a, f * torch.inf, u, v), "finite"),
        (lambda a, f, u, v: (a, f * 0, u, v), "all element weights are zero"),
        (lambda a, f, u, v: (a, f[:-1], u, v), "for each of 10 x 6 elements"),
        (lambda a, f, u, v: (a, f.T, u, v), "for each of 10 x 6 elements"),
        (lambda a, f, u, v: (a.index_fill(0, torch.tensor([3]), torch.nan), f, u, v), "row 3"),
        (lambda a, f, u, v: (a, f, u[:-1], v), "does not fit"),
        (lambda a, f, u, v: (a, f, u, v[:, :-1]), "does not fit"),
        (lambda a, f, u, v: (a, f, u, v[:-1]), "does not fit"),
    ],
)
def test_bad_input_is_refused(change, message):
    a, f = draw(10, 6, 0)
    with pytest.raises(KflatsError, match=message):
        weighted_low_rank(*change(a, f, *begun(a, f, 2)))
