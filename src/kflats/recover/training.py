"""transformers' Trainer as recovery uses it: batches of like lengths, our own judge, and checkpoints without pickle.

The Trainer's own checkpoints keep the model as safetensors, but the optimizer, the schedule, the random states and
its arguments by ``torch.save``, which is pickle. Here the tensors among them (Adam's two moments, torch's random
states) go into ``kflats_trainer.safetensors`` and the rest into ``kflats_trainer.json``; the arguments are not kept.
``trainer_state.json`` is the Trainer's. Such a checkpoint resumes exactly: interrupted or not, the result is the same.

This module imports transformers; ``kflats.recover`` imports it when it trains.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Sampler
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import logging

from kflats.common.errors import KflatsError
from kflats.recover.checkpoints import REST, TENSORS, last_checkpoint, read_state
from kflats.recover.distill import Objective
from kflats.recover.schedule import Schedule
from kflats.recover.training_data import Lesson

_POOL = 64  # batches whose examples are sorted together: length differs little inside a batch, and order still varies


def run(
    model: Any, lesson: Lesson, objective: Objective, schedule: Schedule, where: Path, resumable: bool, quiet: bool
) -> tuple[list[dict[str, Any]], int]:
    """Train ``model`` in place on a lesson; at the end it holds its best epoch where the lesson has a judge.

    Args:
        where: the folder of checkpoints; training goes on from the newest whole one in it.
        resumable: keep what resuming needs, not just the best model.
        quiet: no progress bar.

    Returns:
        The Trainer's log, and how many epochs of it were read from a checkpoint.
    """
    device = next(model.parameters()).device
    found = last_checkpoint(where) if resumable else None
    state = {} if found is None else found[1]
    judged = lesson.value is not None
    arguments = TrainingArguments(
        output_dir=str(where),
        learning_rate=schedule.lr,
        per_device_train_batch_size=schedule.batch,
        num_train_epochs=_epochs_to_run(schedule, state),
        # Fused, a step on a CPU takes a seventh of the time; its arithmetic is the same.
        optim="adamw_torch_fused" if device.type in ("cpu", "cuda") else "adamw_torch",
        weight_decay=0.0,
        lr_scheduler_type="linear",
        eval_strategy="epoch" if judged else "no",
        save_strategy="epoch" if judged or resumable else "no",
        save_total_limit=1,
        save_only_model=not resumable,
        load_best_model_at_end=judged,
        metric_for_best_model=lesson.metric if judged else None,
        greater_is_better=lesson.higher_is_better if judged else None,
        restore_callback_states_from_checkpoint=resumable,
        logging_strategy="epoch",
        report_to=[],
        seed=schedule.seed,
        data_seed=schedule.seed,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=device.type != "cpu",
        use_cpu=device.type == "cpu",
    )
    with _progress(quiet) as tell, _quiet_saving():
        callbacks: list[TrainerCallback] = [TrainingProgress(tell)]
        if judged and schedule.patience is not None:
            callbacks.append(EarlyStoppingCallback(schedule.patience))
        trainer = RecoveryTrainer(
            objective=objective,
            judge=lesson.value,
            metric=lesson.metric,
            order=LengthGroupedSampler([len(row) for row in lesson.rows], schedule.batch, schedule.seed),
            model=model,
            args=arguments,
            train_dataset=lesson.rows,
            eval_dataset=lesson.rows if judged else None,
            data_collator=lesson.batch,
            callbacks=callbacks,
        )
        for printing in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(printing)
        trainer.train(resume_from_checkpoint=None if found is None else str(found[0]))
    return list(trainer.state.log_history), round(state.get("epoch") or 0)


def _epochs_to_run(schedule: Schedule, state: dict[str, Any]) -> int:
    """All of them, or those that ran where the checkpoint is of a run that had stopped early."""
    if schedule.patience is not None and state:
        stored = state.get("stateful_callbacks", {}).get(EarlyStoppingCallback.__name__, {})
        if stored.get("attributes", {}).get("early_stopping_patience_counter", 0) >= schedule.patience:
            ran: int = round(state["epoch"])
            return ran
    return schedule.epochs


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[int, int, float], None]]:
    if quiet:
        yield lambda step, steps, epoch: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("training", total=None)
        yield lambda step, steps, epoch: bar.update(
            task, completed=step, total=steps, description=f"training, epoch {epoch:.1f}"
        )


@contextmanager
def _quiet_saving() -> Iterator[None]:
    """transformers draws a bar for every checkpoint it saves, and remarks on file systems; ours is enough."""
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    try:
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


class LengthGroupedSampler(Sampler[int]):
    """Examples in random order, those of one batch of similar length; a function of seed and epoch alone.

    The random states of torch are not touched, and an epoch that is resumed is the same epoch.
    """

    def __init__(self, lengths: Sequence[int], batch: int, seed: int) -> None:
        self.lengths, self.batch, self.seed, self.epoch = list(lengths), max(1, batch), seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader before every epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        batches = []
        for start in range(0, len(order), self.batch * _POOL):
            pool = sorted(order[start : start + self.batch * _POOL], key=lambda i: -self.lengths[i])
            batches += [pool[s : s + self.batch] for s in range(0, len(pool), self.batch)]
        # Batches are cut again from the flat order, so a short one can only be the last.
        whole = [b for b in batches if len(b) == self.batch]
        short = [b for b in batches if len(b) < self.batch]
        for place in torch.randperm(len(whole), generator=generator).tolist():
            yield from whole[place]
        for batch in short:
            yield from batch


class TrainingProgress(TrainerCallback):
    """Reports every step to ``tell(step, steps, epoch)``."""

    def __init__(self, tell: Callable[[int, int, float], None]) -> None:
        self.tell = tell

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tell(state.global_step, state.max_steps, state.epoch or 0.0)


class RecoveryTrainer(Trainer):
    """A Trainer whose loss, judge and order of examples are given, and which never pickles.

    Args:
        objective: (model, batch) -> loss.
        judge: model -> value of ``metric``; called after every epoch where ``eval_strategy`` says so.
        metric: the value's name.
        order: the sampler.
        rest: as ``transformers.Trainer``.
    """

    def __init__(
        self,
        *,
        objective: Callable[[Any, Any], Tensor],
        judge: Callable[[Any], float] | None,
        metric: str,
        order: LengthGroupedSampler,
        **rest: Any,
    ) -> None:
        self.objective: Callable[[Any, Any], Tensor] = objective
        self.judge, self.metric, self.order = judge, metric, order
        super().__init__(**rest)

    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return self.order

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = self.objective(model, inputs)
        if not torch.isfinite(loss):
            raise KflatsError(
                f"the loss is {loss.item()} after {self.state.global_step} steps",
                cause="too large a learning rate, or damaged weights",
                hint="a smaller --lr; kflats evaluate shows whether the model was sound before",
            )
        return loss

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        assert self.judge is not None
        found = {f"eval_{self.metric}": self.judge(self.model)}
        self.log(found)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # The original also pickles the arguments.
        model: Any = self.model
        model.save_pretrained(output_dir or self.args.output_dir, state_dict=state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer, schedule = self._parts()
        state = optimizer.state_dict()
        tensors = {f"optimizer.{i}.{k}": t for i, kept in state["state"].items() for k, t in kept.items()}
        tensors["random.torch"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors["random.cuda"] = torch.cuda.get_rng_state()
        python = random.getstate()
        numpy: Any = np.random.get_state(legacy=True)
        rest = {
            "groups": state["param_groups"],
            "schedule": schedule.state_dict(),
            "python": [python[0], list(python[1]), python[2]],
            "numpy": [numpy[0], np.asarray(numpy[1]).tolist(), *numpy[2:]],
        }
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}, folder / TENSORS)
        (folder / REST).write_text(json.dumps(rest), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        tensors, rest = read_state(Path(checkpoint))
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, place, key = name.split(".", 2)
                state.setdefault(int(place), {})[key] = tensor
        groups = [{**group, "betas": tuple(group["betas"])} for group in rest["groups"]]
        optimizer, schedule = self._parts()
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        schedule.load_state_dict(rest["schedule"])

    def _parts(self) -> tuple[Any, Any]:
        return self.optimizer, self.lr_scheduler

    def _save_rng_state(self, output_dir: str) -> None:
        pass  # with the optimizer

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        tensors, rest = read_state(Path(checkpoint))
        torch.set_rng_state(tensors["random.torch"])
        if torch.cuda.is_available() and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"])
        random.setstate((rest["python"][0], tuple(rest["python"][1]), rest["python"][2]))
        kind, keys, *others = rest["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *others))
