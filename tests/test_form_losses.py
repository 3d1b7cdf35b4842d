"""What run-time forms lose is what the proof would find; "auto" takes the fastest form that loses little."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kflats
from kflats import SVD, Integer, KeepDense, Recipe, Uniform, compress_folder, run_as_
from kflats.cli.app import app
from kflats.common.errors import KflatsError
from kflats.common.run_forms import FormLoss
from kflats.evaluation import forms
from kflats.evaluation.forms import fastest, form_losses
from kflats.evaluation.latency import Latency
from kflats.evaluation.outputs import Judge
from kflats.evaluation.proof import compare
from kflats.io import load_model
from kflats.matrices.integer_kernels import integer_limit
from kflats.model.run_as import coded_layers, known_losses, set_run_form_
from kflats.report.model_card import CARD
from kflats.report.report import Report

transformers = pytest.importorskip("transformers", minversion="5.0")

CODED = Recipe(KeepDense(), Uniform(), Integer(8))
TEXTS = [f"word{i} the word{2 * i} of word{3 * i}" for i in range(12)]
LOSSES = (
    FormLoss("dense", 0.010, 0.02),
    FormLoss("bfloat16", 0.011, 0.02),
    FormLoss("int8", 0.0125, 0.03, integer_limit()),
)


@pytest.fixture
def folder(tiny_tokenizer: Any, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=32)).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Sets the times of forms; gives the lists of forms that were timed."""

    def set_to(**ratios: float) -> list[list[str]]:
        asked: list[list[str]] = []

        def given(contestants: Any, model: Any, *, shapes: Any, **_: Any) -> Any:
            asked.append([one.name for one in contestants])
            for one in contestants:
                assert {layer.run_form for layer in coded_layers(one.model)} == {one.name}
            made = [
                Latency(one.name, 1.0, ratios[one.name], 1, 1, 3, *shape, 1)
                for shape in shapes
                for one in contestants
                if one.name in ratios
            ]
            return made, {}

        monkeypatch.setattr(forms, "latencies", given)
        monkeypatch.setattr(forms, "_fastest_here", {})
        return asked

    return set_to


def coded(folder: Path) -> Any:
    model = load_model(folder)
    kflats.compress_(model, {"linear": CODED}, keep="60%", quiet=True)
    return model


def test_losses_are_those_of_the_judge_and_layers_keep_their_forms(folder: Path, tiny_tokenizer: Any) -> None:
    original, model = load_model(folder), coded(folder)
    judge = Judge(original, tiny_tokenizer, TEXTS)
    set_run_form_(model, "compact")
    losses = form_losses(judge, model)
    assert {layer.run_form for layer in coded_layers(model)} == {"compact"}
    assert [(one.form, one.integers) for one in losses] == [
        ("dense", None),
        ("bfloat16", None),
        ("int8", integer_limit()),
    ]
    for one in losses:
        set_run_form_(model, one.form)
        made = judge(model)
        assert (one.loss, one.tail_loss) == (made.loss, made.tail_loss)
    assert losses[0].loss < losses[2].loss
    set_run_form_(model, "int8")
    assert form_losses(judge, model, known=judge(model)) == losses
    factors = load_model(folder)
    kflats.compress_(factors, {"linear": SVD()}, keep="60%", quiet=True)
    assert form_losses(judge, factors) == ()


def test_a_machine_without_int8_measures_the_other_forms(
    folder: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(kind: str) -> int:
        raise KflatsError("its products of integers are wrong")

    monkeypatch.setattr(forms, "integer_limit", wrong)
    losses = form_losses(Judge(load_model(folder), tiny_tokenizer, TEXTS), coded(folder))
    assert [one.form for one in losses] == ["dense", "bfloat16"]


@pytest.mark.slow
def test_a_folder_says_what_its_forms_lose(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings: dict[str, Any] = {"method": CODED, "weights": ("linear",), "keep": "60%", "quiet": True}
    report = compress_folder(folder, out, **settings, proof=True, eval_texts=TEXTS)
    assert report.proof is not None
    measured = report.proof.forms
    assert len(measured) == 3
    assert Report.load(out).proof.forms == measured  # type: ignore[union-attr]
    for text in (str(report), (out / CARD).read_text()):
        assert "run-time form" in text
        assert f"int8, integers to {integer_limit()}" in text
    model = load_model(out)
    assert known_losses(model) == measured
    model.save_pretrained(tmp_path / "again")
    assert known_losses(load_model(tmp_path / "again")) == measured
    kflats.compress_(model, {"word_embeddings": CODED}, keep="60%", quiet=True)
    assert known_losses(model) == ()
    # The folder is as kflats wrote it, so it may be replaced.
    compress_folder(folder, out, **settings, force=True)
    model = load_model(out)
    assert known_losses(model) == ()
    with pytest.raises(KflatsError, match=r"nothing says what its forms lose.*kflats compare ORIGINAL DIR --card"):
        run_as_(model, "auto")
    done = CliRunner().invoke(app, ["compare", str(folder), str(out), "--card"])
    assert done.exit_code == 0, done.output
    assert len(known_losses(load_model(out))) == 3


@pytest.mark.parametrize(
    ("most", "times", "chosen"),
    [
        (0.002, {"dense": 1.0, "bfloat16": 0.7, "int8": 0.5}, "bfloat16"),
        (0.003, {"dense": 1.0, "bfloat16": 0.7, "int8": 0.5}, "int8"),
        (0.003, {"dense": 1.0, "bfloat16": 0.7, "int8": 0.8}, "bfloat16"),
        (0.003, {"dense": 1.0, "bfloat16": 1.3, "int8": 1.2}, "dense"),
        (0.003, {"dense": 1.0, "int8": 0.8}, "int8"),
        (0.0, {}, "dense"),
    ],
)
def test_auto_is_the_fastest_form_that_loses_little(
    folder: Path, timed: Any, most: float, times: dict[str, float], chosen: str, capfd: pytest.CaptureFixture[str]
) -> None:
    asked, model = timed(**times), coded(folder)
    assert fastest(model, LOSSES, most) == chosen
    assert f"run-time form: {chosen}" in capfd.readouterr().err
    assert fastest(model, LOSSES, most, quiet=True) == chosen
    assert capfd.readouterr().err == ""
    assert len(asked) == (1 if times else 0)
    assert {layer.run_form for layer in coded_layers(model)} == {"dense"}


def test_int8_of_another_kind_of_cpu_is_not_taken(folder: Path, timed: Any) -> None:
    timed(dense=1.0, int8=0.5)
    model = coded(folder)
    for integers, chosen in ((integer_limit(), "int8"), (190 - integer_limit(), "dense")):
        assert fastest(model, (LOSSES[0], FormLoss("int8", 0.01, 0.02, integers)), 0.002, quiet=True) == chosen


def test_a_form_that_fails_at_one_shape_is_not_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its times at the other shapes are no mean over all."""

    def given(contestants: Any, model: Any, **settings: Any) -> tuple[list[Latency], dict[str, str]]:
        made = [("dense", 1, 1.0), ("int8", 1, 0.1), ("dense", 32, 1.0)]
        return [Latency(name, 1, ratio, ratio, ratio, 1, count, 1, 1) for name, count, ratio in made[:failing]], {
            "32 x 1": "no kernel"
        }

    monkeypatch.setattr(forms, "latencies", given)
    monkeypatch.setattr(forms, "_fastest_here", {})
    failing = 3
    assert fastest(coded(folder), LOSSES, 0.1, quiet=True) == "dense"
    monkeypatch.setattr(forms, "_fastest_here", {})
    failing = 0
    with pytest.raises(KflatsError, match=r"does not run on drawn inputs.*32 x 1: no kernel"):
        fastest(coded(folder), LOSSES, 0.1, quiet=True)


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf"), "1%"])
def test_what_is_no_loss_is_refused(folder: Path, wrong: Any) -> None:
    with pytest.raises(KflatsError, match="is no loss"):
        fastest(coded(folder), LOSSES, wrong)


def test_a_folder_settles_on_a_form(folder: Path, tmp_path: Path, timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = timed(dense=1.0, bfloat16=0.9, int8=0.5)
    monkeypatch.setattr("kflats.evaluation.proof.MOST_LOSS", 0.5)
    settings: dict[str, Any] = {"method": CODED, "weights": ("linear",), "keep": "60%", "run_as": "auto", "quiet": True}
    with pytest.raises(KflatsError, match="auto is not supported without a proof"):
        compress_folder(folder, tmp_path / "out", **settings)
    report = compress_folder(folder, tmp_path / "out", **settings, proof=True, eval_texts=TEXTS)
    assert asked == [["dense", "bfloat16", "int8"]]
    assert report.proof is not None
    assert report.proof.outputs.loss == report.proof.forms[2].loss
    model = load_model(tmp_path / "out")
    assert {layer.run_form for layer in coded_layers(model)} == {"int8"}
    assert run_as_(model, "auto", most_loss=0.0, quiet=True) == len(coded_layers(model))
    assert {layer.run_form for layer in coded_layers(model)} == {"dense"}
    assert "auto" not in (tmp_path / "out" / "config.json").read_text()


def test_damaged_losses_are_refused(folder: Path, tmp_path: Path) -> None:
    coded(folder).save_pretrained(tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["forms"] = [{"form": "int4", "loss": 0.1, "tail_loss": 0.2, "integers": None}]
    path.write_text(json.dumps(config))
    with pytest.raises(KflatsError, match="int4"):
        load_model(tmp_path / "out")


@pytest.mark.slow
def test_times_are_real(folder: Path, tiny_tokenizer: Any) -> None:
    """Nothing is replaced here: whichever form is fastest, one is chosen, and the model runs in it."""
    tiny_tokenizer.save_pretrained(folder)
    coded(folder).save_pretrained(folder.parent / "out")
    made = compare(folder, folder.parent / "out", TEXTS, turns=1, fresh=False)
    model = load_model(folder.parent / "out")
    form = fastest(model, made.forms, 1.0, quiet=True)
    assert form in ("dense", "bfloat16", "int8")
    set_run_form_(model, form)
    with torch.inference_mode():
        model(torch.tensor([[2, 7, 3]]))
