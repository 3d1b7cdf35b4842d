"""kflats' own code, measured as the file it makes: principal axes, bits by importance, entropy coded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.codecs.codec import Transform
from kflats.errors import KflatsError
from kflats.factorize.storing import store
from kflats.frontier.rivals.coded import Coded, checked
from kflats.importance.weighting import Weighting
from kflats.methods import SVD
from kflats.methods.problem import Problem
from kflats.numerics.rows import TensorRows
from kflats.recipes.recipe import Recipe


@dataclass(frozen=True)
class Transformed:
    """``Recipe(SVD(), codec=Transform())`` at ``bits`` per number, as a file holds it.

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
        found = store(
            Recipe(SVD(), codec=Transform()),
            Problem(TensorRows(given), limit, given.element_size(), Weighting(left=weights, right=right)),
            given.dtype,
        )
        with torch.no_grad():
            return Coded(self.name, found.matrix.dense(), found.nbytes)
