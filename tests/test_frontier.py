"""The baselines of benchmarks/frontier: their bytes are those that a file needs, and none is made worse than it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("frontier.baseline", reason="benchmarks/ is not here")

from _sentences import Evaluator
from frontier.baseline import Baseline, Coded
from frontier.baselines import Absmax, Factors, Half, Rotated, TorchAO, Transformed
from frontier.codebooks import OPQ, PQ, Residual
from frontier.sweeps import FAMILIES, OURS, sweep

from kflats.common.errors import KflatsError
from kflats.evaluation.outputs import fidelity, load_tokenizer
from kflats.importance.protocol import Weighting
from kflats.io import load_model

N, D = 700, 32

# A baseline, what it needs, and its bytes written out by hand: codes, then what lies beside them.
TABLE: dict[str, tuple[Baseline, str, int | None]] = {
    "fp16": (Half(), "torch", N * D * 2),
    "int8 rows": (Absmax(8), "torch", N * D + N * 2 + 4),
    "int4 groups": (Absmax(4, 8), "torch", N * D // 2 + N * 4 * 2 + 4),
    # 4 values of float32 and a scale a row
    "rotation": (Rotated(2), "torch", N * D // 4 + N * 2 + 4 * 4 + 4),
    "torchao int8": (TorchAO(8), "torchao", N * D + N * 2 + 4),
    "torchao int3": (TorchAO(3, 16), "torchao", N * D * 3 // 8 + N * 2 * 2 + 4),
    "pq": (PQ(8, 6), "faiss", N * 8 * 6 // 8 + 64 * D * 2 + 4),
    "opq of half": (OPQ(4, 6, 16, rounds=5), "faiss", N * 4 * 6 // 8 + 64 * 16 * 2 + 16 * D * 2 + 4),
    "rq": (Residual(3, 5), "faiss", -(-N * 3 * 5 // 8) + 3 * 32 * D * 2 + 4),
    "svd": (Factors("SVD", 6.0), "torch", 2 * 11 * (N + D)),
    # the labels of five flats take a byte a row
    "messi": (Factors("MESSI", 6.0), "torch", N + 2 * 9 * (N + 5 * D)),
    "transform": (Transformed(3.0), "constriction", None),
}


def cloud(n: int = N, d: int = D, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(d, d, generator=gen)).Q
    return torch.randn(n, d, generator=gen) * torch.logspace(0, -1, d) @ turn * 0.05


@pytest.mark.parametrize(("baseline", "package", "nbytes"), TABLE.values(), ids=TABLE.keys())
def test_what_is_stored_is_counted(baseline: Baseline, package: str, nbytes: int | None) -> None:
    pytest.importorskip(package)
    table = cloud()
    found = baseline.code(table)
    assert found.nbytes == nbytes if nbytes is not None else found.bits <= 3.0
    assert found.table.shape == (N, D)
    assert 0 < found.error(table) < 0.7
    assert torch.equal(found.table, baseline.code(table.clone()).table)
    # A power of two goes into the unit: the table may have any scale.
    torch.testing.assert_close(baseline.code(table * 2**10).table, found.table * 2**10, rtol=1e-2, atol=1.0)
    weighting = Weighting(left=torch.rand(N, generator=torch.Generator().manual_seed(1)) ** 4 + 1e-3)
    if baseline.accepts:
        assert baseline.code(table, weighting).error(table, weighting.left) < 1.1 * found.error(table, weighting.left)
    else:
        with pytest.raises(KflatsError, match="cannot use weights of rows"):
            baseline.code(table, weighting)
    with pytest.raises(KflatsError, match="NaN or infinite"):
        baseline.code(table / 0 * 0)


def test_each_row_has_its_nearest_centroid() -> None:
    pytest.importorskip("faiss")
    table = cloud()
    found = PQ(8, 4).code(table).table
    for mine, part in zip(table.split(4, dim=1), found.split(4, dim=1), strict=True):
        centroids = part.unique(dim=0)
        assert len(centroids) <= 16
        assert torch.allclose((mine - part).norm(dim=1), torch.cdist(mine, centroids).amin(1), atol=1e-6)
    assert OPQ(8, 4, rounds=10).code(table).error(table) < 0.9 * PQ(8, 4).code(table).error(table)


def test_more_bytes_lose_less() -> None:
    pytest.importorskip("faiss")
    table = cloud()
    ladders: list[list[Any]] = [
        [Rotated(bits) for bits in (1, 2, 4)],
        [PQ(m, 4) for m in (4, 8, 16)],
        [Residual(m, 4) for m in (1, 2, 4)],
        [Factors("SVD", bits) for bits in (3, 6, 9)],
        [Absmax(4), Absmax(4, 8), Absmax(8), Half()],
    ]
    for ladder in ladders:
        coded = [one.code(table) for one in ladder]
        assert [c.nbytes for c in coded] == sorted(c.nbytes for c in coded)
        errors = [c.error(table) for c in coded]
        assert errors == sorted(errors, reverse=True), [one.name for one in ladder]


def test_the_error_is_the_definition() -> None:
    table, other, weights = cloud(50, 4), cloud(50, 4, seed=1), torch.rand(50)
    lost, whole = (float((weights[:, None] * x.square()).sum()) for x in (table - other, table))
    assert Coded("x", other, 1).error(table, weights) == pytest.approx(lost / whole)


def test_a_sweep_lies_around_its_sizes() -> None:
    shape, sizes = (30522, 384), (0.7, 1.0, 2.0)
    for family, least, most in (("pq", 0.6, 1.6), ("opq", 0.5, 2.4)):
        found: list[Any] = sweep(shape, sizes, family, above=True)
        bits = [8 * one.size(shape) / (shape[0] * shape[1]) for one in found]
        for size in sizes:
            assert any(size * least <= b <= size for b in bits), (family, size)
            assert any(size < b <= size * most for b in bits), (family, size)
    for name in (*FAMILIES, *OURS):
        names = [one.name for one in sweep(shape, [0.5, 4.0, 16.0], name)]
        assert names
        assert len(set(names)) == len(names)
    assert [one.name for one in sweep((5000, 64), [3.0, 5.0, 9.0], "absmax")] == [
        "int4, a scale a row", "int8, a scale a row", "int4, a scale for 32",
    ]  # fmt: skip


def test_the_evaluator_is_the_public_function(tiny_folder: Any) -> None:
    pytest.importorskip("transformers")
    model, tokenizer = load_model(tiny_folder), load_tokenizer(tiny_folder)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(1 + 0.3 * torch.rand(300, 1))
    texts = [f"the word{i * 3 % 283} word{i} c" for i in range(40)]
    evaluator = Evaluator(model, tokenizer, [*texts, texts[0]])
    near = fidelity(model, other, tokenizer, [*texts, texts[0]])
    assert evaluator(other).fidelity.mean_cosine == pytest.approx(near.mean_cosine, abs=1e-5)
    assert evaluator(other).fidelity.p5_cosine == pytest.approx(near.p5_cosine, abs=1e-5)
    assert evaluator.original.fidelity.mean_cosine == pytest.approx(1.0, abs=1e-6)
