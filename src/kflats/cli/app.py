"""The command line: each command parses, calls one function, and prints.

What a command calls is imported after its arguments are checked: the import of torch takes seconds.

Exit codes: 0 done; 2 the request cannot be carried out (the message says why and what to try);
130 interrupted. Any other failure is a defect and shows its traceback.
"""

from __future__ import annotations

import gc
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from kflats.cli.options import (
    LARGEST_SEED,
    TEXT_FILES,
    BudgetOptions,
    DataOptions,
    ExampleOptions,
    Folder,
    Force,
    Model,
    OptionalModel,
    Quiet,
    RecipeOptions,
    SearchOptions,
    Sizes,
    TableOptions,
    TaskData,
    TrainingOptions,
    TrustRemoteCode,
    check_recipe,
    conflict,
    given_options,
    only_own_words,
    recipe_of,
    texts_of,
    with_options,
)
from kflats.cli.workers import WorkerOptions, is_first, is_started, joined, start
from kflats.common.errors import KflatsError
from kflats.common.formatting import plain, share, size, table, visible
from kflats.common.machine import available_bytes, is_out_of_memory
from kflats.common.paths import expanded
from kflats.common.release import version
from kflats.common.run_forms import RunAs
from kflats.io.atomic import MANIFEST, check_file, check_folder
from kflats.io.sources import TABLE_INDEX, is_coded_table, local_model
from kflats.tasks.task import find_task

_TASKS = "cola, sst2, mrpc, qqp, mnli, qnli, rte, wnli, stsb, sts (by cosine), conll2003 or wikitext2."
Compressed = Annotated[str, typer.Argument(metavar="DIR", help="The compressed model: a folder or a hub name.")]

if TYPE_CHECKING:
    from kflats.common.workers import Workers
    from kflats.tables.index import TableIndex


def inspect(model: Model, trust_remote_code: TrustRemoteCode = False) -> None:
    """List every weight that can be compressed: its tied names, shape, bytes, and share of the model. Of a coded table:
    its rows, bytes and error."""
    if is_coded_table(model):
        from kflats.tables import open_table

        coded = open_table(folder := expanded(model))
        coded.index.check_files(folder)
        flats = "" if coded.flats == 1 else f", {coded.flats} flats"
        typer.echo(f"{_table_line(folder, coded.index)}{flats}")
        return
    local_model(model)
    from kflats.evaluation.outputs import weight_file_bytes
    from kflats.io.saving import load_model
    from kflats.io.sources import resolve_model
    from kflats.model.weights import factored_layers, find_weights, held_matrices

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
    shown = table(
        ["weight (= tied names)", "role", "shape", "type", "bytes", "share"],
        rows,
        left=2,
        totals=[
            ["all of these", "", "", "", size(together), share(together, total)],
            ["whole model (weight files)", "", "", "", size(total), share(total, total)],
        ],
    )
    console = Console()
    # A table fits the width of a terminal; elsewhere its lines are not folded.
    console.print(shown) if console.is_terminal else typer.echo(plain(shown))
    if together > total:
        typer.echo("The weights take more bytes as they are loaded than in the files, which hold them in another form.")
    owned = [(name, layer.matrix) for name, layer in factored_layers(loaded) if layer.owns_matrix]
    for name, matrix in [*owned, *((name, held.matrix) for name, held in held_matrices(loaded))]:
        n, d = matrix.shape
        typer.echo(f"compressed already: {visible(name)}, {n} x {d}, {matrix.kind}, {size(matrix.nbytes)} in memory")


@with_options
def plan(
    model: Model,
    out: Annotated[Path, typer.Option(metavar="plan.json", help="The plan file to write.")],
    budget: BudgetOptions,
    recipe: RecipeOptions,
    data: DataOptions,
    force: Force = False,
    quiet: Quiet = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Decide the method and the bytes of each weight, and write them as JSON to review, edit and run later."""
    check_file(out, force, _is_plan)
    budget.check_size()
    check_recipe(recipe, counted=data.texts is not None)
    local_model(model)
    read = data.read()
    from kflats.compress.pipeline import plan_folder

    quiet_transformers()
    decided = plan_folder(model, quiet=quiet, **read, **_chosen(budget, recipe, data))
    check_file(out, force, _is_plan)
    decided.save(out)
    if not quiet:
        typer.echo(f"{decided}\n\nplan: {out}")


@with_options
def compress(
    out: Folder,
    budget: BudgetOptions,
    recipe: RecipeOptions,
    data: DataOptions,
    search: SearchOptions,
    table: TableOptions,
    model: OptionalModel = None,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="plan.json", exists=True, dir_okay=False, help="Carry out this plan of kflats plan."),
    ] = None,
    trim: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="First keep only the N commonest tokens, counted in --texts.")
    ] = None,
    no_sequential: Annotated[
        bool,
        typer.Option(
            "--no-sequential",
            help="Code each linear layer by itself, not for what it reads behind coded tables and layers: in less "
            "time, at outputs that are a little farther from the original's.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of the random starts.")] = 0,
    run_as: Annotated[
        RunAs,
        typer.Option(
            help="How coded layers multiply once the folder is loaded: dense (nearly as fast as the original), "
            "bfloat16 (faster on some CPUs), int8, compact (the least memory), or auto, the fastest on this machine "
            "that loses at most .002 more than dense."
        ),
    ] = "dense",
    eval_texts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Texts to compare outputs on at the end. Default: held-out texts, or kflats' own."
        ),
    ] = None,
    no_proof: Annotated[
        bool, typer.Option("--no-proof", help="Do not compare outputs, memory and times with the original's.")
    ] = False,
    *,
    workers: WorkerOptions,
    force: Force = False,
    quiet: Quiet = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Compress a model, or a table, into a new folder. Interrupted, the same command resumes."""
    own = recipe if table.table is None else replace(recipe, flats=None)
    of_models = given_options(replace(budget, size=None)) + given_options(own) + given_options(data)
    others: dict[str, object] = {
        "--plan": plan,
        "--trim": trim,
        "--no-sequential": no_sequential or None,
        "--eval-texts": eval_texts,
        "--no-proof": no_proof or None,
        "--run-as": None if run_as == "dense" else run_as,
    }
    others |= {"--search-split": search.search_split, "--search": None if search.search == "error" else "task"}
    table.check(budget.size, model, of_models + [option for option, value in others.items() if value is not None])
    if table.table is not None:
        check_folder(out, force)
        flats = table.flats(recipe.flats)
        if not start(workers):
            with joined(workers) as crew:
                _compress_table(table, budget.size or "", flats, out, seed=seed, force=force, quiet=quiet, crew=crew)
        return
    assert model is not None
    if plan is None:
        budget.check()
        check_recipe(recipe, counted=data.texts is not None)
    elif extra := given_options(recipe) + given_options(replace(budget, keep=None, size=None)):
        raise conflict("--plan", ", ".join(extra), "leave the option out, or make another plan: kflats plan")
    scored = search.scored(data, recipe.flats)
    if not (force or no_proof):
        _check_proof(out, model)
    _check_places(out, force, model)
    if start(workers):
        return
    read = data.read() | {"score": scored, "sequential": not no_sequential}
    read |= {"proof": not no_proof, "eval_texts": texts_of(eval_texts)}
    from kflats.compress.pipeline import compress_folder
    from kflats.recipe.recipe import Plan

    if plan is None:
        read |= _chosen(budget, recipe, data) | {"quality": budget.quality}
    else:
        read |= {"plan": Plan.load(plan), "keep": budget.keep, "size": budget.size}
    quiet_transformers()
    with joined(workers) as crew:
        report = compress_folder(
            model, out, trim=trim, seed=seed, run_as=run_as, force=force, quiet=quiet, workers=crew, **read
        )
    if not quiet and crew.first:
        typer.echo(f"{report}\n\nmodel: {out}   (kflats compare {model} {out}; kflats report {out})")


def _check_proof(out: Path, model: str) -> None:
    """Refuse an output that a run has written whole before it was stopped in its proof."""
    if not (out / "kflats_report.json").is_file():
        return
    from kflats.report.report import Report

    if Report.load(out).proof is None:
        raise KflatsError(
            f"{out} exists already: a whole model without a proof",
            cause="the run that wrote it was stopped while it compared, or was not to compare",
            hint=f"kflats compare {model} {out} --card writes the proof; or force=True to make the model again",
        )


def _compress_table(
    options: TableOptions, limit: str, flats: int, out: Path, *, seed: int, force: bool, quiet: bool, crew: Workers
) -> None:
    from kflats.tables import compress_table

    assert options.table is not None
    layout = options.layout or "compact"
    index = compress_table(
        options.table,
        out,
        size=limit,
        layout=layout,
        flats=flats,
        row_weights=options.row_weights,
        name=options.column or "",
        seed=seed,
        force=force,
        quiet=quiet,
        workers=crew,
    )
    if not quiet and crew.first:
        weighted = "weighted " if options.row_weights is not None else ""
        typer.echo(f"{_table_line(out, index, weighted)}\n\ntable: {out}   (kflats.open_table; kflats inspect {out})")


def _table_line(folder: Path, index: TableIndex, weighted: str = "") -> str:
    beside = (folder / name for name in (TABLE_INDEX, MANIFEST))
    total = index.nbytes + sum(path.stat().st_size for path in beside if path.is_file())
    bits = 8 * total / (index.rows * index.columns)
    shape = f"{index.rows:,} x {index.columns}, {index.layout}"
    error = f"relative {weighted}squared error {index.relative_error:.3e}"
    return f"{shape}: {size(total)}, {bits:.3f} bits a number, {error}"


def _chosen(budget: BudgetOptions, recipe: RecipeOptions, data: DataOptions) -> dict[str, Any]:
    """The recipe, the weights and the budget, as arguments of ``compress_folder`` and ``plan_folder``."""
    method = recipe_of(
        recipe,
        counted=data.texts is not None,
        measured=data.task is not None or data.statistics is not None,
        tokens=budget.tokens,
        whole_file=budget.keep is None,
    )
    names = budget.names(chosen=recipe == RecipeOptions() or recipe.is_auto)
    chosen = {"method": method, "weights": names, "allocation": budget.allocation or "auto"}
    return chosen | {"keep": budget.keep, "size": budget.size}


def trim(
    model: Model,
    keep: Annotated[int, typer.Option(metavar="N", min=1, help="Entries of the new vocabulary, special ones too.")],
    out: Folder,
    texts: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"Texts whose tokens are counted: {TEXT_FILES}.")
    ] = None,
    eval_texts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Texts that the report is measured on. Default: --texts.")
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Keep the N commonest tokens of a vocabulary, in the model and its tokenizer; removed words become pieces."""
    _check_places(out, force, model)
    counted, evaluated = texts_of(texts), texts_of(eval_texts)
    from kflats.trimming.trimming import trim_folder

    quiet_transformers()
    report = trim_folder(model, out, keep=keep, texts=counted, eval_texts=evaluated, force=force)
    if not quiet:
        typer.echo(f"{report}\n\nmodel: {out}   (kflats compare {model} {out})")


def compare(
    original: Annotated[str, typer.Argument(metavar="ORIGINAL", help="The original: a folder or a hub name.")],
    compressed: Annotated[Path, typer.Argument(metavar="DIR", help="The compressed model's folder.")],
    texts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"Texts to compare on: {TEXT_FILES}. Default: kflats' own sentences."),
    ] = None,
    card: Annotated[
        bool, typer.Option("--card", help="Write the figures into the model card and the report of DIR too.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Compare two models: outputs, sizes, memory and times."""
    data = texts_of(texts)
    if not compressed.is_dir():
        raise KflatsError(f"there is no folder {compressed}", hint="a folder that kflats compress wrote")
    local_model(original)
    from kflats.evaluation.proof import compare as compare_folders

    quiet_transformers()
    proof = compare_folders(original, compressed, data, quiet=False)
    typer.echo(f"original:   {visible(original)}\ncompressed: {visible(str(compressed))}\n\n{proof}")
    if card:
        from kflats.report.model_card import note_proof

        typer.echo(f"\ncard: {note_proof(compressed, proof)}")


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that kflats compress wrote.")],
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Default: DIR/report.")] = None,
) -> None:
    """Draw the report of a compression: one HTML file that needs no other file, and its pictures as PNG."""
    from kflats.report.html import render
    from kflats.report.report import Report

    loaded = Report.load(folder)
    page = render(loaded, out or (folder if folder.is_dir() else folder.parent) / "report")
    typer.echo(str(page))


@with_options
def evaluate(
    model: Compressed,
    task: Annotated[str, typer.Option(help=_TASKS)],
    examples: ExampleOptions,
    task_data: TaskData = None,
    original: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Score this model too, beside the compressed one.")
    ] = None,
    split: Annotated[str, typer.Option(help="The split: a file's name without .tsv.gz.")] = "dev",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Score a model on a task, with its size, memory, latency and operations; beside the original's if it is given."""
    find_task(task)
    for name in (model, original):
        if name is not None:
            local_model(name)
    from kflats.tasks.scoring import evaluate_folder

    quiet_transformers()
    scores = evaluate_folder(model, task, original=original, task_data=task_data, split=split, **asdict(examples))
    typer.echo(str(scores))


@with_options
def recover(
    model: Compressed,
    out: Folder,
    training: TrainingOptions,
    examples: ExampleOptions,
    task: Annotated[str | None, typer.Option(help=_TASKS)] = None,
    task_data: TaskData = None,
    teacher: Annotated[
        str | None, typer.Option(metavar="ORIGINAL", help="Train towards this model's outputs too.")
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"With --teacher: texts to learn from in place of a task: {TEXT_FILES}."),
    ] = None,
    split: Annotated[str, typer.Option(help="The split to learn from.")] = "train",
    eval_split: Annotated[str, typer.Option(help="The split whose score decides which epoch is kept.")] = "dev",
    quiet: Quiet = False,
    force: Force = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Train a compressed model on its task, towards the original, or both. Interrupted, the same command resumes."""
    others = [name for name, value in (("--task-data", task_data), ("--limit", examples.limit)) if value is not None]
    if texts is not None and others:
        raise conflict("--texts", " and ".join(others), "leave it out, or --task NAME")
    chosen = {**asdict(training), **asdict(examples)}
    if task is None:
        del chosen["limit"]
    else:
        chosen |= {"task_data": task_data, "split": split, "eval_split": eval_split}
        find_task(task)
    _check_places(out, force, model, *([] if teacher is None else [teacher]))
    learnt = texts_of(texts)
    from kflats.recover.recover import recover_folder

    quiet_transformers()
    recovery = recover_folder(model, out, task, texts=learnt, teacher=teacher, force=force, quiet=quiet, **chosen)
    if not quiet:
        typer.echo(f"{recovery}\n\nmodel: {out}")


def export(
    model: Model,
    out: Annotated[
        Path,
        typer.Option(metavar="PATH", help="The folder to write; with --onnx also a file, if its name ends in .onnx."),
    ],
    dense: Annotated[
        bool, typer.Option("--dense", help="Write an ordinary checkpoint, which loads without kflats.")
    ] = False,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write an ONNX file, checked with onnxruntime.")] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="With --onnx: linear layers multiply integers, right on every CPU.")
    ] = False,
    pooled: Annotated[
        bool,
        typer.Option("--pooled", help="With --onnx: the outputs are sentence vectors, as of sentence-transformers."),
    ] = False,
    drop_biases: Annotated[
        bool, typer.Option("--drop-biases", help="With --dense: leave out biases that compression added.")
    ] = False,
    force: Force = False,
    quiet: Quiet = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a model for programs without kflats: a checkpoint with dense weights, or an ONNX file or folder."""
    if dense == onnx:
        raise KflatsError(
            "give one of --dense and --onnx", hint="--dense --out DIR, --onnx --out DIR or --out model.onnx"
        )
    if int8 and dense:
        raise conflict("--int8", "--dense", "--onnx, or leave --int8 out")
    if pooled and onnx and out.suffix != ".onnx":
        raise conflict("--pooled", "a folder", "--out model.onnx, or leave --pooled out: the folder holds the pooling")
    if pooled and dense:
        raise conflict("--pooled", "--dense", "--onnx, or leave --pooled out")
    if drop_biases and onnx:
        raise conflict("--drop-biases", "--onnx", "--dense, or leave --drop-biases out")
    if dense:
        check_folder(out, force, [folder for folder in [local_model(model, pickled=True)] if folder is not None])
        from kflats.export.dense import export_dense

        quiet_transformers()
        written = str(export_dense(model, out, drop_biases=drop_biases, force=force))
    else:
        if out.suffix == ".onnx":
            local_model(model)
        else:
            _check_places(out, force, model)
        from kflats.export.onnx import export_onnx

        quiet_transformers()
        written = str(export_onnx(model, out, pooled=pooled, int8=int8, force=force))
    if not quiet:
        typer.echo(written)


@with_options
def demo(
    workers: WorkerOptions,
    out: Folder = Path("demo-out"),
    sizes: Sizes = "20MB,8MB,6MB",
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Compress the real model of the extra 'demo', compare it with other tools, search with it. Needs no network."""
    check_folder(out, force)
    if start(workers):
        return
    from kflats.demo import demo as run_demo

    quiet_transformers()
    wanted = [one.strip() for one in sizes.split(",")]
    with joined(workers) as crew:
        show = (lambda text: None) if quiet or not crew.first else typer.echo
        run_demo(out, sizes=wanted, force=force, quiet=quiet, show=show, workers=crew)


def _check_places(out: Path, force: bool, *models: str) -> None:
    """Refuse, before anything is loaded, folders without a model, and a new folder that cannot be written."""
    check_folder(out, force, [folder for model in models if (folder := local_model(model)) is not None])


def _is_plan(path: Path) -> bool:
    from kflats.recipe.recipe import Plan

    return Plan.is_saved_in(path)


def quiet_transformers() -> None:
    """Turn off the progress bars and messages of transformers: they would stand between those of kflats."""
    try:
        from transformers.utils import logging as untyped
    except ImportError:
        return
    logging: Any = untyped
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def complain(message: str) -> None:
    """Print one error message or warning on stderr."""
    # Text, not markup: "[unused1]" in a message is a token.
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("kflats: ", "bold red"), visible(message)))


def _warn(warning: str) -> None:
    if is_first():
        complain(f"warning: {warning}")


class _Group(TyperGroup):
    """Turns errors that the user can mend into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with only_own_words(_warn):
                return super().invoke(ctx)
        except (KflatsError, OSError) as error:
            if isinstance(error, OSError):
                if error.filename is None:  # a broken pipe, for example: the user cannot mend it by another path
                    raise
                hint = "another path, or free space and the permissions for this one"
                error = KflatsError(f"{error.filename} cannot be used", cause=(error.strerror or "").lower(), hint=hint)
            complain(error.on_command_line())
            raise typer.Exit(2) from None
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            why = f"{size(available_bytes())} are there for this process; others may take some of them"
            hint = "a machine with more memory; kflats compress resumes where it stopped"
            complain(KflatsError("the memory does not suffice", cause=why, hint=hint).on_command_line())
            raise typer.Exit(2) from None
        except KeyboardInterrupt as error:
            resumes = ctx.invoked_subcommand in ("compress", "recover")
            note = str(error) or ("the same command resumes where it stopped" if resumes else "")
            if is_first() and not is_started():
                complain("interrupted" + (f"; {note}" if note else ""))
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Compress the weights of a model: smaller embeddings and layers in an ordinary Hugging Face folder.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kflats {version()}")
        raise typer.Exit


@app.callback()
def _root(
    show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


for command in (
    *(inspect, plan, compress, trim, compare),
    *(evaluate, recover, export, report, demo),
):
    app.command()(command)


def main() -> None:
    """Run the command line."""
    # torch and transformers make a million objects that live to the end. Looking for garbage among them takes .4 s
    # while they are imported, and a second when the process ends.
    gc.set_threshold(10_000)
    try:
        app()
    finally:
        gc.freeze()


if __name__ == "__main__":
    main()
