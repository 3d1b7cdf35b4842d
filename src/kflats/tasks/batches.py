"""Examples of tasks, from a local folder or from the Hugging Face hub, as token ids and batches.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError, first_line
from kflats.common.paths import expanded
from kflats.common.release import needed
from kflats.common.texts import (
    IGNORED,
    Tokenizer,
    batches_by_length,
    check_ids,
    pad,
    pad_id,
    padded_batch,
    required,
    token_limit,
    tokenize,
    tokenize_texts,
)
from kflats.evaluation.running import Batch
from kflats.tasks.task import Task, check_head, find_task

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
    path = _file(task, split, expanded(task_data))
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
        raise KflatsError(f"there is no data folder {folder}", hint="task_data=FOLDER; without it the hub is asked")
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
            f"{path} is not UTF-8 (byte {error.start})", hint="convert it, for example: iconv -f latin1 -t utf-8"
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
    library = needed("datasets", "kflats[tasks]", "a task of the hub, which has no local folder,")
    if task.hub is None:
        raise KflatsError(
            f"the task {task.name!r} has no repository on the hub", hint="a local folder: task_data=FOLDER"
        )
    hub = task.hub
    where = f"{hub.repository} ({hub.configuration or 'its only configuration'})"
    name = {"dev": "validation_matched" if task.name == "mnli" else "validation"}.get(split, split)
    try:
        rows = library.load_dataset(hub.repository, hub.configuration, split=name, revision=hub.revision)
    except (OSError, ValueError, RuntimeError) as error:
        raise KflatsError(
            f"{where} gives no split {name!r}: {first_line(error)[:160]}",
            hint="another split, or a local folder: task_data=FOLDER",
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


@dataclass(frozen=True)
class Feature:
    """One example as token ids, not padded.

    Args:
        inputs: token ids, and token types if the tokenizer gives them; lists of equal length.
        labels: a class in the *model's* numbering, a float, a label per token (-100: none), or None.
        words: in token tasks the index of the word of each labelled token.
        place: index of the example in its split.
    """

    inputs: dict[str, list[int]]
    labels: int | float | list[int] | None = None
    words: tuple[int, ...] = ()
    place: int = 0

    def __len__(self) -> int:
        return len(self.inputs["input_ids"])


def task_batches(
    task: str | Task,
    tokenizer: Tokenizer,
    split: str = "train",
    batch: int = 16,
    max_length: int = 128,
    limit: int | None = None,
    *,
    task_data: str | os.PathLike[str] | None = None,
    model: nn.Module | None = None,
    seed: int = 0,
) -> list[dict[str, Tensor]]:
    """Batches with labels, for ``model(**batch)``. Importance is measured on them.

    Args:
        task, split, task_data: as ``kflats.tasks.batches.load_examples``.
        tokenizer: the model's.
        batch: examples per batch. Examples of similar length share a batch; the longest come first.
        max_length: tokens per example; longer examples are cut. For language tasks the length of each block.
        limit: number of examples, drawn by ``seed``; None: all.
        model: its head is checked, and labels follow its own numbering. None: labels follow the task's numbering.

    Returns:
        Dicts of ``input_ids``, ``attention_mask``, and ``token_type_ids`` if the tokenizer gives them, all
        (examples, tokens) int64, and ``labels``: (examples,) or (examples, tokens). "sts" has no labels; each of its
        texts is an example.

    Raises:
        KflatsError: as ``load_examples``; a batch size or ``limit`` below 1; a ``max_length`` below 2; a head that does
            not fit the task; a config without ``pad_token_id`` for tasks of sentences; a tokenizer of another model.
    """
    rows = features(load_examples(task, split, task_data), tokenizer, max_length, limit=limit, model=model, seed=seed)
    padding_id = pad_id(tokenizer, model)
    return [collate_features(part, padding_id) for _, part in feature_batches(rows, batch)]


def features(
    examples: Examples,
    tokenizer: Tokenizer,
    max_length: int = 128,
    *,
    limit: int | None = None,
    model: nn.Module | None = None,
    seed: int = 0,
) -> list[Feature]:
    """``examples`` as token ids, in their order; arguments as ``task_batches``.

    Raises:
        KflatsError: no tokenizer, a tokenizer of another model, a ``limit`` below 1, a ``max_length`` below 2, a head
            that does not fit the task.
    """
    task = examples.task
    tokenizer = required(tokenizer)
    if max_length < 2 or (limit is not None and limit < 1):
        raise KflatsError(
            f"max_length={max_length}, limit={limit} is not supported",
            hint="max_length of 2 or more, limit of 1 or more",
        )
    order = tuple(range(len(task.labels) or 1)) if model is None else check_head(model, task)
    config = getattr(model, "config", None)
    if config is not None and task.kind in ("classification", "regression") and config.pad_token_id is None:
        raise KflatsError(
            f"the task {task.name!r} is not supported with a model whose config has no pad_token_id",
            hint="add pad_token_id to the model's config.json",
        )
    if task.kind == "language":
        return _sample(_blocks(examples, tokenizer, max_length, model), limit, seed)
    picked = _sample(list(range(len(examples))), limit, seed)
    if task.kind == "similarity":
        places = [i for i in picked for _ in examples.inputs[i]]
        texts = text_features([text for i in picked for text in examples.inputs[i]], tokenizer, max_length, model)
        return [replace(feature, place=i) for feature, i in zip(texts, places, strict=True)]
    if task.kind == "token":
        return _token_features(examples, picked, tokenizer, max_length, order, model)
    columns = zip(*(examples.inputs[i] for i in picked), strict=True)
    rows = _rows(tokenize(tokenizer, *columns, max_length=max_length, model=model))
    labels = [order[examples.labels[i]] if task.labels else examples.labels[i] for i in picked]
    return [Feature(row, label, place=i) for row, label, i in zip(rows, labels, picked, strict=True)]


def text_features(
    texts: Sequence[str], tokenizer: Tokenizer, max_length: int = 128, model: nn.Module | None = None
) -> list[Feature]:
    """Texts without labels, for the distillation of an encoder without a task head."""
    if not texts:
        raise KflatsError("there are no texts", hint="give at least one sentence")
    return [Feature({"input_ids": row}) for row in tokenize_texts(tokenizer, texts, max_length, model)]


def collate_features(
    rows: Sequence[Feature], padding_id: int = 0, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """One batch, padded at the right: ids with ``padding_id``, types with 0, labels with -100.

    >>> collate_features([Feature({"input_ids": [5, 6]}, 1), Feature({"input_ids": [7]}, 0)])["attention_mask"].tolist()
    [[1, 1], [1, 0]]
    """
    batch = padded_batch([row.inputs for row in rows], padding_id, device)
    labels: list[Any] = [row.labels for row in rows]
    if labels[0] is not None:
        batch["labels"] = (pad(labels, IGNORED) if isinstance(labels[0], list) else torch.tensor(labels)).to(device)
    return batch


def feature_batches(rows: Sequence[Feature], batch: int) -> Iterator[tuple[list[int], list[Feature]]]:
    """(places in ``rows``, features) of each batch: features of similar length together, the longest first."""
    for places in batches_by_length([len(row) for row in rows], batch):
        yield places, [rows[i] for i in places]


def uncollate(batches: Sequence[Batch]) -> list[Feature]:
    """The examples of prepared batches, without padding, so that every epoch can mix them in a new order.

    Raises:
        KflatsError: no batches, or one without ``input_ids`` and rows of tokens.
    """
    rows = []
    for batch in batches:
        tensors = {n: t for n, t in batch.items() if isinstance(t, Tensor)} if isinstance(batch, Mapping) else {}
        ids = tensors.pop("input_ids", torch.empty(0))
        if ids.ndim != 2 or not ids.numel():
            raise KflatsError(
                "a batch must be a dict of tensors with input_ids (examples, tokens)",
                hint="batches such as task_batches makes",
            )
        keep = tensors.pop("attention_mask", torch.ones_like(ids)).bool()
        labels = tensors.pop("labels", None)
        inputs = {"input_ids": ids} | {n: t for n, t in tensors.items() if t.shape == ids.shape}
        for i in range(ids.shape[0]):
            label = None if labels is None else labels[i][keep[i]] if labels.shape == ids.shape else labels[i]
            columns = {name: t[i][keep[i]].tolist() for name, t in inputs.items()}
            rows.append(Feature(columns, None if label is None else label.tolist()))
    if not rows:
        raise KflatsError("there are no batches", hint="batches of a task, or of texts")
    return rows


def _rows(encoded: Any) -> list[dict[str, list[int]]]:
    return [dict(zip(encoded, map(list, row), strict=True)) for row in zip(*encoded.values(), strict=True)]


def _token_features(
    examples: Examples,
    picked: list[int],
    tokenizer: Tokenizer,
    max_length: int,
    order: tuple[int, ...],
    model: nn.Module | None,
) -> list[Feature]:
    """The first token of each word has the word's label; the other tokens have none."""
    if not getattr(tokenizer, "is_fast", False):
        raise KflatsError(
            f"the task {examples.task.name!r} is not supported with a slow tokenizer",
            hint="a fast tokenizer (tokenizer.json)",
        )
    words_of = [examples.inputs[i] for i in picked]
    encoded = tokenize(
        tokenizer, list(map(list, words_of)), max_length=max_length, model=model, is_split_into_words=True
    )
    rows = []
    for row, (inputs, place) in enumerate(zip(_rows(encoded), picked, strict=True)):
        words = encoded.word_ids(row)
        first = [word is not None and word != before for before, word in zip([None, *words[:-1]], words, strict=True)]
        tags = examples.labels[place]
        labels = [order[tags[word]] if is_first else IGNORED for word, is_first in zip(words, first, strict=True)]
        rows.append(Feature(inputs, labels, tuple(compress(words, first)), place))
    return rows


def _blocks(examples: Examples, tokenizer: Tokenizer, max_length: int, model: nn.Module | None) -> list[Feature]:
    """The split as one text, cut into blocks without special tokens. A block of one token has nothing to predict."""
    text = "\n".join(paragraph for (paragraph,) in examples.inputs)
    ids = list(tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])
    check_ids([ids], model)
    limit = token_limit(tokenizer, max_length, model)
    blocks = [ids[start : start + limit] for start in range(0, len(ids), limit)]
    return [Feature({"input_ids": block}, list(block)) for block in blocks if len(block) > 1]


def _sample(items: list[Any], limit: int | None, seed: int) -> list[Any]:
    if limit is None or limit >= len(items):
        return items
    chosen = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed))[:limit]
    return [items[i] for i in sorted(chosen.tolist())]
