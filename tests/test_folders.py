"""Folders are there completely or not at all: refusals, failures, full disks, ``kill -9``, and runs that resume."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from kflats.common.errors import KflatsError
from kflats.compress.fitting import Partial
from kflats.io.atomic import MANIFEST, differences, locked, manifest_follows, new_folder, replaced


def contents(folder: Path) -> dict[str, str]:
    """Texts of all files but manifests."""
    paths = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != MANIFEST]
    return {str(p.relative_to(folder)): p.read_text() for p in paths}


def old_model(out: Path) -> dict[str, str]:
    with new_folder(out) as aside:
        (aside / "config.json").write_text("old")
    return contents(out)


def test_a_new_folder_appears_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "small"
    with new_folder(out) as aside:
        assert not out.exists()
        assert aside.parent == out.parent
        (aside / "sub").mkdir()
        (aside / "sub" / "a.txt").write_text("a")
    assert contents(out) == {"sub/a.txt": "a"}
    assert [p.name for p in out.parent.iterdir()] == ["small"]


def test_the_home_of_an_unknown_user_is_a_name_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for out in ("~nobody-of-this-name/small", "~/small"):
        with new_folder(out) as aside:
            (aside / "a.txt").write_text("a")
    assert contents(tmp_path) == {"home/small/a.txt": "a", "~nobody-of-this-name/small/a.txt": "a"}


@pytest.mark.skipif(os.name == "nt", reason="files have no such modes there")
@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_files_are_for_whom_new_files_are_for(mask: int, tmp_path: Path) -> None:
    """safetensors makes files that only their owner may read; a folder with such a file cannot be shared."""
    before = os.umask(mask)
    try:
        with new_folder(tmp_path / "small") as aside:
            save_file({"a": torch.ones(2)}, aside / "model.safetensors")
            (aside / "config.json").write_text("{}")
        with replaced(tmp_path / "one.safetensors") as file:
            save_file({"a": torch.ones(2)}, file)
    finally:
        os.umask(before)
    written = [*(tmp_path / "small").iterdir(), tmp_path / "one.safetensors"]
    assert {path.stat().st_mode & 0o777 for path in written} == {0o666 & ~mask}


def test_who_writes_nothing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replaced(tmp_path / "absent"):
        pass
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_refused_and_untouched(tmp_path: Path) -> None:
    out = tmp_path / "small"
    before = old_model(out)
    with pytest.raises(KflatsError, match=r"exists already.*force=True"), new_folder(out):
        pytest.fail("must be refused before any work")
    assert contents(out) == before
    file = tmp_path / "file"
    file.write_text("")
    for force in (False, True):
        with pytest.raises(KflatsError, match="not a folder"), new_folder(file, force=force):
            pytest.fail("must be refused")
    with pytest.raises(KflatsError, match="cannot be written"), new_folder(file / "inside"):
        pytest.fail("must be refused")


def test_force_replaces_what_kflats_wrote_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "small"
    before = old_model(out)
    with new_folder(out, force=True) as aside:
        assert contents(out) == before
        (aside / "config.json").write_text("new")
    assert contents(out) == {"config.json": "new"}

    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years of work")
    with pytest.raises(KflatsError, match=r"thesis.txt \(no manifest lists it\)"), new_folder(home, force=True):
        pytest.fail("must be refused")
    assert contents(home) == {"thesis.txt": "years of work"}

    empty = tmp_path / "empty"
    empty.mkdir()
    with new_folder(empty, force=True) as aside:
        (aside / "a").write_text("a")
    assert contents(empty) == {"a": "a"}


def test_a_link_is_followed_not_replaced(tmp_path: Path) -> None:
    old_model(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with new_folder(tmp_path / "link", force=True) as aside:
        (aside / "config.json").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "real") == {"config.json": "new"}


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (RuntimeError("a defect"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, "No space left on device"), KflatsError),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), KflatsError),
        (SafetensorError("I/O error: No space left on device (os error 28)"), KflatsError),
        (PermissionError(errno.EACCES, "Permission denied"), KflatsError),
        (OSError(errno.EIO, "Input/output error"), OSError),
    ],
)
@pytest.mark.parametrize("there", [False, True])
def test_after_an_error_nothing_is_left(there: bool, error: BaseException, shown: type, tmp_path: Path) -> None:
    out = tmp_path / "small"
    before = old_model(out) if there else {}

    def fail() -> None:
        with new_folder(out, force=there) as aside:
            (aside / "half.txt").write_text("half")
            raise error

    with pytest.raises(shown):
        fail()
    assert out.exists() == there
    assert contents(tmp_path) == {f"small/{name}": text for name, text in before.items()}
    assert [p.name for p in tmp_path.iterdir()] == (["small"] if there else [])


def test_a_failed_last_step_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "small"
    before = old_model(out)
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name.endswith(".kflats-new"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(KflatsError, match="no space left"), new_folder(out, force=True) as aside:
        (aside / "config.json").write_text("new")
    assert contents(tmp_path) == {f"small/{name}": text for name, text in before.items()}


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "small"

    def slow() -> None:
        with new_folder(out) as aside:
            (aside / "config.json").write_text("new")
            out.mkdir()
            (out / "config.json").write_text("old")

    with pytest.raises(KflatsError, match="exists already"):
        slow()
    assert contents(tmp_path) == {"small/config.json": "old"}


@contextmanager
def process(program: str, *arguments: object, source: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that says "ready" and waits to be killed."""
    environment = os.environ | {"PYTHONPATH": str(source)}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline().strip() == "ready"
            yield running
        finally:
            running.kill()


WRITING = """
import sys, time
from pathlib import Path
from kflats.io.atomic import new_folder
with new_folder(sys.argv[1], force=True) as aside:
    (aside / "config.json").write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""
REPLACING = """
import sys, time
from pathlib import Path
import kflats.io.atomic
rename = Path.rename
def stop(self, target):
    if self.name.endswith(".kflats-new"):      # the old folder is aside, the new one is not yet in place
        print("ready", flush=True)
        time.sleep(60)
    return rename(self, target)
Path.rename = stop
with kflats.io.atomic.new_folder(sys.argv[1], force=True) as aside:
    (aside / "config.json").write_text("new")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(
    "program",
    [pytest.param(WRITING, marks=pytest.mark.slow, id="while writing"), pytest.param(REPLACING, id="while replacing")],
)
def test_kill_9(program: str, repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    before = old_model(out)
    with process(program, out, source=repository / "src") as running:
        if program is WRITING:  # another run meanwhile must not take the live one's folder away
            with new_folder(tmp_path / "other"):
                pass
            assert any(p.name.endswith(".kflats-new") for p in tmp_path.iterdir())
            for force in (False, True):
                with pytest.raises(KflatsError, match="another run is writing"), new_folder(out, force):
                    pytest.fail("must be refused before any work")
        running.send_signal(signal.SIGKILL)
        running.wait()
    assert (tmp_path / ".small.kflats-lock").exists()  # the dead process's lock file blocks nobody below
    if program is WRITING:
        assert contents(out) == before
    with pytest.raises(KflatsError, match="exists already"), new_folder(out):
        pytest.fail("the old folder is back, so it is refused")
    assert contents(tmp_path) == {f"small/{name}": text for name, text in before.items()}
    with new_folder(out, force=True) as aside:
        (aside / "config.json").write_text("new")
    assert contents(tmp_path) == {"small/config.json": "new"}
    assert not list(tmp_path.glob(".*"))


def test_a_lock_is_released_and_its_file_removed(tmp_path: Path) -> None:
    goal = tmp_path / "small"
    for _ in range(2):
        with locked(goal):
            with pytest.raises(KflatsError, match=r"another run is writing .*small"), locked(goal):
                pytest.fail("held already")
            with locked(tmp_path / "other"):
                pass
        assert list(tmp_path.iterdir()) == []


def test_all_that_interrupted_runs_left_goes_when_the_folder_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "small"
    for kind in ("partial", "recovery"):
        (tmp_path / f".small.kflats-{kind}").mkdir()
    (tmp_path / ".other.kflats-partial").mkdir()
    with new_folder(out) as aside:
        (aside / "config.json").write_text("{}")
        assert (tmp_path / ".small.kflats-partial").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".other.kflats-partial", "small"]


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "added": (lambda out: (out / "notes.txt").write_text("mine"), r"notes.txt \(not written by kflats\)"),
    "hidden": (lambda out: (out / ".git").mkdir() or (out / ".git" / "HEAD").write_text("ref"), r".git/HEAD \(not"),
    "changed": (lambda out: (out / "config.json").write_text("OLD"), r"config.json \(changed\)"),
    "inside": (lambda out: (out / "0_Transformer" / "a.txt").write_text("longer"), r"0_Transformer/a.txt \(changed\)"),
    "removed": (lambda out: (out / "config.json").unlink(), r"config.json \(missing\)"),
    "link": (lambda out: (out / "link").symlink_to("config.json"), r"link \(not written by kflats\)"),
    "linked folder": (lambda out: (out / "link").symlink_to("/"), r"link \(not written by kflats\)"),
    "file made a link": (
        lambda out: (out / "config.json").rename(out.parent / "kept") and (out / "config.json").symlink_to("../kept"),
        r"config.json \(changed\)",
    ),
    "no manifest": (lambda out: (out / MANIFEST).unlink(), r"config.json \(no manifest lists it\)"),
    "damaged manifest": (
        lambda out: (out / MANIFEST).write_text('{"files": 3'),
        r"config.json \(no manifest lists it\)",
    ),
    "other manifest": (
        lambda out: (out / MANIFEST).write_text('{"format": "kflats-manifest", "version": 2, "files": {}}'),
        r"config.json \(no manifest lists it\)",
    ),
    "many": (lambda out: [(out / f"{i}.txt").write_text("") for i in range(9)], r"4.txt \(not.*\) and 4 more"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_folder_that_somebody_changed_is_never_replaced(change: str, when: str, tmp_path: Path) -> None:
    out = tmp_path / "small"
    with new_folder(out) as aside:
        (aside / "0_Transformer").mkdir()
        for name in ("config.json", "0_Transformer/a.txt"):
            (aside / name).write_text("old")
    assert differences(out) == []
    make, said = CHANGES[change]

    def replace() -> None:
        with new_folder(out, force=True) as aside:
            if when == "before":
                pytest.fail("must be refused before any work")
            (aside / "config.json").write_text("new")
            make(out)

    if when == "before":
        make(out)
        before = contents(tmp_path)
    with pytest.raises(KflatsError, match=f"small is not replaced: .*{said}"):
        replace()
    if when == "before":
        assert contents(tmp_path) == before
    assert not list(tmp_path.glob(".small*"))
    assert differences(out)


def test_what_kflats_itself_changes_later_comes_into_the_manifest(tmp_path: Path) -> None:
    out = tmp_path / "small"
    with new_folder(out) as aside:
        for name in ("README.md", "config.json"):
            (aside / name).write_text("old")
    (out / "config.json").write_text("somebody's")

    def change() -> None:
        with manifest_follows(out, "README.md", "config.json", "report"):
            (out / "report").mkdir(exist_ok=True)
            for name in ("README.md", "config.json", "report/a.png"):
                (out / name).write_text("new")

    change()
    assert differences(out) == ["config.json (changed)"]  # what somebody changed before stays a difference
    (out / "config.json").write_text("old")
    (out / "report" / "a.png").write_text("somebody's")
    assert differences(out) == ["report/a.png (changed)"]
    (out / "report" / "a.png").unlink()
    change()
    assert differences(out) == []
    with manifest_follows(tmp_path, "small"):
        pass
    assert not (tmp_path / MANIFEST).exists()


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("models/small", "is the original"),
        ("link", "is the original"),
        ("models", "holds the original, small"),
        (".", "holds the original, models/small"),
        ("models/small/deep/inside", "lies inside the original"),
        ("link/inside", "lies inside the original"),
        ("blobs", "holds a file of the original, which .*model.safetensors links to"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_an_output_overlaps_no_source(out: str, said: str, force: bool, tmp_path: Path) -> None:
    source = tmp_path / "models" / "small"
    old_model(source)
    old_model(tmp_path / "blobs")
    (source / "model.safetensors").symlink_to(tmp_path / "blobs" / "config.json")
    (tmp_path / "link").symlink_to(source)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KflatsError, match=said), new_folder(tmp_path / out, force, [source]):
        pytest.fail("must be refused before any work")
    assert sorted(tmp_path.rglob("*")) == before


TENSORS = {"weight": torch.arange(6.0).reshape(2, 3).half(), "labels": torch.tensor([0, 200], dtype=torch.uint8)}


def test_finished_weights_return(tmp_path: Path) -> None:
    partial = Partial(tmp_path / "small", "this run")
    assert partial.get("words") is None
    partial.put("words", TENSORS, {"objective": [2.0, 1.0]})
    partial.put("a/b..c", {"view": torch.arange(9.0).reshape(3, 3).T[1:]}, {})
    tensors, meta = Partial(tmp_path / "small", "this run").get("words") or ({}, {})
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[key], TENSORS[key]) and tensors[key].dtype == TENSORS[key].dtype for key in TENSORS)
    assert meta == {"objective": [2.0, 1.0]}
    found = partial.get("a/b..c")
    assert found is not None
    assert torch.equal(found[0]["view"], torch.arange(9.0).reshape(3, 3).T[1:])
    assert partial.get("other") is None
    assert Partial(tmp_path / "small", "another run").get("words") is None
    assert [p.name for p in tmp_path.iterdir()] == [".small.kflats-partial"]


@pytest.mark.parametrize("damage", ["truncated", "one bit", "empty", "swapped", "folder", "link"])
def test_damaged_weights_are_made_again(damage: str, tmp_path: Path) -> None:
    partial = Partial(tmp_path / "small", "this run")
    partial.put("words", TENSORS, {})
    (path,) = partial.folder.iterdir()
    data = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(data[:-2])
    elif damage == "one bit":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "swapped":
        other = partial._path("others")
        path.rename(other)
        path = other
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    name = "others" if damage == "swapped" else "words"
    assert partial.get(name) is None
    if damage == "folder":
        with pytest.raises(KflatsError, match="is a directory"):
            partial.put(name, TENSORS, {})
    else:
        partial.put(name, TENSORS, {})
        assert partial.get(name) is not None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_keeps_what_was_finished(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = Partial(tmp_path / "small", "this run")
    partial.put("words", TENSORS, {})

    def full(tensors: object, filename: Path, metadata: object) -> None:
        filename.write_bytes(b"half of it")
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")

    monkeypatch.setattr("kflats.compress.fitting.save_file", full)
    for name in ("words", "linear"):
        with pytest.raises(
            KflatsError, match=r"no space left.*run the same command again|quota exceeded.*run the same command again"
        ):
            partial.put(name, TENSORS, {})
    assert partial.get("words") is not None
    assert partial.get("linear") is None
    assert len(list(partial.folder.iterdir())) == 1


KEEPS_PUTTING = """
import sys, torch
from kflats.compress.fitting import Partial
partial = Partial(sys.argv[1], "run")
tensors = {"weight": torch.ones(1_000_000)}
partial.put("words", tensors, {})
print("ready", flush=True)
while True:
    partial.put("words", tensors, {})
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.slow
def test_kill_9_while_a_weight_is_written(repository: Path, tmp_path: Path) -> None:
    with process(KEEPS_PUTTING, tmp_path / "small", source=repository / "src") as running:
        time.sleep(0.3)
        running.send_signal(signal.SIGKILL)
        running.wait()
    found = Partial(tmp_path / "small", "run").get("words")
    assert found is not None
    assert torch.equal(found[0]["weight"], torch.ones(1_000_000))
