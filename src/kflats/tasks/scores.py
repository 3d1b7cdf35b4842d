"""What a task's score is: the record, and the table of one or two of them with what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kflats.common.formatting import number, plain, share, size, table, visible
from kflats.evaluation.latency import Latency
from kflats.tasks.flops import Flops

_PARTS = {
    "total": "operations of it",
    "factored": "  in factored layers",
    "dense": "  in dense layers",
    "other": "  elsewhere",
}


@dataclass(frozen=True)
class Score:
    """What a model reaches on one split, and what it takes.

    Args:
        task, split, source: what it was judged on.
        metric, value: the task's main metric; ``values`` holds all of them, the main one first.
        n: examples; for language tasks predicted tokens.
        full: examples of ``max_length`` tokens: as long by chance, or longer, and their end was not read.
        parameters: stored floating-point numbers.
        size_bytes: of a file with the model's weights. memory_bytes: parameters and buffers once loaded.
        latency_ms: median of one batch of ``batch`` examples with ``tokens`` tokens; None: not measured.
        flops: of that batch; None: not measured.
    """

    task: str
    split: str
    source: str
    metric: str
    value: float
    values: tuple[tuple[str, float], ...]
    n: int
    full: int
    parameters: int
    size_bytes: int
    memory_bytes: int
    latency_ms: float | None = None
    flops: Flops | None = None
    batch: int = 0
    tokens: int = 0

    def __str__(self) -> str:
        return str(TaskReport(self))


@dataclass(frozen=True)
class TaskReport:
    """One model's score, or two side by side; printing it gives a table."""

    compressed: Score
    original: Score | None = None
    latency: Latency | None = None

    def __str__(self) -> str:
        scores = [s for s in (self.original, self.compressed) if s is not None]
        first = scores[0]
        rows = [_row(n, [dict(s.values)[n] for s in scores], "{:.4f}".format, score=True) for n, _ in first.values]
        judged = "tokens judged" if first.metric == "perplexity" else "examples judged"
        rows.append([judged, *(f"{s.n:,}" for s in scores), ""][: len(scores) + len(scores)])
        if first.full:
            rows.append(["of them cut, or just as long", *(f"{s.full:,}" for s in scores), ""][: 2 * len(scores)])
        rows.append(_row("parameters", [s.parameters for s in scores], "{:,}".format))
        rows.append(_row("weight files", [s.size_bytes for s in scores], size))
        rows.append(_row("weights in memory", [s.memory_bytes for s in scores], size))
        if all(s.flops is not None and s.latency_ms is not None for s in scores):
            rows.append(_row("one batch, median", [s.latency_ms or 0.0 for s in scores], "{:.1f} ms".format))
            for part, label in _PARTS.items():
                counts = [getattr(s.flops, part) / 1e9 for s in scores]
                rows.append(_row(label, counts, "{:.4g} GFLOP".format))
        names = ["original", "compressed", "compared"] if len(scores) == 2 else ["model"]
        parts = [f"task {first.task}, {first.split} of {visible(first.source)}", "", plain(table(["", *names], rows))]
        if first.batch:
            parts += ["", f"one batch: {first.batch} examples of up to {first.tokens} tokens"]
        if self.latency is not None:
            t = self.latency
            parts[-1] += f"; median ratio {number(t.ratio)}, 95 % interval {number(t.low)} to {number(t.high)}"
        return "\n".join(parts)


def _row(label: str, values: Sequence[float], shown: Callable[[float], str], *, score: bool = False) -> list[str]:
    """One line of the table: the values, and where there are two how they compare."""
    row = [label, *(shown(value) for value in values)]
    if len(values) == 2:
        row.append(f"{values[1] - values[0]:+.4f}" if score else share(values[1], values[0]))
    return row
