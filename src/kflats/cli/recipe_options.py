"""What the options ask for, from their text into values: budget, recipe, weights, allocation, plan."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

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
class RecipeOptions:
    """The options that make a recipe, as they were given; None: left to kflats."""

    method: str | None = None
    flats: int | None = None
    importance: str | None = None
    power: float | None = None
    matrix_rows: str | None = None
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


_OF_METHOD = {"flats": "k", "form": "form", "p": "p", "ellipsoid": "ellipsoid", "error": "error"}
"""Options that are of the method, and what its fields call them."""


def recipe_of(
    asked: RecipeOptions, *, counted: bool, measured: bool = False, whole_file: bool = False
) -> Recipe | Auto | None:
    """The recipe that the options ask for; None where they leave it all to kflats.

    Texts are there to be counted. Without them flats use the Zipf prior, and a baseline is what was
    published: every row counts the same. What is measured goes with SVD.

    Args:
        asked: the options.
        counted: whether there are texts to count. measured: whether there is data to measure with.
        whole_file: whether the budget bounds all weight files; then nothing asked means ``Auto()``.
    """
    if asked.nothing:
        return Auto() if whole_file else None
    if (asked.method or "").strip().lower() == "auto":
        return _best(asked)
    importance = _usual_importance(asked, counted, measured) if asked.importance is None else asked.importance
    value = importances.from_name(importance, **({} if asked.power is None else {"power": asked.power}))
    stored = Float() if asked.codec is None else codec_of(asked.codec)
    geometry = method_of(asked, _usual_method(asked, value, stored))
    counts = value.needs_texts
    if counts and not counted:
        raise KflatsError(f"--importance {importance} needs --texts FILE", hint="--importance zipf needs no texts")
    if value.needs and not (measured or counted):
        raise KflatsError(
            f"--importance {importance} needs --calibration FILE or --task NAME", hint="texts, one a line"
        )
    if counted and not (counts or value.needs):
        raise KflatsError(
            f"--importance {importance} counts no texts", hint="leave --texts out, or --importance counts"
        )
    if asked.matrix_rows not in (None, "in_features", "out_features"):
        raise KflatsError(
            f"--matrix-rows {asked.matrix_rows} is not a side of a layer", hint="in_features or out_features"
        )
    return Recipe(
        geometry, value, stored, matrix_rows="out_features" if asked.matrix_rows == "out_features" else "in_features"
    )


def weights_of(names: list[str] | None, recipe: Any, whole_file: bool) -> tuple[str, ...]:
    """The weights that are named; for a budget of the whole file and ``Auto()`` all of them by default."""
    return tuple(names or (("all",) if whole_file and recipe is not None and as_recipe(recipe).chooses else ()))


def method_of(asked: RecipeOptions, default: str) -> Method:
    """The method with its own options.

    Raises:
        KflatsError: an option of another method, or a value that it cannot have.
    """
    name = (default if asked.method is None else asked.method).strip().lower()
    fields_of = methods.METHODS.options(name)
    options: dict[str, Any] = {}
    for option, field in _OF_METHOD.items():
        given = getattr(asked, option)
        if given is None:
            continue
        if field not in fields_of:
            able = [other for other in methods.METHODS.names if field in methods.METHODS.options(other)]
            said = "" if asked.method else ", the default"
            raise KflatsError(f"--{option} is of {', '.join(able)}, not of {name}{said}", hint=f"--method {able[0]}")
        options[field] = given
    if asked.form not in (None, "factors", "interpolative"):
        raise KflatsError(f"--form {asked.form} is unknown", hint="factors or interpolative")
    if asked.error is not None:
        options["error"] = loss_of(asked.error)
    if asked.ellipsoid is not None:
        options["ellipsoid"] = methods.ellipsoid_of(asked.ellipsoid)
    return methods.from_name(name, **options)


def budget_of(keep: str | None, size: str | None) -> Budget:
    """The one budget that was given."""
    if (keep is None) == (size is None):
        raise KflatsError(
            "give one of --keep and --size", hint="--keep 60% (of the named weights), or --size 40MB (all weight files)"
        )
    return one_budget(keep, size)


def allocation_of(text: str | None) -> Allocation:
    """One of the three, by default "auto"."""
    known: tuple[Allocation, ...] = get_args(Allocation)
    for name in known:
        if name == ("auto" if text is None else text):
            return name
    raise KflatsError(f"--allocation {text} is unknown", hint=", ".join(known[:-1]) + f" or {known[-1]}")


def plan_of(path: Path, keep: str | None, size: str | None, counted: bool, **decided: object) -> Plan:
    """The plan; what is given beside it must not contradict it.

    Raises:
        KflatsError: another budget, an option that the plan decides, or texts that it does not count.
    """
    if extra := ["--" + name for name, value in decided.items() if value is not None]:
        raise KflatsError(f"--plan already decides what {', '.join(extra)} would", hint="leave one of them out")
    found = Plan.load(path)
    if keep is not None or size is not None:
        asked = budget_of(keep, size)
        if str(asked) != str(found.budget):
            raise KflatsError(
                f"the plan was made for a budget of {found.budget}, not {asked}",
                hint="leave the budget out, or make the plan again: kflats plan",
            )
    importances = [decision.recipe.importance for decision in found.decisions]
    if counted and not any(value.needs_texts or value.needs for value in importances):
        raise KflatsError("this plan counts no texts", hint="leave --texts out, or make the plan with --texts")
    return found


def _best(asked: RecipeOptions) -> Recipe | Auto:
    """``Auto()``, by the importance that the data allows or by the one asked for."""
    decided = [name for name in ("codec", "matrix_rows", *_OF_METHOD) if getattr(asked, name) is not None]
    if decided:
        raise KflatsError(f"--method auto decides itself what --{decided[0]} would", hint="leave one of them out")
    if asked.importance is None:
        if asked.power is not None:
            raise KflatsError("--power is of an importance", hint="--importance counts or zipf")
        return Auto()
    value = importances.from_name(asked.importance)
    if value.needs or value.needs_tokenizer or asked.power is not None:
        raise KflatsError(
            "--method auto weighs each kind of weight by what the data allows",
            hint="leave --importance out, or --importance uniform for none",
        )
    return Recipe(Auto(), value)


def _usual_importance(asked: RecipeOptions, counted: bool, measured: bool) -> str:
    if measured and asked.power is None:
        one_sided = asked.method not in (None, "svd") or asked.flats is not None or asked.error is not None
        return "row-fisher" if one_sided else "kronecker"
    baseline = asked.power is None and asked.method not in (None, "flats")
    return "counts" if counted else "uniform" if baseline else "zipf"


def _usual_method(asked: RecipeOptions, importance: Importance, codec: Codec) -> str:
    plain = asked.flats is None and asked.error is None and (importance.needs or asked.form is not None)
    usual = "svd" if plain else "flats"
    if not codec.stores_integers or usual == "svd" or asked.flats is not None or asked.error is not None:
        return usual
    return "keep-dense" if codec.refusal(KeepDense()) is None else "svd"
