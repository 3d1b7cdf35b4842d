"""The sizes that each baseline has, and those of them that lie next to wanted sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from frontier.baseline import Baseline
from frontier.baselines import Absmax, Factors, Half, Rotated, TorchAO, Transformed
from frontier.codebooks import OPQ, PQ, Codebooks, Residual

FAMILIES = ("fp16", "absmax", "torchao", "rotation", "pq", "opq", "rq", "svd", "robust-svd", "messi")
"""The baselines, as options name them."""
OURS = {"transform": Transformed, "flats": lambda bits: Factors("kflats Flats", bits), "float16": None}
"""kflats' own ways, as options name them."""

_FACTORS = {"svd": "SVD", "robust-svd": "Robust SVD", "messi": "MESSI"}
_LARGEST = {"transform": 12.0, "flats": 8.0, "svd": 8.0, "robust-svd": 8.0, "messi": 8.0}
"""Bits per number above which a way is not tried: steps get no finer, or rounding alone takes fewer."""
_LARGEST_RESIDUAL = 0.9
"""Bits per number: more codebooks of whole rows train for longer than everything else together."""
_ROTATION = {"rounds": 10, "rows": 8192}
"""A rotation of 147 thousand numbers is fitted in minutes to 3 million; in faiss' 50 rounds on all rows in an hour."""
_APART = 4 / 3
_REACH = 1.4
"""How far above a size its upper neighbour may lie."""
_MOST_CENTROIDS = 2**15
"""In all parts together: more train for longer than everything else, and lie where roundings do as well."""


def sweep(shape: tuple[int, int], sizes: Sequence[float], name: str, *, above: bool = False) -> list[Baseline]:
    """The baselines called ``name`` for a table of this shape at ``sizes``, in bits per number.

    Roundings, rotations and codebooks have sizes of their own: for every size the largest that is not above it, of
    roundings for each number of columns that share a scale. With ``above`` the next larger one too, and codebooks for
    each number of bits a code: then curves can be read between them. Roundings go by the bits of a number: the scale of
    a row comes on top.

    >>> [one.name for name in ("pq", "svd") for one in sweep((30522, 384), [2.0], name)]
    ['PQ 96 x 6', 'SVD, 2 bits']
    """
    if name in _LARGEST:
        kept = [size for size in sorted(sizes) if size <= _LARGEST[name]]
        return [OURS[name](size) if name in OURS else Factors(_FACTORS[name], size) for size in kept]
    curves: dict[object, list[tuple[float, Baseline]]] = defaultdict(list)
    for bits, one in _possible(name, shape):
        curves[one.curve if above or not isinstance(one, Codebooks) else None].append((bits, one))
    kept: list[Baseline] = []
    for curve in curves.values():
        curve.sort(key=lambda pair: pair[0])
        for size in sorted(sizes):
            below = [one for bits, one in curve if bits <= size]
            beyond = [one for bits, one in curve if size < bits <= _REACH * size][: int(above)]
            kept += [one for one in (*below[-1:], *beyond) if one not in kept]
    return kept


def _possible(name: str, shape: tuple[int, int]) -> list[tuple[float, Baseline]]:
    """(bits per number, the baseline) of each size that there is."""
    n, d = shape
    if name in ("fp16", "float16"):
        return [(16, Half("fp16" if name == "fp16" else "kflats Dense, float16"))]
    if name == "rotation":
        return [(bits, Rotated(bits)) for bits in range(1, 9)]
    if name in ("pq", "opq", "rq"):
        return [(8 * one.size(shape) / (n * d), one) for one in _codebooks(name, shape)]
    kind = {"absmax": Absmax, "torchao": TorchAO}[name]
    made = [(bits, kind(bits)) for bits in ((8, 4) if kind is Absmax else (8, 4, 3, 2))]
    made += [(4 + 16 / g, kind(4, g)) for g in (32, 128) if not d % g]
    return made + [(bits + 0.5, TorchAO(bits, 32)) for bits in (3, 2) if kind is TorchAO and not d % 32]


def _codebooks(name: str, shape: tuple[int, int]) -> list[Codebooks]:
    n, d = shape
    divisors = [m for m in range(1, d + 1) if not d % m]
    possible = [bits for bits in (4, 6, 8) if 2**bits <= n]
    if name == "pq":
        return [PQ(m, bits) for bits in possible for m in divisors if m << bits <= _MOST_CENTROIDS]
    if name == "rq":
        # Codebooks of whole rows weigh so much that 64 centroids are better than 256 up to some 100 thousand rows.
        made = [Residual(2**power, bits) for bits in possible[:2][-1:] for power in range(8)]
        made = [one for one in made if 8 * one.size(shape) <= _LARGEST_RESIDUAL * n * d]
    else:
        made = [OPQ(m, bits, **_ROTATION) for bits in possible[-1:] for m in divisors if m << bits <= _MOST_CENTROIDS]
    spread: list[Codebooks] = []  # these take minutes each: no two sizes closer than a third
    for one in made:
        if not spread or one.size(shape) >= _APART * spread[-1].size(shape):
            spread.append(one)
    return spread
