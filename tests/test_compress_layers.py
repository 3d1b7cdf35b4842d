"""Linear and convolutional layers end to end: measured, shared out, factored, saved, loaded, resumed."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kflats
from kflats import (
    SVD,
    Auto,
    Feedback,
    Flats,
    InputGram,
    KeepDense,
    KroneckerFisher,
    Projections,
    Recipe,
    RowFisher,
    Statistics,
    TaskLoss,
    TokenFisher,
)
from kflats.common.errors import KflatsError
from kflats.compress import fitting
from kflats.compress import pipeline as compress_module
from kflats.compress.pipeline import compress_, compress_folder
from kflats.io.atomic import MANIFEST
from kflats.matrices.layers import FactoredConv2d, FactoredLinear
from kflats.methods.protocol import Factored, Method, Problem
from kflats.planning import calibration_data as calibration_module
from kflats.planning.calibration_data import CalibrationData, gather
from kflats.planning.decide import plan
from kflats.recipe import budget as budget_module
from kflats.recipe.recipe import Plan
from kflats.report.report import REPORT_FILE, Report

TEXTS = [f"the word{i} of word{2 * i} a b word{i % 7}" for i in range(40)]
LAYERS = "encoder.layer.*"
KRONECKER = Recipe(SVD(), KroneckerFisher())


def classifier(transformers, labels: int = 3):
    config = transformers.BertConfig(
        vocab_size=300,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=labels,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.BertForSequenceClassification(config).eval()


def batches(labels: bool = True, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(6):
        batch = {"input_ids": torch.randint(5, 300, (8, 7), generator=generator)}
        if labels:
            batch["labels"] = torch.randint(0, 3, (8,), generator=generator)
        made.append(batch)
    return made


def test_a_task_model_gets_smaller_by_its_own_loss(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = classifier(transformers)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    logits = model(**batches()[0]).logits
    report = compress_(model, {"linear": KRONECKER}, keep="70%", calibration=batches(), quiet=True)
    assert report.bytes_after <= 0.7 * report.bytes_before
    assert report.bytes_before - report.bytes_after == report.model_bytes_before - report.model_bytes_after
    found = {w.name: w for w in report.weights}
    assert found["classifier"].dense  # 48 of 10288 numbers, and every one of them matters
    assert any(isinstance(layer, FactoredLinear) for layer in model.bert.encoder.layer.modules())
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, before["bert.embeddings.word_embeddings.weight"])
    assert torch.nn.functional.cosine_similarity(model(**batches()[0]).logits, logits).min() > 0.9
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(again(**batches()[0]).logits, model(**batches()[0]).logits)


def test_the_loss_is_the_tasks_where_there_are_labels_and_projections_elsewhere() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    with_labels = [{"input": torch.randn(8, 4), "labels": torch.randint(0, 3, (8,))} for _ in range(4)]
    without = [{"input": batch["input"]} for batch in with_labels]
    pairs = [(w, Recipe(SVD(), RowFisher())) for w in kflats.find_weights(model)]

    def objective(batches, asked=None):
        found = CalibrationData(calibration=tuple(batches), objective=asked).measured(model, pairs).statistics
        assert found is not None
        return found.objective["type"]

    assert objective(with_labels) == "TaskLoss"
    assert objective(without) == "Projections"
    assert objective(with_labels, Projections()) == "Projections"
    with pytest.raises(KflatsError, match="label"):
        objective(without, TaskLoss())


def test_convolutions_become_pairs(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False), nn.ReLU(),
                nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
            )  # fmt: skip

    model, images = build(), [{"input": torch.randn(6, 3, 10, 10)} for _ in range(5)]
    report = compress_(model, {"conv": KRONECKER}, keep="55%", calibration=images, quiet=True)
    assert [w.name for w in report.weights] == ["0", "2"]
    assert report.bytes_after <= 0.55 * report.bytes_before
    assert any(isinstance(layer, FactoredConv2d) for layer in model)
    kflats.save(model, tmp_path / "small")
    again = build()
    kflats.load_(again, tmp_path / "small")
    torch.testing.assert_close(again(images[0]["input"]), model(images[0]["input"]))


def test_what_matters_to_the_output_stays_better_with_what_was_measured() -> None:
    def build() -> nn.Sequential:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))

    mix = torch.randn(6, 32)  # inputs lie in a space of few dimensions, off the origin
    data = [{"input": torch.randn(16, 6) @ mix + 1} for _ in range(12)]
    lost = {}
    for name, recipe in (("plain", SVD()), ("gram", Recipe(SVD(), InputGram())), ("kronecker", KRONECKER)):
        model = build()
        compress_(model, {"linear": recipe}, keep="40%", calibration=data[:10], quiet=True)
        with torch.no_grad():
            lost[name] = max(float((model(b["input"]) - build()(b["input"])).square().mean()) for b in data[10:])
    assert lost["kronecker"] < 0.2 * lost["plain"]
    assert lost["gram"] < 0.5 * lost["plain"]


@pytest.mark.parametrize("reached", [True, False])
def test_a_token_table_without_a_tokenizer_shares_the_budget(reached: bool) -> None:
    """Rows that batches read lose less than others; a table that no batch reaches has its part of the bytes too."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.layer = nn.Embedding(600, 32), nn.Linear(32, 32)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.layer(self.words(input_ids) if reached else input_ids.unsqueeze(-1).expand(-1, -1, 32) / 60)

    torch.manual_seed(0)
    model = Words()
    before = model.words.weight.detach().clone()
    batches = [{"input_ids": torch.randint(0, 60, (8, 16))} for _ in range(8)]
    report = compress_(model, {"all": Auto()}, keep="12%", calibration=batches, quiet=True)
    assert report.bytes_after <= 0.12 * report.bytes_before
    lost = (model.words(torch.arange(600)) - before).square().sum(1).detach()
    assert 0 < float(lost.mean()) < 0.1 * float(before.square().sum(1).mean())
    assert float(lost[:60].mean()) < (0.9 if reached else 1.3) * float(lost[60:].mean())


def test_statistics_are_measured_once_and_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    model = classifier(transformers)
    found = kflats.measure(
        model, kflats.find_weights(model), batches(), needs=KroneckerFisher.needs | RowFisher.needs, quiet=True
    )
    found.save(tmp_path / "statistics.safetensors")
    again = Statistics.load(tmp_path / "statistics.safetensors")
    monkeypatch.setattr(calibration_module, "measure", lambda *a, **k: pytest.fail("measured again"))
    made = plan(model, {"linear": KRONECKER}, keep="50%", statistics=again)
    assert made.allocation == "loss"
    compress_(model, {"linear": Recipe(Flats(k=2), RowFisher())}, keep="50%", statistics=again, quiet=True)
    with pytest.raises(KflatsError, match="another model"):
        plan(classifier(transformers, labels=5), {"linear": KRONECKER}, keep="50%", statistics=again)


def test_nothing_is_measured_that_nothing_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_module, "measure", lambda *a, **k: pytest.fail("measured"))
    model = nn.ModuleDict({"a": nn.Linear(20, 20)})
    compress_(model, {"a": SVD()}, keep="50%", calibration=[{"x": torch.ones(2, 20)}], quiet=True)


# By folder


def files(folder: Path) -> dict[str, bytes]:
    """The files of a folder, without the report, which holds seconds, and the manifest, which holds its hash."""
    paths = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name not in (REPORT_FILE, MANIFEST)]
    return {p.name: p.read_bytes() for p in paths}


FEEDBACK = Recipe(KeepDense(), InputGram(), codec=Feedback())


class Mixed(nn.Module):
    """Layers of one shape that differ in all that may keep them from being encoded together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain = nn.ModuleList(nn.Linear(40, 48) for _ in range(6))
        self.without_bias = nn.Linear(40, 48, bias=False)
        self.halved = nn.Linear(40, 48).to(torch.bfloat16)
        self.damped, self.turned = nn.Linear(40, 48), nn.Linear(40, 48)
        self.other = nn.Linear(40, 200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.plain, self.without_bias, self.damped, self.turned):
            x = torch.relu(layer(x))[:, :40]
        return self.other(self.halved(x.to(torch.bfloat16)).float()[:, :40])


def mixed_plan(model: nn.Module) -> tuple[Plan, CalibrationData]:
    recipes = {
        "*": FEEDBACK,
        "damped": replace(FEEDBACK, codec=Feedback(damping=0.5)),
        "turned": replace(FEEDBACK, matrix_rows="out_features"),
        "plain.5": replace(FEEDBACK, importance=KroneckerFisher()),
    }
    generator = torch.Generator().manual_seed(0)
    given = [{"x": torch.randn(16, 40, generator=generator)} for _ in range(3)]
    made = plan(model, recipes, keep="20%", calibration=given, objective=Projections())
    data = gather(None, None, given, Projections(), None)
    return made, data.measured(model, [(one.weight, one.recipe) for one in made.decisions], True)


@contextmanager
def recorded_progress(seen: list[tuple[str, int]]) -> Iterator[Any]:
    yield lambda text, place, total: seen.append((text, place))


@pytest.mark.slow
def test_grouping_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results, reports and shifts are those of one weight at a time; progress counts weights; seconds add up."""
    model = Mixed().eval()
    made, data = mixed_plan(model)
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(fitting, "progress_bar", lambda quiet: recorded_progress(seen))
    began = time.perf_counter()
    grouped = fitting.factorize(model, made, data, 0, True, None)
    took = time.perf_counter() - began
    assert [place for _, place in seen] == sorted({place for _, place in seen})
    assert len(seen) < len(grouped)
    assert seen[0] == ("fitting other", 0)  # the largest
    assert sum(one.report.seconds for one in grouped) <= took
    monkeypatch.setattr(Feedback, "together", lambda self, shape: 0)
    for ours, alone in zip(grouped, fitting.factorize(model, made, data, 0, True, None), strict=True):
        assert replace(ours.report, seconds=0.0) == replace(alone.report, seconds=0.0)
        for name, tensor in alone.matrix.tensors().items():
            assert torch.equal(ours.matrix.tensors()[name], tensor)
        assert ours.bias_shift is None or torch.equal(ours.bias_shift, alone.bias_shift)


def test_weights_are_grouped_by_what_decides_their_codes() -> None:
    made, _ = mixed_plan(Mixed())
    names = [[one.weight.name for one in group] for group in fitting._groups(made.decisions, 1)]
    assert names[0] == ["other"]
    assert ["plain.0", "plain.1", "plain.2", "plain.3"] in names
    assert ["plain.4", "plain.5", "without_bias"] in names  # an importance only weighs
    assert all([name] in names for name in ("halved", "damped", "turned"))
    assert sorted(name for group in names for name in group) == sorted(one.weight.name for one in made.decisions)
    assert max(map(len, fitting._groups(made.decisions, 4))) == 2  # each of four workers has some


class Tall(Feedback):
    """Takes two matrices of more rows than columns at a time."""

    def together(self, shape: tuple[int, int]) -> int:
        return 1 + (shape[0] > shape[1])


@dataclass(frozen=True, eq=True)
class Incomparable(Feedback):
    """A codec of a stranger, with a field that says nothing of equality."""

    mean: torch.Tensor = field(default_factory=lambda: torch.zeros(2))

    def encode(self, method: Method, problem: Problem, dtype: torch.dtype) -> Factored:
        ENCODED.append(problem.nbytes)
        return super().encode(method, problem, dtype)


ENCODED: list[int] = []


@pytest.mark.parametrize(("matrix_rows", "count"), [("in_features", 2), ("out_features", 1)])
def test_codecs_are_asked_for_the_matrix_as_they_get_it(matrix_rows: Any, count: int) -> None:
    model = nn.ModuleDict({"a": nn.Linear(60, 40), "b": nn.Linear(60, 40)})
    made = plan(model, {"linear": Recipe(KeepDense(), codec=Tall(), matrix_rows=matrix_rows)}, keep="30%")
    assert len(fitting._groups(made.decisions, 1)[0]) == count


def test_a_codec_that_encodes_in_its_own_way_is_asked_for_every_weight() -> None:
    """A subclass of ``Feedback`` is not bypassed, and its values are not compared."""
    ENCODED.clear()
    model = nn.ModuleDict({"a": nn.Linear(40, 40), "b": nn.Linear(40, 40)})
    recipes = {name: Recipe(KeepDense(), codec=Incomparable()) for name in ("a", "b")}
    kflats.compress_(model, recipes, keep="30%", quiet=True)
    assert len(ENCODED) == 2


def test_layers_that_are_encoded_together_keep_their_own_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three has a budget that holds no code: the error names it, and what was fitted before it is kept."""
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(3)))
    made = plan(model, {"linear": Recipe(KeepDense(), codec=Feedback())}, keep="30%")
    first, second, third = made.decisions
    made = replace(made, decisions=(first, replace(second, budget_bytes=60), third), allocation="uniform")
    partial = fitting.Partial(tmp_path / "out", "a model")
    with pytest.raises(KflatsError, match=r"^1.*cannot hold codes"):
        fitting.factorize(model, made, CalibrationData(), 0, True, partial)
    left = [partial.get(name) is not None for name in ("0", "1", "2")]
    assert left == [True, False, False]

    fitted: list[str] = []
    fit = fitting._fit
    monkeypatch.setattr(
        fitting, "_fit", lambda model, ones, *more: fitted.append(ones[0].weight.name) or fit(model, ones, *more)
    )
    made = replace(made, decisions=(first, replace(second, budget_bytes=third.budget_bytes), third))
    done = fitting.factorize(model, made, CalibrationData(), 0, True, partial)
    assert fitted == ["1"]  # and with it the third, of its shape
    assert [one.decision.weight.name for one in done] == ["0", "1", "2"]


def test_a_folder_with_calibration_texts(tiny_folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "statistics.safetensors"
    report = compress_folder(
        tiny_folder, tmp_path / "small", keep="60%", method=KRONECKER, weights=("linear",), calibration=TEXTS,
        keep_statistics=kept, quiet=True,
    )  # fmt: skip
    assert Report.load(tmp_path / "small") == report
    transformers = pytest.importorskip("transformers")
    ids = torch.tensor([[2, 15, 16, 3]])
    with torch.no_grad():
        cosine = torch.nn.functional.cosine_similarity(
            transformers.AutoModel.from_pretrained(tmp_path / "small")(ids)[0].flatten(),
            transformers.AutoModel.from_pretrained(tiny_folder)(ids)[0].flatten(), 0,
        )  # fmt: skip
    assert cosine > 0.99
    assert Statistics.load(kept).samples == len(TEXTS)
    # The same from a plan and from what was measured.
    made = plan(kflats.io.load_model(tiny_folder), {"linear": KRONECKER}, keep="60%", statistics=Statistics.load(kept))
    made.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["allocation"] == "loss"
    again = {"plan": Plan.load(tmp_path / "plan.json"), "statistics": Statistics.load(kept)}
    compress_folder(tiny_folder, tmp_path / "other", **again, quiet=True)
    here, there = files(tmp_path / "other"), files(tmp_path / "small")
    here.pop("README.md"), there.pop("README.md")  # the plan was made without the texts, and the card says so
    assert here == there


def test_calibration_texts_are_counted_too(tiny_folder: Path, tmp_path: Path) -> None:
    report = compress_folder(
        tiny_folder, tmp_path / "small", keep="60%", weights=("embeddings.word_embeddings", LAYERS),
        calibration=TEXTS, quiet=True,
    )  # fmt: skip
    assert report.weights[0].importance["type"] == "TokenCounts"
    assert {w.importance["type"] for w in report.weights[1:]} == {"KroneckerFisher"}


def interrupted(monkeypatch: pytest.MonkeyPatch, folder: Path, out: Path, options: dict) -> None:
    def stop(*args: object) -> None:
        raise KflatsError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(compress_module, "copy_companions", stop)
        with pytest.raises(KflatsError, match="stopped"):
            compress_folder(folder, out, **options)


@pytest.mark.parametrize("change", ["nothing", "calibration", "objective", "statistics", "keep", "allocation"])
def test_an_interrupted_run_resumes_with_the_same_data_and_only_then(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    options = {
        "keep": "60%", "method": KRONECKER, "weights": (LAYERS,), "calibration": TEXTS, "quiet": True,
        "objective": Projections(seed=1),
    }  # fmt: skip
    interrupted(monkeypatch, tiny_folder, tmp_path / "small", options)
    measured, fitted = [], []
    measure, fit = calibration_module.measure, SVD.fit
    monkeypatch.setattr(calibration_module, "measure", lambda *a, **k: measured.append(1) or measure(*a, **k))
    monkeypatch.setattr(SVD, "fit", lambda self, problem: fitted.append(1) or fit(self, problem))
    second = dict(options)
    if change == "statistics":
        (file,) = tmp_path.glob(".small*/statistics-*")
        data = bytearray(file.read_bytes())
        data[:8] = b"\xff" * 8
        file.write_bytes(bytes(data))
    elif change != "nothing":
        second[change] = {
            "calibration": TEXTS[:-1], "objective": Projections(seed=2), "keep": "50%", "allocation": "uniform"
        }[change]  # fmt: skip
    compress_folder(tiny_folder, tmp_path / "small", **second)
    assert bool(measured) == (change in ("calibration", "objective", "statistics"))
    assert bool(fitted) == (change not in ("nothing", "statistics"))
    assert [p.name for p in tmp_path.iterdir()] == ["small"]
    monkeypatch.undo()
    compress_folder(tiny_folder, tmp_path / "whole", **second)
    assert files(tmp_path / "small") == files(tmp_path / "whole")


# Data


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"calibration": []}, "no calibration data"),
        ({"calibration": ["text"], "samples": 0}, "0 samples measure nothing"),
        ({"calibration": "one text"}, "not one string"),
        ({"calibration": {"input": torch.ones(1)}}, "not one batch"),
        ({"calibration": [torch.ones(1)]}, "expected texts or batches .* found Tensor.*'input': tensor"),
        ({"texts": ["text"], "tokenizer": "folder"}, "expected a tokenizer, found str"),
        ({"calibration": ["text", {"input": torch.ones(1)}]}, "calibration data holds texts and batches"),
        ({"calibration": ["text"]}, "need the model's tokenizer"),
        ({"calibration": ["text"], "samples": "many"}, "'many' samples"),
        ({"calibration": ["text"], "samples": True}, "True samples"),
        ({"calibration": Path("texts.txt")}, r"not .*Path\('texts.txt'\)"),
        ({"texts": 5, "tokenizer": object()}, "texts must be a sequence of strings, not 5"),
        ({"texts": ["text", 3], "tokenizer": object()}, "expected texts, found int"),
    ],
)
def test_data_that_is_none_is_refused(given: dict, message: str) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4)})
    with pytest.raises(KflatsError, match=message):
        plan(model, {"a": KRONECKER}, keep="90%", **given)


def test_long_lists_of_texts_are_sampled_evenly(tiny_tokenizer) -> None:
    texts = [f"word{i % 280}" for i in range(5000)]
    found = CalibrationData(texts=tuple(texts), tokenizer=tiny_tokenizer).batches()
    assert sum(len(batch["input_ids"]) for batch in found) == calibration_module.SAMPLES
    fewer = CalibrationData(texts=tuple(texts), tokenizer=tiny_tokenizer, samples=30).batches()
    assert sum(len(batch["input_ids"]) for batch in fewer) == 30
    few = CalibrationData(calibration=tuple(texts[:20]), tokenizer=tiny_tokenizer).batches()
    assert sum(len(batch["input_ids"]) for batch in few) == 20


def test_the_digest_sees_every_value() -> None:
    same = [gather(None, None, batches(), None, None).digest() for _ in range(2)]
    assert same[0] == same[1]
    other = batches()
    other[3]["labels"][2] = (other[3]["labels"][2] + 1) % 3
    digests = {
        *same,
        gather(None, None, other, None, None).digest(),
        gather(None, None, batches()[:-1], None, None).digest(),
        gather(None, None, batches(labels=False), None, None).digest(),
        gather(None, None, batches(), Projections(), None).digest(),
        gather(TEXTS, None, None, None, None).digest(),
        gather(None, None, TEXTS, None, None).digest(),
        gather(None, None, None, None, None).digest(),
        gather(None, None, None, None, None, 100).digest(),
    }
    assert len(digests) == 9


@pytest.mark.slow
def test_texts_are_counted_weights_weighed_and_the_budget_parsed_once(tiny_folder, tmp_path, monkeypatch):
    counted, weighed, parsed = [], Counter(), []
    count, pattern = calibration_module.count_tokens, budget_module._SYNTAX

    def counting(texts, tokenizer, rows):
        counted.append(rows)
        return count(texts, tokenizer, rows)

    def weighing(kind):
        weigh = kind.weigh

        def once(self, measured):
            if measured.rows > 2:  # selection asks a matrix of two rows which kinds of weighting there are
                weighed[repr(self), measured.output_gram.data_ptr()] += 1
            return weigh(self, measured)

        return once

    class Pattern:
        def fullmatch(self, text):
            parsed.append(text)
            return pattern.fullmatch(text)

    monkeypatch.setattr(calibration_module, "count_tokens", counting)
    monkeypatch.setattr(budget_module, "_SYNTAX", Pattern())
    monkeypatch.setattr(TokenFisher, "weigh", weighing(TokenFisher))
    monkeypatch.setattr(KroneckerFisher, "weigh", weighing(KroneckerFisher))
    words = ("embeddings.word_embeddings", "encoder.layer.*")
    compress_folder(tiny_folder, tmp_path / "out", keep="60%", method=Auto(), weights=words, texts=TEXTS, quiet=True)
    assert counted == [300]
    assert parsed == ["60%"]
    assert any("TokenFisher" in importance for importance, _ in weighed)
    assert len(weighed) >= 7
    assert set(weighed.values()) == {1}


@pytest.mark.parametrize(
    ("method", "rows"),
    [(SVD(), "in_features"), (SVD(form="interpolative"), "out_features"), (Flats(k=2), "out_features")],
)
def test_errors_and_biases_are_those_of_the_layer_which_widens_its_factors(method, rows) -> None:
    gen = torch.Generator().manual_seed(0)
    x = 5 + torch.randn(400, 48, generator=gen)
    model = nn.Sequential(nn.Linear(48, 48))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(48, 48, generator=gen) / 7)
        model[0].bias.zero_()
        dense, before = model[0].weight.clone(), model(x)
    recipe = Recipe(method, InputGram(), matrix_rows=rows, codec=kflats.Float("bfloat16"))
    report = compress_(model, {"0": recipe}, keep="45%", calibration=[{"input": x}], quiet=True)
    with torch.no_grad():
        lost = before - model(x)
        unbiased = model(torch.eye(48)) - model[0].bias
    assert model[0].matrix.weight.dtype == torch.bfloat16
    assert float(lost.mean(0).norm()) < 1e-3 * float(lost.square().mean(0).sum().sqrt())  # no constant is left
    true = float((dense.T - unbiased).square().sum() / dense.square().sum())
    assert report.weights[0].error_unweighted == pytest.approx(true, rel=1e-3)
