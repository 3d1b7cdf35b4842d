"""All kinds of matrices, and how an empty one is built from its description in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from kflats.common.errors import KflatsError
from kflats.common.schema import decode
from kflats.matrices.base import Matrix, check_shape
from kflats.matrices.coded import INTEGERS, CodedMatrix, read_geometry
from kflats.matrices.flats import (
    FlatsMatrix,
    RankGroup,
    check_geometry,
    label_dtype,
    order_dtype,
    weight_shape,
)
from kflats.matrices.low_rank import DenseMatrix, InterpolativeMatrix, LowRankMatrix

__all__ = [
    "CodedMatrix",
    "DenseMatrix",
    "FlatsMatrix",
    "InterpolativeMatrix",
    "LowRankMatrix",
    "Matrix",
    "RankGroup",
    "label_dtype",
    "matrix_from_spec",
    "matrix_of",
    "order_dtype",
    "weight_shape",
]


@dataclass(frozen=True)
class _Dense:
    kind: str
    shape: tuple[int, int]


@dataclass(frozen=True)
class _OneFlat(_Dense):
    rank: int


@dataclass(frozen=True)
class _Flats(_Dense):
    bands: tuple[tuple[int, int, int | None], ...]
    flat_ranks: tuple[int, ...]


def matrix_from_spec(
    spec: object,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "meta",
    coded: type[CodedMatrix] = CodedMatrix,
) -> Matrix:
    """An empty Matrix of the geometry that ``Matrix.spec`` wrote; every number is checked first.

    On the meta device (the default) nothing is allocated; elsewhere the tensors are uninitialised
    and ``refresh`` must follow once they are filled. ``coded``: the class of a matrix of codes.

    Raises:
        KflatsError: a field that is missing, unknown, of the wrong type or out of range.

    >>> m = LowRankMatrix(torch.ones(4, 1), torch.ones(1, 2))
    >>> matrix_from_spec(m.spec(), dtype=torch.float32).weight.shape
    torch.Size([4, 1])
    """

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    if not isinstance(spec, dict):
        raise KflatsError(f"{str(spec)[:40]!r} is not the description of a matrix", cause=_DAMAGED)
    matrix: Matrix
    match spec.get("kind"):
        case DenseMatrix.kind:
            matrix = DenseMatrix(empty(*_shape(decode(_Dense, spec, "matrix"))))
        case LowRankMatrix.kind | InterpolativeMatrix.kind as kind:
            form: _OneFlat = decode(_OneFlat, spec, "matrix")
            (n, d), r = _shape(form), form.rank
            if r > d:
                raise KflatsError(f"rank {r} does not fit shape {(n, d)}", cause=_DAMAGED)
            if kind == LowRankMatrix.kind:
                matrix = LowRankMatrix(empty(n, r), empty(r, d))
            else:
                matrix = InterpolativeMatrix(empty(n, r), empty(r, d - r), empty(d, of=order_dtype(d)))
        case FlatsMatrix.kind:
            flats: _Flats = decode(_Flats, spec, "matrix")
            (n, d), bands = _shape(flats), tuple(RankGroup(*band) for band in flats.bands)
            check_geometry(n, d, bands, flats.flat_ranks)
            weight, basis = empty(*weight_shape(bands)), empty(sum(flats.flat_ranks), d)
            matrix = FlatsMatrix(weight, basis, empty(n, of=label_dtype(len(bands))), bands, flats.flat_ranks)
        case CodedMatrix.kind:
            geometry = read_geometry(spec)
            tensors = {name: empty(*shape, of=INTEGERS.get(name, dtype)) for name, shape in geometry.shapes.items()}
            matrix = coded(geometry, tensors)
        case kind:
            raise KflatsError(f"unknown kind of matrix {str(kind)[:40]!r}", hint="pip install -U kflats")
    if torch.device(device).type != "meta":
        tensors = {name: torch.empty(t.shape, dtype=t.dtype, device=device) for name, t in matrix.tensors().items()}
        _adopt(matrix, tensors)  # ``to_empty`` of a meta tensor imports sympy: 40 MB, a third of a second
    return matrix


def _adopt(matrix: Matrix, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make ``tensors`` those of ``matrix``; nothing is copied."""
    for name, tensor in tensors.items():
        if name in matrix._parameters:
            matrix._parameters[name] = nn.Parameter(tensor)
        else:
            matrix._buffers[name] = tensor


def matrix_of(spec: object, tensors: Mapping[str, torch.Tensor]) -> Matrix:
    """The Matrix of the geometry that ``Matrix.spec`` wrote with these tensors, which are adopted, not copied.

    Raises:
        KflatsError: as ``matrix_from_spec``; tensors of other names, shapes or types; integers that contradict the
            geometry.

    >>> m = LowRankMatrix(torch.ones(4, 1), torch.ones(1, 2))
    >>> matrix_of(m.spec(), m.tensors()).dense().shape
    torch.Size([4, 2])
    """
    if "weight" not in tensors:
        raise KflatsError("a matrix without its weight", cause=_DAMAGED)
    matrix = matrix_from_spec(spec, dtype=tensors["weight"].dtype)
    empty = matrix.tensors()
    for name in sorted(empty.keys() | tensors.keys()):
        wanted, there = (
            (t.dtype, tuple(t.shape)) if (t := of.get(name)) is not None else "absent" for of in (empty, tensors)
        )
        if wanted != there:
            raise KflatsError(f"{name!r} of a matrix is {there}, not {wanted}", cause=_DAMAGED)
    _adopt(matrix, tensors)
    matrix.refresh()
    return matrix


def _shape(form: _Dense) -> tuple[int, int]:
    check_shape(*form.shape)
    return form.shape


_DAMAGED = "a damaged or hand-edited file"
