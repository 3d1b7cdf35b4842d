"""The table of the laws: methods, pairs of a method and a codec, and which rows every change is tried on.

A law takes a whole table or a part of it. `make test` runs the rows that are named quick, at least one of each kind of
method and codec. `make sweep` runs all others, which are marked slow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest
from kflats_toys import SketchedSVD, Ternary

from kflats import MESSI, SVD, Entrywise, Feedback, Flats, Integer, KeepDense, KMeansSVD, RobustSVD, Subspace, Transform
from kflats.numerics.loss import Huber, Power, Truncated

METHODS: dict[str, Any] = {
    "svd": SVD(),
    "svd, interpolative": SVD(form="interpolative"),
    "flats": Flats(k=3),
    "flats, no exact rows": Flats(k=3, exact=False),
    "flats, nested": Flats(k=2, nested_ranks=3),
    "flats, one basis, nested": Flats(k=1, nested_ranks=4, exact=False),
    "flats, uniform": Flats(k=3, ranks="uniform"),
    "flats, one": Flats(k=1),
    "flats, searched": Flats(k=None),
    "flats, random start": Flats(k=3, start="random"),
    "k-means": KMeansSVD(k=3),
    "messi": MESSI(k=3, restarts=2),
    "robust svd": RobustSVD(),
    "robust svd, p = 4": RobustSVD(p=4.0),
    "entrywise": Entrywise(),
    "entrywise, p = 0.7": Entrywise(p=0.7),
    "median flat": Subspace(),
    "huber flat": Subspace(Huber(2.0, "median")),
    "truncated flat": Subspace(Truncated(3.0, "median")),
    "of another package": SketchedSVD(),
}
"""A new method is a new row."""

QUICK_METHODS = {
    "svd",
    "svd, interpolative",
    "flats",
    "flats, one basis, nested",
    "flats, searched",
    "k-means",
    "messi",
    "robust svd",
    "entrywise",
    "huber flat",
    "of another package",
}

CODED: list[tuple[Any, Any, float]] = [
    (SVD(), Transform(), 0.12),
    (SVD(), Transform(classes=1), 0.12),
    (Flats(k=2), Transform(), 0.14),
    (KeepDense(), Feedback(), 0.14),
    (KeepDense(), Integer(bits=8), 0.32),
    (KeepDense(), Integer(bits=8, group=16), 0.40),
    (KeepDense(), Integer(bits=4, group=16), 0.30),
    (KeepDense(), Integer(bits=6), 0.25),
    (SVD(), Integer(bits=8), 0.20),
    (SVD(), Integer(bits=4, group=None), 0.12),
    (SVD(), Integer(bits=3), 0.12),
    (RobustSVD(p=1.0), Integer(bits=8), 0.20),
    (Entrywise(p=1.0), Integer(bits=4, group=64), 0.12),
    (Subspace(), Integer(bits=8, group=16), 0.20),
    (Flats(k=2), Integer(bits=8), 0.25),
    (Flats(k=2, nested_ranks=2), Integer(bits=4, group=16), 0.20),
    (Flats(k=2, error=Power(1.0)), Integer(bits=4, group=64), 0.20),
    (MESSI(k=2, restarts=1), Integer(bits=8), 0.25),
    (KMeansSVD(k=2), Integer(bits=4, group=64), 0.20),
    (MESSI(k=2, restarts=1), Transform(), 0.14),
    (KMeansSVD(k=2), Transform(), 0.14),
    (Flats(k=2, error=Power(1.0)), Transform(), 0.14),
    (RobustSVD(p=1.0), Transform(), 0.12),
    (Entrywise(p=1.0), Transform(), 0.12),
    (Subspace(), Transform(classes=1), 0.12),
    (SketchedSVD(), Integer(bits=8), 0.20),
    (SketchedSVD(), Transform(), 0.12),
    (KeepDense(), Ternary(), 0.15),
    (SketchedSVD(), Ternary(), 0.12),
    (Flats(k=2, nested_ranks=2), Ternary(), 0.12),
]
"""A method, a codec, and the share of a float32 table's bytes that they are given. A new codec is a new row."""

QUICK_CODED = {
    (SVD(), Transform()),
    (Flats(k=2), Transform()),
    (KeepDense(), Feedback()),
    (KeepDense(), Integer(bits=8)),
    (KeepDense(), Integer(bits=4, group=16)),
    (SVD(), Integer(bits=8)),
    (Entrywise(p=1.0), Integer(bits=4, group=64)),
    (Flats(k=2, nested_ranks=2), Integer(bits=4, group=16)),
    (KMeansSVD(k=2), Integer(bits=4, group=64)),
    (RobustSVD(p=1.0), Transform()),
    (SketchedSVD(), Integer(bits=8)),
    (KeepDense(), Ternary()),
    (SketchedSVD(), Ternary()),
}

FIRST_CODED = {
    (SVD(), Transform()),
    (KeepDense(), Feedback()),
    (Flats(k=2), Transform()),
    (KeepDense(), Integer(bits=4, group=16)),
    (SVD(), Integer(bits=8)),
    (SketchedSVD(), Ternary()),
}
"""One of each kind, for laws that take seconds a row."""

slow = pytest.mark.slow


def each_method(table: dict[str, Any] = METHODS, quick: Collection[str] = QUICK_METHODS) -> pytest.MarkDecorator:
    """A law's case for each method."""
    rows = [pytest.param(value, id=name, marks=() if name in quick else slow) for name, value in table.items()]
    return pytest.mark.parametrize("method", rows)


def each_coded(quick: Collection[tuple[Any, Any]] = QUICK_CODED) -> pytest.MarkDecorator:
    """A law's case for each pair of a method and a codec, with its share of the bytes."""
    rows = [
        pytest.param(method, codec, share, id=f"{method}-{codec}", marks=() if (method, codec) in quick else slow)
        for method, codec, share in CODED
    ]
    return pytest.mark.parametrize(("method", "codec", "share"), rows)


def crossed(*axes: Iterable[Any]) -> list[Any]:
    """All combinations of some values; those that hold each value at least once are quick, the others slow."""
    values = [list(axis) for axis in axes]
    quick = {tuple(i % len(axis) for axis in values) for i in range(max(map(len, values)))}
    places = product(*(range(len(axis)) for axis in values))
    return [
        pytest.param(*(axis[i] for axis, i in zip(values, place, strict=True)), marks=() if place in quick else slow)
        for place in places
    ]
