"""The command line: each command parses, calls one function, and prints.

Exit codes: 0 done; 2 the request cannot be carried out (the message says why and what to try);
130 interrupted. Any other failure is a defect and shows its traceback.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from kflats.cli_export import app as export_commands
from kflats.cli_frontier import app as frontier_command
from kflats.cli_tasks import app as task_commands
from kflats.cli_tasks import quiet_transformers
from kflats.cli_trim import app as trim_command
from kflats.errors import KflatsError
from kflats.options import (
    Asked,
    BudgetText,
    Calibration,
    CalibrationTask,
    CodecName,
    EllipsoidName,
    ErrorName,
    Exponent,
    FileBudget,
    FlatCount,
    Force,
    Importance,
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
    allocation_of,
    budget_of,
    examples_of,
    plan_of,
    recipe_of,
    samples_of,
    statistics_of,
    texts_of,
    tokenizer_of,
    weights_of,
)
from kflats.tables import plain, share, size, table, visible


class _Group(TyperGroup):
    """Turns what a user should read into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KflatsError as error:
            _complain(str(error))
            raise typer.Exit(2) from None
        except OSError as error:
            if error.filename is None:  # a broken pipe, say: not about a path, so not the user's to mend
                raise
            _complain(f"{error.strerror or 'cannot be used'}: {error.filename}")
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            resumes = ctx.invoked_subcommand in ("compress", "recover", "frontier")
            _complain("interrupted" + ("; the same command resumes where it stopped" if resumes else ""))
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Cover weight matrices with flats: smaller embeddings and layers in an ordinary Hugging Face folder.",
)


def _version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"kflats {version('kflats')}")
        except PackageNotFoundError:  # run from a checkout that was never installed
            typer.echo("kflats (not installed)")
        raise typer.Exit


@app.callback()
def _root(
    show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def inspect(model: Model) -> None:
    """List every weight that can be compressed: tied places, shape, bytes, share of the model."""
    from kflats.evaluate import weight_file_bytes
    from kflats.files import load_model, resolve_model
    from kflats.places import factored_layers, find_weights

    quiet_transformers()
    folder = resolve_model(model)
    loaded = load_model(folder)
    total = weight_file_bytes(folder)
    weights = find_weights(loaded)
    rows = [
        [
            w.name + "".join(f" = {place.name}" for place in w.places[1:]),
            w.places[0].role,
            " x ".join(map(str, w.shape)),
            w.dtype,
            size(w.nbytes),
            share(w.nbytes, total),
        ]
        for w in weights
    ]
    together = sum(w.nbytes for w in weights)
    _print(
        table(
            ["weight (= tied places)", "role", "shape", "type", "bytes", "share"],
            rows,
            left=2,
            totals=[
                ["all of these", "", "", "", size(together), share(together, total)],
                ["whole model (weight files)", "", "", "", size(total), share(total, total)],
            ],
        )
    )
    for name, layer in factored_layers(loaded):
        if layer.owns_matrix:
            n, d = layer.matrix.shape
            typer.echo(
                f"compressed already: {visible(name)}, {n} x {d}, {layer.matrix.kind}, {size(layer.matrix.nbytes)}"
            )


@app.command("plan")
def plan_(
    model: Model,
    out: Annotated[Path, typer.Option("--out", metavar="plan.json", help="Where to write the plan.")],
    budget: BudgetText = None,
    file_budget: FileBudget = None,
    method: Method = None,
    flats: FlatCount = None,
    weights: Names = None,
    importance: Importance = None,
    power: Power = None,
    rows: RowSide = None,
    form: StoredForm = None,
    p: Exponent = None,
    ellipsoid: EllipsoidName = None,
    error: ErrorName = None,
    codec: CodecName = None,
    texts: Texts = None,
    calibration: Calibration = None,
    task: CalibrationTask = None,
    data: TaskFolder = None,
    samples: SampleCount = None,
    statistics: MeasuredFile = None,
    allocation: SharedBy = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Decide which weight is treated how, in how many bytes; write it as JSON to review, edit and run later."""
    from kflats.calibration import gather
    from kflats.evaluate import weight_file_bytes
    from kflats.files import load_model, resolve_model
    from kflats.planning import decide

    if out.exists() and not force:
        raise KflatsError(f"{out} exists already", hint="another --out, or --force to replace it")
    allowed = budget_of(budget, file_budget)
    asked = Asked(method, flats, importance, power, rows, form, p, ellipsoid, error, codec)
    known = statistics_of(statistics)
    examples = examples_of(task, data, calibration, samples_of(samples))
    measured = calibration is not None or known is not None or examples is not None
    whole = file_budget is not None
    recipe = recipe_of(asked, counted=texts is not None, measured=measured, whole_file=whole)
    names = weights_of(weights, recipe, whole)
    counted, judged = texts_of(texts), texts_of(calibration)
    quiet_transformers()
    folder = resolve_model(model)
    loaded = load_model(folder)
    recipes = dict.fromkeys(names, recipe) if names else recipe
    importance_needs = getattr(getattr(recipe, "importance", None), "needs_tokenizer", False)
    tokens = counted is not None or judged is not None or examples is not None or importance_needs
    tokenizer = tokenizer_of(folder, needed=tokens)
    batches = judged if examples is None else examples(loaded, tokenizer)
    given = gather(judged if counted is None else counted, tokenizer, batches, None, known, samples_of(samples))
    how, before = allocation_of(allocation), weight_file_bytes(folder)
    made = decide(loaded, recipes, allowed, given, allocation=how, file_bytes=before, quiet=quiet)
    made.plan.save(out)
    if statistics is not None and known is None and made.data.statistics is not None:
        made.data.statistics.save(statistics)
    typer.echo(str(made.plan))
    typer.echo(f"\nplan: {out}")


@app.command()
def compress(
    model: Model,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to make.")],
    budget: BudgetText = None,
    file_budget: FileBudget = None,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="plan.json", help="Do what this plan says.")] = None,
    method: Method = None,
    flats: FlatCount = None,
    weights: Names = None,
    importance: Importance = None,
    power: Power = None,
    rows: RowSide = None,
    form: StoredForm = None,
    p: Exponent = None,
    ellipsoid: EllipsoidName = None,
    error: ErrorName = None,
    codec: CodecName = None,
    texts: Texts = None,
    calibration: Calibration = None,
    task: CalibrationTask = None,
    data: TaskFolder = None,
    samples: SampleCount = None,
    statistics: MeasuredFile = None,
    allocation: SharedBy = None,
    trim: Trim = None,
    seed: Seed = 0,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Compress a model into a new folder that loads like any other. Interrupted, the same command resumes."""
    from kflats.compress import compress_folder

    asked = Asked(method, flats, importance, power, rows, form, p, ellipsoid, error, codec)
    known, examples = statistics_of(statistics), examples_of(task, data, calibration, samples_of(samples))
    chosen: dict[str, Any] = {}
    if plan is None:
        chosen["budget"] = budget_of(budget, file_budget)
        measured = calibration is not None or known is not None or examples is not None
        whole = file_budget is not None
        recipe = recipe_of(asked, counted=texts is not None, measured=measured, whole_file=whole)
        chosen |= {"method": recipe, "weights": weights_of(weights, recipe, whole)}
        chosen["allocation"] = allocation_of(allocation)
    else:
        decided = {**asked.given, "weights": weights, "allocation": allocation}
        chosen["plan"] = plan_of(plan, budget, file_budget, texts is not None, **decided)
    chosen |= {
        "texts": texts_of(texts),
        "calibration": examples or texts_of(calibration),
        "statistics": known,
        "samples": samples_of(samples),
    }
    keep = statistics if known is None else None
    quiet_transformers()
    chosen |= {"keep_statistics": keep, "trim": trim, "seed": seed}
    report = compress_folder(model, out, **chosen, force=force, quiet=quiet)
    if not quiet:
        typer.echo(str(report))
        typer.echo(f"\nmodel: {out}   (kflats compare {model} {out}; kflats report {out})")


@app.command()
def compare(
    original: Annotated[str, typer.Argument(metavar="ORIGINAL", help="The original: a folder or a hub name.")],
    compressed: Annotated[Path, typer.Argument(metavar="DIR", help="The compressed model's folder.")],
    texts: Texts = None,
    card: Annotated[bool, typer.Option("--card", help="Write the figures into DIR's model card too.")] = False,
) -> None:
    """Sizes, fidelity of the outputs and latency of two models, side by side."""
    from kflats.evaluate import compare as run
    from kflats.model_card import note_fidelity

    data = texts_of(texts)
    if not compressed.is_dir():
        raise KflatsError(f"there is no folder {compressed}", hint="the folder that kflats compress wrote")
    quiet_transformers()
    found = run(original, compressed, data)
    typer.echo(str(found))
    if card:
        typer.echo(f"\ncard: {note_fidelity(compressed, found)}")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that kflats compress wrote.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Default: DIR/report.")] = None,
) -> None:
    """Draw what a compression did: one HTML file that needs nothing else, and its pictures as PNG."""
    from kflats.report import Report
    from kflats.report_html import render

    loaded = Report.load(folder)
    page = render(loaded, out or (folder if folder.is_dir() else folder.parent) / "report")
    typer.echo(str(page))


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to make.")] = Path("demo-out"),
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    force: Force = False,
) -> None:
    """Compress the small real model of the extra 'demo', judge it, and draw the report. No network."""
    from kflats.demo import demo as run

    quiet_transformers()
    run(out, force=force, quiet=quiet, show=typer.echo)


app.add_typer(task_commands)
app.add_typer(frontier_command)
app.add_typer(export_commands)
app.add_typer(trim_command)


def main() -> None:
    """Run the command line."""
    app()


def _print(made: Table) -> None:
    """On a terminal the table fits itself to the width; elsewhere lines stay whole."""
    console = Console()
    if console.is_terminal:
        console.print(made)
    else:
        typer.echo(plain(made))


def _complain(message: str) -> None:
    # Text, not markup: "[unused1]" in a message is a token.
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("kflats: ", "bold red"), visible(message)))


if __name__ == "__main__":
    main()
