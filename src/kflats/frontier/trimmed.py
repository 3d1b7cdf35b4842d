"""Vocabulary trimming as a rival: fewer rows, and another segmentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kflats.swap.surgery import Weight, dense_weight, find_weight
from kflats.trim.trimming import trim

_HALF = 16


@dataclass(frozen=True)
class Smaller:
    """A trimmed model, its tokenizer, and the bytes of its table in float16."""

    model: Any
    tokenizer: Any
    nbytes: int


@dataclass(frozen=True)
class Trim:
    """The commonest tokens whose rows in float16 take ``bits`` per number of the whole table.

    >>> Trim(4.0).kept((30522, 384))
    7630
    """

    bits: float

    @property
    def name(self) -> str:
        return f"{self.family}, {self.bits:g} bits"

    @property
    def family(self) -> str:
        return "trimmed vocabulary"

    @property
    def weighs(self) -> bool:
        return False

    def kept(self, shape: tuple[int, int]) -> int:
        """How many rows."""
        return int(shape[0] * self.bits / _HALF)

    def make(
        self, model: nn.Module, weight: Weight, tokenizer: Any, texts: Sequence[str] | None, judged: Sequence[str]
    ) -> Smaller:
        """The trimmed model; ``model`` stays as it is.

        Raises:
            KflatsError: as ``kflats.trim``, for a size below what spelling alone needs, say.
        """
        made = trim(model, tokenizer, keep=max(1, self.kept(weight.shape)), texts=texts, judged=judged)
        table = dense_weight(made.model, find_weight(made.model, weight.name))
        with torch.no_grad():
            table.copy_(table.to(torch.float16))
        return Smaller(made.model, made.tokenizer, 2 * table.numel())
