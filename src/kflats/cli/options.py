"""Options that several commands share, and commands whose options are the fields of dataclasses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A local model folder, or a hub name (owner/model).")]
Folder = Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to write.")]
LARGEST_SEED = 2**31 - 1
Force = Annotated[bool, typer.Option("--force", help="Replace what --out names, if it is as kflats wrote it.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print no progress bar and no table.")]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with an option for each field of the dataclasses that its parameters have as types.

    A field ``matrix_rows: Annotated[str | None, typer.Option(help=...)] = None`` becomes the option ``--matrix-rows``.
    The command is called with the dataclasses. ``--help`` shows the options of each dataclass in a panel of its own.
    """
    own = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in own if is_dataclass(p.annotation)}
    parameters = [one for p in own for one in (_parameters(p.annotation) if p.name in groups else [p])]

    @functools.wraps(command)
    def from_options(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    from_options.__annotations__ = {p.name: p.annotation for p in parameters}
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    vars(from_options)["__signature__"] = inspect.Signature(keywords)  # typer reads the parameters from it
    return from_options


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for hint in hints.values():
        hint.__metadata__[0].rich_help_panel = group.__name__.removesuffix("Options") + " options"
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name]) for f in fields(group)]
