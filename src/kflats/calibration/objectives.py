"""Whose error: the loss of each single sample, whose gradient says how much a weight counts.

    TaskLoss       the fine-tuned model's own loss, from ``batch["labels"]``
    SampledLabels  the same with labels that the model draws itself: no labels needed
    Projections    <u, output> with random u: no labels and no task head needed

All give (B,) losses of single samples, so that their sum has each sample's own gradient at its own activations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.calibration.loss_kinds import (
    IGNORED,
    Kind,
    agree,
    check_labels,
    first_only,
    labels_of,
    logits_of,
    loss_sums,
    own_loss,
    possible,
)
from kflats.calibration.running import decoder_mask, run, take, task_output, vectors
from kflats.common.errors import KflatsError
from kflats.common.schema import JsonObject
from kflats.evaluation.encoding import Batch

_MISNAMED = ("label", "label_ids", "target", "targets")


class Objective(Protocol):
    """Anything that gives the losses of single samples; ``first`` is the batch's place in the calibration stream."""

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
            labels, and where the model computes a loss of its own, that which equals it.

    A sample without any target (all of its labels are -100) has loss 0. Choose it where there are labels: it is
    the paper's importance. Limit: losses of other forms (question answering) need an objective of your own.

    >>> class Head(torch.nn.Module):
    ...     def forward(self, x): return x
    >>> batch = {"x": torch.zeros(2, 4), "labels": torch.tensor([0, 3])}
    >>> TaskLoss().losses(Head(), batch).tolist()
    [1.3862943649291992, 1.3862943649291992]
    """

    kind: Kind = "auto"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise KflatsError(f"there is no TaskLoss of kind {self.kind!r}", hint=", ".join(get_args(Kind)))

    def losses(self, model: nn.Module, batch: Batch, first: int = 0) -> Tensor:
        """(B,) losses; raises KflatsError for labels that are missing, out of range, or of another task."""
        if self.kind == "auto":
            return self.resolved(model, batch).losses(model, batch, first)
        labels = labels_of(batch)
        logits = logits_of(task_output(run(model, batch)), model)
        check_labels(logits, labels, self.kind)
        total, count = loss_sums(self.kind)(logits, labels)
        return total / count.clamp_min(1)

    def resolved(self, model: nn.Module, batch: Batch) -> TaskLoss:
        """The same with its kind decided, on two samples of ``batch``.

        Raises:
            KflatsError: as ``losses``; or the model's own loss is none that kflats knows.
        """
        if self.kind != "auto":
            return self
        labels = labels_of(batch)
        given = labels.flatten(1) if labels.ndim > 1 else labels.unsqueeze(1)
        used = (given != IGNORED).sum(1)
        if not bool(used.any()):
            raise KflatsError(
                "no sample of the first batch has a target: all labels are -100", hint="batches with labels"
            )
        pair = take(batch, used.argsort(descending=True)[:2])
        with torch.no_grad():
            logits = logits_of(task_output(run(model, pair)), model)
            kinds = possible(logits, labels_of(pair), getattr(getattr(model, "config", None), "problem_type", None))
            for kind in kinds:
                check_labels(logits, labels, kind, samples=False)
            own = own_loss(model, pair)
            if own is None:
                return replace(self, kind=kinds[0])
            fitting = [kind for kind in kinds if agree(kind, logits, labels_of(pair), own)]
            if len(fitting) > 1 and logits.ndim == 3:
                # An untrained head gives every label one loss: which position is read tells them apart.
                begun = {**pair, "labels": first_only(labels_of(pair))}
                again, logits = own_loss(model, begun), logits_of(task_output(run(model, begun)), model)
                fitting = [kind for kind in fitting if agree(kind, logits, labels_of(begun), again)]
        if fitting:
            return replace(self, kind=fitting[0])
        raise KflatsError(
            f"{type(model).__name__}'s own loss, {float(own):.6g}, is none of: {', '.join(kinds)}",
            cause="a loss with weights, smoothing, or of another form",
            hint="TaskLoss(kind=...), or an object of your own with losses(model, batch, first) -> (B,)",
            command="texts in place of labelled examples: --calibration FILE",
        )


@dataclass(frozen=True)
class SampledLabels:
    """E over y ~ p(y | x; model) of grad log p grad log p': the true Fisher information, without labels.

    The model draws its own labels (a position's own for token heads, a normal error of variance 1/2 for
    regression, where the loss is the squared error); position losses are averaged. ``seed`` and a sample's
    place in the stream decide its draw, whatever the batches.

    Choose it for a task model whose labels are gone, and for language models. Limit: one draw a sample is noisy.
    """

    seed: int = 0

    def losses(self, model: nn.Module, batch: Batch, first: int = 0) -> Tensor:
        """(B,) losses; raises KflatsError for a model without a task head."""
        logits = logits_of(task_output(run(model, batch)), model).float()
        problem = getattr(getattr(model, "config", None), "problem_type", None)
        if logits.ndim == 3:
            uniform = _draws(self.seed, first, logits.shape[:2], "uniform").to(logits.device)
            labels = _sampled(logits, uniform)
            mask = decoder_mask(model, batch, logits)
            losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
            return (losses * mask).sum(1) / mask.sum(1).clamp_min(1)
        if logits.shape[1] == 1 or problem == "regression":
            normal = _draws(self.seed, first, logits.shape, "normal").to(logits.device)
            return (logits - (logits.detach() + normal / 2**0.5)).square().mean(1)
        if problem == "multi_label_classification":
            uniform = _draws(self.seed, first, logits.shape, "uniform").to(logits.device)
            drawn = (uniform < logits.detach().sigmoid()).to(logits.dtype)
            return F.binary_cross_entropy_with_logits(logits, drawn, reduction="none").mean(1)
        uniform = _draws(self.seed, first, (len(logits), 1), "uniform").to(logits.device)
        return F.cross_entropy(logits, _sampled(logits.unsqueeze(1), uniform).squeeze(1), reduction="none")


@dataclass(frozen=True)
class Projections:
    """<u, y(x)> with u standard normal: E grad grad' = J'J, the squared change of the output y itself.

    Args:
        of: "pooled", the mean of the last hidden states over the text's own tokens, as sentence-transformers
            pool; "hidden", every last hidden state; "logits", a task head's output; "auto", the logits where there
            are any, else pooled.
        seed: u depends on it and on the sample's place in the stream only, whatever the batches.
        normalized: vectors of length 1; logits as 2 sqrt(softmax), whose J'J is the Fisher information.
            False: as they are.

    hidden and token logits are divided by the root of the number of positions: the mean over positions of J'J.
    No labels, no task head (the paper's limitation 1). Choose it for encoders. Limit: with a vocabulary's
    logits, V random numbers a token; ``SampledLabels`` is cheaper there.
    """

    of: Literal["auto", "pooled", "hidden", "logits"] = "auto"
    seed: int = 0
    normalized: bool = True

    def __post_init__(self) -> None:
        if self.of not in ("auto", "pooled", "hidden", "logits"):
            raise KflatsError(f"Projections of {self.of!r}", hint="auto, pooled, hidden or logits")

    def losses(self, model: nn.Module, batch: Batch, first: int = 0) -> Tensor:
        """(B,) losses; raises KflatsError where the model has no such output."""
        output = None if self.of in ("pooled", "hidden") else run(model, batch)
        logits = None if output is None else task_output(output)
        if logits is None and self.of == "logits":
            logits_of(None, model)
        if logits is not None:
            y = logits.float()
            if self.normalized and y.shape[-1] > 1:
                y = 2 * (y.log_softmax(-1) / 2).exp()
            mask = decoder_mask(model, batch, logits)
        else:
            y, mask = vectors(model, batch, output, pooled=self.of != "hidden")
            y = F.normalize(y.float(), dim=-1) if self.normalized else y.float()
        u = _draws(self.seed, first, y.shape, "normal").to(y.device)
        if y.ndim == 2:
            return (u * y).sum(1)
        return ((u * y).sum(-1) * mask).sum(1) / mask.sum(1).clamp_min(1).sqrt()


def objective_of(batches: Sequence[Batch], asked: Objective | None = None) -> Objective:
    """The objective asked for; by default the task's loss where batches have labels, projections where none has.

    Raises:
        KflatsError: labels in some batches only, or under another name; something that is no objective.
    """
    if asked is not None:
        if isinstance(asked, type) or not callable(getattr(asked, "losses", None)):
            raise KflatsError(
                f"{asked!r} is no objective",
                hint="TaskLoss(), SampledLabels(), Projections(), or an object with losses(model, batch, first)",
                command="--task NAME or --calibration FILE",
            )
        return asked
    missing = [i for i, batch in enumerate(batches) if "labels" not in batch]
    if not missing:
        return TaskLoss()
    if len(missing) < len(batches):
        raise KflatsError(
            f"calibration batch {missing[0]} has no labels, and others have",
            cause="labelled and unlabelled data mixed",
            hint="labels in all of them, or objective=Projections(), which needs none",
            command="labelled examples of one task, or texts alone",
        )
    if other := next((name for name in _MISNAMED if name in batches[0]), None):
        raise KflatsError(
            f"the calibration batches have {other!r}, and no 'labels'",
            cause="another name for the labels",
            hint='batch["labels"], or objective=Projections(), which needs none',
            command="--task NAME, or texts alone: --calibration FILE",
        )
    return Projections()


def describe(objective: object) -> JsonObject:
    """What a file remembers of an objective: its type and its fields, JSON only."""
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


def _draws(seed: int, first: int, shape: Any, kind: Literal["normal", "uniform"]) -> Tensor:
    """Random numbers (B, ...) float32; those of a sample depend on the seed and its place only, and a longer
    sample's begin with a shorter one's."""
    out = np.empty(tuple(shape), dtype=np.float32)
    for s, row in enumerate(out):
        generator = np.random.default_rng([seed, first + s])
        row[...] = generator.standard_normal(row.shape) if kind == "normal" else generator.random(row.shape)
    return torch.from_numpy(out)
