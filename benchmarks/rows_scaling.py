"""Claim: cost is linear in rows from 1e5 to 1e7: microseconds a row flat within 15 %, below 0.5 GB beyond torch.

A synthetic table (10 flats of rank 16, and so much noise that EM goes on) is written to a memory-mapped file, block by
block, and fitted with k=10 flats of rank 16 from disk in a fresh process. Timed per row: the check for NaN, row norms,
EM from the seeds until the objective falls no more, at most 6 iterations, and the exact refit. Seeding happens on a
sample of one size whatever n is; its seconds are a column of their own. Memory is the peak of anonymous pages over
all of it (the mapped file's pages are the kernel's), less what importing torch takes.

    python benchmarks/rows_scaling.py --write benchmarks/results/rows_scaling.md
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from _common import arguments, markdown, publish, resident

from kflats.numerics.fit import fit_flats
from kflats.numerics.flats import RankSpec, Start, Stopping, WeightedRows, assign, em, squared_norms
from kflats.numerics.rows import TensorRows, check_finite

K, RANK, ITERATIONS = 10, 16, 6


def make(path: Path, n: int, d: int) -> None:
    generator = torch.Generator().manual_seed(0)
    flats = torch.linalg.qr(torch.randn(K, d, RANK, generator=generator)).Q.transpose(1, 2)
    with path.open("wb") as file:
        for start in range(0, n, 50_000):
            size = min(50_000, n - start)
            part = torch.cat([torch.randn(size // K, RANK, generator=generator) @ flats[c] for c in range(K)])
            part = part[torch.randperm(len(part), generator=generator)]
            part.add_(torch.rand(part.shape, generator=generator).sub_(0.5), alpha=0.5)
            file.write(memoryview(part.numpy()))


def child(path: str, n: int, d: int) -> None:
    """Fit, and print microseconds a row and the peak of anonymous memory."""
    base, peak, done = resident("RssAnon"), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], resident("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    rows = TensorRows(torch.from_file(path, shared=False, size=n * d).view(n, d))
    start = time.perf_counter()
    seeds = fit_flats(rows.take(torch.linspace(0, n - 1, 8192).long()), K, rank=RANK, seed=0)
    seeding = time.perf_counter() - start
    start = time.perf_counter()
    check_finite(rows)
    cloud = WeightedRows(rows, squared_norms(rows))
    labels = assign(cloud, seeds.bases).labels
    # A tolerance below 0: not to stop early.
    fit = em(cloud, RankSpec(K, rank=RANK), Start(labels), Stopping(-1.0, ITERATIONS))
    took = time.perf_counter() - start
    done.set()
    thread.join()
    print(took / n * 1e6, (peak[0] - base) / 1e9, seeding, len(fit.objective))


def main() -> None:
    if len(sys.argv) == 5 and sys.argv[1] == "child":
        child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    options = arguments(__doc__, largest=10_000_000, dims="128,384", folder=tempfile.gettempdir())
    lines = []
    for d in map(int, options.dims.split(",")):
        for n in (100_000, 1_000_000, 10_000_000):
            if n > options.largest:
                continue
            path = Path(options.folder) / f"kflats-rows-{n}-{d}.bin"
            try:
                make(path, n, d)
                found = subprocess.run(
                    [sys.executable, __file__, "child", str(path), str(n), str(d)],
                    check=True,
                    capture_output=True,
                    text=True,
                ).stdout.split()
            finally:
                path.unlink(missing_ok=True)
            lines.append([d, f"{n:,}", float(found[0]), float(found[1]), float(found[2]), int(found[3])])
            print(lines[-1], flush=True)
    cells = []
    for d, n, micro, memory, seeding, steps in lines:
        own = [line[2] for line in lines if line[0] == d]
        cells.append([d, n, f"{micro:.2f}", f"{micro / own[-1]:.3f}", f"{memory:.3f} GB", f"{seeding:.1f} s", steps])
    head = ["d", "rows", "microseconds a row", "ratio to the largest", "anonymous memory beyond torch", "seeding, once"]
    title = f"Cost by rows, k={K}, rank {RANK}, at most {ITERATIONS} iterations"
    publish(title, markdown([*head, "falls of the objective"], cells), options)


if __name__ == "__main__":
    main()
