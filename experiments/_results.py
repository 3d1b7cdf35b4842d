"""What the experiments share: the importances by name, budgets, and tables, data and figures of results."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kflats import (
    SVD,
    InputGram,
    KroneckerFisher,
    Projections,
    Recipe,
    RowFisher,
    SampledLabels,
    TaskLoss,
    TwoSided,
    Uniform,
)
from kflats.demo import packaged_model

SHARED = Path(__file__).resolve().parents[2] / "shared"
ENCODER = "bert.encoder.layer.*"
"""The 36 linear layers of MiniLM's encoder; pooler and task head stay as they are, as in FWSVD."""

IMPORTANCES: dict[str, Any] = {
    "SVD": Uniform(),
    "RowFisher": RowFisher(),
    "TwoSided": TwoSided(),
    "InputGram": InputGram(),
    "KroneckerFisher": KroneckerFisher(),
}
"""Plain SVD, FWSVD (RowFisher), and what came after it."""


OBJECTIVES: dict[str, Any] = {
    "task": TaskLoss(),
    "sampled": SampledLabels(seed=0),
    "logits": Projections(of="logits", seed=0, normalized=False),
}
"""Whose gradients: the loss with the data's labels; with labels that the model draws; the logits themselves."""


@dataclass(frozen=True)
class Variant:
    """One way to compress: an importance, whose gradients it is made of, and how weights share the budget."""

    importance: str
    objective: str = "task"
    allocation: str = "uniform"

    @property
    def name(self) -> str:
        by = "" if self.objective == "task" else f" ({self.objective})"
        return self.importance + by + (", allocated" if self.allocation == "loss" else "")

    @property
    def recipe(self) -> Recipe:
        return Recipe(SVD(), IMPORTANCES[self.importance])


def variants(names: Sequence[str]) -> list[Variant]:
    """From "RowFisher", "RowFisher+loss", "KroneckerFisher@logits" and "KroneckerFisher@logits+loss"."""
    found = []
    for name in names:
        rest, _, allocation = name.partition("+")
        importance, _, objective = rest.partition("@")
        found.append(Variant(importance, objective or "task", allocation or "uniform"))
    return found


def needs(importances: Sequence[str]) -> frozenset[str]:
    """What one pass measures for all of them."""
    return frozenset().union(*(getattr(IMPORTANCES[name], "needs", frozenset()) for name in importances))


def weights_folder() -> Path:
    """The folder of small trained networks: KFLATS_WEIGHTS, or ../shared/weights."""
    return Path(os.environ.get("KFLATS_WEIGHTS") or SHARED / "weights")


def data_folder() -> Path:
    """The folder of data sets: KFLATS_DATA, or ../shared/data."""
    return Path(os.environ.get("KFLATS_DATA") or SHARED / "data")


def embedding_table() -> Tensor:
    """(30522, 384) float32: the word embeddings of all-MiniLM-L6-v2 (extra ``demo``)."""
    with safe_open(packaged_model() / "model.safetensors", framework="pt") as file:
        return file.get_tensor("embeddings.word_embeddings.weight").float()


def parameters_kept(report: Any) -> int:
    """Stored numbers of the named weights after compression (float32 factors: 4 bytes each)."""
    return int(report.bytes_after) // 4


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [list(map(str, row)) for row in (head, ["---"] * len(head), *rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def part(folder: Path, name: str, settings: Mapping[str, Any]) -> Path:
    """Where ``kept`` keeps what belongs to these settings."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"{name}-{digest}.json"


def kept(folder: Path, name: str, settings: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``make`` gives, or gave before for the same settings: an interrupted experiment goes on where it was.

    The code is not among the settings: empty ``folder`` after changing it.
    """
    path = part(folder, name, settings)
    if path.is_file():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    found = make()
    print(json.dumps({**settings, **found}), flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found), encoding="utf-8")
    return found


def write_option(parser: argparse.ArgumentParser) -> None:
    """``--write FOLDER``."""
    parser.add_argument("--write", type=Path, help="folder for the table (.md), data (.json) and figure (.png)")


def publish(
    name: str,
    title: str,
    command: str,
    body: str,
    data: Mapping[str, Any],
    write: Path | None,
    draw: Callable[[Any], None] | None = None,
) -> None:
    """Print the table; with ``write`` also keep it, its numbers and its figure as ``name``.md, .json, .png."""
    print(body, flush=True)
    if write is None:
        return
    write.mkdir(parents=True, exist_ok=True)
    about = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}"
    picture = ""
    if draw is not None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        draw(pyplot)
        if not pyplot.gcf().legends:  # a legend of the figure has its room already
            pyplot.tight_layout()
        pyplot.savefig(write / f"{name}.png", dpi=90)
        pyplot.close("all")
        picture = f"\n\n![{title}]({name}.png)"
    (write / f"{name}.md").write_text(f"# {title}\n\n    {command}\n\n{about}\n\n{body}{picture}\n", encoding="utf-8")
    text = json.dumps({"command": command, "about": about, **data}, indent=1, allow_nan=False)
    (write / f"{name}.json").write_text(text + "\n", encoding="utf-8")
