"""Whose error counts: frozen values, free of data, and what each needs measured."""

from __future__ import annotations

import dataclasses
from typing import Any

from kflats.errors import KflatsError
from kflats.importance.sensitivity import InputGram, KroneckerFisher, RowFisher, TwoSided
from kflats.importance.tokens import TokenCounts, TokenFisher, Uniform, ZipfPrior

__all__ = [
    "NAMES",
    "VALUES",
    "InputGram",
    "KroneckerFisher",
    "RowFisher",
    "TokenCounts",
    "TokenFisher",
    "TwoSided",
    "Uniform",
    "ZipfPrior",
    "from_name",
]

VALUES: tuple[type, ...] = (
    Uniform,
    TokenCounts,
    ZipfPrior,
    TokenFisher,
    RowFisher,
    TwoSided,
    InputGram,
    KroneckerFisher,
)
NAMES: dict[str, Any] = {
    "uniform": Uniform,
    "counts": TokenCounts,
    "zipf": ZipfPrior,
    "token-fisher": TokenFisher,
    "row-fisher": RowFisher,
    "two-sided": TwoSided,
    "input-gram": InputGram,
    "kronecker": KroneckerFisher,
}


def from_name(name: str, **options: Any) -> Any:
    """The importance that a command line calls ``name``: uniform, counts, zipf, token-fisher, row-fisher,
    two-sided, input-gram or kronecker.

    >>> from_name("counts", power=1.0)
    TokenCounts(power=1.0, smoothing=0.5, floor=0.3)
    """
    kind = NAMES.get(name.strip().lower())
    if kind is None:
        raise KflatsError(f"no importance is called {name!r}", hint="one of " + ", ".join(NAMES))
    if unknown := sorted(set(options) - {field.name for field in dataclasses.fields(kind)}):
        raise KflatsError(
            f"{name.strip().lower()} importance has no {', '.join(unknown)}", hint="counts or zipf have a power"
        )
    return kind(**options)
