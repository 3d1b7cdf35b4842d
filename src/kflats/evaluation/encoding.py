"""Sentences -> vectors, for any text model of transformers: what a compressed model is judged by.

Only this module knows how encoders, decoders and encoder-decoders differ; ``evaluate`` compares vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BatchValue: TypeAlias = Tensor | bool | int | float | str | None
Batch: TypeAlias = Mapping[str, BatchValue]
"""What a model is called with, ``model(**batch)``: tensors of its samples, and settings that hold for all of them."""

_MAX_TOKENS = 256  # of one text: long enough for sentences and paragraphs
_MARKS = ("Ġ", "▁")  # how byte-level BPE and SentencePiece write the blank before a word


def encode(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    batch: int = 32,
    *,
    max_tokens: int = _MAX_TOKENS,
) -> Tensor:
    """One unit vector a text: the mean of the last hidden states over the text's own tokens.

    Encoders and decoders alike; of an encoder-decoder the encoder. A task head is left out. Texts run
    in batches of similar length, padded at the right, in eval mode and without gradients; the
    model's mode is put back, module by module. The tokenizer needs no padding token.

    Args:
        model: a transformers model.
        tokenizer: its tokenizer.
        texts: at least one.
        batch: texts at once.
        max_tokens: longer texts are cut (at the model's own limit if that is less).

    Returns:
        (texts, hidden) float32 on the CPU, in the order of ``texts``.

    Raises:
        KflatsError: no texts, empty batches, no tokenizer, a tokenizer of another model, or outputs that are not
            finite.
    """
    if not texts:
        raise KflatsError("there are no texts to encode", hint="give at least one sentence")
    if batch < 1:
        raise KflatsError(f"batches of {batch} texts encode nothing", hint="at least 1")
    rows = tokenize(model, tokenizer, texts, max_tokens)
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))  # longest first: memory peaks at once, not at the end
    out: Tensor | None = None
    with evaluating(model), torch.inference_mode():
        for start in range(0, len(order), batch):
            picked = order[start : start + batch]
            inputs = pad([rows[i] for i in picked], tokenizer, _device(model))
            hidden = last_hidden_state(model, inputs).float()
            mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(1) / mask.sum(1)
            out = torch.empty(len(rows), mean.shape[1]) if out is None else out
            out[picked] = F.normalize(mean, dim=1).cpu()
    assert out is not None
    if not torch.isfinite(out).all():
        raise KflatsError(
            "the model's outputs are not finite", cause="overflow in float16, or damaged weights", hint="use float32"
        )
    return out.clone()  # an ordinary tensor, not one of inference mode


def tokenize(
    model: nn.Module | None, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_tokens: int = _MAX_TOKENS
) -> list[list[int]]:
    """Token ids of each text, special tokens included, never empty, checked against the model's table."""
    if tokenizer is None:
        raise KflatsError("a tokenizer is needed", cause="the model's folder has none", hint="give tokenizer=")
    config = getattr(model, "config", None)
    # Two positions less than the table has: RoBERTa's and MPNet's positions begin after the padding id.
    positions = getattr(config, "max_position_embeddings", None)
    limits = [max_tokens, getattr(tokenizer, "model_max_length", None), positions - 2 if positions else None]
    limit = max(1, min(n for n in limits if isinstance(n, int) and n > 0))
    rows = tokenizer(list(texts), truncation=True, max_length=limit, return_attention_mask=False)["input_ids"]
    filler = pad_id(tokenizer)
    rows = [list(row) or [filler] for row in rows]
    table = getattr(config, "vocab_size", None)
    largest = max(max(row) for row in rows)
    if isinstance(table, int) and largest >= table:
        raise KflatsError(
            f"the tokenizer gives id {largest}, but the model's vocabulary has {table} entries",
            cause="a tokenizer of another model",
        )
    return rows


def pad(rows: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase, device: torch.device) -> dict[str, Tensor]:
    """Ids and attention mask of one batch, padded at the right."""
    ids = torch.full((len(rows), max(map(len, rows))), pad_id(tokenizer), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row)
        mask[place, : len(row)] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def last_hidden_state(model: nn.Module, inputs: Batch) -> Tensor:
    """(texts, tokens, hidden) of a transformers model without its task head."""
    bare: Any = model
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        bare = bare.get_encoder()
    else:
        bare = getattr(bare, "base_model", bare)
    hidden = getattr(bare(**inputs), "last_hidden_state", None)
    if not isinstance(hidden, Tensor):
        raise KflatsError(
            f"{type(model).__name__} gives no last hidden state", hint="give a text model of transformers"
        )
    return hidden


def rare_words(tokenizer: PreTrainedTokenizerBase, seen: Sequence[str] = (), count: int = 500) -> tuple[str, ...]:
    """Whole words from the tail of the vocabulary, one token each, that the texts ``seen`` never show.

    Vocabularies are ordered by frequency, or nearly so, hence the tail is the last quarter. From it
    ``count`` words are taken at even steps: no chance, the same words every time. Letters only, three
    at least; a vocabulary of characters has none.
    """
    shown = {i for row in tokenizer(list(seen), truncation=False)["input_ids"] for i in row} if seen else set()
    special = set(tokenizer.all_special_ids)
    size = len(tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
    marked = sum(str(t).startswith(_MARKS) for t in tokens) * 10 > size
    found = []
    for token_id in range(size - size // 4, size):
        token = str(tokens[token_id])
        word = token[1:] if token.startswith(_MARKS) else token
        whole = token.startswith(_MARKS) if marked else True
        if whole and len(word) >= 3 and word.isalpha() and token_id not in special | shown:
            found.append((token_id, f" {word}" if token.startswith(_MARKS[0]) else word))
    # Some entries are never produced (a word that is always split): ask the tokenizer itself.
    kept = [w for (i, w), row in zip(found, _ids(tokenizer, [w for _, w in found]), strict=True) if i in row]
    step = max(1, len(kept) // count)
    return tuple(kept[::step][:count])


def _ids(tokenizer: PreTrainedTokenizerBase, words: list[str]) -> list[list[int]]:
    return list(tokenizer(words)["input_ids"]) if words else []


def pad_id(tokenizer: PreTrainedTokenizerBase | None) -> int:
    """The id to fill rows with: the tokenizer's padding token, or another special one, or 0."""
    for name in ("pad_token_id", "eos_token_id", "bos_token_id", "unk_token_id"):
        if isinstance(found := getattr(tokenizer, name, None), int):
            return found
    return 0


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every module's own mode again (some may have been frozen)."""
    before = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training
