"""``--quick`` of the experiments that write a table of one run: the whole command, and the numbers it must give."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("_results", reason="experiments/ is not here")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("sklearn")

PARTS = ("--parts", "parts")
WEIGHTS = Path(os.environ.get("KFLATS_WEIGHTS") or Path(__file__).resolve().parents[2] / "shared" / "weights")
TABLES: dict[str, tuple[str, ...]] = {
    "element_fisher": (),
    "robust_planted": PARTS,
    "robust_encoder": PARTS,
    "robust_networks": PARTS,
    "dictionaries": PARTS,
    "language_model": (),
    "vision": (),
    "convolutions": (),
    "experts": (),
    "sketched_ellipsoids": (),
    "loewner": (),
    "distortion": (),
    "entry_flats": (),
}
"""Scripts that write a table, and the folders that they need."""


@pytest.fixture
def run(tmp_path: Path, data_folder: Path, minilm: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def command(name: str, *words: str) -> None:
        if name in ("vision", "convolutions", "robust_networks", "language_model") and not WEIGHTS.is_dir():
            pytest.skip(f"no small networks in {WEIGHTS} (set KFLATS_WEIGHTS)")
        importlib.import_module(name).main(["--quick", *words])

    return command


@pytest.mark.slow
@pytest.mark.filterwarnings("default::kflats.common.errors.KflatsWarning")
@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_written(name: str, run: Any) -> None:
    run(name, *TABLES[name], "--write", ".")
    written = "robust_embeddings" if name == "robust_encoder" else name
    page = Path(f"{written}.md").read_text(encoding="utf-8")
    assert "| --- |" in page
    assert "nan" not in page
    assert json.loads(Path(f"{written}.json").read_text(encoding="utf-8"))["command"].startswith("python experiments/")


def test_every_command_of_the_page_can_be_tried_quickly(repository: Path) -> None:
    """All scripts have ``--quick``, and all are tried in the sweep."""
    tried = (repository / "tests" / "test_quick.py").read_text(encoding="utf-8")
    for script in sorted((repository / "experiments").glob("[a-z]*.py")):
        if script.stem not in (*TABLES, "reproduction", "train_small"):
            assert f"{script.stem}.main" in tried, f"{script.name} is not tried with --quick"
