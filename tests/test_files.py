"""Plain torch files, and where models come from: one file that rebuilds itself, hub names, links, companions."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import kflats
from kflats import SVD, Recipe, Transform, Uniform
from kflats.common.errors import KflatsError
from kflats.io import annotate_, copy_companions, load_, resolve_model, save, weights_folder
from kflats.matrices.registry import FlatsMatrix, LowRankMatrix, RankGroup
from kflats.model.swap import swap_
from kflats.model.weights import find_weight


class Net(nn.Module):
    """Ties, a linear layer, a norm with buffers, and a parameter of no layer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(40, width)
        self.body = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, 40)
        self.out.weight = self.words.weight
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.body(self.words(ids)))) * self.temperature


def compressed(kind: str = "flats") -> Net:
    model = Net().eval()
    with torch.no_grad():
        model.norm.running_mean.normal_()
        model.temperature.fill_(3)
    low = LowRankMatrix(torch.randn(8, 2), torch.randn(2, 8))
    swap_(model, find_weight(model, "body"), low, matrix_rows="out_features")
    if kind == "flats":
        labels = (torch.arange(40) % 3).to(torch.uint8)
        bands = (RankGroup(14, 2, 0), RankGroup(13, 3, 1), RankGroup(13, 1, 0))
        table = FlatsMatrix(torch.randn(28 + 39 + 13), torch.randn(5, 8), labels, bands, (2, 3))
    else:
        table = LowRankMatrix(torch.randn(40, 2), torch.randn(2, 8)).half()
    swap_(model, find_weight(model, "words"), table)
    return model


IDS = torch.arange(40)


@pytest.mark.parametrize("kind", ["flats", "half"])
def test_a_plain_module_returns(kind: str, tmp_path: Path) -> None:
    model = compressed(kind)
    save(model, tmp_path / "new" / "folder")
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["model.safetensors"]
    loaded = Net().eval()
    load_(loaded, tmp_path / "new" / "folder")
    assert loaded.out.matrix is loaded.words.matrix
    assert loaded.words.weight.dtype == model.words.weight.dtype
    assert loaded.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(loaded(IDS), model(IDS), rtol=0, atol=0)
    with pytest.raises(KflatsError, match=r"is factored already.*a newly built model"):
        load_(loaded, tmp_path / "new" / "folder")
    save(loaded, tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (
        tmp_path / "new/folder/model.safetensors"
    ).read_bytes()


def test_a_dense_module_with_ties_returns_too(tmp_path: Path) -> None:
    model = Net().eval()
    save(model, tmp_path)
    assert "out.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = Net().eval()
    load_(loaded, tmp_path)
    torch.testing.assert_close(loaded(IDS), model(IDS), rtol=0, atol=0)
    annotate_(model)  # nothing to write into: plain modules have no config


def header_of(folder: Path) -> dict[str, str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return dict(file.metadata())


def rewrite(folder: Path, *, tensors: dict | None = None, note: dict | str | None = None) -> None:
    path, header = folder / "model.safetensors", header_of(folder)
    if note is not None:
        shared = json.loads(header["kflats"])["shared"] if header["kflats"].endswith("}") else {}
        header["kflats"] = note if isinstance(note, str) else json.dumps({"layers": note, "shared": shared})
    header.pop("kflats_checksums", None)  # as a program does that drops what it does not know
    save_file(tensors if tensors is not None else load_file(path), path, metadata=header)


@pytest.mark.filterwarnings("ignore:.* have no checksum")
def test_bad_files_leave_the_model_as_it_was(tmp_path: Path) -> None:
    save(compressed(), tmp_path)
    good = load_file(tmp_path / "model.safetensors")
    note = json.loads(header_of(tmp_path)["kflats"])["layers"]
    model = Net().eval()
    before, outputs = repr(model), model(IDS)

    def check(message: str) -> None:
        with pytest.raises(KflatsError, match=message):
            load_(model, tmp_path)
        assert repr(model) == before
        torch.testing.assert_close(model(IDS), outputs, rtol=0, atol=0)

    rewrite(tmp_path, tensors={key: value for key, value in good.items() if key != "words.basis"})
    check("lacks 'words.basis'")
    rewrite(tmp_path, tensors=good | {"more": torch.ones(1)})
    check("unknown tensor 'more'")
    rewrite(tmp_path, tensors=good | {"words.weight": torch.ones(7)})
    check(r"'words.weight' is \(7,\) in the file")
    rewrite(tmp_path, tensors=good | {"words.labels": torch.full((40,), 2, dtype=torch.uint8)})
    check("labels do not match")
    rewrite(tmp_path, tensors=good | {"words.labels": good["words.labels"].float() + 0.5})
    check(r"words.labels is of type torch.float32")
    rewrite(tmp_path, tensors=good, note=note | {"format_version": 9})
    check("version 9 are not readable")
    rewrite(tmp_path, tensors=good, note=note | {"modules": {"../words": note["modules"]["words"]}})
    check("not the first of its own places")
    rewrite(tmp_path, tensors=good, note=note | {"modules": {"body": note["modules"]["body"]}})
    check("lacks|unknown")
    rewrite(tmp_path, tensors=good, note="{")
    check("cannot be read")
    rewrite(tmp_path, tensors=good, note="[]")
    check("unreadable description")
    rewrite(tmp_path, tensors=good, note=note)
    other, model = model, Net(width=6).eval()
    before, outputs = repr(model), model(IDS)
    check("40 x 8 in the file, but 40 x 6")
    model = other
    before, outputs = repr(model), model(IDS)
    save_file(good, tmp_path / "model.safetensors")
    check("kflats.save did not write")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    check("cannot be read")
    (tmp_path / "model.safetensors").unlink()
    check("there is no")


def test_a_full_disk_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = compressed()
    save(model, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def full(tensors: object, filename: Path, metadata: object) -> None:
        filename.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kflats.io.saving.save_file", full)
    with pytest.raises(KflatsError, match="no space left"):
        save(Net(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"model.safetensors": before}


def make_model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")
    return folder


def test_resolving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model_folder(tmp_path / "model")
    assert resolve_model(folder) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model") == folder
    for name, message in [
        (folder / "config.json", "is a file"),
        ("./nowhere", "no folder"),
        ("a/b/c", "no folder"),
        ("../../etc", "holds no model|no folder"),
        (tmp_path, "holds no model"),
    ]:
        with pytest.raises(KflatsError, match=message):
            resolve_model(name)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(KflatsError, match=r"no safetensors file.*pickle"):
        resolve_model(folder)


def test_an_interrupted_replacement_is_explained(tmp_path: Path) -> None:
    (tmp_path / ".small.kflats-old").mkdir()
    with pytest.raises(KflatsError, match=r"interrupted.*rename .*kflats-old to small"):
        resolve_model(tmp_path / "small")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (None, ""),
        ("RepositoryNotFoundError", r"no folder owner/model.*RepositoryNotFoundError.*misspelled"),
        ("GatedRepoError", "GatedRepoError.*gated.*licence"),
        ("LocalEntryNotFoundError", "LocalEntryNotFoundError.*no network"),
        ("OSError", "OSError: a broken pipe"),
        ("missing", "huggingface_hub is not installed"),
    ],
)
def test_hub_names(error: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    folder = make_model_folder(tmp_path / "snapshot")
    asked = []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if error == "OSError":
            raise OSError("a broken pipe")
        if error is not None:
            kind = getattr(hub.errors, error)
            raise kind.__new__(kind)
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    if error == "missing":
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    if error is None:
        assert resolve_model("owner/some-model_1.5") == folder
        ((name, patterns),) = asked
        assert name == "owner/some-model_1.5"
        assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in patterns)
    else:
        with pytest.raises(KflatsError, match=message):
            resolve_model("owner/model")


def test_sentence_transformers_layouts(tmp_path: Path) -> None:
    inner = make_model_folder(tmp_path / "0_Transformer")
    kind = "sentence_transformers.models.Transformer"
    modules = [{"idx": 0, "name": "0", "path": "0_Transformer", "type": kind}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert weights_folder(tmp_path) == inner
    for path in ("../../elsewhere", "/etc", "..", "C:\\x", "a\\..\\..\\b"):
        modules[0]["path"] = path
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(KflatsError, match="outside the model"):
            weights_folder(tmp_path)
    for text in ("{", "[1]", '[{"path": "x"}]', "7"):
        (tmp_path / "modules.json").write_text(text)
        with pytest.raises(KflatsError, match="cannot be read"):
            weights_folder(tmp_path)


def test_companions(tmp_path: Path) -> None:
    source = make_model_folder(tmp_path / "source")
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    kind = "sentence_transformers.models."
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense")]
    (source / "modules.json").write_text(json.dumps([{"path": p, "type": kind + t} for p, t in modules]))
    for name in (
        "tokenizer.json",
        "vocab.txt",
        "README.md",
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
        "modeling_custom.py",
        "pytorch_model.bin",
        "tf_model.h5",
        "model.safetensors.index.json",
        "onnx/model.onnx",
        "onnx/config.json",
        ".git/config",
        "generation_config.json",
        "kflats_report.json",
        "2_Dense/code.py",
    ):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    (source / "leak.txt").symlink_to(secret)
    (source / "leaks").symlink_to(tmp_path)
    (source / "alias.txt").symlink_to("vocab.txt")
    target = tmp_path / "target"
    target.mkdir()
    (target / "tokenizer.json").write_text("newer")
    copy_companions(source, target)
    assert {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()} == {
        "tokenizer.json",
        "vocab.txt",
        "alias.txt",
        "README.md",
        "modules.json",
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
    }
    assert (target / "tokenizer.json").read_text() == "newer"
    assert not any(path.is_symlink() for path in target.rglob("*"))


def test_companions_of_a_hub_snapshot(tmp_path: Path) -> None:
    """The hub's cache is made of links into its own store; those are followed, and no others."""
    repository = tmp_path / "models--owner--name"
    source = make_model_folder(repository / "snapshots" / "abc")
    (repository / "blobs").mkdir()
    (repository / "blobs" / "123").write_text("words")
    (source / "vocab.txt").symlink_to("../../blobs/123")
    (tmp_path / "outside.txt").write_text("secret")
    (source / "outside.txt").symlink_to(tmp_path / "outside.txt")
    copy_companions(source, tmp_path / "target")
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["vocab.txt"]
    assert (tmp_path / "target" / "vocab.txt").read_text() == "words"


def test_transformers_models_have_their_own_way(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=20, **sizes))
    with pytest.raises(KflatsError, match="save_pretrained"):
        save(model, tmp_path)
    wrapped = nn.ModuleDict({"encoder": model, "out": nn.Linear(8, 2)})  # a plain module that contains one is plain
    swap_(wrapped, find_weight(wrapped, "word_embeddings"), LowRankMatrix(torch.randn(20, 2), torch.randn(2, 8)))
    save(wrapped, tmp_path)
    again = nn.ModuleDict({"encoder": transformers.BertModel(model.config), "out": nn.Linear(8, 2)})
    load_(again, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), wrapped.parameters(), strict=True))


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="needs Linux")
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["all", "linear"])
def test_a_file_of_streams_does_not_stay_in_memory(weights: str, tmp_path: Path) -> None:
    """It stays mapped where dense tables are read from it: copies of these would take memory."""
    pytest.importorskip("constriction")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {"vocab_size": 3000, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=64))
    kflats.compress_(model, {weights: Recipe(SVD(), Uniform(), Transform())}, keep="20%", quiet=True)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    gc.collect()
    mapped = str(tmp_path / "model.safetensors") in Path("/proc/self/maps").read_text()
    assert mapped == (weights == "linear")
    ids = torch.tensor([[2, 7, 2999]])
    assert torch.equal(loaded.eval()(ids).last_hidden_state, model.eval()(ids).last_hidden_state)
