"""Integers as bytes: entropy coding by the ``constriction`` library, and the parts of a stream's head.

The coder is asymmetric numeral systems (Duda, arXiv:1311.2540). Its models are whole numbers, which all machines read
alike (``numerics.coding.tables``). A checksum of the coded integers shows damage, and a coder that differs.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kflats.common.errors import KflatsError
from kflats.common.hashing import crc32
from kflats.numerics.coding.tables import Tables, knots_up_to, table_for

AGAIN = "restore the file or compress again"
Integers = npt.NDArray[np.int32]


def damaged(symptom: str) -> KflatsError:
    """The error for a stream that is not as it was written."""
    return KflatsError(f"the codes are damaged: {symptom}", cause="a damaged or truncated file", hint=AGAIN)


@dataclass(frozen=True)
class Model:
    """A distribution of integers from ``first`` on; ``coder`` is the library's, None for a single integer."""

    first: int
    coder: Any


def model_of(first: int, frequencies: Tensor) -> Model:
    """The model of these whole-number frequencies; 0 counts as the least frequency that can be coded."""
    if len(frequencies) < 2:
        return Model(first, None)
    # Sums of whole numbers below 2^53 are exact in any order.
    return Model(first, _library().model.Categorical(frequencies.to(torch.float64).numpy(), perfect=False))


def models_of(tables: Tables) -> list[Model]:
    """The models of all tables."""
    return [model_of(-reach, tables.frequencies(k)) for k, reach in enumerate(tables.reach.tolist())]


def encode_symbols(parts: Sequence[Integers], models: Sequence[Model]) -> bytes:
    """Integers, part after part, each by its own model.

    Raises:
        KflatsError: ``constriction`` is not installed.
    """
    coder = _library().stack.AnsCoder()
    for part, model in zip(reversed(parts), reversed(models), strict=True):  # the coder is a stack
        if model.coder is not None:
            coder.encode_reverse(np.ascontiguousarray(part.reshape(-1) - model.first, dtype=np.int32), model.coder)
    data: bytes = coder.get_compressed().astype("<u4").tobytes()
    return data


def decode_symbols(data: memoryview, counts: Sequence[int], models: Sequence[Model]) -> list[Integers]:
    """The integers that ``encode_symbols`` wrote; damaged ``data`` gives other integers, or an error.

    Raises:
        KflatsError: ``constriction`` is not installed, or no coder wrote ``data``.
    """
    if len(data) % 4:
        raise damaged("they end inside a word")
    try:
        coder = _library().stack.AnsCoder(np.frombuffer(data, dtype="<u4").astype(np.uint32))
        return [
            np.full(count, model.first, dtype=np.int32)
            if model.coder is None or not count
            else coder.decode(model.coder, count) + np.int32(model.first)
            for count, model in zip(counts, models, strict=True)
        ]
    except (ValueError, AssertionError) as error:
        raise damaged(str(error)[:80]) from error


class Writer:
    """The head of a stream, part after part."""

    def __init__(self) -> None:
        self.data = bytearray()

    def put(self, form: str, *values: int) -> None:
        """Whole numbers, in ``struct``'s form."""
        self.data += struct.pack(form, *values)

    def symbols(self, parts: Sequence[Integers], models: Sequence[Model]) -> None:
        """Integers, each part by its own model."""
        coded = encode_symbols(parts, models)
        self.put("<II", len(coded), _checksum(parts))
        self.data += coded

    def tables(self, tables: Tables) -> None:
        """Distributions."""
        self.put("<H", len(tables))
        for reach, costs in zip(tables.reach.tolist(), tables.costs, strict=True):
            self.put("<H", reach)
            self.data += costs[: knots_up_to(reach)].numpy().tobytes()

    def array(self, values: Tensor) -> None:
        """Integers of any shape, by a distribution of their own."""
        table = table_for(values)
        self.tables(table)
        self.symbols([values.to(torch.int32).numpy()], models_of(table))


class Reader:
    """Reads the head that a ``Writer`` wrote, and never beyond its end.

    Raises (all methods):
        KflatsError: the data ends too early, or a checksum differs.
    """

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return len(self.data) - self.at

    def take(self, size: int) -> memoryview:
        """The next ``size`` bytes."""
        if size > self.left:
            raise damaged(f"they end {size - self.left} bytes too early")
        self.at += size
        return self.data[self.at - size : self.at]

    def get(self, form: str) -> tuple[int, ...]:
        """Whole numbers, in ``struct``'s form."""
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def symbols(self, counts: Sequence[int], models: Sequence[Model]) -> list[Integers]:
        """Integers, each part by its own model."""
        size, checksum = self.get("<II")
        parts = decode_symbols(self.take(size), counts, models)
        if _checksum(parts) != checksum:
            raise damaged("a checksum differs")
        return parts

    def tables(self) -> Tables:
        """Distributions."""
        (count,) = self.get("<H")
        rows, reaches = [], []
        for _ in range(count):
            (reach,) = self.get("<H")
            reaches.append(reach)
            rows.append(torch.frombuffer(bytearray(self.take(knots_up_to(reach))), dtype=torch.uint8))
        costs = pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 1, dtype=torch.uint8)
        return Tables(torch.tensor(reaches, dtype=torch.int16), costs)

    def array(self, shape: Sequence[int]) -> Tensor:
        """Integers of this shape, int32."""
        models, count = models_of(self.tables()), int(np.prod(shape, dtype=np.int64))
        (integers,) = self.symbols([count], models)
        return torch.from_numpy(integers).view(*shape)


def _checksum(parts: Sequence[Integers]) -> int:
    return crc32(np.ascontiguousarray(part, dtype="<i4").reshape(-1).data for part in parts)


def _library() -> Any:
    try:
        from constriction import stream
    except ImportError as error:
        raise KflatsError(
            "entropy-coded files need the constriction library", hint="pip install 'kflats[codes]'"
        ) from error
    return stream
