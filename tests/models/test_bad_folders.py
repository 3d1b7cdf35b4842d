"""Folders that must not load: without kflats, with a factor missing, damaged, edited, or of another version."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from table import slow
from transformers import AutoModel, AutoModelForMaskedLM, BertConfig, BertForMaskedLM

from kflats.common.errors import KflatsError
from kflats.io import annotate_, load_model
from kflats.matrices.registry import LowRankMatrix
from kflats.model.swap import swap_
from kflats.model.weights import find_weight

TABLE = "bert.embeddings.word_embeddings"


def saved(make_matrix: Any, folder: Path) -> Path:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
    model = BertForMaskedLM(BertConfig(vocab_size=199, **sizes))
    for name in (TABLE, "bert.encoder.layer.0.intermediate.dense"):
        weight = find_weight(model, name)
        matrix = make_matrix(*weight.shape) if name == TABLE else LowRankMatrix(torch.randn(32, 4), torch.randn(4, 40))
        swap_(model, weight, matrix)
    annotate_(model)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(n: int, d: int) -> LowRankMatrix:
        return LowRankMatrix(torch.randn(n, 8), torch.randn(8, d))

    return saved(make, tmp_path_factory.mktemp("small"))


def run(program: str, *arguments: Path, kflats: Path | None = None) -> str:
    """What ``program`` prints in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH" or kflats is None}
    if kflats is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(kflats), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_without_kflats_loading_fails(matrix_kinds: Any, tmp_path: Path) -> None:
    """The greatest danger: transformers alone must stop, not go on with random weights. The description's entry stops
    it before it reads tensors; a folder that lost its description stops at the shapes."""
    program = """
import json, sys
from pathlib import Path
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification
for folder in map(Path, sys.argv[1:]):
    for settings in ({}, {"ignore_mismatched_sizes": True}):
        try:
            AutoModel.from_pretrained(folder, **settings)
        except ValueError as error:
            print("`pip install 'kflats[hf,codes]'`" in str(error))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"], config["transformers_weights"]
    (folder / "config.json").write_text(json.dumps(config))
    for kind in (AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification):
        try:
            kind.from_pretrained(folder)
        except RuntimeError as error:
            print("mismatch" in str(error))
        else:
            print("loaded", folder, kind)
assert not any(name.startswith("kflats") for name in sys.modules)
"""
    folders = [saved(make, tmp_path / make.__name__) for make in matrix_kinds]
    assert run(program, *folders).split() == ["True"] * 15


@slow
@pytest.mark.parametrize("first", ["kflats", "transformers", "the plug-in"])
def test_the_plugin_registers_in_either_order(first: str, folder: Path, repository: Path) -> None:
    register = "from kflats.io import register_plugin; register_plugin(); register_plugin()"
    check = "print('transformers' in sys.modules)"
    use = "from transformers import AutoModel"
    lines = [use, check, register] if first == "transformers" else [register, check, use]
    if first == "the plug-in":  # as a tool that imports every module does
        lines.insert(2, "import kflats.io.transformers_plugin")
    program = "\n".join(["import sys", *lines, "print(AutoModel.from_pretrained(sys.argv[1]).get_input_embeddings())"])
    imported, layer = run(program, folder, kflats=repository / "src").splitlines()
    assert imported == str(first == "transformers")  # registering alone does not import it
    assert layer.startswith("FactoredEmbedding")


@pytest.mark.filterwarnings("ignore:.* have no checksum")
def test_a_missing_factor_is_an_error(make_matrix: Any, tmp_path: Path) -> None:
    path = saved(make_matrix, tmp_path) / "model.safetensors"
    whole = {name: tensor.clone() for name, tensor in load_file(path).items()}  # the file is written over
    factored = (TABLE, "bert.encoder.layer.0.intermediate.dense")
    for key in [key for key in whole if key.startswith(factored) and not key.endswith("bias")]:
        save_file({name: value for name, value in whole.items() if name != key}, path, metadata={"format": "pt"})
        for kind in (AutoModel, AutoModelForMaskedLM):
            with pytest.raises(KflatsError, match=rf"the checkpoint has no .*\.{key.rpartition('.')[2]} of shape"):
                kind.from_pretrained(tmp_path)


@pytest.mark.filterwarnings("ignore:.* have no checksum")
def test_a_factor_of_another_shape_is_an_error(make_matrix: Any, tmp_path: Path) -> None:
    path = saved(make_matrix, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{TABLE}.basis"] = tensors[f"{TABLE}.basis"][:, :-1].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises((RuntimeError, KflatsError), match="mismatch"):  # ours in the first transformers 5
        AutoModel.from_pretrained(tmp_path)
    with pytest.raises(KflatsError, match=r"the checkpoint has no .*\.basis|mismatch"):
        AutoModel.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


@pytest.mark.filterwarnings("ignore:.* have no checksum")
@pytest.mark.parametrize(
    ("key", "message"), [("labels", "labels do not match the bands"), ("order", "order is no permutation")]
)
def test_indices_out_of_range_are_an_error(key: str, message: str, make_matrix: Any, tmp_path: Path) -> None:
    path = saved(make_matrix, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    if f"{TABLE}.{key}" not in tensors:
        pytest.skip("this kind of matrix has no such tensor")
    tensors[f"{TABLE}.{key}"][7] = 200
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(KflatsError, match=message):
        AutoModel.from_pretrained(tmp_path)


def edited(**changes: Any) -> Any:
    """A change to the description: {path with "/" between keys: value}; the value None removes the key."""

    def apply(note: dict[str, Any]) -> None:
        for path, value in changes.items():
            *way, last = path.split("/")
            target: Any = note
            for step in way:
                target = target[int(step)] if isinstance(target, list) else target[TABLE if step == "TABLE" else step]
            key = TABLE if last == "TABLE" else last
            if value is None:
                del target[key]
            else:
                target[key] = value

    return apply


def renamed(name: str) -> Any:
    def apply(note: dict[str, Any]) -> None:
        entry = note["modules"].pop(TABLE)
        entry["places"][0]["name"] = name
        note["modules"][name] = entry

    return apply


def sized(n: int, d: int, rank: int) -> Any:
    return edited(**{"modules/TABLE/matrix": {"kind": "low_rank", "shape": [n, d], "rank": rank}})


MANY_BASES = {"kind": "flats", "shape": [199, 32], "bands": [[199, 1, 0]], "flat_ranks": [32] * 2000}
BAD = {
    "newer version": (edited(format_version=2), "version 2 are not"),
    "no version": (edited(format_version=None), "version None are not"),
    "boolean version": (edited(format_version=True), "version True are not"),
    "unknown field": (edited(surprise=1), "unknown fields"),
    "no modules": (edited(modules=None), "lacks .*modules"),
    "modules a list": (edited(modules=[1]), "should be an object"),
    "type that is none": (edited(dtype="int8"), "not a floating-point type"),
    "type that is code": (edited(dtype="load"), "not a type of numbers"),
    "other vocabulary": (sized(150, 32, 8), "150 x 32"),
    "other width": (sized(199, 16, 8), "199 x 16"),
    "transposed": (sized(32, 199, 8), "32 x 199"),
    "impossible rank": (sized(199, 32, 33), "rank 33"),
    "negative rank": (sized(199, 32, -1), "-1"),
    "endless table": (sized(10**12, 10**12, 10**11), "impossible matrix shape"),
    "endless bases": (edited(**{"modules/TABLE/matrix": MANY_BASES}), "claims"),
    "unknown matrix": (edited(**{"modules/TABLE/matrix/kind": "magic"}), "unknown kind"),
    "no matrix": (edited(**{"modules/TABLE/matrix": 7}), "not the description of a matrix"),
    "unknown role": (
        edited(**{"modules/TABLE/places/0/role": "oracle"}),
        "role should be one of .*oracle",
    ),
    "no places": (edited(**{"modules/TABLE/places": []}), "not the first of its own places"),
    "padding outside": (edited(**{"modules/TABLE/places/0/padding_idx": 199}), "padding row 199"),
    "scale no number": (edited(**{"modules/TABLE/places/0/scale": "2"}), "scale should be a finite number"),
    "rows": (edited(**{"modules/TABLE/matrix_rows": "diagonals"}), "matrix_rows should be one of .*diagonals"),
    "outputs of an embedding": (
        edited(**{"modules/TABLE/matrix_rows": "out_features"}),
        "is an embedding whose matrix has outputs as rows",
    ),
    "untied": (edited(**{"modules/TABLE/untied": ["../x"]}), "not the path of a module"),
    "a path": (renamed("../../etc/passwd"), "not the path of a module"),
    "an absolute path": (renamed("/etc/passwd"), "not the path of a module"),
    "an empty name": (renamed(""), "not the path of a module"),
    "a stranger": (renamed("bert.embeddings.other"), "cannot take"),
    "another kind": (renamed("bert.embeddings.LayerNorm"), "cannot take"),
    "no tie": (lambda note: note["modules"][TABLE]["places"].pop(), "ties 'cls.predictions.decoder'"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_a_malformed_description_is_refused(change: Any, message: str, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(KflatsError, match=message):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


def test_one_weight_claimed_twice(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    modules = config["quantization_config"]["modules"]
    modules[TABLE.removeprefix("bert.")] = copy.deepcopy(modules[TABLE])
    modules[TABLE.removeprefix("bert.")]["places"][0]["name"] = TABLE.removeprefix("bert.")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(KflatsError, match="claim the same place"):
        load_model_from(tmp_path, folder)
    del modules[TABLE.removeprefix("bert.")]["places"][1]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(KflatsError, match=r"one weight of the model|ties"):
        load_model_from(tmp_path, folder)


def load_model_from(tmp_path: Path, folder: Path) -> Any:
    if not (tmp_path / "model.safetensors").exists():
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    return load_model(tmp_path)


def test_a_cut_tie_in_the_config_is_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(KflatsError, match=r"the file ties 'cls.predictions.decoder'"):
        load_model_from(tmp_path, folder)


def test_a_description_for_a_dense_model_is_refused(folder: Path, tmp_path: Path) -> None:
    from kflats.io.transformers_plugin import KflatsConfig

    note = json.loads((folder / "config.json").read_text())["quantization_config"]
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
    BertForMaskedLM(BertConfig(vocab_size=199, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(KflatsError, match="no factors in its folder"):
        AutoModelForMaskedLM.from_pretrained(tmp_path, quantization_config=KflatsConfig.from_dict(note))


def test_full_rank_is_not_saved() -> None:
    """Factors of the table's own shape would load as the table where kflats is not imported."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
    model = BertForMaskedLM(BertConfig(vocab_size=199, **sizes))
    swap_(model, find_weight(model, TABLE), LowRankMatrix(torch.randn(199, 32), torch.randn(32, 32)))
    with pytest.raises(KflatsError, match="no smaller than the table itself"):
        annotate_(model)


@pytest.mark.parametrize("damage", ["truncated", "emptied", "not json", "absent", "pickle only"])
def test_damaged_folders(damage: str, make_matrix: Any, tmp_path: Path) -> None:
    folder = saved(make_matrix, tmp_path / "small")
    weights = folder / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "emptied":
        weights.write_bytes(b"")
    elif damage == "not json":
        (folder / "config.json").write_text("{")
    elif damage == "absent":
        (folder / "config.json").unlink()
    else:
        weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(KflatsError):
        load_model(folder)
