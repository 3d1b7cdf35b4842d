"""A task's examples, from a local folder or from the Hugging Face hub, every row checked.

A folder holds one file a split, plain or gzip'd UTF-8 TSV without quoting:

    sentence1<TAB>sentence2<TAB>label      sentence tasks; sentence2 empty or absent in tasks of one text
    token<TAB>...<TAB>ner                  CoNLL-2003: a word a line, an empty line between sentences
    any text                               language modelling: split.txt

Both ``FOLDER/mrpc/dev.tsv.gz`` and ``FOLDER/dev.tsv.gz`` are read. The name of a split is the name of its file. A
missing split is an error: no other split replaces it, because scores on two splits cannot be compared.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from kflats.common.errors import KflatsError
from kflats.tasks.task import Task, find_task

# Names of the same split in folders and on the hub.
_SAME = {"dev": ("dev", "validation", "valid", "dev_matched", "validation_matched")}


@dataclass(frozen=True)
class Examples:
    """Examples of one split, in the file's order.

    Args:
        task, split, source: the task, its split, and the file or the hub repository.
        inputs: one tuple per example: its one or two texts; for tokens its words; for language one paragraph.
        labels: a class number or a float per example; for tokens a tuple of class numbers; for language empty.
    """

    task: Task
    split: str
    source: str
    inputs: tuple[tuple[str, ...], ...]
    labels: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.inputs:
            raise KflatsError(f"{self.source} has no examples", cause="the file holds only a header, or blank lines")

    def __len__(self) -> int:
        return len(self.inputs)


def load_examples(task: str | Task, split: str = "dev", task_data: str | os.PathLike[str] | None = None) -> Examples:
    """The examples of one split of a task.

    Args:
        task: a name (``kflats.tasks.task.TASKS``) or a ``Task``.
        split: the file's name without ".tsv.gz". "dev" also finds "valid", "validation" and "dev_matched".
        task_data: a folder in the form above; None: the hub, through the package ``datasets``.

    Raises:
        KflatsError: an unknown task, a missing split (the error lists the splits of the folder), a file without header,
            columns or rows, an unknown label or one out of range; no network or no ``datasets`` for the hub.
    """
    task = find_task(task)
    if task_data is None:
        return _from_hub(task, split)
    path = _file(task, split, Path(task_data).expanduser())
    lines = _read(path).split("\n")
    if task.kind == "language":
        return Examples(task, split, str(path), tuple((line,) for line in lines if line.strip()), ())
    if task.kind == "token":
        words = groupby(_cells(path, lines, ("token", "ner")), key=lambda row: not row[1])
        sentences = [list(rows) for blank, rows in words if not blank]
        inputs = tuple(tuple(word for _, (word, _) in rows) for rows in sentences)
        tags = tuple(tuple(_number(task, tag, where) for where, (_, tag) in rows) for rows in sentences)
        return Examples(task, split, str(path), inputs, tags)
    texts = ("sentence1", "sentence2") if task.pairs else ("sentence1",)
    examples = [(where, cells) for where, cells in _cells(path, lines, (*texts, "label")) if cells]
    labels = tuple(_number(task, cells[-1], where) for where, cells in examples)
    return Examples(task, split, str(path), tuple(tuple(cells[:-1]) for _, cells in examples), labels)


def _file(task: Task, split: str, folder: Path) -> Path:
    if not folder.is_dir():
        raise KflatsError(
            f"there is no data folder {folder}",
            hint="task_data=FOLDER, or None for the hub",
            command="--task-data FOLDER, or leave it out for the hub",
        )
    ending = "txt" if task.kind == "language" else "tsv"
    inner = folder / task.folder
    where = inner if task.folder and inner.is_dir() else folder
    if not split or Path(split).name != split:
        raise KflatsError(f"{split!r} is not the name of a split", hint="train or dev")
    for name in _SAME.get(split, (split,)):
        for path in (where / f"{name}.{ending}", where / f"{name}.{ending}.gz"):
            if path.is_file():
                return path
    there = sorted(
        {p.name.split(".")[0] for p in (*where.glob(f"*.{ending}"), *where.glob(f"*.{ending}.gz")) if p.is_file()}
    )
    raise KflatsError(
        f"{where} has no split {split!r} of the task {task.name!r}",
        cause=f"there is no {split}.{ending} or {split}.{ending}.gz",
        hint=f"one of the folder's splits: {', '.join(there[:8])}" if there else "the folder with that file",
    )


def _read(path: Path) -> str:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise KflatsError(
            f"{path} is not UTF-8 (byte {error.start})",
            cause="another encoding",
            hint="convert it, for example: iconv -f latin1 -t utf-8",
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise KflatsError(f"{path} cannot be read: {error}", cause="a damaged or unfinished file") from error
    if not text.strip():
        raise KflatsError(f"{path} is empty", hint="the complete file")
    return text


def _cells(path: Path, lines: list[str], wanted: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(place for error messages, cells of the ``wanted`` columns) of each line after the header; [] of a blank line."""
    names = lines[0].rstrip("\r").split("\t")
    if missing := [name for name in wanted if name not in names]:
        raise KflatsError(
            f"{path} has no column {missing[0]!r}; its first line is {lines[0][:60]!r}",
            cause="a file without a header, or with other columns",
            hint=f"a first line with {', '.join(wanted)}, separated by tabs",
        )
    for number, line in enumerate(lines[1:], 2):
        where, cells = f"line {number} of {path}", line.rstrip("\r").split("\t")
        blank = not line.strip() if "token" in wanted else not line.strip("\r")
        if not blank and len(cells) != len(names):
            raise KflatsError(
                f"{where} has {len(cells)} columns, its header {len(names)}",
                cause="quoting, or a tab inside a text; the form of these files has neither",
            )
        yield where, [] if blank else [cells[names.index(name)] for name in wanted]


def _number(task: Task, value: Any, where: str) -> Any:
    """A label as a class number, or as the float of a regression; both are checked to be in range."""
    low, high = task.limits or (-math.inf, math.inf)
    if task.labels:
        low, high = 0, len(task.labels) - 1
    try:
        number = float(value) if not task.labels else task.labels.index(value) if value in task.labels else int(value)
    except (TypeError, ValueError) as error:
        raise KflatsError(
            f"{where} has the label {str(value)[:30]!r}",
            hint="one of " + ", ".join(task.labels) if task.labels else "a number",
        ) from error
    if not (low <= number <= high and math.isfinite(number)):
        raise KflatsError(
            f"{where} has the label {number}, out of {low:g} to {high:g}",
            cause="hidden labels of a test split, or a file of another task",
        )
    return number


def _from_hub(task: Task, split: str) -> Examples:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise KflatsError(
            "tasks of the hub need the package datasets",
            hint="pip install 'kflats[tasks]', or a local folder: task_data=FOLDER",
            command="pip install 'kflats[tasks]', or a local folder: --task-data FOLDER",
        ) from error
    if task.hub is None:
        raise KflatsError(
            f"the task {task.name!r} has no repository on the hub",
            hint="a local folder: task_data=FOLDER",
            command="a local folder: --task-data FOLDER",
        )
    hub = task.hub
    where = f"{hub.repository} ({hub.configuration or 'its only configuration'})"
    name = {"dev": "validation_matched" if task.name == "mnli" else "validation"}.get(split, split)
    try:
        rows = load_dataset(hub.repository, hub.configuration, split=name, revision=hub.revision)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise KflatsError(
            f"{where} gives no split {name!r}: {reason[:160]}",
            cause="no network, or no such split",
            hint="another split, or a local folder: task_data=FOLDER",
            command="another --split, or a local folder: --task-data FOLDER",
        ) from error
    first = list(rows[hub.columns[0]])
    if task.kind == "language":
        return Examples(task, name, where, tuple((text,) for text in first if text.strip()), ())
    inputs = first if task.kind == "token" else zip(*(list(rows[column]) for column in hub.columns), strict=True)
    labels = [
        tuple(_number(task, tag, f"row {i} of {where}") for tag in label)
        if isinstance(label, list | tuple)
        else _number(task, label, f"row {i} of {where}")
        for i, label in enumerate(list(rows[hub.label]))
    ]
    return Examples(task, name, where, tuple(map(tuple, inputs)), tuple(labels))
