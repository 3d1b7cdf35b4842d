"""Codes of an embedding that are decoded when their rows are read: as if all had been decoded while loading."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from matrices import int4
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModel, BertConfig, BertForMaskedLM, BertModel

import kflats.model.description
from kflats import run_as_
from kflats.codecs.streamed import StreamedMatrix
from kflats.common.errors import KflatsError
from kflats.evaluation.outputs import memory_bytes
from kflats.io import annotate_, load_, load_model, save
from kflats.matrices.coded import CodedMatrix, from_integers
from kflats.model.swap import restore_, swap_
from kflats.model.weights import find_weight

pytest.importorskip("constriction")

WORDS, WIDTH, CLASSES = 9000, 64, 2
FEW = torch.tensor([[5, 9, 7], [8, 6, 5]])
MANY = torch.arange(WORDS - 1, 0, -8).clone()[:1120].view(5, -1)
TABLE = "embeddings.word_embeddings"


@pytest.fixture(autouse=True)
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also tables as short as these."""
    monkeypatch.setattr(kflats.model.description, "LATE", 0)


def table(seed: int = 0) -> CodedMatrix:
    """Rows in blocks of 4,096 of each class; the first rows are of class 0."""
    labels = torch.randint(CLASSES, (WORDS,), generator=torch.Generator().manual_seed(0))
    labels[:20] = 0
    draws = torch.Generator().manual_seed(seed)
    sizes = torch.bincount(labels, minlength=CLASSES).tolist()
    integers = [torch.randint(-6, 7, (size, WIDTH), generator=draws).to(torch.int16) for size in sizes]
    return from_integers(integers, labels, torch.tensor([0.1, 0.2]))


def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    found = BertModel(BertConfig(vocab_size=WORDS, max_position_embeddings=256, **sizes)).eval()
    swap_(found, find_weight(found, TABLE), table())
    swap_(found, find_weight(found, "encoder.layer.0.intermediate.dense"), int4(WIDTH, 16))
    annotate_(found)
    return found


@pytest.fixture(scope="module")
def original() -> Any:
    return model()


@pytest.fixture(scope="module")
def folder(original: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("late")
    original.save_pretrained(found)
    return found


@pytest.fixture
def loaded(folder: Path) -> Any:
    found = AutoModel.from_pretrained(folder)
    assert left(found) == 4
    return found


def late(of: Any) -> StreamedMatrix:
    matrix = of.get_input_embeddings().matrix
    assert isinstance(matrix, StreamedMatrix)
    return matrix


def left(of: Any) -> int:
    """How many blocks are not decoded."""
    blocks = late(of)._blocks
    return 0 if blocks is None else len(blocks.left)


def run(of: Any, ids: Tensor = FEW) -> Tensor:
    with torch.no_grad():
        return of(ids)[0]


def test_a_text_decodes_the_blocks_of_its_rows(loaded: Any, original: Any) -> None:
    for _ in range(2):
        assert torch.equal(run(loaded), run(original))
        assert left(loaded) == 3
    assert loaded.config.quantization_config == original.config.quantization_config
    with pytest.raises(IndexError):
        run(loaded, torch.tensor([[WORDS]]))
    assert torch.equal(run(loaded, MANY), run(original, MANY))
    assert left(loaded) == 0
    assert torch.equal(run(loaded), run(original))


def saved(of: Any) -> Any:
    state = of.state_dict()
    other = model()
    other.load_state_dict(state)
    return other


def under_names(of: Any) -> Any:
    everything = {**dict(of.named_parameters()), **dict(of.named_buffers())}
    return lambda ids: functional_call(of, everything, ids)


USES: dict[str, Callable[[Any], Any]] = {
    "state": saved,
    "a copy": copy.deepcopy,
    "a copy of a decoded part": lambda of: (run(of), copy.deepcopy(of))[1],
    "a cast": lambda of: of.to(torch.float64).float(),
    "buffers by name": under_names,
    "the form int8": lambda of: (run_as_(of, "int8"), run_as_(of, "dense"), of)[2],
    "the form compact": lambda of: (run_as_(of, "compact"), of)[1],
    "memory that processes share": lambda of: of.share_memory(),
    "a table again": lambda of: (restore_(of), of)[1],
}


@pytest.mark.parametrize("use", USES)
def test_every_use_has_the_numbers_of_the_original(use: str, loaded: Any, original: Any) -> None:
    used = USES[use](loaded)
    for ids in (FEW, MANY):
        torch.testing.assert_close(run(used, ids), run(original, ids), rtol=1e-6, atol=1e-6)


def test_a_cast_leaves_blocks_and_what_moves_or_reads_integers_decodes_them(folder: Path) -> None:
    def after(use: Callable[[Any], object]) -> int:
        found = load_model(folder)
        use(found)
        return left(found)

    assert after(lambda of: of.bfloat16()) == after(lambda of: of.to("cpu")) == after(copy.deepcopy) == 4
    assert after(lambda of: run_as_(of, "compact")) == 4
    for use in (nn.Module.state_dict, nn.Module.share_memory, memory_bytes, lambda of: of.to("meta")):
        assert after(use) == 0
    assert after(lambda of: of.get_input_embeddings().matrix.matvec(torch.ones(1, WIDTH))) == 0


def test_a_state_is_loaded_over_it(loaded: Any, original: Any) -> None:
    other = model()
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(3)
    loaded.load_state_dict(other.state_dict())
    assert left(loaded) == 0
    assert torch.equal(run(loaded), run(other))
    assert not torch.equal(run(loaded), run(original))


def test_it_saves_the_same_bytes(loaded: Any, folder: Path, tmp_path: Path) -> None:
    run(loaded)
    loaded.save_pretrained(tmp_path)
    first, again = (load_file(place / "model.safetensors") for place in (folder, tmp_path))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert (folder / "config.json").read_text() == (tmp_path / "config.json").read_text()


def test_a_layer_is_pickled_with_blocks_left(loaded: Any, original: Any) -> None:
    run(loaded)
    layer = pickle.loads(pickle.dumps(loaded.get_input_embeddings()))  # noqa: S301
    assert torch.equal(layer(MANY), original.get_input_embeddings()(MANY))


def test_what_is_pickled_does_not_depend_on_what_was_read(loaded: Any) -> None:
    """And holds no memory that nothing was written to."""
    layer = loaded.get_input_embeddings()
    before = pickle.dumps(layer)
    run(loaded)
    assert pickle.dumps(layer) == before


def test_a_copy_while_another_thread_decodes(loaded: Any, original: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, copied = late(loaded).get_buffer("codes"), Tensor.__deepcopy__

    def decoded_after(tensor: Tensor, memo: dict[int, Any]) -> Any:
        made = copied(tensor, memo)  # type: ignore[no-untyped-call]
        if tensor is buffer:
            late(loaded).complete_()
        return made

    monkeypatch.setattr(Tensor, "__deepcopy__", decoded_after)
    found = copy.deepcopy(loaded)
    assert left(loaded) == 0
    assert torch.equal(run(found, MANY), run(original, MANY))


@pytest.mark.parametrize("late_too", [False, True])
def test_codes_that_are_given_are_read_in_place_of_its_own(late_too: bool, loaded: Any, tmp_path: Path) -> None:
    given = nn.Sequential(nn.Embedding(WORDS, WIDTH))
    swap_(given, find_weight(given, "0"), table(1))
    rows = given(MANY)
    if late_too:
        save(given, tmp_path / "model.safetensors")
        given = nn.Sequential(nn.Embedding(WORDS, WIDTH))
        load_(given, tmp_path / "model.safetensors")
    layer = loaded.get_input_embeddings()
    own = copy.deepcopy(layer)(MANY)
    everything = {**dict(given[0].named_parameters()), **dict(given[0].named_buffers())}
    for ids in (MANY[:, :2], MANY):
        assert torch.equal(functional_call(layer, everything, ids), rows[:, : ids.shape[1]])
    assert torch.equal(layer(MANY), own)


def test_codes_that_are_put_in_place_are_read(loaded: Any, original: Any) -> None:
    layer = loaded.get_input_embeddings()
    layer.codes = original.get_input_embeddings().codes.flip(0).roll(1)
    other = copy.deepcopy(original)
    other.get_input_embeddings().codes.copy_(layer.codes)
    assert torch.equal(run(loaded), run(other))
    assert torch.equal(loaded.state_dict()[f"{TABLE}.codes"], layer.codes)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_compiled_graph(gradients: bool, loaded: Any, original: Any) -> None:
    compiled = torch.compile(loaded.get_input_embeddings(), fullgraph=True, backend="eager")
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(compiled(FEW), original.get_input_embeddings()(FEW))
        torch.testing.assert_close(compiled(MANY), original.get_input_embeddings()(MANY))
    assert left(loaded) == 0


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # torch.export on itself
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_graph(strict: bool, loaded: Any, original: Any) -> None:
    program = torch.export.export(loaded.get_input_embeddings(), (FEW,), strict=strict).module()
    torch.testing.assert_close(program(FEW.flip(0)), original.get_input_embeddings()(FEW.flip(0)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")  # torch.jit on itself
def test_a_traced_graph(loaded: Any, original: Any) -> None:
    with torch.no_grad():
        traced = torch.jit.trace(loaded.get_input_embeddings(), FEW)
    torch.testing.assert_close(traced(FEW.flip(0)), original.get_input_embeddings()(FEW.flip(0)))


def test_a_batch_of_gradients(loaded: Any, original: Any) -> None:
    """``vmap`` asks for rows whose numbers no code may look at."""
    found = torch.vmap(loaded.get_input_embeddings())(FEW)
    torch.testing.assert_close(found, original.get_input_embeddings()(FEW))


@pytest.mark.parametrize("whole", [False, True])
def test_a_model_that_is_loaded_in_inference_mode(whole: bool, folder: Path, original: Any) -> None:
    with torch.inference_mode():
        found = load_model(folder)
        if not whole:
            assert torch.equal(run(found), run(original))
    with torch.no_grad():
        assert torch.equal(late(found).dense(), original.get_input_embeddings().matrix.dense())
    with torch.inference_mode():
        assert torch.equal(run(found, MANY), run(original, MANY))
    assert left(found) == 0


def test_a_short_table_is_decoded_while_loading(folder: Path, original: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kflats.model.description, "LATE", WORDS * WIDTH + 1)
    found = load_model(folder)
    assert not isinstance(found.get_input_embeddings().matrix, StreamedMatrix)
    assert torch.equal(run(found), run(original))


def test_threads_read_at_the_same_time(loaded: Any, original: Any) -> None:
    draws = torch.Generator().manual_seed(0)
    batches = [torch.randint(WORDS, (3, 5), generator=draws) for _ in range(40)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(loaded.get_input_embeddings(), batches))
    assert all(torch.equal(one, original.get_input_embeddings()(ids)) for one, ids in zip(found, batches, strict=True))
    assert left(loaded) == 0


def test_a_tied_head_multiplies_by_all_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    first = BertForMaskedLM(BertConfig(vocab_size=WORDS, **sizes)).eval()
    swap_(first, find_weight(first, f"bert.{TABLE}"), table())
    annotate_(first)
    first.save_pretrained(tmp_path)
    again = BertForMaskedLM.from_pretrained(tmp_path)
    assert left(again) == 4
    assert torch.equal(run(again), run(first))


def test_a_plain_file(tmp_path: Path) -> None:
    def plain() -> nn.Module:
        return nn.Sequential(nn.Embedding(WORDS, WIDTH))

    one, other = plain(), plain()
    swap_(one, find_weight(one, "0"), table())
    save(one, tmp_path / "model.safetensors")
    load_(other, tmp_path / "model.safetensors")
    assert other[0].matrix._blocks is not None
    assert torch.equal(other(MANY), one(MANY))


def damaged(folder: Path) -> Iterator[None]:
    """One bit after the other, all over the stream; its file has no checksums, as of another program."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    stream = tensors[f"{TABLE}.codes"]
    for place in torch.linspace(0, len(stream) - 1, 12).to(torch.int64).tolist():
        stream[place] ^= 4
        save_file(tensors, path, metadata={"format": "pt"})
        yield
        stream[place] ^= 4


@pytest.mark.filterwarnings("ignore:.* have no checksum")
def test_a_damaged_stream_is_refused_while_loading(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "bad")
    for _ in damaged(tmp_path / "bad"):
        with pytest.raises(KflatsError, match="damaged"):
            load_model(tmp_path / "bad")


def test_the_description_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "bad")
    other = model()
    restore_(other)
    swap_(other, find_weight(other, TABLE), table(1))
    annotate_(other)
    other.save_pretrained(tmp_path / "other")
    sizes = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("bad", "other")]
    ours, theirs = (config["quantization_config"]["modules"][TABLE] for config in sizes)
    # All but the checksums fits, so that nothing else refuses it.
    ours["stream"]["checksum"], ours["checksum"] = theirs["stream"]["checksum"], theirs["checksum"]
    (tmp_path / "bad" / "config.json").write_text(json.dumps(sizes[0]))
    with pytest.raises(KflatsError, match="damaged"):
        load_model(tmp_path / "bad")


def test_a_folder_without_checksums_of_streams_is_decoded_while_loading(
    folder: Path, original: Any, tmp_path: Path
) -> None:
    """As kflats wrote it before."""
    shutil.copytree(folder, tmp_path / "old")
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    del config["quantization_config"]["modules"][TABLE]["stream"]["checksum"]
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    found = load_model(tmp_path / "old")
    assert not isinstance(found.get_input_embeddings().matrix, StreamedMatrix)
    assert torch.equal(run(found), run(original))
