"""Claim: a 3072 x 768 layer under RowFisher at rank 253 is factorized >= 5 x faster than by numpy's full SVD.

The baseline is what the paper's formula asks for literally (FWSVD, eq. 6): np.linalg.svd of the matrix scaled by
the square roots of the row weights, full matrices as by default, then truncation and the scaling undone. Ours is
the whole call of the method, checks and the storing included. Both compute in float32 from the same layer, whose
spectrum decays as a trained one's; weights are spread over four orders of magnitude, as measured Fisher
information is. Pairs are interleaved, medians reported, and both weighted errors, which must agree.

    python benchmarks/linear_svd.py --write benchmarks/results/linear_svd.md
"""

from __future__ import annotations

import numpy as np
import torch
from _common import arguments, markdown, median_pair, publish, seconds
from torch import Tensor

from kflats.importance import RowFisher
from kflats.importance.protocol import Measured
from kflats.matrices.registry import LowRankMatrix
from kflats.methods import SVD, Problem
from kflats.methods.matrix_error import weighted_error
from kflats.numerics.rows import TensorRows


def layer(n: int, d: int) -> tuple[Tensor, Tensor]:
    """A matrix (n, d) of singular values 1 / (20 + i), and the Fisher information of its rows (n,)."""
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(n, min(n, d), generator=generator)).Q
    right = torch.linalg.qr(torch.randn(d, min(n, d), generator=generator)).Q
    matrix = left / (20 + torch.arange(min(n, d))) @ right.T
    return matrix.contiguous(), 10 ** (4 * torch.rand(n, generator=generator) - 8)


def full_svd(matrix: np.ndarray, weights: np.ndarray, rank: int, *, full_matrices: bool = True) -> LowRankMatrix:
    """Scale, factorize whole, truncate, undo the scaling."""
    root = np.sqrt(weights)[:, None]
    u, s, v = np.linalg.svd(matrix * root, full_matrices=full_matrices)
    return LowRankMatrix(torch.from_numpy(u[:, :rank] * s[:rank] / root), torch.from_numpy(v[:rank]))


def main() -> None:
    options = arguments(__doc__, n=3072, d=768, rank=253, rounds=5)
    n, d, rank = options.n, options.d, options.rank
    matrix, fisher = layer(n, d)
    weighting = RowFisher().weigh(Measured(n, row_fisher=fisher, columns=d))
    problem = Problem(TensorRows(matrix), SVD().cost((n, d), rank, 4), 4, weighting)
    a, w = matrix.numpy(), (fisher / d).numpy()

    body = []
    for name, whole in (("full, as by default", True), ("thin (full_matrices=False)", False)):
        ours, theirs, ratio = median_pair(
            lambda: SVD().fit(problem), lambda whole=whole: full_svd(a, w, rank, full_matrices=whole), options.rounds
        )
        errors = [
            weighted_error(matrix, found, weighting).relative
            for found in (SVD().fit(problem).matrix, full_svd(a, w, rank, full_matrices=whole))
        ]
        body.append(
            [
                f"numpy SVD, {name}",
                f"{ours:.3f} s",
                f"{theirs:.3f} s",
                f"**{1 / ratio:.1f}**",
                ">= 5" if whole else "",
                f"{errors[0]:.6f}",
                f"{errors[1]:.6f}",
            ]
        )
    method = SVD(form="interpolative")
    smaller = Problem(TensorRows(matrix), method.cost((n, d), rank, 4), 4, weighting)
    made = method.fit(smaller).matrix
    print(
        f"interpolative form of rank {rank}: {seconds(lambda: method.fit(smaller)):.3f} s, "
        f"{made.nbytes:,} bytes instead of {problem.nbytes:,}, largest entry {made.condition:.3f}",
        flush=True,
    )
    head = [f"{n} x {d}, RowFisher, rank {rank}", "kflats", "numpy", "ratio", "target", "error, kflats", "error, numpy"]
    title = "Factorizing one layer"
    publish(title, markdown(head, body), options)


if __name__ == "__main__":
    main()
