"""The methods of singular value decompositions: one flat, and k-means with a flat for each cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from kflats.common.errors import DoesNotFitError, check_arguments, is_whole
from kflats.matrices.registry import InterpolativeMatrix, LowRankMatrix, order_dtype
from kflats.methods.flats import from_flats, spent, too_few
from kflats.methods.protocol import ClusterMethod, Factored, Method, PairMethod, Problem
from kflats.numerics.fit import kmeans
from kflats.numerics.flats import FlatsFit, WeightedRows, squared_norms
from kflats.numerics.gram import WideRows, cluster_grams, top_eigenvectors
from kflats.numerics.interpolative import interpolate
from kflats.numerics.svd import truncated_svd

Form = Literal["factors", "interpolative"]
"""How a low-rank matrix is stored: two factors, or one of them holding an identity block."""


@dataclass(frozen=True)
class SVD(PairMethod):
    """One flat: min || L (A - U V) R ||_F^2 of the largest rank that fits (FWSVD, eq. 6, for row weights).

    Args:
        form: "factors": U (n, r) and V (r, d), r (n + d) numbers. "interpolative": the same matrix as r of its own
            columns and the combinations of them that give the others, r (n + d - r) numbers and an index of d columns.

    Choose it for linear layers, and where a target runs low-rank pairs only; for long tables ``Flats`` loses less at
    equal bytes.

    >>> SVD().cost((384, 384), 127, 4), SVD(form="interpolative").cost((384, 384), 127, 4)
    (390144, 326396)
    """

    form: Form = "factors"

    accepts: ClassVar[frozenset[str]] = frozenset({"rows", "left", "right"})
    prefix_optimal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_arguments(self, form=(self.form in ("factors", "interpolative"), "factors or interpolative"))

    @property
    def minimizes_squares(self) -> bool:
        """As ``Method.minimizes_squares``."""
        return True

    @property
    def stores_skeleton(self) -> bool:
        """As ``Method.stores_skeleton``."""
        return self.form == "interpolative"

    def cost(self, shape: tuple[int, int], rank: int, itemsize: int) -> int:
        """Stored bytes at ``rank``, the index of the interpolative form included."""
        n, d = shape
        numbers = rank * (n + d) if self.form == "factors" else rank * (n + d - rank)
        return numbers * itemsize + self.index_bytes(shape)

    def index_bytes(self, shape: tuple[int, int]) -> int:
        """Bytes of the order of the columns, which the interpolative form stores."""
        return 0 if self.form == "factors" else shape[1] * order_dtype(shape[1]).itemsize

    def _pair(self, problem: Problem, rank: int) -> Factored:
        weighting = problem.weighting
        svd = truncated_svd(problem.rows, rank, left=weighting.left, right=weighting.right)
        coordinates, basis = svd.coordinates, svd.basis
        if weighting.right is not None:
            # A right metric leaves the basis oblique. An orthonormal basis loses least when it is rounded.
            q, t = torch.linalg.qr(basis.to(torch.float64).T)
            coordinates = (coordinates.to(torch.float64) @ t.T).to(coordinates.dtype)
            basis = q.T.contiguous().to(basis.dtype)
        if self.form == "factors":
            return Factored(LowRankMatrix(coordinates, basis), (svd.error,))
        pair = interpolate(coordinates, basis)
        order = pair.order.to(order_dtype(basis.shape[1]))
        return Factored(InterpolativeMatrix(pair.skeleton, pair.mixing, order), (svd.error,))

    @classmethod
    def automatic(cls, shape: tuple[int, int]) -> tuple[Method, ...]:
        """As ``Method.automatic``."""
        return (cls(),)


@dataclass(frozen=True)
class KMeansSVD(ClusterMethod):
    """k-means clusters of rows with an SVD in each: the baseline of MESSI's appendix E.

    Args:
        k: number of clusters, 1 to 4096.
        restarts: how many starts k-means makes, 1 to 1000, each with a seed of its own; the least error is kept.

    Choose it to compare with the paper; ``Flats`` loses less in the same bytes.
    """

    k: int = 5
    restarts: int = 1

    accepts: ClassVar[frozenset[str]] = frozenset({"rows"})

    def __post_init__(self) -> None:
        check_arguments(self, k=(is_whole(self.k, 1, 4096), "1 to 4096"))
        check_arguments(self, restarts=(is_whole(self.restarts, 1, 1000), "1 to 1000"))

    @property
    def flats(self) -> int:
        """As ``Method.flats``."""
        return self.k

    def _fit(self, problem: Problem) -> Factored:
        rows, k = problem.rows, self.k
        n, d = rows.shape
        if k > n:
            raise DoesNotFitError(
                f"k={k} is not supported with {n} rows", cause="each cluster has a row", hint=f"k from 1 to {n}"
            )
        rank = min(problem.values(k) // (n + k * d), n, d)
        if rank < 1:
            raise too_few(problem, k)
        wide = WideRows.of(rows) if n < d else None
        inside = rows if wide is None else wide.inside
        cloud = WeightedRows(inside, squared_norms(inside), problem.row_weights)
        fits = [_clustered(cloud, k, rank, start.seed) for start in problem.starts(self.restarts)]
        fit = min(fits, key=lambda fit: fit.error)
        if wide is not None:
            fit = replace(fit, bases=tuple(map(wide.lifted, fit.bases)))
        fit = spent(problem, fit, uniform=True)
        return Factored(from_flats(rows, fit), fit.objective)


def _clustered(cloud: WeightedRows, k: int, rank: int, seed: int) -> FlatsFit:
    labels = kmeans(cloud, k, torch.Generator().manual_seed(seed))
    solved = [top_eigenvectors(gram, rank) for gram in cluster_grams(cloud.rows, labels, k, cloud.weights)]
    spectra = torch.stack([values for values, _ in solved])
    error = float(spectra[:, rank:].sum())
    return FlatsFit(labels, tuple(v.to(cloud.rows.dtype) for _, v in solved), spectra, (error,), True)
