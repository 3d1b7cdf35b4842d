"""How long models take: the one module that times them.

Contestants run in turns, and every other turn is in reverse order, so a machine that warms up or is shared slows all of
them alike. A latency is a median over turns; its ratio to the first contestant's is taken turn by turn.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.evaluation.encoding import device_of
from kflats.evaluation.running import run
from kflats.evaluation.samples import collate, drawn_samples, medium_of

Batch: TypeAlias = Mapping[str, Tensor]
Run: TypeAlias = Callable[[Batch], object]

SHAPES = ((1, 20), (32, 30), (32, 128))
"""Texts of a batch, and tokens of each: a query, sentences, and paragraphs."""
DRAWN_SHAPES = ((1, 0), (8, 0))
"""Images or sounds of a batch."""

_FEWEST = 3  # turns, however long they take
_RESAMPLES = 2000


@dataclass(frozen=True)
class Latency:
    """The time of one batch through one contestant.

    Args:
        name: of the contestant.
        ms: the median over turns, in milliseconds.
        ratio: the median over turns of this time / the first contestant's in the same turn; ``low`` and ``high`` are
            its 95 % bootstrap interval. An interval that contains 1 shows no difference.
        turns: counted turns.
        samples, tokens: the shape of the batch. threads: of torch.
    """

    name: str
    ms: float
    ratio: float
    low: float
    high: float
    turns: int
    samples: int
    tokens: int
    threads: int


class Contestant(Protocol):
    """A way to run one model. It is built only when its turn comes."""

    @property
    def name(self) -> str:
        """As it stands in tables."""
        ...

    def build(self) -> Run:
        """A function of a batch; raises KflatsError with the reason where this machine cannot run it."""
        ...


@dataclass(frozen=True)
class TorchModel:
    """A model as it is, or a copy of it in another type of numbers."""

    name: str
    model: nn.Module
    dtype: torch.dtype | None = None

    def build(self) -> Run:
        """``model(**batch)`` in eval mode."""
        if self.dtype is None:
            return partial(run, self.model.eval())
        model, dtype = copy.deepcopy(self.model).to(self.dtype).eval(), self.dtype
        return lambda batch: run(model, {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()})


def latencies(
    contestants: Sequence[Contestant],
    model: nn.Module,
    *,
    shapes: Sequence[tuple[int, int]] | None = None,
    threads: int | None = None,
    turns: int = 20,
    seconds: float = math.inf,
) -> tuple[list[Latency], dict[str, str]]:
    """Time contestants on drawn inputs of every shape.

    Args:
        contestants: the first is what the others are compared with.
        model: whose inputs are drawn; of two vocabularies that of the smaller one.
        shapes: samples of a batch, and tokens of each (fewer if the model has fewer positions). None: ``SHAPES``;
            for images and sounds, whose size the model decides, ``DRAWN_SHAPES``.
        threads: of torch, until all is timed; None: as they are.
        turns: counted turns of a shape; fewer after ``seconds``, but at least three.

    Returns:
        A latency for each shape and contestant; and by name why others cannot run here.

    Raises:
        KflatsError: no turns. What the first contestant raises.
    """
    reasons: dict[str, str] = {}
    timed: list[Latency] = []
    if shapes is None:
        shapes = SHAPES if medium_of(model) == "input_ids" else DRAWN_SHAPES
    with using_threads(threads), torch.inference_mode():
        inputs = [collate(drawn_samples(model, *shape), 0, device_of(model)) for shape in shapes]
        runs: dict[str, Run] = {}
        for one in contestants:
            try:
                run_one = one.build()
                run_one(inputs[0])
                runs[one.name] = run_one
            except Exception as error:  # compilers and runtimes raise many kinds
                if not runs:
                    raise
                reasons[one.name] = next(iter(str(error).strip().splitlines()), type(error).__name__)
        for (samples, _), batch in zip(shapes, inputs, strict=True):
            tokens = batch["input_ids"].shape[1] if "input_ids" in batch else 0
            ready = [partial(each, batch) for each in runs.values()]
            times = take_turns(ready, turns, device_of(model), seconds=seconds)
            timed += beside_the_first(dict(zip(runs, times, strict=True)), samples, tokens)
    return timed, reasons


def take_turns(
    runs: Sequence[Callable[[], object]],
    turns: int,
    device: torch.device,
    *,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Seconds of every run in every turn, ``[run][turn]``; every other turn is in reverse order.

    The first turn is not counted, unless it takes longer than ``seconds``. After ``seconds`` no turn begins, if there
    are three.

    >>> times = take_turns([lambda: None, lambda: None], 3, torch.device("cpu"))
    >>> [len(t) for t in times]
    [3, 3]
    """
    if turns < 1 or not runs:
        raise KflatsError(f"{turns} turns of {len(runs)} runs give no time", hint="at least one of each")
    times: list[list[float]] = [[] for _ in runs]
    order, began = list(range(len(runs))), clock()
    for turn in range(turns + 1):
        counted = len(times[0])
        if counted == turns or (counted >= _FEWEST and clock() - began > seconds):
            break
        for which in order if turn % 2 == 0 else order[::-1]:
            _settle(device)
            start = clock()
            runs[which]()
            _settle(device)
            times[which].append(clock() - start)
        if turn == 0 and clock() - began <= seconds:
            times = [[] for _ in runs]
    return times


def beside_the_first(times: Mapping[str, Sequence[float]], samples: int, tokens: int) -> list[Latency]:
    """The latencies of contestants by their seconds in every turn, and a bootstrap interval of each ratio."""
    first, *_ = (torch.tensor(t, dtype=torch.float64) for t in times.values())
    draws = torch.randint(len(first), (_RESAMPLES, len(first)), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    made = []
    for name, own in times.items():
        ratios = torch.tensor(own, dtype=torch.float64) / first
        low, high = ratios[draws].quantile(0.5, dim=1).quantile(ends).tolist()
        ms, ratio = 1000 * statistics.median(own), float(ratios.quantile(0.5))
        made.append(Latency(name, ms, ratio, low, high, len(own), samples, tokens, torch.get_num_threads()))
    return made


@contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """``count`` threads of torch inside; afterwards as many as before. None changes nothing."""
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
