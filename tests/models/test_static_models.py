"""Static models, of sentence-transformers and of model2vec: compressed, opened late, saved again, and exported."""

from __future__ import annotations

import copy
import importlib
import io
import json
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

pytest.importorskip("sentence_transformers")
pytest.importorskip("constriction")

from sentence_modules import sentence_modules
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers

import kflats
from kflats.codecs import Float
from kflats.codecs.streamed import StreamedMatrix
from kflats.codecs.streams import encode, expect_
from kflats.common.errors import KflatsError, KflatsWarning
from kflats.compress.pipeline import plan_folder
from kflats.evaluation.outputs import load_tokenizer
from kflats.evaluation.running import encode as vectors_of
from kflats.export.dense import export_dense
from kflats.export.onnx import export_onnx
from kflats.importance import TokenCounts
from kflats.io.saving import load_model, save_model, stamp_
from kflats.io.sources import STATIC_MODULE, weight_files, weights_folder
from kflats.io.static import StaticModel
from kflats.matrices.coded import from_integers
from kflats.recipe.recipe import as_recipe
from kflats.tasks.scoring import evaluate_folder
from kflats.trimming.trimming import trim_folder

Normalize, StaticEmbedding = sentence_modules().Normalize, sentence_modules().StaticEmbedding
WORDS = 600
TEXTS = ["word3 word8 word599", "word40", "word7 word7 word500 word2 word31 word77"]


def tokenizer() -> Any:
    words = {"[UNK]": 0} | {f"word{i}": i for i in range(1, WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def table(seed: int = 0) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    spread = torch.linspace(2, 0.2, 16)
    return torch.randn(WORDS, 16, generator=draws) * spread * (1 + torch.arange(WORDS).unsqueeze(1) / 100)


def write(origin: str, folder: Path, rows: Tensor | None = None) -> Path:
    rows = table() if rows is None else rows
    if origin == "model2vec":
        library = pytest.importorskip("model2vec")
        library.StaticModel(rows.numpy(), tokenizer(), {}, normalize=True).save_pretrained(folder)
    else:
        static = StaticEmbedding(tokenizer(), embedding_weights=rows)
        SentenceTransformer(modules=[static, Normalize()], device="cpu").save_pretrained(str(folder))
    if origin == "nested":  # as earlier versions of sentence-transformers wrote it
        modules = json.loads((folder / "modules.json").read_text())
        modules[0]["path"] = "0_StaticEmbedding"
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "0_StaticEmbedding").mkdir()
        for name in ("model.safetensors", "tokenizer.json"):
            (folder / name).rename(folder / "0_StaticEmbedding" / name)
    return folder


@pytest.fixture(scope="module", params=["sentence-transformers", "nested", "model2vec"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of a static model, and the compressed one."""
    place = tmp_path_factory.mktemp("static")
    source = write(request.param, place / "source")
    kflats.compress_folder(source, place / "small", size="4 bits", quiet=True)
    return source, place / "small"


def sentence_vectors(folder: Path) -> Tensor:
    return torch.from_numpy(SentenceTransformer(str(folder), device="cpu").encode(TEXTS))


def blocks(matrix: StreamedMatrix) -> int:
    return 0 if matrix._blocks is None else len(matrix._blocks.left)


def test_a_compressed_folder_loads_in_sentence_transformers(pair: tuple[Path, Path]) -> None:
    source, small = pair
    assert sum(file.stat().st_size for file in weight_files(small)) <= WORDS * 16 // 2
    model = load_model(small)
    rows = model.embedding.matrix.dense().detach()
    ids = [[int(word.removeprefix("word")) for word in text.split()] for text in TEXTS]
    means = torch.stack([rows[one].mean(0) for one in ids])
    expected = nn.functional.normalize(means, dim=1)
    assert torch.allclose(sentence_vectors(small), expected, atol=1e-6)
    assert torch.allclose(vectors_of(model, load_tokenizer(small), TEXTS), expected, atol=1e-6)
    cosines = (sentence_vectors(source) * expected).sum(1)
    assert float(cosines.min()) > 0.97
    assert float(cosines.max()) < 1


def test_only_the_blocks_of_the_read_rows_are_decoded(pair: tuple[Path, Path]) -> None:
    loaded = SentenceTransformer(str(pair[1]), device="cpu")
    matrix = loaded[0].embedding.static.embedding.matrix
    assert isinstance(matrix, StreamedMatrix)
    everything = blocks(matrix)
    assert everything > 1
    loaded.encode(TEXTS[1:2])
    assert blocks(matrix) == everything - 1
    loaded.encode(TEXTS[1:2])
    assert blocks(matrix) == everything - 1
    matrix.dense()
    assert blocks(matrix) == 0


def test_a_loaded_model_saves_itself_again(pair: tuple[Path, Path], tmp_path: Path) -> None:
    loaded = SentenceTransformer(str(pair[1]), device="cpu")
    loaded.encode(TEXTS[1:2])  # some blocks are decoded, others not yet
    loaded.save_pretrained(str(tmp_path / "again"))
    assert torch.equal(sentence_vectors(tmp_path / "again"), sentence_vectors(pair[1]))
    first, again = (load_file(weight_files(folder)[0]) for folder in (pair[1], tmp_path / "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_folder_has_the_bytes_of_the_same_model_in_memory(pair: tuple[Path, Path], tmp_path: Path) -> None:
    plan = plan_folder(pair[0], keep="30%", quiet=True)
    kflats.compress_folder(pair[0], tmp_path / "folder", plan=plan, proof=False, quiet=True)
    model = load_model(pair[0])
    kflats.compress_(model, plan, tokenizer=load_tokenizer(pair[0]), quiet=True)
    save_model(model, tmp_path / "memory")
    whole = [(weights_folder(tmp_path / name) / "model.safetensors").read_bytes() for name in ("folder", "memory")]
    assert whole[0] == whole[1]


def test_copies_of_a_half_opened_model_are_whole(pair: tuple[Path, Path]) -> None:
    expected = load_model(pair[1]).embedding.matrix.dense()
    model = load_model(pair[1])
    model.embedding(torch.tensor([40]))
    twin = copy.deepcopy(model)
    pickled: Any = pickle.loads(pickle.dumps(model.embedding))  # noqa: S301
    state = load_model(pair[1]).state_dict()["embedding.codes"]
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    for matrix in (twin.embedding.matrix, pickled.matrix, model.embedding.matrix):
        assert torch.equal(matrix.dense(), expected)
    assert torch.equal(state, model.embedding.matrix.tensors()["codes"])


def test_an_exported_folder_loads_without_kflats(pair: tuple[Path, Path], tmp_path: Path) -> None:
    made = export_dense(pair[1], tmp_path / "dense")
    assert "kflats" not in (made.folder / "modules.json").read_text()
    assert torch.allclose(sentence_vectors(made.folder), sentence_vectors(pair[1]), atol=1e-6)
    library = pytest.importorskip("model2vec")
    vectors = torch.from_numpy(library.StaticModel.from_pretrained(made.folder).encode(TEXTS))
    vectors = nn.functional.normalize(vectors, dim=1)  # model2vec does not read the modules of sentence-transformers
    assert torch.allclose(vectors, sentence_vectors(pair[1]), atol=1e-6)


def test_a_proof_compares_both(pair: tuple[Path, Path]) -> None:
    proof = kflats.compare(*pair, [f"word{i} word{2 * i}" for i in range(1, 40)], turns=1, fresh=False)
    assert proof.outputs.kind == "encoder"
    assert 0 < proof.outputs.loss < 0.1


def test_without_kflats_the_error_names_it(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    module = STATIC_MODULE.rpartition(".")[0]
    monkeypatch.delitem(sys.modules, module, raising=False)
    finders = [finder for finder in sys.meta_path if type(finder).__module__ != "kflats.io.plugin"]
    monkeypatch.setattr(sys, "meta_path", finders)
    with pytest.raises(ModuleNotFoundError, match="kflats"):
        SentenceTransformer(str(pair[1]), device="cpu")


def test_token_weights_and_shared_rows_of_model2vec(tmp_path: Path) -> None:
    library = pytest.importorskip("model2vec")
    draws = np.random.default_rng(0)
    mapping, weights = draws.integers(0, 50, WORDS), draws.random(WORDS) + 0.1
    rows = table().numpy()[:50]
    for name, kept in {"float": rows, "integers": (rows * 9).round().clip(-127, 127).astype(np.int8)}.items():
        static = library.StaticModel(kept, tokenizer(), {"model_type": "model2vec"}, True, None, None, weights, mapping)
        static.save_pretrained(tmp_path / name)
        model = load_model(tmp_path / name)
        ours = vectors_of(model, load_tokenizer(tmp_path / name), TEXTS)
        assert torch.allclose(ours, torch.from_numpy(static.encode(TEXTS)).float(), atol=1e-3)
        assert model.origin["normalize"]


@pytest.mark.parametrize(
    ("kind", "budget"),
    [
        ("integers", {"size": "60%"}),
        ("integers", {"keep": "30%"}),
        ("shared rows", {"size": "4 bits"}),
        pytest.param("shared rows", {}, marks=pytest.mark.slow),
        pytest.param("integers", {}, marks=pytest.mark.slow),
        pytest.param("integers", {"size": "4 bits"}, marks=pytest.mark.slow),
        pytest.param("shared rows", {"size": "60%"}, marks=pytest.mark.slow),
        pytest.param("shared rows", {"keep": "30%"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tables_that_are_narrower_in_the_file_than_loaded(kind: str, budget: dict[str, Any], tmp_path: Path) -> None:
    """Sizes and qualities are of the file; named weights are counted as they are loaded."""
    library = pytest.importorskip("model2vec")
    rows, mapping = table().numpy(), None
    kept = (rows * 9).round().clip(-127, 127).astype(np.int8)
    if kind == "shared rows":
        kept, mapping = rows[:400], np.arange(WORDS) % 400
    static = library.StaticModel(kept, tokenizer(), {"model_type": "model2vec"}, True, None, None, None, mapping)
    static.save_pretrained(tmp_path / "source")
    report = kflats.compress_folder(tmp_path / "source", tmp_path / "small", quiet=True, **budget)
    before, after = (sum(file.stat().st_size for file in weight_files(tmp_path / name)) for name in ("source", "small"))
    assert report.model_bytes_before > before
    assert after <= {"60%": 0.6 * before, "4 bits": WORDS * 16 // 2}.get(budget.get("size", ""), before)
    if "keep" in budget:
        assert report.bytes_after <= 0.3 * report.bytes_before
    with pytest.raises(KflatsError, match=rf"is more than the model's files take now \({before:,} bytes\)"):
        kflats.compress_folder(tmp_path / "source", tmp_path / "large", quiet=True, size=f"{before + 99}B")


def test_static_models_are_scored_and_not_timed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "stsb").mkdir()
    lines = [f"word{i} word{2 * i}\tword{i + 1} word{2 * i}\t{i % 6}" for i in range(1, 20)]
    (tmp_path / "stsb" / "dev.tsv").write_text("sentence1\tsentence2\tlabel\n" + "\n".join(lines) + "\n")
    found = evaluate_folder(pair[1], "sts", original=pair[0], task_data=tmp_path)
    assert found.compressed.latency_ms is None
    assert found.compressed.n == 19
    assert "one batch" not in str(found)


def test_an_embedding_bag_in_memory_is_refused(tmp_path: Path) -> None:
    model = SentenceTransformer(str(write("sentence-transformers", tmp_path / "source")), device="cpu")
    with pytest.raises(KflatsError, match=r"EmbeddingBag is not supported in memory.*compress its folder"):
        kflats.compress_(model, keep="50%")


def test_rows_count_as_often_as_they_are_read(tmp_path: Path) -> None:
    plan = plan_folder(write("sentence-transformers", tmp_path / "source"), size="4 bits")
    importance = plan.decisions[0].recipe.importance
    assert isinstance(importance, TokenCounts)
    assert (importance.power, importance.smoothing) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("recipe", "keep"),
    [
        (kflats.SVD(), "60%"),
        (kflats.Flats(k=2), "60%"),
        (kflats.Recipe(kflats.KeepDense(), codec=Float("float16")), "60%"),
        (kflats.KeepDense(), "100%"),
    ],
    ids=["pair", "flats", "cast", "dense"],
)
def test_other_forms_are_read_back(recipe: Any, keep: str, tmp_path: Path) -> None:
    source = write("sentence-transformers", tmp_path / "source")
    kflats.compress_folder(source, tmp_path / "small", keep=keep, method=as_recipe(recipe), quiet=True)
    model = load_model(tmp_path / "small")
    assert isinstance(model, StaticModel)
    means = vectors_of(model, load_tokenizer(tmp_path / "small"), TEXTS)
    found = sentence_vectors(tmp_path / "small")
    # Up to 5.2, sentence-transformers gives the vectors of a table of float16 in float16.
    assert torch.allclose(found.float(), means, atol=1e-6 if found.dtype == torch.float32 else 1e-3)
    assert (tmp_path / "small" / "config.json").is_file() == (keep == "60%")


def damaged(small: Path, folder: Path, change: Any) -> Path:
    """A copy of ``small`` after ``change`` of its tensors and its config, with checksums that fit."""
    shutil.copytree(small, folder)
    (file,), holder = weight_files(folder), weights_folder(folder)
    tensors, config = load_file(file), json.loads((holder / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, file, metadata={"format": "pt"})
    stamp_(file)
    (holder / "config.json").write_text(json.dumps(config))
    return folder


def test_damage_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    def flip(tensors: dict[str, Tensor], config: Any) -> None:
        tensors["embedding.codes"][-9] ^= 16

    def cut(tensors: dict[str, Tensor], config: Any) -> None:
        tensors["embedding.codes"] = tensors["embedding.codes"][:-8].clone()

    def lose(tensors: dict[str, Tensor], config: Any) -> None:
        del tensors["embedding.weight"]

    def rename(tensors: dict[str, Tensor], config: Any) -> None:
        modules = config["quantization_config"]["modules"]
        modules["other"] = modules.pop("embedding")
        modules["other"]["places"][0]["name"] = "other"

    with pytest.raises(KflatsError, match="damaged"):
        load_model(damaged(pair[1], tmp_path / "flip", flip)).embedding.matrix.dense()
    with pytest.raises(KflatsError, match="codes"):
        load_model(damaged(pair[1], tmp_path / "cut", cut))
    with pytest.raises(KflatsError, match="lacks 'weight'"):
        load_model(damaged(pair[1], tmp_path / "lose", lose))
    with pytest.raises(KflatsError, match="no static embedding"):
        load_model(damaged(pair[1], tmp_path / "rename", rename))


def test_folders_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    source = write("sentence-transformers", tmp_path / "source")
    (source / "tokenizer.json").write_text("{")
    with pytest.raises(KflatsError, match=r"cannot be loaded"):
        load_model(source)
    (source / "model.safetensors").unlink()
    with pytest.raises(KflatsError, match="no safetensors"):
        load_model(source)


def test_other_commands_say_that_static_models_are_not_supported(tmp_path: Path) -> None:
    source = write("sentence-transformers", tmp_path / "source")
    with pytest.raises(KflatsError, match="trim is not supported with a static model"):
        trim_folder(source, tmp_path / "out", keep=100)
    kflats.compress_folder(source, tmp_path / "small", size="60%", quiet=True)
    for model in (source, tmp_path / "small", SentenceTransformer(str(tmp_path / "small"), device="cpu")):
        with pytest.raises(KflatsError, match=r"ONNX is not supported with a static model.*--dense"):
            export_onnx(model, tmp_path / "out.onnx", pooled=True)
    with pytest.raises(KflatsError, match="trim is not supported with a static model"):
        kflats.compress_folder(source, tmp_path / "out", size="60%", trim=100)
    with pytest.warns(KflatsWarning, match="run-time form int8 changes nothing"):
        kflats.compress_folder(source, tmp_path / "in int8", size="60%", run_as="int8", quiet=True)


def test_a_restored_module_is_not_saved(pair: tuple[Path, Path], tmp_path: Path) -> None:
    from kflats.model.swap import restore_

    loaded = SentenceTransformer(str(pair[1]), device="cpu")
    before = loaded.encode(TEXTS)
    restore_(loaded)
    assert np.allclose(loaded.encode(TEXTS), before, atol=1e-6)
    with pytest.raises(KflatsError, match="dense table"):
        loaded.save_pretrained(str(tmp_path / "again"))


@pytest.mark.parametrize("classes", [1, 3])
def test_streamed_rows_are_the_decoded_ones(classes: int) -> None:
    """Blocks of any rows in any order, each decoded once, and no other."""
    draws = torch.Generator().manual_seed(classes)
    n, labels = 5000, None
    sizes = [n]
    if classes > 1:
        labels = torch.randint(classes, (n,), generator=draws)
        sizes = torch.bincount(labels, minlength=classes).tolist()
    integers = [torch.randint(-5, 6, (size, 256), generator=draws).to(torch.int16) for size in sizes]
    whole = from_integers(integers, labels, torch.rand(classes, generator=draws) + 0.5)
    floats = {name: value.detach() for name, value in whole.tensors().items() if value.is_floating_point()}
    empty = {name: torch.empty_like(value, device="meta") for name, value in whole.tensors().items()}
    streamed, stream = StreamedMatrix(whole.geometry, {**empty, **floats}), encode(whole)
    expect_(streamed, len(stream))
    streamed.register_buffer("codes", stream)
    streamed.open_(whole.checksum())
    assert blocks(streamed) >= 5
    many, expected = 1024, set[tuple[int, int]]()
    for count in (1, 2, 300):
        index = torch.randint(n, (count,), generator=draws)
        for row in index.tolist():
            label = 0 if labels is None else int(labels[row])
            place = row if labels is None else int((labels[:row] == label).sum())
            expected.add((label, place // many))
        before = blocks(streamed)
        assert torch.equal(streamed.rows(index), whole.rows(index))
        everything = {(c, b) for c, size in enumerate(sizes) for b in range(-(-size // many))}
        assert blocks(streamed) == len(everything - expected) <= before
    with pytest.raises(IndexError):
        streamed.rows(torch.tensor([n]))
    assert torch.equal(streamed.dense(), whole.dense())


def test_a_bag_is_an_embedding_bag(pair: tuple[Path, Path]) -> None:
    bag = SentenceTransformer(str(pair[1]), device="cpu")[0].embedding
    dense = nn.EmbeddingBag.from_pretrained(load_model(pair[1]).embedding.matrix.dense(), mode="mean")
    ids, offsets = torch.tensor([4, 4, 9, 77, 500]), torch.tensor([0, 3, 3])  # the second bag is empty
    assert torch.allclose(bag(ids, offsets), dense(ids, offsets), atol=1e-6)
    assert torch.allclose(bag(ids.view(1, 5)), dense(ids.view(1, 5)), atol=1e-6)
    assert bag(ids[:0], offsets[:1]).tolist() == [[0.0] * 16]
    assert (bag.num_embeddings, bag.embedding_dim, bag.mode) == (WORDS, 16, "mean")
    assert importlib.import_module("sentence_transformers.kflats").Bag is type(bag)
