"""Question: what do several flats, and weights of rows, bring to a table in files?

``compress_table`` in the compact layout, in equal bytes, with 1, 2, 4 and 8 flats: on four Gaussians whose axes differ
(``coded_flats.py``, here with norms by a lognormal law), and on 120,000 vectors of pairs of words, from hidden states
of all-MiniLM-L6-v2 (``coded_flats_long.py``). Then the word table of all-MiniLM-L6-v2, whose rows are weighted by how
often WikiText-2 (train) reads them, plus one. Error: squared error by squares, weighted where it says so. Seconds are
processor time on one thread, all passes included.

    python benchmarks/table_flats.py --write benchmarks/results/table_flats.md
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from _common import arguments, embedding_table, publish, table
from _sentences import sentences
from coded_flats import planted
from coded_flats_long import vectors
from torch import Tensor

from kflats import compress_table, open_table
from kflats.calibration.counting import count_tokens
from kflats.demo import packaged_model
from kflats.evaluation.outputs import load_tokenizer

FLATS = (1, 2, 4, 8)
BLOCK = 16384


def coded(rows: Tensor, bits: float, flats: int, weights: Tensor | None, judged: dict[str, Tensor]) -> dict[str, str]:
    """One table: the flats that it has, its bits, its errors under each of the ``judged`` weights, and its time."""
    n, d = rows.shape
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "rows.npy", rows.numpy())
        began = time.process_time()
        compress_table(
            folder / "rows.npy",
            folder / "coded",
            size=f"{bits} bits",
            flats=flats,
            row_weights=None if weights is None else weights.numpy(),
            quiet=True,
        )
        seconds = time.process_time() - began
        nbytes = sum(path.stat().st_size for path in (folder / "coded").iterdir())
        made = open_table(folder / "coded")
        lost = [
            (made.rows(ids) - rows[ids]).square().sum(1, dtype=torch.float64) for ids in torch.arange(n).split(BLOCK)
        ]
        axes = made.flats
    whole = rows.square().sum(1, dtype=torch.float64)
    errors = {name: float(torch.cat(lost) @ own) / float(whole @ own) for name, own in judged.items()}
    found = {"flats": f"{axes}", "bits stored": f"{8 * nbytes / (n * d):.3f}"}
    return found | {name: f"{error:.5f}" for name, error in errors.items()} | {"seconds": f"{seconds:.0f}"}


def of_flats(name: str, rows: Tensor, bits: float) -> list[dict[str, object]]:
    """Lines of one table in equal bytes."""
    lines: list[dict[str, object]] = []
    for flats in FLATS:
        found = coded(rows, bits, flats, None, {"error": torch.ones(len(rows), dtype=torch.float64)})
        first = float(lines[0]["error"]) if lines else float(found["error"])  # type: ignore[arg-type]
        shape = f"{len(rows):,} x {rows.shape[1]}"
        part: dict[str, object] = {"table": name, "shape": shape, "bits": f"{bits:g}", "flats asked": flats, **found}
        lines.append(part | {"of one flat's": f"**{float(found['error']) / first:.3f}**"})
        print(lines[-1], flush=True)
    return lines


def of_weights(bits: float) -> list[dict[str, object]]:
    """Lines of the word table, without and with weights."""
    rows = embedding_table().float()
    counts = count_tokens(sentences("wikitext2"), load_tokenizer(packaged_model()), len(rows)).double() + 1
    judged = {"error by reads": counts, "rows alike": torch.ones_like(counts)}
    lines: list[dict[str, object]] = []
    for name, weights in (("none", None), ("reads", counts), ("root of reads", counts.sqrt())):
        lines.append({"weights": name, "bits": f"{bits:g}", **coded(rows, bits, 1, weights, judged)})
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    options = arguments(__doc__, bits="1,2", rows=1_000_000, pairs=120_000)
    sizes = list(map(float, options.bits.split(",")))
    gen = torch.Generator().manual_seed(1)
    drawn = planted(options.rows)
    drawn *= torch.randn(len(drawn), 1, generator=gen).mul(0.5).exp()
    lines = [line for bits in sizes for line in of_flats("planted", drawn, bits)]
    tables, read = vectors(options.pairs)
    lines += [line for bits in sizes for line in of_flats("pairs of words", tables["pairs of words"], bits)]
    heavy = [line for bits in sizes for line in of_weights(bits)]
    body = f"{table(lines)}\n\nRead: {read}\n\n{table(heavy)}"
    publish("Tables in files: several flats, and weights of rows", body, options)


if __name__ == "__main__":
    main()
