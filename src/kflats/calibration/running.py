"""Running a model on one batch of a calibration set, whatever its kind, and what comes out of it."""

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
        command="--calibration FILE with one text a line",
    )


def take(batch: Batch, index: Tensor) -> dict[str, BatchValue]:
    """The samples ``index`` of a batch; what is not per sample stays."""
    size = batch_size(batch)
    return {
        key: value[index.to(value.device)] if isinstance(value, Tensor) and value.ndim and len(value) == size else value
        for key, value in batch.items()
    }


def to_device(batch: Batch, device: torch.device) -> dict[str, BatchValue]:
    """The batch where the model is."""
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def run(model: nn.Module, batch: Batch) -> Any:
    """``model(**batch)`` without computing the model's own loss: labels serve only to feed a decoder."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if is_sentence_transformer(model):
        return model(inputs)
    labels = batch.get("labels")
    if is_encoder_decoder(model) and "decoder_input_ids" not in inputs:
        if isinstance(labels, Tensor) and labels.ndim == 2:
            made: Any = model
            if not hasattr(model, "prepare_decoder_input_ids_from_labels"):
                return model(**inputs, labels=labels)
            inputs["decoder_input_ids"] = made.prepare_decoder_input_ids_from_labels(labels=labels)
        elif "decoder_inputs_embeds" not in inputs:
            return _with_own_decoder_inputs(model, inputs)
    return model(**inputs)


def task_output(output: Any) -> Tensor | None:
    """The logits of what a model gave (a lone tensor is taken for them), or None."""
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def vectors(model: nn.Module, batch: Batch, output: Any, *, pooled: bool) -> tuple[Tensor, Tensor]:
    """Last hidden states (B, T, d) or their masked means (B, d), and the mask (B, T).

    ``output`` is what the model gave, or None to run it without its task head here.
    """
    hidden = None
    if is_sentence_transformer(model):
        output = run(model, batch) if output is None else output
        hidden = output.get("token_embeddings")
        if pooled and isinstance(made := output.get("sentence_embedding"), Tensor):
            return made, text_mask(batch, made)
    elif output is not None:
        hidden = output.get("last_hidden_state") if isinstance(output, Mapping) else None
        hidden = getattr(output, "last_hidden_state", None) if hidden is None else hidden
    else:
        kept = {k: v for k, v in batch.items() if k != "labels" and not k.startswith("decoder_")}
        hidden = last_hidden_state(model, kept)
    if not isinstance(hidden, Tensor):
        raise KflatsError(
            f"{type(model).__name__} gives no logits and no last hidden state",
            hint="an objective of your own: any object with losses(model, batch, first) -> (B,)",
            command="--importance uniform, zipf or counts, which need no measurements",
        )
    mask = text_mask(batch, hidden) if hidden.shape[:2] == _mask_shape(batch) else decoder_mask(model, batch, hidden)
    if not pooled:
        return hidden, mask
    mean = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)
    return mean, mask


def text_mask(batch: Batch, like: Tensor) -> Tensor:
    """(B, T) ones where the input has a token; all ones without an attention mask."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask.to(like)
    return like.new_ones(like.shape[:2] if like.ndim == 3 else (len(like), 1))


def decoder_mask(model: nn.Module, batch: Batch, like: Tensor) -> Tensor:
    """(B, T) ones where what the model puts out has a token: of a decoder's positions where there is one."""
    if is_encoder_decoder(model):
        return decoder_positions(batch, like.new_ones(like.shape[:2]))
    mask = text_mask(batch, like)
    # Other positions than the text's (image patches, a prompt in front) all count.
    return mask if like.ndim == 3 and mask.shape == like.shape[:2] else like.new_ones(like.shape[:2])


def decoder_positions(batch: Batch, everything: Tensor) -> Tensor:
    """The decoder's mask: its own, else where labels are, else ``everything``."""
    mask, labels = batch.get("decoder_attention_mask"), batch.get("labels")
    if not isinstance(mask, Tensor) and isinstance(labels, Tensor):
        mask = labels != -100
    return mask.to(everything) if isinstance(mask, Tensor) and mask.shape == everything.shape else everything


def takes_labels(model: nn.Module) -> bool:
    """Whether the model's own call computes a loss from labels."""
    return "labels" in inspect.signature(model.forward).parameters


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether the model's own call runs a decoder on another sequence (its bare encoder does not)."""
    flag = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return bool(flag) and "decoder_input_ids" in inspect.signature(model.forward).parameters


def _with_own_decoder_inputs(model: nn.Module, inputs: Batch) -> Any:
    try:
        return model(**inputs)  # BART's classifier reads the text once more
    except ValueError as error:
        raise KflatsError(
            f"{type(model).__name__} has a decoder, and the batches have nothing for it to read",
            hint='"labels" or "decoder_input_ids" in each batch, or Projections(of="pooled") for the encoder alone',
            command="--task NAME, whose examples have labels",
        ) from error


def _mask_shape(batch: Batch) -> tuple[int, ...] | None:
    mask = batch.get("attention_mask")
    return tuple(mask.shape) if isinstance(mask, Tensor) else None
