"""What is printed: plain-text tables, sizes, shares, names from untrusted files, and the progress of long work.

Reports, plans, comparisons and the command line print alike. Tables have ASCII lines, so every encoding of a file or
terminal can hold them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO

from rich.box import Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kflats.common.schema import Json

_LINES = Box("    \n    \n -- \n    \n -- \n    \n    \n    \n", ascii=True)
_WIDTH = 4096  # columns: no table is wider, so none is folded; the reader's terminal folds it


def visible(text: str) -> str:
    r"""``text`` with escapes in place of characters that do not print: control characters, direction marks.

    Token names come from files. Printed raw they could move a terminal's cursor or turn a page's reading direction.

    >>> visible("a\x1b[31m")
    'a\\u001b[31m'
    """
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def size(nbytes: float) -> str:
    """A number of bytes with a unit; 1 MB is 1e6 bytes, as in budgets.

    >>> size(46_881_792), size(999), size(20_000)
    ('46.9 MB', '999 B', '20.0 kB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"


def share(part: float, whole: float = 1.0) -> str:
    """``part / whole`` as a percentage; a dash if ``whole`` is 0.

    >>> share(3, 4), share(1, 0)
    ('75.0 %', '-')
    """
    return f"{100 * part / whole:.1f} %" if whole else "-"


def some(names: Sequence[str], shown: int = 3) -> str:
    """The first of several names, and how many more there are.

    >>> some(["a", "b", "c", "d", "e"]), some(["a"])
    ('a, b, c and 2 more', 'a')
    """
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def number(value: float | None, digits: int = 3) -> str:
    """A measured value to ``digits`` significant digits; a dash if it was not measured.

    >>> number(0.012345), number(None), number(0.0)
    ('0.0123', '-', '0')
    """
    return "-" if value is None else f"{value:.{digits}g}"


def call(value: Mapping[str, Json]) -> str:
    """The JSON form of a method, importance or codec, written as the call that makes it.

    >>> call({"type": "Flats", "k": 5, "ranks": "filled"})
    "Flats(k=5, ranks='filled')"
    >>> call({"type": "Subspace", "error": {"type": "Power", "q": 1.0}})
    'Subspace(error=Power(q=1.0))'
    """
    shown = {k: v for k, v in value.items() if k != "type" and v is not None}
    fields = ", ".join(f"{visible(str(k))}={call(v) if isinstance(v, Mapping) else repr(v)}" for k, v in shown.items())
    return f"{visible(str(value.get('type', '?')))}({fields})"


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int = 1,
    totals: Sequence[Sequence[str]] = (),
) -> Table:
    """A rich table: the first ``left`` columns flush left, the others right; ``totals`` under a line."""
    shown = Table(box=_LINES, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for place, name in enumerate(columns):
        shown.add_column(Text(visible(name)), justify="left" if place < left else "right", no_wrap=place >= left)
    for place, row in enumerate((*rows, *totals), 1):
        # Text, not str: rich reads "[...]" in a str as markup, and "[unused1]" is a token.
        shown.add_row(*(Text(visible(cell)) for cell in row), end_section=bool(totals) and place == len(rows))
    return shown


def plain(shown: Table) -> str:
    """A table as plain text, without colours and trailing blanks.

    >>> print(plain(table(["name", "bytes"], [["a", "12"], ["[b]", "3"]])))
    name  bytes
    -----------
    a        12
    [b]       3
    """
    out = StringIO()
    Console(file=out, width=_WIDTH, color_system=None, force_terminal=False, highlight=False).print(shown)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


LOG_SECONDS = 5.0, 30.0
"""Seconds between two lines: at first, and after some minutes."""
_SPEED_SECONDS = 3600.0  # the time left is estimated from the steps of the last hour: one step may take minutes

Update = Callable[[str, int, int], None]
"""``update(description, completed, total)``; ``completed`` 0 begins a new phase, with an estimate of its own."""


def announce(line: str, *, quiet: bool = False) -> None:
    """Print one line on stderr, unless ``quiet``."""
    if not quiet:
        Console(stderr=True).print(f"kflats: {visible(line)}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(*, quiet: bool = False) -> Iterator[Update]:
    """Show on stderr how much is done and how long the rest will take.

    Args:
        quiet: show nothing.

    Yields:
        ``update(description, completed, total)``, to be called after each step.

    >>> with progress_bar(quiet=True) as update:
    ...     update("measuring", 1, 10)
    """
    # Refusals of arguments draw no bar and do without this import.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    drawn = not quiet and console.is_terminal
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    began = logged = time.monotonic()
    with Progress(
        *columns, console=console, transient=True, disable=not drawn, speed_estimate_period=_SPEED_SECONDS
    ) as bar:
        task = bar.add_task("", total=None)

        def update(description: str, completed: int, total: int) -> None:
            nonlocal logged
            if completed == 0:
                bar.reset(task, total=total)
            bar.update(task, description=visible(description), completed=completed, total=total)
            now = time.monotonic()
            first, last = LOG_SECONDS
            if quiet or drawn or now - logged < min(max(first, (now - began) / 8), last):
                return
            logged = now
            left = bar.tasks[0].time_remaining
            rest = "" if left is None else f", {int(left) // 60}:{int(left) % 60:02} left"
            announce(f"{description}, {completed:,} of {total:,}{rest}")

        yield update
