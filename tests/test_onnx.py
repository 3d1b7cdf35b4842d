"""ONNX files: factors and codes as they are stored, dynamic shapes, and outputs that onnxruntime confirms."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnx
import onnxruntime
from matrices import coded, int4

import kflats
from kflats.cli.app import app
from kflats.codecs.streams import stored_bytes
from kflats.codecs.transform import from_codes
from kflats.common.errors import KflatsError
from kflats.evaluation.running import encode
from kflats.export.onnx import export_onnx
from kflats.io import load_model
from kflats.matrices.coded import CodedMatrix, from_integers
from kflats.matrices.registry import LowRankMatrix
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
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    parts = [Transformer(str(tiny_folder)), Pooling(16, pooling_mode="cls"), Normalize()]
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


def test_any_module(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).eval()
    swap_(model, find_weight(model, "0"), LowRankMatrix(torch.rand(27, 3), torch.rand(3, 8)))
    swap_(model, find_weight(model, "3"), LowRankMatrix(torch.rand(288, 2), torch.rand(2, 5)))
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


def test_what_is_refused(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goal, example = tmp_path / "model.onnx", {"x": torch.rand(2, 3)}
    with pytest.raises(KflatsError, match=r"differs by 0\.5"):
        export_onnx(Otherwise(), goal, inputs=example)
    with pytest.raises(KflatsError, match="Branches cannot be recorded"):
        export_onnx(Branches(), goal, inputs=example)
    with pytest.raises(KflatsError, match="two or more examples"):
        export_onnx(Branches(), goal, inputs={"x": torch.rand(1, 3)})
    with pytest.raises(KflatsError, match="a Branches cannot be recorded"):
        export_onnx(Branches(), goal)
    with pytest.raises(KflatsError, match="pooled is not supported with inputs"):
        export_onnx(Branches(), goal, inputs=example, pooled=True)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(KflatsError, match="is not a positive number"):
            export_onnx(Branches(), goal, inputs=example, tolerance=wrong)
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
