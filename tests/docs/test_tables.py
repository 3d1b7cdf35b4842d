"""Numbers in tables of README and docs are those of the results that a command wrote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = re.compile(
    r"^\| .*\n\| ---.*\n(?P<rows>(?:\|.*\n)+)\n"
    r"    python \S+.*# (?P<results>(?:benchmarks|experiments)/results/\w+\.md)",
    re.M,
)
"""A table, and below it the command that made it with the file of its results."""
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def rows_of(page: Path) -> list[tuple[str, str]]:
    """Each row of each such table, and its file of results."""
    found = TABLE.finditer(page.read_text(encoding="utf-8"))
    return [(row, match["results"]) for match in found for row in match["rows"].splitlines()]


ROWS = [one for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) for one in rows_of(page)]


def values(line: str) -> list[str]:
    """The numbers of all cells but the first, which is a name."""
    return NUMBER.findall(" ".join(line.split("|")[2:]))


def is_in(row: str, results: str) -> bool:
    """Whether one line has all numbers of the row, in any order."""
    wanted = values(row)
    lines = (ROOT / results).read_text(encoding="utf-8").splitlines()
    return any(all(values(line).count(value) >= wanted.count(value) for value in wanted) for line in lines)


@pytest.mark.parametrize("results", sorted({results for _, results in ROWS}))
def test_rows_are_those_of_the_results(results: str) -> None:
    assert [row for row, of in ROWS if of == results and not is_in(row, results)] == []


def test_tables_are_found_and_another_number_is_noticed() -> None:
    assert {"benchmarks/results/whole_model.md", "benchmarks/results/latency.md"} <= {of for _, of in ROWS}
    row, results = ROWS[0]
    *others, last = row.rsplit("|", 2)[:2]
    assert is_in(row, results)
    assert not is_in(f"{'|'.join(others)}|{last} 0.12345 |", results)
