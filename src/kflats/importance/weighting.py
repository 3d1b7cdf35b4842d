"""What an importance says about one weight: how much each error of its matrix counts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kflats.errors import KflatsError


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
    def kinds(self) -> frozenset[str]:
        """What a method must be able to take: of "rows", "left", "right"."""
        found = set()
        if self.left is not None:
            found.add("rows" if self.left.ndim == 1 else "left")
        if self.right is not None:
            found.add("right")
        return frozenset(found)

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
        """The same for M.T: what ``rows="outputs"`` asks for.

        ``mean`` stays as it is: it belongs to the layer's inputs, whichever side they are on.
        """
        return replace(self, left=self.right, right=self.left)

    def to(self, device: torch.device | str) -> Weighting:
        """On another device."""
        left, right, mean = (
            None if value is None else value.to(device) for value in (self.left, self.right, self.mean)
        )
        return replace(self, left=left, right=right, mean=mean)
