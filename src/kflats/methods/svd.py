"""The truncated SVD, stored in one of two forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kflats.common.errors import KflatsError
from kflats.matrices.registry import InterpolativeMatrix, LowRankMatrix, order_dtype
from kflats.methods.protocol import Fit, Method, PairMethod, Problem
from kflats.numerics.interpolative import interpolate
from kflats.numerics.svd import truncated_svd

Form = Literal["factors", "interpolative"]
"""How a low-rank matrix is stored: two factors, or one of them holding an identity block."""


@dataclass(frozen=True)
class SVD(PairMethod):
    """One flat: min || L (A - U V) R ||_F^2 of the largest rank that fits (FWSVD, eq. 6, for row weights).

    Args:
        form: "factors": U (n, r) and V (r, d), r (n + d) numbers. "interpolative": the same matrix as r of its own
            columns and the combinations of them that give the others, r (n + d - r) numbers and an index of d columns.

    Choose it for linear layers, and where a target runs low-rank pairs only; for long tables ``Flats`` loses less at
    equal bytes.

    >>> SVD().cost((384, 384), 127, 4), SVD(form="interpolative").cost((384, 384), 127, 4)
    (390144, 326396)
    """

    form: Form = "factors"

    accepts: ClassVar[frozenset[str]] = frozenset({"rows", "left", "right"})
    prefix_optimal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.form not in ("factors", "interpolative"):
            raise KflatsError(f"form={self.form!r} is not supported with SVD", hint="factors or interpolative")

    @property
    def minimizes_squares(self) -> bool:
        """As ``Method.minimizes_squares``."""
        return True

    @property
    def stores_skeleton(self) -> bool:
        """As ``Method.stores_skeleton``."""
        return self.form == "interpolative"

    def cost(self, shape: tuple[int, int], rank: int, itemsize: int) -> int:
        """Stored bytes at ``rank``, the index of the interpolative form included."""
        n, d = shape
        numbers = rank * (n + d) if self.form == "factors" else rank * (n + d - rank)
        return numbers * itemsize + self.index_bytes(shape)

    def index_bytes(self, shape: tuple[int, int]) -> int:
        """Bytes of the order of the columns, which the interpolative form stores."""
        return 0 if self.form == "factors" else shape[1] * order_dtype(shape[1]).itemsize

    def _pair(self, problem: Problem, rank: int) -> Fit:
        weighting = problem.weighting
        svd = truncated_svd(problem.rows, rank, left=weighting.left, right=weighting.right)
        coordinates, basis = svd.coordinates, svd.basis
        if weighting.right is not None:
            # A right metric leaves the basis oblique. An orthonormal basis loses least when it is rounded.
            q, t = torch.linalg.qr(basis.to(torch.float64).T)
            coordinates = (coordinates.to(torch.float64) @ t.T).to(coordinates.dtype)
            basis = q.T.contiguous().to(basis.dtype)
        if self.form == "factors":
            return Fit(LowRankMatrix(coordinates, basis), (svd.error,))
        pair = interpolate(coordinates, basis)
        order = pair.order.to(order_dtype(basis.shape[1]))
        return Fit(InterpolativeMatrix(pair.skeleton, pair.mixing, order), (svd.error,))

    @classmethod
    def automatic(cls, shape: tuple[int, int]) -> tuple[Method, ...]:
        """As ``Method.automatic``."""
        return (cls(),)
