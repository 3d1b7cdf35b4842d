"""Rivals of faiss: product quantization, optimized product quantization, residual quantization.

Codebooks and rotations are stored in float16 and counted: of a table of 30 thousand rows they are a tenth of a bit per
number and more. Rows are encoded anew with the rounded codebooks, so that rounding them costs next to nothing.

PQ: Jegou, Douze, Schmid, IEEE TPAMI 33, 2011. OPQ: Ge, He, Ke, Sun, CVPR 2013. Residual quantization with beam search:
Liu, Lu, Zhang, 2015. Needs the extra "rivals".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kflats.errors import KflatsError
from kflats.frontier.rivals.coded import UNIT_BYTES, Coded, checked, halved, unit_of

_ROUNDS = 25
"""Of k-means, as faiss does."""
_MOST_BITS = 16

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PQ:
    """Columns in ``parts`` equal groups, each group's vectors by k-means in 2^``bits`` centroids.

    >>> PQ(96).name
    'PQ 96 x 8'
    """

    parts: int
    bits: int = 8

    def __post_init__(self) -> None:
        _check(self.parts, self.bits)

    @property
    def name(self) -> str:
        return f"PQ {self.parts} x {self.bits}"

    @property
    def family(self) -> str:
        return "faiss PQ"

    @property
    def weighs(self) -> bool:
        return True

    def size(self, shape: tuple[int, int]) -> int:
        """Bytes of codes and codebooks."""
        n, d = shape
        return -(-n * self.parts * self.bits // 8) + 2 * (1 << self.bits) * d + UNIT_BYTES

    def code(self, table: Tensor, seed: int = 0, *, weights: Tensor | None = None) -> Coded:
        """Row weights enter faiss' k-means as they are.

        Raises:
            KflatsError: no faiss, fewer rows than centroids, or parts that do not divide the columns.
        """
        given = checked(self, table, weights)
        _fits(given, self.parts, self.bits)
        unit = unit_of(given)
        found = _product(_numpy(given / unit), self.parts, self.bits, weights, seed)
        return Coded(self.name, torch.from_numpy(found) * unit, self.size(_shape(given)))


@dataclass(frozen=True)
class OPQ:
    """PQ after the rotation to ``dims`` columns (None: all) that suits it best, found by alternating the two.

    Args:
        parts, bits: as ``PQ``; parts divide ``dims``.
        dims: fewer columns leave out the directions of least energy: smaller codebooks and a smaller rotation.
        rounds: of alternation, faiss' own 50.
        rows: the rotation is found on at most so many rows, drawn by seed; codebooks always on all.

    >>> OPQ(48, dims=192).name
    'OPQ 48 x 8 of 192'
    """

    parts: int
    bits: int = 8
    dims: int | None = None
    rounds: int = 50
    rows: int = 65536

    def __post_init__(self) -> None:
        _check(self.parts, self.bits)

    @property
    def name(self) -> str:
        return f"OPQ {self.parts} x {self.bits}" + ("" if self.dims is None else f" of {self.dims}")

    @property
    def family(self) -> str:
        return "faiss OPQ"

    @property
    def weighs(self) -> bool:
        return True

    def size(self, shape: tuple[int, int]) -> int:
        """Bytes of codes, codebooks and rotation."""
        n, d = shape
        kept = d if self.dims is None else self.dims
        return -(-n * self.parts * self.bits // 8) + 2 * (1 << self.bits) * kept + 2 * kept * d + UNIT_BYTES

    def code(self, table: Tensor, seed: int = 0, *, weights: Tensor | None = None) -> Coded:
        """faiss cannot weigh rows while it looks for the rotation: there it sees rows drawn in proportion to weights.

        Raises:
            KflatsError: as ``PQ``; dims that are none.
        """
        given = checked(self, table, weights)
        n, d = given.shape
        kept = d if self.dims is None else self.dims
        if not 1 <= kept <= d:
            raise KflatsError(f"a rotation to {kept} of {d} columns", hint=f"dims from 1 to {d}")
        _fits(given[:, :kept], self.parts, self.bits)
        faiss, unit = _faiss(), unit_of(given)
        x = _numpy(given / unit)
        inner = faiss.ProductQuantizer(kept, self.parts, self.bits)
        inner.cp.min_points_per_centroid, inner.cp.seed = 1, seed
        finder = faiss.OPQMatrix(d, self.parts, kept)
        finder.niter, finder.pq, finder.max_train_points = self.rounds, inner, 2**31 - 1
        finder.train(x[_drawn(n, min(n, self.rows), weights, seed)])
        rotation = halved(torch.from_numpy(faiss.vector_to_array(finder.A).reshape(kept, d).copy()))
        turned = _numpy(torch.from_numpy(x) @ rotation.T)
        found = _product(turned, self.parts, self.bits, weights, seed)
        return Coded(self.name, torch.from_numpy(found) @ rotation * unit, self.size((n, d)))


@dataclass(frozen=True)
class Residual:
    """Sums of ``stages`` centroids, one of 2^``bits`` whole rows each, found by beam search.

    >>> Residual(4).name
    'RQ 4 x 8'
    """

    stages: int
    bits: int = 8

    def __post_init__(self) -> None:
        _check(self.stages, self.bits)

    @property
    def name(self) -> str:
        return f"RQ {self.stages} x {self.bits}"

    @property
    def family(self) -> str:
        return "faiss RQ"

    @property
    def weighs(self) -> bool:
        return True

    def size(self, shape: tuple[int, int]) -> int:
        """Bytes of codes and codebooks: every stage has centroids of full length."""
        n, d = shape
        return -(-n * self.stages * self.bits // 8) + 2 * self.stages * (1 << self.bits) * d + UNIT_BYTES

    def code(self, table: Tensor, seed: int = 0, *, weights: Tensor | None = None) -> Coded:
        """Under weights it is trained on as many rows, drawn in proportion to them: faiss cannot weigh here.

        Raises:
            KflatsError: no faiss, or fewer rows than centroids.
        """
        given = checked(self, table, weights)
        n, d = given.shape
        _fits(given, 1, self.bits)
        faiss, unit = _faiss(), unit_of(given)
        x = _numpy(given / unit)
        quantizer = faiss.ResidualQuantizer(d, self.stages, self.bits)
        # Codebooks refined together after training gain more than growing dimensions, and take a fraction of the time.
        quantizer.train_type = faiss.ResidualQuantizer.Train_refine_codebook
        quantizer.cp.min_points_per_centroid, quantizer.cp.seed = 1, seed
        quantizer.cp.max_points_per_centroid = n
        quantizer.train(x if weights is None else x[_drawn(n, n, weights, seed)])
        books = torch.from_numpy(faiss.vector_to_array(quantizer.codebooks))
        faiss.copy_array_to_vector(halved(books).numpy(), quantizer.codebooks)
        found = quantizer.decode(quantizer.compute_codes(x))
        return Coded(self.name, torch.from_numpy(found) * unit, self.size((n, d)))


def _product(x: Floats, parts: int, bits: int, weights: Tensor | None, seed: int) -> Floats:
    """``x`` after product quantization with float16 codebooks of its own."""
    faiss = _faiss()
    n, d = x.shape
    quantizer = faiss.ProductQuantizer(d, parts, bits)
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
    found: Floats = quantizer.decode(quantizer.compute_codes(x))
    return found


def _drawn(n: int, count: int, weights: Tensor | None, seed: int) -> npt.NDArray[np.int64]:
    """``count`` of n rows: all in order, or drawn, with return where rows have weights."""
    generator = torch.Generator().manual_seed(seed)
    if weights is not None:
        return torch.multinomial(weights.double(), count, replacement=True, generator=generator).numpy()
    return np.arange(n) if count >= n else torch.randperm(n, generator=generator)[:count].numpy()


def _check(parts: int, bits: int) -> None:
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in (parts, bits))
    if not whole or parts < 1 or not 1 <= bits <= _MOST_BITS:
        raise KflatsError(f"{parts!r} codes of {bits!r} bits are not possible", hint=f"1 to {_MOST_BITS} bits each")


def _fits(table: Tensor, parts: int, bits: int) -> None:
    n, d = table.shape
    if d % parts:
        divisors = [m for m in range(1, d + 1) if not d % m]
        nearest = min(divisors, key=lambda m: abs(math.log(m / parts)))
        raise KflatsError(f"{parts} parts do not divide {d} columns", hint=f"for example {nearest}")
    if n < 2**bits:
        raise KflatsError(f"{2**bits} centroids for {n} rows", hint="fewer bits a code")


def _shape(table: Tensor) -> tuple[int, int]:
    return table.shape[0], table.shape[1]


def _numpy(table: Tensor) -> Floats:
    found: Floats = np.ascontiguousarray(table.numpy(), dtype=np.float32)
    return found


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise KflatsError("this rival needs faiss", hint="pip install 'kflats[rivals]'") from error
    return faiss
