"""Recipes: method x importance x codec, and which side of the layer is covered, as one value; and their JSON."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from kflats.codecs import CODECS, Codec, Float, check_codec
from kflats.common.errors import KflatsError
from kflats.common.registry import Registry
from kflats.common.schema import JsonObject, decode
from kflats.importance import IMPORTANCES, Importance, Uniform, check_importance
from kflats.methods import METHODS, Factored, Method, Problem, check_method

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
"""The recipes of a model: a recipe for each name, pattern or word; or one recipe, for the token embedding. None: the
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


def from_json(data: object) -> Recipe | Method | Importance | Codec:
    """The recipe, or the value of one axis, that ``to_json`` wrote; absent fields take their defaults.

    Raises:
        KflatsError: an unknown type or field (the message names the known ones), a wrong type, or
            whatever the value itself refuses.

    >>> from_json({"type": "Float"})
    Float(dtype='same')
    """
    value: Recipe | Method | Importance | Codec = decode(
        Recipe | Method | Importance | Codec, data, "recipe", kinds=kind_called
    )
    return value


def kind_called(name: str) -> type:
    """The class of a method, an importance or a codec with this name.

    Raises:
        KflatsError: no class has this name, in kflats or in a package that announces one.
    """
    for registry in AXES.values():
        if kind := registry.kind(name):
            return kind
    known = [kind.__name__ for registry in AXES.values() for kind in registry.all_kinds()]
    raise KflatsError(
        f"no method, importance or codec is called {name!r:.80}",
        cause="a plan of a newer kflats, a misspelt name, or a package that is not installed here",
        hint=f"install the package that has it, or one of {', '.join(sorted(known))}",
    )
