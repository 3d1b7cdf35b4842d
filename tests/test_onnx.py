"""ONNX files: factors and codes as they are stored, dynamic shapes, and outputs that onnxruntime confirms."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor, nn
from typer.testing import CliRunner

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import numpy as np
import onnx
import onnxruntime
from matrices import coded, int4
from sentence_modules import sentence_modules

import kflats
from kflats.cli.app import app
from kflats.codecs.streams import stored_bytes
from kflats.codecs.transform import from_codes
from kflats.common.errors import KflatsError
from kflats.evaluation.running import encode
from kflats.export.integers import LIMIT, SAFE, SCALE_POWER, in_integers_, paired_steps
from kflats.export.onnx import FILE, INTEGER_FILE, OnnxExport, _attention_by_products, export_onnx
from kflats.io import load_model
from kflats.io.atomic import differences
from kflats.matrices.coded import CodedMatrix, from_integers
from kflats.matrices.registry import LowRankMatrix
from kflats.matrices.running import RoundedMatrix, steps_to
from kflats.model.swap import swap_
from kflats.model.weights import dense_weight, find_weight
from kflats.numerics.coding.encode import transform_code
from kflats.numerics.rows import TensorRows


def initialisers(path: Path) -> dict[str, int]:
    """Name and number of values of every constant in the file."""
    found = onnx.load(path)
    assert {entry.domain for entry in found.opset_import} <= {"", "ai.onnx.ml"}  # standard operators only
    assert not found.functions
    assert b"site-packages" not in path.read_bytes()  # no paths of this machine
    assert __file__.encode() not in path.read_bytes()
    return {tensor.name: int(torch.tensor(tensor.dims).prod()) for tensor in found.graph.initializer}


def run(path: Path, *given: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    (out,) = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, given, strict=True)})
    return torch.from_numpy(out)


@pytest.mark.slow
def test_a_folder_with_flats(tiny_folder: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    kflats.compress_folder(tiny_folder, small, keep="60%", method=kflats.Flats(k=2), quiet=True)
    made = export_onnx(small, tmp_path / "model.onnx")
    assert made.inputs == ("input_ids", "attention_mask", "token_type_ids")
    assert made.outputs == ("last_hidden_state",)
    assert made.difference < 1e-5
    assert made.nbytes == made.path.stat().st_size
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    model = load_model(small).eval()
    # Lengths and batches that were never tried, and the second type of token.
    ids, types = torch.randint(0, 300, (6, 31)), torch.randint(0, 2, (6, 31))
    mask = (torch.arange(31) < torch.tensor([[31], [1], [7], [30], [2], [12]])).to(torch.int64)
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask, token_type_ids=types).last_hidden_state
    torch.testing.assert_close(run(made.path, ids, mask, types), wanted, rtol=1e-4, atol=1e-4)
    assert 300 * 16 not in initialisers(made.path).values()  # no dense table


@pytest.mark.slow
def test_attention_is_recorded_as_two_products_and_a_softmax(tiny_folder: Path, tmp_path: Path) -> None:
    """torch's operator is recorded with a test of all scores for NaN. The caller's model keeps its own attention."""
    model = transformers.AutoModel.from_pretrained(tiny_folder)
    assert model.config._attn_implementation == "sdpa"
    path = export_onnx(model, tmp_path / "model.onnx").path
    assert model.config._attn_implementation == "sdpa"
    assert (count(path, "Softmax"), count(path, "IsNaN")) == (model.config.num_hidden_layers, 0)
    broken = patch.object(torch.onnx, "export", side_effect=ValueError)
    with broken, pytest.raises(KflatsError, match="cannot be recorded"):
        export_onnx(model, tmp_path / "again.onnx")
    assert model.config._attn_implementation == "sdpa"


def test_parts_of_a_model_keep_attention_of_their_own() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.CLIPConfig(text_config=sizes, vision_config=sizes | {"image_size": 8, "patch_size": 4})
    model = transformers.CLIPModel(config)
    model.set_attn_implementation({"": "sdpa", "text_config": "sdpa", "vision_config": "flex_attention"})
    found = [model.config, model.text_model.config, model.vision_model.config]
    with _attention_by_products(model):
        assert [one._attn_implementation for one in found] == ["eager", "eager", "flex_attention"]
    assert [one._attn_implementation for one in found] == ["sdpa", "sdpa", "flex_attention"]


@pytest.mark.slow
def test_a_model_in_another_form_is_recorded_as_its_codes_are(tmp_path: Path) -> None:
    """It was refused, because its own outputs were those of rounded inputs."""
    model = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 32)).requires_grad_(False)
    recipe = kflats.Recipe(kflats.KeepDense(), codec=kflats.Integer(4))
    kflats.compress_(model, {"linear": recipe}, keep="20%", quiet=True)
    x = torch.randn(6, 48)
    wanted = model(x)
    kflats.run_as_(model, "int8")
    assert export_onnx(model, tmp_path / "model.onnx", inputs={"input": torch.randn(2, 48)}).difference < 1e-5
    torch.testing.assert_close(run(tmp_path / "model.onnx", x), wanted, rtol=1e-4, atol=1e-4)
    assert {layer.run_form for layer in (model[0], model[2])} == {"int8"}


@pytest.mark.slow
def test_coded_table_and_layers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(300, 16), nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 7)).eval()
    table = coded(300, 16)
    swap_(model, find_weight(model, "0"), table)
    swap_(model, find_weight(model, "1"), int4(16, 24))
    swap_(model, find_weight(model, "3"), coded(7, 24), matrix_rows="out_features")
    made = export_onnx(model, tmp_path / "model.onnx", inputs={"input": torch.randint(0, 300, (2, 7))})
    assert made.difference < 1e-5
    values = initialisers(made.path)
    assert 300 * 16 not in values.values()
    assert table.get_buffer("codes").numel() in values.values()
    ids = torch.randint(0, 300, (5, 40))
    with torch.no_grad():
        torch.testing.assert_close(run(made.path, ids), model(ids), rtol=1e-4, atol=1e-4)


def narrow(n: int, d: int) -> CodedMatrix:
    """Codes of three bits on two flats: none lies in more than two bytes."""
    gen = torch.Generator().manual_seed(0)
    parts = [torch.randint(-4, 4, (rows, 5), generator=gen, dtype=torch.int16) for rows in (n // 2, n - n // 2)]
    basis = torch.randint(-9, 9, (10, d), generator=gen).to(torch.int8)
    labels, flats = (torch.arange(n) % 2 == 0).int(), ((1, 5), (1, 5))
    return from_integers(
        parts, labels, torch.tensor([0.1, 0.2]), basis=basis, basis_scale=torch.full((10,), 0.1), flats=flats
    )


@pytest.mark.slow
def test_flats_of_codes_as_table_and_layer(tmp_path: Path) -> None:
    # So large that nothing of it is folded into the file.
    model = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 6000), nn.Linear(6000, 8)).eval()
    swap_(model, find_weight(model, "0"), narrow(40, 8))
    swap_(model, find_weight(model, "1"), narrow(6000, 8), matrix_rows="out_features")
    swap_(model, find_weight(model, "2"), narrow(6000, 8))
    made = export_onnx(model, tmp_path / "model.onnx", inputs={"input": torch.randint(0, 40, (2, 7))})
    ids = torch.randint(0, 40, (5, 20))
    with torch.no_grad():
        wanted = model(ids)
    assert float((run(made.path, ids) - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())


@pytest.mark.slow
def test_files_hold_codes_and_not_what_they_decode_to(tmp_path: Path) -> None:
    """Beside the codes: 4 bytes for the place of each row, some a column, and a graph that does not grow with them."""
    gen = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Embedding(6000, 128), nn.Linear(128, 256))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(6000, 128, generator=gen) * 0.9 ** torch.arange(128))
    rows = TensorRows(dense_weight(model, find_weight(model, "0")))
    table = from_codes(transform_code(rows, 6000 * 128 // 8, lambda code: stored_bytes(from_codes(code))))
    layer = int4(128, 256)
    swap_(model, find_weight(model, "0"), table)
    swap_(model, find_weight(model, "1"), layer)
    made = export_onnx(model, tmp_path / "table.onnx", inputs={"input": torch.randint(0, 6000, (2, 7))})
    assert made.difference < 1e-5
    derived = 4 * 6000 + 4 * 128 + table.fields.numel() * 4 + layer.fields.numel() * 4
    assert table.nbytes + layer.nbytes < made.nbytes < table.nbytes + layer.nbytes + derived + 30_000
    assert made.notes == ()
    assert f"{made.nbytes:,} bytes" in str(made)


@pytest.mark.slow
def test_sentence_transformers_with_their_own_pooling(tiny_folder: Path, tmp_path: Path) -> None:
    modules = sentence_modules()
    from sentence_transformers import SentenceTransformer

    parts = [modules.Transformer(str(tiny_folder)), modules.Pooling(16, pooling_mode="cls"), modules.Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save(str(tmp_path / "folder"))
    made = export_onnx(tmp_path / "folder", tmp_path / "model.onnx", pooled=True)
    model = SentenceTransformer(str(tmp_path / "folder"), device="cpu")
    texts = ["the word1 of word2", "word9"]
    given = model.tokenizer(texts, padding=True, return_tensors="pt")
    out = run(made.path, given["input_ids"], given["attention_mask"])
    torch.testing.assert_close(out, torch.from_numpy(model.encode(texts)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # recording a decoder's masks
def test_decoders(tiny_model: Callable[[str], Any], tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    kflats.compress_(model, keep="60%", quiet=True)
    made = export_onnx(model, tmp_path / "model.onnx")
    assert made.outputs == ("logits",)
    ids = torch.randint(0, 300, (2, 19))
    with torch.no_grad():
        wanted = model(ids).logits
    torch.testing.assert_close(run(made.path, ids, torch.ones_like(ids)), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_half_precision_is_recorded_in_float32(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(300, 16), nn.Linear(16, 8)).half()
    swap_(model, find_weight(model, "0"), coded(300, 16).half())
    made = export_onnx(model, tmp_path / "model.onnx", inputs={"input": torch.randint(0, 300, (2, 7))})
    assert any("recorded in float32: the model computes in float16" in note for note in made.notes)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert 300 * 16 not in initialisers(made.path).values()
    ids = torch.randint(0, 300, (3, 9))
    with torch.no_grad():
        torch.testing.assert_close(run(made.path, ids), model.float()(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", ["pair", "codes"])
def test_any_module(tmp_path: Path, kernel: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).eval()
    swap_(model, find_weight(model, "0"), LowRankMatrix(torch.rand(27, 3), torch.rand(3, 8)))
    swap_(model, find_weight(model, "3"), LowRankMatrix(torch.rand(288, 2), torch.rand(2, 5)))
    if kernel == "codes":
        model.insert(0, nn.Conv2d(3, 3, 3, padding=1))
        swap_(model, find_weight(model, "0"), coded(27, 3))
    made = export_onnx(model, tmp_path / "deep" / "model.onnx", inputs={"input": torch.rand(2, 3, 8, 8)})
    x = torch.rand(7, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(run(made.path, x), model(x), rtol=1e-4, atol=1e-4)


class Otherwise(nn.Module):
    """Computes something else while it is recorded."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 if torch.compiler.is_compiling() else x


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if float(x.sum()) > 0 else x


def test_what_is_refused(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    goal, example = tmp_path / "model.onnx", {"x": torch.rand(2, 3)}
    with pytest.raises(KflatsError, match=r"differs by 0\.5"):
        export_onnx(Otherwise(), goal, inputs=example)
    with pytest.raises(KflatsError, match="Branches cannot be recorded"):
        export_onnx(Branches(), goal, inputs=example)
    assert "def forward" not in "".join(
        capfd.readouterr()
    )  # torch prints the graph up to the step that it cannot record
    for few in ({"x": torch.rand(1, 3)}, {}, {0: torch.rand(2, 3)}, 3, [torch.rand(2, 3)]):
        with pytest.raises(KflatsError, match="two or more examples"):
            export_onnx(Branches(), goal, inputs=few)  # type: ignore[arg-type]
    with pytest.raises(KflatsError, match="a Branches cannot be recorded"):
        export_onnx(Branches(), goal)
    with pytest.raises(KflatsError, match="pooled is not supported with inputs"):
        export_onnx(Branches(), goal, inputs=example, pooled=True)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(KflatsError, match="is not a positive number"):
            export_onnx(Branches(), goal, inputs=example, tolerance=wrong)
    sees = transformers.ViTModel(transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    with pytest.raises(KflatsError, match="pooled is not supported with ViTModel, which reads images"):
        export_onnx(sees, goal, pooled=True)
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 20, "num_mel_bins": 4}
    heads = {"encoder_attention_heads": 1, "decoder_attention_heads": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    hears = transformers.WhisperModel(transformers.WhisperConfig(**sizes, **heads, **tokens))
    for pooled in (False, True):  # the way out is the same, and none that is refused
        with pytest.raises(KflatsError, match=r"WhisperModel cannot be recorded as one graph.*Try: an exporter"):
            export_onnx(hears, goal, pooled=pooled)
    assert list(tmp_path.iterdir()) == []
    goal.write_text("old")
    with pytest.raises(KflatsError, match="exists already"):
        export_onnx(tiny_folder, goal)
    assert goal.read_text() == "old"
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(KflatsError, match=r"needs onnxruntime.*kflats\[onnx\]"):
        export_onnx(tiny_folder, tmp_path / "other.onnx")


@pytest.mark.slow
def test_encoder_decoders_are_exported_as_encoders(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    model = transformers.T5Model(transformers.T5Config(vocab_size=99, decoder_start_token_id=0, **sizes)).eval()
    with pytest.raises(KflatsError, match="cannot be recorded as one graph"):
        export_onnx(model, tmp_path / "model.onnx")
    assert export_onnx(model, tmp_path / "model.onnx", pooled=True).outputs == ("sentence_embedding",)


@pytest.mark.slow
def test_the_command_pools_as_the_library_judges(tiny_folder: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    goal = tmp_path / "model.onnx"
    done = CliRunner().invoke(app, ["export", str(tiny_folder), "--onnx", "--pooled", "--out", str(goal)])
    assert done.exit_code == 0, done.output
    assert "input_ids, attention_mask -> sentence_embedding" in done.output
    texts = ["the word1 of word2", "word9", "a b c word30 word31"]
    given = tiny_tokenizer(texts, padding=True, return_tensors="pt")
    out = run(goal, given["input_ids"], given["attention_mask"])
    torch.testing.assert_close(out, encode(load_model(tiny_folder), tiny_tokenizer, texts), rtol=1e-4, atol=1e-5)


# Integers ----------------------------------------------------------------------------------------


def with_feedback_steps(n: int, d: int) -> CodedMatrix:
    """Codes with a step for each column, as error feedback makes them."""
    gen = torch.Generator().manual_seed(3)
    integers = (torch.randn(n, d, generator=gen) * 3).round().to(torch.int16)
    steps = torch.randint(-20, 21, (d,), generator=gen).to(torch.int8)
    return from_integers([integers], None, torch.rand(n, generator=gen) + 0.1, scales="row", column_steps=steps)


def in_integers(model: nn.Module, folder: Path, given: Tensor, **others: Any) -> OnnxExport:
    return export_onnx(model.eval(), folder / "model.onnx", inputs={"x": given}, int8=True, **others)


class Reads(nn.Sequential):
    """A sequence whose input has the name x."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out


def factors(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """The integers and the zero point of the inputs of each MatMulInteger, without outputs of zeros at the end."""
    graph, found = onnx.load(path).graph, []
    values = {tensor.name: onnx.numpy_helper.to_array(tensor).copy() for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "MatMulInteger":
            numbers = values[node.input[1]]
            outputs = numbers.shape[1]
            assert outputs <= 16 or outputs % 16 == 0, "onnxruntime 1.21 to 1.24 is wrong on CPUs with AMX"
            found.append((numbers[:, : 1 + int(numbers.any(0).nonzero()[0].max())], values[node.input[2]]))
    return found


def count(path: Path, kind: str) -> int:
    return sum(node.op_type == kind for node in onnx.load(path).graph.node)


def optimized(path: Path) -> list[str]:
    """The operators that onnxruntime makes of a file on the CPU."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path.with_suffix(".optimized"))
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]


def test_dense_layers_multiply_exact_integers(tmp_path: Path) -> None:
    """Inputs that are whole multiples of a token's step lose nothing; neither do weights on the grid of an output."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    gen = torch.Generator().manual_seed(0)
    grid = torch.randint(-63, 64, (24, 16), generator=gen).float()
    grid[:, 0], grid[:, 1] = 100, 27  # each output reaches the limit of two neighbours
    model = Reads(nn.Linear(16, 24), conv1d(1, 24), nn.Linear(1, 3))
    with torch.no_grad():
        model[0].weight.copy_(grid * torch.linspace(0.01, 4, 24).unsqueeze(1))
    given = torch.randint(-127, 128, (2, 5, 16), generator=gen).float()
    given[..., 3], given[0, 0] = 127, 0
    single = Reads(model[0])
    made = in_integers(single, tmp_path, given * 0.5)
    ((numbers, middle),) = factors(made.path)
    assert torch.equal(torch.from_numpy(numbers).float(), grid.T)
    assert numbers.dtype == np.int8
    assert middle.dtype == np.uint8
    assert int(middle) == 128
    with torch.no_grad():
        wanted = single(given * 0.5)
    torch.testing.assert_close(run(made.path, given * 0.5), wanted, rtol=1e-5, atol=1e-2)
    assert made.cosine == pytest.approx(1, abs=1e-5)
    assert made.notes == ()
    chain = in_integers(model, tmp_path / "chain", given)  # Conv1D, one output, one input
    assert [numbers.shape for numbers, _ in factors(chain.path)] == [(16, 24), (24, 1), (1, 3)]
    with torch.no_grad():
        wanted = model(given)
    assert float((run(chain.path, given) - wanted).norm()) < 0.02 * float(wanted.norm())
    assert all(isinstance(layer, nn.Linear | conv1d) for layer in model)  # the model given is as it was


def test_layers_called_by_name_multiply_integers(tmp_path: Path) -> None:
    class Named(Reads):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self[0](input=x)
            return out

    x, model = torch.randn(4, 16), Named(nn.Linear(16, 24))
    made = in_integers(model, tmp_path, x)
    assert len(factors(made.path)) == 1
    with torch.no_grad():
        assert float((run(made.path, x) - model(x)).norm()) < 0.02 * float(model(x).norm())


def test_codes_give_integers_whose_columns_are_more_even(tmp_path: Path) -> None:
    matrix = with_feedback_steps(20, 48)
    model = Reads(nn.Linear(48, 20))
    swap_(model, find_weight(model, "0"), matrix, matrix_rows="out_features")
    x = torch.randn(3, 4, 48)
    made = in_integers(model, tmp_path, x)
    rows, scales = matrix.scaled(transposed=True, power=SCALE_POWER)
    steps = matrix.tensors()["column_steps"].float() / 8  # eighths of an octave
    torch.testing.assert_close(scales, torch.exp2(0.7 * steps))
    torch.testing.assert_close(matrix.scaled(transposed=True)[1], torch.exp2(0.5 * steps))
    product = RoundedMatrix.of(rows, scales, paired_steps)
    ((numbers, _),) = factors(made.path)
    assert torch.equal(torch.from_numpy(numbers), product.numbers)
    assert float(scales.max() / scales.min()) > 2  # of the steps, not ones
    with torch.no_grad():
        wanted = model(x)
    out = run(made.path, x)
    assert float((out - wanted).norm()) < 0.02 * float(wanted.norm())
    inner = x * scales
    sizes = inner.abs().amax(-1, keepdim=True) / LIMIT
    ours = ((inner / sizes).round() @ product.numbers.float()) * sizes * product.steps + model[0].bias.detach()
    assert float((out - ours).norm()) < 2e-3 * float(ours.norm())
    assert made.cosine is not None
    assert made.cosine > 0.999
    assert f"cosine to the model in float: {made.cosine:.4f}" in str(made)


def pairs_limited(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(m, k) uint8 times (k, n) int8 as x86 kernels without VNNI units multiply: sums of two limited to 16 bits."""
    each = left.astype(np.int64)[:, :, None] * right.astype(np.int64)[None]
    pairs = each.reshape(len(left), -1, 2, right.shape[1]).sum(2)
    return pairs.clip(-(2**15), 2**15 - 1).sum(1)


def test_no_sum_of_two_products_leaves_16_bits(tmp_path: Path) -> None:
    """The largest inputs meet the largest integers of a file, of each sign: by old CPUs' rules, and on this one."""
    model = Reads(nn.Linear(65, 10))
    halves = torch.tensor([63.5, 63.5, *range(63)])  # two neighbours that are rounded up
    turned = torch.tensor([1.0, -1.0]).repeat(33)[:65]
    with torch.no_grad():
        model[0].weight.copy_(
            torch.stack([torch.ones(65), -torch.ones(65), halves, -halves, turned, *torch.randn(5, 65)])
        )
    made = in_integers(model, tmp_path, torch.randn(2, 65))
    ((numbers, middle),) = factors(made.path)
    numbers = np.pad(numbers, ((0, 1), (0, 0)))  # as those kernels do
    largest = np.full((3, 66), LIMIT + int(middle), np.uint8)
    exact = largest.astype(np.int64) @ numbers.astype(np.int64)
    assert np.array_equal(pairs_limited(largest, numbers), exact)
    assert int(numbers[:, 2].max()) == 64  # sums of 128
    assert set(np.abs(numbers[:65, 4].astype(int))) == {LIMIT}  # two signs leave the whole range
    too_large = np.where(numbers > 0, LIMIT, -LIMIT).astype(np.int8)  # without the rule, such kernels cut sums off
    assert not np.array_equal(pairs_limited(largest, too_large), largest.astype(np.int64) @ too_large.astype(np.int64))
    out = run(made.path, torch.full((3, 65), 5.0))
    with torch.no_grad():
        torch.testing.assert_close(out[:, :2], model(torch.full((3, 65), 5.0))[:, :2], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("seed", range(10))
def test_neighbours_of_one_sign_sum_to_128_and_lose_no_more_than_smaller_integers(seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    inputs = 7 + seed
    rows = torch.randn(40, inputs, generator=gen).abs().pow(3) * torch.randn(40, 1, generator=gen).exp()
    rows = torch.where(torch.rand(rows.shape, generator=gen) < 0.5 + 0.05 * seed, rows, -rows)
    rows[0], rows[1], rows[2] = 0.7, 0.0, 1e-22
    paired = RoundedMatrix.of(rows, torch.ones(inputs), paired_steps)
    numbers = paired.numbers.to(torch.int64)
    left = numbers[: inputs // 2 * 2].view(-1, 2, 40)
    assert int(left.clamp_min(0).sum(1).max()) <= 128
    assert int(left.clamp_max(0).sum(1).min()) >= -128
    assert int(numbers.abs().max()) <= LIMIT
    safe = RoundedMatrix.of(rows, torch.ones(inputs), partial(steps_to, SAFE))
    lost, before = ((rows - (of.numbers.float() * of.steps).T).square().sum(1).double() for of in (paired, safe))
    assert bool((lost <= before * (1 + 1e-5) + 1e-12).all())
    assert float(lost.sum()) < 0.8 * float(before.sum())
    assert float(lost[:2].sum()) < 1e-12
    assert torch.equal(paired.numbers[:, 2], torch.full((inputs,), SAFE, dtype=torch.int8))


@pytest.mark.slow
def test_tokens_that_are_not_finite_stay_so_and_alone(tmp_path: Path) -> None:
    model = Reads(nn.Linear(33, 5))
    made = in_integers(model, tmp_path, torch.randn(4, 33))
    x = torch.randn(4, 33)
    for value in (float("nan"), float("inf"), -float("inf")):
        for place in (0, 16, 32):  # the runtime's maximum sees NaN at some places and not at others
            broken = x.clone()
            broken[1, place] = value
            out = run(made.path, broken)
            assert not bool(torch.isfinite(out[1]).any()), (value, place)
            assert torch.equal(out[[0, 2, 3]], run(made.path, x)[[0, 2, 3]])
    assert torch.equal(run(made.path, torch.zeros(1, 33)), model[0].bias.detach().unsqueeze(0))
    with torch.no_grad():
        model[0].weight[2, 1] = float("nan")
    with pytest.raises(KflatsError, match="'0' holds NaN or infinity"):
        in_integers(model, tmp_path / "other", x)


class Heads(nn.Module):
    """Two layers that read one tensor, and one that reads another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 24), nn.Linear(32, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.tanh(self.a(x)) + self.b(x))
        return out


def test_what_several_layers_read_is_rounded_once(tmp_path: Path) -> None:
    model = Heads()
    for name in ("a", "b"):
        matrix = with_feedback_steps(24, 32)
        with torch.no_grad():
            matrix.get_buffer("column_steps").add_(torch.randint(-3, 4, (32,)).to(torch.int8))
        swap_(model, find_weight(model, name), matrix, matrix_rows="out_features")
    x = torch.randn(3, 32)
    made = in_integers(model, tmp_path, x)
    assert [numbers.shape for numbers, _ in factors(made.path)] == [(32, 24), (32, 24), (24, 8)]
    assert count(made.path, "QuantizeLinear") == 2
    with torch.no_grad():
        assert float((run(made.path, x) - model(x)).norm()) < 0.03 * float(model(x).norm())


@pytest.mark.slow
def test_the_runtime_scales_sums_of_integers_as_it_writes_them(tmp_path: Path) -> None:
    model = Reads(nn.Linear(16, 24), nn.Linear(24, 17), nn.Linear(17, 3))  # 17 outputs are cut from 32
    made = in_integers(model, tmp_path, torch.randn(2, 3, 16))
    kinds = optimized(made.path)
    assert kinds.count("MatMulIntegerToFloat") == 3
    assert "MatMulInteger" not in kinds
    assert kinds.count("Size") == 1  # of the factor that it cannot compute beforehand


@pytest.mark.slow
def test_the_runtime_computes_gelu_in_one_pass(tmp_path: Path) -> None:
    model, x = Reads(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 5), nn.GELU("tanh")), torch.randn(3, 4, 8)
    made = export_onnx(model, tmp_path / "model.onnx", inputs={"x": x})
    kinds = optimized(made.path)
    assert [kind for kind in kinds if "Gelu" in kind] == ["Gelu"]  # BiasGelu takes longer than the two alone
    assert kinds.count("Tanh") == 1  # of the other kind, which it computes step by step
    with torch.no_grad():
        torch.testing.assert_close(run(made.path, x), model(x))


@pytest.mark.slow
def test_sums_of_integers_stay_as_they_are(tmp_path: Path) -> None:
    """ONNX has another operator for sums of floats than for those of integers."""

    class OfIds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, ids: Tensor) -> Tensor:
            return torch.erf((ids + ids).float() / 7) * torch.erf((ids + 1) / 9.0) * self.scale

    model, ids = OfIds(), torch.arange(12).view(3, 4)
    made = export_onnx(model, tmp_path / "model.onnx", inputs={"ids": ids})
    with torch.no_grad():
        torch.testing.assert_close(run(made.path, ids), model(ids))


class Writes(Heads):
    """Heads that write into what they read, or into what a layer gave."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.a, self.b, self.what = nn.Linear(32, 24, bias=False), nn.Linear(32, 24, bias=False), what

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        first: Tensor = self.a(x)
        if self.what == "input":
            x.add_(1.5)
        elif self.what == "output":
            first.relu_()
            return first - self.a(x)
        else:
            return (first.view(-1, 8) * self.b(x).view(-1, 8)).view(-1, 24)
        out: Tensor = first + self.b(x)
        return out


@pytest.mark.parametrize("what", ["input", *(pytest.param(one, marks=pytest.mark.slow) for one in ("output", "view"))])
def test_layers_that_read_one_tensor_may_write_in_place(what: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Writes(what), torch.randn(3, 32)
    made = in_integers(model, tmp_path, x)
    with torch.no_grad():
        assert float((run(made.path, x) - model(x)).norm()) < 0.04 * float(model(x).norm())


class Wide(nn.Module):
    """GELU in another type than the model's."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.layer, self.approximate = nn.Linear(8, 8), approximate

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.layer(x).double(), approximate=self.approximate).float()


@pytest.mark.slow
def test_gelu_in_double_precision(tmp_path: Path) -> None:
    model, x = Wide("tanh"), torch.randn(3, 8)
    made = export_onnx(model, tmp_path / "model.onnx", inputs={"x": x})
    with torch.no_grad():
        torch.testing.assert_close(run(made.path, x), model(x))


class Normed(nn.Module):
    """A layer around which its input is added, and normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x) + x)
        return out


@pytest.mark.slow
def test_the_runtime_does_not_fuse_sums_with_norms(tmp_path: Path) -> None:
    model, x = Normed(), torch.randn(2, 3, 16)
    made = export_onnx(model, tmp_path / "model.onnx", inputs={"x": x})
    kinds = optimized(made.path)
    assert "SkipLayerNormalization" not in kinds
    assert kinds.count("LayerNormalization") == 1
    with torch.no_grad():
        torch.testing.assert_close(run(made.path, x), model(x))


def test_what_stays_in_float_is_said(tmp_path: Path) -> None:
    model = Reads(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(144, 60), nn.Linear(60, 6)).half()
    swap_(model, find_weight(model, "1"), coded(4, 4).half())
    swap_(model, find_weight(model, "3"), LowRankMatrix(torch.randn(144, 2), torch.randn(2, 60)))
    made = in_integers(model, tmp_path, torch.randn(2, 3, 8, 8).half())
    assert made.notes == (
        "recorded in float32: the model computes in float16",
        "layers that multiply floats: 3 (3, 0, 1)",
    )
    assert [numbers.shape for numbers, _ in factors(made.path)] == [(60, 6)]


@pytest.mark.slow
def test_graphs_of_codes_do_not_grow_with_their_classes(tmp_path: Path) -> None:
    """A graph that decodes class by class takes minutes to record."""
    sizes = []
    for classes in (2, 9):
        model = Reads(nn.Linear(40, 100))
        swap_(model, find_weight(model, "0"), coded(100, 40, classes), matrix_rows="out_features")
        x = torch.randn(2, 40)
        made = export_onnx(model.eval(), tmp_path / f"{classes}.onnx", inputs={"x": x})
        sizes.append(len(onnx.load(made.path).graph.node))
        with torch.no_grad():
            torch.testing.assert_close(run(made.path, x), model(x), rtol=1e-4, atol=1e-4)
    assert sizes[1] <= sizes[0] + 3


def test_tied_heads_are_rounded_once_and_lookups_to_127(tiny_model: Callable[[str], Any]) -> None:
    model = tiny_model("gpt2")
    rows = model.transformer.wte.weight.detach().clone()
    ids = torch.arange(9).unsqueeze(0)
    with torch.no_grad():
        in_integers_(model, lambda: model(ids))
    head = model.lm_head.recorded
    product = RoundedMatrix.of(rows, torch.ones(rows.shape[1]), paired_steps)
    assert torch.equal(head.joint.products[head.index].numbers, product.numbers)
    steps = steps_to(LIMIT, rows).unsqueeze(1)
    torch.testing.assert_close(model.transformer.wte.matrix.dense(), (rows / steps).round() * steps)


@pytest.mark.slow  # recording a decoder's masks
def test_tied_heads_and_large_tables_in_integers(tiny_model: Callable[[str], Any], tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    made = export_onnx(model, tmp_path / "model.onnx", int8=True)
    values = onnx.load(made.path).graph.initializer
    # Neither the table nor any layer is there in float; positions are a small table.
    assert all(v.data_type != onnx.TensorProto.FLOAT or np.prod(v.dims) <= 32 * 16 for v in values)
    assert count(made.path, "MatMulInteger") == 5
    ids = torch.randint(0, 300, (2, 9))
    out = run(made.path, ids, torch.ones_like(ids))
    with torch.no_grad():
        wanted = model(ids).logits
    assert float(torch.nn.functional.cosine_similarity(out, wanted, dim=-1).mean()) > 0.995


@pytest.mark.slow
def test_a_folder_for_programs_that_run_onnx(tiny_folder: Path, tmp_path: Path, capfd: Any) -> None:
    small, out = tmp_path / "small", tmp_path / "out"
    kflats.compress_folder(tiny_folder, small, keep="60%", quiet=True)
    assert CliRunner().invoke(app, ["report", str(small)]).exit_code == 0
    (small / "modules.json").write_text(
        json.dumps([{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}])
    )
    capfd.readouterr()
    done = CliRunner().invoke(app, ["export", str(small), "--onnx", "--int8", "--out", str(out)])
    assert done.exit_code == 0, done.output
    printed = capfd.readouterr()
    assert len((done.output + printed.out + printed.err).splitlines()) <= 4  # no warnings of the exporter
    assert differences(out) == []
    assert "quantization_config" in json.loads((small / "config.json").read_text())
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["model_type"] == "bert"
    assert {"tokenizer.json", "tokenizer_config.json", "modules.json"} <= {path.name for path in out.iterdir()}
    assert not list(out.rglob("*.safetensors"))
    assert (small / "report" / "report.html").is_file()
    assert not (out / "report").exists()
    with pytest.raises(KflatsError, match=r"programs that run ONNX: its weights are in onnx/model.onnx"):
        load_model(out)
    assert (out / FILE).read_bytes() == (out / INTEGER_FILE).read_bytes()
    assert (out / FILE).stat().st_mode & 0o777 == (out / "config.json").stat().st_mode & 0o777
    ids = torch.randint(0, 300, (2, 9))
    found = run(out / INTEGER_FILE, ids, torch.ones_like(ids), torch.zeros_like(ids))
    with torch.no_grad():
        wanted = load_model(small).eval()(ids).last_hidden_state
    assert float(torch.nn.functional.cosine_similarity(found, wanted, dim=-1).mean()) > 0.99
    with pytest.raises(KflatsError, match="exists already"):
        export_onnx(small, out)
    floats = export_onnx(small, out, force=True)
    assert floats.difference < 1e-4
    assert floats.cosine is None
    assert [path.name for path in (out / "onnx").iterdir()] == ["model.onnx"]


def test_folders_that_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    with pytest.raises(KflatsError, match="of a model object"):
        export_onnx(nn.Linear(2, 2), out)
    with pytest.raises(KflatsError, match="with pooling inside"):
        export_onnx(tiny_folder, out, pooled=True)
    for more, why in ((["--onnx", "--pooled"], "a folder"), (["--dense", "--int8"], "--dense")):
        done = CliRunner().invoke(app, ["export", str(tiny_folder), *more, "--out", out])
        assert done.exit_code != 0
        assert why in done.output
    assert not os.path.exists(out)
