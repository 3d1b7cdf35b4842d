"""Command lines drawn by seed from options, damaged folders and odd text files: each answers, and nothing is lost."""

from __future__ import annotations

import json
import random
import shlex
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePath

import pytest
from typer.testing import CliRunner, Result

from kflats.cli.app import app

pytest.importorskip("transformers")

SENTENCES = [f"the word{i} of word{i * 7 % 280} a b c" for i in range(60)]
TEXTS: dict[str, bytes] = {
    "sentences.txt": "\n".join(SENTENCES).encode(),
    "windows.txt": b"\xef\xbb\xbf" + "\r\n".join(SENTENCES).encode(),
    "book.txt": " ".join(SENTENCES * 20).encode(),
    "blank.txt": b"\n \n\t\n",
    "empty.txt": b"",
    "word.txt": b"word1",
    "foreign.txt": "καλημέρα κόσμε\n".encode() * 5,
    "mixed.txt": "the word1 日本語 🙂 \u202eabc\x1b[31m of\n".encode() * 9,
    "latin1.txt": "d\xe9j\xe0 vu the\n".encode("latin-1"),
    "utf16.txt": "the word1 of\n".encode("utf-16"),
    "zeros.txt": b"the\0word",
    "rows.csv": b"id,text\n" + "\n".join(f"{i},{s}" for i, s in enumerate(SENTENCES)).encode(),
    "lines.jsonl": "\n".join(json.dumps({"text": s}) for s in SENTENCES).encode(),
    "broken.jsonl": b'{"text": "the word1"\n{"text": 5}\n[1, 2]\n',
    "model.pickle": b"\x80\x04\x95",
}
"""Odd files of texts, by name."""

PLACES = {"small", "statistics.safetensors", "new.json", "a"}
DAMAGES = ("whole",) * 40 + ("no config", "config is a list", "other sizes")
DAMAGES += ("odd types", "cut weights", "no weights", "empty weights", "wild header", "pickled", "no tokenizer")
DAMAGES += ("torn tokenizer", "bad modules", "unknown class", "empty folder", "nan")


def damage(folder: Path, kind: str) -> None:
    """Damage a copy of the model folder."""
    config, weights = folder / "config.json", folder / "model.safetensors"
    if kind == "no config":
        config.unlink()
    elif kind == "config is a list":
        config.write_text("[1, 2]")
    elif kind in ("other sizes", "odd types", "unknown class"):
        changes = {"other sizes": {"hidden_size": 8}, "odd types": {"hidden_size": "many"}, "unknown class": {}}[kind]
        changes |= {"model_type": "nothing", "architectures": ["Nothing"]} if kind == "unknown class" else {}
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    elif kind == "cut weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "no weights":
        weights.unlink()
    elif kind == "empty weights":
        weights.write_bytes(b"")
    elif kind == "wild header":
        weights.write_bytes(b"\xff" * 64)
    elif kind == "pickled":
        weights.rename(folder / "pytorch_model.bin")
    elif kind == "no tokenizer":
        for path in folder.glob("token*"):
            path.unlink()
    elif kind == "torn tokenizer":
        (folder / "tokenizer.json").write_text('{"model": ')
    elif kind == "bad modules":
        (folder / "modules.json").write_text('[{"path": "../..", "type": "x.Transformer"}]')
    elif kind == "empty folder":
        shutil.rmtree(folder)
        folder.mkdir()
    elif kind == "nan":
        data = bytearray(weights.read_bytes())
        data[-400:] = b"\xff" * 400
        weights.write_bytes(bytes(data))


BUDGETS = ("60%", "60%", "60%", "60%", "50%", "50%", "40%", "70%", "90%", "12kB", "24kB")
BUDGETS += ("2 bits", "3 params", "4k params", "50% ranks", "101%", "0", "-1MB")


def options(draw: random.Random) -> list[str]:
    """Options that plan and compress share; some exclude each other, and some mean nothing."""
    chosen = [draw.choice(("--keep", "--size")), draw.choice(BUDGETS)]
    values: dict[str, tuple[str, ...]] = {
        "--method": ("svd", "flats", "messi", "kmeans-svd", "auto", "keep-dense", "entrywise", "subspace", "nothing"),
        "--flats": ("1", "2", "5", "search", "0", "-3", "many", "301"),
        "--restarts": ("1", "2", "0"),
        "--importance": ("uniform", "counts", "zipf", "token-fisher", "kronecker", "row-fisher", "input-gram", "x"),
        "--power": ("0.5", "1", "-1", "nan", "x"),
        "--codec": ("float16", "bfloat16", "int8", "int4", "int4 32", "transform", "int99", "int", "float8"),
        "--weights": ("linear", "embeddings", "all", "conv", "encoder.*", "embeddings.word_embeddings", "nothing", "["),
        "--allocation": ("auto", "loss", "uniform", "best"),
        "--matrix-rows": ("in_features", "out_features", "columns"),
        "--form": ("factors", "interpolative", "blocks"),
        "--error": ("squared", "power 1", "huber 0.5", "truncated 3 median", "power 9", "huber", ""),
        "--p": ("1", "0.5", "3", "0", "x"),
        "--objective": ("pooled", "logits", "sampled", "task"),
        "--samples": ("1", "4", "0"),
        "--task": ("sst2", "nothing"),
        "--statistics": ("statistics.safetensors", "sentences.txt", "."),
    }
    for name in draw.sample(sorted(values), draw.choice((0, 0, 0, 0, 1, 1, 2, 3))):
        chosen += [name, draw.choice(values[name])]
    if draw.random() < 0.6:
        chosen += ["--texts", draw.choice([*TEXTS, *["sentences.txt"] * 6, "none.txt", "."])]
    return chosen


def command_line(draw: random.Random) -> list[str]:
    """One command line."""
    model = draw.choice(["model"] * 60 + ["none", "./none", "sentences.txt", "", "small"])
    place = draw.choice(["small"] * 20 + ["foreign", "model", "model/inside", "sentences.txt", "link", "a/b/c"])
    out = ["--out", place]
    flags = [flag for flag in ("--force", "--quiet") if draw.random() < 0.4]
    texts = draw.choice([[], ["--texts", draw.choice(list(TEXTS))]])
    command = draw.choice(
        ["compress"] * 8 + ["plan"] * 3 + ["trim", "trim", "inspect", "compare", "export", "evaluate"]
    )
    if command == "compress":
        extra = draw.choice([[]] * 6 + [["--trim", "50"], ["--trim", "-1"], ["--seed", "7"], ["--plan", "plan.json"]])
        proof = [] if draw.random() < 0.02 else ["--no-proof"]  # a proof starts processes, which take seconds
        return [command, model, *options(draw), *out, *flags, *extra, *proof]
    if command == "plan":
        file = draw.choice(["new.json", "new.json", "new.json", "foreign", "plan.json"])
        return [command, model, *options(draw), "--out", file, *flags]
    if command == "trim":
        return [command, model, "--keep", draw.choice(["50", "5", "0", "-1", "9999"]), *texts, *out, *flags]
    if command == "compare":
        return [command, model, draw.choice(["model", "small", "foreign"]), *texts]
    if command == "export":
        return [command, model, "--dense", *out, *flags]
    if command == "evaluate":
        return [
            command,
            model,
            "--task",
            draw.choice(["sst2", "nothing"]),
            "--task-data",
            draw.choice(["foreign", "x"]),
        ]
    return [command, model]


def contents(folder: Path) -> dict[str, bytes | str]:
    """Every file, link and folder below ``folder``."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else (path.read_bytes() if path.is_file() else "folder")
        for path in sorted(folder.rglob("*"))
    }


def laid_out(desk: Path, model: Path, kind: str) -> dict[str, bytes | str]:
    """A desk with a damaged copy of the model, odd texts, and files of somebody else; and what is on it."""
    (desk / "foreign").mkdir(parents=True)
    (desk / "foreign" / "thesis.txt").write_text("mine")
    shutil.copytree(model, desk / "model")
    damage(desk / "model", kind)
    for name, data in TEXTS.items():
        (desk / name).write_bytes(data)
    (desk / "link").symlink_to("model")
    (desk / "plan.json").write_text('{"format": "kflats-plan", "version": 1, "decisions": []}')
    return contents(desk)


def wrong(arguments: list[str], result: Result, before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """The rules that one command broke."""
    new = after.keys() - before.keys()
    quiet = "--quiet" in arguments
    said = [line for line in result.stderr.splitlines() if line.startswith("kflats: ")]
    errors = [
        line for line in said if not line.startswith(("kflats: warning", "kflats: texts: ", "kflats: never reached"))
    ]
    refused = result.exit_code == 2
    # What was measured or fitted before a refusal stays beside the output: the next run takes it up.
    statistics = {name for name in new if ".kflats-partial" in name} if refused else set()
    kept = {str(parent) for name in statistics for parent in (PurePath(name), *PurePath(name).parents)}
    rules = {
        "an exit code of 0 or 2": result.exit_code in (0, 2) and isinstance(result.exception, SystemExit | None),
        "no traceback": "Traceback" not in result.output,
        "files that were there stay": all(after.get(name) == content for name, content in before.items()),
        "no temporary files": not any(".kflats-" in name or name.endswith(".tmp") for name in new - kept),
        "an error is one line, or typer's box": not refused or len(errors) == 1 or "Usage: " in result.stderr,
        "an error prints no result": not refused or result.stdout == "",
        "an error leaves only what was measured": not refused or new - kept <= {"statistics.safetensors"},
        "quiet": not quiet or refused or (result.stdout, result.stderr) == ("", ""),
        "new files are those of the options": {name.split("/")[0] for name in new - kept} <= PLACES,
    }
    return [rule for rule, holds in rules.items() if not holds]


@pytest.mark.parametrize(("count", "seed"), [(20, 2), pytest.param(500, 1, marks=pytest.mark.slow)], ids=["20", "500"])
def test_drawn_command_lines_answer_and_lose_nothing(
    count: int, seed: int, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    codes: Counter[int] = Counter()
    broken = []
    for number in range(count):
        desk, kind = tmp_path / "desk", draw.choice(DAMAGES)
        before = laid_out(desk, tiny_folder, kind)
        monkeypatch.chdir(desk)
        arguments = command_line(draw)
        result = CliRunner().invoke(app, arguments)
        codes[result.exit_code] += 1
        if rules := wrong(arguments, result, before, contents(desk)):
            who = f"{number}, {kind}: kflats {shlex.join(arguments)}"
            broken.append(f"{who}: {rules}\n{result.exception!r}\n{result.output}")
        shutil.rmtree(desk)
    assert not broken, f"{len(broken)} of {count}:\n" + "\n".join(broken)
    assert min(codes[0], codes[2]) >= count // 8, codes


def test_a_broken_rule_is_noticed() -> None:
    before = {"model/config.json": b"{}"}
    after = {"model/config.json": b"[]", ".small.kflats-new": "folder", "stray": b""}
    silent = Result(CliRunner(), b"", b"", b"", 1, 1, RuntimeError("defect"))
    assert len(wrong(["inspect", "model"], silent, before, after)) == 4
    refused = Result(CliRunner(), b"half a table", b"", b"half a table", 2, 2, SystemExit(2))
    assert len(wrong(["inspect", "model"], refused, before, {**before, "small": "folder"})) == 3
    loud = Result(CliRunner(), b"a table", b"", b"a table", 0, 0, None)
    assert wrong(["compress", "--quiet"], loud, before, before) == ["quiet"]
