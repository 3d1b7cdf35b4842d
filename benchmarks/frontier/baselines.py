"""Baselines that round numbers or store factors, and kflats' own ways: all but the codebooks of faiss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from frontier.baseline import UNIT_BYTES, Baseline, halved, unit_of
from kflats.codecs import Transform
from kflats.common.errors import KflatsError
from kflats.importance.protocol import Weighting
from kflats.methods import MESSI, SVD, Flats, KMeansSVD, RobustSVD
from kflats.methods.protocol import Problem
from kflats.numerics.coding.rounding import absmax_code
from kflats.numerics.rows import TensorRows
from kflats.recipe.recipe import Recipe

FACTORS: dict[str, Callable[[], Any]] = {
    "SVD": SVD,
    "Robust SVD": RobustSVD,
    "k-means + SVD": KMeansSVD,
    "MESSI": partial(MESSI, restarts=1),
    "kflats Flats": Flats,
}
"""Robust SVD at p = 1; five flats or clusters for the three that have them."""


def _gaussian_values(bits: int) -> Tensor:
    """(2^bits,) values of least squared error for a standard Gaussian: means of cells and middles of means in turn."""
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64))
    end = torch.full((1,), torch.inf, dtype=torch.float64)
    values = 3**0.5 * normal.icdf((torch.arange(2**bits) + 0.5) / 2**bits)
    for _ in range(2000):
        edges = torch.cat([-end, (values[1:] + values[:-1]) / 2, end])
        values = -normal.log_prob(edges).exp().diff() / normal.cdf(edges).diff()
    return values.to(torch.float32)


def _scales(bits: int, group: int | None) -> str:
    return f"int{bits}, " + ("a scale a row" if group is None else f"a scale for {group}")


@dataclass(frozen=True)
class Half(Baseline):
    """float16, number by number; kflats stores the same by ``Recipe(KeepDense(), codec=Float("float16"))``."""

    family: str = "fp16"

    @property
    def name(self) -> str:
        return self.family

    def _code(self, table: Tensor, weighting: Weighting, seed: int) -> tuple[Tensor, int]:
        return halved(table), 2 * table.numel()


@dataclass(frozen=True)
class Absmax(Baseline):
    """Integers of 8 or 4 bits times a float16 scale a row, or a ``group`` of columns (``numerics.coding.rounding``).

    >>> Absmax(4, 2).code(torch.tensor([[7.0, 1.0, 14.0, -4.0]])).table.tolist()
    [[7.0, 1.0, 14.0, -4.0]]
    """

    bits: int
    group: int | None = None

    @property
    def name(self) -> str:
        return _scales(self.bits, self.group)

    @property
    def family(self) -> str:
        return "absmax rows" if self.group is None else "absmax groups"

    @property
    def curve(self) -> object:
        return self.family, self.group

    def _code(self, table: Tensor, weighting: Weighting, seed: int) -> tuple[Tensor, int]:
        n, d = table.shape
        groups = -(-d // (self.group or d))
        found = absmax_code(TensorRows(table), self.bits, groups, torch.float16)
        scales = found.scales.wide.to(torch.float32).repeat_interleave(-(-d // groups), 1)[:, :d]
        return found.levels * scales, -(-n * d * self.bits // 8) + 2 * n * groups + UNIT_BYTES


@dataclass(frozen=True)
class Rotated(Baseline):
    """A random rotation, then the best fixed quantizer of a Gaussian (Max, IRE Trans. IT 6, 1960): 1 to 8 bits.

    The entries of a turned row are close to a Gaussian of variance |row|^2 / d. A scale a row, of least squares, and
    the values are stored; the rotation is drawn from its seed.
    """

    bits: int
    family: ClassVar[str] = "rotation"

    @property
    def name(self) -> str:
        return f"rotation, {self.bits} bit" + ("s" if self.bits > 1 else "")

    def _code(self, table: Tensor, weighting: Weighting, seed: int) -> tuple[Tensor, int]:
        n, d = table.shape
        turn = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(seed)))[0]
        values, turned = _gaussian_values(self.bits), table @ turn
        size = turned.norm(dim=1, keepdim=True) / d**0.5
        index = torch.bucketize(turned / size.clamp_min(1e-30), (values[1:] + values[:-1]) / 2)
        chosen = values[index]
        scale = (turned * chosen).sum(1, keepdim=True) / chosen.square().sum(1, keepdim=True)
        return halved(scale) * chosen @ turn.T, -(-n * d * self.bits // 8) + 2 * n + 4 * len(values) + UNIT_BYTES


@dataclass(frozen=True)
class TorchAO(Baseline):
    """torchao's weight-only integers for an embedding: ``quantize_`` with ``IntxWeightOnlyConfig``, scales in float16.

    Args:
        bits: 1 to 8; 4 and 8 are what people use.
        group: columns that share a scale; None: a scale a row. It divides d.

    Needs the extra "baselines". In memory torchao holds 4 bits in a byte; here they count as the 4 that a file needs.
    """

    bits: int
    group: int | None = None
    family: ClassVar[str] = "torchao"

    @property
    def name(self) -> str:
        return "torchao " + _scales(self.bits, self.group)

    @property
    def curve(self) -> object:
        return self.family, self.group

    def _code(self, table: Tensor, weighting: Weighting, seed: int) -> tuple[Tensor, int]:
        with _quiet("torchao", "torch.utils._pytree"):
            from torchao.quantization import IntxWeightOnlyConfig, quantize_
            from torchao.quantization.granularity import PerAxis, PerGroup
        unit = unit_of(table)
        layer = nn.Embedding(*table.shape, _weight=table / unit)
        config: Any = IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, f"int{self.bits}"),
            granularity=PerAxis(0) if self.group is None else PerGroup(self.group),
            scale_dtype=torch.float16,
        )
        quantize_(layer, config, filter_fn=lambda module, name: True)
        held: Any = layer.weight
        beside = 2 * held.scale.numel() + UNIT_BYTES
        if bool((held.zero_point != 0).any()):  # symmetric ranges have none
            beside += held.zero_point.numel()
        found = held.dequantize().detach().to(torch.float32) * unit
        return found, -(-table.numel() * self.bits // 8) + beside


@dataclass(frozen=True)
class Factors(Baseline):
    """The factors of ``family`` (of ``FACTORS``) of the largest rank that ``bits`` per number hold in float16.

    SVD under row weights is FWSVD's; MESSI and Robust SVD were published without weights and take them here.

    >>> found = Factors("SVD", 8.5).code(torch.randn(200, 8, generator=torch.Generator().manual_seed(0)))
    >>> found.nbytes == 2 * 4 * (200 + 8)
    True
    """

    family: str
    bits: float
    accepts: ClassVar[frozenset[str]] = frozenset({"rows"})

    @property
    def name(self) -> str:
        return f"{self.family}, {self.bits:g} bits"

    def _code(self, table: Tensor, weighting: Weighting, seed: int) -> tuple[Tensor, int]:
        problem = Problem(TensorRows(table), int(self.bits * table.numel() / 8), 2, weighting, seed=seed)
        matrix = FACTORS[self.family]().fit(problem).matrix.to(torch.float16)
        nbytes = matrix.nbytes
        with torch.no_grad():
            found = matrix.to(torch.float32).dense()
        if not bool(torch.isfinite(found).all()):
            raise KflatsError(f"float16 cannot hold the factors of {self.family}")
        return found, nbytes


@dataclass(frozen=True)
class Transformed(Baseline):
    """``Recipe(SVD(), codec=Transform())`` in at most ``bits`` per number, as the stream that a file holds."""

    bits: float
    family: ClassVar[str] = "kflats Transform"
    accepts: ClassVar[frozenset[str]] = frozenset({"rows", "right"})

    @property
    def name(self) -> str:
        return f"{self.family}, {self.bits:g} bits"

    def _code(self, table: Tensor, weighting: Weighting, seed: int) -> tuple[Tensor, int]:
        problem = Problem(TensorRows(table), int(self.bits * table.numel() / 8), table.element_size(), weighting)
        found = Recipe(SVD(), codec=Transform()).encode(problem, table.dtype)
        with torch.no_grad():
            return found.matrix.dense(), found.nbytes


@contextmanager
def _quiet(*loggers: str) -> Iterator[None]:
    """torchao remarks on every kernel that this machine cannot run."""
    known = [logging.getLogger(name) for name in loggers]
    before = [logger.level for logger in known]
    for logger in known:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(known, before, strict=True):
            logger.setLevel(level)
