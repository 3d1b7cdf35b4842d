"""The command line, as a user sees it: what it prints, what it writes, and how it says no."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kflats import files
from kflats.cli import app
from kflats.report import REPORT_FILE, Report

transformers = pytest.importorskip("transformers")


def run(*arguments: object) -> Result:
    """The command's result; an exception that is no exit is a defect, and raised here."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    return result.stderr


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT folder small enough for a test, with a tokenizer of a few words."""
    folder = tmp_path_factory.mktemp("tiny")
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *(f"w{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(395)),
    ]
    config = transformers.BertConfig(
        vocab_size=400, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(f"wa{chr(97 + i % 5)} wb{chr(97 + i % 7)} wca" for i in range(30)), encoding="utf-8")
    return file


def test_help_names_every_command() -> None:
    text = run("--help").output
    for command in ("inspect", "plan", "compress", "compare", "report", "demo"):
        assert f" {command} " in text
        assert run(command, "--help").exit_code == 0


def test_version() -> None:
    assert run("--version").output.startswith("kflats ")


def test_inspect_lists_names_ties_shapes_bytes_and_shares(tiny: Path, tmp_path: Path) -> None:
    lines = run("inspect", tiny).output.splitlines()
    words = next(line for line in lines if line.startswith("embeddings.word_embeddings"))
    assert words.split()[1:] == ["embedding", "400", "x", "32", "float32", "51.2", "kB"] + words.split()[-2:]
    total = (tiny / "model.safetensors").stat().st_size
    assert f"{100 * 51_200 / total:.1f} %" in words
    assert lines[-1].startswith("whole model")
    head = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=90, n_embd=16, n_layer=1, n_head=2))
    head.save_pretrained(tmp_path)
    assert "transformer.wte = lm_head" in run("inspect", tmp_path).output


def test_no_is_said_without_a_traceback(tiny: Path, tmp_path: Path) -> None:
    assert "there is no folder" in refused("inspect", tmp_path / "none")
    assert "holds no model" in refused("inspect", tmp_path)
    assert "no report" in refused("report", tiny)
    assert "there is no folder" in refused("compare", tiny, tmp_path / "none")
    assert "cannot be read" in refused("compare", tiny, tiny, "--texts", tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text("\n")
    assert "no text" in refused("compare", tiny, tiny, "--texts", tmp_path / "empty.txt")


def test_a_path_that_cannot_be_used_is_named(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: object) -> None:
        raise OSError(28, "No space left on device", "/some/file[bold]")

    monkeypatch.setattr(files, "resolve_model", full)
    assert "No space left on device: /some/file[bold]" in refused("inspect", tiny)


def test_a_defect_keeps_its_traceback(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(files, "resolve_model", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        run("inspect", tiny)


@pytest.mark.parametrize(("command", "note"), [("inspect", False), ("compress", True)])
def test_interrupted(command: str, note: bool, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "resolve_model", interrupt)
    if command == "compress":
        compress = pytest.importorskip("kflats.compress")
        monkeypatch.setattr(compress, "compress_folder", interrupt)
    extra = ("--budget", "60%", "--out", tmp_path / "out") if command == "compress" else ()
    result = run(command, tiny, *extra)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert ("resumes" in result.stderr) is note


def test_compare_prints_sizes_fidelity_and_latency(tiny: Path, texts: Path) -> None:
    text = run("compare", tiny, tiny, "--texts", texts).output
    for part in (
        "weight files",
        "100.0 %",
        "mean cosine",
        "5th percentile",
        "rare words",
        "neighbours kept",
        "interleaved",
    ):
        assert part in text
    assert "1.0000" in text


def test_report_draws_a_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    Report("m", "60%", (), 100, 80, 0, "0.1.0").save(tmp_path / REPORT_FILE)
    assert run("report", tmp_path).output.strip() == str(tmp_path / "report" / "report.html")
    assert (tmp_path / "report" / "size.png").exists()
    elsewhere = tmp_path / "a" / "b"
    assert run("report", tmp_path / REPORT_FILE, "--out", elsewhere).exit_code == 0
    assert (elsewhere / "report.html").exists()


def test_starts_without_loading_what_it_does_not_need() -> None:
    program = "import sys, kflats.cli; print([n for n in ('transformers', 'matplotlib', 'jinja2') if n in sys.modules])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.strip() == "[]", done.stderr
