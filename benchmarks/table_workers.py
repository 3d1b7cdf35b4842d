"""Question: are the bytes of a long table in files the same for any number of workers, and how long do they take?

Rows of 64 numbers in float16, in several ``.npy`` files: four Gaussians whose axes differ (``coded_flats.py``), one
drawn block with noise of its own in every repetition. ``kflats compress --table`` in 2 bits a number (4 in the fast
layout) with 1, 2 and 4 workers, one thread each, on as many cores as are named. Seconds from the start of the command
to its end; "speed-up" against one worker. All files of each folder are compared by their digests.

    python benchmarks/table_workers.py --write benchmarks/results/table_workers.md
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from _common import arguments, publish, table
from coded_flats import planted
from workers import took

KINDS = {"compact": ("2 bits", ""), "fast": ("4 bits", "--layout fast"), "compact, 4 flats": ("2 bits", "--flats 4")}
FILES = 5
BLOCK = 200_000


def write(folder: Path, rows: int) -> None:
    """The source, in ``FILES`` files."""
    gen = torch.Generator().manual_seed(2)
    block = planted(BLOCK)
    folder.mkdir()
    for number in range(FILES):
        count = rows // FILES
        path = folder / f"part-{number}.npy"
        file = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(count, block.shape[1]))
        for start in range(0, count, BLOCK):
            part = block[: min(BLOCK, count - start)]
            noise = torch.randn(part.shape, generator=gen).mul_(0.02)
            file[start : start + len(part)] = (part + noise).numpy().astype(np.float16)
        file.flush()


def digest(folder: Path) -> str:
    """Of the names and the bytes of all files."""
    whole = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        whole.update(path.name.encode())
        with path.open("rb") as file:
            while part := file.read(2**24):
                whole.update(part)
    return whole.hexdigest()


def main() -> None:
    options = arguments(__doc__, rows=20_000_000, counts="1,2,4", cache="")
    lines: list[dict[str, object]] = []
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=options.cache or None) as place:
        write(source := Path(place) / "source", options.rows)
        for kind, (size, how) in KINDS.items():
            alone, digests = 0.0, set[str]()
            for count in map(int, options.counts.split(",")):
                out = Path(place) / "coded"
                asked = ["--table", str(source), "--out", str(out), "--size", size, *how.split()]
                command = [sys.executable, "-m", "kflats", "compress", *asked, "--workers", str(count)]
                seconds, cpu = took([[*command, "--force", "--quiet"]])
                alone = alone or seconds
                digests.add(digest(out))
                line: dict[str, object] = {"table": f"{options.rows:,} x 64, {kind}", "workers": count}
                line |= {"seconds": f"{seconds:.0f}", "CPU seconds": f"{cpu:.0f}", "speed-up": f"{alone / seconds:.2f}"}
                lines.append(line | {"same bytes": len(digests) == 1, "cores": cores})
                print(lines[-1], flush=True)
    publish("A long table in files with several workers", table(lines), options)


if __name__ == "__main__":
    main()
