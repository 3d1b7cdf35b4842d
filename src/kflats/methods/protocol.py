"""The Protocol of methods: a frozen value that makes a ``Matrix`` of rows, a weighting and a number of bytes.

A method inherits from ``Method``, or from one of the two classes that know what a kind of result costs:
``PairMethod`` makes one low-rank pair, ``ClusterMethod`` gives every row to one of several flats.

A method is given a ``Problem``, and its result is a ``Factored``.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from kflats.common.errors import DoesNotFitError, KflatsError, check_value
from kflats.common.torch_settings import usual_settings
from kflats.importance.protocol import Weighting
from kflats.matrices.registry import Matrix, label_dtype
from kflats.methods.matrix_error import Norm
from kflats.numerics.flats import Progress
from kflats.numerics.rows import Rows, check_finite, check_weights
from kflats.numerics.svd import weighted_spectrum

_KINDS = {"rows": "row weights", "left": "a full left metric", "right": "a right metric"}
_HINTS = {
    "left": 'SVD(), or matrix_rows="out_features", which makes it a right metric for Flats',
    "right": "Flats() or SVD()",
    "rows": "Flats() or SVD()",
}


@dataclass(frozen=True)
class Problem:
    """The input of a method.

    Args:
        rows: (n, d). weighting: of their errors.
        nbytes: the bytes that may be stored, row labels included unless ``free_labels``.
        itemsize: bytes of one stored number.
        seed: of every random step. progress: called with the phase, the iteration and the objective.
    """

    rows: Rows
    nbytes: int
    itemsize: int
    weighting: Weighting = Weighting()
    free_labels: bool = False
    seed: int = 0
    progress: Progress | None = None

    @property
    def row_weights(self) -> Tensor | None:
        """(n,) row weights, None where every row counts the same."""
        return self.weighting.row_weights

    def check(self, method: str, accepts: frozenset[str]) -> None:
        """Whether a method that ``accepts`` these parts of a weighting can take it.

        Raises:
            KflatsError: another weighting, or rows or weights that are not finite.
        """
        check_accepts(method, accepts, self.weighting)
        check_finite(self.rows)
        if self.weighting.form.left == "diagonal":
            check_weights(self.row_weights, self.rows.shape[0])

    def starts(self, count: int) -> tuple[Problem, ...]:
        """This problem, and ``count`` - 1 more with seeds that are drawn from its own."""
        draws = torch.randint(2**31 - 1, (count - 1,), generator=torch.Generator().manual_seed(self.seed)).tolist()
        return (self, *(replace(self, seed=seed) for seed in draws))

    def values(self, groups: int) -> int:
        """How many numbers fit beside the labels that tell ``groups`` groups of rows apart."""
        labels = 0 if self.free_labels else label_bytes(self.rows.shape[0], groups)
        return (self.nbytes - labels) // self.itemsize


@dataclass(frozen=True)
class Factored:
    """A method's result, perhaps coded.

    Args:
        matrix: what is stored. objective: by iteration, falling.
        norm: the norm that was minimised, which reports show too; None: the squared error.
        converged: whether the fit ended before its limit of iterations.
        seconds: of the fit.
        stream: the integers of a coded matrix as a file holds them, (bytes,) uint8; None: as they are in memory.
    """

    matrix: Matrix
    objective: tuple[float, ...] = ()
    norm: Norm | None = None
    converged: bool = True
    seconds: float = 0.0
    stream: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix in a file."""
        if self.stream is None:
            return self.matrix.nbytes
        return len(self.stream) + sum(t.numel() * t.element_size() for t in self.matrix.floats().values())


def check_accepts(name: str, accepts: frozenset[str], weighting: Weighting) -> None:
    """Refuse a weighting of a kind that a method does not take.

    Raises:
        KflatsError: the message names the kinds, and a method that takes them.
    """
    if refused := sorted(weighting.kinds - accepts):
        raise KflatsError(
            f"{name} cannot take {' and '.join(_KINDS[kind] for kind in refused)}",
            cause="its closed forms hold for " + (" and ".join(_KINDS[kind] for kind in sorted(accepts)) or "none"),
            hint=next(_HINTS[kind] for kind in ("left", "right", "rows") if kind in refused),
        )


def refuse_bytes(problem: Problem, least: int, what: str) -> KflatsError:
    """The error for a budget below the ``least`` bytes that ``what`` takes."""
    n, d = problem.rows.shape
    return DoesNotFitError(
        f"a budget of {problem.nbytes:,} bytes cannot hold {what} for a {n} x {d} matrix",
        cause=f"that takes {least:,} bytes",
        hint="a larger budget" + (", or fewer flats" if "flats" in what else ""),
    )


Produces = Literal["pair", "clusters", "dense", "choice"]
"""What a method makes: one low-rank pair, several flats with a label for each row, the matrix itself, or nothing,
because the method is a choice between recipes."""


@runtime_checkable
class Method(Protocol):
    """The geometry that covers the rows.

    A new method is a frozen dataclass that inherits from this class (or a subclass of it) and implements ``_fit``;
    the other members say how codecs and budgets may treat it, and have defaults.
    """

    accepts: ClassVar[frozenset[str]] = frozenset({"rows"})
    """The kinds of weighting that the method takes: "rows" (row weights), "left" (a metric that couples rows), "right"
    (a metric of columns)."""
    produces: ClassVar[Produces]
    """What the method makes."""
    prefix_optimal: ClassVar[bool] = False
    """Whether the first r coordinates of a fit of a higher rank are the fit of rank r."""

    @property
    def flats(self) -> int:
        """The least number of flats."""
        return 1

    @property
    def most_classes(self) -> int:
        """The largest number of classes that rows are divided into: flats, times ranks inside a flat."""
        return self.flats

    @property
    def nested_ranks(self) -> int:
        """How many ranks the rows of one flat may have."""
        return 1

    @property
    def minimizes_squares(self) -> bool:
        """Whether the objective is the weighted squared error: a transform code then minimises it itself."""
        return False

    @property
    def equal_ranks(self) -> bool:
        """Whether all flats have the same rank."""
        return True

    @property
    def stores_skeleton(self) -> bool:
        """Whether rows of the matrix itself are stored in place of coordinates (the interpolative form)."""
        return False

    @usual_settings()
    def fit(self, problem: Problem) -> Factored:
        """The matrix within the bytes of ``problem``.

        Raises:
            KflatsError: too few bytes, a weighting that is not in ``accepts``, or rows that are not finite.
        """
        start = time.perf_counter()
        problem.check(type(self).__name__, self.accepts)
        fit = self._fit(problem)
        if fit.objective and not math.isfinite(fit.objective[-1]):
            raise KflatsError(
                f"the error of {type(self).__name__} overflows float64",
                hint="a smaller p, or a matrix that is divided by its largest entry",
            )
        return replace(fit, seconds=time.perf_counter() - start)

    @abstractmethod
    def _fit(self, problem: Problem) -> Factored:
        """The algorithm; ``problem`` is checked."""

    @abstractmethod
    def cost(self, shape: tuple[int, int], rank: int, itemsize: int) -> int:
        """Stored bytes where every flat has ``rank``, labels included."""

    def index_bytes(self, shape: tuple[int, int]) -> int:
        """Bytes that are stored beside numbers and labels."""
        return 0

    def min_bytes(self, shape: tuple[int, int], itemsize: int, *, counts_labels: bool = True) -> int:
        """The least bytes that the method can be given."""
        return self.cost(shape, 1, itemsize) - (0 if counts_labels else self.index_bytes(shape))

    def spectrum(self, rows: Rows, weighting: Weighting) -> Tensor:
        """(min(n, d) + 1,) float64: the weighted squared error of *one* flat of rank 0, 1, ...

        A budget is divided by it. Several flats of a rank lose less; a pair that minimises another norm loses more.
        """
        check_accepts(type(self).__name__, self.accepts, weighting)
        return tails(weighted_spectrum(rows, left=weighting.left, right=weighting.right))

    def errors(self, rows: Rows, weighting: Weighting, spectrum: Tensor) -> Tensor:
        """(min(n, d) + 1,) float64: the weighted squared error in ``cost`` bytes of rank 0, 1, ...

        ``Auto()`` compares these errors. Here they are those of an SVD of the same rank. A method that loses less in
        its bytes computes its own errors.

        Args:
            spectrum: the errors of an SVD.
        """
        return spectrum

    def all_in_flats(self) -> Method:
        """The same method without rows that are kept exactly: codecs of integers round every row."""
        return self

    def flat_counts(self) -> tuple[int, ...]:
        """The numbers of flats that a codec tries, in this order."""
        return (self.flats,)

    def with_flats(self, k: int) -> Method:
        """The method with ``k`` flats of equal rank."""
        return self

    @classmethod
    def automatic(cls, shape: tuple[int, int]) -> tuple[Method, ...]:
        """Values that ``Auto()`` offers a weight of this shape, with factors in float16."""
        return ()


class PairMethod(Method, Protocol):
    """A method that makes one low-rank pair, r (n + d) numbers; it implements ``_pair``."""

    produces: ClassVar[Produces] = "pair"

    def rank(self, shape: tuple[int, int], nbytes: int, itemsize: int, *, free_labels: bool = False) -> int:
        """The largest rank that ``nbytes`` hold, 0 if there is none."""
        spare = self.index_bytes(shape) if free_labels else 0
        return largest_rank(lambda rank: self.cost(shape, rank, itemsize) - spare, min(shape), nbytes)

    def cost(self, shape: tuple[int, int], rank: int, itemsize: int) -> int:
        """Stored bytes at ``rank``: two factors."""
        return rank * sum(shape) * itemsize

    def _fit(self, problem: Problem) -> Factored:
        shape = problem.rows.shape
        rank = self.rank(shape, problem.nbytes, problem.itemsize, free_labels=problem.free_labels)
        if rank < 1:
            raise refuse_bytes(problem, self.cost(shape, 1, problem.itemsize), "1 flat of rank 1")
        return self._pair(problem, rank)

    @abstractmethod
    def _pair(self, problem: Problem, rank: int) -> Factored:
        """The pair of this rank."""


class ClusterMethod(Method, Protocol):
    """A method that gives every row to one of ``k`` flats; it implements ``_fit``."""

    produces: ClassVar[Produces] = "clusters"

    def cost(self, shape: tuple[int, int], rank: int, itemsize: int) -> int:
        """Stored bytes where all flats have ``rank``, labels included."""
        n, d = shape
        return rank * (n + self.flats * d) * itemsize + label_bytes(n, self.flats)

    def min_bytes(self, shape: tuple[int, int], itemsize: int, *, counts_labels: bool = True) -> int:
        """The least bytes that the method can be given."""
        return self.cost(shape, 1, itemsize) - (0 if counts_labels else label_bytes(shape[0], self.flats))


def largest_rank(cost: Callable[[int], int], full: int, nbytes: int) -> int:
    """The largest rank from 1 to ``full`` whose ``cost`` in bytes is at most ``nbytes``; 0 if there is none.

    >>> largest_rank(lambda rank: 10 * rank, 8, 35), largest_rank(lambda rank: 10 * rank, 8, 9)
    (3, 0)
    """
    return next((rank for rank in range(full, 0, -1) if cost(rank) <= nbytes), 0)


def label_bytes(n: int, k: int) -> int:
    """Bytes of the labels of ``n`` rows in ``k`` flats."""
    return n * label_dtype(k).itemsize if k > 1 else 0


def tails(values: Tensor) -> Tensor:
    """(m + 1,) the sums of ``values`` (m,) without the first 0, 1, ... of them.

    >>> tails(torch.tensor([4.0, 1.0])).tolist()
    [5.0, 1.0, 0.0]
    """
    return torch.nn.functional.pad(values.flip(0).cumsum(0).flip(0), (0, 1))


def check_method(value: object) -> None:
    """Refuse what is not a method.

    Raises:
        KflatsError: a class in place of a value, or another value.
    """
    check_value(value, Method, "a method", "fit and spectrum", "SVD(), Flats(k=5), RobustSVD()")
