"""The demo, whole, on the real model, with every way to the network blocked."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from kflats import demo as demo_module
from kflats.common.errors import KflatsError
from kflats.demo import packaged_model, round_rows_
from kflats.report.report import Report

OFFLINE = """
import socket, sys
def refuse(*a, **k): raise AssertionError(f"the demo used the network: {a}")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse
sys.argv = ["kflats", "demo", "--out", sys.argv[1]]
from kflats.cli.app import main
main()
"""


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
    assert report.bytes_after <= 0.6 * report.bytes_before
    assert report.model_bytes_after < 0.8 * report.model_bytes_before + 100_000
    page = (out / "report" / "report.html").read_text(encoding="utf-8")
    assert "embeddings.word_embeddings" in page.replace("<wbr>", "").replace("\u200b", "")
    assert list((out / "report").glob("*.png"))
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "outputs compared" in card
    assert "Not measured yet" not in card
    ours, svd, rounded = (
        [float(v) for v in re.search(rf"^{name} .*?%\s+([\d.]+)\s+([\d.]+)", done.stdout, re.M).groups()]  # type: ignore[union-attr]
        for name in ("kflats", "plain SVD", "8-bit rows")
    )
    assert ours[0] > svd[0]  # the point of it all, mean cosine
    assert ours[1] > svd[1]  # and its 5th percentile
    assert ours[0] > 0.97
    assert rounded[0] > 0.99


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


def test_eight_bit_rows_are_honest() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(40, 16)})
    with torch.no_grad():
        model["words"].weight[3] = 0.0
    before = model["words"].weight.detach().clone()
    assert round_rows_(model, "words") == 40 * (16 + 4)
    after = model["words"].weight.detach()
    step = before.abs().amax(1, keepdim=True) / 127
    assert bool(((after - before).abs() <= step / 2 * 1.001).all())
    assert not torch.equal(after, before)
    assert all(len(row.unique()) <= 255 for row in after)
