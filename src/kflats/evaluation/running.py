"""Running a model of any kind on one batch, and reading its output."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.evaluation.encoding import Batch, BatchValue, last_hidden_state
from kflats.model.weights import is_sentence_transformer


def batch_size(batch: Batch) -> int:
    """Samples of a batch: the length of its first tensor.

    >>> batch_size({"input_ids": torch.zeros(3, 7), "labels": torch.zeros(3)})
    3
    """
    for value in batch.values():
        if isinstance(value, Tensor) and value.ndim:
            return len(value)
    raise KflatsError(
        "a calibration batch holds no tensors",
        hint="a dict of tensors, as for model(**batch)",
        command="--texts FILE with one text a line",
    )


def take(batch: Batch, index: Tensor) -> dict[str, BatchValue]:
    """The samples ``index`` of a batch; values that hold for all samples stay."""
    size = batch_size(batch)
    return {
        key: value[index.to(value.device)] if isinstance(value, Tensor) and value.ndim and len(value) == size else value
        for key, value in batch.items()
    }


def to_device(batch: Batch, device: torch.device) -> dict[str, BatchValue]:
    """The batch on ``device``; float16 becomes float32, as in a model that is ``frozen``."""
    tensors = {key: value.to(device) for key, value in batch.items() if isinstance(value, Tensor)}
    return {**batch, **{key: t.float() if t.dtype == torch.float16 else t for key, t in tensors.items()}}


def run(model: nn.Module, batch: Batch) -> object:
    """``model(**batch)`` without computing the model's own loss: labels serve only to feed a decoder."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if is_sentence_transformer(model):
        return model(inputs)
    labels = batch.get("labels")
    if is_encoder_decoder(model) and "decoder_input_ids" not in inputs:
        if isinstance(labels, Tensor) and labels.ndim == 2:
            prepare: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
            if prepare is None:
                return model(**inputs, labels=labels)
            inputs["decoder_input_ids"] = prepare(labels=labels)
        elif "decoder_inputs_embeds" not in inputs:
            return _with_own_decoder_inputs(model, inputs)
    return model(**inputs)


def task_output(output: object) -> Tensor | None:
    """The logits in a model's output, or None; an output that is one tensor counts as logits."""
    if isinstance(output, Tensor):
        return output
    logits = _entry(output, "logits")
    return logits if isinstance(logits, Tensor) else None


def _entry(output: object, name: str) -> object:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def pooled(model: nn.Module, batch: Batch, output: object) -> Tensor:
    """(B, d) the model's own sentence embeddings, or the means of its last hidden states over the text's tokens.

    ``output`` is the model's output; None: the model runs here, without its task head.
    """
    hidden: object = None
    if is_sentence_transformer(model):
        output = run(model, batch) if output is None else output
        embedding = _entry(output, "sentence_embedding")
        if isinstance(embedding, Tensor):
            return embedding
        hidden = _entry(output, "token_embeddings")
    elif output is not None:
        hidden = _entry(output, "last_hidden_state")
    else:
        kept = {k: v for k, v in batch.items() if k != "labels" and not k.startswith("decoder_")}
        hidden = last_hidden_state(model, kept)
    if not isinstance(hidden, Tensor):
        raise KflatsError(
            f"{type(model).__name__} gives no logits and no last hidden state",
            hint="an objective of your own: any object with losses(model, batch, first) -> (B,)",
            command="--importance uniform, zipf or counts, which need no measurements",
        )
    mask = text_mask(batch, hidden)
    mask = mask if mask.shape == hidden.shape[:2] else decoder_mask(model, batch, hidden)
    return (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)


def text_mask(batch: Batch, like: Tensor) -> Tensor:
    """(B, T) ones where the input has a token; all ones without an attention mask."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask.to(like)
    return like.new_ones(like.shape[:2] if like.ndim == 3 else (len(like), 1))


def decoder_mask(model: nn.Module, batch: Batch, like: Tensor) -> Tensor:
    """(B, T) ones where the output has a token; in a model with a decoder, these are the decoder's positions."""
    if is_encoder_decoder(model):
        return decoder_positions(batch, like.new_ones(like.shape[:2]))
    mask = text_mask(batch, like)
    # Other positions than the text's (image patches, a prompt in front) all count.
    return mask if like.ndim == 3 and mask.shape == like.shape[:2] else like.new_ones(like.shape[:2])


def decoder_positions(batch: Batch, everything: Tensor) -> Tensor:
    """The decoder's mask: its own, else ones at labels, else ``everything``."""
    mask, labels = batch.get("decoder_attention_mask"), batch.get("labels")
    if not isinstance(mask, Tensor) and isinstance(labels, Tensor):
        mask = labels != -100
    return mask.to(everything) if isinstance(mask, Tensor) and mask.shape == everything.shape else everything


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether the model's own call runs a decoder on another sequence (its bare encoder does not)."""
    flag = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return bool(flag) and "decoder_input_ids" in inspect.signature(model.forward).parameters


def _with_own_decoder_inputs(model: nn.Module, inputs: Batch) -> object:
    try:
        return model(**inputs)  # BART's classifier reads the text once more
    except ValueError as error:
        raise KflatsError(
            f"{type(model).__name__} has a decoder, and the batches have nothing for it to read",
            hint='"labels" or "decoder_input_ids" in each batch, or Projections(of="pooled") for the encoder alone',
            command="--task NAME, whose examples have labels",
        ) from error
