"""Losses: their definition, the parabola that touches them from above, units, names, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kflats.common.errors import KflatsError
from kflats.numerics.loss import FLOOR, Huber, Power, Squared, Truncated, floored, from_name

F64 = torch.float64
distance = st.floats(1e-3, 1e3)
losses = st.one_of(
    st.just(Squared()),
    st.floats(0.05, 2.0).map(Power),
    st.floats(0.01, 100.0).map(Huber),
    st.floats(0.01, 100.0).map(Truncated),
)


def defined(loss, t):
    """rho(t) as the table of the module says it."""
    if isinstance(loss, Squared):
        return t**2
    if isinstance(loss, Power):
        return t**loss.q
    t0 = loss.threshold
    if isinstance(loss, Huber):
        return t**2 if t <= t0 else 2 * t0 * t - t0**2
    return min(t, t0)


def rho(loss, t):
    return float(loss.rho(torch.tensor([t * t], dtype=F64)))


def weight(loss, t):
    return float(loss.weight(torch.tensor([t * t], dtype=F64)))


@given(losses, distance)
def test_rho_is_as_defined(loss, t):
    assert rho(loss, t) == pytest.approx(defined(loss, t), rel=1e-9)
    assert rho(loss, 0.0) == 0


@given(losses, distance)
def test_the_weight_is_the_slope_in_squared_distance(loss, t):
    if isinstance(loss, Huber | Truncated) and abs(t / loss.threshold - 1) < 1e-3:
        return  # the kink
    step = 1e-5 * t * t
    high, low = (float(loss.rho(torch.tensor([t * t + s], dtype=F64))) for s in (step, -step))
    assert weight(loss, t) == pytest.approx((high - low) / (2 * step), rel=1e-3, abs=1e-12)


@given(losses, distance, st.floats(0.0, 1e3))
def test_the_weighted_square_touches_from_above(loss, at, t):
    """What makes reweighting never raise the sum."""
    parabola = rho(loss, at) + weight(loss, at) * (t * t - at * at)
    assert rho(loss, t) <= parabola + 1e-9 * (abs(parabola) + rho(loss, at) + weight(loss, at) * at * at)


@given(losses, distance, st.floats(0.01, 100.0))
def test_units_a_matrix_and_its_threshold_scaled_together(loss, t, c):
    if isinstance(loss, Squared):
        assert rho(loss, c * t) == pytest.approx(c**2 * rho(loss, t))
    elif isinstance(loss, Power):
        assert rho(loss, c * t) == pytest.approx(c**loss.q * rho(loss, t))
    elif isinstance(loss, Huber):
        assert rho(Huber(c * loss.threshold), c * t) == pytest.approx(c**2 * rho(loss, t))
    else:
        assert rho(Truncated(c * loss.threshold), c * t) == pytest.approx(c * rho(loss, t))


@given(st.one_of(losses, st.floats(0.01, 9).map(lambda t: Huber(t, "median")), st.just(Truncated(3, "median"))))
def test_a_name_says_all(loss):
    assert from_name(loss.name) == loss
    assert from_name(f"  {loss.name.upper()} ") == loss


def test_known_relations():
    t2 = torch.linspace(0, 9, 50, dtype=F64)
    torch.testing.assert_close(Power(2).rho(t2), Squared().rho(t2))
    torch.testing.assert_close(Power(2).weight(t2), Squared().weight(t2))
    torch.testing.assert_close(Huber(1e6).rho(t2), Squared().rho(t2))
    torch.testing.assert_close(Truncated(1e6).rho(t2), Power(1).rho(t2))


@pytest.mark.parametrize("loss", [Power(1), Power(0.2), Truncated(5.0)])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_rows_on_the_flat_weigh_no_more_than_the_floor_lets_them(loss, dtype):
    norms2 = torch.tensor([4.0, 4.0, 0.0], dtype=dtype)
    found = loss.weight(torch.tensor([0.0, 1e-30, 0.0], dtype=dtype), norms2)
    at_floor = loss.weight(torch.tensor([FLOOR * 4.0], dtype=dtype))
    torch.testing.assert_close(found[:2], at_floor.expand(2))
    assert float(found[2]) == 0.0
    assert bool(torch.isfinite(loss.weight(torch.zeros(3, dtype=dtype))).all())


def test_negative_rounding_is_no_distance():
    for loss in (Squared(), Power(1), Huber(1.0), Truncated(1.0)):
        assert float(loss.rho(torch.tensor([-1e-9]))) == 0.0


@given(st.lists(distance, min_size=1, max_size=9), st.floats(0.1, 5))
def test_thresholds_in_medians(distances, multiple):
    dist2 = torch.tensor(distances, dtype=F64) ** 2
    median = sorted(distances)[(len(distances) - 1) // 2]
    for kind in (Huber, Truncated):
        found = kind(multiple, "median").absolute(dist2)
        assert found.unit == "absolute"
        assert found.threshold == pytest.approx(multiple * median)
        assert found.absolute(7 * dist2) == found


def test_medians_leave_out_rows_of_no_weight_and_keep_the_floor():
    dist2 = torch.tensor([1.0, 4.0, 9.0], dtype=F64)
    assert Huber(1.0, "median").absolute(dist2, weights=torch.tensor([0.0, 0.0, 2.0])).threshold == 3.0
    assert Huber(1.0, "median").absolute(0 * dist2, norms2=dist2).threshold == pytest.approx(2 * FLOOR**0.5)
    assert Truncated(1.0, "median").absolute(0 * dist2).threshold > 0
    assert float(floored(torch.zeros(1), None)) > 0


def test_stages_end_with_the_loss_and_begin_convex():
    assert Power(1).stages() == (Power(1),)
    assert Huber(2.0).stages() == (Huber(2.0),)
    assert Power(2).stages() == (Squared(),)
    for loss in (Truncated(1.0), Power(0.5), Huber(1.0, "median")):
        assert loss.stages() == (Power(1), loss)
    assert Truncated(1.0, "median").is_relative
    assert not Truncated(1.0).is_relative


def test_powers_out_of_range_are_refused():
    for q in (0, -1, 2.1, math.inf, -math.inf, math.nan, True, "1", None):
        with pytest.raises(KflatsError, match="a power of q="):
            Power(q)


@pytest.mark.parametrize("kind", [Huber, Truncated])
def test_thresholds_out_of_range_are_refused(kind):
    for threshold in (0, -1.0, 1e-200, 1e200, math.inf, math.nan, True, "1"):
        with pytest.raises(KflatsError, match="is not possible"):
            kind(threshold)


def test_unknown_units_and_names_are_refused_and_medians_need_data():
    with pytest.raises(KflatsError, match="no unit 'mean'"):
        Huber(1.0, "mean")
    for name in ("", "l7", "power", "power x", "squared 2", "huber", "huber 1 median 2"):
        with pytest.raises(KflatsError, match="no loss is called"):
            from_name(name)
    for name in (None, 1, b"power 1", ["power", "1"]):
        with pytest.raises(KflatsError, match="no loss is called"):
            from_name(name)
    with pytest.raises(KflatsError, match="no unit 'mean'"):
        from_name("truncated 1 mean")
    for loss in (Huber(1.0, "median"), Truncated(1.0, "median")):
        with pytest.raises(KflatsError, match="in medians"):
            loss.rho(torch.ones(1))
        with pytest.raises(KflatsError, match="in medians"):
            loss.weight(torch.ones(1))
