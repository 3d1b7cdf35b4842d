"""The command ``kflats frontier``: parses, calls one function, prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kflats.cli.given import texts_of
from kflats.cli.options import Force, Model, Quiet, Seed, Texts
from kflats.cli.terminal import quiet_transformers
from kflats.errors import KflatsError
from kflats.frontier.page import FRONTIER_PAGE
from kflats.frontier.sweep import frontier as run
from kflats.texts import read_texts


def frontier(
    model: Model,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to make.")],
    texts: Texts = None,
    judge: Annotated[
        list[Path] | None,
        typer.Option("--judge", metavar="FILE", help="Sentences to judge on, one a line; may be repeated."),
    ] = None,
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="LIST", help="Bits per number of the original, with commas between.")
    ] = ".5,.7,1,1.5,2,3,4,6,8,16",
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="LIST",
            help="transform, flats, float16, fp16, absmax, torchao, rotation, pq, opq, rq, svd, robust-svd, messi, "
            "trim; those that can weigh rows also with +counts or +zipf. Default: all.",
        ),
    ] = None,
    task: Annotated[str | None, typer.Option("--task", help="Score this task, too: sts (by cosine), cola, ...")] = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FOLDER", help="The task's folder of TSV files. Default: the hub.")
    ] = None,
    split: Annotated[str, typer.Option("--split", help="The task's file without .tsv.gz.")] = "dev",
    weight: Annotated[
        str | None, typer.Option("--weight", metavar="NAME", help="The embedding. Default: the token embedding.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Sentences at once.")] = 32,
    seed: Seed = 0,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Size against quality: the token embedding in every way at every size, drawn. Interrupted, it resumes."""
    if task is None and data is not None:
        raise KflatsError("--data is of a --task", hint="--task sts, say")
    quiet_transformers()
    made = run(
        model,
        texts=texts_of(texts),
        judge=None if not judge else [line for file in judge for line in read_texts(file)],
        sizes=_numbers(sizes),
        methods=None if methods is None else [name for name in methods.split(",") if name.strip()],
        task=task,
        data=data,
        split=split,
        weight=weight,
        out=out,
        seed=seed,
        batch=batch,
        force=force,
        quiet=quiet,
    )
    if not quiet:
        typer.echo(str(made))
        typer.echo(f"\npage: {out / FRONTIER_PAGE}")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise KflatsError(f"--sizes {text!r} are no numbers", hint="--sizes .7,1,2,4") from error
