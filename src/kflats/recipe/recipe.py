"""Recipes and plans: method x importance x codec for one weight, a decision for each weight of a model; and their JSON.

A plan is reviewed, edited, kept beside a model and run later: ``Plan.save``, ``Plan.load``, ``print(plan)``.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from kflats.codecs import CODECS, Codec, Float, check_codec
from kflats.common.errors import KflatsError
from kflats.common.formatting import plain, share, size, table
from kflats.common.paths import expanded
from kflats.common.registry import Registry
from kflats.common.schema import Json, JsonObject, decode, read_json
from kflats.common.torch_settings import usual_settings
from kflats.importance import IMPORTANCES, Importance, Uniform, check_importance
from kflats.io.atomic import write_json
from kflats.methods import METHODS, Factored, Method, Problem, check_method
from kflats.model.weights import Weight, own_matrix_rows
from kflats.recipe.budget import Budget, parse_budget

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
                f"{brief(self.codec)} is not supported with {brief(self.method)}", hint="leave one of them out"
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
        (made,) = self.encode_together([problem], dtype)
        return made

    @usual_settings()
    def encode_together(self, problems: Sequence[Problem], dtype: torch.dtype) -> list[Factored]:
        """``encode`` of several problems, to the same bytes, in less time where ``codec.together`` says so. Each one's
        seconds are an equal share.

        Raises:
            KflatsError: as ``encode``, of any of them.
        """
        start = time.perf_counter()
        if len(problems) == 1:
            made = [self.codec.encode(self.method, problems[0], dtype)]
        else:
            made = self.codec.encode_together(self.method, problems, dtype)
        seconds = (time.perf_counter() - start) / max(1, len(problems))
        return [dataclasses.replace(one, seconds=seconds) for one in made]


Recipes: TypeAlias = Recipe | Method | Mapping[str, Recipe | Method | None] | None
"""The recipes of a model: a recipe for each name, pattern or word; or one recipe, for the token embedding. None: the
default recipe."""


def as_recipe(value: Recipe | Method) -> Recipe:
    """A bare method means ``Recipe(method)``; a recipe is returned as it is."""
    return value if isinstance(value, Recipe) else Recipe(value)


def to_json(value: Recipe | Method | Importance | Codec) -> JsonObject:
    """A recipe, or one of its parts and theirs, as ``{"type": ..., field: ...}``.

    >>> to_json(Float("float16"))
    {'type': 'Float', 'dtype': 'float16'}
    """
    data: JsonObject = {"type": type(value).__name__}
    for field in _fields(value):
        part: Any = getattr(value, field.name)
        data[field.name] = to_json(part) if dataclasses.is_dataclass(type(part)) else part
    return data


def _fields(value: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(value)


def brief(value: Recipe | Method | Importance | Codec) -> str:
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
        for place, field in enumerate(_fields(value))
        if place == 0 or getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(shown)})"


def from_json(data: Json) -> Recipe | Method | Importance | Codec:
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
    own = (kind for registry in AXES.values() for kind in registry.kinds)
    announced = (kind for registry in AXES.values() for kind in registry.all_kinds())
    for kind in chain(own, announced):  # those of other packages last: finding them reads what is installed
        if kind.__name__ == name:
            return kind
    known = [kind.__name__ for registry in AXES.values() for kind in registry.all_kinds()]
    raise KflatsError(
        f"no method, importance or codec is called {name!r:.80}",
        cause="a plan of a newer kflats, a misspelt name, or a package that is not installed here",
        hint=f"install the package that has it, or one of {', '.join(sorted(known))}",
    )


FORMAT, VERSION = "kflats-plan", 1


@dataclass(frozen=True)
class Decision:
    """One weight, what is done with it, and the bytes it may take; ``note`` says what was noticed."""

    weight: Weight
    recipe: Recipe
    budget_bytes: int
    note: str = ""


def largest_of_any_size(decisions: Iterable[Decision]) -> Decision | None:
    """The weight with most bytes of those whose codes can have any size: it takes what others leave of a budget."""
    able = (decision for decision in decisions if decision.recipe.codec.any_size)
    return max(able, key=lambda decision: decision.budget_bytes, default=None)


@dataclass(frozen=True)
class Plan:
    """Weight -> recipe and bytes, for one model. Printing it gives a table.

    Args:
        decisions: one for each named weight.
        budget: the size that the user asked for; a plan file holds its text, such as "60%".
        model_bytes: bytes of the whole model before; of a folder's other modules, their weight files.
        allocation: how weights share the budget: "uniform" or "loss".

    Raises:
        KflatsError: no budget, an unknown allocation, a weight named twice, or bytes that do not fit it.
    """

    decisions: tuple[Decision, ...]
    budget: Budget
    model_bytes: int
    allocation: str = "uniform"

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", parse_budget(self.budget))  # a text means a budget, too
        names = [decision.weight.name for decision in self.decisions]
        problem = "" if self.allocation in ("uniform", "loss") else f"allocation {self.allocation!r:.40} is unknown"
        for weight, nbytes in ((decision.weight, decision.budget_bytes) for decision in self.decisions):
            if names.count(weight.name) > 1:
                problem = f"the plan names {weight.name!r} twice"
            elif len(weight.shape) != 2 or min(weight.shape) < 1 or weight.nbytes % math.prod(weight.shape):
                problem = f"{weight.name!r} of shape {weight.shape} cannot take {weight.nbytes:,} bytes"
            elif not 0 < nbytes <= self.budget.most * weight.nbytes:
                problem = f"{weight.name!r} takes {weight.nbytes:,} bytes and cannot be given {nbytes:,}"
        if problem:
            raise KflatsError(problem, cause="a damaged or hand-edited plan", hint="make the plan again: kflats plan")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; an existing file is replaced in one step.

        Raises:
            KflatsError: a folder that cannot be written, a full disk; an earlier file is untouched then.
        """
        about: JsonObject = {"budget": str(self.budget), "model_bytes": self.model_bytes, "allocation": self.allocation}
        decisions = [dataclasses.asdict(d) | {"recipe": to_json(d.recipe)} for d in self.decisions]
        write_json(expanded(path).resolve(), FORMAT, VERSION, **about, decisions=decisions)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan; every name, type and size in it is checked.

        Raises:
            KflatsError: unreadable, of a newer version, or with names and sizes that cannot be.
        """
        data = read_json(path, FORMAT, VERSION, "plan")
        try:
            if isinstance(text := data.get("budget"), str):
                data = data | {"budget": dataclasses.asdict(parse_budget(text))}
            plan: Plan = decode(Plan, data, "plan", kinds=kind_called)
            return plan
        except KflatsError as error:
            raise error.about(os.fspath(path)) from error

    @classmethod
    def is_saved_in(cls, path: Path) -> bool:
        """Whether ``load`` reads the file."""
        try:
            cls.load(path)
        except KflatsError:
            return False
        return True

    def resolve(self, find: Callable[[str], Weight]) -> Plan:
        """This plan with a model's own weights: ``plan.resolve(lambda name: find_weight(model, name))``.

        Raises:
            KflatsError: an unknown name (from ``find``), another shape or type than was planned for, or
                two names that mean one weight.
        """
        decisions = []
        for decision in self.decisions:
            planned, weight = decision.weight, find(decision.weight.name)
            if (weight.shape, weight.dtype) != (planned.shape, planned.dtype):
                raise KflatsError(
                    f"{planned.name!r} is {weight.shape} {weight.dtype} here, "
                    f"but the plan was made for {planned.shape} {planned.dtype}",
                    cause="a plan for another model, or a model loaded in another type",
                    hint="make the plan again: kflats plan",
                )
            decisions.append(dataclasses.replace(decision, weight=weight))
        return dataclasses.replace(self, decisions=tuple(decisions))

    def __str__(self) -> str:
        rows = [
            [
                d.weight.name + "".join(f" = {place.name}" for place in d.weight.places[1:]),
                " x ".join(map(str, d.weight.shape)),
                size(d.weight.nbytes),
                size(d.budget_bytes),
                share(d.budget_bytes, d.weight.nbytes),
                brief(d.recipe),
                *([d.note] if any(other.note for other in self.decisions) else []),
            ]
            for d in self.decisions
        ]
        before = sum(d.weight.nbytes for d in self.decisions)
        after = sum(d.budget_bytes for d in self.decisions)
        model_after = self.model_bytes - before + after
        columns = ["weight (= tied places)", "shape", "now", "at most", "kept", "recipe"]
        columns += ["note"] if rows and len(rows[0]) > len(columns) else []
        totals = [
            ["named weights", "", size(before), size(after), share(after, before)],
            ["whole model", "", size(self.model_bytes), size(model_after), share(model_after, self.model_bytes)],
        ]
        blank = [""] * (len(columns) - 5)
        how = ", shared by what each byte saves of the loss" if self.allocation == "loss" else ""
        return f"budget {self.budget}{how}\n\n" + plain(table(columns, rows, totals=[t + blank for t in totals]))


def as_cast(weight: Weight, recipe: Recipe) -> Recipe:
    """``recipe`` as it is carried out where it stores all numbers of ``weight`` in another type: in the order in which
    the layer has them, and weighed by nothing, because nothing is chosen. Other recipes are handed back."""
    if not recipe.is_cast:
        return recipe
    return dataclasses.replace(recipe, importance=Uniform(), matrix_rows=own_matrix_rows(weight))
