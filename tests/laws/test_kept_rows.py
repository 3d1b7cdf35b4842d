"""Embeddings of codes keep rows that were read: every lookup gives what the matrix gives at that moment."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from kflats.matrices import kept_rows
from kflats.matrices.coded import CodedMatrix, from_integers
from kflats.matrices.kept_rows import KeptRows, no_kept_rows
from kflats.matrices.layers import FactoredEmbedding

N, D = 3000, 96
ROOM = 50
"""Rows that fit into the store of these tests."""


def coded(seed: int = 0) -> CodedMatrix:
    draws = torch.Generator().manual_seed(seed)
    integers = [torch.randint(-5, 6, (N // 2, D), generator=draws).to(torch.int16) for _ in range(2)]
    labels = torch.arange(N) % 2
    return from_integers(integers, labels, torch.rand(2, generator=draws) + 0.5)


@pytest.fixture
def embedding(monkeypatch: pytest.MonkeyPatch) -> FactoredEmbedding:
    monkeypatch.setattr(kept_rows, "KEPT", ROOM * D)
    return FactoredEmbedding(coded())


def given(count: int, seed: int, below: int = N) -> Tensor:
    return torch.randint(below, (count,), generator=torch.Generator().manual_seed(seed))


def used(layer: FactoredEmbedding) -> int:
    return 0 if layer._kept is None else layer._kept[2]._used


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_lookups_give_the_rows_of_the_matrix(mode: Any, embedding: FactoredEmbedding) -> None:
    """Through many fills of the store: few rows, many, repeated ones, none, and more than there is room for."""
    counts = [0, 1, 3, 20, 45, 200, 7, 49, 50, 51, 2]
    filled = set[int]()
    for seed in range(40):
        index = given(counts[seed % len(counts)], seed, below=[N, 30][seed % 2]).view(1, -1)
        with mode():
            torch.testing.assert_close(embedding(index), embedding.matrix.rows(index), rtol=1e-6, atol=1e-6)
        filled.add(used(embedding))
    assert max(filled) > 30
    assert max(filled) <= ROOM
    with torch.enable_grad():
        assert embedding(given(5, 1)).requires_grad


def test_kept_rows_are_not_put_together_again(embedding: FactoredEmbedding, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    rows = CodedMatrix.rows

    def counted(matrix: CodedMatrix, index: Tensor, **settings: Any) -> Tensor:
        asked.append(len(index))
        return rows(matrix, index, **settings)

    monkeypatch.setattr(CodedMatrix, "rows", counted)
    with torch.no_grad():
        for index in ([4, 4, 9], [9, 4], [9, 7, 7, 8], [4]):
            embedding(torch.tensor(index))
        assert asked == [3, 3]
        embedding(torch.arange(100, 200))  # no room, and no row of it is computed twice
        assert asked == [3, 3, 100]
        embedding(torch.tensor([4, 7]))
        assert asked == [3, 3, 100]
        embedding(torch.cat([torch.arange(200, 220)] * 2))  # of many ids each row once
        assert asked == [3, 3, 100, 20]
        embedding.run_form = "compact"
        embedding(torch.tensor([4]))
        assert asked == [3, 3, 100, 20, 1]


def changed_scales(layer: FactoredEmbedding) -> None:
    with torch.no_grad():
        layer.matrix.weight.mul_(2)


def a_step(layer: FactoredEmbedding) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    layer(given(5, 3)).square().sum().backward()
    optimizer.step()


def loaded(layer: FactoredEmbedding) -> None:
    layer.load_state_dict(FactoredEmbedding(coded(1)).state_dict())


def assigned(layer: FactoredEmbedding) -> None:
    layer.load_state_dict(FactoredEmbedding(coded(1)).state_dict(), assign=True)


def in_double(layer: FactoredEmbedding) -> None:
    layer.double()


def other_codes(layer: FactoredEmbedding) -> None:
    with torch.no_grad():
        layer.get_buffer("codes").copy_(coded(1).get_buffer("codes"))


@pytest.mark.parametrize("change", [changed_scales, a_step, loaded, assigned, in_double, other_codes])
def test_rows_of_a_changed_matrix_are_new(change: Any, embedding: FactoredEmbedding) -> None:
    index = given(20, 0)
    with torch.no_grad():
        before = embedding(index)
    change(embedding)
    with torch.no_grad():
        after = embedding(index)
        torch.testing.assert_close(after, embedding.matrix.rows(index), rtol=1e-6, atol=1e-6)
    assert after.dtype == embedding.matrix.weight.dtype
    assert change is in_double or not torch.allclose(before, after)


def test_other_tensors_for_one_call(embedding: FactoredEmbedding) -> None:
    index, weight = given(20, 0), 3 * embedding.matrix.weight.detach()
    with torch.no_grad():
        before = embedding(index)
        torch.testing.assert_close(torch.func.functional_call(embedding, {"weight": weight}, (index,)), 3 * before)
        torch.testing.assert_close(embedding(index), before)


def test_tensors_that_take_the_place_of_others(embedding: FactoredEmbedding) -> None:
    """Each of them is gone after its call, and the next one may have its address."""
    index, weight = given(20, 0), embedding.matrix.weight.detach()
    with torch.no_grad():
        before = embedding(index)
        for k in range(1, 101):
            found = torch.func.functional_call(embedding, {"weight": k * weight}, (index,))
            torch.testing.assert_close(found, k * before)


def test_modes_and_transforms_that_see_no_values(embedding: FactoredEmbedding) -> None:
    index = given(15, 0).view(3, 5)
    with torch.no_grad():
        expected = embedding(index)
        assert used(embedding) > 0
        torch.testing.assert_close(torch.vmap(embedding)(index), expected)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert embedding(index).shape == (3, 5, D)
        counts = []
        for _ in range(2):
            with FlopCounterMode(display=False) as counter:
                embedding(index)
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1]
        embedding._kept = None
        with torch.device("meta"):
            torch.testing.assert_close(embedding(index), expected)
        with no_kept_rows():
            embedding._kept = None
            torch.testing.assert_close(embedding(index), expected)
            assert used(embedding) == 0


def test_copies_keep_nothing(embedding: FactoredEmbedding) -> None:
    with torch.no_grad():
        before = embedding(given(20, 0))
    for twin in (copy.deepcopy(embedding), pickle.loads(pickle.dumps(embedding))):  # noqa: S301
        assert twin._kept is None
        with torch.no_grad():
            assert torch.equal(twin(given(20, 0)), before)


@pytest.mark.parametrize("index", [[0, N], [-1]])
def test_places_outside_of_the_table(index: list[int], embedding: FactoredEmbedding) -> None:
    with torch.no_grad(), pytest.raises(IndexError):
        embedding(torch.tensor(index))


def test_threads_share_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_rows, "KEPT", ROOM * D)
    table = torch.randn(N, D)
    kept = KeptRows(N, D, torch.float32)

    def look_up(seed: int) -> bool:
        index = given(1 + seed % 30, seed, below=120)
        found = kept.look_up(index, table.__getitem__)
        return found is None or torch.equal(found, table[index])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(look_up, range(2000)))
