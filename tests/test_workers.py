"""Workers: what comes out does not depend on how many there are; a lost one is named, and the same command resumes."""

from __future__ import annotations

import errno
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from crew import together
from faults import holds, left
from safetensors.torch import load_file, save_file
from torch import Tensor

from kflats.cli import workers as launcher
from kflats.common import workers as workers_module
from kflats.common.errors import DoesNotFitError, KflatsError
from kflats.common.workers import LostWorkerError, Packed, Store, Workers
from kflats.compress.fitting import copies_fingerprint, model_fingerprint
from kflats.io.atomic import new_folder
from kflats.methods import SVD
from kflats.model.weights import find_weights
from kflats.numerics.coding.lanes import Bytes
from kflats.planning.calibration_data import CalibrationData
from kflats.planning.candidates import WeightCosts, passed_on, weight_candidates
from kflats.recipe.recipe import Recipe
from kflats.tables import compress_table, statistics
from kflats.tables.shards import ShardWriter

NUMBERS = Packed(str, lambda index, text: int(text))
TASKS = [f"task {index}" for index in range(7)]


@pytest.mark.parametrize("seed", [*range(25), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(25, 100))])
def test_results_do_not_depend_on_workers_nor_on_when_they_come(seed: int) -> None:
    count, done, shuffled = 1 + seed % 4, Counter[int](), random.Random(seed)
    order = shuffled.sample(range(len(TASKS)), len(TASKS))

    def one(workers: Workers) -> object:
        def squared(index: int) -> int:
            done[index] += 1
            return index * index

        def summed(index: int) -> tuple[dict[str, Tensor], str]:
            sums = {"sum": torch.full((2,), 0.1 * index), "count": torch.tensor(index)}
            return {} if index % 3 == 2 else sums, f"{index}"

        first = workers.divided(TASKS, squared, NUMBERS, order)
        again = workers.divided(TASKS[:2], squared, NUMBERS)

        def listed(results: Iterator[tuple[dict[str, Tensor], str]]) -> list[tuple[str, dict[str, object]]]:
            return [(text, {name: t.tolist() for name, t in tensors.items()}) for tensors, text in results]

        whole = listed(workers.in_turn(TASKS, summed))
        gathered = listed(workers.gathered(TASKS, summed))
        workers.meet()
        assert gathered == [(text, tensors if workers.first else {}) for text, tensors in whole]
        return first, again, whole

    alone = one(Workers())
    done.clear()
    assert together(count, seed, one) == [alone] * count
    assert done == Counter(range(len(TASKS))) + Counter(range(2))


@pytest.mark.parametrize("seed", range(4))
def test_bytes_that_are_too_few_for_one_are_so_for_all(seed: int) -> None:
    """All go on from the same place, as with another size."""

    def task(index: int) -> int:
        if index in (2, 4):
            raise DoesNotFitError(f"task {index}", cause="few bytes", hint="more")
        return index

    def one(workers: Workers) -> tuple[str, list[int]]:
        packed = Packed[int](str, lambda _, text: int(text))
        with pytest.raises(DoesNotFitError) as refused:
            workers.divided(["one of five"] * 5, task, packed)
        return str(refused.value), workers.divided(["one of two"] * 2, task, packed)

    assert together(3, seed, one) == [("task 2. Likely cause: few bytes. Try: more.", [0, 1])] * 3


def test_a_worker_without_a_sign_of_life_is_named() -> None:
    def one(workers: Workers) -> None:
        workers.patience = 0.1
        if workers.rank == 0:
            workers.divided(TASKS, lambda index: index, NUMBERS)
            workers.meet()

    with pytest.raises(LostWorkerError, match=r"worker 1 is lost: no sign of life for .* s \(coming here\)"):
        together(2, 0, one)


@pytest.mark.slow
def test_a_slow_worker_is_waited_for_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers_module, "_SLOW", 1.5)

    def one(workers: Workers) -> None:
        workers.patience, workers.quiet = 2.5, not workers.first
        assert workers.store is not None
        for _ in range(30 if workers.rank else 0):
            time.sleep(0.1)
            workers.store.add("alive/1", 1)
        workers.meet()

    together(2, 0, one)
    assert capsys.readouterr().err.count("waiting for worker 1 (coming here)") == 1


def test_nothing_is_sent_before_all_have_their_results() -> None:
    """While tensors are sent a limit of time counts, and a slow worker would be taken for a lost one."""
    made = set[int]()

    def one(workers: Workers) -> None:
        send = workers.broadcast

        def work(index: int) -> tuple[dict[str, Tensor], str]:
            time.sleep(0.05 * index)
            made.add(index)
            return {"x": torch.full((2,), float(index))}, ""

        def sent(tensor: Tensor, rank: int) -> None:
            assert made >= {0, 1, 2}
            send(tensor, rank)

        workers.broadcast = sent
        assert [float(tensors["x"][0]) for tensors, _ in workers.in_turn(TASKS[:3], work)] == [0, 1, 2]

    together(3, 0, one)


@pytest.mark.parametrize("lost", [True, False])
def test_a_worker_lost_while_numbers_are_sent_is_named(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_SILENT", 0.3)

    def one(workers: Workers) -> None:
        assert workers.store is not None
        if workers.rank == 0:

            def refused(tensor: Tensor, rank: int) -> None:
                raise RuntimeError("[unbound_buffer.cc:129] Timed out waiting 10000ms for send")

            workers.broadcast = refused
            for _ in workers.in_turn(TASKS[:3], lambda index: ({"x": torch.ones(2)}, "")):
                pass
        workers.broadcast = lambda tensor, rank: None
        next(iter(workers.in_turn(TASKS[:3], lambda index: ({"x": torch.ones(2)}, ""))))
        for _ in range(10 if workers.rank == 2 or not lost else 0):
            time.sleep(0.1)
            workers.store.add(f"alive/{workers.rank}", 1)

    named = "worker 1 is lost: no sign of life while" if lost else "could not be sent .* network failed: .* Timed out"
    with pytest.raises(LostWorkerError, match=named):
        together(3, 0, one)


def test_the_first_worker_that_fails_alone_says_so() -> None:
    assert sorted(together(3, 0, lambda workers: workers.failed("the same words"))) == [False, False, True]  # type: ignore[type-var]


def test_workers_that_see_different_folders_are_told(tmp_path: Path) -> None:
    def one(workers: Workers) -> None:
        (machine := tmp_path / f"{workers.rank}").mkdir()
        with new_folder(machine / "small", workers=workers) as folder:
            (folder / "kflats.json").write_text("{}")

    with pytest.raises(KflatsError, match=r"worker 1 cannot see .*do not see one folder"):
        together(2, 0, one)


@pytest.mark.parametrize("what", ["torch", "a library that one of them lacks"])
def test_workers_with_other_libraries_differ(what: str) -> None:
    own = [{"torch": "2.0"}, {"torch": "2.1"}] if what == "torch" else [{}, {"constriction": "1"}]
    for first in (0, 1):
        with pytest.raises(KflatsError, match=r"differ in versions: (torch 2\.|constriction (none|1) and (none|1))"):
            together(2, 0, lambda workers, first=first: workers.agree("versions", own[workers.rank - first]))  # type: ignore[misc]


def test_workers_that_differ_are_refused_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    def one(refused: bool) -> Callable[[Workers], None]:
        return lambda workers: workers.agree("versions", {"torch": f"2.{workers.rank}"}, refused=refused)

    with pytest.raises(KflatsError, match=r"differ in versions: torch 2\.0 and 2\.1"):
        together(2, 0, one(True))
    together(2, 0, one(False))
    assert capsys.readouterr().err.count("differ in versions") == 1


def test_what_last_digits_depend_on_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processors of one instruction set differ where one has units that the other lacks, or another maker."""
    here = workers_module._surroundings()
    assert {"torch", "Python", "processor", "threads"} <= here.keys()
    for name, other in (("cpu_units", ("a unit of tomorrow",)), ("cpu_model", "GenuineOther 6 1")):
        with monkeypatch.context() as there:
            there.setattr(workers_module, name, lambda other=other: other)
            assert workers_module._surroundings()["processor"] != here["processor"]


def test_copies_of_a_model_are_one_model_and_other_weights_are_another(tiny_folder: Path, tmp_path: Path) -> None:
    def both(folder: Path) -> tuple[str, str]:
        data = CalibrationData()
        return copies_fingerprint(folder, data, None), model_fingerprint(folder, data, None)

    shutil.copytree(tiny_folder, copy := tmp_path / "copy")
    os.utime(copy / "model.safetensors", (1, 1))
    (here, mine), (there, theirs) = both(tiny_folder), both(copy)
    assert here == there
    assert mine != theirs  # what is kept of an interrupted run belongs to one folder
    weights = load_file(copy / "model.safetensors")
    name = max(weights, key=lambda name: weights[name].numel())
    save_file({**weights, name: weights[name] + 1}, copy / "model.safetensors")
    assert both(copy)[0] != here


def test_what_one_worker_listed_another_does_not_compute_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(12, 8)})
    (weight,), recipe = find_weights(model), Recipe(SVD())
    item, own, others = WeightCosts(weight, recipe, False, True), CalibrationData(), CalibrationData()
    listed = weight_candidates(model, item, own)
    assert passed_on([item], others).unpack(0, passed_on([item], own).pack(listed)) == listed
    monkeypatch.setattr(SVD, "spectrum", None)
    assert torch.equal(others.spectrum(model, weight, recipe), own.spectrum(model, weight, recipe))


def programs(*texts: str) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen([sys.executable, "-c", f"import os, signal, sys, time; {text}"]) for text in texts]


@pytest.mark.parametrize(
    ("texts", "codes"),
    [
        (("pass", "time.sleep(0.3)"), []),
        (("sys.exit(2)", "time.sleep(60)"), [2]),
        (("time.sleep(60)", "os.kill(os.getpid(), signal.SIGKILL)"), [-9]),
        (("sys.exit(2)", "time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)"), [2, -9]),
        (("time.sleep(0.3); sys.exit(2)", "os.kill(os.getpid(), signal.SIGSTOP)"), [2]),
    ],
)
def test_what_ends_by_itself_is_told_from_what_was_ended(texts: tuple[str, ...], codes: list[int]) -> None:
    """An error of one worker was followed by advice on memory, for the others were ended because of it."""
    running, began = programs(*texts), time.monotonic()
    try:
        assert sorted(launcher._failures(running)) == sorted(codes)
    finally:
        launcher._end(running)
    assert all(process.returncode is not None for process in running)
    assert time.monotonic() - began < 30


def test_a_connection_that_is_lost_is_an_error_to_read() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Callable[..., None]:
            def lost(*_: object) -> None:
                raise RuntimeError("Broken pipe")

            return lost

    connection: Store = workers_module._Connection(Gone())
    workers = Workers(1, 2, connection)
    with pytest.raises(LostWorkerError, match=r"the connection of the workers is lost: Broken pipe.*which resumes"):
        workers.divided(TASKS, lambda index: index, NUMBERS)
    assert workers.failed("an error"), "it says so itself"


def test_an_error_stops_the_others_and_is_said_once() -> None:
    def one(workers: Workers) -> object:
        if workers.rank:
            return workers.failed("a weight holds NaN")
        with pytest.raises(LostWorkerError, match="another worker failed"):
            workers.meet()
        return workers.failed("another message")

    assert together(2, 0, one) == [False, True]


def table_file(folder: Path, rows: int = 40_000) -> Path:
    path = folder / "rows.npy"
    np.save(path, np.random.default_rng(0).standard_normal((rows, 6), dtype=np.float32))
    return path


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, {"layout": "compact"}),
        (3, {"layout": "fast"}),
        pytest.param(3, {"flats": 3, "row_weights": 1 / (9 + torch.arange(40_000))}, marks=pytest.mark.slow),
        pytest.param(3, {"layout": "compact"}, marks=pytest.mark.slow),
        pytest.param(2, {"flats": 3, "row_weights": 1 / (9 + torch.arange(40_000))}, marks=pytest.mark.slow),
    ],
)
def test_the_bytes_of_a_table_do_not_depend_on_the_workers(
    count: int, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "UNIT", 16384)
    source = table_file(tmp_path)

    def made(folder: Path, workers: Workers) -> dict[str, bytes]:
        compress_table(source, folder, size="6 bits", shard_rows=16384, quiet=True, workers=workers, seed=3, **options)
        workers.meet()  # the first has put the folder in its place
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    alone = made(tmp_path / "alone", Workers())
    assert sum(name.endswith(".safetensors") for name in alone) == 4  # three files of rows, and the head
    assert together(count, count, lambda workers: made(tmp_path / "several", workers)) == [alone] * count


@pytest.mark.slow
def test_short_tables_that_are_tried_again_and_copies_of_their_files(tmp_path: Path) -> None:
    """A code whose size does not suit is known to all workers at the same step, and each may read files of its own."""
    sources = []
    for rank in range(3):
        (folder := tmp_path / f"copy-{rank}").mkdir()
        sources.append(table_file(folder, 20_000))

    def made(folder: Path, workers: Workers) -> dict[str, bytes]:
        compress_table(sources[workers.rank], folder, size="21kB", quiet=True, workers=workers)
        workers.meet()
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    alone = made(tmp_path / "alone", Workers())
    for seed in range(4):
        out = tmp_path / f"out-{seed}"
        assert together(3, seed, lambda workers, out=out: made(out, workers)) == [alone] * 3  # type: ignore[misc]
        assert not (tmp_path / f".{out.name}.kflats-partial").exists()


def test_a_full_disk_of_one_worker_stops_all_and_leaves_finished_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, whole = table_file(tmp_path), ShardWriter.add
    said, full = list[KflatsError](), threading.Event()

    def add(self: ShardWriter, codes: Bytes) -> None:
        if threading.current_thread().name.endswith("_1"):
            full.set()
            raise OSError(errno.ENOSPC, "No space left on device", "shard")
        assert full.wait(30)  # else this worker may be done before the other begins
        whole(self, codes)

    def one(workers: Workers) -> None:
        threading.current_thread().name = f"worker_{workers.rank}"
        try:
            compress_table(source, tmp_path / "coded", size="6 bits", shard_rows=16384, quiet=True, workers=workers)
        except KflatsError as error:
            said.append(error)
            workers.failed(str(error))
        except LostWorkerError:
            pass

    monkeypatch.setattr(ShardWriter, "add", add)
    together(2, 0, one)
    assert any("no space left on device" in str(error) for error in said)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".coded.kflats-partial", "rows.npy"]
    kept = list(tmp_path.glob(".coded.kflats-partial/*/*.safetensors"))
    assert kept
    assert all(path.with_suffix(".json").is_file() for path in kept)  # no file that is not whole
    monkeypatch.undo()
    for folder in ("coded", "alone"):
        compress_table(source, tmp_path / folder, size="6 bits", shard_rows=16384, quiet=True)
    files = [{path.name: path.read_bytes() for path in (tmp_path / one).iterdir()} for one in ("coded", "alone")]
    assert files[0] == files[1]
    assert not (tmp_path / ".coded.kflats-partial").exists()


COMMAND = (sys.executable, "-m", "kflats", "compress")
SURROUNDINGS = os.environ | {"OMP_NUM_THREADS": "1"}
OPTIONS = ("--size", "40%", "--no-proof", "--samples", "130", "--worker-timeout", "5")


TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
OF_TABLES = ("--size", "4 bits", "--worker-timeout", "5")


def command(source: Path, out: Path) -> list[str]:
    """Compresses a model, which is a folder, or a table, which is a file."""
    given = [str(source), *OPTIONS] if source.is_dir() else ["--table", str(source), *OF_TABLES]
    return [*COMMAND, *given, "--out", str(out)]


BEGUN: list[subprocess.Popen[str]] = []


def begin(arguments: list[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(arguments, env=SURROUNDINGS, stderr=subprocess.PIPE, text=True, start_new_session=True)
    BEGUN.append(process)
    return process


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    """Where a test fails, what it began ends with it."""
    yield
    while BEGUN:
        if (process := BEGUN.pop()).poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def compressed(source: Path, out: Path, count: int) -> subprocess.Popen[str]:
    return begin([*command(source, out), "--workers", str(count)])


def in_torchrun(source: Path, out: Path, count: int, before: str = "true") -> subprocess.Popen[str]:
    """Each worker runs ``before`` in bash, which may ask for its ``$RANK``."""
    line = f'{before}; exec {shlex.join(command(source, out))} "$@"'
    return begin([*TORCHRUN, "--nproc-per-node", str(count), "--no-python", "bash", "-c", line])


def ended(process: subprocess.Popen[str]) -> str:
    """What it wrote on stderr."""
    return process.communicate(timeout=600)[1]


def check_made(process: subprocess.Popen[str], out: Path, files: dict[str, bytes]) -> None:
    """It succeeds, and makes these files, and nothing beside them."""
    message = ended(process)
    assert process.returncode == 0, message
    assert holds(out) == files
    assert left(out.parent) == [out.name]


@pytest.fixture(scope="module")
def alone(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("alone") / "small"
    ended(compressed(tiny_folder, out, 1))
    return holds(out)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_the_bytes_of_a_folder_do_not_depend_on_the_workers(
    count: int, alone: dict[str, bytes], tiny_folder: Path, tmp_path: Path
) -> None:
    check_made(compressed(tiny_folder, tmp_path / "small", count), tmp_path / "small", alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--quality", "0.9", "--samples", "130"),
        ("--method", "flats", "--flats", "search", "--keep", "40%"),
        ("--trim", "200", "--texts", "TEXTS"),
    ],
    ids=["quality", "flats that are searched", "quality of a trimmed vocabulary"],
)
def test_what_is_searched_does_not_depend_on_the_workers(
    options: Sequence[str], tiny_folder: Path, tmp_path: Path
) -> None:
    """A size by what outputs lose, the default of the command line, and flats by their error."""
    (texts := tmp_path / "texts.txt").write_text("\n".join(f"the word{i} of word{2 * i} a b" for i in range(120)))
    given, made = [str(texts) if option == "TEXTS" else option for option in options], []
    for count in (1, 2):
        out = tmp_path / f"small-{count}"
        line = [*COMMAND, str(tiny_folder), *given, "--no-proof", "--out", str(out), "--workers", str(count)]
        message = ended(process := begin(line))
        assert process.returncode == 0, message
        made.append(holds(out))
    assert made[0] == made[1]


@pytest.mark.slow
def test_each_worker_may_have_a_copy_of_the_model(alone: dict[str, bytes], tiny_folder: Path, tmp_path: Path) -> None:
    for rank in range(2):
        shutil.copytree(tiny_folder, tmp_path / f"copy-{rank}", copy_function=shutil.copyfile)
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nfrom kflats.cli.app import app\n"
        f"folder = {str(tmp_path / 'copy-')!r} + os.environ['RANK']\n"
        f"app(['compress', folder, '--out', {str(tmp_path / 'small')!r}, *{OPTIONS!r}])\n"
    )
    line = [*TORCHRUN, "--nproc-per-node", "2", str(program)]
    subprocess.run(line, env=SURROUNDINGS, check=True, capture_output=True, timeout=600)
    assert holds(tmp_path / "small") == alone
    weights = load_file(tmp_path / "copy-1" / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, tmp_path / "copy-1" / "model.safetensors")
    shutil.rmtree(tmp_path / "small")
    done = subprocess.run(line, env=SURROUNDINGS, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode
    assert "differ in the model, the data or its files" in done.stderr
    assert not (tmp_path / "small").exists()


def workers_of(process: subprocess.Popen[str]) -> Iterator[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return map(int, children.read_text().split()) if children.exists() else iter(())


def begun(process: subprocess.Popen[str], count: int = 2) -> list[int]:
    """All workers, once they are there."""
    while len(found := list(workers_of(process))) < count:
        assert process.poll() is None
        time.sleep(0.05)
    return found


def came(process: subprocess.Popen[str], there: Callable[[], bool]) -> bool:
    """Wait for something that a process does; whether it does it."""
    while True:
        done = process.poll() is not None  # before the look, so that nothing comes between
        if there() or done:
            return not done or there()
        time.sleep(0.003)


def beside(out: Path, kind: str) -> Path:
    return out.with_name(f".{out.name}.kflats-{kind}")


def kept(out: Path) -> int:
    """How many files of an unfinished run there are."""
    return sum(len(files) for _, _, files in os.walk(beside(out, "partial")))


class Undisturbed(NamedTuple):
    """What two workers make of ``source``; ``seconds``: from when they have their folder until the output is there;
    ``kept``: how many files are beside it in between, at most."""

    source: Path
    files: dict[str, bytes]
    seconds: float
    kept: int


@pytest.fixture(scope="module")
def undisturbed(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Undisturbed]:
    """Of a "model" or a "table"; made once."""
    known: dict[str, Undisturbed] = {}

    def made(name: str) -> Undisturbed:
        if name not in known:
            folder, most = tmp_path_factory.mktemp(name), 0
            source = tiny_folder if name == "model" else table_file(folder, 1_200_000)
            process = compressed(source, out := folder / "small", 2)
            assert came(process, beside(out, "new").exists), ended(process)
            since = time.monotonic()

            def finished() -> bool:
                nonlocal most
                most = max(most, kept(out))
                return out.exists()

            assert came(process, finished), ended(process)
            seconds = time.monotonic() - since
            ended(process)
            known[name] = Undisturbed(source, holds(out), seconds, most)
        return known[name]

    return made


FINDS_WORKERS = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the workers in /proc")


@pytest.mark.slow
@FINDS_WORKERS
def test_a_run_in_the_background_of_a_script_is_ended_with_its_workers(
    undisturbed: Callable[[str], Undisturbed], tmp_path: Path
) -> None:
    """Such processes ignore what a terminal sends (SIGINT), and so do those that they start."""
    whole, out = undisturbed("model"), tmp_path / "small"
    process = begin(["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command(whole.source, out), "--workers", "2"])
    begun(process)
    assert came(process, beside(out, "new").exists)
    process.terminate()
    assert "interrupted" in ended(process)
    assert process.returncode
    assert not out.exists()
    check_made(compressed(whole.source, out, 2), out, whole.files)


@pytest.mark.slow
@FINDS_WORKERS
@pytest.mark.parametrize("seed", range(30))
def test_a_worker_killed_at_work_ends_the_run_and_the_same_command_resumes(
    seed: int, undisturbed: Callable[[str], Undisturbed], tmp_path: Path
) -> None:
    """A worker dies after a part of the time between the folder of the job and its output, or of the files that come
    meanwhile: an earlier one where the job was done before."""
    whole, drawn = undisturbed("model" if seed % 3 else "table"), random.Random(seed)
    count, torchrun, by_files, part = 4 if seed % 14 == 6 else 2, seed % 10 == 9, drawn.random() < 0.5, drawn.random()
    for attempt in range(6):
        (folder := tmp_path / f"{attempt}").mkdir()
        out = folder / "small"
        process = (in_torchrun if torchrun else compressed)(whole.source, out, count)
        found = begun(process, count)
        if came(process, beside(out, "new").exists):
            if by_files:
                came(process, lambda out=out, least=1 + int(part * whole.kept): kept(out) >= least)  # type: ignore[misc]
            else:
                time.sleep(part * whole.seconds)
        was_at_work = not out.exists()
        with suppress(ProcessLookupError):  # this worker may have left already, its work done
            os.kill(drawn.choice(found), signal.SIGKILL)
        message = ended(process)
        if was_at_work and "SIGKILL" in message and not out.exists():
            break
        assert not out.exists() or holds(out) == whole.files
        part /= 2
    else:
        pytest.fail(f"no worker was killed at work; the last run said: {message}")
    assert process.returncode == (1 if torchrun else 2)
    assert torchrun or "the same command again, which resumes" in message
    check_made(compressed(whole.source, out, 2), out, whole.files)


@pytest.mark.slow
def test_the_command_line_divides_a_table(tmp_path: Path) -> None:
    source, made = table_file(tmp_path, 300_000), []
    for count in (1, 2, 4):
        out = tmp_path / f"coded-{count}"
        line = [*COMMAND, "--table", str(source), "--out", str(out), "--size", "4 bits", "--workers", str(count)]
        subprocess.run(line, env=SURROUNDINGS, check=True, capture_output=True)
        made.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert made[0] == made[1] == made[2]


@pytest.mark.slow
def test_an_error_of_one_worker_is_all_that_is_said(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((20_000, 8)).astype(np.float32)
    rows[7, 3] = np.nan
    np.save(tmp_path / "rows.npy", rows)
    source, out = tmp_path / "rows.npy", tmp_path / "coded"
    line = [*COMMAND, "--table", str(source), "--out", str(out), "--size", "4 bits", "--workers", "2"]
    done = subprocess.run(line, env=SURROUNDINGS, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("kflats:") == 1
    assert "in row 7 of" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npy"]


@pytest.mark.slow
@FINDS_WORKERS
@pytest.mark.parametrize(("name", "rank"), [("model", 0), ("model", 1), ("table", 0), ("table", 1)])
def test_a_stopped_worker_ends_the_run_with_a_message_and_the_same_command_resumes(
    name: str, rank: int, undisturbed: Callable[[str], Undisturbed], tmp_path: Path
) -> None:
    whole, out = undisturbed(name), tmp_path / "small"
    process = compressed(whole.source, out, 2)
    found = begun(process)
    assert came(process, beside(out, "new").exists)
    os.kill(found[rank], signal.SIGSTOP)
    message = ended(process)
    assert process.returncode == 2
    assert f"worker {rank} is lost" in message
    assert not out.exists()
    check_made(compressed(whole.source, out, 2), out, whole.files)


NEEDS_BASH = pytest.mark.skipif(shutil.which("bash") is None, reason="one worker differs by a line of bash")


@pytest.mark.slow
@NEEDS_BASH
@pytest.mark.parametrize(("name", "rank"), [("model", 0), ("table", 1)])
def test_under_torchrun_a_worker_that_cannot_write_ends_the_run(
    name: str, rank: int, undisturbed: Callable[[str], Undisturbed], tmp_path: Path
) -> None:
    whole, out = undisturbed(name), tmp_path / "small"
    full = in_torchrun(whole.source, out, 2, f"if [ $RANK = {rank} ]; then ulimit -f 2; fi")  # files of at most 2 KiB
    message = ended(full)
    assert full.returncode
    assert message.count("file too large") == 1
    assert not out.exists()
    check_made(in_torchrun(whole.source, out, 2), out, whole.files)


@pytest.mark.slow
@NEEDS_BASH
def test_workers_with_other_libraries_are_refused_unless_that_is_allowed(tmp_path: Path) -> None:
    """The second worker finds the metadata of another safetensors first."""
    source, out = table_file(tmp_path, 20_000), tmp_path / "out" / "small"
    (metadata := tmp_path / "other" / "safetensors-99.dist-info").mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: safetensors\nVersion: 99\n")
    other = f"export PYTHONPATH={shlex.quote(str(metadata.parent))}${{PYTHONPATH:+:$PYTHONPATH}}"
    differs = f"workers 0 and 1 differ in versions or machines: safetensors {version('safetensors')} and 99"
    refused = in_torchrun(source, out, 2, before := f"if [ $RANK = 1 ]; then {other}; fi")
    message = ended(refused)
    assert refused.returncode
    assert differs in message
    assert "--allow-unlike-workers" in message
    assert left(out.parent) == []
    allowed = in_torchrun(source, out, 2, f"{before}; set -- --allow-unlike-workers")
    message = ended(allowed)
    assert allowed.returncode == 0, message
    assert message.count(differs) == 1
    assert left(out.parent) == ["small"]


def mounts(folder: Path) -> bool:
    """Whether a disk in memory can be mounted where no other process sees it."""
    tried = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    return shutil.which("unshare") is not None and subprocess.run(tried, capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_full_disk_ends_all_workers_and_with_room_the_same_command_resumes(
    undisturbed: Callable[[str], Undisturbed], tmp_path: Path
) -> None:
    """A disk of six tenths of the table, which becomes larger."""
    (disk := tmp_path / "disk").mkdir()
    if not mounts(disk):
        pytest.skip("no disk can be mounted")
    whole, copies = undisturbed("table"), [tmp_path / "full", tmp_path / "large"]
    room = sum(map(len, whole.files.values())) * 6 // 10
    line, place = shlex.join([*command(whole.source, disk / "small"), "--workers", "2"]), shlex.quote(str(disk))
    first, second = (f"cp -a {place}/. {shlex.quote(str(copy))}" for copy in copies)
    steps = [f"mount -t tmpfs -o size={room} none {place} || exit 99", line, f"code=$?; {first}"]
    steps += [f"mount -o remount,size={20 * room} {place} || exit 99", f"{line} || exit 98", second, "exit $code"]
    process = begin(["unshare", "-rm", "sh", "-c", "\n".join(steps)])
    message = ended(process)
    assert process.returncode == 2, message
    assert message.count("kflats:") == 1
    assert "no space left on device" in message
    assert left(copies[0]) == [".small.kflats-partial"]
    finished = list(copies[0].glob(".small.kflats-partial/*/*.safetensors"))
    assert finished
    assert {path.with_suffix(".json") for path in finished} == set(copies[0].glob(".small.kflats-partial/*/*.json"))
    assert left(copies[1]) == ["small"]
    assert holds(copies[1] / "small") == whole.files


def on_two_machines(source: Path, out: Path) -> list[subprocess.Popen[str]]:
    """As on two machines, of which each has one worker, and which meet at a port of the first. They are on this one,
    where torchrun lets the process that comes first hold the port; the other one fails in words of its own when the
    holder ends."""
    port = launcher._free_port()
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "a job"]
    nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--local-addr", "127.0.0.1"]
    words = [*TORCHRUN, *nodes, *meeting, *command(source, out)[1:]]

    def listens() -> bool:
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", port)) == 0

    first = begin(words)
    assert came(first, listens)
    return [first, begin(words)]


@pytest.mark.slow
@FINDS_WORKERS
def test_two_machines_make_the_same_bytes_also_after_a_worker_of_one_was_killed(
    undisturbed: Callable[[str], Undisturbed], tmp_path: Path
) -> None:
    whole, out = undisturbed("table"), tmp_path / "small"
    machines = on_two_machines(whole.source, out)
    found = begun(machines[1], 1)
    assert came(machines[0], beside(out, "new").exists)
    os.kill(found[0], signal.SIGKILL)
    messages = [ended(machine) for machine in machines]
    assert all(machine.returncode for machine in machines), messages
    assert "SIGKILL" in messages[1]
    assert "is lost" in messages[0]
    assert not out.exists()
    first, second = on_two_machines(whole.source, out)
    message = ended(second)
    check_made(first, out, whole.files)
    assert second.returncode == 0, message


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model", "table"])
def test_of_two_jobs_with_one_output_one_is_refused(
    name: str, undisturbed: Callable[[str], Undisturbed], tmp_path: Path
) -> None:
    whole, out = undisturbed(name), tmp_path / "small"
    jobs = [compressed(whole.source, out, 2) for _ in range(2)]
    messages = [ended(job) for job in jobs]
    refused = [message for job, message in zip(jobs, messages, strict=True) if job.returncode]
    assert sorted(job.returncode for job in jobs) == [0, 2], messages
    assert "another run is writing" in refused[0] or "exists already" in refused[0]
    assert holds(out) == whole.files
    assert left(tmp_path) == ["small"]
