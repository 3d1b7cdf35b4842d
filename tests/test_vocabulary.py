"""Fewer entries, the same segmentation wherever they suffice: laws over tokenizers of every kind, trained here."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from kflats.common.errors import KflatsError
from kflats.trimming.vocabulary import choose, mentioned, read, reduced

tokenizers = pytest.importorskip("tokenizers")
models, trainers, splits = tokenizers.models, tokenizers.trainers, tokenizers.pre_tokenizers

BYTES = [f"<0x{b:02X}>" for b in range(256)]
KINDS = ("wordpiece", "unigram", "unigram-bytes", "bpe", "bpe-suffix", "bpe-prefix", "bpe-bytes", "byte-level")


def lexicon(seed: int = 0, size: int = 400) -> list[str]:
    """Words of syllables, the commonest first."""
    chance = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "ul", "éa")]
    return sorted({"".join(chance.choices(syllables, k=chance.randint(1, 4))) for _ in range(size)}, key=hash_of)


def hash_of(word: str) -> tuple[int, str]:
    return (len(word), word[::-1])


def sentences(count: int, seed: int = 1) -> list[str]:
    chance, words = random.Random(seed), lexicon()
    weights = [1 / (rank + 3) for rank in range(len(words))]
    return [" ".join(chance.choices(words, weights, k=12)) for _ in range(count)]


def trained(kind: str) -> Any:
    """A tokenizer of ``kind``, with a post-processor, padding, and a token added at the end."""
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    options: dict[str, Any] = {"vocab_size": 420, "special_tokens": special, "show_progress": False}
    marks: dict[str, str] = {"unk_token": "[UNK]"}
    if kind == "wordpiece":
        made = tokenizers.Tokenizer(models.WordPiece(**marks))
        made.pre_tokenizer, trainer = splits.Whitespace(), trainers.WordPieceTrainer(**options)
    elif kind.startswith("unigram"):
        made = tokenizers.Tokenizer(models.Unigram())
        made.pre_tokenizer = splits.Metaspace()
        options["special_tokens"] = special + (BYTES if kind == "unigram-bytes" else [])
        options["vocab_size"] += 256 if kind == "unigram-bytes" else 0
        trainer = trainers.UnigramTrainer(**options, unk_token="[UNK]")
    else:
        if kind == "bpe-suffix":
            marks["end_of_word_suffix"] = options["end_of_word_suffix"] = "</w>"
        if kind == "bpe-prefix":
            marks["continuing_subword_prefix"] = options["continuing_subword_prefix"] = "##"
        if kind == "bpe-bytes":
            options |= {"special_tokens": special + BYTES, "vocab_size": 676}
        made = tokenizers.Tokenizer(models.BPE(**({} if kind == "byte-level" else marks)))
        made.pre_tokenizer = splits.Whitespace()
        if kind == "byte-level":
            made.pre_tokenizer = splits.ByteLevel(add_prefix_space=False)
            options |= {"initial_alphabet": splits.ByteLevel.alphabet(), "vocab_size": 620}
        trainer = trainers.BpeTrainer(**options)
    made.train_from_iterator(sentences(300), trainer)
    if kind.endswith("bytes"):
        state = json.loads(made.to_str())
        state["model"]["byte_fallback"] = True
        state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in special]
        made = tokenizers.Tokenizer.from_str(json.dumps(state))
    made.add_special_tokens(["[LATE]"])
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    made.enable_padding(pad_id=3, pad_token="[PAD]")
    return made


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return trained(request.param)


def required(state: dict[str, Any]) -> set[int]:
    found = read(state)
    return {*found.fixed, *mentioned(state)}


@pytest.mark.parametrize("seed", range(3))
def test_what_the_kept_entries_cover_is_segmented_as_before(tokenizer: Any, seed: int) -> None:
    """The law, over random choices: same tokens, and words that lost a piece are spelled, never unknown."""
    state = json.loads(tokenizer.to_str())
    found, must = read(state), required(state)
    order = list(range(len(found.tokens)))
    random.Random(seed).shuffle(order)
    keep = len(must) + (len(order) - len(must)) * (seed + 1) // 4
    kept = choose(found, must, order, keep)
    assert keep - 6 <= len(kept) <= keep
    assert must <= set(kept)
    made, old = reduced(state, kept)
    small, new = tokenizers.Tokenizer.from_str(json.dumps(made)), {i: row for row, i in enumerate(old)}
    assert [small.id_to_token(row) for row in range(len(old))] == [tokenizer.id_to_token(i) for i in old]
    assert small.get_vocab_size() == len(old) == len(kept)
    unknown, covered, changed = new[tokenizer.token_to_id("[UNK]")], 0, 0
    for word in lexicon() + sentences(40, seed=7):
        before, after = tokenizer.encode(word), small.encode(word)
        if all(i in new for i in before.ids):
            covered += 1
            assert after.ids == [new[i] for i in before.ids]
        else:
            changed += 1
            assert unknown not in after.ids
    assert min(covered, changed) > 20


def test_late_tokens_and_what_is_put_around_texts_follow(tokenizer: Any) -> None:
    state = json.loads(tokenizer.to_str())
    must = required(state)
    assert mentioned(state) == {1, 2, 3}
    made, old = reduced(state, must)
    small = tokenizers.Tokenizer.from_str(json.dumps(made))
    assert small.encode("[LATE]").tokens == ["[CLS]", "[LATE]", "[SEP]"]
    assert old[small.token_to_id("[LATE]")] == tokenizer.token_to_id("[LATE]")
    assert small.padding["pad_id"] == small.token_to_id("[PAD]")
    assert [t["content"] for t in made["added_tokens"]] == [t["content"] for t in state["added_tokens"]]


@pytest.mark.parametrize("kind", ["bpe", "bpe-suffix", "bpe-prefix", "byte-level"])
def test_merging_needs_what_it_passes_through(kind: str) -> None:
    """The closure is needed: with single characters and a long entry alone, that entry is never found again."""
    tokenizer = trained(kind)
    state = json.loads(tokenizer.to_str())
    found, must = read(state), required(state)
    own = {word: ids[1] for word in lexicon() if len(ids := tokenizer.encode(word).ids) == 3}
    word, long = max((word, i) for word, i in own.items() if found.needs(i) - must - {i})
    for extra, lasts in (({long}, False), (found.needs(long), True)):
        made, old = reduced(state, must | extra)
        ids = tokenizers.Tokenizer.from_str(json.dumps(made)).encode(word).ids
        assert (long in [old[row] for row in ids]) is lasts


def test_bytes_and_characters_spell_what_was_never_seen() -> None:
    for kind, text in (("byte-level", "日本 žluťoučký 🙂"), ("bpe-bytes", "日本語"), ("unigram-bytes", "日本語")):
        tokenizer = trained(kind)
        state = json.loads(tokenizer.to_str())
        made, old = reduced(state, required(state))
        small = tokenizers.Tokenizer.from_str(json.dumps(made))
        assert "[UNK]" not in small.encode(text).tokens
        assert [old[row] for row in small.encode("日").ids] == tokenizer.encode("日").ids


def test_entries_that_characters_do_not_spell_stay() -> None:
    vocab = {"[UNK]": 0, "a": 1, "b": 2, "##a": 3, "ab": 4, "ba": 5}
    found = read(
        {"model": {"type": "WordPiece", "vocab": vocab, "continuing_subword_prefix": "##", "unk_token": "[UNK]"}}
    )
    assert found.fixed == {0, 1, 2, 3, 4}  # there is no "##b"
    assert read({"model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}}).fixed == {0}


def test_merges_in_both_spellings_and_in_order() -> None:
    vocab = {c: i for i, c in enumerate(["a", "b", "c", "ab", "abc", "bc"])}
    for merges in ([["a", "b"], ["b", "c"], ["ab", "c"]], ["a b", "b c", "ab c"]):
        state = {"model": {"type": "BPE", "vocab": vocab, "merges": merges}}
        found = read(state)
        assert found.needs(4) == {0, 1, 2, 3, 4}
        made, old = reduced(state, [0, 1, 2, 5])
        assert made["model"]["merges"] == [merges[1]]
        assert old == (0, 1, 2, 5)
        assert made["model"]["vocab"] == {"a": 0, "b": 1, "c": 2, "bc": 3}


def test_an_entry_no_merging_reaches_needs_only_itself() -> None:
    vocab = {c: i for i, c in enumerate(["a", "b", "c", "ab", "bc", "abc"])}
    merges = [["a", "b"], ["b", "c"], ["a", "bc"]]  # "abc" ends as ab, c: merging never makes it
    assert read({"model": {"type": "BPE", "vocab": vocab, "merges": merges}}).needs(5) == {5}


def test_refusals() -> None:
    state = {"model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"}}
    with pytest.raises(KflatsError, match=r"1 entries are fewer than the 2 that must stay"):
        choose(read(state), [0, 1], [], 1)
    with pytest.raises(KflatsError, match="kind 'Magic'"):
        read({"model": {"type": "Magic", "vocab": {}}})
