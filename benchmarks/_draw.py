"""Draw the README's picture from three tables: files of one encoder as tools ship it, and what its sentences lose.

python benchmarks/_draw.py benchmarks/results docs/sizes.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from kflats.demo.page import Point, draw

SIZES = ("20MB", "12MB", "8MB", "6MB", "5MB", "4MB")
WAYS = {
    "bfloat16": "bfloat16",
    "onnxruntime, int8": "onnxruntime int8",
    "onnxruntime, int8 per channel, reduced range": "the same, per channel",
    "torchao, int8": "torchao int8",
    "GPTQ, 4 bits": "GPTQ 4 bits",
}
RIVAL = "GPTQ with an entropy coder"


def cells(path: Path) -> list[dict[str, str]]:
    """The first table of a file."""
    rows: list[list[str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.split("|")[1:-1]])
        elif rows:
            break
    head, _, *lines = rows
    return [dict(zip(head, line, strict=True)) for line in lines]


def point(name: str, file: str, cosines: str, line: str = "") -> Point:
    """A line of a table: file in MB, and the mean cosine before the stroke."""
    return Point(name, round(1e6 * float(file.split()[0])), 1 - float(cosines.split()[0]), line)


def main(tables: Path, picture: Path) -> None:
    points = []
    for row in cells(tables / "whole_model.md"):
        if (name := row["what"].removeprefix("kflats --size ")) in SIZES:
            points.append(point(name, row["file"], row["stsb"], "kflats"))
        elif row["what"].endswith("bits a number"):
            points.append(point(name.replace(" a number", " rounded"), row["file"], row["stsb"]))
    for row in cells(tables / "latency.md"):
        if (way := WAYS.get(row["shipped as"])) is not None:
            points.append(point(way, row["file"], row["sentences"]))
    for row in cells(tables / "gptq_entropy.md"):
        if row["what"].startswith("GPTQ + entropy"):
            points.append(point("", row["file"], row["stsb"], RIVAL))
    picture.write_bytes(draw(points).png)


if __name__ == "__main__":
    main(*(Path(path) for path in sys.argv[1:]))
