"""Question: what limits a compression by 4 and 16 workers?

One process compresses all-MiniLM-L6-v2 to 8 MB (no texts, no proof, one thread) and notes the CPU seconds of each task
(those by the clock, where the machine does nothing else) and the bytes of each sum; once for each number of workers, as
that decides how many small weights one worker encodes together. From these, times by arithmetic:
what no worker shares, and for each stage the time until its last task is done, where tasks that depend on who is free
go to the first free worker and blocks of measuring go by turns. Sums of b bytes of a block reach the first worker in
b / 1.25e9 seconds (10 Gbit/s), while the others do their next blocks; the means are a file of b bytes, which N - 1
workers read in (N - 1) b / 1.25e9. The last weight is fitted when the sizes of all others are known. "bound" is what
infinitely many workers would take: what is not shared, and the longest task of each stage. "tasks" and "longest" are
those of the first and of the last number of workers, where they differ.

The arithmetic is checked by a replay: N threads run kflats' own code of workers, with sleeps in place of tasks.

    python benchmarks/workers_limit.py --write benchmarks/results/workers_limit.md
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from _common import arguments, publish, table
from torch import Tensor

from kflats import compress_folder
from kflats.common.workers import Packed, Workers
from kflats.compress import fitting
from kflats.demo import packaged_model

BANDWIDTH = 1.25e9
"""Bytes a second between two machines."""
_IMPORTS = time.process_time()  # seconds that each worker takes before it begins
Result = TypeVar("Result")


@dataclass
class Stage:
    """Tasks that workers divide.

    Args:
        name: for the table. by_turns: worker i has the tasks i, i + N, ...; else whoever is free first has the next.
        seconds: of each task, in the order in which they begin. nbytes: what each sends.
    """

    name: str
    by_turns: bool
    seconds: list[float] = field(default_factory=list)
    nbytes: int = 0

    @property
    def passing(self) -> float:
        """Seconds in which what a task made reaches the first worker."""
        return self.nbytes / BANDWIDTH

    def time(self, count: int) -> float:
        """Seconds until ``count`` workers have done all tasks."""
        if self.by_turns:
            return self._gathered(count)
        free = [0.0] * count
        for seconds in self.seconds:
            first = free.index(min(free))
            free[first] += seconds
        return max(free)

    def _gathered(self, count: int) -> float:
        """As ``Workers.gathered``: the first worker does its next task before it takes those of others."""
        clock, ahead, free = 0.0, -1, [0.0] * count
        got: dict[int, float] = {}
        for index in range(len(self.seconds)):
            following = -(-index // count) * count
            if ahead < following < len(self.seconds):
                clock, ahead = clock + self.seconds[following], following
            worker = index % count
            if worker:
                free[worker] = max(free[worker] + self.seconds[index], got.get(index - count, 0.0))
                clock = got[index] = max(clock, free[worker]) + self.passing
        return clock


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
            began = time.process_time()
            made = work(index)
            stage.seconds.append(time.process_time() - began)
            return made

        return super().divided(tasks, timed, packed, order)

    def gathered(
        self, tasks: Sequence[str], work: Callable[[int], tuple[dict[str, Tensor], str]]
    ) -> Iterator[tuple[dict[str, Tensor], str]]:
        stage = self._noted(tasks, by_turns=True)

        def timed(index: int) -> tuple[dict[str, Tensor], str]:
            began = time.process_time()
            made = work(index)
            stage.seconds.append(time.process_time() - began)
            stage.nbytes = sum(tensor.nbytes for tensor in made[0].values())
            return made

        return super().gathered(tasks, timed)

    def _noted(self, tasks: Sequence[str], *, by_turns: bool) -> Stage:
        self.stages.append(Stage(tasks[0].split()[0] if tasks else "-", by_turns))
        return self.stages[-1]


@dataclass(frozen=True)
class Recorded:
    """The ``stages`` of one compression, whose tasks are those of ``count`` workers, the seconds of it that no task
    takes, ``alone``, and the bytes of the ``means``."""

    count: int
    stages: list[Stage]
    alone: float
    means: int

    @property
    def undivided(self) -> float:
        """Seconds that no worker shares."""
        return self.alone + (self.count - 1) * self.means / BANDWIDTH

    @property
    def total(self) -> float:
        """Seconds of all workers together."""
        return self.undivided + sum(stage.time(self.count) for stage in self.stages)


def recorded(size: str, count: int) -> Recorded:
    """Compress with the tasks of ``count`` workers."""
    workers, began = Recording(), time.process_time()
    grouped = fitting._groups
    with (
        tempfile.TemporaryDirectory() as place,
        patch.object(fitting, "_groups", lambda decisions, workers: grouped(decisions, count)),
    ):
        kept = Path(place) / "statistics"
        settings: dict[str, Any] = {"proof": False, "quiet": True, "workers": workers, "keep_statistics": kept}
        compress_folder(packaged_model(), Path(place) / "out", size=size, **settings)
        means = kept.stat().st_size
    stages = [stage for stage in workers.stages if stage.seconds]
    alone = time.process_time() - began + _IMPORTS - sum(sum(stage.seconds) for stage in stages)
    return Recorded(count, stages, alone, means)


def replayed(stages: Sequence[Stage], count: int) -> float:
    """Seconds in which ``count`` threads carry out the stages, asleep in place of each task and of what passes."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    store = HashStore()

    def one(rank: int) -> None:
        workers = Workers(rank, count, store)
        for stage in stages:
            tasks = [f"{stage.name} {i}" for i in range(len(stage.seconds))]
            if stage.by_turns:
                workers.gather = lambda tensor, rank, stage=stage: time.sleep(stage.passing)
                for _ in workers.gathered(tasks, partial(_summed, stage)):
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


def main() -> None:
    options = arguments(__doc__, size="8MB", counts="1,2,4,16")
    torch.set_num_threads(1)
    made = [recorded(options.size, int(count)) for count in options.counts.split(",")]
    assert len({tuple(stage.name for stage in one.stages) for one in made}) == 1
    lines: list[dict[str, object]] = []
    for number, stage in enumerate(made[0].stages):
        each = [one.stages[number] for one in made]
        line: dict[str, object] = {
            "stage": stage.name,
            "tasks": " / ".join(map(str, dict.fromkeys(len(one.seconds) for one in each))),
            "longest": f"{max(each[-1].seconds):.1f} s",
            "passes": f"{stage.nbytes * len(stage.seconds) / 1e6:.0f} MB",
        }
        lines.append(line | {f"{one.count} workers": f"{one.stages[number].time(one.count):.1f} s" for one in made})
    rest: dict[str, object] = {"stage": "not divided", "tasks": "-", "longest": "-"}
    rest |= {"passes": f"{made[0].means / 1e6:.0f} MB"}
    lines.append(rest | {f"{one.count} workers": f"{one.undivided:.1f} s" for one in made})
    whole: dict[str, object] = {"stage": "all", "tasks": "-", "longest": "-", "passes": "-"}
    lines.append(whole | {f"{one.count} workers": f"{one.total:.1f} s" for one in made})
    first = made[0].total
    lines.append(whole | {"stage": "speed-up"} | {f"{one.count} workers": f"{first / one.total:.2f}" for one in made})
    again = {f"{one.count} workers": f"{one.undivided + replayed(one.stages, one.count):.1f} s" for one in made[1:]}
    lines.append(whole | {"stage": "all, by the replay", f"{made[0].count} workers": "-"} | again)
    last = made[-1]
    least = last.alone + sum(max(stage.seconds) for stage in last.stages)
    bound = f"bound: {least:.1f} s, {first / least:.2f} times as fast"
    publish("What limits a compression by several workers", f"{table(lines)}\n\n{bound}", options)


if __name__ == "__main__":
    main()
