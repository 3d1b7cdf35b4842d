"""On a GPU everything is what it is on the CPU, up to rounding: on one of CUDA, or where there is none, on one that is
pretended (``pretended.py``), whose kernels are those of the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pretended import Pretended
from safetensors.torch import load_file
from table import each_coded, each_method
from torch import Tensor, nn

import kflats
from kflats import SVD, Feedback, InputGram, Integer, KeepDense, KroneckerFisher, Recipe, RowFisher, Transform, run_as_
from kflats.common.run_forms import RunForm
from kflats.matrices.integer_kernels import integer_limit
from kflats.matrices.running import IntegerProduct
from kflats.model.weights import held_matrices

HAS_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="there is no GPU of CUDA")


@pytest.fixture(autouse=True)
def device_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if HAS_GPU:
        yield
        return
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    with Pretended():
        yield


DEVICES = ("cpu", "cuda")


def drawn(rows: int, columns: int, rank: int, seed: int = 0) -> Tensor:
    """Low rank with noise, so that methods have something to find."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(rows, rank, generator=gen) @ torch.randn(rank, columns, generator=gen) + torch.randn(
        rows, columns, generator=gen
    )


class Layers(nn.Module):
    """Two layers whose inputs differ in size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(60, 88), nn.Linear(88, 40)
        with torch.no_grad():
            self.first.weight.copy_(drawn(88, 60, 6) / 8)
            self.second.weight.copy_(drawn(40, 88, 6, 1) / 8)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.second(torch.relu(self.first(x)))
        return {"logits": logits} | ({} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)})


def batches(device: str) -> list[dict[str, Tensor]]:
    gen = torch.Generator().manual_seed(2)
    sizes = torch.logspace(-1, 1, 60)
    return [
        {
            "x": (torch.randn(32, 60, generator=gen) * sizes).to(device),
            "labels": torch.randint(40, (32,), generator=gen).to(device),
        }
        for _ in range(4)
    ]


def compare(make: Any, compress: Any, outputs: Any) -> None:
    """Compress what ``make`` gives on both devices: sizes and errors agree, and outputs move between them."""
    found = {}
    for device in DEVICES:
        model = make().to(device)
        report = compress(model, device)
        assert all(parameter.device.type == device for parameter in model.parameters())
        with torch.no_grad():
            here = outputs(model, device)
            other = DEVICES[device == "cpu"]
            there = outputs(copy.deepcopy(model).to(other), other)
        torch.testing.assert_close(there.cpu(), here.cpu(), rtol=1e-3, atol=1e-3)
        found[device] = report
    for one, other in zip(found["cpu"].weights, found["cuda"].weights, strict=True):
        assert other.bytes_after == pytest.approx(one.bytes_after, rel=0.02)
        assert other.error_unweighted == pytest.approx(one.error_unweighted, rel=0.05, abs=1e-4)


def of_table(recipe: Recipe, keep: str) -> None:
    compare(
        lambda: nn.ModuleDict({"table": nn.Embedding.from_pretrained(drawn(120, 32, 3))}),
        lambda model, device: kflats.compress_(model, {"table": recipe}, keep=keep, quiet=True),
        lambda model, device: model["table"](torch.arange(120, device=device)),
    )


@each_method(quick={"flats", "k-means", "robust svd"})
def test_methods(method: Any) -> None:
    of_table(Recipe(method), "50%")


@each_coded(quick={(SVD(), Transform()), (KeepDense(), Integer(bits=8))})
def test_codecs(method: Any, codec: Any, share: float) -> None:
    of_table(Recipe(method, codec=codec), f"{100 * share:g}%")


@pytest.mark.parametrize(
    ("recipe", "keep"),
    [
        (Recipe(SVD(), RowFisher()), "50%"),
        (Recipe(SVD(), InputGram()), "50%"),
        # Gradients that hooks receive were made where nothing is watched.
        pytest.param(Recipe(SVD(), KroneckerFisher()), "50%", marks=needs_gpu),
        pytest.param(Recipe(KeepDense(), InputGram(), codec=Feedback()), "14%", marks=pytest.mark.slow),
        pytest.param(Recipe(KeepDense(), KroneckerFisher(), codec=Feedback()), "14%", marks=needs_gpu),
    ],
    ids=str,
)
def test_measured_layers(recipe: Recipe, keep: str) -> None:
    compare(
        Layers,
        lambda model, device: kflats.compress_(
            model, {"linear": recipe}, keep=keep, calibration=batches(device), quiet=True
        ),
        lambda model, device: model(batches(device)[0]["x"])["logits"],
    )


def coded(device: str) -> Layers:
    torch.manual_seed(0)
    model = Layers()
    kflats.compress_(model, {"linear": Recipe(KeepDense(), codec=Integer(bits=8))}, keep="30%", quiet=True)
    return model.to(device)


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=needs_gpu if form == "int8" else ()) for form in get_args(RunForm)]
)
@pytest.mark.parametrize("rows", [1, 33])
def test_run_time_forms(form: RunForm, rows: int) -> None:
    made = []
    for device in DEVICES:
        model = coded(device)
        run_as_(model, form)
        with torch.inference_mode():
            made.append(model(batches(device)[0]["x"][:1].expand(rows, -1))["logits"].cpu())
    near = 0.02 if form in ("int8", "bfloat16") else 1e-4
    assert float((made[1] - made[0]).norm()) <= near * float(made[0].norm())


@needs_gpu
@pytest.mark.parametrize("shape", [(1, 384, 384), (3, 60, 17), (17, 64, 48), (960, 384, 96)])
def test_products_of_integers_are_those_of_the_cpu(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    gen = torch.Generator().manual_seed(0)
    weight, x, scales = torch.randn(n, k, generator=gen), torch.randn(m, k, generator=gen), torch.ones(k)
    most = integer_limit("cuda")
    ours = IntegerProduct.of(weight.to("cuda"), scales.to("cuda"))(x.to("cuda"), torch.ones(n).to("cuda"))
    near = x @ weight.T + 1
    assert float((ours.cpu() - near).norm()) < 0.03 * float(near.norm())
    assert most == 127
    if integer_limit() == most:
        theirs = IntegerProduct.of(weight, scales)(x, torch.ones(n))
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=0.02)  # a number may be rounded the other way


@needs_gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor on torch.jit
@pytest.mark.parametrize("form", get_args(RunForm))
def test_graphs_are_the_layers(form: RunForm) -> None:
    model = coded("cuda").requires_grad_(False)
    run_as_(model, form)
    torch.compiler.reset()
    graph = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for batch in batches("cuda"):
            ours, own = graph(batch["x"])["logits"], model(batch["x"])["logits"]
            assert float((ours - own).norm()) <= 0.01 * float(own.norm())
    torch.compiler.reset()


def test_folders_are_read_and_trained(tmp_path: Path) -> None:
    model = coded("cuda")
    kflats.save(model, tmp_path / "saved")
    loaded = Layers()
    kflats.load_(loaded, tmp_path / "saved")
    batch = batches("cuda")[0]
    with torch.no_grad():
        torch.testing.assert_close(loaded.to("cuda")(batch["x"])["logits"], model(batch["x"])["logits"])
    before = float(model(**batch)["loss"].detach())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
    assert float(model(**batch)["loss"].detach()) < before
    kflats.restore_(model)
    assert model.first.weight.device.type == "cuda"


def test_a_file_has_the_matrix_of_a_parameter_on_whichever_device(tmp_path: Path) -> None:
    """It lies on the CPU: decoded on another device, the last digits might differ, and the file would be dense."""
    transformers = pytest.importorskip("transformers")
    config = transformers.XLNetConfig(vocab_size=90, d_model=64, n_layer=1, n_head=4, d_inner=64)
    model, name = transformers.XLNetModel(config).eval().to("cuda"), "layer.0.rel_attn.q"
    kflats.compress_(model, {name: Recipe(SVD())}, keep="40%", quiet=True)
    ((_, held),) = held_matrices(model)
    assert held.matrix.weight.device.type == "cpu"
    for device in DEVICES:
        model.to(device).save_pretrained(tmp_path / device)
        assert len([key for key in load_file(tmp_path / device / "model.safetensors") if key.startswith(name)]) == 2
