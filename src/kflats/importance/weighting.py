"""The weighting of the errors of one weight's matrix: what an importance makes, and a method minimises."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kflats.common.errors import KflatsError

Side = Literal["identity", "diagonal", "full"]
"""One side of a weighting: the identity, a weight for each row (or column), or a full matrix that couples them."""


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
        """The kinds that a method must take: "rows" (row weights), "left" (a metric that couples rows), "right" (a
        metric of columns)."""
        left = {"identity": set(), "diagonal": {"rows"}, "full": {"left"}}[self.left]
        return frozenset(left | ({"right"} if self.right != "identity" else set()))

    def transposed(self) -> WeightingForm:
        """The form for M.T."""
        return replace(self, left=self.right, right=self.left)


@dataclass(frozen=True)
class Weighting:
    """How much the errors E = M - M^ (n, d) of one weight count.

        || L E R ||_F^2  =  trace(R' E' L' L E R)

    Args:
        left: L' L, (n, n), or (n,) where it is diagonal: the row weights. None: identity.
        right: R R', (d, d), or (d,) where it is diagonal. None: identity.
        mean: (n,) the mean input; the layer's bias takes the error of its output, mean' E.
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
        """The kinds that a method must take: as ``WeightingForm.kinds``."""
        return self.form.kinds

    @property
    def row_weights(self) -> Tensor | None:
        """(n,) row weights, None where every row counts the same.

        Raises:
            KflatsError: the left side couples rows.
        """
        if self.left is not None and self.left.ndim == 2:
            raise KflatsError(
                "a full left metric has no row weights",
                cause="it couples rows",
                hint="Weighting.uncoupled(), which takes its diagonal",
                command="--importance row-fisher",
            )
        return self.left

    def uncoupled(self) -> Weighting:
        """The weighting with row weights alone on the left side: of a full metric its diagonal."""
        return replace(self, left=self.left.diagonal()) if self.left is not None and self.left.ndim == 2 else self

    def transposed(self) -> Weighting:
        """The weighting of M.T, for ``matrix_rows="out_features"``.

        ``mean`` stays: it belongs to the layer's inputs on either side.
        """
        return replace(self, left=self.right, right=self.left)

    def to(self, device: torch.device | str) -> Weighting:
        """The same tensors on another device."""
        left, right, mean = (
            None if value is None else value.to(device) for value in (self.left, self.right, self.mean)
        )
        return replace(self, left=left, right=right, mean=mean)


def _side(metric: Tensor | None) -> Side:
    return "identity" if metric is None else "diagonal" if metric.ndim == 1 else "full"
