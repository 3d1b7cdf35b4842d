"""Model cards: what is said of a compressed folder, and what is kept of the original's."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

import kflats
from kflats.calibration.counting import text_batches
from kflats.cli.app import app
from kflats.codecs import Transform
from kflats.common.errors import KflatsError
from kflats.common.release import version
from kflats.export.dense import export_dense
from kflats.io.saving import stamp_
from kflats.report.model_card import (
    compressed_card,
    dense_card,
    hub_name,
    note_proof,
    split,
    with_tag,
    with_value,
    without_section,
)
from kflats.report.report import Report

yaml = pytest.importorskip("yaml")

ORIGINAL = """---
language: no  # Norwegian, not false
license: apache-2.0
tags:
- words
base_model: someone/grandparent
---

# Tiny
It maps words to numbers.
"""
TEXTS = ("the word1 of word2", "a b word30", "of the word1")


@pytest.fixture(scope="module")
def with_card(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "models--owner--tiny" / "snapshots" / "123"
    shutil.copytree(tiny_folder, folder)
    (folder / "README.md").write_text(ORIGINAL)
    return folder


@pytest.fixture(scope="module")
def small(with_card: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cards") / "small"
    method = kflats.Recipe(kflats.Flats(k=2), kflats.TokenCounts())
    kflats.compress_folder(with_card, out, keep="60%", method=method, texts=TEXTS, quiet=True)
    return out


def test_the_card_of_a_compressed_folder(small: Path, with_card: Path) -> None:
    text = (small / "README.md").read_text()
    head, body = split(text)
    assert "language: no  # Norwegian, not false" in head
    data = yaml.safe_load("\n".join(head))
    assert (data["license"], data["tags"]) == ("apache-2.0", ["words", "kflats"])
    assert (data["base_model"], data["base_model_relation"]) == ("owner/tiny", "quantized")
    report = Report.load(small)
    sizes = [sum(p.stat().st_size for p in folder.glob("*.safetensors")) for folder in (with_card, small)]
    for shown in (*sizes, report.bytes_before, report.bytes_after):
        assert kflats.common.formatting.size(shown) in body
    assert "| embeddings.word\\_embeddings |" in body or "| embeddings.word_embeddings |" in body
    assert "Flats(k=2" in body
    assert "TokenCounts(" in body
    assert "Budget 60%; seed 0" in body
    assert (
        "Data: 3 windows, counted; a Zipf prior of the tokenizer's vocabulary; the windows are of 3 texts; 3 windows of"
        in body
    )
    assert "AutoModel.from_pretrained" in body
    assert body.index("# The original's card") < body.index("It maps words to numbers.")
    assert str(with_card.parent) not in text
    assert not any(line in text for line in TEXTS)  # the data is nobody else's business


MANY = tuple(f"the word{i} of word{i * 7 % 283}" for i in range(40))
PRIOR = "a Zipf prior of the tokenizer's vocabulary"
FREE = "gradients of random projections of the output: label-free"
CUT = "the windows are of 40 texts; 40 windows of 6 tokens"
LINEAR = "encoder.layer.0.attention.self.query"


@pytest.mark.parametrize(
    ("weights", "importance", "given", "said"),
    [
        ((), kflats.Uniform(), {"texts": MANY}, "none but the weights themselves"),
        ((), kflats.ZipfPrior(), {}, PRIOR),
        ((), kflats.ZipfPrior(), {"texts": MANY}, PRIOR),
        ((), kflats.TokenCounts(), {"texts": MANY}, f"40 windows, counted; {PRIOR}; {CUT}"),
        ((), kflats.TokenCounts(smoothing=0), {"texts": MANY}, f"40 windows, counted; {CUT}"),
        (
            (),
            kflats.TokenFisher(),
            {"texts": MANY, "samples": 10},
            f"40 windows, counted; {PRIOR}; 8 of 40 windows and 2 drawn ones passed through the model ({FREE}); {CUT}",
        ),
        (
            (LINEAR,),
            kflats.InputGram(),
            {"texts": MANY},
            f"40 of 40 windows and 472 drawn ones passed through the model (no gradients taken); {CUT}",
        ),
        (
            (LINEAR,),
            kflats.KroneckerFisher(),
            {"texts": TEXTS, "calibration": lambda model, tokenizer: batches(tokenizer)},
            f"40 samples, in 3 batches, passed through the model ({FREE})",
        ),
        ((LINEAR,), kflats.Uniform(), {"texts": MANY}, "none but the weights themselves"),
        (
            (LINEAR,),
            kflats.KroneckerFisher(),
            {"samples": 20},
            f"20 sentences of kflats and sequences drawn by a Zipf prior, passed through the model ({FREE})",
        ),
    ],
)
def test_the_card_says_what_was_used(
    weights: tuple[str, ...], importance: Any, given: dict[str, Any], said: str, tiny_folder: Path, tmp_path: Path
) -> None:
    method = kflats.Recipe(kflats.SVD(), importance)
    out = tmp_path / "out"
    kflats.compress_folder(tiny_folder, out, keep="40%", method=method, weights=weights, quiet=True, **given)
    end = " (5th to 95th percentile" if said.endswith(CUT) else ".\n"
    assert f"\nData: {said}{end}" in (out / "README.md").read_text()


def test_the_card_says_whether_labels_were_used(tiny_folder: Path, tiny_model: Any, tmp_path: Path) -> None:
    method = kflats.Recipe(kflats.SVD(), kflats.RowFisher())
    model, tokens = tiny_model("bert-lm"), kflats.evaluation.outputs.load_tokenizer(tiny_folder)
    model.save_pretrained(tmp_path / "lm")
    tokens.save_pretrained(tmp_path / "lm")
    labelled = [{**one, "labels": one["input_ids"]} for one in batches(tokens)]
    for name, objective, said in (
        ("task", None, "gradients of the task's loss, with labels"),
        ("drawn", kflats.SampledLabels(), "label-free"),
    ):
        kept = tmp_path / f"{name}.safetensors"
        asked = {"weights": ("bert." + LINEAR,), "method": method, "keep": "40%", "quiet": True}
        kflats.compress_folder(
            tmp_path / "lm", tmp_path / name, calibration=labelled, objective=objective, keep_statistics=kept, **asked
        )
        (line,) = re.findall("Data: .*", (tmp_path / name / "README.md").read_text())
        assert line.startswith("Data: 40 samples, in 3 batches, passed through the model (")
        assert said in line
        statistics = kflats.Statistics.load(kept)
        kflats.compress_folder(tmp_path / "lm", tmp_path / f"{name}2", statistics=statistics, **asked)
        (again,) = re.findall("Data: .*", (tmp_path / f"{name}2" / "README.md").read_text())
        assert again.startswith("Data: statistics measured before on 40 samples (")
        assert said in again


def test_best_is_told_with_all_that_it_used(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("constriction")
    kflats.compress_folder(tiny_folder, tmp_path / "b", keep="20%", method=kflats.Auto(), texts=MANY, quiet=True)
    passed = f"40 of 40 windows and 472 drawn ones passed through the model ({FREE})"
    assert f"\nData: {PRIOR}; {passed}; {CUT}" in (tmp_path / "b" / "README.md").read_text()


def batches(tokenizer: Any) -> list[Any]:
    return text_batches(MANY, tokenizer)


def test_weight_files_say_who_wrote_them(small: Path, tmp_path: Path) -> None:
    with safe_open(small / "model.safetensors", framework="pt") as file:
        assert file.metadata()["kflats_version"] == version()
        assert {"format", "kflats_version", "kflats_checksums"} == file.metadata().keys()
    model = kflats.io.load_model(small)
    kflats.save(model.embeddings, tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        found = file.metadata()
    assert (found["format"], found["kflats_version"]) == ("pt", version())


def test_coded_folders_say_what_they_take_in_memory(with_card: Path, tmp_path: Path) -> None:
    pytest.importorskip("constriction")
    coded = kflats.Recipe(kflats.SVD(), codec=Transform())
    report = kflats.compress_folder(with_card, tmp_path / "coded", keep="15%", method=coded, quiet=True)
    card = (tmp_path / "coded" / "README.md").read_text()
    (weight,) = report.weights
    assert weight.memory_bytes is not None
    assert weight.memory_bytes > weight.bytes_after
    sizes = [kflats.common.formatting.size(n) for n in (weight.bytes_before, weight.memory_bytes)]
    assert f"| the same in memory | {' | '.join(sizes)} |" in card
    assert "Transform(" in card
    with safe_open(tmp_path / "coded" / "model.safetensors", framework="pt") as file:
        assert {"format", "kflats_version", "kflats_checksums"} == file.metadata().keys()
    assert kflats.io.load_model(tmp_path / "coded").get_input_embeddings().matrix.kind == "coded"


def test_stamping_copies_every_byte(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "copy.safetensors"
    shutil.copyfile(small / "model.safetensors", path)
    before = load_file(path)
    stamp_(path)
    after = load_file(path)
    assert before.keys() == after.keys()
    assert all(before[key].equal(after[key]) for key in before)
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    for damaged in (b"", b"\xff" * 9, (5).to_bytes(8, "little") + b"[1,2]", b"\x02" + b"\0" * 7 + b"{]"):
        path.write_bytes(damaged)
        with pytest.raises(KflatsError, match="cannot be read"):
            stamp_(path)
        assert path.read_bytes() == damaged
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_measured_comes_into_the_card(small: Path, with_card: Path, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    shutil.copytree(small, folder)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join([*TEXTS, "word5 word6", "word7"]))
    for _ in range(2):  # a second measurement replaces the first
        options = ["compare", str(with_card), str(folder), "--texts", str(texts), "--card"]
        done = CliRunner().invoke(app, options)
        assert done.exit_code == 0, done.output
        text = (folder / "README.md").read_text()
        assert "Not measured yet" not in text
        assert "encoder, 5 texts, 5 outputs compared" in text
        shown = re.findall(r"\| mean cosine \| ([\d.]+) \|", text)
        assert len(shown) == 1
        assert shown[0] in done.output
        proof = Report.load(folder).proof
        assert proof is not None
        assert f"{proof.outputs.measures[0].value:.4f}" == shown[0]
    assert "It maps words to numbers." in text
    (folder / "README.md").write_text("another card")
    measured = kflats.compare(with_card, folder, TEXTS, turns=1)
    with pytest.raises(KflatsError, match="no place for measurements"):
        note_proof(folder, measured)
    assert (folder / "README.md").read_text() == "another card"


def test_compressed_again_and_dense_again(small: Path, tmp_path: Path) -> None:
    report = Report.load(small)
    card = (small / "README.md").read_text()
    again = compressed_card(report, (9, 5), (), None, card, "transformers")
    assert again.count("kflats: begin") == 1
    assert again.count("# The original's card") == 1
    assert again.count("It maps words to numbers.") == 1
    assert yaml.safe_load("\n".join(split(again)[0]))["base_model"] == "owner/tiny"
    export_dense(small, tmp_path / "dense")
    dense = (tmp_path / "dense" / "README.md").read_text()
    assert "multiplied out" in dense
    assert "import kflats" not in dense
    assert "It maps words to numbers." in dense
    assert dense_card(ORIGINAL) == ORIGINAL


def test_folders_without_a_card(tiny_folder: Path, tmp_path: Path) -> None:
    kflats.compress_folder(tiny_folder, tmp_path / "small", keep="50%", quiet=True)
    head, body = split((tmp_path / "small" / "README.md").read_text())
    assert yaml.safe_load("\n".join(head)) == {"tags": ["kflats"]}
    assert "The original's card" not in body


def test_cards_in_another_encoding(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(tiny_folder, folder)
    (folder / "README.md").write_bytes("# Größe\n".encode("latin-1"))
    kflats.compress_folder(folder, tmp_path / "small", keep="50%", quiet=True)
    assert "# Größe\n".encode("latin-1") in (tmp_path / "small" / "README.md").read_bytes()


def test_names_are_not_markup() -> None:
    report = Report("a/<b>|", "60%", (), 10, 10, 0, "0")
    card = compressed_card(report, (10, 9), (), None, "", "transformers")
    assert "\\<b\\>\\|, compressed by kflats" in card


@pytest.mark.parametrize(
    "tags",
    [
        "tags: [a, 'b c']",
        "tags: []",
        "tags:\n- a\n- 'b c'",
        "tags:\n  - a\n\n  # a remark\n  - b",
        "tags: a",
        "tags:",
        "tags: null",
        "tags: [kflats, a]",
        "tags:\n- kflats",
        "license: mit",
        "",
    ],
)
@pytest.mark.parametrize("rest", ["", "model-index:\n- name: x\n  results:\n  - metrics: [{value: 0.5}]\n"])
def test_tags_in_every_form(tags: str, rest: str) -> None:
    lines = f"{tags}\n{rest}".splitlines()
    before, after = (yaml.safe_load("\n".join(found)) or {} for found in (lines, with_tag(lines, "kflats")))
    old = before.pop("tags", None) or []
    new = after.pop("tags")
    old = old if isinstance(old, list) else [old]
    assert new == (old if "kflats" in old else [*old, "kflats"])
    assert before == after


@given(st.lists(st.sampled_from(["a: 1", "- x", "  deep: 2", "tags: [q]", "# c", "", "base_model: z"]), max_size=9))
def test_values_replace_whole_blocks(lines: list[str]) -> None:
    made = with_value(lines, "base_model", "owner/name")
    assert [line for line in made if line.startswith("base_model:")] == ["base_model: owner/name"]
    assert [line for line in made if line.startswith(("a:", "tags:"))] == [
        line for line in lines if line.startswith(("a:", "tags:"))
    ]


def test_parts_of_a_card() -> None:
    assert split("no top") == ([], "no top")
    assert split("---\nnever: closed\n") == ([], "---\nnever: closed\n")
    assert split("---\r\na: 1\r\n---\r\ntext") == (["a: 1"], "text\n")
    assert without_section("theirs") == "theirs"


def test_hub_names(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--some-model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    found: Any = hub_name(snapshot)
    assert found == "owner/some-model"
    assert hub_name(tmp_path) is None
    assert hub_name("owner/other") == "owner/other"
