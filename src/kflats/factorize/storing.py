"""Codecs carried out: the rows of a weight become a CodedMatrix that takes at most so many bytes."""

from __future__ import annotations

import time

import torch

from kflats.codecs.codec import Rotation, Transform
from kflats.codecs.streams import stored_bytes
from kflats.factorize.fixed_rate import Rounded, at_fixed_rate
from kflats.factorize.transforming import heeds_metrics, transformed
from kflats.methods.problem import Factored, Problem, check_accepts
from kflats.numerics.rows import Rows
from kflats.recipes.recipe import Recipe, brief

TRANSFORM_ACCEPTS = frozenset({"rows", "left", "right"})
_ANY = 1000
"""So many bytes a number hold any code."""


def accepted(recipe: Recipe) -> frozenset[str]:
    """The kinds of weighting that a recipe can take: its method's, but for codecs that take the place of the fit."""
    if takes_part(recipe):
        return TRANSFORM_ACCEPTS
    found: frozenset[str] = recipe.method.accepts
    return found


def takes_part(recipe: Recipe) -> bool:
    """Whether the codec takes the place of the fit."""
    return isinstance(recipe.codec, Transform) and heeds_metrics(recipe.method)


def store(recipe: Recipe, problem: Problem, dtype: torch.dtype) -> Factored:
    """``problem``'s rows by the recipe's codec of integers, its scales as ``dtype``.

    Raises:
        KflatsError: a budget too small, a weighting that cannot be taken, or ``constriction`` not installed.
    """
    start = time.perf_counter()
    codec = recipe.codec
    check_accepts(brief(codec if takes_part(recipe) else recipe.method), accepted(recipe), problem.weighting)
    if isinstance(codec, Transform):
        made: Rounded = transformed(recipe.method, codec, problem, dtype)
    else:
        made = at_fixed_rate(recipe.method, codec, problem, dtype)
    seconds, nbytes = time.perf_counter() - start, stored_bytes(made.matrix)
    return Factored(made.matrix, (), seconds, made.norm, stored_bytes=nbytes, converged=made.converged)


def counted_bytes(recipe: Recipe, rows: Rows, dtype: torch.dtype) -> int:
    """Bytes of a file that holds ``rows`` by a recipe whose codes have one size, counted on the codes themselves.

    Of a rotation, whose size depends a little on the seed, a bound.
    """
    n, d = rows.shape
    nbytes = store(recipe, Problem(rows, _ANY * n * d + _ANY**2, dtype.itemsize), dtype).nbytes
    return nbytes + (d * d // 16 + 200 if isinstance(recipe.codec, Rotation) else 0)
