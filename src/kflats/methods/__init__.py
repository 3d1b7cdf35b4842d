"""Methods: frozen values that say which geometry covers the rows. Each makes a Matrix of rows, weighting and bytes."""

from __future__ import annotations

from dataclasses import replace

from kflats.common.registry import Registry
from kflats.methods.flats import Flats
from kflats.methods.keep_dense import Auto, KeepDense
from kflats.methods.protocol import (
    ClusterMethod,
    Factored,
    Method,
    PairMethod,
    Problem,
    check_method,
)
from kflats.methods.robust import Entrywise, RobustSVD, Subspace
from kflats.methods.svd import SVD, KMeansSVD
from kflats.numerics.loss import Loss, Squared

__all__ = [
    "MESSI",
    "METHODS",
    "SVD",
    "Auto",
    "ClusterMethod",
    "Entrywise",
    "Factored",
    "Flats",
    "KMeansSVD",
    "KeepDense",
    "Method",
    "PairMethod",
    "Problem",
    "RobustSVD",
    "Subspace",
    "check_method",
    "from_name",
]


def MESSI(k: int | None = 5, error: Loss = Squared(), restarts: int = 10) -> Flats:
    """MESSI as published: equal ranks, random partitions to start from, of many local minima the smallest.

    Use it with Uniform(). ``restarts`` is how many local minima are computed (the paper says "many" without a number;
    1 takes a tenth of the time). ``k=None`` searches the number of flats (appendix D), with all restarts for each.
    ``error``: powers are its "l^q-error" and truncated is one of its "distance functions" (sections 2.1 and E.1). The
    speed of EM differs: between whole E-steps a few look at doubtful rows only (docs/mathematics.md).
    """
    published = Flats(k=k, ranks="uniform", exact=False, start="random", tolerance=1e-4, max_iterations=100)
    return replace(published, error=error, restarts=restarts)


METHODS: Registry[Method] = Registry(
    "method",
    (SVD, Flats, KMeansSVD, KeepDense, Auto, RobustSVD, Entrywise, Subspace),
    {
        "svd": SVD,
        "flats": Flats,
        "kmeans-svd": KMeansSVD,
        "messi": MESSI,
        "keep-dense": KeepDense,
        "auto": Auto,
        "robust-svd": RobustSVD,
        "entrywise": Entrywise,
        "l1": lambda: Entrywise(p=1.0),
        "subspace": Subspace,
    },
)
"""All methods, and what the command line calls them."""


def from_name(name: str, **options: object) -> Method:
    """The method that a command line calls ``name``.

    Raises:
        KflatsError: no method has this name, or this one does not have an option.

    >>> from_name("svd")
    SVD(form='factors')
    """
    return METHODS.value(name, **options)
