"""Counting tokens, streamed and with the model's own tokenizer; the Zipf prior of three kinds of vocabularies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kflats.calibration.counting import count_tokens, text_batches, zipf_prior
from kflats.common.errors import KflatsError

UNUSED, SIGNS, WORDS = 40, list("abcdefghijklmnopqrstuvwxyz0123456789.,!?"), 400


class Words:
    """A tokenizer over a list of tokens: text is split at spaces; special ones go around every text."""

    def __init__(self, vocabulary: list[str], first: str | None = None, last: str | None = None) -> None:
        self.vocabulary, self.first, self.last = vocabulary, first, last
        self.ids = {token: i for i, token in enumerate(vocabulary)}
        self.largest_batch = 0

    def get_vocab(self) -> dict[str, int]:
        return dict(reversed(self.ids.items()))  # in no helpful order

    @property
    def all_special_ids(self) -> list[int]:
        return [
            i for t, i in self.ids.items() if t[0] in "[<" and t[-1] in "]>" and "unused" not in t and "0x" not in t
        ]

    def __call__(self, texts: list[str], verbose: bool = True) -> dict[str, list[list[int]]]:
        self.largest_batch = max(self.largest_batch, len(texts))
        around = [[self.ids[t]] if t else [] for t in (self.first, self.last)]
        found = [[self.ids[w] for w in text.split() if w in self.ids] for text in texts]
        return {"input_ids": [around[0] + ids + around[1] for ids in found]}


def bert() -> Words:
    """As BERT's: [PAD], unused entries, the special ones, single characters, and then words by frequency."""
    names = ["[PAD]", *(f"[unused{i}]" for i in range(UNUSED)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    names += [*SIGNS, "é", "あ", *(f"##{c}" for c in SIGNS[:26])]
    words = ["the", "of", "and", *(f"word{i}" for i in range(WORDS)), "##ing", "##ed"]
    return Words(names + words, "[CLS]", "[SEP]")


def gpt2() -> Words:
    """As GPT-2's: bytes first, then merges by frequency, the end of text last; nothing is added to a text."""
    words = ["\u0120t", "\u0120a", "he", "\u0120the", *(f"\u0120word{i}" for i in range(WORDS))]
    return Words([*SIGNS, *(chr(0x100 + i) for i in range(60)), *words, "<|endoftext|>"])


def sentencepiece() -> Words:
    """As T5's and Llama's: special ones, bytes, pieces by frequency, and a tail of single characters."""
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    words = ["\u2581the", "\u2581of", "s", *(f"\u2581word{i}" for i in range(WORDS))]
    return Words(
        ["<pad>", "</s>", "<unk>", *bytes_, *words, "\u2581", *(chr(0x4E00 + i) for i in range(80))], None, "</s>"
    )


VOCABULARIES = {"bert": bert, "gpt2": gpt2, "sentencepiece": sentencepiece}
EVERY = pytest.mark.parametrize("make", VOCABULARIES.values(), ids=VOCABULARIES.keys())


@EVERY
def test_a_prior_is_a_share_of_every_row(make):
    tokenizer = make()
    rows = len(tokenizer.vocabulary)
    prior = zipf_prior(tokenizer, rows)
    assert prior.shape == (rows,)
    assert prior.dtype == torch.float64
    assert float(prior.sum()) == pytest.approx(1)
    assert bool((prior >= 0).all())
    padded = zipf_prior(tokenizer, rows + 28)  # tables are padded to round sizes: those rows are never read
    assert not padded[rows:].any()
    torch.testing.assert_close(padded[:rows], prior)


@EVERY
def test_words_fall_in_vocabulary_order_from_the_first_word_on(make):
    tokenizer = make()
    prior = zipf_prior(tokenizer, len(tokenizer.vocabulary))
    words = [prior[i] for t, i in tokenizer.ids.items() if t.strip("\u0120\u2581").startswith("word")]
    assert len(words) == WORDS
    assert all(a > b for a, b in itertools.pairwise(words))
    # p ~ 1 / (rank + 2.7): the quotient of any two tells the distance of their ranks.
    assert float(1 / words[100] - 1 / words[0]) == pytest.approx(100 * float(1 / words[1] - 1 / words[0]), rel=1e-6)


def test_in_a_bert_vocabulary_the_is_the_first_word_though_its_id_is_not():
    tokenizer = bert()
    ids, prior = tokenizer.ids, zipf_prior(tokenizer, len(tokenizer.vocabulary))
    assert ids["the"] > 100
    words = [i for t, i in ids.items() if len(t.removeprefix("##")) > 1 and t[0] != "["]
    assert max(words, key=lambda i: float(prior[i])) == ids["the"]
    assert prior[ids["the"]] > prior[ids["of"]] > prior[ids["and"]] > prior[ids["word0"]]
    assert prior[ids["[CLS]"]] == prior[ids["[SEP]"]] == prior[ids["the"]]  # read in every text
    for silent in ("[unused0]", "[unused39]", "あ", "é", "##q"):
        assert prior[ids[silent]] == 0
    assert prior[ids["[MASK]"]] == prior[ids["[UNK]"]] == prior[ids["a"]]  # never in texts, needed by tasks
    assert prior[ids["the"]] > prior[ids["."]] == prior[ids["a"]] > prior[ids["word399"]]
    assert 0 < prior[ids["##ing"]] < prior[ids["word399"]]


def test_in_a_gpt2_vocabulary_bytes_have_no_rank():
    tokenizer = gpt2()
    ids, prior = tokenizer.ids, zipf_prior(tokenizer, len(tokenizer.vocabulary))
    assert prior[ids["he"]] > prior[ids["\u0120the"]] > prior[ids["\u0120word0"]]
    assert prior[ids["\u0120t"]] == prior[ids["."]]  # one character after its mark
    assert prior[ids[chr(0x100)]] == 0
    assert prior[ids["<|endoftext|>"]] == prior[ids["."]]


def test_in_a_sentencepiece_vocabulary_bytes_and_the_tail_have_no_rank():
    tokenizer = sentencepiece()
    ids, prior = tokenizer.ids, zipf_prior(tokenizer, len(tokenizer.vocabulary))
    assert int(prior.argmax()) in (ids["\u2581the"], ids["</s>"])
    assert prior[ids["</s>"]] == prior[ids["\u2581the"]]
    for silent in ("<0x41>", "\u2581", chr(0x4E00)):
        assert prior[ids[silent]] == 0


def test_a_vocabulary_without_words_is_refused():
    with pytest.raises(KflatsError, match="no words"):
        zipf_prior(Words(["[PAD]", "あ"]), 2)


@EVERY
def test_a_tokenizer_of_another_model_is_refused_by_the_prior(make):
    tokenizer = make()
    with pytest.raises(KflatsError, match="another model"):
        zipf_prior(tokenizer, len(tokenizer.vocabulary) // 2)


def test_a_few_tokens_added_beyond_the_table_are_no_other_model():
    tokenizer = bert()
    rows = len(tokenizer.vocabulary) - 2
    assert float(zipf_prior(tokenizer, rows).sum()) == pytest.approx(1)


def test_counts_are_those_of_the_ids_special_ones_included():
    tokenizer = bert()
    counts = count_tokens(["the of the", "", "the word3"], tokenizer, len(tokenizer.vocabulary) + 5)
    assert counts.dtype == torch.int64
    assert {t: int(counts[i]) for t, i in tokenizer.ids.items() if counts[i]} == {
        "[CLS]": 3,
        "[SEP]": 3,
        "the": 3,
        "of": 1,
        "word3": 1,
    }
    assert int(counts.sum()) == 11


def test_texts_are_streamed():
    tokenizer, drawn = bert(), 0

    def texts() -> Iterator[str]:
        nonlocal drawn
        for _ in range(3000):
            drawn += 1
            yield "the of"

    counts = count_tokens(texts(), tokenizer, len(tokenizer.vocabulary))
    assert drawn == 3000
    assert int(counts[tokenizer.ids["the"]]) == 3000
    assert tokenizer.largest_batch < 1000  # never all of them at once


@pytest.mark.parametrize("number", [1, 511, 512, 513, 1024])
def test_no_text_is_lost_at_the_edges_of_batches(number):
    tokenizer = gpt2()
    counts = count_tokens(["he"] * number, tokenizer, len(tokenizer.vocabulary))
    assert int(counts[tokenizer.ids["he"]]) == number


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "no texts"),
        (iter(()), "no texts"),
        ("one text", "not one string"),
        (b"bytes", "not one string"),
        ([b"bytes"], "must be a string, not bytes"),
        (["fine", None], "must be a string, not NoneType"),
        ([["a", "b"]], "must be a string, not list"),
    ],
)
def test_what_is_no_text_is_refused(texts, message):
    with pytest.raises(KflatsError, match=message):
        count_tokens(texts, bert(), 600)


def test_ids_beyond_the_table_are_refused():
    tokenizer = bert()
    with pytest.raises(KflatsError, match=r"table has 50 rows.*own folder"):
        count_tokens(["the"], tokenizer, 50)


def test_texts_of_unknown_words_count_nothing():
    assert not count_tokens(["nothing known"], gpt2(), 1000).any()


def test_texts_of_words_that_the_tokenizer_does_not_know_are_told_of(tiny_tokenizer):
    """Else the unknown token is all that is counted, and measured on."""
    for read, *rows in ((count_tokens, 300), (text_batches,)):
        with pytest.raises(KflatsError, match="the tokenizer knows no word"):
            read(["Волк и лиса", "Лиса и волк"], tiny_tokenizer, *rows)
        with pytest.warns(UserWarning, match="3 of 4 words of the texts are unknown"):
            read(["the Волк и лиса"], tiny_tokenizer, *rows)
        read(["the word1 of Волк", "a b"], tiny_tokenizer, *rows)


@pytest.mark.parametrize("texts", [Path("texts.txt"), 5, None])
def test_what_has_no_texts_is_refused(texts, tiny_tokenizer):
    for read in (count_tokens, text_batches):
        with pytest.raises(KflatsError, match="texts must be a sequence of strings, not"):
            read(texts, tiny_tokenizer, *([300] if read is count_tokens else []))


def test_real_tokenizers_count_as_they_encode(minilm):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    text = "The cat sat on the mat. " * 300  # far beyond the window: counted whole, without a warning
    counts = count_tokens([text, "A mat."], tokenizer, 30522)
    the = tokenizer.convert_tokens_to_ids("the")
    assert int(counts[the]) == 600
    assert int(counts[tokenizer.cls_token_id]) == 2
    prior = zipf_prior(tokenizer, 30522)
    assert the == 1996
    assert prior[the] == prior.max() == prior[tokenizer.cls_token_id]
    assert not prior[1:100].any()  # the unused entries at the front
