"""The pictures of a whole report: its sizes, and the rank of every weight."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kflats.common.formatting import share, size, visible
from kflats.report.canvas import Picture, Theme, picture
from kflats.report.report import Report, WeightReport

BARS = 24
"""Bars in one picture."""
LEGEND = 8
"""Entries of a legend."""
FLATS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#ee8866",
    "#44aa99",
)
"""Tol's colours, which colour-blind readers can distinguish."""


def overview(report: Report) -> list[Picture]:
    """Size before and after: the named weights, and the whole model."""
    pairs = [
        ("named weights", report.bytes_before, report.bytes_after),
        ("whole model", report.model_bytes_before, report.model_bytes_after),
    ]
    alt = "; ".join(f"{n}: {size(b)} before, {size(a)} after ({share(a, b)})" for n, b, a in pairs)

    def draw(figure: Any, theme: Theme) -> None:
        axes = figure.subplots()
        for place, (_, before, after) in enumerate(pairs):
            for shift, nbytes, colour in ((-0.2, before, theme.muted), (0.2, after, theme.accent)):
                axes.barh(place + shift, nbytes / 1e6, 0.36, color=colour)
                axes.text(nbytes / 1e6, place + shift, f" {size(nbytes)}", va="center", color=theme.ink)
        axes.set_yticks(range(len(pairs)), [n.replace(" ", "\n") for n, _, _ in pairs])
        axes.invert_yaxis()
        axes.set_xlabel("MB, before (grey) and after (blue)")
        axes.set_xlim(0, max(b for _, b, _ in pairs) / 1e6 * 1.28 or 1)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")

    pictures = [picture("size", "Size before and after", alt, draw)]
    return pictures + ([_rank_by_layer(report.weights)] if len(report.weights) > 1 else [])


def _rank_by_layer(weights: Sequence[WeightReport]) -> Picture:
    """The rank of every weight in per cent of its full rank: a line for each kind of layer, or a bar a weight."""
    kinds: dict[str, list[WeightReport]] = {}
    for weight in weights:
        kinds.setdefault(re.sub(r"\d+", "*", weight.name), []).append(weight)
    parts = [f"{visible(w.name)}: {w.kept}" for w in weights[:BARS]]
    alt = "Per cent of the full rank. " + "; ".join(parts) + ("; ..." if len(weights) > BARS else "")
    lines = len(kinds) <= LEGEND and max(map(len, kinds.values())) > 2

    def draw(figure: Any, theme: Theme) -> None:
        axes = figure.subplots()
        if lines:
            for colour, (name, members) in zip(FLATS, kinds.items(), strict=False):
                places, shares = range(len(members)), [_kept_share(w) for w in members]
                axes.plot(places, shares, color=colour, linewidth=1.2, label=_short(name))
                dots = [40 if w.dense else 14 for w in members]
                axes.scatter(places, shares, dots, color=colour, zorder=3, clip_on=False)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set_xlabel("layer, in the model's order; large dots stay dense")
            axes.legend(ncols=2, loc="lower left", bbox_to_anchor=(-0.02, 1.0), handlelength=1, columnspacing=1)
        else:
            colours = [theme.exact if w.dense else theme.accent for w in weights]
            axes.bar(range(1, len(weights) + 1), [_kept_share(w) for w in weights], 0.75, color=colours)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set_xlabel("weight, in the table's order; dark bars stay dense")
            axes.grid(visible=False, axis="x")
        axes.set_ylabel("rank, % of full")
        axes.set_ylim(0, 104)

    return picture("rank-by-layer", "Rank by layer", alt, draw)


def _kept_share(weight: WeightReport) -> float:
    return 100 * weight.mean_rank / weight.full_rank if weight.dense or weight.bands else 0.0


def _short(name: str) -> str:
    """The end of a path, for a legend. The name comes from a file, so "$" must not start a formula."""
    return visible(".".join(name.split(".")[-3:]))[-30:].replace("$", r"\$")
