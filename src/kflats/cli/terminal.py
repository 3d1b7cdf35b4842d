"""Output on a terminal: tables that fit its width, error messages, and no messages of other libraries."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kflats.common.formatting import plain, visible


def show_table(shown: Table) -> None:
    """Print a table. On a terminal it fits the width; elsewhere its lines are not folded."""
    console = Console()
    if console.is_terminal:
        console.print(shown)
    else:
        typer.echo(plain(shown))


def complain(message: str) -> None:
    """Print one error message on stderr."""
    # Text, not markup: "[unused1]" in a message is a token.
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("kflats: ", "bold red"), visible(message)))


def quiet_transformers() -> None:
    """Turn off the progress bars and messages of transformers: they would stand between those of kflats."""
    try:
        from transformers.utils import logging as untyped
    except ImportError:
        return
    logging: Any = untyped
    logging.disable_progress_bar()
    logging.set_verbosity_error()
