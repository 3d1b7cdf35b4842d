"""The whole path: in memory and by folder; whole or not at all, and resumable."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import kflats
from kflats import MESSI, SVD, Auto, Feedback, Flats, KeepDense, KMeansSVD, Recipe, TokenCounts, Uniform, ZipfPrior
from kflats.codecs import Float
from kflats.common.errors import KflatsError
from kflats.compress import fitting, pipeline
from kflats.compress.pipeline import Prepared, compress_, compress_folder
from kflats.evaluation.outputs import weight_file_bytes
from kflats.io.atomic import MANIFEST
from kflats.matrices.layers import FactoredEmbedding
from kflats.planning.calibration_data import CalibrationData
from kflats.planning.decide import plan
from kflats.recipe.recipe import Plan
from kflats.report.report import REPORT_FILE, Report

TEXTS = ("the word1 of word2", "word3 the the", "a b of")
TWO = ("embeddings.word_embeddings", "encoder.layer.0.output.dense")
METHODS = {"svd": SVD(), "flats": Flats(k=2), "k-means": KMeansSVD(k=2), "messi": MESSI(k=2)}


def toy() -> nn.ModuleDict:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.ModuleDict({"words": nn.Embedding(200, 8), "types": nn.Embedding(40, 8), "out": nn.Linear(30, 50)})


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[key]) for key, value in a.items())


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def beside(out: Path) -> list[str]:
    """What a run left next to its output, hidden or not."""
    return sorted(p.name for p in out.parent.iterdir() if p != out)


# In memory


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
@pytest.mark.parametrize("budget", ["30%", "3kB", "700 params"])
def test_weights_are_replaced_within_the_budget(method, budget):
    model = toy()
    before = model["words"].weight.detach().clone()
    report = compress_(model, {"words": method}, keep=budget, quiet=True)
    allowed = {"30%": 0.3 * 6400, "3kB": 3000, "700 params": 700 * 4}[budget]
    matrix = model["words"].matrix
    assert isinstance(model["words"], FactoredEmbedding)
    assert (matrix.num_values * 4 if "params" in budget else matrix.nbytes) <= allowed
    (told,) = report.weights
    assert (told.bytes_before, told.bytes_after, told.values_after) == (6400, matrix.nbytes, matrix.num_values)
    assert report.model_bytes_before - report.model_bytes_after == 6400 - matrix.nbytes
    error = float((matrix.dense().detach() - before).square().sum() / before.square().sum())
    assert told.error == pytest.approx(error, rel=1e-4)
    assert told.error_unweighted == pytest.approx(told.error, rel=1e-6)
    assert 0 < error < 1


@pytest.mark.parametrize("name", ["bert", "bert-lm", "gpt2"])
def test_tied_tables_stay_tied_and_models_still_run(tiny_model, tiny_tokenizer, name, tmp_path):
    model = tiny_model(name)
    report = compress_(model, keep="60%", texts=TEXTS, tokenizer=tiny_tokenizer, quiet=True)
    told = report.weights[0]
    assert told.importance["type"] == "TokenCounts"
    assert len(told.places) == (1 if name == "bert" else 2)
    assert told.bytes_after <= 0.6 * 300 * 16 * 4
    ids = torch.tensor([[2, 15, 16, 3]])
    with torch.no_grad():
        out = model(ids)[0]
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(again(ids)[0], out)


@pytest.mark.parametrize("seed", [-1, 1.5, None, "a", 2**63])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(KflatsError, match=r"seed=.* is not supported"):
        compress_(toy(), {"words": Flats(k=2)}, keep="60%", seed=seed, quiet=True)


def test_equal_seeds_give_equal_factors_and_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    made = []
    for _ in range(2):
        model = toy()
        compress_(model, {"words": Flats(k=2), "out": MESSI(k=2)}, keep="60%", seed=3, quiet=True)
        made.append(state(model))
    assert same(*made)
    assert torch.equal(before, torch.get_rng_state())


def test_counted_tokens_lose_less_than_others(tiny_model, tiny_tokenizer):
    rows = {}
    for importance in (Uniform(), TokenCounts(power=1, smoothing=0, floor=0.01)):
        model = tiny_model("bert")
        table = model.embeddings.word_embeddings.weight.detach().clone()
        recipe = Recipe(Flats(k=2), importance)
        compress_(model, recipe, keep="40%", texts=TEXTS, tokenizer=tiny_tokenizer, quiet=True)
        read = torch.tensor(sorted({i for ids in tiny_tokenizer(list(TEXTS))["input_ids"] for i in ids}))
        left = model.embeddings.word_embeddings.matrix.dense().detach() - table
        rows[type(importance)] = float(left[read].square().sum())
    assert rows[TokenCounts] < 0.2 * rows[Uniform]


def test_texts_may_come_from_a_generator(tiny_model, tiny_tokenizer):
    told = []
    for data in (TEXTS, (text for text in TEXTS)):
        report = compress_(tiny_model("bert"), keep="50%", texts=data, tokenizer=tiny_tokenizer, quiet=True)
        told.append(report.weights[0].error)
    assert told[0] == told[1]


def test_a_codec_buys_more_coordinates_for_the_same_bytes():
    errors = {}
    for dtype in ("same", "bfloat16", "float16"):
        model = toy()
        report = compress_(model, {"words": Recipe(SVD(), Uniform(), Float(dtype))}, keep="40%", quiet=True)
        assert report.weights[0].bytes_after <= 0.4 * 6400
        assert model["words"](torch.tensor([1])).dtype == torch.float32
        errors[dtype] = report.weights[0].error
    assert errors["float16"] < errors["same"]
    assert errors["bfloat16"] < errors["same"]


@pytest.mark.parametrize(
    ("recipes", "spoil", "message"),
    [
        ({"words": SVD(), "out": Flats(k=2)}, lambda m: m["out"].weight.data[0].fill_(torch.nan), "out: .*row 0"),
        ({"words": SVD(), "out": Flats(k=40)}, lambda m: None, "out: 40 flats|out: a budget"),
        ({"types": SVD(), "words": MESSI(k=100)}, lambda m: None, "words: a budget of .* cannot hold 100 flats"),
        ({"words": Recipe(SVD(), Uniform(), Float("float16"))}, lambda m: m["words"].weight.data.mul_(1e6), "overflow"),
    ],
    ids=["nan", "too many flats", "budget too small", "overflow"],
)
def test_a_failed_fit_leaves_the_model_as_it_was(recipes, spoil, message):
    model = toy()
    spoil(model)
    before, modules = state(model), dict(model.named_modules())
    with pytest.raises(KflatsError, match=message):
        compress_(model, recipes, keep="60%", quiet=True)
    after = {k: v.nan_to_num() for k, v in state(model).items()}
    assert same({k: v.nan_to_num() for k, v in before.items()}, after)
    assert dict(model.named_modules()) == modules


@pytest.mark.parametrize("name", ["bert-lm", "gpt2"])
@pytest.mark.parametrize("where", ["second swap", "annotation"])
def test_a_failure_after_the_first_swap_undoes_it(tiny_model, monkeypatch, name, where):
    model = tiny_model(name)
    linear = next(n for n, m in model.named_modules() if n.endswith(("output.dense", "mlp.c_fc")))
    table = kflats.planning.selection.token_embedding(model).name
    before, modules, config = state(model), dict(model.named_modules()), model.config.to_dict()
    ties = dict(model.all_tied_weights_keys)
    tied = model.get_input_embeddings().weight
    real, calls = fitting.Swaps.swap_, []

    def swap(*args, **options):
        calls.append(args)
        if len(calls) == 2 and where == "second swap":
            raise KflatsError("refused")
        real(*args, **options)

    def refuse(model):
        raise KflatsError("refused")

    monkeypatch.setattr(fitting.Swaps, "swap_", swap)
    if where == "annotation":
        monkeypatch.setattr(fitting, "annotate_", refuse)
    with pytest.raises(KflatsError, match="refused"):
        compress_(model, {table: SVD(), linear: SVD()}, keep="50%", quiet=True)
    assert len(calls) == 2
    assert same(before, state(model))
    assert dict(model.named_modules()) == modules
    assert model.config.to_dict() == config
    assert model.all_tied_weights_keys == ties
    assert model.get_output_embeddings().weight is tied is model.get_input_embeddings().weight
    monkeypatch.undo()
    model.resize_token_embeddings(310)  # the model's own again
    assert compress_(model, {table: SVD(), linear: SVD()}, keep="50%", quiet=True).weights  # and once more, unspoilt


def test_a_plain_torch_model_is_saved_and_loaded(tmp_path):
    model = toy()
    compress_(model, {"words": Flats(k=2), "out": SVD()}, keep="60%", quiet=True)
    kflats.save(model, tmp_path / "small")
    again = toy()
    kflats.load_(again, tmp_path / "small")
    assert same(state(model), state(again))
    ids, x = torch.tensor([0, 199]), torch.randn(3, 30)
    assert torch.equal(model["words"](ids), again["words"](ids))
    assert torch.equal(model["out"](x), again["out"](x))


# By folder


def test_a_folder_loads_where_the_original_did(tiny_folder, tmp_path):
    out = tmp_path / "small"
    report = compress_folder(tiny_folder, out, keep="60%", texts=TEXTS, quiet=True)
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(out)
    assert isinstance(model.embeddings.word_embeddings, FactoredEmbedding)
    assert AutoTokenizer.from_pretrained(out)("the of")["input_ids"] == [2, 15, 16, 3]
    assert Report.load(out / REPORT_FILE) == report
    assert report.model_bytes_before - report.model_bytes_after >= 0.4 * 300 * 16 * 4
    assert weight_file_bytes(out) < weight_file_bytes(tiny_folder)
    assert beside(out) == []


@pytest.mark.parametrize("share", [0.62, 0.8, 0.97])
def test_a_file_budget_bounds_the_weight_files(tiny_folder, tmp_path, share):
    before = weight_file_bytes(tiny_folder)
    limit = int(share * before)
    budget = kflats.parse_budget(f"{limit}B", scope="file")
    compress_folder(tiny_folder, tmp_path / "small", keep=budget, method=SVD(), weights=TWO, quiet=True)
    after = weight_file_bytes(tmp_path / "small")
    # Short by less than a rank of each weight and what the header is allowed.
    assert limit - (300 + 16) * 4 - (32 + 16) * 4 - 2 * 2 * 250 < after <= limit


def test_a_larger_budget_is_kept_where_it_is_asked_for(tiny_folder, tmp_path):
    from kflats.io import load_model

    words, method, out = TWO[:1], MESSI(k=2, restarts=1), tmp_path / "larger"
    keep = "106%, larger allowed"  # two flats of 15 dimensions, of a table of 16 columns
    with pytest.raises(KflatsError, match="larger allowed"):
        compress_folder(tiny_folder, out, keep="106%", method=method, weights=words, quiet=True)
    report = compress_folder(tiny_folder, out, keep=keep, method=method, weights=words, quiet=True)
    (weight,) = report.weights
    assert weight.bytes_before < weight.bytes_after <= 1.06 * weight.bytes_before
    rows = load_model(tiny_folder).embeddings.word_embeddings.weight.detach()
    left = load_model(out).embeddings.word_embeddings.matrix.dense().detach() - rows
    assert float(left.square().sum() / rows.square().sum()) == pytest.approx(weight.error, rel=1e-2, abs=1e-9)
    made = plan(load_model(tiny_folder), dict.fromkeys(words, method), keep=keep)
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made


def test_equal_input_gives_equal_files(tiny_folder, tmp_path):
    for name in ("a", "b"):
        compress_folder(tiny_folder, tmp_path / name, keep="50%", texts=TEXTS, seed=1, quiet=True)
    a, b = files(tmp_path / "a"), files(tmp_path / "b")
    for one in (a, b):
        one.pop(REPORT_FILE), one.pop(MANIFEST)  # the report holds seconds, the manifest the report's hash
    assert a == b


@pytest.mark.slow
def test_sizes_share_what_was_prepared_and_give_the_files_of_single_calls(tiny_folder, tmp_path, monkeypatch):
    was, measured = CalibrationData.measured, []
    monkeypatch.setattr(CalibrationData, "measured", lambda *args: measured.append(1) or was(*args))
    prepared, asked = Prepared(), {"texts": TEXTS, "method": Auto(), "weights": ("all",), "proof": False, "quiet": True}
    for keep in ("60%", "40%"):
        compress_folder(tiny_folder, tmp_path / f"shared-{keep}", keep=keep, prepared=prepared, **asked)
    assert len(measured) == 1
    for keep in ("60%", "40%"):
        compress_folder(tiny_folder, tmp_path / keep, keep=keep, **asked)
        alone, shared = files(tmp_path / keep), files(tmp_path / f"shared-{keep}")
        assert alone["model.safetensors"] == shared["model.safetensors"]
    with pytest.raises(KflatsError, match="prepared measurements are of another model"):
        compress_folder(tiny_folder, tmp_path / "other", keep="50%", prepared=prepared, **asked | {"texts": TEXTS[1:]})


def test_an_existing_folder_is_refused_and_force_keeps_it_until_the_new_one_is_complete(
    tiny_folder, tmp_path, monkeypatch
):
    out = tmp_path / "small"
    compress_folder(tiny_folder, out, keep="50%", method=SVD(), quiet=True)
    old = files(out)
    with pytest.raises(KflatsError, match="exists already"):
        compress_folder(tiny_folder, out, keep="30%", method=SVD(), quiet=True)
    assert files(out) == old

    def watch(*args):
        assert files(out) == old  # still there while the new one is being written
        raise KflatsError("stopped")

    monkeypatch.setattr(pipeline, "copy_companions", watch)
    with pytest.raises(KflatsError, match="stopped"):
        compress_folder(tiny_folder, out, keep="30%", method=SVD(), force=True, quiet=True)
    assert files(out) == old
    monkeypatch.undo()
    compress_folder(tiny_folder, out, keep="30%", method=SVD(), force=True, quiet=True)
    assert files(out) != old
    assert beside(out) == []


@pytest.mark.parametrize("where", ["new", "file", "foreign"])
def test_what_is_not_a_model_is_never_replaced(tiny_folder, tmp_path, where):
    out = tmp_path / "out"
    if where == "file":
        out.write_text("mine")
    elif where == "foreign":
        out.mkdir()
        (out / "thesis.tex").write_text("mine")
    if where == "new":
        compress_folder(tiny_folder, out, keep="50%", force=True, quiet=True)
        return
    with pytest.raises(KflatsError):
        compress_folder(tiny_folder, out, keep="50%", force=True, quiet=True)
    assert (out if where == "file" else out / "thesis.tex").read_text() == "mine"


def test_a_folder_that_holds_the_original_is_never_replaced(tiny_folder, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(tiny_folder, out / "0_Transformer")
    (out / "config.json").write_text("{}")
    before = files(out)
    with pytest.raises(KflatsError, match="holds the original, 0_Transformer"):
        compress_folder(out / "0_Transformer", out, keep="50%", method=SVD(), force=True, quiet=True)
    assert files(out) == before


KILLED = """
import os, signal, sys
import kflats
from kflats.compress.fitting import Partial
from kflats import SVD
from kflats.compress.pipeline import compress_folder

put = Partial.put
def put_and_die(self, *args):
    put(self, *args)
    os.kill(os.getpid(), signal.SIGKILL)

Partial.put = put_and_die
source, out, *names = sys.argv[1:]
compress_folder(source, out, keep="50%", method=SVD(), weights=tuple(names), force=True, quiet=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="no kill -9")
@pytest.mark.slow
def test_after_kill_9_finished_weights_are_not_fitted_again(tiny_folder, tmp_path, monkeypatch):
    out = tmp_path / "small"
    options = {"keep": "50%", "method": SVD(), "weights": TWO, "quiet": True}
    compress_folder(tiny_folder, out, keep="20%", method=SVD(), quiet=True)
    old = files(out)
    run = subprocess.run([sys.executable, "-c", KILLED, str(tiny_folder), str(out), *TWO], check=False, timeout=120)
    assert run.returncode == -signal.SIGKILL
    assert files(out) == old
    assert any("partial" in name for name in beside(out))

    fitted = []
    fit = SVD.fit
    monkeypatch.setattr(SVD, "fit", lambda self, problem: fitted.append(problem.rows.shape) or fit(self, problem))
    report = compress_folder(tiny_folder, out, force=True, **options)
    assert fitted == [(32, 16)]  # the first weight, 300 x 16, was finished
    assert [w.name for w in report.weights] == list(TWO)
    assert beside(out) == []
    monkeypatch.undo()
    compress_folder(tiny_folder, tmp_path / "whole", **options)
    kept, whole = files(out), files(tmp_path / "whole")
    assert kept["model.safetensors"] == whole["model.safetensors"]
    from transformers import AutoModel

    AutoModel.from_pretrained(out)


@pytest.mark.parametrize("change", ["keep", "seed", "texts", "method", "damage"])
def test_leftovers_of_other_input_are_not_used(tiny_folder, tmp_path, monkeypatch, change):
    out = tmp_path / "small"
    first = {"keep": "50%", "method": Recipe(Flats(k=2), ZipfPrior()), "seed": 0, "texts": TEXTS, "quiet": True}
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "copy_companions", lambda *args: (_ for _ in ()).throw(KflatsError("stopped")))
        with pytest.raises(KflatsError, match="stopped"):
            compress_folder(tiny_folder, out, **first)
    (partial,) = [p for p in tmp_path.iterdir() if "partial" in p.name]
    second = dict(first)
    if change == "damage":
        (file,) = partial.glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-3] ^= 0xFF
        file.write_bytes(bytes(data))
    else:
        second[change] = {"keep": "40%", "seed": 1, "texts": TEXTS[:1], "method": Recipe(Flats(k=3), ZipfPrior())}[
            change
        ]
    fitted = []
    fit = Flats.fit
    monkeypatch.setattr(Flats, "fit", lambda self, problem: fitted.append(1) or fit(self, problem))
    compress_folder(tiny_folder, out, **second)
    assert fitted == [1]
    assert beside(out) == []


@pytest.mark.parametrize("what", ["partial", "model", "companions", "durable", "rename"])
@pytest.mark.parametrize("replacing", [False, True], ids=["new", "force"])
def test_a_full_disk_damages_nothing_and_the_next_run_resumes(tiny_folder, tmp_path, monkeypatch, what, replacing):
    out = tmp_path / "small"
    options = {"keep": "50%", "method": SVD(), "force": replacing, "quiet": True}
    if replacing:
        compress_folder(tiny_folder, out, keep="20%", method=SVD(), quiet=True)
    old = files(out) if replacing else None

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    from transformers import PreTrainedModel

    target = {
        "partial": (kflats.compress.fitting, "save_file"),
        "model": (PreTrainedModel, "save_pretrained"),
        "companions": (shutil, "copyfile"),
        "durable": (kflats.io.atomic, "_make_durable"),
        "rename": (kflats.io.atomic, "_put_in_place"),
    }[what]
    with monkeypatch.context() as patch:
        patch.setattr(*target, full)
        with pytest.raises(KflatsError, match="no space left"):
            compress_folder(tiny_folder, out, **options)
    assert (files(out) == old) if replacing else not out.exists()
    assert not [name for name in beside(out) if "partial" not in name]
    fitted = []
    fit = SVD.fit
    monkeypatch.setattr(SVD, "fit", lambda self, problem: fitted.append(1) or fit(self, problem))
    compress_folder(tiny_folder, out, **options)
    assert len(fitted) == (1 if what == "partial" else 0)
    assert beside(out) == []


def test_a_plan_made_before_is_carried_out(tiny_folder, tmp_path):
    from kflats.io import load_model

    made = plan(load_model(tiny_folder), {TWO[0]: Flats(k=2), TWO[1]: SVD()}, keep="55%")
    made.save(tmp_path / "plan.json")
    report = compress_folder(tiny_folder, tmp_path / "small", plan=Plan.load(tmp_path / "plan.json"), quiet=True)
    assert [w.name for w in report.weights] == list(TWO)
    for decision, weight in zip(made.decisions, report.weights, strict=True):
        assert weight.bytes_after <= decision.budget_bytes


@pytest.mark.parametrize("recipe", [Flats(k=3), Recipe(KeepDense(), codec=Feedback())], ids=repr)
def test_settings_of_torch_change_nothing(recipe) -> None:
    """Autocast would round the products of a fit, and a default type make tensors that do not fit its own."""
    name = "out" if isinstance(recipe, Recipe) else "words"
    usual = toy()
    compress_(usual, {name: recipe}, keep="60%", quiet=True)
    before = torch.get_default_dtype()
    for settings in (torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"), torch.float64):
        other = toy()
        try:
            if isinstance(settings, torch.dtype):
                torch.set_default_dtype(settings)
            with nullcontext() if isinstance(settings, torch.dtype) else settings:
                compress_(other, {name: recipe}, keep="60%", quiet=True)
        finally:
            torch.set_default_dtype(before)
        for key, value in usual.state_dict().items():
            assert torch.equal(value, other.state_dict()[key])
