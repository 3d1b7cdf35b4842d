"""The command line, as a user sees it: what it prints, what it writes, and how it says no."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from kflats.calibration.measurements import Statistics
from kflats.calibration.objectives import Projections, SampledLabels, describe
from kflats.cli import app as commands
from kflats.cli.app import app
from kflats.cli.options import RecipeOptions, _share, hush, only_own_words, recipe_of
from kflats.common.errors import KflatsError, KflatsWarning
from kflats.importance import InputGram, KroneckerFisher, RowFisher, TokenCounts, TwoSided, Uniform, ZipfPrior
from kflats.methods import MESSI, SVD, Entrywise, Flats, KMeansSVD, RobustSVD, Subspace
from kflats.numerics.loss import Huber, Power, Truncated
from kflats.recipe.recipe import Plan, Recipe, from_json
from kflats.report.report import REPORT_FILE, Report

transformers = pytest.importorskip("transformers")


def run(*arguments: object) -> Result:
    """The command's result; an exception that is no exit is a defect, and raised here."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    return result.stderr


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT folder small enough for a test, with a tokenizer of a few words."""
    folder = tmp_path_factory.mktemp("tiny")
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *(f"w{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(395)),
    ]
    config = transformers.BertConfig(
        vocab_size=400, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(f"wa{chr(97 + i % 5)} wb{chr(97 + i % 7)} wca" for i in range(30)), encoding="utf-8")
    return file


def test_help_and_docs_name_every_command(repository: Path) -> None:
    text = run("--help").output
    commands = [command.callback.__name__ for command in app.registered_commands if command.callback]
    assert {"inspect", "plan", "compress", "trim", "compare", "evaluate", "recover"} < set(commands)
    page = (repository / "docs" / "cli.md").read_text(encoding="utf-8")
    for command in commands:
        assert f" {command} " in text
        assert f"kflats {command} " in page
        assert run(command, "--help").exit_code == 0


def test_every_option_is_in_the_docs(repository: Path) -> None:
    page = (repository / "docs" / "cli.md").read_text(encoding="utf-8")
    group = typer.main.get_command(app)
    options = {name for one in group.commands.values() for p in one.params for name in p.opts}  # type: ignore[attr-defined]
    options = {name for name in options if name.startswith("--")}
    assert options == set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", page)) - {"--help"}


def test_version() -> None:
    assert run("--version").output.startswith("kflats ")


def test_inspect_lists_names_ties_shapes_bytes_and_shares(tiny: Path, tmp_path: Path) -> None:
    lines = run("inspect", tiny).output.splitlines()
    words = next(line for line in lines if line.startswith("embeddings.word_embeddings"))
    assert words.split()[1:] == ["embedding", "400", "x", "32", "float32", "51.2", "kB"] + words.split()[-2:]
    total = (tiny / "model.safetensors").stat().st_size
    assert f"{100 * 51_200 / total:.1f} %" in words
    assert lines[-1].startswith("whole model")
    head = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=90, n_embd=16, n_layer=1, n_head=2))
    head.save_pretrained(tmp_path)
    assert "transformer.wte = lm_head" in run("inspect", tmp_path).output


def test_no_is_said_without_a_traceback(tiny: Path, tmp_path: Path) -> None:
    assert "there is no folder" in refused("inspect", tmp_path / "none")
    assert "holds no model" in refused("inspect", tmp_path)
    assert "holds no report" in refused("report", tiny)
    assert "there is no folder" in refused("compare", tiny, tmp_path / "none")
    assert "cannot be read" in refused("compare", tiny, tiny, "--texts", tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text("\n")
    assert "no text" in refused("compare", tiny, tiny, "--texts", tmp_path / "empty.txt")


def test_a_path_that_cannot_be_used_is_named(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: object) -> None:
        raise OSError(28, "No space left on device", "/some/file[bold]")

    monkeypatch.setattr(commands, "local_model", full)
    said = refused("inspect", tiny)
    assert "/some/file[bold] cannot be used. Likely cause: no space left on device. Try: another path" in said


def test_a_defect_keeps_its_traceback(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(commands, "local_model", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        run("inspect", tiny)


@pytest.mark.parametrize(("command", "note"), [("inspect", False), ("compress", True)])
def test_interrupted(command: str, note: bool, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "local_model", interrupt)
    extra = ("--keep", "60%", "--out", tmp_path / "out") if command == "compress" else ()
    result = run(command, tiny, *extra)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert ("resumes" in result.stderr) is note


def test_compare_prints_outputs_sizes_memory_and_times(tiny: Path, texts: Path) -> None:
    text = run("compare", tiny, tiny, "--texts", texts).output
    for part in ("weight files", "100.0 %", "mean cosine", "neighbours kept", "memory of a fresh process", "32 x 30"):
        assert part in text
    assert "loss 0 (quality 1.0000)" in text


def test_report_draws_a_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    Report("m", "60%", (), 100, 80, 0, "0.1.0").save(tmp_path / REPORT_FILE)
    assert run("report", tmp_path).output.strip() == str(tmp_path / "report" / "report.html")
    elsewhere = tmp_path / "a" / "b"
    assert run("report", tmp_path / REPORT_FILE, "--out", elsewhere).exit_code == 0
    assert (elsewhere / "report.html").exists()


def test_starts_without_loading_what_it_does_not_need() -> None:
    program = (
        "import sys, kflats.cli.app; print([n for n in ('transformers', 'matplotlib', 'jinja2') if n in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.strip() == "[]", done.stderr


def state(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_compress_makes_a_folder_within_the_budget(tiny: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    result = run("compress", tiny, "--keep", "60%", "--flats", 2, "--texts", texts, "--out", out)
    assert result.exit_code == 0, result.output
    assert "named weights" in result.stdout
    report = Report.load(out)
    assert str(report) in result.stdout
    (weight,) = report.weights
    assert (weight.name, weight.method["k"], weight.importance["type"]) == (
        "embeddings.word_embeddings",
        2,
        "TokenCounts",
    )
    assert weight.bytes_after <= 0.6 * weight.bytes_before
    assert "compressed already: embeddings.word_embeddings" in run("inspect", out).output
    assert run("compare", tiny, out, "--texts", texts).exit_code == 0


def test_all_numbers_in_half_precision(tiny: Path, tmp_path: Path) -> None:
    result = run(
        "compress", tiny, "--method", "keep-dense", "--codec", "float16", "--keep", "60%", "--out", tmp_path / "a"
    )
    assert result.exit_code == 0, result.output
    (weight,) = Report.load(tmp_path / "a").weights
    assert (weight.kept, 2 * weight.bytes_after) == ("float16", weight.bytes_before)
    assert "embeddings.word_embeddings, 400 x 32, dense, 25.6 kB" in run("inspect", tmp_path / "a").output
    asked = ("--method", "keep-dense", "--codec", "bfloat16", "--weights", "all", "--size", "60%")
    assert run("compress", tiny, *asked, "--out", tmp_path / "b").exit_code == 0
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (tiny, tmp_path / "b")]
    assert sizes[1] <= 0.6 * sizes[0]


def test_compress_is_quiet_when_asked_and_reproducible(tiny: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        result = run("compress", tiny, "--keep", "20kB", "--seed", 3, "--quiet", "--out", tmp_path / name)
        assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert a == b


@pytest.mark.slow
@pytest.mark.parametrize("quiet", [False, True])
def test_only_kflats_speaks_in_a_process_of_its_own(quiet: bool, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("waa unknown words here\n" * 9, encoding="utf-8")
    arguments = ["compress", tiny, "--size", "60%", "--texts", tmp_path / "texts.txt", "--out", tmp_path / "small"]
    program = "import sys; from kflats.cli.app import main; sys.argv[0] = 'kflats'; main()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", program, *map(str, arguments), *(["--quiet"] if quiet else [])],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if quiet:
        assert (done.stdout, done.stderr) == ("", "")
        return
    assert str(Report.load(tmp_path / "small")) in done.stdout
    lines = done.stderr.splitlines()
    assert re.search(r"kflats: warning: \d+ of \d+ words", done.stderr)
    assert [line for line in lines if not line.startswith("kflats: ")] == []


def test_noise_of_other_libraries_is_hidden_and_kflats_warnings_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    shown: list[str] = []
    with only_own_words(shown.append):
        logging.getLogger("torchao").warning("Failed to load a library")
        logging.getLogger("torchao").error("broken")
        warnings.warn("a library's own", DeprecationWarning, stacklevel=1)
        warnings.warn("a library's own", UserWarning, stacklevel=1)
        warnings.warn(KflatsWarning('allocation="loss" weighs it'), stacklevel=1)
        hush(True)
        warnings.warn(KflatsWarning("of less weight"), stacklevel=1)
    assert shown == ["--allocation loss weighs it"]
    assert [record.message for record in caplog.records] == ["broken"]
    with pytest.warns(UserWarning, match="outside"):
        warnings.warn("outside", UserWarning, stacklevel=1)
    logging.getLogger("torchao").warning("outside")
    assert caplog.records[-1].message == "outside"


def test_an_existing_folder_is_kept_unless_forced(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("compress", tiny, "--keep", "60%", "--method", "svd", "--out", out).exit_code == 0
    before = state(out)
    assert "exists" in refused("compress", tiny, "--keep", "40%", "--method", "svd", "--out", out)
    assert state(out) == before
    assert run("compress", tiny, "--keep", "40%", "--method", "svd", "--force", "--out", out).exit_code == 0
    assert Report.load(out).budget == "40%"


def test_a_plan_is_made_reviewed_and_run(tiny: Path, texts: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "plan.json", tmp_path / "out"
    arguments = ("plan", tiny, "--keep", "60%", "--flats", 3, "--texts", texts, "--out", file)
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    plan = Plan.load(file)
    assert str(plan) in result.stdout
    assert plan.decisions[0].recipe == Recipe(Flats(k=3), TokenCounts())
    assert "exists already" in refused(*arguments)
    again = run(*arguments, "--force", "--quiet")
    assert (again.exit_code, again.stdout) == (0, "")
    assert "--flats" in refused("compress", tiny, "--plan", file, "--flats", 4, "--out", out)
    assert "60%" in refused("compress", tiny, "--plan", file, "--keep", "50%", "--out", out)
    assert "1MB of all files" in refused("compress", tiny, "--plan", file, "--size", "1MB", "--out", out)
    assert not out.exists()
    done = run("compress", tiny, "--plan", file, "--keep", "60%", "--texts", texts, "--quiet", "--out", out)
    assert done.exit_code == 0, done.output
    assert Report.load(out).weights[0].method["k"] == 3


def test_several_weights_and_a_file_budget(tiny: Path, tmp_path: Path) -> None:
    whole = (tiny / "model.safetensors").stat().st_size
    names = [x for n in ("embeddings.word_embeddings", "encoder.layer.0.output.dense") for x in ("--weights", n)]
    common = ("--method", "svd", "--quiet", *names)
    assert run("compress", tiny, "--keep", "50%", *common, "--out", tmp_path / "a").exit_code == 0
    assert len(Report.load(tmp_path / "a").weights) == 2
    limit = whole - 10_000
    done = run("compress", tiny, "--size", f"{limit}B", *common, "--out", tmp_path / "b")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "b" / "model.safetensors").stat().st_size <= limit


def test_rows_that_are_no_tokens_count_alike_by_default(tiny: Path, tmp_path: Path) -> None:
    names = ("--weights", "embeddings.word_embeddings", "--weights", "encoder.layer.0.output.dense")
    done = run("plan", tiny, "--keep", "90%", *names, "--out", tmp_path / "plan.json")
    assert done.exit_code == 0, done.output
    found = [d.recipe.importance for d in Plan.load(tmp_path / "plan.json").decisions]
    assert found == [ZipfPrior(), Uniform()]
    assert "--importance uniform" in refused(
        "plan", tiny, "--keep", "90%", "--flats", 2, *names, "--out", tmp_path / "other.json"
    )


def test_one_command_makes_every_linear_layer_smaller(tiny: Path, texts: Path, tmp_path: Path) -> None:
    out, kept = tmp_path / "small", tmp_path / "statistics.safetensors"
    arguments = ("--weights", "linear", "--keep", "60%", "--texts", texts)
    done = run("compress", tiny, *arguments, "--statistics", kept, "--out", out)
    assert done.exit_code == 0, done.output
    report = Report.load(out)
    assert report.bytes_after <= 0.6 * report.bytes_before
    assert {w.importance["type"] for w in report.weights if not w.dense} == {"KroneckerFisher"}
    pooler = next(w for w in report.weights if w.name == "pooler.dense")
    assert pooler.dense
    assert "pooler.dense: dense: the calibration data does not reach it" in done.stdout
    assert run("compare", tiny, out, "--texts", texts).exit_code == 0
    # The same from what was measured; a plan says each decision.
    again = run("plan", tiny, *arguments[:4], "--statistics", kept, "--out", tmp_path / "plan.json")
    assert again.exit_code == 0, again.output
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.allocation == "loss"
    assert [d.weight.name for d in plan.decisions] == [w.name for w in report.weights]
    assert all(d.note for d in plan.decisions)
    from_plan = ("--plan", tmp_path / "plan.json", "--statistics", kept, "--quiet", "--out", tmp_path / "other")
    assert run("compress", tiny, *from_plan).exit_code == 0
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("small", "other"))
    assert first == second


def test_a_tasks_own_examples_measure_by_its_own_loss(tiny: Path, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(tiny, num_labels=2)
    model = transformers.BertForSequenceClassification(config)
    model.save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "model")
    (tmp_path / "sst2").mkdir()
    lines = ["sentence1\tsentence2\tlabel", *(f"wa{chr(97 + i)} wb{chr(97 + i)} wca\t\t{i % 2}" for i in range(20))]
    (tmp_path / "sst2" / "train.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    kept = tmp_path / "statistics.safetensors"
    given = ("--weights", "linear", "--task", "sst2", "--task-data", tmp_path / "sst2", "--keep", "60%")
    given += ("--samples", "16")
    done = run(
        "compress", tmp_path / "model", *given, "--importance", "row-fisher", "--statistics", kept,
        "--out", tmp_path / "small", "--quiet",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = Statistics.load(kept)
    assert (found.objective["type"], found.samples) == ("TaskLoss", 16)
    assert {w.importance["type"] for w in Report.load(tmp_path / "small").weights if not w.dense} == {"RowFisher"}
    planned = run("plan", tmp_path / "model", *given, "--quiet", "--out", tmp_path / "plan.json")
    assert planned.exit_code == 0, planned.output
    assert Plan.load(tmp_path / "plan.json").allocation == "loss"
    out = ("--out", tmp_path / "no")
    assert "'--samples'" in refused("compress", tiny, "--keep", "9%", "--samples", 0, *out)
    assert "--task-data cannot be used without --task" in refused(
        "compress", tiny, "--keep", "9%", "--task-data", tmp_path, *out
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--quality", "high"), "write .98, or 98%"),
        (("--keep", "60%", "--size", "1MB"), "are both given"),
        (("--keep", "0.6"), "0.6"),
        (("--keep", "300%"), "more than the original"),
        (("--keep", "60%", "--method", "magic"), "no method is called 'magic'"),
        (("--keep", "60%", "--importance", "magic"), "no importance is called 'magic'"),
        (("--keep", "60%", "--method", "svd", "--flats", "3"), "--flats cannot be used with --method svd"),
        (("--keep", "60%", "--importance", "counts"), "needs texts to count"),
        (("--keep", "60%", "--weights", "nothing"), "no weight called 'nothing'"),
        (("--plan", "none.json"), "does not exist"),
        (("--keep", "60%", "--weights", "conv"), "no weights of the kind 'conv'"),
        (("--keep", "60%", "--weights", "encoder.layer.9.*"), "no weight of the model matches"),
        (("--keep", "60%", "--weights", "linear", "--allocation", "loss"), "not in units of a loss"),
        (("--keep", "60%", "--matrix-rows", "columns"), "Invalid value for '--matrix-rows'"),
        (("--keep", "60%", "--form", "blocks"), "Invalid value for '--form'"),
        (("--keep", "60%", "--allocation", "best"), "Invalid value for '--allocation'"),
    ],
)
def test_compress_and_plan_refuse_alike(options: tuple[str, ...], message: str, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert message in refused("compress", tiny, *options, "--out", out)
    if "--plan" not in options:
        assert message in refused("plan", tiny, *options, "--out", out)
    assert list(tmp_path.iterdir()) == []


def test_options_become_recipes() -> None:
    assert recipe_of(RecipeOptions(), counted=True) is None
    assert recipe_of(RecipeOptions(flats=7), counted=True) == Recipe(Flats(k=7), TokenCounts())
    assert recipe_of(RecipeOptions(flats=7), counted=False) == Recipe(Flats(k=7), ZipfPrior())
    assert recipe_of(RecipeOptions("svd"), counted=False) == Recipe(SVD(), Uniform())
    assert recipe_of(RecipeOptions("kmeans-svd", 4), counted=True) == Recipe(KMeansSVD(k=4), TokenCounts())
    assert recipe_of(RecipeOptions("messi", 6, importance="uniform"), counted=False) == Recipe(MESSI(k=6), Uniform())
    assert recipe_of(RecipeOptions("flats", power=0.75), counted=False) == Recipe(Flats(), ZipfPrior(power=0.75))
    with pytest.raises(KflatsError, match=r"--importance zipf.*--texts out"):
        recipe_of(RecipeOptions("flats", importance="zipf"), counted=True)


def test_flats_are_searched_and_started_again() -> None:
    uniform = {"counted": False}
    assert recipe_of(RecipeOptions("messi", "search", 3), **uniform) == Recipe(MESSI(k=None, restarts=3), Uniform())
    assert recipe_of(RecipeOptions(flats="search"), counted=True) == Recipe(Flats(k=None), TokenCounts())
    assert recipe_of(RecipeOptions(restarts=2), counted=True) == Recipe(Flats(restarts=2), TokenCounts())
    for asked, message in (
        (RecipeOptions("kmeans-svd", "search"), "--flats search cannot be used with --method kmeans-svd"),
        (RecipeOptions(flats="many"), "--flats many is not supported.*search"),
        (RecipeOptions(flats="0"), "--flats 0 is not supported"),
        (RecipeOptions(flats="²"), "--flats ² is not supported"),
        (RecipeOptions("svd", restarts=2), "--restarts cannot be used with --method svd"),
    ):
        with pytest.raises(KflatsError, match=message):
            recipe_of(asked, **uniform)


def test_the_papers_way(tiny: Path, tmp_path: Path) -> None:
    asked = ("--weights", "embeddings", "--method", "messi", "--flats", 2, "--restarts", 2, "--keep", "60%")
    done = run("compress", tiny, *asked, "--out", tmp_path / "small")
    assert done.exit_code == 0, done.output
    report = Report.load(tmp_path / "small")
    assert report.bytes_after <= 0.6 * report.bytes_before
    factored = [weight for weight in report.weights if not weight.dense]
    assert {(weight.method["k"], weight.method["restarts"]) for weight in factored} == {(2, 2)}
    assert {weight.importance["type"] for weight in factored} == {"Uniform"}


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("pooled", Projections(of="pooled")),
        pytest.param("logits", Projections(of="logits"), marks=pytest.mark.slow),
        pytest.param("sampled", SampledLabels(), marks=pytest.mark.slow),
    ],
)
def test_the_objective_can_be_named(name: str, objective: object, tiny: Path, texts: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.safetensors"
    folder = tiny
    if name != "pooled":
        folder = tmp_path / "model"
        config = transformers.AutoConfig.from_pretrained(tiny, num_labels=3)
        transformers.BertForSequenceClassification(config).save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    asked = ("--weights", "linear", "--keep", "60%", "--texts", texts, "--objective", name, "--statistics", kept)
    done = run("plan", folder, *asked, "--out", tmp_path / "plan.json")
    assert done.exit_code == 0, done.output
    assert Statistics.load(kept).objective == describe(objective)
    assert "--objective task cannot be used without --task" in refused(
        "plan", tiny, "--keep", "60%", "--objective", "task", "--out", tmp_path / "no.json"
    )


def test_options_of_methods_whose_error_is_no_square() -> None:
    uniform = {"counted": False}
    cases = {
        RecipeOptions("robust-svd", p=1): RobustSVD(p=1.0),
        RecipeOptions("robust-svd", p=0.5): RobustSVD(p=0.5),
        RecipeOptions("entrywise", p=1.5): Entrywise(p=1.5),
        RecipeOptions("l1"): Entrywise(),
        RecipeOptions("subspace", error="huber 0.5"): Subspace(Huber(0.5)),
        RecipeOptions("messi", 3, error="power 1"): MESSI(3, Power(1.0)),
    }
    for asked, method in cases.items():
        assert recipe_of(asked, **uniform) == Recipe(method, Uniform())
    assert recipe_of(RecipeOptions("flats", error="power 1"), **uniform) == Recipe(Flats(error=Power(1.0)), ZipfPrior())
    assert recipe_of(RecipeOptions(error="truncated 3 median"), counted=True) == Recipe(
        Flats(error=Truncated(3.0, "median")), TokenCounts()
    )
    assert recipe_of(RecipeOptions("robust-svd"), counted=False, measured=True) == Recipe(RobustSVD(), RowFisher())
    assert recipe_of(RecipeOptions(error="power 1"), counted=False, measured=True) == Recipe(
        Flats(error=Power(1.0)), RowFisher()
    )
    for asked, message in (
        (RecipeOptions(p=1.0), "--p cannot be used with the default method.*--method robust-svd"),
        (RecipeOptions("svd", p=1.0), "--p cannot be used with --method svd.*robust-svd or entrywise"),
        (RecipeOptions("entrywise", form="factors"), "--form cannot be used with --method entrywise"),
        (RecipeOptions("robust-svd", error="power 1"), "--error cannot be used.*flats or messi or subspace"),
        (RecipeOptions("robust-svd", p=0.0), "p=0.0 is not supported"),
        (RecipeOptions("entrywise", p=3.0), "p=3.0 is not supported"),
        (RecipeOptions("subspace", error="power"), "no loss is called 'power'"),
        (RecipeOptions("subspace", error="power 3"), "q=3"),
        (RecipeOptions("subspace", error="huber 1 inch"), "no unit 'inch'"),
        (RecipeOptions("subspace", error=""), "no loss is called ''"),
        (RecipeOptions("robust"), "no method is called 'robust'.*robust-svd"),
    ):
        with pytest.raises(KflatsError, match=message):
            recipe_of(asked, **uniform)


@pytest.mark.parametrize(
    ("options", "method"),
    [
        pytest.param(("--method", "robust-svd", "--p", "1"), RobustSVD(p=1.0), marks=pytest.mark.slow),
        pytest.param(("--method", "entrywise", "--p", "1"), Entrywise(p=1.0), marks=pytest.mark.slow),
        (("--method", "flats", "--flats", "2", "--error", "power 1"), Flats(k=2, error=Power(1.0))),
    ],
    ids=["robust-svd", "entrywise", "flats"],
)
def test_errors_that_are_no_squares_go_through_a_plan_file_into_a_folder(
    options: tuple[str, ...], method: object, tiny: Path, texts: Path, tmp_path: Path
) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    done = run("plan", tiny, *options, "--texts", texts, "--keep", "60%", "--out", plan)
    assert done.exit_code == 0, done.output
    assert Plan.load(plan).decisions[0].recipe == Recipe(method, TokenCounts())
    done = run("compress", tiny, "--plan", plan, "--texts", texts, "--out", out)
    assert done.exit_code == 0, done.output
    assert "own error" in done.stdout
    (weight,) = Report.load(out).weights
    assert from_json(weight.method) == method
    assert weight.own is not None
    assert 0 < weight.own.error <= weight.own.svd_error * 1.01
    for given in options[::2]:
        assert given.removeprefix("--") in refused(
            "compress", tiny, "--plan", plan, given, "1", "--out", tmp_path / "no"
        )
    assert run("compare", tiny, out, "--texts", texts).exit_code == 0


def test_what_is_measured_goes_with_svd() -> None:
    measured = {"counted": False, "measured": True}
    assert recipe_of(RecipeOptions(), **measured) is None
    assert recipe_of(RecipeOptions(importance="kronecker"), **measured) == Recipe(SVD(), KroneckerFisher())
    assert recipe_of(RecipeOptions("svd"), **measured) == Recipe(SVD(), KroneckerFisher())
    assert recipe_of(RecipeOptions(form="interpolative"), **measured) == Recipe(
        SVD(form="interpolative"), KroneckerFisher()
    )
    assert recipe_of(RecipeOptions(flats=3), **measured) == Recipe(Flats(k=3), RowFisher())
    assert recipe_of(RecipeOptions("flats", importance="input-gram", matrix_rows="out_features"), **measured) == Recipe(
        Flats(), InputGram(), matrix_rows="out_features"
    )
    assert recipe_of(RecipeOptions(importance="two-sided"), counted=True) == Recipe(SVD(), TwoSided())
    assert recipe_of(RecipeOptions("svd"), counted=True, tokens=False) == Recipe(SVD(), KroneckerFisher())
    assert recipe_of(RecipeOptions("messi"), counted=True, tokens=False) == Recipe(MESSI(), RowFisher())
    assert recipe_of(RecipeOptions("svd"), counted=True) == Recipe(SVD(), TokenCounts())
    for asked, message in ((RecipeOptions("flats", form="factors"), "--form cannot be used.*svd"),):
        with pytest.raises(KflatsError, match=message):
            recipe_of(asked, counted=False)


def test_a_share_may_be_written_in_per_cent() -> None:
    assert _share("98%") == _share(" .98 ") == 0.98
