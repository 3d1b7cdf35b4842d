"""Blocks of a stream: some rows of one class each, entropy coded by themselves, so that any can be read alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kflats.codecs.entropy import AGAIN, DAMAGED, Model, decode_symbols, encode_symbols
from kflats.common.errors import KflatsError
from kflats.matrices.coded_geometry import CodedGeometry
from kflats.numerics.coding.packing import Layout, pack, unpack

BLOCK = 2**18  # integers a block, about: what decoding needs memory for


def blocks_of(geometry: CodedGeometry) -> list[tuple[int, int, int]]:
    """(class, and the rows a..b of it)."""
    most = max(1, BLOCK // max(1, geometry.rank))
    return [
        (c, a, min(a + most, rows))
        for c, (rows, row_bytes) in enumerate(geometry.classes)
        for a in range(0, rows if row_bytes else 0, most)
    ]


def block_in(codes: Tensor, geometry: CodedGeometry, c: int, a: int, b: int) -> Tensor:
    """The packed rows a..b of class c, (b - a, bytes a row), in the codes of all."""
    first = sum(rows * row_bytes for rows, row_bytes in geometry.classes[:c])
    row_bytes = geometry.classes[c][1]
    return codes[first + a * row_bytes : first + b * row_bytes].view(b - a, row_bytes)


def groups_of(layout: Layout, contexts: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """Columns that have bits, those of one context together, and (context, how many) in that order."""
    columns = layout.bits.nonzero().squeeze(1)
    order = columns[torch.argsort(contexts[columns], stable=True)]
    used, counts = torch.unique_consecutive(contexts[order], return_counts=True)
    return order, list(zip(used.tolist(), counts.tolist(), strict=True))


def encode_block(packed: Tensor, layout: Layout, contexts: Tensor, models: list[Model]) -> bytes:
    """Packed rows of one class, entropy coded."""
    order, groups = groups_of(layout, contexts)
    levels = unpack(packed, layout).T[order].to(torch.int32).numpy()
    sizes = [count for _, count in groups]
    parts = np.split(levels, np.cumsum(sizes)[:-1])
    return encode_symbols(parts, [models[k] for k, _ in groups])


def decode_block(data: memoryview, rows: int, layout: Layout, contexts: Tensor, models: list[Model]) -> Tensor:
    """The packed rows that ``encode_block`` wrote.

    Raises:
        KflatsError: data that decode to integers outside their columns' ranges, or to none.
    """
    order, groups = groups_of(layout, contexts)
    chosen = [models[k] for k, _ in groups]
    parts = decode_symbols(data, [count * rows for _, count in groups], chosen)
    levels = layout.low.to(torch.int32).unsqueeze(1).repeat(1, rows)
    levels[order] = torch.from_numpy(np.concatenate(parts)).view(len(order), rows)
    try:
        return pack(levels.T, layout)
    except KflatsError as error:
        raise KflatsError(f"the codes are damaged: {error.symptom}", cause=DAMAGED, hint=AGAIN) from error
