"""What the benchmarks share: the real embedding table, Markdown tables, and where results go."""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from kflats.demo import packaged_model

KEY = "embeddings.word_embeddings.weight"


def embedding_table() -> Tensor:
    """The (30522, 384) float32 word embeddings of all-MiniLM-L6-v2 (extra ``demo``)."""
    with safe_open(packaged_model() / "model.safetensors", framework="pt") as file:
        return file.get_tensor(KEY).float()


def seconds(function: Callable[[], object]) -> float:
    """One run's wall time."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def median_pair(ours: Callable[[], object], baseline: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Median seconds of both and the median of the paired ratios; pairs are interleaved, order alternating."""
    ours(), baseline()
    a, b = [], []
    for i in range(rounds):
        if i % 2:
            b.append(seconds(baseline))
            a.append(seconds(ours))
        else:
            a.append(seconds(ours))
            b.append(seconds(baseline))
    return statistics.median(a), statistics.median(b), statistics.median(x / y for x, y in zip(a, b, strict=True))


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [list(map(str, row)) for row in (head, ["---"] * len(head), *rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def arguments(description: str | None, **options: object) -> argparse.Namespace:
    """``--write FILE`` and the given options with their defaults."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def publish(title: str, command: str, body: str, write: Path | None) -> None:
    """Print the result, and write it with the command that makes it."""
    print(body, flush=True)
    if write is not None:
        about = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}"
        write.parent.mkdir(parents=True, exist_ok=True)
        write.write_text(f"# {title}\n\n    {command}\n\n{about}\n\n{body}\n", encoding="utf-8")
