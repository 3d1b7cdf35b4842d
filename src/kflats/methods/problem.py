"""The problem that a method solves, and its result."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.importance.weighting import Weighting
from kflats.matrices.registry import Matrix, label_dtype
from kflats.methods.matrix_error import Norm
from kflats.numerics.flats import Progress
from kflats.numerics.rows import Rows

NO_WEIGHTING = Weighting()
"""Every entry counts the same."""

_KINDS = {"rows": "row weights", "left": "a full left metric", "right": "a right metric"}
_HINTS = {
    "left": 'SVD(), or matrix_rows="out_features", which makes it a right metric for Flats',
    "right": "Flats() or SVD()",
    "rows": "Flats() or SVD()",
}


@dataclass(frozen=True)
class Problem:
    """What a method is given.

    Args:
        rows: (n, d). weighting: of their errors.
        nbytes: the bytes that may be stored, row labels included unless ``free_labels``.
        itemsize: bytes of one stored number.
        seed: of every random step. progress: called with the phase, the iteration and the objective.
    """

    rows: Rows
    nbytes: int
    itemsize: int
    weighting: Weighting = NO_WEIGHTING
    free_labels: bool = False
    seed: int = 0
    progress: Progress | None = None

    @property
    def row_weights(self) -> Tensor | None:
        """(n,) row weights, None where every row counts the same."""
        return self.weighting.row_weights

    def values(self, groups: int) -> int:
        """How many numbers fit beside the labels that tell ``groups`` groups of rows apart."""
        n = self.rows.shape[0]
        labels = n * label_dtype(groups).itemsize if groups > 1 and not self.free_labels else 0
        return (self.nbytes - labels) // self.itemsize


@dataclass(frozen=True)
class Factored:
    """A method's result, perhaps coded.

    Args:
        matrix: what is stored. objective: by iteration, falling. seconds: of the fit.
        norm: the norm that was minimised, which reports show too; None: the squared error.
        stored_bytes: of the matrix in a file; None: the bytes that it takes in memory.
        converged: whether the fit ended before its limit of iterations.
    """

    matrix: Matrix
    objective: tuple[float, ...] = ()
    seconds: float = 0.0
    norm: Norm | None = None
    stored_bytes: int | None = None
    converged: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix in a file."""
        return self.matrix.nbytes if self.stored_bytes is None else self.stored_bytes


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
    return KflatsError(
        f"a budget of {problem.nbytes:,} bytes cannot hold {what} for a {n} x {d} matrix",
        cause=f"that takes {least:,} bytes",
        hint="a larger budget" + (", or fewer flats" if "flats" in what else ""),
    )
