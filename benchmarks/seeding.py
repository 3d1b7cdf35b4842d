"""What the default start gains over a random partition: error on the real table, flats recovered on planted clouds.

Real: 30522 x 384, k=5, j=180, unweighted, uniform ranks, mean over seeds. Planted: 9 settings of
benchmarks/planted.py (k in 3, 5, 10; j in 2, 5, 20; d = 128, noise .05). Every seeding then runs the same EM.

    python benchmarks/seeding.py --write benchmarks/results/seeding.md
"""

from __future__ import annotations

import itertools
import math
import statistics
import time

from _common import arguments, embedding_table, markdown, publish
from planted import planted
from sklearn.metrics import adjusted_rand_score

from kflats.numerics.fit import fit_flats

STARTS = ("auto", "random")


def main() -> None:
    options = arguments(__doc__, seeds=3)
    table = embedding_table()
    total = float(table.double().square().sum())
    settings = itertools.product((3, 5, 10), (2, 5, 20))
    clouds = [(k, j, *planted(k, j, 128, 0.05 * math.sqrt(j / 128))[:2]) for k, j in settings]
    lines = []
    for start in STARTS:
        errors, steps, times = [], [], []
        for seed in range(options.seeds):
            began = time.perf_counter()
            fit = fit_flats(table, 5, rank=180, start=start, seed=seed)
            times.append(time.perf_counter() - began)
            errors.append(fit.error / total)
            steps.append(len(fit.objective))
        found = sum(
            adjusted_rand_score(truth, fit_flats(a, k, rank=j, start=start, seed=0).labels) >= 0.99
            for k, j, a, truth in clouds
        )
        lines.append(
            [
                start,
                f"{statistics.mean(errors):.4f}",
                f"{max(errors):.4f}",
                f"{statistics.mean(steps):.0f}",
                f"{statistics.median(times):.1f} s",
                f"{found} of {len(clouds)}",
            ]
        )
        print(lines[-1], flush=True)
    head = ["start", "mean relative error", "worst", "iterations on all rows", "a fit", "planted found"]
    title = "Seedings"
    publish(title, markdown(head, lines), options)


if __name__ == "__main__":
    main()
