"""Never wrong in silence: whatever is given, the answer is right or an error that says what, why and what to try."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import kflats
from kflats import SVD, Auto, Flats, Recipe, TokenCounts, Uniform, ZipfPrior
from kflats.common.errors import KflatsError
from kflats.common.text_files import read_texts
from kflats.compress.pipeline import compress_, compress_folder
from kflats.io import load_model
from kflats.planning.decide import plan
from kflats.recipe.budget import Budget
from kflats.recipe.recipe import Plan

TABLE = "embeddings.word_embeddings"


@pytest.fixture
def folder(tiny_folder, tmp_path) -> Path:
    """A copy of the tiny model that a test may damage."""
    copy = tmp_path / "model"
    shutil.copytree(tiny_folder, copy)
    return copy


def refused(message: str, folder: Path, **options: object) -> KflatsError:
    """``compress_folder`` fails with ``message`` and leaves nothing behind, beside nothing changed."""
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} if folder.is_dir() else {}
    out = folder.parent / "out"
    with pytest.raises(KflatsError, match=message) as caught:
        compress_folder(folder, out, **{"keep": "50%", "quiet": True, **options})
    assert not out.exists()
    assert not [p for p in folder.parent.iterdir() if p.name.startswith(".out")]
    assert {p: p.read_bytes() for p in before} == before
    return caught.value


# Texts and tokenizers


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no text"),
        (b"\n \n\t\n", "has no text"),
        (b"PAR1\x00\x01\x02", "zero bytes"),
        ("naïve".encode("latin1"), "other than UTF-8"),
        ("words".encode("utf-16"), "zero bytes"),
        (None, "cannot be read"),
    ],
    ids=["empty", "blank", "binary", "latin1", "utf-16", "missing"],
)
def test_texts_that_are_no_texts(tmp_path, content, message):
    path = tmp_path / "texts.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KflatsError, match=message) as caught:
        read_texts(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("texts", [(), [], iter(())], ids=["tuple", "list", "iterator"])
def test_no_texts_at_all(folder, texts):
    refused("no texts to count", folder, texts=texts)


@pytest.mark.parametrize("texts", ["one string", b"bytes"])
def test_a_string_is_not_a_list_of_texts(folder, texts):
    refused("not one string", folder, texts=texts)


def test_texts_that_hold_something_else(folder):
    refused("found int", folder, texts=["the", 3])


@pytest.mark.parametrize("damage", ["missing", "broken", "empty"])
@pytest.mark.parametrize("asked", ["texts", "zipf"])
def test_a_tokenizer_that_is_needed_but_not_there(folder, damage, asked):
    for path in folder.glob("*token*"):
        if damage == "missing":
            path.unlink()
        elif path.name == "tokenizer.json":
            path.write_text("{ not json" if damage == "broken" else "")
    options = {"texts": ["the"]} if asked == "texts" else {"method": Recipe(Flats(k=2), ZipfPrior())}
    refused("no tokenizer that can be loaded", folder, **options)


def test_a_tokenizer_that_is_not_needed_is_missed_in_words(folder):
    for path in folder.glob("*token*"):
        path.unlink()
    report = compress_folder(folder, folder.parent / "out", keep="50%", quiet=True)
    assert report.weights[0].importance == {"type": "Uniform"}
    assert "every row counts the same" in report.weights[0].note
    assert "every row counts the same" in str(report)


def test_a_tokenizer_of_another_model(tiny_model, tiny_tokenizer):
    model = tiny_model("bert")
    model.resize_token_embeddings(100)
    for recipe, data in ((None, ["word200"]), (Recipe(SVD(), ZipfPrior()), None)):
        before = model.get_input_embeddings()
        with pytest.raises(KflatsError, match="another model"):
            compress_(model, recipe, keep="50%", texts=data, tokenizer=tiny_tokenizer, quiet=True)
        assert model.get_input_embeddings() is before


@pytest.mark.slow
def test_a_model_of_texts_without_a_tokenizer_says_that_nothing_is_measured(tiny_model, capsys):
    compress_(tiny_model("bert"), {"all": Auto()}, size="60%")
    assert "nothing is measured: there is no tokenizer" in capsys.readouterr().err


def test_with_a_tokenizer_nothing_is_said_of_an_importance_that_measures_nothing(tiny_model, tiny_tokenizer, capsys):
    compress_(tiny_model("bert"), {"all": Recipe(Auto(), Uniform())}, size="60%", tokenizer=tiny_tokenizer)
    assert "nothing is measured" not in capsys.readouterr().err


def test_a_folder_in_place_of_a_model(folder):
    with pytest.raises(KflatsError, match=r"expected a model, found str.*compress_folder"):
        compress_(str(folder), SVD(), keep="50%", quiet=True)  # type: ignore[arg-type]


def test_a_model_and_a_folder_in_each_others_place(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    compress_(model, {"linear": SVD()}, keep="50%", quiet=True)
    kflats.save(model, tmp_path)
    with pytest.raises(KflatsError, match="expected a model, found "):
        kflats.load_(tmp_path, model)  # type: ignore[arg-type]
    with pytest.raises(KflatsError, match="expected the name of a folder, found Sequential"):
        kflats.load_(model, model)  # type: ignore[arg-type]


def test_texts_without_a_tokenizer(tiny_model):
    with pytest.raises(KflatsError, match="no tokenizer"):
        compress_(tiny_model("bert"), keep="50%", texts=["the"], quiet=True)


# Models


def change(folder: Path, edit) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_table_with_values_that_are_no_numbers(folder, bad):
    change(folder, lambda t: t[f"{TABLE}.weight"].__setitem__((7, 3), bad))
    error = refused(rf"{TABLE}\.weight has NaN .*rows 7 to 7 of", folder)
    assert error.cause
    assert error.hint


def test_a_table_with_values_too_large_to_square(folder):
    change(folder, lambda t: t[f"{TABLE}.weight"].mul_(1e30))
    refused(rf"{TABLE}: .*too large", folder)


@pytest.mark.parametrize("method", [SVD(), Flats(k=2)], ids=["svd", "flats"])
def test_a_table_with_values_too_small_to_square(folder, method):
    change(folder, lambda t: t[f"{TABLE}.weight"].mul_(1e-25))
    refused(rf"{TABLE}: .*too small", folder, method=method)


@pytest.mark.parametrize(
    "options", [{"k": 2.5}, {"k": "5"}, {"k": True}, {"nested_ranks": 2.5}, {"start": 1.5}], ids=str
)
def test_numbers_of_flats_that_are_no_whole_numbers(options):
    with pytest.raises(KflatsError, match="is not supported with Flats"):
        Flats(**options)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "no folder"),
        (lambda f: (f / "config.json").unlink(), "holds no model"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be loaded"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "no safetensors.*pickle"),
        (lambda f: (f / "model.safetensors").unlink(), r"has a config.json and no safetensors.*did not finish"),
        (lambda f: (f / "model.safetensors").write_bytes(b"short"), "cannot be read"),
        (lambda f: change(f, lambda t: t.update({f"{TABLE}.weight": torch.zeros(9, 16)})), r"of shape \(9, 16\)"),
    ],
    ids=["no folder", "no config", "broken config", "pickle", "no weights", "truncated", "other shape"],
)
def test_a_folder_without_a_model_that_can_be_read(folder, spoil, message):
    spoil(folder)
    with pytest.raises(KflatsError, match=message):
        compress_folder(folder, folder.parent / "out", keep="50%", quiet=True)
    assert not (folder.parent / "out").exists()


def test_models_in_folders_of_a_folder_are_named(folder, tmp_path):
    cache = tmp_path / "models--tiny"
    shutil.move(folder, cache / "snapshots" / "0123")
    inside = cache / "snapshots" / "0123"
    error = refused("holds no model", cache)
    assert error.hint == f"{inside}, which holds a model"
    shutil.copytree(inside, cache / "another")
    assert refused("holds no model", cache).hint == f"{cache / 'another'}, one of 2 folders with a model"
    for place in (inside, cache / "another"):
        (place / "model.safetensors").unlink()
    assert refused("holds no model", cache).hint == ""


def test_a_table_that_is_compressed_already(folder):
    compress_folder(folder, folder.parent / "small", keep="50%", quiet=True)
    with pytest.raises(KflatsError, match="compressed already"):
        compress_folder(folder.parent / "small", folder.parent / "out", keep="50%", quiet=True)
    with pytest.raises(KflatsError, match=TABLE):
        compress_folder(folder.parent / "small", folder.parent / "out", keep="50%", weights=(TABLE,), quiet=True)
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=str)
def test_an_embedding_that_does_what_factors_cannot(option):
    model = nn.ModuleDict({"words": nn.Embedding(50, 8, **option)})
    with pytest.raises(KflatsError, match=next(iter(option))):
        compress_(model, {"words": SVD()}, keep="50%", quiet=True)


@pytest.mark.parametrize("layer", [nn.Embedding(50, 8), nn.Linear(50, 8)])
def test_a_layer_that_nothing_holds(layer):
    with pytest.raises(KflatsError, match=r"itself the layer.*a model that holds"):
        compress_(layer, {"": SVD()}, keep="50%", quiet=True)


def test_a_model_without_values():
    with torch.device("meta"):
        model = nn.ModuleDict({"words": nn.Embedding(50, 8)})
    with pytest.raises(KflatsError, match="words has a shape but no values"):
        compress_(model, {"words": SVD()}, keep="50%", quiet=True)


def test_no_name_is_not_the_current_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(KflatsError, match="no model is named"):
        compress_folder("", folder.parent / "out", keep="50%", quiet=True)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_constant_table_comes_back_as_it_was(value):
    model = nn.ModuleDict({"words": nn.Embedding(50, 8)})
    nn.init.constant_(model["words"].weight, value)
    report = compress_(model, {"words": Flats(k=2)}, keep="60%", quiet=True)
    torch.testing.assert_close(model["words"](torch.arange(50)).detach(), torch.full((50, 8), value))
    assert report.weights[0].error == pytest.approx(0, abs=1e-9)
    assert str(report)


def test_a_failed_factorization_is_an_error_never_a_random_or_another_layer(monkeypatch):
    def fail(*args, **kwargs):
        raise torch.linalg.LinAlgError("did not converge")

    model = nn.ModuleDict({"words": nn.Embedding(50, 8)})
    before = model["words"]
    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with pytest.raises(torch.linalg.LinAlgError):
        compress_(model, {"words": SVD()}, keep="50%", quiet=True)
    assert model["words"] is before


# Budgets


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("0%", "keeps nothing"),
        ("-5%", "keeps nothing"),
        ("nan%", "keeps nothing"),
        ("101%", "more than the original"),
        ("0.5", "ambiguous"),
        ("half", "not a budget"),
        ("", "not a budget"),
        ("5 bananas", "unknown unit"),
        ("1GB", "more than the named weights"),
        ("20B", "cannot hold"),
        (0.5, "not a budget"),
    ],
)
def test_budgets_that_mean_nothing(folder, budget, message):
    refused(message, folder, keep=budget)


@pytest.mark.parametrize("size", ["1%", "1000%", "100B", "1GB", "100 params"])
def test_file_budgets_that_cannot_be_met(folder, size):
    with pytest.raises(KflatsError):
        compress_folder(folder, folder.parent / "out", keep=kflats.parse_budget(size, scope="file"), quiet=True)
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize("method", [SVD(), Flats(k=2), Flats(k=None)], ids=["svd", "flats", "searched"])
@pytest.mark.parametrize("budget", ["97%", "100%"])
def test_no_compressed_file_is_larger_than_the_original(folder, method, budget):
    out = folder.parent / "out"
    refusal = ""
    try:
        compress_folder(folder, out, keep=budget, method=method, quiet=True)
    except KflatsError as error:
        refusal = str(error)
    if refusal:  # factors that save nothing: their description makes the file larger than it was
        assert budget == "100%"
        assert "more than the original's" in refusal
        assert not out.exists()
    else:
        assert (out / "model.safetensors").stat().st_size <= (folder / "model.safetensors").stat().st_size


# Names and plans


def test_a_name_that_is_none_of_the_model_s_lists_near_ones(folder):
    error = refused("word_embedings", folder, method=SVD(), weights=("embeddings.word_embedings",))
    assert TABLE in str(error)


def test_token_importance_on_a_layer_that_reads_no_tokens(folder):
    refused("linear layer", folder, method=Recipe(SVD(), ZipfPrior()), weights=("encoder.layer.0.output.dense",))
    refused("needs texts", folder, method=Recipe(SVD(), TokenCounts()))


def test_token_importance_on_positions(folder):
    method = Recipe(SVD(), ZipfPrior())
    refused("an embedding of positions", folder, method=method,
            weights=("embeddings.position_embeddings",))  # fmt: skip


PLANS = {
    "newer": (lambda p: p.update(version=2), "newer kflats"),
    "another file": (lambda p: p.update(format="other"), "not a kflats plan"),
    "unknown method": (lambda p: p["decisions"][0]["recipe"]["method"].update(type="Magic"), "Magic.*SVD"),
    "unknown field": (lambda p: p["decisions"][0]["recipe"]["method"].update(depth=3), "unknown fields .*depth"),
    "wrong type": (
        lambda p: p["decisions"][0]["recipe"]["method"].update(k="five"),
        "k should be .*, found 'five'",
    ),
    "value out of range": (lambda p: p["decisions"][0]["recipe"]["method"].update(k=0), "k=0 is not supported"),
    "unknown name": (lambda p: p["decisions"][0]["weight"].update(name="wordz"), "wordz"),
    "other shape": (lambda p: p["decisions"][0]["weight"].update(shape=[600, 8]), "made for"),
    "no bytes": (lambda p: p["decisions"][0].update(budget_bytes=0), "cannot be given 0"),
    "too many bytes": (lambda p: p["decisions"][0].update(budget_bytes=10**9), "cannot be given"),
    "bytes as text": (lambda p: p["decisions"][0].update(budget_bytes="many"), "budget_bytes"),
    "twice": (lambda p: p["decisions"].append(p["decisions"][0]), "twice"),
    "no decisions": (lambda p: p.pop("decisions"), "lacks .*decisions"),
}


@pytest.mark.parametrize(("edit", "message"), PLANS.values(), ids=PLANS.keys())
def test_plans_that_are_damaged_or_for_another_model(folder, edit, message):
    path = folder.parent / "plan.json"
    plan(load_model(folder), {TABLE: Recipe(Flats(k=2), Uniform())}, keep="50%").save(path)
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(KflatsError, match=message):
        compress_folder(folder, folder.parent / "out", plan=Plan.load(path), quiet=True)
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe\x00", b"null", b'{"format": "kflats-plan"}'])
def test_files_that_are_no_plans(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(KflatsError):
        Plan.load(path)


def test_an_empty_plan_is_not_a_success(folder):
    empty = Plan((), Budget("fraction", 0.5), 1000)
    with pytest.raises(KflatsError, match="no weight is named"):
        compress_folder(folder, folder.parent / "out", plan=empty, quiet=True)


def test_every_error_names_symptom_and_a_way_on(folder):
    for error in (
        refused("keeps nothing", folder, keep="0%"),
        refused("cannot hold", folder, keep="20B"),
        refused("no texts", folder, texts=()),
    ):
        assert error.symptom
        assert error.cause or error.hint
        assert "Likely cause" in str(error) or "Try" in str(error)
