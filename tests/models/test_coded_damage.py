"""Damaged coded folders: one changed bit of a coded matrix is refused, a changed description refused or harmless."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from matrices import coded, int4
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, BertConfig, BertModel

import kflats.io.saving
from kflats.common.errors import KflatsError
from kflats.io import annotate_, load_, load_model, save
from kflats.model.swap import swap_
from kflats.model.weights import find_weight

pytest.importorskip("constriction")

IDS = torch.tensor([[5, 9, 50, 7]])
TABLE, LAYER = "embeddings.word_embeddings", "encoder.layer.0.intermediate.dense"


def compressed() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    found = BertModel(BertConfig(vocab_size=99, pad_token_id=1, **sizes)).eval()
    swap_(found, find_weight(found, TABLE), coded(99, 16))
    swap_(found, find_weight(found, LAYER), int4(16, 24))
    annotate_(found)
    return found


@pytest.fixture(scope="module")
def original() -> Any:
    return compressed()


def save_fixed(model: Any, folder: Path) -> None:
    """As where constriction is not installed: codes at fixed rates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kflats.io.saving, "find_spec", lambda name: None)
        model.save_pretrained(folder)


@pytest.fixture(scope="module", params=["fixed", "streams"])
def folder(request: pytest.FixtureRequest, original: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp(request.param)
    if request.param == "streams":
        original.save_pretrained(found)
    else:
        save_fixed(original, found)
    return found


def output(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS)[0]


def places(path: Path) -> dict[str, tuple[int, int]]:
    """First byte and end of every tensor in a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    spans = {name: at["data_offsets"] for name, at in header.items()}
    return {name: (8 + length + first, 8 + length + end) for name, (first, end) in spans.items()}


def flips(path: Path, names: tuple[str, ...], times: int) -> Iterator[str]:
    """Flip one bit of each tensor of the modules ``names``, ``times`` times, and mend it again."""
    data, draw = path.read_bytes(), random.Random(0)
    for name, (first, end) in places(path).items():
        if name.startswith(names) and not name.endswith(".bias") and end > first:
            for _ in range(times):
                bad = bytearray(data)
                bad[draw.randrange(first, end)] ^= 1 << draw.randrange(8)
                path.write_bytes(bad)
                yield name
    path.write_bytes(data)


@pytest.mark.filterwarnings("ignore")
def test_a_flipped_bit_of_a_coded_matrix_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "bad")
    seen = set()
    for name in flips(tmp_path / "bad" / "model.safetensors", (TABLE, LAYER), 2):
        seen.add(name.rpartition(".")[2])
        with pytest.raises(KflatsError, match=r"damaged|contradict|do not|does not|not there|more than"):
            load_model(tmp_path / "bad")
    assert seen >= {"weight", "basis_scale", "shrink", "codes"}
    assert ("low" in seen) == (folder.name.startswith("fixed"))


@pytest.mark.filterwarnings("ignore:.* have no checksum")
def test_so_is_one_of_a_stream_that_another_program_wrote_again(original: Any, tmp_path: Path) -> None:
    """Without a checksum in the file's metadata: a stream has its own."""
    original.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path), path, metadata={"format": "pt"})
    assert torch.equal(output(load_model(tmp_path)), output(original))
    for _ in flips(path, (f"{TABLE}.codes", f"{LAYER}.codes"), 6):
        with pytest.raises(KflatsError, match="damaged"):
            load_model(tmp_path)


def test_a_state_with_other_codes_is_not_saved(original: Any, tmp_path: Path) -> None:
    state = original.state_dict()
    state[f"{TABLE}.codes"] = state[f"{TABLE}.codes"] ^ 1
    with pytest.raises(KflatsError, match="differ from those of the model"):
        original.save_pretrained(tmp_path, state_dict=state)


def test_a_state_of_a_file_is_loaded_like_any_other(folder: Path, original: Any) -> None:
    """The Trainer loads its checkpoints by ``load_state_dict``."""
    other = compressed()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(load_file(folder / "model.safetensors"))
    assert torch.equal(output(other), output(original))


def test_scales_that_were_trained_or_cast_are_no_damage(folder: Path, tmp_path: Path) -> None:
    loaded = load_model(folder)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.mul_(1.25)
    loaded.save_pretrained(tmp_path / "trained")
    assert torch.equal(output(load_model(tmp_path / "trained")), output(loaded))
    narrow = AutoModel.from_pretrained(tmp_path / "trained", dtype=torch.bfloat16)
    narrow.save_pretrained(tmp_path / "narrow")
    again = load_model(tmp_path / "narrow")
    assert again.dtype == torch.bfloat16
    assert torch.equal(output(again), output(narrow))
    other = compressed()
    other.load_state_dict(loaded.state_dict())
    assert torch.equal(output(other), output(loaded))


# Descriptions -----------------------------------------------------------------------------------


def leaves(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield (*way, key)
        yield from leaves(part, (*way, key))


def changed(value: Any) -> list[Any]:
    if isinstance(value, int) and not isinstance(value, bool):
        return [value + 1, value - 1, 2 * value + 3, str(value), None]
    if isinstance(value, str):
        return [value[:-1], value + "x"]
    return [value + value, value[:-1]] if isinstance(value, list) and value else [0, "x", 2.5]


@pytest.mark.filterwarnings("ignore")
def test_a_changed_description_is_refused_or_harmless(folder: Path, original: Any, tmp_path: Path) -> None:
    """But for types: those say how the model is wanted."""
    shutil.copytree(folder, tmp_path / "bad")
    config = json.loads((folder / "config.json").read_text())
    cases = []
    for way in leaves(config["quantization_config"]):
        value = config["quantization_config"]
        for step in way:
            value = value[step]
        cases += [(way, new) for new in changed(value)] + [(way, None)]
    right, draw, refused = output(original), random.Random(1), 0
    for way, new in draw.sample(cases, 70):
        bad = copy.deepcopy(config)
        at = bad["quantization_config"]
        for step in way[:-1]:
            at = at[step]
        at[way[-1]] = new
        (tmp_path / "bad" / "config.json").write_text(json.dumps(bad))
        try:
            found = load_model(tmp_path / "bad")
        except KflatsError:
            refused += 1
        else:
            assert torch.equal(output(found), right), (way, new)
    assert refused >= 55


@pytest.mark.filterwarnings("ignore")
def test_a_config_with_changed_bytes_is_refused_or_right(folder: Path, original: Any, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "bad")
    text = (folder / "config.json").read_bytes()
    first = text.index(b'"quantization_config"')
    last = text.index(b'"quant_method"', first)
    right, draw = output(original), random.Random(2)
    for _ in range(50):
        bad, at = bytearray(text), draw.randrange(first, last)
        if draw.random() < 0.5:
            bad[at] ^= 1 << draw.randrange(8)
        else:
            bad[at : at + draw.randint(0, 3)] = str(draw.randrange(10)).encode()
        (tmp_path / "bad" / "config.json").write_bytes(bad)
        try:
            found = load_model(tmp_path / "bad")
        except KflatsError:
            continue
        assert torch.equal(output(found), right), bad[at - 40 : at + 40]


# Plain files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [True, False])
def test_a_flipped_bit_of_a_plain_file_is_refused(
    streams: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not streams:
        monkeypatch.setattr(kflats.io.saving, "find_spec", lambda name: None)

    def net() -> nn.Module:
        return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8))

    model = net()
    swap_(model, find_weight(model, "0"), coded(50, 8))
    save(model, tmp_path)
    for _ in flips(tmp_path / "model.safetensors", ("0.", "1."), 3):
        with pytest.raises(KflatsError, match="damaged"):
            load_(net(), tmp_path)
    other = net()
    load_(other, tmp_path)
    assert torch.equal(other(IDS % 50), model(IDS % 50))
