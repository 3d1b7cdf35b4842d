"""A picture: one drawing, two sets of colours, PNG bytes and a text alternative.

Needs matplotlib (``pip install 'kflats[report]'``), imported only when a picture is drawn. Figures
are drawn without pyplot: it has global state and windows, and threads and notebooks share it.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kflats.common.errors import KflatsError

_SIZE, _DPI = (4.8, 3.1), 200  # inches: small, so that its text is readable at a width of 350 px


@dataclass(frozen=True)
class Theme:
    """Colours of one version of a picture."""

    paper: str
    ink: str
    faint: str
    accent: str
    muted: str
    exact: str


LIGHT = Theme(paper="#ffffff", ink="#1f2933", faint="#d9dee5", accent="#3b66b0", muted="#a9b4c2", exact="#1f2933")
DARK = Theme(paper="#181d25", ink="#dfe4ea", faint="#39424f", accent="#7fa7ec", muted="#66727f", exact="#dfe4ea")


@dataclass(frozen=True)
class Picture:
    """A finished picture: file name stem, title, text alternative, and PNG bytes in both versions."""

    stem: str
    title: str
    alt: str
    light: bytes
    dark: bytes


Draw = Callable[[Any, Theme], None]  # draws into a matplotlib Figure


def picture(stem: str, title: str, alt: str, draw: Draw) -> Picture:
    """The picture that ``draw`` draws, in both versions; the text alternative starts with the title."""
    return Picture(stem, title, f"{title}. {alt}.", _png(draw, LIGHT), _png(draw, DARK))


def _png(draw: Draw, theme: Theme) -> bytes:
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra(error) from error
    style: Any = {
        "font.size": 9,
        "font.family": ["DejaVu Sans"],
        "text.color": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.edgecolor": theme.faint,
        "axes.facecolor": theme.paper,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": theme.faint,
        "grid.linewidth": 0.6,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "legend.frameon": False,
        "legend.fontsize": 8,
    }
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the font lacks some scripts and draws boxes
        figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained", facecolor=theme.paper)
        canvas: Any = FigureCanvasAgg(figure)
        draw(figure, theme)
        out = io.BytesIO()
        canvas.print_png(out, metadata={"Software": None})
    return out.getvalue()


def missing_extra(error: ImportError) -> KflatsError:
    """The error if matplotlib or jinja2 is not installed."""
    return KflatsError(
        f"drawing a report needs {error.name or error}",
        cause="the extra for reports is not installed",
        hint="pip install 'kflats[report]'",
    )
