"""Rivals that round every number by itself: half precision, integers with scales, a random rotation before."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kflats.errors import KflatsError
from kflats.frontier.rivals.coded import UNIT_BYTES, Coded, checked, unit_of
from kflats.numerics.coding.absmax import absmax_code
from kflats.numerics.coding.rotation import rotation_code


@dataclass(frozen=True)
class Half:
    """float16, number by number; what kflats' ``Recipe(Dense(), codec=Float("float16"))`` stores, by another name.

    >>> Half().code(torch.tensor([[1.0, 2.0]])).nbytes
    4
    """

    name: str = "fp16"

    @property
    def family(self) -> str:
        return self.name

    @property
    def weighs(self) -> bool:
        return False

    def code(self, table: Tensor, seed: int = 0, *, weights: Tensor | None = None) -> Coded:
        """Raises KflatsError for numbers beyond float16's range, as for NaN and weights."""
        given = checked(self, table, weights)
        found = given.to(torch.float16)
        if not bool(torch.isfinite(found).all()):
            raise KflatsError("the table has numbers that float16 cannot hold", hint="another rival")
        return Coded(self.name, found.to(torch.float32), 2 * given.numel())


@dataclass(frozen=True)
class Absmax:
    """Whole numbers of 8 or 4 bits times a float16 scale a row, or a ``group`` of columns (``numerics.coding.absmax``).

    >>> Absmax(4, 2).code(torch.tensor([[7.0, 1.0, 14.0, -4.0]])).table.tolist()
    [[7.0, 1.0, 14.0, -4.0]]
    """

    bits: int
    group: int | None = None

    @property
    def name(self) -> str:
        return f"int{self.bits}, " + ("a scale a row" if self.group is None else f"a scale for {self.group}")

    @property
    def family(self) -> str:
        return "absmax rows" if self.group is None else "absmax groups"

    @property
    def weighs(self) -> bool:
        return False

    def code(self, table: Tensor, seed: int = 0, *, weights: Tensor | None = None) -> Coded:
        """Raises KflatsError for other bits and groups."""
        found = absmax_code(checked(self, table, weights), self.bits, self.group)
        return Coded(self.name, found.dense(), -(-found.stored_bits // 8) + UNIT_BYTES)


@dataclass(frozen=True)
class Rotated:
    """A random rotation, then the best fixed quantizer for a Gaussian: 1 to 8 ``bits`` (``numerics.coding.rotation``).

    >>> Rotated(2).name
    'rotation, 2 bits'
    """

    bits: int

    @property
    def name(self) -> str:
        return f"rotation, {self.bits} bit" + ("s" if self.bits > 1 else "")

    @property
    def family(self) -> str:
        return "rotation"

    @property
    def weighs(self) -> bool:
        return False

    def code(self, table: Tensor, seed: int = 0, *, weights: Tensor | None = None) -> Coded:
        """The rotation is drawn from ``seed``, and stored."""
        found = rotation_code(checked(self, table, weights), self.bits, seed=seed)
        return Coded(self.name, found.dense(), -(-found.stored_bits // 8) + UNIT_BYTES)


@dataclass(frozen=True)
class TorchAO:
    """torchao's weight-only integers for an embedding: ``quantize_`` with ``IntxWeightOnlyConfig``, scales in float16.

    Args:
        bits: 1 to 8; 4 and 8 are what people use.
        group: columns that share a scale; None: a scale a row. It divides d.

    Needs the extra "rivals". torchao holds 4 bits in a byte each in memory; here they count as the 4 that a file needs.
    """

    bits: int
    group: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in range(1, 9):
            raise KflatsError(f"torchao has no integers of {self.bits!r} bits", hint="1 to 8")

    @property
    def name(self) -> str:
        return f"torchao int{self.bits}, " + ("a scale a row" if self.group is None else f"a scale for {self.group}")

    @property
    def family(self) -> str:
        return "torchao"

    @property
    def weighs(self) -> bool:
        return False

    def code(self, table: Tensor, seed: int = 0, *, weights: Tensor | None = None) -> Coded:
        """Raises KflatsError without torchao, and where groups do not divide the columns."""
        given = checked(self, table, weights)
        n, d = given.shape
        if self.group is not None and (self.group < 1 or d % self.group):
            raise KflatsError(f"groups of {self.group} do not divide {d} columns", hint="a divisor")
        with _quiet("torchao", "torch.utils._pytree"):
            try:
                from torchao.quantization import IntxWeightOnlyConfig, quantize_
                from torchao.quantization.granularity import PerAxis, PerGroup
            except ImportError as error:
                raise KflatsError("this rival needs torchao", hint="pip install 'kflats[rivals]'") from error
        unit = unit_of(given)
        layer = nn.Embedding(n, d, _weight=given / unit)
        config: Any = IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, f"int{self.bits}"),
            granularity=PerAxis(0) if self.group is None else PerGroup(self.group),
            scale_dtype=torch.float16,
        )
        quantize_(layer, config, filter_fn=lambda module, name: True)
        held: Any = layer.weight
        found = held.dequantize().detach().to(torch.float32) * unit
        beside = 2 * held.scale.numel() + UNIT_BYTES
        if bool((held.zero_point != 0).any()):  # symmetric ranges have none
            beside += held.zero_point.numel()
        return Coded(self.name, found, -(-n * d * self.bits // 8) + beside)


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
