"""Coded tables inside transformers folders and plain files: as fixed-rate codes and as streams, whole and damaged."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matrices import coded, int4
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertModel,
)

import kflats.io.saving
from kflats.common.errors import KflatsError
from kflats.io import annotate_, load_, load_model, save
from kflats.matrices.layers import FactoredEmbedding
from kflats.matrices.registry import CodedMatrix
from kflats.model.swap import restore_, swap_
from kflats.model.weights import find_weight

pytest.importorskip("constriction")

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
IDS = torch.tensor([[5, 9, 150, 7], [8, 120, 6, 1]])
TABLE = "bert.embeddings.word_embeddings"


def model() -> Any:
    torch.manual_seed(0)
    found = BertForMaskedLM(BertConfig(vocab_size=199, pad_token_id=1, **SIZES)).eval()
    with torch.no_grad():
        found.cls.predictions.bias.normal_()
    swap_(found, find_weight(found, TABLE), coded(199, 32))
    swap_(found, find_weight(found, "bert.encoder.layer.0.intermediate.dense"), int4(32, 40))
    annotate_(found)
    return found


def run(of: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return of(ids)[0]


@pytest.fixture(scope="module")
def original() -> Any:
    return model()


def save_fixed(of: Any, folder: Path) -> None:
    """As where constriction is not installed: codes at fixed rates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kflats.io.saving, "find_spec", lambda name: None)
        of.save_pretrained(folder)


@pytest.fixture(scope="module", params=["fixed", "streams", "shards"])
def folder(request: pytest.FixtureRequest, original: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp(request.param)
    if request.param == "shards":
        original.save_pretrained(found, max_shard_size="8KB")
        assert len(list(found.glob("*.safetensors"))) > 2
    elif request.param == "fixed":
        save_fixed(original, found)
    else:
        original.save_pretrained(found)
    return found


def test_every_class_loads_it(original: Any, folder: Path) -> None:
    loaded = AutoModelForMaskedLM.from_pretrained(folder)
    assert isinstance(loaded.get_input_embeddings().matrix, CodedMatrix)
    assert loaded.get_output_embeddings().matrix is loaded.get_input_embeddings().matrix
    assert torch.equal(run(loaded), run(original))
    assert torch.equal(run(load_model(folder)), run(original))
    assert torch.equal(run(AutoModel.from_pretrained(folder)), run(original.bert))
    assert AutoModelForSequenceClassification.from_pretrained(folder)(IDS).logits.shape == (2, 2)
    note = json.loads((folder / "config.json").read_text())["quantization_config"]["modules"]
    assert all(("stream" in entry) == (folder.name.startswith(("streams", "shards"))) for entry in note.values())
    assert loaded.config.quantization_config["modules"][TABLE].keys() == note[TABLE].keys() - {"stream"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_loads_in_any_type(dtype: torch.dtype, original: Any, folder: Path) -> None:
    loaded = AutoModelForMaskedLM.from_pretrained(folder, dtype=dtype)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    matrix = loaded.get_input_embeddings().matrix
    assert matrix.checksum() == original.get_input_embeddings().matrix.checksum()
    torch.testing.assert_close(run(loaded), run(copy.deepcopy(original).to(dtype)), rtol=0.1, atol=0.1)
    assert run(loaded.float()).dtype == torch.float32


def test_it_saves_again_trains_and_becomes_dense(original: Any, folder: Path, tmp_path: Path) -> None:
    loaded = AutoModelForMaskedLM.from_pretrained(folder)
    loaded.save_pretrained(tmp_path / "again")
    again = load_model(tmp_path / "again")
    assert torch.equal(run(again), run(original))
    again.train()
    again(IDS, labels=IDS).loss.backward()
    torch.optim.SGD([p for p in again.parameters() if p.requires_grad], lr=0.1).step()
    again.eval()
    again.save_pretrained(tmp_path / "trained")
    assert torch.equal(run(load_model(tmp_path / "trained")), run(again))
    assert not torch.equal(run(again), run(original))
    restore_(loaded)
    torch.testing.assert_close(run(loaded), run(original))
    loaded.save_pretrained(tmp_path / "dense")
    torch.testing.assert_close(run(AutoModelForMaskedLM.from_pretrained(tmp_path / "dense")), run(original))


def test_a_vocabulary_shrinks_and_does_not_grow(folder: Path, tmp_path: Path) -> None:
    loaded = AutoModelForMaskedLM.from_pretrained(folder)
    before = run(loaded)
    with pytest.raises(KflatsError, match="cannot grow to"):
        loaded.resize_token_embeddings(230)
    assert torch.equal(run(loaded), before)
    loaded.resize_token_embeddings(160)
    torch.testing.assert_close(run(loaded), before[..., :160])
    loaded.save_pretrained(tmp_path)
    torch.testing.assert_close(run(load_model(tmp_path)), before[..., :160])


def test_streams_replace_all_integers_and_have_a_checksum(original: Any, tmp_path: Path) -> None:
    original.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert len(file.metadata()["kflats_checksums"]) == 8 * len(file.keys())
        assert not any(key.endswith((".labels", ".bits", ".low")) for key in file.keys())  # noqa: SIM118


@pytest.mark.slow  # a process that imports transformers
def test_without_kflats_loading_fails(original: Any, tmp_path: Path) -> None:
    save_fixed(original, tmp_path / "fixed")
    original.save_pretrained(tmp_path / "streams")
    program = """
import sys
from transformers import AutoModel, AutoModelForMaskedLM
for name in ("fixed", "streams"):
    for kind in (AutoModel, AutoModelForMaskedLM):
        try:
            kind.from_pretrained(f"{sys.argv[1]}/{name}")
        except ValueError as error:
            print("import kflats" in str(error))
"""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.stdout.split() == ["True"] * 4, done.stderr


# Damage -----------------------------------------------------------------------------------------


def damaged(data: bytes, draw: random.Random) -> bytes:
    bad, at, kind = bytearray(data), draw.randrange(len(data)), draw.randrange(4)
    if kind == 0:
        bad[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del bad[at:]
    elif kind == 2:
        del bad[at : at + draw.randint(1, 9)]
    else:
        size = draw.randint(1, 64)
        bad[at : at + size] = draw.randbytes(len(bad[at : at + size]))
    return bytes(bad)


@pytest.mark.filterwarnings("ignore")  # transformers warns of what it finds before it stops
def test_a_damaged_file_is_refused_or_right(original: Any, tmp_path: Path) -> None:
    original.save_pretrained(tmp_path)
    path, draw, refused = tmp_path / "model.safetensors", random.Random(2), 0
    data, right = path.read_bytes(), run(original)
    for _ in range(40):
        path.write_bytes(damaged(data, draw))
        try:
            found = load_model(tmp_path)
        except KflatsError:
            refused += 1
        else:
            assert torch.equal(run(found), right)
    assert refused >= 35


@pytest.mark.filterwarnings("ignore:.* have no checksum")
@pytest.mark.parametrize("key", ["codes", "labels", "bits", "low", "centers", "contexts", "basis"])
def test_damaged_fixed_rate_codes_are_refused(key: str, original: Any, tmp_path: Path) -> None:
    save_fixed(original, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    value = tensors[f"{TABLE}.{key}"]
    value.view(-1)[3] = (int(value.view(-1)[3]) + 1) % 100
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(KflatsError):
        AutoModelForMaskedLM.from_pretrained(tmp_path)
    del tensors[f"{TABLE}.{key}"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(KflatsError, match=f"has no .*{key}"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


BAD = {
    "a newer stream": (("stream", "version"), 2, "codes of version 2"),
    "no size": (("stream", "bytes"), None, "bytes should be a whole number"),
    "an endless stream": (("stream", "bytes"), 10**12, "claims a stream"),
    "another size": (("stream", "bytes"), 500, r"size mismatch: .*codes is \(\d+,\) in the checkpoint, \(500,\)"),
    "no stream": (("stream",), None, r"size mismatch: .*codes is \(\d+,\) in the checkpoint"),
    "another checksum": (("checksum",), 7, "checksum differs"),
    "a checksum of text": (("checksum",), "7", "checksum should be a whole number"),
    "a newer matrix": (("matrix", "version"), 3, "version 3"),
    "other classes": (
        ("matrix", "classes"),
        [[199, 4]],
        r"size mismatch: .*weight is \(3,\) in the checkpoint, \(1,\)",
    ),
    "a stream of factors": (("matrix",), {"kind": "low_rank", "shape": [199, 32], "rank": 4}, "has the checksum"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("way", "value", "message"), BAD.values(), ids=BAD)
def test_a_malformed_description_is_refused(
    way: tuple[str, ...], value: Any, message: str, original: Any, tmp_path: Path
) -> None:
    original.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    entry = config["quantization_config"]["modules"][TABLE]
    for step in way[:-1]:
        entry = entry[step]
    entry[way[-1]] = value
    if way == ("stream",):
        del entry["stream"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(KflatsError, match=message):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


# Plain files ------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.body = nn.Linear(8, 8)
        self.out = nn.Linear(8, 50)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.body(self.words(ids)))


@pytest.mark.parametrize("streams", [True, False])
def test_a_plain_module_returns(streams: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not streams:
        monkeypatch.setattr(kflats.io.saving, "find_spec", lambda name: None)
    net, ids = Net(), torch.arange(50)
    swap_(net, find_weight(net, "words"), coded(50, 8))
    swap_(net, find_weight(net, "body"), int4(8, 8), matrix_rows="out_features")
    save(net, tmp_path)
    assert ("words.bits" in load_file(tmp_path / "model.safetensors")) != streams
    other = Net()
    load_(other, tmp_path)
    assert isinstance(other.words, FactoredEmbedding)
    assert torch.equal(other(ids), net(ids))
    save(other, tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.filterwarnings("ignore:.* have no checksum")
def test_a_damaged_plain_file_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    net, ids = Net(), torch.arange(50)
    swap_(net, find_weight(net, "words"), coded(50, 8))
    save(net, tmp_path)
    path, draw, refused = tmp_path / "model.safetensors", random.Random(3), 0
    data = path.read_bytes()
    for _ in range(120):
        path.write_bytes(damaged(data, draw))
        other = Net()
        before = other(ids)
        try:
            load_(other, tmp_path)
        except KflatsError:
            refused += 1
            assert torch.equal(other(ids), before)
        else:
            assert torch.equal(other(ids), net(ids))
    assert refused >= 110


def test_a_base_model_alone(tmp_path: Path) -> None:
    base = BertModel(BertConfig(vocab_size=60, **SIZES)).eval()
    swap_(base, find_weight(base, "embeddings.word_embeddings"), coded(60, 32))
    annotate_(base)
    base.save_pretrained(tmp_path)
    assert torch.equal(run(AutoModel.from_pretrained(tmp_path), IDS % 60), run(base, IDS % 60))
