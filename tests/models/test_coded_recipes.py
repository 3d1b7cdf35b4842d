"""Recipes whose codec stores integers, from folder to folder: decoders, bfloat16, shards, sentence models, commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from sentence_modules import sentence_modules
from table import slow
from torch import Tensor
from typer.testing import CliRunner

pytest.importorskip("constriction")

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
)

import kflats
from kflats import SVD, Integer, KeepDense, Recipe, Transform
from kflats.cli.app import app
from kflats.evaluation.outputs import weight_file_bytes
from kflats.io import load_model
from kflats.matrices.registry import CodedMatrix
from kflats.model.weights import factored_layers
from kflats.report.report import Report

IDS = torch.tensor([[2, 9, 150, 7, 3], [2, 120, 6, 299, 3]])
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40}
RECIPES = {
    "transform": (Recipe(SVD(), codec=Transform()), "35%", 0.95),
    "int8": (Recipe(KeepDense(), codec=Integer(bits=8)), "40%", 0.9999),
    "int4": (Recipe(KeepDense(), codec=Integer(bits=4, group=16)), "30%", 0.98),
}
BERT = ("embeddings.word_embeddings", "encoder.layer.0.intermediate.dense")
each = pytest.mark.parametrize(
    "kind", ["transform", *(pytest.param(k, marks=slow) for k in RECIPES if k != "transform")]
)


def coded(model: Any) -> dict[str, CodedMatrix]:
    """Layers that compute with codes, by name."""
    return {name: layer.matrix for name, layer in factored_layers(model) if isinstance(layer.matrix, CodedMatrix)}


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1).mean())


def compressed(source: Path, out: Path, kind: str, weights: tuple[str, ...], scale: float = 1.0) -> Report:
    recipe, budget, _ = RECIPES[kind]
    budget = f"{scale * float(budget[:-1]):g}%"
    report = kflats.compress_folder(source, out, keep=budget, method=recipe, weights=weights, quiet=True)
    assert report.bytes_after <= float(budget[:-1]) / 100 * report.bytes_before
    assert weight_file_bytes(out) < weight_file_bytes(source)
    return report


def streams(folder: Path) -> int:
    """How many tensors of the weight files are entropy-coded streams."""
    found = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found += sum(file.get_slice(key).get_dtype() == "U8" for key in file.keys())  # noqa: SIM118
    return found


@pytest.mark.slow
@each
def test_a_decoder_with_a_tied_head(
    kind: str, tiny_model: Callable[[str], Any], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    original = tiny_model("gpt2")
    original.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    report = compressed(tmp_path / "model", tmp_path / "small", kind, ("embeddings", "linear"), scale=2)
    assert {w.stored == "integers" for w in report.weights if not w.dense} == {True}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    table = loaded.get_input_embeddings().matrix
    assert loaded.get_output_embeddings().matrix is table
    assert isinstance(table, CodedMatrix)
    layers = coded(loaded)
    assert any("c_attn" in name for name in layers)  # Conv1D, whose weight is the matrix itself
    with torch.no_grad():
        ours, wanted = loaded(IDS).logits, original(IDS).logits
    assert cosine(ours, wanted) > RECIPES[kind][2]
    # As with the same numbers in dense layers, and the same after another journey.
    dense = kflats.export_dense(tmp_path / "small", tmp_path / "dense")
    assert len(dense.weights) == len(layers) - 1  # the head shares the table
    with torch.no_grad():
        torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(dense.folder)(IDS).logits, ours)
    loaded.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "again")(IDS).logits, ours)
    made = loaded.generate(IDS[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert made.shape == (1, 9)


@each
def test_half_precision_stays_what_it_was(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = BertModel(BertConfig(vocab_size=300, **SIZES)).to(torch.bfloat16).eval()
    original.save_pretrained(tmp_path / "model")
    report = compressed(tmp_path / "model", tmp_path / "small", kind, BERT, scale=2)
    assert {w.dtype for w in report.weights} == {"bfloat16"}
    loaded = AutoModel.from_pretrained(tmp_path / "small")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert coded(loaded)
    with torch.no_grad():
        ours, wanted = loaded(IDS).last_hidden_state, original(IDS).last_hidden_state
    assert ours.dtype == torch.bfloat16
    assert cosine(ours, wanted) > RECIPES[kind][2]
    wide = AutoModel.from_pretrained(tmp_path / "small", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(wide(IDS).last_hidden_state, ours.float(), rtol=0.1, atol=0.1)
    dense = AutoModel.from_pretrained(kflats.export_dense(tmp_path / "small", tmp_path / "dense").folder)
    assert {p.dtype for p in dense.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        torch.testing.assert_close(dense(IDS).last_hidden_state, ours, rtol=0.1, atol=0.1)


@pytest.mark.slow
@each
def test_shards(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = BertModel(BertConfig(vocab_size=300, **SIZES)).eval()
    original.save_pretrained(tmp_path / "model", max_shard_size="30KB")
    original.save_pretrained(tmp_path / "whole")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    compressed(tmp_path / "model", tmp_path / "small", kind, BERT)
    compressed(tmp_path / "whole", tmp_path / "same", kind, BERT)
    loaded, same = (AutoModel.from_pretrained(tmp_path / name) for name in ("small", "same"))
    assert streams(tmp_path / "small") >= len(coded(loaded)) > 1
    assert [path.name for path in (tmp_path / "small").glob("model*")] == ["model.safetensors"]  # no index of shards
    with torch.no_grad():
        ours = loaded(IDS).last_hidden_state
        assert torch.equal(ours, same(IDS).last_hidden_state)
        assert cosine(ours, original(IDS).last_hidden_state) > RECIPES[kind][2]
    # Cut into shards again, and compressed no second time.
    loaded.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    with torch.no_grad():
        assert torch.equal(AutoModel.from_pretrained(tmp_path / "again")(IDS).last_hidden_state, ours)


def test_sentence_models(tiny_tokenizer: Any, tmp_path: Path) -> None:
    modules = sentence_modules()
    from sentence_transformers import SentenceTransformer

    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=300, **SIZES)).save_pretrained(tmp_path / "bert")
    tiny_tokenizer.save_pretrained(tmp_path / "bert")
    parts = [modules.Transformer(str(tmp_path / "bert")), modules.Pooling(32, pooling_mode="mean")]
    original = SentenceTransformer(modules=parts, device="cpu")
    original.save(str(tmp_path / "model"))
    texts = ["the word1 of word2", "word9 word10", "a b c"]
    for kind in RECIPES:
        compressed(tmp_path / "model", tmp_path / kind, kind, BERT)
        loaded = SentenceTransformer(str(tmp_path / kind), device="cpu")
        ours = torch.from_numpy(loaded.encode(texts))
        assert coded(loaded)
        assert cosine(ours, torch.from_numpy(original.encode(texts))) > RECIPES[kind][2]
        loaded.save(str(tmp_path / f"{kind}-again"))
        again = SentenceTransformer(str(tmp_path / f"{kind}-again"), device="cpu")
        assert torch.equal(torch.from_numpy(again.encode(texts)), ours)


# Commands ---------------------------------------------------------------------------------------


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """``model`` classifies sentences, ``data`` is its task, ``small`` holds its table and a layer as codes."""
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(vocab_size=300, num_labels=2, **SIZES)).save_pretrained(folder / "model")
    tiny_tokenizer.save_pretrained(folder / "model")
    (folder / "data").mkdir()
    lines = ["sentence1\tsentence2\tlabel"]
    lines += [f"word{i} word{i + 1} {'the' if i % 2 else 'of'}\t\t{i % 2}" for i in range(40)]
    for split in ("train", "dev"):
        (folder / "data" / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    weights = [word for name in BERT for word in ("--weights", f"bert.{name}")]
    recipe = ("--method", "svd", "--codec", "transform", "--importance", "uniform", "--keep", "30%")
    run("compress", folder / "model", *weights, *recipe, "--no-proof", "--quiet", "--out", folder / "small")
    assert coded(load_model(folder / "small"))
    return folder


@pytest.mark.slow
def test_inspect_compare_and_evaluate(classifier: Path) -> None:
    assert "compressed already: bert.embeddings.word_embeddings, 300 x 32, coded" in run(
        "inspect", classifier / "small"
    )
    texts = classifier / "texts.txt"
    texts.write_text("\n".join(f"word{i} the word{i + 2}" for i in range(12)), encoding="utf-8")
    compared = run("compare", classifier / "model", classifier / "small", "--texts", texts)
    size = weight_file_bytes(classifier / "small")
    assert f"{size / 1000:.1f} kB" in compared
    judged = run(
        "evaluate", classifier / "small", "--task", "sst2", "--task-data", classifier / "data",
        "--original", classifier / "model",
    )  # fmt: skip
    assert "accuracy" in judged


@pytest.mark.slow
def test_recover_trains_what_is_no_code(classifier: Path, tmp_path: Path) -> None:
    given = ("--task", "sst2", "--task-data", classifier / "data", "--epochs", 2, "--batch", 8, "--lr", "1e-2")
    run(
        "recover", classifier / "small", *given, "--teacher", classifier / "model", "--quiet", "--out", tmp_path / "out"
    )
    before, after = (
        AutoModelForSequenceClassification.from_pretrained(folder)
        for folder in (classifier / "small", tmp_path / "out")
    )
    old, new = coded(before), coded(after)
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name].get_buffer("codes"), new[name].get_buffer("codes")) for name in old)
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    # Streams again, and numbers of the same types.
    assert streams(tmp_path / "out") == streams(classifier / "small") > 1
    assert weight_file_bytes(tmp_path / "out") == pytest.approx(weight_file_bytes(classifier / "small"), rel=0.002)


def test_export_makes_ordinary_files(classifier: Path, tmp_path: Path) -> None:
    run("export", classifier / "small", "--dense", "--out", tmp_path / "dense")
    small, dense = (
        AutoModelForSequenceClassification.from_pretrained(f) for f in (classifier / "small", tmp_path / "dense")
    )
    assert not list(factored_layers(dense))
    with torch.no_grad():
        torch.testing.assert_close(dense(IDS).logits, small(IDS).logits)


@slow
def test_onnx_files_are_compared_before_they_are_kept(classifier: Path, tmp_path: Path) -> None:
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    assert "onnxruntime differs from PyTorch by" in run(
        "export", classifier / "small", "--onnx", "--out", tmp_path / "model.onnx"
    )
