"""The command ``kflats export``: it parses, calls one function, and prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kflats.cli.options import Force, Quiet
from kflats.cli.terminal import quiet_transformers
from kflats.common.errors import KflatsError
from kflats.export.dense import export_dense
from kflats.export.onnx import export_onnx


def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model: a folder or a hub name.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="PATH", help="What to make: a folder with --dense, else model.onnx.")
    ],
    dense: Annotated[bool, typer.Option("--dense", help="An ordinary checkpoint, loaded without kflats.")] = False,
    onnx: Annotated[bool, typer.Option("--onnx", help="One ONNX file, checked with onnxruntime.")] = False,
    pooled: Annotated[
        bool, typer.Option("--pooled", help="With --onnx: sentence vectors, as sentence-transformers gives them.")
    ] = False,
    drop_biases: Annotated[
        bool, typer.Option("--drop-biases", help="With --dense: leave out biases that compression added.")
    ] = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Write a model for programs that know nothing of kflats: dense tables again, or an ONNX file."""
    if dense == onnx:
        raise KflatsError("give one of --dense and --onnx", hint="--dense --out DIR, or --onnx --out model.onnx")
    if (pooled and dense) or (drop_biases and onnx):
        raise KflatsError("--pooled is of --onnx, --drop-biases of --dense", hint="leave it out")
    quiet_transformers()
    if dense:
        made: object = export_dense(model, out, drop_biases=drop_biases, force=force)
    else:
        made = export_onnx(model, out, pooled=pooled, force=force)
    if not quiet:
        typer.echo(str(made))
