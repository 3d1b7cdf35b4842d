"""The metadata of safetensors files: who wrote them, and a checksum of every tensor.

Other readers of the format show these entries or ignore them; other writers drop them.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kflats.common.errors import KflatsError, KflatsWarning
from kflats.common.hashing import crc32
from kflats.common.release import version
from kflats.common.schema import decode
from kflats.io.atomic import replaced

VERSION_KEY = "kflats_version"
CHECKSUMS = "kflats_checksums"
DIGITS = 8
"""Characters of the metadata that the checksum of one tensor takes."""
_LONGEST = 100_000_000  # bytes of a header, as the format allows


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in the header of a safetensors file: its type ("F32"), its shape, and where its bytes begin and end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


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
            metadata, entries = _read_header(source, path)
            begin = source.tell()
            target.write(_header(metadata, entries, "".join(_checksums(source, entries))))
            source.seek(begin)
            shutil.copyfileobj(source, target, 2**20)
        shutil.copymode(path, aside)


def header_bytes(tensors: Mapping[str, tuple[str, Sequence[int]]], data_bytes: int) -> int:
    """The most bytes that come before the tensors in a safetensors file with checksums.

    Args:
        tensors: type ("F32") and shape of each tensor, by name.
        data_bytes: of all tensors together. The number of its digits bounds the digits of each offset.

    >>> header_bytes({"a": ("F32", (3,))}, 12)
    152
    """
    entries = {name: TensorEntry(dtype, tuple(shape), (data_bytes,) * 2) for name, (dtype, shape) in tensors.items()}
    return len(_header({}, entries, "0" * DIGITS * len(entries)))


def _check_tensors(path: Path) -> int:
    """How many tensors have no checksum: none, or all of a file that another program wrote."""
    with path.open("rb") as file:
        metadata, entries = _read_header(file, path)
        stored = metadata.get(CHECKSUMS)
        if stored is None:
            return len(entries)
        actual = _checksums(file, entries)
    expected = [stored[i : i + DIGITS] for i in range(0, len(stored), DIGITS)]
    if actual != expected:
        known = set(expected)
        strange = [name for name, checksum in zip(sorted(entries), actual, strict=True) if checksum not in known]
        problem = f"its tensor {strange[0]!r} was changed or renamed" if strange else "it lacks tensors"
        raise KflatsError(
            f"{path} is damaged: {problem}",
            cause="a failing disk, a broken download, or a program that changed tensors and kept the old checksums",
            hint="fetch the file again, or compress the model again",
        )
    return 0


def check_files(paths: Iterable[str | os.PathLike[str]], *, warns: bool = True) -> None:
    """Refuse safetensors files in which a tensor differs from the one that ``stamp_`` took a checksum of.

    Args:
        paths: files; those of other formats are passed over.
        warns: whether tensors without a checksum give a warning, one for all files.

    Raises:
        KflatsError: a changed, renamed, added or lost tensor; no safetensors file.
    """
    counts = {str(path): _check_tensors(Path(path)) for path in paths if str(path).endswith(".safetensors")}
    unchecked = {path: count for path, count in counts.items() if count}
    if unchecked and warns:
        others = f" and {len(unchecked) - 1} other files" if len(unchecked) > 1 else ""
        warnings.warn(
            KflatsWarning(
                f"{sum(unchecked.values()):,} tensors in {min(unchecked)}{others} have no checksum, because another "
                "program saved them: damage cannot be detected. Saving the model again while kflats is imported adds "
                "checksums."
            ),
            stacklevel=2,
        )


def _header(metadata: Mapping[str, str], entries: Mapping[str, TensorEntry], checksums: str) -> bytes:
    """Length and header of a file, padded: tensors begin at multiples of 8."""
    whole = {"format": "pt"} | dict(metadata) | {CHECKSUMS: checksums, VERSION_KEY: version()}
    # Sorted: safetensors writes several entries in any order, and equal models should be equal files.
    header = {"__metadata__": dict(sorted(whole.items())), **{name: vars(entry) for name, entry in entries.items()}}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_header(file: BinaryIO, path: Path) -> tuple[dict[str, str], dict[str, TensorEntry]]:
    """Metadata and tensors of a file, which then stands where the header ends."""
    length = int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(length) if length <= _LONGEST else b"")
        size = os.fstat(file.fileno()).st_size - file.tell()
        metadata = dict(header.pop("__metadata__", {}))
        entries: dict[str, TensorEntry] = decode(dict[str, TensorEntry], header, "header")
        if all(a <= b <= size for a, b in (entry.data_offsets for entry in entries.values())):
            return metadata, entries
    except (ValueError, AttributeError, TypeError):
        pass
    raise KflatsError(f"{path} cannot be read", hint="fetch the file again, or compress the model again")


def _checksums(file: BinaryIO, entries: Mapping[str, TensorEntry]) -> list[str]:
    """The checksum of every tensor, in the order of names; ``file`` stands where the header ends."""
    begin, checksums = file.tell(), []
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
        for name in sorted(entries):
            entry = entries[name]
            first, end = (begin + offset for offset in entry.data_offsets)
            with data[first:end] as part:
                checksums.append(f"{crc32([f'{name} {entry.dtype} {list(entry.shape)} ', part]):08x}")
        return checksums
