"""Question: are transform codes of the real embedding table at most .30 bits per weight above the Gaussian bound from 1
to 4 bits, all bytes of the file counted, unweighted and under token weights?

The bound is reverse water-filling over all variances w_i lambda_r, with lambda the spectrum of the (weighted) rows and
all weights 1 or those of the Zipf prior. The baselines have no spectrum to use: their errors are at their own sizes.

    python benchmarks/coding_bound.py --write benchmarks/results/coding_bound.md
"""

from __future__ import annotations

import time

import torch
from _common import arguments, embedding_table, publish
from _common import table as rendered
from _sentences import token_rows
from frontier.baseline import Coded
from frontier.baselines import Absmax, Rotated
from gaussian_bound import bound_bits
from torch import Tensor

from kflats.codecs.streams import stored_bytes
from kflats.codecs.transform import from_codes
from kflats.importance import ZipfPrior
from kflats.numerics.coding.encode import transform_code
from kflats.numerics.rows import TensorRows


def main() -> None:
    options = arguments(__doc__, bits="4,3,2,1.5,1,0.7,0.5")
    table = embedding_table()
    n, d = table.shape
    zipf = ZipfPrior().weigh(token_rows(n)).left
    lines = []

    def add(name: str, label: str, size: float, made: Tensor, weights: Tensor, **more: object) -> None:
        error = Coded(label, made, 0).error(table, weights)
        bound = bound_bits(spectrum, error, weights)
        line = {"weights": name, "code": label, "bits per weight": f"{size:.3f}", "error": f"{error:.5f}"}
        line |= {"bound, bits": f"{bound:.3f}", "above": f"{size - bound:.3f}", "in memory": f"{size:.2f}"}
        lines.append(line | {"classes": "", "rank": "", "time": ""} | more)
        print(lines[-1], flush=True)

    for name, weights in (("alike", torch.ones(n, dtype=torch.float64)), ("Zipf prior", zipf)):
        spectrum = torch.linalg.eigvalsh((table.double() * weights.unsqueeze(1)).T @ table.double()).clamp_min(0)
        for bits in map(float, options.bits.split(",")):
            began = time.perf_counter()
            nbytes = int(bits * table.numel() / 8)
            code = transform_code(
                TensorRows(table), nbytes, lambda code: stored_bytes(from_codes(code)), weights=weights
            )
            more = {"time": f"{time.perf_counter() - began:.0f} s"}
            matrix = from_codes(code)
            more |= {"classes": len(matrix.geometry.classes), "rank": matrix.geometry.rank}
            more |= {"in memory": f"{8 * matrix.nbytes / table.numel():.2f}"}
            size = 8 * stored_bytes(matrix) / table.numel()
            add(name, "transform", size, matrix.dense().detach(), weights, **more)
        for label, baseline in (
            ("int8 rows", Absmax(8)),
            ("int4, groups of 32", Absmax(4, 32)),
            ("int4 rows", Absmax(4)),
            *((f"rotation, {b} bits", Rotated(b)) for b in (4, 3, 2, 1)),
        ):
            coded = baseline.code(table)
            add(name, label, coded.bits, coded.table, weights)
    publish(
        "Bits per weight of a coded embedding table, against the Gaussian bound",
        f"{n} x {d}; error = weighted squared error / weighted squared norm. Bits of the entropy-coded "
        "stream that a file holds and of the scales beside it: labels, axes, distributions, checksums, block ends.\n\n"
        + rendered(lines),
        options,
    )


if __name__ == "__main__":
    main()
