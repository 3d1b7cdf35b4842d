"""The metadata of safetensors files: who wrote them, in a header that every reader of the format ignores or shows."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from kflats.errors import KflatsError
from kflats.files.atomic_files import replaced

VERSION_KEY = "kflats_version"
_LONGEST = 100_000_000  # bytes of a header, as the format allows


def stamp_(path: str | os.PathLike[str], **entries: str) -> None:
    """Add ``entries`` to the metadata of a safetensors file; its tensors are copied byte by byte, not read.

    The file is replaced in one step; other entries stay.

    Raises:
        KflatsError: no safetensors file.

    >>> import tempfile, torch
    >>> from safetensors import safe_open
    >>> from safetensors.torch import save_file
    >>> path = tempfile.mkdtemp() + "/model.safetensors"
    >>> save_file({"a": torch.ones(3)}, path, metadata={"format": "pt"})
    >>> stamp_(path, kflats_version="1.0")
    >>> with safe_open(path, framework="pt") as file:
    ...     sorted(file.metadata().items()), file.get_tensor("a").tolist()
    ([('format', 'pt'), ('kflats_version', '1.0')], [1.0, 1.0, 1.0])
    """
    path = Path(path)
    with replaced(path) as aside:
        with path.open("rb") as source, aside.open("wb") as target:
            length = int.from_bytes(source.read(8), "little")
            head = source.read(length) if length <= _LONGEST else b""
            try:
                header = json.loads(head)
                # Sorted: safetensors writes several entries in any order, and equal models should be equal files.
                header["__metadata__"] = dict(sorted((header.get("__metadata__", {}) | entries).items()))
            except (ValueError, AttributeError, TypeError) as error:
                raise KflatsError(f"{path} is no safetensors file", cause="a damaged or incomplete file") from error
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)  # tensors begin at multiples of 8
            target.write(len(text).to_bytes(8, "little") + text)
            shutil.copyfileobj(source, target, 2**20)
        shutil.copymode(path, aside)
