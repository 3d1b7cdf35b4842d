"""Recipes and plans: JSON round trips, and refusals that name what they know."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kflats import codecs, importance, methods
from kflats.codecs import Float
from kflats.common.errors import KflatsError
from kflats.importance import TokenCounts, Uniform
from kflats.methods import SVD, Flats
from kflats.model.weights import Weight, WeightUse
from kflats.recipe.budget import Budget
from kflats.recipe.recipe import Decision, Plan, Recipe, as_recipe, from_json, to_json

TABLE = Weight(
    "embeddings.word_embeddings",
    (WeightUse("embeddings.word_embeddings", "embedding"), WeightUse("cls.predictions.decoder", "head")),
    (30522, 384),
    "float32",
    30522 * 384 * 4,
)
LAYER = Weight("encoder.dense", (WeightUse("encoder.dense", "linear"),), (384, 1536), "float32", 384 * 1536 * 4)
PLAN = Plan(
    (
        Decision(TABLE, Recipe(Flats(k=7), TokenCounts(power=0.25)), 28_000_000, "tied"),
        Decision(LAYER, Recipe(SVD(), codec=Float("bfloat16")), 1_000_000),
    ),
    Budget("fraction", 0.6),
    90_868_376,
)
EVERY_VALUE = [kind() for kind in (*methods.METHODS.kinds, *importance.IMPORTANCES.kinds, *codecs.CODECS.kinds)]


def test_a_bare_method_is_a_recipe() -> None:
    assert as_recipe(SVD()) == Recipe(SVD(), Uniform(), Float("same"))
    assert as_recipe(PLAN.decisions[0].recipe) is PLAN.decisions[0].recipe


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((SVD,), r"Try: SVD\(\)"),
        (("flats",), "is not a method"),
        ((Uniform(),), "is not a method"),
        ((SVD(), SVD()), "is not an importance"),
        ((SVD(), Uniform(), Uniform()), "is not a codec"),
        ((Recipe(SVD()),), "is not a method"),
    ],
)
def test_a_recipe_checks_its_axes(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(KflatsError, match=says):
        Recipe(*arguments)


@pytest.mark.parametrize("value", [*EVERY_VALUE, Recipe(Flats(k=3), TokenCounts(), Float("float16"))], ids=repr)
def test_every_value_survives_json(value: Any) -> None:
    assert dataclasses.is_dataclass(value)
    assert hash(value) == hash(dataclasses.replace(value))
    again = from_json(json.loads(json.dumps(to_json(value), allow_nan=False)))
    assert again == value
    assert type(again) is type(value)


def test_absent_fields_take_their_defaults() -> None:
    assert from_json({"type": "Flats"}) == Flats()
    assert from_json({"type": "Recipe", "method": {"type": "SVD"}}) == Recipe(SVD())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "object with a .type."),
        ([], "object with a"),
        ({"k": 5}, "object with a"),
        ({"type": 5}, "object with a"),
        ({"type": "Flat"}, "is called 'Flat'.*Flats, "),
        ({"type": "Path"}, "is called 'Path'"),
        ({"type": "Flats", "flats": 5}, "unknown fields .*flats.*one of k"),
        ({"type": "Flats", "k": "5"}, r"recipe\.k should be a whole number, found '5'"),
        ({"type": "Flats", "k": True}, r"recipe\.k should be a whole number, found 'True'"),
        ({"type": "Flats", "k": 5.0}, r"recipe\.k should be a whole number, found '5\.0'"),
        ({"type": "TokenCounts", "power": float("nan")}, r"recipe\.power should be a finite number, found 'nan'"),
        ({"type": "TokenCounts", "power": float("inf")}, r"recipe\.power should be a finite number, found 'inf'"),
        ({"type": "Float", "dtype": "float12"}, "float12.*bfloat16"),
        ({"type": "Recipe"}, "recipe lacks .*method"),
        ({"type": "Recipe", "method": {"type": "Uniform"}}, "should be a Method"),
        ({"type": "Recipe", "method": "SVD"}, "should be an object"),
    ],
)
def test_json_that_means_nothing_is_refused(data: object, says: str) -> None:
    with pytest.raises(KflatsError, match=says):
        from_json(data)


@pytest.mark.parametrize("original", ["float32", "torch.bfloat16", torch.float16])
def test_the_codec_keeps_the_type_or_chooses_one(original: Any) -> None:
    expected = original if isinstance(original, torch.dtype) else getattr(torch, original.removeprefix("torch."))
    assert Float().torch_dtype(original) is expected
    assert Float("float16").torch_dtype(original) is torch.float16
    assert Float("float32").torch_dtype(original).itemsize == 4


@pytest.mark.parametrize("original", ["int8", torch.uint8, "bool", "float8_e4m3fn", "nothing", "nn"])
def test_the_codec_refuses_what_is_not_floating_point(original: Any) -> None:
    with pytest.raises(KflatsError, match="own type"):
        Float().torch_dtype(original)


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert Plan.load(path) == PLAN
    PLAN.save(path)  # over itself
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    data = json.loads(path.read_text())
    assert (data["format"], data["version"]) == ("kflats-plan", 1)


def test_a_plan_of_an_earlier_form_is_read(tmp_path: Path) -> None:
    def older(data: dict[str, Any]) -> None:
        data.pop("allocation")
        for decision in data["decisions"]:
            decision["recipe"].pop("matrix_rows")
            decision["weight"].pop("bias")

    assert Plan.load(edit(tmp_path / "plan.json", older)) == PLAN


def test_a_plan_says_how_its_budget_is_shared() -> None:
    assert str(PLAN).startswith("budget 60%\n")
    assert "by what each byte saves of the loss" in str(dataclasses.replace(PLAN, allocation="loss"))
    turned = Recipe(SVD(), matrix_rows="out_features")
    assert "matrix_rows='out_features'" in str(dataclasses.replace(PLAN, decisions=(Decision(LAYER, turned, 1000),)))


def test_a_plan_has_a_budget() -> None:
    assert dataclasses.replace(PLAN, budget="40%").budget == Budget("fraction", 0.4)
    with pytest.raises(KflatsError, match=r"0\.4 is not a budget"):
        dataclasses.replace(PLAN, budget=0.4)


@pytest.mark.parametrize("value", [importance.ZipfPrior, TokenCounts])
def test_an_importance_that_is_not_called_is_refused(value: Any) -> None:
    with pytest.raises(KflatsError, match=rf"{value.__name__} is not called\. Try: {value.__name__}\(\)"):
        Recipe(SVD(), value)


def test_a_plan_prints_as_a_table() -> None:
    text = str(PLAN)
    for expected in (
        "budget 60%",
        "embeddings.word_embeddings = cls.predictions.decoder",
        "30522 x 384",
        "46.9 MB",
        "28.0 MB",
        "Flats(k=7), TokenCounts(power=0.25), Float(dtype='same')",
        "named weights",
        "whole model",
        "90.9 MB",
        "note",
        "tied",
    ):
        assert expected in text
    assert "note" not in str(dataclasses.replace(PLAN, decisions=PLAN.decisions[1:]))
    assert "whole model" in str(Plan((), Budget("fraction", 0.6), 0))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    PLAN.save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(version=2), "version 2.*newer kflats.*pip install"),
        (lambda d: d.update(version="1"), "version 1 are"),
        (lambda d: d.update(version=True), "version True"),
        (lambda d: d.pop("version"), "version None"),
        (lambda d: d.update(format="kflats-report"), "not a kflats plan"),
        (lambda d: d.update(surprise=1), "unknown fields"),
        (lambda d: d.pop("decisions"), "lacks .*decisions"),
        (lambda d: d.update(model_bytes=-1), "model_bytes"),
        (lambda d: d.update(model_bytes=1.5), "model_bytes"),
        (lambda d: d.update(allocation="greed"), "allocation 'greed'"),
        (
            lambda d: d["decisions"][0]["recipe"].update(matrix_rows="columns"),
            "matrix_rows should be one of .* found 'columns'",
        ),
        (lambda d: d["decisions"][0]["weight"].update(bias=1), "bias should be true or false"),
        (lambda d: d["decisions"].append(d["decisions"][0]), "twice"),
        (lambda d: d["decisions"].append(None), r"decisions\[2\] should be an object"),
        (lambda d: d["decisions"][0].update(colour="red"), r"decisions\[0\] has unknown fields"),
        (lambda d: d["decisions"][0].update(budget_bytes=0), "cannot be given 0"),
        (lambda d: d["decisions"][0].update(budget_bytes=10**9), "cannot be given"),
        (lambda d: d["decisions"][0].update(budget_bytes="all"), "budget_bytes"),
        (lambda d: d["decisions"][0]["weight"].update(shape=[30522]), "shape"),
        (lambda d: d["decisions"][0]["weight"].update(shape=[30522, 0]), "shape"),
        (lambda d: d["decisions"][0]["weight"].update(shape=[30522, 385]), "cannot take"),
        (lambda d: d["decisions"][0]["weight"].pop("dtype"), "dtype"),
        (lambda d: d["decisions"][0]["weight"].update(places=[{"name": "x"}]), "role"),
        (lambda d: d["decisions"][0]["recipe"]["method"].update(type="Magic"), "is called 'Magic'"),
        (lambda d: d["decisions"][0].pop("recipe"), "lacks .*recipe"),
    ],
)
def test_a_plan_file_that_cannot_be_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    path = edit(tmp_path / "plan.json", change)
    with pytest.raises(KflatsError, match=says) as caught:
        Plan.load(path)
    assert "plan.json" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b'"kflats-plan"',
        b'{"format": "kflats-plan", "version": 1}',
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(KflatsError, match="plan"):
        Plan.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(KflatsError, match=r"nowhere\.json cannot be read"):
        Plan.load(tmp_path / "nowhere.json")
    with pytest.raises(KflatsError, match="cannot be read"):
        Plan.load(tmp_path)


def test_a_plan_finds_its_weights_in_a_model() -> None:
    longer = {w.name: dataclasses.replace(w, name=f"bert.{w.name}") for w in (TABLE, LAYER)}
    found = PLAN.resolve(longer.__getitem__)
    assert [d.weight.name for d in found.decisions] == [f"bert.{TABLE.name}", f"bert.{LAYER.name}"]
    assert [d.recipe for d in found.decisions] == [d.recipe for d in PLAN.decisions]


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(TABLE, shape=(30000, 384), nbytes=30000 * 384 * 4),
        dataclasses.replace(TABLE, dtype="float16", nbytes=TABLE.nbytes // 2),
    ],
)
def test_a_plan_for_another_model_is_refused(other: Weight) -> None:
    with pytest.raises(KflatsError, match="the plan was made for"):
        PLAN.resolve(lambda name: other if name == TABLE.name else LAYER)


def test_two_names_of_one_weight_are_refused() -> None:
    same = dataclasses.replace(LAYER, shape=TABLE.shape, nbytes=TABLE.nbytes)
    plan = dataclasses.replace(PLAN, decisions=(PLAN.decisions[0], Decision(same, Recipe(SVD()), 1000)))
    with pytest.raises(KflatsError, match="twice"):
        plan.resolve(lambda name: TABLE)
