"""A task's examples, from a local folder or from the Hugging Face hub, every row checked.

A folder holds one file a split, plain or gzip'd UTF-8 TSV without quoting:

    sentence1<TAB>sentence2<TAB>label      sentence tasks; sentence2 empty or absent where there is one text
    token<TAB>...<TAB>ner                  CoNLL-2003: a word a line, an empty line between sentences
    any text                               language modelling: split.txt

``FOLDER/mrpc/dev.tsv.gz`` and ``FOLDER/dev.tsv.gz`` are both found. A split is the file's own name: nothing stands
in for one that is missing, since a score on a sample of a split is another score.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kflats.common.errors import KflatsError
from kflats.tasks.task import Task, find_task

# One split under its several names, in folders and on the hub.
_SAME = {"dev": ("dev", "validation", "valid", "dev_matched", "validation_matched")}


@dataclass(frozen=True)
class Examples:
    """Examples of one split, in the file's order.

    Args:
        task, split, source: what they are, and the file or the hub's name they came from.
        inputs: one tuple an example: its one or two texts; for tokens its words; for language one paragraph.
        labels: a class number or a float an example; for tokens a tuple of class numbers; for language empty.
    """

    task: Task
    split: str
    source: str
    inputs: tuple[tuple[str, ...], ...]
    labels: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.inputs)


def load_examples(task: str | Task, split: str = "dev", data: str | os.PathLike[str] | None = None) -> Examples:
    """The examples of one split of a task.

    Args:
        task: a name (``kflats.tasks.task.TASKS``) or a ``Task``.
        split: the file's name without ".tsv.gz". "dev" also finds "valid", "validation" and "dev_matched".
        data: a folder in the form above; None: the hub, through the package ``datasets``.

    Raises:
        KflatsError: unknown task, missing split (those that are there are listed), a file without header,
            columns or rows, a label that is none or out of range; no network or no ``datasets`` for the hub.
    """
    found = find_task(task)
    if data is None:
        return _from_hub(found, split)
    path = _file(found, split, Path(data).expanduser())
    lines = _read(path).split("\n")
    if found.kind == "language":
        inputs = tuple((line,) for line in lines if line.strip())
        return _checked(found, split, str(path), inputs, ())
    if found.kind == "token":
        return _checked(found, split, str(path), *_words(found, path, lines))
    return _checked(found, split, str(path), *_sentences(found, path, lines))


def _file(task: Task, split: str, folder: Path) -> Path:
    if not folder.is_dir():
        raise KflatsError(
            f"there is no data folder {folder}",
            hint="data=None for the hub's examples",
            command="leave --task-data out for the hub's examples",
        )
    ending = "txt" if task.kind == "language" else "tsv"
    inner = folder / task.folder
    where = inner if task.folder and inner.is_dir() else folder
    if not split or Path(split).name != split:
        raise KflatsError(f"{split!r} is no name of a split", hint="train or dev")
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
        hint=f"one of the splits that are there: {', '.join(there[:8])}" if there else "the folder with that file",
    )


def _read(path: Path) -> str:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise KflatsError(f"{path} is not UTF-8 (byte {error.start})", cause="another encoding") from error
    except (OSError, EOFError, zlib.error) as error:
        raise KflatsError(f"{path} cannot be read: {error}", cause="a damaged or unfinished file") from error
    if not text.strip():
        raise KflatsError(f"{path} is empty", hint="the whole file")
    return text


def _header(path: Path, line: str, wanted: Sequence[str]) -> dict[str, int]:
    names = line.rstrip("\r").split("\t")
    if missing := [name for name in wanted if name not in names]:
        raise KflatsError(
            f"{path} has no column {missing[0]!r}; its first line is {line[:60]!r}",
            cause="a file without a header, or with other columns",
            hint=f"a first line with {', '.join(wanted)}, separated by tabs",
        )
    return {name: names.index(name) for name in names}


def _sentences(task: Task, path: Path, lines: list[str]) -> tuple[tuple[tuple[str, ...], ...], tuple[Any, ...]]:
    wanted = ("sentence1", "sentence2", "label") if task.pairs else ("sentence1", "label")
    at = _header(path, lines[0], wanted)
    inputs, labels = [], []
    for number, line in enumerate(lines[1:], 2):
        if not line.strip("\r"):
            continue
        cells = line.rstrip("\r").split("\t")
        if len(cells) != len(at):
            raise KflatsError(
                f"line {number} of {path} has {len(cells)} columns, its header {len(at)}",
                cause="quoting, or a tab inside a text: this form has neither",
            )
        inputs.append(tuple(cells[at[name]] for name in wanted[:-1]))
        labels.append(_number(task, cells[at["label"]], f"line {number} of {path}"))
    return tuple(inputs), tuple(labels)


def _words(task: Task, path: Path, lines: list[str]) -> tuple[tuple[tuple[str, ...], ...], tuple[Any, ...]]:
    at = _header(path, lines[0], ("token", "ner"))
    inputs: list[tuple[str, ...]] = []
    labels: list[tuple[int, ...]] = []
    words: list[str] = []
    tags: list[int] = []
    for number, line in enumerate([*lines[1:], ""], 2):
        if line.strip():
            cells = line.rstrip("\r").split("\t")
            if len(cells) != len(at):
                raise KflatsError(f"line {number} of {path} has {len(cells)} columns, its header {len(at)}")
            words.append(cells[at["token"]])
            tags.append(_number(task, cells[at["ner"]], f"line {number} of {path}"))
        elif words:
            inputs.append(tuple(words))
            labels.append(tuple(tags))
            words, tags = [], []
    return tuple(inputs), tuple(labels)


def _number(task: Task, value: Any, where: str) -> Any:
    """A label as a class number, or as a float of a regression, in range."""
    try:
        if not task.labels:
            found = float(value)
            low, high = task.limits or (-math.inf, math.inf)
            if low <= found <= high and math.isfinite(found):
                return found
            raise KflatsError(f"{where} has the label {found}, out of {low:g} to {high:g}")
        number = task.labels.index(value) if value in task.labels else int(value)
    except (TypeError, ValueError) as error:
        if isinstance(error, KflatsError):
            raise
        raise KflatsError(
            f"{where} has the label {str(value)[:30]!r}",
            hint="one of " + ", ".join(task.labels) if task.labels else "a number",
        ) from error
    if not 0 <= number < len(task.labels):
        raise KflatsError(
            f"{where} has the label {number}, out of 0 to {len(task.labels) - 1}",
            cause="hidden labels of a test split, or a file of another task",
        )
    return number


def _checked(
    task: Task, split: str, source: str, inputs: tuple[tuple[str, ...], ...], labels: tuple[Any, ...]
) -> Examples:
    if not inputs:
        raise KflatsError(f"{source} has no examples", cause="only a header, or blank lines")
    return Examples(task, split, source, inputs, labels)


def _from_hub(task: Task, split: str) -> Examples:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise KflatsError(
            "tasks of the hub need the package datasets",
            hint="pip install 'kflats[tasks]', or data=FOLDER, a local one",
            command="pip install 'kflats[tasks]', or --task-data FOLDER, a local one",
        ) from error
    if task.hub is None:
        raise KflatsError(
            f"the hub's name of the task {task.name!r} is not known",
            hint="data=FOLDER",
            command="--task-data FOLDER",
        )
    hub = task.hub
    where = f"{hub.repository} ({hub.configuration or 'its only configuration'})"
    asked = {"dev": "validation_matched" if task.name == "mnli" else "validation"}.get(split, split)
    try:
        rows = load_dataset(hub.repository, hub.configuration, split=asked, revision=hub.revision)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise KflatsError(
            f"{where} gives no split {asked!r}: {reason[:160]}",
            cause="no network, or no such split",
            hint="another split, or data=FOLDER, a local one",
            command="another --split, or --task-data FOLDER, a local one",
        ) from error
    columns = {name: list(rows[name]) for name in (*hub.columns, *(() if task.kind == "language" else (hub.label,)))}
    if task.kind == "language":
        texts = tuple((text,) for text in columns[hub.columns[0]] if text.strip())
        return _checked(task, asked, where, texts, ())
    inputs: tuple[tuple[str, ...], ...]
    if task.kind == "token":
        inputs = tuple(tuple(words) for words in columns[hub.columns[0]])
    else:
        inputs = tuple(zip(*(columns[name] for name in hub.columns), strict=True))
    labels = []
    for number, label in enumerate(columns[hub.label]):
        place = f"row {number} of {where}"
        labels.append(
            tuple(_number(task, tag, place) for tag in label) if task.kind == "token" else _number(task, label, place)
        )
    return _checked(task, asked, where, inputs, tuple(labels))
