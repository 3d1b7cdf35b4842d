"""Question: what limits a compression by 4 and 16 workers?

One process compresses all-MiniLM-L6-v2 to 8 MB (no texts, no proof, one thread) and notes the seconds of each task and
the bytes of each sum. From these, times by arithmetic: what no worker shares, and for each stage the time until its
last task is done, where tasks that depend on who is free go to the first free worker and blocks of measuring go by
turns; a sum of b bytes reaches N workers in log2(N) b / 1.25e9 seconds (10 Gbit/s). "bound" is what infinitely many
workers would take: what is not shared, and the longest task of each stage.

The arithmetic is checked by a replay: N threads run kflats' own code of workers, with sleeps in place of tasks.

    python benchmarks/workers_limit.py --write benchmarks/results/workers_limit.md
"""

from __future__ import annotations

import itertools
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from _common import arguments, publish, table
from torch import Tensor

from kflats import compress_folder
from kflats.common.workers import Packed, Workers
from kflats.demo import packaged_model

BANDWIDTH = 1.25e9
"""Bytes a second between two machines."""
Result = TypeVar("Result")


@dataclass
class Stage:
    """Tasks that workers divide.

    Args:
        name: for the table. by_turns: worker i has the tasks i, i + N, ...; else whoever is free first has the next.
        seconds, nbytes: of each task, in the order in which they begin: its time, and what passes to all others.
    """

    name: str
    by_turns: bool
    seconds: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)

    def passing(self, count: int, index: int) -> float:
        """Seconds in which what a task made reaches all of ``count`` workers."""
        return math.log2(count) * self.nbytes[index] / BANDWIDTH

    def time(self, count: int) -> float:
        """Seconds until ``count`` workers have done all tasks."""
        if self.by_turns:
            rounds = [range(a, min(a + count, len(self.seconds))) for a in range(0, len(self.seconds), count)]
            return sum(max(self.seconds[i] for i in r) + sum(self.passing(count, i) for i in r) for r in rounds)
        free = [0.0] * count
        for seconds in self.seconds:
            first = free.index(min(free))
            free[first] += seconds
        return max(free)


class Recording(Workers):
    """A process alone that notes what its tasks take."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: list[Stage] = []

    def divided(
        self, tasks: Sequence[str], work: Callable[[int], Result], packed: Packed[Result], order: Sequence[int] = ()
    ) -> list[Result]:
        stage = self._noted(tasks, by_turns=False)

        def timed(index: int) -> Result:
            began = time.perf_counter()
            made = work(index)
            stage.seconds.append(time.perf_counter() - began)
            stage.nbytes.append(0)
            return made

        return super().divided(tasks, timed, packed, order)

    def in_turn(
        self, tasks: Sequence[str], work: Callable[[int], tuple[dict[str, Tensor], str]]
    ) -> Iterator[tuple[dict[str, Tensor], str]]:
        stage = self._noted(tasks, by_turns=True)

        def timed(index: int) -> tuple[dict[str, Tensor], str]:
            began = time.perf_counter()
            made = work(index)
            stage.seconds.append(time.perf_counter() - began)
            stage.nbytes.append(sum(tensor.nbytes for tensor in made[0].values()))
            return made

        return super().in_turn(tasks, timed)

    def _noted(self, tasks: Sequence[str], *, by_turns: bool) -> Stage:
        self.stages.append(Stage(tasks[0].split()[0] if tasks else "-", by_turns))
        return self.stages[-1]


def recorded(size: str) -> tuple[list[Stage], float]:
    """The stages of one compression, and the seconds of it that no task takes."""
    workers, began = Recording(), time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        compress_folder(packaged_model(), Path(place) / "out", size=size, proof=False, quiet=True, workers=workers)
    seconds = time.perf_counter() - began
    stages = [stage for stage in workers.stages if len(stage.seconds) > 1]
    return stages, seconds - sum(sum(stage.seconds) for stage in stages)


def replayed(stages: Sequence[Stage], count: int) -> float:
    """Seconds in which ``count`` threads carry out the stages, asleep in place of each task and of what passes."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    store, meeting = HashStore(), threading.Barrier(count)

    def one(rank: int) -> None:
        workers = Workers(rank, count, store)
        for stage in stages:
            tasks = [f"{stage.name} {i}" for i in range(len(stage.seconds))]
            if stage.by_turns:
                workers.broadcast = _asleep_together(stage, count, meeting)
                for _ in workers.in_turn(tasks, partial(_summed, stage)):
                    pass
            else:
                workers.divided(tasks, partial(_asleep, stage), Packed(str, lambda _, text: int(text)))

    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(one, range(count)))
    return time.perf_counter() - began


def _asleep(stage: Stage, index: int) -> int:
    time.sleep(stage.seconds[index])
    return index


def _summed(stage: Stage, index: int) -> tuple[dict[str, Tensor], str]:
    return {"sum": torch.tensor(_asleep(stage, index))}, ""


def _asleep_together(stage: Stage, count: int, meeting: threading.Barrier) -> Callable[[Tensor, int], object]:
    """A broadcast that takes its time and sends nothing; all workers take part in each, one for each task."""
    sent = itertools.count()

    def broadcast(_: Tensor, __: int) -> None:
        meeting.wait()
        time.sleep(stage.passing(count, next(sent)))

    return broadcast


def main() -> None:
    options = arguments(__doc__, size="8MB", counts="1,2,4,16")
    torch.set_num_threads(1)
    counts = list(map(int, options.counts.split(",")))
    stages, alone = recorded(options.size)
    lines: list[dict[str, object]] = []
    for stage in stages:
        line: dict[str, object] = {"stage": stage.name, "tasks": len(stage.seconds)}
        line |= {"longest": f"{max(stage.seconds):.1f} s", "passes": f"{sum(stage.nbytes) / 1e6:.0f} MB"}
        lines.append(line | {f"{n} workers": f"{stage.time(n):.1f} s" for n in counts} | {"bound": line["longest"]})
    rest: dict[str, object] = {"stage": "not divided", "tasks": "-", "longest": "-", "passes": "-"}
    lines.append(rest | {f"{n} workers": f"{alone:.1f} s" for n in counts} | {"bound": f"{alone:.1f} s"})
    totals = {n: alone + sum(stage.time(n) for stage in stages) for n in counts}
    least = alone + sum(max(stage.seconds) for stage in stages)
    whole: dict[str, object] = {"stage": "all", "tasks": "-", "longest": "-", "passes": "-"}
    lines.append(whole | {f"{n} workers": f"{totals[n]:.1f} s" for n in counts} | {"bound": f"{least:.1f} s"})
    faster = {f"{n} workers": f"{totals[counts[0]] / totals[n]:.2f}" for n in counts}
    lines.append(whole | {"stage": "speed-up"} | faster | {"bound": f"{totals[counts[0]] / least:.2f}"})
    again = {f"{n} workers": f"{alone + replayed(stages, n):.1f} s" for n in counts if n > 1}
    lines.append(whole | {"stage": "all, by the replay", f"{counts[0]} workers": "-"} | again | {"bound": "-"})
    publish("What limits a compression by several workers", table(lines), options)


if __name__ == "__main__":
    main()
