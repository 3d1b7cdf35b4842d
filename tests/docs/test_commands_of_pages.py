"""The commands that pages name exist: their scripts, and their options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("experiments/README.md")),
    *sorted(ROOT.glob("*/results/*.md")),
]
COMMAND = re.compile(r"python ((?:experiments|benchmarks)/\w+\.py)([^`\n#;(|]*)")


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Scripts of a page and the options that they are given."""
    return [(script, re.findall(r"--([\w-]+)", rest)) for script, rest in COMMAND.findall(page.read_text("utf-8"))]


def unknown(script: str, options: list[str]) -> list[str]:
    """The options that neither the script nor what it shares with others declares."""
    path = ROOT / script
    if not path.is_file():
        return [script]
    text = "\n".join(one.read_text("utf-8") for one in (path, *sorted(path.parent.glob("_*.py"))))
    return [
        option for option in options if not re.search(rf"""["']-?-?{option}["']|\b{option.replace("-", "_")}=""", text)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_pages_exist(page: Path) -> None:
    if not (ROOT / "experiments").is_dir() or not (ROOT / "benchmarks").is_dir():
        pytest.skip("a package without experiments and benchmarks")
    assert [(script, missing) for script, options in commands(page) if (missing := unknown(script, options))] == []


def test_a_renamed_option_would_be_found() -> None:
    assert unknown("experiments/language_model.py", ["keeps", "budgets"]) == ["budgets"]
    assert unknown("benchmarks/gone.py", []) == ["benchmarks/gone.py"]
    assert sum(len(commands(page)) for page in PAGES) > 100
