"""Recorded graphs compute what eager mode computes: torch.compile with backward, torch.export, torch.jit.trace."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch
from table import crossed
from torch import Tensor, nn

from kflats.matrices.layers import FactoredEmbedding, FactoredHead, FactoredLinear
from kflats.matrices.registry import Matrix


class TiedNet(nn.Module):
    def __init__(self, matrix: Matrix) -> None:
        super().__init__()
        self.emb = FactoredEmbedding(matrix, padding_idx=0)
        self.head = FactoredHead(matrix)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.emb(ids)))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def batches(matrix: Matrix) -> list[Tensor]:
    """Several shapes, and ids that leave bands empty, or with one row, when the graph runs."""
    n = matrix.shape[0]
    gen = torch.Generator().manual_seed(4)
    found = [torch.randint(0, n, shape, generator=gen) for shape in ((4, 7), (2, 9), (3, 5))]
    return [*found, torch.full((2, 6), n - 1), torch.full((2, 2), n // 2), found[0].repeat(5, 4)]


def gradients(net: nn.Module, out: Tensor) -> list[Tensor]:
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=out.dtype)
    found = torch.autograd.grad((out * probe).sum(), list(net.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(net.parameters(), found, strict=True)]


def assert_compiled_alike(net: nn.Module, inputs: list[Tensor], **options: object) -> None:
    """In float64: a compiled sum may take another order, and in float32 its last digits are above the tolerance."""
    compiled = torch.compile(net, fullgraph=True, **options)
    for given in inputs:
        ours, theirs = compiled(given), net(given)
        torch.testing.assert_close(ours, theirs)
        for a, b in zip(gradients(net, ours), gradients(net, theirs), strict=True):
            torch.testing.assert_close(a, b)


def test_compiled_forward_and_backward(make_for_graph):
    layer = FactoredEmbedding(make_for_graph(), padding_idx=0)
    if len(getattr(layer.matrix, "bands", ())) > 100:
        pytest.skip("a graph holds each band apart: right, but slow to record")
    assert_compiled_alike(layer, batches(layer.matrix), backend="aot_eager", dynamic=True)


def test_compiled_without_gradients(make_for_graph):
    net = TiedNet(make_for_graph())
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=True)
    for ids in batches(net.emb.matrix):
        with torch.no_grad():
            ours, theirs = compiled(ids), net(ids)
        if net.emb.matrix.one_operator:
            assert torch.equal(ours, theirs)  # the layers are those of eager mode
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow  # it runs the C++ compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor on torch.jit
def test_compiled_by_inductor(table):
    net = TiedNet(table["nested_with_exact"]())
    inputs = batches(net.emb.matrix)
    assert_compiled_alike(net, inputs, dynamic=True)
    compiled = torch.compile(net, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for ids in inputs:
            torch.testing.assert_close(compiled(ids), net(ids))


@pytest.mark.parametrize(
    ("rows", "name"),
    crossed(
        ["in_features", "out_features"],
        ["low_rank", "interpolative", "interpolative_all", "nested_with_exact", "empty_bands"],
    ),
)
def test_compiled_linear(table, name, rows):
    layer = FactoredLinear(table[name](), matrix_rows=rows)
    inputs = [torch.randn(*shape, layer.in_features, dtype=torch.float64) for shape in ((2, 5), (3, 4))]
    assert_compiled_alike(layer, inputs, backend="aot_eager")


def test_one_compilation_serves_all_lengths(table):
    net = TiedNet(table["nested_with_exact"]())
    compiled = torch.compile(net, fullgraph=True, backend="eager", dynamic=True)
    compiled(torch.randint(0, 40, (4, 7)))
    with torch.compiler.set_stance("fail_on_recompile"):
        for ids in batches(net.emb.matrix):
            torch.testing.assert_close(compiled(ids), net(ids))


@pytest.mark.slow
def test_autocast_around_a_compiled_lookup_changes_nothing(table):
    net = FactoredEmbedding(table["ragged"](dtype=torch.float32))
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    ids = torch.tensor([[0, 3, 5]])
    plain = compiled(ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(ids), plain)


def export(net: nn.Module, given: Tensor, names: tuple[str, ...] = ("batch", "length")) -> torch.export.ExportedProgram:
    shapes = ({axis: torch.export.Dim(name, min=1, max=4096) for axis, name in enumerate(names)},)
    return torch.export.export(net, (given,), dynamic_shapes=shapes)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.export on itself
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_exported_with_dynamic_batch_and_length(make_for_graph):
    matrix = make_for_graph(dtype=torch.float32)
    if len(getattr(matrix, "bands", ())) > 100:
        pytest.skip("a graph holds each band apart: right, but slow to record")
    net = TiedNet(matrix)
    inputs = batches(net.emb.matrix)
    program = export(net, inputs[0])
    # Plain operators only: the graph runs where kflats is not installed, and ONNX knows all of them.
    assert not [node for node in program.graph.nodes if "kflats" in str(node.target)]
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for ids in inputs:
        torch.testing.assert_close(loaded(ids), net(ids))


@pytest.mark.parametrize(
    ("rows", "name"),
    crossed(
        ["in_features", "out_features"],
        ["low_rank", "interpolative", "interpolative_all", "nested_with_exact", "empty_bands"],
    ),
)
def test_exported_linear(table, name, rows):
    layer = FactoredLinear(table[name](dtype=torch.float32), matrix_rows=rows)
    program = export(layer, torch.randn(3, 5, layer.in_features))
    for shape in ((1, 2), (7, 4)):
        x = torch.randn(*shape, layer.in_features)
        torch.testing.assert_close(program.module()(x), layer(x))


@pytest.mark.parametrize("name", ["low_rank", "interpolative", "nested_with_exact"])
def test_graphs_widen_factors_of_a_smaller_type(table, name):
    layer = FactoredEmbedding(table[name](dtype=torch.float16), dtype=torch.float32)
    ids = batches(layer.matrix)[0]
    for graph in (export(layer, ids).module(), torch.compile(layer, fullgraph=True, backend="aot_eager")):
        out = graph(ids)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, layer(ids))
        for ours, theirs in zip(gradients(graph, out), gradients(layer, layer(ids)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.01, atol=0.01)


def test_an_exported_program_trains(table):
    net = TiedNet(table["nested_with_exact"](dtype=torch.float32))
    ids = batches(net.emb.matrix)[0]
    program = export(net, ids).module()
    for ours, theirs in zip(gradients(program, program(ids)), gradients(net, net(ids)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")  # of a category that torch 2.15 changed
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["low_rank", "interpolative", "uniform", "nested_with_exact", "empty_bands"])
def test_traced_graph_does_not_freeze_the_ids_it_saw(table, name):
    net = TiedNet(table[name](dtype=torch.float32)).requires_grad_(False)
    inputs = batches(net.emb.matrix)
    traced = torch.jit.trace(net, (inputs[0],))
    for ids in inputs:
        torch.testing.assert_close(traced(ids), net(ids))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # inside torch
def test_onnx(table, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    net = TiedNet(table["nested_with_exact"](dtype=torch.float32)).eval()
    inputs = batches(net.emb.matrix)
    shapes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},)
    torch.onnx.export(net, (inputs[0],), tmp_path / "net.onnx", dynamo=True, dynamic_shapes=shapes)
    session = runtime.InferenceSession(tmp_path / "net.onnx")
    for ids in inputs:
        (out,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
        torch.testing.assert_close(torch.from_numpy(out), net(ids).detach())
