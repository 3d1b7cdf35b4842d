"""Every tensor of a weight file has a checksum: damage is refused, and files of other programs load with a warning."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from factoring import factor_named
from matrices import flats, low_rank
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

from kflats.common.errors import KflatsError
from kflats.io import load_, load_model, save, save_model
from kflats.model.swap import restore_, swap_
from kflats.model.weights import find_weight

NAME = "model.safetensors"
IDS = torch.tensor([[5, 9, 50, 7]])


def small(make: Any = low_rank) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model = BertForMaskedLM(BertConfig(vocab_size=99, pad_token_id=1, **sizes)).eval()
    with torch.no_grad():  # tensors that are equal may exchange their names
        for parameter in model.parameters():
            parameter.normal_()
    factor_named(model, ["bert.embeddings.word_embeddings", "bert.encoder.layer.0.intermediate.dense"], make)
    return model


def run(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(IDS).logits
    return out


def plain(*, factored: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(99, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    if factored:
        swap_(model, find_weight(model, "0"), flats(99, 16))
    return model


def corruptions(path: Path, times: int) -> Iterator[str]:
    """Flip a bit behind the header, or exchange the names of two tensors, ``times`` times; mend it again."""
    whole, draw = path.read_bytes(), random.Random(0)
    begin = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(times):
        if draw.random() < 0.5:
            bad, place = bytearray(whole), draw.randrange(begin, len(whole))
            bad[place] ^= 1 << draw.randrange(8)
            told = "a bit"
        else:
            header = json.loads(whole[8:begin])
            one, two = draw.sample(sorted(header.keys() - {"__metadata__"}), 2)
            header[one], header[two] = header[two], header[one]
            text = json.dumps(header, separators=(",", ":")).encode().ljust(begin - 8)
            bad, told = bytearray(whole[:8] + text + whole[begin:]), "names"
        path.write_bytes(bad)
        yield told
    path.write_bytes(whole)


def check_corruptions(folder: Path, times: int) -> None:
    save_model(small(), folder)
    for _ in corruptions(folder / NAME, times):
        with pytest.raises(KflatsError, match=rf"{NAME} is damaged: its tensor '.*' was changed or renamed"):
            AutoModelForMaskedLM.from_pretrained(folder)
    AutoModelForMaskedLM.from_pretrained(folder)


def test_damage_is_refused(tmp_path: Path) -> None:
    check_corruptions(tmp_path, 30)


@pytest.mark.slow
def test_damage_is_refused_300_times(tmp_path: Path) -> None:
    check_corruptions(tmp_path, 300)


def test_damage_of_a_plain_file_is_refused(tmp_path: Path) -> None:
    save(plain(factored=True), tmp_path)
    model = plain(factored=False)
    for _ in corruptions(tmp_path / NAME, 30):
        with pytest.raises(KflatsError, match=f"{NAME} is damaged: its tensor"):
            load_(model, tmp_path)
    load_(model, tmp_path)


def test_the_tensor_is_named(tmp_path: Path) -> None:
    model = small()
    model.save_pretrained(tmp_path)
    path, name = tmp_path / NAME, "bert.encoder.layer.0.output.LayerNorm.bias"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    first = json.loads(data[8:end])[name]["data_offsets"][0]
    changed = bytearray(data)
    changed[end + first] ^= 1
    path.write_bytes(changed)
    with pytest.raises(KflatsError, match=f"'{name}' was changed"):
        load_model(tmp_path)
    renamed = name.replace("bias", "bia2")
    path.write_bytes(data.replace(name.encode(), renamed.encode()))
    with pytest.raises(KflatsError, match=f"'{renamed}' was changed or renamed"):
        load_model(tmp_path)


@pytest.mark.parametrize("shards", [False, True])
def test_every_save_takes_new_checksums(shards: bool, tmp_path: Path) -> None:
    """Into the same folder too, over the old files; by copies too, and by the base model alone."""
    model = small()
    settings: dict[str, Any] = {"max_shard_size": "4KB"} if shards else {}
    for saved in (model, copy.deepcopy(model)):
        saved.save_pretrained(tmp_path, **settings)
        assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == shards
        loaded = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.add_(torch.randn(parameter.shape) / 10)
        loaded.save_pretrained(tmp_path, **settings)
        again = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
        assert torch.equal(run(again), run(loaded))
        assert not torch.equal(run(again), run(model))
    save_model(model.bert, tmp_path / "base")
    load_model(tmp_path / "base")


def test_other_programs_files_load_with_one_warning(tmp_path: Path) -> None:
    model = small()
    model.save_pretrained(tmp_path / "shards", max_shard_size="4KB")
    model.save_pretrained(tmp_path / "one")
    save(plain(factored=True), tmp_path / "plain")
    for folder in (tmp_path / "shards", tmp_path / "one"):
        count = 0
        for path in folder.glob("*.safetensors"):
            count += len(tensors := load_file(path))
            save_file(tensors, path, metadata={"format": "pt"})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = AutoModelForMaskedLM.from_pretrained(folder).eval()
        assert torch.equal(run(loaded), run(model))
        (text,) = [str(one.message) for one in caught if "checksum" in str(one.message)]
        assert text.startswith(f"{count} tensors in {folder}")
        loaded.save_pretrained(folder)
        if folder.name == "one":
            load_model(folder)  # without a warning


def test_a_restored_model_saves_as_transformers_does(tmp_path: Path) -> None:
    model = small()
    restore_(model)
    assert "save_pretrained" not in vars(model)
    model.save_pretrained(tmp_path)
    assert b"kflats" not in (tmp_path / NAME).read_bytes()
