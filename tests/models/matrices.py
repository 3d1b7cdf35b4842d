"""Random matrices of every kind, small beside the table they stand for."""

from __future__ import annotations

import torch

from kflats.matrices.coded import from_integers
from kflats.matrices.registry import (
    CodedMatrix,
    FlatsMatrix,
    InterpolativeMatrix,
    LowRankMatrix,
    Matrix,
    RankGroup,
    label_dtype,
    order_dtype,
    weight_shape,
)


def low_rank(n: int, d: int) -> Matrix:
    """A random matrix of one flat."""
    rank = max(1, min(n, d) // 4)
    return LowRankMatrix(torch.randn(n, rank) * 0.1, torch.randn(rank, d))


def interpolative(n: int, d: int) -> Matrix:
    """A random matrix of one flat, with its columns in a random order."""
    rank = max(1, min(n, d) // 4)
    order = torch.randperm(d).to(order_dtype(d))
    return InterpolativeMatrix(torch.randn(n, rank) * 0.1, torch.randn(rank, d - rank), order)


def flats(n: int, d: int) -> Matrix:
    """A random ragged matrix: nested bands on one flat, a second flat, and rows kept exactly."""
    rows, rank = [n // 8, n // 4, n // 8, 2], min(n, d) // 4
    bands = [
        RankGroup(rows[0], rank, 0),
        RankGroup(rows[1], 2, 0),
        RankGroup(rows[2], 3, 1),
        RankGroup(rows[3], d, None),
    ]
    bands.append(RankGroup(n - sum(rows), 1, 1))
    flat_ranks = (rank, 3)
    labels = torch.cat([torch.full((band.rows,), i) for i, band in enumerate(bands)])[torch.randperm(n)]
    return FlatsMatrix(
        torch.randn(weight_shape(bands)) * 0.1,
        torch.randn(sum(flat_ranks), d),
        labels.to(label_dtype(len(bands))),
        bands,
        flat_ranks,
    )


def coded(n: int, d: int, classes: int = 3) -> CodedMatrix:
    """Random codes on half of the columns' directions, in classes of rows."""
    gen = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes, (n,), generator=gen)
    r = d // 2
    spread = 4 * 0.8 ** torch.arange(r)
    parts = [torch.randn(int((labels == c).sum()), r, generator=gen) * spread / (c + 1) for c in range(classes)]
    return from_integers(
        [part.round().to(torch.int16) for part in parts],
        labels,
        torch.rand(classes, generator=gen) * 0.05 + 0.01,
        shrink=torch.tensor([0.1]),
        basis=torch.randint(-127, 128, (r, d), generator=gen).to(torch.int8),
        basis_scale=torch.rand(r, generator=gen) / 64,
    )


def int4(n: int, d: int) -> CodedMatrix:
    """Random integers of four bits, four scales a row."""
    gen = torch.Generator().manual_seed(1)
    integers = torch.randint(-7, 8, (n, d), generator=gen).to(torch.int16)
    return from_integers([integers], None, torch.rand(n * 4, generator=gen) * 0.1, scales="row", groups=4)
