"""Truncated SVD is optimal under row weights and a right metric, whatever the shape, the rank and the stored type."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kflats.errors import KflatsError
from kflats.numerics.rows import TensorRows
from kflats.numerics.svd import inverse_metric, project, range_finder_svd, truncated_svd

F64 = torch.float64
SHAPES = {"tall": (60, 9), "square": (12, 12), "wide": (7, 30), "one row": (1, 5), "one column": (20, 1)}


def numpy_error(a, rank, weights=None, metric=None):
    """The least weighted error of any matrix of that rank: the tail of scipy's singular values (Eckart-Young)."""
    a = np.asarray(a, dtype=np.float64)
    if weights is not None:
        a = a * np.sqrt(np.asarray(weights, dtype=np.float64))[:, None]
    if metric is not None:
        a = a @ np.asarray(metric, dtype=np.float64)
    values = scipy.linalg.svdvals(a)
    return float((values[rank:] ** 2).sum()), float((values**2).sum())


def reached(a, found, weights=None, metric=None):
    """The weighted error of the factors themselves, in float64."""
    rest = a.to(F64) - found.coordinates.to(F64) @ found.basis.to(F64)
    if metric is not None:
        rest = rest @ metric.to(F64)
    per_row = rest.square().sum(1)
    return float(per_row.sum() if weights is None else (weights.to(F64) * per_row).sum())


def draw(n, d, seed, zero_weights=True):
    gen = torch.Generator().manual_seed(seed)
    a = torch.randn(n, d, generator=gen, dtype=F64) * torch.linspace(1, 0.1, d, dtype=F64)
    w = torch.rand(n, generator=gen, dtype=F64) ** 3 + 0.01
    if zero_weights and n > 2:
        w[:: max(2, n // 4)] = 0
    r = torch.randn(d, d, generator=gen, dtype=F64)
    return a, w, r


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("measured", [False, True], ids=["euclid", "metric"])
def test_no_matrix_of_that_rank_is_better(shape, weighted, measured):
    a, w, r = draw(*shape, seed=1)
    weights, metric = (w if weighted else None), (r if measured else None)
    for rank in {1, min(shape) // 2 or 1, min(shape)}:
        found = truncated_svd(a, rank, weights=weights, metric=metric)
        least, total = numpy_error(a, rank, weights, metric)
        assert found.total == pytest.approx(total, rel=1e-10)
        assert found.error == pytest.approx(least, rel=1e-9, abs=1e-12 * total)
        assert reached(a, found, weights, metric) == pytest.approx(least, rel=1e-9, abs=1e-11 * total)


@settings(max_examples=40)
@given(n=st.integers(1, 40), d=st.integers(1, 20), seed=st.integers(0, 10**6), data=st.data())
def test_float32_factors_reach_the_optimum(n, d, seed, data):
    a, w, _ = draw(n, d, seed, zero_weights=False)
    a = a.float()
    rank = data.draw(st.integers(1, min(n, d)))
    found = truncated_svd(a, rank, weights=w)
    least, total = numpy_error(a, rank, w)
    assert found.coordinates.shape == (n, rank)
    assert found.basis.shape == (rank, d)
    assert found.error == pytest.approx(least, rel=1e-4, abs=2e-6 * total)
    assert reached(a, found, w) == pytest.approx(least, rel=1e-4, abs=2e-6 * total)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_stored_type_is_read_at_its_own_values(dtype):
    a = draw(80, 12, 3)[0].to(dtype)
    found = truncated_svd(a, 5)
    least, total = numpy_error(a.to(F64), 5)
    assert found.basis.dtype == (F64 if dtype == F64 else torch.float32)
    assert reached(a, found) == pytest.approx(least, rel=1e-4 if dtype != F64 else 1e-9, abs=1e-6 * total)


@pytest.mark.parametrize("shape", [(50, 10), (10, 50)], ids=["tall", "wide"])
def test_rank_deficient_rows_cost_nothing_and_give_an_orthonormal_basis(shape):
    gen = torch.Generator().manual_seed(0)
    a = torch.randn(shape[0], 3, generator=gen, dtype=F64) @ torch.randn(3, shape[1], generator=gen, dtype=F64)
    for rank in (3, 7):
        found = truncated_svd(a, rank)
        assert reached(a, found) < 1e-10 * found.total
        torch.testing.assert_close(found.basis @ found.basis.T, torch.eye(rank, dtype=F64))


@pytest.mark.parametrize("shape", [(30, 6), (6, 30)], ids=["tall", "wide"])
def test_an_all_zero_matrix_gives_finite_factors(shape):
    found = truncated_svd(torch.zeros(*shape), 2)
    assert found.error == found.total == 0
    assert not found.coordinates.any()
    assert torch.isfinite(found.basis).all()


@pytest.mark.parametrize("shape", [(60, 8), (8, 60)], ids=["tall", "wide"])
def test_rows_of_weight_zero_get_their_projection_and_judge_nothing(shape):
    a, w, _ = draw(*shape, seed=5)
    found = truncated_svd(a, 3, weights=w)
    torch.testing.assert_close(found.coordinates, a @ found.basis.T)
    silent = a.clone()
    silent[w == 0] = torch.randn_like(silent[w == 0]) * 100
    torch.testing.assert_close(
        truncated_svd(silent, 3, weights=w).basis.T @ truncated_svd(silent, 3, weights=w).basis,
        found.basis.T @ found.basis,
    )


def test_the_spectrum_is_that_of_the_weighted_gram():
    a, w, r = draw(40, 9, 2)
    expected = torch.linalg.eigvalsh((w.sqrt()[:, None] * a @ r).T @ (w.sqrt()[:, None] * a @ r)).flip(0)
    torch.testing.assert_close(truncated_svd(a, 2, weights=w, metric=r).spectrum, expected)


def test_a_singular_metric_is_answered_with_finite_factors_that_are_optimal():
    a, w, r = draw(40, 9, 2)
    r[:, 4:] = 0  # only four directions are judged
    found = truncated_svd(a, 3, weights=w, metric=r)
    least, total = numpy_error(a, 3, w, r)
    assert torch.isfinite(found.basis).all()
    assert reached(a, found, w, r) == pytest.approx(least, rel=1e-6, abs=1e-8 * total)


def test_an_inverse_metric_is_the_inverse_where_the_metric_is_regular():
    _, _, r = draw(5, 6, 0)
    torch.testing.assert_close(r @ inverse_metric(r), torch.eye(6, dtype=F64), atol=1e-9, rtol=0)
    with pytest.raises(KflatsError, match="judges nothing"):
        inverse_metric(torch.zeros(3, 3))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(400, 120), (50, 200)], ids=["tall", "wide"])
def test_the_range_finder_comes_close_to_the_optimum(shape, weighted):
    gen = torch.Generator().manual_seed(2)
    a = torch.randn(*shape, generator=gen) * torch.logspace(0, -2, shape[1])  # a decaying spectrum
    w = torch.rand(shape[0], generator=gen) + 0.1 if weighted else None
    found = range_finder_svd(a, 20, weights=w)
    least, _ = numpy_error(a, 20, w)
    assert least * (1 - 1e-4) <= reached(a, found, w) <= 1.01 * least
    assert found.error == pytest.approx(reached(a, found, w), rel=1e-3)


def test_the_range_finder_follows_its_seed_alone():
    a = draw(50, 20, 0)[0].float()
    before = torch.get_rng_state()
    first, again = range_finder_svd(a, 4, passes=0, seed=1), range_finder_svd(a, 4, passes=0, seed=1)
    other = range_finder_svd(a, 4, passes=0, seed=2)
    assert torch.equal(first.basis, again.basis)
    assert not torch.equal(first.basis, other.basis)
    assert torch.equal(before, torch.get_rng_state())


def test_full_matrices_are_never_formed(monkeypatch):
    """A 4000 x 4 matrix must not give 4000 x 4000 of anything: every tensor made stays below n * d * 4."""
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for item in out if isinstance(out, tuple) else (out,):
                if isinstance(item, torch.Tensor):
                    largest = max(largest, item.numel())
            return out

    a = draw(4000, 4, 0)[0]
    with Watch():
        truncated_svd(a, 2)
        truncated_svd(a.T.contiguous(), 2)
        range_finder_svd(a, 2)
    assert 0 < largest <= 4 * a.numel()


def test_projection_by_blocks_is_the_projection():
    a, _, _ = draw(20000, 3, 0)
    basis = torch.linalg.qr(torch.randn(3, 2, dtype=F64)).Q.T
    torch.testing.assert_close(project(TensorRows(a), basis), a @ basis.T)


@pytest.mark.parametrize("solve", [truncated_svd, range_finder_svd])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, w: (a, 0, w), "rank 0 is outside"),
        (lambda a, w: (a, 7, w), "rank 7 is outside 1..6"),
        (lambda a, w: (a.index_fill(0, torch.tensor([3]), torch.nan), 2, w), "row 3"),
        (lambda a, w: (a.index_fill(0, torch.tensor([5]), torch.inf), 2, w), "row 5"),
        (lambda a, w: (a, 2, -w), "not negative"),
        (lambda a, w: (a, 2, w * 0), "all row weights are zero"),
        (lambda a, w: (a, 2, w[:-1]), "expected 10 row weights"),
        (lambda a, w: (a, 2, w * torch.nan), "finite"),
        (lambda a, w: (a.long(), 2, w), "floating-point"),
        (lambda a, w: (a[0], 2, w), "non-empty matrix"),
        (lambda a, w: (a[:0], 2, w[:0]), "non-empty matrix"),
    ],
)
def test_bad_input_is_refused(solve, change, message):
    a, rank, w = change(torch.randn(10, 6), torch.ones(10))
    with pytest.raises(KflatsError, match=message):
        solve(a, rank, weights=w)
