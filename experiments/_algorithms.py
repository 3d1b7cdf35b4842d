"""The version of each algorithm whose results are kept in a log of runs.

A finished run is used again as long as the versions of its algorithms are those written here, whatever else was
committed since. ``tests/golden/test_algorithms.py`` computes small results of each of them: where one has changed,
the test fails until its version here is raised, and the runs of the older version count as not run.
"""

from __future__ import annotations

from collections.abc import Iterable

VERSIONS: dict[str, int] = {
    "svd": 1,
    "messi": 1,
    "messi l1": 1,
    "k-means": 1,
    "flats": 1,
    "row-fisher": 1,
    "kronecker": 1,
    "training": 1,
    "scores": 1,
    "small networks": 1,
    "vgg": 1,
    "search": 1,
    "robust": 1,
}


def versions_of(names: Iterable[str]) -> dict[str, int]:
    """The versions of the named algorithms today.

    >>> versions_of(["svd"])
    {'svd': 1}
    """
    return {name: VERSIONS[name] for name in sorted(names)}
