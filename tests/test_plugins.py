"""Methods, importances and codecs of another package: in plans, on the command line, chosen, stored, loaded without it.

The laws of tests/laws hold the same toys in their tables.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch
from kflats_toys import Bfloat, LogCounts, SignFlats, SketchedSVD, Ternary
from torch import nn

import kflats
from kflats import Auto, KeepDense, KflatsError, Plan, Recipe
from kflats.codecs import Table
from kflats.importance import Weighting
from kflats.io import load_model
from kflats.methods import METHODS, SVD
from kflats.numerics.rows import TensorRows
from kflats.planning.candidates import candidates
from kflats.report.report import Report

pytest.importorskip("constriction")

CLI = "from kflats.cli.app import main; main()"
WEIGHT = "embeddings.word_embeddings"


def command(*arguments: object, toys: Path | None) -> subprocess.CompletedProcess[str]:
    """Of a fresh process, which knows the toys only where it is given their folder."""
    folders = [os.path.dirname(os.path.dirname(kflats.__file__)), *([toys, toys / "metadata"] if toys else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=120, env=environment
    )


@pytest.fixture
def toy_recipe(toys: Path) -> Recipe:
    return Recipe(SketchedSVD(), LogCounts(), Ternary())


def test_a_plan_file_holds_them_and_names_the_one_that_is_missing(toy_recipe, tiny_model, tiny_tokenizer, tmp_path):
    plan = kflats.plan(
        tiny_model("bert"), {WEIGHT: toy_recipe}, keep="30%", texts=["word1 word2"], tokenizer=tiny_tokenizer
    )
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert "SketchedSVD(), LogCounts(), Ternary()" in str(plan)
    text = (tmp_path / "plan.json").read_text(encoding="utf-8")
    for name in ("SketchedSVD", "LogCounts", "Ternary"):
        (tmp_path / "plan.json").write_text(text.replace(name, "Gone"), encoding="utf-8")
        with pytest.raises(KflatsError, match=r"'Gone'.*install the package"):
            Plan.load(tmp_path / "plan.json")


@pytest.mark.slow
def test_a_command_line_uses_them_and_what_it_stored_loads_without_them(toys, tiny_folder, tmp_path) -> None:
    out, texts = tmp_path / "small", tmp_path / "texts.txt"
    texts.write_text("word1 word2 word2\n", encoding="utf-8")
    recipe = ["--method", "sketched-svd", "--importance", "log-counts", "--codec", "ternary", "--keep", "40%"]
    done = command("-c", CLI, "compress", tiny_folder, *recipe, "--texts", texts, "--out", out, toys=toys)
    assert done.returncode == 0, done.stdout + done.stderr
    (weight,) = Report.load(out).weights
    assert weight.recipe == "Recipe(SketchedSVD(), LogCounts(), Ternary())"
    assert weight.stored == "integers"
    program = (
        "import sys, torch, kflats; from transformers import AutoModel; "
        f"model = AutoModel.from_pretrained({str(out)!r}); assert 'kflats_toys' not in sys.modules; "
        f"torch.save(model(torch.arange(12).view(1, -1)).last_hidden_state, {str(tmp_path / 'states')!r})"
    )
    done = command("-c", program, toys=None)
    assert done.returncode == 0, done.stderr
    expected = load_model(out)(torch.arange(12).view(1, -1)).last_hidden_state
    assert torch.equal(torch.load(tmp_path / "states"), expected)


def test_a_name_with_capitals_is_found_as_it_is_listed(toys, monkeypatch) -> None:
    entry = EntryPoint("MyMethod", "kflats_toys:SignFlats", "kflats.methods")
    monkeypatch.setattr("kflats.common.registry.announced", lambda axis: EntryPoints((entry,)))
    assert "MyMethod" in METHODS.all_names()
    assert METHODS.make("MyMethod").__name__ == METHODS.make("mymethod").__name__ == "SignFlats"


def test_a_package_that_is_installed_meanwhile_is_seen(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "late" not in METHODS.all_names()
    info = tmp_path / "late-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kflats.methods]\nlate = late:Late\n")
    assert "late" in METHODS.all_names()


def test_automatic_choice_offers_them_and_takes_what_loses_least(toys) -> None:
    gen = torch.Generator().manual_seed(0)
    signs = torch.randint(-1, 2, (200, 128), generator=gen) * torch.rand(200, 1, generator=gen).add(0.5)
    rows = TensorRows(signs)
    table = Table(rows, Weighting(), torch.float32, SVD().spectrum(rows, Weighting()))
    offered = {(type(one.method), type(one.codec)) for one in candidates(Recipe(Auto()), table)}
    assert {(SketchedSVD, kflats.Float), (KeepDense, Ternary)} <= offered
    model = nn.ModuleDict({"table": nn.Embedding.from_pretrained(signs)})
    plan = kflats.plan(model, {"table": Auto()}, keep="6%")
    assert plan.decisions[0].recipe == Recipe(KeepDense(), codec=Ternary())
    assert kflats.compress_(model, plan, quiet=True).weights[0].error < 1e-6


def test_automatic_choice_takes_a_method_that_loses_less_than_an_svd_by_its_own_errors(toys) -> None:
    gen = torch.Generator().manual_seed(0)
    planes = torch.randn(2, 4, 32, generator=gen)
    rows = torch.einsum("nr,nrd->nd", torch.randn(400, 4, generator=gen), planes[torch.arange(400) % 2])
    rows *= torch.where((rows[:, :1] >= 0) == (torch.arange(400) % 2 == 1).unsqueeze(1), 1.0, -1.0)
    model = nn.ModuleDict({"table": nn.Embedding.from_pretrained(rows)})
    plan = kflats.plan(model, {"table": Auto()}, keep="9%")
    assert plan.decisions[0].recipe == Recipe(SignFlats(), codec=kflats.Float("float16"))
    (weight,) = kflats.compress_(model, plan, quiet=True).weights
    assert weight.bytes_after <= 0.09 * rows.numel() * 4
    assert weight.error < 1e-5 < weight.svd_error


def test_a_codec_of_floating_point_numbers_works_with_every_method_and_layer(tmp_path) -> None:
    recipes = {
        "conv": SketchedSVD(), "dense": KeepDense(), "flats": kflats.Flats(k=2), "skeleton": SVD(form="interpolative")
    }  # fmt: skip

    def build() -> nn.Module:
        torch.manual_seed(0)
        linear = {name: nn.Linear(48, 32) for name in ("dense", "flats", "skeleton")}
        return nn.ModuleDict({"conv": nn.Conv2d(8, 16, 3), **linear})

    model, fresh = build(), build()
    report = kflats.compress_(
        model, {name: Recipe(method, codec=Bfloat()) for name, method in recipes.items()}, keep="50%", quiet=True
    )
    kept = {weight.name: weight.kept for weight in report.weights}
    assert kept["dense"] == "bfloat16"
    assert not any(weight.stored == "integers" or weight.dense for weight in report.weights)
    assert all(" of " in kept[name] for name in recipes if name != "dense"), kept
    kflats.save(model, tmp_path)
    kflats.load_(fresh, tmp_path)
    state = fresh.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
