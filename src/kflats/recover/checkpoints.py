"""The folder of a training run: whose checkpoints lie there, which of them is whole, and what is in it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.common.hashing import sha256
from kflats.io.write_errors import explain

TENSORS, REST = "kflats_trainer.safetensors", "kflats_trainer.json"
_SETTINGS = "kflats_settings.json"


@contextmanager
def kept_in(folder: str | os.PathLike[str] | None) -> Iterator[Path]:
    """The folder for checkpoints: the one that was given, or one that is gone afterwards.

    A run that failed before its first checkpoint leaves nothing there.
    """
    if folder is not None:
        where = Path(folder).expanduser().resolve()
        try:
            yield where
        except BaseException:
            if not _begun(where):
                with suppress(OSError):  # not there, or something else lies in it
                    (where / _SETTINGS).unlink(missing_ok=True)
                    where.rmdir()
            raise
        return
    with tempfile.TemporaryDirectory(prefix="kflats-recovery-") as name:
        yield Path(name)


def claim(where: Path, settings: dict[str, Any]) -> None:
    """Checkpoints in ``where``, if there are any, must be of this very run.

    Raises:
        KflatsError: they are of another run, or nothing says of which.
    """
    text = json.dumps(settings, sort_keys=True, indent=1)
    path = where / _SETTINGS
    try:
        if not _begun(where):
            where.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        try:
            old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except (ValueError, RecursionError):
            old = None
        if not isinstance(old, dict):
            raise KflatsError(f"{where} holds checkpoints of something else", hint="another folder, or remove that one")
        differs = sorted(k for k, value in json.loads(text).items() if old.get(k) != value)
        if differs:
            raise KflatsError(
                f"{where} holds checkpoints of another run: {', '.join(differs)} differ",
                hint="the same settings to resume it, or remove that folder",
            )
    except OSError as error:
        explain(error, where)
        raise


def _begun(where: Path) -> bool:
    return any(where.glob("checkpoint-*"))


def digest(model: nn.Module) -> str:
    """Of all parameters and buffers that a file would hold."""
    return sha256(part for item in model.state_dict().items() if isinstance(item[1], Tensor) for part in item)


def last_checkpoint(folder: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]] | None:
    """The newest complete checkpoint in ``folder`` and the Trainer's state there; None without one.

    A checkpoint whose writing was interrupted reads as absent.
    """
    found = []
    for path in Path(folder).glob("checkpoint-*"):
        try:
            state = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
            read_state(path)
            weights = sorted(path.glob("*.safetensors"))
            for file in weights:
                with safe_open(file, framework="pt"):
                    pass
            found.append((int(state["global_step"]), path, state))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            continue
    if not found:
        return None
    _, path, state = max(found, key=lambda item: item[0])
    return path, state


def read_state(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and the rest of what a run needs to go on, the model itself apart."""
    with safe_open(checkpoint / TENSORS, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors, json.loads((checkpoint / REST).read_text(encoding="utf-8"))
