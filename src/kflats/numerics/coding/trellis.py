"""Trellis-coded quantisation: the integers of a path take turns in four subsets, which fill space better than a grid.

The integers are parted by their remainder modulo 4. A path is a sequence of entries. Each entry has one free bit u, and
its subset follows from u and from the three free bits before it, u_1 the last of them:

    remainder = c_0 + 2 c_1,      c_0 = u_1 + u_2,      c_1 = u + u_1 + u_3      (modulo 2)

So an entry may take every second integer only, and costs a bit less. Which ones depends on the path, and the encoder
chooses the path that comes nearest (Viterbi, IEEE Trans. Inform. Theory 13, 1967). With steps half as large, the code
has the rate of a grid, and a squared error 1.06 dB below (Marcellin and Fischer, Trellis coded quantization, IEEE
Trans. Commun. 38, 1990): .254 bits above the Gaussian bound become .08. It is a convolutional code of Ungerboeck's kind
with eight states (IEEE Trans. Inform. Theory 28, 1982), written without feedback: all subsets follow from free bits at
once, by additions alone.

Paths run along anti-diagonals of a matrix, from the upper right to the lower left, within blocks of 384 x 384: with
error feedback on both sides, entries of an anti-diagonal do not depend on each other. A path begins in state 0. Rows
and columns of zeros are left out: paths run as if there were only the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kflats.numerics.coding.quantizers import TRADE, Quantizer
from kflats.numerics.coding.tables import FARTHEST, Tables
from kflats.numerics.large_matrices import room_like, rows_at, stripes

_ALL = slice(None)
PATH_BLOCK = 384
"""Rows and columns of a block, in which paths begin and end. Part of the format of files."""
PATH_TRADE = 4 * TRADE
"""Squared steps a bit is worth: steps are half of those of a grid. From 2 to 5 times measured equal at 2.5 bits; below,
4 and 5 are best."""
SHORTEST = 32
"""Paths of fewer entries gain little: the bits before their first are not free."""
_STATES, _MEMORY = 8, 3
_LISTED = 256
"""Magnitudes from here on cost as much as the last one listed."""
_UNIT, _DEAREST = 2.0**12, 2.0**5
"""Costs are whole numbers of a 4096th of a squared step, up to 32: 8 times those of 384 entries stay below 2^29."""
_STATE_BITS = _STATES - 1

Integers = npt.NDArray[np.int32]


def symbols_of(values: Tensor, shrink: Tensor) -> Tensor:
    """int16, of which these are the values in steps; ``shrink`` of each."""
    return (values.abs() + shrink).round_().mul_(values.sign()).to(torch.int16)


def subsets_of(free: Tensor) -> Tensor:
    """The remainder modulo 4 of every entry, (n, d) uint8, from the free bits (n, d) uint8 of all entries.

    >>> subsets_of(torch.tensor([[0, 1, 0], [0, 0, 0]], dtype=torch.uint8)).tolist()
    [[0, 2, 0], [3, 0, 0]]
    """
    subsets = room_like(free)
    for block in _blocks(*free.shape):
        u = free[block]
        one, two, three = (_before(u, by) for by in (1, 2, 3))
        subsets[block] = (one ^ two) + 2 * (u ^ one ^ three)
    return subsets


def free_bits(levels: Tensor) -> Tensor | None:
    """The free bits (n, d) uint8 of integers (n, d) that follow paths; None if they do not."""
    free = room_like(levels, torch.uint8)
    for block in _blocks(*levels.shape):
        remainders = (levels[block] & 3).to(torch.uint8).numpy()
        found = free[block].numpy()
        n, d = remainders.shape
        bits = np.zeros((n + _MEMORY, d + _MEMORY), dtype=np.uint8)  # zeros before each path's first
        for i in range(n):
            one, two, three = (bits[i + _MEMORY - by, by : by + d] for by in (1, 2, 3))
            if ((one ^ two) != remainders[i] & 1).any():
                return None
            bits[i + _MEMORY, :d] = (remainders[i] >> 1) ^ one ^ three
        found[:] = bits[_MEMORY:, :d]
    return free


def bits_in_subset(tables: Tables) -> Tensor:
    """(K, longest reach + 1) float64, bits of a symbol of each magnitude where its subset is known."""
    return tables.bits - _bits_of_subset(tables)


def pays(levels: Tensor, contexts: Tensor, tables: Tables) -> bool:
    """Whether integers take fewer bits as a free bit and a place in the subset than by ``tables`` alone.

    Args:
        levels, contexts: (n, d), integers and the distribution of each.
    """
    bits = _bits_of_subset(tables)
    parts = ((contexts[here].to(torch.int64), levels[here].to(torch.int64).abs()) for here in stripes(levels))
    return sum(float((bits[own, magnitudes] - 1).sum()) for own, magnitudes in parts) > 0


def _bits_of_subset(tables: Tables) -> Tensor:
    """(K, longest reach + 1) bits of the subset of each magnitude; that of -j is as likely as that of j."""
    likely = (-tables.bits).exp2()
    j = torch.arange(likely.shape[1])
    shares = torch.stack([likely[:, j % 4 == c].sum(1) for c in range(4)], dim=1)
    # Remainders of both signs: 0 and 2 are their own, 1 and 3 each other's.
    both = torch.stack([2 * shares[:, 0] - likely[:, 0], shares[:, 1] + shares[:, 3], 2 * shares[:, 2]], dim=1)
    bits: Tensor = -both.clamp_min(1e-30).log2()[:, torch.tensor([0, 1, 2, 1])[j % 4]]
    return bits


@dataclass(frozen=True)
class PathRounding:
    """How targets, in steps, become symbols along paths; the value of a symbol q is q - sign(q) shrink.

    Args:
        contexts: (n, d) int16, which of K distributions an entry follows.
        shrink: (K,) as ``Quantizer``.
        price: (K, J) what a symbol of each magnitude costs, in squared steps.
    """

    contexts: Tensor
    shrink: Tensor
    price: Tensor

    @classmethod
    def plain(cls, shape: tuple[int, ...]) -> PathRounding:
        """Without prices."""
        zero = torch.zeros(1, 1, dtype=torch.float32)
        return cls(torch.zeros(1, dtype=torch.int16).expand(shape), zero[0], zero)

    @classmethod
    def nearest(cls, quantizer: Quantizer, labels: Tensor) -> PathRounding:
        """The nearest path, with the values of ``quantizer``, which is as for ``priced``."""
        contexts = rows_at(labels, quantizer.contexts.to(torch.int16))
        return cls(contexts, quantizer.shrink, torch.zeros(len(quantizer.shrink), 1))

    @classmethod
    def priced(cls, quantizer: Quantizer, labels: Tensor) -> PathRounding:
        """The best path by squared steps and ``PATH_TRADE`` times the bits together.

        Args:
            quantizer: with contexts (C, d) and shrink of 0 or more. labels: (n,) the class of each row.
        """
        bits = bits_in_subset(quantizer.tables)
        reach = quantizer.tables.reach.to(torch.int64).clamp_max(_LISTED).unsqueeze(1)
        # What lies beyond a table's reach costs as much as its end: this table is not yet the one that codes it.
        listed = bits.gather(1, torch.minimum(torch.arange(_LISTED + 1), reach))
        contexts = rows_at(labels, quantizer.contexts.to(torch.int16))
        return cls(contexts, quantizer.shrink, PATH_TRADE * listed)

    def levels(self, targets: Tensor) -> Tensor:
        """(n, d) int16, the symbols of targets that are given."""
        values = room_like(targets, torch.float32)
        for block in _blocks(*targets.shape):
            given, contexts, made = targets[block].float(), self.contexts[block].to(torch.int64), values[block]
            n, d = given.shape
            for s in range(n + d - 1):
                rows = torch.arange(max(0, s - d + 1), min(n, s + 1))
                at = rows, s - rows
                path = self.along(given[at].unsqueeze(0).numpy(), contexts[at].unsqueeze(0).numpy())
                made[at] = torch.from_numpy(path[0])
        return self.symbols(values)

    def symbols(self, values: Tensor) -> Tensor:
        """(n, d) int16, of which these are the values."""
        shrinks, symbols = self.shrink.to(values.dtype), room_like(values, torch.int16)
        for here in stripes(values):
            symbols[here] = symbols_of(values[here], shrinks[self.contexts[here].long()])
        return symbols

    def values(self, levels: Tensor, rows: slice = _ALL) -> Tensor:
        """float64, the values in steps of the symbols of some ``rows``."""
        levels = levels[rows].to(torch.float64)
        return levels - levels.sign() * self.shrink.to(torch.float64)[self.contexts[rows].long()]

    def along(self, targets: npt.NDArray[np.float32], contexts: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """The values (K, L) of the symbols of the targets (K, L) of K paths, which are computed in float32."""
        below = np.floor(targets).clip(8 - FARTHEST, FARTHEST - 8).astype(np.int32)
        symbols = np.empty((2, 4, *below.shape), dtype=np.int32)  # the nearest of each subset on both sides
        np.subtract(below, (below - _REMAINDERS) & 3, out=symbols[0])
        np.add(symbols[0], 4, out=symbols[1])
        shrink, prices = self._lists
        last = self.price.shape[1]
        values = symbols.astype(np.float32)  # exact: symbols end at 2^14
        values -= np.sign(values) * shrink[contexts]
        costs = values - targets
        costs *= costs
        costs += prices.take(np.minimum(np.abs(symbols), last - 1) + contexts * last)
        lower = costs[1] < costs[0]
        best = np.where(lower, costs[1], costs[0])
        best -= best.min(0)
        subset = best_subsets((np.minimum(best, _DEAREST) * _UNIT).astype(np.int32))[None]
        nearest = np.where(lower, values[1], values[0])
        chosen: npt.NDArray[np.float32] = np.take_along_axis(nearest, subset, axis=0)[0]
        return chosen

    @cached_property
    def _lists(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        return self.shrink.to(torch.float32).numpy(), self.price.to(torch.float32).reshape(-1).numpy()


_MIDDLE = np.arange(_STATES, dtype=np.int32)[:, None, None, None]
_REMAINDERS = np.arange(4, dtype=np.int32)[:, None, None]


def best_subsets(costs: Integers) -> npt.NDArray[np.intp]:
    """The subsets (K, L) of the paths of least cost; ``costs`` (4, K, L), from 0 to 2^17, of each subset at each entry.

    Exact, by halves: the best way through a part of the path for each state at its start and end comes from those
    through its two halves. So L entries take log2(L) operations on arrays instead of L.

    >>> best_subsets(np.array([[[5, 5, 5]], [[0, 5, 5]], [[1, 0, 5]], [[9, 5, 0]]], dtype=np.int32)).tolist()
    [[0, 2, 3]]
    """
    _, paths, length = costs.shape
    parts = 1 << max(0, (-(-length // _MEMORY) - 1).bit_length())
    order = _halves(parts)
    padded = np.zeros((4, paths, _MEMORY * parts), dtype=np.int32)
    padded[..., :length] = costs
    # Entries of a part, subsets, parts in this order, paths.
    by_entry = padded.reshape(4, paths, parts, _MEMORY)[:, :, order].transpose(3, 0, 2, 1)
    ways = _ways()
    first, second, third = (by_entry[entry].take(ways[..., entry], axis=0) for entry in range(_MEMORY))
    least = (first + second + third) * _STATES
    chosen: list[Integers] = []
    while least.shape[2] > 1:
        half = least.shape[2] // 2
        # The state in the middle is in the last bits, so that one minimum finds both.
        keys = (least[:, :, None, :half] + (least[None, :, :, half:] + _MIDDLE)).min(1)
        chosen.append(keys & _STATE_BITS)
        least = keys & ~_STATE_BITS
    path = np.arange(paths)
    start = np.zeros((1, paths), dtype=np.intp)
    end = least[0, :, 0].argmin(0)[None]
    for states in reversed(chosen):
        between = states[start, end, np.arange(len(start))[:, None], path]
        start, end = np.concatenate([start, between]), np.concatenate([between, end])
    subsets = np.empty((paths, parts, _MEMORY), dtype=np.intp)
    subsets[:, order] = ways[start, end].swapaxes(0, 1)
    return subsets.reshape(paths, -1)[:, :length]


@cache
def _halves(parts: int) -> npt.NDArray[np.intp]:
    """Parts in an order in which neighbours are half of the array apart, again and again."""
    order = np.zeros(1, dtype=np.intp)
    while len(order) < parts:
        order = np.concatenate([2 * order, 2 * order + 1])
    return order


@cache
def _ways() -> npt.NDArray[np.intp]:
    """(8, 8, 3) the subsets of three entries, from one state to another; states are u_1 + 2 u_2 + 4 u_3."""
    ways = np.empty((_STATES, _STATES, _MEMORY), dtype=np.intp)
    for start in range(_STATES):
        for end in range(_STATES):
            one, two, three = start & 1, start >> 1 & 1, start >> 2
            for entry in range(_MEMORY):
                u = end >> (_MEMORY - 1 - entry) & 1
                ways[start, end, entry] = (one ^ two) + 2 * (u ^ one ^ three)
                one, two, three = u, one, two
    return ways


def _blocks(n: int, d: int) -> Iterator[tuple[slice, slice]]:
    for i in range(0, n, PATH_BLOCK):
        for j in range(0, d, PATH_BLOCK):
            yield slice(i, min(n, i + PATH_BLOCK)), slice(j, min(d, j + PATH_BLOCK))


def _before(u: Tensor, by: int) -> Tensor:
    """The bits that are ``by`` entries earlier on the path of each entry; 0 before its first."""
    out = torch.zeros_like(u)
    if by < min(u.shape):
        out[by:, :-by] = u[:-by, by:]
    return out
