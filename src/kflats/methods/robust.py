"""Methods of one flat that minimise another error than the squared one, so that outliers count less.

Each makes a low-rank pair, which takes the bytes of an SVD of the same rank. Each minimises its own norm, which reports
show beside the squared error. Row weights w_i multiply the cost of a row under every norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from kflats.common.arguments import is_number, is_whole
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
    """The longest axes of an ellipsoid that approximates ||Ax||_p (Tukan et al., Sensors 2021, algorithm 1).

        ||D V'x||^p  <=  ||Ax||_p^p  <=  C ||D V'x||^p ,      A_k = U D_k V' = A V_k V_k'

    The ellipsoid bounds the entrywise lp error from both sides; ``Entrywise`` minimises that error. With row weights
    the norm is (sum_i w_i |a_i'x|^p)^(1/p): rows are scaled by w^(1/p).

    Args:
        p: 0 < p <= 16. 2 is the SVD; below 2, long rows turn the flat less.
        ellipsoid: the algorithm. ``Lewis()``: Lewis weights, any p, milliseconds to seconds. ``Loewner()``: the paper's
            ellipsoid method, p >= 1, for about twelve columns.
        transposed: the ellipsoid of A' (the paper's remark 8), without row weights. If A has more rows than columns,
            the result is the SVD for every p.

    Choose it with p = 0.5 where whole rows are outliers: at p = 1 a few per cent of outliers still turn the flat, and
    fewer suffice in more columns. On trained tables it is close to the SVD.

    >>> RobustSVD(p=1.0).cost((384, 384), 127, 4)
    390144
    """

    p: float = 1.0
    ellipsoid: EllipsoidWay = Lewis()
    transposed: bool = False

    def __post_init__(self) -> None:
        _check_power(self, self.p, _LARGEST_POWER)
        if not isinstance(self.ellipsoid, EllipsoidWay):
            raise KflatsError(
                f"ellipsoid={self.ellipsoid!r} is not supported with RobustSVD",
                hint="Lewis() or Loewner()",
                command="--ellipsoid lewis or loewner",
            )
        if not isinstance(self.transposed, bool):
            raise KflatsError(
                f"transposed={self.transposed!r} is not supported with RobustSVD",
                hint="True or False",
                command="leave it out",
            )

    def _pair(self, problem: Problem, rank: int) -> Fit:
        if self.transposed and problem.row_weights is not None:
            raise KflatsError(
                "RobustSVD(transposed=True) cannot take row weights",
                cause="its ellipsoid is that of the columns, and row weights would change each entry of a column",
                hint='transposed=False, or matrix_rows="out_features"',
                command="--matrix-rows out_features",
            )
        pair = robust_svd(
            problem.rows,
            rank,
            self.p,
            ellipsoid=self.ellipsoid,
            weights=problem.row_weights,
            transposed=self.transposed,
        )
        # The entries of U D^1/2 and D^1/2 V' grow with the number of rows and would overflow half precision. Axes of
        # length 1 give the same matrix and round as those of an SVD.
        lengths = torch.linalg.vector_norm(pair.basis, dim=1)
        basis = pair.basis / torch.where(lengths > 0, lengths, 1.0).unsqueeze(1)
        return Fit(LowRankMatrix(pair.coordinates * lengths, basis), (pair.error,), EntryPowers(self.p))


@dataclass(frozen=True)
class Entrywise(PairMethod):
    """Low rank under the entrywise lp error, fitted directly.

        minimise over U (n, r), V (r, d)    sum_i w_i sum_j |A - U V|_ij^p

    Args:
        p: 0 < p <= 2; 2 is the SVD.
        solver: "irls" for any p. "admm" for p >= 1: on trained tables its objective is as low or lower in a fraction of
            the time; with gross errors in entries it ends a few per cent farther from the truth. With row weights use
            "irls": on matrices with more columns than rows, or if a few rows have nearly all the weight, ADMM ended up
            to 45 % higher.
        tolerance: the fit stops when an iteration lowers the sum by less than this share.
        max_iterations: the fit stops after this many iterations.

    Choose it where single entries may be wrong, or where absolute errors count. Its coordinates are no projections:
    rows that a squared error would fit well may be farther away.

    >>> Entrywise(p=1.0)
    Entrywise(p=1.0, solver='irls', tolerance=2e-05, max_iterations=300)
    """

    p: float = 1.0
    solver: Solver = "irls"
    tolerance: float = 2e-5
    max_iterations: int = 300

    def __post_init__(self) -> None:
        _check_power(self, self.p, 2.0)
        if self.solver not in ("irls", "admm") or (self.solver == "admm" and self.p < 1):
            raise KflatsError(
                f"solver={self.solver!r} is not supported with Entrywise(p={self.p:g})",
                hint='"irls", or "admm" for p >= 1',
            )
        _check_iterations(self, self.tolerance, self.max_iterations)

    def _pair(self, problem: Problem, rank: int) -> Fit:
        pair = entrywise_low_rank(
            problem.rows,
            rank,
            p=self.p,
            solver=self.solver,
            weights=problem.row_weights,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
            progress=problem.progress,
        )
        return Fit(LowRankMatrix(pair.coordinates, pair.basis), pair.objective, EntryPowers(self.p), pair.converged)


@dataclass(frozen=True)
class Subspace(PairMethod):
    """One flat that minimises a loss of the rows' distances.

        minimise over flats S    sum_i w_i rho( dist(a_i, S) )

    Args:
        error: rho: ``Power(q)``, ``Huber(t)``, ``Truncated(t)`` or ``Squared()``; thresholds are distances, or
            multiples of their median with ``unit="median"``.
        tolerance: the fit stops when an iteration lowers the sum by less than this share.
        max_iterations: the fit stops after this many iterations.

    Choose it where whole rows may be wrong. Where single entries are wrong, choose ``Entrywise``; for long tables,
    ``Flats(error=...)`` has several flats.

    >>> Subspace(error=Power(1.0))
    Subspace(error=Power(q=1.0), tolerance=1e-05, max_iterations=100)
    """

    error: Loss = Power(1.0)
    tolerance: float = 1e-5
    max_iterations: int = 100

    def __post_init__(self) -> None:
        if not isinstance(self.error, Loss):
            raise KflatsError(
                f"error={self.error!r} is not supported with Subspace",
                hint="Power(1), Huber(0.5), Truncated(1.0)",
                command="a loss such as power 1, huber 0.5 or truncated 1.0",
            )
        _check_iterations(self, self.tolerance, self.max_iterations)

    def _pair(self, problem: Problem, rank: int) -> Fit:
        pair = robust_subspace(
            problem.rows,
            rank,
            self.error,
            weights=problem.row_weights,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
            progress=problem.progress,
        )
        return Fit(LowRankMatrix(pair.coordinates, pair.basis), pair.objective, Distances(pair.loss), pair.converged)


def ellipsoid_of(name: str) -> EllipsoidWay:
    """The ellipsoid that the command line calls ``name``, with its defaults.

    Raises:
        KflatsError: no ellipsoid has this name.

    >>> ellipsoid_of("loewner") == Loewner()
    True
    """
    ellipsoids: dict[str, type[EllipsoidWay]] = {"lewis": Lewis, "loewner": Loewner}
    kind = ellipsoids.get(name.strip().lower())
    if kind is None:
        raise KflatsError(f"no ellipsoid is called {name!r}", hint="one of " + ", ".join(ellipsoids))
    return kind()


def _check_power(method: PairMethod, p: float, largest: float) -> None:
    if not is_number(p, 0, largest) or p == 0:
        raise KflatsError(
            f"p={p!r} is not supported with {type(method).__name__}",
            hint=f"a number above 0, at most {largest:g}, for example 1",
        )


def _check_iterations(method: PairMethod, tolerance: float, limit: int) -> None:
    if not is_whole(limit, 1) or not is_number(tolerance, 0, 1) or tolerance == 1:
        raise KflatsError(
            f"max_iterations={limit!r} and tolerance={tolerance!r} are not supported with {type(method).__name__}",
            hint="max_iterations is a whole number from 1, tolerance is a number in [0, 1)",
        )
