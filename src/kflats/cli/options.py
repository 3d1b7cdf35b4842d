"""The options of the commands: fields of dataclasses, and the budget, recipe and data that they stand for.

Values are checked without torch, whose import takes seconds; what needs it is imported where it is made.

The tables of names stand here too, because help and refusals of arguments must not import torch. A test compares them
with the registries of methods, importances and codecs, and with the losses.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from kflats.common.errors import KflatsError, KflatsWarning, as_options
from kflats.common.registry import announced, unknown
from kflats.common.sentences import undo_marks
from kflats.common.text_files import read_texts
from kflats.common.texts import SAMPLES
from kflats.io.atomic import check_file
from kflats.io.sources import trusting_remote_code
from kflats.recipe.budget import DEFAULT_QUALITY, Allocation, check_quality, one_budget
from kflats.tasks.task import find_task

if TYPE_CHECKING:
    from torch import nn

    from kflats.calibration.objectives import Objective
    from kflats.codecs import Codec
    from kflats.importance import Importance
    from kflats.methods import Auto, Method
    from kflats.recipe.recipe import Recipe

METHODS = ("svd", "flats", "kmeans-svd", "messi", "keep-dense", "auto", "robust-svd", "entrywise", "l1", "subspace")
IMPORTANCES = ("uniform", "counts", "zipf", "token-fisher", "row-fisher", "two-sided", "input-gram", "kronecker")
NO_DATA = ("uniform", "zipf")
"""The importances that neither count texts nor measure anything."""
CODECS = ("feedback", "float", "integer", "transform")
TYPES = ("float32", "float16", "bfloat16")
"""The types of numbers, which stand for codecs."""
LOSSES = ("squared", "power", "huber", "truncated")
TAKE = {
    "flats": ("flats", "kmeans-svd", "messi"),
    "restarts": ("flats", "kmeans-svd", "messi"),
    "form": ("svd",),
    "p": ("robust-svd", "entrywise"),
    "error": ("flats", "messi", "subspace"),
}
"""The methods that take each option of a method."""
SEARCHED = ("flats", "messi")
"""The methods that can search their number of flats."""
TAKE_POWER = ("counts", "zipf", "token-fisher")
"""The importances with a power."""


def _share(text: str) -> float:
    """A number between 0 and 1, which may be written in per cent."""
    number = text.strip()
    try:
        return float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no number; write .98, or 98%") from error


def conflict(option: str, other: str, hint: str) -> KflatsError:
    """The error for two options that exclude each other."""
    return KflatsError(f"{option} cannot be used with {other}", hint=hint)


def known(axis: str, own: Collection[str], name: str) -> bool:
    """Whether ``name`` is one of kflats' ``own`` names of an axis; False for one that another package announces.

    Raises:
        KflatsError: nothing is called so.
    """
    wanted = name.strip().lower()
    if wanted in own:
        return True
    others = [entry.name for entry in announced(axis)]
    if wanted not in others:
        raise unknown(axis, name, [*own, *others])
    return False


def check_codec(name: str) -> None:
    """Refuse a text that does not begin with the name of a codec or a type, or with "int" and a number of bits."""
    word = name.strip().lower().partition(" ")[0]
    if not (word.startswith("int") and word[3:].isdigit()):
        known("codec", (*CODECS, *TYPES), word)


def check_flats(count: str, method: str) -> None:
    """Refuse what is neither a number of flats nor the word "search", which only some methods can do."""
    if count == "search" and method not in SEARCHED:
        raise conflict("--flats search", f"--method {method}", f"--method {' or '.join(SEARCHED)}, or --flats K")
    if count != "search" and not (count.isascii() and count.isdigit() and 1 <= int(count) <= 4096):
        raise KflatsError(f"--flats {count} is not supported", hint="a whole number from 1 to 4096, or search")


@contextmanager
def only_own_words(show: Callable[[str], None]) -> Iterator[None]:
    """Hide logged lines below errors and Python's warnings meanwhile; ``show`` each warning of kflats, once."""
    said: set[str] = set()

    def shown(message: Warning | str, *_: object, **__: object) -> None:
        if isinstance(message, KflatsWarning) and (words := as_options(str(message))) not in said:
            said.add(words)
            show(words)

    # Read by torch and transformers when they are imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("default", KflatsWarning)
            warnings.showwarning = shown
            yield
    finally:
        logging.disable(before)


def hush(quiet: bool) -> bool:
    """Hide the warnings of kflats too, if ``quiet``; and the progress of downloads."""
    if quiet:
        warnings.simplefilter("ignore", KflatsWarning)
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return quiet


def trust(ctx: typer.Context, trusted: bool) -> bool:
    """Let code that comes with models run until the command ends, if ``trusted``; one line says so."""
    if trusted:
        ctx.with_resource(trusting_remote_code())
    return trusted


TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        callback=trust,
        expose_value=False,
        help="Run the Python code that some models bring; read it first. Without it such models are refused.",
    ),
]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A local model folder, or a hub name (owner/model).")]
OptionalModel = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="A local model folder, or a hub name (owner/model).")
]
Folder = Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to write.")]
TEXT_FILES = "plain text, JSON lines, CSV, Parquet, a data set; FILE:COLUMN names a column"
LARGEST_SEED = 2**31 - 1
Force = Annotated[bool, typer.Option("--force", help="Replace what --out names, if it is as kflats wrote it.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", callback=hush, help="Print nothing but errors: no progress, no table, no warning.")
]
Sizes = Annotated[str, typer.Option("--sizes", help="The sizes of the folders, with commas between them.")]
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
            help='What is kept of the named weights, row labels included: "60%", "12MB"; with floating-point '
            'numbers also "5.2M params" or "33% ranks".'
        ),
    ] = None
    size: Annotated[
        str | None,
        typer.Option(
            help='Size of all weight files: "40MB", "10%" or "2 bits" (a number). Use it in place of --keep; --method '
            "is then auto and --weights all, unless they are given, or an option of one method."
        ),
    ] = None
    quality: Annotated[
        float | None,
        typer.Option(
            metavar="Q",
            parser=_share,
            help="compress: in place of a size, the smallest folder whose outputs keep this share of the original's "
            f"quality, as .98 or 98%. Default without a size: {DEFAULT_QUALITY}.",
        ),
    ] = None
    weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help='A weight to compress, a pattern ("encoder.layer.*.attention.*"), or one of the words linear, conv, '
            "embeddings and all. Repeat it for more. Default: all where methods are auto and --keep is not given; else "
            "the token embeddings.",
        ),
    ] = None
    allocation: Annotated[
        Allocation | None,
        typer.Option(
            help="How the weights share the budget: uniform (in proportion to their bytes), loss (where a byte saves "
            "most loss; always so with --method auto), or auto (default: loss where the importance allows it)."
        ),
    ] = None

    def names(self, chosen: bool) -> tuple[str, ...]:
        """The names of the weights; of all weights if the budget is for the whole folder and methods are ``chosen``."""
        return tuple(self.weights or (("all",) if self.keep is None and chosen else ()))

    @property
    def tokens(self) -> bool:
        """Whether the names mean embeddings."""
        return all("embed" in name for name in self.weights or ())

    def check(self) -> None:
        """Refuse options that are no budget; without any the default quality is the budget."""
        check_quality(self.quality, self.keep, self.size)
        if self.keep is not None or self.size is not None:
            one_budget(self.keep, self.size)

    def check_size(self) -> None:
        """Refuse options that do not say how many bytes may be kept."""
        if self.quality is not None:
            raise conflict("--quality", "kflats plan", "--size or --keep, or kflats compress --quality")
        one_budget(self.keep, self.size)


@dataclass(frozen=True)
class TableOptions:
    """The options of a table in files, which is compressed in place of a model; None: not given."""

    table: Annotated[
        Path | None,
        typer.Option(
            metavar="SOURCE",
            help="compress: a table in place of MODEL: a file or a folder of safetensors, .npy, Parquet or Arrow. "
            "--size bounds the new folder.",
        ),
    ] = None
    layout: Annotated[
        Literal["compact", "fast"] | None,
        typer.Option(
            help="With --table: compact (entropy coded, the smallest; default), or fast (a fixed rate; random rows "
            "are read 25 to 50 times as fast)."
        ),
    ] = None
    column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --table: the tensor or column, where a file has several."),
    ] = None
    row_weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --table: .npy, how much each row counts, such as how often it is read."
        ),
    ] = None

    def flats(self, given: str | None) -> int:
        """The number of flats of ``--flats``.

        Raises:
            KflatsError: it is none.
        """
        if given is not None and not (given.isascii() and given.isdigit()):
            raise KflatsError(f"--flats {given} is not supported with --table", hint="a number from 1 to 16")
        return 1 if given is None else int(given)

    def check(self, size: str | None, model: str | None, others: Sequence[str]) -> None:
        """Refuse a table with options of models, and options of tables without one."""
        if self.table is None:
            if extra := given_options(self):
                raise conflict(", ".join(extra), "a model", "--table SOURCE, or leave them out")
            if model is None:
                raise KflatsError("no model is given", hint="kflats compress MODEL, or --table SOURCE")
        elif model is not None or others:
            chosen = "--size, --layout, --flats, --row-weights, --column"
            given = [*(["MODEL"] if model else []), *others]
            raise conflict("--table", ", ".join(given), f"{chosen}; leave {given[0]} out")
        elif size is None:
            raise KflatsError("a table needs a size", hint='--size "2 bits", or --size 8GB')


@dataclass(frozen=True)
class RecipeOptions:
    """The options that make a recipe; None: not given."""

    method: Annotated[
        str | None,
        typer.Option(
            help="flats, svd, kmeans-svd or messi; robust-svd, entrywise or subspace where there are outliers; "
            "keep-dense for --codec alone; auto: for each weight the method that loses least in its bytes. Default: "
            "auto without --keep or an option of one method; svd with measurements, --form or --codec transform; "
            "keep-dense with --codec feedback, or integers without measurements; else flats."
        ),
    ] = None
    flats: Annotated[
        str | None,
        typer.Option(
            metavar="K",
            help="With flats, kmeans-svd and messi: the number of flats, or (flats, messi) search: that of least "
            "error, or of the best score (--search). With --table: 1 to 16.",
        ),
    ] = None
    restarts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=1000,
            help="With flats, kmeans-svd and messi: random starts; the fit of least error is kept. Default: "
            "10 with messi, as published; else 1.",
        ),
    ] = None
    importance: Annotated[
        str | None,
        typer.Option(
            help="Which errors count most. For tokens: counts (with --texts), zipf, token-fisher. For any weight: "
            "uniform; with --texts or --task: kronecker, two-sided, row-fisher (FWSVD), input-gram. Default: counts "
            "with --texts if all names hold 'embed'; else with data kronecker, or row-fisher for methods other than "
            "svd; without data zipf for flats and uniform for others."
        ),
    ] = None
    power: Annotated[
        float | None,
        typer.Option(help="With counts, zipf and token-fisher: the power of the counts or of the Zipf prior."),
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
            help="How numbers are stored: float32, float16, bfloat16; transform (smallest for tables), feedback "
            '(smallest for layers with data), int2 to int8, "int4 32" (one scale for 32 columns). Default: '
            "the model's own type."
        ),
    ] = None

    @property
    def wants_flats(self) -> bool:
        """Whether an option is one that flats have and low rank has not."""
        return any(value is not None for value in (self.flats, self.restarts, self.error))

    @property
    def is_auto(self) -> bool:
        """Whether methods are chosen by the budget."""
        return (self.method or "").strip().lower() == "auto"


@dataclass(frozen=True)
class DataOptions:
    """The options that name data; None: not given."""

    texts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help=f"Texts to count tokens in and to measure with by running the model: {TEXT_FILES}."
        ),
    ] = None
    task: Annotated[
        str | None,
        typer.Option(
            help="Measure with this task's training examples and its own loss, in place of --texts: cola, sst2, mrpc, "
            "stsb, ..."
        ),
    ] = None
    task_data: TaskData = None
    objective: Annotated[
        Literal["task", "logits", "pooled", "sampled"] | None,
        typer.Option(
            help="What gradients are taken of: the task's loss (default with --task), random projections of the "
            "logits or of the pooled output (default: logits where the model has them), or labels that it samples."
        ),
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
            KflatsError: a file that cannot be read, or statistics that cannot be written; an unknown task, or
                --task-data without --task.
        """
        samples = SAMPLES if self.samples is None else self.samples
        if self.task_data is not None and self.task is None:
            raise KflatsError("--task-data cannot be used without --task", hint="--task NAME, or --texts FILE")
        if self.objective == "task" and self.task is None:
            raise KflatsError("--objective task cannot be used without --task", hint="--task, or another objective")
        task = None if self.task is None else find_task(self.task)
        known = self.statistics is not None and self.statistics.exists()
        if self.statistics is not None and not known:
            check_file(self.statistics)  # the measurements are written there at the end
        texts = None if self.texts is None else read_texts(self.texts)
        statistics = None
        if known and self.statistics is not None:
            from kflats.calibration.measurements import Statistics

            statistics = Statistics.load(self.statistics, mapped=True)

        def examples(model: nn.Module, tokenizer: Any) -> Any:
            from kflats.tasks.batches import task_batches

            return task_batches(task or "", tokenizer, limit=samples, task_data=self.task_data, model=model)

        return {
            "texts": texts,
            "calibration": None if task is None else examples,
            "objective": None if self.objective is None else _objective(self.objective),
            "statistics": statistics,
            "keep_statistics": None if known else self.statistics,
            "samples": samples,
        }


def _objective(name: str) -> Objective:
    from kflats.calibration.objectives import Projections, SampledLabels, TaskLoss

    values: dict[str, Objective] = {"task": TaskLoss(), "sampled": SampledLabels()}
    return values.get(name) or (Projections(of="logits") if name == "logits" else Projections(of="pooled"))


def texts_of(path: Path | None) -> tuple[str, ...] | None:
    """The texts of a file or folder, marks of tokenised corpora undone; None if none is given."""
    return None if path is None else undo_marks(read_texts(path))[0]


@dataclass(frozen=True)
class SearchOptions:
    """The options that say by what numbers of flats are compared."""

    search: Annotated[
        Literal["error", "task"],
        typer.Option(
            help="With --flats search: the number of least error, or of the best score of --task before any training."
        ),
    ] = "error"
    search_split: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --search task: the split of which 1,000 examples decide (train); best one that the model was "
            "not trained on, and never the one that judges.",
        ),
    ] = None

    def scored(self, data: DataOptions, flats: str | None) -> Callable[[nn.Module, Any], float] | None:
        """The score that decides, as an argument of ``compress_folder``; None: the error does.

        Raises:
            KflatsError: a search by task without a task, or without a search.
        """
        if self.search == "error":
            if self.search_split is not None:
                raise conflict("--search-split", "--search error", "--search task, or leave --search-split out")
            return None
        if flats != "search":
            raise KflatsError("--search task cannot be used without --flats search", hint="--flats search")
        if data.task is None:
            raise KflatsError("--search task cannot be used without --task", hint="--task NAME, or --search error")
        task, folder, split = find_task(data.task), data.task_data, self.search_split or "train"

        def score_of(model: nn.Module, tokenizer: Any) -> float:
            from kflats.tasks.scoring import score

            found = score(model, tokenizer, task, task_data=folder, split=split, limit=1000, costs=False)
            return -found.value if found.metric == "perplexity" else found.value

        return score_of


@dataclass(frozen=True)
class ExampleOptions:
    """The options that say which examples of a task are read, and how."""

    batch: Annotated[int, typer.Option(help="Examples of a batch.")] = 32
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of an example; longer examples are cut.")] = 128
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
    precision: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(help="Of products; bfloat16 is faster on some processors, slower on others."),
    ] = "float32"
    temperature: Annotated[float, typer.Option(help="With --teacher: the temperature of its outputs.")] = 2.0
    labels_weight: Annotated[
        float, typer.Option(help="With --teacher: the weight of the labels' loss beside the teacher's, 0 to 1.")
    ] = 0.5


def check_recipe(options: RecipeOptions, *, counted: bool) -> None:
    """Refuse names that nothing has, and options that exclude each other.

    Args:
        options: of the recipe. counted: whether there are texts.
    """
    method = (options.method or "").strip().lower()
    if options.is_auto:
        others = given_options(replace(options, method=None, importance=None))
        if options.importance not in (None, "uniform"):
            others.append(f"--importance {options.importance}")
        if others:
            raise conflict(others[0], "--method auto", "leave the option out, or --importance uniform")
    if options.codec is not None:
        check_codec(options.codec)
    if options.importance is not None and known("importance", IMPORTANCES, options.importance):
        importance = options.importance.strip().lower()
        if counted and importance in NO_DATA:
            raise conflict("--texts", f"--importance {importance}", "leave --texts out, or --importance counts")
        if options.power is not None and importance not in TAKE_POWER:
            raise conflict("--power", f"--importance {importance}", f"one of {', '.join(TAKE_POWER)}, or no --power")
    if options.error is not None:
        known("loss", LOSSES, options.error.strip().partition(" ")[0])
    if options.method is None or known("method", METHODS, method):
        usual = "flats" if options.wants_flats else "svd"
        if options.flats is not None:
            check_flats(str(options.flats), method or usual)
        for option, able in TAKE.items():
            if getattr(options, option) is not None and (method or usual) not in able:
                chosen = f"--method {method}" if method else "the default method"
                raise conflict(f"--{option}", chosen, f"--method {' or '.join(able)}, or leave --{option} out")


def recipe_of(
    options: RecipeOptions, *, counted: bool, measured: bool = False, tokens: bool = True, whole_file: bool = False
) -> Recipe | Auto | None:
    """The recipe of the options; None if no option is given.

    The default importance of embeddings: counts for texts; without texts a Zipf prior for flats, and uniform for the
    other methods, as they were published. Of other weights with texts, and of all with other measurements: kronecker,
    whose default method is SVD, or row-fisher where the method takes no more.

    Args:
        options: of the recipe.
        counted: whether there are texts. measured: whether there is other data to measure with.
        tokens: whether the named weights are embeddings.
        whole_file: whether the budget bounds all weight files; then the default is ``Auto()``.

    Raises:
        KflatsError: options that exclude each other, or values that they cannot have.
    """
    check_recipe(options, counted=counted)
    from kflats import codecs, importance
    from kflats.methods import Auto
    from kflats.recipe.recipe import Recipe

    if options == RecipeOptions():
        return Auto() if whole_file else None
    if options.is_auto:
        return Auto() if options.importance is None else Recipe(Auto())
    name = options.importance or _usual_importance(options, counted, measured or (counted and not tokens))
    weighs = importance.from_name(name, **({} if options.power is None else {"power": options.power}))
    codec = codecs.Float() if options.codec is None else codecs.from_name(options.codec)
    method = method_of(options, _usual_method(options, weighs, codec))
    return Recipe(method, weighs, codec, matrix_rows=options.matrix_rows or "in_features")


def method_of(options: RecipeOptions, default: str) -> Method:
    """The method with its own options.

    Raises:
        KflatsError: a value that an option cannot have, or an option that a method of another package does not take.
    """
    from kflats import methods
    from kflats.numerics.loss import from_name as loss_of

    values = {option: getattr(options, option) for option in TAKE if getattr(options, option) is not None}
    if options.error is not None:
        values["error"] = loss_of(options.error)
    if options.flats is not None:
        values["k"] = None if values.pop("flats") == "search" else int(options.flats)
    return methods.from_name(default if options.method is None else options.method, **values)


def given_options(options: BudgetOptions | TableOptions | RecipeOptions | DataOptions) -> list[str]:
    """The options that are given, as the user writes them."""
    return ["--" + name.replace("_", "-") for name, value in asdict(options).items() if value is not None]


def _usual_importance(options: RecipeOptions, counted: bool, measured: bool) -> str:
    if measured and options.power is None:
        one_sided = options.method not in (None, "svd") or options.wants_flats
        return "row-fisher" if one_sided else "kronecker"
    baseline = options.power is None and options.method not in (None, "flats")
    return "counts" if counted else "uniform" if baseline else "zipf"


def _usual_method(options: RecipeOptions, importance: Importance, codec: Codec) -> str:
    from kflats.methods import SVD, KeepDense

    if options.wants_flats:
        return "flats"
    if options.form is not None:
        return "svd"
    if not codec.stores_integers:
        return "svd" if importance.needs else "flats"
    dense, low_rank = (codec.refusal(method) is None for method in (KeepDense(), SVD()))
    return "svd" if low_rank and (importance.needs or not dense) else "keep-dense"
