"""A fine-tuned model to experiment on: the packaged all-MiniLM-L6-v2 with a task head, trained once and kept.

Training takes minutes, experiments need the same model again and again: it is cached in a folder named after
everything that decides what it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import _task_models
from _quick import write_model, write_task

from kflats.common.errors import KflatsError
from kflats.demo import packaged_model
from kflats.evaluation.outputs import load_tokenizer
from kflats.io import load_model, new_folder
from kflats.recover.recover import RECOVERY_FILE, recover_

DATA = Path(os.environ.get("KFLATS_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
"""Where the tasks lie (form: ``kflats.task_data``)."""

SHORT: dict[str, dict[str, Any]] = {
    "cola": {"epochs": 3, "max_length": 48},
    "mrpc": {"epochs": 4, "max_length": 64},
    "stsb": {"epochs": 3, "max_length": 48},
    "rte": {"epochs": 4, "max_length": 80},
    "sst2": {"epochs": 2, "max_length": 40, "split": "train_sentences"},
    "conll2003": {"epochs": 2, "max_length": 48},
    "wnli": {"epochs": 2, "max_length": 64},
}
"""Training that one core does in minutes a task: fewer epochs and tokens than FWSVD's 3 and 128."""

FAST_LR = 1e-4
"""FWSVD's 2e-5 is for larger models: after 3 epochs of 640 MRPC pairs this one still says "equivalent" to everything
at 2e-5 (accuracy .684 on dev), and has begun to learn at 1e-4 (.716)."""


@dataclass(frozen=True)
class TaskModel:
    """A fine-tuned model, its tokenizer, where it is kept, and whether it was found there."""

    model: Any
    tokenizer: Any
    folder: Path
    cached: bool
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def said(self) -> str:
        """The training in words, for tables: nobody shall take a short one for the paper's."""
        of = f"{self.settings['limit']} examples" if self.settings["limit"] else self.settings["split"]
        return (
            f"{self.settings['epochs']} epochs of {of}, batch {self.settings['batch']}, lr {self.settings['lr']:g}, "
            f"at most {self.settings['max_length']} tokens, seed {self.settings['seed']}"
        )


def arguments_of_models(parser: argparse.ArgumentParser) -> None:
    """The options with which every experiment finds its models."""
    parser.add_argument("--data", type=Path, default=DATA, help="folder of tasks (KFLATS_DATA)")
    parser.add_argument("--cache", type=Path, required=True, help="where fine-tuned models are kept")
    parser.add_argument("--full", action="store_true", help="3 epochs of everything at up to 128 tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--source", type=Path, help="the generic model's folder; default: the packaged MiniLM")


def quick_models_(asked: argparse.Namespace, tasks: str) -> None:
    """With ``--quick``, a tiny random model and generated tasks in place of those that the options name."""
    if not asked.quick:
        return
    asked.data, asked.source = asked.cache / "quick-data", asked.cache / "quick-model"
    if not asked.source.is_dir():
        write_model(asked.source)
    for task in tasks.split(","):
        write_task(asked.data, task)


def task_model(task: str, asked: argparse.Namespace) -> TaskModel:
    """The model that the options ask for, from the cache or trained now."""
    if task not in SHORT and not asked.full:
        raise KflatsError(f"no short training is known for the task {task!r}", hint=f"--full, or {', '.join(SHORT)}")
    chosen = {"split": SHORT.get(task, {}).get("split", "train")} if asked.full else SHORT[task]
    if asked.quick:
        chosen |= {"lr": 2e-3, "batch": 16, "epochs": 5}
    return fine_tuned(task, asked.cache, data=asked.data, seed=asked.seed, source=asked.source, **chosen)


def with_head(task: str, seed: int = 0, source: Path | None = None) -> Any:
    """The packaged model (or the one in ``source``) with an untrained head for ``task``, drawn by ``seed``."""
    return _task_models.with_head(task, seed, source or Path(packaged_model()))


def fine_tuned(
    task: str,
    cache: Path,
    *,
    data: Path | None = None,
    split: str = "train",
    lr: float = FAST_LR,
    epochs: int = 3,
    batch: int = 32,
    max_length: int = 128,
    limit: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    source: Path | None = None,
    quiet: bool = False,
) -> TaskModel:
    """The packaged model fine-tuned on a task: read from ``cache`` if it was trained with these very settings.

    The last epoch is kept, as in FWSVD: the dev split chooses nothing, so that it can judge. An interrupted
    training goes on where it stopped.

    Args:
        task, data, split, max_length, limit: as ``kflats.task_batches``.
        cache: the folder of all cached models; made if it is missing.
        lr, epochs, batch, seed: of the optimisation; ``seed`` draws the head too.
        device: "cpu" or "cuda".
        source: another generic model's folder.
    """
    settings = {"task": task, "split": split, "lr": lr, "epochs": epochs, "batch": batch}
    settings |= {"max_length": max_length, "limit": limit, "seed": seed}
    if source is not None:
        settings["source"] = str(source)
    name = f"{task}-seed{seed}-{hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]}"
    folder = Path(cache) / name
    cached = folder.is_dir()
    if not cached:
        model = with_head(task, seed, source).to(device)
        tokenizer = load_tokenizer(source or packaged_model())
        partial = Path(cache) / f".{name}.partial"
        done = recover_(
            model,
            task,
            tokenizer=tokenizer,
            task_data=data,
            split=split,
            eval_split=None,
            lr=lr,
            batch=batch,
            epochs=epochs,
            patience=None,
            max_length=max_length,
            limit=limit,
            seed=seed,
            folder=partial,
            quiet=quiet,
        )
        with new_folder(folder) as aside:
            model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
            (aside / RECOVERY_FILE).write_text(json.dumps({**settings, **asdict(done)}, indent=1), encoding="utf-8")
        shutil.rmtree(partial)
    return TaskModel(load_model(folder).to(device), load_tokenizer(folder), folder, cached, settings)
