"""A lesson: the examples a recovery learns from, and how it is judged after every epoch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kflats.common.errors import KflatsError
from kflats.common.hashing import sha256
from kflats.evaluation.encoding import Batch, evaluating
from kflats.recover.distill import Objective
from kflats.tasks.batches import Feature, by_length, collate, features, padding_id, uncollate
from kflats.tasks.data import load_examples
from kflats.tasks.scoring import judge
from kflats.tasks.task import Task, check_head, find_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_JUDGED_AT_ONCE = 32


@dataclass(frozen=True)
class Lesson:
    """What is learnt and how it is judged.

    Args:
        name, split, judged: of the task, "batches" and "other batches" where somebody gave those; ``judged`` is
            "" without a judge.
        rows: the examples. filler: what their ids are padded with.
        metric: what ``value`` measures. higher_is_better: which way.
        value: model -> its value; None: every epoch is as good as another, and the last is kept.
    """

    name: str
    split: str
    judged: str
    rows: tuple[Feature, ...]
    filler: int
    metric: str
    higher_is_better: bool
    value: Callable[[nn.Module], float] | None

    def batch(self, rows: Sequence[Feature]) -> Any:
        """One batch of ``rows``, for the data loader."""
        return collate(rows, self.filler)

    @property
    def digest(self) -> str:
        """Of the examples: a run resumes only on what it began with."""
        return sha256(json.dumps([row.inputs, row.labels]) for row in self.rows)


def lesson_of_task(
    model: nn.Module,
    task: str | Task,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    data: str | os.PathLike[str] | None,
    split: str,
    judged: str | None,
    max_length: int,
    limit: int | None,
    seed: int,
    teacher: nn.Module | None,
) -> Lesson:
    """The lesson of a task's two splits, judged by the task's main metric.

    Raises:
        KflatsError: as ``load_examples`` and ``check_head``; a task without labels and no teacher.
    """
    found = find_task(task)
    check_head(model, found)
    if found.kind == "similarity" and teacher is None:
        raise KflatsError(f"the task {found.name!r} is learnt from a teacher only", hint="give teacher= (--teacher)")
    if tokenizer is None:
        raise KflatsError(f"the task {found.name!r} needs the model's tokenizer", hint="tokenizer=...")
    learnt = load_examples(found, split, data)
    rows = features(learnt, tokenizer, max_length, limit=limit, model=model, seed=seed)
    value = None
    if judged is not None:
        asked = load_examples(found, judged, data)
        questions = features(asked, tokenizer, max_length, model=model, seed=seed)

        def value(candidate: nn.Module) -> float:
            return judge(candidate, tokenizer, asked, questions, _JUDGED_AT_ONCE, max_length)[0][found.metrics[0]]

    return Lesson(
        found.name,
        split,
        judged or "",
        tuple(rows),
        padding_id(tokenizer, model),
        found.metrics[0],
        found.higher_is_better,
        value,
    )


def lesson_of_batches(
    model: nn.Module,
    batches: Sequence[Batch],
    judged: Sequence[Batch] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    objective: Objective,
) -> Lesson:
    """The lesson of prepared batches; judged by the mean of ``objective`` over other batches, lower being better.

    Raises:
        KflatsError: no batches, or something else than dicts of tensors.
    """
    filler = padding_id(tokenizer, model)
    value = None
    if judged is not None:
        questions = uncollate(judged)
        order = by_length(questions)

        def value(candidate: nn.Module) -> float:
            total, device = 0.0, next(candidate.parameters()).device
            with evaluating(candidate), torch.no_grad():
                for start in range(0, len(order), _JUDGED_AT_ONCE):
                    picked = order[start : start + _JUDGED_AT_ONCE]
                    one = collate([questions[i] for i in picked], filler, device)
                    total += len(picked) * float(objective(candidate, one))
            return total / len(order)

    rows = tuple(uncollate(batches))
    return Lesson(
        "batches", "batches", "other batches" if judged is not None else "", rows, filler, "loss", False, value
    )
