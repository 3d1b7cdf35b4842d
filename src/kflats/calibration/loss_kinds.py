"""The losses that kflats computes from logits and labels, and checks that the labels fit the logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.calibration.running import batch_size, takes_labels
from kflats.common.errors import KflatsError
from kflats.evaluation.encoding import Batch

Kind = Literal["auto", "classification", "multi-label", "regression", "tokens", "causal"]
IGNORED = -100  # transformers' label for "not a target"


def loss_sums(kind: Kind) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(logits, labels) -> (B,) sums of the loss over a sample's targets, and (B,) how many."""
    return {
        "classification": _entropy,
        "tokens": _entropy,
        "causal": lambda logits, labels: _entropy(logits[:, :-1], labels[:, 1:]),
        "regression": _squared,
        "multi-label": _binary,
    }[kind]


def _entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    labels = labels.reshape(logits.shape[:-1]).long()
    losses = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view(len(logits), -1).sum(1), (labels != IGNORED).view(len(logits), -1).sum(1)


def _squared(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.float().reshape(len(logits), -1)
    losses = (logits - labels.to(logits.dtype).reshape(logits.shape)).square()
    return losses.sum(1), torch.full((len(logits),), logits.shape[1], device=logits.device)


def _binary(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    losses = F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none")
    return losses.sum(1), torch.full((len(logits),), logits.shape[1], device=logits.device)


def possible(logits: Tensor, labels: Tensor, problem: str | None) -> tuple[Kind, ...]:
    """The kinds of loss that the shapes allow, the likeliest first."""
    if logits.ndim == 3:
        return ("tokens", "causal")
    if logits.shape[-1] == 1 or problem == "regression":
        return ("regression",)
    if labels.is_floating_point() and labels.ndim == 2:
        return ("multi-label", "regression") if problem is None else ("multi-label",)
    return ("classification",)


def agree(kind: Kind, logits: Tensor, labels: Tensor, own: Tensor | None) -> bool:
    """Whether the model's own loss equals the mean over all targets of the loss of this ``kind``."""
    total, count = loss_sums(kind)(logits, labels)
    if own is None or not bool(count.any()):
        return own is None or float(own) == 0 or not bool(torch.isfinite(own))  # the mean of nothing
    value = float(total.sum() / count.sum())
    # Two that are not finite agree: that is for whoever adds the losses up to refuse.
    if not math.isfinite(value):
        return not bool(torch.isfinite(own))
    # A model in half precision rounds its own loss as it rounds logits: by their size.
    rounding = 2 * torch.finfo(logits.dtype).eps * max(abs(value), float(logits.abs().max()))
    return abs(value - float(own)) <= max(1e-3 * max(abs(value), 1e-3), rounding)


def first_only(labels: Tensor) -> Tensor:
    """Labels (B, T) with a target at the first position alone."""
    found = torch.full_like(labels, IGNORED)
    found[:, 0] = 0
    return found


def own_loss(model: nn.Module, batch: Batch) -> Tensor | None:
    """What the model says its loss is; None where it does not take labels."""
    if not takes_labels(model):
        return None
    config = getattr(model, "config", None)
    before = getattr(config, "problem_type", None)
    try:
        loss = getattr(model(**batch), "loss", None)
    finally:
        if config is not None and hasattr(config, "problem_type"):
            config.problem_type = before  # transformers writes its guess there
    return loss.float() if isinstance(loss, Tensor) and loss.ndim == 0 else None


def labels_of(batch: Batch) -> Tensor:
    """A batch's labels; raises KflatsError where it has none."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor):
        raise KflatsError(
            "the calibration batches have no labels"
            if labels is None
            else f"labels are a {type(labels).__name__}, not a tensor",
            cause="texts alone, or another name for them" if labels is None else "batches that were not collated",
            hint='batch["labels"] as a tensor; or Projections() or SampledLabels(), which need none',
            command="--task NAME, or texts alone: --calibration FILE",
        )
    if labels.ndim == 0 or len(labels) != batch_size(batch):
        raise KflatsError(
            f"labels of shape {tuple(labels.shape)} for {batch_size(batch)} samples",
            cause="each sample needs one label, or one label for each token",
        )
    return labels


def logits_of(logits: Tensor | None, model: nn.Module) -> Tensor:
    """The logits that ``model`` gave; raises KflatsError where there are none."""
    if logits is None:
        raise KflatsError(
            f"{type(model).__name__} gives no logits",
            cause="a base model without a task head, or a head of another form (question answering)",
            hint="Projections(), which needs no head",
            command="texts alone: --calibration FILE",
        )
    if logits.ndim not in (2, 3):
        raise KflatsError(
            f"logits of shape {tuple(logits.shape)} are of no task that kflats knows",
            cause="a loss is known for logits (samples, classes) and (samples, tokens, classes)",
        )
    return logits


def check_labels(logits: Tensor, labels: Tensor, kind: Kind, *, samples: bool = True) -> None:
    """Labels that this head cannot have; ``samples=False`` where logits are those of a part of the batch."""
    classes = logits.shape[-1]
    head = f"a head of {classes} outputs a {'token' if logits.ndim == 3 else 'sample'}"
    mismatch = KflatsError(
        f"labels of shape {tuple(labels.shape)}, {str(labels.dtype).removeprefix('torch.')}, do not fit {head}",
        cause="the data of one task and the head of another",
        hint="the model that was fine-tuned for this task, or Projections(), which needs no labels",
        command="a model that was fine-tuned for this task, or texts alone: --calibration FILE",
    )
    if samples and len(labels) != len(logits):
        raise mismatch
    if (kind in ("tokens", "causal")) != (logits.ndim == 3):
        raise mismatch
    per_sample = labels.shape[1:].numel()
    if kind in ("regression", "multi-label"):
        if per_sample != classes:
            raise mismatch
        return
    if labels.is_floating_point() or per_sample != logits.shape[1:-1].numel():
        raise mismatch
    wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= classes))]
    if len(wrong):
        raise KflatsError(
            f"label {int(wrong[0])} is out of range for {head}",
            cause="an unlabelled split, labels counted from 1, or the data of another task",
            hint=f"labels 0 to {classes - 1}, or {IGNORED} for positions without one",
        )
