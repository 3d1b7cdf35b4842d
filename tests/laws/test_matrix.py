"""Every Matrix is the dense matrix its text defines: values, gradients, files, sizes, refusals."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.matrices.registry import (
    FlatsMatrix,
    InterpolativeMatrix,
    LowRankMatrix,
    Matrix,
    RankGroup,
    label_dtype,
    matrix_from_spec,
    weight_shape,
)

F64 = torch.float64


def calls(matrix: Matrix, seed: int = 0) -> dict[str, tuple[Any, Any, Tensor]]:
    """Each operation: its result from the matrix, from a dense M, and its input."""
    gen = torch.Generator().manual_seed(seed)
    n, d = matrix.shape
    ids = torch.randint(0, n, (3, 5), generator=gen)
    x, h = torch.randn(2, 3, n, generator=gen, dtype=F64), torch.randn(2, 3, d, generator=gen, dtype=F64)
    return {
        "rows": (matrix.rows, lambda dense, i: dense[i], ids),
        "vecmat": (matrix.vecmat, lambda dense, v: v @ dense, x),
        "matvec": (matrix.matvec, lambda dense, v: v @ dense.T, h),
    }


def gradients(matrix: Matrix, out: Tensor, *inputs: Tensor) -> list[Tensor]:
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=out.dtype)
    wanted = [*matrix.parameters(), *inputs]
    if not out.requires_grad:
        return [torch.zeros_like(t) for t in wanted]
    found = torch.autograd.grad((out * probe).sum(), wanted, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def test_dense_is_the_definition(make, define):
    matrix = make()
    torch.testing.assert_close(matrix.dense(), define(matrix))
    assert matrix.shape == tuple(matrix.dense().shape)


def test_memory_is_all_that_is_held(make):
    matrix = make()
    held = [*matrix.named_parameters(), *matrix.named_buffers()]
    assert matrix.memory_bytes == sum(t.numel() * t.element_size() for _, t in held) >= matrix.nbytes


def test_operations_and_their_gradients_are_those_of_the_dense_matrix(make, define):
    for name in ("rows", "vecmat", "matvec"):
        matrix = make()
        fast, slow, given_input = calls(matrix)[name]
        inputs = [given_input.requires_grad_()] if given_input.is_floating_point() else []
        ours, theirs = fast(given_input), slow(define(matrix), given_input)
        torch.testing.assert_close(ours, theirs)
        for a, b in zip(gradients(matrix, ours, *inputs), gradients(matrix, theirs, *inputs), strict=True):
            torch.testing.assert_close(a, b)


def test_rows_without_gradient_are_the_same(make):
    matrix = make()
    ids = calls(matrix)["rows"][2]
    with torch.no_grad():
        quiet = matrix.rows(ids)
    with torch.inference_mode():
        assert torch.equal(matrix.rows(ids), quiet)
    assert torch.equal(matrix.rows(ids), quiet)


def test_rows_take_indices_of_any_shape(make, define):
    for dtype in (torch.int64, torch.int32):
        for shape in ((), (0,), (2, 0, 3), (1,), (7,), (2, 3, 4)):
            matrix = make()
            ids = torch.randint(0, matrix.shape[0], shape).to(dtype)
            out = matrix.rows(ids)
            assert out.shape == (*shape, matrix.shape[1])
            torch.testing.assert_close(out, define(matrix)[ids.to(torch.int64)])
            if ids.numel() == 0:  # as nn.Embedding: connected, with a gradient of zeros
                out.sum().backward()
                assert matrix.weight.grad is not None
                assert not matrix.weight.grad.any()


def test_an_index_outside_is_an_error(make):
    matrix = make()
    if isinstance(matrix, LowRankMatrix | InterpolativeMatrix) and matrix.weight.shape[1] == 0:
        pytest.skip("torch checks no index into a table without columns")
    for bad in (-1, -40, 10**6):
        with pytest.raises(IndexError):
            matrix.rows(torch.tensor([0, bad]))


def test_gradient_reaches_only_coordinates_in_use(make):
    """The zeros of the paper's n x kj matrix stay zero: only rows and flats that were looked up move."""
    matrix = make()
    ids = torch.tensor([0, matrix.shape[0] // 2, 0])
    marked = copy.deepcopy(matrix)
    with torch.no_grad():
        marked.weight.zero_()
    touched = torch.zeros(matrix.shape[0], dtype=torch.bool)
    touched[ids] = True
    matrix.rows(ids).sum().backward()
    # Moving along the gradient changes exactly the rows that were looked up.
    with torch.no_grad():
        marked.weight.copy_(matrix.weight.grad != 0)
        other = marked.dense()[~touched]
        assert not other.any()
    if isinstance(matrix, FlatsMatrix):
        used = {matrix.bands[label].flat for label in matrix.labels[ids].tolist()}
        for flat, part in enumerate(matrix.basis.grad.split(list(matrix.flat_ranks)) if matrix.flat_ranks else ()):
            assert flat in used or not part.any()


def test_second_derivatives(table):
    matrix = table["nested_with_exact"](n=12)
    ids = torch.tensor([0, 3, 3, 11, 7])

    def look_up(weight: Tensor, basis: Tensor) -> Tensor:
        return torch.func.functional_call(matrix, {"weight": weight, "basis": basis}, (ids,)).tanh()

    matrix.forward = matrix.rows
    inputs = tuple(p.detach().clone().requires_grad_() for p in (matrix.weight, matrix.basis))
    assert torch.autograd.gradcheck(look_up, inputs)
    assert torch.autograd.gradgradcheck(look_up, inputs)


def test_a_matrix_survives_its_description(make):
    matrix = make()
    spec = json.loads(json.dumps(matrix.spec()))
    empty = matrix_from_spec(spec, dtype=F64)
    assert all(t.is_meta for t in empty.tensors().values())
    for device in ("meta", "cpu"):
        copy_ = matrix_from_spec(spec, dtype=F64, device=device)
        assert type(copy_) is type(matrix)
        assert copy_.spec() == matrix.spec()
        assert {k: (v.shape, v.dtype) for k, v in copy_.tensors().items()} == {
            k: (v.shape, v.dtype) for k, v in matrix.tensors().items()
        }
        if device == "cpu":
            copy_.load_state_dict(matrix.state_dict())
            assert torch.equal(copy_.dense(), matrix.dense())


def test_an_empty_matrix_says_so_until_it_is_filled(table):
    matrix = table["ragged"]()
    empty = matrix_from_spec(matrix.spec(), dtype=F64, device="cpu")
    with pytest.raises(KflatsError, match="before its tensors are filled"):
        empty.rows(torch.tensor([0]))
    for name, value in matrix.tensors().items():
        empty.tensors()[name].data.copy_(value.data)
    empty.refresh()
    assert torch.equal(empty.dense(), matrix.dense())


def test_sizes_are_what_a_file_stores(make):
    matrix = make()
    assert matrix.num_values == sum(p.numel() for p in matrix.parameters())
    assert matrix.nbytes == sum(t.numel() * t.element_size() for t in matrix.state_dict().values())
    assert set(matrix.state_dict()) == set(matrix.tensors())


def test_resized_keeps_rows_and_appends_the_mean_of_a_band(make):
    for change in (-25, -1, 0, 1, 30):
        matrix = make()
        n = matrix.shape[0] + change
        if n < 1:
            with pytest.raises(KflatsError, match="cannot be resized"):
                matrix.resized(n)
            continue
        before = {name: value.clone() for name, value in matrix.tensors().items()}
        found = matrix.resized(n)
        kept = min(n, matrix.shape[0])
        assert found.shape == (n, matrix.shape[1])
        # A product of fewer rows may sum in another order.
        torch.testing.assert_close(found.dense()[:kept], matrix.dense()[:kept])
        if change > 0:
            rows = matrix.dense()
            if isinstance(matrix, FlatsMatrix):
                largest = max(range(len(matrix.bands)), key=lambda c: matrix.bands[c].rows)
                rows = rows[matrix.labels.to(torch.int64) == largest]
            new = found.dense()[kept:]
            torch.testing.assert_close(new, rows.mean(0).expand_as(new), rtol=1e-6, atol=1e-6)
        assert all(torch.equal(value, before[name]) for name, value in matrix.tensors().items())
        with torch.no_grad():  # independent of its source
            for factor in found.parameters():
                factor.add_(1)
        assert all(torch.equal(value, before[name]) for name, value in matrix.tensors().items())
        assert matrix_from_spec(found.spec(), dtype=F64).spec() == found.spec()


def test_resized_keeps_frozen_factors_frozen_and_types(table):
    matrix = table["nested"](dtype=torch.bfloat16)
    matrix.basis.requires_grad_(False)
    found = matrix.resized(50)
    assert found.weight.requires_grad
    assert not found.basis.requires_grad
    assert found.weight.dtype == torch.bfloat16
    assert found.labels.dtype == torch.uint8
    for bad in (0, -3, True, 2.0):
        with pytest.raises(KflatsError, match="cannot be resized"):
            matrix.resized(bad)


def test_coordinates_resized_behind_its_back_are_refused(table):
    matrix = table["uniform"]()
    matrix.weight.data = matrix.weight.data[:-1]
    with pytest.raises(KflatsError, match="resized without their labels"):
        matrix.rows(torch.tensor([0]))
    low = table["low_rank"]()
    low.weight.data = low.weight.data[:-1]  # one flat has no labels to contradict
    assert low.shape[0] == low.spec()["shape"][0] == 39


# Refusals ---------------------------------------------------------------------------------------


def test_labels_that_contradict_the_bands_are_refused(table):
    matrix = table["ragged"]()
    for damage in (0, 200):
        state = {name: value.clone() for name, value in matrix.state_dict().items()}
        state["labels"][:] = damage
        with pytest.raises(KflatsError, match="labels do not match"):
            copy.deepcopy(matrix).load_state_dict(state)
    with pytest.raises(KflatsError, match="labels do not match"):
        FlatsMatrix(torch.ones(2, 1), torch.ones(1, 3), torch.tensor([0, -1]), [RankGroup(2, 1, 0)], [1])


def test_tensors_that_do_not_fit_are_refused():
    labels = torch.zeros(4, dtype=torch.uint8)
    band = [RankGroup(4, 2, 0)]
    for weight, basis, found in [
        (torch.ones(4, 1), torch.ones(2, 3), labels),
        (torch.ones(8), torch.ones(2, 3), labels),
        (torch.ones(4, 2), torch.ones(3, 3), labels),
        (torch.ones(4, 2), torch.ones(6), labels),
        (torch.ones(4, 2), torch.ones(2, 3), labels[None]),
        (torch.ones(4, 2), torch.ones(2, 3), labels.to(torch.float32)),
    ]:
        with pytest.raises(KflatsError):
            FlatsMatrix(weight, basis, found, band, [2])
    for weight, basis in [(torch.ones(4, 2), torch.ones(3, 3)), (torch.ones(4), torch.ones(3, 3))]:
        with pytest.raises(KflatsError, match="cannot be multiplied"):
            LowRankMatrix(weight, basis)
    with pytest.raises(KflatsError, match="exceeds"):
        LowRankMatrix(torch.ones(4, 9), torch.ones(9, 3))
    with pytest.raises(KflatsError, match="fewer flats"):
        label_dtype(65537)


def test_interpolative_tensors_that_do_not_fit_are_refused(table):
    matrix = table["interpolative"]()
    parts = (matrix.weight.detach(), matrix.basis.detach(), matrix.order)
    for place, other, message in [
        (0, torch.ones(40, 3, dtype=F64), "cannot be multiplied"),
        (0, torch.ones(40, dtype=F64), "cannot be multiplied"),
        (2, matrix.order.long(), "does not fit 6 columns"),
        (2, matrix.order[1:], "does not fit 6 columns"),
        (2, matrix.order * 0, "no permutation"),
        (2, matrix.order + 1, "no permutation"),
        (2, matrix.order - 1, "no permutation"),
    ]:
        with pytest.raises(KflatsError, match=message):
            InterpolativeMatrix(*(other if i == place else part for i, part in enumerate(parts)))
    state = {name: value.clone() for name, value in matrix.state_dict().items()}
    state["order"][0] = state["order"][1]
    with pytest.raises(KflatsError, match="no permutation"):
        copy.deepcopy(matrix).load_state_dict(state)
    for damage in ({"rank": 7}, {"rank": -1}, {"rank": True}, {"shape": [40, 1]}, {"order": []}, {"shape": [0, 6]}):
        with pytest.raises(KflatsError):
            matrix_from_spec({**matrix.spec(), **damage}, dtype=F64)


def test_many_columns_are_numbered_in_wider_integers():
    d = 2**15 + 1
    matrix = InterpolativeMatrix(torch.ones(2, 1), torch.ones(1, d - 1), torch.arange(d, dtype=torch.int32))
    assert matrix.nbytes == 4 * (2 + d - 1) + 4 * d
    with pytest.raises(KflatsError, match=r"int16 .* does not fit 32769 columns"):
        InterpolativeMatrix(torch.ones(2, 1), torch.ones(1, d - 1), torch.zeros(d, dtype=torch.int16))


GOOD = {"kind": "flats", "shape": [6, 4], "bands": [[2, 4, None], [3, 2, 0], [1, 1, 0]], "flat_ranks": [2]}
HUGE = 10**30


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "newer"},
        {"kind": None},
        {"kind": ["flats"]},
        {"extra": 1},
        {"shape": [6]},
        {"shape": [6, 4, 1]},
        {"shape": "64"},
        {"shape": [0, 4]},
        {"shape": [-6, 4]},
        {"shape": [6.0, 4]},
        {"shape": [True, 4]},
        {"shape": [HUGE, 4]},
        {"shape": [2**31 - 1, 2**31 - 1]},
        {"shape": None},
        {"bands": []},
        {"bands": {}},
        {"bands": 3},
        {"bands": [[2, 4, None], [3, 2, 0]]},
        {"bands": [[2, 4, None], [3, 2, 0], [1, 1]]},
        {"bands": [[2, 4, None], [3, 2, 0], [1, 3, 0]]},
        {"bands": [[2, 4, None], [3, 2, 0], [1, 1, 1]]},
        {"bands": [[2, 4, None], [3, 2, 0], [1, 1, -1]]},
        {"bands": [[2, 4, None], [3, 2, 0], [1, 1, False]]},
        {"bands": [[2, 3, None], [3, 2, 0], [1, 1, 0]]},
        {"bands": [[7, 4, None], [-1, 2, 0]]},
        {"bands": [[6, 2, 0]] + [[0, 1, 0]] * 70000},
        {"flat_ranks": [5]},
        {"flat_ranks": [HUGE]},
        {"flat_ranks": [-1]},
        {"flat_ranks": ["2"]},
        {"flat_ranks": [2] * 70000},
        {"flat_ranks": None},
    ],
    ids=lambda change: json.dumps(change)[:40],
)
def test_damaged_descriptions_are_refused(change):
    assert matrix_from_spec(GOOD, dtype=F64).shape == (6, 4)
    with pytest.raises(KflatsError):
        matrix_from_spec({**GOOD, **change}, dtype=F64, device="cpu")
    for missing in ("kind", "shape", "bands", "flat_ranks"):
        with pytest.raises(KflatsError):
            matrix_from_spec({k: v for k, v in GOOD.items() if k != missing}, dtype=F64)


@pytest.mark.parametrize("spec", [None, [], "flats", 3, {}])
def test_something_else_than_a_description_is_refused(spec):
    with pytest.raises(KflatsError):
        matrix_from_spec(spec, dtype=F64)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
PATHS: list[tuple[Any, ...]] = [("kind",), ("shape",), ("shape", 0), ("shape", 1), ("bands",), ("flat_ranks",)]
PATHS += [("flat_ranks", 0), ("bands", 1), ("bands", 1, 0), ("bands", 1, 1), ("bands", 1, 2)]


@given(path=st.sampled_from(PATHS), junk=JUNK)
@settings(max_examples=300, deadline=None)
def test_any_damage_is_refused_or_describes_a_matrix(path, junk):
    spec = copy.deepcopy(GOOD)
    place: Any = spec
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = junk
    try:
        found = matrix_from_spec(spec, dtype=F64)
    except KflatsError:
        return
    assert found.spec() == spec
    assert found.weight.is_meta


# Any geometry at all ------------------------------------------------------------------------------


@st.composite
def geometries(draw: st.DrawFn) -> FlatsMatrix:
    d = draw(st.integers(1, 5))
    ranks = draw(st.lists(st.integers(0, d), max_size=4))
    kinds = [(d, None)] + [(rank, flat) for flat, most in enumerate(ranks) for rank in range(most + 1)]
    bands = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5))
    labels = draw(st.lists(st.integers(0, len(bands) - 1), min_size=1, max_size=12))
    sizes = [labels.count(c) for c in range(len(bands))]
    made = [RankGroup(rows, rank, flat) for rows, (rank, flat) in zip(sizes, bands, strict=True)]
    gen = torch.Generator().manual_seed(draw(st.integers(0, 100)))
    weight = torch.randn(weight_shape(made), generator=gen, dtype=F64)
    basis = torch.randn(sum(ranks), d, generator=gen, dtype=F64)
    return FlatsMatrix(weight, basis, torch.tensor(labels, dtype=torch.uint8), made, ranks)


@given(matrix=geometries(), picks=st.lists(st.integers(0, 11), max_size=9))
@settings(max_examples=150, deadline=None)
def test_laws_hold_for_any_geometry(define, matrix, picks):
    n, d = matrix.shape
    ids = torch.tensor([p % n for p in picks], dtype=torch.int64)
    gen = torch.Generator().manual_seed(1)
    x, h = torch.randn(3, n, generator=gen, dtype=F64), torch.randn(2, d, generator=gen, dtype=F64)
    pairs = [
        (matrix.rows(ids), define(matrix)[ids]),
        (matrix.vecmat(x), x @ define(matrix)),
        (matrix.matvec(h), h @ define(matrix).T),
        (matrix.dense(), define(matrix)),
        (matrix.resized(n + 3).dense()[:n], define(matrix)),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in pairs[:4]:
        for a, b in zip(gradients(matrix, ours), gradients(matrix, theirs), strict=True):
            torch.testing.assert_close(a, b)
    copied = matrix_from_spec(json.loads(json.dumps(matrix.spec())), dtype=F64, device="cpu")
    copied.load_state_dict(matrix.state_dict())
    assert torch.equal(copied.dense(), matrix.dense())


def test_smaller_types_round_as_the_product_does(make, define):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        matrix = make(dtype=dtype)
        exact = define(make(dtype=dtype).to(F64))
        tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 32 * torch.finfo(dtype).eps}
        ids = torch.arange(matrix.shape[0])
        rows = matrix.rows(ids)
        assert rows.dtype == dtype
        torch.testing.assert_close(rows.to(F64), exact, **tolerance)
        torch.testing.assert_close(matrix.dense().to(F64), exact, **tolerance)


def test_long_batches_compute_equal_ids_once_and_give_the_same(make, define):
    """Beyond a few hundred ids the eager path looks up distinct ones only: values and gradients stay."""
    matrix = make()
    ids = torch.randint(0, matrix.shape[0], (40, 20), generator=torch.Generator().manual_seed(2))
    ours, theirs = matrix.rows(ids), define(matrix)[ids]
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(gradients(matrix, ours), gradients(matrix, theirs), strict=True):
        torch.testing.assert_close(a, b)
