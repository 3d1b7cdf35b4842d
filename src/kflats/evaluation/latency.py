"""Timing models turn by turn: on a shared or warming machine what slows one must slow the others alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kflats.common.errors import KflatsError

_WARMING = 2  # turns that are not counted
_RESAMPLES = 2000


@dataclass(frozen=True)
class Latency:
    """Time of one batch through both models, in pairs run turn by turn.

    ``ratio`` is the median over pairs of compressed / original, ``low`` and ``high`` its 95 % bootstrap
    interval. An interval that holds 1 shows no difference.
    """

    original_ms: float
    compressed_ms: float
    ratio: float
    low: float
    high: float
    pairs: int
    batch: int
    tokens: int


def take_turns(runs: Sequence[Callable[[], object]], turns: int, device: torch.device) -> list[list[float]]:
    """Seconds of every run in every turn, ``[run][turn]``; in every other turn the order is reversed.

    >>> times = take_turns([lambda: None, lambda: None], 3, torch.device("cpu"))
    >>> [len(t) for t in times]
    [3, 3]
    """
    if turns < 1 or not runs:
        raise KflatsError(f"{turns} turns of {len(runs)} runs give no time", hint="at least one of each")
    times: list[list[float]] = [[] for _ in runs]
    order = list(range(len(runs)))
    for turn in range(-_WARMING, turns):
        for which in order if turn % 2 == 0 else order[::-1]:
            _settle(device)
            start = time.perf_counter()
            runs[which]()
            _settle(device)
            if turn >= 0:
                times[which].append(time.perf_counter() - start)
    return times


def paired(before: Sequence[float], after: Sequence[float], *, batch: int, tokens: int) -> Latency:
    """Seconds of two models, turn by turn, as medians and a bootstrap interval of their ratio."""
    first, second = (torch.tensor(t, dtype=torch.float64) for t in (before, after))
    ratios, pairs = second / first, len(before)
    draws = torch.randint(pairs, (_RESAMPLES, pairs), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = ratios[draws].quantile(0.5, dim=1).quantile(ends).tolist()
    return Latency(
        original_ms=1000 * float(first.quantile(0.5)),
        compressed_ms=1000 * float(second.quantile(0.5)),
        ratio=float(ratios.quantile(0.5)),
        low=low,
        high=high,
        pairs=pairs,
        batch=batch,
        tokens=tokens,
    )


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
