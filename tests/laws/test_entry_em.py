"""Flats under entrywise powers: the sum never rises, wrong entries turn no flat, what was fitted is what is stored."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from kflats.errors import KflatsError
from kflats.importance import Uniform
from kflats.importance.weighting import Weighting
from kflats.methods import Flats, Problem
from kflats.numerics.entry_em import EntryPower, entry_flats
from kflats.numerics.entry_state import EntryState, projected_sums
from kflats.numerics.entrywise import entrywise_low_rank
from kflats.numerics.fit import fit_flats
from kflats.numerics.loss import Power
from kflats.numerics.rows import TensorRows
from kflats.recipes.recipe import Recipe, from_json, to_json

F64 = torch.float64
POWERS = pytest.mark.parametrize("p", [1.0, 0.7, 1.5, 2.0])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def row_of_1e30():
    a = torch.randn(40, 4, generator=generator(), dtype=F64)
    a[5] = 1e30
    return a


def stored(fit):
    rows = [u.double() @ fit.bases[c].double() for u, c in zip(fit.coordinates, fit.labels.tolist(), strict=True)]
    return torch.stack(rows)


def entries(a, fit, p, w=None):
    costs = (a.double() - stored(fit)).abs().pow(p).sum(1)
    return float((costs if w is None else costs * w).sum())


@POWERS
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16], ids=str)
def test_the_sum_never_rises_and_is_that_of_what_is_returned(p, weighted, dtype):
    a = torch.randn(120, 8, generator=generator()).to(dtype)
    w = torch.rand(120, generator=generator(1)) if weighted else None
    if w is not None:
        w[:7] = 0
    sums = []  # of every iteration, whether it was kept or not
    fit = entry_flats(a, 3, 2, EntryPower(p), weights=w, progress=lambda *step: sums.append(step[2]))
    assert len(sums) > 1
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in pairwise(sums))
    assert fit.error == pytest.approx(entries(a, fit, p, w), rel=1e-4)
    assert fit.objective[-1] < fit.objective[0]
    for basis in fit.bases:
        torch.testing.assert_close(basis @ basis.T, torch.eye(2, dtype=basis.dtype), atol=1e-5, rtol=0)


@pytest.mark.parametrize("p", [1.0, 0.7, 0.5])
@pytest.mark.parametrize("power", [1.0, 1.5, 3.0])
def test_weights_that_spread_are_no_damaged_rows(p, power):
    """w^(1/p) of 400^-3 at p = 1/2 is 2e-16: rows are as long as they came, whatever they count."""
    a = torch.randn(400, 20, generator=generator())
    w = torch.arange(1, 401.0) ** -power
    fit = entry_flats(a, 3, 3, EntryPower(p), weights=w, max_iterations=4)
    assert fit.error == pytest.approx(entries(a, fit, p, w), rel=1e-4)
    assert fit.error < fit.objective[0]
    assert {fit.coordinates.dtype, *(basis.dtype for basis in fit.bases)} == {torch.float32}


def test_sums_of_projections_are_their_definition():
    a = torch.randn(2500, 6, generator=generator(), dtype=F64)
    bases = tuple(torch.linalg.qr(torch.randn(6, 2, generator=generator(c), dtype=F64)).Q.T for c in range(3))
    found = projected_sums(TensorRows(a), bases, 1.0)
    torch.testing.assert_close(found, torch.stack([(a - a @ v.T @ v).abs().sum(1) for v in bases], 1))


def planted(k=3, rank=3, d=60, n=250, rate=0.03, seed=0):
    gen = generator(seed)
    truth = torch.arange(k * n) % k
    flats = torch.linalg.qr(torch.randn(k, d, rank, generator=gen)).Q.transpose(1, 2)
    clean = torch.einsum("nj,njd->nd", torch.randn(len(truth), rank, generator=gen), flats[truth])
    wrong = torch.rand(clean.shape, generator=gen) < rate
    return clean, torch.where(wrong, 20 * float(clean.std()) * torch.randn(clean.shape, generator=gen), clean), truth


@pytest.mark.parametrize("p", [1.0, 0.7])
def test_wrong_entries_do_not_turn_flats(p):
    clean, a, truth = planted()
    fit = entry_flats(a, 3, 3, EntryPower(p))
    score = adjusted_rand_score(truth.numpy(), fit.labels.numpy())
    far = float((stored(fit) - clean).norm() / clean.norm())
    assert (score, far) == (pytest.approx(1.0, abs=0.01), pytest.approx(0.0, abs=0.01))
    squares = adjusted_rand_score(truth.numpy(), fit_flats(a, 3, rank=3).labels.numpy())
    assert squares < 0.5


def test_one_flat_is_an_entrywise_low_rank():
    gen = generator()  # a flat that is there: pure noise has many minima, and the two solvers end in different ones
    a = torch.randn(80, 3, generator=gen) @ torch.randn(3, 10, generator=gen) + 0.1 * torch.randn(80, 10, generator=gen)
    assert entry_flats(a, 1, 3, max_iterations=60, tolerance=1e-5).error == pytest.approx(
        entrywise_low_rank(a, 3).error, rel=0.02
    )


def test_power_two_is_squares():
    a = torch.randn(150, 8, generator=generator())
    a[:50, 4:] = 0
    fit = entry_flats(a, 2, 3, EntryPower(2.0), tolerance=1e-6)
    assert fit.error <= 1.05 * fit_flats(a, 2, rank=3).error


def test_row_order_and_repetition():
    a = planted()[1]
    one, again = entry_flats(a, 3, 3), entry_flats(a, 3, 3)
    assert one.objective == again.objective
    order = torch.randperm(len(a), generator=generator())
    assert entry_flats(a[order], 3, 3).error == pytest.approx(one.error, rel=1e-2)


@pytest.mark.parametrize(
    "a",
    [
        torch.zeros(20, 4),
        torch.ones(20, 4),
        torch.randn(20, 4, generator=generator()) * (torch.arange(20) % 2)[:, None],
        torch.randn(3, 4, generator=generator()),
        torch.randn(20, 4, generator=generator()) * torch.logspace(-4, 4, 20)[:, None],
    ],
    ids=["zeros", "one point", "zero rows", "as many flats as rows", "wild norms"],
)
@pytest.mark.parametrize("p", [1.0, 0.5])
def test_hard_tables_are_fitted(a, p):
    fit = entry_flats(a, 3, 1, EntryPower(p))
    assert torch.isfinite(fit.coordinates).all()
    # Where nothing is left, p < 1 makes much of rounding.
    assert fit.error == pytest.approx(entries(a, fit, p), rel=1e-3, abs=1e-3 * float(a.abs().pow(p).sum()) + 1e-9)


@POWERS
def test_a_cluster_of_fewer_rows_than_its_rank(p):
    gen = generator(3)
    a = torch.randn(60, 12, generator=gen)
    bases = tuple(torch.linalg.qr(torch.randn(12, 4, generator=gen)).Q.T.contiguous() for _ in range(2))
    state = EntryState(TensorRows(a), (torch.arange(60) >= 58).long(), bases, p)
    before = state.total
    state.fit_(1e-3)
    assert state.total < before
    assert [basis.shape for basis in state.bases] == [(4, 12)] * 2
    assert float(state.costs[58:].sum()) < 1e-3 * before  # two rows lie on one flat of four dimensions


@pytest.mark.parametrize("k", [1, 3])
def test_a_method_stores_the_coordinates_that_were_fitted(k):
    a = torch.randn(200, 12, generator=generator())
    w = torch.rand(200, generator=generator(1))
    method = Flats(k, ranks="uniform", error=EntryPower(1.0))
    assert from_json(to_json(Recipe(method, Uniform()))).method == method
    found = method.fit(Problem(TensorRows(a), 4000, 4, Weighting(left=w)))
    assert found.matrix.nbytes <= 4000
    with torch.no_grad():
        costs = found.norm.costs(a - found.matrix.dense())
    assert found.objective[-1] == pytest.approx(float((costs * w).sum()), rel=1e-4)


def test_flats_that_no_row_uses_give_their_bytes_to_the_others():
    a = torch.randn(100, 1, generator=generator()) @ torch.randn(1, 12, generator=generator(1))
    found = Flats(3, ranks="uniform", error=EntryPower(1.0)).fit(Problem(TensorRows(a), 3 * 136 * 4, 4))
    with torch.no_grad():
        torch.testing.assert_close(found.matrix.dense(), a, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EntryPower(0), "power p=0"),
        (lambda: EntryPower(float("inf")), "power p=inf"),
        (lambda: EntryPower(2.5), "power p=2.5"),
        (lambda: Flats(3, error=EntryPower(1.0)), "goes with uniform ranks"),
        (lambda: entry_flats(torch.full((9, 3), torch.nan), 2, 1), "NaN"),
        (lambda: entry_flats(torch.ones(9, 3), 2, 1, Power(1)), "is no power of entries"),
        (lambda: entry_flats(torch.ones(9, 3), 2, 1, max_iterations=0), "max_iterations starts at 1"),
        (lambda: entry_flats(row_of_1e30(), 2, 1), "row 5 is .* times as long as the median row"),
        (lambda: entry_flats(row_of_1e30().float(), 2, 1), "too large to be squared"),
        (lambda: entry_flats(torch.ones(9, 3), 2, 4), "rank 4 is outside 1..3"),
        (lambda: entry_flats(torch.ones(9, 3), 10, 1), "10 flats do not fit 9 rows"),
        (lambda: entry_flats(torch.ones(9, 3), 2, 1, weights=torch.zeros(9)), "all row weights are zero"),
        (
            lambda: Flats(2, ranks="uniform", error=EntryPower(1.0)).fit(
                Problem(TensorRows(torch.randn(50, 4)), 500, 4, Weighting(right=torch.ones(4)))
            ),
            "cannot take a right metric",
        ),
    ],
)
def test_impossible_requests_are_refused(make, message):
    with pytest.raises(KflatsError, match=message):
        make()
