"""What codes take: of a fixed rate to the byte, in memory; of a file the least, and the most that is known.

Two sizes: *fixed* bytes, what a matrix takes in memory, and *stored* bytes, what a file holds once the integers are
entropy coded. A budget counts stored bytes. Where the rank or the bits of a fixed rate are to be found, fixed bytes are
counted instead, so that files are smaller by what the coder finds. Codes whose fixed bytes do not fit are made, and
refused only if their stored bytes do not fit either.
"""

from __future__ import annotations

import math

import torch

from kflats.codecs.codec import Codes, Int4, Int8, Rotation, Transform
from kflats.methods import Dense
from kflats.nn.coded_geometry import CodedGeometry
from kflats.recipes.recipe import Recipe

_LEAST_RANK = 1
HEAD = 160
"""Bytes that a stream's head takes beside what it holds, at most; small matrices have nothing to save them with."""
_BASIS_HEAD = 400
"""The same with a basis, whose rows have distributions of their own."""


def fixed_bytes(codec: Codes, shape: tuple[int, int], itemsize: int, rank: int | None = None, flats: int = 1) -> int:
    """Bytes in memory of an (n, d) matrix by a codec of fixed rate.

    Args:
        itemsize: bytes of a scale.
        rank: of every flat; None: of the matrix itself.
        flats: how many there are; of like numbers of rows.

    >>> fixed_bytes(Int8(), (100, 8), 4), fixed_bytes(Int8(), (100, 8), 4, rank=2, flats=2)
    (1252, 776)
    """
    n, d = shape
    r = d if rank is None else rank
    if isinstance(codec, Rotation):
        bits, groups, levels = codec.bits or 1, 1, 2 ** (codec.bits or 1)
    else:
        assert isinstance(codec, Int8 | Int4)
        bits, groups, levels = codec.bits, codec.groups(r), 0
    row_bytes = -(-r * bits // 8)
    geometry = CodedGeometry(
        shape,
        r,
        tuple((n * (c + 1) // flats - n * c // flats, row_bytes) for c in range(flats)),
        levels=levels,
        scales="row",
        groups=groups,
        basis="int8" if rank is not None or isinstance(codec, Rotation) else "identity",
        flats=((1, r),) * flats if flats > 1 else (),
    )
    total = 0
    for name, size in geometry.shapes.items():
        kind = geometry.dtype_of(name, torch.float32)
        total += math.prod(size) * (itemsize if kind.is_floating_point else kind.itemsize)
    return total


def least_bytes(recipe: Recipe, shape: tuple[int, int], itemsize: int) -> int:
    """The least that a recipe with a codec of integers may be given. Of ``Transform`` only a bound is known here, with
    one axis: what classes and distributions need is found when it is fitted. Of others whatever is given fits, the head
    of a file counted: of a few hundred bytes it is most."""
    codec, ranked = recipe.codec, has_rank(recipe)
    if isinstance(codec, Transform):
        return HEAD + shape[1] + max(64, shape[0] // 64)
    if ranked and isinstance(codec, Rotation) and codec.bits is None:
        codec = Rotation(8)  # a fit may choose so many
    return fixed_bytes(codec, shape, itemsize, _LEAST_RANK if ranked else None, flats_of(recipe)) + _BASIS_HEAD


def whole_bytes(recipe: Recipe, shape: tuple[int, int], itemsize: int) -> int | None:
    """A bound of what a recipe takes whatever it is given, as a file's bytes; None where any size will do."""
    codec, blocks = recipe.codec, shape[0] * shape[1] // 2**14
    if has_rank(recipe):
        return None
    if isinstance(codec, Int8 | Int4):
        return fixed_bytes(codec, shape, itemsize) + blocks + HEAD
    if isinstance(codec, Rotation) and codec.bits is not None:
        return fixed_bytes(codec, shape, itemsize) + blocks + _BASIS_HEAD
    return None


def has_any_size(recipe: Recipe) -> bool:
    """Whether codes can be made as large as is wanted, within a hundredth."""
    return isinstance(recipe.codec, Transform)


def has_rank(recipe: Recipe) -> bool:
    """Whether a method fits flats, whose rank the bytes decide; codes of the matrix itself have but one size."""
    return not isinstance(recipe.method, Dense)


def flats_of(recipe: Recipe) -> int:
    """How many flats the method fits at least."""
    return getattr(recipe.method, "k", None) or 1
