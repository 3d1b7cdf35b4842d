"""Which rivals to ask at which sizes: those nearest below and above every size, so that curves can be read there."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kflats.errors import KflatsError
from kflats.frontier.rivals.codebooks import OPQ, PQ, Residual
from kflats.frontier.rivals.coded import Rival
from kflats.frontier.rivals.factored import Factors
from kflats.frontier.rivals.rounding import Absmax, Half, Rotated, TorchAO

FAMILIES = ("fp16", "absmax", "torchao", "rotation", "pq", "opq", "rq", "svd", "robust-svd", "messi")
"""Names of the rivals for ``sweep`` and the command line."""

_FACTORS = {"svd": "SVD", "robust-svd": "Robust SVD", "messi": "MESSI"}
_LARGEST_FACTORS = 8.0
"""Bits per number above which factors are no smaller than what rounding alone makes."""
_ROTATION_ROWS, _ROTATION_ROUNDS = 8192, 10
"""A rotation of 147 thousand numbers is found in minutes from 3 million; in faiss' 50 rounds of all rows in an hour."""
_LARGEST_RESIDUAL = 0.9
"""Bits per number: more codebooks of whole rows train for longer than everything else together."""
_APART = 4 / 3
_REACH = 1.4
"""How far above a size its upper neighbour may lie."""
_MOST_CENTROIDS = 2**15
"""In all parts together: more train for longer than everything else, and lie where roundings do as well."""


def sweep(
    shape: tuple[int, int], sizes: Sequence[float], families: Sequence[str] = FAMILIES, *, every: bool = False
) -> list[Rival]:
    """The rivals of ``families`` for a table of this shape at ``sizes``, in bits per number.

    Roundings and rotations have sizes of their own: all of them between half the least and twice the largest size.
    Of codebooks, for every size the largest that is not above it; with ``every`` that and the smallest above, for
    each number of bits a code.

    Raises:
        KflatsError: an unknown family, or sizes that are none.

    >>> [rival.name for rival in sweep((30522, 384), [2.0], ["pq", "svd"])]
    ['PQ 96 x 6', 'SVD, 2 bits']
    """
    if unknown := sorted(set(families) - set(FAMILIES)):
        raise KflatsError(f"no rivals are called {unknown[0]!r}", hint="of " + ", ".join(FAMILIES))
    if not sizes or not all(math.isfinite(size) and size > 0 for size in sizes):
        raise KflatsError(f"sizes of {list(sizes)} bits per number", hint="numbers above zero")
    found: list[Rival] = []
    for family in families:
        found += _of_family(family, shape, sorted(sizes), every)
    return found


def _of_family(family: str, shape: tuple[int, int], sizes: Sequence[float], every: bool) -> list[Rival]:
    d = shape[1]
    if family in _FACTORS:
        return [Factors(_FACTORS[family], size) for size in sizes if size <= _LARGEST_FACTORS]
    if family in ("pq", "opq", "rq"):
        return _nearest(_codebooks(family, shape), shape, sizes, every)
    groups = [g for g in (32, 128) if not d % g]
    fixed: dict[str, list[tuple[float, Rival]]] = {
        "fp16": [(16, Half())],
        "absmax": [(8, Absmax(8)), (4, Absmax(4)), *((4 + 16 / g, Absmax(4, g)) for g in groups)],
        "torchao": [(8, TorchAO(8)), (4, TorchAO(4)), *((4 + 16 / g, TorchAO(4, g)) for g in groups)],
        "rotation": [(bits, Rotated(bits)) for bits in range(1, 9)],
    }
    if family == "torchao":
        fixed[family] += [(bits, TorchAO(bits)) for bits in (3, 2)]
        fixed[family] += [(bits + 0.5, TorchAO(bits, 32)) for bits in (3, 2) if not d % 32]
    return [rival for bits, rival in fixed[family] if sizes[0] / 2 <= bits <= 2 * sizes[-1]]


def _codebooks(family: str, shape: tuple[int, int]) -> list[PQ | OPQ | Residual]:
    n, d = shape
    possible = [bits for bits in (4, 6, 8) if 2**bits <= n]
    if family == "pq":
        return [PQ(m, bits) for bits in possible for m in _divisors(d) if m << bits <= _MOST_CENTROIDS]
    made: list[OPQ | Residual]
    if family == "rq":
        # Codebooks of whole rows weigh so much that 64 centroids are better than 256 up to some 100 thousand rows.
        made = [Residual(2**power, possible[:2][-1]) for power in range(8)] if possible else []
        made = [rival for rival in made if 8 * rival.size(shape) <= _LARGEST_RESIDUAL * n * d]
    else:
        quick = {"rounds": _ROTATION_ROUNDS, "rows": _ROTATION_ROWS}
        bits = possible[-1] if possible else 0
        made = [OPQ(m, bits, **quick) for m in _divisors(d) if possible and m << bits <= _MOST_CENTROIDS]
    # These take minutes each: no two sizes closer than a third.
    spread: list[PQ | OPQ | Residual] = []
    for rival in made:
        if not spread or rival.size(shape) >= _APART * spread[-1].size(shape):
            spread.append(rival)
    return spread


def _nearest(
    rivals: Sequence[PQ | OPQ | Residual], shape: tuple[int, int], sizes: Sequence[float], every: bool
) -> list[Rival]:
    """Of rivals of one family, each once: those whose sizes lie next to the wanted ones.

    Without ``every`` one for a size; with it two for each number of bits a code: curves of their own.
    """
    per_number = 8 / (shape[0] * shape[1])
    curves: dict[object, list[PQ | OPQ | Residual]] = {}
    for rival in sorted(rivals, key=lambda rival: (rival.size(shape), rival.bits)):
        curves.setdefault((rival.bits, getattr(rival, "dims", None)) if every else None, []).append(rival)
    kept: list[Rival] = []
    for curve in curves.values():
        for wanted in sizes:
            below = [rival for rival in curve if rival.size(shape) * per_number <= wanted]
            above = curve[len(below) : len(below) + 1] if every else []
            above = [rival for rival in above if rival.size(shape) * per_number <= _REACH * wanted]
            kept += [rival for rival in (*below[-1:], *above) if rival not in kept]
    return kept


def _divisors(d: int) -> list[int]:
    return [m for m in range(1, d + 1) if not d % m]
