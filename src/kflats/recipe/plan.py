"""Plans: which weight is treated how, in how many bytes. A value, JSON, a table; no data and no model.

A plan is reviewed, edited, kept beside a model and run later: ``Plan.save``, ``Plan.load``, ``print(plan)``.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kflats.common.errors import KflatsError
from kflats.common.formatting import plain, share, size, table
from kflats.common.schema import decode
from kflats.importance import Uniform
from kflats.io.atomic_files import replaced
from kflats.io.write_errors import explain
from kflats.model.swap import Weight
from kflats.model.weights import own_matrix_rows
from kflats.recipe.budget import Budget, parse_budget
from kflats.recipe.recipe import Recipe, brief, recipe_from_json, to_json

__all__ = ["Decision", "Plan"]

FORMAT, VERSION = "kflats-plan", 1
_LARGEST_FILE = 64 * 2**20


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
        if not isinstance(self.budget, Budget):
            raise KflatsError(
                f"{self.budget!r:.40} is not a Budget",
                hint=f"parse_budget({self.budget!r:.40})",
                command="a plan that kflats plan made",
            )
        if self.allocation not in ("uniform", "loss"):
            raise KflatsError(f"allocation {self.allocation!r:.40} is unknown", cause="a damaged or hand-edited plan")
        names = [decision.weight.name for decision in self.decisions]
        for decision in self.decisions:
            weight = decision.weight
            if names.count(weight.name) > 1:
                raise KflatsError(f"the plan names {weight.name!r} twice", cause="a damaged or hand-edited plan")
            if len(weight.shape) != 2 or min(weight.shape) < 1 or weight.nbytes % (weight.shape[0] * weight.shape[1]):
                raise KflatsError(
                    f"{weight.name!r} of shape {weight.shape} cannot take {weight.nbytes:,} bytes",
                    cause="a damaged or hand-edited plan",
                )
            if not 0 < decision.budget_bytes <= weight.nbytes:
                raise KflatsError(
                    f"{weight.name!r} takes {weight.nbytes:,} bytes and cannot be given {decision.budget_bytes:,}",
                    cause="a damaged or hand-edited plan",
                    hint="at least 1 byte and at most the original",
                )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; an existing file is replaced in one step.

        Raises:
            KflatsError: a folder that cannot be written, a full disk; an earlier file is untouched then.
        """
        head = {"budget": str(self.budget), "model_bytes": self.model_bytes, "allocation": self.allocation}
        data = {"format": FORMAT, "version": VERSION, **head}
        text = json.dumps({**data, "decisions": [_decision_json(d) for d in self.decisions]}, indent=2)
        goal = Path(path).expanduser().resolve()
        try:
            goal.parent.mkdir(parents=True, exist_ok=True)
            with replaced(goal) as aside:
                aside.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            explain(error, goal)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan; every name, type and size in it is checked.

        Raises:
            KflatsError: unreadable, of a newer version, or with names and sizes that cannot be.
        """
        data = _read(Path(path))
        try:
            decisions = data.pop("decisions", None)
            head = decode(_Head, data, "plan")
            if not isinstance(decisions, list):
                raise KflatsError("the plan has no list of decisions", cause="a damaged or hand-edited plan")
            found = tuple(_decision(entry, f"decisions[{i}]") for i, entry in enumerate(decisions))
            return cls(found, parse_budget(head.budget), head.model_bytes, head.allocation)
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
        found = []
        for decision in self.decisions:
            planned, weight = decision.weight, find(decision.weight.name)
            if (weight.shape, weight.dtype) != (planned.shape, planned.dtype):
                raise KflatsError(
                    f"{planned.name!r} is {weight.shape} {weight.dtype} here, "
                    f"but the plan was made for {planned.shape} {planned.dtype}",
                    cause="a plan for another model, or a model loaded in another type",
                    hint="make the plan again: kflats plan",
                )
            found.append(dataclasses.replace(decision, weight=weight))
        return dataclasses.replace(self, decisions=tuple(found))

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
class _Head:
    """What a plan file says before its decisions."""

    budget: str
    model_bytes: int
    allocation: str = "uniform"


def _decision_json(decision: Decision) -> dict[str, Any]:
    return {
        "weight": dataclasses.asdict(decision.weight),
        "recipe": to_json(decision.recipe),
        "budget_bytes": decision.budget_bytes,
        "note": decision.note,
    }


def _decision(data: object, where: str) -> Decision:
    if not isinstance(data, dict) or set(data) - {"weight", "recipe", "budget_bytes", "note"}:
        raise KflatsError(
            f"{where} is not a decision",
            cause="a damaged or hand-edited plan",
            hint="weight, recipe, budget_bytes, note",
        )
    return Decision(
        decode(Weight, data.get("weight"), f"{where}.weight"),
        recipe_from_json(data.get("recipe")),
        decode(int, data.get("budget_bytes"), f"{where}.budget_bytes"),
        decode(str, data.get("note", ""), f"{where}.note"),
    )


def _read(path: Path) -> dict[str, Any]:
    """The file's JSON object without its format and version, which are checked here."""
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise KflatsError(
                f"{path} is {path.stat().st_size:,} bytes", cause="not a plan", hint="kflats plan makes one"
            )
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KflatsError(
            f"the plan {path} cannot be read: {error.strerror}", hint="kflats plan --out makes one"
        ) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, KflatsError):
            raise
        raise KflatsError(
            f"{path} is not JSON", cause="a damaged file, or not a plan", hint="kflats plan makes one"
        ) from error
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise KflatsError(f"{path} is not a kflats plan", cause="another JSON file", hint="kflats plan makes one")
    version = data.pop("version", None)
    if version != VERSION or isinstance(version, bool):
        newer = isinstance(version, int) and version > VERSION
        raise KflatsError(
            f"{path} is a plan of version {version!r:.20}; this kflats reads version {VERSION}",
            cause="written by a newer kflats" if newer else "a damaged or hand-edited plan",
            hint="upgrade kflats" if newer else "make the plan again: kflats plan",
        )
    return data
