"""What the command line cannot do: one message with a cause or a way on, exit status 2, and nothing left behind."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kflats.cli.app import app
from kflats.common.errors import KflatsError
from kflats.evaluation.outputs import weight_file_bytes
from kflats.io.atomic import explained
from kflats.report.report import Report

pytest.importorskip("transformers")


@pytest.fixture
def desk(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user works: a model, texts, a file and a folder of something else."""
    shutil.copytree(tiny_folder, tmp_path / "model")
    (tmp_path / "texts.txt").write_text("the word\nanother word\n" * 4, encoding="utf-8")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "own.onnx").write_text("mine")
    (tmp_path / "link").symlink_to("model")
    Report("m", "60%", (), 10, 10, 0, "1").save(tmp_path / "model" / "report.json")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def refused(desk: Path, *arguments: str) -> str:
    before = contents(desk)
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2, result.output
    assert contents(desk) == before
    return " ".join(result.stderr.replace("│", " ").split())


COMPRESS = ("compress", "model", "--keep", "50%")
PLAN = ("plan", "model", "--keep", "50%")
MEASURED = (*PLAN, "--method", "svd", "--texts", "texts.txt", "--out", "plan.json", "--statistics")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*PLAN, "--out", "other", "--force"), "other is a folder. Try: the name of a file"),
        ((*PLAN, "--out", "."), "is a folder"),
        ((*PLAN, "--out", "file"), "exists already. Try: another name, or --force"),
        ((*PLAN, "--out", "file/plan.json"), "Likely cause: not a directory, at"),
        ((*COMPRESS, "--out", "file/small"), "Likely cause: not a directory, at"),
        ((*PLAN, "--out", "file", "--force"), "exists and is not replaced"),
        ((*COMPRESS, "--out", "model", "--force"), "is the original, so it is not replaced"),
        ((*COMPRESS, "--out", "link", "--force"), "is the original, so it is not replaced"),
        ((*COMPRESS, "--out", ".", "--force"), "holds the original, model, so it is not replaced"),
        ((*COMPRESS, "--out", "model/small"), "lies inside the original"),
        (("trim", "model", "--keep", "50", "--out", "link", "--force"), "is the original"),
        (("export", "model", "--dense", "--out", "link", "--force"), "is the original"),
        (("export", "model", "--onnx", "--out", "own.onnx", "--force"), "exists and is not replaced"),
        (("export", "model", "--onnx", "--out", "link", "--force"), "is the original"),
        (("recover", "model", "--task", "sst2", "--out", "link", "--force"), "is the original"),
        (("recover", "other", "--task", "sst2", "--out", "link", "--force"), "holds no model"),
        (("report", "model/report.json", "--out", "other"), "holds more than a report: thesis.txt"),
        ((*COMPRESS, "--out", "file", "--force"), "exists and is not a folder"),
        ((*COMPRESS, "--out", "other", "--force"), "is not replaced: thesis.txt (no manifest lists it)"),
        ((*MEASURED, "file/statistics"), "not a directory"),
        ((*MEASURED, "other"), "cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[3:]),
)
def test_places_that_cannot_be_written_are_told_of_before_any_work(
    arguments: tuple[str, ...], said: str, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kflats.compress.pipeline.load_model", lambda folder: pytest.fail("must be refused before"))
    assert said in refused(desk, *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--method", ""), "no method is called ''. Try: one of"),
        (("--codec", "trasnform"), "no codec is called 'trasnform'. Try: one of"),
        (("--codec", "integer four"), "a codec takes a name and whole numbers"),
        (("--seed", "-1"), "Invalid value for '--seed'"),
        (("--seed", "9" * 30), "Invalid value for '--seed'"),
    ],
)
def test_options_that_mean_nothing(arguments: tuple[str, ...], said: str, desk: Path) -> None:
    assert said in refused(desk, *COMPRESS, "--out", "small", *arguments)


def test_numbers_of_the_other_commands(desk: Path) -> None:
    assert "'--max-length'" in refused(desk, "evaluate", "model", "--task", "cola", "--max-length", "0")


@pytest.mark.parametrize(
    "command", [("inspect",), ("export", "--dense", "--out", "o"), ("trim", "--keep", "9", "--out", "o")]
)
def test_a_config_of_other_types_is_a_damaged_folder(command: tuple[str, ...], desk: Path) -> None:
    path = desk / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": "many"}))
    said = refused(desk, command[0], "model", *command[1:])
    assert "cannot be loaded" in said
    assert "Likely cause: a damaged folder" in said


def test_a_plan_whose_shares_were_raised_above_its_file(desk: Path) -> None:
    nbytes = weight_file_bytes(desk / "model")
    asked = ("--size", f"{int(0.7 * nbytes)}B", "--method", "svd", "--weights", "all")
    done = CliRunner().invoke(app, ["plan", "model", *asked, "--out", "plan.json", "--quiet"])
    assert done.exit_code == 0, done.output
    plan = json.loads((desk / "plan.json").read_text())
    for decision in plan["decisions"]:
        decision["budget_bytes"] = decision["weight"]["nbytes"]
    (desk / "plan.json").write_text(json.dumps(plan))
    said = refused(desk, "compress", "model", "--plan", "plan.json", "--out", "small")
    assert "Likely cause: a plan that was edited by hand" in said
    assert "make the plan again: kflats plan" in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            PermissionError(errno.EACCES, "denied", "/locked/.small.new"),
            r"small cannot be written.*permission denied, at /locked",
        ),
        (OSError(errno.EROFS, "read-only", "/locked/.small.new"), r"small cannot be written.*read-only"),
        (OSError(errno.ENOSPC, "full"), "no space left on device, at /locked/small.*free some space"),
        (
            FileNotFoundError(errno.ENOENT, "none", "/locked"),
            r"small cannot be written.*no such file or directory, at /locked",
        ),
    ],
)
def test_what_the_system_refuses_is_explained(error: OSError, said: str) -> None:
    with pytest.raises(KflatsError, match=said) as caught, explained(Path("/locked/small")):
        raise error
    assert caught.value.hint


def test_what_has_another_cause_is_not_explained_away() -> None:
    for error in (FileNotFoundError(errno.ENOENT, "none", "/elsewhere/read.txt"), OSError(errno.EIO, "input/output")):
        with pytest.raises(type(error)), explained(Path("/locked/small")):
            raise error
