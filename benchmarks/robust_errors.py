"""Question: how much lower is the l1 error of the real table where it is minimised directly, against the SVD's?

The 30522 x 384 embedding table at rank d/2; the sum of |A - UV| against the SVD's of the same rank.
``experiments/robust_planted.py`` compares these fits where outliers are planted.

    python benchmarks/robust_errors.py --write benchmarks/results/robust_errors.md
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from _common import arguments, embedding_table, markdown, publish

from kflats.numerics.entrywise import entrywise_low_rank
from kflats.numerics.flats import Stopping
from kflats.numerics.subspace import robust_subspace
from kflats.numerics.svd import truncated_svd


def main() -> None:
    options = arguments(__doc__, rows=0)
    table = embedding_table()
    if options.rows:
        table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[: options.rows]]
    rank, lines, base = table.shape[1] // 2, list[list[str]](), 0.0
    ways: dict[str, Callable[[], Any]] = {
        "SVD": lambda: truncated_svd(table, rank),
        "entrywise p=1, to 1e-4": lambda: entrywise_low_rank(table, rank, stop=Stopping(1e-4, 300)),
        "subspace, sum of distances": lambda: robust_subspace(table, rank),
    }
    for name, fit in ways.items():
        start = time.process_time()
        made = fit()
        taken = f"{time.process_time() - start:.0f} s" if lines else ""
        error = float((table - made.coordinates @ made.basis).abs().sum(dtype=torch.float64))
        base = base or error
        lines.append([name, f"{error:.0f}", f"{error / base:.3f}", f"{base / error:.2f}", taken])
    head = [f"rank {rank}: l1", "error", "error / SVD's", "SVD's / error", "CPU time"]
    publish("The l1 error of the embedding table", markdown(head, lines), options)


if __name__ == "__main__":
    main()
