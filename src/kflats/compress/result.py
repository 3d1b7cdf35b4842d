"""One weight, fitted."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kflats.matrices.registry import Matrix
from kflats.model.swap import Weight
from kflats.recipe.plan import Decision
from kflats.report.report import WeightReport


@dataclass(frozen=True)
class CompressedWeight:
    """What was decided, the matrix to swap in, and what to report of it.

    ``matrix`` is None for a weight that stays dense. ``bias_shift`` (d,) is what the layer's bias takes over of
    the matrix' error: its mean, mean' (M - M^).
    """

    decision: Decision
    matrix: Matrix | None
    report: WeightReport
    bias_shift: Tensor | None = None

    @property
    def packed(self) -> int:
        """Bytes of the model's state that a file of streams does not hold."""
        if self.matrix is None:
            return 0
        gained = gained_numbers(self.decision.weight, self.bias_shift) * bytes_of_one(self.decision.weight)
        return self.matrix.nbytes + gained - self.report.bytes_after


def gained_numbers(weight: Weight, shift: Tensor | None) -> int:
    """Numbers of a bias that the layer did not have before."""
    return 0 if shift is None or weight.bias else len(shift)


def bytes_of_one(weight: Weight) -> int:
    """Bytes of one number of a weight, as the model stores it."""
    return weight.nbytes // (weight.shape[0] * weight.shape[1])
