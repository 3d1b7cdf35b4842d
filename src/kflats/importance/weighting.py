"""What an importance says about one weight: how much each error of its matrix counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kflats.common.errors import KflatsError

Side = Literal["identity", "diagonal", "full"]
"""What one side of a weighting is: nothing to weigh by, a number for each row (or column), or a whole matrix."""


@dataclass(frozen=True)
class WeightingForm:
    """The kind of a ``Weighting``, without its numbers.

    >>> WeightingForm(left="diagonal", right="full").kinds == {"rows", "right"}
    True
    >>> WeightingForm(left="diagonal").transposed()
    WeightingForm(left='identity', right='diagonal', loss_units=False)
    """

    left: Side = "identity"
    right: Side = "identity"
    loss_units: bool = False

    @property
    def kinds(self) -> frozenset[str]:
        """What a method must be able to take: of "rows" (row weights), "left" (a metric that couples rows), "right"."""
        left = {"identity": set(), "diagonal": {"rows"}, "full": {"left"}}[self.left]
        return frozenset(left | ({"right"} if self.right != "identity" else set()))

    def transposed(self) -> WeightingForm:
        """The form for M.T."""
        return replace(self, left=self.right, right=self.left)


@dataclass(frozen=True)
class Weighting:
    """How much the error matrix E = M - M^ (n, d) of one weight counts.

        || L E R ||_F^2  =  trace(R' E' L' L E R)

    Args:
        left: L' L, (n, n), or (n,) where it is diagonal (row weights). None: identity.
        right: R R', (d, d), or (d,) where it is diagonal. None: identity.
        mean: (n,) mean input; the error of its output, mean' E, is folded into the layer's bias.
        loss_units: whether values are in units of a loss, so that errors of different weights may be added.

    >>> Weighting(left=torch.ones(3)).kinds
    frozenset({'rows'})
    """

    left: Tensor | None = None
    right: Tensor | None = None
    mean: Tensor | None = None
    loss_units: bool = False

    @property
    def form(self) -> WeightingForm:
        """The kind of this weighting."""
        return WeightingForm(_side(self.left), _side(self.right), self.loss_units)

    @property
    def kinds(self) -> frozenset[str]:
        """What a method must be able to take: of "rows", "left", "right"."""
        return self.form.kinds

    @property
    def rows(self) -> Tensor | None:
        """(n,) row weights, None where every row counts the same.

        Raises:
            KflatsError: the left side couples rows.
        """
        if self.left is not None and self.left.ndim == 2:
            raise KflatsError("a full left metric couples rows and has no row weights")
        return self.left

    def transposed(self) -> Weighting:
        """The same for M.T: what ``matrix_rows="out_features"`` asks for.

        ``mean`` stays as it is: it belongs to the layer's inputs, whichever side they are on.
        """
        return replace(self, left=self.right, right=self.left)

    def to(self, device: torch.device | str) -> Weighting:
        """On another device."""
        left, right, mean = (
            None if value is None else value.to(device) for value in (self.left, self.right, self.mean)
        )
        return replace(self, left=left, right=right, mean=mean)


def _side(metric: Tensor | None) -> Side:
    return "identity" if metric is None else "diagonal" if metric.ndim == 1 else "full"
