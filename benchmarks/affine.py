"""Are affine flats (a mean a flat, then a subspace) worth having? Measured on the clusters of a linear fit.

A mean costs d numbers, one coordinate of flat c costs n_c + d. By interlacing, lambda_r >= lambda'_r >= lambda_(r+1)
for the eigenvalues lambda of a cluster's Gram and lambda' of its centred Gram, so affine flats can gain at most one
coordinate a flat. The table gives the error with means at the same labels and ranks, at equal numbers
(the budget less k d is filled again), and that upper bound.

    python benchmarks/affine.py --write benchmarks/results/affine.md
"""

from __future__ import annotations

import torch
from _common import arguments, embedding_table, markdown, publish

from kflats.numerics.fit import fit_flats
from kflats.numerics.flats import fill
from kflats.numerics.gram import cluster_grams, top_eigenvectors
from kflats.numerics.rows import TensorRows


def main() -> None:
    options = arguments(__doc__, k=5)
    table = embedding_table()
    n, d = table.shape
    total = float(table.double().square().sum())
    rows, k = TensorRows(table), options.k
    lines = []
    for compression in (20, 40, 50, 60, 80, 90):
        budget = int((1 - compression / 100) * n * d)
        fit = fit_flats(table, k, budget=budget, seed=0)
        counts = torch.bincount(fit.labels.long(), minlength=k)
        grams = cluster_grams(rows, fit.labels, k)
        means = torch.stack([table[fit.labels == c].double().mean(0) for c in range(k)])
        centred = grams - counts.double()[:, None, None] * means[:, :, None] * means[:, None, :]
        spectra = torch.stack([top_eigenvectors(g, 1)[0] for g in centred])
        refilled = fill(spectra, counts + d, budget - k * d).ranks
        linear = sum(float(fit.spectra[c, r:].sum()) for c, r in enumerate(fit.ranks))
        affine = sum(float(spectra[c, r:].sum()) for c, r in enumerate(refilled))
        bound = sum(float(fit.spectra[c, r + 1 :].sum()) for c, r in enumerate(fit.ranks))
        lines.append(
            [
                f"{compression} %",
                f"{linear / total:.4f}",
                f"{affine / total:.4f}",
                f"{100 * (1 - affine / linear):+.2f} %",
                f"{100 * (1 - bound / linear):.2f} %",
            ]
        )
    head = ["compression", "linear flats", "affine flats, equal numbers", "gain", "gain at most (interlacing)"]
    title = f"Affine against linear flats, k={k}, relative squared error, unweighted"
    publish(title, markdown(head, lines), options)


if __name__ == "__main__":
    main()
