"""Several workers in one process: threads with a store in memory, and delays by a seed."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from kflats.common.workers import Workers


class Memory:
    """A store, and broadcasts, among the threads of this process. ``delays`` stops a caller for a while."""

    def __init__(self, count: int, seed: int) -> None:
        self.values: dict[str, str] = {}
        self.lock, self.random = threading.Lock(), random.Random(seed)
        self.sent: dict[tuple[str, int, int], Tensor] = {}
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

    def sending(self, how: str, rank: int) -> Callable[[Tensor, int], None]:
        """To all, or to the first; worker ``rank`` calls it."""
        calls = Counter[int]()

        def send(tensor: Tensor, src: int) -> None:
            self.delay()
            key, calls[src] = (how, src, calls[src]), calls[src] + 1
            if src == rank:
                self.sent[key] = tensor.clone()
                return
            while key not in self.sent:
                time.sleep(0.0005)
            tensor.copy_(self.sent[key])

        return send


def together(count: int, seed: int, work: Callable[[Workers], object]) -> list[object]:
    """What ``work`` gives each of ``count`` workers, which are threads."""
    store = Memory(count, seed)
    crew = [
        Workers(rank, count, store, 30.0, True, store.sending("to all", rank), store.sending("to the first", rank))
        for rank in range(count)
    ]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, crew))
