"""Methods of one flat: a truncated SVD in its two forms, and no factorization at all."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kflats.errors import KflatsError
from kflats.importance.weighting import Weighting
from kflats.methods.problem import Factored, Problem, check_accepts, refuse_bytes
from kflats.nn.matrix import DenseMatrix, InterpolativeMatrix, LowRankMatrix, Matrix, order_dtype
from kflats.numerics.interpolative import interpolate
from kflats.numerics.rows import GRAM_BLOCK, Rows
from kflats.numerics.svd import truncated_svd, weighted_spectrum

Form = Literal["factors", "interpolative"]
"""How a low-rank matrix is stored: two factors, or one of them holding an identity block."""


@dataclass(frozen=True)
class SVD:
    """One flat: min || L (A - U V) R ||_F^2 of the largest rank that fits (FWSVD, eq. 6, for row weights).

    Args:
        form: "factors": U (n, r) and V (r, d), r (n + d) numbers. "interpolative": exactly the same matrix by
            r of its own columns and what the others are made of, r (n + d - r) numbers and an index of d columns.

    Choose it for linear layers, and where a target runs plain low-rank pairs
    only; for long tables ``Flats`` is better at equal bytes.

    >>> SVD().cost((384, 384), 127, 4), SVD(form="interpolative").cost((384, 384), 127, 4)
    (390144, 326396)
    """

    form: Form = "factors"

    accepts = frozenset({"rows", "left", "right"})

    def __post_init__(self) -> None:
        if self.form not in ("factors", "interpolative"):
            raise KflatsError(f"form={self.form!r} is unknown", hint='"factors" or "interpolative"')

    def fit(self, problem: Problem) -> Factored:
        """A LowRankMatrix, or an InterpolativeMatrix, of the largest rank that fits.

        Raises:
            KflatsError: not even rank 1 fits, or the weighting cannot be used.
        """
        start = time.perf_counter()
        check_accepts("SVD", self.accepts, problem.weighting)
        n, d = problem.rows.shape
        rank = self.rank((n, d), problem.nbytes, problem.itemsize, free_labels=problem.free_labels)
        if rank < 1:
            raise refuse_bytes(problem, self.cost((n, d), 1, problem.itemsize), "1 flat of rank 1")
        found = _factors(problem, rank)
        return Factored(self._stored(found), found.objective, time.perf_counter() - start)

    def _stored(self, found: _Pair) -> Matrix:
        if self.form == "factors":
            return LowRankMatrix(found.coordinates, found.basis)
        made = interpolate(found.coordinates, found.basis)
        return InterpolativeMatrix(made.skeleton, made.mixing, made.order.to(order_dtype(found.basis.shape[1])))

    def rank(self, shape: tuple[int, int], nbytes: int, itemsize: int, *, free_labels: bool = False) -> int:
        """The largest rank that ``nbytes`` hold, 0 if none."""
        spare = self.index_bytes(shape) if free_labels else 0
        fitting = (r for r in range(min(shape), 0, -1) if self.cost(shape, r, itemsize) - spare <= nbytes)
        return next(fitting, 0)

    def cost(self, shape: tuple[int, int], rank: int, itemsize: int) -> int:
        """Stored bytes at ``rank``, the index of the interpolative form included."""
        n, d = shape
        numbers = rank * (n + d) if self.form == "factors" else rank * (n + d - rank)
        return numbers * itemsize + self.index_bytes(shape)

    def index_bytes(self, shape: tuple[int, int]) -> int:
        """Bytes of what is no number: nothing, or the order of the columns."""
        return 0 if self.form == "factors" else shape[1] * order_dtype(shape[1]).itemsize

    def spectrum(self, rows: Rows, weighting: Weighting) -> Tensor:
        """(min(n, d) + 1,) float64: the objective at rank 0, 1, ... of all."""
        check_accepts("SVD", self.accepts, weighting)
        return tails(weighted_spectrum(rows, left=weighting.left, right=weighting.right))


@dataclass(frozen=True)
class Dense:
    """The weight itself: as it is, which is what a plan writes where factors would not save anything, or all of its
    numbers in the type or the integers of a codec.

    >>> Dense().cost((10, 4), 3, 4)
    160
    """

    accepts = frozenset({"rows", "left", "right"})

    def fit(self, problem: Problem) -> Factored:
        """A DenseMatrix of the rows themselves; what stores it has the type.

        Raises:
            KflatsError: fewer bytes than all numbers take.
        """
        start = time.perf_counter()
        check_accepts("Dense", self.accepts, problem.weighting)
        least = self.cost(problem.rows.shape, 0, problem.itemsize)
        if problem.nbytes < least:
            raise refuse_bytes(problem, least, f"all numbers at {problem.itemsize} bytes")
        whole = torch.cat([block for _, block in problem.rows.blocks(GRAM_BLOCK)])
        return Factored(DenseMatrix(whole), (), time.perf_counter() - start)

    def cost(self, shape: tuple[int, int], rank: int, itemsize: int) -> int:
        """Bytes of the whole matrix, whatever the rank."""
        return shape[0] * shape[1] * itemsize

    def spectrum(self, rows: Rows, weighting: Weighting) -> Tensor:
        """(min(n, d) + 1,) zeros: nothing is lost."""
        return torch.zeros(min(rows.shape) + 1, dtype=torch.float64, device=rows.device)


@dataclass(frozen=True)
class Best:
    """Of several ways to store a weight the one that loses least for its bytes, judged beside all other weights.

    Transform codes at any size, 8 and 4 bits a number, all numbers in float16, low rank in float16, or the weight as it
    is. Codes of a table with 300 times as many rows as columns are on one flat or on as many, up to 8, as lose less.
    What each loses is measured under the importance by doing it, for a pair read from the spectrum; then bytes go where
    they save most. A plan names what was chosen.

    Choose it for a budget in bytes over a whole model.
    """

    accepts = frozenset({"rows", "left", "right"})

    def fit(self, problem: Problem) -> Factored:
        """Nothing to fit: a plan holds what was chosen.

        Raises:
            KflatsError: always.
        """
        raise KflatsError("Best is a choice between methods and fits nothing", hint="kflats.plan makes the choice")

    def cost(self, shape: tuple[int, int], rank: int, itemsize: int) -> int:
        """As a low-rank pair."""
        return SVD().cost(shape, rank, itemsize)


@dataclass(frozen=True)
class _Pair:
    coordinates: Tensor
    basis: Tensor
    objective: tuple[float, ...]


def _factors(problem: Problem, rank: int) -> _Pair:
    rows, weighting = problem.rows, problem.weighting
    found = truncated_svd(rows, rank, left=weighting.left, right=weighting.right)
    if weighting.right is None:
        return _Pair(found.coordinates, found.basis, (found.error,))
    # A right metric leaves the basis oblique. Orthonormal, it is the same matrix and rounds no worse than without one.
    q, t = torch.linalg.qr(found.basis.to(torch.float64).T)
    coordinates = found.coordinates.to(torch.float64) @ t.T
    return _Pair(coordinates.to(rows.dtype), q.T.contiguous().to(rows.dtype), (found.error,))


def tails(values: Tensor) -> Tensor:
    """What is left after the first 0, 1, ... of ``values`` (m,): (m + 1,).

    >>> tails(torch.tensor([4.0, 1.0])).tolist()
    [5.0, 1.0, 0.0]
    """
    return torch.nn.functional.pad(values.flip(0).cumsum(0).flip(0), (0, 1))
