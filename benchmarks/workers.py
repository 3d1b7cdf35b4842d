"""Question: how much sooner is a folder compressed by several workers, and are its bytes the same?

``kflats compress`` of all-MiniLM-L6-v2 to 8 MB without texts or proof, one thread a process, on as many cores
as are named in the last column. Seconds from the start of the command to its end, imports and all (of modules that
Python has compiled before); CPU seconds are those of all workers together. Each round runs every line once; "speed-up"
is against one process of the same round. The table has the medians of all rounds, and the least and the largest
speed-up.

The last line is what the machine allows: as many commands of one process each, at once, which divide nothing and wait
for nothing. They share caches and memory; "speed-up" is then how many times as much work is done in a second.

    python benchmarks/workers.py --write benchmarks/results/workers.md

``--at-once 0`` leaves that line out.
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

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


@dataclass
class Line:
    """What one line of the table is made of, a number for each round."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    speed_ups: list[float] = field(default_factory=list)


def main() -> None:
    options = arguments(__doc__, size="8MB", counts="1,2", rounds=3, at_once=1)
    lines: dict[str, Line] = {}
    digests, cores = set[str](), len(os.sched_getaffinity(0))
    counts = [int(count) for count in options.counts.split(",")]

    def run(name: str, commands: list[list[str]], folders: list[Path], alone: float | None) -> float:
        times = took(commands)
        for out in folders:
            digests.add(hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest())
            shutil.rmtree(out)
        line = lines.setdefault(name, Line())
        line.seconds.append(times[0])
        line.cpu_seconds.append(times[1])
        line.speed_ups.append(len(commands) * (alone or times[0]) / times[0])
        print(f"{name}: {times[0]:.0f} s, speed-up {line.speed_ups[-1]:.2f}", flush=True)
        return times[0]

    with tempfile.TemporaryDirectory() as place:
        # One layer, not counted: modules are compiled when they are first imported, and files are read from the disk.
        took([command(Path(place) / "first", "--keep", "90%", "--weights", "pooler.dense", "--samples", "8")])
        out, beside = Path(place) / "out", [Path(place) / f"out-{i}" for i in range(counts[-1])]
        for _ in range(options.rounds):
            alone: float | None = None
            for count in counts:
                asked = command(out, "--size", options.size, "--workers", str(count))
                seconds = run(str(count), [asked], [out], alone)
                alone = alone or seconds
            if options.at_once:
                several = [command(folder, "--size", options.size) for folder in beside]
                run(f"{counts[-1]} commands at once", several, beside, alone)
    body = [
        {
            "workers": name,
            "seconds": f"{median(line.seconds):.0f}",
            "CPU seconds": f"{median(line.cpu_seconds):.0f}",
            "speed-up": f"{median(line.speed_ups):.2f}",
            "of all rounds": f"{min(line.speed_ups):.2f} to {max(line.speed_ups):.2f}",
            "same bytes": len(digests) == 1,
            "cores": cores,
        }
        for name, line in lines.items()
    ]
    publish("The time to compress a whole encoder with several workers", table(body), options)


if __name__ == "__main__":
    main()
