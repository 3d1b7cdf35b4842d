"""Rates: what a weight loses at every size, for sharing bytes between weights.

Codes are counted at a few steps (of long matrices on some thousand rows): a factor of two apart, where every live
coordinate gains or loses about one bit, and farther apart where all are live. Between two of them the logarithm of the
error is nearly straight in the bytes (D ~ 2^(-2 R)), and is taken to be.
Rounding to 8 and 4 bits and to half precision is made and judged once; of float pairs every rank is known from the
spectrum, and offered where half precision holds its numbers; of rounded pairs and flats, too, beside what rounding
loses of whatever the rank keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from kflats.codecs.codec import Float, Int4, Int8, Rotation, Transform
from kflats.errors import KflatsError
from kflats.factorize.sizes import HEAD, fixed_bytes, flats_of, has_rank, least_bytes
from kflats.factorize.storing import store
from kflats.factorize.transforming import row_weights
from kflats.importance.weighting import Weighting
from kflats.methods import SVD, Best, Dense, Flats
from kflats.methods.judging import weighted_error
from kflats.methods.problem import Problem
from kflats.numerics.coding.encode import transform_rates
from kflats.numerics.coding.rotation import gaussian_share
from kflats.numerics.rows import Rows
from kflats.numerics.svd import truncated_svd
from kflats.recipes.recipe import Recipe

_POWERS = (12, 9, 6, 4, 2, 1, 0, -1, -2)  # binary logarithms of the root mean square of coordinates, in steps
_LONG = 300
"""Rows a column from which flats of their own pay for their axes: benchmarks/results/coded_flats_long.md."""
_A_BIT = 8  # sizes that are offered for each bit between two that were measured


@dataclass(frozen=True)
class Option:
    """One way to store a weight: ``nbytes`` in a file, and the ``error`` it leaves; ``judged`` says what error that is,
    nothing where it is another method's."""

    recipe: Recipe
    nbytes: int
    error: float
    note: str
    judged: str = "relative error"


def measured_options(
    rows: Rows, weighting: Weighting, recipe: Recipe, dtype: torch.dtype, tails: Tensor, *, pairs_only: bool = False
) -> tuple[Option, ...]:
    """Ways to store ``rows`` by ``recipe``: those of its codec, or of all codecs where its method is ``Best()``.

    Args:
        weighting: of the rows as they are here (transposed where the recipe says so).
        dtype: of the weight. tails: what an SVD of every rank loses, (R + 1,).
        pairs_only: no codes: a convolution becomes two.

    >>> from kflats.numerics.rows import TensorRows
    >>> matrix = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    >>> tails = SVD().spectrum(TensorRows(matrix), Weighting())
    >>> found = measured_options(TensorRows(matrix), Weighting(), Recipe(Best()), torch.float32, tails)
    >>> sorted({type(option.recipe.codec).__name__ for option in found})
    ['Float', 'Int4', 'Int8', 'Transform']
    """
    n, d = rows.shape
    dense = n * d * dtype.itemsize
    found: list[Option] = []
    for one in _expanded(recipe, rows.shape):
        if pairs_only and one.is_coded:
            continue
        if isinstance(one.codec, Transform):
            if float(tails[0]) > 0:
                found += _between(_coded(rows, weighting, one, float(tails[0])), n * d)
        elif one.is_coded and has_rank(one):
            found += _at_ranks(rows, weighting, one, dtype, tails)
        elif one.is_coded:
            with_room = Problem(rows, dense, dtype.itemsize, weighting)
            try:
                made = store(one, with_room, dtype)
            except KflatsError:  # a matrix so small that scales alone outgrow it
                continue
            error = weighted_error(rows, made.matrix, weighting).error
            found.append(Option(one, made.nbytes, error, f"{8 * made.nbytes / (n * d):.2f} bits a number"))
        elif one.is_cast:
            kind = one.torch_dtype(dtype)
            cost = n * d * kind.itemsize
            if cost < dense:  # values beyond the type make the error infinite, and no option
                whole = one.method.fit(Problem(rows, cost, kind.itemsize, weighting)).matrix.to(kind)
                error = weighted_error(rows, whole, weighting).error
                found.append(Option(one, cost, error, f"all numbers in {str(kind).removeprefix('torch.')}"))
        else:
            kind = one.torch_dtype(dtype)
            itemsize, most = kind.itemsize, torch.finfo(kind).max
            for rank in range(1, _ranks_held(rows, weighting, most) + 1):
                cost = one.method.cost((n, d), rank, itemsize)
                if cost < dense and rank * (n + d) < n * d:
                    found.append(Option(one, cost, float(tails[rank]), f"rank {rank} of {min(n, d)}"))
    return tuple(option for option in found if 0 < option.nbytes < dense and math.isfinite(option.error))


def _expanded(recipe: Recipe, shape: tuple[int, int]) -> Iterator[Recipe]:
    if not isinstance(recipe.method, Best):
        yield recipe
        return
    # Of several numbers of flats, one among them, the best is kept: what is read from one flat is a bound.
    yield replace(recipe, method=Flats(k=None) if shape[0] >= _LONG * shape[1] else SVD(), codec=Transform())
    yield replace(recipe, method=Dense(), codec=Int8())
    yield replace(recipe, method=Dense(), codec=Int4())
    yield replace(recipe, method=Dense(), codec=Float("float16"))
    yield replace(recipe, method=SVD(), codec=Float("float16"))


def _at_ranks(rows: Rows, weighting: Weighting, recipe: Recipe, dtype: torch.dtype, tails: Tensor) -> list[Option]:
    """Integers of flats at every rank: what a pair of that rank loses, and what rounding loses of the rest.

    That share is a Gaussian's for a rotation; for others it is measured once, on an SVD of all ranks.
    """
    (n, d), codec, k, found = rows.shape, recipe.codec, flats_of(recipe), list[Option]()
    total = float(tails[0])
    if isinstance(codec, Rotation):
        coded = [(Rotation(b), gaussian_share(b)) for b in ((codec.bits,) if codec.bits else range(1, 9))]
    elif total > 0:
        # Twice: of a small matrix the head of a file is most.
        room = 2 * (fixed_bytes(codec, (n, d), dtype.itemsize, min(n, d)) + least_bytes(recipe, (n, d), dtype.itemsize))
        made = store(replace(recipe, method=SVD()), Problem(rows, room, dtype.itemsize, weighting), dtype)
        coded = [(codec, min(1.0, weighted_error(rows, made.matrix, weighting).relative))]
    else:
        coded = [(codec, 0.0)]
    judged = "relative error" if isinstance(recipe.method, SVD) else "relative error of an SVD"
    least = least_bytes(recipe, (n, d), dtype.itemsize)
    for one, lost in coded:
        for rank in range(1, min(n, d) + 1):
            nbytes = fixed_bytes(one, (n, d), dtype.itemsize, rank, k) + HEAD
            if nbytes < least:
                continue  # a fit in so few might be refused
            error = float(tails[rank]) + lost * (total - float(tails[rank]))
            found.append(Option(recipe, nbytes, error, f"rank {rank} of {min(n, d)}, {one.bits} bits a number", judged))
    return sorted(found, key=lambda option: option.nbytes)


def _ranks_held(rows: Rows, weighting: Weighting, most: float) -> int:
    """The largest rank up to which coordinates in an orthonormal basis are ``most`` at most."""
    full = min(rows.shape)
    found = truncated_svd(rows, full, left=weighting.left, right=weighting.right)
    sizes = found.coordinates.abs() * found.basis.norm(dim=1).to(found.coordinates)
    # A right metric leaves the basis oblique; made orthonormal, a coordinate may take up those of all later axes.
    bounds = sizes.amax(0).cummax(0).values if weighting.right is None else sizes.cumsum(1).amax(0)
    return int((bounds <= most).sum())


def _coded(rows: Rows, weighting: Weighting, recipe: Recipe, total: float) -> list[Option]:
    """Codes at a few steps, finest first. ``total``: the error if nothing were stored."""
    assert isinstance(recipe.codec, Transform)
    n, d = rows.shape
    size, found = math.sqrt(total / (n * d)), list[Option]()
    steps = [size * 2.0**-power for power in _POWERS]
    weights, right = row_weights(weighting), weighting.right
    method = recipe.method
    judged = "relative error" + (
        "" if isinstance(method, SVD) else f" of {'one flat' if hasattr(method, 'k') else 'squares'}"
    )
    for rate in transform_rates(rows, steps, weights=weights, right=right, classes=recipe.codec.classes):
        if not rate.rank:  # nothing but labels and scales, a size that is not one to ask for
            break
        found.append(Option(recipe, rate.nbytes + HEAD, rate.error, "", judged))
    return found


def _between(measured: Sequence[Option], numbers: int) -> list[Option]:
    """The measured ones and, between each two, those on the straight line of log errors; ``numbers`` of the matrix."""
    found = []
    for fine, coarse in pairwise(measured):
        whole = fine.nbytes - coarse.nbytes
        if whole <= 0 or not 0 < fine.error < coarse.error:
            continue
        parts = max(2, round(_A_BIT * math.log(coarse.error / fine.error, 4)))
        for part in range(parts):
            share = part / parts
            error = fine.error ** (1 - share) * coarse.error**share
            found.append(replace(fine, nbytes=fine.nbytes - int(whole * share), error=error))
    found += list(measured[-1:])
    return [replace(one, note=f"{8 * one.nbytes / numbers:.2f} bits a number") for one in found]
