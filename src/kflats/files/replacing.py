"""Files that are there completely or not at all: written aside, made durable, and renamed into place."""

from __future__ import annotations

import os
import stat
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
    aside.touch()
    readable = stat.S_IMODE(aside.stat().st_mode)  # as the system makes files: libraries may make more private ones
    aside.unlink()  # whoever writes nothing must not leave an empty file
    try:
        yield aside
        aside.chmod(readable)
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
