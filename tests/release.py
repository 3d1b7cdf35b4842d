"""Builds the wheel and the sdist, and checks what a release needs. Publishes nothing.

    python tests/release.py            # writes dist/kflats-VERSION.tar.gz and dist/kflats-VERSION-py3-none-any.whl

The version of pyproject.toml is the newest heading of CHANGELOG.md. `build` makes the sdist, and the wheel out of the
sdist; `twine check --strict` reads both, and no link of the long description is relative. The wheel is pure Python and
holds what the package reads at run time, the licence, and nothing else; the sdist holds every file that git tracks, and
its tests can be collected. The wheel is then installed into an empty environment, where the command line compresses a
tiny model far from this checkout. Both environments are temporary. TORCH_INDEX=https://download.pytorch.org/whl/cpu
gives the small CPU build of torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
EXTRAS = "hf,codes,report"
_RELATIVE = r"\[[^\]]*\]\((?!https://|#)[^)]*\)"
"""Links and pictures that lead nowhere on a package index."""
LEFT_OUT = (".ci/", ".gitignore")
"""What git tracks and no sdist needs."""

SMOKE = """
import subprocess, sys
from pathlib import Path
import torch
from transformers import AutoModel, BertConfig, BertModel, BertTokenizer

words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefgh")]
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained("tiny")
Path("tiny/vocab.txt").write_text("\\n".join(words) + "\\n")
BertTokenizer("tiny/vocab.txt").save_pretrained("tiny")
for arguments in (
    ["--version"], ["inspect", "tiny"], ["compress", "tiny", "--size", "60%", "--out", "small"],
    ["compare", "tiny", "small"], ["report", "small"], ["export", "small", "--dense", "--out", "dense"],
):
    done = subprocess.run([sys.argv[1], *arguments], capture_output=True, text=True)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    if arguments == ["--version"]:
        assert done.stdout.strip() == f"kflats {sys.argv[2]}", done.stdout
try:
    AutoModel.from_pretrained("small")
except ValueError as error:
    assert "kflats compressed this model" in str(error), error
else:
    raise AssertionError("loaded without kflats")
import kflats
assert Path(sys.prefix) in Path(kflats.__file__).parents, kflats.__file__
ids = torch.tensor([[2, 7, 9, 3]])
with torch.no_grad():
    small, dense = (AutoModel.from_pretrained(folder)(ids).last_hidden_state for folder in ("small", "dense"))
assert torch.allclose(small, dense, atol=1e-4), (small - dense).abs().max()
assert Path("small/report/report.html").stat().st_size > 1000
"""
"""What the installed wheel does in an empty folder: its command line, loading, and outputs."""


def version() -> str:
    """The version of pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: str = tomllib.load(file)["project"]["version"]
    return found


def newest_heading() -> tuple[str, str]:
    """The version of CHANGELOG.md's newest heading, and what stands behind it: a date, or "unreleased"."""
    found = re.search(r"^## (\S+?), (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    return (found[1], found[2]) if found else ("", "")


def tracked() -> set[str]:
    """The files of this checkout that an sdist holds."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.splitlines() if not name.startswith(LEFT_OUT)}


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Runs a command without this checkout on the path; its output is shown where it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        sys.exit(f"failed: {' '.join(map(str, command))[:300]}\n" + (done.stdout + done.stderr)[-3000:])


def environment(folder: Path) -> Path:
    """The interpreter of a new virtual environment."""
    run(sys.executable, "-m", "venv", folder)
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def check(wrong: list[str]) -> None:
    """Ends with what is wrong, if anything is."""
    if wrong:
        sys.exit("failed:\n" + "\n".join(wrong))


def wrong_tree() -> list[str]:
    """What is wrong with versions and licence before anything is built."""
    wanted, (heading, _) = version(), newest_heading()
    wrong = [] if heading == wanted else [f"pyproject.toml has {wanted}, the newest heading of CHANGELOG.md {heading}"]
    return wrong + ([] if (ROOT / "LICENSE").is_file() else ["there is no LICENSE"])


def wrong_metadata(metadata: Message) -> list[str]:
    """What is wrong with the metadata of a wheel or an sdist."""
    wanted = {"Name": "kflats", "Version": version(), "License-Expression": "Apache-2.0", "License-File": "LICENSE"}
    wrong = [f"{key} is {metadata[key]!r}" for key, value in wanted.items() if metadata[key] != value]
    wrong += [f"there is no {key}" for key in ("Summary", "Requires-Python") if not metadata[key]]
    text = str(metadata.get_payload())
    wrong += [f"the long description has the relative link {link}" for link in re.findall(_RELATIVE, text)]
    return wrong + ([] if text.lstrip().startswith("# kflats") else ["the long description is not README.md"])


def wrong_wheel(path: Path) -> list[str]:
    """What is wrong with a wheel."""
    info = f"kflats-{version()}.dist-info"
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
        pure = b"Root-Is-Purelib: true" in archive.read(f"{info}/WHEEL")
    package = {name.removeprefix("src/") for name in tracked() if name.startswith("src/")}
    own = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    wrong = wrong_metadata(metadata) + ([] if pure else [f"{path.name} is not pure Python"])
    wrong += [f"{path.name} has {name}" for name in sorted(names - package - own)]
    return wrong + [f"{path.name} lacks {name}" for name in sorted((package | own) - names)]


def wrong_sdist(path: Path, folder: Path) -> list[str]:
    """What is wrong with an sdist, which is unpacked into ``folder``."""
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    root = folder / f"kflats-{version()}"
    names = {file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()}
    wrong = wrong_metadata(message_from_string((root / "PKG-INFO").read_text(encoding="utf-8")))
    wrong += [f"{path.name} lacks {name}" for name in sorted(tracked() - names)]
    return wrong + [f"{path.name} has {name}" for name in sorted(names - tracked() - {"PKG-INFO", ".gitignore"})]


def main() -> int:
    """See the top of this file."""
    check(wrong_tree())
    for old in DIST.glob("kflats-*"):
        old.unlink()
    index = ["--extra-index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    install = ["-m", "pip", "install", "-q", "--disable-pip-version-check", *index]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tools = environment(folder / "tools")
        run(tools, *install, "build", "twine")
        run(tools, "-m", "build", "--outdir", DIST, ROOT)
        (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
        run(tools, "-m", "twine", "check", "--strict", wheel, sdist)
        check(wrong_wheel(wheel) + wrong_sdist(sdist, folder))
        print(f"built: {wheel.name} ({wheel.stat().st_size:,} bytes), {sdist.name} ({sdist.stat().st_size:,} bytes)")
        unpacked = folder / f"kflats-{version()}"
        run(sys.executable, "-m", "pytest", "--collect-only", "-q", cwd=unpacked)
        run(
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "tests/test_imports.py",
            "tests/docs",
            "-k",
            "lead or exist",
            cwd=unpacked,
        )
        print("sdist: complete; its tests can be collected, and no link of its pages is broken")
        empty, desk = environment(folder / "empty"), folder / "desk"
        desk.mkdir()
        run(empty, *install, "-c", ROOT / "constraints.txt", f"{wheel}[{EXTRAS}]")
        run(empty, "-c", SMOKE, empty.with_name("kflats"), version(), cwd=desk)
        print(f"wheel: installed with [{EXTRAS}] into an empty environment; compresses, loads, reports, exports")
    date = newest_heading()[1]
    print(
        f"to do before publishing: CHANGELOG.md says {date}" if date == "unreleased" else f"{version()}, {date}: ready"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
