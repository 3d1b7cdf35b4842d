"""Texts: to token ids and padded batches."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from kflats.common.errors import KflatsError, KflatsWarning

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

Tokenizer: TypeAlias = "PreTrainedTokenizerBase"
"""A tokenizer of transformers."""
SAMPLES = 512
"""Texts that are measured with where no number is given: a few hundred do; some thousands gain a little more."""
IGNORED = -100
"""The label of a position without a target; losses of torch and transformers leave it out."""


def packaged_texts(name: str) -> tuple[str, ...]:
    """Sentences of the package: ``"count"`` (encyclopedic, to count tokens) or ``"judge"`` (everyday, to compare on).

    >>> len(set(packaged_texts("judge")) & set(packaged_texts("count")))
    0
    """
    if name not in ("count", "judge"):
        raise KflatsError(f"kflats has no texts called {name!r}", hint="count or judge")
    return tuple((files("kflats") / "data" / f"{name}.txt").read_text(encoding="utf-8").splitlines())


def check_texts(texts: object) -> None:
    """Raise KflatsError unless ``texts`` is a collection: for one string, a path, or a value without items."""
    if isinstance(texts, str | bytes | os.PathLike) or not isinstance(texts, Iterable):
        one = "one string" if isinstance(texts, str | bytes) else f"{texts!r:.80}"
        hint = "a list of texts, such as read_texts gives of a file"
        raise KflatsError(f"texts must be a sequence of strings, not {one}", hint=hint)


def batched_texts(texts: Iterable[str], count: int = 512) -> Iterator[list[str]]:
    """``texts`` in lists of ``count``; a generator is read no further than needed.

    Raises:
        KflatsError: ``texts`` is no collection, or holds a value that is not a string.

    >>> list(batched_texts(iter("abc"), 2))
    [['a', 'b'], ['c']]
    """
    check_texts(texts)
    stream = iter(texts)
    while batch := list(islice(stream, count)):
        if wrong := [text for text in batch if not isinstance(text, str)]:
            raise KflatsError(f"a text must be a string, not {type(wrong[0]).__name__}", hint="a list of strings")
        yield batch


def check_known(counts: Tensor, tokenizer: Tokenizer) -> None:
    """Check that a tokenizer knows the texts: ``counts`` (ids,) says how often each id occurred.

    Warns if more than half of the tokens are the unknown token.

    Raises:
        KflatsError: all of them are the unknown token.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    # Byte-level tokenizers know every text, and name their end token as the unknown token.
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id")
    others = {getattr(tokenizer, name, None) for name in names}
    if not isinstance(unknown, int) or unknown >= len(counts) or unknown in others:
        return
    special = [i for i in {unknown, *getattr(tokenizer, "all_special_ids", ())} if 0 <= i < len(counts)]
    lost, known = int(counts[unknown]), int(counts.sum() - counts[special].sum())
    if lost and not known:
        raise KflatsError(
            "the tokenizer knows no word of the texts", hint="texts in the language of the model's training"
        )
    if lost > known:
        warnings.warn(
            KflatsWarning(
                f"{lost:,} of {lost + known:,} words of the texts are unknown to the tokenizer: another language, "
                "or the tokenizer of another model?"
            ),
            stacklevel=3,
        )


def token_limit(tokenizer: Tokenizer | None, max_length: int, model: nn.Module | None = None) -> int:
    """``max_length``, or less where the limit of the tokenizer or of the model's table of positions is smaller."""
    config = getattr(model, "config", None)
    if callable(part := getattr(config, "get_text_config", None)):  # of a model that reads images too
        config = part()
    positions = getattr(config, "max_position_embeddings", None)
    # Two positions less than the table has: RoBERTa's and MPNet's positions begin after the padding id.
    limits = [max_length, getattr(tokenizer, "model_max_length", None), positions - 2 if positions else None]
    return max(1, min(n for n in limits if isinstance(n, int) and n > 0))


def tokenize(
    tokenizer: Tokenizer | None,
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
    tokenizer: Tokenizer | None, texts: Sequence[str], max_length: int, model: nn.Module | None = None
) -> list[list[int]]:
    """Token ids of each text, special tokens included; one padding id for a text without a token."""
    rows = tokenize(tokenizer, texts, max_length=max_length, model=model)["input_ids"]
    return [list(row) or [pad_id(tokenizer)] for row in rows]


def required(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer; raises KflatsError where there is none."""
    if tokenizer is None:
        raise KflatsError("a tokenizer is needed", hint="tokenizer=...")
    return tokenizer


def check_ids(rows: Sequence[Sequence[int]], model: nn.Module | None, origin: str = "the tokenizer") -> None:
    """Raises KflatsError for ids beyond the vocabulary of ``model``; ``origin``: what the ids come from."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config  # of a model of several parts
    vocabulary = getattr(text, "vocab_size", None)
    if not isinstance(vocabulary, int):
        return
    if wrong := [i for row in rows if len(row) for i in (min(row), max(row)) if not 0 <= i < vocabulary]:
        raise KflatsError(
            f"{origin} gives id {wrong[0]}, but the model's vocabulary has {vocabulary} entries",
            hint="the tokenizer of the model's own folder",
        )


def pad_id(tokenizer: Tokenizer | None, model: nn.Module | None = None) -> int:
    """The id to pad with: that of the model's config, else the tokenizer's padding or another special token, else 0."""
    ids = [getattr(getattr(model, "config", None), "pad_token_id", None)]
    ids += [getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "eos", "bos", "unk")]
    return next((i for i in ids if isinstance(i, int) and i >= 0), 0)


def pad(rows: Sequence[Sequence[int] | Tensor], padding_id: int) -> Tensor:
    """(rows, longest) int64, padded at the right.

    >>> pad([[5, 6], [7]], 0).tolist()
    [[5, 6], [7, 0]]
    """
    import torch  # texts are read without it
    from torch.nn.utils.rnn import pad_sequence

    return pad_sequence(
        [torch.as_tensor(row, dtype=torch.long) for row in rows], batch_first=True, padding_value=padding_id
    )


def padded_batch(
    rows: Sequence[Mapping[str, Sequence[int] | Tensor]], padding_id: int, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """One batch: token ids padded with ``padding_id``, other columns (token types) with 0, and the attention mask.

    >>> padded_batch([{"input_ids": [5, 6]}, {"input_ids": [7]}], 9)["attention_mask"].tolist()
    [[1, 1], [1, 0]]
    """
    batch = {name: pad([row[name] for row in rows], padding_id if name == "input_ids" else 0) for name in rows[0]}
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
