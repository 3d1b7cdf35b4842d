"""Workers on the command line: ``--workers N`` runs the same command in N processes, as torchrun would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from kflats.common.errors import KflatsError, first_line
from kflats.common.machine import cores, started_workers

if TYPE_CHECKING:
    from kflats.common.workers import Workers

_STARTED = "KFLATS_STARTED"
"""Set in the environment of the processes that ``start`` makes."""
_POLL = 0.05
_GRACE = 1.0
"""Seconds between the first failure and the end of the others, in which one that was killed is found."""
_PATIENCE = 10.0
"""Seconds after which a process that was asked to end is killed."""


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

    This process holds the store through which they speak, so that none of them is lost with another.

    Raises:
        KflatsError: a process was ended from outside; another number than torchrun started.
        typer.Exit: a process failed, and said why.
    """
    started = started_workers()
    if started is not None and options.workers not in (None, started):
        raise KflatsError(
            f"--workers {options.workers} is not supported with {started} workers of torchrun",
            hint="torchrun --nproc-per-node N alone, or --workers N alone",
        )
    count = options.workers
    if started is not None or count is None or count == 1:
        return False
    port = _free_port()
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), _STARTED: "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # torch's name: the store is in the process that started them
    surroundings = {"OMP_NUM_THREADS": str(max(1, cores() // count))} | dict(os.environ) | shared
    command = [sys.executable, "-m", "kflats", *sys.argv[1:]]
    running: list[subprocess.Popen[bytes]] = []

    def stop(number: int, frame: FrameType | None) -> None:
        # A terminal sends SIGINT to all of them. Where scripts run this in the background they ignore it.
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        _send(running, signal.SIGTERM if ignored else signal.SIGINT)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        for rank in range(count):
            running.append(subprocess.Popen(command, env=surroundings | {"RANK": str(rank)}))
        store = _store(port)  # while they import what they need
        failed = _failures(running)
        del store
    except KeyboardInterrupt:
        _wait(running)  # they tidy up
        raise
    finally:
        _end(running)
        signal.signal(signal.SIGTERM, before)
    killed = [-code for code in failed if code < 0]
    if killed:
        raise KflatsError(
            f"a worker was ended by {signal.Signals(killed[0]).name}",
            cause="too little memory, or a command that ended it",
            hint="the same command again, which resumes; fewer workers take less memory",
        )
    if failed:
        raise typer.Exit(failed[0])
    return True


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _store(port: int) -> object:
    """The store on this machine that all workers reach by ``port``."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise KflatsError(
            f"the workers could not connect: {first_line(error)}",
            cause=f"another program took the port {port} a moment ago",
            hint="the same command again",
        ) from error


def _failures(running: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """The exit codes of processes that failed by themselves, the first first; [] once all have succeeded.

    One that is killed says nothing, and the others, which miss it, may fail before it is looked at.
    """
    failed: dict[int, int] = {}
    since: float | None = None
    while since is None or time.monotonic() - since < _GRACE:
        codes = [process.poll() for process in running]
        failed |= {rank: code for rank, code in enumerate(codes) if code and rank not in failed}
        if None not in codes:
            break
        if failed and since is None:
            since = time.monotonic()
        time.sleep(_POLL)
    return list(failed.values())


def _end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes that run still, a stopped one among them."""
    _send(running, signal.SIGTERM)
    if hasattr(signal, "SIGCONT"):
        _send(running, signal.SIGCONT)
    _wait(running)
    for process in running:
        process.kill()
        process.wait()


def _send(running: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in running:
        process.send_signal(number)  # does nothing to one that has ended


def _wait(running: Sequence[subprocess.Popen[bytes]]) -> None:
    limit = time.monotonic() + _PATIENCE
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, limit - time.monotonic()))


def is_first() -> bool:
    """Whether this process is alone, or the first of several, which alone repeats what all of them would say."""
    return os.environ.get("RANK", "0") == "0"


def is_started() -> bool:
    """Whether another process of kflats started this one (``start``), and says itself how it ended."""
    return _STARTED in os.environ


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
