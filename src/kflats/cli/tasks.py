"""The commands about tasks: ``kflats evaluate`` and ``kflats recover``. Each parses, calls one function, prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kflats.cli.data_options import texts_of
from kflats.cli.options import LARGEST_SEED, Force, Quiet
from kflats.cli.terminal import quiet_transformers
from kflats.common.errors import KflatsError
from kflats.recover.recover import recover_folder
from kflats.tasks.scoring import evaluate_folder

_TASKS = "cola, sst2, mrpc, qqp, mnli, qnli, rte, wnli, stsb, sts (by cosine), conll2003 or wikitext2."
Data = Annotated[
    Path | None,
    typer.Option("--task-data", metavar="FOLDER", help="Folder of TSV files, one a split. Default: the hub."),
]
MaxLength = Annotated[int, typer.Option("--max-length", min=1, help="Tokens an example; longer ones are cut.")]


def evaluate(
    model: Annotated[str, typer.Argument(metavar="DIR", help="The model to judge: a folder or a hub name.")],
    task: Annotated[str, typer.Option("--task", help=_TASKS)],
    data: Data = None,
    original: Annotated[
        str | None, typer.Option("--original", metavar="MODEL", help="Judge this one too, beside it.")
    ] = None,
    split: Annotated[str, typer.Option("--split", help="The file's name without .tsv.gz.")] = "dev",
    batch: Annotated[int, typer.Option("--batch", help="Examples at once.")] = 32,
    max_length: MaxLength = 128,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", help="Judge N, drawn by --seed.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Of the examples drawn by --limit.")] = 0,
) -> None:
    """Score on a task, with sizes, memory, latency and operations; beside the original's when it is given."""
    quiet_transformers()
    typer.echo(
        str(
            evaluate_folder(
                model,
                task,
                original=original,
                data=data,
                split=split,
                batch=batch,
                max_length=max_length,
                limit=limit,
                seed=seed,
            )
        )
    )


def recover(
    model: Annotated[str, typer.Argument(metavar="DIR", help="The compressed model: a folder or a hub name.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR2", help="The folder to make.")],
    task: Annotated[str | None, typer.Option("--task", help=_TASKS)] = None,
    data: Data = None,
    teacher: Annotated[
        str | None, typer.Option("--teacher", metavar="ORIGINAL", help="Train towards this model's outputs too.")
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            "--texts", metavar="FILE", help="Learn from these with --teacher, not from a task: UTF-8, one a line."
        ),
    ] = None,
    train: Annotated[str, typer.Option("--train", help="all, bases, coordinates or factors (both).")] = "all",
    split: Annotated[str, typer.Option("--split", help="The split to learn from.")] = "train",
    judged: Annotated[str, typer.Option("--eval-split", help="The split that says which epoch is kept.")] = "dev",
    lr: Annotated[float, typer.Option("--lr", help="Adam's first step size.")] = 2e-5,
    batch: Annotated[int, typer.Option("--batch", help="Examples a step.")] = 32,
    epochs: Annotated[int, typer.Option("--epochs", help="At most.")] = 3,
    patience: Annotated[int, typer.Option("--patience", help="Stop after so many epochs without gain.")] = 2,
    temperature: Annotated[float, typer.Option("--temperature", help="Of the teacher's outputs.")] = 2.0,
    labels_weight: Annotated[
        float, typer.Option("--labels-weight", help="Weight of the labels' loss beside the teacher's, 0 to 1.")
    ] = 0.5,
    max_length: MaxLength = 128,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", help="Learn from N examples.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of order and dropout, and of those drawn by --limit.")] = 0,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Train a compressed model on its task, towards the original, or both. Interrupted, the same command resumes."""
    if texts is not None and (data is not None or limit is not None):
        raise KflatsError("--task-data and --limit are of a --task, not of --texts", hint="leave them out")
    chosen: dict[str, Any] = {"train": train, "lr": lr, "batch": batch, "epochs": epochs, "patience": patience}
    chosen |= {"temperature": temperature, "labels_weight": labels_weight, "max_length": max_length, "seed": seed}
    if task is not None:
        chosen |= {"data": data, "split": split, "judged": judged, "limit": limit}
    quiet_transformers()
    done = recover_folder(
        model,
        out,
        task,
        texts=texts_of(texts),
        teacher=teacher,
        force=force,
        quiet=quiet,
        **chosen,
    )
    if not quiet:
        typer.echo(str(done))
        typer.echo(f"\nmodel: {out}")
