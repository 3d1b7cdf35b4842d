"""Frozen records from JSON, strictly: what a file says is checked before anything is built from it."""

from __future__ import annotations

import dataclasses
import sys
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from kflats.common.errors import KflatsError

_LARGEST = sys.float_info.max  # comparing with it refuses NaN, infinities and integers no float can hold


def decode(kind: Any, data: object, where: str, *, signed: frozenset[str] = frozenset()) -> Any:
    """``data`` (parsed JSON) as the declared ``kind``: a frozen record, tuple, optional, number, string, or dict.

    Args:
        kind: a dataclass, or a type that a dataclass field may have.
        data: what ``json.loads`` gave.
        where: how error messages call this place.
        signed: places whose whole numbers may be negative; all others are counts.

    Raises:
        KflatsError: a missing or unknown field, a wrong type, a negative count, a number that is not finite.

    >>> decode(tuple[int, int], [3, 4], "shape")
    (3, 4)
    """
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _record(kind, data, where, signed)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if data is None else decode(inner[0], data, where, signed=signed)
    if origin is tuple:
        if not isinstance(data, list | tuple):
            raise _wrong(where, "a list", data)
        kinds = [inner[0]] * len(data) if inner[-1] is Ellipsis else list(inner)
        if len(kinds) != len(data):
            raise _wrong(where, f"a list of {len(kinds)}", data)
        return tuple(
            decode(k, v, f"{where}[{i}]", signed=signed) for i, (k, v) in enumerate(zip(kinds, data, strict=True))
        )
    if origin is dict:
        if not isinstance(data, dict) or not isinstance(data.get("type"), str):
            raise _wrong(where, 'an object with a "type"', data)
        return dict(data)
    if kind is float and isinstance(data, int | float) and not isinstance(data, bool) and abs(data) <= _LARGEST:
        return float(data)
    if kind is int and isinstance(data, int) and not isinstance(data, bool):
        if data >= 0 or where in signed:
            return data
        raise _wrong(where, "a whole number >= 0", data)
    if kind in (str, bool) and isinstance(data, kind):
        return data
    names = {int: "a whole number", float: "a finite number", str: "a string", bool: "true or false"}
    raise _wrong(where, names[kind], data)


def _record(kind: type, data: object, where: str, signed: frozenset[str]) -> Any:
    if not isinstance(data, dict):
        raise _wrong(where, "an object", data)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if unknown := sorted(str(k) for k in set(data) - set(fields)):
        raise KflatsError(
            f"{where} has unknown fields {unknown[:5]}", cause="a file of another kflats, or edited by hand"
        )
    missing = sorted(n for n, f in fields.items() if n not in data and f.default is dataclasses.MISSING)
    if missing:
        raise KflatsError(f"{where} lacks {missing[:5]}", cause="a damaged file, or one of another kflats")
    hints = get_type_hints(kind)
    return kind(**{name: decode(hints[name], value, f"{where}.{name}", signed=signed) for name, value in data.items()})


def _wrong(where: str, expected: str, data: object) -> KflatsError:
    return KflatsError(f"{where} should be {expected}, found {str(data)[:60]!r}", cause="a damaged or hand-edited file")
