"""Plans: which weight is treated how, in how many bytes. A value, JSON, a table; no data and no model.

A plan is reviewed, edited, kept beside a model and run later: ``Plan.save``, ``Plan.load``, ``print(plan)``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kflats.common.errors import KflatsError
from kflats.common.formatting import plain, share, size, table
from kflats.common.schema import decode, read_json
from kflats.importance import Uniform
from kflats.io.atomic import replaced
from kflats.model.weights import Weight, own_matrix_rows
from kflats.recipe.budget import Budget, parse_budget
from kflats.recipe.recipe import Recipe, brief, kind_called, to_json

__all__ = ["Decision", "Plan"]

FORMAT, VERSION = "kflats-plan", 1


@dataclass(frozen=True)
class Decision:
    """One weight, what is done with it, and the bytes it may take; ``note`` says what was noticed."""

    weight: Weight
    recipe: Recipe
    budget_bytes: int
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """Weight -> recipe and bytes, for one model. Printing it gives a table.

    Args:
        decisions: one for each named weight.
        budget: the size that the user asked for; a plan file holds its text, such as "60%".
        model_bytes: bytes of the whole model before; of a folder's other modules, their weight files.
        allocation: how weights share the budget: "uniform" or "loss".

    Raises:
        KflatsError: a budget that is no ``Budget``, a weight named twice, or bytes that do not fit it.
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
            elif not 0 < nbytes <= weight.nbytes:
                problem = f"{weight.name!r} takes {weight.nbytes:,} bytes and cannot be given {nbytes:,}"
        if problem:
            raise KflatsError(problem, cause="a damaged or hand-edited plan", hint="make the plan again: kflats plan")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; an existing file is replaced in one step.

        Raises:
            KflatsError: a folder that cannot be written, a full disk; an earlier file is untouched then.
        """
        data = {
            "format": FORMAT,
            "version": VERSION,
            "budget": str(self.budget),
            "model_bytes": self.model_bytes,
            "allocation": self.allocation,
            "decisions": [dataclasses.asdict(d) | {"recipe": to_json(d.recipe)} for d in self.decisions],
        }
        with replaced(Path(path).expanduser().resolve()) as aside:
            aside.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan; every name, type and size in it is checked.

        Raises:
            KflatsError: unreadable, of a newer version, or with names and sizes that cannot be.
        """
        data = read_json(path, FORMAT, VERSION, "plan")
        try:
            file: _PlanFile = decode(_PlanFile, data, "plan", kinds=kind_called)
            return cls(file.decisions, parse_budget(file.budget), file.model_bytes, file.allocation)
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


@dataclass(frozen=True)
class _PlanFile:
    """The content of a plan file beside its format and version."""

    budget: str
    model_bytes: int
    decisions: tuple[Decision, ...]
    allocation: str = "uniform"
