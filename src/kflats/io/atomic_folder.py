"""Folders that appear completely or not at all: written aside, made durable, and renamed into place."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from kflats.common.errors import KflatsError
from kflats.io.atomic_files import fsync
from kflats.io.manifest import differences, write_manifest
from kflats.io.write_errors import explain

_PRIVATE = 0o600
_SHOWN = 5  # names of files in one message


@contextmanager
def new_folder(out: str | os.PathLike[str], force: bool = False, sources: Sequence[Path] = ()) -> Iterator[Path]:
    """A folder to write in, which becomes ``out`` at the end. ``out`` is complete and durable, or does not appear.

    The folder gets a manifest (``kflats_manifest.json``): size and SHA-256 of every file. ``force`` replaces only a
    folder that is as its manifest says, or an empty one. The old ``out`` stays in place until the new one is complete.
    After an exception the unfinished folder is removed. After a crash or ``kill -9`` the next call removes it, and puts
    back an old folder whose replacement was interrupted. When ``out`` is complete, everything that interrupted runs
    left beside it (``beside``) is removed.

    Args:
        out: path of the new folder.
        force: replace an existing folder that kflats wrote.
        sources: folders that are read. ``out`` must be none of them, hold none of them, and lie in none of them.

    Raises:
        KflatsError: ``out`` exists, is no folder, holds files that kflats did not write or that were changed, overlaps
            a source, or is written by another run at this moment; the disk is full.
    """
    out = Path(out).expanduser().resolve()
    if not out.name:
        raise KflatsError(f"{out} cannot be written as a folder", hint="a path that ends in a name")
    for source in sources:
        _check_apart(source.resolve(), out)
    aside = beside(out, "new")
    try:
        with locked(out):
            _recover(out)
            _check_free(out, force)
            aside.mkdir()
            try:
                yield aside
                write_manifest(aside)
                _make_durable(aside)
                _check_free(out, force)
                _put_in_place(aside, out)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
            for kind in ("partial", "recovery"):
                shutil.rmtree(beside(out, kind), ignore_errors=True)
    except (OSError, SafetensorError) as error:
        explain(error, out)
        raise


def beside(out: Path, kind: str) -> Path:
    """The hidden path next to ``out`` for files that a run keeps until it is finished.

    ``kind`` is "new" (the unfinished folder), "old" (the one that is being replaced), "lock", "partial" (finished
    weights) or "recovery" (checkpoints of a training).

    >>> beside(Path("models/small"), "partial").name
    '.small.kflats-partial'
    """
    return out.parent / f".{out.name}.kflats-{kind}"


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the lock of ``out``, a file beside it, so that no other run writes ``out`` at the same time.

    The operating system releases the lock when its process ends, also after a crash: a lock file that is left behind
    blocks no other run. Only on file systems without ``flock`` the file itself is the lock (``filelock.SoftFileLock``).

    Raises:
        KflatsError: another run holds the lock.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    path = beside(out, "lock")
    lock = FileLock(path, blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise KflatsError(
            f"another run is writing {out}",
            cause=f"it holds the lock {path.name} beside that output",
            hint="wait until that run ends, or another name for the output",
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes no open file; filelock does it there
            path.unlink()  # before the release: filelock refuses a file without a name, so two runs never both hold it
        lock.release()


def _check_apart(source: Path, out: Path) -> None:
    """Refuse an ``out`` whose writing would change ``source``, by any of their names."""
    why = None
    if _same(out, source):
        why = "is the original"
    elif holder := next((parent for parent in source.parents if _same(parent, out)), None):
        why = f"holds the original, {source.relative_to(holder)}"
    elif any(_same(parent, source) for parent in out.parents):
        why = f"lies inside the original, {source}"
    elif linked := next((path for path in source.rglob("*") if path.resolve().is_relative_to(out)), None):
        why = f"holds a file of the original, which {linked} links to"
    if why is not None:
        raise KflatsError(f"{out} {why}, so it is not replaced", hint="another name for the output")


def _same(one: Path, other: Path) -> bool:
    """Whether two paths lead to one folder; names may differ in case, or by a mount."""
    return one == other or (one.exists() and other.exists() and one.samefile(other))


def _recover(out: Path) -> None:
    """Remove the files that a dead process left beside ``out``, and put back an old folder that it did not replace."""
    if (old := beside(out, "old")).exists():
        if os.path.lexists(out):
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(out)
    shutil.rmtree(beside(out, "new"), ignore_errors=True)


def _check_free(out: Path, force: bool) -> None:
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise KflatsError(f"{out} exists and is not a folder", hint="another name for the output")
    if not force:
        raise KflatsError(
            f"{out} exists already",
            hint="another name, or force=True to replace it",
            command="another name, or --force to replace it",
        )
    if changes := differences(out):
        more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        raise KflatsError(
            f"{out} is not replaced: {', '.join(changes[:_SHOWN])}{more}",
            cause="kflats replaces only a folder that is still as kflats wrote it",
            hint="another name for the output, or remove that folder yourself",
        )


def _make_durable(folder: Path) -> None:
    # Some libraries write files that only their owner may read (safetensors 0.8 does). They get the folder's mode.
    readable = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for root, _, files in os.walk(folder):
        for name in files:
            path = Path(root) / name
            if stat.S_IMODE(path.stat().st_mode) == _PRIVATE:
                path.chmod(readable)
            fsync(path)
        fsync(Path(root))


def _put_in_place(aside: Path, out: Path) -> None:
    old = beside(out, "old")
    if out.exists():
        out.rename(old)
    try:
        aside.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise
    fsync(out.parent)
    shutil.rmtree(old, ignore_errors=True)
