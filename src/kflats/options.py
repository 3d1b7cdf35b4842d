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
    if counted and not any(getattr(d.recipe.importance, "needs_texts", False) for d in found.decisions):
        raise KflatsError("this plan counts no texts", hint="leave --texts out, or make the plan with --texts")
    return found


def recipe_of(method: str | None, flats: int | None, importance: str | None, power: float | None, counted: bool) -> Any:
    """The recipe that the options ask for; None where they leave it all to kflats.

    Texts are there to be counted. Without them flats use the Zipf prior, and a baseline is what was
    published: every row counts the same.
    """
    from kflats import importance as importances
    from kflats import methods
    from kflats.recipe import Recipe

    if all(option is None for option in (method, flats, importance, power)):
        return None
    geometry = methods.from_name(method or "flats", **({} if flats is None else {"k": flats}))
    if importance is None:
        baseline = power is None and method not in (None, "flats")
        importance = "counts" if counted else "uniform" if baseline else "zipf"
    value = importances.from_name(importance, **({} if power is None else {"power": power}))
    needs = getattr(value, "needs_texts", False)
    if needs and not counted:
        raise KflatsError(f"--importance {importance} needs --texts FILE", hint="--importance zipf needs no texts")
    if counted and not needs:
        raise KflatsError(
            f"--importance {importance} counts no texts", hint="leave --texts out, or --importance counts"
        )
    return Recipe(geometry, value)


def tokenizer_of(folder: Path, *, needed: bool) -> Any:
    """The folder's tokenizer; None where it has none and nothing needs one."""
    from kflats.evaluate import load_tokenizer

    try:
        return load_tokenizer(folder)
    except KflatsError:
        if needed:
            raise
        return None
