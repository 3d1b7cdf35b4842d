"""The method of several flats, fitted by EM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, Literal

import torch

from kflats.common.errors import KflatsError, check_arguments, is_whole
from kflats.methods.coordinates import from_flats, spent, too_few
from kflats.methods.matrix_error import Distances, Norm
from kflats.methods.protocol import ClusterMethod, Factored, Problem
from kflats.numerics.fit import Seeds, fit_flats
from kflats.numerics.flats import FlatsFit, Stopping
from kflats.numerics.loss import Huber, Loss, Power, Squared, Truncated, check_loss
from kflats.numerics.nested import NestedFit, fit_nested
from kflats.numerics.rows import MetricRows, Rows, TensorRows, check_steps
from kflats.numerics.svd import Metric, right_metric

_IN_MEMORY = 2**28  # numbers of a table that is multiplied by a metric once and kept in memory
_CHOICES = (1, 2, 3, 4, 5, 7, 10, 15)  # the numbers of flats that a search tries


@dataclass(frozen=True)
class Flats(ClusterMethod):
    """k flats through the rows (MESSI, section 2), each row in the nearest; by default with a rank for each flat.

        minimise  sum_i w_i rho(dist(a_i, S_c(i)))   with   sum_c j_c (n_c + d) + d n_exact + labels <= bytes

    Under a right metric R the distances are those of A R, dist(a_i R, S R)^2: the flats are fitted to the rows of A R
    and mapped back.

    Args:
        k: number of flats, 1 to 4096. None: the search of appendix D, which compares objectives; all of them have the
            threshold (if any) of the first fit.
        ranks: "filled": a rank for each flat, by water-filling inside EM. "uniform": all flats have rank
            j = (numbers) / (n + k d), as published.
        exact: with filled ranks, whether rows are kept exactly where that lowers the objective.
        nested_ranks: with filled ranks, how many ranks the rows of one flat may have, 1 to 256, each a prefix of the
            flat's ordered basis. ``Flats(k=1, nested_ranks=8)`` is one basis with a rank for each row.
        start: how EM starts: "auto", or "random" as published.
        tolerance: EM stops when an iteration lowers the objective by less than this share.
        max_iterations: EM stops after this many iterations.
        error: rho, the cost of a distance: ``Squared()``, or ``Power(1)``, ``Huber(...)``, ``Truncated(...)`` where
            some rows lie far from all others (MESSI, appendix E.1); with one nested rank only.
        restarts: how many starts EM makes, 1 to 1000, each with a seed of its own; the fit of least error is kept.

    Choose it for tables with many more rows than columns. Limit: each flat stores a basis, so a short table is stored
    better with fewer flats, or with ``SVD``.

    >>> Flats(k=5)
    Flats(k=5, ranks='filled', exact=True, nested_ranks=1, start='auto', tolerance=0.001, \
max_iterations=60, error=Squared(), restarts=1)
    """

    k: int | None = 5
    ranks: Literal["filled", "uniform"] = "filled"
    exact: bool = True
    nested_ranks: int = 1
    start: Seeds = "auto"
    tolerance: float = 1e-3
    max_iterations: int = 60
    error: Loss = Squared()
    restarts: int = 1

    accepts: ClassVar[frozenset[str]] = frozenset({"rows", "right"})

    def __post_init__(self) -> None:
        check_steps(self.tolerance, self.max_iterations)
        check_loss(self.error)
        check_arguments(
            self,
            k=(self.k is None or is_whole(self.k, 1, 4096), "1 to 4096, or None for a search"),
            ranks=(self.ranks in ("filled", "uniform"), '"filled" or "uniform"'),
            nested_ranks=(is_whole(self.nested_ranks, 1, 256), "1 to 256"),
            start=(self.start in ("auto", "random"), '"auto" or "random"'),
            restarts=(is_whole(self.restarts, 1, 1000), "1 to 1000"),
        )
        if self.nested_ranks > 1 and (self.ranks == "uniform" or not self.minimizes_squares):
            raise KflatsError(
                f"nested_ranks={self.nested_ranks} is not supported with {self.ranks} ranks and error={self.error!r}",
                cause="the rank of a row is chosen by its squared error, under a budget that all ranks share",
                hint="filled ranks under squared errors, or no nested ranks",
            )

    @property
    def flats(self) -> int:
        """As ``Method.flats``; one where the number is searched."""
        return self.k or 1

    @property
    def most_classes(self) -> int:
        """As ``Method.most_classes``."""
        return (self.k or _CHOICES[-1]) * self.nested_ranks

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

    def _fit(self, problem: Problem) -> Factored:
        inside, metric = _in_metric(problem)
        method = replace(self, error=_measured(self.error, metric))
        fit = method._searched(inside)
        norm: Norm | None = None
        if isinstance(fit, FlatsFit):
            if self.minimizes_squares:
                fit = spent(inside, fit, uniform=self.ranks == "uniform")
            elif metric is None:
                norm = Distances(fit.loss)
        scale = 1.0 if metric is None else metric.scale ** (_degree(self.error) / 2)
        objective = tuple(scale * value for value in fit.objective)
        return Factored(from_flats(problem.rows, fit, metric), objective, norm, fit.converged)

    def _searched(self, problem: Problem) -> FlatsFit | NestedFit:
        method, fits = self, []
        n, d = problem.rows.shape
        counts = [k for k in _CHOICES if k <= n and problem.values(k) >= n + k * d] if self.k is None else [self.k]
        for k, start in product(counts, problem.starts(self.restarts)):
            fits.append(fit := method._fit_groups(start, k))
            if isinstance(fit, FlatsFit) and fit.loss != method.error:
                # A threshold in medians differs from fit to fit, and objectives under two cannot be compared.
                method = replace(self, error=fit.loss)
        if not fits:
            raise too_few(problem, 1)
        return min(fits, key=lambda fit: fit.error)

    def _fit_groups(self, problem: Problem, k: int, exact: bool | None = None) -> FlatsFit | NestedFit:
        n, d = problem.rows.shape
        exact = self.exact and self.ranks == "filled" if exact is None else exact
        settings: dict[str, Any] = {
            "weights": problem.row_weights,
            "start": self.start,
            "stop": Stopping(self.tolerance, self.max_iterations, problem.progress),
            "seed": problem.seed,
        }
        values = problem.values(k * self.nested_ranks + exact)
        if self.nested_ranks > 1 and k <= n and values >= n + k * d:
            nested = fit_nested(problem.rows, k, self.nested_ranks, budget=values, exact=exact, **settings)
            if nested.groups_in_use > 1:  # one group needs no labels: the fit below uses their bytes
                return nested
        values = problem.values(k + exact)
        if exact and values < n + k * d:  # rows kept exactly are one more group, which may need labels or wider ones
            exact, values = False, problem.values(k)
        rank = min(values // (n + k * d), n, d)
        if rank < 1:
            raise too_few(problem, k)
        if self.ranks == "filled":
            fit = fit_flats(problem.rows, k, budget=values, exact=exact, error=self.error, **settings)
        else:
            fit = fit_flats(problem.rows, k, rank=rank, error=self.error, **settings)
        if self.minimizes_squares:
            return fit
        # Flats without rows, and labels of one group, are not stored: one more fit uses their bytes for the others.
        counts = torch.bincount(fit.labels.to(torch.int64), minlength=k + 1)
        used, kept = int((counts[:k] > 0).sum()), int(counts[k]) > 0
        fewer = max(used, 1) < k or (k == 1 and exact and not kept)
        return self._fit_groups(problem, max(used, 1), exact and kept) if fewer else fit


def _degree(error: Loss) -> float:
    """q of rho_{s t0}(s t) = s^q rho_{t0}(t)."""
    return error.q if isinstance(error, Power) else 1 if isinstance(error, Truncated) else 2


def _measured(error: Loss, metric: Metric | None) -> Loss:
    """``error`` for the distances in ``metric``, divided by sqrt(metric.scale)."""
    if metric is None or not isinstance(error, Huber | Truncated) or error.unit != "absolute":
        return error
    return replace(error, threshold=error.threshold / metric.scale**0.5)


def _in_metric(problem: Problem) -> tuple[Problem, Metric | None]:
    """The same problem for the rows of A R, without R."""
    rows, right = problem.rows, problem.weighting.right
    if right is None:
        return problem, None
    metric = right_metric(right.to(rows.device), rows.shape[1])
    inside: Rows = MetricRows(rows, metric.factor)
    if rows.shape[0] * rows.shape[1] <= _IN_MEMORY:  # EM reads its rows many times
        inside = TensorRows(torch.cat([block for _, block in inside.blocks(rows.shape[0])]))
    return replace(problem, rows=inside, weighting=replace(problem.weighting, right=None)), metric
