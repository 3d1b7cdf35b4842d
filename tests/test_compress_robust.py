"""Methods whose error is no square, end to end: every kind of layer, importance, allocation, saved and loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import kflats
from kflats import (
    SVD,
    Entrywise,
    Flats,
    Huber,
    Integer,
    KeepDense,
    KflatsError,
    KroneckerFisher,
    Power,
    Recipe,
    RobustSVD,
    RowFisher,
    Subspace,
    TokenCounts,
    Truncated,
)
from kflats.importance.protocol import Weighting
from kflats.matrices.layers import FactoredConv2d, FactoredEmbedding, FactoredLinear
from kflats.matrices.registry import LowRankMatrix
from kflats.methods.matrix_error import norm_error
from kflats.methods.protocol import Problem
from kflats.numerics.rows import TensorRows
from kflats.recipe.recipe import Plan
from kflats.report.report import REPORT_FILE, Report

METHODS = {
    "robust svd": RobustSVD(p=1.0),
    "robust svd, p = 0.5": RobustSVD(p=0.5),
    "entrywise": Entrywise(p=1.0),
    "entrywise, irls": Entrywise(p=1.25),
    "subspace": Subspace(Power(1.0)),
    "truncated": Subspace(Truncated(3.0, "median")),
    "flats, median": Flats(k=2, error=Power(1.0)),
    "flats, huber": Flats(k=2, ranks="uniform", error=Huber(2.0, "median")),
}
EVERY = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
TEXTS = ("the word1 of word2", "word3 the the", "a b of")


def network() -> nn.ModuleDict:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.ModuleDict({"words": nn.Embedding(90, 12), "hidden": nn.Linear(40, 24), "conv": nn.Conv2d(6, 20, 3)})


def batches() -> list[dict[str, torch.Tensor]]:
    gen = torch.Generator().manual_seed(0)
    return [
        {"input": torch.randn(8, 40, generator=gen), "labels": torch.randint(0, 3, (8,), generator=gen)}
        for _ in range(4)
    ]


@EVERY
def test_embeddings_linear_and_convolutional_layers_are_replaced_saved_and_loaded(method, tmp_path: Path) -> None:
    model = network()
    tables = {
        name: kflats.model.weights.dense_weight(model, kflats.model.weights.find_weight(model, name)) for name in model
    }
    names = ["words", "hidden"] if isinstance(method, Flats) else ["words", "hidden", "conv"]
    report = kflats.compress_(model, dict.fromkeys(names, method), keep="60%", quiet=True)
    kinds = {"words": FactoredEmbedding, "hidden": FactoredLinear, "conv": FactoredConv2d}
    for told in report.weights:
        assert type(model[told.name]) is kinds[told.name]
        assert told.bytes_after <= 0.6 * told.bytes_before
        assert told.own is not None
        matrix, table = model[told.name].matrix, tables[told.name]
        made = table - matrix.dense().detach()
        assert told.error == pytest.approx(float(made.square().sum() / table.square().sum()), rel=1e-3)
        if isinstance(method, RobustSVD | Entrywise):
            share = float(made.double().abs().pow(method.p).sum() / table.double().abs().pow(method.p).sum())
            assert told.own.error == pytest.approx(share, rel=1e-3)
        if not isinstance(method, RobustSVD | Flats):
            assert told.own.error <= told.own.svd_error * (1 + 1e-4)
    text = str(report)
    assert "own norm" in text
    assert report.weights[0].own.norm in text
    kflats.save(model, tmp_path)
    again = network()
    kflats.load_(again, tmp_path)
    inputs = {"words": torch.arange(90), "hidden": torch.randn(2, 40), "conv": torch.randn(2, 6, 7, 7)}
    with torch.no_grad():
        for name in names:
            torch.testing.assert_close(again[name](inputs[name]), model[name](inputs[name]))
    report.save(tmp_path / REPORT_FILE)
    assert Report.load(tmp_path) == report


@EVERY
def test_a_model_folder_with_counted_tokens(method, tiny_folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "out"
    report = kflats.compress_folder(
        tiny_folder, out, keep="60%", method=Recipe(method, TokenCounts()), texts=TEXTS, quiet=True
    )
    (told,) = report.weights
    assert told.importance["type"] == "TokenCounts"
    assert told.own is not None
    assert kflats.recipe.recipe.from_json(told.method) == method
    assert Report.load(out) == report
    assert "own error" in str(report)
    model = transformers.AutoModel.from_pretrained(out)
    assert isinstance(model.embeddings.word_embeddings, FactoredEmbedding)
    ids = torch.tensor([[2, 15, 16, 3]])
    with torch.no_grad():
        found, original = model(ids)[0], transformers.AutoModel.from_pretrained(tiny_folder)(ids)[0]
    assert torch.nn.functional.cosine_similarity(found.flatten(), original.flatten(), dim=0) > 0.5
    model.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        torch.testing.assert_close(transformers.AutoModel.from_pretrained(tmp_path / "again")(ids)[0], found)


@EVERY
def test_plans_keep_values_inside_methods(method, tmp_path: Path) -> None:
    model = network()
    made = kflats.plan(model, {"hidden": method}, keep="50%")
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == made
    assert loaded.decisions[0].recipe.method == method
    by_plan, direct = network(), network()
    kflats.compress_(by_plan, loaded, quiet=True)
    kflats.compress_(direct, {"hidden": method}, keep="50%", quiet=True)
    assert torch.equal(by_plan["hidden"].matrix.dense(), direct["hidden"].matrix.dense())


def test_a_plan_with_a_damaged_value_inside_a_method_is_refused(tmp_path: Path) -> None:
    kflats.plan(network(), {"hidden": Subspace()}, keep="50%").save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    recipe = data["decisions"][0]["recipe"]
    for value, message in (
        ({"type": "Lewis"}, "'Lewis'"),
        ({"type": "Power", "q": -1}, "q=-1"),
        ("power 1", "method.error should be an object.*found 'power 1'"),
        (1, "method.error should be an object.*found '1'"),
    ):
        recipe["method"]["error"] = value
        (tmp_path / "bad.json").write_text(json.dumps(data))
        with pytest.raises(KflatsError, match=message) as caught:
            Plan.load(tmp_path / "bad.json")
        assert "bad.json" in str(caught.value)


@pytest.mark.parametrize(
    "recipe",
    [
        Entrywise(max_iterations=2),
        Subspace(max_iterations=1),
        Flats(k=3, max_iterations=1),
        Recipe(Entrywise(max_iterations=2), codec=Integer(bits=8)),
    ],
    ids=str,
)
def test_the_report_says_where_a_limit_ended_the_fit(recipe) -> None:
    cut = kflats.compress_(network(), {"words": recipe}, keep="40%", quiet=True)
    assert "limit of iterations" in cut.weights[0].note
    whole = kflats.compress_(network(), {"words": Flats(k=1)}, keep="40%", quiet=True)
    assert "limit of iterations" not in whole.weights[0].note


def test_rows_as_outputs_are_the_columns() -> None:
    model = network()
    weight = model["hidden"].weight.detach().clone()  # torch's own: a row is an output
    kflats.compress_(model, {"hidden": Recipe(Subspace(), matrix_rows="out_features")}, keep="50%", quiet=True)
    expected = Subspace().fit(Problem(TensorRows(weight), weight.numel() * 2, 4)).matrix
    torch.testing.assert_close(model["hidden"].matrix.dense(), expected.dense())


def test_row_weights_count_in_the_method_s_own_norm(tiny_model, tiny_tokenizer) -> None:
    model = tiny_model("bert")
    table = model.embeddings.word_embeddings.weight.detach().clone()
    recipe = Recipe(Entrywise(), TokenCounts(power=1.0, smoothing=0.0, floor=0.05))
    report = kflats.compress_(model, recipe, keep="50%", texts=TEXTS, tokenizer=tiny_tokenizer, quiet=True)
    rest = (table - model.embeddings.word_embeddings.matrix.dense().detach()).abs().sum(1) / table.abs().sum(1)
    counted = tiny_tokenizer(" ".join(TEXTS))["input_ids"]
    assert float(rest[counted].mean()) < 0.5 * float(rest[100:].mean())
    assert report.weights[0].own.error < report.weights[0].own.svd_error


def test_allocation_by_loss_compares_squares_and_the_method_fits_its_own_norm() -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3))
    given = {"keep": "50%", "allocation": "loss", "calibration": batches()}
    recipes = {"0": Recipe(Entrywise(), RowFisher()), "2": Recipe(RobustSVD(), RowFisher())}
    made = kflats.plan(model, recipes, **given)
    squares = kflats.plan(model, dict.fromkeys(recipes, Recipe(SVD(), RowFisher())), **given)
    assert made.allocation == "loss"
    assert [d.budget_bytes for d in made.decisions] == [d.budget_bytes for d in squares.decisions]
    assert all(
        "relative error of an SVD" in d.note for d in made.decisions if not isinstance(d.recipe.method, KeepDense)
    )
    report = kflats.compress_(model, made, calibration=batches(), quiet=True)
    assert report.bytes_after <= 0.5 * report.bytes_before
    assert {w.method["type"] for w in report.weights} <= {"Entrywise", "RobustSVD", "KeepDense"}


def test_an_importance_that_couples_rows_is_refused_before_anything_is_measured() -> None:
    model = network()
    with pytest.raises(KflatsError, match="RobustSVD"):
        kflats.compress_(
            model, {"hidden": Recipe(RobustSVD(), KroneckerFisher())}, keep="50%", calibration=batches(), quiet=True
        )
    assert isinstance(model["hidden"], nn.Linear)


def test_the_report_s_svd_is_that_of_the_same_bytes() -> None:
    model = network()
    table = model["words"].weight.detach().clone()
    report = kflats.compress_(model, {"words": Subspace(), "hidden": KeepDense()}, keep="80%", quiet=True)
    told = next(w for w in report.weights if w.name == "words")
    rank = model["words"].matrix.weight.shape[1]
    u, s, v = torch.linalg.svd(table, full_matrices=False)
    matrix = LowRankMatrix(u[:, :rank] * s[:rank], v[:rank])
    rest = (table - matrix.dense().detach()).double().norm(dim=1).sum() / table.double().norm(dim=1).sum()
    assert told.own.svd_error == pytest.approx(float(rest), rel=1e-4)
    assert told.own.norm == "power 1 of distances"
    fit = Subspace().fit(Problem(TensorRows(table), told.bytes_after, 4, Weighting()))
    assert told.own.error == pytest.approx(norm_error(table, fit.matrix, fit.norm).relative, rel=1e-4)
    assert next(w for w in report.weights if w.name == "hidden").own is None
