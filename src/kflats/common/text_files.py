"""Texts from the files that people have: sentences, paragraphs, a book, JSON lines, a table's column, a data set."""

from __future__ import annotations

import csv
import gzip
import json
import os
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import Any

from kflats.common.errors import KflatsError, KflatsWarning
from kflats.common.release import needed
from kflats.common.sentences import unwrapped

MOST = 20_000_000
"""Characters that are read of a file: about five million tokens. Counts and measurements gain nothing from more."""
_STRETCH = 50_000  # characters; of a longer file, stretches of about this length are read
_LONGEST = 1_000_000  # characters of one line of plain text; a longer line is several records
_PEEK = 200  # rows by which a column is chosen
_JSON, _DATA_SET = (".json", ".jsonl", ".ndjson"), (".parquet", ".arrow")
_TABLES = (*_JSON, *_DATA_SET, ".csv", ".tsv")
_FORMS = "plain text, JSON lines, CSV or TSV in UTF-8, also as .gz; Parquet, or a folder of files of one kind"


def read_texts(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The records of a file of texts, in order, without surrounding white space; blank ones are left out.

    | file | its records |
    | --- | --- |
    | plain text | the lines; of a text with hard line breaks (a book) the paragraphs between blank lines |
    | ``.jsonl``, ``.json`` | the strings of a field: JSON lines, or one array |
    | ``.csv``, ``.tsv`` | the cells of a column; the first row names the columns |
    | ``.parquet``, ``.arrow``, a folder of ``datasets`` | the strings of a column; of several splits "train" |
    | a folder of files of one kind | the records of all of them, in the order of their names |

    Each may be compressed (``.gz``). The column is "text" if there is one, else the only one with texts of several
    words; ``FILE:COLUMN`` names another.

    Limit: of more than ``MOST`` characters (20 million), stretches are read that are evenly spaced over the file; a
    warning says how much. A JSON array is read whole before.

    Args:
        path: a file or folder, or ``FILE:COLUMN``.

    Raises:
        KflatsError: a file that is missing, empty, binary, damaged or in another encoding; a column that is not there,
            or several that could be meant; a data set without the package ``datasets``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.csv").write_text('id,review\\n7,"Good, but slow."\\n8,I like it.\\n')
    ...     read_texts(Path(folder, "a.csv"))
    ('Good, but slow.', 'I like it.')
    """
    before, _, name = os.fspath(path).rpartition(":")
    named = bool(before) and not Path(path).exists() and Path(before).exists()
    place, column = (Path(before), name) if named else (Path(path), None)
    files = _files(place)
    try:
        records, seen = _bounded(record for file in files for record in _column(_rows(file), column, file))
    except KflatsError:
        raise
    except OSError as error:
        raise KflatsError(f"the texts file {place} cannot be read: {error.strerror or error}", hint=_FORMS) from error
    except (ValueError, EOFError, RuntimeError, zlib.error, csv.Error) as error:
        raise KflatsError(
            f"{place} does not hold texts that can be read: {error!s:.200}",
            cause="a binary or damaged file, or an encoding other than UTF-8",
            hint=f"{_FORMS}; for example iconv -f latin1 -t utf-8 converts one",
        ) from error
    kept = sum(map(len, records))
    if not any(file.is_dir() or _suffix(file) in _TABLES for file in files):  # lines, perhaps parts of paragraphs
        records = unwrapped("\n".join(records)).split("\n")
    texts = tuple(whole for text in records if (whole := text.strip().encode(errors="replace").decode()))
    if not texts:
        raise KflatsError(f"{path} has no text", cause="an empty file or column", hint=_FORMS)
    if kept < seen:
        said = f"{path} has {seen:,} characters; {kept:,} are read, in stretches evenly spaced"
        warnings.warn(KflatsWarning(said), stacklevel=2)
    return texts


def _suffix(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _files(path: Path) -> list[Path]:
    """The file or data set itself; of another folder the files that hold records."""
    if not path.is_dir() or any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return [path]
    known = [file for file in sorted(path.rglob("[!.]*")) if file.is_file() and _suffix(file) in (".txt", *_TABLES)]
    known = [file for file in known if not file.name.startswith("dataset_info")]
    if len(kinds := sorted({_suffix(file) for file in known})) != 1:
        raise KflatsError(f"the folder {path} holds {' and '.join(kinds) or 'no'} files of texts", hint=_FORMS)
    return known


def _rows(path: Path) -> Iterator[Any]:
    """The rows of a table or data set as mappings, or the lines of plain text."""
    suffix = _suffix(path)
    if path.is_dir() or suffix in _DATA_SET:
        yield from _data_set(path)
        return
    with open(path, "rb") as raw:
        data = gzip.GzipFile(fileobj=raw) if raw.peek(2).startswith(b"\x1f\x8b") else raw
        head = data.peek(8192)
        if b"\0" in head:
            raise ValueError("it has zero bytes")
        with TextIOWrapper(data, encoding="utf-8-sig", newline="") as file:
            if suffix in (".csv", ".tsv"):
                csv.field_size_limit(MOST)  # a cell may hold an article
                first = file.readline()
                if suffix == ".tsv":
                    yield from csv.DictReader(chain([first], file), delimiter="\t", quoting=csv.QUOTE_NONE)
                else:
                    yield from csv.DictReader(chain([first], file), delimiter=max(",;\t|", key=first.count))
            elif suffix in _JSON:
                array = head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
                yield from json.load(file) if array else (json.loads(line) for line in file if line.strip())
            else:
                yield from (line.strip() for line in iter(lambda: file.readline(_LONGEST), ""))
                yield ""  # the next file begins another paragraph


def _data_set(path: Path) -> Iterator[Mapping[str, Any]]:
    datasets = needed("datasets", "kflats[tasks]", f"reading {path}")
    if path.is_dir():
        rows = datasets.load_from_disk(str(path))
        if isinstance(rows, Mapping):
            rows = rows["train"] if "train" in rows else next(iter(rows.values()))
    else:
        rows = datasets.load_dataset(_suffix(path)[1:], data_files=str(path), split="train", streaming=True)
    # Columns of images and sounds would be decoded.
    strings = [name for name, kind in (rows.features or {}).items() if "string" in str(getattr(kind, "dtype", ""))]
    return iter(rows.select_columns(strings))


def _column(rows: Iterator[Any], column: str | None, path: Path) -> Iterator[str]:
    """The strings of one column; a row that is a string itself is a record."""
    first = list(islice(rows, _PEEK))
    tables = [row for row in first if isinstance(row, Mapping)]
    names = list(dict.fromkeys(name for row in tables for name in row if isinstance(name, str)))
    if column is not None and column not in names:
        plain = bool(first) and all(isinstance(row, str) for row in first)
        nothing = f"{path} alone: its rows are texts without columns" if plain else "a file whose rows have columns"
        hint = f"one of: {', '.join(names)}" if names else nothing
        raise KflatsError(f"{path} has no column {column!r}", hint=hint)
    chosen, may_be_quoted = column or _chosen(names, tables, path), _suffix(path) == ".tsv"
    for row in chain(first, rows):
        value = row.get(chosen) if isinstance(row, Mapping) else row
        if isinstance(value, str):
            quoted = may_be_quoted and len(value) > 1 and value[0] == value[-1] == '"'
            yield value[1:-1].replace('""', '"') if quoted else value


def _chosen(names: Sequence[str], rows: Sequence[Mapping[str, Any]], path: Path) -> str:
    if len(names) < 2 or "text" in names:
        return "text" if "text" in names else "".join(names)
    cells = {name: [row[name] for row in rows if row.get(name)] for name in names}
    prose = [name for name in names if 2 * sum(" " in v for v in cells[name] if isinstance(v, str)) > len(cells[name])]
    if len(prose) == 1:
        return prose[0]
    columns = prose or names
    symptom = f"{path} has {len(prose) or 'no'} columns of texts"
    raise KflatsError(symptom, cause=f"it has {', '.join(columns)}", hint=f"name one: {path}:{columns[0]}")


def _bounded(records: Iterable[str]) -> tuple[list[str], int]:
    """Evenly spaced stretches of the records, of at most ``MOST`` characters, and how many characters there are.

    One pass in bounded memory: where the stretches kept grow too long, every other one goes, and so on.
    """
    kept, step, index, seen, end = dict[int, list[str]](), 1, 0, 0, _STRETCH
    for record in records:
        if seen >= end:
            index, end = index + 1, seen + _STRETCH
        seen += len(record)
        if index % step == 0:
            kept.setdefault(index, []).append(record[:MOST])
        while seen / step > MOST and len(kept) > 1:
            step *= 2
            kept = {index: stretch for index, stretch in kept.items() if index % step == 0}
    return [record for stretch in kept.values() for record in stretch], seen
