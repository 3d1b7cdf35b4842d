"""Faults at seeded steps: the output is whole or absent afterwards, and the same command gives the same bytes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from architectures import mixture_of_experts
from faults import PATIENCE, Ended, Fault, Kind, holds, left, run, strikes
from safetensors.torch import load_file, save_file
from table_files import as_npy, as_parquet

from kflats.common.workers import Workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and signals that stop a process")
SCHEDULES = 100
AT_ONCE = (8, 15)  # of these in every test run
DRAWS = 20  # of a schedule, of which the first fault that strikes counts
ROWS = 40_000


def coded_table(kind: str, source: str, out: str, workers: Workers) -> None:
    from kflats.tables import compress_table

    of_kinds: dict[str, dict[str, Any]] = {"fast": {"layout": "fast"}, "flats": {"flats": 3}}
    of_kinds["weights"] = {"row_weights": 1 / (9 + torch.arange(ROWS))}
    options = {"size": "5 bits", "shard_rows": 16384, "quiet": True} | of_kinds.get(kind, {})
    compress_table(source, out, name="vector" if kind == "parquet" else "", **options, workers=workers)
    workers.meet()


def coded_model(source: str, out: str, workers: Workers) -> None:
    from kflats.compress.pipeline import compress_folder

    compress_folder(source, out, size="40%", samples=130, quiet=True, workers=workers)
    workers.meet()


def model_by_layers(source: str, out: str, workers: Workers) -> None:
    """Where there is no room for the sums of two weights together."""
    from kflats.calibration import collect
    from kflats.compress.pipeline import compress_folder

    collect._least_room = lambda workers: 1
    compress_folder(source, out, size="40%", weights=("all",), samples=130, quiet=True, workers=workers)
    workers.meet()


JOBS: dict[str, tuple[Callable[..., None], list[str]]] = {
    **{kind: (coded_table, [kind]) for kind in ("compact", "fast", "flats", "parquet", "weights")},
    "model": (coded_model, []),
    "layers": (model_by_layers, []),
}
"""A function, and what it is given before the source and the output."""


class Undisturbed(NamedTuple):
    source: str
    files: dict[str, bytes]
    steps: list[list[float]]


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], Any], tiny_tokenizer: Any) -> Path:
    """A model that can be measured layer by layer, with its tokenizer."""
    folder, one = tmp_path_factory.mktemp("two-layers") / "model", tiny_model("bert")
    one.config.num_hidden_layers = 2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        type(one)(one.config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(
    tiny_folder: Path, two_layers: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], Undisturbed]:
    """What a job gives in so many processes, and the steps of each; made once."""
    known: dict[tuple[str, int], Undisturbed] = {}

    def made(name: str, count: int) -> Undisturbed:
        if (name, count) not in known:
            folder = tmp_path_factory.mktemp(f"{name}-{count}")
            source = two_layers if name == "layers" else tiny_folder
            job, options = JOBS[name]
            if job is coded_table:
                rows = torch.from_numpy(np.random.default_rng(0).standard_normal((ROWS, 6), dtype=np.float32))
                written = partial(as_parquet, group=4096) if name == "parquet" else as_npy
                source = written(rows, folder / "rows")
            (folder / "work").mkdir()
            arguments = [*options, str(source), str(folder / "work" / "out")]
            ended = run(job, arguments, count, None, folder / "notes")
            assert [one.code for one in ended] == [0] * count, ended
            assert left(folder / "work") == ["out"]
            known[name, count] = Undisturbed(str(source), holds(folder / "work" / "out"), [one.steps for one in ended])
        return known[name, count]

    return made


def drawn_worker(drawn: random.Random, whole: Undisturbed, least: int) -> int:
    """One that did so many steps: others had done the work before some workers came."""
    return drawn.choice([rank for rank, steps in enumerate(whole.steps) if len(steps) >= least])


def drawn_fault(drawn: random.Random, whole: Undisturbed) -> Fault:
    """At a step of the undisturbed run; what is killed later is killed at a moment of it, whatever it does then."""
    kinds: list[Kind] = ["killed", "killed later", "full disk"]
    if len(whole.steps) > 1:
        kinds.append("stopped")  # which none but another worker can tell
    kind, rank = drawn.choice(kinds), drawn_worker(drawn, whole, 1)
    steps, moment = whole.steps[rank], drawn.uniform(0, 0.9)
    if kind == "killed later":
        return Fault(kind, rank, 1, moment * (steps[-1] - steps[0]))
    return Fault(kind, rank, drawn.randint(1, len(steps)))


def check_ended(ended: list[Ended], whole: Undisturbed, out: Path, disturbed: int | None, told: str) -> None:
    """What holds of every run, struck by a fault or not: but for the ``disturbed`` worker."""
    if out.exists():
        assert holds(out) == whole.files, told
    for rank, one in enumerate(ended):
        assert rank == disturbed or one.code == 0 or one.lost, told
        assert one.code < 0 or one.temporary == [], told


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in AT_ONCE else pytest.mark.slow) for seed in range(SCHEDULES)]
)
def test_after_a_fault_the_output_is_whole_or_absent_and_the_same_command_resumes(
    seed: int, undisturbed: Callable[[str, int], Undisturbed], tmp_path: Path
) -> None:
    drawn = random.Random(seed)
    name, count = drawn.choice(list(JOBS)), drawn.choice((1, 2, 2, 3, 4))
    whole, (job, options) = undisturbed(name, count), JOBS[name]
    for draw in range(DRAWS):
        fault = drawn_fault(drawn, whole)
        (work := tmp_path / f"work-{draw}").mkdir()
        out, arguments = work / "out", [*options, whole.source, str(work / "out")]
        ended = run(job, arguments, count, fault, tmp_path / f"notes-{draw}")
        told = f"{name}, {count} workers, draw {draw}, {fault}: {ended}"
        struck = strikes(fault, ended)
        check_ended(ended, whole, out, fault.rank, told)
        if struck:
            break
        # It came after the work, or never: the steps of each worker differ from run to run.
        assert ended[fault.rank].code == 0 or fault.kind == "stopped", told
    assert struck, f"none of {DRAWS} faults struck; the last: {told}"
    there = out.exists()
    again = run(job, arguments, count, None, tmp_path / "again")
    if there:  # the first run had put the folder in its place
        assert "exists already" in again[0].said, f"{told} {again}"
    else:
        assert [one.code for one in again] == [0] * count, f"{told} {again}"
    assert holds(out) == whole.files, told
    assert left(work) == ["out"], told


@pytest.mark.slow
@pytest.mark.parametrize("name", list(JOBS))
def test_a_worker_that_lives_is_waited_for_beyond_the_patience(
    name: str, undisturbed: Callable[[str, int], Undisturbed], tmp_path: Path
) -> None:
    drawn, whole, (job, options) = random.Random(name), undisturbed(name, 2), JOBS[name]
    for draw in range(DRAWS):
        rank = drawn_worker(drawn, whole, 2)
        fault = Fault("slow", rank, drawn.randint(1, len(whole.steps[rank]) // 2), PATIENCE + 1)
        (work := tmp_path / f"work-{draw}").mkdir()
        ended = run(job, [*options, whole.source, str(work / "out")], 2, fault, tmp_path / f"notes-{draw}")
        told = f"{name}, draw {draw}, {fault}: {ended}"
        assert [one.code for one in ended] == [0, 0], told
        check_ended(ended, whole, work / "out", None, told)
        assert left(work) == ["out"], told
        if any(after - before > PATIENCE for before, after in pairwise(ended[rank].steps)):
            break
    else:
        pytest.fail(f"no worker was slow; the last: {told}")


@pytest.mark.slow
@pytest.mark.parametrize("allowed", [False, True])
def test_workers_with_other_threads_are_refused_or_named(
    allowed: bool, undisturbed: Callable[[str, int], Undisturbed], tmp_path: Path
) -> None:
    whole, work = undisturbed("fast", 2), tmp_path / "work"
    work.mkdir()
    arguments = ["fast", whole.source, str(work / "out")]
    ended = run(coded_table, arguments, 2, None, tmp_path / "notes", threads=(1, 2), allow_unlike=allowed)
    assert [one.code for one in ended] == [0 if allowed else 2] * 2, ended
    assert "workers 0 and 1 differ in versions or machines: threads 1 and 2" in ended[0].said
    assert left(work) == (["out"] if allowed else [])


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    """The model in several files."""
    mixture_of_experts().save_pretrained(tmp_path / "model", max_shard_size="20KB")
    return tmp_path / "model"


def model_without_texts(source: str, out: str, workers: Workers) -> None:
    from kflats.compress.pipeline import compress_folder

    compress_folder(source, out, keep="40%", weights=("all",), quiet=True, workers=workers)
    workers.meet()


def model_with_batches(source: str, out: str, workers: Workers) -> None:
    from kflats.compress.pipeline import compress_folder

    draw = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(199, (32, 9), generator=draw)} for _ in range(9)]
    options = {"keep": "40%", "weights": ("all",), "calibration": batches, "quiet": True}
    compress_folder(source, out, **options, workers=workers)  # type: ignore[arg-type]
    workers.meet()


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("job", [pytest.param(model_without_texts, marks=pytest.mark.slow), model_with_batches])
def test_experts_have_the_same_bytes_with_any_number_of_workers(
    job: Callable[..., None], count: int, experts: Path, tmp_path: Path
) -> None:
    found = []
    for number in (1, count):
        (work := tmp_path / f"work-{number}").mkdir()
        ended = run(job, [str(experts), str(work / "out")], number, None, tmp_path / f"notes-{number}")
        assert [one.code for one in ended] == [0] * number, ended
        assert left(work) == ["out"]
        found.append(holds(work / "out"))
    assert found[0] == found[1]


@pytest.mark.parametrize("damage", ["truncated", pytest.param("not finite", marks=pytest.mark.slow)])
def test_a_damaged_file_is_named_once_by_several_workers(damage: str, experts: Path, tmp_path: Path) -> None:
    shard = sorted(experts.glob("*.safetensors"))[1]
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    else:
        tensors = load_file(shard)
        name = next(key for key, tensor in tensors.items() if tensor.ndim > 1)
        tensors[name].view(-1)[3] = float("nan")
        save_file(tensors, shard, metadata={"format": "pt"})
    (work := tmp_path / "work").mkdir()
    ended = run(model_with_batches, [str(experts), str(work / "out")], 2, None, tmp_path / "notes")
    assert [one.code for one in ended] == [2, 2], ended
    assert any(shard.name in one.said for one in ended), ended
    assert left(work) == []
