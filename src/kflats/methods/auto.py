"""A choice between all ways to store a weight, made when a budget is shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kflats.common.errors import KflatsError
from kflats.methods.problem import Problem
from kflats.methods.protocol import Fit, Method, Product
from kflats.methods.svd import SVD


@dataclass(frozen=True)
class Auto(Method):
    """Of several ways to store a weight the one that loses least for its bytes, compared with all other weights.

    Transform codes at any size, 8 and 4 bits a number, all numbers in float16, low rank in float16, or the weight as it
    is. Codes of a table with 300 times as many rows as columns are on one flat or on as many, up to 8, as lose less.
    What each loses is measured under the importance by encoding, for a pair read from the spectrum; then bytes go where
    they save most. A plan names what was chosen.

    Choose it for a budget in bytes over a whole model.
    """

    accepts: ClassVar[frozenset[str]] = frozenset({"rows", "left", "right"})
    produces: ClassVar[Product] = "choice"

    def _fit(self, problem: Problem) -> Fit:
        raise KflatsError(
            "Auto() cannot fit rows",
            cause="it is a choice between methods, and a plan names what was chosen",
            hint="kflats.plan, or another method",
        )

    def cost(self, shape: tuple[int, int], rank: int, itemsize: int) -> int:
        """As a low-rank pair."""
        return SVD().cost(shape, rank, itemsize)
