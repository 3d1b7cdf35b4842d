"""Floating-point numbers: all factors in one type."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from kflats.codecs.protocol import DTYPES, Candidate, Codec, Table
from kflats.common.dtypes import dtype_name
from kflats.common.errors import KflatsError, check_arguments
from kflats.importance.protocol import WeightingForm
from kflats.methods import METHODS
from kflats.methods.matrix_error import weighted_error
from kflats.methods.protocol import Factored, Method, Problem
from kflats.numerics.gram import row_lengths
from kflats.numerics.svd import longest_by, truncated_svd


@dataclass(frozen=True)
class Float(Codec):
    """All factors in one floating-point type.

    Args:
        dtype: "same" keeps the type in which the model was loaded; otherwise "float32", "float16" or "bfloat16". A type
            of half the size stores twice as many coordinates in the same bytes: choose it if the model runs in it.

    Raises:
        KflatsError: an unknown type.

    >>> Float("bfloat16").torch_dtype("float32"), Float().torch_dtype(torch.float16)
    (torch.bfloat16, torch.float16)
    """

    dtype: str = "same"

    stores_integers = False

    def __post_init__(self) -> None:
        check_arguments(self, dtype=(self.dtype in ("same", *DTYPES), f"same, {', '.join(DTYPES)}"))

    def torch_dtype(self, original: torch.dtype | str) -> torch.dtype:
        """The stored type of a weight whose own type is ``original`` (a torch dtype or its name).

        >>> Float().torch_dtype("float16")
        torch.float16
        """
        return super().torch_dtype(original) if self.dtype == "same" else DTYPES[self.dtype]

    def min_bytes(self, method: Method, shape: tuple[int, int], itemsize: int, *, counts_labels: bool = True) -> int:
        """As ``Codec.min_bytes``: rank 1."""
        return method.min_bytes(shape, itemsize, counts_labels=counts_labels)

    def candidates(self, method: Method, table: Table) -> Iterator[Candidate]:
        """The whole matrix, or flats of every rank at which half precision holds the coordinates."""
        (n, d), kind = table.rows.shape, self.torch_dtype(table.dtype)
        if method.produces == "dense":
            cost = method.cost((n, d), 0, kind.itemsize)
            if cost < table.nbytes:  # values that overflow the type make the error infinite: no candidate
                whole = method.fit(Problem(table.rows, cost, kind.itemsize, table.weighting)).matrix.to(kind)
                error = weighted_error(table.rows, whole, table.weighting, table.total).error
                yield Candidate(method, self, cost, error, f"all numbers in {dtype_name(kind)}")
            return
        errors = method.errors(table.rows, table.weighting, table.spectrum)
        for rank in range(1, _ranks_in_range(table, torch.finfo(kind).max) + 1):
            cost = method.cost((n, d), rank, kind.itemsize)
            if cost < min(table.nbytes, n * d * kind.itemsize):
                yield Candidate(method, self, cost, float(errors[rank]), f"rank {rank} of {min(n, d)}")

    def encode(self, method: Method, problem: Problem, dtype: torch.dtype) -> Factored:
        """As ``Codec.encode``: the method's matrix, with its numbers as ``dtype``."""
        fitted = method.fit(problem)
        matrix = fitted.matrix.to(dtype)
        if not all(bool(torch.isfinite(tensor).all()) for tensor in matrix.tensors().values()):
            raise KflatsError(f"the coordinates overflow {dtype_name(dtype)}", hint="the codec bfloat16 or float32")
        return replace(fitted, matrix=matrix)

    @classmethod
    def automatic(cls, shape: tuple[int, int], form: WeightingForm) -> tuple[tuple[Method, Codec], ...]:
        """As ``Codec.automatic``: what methods offer, in float16."""
        return tuple((method, cls("float16")) for kind in METHODS.all_kinds() for method in kind.automatic(shape))


def _ranks_in_range(table: Table, most: float) -> int:
    """The largest rank at which no coordinate in an orthonormal basis is above ``most``."""
    weighting = table.weighting
    longest = row_lengths(table.rows).max() if weighting.right is None else longest_by(table.rows, weighting.right)
    if 2 * float(longest) <= most:
        return min(table.rows.shape)  # no coordinate is longer than its row
    svd = truncated_svd(table.rows, min(table.rows.shape), left=weighting.left, right=weighting.right)
    sizes = svd.coordinates.abs() * svd.basis.norm(dim=1).to(svd.coordinates)
    # A right metric leaves the basis oblique; in an orthonormal basis a coordinate may have the sum of later ones.
    bounds = sizes.amax(0).cummax(0).values if weighting.right is None else sizes.cumsum(1).amax(0)
    return int((bounds <= most).sum()) if math.isfinite(most) else len(bounds)
