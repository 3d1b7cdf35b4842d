"""The command ``kflats export``: it parses, calls one function, and prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kflats.cli.options import Force, Model, Quiet
from kflats.cli.terminal import quiet_transformers
from kflats.common.errors import KflatsError
from kflats.export.dense import export_dense
from kflats.export.onnx import export_onnx


def export(
    model: Model,
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="PATH", help="The folder to write with --dense; the file model.onnx with --onnx."
        ),
    ],
    dense: Annotated[
        bool, typer.Option("--dense", help="Write an ordinary checkpoint, which loads without kflats.")
    ] = False,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write one ONNX file, checked with onnxruntime.")] = False,
    pooled: Annotated[
        bool,
        typer.Option("--pooled", help="With --onnx: the outputs are sentence vectors, as of sentence-transformers."),
    ] = False,
    drop_biases: Annotated[
        bool, typer.Option("--drop-biases", help="With --dense: leave out biases that compression added.")
    ] = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Write a model for programs without kflats: a checkpoint with dense weights, or an ONNX file."""
    if dense == onnx:
        raise KflatsError("give one of --dense and --onnx", hint="--dense --out DIR, or --onnx --out model.onnx")
    if pooled and dense:
        raise KflatsError("--pooled is not supported with --dense", hint="--onnx, or leave --pooled out")
    if drop_biases and onnx:
        raise KflatsError("--drop-biases is not supported with --onnx", hint="--dense, or leave --drop-biases out")
    quiet_transformers()
    written = (
        export_dense(model, out, drop_biases=drop_biases, force=force)
        if dense
        else export_onnx(model, out, pooled=pooled, force=force)
    )
    if not quiet:
        typer.echo(str(written))
