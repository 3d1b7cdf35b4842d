"""Dense checkpoints: what the compressed model says, in folders that load where kflats is not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, load_model
from torch import nn
from typer.testing import CliRunner

import kflats
from kflats.cli.app import app
from kflats.common.errors import KflatsError
from kflats.export.dense import export_dense
from kflats.matrices.coded import from_integers
from kflats.matrices.registry import LowRankMatrix
from kflats.model.swap import restore_, swap_
from kflats.model.weights import find_weight

IDS = torch.tensor([[2, 9, 150, 7, 3], [2, 120, 6, 3, 0]])

# Fails if anything in it imports kflats.
ELSEWHERE = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "kflats":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocker())
import torch
from transformers import AutoModel, AutoTokenizer
model = AutoModel.from_pretrained(sys.argv[1]).eval()
AutoTokenizer.from_pretrained(sys.argv[1])
with torch.no_grad():
    out = model(torch.tensor(eval(sys.argv[2])))[0]
print(model.dtype, float(out.double().sum()), float(out.double().square().sum()))
"""


def elsewhere(folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(folder), str(IDS.tolist())], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "MISSING" not in done.stderr
    assert "newly initialized" not in done.stderr
    return done.stdout.split()


def run(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        out = model.eval()(ids)
    return out if isinstance(out, torch.Tensor) else out[0]


@pytest.fixture(scope="module")
def small(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compressed folder: flats in the table, a truncated linear layer in float16."""
    out = tmp_path_factory.mktemp("dense") / "small"
    model = kflats.compress_folder(tiny_folder, out, keep="60%", method=kflats.Flats(k=2), quiet=True)
    assert model.weights
    return out


@pytest.mark.slow
def test_a_folder_loads_without_kflats(small: Path, tiny_folder: Path, tmp_path: Path) -> None:
    made = export_dense(small, tmp_path / "dense")
    assert made.weights == ("embeddings.word_embeddings",)
    dtype, total, square = elsewhere(made.folder)
    want = run(kflats.io.load_model(small)).double()
    assert dtype == "torch.float32"
    assert float(total) == pytest.approx(float(want.sum()), abs=1e-3)
    assert float(square) == pytest.approx(float(want.square().sum()), rel=1e-5)
    config = json.loads((made.folder / "config.json").read_text())
    assert "quantization_config" not in config
    names = {path.name for path in made.folder.iterdir()}
    assert {path.name for path in tiny_folder.iterdir()} <= names
    assert [name for name in names if name.startswith("kflats")] == ["kflats_manifest.json"]
    shapes = [
        {k: (v.shape, v.dtype) for k, v in load_file(f / "model.safetensors").items()}
        for f in (made.folder, tiny_folder)
    ]
    assert shapes[0] == shapes[1]
    assert made.weight_bytes == (made.folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_factors_in_half_precision(
    tiny_model: Callable[[str], Any], tiny_tokenizer: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Tables come in the type of the model, multiplied out in it and not in the factors'."""
    model = tiny_model("bert-lm").to(dtype)
    gen = torch.Generator().manual_seed(0)
    for name in ("bert.embeddings.word_embeddings", "bert.encoder.layer.0.intermediate.dense"):
        weight = find_weight(model, name)
        n, d = weight.shape
        factors = [torch.randn(s, generator=gen).mul(0.2).to(torch.float16) for s in ((n, 4), (4, d))]
        swap_(model, weight, LowRankMatrix(*factors))
    kflats.annotate_(model)
    tiny_tokenizer.save_pretrained(tmp_path)
    want = run(model)
    made = export_dense(model, tmp_path / "dense")
    loaded = kflats.io.load_model(made.folder)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(run(loaded), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(run(model), want)  # the compressed model is as it was
    assert model.config.quantization_config["quant_method"] == "kflats"


def test_restored_layers_compute_in_the_type_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(9, 8, bias=False), nn.LayerNorm(8))
    swap_(model, find_weight(model, "0"), LowRankMatrix(torch.rand(9, 2).half(), torch.rand(2, 8).half()))
    x = torch.rand(3, 9)
    want = run(model, x)
    restore_(model)
    assert model[0].weight.dtype == torch.float32
    torch.testing.assert_close(run(model, x), want)


def test_coded_tables(tiny_model: Callable[[str], Any], tmp_path: Path) -> None:
    model = tiny_model("bert")
    integers = torch.randint(-7, 8, (300, 16), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    matrix = from_integers([integers], None, torch.rand(300) * 0.1, scales="row")
    swap_(model, find_weight(model, "embeddings.word_embeddings"), matrix)
    want = run(model)
    made = export_dense(model, tmp_path / "dense")
    torch.testing.assert_close(run(kflats.io.load_model(made.folder)), want)


def test_plain_torch_with_a_tie(tmp_path: Path) -> None:
    def build() -> nn.ModuleDict:
        made = nn.ModuleDict({"words": nn.Embedding(200, 16), "out": nn.Linear(16, 200, bias=False)})
        made["out"].weight = made["words"].weight
        return made

    model = build()
    kflats.compress_(model, {"words": kflats.Flats(k=2)}, keep="50%", quiet=True)
    made = export_dense(model, tmp_path / "dense")
    plain = build()
    assert load_model(plain, made.folder / "model.safetensors") == (set(), [])
    torch.testing.assert_close(plain["words"].weight, model["words"].matrix.dense())
    assert made.weight_bytes < 1.1 * 200 * 16 * 4


def test_a_gained_bias_is_not_lost_in_silence(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(9, 8, bias=False))
    shift = torch.arange(8.0)
    matrix = LowRankMatrix(torch.rand(9, 2), torch.rand(2, 8))
    swap_(model, find_weight(model, "0"), matrix, bias_shift=shift)
    with pytest.raises(KflatsError, match="an ordinary checkpoint cannot hold the bias of '0'"):
        export_dense(model, tmp_path / "dense")
    assert not (tmp_path / "dense").exists()
    made = export_dense(model, tmp_path / "dense", drop_biases=True)
    assert made.dropped_biases == ("0",)
    assert "outputs differ: 0" in str(made)
    assert set(load_file(made.folder / "model.safetensors")) == {"0.weight"}


def test_what_a_lost_bias_costs_is_told(tiny_tokenizer: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=len(tiny_tokenizer), num_key_value_heads=2, **sizes)
    model = transformers.LlamaModel(config).eval()
    weight = find_weight(model, "layers.0.mlp.down_proj")
    matrix = LowRankMatrix(torch.randn(24, 4), torch.randn(4, 16))
    swap_(model, weight, matrix, bias_shift=0.1 * torch.randn(16))
    kflats.annotate_(model)
    model.save_pretrained(tmp_path / "small")
    tiny_tokenizer.save_pretrained(tmp_path / "small")
    made = export_dense(tmp_path / "small", tmp_path / "dense", drop_biases=True)
    proof = kflats.compare(tmp_path / "small", made.folder, turns=1, fresh=False)
    assert made.bias_loss == pytest.approx(proof.outputs.loss, rel=1e-3)
    assert proof.outputs.loss > 0.001
    assert "outputs differ, and lose 0." in str(made)


def test_what_is_refused(small: Path, tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(KflatsError, match="dense already"):
        export_dense(tiny_folder, tmp_path / "dense")
    (tmp_path / "there").mkdir()
    with pytest.raises(KflatsError, match="exists already"):
        export_dense(small, tmp_path / "there")
    with pytest.raises(KflatsError, match="is the original"):
        export_dense(small, small)
    assert list(tmp_path.iterdir()) == [tmp_path / "there"]


def test_the_command(small: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    for options, message in (
        ([], "give one of --dense and --onnx"),
        (["--dense", "--onnx"], "give one of"),
        (["--dense", "--pooled"], "--pooled cannot be used with --dense"),
    ):
        done = runner.invoke(app, ["export", str(small), "--out", str(tmp_path / "dense"), *options])
        assert done.exit_code == 2
        assert message in done.stderr
    done = runner.invoke(app, ["export", str(small), "--dense", "--out", str(tmp_path / "dense")])
    assert done.exit_code == 0, done.output
    assert "1 of them dense again" in done.output
    assert (tmp_path / "dense" / "model.safetensors").is_file()
