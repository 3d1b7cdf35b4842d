"""Entries made of factors: SVD, Robust SVD, MESSI as published, and kflats' own flats; all in float16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kflats.errors import KflatsError
from kflats.frontier.rivals.coded import Coded, checked
from kflats.importance.weighting import Weighting
from kflats.methods import MESSI, SVD, Flats, KMeansSVD, RobustSVD
from kflats.methods.problem import Problem
from kflats.numerics.rows import TensorRows

METHODS: dict[str, Callable[[], Any]] = {
    "SVD": SVD,
    "Robust SVD": RobustSVD,
    "k-means + SVD": KMeansSVD,
    "MESSI": MESSI,
    "kflats Flats": Flats,
}
"""By what they are called: p = 1 for Robust SVD; five flats or clusters for the three that have them."""


@dataclass(frozen=True)
class Factors:
    """The factors of ``method`` (one of ``METHODS``) of the largest rank that ``bits`` per number hold in float16.

    SVD under row weights is FWSVD's; MESSI and Robust SVD were published without weights and take them here.

    >>> table = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    >>> found = Factors("SVD", 8.5).code(table)
    >>> found.nbytes == 2 * 4 * (200 + 8)
    True
    """

    method: str
    bits: float

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise KflatsError(f"no factors are called {self.method!r}", hint="one of " + ", ".join(METHODS))
        if not 0 < self.bits <= 64:
            raise KflatsError(f"{self.bits!r} bits per number", hint="above 0, at most 64")

    @property
    def name(self) -> str:
        return f"{self.method}, {self.bits:g} bits"

    @property
    def family(self) -> str:
        return self.method

    @property
    def weighs(self) -> bool:
        return True

    def code(self, table: Tensor, seed: int = 0, *, weights: Tensor | None = None) -> Coded:
        """Raises KflatsError where not even one coordinate a row fits, or float16 cannot hold the factors."""
        given = checked(self, table, weights)
        weighting = Weighting() if weights is None else Weighting(left=weights.double())
        problem = Problem(TensorRows(given), int(self.bits * given.numel() / 8), 2, weighting, seed=seed)
        matrix = METHODS[self.method]().fit(problem).matrix.to(torch.float16)
        nbytes: int = matrix.nbytes
        with torch.no_grad():
            found = matrix.to(torch.float32).dense()
        if not bool(torch.isfinite(found).all()):
            raise KflatsError(f"the factors of {self.method} have numbers that float16 cannot hold")
        return Coded(self.name, found, nbytes)
