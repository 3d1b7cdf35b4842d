"""The command ``kflats trim``: it parses, calls one function, and prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kflats.cli.data_options import texts_of
from kflats.cli.options import Folder, Force, Model, Quiet
from kflats.cli.terminal import quiet_transformers
from kflats.trim.trimming import trim_folder


def trim(
    model: Model,
    keep: Annotated[int, typer.Option("--keep", metavar="N", help="Entries of the new vocabulary, special ones too.")],
    out: Folder,
    texts: Annotated[
        Path | None,
        typer.Option("--texts", metavar="FILE", help="Texts whose tokens are counted: UTF-8, one sentence a line."),
    ] = None,
    eval_texts: Annotated[
        Path | None,
        typer.Option("--eval-texts", metavar="FILE", help="Texts that the report is measured on. Default: --texts."),
    ] = None,
    alphabet: Annotated[
        str, typer.Option("--alphabet", help="Single characters to keep: all of them, or those seen in --texts.")
    ] = "all",
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Keep the N commonest tokens of a vocabulary, in the model and its tokenizer; removed words become pieces."""
    counted, evaluated = texts_of(texts), texts_of(eval_texts)
    quiet_transformers()
    report = trim_folder(model, out, keep=keep, texts=counted, eval_texts=evaluated, alphabet=alphabet, force=force)
    if not quiet:
        typer.echo(f"{report}\n\nmodel: {out}   (kflats compare {model} {out})")
