"""Files that are there completely or not at all: written aside, made durable, and renamed into place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Where to write what becomes ``path`` at the end; after an exception the old file, if any, is as it was.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "note.txt"
    >>> with replaced(path) as aside:
    ...     written = aside.write_text("whole")
    >>> path.read_text(), len(list(path.parent.iterdir()))
    ('whole', 1)
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield aside
        fsync(aside)
        os.replace(aside, path)
        fsync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Make a file's content, or a folder's list of names, survive a power cut."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders; its renames are journaled
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
