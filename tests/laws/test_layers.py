"""Layers that eat a Matrix behave as the torch layers they replace: keys, ties, types, padding, scale."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.matrices.layers import FactoredEmbedding, FactoredHead, FactoredLinear
from kflats.matrices.registry import FlatsMatrix, LowRankMatrix, Matrix

F64 = torch.float64


class TiedNet(nn.Module):
    """An embedding, something between, and a head that borrows the embedding's matrix."""

    def __init__(self, matrix: Matrix, padding_idx: int | None = None) -> None:
        super().__init__()
        n, d = matrix.shape
        self.emb = FactoredEmbedding(matrix, padding_idx=padding_idx)
        self.mid = nn.Linear(d, d, dtype=matrix.weight.dtype)
        self.head = FactoredHead(matrix, nn.Parameter(torch.zeros(n, dtype=matrix.weight.dtype)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mid(self.emb(ids))))


def some_ids(matrix: Matrix) -> Tensor:
    return torch.randint(0, matrix.shape[0], (3, 7), generator=torch.Generator().manual_seed(3))


def test_state_dict_has_the_factors_under_the_layer_once(make):
    matrix = make()
    names = {f"emb.{name}" for name in matrix.tensors()}
    rest = {"mid.weight", "mid.bias", "head.bias"}
    net = TiedNet(matrix)
    assert set(net.state_dict()) == names | rest
    assert {name for name, _ in net.named_parameters()} == (names - {"emb.labels", "emb.order"}) | rest
    linear = FactoredLinear(make(), torch.zeros(matrix.shape[1], dtype=F64))
    assert set(linear.state_dict()) == {*matrix.tensors(), "bias"}
    assert set(FactoredLinear(make()).state_dict()) == set(matrix.tensors())
    assert set(linear.matrix.tensors()) == set(matrix.tensors())  # the bias is not part of the matrix


def assert_one_matrix(net: TiedNet) -> None:
    assert net.emb.matrix is net.head.matrix
    assert net.emb.weight is net.emb.matrix.weight
    assert net.emb.weight is dict(net.named_parameters())["emb.weight"]
    if isinstance(net.emb.matrix, FlatsMatrix):
        assert dict(net.named_buffers())["emb.labels"] is net.emb.matrix.labels
        assert dict(net.named_buffers())["emb.position"] is net.emb.matrix.position


def test_copies_keep_their_own_tie(make):
    net = TiedNet(make())
    ids = some_ids(net.emb.matrix)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(net), torch.load(buffer, weights_only=False)):
        assert_one_matrix(other)
        assert other.emb.weight is not net.emb.weight
        assert torch.equal(other(ids), net(ids))
        with torch.no_grad():
            for factor in other.emb.matrix.parameters():
                factor.zero_()
        assert not other.emb(ids).any()
        assert net.emb.matrix.weight.numel() == 0 or net.emb.weight.any()


def test_types_change_for_factors_only_and_keep_the_tie(make):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        net = TiedNet(make()).to(dtype)
        assert_one_matrix(net)
        matrix = net.emb.matrix
        assert {factor.dtype for factor in matrix.parameters()} == {net.emb(some_ids(matrix)).dtype} == {dtype}
        if isinstance(matrix, FlatsMatrix):
            assert matrix.labels.dtype in (torch.uint8, torch.uint16)
            assert matrix.position.dtype == torch.int32
        assert_one_matrix(net.half().float().bfloat16().double())


def test_an_emptied_model_is_filled_by_its_state_dict(make):
    net = TiedNet(make())
    ids = some_ids(net.emb.matrix)
    for assign in (False, True):
        other = copy.deepcopy(net).to("meta")
        assert all(t.is_meta for t in other.state_dict().values())
        if not assign:
            other = other.to_empty(device="cpu")
        other.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=assign)
        assert_one_matrix(other)
        assert torch.equal(other(ids), net(ids))


def test_loading_other_labels_moves_every_row(table):
    counts = [10, 12, 13, 5]
    a, b = (TiedNet(table["nested_with_exact"](seed=seed, counts=counts)) for seed in (0, 1))
    assert not torch.equal(a.emb.matrix.labels, b.emb.matrix.labels)
    b.load_state_dict(a.state_dict())
    ids = some_ids(a.emb.matrix)
    assert torch.equal(a(ids), b(ids))
    damaged = a.state_dict()
    damaged["emb.labels"] = torch.zeros_like(damaged["emb.labels"])
    with pytest.raises(KflatsError, match="labels do not match"):
        b.load_state_dict(damaged)
    wrong = a.state_dict()
    wrong["emb.weight"] = torch.zeros(40, 6)  # a dense table in place of the factors
    with pytest.raises(RuntimeError, match="size mismatch"):
        b.load_state_dict(wrong)


def dense_route(net: TiedNet, ids: Tensor, padding_idx: int | None) -> Tensor:
    """The same net on the dense matrix, through autograd and torch's own functions."""
    dense = net.emb.matrix.dense()
    out = F.embedding(ids, dense, padding_idx=padding_idx)
    return F.linear(torch.tanh(net.mid(out)), dense, net.head.bias)


def gradients(net: TiedNet, logits: Tensor, target: Tensor) -> list[Tensor | None]:
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    return list(torch.autograd.grad(loss, list(net.parameters()), allow_unused=True))


def test_training_through_both_places_sums_their_gradients(make):
    for padding_idx in (None, 0, 3, -1):
        matrix = make()
        if padding_idx is not None and padding_idx >= matrix.shape[0]:
            padding_idx = 0
        net = TiedNet(matrix, padding_idx)
        ids = some_ids(matrix)
        ids[:, :2] = 0 if padding_idx is None else padding_idx % matrix.shape[0]
        target = torch.randint(0, matrix.shape[0], ids.shape)

        for ours, theirs, (name, value) in zip(
            gradients(net, net(ids), target),
            gradients(net, dense_route(net, ids, padding_idx), target),
            net.named_parameters(),
            strict=True,
        ):
            zero = torch.zeros_like(value)
            torch.testing.assert_close(zero if ours is None else ours, zero if theirs is None else theirs, msg=name)


def test_padding_receives_no_gradient(make):
    """As nn.Embedding: with nothing but padding in the batch, neither coordinates nor bases move."""
    matrix = make()
    layer = FactoredEmbedding(matrix, padding_idx=0)
    layer(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is None or not parameter.grad.any()
    with pytest.raises(KflatsError, match="outside the table"):
        FactoredEmbedding(matrix, padding_idx=matrix.shape[0])
    assert FactoredEmbedding(matrix, padding_idx=-1).padding_idx == matrix.shape[0] - 1


def test_a_training_step_moves_both_places_alike(table):
    net = TiedNet(table["nested"](dtype=torch.float32))
    ids = some_ids(net.emb.matrix)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert_one_matrix(net)
    torch.testing.assert_close(net(ids), dense_route(net, ids, None))


def test_scale_is_rounded_to_the_type_of_the_table(make):
    for scale in (384**0.5, 1152**0.5, 3.14159):
        matrix = make(dtype=torch.bfloat16)
        layer = FactoredEmbedding(matrix, scale=scale)
        ids = some_ids(matrix)
        assert torch.equal(layer(ids), matrix.rows(ids) * torch.tensor(scale).to(torch.bfloat16))
        assert layer(ids).dtype == torch.bfloat16


def test_scale_is_that_of_gemma():
    gemma = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    original = gemma.Gemma3TextScaledWordEmbedding(30, 6, padding_idx=0, embed_scale=1152**0.5).bfloat16()
    matrix = LowRankMatrix(original.weight.detach(), torch.eye(6, dtype=torch.bfloat16))
    ids = torch.arange(30)
    assert torch.equal(FactoredEmbedding(matrix, scale=1152**0.5)(ids), original(ids))


def test_autocast_leaves_a_lookup_alone(make):
    layer = FactoredEmbedding(make(dtype=torch.float32))
    ids = some_ids(layer.matrix)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = layer(ids)
        assert inside.dtype == nn.Embedding(*layer.matrix.shape)(ids).dtype == torch.float32
    assert torch.equal(inside, layer(ids))


def test_autocast_treats_a_linear_layer_as_it_treats_torch_s(make):
    for rows in ("in_features", "out_features"):
        size = 40 if rows == "out_features" else 6
        layer = FactoredLinear(make(dtype=torch.float32), matrix_rows=rows)
        layer.bias = nn.Parameter(torch.zeros(layer.out_features))
        x = torch.randn(2, layer.in_features)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x).dtype == nn.Linear(layer.in_features, size)(x).dtype == torch.bfloat16
            head = FactoredHead(layer.matrix, nn.Parameter(torch.zeros(layer.matrix.shape[0])))
            assert head(torch.randn(2, layer.matrix.shape[1])).dtype == torch.bfloat16
        torch.testing.assert_close(layer(x).bfloat16(), layer.bfloat16()(x.bfloat16()), rtol=0.1, atol=0.3)


def test_factors_of_a_smaller_type_are_widened_before_they_are_multiplied(make):
    for stored in (torch.float16, torch.bfloat16):
        matrix = make(dtype=stored)
        wide = copy.deepcopy(matrix).float()
        layer = FactoredEmbedding(matrix, dtype=torch.float32)
        ids = torch.randint(0, matrix.shape[0], (20, 20), generator=torch.Generator().manual_seed(1))
        for given in (ids, ids[:1]):
            assert torch.equal(layer(given), wide.rows(given))
            layer(given).sum().backward()
            assert matrix.weight.grad.dtype == stored
        x, h = torch.randn(3, matrix.shape[0]), torch.randn(3, matrix.shape[1])
        torch.testing.assert_close(FactoredLinear(matrix)(x), wide.vecmat(x))
        torch.testing.assert_close(FactoredHead(matrix)(h), wide.matvec(h))


def test_the_output_type_follows_the_model(table):
    layer = FactoredEmbedding(table["ragged"](dtype=torch.float16), dtype=torch.float32)
    ids = torch.tensor([3, 1])
    for change, expected in (("bfloat16", torch.bfloat16), ("double", F64), ("half", torch.float16)):
        assert getattr(layer, change)()(ids).dtype == layer.weight.dtype == expected


def test_linear_in_both_orientations(make):
    for rows in ("in_features", "out_features"):
        for bias in (True, False):
            matrix = make()
            size = matrix.shape[1] if rows == "in_features" else matrix.shape[0]
            b = torch.randn(size, dtype=F64) if bias else None
            layer = FactoredLinear(matrix, b, matrix_rows=rows)
            x = torch.randn(2, 3, layer.in_features, dtype=F64)
            weight = matrix.dense() if rows == "out_features" else matrix.dense().T
            torch.testing.assert_close(layer(x), F.linear(x, weight, b))
            assert (layer.in_features, layer.out_features) == (weight.shape[1], weight.shape[0])
            ours = torch.autograd.grad(layer(x).pow(2).sum(), list(layer.parameters()), allow_unused=True)
            theirs = torch.autograd.grad(
                F.linear(x, matrix.dense() if rows == "out_features" else matrix.dense().T, layer.bias).pow(2).sum(),
                list(layer.parameters()),
                allow_unused=True,
            )
            for a, c, p in zip(ours, theirs, layer.parameters(), strict=True):
                zero = torch.zeros_like(p)
                torch.testing.assert_close(zero if a is None else a, zero if c is None else c)


def test_layers_refuse_what_does_not_fit(table):
    matrix = table["ragged"]()
    with pytest.raises(KflatsError, match="not a side of a layer"):
        FactoredLinear(matrix, matrix_rows="columns")
    with pytest.raises(KflatsError, match="does not fit"):
        FactoredLinear(matrix, torch.zeros(matrix.shape[0]))
    with pytest.raises(KflatsError, match="does not fit"):
        FactoredHead(matrix, nn.Parameter(torch.zeros(3)))
    with pytest.raises(KflatsError, match="DistributedDataParallel"):
        FactoredEmbedding(matrix)._replicate_for_data_parallel()


def test_code_that_knows_nn_embedding_finds_what_it_reads(make):
    matrix = make()
    layer = FactoredEmbedding(matrix, padding_idx=0)
    assert isinstance(layer, nn.Embedding)
    assert (layer.num_embeddings, layer.embedding_dim) == matrix.shape
    assert layer.weight.dtype == F64
    assert layer.weight.device.type == "cpu"
    assert (layer.padding_idx, layer.max_norm, layer.scale_grad_by_freq, layer.sparse) == (0, None, False, False)
    before = layer.weight.clone()
    layer.reset_parameters()
    assert torch.equal(layer.weight, before)
    assert matrix.kind in repr(layer)


def test_parameters_can_be_replaced_from_outside(table):
    """torch.func, FSDP and ``assign=True`` put other tensors in a layer's table: the matrix must see them."""
    net = TiedNet(table["nested"]())
    ids = some_ids(net.emb.matrix)
    doubled = {"emb.weight": net.emb.weight.detach() * 2}
    out = torch.func.functional_call(net, doubled, (ids,))
    with torch.no_grad():
        net.emb.weight.mul_(2)
    torch.testing.assert_close(out, net(ids))
    net.emb.weight = nn.Parameter(torch.zeros_like(net.emb.weight))
    assert_one_matrix(net)
    assert not net.emb(ids).any()


def test_a_table_resized_through_its_matrix_trains_on(make):
    matrix = make()
    net = TiedNet(matrix)
    bigger = TiedNet(matrix.resized(matrix.shape[0] + 3))
    bigger.mid.load_state_dict(net.mid.state_dict())
    ids = some_ids(matrix)
    torch.testing.assert_close(bigger(ids)[..., : matrix.shape[0]], net(ids))
    new = torch.tensor([matrix.shape[0] + 2])
    bigger(new).sum().backward()
    assert bigger.emb.weight.grad is not None
