"""Faults at seeded steps: the output is whole or absent afterwards, and the same command gives the same bytes."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import pytest
from architectures import mixture_of_experts
from faults import Fault, Kind, holds, left, run
from safetensors.torch import load_file, save_file

from kflats.common.workers import Workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and signals that stop a process")
SCHEDULES = 100
AT_ONCE = 2  # of these in every test run


def coded_table(layout: str, source: str, out: str, workers: Workers) -> None:
    from kflats.tables import compress_table

    options = {"size": "5 bits", "layout": layout, "shard_rows": 16384, "quiet": True}
    compress_table(source, out, **options, workers=workers)  # type: ignore[arg-type]
    workers.meet()


def coded_model(source: str, out: str, workers: Workers) -> None:
    from kflats.compress.pipeline import compress_folder

    compress_folder(source, out, size="40%", samples=130, quiet=True, workers=workers)
    workers.meet()


JOBS: dict[str, tuple[Callable[..., None], list[str]]] = {
    "compact": (coded_table, ["compact"]),
    "fast": (coded_table, ["fast"]),
    "model": (coded_model, []),
}
"""A function, and what it is given before the source and the output."""


class Undisturbed(NamedTuple):
    source: str
    files: dict[str, bytes]
    steps: list[int]


@pytest.fixture(scope="module")
def undisturbed(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Undisturbed]:
    """What a job gives in so many processes, and the steps of each; made once."""
    known: dict[tuple[str, int], Undisturbed] = {}

    def made(name: str, count: int) -> Undisturbed:
        if (name, count) not in known:
            folder = tmp_path_factory.mktemp(f"{name}-{count}")
            source = tiny_folder
            if name != "model":
                source = folder / "rows.npy"
                np.save(source, np.random.default_rng(0).standard_normal((40_000, 6), dtype=np.float32))
            (folder / "work").mkdir()
            job, options = JOBS[name]
            arguments = [*options, str(source), str(folder / "work" / "out")]
            ended = run(job, arguments, count, None, folder / "notes")
            assert [one.code for one in ended] == [0] * count, ended
            assert left(folder / "work") == ["out"]
            known[name, count] = Undisturbed(str(source), holds(folder / "work" / "out"), [one.steps for one in ended])
        return known[name, count]

    return made


@pytest.mark.parametrize(
    "seed",
    [*range(AT_ONCE), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(AT_ONCE, SCHEDULES))],
)
def test_after_a_fault_the_output_is_whole_or_absent_and_the_same_command_resumes(
    seed: int, undisturbed: Callable[[str, int], Undisturbed], tmp_path: Path
) -> None:
    drawn = random.Random(seed)
    name, count = drawn.choice(list(JOBS)), drawn.choice((1, 2, 2, 3))
    whole = undisturbed(name, count)
    kind, rank = drawn.choice(get_args(Kind)), drawn.randrange(count)
    fault = Fault(kind, rank, drawn.randint(1, max(1, whole.steps[rank])), drawn.uniform(0, 0.3))
    (work := tmp_path / "work").mkdir()
    job, options = JOBS[name]
    out, arguments = work / "out", [*options, whole.source, str(work / "out")]
    ended = run(job, arguments, count, fault, tmp_path / "first")
    told = f"{name}, {count} workers, {fault}: {ended}"
    assert ended[rank].met or count > 1, told  # of several workers each may do more or less than before
    if out.exists():
        assert holds(out) == whole.files, told
    for one_rank, one in enumerate(ended):
        disturbed = one_rank == rank and one.met
        allowed = {0, 2}
        if disturbed and kind != "full disk":
            allowed = {"slow": {0, 2}, "killed later": {0, -signal.SIGALRM}}.get(kind, {-signal.SIGKILL})
        assert one.code in allowed, told
        if one.code == 2 and not (disturbed and kind == "full disk"):
            assert "lost" in one.said or "another worker failed" in one.said, told
        elif one.code == 2:
            assert "cannot be written" in one.said, told
    again = run(job, arguments, count, None, tmp_path / "second")
    if all(one.code == 0 for one in again):
        assert holds(out) == whole.files, told
    else:  # the first run had put the folder in its place
        assert "exists already" in again[0].said, f"{told} {again}"
        assert holds(out) == whole.files, told
    assert left(work) == ["out"], told


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
    import torch

    from kflats.compress.pipeline import compress_folder

    draw = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(199, (32, 9), generator=draw)} for _ in range(9)]
    options = {"keep": "40%", "weights": ("all",), "calibration": batches, "quiet": True}
    compress_folder(source, out, **options, workers=workers)  # type: ignore[arg-type]
    workers.meet()


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
