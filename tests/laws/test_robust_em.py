"""EM under other losses: the bound is one, the loss never rises, outliers do not turn flats, squares are untouched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score
from table import crossed, slow

from kflats.common.errors import KflatsError
from kflats.importance.protocol import Weighting
from kflats.matrices.registry import LowRankMatrix
from kflats.methods import Flats, Problem
from kflats.numerics.fit import fit_flats
from kflats.numerics.flats import RankSpec, Start, Stopping, WeightedRows, assign, squared_norms
from kflats.numerics.gram import cluster_grams, top_eigenvectors
from kflats.numerics.loss import Huber, Power, Squared, Truncated
from kflats.numerics.robust_em import distances_of, losses, reweighted, robust_em
from kflats.numerics.rows import TensorRows
from kflats.numerics.subspace import robust_subspace

F64 = torch.float64
LOSSES = {
    "power 1": Power(1),
    "power 1.5": Power(1.5),
    "power .5": Power(0.5),
    "huber": Huber(0.8),
    "huber, relative": Huber(1.0, "median"),
    "truncated": Truncated(2.5),
    "truncated, relative": Truncated(2.0, "median"),
}
"""A new loss is a new row."""
EVERY = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
EACH_KIND = pytest.mark.parametrize(
    "loss",
    [
        pytest.param(loss, id=name, marks=() if name in ("power 1", "huber, relative", "truncated") else slow)
        for name, loss in LOSSES.items()
    ],
)
"""One loss of each kind, and the others as slow cases."""
WAYS = {
    "uniform": {"rank": 3},
    "one flat": {"k": 1, "rank": 4},
    "published": {"rank": 3, "start": "random"},
    "above half": {"rank": 8},
    "filled": {"budget": 1200},
    "filled, exact rows": {"budget": 1500, "exact": True},
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def table(n=300, d=10, seed=4, dtype=F64):
    a = torch.randn(n, d, generator=generator(seed), dtype=F64)
    a[::29] *= 20
    return a.to(dtype), torch.rand(n, generator=generator(seed + 1), dtype=F64) ** 2 + 1e-3


def row_of_1e30():
    a, _ = table()
    a[5] = 1e30
    return a


def cloud_of(a, w=None):
    rows = TensorRows(a)
    return WeightedRows(rows, squared_norms(rows), w)


def distances2(a, fit):
    """(n,) squared distances to the flats that rows are labelled with, in float64; rows kept exactly have none."""
    out = torch.zeros(len(a), dtype=F64)
    for c, basis in enumerate(fit.bases):
        part, v = a[fit.labels == c].double(), basis.double()
        out[fit.labels == c] = (part - (part @ v.T) @ v).square().sum(1)
    return out


@EVERY
@settings(max_examples=40)
@given(at=st.floats(0, 100), to=st.floats(0, 100), norm=st.floats(1e-3, 100))
def test_the_squares_lie_above_the_loss_and_touch_it(loss, at, to, norm):
    loss = loss.absolute(torch.ones(3))
    cloud = cloud_of(torch.tensor([[norm]], dtype=F64))
    at, to = (torch.tensor([x], dtype=F64) for x in (at, to))
    bound = losses(loss, at, cloud) + reweighted(loss, at, cloud) * (to - at)
    assert float(losses(loss, to, cloud)) <= float(bound) * (1 + 1e-9) + 1e-9
    assert float(losses(loss, to, cloud)) >= float(loss.rho(to)) * (1 - 1e-12) - 1e-12


@pytest.mark.parametrize(("loss", "way"), crossed(LOSSES.values(), WAYS.values()))
def test_the_objective_ends_at_the_loss_of_what_is_returned(loss, way):
    for weighted in (False, True):
        a, w = table(dtype=torch.float32 if weighted else F64)
        fit = fit_flats(a, **{"k": 3, "weights": w if weighted else None, "error": loss, **way})
        assert fit.error == min(fit.objective)
        mass = w if weighted else torch.ones_like(w)
        total = float((fit.loss.rho(distances2(a, fit)) * mass).sum())
        assert fit.error == pytest.approx(total, rel=1e-6 if weighted else 1e-9)
        for basis in fit.bases:
            torch.testing.assert_close(basis @ basis.T, torch.eye(len(basis), dtype=basis.dtype), atol=1e-5, rtol=0)
        if "budget" in way:
            counts = torch.bincount(fit.labels.long(), minlength=4)
            assert sum(int(counts[c] + 10) * r for c, r in enumerate(fit.ranks)) + int(counts[3]) * 10 <= way["budget"]


@EACH_KIND
def test_half_precision_is_fitted_in_float32(loss):
    for dtype in (torch.float16, torch.bfloat16):
        a, _ = table(dtype=dtype)
        fit = fit_flats(a, 3, rank=3, error=loss)
        assert fit.bases[0].dtype == torch.float32
        assert fit.error == fit_flats(a.float(), 3, rank=3, error=loss).error


def test_squares_take_the_same_path_as_ever():
    a, w = table()
    for way in ({"rank": 3}, {"budget": 1200, "exact": True}):
        plain = fit_flats(a, 3, weights=w, **way)
        for loss in (Squared(), Power(2)):
            named = fit_flats(a, 3, weights=w, error=loss, **way)
            assert named.objective == plain.objective
            assert torch.equal(named.labels, plain.labels)
            assert all(torch.equal(x, y) for x, y in zip(named.bases, plain.bases, strict=True))


def test_halved_grams_are_the_grams():
    a = torch.randn(500, 130, generator=generator(), dtype=F64)
    labels, w = torch.randint(0, 3, (500,), generator=generator(1)), torch.rand(500, generator=generator(2), dtype=F64)
    for k, here in ((3, labels), (1, torch.zeros(500, dtype=torch.int64))):
        whole = cluster_grams(TensorRows(a), here, k, w)
        halved = cluster_grams(TensorRows(a), here, k, w, halved=True)
        torch.testing.assert_close(halved, whole)
        assert torch.equal(halved, halved.transpose(1, 2))


def planted(rate, seed=0, k=3, rank=2, d=16, n=400, noise=0.05, size=20):
    """Rows on k flats, a share replaced by rows of ``size`` standard deviations; which are clean, and their flat."""
    gen = generator(seed)
    truth = torch.randint(0, k, (k * n,), generator=gen)
    flats = torch.linalg.qr(torch.randn(k, d, rank, generator=gen)).Q.transpose(1, 2)
    a = torch.einsum("nj,njd->nd", torch.randn(len(truth), rank, generator=gen), flats[truth])
    a += noise * torch.randn(a.shape, generator=gen)
    clean = torch.rand(len(a), generator=gen) >= rate
    gross = size * float(a.std()) * torch.randn(a.shape, generator=gen)
    return torch.where(clean[:, None], a, gross), clean, truth


def inlier_error(a, clean, fit):
    return assign(cloud_of(a[clean]), fit.bases).objective


@pytest.mark.parametrize("loss", [Truncated(3.0, "median"), Truncated(1.0)], ids=["medians", "distance"])
def test_gross_outliers_leave_truncated_flats_where_clean_rows_put_them(loss):
    for seed in range(3):
        a, clean, truth = planted(0.03, seed)
        fit = fit_flats(a, 3, rank=2, error=loss, seed=seed)
        alone = fit_flats(a[clean], 3, rank=2, seed=seed)
        assert inlier_error(a, clean, fit) <= 1.05 * inlier_error(a, clean, alone)
        assert adjusted_rand_score(truth[clean].numpy(), fit.labels[clean].numpy()) >= 0.95
        # Squares, for comparison, follow the outliers.
        assert inlier_error(a, clean, fit_flats(a, 3, rank=2, seed=seed)) > 3 * inlier_error(a, clean, alone)


@pytest.mark.slow
def test_outliers_of_any_size_leave_truncated_flats_there():
    """Far enough, the outliers own the flats of Power(1) as well: its fit is not where one may begin."""
    for size in (100, 1e4, 1e6):
        for dtype in (torch.float32, F64):
            a, clean, _ = planted(0.03, size=size)
            a = a.to(dtype)
            alone = inlier_error(a, clean, fit_flats(a[clean], 3, rank=2))
            assert inlier_error(a, clean, fit_flats(a, 3, rank=2, error=Truncated(3.0, "median"))) <= 1.05 * alone
            if size == 100:
                assert inlier_error(a, clean, fit_flats(a, 3, rank=2, error=Power(0.5))) <= 1.05 * alone
                assert inlier_error(a, clean, fit_flats(a, 3, rank=2, error=Power(1))) > 3 * alone


@pytest.mark.parametrize("size", [1e4, 1e6])
def test_filled_ranks_begin_beside_power_one_as_well(size, monkeypatch):
    """From the flats of Power(1) alone, which such outliers own, a fit ends with nearly all ranks spent on them."""
    a, clean, _ = planted(0.03, size=size)

    def lost(fit):
        rows = TensorRows(a)
        return float(distances_of(WeightedRows(rows, squared_norms(rows)), fit.bases, fit.labels)[clean].sum())

    def made():
        return fit_flats(a, 3, budget=2 * (len(a) + 48), error=Truncated(3.0, "median"))

    both = made()
    monkeypatch.setattr("kflats.numerics.fit._within_reach", lambda *_: False)
    one = made()
    assert both.error < 0.6 * one.error
    assert lost(both) < 0.3 * lost(one)
    assert both.ranks == (2, 2, 2)


@pytest.mark.parametrize("loss", [Power(1), Huber(1.0, "median"), Power(0.5)], ids=str)
def test_other_losses_find_the_flats_as_well(loss):
    a, clean, truth = planted(0.03)
    fit = fit_flats(a, 3, rank=2, error=loss)
    assert adjusted_rand_score(truth[clean].numpy(), fit.labels[clean].numpy()) >= 0.95


@pytest.mark.parametrize("loss", [Power(1), Power(1.5), Huber(0.5), Huber(1.0, "median")], ids=str)
def test_one_flat_is_the_robust_subspace(loss):
    for weighted in (False, True):
        a, w = table(dtype=F64)
        w = w if weighted else None
        ours = fit_flats(a, 1, rank=4, weights=w, error=loss, stop=Stopping(1e-8, 500))
        theirs = robust_subspace(a, 4, loss, weights=w, stop=Stopping(1e-8, 500))
        assert ours.error == pytest.approx(theirs.error, rel=2e-3)


def converged_inside(a, k, rank, labels, loss, rounds):
    """The published way: a whole k = 1 solver in every M-step; the loss reached."""
    cloud = cloud_of(a)
    bases = [torch.eye(a.shape[1], dtype=F64)[:rank]] * k
    for _ in range(rounds):
        for c in range(k):
            part = cloud_of(a[labels == c])
            u = loss.weight(part.norms2, part.norms2)
            for _ in range(40):
                gram = cluster_grams(part.rows, torch.zeros(len(u), dtype=torch.uint8), 1, u)[0]
                bases[c] = top_eigenvectors(gram, rank)[1]
                u = loss.weight(assign(part, (bases[c],)).dist2, part.norms2)
        step = assign(cloud, tuple(bases))
        labels = step.labels
    return float(losses(loss, step.dist2, cloud).sum())


def test_one_reweighting_an_iteration_reaches_what_a_converged_inner_loop_does():
    a, _, truth = planted(0.03, noise=0.2)
    a = a.double()
    labels = torch.where(torch.arange(len(a)) % 4 == 0, (truth + 1) % 3, truth).to(torch.uint8)
    whole = converged_inside(a, 3, 2, labels, Power(1), 8)
    fit = robust_em(cloud_of(a), RankSpec(3, rank=2), Power(1), Start(labels), Stopping(1e-7, 400))
    assert fit.converged
    assert fit.error <= whole * 1.001  # another local minimum, perhaps
    assert fit.error <= converged_inside(a, 3, 2, fit.labels, Power(1), 2) * 1.0001


@EVERY
def test_row_order_changes_rounding_only(loss):
    for shape in (RankSpec(3, rank=3), RankSpec(3, budget=1200, exact=True)):
        a, w = table()
        loss = loss.absolute(torch.full((5,), 1.0))
        labels = (torch.arange(300) % 3).to(torch.uint8)
        order = torch.randperm(300, generator=generator(9))
        one = robust_em(cloud_of(a, w), shape, loss, Start(labels))
        other = robust_em(cloud_of(a[order], w[order]), shape, loss, Start(labels[order]))
        assert other.objective[0] == pytest.approx(one.objective[0], rel=1e-6)
        if shape.rank:  # ranks are whole numbers: a last bit may become a coordinate, and that another local minimum
            assert other.error == pytest.approx(one.error, rel=1e-6)


@EVERY
def test_a_row_of_weight_two_is_two_rows(loss):
    a, _ = table(n=120)
    loss = loss.absolute(torch.full((5,), 1.0))
    twice = torch.arange(120) % 3 == 0
    flats = torch.linalg.qr(torch.randn(2, 10, 3, generator=generator(), dtype=F64)).Q.transpose(1, 2)
    start = Start(bases=tuple(flats.contiguous()))
    heavy = robust_em(cloud_of(a, 1.0 + twice.double()), RankSpec(2, rank=3), loss, start)
    double = robust_em(
        cloud_of(a[torch.cat([torch.arange(120), twice.nonzero().squeeze(1)])]), RankSpec(2, rank=3), loss, start
    )
    assert heavy.objective[0] == pytest.approx(double.objective[0], rel=1e-9)
    assert heavy.error == pytest.approx(double.error, rel=1e-2)


@EVERY
def test_equal_seeds_give_equal_fits(loss):
    a, w = table()
    one, again = (fit_flats(a, 3, rank=3, weights=w, error=loss, seed=5) for _ in range(2))
    assert one.objective == again.objective
    assert torch.equal(one.labels, again.labels)


TABLES = {
    "zeros": lambda: torch.zeros(40, 5),
    "half zero": lambda: torch.randn(40, 5, generator=generator()) * (torch.arange(40) % 2)[:, None],
    "one point": lambda: torch.ones(40, 5),
    "low rank": lambda: torch.randn(40, 1, generator=generator()) * torch.ones(1, 5),
    "wild norms": lambda: torch.randn(40, 5, generator=generator()) * torch.logspace(-8, 8, 40)[:, None],
    "as many flats as rows": lambda: torch.randn(3, 5, generator=generator()),
}


@EACH_KIND
def test_hard_tables_are_fitted(loss):
    for kind in TABLES:
        if isinstance(loss, Truncated) and loss.unit == "absolute":
            loss = Truncated(1e9)
        a = TABLES[kind]()
        for way in ({"rank": 1}, {"rank": 2, "start": "random"}, {"budget": 3 * 5 + 2 * len(a), "exact": True}):
            fit = fit_flats(a, 3, error=loss, **way)
            assert all(torch.isfinite(basis).all() for basis in fit.bases)
            assert all(later < earlier for earlier, later in zip(fit.objective, fit.objective[1:], strict=False))


@pytest.mark.parametrize("loss", [Power(1), Truncated(3.0, "median")], ids=str)
def test_an_iteration_limit_is_kept_and_told(loss):
    a, _ = table()
    fit = fit_flats(a, 3, rank=3, start="random", error=loss, stop=Stopping(0, 2))
    assert not fit.converged
    heard = []
    fit_flats(a, 3, rank=3, start="random", error=Power(1), stop=Stopping(progress=lambda *said: heard.append(said)))
    assert [step for phase, step, _ in heard if phase == "em"] == list(range(len(heard)))


def test_a_threshold_below_every_distance_is_refused():
    with pytest.raises(KflatsError, match="every row is farther than 1e-09"):
        fit_flats(table()[0], 3, rank=3, error=Truncated(1e-9))


METHODS = {
    "uniform": Flats(k=3, ranks="uniform", error=Power(1)),
    "filled": Flats(k=3, error=Power(1)),
    "one": Flats(k=1, error=Huber(1.0, "median")),
    "searched": Flats(k=None, ranks="uniform", error=Power(1)),
    "truncated": Flats(k=2, ranks="uniform", error=Truncated(2.0, "median")),
}


@pytest.mark.slow
def test_a_search_compares_one_sum():
    """Thresholds in medians differ from k to k: all are judged under the first's."""
    a, w = table(dtype=torch.float32)
    method = Flats(k=None, ranks="uniform", error=Truncated(0.5, "median"))
    found = solve(method, a, 7000, left=w)
    one = solve(replace(method, k=1), a, 7000, left=w)
    assert found.norm.loss == one.norm.loss
    named = (solve(replace(method, k=k, error=one.norm.loss), a, 7000, left=w).objective[-1] for k in (1, 2, 3, 4, 5))
    assert found.objective[-1] <= min(named) * (1 + 1e-6)


def solve(method, a, nbytes, **weighting):
    return method.fit(Problem(TensorRows(a), nbytes, 4, Weighting(**weighting)))


@pytest.mark.parametrize(("name", "nbytes"), crossed(METHODS, [2500, 4001, 7000]))
def test_a_method_stays_within_its_bytes_and_says_what_it_minimised(name, nbytes):
    a, w = table(dtype=torch.float32)
    found = solve(METHODS[name], a, nbytes, left=w)
    assert found.matrix.nbytes <= nbytes
    with torch.no_grad():
        error = (found.norm.costs(a - found.matrix.dense()) * w).sum()
    assert found.objective[-1] == pytest.approx(float(error), rel=3e-3)


def test_flats_that_no_row_uses_give_their_bytes_to_the_others():
    a = torch.randn(100, 1, generator=generator()) @ torch.randn(1, 12, generator=generator(1))
    found = solve(Flats(k=3, ranks="uniform", error=Power(1)), a, 3 * (100 + 36) * 4)
    assert isinstance(found.matrix, LowRankMatrix) or len(found.matrix.bands) > 1
    with torch.no_grad():
        torch.testing.assert_close(found.matrix.dense(), a, atol=1e-4, rtol=0)


@pytest.mark.parametrize("loss", [Power(1), Huber(1.0), Truncated(2.0)], ids=str)
def test_thresholds_under_a_metric_are_distances_in_it(loss):
    a, _ = table(dtype=torch.float32)
    method = Flats(k=2, ranks="uniform", error=loss)
    nbytes = 4 * 4 * (300 + 20) + 300
    scaled = solve(method, a, nbytes, right=torch.full((10,), 25.0))
    plain = solve(method, 5 * a, nbytes)
    with torch.no_grad():
        torch.testing.assert_close(5 * scaled.matrix.dense(), plain.matrix.dense(), atol=1e-2, rtol=1e-2)
    assert scaled.objective[-1] == pytest.approx(plain.objective[-1], rel=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Flats(error="power 1"), "no loss of distances is .power 1."),
        (lambda: Flats(nested_ranks=2, error=Power(1)), "nested_ranks=2 is not supported with .*error="),
        (lambda: fit_flats(torch.randn(3, 5), 4, rank=1, error=Power(1)), "4 flats do not fit 3 rows"),
        (lambda: fit_flats(table()[0], 2, rank=1, error="power 1"), "no loss of distances is 'power 1'"),
        (lambda: fit_flats(row_of_1e30(), 2, rank=1, error=Power(1)), "row 5 is .* times as long as the median row"),
        (lambda: fit_flats(row_of_1e30().float(), 2, rank=1, error=Power(1)), "too large to be squared"),
        (lambda: fit_flats(torch.full((3, 5), torch.nan), 2, rank=1, error=Power(1)), "NaN"),
    ],
)
def test_impossible_requests_are_refused(make, message):
    with pytest.raises(KflatsError, match=message):
        make()
