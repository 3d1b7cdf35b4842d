"""README and docs tell the truth: their Python runs, their commands and options exist, their links lead somewhere."""

from __future__ import annotations

import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kflats.cli.app import app
from kflats.common.texts import packaged_texts
from kflats.demo import PACKAGE, packaged_model

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(p for p in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
BLOCK = re.compile(r"^(?P<skip><!-- no-run -->\n+)?```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S)
LINK = re.compile(r"(?<!`)\[[^\]\n]*\]\((?!https?:|mailto:|#)([^)\s#]+)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and whether the page says that it is not for running."""

    page: str
    line: int
    language: str
    text: str
    skip: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        yield Block(page.name, line, match["language"], match["text"], match["skip"] is not None)


EVERY = [block for page in PAGES for block in blocks(page)]
RUNNABLE = [block for block in EVERY if block.language == "python" and not block.skip]


def lines_of_shell() -> list[tuple[str, str]]:
    """(where, command) of every line that starts with kflats or make, in a shell block or an indented one."""
    found = [(str(b), line) for b in EVERY if b.language in ("sh", "bash", "shell", "") for line in b.text.splitlines()]
    for page in PAGES:
        text = BLOCK.sub("", page.read_text(encoding="utf-8"))
        found += [(page.name, line) for line in text.splitlines() if line.startswith("    ")]
    commands = [(where, line.strip().removeprefix("$ ").split("  #")[0].strip()) for where, line in found]
    return [(where, line) for where, line in commands if re.match(r"(kflats|make) [a-z-]", line)]


@cache
def help_of(command: str) -> str:
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("block", RUNNABLE, ids=str)
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block stands alone: a reader copies one, not the page. What is the reader's own is a small real model."""
    monkeypatch.chdir(tmp_path)
    own: dict[str, object] = {}
    if re.search(r"\(name\)", block.text):
        pytest.importorskip("transformers")
        pytest.importorskip(PACKAGE)
        own = {"name": str(packaged_model()), "texts": packaged_texts("count")}
    code = compile("\n" * (block.line - 1) + block.text, block.page, "exec")
    exec(code, {"__name__": "__main__", **own})  # noqa: S102  the project's own text


@pytest.mark.parametrize(("where", "line"), lines_of_shell())
def test_commands_exist(where: str, line: str) -> None:
    words = shlex.split(line)
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
        assert {word for word in words[1:] if "=" not in word} <= set(targets), line
        return
    known = help_of(words[1])
    for word in words[2:]:
        for option in re.findall(r"--[a-z][a-z0-9-]+", word):
            assert re.search(rf"{option}\b", known), f"{where}: {words[1]} has no {option}"


def test_every_option_is_documented() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    for command in app.registered_commands:
        assert command.callback is not None
        for option in re.findall(r"--[a-z][a-z0-9-]+", help_of(command.callback.__name__)):
            assert option == "--help" or re.search(rf"{option}\b(?!-)", text), f"{command.callback.__name__} {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    missing = [target for target in LINK.findall(text) if not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_a_page_names_exist(page: Path) -> None:
    roots = [ROOT, ROOT / "src", ROOT / "src" / "kflats", ROOT / "benchmarks", ROOT / "experiments"]
    named = re.findall(r"`([a-z_/]+\.py)`", page.read_text(encoding="utf-8").partition("### Renamed")[0])
    assert [name for name in named if not any((root / name).is_file() for root in roots)] == []


def test_extras_and_oldest_versions_are_those_of_the_metadata() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\w+)` \|", index, re.M)
    assert set(named) == set(extras)
    ranges = [f"Python{project['requires-python']}", *project["dependencies"], *extras["hf"]]
    oldest = dict(one.split(">=") for one in ranges)
    wanted = ", ".join(f"{name} {oldest[name]}" for name in ("Python", "torch", "transformers"))
    for page in (index, (ROOT / "README.md").read_text(encoding="utf-8")):
        assert f"{wanted}, or newer" in page


def test_something_is_tested() -> None:
    assert {"README.md", "index.md", "budget.md"} <= {page.name for page in PAGES}
    assert len(RUNNABLE) >= 6
    assert len(lines_of_shell()) >= 6


LONG = {"distill.py", "fine_tune.py", "compress_embeddings.py"}
EXAMPLES = [
    pytest.param(path, id=path.name, marks=[pytest.mark.slow] * (path.name in LONG))
    for path in sorted((ROOT / "examples").glob("*.py"))
]


@pytest.mark.parametrize("script", EXAMPLES)
def test_examples_run(
    script: Path, tmp_path: Path, minilm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every example runs by itself in an empty folder, and says something; warnings are errors here too."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()
