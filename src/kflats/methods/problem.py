"""What a method is given and what it hands back."""

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

_HINTS = {
    "left": 'SVD(), or matrix_rows="out_features", which makes it a right metric for Flats',
    "elements": "SVD(), or TwoSided(), which is nearly the same in closed form",
    "right": "Flats() or SVD()",
}


@dataclass(frozen=True)
class Problem:
    """What a method is given: ``rows`` (n, d), how errors of them are weighted, and what it may store:
    ``nbytes`` with ``itemsize`` bytes a number, row labels included unless ``free_labels``."""

    rows: Rows
    nbytes: int
    itemsize: int
    weighting: Weighting = NO_WEIGHTING
    free_labels: bool = False
    seed: int = 0
    progress: Progress | None = None

    @property
    def weights(self) -> Tensor | None:
        """(n,) row weights, None where every row counts the same."""
        return self.weighting.rows

    def values(self, bands: int) -> int:
        """Numbers that fit beside the labels of ``bands`` bands."""
        n = self.rows.shape[0]
        labels = n * label_dtype(bands).itemsize if bands > 1 and not self.free_labels else 0
        return (self.nbytes - labels) // self.itemsize


@dataclass(frozen=True)
class Factored:
    """A method's result: the matrix, the objective per iteration (falling), and seconds taken.

    ``norm`` is what was minimised where that is not the squared error: reports judge by it too. ``stored_bytes`` are
    those of a file where that holds the matrix in less than memory does. ``converged``: False where a limit of
    iterations ended the fit.
    """

    matrix: Matrix
    objective: tuple[float, ...]
    seconds: float
    norm: Norm | None = None
    stored_bytes: int | None = None
    converged: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes that a file holds of the matrix."""
        return self.matrix.nbytes if self.stored_bytes is None else self.stored_bytes


def check_accepts(name: str, accepts: frozenset[str], weighting: Weighting) -> None:
    """Refuse a weighting of a kind that a method cannot take.

    Raises:
        KflatsError: with the kinds, and a method that takes them.
    """
    refused = sorted(weighting.kinds - accepts)
    if refused:
        words = {"rows": "row weights", "left": "a full left metric", "right": "a right metric"}
        said = " and ".join(words.get(kind, "a weight for every element") for kind in refused)
        raise KflatsError(
            f"{name} cannot take {said}",
            cause="its closed forms hold for " + (" and ".join(words[kind] for kind in sorted(accepts)) or "none"),
            hint=next((_HINTS[kind] for kind in ("elements", "left", "right") if kind in refused), ""),
        )


def refuse_bytes(problem: Problem, least: int, what: str) -> KflatsError:
    """The error for a budget below ``least`` bytes, the price of ``what``."""
    n, d = problem.rows.shape
    return KflatsError(
        f"a budget of {problem.nbytes:,} bytes cannot hold {what} for a {n} x {d} matrix",
        cause=f"that takes {least:,} bytes",
        hint="a larger budget" + (", or fewer flats" if "flats" in what else ""),
    )
