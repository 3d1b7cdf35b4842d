"""Tables in files, read block by block: safetensors, ``.npy``, Parquet and Arrow, in one file or in several.

Methods and codecs ask a table for ``numerics.rows.Rows`` alone. Files of safetensors, ``.npy`` and Arrow are mapped
into memory, so that pages that nobody reads take none. Parquet is decompressed, some thousand rows at a time.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.common.paths import expanded
from kflats.common.release import needed
from kflats.io.mapped import as_tensor, mapped_array, mapped_tensors, read_header, unreadable
from kflats.io.sources import is_coded_table
from kflats.numerics.rows import Rows, TensorRows

_ENDINGS = (".safetensors", ".npy", ".parquet", ".arrow", ".feather")
_PIECE = 2**14  # rows of Parquet and Arrow files that are in memory at a time
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
"""What ends a stream of Arrow: a part of no bytes (its columnar format, "Encapsulated message format")."""
_FLOATS = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))


def open_rows(source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, name: str = "") -> JoinedRows:
    """The rows (n, d) of a table in files, of float16, bfloat16, float32 or float64.

    Args:
        source: a file; a folder, whose files of one kind hold the rows in the order of their names; or several files,
            which hold them in this order. Files whose names begin with a dot are left out, and so are files without
            rows beside others.
        name: of the tensor in files of safetensors, of the column of lists in those of Parquet and Arrow. May be left
            out where there is one. In a model's folder of several files their index says which of them holds it.

    Choose it for a table that is larger than memory. Rows at random places (``take``) of Parquet files cost a group of
    rows each.

    Raises:
        KflatsError: no such file, files of several kinds or widths, a file that cannot be read, more than one tensor or
            column to choose from, numbers that are no floats, missing values, lists of several lengths; numbers in
            names without leading zeros, so that the tenth file comes before the second.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for part in range(2):
    ...         np.save(f"{folder}/rows-{part}.npy", np.full((3, 2), part, dtype=np.float16))
    ...     rows = open_rows(folder)
    ...     rows.shape, rows.take(torch.tensor([5, 0])).tolist()
    ((6, 2), [[1.0, 1.0], [0.0, 0.0]])
    """
    paths = [holder] if (holder := _holder(source, name)) is not None else table_files(source)
    kinds = {path.suffix for path in paths}
    if len(kinds) > 1:
        raise KflatsError(
            f"files of several kinds ({', '.join(sorted(kinds))}) are not one table", hint="files of one kind"
        )
    if not name and kinds == {".safetensors"}:
        _check_names(paths)
    opened: dict[str, Callable[[Path, str], Rows | None]] = {".safetensors": _of_safetensors, ".npy": _of_npy}
    parts: list[Rows] = []
    names: list[str] = []
    for path in paths:
        try:
            part = opened.get(path.suffix, _of_arrow)(path, name)
        except KflatsError as error:
            raise (error if str(path) in error.symptom else error.about(str(path))) from error
        if part is not None:
            parts.append(part)
            names.append(str(path))
    if not parts:
        raise KflatsError(f"{_called(paths)} no rows", hint="a table of one row at least")
    return JoinedRows(parts, names)


def _called(paths: Sequence[Path]) -> str:
    return f"{paths[0]} holds" if len(paths) == 1 else f"{paths[0]} and the {len(paths) - 1} after it hold"


class JoinedRows:
    """The rows of several sources, one after the other.

    Args:
        parts: of the same number of columns, on one device. names: of each, for errors.

    Raises:
        KflatsError: other numbers of columns.

    >>> joined = JoinedRows([TensorRows(torch.zeros(2, 3)), TensorRows(torch.ones(4, 3))], ["first", "second"])
    >>> joined.shape, [start for start, _ in joined.blocks(3)], joined.place(4)
    ((6, 3), [0, 3], 'row 2 of second')
    """

    def __init__(self, parts: Sequence[Rows], names: Sequence[str]) -> None:
        widths = [part.shape[1] for part in parts]
        for width, name in zip(widths, names, strict=True):
            if width != widths[0]:
                raise KflatsError(
                    f"{name} has {width} columns, and {names[0]} has {widths[0]}", hint="files of one table"
                )
        self.parts, self.names = tuple(parts), tuple(names)
        self.dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
        self.device = parts[0].device
        self.firsts = [0, *accumulate(part.shape[0] for part in parts)]
        self.shape = (self.firsts[-1], widths[0])

    def blocks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Blocks of ``size`` rows, also across parts: results do not depend on how a table is cut into files."""
        return _regrouped((block.to(self.dtype) for part in self.parts for _, block in part.blocks(size)), size)

    def take(self, index: Tensor) -> Tensor:
        """The rows at ``index``, in that order."""
        rows = torch.empty(len(index), self.shape[1], dtype=self.dtype, device=self.device)
        for number, mine in _by_part(index, self.firsts):
            rows[mine] = self.parts[number].take(index[mine] - self.firsts[number]).to(self.dtype)
        return rows

    def between(self, first: int, last: int, size: int) -> Iterator[tuple[int, Tensor]]:
        """Rows ``first`` to ``last`` in blocks of ``size``, each with the number of its first row in the whole.

        >>> [(a, len(block)) for a, block in JoinedRows([TensorRows(torch.zeros(9, 1))], [""]).between(2, 7, 4)]
        [(2, 4), (6, 1)]
        """
        for start in range(first, last, size):
            yield start, self.take(torch.arange(start, min(start + size, last)))

    def place(self, row: int) -> str:
        """Where a row comes from, for errors."""
        number = int(np.searchsorted(self.firsts, row, side="right")) - 1
        return f"row {row - self.firsts[number]} of {self.names[number]}"


def _by_part(index: Tensor, firsts: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """The parts that hold the rows ``index``, and which of these rows each holds."""
    of = torch.bucketize(index, torch.tensor(firsts[1:], device=index.device), right=True)
    order = torch.argsort(of, stable=True)
    numbers, counts = of[order].unique_consecutive(return_counts=True)
    yield from zip(numbers.tolist(), order.split(counts.tolist()), strict=True)


RowWeights: TypeAlias = str | os.PathLike[str] | Tensor | npt.NDArray[np.number]
"""A ``.npy`` file of one number a row, or the numbers themselves."""


def open_weights(source: RowWeights, rows: int) -> Tensor:
    """One weight for each of so many rows; those of a file are mapped.

    Raises:
        KflatsError: another number of weights, something else than numbers, or a file that cannot be read.

    >>> open_weights(np.array([3, 1, 0]), 3)
    tensor([3, 1, 0])
    """
    hint = f"a .npy file or an array of {rows:,} numbers, one for each row"
    if isinstance(source, str | os.PathLike):
        path = expanded(source)
        if path.suffix != ".npy":
            raise KflatsError(f"{path} is not supported as weights of rows", hint=hint)
        if not path.is_file():
            raise KflatsError(f"there is no file {path}", hint=hint)
        try:
            found: Tensor | npt.NDArray[np.generic] = mapped_array(path)
        except Exception as error:  # a damaged head makes numpy raise many kinds
            raise unreadable(path, error) from error
    else:
        try:
            found = source.detach() if isinstance(source, Tensor) else np.asarray(source)
        except ValueError as error:  # lists of several lengths
            raise KflatsError("the weights of rows are no array", hint=hint) from error
    if isinstance(found, np.ndarray):
        numbers = found.dtype.kind in "fiu" and found.dtype.itemsize <= 8 and found.dtype.isnative
        made = as_tensor(np.ascontiguousarray(found)) if numbers else None
    else:
        numbers = found.layout == torch.strided and found.dtype not in (torch.bool, torch.complex64, torch.complex128)
        made = found.cpu() if numbers and not found.is_meta else None
    if made is None or made.shape != (rows,):
        what = f"{found.dtype} of shape {tuple(found.shape)}"
        raise KflatsError(f"{what} is not supported as weights of rows", hint=hint)
    return made


def _regrouped(pieces: Iterable[Tensor], size: int) -> Iterator[tuple[int, Tensor]]:
    """The rows of pieces of at most ``size`` rows in blocks of ``size``, the last one of what is left."""
    first, held = 0, list[Tensor]()
    for piece in pieces:
        held.append(piece)
        count = sum(len(one) for one in held)
        if count >= size:
            whole = torch.cat(held) if len(held) > 1 else piece
            yield first, whole[:size]
            first, held = first + size, [whole[size:]] if count > size else []
    if held and sum(len(one) for one in held):
        yield first, torch.cat(held)


def table_files(source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files of a table, as ``open_rows`` finds them."""
    if not isinstance(source, str | os.PathLike):
        if not isinstance(source, Sequence) or not all(isinstance(one, str | os.PathLike) for one in source):
            raise KflatsError(
                f"{type(source).__name__} is not supported as a source of a table",
                hint="a file, a folder, or several files",
            )
        paths = [expanded(one) for one in source]
    elif is_coded_table(source):
        raise KflatsError(f"{source} holds a table that is coded already", hint="the table that it was made of")
    elif (folder := expanded(source)).is_dir():
        shown = (path for path in folder.iterdir() if not path.name.startswith("."))
        paths = sorted(path for path in shown if path.suffix in _ENDINGS and path.is_file())
        _check_order(paths)
    else:
        paths = [folder]
    if not paths:
        raise KflatsError(f"{source} holds no table", hint=f"files that end in {', '.join(_ENDINGS)}")
    for path in paths:
        if not path.is_file():
            raise KflatsError(f"there is no file {path}", hint="the path of a table, or of a folder of its parts")
        if path.suffix not in _ENDINGS:
            raise KflatsError(
                f"{path} is not supported as a table, because its ending says of no known form",
                hint=f"a file that ends in {', '.join(_ENDINGS)}",
            )
    return paths


def _check_order(paths: Sequence[Path]) -> None:
    """Refuse names that are alike but for one number, and whose order is not that of these numbers: rows would have
    other places than their parts."""
    for first, second in pairwise(paths):
        ours, theirs = (re.split(r"(\d+)", path.name) for path in (first, second))
        if len(ours) != len(theirs):
            continue
        unlike = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
        if len(unlike) == 1 and all(part.isdecimal() for part in unlike[0]) and int(unlike[0][0]) > int(unlike[0][1]):
            digits = max(map(len, unlike[0]))
            raise KflatsError(
                f"{first} comes before {second.name} in the order of their names, and after it by their numbers",
                cause="numbers without leading zeros, so that it is not known which rows come first",
                hint=f"numbers of {digits} digits, such as {unlike[0][1].zfill(digits)}, or all files in their order",
            )


def _holder(source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], name: str) -> Path | None:
    """The file of a model's folder that holds the tensor ``name``, where their index says so."""
    if not name or not isinstance(source, str | os.PathLike):
        return None
    for index in sorted(expanded(source).glob("*.safetensors.index.json")):
        try:
            found = json.loads(index.read_text(encoding="utf-8"))["weight_map"].get(name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise unreadable(index, error) from error
        if isinstance(found, str) and Path(found).name == found and (index.parent / found).is_file():
            return index.parent / found
    return None


def _of_safetensors(path: Path, name: str) -> Rows | None:
    sizes = _matrices(path)
    chosen = _only(path, "tensor", [one for one, rows in sizes.items() if rows] or list(sizes), name)
    return TensorRows(mapped_tensors(path, chosen)[chosen]) if sizes[chosen] else None  # read page by page


def _matrices(path: Path) -> dict[str, int]:
    """The names of the tables of floats in a file of safetensors, and their rows."""
    try:
        with path.open("rb") as file:
            _, entries = read_header(file, path)
    except OSError as error:
        raise unreadable(path, error) from error
    return {one: entry.shape[0] for one, entry in entries.items() if len(entry.shape) == 2 and "F" in entry.dtype}


def _check_names(paths: Sequence[Path]) -> None:
    """Refuse files of safetensors whose only tables have several names: they are parts of a model, not of a table."""
    found = {name: path for path in paths if len(sizes := _matrices(path)) == 1 for name, rows in sizes.items() if rows}
    if len(found) > 1:
        (one, first), (other, second) = list(found.items())[:2]
        raise KflatsError(
            f"{first} holds {one!r}, and {second} holds {other!r}, which are not parts of one table",
            hint="the file alone that holds the table, its name (--column NAME) where the folder has an index, or one "
            "name for all parts",
        )


def _of_npy(path: Path, name: str) -> Rows | None:
    if name:
        raise KflatsError(
            f"{path} has no tensor called {name!r}",
            cause="it holds one, without a name",
            hint="leave out the name (--column)",
        )
    try:
        table = mapped_array(path)
    except Exception as error:  # a damaged head makes numpy raise many kinds
        raise unreadable(path, error) from error
    if table.dtype not in _FLOATS:
        raise KflatsError(
            f"{path} holds {table.dtype}, which is not supported as a table",
            hint="float16, float32 or float64 of this machine's byte order",
        )
    return TensorRows(as_tensor(table)) if table.size else None


def _of_arrow(path: Path, name: str) -> Rows | None:
    arrow: Any = needed("pyarrow", "kflats[tables]", f"a table in {path.suffix}")
    try:
        if path.suffix == ".parquet":
            parquet: Any = needed("pyarrow.parquet", "kflats[tables]", "a Parquet file")
            file = parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True)
            counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            if not any(counts):
                return None  # whose columns may be of no type
            column = _column(arrow, path, file.schema_arrow, name)

            def decompressed(group: int) -> Iterator[Any]:
                read = file.iter_batches(_PIECE, row_groups=[group], columns=[column])
                return (batch.column(0) for batch in read)

            return _ArrowRows(path, decompressed, column, counts)
        ipc: Any = needed("pyarrow.ipc", "kflats[tables]", "an Arrow file")
        try:
            file = ipc.open_file(arrow.memory_map(os.fspath(path)))
            schema, count, batch_of = file.schema, file.num_record_batches, file.get_batch
        except arrow.ArrowInvalid:  # the form without an index at its end, in which datasets are kept
            with ipc.open_stream(arrow.memory_map(os.fspath(path))) as stream:
                batches, schema = list(stream), stream.schema  # mapped, unless their numbers are compressed
            _check_end(path)
            count, batch_of = len(batches), batches.__getitem__
        counts = [batch_of(i).num_rows for i in range(count)]
        if not any(counts):
            return None
        column = _column(arrow, path, schema, name)

        def mapped(group: int) -> Iterator[Any]:
            whole = batch_of(group).column(column)
            return (whole.slice(start, _PIECE) for start in range(0, len(whole), _PIECE))

        return _ArrowRows(path, mapped, column, counts)
    except (arrow.ArrowException, OSError) as error:
        raise unreadable(path, error) from error


def _check_end(path: Path) -> None:
    """Refuse a stream that was cut between two of its parts, which reads like a whole one with fewer rows.

    Raises:
        KflatsError: it does not end with the mark that writers put there when they close it.
    """
    with path.open("rb") as file:
        # Files of Arrow before 0.15 begin without this word, and end in zeros alone.
        end = _STREAM_END if file.read(4) == _STREAM_END[:4] else _STREAM_END[4:]
        file.seek(max(0, path.stat().st_size - len(end)))
        if file.read() != end:
            raise KflatsError(
                f"{path} ends without the mark of its end",
                cause="it is cut off, or the program that wrote it did not close it",
                hint="fetch or write the file again",
            )


def _column(arrow: Any, path: Path, schema: Any, name: str) -> str:
    """The column of lists that is chosen."""
    lists = [one.name for one in schema if _is_list(arrow, one.type)]
    return _only(path, "column of lists", lists, name)


class _ArrowRows:
    """A column of lists of floats; ``counts`` of rows in each of its groups, not all 0, whose rows ``read`` gives piece
    by piece.

    The piece that was read last is kept: rows are mostly asked for in their order.
    """

    device = torch.device("cpu")

    def __init__(self, path: Path, read: Callable[[int], Iterator[Any]], column: str, counts: list[int]) -> None:
        self._path, self._read, self._column = path, read, column
        self._firsts = [0, *accumulate(counts)]
        self._width: int | None = None
        group = next(i for i, count in enumerate(counts) if count)
        self._pieces = self._pieces_of(group)
        self._held = (group, *next(self._pieces))
        piece = self._held[2]
        self.dtype = torch.float64 if piece.dtype == torch.float64 else torch.float32
        self.shape = (self._firsts[-1], piece.shape[1])

    def blocks(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """Blocks of ``size`` rows, also across groups."""
        pieces = (piece for group in range(len(self._firsts) - 1) for _, piece in self._pieces_of(group))
        return _regrouped((block.to(self.dtype) for piece in pieces for block in piece.split(size)), size)

    def take(self, index: Tensor) -> Tensor:
        """The rows at ``index``, in that order."""
        rows = torch.empty(len(index), self.shape[1], dtype=self.dtype)
        for group, mine in _by_part(index, self._firsts):
            wanted, order = (index[mine] - self._firsts[group]).sort()
            done = 0
            while done < len(wanted):
                first, piece = self._piece_with(group, int(wanted[done]))
                end = int(torch.searchsorted(wanted, first + len(piece)))
                rows[mine[order[done:end]]] = piece[wanted[done:end] - first].to(self.dtype)
                done = end
        return rows

    def _piece_with(self, group: int, row: int) -> tuple[int, Tensor]:
        """The piece that holds a row of a group, and its first row."""
        if self._held[0] != group or row < self._held[1]:
            self._pieces = self._pieces_of(group)
            self._held = (group, *next(self._pieces))
        while row >= self._held[1] + len(self._held[2]):
            if (following := next(self._pieces, None)) is None:  # reading failed before
                raise unreadable(self._path, ValueError("its rows end too early"))
            self._held = (group, *following)
        return self._held[1:]

    def _pieces_of(self, group: int) -> Iterator[tuple[int, Tensor]]:
        """The pieces of a group, each with its first row: (rows, d), in the type of the file."""
        count, first = self._firsts[group + 1] - self._firsts[group], 0
        columns = self._read(group)
        while first < count:
            try:
                column = next(columns, None)
            except (ValueError, OSError) as error:  # those of pyarrow are one or the other
                raise unreadable(self._path, error) from error
            if column is None:
                raise unreadable(self._path, ValueError("it has fewer rows than its head says"))
            piece = self._numbers(column)
            if len(piece):
                yield first, piece
            first += len(piece)

    def _numbers(self, column: Any) -> Tensor:
        values = column.flatten()
        if column.null_count or values.null_count:
            raise KflatsError(f"{self._path}: missing values in {self._column!r}", hint="a number in every place")
        width = len(values) // max(1, len(column))
        if len(column) and not width:
            raise KflatsError(f"{self._path}: lists without numbers in {self._column!r}", hint="lists of one length")
        lengths = column.value_lengths() if hasattr(column, "value_lengths") else None
        if lengths is not None and len(column) and (lengths.to_numpy(zero_copy_only=False) != width).any():
            raise KflatsError(f"{self._path}: lists of several lengths in {self._column!r}", hint="lists of one length")
        if len(column) and self._width not in (None, width):
            raise KflatsError(
                f"{self._path}: lists of {width} numbers after lists of {self._width}", hint="lists of one length"
            )
        self._width = width if len(column) else self._width
        return torch.from_numpy(np.array(values.to_numpy(zero_copy_only=False))).view(len(column), width)


def _is_list(arrow: Any, kind: Any) -> bool:
    """Whether a column holds lists of floats."""
    types = arrow.types
    listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(listed and types.is_floating(kind.value_type))


def _only(path: Path, what: str, names: list[str], name: str) -> str:
    """The one of ``names`` that is called ``name``, or the only one where that is ""."""
    chosen = [one for one in names if name in ("", one)]
    if len(chosen) == 1:
        return chosen[0]
    listed = ", ".join(names[:8]) + (f", and {len(names) - 8} more" if len(names) > 8 else "")
    if chosen:
        raise KflatsError(f"{path} has more than one {what}: {listed}", hint="the name of one of them (--column NAME)")
    wanted = f" called {name!r}" if name else ""
    hint = f"one of: {listed} (--column NAME), or the file alone that holds it" if names else "a file with such a table"
    raise KflatsError(f"{path} has no {what}{wanted} that is a table of floats", hint=hint)
