"""Models whose numbers stay on disk: mapped weights, and measuring layer by layer, equal to what memory holds."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, VOCABULARY, is_t5, mixture_of_experts
from crew import together
from safetensors.torch import load_file, save_file
from table import crossed
from torch import nn

import kflats
from kflats import compress_folder
from kflats.calibration import collect, layers
from kflats.calibration.accumulators import Accumulator
from kflats.calibration.collect import measure
from kflats.common.errors import KflatsError, KflatsWarning
from kflats.common.workers import Workers
from kflats.compress import pipeline
from kflats.io import saving
from kflats.io.mapped import Spill, copied_if_written, mapped_tensors
from kflats.io.saving import load_model
from kflats.model.weights import find_weights

FIELDS = frozenset({"row_fisher", "column_fisher", "input_gram", "input_mean", "output_gram", "fisher_gram", "counts"})


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int16", "uint8", "bool"])
@pytest.mark.parametrize("padding", range(0, 8, 3))
def test_mapped_tensors_are_those_of_the_file(dtype: str, padding: int, tmp_path: Path) -> None:
    """Also where tensors do not begin at a multiple of their size, as older writers leave them."""
    path, kind = tmp_path / "a.safetensors", getattr(torch, dtype)
    save_file({"a": torch.arange(12).to(kind).view(3, 4), "none": torch.ones(0, 3), "one": torch.tensor(1.5)}, path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes(
        (length + padding).to_bytes(8, "little") + data[8 : 8 + length] + b" " * padding + data[8 + length :]
    )
    expected, found = load_file(path), mapped_tensors(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert all(found[name].dtype == expected[name].dtype for name in found)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(3, 4)}, path)
    whole = path.read_bytes()
    for damaged, message in (
        (whole[:-1], "cannot be read"),
        (whole.replace(b"[3,4]", b"[3,5]"), "other bytes than its shape"),
        (whole.replace(b"F32", b"F9X"), "of type F9X, which is not supported"),
        (b"", "cannot be read"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(KflatsError, match=message):
            mapped_tensors(path)
    with pytest.raises(KflatsError, match="No such file"):
        mapped_tensors(tmp_path / "absent.safetensors")


@pytest.mark.parametrize("damage", ["truncated", "absent", "not finite"])
def test_a_damaged_shard_is_named_and_nothing_is_written(damage: str, tmp_path: Path) -> None:
    ARCHITECTURES["llama"].make(False).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    shard = sorted((tmp_path / "model").glob("*.safetensors"))[1]
    messages = [shard.name]
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif damage == "absent":
        shard.unlink()
    else:
        tensors = load_file(shard)
        name = next(key for key, tensor in tensors.items() if tensor.ndim == 2)
        tensors[name][1:4, 2] = torch.nan
        save_file(tensors, shard, metadata={"format": "pt"})
        messages = [f"the weight {name} has NaN or infinite values"]
        messages += [f"NaN or infinity in rows 1 to 3 of {name!r} in {shard.name}"]
    with pytest.raises(KflatsError, match=".*".join(map(re.escape, messages))):
        compress_folder(tmp_path / "model", tmp_path / "small", size="50%", proof=False, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("how", [{"keep": "60%"}, {"size": "50%"}], ids=["the table alone", "all"])
@pytest.mark.parametrize("number", [torch.nan, -torch.inf])
def test_numbers_that_stay_as_they_are_must_be_finite(how: dict[str, str], number: float, tmp_path: Path) -> None:
    model = ARCHITECTURES["llama"].make(False)
    with torch.no_grad():
        model.model.norm.weight[3] = number
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(
        KflatsError, match=r"model\.norm\.weight has NaN .* in rows 3 to 3 of 'model\.norm\.weight' in model"
    ):
        compress_folder(tmp_path / "model", tmp_path / "small", proof=False, quiet=True, **how)
    with pytest.raises(KflatsError, match=r"model\.norm\.weight has NaN"):
        pipeline.plan_folder(tmp_path / "model", quiet=True, **how)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("lost", ["a file and the index", "a tensor", "all of a file"])
@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "mapped"])
def test_tensors_that_the_files_lack_are_named(lost: str, mapped: bool, tmp_path: Path) -> None:
    """transformers would draw them, and only say so."""
    ARCHITECTURES["llama"].make(False).save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    first = min(tensors)
    if lost == "a file and the index":
        shard.unlink()
        (tmp_path / "model.safetensors.index.json").unlink()
    else:
        kept = {name: tensor for name, tensor in tensors.items() if name != first} if lost == "a tensor" else {}
        save_file(kept, shard, metadata={"format": "pt"})
    message = "cannot be loaded" if lost == "a file and the index" and not mapped else f"lack the tensor {first!r}"
    with pytest.raises(KflatsError, match=re.escape(message)):
        load_model(tmp_path, mapped=mapped)


@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "mapped"])
def test_tensors_of_another_shape_are_named(mapped: bool, tmp_path: Path) -> None:
    ARCHITECTURES["bert"].make(False).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(key for key in tensors if key.endswith("LayerNorm.weight"))
    save_file(tensors | {name: torch.ones(7)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(KflatsError, match=rf"{re.escape(name)}.* is of shape \(7,\), and in the model .* of \(\d+,\)"):
        load_model(tmp_path, mapped=mapped)


def without(folder: Path, lost: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """The tensors of a folder's file, which then lacks some."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not lost(name)}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return kept


SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "mapped"])
def test_a_pooler_that_was_never_saved_is_drawn_alike(mapped: bool, tmp_path: Path) -> None:
    """With a warning, and without a trace in the caller's random numbers; half of a pooler is damage."""
    transformers.BertModel(transformers.BertConfig(vocab_size=40, **SIZES)).save_pretrained(tmp_path)
    kept, drawn = without(tmp_path, lambda name: "pooler" in name), []
    for seed in range(2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        with pytest.warns(KflatsWarning, match="have no pooler: its numbers are drawn at random"):
            drawn.append(load_model(tmp_path, mapped=mapped).state_dict())
        assert torch.equal(torch.random.get_rng_state(), before)
    assert drawn[0]["pooler.dense.weight"].any()
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    assert all(torch.equal(drawn[0][name], kept[name]) for name in kept)
    save_file(kept | {"pooler.dense.bias": torch.zeros(16)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(KflatsError, match=r"lack the tensor 'pooler\.dense\.weight'"):
        load_model(tmp_path, mapped=mapped)


def test_a_pooler_that_a_head_reads_is_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(vocab_size=40, **SIZES)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    without(tmp_path, lambda name: "pooler" in name)
    with pytest.raises(KflatsError, match=r"lack the tensor 'bert\.pooler\.dense\.bias', and 1 more"):
        load_model(tmp_path)


def test_what_training_alone_reads_may_be_absent(tmp_path: Path) -> None:
    sizes = {"conv_dim": (8,), "conv_kernel": (4,), "conv_stride": (2,), "num_feat_extract_layers": 1}
    config = transformers.Wav2Vec2Config(vocab_size=9, num_conv_pos_embeddings=4, **SIZES, **sizes)
    transformers.Wav2Vec2ForCTC(config).save_pretrained(tmp_path)
    without(tmp_path, lambda name: name.endswith("masked_spec_embed"))
    with pytest.warns(KflatsWarning, match="have no wav2vec2.masked_spec_embed: its numbers are drawn"):
        load_model(tmp_path)


def test_counters_may_be_absent_and_statistics_may_not(tmp_path: Path) -> None:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic")
    transformers.ResNetForImageClassification(config).save_pretrained(tmp_path)
    without(tmp_path, lambda name: name.endswith("num_batches_tracked"))
    load_model(tmp_path)
    without(tmp_path, lambda name: name.endswith("running_mean"))
    with pytest.raises(KflatsError, match="running_mean"):
        load_model(tmp_path)


def test_a_large_model_is_written_in_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ARCHITECTURES["llama"].make(False).save_pretrained(tmp_path / "model")
    found = []
    for name in ("whole", "shards"):
        compress_folder(tmp_path / "model", tmp_path / name, keep="50%", weights=("all",), proof=False, quiet=True)
        found.append(load_model(tmp_path / name).state_dict())
        monkeypatch.setattr(pipeline, "_SHARD", "10KB")
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "shards").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files
    assert len(files) > 2
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("opens_again", [True, False], ids=["no open file", "an open file"])
def test_spilled_tensors_are_the_same(opens_again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if opens_again and not Path("/dev/fd").is_dir():
        pytest.skip("this system does not open files by number")
    if not opens_again:

        def refused(*args: object, **kwargs: object) -> None:
            raise RuntimeError("unable to open file")

        monkeypatch.setattr(torch.UntypedStorage, "from_file", refused)
    given = {
        "odd": torch.arange(7, dtype=torch.int8),
        "half": torch.arange(6).view(2, 3).to(torch.bfloat16).T,
        "one": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "yes": torch.tensor([True, False]),
    }
    before = list(Path("/dev/fd").iterdir()) if opens_again else []
    kept, empty = Spill(tmp_path).kept_all([given, {"none": torch.empty(0)}])
    for name, tensor in given.items():
        assert torch.equal(kept[name], tensor)
        assert kept[name].dtype == tensor.dtype
        assert kept[name].untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    assert empty["none"].shape == (0,)
    kept["one"].add_(1)  # and the rest is as it was
    assert torch.equal(kept["half"], given["half"])
    assert not opens_again or len(list(Path("/dev/fd").iterdir())) == len(before)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_returns_other_bytes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ARCHITECTURES["llama"].make(False).save_pretrained(tmp_path / "model")
    whole, asked = saving.stamp_, {"keep": "60%", "method": kflats.SVD(), "proof": False, "quiet": True}

    def damaged(path: Path) -> None:
        whole(path)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(saving, "stamp_", damaged)
    with pytest.raises(KflatsError, match="does not hold what was written"):
        compress_folder(tmp_path / "model", tmp_path / "small", **asked)
    assert not (tmp_path / "small").exists()
    monkeypatch.undo()
    compress_folder(tmp_path / "model", tmp_path / "small", **asked)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "small"]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "albert"])
def test_a_mapped_model_is_the_model(name: str, tied: bool, tmp_path: Path) -> None:
    ARCHITECTURES[name].make(tied).save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    plain, mapped = load_model(tmp_path), load_model(tmp_path, mapped=True)
    assert type(mapped) is type(plain)
    first, second = plain.state_dict(), mapped.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    shared = [len({p.data_ptr() for p in model.parameters()}) for model in (plain, mapped)]
    assert shared[0] == shared[1]


def test_writes_into_mapped_tensors_go_into_copies(tmp_path: Path) -> None:
    """Also of several operators, of many tensors, and where the loader hides errors; each load is done anew."""
    names = [f"t{i}" for i in range(20)]
    save_file({name: torch.ones(2, 3) for name in [*names, "kept"]}, tmp_path / "a.safetensors")
    loads = []

    def load() -> list[torch.Tensor]:
        loads.append(1)
        for name in names[:17]:
            with suppress(Exception):
                tensors[name][0].zero_()
        torch._foreach_mul_([tensors[name] for name in names[17:19]], 2)
        torch.add(tensors["kept"], 1, out=tensors[names[19]])
        return [tensors[name] for name in [*names, "kept"]]

    tensors = mapped_tensors(tmp_path / "a.safetensors")
    before = tensors["kept"]
    found = copied_if_written(load, tensors)
    assert [float(one.sum()) for one in found] == [3.0] * 17 + [12.0] * 3 + [6.0]
    assert len(loads) == 2
    assert found[-1] is before
    assert float(load_file(tmp_path / "a.safetensors")["t0"].sum()) == 6


def test_what_a_model_writes_when_it_is_loaded_is_a_copy(tmp_path: Path) -> None:
    """Chinese-CLIP sets the rows of padding tokens to zero; one that writes into the file would end the process."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ChineseCLIPTextConfig(vocab_size=40, max_position_embeddings=32, **sizes)
    model = transformers.ChineseCLIPTextModel(config)
    for p in model.parameters():
        nn.init.ones_(p)
    model.save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    plain, mapped = load_model(tmp_path).state_dict(), load_model(tmp_path, mapped=True).state_dict()
    assert not mapped["embeddings.word_embeddings.weight"][0].any()
    assert plain.keys() == mapped.keys()
    assert all(torch.equal(plain[key], mapped[key]) for key in plain)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_generation_settings_and_shards(tmp_path: Path) -> None:
    model = ARCHITECTURES["llama"].make(False)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert load_model(tmp_path, mapped=True).generation_config.max_new_tokens == 7
    index = tmp_path / "model.safetensors.index.json"
    note = json.loads(index.read_text())
    note["weight_map"] = {name: f"../{file}" for name, file in note["weight_map"].items()}
    index.write_text(json.dumps(note))
    for mapped in (True, False):
        with pytest.raises(KflatsError, match="outside of the folder"):
            load_model(tmp_path, mapped=mapped)
    for damaged in ("{}", "[]", "{", '{"weight_map": 3}'):
        index.write_text(damaged)
        with pytest.raises(KflatsError, match="names no files of weights"):
            load_model(tmp_path)


def batches(model: Any = None, count: int = 3) -> list[dict[str, torch.Tensor]]:
    """Batches of several lengths, with padding; a block of 64 samples ends inside."""
    made = []
    for seed in range(count):
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(5, VOCABULARY, (40, 5 + seed), generator=draw)
        mask = torch.ones_like(ids)
        mask[::3, -2:] = 0
        batch = {"input_ids": ids, "attention_mask": mask}
        made.append(batch | {"decoder_input_ids": ids} if model is not None and is_t5(model) else batch)
    return made


def measured_in_little_memory(model: Any, weights: list[Any], some: Any, needs: frozenset[str], folder: Path) -> Any:
    """Memory for the sums of the largest weight alone."""
    least = 2 * max(Accumulator.nbytes(weight, needs) for weight in weights)
    return measure(model, weights, some, needs=needs, memory_bytes=least, quiet=True, scratch=folder)


def assert_same_statistics(first: Any, second: Any) -> None:
    assert first.measured.keys() == second.measured.keys()
    assert first.unreached == second.unreached
    for name, one in first.measured.items():
        other = second.of(name)
        for field, value in vars(one).items():
            same = (
                torch.equal(value, getattr(other, field))
                if isinstance(value, torch.Tensor)
                else value == getattr(other, field)
            )
            assert same, (name, field)


@pytest.mark.parametrize(
    ("name", "tied", "dtype"),
    crossed(["bert", "gpt2", "llama", "gemma3", "qwen2", "roberta"], [False, True], [torch.float32, torch.float16]),
)
def test_layer_by_layer_is_the_same_to_the_bit(
    name: str, tied: bool, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ARCHITECTURES[name].make(tied).to(dtype)
    weights = find_weights(model)
    whole = measure(model, weights, batches(model), needs=FIELDS, quiet=True)
    runs: list[int] = []
    run_layer = layers.Chain._run_layer
    monkeypatch.setattr(layers.Chain, "_run_layer", lambda self, k, trace: runs.append(k) or run_layer(self, k, trace))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = measured_in_little_memory(model, weights, batches(model), FIELDS, tmp_path)
    assert set(runs) == {0, 1}  # it was measured layer by layer
    assert_same_statistics(whole, found)
    assert all(torch.equal(value, before[key]) and value.dtype == dtype for key, value in model.state_dict().items())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("dtype", "layered"), [(torch.float16, True), (torch.float32, False)])
def test_a_float16_model_that_is_large_in_float32_is_measured_layer_by_layer(
    dtype: torch.dtype, layered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the sums of all weights fit into memory together."""
    model = ARCHITECTURES["llama"].make(False).to(dtype)
    weights, needs, runs = find_weights(model), frozenset({"row_fisher"}), list[int]()
    whole = measure(model, weights, batches(), needs=needs, quiet=True)
    run_layer = layers.Chain._run_layer
    monkeypatch.setattr(layers.Chain, "_run_layer", lambda self, k, trace: runs.append(k) or run_layer(self, k, trace))
    most = 2 * sum(Accumulator.nbytes(weight, needs) for weight in weights)
    assert most < 4 * sum(p.numel() for p in model.parameters())
    assert_same_statistics(whole, measure(model, weights, batches(), needs=needs, memory_bytes=most, quiet=True))
    assert set(runs) == ({0, 1} if layered else set())


def test_gram_matrices_on_disk_take_the_bytes_that_docs_scale_states(tmp_path: Path) -> None:
    """8 (n^2 + d^2) of each linear layer, of a layer of more than 16,384 outputs 8 (n^2 + d)."""
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 16_385))
    needs = frozenset({"input_gram", "output_gram"})
    found = measure(model, find_weights(model), [{"input": torch.randn(4, 24)}], needs=needs, quiet=True)
    found.save(tmp_path / "statistics")
    stated = 8 * (24**2 + 40**2) + 8 * (40**2 + 16_385)
    taken = sum(tensor.nbytes for tensor in mapped_tensors(tmp_path / "statistics").values())
    assert taken == stated + 8 * (24 + 40)  # and the means of inputs


@pytest.mark.parametrize(("count", "dtype"), crossed([2, 4], [torch.float32, torch.float16]))
def test_several_workers_measure_layer_by_layer_too(
    count: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks of samples: of four workers two have none."""
    model = ARCHITECTURES["bert"].make(True).to(dtype)
    whole = measure(model, find_weights(model), batches(), needs=FIELDS, quiet=True)
    traced, trace = Counter[int](), layers.Chain._traced
    monkeypatch.setattr(
        layers.Chain,
        "_traced",
        lambda self, batch, first: traced.update([first]) or trace(self, batch, first),
    )

    def one(workers: Workers) -> Any:
        own = copy.deepcopy(model)
        weights = find_weights(own)
        least = 3 * max(Accumulator.nbytes(weight, FIELDS) for weight in weights)
        options: dict[str, Any] = {"needs": FIELDS, "memory_bytes": least, "quiet": True, "workers": workers}
        return measure(own, weights, batches(), **options, scratch=tmp_path / str(workers.rank))

    for found in together(count, 0, one):
        assert_same_statistics(whole, found)
    assert set(traced.values()) == {1}, "each batch is run by one worker"


def test_inputs_alone_need_no_backward_pass(tmp_path: Path) -> None:
    model = ARCHITECTURES["llama"].make(False)
    weights, needs = find_weights(model), frozenset({"input_gram", "input_mean"})
    whole = measure(model, weights, batches(model), needs=needs, quiet=True)
    assert_same_statistics(whole, measured_in_little_memory(model, weights, batches(model), needs, tmp_path))


@pytest.mark.parametrize("measured", [False, True], ids=["without data", "measured layer by layer"])
@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "llama", "t5")), "experts"]
)
def test_a_folder_has_the_bytes_of_the_same_model_in_memory(
    name: str, measured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From mapped weights with little memory for sums, and all at once."""
    made = mixture_of_experts() if name == "experts" else ARCHITECTURES[name].make(True)
    made.save_pretrained(tmp_path / "model")
    data: dict[str, Any] = {"calibration": batches(made)} if measured else {}
    plan = pipeline.plan_folder(tmp_path / "model", keep="40%", weights=("all",), quiet=True, **data)
    model = load_model(tmp_path / "model")
    kflats.compress_(model, plan, quiet=True, **data)
    model.save_pretrained(tmp_path / "memory")
    monkeypatch.setattr(collect, "_least_room", lambda workers: 1)  # each weight is measured alone
    compress_folder(tmp_path / "model", tmp_path / "folder", plan=plan, proof=False, quiet=True, **data)
    first, second = (tmp_path / place / "model.safetensors" for place in ("memory", "folder"))
    assert first.read_bytes() == second.read_bytes()


def in_memory(nbytes: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Python in a process that may take so many bytes of its own."""
    resource = pytest.importorskip("resource")
    return subprocess.run(
        [sys.executable, *words],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes)),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit counts other memory elsewhere")
def test_a_folder_is_compressed_where_it_does_not_fit(tmp_path: Path) -> None:
    """In the memory of the libraries and six tenths of the model, in which the model alone cannot be loaded."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 24, "vocab_size": 2000}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, max_position_embeddings=64)
    transformers.LlamaForCausalLM(config).save_pretrained(model := tmp_path / "model", max_shard_size="30MB")
    whole = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    libraries = "import kflats.cli.app, kflats.compress.pipeline, transformers.models.llama.modeling_llama\n"
    taken = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmData')))"
    allowed = 1024 * int(in_memory(2**33, "-c", libraries + taken).stdout) + 6 * whole // 10
    loaded = in_memory(allowed, "-c", f"{libraries}from kflats.io import load_model\nload_model({str(model)!r})")
    assert "cannot be loaded" in loaded.stderr
    assert "too little memory" in loaded.stderr
    asked = ["--keep", "30%", "--weights", "all", "--method", "keep-dense", "--codec", "int4 64", "--no-proof"]
    done = in_memory(allowed, "-m", "kflats", "compress", str(model), "--out", str(tmp_path / "out"), *asked)
    assert done.returncode == 0, done.stderr
    assert sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")) < 0.3 * whole


class Skipping(nn.Module):
    """Reads the output of the first layer at the end, too: no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        states = [self.words(input_ids)]
        for layer in self.layers:
            states.append(layer(states[-1]).tanh() if self.training else layer(states[-1]))
        return self.head(states[-1] + states[1])


@pytest.mark.parametrize("name", ["albert", "skipping", pytest.param("t5", marks=pytest.mark.slow)])
def test_what_is_no_chain_is_measured_in_passes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Skipping() if name == "skipping" else ARCHITECTURES[name].make(False)
    weights = find_weights(model)
    some = [{"input_ids": one["input_ids"]} for one in batches()] if name == "skipping" else batches(model)
    monkeypatch.setattr(layers.Chain, "passes", None)  # called by none of them
    whole = measure(model, weights, some, needs=FIELDS, quiet=True)
    assert_same_statistics(whole, measured_in_little_memory(model, weights, some, FIELDS, tmp_path))


class Block(nn.Module):
    """A layer that may be called with more than the state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, state: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        state = self.inner = self.linear(state)
        if extra is None:
            return state
        return state * extra.real if extra.is_complex() else state + extra


class Unusual(nn.Module):
    """A model whose layers look like a chain; ``way`` says what else it does."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.words, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 3)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(16, 16)
        if way == "shares":
            self.last.weight = self.layers[0].linear.weight
        for layer in self.layers:
            layer.linear = self.layers[0].linear if way == "one module" else layer.linear

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        state, seen = self.words(input_ids), []
        extra = {"counts": torch.ones(1), "complex": torch.polar(torch.ones(16), torch.arange(16.0))}.get(self.way)
        for layer in self.layers:
            if self.way == "casts":
                state = state.to(self.layers[0].linear.weight.dtype)
            state = layer(state) if extra is None else layer(state, extra)
            seen.append(state)
            if self.way == "counts":
                extra += 1
        if self.way == "writes":
            state.mul_(2.0)
        if self.way == "again":
            state = self.layers[0].linear(state)
        if self.way == "inside":
            state = state + self.layers[0].inner
        return self.head(self.last(sum(seen) if self.way == "sums" else state))


@pytest.mark.parametrize("needs", [FIELDS, frozenset({"input_gram"})], ids=["all", "inputs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "way", ["plain", "sums", "writes", "counts", "complex", "casts", "shares", "one module", "again", "inside"]
)
def test_unusual_models_are_measured_as_a_whole_would_be(
    way: str, dtype: torch.dtype, needs: frozenset[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Unusual(way).to(dtype)
    weights = find_weights(model)
    some = [{"input_ids": one["input_ids"]} for one in batches()]
    whole = measure(model, weights, some, needs=needs, quiet=True)
    assert not whole.unreached
    assert_same_statistics(whole, measured_in_little_memory(model, weights, some, needs, tmp_path))
    assert {p.dtype for p in model.parameters()} == {dtype}


class HiddenStates:
    """An objective that reads the outputs of all layers."""

    def losses(self, model: nn.Module, batch: Any, first: int = 0) -> torch.Tensor:
        states = model(**batch, output_hidden_states=True).hidden_states
        return torch.stack([state.square().sum((1, 2)) for state in states[1:]]).sum(0)


class RunsTwice:
    """An objective that runs the model once more, without gradients."""

    def losses(self, model: nn.Module, batch: Any, first: int = 0) -> torch.Tensor:
        found: torch.Tensor = model(**batch).logits.square().sum((1, 2))
        with torch.no_grad():
            model(**batch)
        return found


@pytest.mark.parametrize("objective", [HiddenStates(), RunsTwice()], ids=lambda value: type(value).__name__)
def test_objectives_that_read_layers_are_measured_as_a_whole_would_be(objective: Any, tmp_path: Path) -> None:
    model = ARCHITECTURES["bert"].make(False)
    weights, needs = find_weights(model), frozenset({"row_fisher", "output_gram"})
    weights = [weight for weight in weights if "pooler" not in weight.name]
    least = 2 * max(Accumulator.nbytes(weight, needs) for weight in weights)
    options: dict[str, Any] = {"needs": needs, "objective": objective, "quiet": True}
    whole = measure(model, weights, batches(model), **options)
    some = measure(model, weights, batches(model), **options, memory_bytes=least, scratch=tmp_path)
    for weight in weights:  # positions of a run without gradients count in one way and not in the other
        assert torch.equal(whole.of(weight.name).row_fisher, some.of(weight.name).row_fisher), weight.name
        assert torch.equal(whole.of(weight.name).output_gram, some.of(weight.name).output_gram), weight.name


def test_an_interruption_leaves_a_model_in_float16_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Unusual("plain").half()
    before, calls = dict(model.named_parameters()), list[int]()

    def interrupted(state: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return Block.forward(model.layers[1], state, extra)

    monkeypatch.setattr(model.layers[1], "forward", interrupted)
    some = [{"input_ids": one["input_ids"]} for one in batches()]
    with pytest.raises(KeyboardInterrupt):
        measured_in_little_memory(model, find_weights(model), some, FIELDS, tmp_path)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_code_of_the_caller_gets_weights_that_it_may_write(tmp_path: Path) -> None:
    ARCHITECTURES["bert"].make(False).save_pretrained(tmp_path / "source")

    def writing(model: nn.Module, tokenizer: Any) -> list[dict[str, torch.Tensor]]:
        for parameter in model.parameters():
            parameter.data.mul_(1.0)
        return batches()

    options: dict[str, Any] = {"method": kflats.SVD(), "weights": ["linear"], "keep": "50%", "quiet": True}
    compress_folder(tmp_path / "source", tmp_path / "out", calibration=writing, proof=False, **options)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_decoder_knows_the_mask_of_its_encoder(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(vocab_size=VOCABULARY, encoder_layers=2, decoder_layers=3, **sizes, **heads)
    torch.manual_seed(0)
    model, ids = transformers.BartModel(config).eval(), torch.arange(24).view(4, 6) % VOCABULARY
    masks = torch.ones(2, 4, 6, dtype=torch.int64)
    masks[0, :, 4:] = masks[1, :, 3:] = 0
    some = [{"input_ids": ids, "decoder_input_ids": ids, "attention_mask": masks[0]}]
    some[0]["decoder_attention_mask"] = masks[1]
    weights, needs = find_weights(model), frozenset({"input_gram"})
    whole = measure(model, weights, some, needs=needs, quiet=True)
    assert_same_statistics(whole, measured_in_little_memory(model, weights, some, needs, tmp_path))


def test_all_workers_choose_by_the_least_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Told(Workers):
        def in_turn(self, tasks: Any, work: Any) -> Any:
            return iter([*(work(0) for _ in tasks[1:]), ({}, "1000")])

    monkeypatch.setattr(collect, "unused_bytes", lambda: 8000)
    assert collect._least_room(Workers()) == 2000
    assert collect._least_room(Told(count=3)) == 1000
