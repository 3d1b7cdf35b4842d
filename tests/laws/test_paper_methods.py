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
from kflats.methods import MESSI, Problem
from kflats.methods.protocol import label_bytes
from kflats.numerics.fit import fit_flats
from kflats.numerics.robust_svd import Lewis
from kflats.numerics.rows import TensorRows
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


def test_figures_3_and_4_of_messi():
    """Numbers of figure 3, 20 x 10 by two flats of 3; and 120 points near three lines, which a plane fits worse."""
    a = gaussian(20, 10)
    flats = MESSI(k=2, restarts=1).fit(Problem(TensorRows(a), 120 * 4 + label_bytes(20, 2), 4, seed=0)).matrix
    assert sum(p.numel() for p in flats.parameters()) == 20 * 3 + 2 * 3 * 10 == 120
    lines = torch.linalg.qr(gaussian(3, 3, 1)).Q[torch.arange(120) % 3] * gaussian(120, 1, 2) + 0.02 * gaussian(120, 3)
    budget = 129 * 4 + label_bytes(120, 3)
    three = MESSI(k=3, restarts=3).fit(Problem(TensorRows(lines), budget, 4, seed=0)).matrix
    assert sum(p.numel() for p in three.parameters()) == 120 + 3 * 3 == 129
    plane = truncated_svd(lines, 2)
    assert plane.coordinates.numel() + plane.basis.numel() == 246
    assert float((lines - three.dense().detach()).square().sum()) < plane.error / 20
    # Figure 7: a row of U has numbers in the columns of its flat alone, zeros in the others; U V is the same matrix.
    u = torch.zeros(120, 3, dtype=F64)
    u[torch.arange(120), three.labels.long()] = three.weight.detach().double().flatten()[three.position.long()]
    torch.testing.assert_close(u @ three.basis.detach().double(), three.dense().detach().double())


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
