"""A report as one HTML file that needs nothing else, and its pictures as PNG files beside it.

Needs matplotlib and jinja2: ``pip install 'kflats[report]'``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from kflats.errors import KflatsError
from kflats.report.figures import overview, pictures
from kflats.report.pages import page_template
from kflats.report.report import Report, WeightReport, span
from kflats.tables import share

REPORT_PAGE = "report.html"
_DRAWN = 8  # weights that get pictures, largest first: a page of every linear layer would weigh tens of MB
_LISTED = 200  # bands in a table


def render(report: Report, out_folder: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` and its PNG files into ``out_folder`` (made if absent); return the page's path.

    The eight weights that were largest get pictures; all are in the table. Files of an earlier
    report there are overwritten, nothing else is touched.

    Args:
        report: what ``compress_`` returned, or ``Report.load(folder)``.
        out_folder: where to write.

    Raises:
        KflatsError: matplotlib or jinja2 is missing; ``out_folder`` is a file.
    """
    template, folder = page_template("report.html"), Path(out_folder)
    if folder.exists() and not folder.is_dir():
        raise KflatsError(f"{folder} is a file, not a folder", hint="give another --out")
    drawable = [i for i, w in enumerate(report.weights) if not w.dense]
    drawn = set(sorted(drawable, key=lambda i: -report.weights[i].bytes_before)[:_DRAWN])
    summary = overview(report)
    drawings = [pictures(w) if i in drawn else [] for i, w in enumerate(report.weights)]
    sections = [
        {"weight": w, "pictures": p, "bands": w.bands[:_LISTED]} for w, p in zip(report.weights, drawings, strict=True)
    ]
    page = template.render(
        report=report,
        summary=summary,
        sections=sections,
        share=share,
        span=span,
        hidden=len(drawable) - len(drawn),
    )
    folder.mkdir(parents=True, exist_ok=True)
    for picture in summary:
        (folder / f"{picture.stem}.png").write_bytes(picture.light)
    for place, (weight, drawing) in enumerate(zip(report.weights, drawings, strict=True), start=1):
        for picture in drawing:
            (folder / f"{place}-{_file_name(weight)}-{picture.stem}.png").write_bytes(picture.light)
    target = folder / REPORT_PAGE
    target.write_text(page, encoding="utf-8", errors="backslashreplace")
    return target


def _file_name(weight: WeightReport) -> str:
    """A weight's name as part of a file name: it comes from a file, so only plain characters pass."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", weight.name).strip("-")[:60]
