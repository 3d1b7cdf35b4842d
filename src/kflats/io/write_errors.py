"""Errors of the disk as messages that say what the user can do."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from safetensors import SafetensorError

from kflats.common.errors import KflatsError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def explain(error: Exception, path: Path) -> None:
    """Raise ``error`` again as a KflatsError where its cause is plain: a full disk, no permission, a file instead."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, SafetensorError):  # raised in Rust: only its text has the number
        match = re.search(r"\(os error (\d+)\)", str(error))
        number = int(match[1]) if match else None
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
    # An error about another file may have another cause.
    if isinstance(error, FileNotFoundError) and (where in path.parents or where.parent in path.parents):
        there = next((p for p in path.parents if p.is_dir()), where)
        raise KflatsError(
            f"{path} cannot be written", cause=f"nothing can be made in {there}", hint="another place for the output"
        ) from error
