"""Every seeding gives labels EM can start from and follows its generator alone; samples stand for all rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score

from kflats.numerics.fit import (
    chances,
    draw_sample,
    fit_flats,
    greedy,
    kmeans,
    norms,
    random_partition,
    split_and_merge,
)
from kflats.numerics.flats import RankSpec, Start, WeightedRows, assign, em, squared_norms
from kflats.numerics.loss import Huber, Power, Squared
from kflats.numerics.rows import TensorRows

LOSSES = {"squared": Squared(), "power 1": Power(1), "power .5": Power(0.5), "huber": Huber(1.0)}
SEEDINGS = {
    "random": lambda cloud, k, rank, generator: random_partition(cloud, k, generator),
    "norms": lambda cloud, k, rank, generator: norms(cloud, k),
    "kmeans": lambda cloud, k, rank, generator: kmeans(cloud, k, generator),
    "greedy": greedy,
}
CLOUDS = {
    "gauss": lambda n, d: torch.randn(n, d),
    "zeros": lambda n, d: torch.zeros(n, d),
    "one point": lambda n, d: torch.ones(n, d),
    "one line": lambda n, d: torch.randn(n, 1) * torch.ones(1, d),
    "half zero": lambda n, d: torch.randn(n, d) * (torch.arange(n) % 2)[:, None],
    "wild norms": lambda n, d: torch.randn(n, d) * torch.logspace(-4, 4, n)[:, None],
}


def cloud_of(a, w=None, multiplicity=None):
    rows = TensorRows(a)
    return WeightedRows(rows, squared_norms(rows), w, multiplicity)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", SEEDINGS)
def test_labels_are_valid_and_em_never_gets_worse_from_them(name):
    for weighted in (False, True):
        for kind in CLOUDS:
            a = CLOUDS[kind](60, 5)
            w = torch.rand(60).pow(4).index_fill(0, torch.tensor([1, 7]), 0.0) if weighted else None
            cloud = cloud_of(a, w, torch.rand(60) + 1 if weighted else None)
            labels = SEEDINGS[name](cloud, 3, 2, generator())
            assert labels.shape == (60,)
            assert int(labels.min()) >= 0
            assert int(labels.max()) < 3
            fit = em(cloud, RankSpec(3, rank=2), Start(labels))
            assert all(later <= earlier for earlier, later in zip(fit.objective, fit.objective[1:], strict=False))
            assert all(torch.isfinite(basis).all() for basis in fit.bases)


@settings(max_examples=30)
@given(n=st.integers(1, 30), d=st.integers(1, 6), data=st.data(), name=st.sampled_from(sorted(SEEDINGS)))
def test_any_shape_can_be_seeded(n, d, data, name):
    k, rank = data.draw(st.integers(1, n)), data.draw(st.integers(1, d))
    labels = SEEDINGS[name](cloud_of(torch.randn(n, d, generator=generator(n))), k, rank, generator())
    assert labels.shape == (n,)
    assert int(labels.max()) < k


@pytest.mark.parametrize("name", SEEDINGS)
def test_equal_generators_give_equal_labels_and_the_global_one_is_left_alone(name):
    cloud = cloud_of(torch.randn(200, 6))
    before = torch.get_rng_state()
    first, again = (SEEDINGS[name](cloud, 4, 2, generator(3)) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", ["random", "kmeans", "greedy"])
def test_other_generators_give_other_labels(name):
    cloud = cloud_of(torch.randn(200, 6))
    assert not torch.equal(SEEDINGS[name](cloud, 4, 2, generator(1)), SEEDINGS[name](cloud, 4, 2, generator(2)))


def test_a_random_partition_has_equal_parts():
    counts = torch.bincount(random_partition(cloud_of(torch.randn(103, 2)), 5, generator()).long())
    assert counts.tolist() == [21, 21, 21, 20, 20]


def test_norm_quantiles_rise_with_weighted_norm():
    a, w = torch.randn(100, 4), torch.rand(100)
    labels = norms(cloud_of(a, w), 4)
    size = w * a.square().sum(1)
    assert torch.bincount(labels.long()).tolist() == [25] * 4
    assert all(size[labels == c].max() <= size[labels == c + 1].min() for c in range(3))


def test_kmeans_finds_distant_blobs_and_labels_the_nearest_centre():
    centres = torch.eye(4) * 50
    truth = torch.arange(200) % 4
    a = centres[truth] + torch.randn(200, 4)
    best = max(adjusted_rand_score(truth.numpy(), kmeans(cloud_of(a), 4, generator(s)).numpy()) for s in range(5))
    assert best == 1.0
    labels = kmeans(cloud_of(a), 4, generator(0), iterations=100)
    means = torch.stack([a[labels == c].mean(0) for c in range(4)])
    assert torch.equal(torch.cdist(a, means).argmin(1), labels.long())


def flats_in_space(k, rank, d, n, seed):
    gen = generator(seed)
    parts = [
        torch.randn(n, rank, generator=gen) @ torch.linalg.qr(torch.randn(d, rank, generator=gen)).Q.T for _ in range(k)
    ]
    return torch.cat(parts), torch.arange(k * n) // n


def test_seeds_that_look_for_flats_find_them():
    a, truth = flats_in_space(4, 3, 20, 150, 0)
    fit = fit_flats(a, 4, rank=3)
    assert adjusted_rand_score(truth.numpy(), fit.labels.numpy()) >= 0.99


def test_split_and_merge_repairs_a_start_that_em_cannot():
    a, truth = flats_in_space(4, 2, 12, 200, 1)
    cloud = cloud_of(a)
    # Two flats share one cluster while another has two: EM alone stays there.
    stuck = torch.where(truth < 2, 0, truth).to(torch.uint8)
    stuck[truth == 3] = torch.where(torch.arange(200) % 2 == 0, 3, 1).to(torch.uint8)
    shape = RankSpec(4, rank=2)
    alone = em(cloud, shape, Start(stuck), refit=False)
    repaired = split_and_merge(cloud, shape, alone, generator())
    assert repaired.error <= alone.error
    assert adjusted_rand_score(truth.numpy(), repaired.labels.numpy()) >= 0.99


def test_split_and_merge_never_raises_the_error():
    for seed in range(4):
        cloud = cloud_of(torch.randn(150, 6, generator=generator(seed)))
        start = em(cloud, RankSpec(4, rank=2), Start(random_partition(cloud, 4, generator(seed))), refit=False)
        assert split_and_merge(cloud, RankSpec(4, rank=2), start, generator(seed)).error <= start.error
        one = em(cloud, RankSpec(1, rank=2), Start(random_partition(cloud, 1, generator(seed))), refit=False)
        assert split_and_merge(cloud, RankSpec(1, rank=2), one, generator()) is one


@settings(max_examples=30)
@given(scores=st.lists(st.floats(0, 1e6), min_size=1, max_size=40), size=st.integers(1, 40))
def test_chances_are_chances_and_spend_no_more_than_asked(scores, size):
    size = min(size, len(scores))
    found = chances(torch.tensor(scores), size)
    assert float(found.min()) > 0
    assert float(found.max()) <= 1
    assert float(found.sum()) <= size * (1 + 1e-5)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_the_error_of_any_flats_is_estimated(loss):
    a = torch.randn(3000, 8, generator=generator()) * torch.rand(3000, 1, generator=generator(1)).pow(-0.5)
    cloud = cloud_of(a, torch.rand(3000, generator=generator(2)))
    bases = tuple(torch.linalg.qr(torch.randn(8, 2, generator=generator(c))).Q.T.contiguous() for c in range(3))

    def error(part):
        return assign(part, bases, loss=loss).objective

    drawn = [error(draw_sample(cloud, 300, generator(seed), loss)) for seed in range(40)]
    assert sum(drawn) / len(drawn) == pytest.approx(error(cloud), rel=0.1)


@settings(max_examples=30)
@given(n=st.integers(1, 60), d=st.integers(1, 5), size=st.integers(2, 60), data=st.data())
def test_any_cloud_can_be_drawn_from(n, d, size, data):
    a = torch.randn(n, d, generator=generator(n))
    a[data.draw(st.integers(0, n - 1))] = 0
    w = torch.rand(n, generator=generator(d)) if data.draw(st.booleans()) else None
    cloud = cloud_of(a, w)
    part = draw_sample(cloud, size, generator(), data.draw(st.sampled_from(list(LOSSES.values()))))
    assert part is cloud if n <= size else 0 < float(part.multiplicity.sum()) <= n


def test_half_of_each_chance_follows_the_scores_and_half_is_even() -> None:
    scores = torch.tensor([0.0, 1.0, 3.0, 4.0])
    torch.testing.assert_close(chances(scores, 2), torch.tensor([0.25, 0.375, 0.625, 0.75]))
    torch.testing.assert_close(chances(torch.zeros(4), 2), torch.full((4,), 0.5))
    assert float(chances(torch.tensor([0.0, 0.0, 0.0, 1.0]), 3).max()) == 1.0
