"""Files and folders that appear whole or not at all: written aside, made durable, and renamed into place.

Errors of the disk become messages that say what the user can do.

A finished folder has a manifest, size and SHA-256 of every file, which shows changes by other programs:

    {"format": "kflats-manifest", "version": 1, "files": {"config.json": {"bytes": 812, "sha256": "9f86..."}, ...}}

Names are relative to the folder, with "/" between their parts. The manifest does not list itself. Empty subfolders do
not count.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from kflats.common.errors import KflatsError, NotWrittenError
from kflats.common.formatting import some
from kflats.common.hashing import sha256_of_file
from kflats.common.paths import expanded
from kflats.common.schema import Json, decode, read_json

if TYPE_CHECKING:  # it imports torch, which refusals of arguments do without
    from kflats.common.workers import Workers

MANIFEST = "kflats_manifest.json"
_FORMAT, _VERSION = "kflats-manifest", 1
_PRIVATE = 0o600
_KEPT = ("partial", "recovery")  # by runs that may be interrupted
_SHOWN = 5  # names of files in one message
_PLAIN = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS}
_PLAIN |= {errno.ENOTDIR, errno.EISDIR, errno.EEXIST}


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise an error of the disk inside as NotWrittenError where its cause is plain: a full disk, no permission, a file
    in the place of a folder or a folder in the place of a file. ``path`` is what is written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        code = re.search(r"\(os error (\d+)\)", str(error))  # safetensors raises in Rust: only its text has the number
        number = (error.errno if isinstance(error, OSError) else int(code[1]) if code else 0) or 0
        where = Path(error.filename) if isinstance(error, OSError) and isinstance(error.filename, str) else path
        missing = number == errno.ENOENT and not path.parent.is_dir() and where != path
        if number not in _PLAIN and not (missing and {where, where.parent} & set(path.parents)):
            raise  # an error about another file may have another cause
        again = "free some space and run the same command again; kflats compress keeps finished weights"
        raise NotWrittenError(
            f"{path} cannot be written, and what was there before is untouched",
            cause=f"{os.strerror(number).lower()}, at {where}",
            hint=again if number in (errno.ENOSPC, errno.EDQUOT) else "another place for the output",
        ) from error


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write the new file at, which becomes ``path`` at the end. After an exception the old file is as it was.

    The folder of ``path`` is created if it is missing.

    Raises:
        KflatsError: a full disk, or a folder that cannot be written.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "note.txt"
    >>> with replaced(path) as aside:
    ...     written = aside.write_text("whole")
    >>> path.read_text(), len(list(path.parent.iterdir()))
    ('whole', 1)
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
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


def write_json(path: str | os.PathLike[str], form: str, version: int, **content: Json) -> None:
    """Write a JSON file with its format and version, whole or not at all; ``read_json`` reads it.

    Raises:
        KflatsError: NaN or infinite numbers, which JSON has not; as ``replaced``.
    """
    try:
        text = json.dumps({"format": form, "version": version, **content}, indent=2, allow_nan=False)
    except ValueError as error:
        raise KflatsError(f"{path} cannot hold the result: {error}", cause="a NaN or infinite number") from error
    with replaced(path) as aside:
        aside.write_text(text + "\n", encoding="utf-8")


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
    goal = expanded(path).resolve()
    if goal.is_dir():
        raise KflatsError(f"{path} is a folder", hint="the name of a file to write")
    if goal.exists():
        check_replaceable(path, force)
        if ours is None or not ours(goal):
            raise KflatsError(
                f"{path} exists and is not replaced",
                cause="it is not a file of this kind that kflats wrote",
                hint="another name for the output, or remove that file yourself",
            )
    _check_place(goal)


def check_folder(out: str | os.PathLike[str], force: bool = False, sources: Sequence[Path] = ()) -> None:
    """Refuse, before any work, what ``new_folder`` would refuse but for a run at the same moment. Nothing is created.

    Raises:
        KflatsError: as ``new_folder``.
    """
    goal = _goal(out, sources)
    if not (beside(goal, "old").exists() or beside(goal, "done").exists()):  # else ``new_folder`` puts things in order
        _check_free(goal, force)
    _check_place(goal)


def check_replaceable(path: str | os.PathLike[str], force: bool) -> None:
    """Refuse a ``path`` that exists, without ``force``."""
    if not force:
        raise KflatsError(f"{path} exists already", hint="another name, or force=True to replace it")


def fsync(path: Path) -> None:
    """Write a file's content, or a folder's list of names, through to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders; its renames are journaled
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def new_folder(
    out: str | os.PathLike[str], force: bool = False, sources: Sequence[Path] = (), workers: Workers | None = None
) -> Iterator[Path]:
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
        workers: of whom the first makes the folder. The others get its path, write nothing in it, and may leave first.

    Raises:
        KflatsError: ``out`` exists, is no folder, holds files that kflats did not write or that were changed, overlaps
            a source, or is written by another run at this moment; the disk is full; the workers see different folders.
    """
    out = _goal(out, sources)
    aside = beside(out, "new")
    if workers is not None and not workers.first:
        workers.meet()
        if not aside.is_dir():
            raise KflatsError(
                f"worker {workers.rank} cannot see {aside}, the folder in which the first worker began",
                cause="the workers do not see one folder, or the first worker failed",
                hint="an output folder that all machines share",
            )
        with explained(out):
            yield aside
        return
    with explained(out), locked(out):
        _recover(out)
        _check_free(out, force)
        aside.mkdir()
        try:
            if workers is not None:
                workers.meet()
            yield aside
            _write(aside, {name: _entry(path) for name, path in _files(aside).items()})
            _make_durable(aside)
            _check_free(out, force)
            _set_aside(out)
            _put_in_place(aside, out)
        finally:
            _drop_set_aside(out)
            shutil.rmtree(aside, ignore_errors=True)
        for kind in _KEPT:
            shutil.rmtree(beside(out, kind), ignore_errors=True)


def beside(out: Path, kind: str) -> Path:
    """The hidden path next to ``out`` for files that a run keeps until it is finished.

    ``kind`` is "new" (the unfinished folder), "old" (the one that is being replaced), "lock", "partial" (finished
    weights), "recovery" (checkpoints of a training) or "done" (the last two, once the new folder needs them no more).

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
    from filelock import FileLock, Timeout  # checks of arguments do without it

    path = beside(out, "lock")
    above = [folder for folder in path.parents if not folder.exists()]
    lock = FileLock(path, blocking=False)  # it makes the folders above
    try:
        lock.acquire()
    except Timeout as error:
        raise KflatsError(
            f"another run is writing {out}", hint="wait until that run ends, or another name for the output"
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes no open file; filelock does it there
            path.unlink()  # before the release: filelock refuses a file without a name, so two runs never both hold it
        lock.release()
        with suppress(OSError):  # of the folders above, those that hold nothing
            for folder in above:
                folder.rmdir()


def _goal(out: str | os.PathLike[str], sources: Sequence[Path]) -> Path:
    """The whole path of a new folder; refused where it has no name, or where writing it would change a source."""
    goal = expanded(out).resolve()
    if not goal.name:
        raise KflatsError(f"{goal} cannot be written as a folder", hint="a path that ends in a name")
    for source in sources:
        _check_apart(source.resolve(), goal)
    return goal


def _check_place(goal: Path) -> None:
    """Refuse a path in whose folder nothing can be created."""
    with explained(goal), tempfile.TemporaryFile(dir=next(folder for folder in goal.parents if folder.exists())):
        pass


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
    _drop_set_aside(out)
    shutil.rmtree(beside(out, "new"), ignore_errors=True)


def _set_aside(out: Path) -> None:
    """Move what an interrupted run would need into a folder of its own: with the new folder in place it is waste."""
    found = [path for path in (beside(out, kind) for kind in _KEPT) if path.exists()]
    if found:
        beside(out, "done").mkdir(exist_ok=True)
        for path in found:
            with suppress(OSError):  # Windows moves no folder in which a file is mapped; it is removed afterwards
                path.rename(beside(out, "done") / path.name)


def _drop_set_aside(out: Path) -> None:
    """Remove what was set aside; put it back where the new folder did not get its place."""
    done = beside(out, "done")
    if beside(out, "new").exists() and done.exists():
        for path in done.iterdir():
            path.rename(done.parent / path.name)
    shutil.rmtree(done, ignore_errors=True)


def _check_free(out: Path, force: bool) -> None:
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise KflatsError(f"{out} exists and is not a folder", hint="another name for the output")
    check_replaceable(out, force)
    if changes := differences(out):
        raise KflatsError(
            f"{out} is not replaced: {some(changes, _SHOWN)}",
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


@dataclass(frozen=True)
class Entry:
    """Size in bytes and SHA-256 of one file."""

    bytes: int
    sha256: str


def differences(folder: Path) -> list[str]:
    """The files of ``folder`` that differ from its manifest, a name and a reason each; [] where kflats wrote all files.

    Files of one size are compared by SHA-256. A link is a difference, since kflats writes none.
    """
    entries, files = _read(folder), _files(folder)
    if entries is None:
        return sorted(f"{name} (no manifest lists it)" for name in files)
    changes = [f"{name} (not written by kflats)" for name in files.keys() - entries.keys()]
    changes += [f"{name} (missing)" for name in entries.keys() - files.keys()]
    both = files.keys() & entries.keys()
    return sorted(changes + [f"{name} (changed)" for name in both if not _unchanged(files[name], entries[name])])


@contextmanager
def manifest_follows(folder: Path, *names: str) -> Iterator[None]:
    """Renew the entries of files that kflats itself changes or adds inside this context.

    A file that another program changed or added before stays a difference: its entry stays old or missing.

    Args:
        folder: the folder with the manifest. Without a manifest nothing happens.
        names: of the files inside that may change; the name of a subfolder stands for all files in it.
    """
    entries = _read(folder)
    if entries is None:
        yield
        return
    before = _chosen(folder, names)
    foreign = {name for name, path in before.items() if name not in entries or not _unchanged(path, entries[name])}
    yield
    after = _chosen(folder, names)
    kept = {name: entry for name, entry in entries.items() if name in foreign or name not in before}
    _write(folder, kept | {name: _entry(path) for name, path in after.items() if name not in foreign})


def _files(folder: Path) -> dict[str, Path]:
    """All files and links in ``folder``, by their names in the manifest."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
    files = {path.relative_to(folder).as_posix(): path for path in paths}
    if (own := files.get(MANIFEST)) is not None and own.is_file() and not own.is_symlink():
        del files[MANIFEST]
    return files


def _chosen(folder: Path, names: tuple[str, ...]) -> dict[str, Path]:
    return {
        name: path
        for name, path in _files(folder).items()
        if any(name == one or name.startswith(one + "/") for one in names)
    }


def _entry(path: Path) -> Entry:
    return Entry(path.stat().st_size, sha256_of_file(path))


def _unchanged(path: Path, entry: Entry) -> bool:
    same_size = path.is_file() and not path.is_symlink() and path.stat().st_size == entry.bytes
    return same_size and sha256_of_file(path) == entry.sha256


def _read(folder: Path) -> dict[str, Entry] | None:
    """The entries of the manifest; None where no manifest can be read."""
    path = folder / MANIFEST
    try:
        if path.is_symlink():
            return None
        entries: dict[str, Entry] = decode(
            dict[str, Entry], read_json(path, _FORMAT, _VERSION, "manifest").get("files"), "files"
        )
    except KflatsError:
        return None
    return entries


def _write(folder: Path, entries: dict[str, Entry]) -> None:
    files = {name: asdict(entry) for name, entry in sorted(entries.items())}
    write_json(folder / MANIFEST, _FORMAT, _VERSION, files=files)
