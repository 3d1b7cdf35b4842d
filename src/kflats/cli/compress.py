"""The commands that make a model smaller: ``kflats plan``, ``compress`` and ``demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kflats.cli.data_options import given, tokenizer_of
from kflats.cli.options import (
    Calibration,
    CalibrationTask,
    CodecName,
    EllipsoidName,
    ErrorName,
    Exponent,
    FileSize,
    FlatCount,
    Force,
    Importance,
    KeptShare,
    MeasuredFile,
    Method,
    Model,
    Names,
    Power,
    Quiet,
    RowSide,
    SampleCount,
    Seed,
    SharedBy,
    StoredForm,
    TaskFolder,
    Texts,
    Trim,
)
from kflats.cli.recipe_options import RecipeOptions, allocation_of, budget_of, plan_of, recipe_of, weights_of
from kflats.cli.terminal import quiet_transformers
from kflats.compress.pipeline import compress_folder
from kflats.demo import demo as run_demo
from kflats.evaluation.comparing import weight_file_bytes
from kflats.io import load_model, resolve_model
from kflats.io.atomic_files import check_file
from kflats.io.sources import module_bytes
from kflats.planning.calibration_data import gather
from kflats.planning.decide import decide
from kflats.recipe.plan import Plan
from kflats.recipe.recipe import as_recipe


def plan(
    model: Model,
    out: Annotated[Path, typer.Option("--out", metavar="plan.json", help="Where to write the plan.")],
    keep: KeptShare = None,
    size: FileSize = None,
    method: Method = None,
    flats: FlatCount = None,
    weights: Names = None,
    importance: Importance = None,
    power: Power = None,
    matrix_rows: RowSide = None,
    form: StoredForm = None,
    p: Exponent = None,
    ellipsoid: EllipsoidName = None,
    error: ErrorName = None,
    codec: CodecName = None,
    texts: Texts = None,
    calibration: Calibration = None,
    task: CalibrationTask = None,
    task_data: TaskFolder = None,
    samples: SampleCount = None,
    statistics: MeasuredFile = None,
    allocation: SharedBy = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Decide which weight is treated how, in how many bytes; write it as JSON to review, edit and run later."""
    check_file(out, force, Plan.is_saved_in)
    allowed = budget_of(keep, size)
    asked = RecipeOptions(method, flats, importance, power, matrix_rows, form, p, ellipsoid, error, codec)
    known, whole = given(texts, calibration, task, task_data, samples, statistics), size is not None
    recipe = recipe_of(asked, counted=known.texts is not None, measured=known.measured, whole_file=whole)
    names, how = weights_of(weights, recipe, whole), allocation_of(allocation)
    quiet_transformers()
    folder = resolve_model(model)
    loaded = load_model(folder)
    importance_needs = recipe is not None and as_recipe(recipe).importance.needs_tokenizer
    reads = any(found is not None for found in (known.texts, known.calibration, known.examples))
    tokenizer = tokenizer_of(folder, needed=reads or importance_needs)
    batches = known.calibration if known.examples is None else known.examples(loaded, tokenizer)
    counted = known.calibration if known.texts is None else known.texts
    gathered = gather(counted, tokenizer, batches, None, known.statistics, known.samples)
    recipes = dict.fromkeys(names, recipe) if names else recipe
    before, beside = weight_file_bytes(folder), module_bytes(folder)
    made = decide(loaded, recipes, allowed, gathered, allocation=how, file_bytes=before, beside=beside, quiet=quiet)
    check_file(out, force, Plan.is_saved_in)
    made.plan.save(out)
    if statistics is not None and known.statistics is None and made.data.statistics is not None:
        made.data.statistics.save(statistics)
    if not quiet:
        typer.echo(str(made.plan))
        typer.echo(f"\nplan: {out}")


def compress(
    model: Model,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to make.")],
    keep: KeptShare = None,
    size: FileSize = None,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="plan.json", help="Do what this plan says.")] = None,
    method: Method = None,
    flats: FlatCount = None,
    weights: Names = None,
    importance: Importance = None,
    power: Power = None,
    matrix_rows: RowSide = None,
    form: StoredForm = None,
    p: Exponent = None,
    ellipsoid: EllipsoidName = None,
    error: ErrorName = None,
    codec: CodecName = None,
    texts: Texts = None,
    calibration: Calibration = None,
    task: CalibrationTask = None,
    task_data: TaskFolder = None,
    samples: SampleCount = None,
    statistics: MeasuredFile = None,
    allocation: SharedBy = None,
    trim: Trim = None,
    seed: Seed = 0,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Compress a model into a new folder that loads like any other. Interrupted, the same command resumes."""
    asked = RecipeOptions(method, flats, importance, power, matrix_rows, form, p, ellipsoid, error, codec)
    known, whole = given(texts, calibration, task, task_data, samples, statistics), size is not None
    chosen: dict[str, Any] = {}
    if plan is None:
        chosen["keep"] = budget_of(keep, size)
        recipe = recipe_of(asked, counted=known.texts is not None, measured=known.measured, whole_file=whole)
        chosen |= {"method": recipe, "weights": weights_of(weights, recipe, whole)}
        chosen["allocation"] = allocation_of(allocation)
    else:
        decided = {**asked.given, "weights": weights, "allocation": allocation}
        chosen["plan"] = plan_of(plan, keep, size, known.texts is not None, **decided)
    quiet_transformers()
    report = compress_folder(
        model,
        out,
        texts=known.texts,
        calibration=known.examples or known.calibration,
        statistics=known.statistics,
        samples=known.samples,
        keep_statistics=statistics if known.statistics is None else None,
        trim=trim,
        seed=seed,
        force=force,
        quiet=quiet,
        **chosen,
    )
    if not quiet:
        typer.echo(str(report))
        typer.echo(f"\nmodel: {out}   (kflats compare {model} {out}; kflats report {out})")


def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to make.")] = Path("demo-out"),
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    force: Force = False,
) -> None:
    """Compress the small real model of the extra 'demo', judge it, and draw the report. No network."""
    quiet_transformers()
    run_demo(out, force=force, quiet=quiet, show=typer.echo)
