"""Texts -> windows: pieces of running text as a model reads them, some to measure with and some held out."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from kflats.calibration.counting import zipf_prior
from kflats.common.errors import KflatsError, check_samples
from kflats.common.sentences import sentences, undo_marks, unwrapped
from kflats.common.texts import SAMPLES, Tokenizer, batched_texts, packaged_texts, token_limit

if TYPE_CHECKING:
    from torch import nn

FEWEST = 128
"""Where texts make fewer windows, records are not joined and nothing is held out."""
_HELD_OUT = (32, 200)  # a tenth of the windows, within these bounds
_UNKNOWN = 0.1  # share of tokens of English sentences above which a tokenizer is of other languages
_PARTS = re.compile(r".{1,999}(?:\s|$)|.{1000}", re.DOTALL)  # of text without sentences, such as a transcript
_ESTIMATED_ON = 200  # sentences whose tokens say how many characters a token has


SHORT_SHARE = 0.5
"""The share of short windows. Inputs of models vary in length, and so do windows."""

SHORT = (8, 52)
"""A short window is one sentence; below the first number of tokens it takes more, up to a number that is drawn
log-uniformly between these. 8 to 52 tokens, special ones apart, are about 6 to 40 words."""

LONG = (32, 128)
"""A long window takes whole sentences up to a number of tokens that is drawn in the same way. Text without sentences,
such as a transcript, is cut to the numbers drawn, at the end of a word. No window is longer than the second number, or
than the model's limit if that is less."""


@dataclass(frozen=True)
class Windows:
    """Windows of texts; no sentence is both held out and counted.

    Args:
        calibration: what is measured with. held_out: what is neither measured with nor counted.
        counted: all windows but those held out.
        summary: what became of the texts, in one line: how many sentences were left out and why, how many windows
            there are, their tokens, how many are longer than the model's limit, and the scripts of their letters.
        drawn: how many windows of ``calibration`` are not of the texts.
    """

    calibration: tuple[str, ...]
    held_out: tuple[str, ...]
    counted: tuple[str, ...]
    summary: str
    drawn: int = 0


def windows(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    *,
    samples: int = SAMPLES,
    seed: int = 0,
    model: nn.Module | None = None,
) -> Windows:
    """Cut running text into windows of mixed length, and draw those to measure with and those held out.

    The records are taken as one text: marks of tokenised corpora and hard line breaks are undone, sentences that came
    before are left out (letter case and white space apart), and the others are joined into windows, one after the
    other. Sentences, paragraphs and books of one text therefore make nearly the same windows. Length and use of a
    window are drawn by a hash of its first sentence and the seed, so they do not depend on the rest of the texts.

    A tenth of the windows is held out, at least 32 and at most 200. Texts of fewer than 128 windows are used whole, and
    their records are not joined.

    Limit: tokens are estimated by characters, so a few windows may be longer than the model's limit; the tokenizer cuts
    them when they are read.

    Args:
        texts: records in order. tokenizer: the model's own.
        samples: how many windows to measure with. seed: of what is drawn.
        model: whose positions limit the windows.

    Raises:
        KflatsError: no texts, or only blank ones; something that is no text; no samples.

    >>> class Tokenizer:
    ...     def __call__(self, texts, verbose): return {"input_ids": [text.split() for text in texts]}
    >>> made = windows([f"Sentence {i} of many others, all alike." for i in range(3000)], Tokenizer())
    >>> len(made.calibration), len(made.held_out), set(made.held_out) & set(made.counted)
    (455, 50, set())
    """
    check_samples(samples)
    whole = [unwrapped(text) if "\n" in text else text for batch in batched_texts(texts) for text in batch]
    records, unknown = undo_marks(whole)
    pieces, repeated = _distinct(records)
    if not pieces:
        raise KflatsError("there are no texts to count or to measure with", cause="an empty or blank file or list")
    limit = token_limit(tokenizer, LONG[1], model)
    some = [piece for piece, _ in pieces[:: -(-len(pieces) // _ESTIMATED_ON)]]
    (special,) = _tokens([""], tokenizer)
    per_token = sum(map(len, some)) / max(1, sum(_tokens(some, tokenizer)) - special * len(some))
    room = max(1.0, 0.95 * (limit - special))  # estimates err
    cut = list(_cut(pieces, per_token, room, seed, joined=True))
    held = min(max(len(cut) // 10, _HELD_OUT[0]), _HELD_OUT[1])
    if len(cut) < FEWEST:
        cut, held = list(_cut(pieces, per_token, room, seed, joined=False)), 0
    order = sorted(range(len(cut)), key=lambda i: _draw(seed, "use", cut[i]))
    parts = (order[held : held + samples], order[:held], order[held:])
    calibration, kept, counted = (tuple(cut[i] for i in sorted(part)) for part in parts)
    drawn = [*calibration, *kept]
    sizes = sorted(_tokens(drawn, tokenizer))
    over = sum(size > limit for size in sizes)
    low, median, high = (sizes[int(share * (len(sizes) - 1))] for share in (0.05, 0.5, 0.95))
    phrases = [
        f"{len(whole):,} texts",
        "" if unknown is None else f"marks of a tokenised corpus undone, {unknown:,} sentences with <unk> left out",
        f"{repeated:,} repeated sentences left out" if repeated else "",
        f"{len(cut):,} windows of {median} tokens (5th to 95th percentile: {low} to {high})",
        f"{held:,} held out" if held else "none held out: too few",
        f"{over:,} longer than {limit} tokens, cut" if over else "",
        f"scripts: {_scripts(drawn)}",
    ]
    return Windows(calibration, kept, counted, "; ".join(filter(None, phrases)))


def filled_windows(
    made: Windows, tokenizer: Tokenizer, *, samples: int = SAMPLES, model: nn.Module | None = None
) -> Windows:
    """``made`` with drawn windows to measure with beside its own: a quarter of ``samples``, and as many as are missing.

    Drawn tokens stand in places and beside tokens that few texts show. The share was chosen on sentences of CoLA (dev)
    and paragraphs of WikiText-2 (valid). Where texts make too few windows, the missing ones are sentences of the
    package, up to a half of ``samples``, and drawn tokens.

    Args:
        made: of texts. tokenizer, model: as ``drawn_windows``. samples: how many windows to measure with.

    Raises:
        KflatsError: as ``drawn_windows``.
    """
    count = min(len(made.calibration), samples - samples // 4)
    if count == samples:
        return made
    own = tuple(made.calibration[i * len(made.calibration) // count] for i in range(count))
    sentences_wanted = max(0, samples // 2 - count)
    drawn = drawn_windows(tokenizer, samples=samples - count, own=sentences_wanted, model=model)
    summary = f"{made.summary}; {count:,} of the windows to measure with, and {drawn.summary}"
    return replace(made, calibration=own + drawn.calibration, summary=summary, drawn=drawn.drawn)


def drawn_windows(
    tokenizer: Tokenizer,
    *,
    samples: int = SAMPLES,
    own: int | None = None,
    seed: int = 0,
    model: nn.Module | None = None,
) -> Windows:
    """Windows to measure with where there are no texts; none are held out or counted.

    Some are sentences of the package, alone and several in an order drawn by ``seed``; they are left out if the
    tokenizer does not know a tenth of their tokens. The others are tokens drawn one by one by the Zipf prior of the
    vocabulary.

    Limit: the sentences are English, and drawn tokens are in no order of a language.

    Args:
        tokenizer: the model's own.
        own: how many windows are sentences of the package; None: half.
        samples, seed, model: as ``windows``.

    Raises:
        KflatsError: no samples; a vocabulary without words.
    """
    check_samples(samples)
    prior = zipf_prior(tokenizer, len(tokenizer))
    prior[list(tokenizer.all_special_ids)] = 0.0
    draws = torch.Generator().manual_seed(seed)
    (special,) = _tokens([""], tokenizer)
    room = max(1, token_limit(tokenizer, LONG[1], model) - special)
    package = packaged_texts("count")
    ids = [i for row in tokenizer(list(package), verbose=False)["input_ids"] for i in row]
    known = ids.count(tokenizer.unk_token_id) <= _UNKNOWN * len(ids)
    per_token = sum(map(len, package)) / max(1, len(ids) - special * len(package))
    count = (samples // 2 if own is None else own) if known else 0
    made: list[str] = []
    while len(made) < count:
        pieces = [(package[i] + " ", 0) for i in torch.randperm(len(package), generator=draws).tolist()]
        made += _cut(pieces, per_token, 0.95 * room, seed, joined=True)
    del made[count:]
    while len(made) < samples:
        kind, length = torch.rand(2, generator=draws).tolist()
        low, high = SHORT if kind < SHORT_SHARE else LONG
        size = max(1, min(room, int(low * (high / low) ** length)))
        tokens = torch.multinomial(prior, size, replacement=True, generator=draws)
        made.append(str(tokenizer.decode(tokens.tolist())))
    phrases = [
        f"{count:,} windows of sentences of kflats" if count else "",
        f"{samples - count:,} windows of tokens drawn by the Zipf prior of the vocabulary",
    ]
    return Windows(tuple(made), (), (), " and ".join(filter(None, phrases)), samples)


def _distinct(records: Sequence[str]) -> tuple[list[tuple[str, int]], int]:
    """The sentences of all records, each with its record's index, without those that came before; how many did."""
    first: dict[str, tuple[str, int]] = {}
    total = 0
    for index, record in enumerate(records):
        for sentence in sentences(record.strip() + " "):
            for piece in filter(str.strip, _PARTS.findall(sentence)):
                first.setdefault(_key(piece), (piece, index))
                total += 1
    return list(first.values()), total - len(first)


def _cut(pieces: Sequence[tuple[str, int]], per_token: float, most: float, seed: int, *, joined: bool) -> Iterator[str]:
    """The sentences in windows, each sentence in one; only sentences of more than ``most`` tokens are cut.

    Tokens are estimated as ``per_token`` characters each. Not ``joined``: a window ends where its record ends.
    """
    left = list(reversed(pieces))
    while left:
        first, record = left[-1]
        short = _draw(seed, "kind", first) < SHORT_SHARE
        low, high = SHORT if short else LONG
        room = low * (high / low) ** _draw(seed, "length", first)
        enough = low if short else room
        room, taken, total = min(room, most), [], 0.0
        while left and (joined or left[-1][1] == record) and total < min(enough, room):
            piece, owner = left[-1]
            size = len(piece) / per_token
            if total < SHORT[0] and total + size <= most:
                room = max(room, total + size)  # no sentence is cut that the model can read
            elif total >= SHORT[0] and total + size > room:
                break
            left.pop()
            if total + size > room:
                end = _word_end(piece, max(1, int((room - total) * per_token)))
                if piece[end:].strip():
                    left.append((piece[end:], owner))
                piece, size = piece[:end], room
            taken.append(piece)
            total += size
        yield "".join(taken).strip()


def _word_end(text: str, at: int) -> int:
    """The end of the last word of ``text`` within ``at`` characters; ``at`` where words are not separated."""
    end = text.rfind(" ", 0, at + 1) + 1
    return end if 2 * end > at else at


def _tokens(texts: list[str], tokenizer: Tokenizer) -> list[int]:
    return [len(row) for row in tokenizer(texts, verbose=False)["input_ids"]]


def _key(text: str) -> str:
    return " ".join(text.casefold().split())


def _draw(seed: int, use: str, text: str) -> float:
    """A number from 0 to 1 that depends on the three alone."""
    data = f"{seed} {use} {_key(text[:1000])}".encode(errors="replace")
    return float(int.from_bytes(blake2b(data, digest_size=7).digest(), "big") / 2**56)


def _scripts(texts: Sequence[str]) -> str:
    """The commonest scripts of the letters and their shares, by the names of Unicode."""
    letters = Counter(letter for text in texts for letter in text if letter.isalpha())
    counts = Counter[str]()
    for letter, count in letters.items():
        counts[unicodedata.name(letter, "unknown").split()[0].partition("-")[0]] += count
    shares = [(name, count / counts.total()) for name, count in counts.most_common(4)]
    return ", ".join(f"{name.title()} {part:.0%}" for name, part in shares if part >= 0.01) or "none"
