"""Laws of whole matrices in half precision: half the bytes, the model's own type in computing, everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import kflats
from kflats import Float, KeepDense, KflatsError, Recipe
from kflats.matrices.registry import DenseMatrix
from kflats.methods import from_name
from kflats.model.swap import swap_
from kflats.model.weights import find_weight
from kflats.recipe.recipe import Plan

HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}
LAYERS = {
    "embedding": lambda: nn.Embedding(90, 12, padding_idx=0),
    "linear": lambda: nn.Linear(20, 30),
    "square": lambda: nn.Linear(16, 16, bias=False),
    "conv": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, padding_mode="circular"),
}


def given(layer: nn.Module) -> Tensor:
    gen = torch.Generator().manual_seed(1)
    if isinstance(layer, nn.Embedding):
        return torch.randint(0, 90, (3, 4), generator=gen)
    if isinstance(layer, nn.Conv2d):
        return torch.randn(2, 4, 9, 9, generator=gen)
    return torch.randn(3, layer.in_features, generator=gen)


def recipe(dtype: str, **more) -> Recipe:
    return Recipe(KeepDense(), codec=Float(dtype), **more)


layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
types = pytest.mark.parametrize("dtype", HALF)


@layers
@types
@pytest.mark.parametrize("rows", ["in_features", "out_features"])
def test_half_the_bytes_and_the_rounded_weight_in_the_models_type(make, dtype, rows, tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make())
    x, dense = given(model[0]), model[0].weight.detach().clone()
    if rows == "out_features" and isinstance(model[0], nn.Embedding):
        pytest.skip("an embedding is read by rows")
    rounded = nn.Sequential(make())
    rounded.load_state_dict(model.state_dict())
    with torch.no_grad():
        rounded[0].weight.copy_(dense.to(HALF[dtype]))
    report = kflats.compress_(model, {"0": recipe(dtype, matrix_rows=rows)}, keep="50%", quiet=True)
    found = report.weights[0]
    assert found.bytes_after == found.memory_bytes == dense.numel() * 2 == model[0].matrix.nbytes
    assert (found.kept, found.dense, found.stored) == (dtype, False, dtype)
    assert 0 < found.error < 1e-5
    assert model[0].weight.dtype == HALF[dtype]
    assert model(x).dtype == torch.float32
    torch.testing.assert_close(model(x), rounded(x), rtol=1e-5, atol=1e-6)

    kflats.save(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")["0.weight"]
    assert (stored.dtype, stored.numel()) == (HALF[dtype], dense.numel())
    # Whoever takes it for the layer's own table reads its numbers in their order, or an error.
    assert torch.equal(stored.reshape(dense.shape).float(), rounded[0].weight)
    fresh = nn.Sequential(make())
    kflats.load_(fresh, tmp_path)
    assert torch.equal(fresh(x), model(x))
    kflats.restore_(fresh)
    assert type(fresh[0]) is type(make())
    assert torch.equal(fresh[0].weight, rounded[0].weight)


@types
def test_a_tied_head_reads_the_same_numbers(tiny_model, dtype) -> None:
    model = tiny_model("gpt2")
    table = model.transformer.wte.weight.detach().clone()
    kflats.compress_(model, {"transformer.wte": recipe(dtype), "linear": recipe(dtype)}, keep="50%", quiet=True)
    assert model.lm_head.matrix is model.transformer.wte.matrix
    assert torch.equal(model.transformer.wte.matrix.dense(), table.to(HALF[dtype]))
    out = model(torch.tensor([[1, 2, 3]])).logits
    kflats.restore_(model)
    torch.testing.assert_close(model(torch.tensor([[1, 2, 3]])).logits, out)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_weight_that_would_not_shrink_stays_as_it_is(dtype) -> None:
    model = nn.ModuleDict({"b": nn.Embedding(90, 12).half(), "c": nn.Embedding(90, 12).half()})
    made = kflats.plan(model, {"b": recipe(dtype), "c": kflats.SVD()}, keep="90%")
    assert made.decisions[0].recipe.is_dense
    assert made.decisions[0].note == (f"dense: {dtype} would not make it smaller")
    kflats.compress_(model, made, quiet=True)
    assert isinstance(model["b"], nn.Embedding)
    assert not hasattr(model["b"], "matrix")
    assert model["b"].weight.dtype == torch.float16


def test_plans_keep_it_and_need_no_data_for_it(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 20))
    asked = {"0": recipe("float16", importance=kflats.KroneckerFisher()), "1": kflats.SVD()}
    made = kflats.plan(model, asked, keep="60%")
    assert [d.note for d in made.decisions] == ["float16: asked for", ""]
    made.save(tmp_path / "plan.json")
    report = kflats.compress_(model, Plan.load(tmp_path / "plan.json"), quiet=True)
    assert isinstance(model[0].matrix, DenseMatrix)
    assert report.bytes_after <= 0.6 * report.bytes_before


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("49%", "those that stay dense or are stored in a type take more"),
        ("900 params", "is not supported with types"),
        ("50% ranks", "is not supported with types"),
    ],
)
def test_budgets_that_it_cannot_meet_are_refused(budget, said) -> None:
    model = nn.Sequential(nn.Embedding(90, 12))
    before = model[0].weight
    with pytest.raises(KflatsError, match=said):
        kflats.compress_(model, {"0": recipe("float16")}, keep=budget, quiet=True)
    assert model[0].weight is before


def test_values_beyond_the_type_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(90, 12))
    with torch.no_grad():
        model[0].weight[3, 3] = 1e5
    with pytest.raises(KflatsError, match="overflow float16"):
        kflats.compress_(model, {"0": recipe("float16")}, keep="60%", quiet=True)
    kflats.compress_(model, {"0": recipe("bfloat16")}, keep="60%", quiet=True)
    assert model[0].weight.dtype == torch.bfloat16


def test_a_square_layer_never_holds_its_table_turned() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(KflatsError, match="the dense matrix of '0' cannot have in_features as rows"):
        swap_(model, find_weight(model, "0"), DenseMatrix(torch.randn(16, 16).half()))
    assert isinstance(model[0], nn.Linear)


def test_it_is_what_it_was_where_no_type_is_named() -> None:
    assert Recipe(KeepDense(), codec=Float()) == Recipe(from_name("keep-dense"))
    model = nn.ModuleDict({"a": nn.Embedding(90, 12), "b": nn.Embedding(90, 12)})
    made = kflats.plan(model, {"a": KeepDense(), "b": kflats.SVD()}, keep="80%")
    assert made.decisions[0].note == "dense: asked for"


@pytest.mark.slow
def test_onnx_computes_the_same(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(900, 48), nn.Linear(48, 64)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.words(ids))

    torch.manual_seed(0)
    model = Scores().eval()
    kflats.compress_(model, {"all": recipe("float16")}, keep="50%", quiet=True)
    made = kflats.export_onnx(model, tmp_path / "m.onnx", inputs={"ids": torch.tensor([[1, 2, 3], [4, 5, 6]])})
    assert made.difference < 1e-5
    assert made.nbytes < 2 * (900 * 48 + 48 * 64) + 20_000
