"""Methods: frozen values that say which geometry covers the rows. Each makes a Matrix from rows, weights and bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kflats.coordinates import from_flats, from_nested
from kflats.errors import KflatsError
from kflats.nn.matrix import LowRankMatrix, Matrix, label_dtype
from kflats.numerics.allocation import fill
from kflats.numerics.assign import squared_norms
from kflats.numerics.fit import fit_flats
from kflats.numerics.flats import Cloud, FlatsFit, Progress
from kflats.numerics.gram import cluster_grams, top_eigenvectors
from kflats.numerics.nested import NestedFit
from kflats.numerics.nested_fit import fit_nested
from kflats.numerics.rows import GRAM_BLOCK, Rows, as_rows, check_finite, check_weights
from kflats.numerics.seeding import kmeans
from kflats.numerics.svd import truncated_svd


@dataclass(frozen=True)
class Problem:
    """What a method is given: ``rows`` (n, d), ``weights`` (n,) or None, and what it may store:
    ``nbytes`` with ``itemsize`` bytes a number, row labels included unless ``free_labels``."""

    rows: Rows
    nbytes: int
    itemsize: int
    weights: Tensor | None = None
    free_labels: bool = False
    seed: int = 0
    progress: Progress | None = None

    def values(self, bands: int) -> int:
        """Numbers that fit beside the labels of ``bands`` bands."""
        n = self.rows.shape[0]
        labels = n * label_dtype(bands).itemsize if bands > 1 and not self.free_labels else 0
        return (self.nbytes - labels) // self.itemsize


@dataclass(frozen=True)
class Factored:
    """A method's result: the matrix, the objective per iteration (falling), and seconds taken."""

    matrix: Matrix
    objective: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class SVD:
    """One flat: min sum_i w_i ||a_i - u_i V||^2, rank r = numbers / (n + d). The closed-form baseline.

    Choose it when a plain low-rank pair is all a target can run; ``Flats`` is better at equal bytes.
    """

    accepts = frozenset({"rows"})

    def fit(self, problem: Problem) -> Factored:
        """A LowRankMatrix of the largest rank that fits.

        Raises:
            KflatsError: not even rank 1 fits.
        """
        start = time.perf_counter()
        n, d = problem.rows.shape
        rank = min(problem.values(1) // (n + d), n, d)
        _enough(rank, n, d, problem, 1)
        found = truncated_svd(problem.rows, rank, weights=problem.weights)
        matrix = LowRankMatrix(found.coordinates, found.basis)
        return Factored(matrix, (found.error,), time.perf_counter() - start)


@dataclass(frozen=True)
class Flats:
    """k flats through the rows (MESSI, section 2), by default with ranks that follow importance.

        minimise  sum_i w_i dist(a_i, S_c(i))^2   with   sum_c j_c (n_c + d) + d n_exact + labels <= bytes

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

    accepts = frozenset({"rows", "right metric"})

    def __post_init__(self) -> None:
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
        if self.k is None:
            found = min((self._fit(problem, k) for k in _CHOICES if self._fits(problem, k)), key=_error, default=None)
            if found is None:
                _enough(0, *problem.rows.shape, problem, 1)
                raise AssertionError("unreachable")
        else:
            found = self._fit(problem, self.k)
        if isinstance(found, NestedFit):
            return Factored(from_nested(problem.rows, found), found.objective, time.perf_counter() - start)
        found = _spent(problem, found, uniform=self.ranks == "uniform")
        return Factored(from_flats(problem.rows, found), found.objective, time.perf_counter() - start)

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
        _enough(rank, n, d, problem, k)
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
        rows, weights, k = problem.rows, problem.weights, self.k
        n, d = rows.shape
        if k > n:
            raise KflatsError(f"{k} clusters do not fit {n} rows", hint=f"choose k in 1..{n}")
        rank = min(problem.values(k) // (n + k * d), n, d)
        _enough(rank, n, d, problem, k)
        check_finite(rows)
        check_weights(weights, n)
        labels = kmeans(Cloud(rows, squared_norms(rows), weights), k, rank, torch.Generator().manual_seed(problem.seed))
        solved = [top_eigenvectors(gram, rank) for gram in cluster_grams(rows, labels, k, weights)]
        spectra = torch.stack([values for values, _ in solved])
        error = float(spectra[:, rank:].sum())
        fit = FlatsFit(labels, tuple(v.to(rows.dtype) for _, v in solved), spectra, (error,), True)
        fit = _spent(problem, fit, uniform=True)
        return Factored(from_flats(rows, fit), fit.objective, time.perf_counter() - start)


def MESSI(k: int = 5) -> Flats:
    """MESSI exactly as published: equal ranks, a random partition to start from. Use it with Uniform()."""
    return Flats(k=k, ranks="uniform", exact=False, start="random", tolerance=1e-4, max_iterations=100)


VALUES: tuple[type, ...] = (SVD, Flats, KMeansSVD)
_CHOICES = (1, 2, 3, 4, 5, 7, 10, 15)
_NAMES: dict[str, Callable[..., Any]] = {"svd": SVD, "flats": Flats, "kmeans-svd": KMeansSVD, "messi": MESSI}


def from_name(name: str, **options: Any) -> Any:
    """The method that a command line calls ``name``: svd, flats, kmeans-svd or messi.

    >>> from_name("svd")
    SVD()
    """
    make = _NAMES.get(name.strip().lower())
    if make is None:
        raise KflatsError(f"no method is called {name!r}", hint="one of " + ", ".join(_NAMES))
    if make is SVD and options:
        raise KflatsError(f"svd has no {', '.join(options)}", cause="it is one flat", hint="flats")
    return make(**options)


def _error(fit: FlatsFit | NestedFit) -> float:
    return fit.error


def _enough(rank: int, n: int, d: int, problem: Problem, k: int) -> None:
    if rank < 1:
        raise KflatsError(
            f"a budget of {problem.nbytes:,} bytes cannot hold {k} flat{'s' * (k > 1)} of rank 1 "
            f"for a {n} x {d} matrix",
            cause=f"that takes {(n + k * d) * problem.itemsize + n * (k > 1):,} bytes",
            hint="a larger budget" + (", or fewer flats" if k > 1 else ""),
        )


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


def row_errors(rows: Rows | Tensor, matrix: Matrix) -> Tensor:
    """(n,) squared distance of each row to its stored form, ||a_i - m_i||^2, by blocks."""
    source = as_rows(rows)
    out = torch.empty(source.shape[0], dtype=torch.float64)
    with torch.no_grad():
        for start, block in source.blocks(GRAM_BLOCK):
            index = torch.arange(start, start + len(block), device=block.device)
            stored = matrix.rows(index).to(block.dtype)
            out[start : start + len(block)] = (block - stored).square().sum(1, dtype=torch.float64).cpu()
    return out
