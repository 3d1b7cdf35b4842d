"""The metadata of safetensors files: who wrote them, and a checksum of every tensor.

Other readers of the format show these entries or ignore them; other writers drop them.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from kflats.common.errors import KflatsError
from kflats.common.hashing import crc32
from kflats.common.release import version
from kflats.io.atomic_files import replaced

VERSION_KEY = "kflats_version"
CHECKSUMS = "kflats_checksums"
DIGITS = 8
"""Characters of the metadata that the checksum of one tensor takes."""
_LONGEST = 100_000_000  # bytes of a header, as the format allows


def stamp_(path: str | os.PathLike[str]) -> None:
    """Write into the metadata of a safetensors file the version of kflats and the CRC-32 of every tensor.

    ``kflats_checksums`` holds eight hexadecimal digits per tensor, in the order of the tensors' names. A checksum is of
    the tensor's name, type, shape and bytes. The tensors themselves are copied byte by byte; other entries stay. The
    file is replaced in one step.

    Raises:
        KflatsError: no safetensors file.

    >>> import tempfile, torch
    >>> from safetensors import safe_open
    >>> from safetensors.torch import save_file
    >>> path = tempfile.mkdtemp() + "/model.safetensors"
    >>> save_file({"a": torch.ones(3)}, path, metadata={"format": "pt"})
    >>> stamp_(path)
    >>> with safe_open(path, framework="pt") as file:
    ...     sorted(file.metadata()), file.metadata()["kflats_checksums"], file.get_tensor("a").tolist()
    (['format', 'kflats_checksums', 'kflats_version'], 'debf5a60', [1.0, 1.0, 1.0])
    """
    path = Path(path)
    with replaced(path) as aside:
        with path.open("rb") as source, aside.open("wb") as target:
            header = _read_header(source, path)
            begin = source.tell()
            metadata = header.pop("__metadata__", {})
            entries = {"format": "pt", CHECKSUMS: "".join(_checksums(source, header)), VERSION_KEY: version()}
            # Sorted: safetensors writes several entries in any order, and equal models should be equal files.
            header = {"__metadata__": dict(sorted((metadata | entries).items())), **header}
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)  # tensors begin at multiples of 8
            target.write(len(text).to_bytes(8, "little") + text)
            source.seek(begin)
            shutil.copyfileobj(source, target, 2**20)
        shutil.copymode(path, aside)


def check_tensors(path: str | os.PathLike[str]) -> int:
    """Refuse a safetensors file one of whose tensors is not the one that ``stamp_`` took a checksum of.

    Returns:
        How many tensors have no checksum: none, or all of a file that another program wrote.

    Raises:
        KflatsError: a changed, renamed, added or lost tensor; no safetensors file.
    """
    path = Path(path)
    with path.open("rb") as file:
        header = _read_header(file, path)
        stored = header.pop("__metadata__", {}).get(CHECKSUMS)
        if stored is None:
            return len(header)
        there = _checksums(file, header)
    expected = [stored[i : i + DIGITS] for i in range(0, len(stored), DIGITS)]
    if there != expected:
        known = set(expected)
        strange = [name for name, checksum in zip(sorted(header), there, strict=True) if checksum not in known]
        what = f"its tensor {strange[0]!r} was changed or renamed" if strange else "it lacks tensors"
        raise KflatsError(
            f"{path} is damaged: {what}",
            cause="a failing disk, a broken download, or a program that changed tensors and kept the old checksums",
            hint="fetch or compress the file again",
        )
    return 0


def warn_of_unchecked(tensors: Mapping[str, int]) -> None:
    """One warning for all files, by path, some of whose tensors have no checksum."""
    unchecked = {path: count for path, count in tensors.items() if count}
    if unchecked:
        first = min(unchecked)
        others = f" and {len(unchecked) - 1} other files" if len(unchecked) > 1 else ""
        warnings.warn(
            f"{sum(unchecked.values()):,} tensors in {first}{others} have no checksum, because another program saved "
            "them: damage cannot be detected. Saving the model again while kflats is imported adds checksums.",
            stacklevel=2,
        )


def check_files(paths: Sequence[str | os.PathLike[str]]) -> dict[str, int]:
    """``check_tensors`` of each safetensors file among ``paths``; files of other formats are passed over."""
    return {str(path): check_tensors(path) for path in paths if str(path).endswith(".safetensors")}


def _read_header(file: BinaryIO, path: Path) -> dict[str, Any]:
    length = int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(length) if length <= _LONGEST else b"")
        size = os.fstat(file.fileno()).st_size - file.tell()
        spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        if isinstance(header.get("__metadata__", {}), dict) and all(0 <= a <= b <= size for a, b in spans):
            return dict(header)
    except (ValueError, AttributeError, TypeError, KeyError):
        pass
    raise KflatsError(
        f"{path} cannot be read", cause="a damaged or incomplete file", hint="fetch or compress the file again"
    )


def _checksums(file: BinaryIO, tensors: Mapping[str, Any]) -> list[str]:
    """Of every tensor, in the order of names; ``file`` stands where the header ends."""
    begin = file.tell()
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
        found = []
        for name in sorted(tensors):
            entry = tensors[name]
            first, end = (begin + offset for offset in entry["data_offsets"])
            kind = f"{name} {entry.get('dtype')} {entry.get('shape')} "
            with data[first:end] as part:
                found.append(f"{crc32([kind, part]):08x}")
        return found
