"""A matrix as integers: coordinates in a shared basis, rows in classes, and the distributions to code them by.

    row i of class c  ~  t_c ( m_c + q_i - sign(q_i) s_c ) B          q_i (r,) integers, the only numbers per row

with t_c the step of the class (proportional to 1 / sqrt(weight)), m_c its whole-numbered centre, s_c how far the mean
of an interval lies from its middle, and B an integer basis times one scale a row. ``encode`` finds the integers.
``packing`` makes bytes of them at a fixed rate, an entropy coder by ``tables``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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
    def rank(self) -> int:
        """r, the number of coordinates."""
        return self.basis.shape[0]

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
        """Bytes beside the entropy-coded symbols: distributions, steps, scales; centres and contexts, coded too."""
        return side_bytes(self.centers, self.contexts, self.tables, self.basis_tables)

    @property
    def stored_bytes(self) -> int:
        """``entropy_bits`` and ``side_bytes`` together; containers, checksums and the ends of blocks come on top."""
        return math.ceil(self.entropy_bits / 8) + self.side_bytes


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
