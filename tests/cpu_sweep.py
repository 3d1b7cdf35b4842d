"""The quick tests of the numerics and of compressing, under other instruction sets and numbers of threads.

Sums then take another order, so a test that hangs on last digits fails under one of them.

    python tests/cpu_sweep.py             runs the tests under every setting
    python tests/cpu_sweep.py HASH        prints the setting that the hexadecimal number draws, for ``env``
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SETTINGS = (
    {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
    {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
)
"""None names AVX-512: torch takes what it has by itself, and what is named also where the CPU lacks it, which ends the
process. Threads that wait in a loop take the cores of the other test processes."""

TESTS = ("tests/laws", "tests/test_allocate.py", "tests/test_bias.py", "tests/test_compress.py",
         "tests/test_compress_layers.py", "tests/test_compress_robust.py", "tests/test_shares.py")  # fmt: skip


def run(setting: dict[str, str]) -> int:
    """pytest's exit status under ``setting``, its messages shown."""
    print("CPU setting:", *(f"{name}={value}" for name, value in setting.items()), flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "-m", "not slow", *TESTS]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1", **setting}, check=False).returncode


def main(arguments: list[str]) -> int:
    """0 where all tests pass, or where a setting was printed."""
    if arguments:
        drawn = SETTINGS[int(arguments[0], 16) % len(SETTINGS)]
        print(*(f"{name}={value}" for name, value in drawn.items()))
        return 0
    os.chdir(Path(__file__).parent.parent)
    return max([run(setting) for setting in SETTINGS])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
