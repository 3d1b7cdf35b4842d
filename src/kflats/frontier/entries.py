"""Which ways to store a table a frontier asks, at which sizes, and whose error counts in each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from kflats.errors import KflatsError
from kflats.frontier.rivals.codebooks import OPQ, PQ, Residual
from kflats.frontier.rivals.coded import Rival
from kflats.frontier.rivals.factored import Factors
from kflats.frontier.rivals.rounding import TorchAO
from kflats.frontier.rivals.sweeps import FAMILIES, sweep
from kflats.frontier.rivals.transformed import Transformed
from kflats.frontier.trimmed import Trim
from kflats.importance import TokenCounts, TokenFisher, Uniform, ZipfPrior

SIZES = (0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
"""Bits per number of the original."""
OURS = ("transform", "flats")
METHODS = (*OURS, *FAMILIES, "trim")
"""What a frontier can be told to try, each alone or with "+counts" or "+zipf", the first also with "+fisher"."""
COUNTED = (
    "transform+fisher",
    "transform+counts",
    "transform+zipf",
    "transform",
    "flats+counts",
    *FAMILIES,
    "trim",
    "svd+counts",
    "pq+counts",
)
UNCOUNTED = ("transform+zipf", "transform", "flats+zipf", *FAMILIES, "trim", "svd+zipf", "pq+zipf")
"""What it tries by default, with texts to count and without: rivals as people use them, and two with weights."""

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
_WORDS = {"counts": "token counts", "zipf": "Zipf prior", "fisher": "token Fisher"}
_LARGEST = {"transform": 8.0, "flats": 8.0, "trim": 12.0}
"""Above, rounding alone is as good."""


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


def entries(shape: tuple[int, int], sizes: Sequence[float], methods: Sequence[str], *, counted: bool) -> list[Entry]:
    """What the named methods make of a table of this shape, each entry once.

    Args:
        sizes: bits per number.
        methods: of ``METHODS``, each alone or with "+counts" or "+zipf"; transform also with "+fisher".
        counted: whether there are texts to count.

    Raises:
        KflatsError: unknown methods, one that cannot weigh rows, counts without texts, sizes that are none.

    >>> [entry.name for entry in entries((5000, 64), [2.0], ["transform+zipf", "fp16"], counted=False)]
    ['kflats Transform, 2 bits, Zipf prior']
    """
    if not sizes or not all(isinstance(s, int | float) and math.isfinite(s) and 0 < s <= 64 for s in sizes):
        raise KflatsError(f"sizes of {list(sizes)!r} bits", hint="numbers above 0, bits per number of the original")
    if not methods:
        raise KflatsError("no methods are named", hint="of " + ", ".join(METHODS))
    found: list[Entry] = []
    for method in methods:
        name, _, importance = method.strip().lower().partition("+")
        if name not in METHODS or importance not in _IMPORTANCES:
            known = f"of {', '.join(METHODS)}, each alone or with +counts or +zipf; transform+fisher"
            raise KflatsError(f"no way to store a table is called {method!r}", hint=known)
        if importance in ("counts", "fisher") and not counted:
            raise KflatsError(f"{method} has nothing to count", cause="no texts were given", hint=f"{name}+zipf")
        for rival in _rivals(name, shape, sorted(set(map(float, sizes)))):
            if (importance and not rival.weighs) or (importance == "fisher" and name != "transform"):
                side = "columns" if importance == "fisher" else "rows"
                raise KflatsError(f"{name} cannot weigh {side}", hint=f"{name} alone")
            if (entry := Entry(rival, importance, name in OURS)) not in found:
                found.append(entry)
    return found


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


def _rivals(name: str, shape: tuple[int, int], sizes: Sequence[float]) -> list[Rival | Trim]:
    kept = [size for size in sizes if size <= _LARGEST.get(name, math.inf)]
    if name == "transform":
        return [Transformed(size) for size in kept]
    if name == "flats":
        return [Factors("kflats Flats", size) for size in kept]
    if name == "trim":
        return [Trim(size) for size in kept]
    return [*sweep(shape, sizes, [name])]
