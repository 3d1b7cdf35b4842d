"""A report as one HTML file that needs no other file, and its pictures as PNG files beside it.

Needs matplotlib and jinja2: ``pip install 'kflats[report]'``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from kflats.common.formatting import share
from kflats.io.atomic_folder import new_folder
from kflats.io.manifest import manifest_follows
from kflats.report.figures import pictures
from kflats.report.overview import overview
from kflats.report.pages import page_template
from kflats.report.report import Report, WeightReport, span

REPORT_PAGE = "report.html"
_DRAWN = 8  # weights that get pictures, largest first: a page of every linear layer would weigh tens of MB
_LISTED = 200  # bands in a table


def render(report: Report, out_folder: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` and its PNG files into ``out_folder`` and return the page's path.

    The eight weights that were largest get pictures; all are in the table. The folder appears whole or not at all. An
    earlier report is replaced if the folder is as kflats wrote it. The manifest of a folder around it lists the report.

    Args:
        report: what ``compress_`` returned, or ``Report.load(folder)``.
        out_folder: the folder to be: a new one, an empty one, or one with an earlier report.

    Raises:
        KflatsError: matplotlib or jinja2 is missing; ``out_folder`` is a file, holds files that kflats did not write
            or that were changed, or is written by another run.
    """
    template, folder = page_template("report.html"), Path(out_folder).expanduser().resolve()
    with manifest_follows(folder.parent, folder.name), new_folder(folder, force=True) as aside:
        _write(report, template, aside)
    return Path(out_folder) / REPORT_PAGE


def _write(report: Report, template: Any, folder: Path) -> None:
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
    for picture in summary:
        (folder / f"{picture.stem}.png").write_bytes(picture.light)
    for place, (weight, drawing) in enumerate(zip(report.weights, drawings, strict=True), start=1):
        for picture in drawing:
            (folder / f"{place}-{_file_name(weight)}-{picture.stem}.png").write_bytes(picture.light)
    (folder / REPORT_PAGE).write_text(page, encoding="utf-8", errors="backslashreplace")


def _file_name(weight: WeightReport) -> str:
    """A weight's name as part of a file name: it comes from a file, so only plain characters pass."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", weight.name).strip("-")[:60]
