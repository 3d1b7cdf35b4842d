"""The pictures of one weight, drawn from its report: spectrum, ranks, errors and the share of each flat."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from kflats.common.formatting import number, share, visible
from kflats.report.canvas import Picture, Theme, picture
from kflats.report.overview import BARS, FLATS, LEGEND
from kflats.report.report import BandReport, WeightReport, span


def pictures(weight: WeightReport) -> list[Picture]:
    """All pictures of one weight for which its report has figures."""
    drawn: list[Picture] = []
    if any(v > 0 for v in weight.spectrum):
        drawn.append(_spectrum(weight))
    if weight.bands:
        drawn += [_rank_by_flat(weight), _error_by_band(weight), _kept(weight)]
    if weight.frequency:
        drawn.append(_error_by_frequency(weight))
    if len(weight.objective) > 1:
        drawn.append(_objective(weight))
    return drawn


def _spectrum(weight: WeightReport) -> Picture:
    values = [max(v, 0.0) for v in weight.spectrum]
    half, total = 0, 0.0
    while half < len(values) and total < 0.5 * sum(values):
        total += values[half]
        half += 1
    ends = f"from {number(values[0])} down to {number(values[-1])}"
    alt = f"Line on a logarithmic scale: {len(values)} eigenvalues {ends}; the first {half} hold half of the sum"

    def draw(figure: Any, theme: Theme) -> None:
        axes = figure.subplots()
        floor = max(max(values) * 1e-9, 1e-300)
        axes.semilogy(range(1, len(values) + 1), [max(v, floor) for v in values], color=theme.accent, linewidth=1.8)
        if weight.bands:
            axes.axvline(weight.mean_rank, color=theme.ink, linewidth=1, linestyle=(0, (4, 3)))
            axes.text(
                weight.mean_rank,
                0.97,
                f" mean rank {weight.mean_rank:.0f}",
                transform=axes.get_xaxis_transform(),
                va="top",
            )
        axes.set_xlabel("direction")
        axes.set_ylabel("share of the weighted sum of squares")

    return picture("spectrum", "Spectrum of the weighted Gram matrix", alt, draw)


def _rank_by_flat(weight: WeightReport) -> Picture:
    ranks = sorted({b.rank for b in weight.bands})
    # A few ranks get one bar each; many ranks are grouped into equal intervals.
    width = max(1, math.ceil((ranks[-1] - ranks[0] + 1) / BARS))
    alt = "Stacked bars of rows by the rank they keep. " + "; ".join(
        f"{_label(flat)}: {sum(b.rows for b in bands)} rows at rank {span([b.rank for b in bands])}"
        for flat, bands in list(weight.flats.items())[:BARS]
    )

    def draw(figure: Any, theme: Theme) -> None:
        axes = figure.subplots()
        separate = len(ranks) <= BARS
        places = {r: i for i, r in enumerate(ranks)} if separate else {r: (r - ranks[0]) // width for r in ranks}
        base = [0] * (max(places.values()) + 1)
        for flat, bands in weight.flats.items():
            heights = [0] * len(base)
            for band in bands:
                heights[places[band.rank]] += band.rows
            axes.bar(
                range(len(base)), heights, 0.8, bottom=base, color=_colour(weight, flat, theme), label=_label(flat)
            )
            base = [a + b for a, b in zip(base, heights, strict=True)]
        names = [str(r) for r in ranks] if separate else [str(ranks[0] + i * width) for i in range(len(base))]
        step = math.ceil(len(names) / 12)
        axes.set_xticks(range(0, len(names), step), names[::step])
        axes.set_xlabel("rank (coordinates a row keeps)" + ("" if separate else f", in steps of {width}"))
        axes.set_ylabel("rows")
        _legend(axes, weight)

    return picture("ranks", "Rank by flat: rows kept at each rank", alt, draw)


def _error_by_band(weight: WeightReport) -> Picture:
    nested = any(len(bands) > 1 for bands in weight.flats.values())
    alt = "Relative squared error of the rows of each flat. " + "; ".join(
        f"{_label(flat)}: {span([b.error for b in bands])}" for flat, bands in list(weight.flats.items())[:BARS]
    )

    def draw(figure: Any, theme: Theme) -> None:
        axes = figure.subplots()
        if nested:
            for flat, bands in weight.flats.items():
                nesting = sorted(bands, key=lambda b: b.rank)
                ranks, errors = [b.rank for b in nesting], [b.error for b in nesting]
                colour = _colour(weight, flat, theme)
                dots = [10 + 120 * b.rows / weight.shape[0] for b in nesting]
                axes.plot(ranks, errors, color=colour, linewidth=1.2)
                axes.scatter(ranks, errors, dots, color=colour, label=_label(flat), clip_on=False, zorder=3)
            axes.set_xlabel("rank; larger dots hold more rows")
            _legend(axes, weight)
        else:
            ordered = [bands[0] for bands in weight.flats.values()]
            colours = [_colour(weight, b.flat, theme) for b in ordered]
            axes.bar(range(len(ordered)), [b.error for b in ordered], 0.75, color=colours)
            step = math.ceil(len(ordered) / 12)
            names = ["exact" if b.flat is None else str(b.flat) for b in ordered]
            axes.set_xticks(range(0, len(names), step), names[::step])
            axes.set_xlabel("flat")
            axes.grid(visible=False, axis="x")
        axes.set_ylabel("relative squared error")
        axes.set_ylim(bottom=0)

    return picture("error-by-flat", "Error by flat and rank" if nested else "Error by flat", alt, draw)


def _kept(weight: WeightReport) -> Picture:
    bars: list[tuple[str, Callable[[BandReport], float]]] = [
        ("rows", lambda b: b.rows),
        ("importance", lambda b: b.weight_share),
        ("coordinates", lambda b: b.rows * b.rank),
    ]

    def portion(value: Callable[[BandReport], float], bands: Sequence[BandReport]) -> float:
        return sum(map(value, bands)) / (sum(map(value, weight.bands)) or 1.0)

    alt = "What each flat holds. " + "; ".join(
        f"{_label(flat)}: " + ", ".join(f"{share(portion(value, bands))} of {name}" for name, value in bars)
        for flat, bands in list(weight.flats.items())[:BARS]
    )

    def draw(figure: Any, theme: Theme) -> None:
        axes = figure.subplots()
        for place, (_, value) in enumerate(bars):
            start = 0.0
            for flat, bands in weight.flats.items():
                part = 100 * portion(value, bands)
                colour = _colour(weight, flat, theme)
                axes.barh(place, part, 0.6, left=start, color=colour, label="" if place else _label(flat))
                if part >= 9:
                    text = theme.paper if flat is None else "#11151a"
                    axes.text(start + part / 2, place, f"{part:.0f}", ha="center", va="center", color=text, fontsize=8)
                start += part
        axes.set_yticks(range(len(bars)), [n for n, _ in bars])
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("per cent")
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        _legend(axes, weight, above=True)

    return picture("kept", "What was kept, and where", alt, draw)


def _error_by_frequency(weight: WeightReport) -> Picture:
    bins = weight.frequency
    alt = "Bars from the most to the least important rows. " + "; ".join(
        f"{visible(b.label)}: {b.rows} rows, mean rank {number(b.mean_rank)}, error {number(b.error)}"
        for b in bins[:BARS]
    )

    def draw(figure: Any, theme: Theme) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        top.bar(range(len(bins)), [b.error for b in bins], 0.75, color=theme.accent)
        bottom.bar(range(len(bins)), [b.mean_rank for b in bins], 0.75, color=theme.muted)
        top.set_ylabel("error")
        bottom.set_ylabel("mean rank")
        step = math.ceil(len(bins) / 12)
        # Labels come from a file: short enough for the axis, and "$" would start a formula.
        names = [visible(b.label)[:14].replace("$", r"\$") for b in bins]
        slant = 35 if sum(map(len, names[::step])) > 42 else 0
        bottom.set_xticks(range(0, len(bins), step), names[::step], rotation=slant, ha="right" if slant else "center")
        bottom.set_xlabel("rows by importance, commonest first")
        for axes in (top, bottom):
            axes.grid(visible=False, axis="x")
        figure.align_ylabels()

    return picture("error-by-frequency", "Error by token frequency", alt, draw)


def _objective(weight: WeightReport) -> Picture:
    values = weight.objective
    alt = f"Falling line: the objective over {len(values)} iterations, from {number(values[0])} to {number(values[-1])}"

    def draw(figure: Any, theme: Theme) -> None:
        axes = figure.subplots()
        first = values[0] or 1.0
        marker = "o" if len(values) <= 40 else ""
        axes.plot(
            range(1, len(values) + 1),
            [v / first for v in values],
            color=theme.accent,
            linewidth=1.8,
            marker=marker,
            markersize=3.5,
        )
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("iteration")
        axes.set_ylabel("objective (first = 1)")

    return picture("objective", "The fit, iteration by iteration", alt, draw)


def _label(flat: int | None) -> str:
    return "exact" if flat is None else f"flat {flat}"


def _colour(weight: WeightReport, flat: int | None, theme: Theme) -> Any:
    """One colour for each flat: named colours for a few flats, a scale for many."""
    if flat is None:
        return theme.exact
    flats = [f for f in weight.flats if f is not None]
    if len(flats) <= len(FLATS):
        return FLATS[flats.index(flat)]
    from matplotlib import colormaps

    return colormaps["viridis"](0.15 + 0.8 * flats.index(flat) / (len(flats) - 1))


def _legend(axes: Any, weight: WeightReport, *, above: bool = False) -> None:
    if not 1 < len(weight.flats) <= LEGEND + 1:
        return
    if above:
        columns = min(len(weight.flats), 4)
        axes.legend(ncols=columns, loc="lower left", bbox_to_anchor=(-0.02, 1.0), handlelength=1, columnspacing=1)
    else:
        axes.legend(handlelength=1, labelspacing=0.3)
