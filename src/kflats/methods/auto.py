"""A choice between methods and codecs, made when a budget is divided among weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kflats.common.errors import KflatsError
from kflats.methods.protocol import Fit, Method, Problem, Product
from kflats.methods.svd import SVD


@dataclass(frozen=True)
class Auto(Method):
    """The way to store each weight that loses least for its bytes, chosen for all weights together.

    The candidates are transform codes of many sizes, integers of 8 and 4 bits, all numbers in float16, low-rank pairs
    in float16, and the weight unchanged. In a table with 300 times as many rows as columns a transform code has up to 8
    flats. The error of a candidate is measured by encoding, that of a pair by the spectrum, both under the importance;
    then bytes go where they save most. A plan names the chosen methods and codecs.

    Choose it for a budget in bytes over a whole model.
    """

    accepts: ClassVar[frozenset[str]] = frozenset({"rows", "left", "right"})
    produces: ClassVar[Product] = "choice"

    def _fit(self, problem: Problem) -> Fit:
        raise KflatsError(
            "Auto() cannot fit rows",
            cause="it is a choice between methods, which a plan makes",
            hint="kflats.plan(...), or another method",
            command="another --method",
        )

    def cost(self, shape: tuple[int, int], rank: int, itemsize: int) -> int:
        """As a low-rank pair."""
        return SVD().cost(shape, rank, itemsize)
