"""Methods: frozen values that say which geometry covers the rows. Each makes a Matrix of rows, weighting and bytes."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, get_args

from kflats.errors import KflatsError
from kflats.methods.judging import row_errors
from kflats.methods.kmeans_svd import KMeansSVD
from kflats.methods.many_flats import MOST_SEARCHED, Flats
from kflats.methods.one_flat import SVD, Best, Dense
from kflats.methods.problem import Factored, Problem
from kflats.methods.robust import EllipsoidWay, Entrywise, RobustSVD, Subspace, ellipsoid_of
from kflats.numerics.coreset import Coreset
from kflats.numerics.loss import Loss, Squared

__all__ = [
    "MESSI",
    "MOST_SEARCHED",
    "SVD",
    "VALUES",
    "Best",
    "Dense",
    "Entrywise",
    "Factored",
    "Flats",
    "KMeansSVD",
    "Problem",
    "RobustSVD",
    "Subspace",
    "ellipsoid_of",
    "from_name",
    "row_errors",
]


def MESSI(k: int = 5, error: Loss = Squared()) -> Flats:
    """MESSI as published: equal ranks, a random partition to start from. Use it with Uniform().

    ``error`` is its "distance functions" (sections 2.1 and E.1): powers, truncated, Manhattan. What differs is how fast
    EM runs: between whole E-steps a few look at doubtful rows only (docs/mathematics.md).
    """
    return Flats(k=k, ranks="uniform", exact=False, start="random", tolerance=1e-4, max_iterations=100, error=error)


VALUES: tuple[type, ...] = (SVD, Flats, KMeansSVD, Dense, Best, RobustSVD, Entrywise, Subspace)
PAIRS: tuple[type, ...] = (SVD, RobustSVD, Entrywise, Subspace)  # whose matrix has one rank for all rows
PARTS: tuple[type, ...] = (*get_args(EllipsoidWay), *get_args(Loss), Coreset)  # what fields of methods hold
NAMES: dict[str, Callable[..., Any]] = {
    "svd": SVD,
    "flats": Flats,
    "kmeans-svd": KMeansSVD,
    "messi": MESSI,
    "dense": Dense,
    "best": Best,
    "robust-svd": RobustSVD,
    "entrywise": Entrywise,
    "l1": lambda: Entrywise(p=1.0),
    "subspace": Subspace,
}
"""What a command line calls the methods."""


def options_of(name: str) -> tuple[str, ...]:
    """What the method called ``name`` may be told.

    Raises:
        KflatsError: no method is called that.
    """
    make = NAMES.get(name.strip().lower())
    if make is None:
        raise KflatsError(f"no method is called {name!r}", hint="one of " + ", ".join(NAMES))
    return tuple(signature(make).parameters)


def from_name(name: str, **options: Any) -> Any:
    """The method that a command line calls ``name``: one of ``NAMES``.

    >>> from_name("svd")
    SVD(form='factors')
    """
    known = options_of(name)
    if wrong := sorted(options.keys() - set(known)):
        raise KflatsError(f"{name} has no {', '.join(wrong)}", hint=f"it has {', '.join(known) or 'no options'}")
    return NAMES[name.strip().lower()](**options)
