"""Tokenizers with fewer entries: functions from a parsed ``tokenizer.json`` to a smaller one.

A word whose pieces are all kept is segmented as before. A word that lost a piece is segmented into kept pieces. The
first rule has a condition for each kind of tokenizer:

    WordPiece  nothing: the longest kept prefix is the longest prefix if it is kept
    Unigram    nothing: the best of all segmentations is the best of those that are left
    BPE        every entry that the merging of a kept one passes through, and the merges between kept ones, in their
               order: then each step finds the merge that it found before (Sennrich et al., ACL 2016, algorithm 1)

The second rule needs every single character (or byte) that can occur, so these always stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kflats.common.errors import KflatsError

KINDS = ("BPE", "Unigram", "WordLevel", "WordPiece")
_State = dict[str, Any]  # a parsed tokenizer.json, or a part of it
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True)
class Vocabulary:
    """The entries of a tokenizer, and the entries that each of them needs.

    Args:
        kind: BPE, Unigram, WordLevel or WordPiece.
        tokens: the entry of every id; None where an id has none.
        own: ids of the model inside the tokenizer; other ids are added tokens.
        fixed: ids that always stay: added tokens, the unknown token, fallback bytes, single characters, and entries of
            WordPiece and Unigram with a character that has no entry of its own.
    """

    kind: str
    tokens: tuple[str | None, ...]
    own: frozenset[int]
    fixed: frozenset[int]
    prefix: str = ""
    suffix: str = ""
    _ids: dict[str, int] = field(default_factory=dict, repr=False)
    _merges: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict, repr=False)

    def needs(self, row: int) -> frozenset[int]:
        """The ids that the tokenizer needs to produce entry ``row``, with ``row`` itself."""
        token = self.tokens[row]
        if self.kind != "BPE" or row not in self.own or row in self.fixed or token is None:
            return frozenset((row,))
        return frozenset(self._ids[part] for part in self._passes(token)) | {row}

    def bare(self, row: int) -> str:
        """Entry ``row`` without the marks of a piece's place in its word."""
        token = self.tokens[row] or ""
        return _bare(token, self.prefix, self.suffix)

    def _passes(self, token: str) -> set[str]:
        """All entries that merging the characters of ``token`` passes through; none if the result is another token."""
        parts = _symbols(token, self.prefix, self.suffix)
        passed = set(parts)
        while len(parts) > 1:
            # The least rank, and of equal ones the leftmost: as merging does.
            pairs = enumerate(pairwise(parts))
            steps = [(*self._merges[pair], i) for i, pair in pairs if pair in self._merges]
            if not steps:
                break
            _, merged, place = min(steps, key=lambda step: (step[0], step[2]))
            parts[place : place + 2] = [merged]
            passed.add(merged)
        return passed if parts == [token] and all(part in self._ids for part in passed) else set()


def read(state: _State) -> Vocabulary:
    """The vocabulary of a parsed ``tokenizer.json``.

    Raises:
        KflatsError: an unknown kind of tokenizer.

    >>> model = {"type": "WordPiece", "vocab": {"[UNK]": 0, "a": 1, "##b": 2, "ab": 3}, "unk_token": "[UNK]"}
    >>> found = read({"model": model | {"continuing_subword_prefix": "##"}})
    >>> sorted(found.fixed)
    [0, 1, 2]
    """
    model = state["model"]
    if (kind := str(model.get("type"))) not in KINDS:
        raise KflatsError(
            f"a tokenizer of kind {kind!r} cannot be trimmed", hint=f"a tokenizer of kind {', '.join(KINDS)}"
        )
    entries = _entries(model)
    added = {int(token["id"]): str(token["content"]) for token in state.get("added_tokens") or ()}
    size = 1 + max([*entries, *added], default=-1)
    tokens = tuple(entries.get(i, added.get(i)) for i in range(size))
    prefix = str(model.get("continuing_subword_prefix") or "") if kind in ("BPE", "WordPiece") else ""
    suffix = str(model.get("end_of_word_suffix") or "") if kind == "BPE" else ""
    fixed = set(added)
    unknown = model.get("unk_id") if kind == "Unigram" else model.get("unk_token")
    fixed |= {i for i, token in entries.items() if unknown is not None and unknown in (token, i)}
    fallback = {i for i, token in entries.items() if model.get("byte_fallback") and _BYTE.fullmatch(token)}
    fixed |= fallback
    if kind != "WordLevel":
        fixed |= {i for i, token in entries.items() if len(_bare(token, prefix, suffix)) == 1}
    merges = {}
    if kind == "BPE":
        merges = {(a, b): (rank, a + b[len(prefix) :]) for rank, (a, b) in enumerate(_pairs(model))}
    ids = {token: i for i, token in sorted(entries.items(), reverse=True)}
    if kind in ("WordPiece", "Unigram") and len(fallback) < 256:  # without these, their texts become the unknown token
        fixed |= {i for i, token in entries.items() if not ids.keys() >= set(_symbols(token, prefix, suffix))}
    return Vocabulary(kind, tokens, frozenset(entries), frozenset(fixed), prefix, suffix, ids, merges)


def choose(vocabulary: Vocabulary, required: Iterable[int], order: Iterable[int], keep: int) -> tuple[int, ...]:
    """``required``, then the entries of ``order`` that fit with what they need, up to ``keep``; ascending.

    Raises:
        KflatsError: more is required than may be kept.
    """
    kept: set[int] = set()
    for row in required:
        kept |= vocabulary.needs(row)
    if len(kept) > keep:
        raise KflatsError(
            f"{keep:,} entries are fewer than the {len(kept):,} that must stay", hint=f"at least {len(kept):,} entries"
        )
    for row in order:
        if len(kept) == keep:
            break
        if row not in kept and len(kept) + len(more := vocabulary.needs(row) - kept) <= keep:
            kept |= more
    return tuple(sorted(kept))


def reduced(state: _State, kept: Iterable[int]) -> tuple[_State, tuple[int, ...]]:
    """``tokenizer.json`` with the ``kept`` ids only, numbered anew, and the old id of every new one.

    Entries keep their order; added tokens that are no entries of the model inside come last, as ``tokenizers``
    numbers them.

    >>> model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "b": 2}, "unk_token": "[UNK]"}
    >>> made, old = reduced({"model": model, "padding": {"pad_id": 2}}, [0, 2])
    >>> made["model"]["vocab"], made["padding"], old
    ({'[UNK]': 0, 'b': 1}, {'pad_id': 1}, (0, 2))
    """
    stays = set(kept)
    entries = _entries(state["model"])
    inside = [i for i in sorted(entries) if i in stays]
    added = sorted(int(token["id"]) for token in state.get("added_tokens") or ())
    old = (*inside, *(i for i in added if i in stays and i not in entries))
    new = {i: row for row, i in enumerate(old)}
    smaller = dict(state)
    smaller["model"] = _model(state["model"], inside, new)
    if state.get("added_tokens"):
        smaller["added_tokens"] = sorted(
            ({**token, "id": new[int(token["id"])]} for token in state["added_tokens"]), key=lambda token: token["id"]
        )
    if state.get("post_processor"):
        smaller["post_processor"] = _post_processor(state["post_processor"], new.__getitem__)
    if state.get("padding"):
        pad = int(state["padding"]["pad_id"])
        smaller["padding"] = {**state["padding"], "pad_id": new.get(pad, 0)}
    return smaller, old


def mentioned(state: _State) -> frozenset[int]:
    """Ids in the post-processor and the padding of ``tokenizer.json``: the tokens around a text."""
    ids: set[int] = set()

    def note(token: int) -> int:
        ids.add(token)
        return token

    if state.get("post_processor"):
        _post_processor(state["post_processor"], note)
    if state.get("padding"):
        note(int(state["padding"]["pad_id"]))
    return frozenset(ids)


def _entries(model: _State) -> dict[int, str]:
    if model["type"] == "Unigram":
        return {i: str(piece) for i, (piece, _) in enumerate(model["vocab"])}
    return {int(i): str(token) for token, i in model["vocab"].items()}


def _pairs(model: _State) -> list[tuple[str, str]]:
    """The merges; files write one as "a b" or as ["a", "b"]."""
    pairs = []
    for merge in model["merges"]:
        a, b = merge.split(" ") if isinstance(merge, str) else merge
        pairs.append((str(a), str(b)))
    return pairs


def _model(model: _State, inside: Sequence[int], new: dict[int, int]) -> _State:
    smaller = dict(model)
    if model["type"] == "Unigram":
        smaller["vocab"] = [model["vocab"][i] for i in inside]
        smaller["unk_id"] = None if model.get("unk_id") is None else new[int(model["unk_id"])]
        return smaller
    stays = set(inside)
    ordered = sorted(model["vocab"].items(), key=lambda item: int(item[1]))  # some classes number by place
    smaller["vocab"] = {token: new[int(i)] for token, i in ordered if int(i) in stays}
    if model["type"] == "BPE":
        there, skipped = smaller["vocab"], len(model.get("continuing_subword_prefix") or "")
        smaller["merges"] = [
            merge
            for merge, (a, b) in zip(model["merges"], _pairs(model), strict=True)
            if a in there and b in there and a + b[skipped:] in there
        ]
    return smaller


def _post_processor(part: _State, number: Callable[[int], int]) -> _State:
    """A post-processor whose ids are replaced by their ``number``."""
    numbered = dict(part)
    if "processors" in part:
        numbered["processors"] = [_post_processor(inner, number) for inner in part["processors"]]
    if part.get("special_tokens"):
        numbered["special_tokens"] = {
            name: {**special, "ids": [number(i) for i in special["ids"]]}
            for name, special in part["special_tokens"].items()
        }
    for name in ("sep", "cls"):
        if isinstance(pair := part.get(name), list | tuple):
            numbered[name] = [pair[0], number(int(pair[1]))]
    return numbered


def _bare(token: str, prefix: str, suffix: str) -> str:
    token = token.removeprefix(prefix) if prefix and token != prefix else token
    return token.removesuffix(suffix) if suffix and token != suffix else token


def _symbols(token: str, prefix: str, suffix: str) -> list[str]:
    """The single characters that ``token`` is made of, each as its entry is written."""
    begins = not (prefix and token.startswith(prefix))
    ends = bool(suffix) and token.endswith(suffix)
    symbols = [c if begins and i == 0 else prefix + c for i, c in enumerate(_bare(token, prefix, suffix))]
    return symbols[:-1] + [symbols[-1] + suffix] if ends and symbols else symbols
