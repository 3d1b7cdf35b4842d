"""Methods of one flat that minimise another error than the squared one, so that outliers count less.

Each makes a low-rank pair, which takes the bytes of an SVD of the same rank. Each minimises its own norm, which reports
show beside the squared error. Row weights w_i multiply the cost of a row under every norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kflats.common.errors import KflatsError
from kflats.matrices.registry import LowRankMatrix
from kflats.methods.matrix_error import Distances, EntryPowers
from kflats.methods.protocol import Factored, Method, PairMethod, Problem
from kflats.numerics.entrywise import entrywise_low_rank
from kflats.numerics.flats import Stopping
from kflats.numerics.loss import Loss, Power, check_loss
from kflats.numerics.robust_svd import EllipsoidWay, Lewis, robust_svd
from kflats.numerics.rows import check_power, check_steps
from kflats.numerics.subspace import robust_subspace

_LARGEST_POWER = 16.0  # sums of 16th powers of any float32 values whose squares are normal numbers fit float64


@dataclass(frozen=True)
class RobustSVD(PairMethod):
    """The longest axes of an ellipsoid that approximates ||Ax||_p (Tukan et al., Sensors 2021, algorithm 1).

        ||D V'x||^p  <=  ||Ax||_p^p  <=  C ||D V'x||^p ,      A_k = U D_k V' = A V_k V_k'

    The ellipsoid bounds the entrywise lp error from both sides; ``Entrywise`` minimises that error. With row weights
    the norm is (sum_i w_i |a_i'x|^p)^(1/p): rows are scaled by w^(1/p).

    Args:
        p: 0 < p <= 16. 2 is the SVD; below 2, long rows turn the flat less.
        ellipsoid: the algorithm. ``Lewis()``: Lewis weights, any p, milliseconds to seconds; or your own
            ``EllipsoidWay``.

    Choose it with p = 0.5 where whole rows are outliers: at p = 1 a few per cent of outliers still turn the flat, and
    fewer suffice in more columns. On trained tables it is close to the SVD.

    >>> RobustSVD(p=1.0).cost((384, 384), 127, 4)
    390144
    """

    p: float = 1.0
    ellipsoid: Lewis | EllipsoidWay = Lewis()

    def __post_init__(self) -> None:
        check_power(self.p, _LARGEST_POWER)
        if not isinstance(self.ellipsoid, EllipsoidWay) or isinstance(self.ellipsoid, type | Method):
            raise KflatsError(
                f"ellipsoid={self.ellipsoid!r} is not supported with RobustSVD",
                cause="an ellipsoid is a value with fit(matrix, p)",
                hint="leave the ellipsoid out: Lewis weights are the default",
            )

    def _pair(self, problem: Problem, rank: int) -> Factored:
        weights = problem.row_weights
        pair = robust_svd(problem.rows, rank, self.p, ellipsoid=self.ellipsoid, weights=weights)
        # The entries of U D^1/2 and D^1/2 V' grow with the number of rows and would overflow half precision. Axes of
        # length 1 give the same matrix and round as those of an SVD.
        lengths = torch.linalg.vector_norm(pair.basis, dim=1)
        basis = pair.basis / torch.where(lengths > 0, lengths, 1.0).unsqueeze(1)
        return Factored(LowRankMatrix(pair.coordinates * lengths, basis), (pair.error,), EntryPowers(self.p))


@dataclass(frozen=True)
class Entrywise(PairMethod):
    """Low rank under the entrywise lp error, fitted directly.

        minimise over U (n, r), V (r, d)    sum_i w_i sum_j |A - U V|_ij^p

    Args:
        p: 0 < p <= 2; 2 is the SVD.
        tolerance: the fit stops when an iteration lowers the sum by less than this share.
        max_iterations: the fit stops after this many iterations.

    Choose it where single entries may be wrong, or where absolute errors count. Its coordinates are no projections:
    rows that a squared error would fit well may be farther away.

    >>> Entrywise(p=1.0)
    Entrywise(p=1.0, tolerance=2e-05, max_iterations=300)
    """

    p: float = 1.0
    tolerance: float = 2e-5
    max_iterations: int = 300

    def __post_init__(self) -> None:
        check_power(self.p, 2.0)
        check_steps(self.tolerance, self.max_iterations)

    def _pair(self, problem: Problem, rank: int) -> Factored:
        stop = Stopping(self.tolerance, self.max_iterations, problem.progress)
        pair = entrywise_low_rank(problem.rows, rank, p=self.p, weights=problem.row_weights, stop=stop)
        matrix = LowRankMatrix(pair.coordinates, pair.basis)
        return Factored(matrix, pair.objective, EntryPowers(self.p), pair.converged)


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
        check_loss(self.error)
        check_steps(self.tolerance, self.max_iterations)

    def _pair(self, problem: Problem, rank: int) -> Factored:
        stop = Stopping(self.tolerance, self.max_iterations, problem.progress)
        pair = robust_subspace(problem.rows, rank, self.error, weights=problem.row_weights, stop=stop)
        matrix = LowRankMatrix(pair.coordinates, pair.basis)
        return Factored(matrix, pair.objective, Distances(pair.loss), pair.converged)
