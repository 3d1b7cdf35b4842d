"""Several processes that carry out one command together and divide its tasks.

Each worker runs the whole program; where tasks do not depend on each other, each task is done by one worker. What comes
out does not depend on how many there are: a task's result depends on its input alone, and sums are taken in a fixed
order. ``torchrun`` (or ``kflats compress --workers``) starts the processes; torch.distributed connects them.

Tasks and small results pass through the key-value store of the process group, tensors by broadcasts and sends of gloo.
Each worker counts up a key of its own every second, so that the others know a stopped worker from a slow one.
"""

from __future__ import annotations

import json
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kflats.common.dtypes import dtype_name, dtype_of
from kflats.common.errors import DoesNotFitError, KflatsError, first_line
from kflats.common.formatting import announce
from kflats.common.machine import cpu_model, cpu_units, started_workers

PATIENCE = 120.0
"""Seconds without a sign of life after which a worker counts as lost."""
_BEAT = 1.0
_SILENT = 3.5  # seconds without a sign of life of a worker with which sending failed
_SLOW = 15.0  # seconds for which nothing is said of who is waited for
_POLL = 0.02
_REFUSED = "!refused: "  # how a task's text begins that raised DoesNotFitError
_LIBRARIES = ("kflats", "torch", "numpy", "safetensors", "transformers", "tokenizers", "constriction")

Result = TypeVar("Result")


class Store(Protocol):
    """What ``torch.distributed.Store`` does here."""

    def add(self, key: str, amount: int) -> int:
        """The sum of all amounts that were added to ``key``, with this one."""
        ...

    def set(self, key: str, value: str) -> None:
        """Give ``key`` a value."""
        ...

    def get(self, key: str) -> bytes:
        """The value of ``key``, which is there."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all of ``keys`` are there."""
        ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Give ``key`` a value if it has the ``expected`` one, or none and that is empty; the value it has then."""
        ...


@dataclass(frozen=True)
class Packed(Generic[Result]):
    """How a result passes from the worker that made it to the others: as text.

    Args:
        pack: the text of a result. unpack: the result of task ``index`` from its text.
    """

    pack: Callable[[Result], str]
    unpack: Callable[[int, str], Result]


@dataclass(frozen=True)
class _Sent:
    """Tensors on their way to the first worker, who gives ``key`` a value once it has them."""

    key: str
    tensors: list[tuple[Tensor, dist.Work | None]]


_ALIKE = "the same command for all workers, and the same files or whole copies of them"


@dataclass
class Workers:
    """The workers of this command, as one of them sees them; ``Workers()`` is a process alone.

    Every worker must make the same calls in the same order.

    Args:
        rank: of this worker; the first is 0, and alone writes the output. count: of all.
        store: what connects them; None for a process alone.
        patience: seconds without a sign of life after which a worker counts as lost.
        quiet: False: says on stderr which worker is waited for, and for what.
        broadcast: sends a tensor of the worker of a rank to all others, who give one of its shape.
        gather: sends a tensor of the worker of a rank to the first, who gives one of its shape; both call it. The
            sender goes on at once, and must not change the tensor before the returned work is done.

    >>> doubled = Packed(str, lambda index, text: int(text))
    >>> Workers().divided(["a", "b"], lambda index: 2 * index, doubled)
    [0, 2]
    """

    rank: int = 0
    count: int = 1
    store: Store | None = None
    patience: float = PATIENCE
    quiet: bool = True
    broadcast: Callable[[Tensor, int], object] = dist.broadcast
    gather: Callable[[Tensor, int], dist.Work | None] = field(default_factory=lambda: _to_first)
    _stage: int = 0
    _seen: dict[int, tuple[int, float]] = field(default_factory=dict)

    @property
    def first(self) -> bool:
        """Whether this worker shows progress and writes the output."""
        return self.rank == 0

    def divided(
        self, tasks: Sequence[str], work: Callable[[int], Result], packed: Packed[Result], order: Sequence[int] = ()
    ) -> list[Result]:
        """The results of all tasks, in their order; each task is done by the worker that is free first.

        Args:
            tasks: what each does, for messages. work: does the task of an index. packed: how its result passes.
            order: in which tasks are begun, such as the longest first; default: their own.

        Raises:
            LostWorkerError: a worker is lost, or failed.
            DoesNotFitError: a task raised it: of several, the first task's, at all workers.
        """
        order = order or range(len(tasks))
        if self.store is None:
            alone = {index: work(index) for index in order}
            return [alone[index] for index in range(len(tasks))]
        stage = self._begun()
        own: dict[int, Result] = {}
        while (place := self.store.add(f"{stage}/next", 1) - 1) < len(tasks):
            index = order[place]
            self.store.set(f"{stage}/{index}/by", str(self.rank))
            try:
                own[index] = work(index)
                text = packed.pack(own[index])
            except DoesNotFitError as error:  # a caller may try another size, and then all of them must
                text = _REFUSED + json.dumps([error.symptom, error.cause, error.hint])
            self.store.set(f"{stage}/{index}", text)
        results = []
        for index, task in enumerate(tasks):
            if index in own:
                results.append(own[index])
                continue
            text = self._text(f"{stage}/{index}", task, f"{stage}/{index}/by")
            if text.startswith(_REFUSED):
                symptom, cause, hint = json.loads(text.removeprefix(_REFUSED))
                raise DoesNotFitError(symptom, cause=cause, hint=hint)
            results.append(packed.unpack(index, text))
        return results

    def in_turn(
        self, tasks: Sequence[str], work: Callable[[int], tuple[dict[str, Tensor], str]]
    ) -> Iterator[tuple[dict[str, Tensor], str]]:
        """The results of all tasks in their order, each at every worker, where they are tensors and a text: worker i
        does the tasks i, i + count, ... At a time a worker holds its own result and another's.

        Args:
            tasks: what each does, for messages. work: does the task of an index.

        Raises:
            LostWorkerError: as ``divided``.
        """
        stage = self._begun()
        for start in range(0, len(tasks), self.count):
            round_of = range(start, min(start + self.count, len(tasks)))
            own = start + self.rank
            made = work(own) if own in round_of else ({}, "")
            if self.store is None:
                yield made
                continue
            if own in round_of:
                self._tell(f"{stage}/{own}", made)
            # All have theirs before the first is sent: while tensors are sent, gloo's limit of time counts, and not
            # whether a worker lives.
            told = [self._text(f"{stage}/{index}", tasks[index], owner=index - start) for index in round_of]
            for index, (described, text) in zip(round_of, map(json.loads, told), strict=True):
                tensors = made[0] if index == own else {}
                yield self._sent(described, tensors, index - start, self.broadcast), text
            del made

    def gathered(
        self, tasks: Sequence[str], work: Callable[[int], tuple[dict[str, Tensor], str]]
    ) -> Iterator[tuple[dict[str, Tensor], str]]:
        """As ``in_turn``, but the first worker alone gets the tensors, the others none. A worker does its next task
        while its last result is on its way, or another's is waited for: at a time it holds two results.

        Raises:
            LostWorkerError: as ``divided``.
        """
        stage, own = self._begun(), range(self.rank, len(tasks), self.count)
        if self.store is None or self.first:
            yield from self._received(stage, tasks, own, work)
            return
        sent: _Sent | None = None
        for index in own:
            made = work(index)
            if sent is not None:
                self._arrived(sent)
            self._tell(f"{stage}/{index}", made)
            tensors = [tensor.cpu().contiguous() for tensor in made[0].values()]
            with self._explained():
                sent = _Sent(f"{stage}/{index}/got", [(tensor, self.gather(tensor, self.rank)) for tensor in tensors])
            del made, tensors
        if sent is not None:
            self._arrived(sent)
        for index, task in enumerate(tasks):
            yield {}, json.loads(self._text(f"{stage}/{index}", task, owner=index % self.count))[1]

    def _received(
        self, stage: str, tasks: Sequence[str], own: Sequence[int], work: Callable[[int], tuple[dict[str, Tensor], str]]
    ) -> Iterator[tuple[dict[str, Tensor], str]]:
        """The results of ``gathered`` at the first worker, which does the tasks ``own``."""
        following = iter(own)
        made: dict[int, tuple[dict[str, Tensor], str]] = {}
        for index, task in enumerate(tasks):
            if not made and (ahead := next(following, None)) is not None:
                made[ahead] = work(ahead)
                if self.store is not None:
                    self._tell(f"{stage}/{ahead}", made[ahead])
            if index in made:
                yield made.pop(index)
                continue
            assert self.store is not None
            described, text = json.loads(self._text(f"{stage}/{index}", task, owner=index % self.count))
            tensors = self._sent(described, {}, index % self.count, self.gather)
            self.store.set(f"{stage}/{index}/got", "")
            yield tensors, text
            del tensors

    def _tell(self, key: str, made: tuple[dict[str, Tensor], str]) -> None:
        """Say that this worker has a result: names, dtypes and shapes of its tensors, and its text."""
        assert self.store is not None
        described = [[name, dtype_name(t.dtype), list(t.shape)] for name, t in made[0].items()]
        self.store.set(key, json.dumps([described, made[1]]))

    def _arrived(self, sent: _Sent) -> None:
        """Wait until the first worker has what was ``sent``."""
        self._text(sent.key, "adding up results")
        with self._explained():
            for _, sending in sent.tensors:
                if sending is not None:
                    sending.wait()

    def _sent(
        self,
        described: list[tuple[str, str, list[int]]],
        own: dict[str, Tensor],
        rank: int,
        send: Callable[[Tensor, int], object],
    ) -> dict[str, Tensor]:
        """The tensors of worker ``rank``, where they are sent: names, dtypes and shapes as ``described``."""
        tensors = {}
        for name, dtype, shape in described:
            here = own[name] if name in own else torch.empty(shape, dtype=dtype_of(dtype))
            sent = here.cpu().contiguous()
            with self._explained():
                send(sent, rank)
            tensors[name] = here if name in own else sent
        return tensors

    def meet(self) -> None:
        """Wait until every worker is here."""
        if self.store is None:
            return
        stage = self._begun()
        self.store.set(f"{stage}/{self.rank}", "")
        for rank in range(self.count):
            self._text(f"{stage}/{rank}", "coming here", owner=rank)

    def agree(self, what: str, values: Mapping[str, str], *, refused: bool = True, hint: str = _ALIKE) -> None:
        """Check that all workers have the same ``values``.

        Args:
            what: they are, for the message. refused: False: differences are announced, and the run goes on.
            hint: what to do about a difference.

        Raises:
            KflatsError: a difference.
        """
        if self.store is None:
            return
        stage = self._begun()
        self.store.set(f"{stage}/{self.rank}", json.dumps(dict(values)))
        for rank in range(1, self.count):
            theirs = json.loads(self._text(f"{stage}/{rank}", "beginning", owner=rank))
            firsts = json.loads(self._text(f"{stage}/0", "beginning", owner=0))
            keys = sorted(firsts.keys() | theirs.keys())
            pairs = [(key, firsts.get(key, "none"), theirs.get(key, "none")) for key in keys]
            unlike = [f"{key} {mine} and {other}" for key, mine, other in pairs if mine != other]
            if unlike and refused:
                raise KflatsError(
                    f"workers 0 and {rank} differ in {what}: {'; '.join(unlike)}",
                    cause="results could then depend on which worker does what",
                    hint=hint,
                )
            if unlike:
                announce(f"workers 0 and {rank} differ in {what}: {'; '.join(unlike)}", quiet=not self.first)

    def failed(self, message: str) -> bool:
        """Tell the others that this worker stops with an error; whether it is the first to say so."""
        said = f"worker {self.rank}: {message}"
        try:
            return self.store is None or self.store.compare_set("failed", "", said).decode() == said
        except LostWorkerError:  # nobody is there to be told
            return True

    def _begun(self) -> str:
        self._stage += 1
        return f"stage {self._stage}"

    def _text(self, key: str, task: str, by: str = "", owner: int = 0) -> str:
        """The value of ``key``, once it is there."""
        assert self.store is not None
        began = checked = time.monotonic()
        said = False
        while not self.store.check([key]):
            time.sleep(_POLL)
            if time.monotonic() - checked >= _BEAT:
                checked = time.monotonic()
                self._check_failed()
                known = by and self.store.check([by])
                rank = int(self.store.get(by)) if known else owner
                self._check_alive(rank, task)
                if not said and checked - began >= _SLOW:
                    said = True
                    announce(f"waiting for worker {rank} ({task})", quiet=self.quiet)
        return str(self.store.get(key).decode())

    def _check_alive(self, rank: int, task: str) -> None:
        assert self.store is not None
        now, beats = time.monotonic(), self._beats(rank)
        last, since = self._seen.get(rank, (-1, now))
        if beats != last:
            self._seen[rank] = beats, now
        elif now - since > self.patience:
            raise LostWorkerError(
                KflatsError(
                    f"worker {rank} is lost: no sign of life for {now - since:.0f} s ({task})",
                    cause="it was stopped or killed, or its machine or network failed",
                    hint="the same command again, which resumes",
                )
            )

    def _check_failed(self) -> None:
        assert self.store is not None
        if self.store.check(["failed"]):
            raise LostWorkerError(KflatsError("another worker failed", hint="see what it says"), said=True)

    def _beats(self, rank: int) -> int:
        """How many signs of life a worker has given."""
        assert self.store is not None
        key = f"alive/{rank}"
        return int(self.store.get(key)) if self.store.check([key]) else 0

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """gloo does not say which worker is lost where tensors could not be sent: one that gives no more signs of
        life."""
        try:
            yield
        except RuntimeError as error:
            others = [rank for rank in range(self.count) if rank != self.rank]
            before = [self._beats(rank) for rank in others]
            time.sleep(_SILENT)
            self._check_failed()
            silent = [str(rank) for rank, beats in zip(others, before, strict=True) if self._beats(rank) == beats]
            what, cause = "numbers could not be sent to other workers", f"the network failed: {first_line(error)}"
            if silent:
                names = f"worker {silent[0]} is" if len(silent) == 1 else f"workers {' and '.join(silent)} are"
                what = f"{names} lost: no sign of life while numbers were sent"
                cause = "it was stopped or killed, or its machine or network failed"
            hint = "the same command again, which resumes"
            raise LostWorkerError(KflatsError(what, cause=cause, hint=hint)) from error


class _Connection:
    """A store of torch whose errors say what is lost."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def _asked(self, answer: Callable[[], Result]) -> Result:
        try:
            return answer()
        except RuntimeError as error:
            raise LostWorkerError(
                KflatsError(
                    f"the connection of the workers is lost: {first_line(error)}",
                    cause="the process that started them has ended, or its machine or network failed",
                    hint="the same command again, which resumes",
                )
            ) from error

    def add(self, key: str, amount: int) -> int:
        return self._asked(lambda: self._store.add(key, amount))

    def set(self, key: str, value: str) -> None:
        self._asked(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._asked(lambda: self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        return self._asked(lambda: self._store.check(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._asked(lambda: self._store.compare_set(key, expected, desired))


class LostWorkerError(Exception):
    """Another worker does not go on. It is no ``KflatsError``, which only this worker would report.

    Args:
        error: what the user reads. said: whether that worker has said why.
    """

    def __init__(self, error: KflatsError, *, said: bool = False) -> None:
        super().__init__(str(error))
        self.error, self.said = error, said


@contextmanager
def joined(patience: float = PATIENCE, *, allow_unlike: bool = False) -> Iterator[Workers]:
    """The workers that torchrun started, connected while the context lasts; alone without torchrun.

    Args:
        patience: seconds without a sign of life after which a worker counts as lost. allow_unlike: workers with other
            versions, threads or processors are announced and not refused.

    Raises:
        KflatsError: workers that differ, or cannot be reached; a worker is lost, or failed.

    >>> with joined() as workers:
    ...     workers.count
    1
    """
    if (started_workers() or 1) == 1:
        yield Workers(patience=patience)
        return
    limit = timedelta(seconds=max(patience, 10.0))
    try:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.rendezvous import rendezvous

        whole, rank, count = next(iter(rendezvous("env://", timeout=limit)))
        dist.init_process_group("gloo", store=whole, rank=rank, world_size=count, timeout=limit)
    except (RuntimeError, ValueError, StopIteration) as error:
        raise KflatsError(
            f"the workers could not connect: {first_line(error)}",
            cause="one of them, or what started them, ended or was stopped meanwhile, or fewer came than were named",
            hint="the same command again: torchrun --nproc-per-node N -m kflats ..., or kflats compress --workers N",
        ) from error
    store = PrefixStore("kflats", whole)
    workers, ended = Workers(rank, count, _Connection(store), patience), threading.Event()
    beating = threading.Thread(target=_beat, args=(store, rank, ended), daemon=True)
    beating.start()
    try:
        hint = "equal machines and versions, or --allow-unlike-workers"
        workers.agree("versions or machines", _surroundings(), refused=not allow_unlike, hint=hint)
        yield workers
    except LostWorkerError as lost:
        workers.failed(str(lost))
        raise lost.error from lost
    except Exception as error:
        workers.failed(str(error))
        raise
    finally:
        ended.set()
        beating.join()
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _to_first(tensor: Tensor, rank: int) -> dist.Work | None:
    if dist.get_rank() == rank:
        return dist.isend(tensor, 0)
    dist.recv(tensor, rank)
    return None


def _beat(store: Store, rank: int, ended: threading.Event) -> None:
    with suppress(RuntimeError):  # the worker that holds the store is gone
        store.add(f"alive/{rank}", 1)
        while not ended.wait(_BEAT):
            store.add(f"alive/{rank}", 1)


def _surroundings() -> dict[str, str]:
    """What the last digits of results depend on."""
    versions = {}
    for name in _LIBRARIES:
        with suppress(ImportError):
            versions[name] = version(name)
    # Libraries choose their kernels by these, and kernels differ in the last digits.
    units = " ".join((platform.machine(), torch.backends.cpu.get_cpu_capability(), *cpu_units(), cpu_model()))
    return versions | {
        "Python": platform.python_version(),
        "processor": units,
        "threads": str(torch.get_num_threads()),
    }
