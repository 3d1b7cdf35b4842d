"""The sizes of a CodedMatrix without its numbers. A file states them, and they are checked before use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.common.schema import JsonObject, check_version, decode
from kflats.matrices.geometry import check_shape
from kflats.numerics.coding.packing import MOST_BITS

VERSION = 2
"""1: no ``unit``, and all groups of equal size. It is still written where that holds."""
MAX_CLASSES = MAX_CONTEXTS = 256  # labels and contexts are bytes
MAX_LEVELS = 2**MOST_BITS
BASES = ("int8", "float", "identity")
SCALES = ("class", "row")
_FARTHEST_UNIT = 300  # of what float64 can hold, products included
_DAMAGED = "a damaged or hand-edited file"


@dataclass(frozen=True)
class CodedGeometry:
    """Sizes of a CodedMatrix.

    Args:
        shape: (n, d).
        rank: r, the number of integers of a row; d where the basis is the identity.
        classes: (rows, bytes a row) of each class.
        contexts: how many distributions the integers of columns follow.
        levels: how many levels a code may mean; 0 for uniform steps.
        scales: "class" or "row": ``weight`` holds scales of each class or of each row.
        groups: how many scales a class or row has; each serves ceil(r / groups) columns, the last one the rest.
        basis: "int8", "float", or "identity" (none is stored).
        flats: (classes, rank) of each flat, in order: the first flat has the first classes and the first rows of the
            basis, and so on; ``rank`` is then the largest. Empty where all classes share one basis.
        unit: all numbers of the matrix are 2^unit times those of the tensors, so that half precision holds the scales
            of small numbers.

    Raises:
        KflatsError: sizes that no matrix has.

    >>> CodedGeometry((2, 8), 8, ((2, 4),), scales="row").shapes["codes"]
    (8,)
    """

    shape: tuple[int, int]
    rank: int
    classes: tuple[tuple[int, int], ...]
    contexts: int = 1
    levels: int = 0
    scales: str = "class"
    groups: int = 1
    basis: str = "identity"
    flats: tuple[tuple[int, int], ...] = ()
    unit: int = 0

    def __post_init__(self) -> None:
        n, d = self.shape
        check_shape(n, d)
        rows, most = sum(rows for rows, _ in self.classes), -(-self.rank * MOST_BITS // 8)
        problem = ""
        if not 1 <= len(self.classes) <= MAX_CLASSES:
            problem = f"{len(self.classes)} classes, not 1..{MAX_CLASSES}"
        elif rows != n or any(rows < 0 for rows, _ in self.classes):
            problem = f"classes hold {rows} rows of {n}"
        elif not 0 <= self.rank <= d or (self.basis == "identity" and self.rank != d):
            problem = f"{self.rank} integers a row of {d} columns"
        elif any(not 0 <= row_bytes <= most for _, row_bytes in self.classes):
            problem = f"rows of more than {most} bytes"
        elif not 1 <= self.contexts <= MAX_CONTEXTS or not 0 <= self.levels <= MAX_LEVELS:
            problem = f"{self.contexts} contexts and {self.levels} levels"
        elif self.scales not in SCALES or self.basis not in BASES:
            problem = f"scales {self.scales!r}, basis {self.basis!r}"
        elif not 1 <= self.groups <= max(1, self.rank) or (self.rank and -(-self.rank // self.group) != self.groups):
            problem = f"{self.groups} groups of {self.rank} columns"
        elif not -_FARTHEST_UNIT <= self.unit <= _FARTHEST_UNIT:
            problem = f"numbers in units of 2^{self.unit}"
        elif self.flats and not self._flats_fit():
            problem = f"flats {self.flats[:8]} of {len(self.classes)} classes, rank {self.rank}, basis {self.basis!r}"
        if problem:
            raise KflatsError(f"impossible coded matrix: {problem}", cause=_DAMAGED)

    def _flats_fit(self) -> bool:
        counts, ranks = zip(*self.flats, strict=True)
        whole = min(counts) >= 1 and sum(counts) == len(self.classes)
        return whole and min(ranks) >= 0 and max(ranks) == self.rank and self.basis != "identity"

    @property
    def group(self) -> int:
        """Columns that share a scale; the last group may have fewer."""
        return -(-self.rank // self.groups)

    @property
    def version(self) -> int:
        """The first version of the format that has all fields that this geometry needs."""
        return 2 if self.unit or self.rank % self.groups else 1

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """(classes, rank) of each flat, one or several."""
        return self.flats or ((len(self.classes), self.rank),)

    @property
    def axes(self) -> int:
        """Rows of the basis: the ranks of all flats."""
        return sum(rank for _, rank in self.parts)

    @property
    def flat_of(self) -> tuple[int, ...]:
        """The flat of each class."""
        return tuple(flat for flat, (count, _) in enumerate(self.parts) for _ in range(count))

    @property
    def rank_of(self) -> tuple[int, ...]:
        """Of each class, the rank of its flat."""
        return tuple(rank for count, rank in self.parts for _ in range(count))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every stored tensor, by name. Tensors that a matrix does not need are absent."""
        (n, d), r, c = self.shape, self.rank, len(self.classes)
        found: dict[str, tuple[int, ...]] = {
            "weight": ((c if self.scales == "class" else n) * self.groups,),
            "codes": (sum(rows * row_bytes for rows, row_bytes in self.classes),),
            "bits": (c, r),
            "low": (c, r),
            "centers": (c, r),
            "contexts": (c, r),
        }
        if c > 1:
            found["labels"] = (n,)
        found |= {"levels": (self.levels,)} if self.levels else {"shrink": (self.contexts,)}
        if self.basis != "identity":
            found["basis"] = (self.axes, d)
        if self.basis == "int8":
            found["basis_scale"] = (self.axes,)
        return found

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The type of a stored tensor, where floating-point ones are of ``dtype``."""
        if name == "basis":
            return torch.int8 if self.basis == "int8" else dtype
        return INTEGERS.get(name, dtype)

    def spec(self) -> JsonObject:
        """As JSON."""
        found: JsonObject = {
            "kind": "coded",
            "version": self.version,
            "shape": list(self.shape),
            "rank": self.rank,
            "classes": [list(sizes) for sizes in self.classes],
            "contexts": self.contexts,
            "levels": self.levels,
            "scales": self.scales,
            "groups": self.groups,
            "basis": self.basis,
            "flats": [list(sizes) for sizes in self.flats],
        }
        return found | ({"unit": self.unit} if self.version > 1 else {})


INTEGERS = {
    "codes": torch.uint8,
    "labels": torch.uint8,
    "bits": torch.uint8,
    "low": torch.int16,
    "centers": torch.int16,
    "contexts": torch.uint8,
}
"""Types of the stored integers; the basis may be int8, too."""


def read_geometry(spec: JsonObject) -> CodedGeometry:
    """The geometry that ``CodedGeometry.spec`` wrote.

    Raises:
        KflatsError: another version, fields of another form, or impossible numbers.
    """
    version = spec.get("version")
    check_version(version, VERSION, "coded matrices")
    fields = {name: value for name, value in spec.items() if name not in ("kind", "version")}
    geometry: CodedGeometry = decode(CodedGeometry, fields, "matrix", signed=frozenset({"matrix.unit"}))
    if geometry.version != version or ("unit" in spec) != (version == VERSION):
        raise KflatsError(f"the field 'unit' does not fit a coded matrix of version {version}", cause=_DAMAGED)
    return geometry


def contradiction(geometry: CodedGeometry, found: dict[str, Tensor]) -> str:
    """How the integers of a matrix, of the right shapes, contradict its geometry; "" where they do not."""
    bits, low = found["bits"].to(torch.int64), found["low"].to(torch.int64)
    sizes = [rows for rows, _ in geometry.classes]
    counts = torch.bincount(found["labels"], minlength=len(sizes)).tolist() if "labels" in found else sizes
    if counts != sizes:
        return f"row labels do not match the classes ({counts[:8]} rows instead of {sizes[:8]})"
    if (-(-bits.sum(1) // 8)).tolist() != [row_bytes for _, row_bytes in geometry.classes]:
        return "the bits of the columns do not add up to the bytes of a row"
    if not bits.numel():
        return ""
    ranks = torch.tensor(geometry.rank_of, device=bits.device).unsqueeze(1)
    beyond = torch.arange(geometry.rank, device=bits.device) >= ranks
    if bool(((bits != 0) | (low != 0) | (found["centers"] != 0))[beyond].any()):
        return "a class has more columns than its flat"
    if int(bits.max()) > MOST_BITS:
        return f"a column of more than {MOST_BITS} bits"
    if int(found["contexts"].max()) >= geometry.contexts:
        return "a column follows a distribution that is not there"
    if geometry.levels:
        lowest, highest = low + geometry.levels // 2, low + (1 << bits) - 1 + geometry.levels // 2
        if int(lowest.min()) < 0 or int(highest.max()) >= geometry.levels:
            return "codes reach beyond the levels"
    return ""
