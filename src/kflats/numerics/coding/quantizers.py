"""Entropy-constrained scalar quantisation: dead zone, rounding that counts bits, and reconstruction at the mean.

For numbers u (in steps) coded with prices b_j (bits of one symbol of magnitude j) and values v_j = j - s:

    minimise over j     (|u| - v_j)^2 + trade * b_j

Since prices do not depend on the neighbours, rate-distortion optimised rounding is a scalar quantizer: |u| is given j
once it passes   (v_j + v_{j-1}) / 2 + trade (b_j - b_{j-1}) / (2 (v_j - v_{j-1})).   Alternating that with the prices
of what was chosen and the means of what was caught falls to a local optimum (Chou, Lookabaugh and Gray,
Entropy-constrained vector quantization, IEEE Trans. ASSP 37, 1989).
At high rates the gap to the Gaussian bound is 1/2 log2(pi e / 6) = .254 bits, and it vanishes at low ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.coding.tables import FARTHEST, KNOTS, Tables, nearest_knot, tables_of
from kflats.numerics.large_matrices import stripes

TRADE = 0.125
"""Squared steps a bit is worth. At high rates D = step^2 / 12 and -dD/dR = .1155 step^2; measured best .09 to .15."""

CONTEXTS_AN_OCTAVE = 3
"""Distributions by the mean magnitude of what they code, so many an octave (2: .006 bits more; 4: .002 less)."""

_LEAST_OCTAVE = -9
"""Cells of smaller mean magnitude share one distribution."""

_AT_ONCE = 2**20
"""Coordinates that are made symbols at a time."""
_EDGES = 3
"""Corrections of the first dead zone by the bits that it makes a symbol cost."""

DEAD = 0
"""The table of cells whose symbols are all 0."""


@dataclass(frozen=True)
class Quantizer:
    """``contexts`` (C, r) int64: the table of each cell (one coordinate of one class); ``tables`` (K), the first for
    cells that are all 0; ``shrink`` (K,) float32: s of each table."""

    contexts: Tensor
    tables: Tables
    shrink: Tensor

    def thresholds(self) -> list[Tensor]:
        """For each table (reach,) float32, ascending: |u| above the j-th of them (from 1) is at least j."""
        bits, thresholds = self.tables.bits, []
        for table, reach in enumerate(self.tables.reach.tolist()):
            price = bits[table, : reach + 1]
            value = torch.arange(reach + 1, dtype=torch.float64) - float(self.shrink[table])
            value[0] = 0.0
            rise = value[1:] - value[:-1]
            middle = (value[1:] + value[:-1]) / 2 + TRADE * (price[1:] - price[:-1]) / (2 * rise)
            thresholds.append(middle.cummax(0).values.to(torch.float32) if reach else middle.to(torch.float32))
        return thresholds


class Tally:
    """Sums of one pass over all rows for each cell, (C, r): enough for the next quantizer, without the rows.

    ``knots`` (C, r, 97) how often each magnitude; sums of u^2, |u q|, q^2, |q|, and of |u| where q is not 0; ``most``,
    the largest magnitude; ``rows`` (C,) how many rows.
    """

    def __init__(self, classes: int, rank: int) -> None:
        self.knots = torch.zeros(classes, rank, len(KNOTS), dtype=torch.float64)
        zeros = torch.zeros(classes, rank, dtype=torch.float64)
        self.uu, self.uq, self.qq, self.q, self.u = zeros, zeros.clone(), zeros.clone(), zeros.clone(), zeros.clone()
        self.most = torch.zeros(classes, rank, dtype=torch.int64)
        self.rows = torch.zeros(classes, dtype=torch.float64)

    def add_(self, c: int, u: Tensor, q: Tensor) -> None:
        """Count a block: u (r, m) float32 and its symbols q (r, m) int16, of class ``c``."""
        self.rows[c] += u.shape[1]
        for part in stripes(u):
            here, whole = u[part], q[part].abs().to(torch.int64)
            places = nearest_knot()[whole] + len(KNOTS) * torch.arange(len(here)).unsqueeze(1)
            counts = torch.bincount(places.flatten(), minlength=len(here) * len(KNOTS))
            self.knots[c, part] += counts.view(len(here), len(KNOTS))
            size, magnitude = here.abs(), whole.to(torch.float32)
            # Sums of at most a block's rows in float32, of blocks in float64.
            self.uu[c, part] += size.square().sum(1)
            self.uq[c, part] += (size * magnitude).sum(1)
            self.qq[c, part] += magnitude.square().sum(1)
            self.q[c, part] += magnitude.sum(1)
            self.u[c, part] += torch.where(whole > 0, size, torch.zeros_like(size)).sum(1)
            self.most[c, part] = torch.maximum(self.most[c, part], whole.amax(1))

    def prices(self, quantizer: Quantizer) -> Tensor:
        """(C, r) bits of each cell's symbols."""
        bits = quantizer.tables.bits
        longest = bits.shape[1] - 1
        price = bits[:, torch.tensor(KNOTS).clamp_max(longest)]
        # A knot beyond a table's reach holds at most the reach itself.
        reach = quantizer.tables.reach.to(torch.int64)
        price = torch.where(price.isinf(), bits.gather(1, reach.unsqueeze(1)), price)
        total: Tensor = torch.einsum("crk,crk->cr", self.knots, price[quantizer.contexts])
        return total

    def errors(self, quantizer: Quantizer) -> Tensor:
        """(C, r) squared errors of each cell, in squared steps."""
        s = quantizer.shrink.to(torch.float64)[quantizer.contexts]
        count = self.knots[:, :, 1:].sum(2)
        return (self.uu - 2 * (self.uq - s * self.u) + self.qq - 2 * s * self.q + s.square() * count).clamp_min(0.0)


def design(tally: Tally, *, scale: Tensor | None = None, kill: bool = True) -> Quantizer:
    """The quantizer that what was seen asks for: cells of like mean magnitude share a distribution.

    Args:
        scale: (C,) rows that each counted row of a class stands for, where only a sample was counted.
        kill: set cells to 0 whose symbols cost more than they save. False: the quantizer must code what was counted.
    """
    weight = torch.ones(len(tally.q), 1, dtype=torch.float64) if scale is None else scale.unsqueeze(1)
    rows = tally.rows.clamp_min(1.0).unsqueeze(1)
    octaves = (tally.q / rows).clamp_min(1e-30).log2().clamp_min(_LEAST_OCTAVE)
    live = tally.most > 0
    quantizer = _quantizer(
        tally, ((octaves - _LEAST_OCTAVE) * CONTEXTS_AN_OCTAVE).floor().to(torch.int64), live, weight
    )
    if not kill:
        return quantizer
    worth = tally.uu - tally.errors(quantizer) > TRADE * tally.prices(quantizer)
    return _quantizer(tally, quantizer.contexts, live & worth, weight)


def _quantizer(tally: Tally, bins: Tensor, live: Tensor, weight: Tensor) -> Quantizer:
    used, number = torch.unique(bins[live], return_inverse=True)
    contexts = torch.full_like(bins, DEAD)
    contexts[live] = number + 1

    def pooled(values: Tensor) -> Tensor:
        out = torch.zeros(len(used) + 1, *values.shape[1:], dtype=torch.float64)
        return out.index_add_(0, number + 1, values)

    share = weight.expand_as(tally.q)[live]
    counts = pooled(tally.knots[live] * share.unsqueeze(1))
    counts[DEAD, 0] = 1.0
    nonzero = counts[:, 1:].sum(1).clamp_min(1e-30)
    shrink = ((pooled(tally.q[live] * share) - pooled(tally.u[live] * share)) / nonzero).clamp(-0.45, 0.45)
    most = torch.zeros(len(counts), dtype=torch.int64)
    most.scatter_reduce_(0, number + 1, tally.most[live], "amax")
    return Quantizer(contexts, tables_of(counts, most), shrink.to(torch.float32))


def first_symbols(u: Tensor) -> Tensor:
    """int16 symbols of u (r, m) where there are no prices yet: each row by the dead zone of a Gaussian as wide."""
    made = torch.empty(u.shape, dtype=torch.int16)
    for part in stripes(u):
        size = u[part].abs()
        width = size.square().mean(1, keepdim=True).sqrt().clamp_min(1e-6) * 2**0.5
        edge = torch.full_like(width, 0.6)
        for _ in range(_EDGES):
            live = torch.erfc(edge / width).clamp(1e-6, 1.0)
            edge = 0.5 + TRADE / 2 * (2 * (1 - live) / live).log2().clamp_min(0.0)
        made[part] = _signed(u[part], torch.where(size > edge, (size + 0.45).floor(), torch.zeros_like(size)))
    return made


def symbols(u: Tensor, contexts: Tensor, thresholds: list[Tensor]) -> Tensor:
    """int16 symbols of u (r, m) for the tables ``contexts`` (r,) of its rows."""
    made = torch.zeros(u.shape, dtype=torch.int16)
    for table in contexts.unique().tolist():
        rows = (contexts == table).nonzero().squeeze(1)
        for here in rows.split(max(1, _AT_ONCE // max(1, u.shape[1]))) if len(thresholds[table]) else ():
            mine = u[here]
            made[here] = _signed(mine, torch.bucketize(mine.abs(), thresholds[table]).to(u.dtype))
    return made


def _signed(u: Tensor, magnitudes: Tensor) -> Tensor:
    if u.numel() and float(magnitudes.max()) > FARTHEST:
        raise KflatsError(
            f"a coordinate is {float(magnitudes.max()):.0f} steps large; {FARTHEST} can be coded",
            cause="more bits asked for than entropy coding is good for, or a few values far larger than the rest",
            hint="fewer bits, or leave the matrix in float16",
        )
    return torch.where(u < 0, -magnitudes, magnitudes).to(torch.int16)
