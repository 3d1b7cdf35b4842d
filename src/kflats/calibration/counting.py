"""Texts as counts and as batches: how often a token is read, the Zipf prior of a vocabulary, batches to measure."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.common.texts import Tokenizer, batched_texts, check_known, pad_id, padded_batch, tokenize

_MARKS = ("##", "\u2581", "\u0120", "</w>", "@@")


def count_tokens(texts: Iterable[str], tokenizer: Tokenizer, rows: int) -> Tensor:
    """How often each of ``rows`` rows is read when ``texts`` pass through the model's tokenizer, (rows,) int64.

    Special tokens that the tokenizer adds are counted, since the model reads them. Streamed: texts may be
    a generator. Warns if the tokenizer knows less than half of the words.

    Raises:
        KflatsError: no texts, something that is no text, texts without any known word, or token ids beyond the table.
    """
    counts = torch.zeros(rows, dtype=torch.int64)
    seen = 0
    for batch in batched_texts(texts):
        seen += len(batch)
        # verbose=False: a text longer than the model's window is no error here, it is only counted.
        ids = torch.tensor([i for row in tokenizer(batch, verbose=False)["input_ids"] for i in row], dtype=torch.int64)
        if len(ids) and int(ids.max()) >= rows:
            raise KflatsError(
                f"the tokenizer gave id {int(ids.max())}, but the table has {rows} rows",
                hint="the tokenizer of the model's own folder",
            )
        counts += torch.bincount(ids, minlength=rows)
    if not seen:
        raise KflatsError("there are no texts to count", cause="an empty file or list")
    check_known(counts, tokenizer)
    return counts


def zipf_prior(tokenizer: Tokenizer, rows: int) -> Tensor:
    """Expected share of each row in natural text, guessed from the vocabulary alone: (rows,), sums to 1.

    Vocabularies list tokens by frequency, but not from id 0: BERT's begins with 994 unused entries and
    single characters, and "the" has id 1996. So rank counts only *words and pieces* of two characters or
    more, in id order, up to where the frequency order ends (a vocabulary's tail of bytes and characters has none), and
    p ~ 1 / (rank + 2.7). Outside the run: single ASCII characters (punctuation, "a", "i", digits) are
    common and get the share of rank 32; tokens that the tokenizer adds to every text that of rank 1, its
    other special tokens ([MASK], [UNK], which texts never show and tasks live on) that of rank 32;
    everything else (unused, other scripts' characters) nothing here, and an importance's floor later.

    Raises:
        KflatsError: a vocabulary without words, or of another model: over a hundredth of it beyond the table.

    >>> class Tokenizer:
    ...     all_special_ids = [0]
    ...     def get_vocab(self): return {"[CLS]": 0, "[unused1]": 1, "a": 2, "the": 3, "of": 4}
    ...     def __call__(self, texts, verbose): return {"input_ids": [[0, 2]]}
    >>> zipf_prior(Tokenizer(), 5).argsort(descending=True).tolist()[:2]
    [0, 3]
    """
    names: list[str | None] = [None] * rows
    vocabulary = tokenizer.get_vocab()
    for token, row in vocabulary.items():
        if 0 <= row < rows:
            names[row] = token
    # A few added tokens beyond the table are seen in the wild; a table of positions or types is another thing.
    if sum(row >= rows for row in vocabulary.values()) > 0.01 * len(vocabulary):
        raise KflatsError(
            f"a table of {rows} rows is not what {len(vocabulary)} tokens enter",
            cause="an embedding of positions or types, or a tokenizer of another model",
            hint="Uniform() for this weight",
        )
    special = {int(i) for i in tokenizer.all_special_ids}
    always = special & set(tokenizer(["a"], verbose=False)["input_ids"][0])
    prior = [0.0] * rows
    rank = 0
    for row, name in enumerate(names):
        if row in always:
            prior[row] = _share(1)
        elif row in special:
            # Attention masks padding out, so its row says nothing.
            prior[row] = 0.0 if row == getattr(tokenizer, "pad_token_id", None) else _share(32)
        elif name is None or (name.startswith(("[", "<")) and name.endswith(("]", ">"))):
            continue
        else:
            bare = name
            for mark in _MARKS:
                bare = bare.removeprefix(mark).removesuffix(mark)
            if len(bare) >= 2:
                rank += 1
                prior[row] = _share(rank)
            elif len(bare) == 1 and bare.isascii() and not name.startswith("##"):
                prior[row] = _share(32)
    if not any(share > 0 for row, share in enumerate(prior) if row not in special):
        raise KflatsError("the tokenizer's vocabulary has no words", hint="Uniform()")
    shares = torch.tensor(prior, dtype=torch.float64)
    return shares / shares.sum()


def _share(rank: int) -> float:
    return 1.0 / (rank + 2.7)


BLOCK = 64
"""Number of samples whose statistics are summed together. It is fixed, so sums do not depend on who sums a block."""
_CALL = 128
"""In tokens, what a batch of its own has to save: a call takes some time whatever it reads."""


def text_batches(
    texts: Iterable[str], tokenizer: Tokenizer, *, batch: int = 16, max_length: int = 128
) -> list[dict[str, Tensor]]:
    """Batches of texts of similar length, padded at the right.

    Texts are sorted by length inside blocks of 64 (``BLOCK``; of ``batch`` if that is more), and a block is cut where
    the batches have the fewest tokens, padding included. So the batches of a block do not depend on the texts of other
    blocks. Texts without a token are left out first.

    Args:
        texts: sentences. A few hundred estimate the Fisher information well.
        tokenizer: the model's own.
        batch: texts at once, at most.
        max_length: tokens of one text; longer ones are cut (at the tokenizer's own limit if that is less).

    Returns:
        dicts of "input_ids" and "attention_mask" (B, T) int64.

    Raises:
        KflatsError: no texts, no tokenizer, an entry that is not a text, or no word that the tokenizer knows.
    """
    if batch < 1 or max_length < 1:
        raise KflatsError(f"batch={batch}, max_length={max_length} is not supported", hint="1 or more")
    taken = next(batched_texts(texts, sys.maxsize), [])
    if not taken:
        raise KflatsError("the calibration set is empty", cause="an empty file or list", hint="a few hundred texts")
    rows = [list(row) for row in tokenize(tokenizer, taken, max_length=max_length)["input_ids"] if len(row)]
    if not rows:
        raise KflatsError("the texts hold no token", cause="blank texts", hint="other texts")
    check_known(torch.tensor([i for row in rows for i in row]).bincount(), tokenizer)
    size = max(BLOCK, batch)
    blocks = [sorted(rows[i : i + size], key=len) for i in range(0, len(rows), size)]
    parts = [part for block in blocks for part in _parts(block, batch)]
    padding_id = pad_id(tokenizer)
    return [padded_batch([{"input_ids": row} for row in part], padding_id) for part in parts]


def _parts(rows: Sequence[list[int]], most: int) -> Iterator[Sequence[list[int]]]:
    """``rows``, ascending in length, in parts of at most ``most`` rows. The sum of their tokens with padding, and of
    ``_CALL`` for each part, is the least; of several such ways the first parts are the longest."""
    costs, sizes = [0] * (len(rows) + 1), [0] * len(rows)
    for i in reversed(range(len(rows))):
        ends = range(min(i + most, len(rows)), i, -1)
        costs[i], end = min(((e - i) * len(rows[e - 1]) + _CALL + costs[e], -e) for e in ends)
        sizes[i] = -end - i
    start = 0
    while start < len(rows):
        yield rows[start : start + sizes[start]]
        start += sizes[start]
