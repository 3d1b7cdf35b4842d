"""The Protocol of codecs: a frozen value that stores the numbers of the matrix that a method makes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from kflats.common.errors import KflatsError, check_value
from kflats.importance.protocol import Weighting, WeightingForm
from kflats.methods.protocol import Factored, Method, Problem
from kflats.numerics.rows import Rows

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Types that numbers and scales may be stored in."""
_AMPLE = 1000
"""Bytes a number, more than any code takes."""


@dataclass(frozen=True)
class Table:
    """One weight before its bytes are decided.

    Args:
        rows: (n, d) as the method is given them, transposed where the recipe asks for it.
        weighting: of these rows. dtype: of the weight.
        spectrum: (min(n, d) + 1,) float64, the weighted squared error of an SVD of rank 0, 1, ...; its first number
            alone for methods that keep the matrix dense, which have no ranks.
    """

    rows: Rows
    weighting: Weighting
    dtype: torch.dtype
    spectrum: Tensor

    @property
    def total(self) -> float:
        """The weighted squared error of storing nothing."""
        return float(self.spectrum[0])

    @property
    def numbers(self) -> int:
        """n d."""
        return self.rows.shape[0] * self.rows.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all numbers in their own type."""
        return self.numbers * self.dtype.itemsize


@dataclass(frozen=True)
class Candidate:
    """One way to store a weight.

    Args:
        nbytes: in a file. error: the weighted squared error.
        note: for the plan. error_kind: what the error is called in the plan; empty: the plan does not show it.
    """

    method: Method
    codec: Codec
    nbytes: int
    error: float
    note: str = ""
    error_kind: str = "relative error"


@runtime_checkable
class Codec(Protocol):
    """How numbers are stored.

    A new codec is a frozen dataclass that inherits from this class and implements ``encode``, ``min_bytes`` and
    ``candidates``, and ``together`` and ``encode_together`` if several matrices at once are quicker. Its matrix must be
    one of the package's own forms: a folder then loads without the codec.
    """

    stores_integers: ClassVar[bool] = True
    """Whether a file holds entropy-coded integers (a ``CodedMatrix``), and not floating-point factors."""
    any_size: ClassVar[bool] = False
    """Whether codes can have any size, within one per cent."""

    def torch_dtype(self, original: torch.dtype | str) -> torch.dtype:
        """The type of all stored floating-point numbers, for a weight of type ``original``; here that type itself.

        Raises:
            KflatsError: the weight's type is not a floating-point type.
        """
        kept = getattr(torch, original.removeprefix("torch."), None) if isinstance(original, str) else original
        if not isinstance(kept, torch.dtype) or not kept.is_floating_point or kept.itemsize < 2:
            raise KflatsError(
                f"factors cannot be stored in the weight's own type, {original}",
                hint="a model in float32 or bfloat16, or the codec float16",
            )
        return kept

    def refusal(self, method: Method) -> tuple[str, str] | None:
        """(cause, hint) if this codec cannot store what ``method`` makes, else None."""
        return None

    def replaces_fit(self, method: Method) -> bool:
        """Whether the codec minimises the objective itself, in place of the method's algorithm."""
        return False

    def accepts(self, method: Method) -> frozenset[str]:
        """The kinds of weighting that codec and method take together."""
        return method.accepts

    @abstractmethod
    def min_bytes(self, method: Method, shape: tuple[int, int], itemsize: int, *, counts_labels: bool = True) -> int:
        """The least bytes that ``encode`` may be given; ``itemsize``: bytes of a floating-point number."""

    def fixed_bytes(self, method: Method, shape: tuple[int, int], itemsize: int) -> int | None:
        """A bound of the bytes in a file if they do not depend on the budget, else None."""
        return None

    def counted_bytes(self, method: Method, rows: Rows, dtype: torch.dtype) -> int:
        """Bytes of the codes of ``rows`` in a file, counted by encoding; for codecs with ``fixed_bytes``."""
        room = _AMPLE * rows.shape[0] * rows.shape[1] + _AMPLE**2
        return self.encode(method, Problem(rows, room, dtype.itemsize), dtype).nbytes

    @abstractmethod
    def candidates(self, method: Method, table: Table) -> Iterator[Candidate]:
        """Ways to store ``table``, from which a budget over several weights chooses."""

    @abstractmethod
    def encode(self, method: Method, problem: Problem, dtype: torch.dtype) -> Factored:
        """The method's result, stored in at most ``problem.nbytes``; floating-point numbers as ``dtype``.

        Raises:
            KflatsError: too few bytes, or as ``method.fit``.
        """

    def together(self, shape: tuple[int, int]) -> int:
        """How many matrices of this shape (n, d), as the method is given them, ``encode_together`` takes at a time in
        less time than one by one; 1: it does not."""
        return 1

    def encode_together(self, method: Method, problems: Sequence[Problem], dtype: torch.dtype) -> list[Factored]:
        """``encode`` of several problems of one shape, to the same bytes. Codecs are compared to find them.

        Raises:
            KflatsError: as ``encode``, of any of them.
        """
        return [self.encode(method, problem, dtype) for problem in problems]

    @classmethod
    def automatic(cls, shape: tuple[int, int], form: WeightingForm) -> tuple[tuple[Method, Codec], ...]:
        """The methods and codecs that ``Auto()`` tries for a weight of this shape whose errors are weighed so."""
        return ()


def check_codec(value: object) -> None:
    """Refuse what is not a codec.

    Raises:
        KflatsError: a class in place of a value, or another value.
    """
    check_value(value, Codec, "a codec", "encode and candidates", "Float(), Integer(bits=8), Transform()")
