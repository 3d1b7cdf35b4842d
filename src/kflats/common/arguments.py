"""Checks of the arguments from which values such as methods, importances and codecs are made."""

from __future__ import annotations

import math

from kflats.common.errors import KflatsError


def is_whole(value: object, low: int, high: float = math.inf) -> bool:
    """Whether ``value`` is a whole number from ``low`` to ``high``; True and False are not.

    >>> is_whole(3, 1), is_whole(3.0, 1), is_whole(True, 1), is_whole(9, 2, 8)
    (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: object, low: float, high: float = math.inf) -> bool:
    """Whether ``value`` is a finite number from ``low`` to ``high``; True and False are not.

    >>> is_number(0.5, 0, 1), is_number("0.5", 0, 1), is_number(float("nan"), 0)
    (True, False, False)
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and low <= value <= high


def check_value(value: object, protocol: type, axis: str, members: str, examples: str) -> None:
    """Refuse a value that is not of one axis of a recipe.

    Args:
        protocol: the class that all values of the axis inherit from. axis: "a method", for messages.
        members: what values of the axis have. examples: values of the axis.

    Raises:
        KflatsError: a class in place of a value, or another value.
    """
    if isinstance(value, type):
        cause, hint = f"{value.__name__} is a class", f"{value.__name__}()"
    elif isinstance(value, protocol):
        return
    else:
        cause, hint = f"{type(value).__name__} has no {members}", examples
    raise KflatsError(f"{value!r} is not {axis}", cause=cause, hint=hint, command="kflats compress --help")
