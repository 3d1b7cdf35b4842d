"""Transform coding: what is decoded is what the formula says, within its budget, and near the Gaussian bound."""

from __future__ import annotations

import math

import pytest
import torch
from gaussian_bound import bound_bits, bound_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import kflats
from kflats import SVD, Recipe, Transform
from kflats.codecs.streams import stored_bytes
from kflats.codecs.transform import from_codes
from kflats.common.errors import KflatsError
from kflats.importance.protocol import Weighting
from kflats.matrices.registry import Matrix
from kflats.methods.protocol import Problem
from kflats.model.swap import swap_
from kflats.model.weights import find_weight
from kflats.numerics import large_matrices
from kflats.numerics.coding import encode
from kflats.numerics.coding.classes import split_classes
from kflats.numerics.coding.packing import layout_of, pack, unpack
from kflats.numerics.coding.rounding import RoundedRows, absmax_code
from kflats.numerics.coding.tables import KNOTS, Tables, table_for
from kflats.numerics.rows import PartOfRows, TensorRows, as_rows

pytest.importorskip("constriction")


def cloud(n, d, seed=0, decay=1.0):
    """Gaussian rows with a falling spectrum in a random basis, and that spectrum."""
    gen = torch.Generator().manual_seed(seed)
    scale = torch.logspace(0, -decay, d, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(d, d, generator=gen, dtype=torch.float64)).Q
    rows = torch.randn(n, d, generator=gen, dtype=torch.float64) * scale @ turn.T
    return rows.float(), scale.square()


def size_of(code):
    """Bytes in a file."""
    return stored_bytes(from_codes(code))


def transform_code(matrix, *, bits=None, nbytes=None, **options):
    return encode.transform_code(as_rows(matrix), nbytes or int(bits * matrix.numel() / 8), size_of, **options)


def rounded(matrix, bits, group=None, dtype=torch.float32):
    columns = matrix.shape[1]
    return absmax_code(as_rows(matrix), bits, -(-columns // min(group or columns, columns)), dtype)


def dense(code):
    """The whole matrix, decoded, (n, d) float32."""
    if not isinstance(code, RoundedRows):
        return from_codes(code).dense().detach()
    columns, groups = code.levels.shape[1], code.scales.values.shape[1]
    return code.levels * code.scales.wide.float().repeat_interleave(-(-columns // groups), 1)[:, :columns]


def share(code, matrix, weights=None):
    w = torch.ones(len(matrix)) if weights is None else weights
    decoded = code.dense() if isinstance(code, Matrix) else dense(code)
    lost = (w.unsqueeze(1) * (decoded - matrix.float()).square()).sum(dtype=torch.float64)
    return float(lost / (w.unsqueeze(1) * matrix.float().square()).sum(dtype=torch.float64))


@pytest.fixture(scope="module")
def table():
    return cloud(3000, 16, decay=1.0)[0]


@pytest.fixture(scope="module")
def code(table):
    return transform_code(table, bits=2)


# Packing and distributions


@settings(max_examples=60, deadline=None)
@given(m=st.integers(0, 9), r=st.integers(0, 20), seed=st.integers(0, 10**6), spread=st.integers(0, 14))
def test_packing_is_exact_and_as_short_as_its_ranges(m, r, seed, spread):
    gen = torch.Generator().manual_seed(seed)
    widths = 2 ** torch.randint(0, spread + 1, (r,), generator=gen)
    levels = (torch.rand(m, r, generator=gen) * widths).long() + torch.randint(-9000, 9000, (r,), generator=gen)
    layout = layout_of(levels)
    packed = pack(levels, layout)
    assert torch.equal(unpack(packed, layout).long(), levels)
    ranges = (levels.amax(0) - levels.amin(0)).tolist() if m else [0] * r
    bits = [x.bit_length() for x in ranges]
    assert layout.bits.tolist() == bits
    assert packed.shape == (m, -(-sum(bits) // 8))


def test_packing_refuses_what_does_not_fit():
    layout = layout_of(torch.tensor([[0, 1], [3, 1]]))
    with pytest.raises(KflatsError, match="outside the range"):
        pack(torch.tensor([[4, 1]]), layout)
    with pytest.raises(KflatsError, match="cannot be packed"):
        layout_of(torch.tensor([[-20000], [20000]]))


def plain_frequency(costs, j):
    """The frequency of +j by the text: a line between knots in whole numbers, then 2^(24 - c / 16)."""
    right = next(i for i, knot in enumerate(KNOTS) if knot >= j)
    b, a = KNOTS[right], KNOTS[max(right - 1, 0)]
    c = costs[right] if b == j else (costs[right - 1] * (b - j) + costs[right] * (j - a)) // (b - a)
    return round(2 ** (24 - (c % 16) / 16)) >> (c // 16)


@settings(max_examples=30, deadline=None)
@given(reach=st.integers(0, 300), seed=st.integers(0, 10**6))
def test_frequencies_are_whole_symmetric_and_what_the_text_says(reach, seed):
    gen = torch.Generator().manual_seed(seed)
    costs = torch.randint(0, 255, (1, 97), generator=gen).to(torch.uint8)
    found = Tables(torch.tensor([reach], dtype=torch.int16), costs).frequencies(0)
    assert found.tolist() == [plain_frequency(costs[0].tolist(), abs(j)) for j in range(-reach, reach + 1)]
    assert int(found.min()) > 0


@pytest.mark.parametrize("sigma", [0.2, 1.0, 7.0, 400.0])
def test_a_table_costs_hardly_more_than_the_entropy(sigma):
    x = (torch.randn(200_000, generator=torch.Generator().manual_seed(0)) * sigma).round().long().abs()
    counts = torch.bincount(x).double()
    p = counts / counts.sum()
    entropy = float(-(p[p > 0] * p[p > 0].log2()).sum() + p[1:].sum())  # and a bit for each sign
    table = table_for(x)
    assert float(table.bits[0][x].mean()) <= entropy + 0.01
    assert table.stored_bytes <= 100


def test_damaged_tables_are_refused():
    short = torch.zeros(1, 3, dtype=torch.uint8)
    for reach, costs in ((5, short), (-1, short), (1, short + 255)):
        with pytest.raises(KflatsError, match="damaged"):
            Tables(torch.tensor([reach], dtype=torch.int16), costs)


# Transform coding


def test_moves_of_contexts_lead_back_to_them(code):
    contexts = code.codes[0].contexts
    assert torch.equal(encode.context_moves(contexts).cumsum(1).to(torch.uint8), contexts)


@pytest.mark.parametrize("bits", [0.4, 0.7, 1.0, 2.0, 4.0, 8.0])
def test_a_budget_is_met_from_below_to_one_percent(table, bits):
    budget = int(bits * table.numel() / 8)
    found = size_of(transform_code(table, nbytes=budget))
    assert 0.99 * budget <= found <= budget


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 3))])
def test_small_matrices_fit_although_what_lies_beside_their_symbols_is_most_of_them(seed):
    """Distributions that were made for finer steps leave no room for any symbol: others are made."""
    gen = torch.Generator().manual_seed(seed)
    small = torch.randn(64, 8, generator=gen) * torch.arange(1, 9) ** -0.7
    for nbytes in (200, 210, 220):
        assert size_of(transform_code(small, nbytes=nbytes)) <= nbytes


@pytest.mark.parametrize(("n", "d", "share"), [(2, 768, 0.11), (2, 768, 0.15), (4, 4096, 0.07)])
def test_matrices_of_few_rows_get_axes_that_leave_bytes_for_the_rows(n, d, share):
    few = torch.randn(n, d, generator=torch.Generator().manual_seed(0))
    lost = few - dense(transform_code(few, nbytes=int(4 * n * d * share)))
    assert float(lost.square().sum()) < 0.2 * float(few.square().sum())


def test_integers_of_a_matrix_of_low_rank_lose_no_more_in_more_bytes():
    """Coordinates beyond its rank are rounding, and are not scaled up."""
    gen = torch.Generator().manual_seed(0)
    low_rank = torch.randn(200, 3, generator=gen) @ torch.randn(3, 48, generator=gen)
    errors = []
    for keep in ("5%", "30%"):
        model = nn.ModuleDict({"words": nn.Embedding.from_pretrained(low_rank.clone())})
        recipe = Recipe(SVD(), codec=kflats.Integer(4))
        errors.append(kflats.compress_(model, {"words": recipe}, keep=keep, quiet=True).weights[0].error)
    assert errors[1] < 1.05 * errors[0]


@pytest.mark.parametrize("bits", [12.0, 13.0, 20.0])
def test_a_long_row_leaves_the_others_their_bytes_however_many_there_are(bits):
    rows = torch.randn(1000, 32, generator=torch.Generator().manual_seed(0))
    rows[17] *= 1000
    lost = (rows - dense(transform_code(rows, bits=bits))).square().sum(1)
    lost[17] = 0.0
    assert float(lost.sum()) < 1e-5 * 1000 * 32


@pytest.mark.parametrize(
    ("bits", "weighted", "above"),
    [(3.0, False, 0.30), pytest.param(2.0, True, 0.30, marks=pytest.mark.slow), (1.0, True, 0.22)],
)
def test_files_are_near_the_gaussian_bound(bits, weighted, above, tmp_path):
    """Bytes of a file, all counted: labels, axes, layouts, distributions, checksums, scales and the container."""
    matrix, spectrum = cloud(20_000, 64)
    draw = torch.Generator().manual_seed(1)
    weights = torch.logspace(-1, 1, len(matrix))[torch.randperm(len(matrix), generator=draw)] if weighted else None
    given = Problem(TensorRows(matrix), int(bits * matrix.numel() / 8), 4, Weighting(left=weights))
    coded = Recipe(SVD(), codec=Transform()).encode(given, torch.float32).matrix
    model = nn.Sequential(nn.Embedding.from_pretrained(matrix, freeze=False))
    swap_(model, find_weight(model, "0"), coded)
    kflats.save(model, tmp_path)
    nbytes = (tmp_path / "model.safetensors").stat().st_size
    with torch.no_grad():
        lost = share(coded, matrix, weights)
    assert 8 * nbytes / matrix.numel() <= bound_bits(spectrum, lost, weights) + above


def test_more_bytes_less_error_and_fewer_than_any_uniform_code(table):
    errors = [share(transform_code(table, bits=b), table) for b in (0.5, 1, 2, 4)]
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < 0.6 * share(rounded(table, 4), table)


def test_weights_move_the_error_to_where_it_counts_less(table):
    weights = torch.ones(3000)
    weights[:300] = 100.0
    plain, weighed = transform_code(table, bits=2), transform_code(table, bits=2, weights=weights)
    assert share(weighed, table, weights) < 0.6 * share(plain, table, weights)
    assert share(plain, table) < share(weighed, table)


def test_a_metric_of_the_columns_is_minimised():
    matrix, _ = cloud(3000, 8)
    right = torch.tensor([100.0, 1, 1, 1, 1, 1, 1, 1])
    turned = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(2))).Q
    for gram in (right, turned @ torch.diag(right) @ turned.T):
        full = torch.diag(gram) if gram.ndim == 1 else gram

        def lost(code, full=full):
            e = (dense(code) - matrix).double()
            return float((e @ full.double() * e).sum())

        assert lost(transform_code(matrix, bits=2, right=gram)) < 0.7 * lost(transform_code(matrix, bits=2))


def test_only_ratios_of_weights_and_the_unit_of_the_matrix_matter(table):
    weights = torch.linspace(0.1, 2.0, 3000)
    one = transform_code(table, bits=2, weights=weights)
    other = transform_code(table * 2.0**20, bits=2, weights=weights * 4)
    assert all(map(torch.equal, one.codes[0].levels, other.codes[0].levels))
    torch.testing.assert_close(dense(one), dense(other) / 2.0**20, atol=1e-6, rtol=1e-5)


def test_equal_input_gives_equal_codes(table, code):
    again = transform_code(table, bits=2).codes[0]
    assert all(map(torch.equal, code.codes[0].levels, again.levels))
    assert torch.equal(code.codes[0].basis, again.basis)
    blocks = transform_code(PartOfRows(TensorRows(table), torch.arange(3000)), nbytes=table.numel() // 4)
    assert all(map(torch.equal, code.codes[0].levels, blocks.codes[0].levels))


@pytest.mark.slow
def test_pieces_of_a_wide_matrix_are_coded_as_the_whole(monkeypatch):
    wide = cloud(400, 24, decay=1.0)[0].T.contiguous()
    metric = torch.linspace(0.5, 2, 400)
    whole = transform_code(wide, bits=3, right=metric)
    monkeypatch.setattr(large_matrices, "_AT_ONCE", 256)
    pieces = transform_code(wide, bits=3, right=metric)
    assert share(pieces, wide) == pytest.approx(share(whole, wide), rel=1e-3)


def test_columns_of_zeros_cost_next_to_nothing():
    gen = torch.Generator().manual_seed(0)
    sizes = torch.exp(1.2 * torch.randn(3000, 1, generator=gen))
    rows = torch.randn(3000, 6, generator=gen) * torch.linspace(1, 0.1, 6) * sizes
    alone, padded = (
        float((dense(transform_code(a, nbytes=3000)) - a).square().sum())
        for a in (rows, torch.nn.functional.pad(rows, (0, 58)))
    )
    assert padded < 1.04 * alone


# Awkward tables


@pytest.mark.parametrize(
    "matrix",
    [
        torch.zeros(50, 4),
        torch.ones(1, 8),
        torch.full((40, 5), 3.0),
        torch.cat([torch.ones(200, 1), torch.randn(200, 3, generator=torch.Generator().manual_seed(0))], 1),
        torch.cat([torch.zeros(100, 4), torch.randn(100, 4, generator=torch.Generator().manual_seed(0))]),
        torch.randn(60, 1, generator=torch.Generator().manual_seed(0)),
        torch.randn(300, 4, generator=torch.Generator().manual_seed(0)) * 1e15,
        torch.randn(300, 4, generator=torch.Generator().manual_seed(0)) * 1e-15,
        torch.randn(300, 4, generator=torch.Generator().manual_seed(0)).half(),
        torch.randn(300, 4, generator=torch.Generator().manual_seed(0)).bfloat16(),
        torch.randn(300, 4, generator=torch.Generator().manual_seed(0)).double(),
        torch.randn(3, 40, generator=torch.Generator().manual_seed(0)),
    ],
    ids=["zeros", "one_row", "constant", "constant_column", "zero_rows", "one_column", "huge", "tiny", "half"]
    + ["bfloat16", "double", "wide"],
)
def test_awkward_tables_are_coded(matrix):
    budget = 200 + 3 * matrix.numel()
    code = transform_code(matrix, nbytes=budget)
    assert size_of(code) <= budget
    unit = max(float(matrix.abs().max()), 1e-30)
    torch.testing.assert_close(dense(code) / unit, matrix.float() / unit, atol=5e-3, rtol=0)


@pytest.mark.parametrize("little", [0.0, 1e-4])
def test_rows_that_count_little_leave_their_bytes_to_the_others(table, little):
    much = torch.arange(3000) % 6 == 0
    weights = torch.randn(3000, generator=torch.Generator().manual_seed(1)).mul(2).exp()
    weights = torch.where(much, weights, little * weights)
    code = transform_code(table, bits=1, weights=weights)
    alone = transform_code(table[much], nbytes=3000 * 16 // 8 - 3000 // 8, weights=weights[much])
    left_out = torch.zeros_like(table)  # and a bit for each row says which one is
    left_out[much] = dense(alone)
    lost = (weights.unsqueeze(1) * (left_out - table).square()).sum() / (weights.unsqueeze(1) * table.square()).sum()
    assert share(code, table, weights) < 1.05 * float(lost)


def test_in_one_class_rows_that_count_little_leave_nothing(table):
    """They share the step of the others."""
    weights = torch.zeros(3000)
    weights[::600] = torch.tensor([1.0, 1.0, 2.0, 3.0, 1000.0])
    code = transform_code(table, bits=3, weights=weights, classes=1)
    assert size_of(code) > 0.99 * 3 * table.numel() / 8
    assert share(code, table, weights) < 2e-3


@pytest.mark.slow
def test_rows_of_weight_zero_and_weights_of_any_range_are_coded(table):
    weights = torch.ones(3000)
    weights[::2] = 0.0
    code = transform_code(table, bits=1, weights=weights)
    assert bool(torch.isfinite(dense(code)).all())
    assert share(code, table, weights) < share(transform_code(table, bits=1), table, weights)
    wild = transform_code(table, bits=1, weights=torch.logspace(-30, 30, 3000, dtype=torch.float64))
    assert bool(torch.isfinite(dense(wild)).all())


def test_what_cannot_be_coded_is_refused(table):
    infinite = table.clone()
    infinite[7, 0] = math.inf
    for matrix, weighting, message in (
        (infinite, Weighting(), "infinite values, first in row 7"),
        (table, Weighting(left=torch.ones(5)), "row weights"),
        (table, Weighting(left=-torch.ones(3000)), "not negative"),
        (table, Weighting(right=torch.ones(3)), "right metric"),
    ):
        with pytest.raises(KflatsError, match=message):
            Recipe(SVD(), codec=Transform()).encode(Problem(TensorRows(matrix), 9000, 4, weighting), torch.float32)
    with pytest.raises(KflatsError, match="that labels and scales alone need"):
        transform_code(table, nbytes=20)


def test_a_budget_beyond_float32_is_not_filled(table):
    code = transform_code(table[:200], bits=14)
    assert size_of(code) <= 14 * 200 * 16 / 8
    assert share(code, table[:200]) < 1e-6


def test_classes_part_rows_by_weight_and_norm():
    weights = torch.tensor([1.0] * 500 + [1e4] * 500)
    norms = torch.tensor([1.0, 30.0] * 500)
    labels = split_classes(weights, norms, 8, 16.0)
    assert int(labels.max()) == 3
    assert len({(int(c), float(w), float(s)) for c, w, s in zip(labels, weights, norms, strict=True)}) == 4
    assert int(split_classes(weights, norms, 2, 16.0).max()) == 1


# The bound


def test_the_bound_in_closed_form_and_its_inverse():
    assert bound_bits(torch.tensor([4.0, 1.0]), 0.4) == pytest.approx(0.5)  # level 1: R = (1 + 0) / 2
    assert bound_bits(torch.tensor([1.0]), 0.1, torch.tensor([4.0, 1.0])) == pytest.approx(1.5)  # 1 / 4
    spectrum, weights = torch.logspace(0, -2, 30), torch.logspace(-1, 2, 4000)
    for bits in (0.3, 1.0, 4.0):
        error = bound_error(spectrum, bits, weights)
        assert bound_bits(spectrum, error, weights) == pytest.approx(bits, abs=1e-6)


# Rounding


@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, None), (4, 5), (8, 64)])
def test_absmax_is_within_half_a_step_and_exact_at_the_largest(bits, group):
    for dtype in (torch.float32, torch.float16, torch.float64):
        matrix = cloud(40, 16)[0].to(dtype) * 1000
        matrix[3] = 0
        code = rounded(matrix, bits, group, torch.float16)
        groups = -(-16 // min(group or 16, 16))
        step = code.scales.wide.float().repeat_interleave(-(-16 // groups), 1)[:, :16]
        assert bool(((dense(code) - matrix.float()).abs() <= step / 2 * 1.001).all())
        assert code.scales.values.shape == (40, groups)
        assert bool((dense(code)[3] == 0).all())
        assert int(code.levels.abs().max()) == 2 ** (bits - 1) - 1


def test_scales_of_any_magnitude_are_kept():
    for magnitude in (1e-15, 1e15):
        matrix = cloud(40, 16)[0] * magnitude
        code = rounded(matrix, 8, dtype=torch.float16)
        torch.testing.assert_close(dense(code) / magnitude, matrix / magnitude, atol=0.02, rtol=0)


@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 8)])
def test_a_long_row_leaves_the_others_as_they_are(bits, group):
    """float16 holds scales up to 2^28 times the least, float32 those of any rows."""
    for factor, dtype in ((1e3, torch.float16), (1e7, torch.float16), (1e9, torch.float32), (1e15, torch.float32)):
        matrix = cloud(40, 16)[0]
        alone, beside = rounded(matrix[1:], bits, group, dtype), matrix.clone()
        beside[0] *= factor
        found = rounded(beside, bits, group, dtype)
        assert found.scales.values.dtype == dtype
        lost = float((dense(found) - beside)[1:].square().sum() / matrix[1:].square().sum())
        assert lost <= 1.02 * share(alone, matrix[1:])
