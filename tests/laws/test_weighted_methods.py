"""What holds for every method and every kind of weighting it takes: the error is that of its matrix, in the metric."""

from __future__ import annotations

from typing import Any

import pytest
import scipy.linalg
import torch
from table import METHODS as ALL_METHODS
from table import each_method, slow

from kflats.common.errors import KflatsError
from kflats.importance.protocol import Weighting
from kflats.matrices.registry import FlatsMatrix, InterpolativeMatrix, LowRankMatrix
from kflats.methods import MESSI, SVD, Flats, KeepDense, KMeansSVD, Problem, from_name
from kflats.methods.matrix_error import row_errors, weighted_error
from kflats.numerics.rows import TensorRows

F64 = torch.float64
OF_SQUARES = ("svd", "svd, interpolative", "flats", "flats, nested", "flats, uniform", "flats, one", "k-means", "messi")
METHODS = {name: ALL_METHODS[name] for name in (*OF_SQUARES, "of another package")}
KINDS = {
    "none": (),
    "rows": ("diagonal left",),
    "holed rows": ("holed left",),
    "left": ("full left",),
    "low left": ("low left",),
    "right": ("full right",),
    "diagonal right": ("diagonal right",),
    "low right": ("low right",),
    "rows, right": ("diagonal left", "full right"),
    "holed rows, low right": ("holed left", "low right"),
    "few rows, low right": ("few left", "low right"),
    "left, right": ("full left", "full right"),
    "low left, low right": ("low left", "low right"),
}
"""A new kind of weighting is a new row."""


def side(kind, size, seed):
    gen = torch.Generator().manual_seed(seed)
    if kind in ("diagonal", "holed", "few"):
        found = torch.rand(size, generator=gen, dtype=F64) ** 2 + 0.05
        if kind == "holed":
            found[::4] = 0
        if kind == "few":  # fewer than the rank: what is stored of the others hangs on directions that nothing judges
            found[3:] = 0
        return found
    x = torch.randn(2 * size if kind == "full" else size // 2, size, generator=gen, dtype=F64)
    x = x * torch.logspace(0, -1.5, size, dtype=F64)
    return x.T @ x


def weighting(names, n, d):
    found = {}
    for name in names:
        kind, _, where = name.rpartition(" ")
        found[where] = side(kind, n if where == "left" else d, 4 if where == "left" else 5)
    return Weighting(**found)


def table(n, d, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=gen) * torch.logspace(0, -1, d)


def dense_error(a, matrix, w):
    """The definition, by scipy's roots of dense matrices: nothing shared with what is under test."""
    rest = a.to(F64) - matrix.dense().detach().to(F64)
    for gram, flip in ((w.left, False), (w.right, True)):
        if gram is None:
            continue
        full = (torch.diag(gram) if gram.ndim == 1 else gram).numpy()
        values, vectors = scipy.linalg.eigh(full)
        half = torch.from_numpy(vectors * values.clip(0) ** 0.5)
        rest = rest @ half if flip else half.T @ rest
    return float(rest.square().sum())


def cases(taken: bool) -> list[Any]:
    """Methods with the weightings that they take, or do not. Two methods have all kinds in `make test`, others one."""
    return [
        pytest.param(
            method, names, id=f"{m}: {k}", marks=() if m in ("svd", "flats") or k in ("rows", "left") else slow
        )
        for m, method in METHODS.items()
        for k, names in KINDS.items()
        if (weighting(names, 8, 8).kinds <= method.accepts) == taken
    ]


CASES, REFUSED = cases(True), cases(False)
NBYTES = 3600


def test_what_methods_say_they_take():
    assert SVD.accepts == KeepDense.accepts == {"rows", "left", "right"}
    assert Flats.accepts == MESSI().accepts == {"rows", "right"}
    assert KMeansSVD.accepts == {"rows"}


@pytest.mark.parametrize(("method", "names"), CASES)
def test_the_objective_ends_at_the_error_of_the_matrix_in_the_metric(method, names):
    for shape in ((120, 12), (12, 120)):
        a, w = table(*shape), weighting(names, *shape)
        made = method.fit(Problem(TensorRows(a), NBYTES, 4, w))
        judged = weighted_error(a, made.matrix, w)
        assert made.matrix.nbytes <= NBYTES
        assert judged.error == pytest.approx(dense_error(a, made.matrix, w), rel=1e-6, abs=1e-9 * judged.total)
        assert judged.total == pytest.approx(dense_error(a, LowRankMatrix(a[:, :1] * 0, a[:1] * 0), w), rel=1e-6)
        assert made.objective[-1] == pytest.approx(judged.error, rel=1e-3, abs=1e-6 * judged.total)
        assert all(later <= earlier for earlier, later in zip(made.objective, made.objective[1:], strict=False))
        assert 0 <= judged.relative < 1


@pytest.mark.parametrize(("method", "names"), REFUSED)
def test_what_a_method_cannot_take_is_refused_before_anything_is_fitted(method, names):
    a, w = table(60, 8), weighting(names, 60, 8)
    with pytest.raises(KflatsError, match="cannot take") as caught:
        method.fit(Problem(TensorRows(a * torch.nan), 4000, 4, w))  # the weighting is looked at first
    assert caught.value.hint
    with pytest.raises(KflatsError, match="cannot take"):
        method.spectrum(TensorRows(a), w)


@pytest.mark.parametrize(("method", "names"), [case for case in CASES if case.values[1]])
def test_a_weighting_lowers_its_own_error(method, names):
    w, plain, weighted = weighting(names, 150, 12), [], []
    for seed in range(3):  # flats end in local minima: not every single fit must be the better one
        a = table(150, 12, seed)
        weighted.append(weighted_error(a, method.fit(Problem(TensorRows(a), NBYTES, 4, w)).matrix, w).error)
        plain.append(weighted_error(a, method.fit(Problem(TensorRows(a), NBYTES, 4)).matrix, w).error)
    assert sum(weighted) < sum(plain)
    if isinstance(method, SVD):
        assert all(one < other for one, other in zip(weighted, plain, strict=True))


@pytest.mark.parametrize(("method", "names"), CASES)
def test_the_scale_of_a_weighting_does_not_matter(method, names):
    a, w = table(80, 10), weighting(names, 80, 10)
    usual = method.fit(Problem(TensorRows(a), 2400, 4, w))
    for factor in (2.0**-60, 2.0**60):
        sides = {k: getattr(w, k) for k in ("left", "right") if getattr(w, k) is not None}
        scaled = method.fit(Problem(TensorRows(a), 2400, 4, Weighting(**{k: v * factor for k, v in sides.items()})))
        assert scaled.objective[-1] == pytest.approx(usual.objective[-1] * factor ** len(sides), rel=1e-3)
        torch.testing.assert_close(scaled.matrix.dense(), usual.matrix.dense(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("method", "names"), CASES)
def test_half_precision_rows_are_fitted_at_their_own_values(method, names):
    for dtype in (torch.float16, torch.bfloat16):
        a, w = table(80, 10).to(dtype), weighting(names, 80, 10)
        ours = method.fit(Problem(TensorRows(a), 1500, 2, w)).matrix
        assert torch.equal(ours.dense(), method.fit(Problem(TensorRows(a.float()), 1500, 2, w)).matrix.dense())
        # Stored in that type it stays what it is, to the type's rounding: no factor is badly scaled.
        with torch.no_grad():
            stored, scale = ours.dense(), float(a.float().norm())
            assert float((ours.to(dtype).dense().float() - stored).norm()) < 4 * torch.finfo(dtype).eps * scale


@each_method(METHODS)
def test_a_weighting_of_another_shape_is_refused(method):
    for form in ("left", "right"):
        if form == "left":
            w, message = Weighting(left=torch.ones(19)), "row weights|cannot have shape"
        else:
            w, message = Weighting(right=torch.eye(7)), "cannot have shape|cannot take"
        with pytest.raises(KflatsError, match=message):
            method.fit(Problem(TensorRows(table(20, 6)), 2000, 4, w))


def test_an_exact_row_stays_exact_under_a_metric():
    a, w = table(300, 10), torch.ones(300, dtype=F64)
    w[:60] = 1e4
    right = side("full", 10, 1)
    matrix = Flats(k=2).fit(Problem(TensorRows(a), 5000, 4, Weighting(left=w, right=right))).matrix
    kept = [label for label, band in enumerate(matrix.bands) if band.flat is None]
    rows = (matrix.labels.long() == kept[0]).nonzero().squeeze(1)
    assert len(rows) >= 5
    assert torch.equal(matrix.dense()[rows], a[rows])


@pytest.mark.parametrize(
    "method", [Flats(k=2), Flats(k=2, nested_ranks=3), Flats(k=1), SVD()], ids=["flats", "nested", "one", "svd"]
)
def test_bases_are_orthonormal_under_a_metric_too(method):
    """Rounding the coordinates then costs what it does without a metric."""
    w = Weighting(right=side("full", 10, 1))
    matrix = method.fit(Problem(TensorRows(table(300, 10)), 5000, 4, w)).matrix
    ranks = matrix.flat_ranks if isinstance(matrix, FlatsMatrix) else [len(matrix.basis)]
    for basis in matrix.basis.detach().split(list(ranks)):
        torch.testing.assert_close(basis @ basis.T, torch.eye(len(basis)), atol=1e-5, rtol=0)


def planted(k, rank, seed=0):
    """k flats in 12 judged directions of 20, noise as large as they are in the other 8, and outlier rows.

    Returns rows, row weights (0 for outliers), the right Gram that judges the 12, and the flat of each row.
    """
    gen = torch.Generator().manual_seed(seed)
    judged, d, each = 12, 20, 150
    turn = torch.linalg.qr(torch.randn(d, d, generator=gen, dtype=F64)).Q
    parts = [
        torch.randn(each, rank, generator=gen, dtype=F64)
        @ torch.linalg.qr(torch.randn(judged, rank, generator=gen, dtype=F64)).Q.T
        for _ in range(k)
    ]
    inner = torch.cat([*parts, 3 * torch.randn(60, judged, generator=gen, dtype=F64)])
    inner += 0.01 * torch.randn(inner.shape, generator=gen, dtype=F64)
    noise = torch.randn(len(inner), d - judged, generator=gen, dtype=F64)
    stretch = torch.linspace(1, 3, judged, dtype=F64)  # the metric is no projection: it judges 12 unequally
    rows = torch.cat([inner / stretch, noise], dim=1) @ turn.T
    right = turn[:, :judged] * stretch.square() @ turn[:, :judged].T
    weights = torch.cat([torch.rand(k * each, generator=gen, dtype=F64) + 0.5, torch.zeros(60, dtype=F64)])
    truth = torch.arange(k).repeat_interleave(each)
    order = torch.randperm(len(rows), generator=gen)
    label = torch.cat([truth, torch.full((60,), -1)])
    return rows[order], weights[order], right, label[order]


@pytest.mark.parametrize("seed", range(3))
def test_planted_flats_are_found_where_only_the_metric_shows_them(seed):
    k, rank = 3, 2
    rows, weights, right, truth = planted(k, rank, seed)
    n, d = rows.shape
    nbytes = (n + k * d) * rank * 8 + n
    method = Flats(k=k, ranks="uniform")
    w = Weighting(left=weights, right=right)
    matrix = method.fit(Problem(TensorRows(rows), nbytes, 8, w)).matrix
    assert weighted_error(rows, matrix, w).relative < 1e-3
    # The flats are those that were planted, up to their names.
    mine = truth >= 0
    agree = torch.zeros(k, len(matrix.bands))
    agree.index_put_((truth[mine], matrix.labels.long()[mine]), torch.ones(int(mine.sum())), accumulate=True)
    assert float(agree.amax(1).sum()) >= 0.95 * int(mine.sum())
    # Without either of the two the truth is hidden.
    for blind in (Weighting(left=weights), Weighting(right=right)):
        other = method.fit(Problem(TensorRows(rows), nbytes, 8, blind)).matrix
        assert weighted_error(rows, other, w).relative > 0.05


def test_a_wide_metric_is_applied_block_by_block(monkeypatch):
    """A table too large to be held in another metric is read through it: the same flats."""
    a, w = table(200, 10).double(), Weighting(left=side("diagonal", 200, 1), right=side("full", 10, 1))
    method = Flats(k=2)
    held = method.fit(Problem(TensorRows(a), 9000, 8, w))
    monkeypatch.setattr("kflats.methods.flats._IN_MEMORY", 0)
    streamed = method.fit(Problem(TensorRows(a), 9000, 8, w))
    assert streamed.objective[-1] == pytest.approx(held.objective[-1], rel=1e-9)
    torch.testing.assert_close(streamed.matrix.dense(), held.matrix.dense())


# Bytes and errors by rank --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40, 9), (9, 40), (12, 12), (1, 5), (5, 1)], ids=str)
def test_the_cost_of_a_rank_is_what_its_matrix_stores(shape):
    for form in ("factors", "interpolative"):
        for itemsize in (2, 4):
            method, a = SVD(form=form), torch.randn(*shape)
            for rank in range(1, min(shape) + 1):
                cost = method.cost(shape, rank, itemsize)
                matrix = method.fit(Problem(TensorRows(a), cost, itemsize)).matrix
                assert matrix.weight.shape[1] == rank
                assert matrix.to(torch.float16 if itemsize == 2 else torch.float32).nbytes == cost
                assert method.rank(shape, cost, itemsize) == rank
                assert method.rank(shape, cost - 1, itemsize) == rank - 1
            index = 2 * shape[1] if form == "interpolative" else 0
            assert method.rank(shape, method.cost(shape, 1, itemsize) - index, itemsize, free_labels=True) == 1


def test_the_interpolative_form_saves_the_square_of_the_rank():
    assert SVD().cost((384, 384), 127, 4) - SVD(form="interpolative").cost((384, 384), 127, 4) == 4 * 127**2 - 2 * 384
    assert SVD(form="interpolative").cost((384, 384), 384, 4) == 4 * 384**2 + 2 * 384


@pytest.mark.parametrize("method", [Flats(k=3, ranks="uniform", exact=False), KMeansSVD(k=3), MESSI(k=3)], ids=repr)
def test_the_cost_of_flats_of_one_rank(method):
    n, d, rank = 300, 10, 4
    cost = method.cost((n, d), rank, 4)
    assert cost == (n + 3 * d) * rank * 4 + n
    matrix = method.fit(Problem(TensorRows(torch.randn(n, d)), cost, 4)).matrix
    assert set(matrix.flat_ranks) == {rank}
    assert matrix.nbytes == cost
    assert Flats(k=1).cost((n, d), rank, 4) == Flats(k=None).cost((n, d), rank, 4) == SVD().cost((n, d), rank, 4)


@pytest.mark.parametrize("names", KINDS.values(), ids=KINDS.keys())
def test_the_spectrum_says_what_every_rank_will_cost(names):
    for shape in ((40, 9), (9, 40)):
        a, w, method = table(*shape).double(), weighting(names, *shape), SVD()
        errors = method.spectrum(TensorRows(a), w)
        assert errors.shape == (10,)
        assert errors.dtype == F64
        assert bool((errors[1:] <= errors[:-1] * (1 + 1e-12)).all())
        nothing = LowRankMatrix(a[:, :1] * 0, a[:1] * 0)
        assert float(errors[0]) == pytest.approx(weighted_error(a, nothing, w).total, rel=1e-9)
        for rank in range(1, 10):
            reached = method.fit(Problem(TensorRows(a), method.cost(shape, rank, 8), 8, w)).objective[-1]
            assert reached == pytest.approx(float(errors[rank]), rel=1e-6, abs=1e-10 * float(errors[0]))


@pytest.mark.parametrize("method", [Flats(k=3), KMeansSVD(k=3)], ids=["flats", "k-means"])
def test_flats_lose_less_than_their_spectrum_says(method):
    a, w = table(300, 12), Weighting(left=side("diagonal", 300, 1))
    errors = method.spectrum(TensorRows(a), w)
    for rank in (2, 5, 8):
        made = method.fit(Problem(TensorRows(a), method.cost((300, 12), rank, 4), 4, w))
        assert made.objective[-1] <= float(errors[rank]) * (1 + 1e-6)


def test_dense_keeps_all_numbers_or_refuses():
    a = torch.randn(10, 4)
    assert torch.equal(KeepDense().fit(Problem(TensorRows(a), 160, 4)).matrix.dense(), a)
    with pytest.raises(KflatsError, match="budget"):
        KeepDense().fit(Problem(TensorRows(a), 159, 4))
    assert KeepDense().cost((10, 4), 3, 2) == 80
    assert KeepDense().spectrum(TensorRows(a), Weighting()).tolist() == [0.0] * 5
    assert from_name("svd", form="interpolative") == SVD(form="interpolative")


def test_both_forms_are_the_same_matrix():
    a = table(200, 30)
    for names in KINDS.values():
        w = weighting(names, 200, 30)
        factors = SVD().fit(Problem(TensorRows(a), SVD().cost((200, 30), 11, 4), 4, w)).matrix
        method = SVD(form="interpolative")
        other = method.fit(Problem(TensorRows(a), method.cost((200, 30), 11, 4), 4, w)).matrix
        assert isinstance(other, InterpolativeMatrix)
        torch.testing.assert_close(other.dense(), factors.dense(), atol=1e-5, rtol=1e-5)
        assert other.num_values == factors.num_values - 11**2
        assert other.condition <= 1.011
        torch.testing.assert_close(row_errors(a, other), row_errors(a, factors), rtol=1e-3, atol=1e-8)
