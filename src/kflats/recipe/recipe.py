"""Recipes: method x importance x codec, and which side of the layer is covered, as one value; and their JSON."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from kflats.codecs import CODECS, Codec, Float, check_codec
from kflats.common.errors import KflatsError
from kflats.common.registry import Registry
from kflats.common.schema import JsonObject
from kflats.importance import IMPORTANCES, Importance, Uniform, check_importance
from kflats.methods import METHODS, Factored, Method, Problem, check_method

T = TypeVar("T")
AXES: dict[str, Registry[Method] | Registry[Importance] | Registry[Codec]] = {
    "method": METHODS,
    "importance": IMPORTANCES,
    "codec": CODECS,
}
"""The independent choices of a recipe, and the values that a plan file may name for each."""


@dataclass(frozen=True)
class Recipe:
    """Three independent choices: the geometry, whose error counts, and how numbers are stored.

    Args:
        method: ``SVD()``, ``Flats(k=5)``, ...
        importance: ``Uniform()``, ``TokenCounts(power=0.5)``, ``ZipfPrior()``, ...
        codec: ``Float()``, or integers: ``Transform()``, ``Integer(bits=8)``.
        matrix_rows: what the method takes as rows of a linear layer: "in_features" (input neurons, as FWSVD and MESSI
            do) or "out_features" (output neurons: the importance of inputs is then its right side).

    Raises:
        KflatsError: a class instead of a value, a value of another axis, a codec that cannot store what the method
            makes, or other rows.

    >>> from kflats.methods import Flats
    >>> Recipe(Flats(k=5)).codec
    Float(dtype='same')
    """

    method: Method
    importance: Importance = Uniform()
    codec: Codec = Float()
    matrix_rows: Literal["in_features", "out_features"] = "in_features"

    def __post_init__(self) -> None:
        check_method(self.method)
        check_importance(self.importance)
        check_codec(self.codec)
        if self.matrix_rows not in ("in_features", "out_features"):
            raise KflatsError(
                f"matrix_rows={self.matrix_rows!r} is not a side of a layer", hint='"in_features" or "out_features"'
            )
        if self.chooses and self.codec != Float():
            raise KflatsError(
                f"{brief(self.codec)} is not supported with {brief(self.method)}",
                cause="the method chooses the codec itself",
                hint="leave one of them out",
            )
        if refusal := self.codec.refusal(self.method):
            cause, hint = refusal
            raise KflatsError(
                f"{brief(self.codec)} cannot store what {brief(self.method)} makes", cause=cause, hint=hint
            )

    @property
    def chooses(self) -> bool:
        """Whether the method stands for several recipes, of which the budget chooses one."""
        return self.method.produces == "choice"

    @property
    def is_dense(self) -> bool:
        """Whether the weight stays as it is."""
        return self.method.produces == "dense" and self.codec == Float()

    @property
    def is_cast(self) -> bool:
        """Whether all numbers of the weight itself are stored, in a type that is named."""
        return self.method.produces == "dense" and not self.codec.stores_integers and not self.is_dense

    @property
    def is_coded(self) -> bool:
        """Whether integers are stored, and not floating-point numbers."""
        return self.codec.stores_integers

    def torch_dtype(self, original: torch.dtype | str) -> torch.dtype:
        """The type of all floating-point numbers that are stored: with integers, the type of their scales."""
        return self.codec.torch_dtype(original)

    def encode(self, problem: Problem, dtype: torch.dtype) -> Factored:
        """The rows of ``problem``, stored in at most its bytes; floating-point numbers as ``dtype``.

        Raises:
            KflatsError: too few bytes, a weighting that cannot be taken, or ``constriction`` not installed.
        """
        start = time.perf_counter()
        factored = self.codec.encode(self.method, problem, dtype)
        return dataclasses.replace(factored, seconds=time.perf_counter() - start)


Recipes: TypeAlias = Recipe | Method | Mapping[str, Recipe | Method | None] | None
"""What is asked of a model: a recipe for each name, pattern or word; or one recipe, for the token embedding. None: the
default recipe."""


def as_recipe(value: Recipe | Method) -> Recipe:
    """A bare method means ``Recipe(method)``; a recipe is returned as it is."""
    return value if isinstance(value, Recipe) else Recipe(value)


def to_json(value: object) -> JsonObject:
    """A recipe, or one of its parts and theirs, as ``{"type": ..., field: ...}``.

    >>> to_json(Float("float16"))
    {'type': 'Float', 'dtype': 'float16'}
    """
    fields = dataclasses.fields(value)  # type: ignore[arg-type]
    inner = {field.name: getattr(value, field.name) for field in fields}
    return {"type": type(value).__name__} | {
        name: to_json(part) if dataclasses.is_dataclass(part) else part for name, part in inner.items()
    }


def brief(value: object) -> str:
    """A value as the call that makes it, with its first field and those that are not at their default.

    >>> from kflats.importance import TokenCounts
    >>> from kflats.methods import Flats
    >>> brief(Recipe(Flats(k=5), TokenCounts(power=0.5)))
    "Flats(k=5), TokenCounts(power=0.5), Float(dtype='same')"
    """
    if isinstance(value, Recipe):
        side = [] if value.matrix_rows == "in_features" else [f"matrix_rows={value.matrix_rows!r}"]
        return ", ".join([brief(value.method), brief(value.importance), brief(value.codec), *side])
    shown = [
        f"{field.name}={getattr(value, field.name)!r}"
        for place, field in enumerate(dataclasses.fields(value))  # type: ignore[arg-type]
        if place == 0 or getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(shown)})"


_DAMAGED = "a damaged or hand-edited plan"


def from_json(data: object) -> Recipe | Method | Importance | Codec:
    """The recipe, or the value of one axis, that ``to_json`` wrote; absent fields take their defaults.

    Raises:
        KflatsError: an unknown type or field (the message names the known ones), a wrong type, or
            whatever the value itself refuses.

    >>> from_json({"type": "Float"})
    Float(dtype='same')
    """
    fields = _fields_of(data)
    if fields["type"] == "Recipe":
        axes = {name: from_json(fields[name]) for name in AXES if name in fields}
        return _made(Recipe, {name: value for name, value in fields.items() if name not in AXES}, axes)
    for registry in AXES.values():
        if kind := registry.kind(fields["type"]):
            return _made(kind, fields, {})
    known = [kind.__name__ for registry in AXES.values() for kind in registry.all_kinds()]
    raise KflatsError(
        f"no method, importance or codec is called {fields['type']!r:.80}",
        cause="a plan of a newer kflats, a misspelt name, or a package that is not installed here",
        hint=f"install the package that has it, or one of {', '.join(sorted(known))}",
    )


def recipe_from_json(data: object) -> Recipe:
    """As ``from_json``, for a recipe or a bare method.

    >>> recipe_from_json({"type": "Recipe", "method": {"type": "SVD"}}).codec
    Float(dtype='same')
    """
    value = from_json(data)
    return value if isinstance(value, Recipe) else Recipe(_as_method(value))


def _as_method(value: Method | Importance | Codec) -> Method:
    check_method(value)
    return value  # type: ignore[return-value]


def _fields_of(data: object) -> Mapping[str, Any]:
    if not isinstance(data, Mapping) or not isinstance(data.get("type"), str):
        raise KflatsError(f'{data!r:.80} is not an object with a "type"', cause=_DAMAGED)
    return data


def _made(kind: type[T], fields: Mapping[str, Any], ready: Mapping[str, Any]) -> T:
    """``kind`` from its JSON fields and from those that are values already; each is checked against its type hint."""
    hints, known = get_type_hints(kind), {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    arguments = dict(ready)
    for name, data in fields.items():
        if name == "type":
            continue
        if name not in known:
            raise KflatsError(
                f"{kind.__name__} has no field {name!r:.80}",
                cause="a plan of a newer kflats, or a misspelt name",
                hint=f"one of {', '.join(known) or 'none'}",
            )
        parts = _dataclasses(hints[name])
        value = data
        if isinstance(data, Mapping) and (part := parts.get(_fields_of(data)["type"])):
            value = _made(part, data, {})
        if not any(_fits(value, hint) for hint in _members(hints[name])):
            hint = f"one of {', '.join(sorted(parts))}" if parts else ""
            raise KflatsError(f"{kind.__name__}.{name} cannot be {data!r:.80}", cause=_DAMAGED, hint=hint)
        arguments[name] = value
    missing = [
        name
        for name, field in known.items()
        if name not in arguments and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise KflatsError(f"{kind.__name__} needs {', '.join(missing)}", cause=_DAMAGED)
    return kind(**arguments)


def _dataclasses(hint: Any) -> dict[str, type[Any]]:
    """The dataclasses among the alternatives of a type hint, by name."""
    kinds = (kind for kind in _members(hint) if hasattr(kind, "__dataclass_fields__"))
    return {kind.__name__: kind for kind in kinds}


def _members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a type hint."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _fits(value: object, hint: Any) -> bool:
    """Whether a JSON value may be a field of the declared type."""
    if get_origin(hint) is Literal:
        return any(value is option or (value == option and type(value) is type(option)) for option in get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0  # finite
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return value is None if hint in (None, NoneType) else isinstance(value, hint)
