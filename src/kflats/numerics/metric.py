"""Metrics, given by their Grams: the weight of errors along columns (right) and between rows (left).

    || L E R ||_F^2 = trace(R' E' (L'L) E R),   left = L'L (n, n),   right = R R' (d, d)

A left Gram is only multiplied with. A right Gram is split into R and R^-1, because bases are computed in A R and must
be brought back; only its small singular values are floored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.rows import check_weights

FLOOR = 1e-6
"""Least singular value of R in units of its largest: below, a measured metric holds noise."""

JUDGED = 1e-4
"""Singular values of R above this share of its largest judge; what lies below is chosen by plain least squares."""

_ASYMMETRY = 1e-5
_NOTHING = 1e-8  # a share of a plain decoder that is not worth a pass over the rows
NEGATIVE = 1e-5
"""How far below zero rounding may take an eigenvalue of a Gram, in units of its largest."""


@dataclass(frozen=True)
class Metric:
    """R with ``scale`` * R R' = the right Gram: ``factor`` = R and ``inverse`` = R^-1, (d,) where it is diagonal."""

    factor: Tensor
    inverse: Tensor
    scale: float

    def measured(self, block: Tensor) -> Tensor:
        """``block @ R``, in the block's type."""
        factor = self.factor.to(block.device, block.dtype)
        return block * factor if factor.ndim == 1 else block @ factor

    def encoder(self, basis: Tensor) -> Tensor:
        """R P' (d, r): coordinates are rows times it, for a basis P (r, d) found in A R."""
        return self.factor.unsqueeze(1) * basis.T if self.factor.ndim == 1 else self.factor @ basis.T

    def decoder(self, basis: Tensor) -> Tensor:
        """P R^-1 (r, d): what those coordinates are multiplied by to give rows of A again."""
        return basis * self.inverse if self.inverse.ndim == 1 else basis @ self.inverse

    @property
    def is_singular(self) -> bool:
        """Whether some directions are judged by next to nothing, and a decoder of theirs may have any size."""
        return bool((self._plain_share() > _NOTHING).any())

    def completed(self, decoder: Tensor, plain: Tensor) -> Tensor:
        """``decoder`` (r, d) along the directions that the metric judges, ``plain`` (r, d) along the others.

        P R^-1 is fitted to the rows that weigh, where a direction counts next to nothing: on the other rows it may
        be wrong by R^-1. There ``plain``, the decoder of least squares over all rows, costs nothing and is bounded.
        """
        share = self._plain_share()
        rest = plain - decoder
        if self.factor.ndim == 1:
            return decoder + rest * share
        directions = self.factor / self._roots()
        return decoder + (rest @ directions * share) @ directions.T

    def _roots(self) -> Tensor:
        return self.factor if self.factor.ndim == 1 else torch.linalg.vector_norm(self.factor, dim=0)

    def _plain_share(self) -> Tensor:
        """(d,) from 0 where the metric judges to 1 where it does not."""
        roots = self._roots()
        return 1 / (1 + (roots / (JUDGED * roots.max())) ** 4)


def right_metric(right: Tensor, d: int, floor: float = FLOOR) -> Metric:
    """R and R^-1 of a right Gram, (d, d) or its diagonal (d,), in float64; singular values of R are floored.

    A metric is measured on data and is often singular, for instance because an input never fires. The floor gives such
    a direction a weight far below the measured ones, instead of an infinite inverse.

    Raises:
        KflatsError: a wrong shape, NaN, a matrix that is no Gram, or all zeros.

    >>> right_metric(torch.tensor([9.0, 0.0]), 2).factor.tolist(), right_metric(torch.tensor([9.0, 0.0]), 2).scale
    ([1.5, 1.5e-06], 4.0)
    """
    gram = check_gram(right, d, "right", "columns")
    scale = scale_of(gram)
    gram = gram / scale
    if gram.ndim == 1:
        root = gram.clamp_min(floor**2 * float(gram.max())).sqrt()
        return Metric(root, 1 / root, scale)
    values, vectors = torch.linalg.eigh(gram)
    if float(values[0]) < -NEGATIVE * float(values[-1]):
        raise KflatsError("the right metric is not positive semidefinite", cause="it is not a Gram matrix")
    root = values.clamp_min(floor**2 * float(values[-1])).sqrt()
    return Metric(vectors * root, (vectors / root).T, scale)


def left_gram(left: Tensor | None, n: int) -> tuple[Tensor | None, float]:
    """A left Gram (n, n), or row weights (n,), checked, in float64 with a mean diagonal near 1; and its scale.

    Raises:
        KflatsError: a wrong shape, NaN, negative weights, a matrix that is no Gram, or all zeros.
    """
    if left is None:
        return None, 1.0
    if left.ndim < 2:
        check_weights(left, n)
    gram = check_gram(left, n, "left", "rows")
    scale = scale_of(gram)
    return gram / scale, scale


def scale_of(gram: Tensor) -> float:
    """A power of 4 near the mean of the diagonal: neither it nor its root is rounded, and squares do not underflow."""
    mean = float((gram if gram.ndim == 1 else gram.diagonal()).mean())
    return 4.0 ** math.floor(math.log(mean, 4))


def check_gram(gram: Tensor, size: int, side: str, what: str) -> Tensor:
    """A Gram or its diagonal in float64, exactly symmetric; refused where it cannot be one."""
    if tuple(gram.shape) not in ((size,), (size, size)):
        raise KflatsError(
            f"a {side} metric for {size} {what} cannot have shape {tuple(gram.shape)}",
            hint=f"({size},) or ({size}, {size})",
        )
    found = gram.detach().to(torch.float64)
    if not bool(torch.isfinite(found).all()):
        raise KflatsError(f"the {side} metric has NaN or infinite values", cause="an importance measure went wrong")
    diagonal = found if found.ndim == 1 else found.diagonal()
    if bool((diagonal < 0).any()):
        raise KflatsError(f"the {side} metric has negative values", cause="it is not a Gram matrix")
    if found.ndim == 2:
        largest = float(found.abs().max())
        if float((found - found.T).abs().max()) > _ASYMMETRY * largest:
            raise KflatsError(f"the {side} metric is not symmetric", cause="it is not a Gram matrix")
        found = (found + found.T) / 2
    if float(diagonal.sum()) <= 0:
        raise KflatsError(
            f"a {side} metric of zeros judges nothing", cause="the data never touched this matrix", hint="more data"
        )
    return found
