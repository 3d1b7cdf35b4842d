"""Plans: which weight, which recipe, how many bytes; nothing is fitted and nothing is changed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import kflats
from kflats import SVD, Auto, Flats, KroneckerFisher, Recipe, TokenCounts, TokenFisher, Uniform, ZipfPrior
from kflats.codecs import Float
from kflats.common.errors import KflatsError
from kflats.planning.calibration_data import CalibrationData, gather
from kflats.planning.decide import decide, plan
from kflats.planning.selection import select, token_embedding
from kflats.recipe.budget import parse_budget
from kflats.recipe.recipe import Plan

NAMES = ("words", "types", "project")


def toy() -> nn.ModuleDict:
    """A plain torch model: two embeddings and a linear layer."""
    return nn.ModuleDict({"types": nn.Embedding(40, 8), "words": nn.Embedding(200, 8), "project": nn.Linear(30, 50)})


def one_token(texts: list[str], verbose: bool) -> dict[str, list[list[int]]]:
    """A tokenizer of one token."""
    return {"input_ids": [[1]] * len(texts)}


def recipe_of(made: Plan, name: str = "words") -> Recipe:
    return next(d.recipe for d in made.decisions if d.weight.name == name)


def test_by_default_the_token_embedding_is_compressed_by_flats():
    made = plan(toy(), keep="50%")
    assert [d.weight.name for d in made.decisions] == ["words"]
    assert recipe_of(made) == Recipe(Flats(), Uniform())
    assert made.decisions[0].budget_bytes == 200 * 8 * 4 // 2
    assert "every row counts the same" in made.decisions[0].note


@pytest.mark.parametrize(
    ("data", "tokenizer", "expected"),
    [(["text"], True, TokenCounts()), (None, True, ZipfPrior()), (None, False, Uniform())],
    ids=["texts", "tokenizer", "nothing"],
)
def test_the_default_importance_takes_what_there_is(data, tokenizer, expected, tiny_tokenizer):
    made = plan(toy(), keep="50%", texts=data, tokenizer=tiny_tokenizer if tokenizer else None)
    assert recipe_of(made).importance == expected


@pytest.mark.parametrize(("reads", "table"), [("bert", TokenFisher(smoothing=1)), ("clip", ZipfPrior())])
def test_auto_measures_without_texts_where_the_model_reads_text_alone(reads, table, tiny_model, tiny_tokenizer):
    model = tiny_model("bert")
    if reads == "clip":  # whose forward takes images too
        model.forward = lambda input_ids=None, pixel_values=None: None
    made = plan(model, {"all": Auto()}, size="50%", tokenizer=tiny_tokenizer, samples=24)
    of = {decision.weight.name: decision.recipe.importance for decision in made.decisions}
    assert of["embeddings.word_embeddings"] == table
    layers = {type(importance) for name, importance in of.items() if "attention" in name}
    assert layers == {KroneckerFisher if reads == "bert" else Uniform}


@pytest.mark.parametrize(("letters", "smoothing"), [(40, 1), (400_000, 0.5)])
def test_counts_of_few_texts_are_left_out(letters, smoothing, tiny_model, tiny_tokenizer):
    texts = ["word1 word2 word3 word4. " * (letters // 40)] * 2
    data = gather(texts, tiny_tokenizer, None, None, None)
    (chosen,) = [s for s in select(tiny_model("bert"), {"all": Auto()}, data) if "word_embeddings" in s.weight.name]
    assert chosen.recipe.importance == TokenFisher(smoothing=smoothing)


def test_texts_without_a_tokenizer_are_not_ignored_in_silence():
    with pytest.raises(KflatsError, match="no tokenizer that could count them"):
        plan(toy(), keep="50%", texts=["text"])
    for chosen in (Flats(), Recipe(SVD(), Uniform())):  # a bare method means Uniform: asked for, but said
        made = plan(toy(), {"words": chosen, "project": SVD()}, keep="50%", texts=["text"])
        assert [d.note for d in made.decisions] == ["the texts are not counted: every row counts the same", ""]


@pytest.mark.parametrize("name", ["bert", "bert-lm", "gpt2"])
def test_transformers_models_say_which_table_tokens_enter(tiny_model, name):
    found = token_embedding(tiny_model(name))
    assert found.shape == (300, 16)
    assert len(found.places) == (1 if name == "bert" else 2)


def test_a_model_that_has_no_token_table_uses_its_largest_embedding():
    model = toy()
    assert token_embedding(model).name == "words"

    def refuse():
        raise NotImplementedError

    model.get_input_embeddings = refuse
    assert token_embedding(model).name == "words"
    with pytest.raises(KflatsError, match="no token embedding"):
        plan(nn.ModuleDict({"a": nn.Linear(4, 4)}), keep="50%")


def test_one_method_or_recipe_means_the_token_embedding_and_a_mapping_names_its_own():
    assert recipe_of(plan(toy(), SVD(), keep="50%")) == Recipe(SVD())
    assert recipe_of(plan(toy(), Recipe(SVD(), Uniform(), Float("float16")), keep="50%")).codec == Float("float16")
    made = plan(toy(), {"words": SVD(), "project": None, "types": Flats(k=2)}, keep="50%")
    assert [d.weight.name for d in made.decisions] == ["words", "project", "types"]
    assert recipe_of(made, "project") == Recipe(Flats(), Uniform())


def test_none_for_a_weight_that_holds_no_tokens_means_uniform_even_with_texts(tiny_tokenizer):
    made = plan(toy(), {"words": None, "types": None}, keep="50%", texts=["a"], tokenizer=tiny_tokenizer)
    found = {d.weight.name: d.recipe.importance for d in made.decisions}
    assert found == {"words": TokenCounts(), "types": Uniform()}


@settings(max_examples=40)
@given(
    names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
    kind=st.sampled_from(["%", "B", " params"]),
    percent=st.integers(1, 100),
)
def test_several_weights_share_one_budget_and_never_exceed_it(names, kind, percent):
    sizes = {"words": 200 * 8 * 4, "types": 40 * 8 * 4, "project": 30 * 50 * 4}
    total = sum(sizes[name] for name in names)
    amount = {"%": percent, "B": total * percent // 100, " params": total * percent // 400}[kind]
    allowed = {"%": total * percent // 100, "B": amount, " params": amount * 4}[kind]
    made = plan(toy(), dict.fromkeys(names, SVD()), keep=f"{amount}{kind}")
    assert sum(d.budget_bytes for d in made.decisions) == allowed <= total
    for decision in made.decisions:
        assert decision.weight.nbytes == sizes[decision.weight.name]
        assert abs(decision.budget_bytes * total - allowed * decision.weight.nbytes) <= total  # within a byte
        assert decision.budget_bytes <= decision.weight.nbytes


def test_planning_changes_and_fits_nothing():
    model = toy()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    plan(model, dict.fromkeys(NAMES, Flats(k=2)), keep="50%")
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_plan_can_be_kept_and_used_later(tmp_path):
    made = plan(toy(), {"words": Flats(k=2), "project": SVD()}, keep="70%")
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == made
    assert decide(toy(), loaded, None, CalibrationData()).plan == made
    assert decide(toy(), loaded, parse_budget("70%"), CalibrationData()).plan == made
    report = kflats.compress_(toy(), loaded, quiet=True)
    assert [w.name for w in report.weights] == ["words", "project"]
    for decision, weight in zip(made.decisions, report.weights, strict=True):
        assert weight.bytes_after <= decision.budget_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, p: (m, p, "60%"), "made for a budget of 70%, not 60%"),
        (lambda m, p: (nn.ModuleDict({"words": nn.Embedding(201, 8)}), p, None), "but the plan was made for"),
        (lambda m, p: (m.half(), p, None), "float16 here"),
        (lambda m, p: (nn.ModuleDict({"sounds": nn.Embedding(200, 8)}), p, None), "words"),
    ],
    ids=["other budget", "other shape", "other type", "other name"],
)
def test_a_plan_for_something_else_is_refused(change, message):
    model, made, budget = change(toy(), plan(toy(), {"words": Flats(k=2)}, keep="70%"))
    with pytest.raises(KflatsError, match=message):
        decide(model, made, parse_budget(budget) if budget else None, CalibrationData())


@pytest.mark.parametrize(
    ("recipes", "options", "message"),
    [
        ({}, {}, "no weight is named"),
        ({"word": SVD()}, {}, r"(?s)word.*words"),
        ({"projekt": SVD()}, {}, "project"),
        ({"": SVD()}, {}, "''"),
        ({"project": Recipe(SVD(), ZipfPrior())}, {"tokenizer": dict}, "linear layer"),
        ({"project": Recipe(SVD(), TokenCounts())}, {"tokenizer": one_token, "texts": ["a"]}, "weighs tokens"),
        ({"words": Recipe(SVD(), TokenCounts())}, {"tokenizer": dict}, "needs texts"),
        ({"words": Recipe(SVD(), TokenCounts())}, {"texts": ["a"]}, "needs the model's tokenizer"),
        ({"words": Recipe(SVD(), ZipfPrior())}, {}, "needs the model's tokenizer"),
        ({"words": Uniform()}, {}, "is not a method"),
        ({"words": SVD}, {}, "is not a method"),
        ("svd", {}, "is not a method"),
        (SVD(), {"keep": "0.6"}, "ambiguous"),
        (SVD(), {"keep": "150%"}, "more than the original"),
        (SVD(), {"keep": "1GB"}, "more than the named weights"),
        (SVD(), {"keep": "0%"}, "keeps nothing"),
        (SVD(), {"keep": 0.6}, "not a budget"),
    ],
)
def test_what_cannot_be_planned_is_refused(recipes, options, message):
    with pytest.raises(KflatsError, match=message):
        plan(toy(), recipes, **{"keep": "50%", **options})


def test_one_tied_weight_cannot_be_named_by_two_of_its_places(tiny_model):
    weight = token_embedding(tiny_model("gpt2"))
    with pytest.raises(KflatsError, match="named twice"):
        plan(tiny_model("gpt2"), {place.name: SVD() for place in weight.places}, keep="50%")


def test_a_count_of_parameters_needs_one_stored_type():
    recipes = {"words": Recipe(SVD(), Uniform(), Float("float16")), "project": SVD()}
    with pytest.raises(KflatsError, match="weights of different types"):
        plan(toy(), recipes, keep="500 params")


def test_no_budget_is_asked_for():
    with pytest.raises(KflatsError, match="no budget"):
        kflats.compress_(toy(), SVD())
