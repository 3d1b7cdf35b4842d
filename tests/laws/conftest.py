"""The table of matrices that every law is checked on, and the definition they are checked against."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from table import slow
from torch import Tensor

from kflats.matrices.registry import (
    DenseMatrix,
    FlatsMatrix,
    InterpolativeMatrix,
    LowRankMatrix,
    Matrix,
    RankGroup,
    label_dtype,
    order_dtype,
    weight_shape,
)

ROWS, COLUMNS = 40, 6
Case = Callable[..., Matrix]


def flats(
    bands: list[tuple[int, int | None]],
    flat_ranks: list[int],
    *,
    counts: list[int] | None = None,
    n: int = ROWS,
    d: int = COLUMNS,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> FlatsMatrix:
    """Random numbers on the given (rank, flat) bands; rows fall into them at random, or by ``counts``."""
    gen = torch.Generator().manual_seed(seed)
    if counts is None:
        labels = torch.randint(0, len(bands), (n,), generator=gen)
    else:
        labels = torch.repeat_interleave(torch.arange(len(bands)), torch.tensor(counts))
        labels = labels[torch.randperm(len(labels), generator=gen)]
    sizes = torch.bincount(labels, minlength=len(bands)).tolist()
    made = [RankGroup(rows, rank, flat) for rows, (rank, flat) in zip(sizes, bands, strict=True)]
    return FlatsMatrix(
        torch.randn(weight_shape(made), generator=gen, dtype=torch.float64).to(dtype),
        torch.randn(sum(flat_ranks), d, generator=gen, dtype=torch.float64).to(dtype),
        labels.to(label_dtype(len(bands))),
        made,
        flat_ranks,
    )


def low_rank(rank: int, *, n: int = ROWS, seed: int = 0, dtype: torch.dtype = torch.float64) -> LowRankMatrix:
    gen = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, rank, generator=gen, dtype=torch.float64).to(dtype)
    return LowRankMatrix(weight, torch.randn(rank, COLUMNS, generator=gen, dtype=torch.float64).to(dtype))


def dense(*, n: int = ROWS, seed: int = 0, dtype: torch.dtype = torch.float64) -> DenseMatrix:
    gen = torch.Generator().manual_seed(seed)
    return DenseMatrix(torch.randn(n, COLUMNS, generator=gen, dtype=torch.float64).to(dtype))


def interpolative(
    rank: int, *, n: int = ROWS, seed: int = 0, dtype: torch.dtype = torch.float64
) -> InterpolativeMatrix:
    gen = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, rank, generator=gen, dtype=torch.float64).to(dtype)
    basis = torch.randn(rank, COLUMNS - rank, generator=gen, dtype=torch.float64).to(dtype)
    order = torch.randperm(COLUMNS, generator=gen).to(order_dtype(COLUMNS))
    return InterpolativeMatrix(weight, basis, order)


TABLE: dict[str, Case] = {
    "low_rank": partial(low_rank, 3),
    "dense": dense,
    "low_rank_0": partial(low_rank, 0),
    "interpolative": partial(interpolative, 2),
    "interpolative_0": partial(interpolative, 0),
    "interpolative_all": partial(interpolative, COLUMNS),
    "one_flat": partial(flats, [(3, 0)], [3]),
    "uniform": partial(flats, [(3, 0), (3, 1), (3, 2)], [3, 3, 3]),
    "uniform_rank_1": partial(flats, [(1, 0), (1, 1)], [1, 1]),
    "ragged": partial(flats, [(4, 0), (2, 1), (1, 2)], [4, 2, 1]),
    "nested": partial(flats, [(4, 0), (2, 0), (1, 0), (3, 1)], [4, 3]),
    "nested_with_exact": partial(flats, [(COLUMNS, None), (4, 0), (1, 0), (2, 1)], [4, 2]),
    "exact_only": partial(flats, [(COLUMNS, None)], []),
    "empty_bands": partial(flats, [(2, 0), (3, 1), (COLUMNS, None), (1, 1)], [2, 3], counts=[0, 25, 0, 15]),
    "empty_first_uniform": partial(flats, [(2, 0), (2, 1)], [2, 2], counts=[0, 40]),
    "rank_0_flat": partial(flats, [(3, 0), (0, 1)], [3, 0]),
    "rank_0_only": partial(flats, [(0, 0)], [0]),
    "unused_flat": partial(flats, [(3, 0), (2, 2)], [3, 4, 2]),
    "one_row": partial(flats, [(2, 0), (COLUMNS, None)], [2], counts=[0, 1]),
    "uint16_labels": partial(flats, [(1 + c % 2, c) for c in range(300)], [1 + c % 2 for c in range(300)], n=400),
}


@pytest.fixture(params=TABLE.values(), ids=TABLE.keys(), scope="session")
def make(request: pytest.FixtureRequest) -> Case:
    """A row of the table: ``make(seed=, dtype=)`` builds the matrix anew."""
    case: Case = request.param
    return case


QUICK_GRAPHS = {"low_rank", "interpolative", "nested_with_exact", "empty_bands"}


@pytest.fixture(
    params=[pytest.param(case, id=name, marks=() if name in QUICK_GRAPHS else slow) for name, case in TABLE.items()],
    scope="session",
)
def make_for_graph(request: pytest.FixtureRequest) -> Case:
    """As ``make``, for laws that record a graph: recording takes seconds, so most rows are slow."""
    case: Case = request.param
    return case


@pytest.fixture(scope="session")
def table() -> dict[str, Case]:
    """The whole table, for laws that need a certain row."""
    return TABLE


@pytest.fixture(scope="session")
def define() -> Callable[[Matrix], Tensor]:
    return definition


def definition(matrix: Matrix) -> Tensor:
    """The dense matrix, row by row from the stored tensors: what the class texts say, in plain loops."""
    if isinstance(matrix, DenseMatrix):
        return torch.stack(list(matrix.weight))
    if isinstance(matrix, LowRankMatrix):
        return torch.stack([(a[:, None] * matrix.basis).sum(0) for a in matrix.weight])
    if isinstance(matrix, InterpolativeMatrix):
        made = torch.stack([torch.cat([a, (a[:, None] * matrix.basis).sum(0)]) for a in matrix.weight])
        place = {column: at for at, column in enumerate(matrix.order.tolist())}
        return torch.stack([made[:, place[column]] for column in range(len(place))], dim=1)
    assert isinstance(matrix, FlatsMatrix)
    values, rows = matrix.weight.reshape(-1), {}
    taken, labels = 0, matrix.labels.to(torch.int64).tolist()
    for label, band in enumerate(matrix.bands):
        for row in [i for i, found in enumerate(labels) if found == label]:
            mine, taken = values[taken : taken + band.rank], taken + band.rank
            if band.flat is None:
                rows[row] = mine
            else:
                first = sum(matrix.flat_ranks[: band.flat])
                rows[row] = (mine[:, None] * matrix.basis[first : first + band.rank]).sum(0)
    assert taken == values.numel()
    return torch.stack([rows[i] for i in range(len(labels))])
