"""The command line's options, and the text of them turned into values: here and nowhere below."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from kflats.errors import KflatsError

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A local model folder, or a hub name (owner/model).")]
BudgetText = Annotated[
    str | None,
    typer.Option(
        "--budget",
        help='Bytes kept of the named weights, row labels included: "60%", "12MB", "5.2M params"; or "33% ranks".',
    ),
]
FileBudget = Annotated[
    str | None,
    typer.Option(
        "--file-budget", help='Bound all weight files instead: "40MB". Method and weights default to best and all.'
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="flats, svd, kmeans-svd or messi; best: for each weight what loses least for its bytes; where outliers "
        "are, robust-svd, entrywise or subspace. Default: flats; svd for what is measured; best with --file-budget.",
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
    typer.Option("--ellipsoid", help="With robust-svd: lewis (default), loewner, sketch or sample."),
]
ErrorName = Annotated[
    str | None,
    typer.Option(
        "--error",
        metavar="LOSS",
        help='With flats, messi and subspace: what a distance costs: squared, "power 1", "huber 0.5", "truncated 3 '
        'median"; with messi also manhattan and "entries 0.5".',
    ),
]
FlatCount = Annotated[int | None, typer.Option("--flats", metavar="K", help="Number of flats.")]
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--weights",
        metavar="NAME",
        help='A weight to compress, a pattern ("encoder.layer.*.attention.*"), or one of linear, conv, embeddings and '
        "all; may be repeated. Default: the token embeddings; all with --file-budget.",
    ),
]
Importance = Annotated[
    str | None,
    typer.Option(
        "--importance",
        help="Whose error counts. Tokens: counts (needs --texts), zipf. Any weight: uniform; with --calibration: "
        "kronecker, two-sided, row-fisher (FWSVD), element-fisher, input-gram.",
    ),
]
Power = Annotated[float | None, typer.Option("--power", help="Power of the counts or of the Zipf prior.")]
Texts = Annotated[Path | None, typer.Option("--texts", metavar="FILE", help="UTF-8 text, one sentence a line.")]
Calibration = Annotated[
    Path | None,
    typer.Option("--calibration", metavar="FILE", help="Texts to measure with (UTF-8, one a line), see --samples."),
]
CalibrationTask = Annotated[
    str | None,
    typer.Option(
        "--task", help="Measure with this task's training examples and its own loss: cola, sst2, mrpc, stsb, ..."
    ),
]
TaskFolder = Annotated[
    Path | None, typer.Option("--data", metavar="FOLDER", help="The task's folder of TSV files. Default: the hub.")
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
    str | None, typer.Option("--rows", help="What a linear layer's rows are: inputs (default) or outputs.")
]
StoredForm = Annotated[
    str | None, typer.Option("--form", help="With svd: factors (default) or interpolative (16 % less, same matrix).")
]
Trim = Annotated[
    int | None,
    typer.Option("--trim", metavar="N", help="First keep the N commonest tokens only, counted in --texts."),
]
Seed = Annotated[int, typer.Option("--seed", help="Where the random starts begin.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what --out names.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar and no table.")]


def budget_of(budget: str | None, file_budget: str | None) -> Any:
    """The one budget that was given."""
    from kflats.budget import parse_budget

    if (budget is None) == (file_budget is None):
        raise KflatsError(
            "give one of --budget and --file-budget",
            hint="--budget 60% (kept of the named weights), or --file-budget 40MB (all weight files)",
        )
    return parse_budget(budget) if budget is not None else parse_budget(file_budget or "", scope="file")


def plan_of(path: Path, budget: str | None, file_budget: str | None, counted: bool, **decided: object) -> Any:
    """The plan; what is given beside it must not contradict it.

    Raises:
        KflatsError: another budget, an option that the plan decides, or texts that it does not count.
    """
    from kflats.plan import Plan

    if extra := ["--" + name for name, value in decided.items() if value is not None]:
        raise KflatsError(f"--plan already decides what {', '.join(extra)} would", hint="leave one of them out")
    found = Plan.load(path)
    if budget is not None or file_budget is not None:
        asked = str(budget_of(budget, file_budget))
        if asked != found.budget:
            raise KflatsError(
                f"the plan was made for a budget of {found.budget}, not {asked}",
                hint="leave the budget out, or make the plan again: kflats plan",
            )
    importances = [decision.recipe.importance for decision in found.decisions]
    if counted and not any(getattr(value, "needs_texts", False) or value.needs for value in importances):
        raise KflatsError("this plan counts no texts", hint="leave --texts out, or make the plan with --texts")
    return found


@dataclass(frozen=True)
class Asked:
    """The options that make a recipe, as they were given; None: left to kflats."""

    method: str | None = None
    flats: int | None = None
    importance: str | None = None
    power: float | None = None
    rows: str | None = None
    form: str | None = None
    p: float | None = None
    ellipsoid: str | None = None
    error: str | None = None
    codec: str | None = None

    @property
    def nothing(self) -> bool:
        """Whether all is left to kflats."""
        return all(getattr(self, field.name) is None for field in fields(self))

    @property
    def given(self) -> dict[str, object]:
        """By the option's name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def recipe_of(asked: Asked, *, counted: bool, measured: bool = False, whole_file: bool = False) -> Any:
    """The recipe that the options ask for; None where they leave it all to kflats.

    Texts are there to be counted. Without them flats use the Zipf prior, and a baseline is what was
    published: every row counts the same. What is measured goes with SVD.

    Args:
        asked: the options.
        counted: whether there are texts to count. measured: whether there is data to measure with.
        whole_file: whether the budget bounds all weight files; then nothing asked means ``Best()``.
    """
    from kflats import importance as importances
    from kflats.codec import Float, from_name
    from kflats.methods import Best
    from kflats.recipe import Recipe

    if asked.nothing:
        return Best() if whole_file else None
    if (asked.method or "").strip().lower() == "best":
        return _best(asked)
    method, importance = asked.method, asked.importance
    power = {} if asked.power is None else {"power": asked.power}
    if importance is None and measured and asked.power is None:
        one_sided = method not in (None, "svd") or asked.flats is not None or asked.error is not None
        importance = "row-fisher" if one_sided else "kronecker"
    elif importance is None:
        baseline = asked.power is None and method not in (None, "flats")
        importance = "counts" if counted else "uniform" if baseline else "zipf"
    value = importances.from_name(importance, **power)
    stored = Float() if asked.codec is None else from_name(asked.codec)
    plain = asked.flats is None and asked.error is None and (value.needs or asked.form is not None)
    default = "svd" if plain else "flats"
    if stored.methods is not None and not (default == "svd" and "SVD" in stored.methods):
        default = "dense" if "Dense" in stored.methods else "svd"
    geometry = method_of(asked, default)
    needs = getattr(value, "needs_texts", False)
    if needs and not counted:
        raise KflatsError(f"--importance {importance} needs --texts FILE", hint="--importance zipf needs no texts")
    if value.needs and not (measured or counted):
        raise KflatsError(
            f"--importance {importance} needs --calibration FILE or --task NAME", hint="texts, one a line"
        )
    if counted and not (needs or value.needs):
        raise KflatsError(
            f"--importance {importance} counts no texts", hint="leave --texts out, or --importance counts"
        )
    if asked.rows not in (None, "inputs", "outputs"):
        raise KflatsError(f"--rows {asked.rows} is unknown", hint="inputs or outputs")
    return Recipe(geometry, value, stored, rows="outputs" if asked.rows == "outputs" else "inputs")


def weights_of(names: list[str] | None, recipe: Any, whole_file: bool) -> tuple[str, ...]:
    """The weights that are named; for a budget of the whole file and ``Best()`` all of them by default."""
    from kflats.methods import Best

    return tuple(names or (("all",) if whole_file and isinstance(recipe, Best) else ()))


def _best(asked: Asked) -> Any:
    """``Best()``, by the importance that the data allows or by the one asked for."""
    from kflats import importance as importances
    from kflats.methods import Best
    from kflats.recipe import Recipe

    decided = [name for name in ("codec", "rows", *_OF_METHOD) if getattr(asked, name) is not None]
    if decided:
        raise KflatsError(f"--method best decides itself what --{decided[0]} would", hint="leave one of them out")
    if asked.importance is None:
        if asked.power is not None:
            raise KflatsError("--power is of an importance", hint="--importance counts or zipf")
        return Best()
    value = importances.from_name(asked.importance)
    if value.needs or getattr(value, "needs_tokenizer", False) or asked.power is not None:
        raise KflatsError(
            "--method best weighs each kind of weight by what the data allows",
            hint="leave --importance out, or --importance uniform for none",
        )
    return Recipe(Best(), value)


_OF_METHOD = {"flats": "k", "form": "form", "p": "p", "ellipsoid": "ellipsoid", "error": "error"}
"""Options that are of the method, and what its fields call them."""


def method_of(asked: Asked, default: str) -> Any:
    """The method with its own options.

    Raises:
        KflatsError: an option of another method, or a value that it cannot have.
    """
    from kflats import methods
    from kflats.numerics.entry_em import EntryPower

    name = (asked.method or default).strip().lower()
    fields_of = methods.options_of(name)
    options: dict[str, Any] = {}
    for option, field in _OF_METHOD.items():
        given = getattr(asked, option)
        if given is None:
            continue
        if field not in fields_of:
            able = [other for other in methods.NAMES if field in methods.options_of(other)]
            said = "" if asked.method else ", the default"
            raise KflatsError(f"--{option} is of {', '.join(able)}, not of {name}{said}", hint=f"--method {able[0]}")
        options[field] = given
    if asked.form not in (None, "factors", "interpolative"):
        raise KflatsError(f"--form {asked.form} is unknown", hint="factors or interpolative")
    if asked.error is not None:
        options["error"] = error_of(asked.error)
        if name in ("flats", "subspace") and isinstance(options["error"], EntryPower):
            several = "flats whose ranks differ" if name == "flats" else "distances to one flat"
            raise KflatsError(
                f"--error {asked.error!r} is of messi, not of {name}",
                cause=f"{several} have no fit for powers of single entries",
                hint="--method messi (flats of one rank), or --method entrywise --p P (one flat)",
            )
    if asked.ellipsoid is not None:
        options["ellipsoid"] = methods.ellipsoid_of(asked.ellipsoid)
    return methods.from_name(name, **options)


def error_of(text: str) -> Any:
    """What a distance costs: a loss by its name, or "entries P" and "manhattan" for powers of single entries.

    Raises:
        KflatsError: no error is called that.

    >>> error_of("power 1"), error_of("manhattan")
    (Power(q=1.0), EntryPower(p=1.0))
    """
    from kflats.numerics.entry_em import EntryPower
    from kflats.numerics.loss import from_name

    kind, *rest = text.strip().lower().split() or [""]
    if kind == "manhattan" and not rest:
        return EntryPower(1.0)
    if kind == "entries" and len(rest) == 1:
        try:
            power = float(rest[0])
        except ValueError:
            raise KflatsError(f"--error {text}: {rest[0]!r} is no number", hint='"entries 1"') from None
        return EntryPower(power)
    return from_name(text)


def statistics_of(path: Path | None) -> Any:
    """What was measured before, if the file is there."""
    from kflats.measurements import Statistics

    return Statistics.load(path) if path is not None and path.exists() else None


def allocation_of(text: str | None) -> Any:
    """One of the three, by default "auto"."""
    if text not in (None, "auto", "uniform", "loss"):
        raise KflatsError(f"--allocation {text} is unknown", hint="auto, uniform or loss")
    return text or "auto"


def texts_of(path: Path | None) -> tuple[str, ...] | None:
    """The lines of a file, if one was given."""
    from kflats.texts import read_texts

    return None if path is None else read_texts(path)


def samples_of(asked: int | None) -> int:
    """How many texts or examples are measured with."""
    from kflats.calibration import SAMPLES

    if asked is not None and asked < 1:
        raise KflatsError(f"--samples {asked} measure nothing", hint="a few hundred")
    return SAMPLES if asked is None else asked


def examples_of(task: str | None, folder: Path | None, calibration: Path | None, samples: int) -> Any:
    """What makes labelled batches of a task for a model and its tokenizer; None where no task is given."""
    from kflats.task_batches import task_batches

    if task is None:
        if folder is not None:
            raise KflatsError("--data is of a --task", hint="--task NAME, or --calibration FILE")
        return None
    if calibration is not None:
        raise KflatsError("--task and --calibration are both given", hint="one of them: labelled examples or texts")
    return lambda model, tokenizer: task_batches(task, tokenizer, limit=samples, data=folder, model=model)


def tokenizer_of(folder: Path, *, needed: bool) -> Any:
    """The folder's tokenizer; None where it has none and nothing needs one."""
    from kflats.evaluate import load_tokenizer

    try:
        return load_tokenizer(folder)
    except KflatsError:
        if needed:
            raise
        return None
