"""Texts -> calibration batches: dicts of tensors, as for ``model(**batch)``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.common.texts import IGNORED, batched_texts, check_known, pad_id, padded_batch, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCK = 64
"""Number of samples whose statistics are summed together. It is fixed, so sums do not depend on who sums a block."""


def text_batches(
    texts: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch: int = 16,
    max_length: int = 128,
    limit: int | None = None,
    language_model: bool = False,
) -> list[dict[str, Tensor]]:
    """Batches of texts of similar length, padded at the right.

    Texts are sorted by length inside blocks of 64 (``BLOCK``; of ``batch`` if that is more). So the batches of a block,
    padding included, do not depend on the texts of other blocks. Texts without a token are left out first.

    Args:
        texts: sentences; a generator is read only as far as ``limit``.
        tokenizer: the model's own.
        batch: texts at once.
        max_length: tokens of one text; longer ones are cut (at the tokenizer's own limit if that is less).
        limit: use the first ``limit`` texts. A few hundred samples estimate the Fisher information well.
        language_model: add "labels": the tokens themselves, and -100 at padding.

    Returns:
        dicts of "input_ids" and "attention_mask" (B, T) int64, and "labels" with ``language_model``.

    Raises:
        KflatsError: no texts, no tokenizer, an entry that is not a text, or no word that the tokenizer knows.
    """
    if batch < 1 or max_length < 1 or (limit is not None and limit < 1):
        raise KflatsError(
            f"batch={batch}, max_length={max_length}, limit={limit} is not supported",
            cause="with a value below 1 there is nothing to measure",
            hint="1 or more",
        )
    taken = next(batched_texts(texts, sys.maxsize if limit is None else limit), [])
    if not taken:
        raise KflatsError("the calibration set is empty", cause="an empty file or list", hint="a few hundred texts")
    rows = [list(row) for row in tokenize(tokenizer, taken, max_length=max_length)["input_ids"] if len(row)]
    if not rows:
        raise KflatsError("the texts hold no token", cause="blank texts", hint="other texts")
    check_known(torch.tensor([i for row in rows for i in row]).bincount(), tokenizer)
    size = max(BLOCK, batch)
    blocks = [sorted(rows[i : i + size], key=len) for i in range(0, len(rows), size)]
    parts = [block[i : i + batch] for block in blocks for i in range(0, len(block), batch)]
    filler = pad_id(tokenizer)
    batches = [padded_batch([{"input_ids": row} for row in part], filler) for part in parts]
    if language_model:
        for one in batches:
            one["labels"] = one["input_ids"].masked_fill(one["attention_mask"] == 0, IGNORED)
    return batches
