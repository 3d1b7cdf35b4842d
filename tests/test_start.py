"""What starts without torch: the package, help, and every refusal of arguments."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kflats
from kflats import codecs, importance, methods
from kflats.cli import options as names
from kflats.common.errors import KflatsError
from kflats.numerics import loss

HEAVY = ("torch", "transformers", "numpy", "safetensors.torch", "tokenizers", "matplotlib")
COMPRESS = ["compress", "model", "--out", "small"]
KEEP = [*COMPRESS, "--keep", "50%"]
PLAN = ["plan", "model", "--keep", "50%", "--out", "plan.json"]
REFUSED: list[tuple[list[str], str]] = [
    (["plan", "model", "--out", "plan.json"], "no budget is given"),
    (["plan", "model", "--quality", "0.9", "--out", "plan.json"], "--quality cannot be used with kflats plan"),
    ([*COMPRESS, "--quality", "1"], "a quality of 1.0 is not supported"),
    ([*COMPRESS, "--quality", "0.9", "--size", "8MB"], "a quality beside a size"),
    ([*COMPRESS, "--size", "0.6"], "not a budget"),
    ([*COMPRESS, "--size", "8 MBytes"], "not a budget"),
    ([*COMPRESS, "--size", "-8MB"], "keeps nothing"),
    ([*COMPRESS, "--size", "33% ranks"], "share of ranks"),
    ([*COMPRESS, "--keep", "300%"], "more than the original"),
    ([*COMPRESS, "--keep", "2 bits"], "bits a number"),
    ([*KEEP, "--size", "8MB"], "are both given"),
    ([*KEEP, "--method", "magic"], "no method is called 'magic'"),
    ([*KEEP, "--method", ""], "no method is called ''"),
    ([*KEEP, "--importance", "magic"], "no importance is called 'magic'"),
    ([*KEEP, "--codec", "trasnform"], "no codec is called 'trasnform'"),
    ([*KEEP, "--error", "hubber 1"], "no loss is called"),
    ([*KEEP, "--method", "svd", "--flats", "3"], "--flats cannot be used with --method svd"),
    ([*KEEP, "--flats", "3", "--form", "factors"], "--form cannot be used with the default method"),
    ([*KEEP, "--p", "1"], "--p cannot be used"),
    ([*KEEP, "--method", "auto", "--codec", "int8"], "--codec cannot be used with --method auto"),
    ([*KEEP, "--importance", "kronecker", "--power", "1"], "--power cannot be used"),
    ([*KEEP, "--importance", "zipf", "--texts", "texts.txt"], "--texts cannot be used with --importance zipf"),
    ([*KEEP, "--flats", "many"], "--flats many is not supported"),
    ([*KEEP, "--method", "kmeans-svd", "--flats", "search"], "--flats search cannot be used"),
    ([*KEEP, "--restarts", "0"], "'--restarts'"),
    ([*KEEP, "--objective", "task"], "--objective task cannot be used without --task"),
    ([*KEEP, "--seed", "-1"], "'--seed'"),
    ([*KEEP, "--samples", "0"], "'--samples'"),
    ([*KEEP, "--allocation", "best"], "'--allocation'"),
    ([*KEEP, "--unknown"], "No such option"),
    ([*KEEP, "--task", "nothing"], "there is no task"),
    ([*KEEP, "--task-data", "."], "--task-data cannot be used without --task"),
    ([*KEEP, "--texts", "none.txt"], "cannot be read"),
    ([*KEEP, "--texts", "empty.txt"], "has no text"),
    ([*KEEP, "--texts", "binary"], "texts that can be read"),
    ([*COMPRESS, "--plan", "none.json"], "does not exist"),
    ([*COMPRESS, "--plan", "texts.txt", "--flats", "2"], "--plan cannot be used with --flats"),
    (["compress", "./none", "--keep", "50%", "--out", "small"], "there is no folder"),
    (["compress", "texts.txt", "--keep", "50%", "--out", "small"], "is a file"),
    (["compress", "empty", "--keep", "50%", "--out", "small"], "holds no model"),
    (["compress", "model", "--keep", "50%", "--out", "model/small"], "lies inside the original"),
    (["compress", "model", "--keep", "50%", "--out", "empty"], "exists already"),
    (["compress", "model", "--keep", "50%", "--out", "texts.txt/small"], "not a directory"),
    (["plan", "model", "--keep", "50%", "--out", "texts.txt"], "exists already"),
    ([*PLAN, "--method", "svd", "--error", "power 1"], "--error cannot be used"),
    (["trim", "model", "--keep", "9", "--out", "empty"], "exists already"),
    (["trim", "model", "--keep", "many", "--out", "small"], "'--keep'"),
    (["compare", "model", "none"], "there is no folder"),
    (["evaluate", "model", "--task", "nothing"], "there is no task"),
    (["recover", "model", "--task", "nothing", "--out", "small"], "there is no task"),
    (["export", "model", "--out", "small"], "give one of --dense and --onnx"),
    (["export", "model", "--out", "small", "--dense", "--pooled"], "--pooled cannot be used with --dense"),
    (["export", "model", "--out", "empty", "--dense"], "exists already"),
    (["inspect", "empty"], "holds no model"),
    (["nothing"], "No such command"),
]
HELP = [["--help"], ["--version"], ["compress", "--help"], ["plan", "--help"], ["recover", "--help"]]

PROGRAM = f"""
import json, sys
from typer.testing import CliRunner
from kflats.cli.app import app
answers = []
for arguments in json.load(sys.stdin):
    result = CliRunner().invoke(app, arguments)
    loaded = [name for name in {HEAVY!r} if name in sys.modules]
    defect = "" if isinstance(result.exception, SystemExit | None) else repr(result.exception)
    answers.append([result.exit_code, " ".join(result.output.split()), loaded, defect])
json.dump(answers, sys.stdout)
"""


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder that looks like a model as long as nobody loads it, texts, and an empty folder."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts.txt").write_text("the word\n")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "binary").write_bytes(b"a\0b")
    return tmp_path


def answers(cases: list[list[str]], desk: Path) -> list[tuple[int, str, list[str], str]]:
    """Exit code, output, heavy modules that are imported, and the defect, of each command line, in one new process."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "500"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(cases), capture_output=True, text=True, timeout=120, env=environment, cwd=desk,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return [tuple(answer) for answer in json.loads(run.stdout)]


def test_refusals_of_arguments_need_no_torch(desk: Path) -> None:
    before = sorted(desk.rglob("*"))
    for (arguments, message), (code, output, loaded, defect) in zip(
        REFUSED, answers([case for case, _ in REFUSED], desk), strict=True
    ):
        assert (code, loaded, defect) == (2, [], ""), (arguments, output)
        assert message in output, arguments
    assert sorted(desk.rglob("*")) == before


def test_help_needs_no_torch(desk: Path) -> None:
    for arguments, (code, output, loaded, _) in zip(HELP, answers(HELP, desk), strict=True):
        assert (code, loaded) == (0, []), arguments
        assert len(output) > 10


@pytest.mark.slow
def test_what_loads_a_model_is_noticed(desk: Path) -> None:
    """The two tests above could fail."""
    ((code, output, loaded, _),) = answers([["inspect", "model"]], desk)
    assert code == 2, output
    assert "torch" in loaded


def test_the_tables_of_names_are_those_of_the_registries() -> None:
    assert set(names.METHODS) == set(methods.METHODS.names)
    assert set(names.IMPORTANCES) == set(importance.IMPORTANCES.names)
    assert set(names.CODECS) == set(codecs.CODECS.names)
    assert set(names.TYPES) == set(codecs.protocol.DTYPES)
    for option, able in names.TAKE.items():
        field = "k" if option == "flats" else option
        assert {n for n in names.METHODS if field in methods.METHODS.options(n)} - {"l1"} == set(able), option
    for name in names.SEARCHED:
        methods.from_name(name, k=None)
    taking = {name for name in names.IMPORTANCES if "power" in importance.IMPORTANCES.options(name)}
    assert taking == set(names.TAKE_POWER)
    values = {name: importance.from_name(name) for name in names.IMPORTANCES}
    assert {name for name, one in values.items() if not (one.needs or one.needs_texts)} == set(names.NO_DATA)
    for name in names.LOSSES:
        loss.from_name(name if name == "squared" else f"{name} 1")
    with pytest.raises(KflatsError, match=", ".join(names.LOSSES)):
        names.known("loss", names.LOSSES, "cubed")


@pytest.mark.parametrize("package", ["kflats", "kflats.io"])
def test_packages_import_their_names_when_they_are_used(package: str) -> None:
    module = importlib.import_module(package)
    stub = Path(str(module.__file__)).with_suffix(".pyi")
    for name in module.__all__:
        value = getattr(module, name)
        assert value is getattr(importlib.import_module(package), name)
        # A module of that name would take the place of the value once something imports it.
        assert importlib.util.find_spec(f"{package}.{name}") is None
    assert set(module.__all__) <= set(dir(module))
    assert "__all__" not in stub.read_text() or _listed(stub) == sorted(module.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = module.nothing


def _listed(stub: Path) -> list[str]:
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    return []


def test_the_package_runs_as_a_module_and_knows_its_version() -> None:
    command = [sys.executable, "-m", "kflats", "--version"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.stdout, done.stderr) == (f"kflats {kflats.__version__}\n", "")


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = f"import sys, kflats; print([name for name in {HEAVY!r} if name in sys.modules])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
