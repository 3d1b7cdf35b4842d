"""Codecs carried out: the rows of a weight become a CodedMatrix that takes at most so many bytes.

Two sizes: *fixed* bytes, what a matrix takes in memory, and *stored* bytes, what a file holds once the integers are
entropy coded. A budget counts stored bytes. Where the rank or the bits of a fixed rate are to be found, fixed bytes are
counted instead, so that files are smaller by what the coder finds.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kflats.codecs.codec import Codes, Int4, Int8, Rotation, Transform
from kflats.codecs.streams import stored_bytes
from kflats.factorize.transforming import transformed
from kflats.methods import PAIRS, SVD, Flats
from kflats.methods.judging import Norm
from kflats.methods.problem import Factored, Problem, check_accepts, refuse_bytes
from kflats.nn.coded import CodedMatrix
from kflats.nn.coded_build import from_integers, in_range
from kflats.nn.coded_geometry import CodedGeometry
from kflats.numerics.coding.absmax import absmax_code
from kflats.numerics.coding.rotation import rotation_code
from kflats.numerics.rows import Rows
from kflats.numerics.svd import truncated_svd
from kflats.recipes.recipe import Recipe, brief

TRANSFORM_ACCEPTS = frozenset({"rows", "left", "right"})
_LEAST_RANK = 1
_HEAD = 160
"""Bytes that a stream's head takes beside what it holds, at most; small matrices have nothing to save them with."""
_ROTATED_HEAD = 400
"""The same with a basis, whose rows have distributions of their own."""


def accepted(recipe: Recipe) -> frozenset[str]:
    """The kinds of weighting that a recipe can take: its method's, but for codecs that take a hand in the fit."""
    if isinstance(recipe.codec, Transform):
        return TRANSFORM_ACCEPTS
    found: frozenset[str] = recipe.method.accepts
    return found


def has_any_size(recipe: Recipe) -> bool:
    """Whether codes can be made as large as is wanted, within a hundredth."""
    return isinstance(recipe.codec, Transform)


def fixed_bytes(codec: Codes, shape: tuple[int, int], itemsize: int, rank: int | None = None) -> int:
    """Bytes in memory of an (n, d) matrix by a codec of fixed rate; ``rank``: of a pair, None: of the matrix itself.

    Args:
        itemsize: bytes of a scale.

    >>> fixed_bytes(Int8(), (100, 8), 4)
    1252
    """
    n, d = shape
    r = d if rank is None else rank
    if isinstance(codec, Rotation):
        bits, groups, levels = codec.bits or 1, 1, 2 ** (codec.bits or 1)
    else:
        assert isinstance(codec, Int8 | Int4)
        bits, groups, levels = codec.bits, codec.groups(r), 0
    basis = "int8" if rank is not None or isinstance(codec, Rotation) else "identity"
    geometry = CodedGeometry(
        shape, r, ((n, -(-r * bits // 8)),), levels=levels, scales="row", groups=groups, basis=basis
    )
    total = 0
    for name, size in geometry.shapes.items():
        kind = geometry.dtype_of(name, torch.float32)
        total += math.prod(size) * (itemsize if kind.is_floating_point else kind.itemsize)
    return total


def least_bytes(recipe: Recipe, shape: tuple[int, int], itemsize: int) -> int:
    """The least that a recipe with a codec of integers may be given. Of ``Transform`` only a bound is known here, with
    one axis: what classes and distributions need is found when it is fitted."""
    codec = recipe.codec
    if isinstance(codec, Transform):
        return _HEAD + shape[1] + max(64, shape[0] // 64)
    return fixed_bytes(codec, shape, itemsize, _LEAST_RANK if _is_pair(recipe) else None)


def whole_bytes(recipe: Recipe, shape: tuple[int, int], itemsize: int) -> int | None:
    """A bound of what a recipe takes whatever it is given, as a file's bytes; None where any size will do."""
    codec, blocks = recipe.codec, shape[0] * shape[1] // 2**14
    if isinstance(codec, Int8 | Int4) and not _is_pair(recipe):
        return fixed_bytes(codec, shape, itemsize) + blocks + _HEAD
    if isinstance(codec, Rotation) and codec.bits is not None:
        return fixed_bytes(codec, shape, itemsize) + blocks + _ROTATED_HEAD
    return None


def store(recipe: Recipe, problem: Problem, dtype: torch.dtype) -> Factored:
    """``problem``'s rows by the recipe's codec of integers, its scales as ``dtype``.

    Raises:
        KflatsError: a budget too small, a weighting that cannot be taken, or ``constriction`` not installed.
    """
    start = time.perf_counter()
    codec, weighting = recipe.codec, problem.weighting
    check_accepts(brief(codec), accepted(recipe), weighting)
    norm, converged = None, True
    if isinstance(codec, Transform):
        assert isinstance(recipe.method, SVD | Flats)
        matrix = transformed(recipe.method, codec, problem, dtype)
    elif isinstance(codec, Rotation):
        matrix = _rotated(codec, problem, dtype)
    elif _is_pair(recipe):
        made = _pair(recipe.method, codec, problem, dtype)
        matrix, norm, converged = made.matrix, made.norm, made.converged
    else:
        matrix = _rounded(codec, problem, dtype)
    seconds = time.perf_counter() - start
    return Factored(matrix, (), seconds, norm, stored_bytes=stored_bytes(matrix), converged=converged)


def _is_pair(recipe: Recipe) -> bool:
    return isinstance(recipe.method, PAIRS)


def _rotated(codec: Rotation, problem: Problem, dtype: torch.dtype) -> CodedMatrix:
    tried = range(8, 0, -1) if codec.bits is None else [codec.bits]
    least = 0
    for bits in tried:
        least = fixed_bytes(Rotation(bits), problem.rows.shape, dtype.itemsize)
        if least > problem.nbytes:
            continue
        matrix = _at_bits(problem, bits, dtype)
        # The head of a file may be longer than what the coder saves of a small matrix.
        if (least := stored_bytes(matrix)) <= problem.nbytes:
            return matrix
    raise refuse_bytes(problem, least, f"a rotation at {tried[-1]} bits")


def _at_bits(problem: Problem, bits: int, dtype: torch.dtype) -> CodedMatrix:
    code = rotation_code(problem.rows, bits, seed=problem.seed)
    basis = _int8_rows(code.rotation.matrix())
    scales = in_range(code.scales.to(torch.float64) * code.unit, dtype)
    return from_integers(
        [code.levels.to(torch.int16) - len(code.values) // 2],
        None,
        scales.values,
        levels=code.values.to(dtype),
        scales="row",
        basis=basis.levels,
        basis_scale=basis.scale.to(dtype),
        unit=scales.unit,
    )


def _rounded(codec: Int8 | Int4, problem: Problem, dtype: torch.dtype) -> CodedMatrix:
    matrix = _integers(codec, problem.rows, dtype)
    if (least := stored_bytes(matrix)) > problem.nbytes:
        raise refuse_bytes(problem, least, f"{codec.bits} bits a number")
    return matrix


def _pair(method: Any, codec: Int8 | Int4, problem: Problem, dtype: torch.dtype) -> _Stored:
    """A pair, each of its columns brought to one size before it is rounded: every coordinate has as many bits."""
    shape = problem.rows.shape
    ranks = range(min(shape), 0, -1)
    rank = next((r for r in ranks if fixed_bytes(codec, shape, dtype.itemsize, r) <= problem.nbytes), 0)
    if rank < _LEAST_RANK:
        raise refuse_bytes(problem, fixed_bytes(codec, shape, dtype.itemsize, _LEAST_RANK), "1 flat of rank 1")
    found = _factors(method, problem, rank)
    while True:
        if found.coordinates.shape[1] > rank:
            found = found.first(rank) if isinstance(method, SVD) else _factors(method, problem, rank)
        matrix = _rounded_pair(codec, found.coordinates, found.basis, dtype)
        # The head of a file may be longer than what the coder saves of a small matrix.
        over = (least := stored_bytes(matrix)) - problem.nbytes
        if over <= 0:
            return _Stored(matrix, found.norm, found.converged)
        most = fixed_bytes(codec, shape, dtype.itemsize, rank) - over
        lower = range(rank - 1, 0, -1)
        if not lower:
            raise refuse_bytes(problem, least, "1 flat of rank 1")
        # Heads shrink with the rank, too: rank 1 may fit where none below it seems to.
        rank = next((r for r in lower if fixed_bytes(codec, shape, dtype.itemsize, r) <= most), _LEAST_RANK)


@dataclass(frozen=True)
class _Stored:
    """A matrix, what was minimised where that is not the squared error, and whether the fit came to its end."""

    matrix: CodedMatrix
    norm: Norm | None = None
    converged: bool = True


@dataclass(frozen=True)
class _Factors:
    coordinates: Tensor
    basis: Tensor
    norm: Norm | None = None
    converged: bool = True

    def first(self, rank: int) -> _Factors:
        """Of the closed form the best pair of every lower rank is part of a higher one's."""
        return _Factors(self.coordinates[:, :rank], self.basis[:rank], self.norm, self.converged)


def _factors(method: Any, problem: Problem, rank: int) -> _Factors:
    """The method's pair of ``rank``."""
    rows, weighting = problem.rows, problem.weighting
    if isinstance(method, SVD):
        found = truncated_svd(rows, rank, left=weighting.left, right=weighting.right)
        return _Factors(found.coordinates, found.basis)
    made = method.fit(replace(problem, nbytes=method.cost(rows.shape, rank, 4), itemsize=4))
    coordinates, basis = (factor.detach().to(torch.float64) for factor in (made.matrix.weight, made.matrix.basis))
    # In an orthonormal basis the same matrix is rounded without its columns cancelling each other.
    q, t = torch.linalg.qr(basis.T)
    return _Factors(coordinates @ t.T, q.T, made.norm, made.converged)


def _rounded_pair(codec: Int8 | Int4, coordinates: Tensor, axes: Tensor, dtype: torch.dtype) -> CodedMatrix:
    size = coordinates.to(torch.float64).square().mean(0).sqrt()
    size = torch.where(size > 0, size, torch.ones_like(size))
    basis = _int8_rows(axes.to(torch.float64) * size.unsqueeze(1))
    return _integers(codec, (coordinates.to(torch.float64) / size).to(torch.float32), dtype, basis)


@dataclass(frozen=True)
class _Int8Rows:
    """Rows of a basis as 8-bit integers and a scale each, float32 or wider."""

    levels: Tensor
    scale: Tensor


def _int8_rows(rows: Tensor) -> _Int8Rows:
    scale = rows.abs().amax(1) / 127
    safe = torch.where(scale > 0, scale, torch.ones_like(scale)).unsqueeze(1)
    return _Int8Rows((rows / safe).round().to(torch.int8), scale.to(torch.float32))


def _integers(
    codec: Int8 | Int4, rows: Tensor | Rows, dtype: torch.dtype, basis: _Int8Rows | None = None
) -> CodedMatrix:
    width = rows.shape[1]
    groups = codec.groups(width)
    code = absmax_code(rows, codec.bits, group=-(-width // groups))
    scales = in_range(code.scales.to(torch.float64) * code.unit, dtype)
    of_basis = None if basis is None else in_range(basis.scale, dtype)
    return from_integers(
        [code.levels],
        None,
        scales.values,
        scales="row",
        groups=groups,
        basis=None if basis is None else basis.levels,
        basis_scale=None if of_basis is None else of_basis.values,
        unit=scales.unit + (0 if of_basis is None else of_basis.unit),
    )
