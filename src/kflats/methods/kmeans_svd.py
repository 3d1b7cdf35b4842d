"""The clusters that k flats are compared with: k-means, and an SVD in each."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.errors import KflatsError
from kflats.importance.weighting import Weighting
from kflats.methods.coordinates import from_flats
from kflats.methods.one_flat import tails
from kflats.methods.problem import Factored, Problem, check_accepts
from kflats.methods.spending import flats_cost, spent, too_few
from kflats.numerics.assign import squared_norms
from kflats.numerics.flats import Cloud, FlatsFit
from kflats.numerics.gram import cluster_grams, top_eigenvectors
from kflats.numerics.rows import Rows, check_finite, check_weights
from kflats.numerics.seeding import kmeans
from kflats.numerics.svd import weighted_spectrum


@dataclass(frozen=True)
class KMeansSVD:
    """k-means clusters of rows, an SVD in each: MESSI's appendix E, the alternative it compares with."""

    k: int = 5

    accepts = frozenset({"rows"})

    def __post_init__(self) -> None:
        if not 1 <= self.k <= 4096:
            raise KflatsError(f"{self.k} clusters are not possible", hint="k from 1 to 4096")

    def fit(self, problem: Problem) -> Factored:
        """A FlatsMatrix of uniform rank.

        Raises:
            KflatsError: the bytes do not hold k flats of rank 1.
        """
        start = time.perf_counter()
        check_accepts("KMeansSVD", self.accepts, problem.weighting)
        rows, weights, k = problem.rows, problem.weights, self.k
        n, d = rows.shape
        if k > n:
            raise KflatsError(f"{k} clusters do not fit {n} rows", hint=f"choose k in 1..{n}")
        rank = min(problem.values(k) // (n + k * d), n, d)
        if rank < 1:
            raise too_few(problem, k)
        check_finite(rows)
        check_weights(weights, n)
        labels = kmeans(Cloud(rows, squared_norms(rows), weights), k, rank, torch.Generator().manual_seed(problem.seed))
        solved = [top_eigenvectors(gram, rank) for gram in cluster_grams(rows, labels, k, weights)]
        spectra = torch.stack([values for values, _ in solved])
        error = float(spectra[:, rank:].sum())
        fit = FlatsFit(labels, tuple(v.to(rows.dtype) for _, v in solved), spectra, (error,), True)
        fit = spent(problem, fit, uniform=True)
        return Factored(from_flats(rows, fit), fit.objective, time.perf_counter() - start)

    def cost(self, shape: tuple[int, int], rank: int, itemsize: int) -> int:
        """Stored bytes where all clusters have ``rank``, labels included."""
        return flats_cost(shape, rank, itemsize, self.k)

    def spectrum(self, rows: Rows, weighting: Weighting) -> Tensor:
        """(min(n, d) + 1,) float64: the objective of *one* flat of rank 0, 1, ...: k of those ranks lose less."""
        check_accepts("KMeansSVD", self.accepts, weighting)
        return tails(weighted_spectrum(rows, left=weighting.left))
