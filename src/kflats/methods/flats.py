"""The method of several flats, fitted by EM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from kflats.common.errors import KflatsError
from kflats.methods.coordinates import from_flats, from_nested
from kflats.methods.matrix_error import Distances, Norm
from kflats.methods.problem import Problem
from kflats.methods.protocol import ClusterMethod, Fit
from kflats.methods.spending import spent, too_few
from kflats.numerics.coreset import Coreset
from kflats.numerics.fit import fit_flats
from kflats.numerics.flats import FlatsFit
from kflats.numerics.loss import Huber, Loss, Power, Squared, Truncated
from kflats.numerics.metric import Metric, right_metric
from kflats.numerics.nested import NestedFit
from kflats.numerics.nested_fit import fit_nested
from kflats.numerics.rows import MetricRows, Rows, TensorRows

_HELD = 2**28  # numbers of a table that is kept in memory in another metric
_CHOICES = (1, 2, 3, 4, 5, 7, 10, 15)
MOST_SEARCHED = _CHOICES[-1]
"""The largest number of flats that a search tries."""


@dataclass(frozen=True)
class Flats(ClusterMethod):
    """k flats through the rows (MESSI, section 2), by default with ranks that follow importance.

        minimise  sum_i w_i rho(dist(a_i, S_c(i)))   with   sum_c j_c (n_c + d) + d n_exact + labels <= bytes

    Under a right metric R distances are those of the rows of A R, dist(a_i R, S R)^2: flats are found there
    and mapped back.

    Args:
        k: number of flats; None searches (appendix D) by the objective, under the threshold (if any) of the first.
        ranks: "filled": ranks flat by flat, by water-filling inside EM. "uniform": all flats of rank
            j = (numbers) / (n + k d), as published.
        exact: with filled ranks, let rows whose weight pays for it be kept as they are.
        nested_ranks: with filled ranks, how many ranks the rows of one flat may choose from, each a prefix of the
            flat's ordered basis; 1: all rows of a flat have its rank. ``Flats(k=1, nested_ranks=8)`` is one basis
            with a rank per row.
        start: how EM starts: "auto", or continuation, greedy, plus_plus, kmeans, random, norms.
        restarts: best of so many.
        tolerance: EM stops when an iteration lowers the objective by less than this share.
        max_iterations: EM stops there in any case.
        error: rho, what a distance costs: ``Squared()``, or ``Power(1)``, ``Huber(...)``, ``Truncated(...)`` where
            some rows lie far from all others (MESSI, appendix E.1). One level only.
        coreset: with uniform ranks, ``Coreset()`` lets EM converge on a sample before it sees all rows: for tables of
            a million rows.

    Choose it for tables with many more rows than columns. Limit: each flat costs a basis, so very short
    tables prefer fewer flats, down to ``SVD``.

    >>> Flats(k=5)
    Flats(k=5, ranks='filled', exact=True, nested_ranks=1, start='auto', restarts=1, tolerance=0.001, \
max_iterations=60, error=Squared(), coreset=None)
    """

    k: int | None = 5
    ranks: Literal["filled", "uniform"] = "filled"
    exact: bool = True
    nested_ranks: int = 1
    start: str = "auto"
    restarts: int = 1
    tolerance: float = 1e-3
    max_iterations: int = 60
    error: Loss = Squared()
    coreset: Coreset | None = None

    accepts: ClassVar[frozenset[str]] = frozenset({"rows", "right"})

    def __post_init__(self) -> None:
        counts = (1 if self.k is None else self.k, self.nested_ranks, self.restarts, self.max_iterations)
        if not all(isinstance(count, int) and not isinstance(count, bool) for count in counts):
            raise KflatsError("k, nested_ranks, restarts and max_iterations are whole numbers", hint="Flats(k=5)")
        if self.k is not None and (self.k < 1 or self.k > 4096):
            raise KflatsError(f"{self.k} flats are not possible", hint="k from 1 to 4096, or None to search")
        if self.ranks not in ("filled", "uniform"):
            raise KflatsError(f"ranks={self.ranks!r} is unknown", hint='"filled" or "uniform"')
        if not 1 <= self.nested_ranks <= 256 or (self.nested_ranks > 1 and self.ranks == "uniform"):
            raise KflatsError(
                f"nested_ranks={self.nested_ranks} with {self.ranks} ranks is not possible",
                hint='1 to 256, above 1 with "filled"',
            )
        number = isinstance(self.tolerance, int | float) and not isinstance(self.tolerance, bool)
        if self.restarts < 1 or self.max_iterations < 1 or not number or not 0 <= self.tolerance < 1:
            raise KflatsError("restarts and max_iterations start at 1, tolerance is a number in [0, 1)")
        if not isinstance(self.error, Loss):
            raise KflatsError(
                f"Flats has no error {self.error!r}", hint="Squared(), Power(1), Huber(...), Truncated(...)"
            )
        if self.nested_ranks > 1 and not self.minimizes_squares:
            raise KflatsError(
                f"nested_ranks={self.nested_ranks} minimises squares only",
                cause="prefixes are chosen by what they save of a square",
                hint="nested_ranks=1",
            )
        if self.coreset is not None and (not isinstance(self.coreset, Coreset) or self.ranks != "uniform"):
            raise KflatsError(
                f"coreset={self.coreset!r} is not possible with {self.ranks} ranks",
                hint='Coreset() with ranks="uniform"',
            )

    @property
    def flats(self) -> int:
        """As ``Method.flats``; one where the number is searched."""
        return self.k or 1

    @property
    def most_classes(self) -> int:
        """As ``Method.most_classes``."""
        return (self.k or MOST_SEARCHED) * self.nested_ranks

    @property
    def minimizes_squares(self) -> bool:
        """As ``Method.minimizes_squares``."""
        return isinstance(self.error, Squared) or self.error == Power(2)

    @property
    def equal_ranks(self) -> bool:
        """As ``Method.equal_ranks``."""
        return self.ranks == "uniform"

    def all_in_flats(self) -> Flats:
        """As ``Method.all_in_flats``."""
        return replace(self, exact=False)

    def flat_counts(self) -> tuple[int, ...]:
        """As ``Method.flat_counts``."""
        return (1, 2, 4, 8) if self.k is None else (self.k,)

    def with_flats(self, k: int) -> Flats:
        """As ``Method.with_flats``."""
        return replace(self, k=k, ranks="uniform")

    def _fit(self, problem: Problem) -> Fit:
        inside, metric = _in_metric(problem)
        method = replace(self, error=_measured(self.error, metric))
        norm: Norm | None
        if self.k is None:
            fit = method._searched(inside)
        else:
            fit = method._with_k(inside, self.k)
        if isinstance(fit, NestedFit):
            matrix, norm = from_nested(problem.rows, fit, metric), None
            objective = _scaled(fit.objective, metric, 2)
        else:
            if self.minimizes_squares:
                fit = spent(inside, fit, uniform=self.ranks == "uniform")
            matrix = from_flats(problem.rows, fit, metric)
            objective = _scaled(fit.objective, metric, _degree(self.error))
            norm = None if self.minimizes_squares or metric is not None else Distances(fit.loss)
        return Fit(matrix, objective, norm, fit.converged)

    def _fits(self, problem: Problem, k: int) -> bool:
        n, d = problem.rows.shape
        return k <= n and problem.values(k) >= n + k * d

    def _searched(self, problem: Problem) -> FlatsFit | NestedFit:
        method, fits = self, []
        for k in _CHOICES:
            if not self._fits(problem, k):
                continue
            fits.append(found := method._with_k(problem, k))
            if isinstance(found, FlatsFit) and found.loss != method.error:
                # Medians differ from k to k, and sums under different thresholds cannot be compared.
                method = replace(self, error=found.loss)
        if not fits:
            raise too_few(problem, 1)
        return min(fits, key=_error)

    def _with_k(self, problem: Problem, k: int) -> FlatsFit | NestedFit:
        return self._fit_bands(problem, k, self.exact and self.ranks == "filled")

    def _fit_bands(self, problem: Problem, k: int, exact: bool) -> FlatsFit | NestedFit:
        n, d = problem.rows.shape
        settings: dict[str, Any] = {
            "weights": problem.weights,
            "start": self.start,
            "restarts": self.restarts,
            "tolerance": self.tolerance,
            "max_iterations": self.max_iterations,
            "seed": problem.seed,
            "progress": problem.progress,
        }
        if self.nested_ranks > 1 and k <= n and problem.values(k * self.nested_ranks + exact) >= n + k * d:
            held = problem.values(k * self.nested_ranks + exact)
            found = fit_nested(problem.rows, k, self.nested_ranks, budget=held, exact=exact, **settings)
            if found.groups_in_use > 1:  # of one band, without labels to pay for, the rank below uses their bytes
                return found
        values = problem.values(k + exact)
        if exact and values < n + k * d:  # one more band may need labels, or wider ones
            exact, values = False, problem.values(k)
        rank = min(values // (n + k * d), n, d)
        if rank < 1:
            raise too_few(problem, k)
        if self.ranks == "filled":
            fit = fit_flats(problem.rows, k, budget=values, exact=exact, error=self.error, **settings)
        else:
            fit = fit_flats(problem.rows, k, rank=rank, error=self.error, coreset=self.coreset, **settings)
        if self.minimizes_squares:
            return fit
        # What flats and labels that no row uses would take is given to the others: one fit more, with fewer.
        counts = torch.bincount(fit.labels.to(torch.int64), minlength=k + 1)
        used, kept = int((counts[:k] > 0).sum()), int(counts[k]) > 0
        fewer = max(used, 1) < k or (k == 1 and exact and not kept)
        return self._fit_bands(problem, max(used, 1), exact and kept) if fewer else fit


def _error(fit: FlatsFit | NestedFit) -> float:
    return fit.error


def _degree(error: Loss) -> float:
    """q of rho_{s t0}(s t) = s^q rho_{t0}(t)."""
    return error.q if isinstance(error, Power) else 1 if isinstance(error, Truncated) else 2


def _measured(error: Loss, metric: Metric | None) -> Loss:
    """``error`` for distances that are all 1 / sqrt(scale) of the metric's."""
    if metric is None or not isinstance(error, Huber | Truncated) or error.unit != "absolute":
        return error
    return replace(error, threshold=error.threshold / metric.scale**0.5)


def _in_metric(problem: Problem) -> tuple[Problem, Metric | None]:
    """The problem of the rows of A R, without R."""
    rows, right = problem.rows, problem.weighting.right
    if right is None:
        return problem, None
    metric = right_metric(right.to(rows.device), rows.shape[1])
    inside: Rows = MetricRows(rows, metric.factor)
    if rows.shape[0] * rows.shape[1] <= _HELD:  # EM reads its rows many times: multiply once where memory allows
        inside = TensorRows(torch.cat([block for _, block in inside.blocks(rows.shape[0])]))
    return replace(problem, rows=inside, weighting=replace(problem.weighting, right=None)), metric


def _scaled(objective: tuple[float, ...], metric: Metric | None, degree: float) -> tuple[float, ...]:
    return objective if metric is None else tuple(metric.scale ** (degree / 2) * value for value in objective)
