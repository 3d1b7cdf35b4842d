"""The interpolative form is the same matrix, with r^2 numbers less and a block that is bounded."""

from __future__ import annotations

import pytest
import scipy.linalg.interpolative
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kflats.matrices.layers import FactoredLinear
from kflats.matrices.registry import InterpolativeMatrix, order_dtype
from kflats.numerics.interpolative import interpolate

F64 = torch.float64


def pair(n, r, d, seed=0, spread=0.0):
    gen = torch.Generator().manual_seed(seed)
    u, v = (torch.randn(*shape, generator=gen, dtype=F64) for shape in ((n, r), (r, d)))
    return u * torch.logspace(0, -spread, r, dtype=F64), v * torch.logspace(-spread, 0, d, dtype=F64)


def product(found):
    out = torch.empty(len(found.skeleton), len(found.order), dtype=found.skeleton.dtype)
    out[:, found.order] = torch.cat([found.skeleton, found.skeleton @ found.mixing], dim=1)
    return out


def largest(found):
    """The largest entry of T."""
    return float(found.mixing.abs().max()) if found.mixing.numel() else 0.0


@settings(max_examples=80, deadline=None)
@given(n=st.integers(1, 20), d=st.integers(1, 30), seed=st.integers(0, 10**6), data=st.data())
def test_it_is_the_same_matrix_with_a_bounded_block(n, d, seed, data):
    r = data.draw(st.integers(1, d))
    u, v = pair(n, r, d, seed, data.draw(st.sampled_from([0.0, 3.0])))
    found = interpolate(u, v)
    torch.testing.assert_close(product(found), u @ v, atol=1e-10, rtol=1e-10)
    assert found.skeleton.numel() + found.mixing.numel() == r * (n + d - r)
    assert sorted(found.order.tolist()) == list(range(d))
    assert largest(found) <= 1.011
    torch.testing.assert_close(found.skeleton, (u @ v)[:, found.order[:r]], atol=1e-10, rtol=1e-10)


def test_exchanges_pay_where_pivoting_alone_lets_the_block_grow(monkeypatch):
    # The matrix for which elimination with partial pivoting doubles at every step.
    r = 12
    growing = torch.eye(r, dtype=F64) - torch.tril(torch.ones(r, r, dtype=F64), -1)
    basis = torch.cat([growing, torch.ones(1, r, dtype=F64)]).T
    bounded = interpolate(torch.eye(r, dtype=F64), basis)
    assert largest(bounded) <= 1.011
    monkeypatch.setattr("kflats.numerics.interpolative.GROWTH", 1e9)
    assert largest(interpolate(torch.eye(r, dtype=F64), basis)) > 100
    torch.testing.assert_close(product(bounded), basis)


def test_it_rounds_no_worse_than_scipy_s():
    u, v = pair(60, 15, 40, 3)
    found = interpolate(u.float(), v.float())
    _, mixing = scipy.linalg.interpolative.interp_decomp((u @ v).numpy(), 15, rand=False)
    assert largest(found) <= abs(mixing).max() * 1.01
    scale = float((u @ v).norm())
    assert float((product(found).double() - u.float().double() @ v.float().double()).norm()) < 1e-6 * scale


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_type_is_converted_in_float64_and_given_back(dtype):
    u, v = (t.to(dtype) for t in pair(30, 6, 20))
    found = interpolate(u, v)
    assert found.skeleton.dtype == found.mixing.dtype == dtype
    exact = u.to(F64) @ v.to(F64)
    assert float((product(found).to(F64) - exact).norm()) < 8 * torch.finfo(dtype).eps * float(exact.norm())


def test_a_basis_of_lower_rank_is_no_trouble():
    u, v = pair(20, 6, 15)
    v[3:] = v[:3]  # rank 3 of 6
    found = interpolate(u, v)
    torch.testing.assert_close(product(found), u @ v)
    assert largest(found) <= 1.011
    nothing = interpolate(u, v * 0)
    assert not product(nothing).any()
    assert torch.isfinite(nothing.mixing).all()


def test_full_rank():
    u, v = pair(8, 5, 5)
    all_of_it = interpolate(u, v)
    assert all_of_it.mixing.shape == (5, 0)
    torch.testing.assert_close(product(all_of_it), u @ v)


@pytest.mark.parametrize("rows", ["in_features", "out_features"])
def test_a_linear_layer_computes_what_the_factors_did(rows):
    u, v = pair(12, 4, 9)
    found = interpolate(u, v)
    matrix = InterpolativeMatrix(found.skeleton, found.mixing, found.order.to(order_dtype(9)))
    layer = FactoredLinear(matrix, matrix_rows=rows)
    dense = u @ v if rows == "in_features" else (u @ v).T
    x = torch.randn(5, dense.shape[0], dtype=F64)
    torch.testing.assert_close(layer(x), x @ dense)
    assert matrix.condition == pytest.approx(largest(found))
