"""Claim: a prefix rank per row of an ordered basis stores a real 30522 x 384 table with less squared error
than ranks per flat, at equal bytes: Zipf weights at 50 and 80 % compression, and no weights at 50 and 80 %.

Error is relative to a weighted SVD in the same bytes; labels (one byte a row) are counted for all but SVD.

    python benchmarks/nested.py --write benchmarks/results/nested.md
"""

from __future__ import annotations

import torch
from _common import arguments, embedding_table, markdown, publish
from _sentences import token_rows

from kflats.importance import ZipfPrior
from kflats.importance.protocol import Weighting
from kflats.methods import SVD, Flats, Problem
from kflats.methods.matrix_error import row_errors
from kflats.numerics.rows import TensorRows

METHODS = {
    "k=5, uniform ranks": Flats(k=5, ranks="uniform", exact=False),
    "k=5, filled (levels=1)": Flats(k=5),
    "k=1, levels=8": Flats(k=1, nested_ranks=8),
    "k=1, levels=16": Flats(k=1, nested_ranks=16),
    "k=5, levels=4": Flats(k=5, nested_ranks=4),
}


def main() -> None:
    options = arguments(__doc__, only="")
    rows = TensorRows(embedding_table())
    n, d = rows.shape
    zipf = ZipfPrior(power=1, floor=0.1).weigh(token_rows(n))
    settings = {
        "Zipf, 50 %": (zipf, 0.5),
        "Zipf, 80 %": (zipf, 0.8),
        "unweighted, 50 %": (Weighting(left=torch.ones(n)), 0.5),
        "unweighted, 80 %": (Weighting(left=torch.ones(n)), 0.8),
    }
    settings = {name: value for name, value in settings.items() if options.only in name}
    lines = {name: [name] for name in METHODS}
    for setting, (weighting, compression) in settings.items():
        problem = Problem(rows, int((1 - compression) * n * d) * 4, 4, weighting=weighting)
        weights = weighting.row_weights
        svd = float((weights * row_errors(rows, SVD().fit(problem).matrix)).sum())
        for name, method in METHODS.items():
            made = method.fit(problem)
            assert made.matrix.num_values * 4 + n <= problem.nbytes
            error = float((weights * row_errors(rows, made.matrix)).sum()) / svd
            lines[name].append(f"{error:.3f} ({made.seconds:.0f} s)")
            print(setting, name, lines[name][-1], flush=True)
    title = "Prefix ranks per row: squared error relative to weighted SVD in the same bytes (seconds to fit)"
    publish(title, markdown(["", *settings], list(lines.values())), options)


if __name__ == "__main__":
    main()
