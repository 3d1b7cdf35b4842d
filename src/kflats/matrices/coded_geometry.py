"""The sizes of a CodedMatrix without its numbers. A file states them, and they are checked before use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.common.schema import JsonObject, check_version, decode
from kflats.matrices.base import check_shape
from kflats.numerics.coding.packing import MOST_BITS

VERSION = 1
MAX_CLASSES = MAX_CONTEXTS = 256  # labels and contexts are bytes
_FARTHEST_UNIT = 300  # of what float64 can hold, products included
_DAMAGED = "a damaged or hand-edited file"
INTEGERS = {
    "codes": torch.uint8,
    "labels": torch.uint8,
    "bits": torch.uint8,
    "low": torch.int16,
    "centers": torch.int16,
    "contexts": torch.uint8,
    "basis": torch.int8,
}
"""Types of the stored integers."""


@dataclass(frozen=True)
class CodedGeometry:
    """Sizes of a CodedMatrix.

    Args:
        shape: (n, d).
        rank: r, the number of integers of a row; d where the basis is the identity.
        classes: (rows, bytes a row) of each class.
        contexts: how many distributions the integers of columns follow.
        scales: "class" or "row": ``weight`` holds scales of each class or of each row.
        groups: how many scales a class or row has; each serves ceil(r / groups) columns, the last one the rest.
        basis: "int8", or "identity" (none is stored).
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
    scales: str = "class"
    groups: int = 1
    basis: str = "identity"
    flats: tuple[tuple[int, int], ...] = ()
    unit: int = 0

    def __post_init__(self) -> None:
        n, d = self.shape
        check_shape(n, d)
        rows, most = sum(rows for rows, _ in self.classes), -(-self.rank * MOST_BITS // 8)
        counts, ranks = zip(*self.parts, strict=True)
        problem = ""
        if not 1 <= len(self.classes) <= MAX_CLASSES:
            problem = f"{len(self.classes)} classes, not 1..{MAX_CLASSES}"
        elif rows != n or any(rows < 0 for rows, _ in self.classes):
            problem = f"classes hold {rows} rows of {n}"
        elif self.scales not in ("class", "row") or self.basis not in ("int8", "identity"):
            problem = f"scales {self.scales!r}, basis {self.basis!r}"
        elif not 0 <= self.rank <= d or (self.basis == "identity" and (self.rank != d or self.flats)):
            problem = f"{self.rank} integers a row of {d} columns"
        elif any(not 0 <= row_bytes <= most for _, row_bytes in self.classes):
            problem = f"rows of more than {most} bytes"
        elif not 1 <= self.contexts <= MAX_CONTEXTS:
            problem = f"{self.contexts} contexts"
        elif not 1 <= self.groups <= max(1, self.rank) or (self.rank and -(-self.rank // self.group) != self.groups):
            problem = f"{self.groups} groups of {self.rank} columns"
        elif abs(self.unit) > _FARTHEST_UNIT:
            problem = f"numbers in units of 2^{self.unit}"
        elif min(counts) < 1 or sum(counts) != len(self.classes) or min(ranks) < 0 or max(ranks) != self.rank:
            problem = f"flats {self.flats[:8]} of {len(self.classes)} classes and rank {self.rank}"
        if problem:
            raise KflatsError(f"impossible coded matrix: {problem}", cause=_DAMAGED)

    @property
    def group(self) -> int:
        """Columns that share a scale; the last group may have fewer."""
        return -(-self.rank // self.groups)

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
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every stored tensor, by name. Tensors that a matrix does not need are absent."""
        (n, d), r, c = self.shape, self.rank, len(self.classes)
        shapes: dict[str, tuple[int, ...]] = {
            "weight": ((c if self.scales == "class" else n) * self.groups,),
            "codes": (sum(rows * row_bytes for rows, row_bytes in self.classes),),
            **dict.fromkeys(("bits", "low", "centers", "contexts"), (c, r)),
        }
        if c > 1:
            shapes["labels"] = (n,)
        shapes["shrink"] = (self.contexts,)
        if self.basis == "int8":
            shapes |= {"basis": (self.axes, d), "basis_scale": (self.axes,)}
        return shapes

    def part(self, codes: Tensor, c: int) -> Tensor:
        """(rows, bytes a row), the packed rows of class ``c``: a view of the codes of all classes."""
        (rows, row_bytes), before = self.classes[c], self.classes[:c]
        first = sum(rows * row_bytes for rows, row_bytes in before)
        return codes[first : first + rows * row_bytes].view(rows, row_bytes)

    def spec(self) -> JsonObject:
        """As JSON."""
        lists: JsonObject = {
            "shape": list(self.shape),
            "classes": list(map(list, self.classes)),
            "flats": list(map(list, self.flats)),
        }
        return {"kind": "coded", "version": VERSION, **vars(self), **lists}


def read_geometry(spec: JsonObject) -> CodedGeometry:
    """The geometry that ``CodedGeometry.spec`` wrote.

    Raises:
        KflatsError: another version, fields of another form, or impossible numbers.
    """
    check_version(spec.get("version"), VERSION, "coded matrices")
    fields = {name: value for name, value in spec.items() if name not in ("kind", "version")}
    geometry: CodedGeometry = decode(CodedGeometry, fields, "matrix", signed=frozenset({"matrix.unit"}))
    return geometry


def contradiction(geometry: CodedGeometry, tensors: dict[str, Tensor]) -> str:
    """How the integers of a matrix, of the right shapes, contradict its geometry; "" where they do not."""
    bits, low = tensors["bits"].to(torch.int64), tensors["low"].to(torch.int64)
    sizes = [rows for rows, _ in geometry.classes]
    counts = torch.bincount(tensors["labels"], minlength=len(sizes)).tolist() if "labels" in tensors else sizes
    if counts != sizes:
        return f"row labels do not match the classes ({counts[:8]} rows instead of {sizes[:8]})"
    if (-(-bits.sum(1) // 8)).tolist() != [row_bytes for _, row_bytes in geometry.classes]:
        return "the bits of the columns do not add up to the bytes of a row"
    if not bits.numel():
        return ""
    ranks = torch.tensor([geometry.parts[flat][1] for flat in geometry.flat_of], device=bits.device).unsqueeze(1)
    beyond = torch.arange(geometry.rank, device=bits.device) >= ranks
    if bool(((bits != 0) | (low != 0) | (tensors["centers"] != 0))[beyond].any()):
        return "a class has more columns than its flat"
    if int(bits.max()) > MOST_BITS:
        return f"a column of more than {MOST_BITS} bits"
    if int(tensors["contexts"].max()) >= geometry.contexts:
        return "a column follows a distribution that is not there"
    return ""
