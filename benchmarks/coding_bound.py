"""Question: are transform codes of the real embedding table at most .30 bits per weight above the Gaussian bound from 1
to 4 bits, all bytes of the file counted, unweighted and under token weights?

The bound is reverse water-filling over all variances w_i lambda_r, with lambda the spectrum of the (weighted) rows and
all weights 1 or those of the Zipf prior. The baselines have no spectrum to use: their errors are at their own sizes.

    python benchmarks/coding_bound.py --write benchmarks/results/coding_bound.md
"""

from __future__ import annotations

import time

import torch
from _common import arguments, embedding_table, markdown, publish
from torch import Tensor

from kflats.calibration.counting import zipf_prior
from kflats.codecs.streams import stored_bytes
from kflats.demo import packaged_model
from kflats.evaluation.comparing import load_tokenizer
from kflats.importance import ZipfPrior
from kflats.importance.measured import Measured
from kflats.matrices.coded_build import from_transform
from kflats.numerics.coding.absmax import absmax_code
from kflats.numerics.coding.encode import transform_code
from kflats.numerics.coding.gaussian_bound import bound_bits
from kflats.numerics.coding.rotation import rotation_code


def error_share(found: Tensor, table: Tensor, weights: Tensor) -> float:
    """sum w |a - a^|^2 / sum w |a|^2."""
    w = weights.unsqueeze(1)
    return float((w * (found - table).double().square()).sum() / (w * table.double().square()).sum())


def main() -> None:
    options = arguments(__doc__, bits="4,3,2,1.5,1,0.7,0.5")
    table = embedding_table()
    n, d = table.shape
    prior = zipf_prior(load_tokenizer(packaged_model()), n)
    zipf = ZipfPrior().weigh(Measured(n, prior=prior)).left
    lines = []
    for name, weights in (("alike", torch.ones(n, dtype=torch.float64)), ("Zipf prior", zipf)):
        spectrum = torch.linalg.eigvalsh((table.double() * weights.unsqueeze(1)).T @ table.double()).clamp_min(0)
        for bits in map(float, options.bits.split(",")):
            began = time.perf_counter()
            code = transform_code(table, weights=weights, bits=bits)
            took = time.perf_counter() - began
            size = 8 * stored_bytes(from_transform(code)) / table.numel()
            error = error_share(code.dense(), table, weights)
            bound = bound_bits(spectrum, error, weights)
            fixed = 8 * code.fixed_bytes / table.numel()
            cells = [f"{size:.3f}", f"{error:.5f}", f"{bound:.3f}", f"{size - bound:.3f}", f"{fixed:.2f}"]
            lines.append([name, "transform", *cells, len(code.steps), code.rank, f"{took:.0f} s"])
            print(lines[-1], flush=True)
        for label, baseline in (
            ("int8 rows", absmax_code(table, 8)),
            ("int4, groups of 32", absmax_code(table, 4, 32)),
            ("int4 rows", absmax_code(table, 4)),
            *((f"rotation, {b} bits", rotation_code(table, b)) for b in (4, 3, 2, 1)),
        ):
            size, error = baseline.stored_bits / table.numel(), error_share(baseline.dense(), table, weights)
            bound = bound_bits(spectrum, error, weights)
            cells = [f"{size:.3f}", f"{error:.5f}", f"{bound:.3f}", f"{size - bound:.3f}", f"{size:.2f}"]
            lines.append([name, label, *cells, "", "", ""])
    head = [
        "weights",
        "code",
        "bits per weight",
        "error",
        "bound, bits",
        "above",
        "in memory",
        "classes",
        "rank",
        "time",
    ]
    publish(
        "Bits per weight of a coded embedding table, against the Gaussian bound",
        f"{n} x {d}; error = weighted squared error / weighted squared norm. Bits of the entropy-coded "
        "stream that a file holds and of the scales beside it: labels, axes, distributions, checksums, block ends.\n\n"
        + markdown(head, lines),
        options,
    )


if __name__ == "__main__":
    main()
