"""The options of the commands: fields of dataclasses, and the budget, recipe and data that they stand for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from torch import nn

from kflats import importance as importances
from kflats import methods
from kflats.calibration.measurements import Statistics
from kflats.codecs import Codec, Float
from kflats.codecs import from_name as codec_of
from kflats.common.errors import KflatsError
from kflats.common.texts import read_texts
from kflats.importance import Importance
from kflats.io.atomic import check_file
from kflats.methods import Auto, KeepDense, Method
from kflats.numerics.loss import from_name as loss_of
from kflats.planning.calibration_data import SAMPLES
from kflats.planning.strategies import Allocation
from kflats.recipe.recipe import Recipe, as_recipe
from kflats.tasks.batches import task_batches

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A local model folder, or a hub name (owner/model).")]
Folder = Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to write.")]
LARGEST_SEED = 2**31 - 1
Force = Annotated[bool, typer.Option("--force", help="Replace what --out names, if it is as kflats wrote it.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print no progress bar and no table.")]
TaskData = Annotated[
    Path | None,
    typer.Option(
        "--task-data", metavar="FOLDER", help="The task's folder of TSV files. Default: the Hugging Face hub."
    ),
]


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


@dataclass(frozen=True)
class BudgetOptions:
    """The options that bound the bytes and name the weights; None: not given."""

    keep: Annotated[
        str | None,
        typer.Option(
            help='What is kept of the named weights, row labels included: "60%", "12MB", "5.2M params" or "33% ranks".'
        ),
    ] = None
    size: Annotated[
        str | None,
        typer.Option(
            help='Size of all weight files: "40MB", "10%" or "2 bits" (a number). Use it in place of --keep; --method '
            "is then auto and --weights all, unless they are given."
        ),
    ] = None
    weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help='A weight to compress, a pattern ("encoder.layer.*.attention.*"), or one of the words linear, conv, '
            "embeddings and all. Repeat it for more. Default: the token embeddings.",
        ),
    ] = None
    allocation: Annotated[
        Allocation | None,
        typer.Option(
            help="How the weights share the budget: uniform (in proportion to their bytes), loss (where a byte saves "
            "most loss), or auto (default: loss where the importance allows it)."
        ),
    ] = None

    def names(self, recipe: Recipe | Method | None) -> tuple[str, ...]:
        """The names of the weights; of all weights if the size of the files is given and methods are chosen."""
        every = self.size is not None and recipe is not None and as_recipe(recipe).chooses
        return tuple(self.weights or (("all",) if every else ()))


@dataclass(frozen=True)
class RecipeOptions:
    """The options that make a recipe; None: not given."""

    method: Annotated[
        str | None,
        typer.Option(
            help="flats, svd, kmeans-svd or messi; robust-svd, entrywise or subspace where there are outliers; "
            "keep-dense for --codec alone; auto: for each weight the method that loses least in its bytes. Default: "
            "svd with measurements, else flats."
        ),
    ] = None
    flats: Annotated[
        int | None, typer.Option(metavar="K", help="With flats, kmeans-svd and messi: the number of flats.")
    ] = None
    importance: Annotated[
        str | None,
        typer.Option(
            help="Which errors count most. For tokens: counts (with --texts), zipf, token-fisher. For any weight: "
            "uniform; with --calibration or --task: kronecker, two-sided, row-fisher (FWSVD), input-gram."
        ),
    ] = None
    power: Annotated[
        float | None, typer.Option(help="With counts and zipf: the power of the counts or of the Zipf prior.")
    ] = None
    matrix_rows: Annotated[
        Literal["in_features", "out_features"] | None,
        typer.Option(help="Which side of a linear layer the matrix has as rows. Default: in_features."),
    ] = None
    form: Annotated[
        Literal["factors", "interpolative"] | None,
        typer.Option(
            help="With svd: how the matrix is stored; interpolative is the same matrix in about 16 % fewer numbers. "
            "Default: factors."
        ),
    ] = None
    p: Annotated[
        float | None,
        typer.Option(metavar="P", help="With robust-svd and entrywise: the exponent of the lp error. Default: 1."),
    ] = None
    error: Annotated[
        str | None,
        typer.Option(
            metavar="LOSS",
            help="With flats, messi and subspace: the loss of a row's distance: squared (default), "
            '"power 1", "huber 0.5" or "truncated 3 median".',
        ),
    ] = None
    codec: Annotated[
        str | None,
        typer.Option(
            help="How numbers are stored: float32, float16, bfloat16; transform (smallest), int8, int4, "
            '"int4 32" (one scale for 32 columns). Default: the model\'s own type.'
        ),
    ] = None


_OF_METHOD = {"flats": "k", "form": "form", "p": "p", "error": "error"}
"""Options of the method, and the names of its fields."""


@dataclass(frozen=True)
class DataOptions:
    """The options that name data; None: not given."""

    texts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Texts whose tokens are counted: UTF-8, one sentence a line.")
    ] = None
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Texts to run the model on for measurements: UTF-8, one sentence a line."),
    ] = None
    task: Annotated[
        str | None,
        typer.Option(
            help="Measure with this task's training examples and its own loss, in place of --calibration: cola, sst2, "
            "mrpc, stsb, ..."
        ),
    ] = None
    task_data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The task's folder of TSV files. Default: the Hugging Face hub."),
    ] = None
    samples: Annotated[
        int | None, typer.Option(metavar="N", min=1, help=f"How many texts or examples to measure with ({SAMPLES}).")
    ] = None
    statistics: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The file of measurements: read if it exists, written if it does not."),
    ] = None

    def read(self) -> dict[str, Any]:
        """The data in the files that the options name, as arguments of ``compress_folder``.

        Raises:
            KflatsError: a file that cannot be read, or statistics that cannot be written; both --task and
                --calibration; --task-data without --task.
        """
        samples = SAMPLES if self.samples is None else self.samples
        if self.task_data is not None and self.task is None:
            raise KflatsError(
                "--task-data cannot be used without --task",
                cause="the folder does not say which task its files are of",
                hint="--task NAME, or --calibration FILE",
            )
        if self.task is not None and self.calibration is not None:
            raise KflatsError(
                "--task and --calibration cannot be used together",
                cause="a compression measures either labelled examples or texts",
                hint="leave one of them out",
            )
        known = self.statistics is not None and self.statistics.exists()
        if self.statistics is not None and not known:
            check_file(self.statistics)  # the measurements are written there at the end

        def examples(model: nn.Module, tokenizer: Any) -> Any:
            task = self.task or ""
            return task_batches(task, tokenizer, limit=samples, task_data=self.task_data, model=model)

        return {
            "texts": texts_of(self.texts),
            "calibration": texts_of(self.calibration) if self.task is None else examples,
            "statistics": Statistics.load(self.statistics) if known and self.statistics is not None else None,
            "keep_statistics": None if known else self.statistics,
            "samples": samples,
        }


def texts_of(path: Path | None) -> tuple[str, ...] | None:
    """The lines of a text file; None if no file is given."""
    return None if path is None else read_texts(path)


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


def recipe_of(
    options: RecipeOptions, *, counted: bool, measured: bool = False, whole_file: bool = False
) -> Recipe | Auto | None:
    """The recipe of the options; None if no option is given.

    The default importance: counts for texts; without texts a Zipf prior for flats, and uniform for the other methods,
    as they were published. With measurements the default is SVD.

    Args:
        options: of the recipe.
        counted: whether there are texts to count. measured: whether there is data to measure with.
        whole_file: whether the budget bounds all weight files; then the default is ``Auto()``.

    Raises:
        KflatsError: options that exclude each other.
    """
    if options == RecipeOptions():
        return Auto() if whole_file else None
    if (options.method or "").strip().lower() == "auto":
        others = given_options(replace(options, method=None, importance=None))
        if options.importance not in (None, "uniform"):
            others.append(f"--importance {options.importance}")
        if others:
            raise KflatsError(
                f"{others[0]} cannot be used with --method auto",
                cause="each weight has the method, the codec and the importance that its data allows",
                hint="leave the option out, or --importance uniform",
            )
        return Auto() if options.importance is None else Recipe(Auto())
    name = _usual_importance(options, counted, measured) if options.importance is None else options.importance
    importance = importances.from_name(name, **({} if options.power is None else {"power": options.power}))
    codec = Float() if options.codec is None else codec_of(options.codec)
    if counted and not (importance.needs_texts or importance.needs):
        raise KflatsError(
            f"--texts cannot be used with --importance {name}",
            cause="this importance counts no texts",
            hint="leave --texts out, or --importance counts",
        )
    method = method_of(options, _usual_method(options, importance, codec))
    return Recipe(method, importance, codec, matrix_rows=options.matrix_rows or "in_features")


def method_of(options: RecipeOptions, default: str) -> Method:
    """The method with its own options.

    Raises:
        KflatsError: an option of another method, or a value that it cannot have.
    """
    name = (default if options.method is None else options.method).strip().lower()
    known = methods.METHODS.options(name)
    values = {option: value for option, value in asdict(options).items() if option in _OF_METHOD and value is not None}
    for option in values:
        if _OF_METHOD[option] not in known:
            able = [other for other in methods.METHODS.names if _OF_METHOD[option] in methods.METHODS.options(other)]
            raise KflatsError(
                f"--{option} cannot be used with --method {name}{'' if options.method else ', the default'}",
                cause=f"it is an option of {', '.join(able)}",
                hint=f"--method {able[0]}, or leave --{option} out",
            )
    if options.error is not None:
        values["error"] = loss_of(options.error)
    return methods.from_name(name, **{_OF_METHOD[option]: value for option, value in values.items()})


def given_options(options: BudgetOptions | RecipeOptions) -> list[str]:
    """The options that are given, as the user writes them."""
    return ["--" + name.replace("_", "-") for name, value in asdict(options).items() if value is not None]


def _usual_importance(options: RecipeOptions, counted: bool, measured: bool) -> str:
    if measured and options.power is None:
        one_sided = options.method not in (None, "svd") or options.flats is not None or options.error is not None
        return "row-fisher" if one_sided else "kronecker"
    baseline = options.power is None and options.method not in (None, "flats")
    return "counts" if counted else "uniform" if baseline else "zipf"


def _usual_method(options: RecipeOptions, importance: Importance, codec: Codec) -> str:
    flats = options.flats is not None or options.error is not None
    usual = "svd" if not flats and (importance.needs or options.form is not None) else "flats"
    if flats or usual == "svd" or not codec.stores_integers:
        return usual
    return "keep-dense" if codec.refusal(KeepDense()) is None else "svd"
