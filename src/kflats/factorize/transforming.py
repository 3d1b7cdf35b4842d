"""``Transform`` carried out: rows as one code, on one flat or several, whose file takes at most so many bytes.

Of methods that minimise squares it takes the place of the fit: ``SVD`` and ``Flats`` say how many flats there are, and
axes, ranks and bits follow from the bytes. What other methods fit stays theirs: they fit flats of the rank that the
bytes would give bits to, and the code is one of the rows that lie in these flats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kflats.codecs.codec import Transform
from kflats.codecs.streams import stored_bytes
from kflats.errors import KflatsError
from kflats.factorize.fixed_rate import Rounded
from kflats.factorize.parts import MatrixRows
from kflats.importance.weighting import Weighting
from kflats.methods import SVD, Flats
from kflats.methods.judging import weighted_error
from kflats.methods.problem import Factored, Problem
from kflats.nn.coded import CodedMatrix
from kflats.nn.coded_build import from_flats, from_transform
from kflats.nn.flats import FlatsMatrix
from kflats.numerics.coding.encode import transform_code
from kflats.numerics.coding.flats import flats_code
from kflats.numerics.coding.gaussian_bound import water_level
from kflats.numerics.loss import Power, Squared
from kflats.numerics.rows import Rows

_TRIES = 6
_FEW = 48
"""Bytes that are not worth another code."""
_SLACK = 0.01
"""Share of the bytes that may be left; of more, a second code makes use."""
_CHOICES = (2, 4, 8)
"""Numbers of flats that are tried beside one where none is given, as long as each loses less than the one before."""


@dataclass(frozen=True)
class _Coded:
    """A matrix, and what its code takes without the container of a file."""

    matrix: CodedMatrix
    nbytes: int


def heeds_metrics(method: object) -> bool:
    """Whether the code itself minimises what the method would: squares, under row weights and metrics."""
    return isinstance(method, SVD) or (
        isinstance(method, Flats) and (isinstance(method.error, Squared) or method.error == Power(2))
    )


def transformed(method: Any, codec: Transform, problem: Problem, dtype: torch.dtype) -> Rounded:
    """The code whose file is at most ``problem.nbytes``; row weights and a right metric are heeded.

    Raises:
        KflatsError: too few bytes, or whatever the method refuses.
    """
    if not heeds_metrics(method):
        return _of_fit(method, codec, problem, dtype)
    rows, right = problem.rows, problem.weighting.right
    weights = row_weights(problem.weighting)
    if isinstance(method, SVD):
        return Rounded(_alone(rows, codec, replace(problem, weighting=Weighting(left=weights, right=right)), dtype))
    problem = replace(problem, weighting=Weighting(left=weights, right=right))
    if method.k is not None:
        return Rounded(_parted(rows, _labels(method, problem, method.k), codec, problem, dtype))
    best = _parted(rows, _labels(method, problem, 1), codec, problem, dtype)
    error = weighted_error(rows, best, problem.weighting).error
    for k in _CHOICES:
        if rows.shape[0] < 2 * k:
            break
        try:
            made = _parted(rows, _labels(method, problem, k), codec, problem, dtype)
        except KflatsError:  # so many flats alone need more bytes than there are
            break
        if (less := weighted_error(rows, made, problem.weighting).error) >= error:
            break
        best, error = made, less
    return Rounded(best)


def _of_fit(method: Any, codec: Transform, problem: Problem, dtype: torch.dtype) -> Rounded:
    """The code of what the method fits, in its flats."""
    shape, k = problem.rows.shape, getattr(method, "k", None) or 1
    if isinstance(method, Flats):
        method = replace(method, exact=False)  # all rows are coded
    nbytes = method.cost(shape, _rank_in_reach(method, problem, k), 4)
    made: Factored = method.fit(replace(problem, nbytes=nbytes, itemsize=4, free_labels=False))
    rows = MatrixRows(made.matrix)
    if isinstance(made.matrix, FlatsMatrix):
        labels = made.matrix.labels.detach().cpu().to(torch.int64)
        matrix = _parted(rows, labels, codec, problem, dtype)
    else:
        matrix = _alone(rows, codec, problem, dtype)
    return Rounded(matrix, made.norm, made.converged)


def _alone(rows: Rows, codec: Transform, problem: Problem, dtype: torch.dtype) -> CodedMatrix:
    """The code of ``rows`` on one flat."""
    weighting = problem.weighting

    def build(aim: int) -> _Coded:
        code = transform_code(rows, weights=weighting.left, right=weighting.right, nbytes=aim, classes=codec.classes)
        return _Coded(from_transform(code, dtype=dtype), code.stored_bytes)

    return _within(problem, build)


def _parted(rows: Rows, labels: Tensor, codec: Transform, problem: Problem, dtype: torch.dtype) -> CodedMatrix:
    """The code of ``rows`` on the flats that ``labels`` tell apart, or fewer where some are given up."""
    weighting = problem.weighting

    def build(aim: int) -> _Coded:
        code = flats_code(
            rows, labels, nbytes=aim, weights=weighting.left, right=weighting.right, classes=codec.classes
        )
        return _Coded(from_flats(code, dtype=dtype), code.stored_bytes)

    return _within(problem, build)


def row_weights(weighting: Weighting) -> Tensor | None:
    """(n,) how much the error of each row counts where errors of different rows do not go together."""
    left = weighting.left
    return left if left is None or left.ndim == 1 else left.diagonal()


def _labels(method: Flats, problem: Problem, k: int) -> Tensor:
    """(n,) int64, the flat of each row as the method finds it, at a rank that the bytes can give bits to."""
    n, d = problem.rows.shape
    if k == 1:
        return torch.zeros(n, dtype=torch.int64)
    if n < 2 * k:
        raise KflatsError(f"{k} flats for {n} rows", cause="each takes two rows at least", hint="fewer flats, or SVD()")
    rank = max(1, min(_rank_in_reach(method, problem, k), d // 2))
    room = replace(problem, nbytes=4 * rank * (n + k * d), itemsize=4, free_labels=True)
    found = replace(method, k=k, ranks="uniform").fit(room).matrix
    if not isinstance(found, FlatsMatrix):  # one flat holds all rows exactly
        return torch.zeros(n, dtype=torch.int64)
    return found.labels.detach().cpu().to(torch.int64)


def _rank_in_reach(method: Any, problem: Problem, k: int) -> int:
    """How many axes get bits in the bytes that there are, by the method's spectrum."""
    n, d = problem.rows.shape
    energies = -method.spectrum(problem.rows, problem.weighting).diff().clamp_max(0.0) / n
    level = water_level(energies, 8 * problem.nbytes / (n * len(energies))) if float(energies.max()) > 0 else 0.0
    return max(1, min(int((energies > level).sum()), d, n // k))


def _within(problem: Problem, build: Callable[[int], _Coded]) -> CodedMatrix:
    """A container and the ends of blocks come on top of a code's own bytes."""
    aim, best, left = problem.nbytes, None, problem.nbytes + 1
    for _ in range(_TRIES):
        try:
            made = build(aim)
        except KflatsError:
            if aim == problem.nbytes:
                raise
            break  # less than labels and scales need, once the container has its bytes
        over = stored_bytes(made.matrix) - problem.nbytes
        if over <= 0:
            if -over >= left:  # no code lies between
                break
            best, left = made.matrix, -over
            if left <= max(_SLACK * problem.nbytes, _FEW):
                break
            aim += left
            continue
        # A code may lie anywhere in the last hundredth below its aim: the next must not come out higher in it.
        aim = min(aim - over, made.nbytes) - over // 4 - 1
        if aim < 1:
            break
    if best is not None:
        return best
    raise KflatsError(
        f"a budget of {problem.nbytes:,} bytes cannot hold codes of this matrix",
        cause=f"the container takes {over:,} bytes more",
        hint="a larger budget, or fewer classes",
    )
