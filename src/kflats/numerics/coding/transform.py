"""A matrix as integers: coordinates in a shared basis, rows in classes, and the distributions to code them by.

    row i of class c  ~  t_c ( m_c + q_i - sign(q_i) s_c ) B          q_i (r,) integers, the only numbers per row

with t_c the step of the class (proportional to 1 / sqrt(weight)), m_c its whole-numbered centre, s_c how far the mean
of an interval lies from its middle, and B an integer basis times one scale a row. How the integers are found is
``encode``'s matter; how they become bytes, ``packing``'s (fixed rate) or an entropy coder's, by ``tables``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.coding.packing import Layout, layout_of
from kflats.numerics.coding.tables import Tables, table_for


@dataclass(frozen=True)
class TransformCode:
    """Everything a decoder needs; plain integers and a few float32 numbers.

    Args:
        labels: (n,) uint8, the class c of each row.
        levels: for each class, (n_c, r) int16: the symbols q of its rows, in the order of their row numbers.
        steps: (C,) float32, t_c.
        centers: (C, r) int16, m_c.
        contexts: (C, r) uint8, which of ``tables`` the symbols of a class's column follow.
        tables: the distributions of q.
        shrink: (K,) float32 in [0, 1/2), s for the symbols of each table.
        basis: (r, d) int8 and ``basis_scale`` (r,) float32: B = basis * basis_scale[:, None].
        basis_contexts: (r,) uint8, which of ``basis_tables`` each basis row follows.
        basis_tables: the distributions of ``basis``.
    """

    labels: Tensor
    levels: tuple[Tensor, ...]
    steps: Tensor
    centers: Tensor
    contexts: Tensor
    tables: Tables
    shrink: Tensor
    basis: Tensor
    basis_scale: Tensor
    basis_contexts: Tensor
    basis_tables: Tables

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d)."""
        return len(self.labels), self.basis.shape[1]

    @property
    def rank(self) -> int:
        """r, the number of coordinates."""
        return self.basis.shape[0]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The smallest fixed-rate layout of each class."""
        return tuple(layout_of(levels) for levels in self.levels)

    @property
    def entropy_bits(self) -> float:
        """Ideal length of what an entropy coder writes: symbols, basis and labels by their distributions."""
        price, basis_price = self.tables.bits, self.basis_tables.bits
        total = 0.0
        for c, levels in enumerate(self.levels):
            total += _price(levels, price[self.contexts[c].to(torch.int64)])
        total += _price(self.basis.T, basis_price[self.basis_contexts.to(torch.int64)])
        return total + label_bits(torch.bincount(self.labels.to(torch.int64)))

    @property
    def side_bytes(self) -> int:
        """What lies beside the entropy-coded symbols: distributions, steps, scales; centres and contexts, coded too."""
        return side_bytes(self.centers, self.contexts, self.tables, self.basis_tables)

    @property
    def stored_bytes(self) -> int:
        """``entropy_bits`` and ``side_bytes`` together; containers, checksums and the ends of blocks come on top."""
        return math.ceil(self.entropy_bits / 8) + self.side_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the fixed-rate form: packed rows, one byte of label a row, int8 basis, and what lies beside it."""
        packed = sum(len(q) * layout.row_bytes for q, layout in zip(self.levels, self.layouts, strict=True))
        return packed + len(self.labels) + self.basis.numel() + self.side_bytes

    def members(self, c: int) -> Tensor:
        """(n_c,) int64, the rows of class ``c``, ascending: row i of ``levels[c]`` is row members(c)[i]."""
        return (self.labels == c).nonzero().squeeze(1)

    def float_basis(self) -> Tensor:
        """B (r, d) float32."""
        return self.basis.to(torch.float32) * self.basis_scale.unsqueeze(1)

    def coordinates(self, c: int, levels: Tensor) -> Tensor:
        """t (m + q - sign(q) s) for symbols q (m, r) of class ``c``, float32."""
        return dequantize(levels, self.steps[c], self.centers[c], self.shrink[self.contexts[c].to(torch.int64)])

    def rows(self, index: Tensor) -> Tensor:
        """The rows at ``index`` (m,), decoded, (m, d) float32.

        Raises:
            KflatsError: an index out of range.
        """
        index = index.to(torch.int64)
        if len(index) and not (int(index.min()) >= 0 and int(index.max()) < len(self.labels)):
            raise KflatsError(
                f"rows {int(index.min())} .. {int(index.max())} of a table of {len(self.labels)}",
                hint="a range inside the table",
            )
        labels = self.labels[index].to(torch.int64)
        found = torch.empty(len(index), self.shape[1])
        basis = self.float_basis()
        places = self.places()
        for c in labels.unique().tolist():
            here = (labels == c).nonzero().squeeze(1)
            found[here] = self.coordinates(c, self.levels[c][places[index[here]]]) @ basis
        return found

    def places(self) -> Tensor:
        """(n,) int64, where in its class each row lies."""
        places = torch.empty(len(self.labels), dtype=torch.int64)
        for c in range(len(self.steps)):
            members = self.members(c)
            places[members] = torch.arange(len(members))
        return places

    def dense(self) -> Tensor:
        """The whole matrix, decoded, (n, d) float32."""
        return self.rows(torch.arange(len(self.labels)))


def dequantize(levels: Tensor, step: Tensor, center: Tensor, shrink: Tensor) -> Tensor:
    """step (center + q - sign(q) shrink) in float32, for q (m, r), center (r,), shrink (r,)."""
    q = levels.to(torch.float32)
    return (q - q.sign() * shrink + center.to(torch.float32)) * step


def _price(levels: Tensor, bits: Tensor) -> float:
    """Bits of all symbols (m, r), column j by the prices bits[j] (m + 1,) of its magnitudes."""
    if not levels.numel():
        return 0.0
    return float(bits.T.gather(0, levels.to(torch.int64).abs()).sum())


def label_bits(sizes: Tensor) -> float:
    """Ideal bits of all labels of classes of these sizes (C,)."""
    sizes = sizes[sizes > 0].to(torch.float64)
    return -float((sizes * (sizes / sizes.sum()).log2()).sum())


def context_moves(contexts: Tensor) -> Tensor:
    """(C, r) int16: contexts as they are stored, each less the one before it in its row; ``cumsum(1)`` undoes it.

    >>> context_moves(torch.tensor([[5, 5, 4, 0]], dtype=torch.uint8)).tolist()
    [[5, 0, -1, -4]]
    """
    whole = contexts.to(torch.int16)
    return torch.cat([whole[:, :1], whole.diff(dim=1)], dim=1)


def side_bytes(centers: Tensor, contexts: Tensor, tables: Tables, basis_tables: Tables) -> int:
    """Bytes beside labels and symbols: centres (C, r) and context moves coded by a table each, the rest as it is."""
    moves = context_moves(contexts)
    coded, stored = 0.0, tables.stored_bytes + basis_tables.stored_bytes
    for symbols in (centers.to(torch.int16), moves):
        table = table_for(symbols)
        coded += _price(symbols.reshape(-1, 1), table.bits)
        stored += table.stored_bytes
    c, r = contexts.shape
    return stored + math.ceil(coded / 8) + 8 * c + 4 * len(tables) + 5 * r
