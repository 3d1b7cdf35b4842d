"""Methods of papers that run in experiments/ only: their objectives fall, and they find what was planted."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from sklearn.metrics import adjusted_rand_score

pytest.importorskip("entry_flats", reason="experiments/ is not here")

from distortion import certified, distortion_found
from element_fisher import weighted_low_rank
from entry_flats import entry_flats, l1_coordinates, planted
from sketched_ellipsoids import LewisSample, Sketch

from kflats.common.errors import KflatsError
from kflats.numerics.fit import fit_flats
from kflats.numerics.robust_svd import Lewis
from kflats.numerics.svd import truncated_svd

F64 = torch.float64


def gaussian(n, d, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_element_weights_fill_in_what_they_do_not_count():
    truth = gaussian(30, 2, 1) @ gaussian(2, 20, 2)
    seen = (gaussian(30, 20, 3) > -0.5).to(F64)
    a = torch.where(seen > 0, truth, gaussian(30, 20, 4))
    start = truncated_svd(a, 2, left=seen.sum(1), right=seen.sum(0))
    made = weighted_low_rank(a, seen, start.coordinates, start.basis, tolerance=0, max_iterations=1000)
    torch.testing.assert_close(made.coordinates @ made.basis, truth, atol=1e-3, rtol=1e-3)
    assert all(later < earlier for earlier, later in pairwise(made.objective))
    with pytest.raises(KflatsError, match="not negative"):
        weighted_low_rank(a, -seen, start.coordinates, start.basis)


@pytest.mark.parametrize("p", [1.0, 0.7])
def test_wrong_entries_do_not_turn_flats(p):
    clean, spoilt, truth = planted(n=150)
    fit = entry_flats(spoilt, 3, 3, p)
    made = torch.stack([u @ fit.bases[c] for u, c in zip(fit.coordinates, fit.labels.tolist(), strict=True)])
    assert adjusted_rand_score(truth.numpy(), fit.labels.numpy()) > 0.99
    assert float((made - clean).norm() / clean.norm()) < 0.01
    assert fit.error == pytest.approx(float((spoilt.double() - made.double()).abs().pow(p).sum()), rel=1e-4)
    assert adjusted_rand_score(truth.numpy(), fit_flats(spoilt, 3, rank=3).labels.numpy()) < 0.5


def test_l1_coordinates_of_one_direction_are_weighted_medians():
    a, v = gaussian(20, 9, 5), torch.ones(1, 9, dtype=F64) / 3
    found = l1_coordinates(a, v, tolerance=1e-6, limit=20_000)
    best = (a - a.median(1, keepdim=True).values).abs().sum(1)
    torch.testing.assert_close((a - found @ v).abs().sum(1), best, rtol=1e-5, atol=0)


@pytest.mark.parametrize("way", [LewisSample(), Sketch("cauchy", seed=1), Sketch("exponential", seed=1)], ids=repr)
def test_an_ellipsoid_of_a_draw_holds_its_certificate(way):
    a = gaussian(3000, 6)
    found = way.fit(a, 1.0)
    met = distortion_found(a, found)
    assert met.least >= 1 - 1e-9
    assert met.greatest <= found.bound * (1 + 1e-9)
    assert torch.equal(found.axes, way.fit(a, 1.0).axes)
    plain = distortion_found(a, certified(a, Lewis().fit(a, 1.0))).ratio
    assert met.ratio < 1.2 * plain if isinstance(way, LewisSample) else met.ratio > 1.5 * plain
