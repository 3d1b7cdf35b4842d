"""Which ways to store a table a frontier asks, at which sizes, and whose error counts in each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from kflats.errors import KflatsError
from kflats.frontier.records import Refused
from kflats.frontier.rivals.codebooks import OPQ, PQ, Residual
from kflats.frontier.rivals.coded import Rival
from kflats.frontier.rivals.factored import Factors
from kflats.frontier.rivals.rounding import Half, TorchAO
from kflats.frontier.rivals.sweeps import FAMILIES, left_out, sweep
from kflats.frontier.rivals.transformed import Transformed
from kflats.frontier.trimmed import Trim
from kflats.importance import TokenCounts, TokenFisher, Uniform, ZipfPrior

SIZES = (0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
"""Bits per number of the original."""
OURS = ("transform", "flats", "float16")
METHODS = (*OURS, *FAMILIES, "trim")
"""What a frontier can be told to try, each alone or with "+counts" or "+zipf", the first also with "+fisher"."""
COUNTED = (
    "transform+fisher",
    "transform+counts",
    "transform+zipf",
    "transform",
    "flats+counts",
    "float16",
    *FAMILIES,
    "trim",
    "svd+counts",
    "pq+counts",
)
UNCOUNTED = ("transform+zipf", "transform", "flats+zipf", "float16", *FAMILIES, "trim", "svd+zipf", "pq+zipf")
UNWEIGHED = (*OURS, *FAMILIES)
"""What it tries by default, with texts to count, without, and where tokens do not enter: rivals as people use them, and
two with weights."""

_IMPORTANCES: dict[str, Any] = {
    "": Uniform(),
    "counts": TokenCounts(),
    "zipf": ZipfPrior(),
    "fisher": TokenFisher(),
}
_PACKAGES: tuple[tuple[str, str, set[type]], ...] = (
    ("faiss", "rivals", {PQ, OPQ, Residual}),
    ("torchao", "rivals", {TorchAO}),
    ("constriction", "codes", {Transformed}),
)
_WEIGH = ("transform", "flats", "pq", "opq", "rq", "svd", "robust-svd", "messi")
_WORDS = {"counts": "token counts", "zipf": "Zipf prior", "fisher": "token Fisher"}
_FAMILY = {"transform": "kflats Transform", "flats": "kflats Flats", "trim": "trimmed vocabulary"}
_LARGEST = {
    "transform": (12.0, "its finest steps take 9 to 11 bits; float16 holds the table in 16"),
    "flats": (8.0, "factors above 8 bits are not tried: rounding alone takes fewer"),
    "trim": (16.0, "the whole table in float16 takes 16 bits"),
}
"""Bits per number above which a way is not tried, and why."""


@dataclass(frozen=True)
class Entry:
    """One way at one size, under row weights of ``importance`` ("", "counts", "zipf" or "fisher")."""

    rival: Rival | Trim
    importance: str
    ours: bool

    @property
    def name(self) -> str:
        return self.rival.name + self._weighed

    @property
    def family(self) -> str:
        return self.rival.family + self._weighed

    @property
    def _weighed(self) -> str:
        return f", {_WORDS[self.importance]}" if self.importance else ""


def importance_of(name: str) -> Any:
    """The importance behind the end of a method's name."""
    return _IMPORTANCES[name]


def entries(
    shape: tuple[int, int], sizes: Sequence[float], methods: Sequence[str], *, counted: bool, tokens: bool = True
) -> tuple[list[Entry], list[Refused]]:
    """What the named methods make of a table of this shape, each entry once, and the sizes that they cannot have.

    Args:
        sizes: bits per number.
        methods: of ``METHODS``, each alone or with "+counts" or "+zipf"; transform also with "+fisher".
        counted: whether there are texts to count.
        tokens: whether tokens enter the table, so that its rows can be weighed by them.

    Raises:
        KflatsError: unknown methods, one that cannot weigh rows, counts without texts, weights of tokens where none
            enter, sizes that are none, or nothing at all that is possible.

    >>> there, not_possible = entries((5000, 64), [2.0], ["transform+zipf", "fp16"], counted=False)
    >>> [entry.name for entry in there], [one.name for one in not_possible]
    (['kflats Transform, 2 bits, Zipf prior'], ['fp16, 2 bits'])
    """
    if not sizes or not all(isinstance(s, int | float) and math.isfinite(s) and 0 < s <= 64 for s in sizes):
        raise KflatsError(f"sizes of {list(sizes)!r} bits", hint="numbers above 0, bits per number of the original")
    if not methods:
        raise KflatsError("no methods are named", hint="of " + ", ".join(METHODS))
    wanted = sorted(set(map(float, sizes)))
    found: list[Entry] = []
    refused: list[Refused] = []
    for method in methods:
        name, _, importance = method.strip().lower().partition("+")
        if name not in METHODS or importance not in _IMPORTANCES:
            known = f"of {', '.join(METHODS)}, each alone or with +counts or +zipf; transform+fisher"
            raise KflatsError(f"no way to store a table is called {method!r}", hint=known)
        if not tokens and (importance or name == "trim"):
            raise KflatsError(
                f"{method} goes by tokens, and tokens do not enter this table",
                hint=f"{name} alone" if importance else "other methods, or the token embedding",
            )
        if importance in ("counts", "fisher") and not counted:
            raise KflatsError(f"{method} has nothing to count", cause="no texts were given", hint=f"{name}+zipf")
        rivals, missing = _rivals(name, shape, wanted)
        weighs = name in _WEIGH
        if (importance and not weighs) or (importance == "fisher" and name != "transform"):
            side = "columns" if importance == "fisher" else "rows"
            raise KflatsError(f"{name} cannot weigh {side}", hint=f"{name} alone")
        found += [one for r in rivals if (one := Entry(r, importance, name in OURS)) not in found]
        for reason, lost in missing.items():
            called = f"{_FAMILY.get(name, name)}, {', '.join(f'{size:g}' for size in lost)} bits"
            refused.append(Refused(called + (f", {_WORDS[importance]}" if importance else ""), reason))
    if not found:
        said = "; ".join(f"{one.name}: {one.reason}" for one in refused)
        raise KflatsError("nothing that was asked is possible", cause=said, hint="other sizes or methods")
    return found, list(dict.fromkeys(refused))


def check_installed(asked: Sequence[Entry], *, drawn: bool) -> None:
    """Refuse before anything is measured what would be missed in the middle.

    Raises:
        KflatsError: a package that an entry, or with ``drawn`` a picture, needs is not installed.
    """
    kinds = {type(entry.rival) for entry in asked}
    wanted = [(name, extra) for name, extra, users in _PACKAGES if kinds & users]
    wanted += [("matplotlib", "report"), ("jinja2", "report")] if drawn else []
    for name, extra in wanted:
        if find_spec(name) is None:
            raise KflatsError(f"this frontier needs {name}", hint=f"pip install 'kflats[{extra}]', or other methods")


def _rivals(
    name: str, shape: tuple[int, int], sizes: Sequence[float]
) -> tuple[list[Rival | Trim], dict[str, list[float]]]:
    """What a method makes at ``sizes``, and the sizes that it does not have, by the reason."""
    if name in FAMILIES:
        return [*sweep(shape, sizes, [name])], left_out(shape, sizes, name)
    if name == "float16":
        small = [size for size in sizes if size < 16]
        return [Half("kflats Dense, float16")] * (small != sizes), {"it takes 16 bits": small} if small else {}
    most, why = _LARGEST[name]
    kept, beyond = [size for size in sizes if size <= most], [size for size in sizes if size > most]
    if name == "transform":
        made: list[Rival | Trim] = [Transformed(size) for size in kept]
    elif name == "flats":
        made = [Factors("kflats Flats", size) for size in kept]
    else:
        made = [Trim(size) for size in kept]
    return made, {why: beyond} if beyond else {}
