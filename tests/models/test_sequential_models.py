"""Layers of many model types of transformers are coded one after another, and outputs come nearer to the original's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import kflats
from kflats import Feedback, KeepDense, KroneckerFisher, Recipe
from kflats.compress.sequential import _NOTE as NOTE

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("constriction")

import life
import tiny_configs
from tiny_inputs import outputs

CODES = Recipe(KeepDense(), KroneckerFisher(damping=0.05, unreached="uniform"), Feedback())
KINDS = [
    *("bert", "distilbert", "roberta", "electra", "modernbert", "xlm-roberta"),
    *("gpt2", "gpt_neox", "opt", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3"),
    *("olmo2", "granite", "cohere", "starcoder2", "stablelm"),
]


def drawn(seed: int) -> dict[str, Any]:
    """16 texts of drawn tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(8, tiny_configs.WORDS, (16, 24), generator=generator)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_other_texts_come_nearer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_each_kind = tiny_configs._kept_layers

    def two_at_least(settings: Any, layers: int) -> list[int]:
        return sorted({*of_each_kind(settings, layers), *range(min(2, layers))})

    monkeypatch.setattr(tiny_configs, "_kept_layers", two_at_least)
    built = life.build(kind)
    lost, noted = {}, {}
    batches = [drawn(seed) for seed in range(8)]
    before = [outputs(built.model, batch) for batch in batches]
    for way in (True, False):
        small = copy.deepcopy(built.model)
        given = {"calibration": batches[:6], "sequential": way, "quiet": True}
        report = kflats.compress_(small, {"linear": CODES}, keep="20%", **given)
        noted[way] = [one.name for one in report.weights if NOTE in one.note]
        judged = zip(before[6:], [outputs(small, batch) for batch in batches[6:]], strict=True)
        lost[way] = sum(float((own[key] - of[key]).double().square().sum()) for own, of in judged for key in own)
    assert noted[True]
    assert not noted[False]
    assert lost[True] < lost[False]
