"""Objectives: losses of single samples, whose gradients weight the errors of a weight.

    TaskLoss       the fine-tuned model's own loss, from ``batch["labels"]``
    SampledLabels  the same with labels drawn from the model's own output; needs no labels
    Projections    <u, output> with random u; needs no labels and no task head

Each gives (B,) losses of single samples: the gradient of their sum at a sample's activations is that of its own loss.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.dtypes import dtype_name
from kflats.common.errors import KflatsError
from kflats.common.schema import JsonObject
from kflats.common.texts import IGNORED
from kflats.evaluation.running import Batch, batch_size, by_position, decoder_mask, pooled, run, take, task_output

LossKind = Literal["auto", "classification", "multi-label", "regression", "tokens", "causal"]
_MISNAMED = ("label", "label_ids", "target", "targets")


class Objective(Protocol):
    """The losses of single samples; ``first`` is the index of the batch's first sample in the calibration set."""

    def losses(self, model: nn.Module, batch: Batch, first: int = 0) -> Tensor:
        """(B,) losses with gradients."""
        ...


@dataclass(frozen=True)
class TaskLoss:
    """L_s: the model's own loss of sample s alone, from ``batch["labels"]`` (FWSVD, Hsu et al., ICLR 2022, eq. 3).

    Args:
        kind: "classification" (cross-entropy), "multi-label", "regression" (squared error), "tokens" (mean
            cross-entropy over the sample's labelled positions: tagging, masked and sequence-to-sequence
            language models) or "causal" (the same for the next token). "auto": by the shapes of logits and
            labels; if the model computes a loss of its own, the kind that equals it.

    A sample without any target (all of its labels are -100) has loss 0. Choose it if there are labels: it is
    the paper's importance. Limit: losses of other forms (question answering) need an objective of your own.

    >>> class Head(torch.nn.Module):
    ...     def forward(self, x): return x
    >>> batch = {"x": torch.zeros(2, 4), "labels": torch.tensor([0, 3])}
    >>> TaskLoss().losses(Head(), batch).tolist()
    [1.3862943649291992, 1.3862943649291992]
    """

    kind: LossKind = "auto"

    def __post_init__(self) -> None:
        if self.kind not in get_args(LossKind):
            raise KflatsError(f"there is no TaskLoss of kind {self.kind!r}", hint=", ".join(get_args(LossKind)))

    def losses(self, model: nn.Module, batch: Batch, first: int = 0) -> Tensor:
        """(B,) losses; raises KflatsError for labels that are missing, out of range, or of another task."""
        if self.kind == "auto":
            return self.resolved(model, batch).losses(model, batch, first)
        labels = _labels_of(batch)
        logits = _logits_of(task_output(run(model, batch)), model, batch)
        _check_labels(logits, labels, self.kind)
        total, count = _loss_sums(self.kind)(logits, labels)
        return total / count.clamp_min(1)

    def resolved(self, model: nn.Module, batch: Batch) -> TaskLoss:
        """The same with its kind decided, on two samples of ``batch``.

        Raises:
            KflatsError: as ``losses``; or the model's own loss is none that kflats knows.
        """
        if self.kind != "auto":
            return self
        labels = _labels_of(batch)
        used = (labels.reshape(len(labels), -1) != IGNORED).sum(1)
        if not bool(used.any()):
            raise KflatsError(
                "no sample of the first batch has a target: all labels are -100", hint="batches with labels"
            )
        pair = take(batch, used.argsort(descending=True)[:2])
        with torch.no_grad():
            logits = _logits_of(task_output(run(model, pair)), model, pair)
            kinds = _possible(logits, _labels_of(pair), getattr(getattr(model, "config", None), "problem_type", None))
            for kind in kinds:
                _check_labels(logits, labels, kind, samples=False)
            own = _own_loss(model, pair)
            if own is None:
                return replace(self, kind=kinds[0])
            fitting = [kind for kind in kinds if _agree(kind, logits, _labels_of(pair), own)]
            if len(fitting) > 1 and logits.ndim == 3:
                # An untrained head gives every label one loss: which position is read tells them apart.
                begun = {**pair, "labels": _first_only(_labels_of(pair))}
                again, logits = _own_loss(model, begun), _logits_of(task_output(run(model, begun)), model, begun)
                fitting = [kind for kind in fitting if _agree(kind, logits, _labels_of(begun), again)]
        if fitting:
            return replace(self, kind=fitting[0])
        raise KflatsError(
            f"{type(model).__name__}'s own loss, {float(own):.6g}, is none of: {', '.join(kinds)}",
            cause="a loss with weights, smoothing, or of another form",
            hint="Projections(), or an objective of your own",
        )


@dataclass(frozen=True)
class SampledLabels:
    """E over y ~ p(y | x; model) of grad log p grad log p': the true Fisher information, without labels.

    The model draws its own labels (a position's own for token heads, a normal error of variance 1/2 for
    regression, whose loss is the squared error); position losses are averaged. ``seed`` and a sample's
    place in the stream decide its draw, whatever the batches.

    Choose it for a task model without labelled data, and for language models. Limit: one draw for each sample is noisy.
    """

    seed: int = 0

    def losses(self, model: nn.Module, batch: Batch, first: int = 0) -> Tensor:
        """(B,) losses; raises KflatsError for a model without a task head."""
        logits = _logits_of(task_output(run(model, batch)), model, batch).float()
        problem = getattr(getattr(model, "config", None), "problem_type", None)
        kind: LossKind = "classification"
        if logits.ndim == 3:
            uniform = _draws(self.seed, first, logits.shape[:2], "uniform").to(logits.device)
            left_out = decoder_mask(model, batch, logits) == 0
            kind, labels = "tokens", _sampled(logits, uniform).masked_fill(left_out, IGNORED)
        elif logits.shape[1] == 1 or problem == "regression":
            normal = _draws(self.seed, first, logits.shape, "normal").to(logits.device)
            kind, labels = "regression", logits.detach() + normal / 2**0.5
        elif problem == "multi_label_classification":
            uniform = _draws(self.seed, first, logits.shape, "uniform").to(logits.device)
            kind, labels = "multi-label", uniform < logits.detach().sigmoid()
        else:
            uniform = _draws(self.seed, first, (len(logits), 1), "uniform").to(logits.device)
            labels = _sampled(logits.unsqueeze(1), uniform)
        total, count = _loss_sums(kind)(logits, labels)
        return total / count.clamp_min(1)


@dataclass(frozen=True)
class Projections:
    """<u, y(x)> with u standard normal: E grad grad' = J'J, the squared change of the output y itself.

    Args:
        of: "pooled", the mean of the last hidden states over the text's own tokens, as sentence-transformers
            pool; "logits", a task head's output; "auto", the logits of a model with a head, otherwise pooled.
        seed: u depends on it and on the sample's place in the stream only, whatever the batches.
        normalized: vectors of length 1; logits as 2 sqrt(softmax), whose J'J is the Fisher information.
            False: as they are.

    Projections of token logits are divided by the root of the number of positions: the mean over positions of J'J.
    No labels, no task head (the paper's limitation 1). Choose it for encoders. Limit: with a vocabulary's
    logits, V random numbers a token; ``SampledLabels`` is cheaper there.
    """

    of: Literal["auto", "pooled", "logits"] = "auto"
    seed: int = 0
    normalized: bool = True

    def __post_init__(self) -> None:
        if self.of not in ("auto", "pooled", "logits"):
            raise KflatsError(f"Projections of {self.of!r} are not known", hint="auto, pooled or logits")

    def losses(self, model: nn.Module, batch: Batch, first: int = 0) -> Tensor:
        """(B,) losses; raises KflatsError if the model does not have this output."""
        output = None if self.of == "pooled" else run(model, batch)
        logits = None if output is None else task_output(output)
        if logits is None and self.of != "logits":
            y = pooled(model, batch, output).float()
            y = F.normalize(y, dim=-1) if self.normalized else y
            return (_draws(self.seed, first, y.shape, "normal").to(y.device) * y).sum(1)
        y = _logits_of(logits, model, batch).float()
        if self.normalized and y.shape[-1] > 1:
            y = 2 * (y.log_softmax(-1) / 2).exp()
        products = (_draws(self.seed, first, y.shape, "normal").to(y.device) * y).sum(-1)
        if y.ndim == 2:
            return products
        mask = decoder_mask(model, batch, y)
        return (products * mask).sum(1) / mask.sum(1).clamp_min(1).sqrt()


def objective_of(batches: Sequence[Batch], asked: Objective | None = None) -> Objective:
    """``asked``; None: the task's loss if batches have labels, otherwise projections.

    Raises:
        KflatsError: labels in some batches only, or under another name; ``asked`` is no objective.
    """
    if asked is not None:
        if isinstance(asked, type) or not callable(getattr(asked, "losses", None)):
            raise KflatsError(
                f"{asked!r} is no objective", hint="Projections() or another value with a method of the name losses"
            )
        return asked
    missing = [i for i, batch in enumerate(batches) if "labels" not in batch]
    if not missing:
        return TaskLoss()
    if len(missing) < len(batches):
        raise KflatsError(
            f"calibration batch {missing[0]} has no labels, and others have",
            hint="labels in all of them, or Projections(), which needs none",
        )
    if other := next((name for name in _MISNAMED if name in batches[0]), None):
        raise KflatsError(
            f"the calibration batches have {other!r}, and no 'labels'",
            hint="the name labels, or Projections(), which needs none",
        )
    return Projections()


def describe(objective: object) -> JsonObject:
    """An objective for a file: its type and its fields, JSON only."""
    fields = {}
    if dataclasses.is_dataclass(objective) and not isinstance(objective, type):
        fields = {k: v for k, v in dataclasses.asdict(objective).items() if isinstance(v, str | int | float | bool)}
    return {"type": type(objective).__name__, **fields}


def _sampled(logits: Tensor, uniform: Tensor) -> Tensor:
    """Class indices (B, T) drawn from softmax(logits) by inverting its distribution at ``uniform``."""
    with torch.no_grad():
        cumulative = logits.softmax(-1).cumsum(-1)
        # The last sum may round below 1, and the uniform number lie above it.
        return (cumulative < uniform.unsqueeze(-1).to(cumulative.dtype)).sum(-1).clamp_max(logits.shape[-1] - 1)


def _draws(seed: int, first: int, shape: Sequence[int], kind: Literal["normal", "uniform"]) -> Tensor:
    """Random numbers (B, ...) float32; those of a sample depend on the seed and its place only, and a longer
    sample's begin with a shorter one's."""
    out = np.empty(tuple(shape), dtype=np.float32)
    for s, row in enumerate(out):
        generator = np.random.default_rng([seed, first + s])
        row[...] = generator.standard_normal(row.shape) if kind == "normal" else generator.random(row.shape)
    return torch.from_numpy(out)


def _loss_sums(kind: LossKind) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(logits, labels) -> (B,) sums of the loss over a sample's targets, and (B,) how many."""
    return {
        "classification": _entropy,
        "tokens": _entropy,
        "causal": lambda logits, labels: _entropy(logits[:, :-1], labels.flatten(1)[:, 1:]),
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


def _possible(logits: Tensor, labels: Tensor, problem: str | None) -> tuple[LossKind, ...]:
    """The kinds of loss that the shapes allow, the likeliest first."""
    if logits.ndim == 3:
        return ("tokens", "causal")
    if logits.shape[-1] == 1 or problem == "regression":
        return ("regression",)
    if labels.is_floating_point() and labels.ndim == 2:
        return ("multi-label", "regression") if problem is None else ("multi-label",)
    return ("classification",)


def _agree(kind: LossKind, logits: Tensor, labels: Tensor, own: Tensor | None) -> bool:
    """Whether the model's own loss equals the mean over all targets of the loss of this ``kind``."""
    total, count = _loss_sums(kind)(logits, labels)
    if own is None or not bool(count.any()):
        return own is None or float(own) == 0 or not bool(torch.isfinite(own))  # the mean of nothing
    value = float(total.sum() / count.sum())
    # Two that are not finite agree: that is for whoever adds the losses up to refuse.
    if not math.isfinite(value):
        return not bool(torch.isfinite(own))
    # A model in half precision rounds its own loss as it rounds logits: by their size.
    rounding = 2 * torch.finfo(logits.dtype).eps * max(abs(value), float(logits.abs().max()))
    return abs(value - float(own)) <= max(1e-3 * max(abs(value), 1e-3), rounding)


def _first_only(labels: Tensor) -> Tensor:
    """Labels (B, T) with a target at the first position alone."""
    first = torch.full_like(labels, IGNORED)
    first[:, 0] = 0
    return first


def _own_loss(model: nn.Module, batch: Batch) -> Tensor | None:
    """The model's own loss; None if the model does not take labels."""
    if "labels" not in inspect.signature(model.forward).parameters:
        return None
    config = getattr(model, "config", None)
    before = getattr(config, "problem_type", None)
    try:
        loss = getattr(model(**batch), "loss", None)
    finally:
        if config is not None and hasattr(config, "problem_type"):
            config.problem_type = before  # transformers writes its guess there
    return loss.float() if isinstance(loss, Tensor) and loss.ndim == 0 else None


def _labels_of(batch: Batch) -> Tensor:
    """The labels of a batch; raises KflatsError if it has none."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor):
        raise KflatsError(
            "the calibration batches have no tensor of labels",
            hint="labels in each batch, or Projections() or SampledLabels(), which need none",
        )
    if labels.ndim == 0 or len(labels) != batch_size(batch):
        raise KflatsError(
            f"labels of shape {tuple(labels.shape)} for {batch_size(batch)} samples",
            cause="each sample needs one label, or one label for each token",
        )
    return labels


def _logits_of(logits: Tensor | None, model: nn.Module, batch: Batch) -> Tensor:
    """``logits`` by sample or by position; raises KflatsError if the model gave none, or others."""
    if logits is None:
        raise KflatsError(f"{type(model).__name__} gives no logits", hint="Projections(), which needs no head")
    if logits.ndim < 2:
        raise KflatsError(
            f"logits of shape {tuple(logits.shape)} are of no task that kflats knows",
            cause="a loss is known for logits (samples, classes) and (samples, tokens, classes)",
        )
    return by_position(logits, batch)


def _check_labels(logits: Tensor, labels: Tensor, kind: LossKind, *, samples: bool = True) -> None:
    """Raise KflatsError for labels that do not fit the logits; ``samples=False``: of a part of the batch."""
    classes = logits.shape[-1]
    head = f"a head of {classes} outputs a {'token' if logits.ndim == 3 else 'sample'}"
    mismatch = KflatsError(
        f"labels of shape {tuple(labels.shape)}, {dtype_name(labels.dtype)}, do not fit {head}",
        cause="the data of one task and the head of another",
        hint="a model that was fine-tuned for this task, or Projections(), which needs no labels",
    )
    per_sample, several = labels.shape[1:].numel(), kind in ("regression", "multi-label")
    fits = per_sample == (classes if several else logits.shape[1:-1].numel())
    if (samples and len(labels) != len(logits)) or (kind in ("tokens", "causal")) != (logits.ndim == 3) or not fits:
        raise mismatch
    if several:
        return
    if labels.is_floating_point():
        raise mismatch
    wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= classes))]
    if len(wrong):
        raise KflatsError(
            f"label {int(wrong[0])} is out of range for {head}",
            cause="an unlabelled split, labels counted from 1, or the data of another task",
            hint=f"labels 0 to {classes - 1}, or {IGNORED} for positions without one",
        )
