"""stream_folder changes a whole folder or nothing of it: stopped or killed at every single step."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from matrices import coded, int4
from safetensors import safe_open
from transformers import AutoModel, BertConfig, BertModel

import kflats.io.atomic_files
import kflats.io.coded
from kflats.common.errors import KflatsError
from kflats.io import annotate_, load_model, stream_folder
from kflats.io.atomic_folder import new_folder
from kflats.io.manifest import differences
from kflats.model.swap import find_weight, swap_

pytest.importorskip("constriction")

IDS = torch.tensor([[5, 9, 50, 7]])
STEPS = (
    (os, "replace"),
    (os, "rename"),
    (os, "link"),
    (os, "mkdir"),
    (os, "unlink"),
    (os, "rmdir"),
    (shutil, "rmtree"),
    (kflats.io.coded, "save_file"),
    (kflats.io.coded, "stamp_"),
    (kflats.io.coded, "_write"),
    (kflats.io.atomic_files, "fsync"),
)


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def whole() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
    found = BertModel(BertConfig(vocab_size=99, **sizes)).eval()
    swap_(found, find_weight(found, "embeddings.word_embeddings"), coded(99, 32))
    swap_(found, find_weight(found, "encoder.layer.0.intermediate.dense"), int4(32, 40))
    annotate_(found)
    return found


@pytest.fixture(scope="module", params=["one file", "shards"])
def fixed(request: pytest.FixtureRequest, whole: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fixed")
    whole.save_pretrained(folder, **({"max_shard_size": "36KB"} if request.param == "shards" else {}))
    assert len(list(folder.glob("*.safetensors"))) == (1 if request.param == "one file" else 2)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def output(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS)[0]


def broken_at(step: int, kill: bool, patch: pytest.MonkeyPatch) -> list[str]:
    """Raise in step number ``step`` of all that changes files; a killed process does nothing afterwards either."""
    done: list[str] = []

    def breaking(real: Any, name: str) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            done.append(name)
            if len(done) == step or (kill and len(done) > step):
                raise Killed if kill else KeyboardInterrupt
            return real(*given, **named)

        return run

    for place, name in STEPS:
        patch.setattr(place, name, breaking(getattr(place, name), name))
    return done


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_the_folder_changes_as_a_whole_or_not_at_all(
    kill: bool, fixed: Path, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(fixed, tmp_path / "new")
    stream_folder(tmp_path / "new")
    old, new = content(fixed), content(tmp_path / "new")
    assert old.keys() == new.keys()
    assert sum(map(len, new.values())) < sum(map(len, old.values()))
    folder, step, seen = tmp_path / "folder", 0, set()
    real, streams = kflats.io.coded.encode, {}

    def remembered(matrix: Any) -> torch.Tensor:  # two matrices, encoded a hundred times
        if matrix.shape not in streams:
            streams[matrix.shape] = real(matrix)
        return streams[matrix.shape]

    monkeypatch.setattr(kflats.io.coded, "encode", remembered)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    while True:
        step += 1
        shutil.copytree(fixed, folder)
        with monkeypatch.context() as patch:
            done = broken_at(step, kill, patch)
            try:
                stream_folder(folder)
                assert len(done) < step
                break
            except (Killed, KeyboardInterrupt):
                pass
        assert content(folder) in (old, new) or kill
        if content(folder) not in (old, new):
            seen.add("mixed")
            load = load_model if step % 2 else AutoModel.from_pretrained
            with pytest.raises(KflatsError, match="stream_folder on the folder again"):
                load(folder)
        elif not kill and content(folder) == old:
            assert set(os.listdir(folder)) == old.keys()
        stream_folder(folder)
        assert content(folder) == new
        shutil.rmtree(folder)
    assert content(folder) == new
    assert seen == ({"mixed"} if kill else set())
    assert torch.equal(output(load_model(folder)), output(whole))


def test_files_that_do_not_belong_together_are_refused(fixed: Path, tmp_path: Path) -> None:
    shutil.copytree(fixed, tmp_path / "mixed")
    stream_folder(tmp_path / "mixed")
    shutil.copyfile(fixed / "config.json", tmp_path / "mixed" / "config.json")
    with pytest.raises(KflatsError, match=r"lack '.*do not belong together"):
        stream_folder(tmp_path / "mixed")


def test_streamed_files_say_who_wrote_them(fixed: Path, tmp_path: Path) -> None:
    shutil.copytree(fixed, tmp_path / "new")
    stream_folder(tmp_path / "new")
    for path in (tmp_path / "new").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata().keys() == {"format", "kflats_checksums", "kflats_version"}


def test_streams_come_into_the_manifest(fixed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    with new_folder(folder) as aside:
        shutil.copytree(fixed, aside / "0_Transformer")
        modules = [{"path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}]
        (aside / "modules.json").write_text(json.dumps(modules))
    before = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    stream_folder(folder)
    assert sum(path.stat().st_size for path in folder.rglob("*.safetensors")) < before
    assert differences(folder) == []
