"""The JSON that says which layers of a model are factored, and how, and what is read from it, checked.

    {"quant_method": "kflats", "format_version": 1, "dtype": "float32", "modules": {
        "embeddings.word_embeddings": {
            "matrix": {"kind": "flats", ...}, "dtype": "float32", "matrix_rows": "in_features", "untied": [],
            "places": [{"name": "embeddings.word_embeddings", "role": "embedding", "padding_idx": 0, "scale": null}]}}}

A coded matrix has a ``checksum`` of its integers, and a ``stream`` ({"version": 1, "bytes": ...}) where the file holds
them entropy coded. ``untied`` names places that the model's class would tie, but that have a table of their own. The
model computes in the type ``dtype``; a module's ``dtype`` is the type its factors are stored in. The first place of a
module owns the factors and gives the module its name. A transformers folder keeps this in ``config.json`` as
``quantization_config``; a plain torch folder keeps it in the header of ``model.safetensors``. ``describe`` writes it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, cast

import torch

from kflats.codecs.stream_reader import STREAM_VERSION
from kflats.codecs.streams import expand_, expect_
from kflats.common.errors import KflatsError
from kflats.matrices.conv import CONVOLVED
from kflats.matrices.registry import CodedMatrix, Matrix, matrix_from_spec

QUANT_METHOD = "kflats"
FORMAT_VERSION = 1

_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")  # a module path; never a file path
_ROLES = ("embedding", "head", "linear", "conv1d", "conv2d")
DAMAGED = "a damaged or hand-edited file"


def is_kflats_config(note: object) -> bool:
    """Whether the ``quantization_config`` of a model is the description of its factored layers."""
    return isinstance(note, dict) and note.get("quant_method") == QUANT_METHOD


@dataclass(frozen=True)
class DescribedPlace:
    """A place as written: its padding row and output scale where it is an embedding, ``kernel`` (inputs,
    height, width) where it is a convolution, and whether the layer had no bias before."""

    name: str
    role: str
    padding_idx: int | None
    scale: float | None
    kernel: tuple[int, ...] | None = None
    gained_bias: bool = False


@dataclass(frozen=True)
class Module:
    """One factored weight as written. ``empty`` is its matrix without memory (meta device), as the file stores it:
    with a stream of that many bytes in place of its integers, where ``stream`` says so."""

    name: str
    places: tuple[DescribedPlace, ...]
    untied: tuple[str, ...]
    empty: Matrix
    dtype: torch.dtype
    matrix_rows: str
    stream: int | None = None
    checksum: int | None = None

    def new(self, dtype: torch.dtype, device: torch.device | str = "meta") -> Matrix:
        """An empty matrix to load the file's tensors into; ``finish_`` must follow."""
        found = matrix_from_spec(self.empty.spec(), dtype=dtype, device=device)
        if self.stream is not None and isinstance(found, CodedMatrix):
            expect_(found, self.stream)
        return found

    def finish_(self, matrix: Matrix) -> None:
        """Make ``matrix``, filled with the file's tensors, ready for use.

        Raises:
            KflatsError: its integers are damaged.
        """
        if isinstance(matrix, CodedMatrix) and matrix.streamed:
            expand_(matrix)
        else:
            matrix.refresh()
        if self.checksum is not None and isinstance(matrix, CodedMatrix) and matrix.checksum() != self.checksum:
            raise KflatsError(
                f"the codes of {self.name!r} are damaged: their checksum differs",
                cause=DAMAGED,
                hint="restore the file or compress again",
            )

    @property
    def gained_bias(self) -> bool:
        """Whether the layer has a bias that the model's class does not give it."""
        return any(place.gained_bias for place in self.places)


@dataclass(frozen=True)
class Description:
    """All that a folder says about its factored layers, checked."""

    dtype: torch.dtype
    modules: tuple[Module, ...]


def read_description(data: object) -> Description:
    """A ``Description`` from parsed JSON; nothing is allocated and every size is checked.

    Raises:
        KflatsError: a newer version, missing or unknown fields, names that are no module paths,
            impossible sizes.
    """
    if not isinstance(data, dict) or data.get("quant_method") != QUANT_METHOD:
        raise KflatsError("this is not a description of kflats layers", cause=DAMAGED)
    version = data.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise KflatsError(
            f"kflats layers of format version {version!r} are unknown here (this kflats reads {FORMAT_VERSION})",
            cause="a file of a newer kflats",
            hint="pip install -U kflats",
        )
    top = _fields(data, {"quant_method", "format_version", "dtype", "modules"}, "the description")
    if not isinstance(top["modules"], dict):
        raise KflatsError("the list of factored modules is not an object", cause=DAMAGED)
    modules = tuple(_read_module(name, value) for name, value in top["modules"].items())
    names = [place.name for module in modules for place in module.places]
    if len(set(names)) != len(names):
        raise KflatsError("two factored modules claim the same place", cause=DAMAGED)
    return Description(_dtype(top["dtype"]), modules)


def _dtype(name: object) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise KflatsError(f"{name!r} is not a floating-point type", cause=DAMAGED)
    return found


def _fields(data: object, expected: set[str], where: str, optional: frozenset[str] = frozenset()) -> dict[str, Any]:
    if not isinstance(data, dict) or set(data) - optional != expected:
        there = sorted(map(str, data)) if isinstance(data, dict) else type(data).__name__
        raise KflatsError(f"{where} must have the fields {sorted(expected)}, not {there}", cause=DAMAGED)
    return data


def _read_module(name: object, data: object) -> Module:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise KflatsError(f"{str(name)[:80]!r} is not the path of a module", cause=DAMAGED)
    required = {"matrix", "dtype", "matrix_rows", "places", "untied"}
    fields = _fields(data, required, f"module {name!r}", frozenset({"stream", "checksum"}))
    if fields["matrix_rows"] not in ("in_features", "out_features"):
        raise KflatsError(f"module {name!r} has matrix_rows={fields['matrix_rows']!r}", cause=DAMAGED)
    if not isinstance(fields["places"], list) or not fields["places"]:
        raise KflatsError(f"module {name!r} names no places", cause=DAMAGED)
    if not isinstance(fields["matrix"], dict):
        raise KflatsError(f"module {name!r} has no matrix", cause=DAMAGED)
    dtype = _dtype(fields["dtype"])
    empty = matrix_from_spec(fields["matrix"], dtype=dtype)
    n, d = empty.shape
    if empty.num_values > 4 * n * d + 2**20:
        raise KflatsError(f"module {name!r} claims {empty.num_values} numbers for a {n} x {d} table", cause=DAMAGED)
    places = tuple(_read_place(place, n) for place in fields["places"])
    if places[0].name != name or len({place.name for place in places}) != len(places):
        raise KflatsError(f"module {name!r} does not own its own places", cause=DAMAGED)
    if fields["matrix_rows"] == "out_features" and any(place.role in ("embedding", "head") for place in places):
        raise KflatsError(f"module {name!r} is an embedding with outputs as rows", cause=DAMAGED)
    if any(p.kernel is not None for p in places) and empty.kind not in CONVOLVED:
        raise KflatsError(f"module {name!r} is a convolution with a matrix of kind {empty.kind!r}", cause=DAMAGED)
    untied = fields["untied"]
    if not isinstance(untied, list) or not all(isinstance(n, str) and _NAME.fullmatch(n) for n in untied):
        raise KflatsError(f"module {name!r} has an unreadable list of untied places", cause=DAMAGED)
    stream, checksum = _read_coded(name, fields, empty)
    return Module(name, places, tuple(untied), empty, dtype, fields["matrix_rows"], stream, checksum)


def _read_coded(name: str, fields: dict[str, Any], empty: Matrix) -> tuple[int | None, int | None]:
    """Stream bytes and checksum, checked; ``empty`` then expects the stream."""
    checksum, found = fields.get("checksum"), fields.get("stream")
    if not isinstance(empty, CodedMatrix):
        if checksum is not None or found is not None:
            raise KflatsError(f"module {name!r} has codes, but a matrix of kind {empty.kind!r}", cause=DAMAGED)
        return None, None
    if isinstance(checksum, bool) or not isinstance(checksum, int) or not 0 <= checksum < 2**32:
        raise KflatsError(f"module {name!r} has the checksum {str(checksum)[:40]}", cause=DAMAGED)
    if found is None:
        return None, checksum
    entry = _fields(found, {"version", "bytes"}, f"the stream of {name!r}")
    version, size = entry["version"], entry["bytes"]
    if version != STREAM_VERSION or isinstance(version, bool):
        raise KflatsError(
            f"codes of version {str(version)[:20]} are unknown here (this kflats reads {STREAM_VERSION})",
            cause="a file of a newer kflats",
            hint="pip install -U kflats",
        )
    # A block that does not shrink is stored as it is: a stream is never much longer than the codes and their layout.
    most = 2**20 + 2 * sum(t.numel() * t.element_size() for t in empty.tensors().values())
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= most:
        raise KflatsError(f"module {name!r} claims a stream of {str(size)[:40]} bytes", cause=DAMAGED)
    expect_(empty, size)
    return size, checksum


def _read_place(data: object, n: int) -> DescribedPlace:
    fields = _fields(data, {"name", "role", "padding_idx", "scale"}, "a place", frozenset({"kernel", "gained_bias"}))
    name, role, padding, scale = (fields[key] for key in ("name", "role", "padding_idx", "scale"))
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise KflatsError(f"{str(name)[:80]!r} is not the path of a module", cause=DAMAGED)
    if role not in _ROLES:
        raise KflatsError(f"place {name!r} has the unknown role {role!r}", cause="a file of a newer kflats")
    if padding is not None and (isinstance(padding, bool) or not isinstance(padding, int) or not 0 <= padding < n):
        raise KflatsError(f"place {name!r} has padding row {padding!r} of {n}", cause=DAMAGED)
    number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if scale is not None and not (number and math.isfinite(scale)):
        raise KflatsError(f"place {name!r} has scale {scale!r}", cause=DAMAGED)
    kernel = fields.get("kernel")
    if (kernel is None) == (role == "conv2d") or (kernel is not None and not _is_kernel(kernel)):
        raise KflatsError(f"place {name!r} has kernel {str(kernel)[:40]} and role {role!r}", cause=DAMAGED)
    gained = fields.get("gained_bias", False)
    if not isinstance(gained, bool) or (gained and role not in ("linear", "conv1d", "conv2d")):
        raise KflatsError(f"place {name!r} of role {role!r} has gained_bias={str(gained)[:40]}", cause=DAMAGED)
    return DescribedPlace(
        name, role, padding, None if scale is None else float(scale), None if kernel is None else tuple(kernel), gained
    )


def _is_kernel(value: object) -> bool:
    sizes = isinstance(value, list) and len(value) == 3
    return sizes and all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in cast(list[Any], value))
