"""The demo, whole, on the real model, with every way to the network blocked."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kflats import demo as demo_module
from kflats.common.errors import KflatsError
from kflats.demo import packaged_model
from kflats.evaluation.outputs import weight_file_bytes
from kflats.report.report import Report

OFFLINE = """
import socket, sys
def refuse(*a, **k): raise AssertionError(f"the demo used the network: {a}")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse
sys.argv = ["kflats", "demo", "--out", sys.argv[1]]
from kflats.cli.app import main
main()
"""


def figures(pattern: str, text: str) -> list[float]:
    line = re.search(pattern, text, re.MULTILINE)
    assert line is not None, pattern
    return [float(figure) for figure in line.groups()]


@pytest.mark.slow
def test_the_demo_runs_offline(tmp_path: Path, minilm: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=900,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    report = Report.load(out)
    assert 0.99 * 8e6 <= weight_file_bytes(out) <= 8e6
    assert report.proof is not None
    page = (out / "report" / "report.html").read_text(encoding="utf-8")
    assert "embeddings.word_embeddings" in page.replace("<wbr>", "").replace("\u200b", "")
    assert list((out / "report").glob("*.png"))
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "outputs compared" in card
    assert "Not measured yet" not in card
    versions = {
        name: [
            float(v) for v in re.search(rf"^{re.escape(name)} .*?%((?:\s+\d\.\d+){{4}})", done.stdout, re.M)[1].split()
        ]
        for name in (
            "original, float32",
            "bfloat16",
            "8 bits a number",
            "4 bits a number, groups of 64",
            "kflats --size 8MB",
        )
    }
    assert versions["original, float32"] == [1.0] * 4
    assert min(versions["8 bits a number"]) > 0.99
    assert min(versions["kflats --size 8MB"]) > 0.85
    tables = {
        name: figures(rf"^{name}.*?\s([\d.]+)\s+([\d.]+)$", done.stdout)
        for name in ("SVD", "MESSI, k = 5", "kflats: flats with token counts")
    }
    assert tables["SVD"] < tables["MESSI, k = 5"] < tables["kflats: flats with token counts"]


@pytest.mark.slow
def test_the_model_is_found_without_importing_its_package(minilm: Path) -> None:
    assert packaged_model() == minilm
    program = "import sys; from kflats import demo; demo.packaged_model(); print(demo.PACKAGE in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_a_missing_model_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KflatsError, match=r"kflats\[demo\]"):
        demo_module.demo(tmp_path / "out")
