"""The page of the demo: one HTML file that needs no other file, with its picture as a PNG file beside it.

Needs matplotlib and jinja2: ``pip install 'kflats[demo]'``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kflats.common.formatting import number, size
from kflats.report.html import ACCENT, INK, Picture, picture_of, template

PAGE, PICTURE = "index.html", "sizes.png"
_LEAST = 5e-5
"""The least loss that has a place on the axis: tables show it as a cosine of 1.0000."""
_OTHERS = "#8a94a0"


@dataclass(frozen=True)
class Point:
    """A file in the picture: ``nbytes``, and the ``loss`` of its vectors, 1 - cosine.

    Args:
        line: points of one line are joined: "kflats", or a method of others at several sizes; "" of points alone.
    """

    name: str
    nbytes: int
    loss: float
    line: str = ""


@dataclass(frozen=True)
class Search:
    """The sentences that are nearest to a query, with their cosines: by the original, and by the small model."""

    query: str
    original: tuple[tuple[str, float], ...]
    small: tuple[tuple[str, float], ...]

    @property
    def shared(self) -> int:
        """How many sentences both found."""
        return len({text for text, _ in self.original} & {text for text, _ in self.small})


def draw(points: Sequence[Point]) -> Picture:
    """Losses over file sizes, both on logarithmic axes: down and to the left is better."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.set_yscale("log")
        for line in sorted({point.line for point in points}, reverse=True):
            ours, mine = line == "kflats", sorted((p for p in points if p.line == line), key=lambda p: p.nbytes)
            axes.plot(
                [point.nbytes / 1e6 for point in mine],
                [max(point.loss, _LEAST) for point in mine],
                color=ACCENT if ours else _OTHERS,
                marker="o" if ours else "s",
                markersize=5,
                linestyle="-" if ours else "--" if line else "",
                label=line or "other tools",
            )
            for point in mine:
                axes.annotate(
                    point.name,
                    (point.nbytes / 1e6, max(point.loss, _LEAST)),
                    xytext=(-6, -5) if ours else (6, 4),
                    textcoords="offset points",
                    ha="right" if ours else "left",
                    va="top" if ours else "center",
                    color=INK,
                    fontsize=8,
                )
        axes.margins(0.2, 0.12)
        axes.set_xticks([5, 10, 20, 50])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g} MB"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("weight files")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}" if y > 2e-4 else f"{y:.4f}"))
        axes.set_ylabel("loss: 1 - cosine to the original")
        axes.legend(frameon=False, loc="lower left", fontsize=8)

    said = "; ".join(f"{point.name}: {size(point.nbytes)}, {number(point.loss)}" for point in points)
    return picture_of(paint, f"1 - cosine of vectors to the original's, over file sizes. {said}.")


def write_page(
    folder: Path,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    ours: Sequence[bool],
    picture: Picture,
    searches: Sequence[Search],
    searched: str,
    count: int,
) -> None:
    """Write the page and its picture into ``folder``.

    Args:
        columns, rows: of the table. ours: which rows kflats made.
        searches: what the original and the model of the size ``searched`` found, of ``count`` sentences.
    """
    (folder / PICTURE).write_bytes(picture.png)
    lines = list(zip(rows, ours, strict=True))
    page = template("demo.html").render(
        columns=columns, lines=lines, picture=picture, searches=searches, searched=searched, count=count
    )
    (folder / PAGE).write_text(page, encoding="utf-8", errors="backslashreplace")
