"""The matrices kflats knows, and how one is rebuilt, empty, from its description in a file."""

from __future__ import annotations

from typing import Any

import torch

from kflats.common.errors import KflatsError
from kflats.matrices.base import Matrix
from kflats.matrices.coded import CodedMatrix
from kflats.matrices.coded_geometry import FIELDS, CodedGeometry, read_geometry
from kflats.matrices.dense import DenseMatrix
from kflats.matrices.flats import FlatsMatrix
from kflats.matrices.geometry import (
    MAX_BANDS,
    RankGroup,
    check_geometry,
    check_shape,
    label_dtype,
    order_dtype,
    read_count,
    weight_shape,
)
from kflats.matrices.interpolative import InterpolativeMatrix
from kflats.matrices.low_rank import LowRankMatrix

__all__ = [
    "CodedGeometry",
    "CodedMatrix",
    "DenseMatrix",
    "FlatsMatrix",
    "InterpolativeMatrix",
    "LowRankMatrix",
    "Matrix",
    "RankGroup",
    "check_geometry",
    "label_dtype",
    "matrix_from_spec",
    "order_dtype",
    "weight_shape",
]


def matrix_from_spec(spec: dict[str, Any], *, dtype: torch.dtype, device: torch.device | str = "meta") -> Matrix:
    """An empty Matrix of the geometry that ``Matrix.spec`` wrote; every number is checked first.

    On the meta device (the default) nothing is allocated; elsewhere the tensors are uninitialised
    and ``refresh`` must follow once they are filled.

    Raises:
        KflatsError: a field that is missing, unknown, of the wrong type or out of range.

    >>> m = LowRankMatrix(torch.ones(4, 1), torch.ones(1, 2))
    >>> matrix_from_spec(m.spec(), dtype=torch.float32).weight.shape
    torch.Size([4, 1])
    """
    try:
        kind = spec["kind"]
        if kind not in _FIELDS:
            raise KflatsError(
                f"unknown kind of matrix {str(kind)[:40]!r}", cause="a file of a newer kflats", hint="upgrade kflats"
            )
        if unknown := sorted(str(key)[:40] for key in spec.keys() - _FIELDS[kind]):
            raise KflatsError(
                f"unknown fields of a matrix {unknown[:8]}", cause="a file of a newer kflats", hint="upgrade kflats"
            )
        if kind == CodedMatrix.kind:
            return _empty_coded(read_geometry(spec), dtype, torch.device(device))
        n, d = (read_count(value) for value in spec["shape"])
        check_shape(n, d)
        if kind == DenseMatrix.kind:
            return DenseMatrix(torch.empty(n, d, dtype=dtype, device=device))
        if kind == LowRankMatrix.kind:
            return _empty_low_rank(n, d, read_count(spec["rank"]), dtype, torch.device(device))
        if kind == InterpolativeMatrix.kind:
            return _empty_interpolative(n, d, read_count(spec["rank"]), dtype, torch.device(device))
        if len(spec["bands"]) > MAX_BANDS or len(spec["flat_ranks"]) > MAX_BANDS:
            raise KflatsError(f"more than {MAX_BANDS} bands", cause="a damaged or hand-edited file")
        flat_ranks = tuple(read_count(rank) for rank in spec["flat_ranks"])
        bands = tuple(
            RankGroup(read_count(rows), read_count(rank), None if flat is None else read_count(flat))
            for rows, rank, flat in spec["bands"]
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, KflatsError):
            raise
        raise KflatsError(
            f"unreadable matrix description: {str(error)[:80]}", cause="a damaged or hand-edited file"
        ) from error
    return _empty_flats(n, d, bands, flat_ranks, dtype, torch.device(device))


_FIELDS = {
    DenseMatrix.kind: {"kind", "shape"},
    LowRankMatrix.kind: {"kind", "shape", "rank"},
    InterpolativeMatrix.kind: {"kind", "shape", "rank"},
    FlatsMatrix.kind: {"kind", "shape", "bands", "flat_ranks"},
    CodedMatrix.kind: FIELDS,
}


def _empty_low_rank(n: int, d: int, rank: int, dtype: torch.dtype, device: torch.device) -> LowRankMatrix:
    if rank > d:
        raise KflatsError(f"rank {rank} does not fit shape {(n, d)}", cause="a damaged or hand-edited file")
    return LowRankMatrix(
        torch.empty(n, rank, dtype=dtype, device=device), torch.empty(rank, d, dtype=dtype, device=device)
    )


def _empty_interpolative(n: int, d: int, rank: int, dtype: torch.dtype, device: torch.device) -> InterpolativeMatrix:
    if rank > d:
        raise KflatsError(f"rank {rank} does not fit shape {(n, d)}", cause="a damaged or hand-edited file")
    found = InterpolativeMatrix(
        torch.empty(n, rank, dtype=dtype, device="meta"),
        torch.empty(rank, d - rank, dtype=dtype, device="meta"),
        torch.empty(d, dtype=order_dtype(d), device="meta"),
    )
    return found if device.type == "meta" else found.to_empty(device=device)


def _empty_flats(
    n: int, d: int, bands: tuple[RankGroup, ...], flat_ranks: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> FlatsMatrix:
    check_geometry(n, d, bands, flat_ranks)
    found = FlatsMatrix(
        torch.empty(weight_shape(bands), dtype=dtype, device="meta"),
        torch.empty(sum(flat_ranks), d, dtype=dtype, device="meta"),
        torch.empty(n, dtype=label_dtype(len(bands)), device="meta"),
        bands,
        flat_ranks,
    )
    return found if device.type == "meta" else found.to_empty(device=device)


def _empty_coded(geometry: CodedGeometry, dtype: torch.dtype, device: torch.device) -> CodedMatrix:
    empty = {
        name: torch.empty(shape, dtype=geometry.dtype_of(name, dtype), device="meta")
        for name, shape in geometry.shapes.items()
    }
    found = CodedMatrix(geometry, empty)
    return found if device.type == "meta" else found.to_empty(device=device)
