"""The error of a stored matrix: of each row, and under a weighting or a norm.

Factors of half precision are widened before they are multiplied, as in a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kflats.importance.protocol import Weighting
from kflats.matrices.registry import Matrix
from kflats.numerics.loss import Loss
from kflats.numerics.rows import Rows, as_rows, check_finite, gram_block, slices

_NUMBERS = 2**19  # of a block: decoding holds up to fifteen times as many


@dataclass(frozen=True)
class MatrixError:
    """``error``: the weighted error of a stored matrix. ``total``: the error of a matrix of zeros."""

    error: float
    total: float

    @property
    def relative(self) -> float:
        """The error as a share of the total; 0 for a matrix of zeros."""
        return self.error / self.total if self.total > 0 else 0.0


class Norm(Protocol):
    """The error that a method minimises in place of the squared one: a cost for every row of an error matrix."""

    @property
    def name(self) -> str:
        """Its name in reports."""
        ...

    def costs(self, errors: Tensor) -> Tensor:
        """(m,) from rows (m, d) of A - M."""
        ...


@dataclass(frozen=True)
class EntryPowers:
    """sum_j |e_ij|^p: the p-th power of the entrywise lp norm.

    >>> EntryPowers(1.0).name, EntryPowers(1.0).costs(torch.tensor([[3.0, -4.0]])).tolist()
    ('entrywise l1', [7.0])
    """

    p: float

    @property
    def name(self) -> str:
        """Its name in reports."""
        return f"entrywise l{self.p:g}"

    def costs(self, errors: Tensor) -> Tensor:
        """(m,) float64."""
        return errors.to(torch.float64, copy=True).abs_().pow_(self.p).sum(1)


@dataclass(frozen=True)
class Distances:
    """rho(|e_i|): a loss of the distance between a row and its stored form; its threshold, if any, is absolute.

    >>> from kflats.numerics.loss import Power
    >>> Distances(Power(1)).costs(torch.tensor([[3.0, -4.0]])).tolist()
    [5.0]
    """

    loss: Loss

    @property
    def name(self) -> str:
        """Its name in reports."""
        return f"{self.loss.name} of distances"

    def costs(self, errors: Tensor) -> Tensor:
        """(m,) float64."""
        return self.loss.rho(errors.to(torch.float64).square().sum(1))


@torch.no_grad()
def norm_error(rows: Rows | Tensor, matrix: Matrix, norm: Norm, row_weights: Tensor | None = None) -> MatrixError:
    """sum_i w_i cost(a_i - m_i) for ``norm``'s costs and (n,) row weights, by blocks.

    >>> from kflats.matrices.registry import LowRankMatrix
    >>> stored = LowRankMatrix(torch.ones(2, 1), torch.tensor([[1.0, 0.0]]))
    >>> norm_error(torch.tensor([[1.0, 0.0], [1.0, 2.0]]), stored, EntryPowers(1.0), torch.tensor([1.0, 3.0]))
    MatrixError(error=6.0, total=10.0)
    """
    source = as_rows(rows)
    weights = torch.ones(source.shape[0], dtype=torch.float64) if row_weights is None else row_weights
    error = total = 0.0
    for here, block in slices(source, _block(source)):
        w = weights[here].to(block.device, torch.float64)
        error += float(w @ norm.costs(_residual(here, block, matrix)).to(w))
        total += float(w @ norm.costs(block).to(w))
    return MatrixError(error, total)


@torch.no_grad()
def row_errors(rows: Rows | Tensor, matrix: Matrix) -> Tensor:
    """(n,) squared distance of each row to its stored form, ||a_i - m_i||^2, by blocks."""
    source = as_rows(rows)
    blocks = slices(source, _block(source))
    errors = (_residual(here, block, matrix).square().sum(1, dtype=torch.float64) for here, block in blocks)
    return torch.cat([part.cpu() for part in errors])


@torch.no_grad()
def weighted_error(
    rows: Rows | Tensor, matrix: Matrix, weighting: Weighting | None = None, total: float | None = None
) -> MatrixError:
    """|| L (A - M) R ||_F^2 in float64.

    Rows are read by blocks, except under a full left metric, which couples all of them.

    Args:
        total: || L A R ||_F^2 where it is known; None: it is computed too.

    >>> from kflats.matrices.registry import LowRankMatrix
    >>> stored = LowRankMatrix(torch.ones(2, 1), torch.tensor([[1.0, 0.0]]))
    >>> weighted_error(torch.tensor([[1.0, 0.0], [1.0, 2.0]]), stored, Weighting(left=torch.tensor([1.0, 3.0])))
    MatrixError(error=12.0, total=16.0)
    """
    source, weighting = as_rows(rows), (weighting or Weighting()).to(as_rows(rows).device)
    coupled = weighting.left is not None and weighting.left.ndim == 2
    error = whole = 0.0
    for here, block in slices(source, source.shape[0] if coupled else _block(source)):
        error += _cost(_residual(here, block, matrix), here, weighting)
        whole += _cost(block, here, weighting) if total is None else 0.0
    return MatrixError(error, whole if total is None else total)


@torch.no_grad()
def weighted_total(rows: Rows | Tensor, weighting: Weighting | None = None) -> float:
    """|| L A R ||_F^2 in float64: what ``weighted_error`` compares with.

    Raises:
        KflatsError: rows that are not finite.

    >>> weighted_total(torch.tensor([[1.0, 0.0], [1.0, 2.0]]), Weighting(left=torch.tensor([1.0, 3.0])))
    16.0
    """
    source, weighting = as_rows(rows), (weighting or Weighting()).to(as_rows(rows).device)
    check_finite(source)
    size = source.shape[0] if weighting.left is not None and weighting.left.ndim == 2 else _block(source)
    return max(0.0, sum(_cost(block, here, weighting) for here, block in slices(source, size)))


def _block(rows: Rows) -> int:
    return min(gram_block(rows), max(1, _NUMBERS // rows.shape[1]))


def _residual(here: slice, block: Tensor, matrix: Matrix) -> Tensor:
    index = torch.arange(here.start, here.stop, device=block.device)
    return block - matrix.rows(index, dtype=block.dtype)


def _cost(block: Tensor, here: slice, weighting: Weighting) -> float:
    block = block.to(torch.float64)
    left = None if weighting.left is None else weighting.left.to(torch.float64)
    right = None if weighting.right is None else weighting.right.to(torch.float64)
    measured = block if right is None else block * right if right.ndim == 1 else block @ right
    if left is not None:
        measured = left[here].unsqueeze(1) * measured if left.ndim == 1 else left @ measured
    return float((measured * block).sum())
