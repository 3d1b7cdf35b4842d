"""Tables in each form of file that kflats reads; ``group``: rows of a piece of the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor


def as_npy(table: Tensor, path: Path) -> Path:
    np.save(path.with_suffix(".npy"), table.numpy())
    return path.with_suffix(".npy")


def as_safetensors(table: Tensor, path: Path) -> Path:
    save_file({"table": table.contiguous(), "ids": torch.arange(3)}, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def column(table: Tensor, kind: str) -> object:
    arrow = pytest.importorskip("pyarrow")
    flat = arrow.array(table.numpy().reshape(-1))
    if kind == "fixed":
        return arrow.FixedSizeListArray.from_arrays(flat, table.shape[1])
    offsets = np.arange(len(table) + 1, dtype=np.int32) * table.shape[1]
    return arrow.ListArray.from_arrays(arrow.array(offsets), flat)


def as_parquet(table: Tensor, path: Path, kind: str = "fixed", group: int = 7) -> Path:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    columns = {"id": np.arange(len(table)), "vector": column(table, kind)}
    parquet.write_table(arrow.table(columns), path.with_suffix(".parquet"), row_group_size=group)
    return path.with_suffix(".parquet")


def as_arrow(table: Tensor, path: Path, kind: str = "lists", group: int = 6) -> Path:
    arrow = pytest.importorskip("pyarrow")
    whole = arrow.table({"vector": column(table, kind)})
    with arrow.ipc.new_file(path.with_suffix(".arrow"), whole.schema) as file:
        file.write_table(whole, max_chunksize=group)
    return path.with_suffix(".arrow")


def as_stream(table: Tensor, path: Path) -> Path:
    """As ``datasets`` keeps a table: without an index at its end."""
    arrow = pytest.importorskip("pyarrow")
    whole = arrow.table({"vector": column(table, "fixed")})
    with arrow.ipc.new_stream(path.with_suffix(".arrow"), whole.schema) as file:
        file.write_table(whole, max_chunksize=6)
    return path.with_suffix(".arrow")


FORMS: dict[str, Callable[[Tensor, Path], Path]] = {
    "npy": as_npy,
    "safetensors": as_safetensors,
    "parquet": as_parquet,
    "parquet, lists": lambda table, path: as_parquet(table, path, "lists"),
    "arrow": as_arrow,
    "arrow, fixed": lambda table, path: as_arrow(table, path, "fixed"),
    "arrow, a stream": as_stream,
}
