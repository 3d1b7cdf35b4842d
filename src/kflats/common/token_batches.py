"""Texts -> token ids -> padded batches: for calibration, training and evaluation alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from kflats.common.errors import KflatsError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label of a position without a target; losses of torch and transformers leave it out."""


def token_limit(tokenizer: PreTrainedTokenizerBase | None, max_length: int, model: nn.Module | None = None) -> int:
    """``max_length``, or less where the limit of the tokenizer or of the model's table of positions is smaller."""
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    # Two positions less than the table has: RoBERTa's and MPNet's positions begin after the padding id.
    limits = [max_length, getattr(tokenizer, "model_max_length", None), positions - 2 if positions else None]
    return max(1, min(n for n in limits if isinstance(n, int) and n > 0))


def tokenize(
    tokenizer: PreTrainedTokenizerBase | None,
    *texts: Sequence[Any],
    max_length: int,
    model: nn.Module | None = None,
    **options: Any,
) -> Any:
    """Call the tokenizer with truncation at ``token_limit``, and check the ids against the model's vocabulary.

    Args:
        tokenizer: of transformers.
        texts: the first texts, and the second texts where an example is a pair.
        max_length: tokens of one example. model: whose positions and vocabulary limit the ids; None: neither does.
        options: of the tokenizer.

    Returns:
        The tokenizer's ``BatchEncoding``: lists by name, without attention masks.

    Raises:
        KflatsError: no tokenizer, or ids beyond the model's vocabulary.
    """
    limit = token_limit(tokenizer, max_length, model)
    encoded = required(tokenizer)(
        *map(list, texts), truncation=True, max_length=limit, return_attention_mask=False, **options
    )
    check_ids(encoded["input_ids"], model)
    return encoded


def tokenize_texts(
    tokenizer: PreTrainedTokenizerBase | None, texts: Sequence[str], max_length: int, model: nn.Module | None = None
) -> list[list[int]]:
    """Token ids of each text, special tokens included; one padding id for a text without a token."""
    rows = tokenize(tokenizer, texts, max_length=max_length, model=model)["input_ids"]
    return [list(row) or [pad_id(tokenizer)] for row in rows]


def required(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """The tokenizer; raises KflatsError where there is none."""
    if tokenizer is None:
        raise KflatsError(
            "a tokenizer is needed",
            cause="the model's folder has none",
            hint="tokenizer=...",
            command="save one in the model's folder",
        )
    return tokenizer


def check_ids(rows: Sequence[Sequence[int]], model: nn.Module | None) -> None:
    """Raises KflatsError for ids beyond the vocabulary of ``model``."""
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    largest = max((max(row) for row in rows if len(row)), default=0)
    if isinstance(vocabulary, int) and largest >= vocabulary:
        raise KflatsError(
            f"the tokenizer gives id {largest}, but the model's vocabulary has {vocabulary} entries",
            cause="a tokenizer of another model",
            hint="the tokenizer of the model's own folder",
        )


def pad_id(tokenizer: PreTrainedTokenizerBase | None, model: nn.Module | None = None) -> int:
    """The id to pad with: that of the model's config, else the tokenizer's padding or another special token, else 0."""
    ids = [getattr(getattr(model, "config", None), "pad_token_id", None)]
    ids += [getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "eos", "bos", "unk")]
    return next((i for i in ids if isinstance(i, int) and i >= 0), 0)


def pad(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """(rows, longest) int64, padded at the right.

    >>> pad([[5, 6], [7]], 0).tolist()
    [[5, 6], [7, 0]]
    """
    return pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True, padding_value=filler)


def padded_batch(
    rows: Sequence[Mapping[str, Sequence[int]]], filler: int, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """One batch: token ids padded with ``filler``, other columns (token types) with 0, and the attention mask.

    >>> padded_batch([{"input_ids": [5, 6]}, {"input_ids": [7]}], 9)["attention_mask"].tolist()
    [[1, 1], [1, 0]]
    """
    batch = {name: pad([row[name] for row in rows], filler if name == "input_ids" else 0) for name in rows[0]}
    batch["attention_mask"] = pad([[1] * len(row["input_ids"]) for row in rows], 0)
    return {name: tensor.to(device) for name, tensor in batch.items()}


def batches_by_length(lengths: Sequence[int], batch: int) -> Iterator[list[int]]:
    """Places of the examples of each batch, the longest examples first: memory is largest at once, not at the end.

    >>> list(batches_by_length([1, 3, 2], 2))
    [[1, 2], [0]]
    """
    if batch < 1:
        raise KflatsError(f"a batch size of {batch} is not supported", hint="batch >= 1")
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return (order[start : start + batch] for start in range(0, len(order), batch))
