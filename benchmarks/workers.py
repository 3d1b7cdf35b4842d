"""Question: how much sooner is a folder compressed by several workers, and are its bytes the same?

``kflats compress`` of all-MiniLM-L6-v2 to 8 MB without texts or proof, one thread a process, on as many cores
as are named in the last column. Seconds from the start of the command to its end, imports and all; "speed-up" against
one process. CPU seconds are those of all workers together.

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


def main() -> None:
    options = arguments(__doc__, size="8MB", counts="1,2")
    lines: list[dict[str, object]] = []
    found: list[tuple[float, str]] = []
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as place:
        for count in map(int, options.counts.split(",")):
            out = Path(place) / f"workers-{count}"
            command = [sys.executable, "-m", "kflats", "compress", str(packaged_model()), "--size", options.size]
            command += ["--out", str(out), "--workers", str(count), "--no-proof", "--quiet"]
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
            spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            found.append((seconds, hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()))
            line: dict[str, object] = {"workers": count, "seconds": f"{seconds:.0f}", "CPU seconds": f"{spent:.0f}"}
            line |= {"speed-up": f"{found[0][0] / seconds:.2f}", "same bytes": found[-1][1] == found[0][1]}
            lines.append(line | {"cores": cores})
            print(lines[-1], flush=True)
    publish("The time to compress a whole encoder with several workers", table(lines), options)


if __name__ == "__main__":
    main()
