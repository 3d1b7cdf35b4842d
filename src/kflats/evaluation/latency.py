"""How long models take: the one module that times them.

Contestants run in turns, and every other turn is in reverse order, so a machine that warms up or is shared slows all of
them alike. A latency is a median over turns; its ratio to the first contestant's is taken turn by turn. A quick model
is called several times in its turn, as a service calls it: caches then hold what it reads, and not what others read.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError, first_line
from kflats.evaluation.running import collate, device_of, drawn_samples, modality_of, run

TensorBatch: TypeAlias = Mapping[str, Tensor]
Run: TypeAlias = Callable[[TensorBatch], object]

SHAPES = ((1, 20), (32, 30), (32, 128))
"""Texts of a batch, and tokens of each: a query, sentences, and paragraphs."""
DRAWN_SHAPES = ((1, 0), (8, 0))
"""Images or sounds of a batch."""

_FEWEST = 3  # turns, however long they take
_STRETCH = 0.05  # seconds for which a quick contestant is called in its turn
_RESAMPLES = 2000
_ENDS = torch.tensor([0.025, 0.975], dtype=torch.float64)
_CPU = torch.device("cpu")


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
    turns: int = 20,
    seconds: float = math.inf,
    text: Tensor | None = None,
) -> tuple[list[Latency], dict[str, str]]:
    """Time contestants on inputs of every shape, others in each call: lookups keep rows of tokens that were read.

    Args:
        contestants: the first is what the others are compared with.
        model: whose inputs are drawn; of two vocabularies that of the smaller one.
        shapes: samples of a batch, and tokens of each (fewer if the model has fewer positions). None: ``SHAPES``;
            for images and sounds, whose size the model decides, ``DRAWN_SHAPES``.
        turns: counted turns of a shape; fewer after ``seconds``, but at least three.
        text: (t,) token ids of running text: batches are its next tokens, from the begin again after its end. None:
            ids are drawn uniformly, of which far fewer repeat than of a text.

    Returns:
        A latency for each shape and contestant; and by name, shape or both ("bfloat16, 32 x 128") why others cannot run
        here. Nothing is timed at a shape that the first contestant cannot run, nor of one that cannot run the first
        shape.
    """
    runs: dict[str, Run] = {}
    reasons: dict[str, str] = {}
    timed: list[Latency] = []
    device = device_of(model)
    if shapes is None:
        shapes = SHAPES if modality_of(model) == "input_ids" else DRAWN_SHAPES
    with torch.inference_mode():
        inputs = [_Inputs(model, shape, text, device) for shape in shapes]
        for one in contestants:
            with _or_reason(one.name, reasons):
                ready = one.build()
                ready(inputs[0].batch)
                runs[one.name] = ready
            if not runs:
                return [], reasons  # nothing to compare with
        for given in inputs:
            samples, tokens = given.shape
            where, able = f"{samples} x {tokens}", {name: partial(given.through, each) for name, each in runs.items()}
            while next(iter(runs)) in able:
                errors: dict[str, str] = {}
                noted = {name: partial(_noted, name, each, errors) for name, each in able.items()}
                with suppress(_NotRunError):
                    timed += take_turns(
                        *(noted, turns, given.shape, device), seconds=seconds, stretch=_STRETCH, prepare=given.turn_to
                    )
                    break
                for name, why in errors.items():
                    del able[name]
                    reasons[where if name == next(iter(runs)) else f"{name}, {where}"] = why
    return timed, reasons


class _Inputs:
    """The batches of one shape, of which ``batch`` is the present one."""

    def __init__(self, model: nn.Module, shape: tuple[int, int], text: Tensor | None, device: torch.device) -> None:
        self._model, self._drawn, self._text, self._device = model, shape, text, device
        self.turn_to(0)
        ids = self.batch.get("input_ids")
        self.shape = shape[0], 0 if ids is None else ids.shape[1]

    def turn_to(self, number: int) -> None:
        """Make the batch of this number."""
        self.batch = collate(drawn_samples(self._model, *self._drawn, seed=number), 0, self._device)
        if self._text is not None and (ids := self.batch.get("input_ids")) is not None:
            places = (torch.arange(ids.numel()) + number * ids.numel()) % len(self._text)
            read = self._text[places].view(ids.shape).to(ids)
            # Classifiers of encoder-decoders read the one end of each text.
            self.batch["input_ids"] = torch.cat([read[:, :-1], ids[:, -1:]], 1)

    def through(self, run: Run) -> object:
        """What ``run`` makes of the batch."""
        return run(self.batch)


class _NotRunError(Exception):
    """A contestant cannot run a batch."""


def _noted(name: str, run: Callable[[], object], errors: dict[str, str]) -> None:
    """Run it; its error goes into ``errors`` as text, so that what it holds is free before others are timed again."""
    with _or_reason(name, errors):
        run()
    if name in errors:
        raise _NotRunError


def take_turns(
    runs: Mapping[str, Callable[[], object]],
    turns: int,
    shape: tuple[int, int] = (0, 0),
    device: torch.device = _CPU,
    *,
    seconds: float = math.inf,
    stretch: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    prepare: Callable[[int], object] = lambda number: None,
) -> list[Latency]:
    """The latency of every run; every other turn is in reverse order.

    The first turn is not counted, unless it takes longer than ``seconds``. After ``seconds`` no turn begins, if there
    are three.

    Args:
        runs: by name; the first is what the others are compared with.
        turns: counted turns. shape: samples and tokens of a batch, for the result.
        stretch: in seconds. In each turn a run is called until it has taken so long, and at least once; its time is
            the mean of its calls without the first, if there are others.
        prepare: called before each call, untimed, with a number: all runs have the same ones in a turn, from its first
            on, and other ones in each turn.

    Raises:
        KflatsError: no turns, or no runs.

    >>> [one.turns for one in take_turns({"a": lambda: None, "b": lambda: None}, 3)]
    [3, 3]
    """
    if turns < 1 or not runs:
        raise KflatsError(f"{turns} turns of {len(runs)} runs give no time", hint="at least one of each")
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, number, began = list(runs), 0, clock()
    for turn in range(turns + 1):
        counted = len(times[order[0]])
        if counted == turns or (counted >= _FEWEST and clock() - began > seconds):
            break
        most = 0
        for name in order:
            calls: list[float] = []
            while not calls or sum(calls) < stretch:
                prepare(number + len(calls))
                _settle(device)
                start = clock()
                runs[name]()
                _settle(device)
                calls.append(clock() - start)
            times[name].append(statistics.fmean(calls[1:] or calls))
            most = max(most, len(calls))
        number += most
        order.reverse()
        if turn == 0 and clock() - began <= seconds:
            times = {name: [] for name in runs}
    first, count = torch.tensor(times[next(iter(runs))]).double(), len(times[order[0]])
    draws = torch.randint(count, (_RESAMPLES, count), generator=torch.Generator().manual_seed(0))
    made = []
    for name, own in times.items():
        ratios = torch.tensor(own).double() / first
        low, high = ratios[draws].quantile(0.5, dim=1).quantile(_ENDS).tolist()
        ms, ratio = 1000 * statistics.median(own), float(ratios.quantile(0.5))
        made.append(Latency(name, ms, ratio, low, high, count, *shape, torch.get_num_threads()))
    return made


@contextmanager
def _or_reason(name: str, reasons: dict[str, str]) -> Iterator[None]:
    """An error inside becomes the reason of ``name``: models, compilers and runtimes raise many kinds."""
    try:
        yield
    except Exception as error:
        reasons[name] = first_line(error)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
