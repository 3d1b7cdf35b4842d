"""The data that the options name: texts, a task's examples, what was measured before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kflats.calibration.measurements import Statistics
from kflats.common.errors import KflatsError
from kflats.common.texts import read_texts
from kflats.evaluation.comparing import load_tokenizer
from kflats.io.atomic_files import check_file
from kflats.planning.calibration_data import SAMPLES
from kflats.tasks.batches import task_batches


@dataclass(frozen=True)
class DataOptions:
    """What a plan is made from; None: not given.

    Attributes:
        texts: to be counted. calibration: texts to pass through the model.
        examples: makes labelled batches of a task for a model and its tokenizer.
        statistics: what was measured before. samples: how many texts or examples are measured with.
    """

    texts: tuple[str, ...] | None
    calibration: tuple[str, ...] | None
    examples: Callable[[Any, Any], Any] | None
    statistics: Statistics | None
    samples: int

    @property
    def measured(self) -> bool:
        """Whether there is data to measure with, or what it would say."""
        return any(found is not None for found in (self.calibration, self.examples, self.statistics))


def given(
    texts: Path | None,
    calibration: Path | None,
    task: str | None,
    data: Path | None,
    samples: int | None,
    statistics: Path | None,
) -> DataOptions:
    """What the options name, read.

    Raises:
        KflatsError: a file that cannot be read, or statistics that cannot be written; a task and texts to measure with
            at once; no samples.
    """
    count = samples_of(samples)
    examples = examples_of(task, data, calibration, count)
    known = None
    if statistics is not None and statistics.exists():
        known = Statistics.load(statistics)
    elif statistics is not None:
        check_file(statistics)  # where it will be written
    return DataOptions(texts_of(texts), texts_of(calibration), examples, known, count)


def texts_of(path: Path | None) -> tuple[str, ...] | None:
    """The lines of a file, if one was given."""
    return None if path is None else read_texts(path)


def samples_of(asked: int | None) -> int:
    """How many texts or examples are measured with."""
    if asked is not None and asked < 1:
        raise KflatsError(f"--samples {asked} measure nothing", hint="a few hundred")
    return SAMPLES if asked is None else asked


def examples_of(
    task: str | None, folder: Path | None, calibration: Path | None, samples: int
) -> Callable[[Any, Any], Any] | None:
    """What makes labelled batches of a task for a model and its tokenizer; None where no task is given."""
    if task is None:
        if folder is not None:
            raise KflatsError("--task-data is of a --task", hint="--task NAME, or --calibration FILE")
        return None
    if calibration is not None:
        raise KflatsError("--task and --calibration are both given", hint="one of them: labelled examples or texts")
    return lambda model, tokenizer: task_batches(task, tokenizer, limit=samples, data=folder, model=model)


def tokenizer_of(folder: Path, *, needed: bool) -> Any:
    """The folder's tokenizer; None where it has none and nothing needs one."""
    try:
        return load_tokenizer(folder)
    except KflatsError:
        if needed:
            raise
        return None
