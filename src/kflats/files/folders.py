"""Folders that are there completely or not at all: written aside, made durable, and renamed into place."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kflats.errors import KflatsError
from kflats.files.replacing import fsync
from kflats.hashing import sha256

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PRIVATE = 0o600
_MODEL_MARKS = ("config.json", "modules.json", "kflats_report.json", "frontier.json", "*.safetensors")


@contextmanager
def new_folder(out: str | os.PathLike[str], force: bool = False) -> Iterator[Path]:
    """A folder to write in, which becomes ``out`` at the end, whole and durable, or never.

    The old ``out`` stays in place until the new one is complete. After an exception the unfinished folder is
    removed; after a crash or ``kill -9`` the next call removes it, and puts back an old folder that was
    being replaced in that very moment.

    Args:
        out: the folder to be.
        force: replace an existing model folder. Without it an existing ``out`` is refused; a folder that
            holds no model is refused in any case.

    Raises:
        KflatsError: ``out`` exists, is no folder, holds something else, or the disk is full.
    """
    out = Path(out).expanduser().resolve()
    if not out.name:
        raise KflatsError(f"{out} cannot be written as a folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _recover(out)
        _check_free(out, force)
        aside = out.parent / f".{out.name}.kflats-new-{_owner()}"
        aside.mkdir()
    except OSError as error:
        explain(error, out)
        raise
    try:
        yield aside
        _make_durable(aside)
        _check_free(out, force)
        _put_in_place(aside, out)
    except (OSError, SafetensorError) as error:
        explain(error, out)
        raise
    finally:
        if aside.exists():
            shutil.rmtree(aside, ignore_errors=True)


class Partial:
    """Finished weights of an unfinished run, in ``.<name>.kflats-partial`` beside ``out``, so that it can resume.

    One safetensors file per weight, written aside, made durable, renamed. A file that is damaged, or was
    made from other input (another ``fingerprint``), reads as absent and is overwritten.

    >>> import tempfile, torch
    >>> partial = Partial(Path(tempfile.mkdtemp()) / "small", "model and settings")
    >>> partial.put("words", {"weight": torch.ones(2)}, {"seconds": 1.5})
    >>> partial.get("words")
    ({'weight': tensor([1., 1.])}, {'seconds': 1.5})
    >>> partial.discard(); partial.get("words") is None
    True
    """

    def __init__(self, out: str | os.PathLike[str], fingerprint: str) -> None:
        out = Path(out).expanduser().resolve()
        self.folder = out.parent / f".{out.name}.kflats-partial"
        self.fingerprint = fingerprint

    def get(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and meta that ``put`` stored under ``name``, or None."""
        path = self._path(name)
        if path.is_symlink() or not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                if header.get("fingerprint") != self.fingerprint or header.get("name") != name:
                    return None
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            meta = json.loads(header["meta"])
        except (SafetensorError, OSError, KeyError, ValueError):
            return None
        return (tensors, meta) if header.get("digest") == _digest(tensors) and isinstance(meta, dict) else None

    def put(self, name: str, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Store ``tensors`` and JSON-able ``meta`` under ``name``.

        Raises:
            KflatsError: the disk is full, or the folder cannot be written.
        """
        path = self._path(name)
        aside = path.with_suffix(".tmp")
        stored = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
        header = {
            "fingerprint": self.fingerprint,
            "name": name,
            "meta": json.dumps(meta, allow_nan=False),
            "digest": _digest(stored),
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(stored, aside, metadata=header)
            fsync(aside)
            os.replace(aside, path)
            fsync(self.folder)
        except (OSError, SafetensorError) as error:
            aside.unlink(missing_ok=True)
            explain(error, self.folder)
            raise

    def discard(self) -> None:
        """Forget everything: the run is finished, or a fresh start is wanted."""
        if self.folder.is_dir() and not self.folder.is_symlink():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{sha256([name])[:24]}.safetensors"


def check_file(path: str | os.PathLike[str], force: bool = False) -> None:
    """Refuse, before any work, a file that could not be written at its end; nothing is made.

    Raises:
        KflatsError: ``path`` is a folder, or exists without ``force``; no file can be made where it should be.
    """
    goal = Path(path).expanduser().resolve()
    if goal.is_dir():
        raise KflatsError(f"{path} is a folder", hint="the name of a file to write")
    if goal.exists() and not force:
        raise KflatsError(f"{path} exists already", hint="another name, or --force (force=True) to replace it")
    there = next(folder for folder in goal.parents if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        explain(error, goal)
        raise


def explain(error: Exception, path: Path) -> None:
    """Raise ``error`` again as a KflatsError where its cause is plain: a full disk, no permission, a file instead."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, SafetensorError):  # written in Rust: the number is only in its words
        said = re.search(r"\(os error (\d+)\)", str(error))
        number = int(said[1]) if said else None
    if number in _FULL:
        raise KflatsError(
            f"the disk ran full while {path} was written; what was there before is untouched",
            hint="free some space and run the same command again; kflats compress keeps finished weights",
        ) from error
    where = Path(error.filename) if isinstance(error, OSError) and isinstance(error.filename, str) else path
    if isinstance(error, PermissionError) or number == errno.EROFS:
        raise KflatsError(
            f"{path} cannot be written",
            cause=f"no permission for {where.parent}, or a disk that is read-only",
            hint="a place that you may write to",
        ) from error
    if isinstance(error, NotADirectoryError | FileExistsError):
        there = next((p for p in (path, *path.parents) if p.is_file()), where)
        raise KflatsError(
            f"{there} is in the way", cause="a file where a folder must be", hint="another name for the output"
        ) from error
    # Of other files it may be that they are gone.
    if isinstance(error, FileNotFoundError) and (where in path.parents or where.parent in path.parents):
        there = next((p for p in path.parents if p.is_dir()), where)
        raise KflatsError(
            f"{path} cannot be written", cause=f"nothing can be made in {there}", hint="another place for the output"
        ) from error


def _digest(tensors: dict[str, Tensor]) -> str:
    """Of the stored bytes: a renamed file is complete, but disks also forget."""
    return sha256(part for item in sorted(tensors.items()) for part in item)


def _owner() -> str:
    """This process: leftovers of a live one must not be removed."""
    return f"{re.sub(r'[^A-Za-z0-9.]', '-', socket.gethostname())[:40]}-{os.getpid()}"


def _alive(name: str) -> bool:
    host, _, pid = name.rpartition("-")
    if host != _owner().rpartition("-")[0] or not pid.isdigit():
        return True  # another machine's: cannot tell
    if int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _recover(out: Path) -> None:
    """Clear what dead processes left beside ``out``; an old folder whose replacement never came returns."""
    for path in sorted(out.parent.glob(f".{_escaped(out.name)}.kflats-old-*")):
        if not _alive(path.name.rpartition(".kflats-old-")[2]):
            if os.path.lexists(out):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(out)
    for path in out.parent.glob(f".{_escaped(out.name)}.kflats-new-*"):
        if not _alive(path.name.rpartition(".kflats-new-")[2]):
            shutil.rmtree(path, ignore_errors=True)


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _check_free(out: Path, force: bool) -> None:
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise KflatsError(f"{out} exists and is not a folder", hint="another name for the output")
    if not force:
        raise KflatsError(f"{out} exists already", hint="another name, or --force (force=True) to replace it")
    if any(out.iterdir()) and not any(next(out.glob(mark), None) for mark in _MODEL_MARKS):
        raise KflatsError(
            f"{out} holds something that is not a model, so it is not replaced",
            hint="another name, or remove that folder yourself",
        )


def _make_durable(folder: Path) -> None:
    # Libraries make files that only their owner may read (safetensors 0.8 does); a model is for whom folders are for.
    readable = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for root, _, files in os.walk(folder):
        for name in files:
            path = Path(root) / name
            if stat.S_IMODE(path.stat().st_mode) == _PRIVATE:
                path.chmod(readable)
            fsync(path)
        fsync(Path(root))


def _put_in_place(aside: Path, out: Path) -> None:
    old = out.parent / f".{out.name}.kflats-old-{_owner()}"
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
