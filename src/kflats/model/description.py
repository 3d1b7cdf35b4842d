"""The JSON that says which layers of a model are factored, and how; and its reader, which checks every field.

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

import re
from dataclasses import dataclass

import torch

from kflats.codecs.streams import STREAM_VERSION, expand_, expect_
from kflats.common.errors import KflatsError
from kflats.common.schema import check_version, decode
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
    """A place as written. An embedding has its padding row and output scale, a convolution its ``kernel`` (inputs,
    height, width). ``gained_bias``: whether the layer had no bias before."""

    name: str
    role: str
    padding_idx: int | None
    scale: float | None
    kernel: tuple[int, ...] | None = None
    gained_bias: bool = False


@dataclass(frozen=True)
class Module:
    """One factored weight as written. ``empty`` is its matrix without memory (meta device), with the tensors that the
    file stores. ``stream``: bytes of the stream in place of its integers, None without a stream."""

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
        matrix = matrix_from_spec(self.empty.spec(), dtype=dtype, device=device)
        if self.stream is not None and isinstance(matrix, CodedMatrix):
            expect_(matrix, self.stream)
        return matrix

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
                hint="restore the file, or compress again",
            )

    @property
    def gained_bias(self) -> bool:
        """Whether the layer has a bias that the model's class does not give it."""
        return any(place.gained_bias for place in self.places)


@dataclass(frozen=True)
class Description:
    """The factored layers of a folder, checked."""

    dtype: torch.dtype
    modules: tuple[Module, ...]


@dataclass(frozen=True)
class _Stream:
    version: int
    bytes: int


@dataclass(frozen=True)
class _WrittenModule:
    matrix: object
    dtype: str
    matrix_rows: str
    places: tuple[DescribedPlace, ...]
    untied: tuple[str, ...]
    checksum: int | None = None
    stream: _Stream | None = None


@dataclass(frozen=True)
class _WrittenDescription:
    quant_method: str
    format_version: int
    dtype: str
    modules: dict[str, _WrittenModule]


def read_description(data: object) -> Description:
    """A ``Description`` from parsed JSON; nothing is allocated and every size is checked.

    Raises:
        KflatsError: a newer version, missing or unknown fields, names that are no module paths,
            impossible sizes.
    """
    if not isinstance(data, dict) or data.get("quant_method") != QUANT_METHOD:
        raise KflatsError("this is not a description of kflats layers", cause=DAMAGED)
    check_version(data.get("format_version"), FORMAT_VERSION, "kflats layers")
    written: _WrittenDescription = decode(_WrittenDescription, data, "description")
    modules = tuple(_module(name, module) for name, module in written.modules.items())
    names = [place.name for module in modules for place in module.places]
    if len(set(names)) != len(names):
        raise KflatsError("two factored modules claim the same place", cause=DAMAGED)
    return Description(_dtype(written.dtype), modules)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise KflatsError(f"{name[:40]!r} is not a floating-point type", cause=DAMAGED)
    return dtype


def _module(name: str, written: _WrittenModule) -> Module:
    for path in (name, *written.untied, *(place.name for place in written.places)):
        if _NAME.fullmatch(path) is None:
            raise KflatsError(f"{path[:80]!r} is not the path of a module", cause=DAMAGED)
    dtype, rows, places = _dtype(written.dtype), written.matrix_rows, written.places
    empty = matrix_from_spec(written.matrix, dtype=dtype)
    n, d = empty.shape
    if empty.num_values > 4 * n * d + 2**20:
        problem = f"claims {empty.num_values} numbers for a {n} x {d} table"
    elif rows not in ("in_features", "out_features"):
        problem = f"has matrix_rows={rows[:40]!r}"
    elif not places or places[0].name != name:
        problem = "is not the first of its own places"
    elif rows == "out_features" and any(place.role in ("embedding", "head") for place in places):
        problem = "is an embedding whose matrix has outputs as rows"
    elif any(place.kernel is not None for place in places) and empty.kind not in CONVOLVED:
        problem = f"is a convolution with a matrix of kind {empty.kind!r}"
    elif (written.checksum is None) == isinstance(empty, CodedMatrix):
        problem = f"has the checksum {written.checksum} and a matrix of kind {empty.kind!r}"
    else:
        problem = next(filter(None, (_problem(place, n) for place in places)), "")
    if problem:
        raise KflatsError(f"the module {name!r} {problem}", cause=DAMAGED)
    size = None if written.stream is None else _expect_stream(name, written.stream, empty)
    return Module(name, places, written.untied, empty, dtype, rows, size, written.checksum)


def _expect_stream(name: str, stream: _Stream, empty: Matrix) -> int:
    """Make ``empty`` expect the stream.

    Returns:
        Bytes of the stream.
    """
    check_version(stream.version, STREAM_VERSION, "codes")
    # A block that does not shrink is stored as it is: a stream is never much longer than the codes and their layout.
    most = 2**20 + 2 * sum(t.numel() * t.element_size() for t in empty.tensors().values())
    if not isinstance(empty, CodedMatrix) or not 0 < stream.bytes <= most:
        raise KflatsError(
            f"the module {name!r} claims a stream of {stream.bytes} bytes for a matrix of kind {empty.kind!r}",
            cause=DAMAGED,
        )
    expect_(empty, stream.bytes)
    return stream.bytes


def _problem(place: DescribedPlace, n: int) -> str:
    """What a matrix of ``n`` rows makes impossible in a place; "" where nothing is."""
    kernel = place.kernel
    if place.role not in _ROLES:
        return f"has a place of the unknown role {place.role[:40]!r}"
    if place.padding_idx is not None and place.padding_idx >= n:
        return f"has padding row {place.padding_idx} of {n}"
    if (kernel is None) == (place.role == "conv2d") or (kernel is not None and (len(kernel) != 3 or 0 in kernel)):
        return f"has a place of role {place.role!r} with kernel {str(kernel)[:40]}"
    if place.gained_bias and place.role not in ("linear", "conv1d", "conv2d"):
        return f"has a place of role {place.role!r} with a gained bias"
    return ""
