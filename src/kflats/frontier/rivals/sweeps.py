"""Which rivals to ask at which sizes: those nearest below and above every size, so that curves can be read there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

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

    Roundings, rotations and codebooks have sizes of their own: for every size the largest that is not above it, of
    roundings for each number of columns that share a scale. With ``every``, for curves to be read between them: all
    roundings from half the least size to twice the largest; of codebooks that and the smallest above, for each number
    of bits a code. Roundings go by the bits of a number: the scale of a row comes on top.

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


def left_out(shape: tuple[int, int], sizes: Sequence[float], family: str) -> dict[str, list[float]]:
    """The sizes at which ``sweep`` has no rival of a family, by the reason.

    >>> left_out((30522, 384), [2.0, 9.0], "svd"), left_out((30522, 384), [2.0, 9.0], "absmax")
    ({'factors above 8 bits are not tried: rounding alone takes fewer': [9.0]}, {'the smallest takes 4 bits': [2.0]})
    """
    found: dict[str, list[float]] = {}
    for size in sorted(sizes):
        if not sweep(shape, [size], [family]):
            found.setdefault(_why(family, shape), []).append(size)
    return found


def _why(family: str, shape: tuple[int, int]) -> str:
    if family in _FACTORS:
        return f"factors above {_LARGEST_FACTORS:g} bits are not tried: rounding alone takes fewer"
    if family in ("pq", "opq", "rq"):
        sizes = [8 * rival.size(shape) / (shape[0] * shape[1]) for rival in _codebooks(family, shape)]
    else:
        sizes = [bits for bits, *_ in _fixed(family, shape[1])]
    if sizes:
        return f"the smallest takes {min(sizes):.3g} bits"
    most = f": codebooks of whole rows above {_LARGEST_RESIDUAL:g} bits are not tried" if family == "rq" else ""
    return f"it has no codebooks for a table of this shape{most}"


def _of_family(family: str, shape: tuple[int, int], sizes: Sequence[float], every: bool) -> list[Rival]:
    d = shape[1]
    if family in _FACTORS:
        return [Factors(_FACTORS[family], size) for size in sizes if size <= _LARGEST_FACTORS]
    if family in ("pq", "opq", "rq"):
        return _nearest(_codebooks(family, shape), shape, sizes, every)
    fixed = _fixed(family, d)
    if every:
        return [rival for bits, _, rival in fixed if sizes[0] / 2 <= bits <= 2 * sizes[-1]]
    kept = set()
    for size, group in product(sizes, {group for _, group, _ in fixed}):
        below = [bits for bits, other, _ in fixed if other == group and bits <= size]
        kept |= {(bits, group) for bits in sorted(below)[-1:]}
    return [rival for bits, group, rival in fixed if (bits, group) in kept]


def _fixed(family: str, d: int) -> list[tuple[float, int | None, Rival]]:
    """(bits per number, columns that share a scale, None for all, the rival) of each rounding of a family."""
    groups = [g for g in (32, 128) if not d % g]
    if family == "fp16":
        return [(16, None, Half())]
    if family == "rotation":
        return [(bits, None, Rotated(bits)) for bits in range(1, 9)]
    kind = Absmax if family == "absmax" else TorchAO
    found: list[tuple[float, int | None, Rival]] = [(8, None, kind(8)), (4, None, kind(4))]
    found += [(4 + 16 / g, g, kind(4, g)) for g in groups]
    if kind is TorchAO:
        found += [(bits, None, TorchAO(bits)) for bits in (3, 2)]
        found += [(bits + 0.5, 32, TorchAO(bits, 32)) for bits in (3, 2) if not d % 32]
    return found


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
