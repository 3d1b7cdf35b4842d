"""Distributions of integers an encoder and a decoder agree on bit for bit: costs in sixteenths of a bit, one byte each.

A table knows what a symbol of magnitude j = |symbol| costs, c_j; a symbol +-j then has the integer frequency
2^(24 - c_j / 16), by a fixed list of sixteen constants and a shift. No floating-point function is involved, so that
every machine finds the same frequencies. Sixteenths are fine enough: the rounding costs some .0002 bits a symbol.

Costs are kept at knots, every magnitude up to 16 and eight an octave beyond, with straight lines between them, in whole
numbers: a distribution over thousands of levels takes a hundred bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.large_matrices import stripes

FARTHEST = 16383
"""The largest magnitude of a symbol."""

KNOTS = (*range(16), *(2**octave + 2**octave * part // 8 for octave in range(4, 14) for part in range(8)), FARTHEST)
"""The magnitudes whose costs are stored."""

MOST = 254
"""The largest cost: just under 16 bits."""

_SIXTEENTHS = (
    16777216, 16065917, 15384775, 14732511, 14107901, 13509772, 12937002, 12388516,
    11863283, 11360319, 10878679, 10417458, 9975792, 9552851, 9147842, 8760003,
)  # fmt: skip
"""2^(24 - k / 16), rounded."""


_NEVER = MOST + 1
_FREQUENCIES = np.array([*(_SIXTEENTHS[cost % 16] >> (cost // 16) for cost in range(MOST + 1)), 0], dtype=np.int64)
"""Of a symbol, by its cost; the last is that of symbols beyond reach."""


@dataclass(frozen=True)
class Tables:
    """K symmetric distributions; table k is over the symbols -reach[k] .. reach[k].

    Args:
        reach: (K,) int16, the largest magnitude of each.
        costs: (K, at most 97) uint8 at the leading ``KNOTS``, as many as the longest table needs; what lies beyond
            the first knot >= reach[k] is ignored.

    >>> tables = Tables(torch.tensor([1, 0], dtype=torch.int16), torch.tensor([[0, 16], [0, 0]], dtype=torch.uint8))
    >>> tables.frequencies(0).tolist(), tables.frequencies(1).tolist()
    ([8388608, 16777216, 8388608], [16777216])
    """

    reach: Tensor
    costs: Tensor

    def __post_init__(self) -> None:
        shapes = self.costs.ndim == 2 and self.reach.shape == self.costs.shape[:1]
        if not shapes or self.costs.dtype != torch.uint8 or self.reach.dtype != torch.int16:
            raise KflatsError("a damaged distribution of symbols", cause="a damaged file")
        if not len(self.reach):
            return
        least, most = int(self.reach.min()), int(self.reach.max())
        if least < 0 or most > FARTHEST or self.costs.shape[1] < knots_up_to(most) or int(self.costs.max()) > MOST:
            raise KflatsError("a distribution of symbols with impossible numbers", cause="a damaged file")

    def __len__(self) -> int:
        return len(self.reach)

    @cached_property
    def magnitudes(self) -> Tensor:
        """(K, longest reach + 1) int64, the frequency of one symbol of each magnitude (of +j alone); 0 beyond reach."""
        return torch.from_numpy(_FREQUENCIES[self._all_costs])

    def frequencies(self, table: int) -> Tensor:
        """(2 reach + 1,) int64, the frequencies of symbols -reach .. reach of one table; none is 0."""
        half = torch.from_numpy(_FREQUENCIES[_interpolated(self.costs[table], int(self.reach[table]) + 1)])
        return torch.cat([half.flip(0), half[1:]])

    @cached_property
    def _all_costs(self) -> npt.NDArray[np.uint8]:
        """(K, longest reach + 1) the cost of each magnitude, ``_NEVER`` beyond reach."""
        width = int(self.reach.max()) + 1 if len(self) else 1
        costs = _interpolated(self.costs, width)
        costs[np.arange(width) > self.reach.cpu().numpy()[:, None]] = _NEVER
        return costs

    @cached_property
    def bits(self) -> Tensor:
        """(K, longest reach + 1) float64, bits of one symbol of each magnitude; infinite beyond reach."""
        frequencies = self.magnitudes.to(torch.float64)
        total = 2 * frequencies.sum(1, keepdim=True) - frequencies[:, :1]
        # There are thousands of magnitudes where steps are fine, and 256 costs.
        of_costs = -(torch.from_numpy(_FREQUENCIES).to(torch.float64) / total).log2()
        return of_costs.gather(1, torch.from_numpy(self._all_costs).to(torch.int64))

    @property
    def stored_bytes(self) -> int:
        """One byte a knot, and two for the reach."""
        return sum(knots_up_to(reach) + 2 for reach in self.reach.tolist())


def _interpolated(costs: Tensor, width: int) -> npt.NDArray[np.uint8]:
    """(..., knots) -> (..., width), the cost of each magnitude."""
    # Some thousand short tables are read when a model is loaded: an operation of numpy takes a fifth of one of torch.
    left, right, before, behind = (part[:width] for part in _between_knots())
    wide: npt.NDArray[np.int32] = costs.cpu().numpy().astype(np.int32)
    cost: npt.NDArray[np.int32] = (wide[..., left] * before + wide[..., right] * behind) // (before + behind)
    return cost.astype(np.uint8)


def knots_up_to(reach: int) -> int:
    """How many leading knots a table of this reach needs.

    >>> knots_up_to(0), knots_up_to(17)
    (1, 18)
    """
    return bisect_left(KNOTS, reach) + 1


_STARTS = (0, *((left + right + 1) // 2 for left, right in pairwise(KNOTS)), FARTHEST + 1)
"""Knot k stands for the magnitudes from the k-th of these numbers to below the next."""


@cache
def _between_knots() -> tuple[npt.NDArray[np.int32], ...]:
    """Of every magnitude the knots on both sides, and the parts of each in its cost; a knot stands for itself."""
    j, knots = np.arange(FARTHEST + 1), np.array(KNOTS)
    right = np.searchsorted(knots, j)
    left = np.maximum(right - 1, 0)
    at = knots[right] == j
    parts = np.where(at, 0, knots[right] - j), np.where(at, 1, j - knots[left])
    return left.astype(np.int32), right.astype(np.int32), parts[0].astype(np.int32), parts[1].astype(np.int32)


@cache
def nearest_knot() -> Tensor:
    """(16384,) int64, the knot that stands for each magnitude: itself up to 16, then the nearest."""
    return torch.bucketize(torch.arange(FARTHEST + 1), torch.tensor(_STARTS[1:-1]), right=True)


def tables_of(counts: Tensor, reach: Tensor) -> Tables:
    """The nearest tables to counts of symbols by knot (K, 97); the count of j >= 1 is of both signs together.

    Each table reaches as far as ``reach`` (K,); every knot up to there gets half a count more, so that nothing
    below is impossible.
    """
    width = knots_up_to(int(reach.max())) if len(reach) else 1
    first, end = torch.tensor(_STARTS[:-1]), torch.tensor(_STARTS[1:])
    held = (torch.minimum(reach.to(torch.int64).unsqueeze(1) + 1, end) - first).clamp_min(0)
    each = (counts.to(torch.float64) + 0.5) / held.clamp_min(1)
    each[:, 1:] /= 2
    each = each[:, :width]
    costs = ((each.amax(1, keepdim=True) / each).log2() * 16).round().clamp(0, MOST)
    return Tables(reach.to(torch.int16), costs.to(torch.uint8))


def tables_for(symbols: Tensor, contexts: Tensor, number: int) -> Tables:
    """The nearest ``number`` of tables to ``symbols``; ``contexts``, of their shape: which table each follows."""
    counts, reach = torch.zeros(number * len(KNOTS), dtype=torch.int64), torch.zeros(number, dtype=torch.int64)
    for here in stripes(symbols):
        flat, table = symbols[here].flatten().to(torch.int64).abs(), contexts[here].flatten().to(torch.int64)
        counts += torch.bincount(table * len(KNOTS) + nearest_knot()[flat], minlength=len(counts))
        reach.scatter_reduce_(0, table, flat, "amax")
    return tables_of(counts.view(number, len(KNOTS)), reach)


def table_for(symbols: Tensor) -> Tables:
    """One table, for the symbols given, of any shape.

    >>> table_for(torch.tensor([0, 0, -1])).frequencies(0).tolist()
    [4987896, 16777216, 4987896]
    """
    flat = symbols.flatten()
    return tables_for(flat, torch.zeros(1, dtype=torch.uint8).expand(len(flat)), 1)
