"""The options that name data, and the data that is read from the files they name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor, nn

from kflats.calibration.measurements import Statistics
from kflats.common.errors import KflatsError
from kflats.common.texts import read_texts
from kflats.io.atomic_files import check_file
from kflats.planning.calibration_data import SAMPLES
from kflats.tasks.batches import task_batches

Batches = Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class InputData:
    """The data that a compression starts from, as arguments of ``compress_folder``; None: not given.

    Attributes:
        texts: texts to count.
        calibration: texts to run the model on, or a function that makes batches for a model and its tokenizer.
        statistics: measurements of an earlier run.
        keep_statistics: the file to write new measurements to.
        samples: how many texts or examples are measured.
    """

    texts: tuple[str, ...] | None
    calibration: tuple[str, ...] | Callable[[nn.Module, Any], Batches] | None
    statistics: Statistics | None
    keep_statistics: Path | None
    samples: int

    @property
    def counted(self) -> bool:
        """Whether there are texts to count."""
        return self.texts is not None

    @property
    def measured(self) -> bool:
        """Whether there are measurements, or data to measure."""
        return self.calibration is not None or self.statistics is not None


@dataclass(frozen=True)
class DataOptions:
    """The options that name data; None: not given."""

    texts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Texts whose tokens are counted: UTF-8, one sentence a line.")
    ] = None
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Texts to run the model on for measurements: UTF-8, one sentence a line."),
    ] = None
    task: Annotated[
        str | None,
        typer.Option(
            help="Measure with this task's training examples and its own loss, in place of --calibration: cola, sst2, "
            "mrpc, stsb, ..."
        ),
    ] = None
    task_data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The task's folder of TSV files. Default: the Hugging Face hub."),
    ] = None
    samples: Annotated[
        int | None, typer.Option(metavar="N", min=1, help=f"How many texts or examples to measure with ({SAMPLES}).")
    ] = None
    statistics: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The file of measurements: read if it exists, written if it does not."),
    ] = None

    def read(self) -> InputData:
        """The data in the files that the options name.

        Raises:
            KflatsError: a file that cannot be read, or statistics that cannot be written; both --task and
                --calibration; --task-data without --task.
        """
        samples = SAMPLES if self.samples is None else self.samples
        if self.task_data is not None and self.task is None:
            raise KflatsError(
                "--task-data cannot be used without --task",
                cause="the folder does not say which task its files are of",
                hint="--task NAME, or --calibration FILE",
            )
        if self.task is not None and self.calibration is not None:
            raise KflatsError(
                "--task and --calibration cannot be used together",
                cause="a compression measures either labelled examples or texts",
                hint="leave one of them out",
            )
        known = self.statistics is not None and self.statistics.exists()
        statistics = Statistics.load(self.statistics) if known and self.statistics is not None else None
        if self.statistics is not None and not known:
            check_file(self.statistics)  # the measurements are written there at the end
        return InputData(
            texts=texts_of(self.texts),
            calibration=texts_of(self.calibration) if self.task is None else self._examples(self.task, samples),
            statistics=statistics,
            keep_statistics=None if known else self.statistics,
            samples=samples,
        )

    def _examples(self, task: str, samples: int) -> Callable[[nn.Module, Any], Batches]:
        return lambda model, tokenizer: task_batches(
            task, tokenizer, limit=samples, task_data=self.task_data, model=model
        )


def texts_of(path: Path | None) -> tuple[str, ...] | None:
    """The lines of a text file; None where no file is given."""
    return None if path is None else read_texts(path)
