"""The command ``kflats trim``: it parses, calls one function, and prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kflats.cli.data_options import texts_of
from kflats.cli.options import Force, Model, Quiet, Texts
from kflats.cli.terminal import quiet_transformers
from kflats.trim.trimming import trim_folder


def trim(
    model: Model,
    keep: Annotated[int, typer.Option("--keep", metavar="N", help="Entries of the new vocabulary, all told.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to make.")],
    texts: Texts = None,
    judge: Annotated[
        Path | None,
        typer.Option("--eval-texts", metavar="FILE", help="Texts that the report tells of. Default: --texts."),
    ] = None,
    alphabet: Annotated[
        str, typer.Option("--alphabet", help="Single characters that stay: all (default), or those seen in --texts.")
    ] = "all",
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Keep the N commonest tokens of a vocabulary, in the model and its tokenizer; removed words become pieces."""
    counted, judged = texts_of(texts), texts_of(judge)
    quiet_transformers()
    report = trim_folder(model, out, keep=keep, texts=counted, judged=judged, alphabet=alphabet, force=force)
    if not quiet:
        typer.echo(str(report))
        typer.echo(f"\nmodel: {out}   (kflats compare {model} {out})")
