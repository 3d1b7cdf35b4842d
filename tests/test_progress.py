"""Progress is a bar in a terminal, and now and then a line elsewhere; quiet work shows nothing."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from kflats.common import formatting as progress
from kflats.compress.pipeline import compress_folder
from kflats.methods import Auto


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_a_bar_in_a_terminal_and_lines_elsewhere(
    terminal: bool, quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", (0.0, 0.0))
    monkeypatch.setenv("TERM", "xterm")
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    else:
        monkeypatch.delenv("FORCE_COLOR", raising=False)
    with progress.progress_bar(quiet=quiet) as update:
        for step in range(5):
            update("layer [0]\x1b", step, 4)
    shown = capsys.readouterr()
    assert shown.out == ""
    if quiet:
        assert shown.err == ""
        return
    assert "layer [0]\\u001b" in shown.err
    assert ("\x1b[" in shown.err) == terminal
    lines = [line for line in shown.err.splitlines() if line.startswith("kflats: ")]
    assert len(lines) == (0 if terminal else 5)
    if lines:
        assert lines[-1] == "kflats: layer [0]\\u001b, 4 of 4, 0:00 left"


def test_lines_come_every_few_seconds_and_later_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    shown = []
    with progress.progress_bar() as update:
        for second in range(1000):
            clock[0] = float(second)
            update("measuring", second, 1000)
            if capsys.readouterr().err:
                shown.append(second)
    assert shown[:4] == [5, 10, 15, 20]
    gaps = [later - earlier for earlier, later in pairwise(shown)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == 30


@pytest.mark.slow
def test_every_long_phase_of_a_compression_is_shown(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", (0.0, 0.0))
    texts = ["the word1 of word2", "a word3 of b"] * 4
    compress_folder(tiny_folder, tmp_path / "small", size="50%", method=Auto(), weights=("all",), texts=texts)
    shown = capsys.readouterr().err
    for phase in ("measuring", "weighing", "planning", "fitting"):
        assert f"kflats: {phase}" in shown, phase
    compress_folder(
        tiny_folder, tmp_path / "quiet", size="50%", method=Auto(), weights=("all",), texts=texts, quiet=True
    )
    assert "kflats: " not in capsys.readouterr().err
