"""The commands that look at a model: ``kflats inspect``, ``compare`` and ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kflats.cli.data_options import texts_of
from kflats.cli.options import Model
from kflats.cli.terminal import quiet_transformers, show_table
from kflats.common.errors import KflatsError
from kflats.common.formatting import share, size, table, visible
from kflats.evaluation.comparing import compare as run
from kflats.evaluation.comparing import weight_file_bytes
from kflats.io import load_model, resolve_model
from kflats.model.weights import factored_layers, find_weights
from kflats.report.html import render
from kflats.report.model_card import note_fidelity
from kflats.report.report import Report


def inspect(model: Model) -> None:
    """List every weight that can be compressed: its tied names, shape, bytes, and share of the model."""
    quiet_transformers()
    folder = resolve_model(model)
    loaded = load_model(folder)
    total = weight_file_bytes(folder)
    weights = find_weights(loaded)
    rows = [
        [
            w.name + "".join(f" = {place.name}" for place in w.places[1:]),
            w.places[0].role,
            " x ".join(map(str, w.shape)),
            w.dtype,
            size(w.nbytes),
            share(w.nbytes, total),
        ]
        for w in weights
    ]
    together = sum(w.nbytes for w in weights)
    show_table(
        table(
            ["weight (= tied names)", "role", "shape", "type", "bytes", "share"],
            rows,
            left=2,
            totals=[
                ["all of these", "", "", "", size(together), share(together, total)],
                ["whole model (weight files)", "", "", "", size(total), share(total, total)],
            ],
        )
    )
    for name, layer in factored_layers(loaded):
        if layer.owns_matrix:
            n, d = layer.matrix.shape
            typer.echo(
                f"compressed already: {visible(name)}, {n} x {d}, {layer.matrix.kind}, {size(layer.matrix.nbytes)}"
            )


def compare(
    original: Annotated[str, typer.Argument(metavar="ORIGINAL", help="The original: a folder or a hub name.")],
    compressed: Annotated[Path, typer.Argument(metavar="DIR", help="The compressed model's folder.")],
    texts: Annotated[
        Path | None,
        typer.Option(
            "--texts",
            metavar="FILE",
            help="Sentences to compare on: UTF-8, one a line. Default: kflats' own sentences.",
        ),
    ] = None,
    card: Annotated[bool, typer.Option("--card", help="Write the figures into the model card of DIR too.")] = False,
) -> None:
    """Compare two models: sizes, fidelity of the outputs, and latency."""
    data = texts_of(texts)
    if not compressed.is_dir():
        raise KflatsError(f"there is no folder {compressed}", hint="a folder that kflats compress wrote")
    quiet_transformers()
    comparison = run(original, compressed, data)
    typer.echo(str(comparison))
    if card:
        typer.echo(f"\ncard: {note_fidelity(compressed, comparison)}")


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that kflats compress wrote.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Default: DIR/report.")] = None,
) -> None:
    """Draw the report of a compression: one HTML file that needs no other file, and its pictures as PNG."""
    loaded = Report.load(folder)
    page = render(loaded, out or (folder if folder.is_dir() else folder.parent) / "report")
    typer.echo(str(page))
