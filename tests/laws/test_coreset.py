"""Coresets: each score is what its formula says, samples stand for all rows, and EM on them is a good start."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score

from kflats.common.errors import KflatsError
from kflats.numerics.assign import assign, squared_norms
from kflats.numerics.coreset import Coreset, chances, draw_sample, ridge_leverage
from kflats.numerics.fit import fit_flats
from kflats.numerics.flats import WeightedRows
from kflats.numerics.loss import Huber, Power, Squared
from kflats.numerics.rows import TensorRows

F64 = torch.float64
LOSSES = {"squared": Squared(), "power 1": Power(1), "power .5": Power(0.5), "huber": Huber(1.0)}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def cloud_of(a, w=None, multiplicity=None):
    rows = TensorRows(a)
    return WeightedRows(rows, squared_norms(rows), w, multiplicity)


def planted(k=5, rank=3, d=24, n=800, noise=0.02, seed=0):
    gen = generator(seed)
    truth = torch.randint(0, k, (k * n,), generator=gen)
    flats = torch.linalg.qr(torch.randn(k, d, rank, generator=gen)).Q.transpose(1, 2)
    a = torch.einsum("nj,njd->nd", torch.randn(len(truth), rank, generator=gen), flats[truth])
    return a + noise * torch.randn(a.shape, generator=gen), truth


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_scores_are_their_formulas(weighted):
    a = torch.randn(200, 6, generator=generator(), dtype=F64) * torch.logspace(0, -1, 6, dtype=F64)
    w = torch.rand(200, generator=generator(1), dtype=F64) if weighted else torch.ones(200, dtype=F64)
    cloud = cloud_of(a, w if weighted else None)
    gram = (a * w[:, None]).T @ a
    values = torch.linalg.eigvalsh(gram)

    def scores(ridge):
        return w * ((a @ torch.linalg.inv(gram + ridge * torch.eye(6, dtype=F64))) * a).sum(1)

    torch.testing.assert_close(ridge_leverage(cloud, 2), scores(float(values[:4].sum()) / 2))
    torch.testing.assert_close(ridge_leverage(cloud, 6), scores(0.0))  # nothing lies beyond all columns
    assert float(ridge_leverage(cloud, 6).sum()) == pytest.approx(6)


@settings(max_examples=30)
@given(n=st.integers(1, 60), d=st.integers(1, 5), size=st.integers(2, 60), data=st.data())
def test_any_cloud_can_be_drawn_from(n, d, size, data):
    a = torch.randn(n, d, generator=generator(n))
    a[data.draw(st.integers(0, n - 1))] = 0
    w = torch.rand(n, generator=generator(d)) if data.draw(st.booleans()) else None
    loss = data.draw(st.sampled_from(list(LOSSES.values())))
    part = Coreset(size).draw(cloud_of(a, w), 2, generator(), loss)
    assert min(n, size / 2 - 1) <= part.rows.shape[0] <= size
    if part.multiplicity is not None:
        assert float(part.multiplicity.sum()) <= n
        assert torch.isfinite(part.multiplicity).all()


def test_a_short_cloud_is_its_own_coreset():
    cloud = cloud_of(torch.randn(50, 3))
    assert Coreset(50).draw(cloud, 2, generator()) is cloud


@settings(max_examples=30)
@given(scores=st.lists(st.floats(0, 1e6), min_size=1, max_size=40), size=st.integers(1, 40))
def test_chances_are_chances_and_spend_no_more_than_asked(scores, size):
    size = min(size, len(scores))
    found = chances(torch.tensor(scores), size)
    assert float(found.min()) > 0
    assert float(found.max()) <= 1
    assert float(found.sum()) <= size * (1 + 1e-5)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_the_error_of_any_flats_is_estimated_without_bias(loss):
    a = torch.randn(3000, 8, generator=generator()) * torch.rand(3000, 1, generator=generator(1)).pow(-0.5)
    cloud = cloud_of(a, torch.rand(3000, generator=generator(2)))
    bases = tuple(torch.linalg.qr(torch.randn(8, 2, generator=generator(c))).Q.T.contiguous() for c in range(3))

    def error(part):
        found = assign(part.rows, bases, part.norms2, weights=part.weights, multiplicity=part.multiplicity, loss=loss)
        return found.objective

    drawn = [error(Coreset(300).draw(cloud, 6, generator(seed), loss)) for seed in range(40)]
    assert sum(drawn) / len(drawn) == pytest.approx(error(cloud), rel=0.03)


def test_a_direction_that_one_row_has_is_not_missed():
    a = torch.randn(5000, 10, generator=generator())
    a[:, 9] = 0
    a[1234] = torch.eye(10)[9] * 0.5
    cloud = cloud_of(a)
    held = [
        bool((Coreset(500).draw(cloud, 10, generator(seed), Power(1)).rows.matrix[:, 9] > 0).any())
        for seed in range(20)
    ]
    assert all(held)
    energy = [bool((draw_sample(cloud, 500, generator(seed)).rows.matrix[:, 9] > 0).any()) for seed in range(20)]
    assert sum(energy) < 10


def test_leverage_bounds_no_share_of_what_several_flats_leave():
    """Two lines that hold all rows but one leave that row alone: its share is 1, its leverage that of any other."""
    lines = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=F64)
    a = torch.cat([lines.repeat(500, 1), torch.tensor([[0.6, 0.8]], dtype=F64)])
    cloud = cloud_of(a)
    left = assign(cloud.rows, (lines[:1], lines[1:]), cloud.norms2).dist2
    assert float(left[-1] / left.sum()) == pytest.approx(1)
    scores = ridge_leverage(cloud, 2)
    assert float(scores[-1] / scores.sum()) < 2 / 1001
    fit = fit_flats(a, 3, rank=1, coreset=Coreset(40))  # but EM goes on with all rows, and so finds it
    assert fit.error < 1e-9


def test_a_sample_of_a_sample_stands_for_all_rows():
    cloud = cloud_of(torch.randn(4000, 4, generator=generator()))
    core = Coreset(1000).draw(cloud, 2, generator())
    part = draw_sample(core, 100, generator())
    assert 3990 < float(core.multiplicity.sum()) <= 4000
    assert 3990 < float(part.multiplicity.sum()) <= 4000


@pytest.mark.parametrize("start", ["auto", "greedy"])
@pytest.mark.parametrize("loss", [Squared(), Power(1)], ids=["squared", "power 1"])
def test_em_from_a_coreset_finds_planted_flats(start, loss):
    a, truth = planted()
    fit = fit_flats(a, 5, rank=3, start=start, error=loss, coreset=Coreset(600))
    assert adjusted_rand_score(truth.numpy(), fit.labels.numpy()) >= 0.99
    assert fit.error <= 1.01 * fit_flats(a, 5, rank=3, start=start, error=loss).error
    again = fit_flats(a, 5, rank=3, start=start, error=loss, coreset=Coreset(600))
    assert again.objective == fit.objective


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Coreset(1), "a coreset of 1 rows"),
        (lambda: Coreset(True), "a coreset of True rows"),
        (lambda: fit_flats(torch.randn(30, 4), 2, rank=3, coreset=Coreset(15)), "cannot show 2 flats of rank 3"),
        (lambda: fit_flats(torch.randn(30, 4), 2, budget=80, coreset=Coreset(10)), "not supported with a budget"),
    ],
)
def test_impossible_requests_are_refused(make, message):
    with pytest.raises(KflatsError, match=message):
        make()
