"""Two methods, an importance and two codecs of another package: what a stranger adds to kflats, each one class.

``metadata/`` announces them as an installed package would.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kflats.codecs import Candidate, Codec, RowScaleCodec, Table
from kflats.importance import Importance, Measured, Weighting, WeightingForm
from kflats.matrices.registry import LowRankMatrix
from kflats.methods import ClusterMethod, Factored, KeepDense, Method, PairMethod, Problem
from kflats.methods.flats import from_flats
from kflats.methods.protocol import largest_rank
from kflats.numerics.coding.rounding import RoundedRows, scales_of
from kflats.numerics.flats import FlatsFit
from kflats.numerics.rows import Rows


@dataclass(frozen=True)
class SketchedSVD(PairMethod):
    """A pair in the span of the matrix times random vectors (Halko, Martinsson and Tropp, 2011)."""

    def _pair(self, problem: Problem, rank: int) -> Factored:
        table = torch.cat([block for _, block in problem.rows.blocks(8192)]).to(torch.float64)
        weighted = table if problem.row_weights is None else table * problem.row_weights.to(table).sqrt().unsqueeze(1)
        random = torch.randn(len(table), rank + 8, generator=torch.Generator().manual_seed(problem.seed))
        span = torch.linalg.qr(weighted.T @ (weighted @ (weighted.T @ random.to(table))))[0]
        axes = torch.linalg.svd(weighted @ span, full_matrices=False)[2][:rank]
        basis = axes @ span.T
        error = weighted.square().sum() - (weighted @ basis.T).square().sum()
        dtype = problem.rows.dtype
        return Factored(LowRankMatrix((table @ basis.T).to(dtype), basis.to(dtype)), (max(float(error), 0.0),))

    @classmethod
    def automatic(cls, shape: tuple[int, int]) -> tuple[Method, ...]:
        return (cls(),)


@dataclass(frozen=True)
class SignFlats(ClusterMethod):
    """Two flats of one rank: an SVD of the rows whose first entry is negative, and one of the other rows."""

    @property
    def flats(self) -> int:
        return 2

    def _fit(self, problem: Problem) -> Factored:
        shape = problem.rows.shape
        rank = largest_rank(lambda rank: self.cost(shape, rank, problem.itemsize), min(shape), problem.nbytes)
        labels, parts = self._parts(problem.rows, problem.row_weights)
        axes = [torch.linalg.svd(part, full_matrices=False)[2][:rank].to(problem.rows.dtype) for part in parts]
        spectra = torch.stack([torch.linalg.eigvalsh(part.T @ part).flip(0) for part in parts])
        return Factored(from_flats(problem.rows, FlatsFit(labels, tuple(axes), spectra, (), True)))

    def errors(self, rows: Rows, weighting: Weighting, spectrum: Tensor) -> Tensor:
        _, parts = self._parts(rows, weighting.row_weights)
        energies = torch.stack([torch.linalg.eigvalsh(part.T @ part).flip(0).clamp_min(0) for part in parts]).sum(0)
        return torch.cat([energies.flip(0).cumsum(0).flip(0), torch.zeros(1, dtype=torch.float64)])[: len(spectrum)]

    def _parts(self, rows: Rows, weights: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        table = torch.cat([block for _, block in rows.blocks(8192)]).to(torch.float64)
        labels = (table[:, 0] >= 0).to(torch.uint8)
        weighted = table if weights is None else table * weights.to(table).sqrt().unsqueeze(1)
        return labels, [weighted[labels == c] for c in (0, 1)]

    @classmethod
    def automatic(cls, shape: tuple[int, int]) -> tuple[Method, ...]:
        return (cls(),)


@dataclass(frozen=True)
class LogCounts(Importance):
    """w_i = 1 + log(1 + how often texts read row i)."""

    needs_tokenizer: ClassVar[bool] = True

    @property
    def needs_texts(self) -> bool:
        return True

    def form(self, *, one_hot: bool) -> WeightingForm:
        return WeightingForm(left="diagonal")

    def weigh(self, measured: Measured) -> Weighting:
        counts = torch.zeros(measured.rows) if measured.counts is None else measured.counts
        return Weighting(left=1.0 + counts.to(torch.float64).log1p())


@dataclass(frozen=True)
class Ternary(RowScaleCodec):
    """-s, 0 or s, with one s for each row: the mean size of its entries that are not small."""

    bits = 2

    def rounded(self, rows: Rows, dtype: torch.dtype) -> RoundedRows:
        table = torch.cat([block for _, block in rows.blocks(8192)])
        size = table.abs()
        large = size > 0.5 * size.mean(1, keepdim=True)
        scale = (size * large).sum(1, keepdim=True) / large.sum(1, keepdim=True).clamp_min(1)
        return RoundedRows((table.sign() * large).to(torch.int8), scales_of(scale, dtype))

    @classmethod
    def automatic(cls, shape: tuple[int, int], form: WeightingForm) -> tuple[tuple[Method, Codec], ...]:
        return ((KeepDense(), cls()),)


@dataclass(frozen=True)
class Bfloat(Codec):
    """What the method makes, in bfloat16."""

    stores_integers: ClassVar[bool] = False

    def torch_dtype(self, original: torch.dtype | str) -> torch.dtype:
        return torch.bfloat16

    def min_bytes(self, method: Method, shape: tuple[int, int], itemsize: int, *, counts_labels: bool = True) -> int:
        return method.min_bytes(shape, itemsize, counts_labels=counts_labels)

    def candidates(self, method: Method, table: Table) -> Iterator[Candidate]:
        return iter(())

    def encode(self, method: Method, problem: Problem, dtype: torch.dtype) -> Factored:
        fit = method.fit(problem)
        return replace(fit, matrix=fit.matrix.to(dtype))
