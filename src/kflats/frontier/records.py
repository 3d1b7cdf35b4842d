"""What a frontier is: one point for each way and size, printed as a table, kept as JSON and Markdown."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kflats.errors import KflatsError
from kflats.records import decode
from kflats.tables import number, plain, size, table, visible

FRONTIER_FILE = "frontier.json"
_FORMAT, _VERSION = "kflats-frontier", 1
_LARGEST_FILE = 64_000_000
_REASON = 110


@dataclasses.dataclass(frozen=True)
class Point:
    """One way to store the table, at one size, and what the model then says.

    Args:
        name: the way and its size. family: the way alone: points of one family make a curve.
        ours: whether it is kflats' own.
        bits: stored bits per number of the original, everything that a decoder needs counted. nbytes: the same.
        error: sum |a_i - b_i|^2 / sum |a_i|^2. weighted_error: every row counting by its importance. None where
            rows are left out.
        mean_cosine, p5_cosine, rare_cosine, neighbours: as ``kflats.evaluate.comparing.Fidelity``.
        score: on the task, None without one.
        seconds: to code and decode.
    """

    name: str
    family: str
    ours: bool
    bits: float
    nbytes: int
    error: float | None
    weighted_error: float | None
    mean_cosine: float
    p5_cosine: float
    rare_cosine: float | None
    neighbours: float | None
    score: float | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class Refused:
    """A way that cannot have the size that was asked, and why."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Frontier:
    """Size against quality of one table, for many ways to store it. Printing gives a table, largest size first.

    Args:
        model, weight, shape: what was stored.
        importance: whose row weights ``weighted_error`` has.
        counted, judged: texts that were counted, sentences judged.
        task, metric, score: the task, how it is scored, and the original's score; empty and None without one.
        points: by size, the largest first.
        refused: what was asked and could not be.
    """

    model: str
    weight: str
    shape: tuple[int, int]
    importance: str
    counted: int
    judged: int
    task: str
    metric: str
    score: float | None
    points: tuple[Point, ...]
    refused: tuple[Refused, ...]
    seed: int
    version: str

    @property
    def families(self) -> dict[str, list[Point]]:
        """Points of each family by size, the smallest first; our own families first."""
        found: dict[str, list[Point]] = {}
        for point in sorted(self.points, key=lambda p: (not p.ours, p.family, p.bits)):
            found.setdefault(point.family, []).append(point)
        return found

    def best(self, bits: float, *, ours: bool | None = None) -> Point | None:
        """The point of largest mean cosine among those of at most ``bits``; ``ours``: only kflats' (or only rivals)."""
        there = [p for p in self.points if p.bits <= bits and ours in (None, p.ours)]
        return max(there, key=lambda p: p.mean_cosine, default=None)

    def __str__(self) -> str:
        head, rows = self._cells()
        parts = [plain(table(head, rows)), "", self._about()]
        parts += [f"not possible: {visible(r.name)}: {visible(r.reason)[:_REASON]}" for r in self.refused]
        return "\n".join(parts)

    def markdown(self) -> str:
        """The same as Markdown."""
        head, rows = self._cells()
        lines = [head, ["---"] * len(head), *([_cell(c) for c in row] for row in rows)]
        made = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        refused = "".join(f"\n- not possible: {_cell(r.name)}: {_cell(r.reason)}" for r in self.refused)
        return (
            f"# {_cell(self.model)}: size and quality of {_cell(self.weight)}\n\n{self._about()}\n\n{made}\n{refused}"
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict, with its format and version."""
        return {"format": _FORMAT, "version": _VERSION, "frontier": dataclasses.asdict(self)}

    @staticmethod
    def from_json(data: object) -> Frontier:
        """The frontier that ``to_json`` wrote.

        Raises:
            KflatsError: another format or version, a missing or unknown field, a wrong type.
        """
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise KflatsError("this is not a kflats frontier", hint=f"the {FRONTIER_FILE} that kflats frontier wrote")
        if (version := data.get("version")) != _VERSION or isinstance(version, bool):
            raise KflatsError(f"a frontier of version {version!r}; this kflats reads version {_VERSION}")
        made = decode(Frontier, data.get("frontier"), "frontier", signed=frozenset({"frontier.seed"}))
        assert isinstance(made, Frontier)
        return made

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Frontier:
        """Read the file, or that of a folder that ``kflats frontier`` wrote.

        Raises:
            KflatsError: no such file, or one that is damaged.
        """
        file = Path(path)
        file = file / FRONTIER_FILE if file.is_dir() else file
        if not file.is_file() or file.stat().st_size > _LARGEST_FILE:
            raise KflatsError(f"no frontier at {file}", hint="the folder that kflats frontier wrote")
        try:
            return Frontier.from_json(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, RecursionError) as error:
            if isinstance(error, KflatsError):
                raise
            raise KflatsError(f"{file} is not JSON: {error}", cause="a damaged file") from error

    def _about(self) -> str:
        n, d = self.shape
        by = f"weighted errors by {self.importance}"
        if self.importance == "Uniform()":
            by = "tokens do not enter it, so that every row counts the same"
        said = [f"{visible(self.weight)}: {n:,} x {d}; {by}"]
        said += [f"{self.counted:,} texts counted"] if self.counted else []
        said += [f"{self.judged:,} sentences judged"]
        if self.score is not None:
            said += [f"{self.task}: {self.metric} of the original {100 * self.score:.2f}"]
        return "; ".join(said) + "."

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        columns: list[tuple[str, Callable[[Point], str]]] = [
            ("stored as", lambda p: p.name if not p.ours else f"* {p.name}"),
            ("bits", lambda p: f"{p.bits:.3f}"),
            ("bytes", lambda p: size(p.nbytes)),
            ("error", lambda p: number(p.error)),
            ("weighted error", lambda p: number(p.weighted_error)),
            ("mean cosine", lambda p: f"{p.mean_cosine:.4f}"),
            ("5th percentile", lambda p: f"{p.p5_cosine:.4f}"),
            ("rare words", lambda p: "-" if p.rare_cosine is None else f"{p.rare_cosine:.4f}"),
            ("10 neighbours kept", lambda p: "-" if p.neighbours is None else f"{p.neighbours:.3f}"),
        ]
        if self.score is not None:
            columns.append((self.metric, lambda p: "-" if p.score is None else f"{100 * p.score:.2f}"))
        return [name for name, _ in columns], [[show(p) for _, show in columns] for p in self.points]


def _cell(text: str) -> str:
    """Text of a file inside a Markdown table."""
    return visible(text).replace("|", "\\|")
