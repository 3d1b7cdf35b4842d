"""Question: how many seconds of one core does it take to compress a whole encoder, and in which stages?

all-MiniLM-L6-v2, all weights, proof not counted, in seconds of CPU time with one thread. "measure" runs the model over
windows of WikiText-2 (train); "plan" weighs, lists the ways to store each weight and shares the bytes; "fit" makes the
codes, and runs the model behind coded layers; "rest" reads texts, loads, judges sizes and saves. A search by quality
plans and fits several sizes.

    taskset -c 0 python benchmarks/compress_time.py --write benchmarks/results/compress_time.md
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from _common import arguments, publish, table
from _sentences import data_folder

import kflats.compress.pipeline
import kflats.compress.quality
import kflats.planning.calibration_data
import kflats.planning.decide
from kflats import Auto, compress_folder, read_texts
from kflats.demo import packaged_model
from kflats.evaluation.outputs import weight_file_bytes

LINES: dict[str, tuple[dict[str, Any], bool]] = {
    "--size 20MB": ({"size": "20MB"}, True),
    "--size 8MB": ({"size": "8MB"}, True),
    "--size 8MB --no-sequential": ({"size": "8MB", "sequential": False}, True),
    "--size 6MB": ({"size": "6MB"}, True),
    "--size 8MB, no texts": ({"size": "8MB"}, False),
    "--quality 0.99": ({"quality": 0.99}, True),
    "--quality 0.99, no texts": ({"quality": 0.99}, False),
}
STAGES: tuple[tuple[str, ModuleType, str], ...] = (
    ("measure", kflats.planning.calibration_data, "measure"),
    ("plan", kflats.planning.decide, "share_out"),
    ("fit", kflats.compress.pipeline, "fitted"),
    ("fit", kflats.compress.quality, "fitted"),
)
"""The stage, and the function that does its work, where it is called."""


def timed(function: Callable[..., Any], spent: dict[str, float], stage: str) -> Callable[..., Any]:
    """``function``, whose CPU seconds are added to ``spent``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[stage] += time.process_time() - began

    return run


def main() -> None:
    options = arguments(__doc__, texts="", only="")
    torch.set_num_threads(1)
    data = data_folder()
    if not options.texts and data is None:
        raise SystemExit("no folder of data sets: set KFLATS_DATA, or name a file with --texts")
    file = options.texts or str(data) + "/wikitext2/train.txt.gz"
    spent: dict[str, float] = {}
    for stage, module, name in STAGES:
        setattr(module, name, timed(getattr(module, name), spent, stage))
    lines: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as place:
        for name, (asked, with_texts) in LINES.items():
            if options.only not in name:
                continue
            spent.update({stage: 0.0 for stage, _, _ in STAGES})
            out, began = Path(place) / name, time.process_time()
            texts = {"texts": read_texts(file)} if with_texts else {}
            compress_folder(packaged_model(), out, method=Auto(), weights=("all",), quiet=True, **texts, **asked)
            total = time.process_time() - began
            seconds = spent | {"rest": total - sum(spent.values()), "total": total}
            written = f"{weight_file_bytes(out) / 1e6:.2f} MB"
            lines.append(
                {"what": name, "file": written} | {stage: f"{value:.0f} s" for stage, value in seconds.items()}
            )
            print(lines[-1], flush=True)
    publish("The time to compress a whole encoder", table(lines), options)


if __name__ == "__main__":
    main()
