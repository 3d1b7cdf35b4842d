"""Claim: Lewis weights give the ||.||_p-SVD of a 30522 x 384 table with its proved constant, in about the time of a
thin SVD; within half a per cent of that constant, in half of it (p <= 2).

Iterations, certificate and time for each p, beside numpy's thin SVD. `experiments/distortion.py` and
`experiments/loewner.py` compare the distortion of ellipsoids.

    python benchmarks/lewis.py --write benchmarks/results/lewis.md
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from _common import arguments, embedding_table, markdown, median_pair, publish
from torch import Tensor

from kflats.numerics.robust_svd import Ellipsoid, Lewis


def timed(function: Callable[[], Ellipsoid]) -> tuple[Ellipsoid, float]:
    start = time.perf_counter()
    found = function()
    return found, time.perf_counter() - start


def on_the_table(table: Tensor, rounds: int) -> str:
    """Iterations, certificate and time for each p."""
    matrix, d = table.numpy(), table.shape[1]

    def svd() -> object:
        return np.linalg.svd(matrix, full_matrices=False)

    lines = []
    for p in (0.5, 1.0, 1.25, 1.5, 1.75, 2.0, 4.0, 8.0):
        limit = d ** abs(1 - p / 2)
        found = Lewis().fit(table, p)
        three, _, early = median_pair(lambda p=p: Lewis(iterations=3).fit(table, p), svd, rounds)
        whole, baseline, ratio = median_pair(lambda p=p: Lewis().fit(table, p), svd, rounds)
        after = min(found.bounds[:3]) / limit - 1
        lines.append(
            [p, found.iterations, f"{found.bound / limit - 1:.1e}", f"{100 * after:.2f} %", f"{three:.2f} s"]
            + [f"{whole:.2f} s", f"{baseline:.2f} s", f"**{early:.2f}**", f"**{ratio:.2f}**"]
        )
        print(lines[-1], flush=True)
    head = ["p", "iterations", "certificate over its limit", "after 3", "3 iterations", "converged", "numpy thin SVD"]
    return markdown([*head, "3 iterations / SVD", "converged / SVD"], lines)


def main() -> None:
    options = arguments(__doc__, rounds=5)
    publish("Lewis weights, 30522 x 384", on_the_table(embedding_table(), options.rounds), options)


if __name__ == "__main__":
    main()
