"""Sentences -> vectors, for any text model of transformers.

Only this module distinguishes encoders, decoders and encoder-decoders; ``comparing`` compares the vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.common.texts import batches_by_length, pad_id, padded_batch, tokenize_texts
from kflats.matrices.layers import FactoredEmbedding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BatchValue: TypeAlias = Tensor | bool | int | float | str | None
Batch: TypeAlias = Mapping[str, BatchValue]
"""The keyword arguments of ``model(**batch)``: tensors of its samples, and settings that hold for all samples."""

MAX_TOKENS = 256
"""Tokens of one text: enough for sentences and paragraphs."""
_MARKS = ("Ġ", "▁")  # how byte-level BPE and SentencePiece write the blank before a word


def encode(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    batch: int = 32,
    *,
    max_tokens: int = MAX_TOKENS,
) -> Tensor:
    """One unit vector a text: the mean of the last hidden states over the text's own tokens.

    An encoder-decoder runs its encoder alone. A task head is left out. Texts run in batches of similar length, padded
    at the right, in eval mode and without gradients. Afterwards each module has its own mode again. The tokenizer needs
    no padding token.

    Args:
        model: a transformers model.
        tokenizer: its tokenizer.
        texts: at least one.
        batch: texts at once.
        max_tokens: longer texts are cut (at the model's own limit if that is less).

    Returns:
        (texts, hidden) float32 on the CPU, in the order of ``texts``.

    Raises:
        KflatsError: no texts, a batch size below 1, no tokenizer, a tokenizer of another model, or outputs that are
            not finite.
    """
    if not texts:
        raise KflatsError("there are no texts to encode", hint="give at least one sentence")
    rows = tokenize_texts(tokenizer, texts, max_tokens, model)
    filler, device = pad_id(tokenizer, model), device_of(model)
    out: Tensor | None = None
    with evaluating(model), torch.inference_mode():
        for picked in batches_by_length([len(row) for row in rows], batch):
            inputs = padded_batch([{"input_ids": rows[i]} for i in picked], filler, device)
            hidden = last_hidden_state(model, inputs).float()
            mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(1) / mask.sum(1)
            out = torch.empty(len(rows), mean.shape[1]) if out is None else out
            out[picked] = F.normalize(mean, dim=1).cpu()
    assert out is not None
    check_finite(out)
    return out.clone()  # an ordinary tensor, not one of inference mode


def check_finite(outputs: Tensor) -> None:
    """Raises KflatsError for outputs that hold NaN or infinity."""
    if not torch.isfinite(outputs).all():
        raise KflatsError(
            "the model's outputs are not finite",
            cause="overflow in float16, or damaged weights",
            hint="the model in float32, or another copy of its weights",
        )


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
            f"{type(model).__name__} gives no last hidden state",
            cause="kflats encodes texts with text models of transformers",
            hint="a text model of transformers",
        )
    return hidden


def rare_words(tokenizer: PreTrainedTokenizerBase, seen: Sequence[str] = (), count: int = 500) -> tuple[str, ...]:
    """Whole words from the tail of the vocabulary, one token each, that do not occur in the texts ``seen``.

    Vocabularies are ordered by frequency, or nearly so; the tail is the last quarter. ``count`` words are taken from
    it at even steps, so that every call gives the same words. A word has three letters or more, and letters only; a
    vocabulary of characters has no such word.
    """
    shown = {i for row in tokenizer(list(seen), truncation=False)["input_ids"] for i in row} if seen else set()
    special = set(tokenizer.all_special_ids)
    size = len(tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
    marked = sum(str(t).startswith(_MARKS) for t in tokens) * 10 > size
    words = []
    for token_id in range(size - size // 4, size):
        token = str(tokens[token_id])
        word = token[1:] if token.startswith(_MARKS) else token
        whole = token.startswith(_MARKS) if marked else True
        if whole and len(word) >= 3 and word.isalpha() and token_id not in special | shown:
            words.append((token_id, f" {word}" if token.startswith(_MARKS[0]) else word))
    # The tokenizer never gives some entries (a word that it always splits).
    ids = tokenizer([word for _, word in words])["input_ids"] if words else []
    kept = [word for (token_id, word), row in zip(words, ids, strict=True) if token_id in row]
    step = max(1, len(kept) // count)
    return tuple(kept[::step][:count])


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter; the CPU where it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards each module has its own mode again (some may have been in eval mode before)."""
    before = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def widened(model: nn.Module, *dtypes: torch.dtype) -> Iterator[bool]:
    """Inside, parameters and buffers of the types ``dtypes`` are float32; afterwards they have their own types again.

    Yields:
        Whether a parameter was widened.
    """
    parameters = [(p, p.dtype) for p in model.parameters() if p.dtype in dtypes]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.dtype in dtypes
    ]
    tables = [m for m in model.modules() if isinstance(m, FactoredEmbedding) and m.out_dtype in dtypes]
    outs = [table.out_dtype for table in tables]
    try:
        for p, _ in parameters:
            p.data = p.data.float()
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.float()
        for table in tables:
            table.out_dtype = torch.float32
        yield bool(parameters)
    finally:
        for p, dtype in parameters:
            p.data = p.data.to(dtype)
        for module, name, buffer in buffers:
            module._buffers[name] = module.get_buffer(name).to(buffer.dtype)
        for table, out in zip(tables, outs, strict=True):
            table.out_dtype = out
