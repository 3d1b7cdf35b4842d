"""What a weight file of a given size leaves for the weight that is fitted last."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kflats.common.release import version
from kflats.compress.result import CompressedWeight
from kflats.io.headers import CHECKSUMS, DIGITS, VERSION_KEY
from kflats.matrices.registry import CodedMatrix
from kflats.model.weights import factored_layers
from kflats.recipe.plan import Decision

_CODES = ("codes", "weight", "shrink", "basis_scale")
_METADATA = {"format": "pt", VERSION_KEY: version()}


@dataclass(frozen=True)
class _Entry:
    """A tensor in a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def room_in_file(model: nn.Module, done: Mapping[str, CompressedWeight], last: Decision, limit: int) -> int | None:
    """Bytes for the codes of ``last`` in one safetensors file of at most ``limit`` bytes, all else in it.

    Args:
        model: before any swap.
        done: every other named weight, fitted or left dense, by name.
        last: a weight that becomes a transform code.
        limit: of the file, header and all.

    Returns:
        At most so many that the file fits, and short of them by a few bytes a tensor. None for a model that has
        factored layers already: what a file makes of those is not known here.
    """
    if any(True for _ in factored_layers(model)):
        return None
    swapped = [last.weight, *(one.decision.weight for one in done.values() if one.matrix is not None)]
    gone = {f"{place.name}.weight" for weight in swapped for place in weight.places}
    entries = [*_left(model, gone), *(entry for one in done.values() for entry in _of(one))]
    beside = 8 + sum(entry.nbytes for entry in entries)
    if beside >= limit:
        return None
    # Offsets have most digits where these codes take all there is.
    name, size = last.weight.name, limit - beside
    entries += [_Entry(f"{name}.{key}", "BF16", (size,), size if key == "codes" else 0) for key in _CODES]
    if not last.weight.bias and last.weight.places[0].role != "embedding":
        entries.append(_Entry(f"{name}.bias", "BF16", (last.weight.shape[1],), 0))
    room = size - _header_bytes(entries)
    return room if room > 0 else None


def _left(model: nn.Module, gone: set[str]) -> Iterator[_Entry]:
    """What stays as it is; of several names of one tensor the longest."""
    names: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in gone and len(name) >= len(names.get(id(tensor), ("",))[0]):
            names[id(tensor)] = name, tensor
    return (_entry(name, tensor) for name, tensor in names.values())


def _of(one: CompressedWeight) -> Iterator[_Entry]:
    weight, matrix = one.decision.weight, one.matrix
    if matrix is None:
        return
    left, tensors = one.report.bytes_after, matrix.tensors()
    if one.bias_shift is not None and not weight.bias:
        gained = len(one.bias_shift) * weight.nbytes // (weight.shape[0] * weight.shape[1])
        yield _Entry(f"{weight.name}.bias", "BF16", (len(one.bias_shift),), gained)
        left -= gained
    if isinstance(matrix, CodedMatrix):
        tensors = {name: value for name, value in tensors.items() if value.is_floating_point()}
        stream = left - sum(value.numel() * value.element_size() for value in tensors.values())
        yield _Entry(f"{weight.name}.codes", "U8", (stream,), stream)
    for key, value in tensors.items():
        yield _entry(f"{weight.name}.{key}", value)


def _entry(name: str, tensor: Tensor) -> _Entry:
    kind = _KINDS.get(tensor.dtype, str(tensor.dtype))
    return _Entry(name, kind, tuple(tensor.shape), tensor.numel() * tensor.element_size())


_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8", torch.int64: "I64"}


def _header_bytes(entries: Iterable[_Entry]) -> int:
    """Of a header with these tensors, whatever their order; padded."""
    entries = list(entries)
    most = sum(entry.nbytes for entry in entries)
    header: dict[str, object] = {"__metadata__": {**_METADATA, CHECKSUMS: "0" * DIGITS * len(entries)}}
    for entry in entries:
        span = [most - entry.nbytes, most]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": span}
    return -(-len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()) // 8) * 8
