"""Tries the interpreters and the versions of packages that kflats supports, each in a fresh virtual environment.

    python tests/versions.py                    every combination; what cannot be tried is listed with its reason
    python tests/versions.py 3.12 5.17.0        one of them: Python and transformers
    python tests/versions.py 3.11 lowest        every test with the oldest version of each requirement of pyproject.toml
    python tests/versions.py 3.11 highest       every test with the newest ones

Interpreters are found on the path and in pyenv. Packages come from pip's index and its cache; the environments are
removed afterwards. The oldest and newest versions are those that uv finds (`--resolution lowest-direct`: what kflats
requires is as old as it may be, what these packages require is new). TORCH_INDEX=https://download.pytorch.org/whl/cpu
gives the small CPU build of torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INTERPRETERS = ("3.11", "3.12", "3.13", "3.14")
TRANSFORMERS = ("5.17.0", "newest")
PACKAGES = ("pytest>=8.2", "pytest-xdist>=3.6", "hypothesis>=6.100", "scikit-learn>=1.5", "constriction>=0.4.2")
TESTS = (
    "tests/test_start.py",
    "tests/test_imports.py",
    "tests/test_cli.py",
    "tests/test_folders.py",
    "tests/models/test_bad_folders.py",
    "tests/models/test_architectures.py",
    "tests/models/test_inside_transformers.py",
    "tests/models/test_without_kflats.py",
)
"""What depends on the interpreter or on transformers: imports, the command line, and loading and saving of folders."""
RESOLUTIONS = {"lowest": "lowest-direct", "highest": "highest"}
OLD = ("-W", "default")
"""Old packages warn of what newer ones have changed; only in this run no warning is an error."""


def interpreter(version: str) -> str | None:
    """An interpreter such as "3.12" that runs; None if there is none. A shim of pyenv may be there and not run."""
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for python in filter(None, (shutil.which(f"python{version}"), *map(str, pyenv))):
        if subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0:
            return python
    return None


def tried(python: str, transformers: str) -> str:
    """ "passed", or the step that failed with the last lines that it printed."""
    index = ["--extra-index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    with tempfile.TemporaryDirectory() as folder:
        inside = str(Path(folder) / "bin" / "python")
        install, pytest = [inside, "-m", "pip", "install", "-q", *index], [inside, "-m", "pytest", "-q", "-n", "auto"]
        steps = {"venv": [python, "-m", "venv", folder]}
        if resolution := RESOLUTIONS.get(transformers):
            uv = [inside, "-m", "uv", "pip", "install", "-q", *index, "--resolution", resolution]
            steps["pip"] = [*install, "uv"]
            steps["uv"] = [*uv, "--python", inside, "-e", f"{ROOT}[dev]"]
            steps["pytest"] = [*pytest, "-m", "not slow", *(OLD if transformers == "lowest" else ())]
        else:
            wanted = "transformers" if transformers == "newest" else f"transformers=={transformers}"
            steps["pip"] = [*install, "-e", f"{ROOT}[hf]", wanted, *PACKAGES]
            steps["pytest"] = [*pytest, "-m", "not slow", *TESTS]
        variables = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        for name, command in steps.items():
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=variables)
            if done.returncode:
                return f"{name} failed:\n" + "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        return "passed: " + done.stdout.strip().splitlines()[-1]


def main(arguments: list[str]) -> int:
    """0 if everything that could be tried passed."""
    every = [(p, t) for p in INTERPRETERS for t in TRANSFORMERS] + [(INTERPRETERS[0], r) for r in RESOLUTIONS]
    chosen = [(arguments[0], arguments[1])] if arguments else every
    failed = False
    for version, transformers in chosen:
        python = interpreter(version)
        result = f"skipped: no python{version} here" if python is None else tried(python, transformers)
        failed |= "failed" in result.partition("\n")[0]
        what = transformers if transformers in RESOLUTIONS else f"transformers {transformers}"
        print(f"python {version}, {what}: {result}", flush=True)
    return int(failed)


def least() -> str:
    """The oldest interpreter of the metadata, such as "3.11"."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        required: str = tomllib.load(file)["project"]["requires-python"]
    return required.removeprefix(">=")


if __name__ == "__main__":
    if least() != INTERPRETERS[0]:
        sys.exit(f"pyproject.toml begins at Python {least()}, this list at {INTERPRETERS[0]}")
    sys.exit(main(sys.argv[1:]))
