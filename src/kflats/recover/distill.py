"""The loss of a recovery: the task's own loss, the distance to a teacher's outputs, or both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.common.texts import IGNORED
from kflats.tasks.task import head_of


@dataclass(frozen=True)
class Objective:
    """The loss of one batch:  labels_weight * task loss + (1 - labels_weight) * distance to the teacher.

    The distance, T the temperature:

        classes, words, tokens    T^2 KL(softmax(teacher / T) || softmax(student / T)), mean over examples,
                                  or over attended tokens; words without a label are left out
        regression                (student - teacher)^2
        no head                   1 - cos of both mean token vectors

    T^2 keeps the gradient's size as T grows (Hinton, Vinyals & Dean 2015, section 2.1).

    Args:
        teacher: the original model; None: the task's loss alone.
        temperature: > 0; above 1 the less likely classes count more.
        labels_weight: 0 to 1; for batches without labels it is 0.

    Raises:
        KflatsError: a temperature or weight out of range.
    """

    teacher: nn.Module | None = None
    temperature: float = 2.0
    labels_weight: float = 0.5

    def __post_init__(self) -> None:
        if not (0 < self.temperature < float("inf")) or not 0 <= self.labels_weight <= 1:
            raise KflatsError(
                f"temperature={self.temperature}, labels_weight={self.labels_weight} is out of range",
                hint="a temperature above 0, a labels_weight from 0 to 1",
            )

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """A scalar with a gradient. The teacher runs in eval mode, without gradients.

        Raises:
            KflatsError: neither labels nor a teacher, or outputs of different shapes.
        """
        labelled = "labels" in batch and head_of(model) != ""
        if not labelled and self.teacher is None:
            raise KflatsError(
                "there is nothing to train on",
                cause="examples without labels, and no teacher",
                hint="teacher=the original model",
                command="--teacher ORIGINAL",
            )
        inputs = dict(batch) if labelled else {k: v for k, v in batch.items() if k != "labels"}
        outputs: Mapping[str, Tensor] = model(**inputs)
        if labelled and bool((batch["labels"] == IGNORED).all()):
            return 0.0 * outputs["logits"].sum()  # the mean over zero words would be NaN
        if self.teacher is None:
            return _task_loss(outputs)
        inputs.pop("labels", None)
        with torch.no_grad():
            target = self.teacher(**inputs)
        soft = distance(model, outputs, target, batch, self.temperature)
        if not labelled or self.labels_weight == 0:
            return soft
        return self.labels_weight * _task_loss(outputs) + (1 - self.labels_weight) * soft


def distance(
    model: nn.Module,
    outputs: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    temperature: float,
) -> Tensor:
    """The distance of ``outputs`` of ``model`` from a teacher's ``target`` on one batch; see ``Objective``.

    Raises:
        KflatsError: outputs of different shapes.
    """
    head = head_of(model)
    mask = batch["attention_mask"].bool()
    if head == "":
        ours, theirs = (_pooled(o["last_hidden_state"], mask) for o in (outputs, target))
        _check_equal(ours, theirs)
        return (1 - F.cosine_similarity(ours, theirs, dim=-1)).mean()
    ours, theirs = outputs["logits"].float(), target["logits"].float()
    _check_equal(ours, theirs)
    if head == "sequence" and ours.shape[-1] == 1:
        return F.mse_loss(ours, theirs)
    if head != "sequence":
        chosen = mask
        if head == "token" and "labels" in batch:
            chosen = mask & (batch["labels"] != IGNORED)
        ours, theirs = ours[chosen], theirs[chosen]
    ours, theirs = ((x / temperature).log_softmax(-1) for x in (ours, theirs))
    return temperature**2 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)


def _pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    weights = mask.unsqueeze(-1).to(torch.float32)
    return (hidden.float() * weights).sum(1) / weights.sum(1)


def _task_loss(outputs: Mapping[str, Tensor]) -> Tensor:
    loss = outputs.get("loss")
    if loss is None:
        raise KflatsError(
            "the model gives no loss for its labels",
            cause="it has no task head of transformers",
            hint="a model with a task head, or batches without labels and a teacher",
        )
    return loss


def _check_equal(ours: Tensor, theirs: Tensor) -> None:
    if ours.shape != theirs.shape:
        raise KflatsError(
            f"the teacher's outputs are {tuple(theirs.shape)}, the model's {tuple(ours.shape)}",
            cause="the teacher has another head or another vocabulary",
            hint="as teacher the model that was compressed",
        )
