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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kflats.common.errors import KflatsError

KINDS = ("BPE", "Unigram", "WordLevel", "WordPiece")
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True)
class Vocabulary:
    """The entries of a tokenizer, and the entries that each of them needs.

    Args:
        kind: BPE, Unigram, WordLevel or WordPiece.
        tokens: the entry of every id; None where an id has none.
        own: ids of the model inside the tokenizer; other ids are added tokens.
        fixed: ids that always stay: added tokens, the unknown token, fallback bytes.
        characters: ids of the single characters, by character.
    """

    kind: str
    tokens: tuple[str | None, ...]
    own: frozenset[int]
    fixed: frozenset[int]
    characters: dict[str, tuple[int, ...]]
    prefix: str = ""
    suffix: str = ""
    bytes_spell: bool = False
    _ids: dict[str, int] = field(default_factory=dict, repr=False)
    _merges: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict, repr=False)

    def needs(self, row: int) -> frozenset[int]:
        """The ids that the tokenizer needs to produce entry ``row``, with ``row`` itself."""
        token = self.tokens[row]
        if self.kind != "BPE" or row not in self.own or row in self.fixed or token is None:
            return frozenset((row,))
        return frozenset(self._ids[part] for part in self._passes(token)) | {row}

    def unspelled(self) -> frozenset[int]:
        """Entries with a character that has no entry of its own; without them their texts become the unknown token."""
        if self.kind in ("BPE", "WordLevel") or self.bytes_spell:
            return frozenset()
        return frozenset(
            row
            for row in self.own - self.fixed
            if (token := self.tokens[row]) is not None and any(part not in self._ids for part in self._symbols(token))
        )

    def bare(self, row: int) -> str:
        """Entry ``row`` without the marks of a piece's place in its word."""
        token = self.tokens[row] or ""
        return _bare(token, self.prefix, self.suffix)

    def _symbols(self, token: str) -> list[str]:
        """The single characters that ``token`` is made of, each as its entry is written."""
        begins = not (self.prefix and token.startswith(self.prefix))
        ends = bool(self.suffix) and token.endswith(self.suffix)
        text = list(_bare(token, self.prefix, self.suffix))
        symbols = [c if begins and i == 0 else self.prefix + c for i, c in enumerate(text)]
        return symbols[:-1] + [symbols[-1] + self.suffix] if ends and symbols else symbols

    def _passes(self, token: str) -> set[str]:
        """All entries that merging the characters of ``token`` passes through; none if the result is another token."""
        parts = self._symbols(token)
        passed = set(parts)
        while len(parts) > 1:
            # The least rank, and of equal ones the leftmost: as merging does.
            found = [(step[0], i, step[1]) for i in range(len(parts) - 1) if (step := self._step(parts, i))]
            if not found:
                break
            _, place, made = min(found)
            parts[place : place + 2] = [made]
            passed.add(made)
        return passed if parts == [token] and all(part in self._ids for part in passed) else set()

    def _step(self, parts: Sequence[str], place: int) -> tuple[int, str] | None:
        return self._merges.get((parts[place], parts[place + 1]))


def read(state: dict[str, Any]) -> Vocabulary:
    """The vocabulary of a parsed ``tokenizer.json``.

    Raises:
        KflatsError: an unknown kind of tokenizer.

    >>> model = {"type": "WordPiece", "vocab": {"[UNK]": 0, "a": 1, "##b": 2, "ab": 3}, "unk_token": "[UNK]"}
    >>> found = read({"model": model | {"continuing_subword_prefix": "##"}})
    >>> found.characters, sorted(found.fixed)
    ({'a': (1,), 'b': (2,)}, [0])
    """
    model = state["model"]
    kind = kind_of(model)
    entries = _entries(model)
    added = {int(token["id"]): str(token["content"]) for token in state.get("added_tokens") or ()}
    size = 1 + max([*entries, *added], default=-1)
    tokens = tuple(entries.get(i, added.get(i)) for i in range(size))
    prefix = str(model.get("continuing_subword_prefix") or "") if kind in ("BPE", "WordPiece") else ""
    suffix = str(model.get("end_of_word_suffix") or "") if kind == "BPE" else ""
    fallback = bool(model.get("byte_fallback"))
    fixed = set(added)
    unknown = model.get("unk_id") if kind == "Unigram" else model.get("unk_token")
    fixed |= {i for i, token in entries.items() if unknown is not None and unknown in (token, i)}
    if fallback:
        fixed |= {i for i, token in entries.items() if _BYTE.fullmatch(token)}
    characters: dict[str, tuple[int, ...]] = {}
    if kind != "WordLevel":
        for i, token in sorted(entries.items()):
            if i not in fixed and len(single := _bare(token, prefix, suffix)) == 1:
                characters[single] = (*characters.get(single, ()), i)
    merges = {}
    if kind == "BPE":
        for rank, (a, b) in enumerate(_pairs(model)):
            merges[a, b] = (rank, a + b[len(prefix) :])
    ids = {token: i for i, token in sorted(entries.items(), reverse=True)}
    spells = fallback and sum(_BYTE.fullmatch(token) is not None for token in entries.values()) >= 256
    return Vocabulary(
        kind,
        tokens,
        frozenset(entries),
        frozenset(fixed),
        characters,
        prefix=prefix,
        suffix=suffix,
        bytes_spell=spells,
        _ids=ids,
        _merges=merges,
    )


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
            f"{keep:,} entries are fewer than the {len(kept):,} that must stay",
            cause="special and added tokens, and the single characters (or bytes) that spell the other words, stay",
            hint=f"keep at least {len(kept):,} entries, or only the characters of the texts: alphabet 'seen'",
            command=f"--keep {len(kept)}, or --alphabet seen: only the characters of --texts",
        )
    for row in order:
        if len(kept) == keep:
            break
        if row not in kept and len(kept) + len(more := vocabulary.needs(row) - kept) <= keep:
            kept |= more
    return tuple(sorted(kept))


def reduced(state: dict[str, Any], kept: Iterable[int]) -> tuple[dict[str, Any], tuple[int, ...]]:
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
    made = dict(state)
    made["model"] = _model(state["model"], inside, new)
    if state.get("added_tokens"):
        made["added_tokens"] = sorted(
            ({**token, "id": new[int(token["id"])]} for token in state["added_tokens"]), key=lambda token: token["id"]
        )
    if state.get("post_processor"):
        made["post_processor"] = _post_processor(state["post_processor"], new)
    if state.get("padding"):
        pad = int(state["padding"]["pad_id"])
        made["padding"] = {**state["padding"], "pad_id": new.get(pad, 0)}
    return made, old


def mentioned(state: dict[str, Any]) -> frozenset[int]:
    """Ids in the post-processor and the padding of ``tokenizer.json``: the tokens around a text."""
    found: set[int] = set()

    def visit(part: Any) -> None:
        if not isinstance(part, dict):
            return
        for inner in part.get("processors", ()):
            visit(inner)
        for special in (part.get("special_tokens") or {}).values():
            found.update(special["ids"])
        for name in ("sep", "cls"):
            if isinstance(pair := part.get(name), list | tuple):
                found.add(int(pair[1]))

    visit(state.get("post_processor"))
    if state.get("padding"):
        found.add(int(state["padding"]["pad_id"]))
    return frozenset(found)


def kind_of(model: dict[str, Any]) -> str:
    """BPE, Unigram, WordLevel or WordPiece.

    Raises:
        KflatsError: another kind.
    """
    kind = model.get("type")
    if kind not in KINDS:
        raise KflatsError(
            f"a tokenizer of kind {kind!r} cannot be trimmed", hint=f"a tokenizer of kind {', '.join(KINDS)}"
        )
    return str(kind)


def _entries(model: dict[str, Any]) -> dict[int, str]:
    if model["type"] == "Unigram":
        return {i: str(piece) for i, (piece, _) in enumerate(model["vocab"])}
    return {int(i): str(token) for token, i in model["vocab"].items()}


def _pairs(model: dict[str, Any]) -> list[tuple[str, str]]:
    """The merges; files write one as "a b" or as ["a", "b"]."""
    found = []
    for merge in model["merges"]:
        a, b = merge.split(" ") if isinstance(merge, str) else merge
        found.append((str(a), str(b)))
    return found


def _model(model: dict[str, Any], inside: Sequence[int], new: dict[int, int]) -> dict[str, Any]:
    made = dict(model)
    if model["type"] == "Unigram":
        made["vocab"] = [model["vocab"][i] for i in inside]
        made["unk_id"] = None if model.get("unk_id") is None else new[int(model["unk_id"])]
        return made
    stays = set(inside)
    ordered = sorted(model["vocab"].items(), key=lambda item: int(item[1]))  # some classes number by place
    made["vocab"] = {token: new[int(i)] for token, i in ordered if int(i) in stays}
    if model["type"] == "BPE":
        there, skipped = made["vocab"], len(model.get("continuing_subword_prefix") or "")
        made["merges"] = [
            merge
            for merge, (a, b) in zip(model["merges"], _pairs(model), strict=True)
            if a in there and b in there and a + b[skipped:] in there
        ]
    return made


def _post_processor(part: dict[str, Any], new: dict[int, int]) -> dict[str, Any]:
    made = dict(part)
    if "processors" in part:
        made["processors"] = [_post_processor(inner, new) for inner in part["processors"]]
    if part.get("special_tokens"):
        made["special_tokens"] = {
            name: {**special, "ids": [new[i] for i in special["ids"]]}
            for name, special in part["special_tokens"].items()
        }
    for name in ("sep", "cls"):
        if isinstance(pair := part.get(name), list | tuple):
            made[name] = [pair[0], new[int(pair[1])]]
    return made


def _bare(token: str, prefix: str, suffix: str) -> str:
    token = token.removeprefix(prefix) if prefix and token != prefix else token
    return token.removesuffix(suffix) if suffix and token != suffix else token
