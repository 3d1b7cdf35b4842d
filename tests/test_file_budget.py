"""A whole model in so many bytes: what is chosen, what the file weighs, and that it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_modules import sentence_modules
from typer.testing import CliRunner

import kflats
from kflats import Auto, KflatsError, Recipe, Transform
from kflats.cli.app import app
from kflats.cli.options import BudgetOptions, RecipeOptions, recipe_of
from kflats.common.formatting import size
from kflats.compress.pipeline import compress_folder
from kflats.evaluation.outputs import weight_file_bytes
from kflats.recipe.recipe import Plan

transformers = pytest.importorskip("transformers")
pytest.importorskip("constriction")

TEXTS = tuple(f"w{a}{b} w{b}{a} waa" for a in "abcdefgh" for b in "ijklmnop")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of .6 MB whose matrices have spectra that fall, and its tokenizer."""
    folder = tmp_path_factory.mktemp("encoder")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [f"w{a}{b}" for a in "abcdefghijklmnopqrstuvwxyz" for b in "abcdefghijklmnopqrstuvwxyz"]
    words += [f"x{i}" for i in range(1200 - len(words))]
    config = transformers.BertConfig(
        vocab_size=1200, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=192
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config)
    with torch.no_grad():
        for weight in kflats.find_weights(model):
            table = model.get_parameter(f"{weight.name}.weight")
            u, s, v = torch.linalg.svd(table, full_matrices=False)
            table.copy_(8 * (u * (s * torch.linspace(1, 0.05, len(s)))) @ v)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    return folder


def kept(encoder: Path, small: Path) -> float:
    """Mean cosine of the outputs for a few tokens."""
    with torch.no_grad():
        out, original = (
            transformers.AutoModel.from_pretrained(folder)(torch.tensor([[2, 7, 8, 3]])).last_hidden_state
            for folder in (small, encoder)
        )
    return float(torch.nn.functional.cosine_similarity(out, original, dim=-1).mean())


def test_the_file_is_within_one_per_cent_below_the_budget(encoder, tmp_path) -> None:
    """Weights that are not named count as they are."""
    limit, weights = 200_000, ("embeddings.word_embeddings", "embeddings.position_embeddings", "encoder.*.output.dense")
    report = compress_folder(
        encoder, tmp_path / "small", keep=f"{limit}B of all files", method=Auto(), weights=weights, quiet=True
    )
    assert 0.99 * limit <= weight_file_bytes(tmp_path / "small") <= limit
    assert report.model_bytes_after <= limit
    assert kept(encoder, tmp_path / "small") > 0.9


@pytest.fixture(scope="module")
def with_dense(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The encoder with pooling and a dense layer of its own weight file."""
    modules = sentence_modules()
    from sentence_transformers import SentenceTransformer

    words = modules.Transformer(str(encoder))
    torch.manual_seed(0)
    parts = [words, modules.Pooling(64), modules.Dense(64, 512)]
    folder = tmp_path_factory.mktemp("dense") / "model"
    SentenceTransformer(modules=parts, device="cpu").save(str(folder))
    return folder


def tiny(kind: str, folder: Path) -> Path:
    """Half precision, and a table with three names beside a stack whose head is one of them."""
    torch.manual_seed(0)
    if kind == "T5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
        config = transformers.T5Config(vocab_size=900, decoder_start_token_id=0, **sizes)
        model: Any = transformers.T5ForConditionalGeneration(config)
    else:
        config = transformers.BertConfig(
            vocab_size=900, hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96
        )
        model = transformers.BertModel(config).to(getattr(torch, kind))
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "T5"])
def test_small_files_are_full_too(kind: str, tmp_path: Path) -> None:
    """The last weight gets the bytes that the file's own header leaves. In T5 its code is as fine as codes get."""
    source = tiny(kind, tmp_path / "source")
    limit = int(weight_file_bytes(source) * (0.3 if kind == "T5" else 0.5))
    assert limit > 50_000
    asked = {"keep": f"{limit}B of all files", "method": Auto(), "weights": ("all",), "proof": False, "quiet": True}
    compress_folder(source, tmp_path / "small", **asked)
    assert (0.95 if kind == "T5" else 0.99) * limit <= weight_file_bytes(tmp_path / "small") <= limit
    small = kflats.io.load_model(tmp_path / "small")
    assert small.dtype == (torch.float32 if kind == "T5" else getattr(torch, kind))
    if kind == "T5":
        assert small.get_output_embeddings().matrix is small.get_input_embeddings().matrix


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.7])
def test_what_is_left_of_a_file_buys_nothing_more(share: float, tmp_path: Path) -> None:
    """Apart from the bytes that the budget sets aside for a longer header, a few hundred for each weight."""
    source = tiny("T5", tmp_path / "source")
    limit = int(weight_file_bytes(source) * share)
    asked = {"keep": f"{limit}B of all files", "method": Auto(), "weights": ("all",), "proof": False, "quiet": True}
    report = compress_folder(source, tmp_path / "small", **asked)
    left = limit - weight_file_bytes(tmp_path / "small")
    steps = [found.bytes_before - found.bytes_after for found in report.weights if found.kept != "dense"]
    assert steps
    assert 0 <= left < max(0.01 * limit, min(steps)) + 600 * len(report.weights)


@pytest.mark.slow
def test_weights_of_other_modules_count(with_dense: Path, tmp_path: Path) -> None:
    """They are kept as they are, and the transformer gets the rest."""

    def on_disk(folder: Path) -> int:
        return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))

    dense = on_disk(with_dense / "2_Dense")
    assert dense > 512 * 64 * 4
    assert weight_file_bytes(with_dense) == on_disk(with_dense)
    limit = 300_000
    asked = {"method": Auto(), "weights": ("all",), "proof": False, "quiet": True}
    report = compress_folder(with_dense, tmp_path / "small", keep=f"{limit}B of all files", **asked)
    small = tmp_path / "small"
    assert 0.99 * limit <= on_disk(small) == weight_file_bytes(small) <= limit
    assert (small / "2_Dense" / "model.safetensors").stat().st_size == dense
    assert dense < report.model_bytes_after <= limit
    assert report.model_bytes_before == pytest.approx(on_disk(with_dense), rel=0.02)
    shown = "weight files", f"{on_disk(with_dense) / 1000:.1f} kB", f"{on_disk(small) / 1000:.1f} kB"
    row = next(line for line in (small / "README.md").read_text().splitlines() if line.startswith("| weight files"))
    assert all(part in row for part in shown)
    with pytest.raises(KflatsError, match="keeps nothing of the named weights"):
        compress_folder(with_dense, tmp_path / "none", keep="130kB of all files", **asked)
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_plan_and_its_report_tell_of_one_model(with_dense: Path, tmp_path: Path) -> None:
    """Whose size has the weights of other modules in it."""
    path = tmp_path / "plan.json"
    done = CliRunner().invoke(app, ["plan", str(with_dense), "--size", "300kB", "--out", str(path)])
    assert done.exit_code == 0, done.output
    made = Plan.load(path)
    report = compress_folder(with_dense, tmp_path / "small", plan=made, proof=False, quiet=True)
    assert made.model_bytes == report.model_bytes_before
    shown = next(line for line in done.output.splitlines() if "whole model" in line)
    assert size(report.model_bytes_before) in shown
    given = sum(decision.budget_bytes - decision.weight.nbytes for decision in made.decisions)
    assert size(made.model_bytes + given) in shown


@pytest.mark.slow
def test_a_run_that_was_interrupted_gives_the_same_file(encoder, tmp_path, monkeypatch) -> None:
    weights = ("encoder.*.attention.*",)
    asked = {"keep": "10%", "method": Recipe(kflats.SVD(), codec=Transform()), "weights": weights, "quiet": True}
    compress_folder(encoder, tmp_path / "whole", **asked)
    real, done = Transform.encode, []

    def stops(*given):
        done.append(1)
        if len(done) == 3:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(Transform, "encode", stops)
    with pytest.raises(KeyboardInterrupt):
        compress_folder(encoder, tmp_path / "parts", **asked)
    monkeypatch.undo()
    compress_folder(encoder, tmp_path / "parts", **asked)
    a, b = (tmp_path / name / "model.safetensors" for name in ("whole", "parts"))
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.slow
def test_the_command_line_chooses_for_all_weights(encoder, tmp_path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS), encoding="utf-8")
    done = CliRunner().invoke(
        app,
        ["plan", str(encoder), "--size", "150kB", "--texts", str(texts), "--out", str(tmp_path / "plan.json")],
    )
    assert done.exit_code == 0, done.output
    plan = Plan.load(tmp_path / "plan.json")
    assert len(plan.decisions) > 8
    assert any(isinstance(decision.recipe.codec, Transform) for decision in plan.decisions)
    words = next(d for d in plan.decisions if "word_embeddings" in d.weight.name)
    assert type(words.recipe.importance).__name__ == "TokenFisher"
    out = tmp_path / "small"
    done = CliRunner().invoke(
        app, ["compress", str(encoder), "--plan", str(tmp_path / "plan.json"), "--texts", str(texts), "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    assert 0.99 * 150_000 <= weight_file_bytes(out) <= 150_000
    assert kept(encoder, out) > 0.7


def test_what_the_options_mean() -> None:
    assert recipe_of(RecipeOptions(), counted=True, whole_file=True) == Auto()
    assert recipe_of(RecipeOptions(), counted=True) is None
    assert recipe_of(RecipeOptions(method="auto"), counted=False) == Auto()
    assert BudgetOptions(size="9MB").names(Auto()) == ("all",)
    assert BudgetOptions(size="9MB", weights=["linear"]).names(Auto()) == ("linear",)
    assert BudgetOptions(keep="9%").names(Auto()) == BudgetOptions(size="9MB").names(None) == ()
    made = recipe_of(RecipeOptions(codec="transform"), counted=True)
    assert made == Recipe(kflats.SVD(), kflats.TokenCounts(), Transform())
    assert recipe_of(RecipeOptions(codec="int4 32"), counted=False).method == kflats.KeepDense()
    assert recipe_of(RecipeOptions(codec="float16"), counted=False).codec == kflats.Float("float16")
    assert recipe_of(RecipeOptions(method="auto", importance="uniform"), counted=False) == Recipe(Auto())
    assert recipe_of(RecipeOptions(codec="transform"), counted=False).method == kflats.SVD()
    assert recipe_of(RecipeOptions(codec="transform", flats=3), counted=False).method == kflats.Flats(k=3)
    assert recipe_of(RecipeOptions(codec="int8", flats=3), counted=False).method == kflats.Flats(k=3)
    measured = {"counted": True, "tokens": False}
    assert recipe_of(RecipeOptions(codec="int8"), **measured).method == kflats.SVD()
    assert recipe_of(RecipeOptions(codec="feedback"), **measured).method == kflats.KeepDense()
    assert recipe_of(RecipeOptions(method="messi", codec="integer 6"), counted=False).codec == kflats.Integer(6)
    for wrong, said in (
        (RecipeOptions(method="auto", codec="int8"), "--codec cannot be used with --method auto"),
        (RecipeOptions(method="auto", power=1.0), "--power cannot be used with --method auto"),
        (RecipeOptions(method="auto", importance="kronecker"), "--importance kronecker cannot be used"),
        (RecipeOptions(method="keep-dense", codec="transform"), "cannot store what KeepDense"),
    ):
        with pytest.raises(KflatsError, match=said):
            recipe_of(wrong, counted=True)


def test_a_budget_that_nothing_fits_is_refused(encoder, tmp_path) -> None:
    with pytest.raises(KflatsError, match="budget"):
        compress_folder(encoder, tmp_path / "x", keep="6000B of all files", method=Auto(), weights=("all",), quiet=True)
    assert not (tmp_path / "x").exists()


def test_what_entropy_codes_is_missed_before_any_work(encoder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(kflats.planning.selection, "find_spec", lambda name: None)
    for method in (Auto(), Recipe(kflats.KeepDense(), codec=kflats.Integer(bits=8))):
        with pytest.raises(KflatsError, match="constriction"):
            kflats.plan(transformers.AutoModel.from_pretrained(encoder), method, keep="20%")
