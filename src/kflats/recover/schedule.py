"""How long and how fast a recovery trains."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kflats.common.errors import KflatsError
from kflats.recover.trainable import CHOICES


@dataclass(frozen=True)
class Schedule:
    """Settings of the optimisation, FWSVD's by default (Hsu et al., ICLR 2022, section 4.2).

    Args:
        train: which parameters, see ``kflats.recover.trainable.only``.
        lr: Adam's first step size; it falls linearly to 0.
        batch: examples a step.
        epochs: at most.
        patience: epochs in a row that may be no better; None: all run.
        seed: of order and dropout.

    Raises:
        KflatsError: a value out of range.

    >>> Schedule().lr
    2e-05
    """

    train: str = "all"
    lr: float = 2e-5
    batch: int = 32
    epochs: int = 3
    patience: int | None = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.train not in CHOICES:
            raise KflatsError(f"train={self.train!r} is not known", hint=f"one of: {', '.join(CHOICES)}")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise KflatsError(f"a learning rate of {self.lr} does not train", hint="for example 2e-5")
        for name in ("batch", "epochs", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise KflatsError(f"{name}={value} is too small", hint="at least 1")
        if not 0 <= self.seed < 2**31:
            raise KflatsError(f"seed={self.seed} is out of range", hint="0 to 2147483647")
