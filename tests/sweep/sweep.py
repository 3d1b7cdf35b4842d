"""Every model type of the installed transformers through the life of a compressed model, in processes of its own.

    python tests/sweep/sweep.py run --log LOG [--resume] [--shard 3/8] [--only TYPE ...]
    python tests/sweep/sweep.py run --log LOG --held-in docs/architectures.md --sample 20 --seed TEXT
    python tests/sweep/sweep.py table LOG > docs/architectures.md

The log has a line of JSON for each model type and stage; a later run replaces an earlier one. A process without models
forks one for each part of a life, so what loads a folder never held the model that was saved.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import re
import resource
import select
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SECONDS = 120.0
"""Processor time of one part of a life; on the clock four times as much."""
MEMORY = 4 * 2**30


def lives(model_type: str, ways: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The records of one model type, each stage as it ends."""
    import life
    import transformers

    with contextlib.suppress(Exception):  # the fork says what is wrong
        getattr(transformers, life.class_name(model_type))
    parts: tuple[Callable[..., None], ...] = (life.compressing, life.loading, life.again, life.commanding)
    with tempfile.TemporaryDirectory(prefix="kflats-sweep-") as name:
        for part in parts:
            yield from _forked(partial(part, ways=ways), model_type, Path(name))


def _forked(part: partial[None], model_type: str, folder: Path) -> Iterator[dict[str, Any]]:
    read, write = os.pipe()
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(read)
        _live(part, model_type, folder, write)
    os.close(write)
    told, ended = b"", False
    while not ended:
        ready, _, _ = select.select([read], [], [], 1.0)
        if ready:
            more = os.read(read, 65536)
            told, ended = told + more, not more
        elif time.monotonic() - begin > 4 * SECONDS:
            os.kill(child, signal.SIGKILL)
    os.close(read)
    _, status = os.waitpid(child, 0)
    records = [json.loads(line) for line in told.decode().splitlines() if line.endswith("}")]
    yield from records
    if status:
        cut = "over its limit of time or memory" if os.WIFSIGNALED(status) else "its process ended"
        yield {
            "stage": f"after {records[-1]['stage'] if records else 'the start'}",
            "outcome": "failed",
            "message": f"{part.func.__name__}: {cut} (status {status})",
            "seconds": round(time.monotonic() - begin, 2),
        }


def _live(part: partial[None], model_type: str, folder: Path, write: int) -> None:
    """In the forked process: the part, under its limits. It never returns."""
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (int(SECONDS), int(SECONDS) + 5))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)

        def say(stage: str, outcome: str, message: str, seconds: float) -> None:
            record = {"stage": stage, "outcome": outcome, "message": message, "seconds": round(seconds, 2)}
            os.write(write, (json.dumps(record).replace(str(folder), "FOLDER") + "\n").encode())

        part(model_type, folder, say)
        status = 0
    finally:
        os._exit(status)


def run(options: argparse.Namespace) -> int:
    """Write the log; 1 if something failed."""
    import life
    import torch
    import transformers

    from kflats.common.release import version

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    types = list(options.only or life.model_types())
    if options.held_in:
        page = Path(options.held_in).read_text(encoding="utf-8").partition("## Held")[2].partition("Not run")[0]
        held = set(re.findall(r"[\w.-]*\w", page))
        types = [name for name in types if name in held]
    if options.shard:
        place, of = map(int, options.shard.split("/"))
        types = types[place - 1 :: of]
    if options.sample:
        types = random.Random(options.seed).sample(types, min(options.sample, len(types)))
    random.Random(options.seed).shuffle(types)  # what a run that is stopped has done is a sample
    log = Path(options.log)
    ways = options.ways or list(life.WAYS)
    done = _lived(log, ways) if options.resume and log.exists() else set()
    versions = f"kflats {version()}, transformers {transformers.__version__}, torch {torch.__version__}"
    _warm_up(life, ways)
    failed = 0
    with log.open("a") as file:
        for model_type in types:
            if model_type in done:
                continue
            about = {"type": model_type, "ways": ways, "versions": versions}
            records = [{**about, **record} for record in lives(model_type, ways)]
            file.writelines(json.dumps(record) + "\n" for record in records)
            file.flush()
            wrong = [record for record in records if record["outcome"] == "failed"]
            failed += bool(wrong)
            for record in wrong:
                print(f"{model_type}: {record['stage']}: {record['message']}", flush=True)
    print(f"{len(types)} model types, {failed} failed", flush=True)
    return int(failed > 0)


def _lived(log: Path, ways: Sequence[str]) -> set[str]:
    """The model types whose lives in the log have all of the ``ways``."""
    found: dict[str, set[str]] = {}
    for line in log.read_text().splitlines():
        record = json.loads(line)
        found.setdefault(record["type"], set()).update(record["ways"])
    return {name for name, had in found.items() if had >= set(ways)}


def _warm_up(life: Any, ways: Sequence[str]) -> None:
    """Live a life here, so that all it imports is there: a fork then takes milliseconds. No model is kept."""
    with tempfile.TemporaryDirectory(prefix="kflats-sweep-") as folder:
        for part in (life.compressing, life.loading, life.again, life.commanding):
            part("bert", Path(folder), lambda *_: None, ways=("tables", "data", *set(ways) - set(life.COMPRESSIONS)))
    gc.collect()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--log", default="sweep.jsonl")
    runs.add_argument("--resume", action="store_true", help="go on with the types that the log lacks")
    runs.add_argument(
        "--ways",
        nargs="+",
        metavar="WAY",
        help="tables, linear, size, data, compare, dense, onnx, trim, recover, smallest; default: all",
    )
    runs.add_argument("--shard", metavar="I/N")
    runs.add_argument("--only", nargs="+", metavar="TYPE")
    runs.add_argument("--sample", type=int, metavar="N")
    runs.add_argument("--held-in", metavar="PAGE", help="only the types that a page of such a table says held")
    runs.add_argument("--seed", default="0")
    runs.set_defaults(work=run)
    tables = commands.add_parser("table")
    tables.add_argument("log")
    tables.add_argument("--onto", metavar="PAGE", help="replace in this page what it says of the types in the log")
    tables.set_defaults(work=lambda options: __import__("sweep_table").main(options.log, options.onto))
    options = parser.parse_args()
    return int(options.work(options))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
