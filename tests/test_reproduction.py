"""The page of what the papers claim is what the logs say."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reproduction", reason="experiments/ is not here")
pytest.importorskip("scipy")
pytest.importorskip("transformers")

import _hidden_layers
import fwsvd_groups
import fwsvd_tasks
import messi_epochs
import messi_same_size
import messi_search
import messi_tasks
import messi_variants
import reproduction
import robust_scores
from _claims import time_on_gpu
from _runs import Log, asked_for

from kflats import RowFisher, TaskLoss


def test_the_page_is_what_the_logs_say(repository: Path) -> None:
    assert (repository / "docs" / "reproduction.md").read_text(encoding="utf-8") == reproduction.page()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_commands_are_lines_of_a_shell() -> None:
    commands = [claim.command for _, claims, _ in reproduction.PAPERS for claim in claims]
    subprocess.run(["bash", "-n", "-c", "\n".join(commands)], check=True)


COMMANDS = sorted(
    {
        part.partition("#")[0].strip()
        for _, claims, _ in reproduction.PAPERS
        for claim in claims
        for part in claim.command.split(";")
        if part.partition("#")[0].strip().endswith("--resume")
    }
)
"""Those whose runs are logged."""
ELSEWHERE = ("FOLDER", "-uncased", "roberta")
"""In commands that write elsewhere, or want models of the hub."""


@pytest.mark.slow
@pytest.mark.parametrize("command", [one for one in COMMANDS if not any(word in one for word in ELSEWHERE)])
def test_commands_of_claims_make_the_committed_pages(
    command: str, repository: Path, tmp_path: Path, minilm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or pages of their own; none would replace the page of another."""
    script = shlex.split(command)[1]
    results = shutil.copytree(repository / "experiments" / "results", tmp_path / "results")
    before = {path.name: path.read_text(encoding="utf-8") for path in results.glob("*.md")}
    monkeypatch.setattr("sys.argv", [script])
    folders = ["--tables", "--results", str(results), "--models", str(tmp_path / "models")]
    importlib.import_module(Path(script).stem).main([*shlex.split(command)[2:], *folders])
    after = {path.name: path.read_text(encoding="utf-8") for path in results.glob("*.md")}
    assert {name: after[name] for name in before} == before


def test_without_logs_nothing_is_claimed_of_runs(tmp_path: Path) -> None:
    page = reproduction.page(tmp_path)
    assert page.count("not run") > 15
    for claims in (reproduction.MESSI, reproduction.HSU, reproduction.SUM):
        for claim in claims:
            if not isinstance(claim.ours, str):
                assert claim.ours(tmp_path) == "not run"


NUMBERED = {
    "MESSI": {"figure": [*range(1, 17)], "table": [1, 2, 3]},
    "FWSVD": {"figure": [*range(1, 10)], "table": [1, 2, 3, 4], "equation": [5, 6]},
    "Robust SVD": {
        "figure": [1, 2, 3, "A1"],
        "table": [1, 2, 3],
        "algorithm": [1, "A1"],
        "definition": [1],
        "theorem": [2, 5, 6, 7],
        "claim": [3],
        "lemma": [4],
        "remark": [8],
    },
}
"""What the papers number."""


def named(text: str) -> set[tuple[str, str]]:
    """Figures, tables and statements that a text names: "figures 2 to 4, 6a" are five."""
    found = set()
    for kind, numbers in re.findall(r"([a-z]+?)s? ((?:A?\d+[ab]?(?:, | and | to |\b))+)", text):
        for first, last in re.findall(r"(A?\d+)[ab]?(?: to (\d+))?", numbers):
            found |= {(kind, first)} if not last else {(kind, str(n)) for n in range(int(first), int(last) + 1)}
    return found


@pytest.mark.parametrize("paper", NUMBERED)
def test_all_that_a_paper_numbers_has_a_row_or_is_said_to_claim_nothing(paper: str) -> None:
    (claims, none) = next((claims, none) for title, claims, none in reproduction.PAPERS if title.startswith(paper))
    there = set().union(named(none), *(named(claim.where) for claim in claims))
    wanted = {(kind, str(number)) for kind, numbers in NUMBERED[paper].items() for number in numbers}
    assert wanted - there == set()


def test_tests_that_the_page_names_exist(repository: Path) -> None:
    commands = [claim.command for _, claims, _ in reproduction.PAPERS for claim in claims if "pytest" in claim.command]
    assert commands
    for command in commands:
        path, words = re.fullmatch(r"python -m pytest (\S+) -k (\w+)", command).groups()  # type: ignore[union-attr]
        assert re.search(rf"^def test_\w*{words}", (repository / path).read_text(encoding="utf-8"), re.M), command


@pytest.mark.parametrize(
    "log", sorted((Path(__file__).parents[1] / "experiments" / "results").glob("*.jsonl")), ids=str
)
def test_committed_runs_come_from_commits_and_can_be_read(log: Path) -> None:
    runs = Log(log).runs
    assert runs
    for run in runs:
        assert run.key == run.key_of_content, "--resume finds it by what the line says"
        assert "dirty" not in run.commit
        assert run.commit != "unknown"
        assert json.dumps(run.more)
    assert (log.with_suffix(".md")).is_file(), "the table that the log gives"


RECIPES: dict[str, Callable[[], dict[str, Any]]] = {
    "fwsvd_groups": lambda: fwsvd_groups.Groups(asked_for(None, "", fwsvd_groups.OWN, argv=[])).recipes,
    "fwsvd_tasks": lambda: fwsvd_tasks.Factorized(asked_for(None, "", fwsvd_tasks.OWN, argv=[])).recipes,
    "messi_epochs": lambda: {
        by.name: by.decides for by in messi_epochs.Epochs(asked_for(None, "mrpc", messi_epochs.OWN, argv=[])).ways
    },
    "messi_lenet": lambda: {name: of for name, (_, of, _) in _hidden_layers.methods([2, 3, 4, 5], 10).items()},
    "messi_same_size": lambda: dict.fromkeys(
        ("MESSI, k = 7, j = 125", messi_same_size.NOISE),
        messi_same_size.SameSize(asked_for(None, "", messi_same_size.OWN, argv=[])).recipe,
    ),
    "messi_search": lambda: {
        **dict.fromkeys(
            messi_search.METHODS.values(), messi_search.Search(asked_for(None, "", messi_search.OWN, argv=[])).recipe
        ),
        "SVD": messi_tasks.way(1, 1).decides,
    },
    "messi_tasks": lambda: {
        by.name: by.decides for by in (*(messi_tasks.way(k, 10) for k in (1, 2, 3, 5, 10)), messi_tasks.DEFAULT)
    },
    "messi_variants": lambda: {by.name: by.decides for by in messi_variants.ways(5, 10)},
    "robust_scores": lambda: {name: {"method": name} for name in robust_scores.METHODS},
}
RECIPES["messi_vgg"] = RECIPES["messi_lenet"]
"""The recipe of each method as today's command writes it, by log."""


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_of_committed_runs_are_those_of_the_commands(name: str, repository: Path, minilm: Path) -> None:
    recipes = RECIPES[name]()
    log = Log(repository / "experiments" / "results" / f"{name}.jsonl")
    assert [run.method for run in log.runs if run.recipe != recipes[run.method]] == []


def test_times_on_a_gpu_are_those_of_the_logs(repository: Path) -> None:
    page = (repository / "experiments" / "README.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(\w+)\.py` \|.*\| ([^|]+) \|$", page.split("## Tables of one run")[0], re.M))
    assert set(told) >= set(RECIPES)
    assert told == {name: time_on_gpu(repository / "experiments" / "results", name) for name in told}
    assert told["messi_tasks"] != "not measured"


def test_a_key_holds_importance_objective_and_allocation() -> None:
    ways = [fwsvd_tasks.WAYS[name] for name in ("kflats", fwsvd_tasks.DEFAULT)]
    recipes = [way.decides(way.objective, 512) for way in ways]
    recipes += [replace(ways[0], allocation="uniform").decides(ways[0].objective, 512), ways[0].decides(TaskLoss(), 64)]
    recipes.append(replace(ways[0], importance=RowFisher()).decides(ways[0].objective, 512))
    assert len({json.dumps(recipe) for recipe in recipes}) == 5
