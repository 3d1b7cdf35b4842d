"""Texts -> calibration batches: dicts of tensors, as for ``model(**batch)``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.common.texts import check_known, check_texts
from kflats.evaluation.encoding import pad

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCK = 64
"""Samples whose statistics are summed together: fixed, so that sums do not depend on how work is shared out."""


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

    Texts are sorted by length inside blocks of 64 (``BLOCK``; of ``batch`` if that is more), so that the batches of a
    block, padding included, do not depend on other texts. Texts without a token are left out before.

    Args:
        texts: sentences; a generator is read only as far as ``limit``.
        tokenizer: the model's own.
        batch: texts at once.
        max_length: tokens of one text; longer ones are cut (at the tokenizer's own limit if that is less).
        limit: use the first so many texts. A few hundred samples make a good Fisher.
        language_model: add "labels": the tokens themselves, -100 where there is padding.

    Returns:
        dicts of "input_ids" and "attention_mask" (B, T) int64, and "labels" if asked for.

    Raises:
        KflatsError: no texts, no tokenizer, something that is no text, or no word that the tokenizer knows.
    """
    check_texts(texts)
    if tokenizer is None:
        raise KflatsError("a tokenizer is needed", cause="the model's folder has none", hint="give tokenizer=")
    if batch < 1 or max_length < 1 or (limit is not None and limit < 1):
        raise KflatsError("batch, max_length and limit must be at least 1")
    taken = list(islice(texts, limit))
    if not taken:
        raise KflatsError("the calibration set is empty", cause="an empty file or list", hint="a few hundred texts")
    for text in taken:
        if not isinstance(text, str):
            raise KflatsError(f"expected texts, found {type(text).__name__}", hint="a list of strings")
    own = getattr(tokenizer, "model_max_length", None)
    length = min(max_length, own) if isinstance(own, int) else max_length
    rows = tokenizer(taken, truncation=True, max_length=length, return_attention_mask=False)["input_ids"]
    rows = [list(row) for row in rows if len(row)]
    if not rows:
        raise KflatsError("the texts hold no token", cause="blank texts", hint="other texts")
    check_known(torch.tensor([i for row in rows for i in row]).bincount(), tokenizer)
    size = max(BLOCK, batch)
    blocks = [sorted(rows[i : i + size], key=len) for i in range(0, len(rows), size)]
    parts = [block[i : i + batch] for block in blocks for i in range(0, len(block), batch)]
    made = [pad(part, tokenizer, torch.device("cpu")) for part in parts]
    if language_model:
        for one in made:
            one["labels"] = one["input_ids"].masked_fill(one["attention_mask"] == 0, -100)
    return made
