"""Recipes: method x importance x codec, and which side is covered, as one value; and their JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from kflats import importance, methods
from kflats.codecs import codec
from kflats.codecs.codec import Float
from kflats.errors import KflatsError
from kflats.importance import Uniform
from kflats.nn.coded_geometry import MAX_CLASSES

AXES: dict[str, tuple[type, ...]] = {
    "method": methods.VALUES,
    "importance": importance.VALUES,
    "codec": codec.VALUES,
}
"""The independent choices of a recipe, and the values that a plan file may name for each."""


@dataclass(frozen=True)
class Recipe:
    """Three independent choices: the geometry, whose error counts, and how numbers are stored.

    Args:
        method: ``SVD()``, ``Flats(k=5)``, ...
        importance: ``Uniform()``, ``TokenCounts(power=0.5)``, ``ZipfPrior()``, ...
        codec: ``Float()``, or integers: ``Transform()``, ``Int8()``, ``Int4()``, ``Rotation()``.
        rows: what the method takes as rows of a linear layer: "inputs" (input neurons, as FWSVD and MESSI do) or
            "outputs": then the importance of inputs is its right side, and that of outputs its left.

    Raises:
        KflatsError: a class instead of a value, a value of another axis, or other rows.

    >>> Recipe(methods.Flats(k=5)).codec
    Float(dtype='same')
    """

    method: Any
    importance: Any = Uniform()
    codec: Any = Float()
    rows: Literal["inputs", "outputs"] = "inputs"

    def __post_init__(self) -> None:
        if self.rows not in ("inputs", "outputs"):
            raise KflatsError(f"rows={self.rows!r} is unknown", hint='"inputs" or "outputs"')
        for axis in AXES:
            value = getattr(self, axis)
            if not dataclasses.is_dataclass(value) or isinstance(value, type):
                made = f"{value.__name__}()" if isinstance(value, type) else " or ".join(_names(axis))
                raise KflatsError(f"{value!r} is no {axis}", cause="a recipe is made of values", hint=f"{made}")
            if isinstance(value, methods.PARTS):
                made = "Subspace(error=Power(1)) or RobustSVD(ellipsoid=Lewis())"
                raise KflatsError(f"{value!r} is no {axis}", cause="it is a part of a method", hint=made)
            other = [name for name, kinds in AXES.items() if name != axis and isinstance(value, kinds)]
            if other or isinstance(value, Recipe):
                raise KflatsError(
                    f"{value!r} is no {axis}",
                    cause=f"it says {other[0] if other else 'whole recipe'}",
                    hint="Recipe(method, importance, codec), each of them optional but the first",
                )
        if isinstance(self.method, methods.Best) and self.codec != Float():
            raise KflatsError(
                f"Best() chooses the codec, so {brief(self.codec)} has no say", hint="leave one of them out"
            )
        if self.is_coded:
            _check_coded(self)

    @property
    def is_dense(self) -> bool:
        """Whether the weight stays as it is."""
        return isinstance(self.method, methods.Dense) and self.codec == Float()

    @property
    def is_cast(self) -> bool:
        """Whether all numbers of the weight itself are stored, in a type that is named."""
        return isinstance(self.method, methods.Dense) and isinstance(self.codec, Float) and not self.is_dense

    @property
    def is_coded(self) -> bool:
        """Whether integers are stored, and not numbers."""
        return not isinstance(self.codec, Float)

    def torch_dtype(self, original: torch.dtype | str) -> torch.dtype:
        """The type of all floating-point numbers that are stored: where there are integers, of their scales."""
        return (self.codec if isinstance(self.codec, Float) else Float()).torch_dtype(original)


def _check_coded(recipe: Recipe) -> None:
    """Refuse what integers cannot say: forms, levels and numbers of flats that a coded matrix has no place for."""
    method, made = recipe.method, recipe.codec
    rounds = not isinstance(made, codec.Transform)
    flats, levels = getattr(method, "k", None), getattr(method, "levels", 1)
    classes = (flats or methods.MOST_SEARCHED) * levels if isinstance(method, methods.Flats) else flats or 1
    cause = hint = ""
    if getattr(method, "form", "factors") != "factors":
        cause = "the block that the interpolative form saves is there again once columns are brought to one size"
        hint = "SVD()"
    elif isinstance(method, methods.Dense) and not rounds:
        cause = "it chooses axes, and the matrix as it is has none"
        hint = "SVD() as the method: it may choose all axes"
    elif levels > 1 and not rounds:
        cause, hint = "its bits take the place of ranks and levels", f"levels=1, or Int8() for {levels} levels"
    elif levels > 1 and isinstance(made, codec.Rotation):
        cause, hint = "it makes all columns alike, of which levels are the opposite", "levels=1, Int8() or Int4()"
    elif classes > MAX_CLASSES:
        cause = f"it tells {MAX_CLASSES} classes of rows apart by a byte, and there may be {classes}"
        hint = f"fewer flats{' or levels' if levels > 1 else ''}, or no codec of integers"
    if cause:
        raise KflatsError(f"{brief(made)} cannot store what {brief(method)} makes", cause=cause, hint=hint)


def as_recipe(value: Any) -> Recipe:
    """A bare method means ``Recipe(method)``; a recipe is handed back as it is."""
    return value if isinstance(value, Recipe) else Recipe(value)


def to_json(value: Any) -> dict[str, Any]:
    """A recipe, or one of its parts and theirs, as ``{"type": ..., field: ...}``.

    >>> to_json(Float("float16"))
    {'type': 'Float', 'dtype': 'float16'}
    """
    found: dict[str, Any] = {"type": type(value).__name__}
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        found[field.name] = to_json(inner) if dataclasses.is_dataclass(inner) else inner
    return found


def brief(value: Any) -> str:
    """A value as the call that makes it, with its first field and those that are not at their default.

    >>> brief(Recipe(methods.Flats(k=5), importance.TokenCounts(power=0.5)))
    "Flats(k=5), TokenCounts(power=0.5), Float(dtype='same')"
    """
    if isinstance(value, Recipe):
        side = [] if value.rows == "inputs" else [f"rows={value.rows!r}"]
        return ", ".join([*(brief(getattr(value, axis)) for axis in AXES), *side])
    shown = [
        f"{field.name}={getattr(value, field.name)!r}"
        for place, field in enumerate(dataclasses.fields(value))
        if place == 0 or getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(shown)})"


def from_json(data: object) -> Any:
    """The value that ``to_json`` wrote; absent fields take their defaults.

    Raises:
        KflatsError: an unknown type or field (the message names the known ones), a wrong type, or
            whatever the value itself refuses.

    >>> from_json({"type": "Float"})
    Float(dtype='same')
    """
    known = {kind.__name__: kind for kinds in (*AXES.values(), methods.PARTS, (Recipe,)) for kind in kinds}
    if not isinstance(data, Mapping) or not isinstance(data.get("type"), str):
        raise KflatsError(
            f'expected an object with a "type", found {data!r:.80}', cause="a damaged or hand-edited plan"
        )
    kind = known.get(data["type"])
    if kind is None:
        raise KflatsError(
            f"nothing is called {data['type']!r:.80}",
            cause="a plan of a newer kflats, or a misspelt name",
            hint=f"one of {', '.join(sorted(known))}",
        )
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    arguments = {}
    for name, inner in data.items():
        if name == "type":
            continue
        if name not in fields:
            raise KflatsError(
                f"{kind.__name__} has no field {name!r:.80}",
                cause="a plan of a newer kflats, or a misspelt name",
                hint=f"one of {', '.join(fields) or 'none'}",
            )
        made = from_json(inner) if isinstance(inner, Mapping) else inner
        if not _fits(made, hints[name]):
            parts = [one.__name__ for one in get_args(hints[name]) if one in methods.PARTS]
            raise KflatsError(
                f"{kind.__name__}.{name} cannot be {inner!r:.80}",
                cause="a damaged or hand-edited plan",
                hint=f"one of {', '.join(parts)}" if parts else "",
            )
        arguments[name] = made
    missing = [
        name
        for name, field in fields.items()
        if name not in arguments and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise KflatsError(f"{kind.__name__} needs {', '.join(missing)}", cause="a damaged or hand-edited plan")
    return kind(**arguments)


def _names(axis: str) -> list[str]:
    return [f"{kind.__name__}()" for kind in AXES[axis]]


def _fits(value: object, hint: Any) -> bool:
    """Whether a JSON value may be a field of the declared type."""
    if hint is Any:
        return True
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, inner) for inner in get_args(hint))
    if get_origin(hint) is Literal:
        return any(value is option or (value == option and type(value) is type(option)) for option in get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0  # finite
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return value is None if hint in (None, NoneType) else isinstance(value, hint)
