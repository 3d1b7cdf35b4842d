"""Truncated SVD is optimal under metrics on both sides, whatever the shape, the rank and the stored type."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kflats.common.errors import KflatsError
from kflats.numerics import svd
from kflats.numerics.rows import TensorRows
from kflats.numerics.svd import longest_by, project, right_metric, truncated_svd, weighted_spectrum

F64 = torch.float64
SHAPES = {"tall": (60, 9), "square": (12, 12), "wide": (7, 30), "one row": (1, 5), "one column": (20, 1)}


def root(gram):
    """Any R with R R' = gram, by scipy: nothing here is shared with the code under test."""
    gram = np.asarray(gram, dtype=np.float64)
    if gram.ndim == 1:
        return np.diag(np.sqrt(gram))
    values, vectors = scipy.linalg.eigh(gram)
    return vectors * np.sqrt(values.clip(0))


def numpy_error(a, rank, left=None, right=None):
    """The least weighted error of any matrix of that rank: the tail of scipy's singular values (Eckart-Young)."""
    a = np.asarray(a, dtype=np.float64)
    if left is not None:
        a = root(left).T @ a
    if right is not None:
        a = a @ root(right)
    values = scipy.linalg.svdvals(a)
    return float((values[rank:] ** 2).sum()), float((values**2).sum())


def reached(a, found, left=None, right=None):
    """The weighted error of the factors themselves, in float64."""
    rest = a.to(F64) - found.coordinates.to(F64) @ found.basis.to(F64)
    if right is not None:
        rest = rest @ torch.from_numpy(root(right))
    if left is not None and left.ndim == 2:
        rest = torch.from_numpy(root(left)).T @ rest
    per_row = rest.square().sum(1)
    return float(per_row.sum() if left is None or left.ndim == 2 else (left.to(F64) * per_row).sum())


def draw(n, d, seed, zero_weights=True):
    gen = torch.Generator().manual_seed(seed)
    a = torch.randn(n, d, generator=gen, dtype=F64) * torch.linspace(1, 0.1, d, dtype=F64)
    w = torch.rand(n, generator=gen, dtype=F64) ** 3 + 0.01
    if zero_weights and n > 2:
        w[:: max(2, n // 4)] = 0
    r = torch.randn(d, d, generator=gen, dtype=F64)
    return a, w, r @ r.T


def grams(size, seed):
    """Every kind of one side's metric: none, its diagonal with and without zeros, a Gram of full and of low rank."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * size, size, generator=gen, dtype=F64) * torch.logspace(0, -2, size, dtype=F64)
    low = x[: max(1, size // 3)]
    diagonal = torch.rand(size, generator=gen, dtype=F64) + 0.1
    holed = diagonal.clone()
    holed[1::3] = 0
    return {"none": None, "diagonal": diagonal, "holed": holed, "full": x.T @ x, "low rank": low.T @ low}


@pytest.fixture(params=["in float64", "held once"])
def wide_matrices(request, monkeypatch):
    """Both ways of a matrix of fewer rows than columns."""
    if request.param == "held once":
        monkeypatch.setattr(svd, "LARGE", 0)


SIDES = ("none", "diagonal", "holed", "full", "low rank")


@pytest.mark.usefixtures("wide_matrices")
@pytest.mark.parametrize("left", SIDES)
@pytest.mark.parametrize("right", SIDES)
def test_no_matrix_of_that_rank_is_better(left, right):
    for shape in SHAPES.values():
        a, _, _ = draw(*shape, seed=1)
        sides = grams(shape[0], 2)[left], grams(shape[1], 3)[right]
        spectrum = weighted_spectrum(a, left=sides[0], right=sides[1])
        assert spectrum.shape == (min(shape),)
        for rank in {1, min(shape) // 2 or 1, min(shape)}:
            found = truncated_svd(a, rank, left=sides[0], right=sides[1])
            least, total = numpy_error(a, rank, *sides)
            assert found.total == pytest.approx(total, rel=1e-9)
            assert found.error == pytest.approx(least, rel=1e-7, abs=1e-10 * total)
            assert reached(a, found, *sides) == pytest.approx(least, rel=1e-7, abs=1e-10 * total)
            assert float(spectrum[rank:].sum()) == pytest.approx(least, rel=1e-7, abs=1e-10 * total)
            torch.testing.assert_close(torch.linalg.vector_norm(found.basis, dim=1), torch.ones(rank, dtype=F64))


def test_at_full_rank_all_is_kept_whatever_was_judged():
    for shape in ((30, 7), (7, 30)):
        a = draw(*shape, seed=1)[0]
        for name in SIDES:
            found = truncated_svd(a, 7, left=grams(shape[0], 2)[name])
            torch.testing.assert_close(found.coordinates @ found.basis, a)
    found = truncated_svd(a := draw(30, 7, seed=1)[0], 7, right=grams(7, 3)["low rank"])
    torch.testing.assert_close(found.coordinates @ found.basis, a, atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("wide_matrices")
@pytest.mark.parametrize("shape", [(40, 9), (9, 40)], ids=["tall", "wide"])
def test_prefixes_are_the_best_of_their_rank(shape):
    a = draw(*shape, seed=1)[0]
    left, right = grams(shape[0], 2)["full"], grams(shape[1], 3)["full"]
    whole = truncated_svd(a, 6, left=left, right=right)
    for rank in range(1, 6):
        part = truncated_svd(a, rank, left=left, right=right)
        torch.testing.assert_close(whole.coordinates[:, :rank] @ whole.basis[:rank], part.coordinates @ part.basis)


@pytest.mark.usefixtures("wide_matrices")
@pytest.mark.parametrize("shape", [(40, 9), (9, 40)], ids=["tall", "wide"])
def test_a_diagonal_gram_is_its_diagonal(shape):
    a = draw(*shape, seed=1)[0]
    left, right = grams(shape[0], 2)["holed"], grams(shape[1], 3)["holed"]
    one = truncated_svd(a, 4, left=left, right=right)
    other = truncated_svd(a, 4, left=torch.diag(left), right=torch.diag(right))
    torch.testing.assert_close(one.coordinates @ one.basis, other.coordinates @ other.basis)
    assert one.error == pytest.approx(other.error, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_metrics_on_both_sides_of_smaller_types(dtype):
    for shape in ((80, 12), (12, 80)):
        a = draw(*shape, 3)[0].to(dtype)
        left, right = grams(shape[0], 2)["full"].float(), grams(shape[1], 3)["full"].float()
        found = truncated_svd(a, 5, left=left, right=right)
        least, total = numpy_error(a.to(F64), 5, left, right)
        assert found.coordinates.dtype == found.basis.dtype == torch.float32
        assert reached(a, found, left, right) == pytest.approx(least, rel=1e-3, abs=1e-6 * total)


@pytest.mark.parametrize("exponent", [-40, 40])
def test_the_scale_of_a_metric_only_scales_the_error(exponent):
    a, left, right = draw(40, 9, 1)[0].float(), grams(40, 2), grams(9, 3)
    for kind in ("diagonal", "full"):
        usual = truncated_svd(a, 4, left=left[kind], right=right[kind])
        scaled = truncated_svd(a, 4, left=left[kind] * 10.0**exponent, right=right[kind] * 10.0**exponent)
        assert scaled.error == pytest.approx(usual.error * 10.0 ** (2 * exponent), rel=1e-6)
        torch.testing.assert_close(scaled.coordinates @ scaled.basis, usual.coordinates @ usual.basis)


@pytest.mark.parametrize(
    ("side", "change", "message"),
    [
        ("left", lambda g: -g, "negative"),
        ("left", lambda g: g[:-1], "cannot have shape"),
        ("left", lambda g: g.index_fill(0, torch.tensor([2]), torch.nan), "NaN"),
        ("left", lambda g: g * 0, "judges nothing"),
        ("left", lambda g: g + torch.triu(torch.ones_like(g)), "not symmetric"),
        ("right", lambda g: -g, "negative"),
        ("right", lambda g: g[:, :-1], "cannot have shape"),
        ("right", lambda g: g.diagonal()[:-1], "cannot have shape"),
        ("right", lambda g: g * torch.inf, "NaN"),
        ("right", lambda g: g * 0, "judges nothing"),
        ("right", lambda g: g.diagonal() * 0, "judges nothing"),
        ("right", lambda g: g - torch.diag(g.diagonal()) + torch.eye(len(g)) * 1e-3, "positive semidefinite"),
    ],
)
def test_what_is_no_metric_is_refused(side, change, message):
    a = torch.randn(10, 10)
    with pytest.raises(KflatsError, match=message):
        truncated_svd(a, 2, **{side: change(grams(10, 1)["full"])})


@settings(max_examples=40)
@given(n=st.integers(1, 40), d=st.integers(1, 20), seed=st.integers(0, 10**6), data=st.data())
def test_float32_factors_reach_the_optimum(n, d, seed, data):
    a, w, _ = draw(n, d, seed, zero_weights=False)
    a = a.float()
    rank = data.draw(st.integers(1, min(n, d)))
    found = truncated_svd(a, rank, left=w)
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


@pytest.mark.usefixtures("wide_matrices")
@pytest.mark.parametrize("shape", [(50, 10), (10, 50)], ids=["tall", "wide"])
def test_rank_deficient_rows_cost_nothing_and_give_an_orthonormal_basis(shape):
    gen = torch.Generator().manual_seed(0)
    a = torch.randn(shape[0], 3, generator=gen, dtype=F64) @ torch.randn(3, shape[1], generator=gen, dtype=F64)
    for rank in (3, 7):
        found = truncated_svd(a, rank)
        assert reached(a, found) < 1e-10 * found.total
        torch.testing.assert_close(found.basis @ found.basis.T, torch.eye(rank, dtype=F64))


@pytest.mark.usefixtures("wide_matrices")
@pytest.mark.parametrize("shape", [(30, 6), (6, 30)], ids=["tall", "wide"])
@pytest.mark.parametrize("left", SIDES)
@pytest.mark.parametrize("right", SIDES)
def test_an_all_zero_matrix_gives_finite_factors(shape, left, right):
    zeros, sides = torch.zeros(*shape), {"left": grams(shape[0], 2)[left], "right": grams(shape[1], 3)[right]}
    found = truncated_svd(zeros, 2, **sides)
    assert found.error == found.total == 0
    assert not (found.coordinates @ found.basis).any()
    assert torch.isfinite(found.basis).all()
    assert not weighted_spectrum(zeros, **sides).any()


@pytest.mark.parametrize("shape", [(60, 8), (8, 60)], ids=["tall", "wide"])
def test_rows_of_weight_zero_get_their_projection_and_judge_nothing(shape):
    a, w, _ = draw(*shape, seed=5)
    found = truncated_svd(a, 3, left=w)
    torch.testing.assert_close(found.coordinates, a @ found.basis.T)
    silent = a.clone()
    silent[w == 0] = torch.randn_like(silent[w == 0]) * 100
    torch.testing.assert_close(
        truncated_svd(silent, 3, left=w).basis.T @ truncated_svd(silent, 3, left=w).basis,
        found.basis.T @ found.basis,
    )


def test_the_spectrum_is_that_of_the_weighted_gram():
    a, w, r = draw(40, 9, 2)
    half = torch.from_numpy(root(r))
    expected = torch.linalg.eigvalsh((w.sqrt()[:, None] * a @ half).T @ (w.sqrt()[:, None] * a @ half)).flip(0)
    torch.testing.assert_close(truncated_svd(a, 2, left=w, right=r).spectrum, expected)


def test_a_singular_metric_is_answered_with_finite_factors_that_are_optimal():
    a, w, r = draw(40, 9, 2)
    r[:, 4:] = r[4:] = 0  # only four directions are judged
    found = truncated_svd(a, 3, left=w, right=r)
    least, total = numpy_error(a, 3, w, r)
    assert torch.isfinite(found.basis).all()
    assert reached(a, found, w, r) == pytest.approx(least, rel=1e-6, abs=1e-8 * total)


def test_a_right_metric_is_split_and_inverted_where_it_is_regular():
    _, _, r = draw(5, 6, 0)
    for gram in (r, r.diagonal()):
        found = right_metric(gram, 6)
        eye = torch.eye(6, dtype=F64)
        torch.testing.assert_close(
            found.scale * found.measured(eye) @ found.measured(eye).T, eye * gram if gram.ndim == 1 else gram
        )
        torch.testing.assert_close(
            found.decoder(found.encoder(eye).T), eye, atol=1e-9, rtol=0
        ) if gram.ndim == 1 else torch.testing.assert_close(found.factor @ found.inverse, eye, atol=1e-9, rtol=0)


@pytest.mark.parametrize("left", ["none", "rows", "full"])
@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_the_parts_of_a_row_are_together_no_longer_than_the_bound(kind, left):
    a, w, right = draw(60, 9, 3, zero_weights=False)
    right = right if kind == "full" else right.diagonal()
    by_left = {"none": None, "rows": w, "full": torch.diag(w) + 0.1}[left]
    found = truncated_svd(a, 9, left=by_left, right=right)
    sums = (found.coordinates.abs() * found.basis.norm(dim=1)).sum(1)
    bound = longest_by(TensorRows(a), right)
    assert sums.max() <= bound * (1 + 1e-9)
    assert longest_by(TensorRows(1000 * a), right) == pytest.approx(1000 * bound)
    assert bound <= 100 * float(sums.max())


def test_parts_of_a_row_have_no_bound_where_directions_are_not_judged():
    a, _, right = draw(60, 9, 3)
    right[0] = right[:, 0] = 0
    assert longest_by(TensorRows(a), right) == float("inf")
    assert longest_by(TensorRows(a.T.contiguous()), torch.eye(60, dtype=F64)) == float("inf")


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
    assert 0 < largest <= 4 * a.numel()


def test_projection_by_blocks_is_the_projection():
    a, _, _ = draw(20000, 3, 0)
    basis = torch.linalg.qr(torch.randn(3, 2, dtype=F64)).Q.T
    torch.testing.assert_close(project(TensorRows(a), basis), a @ basis.T)


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
def test_bad_input_is_refused(change, message):
    a, rank, w = change(torch.randn(10, 6), torch.ones(10))
    with pytest.raises(KflatsError, match=message):
        truncated_svd(a, rank, left=w)
