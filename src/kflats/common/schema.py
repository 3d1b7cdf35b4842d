"""Frozen records from JSON: every field is checked before a record is built."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

from kflats.common.errors import KflatsError

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
"""What a JSON file holds."""
JsonObject: TypeAlias = dict[str, Json]

_LARGEST = sys.float_info.max  # comparing with it refuses NaN, infinities and integers no float can hold


def decode(kind: Any, data: object, where: str, *, signed: frozenset[str] = frozenset()) -> Any:
    """``data`` (parsed JSON) as the declared ``kind``: a frozen record, tuple, optional, number, string, or dict.

    A ``dict`` of records is an object with names of its own; any other ``dict`` is an object with a "type". ``object``
    takes what there is.

    Args:
        kind: a dataclass, or a type that a dataclass field may have.
        data: what ``json.loads`` gave.
        where: the name of this place in error messages.
        signed: places whose whole numbers may be negative; all others are counts.

    Raises:
        KflatsError: a missing or unknown field, a wrong type, a negative count, a number that is not finite.

    >>> decode(tuple[int, int], [3, 4], "shape")
    (3, 4)
    """
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _record(kind, data, where, signed)
    if kind is object:
        return data
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
    if origin is dict and dataclasses.is_dataclass(inner[1]):
        if not isinstance(data, dict):
            raise _wrong(where, "an object", data)
        return {name: decode(inner[1], value, f"{where}.{name:.80}", signed=signed) for name, value in data.items()}
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


def check_version(version: object, newest: int, what: str) -> None:
    """Refuse a version that is not one of 1 to ``newest``; ``what`` has it, for the message.

    >>> check_version(2, 1, "plans")
    Traceback (most recent call last):
        ...
    kflats.common.errors.KflatsError: plans of version 2 are not readable. Likely cause: this kflats reads version 1...
    """
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= newest:
        newer = isinstance(version, int) and version > newest
        raise KflatsError(
            f"{what} of version {str(version)[:20]} are not readable",
            cause=f"this kflats reads version {'1' if newest == 1 else f'1 to {newest}'}, and the file "
            + ("was written by a newer kflats" if newer else "is damaged or was edited by hand"),
            hint="pip install -U kflats" if newer else "restore the file",
        )


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
