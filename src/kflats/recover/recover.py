"""Recovery: a compressed model is trained again, on its task, towards the original, or both.

FWSVD (Hsu et al., ICLR 2022, section 4.2) fine-tunes factored models for 3 epochs by Adam at 2e-5 in batches of 32;
those are the defaults. transformers' Trainer does the work.

What lies on disk: after every epoch the Trainer writes a checkpoint, the model as safetensors and its own state as
JSON. What it would pickle (optimizer, schedule, random states) is written as safetensors and JSON instead, see
``kflats.training``; its arguments are not stored at all. Nothing that is loaded can run code.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kflats.common.errors import KflatsError
from kflats.evaluation.comparing import load_tokenizer
from kflats.evaluation.encoding import Batch, evaluating
from kflats.io import copy_companions, load_model, new_folder, resolve_model, save_model, weights_folder
from kflats.io.atomic_folder import beside
from kflats.recover.checkpoints import claim, digest, kept_in
from kflats.recover.distill import Objective
from kflats.recover.recovery import Epoch, Recovery, kept_epoch
from kflats.recover.schedule import Schedule
from kflats.recover.trainable import only, own_randomness, put_back, unchanged_on_failure, widened
from kflats.recover.training_data import Lesson, lesson_of_batches, lesson_of_task
from kflats.tasks.batches import collate, padding_id, text_features
from kflats.tasks.task import Task, find_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECOVERY_FILE = "kflats_recovery.json"


def recover_(
    model: nn.Module,
    task: str | Task | Sequence[Batch],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    data: str | os.PathLike[str] | None = None,
    split: str = "train",
    judged: str | Sequence[Batch] | None = "dev",
    teacher: nn.Module | None = None,
    temperature: float = 2.0,
    labels_weight: float = 0.5,
    train: str = "all",
    lr: float = 2e-5,
    batch: int = 32,
    epochs: int = 3,
    patience: int | None = 2,
    max_length: int = 128,
    limit: int | None = None,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> Recovery:
    """Train ``model`` in place, and keep its best epoch.

        minimise over the chosen parameters   mean over examples of  ``kflats.recover.distill.Objective``

    AdamW without weight decay (that is Adam), linear decay to 0, gradients clipped at norm 1. Examples of
    similar length share a batch. The same seed, data, threads and device give the same parameters; the
    global random states return to what they were. After an error or interruption the model is as it was.
    Parameters stored in 16 bits train as float32 and are rounded back at the end.

    Args:
        model: a transformers model. It trains on its own device.
        task: a name, a ``Task``, or batches (dicts of tensors, as ``task_batches`` and text batches are),
            which are mixed anew every epoch. Without labels or without a head a ``teacher`` is needed.
        tokenizer: for tasks.
        data, split, max_length, limit: as ``kflats.task_batches``.
        judged: the split that decides which epoch is kept (for batches: other batches, whose mean loss
            decides), None: the last epoch is kept. A best epoch chosen on a split flatters the score there.
        teacher: the original; see ``kflats.recover.distill.Objective`` for it, ``temperature`` and ``labels_weight``.
        train: "all", "bases", "coordinates" or "factors" (both).
        lr, batch, epochs: of the optimisation.
        patience: stop when this many epochs in a row were not better; None: never.
        seed: of the order, dropout and sample.
        folder: where checkpoints are kept, so that the same call resumes after an interruption. None: none
            are kept. They stay there when it is done.
        quiet: no progress bar.

    Raises:
        KflatsError: as ``load_examples`` and ``check_head``; nothing to train or to learn from; a loss that
            is NaN; checkpoints of another run in ``folder``; accelerate is not installed.

    >>> import transformers
    >>> config = transformers.BertConfig(
    ...     vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    ... )
    >>> model = transformers.BertForSequenceClassification(config)
    >>> batches = [{"input_ids": torch.tensor([[2, 7, 3], [2, 9, 3]]), "labels": torch.tensor([0, 1])}]
    >>> recover_(model, batches, judged=None, epochs=1, quiet=True).trained == model.num_parameters()
    True
    """
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config") or hasattr(model, "encode"):
        raise KflatsError(
            f"{type(model).__name__} is not a transformers model",
            hint="the model inside a SentenceTransformer is sentence_transformer[0].auto_model",
        )
    schedule = Schedule(train, lr, batch, epochs, patience, seed)
    objective = Objective(teacher, temperature, labels_weight)
    lesson = _lesson(model, task, tokenizer, data, split, judged, objective, max_length, limit, seed)
    device = next(model.parameters()).device
    began = time.monotonic()
    with (
        _beside(teacher, device),
        evaluating(model),
        own_randomness(device),
        kept_in(folder) as where,
        widened(model) as rounded,
        only(model, train) as chosen,
        unchanged_on_failure(chosen) as start,
    ):
        before = None if lesson.value is None else lesson.value(model)
        settings = {"task": lesson.name, "judged": [lesson.judged, before], **asdict(schedule)}
        settings |= {"temperature": temperature, "labels_weight": labels_weight, "rows": lesson.digest}
        settings |= {"model": digest(model), "teacher": None if teacher is None else digest(teacher)}
        claim(where, settings)
        history, resumed = _train(model, lesson, objective, schedule, where, folder is not None, quiet)
        best_epoch, after = kept_epoch(history, before, lesson.higher_is_better)
        if best_epoch == 0:
            put_back(chosen, start)
        trained = sum(p.numel() for p in chosen)
    if rounded and lesson.value is not None:
        after = lesson.value(model)
    return Recovery(
        task=lesson.name,
        split=lesson.split,
        judged=lesson.judged,
        metric=lesson.metric,
        before=before,
        after=after,
        best_epoch=best_epoch,
        epochs=history,
        stopped=len(history) < epochs,
        train=train,
        trained=trained,
        parameters=sum(p.numel() for p in model.parameters()),
        distilled=teacher is not None,
        seed=seed,
        seconds=time.monotonic() - began,
        resumed=resumed,
    )


def recover_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    task: str | Task | None = None,
    *,
    texts: Sequence[str] | None = None,
    teacher: str | os.PathLike[str] | None = None,
    force: bool = False,
    quiet: bool = False,
    max_length: int = 128,
    **chosen: Any,
) -> Recovery:
    """Recover a model folder into a new folder that transformers loads after ``import kflats``.

    ``out`` appears whole or not at all. Checkpoints are kept beside it until the end, so an interrupted run
    resumes by the same call. Tokenizer and all else that is no weight are copied; what was done is written
    to ``kflats_recovery.json``. Runs on a GPU where there is one.

    Args:
        source: a local folder (compressed or not) or a hub name. out: the folder to be.
        task: as ``recover_``; or ``texts``: sentences without labels, learnt from the ``teacher`` alone.
            One in ten of them is kept out, to judge by.
        teacher: the original's folder or hub name.
        force: replace an existing folder that kflats wrote and nobody changed since.
        chosen: further arguments of ``recover_``.

    Raises:
        KflatsError: as ``recover_``; both or neither of task and texts; ``out`` exists, overlaps one of the models or
            is written by another run; a full disk.
    """
    if (task is None) == (texts is None):
        raise KflatsError(
            "give a task, or texts",
            hint="task=..., or texts=... and teacher=...",
            command="--task mrpc, or --texts FILE --teacher ORIGINAL",
        )
    if texts is not None and teacher is None:
        raise KflatsError("texts have no labels to learn from", hint="teacher=ORIGINAL", command="--teacher ORIGINAL")
    folder = resolve_model(os.fspath(source))
    taught = None if teacher is None else resolve_model(os.fspath(teacher))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with new_folder(out, force, [folder] if taught is None else [folder, taught]) as aside:
        model = load_model(folder).to(device)
        tokenizer = load_tokenizer(folder)
        original = None if taught is None else load_model(taught).to(device)
        work: Any = task
        if texts is not None:
            work, chosen["judged"] = _texts(texts, tokenizer, model, max_length)
        done = recover_(
            model,
            work,
            tokenizer=tokenizer,
            teacher=original,
            folder=beside(Path(out).expanduser().resolve(), "recovery"),
            quiet=quiet,
            max_length=max_length,
            **chosen,
        )
        save_model(model, aside / weights_folder(folder).relative_to(folder))
        (aside / RECOVERY_FILE).write_text(json.dumps(asdict(done), indent=1, allow_nan=False), encoding="utf-8")
        copy_companions(folder, aside)
    return done


def _lesson(
    model: nn.Module,
    task: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    data: Any,
    split: str,
    judged: Any,
    objective: Objective,
    max_length: int,
    limit: int | None,
    seed: int,
) -> Lesson:
    if not isinstance(task, str | Task):
        other = judged if judged is None or not isinstance(judged, str) else None
        return lesson_of_batches(model, task, other, tokenizer, objective)
    if judged is not None and not isinstance(judged, str):
        raise KflatsError("a task is judged on one of its splits", hint='judged="dev", or None')
    return lesson_of_task(
        model,
        find_task(task),
        tokenizer,
        data=data,
        split=split,
        judged=judged,
        max_length=max_length,
        limit=limit,
        seed=seed,
        teacher=objective.teacher,
    )


def _texts(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, model: nn.Module, max_length: int
) -> tuple[Any, Any]:
    """Texts as batches to learn from, and every tenth to judge by."""
    if len(texts) < 10:
        raise KflatsError(f"{len(texts)} texts are too few to learn from", hint="at least 10, one a line")
    made = text_features(texts, tokenizer, max_length, model)
    filler = padding_id(tokenizer, model)
    learnt, asked = (
        [collate([row], filler) for i, row in enumerate(made) if (i % 10 == 0) == kept] for kept in (False, True)
    )
    return learnt, asked


def _train(
    model: nn.Module,
    lesson: Lesson,
    objective: Objective,
    schedule: Schedule,
    where: Path,
    resumable: bool,
    quiet: bool,
) -> tuple[tuple[Epoch, ...], int]:
    """Run the Trainer; the epochs that ran, and how many of them an earlier run had done."""
    try:
        from kflats.recover.training import run
    except ImportError as error:
        raise KflatsError(
            f"training needs {error.name or 'accelerate'}, which is not installed", hint="pip install 'kflats[tasks]'"
        ) from error
    log, resumed = run(model, lesson, objective, schedule, where, resumable, quiet)
    losses = {round(e["epoch"]): e["loss"] for e in log if "loss" in e}
    values = {round(e["epoch"]): e[f"eval_{lesson.metric}"] for e in log if f"eval_{lesson.metric}" in e}
    return tuple(Epoch(i, loss, values.get(i)) for i, loss in sorted(losses.items())), resumed


@contextmanager
def _beside(teacher: nn.Module | None, device: torch.device) -> Iterator[None]:
    """The teacher in eval mode on ``device``; afterwards where and as it was."""
    if teacher is None:
        yield
        return
    home = next(teacher.parameters()).device
    with evaluating(teacher):
        try:
            teacher.to(device)
            yield
        finally:
            teacher.to(home)
