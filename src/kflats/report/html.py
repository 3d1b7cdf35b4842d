"""A report as one HTML file that needs no other file, and its pictures as PNG files beside it.

The content policy of the page forbids scripts, fonts and addresses. jinja2 escapes every text, because names and notes
come from files. Pictures hold no names. They are drawn without pyplot, which has global state that threads and
notebooks share.

Needs matplotlib and jinja2: ``pip install 'kflats[report]'``.
"""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kflats.common.errors import KflatsError
from kflats.common.formatting import number, share, size, visible
from kflats.common.paths import expanded
from kflats.common.release import needed
from kflats.io.atomic import MANIFEST, manifest_follows, new_folder
from kflats.report.report import Report, WeightReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT_PAGE = "report.html"
_DRAWN = 8  # weights that get a section of their own, largest first: a page of every linear layer would be very long
_LISTED = 200  # bands in a table
_SIZE, _DPI = (4.8, 3.1), 200  # inches: small, so that the text is readable at a width of 350 px
INK, ACCENT = "#1f2933", "#3b66b0"
_STYLE: Any = {"font.size": 9, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#d9dee5"}
_STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "text.color": INK}


@dataclass(frozen=True)
class Picture:
    """A finished picture: text alternative, and PNG bytes."""

    alt: str
    png: bytes

    @property
    def address(self) -> str:
        """The picture itself as an address, for a page that needs no other file."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode("ascii")


def render(report: Report, out_folder: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` and its PNG files into ``out_folder`` and return the page's path.

    The eight weights that were largest get a section; all are in the table. The folder appears whole or not at all. An
    earlier report is replaced if the folder is as kflats wrote it. The manifest of a folder around it lists the report.

    Args:
        report: what ``compress_`` returned, or ``Report.load(folder)``.
        out_folder: the folder to be: a new one, an empty one, or one with an earlier report.

    Raises:
        KflatsError: matplotlib or jinja2 is missing; ``out_folder`` is a file, holds files that are no report's or
            that were changed, or is written by another run.
    """
    page, folder = template("report.html"), expanded(out_folder).resolve()
    _check_earlier_report(folder)
    with manifest_follows(folder.parent, folder.name), new_folder(folder, force=True) as aside:
        _write(report, page, aside)
    return Path(out_folder) / REPORT_PAGE


def _check_earlier_report(folder: Path) -> None:
    """Refuse a folder that holds anything but a report, such as a model that kflats wrote."""
    if not folder.is_dir():
        return
    own = {REPORT_PAGE, MANIFEST}
    others = [path.name for path in sorted(folder.iterdir()) if path.name not in own and path.suffix != ".png"]
    if others:
        raise KflatsError(
            f"{folder} holds more than a report: {visible(others[0])}",
            cause="a report replaces an earlier report alone",
            hint="another folder for the report",
        )


def template(name: str) -> Any:
    """A template of the package, which escapes every text.

    Raises:
        KflatsError: matplotlib or jinja2 is missing.
    """
    _, jinja = (needed(package, "kflats[report]", "drawing a report") for package in ("matplotlib", "jinja2"))
    strict: dict[str, Any] = {"autoescape": True, "undefined": jinja.StrictUndefined}
    environment = jinja.Environment(
        loader=jinja.PackageLoader("kflats"), trim_blocks=True, lstrip_blocks=True, **strict
    )
    environment.filters |= {"size": size, "number": number, "visible": visible}
    return environment.get_template(name)


def picture_of(paint: Callable[[Figure], None], alt: str) -> Picture:
    """What ``paint`` draws on an empty figure, with a text alternative."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    png = io.BytesIO()
    with rc_context(_STYLE):
        figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
        paint(figure)
        figure.savefig(png, format="png", metadata={"Software": None})
    return Picture(alt, png.getvalue())


def _write(report: Report, template: Any, folder: Path) -> None:
    factored = [(place, w) for place, w in enumerate(report.weights, start=1) if not w.dense]
    largest = sorted(sorted(factored, key=lambda item: -item[1].bytes_before)[:_DRAWN])
    sections = [{"weight": w, "picture": spectrum(w), "bands": w.bands[:_LISTED]} for _, w in largest]
    page = template.render(report=report, sections=sections, share=share, hidden=len(factored) - len(largest))
    for (place, weight), section in zip(largest, sections, strict=True):
        # A weight's name comes from a file, so only plain characters enter a file name.
        name = re.sub(r"[^A-Za-z0-9_]+", "-", weight.name).strip("-")[:60]
        if isinstance(picture := section["picture"], Picture):
            (folder / f"{place}-{name}-spectrum.png").write_bytes(picture.png)
    (folder / REPORT_PAGE).write_text(page, encoding="utf-8", errors="backslashreplace")


def spectrum(weight: WeightReport) -> Picture | None:
    """The spectrum of one weight with its mean rank; None without a spectrum."""
    values = [max(v, 0.0) for v in weight.spectrum]
    if not any(values):
        return None
    floor = max(max(values) * 1e-9, 1e-300)

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.semilogy(range(1, len(values) + 1), [max(v, floor) for v in values], color=ACCENT)
        if weight.bands:
            axes.axvline(weight.mean_rank, color=INK, linestyle="--", label=f"mean rank {weight.mean_rank:.0f}")
            axes.legend(frameon=False)
        axes.set_xlabel("direction")
        axes.set_ylabel("share of the weighted sum of squares")

    ends = f"{number(values[0])} down to {number(values[-1])}"
    alt = f"Spectrum of the weighted Gram matrix: {len(values)} eigenvalues from {ends}, on a logarithmic scale."
    return picture_of(paint, alt)
