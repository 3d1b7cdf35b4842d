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
from kflats.demo.comparison import QUERIES, Line
from kflats.demo.ways import in_torch
from kflats.evaluation.latency import Latency
from kflats.evaluation.outputs import Fidelity, weight_file_bytes
from kflats.report.report import Report

OFFLINE = """
import socket, sys
def refuse(*a, **k): raise AssertionError(f"the demo used the network: {a}")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse
sys.argv = ["kflats", "demo", "--sizes", "8MB", "--out", sys.argv[1]]
from kflats.cli.app import main
main()
"""


def cosines(pattern: str, text: str) -> list[float]:
    line = re.search(pattern, text, re.MULTILINE)
    assert line is not None, pattern
    return [float(figure) for figure in line[1].split()]


@pytest.mark.slow
def test_the_demo_runs_offline(tmp_path: Path, minilm: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    check_demo([sys.executable, "-c", OFFLINE, str(tmp_path / "out")], tmp_path / "out", environment)


@pytest.mark.slow
def test_two_workers_show_the_same(tmp_path: Path, minilm: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "kflats", "demo", "--sizes", "8MB", "--workers", "2", "--out", str(out)]
    check_demo(command, out, os.environ | {"OMP_NUM_THREADS": "1"})


def check_demo(command: list[str], out: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr
    report = Report.load(out / "8MB")
    assert 0.99 * 8e6 <= weight_file_bytes(out / "8MB") <= 8e6
    assert sum(one.bytes_after for one in report.weights) < 8e6
    page = (out / "report" / "report.html").read_text(encoding="utf-8")
    assert "embeddings.word_embeddings" in page.replace("<wbr>", "").replace("\u200b", "")
    assert (out / "sizes.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "index.html").read_text(encoding="utf-8")
    assert re.search(r"^took: +\d+ min \d+ s on \d+ cores", done.stdout, re.MULTILINE)
    lines = {
        name: cosines(rf"^{re.escape(name)} .*?((?:\s+\d\.\d{{4}}){{4}})$", done.stdout)
        for name in ("original, float32", "bfloat16", "onnxruntime, int8", "GPTQ, 4 bits", "kflats --size 8MB")
    }
    assert lines["original, float32"] == [1.0] * 4
    assert all(value > 0.999 for value in lines["bfloat16"])
    assert all(a > b for a, b in zip(lines["kflats --size 8MB"], lines["onnxruntime, int8"], strict=True))
    assert all(a > b for a, b in zip(lines["kflats --size 8MB"], lines["GPTQ, 4 bits"], strict=True))
    for name, values in lines.items():
        assert name in page
        assert all(f"{value:.4f}" in page for value in values)
    assert all(done.stdout.count(f"“{query}”") == page.count(f"“{query}”") == 1 for query in QUERIES)


@pytest.mark.slow
def test_the_model_is_found_without_importing_its_package(minilm: Path) -> None:
    assert packaged_model() == minilm
    program = "import sys; from kflats import demo; demo.packaged_model(); print(demo.PACKAGE in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("ran", [(), ((1, 20),), ((32, 30),), ((1, 20), (32, 30))])
def test_each_time_stands_in_its_own_column(ran: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    """Some runtimes have no kernel for a batch, and some for no text at all."""
    near = Fidelity(0.99, 0.98, None, 8, None, 0)
    times = tuple(Latency("one", 1.0, shape[0] / 10, 1, 1, 3, *shape, 1) for shape in ran)
    cells = Line(in_torch("one", 45_000_000, tmp_path), near, near, None, times).cells()
    shown = {(1, 20): "0.10", (32, 30): "3.20"}
    assert cells[3:5] == [shown[shape] if shape in ran else "-" for shape in shown]
    assert len(cells) == 9


def test_a_missing_model_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KflatsError, match=r"kflats\[demo\]"):
        demo_module.demo(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_demo_without_sizes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KflatsError, match="needs a size"):
        demo_module.demo(tmp_path / "out", sizes=())
