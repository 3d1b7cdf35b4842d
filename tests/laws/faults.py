"""Runs of kflats in processes that meet a fault at a chosen step: killed, stopped, or with a full disk.

A step is an operation on files that Python announces to audit hooks: a file is opened, a folder made, a name changed or
removed. Nothing of kflats is replaced. The processes are forks of one that has imported kflats.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Literal

Kind = Literal["killed", "killed later", "stopped", "slow", "full disk"]
_MAKES = {"os.rename", "os.mkdir", "os.link", "os.truncate", "os.chmod"}
_STEPS = _MAKES | {"open", "os.remove", "os.rmdir"}
PATIENCE = 5.0  # a busy machine may not run a worker for a second or two
_LIMIT = 120.0
_IMPORTED = ["torch", "numpy", "kflats", "kflats.tables", "kflats.compress.pipeline", "kflats.cli.app", "faults"]
_IMPORTED += ["transformers.models.bert.modeling_bert", "transformers.models.auto", "torch.distributed.rendezvous"]


@dataclass(frozen=True)
class Fault:
    """What happens to the worker ``rank`` at a step of its run; after "full disk" nothing can be written any more."""

    kind: Kind
    rank: int
    step: int
    delay: float = 0.0


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, what it said, when it did each step, in seconds, and the names that it left
    in its temporary folder."""

    code: int
    said: str
    steps: list[float]
    temporary: list[str]

    @property
    def lost(self) -> bool:
        """Whether it stopped since another was lost, or failed."""
        return self.code == 2 and ("lost" in self.said or "another worker failed" in self.said)


def strikes(fault: Fault, ended: Sequence[Ended]) -> bool:
    """Whether a fault came while there was work to do: by the exit code that it alone makes, or what is said of it."""
    struck = ended[fault.rank]
    if fault.kind == "killed later":
        return struck.code == -signal.SIGALRM
    if fault.kind == "full disk":
        return struck.code == 2 and "no space left on device" in struck.said
    others = [one for rank, one in enumerate(ended) if rank != fault.rank]
    named = [one.said for one in others if re.search(r"worker \d+ is lost", one.said)]
    assert all(f"worker {fault.rank} is lost" in said for said in named), "another worker is named"
    waited_for = bool(named)
    return struck.code == -signal.SIGKILL and (fault.kind == "killed" or waited_for)


def run(
    job: Callable[..., None],
    arguments: Sequence[str],
    count: int,
    fault: Fault | None,
    notes: Path,
    *,
    threads: Sequence[int] = (),
    allow_unlike: bool = False,
) -> list[Ended]:
    """Run ``job(*arguments, workers)`` in ``count`` connected processes; how each ended.

    A process that is stopped gets killed when the others have ended. ``notes``: a folder for what they say, and for
    their temporary folders. Steps are counted in another: that of the last argument. ``threads``: of each; by default
    one.
    """
    from torch.distributed import TCPStore

    context = _context()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    notes.mkdir(exist_ok=True)
    running = []
    for rank in range(count):
        surroundings = {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
        surroundings |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        surroundings |= {"OMP_NUM_THREADS": str(threads[rank] if threads else 1)}
        surroundings |= {"TMPDIR": os.fspath(temporary := notes / f"temporary-{rank}")}
        temporary.mkdir()
        own = fault if fault and fault.rank == rank else None
        given = (job, tuple(arguments), surroundings, own, notes / str(rank), allow_unlike)
        running.append(context.Process(target=_worker, args=given, daemon=True))
        running[-1].start()
    stopped = running[fault.rank] if fault is not None and fault.kind == "stopped" else None
    until = time.monotonic() + _LIMIT
    for process in running:
        if process is not stopped:
            process.join(max(0.0, until - time.monotonic()))
    while stopped is not None and stopped.is_alive() and not _is_stopped(stopped.pid) and time.monotonic() < until:
        time.sleep(0.02)
    ended = []
    for rank, process in enumerate(running):
        if process.is_alive():
            process.kill()
            process.join()
        path = notes / str(rank)
        said = path.read_text() if path.exists() else ""
        steps = [float(line) for line in path.with_suffix(".steps").read_text().splitlines()]
        assert process.exitcode is not None
        ended.append(Ended(process.exitcode, said, steps, left(notes / f"temporary-{rank}")))
    return ended


def _is_stopped(pid: int | None) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def _worker(
    job: Callable[..., None],
    arguments: Sequence[str],
    surroundings: dict[str, str],
    fault: Fault | None,
    notes: Path,
    allow_unlike: bool,
) -> None:
    import torch

    from kflats.common.errors import KflatsError
    from kflats.common.workers import LostWorkerError, joined

    os.environ |= surroundings
    tempfile.tempdir = None  # found anew
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    _watch(Path(arguments[-1]).parent, fault, notes.with_suffix(".steps"))
    code = 0
    with notes.open("w") as said:
        sys.stderr = said
        try:
            with joined(PATIENCE, allow_unlike=allow_unlike) as workers:
                job(*arguments, workers)
        except (KflatsError, LostWorkerError) as error:
            print(error, file=said)
            code = 2
        except BaseException:
            traceback.print_exc(file=said)
            code = 1
    os._exit(code)  # no handlers of the parent's


def _watch(folder: Path, fault: Fault | None, noted: Path) -> None:
    """Note the steps below ``folder`` from now on, one a line of the file ``noted``, and bring the fault."""
    inside, steps, began = os.fspath(folder), 0, time.monotonic()
    note = os.open(noted, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def hook(event: str, given: tuple[object, ...]) -> None:
        nonlocal steps
        if event not in _STEPS or not isinstance(given[0], str | os.PathLike):
            return
        if not os.fspath(given[0]).startswith(inside):  # type: ignore[arg-type]
            return
        makes = event in _MAKES
        if event == "open":
            makes = bool(int(given[2]) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))  # type: ignore[call-overload]
        steps += 1
        os.write(note, f"{time.monotonic() - began:.4f}\n".encode())
        if fault is None or steps < fault.step:
            return
        if fault.kind == "full disk" and makes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(given[0]))  # type: ignore[arg-type]
        if steps > fault.step:
            return
        if fault.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "killed later":
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends a process at once, also within torch
            signal.setitimer(signal.ITIMER_REAL, max(fault.delay, 1e-4))
        elif fault.kind == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "slow":
            time.sleep(fault.delay)

    sys.addaudithook(hook)


def holds(folder: Path) -> dict[str, bytes]:
    """The files of an output: their bytes; of a model's its weights and description."""
    kept = [path for path in sorted(folder.iterdir()) if path.suffix == ".safetensors" or path.name == "config.json"]
    table = [path for path in sorted(folder.iterdir()) if path.name.endswith("table.json")]
    return {path.name: path.read_bytes() for path in [*kept, *table]}


def left(folder: Path) -> list[str]:
    """The names in a folder, hidden ones too."""
    with suppress(FileNotFoundError):
        return sorted(path.name for path in folder.iterdir())
    return []


__all__ = ["PATIENCE", "Ended", "Fault", "Kind", "holds", "left", "run", "strikes"]
