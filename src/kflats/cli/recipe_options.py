"""The options that say what a compression does, and the budget, recipe and plan that they stand for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from kflats import importance as importances
from kflats import methods
from kflats.codecs import Codec, Float
from kflats.codecs import from_name as codec_of
from kflats.common.errors import KflatsError
from kflats.importance import Importance
from kflats.methods import Auto, KeepDense, Method
from kflats.numerics.loss import from_name as loss_of
from kflats.planning.strategies import Allocation
from kflats.recipe.budget import Budget, one_budget
from kflats.recipe.plan import Plan
from kflats.recipe.recipe import Recipe, as_recipe


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

    def budget(self) -> Budget:
        """The budget.

        Raises:
            KflatsError: both or none of --keep and --size, or a text that is not a budget.
        """
        if (self.keep is None) == (self.size is None):
            raise KflatsError(
                "give one of --keep and --size",
                hint="--keep 60% (of the named weights), or --size 40MB (all weight files)",
            )
        return one_budget(self.keep, self.size)

    def names(self, recipe: Recipe | Method | None) -> tuple[str, ...]:
        """The names of the weights; of all weights where the size of the files is given and methods are chosen."""
        if self.weights or self.size is None or recipe is None:
            return tuple(self.weights or ())
        return ("all",) if as_recipe(recipe).chooses else ()


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
    ellipsoid: Annotated[str | None, typer.Option(help="With robust-svd: lewis (default) or loewner.")] = None
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
            '"int4 32" (one scale for 32 columns), rotation. Default: the model\'s own type.'
        ),
    ] = None


_OF_METHOD = {"flats": "k", "form": "form", "p": "p", "ellipsoid": "ellipsoid", "error": "error"}
"""Options of the method, and the names of its fields."""


def recipe_of(
    asked: RecipeOptions, *, counted: bool, measured: bool = False, whole_file: bool = False
) -> Recipe | Auto | None:
    """The recipe of the options; None where none of them is given.

    The default importance: counts for texts; without texts a Zipf prior for flats, and uniform for the other methods,
    as they were published. With measurements the default is SVD.

    Args:
        asked: the options.
        counted: whether there are texts to count. measured: whether there is data to measure with.
        whole_file: whether the budget bounds all weight files; then the default is ``Auto()``.

    Raises:
        KflatsError: options that exclude each other, or an importance without its data.
    """
    if asked == RecipeOptions():
        return Auto() if whole_file else None
    if (asked.method or "").strip().lower() == "auto":
        return _automatic(asked)
    importance = _usual_importance(asked, counted, measured) if asked.importance is None else asked.importance
    value = importances.from_name(importance, **({} if asked.power is None else {"power": asked.power}))
    stored = Float() if asked.codec is None else codec_of(asked.codec)
    geometry = method_of(asked, _usual_method(asked, value, stored))
    if value.needs_texts and not counted:
        raise KflatsError(f"--importance {importance} needs --texts FILE", hint="--importance zipf needs no texts")
    if value.needs and not (measured or counted):
        raise KflatsError(
            f"--importance {importance} needs --calibration FILE or --task NAME",
            cause="it is measured by running the model",
            hint="a file of texts, one sentence a line",
        )
    if counted and not (value.needs_texts or value.needs):
        raise KflatsError(
            f"--texts cannot be used with --importance {importance}",
            cause="this importance counts no texts",
            hint="leave --texts out, or --importance counts",
        )
    return Recipe(geometry, value, stored, matrix_rows=asked.matrix_rows or "in_features")


def method_of(asked: RecipeOptions, default: str) -> Method:
    """The method with its own options.

    Raises:
        KflatsError: an option of another method, or a value that it cannot have.
    """
    name = (default if asked.method is None else asked.method).strip().lower()
    known = methods.METHODS.options(name)
    given = {option: value for option, value in asdict(asked).items() if option in _OF_METHOD and value is not None}
    for option in given:
        if _OF_METHOD[option] not in known:
            able = [other for other in methods.METHODS.names if _OF_METHOD[option] in methods.METHODS.options(other)]
            raise KflatsError(
                f"--{option} cannot be used with --method {name}{'' if asked.method else ', the default'}",
                cause=f"it is an option of {', '.join(able)}",
                hint=f"--method {able[0]}, or leave --{option} out",
            )
    if asked.error is not None:
        given["error"] = loss_of(asked.error)
    if asked.ellipsoid is not None:
        given["ellipsoid"] = methods.ellipsoid_of(asked.ellipsoid)
    return methods.from_name(name, **{_OF_METHOD[option]: value for option, value in given.items()})


def plan_of(path: Path, budget: BudgetOptions, recipe: RecipeOptions, counted: bool) -> Plan:
    """The plan in a file. The options beside it must not contradict it.

    Raises:
        KflatsError: another budget, an option that the plan decides, or texts that it does not count.
    """
    decided = {**asdict(recipe), "weights": budget.weights, "allocation": budget.allocation}
    if extra := ["--" + name.replace("_", "-") for name, value in decided.items() if value is not None]:
        raise KflatsError(
            f"--plan cannot be used with {', '.join(extra)}",
            cause="the plan decides it already",
            hint="leave the option out, or make another plan: kflats plan",
        )
    plan = Plan.load(path)
    if budget.keep is not None or budget.size is not None:
        asked = budget.budget()
        if str(asked) != str(plan.budget):
            raise KflatsError(
                f"the plan was made for a budget of {plan.budget}, not {asked}",
                hint="leave the budget out, or make the plan again: kflats plan",
            )
    importances = [decision.recipe.importance for decision in plan.decisions]
    if counted and not any(value.needs_texts or value.needs for value in importances):
        raise KflatsError("this plan counts no texts", hint="leave --texts out, or make the plan with --texts")
    return plan


def _automatic(asked: RecipeOptions) -> Recipe | Auto:
    """``Auto()``, with the importance that the data allows or with the given one."""
    if decided := [name for name in ("codec", "matrix_rows", *_OF_METHOD) if getattr(asked, name) is not None]:
        option = "--" + decided[0].replace("_", "-")
        raise KflatsError(
            f"{option} cannot be used with --method auto",
            cause="it is chosen for each weight",
            hint=f"leave {option} or --method auto out",
        )
    if asked.importance is None:
        if asked.power is not None:
            raise KflatsError(
                "--power cannot be used without --importance",
                cause="it is the power of an importance",
                hint="--importance counts or zipf",
            )
        return Auto()
    value = importances.from_name(asked.importance)
    if value.needs or value.needs_tokenizer or asked.power is not None:
        raise KflatsError(
            f"--importance {asked.importance} cannot be used with --method auto",
            cause="each kind of weight has the importance that the data allows",
            hint="leave --importance out, or --importance uniform",
        )
    return Recipe(Auto(), value)


def _usual_importance(asked: RecipeOptions, counted: bool, measured: bool) -> str:
    if measured and asked.power is None:
        one_sided = asked.method not in (None, "svd") or asked.flats is not None or asked.error is not None
        return "row-fisher" if one_sided else "kronecker"
    baseline = asked.power is None and asked.method not in (None, "flats")
    return "counts" if counted else "uniform" if baseline else "zipf"


def _usual_method(asked: RecipeOptions, importance: Importance, codec: Codec) -> str:
    flats = asked.flats is not None or asked.error is not None
    usual = "svd" if not flats and (importance.needs or asked.form is not None) else "flats"
    if flats or usual == "svd" or not codec.stores_integers:
        return usual
    return "keep-dense" if codec.refusal(KeepDense()) is None else "svd"
