"""A frontier drawn: pictures as PNG files, and one HTML page with the pictures and the table in it.

Needs matplotlib and jinja2: ``pip install 'kflats[report]'``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kflats.frontier.records import Frontier, Point
from kflats.report.canvas import Picture, Theme, picture
from kflats.report.overview import FLATS
from kflats.report.pages import page_template
from kflats.tables import number, visible

FRONTIER_PAGE = "frontier.html"
_WIDTH, _HEIGHT = 7.4, 4.6  # inches: a dozen curves and their names beside them
_LEAST = 1e-5  # distances below are drawn here: a logarithm has no zero
_MARKS = "osD^vP*XphH<>"


def draw(frontier: Frontier, folder: Path) -> Path:
    """Write the pictures and ``frontier.html`` into ``folder``; return the page's path.

    Raises:
        KflatsError: matplotlib or jinja2 is missing.
    """
    template, drawn = page_template("frontier.html"), pictures(frontier)
    page = template.render(frontier=frontier, pictures=drawn)
    for one in drawn:
        (folder / f"{one.stem}.png").write_bytes(one.light)
    target = folder / FRONTIER_PAGE
    target.write_text(page, encoding="utf-8", errors="backslashreplace")
    return target


def pictures(frontier: Frontier) -> list[Picture]:
    """Size against what the model keeps: mean, tail, rare words, the task, and the weighted error of the table."""
    made = [
        _curves(frontier, "mean-cosine", "Mean cosine to the original", "1 - mean cosine", lambda p: 1 - p.mean_cosine),
        _curves(frontier, "tail", "One sentence in twenty", "1 - 5th percentile of cosine", lambda p: 1 - p.p5_cosine),
        _curves(
            frontier,
            "rare-words",
            "Rare words",
            "1 - mean cosine of rare words",
            lambda p: None if p.rare_cosine is None else 1 - p.rare_cosine,
        ),
        _curves(frontier, "weighted-error", "Error of the table", "weighted squared error", lambda p: p.weighted_error),
    ]
    if frontier.score is not None:
        whole = frontier.score
        title = f"Score on {visible(frontier.task)}"
        label = f"{visible(frontier.metric)} lost, points"
        # Noise can raise a score; what is no loss is drawn as the least one.
        made.insert(
            1,
            _curves(
                frontier,
                "score",
                title,
                label,
                lambda p: None if p.score is None else max(100 * (whole - p.score), 0.01),
            ),
        )
    return [one for one in made if one is not None]


def _curves(
    frontier: Frontier, stem: str, title: str, label: str, value: Callable[[Point], float | None]
) -> Picture | None:
    """A curve for each family, bits on a logarithmic scale; lower is better."""
    families: dict[str, list[tuple[float, float]]] = {}
    ours: dict[str, bool] = {}
    for name, points in frontier.families.items():
        there = [(p.bits, max(found, _LEAST)) for p in points if (found := value(p)) is not None]
        if there:
            families[name], ours[name] = there, points[0].ours
    if not families:
        return None
    alt = f"Curves, {label} against bits per number, both logarithmic, lower is better. " + "; ".join(
        f"{visible(name)}: {number(there[0][1])} at {number(there[0][0])} bits"
        + (f" to {number(there[-1][1])} at {number(there[-1][0])}" if len(there) > 1 else "")
        for name, there in families.items()
    )

    def plot(figure: Any, theme: Theme) -> None:
        figure.set_size_inches(_WIDTH, _HEIGHT)
        axes = figure.subplots()
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        every = [pair for there in families.values() for pair in there]
        for values, limit in (([x for x, _ in every], axes.set_xlim), ([y for _, y in every], axes.set_ylim)):
            limit(min(values) / 1.2, max(values) * 1.2)  # one value alone would make no axis
        own, other = 0, 0
        for name, there in families.items():
            x, y = zip(*there, strict=True)
            words = visible(name).replace("$", r"\$")
            if ours[name]:
                style: dict[str, Any] = {
                    "color": theme.accent if own == 0 else theme.ink,
                    "linewidth": 2.2,
                    "linestyle": ("-", "--", ":", "-.")[own % 4],
                    "zorder": 4,
                }
                own += 1
            else:
                colour = FLATS[1 + other % (len(FLATS) - 1)]  # the first looks like our own
                style = {"color": colour, "linewidth": 1.1, "marker": _MARKS[other % len(_MARKS)]}
                other += 1
            axes.plot(x, y, label=words, markersize=4, **({"marker": "o"} | style))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("bits per number of the original, everything stored counted")
        axes.set_ylabel(f"{label} (lower is better)".replace("$", r"\$"))
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=2, labelspacing=0.35)

    return picture(stem, title, alt, plot)
