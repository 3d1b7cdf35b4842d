"""k-means clusters with an SVD in each: a baseline for k flats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kflats.common.arguments import is_whole
from kflats.common.errors import KflatsError
from kflats.methods.coordinates import from_flats, spent, too_few
from kflats.methods.protocol import ClusterMethod, Fit, Problem
from kflats.numerics.fit import kmeans
from kflats.numerics.flats import FlatsFit, WeightedRows, squared_norms
from kflats.numerics.gram import cluster_grams, top_eigenvectors


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
        for name, most in (("k", 4096), ("restarts", 1000)):
            if not is_whole(value := getattr(self, name), 1, most):
                raise KflatsError(f"{name}={value!r} is not supported with KMeansSVD", hint=f"{name} from 1 to {most}")

    @property
    def flats(self) -> int:
        """As ``Method.flats``."""
        return self.k

    def _fit(self, problem: Problem) -> Fit:
        rows, k = problem.rows, self.k
        n, d = rows.shape
        if k > n:
            raise KflatsError(
                f"k={k} is not supported with {n} rows", cause="each cluster has a row", hint=f"k from 1 to {n}"
            )
        rank = min(problem.values(k) // (n + k * d), n, d)
        if rank < 1:
            raise too_few(problem, k)
        cloud = WeightedRows(rows, squared_norms(rows), problem.row_weights)
        fits = [_clustered(cloud, k, rank, start.seed) for start in problem.starts(self.restarts)]
        fit = spent(problem, min(fits, key=lambda fit: fit.error), uniform=True)
        return Fit(from_flats(rows, fit), fit.objective)


def _clustered(cloud: WeightedRows, k: int, rank: int, seed: int) -> FlatsFit:
    labels = kmeans(cloud, k, torch.Generator().manual_seed(seed))
    solved = [top_eigenvectors(gram, rank) for gram in cluster_grams(cloud.rows, labels, k, cloud.weights)]
    spectra = torch.stack([values for values, _ in solved])
    error = float(spectra[:, rank:].sum())
    return FlatsFit(labels, tuple(v.to(cloud.rows.dtype) for _, v in solved), spectra, (error,), True)
