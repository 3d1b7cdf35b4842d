"""The options that several commands share: what they are called, and what ``--help`` says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A local model folder, or a hub name (owner/model).")]
KeptShare = Annotated[
    str | None,
    typer.Option(
        "--keep",
        help='What is kept of the named weights, row labels included: "60%", "12MB", "5.2M params" or "33% ranks".',
    ),
]
FileSize = Annotated[
    str | None,
    typer.Option(
        "--size",
        help='Size of all weight files: "40MB", "10%", "2 bits" (a number). Method and weights default to auto, all.',
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="flats, svd, kmeans-svd or messi; auto: for each weight what loses least for its bytes; where outliers "
        "are, robust-svd, entrywise or subspace. Default: flats; svd for what is measured; auto with --size.",
    ),
]
CodecName = Annotated[
    str | None,
    typer.Option(
        "--codec",
        help='How numbers are stored: float32, float16, bfloat16; transform (smallest), int8, int4, "int4 32" (columns '
        "a scale), rotation. Default: the model's own type.",
    ),
]
Exponent = Annotated[
    float | None,
    typer.Option("--p", metavar="P", help="With robust-svd and entrywise: the exponent of the lp error (1)."),
]
EllipsoidName = Annotated[
    str | None,
    typer.Option("--ellipsoid", help="With robust-svd: lewis (default) or loewner."),
]
ErrorName = Annotated[
    str | None,
    typer.Option(
        "--error",
        metavar="LOSS",
        help='With flats, messi and subspace: what a distance costs: squared, "power 1", "huber 0.5" or "truncated 3 '
        'median".',
    ),
]
FlatCount = Annotated[
    int | None, typer.Option("--flats", metavar="K", help="Number of flats; with flats, kmeans-svd and messi.")
]
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--weights",
        metavar="NAME",
        help='A weight to compress, a pattern ("encoder.layer.*.attention.*"), or one of linear, conv, embeddings and '
        "all; may be repeated. Default: the token embeddings; all with --size.",
    ),
]
Importance = Annotated[
    str | None,
    typer.Option(
        "--importance",
        help="Whose error counts. Tokens: counts (needs --texts), zipf, token-fisher. Any weight: uniform; with "
        "--calibration or --task: kronecker, two-sided, row-fisher (FWSVD), input-gram.",
    ),
]
Power = Annotated[float | None, typer.Option("--power", help="Power of the counts or of the Zipf prior.")]
Texts = Annotated[
    Path | None,
    typer.Option("--texts", metavar="FILE", help="Texts whose tokens are counted: UTF-8, one sentence a line."),
]
Calibration = Annotated[
    Path | None,
    typer.Option("--calibration", metavar="FILE", help="Texts to measure with: UTF-8, one a line; see --samples."),
]
CalibrationTask = Annotated[
    str | None,
    typer.Option(
        "--task", help="Measure with this task's training examples and its own loss: cola, sst2, mrpc, stsb, ..."
    ),
]
TaskFolder = Annotated[
    Path | None, typer.Option("--task-data", metavar="FOLDER", help="The task's folder of TSV files. Default: the hub.")
]
SampleCount = Annotated[
    int | None, typer.Option("--samples", metavar="N", help="How many texts or examples to measure with (512).")
]
MeasuredFile = Annotated[
    Path | None,
    typer.Option(
        "--statistics", metavar="FILE", help="Where measurements are kept: read if it is there, else written."
    ),
]
SharedBy = Annotated[
    str | None,
    typer.Option(
        "--allocation", help="How weights share the budget: uniform, loss (where it saves most), or auto (default)."
    ),
]
RowSide = Annotated[
    str | None,
    typer.Option("--matrix-rows", help="What a linear layer's rows are: in_features (default) or out_features."),
]
StoredForm = Annotated[
    str | None, typer.Option("--form", help="With svd: factors (default) or interpolative (16 % less, same matrix).")
]
Trim = Annotated[
    int | None,
    typer.Option("--trim", metavar="N", help="First keep the N commonest tokens only, counted in --texts."),
]
LARGEST_SEED = 2**31 - 1
Seed = Annotated[int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Where the random starts begin.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what --out names, if it is as kflats wrote it.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar and no table.")]
