"""kflats' own code, measured as the file it makes: principal axes, bits by importance, entropy coded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.errors import KflatsError
from kflats.nn.coded import CodedMatrix
from kflats.nn.coded_build import from_transform
from kflats.numerics.coding.encode import transform_code
from kflats.rivals.coded import Coded, checked
from kflats.streams import encode

_TRIES = 6
_SHORT = 0.0005
"""Share of the bytes by which a second try aims lower than what was missing."""


@dataclass(frozen=True)
class Transformed:
    """``transform_code`` at ``bits`` per number, all of them in the stream that a file would hold.

    >>> Transformed(1.5).name
    'kflats Transform, 1.5 bits'
    """

    bits: float

    def __post_init__(self) -> None:
        if not 0 < self.bits <= 32:
            raise KflatsError(f"{self.bits!r} bits per number", hint="above 0, at most 32")

    @property
    def name(self) -> str:
        return f"{self.family}, {self.bits:g} bits"

    @property
    def family(self) -> str:
        return "kflats Transform"

    @property
    def weighs(self) -> bool:
        return True

    def code(
        self, table: Tensor, seed: int = 0, *, weights: Tensor | None = None, right: Tensor | None = None
    ) -> Coded:
        """At most ``bits`` per number; nothing is random. ``right``: a Gram of the columns, as ``transform_code``.

        Raises:
            KflatsError: as ``transform_code``; constriction is missing (extra "codes").
        """
        given = checked(self, table, weights)
        limit = int(self.bits * given.numel() / 8)
        aim = limit
        for _ in range(_TRIES):
            code = transform_code(given, weights=weights, right=right, nbytes=aim)
            size = file_bytes(from_transform(code))
            if size <= limit:
                return Coded(self.name, code.dense(), size)
            aim -= size - limit + int(_SHORT * limit) + 1
            if aim <= 0:
                break
        raise KflatsError(f"no code of {limit} bytes was found, all of its file counted", hint="more bits")


def file_bytes(matrix: CodedMatrix) -> int:
    """What a file holds of ``matrix``: its stream, and the few floats beside it."""
    with torch.no_grad():
        floats = [t for t in matrix.tensors().values() if t.is_floating_point()]
        return encode(matrix).numel() + sum(t.numel() * t.element_size() for t in floats)
