"""Workers: what comes out does not depend on how many there are; a lost one is named, and the same command resumes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.common.workers import LostWorkerError, Packed, Workers

NUMBERS = Packed(str, lambda index, text: int(text))
TASKS = [f"task {index}" for index in range(7)]


class Memory:
    """A store, and broadcasts, among the threads of this process. ``delays`` stops a caller for a while."""

    def __init__(self, count: int, seed: int) -> None:
        self.values: dict[str, str] = {}
        self.lock, self.random = threading.Lock(), random.Random(seed)
        self.sent: dict[tuple[int, int], Tensor] = {}
        self.count = count

    def delay(self) -> None:
        time.sleep(self.random.choice((0, 0, 0.0005, 0.003)))

    def add(self, key: str, amount: int) -> int:
        self.delay()
        with self.lock:
            total = int(self.values.get(key, "0")) + amount
            self.values[key] = str(total)
        return total

    def set(self, key: str, value: str) -> None:
        self.delay()
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self.lock:
            if self.values.get(key, "") == expected:
                self.values[key] = desired
        return self.values[key].encode()

    def broadcasts(self, rank: int) -> Callable[[Tensor, int], object]:
        calls = Counter[int]()

        def broadcast(tensor: Tensor, src: int) -> None:
            self.delay()
            key, calls[src] = (src, calls[src]), calls[src] + 1
            if src == rank:
                self.sent[key] = tensor.clone()
                return
            while key not in self.sent:
                time.sleep(0.0005)
            tensor.copy_(self.sent[key])

        return broadcast


def together(count: int, seed: int, work: Callable[[Workers], object]) -> list[object]:
    """What ``work`` gives each of ``count`` workers, which are threads."""
    store = Memory(count, seed)
    crew = [Workers(rank, count, store, 30.0, store.broadcasts(rank)) for rank in range(count)]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, crew))


@pytest.mark.parametrize("seed", range(25))
def test_results_do_not_depend_on_workers_nor_on_when_they_come(seed: int) -> None:
    count, done, shuffled = 1 + seed % 4, Counter[int](), random.Random(seed)
    order = shuffled.sample(range(len(TASKS)), len(TASKS))

    def one(workers: Workers) -> object:
        def squared(index: int) -> int:
            done[index] += 1
            return index * index

        def summed(index: int) -> tuple[dict[str, Tensor], str]:
            return {"sum": torch.full((2,), 0.1 * index), "count": torch.tensor(index)}, f"{index}"

        first = workers.divided(TASKS, squared, NUMBERS, order)
        again = workers.divided(TASKS[:2], squared, NUMBERS)
        sums = list(workers.in_turn(TASKS, summed))
        workers.meet()
        return first, again, [(text, t["sum"].tolist(), int(t["count"])) for t, text in sums]

    alone = one(Workers())
    done.clear()
    assert together(count, seed, one) == [alone] * count
    assert done == Counter(range(len(TASKS))) + Counter(range(2))


def test_a_worker_without_a_sign_of_life_is_named() -> None:
    def one(workers: Workers) -> None:
        workers.patience = 0.1
        if workers.rank == 0:
            workers.divided(TASKS, lambda index: index, NUMBERS)
            workers.meet()

    with pytest.raises(LostWorkerError, match=r"worker 1 is lost: no sign of life for .* s \(coming here\)"):
        together(2, 0, one)


def test_a_slow_worker_is_waited_for() -> None:
    def one(workers: Workers) -> None:
        workers.patience = 2.5
        assert workers.store is not None
        for _ in range(30 if workers.rank else 0):
            time.sleep(0.1)
            workers.store.add("alive/1", 1)
        workers.meet()

    together(2, 0, one)


def test_workers_that_differ_are_refused_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    def one(refused: bool) -> Callable[[Workers], None]:
        return lambda workers: workers.agree("versions", {"torch": f"2.{workers.rank}"}, refused=refused)

    with pytest.raises(KflatsError, match=r"differ in versions: torch 2\.0 and 2\.1"):
        together(2, 0, one(True))
    together(2, 0, one(False))
    assert capsys.readouterr().err.count("differ in versions") == 1


def test_an_error_stops_the_others_and_is_said_once() -> None:
    def one(workers: Workers) -> object:
        if workers.rank:
            return workers.failed("a weight holds NaN")
        with pytest.raises(LostWorkerError, match="another worker failed"):
            workers.meet()
        return workers.failed("another message")

    assert together(2, 0, one) == [False, True]


COMMAND = (sys.executable, "-m", "kflats", "compress")
SURROUNDINGS = os.environ | {"OMP_NUM_THREADS": "1"}
OPTIONS = ("--size", "40%", "--no-proof", "--samples", "130", "--worker-timeout", "5")


def compressed(folder: Path, out: Path, count: int) -> subprocess.Popen[str]:
    command = [*COMMAND, str(folder), "--out", str(out), *OPTIONS, "--workers", str(count)]
    return subprocess.Popen(command, env=SURROUNDINGS, stderr=subprocess.PIPE, text=True, start_new_session=True)


def ended(process: subprocess.Popen[str]) -> str:
    """What it wrote on stderr."""
    return process.communicate(timeout=600)[1]


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def alone(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("alone") / "small"
    ended(compressed(tiny_folder, out, 1))
    return weights_of(out)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_the_bytes_of_a_folder_do_not_depend_on_the_workers(
    count: int, alone: bytes, tiny_folder: Path, tmp_path: Path
) -> None:
    ended(compressed(tiny_folder, tmp_path / "small", count))
    assert weights_of(tmp_path / "small") == alone
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def workers_of(process: subprocess.Popen[str]) -> Iterator[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return map(int, children.read_text().split()) if children.exists() else iter(())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the workers in /proc")
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_worker_ends_the_run_and_the_same_command_resumes(
    seed: int, alone: bytes, tiny_folder: Path, tmp_path: Path
) -> None:
    out, shuffled = tmp_path / "small", random.Random(seed)
    process = compressed(tiny_folder, out, 2)
    while len(found := list(workers_of(process))) < 2:
        time.sleep(0.05)
    time.sleep(shuffled.uniform(0, 12))
    killed = process.poll() is None
    if killed:
        os.kill(shuffled.choice(found), signal.SIGKILL)
    message = ended(process)
    if killed and process.returncode:
        assert process.returncode == 2
        assert "a worker was ended by SIGKILL" in message
        assert "the same command again, which resumes" in message
        assert not out.exists()
        ended(compressed(tiny_folder, out, 2))
    assert weights_of(out) == alone
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the workers in /proc")
def test_a_stopped_worker_ends_the_run_with_a_message(tiny_folder: Path, tmp_path: Path) -> None:
    process = compressed(tiny_folder, tmp_path / "small", 2)
    while len(found := list(workers_of(process))) < 2:
        time.sleep(0.05)
    beside = tmp_path / ".small.kflats-new"
    while not beside.exists():
        time.sleep(0.01)
    os.kill(found[1], signal.SIGSTOP)
    message = ended(process)
    assert process.returncode == 2
    assert "worker 1 is lost" in message
    assert not (tmp_path / "small").exists()
