"""Text files: one sentence a line, UTF-8. What importance counts and what a comparison judges on."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from kflats.errors import KflatsError


def read_texts(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The lines of a UTF-8 text file that are not blank, without surrounding white space.

    Raises:
        KflatsError: the file is missing, empty, binary, or in another encoding.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise KflatsError(
            f"the texts file {path} cannot be read: {error.strerror}", hint="give a UTF-8 file, one sentence a line"
        ) from error
    return _sentences(data, str(path))


def packaged_texts(name: str) -> tuple[str, ...]:
    """Sentences that come with kflats: ``"count"`` (encyclopedic, to count) or ``"judge"`` (everyday, to judge on).

    >>> len(set(packaged_texts("judge")) & set(packaged_texts("count")))
    0
    """
    if name not in ("count", "judge"):
        raise KflatsError(f"kflats brings no texts called {name!r}", hint="count or judge")
    return _sentences((files("kflats") / "data" / f"{name}.txt").read_bytes(), f"{name}.txt")


def _sentences(data: bytes, where: str) -> tuple[str, ...]:
    if b"\0" in data:
        raise KflatsError(
            f"{where} is not a text file: it has zero bytes",
            cause="a binary file (Parquet, a checkpoint), or UTF-16",
            hint="give a UTF-8 file, one sentence a line",
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise KflatsError(
            f"{where} is not UTF-8 (byte {error.start})",
            cause="another encoding, or a binary file",
            hint="convert it, for example: iconv -f latin1 -t utf-8",
        ) from error
    found = tuple(stripped for line in text.split("\n") if (stripped := line.strip()))
    if not found:
        raise KflatsError(f"{where} has no text", cause="an empty file", hint="give one sentence a line")
    return found
