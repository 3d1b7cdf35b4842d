"""What a compression drew on beside the weights, in words: a model card must not say less than was used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kflats.planning.calibration_data import CalibrationData, needed
from kflats.planning.decide import Decided

_LABELS = {
    "": "no gradients taken",
    "TaskLoss": "gradients of the task's loss, with labels",
    "SampledLabels": "gradients under labels that the model drew itself: label-free",
    "Projections": "gradients of random projections of the output: label-free",
}


def data_used(decided: Decided, given: CalibrationData, *, trimmed_by_texts: bool = False) -> list[str]:
    """Phrases, one for each use: what was counted, what a prior came from, what was passed through the model.

    Args:
        decided: the plan, the recipes it was made from, and the data with what was measured.
        given: the data before anything was measured.
        trimmed_by_texts: whether a vocabulary was trimmed first by what the texts hold.
    """
    asked = [recipe for _, recipe in decided.asked if not recipe.is_dense]
    used = []
    counts = any(recipe.importance.needs_texts for recipe in asked)
    if given.texts is not None and (counts or trimmed_by_texts):
        used.append(f"{len(given.texts):,} texts, counted")
    if given.tokenizer is not None and any(recipe.importance.reads_prior for recipe in asked):
        used.append("a Zipf prior of the tokenizer's vocabulary")
    found = decided.data.statistics
    if found is not None and needed(decided.asked):
        labels = _labels(found.objective)
        if given.statistics is not None:
            used.append(f"statistics measured before on {found.samples:,} samples ({labels})")
        else:
            used.append(f"{_passed(decided.data, found.samples)} passed through the model ({labels})")
    return used


def _passed(data: CalibrationData, samples: int) -> str:
    items = data.texts if data.calibration is None else data.calibration
    assert items is not None
    if isinstance(items[0], Mapping):
        return f"{samples:,} samples, in {len(items):,} batches,"
    whole = "texts" if data.calibration is None or data.calibration is data.texts else "calibration texts"
    return f"{samples:,} of {len(items):,} {whole}"


def _labels(objective: Mapping[str, Any]) -> str:
    """Custom objectives are known by name alone: whether they read labels is theirs to say."""
    kind = str(objective.get("type", ""))
    return _LABELS.get(kind, f"gradients of {kind}")
