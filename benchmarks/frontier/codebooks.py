"""Baselines of faiss: product quantization, optimized product quantization, residual quantization.

Codebooks and rotations are stored in float16 and counted: of a table of 30 thousand rows they are a tenth of a bit per
number and more. Rows are encoded again with the rounded codebooks, so that rounding them costs next to nothing.

PQ: Jegou, Douze, Schmid, IEEE TPAMI 33, 2011. OPQ: Ge, He, Ke, Sun, CVPR 2013. Residual quantization with beam search:
Liu, Lu, Zhang, 2015. Needs the extra "baselines".
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from frontier.baseline import UNIT_BYTES, Baseline, halved, unit_of
from kflats.importance.protocol import Weighting

_ROUNDS = 25
"""Of k-means, as faiss does."""

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Codebooks(Baseline):
    """``parts`` codes of ``bits`` bits a row; parts divide the columns that are coded."""

    parts: int
    bits: int = 8
    accepts: ClassVar[frozenset[str]] = frozenset({"rows"})

    @property
    def name(self) -> str:
        return f"{self.family.removeprefix('faiss ')} {self.parts} x {self.bits}"

    @property
    def curve(self) -> object:
        return self.family, self.bits

    def size(self, shape: tuple[int, int]) -> int:
        """Bytes of codes and of what lies beside them."""
        return -(-shape[0] * self.parts * self.bits // 8) + 2 * self._beside(shape[1]) + UNIT_BYTES

    @abstractmethod
    def _beside(self, d: int) -> int:
        """Numbers in codebooks and rotations."""

    @abstractmethod
    def _decoded(self, x: Floats, weights: Tensor | None, seed: int) -> Tensor:
        """``x`` after coding, its largest magnitude being 1/2 to 1."""

    def _code(self, table: Tensor, weighting: Weighting, seed: int) -> tuple[Tensor, int]:
        unit = unit_of(table)
        n, d = table.shape
        return self._decoded((table / unit).numpy(), weighting.row_weights, seed) * unit, self.size((n, d))


@dataclass(frozen=True)
class PQ(Codebooks):
    """Columns in equal groups, each group's vectors by (weighted) k-means in 2^bits centroids.

    >>> PQ(96).name
    'PQ 96 x 8'
    """

    family: ClassVar[str] = "faiss PQ"

    def _beside(self, d: int) -> int:
        return (1 << self.bits) * d

    def _decoded(self, x: Floats, weights: Tensor | None, seed: int) -> Tensor:
        return _product(x, self.parts, self.bits, weights, seed)


@dataclass(frozen=True)
class OPQ(Codebooks):
    """PQ after the rotation to ``dims`` columns (None: all) that suits it best, found by alternating the two.

    Args:
        dims: fewer columns leave out the directions of least energy: smaller codebooks and a smaller rotation.
        rounds: of alternation, faiss' own 50.
        rows: the rotation is fitted to at most so many rows, drawn by seed; codebooks always to all.

    faiss cannot weigh rows while it fits the rotation: there it sees rows drawn in proportion to their weights.

    >>> OPQ(48, dims=192).name
    'OPQ 48 x 8 of 192'
    """

    dims: int | None = None
    rounds: int = 50
    rows: int = 65536
    family: ClassVar[str] = "faiss OPQ"

    @property
    def name(self) -> str:
        return super().name + ("" if self.dims is None else f" of {self.dims}")

    @property
    def curve(self) -> object:
        return self.family, self.bits, self.dims

    def _beside(self, d: int) -> int:
        kept = self.dims or d
        return (1 << self.bits) * kept + kept * d

    def _decoded(self, x: Floats, weights: Tensor | None, seed: int) -> Tensor:
        import faiss

        n, d = x.shape
        kept = self.dims or d
        inner = faiss.ProductQuantizer(kept, self.parts, self.bits)
        inner.cp.min_points_per_centroid, inner.cp.seed = 1, seed
        finder = faiss.OPQMatrix(d, self.parts, kept)
        finder.niter, finder.pq, finder.max_train_points = self.rounds, inner, 2**31 - 1
        finder.train(x[_drawn(n, min(n, self.rows), weights, seed)])
        rotation = halved(torch.from_numpy(faiss.vector_to_array(finder.A).reshape(kept, d).copy()))
        turned = np.ascontiguousarray(torch.from_numpy(x) @ rotation.T)
        return _product(turned, self.parts, self.bits, weights, seed) @ rotation


@dataclass(frozen=True)
class Residual(Codebooks):
    """Sums of ``parts`` centroids, one of 2^bits whole rows each, chosen by beam search.

    Under weights it is trained on as many rows, drawn in proportion to them: faiss cannot weigh here.

    >>> Residual(4).name
    'RQ 4 x 8'
    """

    family: ClassVar[str] = "faiss RQ"

    def _beside(self, d: int) -> int:
        return self.parts * (1 << self.bits) * d

    def _decoded(self, x: Floats, weights: Tensor | None, seed: int) -> Tensor:
        import faiss

        n, d = x.shape
        quantizer = faiss.ResidualQuantizer(d, self.parts, self.bits)
        # Codebooks refined together after training gain more than growing dimensions, and take a fraction of the time.
        quantizer.train_type = faiss.ResidualQuantizer.Train_refine_codebook
        quantizer.cp.min_points_per_centroid, quantizer.cp.seed = 1, seed
        quantizer.cp.max_points_per_centroid = n
        quantizer.train(x if weights is None else x[_drawn(n, n, weights, seed)])
        books = torch.from_numpy(faiss.vector_to_array(quantizer.codebooks))
        faiss.copy_array_to_vector(halved(books).numpy(), quantizer.codebooks)
        return torch.from_numpy(quantizer.decode(quantizer.compute_codes(x)))


def _product(x: Floats, parts: int, bits: int, weights: Tensor | None, seed: int) -> Tensor:
    """``x`` after product quantization with float16 codebooks of its own."""
    import faiss

    n, d = x.shape
    quantizer: Any = faiss.ProductQuantizer(d, parts, bits)
    shares = None if weights is None else (weights / weights.mean()).to(torch.float32).numpy()
    width, books = d // parts, []
    for part in range(parts):
        means = faiss.Kmeans(
            width, 2**bits, niter=_ROUNDS, seed=seed + part, min_points_per_centroid=1, max_points_per_centroid=n
        )
        means.train(np.ascontiguousarray(x[:, part * width : (part + 1) * width]), weights=shares)
        books.append(means.centroids)
    stored = halved(torch.from_numpy(np.stack(books)))
    faiss.copy_array_to_vector(stored.reshape(-1).numpy(), quantizer.centroids)
    return torch.from_numpy(quantizer.decode(quantizer.compute_codes(x)))


def _drawn(n: int, count: int, weights: Tensor | None, seed: int) -> npt.NDArray[np.int64]:
    """``count`` of n rows: all in order, or drawn, with return where rows have weights."""
    generator = torch.Generator().manual_seed(seed)
    if weights is not None:
        return torch.multinomial(weights.double(), count, replacement=True, generator=generator).numpy()
    return np.arange(n) if count >= n else torch.randperm(n, generator=generator)[:count].numpy()
