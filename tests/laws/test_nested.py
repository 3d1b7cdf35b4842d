"""Nested bands: order and ranks of one basis, EM over flats and levels, exact budgets, planted truth."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kflats.common.errors import KflatsError
from kflats.matrices.registry import FlatsMatrix
from kflats.methods import Flats, Problem
from kflats.methods.matrix_error import row_errors
from kflats.numerics import nested
from kflats.numerics.fit import fit_flats
from kflats.numerics.flats import WeightedRows, squared_norms
from kflats.numerics.nested import Ordered, assign_nested, captured, em_nested, fit_nested, spend, sweep, turn
from kflats.numerics.rows import TensorRows

F64 = torch.float64


def orthonormal(d, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(d, d, generator=gen, dtype=F64)).Q


def skewed(n, d, seed=0):
    """Rows of very different length, and spectra that decay."""
    gen = torch.Generator().manual_seed(seed)
    a = torch.randn(n, d, generator=gen, dtype=F64) * torch.logspace(0, -1.5, d, dtype=F64)
    return (a @ orthonormal(d, seed) * torch.rand(n, 1, generator=gen, dtype=F64) ** 2).float()


def planted(ranks, each, d, noise=0.0, seed=0):
    """``each`` rows of every rank in ``ranks``, all in prefixes of one ordered basis."""
    gen = torch.Generator().manual_seed(seed)
    basis = orthonormal(d, seed + 1)
    parts = [torch.randn(each, r, generator=gen, dtype=F64) @ basis[:r] for r in ranks]
    truth = torch.arange(len(ranks)).repeat_interleave(each)
    order = torch.randperm(len(truth), generator=gen)
    a = torch.cat(parts)[order]
    return (a + noise * torch.randn(a.shape, generator=gen, dtype=F64)).float(), truth[order], basis


def level_grams(d, levels, seed=0):
    """Grams of rows of different size in directions of their own, and how many rows they are of."""
    parts = [skewed(20 + 30 * q, d, seed + q).double() / (1 + q) for q in range(levels)]
    return torch.stack([part.T @ part for part in parts]), [len(part) for part in parts]


def lagrangian(ordered, grams, counts, price):
    """What ``sweep`` lowers, from its definition."""
    d = ordered.basis.shape[0]
    error = 0.0
    for gram, rank in zip(grams, ordered.ranks, strict=True):
        v = ordered.basis[:rank]
        error += float(gram.trace() - (v @ gram @ v.T).trace())
    return error + price * (sum(n * r for n, r in zip(counts, ordered.ranks, strict=True)) + d * ordered.ranks[-1])


@given(st.integers(3, 12), st.integers(1, 5), st.integers(0, 100), st.floats(1e-5, 1.0))
def test_a_sweep_never_raises_error_plus_price_and_keeps_the_basis_orthonormal(d, levels, seed, price):
    grams, counts = level_grams(d, levels, seed)
    gen = torch.Generator().manual_seed(seed)
    ranks = tuple(sorted(torch.randint(1, d + 1, (levels,), generator=gen).tolist()))
    now = Ordered(orthonormal(d, seed + 50), ranks)
    for _ in range(3):
        later = sweep(now, grams, counts, price)
        assert lagrangian(later, grams, counts, price) <= lagrangian(now, grams, counts, price) * (1 + 1e-9) + 1e-12
        torch.testing.assert_close(later.basis @ later.basis.T, torch.eye(d, dtype=F64))
        assert list(later.ranks) == sorted(later.ranks)
        assert later.ranks[0] >= 1
        assert later.ranks[-1] <= d
        now = later


@given(st.integers(2, 12), st.integers(1, 5), st.integers(0, 100))
def test_a_turn_never_loses_energy_and_keeps_the_basis_orthonormal(d, levels, seed):
    grams, counts = level_grams(d, levels, seed)
    gen = torch.Generator().manual_seed(seed)
    now = Ordered(orthonormal(d, seed + 50), tuple(sorted(torch.randint(1, d + 1, (levels,), generator=gen).tolist())))
    for _ in range(3):
        later = turn(now, grams)
        assert later.ranks == now.ranks
        assert lagrangian(later, grams, counts, 0.0) <= lagrangian(now, grams, counts, 0.0) + 1e-9
        torch.testing.assert_close(later.basis @ later.basis.T, torch.eye(d, dtype=F64))
        now = later


def test_one_level_swept_is_the_eigenbasis():
    grams, counts = level_grams(8, 1)
    found = sweep(Ordered(orthonormal(8, 9), (3,)), grams, counts, 1e-3)
    values = torch.linalg.eigvalsh(grams[0]).flip(0)
    assert found.ranks[0] == int((values > 1e-3 * (counts[0] + 8)).sum())
    torch.testing.assert_close(captured(found, grams)[0], values)


def test_sweeps_find_an_order_that_serves_both_levels():
    # Level 0 needs direction 0 alone; level 1 is longer in directions 1 and 2: the eigenbasis of both puts them first.
    grams = torch.stack(
        [torch.diag(torch.tensor([5.0, 0, 0], dtype=F64)), torch.diag(torch.tensor([1.0, 9, 9]).double())]
    )
    found = sweep(Ordered(torch.eye(3, dtype=F64).flip(0), (1, 3)), grams, [10, 10], 1e-4)
    assert found.ranks == (1, 3)
    assert float(found.basis[0, 0].abs()) == pytest.approx(1.0)


def brute(energy, counts, budget):
    """The most energy that any rising ranks keep within the budget, by trying all (one flat, two levels)."""
    d = energy.shape[2]
    fits = [
        float(energy[0, 0, :a].sum() + energy[0, 1, :b].sum())
        for a in range(1, d + 1)
        for b in range(a, d + 1)
        if int(counts[0, 0]) * a + (int(counts[0, 1]) + d) * b <= budget
    ]
    return max(fits, default=None)


@given(st.integers(0, 200), st.floats(0, 1))
def test_spending_never_exceeds_leaves_less_than_a_step_and_is_near_the_best(seed, share):
    gen = torch.Generator().manual_seed(seed)
    d = 7
    energy = torch.rand(1, 2, d, generator=gen, dtype=F64).sort(2, descending=True).values
    counts = torch.randint(1, 20, (1, 2), generator=gen)
    cost = [int(counts[0, 0]), int(counts[0, 1]) + d]
    budget = int(sum(cost) * (1 + share * (d - 1)))
    found = spend(energy, counts, budget)
    (ranks,) = found.ranks
    assert found.used == cost[0] * ranks[0] + cost[1] * ranks[1] <= budget
    assert ranks[0] == ranks[1] or budget - found.used < cost[0]
    assert ranks[1] == d or budget - found.used < cost[1]
    kept = float(energy[0, 0, : ranks[0]].sum() + energy[0, 1, : ranks[1]].sum())
    # Greedy at the edge of the budget: what is missed is at most a coordinate of each level.
    assert kept >= brute(energy, counts, budget) - 2.0
    assert spend(energy, counts, sum(cost) - 1) is None


def test_levels_without_rows_ask_for_nothing():
    energy = torch.ones(2, 2, 4, dtype=F64)
    found = spend(energy * torch.tensor([[1.0, 0], [0, 0]]).unsqueeze(2), torch.tensor([[3, 0], [0, 0]]), 28)
    assert found.ranks[0] == (4, 4)
    assert found.used == 28  # four coordinates of three rows, and a basis of sixteen; the other flat is not stored


@given(st.integers(0, 50), st.booleans(), st.booleans())
def test_rows_take_the_cheapest_flat_and_prefix(seed, weighted, exact):
    a = skewed(40, 6, seed)
    gen = torch.Generator().manual_seed(seed)
    w = torch.rand(40, generator=gen) if weighted else None
    bases = [orthonormal(6, seed + c).float() for c in range(2)]
    levels, prices = [(1, 3, 4), (2, 2, 5)], (1e-3, 1e-2)
    flats = [Ordered(basis, ranks) for basis, ranks in zip(bases, levels, strict=True)]
    cloud = WeightedRows(TensorRows(a), squared_norms(TensorRows(a)), w)
    labels, used = assign_nested(cloud, flats, prices, exact=exact)
    kinds = [(c, r) for c in range(2) for r in levels[c]] + [(None, 6)] * exact
    for price, found, numbers in zip(prices, labels, used, strict=True):
        costs = []
        for c, r in kinds:
            left = a if c is None else a - a @ bases[c][:r].T @ bases[c][:r]
            far = left.square().sum(1) * (c is not None)
            costs.append((far if w is None else w * far) + price * r)
        table = torch.stack(costs, 1)
        chosen = table.gather(1, found.long().unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(chosen, table.min(1).values, atol=1e-6, rtol=1e-5)
        assert float(numbers) == sum(kinds[c][1] for c in found.tolist())


def stored_numbers(fit, d):
    counts = torch.bincount(fit.labels.long(), minlength=1 + sum(map(len, fit.levels))).tolist()
    ranks = [r for flat in fit.levels for r in flat]
    of_rows = sum(count * rank for count, rank in zip(counts, ranks, strict=False))
    per = len(fit.levels[0])
    used = [c for c in range(len(fit.levels)) if any(counts[c * per : (c + 1) * per])]
    return of_rows + d * sum(fit.levels[c][-1] for c in used) + d * counts[len(ranks)]


@settings(max_examples=12)
@given(st.integers(0, 100), st.integers(1, 3), st.integers(1, 5), st.floats(0.15, 0.9), st.booleans(), st.booleans())
def test_the_error_falls_is_that_of_the_labels_and_the_budget_holds(seed, k, levels, share, weighted, exact):
    n, d = 150, 12
    a = skewed(n, d, seed)
    w = torch.rand(n, generator=torch.Generator().manual_seed(seed)) ** 3 + 0.01 if weighted else None
    budget = max(int(share * n * d), n + k * d)
    fit = fit_nested(a, k, levels, budget=budget, weights=w, exact=exact, seed=seed)
    assert all(later < earlier for earlier, later in zip(fit.objective, fit.objective[1:], strict=False))
    assert fit.used == stored_numbers(fit, d) <= budget
    error = torch.zeros(n, dtype=F64)
    for i, label in enumerate(fit.labels.tolist()):
        if label < k * levels:
            v = fit.flats[label // levels].basis[: fit.levels[label // levels][label % levels]]
            row = a[i].double()
            error[i] = (row - row @ v.T @ v).square().sum() * (1.0 if w is None else float(w[i]))
    assert fit.error == pytest.approx(float(error.sum()), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_planted_ranks_on_one_basis_are_found(seed):
    ranks, each, d = (2, 6, 14), 200, 24
    a, truth, basis = planted(ranks, each, d, seed=seed)
    budget = each * sum(ranks) + d * max(ranks)
    fit = fit_nested(a, 1, 3, budget=budget, seed=seed)
    assert fit.error < 1e-6 * float(a.square().sum())
    assert fit.levels == (ranks,)
    assert (fit.labels.long() == truth).double().mean() > 0.99
    first = fit.flats[0].basis[:2]
    assert float((first @ basis[:2].T @ basis[:2] - first).norm()) < 1e-3
    # One rank for all rows cannot: it would need rank 14 everywhere.
    assert fit_flats(a, 1, budget=budget).error > 0.1 * float(a.square().sum())


def test_planted_ranks_survive_noise():
    ranks, each, d = (3, 12), 300, 24
    a, truth, _ = planted(ranks, each, d, noise=0.02)
    fit = fit_nested(a, 1, 2, budget=each * sum(ranks) + d * max(ranks))
    assert (fit.labels.long() == truth).double().mean() > 0.98


def test_one_level_is_filled_flats():
    a = skewed(400, 16, 3)
    for k in (1, 3):
        filled, nested = fit_flats(a, k, budget=2500), fit_nested(a, k, 1, budget=2500)
        assert nested.error == pytest.approx(filled.error, rel=0.05 if k > 1 else 1e-6)
    assert nested.levels == tuple((r,) for (r,) in nested.levels)


@pytest.mark.parametrize("given", [{"k": True}, {"k": 2.5}, {"levels": 2.5}, {"levels": 20_000}, {"budget": 100.5}])
def test_numbers_that_are_not_whole_are_refused(given):
    k, levels, budget = ({"k": 2, "levels": 2, "budget": 100} | given).values()
    with pytest.raises(KflatsError, match="whole numbers from 1 on"):
        fit_nested(skewed(60, 8, 1), k, levels, budget=budget)


@pytest.mark.slow
def test_more_levels_store_better():
    a = skewed(600, 20, 4)
    w = torch.logspace(0, -3, 600)
    errors = [fit_nested(a, 1, levels, budget=4000, weights=w).error for levels in (1, 2, 4, 8)]
    assert errors[1] < 0.8 * errors[0]
    assert errors[2] < errors[1]
    assert errors[3] < 1.02 * errors[2]


def test_weight_buys_coordinates():
    a = skewed(400, 16, 5) / skewed(400, 16, 5).norm(dim=1, keepdim=True)
    w = torch.ones(400)
    w[:40] = 100.0
    fit = fit_nested(a, 1, 4, budget=2600, weights=w)
    ranks = torch.tensor(fit.levels[0])[fit.labels.long()].double()
    assert ranks[:40].mean() > 1.5 * ranks[40:].mean()


def test_zero_rows_and_rows_of_no_weight_take_the_lowest_level():
    a, w = skewed(200, 10, 6), torch.ones(200)
    a[::4], w[1::4] = 0, 0
    fit = fit_nested(a, 1, 3, budget=1200, weights=w)
    assert not fit.labels[::4].any()
    assert not fit.labels[1::4].any()
    assert fit_nested(torch.zeros(30, 5), 1, 2, budget=100).error == 0


def test_equal_seeds_give_equal_fits():
    a = skewed(300, 12, 7)
    first, again = (fit_nested(a, 2, 3, budget=1800, seed=5) for _ in range(2))
    assert torch.equal(first.labels, again.labels)
    assert first.objective == again.objective
    assert all(torch.equal(x.basis, y.basis) for x, y in zip(first.flats, again.flats, strict=True))


def test_a_fit_that_starts_on_a_sample_still_holds_the_budget(monkeypatch):
    monkeypatch.setattr(nested, "FILL_SAMPLE", 200)
    a = skewed(900, 12, 8)
    whole = fit_nested(a, 1, 4, budget=5000, exact=True)
    assert whole.used == stored_numbers(whole, 12) <= 5000
    monkeypatch.setattr(nested, "FILL_SAMPLE", 10**6)
    assert whole.error < 1.3 * fit_nested(a, 1, 4, budget=5000, exact=True).error


def test_levels_share_one_stored_basis_in_the_matrix():
    a = skewed(500, 16, 9)
    made = Flats(k=2, nested_ranks=3, exact=False).fit(Problem(TensorRows(a), 12000, 4))
    matrix = made.matrix
    assert isinstance(matrix, FlatsMatrix)
    assert len(matrix.bands) > len(matrix.flat_ranks) <= 2
    assert matrix.nbytes <= 12000
    for flat, rank in enumerate(matrix.flat_ranks):
        assert rank == max(band.rank for band in matrix.bands if band.flat == flat)
    assert float(row_errors(a, matrix).sum()) == pytest.approx(made.objective[-1], rel=1e-3)


def test_nonsense_is_refused():
    a = skewed(50, 8)
    with pytest.raises(KflatsError, match="cannot hold"):
        fit_nested(a, 2, 2, budget=60)
    with pytest.raises(KflatsError, match="levels"):
        fit_nested(a, 1, 0, budget=300)
    with pytest.raises(KflatsError, match="nested_ranks"):
        Flats(nested_ranks=0)
    with pytest.raises(KflatsError, match="uniform"):
        Flats(nested_ranks=4, ranks="uniform")


def test_em_corrects_a_price_that_is_off():
    a = skewed(300, 12, 10)
    cloud = WeightedRows(TensorRows(a), squared_norms(TensorRows(a)))
    start = (Ordered(torch.linalg.eigh(a.double().T @ a.double()).eigenvectors.flip(1).T.contiguous(), (2, 6)),)
    right = em_nested(cloud, start, 1500, 1e-3).multiplier
    errors = [em_nested(cloud, start, 1500, right * off).error for off in (0.3, 1.0, 3.0)]
    assert max(errors) < 1.5 * min(errors)
