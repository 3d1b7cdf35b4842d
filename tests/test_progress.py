"""Progress is a bar in a terminal, and now and then a line elsewhere; quiet work shows nothing."""

from __future__ import annotations

import pytest

from kflats.common import progress


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_a_bar_in_a_terminal_and_lines_elsewhere(
    terminal: bool, quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
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


def test_lines_are_half_a_minute_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress_bar() as update:
        for step in range(100):
            update("measuring", step, 100)
    assert capsys.readouterr().err == ""
