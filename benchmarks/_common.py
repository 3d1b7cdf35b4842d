"""What the benchmarks share: the real embedding table, Markdown tables, and where results go."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kflats.common.machine import cpu_units
from kflats.demo import packaged_model
from kflats.evaluation.latency import take_turns

# Else every process that is started compiles torch and transformers anew, as no user's does after the first.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

EMBEDDING = "embeddings.word_embeddings"
"""The token embedding of all-MiniLM-L6-v2."""


def embedding_table() -> Tensor:
    """The (30522, 384) float32 word embeddings of all-MiniLM-L6-v2 (extra ``demo``)."""
    with safe_open(packaged_model() / "model.safetensors", framework="pt") as file:
        return file.get_tensor(f"{EMBEDDING}.weight").float()


def seconds(function: Callable[[], object]) -> float:
    """One run's wall time."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def resident(key: str) -> int:
    """Bytes of this process now ("VmRSS"), at its largest ("VmHWM"), or of no file ("RssAnon"); Linux only."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.split(f"{key}:")[1].split()[0])


def median_pair(ours: Callable[[], object], baseline: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Median seconds of both and the median of the paired ratios; both take turns."""
    theirs, own = take_turns({"baseline": baseline, "ours": ours}, rounds)
    return own.ms / 1000, theirs.ms / 1000, own.ratio


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [list(map(str, row)) for row in (head, ["---"] * len(head), *rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table(lines: Sequence[Mapping[str, object]]) -> str:
    """A Markdown table; the keys of the first line are its head."""
    return markdown(list(lines[0]) if lines else [], [list(line.values()) for line in lines])


def arguments(description: str | None, **options: object) -> argparse.Namespace:
    """``--write FILE`` and the given options with their defaults."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    for name, default in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.set_defaults(usual=options)
    return parser.parse_args()


def publish(title: str, body: str, options: argparse.Namespace) -> None:
    """Print the result; with ``--write`` also write it, under the command that makes it (folders left out)."""
    print(body, flush=True)
    if options.write is None:
        return
    given = {name: getattr(options, name.replace("-", "_")) for name in options.usual}
    changed = (
        f'--{k.replace("_", "-")} "{v}"' for k, v in given.items() if v != options.usual[k] and os.sep not in str(v)
    )
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    command = " ".join(["python", script, *changed, f"--write benchmarks/results/{options.write.name}"])
    cpu = f"{platform.machine()} with {', '.join([torch.backends.cpu.get_cpu_capability(), *cpu_units()])}"
    about = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {cpu}"
    options.write.parent.mkdir(parents=True, exist_ok=True)
    options.write.write_text(f"# {title}\n\n    {command}\n\n{about}\n\n{body}\n", encoding="utf-8")


def part(folder: str | Path, about: object) -> Path:
    """Where ``kept`` keeps what belongs to ``about``."""
    return Path(folder) / f"{hashlib.sha256(repr(about).encode()).hexdigest()[:24]}.json"


def kept(folder: str | Path, about: object, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``make`` gives, or gave before for an equal ``about``; so an interrupted benchmark resumes.

    With ``folder`` "" nothing is kept. The code is not part of ``about``: empty ``folder`` after changing it.
    """
    file = part(folder, about)
    if folder and file.is_file():
        return dict(json.loads(file.read_text(encoding="utf-8")))
    found = make()
    print(f"{about!s:.200}", found, flush=True)
    if folder:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found), encoding="utf-8")
    return found
