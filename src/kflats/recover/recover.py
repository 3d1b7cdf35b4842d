"""Recovery: train a compressed model again, on its task, towards the original, or both.

FWSVD (Hsu et al., ICLR 2022, section 4.2) fine-tunes factored models for 3 epochs by Adam at 2e-5 in batches of 32;
the defaults are the same. transformers' Trainer trains.

The Trainer writes a checkpoint after every epoch: the model as safetensors and its own state as JSON. Optimizer
and schedule, which the Trainer would pickle, are written as safetensors instead (see ``kflats.recover.training``). No
file that is loaded can run code.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.common.formatting import plain, table
from kflats.common.hashing import sha256
from kflats.common.paths import expanded
from kflats.common.release import needed
from kflats.common.texts import Tokenizer, pad_id, required
from kflats.evaluation.outputs import load_tokenizer
from kflats.evaluation.running import Batch, device_of, evaluating, widened
from kflats.io import copy_companions, load_model, new_folder, resolve_model, save_model, weights_folder
from kflats.io.atomic import beside
from kflats.model.run_as import forget_losses_, running_as
from kflats.recover.problem import (
    Schedule,
    TaskRows,
    TrainingObjective,
    batch_training_data,
    only,
    own_randomness,
    put_back,
    task_training_data,
    unchanged_on_failure,
)
from kflats.tasks.batches import collate_features, features, load_examples, text_features
from kflats.tasks.task import Task, check_head, find_task

RECOVERY_FILE = "kflats_recovery.json"


@dataclass(frozen=True)
class Epoch:
    """Mean training loss of one epoch, and the metric's value after it (None: no evaluation)."""

    epoch: int
    loss: float
    value: float | None


@dataclass(frozen=True)
class Recovery:
    """The record of a recovery; printing it gives a table.

    Args:
        metric: the task's main metric, or "loss".
        before, after: its value on ``eval_split`` before and after; None without an evaluation.
        best_epoch: the epoch whose parameters were kept; 0: no epoch was better than the start, which was restored.
        epochs: all epochs that ran. stopped: True if ``patience`` ended the training early.
        trained, parameters: numbers of the parameters that were trained, and of all parameters.
        resumed: number of epochs that an earlier, interrupted run trained.
    """

    task: str
    split: str
    eval_split: str
    metric: str
    before: float | None
    after: float | None
    best_epoch: int
    epochs: tuple[Epoch, ...]
    stopped: bool
    train: str
    trained: int
    parameters: int
    distilled: bool
    seed: int
    seconds: float
    resumed: int

    def __str__(self) -> str:
        rows = [["start", "", "-" if self.before is None else f"{self.before:.4f}"]]
        for e in self.epochs:
            kept = " (kept)" if e.epoch == self.best_epoch and self.before is not None else ""
            rows.append([f"epoch {e.epoch}{kept}", f"{e.loss:.4f}", "-" if e.value is None else f"{e.value:.4f}"])
        evaluated = f"{self.metric} on {self.eval_split}" if self.eval_split else "-"
        lines = [
            f"{self.task}: {self.train} trained, {self.trained:,} of {self.parameters:,} parameters"
            + (", towards the original" if self.distilled else ""),
            "",
            plain(table(["", f"loss on {self.split}", evaluated], rows)),
        ]
        if self.before is not None and self.best_epoch == 0:
            lines += ["", "no epoch was better than the start, which was restored"]
        elif self.stopped:
            lines += ["", f"stopped early: {self.metric} no longer improved"]
        return "\n".join(lines)


def kept_epoch(history: tuple[Epoch, ...], before: float | None, higher_is_better: bool) -> tuple[int, float | None]:
    """The epoch whose parameters are kept, and its value: the first of the best.

    0 if the start, of value ``before``, was better than all epochs; the last epoch and no value if no epoch was
    evaluated.

    >>> kept_epoch((Epoch(1, 0.5, 0.8), Epoch(2, 0.4, 0.9)), 0.7, True), kept_epoch((Epoch(1, 0.5, 0.6),), 0.7, True)
    ((2, 0.9), (0, 0.7))
    """
    sign = 1.0 if higher_is_better else -1.0
    values = [(sign * e.value, -e.epoch) for e in history if e.value is not None]
    if before is None or not values:
        return len(history), None
    best, epoch = max(values)
    return (0, before) if sign * before > best else (-epoch, sign * best)


def recover_(
    model: nn.Module,
    task: str | Task | Sequence[Batch],
    *,
    tokenizer: Tokenizer | None = None,
    task_data: str | os.PathLike[str] | None = None,
    split: str = "train",
    eval_split: str | Sequence[Batch] | None = "dev",
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
    precision: str = "float32",
    folder: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> Recovery:
    """Train ``model`` in place, and keep its best epoch.

        minimise over the chosen parameters   mean over examples of  ``kflats.recover.problem.TrainingObjective``

    AdamW without weight decay (that is Adam), linear decay to 0, gradients clipped at norm 1. Examples of
    similar length share a batch. The same seed, data, threads and device give the same parameters; the
    global random states are restored afterwards. After an error or interruption the model is as it was before.
    Parameters stored in 16 bits train as float32 and are rounded to their own type at the end.

    Args:
        model: a transformers model. It trains on its own device.
        task: a name, a ``Task``, or batches (dicts of tensors, as ``task_batches`` and text batches are),
            which are mixed anew every epoch. Without labels or without a head a ``teacher`` is needed.
        tokenizer: for tasks.
        task_data, split, max_length, limit: as ``kflats.task_batches``.
        eval_split: the split that decides which epoch is kept (for batches: other batches, whose mean loss
            decides); None: the last epoch is kept. The score on the split that chose the epoch is too high.
        teacher: the original, which is moved to the model's device; it, ``temperature`` and
            ``labels_weight`` are those of ``kflats.recover.problem.TrainingObjective``.
        train: "all", "bases", "coordinates" or "factors" (both).
        lr, batch, epochs: settings of the optimisation (``kflats.recover.problem.Schedule``).
        patience: number of epochs without a better value after which training stops; None: never.
        seed: seed of the order, of dropout and of the sample.
        precision: "bfloat16" takes products in bfloat16 (``kflats.recover.problem.Schedule``).
        folder: where checkpoints are kept, so that the same call resumes after an interruption. They remain there,
            each run's in a folder of its own, named by its settings, model and examples. None: no checkpoints are kept.
        quiet: no progress bar.

    Raises:
        KflatsError: as ``load_examples`` and ``check_head``; nothing to train, or neither labels nor a teacher; a loss
            that is NaN; accelerate is not installed.

    >>> import transformers
    >>> config = transformers.BertConfig(
    ...     vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    ... )
    >>> model = transformers.BertForSequenceClassification(config)
    >>> batches = [{"input_ids": torch.tensor([[2, 7, 3], [2, 9, 3]]), "labels": torch.tensor([0, 1])}]
    >>> recover_(model, batches, eval_split=None, epochs=1, quiet=True).trained == model.num_parameters()
    True
    """
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config") or hasattr(model, "encode"):
        raise KflatsError(
            f"recovery is not supported with {type(model).__name__}",
            hint="a transformers model, such as the one inside of a SentenceTransformer",
        )
    schedule = Schedule(train, lr, batch, epochs, patience, seed, precision)
    objective = TrainingObjective(teacher, temperature, labels_weight)
    if not isinstance(task, str | Task):
        others = None if isinstance(eval_split, str) else eval_split
        data = batch_training_data(model, task, others, tokenizer, objective)
    elif eval_split is None or isinstance(eval_split, str):
        check_head(model, find_task(task))

        def rows_of(split: str, most: int | None = None) -> TaskRows:
            examples = load_examples(task, split, task_data)
            return examples, features(examples, required(tokenizer), max_length, limit=most, model=model, seed=seed)

        judged = None if eval_split is None else rows_of(eval_split)
        data = task_training_data(model, required(tokenizer), rows_of(split, limit), judged, max_length)
    else:
        raise KflatsError("a task is evaluated on one of its splits", hint='eval_split="dev"')
    if teacher is None and data.rows[0].labels is None:
        raise KflatsError("there are neither labels nor a teacher to train on", hint="teacher=ORIGINAL")
    device = device_of(model)
    began = time.monotonic()
    needed("accelerate", "kflats[tasks]", "training")
    from kflats.recover.training import run

    with (
        evaluating(model, *([] if teacher is None else [teacher.to(device)])),
        own_randomness(device),
        running_as(model, "dense"),
        # Adam's steps are smaller than the resolution of 16 bits, and its epsilon is 0 there.
        widened(model, torch.float16, torch.bfloat16, changed=True) as rounded,
        only(model, train) as chosen,
        unchanged_on_failure(chosen) as start,
    ):
        before = None if data.evaluate is None else data.evaluate(model)
        settings = {"task": data.name, "eval_split": [data.eval_split, before], **asdict(schedule)}
        settings |= {"temperature": temperature, "labels_weight": labels_weight, "rows": data.digest}
        settings |= {"model": _digest(model), "teacher": None if teacher is None else _digest(teacher)}
        with _checkpoints(folder, settings) as where:
            log, resumed = run(model, data, objective, schedule, where, folder is not None, quiet)
        history = _epochs(log, data.metric)
        best_epoch, after = kept_epoch(history, before, data.higher_is_better)
        if best_epoch == 0:
            put_back(chosen, start)
        else:
            forget_losses_(model)
        trained = sum(p.numel() for p in chosen)
    if rounded and data.evaluate is not None:
        after = data.evaluate(model)
    return Recovery(
        task=data.name,
        split=data.split,
        eval_split=data.eval_split,
        metric=data.metric,
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

    ``out`` is complete, or it is not written. Checkpoints are kept beside it until the end, so that the same call
    resumes after an interruption. The tokenizer and all other files that hold no weights are copied; the ``Recovery``
    is written to ``kflats_recovery.json``. Runs on a GPU if there is one.

    Args:
        source: a local folder (compressed or not) or a hub name. out: the new folder.
        task: as ``recover_``.
        texts: instead of a task: sentences without labels, to train towards the ``teacher`` alone. Every tenth is
            used for the evaluation, not for training.
        teacher: the original's folder or hub name.
        max_length: tokens of an example; longer ones are cut.
        force: replace an existing folder that kflats wrote and nobody changed since.
        quiet: show no progress.
        chosen: further arguments of ``recover_``.

    Raises:
        KflatsError: as ``recover_``; both or neither of task and texts; fewer than 10 texts; ``out`` exists,
            overlaps one of the models or is written by another run; a full disk.
    """
    if (task is None) == (texts is None):
        raise KflatsError(
            "recovery needs either a task or texts",
            hint='task="mrpc" and task_data=FOLDER; or texts=... and teacher=ORIGINAL',
        )
    if texts is not None and teacher is None:
        raise KflatsError("training on texts is not supported without a teacher", hint="teacher=ORIGINAL")
    folder = resolve_model(os.fspath(source))
    teacher_folder = None if teacher is None else resolve_model(os.fspath(teacher))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with new_folder(out, force, [f for f in (folder, teacher_folder) if f is not None]) as aside:
        model = load_model(folder).to(device)
        tokenizer = load_tokenizer(folder)
        original = None if teacher_folder is None else load_model(teacher_folder).to(device)
        examples: Any = task
        if texts is not None:
            examples, chosen["eval_split"] = _text_batches(texts, tokenizer, model, max_length)
        recovery = recover_(
            model,
            examples,
            tokenizer=tokenizer,
            teacher=original,
            folder=beside(expanded(out).resolve(), "recovery"),
            quiet=quiet,
            max_length=max_length,
            **chosen,
        )
        save_model(model, aside / weights_folder(folder).relative_to(folder))
        (aside / RECOVERY_FILE).write_text(json.dumps(asdict(recovery), indent=1, allow_nan=False), encoding="utf-8")
        copy_companions(folder, aside)
    return recovery


def _text_batches(
    texts: Sequence[str], tokenizer: Tokenizer, model: nn.Module, max_length: int
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Batches of one text each: nine tenths to train on, and each tenth to evaluate on."""
    if len(texts) < 10:
        raise KflatsError(f"training on fewer than 10 texts ({len(texts)}) is not supported", hint="at least 10 texts")
    padding_id = pad_id(tokenizer, model)
    batches = [collate_features([row], padding_id) for row in text_features(texts, tokenizer, max_length, model)]
    return [batch for i, batch in enumerate(batches) if i % 10], batches[::10]


@contextmanager
def _checkpoints(folder: str | os.PathLike[str] | None, settings: dict[str, Any]) -> Iterator[Path]:
    """The folder for the checkpoints of a run with these ``settings``; without ``folder`` a temporary one."""
    if folder is not None:
        yield expanded(folder).resolve() / sha256([json.dumps(settings, sort_keys=True)])[:16]
        return
    with TemporaryDirectory(prefix="kflats-recovery-") as name:
        yield Path(name)


def _digest(model: nn.Module) -> str:
    """A digest of all parameters and buffers that a file would hold."""
    return sha256(part for item in model.state_dict().items() if isinstance(item[1], Tensor) for part in item)


def _epochs(log: Sequence[Mapping[str, float]], metric: str) -> tuple[Epoch, ...]:
    """The epochs of a Trainer's log."""
    losses = {round(e["epoch"]): e["loss"] for e in log if "loss" in e}
    values = {round(e["epoch"]): e[f"eval_{metric}"] for e in log if f"eval_{metric}" in e}
    return tuple(Epoch(i, loss, values.get(i)) for i, loss in sorted(losses.items()))
