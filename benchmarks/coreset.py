"""Question: on a million rows, is EM that starts from a coreset faster than EM that starts from all, at equal error?

Synthetic: k=5 random j-dimensional flats of unequal size (half, quarter, ...), noise of 10 %, one million rows. Real:
the 30522 x 384 embedding table. "All rows" seeds and climbs on the whole table; "published" is EM from a random
partition; "default" is what ``fit_flats`` does anyway, seeds on 8192 rows and a climb on 65536, drawn by energy: a
coreset must beat that. The ratio of time is to "all rows", errors are those of the final EM on all rows; the last
column is the error of the coreset's own flats before that.

    python benchmarks/coreset.py --write benchmarks/results/coreset.md
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from _common import arguments, embedding_table, markdown, publish
from torch import Tensor

from kflats.numerics.assign import assign, squared_norms
from kflats.numerics.coreset import Coreset
from kflats.numerics.fit import fit_flats
from kflats.numerics.flats import FlatsFit, RankSpec, WeightedRows
from kflats.numerics.initialization import start_uniform
from kflats.numerics.loss import Squared
from kflats.numerics.rows import TensorRows

K = 5


def synthetic(n: int, d: int, rank: int) -> Tensor:
    gen = torch.Generator().manual_seed(0)
    share = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    truth = torch.multinomial(share, n, replacement=True, generator=gen)
    flats = torch.linalg.qr(torch.randn(K, d, rank, generator=gen)).Q.transpose(1, 2)
    spread = torch.logspace(0, -1, rank)  # directions of a flat that few rows show
    a = 0.1 * (rank / d) ** 0.5 * torch.randn(n, d, generator=gen)
    for c in range(K):
        inside = (truth == c).nonzero().squeeze(1)
        a[inside] += (torch.randn(len(inside), rank, generator=gen) * spread) @ flats[c]
    return a


def everywhere(a: Tensor, rank: int, seed: int) -> FlatsFit:
    with patch("kflats.numerics.initialization.FILL_SAMPLE", len(a)):
        return fit_flats(a, K, rank=rank, seed=seed, sample=len(a))


def own_error(a: Tensor, rank: int, coreset: Coreset, seed: int) -> float:
    """The error on all rows of the flats that the full EM starts from."""
    rows = TensorRows(a)
    cloud = WeightedRows(rows, squared_norms(rows))
    gen = torch.Generator().manual_seed(seed)
    start = start_uniform(cloud, RankSpec(K, rank=rank), Squared(), "auto", 8192, coreset, gen, None)
    return float("nan") if start.bases is None else assign(rows, start.bases, cloud.norms2).objective


def compare(name: str, a: Tensor, rank: int, sizes: tuple[int, ...], seeds: int) -> str:
    total = float(a.double().square().sum())
    ways: dict[str, Callable[[int], FlatsFit]] = {
        "all rows": lambda seed: everywhere(a, rank, seed),
        "published": lambda seed: fit_flats(a, K, rank=rank, start="random", seed=seed),
        "default": lambda seed: fit_flats(a, K, rank=rank, seed=seed),
    }
    cores = {f"ridge, {size}": Coreset(size) for size in sizes}
    for label, core in cores.items():
        ways[label] = lambda seed, core=core: fit_flats(a, K, rank=rank, coreset=core, seed=seed)
    lines, reference = [], 1.0
    for label, fit_with in ways.items():
        times, errors, steps = [], [], []
        for seed in range(seeds):
            began = time.perf_counter()
            fit = fit_with(seed)
            times.append(time.perf_counter() - began)
            errors.append(fit.error / total)
            steps.append(len(fit.objective))
        if label == "all rows":
            reference = statistics.median(times)
        own = own_error(a, rank, cores[label], 0) / total if label in cores else None
        lines.append(
            [
                label,
                f"{statistics.median(times):.2f} s",
                f"**{reference / statistics.median(times):.1f}**",
                f"{statistics.mean(errors):.5f}",
                f"{max(errors):.5f}",
                f"{statistics.mean(steps):.0f}",
                "" if own is None else f"{own:.5f}",
            ]
        )
        print(lines[-1], flush=True)
    head = [name, "a fit", "times faster", "mean relative error", "worst", "iterations on all rows", "coreset's flats"]
    return markdown(head, lines)


def main() -> None:
    options = arguments(__doc__, rows=1_000_000, columns=64, rank=8, seeds=3)
    a = synthetic(options.rows, options.columns, options.rank)
    first = compare(
        f"{options.rows} x {options.columns}, j={options.rank}", a, options.rank, (8192, 32768), options.seeds
    )
    table = embedding_table()
    second = compare("30522 x 384, j=180", table, 180, (8192, 16384), options.seeds)
    publish("Coresets", first + "\n\n" + second, options)


if __name__ == "__main__":
    main()
