"""Methods: frozen values that say which geometry covers the rows. Each makes a Matrix of rows, weighting and bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kflats.coordinates import from_flats, from_nested
from kflats.errors import KflatsError
from kflats.judging import row_errors
from kflats.nn.matrix import label_dtype
from kflats.numerics.allocation import fill
from kflats.numerics.assign import squared_norms
from kflats.numerics.fit import fit_flats
from kflats.numerics.flats import Cloud, FlatsFit
from kflats.numerics.gram import cluster_grams, top_eigenvectors
from kflats.numerics.lewis import Lewis
from kflats.numerics.loss import Loss
from kflats.numerics.metric import Metric, right_metric
from kflats.numerics.nested import NestedFit
from kflats.numerics.nested_fit import fit_nested
from kflats.numerics.rows import MetricRows, Rows, TensorRows, check_finite, check_weights
from kflats.numerics.seeding import kmeans
from kflats.numerics.svd import weighted_spectrum
from kflats.one_flat import SVD, Dense, tails
from kflats.problem import Factored, Problem, check_accepts, refuse_bytes
from kflats.robust_methods import RobustSVD, Subspace, ellipsoid_of
from kflats.weighting import Weighting

__all__ = [
    "MESSI",
    "SVD",
    "VALUES",
    "Dense",
    "Factored",
    "Flats",
    "KMeansSVD",
    "Problem",
    "RobustSVD",
    "Subspace",
    "ellipsoid_of",
    "from_name",
    "row_errors",
]


@dataclass(frozen=True)
class Flats:
    """k flats through the rows (MESSI, section 2), by default with ranks that follow importance.

        minimise  sum_i w_i dist(a_i, S_c(i))^2   with   sum_c j_c (n_c + d) + d n_exact + labels <= bytes

    Under a right metric R distances are those of the rows of A R, dist(a_i R, S R)^2: flats are found there
    and mapped back.

    Args:
        k: number of flats; None searches (appendix D) by the objective.
        ranks: "filled": ranks flat by flat, by water-filling inside EM. "uniform": all flats of rank
            j = (numbers) / (n + k d), as published.
        exact: with filled ranks, let rows whose weight pays for it be kept as they are.
        levels: with filled ranks, how many ranks the rows of one flat may choose from, each a prefix of the
            flat's ordered basis; 1: all rows of a flat have its rank. ``Flats(k=1, levels=8)`` is one basis
            with a rank per row.
        start: how EM starts: "auto", or continuation, greedy, plus_plus, kmeans, random, norms.
        restarts: best of so many.
        tolerance: EM stops when an iteration lowers the objective by less than this share.
        max_iterations: EM stops there in any case.

    Choose it for tables with many more rows than columns. Limit: each flat costs a basis, so very short
    tables prefer fewer flats, down to ``SVD``.

    >>> Flats(k=5)
    Flats(k=5, ranks='filled', exact=True, levels=1, start='auto', restarts=1, tolerance=0.001, max_iterations=60)
    """

    k: int | None = 5
    ranks: Literal["filled", "uniform"] = "filled"
    exact: bool = True
    levels: int = 1
    start: str = "auto"
    restarts: int = 1
    tolerance: float = 1e-3
    max_iterations: int = 60

    accepts = frozenset({"rows", "right"})

    def __post_init__(self) -> None:
        counts = (1 if self.k is None else self.k, self.levels, self.restarts, self.max_iterations)
        if not all(isinstance(count, int) and not isinstance(count, bool) for count in counts):
            raise KflatsError("k, levels, restarts and max_iterations are whole numbers", hint="Flats(k=5)")
        if self.k is not None and (self.k < 1 or self.k > 4096):
            raise KflatsError(f"{self.k} flats are not possible", hint="k from 1 to 4096, or None to search")
        if self.ranks not in ("filled", "uniform"):
            raise KflatsError(f"ranks={self.ranks!r} is unknown", hint='"filled" or "uniform"')
        if not 1 <= self.levels <= 256 or (self.levels > 1 and self.ranks == "uniform"):
            raise KflatsError(
                f"levels={self.levels} with {self.ranks} ranks is not possible", hint='1 to 256, above 1 with "filled"'
            )
        if self.restarts < 1 or self.max_iterations < 1 or not 0 <= self.tolerance < 1:
            raise KflatsError("restarts and max_iterations start at 1, tolerance lies in [0, 1)")

    def fit(self, problem: Problem) -> Factored:
        """A FlatsMatrix within the bytes.

        Raises:
            KflatsError: the bytes do not hold k flats of rank 1, or the rows cannot be fitted.
        """
        start = time.perf_counter()
        check_accepts("Flats", self.accepts, problem.weighting)
        inside, metric = _in_metric(problem)
        if self.k is None:
            found = min((self._fit(inside, k) for k in _CHOICES if self._fits(inside, k)), key=_error, default=None)
            if found is None:
                raise _too_few(problem, 1)
        else:
            found = self._fit(inside, self.k)
        if not isinstance(found, NestedFit):
            found = _spent(inside, found, uniform=self.ranks == "uniform")
            matrix = from_flats(problem.rows, found, metric)
        else:
            matrix = from_nested(problem.rows, found, metric)
        return Factored(matrix, _scaled(found.objective, metric), time.perf_counter() - start)

    def cost(self, shape: tuple[int, int], rank: int, itemsize: int) -> int:
        """Stored bytes where all flats have ``rank``, labels included (one flat if k is None)."""
        return _flats_cost(shape, rank, itemsize, self.k or 1)

    def spectrum(self, rows: Rows, weighting: Weighting) -> Tensor:
        """(min(n, d) + 1,) float64: the objective of *one* flat of rank 0, 1, ...: k of those ranks lose less."""
        check_accepts("Flats", self.accepts, weighting)
        return tails(weighted_spectrum(rows, left=weighting.left, right=weighting.right))

    def _fits(self, problem: Problem, k: int) -> bool:
        n, d = problem.rows.shape
        return k <= n and problem.values(k) >= n + k * d

    def _fit(self, problem: Problem, k: int) -> FlatsFit | NestedFit:
        n, d = problem.rows.shape
        exact = self.exact and self.ranks == "filled"
        if self.levels > 1 and k <= n and problem.values(k * self.levels + exact) >= n + k * d:
            found = fit_nested(
                problem.rows,
                k,
                self.levels,
                budget=problem.values(k * self.levels + exact),
                exact=exact,
                weights=problem.weights,
                start=self.start,
                restarts=self.restarts,
                tolerance=self.tolerance,
                max_iterations=self.max_iterations,
                seed=problem.seed,
                progress=problem.progress,
            )
            if (
                found.bands_in_use > 1
            ):  # one band of all rows has no labels to pay for: below, its rank uses their bytes
                return found
        values = problem.values(k + exact)
        if exact and values < n + k * d:  # one more band may need labels, or wider ones
            exact, values = False, problem.values(k)
        rank = min(values // (n + k * d), n, d)
        if rank < 1:
            raise _too_few(problem, k)
        filled = self.ranks == "filled"
        return fit_flats(
            problem.rows,
            k,
            rank=None if filled else rank,
            budget=values if filled else None,
            exact=exact,
            weights=problem.weights,
            start=self.start,
            restarts=self.restarts,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
            seed=problem.seed,
            progress=problem.progress,
        )


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
            raise _too_few(problem, k)
        check_finite(rows)
        check_weights(weights, n)
        labels = kmeans(Cloud(rows, squared_norms(rows), weights), k, rank, torch.Generator().manual_seed(problem.seed))
        solved = [top_eigenvectors(gram, rank) for gram in cluster_grams(rows, labels, k, weights)]
        spectra = torch.stack([values for values, _ in solved])
        error = float(spectra[:, rank:].sum())
        fit = FlatsFit(labels, tuple(v.to(rows.dtype) for _, v in solved), spectra, (error,), True)
        fit = _spent(problem, fit, uniform=True)
        return Factored(from_flats(rows, fit), fit.objective, time.perf_counter() - start)

    def cost(self, shape: tuple[int, int], rank: int, itemsize: int) -> int:
        """Stored bytes where all clusters have ``rank``, labels included."""
        return _flats_cost(shape, rank, itemsize, self.k)

    def spectrum(self, rows: Rows, weighting: Weighting) -> Tensor:
        """(min(n, d) + 1,) float64: the objective of *one* flat of rank 0, 1, ...: k of those ranks lose less."""
        check_accepts("KMeansSVD", self.accepts, weighting)
        return tails(weighted_spectrum(rows, left=weighting.left))


def MESSI(k: int = 5) -> Flats:
    """MESSI as published: equal ranks, a random partition to start from. Use it with Uniform().

    What differs is how fast EM runs: between whole E-steps a few look at doubtful rows only (docs/mathematics.md).
    """
    return Flats(k=k, ranks="uniform", exact=False, start="random", tolerance=1e-4, max_iterations=100)


VALUES: tuple[type, ...] = (SVD, Flats, KMeansSVD, Dense, RobustSVD, Subspace)
PARTS: tuple[type, ...] = (*get_args(Loss), Lewis)  # what fields of methods hold
_HELD = 2**28  # numbers of a table that is kept in memory in another metric
_CHOICES = (1, 2, 3, 4, 5, 7, 10, 15)
NAMES: dict[str, Callable[..., Any]] = {
    "svd": SVD,
    "flats": Flats,
    "kmeans-svd": KMeansSVD,
    "messi": MESSI,
    "dense": Dense,
    "robust-svd": RobustSVD,
    "subspace": Subspace,
}
"""What a command line calls the methods."""


def options_of(name: str) -> tuple[str, ...]:
    """What the method called ``name`` may be told.

    Raises:
        KflatsError: no method is called that.
    """
    make = NAMES.get(name.strip().lower())
    if make is None:
        raise KflatsError(f"no method is called {name!r}", hint="one of " + ", ".join(NAMES))
    return tuple(signature(make).parameters)


def from_name(name: str, **options: Any) -> Any:
    """The method that a command line calls ``name``: one of ``NAMES``.

    >>> from_name("svd")
    SVD(form='factors')
    """
    known = options_of(name)
    if wrong := sorted(options.keys() - set(known)):
        raise KflatsError(f"{name} has no {', '.join(wrong)}", hint=f"it has {', '.join(known) or 'no options'}")
    return NAMES[name.strip().lower()](**options)


def _error(fit: FlatsFit | NestedFit) -> float:
    return fit.error


def _too_few(problem: Problem, k: int) -> KflatsError:
    n, d = problem.rows.shape
    least = (n + k * d) * problem.itemsize + n * (k > 1)
    return refuse_bytes(problem, least, f"{k} flat{'s' * (k > 1)} of rank 1")


def _flats_cost(shape: tuple[int, int], rank: int, itemsize: int, k: int) -> int:
    n, d = shape
    labels = n * label_dtype(k).itemsize if k > 1 else 0
    return rank * (n + k * d) * itemsize + labels


def _in_metric(problem: Problem) -> tuple[Problem, Metric | None]:
    """The problem of the rows of A R, without R."""
    rows, right = problem.rows, problem.weighting.right
    if right is None:
        return problem, None
    check_finite(rows)
    metric = right_metric(right.to(rows.device), rows.shape[1])
    inside: Rows = MetricRows(rows, metric.factor)
    if rows.shape[0] * rows.shape[1] <= _HELD:  # EM reads its rows many times: multiply once where memory allows
        inside = TensorRows(torch.cat([block for _, block in inside.blocks(rows.shape[0])]))
    return replace(problem, rows=inside, weighting=replace(problem.weighting, right=None)), metric


def _scaled(objective: tuple[float, ...], metric: Metric | None) -> tuple[float, ...]:
    return objective if metric is None else tuple(metric.scale * value for value in objective)


def _spent(problem: Problem, fit: FlatsFit, *, uniform: bool) -> FlatsFit:
    """Flats that no row uses, and labels that one band does not need, give their numbers to the others."""
    rows, k = problem.rows, len(fit.bases)
    n, d = rows.shape
    counts = torch.bincount(fit.labels.to(torch.int64), minlength=k + 1).cpu()
    used = counts[:k].nonzero().squeeze(1).tolist()
    exact = int(counts[k])
    if not used or (len(used) == k and k + bool(exact) > 1):
        return fit
    # One flat that holds all rows becomes a low-rank pair, without labels.
    numbers = problem.values(1 if len(used) == 1 and not exact else max(len(used) + bool(exact), 2)) - exact * d
    costs = counts[used] + d
    spectra = fit.spectra[used]
    if uniform:
        ranks = [min(numbers // int(costs.sum()), n, d)] * len(used)
    else:
        ranks = list(fill(spectra, costs, numbers).ranks)
    if all(rank <= len(fit.bases[c]) for rank, c in zip(ranks, used, strict=True)):
        return fit
    grams = cluster_grams(rows, fit.labels, k, problem.weights)
    bases = list(fit.bases)
    for rank, c in zip(ranks, used, strict=True):
        bases[c] = top_eigenvectors(grams[c], rank)[1].to(rows.dtype)
    error = float(sum(spectrum[rank:].sum() for rank, spectrum in zip(ranks, spectra, strict=True)))
    history = fit.objective + ((error,) if error < fit.error else ())
    return replace(fit, bases=tuple(bases), objective=history)
