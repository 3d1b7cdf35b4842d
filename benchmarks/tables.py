"""Claim: coded tables lose least in equal bytes, are read at memory speed, and cost the same a row at any length.

Rows are drawn, not taken from a model: 64 columns whose standard deviations fall as j^-0.7 in turned axes, times norms
that follow a Zipf law, (rank / rows)^-0.25 in random order; float16, in .npy files of a million rows. Each reader runs
in a fresh process on one thread, over mapped files: from opening to the first row (modules are imported before), the
growth of private memory (RssAnon) over all reads, and random rows in batches of 4,096. Of five seconds the median and
the least are shown: in the first of them checksums are compared. The first row is timed by the clock, other times are
CPU times where nothing else is said. Errors are squared errors by squares, over all rows. In "4 bits" and "2 bits" no
folder is larger than so many bits a number; the trained part of faiss comes on top of its codes. Its scalar quantizer
searches its own ranges (RS_optim).

    python benchmarks/tables.py --write benchmarks/results/tables.md
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from _common import arguments, markdown, publish, resident

import kflats
from kflats.io import open_rows

D, PART, BATCH = 64, 1_000_000, 4096
FILES, ROWS = 240, 2**14  # files of a billion rows; rows in each are multiples of so many
READERS = ("float16", "int8", "sq", "pq", "kflats")


def make(folder: Path, n: int) -> list[Path]:
    """Files of a million rows."""
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(D, D)))[0].astype(np.float32)
    spread = (np.arange(1, D + 1) ** -0.7).astype(np.float32)
    paths = []
    for first in range(0, n, PART):
        g = np.random.default_rng([1, first])
        size = min(PART, n - first)
        paths.append(folder / f"rows-{first // PART:04d}.npy")
        out = np.lib.format.open_memmap(paths[-1], mode="w+", dtype=np.float16, shape=(size, D))
        for at in range(0, size, 65536):
            rows = g.standard_normal((min(65536, size - at), D), dtype=np.float32) * spread @ turn
            ranks = np.maximum(g.random(len(rows), dtype=np.float32), 1 / n)
            out[at : at + len(rows)] = rows * ranks[:, None] ** -0.25
    return paths


# Writers: what a reader needs, into a folder ----------------------------------------------------


def write_int8(source: list[Path], out: Path, n: int) -> None:
    codes = np.lib.format.open_memmap(out / "codes.npy", mode="w+", dtype=np.int8, shape=(n, D))
    scales = np.lib.format.open_memmap(out / "scales.npy", mode="w+", dtype=np.float16, shape=(n,))
    for at, block in open_rows(source).blocks(65536):
        scale = (block.abs().amax(1) / 127).to(torch.float16)
        scales[at : at + len(block)] = scale.numpy()
        codes[at : at + len(block)] = (block / scale.float().unsqueeze(1)).round().clamp(-127, 127).numpy()


def write_faiss(kind: str, bits: int, source: list[Path], out: Path, n: int) -> None:
    import faiss

    faiss.omp_set_num_threads(1)
    if kind == "sq":
        index = faiss.IndexScalarQuantizer(D, faiss.ScalarQuantizer.QT_4bit)
        index.sq.rangestat = faiss.ScalarQuantizer.RS_optim
    else:
        index = faiss.IndexPQ(D, bits * D // 8, 8)
    rows = open_rows(source)
    index.train(rows.take(torch.arange(65536) * (n // 65536)).numpy())
    faiss.write_index(index, str(out / "trained"))
    codes = np.lib.format.open_memmap(out / "codes.npy", mode="w+", dtype=np.uint8, shape=(n, index.sa_code_size()))
    for at, block in rows.blocks(65536):
        codes[at : at + len(block)] = index.sa_encode(block.numpy())


# Readers: ids -> rows ---------------------------------------------------------------------------


def reader(kind: str, folder: Path) -> Callable[[np.ndarray], np.ndarray]:
    if kind == "float16":
        rows = open_rows(folder)
        return lambda ids: rows.take(torch.from_numpy(ids)).numpy()
    if kind == "kflats":
        return kflats.open_table(folder).rows
    codes = np.lib.format.open_memmap(folder / "codes.npy", mode="r")
    if kind == "int8":
        scales = np.lib.format.open_memmap(folder / "scales.npy", mode="r")
        return lambda ids: codes[ids] * scales[ids].astype(np.float32)[:, None]
    import faiss

    index = faiss.read_index(str(folder / "trained"))
    return lambda ids: index.sa_decode(codes[ids])


def read(kind: str, folder: str, n: int) -> None:
    """Print what one reader takes."""
    import faiss

    faiss.omp_set_num_threads(1)
    torch.set_num_threads(1)
    warm = torch.randn(BATCH, D) @ torch.randn(D, D), kflats.open_table
    del warm
    g, before = np.random.default_rng(0), resident("RssAnon")
    start = time.perf_counter()
    rows = reader(kind, Path(folder))
    rows(np.array([n // 2]))
    first = time.perf_counter() - start
    speeds = []
    while len(speeds) < 5:
        start, count = time.process_time(), 0
        while time.process_time() - start < 1:
            rows(g.integers(0, n, BATCH))
            count += BATCH
        speeds.append(count / (time.process_time() - start))
    grown = resident("RssAnon") - before
    print(json.dumps({"first": first, "least": min(speeds), "speed": sorted(speeds)[2], "memory": grown}))


def error_of(rows: Callable[[np.ndarray], np.ndarray], source: list[Path]) -> float:
    error = total = 0.0
    for at, block in open_rows(source).blocks(65536):
        left = torch.from_numpy(np.ascontiguousarray(rows(np.arange(at, at + len(block))))) - block
        error, total = error + float(left.double().square().sum()), total + float(block.double().square().sum())
    return error / total


# Writing ----------------------------------------------------------------------------------------


def write(layout: str, size: str, shard_rows: str, out: str, *source: str) -> None:
    """Compress in this process; print seconds and the peak of private memory. ``shard_rows`` 0: as many as usual."""
    torch.set_num_threads(1)
    warm = torch.linalg.eigh(torch.eye(D)), kflats.compress_table
    del warm
    base, peak, done = resident("RssAnon"), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], resident("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    start, cpu = time.perf_counter(), time.process_time()
    index = kflats.compress_table(
        source,
        out,
        size=size,
        layout=layout,  # type: ignore[arg-type]
        shard_rows=int(shard_rows) or None,
        quiet=True,
    )
    spent = {"wall": time.perf_counter() - start, "cpu": time.process_time() - cpu, "error": index.relative_error}
    done.set()
    thread.join()
    print(json.dumps(spent | {"memory": peak[0] - base}))


def child(*given: object) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, *map(str, given)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def compared(source: list[Path], n: int, place: Path) -> str:
    """All readers on one table."""
    torch.set_num_threads(1)
    lines = []
    ways = [("float16, mapped", "float16", 0, ""), ("int8, a scale a row", "int8", 8, "")]
    for bits in (4, 2):
        ways += [("faiss, scalar quantizer", "sq", bits, "")] if bits == 4 else []
        ways += [("faiss, PQ", "pq", bits, "")]
        ways += [(f"**kflats, {layout}**", "kflats", bits, layout) for layout in ("fast", "compact")]
    for name, kind, bits, layout in ways:
        folder = source[0].parent if kind == "float16" else Path(tempfile.mkdtemp(dir=place)) / "out"
        if kind == "kflats":
            child("write", layout, f"{bits} bits", 0, folder, *source)
        elif kind != "float16":
            folder.mkdir()
            write_int8(source, folder, n) if kind == "int8" else write_faiss(kind, bits, source, folder, n)
        error = error_of(reader(kind, folder), source)
        total = sum(path.stat().st_size for path in source) if kind == "float16" else size_of(folder)
        took = child("read", kind, folder, n)
        lines.append(
            [
                name,
                f"{8 * total / (n * D):.3f}",
                "0" if kind == "float16" else f"{error:.2e}",
                f"{took['speed']:,.0f}",
                f"{took['least']:,.0f}",
                f"{1e3 * took['first']:.1f} ms",
                f"{took['memory'] / 1e6:.1f} MB",
            ]
        )
        print(lines[-1], flush=True)
    head = [
        "stored as",
        "bits a number",
        "error",
        "rows a second",
        "least of five seconds",
        "first row",
        "private memory",
    ]
    return markdown(head, lines)


def scaled(source: list[Path], counts: list[int], bits: int, place: Path) -> str:
    """Time and memory of writing by rows; speed and memory of reading. The longest in many files too."""
    lines = []
    many = max(1, counts[-1] // FILES // ROWS) * ROWS
    for layout in ("fast", "compact"):
        for n, shard_rows in [*((n, 0) for n in counts), (counts[-1], many)]:
            out = Path(tempfile.mkdtemp(dir=place)) / "out"
            took = child("write", layout, f"{bits} bits", shard_rows, out, *source[: n // PART])
            back = child("read", "kflats", out, n)
            lines.append(
                [
                    layout,
                    f"{n:,}",
                    len(list(out.glob("rows-*"))),
                    f"{1e6 * took['cpu'] / n:.2f}",
                    f"{1e6 * took['wall'] / n:.2f}",
                    f"{took['memory'] / 1e9:.2f} GB",
                    f"{8 * size_of(out) / (n * D):.4f}",
                    f"{took['error']:.2e}",
                    f"{back['speed']:,.0f}",
                    f"{1e3 * back['first']:.1f} ms",
                    f"{back['memory'] / 1e6:.1f} MB",
                ]
            )
            print(lines[-1], flush=True)
            shutil.rmtree(out)
    head = ["layout", "rows", "files", "writing: microseconds a row", "by the clock", "private memory", "bits a number"]
    return markdown([*head, "error", "reading: rows a second", "first row", "private memory"], lines)


def main() -> None:
    options = arguments(__doc__, rows=1_000_000, scaling="1000000,4000000", folder="")
    counts = [int(one) for one in options.scaling.split(",") if one]
    with tempfile.TemporaryDirectory(dir=options.folder or None) as place:
        (parts := Path(place) / "source").mkdir()
        source = make(parts, max(options.rows, *counts, 0))
        few = source[: options.rows // PART]
        (own := Path(place) / "few").mkdir()
        for path in few:
            os.link(path, own / path.name)
        body = f"{options.rows:,} x {D}, all ways:\n\n"
        body += compared(sorted(own.iterdir()), options.rows, Path(place))
        if counts:
            body += (
                "\n\nWriting and reading in 3 bits a number, by rows (the last two columns are those of reading), the "
            )
            body += "longest table also in as many files as a billion rows make:\n\n"
            body += scaled(source, counts, 3, Path(place))
        publish("Tables in files: error, random rows, memory", body, options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["read"]:
        read(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    elif sys.argv[1:2] == ["write"]:
        write(*sys.argv[2:])
    else:
        main()
