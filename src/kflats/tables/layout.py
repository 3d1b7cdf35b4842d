"""What a layout of coded rows does: a design on a sample of rows, their encoding, and the decoding of some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.coding.lanes import Ints
from kflats.tables.shards import Shard, ShardRecord, ShardWriter

NAMES = 2048
"""Room for the names and types of the tensors of a head."""


@dataclass(frozen=True)
class Coordinates:
    """Rows as they are coded.

    Args:
        values: (m, d), each row in the axes of its flat, times the root of the level of its weight.
        groups: (m,) flat x levels + level; None: all are of group 0.
        weights: (m,) of their squared errors; None: all are 1.
    """

    values: Tensor
    groups: Tensor | None = None
    weights: Tensor | None = None

    def part(self, rows: Tensor | slice) -> Coordinates:
        """Some of the rows."""
        some = (None if one is None else one[rows] for one in (self.groups, self.weights))
        return Coordinates(self.values[rows], *some)

    def split(self, size: int) -> Iterator[Coordinates]:
        """The rows in parts of ``size``."""
        for start in range(0, len(self.values), size):
            yield self.part(slice(start, start + size))


class RowCode(Protocol):
    """Codes of ``Coordinates`` of rows, and what decodes them."""

    @property
    def batch(self) -> int:
        """Rows that are decoded at once."""

    @property
    def flats(self) -> int:
        """How many sets of axes rows have."""

    def tensors(self) -> dict[str, Tensor]:
        """What the head of the table holds of this code."""

    def writer(self, file: ShardWriter) -> RowWriter:
        """Encodes rows into ``file``."""

    def check(self, shard: Shard, rows: int) -> None:
        """Refuse a file that does not hold ``rows`` rows of this code."""

    def decode(self, pieces: Sequence[tuple[Shard, Ints]], out: Tensor) -> None:
        """Write the rows of some files, by their numbers there, into ``out`` (m, d) float32, file after file."""


class RowWriter(Protocol):
    """Encodes the rows of one file."""

    def add(self, rows: Coordinates) -> float:
        """Encode rows; their weighted squared error."""

    def finish(self) -> ShardRecord:
        """Write what is left, and close the file."""


def distinct(values: Ints) -> tuple[Ints, Ints]:
    """The different ``values`` (m,), ascending, and which of them each is. (numpy's own imports 80 ms of modules.)

    >>> [part.tolist() for part in distinct(np.array([7, 3, 7]))]
    [[3, 7], [1, 0, 1]]
    """
    order = np.argsort(values, kind="stable")
    ascending = values[order]
    new = np.concatenate([[True], ascending[1:] != ascending[:-1]])
    place = np.empty_like(order)
    place[order] = np.cumsum(new) - 1
    return ascending[new], place


def tensor_of(tensors: dict[str, Tensor], name: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor of a head that is as it must be; -1 in ``shape`` is any length.

    Raises:
        KflatsError: it is missing, or of another type or shape.
    """
    tensor = tensors.get(name)
    if (
        tensor is None
        or tensor.dtype != dtype
        or tensor.ndim != len(shape)
        or any(want not in (-1, have) for want, have in zip(shape, tensor.shape, strict=True))
        or (tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()))
    ):
        raise KflatsError(f"the head of the table has no {name!r} as it must be", cause="a damaged file")
    return tensor
