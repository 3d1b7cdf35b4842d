"""A basis in few bits: each direction as finely as its coordinates deserve.

An error e in direction r of the basis costs lambda_r |e|^2, with lambda_r the weighted energy of its coordinates: as
much as an error in them. Both are cut at the same water level, so the step of direction r is proportional to
step / sqrt(lambda_r). Coordinates are computed against the coded basis (least squares), so that as long as no
direction is left out an error of the basis costs nothing but its slant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kflats.numerics.coding.tables import Tables, tables_for

_COARSENESS = 1.5
"""Steps of the basis in units of step / sqrt(lambda). Best 1 where directions are left out, 2 to 3 where none."""


@dataclass(frozen=True)
class CodedBasis:
    """``levels`` (r, d) int8 and ``scale`` (r,) float32; ``tables``: distributions of levels (``basis_contexts``);
    ``bits`` (r,) float64, what each row costs."""

    levels: Tensor
    scale: Tensor
    tables: Tables
    bits: Tensor

    @property
    def directions(self) -> Tensor:
        """(r, d) float64."""
        return self.levels.to(torch.float64) * self.scale.to(torch.float64).unsqueeze(1)

    def kept(self, index: Tensor) -> CodedBasis:
        """The rows at ``index`` alone."""
        return _coded(self.levels[index], self.scale[index])


def code_basis(directions: Tensor, energies: Tensor, step: float) -> CodedBasis:
    """Round ``directions`` (r, d), of weighted energies (r,), for coordinates of this step.

    Steps are never finer than int8 holds, nor so coarse that a direction is lost.
    """
    size = directions.square().mean(1).sqrt()
    wanted = _COARSENESS * step * size * directions.shape[1] ** 0.5 / energies.clamp_min(1e-300).sqrt()
    largest = directions.abs().amax(1)
    scale = torch.maximum(torch.minimum(wanted, size), largest / 127).to(torch.float32)
    levels = (directions / scale.to(torch.float64).unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
    return _coded(levels, scale)


def basis_contexts(levels: Tensor) -> Tensor:
    """(r,) int64, the distribution that each row of integers (r, d) follows: rows of about one mean magnitude share
    one."""
    means = levels.to(torch.float64).abs().mean(1)
    contexts: Tensor = torch.unique((means.clamp_min(1e-9).log2() * 2).floor(), return_inverse=True)[1]
    return contexts


def _coded(levels: Tensor, scale: Tensor) -> CodedBasis:
    magnitudes, contexts = levels.to(torch.int64).abs(), basis_contexts(levels)
    number = int(contexts.max()) + 1 if len(contexts) else 0
    tables = tables_for(magnitudes, contexts.unsqueeze(1).expand_as(magnitudes), number)
    bits = tables.bits[contexts].gather(1, magnitudes).sum(1) if levels.numel() else torch.zeros(len(levels)).double()
    return CodedBasis(levels, scale, tables, bits)
