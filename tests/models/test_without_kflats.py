"""What a person sees who loads a compressed folder in a program that does not import kflats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors import safe_open
from transformers import AutoConfig, BertConfig, BertForMaskedLM, BertTokenizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import kflats
from kflats.io import load_model
from kflats.io.saving import STOP, STOP_KEY
from kflats.model.swap import restore_
from kflats.model.weights import QUANT_METHOD

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(195))]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
WAYS = {
    "plain": "transformers.AutoModel.from_pretrained(folder)",
    "in spite of sizes": "transformers.AutoModel.from_pretrained(folder, ignore_mismatched_sizes=True)",
    "its class": "transformers.BertForMaskedLM.from_pretrained(folder, ignore_mismatched_sizes=True)",
    "a new head": "transformers.AutoModelForSequenceClassification.from_pretrained(folder, "
    "ignore_mismatched_sizes=True)",
    "its config": "transformers.AutoModel.from_pretrained(folder, config=transformers.AutoConfig.from_pretrained("
    "folder), ignore_mismatched_sizes=True)",
    "pipeline": "transformers.pipeline('fill-mask', model=folder)",
    "sentence-transformers": "__import__('sentence_transformers').SentenceTransformer(folder, device='cpu')",
}
PROGRAM = """
import json, sys
import transformers
folder, ways = json.loads(sys.argv[1])
def results():
    for way in ways.values():
        try:
            eval(way)
            yield ""
        except Exception as error:
            yield str(error)
before = list(results())
loaded = [name for name in sys.modules if name.partition(".")[0] == "kflats"]
import kflats
print(json.dumps([before, loaded, list(results())]))
"""


def compressed(folder: Path, recipe: Any) -> str:
    """A small model with a tokenizer, its token table compressed."""
    model = BertForMaskedLM(BertConfig(vocab_size=len(WORDS), **SIZES)).eval()
    kflats.compress_(model, {"bert.embeddings.word_embeddings": recipe}, keep="50%", quiet=True)
    model.save_pretrained(folder)
    (folder / "words").write_text("\n".join(WORDS))
    BertTokenizer(str(folder / "words")).save_pretrained(folder)
    return str(folder)


@pytest.fixture(params=["floats", "codes"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A compressed folder."""
    codes = kflats.Recipe(kflats.KeepDense(), codec=kflats.Integer(bits=4, group=16))
    return compressed(tmp_path / "small", kflats.Flats(k=2) if request.param == "floats" else codes)


@pytest.fixture
def _without_plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers as it is where nothing imported kflats: the plug-in is in these two tables and nowhere else."""
    for known in (AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING):
        monkeypatch.delitem(known, QUANT_METHOD)
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    yield
    transformers.logging.set_verbosity(before)


@pytest.mark.usefixtures("_without_plugin")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_program_without_kflats_is_told_what_to_do(
    way: str, folder: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the caller asks for, nothing is loaded."""
    if "sentence" in way:
        pytest.importorskip("sentence_transformers")
    capfd.readouterr()
    with pytest.raises((ValueError, RuntimeError), match=r"kflats compressed this model: `pip install 'kflats\["):
        eval(way, {"transformers": transformers, "folder": folder})  # noqa: S307
    first = (capfd.readouterr().err + caplog.text).strip().splitlines()[:1]  # none: another test holds the log's stream
    assert all("kflats" in line for line in first)


@pytest.mark.usefixtures("_without_plugin")
def test_who_takes_the_description_out_is_still_stopped(folder: str) -> None:
    """transformers' own warning advises to do this."""
    path = Path(folder) / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "quantization_config"}))
    with pytest.raises(ValueError, match="kflats compressed this model"):
        transformers.AutoModel.from_pretrained(folder, ignore_mismatched_sizes=True)


@pytest.mark.slow
def test_in_a_process_of_its_own_and_after_the_import(folder: str) -> None:
    """The same calls in a process without kflats; the advice helps."""
    pytest.importorskip("sentence_transformers")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps([folder, WAYS])],
        capture_output=True, text=True, timeout=300, env=environment, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, loaded, after = json.loads(done.stdout.splitlines()[-1])
    assert all(STOP in error for error in before), before
    assert (loaded, after) == ([], [""] * len(WAYS))


def test_what_is_saved_again_says_so_too_and_what_is_dense_does_not(folder: str, tmp_path: Path) -> None:
    model = load_model(folder)
    assert not hasattr(model.config, STOP_KEY)
    model.save_pretrained(tmp_path / "again")
    for saved in (Path(folder), tmp_path / "again"):
        assert json.loads((saved / "config.json").read_text())[STOP_KEY] == STOP
    kflats.export_dense(folder, tmp_path / "dense")
    restore_(model)
    model.save_pretrained(tmp_path / "restored")
    for saved in (tmp_path / "dense", tmp_path / "restored"):
        config = json.loads((saved / "config.json").read_text())
        assert not {STOP_KEY, "quantization_config"} & config.keys()


@pytest.mark.usefixtures("_without_plugin")
def test_a_caller_with_a_config_of_its_own_meets_another_size(tmp_path: Path) -> None:
    """Such a call never reads the folder's config.json: the marker's size stops it."""
    folder = compressed(tmp_path / "small", kflats.Flats(k=2))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        BertForMaskedLM.from_pretrained(folder, config=BertConfig(vocab_size=len(WORDS), **SIZES))
    with safe_open(f"{folder}/model.safetensors", framework="pt") as file:
        assert file.get_slice("bert.embeddings.word_embeddings.weight").get_shape() != [
            len(WORDS),
            SIZES["hidden_size"],
        ]
    assert hasattr(AutoConfig.from_pretrained(folder), STOP_KEY)
