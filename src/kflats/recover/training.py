"""transformers' Trainer for recovery: batches of similar lengths, an evaluation of our own, checkpoints without pickle.

The Trainer's own checkpoints hold the model as safetensors, but the optimizer, the schedule, the random states and its
arguments are written by ``torch.save``, which pickles. Here the optimizer and the schedule are written to
``kflats_trainer.safetensors``, Adam's two moments as tensors. Random states are not stored: every epoch begins with a
seed of its own. The Trainer writes ``trainer_state.json`` last. An interrupted run that resumes from such a checkpoint
gives the same result as one that was not interrupted.

This module imports transformers; ``kflats.recover.recover`` imports it when it trains.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.utils import SAFE_WEIGHTS_NAME, logging

from kflats.common.errors import KflatsError
from kflats.common.formatting import Update, progress_bar
from kflats.evaluation.running import device_of
from kflats.recover.problem import Schedule, TrainingData, TrainingObjective

_STATE = "kflats_trainer.safetensors"


def run(
    model: nn.Module,
    data: TrainingData,
    objective: TrainingObjective,
    schedule: Schedule,
    where: Path,
    resumable: bool,
    quiet: bool,
) -> tuple[list[dict[str, float]], int]:
    """Train ``model`` in place; at the end it has the parameters of its best epoch, or of the last without evaluation.

    Args:
        where: the folder of checkpoints; training continues from the newest complete one in it.
        resumable: keep the state of the optimizer too, not only the best model.
        quiet: no progress bar.

    Returns:
        The Trainer's log, and how many epochs of it were read from a checkpoint.
    """
    device = device_of(model)
    checkpoint, state = (last_checkpoint(where) if resumable else None) or (None, TrainerState())
    evaluated = data.evaluate is not None
    arguments = TrainingArguments(
        output_dir=str(where),
        learning_rate=schedule.lr,
        per_device_train_batch_size=schedule.batch,
        num_train_epochs=_epochs_to_run(schedule, state),
        # A fused step on a CPU takes a seventh of the time and computes the same.
        optim="adamw_torch_fused" if device.type in ("cpu", "cuda") else "adamw_torch",
        weight_decay=0.0,
        lr_scheduler_type="linear",
        eval_strategy="epoch" if evaluated else "no",
        save_strategy="epoch" if evaluated or resumable else "no",
        save_total_limit=1,
        save_only_model=not resumable,
        load_best_model_at_end=evaluated,
        metric_for_best_model=data.metric if evaluated else None,
        greater_is_better=data.higher_is_better if evaluated else None,
        restore_callback_states_from_checkpoint=resumable,
        logging_strategy="epoch",
        report_to=[],
        seed=schedule.seed,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=device.type != "cpu",
        use_cpu=device.type == "cpu",
    )
    with progress_bar(quiet=quiet) as update, _quiet_saving():
        callbacks: list[TrainerCallback] = [EpochCallback(update)]
        if evaluated and schedule.patience is not None:
            callbacks.append(EarlyStoppingCallback(schedule.patience))
        trainer = RecoveryTrainer(
            objective,
            data,
            schedule.precision,
            model=model,
            args=arguments,
            train_dataset=data.rows,
            eval_dataset=data.rows if evaluated else None,
            data_collator=data.batch,
            callbacks=callbacks,
        )
        for printing in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(printing)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return list(trainer.state.log_history), round(state.epoch or 0)


def _epochs_to_run(schedule: Schedule, state: TrainerState) -> int:
    """The schedule's number of epochs; the number that ran if the checkpoint's run stopped early."""
    callbacks: Any = state.stateful_callbacks or {}
    waited = (
        callbacks.get(EarlyStoppingCallback.__name__, {})
        .get("attributes", {})
        .get("early_stopping_patience_counter", 0)
    )
    stopped = schedule.patience is not None and waited >= schedule.patience
    return round(state.epoch or 0) if stopped else schedule.epochs


@contextmanager
def _quiet_saving() -> Iterator[None]:
    """Inside, transformers shows no progress bar for each checkpoint, and no warnings about file systems."""
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    try:
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


class EpochCallback(TrainerCallback):
    """Seeds every epoch, which decides the order of examples and dropout, and reports each step to a progress bar."""

    def __init__(self, update: Update) -> None:
        self.update = update

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Seed every random generator by the epoch."""
        set_seed((args.seed * 1_000_003 + round(state.epoch or 0)) % 2**32)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Report one step."""
        self.update(f"training, epoch {state.epoch or 0.0:.1f}", state.global_step, state.max_steps)


class RecoveryTrainer(Trainer):
    """A Trainer with a loss and an evaluation of our own, which groups examples by length and never pickles.

    Args:
        objective: (model, batch) -> loss.
        data: its ``evaluate`` is called after every epoch with ``eval_strategy="epoch"``.
        precision: of products, as ``Schedule``.
        rest: as ``transformers.Trainer``.
    """

    def __init__(self, objective: TrainingObjective, data: TrainingData, precision: str, **rest: Any) -> None:
        self.objective: TrainingObjective = objective
        self.precision = precision
        self.data = data
        super().__init__(**rest)

    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return LengthGroupedSampler(self.args.train_batch_size, lengths=[len(row) for row in self.data.rows])

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """The loss of the task, or the distance to the teacher's outputs."""
        with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            loss = self.objective(model, inputs)
        if not torch.isfinite(loss):
            raise KflatsError(
                f"the loss is {loss.item()} after {self.state.global_step} steps",
                hint="a smaller learning rate; kflats evaluate shows whether the weights were damaged before",
            )
        return loss

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """The value on the evaluation split: a score, or a loss (``TrainingData.higher_is_better``)."""
        assert self.data.evaluate is not None
        assert self.model is not None
        values = {f"eval_{self.data.metric}": self.data.evaluate(self.model)}
        self.log(values)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, values)
        return values

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # The original also pickles the arguments, and renames and reshapes tensors of some architectures, which the
        # Trainer's own loading does not undo.
        assert self.model is not None
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.model, str(folder / SAFE_WEIGHTS_NAME))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer, schedule = self._parts()
        state = optimizer.state_dict()
        tensors = {f"{i}.{key}": t for i, moments in state["state"].items() for key, t in moments.items()}
        rest = {"groups": state["param_groups"], "schedule": schedule.state_dict()}
        save_file(
            {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()},
            os.path.join(output_dir, _STATE),
            {"rest": json.dumps(rest)},
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state: dict[int, dict[str, Tensor]] = {}
        with safe_open(os.path.join(checkpoint, _STATE), framework="pt") as file:
            rest = json.loads(file.metadata()["rest"])
            for name in file.keys():  # noqa: SIM118
                place, key = name.split(".", 1)
                state.setdefault(int(place), {})[key] = file.get_tensor(name)
        optimizer, schedule = self._parts()
        optimizer.load_state_dict({"state": state, "param_groups": rest["groups"]})
        schedule.load_state_dict(rest["schedule"])

    def _parts(self) -> tuple[Any, Any]:
        return self.optimizer, self.lr_scheduler

    def _save_rng_state(self, output_dir: str) -> None:
        pass  # EpochCallback seeds every epoch

    def _load_rng_state(self, checkpoint: str | None) -> None:
        pass


def last_checkpoint(folder: str | os.PathLike[str]) -> tuple[Path, TrainerState] | None:
    """The newest complete checkpoint in ``folder`` and the Trainer's state there; None without one.

    A checkpoint whose writing was interrupted counts as absent.
    """
    complete = []
    for path in Path(folder).glob("checkpoint-*"):
        try:
            state = TrainerState.load_from_json(str(path / TRAINER_STATE_NAME))
            for file in {path / _STATE, *path.glob("*.safetensors")}:
                with safe_open(file, framework="pt"):
                    pass
            complete.append((path, state))
        except (OSError, ValueError, TypeError, SafetensorError):
            continue
    return max(complete, key=lambda item: item[1].global_step, default=None)
