"""Layers over a coded table: they look rows up as ``nn.Embedding`` and ``nn.EmbeddingBag`` do, and hold no tensor."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.tables.table import CodedTable


class TableEmbedding(nn.Module):
    """``nn.Embedding`` over a coded table: ids (...) -> rows (..., d) float32. Nothing in it is trained.

    Choose it in a model whose table is larger than memory. Batches of a thousand ids and more take least time an id.

    Args:
        table: of ``kflats.open_table``.
        padding_idx: an id that stands for no token, as of ``nn.Embedding``, where gradients alone depend on it.

    Raises:
        KflatsError: a ``padding_idx`` that the table does not have.
    """

    def __init__(self, table: CodedTable, padding_idx: int | None = None) -> None:
        super().__init__()
        self.table = table
        self.num_embeddings, self.embedding_dim = table.shape
        whole = padding_idx is None or (isinstance(padding_idx, int) and not isinstance(padding_idx, bool))
        if not whole or (padding_idx is not None and not -len(table) <= padding_idx < len(table)):
            raise KflatsError(
                f"padding_idx={padding_idx!r} is not supported with a table of {len(table):,} rows",
                hint="the id of one of its rows",
            )
        self.padding_idx = padding_idx if padding_idx is None else padding_idx % len(table)

    def forward(self, input: Tensor) -> Tensor:
        """The rows of ids of any shape, on their device."""
        return self.table.rows(input)

    def extra_repr(self) -> str:
        """The table."""
        return repr(self.table)


class TableEmbeddingBag(TableEmbedding):
    """``nn.EmbeddingBag`` over a coded table; a row that is asked for several times is decoded once.

    Args:
        table: of ``kflats.open_table``.
        mode: "sum", "mean" or "max".
        include_last_offset: as of ``nn.EmbeddingBag``.
        padding_idx: an id that is left out of its bag.

    Raises:
        KflatsError: another mode, or a ``padding_idx`` that the table does not have.
    """

    def __init__(
        self,
        table: CodedTable,
        mode: Literal["sum", "mean", "max"] = "mean",
        *,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__(table, padding_idx)
        if mode not in ("sum", "mean", "max"):
            raise KflatsError(f"mode={mode!r} is not supported", hint='mode="sum", mode="mean" or mode="max"')
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """One vector a bag, (bags, d): ids (bags, m), or ids (m,) and where each bag begins."""
        ids, places = torch.unique(input, return_inverse=True)
        left_out = [] if self.padding_idx is None else (ids == self.padding_idx).nonzero().flatten().tolist()
        return F.embedding_bag(
            places,
            self.table.rows(ids),
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=left_out[0] if left_out else None,
        )
