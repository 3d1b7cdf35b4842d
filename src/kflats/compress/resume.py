"""The parts of an interrupted run, which a run of the same model, data and plan takes up again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch import nn

from kflats.calibration.measurements import Statistics
from kflats.common.errors import KflatsError
from kflats.common.hashing import sha256
from kflats.common.release import version
from kflats.io.partial import Partial
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
