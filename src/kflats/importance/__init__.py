"""Whose error counts: frozen values, free of data, and what each needs measured."""

from __future__ import annotations

from kflats.common.registry import Registry
from kflats.importance.protocol import Importance, Measured, Weighting, WeightingForm, check_importance
from kflats.importance.sensitivity import InputGram, KroneckerFisher, RowFisher, TwoSided
from kflats.importance.tokens import TokenCounts, TokenFisher, Uniform, ZipfPrior

__all__ = [
    "IMPORTANCES",
    "Importance",
    "InputGram",
    "KroneckerFisher",
    "Measured",
    "RowFisher",
    "TokenCounts",
    "TokenFisher",
    "TwoSided",
    "Uniform",
    "Weighting",
    "WeightingForm",
    "ZipfPrior",
    "check_importance",
    "from_name",
]

IMPORTANCES: Registry[Importance] = Registry(
    "importance",
    (Uniform, TokenCounts, TokenFisher, RowFisher, TwoSided, InputGram, KroneckerFisher),
    {
        "uniform": Uniform,
        "counts": TokenCounts,
        "zipf": ZipfPrior,
        "token-fisher": TokenFisher,
        "row-fisher": RowFisher,
        "two-sided": TwoSided,
        "input-gram": InputGram,
        "kronecker": KroneckerFisher,
    },
)
"""All importances, and what the command line calls them."""


def from_name(name: str, **options: float) -> Importance:
    """The importance that a command line calls ``name``.

    Raises:
        KflatsError: no importance has this name, or this one does not have an option.

    >>> from_name("counts", power=1.0)
    TokenCounts(power=1.0, smoothing=0.5, floor=0.3)
    """
    return IMPORTANCES.value(name, **options)
