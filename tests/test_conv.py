"""Factored and coded convolutions: the same numbers as the dense layer, in every geometry and run-time form; and a
whole CNN's life on disk."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import kflats
from kflats.codecs import Feedback, Integer, Transform
from kflats.common.errors import KflatsError
from kflats.common.run_forms import RunForm
from kflats.importance import KroneckerFisher
from kflats.io.saving import note_losses_
from kflats.matrices import layers
from kflats.matrices.coded import from_integers
from kflats.matrices.layers import FactoredConv2d
from kflats.matrices.registry import FlatsMatrix, InterpolativeMatrix, LowRankMatrix, Matrix, RankGroup
from kflats.methods import SVD, Auto, Flats, KeepDense
from kflats.model.run_as import running_as
from kflats.model.swap import restore_, swap_
from kflats.model.weights import dense_weight, find_weight, find_weights
from kflats.recipe.recipe import Recipe

GEOMETRIES: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3},
    "one by one": {"kernel_size": 1, "stride": 2},
    "strides": {"kernel_size": (2, 5), "stride": (1, 3), "padding": (2, 1)},
    "dilated": {"kernel_size": 3, "dilation": (2, 1), "padding": 2},
    "same": {"kernel_size": (3, 4), "dilation": 2, "padding": "same"},
    "valid": {"kernel_size": 3, "padding": "valid"},
    "reflected": {"kernel_size": 3, "padding": (2, 1), "padding_mode": "reflect", "stride": 2},
    "circular and same": {"kernel_size": 4, "padding": "same", "padding_mode": "circular"},
    "replicated": {"kernel_size": 3, "padding": 3, "padding_mode": "replicate", "bias": False},
}


def low_rank(table: Tensor, rank: int) -> Matrix:
    u, s, v = torch.linalg.svd(table, full_matrices=False)
    return LowRankMatrix(u[:, :rank] * s[:rank], v[:rank])


def interpolative(table: Tensor, rank: int) -> Matrix:
    """Some columns of the best matrix of rank ``rank``, and what the others are made of."""
    best = low_rank(table, rank).dense().detach()
    order = torch.randperm(table.shape[1], generator=torch.Generator().manual_seed(1))
    columns = best[:, order[:rank]]
    basis = torch.linalg.pinv(columns.double()) @ best[:, order[rank:]].double()
    return InterpolativeMatrix(columns, basis.to(table.dtype), order.to(torch.int16))


CODES = {
    "8 bits": Recipe(KeepDense(), codec=Integer(8)),
    "4 bits in groups": Recipe(KeepDense(), codec=Integer(4, group=8)),
    "pair": Recipe(SVD(), codec=Transform()),
    "several flats": Recipe(Flats(k=2), codec=Transform()),
    "feedback": Recipe(KeepDense(), codec=Feedback()),
    "feedback, rows are outputs": Recipe(KeepDense(), codec=Feedback(), matrix_rows="out_features"),
}


def coded(conv: nn.Conv2d, recipe: Recipe, keep: str = "45%") -> FactoredConv2d:
    """The layer in codes."""
    model = nn.Sequential(copy.deepcopy(conv)).eval()
    kflats.compress_(model, {"0": recipe}, keep=keep, quiet=True)
    layer = model[0]
    assert isinstance(layer, FactoredConv2d)
    assert layer.matrix.kind == "coded"
    return layer


def from_axes(n: int, d: int, rank: int) -> Matrix:
    """A coded matrix in so many axes."""
    integers = torch.randint(-7, 8, (n, rank))
    basis = torch.randint(-100, 100, (rank, d)).to(torch.int8)
    return from_integers([integers], None, torch.ones(1), basis=basis, basis_scale=torch.full((rank,), 0.01))


def decoded(conv: nn.Conv2d, layer: FactoredConv2d) -> nn.Conv2d:
    """A dense convolution with the decoded kernel of ``layer``, which stands for ``conv``."""
    dense, table = copy.deepcopy(conv), layer.matrix.dense().detach()
    with torch.no_grad():
        dense.weight.copy_((table if layer.transposed else table.T).reshape(conv.weight.shape))
    dense.bias = layer.bias
    return dense


both_kinds = pytest.mark.parametrize("make", [low_rank, interpolative])


def factored(conv: nn.Conv2d, rank: int, rows: str, make: Any = low_rank) -> FactoredConv2d:
    model = nn.Sequential(copy.deepcopy(conv))
    table = dense_weight(model, find_weight(model, "0"))
    swap_(model, find_weight(model, "0"), make(table if rows == "in_features" else table.T, rank), matrix_rows=rows)
    layer = model[0]
    assert isinstance(layer, FactoredConv2d)
    return layer


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(y)) + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """A residual network in miniature, with one grouped convolution in it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, padding_mode="reflect")
        self.blocks = nn.Sequential(Block(16, 24), Block(24, 32))
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.depthwise(self.blocks(self.stem(x))).mean((2, 3)))


@both_kinds
@pytest.mark.parametrize("rows", ["in_features", "out_features"])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_full_rank_is_the_dense_convolution(geometry: dict[str, Any], rows: str, make: Any) -> None:
    conv = nn.Conv2d(3, 5, **geometry).double()
    full = min(3 * conv.kernel_size[0] * conv.kernel_size[1], 5)
    layer = factored(conv, full, rows, make)
    for x in (torch.randn(2, 3, 11, 9, dtype=torch.float64), torch.randn(3, 11, 9, dtype=torch.float64)):
        torch.testing.assert_close(layer(x), conv(x), rtol=1e-10, atol=1e-10)


@both_kinds
@pytest.mark.parametrize("rows", ["in_features", "out_features"])
def test_a_lower_rank_is_the_convolution_of_its_matrix(rows: str, make: Any) -> None:
    conv = nn.Conv2d(3, 5, 3, stride=2, padding=1)
    layer = factored(conv, 2, rows, make)
    with torch.no_grad():
        table = layer.matrix.dense() if rows == "in_features" else layer.matrix.dense().T
        conv.weight.copy_(table.T.reshape_as(conv.weight))
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(layer(x), conv(x))
    patches = nn.functional.unfold(x, 3, padding=1, stride=2)  # rows of M are the numbers of a patch, in this order
    torch.testing.assert_close(patches.mT @ table + conv.bias, conv(x).flatten(2).mT)
    layer(x).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in layer.parameters())


@both_kinds
@pytest.mark.parametrize("rows", ["in_features", "out_features"])
def test_rank_zero_is_the_bias_alone(rows: str, make: Any) -> None:
    conv = nn.Conv2d(3, 5, 3, stride=2)
    layer = factored(conv, 0, rows, make)
    torch.testing.assert_close(layer(torch.randn(2, 3, 7, 7)), conv.bias[None, :, None, None].expand(2, 5, 3, 3))


def test_types_layouts_and_recording() -> None:
    layer = factored(nn.Conv2d(3, 8, 3, padding=1), 4, "in_features")
    x = torch.randn(2, 3, 8, 8)
    expected = layer(x)
    torch.testing.assert_close(layer(x.to(memory_format=torch.channels_last)), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    recorded = torch.export.export(nn.Sequential(layer), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(recorded.module()(x[:1].repeat(3, 1, 1, 1)), expected[:1].repeat(3, 1, 1, 1))
    assert torch.equal(torch.fx.symbolic_trace(nn.Sequential(layer))(x), expected)
    layer.matrix.half()  # stored small, computed in the type of what enters
    assert layer(x).dtype == torch.float32
    torch.testing.assert_close(layer(x), expected, rtol=1e-2, atol=1e-2)
    assert "kernel_size=(3, 3)" in repr(layer)


@pytest.mark.parametrize(
    ("geometry", "codes"),
    [*((name, "8 bits") for name in GEOMETRIES), *(("strides", name) for name in list(CODES)[1:])],
)
def test_codes_are_the_convolution_of_their_matrix_in_every_form(geometry: str, codes: str) -> None:
    conv = nn.Conv2d(6, 40, **GEOMETRIES[geometry])
    layer = coded(conv, CODES[codes])
    dense, x = decoded(conv, layer), torch.randn(3, 6, 11, 9)
    expected = dense(x).detach()
    assert 0 < (expected - conv(x)).norm() < 0.6 * conv(x).norm()
    for form, far in (("dense", 1e-5), ("compact", 1e-5), ("bfloat16", 2e-2), ("int8", 3e-2)):
        with running_as(layer, form), torch.no_grad():
            for given, wanted in ((x, expected), (x[1], expected[1])):
                out = layer(given)
                assert out.dtype == x.dtype
                assert out.shape == wanted.shape
                assert (out - wanted).norm() < far * wanted.norm(), form


@pytest.mark.parametrize(("numbers", "rows"), [(2 * 54 * 30, [60, 60, 30]), (54 * 10, [10, 10, 10] * 5), (1, [5] * 30)])
def test_integers_multiply_some_images_or_rows_at_a_time(
    numbers: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = coded(nn.Conv2d(6, 16, 3, stride=2, padding=1), CODES["8 bits"])
    x = torch.randn(5, 6, 12, 10)
    layer.run_form = "int8"
    with torch.no_grad():
        whole = layer(x)
        monkeypatch.setattr(layers, "_UNFOLDED", numbers)
        calls: list[int] = []
        times = FactoredConv2d.times

        def counted(self: FactoredConv2d, x: Tensor, bias: Tensor | None) -> Tensor:
            calls.append(x.shape[:-1].numel())
            return times(self, x, bias)

        monkeypatch.setattr(FactoredConv2d, "times", counted)
        torch.testing.assert_close(layer(x), whole)
    assert calls == rows


@pytest.mark.parametrize("form", ["dense", "compact", "bfloat16", "int8"])
def test_outputs_of_codes_lie_in_memory_as_those_of_torch(form: RunForm) -> None:
    """Models flatten them with ``view``."""
    conv = nn.Conv2d(6, 16, 3, padding=1)
    layer = coded(conv, CODES["8 bits"])
    layer.run_form = form
    with torch.no_grad():
        for x in (torch.randn(2, 6, 8, 8), torch.randn(1, 6, 8, 8), torch.randn(6, 8, 8), torch.randn(0, 6, 8, 8)):
            assert layer(x).stride() == conv(x).stride()
            assert layer(x).shape == conv(x).shape
        last = torch.randn(2, 6, 8, 8).to(memory_format=torch.channels_last)
        assert layer(last).stride() == conv(last).stride()
        for given in (torch.randn(2, 6, 16, 16)[:, :, ::2, ::2], torch.randn(2, 8, 8, 6).permute(0, 3, 1, 2)):
            torch.testing.assert_close(layer(given), layer(given.contiguous()))


@pytest.mark.parametrize("form", ["dense", "int8"])
def test_a_geometry_that_the_model_changes_is_followed(form: RunForm) -> None:
    """Models turn strides into dilation after they were built."""
    for change in (
        {"padding": (2, 2), "dilation": (2, 2)},
        {"stride": (1, 1)},
        {"padding": 2, "dilation": 2, "stride": 1},
    ):
        conv = nn.Conv2d(6, 16, 3, stride=2, padding=1)
        for key, value in change.items():
            setattr(conv, key, value)
        layer = coded(conv, CODES["8 bits"])
        later = coded(nn.Conv2d(6, 16, 3, stride=2, padding=1), CODES["8 bits"])
        for key, value in change.items():
            setattr(later, key, value)
        x = torch.randn(2, 6, 12, 10)
        for made in (layer, later):
            made.run_form = form
            with torch.no_grad():
                expected = decoded(conv, made)(x)
                assert (made(x) - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("form", ["dense", "int8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_codes_meet_inputs_of_other_types(form: RunForm, dtype: torch.dtype) -> None:
    conv = nn.Conv2d(6, 16, 3, padding=1)
    layer = coded(conv, CODES["8 bits"])
    layer.run_form = form
    x = torch.randn(2, 6, 8, 8)
    with torch.no_grad():
        expected = decoded(conv, layer)(x)
        out = layer.to(dtype)(x.to(dtype))
        assert out.dtype == dtype
        assert (out.float() - expected).norm() < 0.03 * expected.norm()
        if form == "dense":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert layer.float()(x).dtype == torch.bfloat16


@pytest.mark.parametrize("form", ["dense", "int8"])
def test_a_code_of_no_axes_is_the_bias_alone(form: RunForm) -> None:
    conv = nn.Conv2d(6, 16, 3)
    layer = FactoredConv2d(from_axes(54, 16, 0), conv, conv.bias)
    layer.run_form = form
    with torch.no_grad():
        expected = conv.bias[None, :, None, None].expand(2, 16, 6, 6)
        torch.testing.assert_close(layer(torch.randn(2, 6, 8, 8)), expected)


@pytest.mark.parametrize("form", ["dense", "int8"])
def test_wrong_images_are_refused(form: RunForm) -> None:
    layer = coded(nn.Conv2d(6, 16, 3), CODES["8 bits"])
    layer.run_form = form
    error = (RuntimeError, KflatsError) if form == "dense" else KflatsError  # torch's convolution says it itself
    with torch.no_grad():
        for shape in ((2, 5, 8, 8), (8, 8), (1, 2, 6, 8, 8), (2, 6, 2, 8), (2, 6, 8, 2)):
            with pytest.raises(error):
                layer(torch.randn(shape))
        with pytest.raises(KflatsError, match=r"int64 are not supported"):
            layer(torch.ones(2, 6, 8, 8, dtype=torch.int64))
    layer.run_form = "int8"
    with (
        torch.no_grad(),
        pytest.raises(KflatsError, match=r"\(2, 5, 8, 8\) do not fit a convolution of 6 channels by a .* 3 x 3"),
    ):
        layer(torch.randn(2, 5, 8, 8))


def test_a_bias_that_learns_beside_frozen_codes() -> None:
    conv = nn.Conv2d(6, 16, 3)
    layer = coded(conv, CODES["8 bits"])
    x = torch.randn(2, 6, 8, 8)
    for parameter in layer.parameters():
        parameter.requires_grad_(parameter is layer.bias)
    for form in ("dense", "int8"):
        layer.run_form = form
        layer.zero_grad()
        layer(x).sum().backward()
        torch.testing.assert_close(layer.bias.grad, torch.full((16,), 2.0 * 36))
    assert layer._ready is not None  # nothing was decoded in these calls
    layer.run_form = "int8"
    with pytest.raises(KflatsError, match="gradients are not supported with the run-time form int8"):
        layer(x.requires_grad_())
    layer.run_form = "dense"
    layer(x).square().sum().backward()
    assert x.grad is not None


def test_gradients_reach_the_scales_of_codes_and_not_through_integers() -> None:
    conv = nn.Conv2d(6, 16, 3, padding=1)
    layer = coded(conv, CODES["pair"])
    x = torch.randn(2, 6, 8, 8, requires_grad=True)
    layer(x).square().sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None for p in layer.parameters())
    dense = decoded(conv, layer)
    given = x.detach().requires_grad_()
    dense(given).square().sum().backward()
    torch.testing.assert_close(x.grad, given.grad)
    step = torch.optim.SGD(layer.parameters(), lr=1e-4)
    step.step()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), decoded(conv, layer)(x))  # the kept kernel is made anew
    layer.run_form = "int8"
    with pytest.raises(KflatsError, match="gradients are not supported with the run-time form int8"):
        layer(x)


@pytest.mark.parametrize("form", ["dense", "int8", "compact"])
def test_a_compiled_graph_of_codes_computes_the_same(form: RunForm) -> None:
    layer = coded(nn.Conv2d(6, 16, 3, stride=2, padding=1), CODES["feedback"])
    layer.run_form = form
    model = nn.Sequential(layer, nn.Flatten())
    run = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for x in (
        torch.randn(2, 6, 9, 7),
        torch.randn(3, 6, 9, 7),
        torch.randn(2, 6, 8, 8).to(memory_format=torch.channels_last),
    ):
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    layer.run_form = "dense"
    x = torch.randn(2, 6, 9, 7, requires_grad=True)
    run(x).square().sum().backward()
    found = x.grad
    x.grad = None
    model(x).square().sum().backward()
    torch.testing.assert_close(found, x.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", CODES.values(), ids=CODES)
def test_a_recorded_graph_of_codes_computes_the_same(recipe: Recipe) -> None:
    layer = coded(nn.Conv2d(6, 40, 3, padding=1), recipe)
    layer.run_form = "int8"  # graphs for files multiply floats
    x = torch.randn(2, 6, 8, 8)
    with torch.no_grad():
        expected = decoded(nn.Conv2d(6, 40, 3, padding=1), layer)(x)
    recorded = torch.export.export(nn.Sequential(layer), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(recorded.module()(x[:1].repeat(3, 1, 1, 1)), expected[:1].repeat(3, 1, 1, 1))


def test_what_cannot_be_factored_says_why() -> None:
    class Standardized(nn.Conv2d):
        pass

    model = nn.ModuleDict(
        {
            "good": nn.Conv2d(4, 4, 3),
            "grouped": nn.Conv2d(4, 4, 3, groups=2),
            "depthwise": nn.Conv2d(4, 4, 3, groups=4),
            "standardized": Standardized(4, 4, 3),
            "line": nn.Conv1d(4, 4, 3),
            "upwards": nn.ConvTranspose2d(4, 4, 3),
            "normed": nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)),
        }
    )
    assert [w.name for w in find_weights(model)] == ["good"]
    for name, reason in [
        ("grouped", r"a grouped convolution \(groups=2\)"),
        ("depthwise", r"a grouped convolution \(groups=4\)"),
        ("standardized", "Standardized"),
        ("line", "Conv1d"),
        ("upwards", "ConvTranspose2d"),
        ("normed", "plain floating-point weight"),
    ]:
        with pytest.raises(KflatsError, match=reason):
            find_weight(model, name)
    flats = FlatsMatrix(
        torch.randn(36, 2), torch.randn(2, 4), torch.zeros(36, dtype=torch.uint8), (RankGroup(36, 2, 0),), (2,)
    )
    weight = find_weight(model, "good")
    with pytest.raises(KflatsError, match=r"'flats' cannot be a convolution's kernel"):
        swap_(model, weight, flats)
    with pytest.raises(KflatsError, match=r"shape \(4, 36\) cannot replace"):
        swap_(model, weight, LowRankMatrix(torch.ones(4, 1), torch.ones(1, 36)))
    assert type(model["good"]) is nn.Conv2d
    with pytest.raises(KflatsError, match="groups"):
        FactoredConv2d(LowRankMatrix(torch.ones(18, 1), torch.ones(1, 4)), model["grouped"])


@pytest.fixture(scope="module")
def trained() -> ResNet:
    """The network with statistics and biases that are not what they start as; not to be changed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ResNet()
        with torch.no_grad():
            model(torch.randn(16, 3, 16, 16))
    return model.eval()


def compressed(trained: ResNet, rank: int = 6) -> ResNet:
    """Its blocks' convolutions factored by hand."""
    model = copy.deepcopy(trained)
    for i, weight in enumerate(find_weights(trained)):
        if weight.name.startswith("blocks"):
            table = dense_weight(trained, weight)
            rows = "out_features" if i % 2 else "in_features"
            make = interpolative if i % 3 else low_rank
            swap_(model, weight, make(table.T if i % 2 else table, rank), matrix_rows=rows)
    return model


def test_a_network_is_saved_and_loaded(trained: ResNet, tmp_path: Path) -> None:
    assert find_weights(trained)[0].name == "stem"
    assert all("depthwise" not in w.name for w in find_weights(trained))
    model = compressed(trained)
    assert sum(isinstance(m, FactoredConv2d) for m in model.modules()) == 6
    kflats.save(model, tmp_path)
    dense = sum(p.numel() * p.element_size() for p in trained.parameters())
    assert (tmp_path / "model.safetensors").stat().st_size < 0.75 * dense
    loaded = ResNet().eval()
    kflats.load_(loaded, tmp_path)
    x = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    loaded.train()(x).square().sum().backward()
    assert all(p.grad is not None for p in loaded.parameters())
    expected = model(x)
    restore_(model)
    assert type(model.blocks[0].conv1) is nn.Conv2d
    torch.testing.assert_close(model(x), expected)
    model.load_state_dict(trained.state_dict())


def test_a_network_is_compressed(trained: ResNet, tmp_path: Path) -> None:
    model = copy.deepcopy(trained)
    names = [w.name for w in find_weights(model) if w.name.startswith("blocks") and w.shape[0] > 100]
    report = kflats.compress_(model, dict.fromkeys(names, kflats.SVD()), keep="60%", quiet=True)
    assert len(report.weights) == len(names) == 4
    kflats.save(model, tmp_path)
    loaded = ResNet().eval()
    kflats.load_(loaded, tmp_path)
    x = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
        assert 0 < (model(x) - trained(x)).norm() < trained(x).norm()


@pytest.mark.parametrize("recipe", CODES.values(), ids=CODES)
def test_a_network_in_codes_is_saved_and_loaded(trained: ResNet, tmp_path: Path, recipe: Recipe) -> None:
    model = copy.deepcopy(trained)
    names = [w.name for w in find_weights(model) if w.name.startswith("blocks") and w.shape[0] > 100]
    kflats.compress_(model, dict.fromkeys(names, recipe), keep="40%", quiet=True)
    kflats.run_as_(model, "int8")
    kflats.save(model, tmp_path)
    loaded = ResNet().eval()
    kflats.load_(loaded, tmp_path)
    x = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    for name in names:
        mine, there = model.get_submodule(name), loaded.get_submodule(name)
        assert isinstance(mine, FactoredConv2d)
        assert isinstance(there, FactoredConv2d)
        assert there.run_form == "int8"
        for key, tensor in mine.matrix.tensors().items():
            assert torch.equal(tensor, there.matrix.tensors()[key]), key
    kflats.run_as_(model, "dense")
    with torch.no_grad():
        expected = model(x)
        restore_(model)
        assert type(model.blocks[0].conv1) is nn.Conv2d
        torch.testing.assert_close(model(x), expected)


def test_the_form_of_a_folder_is_that_of_its_convolutions(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4)
    model = transformers.ViTModel(config).eval()
    kflats.compress_(model, {"conv": CODES["8 bits"]}, keep="45%", quiet=True)
    model.save_pretrained(tmp_path)
    x = torch.randn(2, 3, 16, 16)
    for form in ("int8", "dense"):
        note_losses_(tmp_path, (), form)
        loaded = transformers.AutoModel.from_pretrained(tmp_path)
        layers = [layer for layer in loaded.modules() if isinstance(layer, FactoredConv2d)]
        assert [layer.run_form for layer in layers] == [form]
        kflats.run_as_(model, form)
        with torch.no_grad():
            assert torch.equal(loaded(x).last_hidden_state, model(x).last_hidden_state)


def test_auto_codes_convolutions_with_less_error_than_pairs(trained: ResNet) -> None:
    batches = [{"x": torch.randn(8, 3, 16, 16)} for _ in range(2)]
    away = {}
    x = torch.randn(16, 3, 16, 16)
    for name, given in (("auto", Auto()), ("pairs", Recipe(SVD(), KroneckerFisher()))):
        model = copy.deepcopy(trained)
        report = kflats.compress_(
            model, {"conv": given}, keep="30%", allocation="loss", calibration=batches, quiet=True
        )
        assert report.bytes_after <= 0.3 * report.bytes_before
        with torch.no_grad():
            away[name] = float((model(x) - trained(x)).norm())
    assert away["auto"] < 0.5 * away["pairs"]


def test_a_file_of_another_convolution_is_refused(trained: ResNet, tmp_path: Path) -> None:
    model = compressed(trained)
    kflats.save(model, tmp_path)
    other = ResNet()
    other.blocks[0].conv1 = nn.Conv2d(16, 24, (1, 9), bias=False)  # as many numbers
    with pytest.raises(KflatsError, match=r"\(16, 3, 3\) as its kernel in the file, but \(16, 1, 9\)"):
        kflats.load_(other, tmp_path)
    other.blocks[0].conv1 = nn.Linear(144, 24, bias=False)
    with pytest.raises(KflatsError, match="in the file, but no kernel in the model"):
        kflats.load_(other, tmp_path)
    assert not any(isinstance(m, FactoredConv2d) for m in other.modules())


def test_a_program_without_kflats_cannot_load_it_by_mistake(trained: ResNet, tmp_path: Path) -> None:
    model = compressed(trained)
    kflats.save(model, tmp_path)
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.0\.conv1\.weight"):
        ResNet().load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)


@pytest.mark.filterwarnings("ignore:.* have no checksum")
@pytest.mark.parametrize(
    ("place", "matrix", "message"),
    [
        ({"kernel": None}, {}, "kernel"),
        ({"kernel": [16, 3]}, {}, "kernel"),
        ({"kernel": [16, 3, True]}, {}, "kernel"),
        ({"kernel": [16, 0, 3]}, {}, "kernel"),
        ({"role": "linear"}, {}, "kernel"),
        ({"gained_bias": 1}, {}, "gained_bias should be true or false"),
        ({"groups": 2}, {}, "fields"),
        ({}, {"kind": "flats", "bands": [[24, 2, 0]], "flat_ranks": [2]}, "is a convolution with a matrix of kind"),
    ],
)
def test_a_damaged_description_is_refused(
    trained: ResNet, tmp_path: Path, place: dict[str, Any], matrix: dict[str, Any], message: str
) -> None:
    model = compressed(trained)
    kflats.save(model, tmp_path)
    path = tmp_path / "model.safetensors"
    with safe_open(path, "pt") as file:
        note = json.loads(file.metadata()["kflats"])
    module = note["layers"]["modules"]["blocks.0.conv1"]
    module["places"][0] |= place
    if matrix:
        module["matrix"] = {"shape": module["matrix"]["shape"], **matrix}
    save_file(load_file(path), path, metadata={"kflats": json.dumps(note)})
    with pytest.raises(KflatsError, match=message):
        kflats.load_(ResNet(), tmp_path)
