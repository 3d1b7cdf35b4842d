"""The command line's options, and the text of them turned into values: here and nowhere below."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kflats.errors import KflatsError

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A local model folder, or a hub name (owner/model).")]
BudgetText = Annotated[
    str | None,
    typer.Option(
        "--budget", help='Bytes kept of the named weights, row labels included: "60%", "12MB", "5.2M params".'
    ),
]
FileBudget = Annotated[str | None, typer.Option("--file-budget", help='Bound all weight files instead: "40MB".')]
Method = Annotated[str | None, typer.Option("--method", help="flats (default), svd, kmeans-svd or messi.")]
FlatCount = Annotated[int | None, typer.Option("--flats", metavar="K", help="Number of flats.")]
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--weights", metavar="NAME", help="A weight to compress; may be repeated. Default: the token embeddings."
    ),
]
Importance = Annotated[
    str | None, typer.Option("--importance", help="Whose error counts: counts (needs --texts), zipf or uniform.")
]
Power = Annotated[float | None, typer.Option("--power", help="Power of the counts or of the Zipf prior.")]
Texts = Annotated[Path | None, typer.Option("--texts", metavar="FILE", help="UTF-8 text, one sentence a line.")]
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


def plan_of(path: Path, budget: str | None, file_budget: str | None) -> Any:
    """The plan; a budget beside it must be the one that it was made for."""
    from kflats.plan import Plan

    found = Plan.load(path)
    if budget is not None or file_budget is not None:
        asked = str(budget_of(budget, file_budget))
        if asked != found.budget:
            raise KflatsError(
                f"the plan was made for a budget of {found.budget}, not {asked}",
                hint="leave --budget out, or make the plan again: kflats plan",
            )
    return found


def recipe_of(method: str | None, flats: int | None, importance: str | None, power: float | None, counted: bool) -> Any:
    """The recipe that the options ask for; None where they leave it all to kflats."""
    from kflats import importance as importances
    from kflats import methods
    from kflats.recipe import Recipe

    if importance == "counts" and not counted:
        raise KflatsError("--importance counts needs --texts FILE", hint="zipf, which needs no texts")
    if all(option is None for option in (method, flats, importance, power)):
        return None
    geometry = methods.from_name(method or "flats", **({} if flats is None else {"k": flats}))
    if importance is None and power is None and method not in (None, "flats"):
        return Recipe(geometry)  # the baselines are what was published: every row counts the same
    name = importance or ("counts" if counted else "zipf")
    return Recipe(geometry, importances.from_name(name, **({} if power is None else {"power": power})))
