"""Codecs: frozen values that say how a Matrix's numbers are stored. One axis of a recipe, beside method and importance.

``Float`` stores the factors of any method. The others store integers (``CodedMatrix``), which an entropy coder makes
smaller still on disk. ``Int8``, ``Int4`` and ``Rotation`` round whatever a method fits, ``Transform`` takes part in the
fit of those that minimise squares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kflats.errors import KflatsError

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Float:
    """Every factor in one floating-point type.

    Args:
        dtype: "same" keeps the type the model was loaded in; "float32", "float16" or "bfloat16" chooses one.
            A half-sized type buys twice the coordinates in the same bytes: worth it when the model
            runs in that type anyway.

    Raises:
        KflatsError: an unknown type.

    >>> Float("bfloat16").itemsize("float32"), Float().itemsize(torch.float16)
    (2, 2)
    """

    dtype: str = "same"

    def __post_init__(self) -> None:
        if self.dtype not in ("same", *_DTYPES):
            raise KflatsError(
                f"no codec stores numbers as {self.dtype!r}",
                hint=f"Float(dtype) with one of: same, {', '.join(_DTYPES)}",
            )

    def torch_dtype(self, original: torch.dtype | str) -> torch.dtype:
        """The stored type of a weight whose own type is ``original`` (a torch dtype or its name).

        >>> Float().torch_dtype("float16")
        torch.float16
        """
        if self.dtype != "same":
            return _DTYPES[self.dtype]
        kept = getattr(torch, original.removeprefix("torch."), None) if isinstance(original, str) else original
        if not isinstance(kept, torch.dtype) or not kept.is_floating_point or kept.itemsize < 2:
            raise KflatsError(
                f"factors cannot be kept in the weight's own type, {original}",
                cause="the weight is quantized already, or not floating point",
                hint="load the model in float32 or bfloat16, or name a type: Float('float16')",
            )
        return kept

    def itemsize(self, original: torch.dtype | str) -> int:
        """Bytes of one stored number."""
        return self.torch_dtype(original).itemsize


@dataclass(frozen=True)
class Int8:
    """Whole numbers of 8 bits and a scale for each row, or for every ``group`` columns of it.

        a_ij  ~  scale_ig q_ij,      |q_ij| <= 127,      scale_ig = max_j |a_ij| / 127

    With ``Dense()`` the matrix itself: nearly lossless, a little over a quarter of float32. With any other method the
    coordinates in its flats, each column by its own size, of bases that have 8 bits too; of ``Flats`` all rows are
    rounded, none is kept exactly.

    Args:
        group: None: one scale a row. Otherwise as few groups as have at most so many columns, equal but for the last.

    Choose it where nothing may be lost and a quarter of float32 is small enough, and for weights on a grid (ternary, a
    few levels, pruned), which it keeps and the entropy coder makes small. ``Transform`` is smaller at the same
    error where values are continuous.

    >>> Int8().bits, Int8(group=64).groups(384), Int8(group=64).groups(100)
    (8, 6, 2)
    """

    group: int | None = None

    bits: ClassVar[int] = 8

    def __post_init__(self) -> None:
        _check_group(self.group, "Int8")

    def groups(self, columns: int) -> int:
        """How many scales a row of so many columns has."""
        return _groups(self.group, columns)


@dataclass(frozen=True)
class Int4:
    """As ``Int8``, with 4 bits, |q_ij| <= 7.

    >>> Int4().groups(384)
    6
    """

    group: int | None = 64

    bits: ClassVar[int] = 4

    def __post_init__(self) -> None:
        _check_group(self.group, "Int4")

    def groups(self, columns: int) -> int:
        """How many scales a row of so many columns has."""
        return _groups(self.group, columns)


@dataclass(frozen=True)
class Rotation:
    """A random rotation, then 2^bits values of least squared error for a Gaussian: nothing is fitted.

    The error is that of a Gaussian source whatever the matrix: a share of .363, .117, .035, .0095 at 1 to 4 bits (Max,
    IRE Trans. IT 6, 1960). With ``Dense()`` it is the matrix itself that is turned, and no decision depends on the
    data; with any other method the coordinates in each of its flats.

    Args:
        bits: 1 to 8; None: as many as the budget holds, or those at which a method's rank and they lose least.
    """

    bits: int | None = None

    def __post_init__(self) -> None:
        if self.bits is not None and (isinstance(self.bits, bool) or self.bits not in range(1, 9)):
            raise KflatsError(f"a rotation at {self.bits!r} bits", hint="1 to 8, or None for what the budget holds")


@dataclass(frozen=True)
class Transform:
    """Transform coding: principal axes, bits by reverse water-filling, rate-distortion optimised rounding.

        minimise   sum_i w_i || (a_i - a^_i) R ||^2      subject to   stored bytes <= budget

    With ``SVD()`` it chooses the rank itself: axes that do not pay get no bits; with ``Flats(k)`` each flat has axes of
    its own, for tables of many hundred times as many rows as columns. Of a metric that couples rows only the diagonal
    is used. What minimises other errors (``Entrywise()``, ``Flats(error=Power(1))``, ...) fits flats of the rank that
    the bytes give bits to, and its own rows are coded. Stored bytes are those of the entropy-coded file; in memory
    codes have a fixed rate, which takes more.

    Args:
        classes: rows are told apart by weight and shape into at most so many classes, 1 to 256, of all flats together
            (each has one at least). Rows so long that their integers would not fit the others' step are classes of
            their own, with coarser steps: they lose about 1e-4 of their length, the others as much as without them.
            With one class the longest row bounds how finely all are coded.

    Choose it wherever bytes on disk count: of weights with continuous values it loses least at every size that is
    measured. Weights on a grid (ternary, 15 levels, pruned ones at high rates) are whole numbers times a scale, which
    no turned axes keep: ``Dense()`` with ``Int8()`` or ``Int4()`` loses a fraction of that, of ternary ones nothing.
    ``Best()`` tries both.
    """

    classes: int = 32

    def __post_init__(self) -> None:
        if isinstance(self.classes, bool) or not isinstance(self.classes, int) or not 1 <= self.classes <= 256:
            raise KflatsError(f"{self.classes!r} classes of rows", hint="a whole number from 1 to 256")


Codes = Int8 | Int4 | Rotation | Transform
"""Codecs that store integers."""

VALUES = (Float, Int8, Int4, Rotation, Transform)
"""The codecs a plan file may name."""
NAMES: dict[str, type] = {
    "float": Float,
    "int8": Int8,
    "int4": Int4,
    "rotation": Rotation,
    "transform": Transform,
}
"""What a command line calls them; "float16" and the like are types of ``Float``."""


def from_name(name: str) -> Float | Codes:
    """The codec that a command line calls ``name``.

    Raises:
        KflatsError: no codec is called that.

    >>> from_name("float16"), from_name("int4 32"), from_name("transform")
    (Float(dtype='float16'), Int4(group=32), Transform(classes=32))
    """
    word, *rest = name.strip().lower().split() or [""]
    made: Float | Codes
    if word in _DTYPES and not rest:
        return Float(word)
    if word not in NAMES or len(rest) > 1 or (rest and not rest[0].isdigit()) or (rest and word == "float"):
        known = [*NAMES, *_DTYPES, '"int4 GROUP"', '"rotation BITS"', '"transform CLASSES"']
        raise KflatsError(f"no codec is called {name!r}", hint="one of " + ", ".join(known))
    made = NAMES[word](*(int(number) for number in rest))
    return made


def _check_group(group: int | None, who: str) -> None:
    if group is not None and (isinstance(group, bool) or not isinstance(group, int) or group < 1):
        raise KflatsError(f"{who} cannot group {group!r} columns", hint="a whole number from 1, or None for whole rows")


def _groups(group: int | None, columns: int) -> int:
    return 1 if group is None else -(-columns // group)
