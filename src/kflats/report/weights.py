"""Records of one compressed weight: its sizes, its errors, and the ranks of its rows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from kflats.common.formatting import call, number


@dataclasses.dataclass(frozen=True)
class BandReport:
    """One band: ``rows`` rows with ``rank`` coordinates in the flat ``flat`` (None: stored exactly).

    ``weight_share`` is these rows' share of the total importance, ``error`` their own relative error.
    """

    flat: int | None
    rank: int
    rows: int
    weight_share: float
    error: float


@dataclasses.dataclass(frozen=True)
class FrequencyBin:
    """Rows of similar importance, commonest bin first: their mean rank and their relative error."""

    label: str
    rows: int
    mean_rank: float
    error: float


@dataclasses.dataclass(frozen=True)
class WorstRow:
    """A row with a large relative error |a - b|^2 / |a|^2; ``name`` is its token, "" for other rows."""

    row: int
    name: str
    weight: float
    error: float


@dataclasses.dataclass(frozen=True)
class NormError:
    """The error in the norm that a method minimises, if that is not the squared error.

    ``error`` is sum_i w_i cost(a_i - b_i) over sum_i w_i cost(a_i); ``svd_error`` the same for the weighted SVD that
    fits in the same bytes.
    """

    norm: str
    error: float
    svd_error: float


@dataclasses.dataclass(frozen=True)
class WeightReport:
    """The report of one weight; ``kflats.report.report`` defines the errors.

    ``method``, ``importance`` and ``codec`` are the JSON forms of the recipe's values. ``spectrum`` holds the
    eigenvalues of the weighted Gram matrix, descending, with sum 1. ``objective`` is the objective after each
    iteration. ``matrix_rows`` is the side of a linear layer that the matrix has as rows. ``condition`` is the largest
    entry beside the identity block of an interpolative form, None for other forms. ``own`` is the error in the
    method's own norm, None if that is the squared error. ``bytes_after`` are bytes in a file, ``memory_bytes`` those
    of all parameters and buffers of the loaded weight: entropy-coded integers and the index of the rows take more in
    memory. ``stored`` is "dense" (unchanged), another type of all numbers ("float16"), "factors" or "integers".
    """

    name: str
    places: tuple[str, ...]
    shape: tuple[int, int]
    dtype: str
    method: dict[str, Any]
    importance: dict[str, Any]
    codec: dict[str, Any]
    bytes_before: int
    bytes_after: int
    values_after: int
    error: float
    error_unweighted: float
    svd_error: float
    spectrum: tuple[float, ...]
    bands: tuple[BandReport, ...]
    frequency: tuple[FrequencyBin, ...]
    worst: tuple[WorstRow, ...]
    objective: tuple[float, ...]
    seconds: float
    note: str = ""
    matrix_rows: str = "in_features"
    condition: float | None = None
    own: NormError | None = None
    memory_bytes: int | None = None
    stored: str = "factors"

    @property
    def dense(self) -> bool:
        """Whether the weight stayed as it was; ``note`` is the reason."""
        return self.stored == "dense"

    @property
    def _whole(self) -> bool:
        """Whether all numbers are stored, perhaps in another type."""
        return self.stored not in ("factors", "integers")

    @property
    def coded(self) -> bool:
        """Whether integers are stored, and not floating-point numbers."""
        return self.stored == "integers"

    @property
    def bits(self) -> float:
        """Stored bits for each number of the original."""
        n, d = self.shape
        return 8 * self.bytes_after / (n * d)

    @property
    def full_rank(self) -> int:
        """The largest rank that the weight can have."""
        return min(self.shape)

    @property
    def mean_rank(self) -> float:
        """Mean number of coordinates of a row; the full rank if all numbers are stored."""
        if self._whole:
            return float(self.full_rank)
        rows = sum(b.rows for b in self.bands)
        return sum(b.rows * b.rank for b in self.bands) / rows if rows else math.nan

    @property
    def kept(self) -> str:
        """The mean rank of the full rank, the bits of a number, the type of all numbers, or "dense"."""
        if self._whole:
            return self.stored
        if self.coded:
            return f"{number(self.bits)} bits"
        if not self.bands:
            return "-"
        return f"{number(self.mean_rank)} of {self.full_rank}"

    @property
    def flats(self) -> dict[int | None, tuple[BandReport, ...]]:
        """The bands of each flat, first those of exact rows under None."""
        keys = sorted({b.flat for b in self.bands}, key=lambda f: -1 if f is None else f)
        return {key: tuple(b for b in self.bands if b.flat == key) for key in keys}

    @property
    def recipe(self) -> str:
        """The recipe as the call that makes it."""
        return f"Recipe({call(self.method)}, {call(self.importance)}, {call(self.codec)})"
