"""Methods of one flat whose error is no square: outliers weigh less in them, or cannot turn the flat at all.

All make a low-rank pair, so they cost what an SVD of the same rank costs. Each minimises its own norm, which reports
show beside the squared error. Row weights w_i multiply what a row costs, whatever the norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch

from kflats.common.errors import KflatsError
from kflats.matrices.registry import LowRankMatrix
from kflats.methods.matrix_error import Distances, EntryPowers
from kflats.methods.problem import Problem
from kflats.methods.protocol import Fit, PairMethod
from kflats.numerics.entrywise import Solver, entrywise_low_rank
from kflats.numerics.lewis import Lewis
from kflats.numerics.loewner import Loewner
from kflats.numerics.loss import Loss, Power
from kflats.numerics.robust import robust_svd
from kflats.numerics.subspace import robust_subspace

EllipsoidWay: TypeAlias = Lewis | Loewner
"""How ``RobustSVD`` finds its ellipsoid."""

_LARGEST_POWER = 16.0  # sums of 16th powers of any float32 values whose squares are normal numbers fit float64


@dataclass(frozen=True)
class RobustSVD(PairMethod):
    """The longest axes of the ellipsoid that stands for ||Ax||_p (Tukan et al., Sensors 2021, algorithm 1).

        ||D V'x||^p  <=  ||Ax||_p^p  <=  C ||D V'x||^p ,      A_k = U D_k V' = A V_k V_k'

    Bounds the entrywise lp error on both sides and minimises neither it nor any other: ``Entrywise`` does. With row
    weights the norm is (sum_i w_i |a_i'x|^p)^(1/p): rows are scaled by w^(1/p).

    Args:
        p: 0 < p <= 16. 2 is the SVD; below, long rows turn the flat less.
        ellipsoid: how it is found. ``Lewis()``: Lewis weights, any p, milliseconds to seconds. ``Loewner()``:
            the paper's ellipsoid method, p >= 1, for a dozen columns.
        transposed: of A' instead (the paper's remark 8), without row weights. Where A has more rows than columns that
            is the SVD for every p.

    Choose it where whole rows are far off, with p = 0.5: p = 1 still gives way to a few per cent of them, the more
    columns the sooner. On trained tables it is close to the SVD.

    >>> RobustSVD(p=1.0).cost((384, 384), 127, 4)
    390144
    """

    p: float = 1.0
    ellipsoid: EllipsoidWay = Lewis()
    transposed: bool = False

    def __post_init__(self) -> None:
        _check_power("RobustSVD", self.p, _LARGEST_POWER)
        if not isinstance(self.ellipsoid, EllipsoidWay):
            raise KflatsError(f"RobustSVD has no ellipsoid {self.ellipsoid!r}", hint="Lewis() or Loewner()")
        if not isinstance(self.transposed, bool):
            raise KflatsError(f"transposed={self.transposed!r} is neither True nor False")

    def _pair(self, problem: Problem, rank: int) -> Fit:
        if self.transposed and problem.weights is not None:
            raise KflatsError(
                "RobustSVD(transposed=True) cannot take row weights",
                cause="the ellipsoid is that of the columns, whose sums they would enter unevenly",
                hint='transposed=False, or matrix_rows="out_features"',
            )
        found = robust_svd(
            problem.rows, rank, self.p, ellipsoid=self.ellipsoid, weights=problem.weights, transposed=self.transposed
        )
        # U D^1/2 and D^1/2 V' have the units of a sum over all rows; V' of length 1 is the same matrix, and rounds
        # to half precision as an SVD does.
        lengths = torch.linalg.vector_norm(found.basis, dim=1)
        basis = found.basis / torch.where(lengths > 0, lengths, 1.0).unsqueeze(1)
        return Fit(LowRankMatrix(found.coordinates * lengths, basis), (found.error,), EntryPowers(self.p))


@dataclass(frozen=True)
class Entrywise(PairMethod):
    """Low rank under the entrywise lp error, fitted directly.

        minimise over U (n, r), V (r, d)    sum_i w_i sum_j |A - U V|_ij^p

    Args:
        p: 0 < p <= 2; 2 is the SVD.
        solver: "irls" for any p. "admm" for p >= 1: as low on trained tables or lower in a fraction of the time; where
            entries are grossly wrong it ends a few per cent farther from the truth. With row weights take "irls": on
            matrices wider than long, or where a few rows have nearly all the weight, ADMM ended up to 45 % higher.
        tolerance: stops when an iteration lowers the sum by less than this share.
        max_iterations: stops there in any case.

    Choose it where single entries may be wrong, or where absolute errors are what counts. A coordinate is then no
    projection: rows that a squared error would fit well may be farther away.

    >>> Entrywise(p=1.0)
    Entrywise(p=1.0, solver='irls', tolerance=2e-05, max_iterations=300)
    """

    p: float = 1.0
    solver: Solver = "irls"
    tolerance: float = 2e-5
    max_iterations: int = 300

    def __post_init__(self) -> None:
        _check_power("Entrywise", self.p, 2.0)
        if self.solver not in ("irls", "admm") or (self.solver == "admm" and self.p < 1):
            raise KflatsError(
                f"Entrywise has no solver {self.solver!r} for p={self.p:g}", hint='"irls", or "admm" for p >= 1'
            )
        _check_iterations("Entrywise", self.tolerance, self.max_iterations)

    def _pair(self, problem: Problem, rank: int) -> Fit:
        found = entrywise_low_rank(
            problem.rows,
            rank,
            p=self.p,
            solver=self.solver,
            weights=problem.weights,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
            progress=problem.progress,
        )
        return Fit(LowRankMatrix(found.coordinates, found.basis), found.objective, EntryPowers(self.p), found.converged)


@dataclass(frozen=True)
class Subspace(PairMethod):
    """One flat, fitted by another loss of the rows' distances than their squares.

        minimise over flats S    sum_i w_i rho( dist(a_i, S) )

    Args:
        error: rho: ``Power(q)``, ``Huber(t)``, ``Truncated(t)`` or ``Squared()``; thresholds are distances, or
            multiples of their median with ``unit="median"``.
        tolerance: stops when an iteration lowers the sum by less than this share.
        max_iterations: stops there in any case.

    Choose it where whole rows may be wrong; where single entries are, ``Entrywise``; for long tables several flats,
    ``Flats(error=...)``.

    >>> Subspace(error=Power(1.0))
    Subspace(error=Power(q=1.0), tolerance=1e-05, max_iterations=100)
    """

    error: Loss = Power(1.0)
    tolerance: float = 1e-5
    max_iterations: int = 100

    def __post_init__(self) -> None:
        if not isinstance(self.error, Loss):
            raise KflatsError(f"Subspace has no error {self.error!r}", hint="Power(1), Huber(0.5), Truncated(1.0)")
        _check_iterations("Subspace", self.tolerance, self.max_iterations)

    def _pair(self, problem: Problem, rank: int) -> Fit:
        found = robust_subspace(
            problem.rows,
            rank,
            self.error,
            weights=problem.weights,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
            progress=problem.progress,
        )
        return Fit(
            LowRankMatrix(found.coordinates, found.basis), found.objective, Distances(found.loss), found.converged
        )


def ellipsoid_of(name: str) -> EllipsoidWay:
    """The ellipsoid that a command line calls ``name``: one of ``ELLIPSOID_NAMES``, with its defaults.

    >>> ellipsoid_of("loewner") == Loewner()
    True
    """
    make = ELLIPSOID_NAMES.get(name.strip().lower())
    if make is None:
        raise KflatsError(f"no ellipsoid is called {name!r}", hint="one of " + ", ".join(ELLIPSOID_NAMES))
    return make()


ELLIPSOID_NAMES: dict[str, type[EllipsoidWay]] = {
    "lewis": Lewis,
    "loewner": Loewner,
}
"""What a command line calls the ways to an ellipsoid."""


def _check_power(name: str, p: float, largest: float) -> None:
    number = isinstance(p, int | float) and not isinstance(p, bool)
    if not number or not 0 < p <= largest:
        raise KflatsError(
            f"{name} cannot use p={p!r}",
            cause="a maximum is no sum of powers" if p == math.inf else "",
            hint=f"0 < p <= {largest:g}, for example p=1",
        )


def _check_iterations(name: str, tolerance: float, limit: int) -> None:
    number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1 or not number or not 0 <= tolerance < 1:
        raise KflatsError(f"{name}: max_iterations is a whole number from 1, tolerance a number in [0, 1)")
