"""The progress of long work: a bar in a terminal, a line every few seconds elsewhere (a log file, a batch job)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kflats.common.formatting import visible

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
            line = f"kflats: {visible(description)}, {completed:,} of {total:,}{rest}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield update
