"""The tensors of a CodedMatrix: taken in, checked against its geometry and by checksums, and where in them rows lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.common.hashing import crc32
from kflats.matrices.base import Matrix
from kflats.matrices.coded_geometry import CodedGeometry, contradiction
from kflats.matrices.decoding import Reading, reading_of
from kflats.matrices.flats import refresh_after_load
from kflats.matrices.lookup import inverse_of, is_recording
from kflats.numerics.coding.packing import places_of

CHECK = "check"
"""Name, beside the tensors of a coded matrix, of a checksum that files hold and models do not."""


class Codes(Matrix):
    """The tensors of a CodedMatrix and their layout; ``TiledCodes`` decodes them."""

    kind = "coded"

    def __init__(self, geometry: CodedGeometry, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.geometry = geometry
        self.ready = False  # nothing is known of the codes yet
        self.streamed = False  # ``codes`` are those of a file, see kflats.streams
        self.readings: list[Reading] = []  # of each class
        dtype = tensors["weight"].dtype
        for name, shape in geometry.shapes.items():
            found = tensors.get(name)
            wanted = geometry.dtype_of(name, dtype)
            if found is None or tuple(found.shape) != shape or found.dtype != wanted:
                there = "absent" if found is None else f"{found.dtype} of shape {tuple(found.shape)}"
                raise KflatsError(
                    f"{name!r} of a coded matrix is {there}, not {wanted} of shape {shape}", cause="a damaged file"
                )
            if wanted.is_floating_point:
                self.register_parameter(name, nn.Parameter(found))
            else:
                self.register_buffer(name, found)
        if unknown := sorted(tensors.keys() - geometry.shapes.keys()):
            raise KflatsError(f"a coded matrix has no {unknown[0]!r}", cause="a damaged file")
        empty = torch.empty(0, dtype=torch.int32, device=tensors["codes"].device)
        self.position: Tensor
        self.fields: Tensor
        self.register_buffer("position", empty, persistent=False)
        self.register_buffer("fields", empty, persistent=False)
        self.register_buffer(CHECK, None)  # the name is taken: a state has it
        self.register_load_state_dict_post_hook(refresh_after_load)  # type: ignore[no-untyped-call]
        self.refresh()

    @property
    def shape(self) -> tuple[int, int]:
        return self.geometry.shape

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name in self.geometry.shapes if (value := self._get(name)) is not None}

    def refresh(self) -> None:
        """Recompute where rows and columns lie; refuse labels and layouts that contradict the geometry."""
        if self.streamed or self.get_buffer("codes").is_meta:
            return
        geometry, codes, labels = self.geometry, self.get_buffer("codes"), self._get("labels")
        if problem := contradiction(geometry, self.tensors()):
            raise KflatsError(problem, cause="a damaged or mixed-up file", hint="restore the file or compress again")
        bits, low = self.get_buffer("bits").to(torch.int64), self.get_buffer("low")
        starts, shifts, masks = places_of(bits)
        self.fields = torch.stack([starts, shifts, masks, low.to(torch.int32)])
        lows, centers, kept = low.cpu(), self.get_buffer("centers").cpu(), shifts.cpu()
        self.readings = [
            reading_of(bits[c].cpu(), lows[c], centers[c], kept[c], geometry.levels, rank)
            for c, rank in enumerate(geometry.rank_of)
        ]
        n = geometry.shape[0]
        ordered = torch.arange(n, device=codes.device) if labels is None else torch.argsort(labels, stable=True)
        self.position = inverse_of(ordered).to(torch.int32)
        self.ready = True

    def checksum(self) -> int:
        """CRC-32 of all integers: they never change, in whatever type the rest is loaded or trained."""
        return _crc({name: value for name, value in self.tensors().items() if not value.is_floating_point()})

    def current_check(self) -> Tensor | None:
        """(1,) int64: ``floats_checksum`` of what the matrix holds now; None where there are no plain numbers to read,
        as on the meta device, in shards of several devices, or in a graph."""
        floats = {name: value for name, value in self.tensors().items() if value.is_floating_point()}
        plain = all(type(value) in (Tensor, nn.Parameter) and not value.is_meta for value in floats.values())
        if not self.ready or not plain or is_recording():
            return None
        return torch.tensor([floats_checksum(floats)], dtype=torch.int64)

    def spec(self) -> dict[str, Any]:
        return self.geometry.spec()

    def _get(self, name: str) -> Tensor | None:
        found = self._parameters.get(name)
        return self._buffers.get(name) if found is None else found

    def _check_filled(self) -> None:
        if not self.ready:
            raise KflatsError(
                "the matrix has no codes yet",
                cause="it was built empty and its tensors were set without load_state_dict",
                hint="call matrix.refresh() once they are filled",
            )


def floats_checksum(tensors: Mapping[str, Tensor]) -> int:
    """CRC-32 of the floating-point ones among the tensors of a coded matrix, by name: types and bytes.

    >>> half, single = ({"weight": torch.ones(2, dtype=t), "low": torch.zeros(1, dtype=torch.int16)}
    ...                 for t in (torch.float16, torch.float32))
    >>> floats_checksum(half) == floats_checksum({"weight": half["weight"]}) != floats_checksum(single)
    True
    """
    return _crc({f"{name} {value.dtype}": value for name, value in tensors.items() if value.is_floating_point()})


def _crc(tensors: Mapping[str, Tensor]) -> int:
    return crc32(part for item in sorted(tensors.items()) for part in item)
