"""Runs of the papers' experiments: the cells of a table, what decides each, and the log of those that are finished.

The log is a file of JSON lines, one finished run each. A run is found again by its key, a digest of all that decides
it: task, model, method, size, seed, training, recipe, data, versions of libraries and of algorithms (``_algorithms``).
A commit that changes none of these keeps all finished runs. Tables and figures (``_tables``) read the log alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from _algorithms import VERSIONS, versions_of
from filelock import FileLock

from kflats.common.errors import KflatsError
from kflats.common.hashing import sha256

ROOT = Path(__file__).resolve().parents[1]
SHARED = "shared"
"""The ``--source`` that is made from the packaged model: one block, used for all."""
LIBRARIES = ("torch", "transformers")
"""The libraries whose versions decide a result."""


@dataclass(frozen=True)
class Cell:
    """One place of a table, and what decides the result that belongs there.

    Args:
        task, model, method, size, seed, epochs: the place. ``size`` is what is kept ("60%"); ``epochs`` of training
            after compression, 0 for none.
        training: of the original and of the compressed model. recipe: of the compression.
        algorithms: names in ``_algorithms.VERSIONS``. data: a digest of the examples and of the model's source.
    """

    task: str
    model: str
    method: str
    size: str
    seed: int
    epochs: int
    training: Mapping[str, Any]
    recipe: Mapping[str, Any]
    algorithms: tuple[str, ...]
    data: str = ""

    @cached_property
    def key(self) -> str:
        """A digest of everything that decides the result."""
        return _key_of(asdict(self) | {"algorithms": versions_of(self.algorithms), "libraries": libraries()})


@dataclass(frozen=True)
class Scores:
    """What a cell's computation gives; scores as fractions, higher is better.

    Args:
        metric: the task's main metric. original, compressed, tuned: its value on the judged split, before compression,
            after it, and after training again. None: not judged there, or not trained.
        held_out: the same three on the part of the training set that nothing was trained on, by name.
        nbytes: what the compressed weights take. error: relative squared error of the compressed weights.
        more: further numbers and words, by name.
    """

    metric: str
    original: float
    compressed: float | None
    tuned: float | None = None
    held_out: Mapping[str, float] = field(default_factory=dict)
    nbytes: int = 0
    error: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A finished run, one line of the log: its place, its scores, and how they came about."""

    key: str
    task: str
    model: str
    method: str
    size: str
    seed: int
    epochs: int
    metric: str
    original: float
    compressed: float | None
    tuned: float | None
    held_out: Mapping[str, float]
    nbytes: int
    error: float | None
    more: Mapping[str, Any]
    seconds: float
    training: Mapping[str, Any]
    recipe: Mapping[str, Any]
    algorithms: Mapping[str, int]
    data: str
    libraries: Mapping[str, str]
    commit: str

    @property
    def key_of_content(self) -> str:
        """The key by all that the line says of what decided the run."""
        return _key_of({name: getattr(self, name) for name in (*(f.name for f in fields(Cell)), "libraries")})

    @property
    def is_current(self) -> bool:
        """Whether its algorithms are still those of today."""
        return all(VERSIONS.get(name) == number for name, number in self.algorithms.items())


def model_of(run: Run) -> tuple[int, float]:
    """What tells the trained model of a run from others of its task: the seed, and the score before compression. One
    seed trains other models on other kinds of processors."""
    return run.seed, round(run.original, 6)


def _key_of(decides: Mapping[str, Any]) -> str:
    return digest_of(decides)[:20]


def digest_of(decides: Mapping[str, Any]) -> str:
    """Of everything that decides a result."""
    return sha256([json.dumps(decides, sort_keys=True)])


def libraries() -> dict[str, str]:
    """The versions of the libraries that decide a result."""
    return {name: version(name) for name in LIBRARIES}


def commit() -> str:
    """The checkout's commit, with "-dirty" after it if tracked files differ, but for the results that runs write;
    "unknown" outside of a checkout."""
    git = ("git", "-C", str(ROOT))
    changed = (*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)experiments/results")
    try:
        found, differs = (
            subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
            for asked in ((*git, "rev-parse", "--short=9", "HEAD"), changed)
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{found}-dirty" if differs else found


_BEGIN = '{"'
"""How a line of a log begins."""


class Log:
    """The finished runs in a file of JSON lines, to which new ones are appended, by several processes if need be.

    A line that was cut off, because its process was ended, is passed over and said so.

    Raises:
        KflatsError: a line that is no run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[Run] = []
        names = {one.name for one in fields(Run)}
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        for number, line in enumerate(text.splitlines(), 1):
            rest = line
            while rest:
                try:  # two runs may stand in a line, where the first was written by a program that ended no line
                    found, end = json.JSONDecoder().raw_decode(rest)
                    self.runs.append(Run(**{name: found[name] for name in names}))
                except json.JSONDecodeError as error:
                    if rest.startswith(_BEGIN):
                        print(f"line {number} of {path} was cut off; it is passed over", file=sys.stderr)
                        break
                    raise KflatsError(f"line {number} of {path} is no run: {error!r}", hint="remove it") from error
                except (KeyError, TypeError) as error:
                    raise KflatsError(f"line {number} of {path} is no run: {error!r}", hint="remove it") from error
                rest = rest[end:].lstrip()

    def find(self, key: str) -> Run | None:
        """The newest run with this key."""
        return next((run for run in reversed(self.runs) if run.key == key), None)

    def add(self, run: Run) -> None:
        """Append a run; it is on the disk when this returns."""
        self.runs.append(run)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(asdict(run), allow_nan=False) + "\n"
        with FileLock(self.path.with_name(f".{self.path.name}.lock")), self.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else f"\n{line}"  # after one that was cut off
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def newest(self, chosen: Callable[[Run], bool] = lambda run: True) -> list[Run]:
        """The newest run of each place and trained model, among those of today's algorithms that are ``chosen``."""
        found: dict[tuple[Any, ...], Run] = {}
        for run in self.runs:
            if run.is_current and chosen(run):
                found[run.task, run.model, run.method, run.size, run.epochs, model_of(run)] = run
        return list(found.values())


@dataclass(frozen=True)
class Asked:
    """What the options of every experiment ask for.

    Args:
        tasks, seeds: in the order of the command line. source: folder or hub name of the model to train; None: the
            packaged one. task_data: a folder in the form of ``kflats.task_data``; None: the hub.
        quick: tiny models and generated data. resume: finished runs are kept. tables: nothing is run.
        results: the folder of logs, tables and figures. models: where trained models are kept.
        command: the command line that a page names, without folders.
        more: the experiment's own options.
        shown: the tasks and seeds of the page: the usual ones, where those that were asked for are among them.
        other_tasks: whether a task is none of the usual ones.
    """

    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    source: str | None
    task_data: Path | None
    quick: bool
    resume: bool
    tables: bool
    pages: bool
    results: Path
    models: Path
    command: str
    more: argparse.Namespace
    shown: tuple[tuple[str, ...], tuple[int, ...]]
    other_tasks: bool

    @property
    def of_page(self) -> Asked:
        """The same for the page, which shows all that has run and not the part that this command runs."""
        tasks, seeds = self.shown
        return replace(self, tasks=tasks, seeds=seeds)


def asked_for(
    description: str | None,
    tasks: str,
    own: Mapping[str, Any] | None = None,
    seeds: str = "0,1,2",
    argv: list[str] | None = None,
    quick: Mapping[str, Any] | None = None,
    parts: tuple[str, ...] = (),
) -> Asked:
    """Parse the options that every experiment has, and its ``own``: names with their defaults.

    Args:
        tasks, seeds: the defaults. quick: what ``--quick`` changes of all defaults, by name.
        parts: own options that say which part is run, and nothing of the page.
        argv: the command line; None: that of the process.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=tasks, help="comma-separated names")
    parser.add_argument("--seeds", default=seeds, help="comma-separated; seeds are paired between methods")
    parser.add_argument(
        "--source",
        help="folder or hub name of the model; default: the packaged MiniLM; 'shared': its first block used for all",
    )
    parser.add_argument("--task-data", help='folder of tasks, or "hub"; default: $KFLATS_DATA, else the hub')
    parser.add_argument("--quick", action="store_true", help="tiny models and generated data: tries the whole command")
    parser.add_argument("--resume", action="store_true", help="keep finished runs; without it all are run again")
    parser.add_argument("--tables", action="store_true", help="run nothing: table and figure of the log")
    parser.add_argument("--no-pages", action="store_true", help="no table and figure: runs alone")
    parser.add_argument("--results", type=Path, help="folder of log, table and figure (default: experiments/results)")
    parser.add_argument("--models", type=Path, help="where trained models are kept (default: build/task-models)")
    for name, default in (own or {}).items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    words = sys.argv[1:] if argv is None else argv
    if "--quick" in words:
        parser.set_defaults(**{name.replace("-", "_"): value for name, value in (quick or {}).items()})
    given = parser.parse_args(words)
    for name, default in (own or {}).items():
        _check_numbers(f"--{name}", getattr(given, name.replace("-", "_")), default)
    common = {action.dest: getattr(given, action.dest) for action in parser._actions if action.dest != "help"}
    asked_tasks, usual_tasks = (tuple(filter(None, words.split(","))) for words in (given.tasks, tasks))
    if usual_tasks and not asked_tasks:
        raise KflatsError("--tasks names no task", hint=f"such as {tasks}")
    asked_seeds, usual_seeds = (tuple(map(_whole, words.split(","))) for words in (given.seeds, seeds))
    whole = not given.quick and given.source is None and {*asked_tasks} <= {*usual_tasks}
    others = not given.quick and not {*asked_tasks} <= {*usual_tasks}
    asked_tasks = tuple(sorted(asked_tasks)) if others else asked_tasks  # as the page of their own is called
    common["tasks"] = ",".join(asked_tasks) if others else common["tasks"]
    shown = usual_tasks if whole else asked_tasks, usual_seeds if {*asked_seeds} <= {*usual_seeds} else asked_seeds
    hidden = ["results", "models", "resume", "tables", "no_pages", "task_data", *parts]
    hidden += ["tasks"] * (shown[0] == usual_tasks) + ["seeds"] * (shown[1] == usual_seeds)
    told = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in common.items()
        if name not in hidden and value != parser.get_default(name)
    ]
    data = given.task_data or os.environ.get("KFLATS_DATA") or "hub"
    scratch = Path(tempfile.gettempdir()) / f"kflats-quick-{os.getuid()}"
    return Asked(
        tasks=asked_tasks,
        seeds=asked_seeds,
        source=given.source,
        task_data=None if data == "hub" else Path(data),
        quick=given.quick,
        resume=given.resume,
        tables=given.tables,
        pages=not given.no_pages,
        results=given.results or (scratch / "results" if given.quick else ROOT / "experiments" / "results"),
        models=given.models or (scratch / "models" if given.quick else ROOT / "build" / "task-models"),
        command=" ".join(["python", f"experiments/{Path(sys.argv[0]).name}", *told, "--resume"]),
        more=given,
        shown=shown,
        other_tasks=others,
    )


def _whole(word: str) -> int:
    if not word.isdigit():
        raise KflatsError(f"--seeds holds {word!r}", hint="whole numbers with commas between them, such as 0,1,2")
    return int(word)


_WHOLE = ("--ks", "--tuned", "--counts", "--epochs")
"""Options that hold whole numbers."""
_SHARES = ("--rates", "--saved")
"""Options that hold what is saved, in %."""
_MAY_BE_EMPTY = ("--ratios", "--before")
"""Options of which an empty one asks for nothing."""


def _check_numbers(option: str, given: object, default: object) -> None:
    """Refuse what is no list of numbers above 0 where the ``default`` is one.

    >>> _check_numbers("--rates", "60,abc", "20,40")
    Traceback (most recent call last):
    kflats.common.errors.KflatsError: --rates 60,abc is not supported: 'abc' is no number above 0 and below 100. Try: \
numbers with commas between them, such as 20,40.
    """
    if not isinstance(given, str) or not isinstance(default, str) or (not given and option in _MAY_BE_EMPTY):
        return
    if not default or not all(map(_is_number, default.split(","))):
        return
    whole, share = option in _WHOLE, option in _SHARES
    for word in given.split(","):
        if not _is_number(word) or (whole and not word.isdigit()) or (share and float(word) >= 100):
            what = f"{'whole ' * whole}number above 0{' and below 100' * share}"
            raise KflatsError(
                f"{option} {given} is not supported: {word!r} is no {what}",
                hint=f"numbers with commas between them, such as {default}",
            )


def _is_number(word: str) -> bool:
    try:
        return 0 < float(word) < float("inf")
    except ValueError:
        return False


def carry_out(cells: Iterable[tuple[Cell, Callable[[], Scores]]], log: Log, asked: Asked) -> None:
    """Run each cell that the log does not hold (all of them without ``--resume``), and append it to the log."""
    now = commit()
    for cell, compute in cells:
        if asked.resume:
            done = log.find(cell.key)
            if done is None and (done := Log(log.path).find(cell.key)) is not None:
                log.runs.append(done)  # another process made it meanwhile
            if done is not None and done.is_current:
                continue
        began = time.monotonic()
        scores = compute()
        place = {f.name: getattr(cell, f.name) for f in fields(cell) if f.name != "algorithms"}
        run = Run(
            key=cell.key,
            **place,
            **{f.name: getattr(scores, f.name) for f in fields(scores)},
            seconds=round(time.monotonic() - began, 1),
            algorithms=versions_of(cell.algorithms),
            libraries=libraries(),
            commit=now,
        )
        log.add(run)
        tuned = "" if run.tuned is None else f", {run.tuned:.4f} after {run.epochs} epochs"
        after = "" if run.compressed is None else f" -> {run.compressed:.4f}"
        print(
            f"{cell.task} {cell.method} {cell.size} seed {cell.seed}: {run.original:.4f}{after}{tuned}"
            f" ({run.seconds:.0f} s)",
            flush=True,
        )


class Experiment(Protocol):
    """One command's cells, and the page of what has run.

    Args:
        name: of the log. asked: the options.
    """

    name: str
    asked: Asked

    @property
    def page(self) -> str:
        """The name of the page."""
        ...

    def cells(self, log: Log) -> Iterable[tuple[Cell, Callable[[], Scores]]]:
        """What is to be run, in this order; the log tells what has run so far."""
        ...

    def publish(self, log: Log) -> None:
        """Write the page."""
        ...


def check_page(path: Path, command: str) -> None:
    """Refuse to write the page of a command over that of another, which shows other runs.

    Raises:
        KflatsError: ``path`` is the page of another command.
    """
    if not path.is_file():
        return
    shown = next((line.strip() for line in path.read_text("utf-8").splitlines() if line.startswith("    ")), "")
    if shown != command:
        raise KflatsError(
            f"{path} is the page of another command: {shown}",
            cause=f"it would be replaced by that of: {command}",
            hint="the command of the page, --no-pages, or --results FOLDER",
        )


def conduct(make: Callable[[Asked], Experiment], asked: Asked) -> None:
    """Run what the log does not hold, unless tables alone are asked for; then write the page.

    Args:
        make: the experiment of some options.
    """
    experiment = make(asked)
    if asked.pages:
        check_page(asked.results / f"{make(asked.of_page).page}.md", asked.command)
    path = asked.results / f"{experiment.name}.jsonl"
    if not asked.tables:
        log = Log(path)
        carry_out(experiment.cells(log), log, asked)
    if asked.pages:
        make(asked.of_page).publish(Log(path))  # with what other processes ran meanwhile
