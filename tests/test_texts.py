"""Texts as people have them: every form of one text gives the same records' text, and nearly the same windows."""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
import textwrap
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kflats
import kflats.evaluation.outputs
from kflats.calibration.counting import count_tokens, zipf_prior
from kflats.calibration.windows import FEWEST, Windows, drawn_windows, filled_windows, windows
from kflats.common import text_files
from kflats.common.errors import KflatsError, KflatsWarning
from kflats.common.sentences import sentences, undo_marks, unwrapped
from kflats.common.text_files import read_texts
from kflats.common.texts import packaged_texts, token_limit
from kflats.planning.calibration_data import gather

# "Vitamin C. The" has no sentence's end that a program could see, but in a file of sentences it has.
SENTENCES = [text for text in (*packaged_texts("count"), *packaged_texts("judge")) if not re.search(r" .\.$", text)]
PARAGRAPHS = [" ".join(SENTENCES[i : i + 6]) for i in range(0, len(SENTENCES), 6)]
BOOK = "\n\n".join(textwrap.fill(paragraph, 70) for paragraph in PARAGRAPHS)


def test_the_positions_of_a_model_that_reads_images_too_limit_its_texts() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.CLIPConfig(text_config={"max_position_embeddings": 16})
    assert token_limit(None, 128, SimpleNamespace(config=config)) == 14  # type: ignore[arg-type]
    assert token_limit(None, 128, torch.nn.Linear(2, 2)) == 128


def words(text: str) -> list[str]:
    return text.split()


class Tokenizer:
    """A token a word, or a token a letter; with two special tokens, as BERT's."""

    model_max_length = 10**30

    def __init__(self, split: Callable[[str], list[str]] = words) -> None:
        self.split = split

    def __call__(self, texts: list[str], verbose: bool = True) -> dict[str, list[list[str]]]:
        return {"input_ids": [["[CLS]", *self.split(text), "[SEP]"] for text in texts]}


# Forms of one text


def write(folder: Path, form: str) -> Path | str:
    """The text in a form; what ``read_texts`` is given."""
    path = folder / form
    rows = [{"id": str(i), "score": i / 7, "body": text} for i, text in enumerate(PARAGRAPHS)]
    if form == "sentences.txt":
        path.write_text("\n".join(SENTENCES))
    elif form == "paragraphs.txt":
        path.write_text("\ufeff" + "\r\n".join(PARAGRAPHS), newline="")
    elif form == "book.txt":
        path.write_text(BOOK)
    elif form == "lines.jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows))
    elif form == "strings.jsonl":
        path.write_text("\n".join(map(json.dumps, PARAGRAPHS)))
    elif form == "array.json":
        path.write_text(json.dumps(rows, indent=1))
    elif form == "one_record.jsonl":
        path.write_text(json.dumps({"text": BOOK, "title": "a book"}))
    elif form in ("comma.csv", "semicolon.csv", "table.tsv"):
        separator = {"comma.csv": ",", "semicolon.csv": ";", "table.tsv": "\t"}[form]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["score", "id", "body"], delimiter=separator)
            writer.writeheader()
            writer.writerows(rows)
    elif form == "named.csv:second":
        with (folder / "named.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["first", "second"], *(["not this one", text] for text in PARAGRAPHS)])
    elif form.endswith(".gz"):
        source = write(folder, form.removesuffix(".gz"))
        path.write_bytes(gzip.compress(Path(source).read_bytes()))
    elif form == "folder":
        path.mkdir()
        half = len(PARAGRAPHS) // 2
        (path / "a.txt").write_text("\n".join(PARAGRAPHS[:half]))
        (path / "b.txt.gz").write_bytes(gzip.compress("\n".join(PARAGRAPHS[half:]).encode()))
        (path / ".hidden.jsonl").write_text("nothing")
    else:
        datasets = pytest.importorskip("datasets")
        rows_of = datasets.Dataset.from_list(rows)
        if form == "data.parquet":
            rows_of.to_parquet(path)
        elif form == "dataset":
            rows_of.save_to_disk(path)
        else:
            assert form == "splits"
            datasets.DatasetDict({"test": rows_of.select(range(3)), "train": rows_of}).save_to_disk(path)
    return f"{folder}/{form}" if ":" in form else path


PLAIN = ["sentences.txt", "paragraphs.txt", "book.txt", "lines.jsonl", "strings.jsonl", "array.json"]
PLAIN += ["one_record.jsonl", "comma.csv", "semicolon.csv", "table.tsv", "named.csv:second", "book.txt.gz"]
PLAIN += ["lines.jsonl.gz", "table.tsv.gz", "folder"]


@pytest.mark.parametrize(
    "form", [*PLAIN, *(pytest.param(f, marks=pytest.mark.slow) for f in ("data.parquet", "dataset", "splits"))]
)
def test_every_form_of_a_text_gives_the_same_windows(form: str, tmp_path: Path) -> None:
    wanted = windows(SENTENCES, Tokenizer())
    assert len(wanted.held_out) == 32
    records = read_texts(write(tmp_path, form))
    assert " ".join(" ".join(records).split()) == " ".join(SENTENCES)
    made = windows(records, Tokenizer())
    assert made.summary.partition(" texts; ")[2] == wanted.summary.partition(" texts; ")[2]
    for part in ("calibration", "held_out", "counted"):  # one long record keeps its line ends
        assert [" ".join(text.split()) for text in getattr(made, part)] == list(getattr(wanted, part))


@pytest.mark.slow
def test_forms_of_a_real_text_give_nearly_the_same_windows(data_folder: Path, minilm: Path, tmp_path: Path) -> None:
    tokenizer = kflats.evaluation.outputs.load_tokenizer(minilm)
    tokenised = read_texts(data_folder / "wikitext2" / "valid.txt.gz")
    plain = undo_marks(tokenised)[0]
    (tmp_path / "book.txt").write_text("\n\n".join(textwrap.fill(text, 72) for text in plain))
    wanted = windows(plain, tokenizer)
    total = int(count_tokens(wanted.counted, tokenizer, len(tokenizer)).sum())
    for records in (
        tokenised,
        [part for text in plain for part in sentences(text)],
        [part for text in tokenised for part in re.findall(r".+?(?: [.!?](?= |$)|$)", text)],
        read_texts(tmp_path / "book.txt"),
    ):
        made = windows(records, tokenizer)
        assert len(set(made.counted) & set(wanted.counted)) > 0.8 * len(wanted.counted)
        assert len(set(made.held_out) & set(wanted.counted)) < 0.1 * len(made.held_out)
        assert int(count_tokens(made.counted, tokenizer, len(tokenizer)).sum()) == pytest.approx(total, rel=0.02)


def test_what_is_not_prose_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"url": "https://a.b/c", "n": 3, "label": "positive", "said": "a good film"}, {"url": "x", "said": None}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_texts(path) == ("a good film",)
    assert read_texts(f"{path}:label") == ("positive",)
    (tmp_path / "b.tsv").write_text('text\tn\n"Quoted ""so"" cell."\t1\n"Only a first quote.\t2\n')
    assert read_texts(tmp_path / "b.tsv") == ('Quoted "so" cell.', '"Only a first quote.')
    (tmp_path / "c.csv").write_text("text\n" + '"' + "long cell. " * 20_000 + '"\n')
    assert len(read_texts(tmp_path / "c.csv")[0]) == 11 * 20_000 - 1
    (tmp_path / "d.jsonl").write_text('{"text": "half \\ud800 a pair"}')
    assert read_texts(tmp_path / "d.jsonl") == ("half ? a pair",)


REFUSED: dict[str, tuple[bytes, str]] = {
    "several.csv": (b"first,second\na b,c d\n", r"2 columns of texts.*first, second.*several.csv:first"),
    "none.jsonl": (b'{"n": 1, "m": "2"}', "no columns of texts.*it has n, m"),
    "one.csv:other": (b"text,n\na b,2\n", "no column 'other'.*one of: text, n"),
    "plain.txt:body": (b"a line\n", "no column 'body'.*its rows are texts without columns"),
    "bad.jsonl": (b'{"text": "a b"}\n{"text": \n', "can be read: Expecting value"),
    "deep.jsonl": (b"[" * 100_000, "can be read"),
    "numbers.jsonl": (b"1\n2\n", "has no text"),
    "empty.csv": (b"text\n", "has no text"),
    "blank.csv:n": (b"n,m\n,2\n,\n", "has no text"),
    "latin.csv": ("text,n\nnaïve words,1\n".encode("latin1"), "utf-8.*encoding other than UTF-8"),
    "late.txt": (b"words and words\n" * 9000 + b"na\xefve\n", "utf-8.*invalid"),
    "zip.txt": (b"PK\x03\x04\x00\x00", "zero bytes"),
    "cut.txt.gz": (gzip.compress(b"words " * 9000)[:60], "end-of-stream"),
    "false.txt.gz": (b"\x1f\x8bwords", "cannot be read|can be read"),
    "false.parquet": (b"PAR1 and nothing else", "can be read|cannot be read"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.endswith("parquet") else ()) for name in REFUSED]
)
def test_files_without_texts_are_refused(name: str, tmp_path: Path) -> None:
    content, message = REFUSED[name]
    if name.endswith(".parquet"):
        pytest.importorskip("datasets")
    (tmp_path / name.partition(":")[0]).write_bytes(content)
    with pytest.raises(KflatsError, match=message) as caught:
        read_texts(f"{tmp_path}/{name}")
    assert str(tmp_path) in str(caught.value)


ODD = [b'{"text": "a b"}', b"[1, ", b'["a b", null]', b"{", b"text,n", b"\t", b'"', b",", b"\n", b"\r", b"\0", b"\xff"]
ODD += [
    b"\xef\xbb\xbf",
    b"\x1f\x8b",
    gzip.compress(b"a b\nc d"),
    b"NaN",
    b"\\ud800",
    "“é”".encode(),
    b" a b. ",
    b"<unk>",
]


@given(
    parts=st.lists(st.sampled_from(ODD), max_size=8),
    name=st.sampled_from(["a.txt", "a.csv", "a.tsv", "a.json", "a.jsonl", "a.jsonl.gz", "a", "a.csv:text", "a.txt:b"]),
)
@settings(max_examples=150)
def test_any_bytes_are_read_or_refused(parts: list[bytes], name: str, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / name.partition(":")[0]).write_bytes(b"".join(parts))
    try:
        texts = read_texts(f"{folder}/{name}")
    except KflatsError:
        return
    assert texts
    assert all(text == text.strip() != "" for text in texts)
    "".join(texts).encode()
    with suppress(KflatsError):  # nothing is left but marks
        made = windows(texts, Tokenizer())
        assert made.calibration == made.counted
        assert not made.held_out


def test_folders_without_texts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KflatsError, match="no files of texts"):
        read_texts(tmp_path)
    (tmp_path / "a.txt").write_text("a line")
    (tmp_path / "b.csv").write_text("text\na line\n")
    with pytest.raises(KflatsError, match=r"holds \.csv and \.txt files of texts"):
        read_texts(tmp_path)
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(KflatsError, match=r"needs datasets.*kflats\[tasks\]"):
        read_texts(tmp_path)


def test_long_files_are_read_in_evenly_spaced_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MOST", 3000)
    monkeypatch.setattr(text_files, "_STRETCH", 100)
    lines = [f"line number {i:05}" for i in range(2000)]
    path = tmp_path / "long.txt"
    path.write_text("\n".join(lines))
    with pytest.warns(KflatsWarning, match=r"34,000 characters; [12],\d\d\d are read"):
        read = read_texts(path)
    places = [lines.index(line) for line in read]
    assert places == sorted(set(places))
    assert 1500 <= sum(map(len, read)) <= 3000
    gaps = [b - a for a, b in pairwise([0, *places, 2000])]
    assert max(gaps) < 2000 / 8
    monkeypatch.setattr(text_files, "_LONGEST", 1000)
    path.write_text("word " * 10_000)
    with pytest.warns(KflatsWarning, match="in stretches evenly spaced"):
        assert 1000 <= sum(map(len, read_texts(path))) <= 3000
    path.write_text("\n".join(lines[:100]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_texts(path) == tuple(lines[:100])


# Running text


SPLITS = {
    "Mr. A. Smith of the U.S. Navy left. So did I. Why?": ["Mr. A. Smith of the U.S. Navy left.", "So did I. Why?"],
    'He said "no." Then he left!  "Why?" she asked.': ['He said "no."', "Then he left!", '"Why?" she asked.'],
    "It took approx. 3.5 hours, i.e. too long. See Fig. 3.": [
        "It took approx.",
        "3.5 hours, i.e. too long.",
        "See Fig. 3.",
    ],
    "一本书。两本书！「三本」": ["一本书。", "两本书！", "「三本」"],
    "no stop\nanother line\n\nthe end": ["no stop", "another line", "the end"],
    "Он пришёл. Она ушла. и всё": ["Он пришёл.", "Она ушла. и всё"],
    "यह एक किताब है। वह दूसरी है।": ["यह एक किताब है।", "वह दूसरी है।"],
    "Wait... what? OK": ["Wait... what?", "OK"],
}


@pytest.mark.parametrize("text", SPLITS)
def test_sentences(text: str) -> None:
    assert [part.strip() for part in sentences(text)] == SPLITS[text]


@given(st.text(st.sampled_from("aB.!? \n\"')。1"), max_size=60))
def test_sentences_joined_are_the_text(text: str) -> None:
    assert "".join(sentences(text)) == text
    assert all(part.strip() for part in sentences(text)[1:-1])


def test_hard_wrapped_lines_are_joined_and_others_are_not() -> None:
    assert unwrapped(BOOK).split("\n") == PARAGRAPHS
    assert unwrapped(BOOK.replace("\n", "\r\n")).split("\n") == PARAGRAPHS
    for kept in (
        "\n".join(SENTENCES),
        "\n".join(PARAGRAPHS),
        unwrapped(BOOK),
        "Roses are red,\nviolets are blue,\nsugar is sweet,\nand so are you.",
        "\n".join(f"the word{i % 9} of word{i % 7}" for i in range(50)),
        "\n".join(f"the quick brown fox number {i % 10} jumps over lazy dogs" for i in range(80)),
        "\n".join("一二三四五六七八九十" * 5 + "。" for _ in range(9)),
        "for i in range(3):\n    print(i)\n",
        "",
    ):
        assert unwrapped(kept) == kept


MARKS = {
    " The 3 @-@ day trip cost $ 1 @,@ 500 @.@ 25 , he said . ": "The 3-day trip cost $1,500.25, he said.",
    'It is " very good " , is n\'t it ? ( Yes . )': 'It is "very good", isn\'t it? (Yes.)',
    "The boys ' team 's coach , they 're told , left .": "The boys' team's coach, they're told, left.",
    "`` No , '' he said .": '"No," he said.',
    "He knew . The <unk> came . She left .": "He knew. She left.",
    " = = Early life = = ": None,
    "All of <unk> , it was .": None,
}


def test_marks_of_tokenised_corpora_are_undone() -> None:
    plain = tuple(meaning for meaning in MARKS.values() if meaning)
    assert undo_marks(tuple(MARKS)) == (plain, 2)
    assert undo_marks(plain) == (plain, None)
    sound = (*SENTENCES, "a = b = c", "Il a dit : « Non ! »", "well ... yes", "<unk> is a token")
    assert undo_marks(sound) == (sound, None)
    made = windows(list(MARKS), Tokenizer())
    assert made.counted == plain
    assert "marks of a tokenised corpus undone, 2 sentences with <unk> left out" in made.summary


# Windows


def joined(texts: Any) -> str:
    return "".join("".join(texts).split())


def test_windows_are_the_text_cut_once(tmp_path: Path) -> None:
    made = windows(PARAGRAPHS, Tokenizer())
    every = {key(sentence) for text in SENTENCES for sentence in sentences(text)}
    parts = [{key(s) for text in part for s in sentences(text)} for part in (made.held_out, made.counted)]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == every
    assert len(joined(made.held_out)) + len(joined(made.counted)) == len(joined(SENTENCES))
    assert set(made.calibration) <= set(made.counted)
    assert f"; {len(made.held_out) + len(made.counted)} windows of" in made.summary


def key(sentence: str) -> str:
    return " ".join(sentence.casefold().split())


def test_windows_depend_on_text_and_seed_alone() -> None:
    first = windows(PARAGRAPHS, Tokenizer())
    assert windows(PARAGRAPHS, Tokenizer()) == first
    assert set(windows(PARAGRAPHS, Tokenizer(), seed=1).held_out) != set(first.held_out)
    again = windows([*PARAGRAPHS, *(p.replace(" ", "  ") for p in PARAGRAPHS), SENTENCES[0].upper()], Tokenizer())
    assert (again.calibration, again.held_out, again.counted) == (first.calibration, first.held_out, first.counted)
    assert f"; {sum(len(sentences(p)) for p in PARAGRAPHS) + 1} repeated sentences left out; " in again.summary
    # Text at the end changes the use of few windows: they are drawn one by one.
    longer = windows([*PARAGRAPHS, *(f"This is sentence number {i} of the appendix." for i in range(60))], Tokenizer())
    assert len(set(first.counted) - set(longer.counted)) <= 0.15 * len(first.counted)


@pytest.mark.parametrize("samples", [1, 50, 10_000])
def test_samples_are_drawn_from_the_whole_text(samples: int) -> None:
    made = windows(PARAGRAPHS, Tokenizer(), samples=samples)
    assert len(made.calibration) == min(samples, len(made.counted))
    assert made.held_out == windows(PARAGRAPHS, Tokenizer()).held_out
    places = [made.counted.index(text) for text in made.calibration]
    assert places == sorted(places)
    if samples == 50:
        assert min(places) < len(made.counted) / 4
        assert max(places) > len(made.counted) * 3 / 4


def test_lengths_are_mixed_by_the_share_of_short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kflats.calibration.windows.LONG", (40, 80))
    sizes: dict[float, list[int]] = {}
    for portion in (0.0, 0.5, 1.0):
        monkeypatch.setattr("kflats.calibration.windows.SHORT_SHARE", portion)
        made = windows(PARAGRAPHS, Tokenizer())
        sizes[portion] = sorted(len(text.split()) for text in made.counted)
    assert all(size >= 6 for size in sizes[1.0][1:])
    assert sizes[1.0][-1] <= 52
    assert sizes[0.0][-1] <= 82
    middle = {portion: of[len(of) // 2] for portion, of in sizes.items()}
    assert middle[1.0] < 20
    assert middle[1.0] < middle[0.5] < middle[0.0]
    assert 30 <= middle[0.0] <= 70


class Vocabulary(Tokenizer):
    """A word tokenizer of the words of the package's sentences, of a part of them, or of none."""

    all_special_ids = (0, 1, 2)
    unk_token_id = 2

    def __init__(self, known: float) -> None:
        super().__init__()
        words = list(dict.fromkeys(word for text in packaged_texts("count") for word in text.split()))
        self.words = ["[CLS]", "[SEP]", "[UNK]", *words[: int(known * len(words))], *(f"word{i}" for i in range(500))]
        self.ids = {word: i for i, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def get_vocab(self) -> dict[str, int]:
        return self.ids

    def __call__(self, texts: list[str], verbose: bool = True) -> dict[str, list[list[int]]]:
        return {"input_ids": [[0, *(self.ids.get(word, 2) for word in text.split()), 1] for text in texts]}

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.words[i] for i in ids)


@pytest.mark.parametrize(("known", "sentences_used"), [(1.0, True), (0.05, False)])
@pytest.mark.parametrize("samples", [1, 7, 600])
def test_windows_without_texts(known: float, sentences_used: bool, samples: int) -> None:
    tokenizer = Vocabulary(known)
    made = drawn_windows(tokenizer, samples=samples)
    assert (len(made.calibration), made.held_out, made.counted) == (samples, (), ())
    own = set(packaged_texts("count"))
    of_sentences = [text for text in made.calibration if any(sentence in text for sentence in own)]
    assert len(of_sentences) == (samples // 2 if sentences_used else 0)
    assert made == drawn_windows(tokenizer, samples=samples)
    sizes = [len(text.split()) for text in made.calibration[samples // 2 :]]
    assert all(8 <= size <= 128 for size in sizes)
    if samples < 600:
        return
    assert made != drawn_windows(tokenizer, samples=samples, seed=1)
    assert sorted(sizes)[len(sizes) // 10] < 20
    assert sorted(sizes)[len(sizes) * 9 // 10] > 60
    prior = zipf_prior(tokenizer, len(tokenizer))
    prior[:3] = 0
    seen = torch.zeros(len(tokenizer))
    for text in made.calibration[len(of_sentences) :]:
        for word in text.split():
            seen[tokenizer.ids[word]] += 1
    assert float((seen / seen.sum() - prior / prior.sum()).abs().sum()) < 0.4
    assert not bool(seen[:3].any())


@pytest.mark.parametrize(("count", "own", "package"), [(0, 0, 30), (12, 12, 18), (40, 40, 0), (300, 45, 0)])
def test_few_texts_are_filled_up(count: int, own: int, package: int) -> None:
    tokenizer = Vocabulary(1.0)
    texts = tuple(f"Sentence {i} of a text." for i in range(count))
    made = filled_windows(Windows(texts, ("held out",), texts, "a summary"), tokenizer, samples=60)
    assert len(made.calibration) == 60
    assert (made.drawn, made.held_out, made.counted) == (60 - own, ("held out",), texts)
    assert len(set(made.calibration) & set(texts)) == own
    assert sum(any(sentence in text for sentence in packaged_texts("count")) for text in made.calibration) == package
    kept = [texts.index(text) for text in made.calibration[:own]]
    assert kept == sorted(kept)
    assert not kept or kept[-1] > 0.9 * count - 2


def test_windows_without_texts_fit_into_the_model() -> None:
    tokenizer = Vocabulary(1.0)
    tokenizer.model_max_length = 16
    sizes = [len(text.split()) for text in drawn_windows(tokenizer, samples=200).calibration]
    assert max(sizes[:100]) <= 18  # tokens of sentences are estimated
    assert max(sizes[100:]) == 14
    with pytest.raises(KflatsError, match="0 samples"):
        drawn_windows(tokenizer, samples=0)


@pytest.mark.parametrize("limit", [16, 128])
@pytest.mark.parametrize(
    ("text", "tokenizer"),
    [
        (" ".join(f"w{1000 + i}" for i in range(8000)), Tokenizer()),  # no sentence ends
        ("".join(chr(0x4E00 + i % 5000) for i in range(4000)), Tokenizer(list)),  # no word ends
        (" ".join("x" * 300 + str(i) for i in range(100, 200)), Tokenizer(list)),  # words longer than windows
        (BOOK, Tokenizer()),
    ],
    ids=["no stops", "no spaces", "long words", "book"],
)
def test_windows_fit_into_the_model(text: str, tokenizer: Tokenizer, limit: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokenizer, "model_max_length", limit + 2)
    made = windows([text], tokenizer)
    drawn = [*made.calibration, *made.held_out]
    sizes = [len(row) for row in tokenizer(drawn)["input_ids"]]
    most = min(limit + 2, 128)
    over = sum(size > most for size in sizes)
    assert over <= 0.05 * len(drawn)
    assert (f"; {over} longer than {most} tokens, cut;" in made.summary) == (over > 0)
    assert all(window.strip() for window in drawn)
    if limit == 128 and "xx" not in text:
        low, high = sorted(sizes)[len(sizes) // 10], sorted(sizes)[-len(sizes) // 10]
        assert low < 40 < 60 < high  # lengths are mixed
    assert len(joined(made.counted)) + len(joined(made.held_out)) == len(joined([text]))


def test_few_texts_are_used_whole_and_as_they_are() -> None:
    few = [f"the word{i} of word{i * 7 % 283}" for i in range(40)]
    made = windows(few, Tokenizer())
    assert made.calibration == made.counted == tuple(few)
    assert made.held_out == ()
    assert "none held out" in made.summary
    enough = windows([f"This is the sentence with number {i}." for i in range(12 * FEWEST)], Tokenizer())
    assert len(enough.held_out) >= 32
    assert len(windows(SENTENCES * 9, Tokenizer()).held_out) == 32
    many = windows([f"Sentence {i} of a long text that is all alike." for i in range(20_000)], Tokenizer())
    assert len(many.held_out) == 200


def test_scripts_are_reported() -> None:
    made = windows(["Это книга и ещё книга.", "This is it.", "一本书。"] * 3, Tokenizer())
    assert "; 6 repeated sentences left out; " in made.summary
    assert made.summary.endswith("scripts: Cyrillic 61%, Latin 29%, Cjk 11%")


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, "no texts to count"),
        (["", " \n"], {}, "no texts to count"),
        ("one string", {}, "not one string"),
        (["a", 3], {}, "must be a string, not int"),
        (["a"], {"samples": 0}, "0 samples"),
    ],
)
def test_what_makes_no_windows_is_refused(texts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(KflatsError, match=message):
        windows(texts, Tokenizer(), **options)


# In use


def test_held_out_windows_are_neither_counted_nor_measured(tiny_model: Any, tiny_tokenizer: Any) -> None:
    model = tiny_model("bert")
    texts = [f"word{i % 280} word{i * 3 % 271} the word{i * 7 % 277} of a." for i in range(1500)]
    data = gather(texts, tiny_tokenizer, None, None, None, 60).windowed(model)
    assert data.held_out
    assert not set(data.held_out) & set(data.texts)
    whole = count_tokens([*data.texts, *data.held_out], tiny_tokenizer, 300)
    held = count_tokens(data.held_out, tiny_tokenizer, 300)
    pair = next(w for w in kflats.find_weights(model) if w.name == "embeddings.word_embeddings")
    recipe = kflats.Recipe(kflats.SVD(), kflats.TokenCounts())
    assert (data._measured(pair, recipe).counts == whole - held).all()
    batches = data.batches(model)
    rows = {tuple(row[mask.bool()].tolist()) for b in batches for row, mask in zip(*b.values(), strict=True)}
    assert sum(len(batch["input_ids"]) for batch in batches) == 60
    assert rows == {tuple(row) for row in tiny_tokenizer(list(data.windows.calibration))["input_ids"]}
    assert max(map(len, rows)) <= model.config.max_position_embeddings
    # The user's own calibration data stays as it is.
    own = gather(texts, tiny_tokenizer, texts[:50], None, None, 60).windowed(model)
    assert own.held_out
    assert sum(len(batch["input_ids"]) for batch in own.batches(model)) == 50
    same = gather(texts, tiny_tokenizer, texts, None, None, 60).windowed(model)
    assert same.windows is same.held_out is None
    assert same.texts == tuple(texts)


def test_the_command_line_reads_any_form(tiny_folder: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from kflats.cli.app import app

    file = tmp_path / "texts.csv"
    with file.open("w", newline="") as out:
        rows = ([f"title number {i}", f"word{i % 280} the word{i * 7 % 277} of word5."] for i in range(900))
        csv.writer(out).writerows([["title", "body"], *rows])
    options = ["--keep", "60%", "--flats", "2"]
    for quiet in (True, False):
        arguments = [
            "compress",
            str(tiny_folder),
            *options,
            "--texts",
            f"{file}:body",
            "--out",
            str(tmp_path / f"{quiet}"),
        ]
        done = CliRunner().invoke(app, [*arguments, *(["--quiet"] if quiet else [])])
        assert done.exit_code == 0, done.output
        assert ("kflats: texts: 900 texts; " in done.stderr) is not quiet
        assert "windows, counted" in (tmp_path / f"{quiet}" / "README.md").read_text()
    refused = CliRunner().invoke(app, ["compare", str(tiny_folder), str(tiny_folder), "--texts", str(file)])
    assert refused.exit_code == 2
    assert f"{file}:title" in refused.stderr
