"""A report as one HTML file that needs nothing else, and its pictures as PNG files beside it.

No script, no font, no address to load: the page's own content policy forbids them. Every text goes
through jinja2's escaping, since token names and notes come out of files.

Needs matplotlib and jinja2: ``pip install 'kflats[report]'``.
"""

from __future__ import annotations

import base64
import os
import re
from importlib.resources import files
from pathlib import Path

from kflats.canvas import missing_extra
from kflats.errors import KflatsError
from kflats.figures import overview, pictures
from kflats.report import Report, WeightReport, span
from kflats.tables import number, share, size, visible

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
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise missing_extra(error) from error
    folder = Path(out_folder)
    if folder.exists() and not folder.is_dir():
        raise KflatsError(f"{folder} is a file, not a folder", hint="give another --out")
    drawable = [i for i, w in enumerate(report.weights) if not w.dense]
    drawn = set(sorted(drawable, key=lambda i: -report.weights[i].bytes_before)[:_DRAWN])
    summary = overview(report)
    drawings = [pictures(w) if i in drawn else [] for i, w in enumerate(report.weights)]
    sections = [
        {"weight": w, "pictures": p, "bands": w.bands[:_LISTED]} for w, p in zip(report.weights, drawings, strict=True)
    ]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"size": size, "number": number, "visible": visible, "inline": _inline}
    # Module paths are long and have no blanks: they may break after a dot. Markup.join escapes the parts.
    environment.filters["path"] = lambda name: Markup(".<wbr>").join(visible(name).split("."))
    template = environment.from_string((files("kflats") / "templates" / "report.html").read_text(encoding="utf-8"))
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


def _inline(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _file_name(weight: WeightReport) -> str:
    """A weight's name as part of a file name: it comes from a file, so only plain characters pass."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", weight.name).strip("-")[:60]
