"""Workers on the command line: ``--workers N`` runs the same command in N processes, as torchrun would."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kflats.common.errors import KflatsError

if TYPE_CHECKING:
    from kflats.common.workers import Workers

_RUN = "kflats"


@dataclass(frozen=True)
class WorkerOptions:
    """The options of several processes; torchrun starts more, also on several machines."""

    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Measure, plan and fit in this number of processes on this machine. Each takes the memory of one. "
            "Cores are divided among them unless OMP_NUM_THREADS is set. What is written does not depend on N, "
            "where each process has as many threads.",
        ),
    ] = None
    worker_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=5, help="A worker without a sign of life for so long is lost.")
    ] = 120.0
    allow_unlike_workers: Annotated[
        bool, typer.Option("--allow-unlike-workers", help="Go on where workers differ in versions or processors.")
    ] = False


def start(options: WorkerOptions) -> bool:
    """Run this command in several processes, if so many are asked for; whether that was done.

    Raises:
        KflatsError: a process was ended from outside; another number than torchrun started.
        typer.Exit: a process failed, and said why.
    """
    started = os.environ.get("WORLD_SIZE")
    if started is not None and options.workers not in (None, int(started)):
        raise KflatsError(
            f"--workers {options.workers} is not supported with {started} workers of torchrun",
            hint="torchrun --nproc-per-node N alone, or --workers N alone",
        )
    if started is not None or options.workers in (None, 1):
        return False
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from kflats.common.workers import cores

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // options.workers)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=options.workers,
        run_id=_RUN,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "kflats", *sys.argv[1:])
    except ChildFailedError as error:
        # A worker that failed by itself has said why; the others were ended because of it. One that was ended from
        # outside says nothing, and the others, which miss it, may have failed before it is found.
        first = min(error.failures.values(), key=lambda failure: (failure.exitcode >= 0, failure.timestamp))
        if first.exitcode >= 0:
            raise typer.Exit(first.exitcode) from None
        raise KflatsError(
            f"a worker was ended by {signal.Signals(-first.exitcode).name}",
            cause="too little memory, or a command that ended it",
            hint="the same command again, which resumes; fewer workers take less memory",
        ) from None
    except SignalException:
        raise KeyboardInterrupt from None
    return True


def is_first() -> bool:
    """Whether this process is alone, or the first of several, which alone repeats what all of them would say."""
    return os.environ.get("RANK", "0") == "0"


def is_started() -> bool:
    """Whether another process of kflats started this one (``start``), and says itself how it ended."""
    return os.environ.get("TORCHELASTIC_RUN_ID") == _RUN


@contextmanager
def joined(options: WorkerOptions) -> Iterator[Workers]:
    """The workers of this command, for as long as the context lasts.

    Raises:
        KflatsError: as ``kflats.common.workers.joined``.
        typer.Exit: another worker failed, and has said why.
    """
    from kflats.common.workers import LostWorkerError
    from kflats.common.workers import joined as connected

    with connected(options.worker_timeout, allow_unlike=options.allow_unlike_workers) as workers:
        try:
            yield workers
        except LostWorkerError as lost:
            if lost.said or not workers.failed(str(lost)):
                raise typer.Exit(2) from None
            raise
        except KflatsError as error:
            if not workers.failed(str(error)):
                raise typer.Exit(2) from None
            raise
