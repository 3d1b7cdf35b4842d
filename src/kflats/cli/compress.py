"""The commands that make a model smaller: ``kflats plan``, ``compress`` and ``demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kflats.cli.data_options import DataOptions
from kflats.cli.options import LARGEST_SEED, Folder, Force, Model, Quiet, with_options
from kflats.cli.recipe_options import BudgetOptions, RecipeOptions, plan_of, recipe_of
from kflats.cli.terminal import quiet_transformers
from kflats.common.errors import KflatsError
from kflats.compress.pipeline import compress_folder
from kflats.demo import demo as run_demo
from kflats.evaluation.comparing import load_tokenizer, weight_file_bytes
from kflats.io import load_model, resolve_model
from kflats.io.atomic_files import check_file
from kflats.io.sources import module_bytes
from kflats.planning.calibration_data import gather
from kflats.planning.decide import decide
from kflats.recipe.plan import Plan
from kflats.recipe.recipe import as_recipe


@with_options
def plan(
    model: Model,
    out: Annotated[Path, typer.Option("--out", metavar="plan.json", help="The plan file to write.")],
    budget: BudgetOptions,
    recipe: RecipeOptions,
    data: DataOptions,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Decide the method and the bytes of each weight, and write them as JSON to review, edit and run later."""
    check_file(out, force, Plan.is_saved_in)
    allowed, given, whole = budget.budget(), data.read(), budget.size is not None
    one = recipe_of(recipe, counted=given.counted, measured=given.measured, whole_file=whole)
    quiet_transformers()
    folder = resolve_model(model)
    loaded = load_model(folder)
    reads = given.counted or given.calibration is not None
    tokenizer = _tokenizer(folder, needed=reads or (one is not None and as_recipe(one).importance.needs_tokenizer))
    batches = given.calibration(loaded, tokenizer) if callable(given.calibration) else given.calibration
    texts = given.calibration if given.texts is None and not callable(given.calibration) else given.texts
    decided = decide(
        loaded,
        dict.fromkeys(names, one) if (names := budget.names(one)) else one,
        allowed,
        gather(texts, tokenizer, batches, None, given.statistics, given.samples),
        allocation=budget.allocation or "auto",
        file_bytes=weight_file_bytes(folder),
        beside=module_bytes(folder),
        quiet=quiet,
    )
    check_file(out, force, Plan.is_saved_in)
    decided.plan.save(out)
    if given.keep_statistics is not None and decided.data.statistics is not None:
        decided.data.statistics.save(given.keep_statistics)
    if not quiet:
        typer.echo(f"{decided.plan}\n\nplan: {out}")


@with_options
def compress(
    model: Model,
    out: Folder,
    budget: BudgetOptions,
    recipe: RecipeOptions,
    data: DataOptions,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="plan.json", help="Carry out this plan of kflats plan.")
    ] = None,
    trim: Annotated[
        int | None,
        typer.Option("--trim", metavar="N", help="First keep only the N commonest tokens, counted in --texts."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Seed of the random starts.")] = 0,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Compress a model into a new folder that loads like any other. Interrupted, the same command resumes."""
    given, whole = data.read(), budget.size is not None
    if plan is None:
        bound = budget.budget()
        one = recipe_of(recipe, counted=given.counted, measured=given.measured, whole_file=whole)
        chosen: dict[str, Any] = {"keep": bound, "method": one, "weights": budget.names(one)}
        chosen["allocation"] = budget.allocation or "auto"
    else:
        chosen = {"plan": plan_of(plan, budget, recipe, given.counted)}
    quiet_transformers()
    report = compress_folder(model, out, trim=trim, seed=seed, force=force, quiet=quiet, **vars(given), **chosen)
    if not quiet:
        typer.echo(f"{report}\n\nmodel: {out}   (kflats compare {model} {out}; kflats report {out})")


def demo(
    out: Folder = Path("demo-out"),
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress bar.")] = False,
    force: Force = False,
) -> None:
    """Compress the small real model of the extra 'demo', compare it, and draw the report. Needs no network."""
    quiet_transformers()
    run_demo(out, force=force, quiet=quiet, show=typer.echo)


def _tokenizer(folder: Path, *, needed: bool) -> Any:
    """The folder's tokenizer; None where it has none and nothing needs one."""
    try:
        return load_tokenizer(folder)
    except KflatsError:
        if needed:
            raise
        return None
