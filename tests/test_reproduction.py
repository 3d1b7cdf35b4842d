"""The page of what the papers claim is what the logs say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("reproduction", reason="experiments/ is not here")
pytest.importorskip("scipy")
pytest.importorskip("transformers")

import reproduction
from _runs import Log


def test_the_page_is_what_the_logs_say(repository: Path) -> None:
    assert (repository / "docs" / "reproduction.md").read_text(encoding="utf-8") == reproduction.page()


def test_without_logs_nothing_is_claimed_of_runs(tmp_path: Path) -> None:
    page = reproduction.page(tmp_path)
    assert page.count("not run") > 15
    for claims in (reproduction.MESSI, reproduction.HSU, reproduction.SUM):
        for claim in claims:
            if not isinstance(claim.ours, str):
                assert claim.ours(tmp_path) == "not run"


@pytest.mark.parametrize(
    "log", sorted((Path(__file__).parents[1] / "experiments" / "results").glob("*.jsonl")), ids=str
)
def test_committed_runs_come_from_commits_and_can_be_read(log: Path) -> None:
    runs = Log(log).runs
    assert runs
    for run in runs:
        assert "dirty" not in run.commit
        assert run.commit != "unknown"
        assert json.dumps(run.more)
    assert (log.with_suffix(".md")).is_file(), "the table that the log gives"
