"""Folders that are no ordinary checkpoint: pickles, adapters, models of other libraries, of kflats, with code."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kflats import Integer, KeepDense, Recipe
from kflats.cli.app import app
from kflats.compress.pipeline import compress_folder
from kflats.io import load_model, trusting_remote_code

transformers = pytest.importorskip("transformers", minversion="5.0")

_BERT = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40}
_CODE = {
    "configuration_own.py": "from transformers import BertConfig\n"
    "class OwnConfig(BertConfig):\n    model_type = 'own_bert'\n",
    "modeling_own.py": "from transformers import BertForSequenceClassification, BertModel\n"
    "from .configuration_own import OwnConfig\n"
    "class OwnModel(BertModel):\n    config_class = OwnConfig\n"
    "class OwnForLabels(BertForSequenceClassification):\n    config_class = OwnConfig\n"
    "    @classmethod\n    def from_pretrained(cls, *a, **k):\n"  # which knows nothing of a report of absent tensors
    "        model = super().from_pretrained(*a, **k)\n        model.is_own = True\n        return model\n",
}  # fmt: skip
_AUTO = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModel": "modeling_own.OwnModel",
    "AutoModelForSequenceClassification": "modeling_own.OwnForLabels",
}


def edit(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = transformers.BertConfig(**_BERT, num_labels=3)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model as one that brings its own classes."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(folder.parent / "modules"))
    edit(folder, model_type="own_bert", architectures=["OwnForLabels"], auto_map=_AUTO)
    for name, code in _CODE.items():
        (folder / name).write_text(code)
    return folder


def said(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, " ".join((done.stdout + done.stderr).split())


def answers(model: Any) -> torch.Tensor:
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return logits


@pytest.mark.parametrize(
    ("note", "library"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed-tensors"),
        ({"load_in_4bit": True}, "bitsandbytes"),
    ],
)
def test_models_that_another_library_quantized_are_named(folder: Path, note: dict[str, Any], library: str) -> None:
    edit(folder, quantization_config=note)
    code, message = said("compress", str(folder), "--out", str(folder.parent / "out"), "--size", "50%")
    assert code == 2
    assert f"is quantized already, by {library}." in message
    assert "Try: the model that it was made from" in message


def test_adapters_are_named(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    code, message = said("inspect", str(folder))
    assert (code, "holds a model beside" in message, "move adapter_config.json out" in message) == (
        2,
        True,
        True,
    )
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    code, message = said("inspect", str(folder))
    assert (code, "holds an adapter of PEFT" in message, "merge it into that model first" in message) == (2, True, True)


def test_weights_in_another_format_are_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.gguf")
    code, message = said("inspect", str(folder))
    assert (code, "its weights are in model.gguf, a format of another library" in message) == (2, True)


@pytest.mark.parametrize("content", [b"", b"hello", None], ids=["empty", "no pickle", "cut off"])
def test_damaged_pickles_are_told_apart_from_damaged_folders(folder: Path, content: bytes | None) -> None:
    torch.save({"bert.pooler.dense.bias": torch.zeros(32)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    whole = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(whole[:-300] if content is None else content)
    code, message = said("export", str(folder), "--dense", "--out", str(folder.parent / "safe"))
    assert (code, "cannot be read as tensors" in message, "weights_only" in message) == (2, True, False)


def test_pickled_weights_are_written_as_safetensors_by_the_command_that_the_error_names(folder: Path) -> None:
    original = load_model(folder)
    (folder / "model.safetensors").unlink()
    torch.save(original.state_dict(), folder / "pytorch_model.bin")
    code, message = said("inspect", str(folder))
    command = f"kflats export {folder} --dense --out DIR"
    assert (code, command in message) == (2, True)
    out = folder.parent / "safe"
    assert said(*command.replace("DIR", str(out)).split()[1:])[0] == 0
    assert torch.equal(answers(load_model(out)), answers(original))
    assert not list(out.glob("*.bin"))


class Harmful:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_pickles_that_run_code_run_none(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"bert.pooler.dense.bias": Harmful(folder / "ran")}, folder / "pytorch_model.bin")
    code, message = said("export", str(folder), "--dense", "--out", str(folder.parent / "safe"))
    assert (code, "cannot be read as tensors" in message, (folder / "ran").exists()) == (2, True, False)


def test_routers_are_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "", "type": "sentence_transformers.models.Router"}]))
    code, message = said("inspect", str(tmp_path))
    assert (code, "modules.json begins with 'Router'" in message) == (2, True)


def test_a_whole_model_is_compressed_once(folder: Path) -> None:
    small, out = folder.parent / "small", folder.parent / "out"
    name = "bert.embeddings.word_embeddings"
    coded = Recipe(KeepDense(), codec=Integer(8))
    compress_folder(folder, small, method=coded, weights=(name,), keep="50%", quiet=True)
    code, message = said("compress", str(small), "--out", str(out), "--size", "50%")
    assert (code, "is compressed already" in message, "kflats export --dense" in message) == (2, True, True)
    # What is dense still may be compressed by its name, and what that error names works.
    dense = "bert.encoder.layer.0.intermediate.dense"
    compress_folder(small, out, method=coded, weights=(dense,), keep="50%", quiet=True)
    again = load_model(out)
    assert [name for name, module in again.named_modules() if hasattr(module, "matrix")] == [name, dense]
    assert said("export", str(small), "--dense", "--out", str(folder.parent / "dense"))[0] == 0
    assert said("inspect", str(folder.parent / "dense"))[0] == 0


def test_code_of_a_model_is_run_only_if_it_is_trusted(own: Path) -> None:
    out = own.parent / "small"
    arguments = ["compress", str(own), "--out", str(out), "--keep", "60%", "--weights", "linear", "--method", "svd"]
    arguments += ["--no-proof", "--quiet"]
    code, message = said(*arguments)
    assert (code, "brings code of its own" in message, "--trust-remote-code" in message) == (2, True, True)
    assert not (own.parent / "modules").exists()
    code, message = said(*arguments, "--trust-remote-code")
    assert message == "kflats: code that comes with a model is run, because it is trusted"
    assert said("inspect", str(out))[0] == 2  # trust ends with the command
    assert '.from_pretrained("FOLDER", trust_remote_code=True)' in (out / "README.md").read_text()
    with trusting_remote_code():
        model, original = load_model(out), load_model(own)
    assert type(model).__name__ == type(original).__name__ == "OwnForLabels"
    assert model.is_own
    assert original.is_own
    assert torch.allclose(answers(model), answers(original), atol=0.05)
    assert not torch.equal(answers(model), answers(original))


def test_every_command_that_loads_a_model_can_trust_its_code() -> None:
    shown = {name: said(name, "--help")[1] for name in ("report", "demo", "inspect", "plan", "compress", "trim")}
    shown |= {name: said(name, "--help")[1] for name in ("compare", "evaluate", "recover", "export")}
    assert {name for name, text in shown.items() if "--trust-remote" not in text} == {"report", "demo"}


def test_known_models_need_no_trust(folder: Path) -> None:
    edit(folder, auto_map=_AUTO)  # of a model type that transformers has
    assert type(load_model(folder)).__name__ == "BertForSequenceClassification"
    shutil.rmtree(folder)
