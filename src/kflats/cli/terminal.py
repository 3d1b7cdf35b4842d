"""What a terminal shows: tables that fit it, complaints, and none of other libraries' remarks."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kflats.common.formatting import plain, visible


def show_table(made: Table) -> None:
    """On a terminal the table fits itself to the width; elsewhere lines stay whole."""
    console = Console()
    if console.is_terminal:
        console.print(made)
    else:
        typer.echo(plain(made))


def complain(message: str) -> None:
    """One message on stderr."""
    # Text, not markup: "[unused1]" in a message is a token.
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("kflats: ", "bold red"), visible(message)))


def quiet_transformers() -> None:
    """transformers' own progress bars and remarks would stand between ours."""
    try:
        from transformers.utils import logging as untyped
    except ImportError:
        return
    logging: Any = untyped
    logging.disable_progress_bar()
    logging.set_verbosity_error()
