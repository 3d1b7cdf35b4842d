"""Files that are replaced in one step: written under another name, made durable, and renamed."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kflats.common.errors import KflatsError
from kflats.io.write_errors import explain

_BEFORE, _ASIDE, _ADDED = ".kflats-before", ".kflats-aside", ".added"


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write the new file at, which becomes ``path`` at the end. After an exception the old file is as it was.

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
    readable = stat.S_IMODE(aside.stat().st_mode)  # the system's own mode: libraries may choose a stricter one
    aside.unlink()  # a caller that writes nothing must not leave an empty file
    try:
        yield aside
        aside.chmod(readable)
        fsync(aside)
        os.replace(aside, path)
        fsync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def replaced_together(folder: Path, label: str) -> Iterator[Path]:
    """A folder to write files of ``folder`` in, old and new ones, under their names. At the end all take their places.

    The old files stay in ``<label>.kflats-before`` until the last new one is in its place. After an exception (an
    interrupt too) they are put back; after a crash or ``kill -9`` the next call with this ``label`` puts them back. The
    caller lets one process at a time write.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "a").write_text("old")
    >>> with replaced_together(folder, ".files") as aside:
    ...     for name in "ab":
    ...         _ = (aside / name).write_text("new")
    >>> sorted((path.name, path.read_text()) for path in folder.iterdir())
    [('a', 'new'), ('b', 'new')]
    """
    put_back(folder, label)
    aside, before = folder / (label + _ASIDE), folder / (label + _BEFORE)
    aside.mkdir()
    try:
        yield aside
        names = sorted(path.name for path in aside.iterdir())
        kept = aside / "before"
        kept.mkdir()
        old = [name for name in names if (folder / name).exists()]
        for name in old:
            shutil.copymode(folder / name, aside / name)
            _keep(folder / name, kept / name)
        (kept / _ADDED).write_text("\n".join(name for name in names if name not in old), encoding="utf-8")
        for path in (*(aside / name for name in names), kept / _ADDED, kept):
            fsync(path)
        os.rename(kept, before)  # until this folder is renamed back, the change counts as not finished
        fsync(folder)
        for name in names:
            os.replace(aside / name, folder / name)
        fsync(folder)
        os.rename(before, kept)  # all new files are in their places
        fsync(folder)
    except BaseException:
        put_back(folder, label)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def put_back(folder: Path, label: str) -> None:
    """Undo a change of ``folder`` that was not finished, if there is one."""
    aside, before = folder / (label + _ASIDE), folder / (label + _BEFORE)
    if before.is_dir():
        added = before / _ADDED
        for name in added.read_text(encoding="utf-8").splitlines() if added.is_file() else ():
            (folder / name).unlink(missing_ok=True)
        for path in sorted(before.iterdir()):
            if path.name != _ADDED:
                os.replace(path, folder / path.name)
                path.unlink(missing_ok=True)  # of two names of one file, a rename keeps both
        fsync(folder)
        shutil.rmtree(before)
    if aside.is_dir():
        shutil.rmtree(aside)


def check_file(path: str | os.PathLike[str], force: bool = False, ours: Callable[[Path], bool] | None = None) -> None:
    """Refuse, before any work, a path at which a file cannot be written. Nothing is created.

    Args:
        path: of the new file.
        force: replace an existing file, if ``ours`` says that kflats wrote it.
        ours: whether kflats wrote a file. None: no existing file is replaced.

    Raises:
        KflatsError: ``path`` is a folder, exists without ``force``, or exists and kflats did not write it; no file can
            be created in its folder.
    """
    goal = Path(path).expanduser().resolve()
    if goal.is_dir():
        raise KflatsError(f"{path} is a folder", hint="the name of a file to write")
    if goal.exists():
        if not force:
            raise KflatsError(
                f"{path} exists already",
                hint="another name, or force=True to replace it",
                command="another name, or --force to replace it",
            )
        if ours is None or not ours(goal):
            raise KflatsError(
                f"{path} exists and is not replaced",
                cause="it is not a file of this kind that kflats wrote",
                hint="another name for the output, or remove that file yourself",
            )
    there = next(folder for folder in goal.parents if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        explain(error, goal)
        raise


def fsync(path: Path) -> None:
    """Write a file's content, or a folder's list of names, through to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders; its renames are journaled
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _keep(path: Path, copy: Path) -> None:
    try:
        os.link(path, copy)
    except OSError:  # a file system without hard links
        shutil.copy2(path, copy)
        fsync(copy)
