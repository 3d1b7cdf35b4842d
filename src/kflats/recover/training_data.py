"""The settings and the examples of a recovery, and the value by which its epochs are compared."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.common.hashing import sha256
from kflats.common.texts import pad_id, required
from kflats.evaluation.encoding import Batch, device_of, evaluating
from kflats.recover.distill import Objective
from kflats.recover.trainable import CHOICES
from kflats.tasks.batches import Feature, collate, feature_batches, features, uncollate
from kflats.tasks.data import load_examples
from kflats.tasks.scoring import score_features
from kflats.tasks.task import Task, check_head, find_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EVALUATION_BATCH = 32


@dataclass(frozen=True)
class Schedule:
    """Settings of the optimisation; the defaults are those of FWSVD (Hsu et al., ICLR 2022, section 4.2).

    Args:
        train: the parameters that train, see ``kflats.recover.trainable.only``.
        lr: Adam's first step size; it falls linearly to 0.
        batch: number of examples in a step.
        epochs: the largest number of epochs.
        patience: number of epochs without a better value after which training stops; None: all epochs run.
        seed: seed of the order of examples and of dropout.

    Raises:
        KflatsError: a value out of range.

    >>> Schedule().lr
    2e-05
    """

    train: str = "all"
    lr: float = 2e-5
    batch: int = 32
    epochs: int = 3
    patience: int | None = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.train not in CHOICES:
            raise KflatsError(f"train={self.train!r} is not known", hint=f"one of: {', '.join(CHOICES)}")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise KflatsError(f"a learning rate of {self.lr} does not train", hint="for example 2e-5")
        for name in ("batch", "epochs", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise KflatsError(f"{name}={value} is too small", hint="at least 1")
        if not 0 <= self.seed < 2**31:
            raise KflatsError(f"seed={self.seed} is out of range", hint="0 to 2147483647")


@dataclass(frozen=True)
class TrainingData:
    """Training examples, and the evaluation after each epoch.

    Args:
        name, split, eval_split: the task and its splits; "batches" and "other batches" of prepared batches;
            ``eval_split`` is "" without an evaluation.
        rows: the training examples. filler: the id that pads them.
        metric: the name of the value that ``evaluate`` gives. higher_is_better: its direction.
        evaluate: model -> value; None: the last epoch is kept.
    """

    name: str
    split: str
    eval_split: str
    rows: tuple[Feature, ...]
    filler: int
    metric: str
    higher_is_better: bool
    evaluate: Callable[[nn.Module], float] | None

    def batch(self, rows: Sequence[Feature]) -> dict[str, Tensor]:
        """One batch of ``rows``, for the data loader."""
        return collate(rows, self.filler)

    @property
    def digest(self) -> str:
        """Digest of the examples: a run resumes only with the examples it began with."""
        return sha256(json.dumps([row.inputs, row.labels]) for row in self.rows)


def task_training_data(
    model: nn.Module,
    task: str | Task,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    task_data: str | os.PathLike[str] | None,
    split: str,
    eval_split: str | None,
    max_length: int,
    limit: int | None,
    seed: int,
    teacher: nn.Module | None,
) -> TrainingData:
    """The examples of a task's split, evaluated on another split by the task's main metric.

    Raises:
        KflatsError: as ``load_examples`` and ``check_head``; a task without labels and no teacher.
    """
    task = find_task(task)
    metric = task.metrics[0]
    check_head(model, task)
    tokenizer = required(tokenizer)
    if task.kind == "similarity" and teacher is None:
        raise KflatsError(
            f"training on the task {task.name!r} is not supported without a teacher",
            cause="the task has no labels to train on",
            hint="teacher=the original model",
            command="--teacher ORIGINAL",
        )
    examples = load_examples(task, split, task_data)
    rows = features(examples, tokenizer, max_length, limit=limit, model=model, seed=seed)
    evaluate = None
    if eval_split is not None:
        others = load_examples(task, eval_split, task_data)
        eval_rows = features(others, tokenizer, max_length, model=model, seed=seed)

        def evaluate(candidate: nn.Module) -> float:
            return score_features(candidate, tokenizer, others, eval_rows, _EVALUATION_BATCH, max_length)[0][metric]

    filler = pad_id(tokenizer, model)
    return TrainingData(
        task.name, split, eval_split or "", tuple(rows), filler, metric, task.higher_is_better, evaluate
    )


def batch_training_data(
    model: nn.Module,
    batches: Sequence[Batch],
    eval_batches: Sequence[Batch] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    objective: Objective,
) -> TrainingData:
    """The examples of prepared batches, evaluated by the mean of ``objective`` over other batches; lower is better.

    Raises:
        KflatsError: no batches, or something else than dicts of tensors.
    """
    filler = pad_id(tokenizer, model)
    evaluate = None
    if eval_batches is not None:
        eval_rows = uncollate(eval_batches)

        def evaluate(candidate: nn.Module) -> float:
            total, device = 0.0, device_of(candidate)
            with evaluating(candidate), torch.no_grad():
                for _, part in feature_batches(eval_rows, _EVALUATION_BATCH):
                    total += len(part) * float(objective(candidate, collate(part, filler, device)))
            return total / len(eval_rows)

    rows = tuple(uncollate(batches))
    eval_split = "" if eval_batches is None else "other batches"
    return TrainingData("batches", "batches", eval_split, rows, filler, "loss", False, evaluate)
