"""Question: how much sooner is a folder compressed by several workers, and are its bytes the same?

``kflats compress`` of all-MiniLM-L6-v2 to 8 MB without texts or proof, one thread a process, on as many cores
as are named in the last column. Seconds from the start of the command to its end, imports and all (of modules that
Python has compiled before); "speed-up" against one process. CPU seconds are those of all workers together.

The last line is what the machine allows: as many commands of one process each, at once, which divide nothing and wait
for nothing. They share caches and memory; "speed-up" is then how many times as much work is done in a second.

    python benchmarks/workers.py --write benchmarks/results/workers.md
"""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import arguments, publish, table

from kflats.demo import packaged_model


def command(out: Path, *asked: str) -> list[str]:
    """Of the main job."""
    words = ["compress", str(packaged_model()), "--out", str(out), *asked, "--no-proof", "--quiet"]
    return [sys.executable, "-m", "kflats", *words]


def took(commands: list[list[str]]) -> tuple[float, float]:
    """Seconds by the clock, and of all CPUs, of commands at once."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    running = [subprocess.Popen(each, env=os.environ | {"OMP_NUM_THREADS": "1"}) for each in commands]
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit("a command failed")
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    options = arguments(__doc__, size="8MB", counts="1,2")
    lines: list[dict[str, object]] = []
    alone, digests, cores = 0.0, set[str](), len(os.sched_getaffinity(0))
    counts = [int(count) for count in options.counts.split(",")]

    def show(name: str, of_one: int, times: tuple[float, float], folders: list[Path]) -> None:
        digests.update(hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest() for out in folders)
        line: dict[str, object] = {"workers": name, "seconds": f"{times[0]:.0f}", "CPU seconds": f"{times[1]:.0f}"}
        line |= {"speed-up": f"{of_one * alone / times[0]:.2f}", "same bytes": len(digests) == 1, "cores": cores}
        lines.append(line)
        print(line, flush=True)

    with tempfile.TemporaryDirectory() as place:
        # One layer, not counted: modules are compiled when they are first imported, and files are read from the disk.
        took([command(Path(place) / "first", "--keep", "90%", "--weights", "pooler.dense", "--samples", "8")])
        for count in counts:
            out = Path(place) / f"workers-{count}"
            times = took([command(out, "--size", options.size, "--workers", str(count))])
            alone = alone or times[0]
            show(str(count), 1, times, [out])
        folders = [Path(place) / f"alone-{i}" for i in range(counts[-1])]
        times = took([command(out, "--size", options.size) for out in folders])
        show(f"{counts[-1]} commands at once", counts[-1], times, folders)
    publish("The time to compress a whole encoder with several workers", table(lines), options)


if __name__ == "__main__":
    main()
