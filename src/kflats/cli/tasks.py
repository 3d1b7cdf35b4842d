"""The commands about tasks: ``kflats evaluate`` and ``kflats recover``. Each parses, calls one function, prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from kflats.cli.data_options import texts_of
from kflats.cli.options import LARGEST_SEED, Folder, Force, Quiet, with_options
from kflats.cli.terminal import quiet_transformers
from kflats.common.errors import KflatsError
from kflats.recover.recover import recover_folder
from kflats.tasks.scoring import evaluate_folder

_TASKS = "cola, sst2, mrpc, qqp, mnli, qnli, rte, wnli, stsb, sts (by cosine), conll2003 or wikitext2."
Compressed = Annotated[str, typer.Argument(metavar="DIR", help="The compressed model: a folder or a hub name.")]
TaskData = Annotated[
    Path | None,
    typer.Option(
        "--task-data", metavar="FOLDER", help="The task's folder of TSV files. Default: the Hugging Face hub."
    ),
]


@dataclass(frozen=True)
class ExampleOptions:
    """The options that say which examples of a task are read, and how."""

    batch: Annotated[int, typer.Option(help="Examples of a batch.")] = 32
    max_length: Annotated[int, typer.Option(min=1, help="Tokens of an example; longer examples are cut.")] = 128
    limit: Annotated[int | None, typer.Option(metavar="N", help="Use only N examples, drawn by --seed.")] = None
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of every random step.")] = 0


@dataclass(frozen=True)
class TrainingOptions:
    """The options of training."""

    train: Annotated[
        str, typer.Option(help="The weights that learn: all, bases, coordinates, or factors (bases and coordinates).")
    ] = "all"
    lr: Annotated[float, typer.Option(help="Adam's first step size.")] = 2e-5
    epochs: Annotated[int, typer.Option(help="The largest number of epochs.")] = 3
    patience: Annotated[int, typer.Option(help="Stop after this number of epochs without a better score.")] = 2
    temperature: Annotated[float, typer.Option(help="With --teacher: the temperature of its outputs.")] = 2.0
    labels_weight: Annotated[
        float, typer.Option(help="With --teacher: the weight of the labels' loss beside the teacher's, 0 to 1.")
    ] = 0.5


@with_options
def evaluate(
    model: Compressed,
    task: Annotated[str, typer.Option("--task", help=_TASKS)],
    examples: ExampleOptions,
    task_data: TaskData = None,
    original: Annotated[
        str | None, typer.Option("--original", metavar="MODEL", help="Score this model too, beside the compressed one.")
    ] = None,
    split: Annotated[str, typer.Option("--split", help="The split: a file's name without .tsv.gz.")] = "dev",
) -> None:
    """Score a model on a task, with its size, memory, latency and operations; beside the original's if it is given."""
    quiet_transformers()
    scores = evaluate_folder(model, task, original=original, task_data=task_data, split=split, **asdict(examples))
    typer.echo(str(scores))


@with_options
def recover(
    model: Compressed,
    out: Folder,
    training: TrainingOptions,
    examples: ExampleOptions,
    task: Annotated[str | None, typer.Option("--task", help=_TASKS)] = None,
    task_data: TaskData = None,
    teacher: Annotated[
        str | None, typer.Option("--teacher", metavar="ORIGINAL", help="Train towards this model's outputs too.")
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            "--texts", metavar="FILE", help="With --teacher: texts to learn from in place of a task; UTF-8, one a line."
        ),
    ] = None,
    split: Annotated[str, typer.Option("--split", help="The split to learn from.")] = "train",
    eval_split: Annotated[
        str, typer.Option("--eval-split", help="The split whose score decides which epoch is kept.")
    ] = "dev",
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Train a compressed model on its task, towards the original, or both. Interrupted, the same command resumes."""
    if texts is not None and (task_data is not None or examples.limit is not None):
        raise KflatsError(
            "--task-data and --limit are not supported with --texts", hint="leave them out, or --task NAME"
        )
    chosen = {**asdict(training), **asdict(examples)}
    if task is None:
        del chosen["limit"]
    else:
        chosen |= {"task_data": task_data, "split": split, "eval_split": eval_split}
    quiet_transformers()
    recovery = recover_folder(
        model, out, task, texts=texts_of(texts), teacher=teacher, force=force, quiet=quiet, **chosen
    )
    if not quiet:
        typer.echo(f"{recovery}\n\nmodel: {out}")
