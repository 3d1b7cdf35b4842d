"""Several files of one folder that change together or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kflats.errors import KflatsError
from kflats.files.replacing import fsync

_BEFORE, _ASIDE = ".kflats-before", ".kflats-aside"


@contextmanager
def replaced_together(folder: Path) -> Iterator[Path]:
    """Where to write new versions of files of ``folder``, under their names; at the end all take their places.

    The old files stay in ``.kflats-before`` until the last new one is in its place. After an exception (an interrupt
    too) they are put back; after a crash or ``kill -9`` ``check_whole`` refuses the folder and ``put_back`` repairs it.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in "ab":
    ...     _ = (folder / name).write_text("old")
    >>> with replaced_together(folder) as aside:
    ...     for name in "ab":
    ...         _ = (aside / name).write_text("new")
    >>> sorted((path.name, path.read_text()) for path in folder.iterdir())
    [('a', 'new'), ('b', 'new')]
    """
    put_back(folder)
    aside, before = folder / _ASIDE, folder / _BEFORE
    aside.mkdir()
    try:
        yield aside
        names = sorted(path.name for path in aside.iterdir())
        kept = aside / "before"
        kept.mkdir()
        for name in names:
            shutil.copymode(folder / name, aside / name)
            fsync(aside / name)
            _keep(folder / name, kept / name)
        fsync(kept)
        os.rename(kept, before)  # from here on the folder is known to be changing
        fsync(folder)
        for name in names:
            os.replace(aside / name, folder / name)
        fsync(folder)
        os.rename(before, kept)  # and from here on it is the new one
        fsync(folder)
    except BaseException:
        put_back(folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Undo a change of ``folder`` that did not come to its end, if there is one."""
    aside, before = folder / _ASIDE, folder / _BEFORE
    if before.is_dir():
        for path in sorted(before.iterdir()):
            os.replace(path, folder / path.name)
            path.unlink(missing_ok=True)  # of two names of one file, a rename keeps both
        fsync(folder)
        before.rmdir()
    if aside.is_dir():
        shutil.rmtree(aside)


def check_whole(folder: Path) -> None:
    """Refuse a folder some of whose files are new and some old.

    Raises:
        KflatsError: a change was killed in the very moment of renaming.
    """
    if (folder / _BEFORE).is_dir():
        raise KflatsError(
            f"some files of {folder} are new and some are old",
            cause="kflats.stream_folder was killed while it put the new files in their places",
            hint="run kflats.stream_folder on the folder again: it puts the old files back first",
        )


def _keep(path: Path, copy: Path) -> None:
    try:
        os.link(path, copy)
    except OSError:  # a file system without hard links
        shutil.copy2(path, copy)
        fsync(copy)
