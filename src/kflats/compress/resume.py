"""The parts of an interrupted run, which a run of the same model, data and plan takes up again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kflats.calibration.measurements import Statistics
from kflats.common.errors import KflatsError
from kflats.common.hashing import sha256
from kflats.common.release import version
from kflats.common.schema import JsonObject
from kflats.io.atomic import beside, replaced
from kflats.model.weights import Weight
from kflats.planning.calibration_data import CalibrationData, needed
from kflats.planning.decide import Decided
from kflats.recipe.recipe import Recipe, to_json


def measured_once(
    model: nn.Module, recipes: Sequence[tuple[Weight, Recipe]], data: CalibrationData, partial: Partial, quiet: bool
) -> CalibrationData:
    """The data with its statistics: measured, or what an interrupted run measured of the same."""
    needs = needed(recipes)
    if not needs or data.statistics is not None:
        return data
    fields = json.dumps({name: sorted(fields) for name, fields in sorted(needs.items())})
    name = sha256([partial.fingerprint, fields])[:24]
    path = partial.folder / f"statistics-{name}.safetensors"
    if path.is_file() and not path.is_symlink():
        with suppress(KflatsError):  # damaged: measured again
            return replace(data, statistics=Statistics.load(path))
    data = data.measured(model, recipes, quiet)
    assert data.statistics is not None
    data.statistics.save(path)
    return data


def model_fingerprint(folder: Path, data: CalibrationData, trim: int | None) -> str:
    """The model, and all data: what measurements depend on."""
    # The weights, and the tokenizer's files: counts and priors come from those.
    kinds = (".safetensors", ".json", ".txt", ".model")
    paths = [path for path in folder.rglob("*") if path.suffix in kinds]
    # Hidden files and folders are not the model's.
    shown = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in shown)
    about = [str(folder), files, data.digest(), version(), trim]
    return sha256([json.dumps(about)])


def work_fingerprint(about: str, decided: Decided, seed: int) -> str:
    """Everything the factors depend on."""
    plan = decided.plan
    recipes = [
        [d.weight.name, d.weight.shape, d.weight.dtype, to_json(d.recipe), d.budget_bytes] for d in plan.decisions
    ]
    names = needed((d.weight, d.recipe) for d in plan.decisions)
    parts = [about, recipes, str(plan.budget), decided.data.statistics_digest(names), seed]
    return sha256([json.dumps(parts)])


class Partial:
    """Finished weights of an unfinished run, in ``.<name>.kflats-partial`` beside ``out``, so that it can resume.

    One safetensors file per weight, written aside, made durable, and renamed. A file that is damaged or that belongs
    to other input (another ``fingerprint``) counts as absent and is overwritten.

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
        self.folder = beside(out, "partial")
        self.fingerprint = fingerprint

    def get(self, name: str) -> tuple[dict[str, Tensor], JsonObject] | None:
        """Tensors and meta that ``put`` stored under ``name``, or None."""
        path = self._path(name)
        if path.is_symlink() or not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            if header["digest"] == self._digest(name, header["meta"], tensors):
                return tensors, json.loads(header["meta"])
        except (SafetensorError, OSError, KeyError, ValueError):
            pass
        return None

    def put(self, name: str, tensors: dict[str, Tensor], meta: JsonObject) -> None:
        """Store ``tensors`` and JSON-able ``meta`` under ``name``.

        Raises:
            KflatsError: the disk is full, or the folder cannot be written.
        """
        path = self._path(name)
        stored = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
        text = json.dumps(meta, allow_nan=False)
        header = {"meta": text, "digest": self._digest(name, text, stored)}
        with replaced(path) as aside:
            save_file(stored, aside, metadata=header)

    def discard(self) -> None:
        """Remove all stored weights, after a finished run or before a fresh start."""
        if self.folder.is_dir() and not self.folder.is_symlink():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{sha256([name])[:24]}.safetensors"

    def _digest(self, name: str, meta: str, tensors: dict[str, Tensor]) -> str:
        """SHA-256 of all that is stored: it shows a disk's errors, which a renamed file may still have."""
        parts = (part for item in sorted(tensors.items()) for part in item)
        return sha256([self.fingerprint, name, meta, *parts])
