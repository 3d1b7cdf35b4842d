"""What the experiments share: the importances by name, budgets, and tables and data of results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from _common import embedding_table as embedding_table
from _common import kept as kept
from _common import markdown as markdown
from _common import part as part
from _sentences import data_folder as data_folder
from _sentences import sentences as sentences

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
    return Path(os.environ.get("KFLATS_WEIGHTS") or Path(__file__).resolve().parents[2] / "shared" / "weights")


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None, quick: Mapping[str, Any]) -> argparse.Namespace:
    """The options, ``--write FOLDER`` among them, and as ``command`` the command line without its folders.

    Args:
        argv: the command line; None: that of the process. quick: what ``--quick`` changes of all defaults, by name.
    """
    parser.add_argument("--write", type=Path, help="folder for the table (.md) and its data (.json)")
    parser.add_argument("--quick", action="store_true", help="little of everything: tries the whole command")
    if "--quick" in (sys.argv[1:] if argv is None else argv):
        parser.set_defaults(**quick)
    asked = parser.parse_args(argv)
    words = ["python", f"experiments/{Path(sys.argv[0]).name}"]
    for action in parser._actions:
        value = getattr(asked, action.dest, None)
        if isinstance(value, Path) and value != action.default:
            words.append(f"{action.option_strings[0]} {'experiments/results' if action.dest == 'write' else 'FOLDER'}")
        elif value is not None and value != action.default:
            words.append(action.option_strings[0] + ("" if value is True else f' "{value}"'))
    asked.command = " ".join(words)
    return asked


def publish(name: str, title: str, body: str, data: Mapping[str, Any], asked: argparse.Namespace) -> None:
    """Print the table; with ``--write`` also keep it and its numbers as ``name``.md and .json."""
    print(body, flush=True)
    if asked.write is None:
        return
    asked.write.mkdir(parents=True, exist_ok=True)
    cpu = f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    about = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {cpu}"
    (asked.write / f"{name}.md").write_text(
        f"# {title}\n\n    {asked.command}\n\n{about}\n\n{body}\n", encoding="utf-8"
    )
    text = json.dumps({"command": asked.command, "about": about, **data}, indent=1, allow_nan=False)
    (asked.write / f"{name}.json").write_text(text + "\n", encoding="utf-8")
