"""Frozen records from JSON: every field is checked before a record is built."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from kflats.common.errors import KflatsError

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
"""A value of a JSON file."""
JsonObject: TypeAlias = dict[str, Json]

_LARGEST = sys.float_info.max  # comparing with it refuses NaN, infinities and integers no float can hold
_LARGEST_FILE = 64 * 2**20
_NAMES: dict[object, str] = {int: "a whole number", float: "a finite number", str: "a string", bool: "true or false"}


def decode(
    kind: Any,
    data: Json,
    where: str,
    *,
    signed: frozenset[str] = frozenset(),
    kinds: Callable[[str], type] | None = None,
) -> Any:
    """``data`` (parsed JSON) as the declared ``kind``: a frozen record, tuple, optional, number, string, or dict.

    A ``dict`` of records is an object with names of its own; any other ``dict`` is an object with a "type". ``object``
    takes what there is. With ``kinds``, an object with a "type" is a record of the class with that name.

    Args:
        kind: a dataclass, or a type that a dataclass field may have.
        data: what ``json.loads`` gave.
        where: the name of this place in error messages.
        signed: places whose whole numbers may be negative; all others are counts.
        kinds: the class that a "type" names, where ``kind`` does not list its classes itself.

    Raises:
        KflatsError: a missing or unknown field, a wrong type, a negative count, a number that is not finite.

    >>> decode(tuple[int, int], [3, 4], "shape")
    (3, 4)
    """
    return _Decoder(signed, kinds).value(kind, data, where)


def read_json(path: str | os.PathLike[str], form: str, newest: int, what: str) -> JsonObject:
    """The JSON object of a file without its format and version, which are checked here.

    Args:
        path: of the file. form: the format that it must have. newest: the largest version that can be read.
        what: the noun for messages, such as "plan".

    Raises:
        KflatsError: no file, one that is not JSON, of another format, or of another version.
    """
    file, hint = Path(path), f"a {what} that kflats wrote"
    try:
        if file.stat().st_size > _LARGEST_FILE:
            raise KflatsError(f"the {what} {path} is {file.stat().st_size:,} bytes", cause="another file", hint=hint)
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise KflatsError(f"the {what} {path} cannot be read: {error.strerror}", hint=hint) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is no JSONDecodeError
        raise KflatsError(f"the {what} {path} is not JSON", cause="a damaged file", hint=hint) from error
    if not isinstance(data, dict) or data.get("format") != form:
        raise KflatsError(f"{path} is not a kflats {what}", hint=hint)
    check_version(data.get("version"), newest, f"{path}: {what}s")
    return {name: value for name, value in data.items() if name not in ("format", "version")}


def check_version(version: Json, newest: int, what: str) -> None:
    """Refuse a version that is not one of 1 to ``newest``; ``what`` has it, for the message.

    >>> check_version(2, 1, "plans")
    Traceback (most recent call last):
        ...
    kflats.common.errors.KflatsError: plans of version 2 are not readable. Likely cause: this kflats reads...
    """
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= newest:
        newer = isinstance(version, int) and version > newest
        raise KflatsError(
            f"{what} of version {str(version)[:20]} are not readable",
            cause=f"this kflats reads versions up to {newest}, and the file "
            + ("was written by a newer kflats" if newer else "is damaged or was edited by hand"),
            hint="pip install -U kflats" if newer else "restore the file",
        )


@dataclass(frozen=True)
class _Decoder:
    """The settings of ``decode``, which all fields inside share."""

    signed: frozenset[str]
    kinds: Callable[[str], type] | None

    def value(self, kind: Any, data: Json, where: str) -> Any:
        origin, inner = get_origin(kind), get_args(kind)
        if kind is object or (data is None and NoneType in inner):
            return data
        if origin in (Union, UnionType) and len(rest := [one for one in inner if one is not NoneType]) == 1:
            return self.value(rest[0], data, where)
        if origin is tuple:
            return self._tuple(inner, data, where)
        if origin is dict:
            return self._dict(inner[1], data, where)
        if origin is Literal:
            if any(data == one and type(data) is type(one) for one in inner):
                return data
            raise _wrong(where, f"one of {', '.join(map(repr, inner))}", data)
        if kind in _NAMES:
            return self._scalar(kind, data, where)
        if self.kinds is None or (dataclasses.is_dataclass(kind) and not (isinstance(data, dict) and "type" in data)):
            return self._record(kind, data, where)
        return self._named(inner or (kind,), data, where)

    def _tuple(self, inner: tuple[Any, ...], data: Json, where: str) -> tuple[Any, ...]:
        if not isinstance(data, list | tuple):
            raise _wrong(where, "a list", data)
        kinds = [inner[0]] * len(data) if inner[-1] is Ellipsis else list(inner)
        if len(kinds) != len(data):
            raise _wrong(where, f"a list of {len(kinds)}", data)
        return tuple(self.value(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, data, strict=True)))

    def _dict(self, kind: Any, data: Json, where: str) -> dict[str, Any]:
        records = dataclasses.is_dataclass(kind)
        if not isinstance(data, dict) or not (records or isinstance(data.get("type"), str)):
            raise _wrong(where, "an object" if records else 'an object with a "type"', data)
        return {k: self._record(kind, v, f"{where}.{k:.80}") for k, v in data.items()} if records else dict(data)

    def _scalar(self, kind: type, data: Json, where: str) -> object:
        if isinstance(data, bool) is (kind is bool):
            if kind is float and isinstance(data, int | float) and abs(data) <= _LARGEST:
                return float(data)
            if kind is int and isinstance(data, int) and data < 0 and where not in self.signed:
                raise _wrong(where, "a whole number >= 0", data)
            if kind is not float and isinstance(data, kind):
                return data
        raise _wrong(where, _NAMES[kind], data)

    def _record(self, kind: type, data: Json, where: str) -> Any:
        if not isinstance(data, dict):
            raise _wrong(where, "an object", data)
        fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
        if unknown := sorted(str(k) for k in set(data) - set(fields)):
            raise KflatsError(
                f"{where} has unknown fields {unknown[:5]}",
                cause="a file of another kflats, or edited by hand",
                hint=f"one of {', '.join(fields)}",
            )
        if missing := sorted(n for n, f in fields.items() if n not in data and f.default is dataclasses.MISSING):
            raise KflatsError(f"{where} lacks {missing[:5]}", cause="a damaged file, or one of another kflats")
        hints = _hints(kind)
        return kind(**{name: self.value(hints[name], value, f"{where}.{name}") for name, value in data.items()})

    def _named(self, members: tuple[Any, ...], data: Json, where: str) -> Any:
        """The record whose class ``data`` names by its "type"."""
        name = data.get("type") if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(name, str):
            raise _wrong(where, 'an object with a "type"', data)
        own = {one.__name__: one for one in members if isinstance(one, type) and dataclasses.is_dataclass(one)}
        kind = own.get(name) or (self.kinds(name) if self.kinds else None)
        fields = {key: value for key, value in data.items() if key != "type"}
        if kind is None or not isinstance(value := self._record(kind, fields, where), members):
            raise _wrong(where, f"one of {', '.join(sorted(own))}" if own else f"a {members[0].__name__}", data)
        return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _wrong(where: str, expected: str, data: Json) -> KflatsError:
    return KflatsError(f"{where} should be {expected}, found {str(data)[:60]!r}", cause="a damaged or hand-edited file")
