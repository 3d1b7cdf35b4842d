"""Runs the logged experiments one after the other, the numbers that are wanted most first, until the time is over.

    python experiments/all_runs.py --minutes 30 --task-data FOLDER     # on a GPU, what 30 minutes hold
    python experiments/all_runs.py --quick --minutes 10                # tiny models on a CPU: does everything run?

Every command has ``--resume``: finished runs are kept, a run that the end of the time cuts off is run again by the next
call. Afterwards each experiment writes its page from what has run, and ``reproduction.py`` the page of claims.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMANDS = (
    ("messi_tasks.py", "--tasks", "mrpc,stsb,cola,rte"),
    ("fwsvd_tasks.py", "--tasks", "mrpc,stsb,cola,rte"),
    ("robust_scores.py",),
    ("fwsvd_groups.py",),
    ("messi_same_size.py",),
    ("messi_search.py",),
    ("fwsvd_tasks.py", "--source", "shared", "--paths", "task", "--tasks", "cola,stsb"),
    ("fwsvd_tasks.py", "--ratios", "10,20,33,45,60", "--epochs", "0", "--tasks", "cola,stsb"),
    ("messi_tasks.py", "--tasks", "rte,mrpc", "--others", "k-means,l1"),
    ("messi_vgg.py", "--width", "64"),
)
QUICK = tuple((script,) for script in dict.fromkeys(command[0] for command in COMMANDS))


def main(argv: list[str] | None = None) -> int:
    """The number of commands that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="no run begins or goes on after them; default: 30")
    parser.add_argument("--quick", action="store_true", help="tiny models and generated data")
    parser.add_argument("--task-data", help='folder of tasks, or "hub"; default: $KFLATS_DATA, else the hub')
    parser.add_argument("--only", default="", help="comma-separated scripts; default: all")
    asked, folders = parser.parse_known_args(argv)  # --results and --models go to each command
    only = set(filter(None, asked.only.split(",")))
    common = [*folders, "--resume", *(["--quick"] if asked.quick else [])]
    variables = os.environ | ({"KFLATS_DATA": asked.task_data} if asked.task_data else {})
    commands = [command for command in (QUICK if asked.quick else COMMANDS) if not only or command[0] in only]
    end, failed = time.monotonic() + 60 * asked.minutes, 0
    for script, *words in commands:
        print(f"== {' '.join([script, *words])}", flush=True)
        run = [sys.executable, str(HERE / script), *words, *common]
        code = finished(run, variables, end - time.monotonic())
        if code is None:
            print("the time is over: the page of what has run", flush=True)
            code = finished([*run, "--tables"], variables)
        failed += code != 0
    if not asked.quick and not only:
        failed += finished([sys.executable, str(HERE / "reproduction.py")], variables) != 0
    return failed


def finished(command: list[str], variables: dict[str, str], seconds: float | None = None) -> int | None:
    """The exit code of a command; None where it had to be ended after so many seconds, or not begun."""
    if seconds is not None and seconds <= 0:
        return None
    try:
        return subprocess.run(command, env=variables, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        return None


if __name__ == "__main__":
    sys.exit(main())
