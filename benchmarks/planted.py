"""Claim: with the default seeding all 36 planted settings are recovered at adjusted Rand >= .99.

n = 2000 k rows on k random j-dimensional flats in d dimensions, Gaussian inside the flat; noise is Gaussian
with that share of the signal's expected norm (``--per-entry 1``: that standard deviation in every entry).
Where noise hides the truth itself, the last column shows what the true flats would score: no method can do better.

    python benchmarks/planted.py --write benchmarks/results/planted.md
"""

from __future__ import annotations

import itertools
import math

import torch
from _common import arguments, markdown, publish
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

from kflats.numerics.fit import fit_flats
from kflats.numerics.flats import WeightedRows, assign, squared_norms
from kflats.numerics.rows import TensorRows


def planted(k: int, j: int, d: int, deviation: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rows with Gaussian noise of a standard deviation, the flat of each, and the flats (k, j, d)."""
    generator = torch.Generator().manual_seed(1000 * k + 10 * j + d)
    truth = torch.randint(0, k, (2000 * k,), generator=generator)
    flats = torch.linalg.qr(torch.randn(k, d, j, generator=generator)).Q.transpose(1, 2)
    a = torch.einsum("nj,njd->nd", torch.randn(len(truth), j, generator=generator), flats[truth])
    return a + deviation * torch.randn(a.shape, generator=generator), truth, flats


def main() -> None:
    options = arguments(__doc__, **{"per-entry": 0})
    lines, recovered, ceiling = [], 0, 0
    for k, j, d, noise in itertools.product((3, 5, 10), (2, 5, 20), (32, 128), (0.0, 0.05)):
        a, truth, flats = planted(k, j, d, noise * (1.0 if options.per_entry else math.sqrt(j / d)))
        rows = TensorRows(a)
        score = adjusted_rand_score(truth, fit_flats(a, k, rank=j, seed=0).labels)
        best = adjusted_rand_score(truth, assign(WeightedRows(rows, squared_norms(rows)), tuple(flats)).labels)
        recovered += score >= 0.99
        ceiling += score >= min(0.99, best - 0.001)
        lines.append([k, j, d, noise, f"{score:.4f}", f"{best:.4f}"])
    body = (
        f"Recovered (adjusted Rand >= .99): **{recovered} of {len(lines)}**; as good as the true flats: "
        f"**{ceiling} of {len(lines)}**\n\n" + markdown(["k", "j", "d", "noise", "adjusted Rand", "true flats"], lines)
    )
    publish("Planted flats", body, options)


if __name__ == "__main__":
    main()
