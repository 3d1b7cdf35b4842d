"""Runs the logged experiments, the numbers that are wanted most first, until the time is over.

    python experiments/all_runs.py --minutes 30 --jobs 8 --task-data FOLDER     # on a GPU, what 30 minutes hold
    python experiments/all_runs.py --quick --minutes 10                # tiny models on a CPU: does everything run?

``--jobs`` processes run at a time, each with its share of the processors: a small model leaves most of a GPU idle. Each
command is divided by task and seed. Two processes never take the same task and seed, so that a model is trained once.

Every command has ``--resume``: finished runs are kept, a run that the end of the time cuts off is run again by the next
call. Afterwards each experiment writes its page from what has run, and ``reproduction.py`` the page of claims.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
SEEDS = "0,1,2"
BFLOAT16 = ("--precision", "bfloat16")  # of training; the pages of these experiments show its runs alone
COMMANDS = (
    ("messi_tasks.py", "--tasks", "mrpc,stsb,cola,rte"),
    ("fwsvd_tasks.py", "--tasks", "mrpc,stsb,cola,rte", *BFLOAT16),
    ("messi_variants.py", "--tasks", "rte,mrpc", *BFLOAT16),
    ("robust_scores.py", "--tasks", "cola,mrpc,rte,stsb,sst2,conll2003,wnli", *BFLOAT16),
    ("fwsvd_groups.py", "--tasks", "stsb,cola,mrpc", *BFLOAT16),
    ("messi_same_size.py", "--tasks", "cola,mrpc", *BFLOAT16),
    ("messi_search.py", "--tasks", "cola,mrpc", *BFLOAT16),
    ("messi_epochs.py", "--tasks", "mrpc,rte", *BFLOAT16),
    ("fwsvd_tasks.py", "--source", "shared", "--paths", "task", "--tasks", "cola,stsb", *BFLOAT16),
    ("fwsvd_groups.py", "--source", "shared", "--tasks", "stsb,cola"),
    ("fwsvd_tasks.py", "--tasks", "conll2003,sst2", *BFLOAT16),
    ("messi_lenet.py",),
    ("messi_vgg.py",),
    ("messi_vgg.py", "--width", "64"),
)
QUICK = tuple((script,) for script in dict.fromkeys(command[0] for command in COMMANDS))


@dataclass(frozen=True)
class Share:
    """A part of a command.

    Args:
        words: script and options. trains: what models it trains; no two shares that train the same run at a time.
    """

    words: tuple[str, ...]
    trains: str


def shares(command: tuple[str, ...]) -> list[Share]:
    """One for each task and seed of a command; one where it names no tasks, as with ``--quick``: these train the same.

    >>> [share.words[1:] for share in shares(("script.py", "--tasks", "rte,mrpc"))][:1]
    [('--tasks', 'rte', '--seeds', '0')]
    """
    if "--tasks" not in command:
        return [Share(command, "all")]
    place = command.index("--tasks")
    others = command[:place] + command[place + 2 :]
    found = product(command[place + 1].split(","), SEEDS.split(","))
    # All shares of a command that makes the source that it trains make the same one.
    makes = "--source" in command
    return [
        Share((*others, "--tasks", task, "--seeds", seed), "the source" if makes else f"{task} {seed}")
        for task, seed in found
    ]


class Runner:
    """Runs shares, ``jobs`` at a time.

    Args:
        common: options of every command. variables: their environment. seconds: after them no share begins, and those
            that run are ended.
    """

    def __init__(self, common: list[str], variables: Mapping[str, str], jobs: int, seconds: float) -> None:
        self.common, self.variables, self.jobs = common, variables, jobs
        self._end, self._lock = time.monotonic() + seconds, threading.Condition()
        self.failed, self.is_over = 0, False

    def run(self, todo: list[Share]) -> None:
        """All of them, in this order as far as they train different models."""
        waiting, busy = list(todo), set[str]()
        workers = [threading.Thread(target=self._work, args=(waiting, busy), daemon=True) for _ in range(self.jobs)]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join()
        except KeyboardInterrupt:
            with self._lock:
                waiting.clear()  # what runs was interrupted too
                self._lock.notify_all()
            raise

    def _work(self, waiting: list[Share], busy: set[str]) -> None:
        for share in self._next(waiting, busy):
            print(f"== {' '.join(share.words)}", flush=True)
            command = [sys.executable, str(HERE / share.words[0]), *share.words[1:], *self.common]
            code: int | None = 1
            try:
                code = finished(command, self.variables, self._end - time.monotonic())
            finally:
                with self._lock:
                    busy.remove(share.trains)
                    self.failed += code not in (0, None)
                    self.is_over |= code is None
                    self._lock.notify_all()

    def _next(self, waiting: list[Share], busy: set[str]) -> Iterator[Share]:
        while True:
            with self._lock:
                while waiting and all(share.trains in busy for share in waiting):
                    self._lock.wait()
                if not waiting:
                    return
                share = next(share for share in waiting if share.trains not in busy)
                waiting.remove(share)
                busy.add(share.trains)
            yield share


def main(argv: list[str] | None = None) -> int:
    """The number of commands that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="no run begins or goes on after them; default: 30")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time; default: 1")
    parser.add_argument("--quick", action="store_true", help="tiny models and generated data")
    parser.add_argument("--task-data", help='folder of tasks, or "hub"; default: $KFLATS_DATA, else the hub')
    parser.add_argument("--only", default="", help="comma-separated scripts; default: all")
    asked, folders = parser.parse_known_args(argv)  # --results and --models go to each command
    if asked.jobs < 1:
        parser.error("--jobs holds no number of processes: 1 or more")
    only = set(filter(None, asked.only.split(",")))
    known = {script for script, *_ in (QUICK if asked.quick else COMMANDS)}
    if unknown := only - known:
        parser.error(f"--only {min(unknown)} is none of its scripts: {', '.join(sorted(known))}")
    common = [*folders, "--resume", *(["--quick"] if asked.quick else [])]
    variables = os.environ | ({"KFLATS_DATA": asked.task_data} if asked.task_data else {})
    if asked.jobs > 1:
        variables.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // asked.jobs)))
    commands = [command for command in (QUICK if asked.quick else COMMANDS) if not only or command[0] in only]
    runner = Runner([*common, "--no-pages"], variables, asked.jobs, 60 * asked.minutes)
    runner.run([share for command in commands for share in shares(command)])
    if runner.is_over:
        print("the time is over: the pages of what has run", flush=True)
    pages = [[sys.executable, str(HERE / script), *words, *common, "--tables"] for script, *words in commands]
    if not asked.quick and not only:
        pages.append([sys.executable, str(HERE / "reproduction.py")])
    return runner.failed + sum(finished(page, variables) != 0 for page in pages)


def finished(command: list[str], variables: Mapping[str, str], seconds: float | None = None) -> int | None:
    """The exit code of a command; None where it had to be ended after so many seconds, or not begun."""
    if seconds is not None and seconds <= 0:
        return None
    try:
        return subprocess.run(command, env=dict(variables), timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        return None


if __name__ == "__main__":
    sys.exit(main())
