"""Codes of a table near the end of its type: what comes back is finite, and the number that the type has for it."""

from __future__ import annotations

import pytest
import torch
from table import slow
from torch import Tensor, nn

from kflats import SVD, Flats, Integer, KeepDense, Recipe, Transform
from kflats.importance.protocol import Weighting
from kflats.matrices.coded import CodedMatrix, from_integers
from kflats.matrices.layers import FactoredEmbedding
from kflats.methods.protocol import Problem
from kflats.numerics.rows import TensorRows

pytest.importorskip("constriction")

N, D, HALF = 300, 16, torch.float16
TOP = torch.finfo(HALF).max
CASES = {
    "transform": (SVD(), Transform(), 0.2),
    "transform on flats": (Flats(k=2), Transform(), 0.2),
    "int8": (KeepDense(), Integer(bits=8), 0.7),
    "int4": (KeepDense(), Integer(bits=4, group=64), 0.5),
    "svd int8": (SVD(), Integer(bits=8), 0.3),
    "svd int4": (SVD(), Integer(bits=4, group=64), 0.3),
}


def near_the_end(kind: str) -> Tensor:
    """Half-precision numbers of which many are as large as they come, or nearly."""
    gen = torch.Generator().manual_seed(0)
    wide = torch.randn(N, D, generator=gen, dtype=torch.float64)
    if kind == "clamped":
        return (wide * TOP).clamp(-TOP, TOP).to(HALF)
    return (wide.sign() * TOP * (0.99 + 0.01 * torch.rand(N, D, generator=gen))).to(HALF)


def coded(case: str, kind: str) -> CodedMatrix:
    method, codec, share = CASES[case]
    table = near_the_end(kind)
    problem = Problem(TensorRows(table), int(share * 2 * N * D), 2, Weighting())
    found = Recipe(method, codec=codec).encode(problem, HALF).matrix
    assert isinstance(found, CodedMatrix)
    return found.requires_grad_(False)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((case, kind), id=f"{case}-{kind}", marks=slow if kind == "near" and case != "transform" else ())
        for case in CASES
        for kind in ("clamped", "near")
    ],
)
def matrix(request: pytest.FixtureRequest) -> CodedMatrix:
    return coded(*request.param)


def test_rows_and_the_whole_table_stay_in_the_type(matrix: CodedMatrix) -> None:
    everything = torch.arange(N)
    wide = matrix.rows(everything, dtype=torch.float32)
    assert bool(wide.to(HALF).isinf().any())  # without that nothing is shown
    wanted = wide.clamp(-TOP, TOP).to(HALF)
    near = {"rtol": 2e-3, "atol": 0.0}  # sums in another order
    for found in (matrix.rows(everything), matrix.rows(everything.repeat(2))[N:], matrix.dense()):
        torch.testing.assert_close(found, wanted, **near)
    torch.testing.assert_close(torch.cat([matrix.rows(few) for few in everything.split(30)]), wanted, **near)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.export on itself
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_recorded_graph_stays_in_the_type(matrix: CodedMatrix) -> None:
    layer, ids = FactoredEmbedding(matrix), torch.arange(N)
    program = torch.export.export(layer, (ids,))
    torch.testing.assert_close(program.module()(ids), layer(ids), rtol=2e-3, atol=0.0)
    assert bool(torch.isfinite(program.module()(ids)).all())


@pytest.mark.parametrize("case", ["int8", "int4"])
def test_products_with_numbers_of_the_table_are_finite(case: str) -> None:
    """Where codes are the table's own numbers, and not coordinates, which may be larger."""
    matrix = coded(case, "clamped")
    torch.testing.assert_close(matrix.vecmat(torch.eye(N, dtype=HALF)), matrix.dense())
    torch.testing.assert_close(matrix.matvec(torch.eye(D, dtype=HALF)), matrix.dense().T)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_type_has_its_own_end(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    scale = torch.tensor([0.502 * top], dtype=torch.float64).to(dtype)
    made = from_integers([torch.tensor([[2, 1, -2]])], None, scale)
    wanted = [[top, float(scale), -top]]
    assert made.dense().tolist() == made.rows(torch.tensor([0])).tolist() == wanted


def test_a_type_that_is_not_the_tables_own_says_what_it_does_not_hold() -> None:
    made = from_integers([torch.tensor([[2, -2]])], None, torch.tensor([5e4]))
    assert made.rows(torch.tensor([0]), dtype=HALF).tolist() == [[float("inf"), -float("inf")]]


def test_what_is_inside_the_type_is_left_alone_and_learns() -> None:
    made = from_integers([torch.tensor([[3, -4], [1, 0]])], None, torch.tensor([0.5, 2.0], dtype=HALF), scales="row")
    out = nn.Sequential(FactoredEmbedding(made))(torch.tensor([0, 1]))
    assert out.tolist() == [[1.5, -2.0], [2.0, 0.0]]
    out.sum().backward()
    assert made.weight.grad is not None
    assert made.weight.grad.tolist() == [-1.0, 1.0]
