"""k-flats EM: each step is what its formula says, and the whole never gets worse."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score

from kflats.common.errors import KflatsError
from kflats.numerics import flats
from kflats.numerics.fit import fit_cloud, fit_flats
from kflats.numerics.flats import (
    RankSpec,
    Start,
    Stopping,
    WeightedRows,
    assign,
    distances,
    em,
    squared_norms,
    weighted_rows,
)
from kflats.numerics.gram import (
    axes_of_few,
    cluster_grams,
    complement,
    improve_basis,
    leading_basis,
    move_rows,
    top_eigenvectors,
)
from kflats.numerics.loss import Squared
from kflats.numerics.robust_em import distances_of
from kflats.numerics.rows import TensorRows

F64 = torch.float64
WAYS = {
    "uniform": {"rank": 3},
    "one flat": {"k": 1, "rank": 4},
    "published": {"rank": 3, "start": "random"},
    "filled": {"budget": 1200},
    "filled, exact rows": {"budget": 1500, "exact": True},
    "filled, tight": {"budget": 300 + 3 * 10, "exact": True},
}
"""Every way to fit 300 x 10 rows; a new way is a new row."""


def orthonormal(rank, d, seed):
    gen = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(d, d, generator=gen, dtype=F64)).Q[:rank].contiguous()


def cloud_of(n, d, seed, dtype=F64, weighted=True):
    gen = torch.Generator().manual_seed(seed)
    a = torch.randn(n, d, generator=gen, dtype=F64).to(dtype)
    w = torch.rand(n, generator=gen, dtype=F64) ** 2 + 1e-3
    return a, (w if weighted else None)


def brute_force(a, bases, w, multiplier, exact):
    """The cost (n, k or k + 1) of each row in each flat, and its squared distance, from the definitions."""
    a = a.double().numpy()
    cost, far = [], []
    for basis in bases:
        v = basis.double().numpy()
        rest = a - (a @ v.T) @ v
        far.append((rest**2).sum(1))
        cost.append(w.numpy() * far[-1] + multiplier * len(v))
    if exact:
        far.append(np.zeros(len(a)))
        cost.append(np.full(len(a), multiplier * a.shape[1]))
    return np.stack(cost, 1), np.stack(far, 1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if kind in ("gauss", "zero rows") else pytest.mark.slow)
        for name in WAYS
        for kind in ("gauss", "rank deficient", "zero rows", "wild norms")
    ],
)
def test_rows_fewer_than_columns_are_fitted_in_their_own_space(name, kind):
    """The same flats as in all columns, orthonormal, at distances that are the objective."""
    n, d = 40, 70
    a, w = cloud_of(n, d, 0)
    if kind == "rank deficient":
        a[:, 6:] = a[:, :6] @ torch.ones(6, d - 6, dtype=F64)
    elif kind == "zero rows":
        a[::3] = 0
    elif kind == "wild norms":
        a *= torch.logspace(-4, 4, n, dtype=F64)[:, None]
    way = dict(WAYS[name])
    if "budget" in way:
        way["budget"] = 3 * (n + 3 * d)
    shape = RankSpec(way.get("k", 3), way.get("rank"), way.get("budget"), way.get("exact", False))
    whole, scale = weighted_rows(TensorRows(a), w)
    expected = fit_cloud(whole, shape, Squared(), way.get("start", "auto"), Stopping(), 0)
    found = fit_flats(a, shape.k, weights=w, **{key: value for key, value in way.items() if key != "k"})
    total = float((w * squared_norms(TensorRows(a))).sum())
    if kind in ("gauss", "rank deficient"):  # ties and long rows decide by last digits which minimum is found
        assert torch.equal(found.labels, expected.labels)
        assert found.ranks == expected.ranks
        assert found.error == pytest.approx(scale * expected.error, rel=1e-6, abs=1e-9 * total)
    for basis in found.bases:
        assert torch.allclose(basis @ basis.T, torch.eye(len(basis), dtype=F64), atol=1e-10)
    near = found.labels < shape.k
    bare = WeightedRows(TensorRows(a), squared_norms(TensorRows(a)))
    far = distances_of(bare, found.bases, found.labels)
    assert float((w * far)[near].sum()) == pytest.approx(found.error, rel=1e-6, abs=1e-9 * total)


@settings(max_examples=60)
@given(
    n=st.integers(1, 50),
    d=st.integers(1, 9),
    data=st.data(),
    multiplier=st.sampled_from([0.0, 0.01, 0.5]),
    exact=st.booleans(),
    dtype=st.sampled_from([torch.float32, F64]),
    seed=st.integers(0, 1000),
)
def test_the_e_step_is_the_brute_force_one(n, d, data, multiplier, exact, dtype, seed):
    ranks = data.draw(st.lists(st.integers(0, d), min_size=1, max_size=5))  # some above d / 2: the complement's path
    exact = exact and multiplier > 0
    a, w = cloud_of(n, d, seed, dtype)
    bases = tuple(orthonormal(rank, d, seed + c).to(dtype) for c, rank in enumerate(ranks))
    rows = TensorRows(a)
    found = assign(WeightedRows(rows, squared_norms(rows), w), bases, multiplier=multiplier, exact=exact)
    cost, far = brute_force(a, bases, w, multiplier, exact)
    chosen = found.labels.long().numpy()
    at = np.arange(n)
    slack = (1e-5 if dtype == torch.float32 else 1e-12) * (1 + cost.max())
    assert chosen.max() < len(bases) + exact
    assert (cost[at, chosen] <= cost.min(1) + slack).all()
    np.testing.assert_allclose(found.dist2.numpy(), far[at, chosen], atol=slack * 10)
    assert found.objective == pytest.approx(cost.min(1).sum(), rel=1e-5, abs=slack * n)
    np.testing.assert_allclose(
        distances(rows, bases, squared_norms(rows)).numpy(), far[:, : len(bases)], atol=slack * 10
    )


@pytest.mark.parametrize("ranks", [(2, 2, 2), (7, 7, 7), (1, 4, 7), (0, 8, 3)], ids=str)
def test_the_e_step_does_not_depend_on_row_order_or_block_size(ranks, monkeypatch):
    a, w = cloud_of(3000, 8, 0, torch.float32)
    bases = tuple(orthonormal(rank, 8, c).float() for c, rank in enumerate(ranks))

    def run(a, w):
        rows = TensorRows(a)
        return assign(WeightedRows(rows, squared_norms(rows), w), bases, multiplier=0.01)

    whole = run(a, w)
    order = torch.randperm(len(a))
    shuffled = run(a[order], w[order])
    assert torch.equal(whole.labels[order], shuffled.labels)
    torch.testing.assert_close(whole.dist2[order], shuffled.dist2)
    for block in (1, 7, 4096):
        monkeypatch.setattr(flats, "BLOCK", block)
        monkeypatch.setattr("kflats.numerics.rows.BLOCK", block)
        part = run(a[:500], w[:500]) if block == 1 else run(a, w)
        assert torch.equal(whole.labels[: len(part.labels)], part.labels)


def test_equal_costs_go_to_the_lower_flat():
    a = torch.arange(120, dtype=F64).reshape(20, 6)  # whole numbers: no rounding that could tell equals apart
    basis = torch.eye(6, dtype=F64)[:2]
    rows = TensorRows(a)
    assert not assign(WeightedRows(rows, squared_norms(rows)), (basis, basis, basis)).labels.any()


def test_many_flats_get_wide_enough_labels():
    a, _ = cloud_of(400, 3, 0)
    bases = tuple(orthonormal(1, 3, c) for c in range(300))
    rows = TensorRows(a)
    found = assign(WeightedRows(rows, squared_norms(rows)), bases)
    far = torch.stack([squared_norms(TensorRows(a - (a @ v.T) @ v)) for v in bases], 1)
    assert torch.equal(found.labels.long(), far.argmin(1))
    assert found.labels.max() > 255


@pytest.mark.parametrize("weighted", [False, True])
def test_incremental_grams_equal_fresh_ones(weighted):
    a, w = cloud_of(500, 7, 3, torch.float32, weighted)
    rows = TensorRows(a)
    old, new = torch.randint(0, 4, (500,)), torch.randint(0, 5, (500,))  # label 4 is no cluster: kept exactly
    moved = (old != new).nonzero().squeeze(1)
    grams = cluster_grams(rows, old, 4, w)
    move_rows(grams, rows, moved, old[moved], new[moved], w)
    fresh = cluster_grams(rows, new, 4, w)
    torch.testing.assert_close(grams, fresh, rtol=1e-5, atol=1e-4)
    mass = torch.ones(500, dtype=F64) if w is None else w
    for c in range(4):
        part = a[new == c].double()
        torch.testing.assert_close(fresh[c], (part * mass[new == c, None]).T @ part, rtol=1e-5, atol=1e-4)


@settings(max_examples=40)
@given(d=st.integers(2, 12), seed=st.integers(0, 1000), deficient=st.booleans(), data=st.data())
def test_improving_a_basis_never_lowers_what_it_captures(d, seed, deficient, data):
    rank = data.draw(st.integers(1, d - 1))
    gen = torch.Generator().manual_seed(seed)
    a = torch.randn(2 if deficient else 3 * d, d, generator=gen, dtype=F64)
    gram, basis = a.T @ a, orthonormal(rank, d, seed)
    for _ in range(4):
        better = improve_basis(gram, basis)
        torch.testing.assert_close(better @ better.T, torch.eye(rank, dtype=F64))
        assert torch.trace(better @ gram @ better.T) >= torch.trace(basis @ gram @ basis.T) * (1 - 1e-12)
        basis = better


@pytest.mark.parametrize(("d", "rank"), [(64, 5), (64, 15), (64, 40), (200, 20)])
def test_a_leading_basis_is_close_to_the_eigenvectors(d, rank):
    gen = torch.Generator().manual_seed(d)
    a = torch.randn(1000, d, generator=gen, dtype=F64) * torch.logspace(0, -1.5, d, dtype=F64)
    gram = a.T @ a
    values, _ = top_eigenvectors(gram, rank)
    basis = leading_basis(gram, rank, F64)
    torch.testing.assert_close(basis @ basis.T, torch.eye(rank, dtype=F64))
    assert torch.trace(basis @ gram @ basis.T) >= 0.99 * values[:rank].sum()


@pytest.mark.parametrize(
    "gram", [torch.zeros(9, 9, dtype=F64), torch.eye(9, dtype=F64)[:, :1] @ torch.ones(1, 9).double()]
)
def test_empty_and_one_row_clusters_still_give_an_orthonormal_basis(gram):
    gram = gram @ gram.T
    for rank in (1, 2, 8):
        for basis in (leading_basis(gram, rank, F64), top_eigenvectors(gram, rank)[1]):
            torch.testing.assert_close(basis @ basis.T, torch.eye(rank, dtype=F64))


def test_a_complement_spans_the_rest():
    basis = orthonormal(5, 8, 0)
    both = torch.cat([basis, complement(basis)])
    torch.testing.assert_close(both @ both.T, torch.eye(8, dtype=F64))


def recomputed(a, fit, w=None):
    """sum_i w_i dist(a_i, flat of i)^2 from labels and bases, in float64."""
    total = 0.0
    w = torch.ones(len(a), dtype=F64) if w is None else w
    for c, basis in enumerate(fit.bases):
        inside = fit.labels.long() == c
        part, v = a[inside].double(), basis.double()
        total += float((w[inside] * (part - (part @ v.T) @ v).square().sum(1)).sum())
    return total


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_the_objective_never_rises_and_ends_at_the_error_of_what_is_returned(way):
    for weighted in (False, True):
        for dtype in (torch.float32, torch.bfloat16, F64):
            a, w = cloud_of(300, 10, 4, dtype, weighted)
            fit = fit_flats(a, **{"k": 3, "weights": w, **way})
            assert all(later < earlier for earlier, later in zip(fit.objective, fit.objective[1:], strict=False))
            assert fit.error == pytest.approx(recomputed(a, fit, w), rel=1e-4)
            for basis in fit.bases:
                torch.testing.assert_close(basis @ basis.T, torch.eye(len(basis), dtype=basis.dtype), atol=1e-5, rtol=0)
            if "budget" in way:
                counts = torch.bincount(fit.labels.long(), minlength=4)
                used = sum(int(counts[c] + 10) * rank for c, rank in enumerate(fit.ranks)) + int(counts[3]) * 10
                assert used <= way["budget"]


@settings(max_examples=25)
@given(
    n=st.integers(2, 80),
    d=st.integers(1, 8),
    data=st.data(),
    exact=st.booleans(),
    power=st.sampled_from([0, 1, 6]),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_budget_is_fitted_within_it(n, d, data, exact, power, seed):
    k = data.draw(st.integers(1, min(n, 4)))
    budget = data.draw(st.integers(n + k * d, n * d + k * d * d + 5))
    a, w = cloud_of(n, d, seed)
    w = w**power
    fit = fit_flats(a, k, budget=budget, exact=exact, weights=w)
    counts = torch.bincount(fit.labels.long(), minlength=k + 1)
    assert sum(int(counts[c] + d) * r for c, r in enumerate(fit.ranks)) + int(counts[k]) * d <= budget
    total = float((w * a.square().sum(1)).sum())
    assert fit.error == pytest.approx(recomputed(a, fit, w), rel=1e-4, abs=1e-9 * total)
    assert fit.error <= total


def test_a_sample_that_stands_for_all_rows_never_overruns_a_tight_budget(monkeypatch):
    monkeypatch.setattr("kflats.numerics.fit.FILL_SAMPLE", 300)
    n, d, k = 2000, 8, 3
    for seed in range(6):
        a, w = cloud_of(n, d, seed, torch.float32)
        w = w ** (10 * seed)
        for budget in (n + k * d, n + k * d + 60, 2 * n):
            fit = fit_flats(a, k, budget=budget, exact=True, weights=w, seed=seed)
            counts = torch.bincount(fit.labels.long(), minlength=k + 1)
            assert sum(int(counts[c] + d) * r for c, r in enumerate(fit.ranks)) + int(counts[k]) * d <= budget
            total = float((w * a.double().square().sum(1)).sum())
            assert fit.error == pytest.approx(recomputed(a, fit, w), rel=1e-4, abs=1e-6 * total)


def test_em_lowers_the_objective_of_any_start_and_the_price_moves_rows():
    a, w = cloud_of(400, 8, 0)
    rows = TensorRows(a)
    cloud = WeightedRows(rows, squared_norms(rows), w)
    labels = (torch.arange(400) % 3).to(torch.uint8)
    fit = em(cloud, RankSpec(3, budget=1000), Start(labels))
    assert fit.objective[-1] < 0.9 * fit.objective[0]
    # Rows that weigh little went to flats of lower rank.
    ranks = torch.tensor(fit.ranks, dtype=F64)[fit.labels.long()]
    light = w * a.square().sum(1) < (w * a.square().sum(1)).median()
    assert ranks[light].mean() < ranks[~light].mean()


@pytest.mark.parametrize("stop", [1, 3])
def test_an_iteration_limit_is_kept_and_told(stop):
    a, _ = cloud_of(500, 10, 1)
    fit = fit_flats(a, 5, rank=3, start="random", stop=Stopping(0, stop))
    assert not fit.converged
    assert len(fit.objective) <= stop + 1
    assert fit_flats(a, 5, rank=3, start="random").converged


def test_progress_hears_every_iteration():
    heard = []
    a, _ = cloud_of(200, 6, 0)
    fit = fit_flats(a, 3, rank=2, stop=Stopping(progress=lambda *said: heard.append(said)))
    assert [value for phase, _, value in heard if phase == "em"][-1] >= fit.error
    assert all(math.isfinite(value) for _, _, value in heard)


def planted(k, rank, d, noise, seed, n=400):
    """k random flats, n rows on each, Gaussian coordinates, noise of that share of the signal's norm."""
    gen = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(k):
        basis = torch.linalg.qr(torch.randn(d, rank, generator=gen, dtype=F64)).Q.T
        parts.append(torch.randn(n, rank, generator=gen, dtype=F64) @ basis)
    a = torch.cat(parts)
    a += noise * math.sqrt(rank / d) * torch.randn(a.shape, generator=gen, dtype=F64)
    order = torch.randperm(len(a), generator=gen)
    return a[order].float(), (torch.arange(len(a)) // n)[order]


@pytest.mark.parametrize(
    ("k", "rank", "d", "noise"),
    [(3, 2, 32, 0.0), (3, 20, 128, 0.05), (5, 5, 32, 0.05), (10, 2, 32, 0.05), (10, 5, 128, 0.0)],
)
def test_planted_flats_are_found(k, rank, d, noise):
    a, truth = planted(k, rank, d, noise, seed=k)
    fit = fit_flats(a, k, rank=rank)
    assert adjusted_rand_score(truth.numpy(), fit.labels.numpy()) >= 0.99


def test_heavy_rows_are_fitted_better():
    a, _ = cloud_of(400, 8, 3)
    w = torch.ones(400, dtype=F64)
    w[:40] = 1000
    for way in ({"rank": 2}, {"budget": 1100}, {"budget": 1100, "exact": True}):

        def error(weights, way=way):
            fit = fit_flats(a, 3, weights=weights, **way)
            bases = [*fit.bases, torch.eye(8, dtype=F64)]
            return sum(
                float((x - (x @ (v := bases[c]).T) @ v).square().sum())
                for x, c in zip(a[:40], fit.labels[:40].tolist(), strict=True)
            )

        assert error(w) < 0.9 * error(None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 3}, "a rank or a budget"),
        ({"k": 3, "rank": 2, "budget": 100}, "a rank or a budget"),
        ({"k": 31, "rank": 1}, "31 flats do not fit 30 rows"),
        ({"k": 0, "rank": 1}, "0 flats"),
        ({"k": 2, "rank": 7}, "rank 7 is outside 1..6"),
        ({"k": 2, "rank": 0}, "rank 0 is outside"),
        ({"k": 2, "budget": 30 + 2 * 6 - 1}, "cannot hold 2 flats of rank 1"),
        ({"k": 2, "rank": 1, "start": "luck"}, "EM cannot start from 'luck'"),
        ({"k": 2, "rank": 1, "weights": torch.zeros(30)}, "all row weights are zero"),
    ],
)
def test_impossible_requests_are_refused(arguments, message):
    with pytest.raises(KflatsError, match=message):
        fit_flats(torch.randn(30, 6), **arguments)


@pytest.mark.parametrize(("rows", "d"), [(1, 9), (4, 40), (7, 15), (12, 12), (20, 8)])
def test_axes_of_few_rows_are_those_of_their_gram(rows: int, d: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, d, dtype=F64) * torch.logspace(0, -3, d, dtype=F64)
    gram = x.T @ x
    values, axes = axes_of_few(gram, rows)
    expected, _ = top_eigenvectors(gram, d)
    torch.testing.assert_close(values, expected, rtol=1e-8, atol=1e-12 * float(expected[0]))
    count = min(rows, d)
    assert axes.shape == (count, d)
    torch.testing.assert_close(axes @ axes.T, torch.eye(count, dtype=F64), rtol=0, atol=1e-9)
    torch.testing.assert_close(axes @ gram @ axes.T, torch.diag(values[:count]), rtol=0, atol=1e-9 * float(values[0]))
