"""sentence-transformers models: the real MiniLM and one built by hand, compressed, saved, loaded by name of folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sentence_transformers")

from sentence_modules import sentence_modules
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

import kflats
from kflats.codecs.streams import stored_bytes
from kflats.codecs.transform import from_codes
from kflats.common.errors import KflatsError
from kflats.io import annotate_, copy_companions, load_model, weights_folder
from kflats.matrices.layers import FactoredEmbedding
from kflats.matrices.registry import LowRankMatrix
from kflats.model.swap import swap_
from kflats.model.weights import dense_weight, find_weight, find_weights
from kflats.numerics.coding.encode import transform_code
from kflats.numerics.rows import TensorRows

TEXTS = ["A small table is still a table.", "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich."]


def truncate(model: Any, rank: int) -> None:
    """Swap the vocabulary by its own best low-rank approximation."""
    weight = find_weight(model, "embeddings.word_embeddings")
    table = dense_weight(model, weight)
    _, basis = torch.linalg.eigh(table.T @ table)
    basis = basis[:, -rank:].T
    swap_(model, weight, LowRankMatrix(table @ basis.T, basis.contiguous()))
    annotate_(model)


@pytest.fixture(scope="module")
def small(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """The compressed folder, the vectors of the original, and those of the compressed model in memory."""
    folder = tmp_path_factory.mktemp("st") / "small"
    model = SentenceTransformer(str(minilm), device="cpu")
    original = model.encode(TEXTS)
    truncate(model, 320)
    vectors = model.encode(TEXTS)
    model.save(str(folder))
    return folder, original, vectors


def test_loads_and_saves_again(small: tuple[Path, Any, Any], tmp_path: Path) -> None:
    folder, original, vectors = small
    assert abs((original * vectors).sum(1) - 1).max() < 0.1
    assert abs(original - vectors).max() > 1e-4
    model = SentenceTransformer(str(folder), device="cpu")
    assert abs(model.encode(TEXTS) - vectors).max() < 1e-5
    assert any(isinstance(module, FactoredEmbedding) for module in model.modules())
    model.save(str(tmp_path / "again"))
    again = SentenceTransformer(str(tmp_path / "again"), device="cpu")
    assert abs(again.encode(TEXTS) - vectors).max() < 1e-5


def test_is_smaller_and_loads_as_a_transformer(small: tuple[Path, Any, Any], minilm: Path) -> None:
    folder, _, _ = small
    size = {where: sum(p.stat().st_size for p in Path(where).rglob("*.safetensors")) for where in (folder, minilm)}
    assert size[folder] < 0.93 * size[minilm]
    model = AutoModel.from_pretrained(weights_folder(folder))
    assert isinstance(model.get_input_embeddings(), FactoredEmbedding)


def test_folders_made_without_sentence_transformers(small: tuple[Path, Any, Any], minilm: Path, tmp_path: Path) -> None:
    """What the command line does: the transformer saves itself, the rest is copied."""
    _, _, vectors = small
    model = load_model(minilm)
    truncate(model, 320)
    model.save_pretrained(tmp_path / weights_folder(minilm).relative_to(minilm))
    copy_companions(minilm, tmp_path)
    assert abs(SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS) - vectors).max() < 1e-5


def test_without_the_plugin_it_fails(small: tuple[Path, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    monkeypatch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "kflats")
    with pytest.raises(ValueError, match=r"`pip install 'kflats\[hf,codes\]'`"):
        SentenceTransformer(str(small[0]), device="cpu")


def test_its_own_layers_are_left_alone(minilm: Path) -> None:
    model = SentenceTransformer(str(minilm), device="cpu")
    model.append(torch.nn.Sequential(torch.nn.Linear(384, 16)))  # as its Dense modules have inside
    dense = f"{len(model) - 1}.0"
    names = [weight.name for weight in find_weights(model)]
    assert names
    assert all(".embeddings." in name or ".encoder." in name or ".pooler." in name for name in names)
    with pytest.raises(KflatsError, match="sentence-transformers stores this layer itself"):
        find_weight(model, dense)


@pytest.mark.slow
def test_the_transformer_in_a_folder_of_its_own(minilm: Path, tmp_path: Path) -> None:
    """Older sentence-transformers models keep it in ``0_Transformer``, and so does what is made of them."""
    old, inner = tmp_path / "old", tmp_path / "old" / "0_Transformer"
    inner.mkdir(parents=True)
    for path in minilm.rglob("*"):
        outside = path.name == "modules.json" or path.parent != minilm
        goal = (old if outside else inner) / path.relative_to(minilm)
        if path.is_file():
            goal.parent.mkdir(parents=True, exist_ok=True)
            goal.symlink_to(path) if path.suffix == ".safetensors" else goal.write_bytes(path.read_bytes())
    modules = json.loads((old / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (old / "modules.json").write_text(json.dumps(modules))
    kflats.compress_folder(old, tmp_path / "small", keep="50%", method=kflats.SVD(), quiet=True)
    model = SentenceTransformer(str(tmp_path / "small"), device="cpu")
    assert any(isinstance(module, FactoredEmbedding) for module in model.modules())
    assert model.encode(TEXTS).shape == (2, 384)


PROMPTS = {"query": "the of ", "passage": "word1 "}
WORDS = ["a b word7", "word30 the word1 of word2 c d e word9"]


@pytest.fixture(scope="module")
def prompted(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts, another pooling than the mean, a short limit, and vectors that are not normalised."""
    modules = sentence_modules()
    parts = [modules.Transformer(str(tiny_folder)), modules.Pooling(16, pooling_mode="max", include_prompt=False)]
    model = SentenceTransformer(modules=parts, device="cpu", prompts=PROMPTS, default_prompt_name="query")
    model.max_seq_length = 7
    folder = tmp_path_factory.mktemp("prompted") / "model"
    model.save(str(folder))
    return folder


def assert_same_but_for_weights(folder: Path, original: Path) -> Any:
    """The model in ``folder``: its prompts, pooling and limit are the original's."""
    models = [SentenceTransformer(str(path), device="cpu") for path in (folder, original)]
    for found, wanted in zip(*models, strict=True):
        assert type(found) is type(wanted)
    assert models[0].prompts == models[1].prompts == models[1].prompts | PROMPTS
    assert models[0].default_prompt_name == "query"
    assert models[0].max_seq_length == 7
    assert models[0][1].include_prompt is False
    assert models[0][1].get_config_dict() == models[1][1].get_config_dict()
    return models[0]


def test_the_command_keeps_prompts_pooling_and_limit(prompted: Path, tmp_path: Path) -> None:
    kflats.compress_folder(prompted, tmp_path / "small", keep="60%", method=kflats.SVD(), quiet=True)
    model = assert_same_but_for_weights(tmp_path / "small", prompted)
    whole = SentenceTransformer(str(prompted), device="cpu")
    kflats.compress_(whole, kflats.SVD(), keep="60%", quiet=True)
    for name in PROMPTS:
        wanted = whole.encode(WORDS, prompt_name=name)
        assert abs(model.encode(WORDS, prompt_name=name) - wanted).max() < 1e-5
    assert "SentenceTransformer(" in (tmp_path / "small" / "README.md").read_text()


def test_objects_with_coded_tables(prompted: Path, tmp_path: Path) -> None:
    pytest.importorskip("constriction")
    model = SentenceTransformer(str(prompted), device="cpu")
    weight = next(w for w in find_weights(model) if w.name.endswith("word_embeddings"))
    table = TensorRows(dense_weight(model, weight))
    code = transform_code(table, 3 * table.matrix.numel() // 8, lambda code: stored_bytes(from_codes(code)))
    swap_(model, weight, from_codes(code))
    annotate_(model)
    wanted = model.encode(WORDS)
    with pytest.raises(KflatsError, match="it saves itself"):
        kflats.save(model, tmp_path / "plain")
    model.save(str(tmp_path / "streams"))
    again = assert_same_but_for_weights(tmp_path / "streams", prompted)
    assert abs(again.encode(WORDS) - wanted).max() < 1e-6
    assert any(isinstance(m, FactoredEmbedding) and m.matrix.kind == "coded" for m in again.modules())
    dense = kflats.export_dense(tmp_path / "streams", tmp_path / "dense")
    assert abs(assert_same_but_for_weights(dense.folder, prompted).encode(WORDS) - wanted).max() < 1e-5
    other = kflats.export_dense(model, tmp_path / "object")
    assert abs(assert_same_but_for_weights(other.folder, prompted).encode(WORDS) - wanted).max() < 1e-5
