"""Question: what does ``torch.compile`` make of a folder in codes, in each run-time form?

all-MiniLM-L6-v2, and the same in 8 MB, as they are and compiled by inductor, in calls without gradients. Seconds of the
first call, which compiles; then times of one text of 20 tokens and of 32 texts of 30 and of 128, on one thread, as
multiples of the original as it is. Contestants take turns; a ratio is a median over turns, with its 95 % interval.

    python benchmarks/compiled.py --write benchmarks/results/compiled.md

``--compressed DIR`` takes a folder of kflats that is there. A C++ compiler is needed.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from _common import arguments, markdown, publish
from torch import nn

from kflats import compress_folder, run_as_
from kflats.common.run_forms import RunForm
from kflats.common.texts import packaged_texts
from kflats.demo import packaged_model
from kflats.evaluation.latency import SHAPES, Run, latencies
from kflats.evaluation.outputs import load_tokenizer
from kflats.evaluation.running import run
from kflats.io import load_model

TITLE = "Models in codes, compiled by torch"


@dataclass(frozen=True)
class Contestant:
    """A model as it is, or compiled."""

    name: str
    load: Callable[[], nn.Module]
    is_compiled: bool

    def build(self) -> Run:
        model = self.load().eval()
        return partial(run, torch.compile(model) if self.is_compiled else model)


def in_form(folder: Path, form: RunForm) -> nn.Module:
    model: nn.Module = load_model(folder)
    run_as_(model, form)
    return model


def first_call(contestant: Contestant) -> float:
    """Seconds of the first call of the first shape, everything compiled anew."""
    torch.compiler.reset()
    call, (texts, tokens) = contestant.build(), SHAPES[0]
    ids = torch.ones(texts, tokens, dtype=torch.int64)
    start = time.perf_counter()
    with torch.inference_mode():
        call({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return time.perf_counter() - start


def main() -> None:
    options = arguments(__doc__, turns=15, compressed="")
    import torch._dynamo

    # Several compiled models in a process share code, which has eight graphs at most; then it runs without a compiler.
    torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit = 64, True
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # on the disk: a second run would measure another thing
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(options.compressed or f"{place}/8MB")
        if not options.compressed:
            compress_folder(packaged_model(), folder, size="8MB", proof=False, quiet=True)
        ways = {"original": partial(load_model, packaged_model())}
        ways |= {f"8 MB, {form}": partial(in_form, folder, form) for form in get_args(RunForm)}
        contestants = [
            Contestant(f"{name}{', compiled' * is_compiled}", load, is_compiled)
            for name, load in ways.items()
            for is_compiled in (False, True)
        ]
        lines = {one.name: [one.name, f"{first_call(one):.1f} s"] for one in contestants}
        said = "\n".join(packaged_texts("count"))
        text = torch.tensor(load_tokenizer(packaged_model())(said, verbose=False)["input_ids"])
        timed, reasons = latencies(contestants, load_model(packaged_model()), turns=options.turns, text=text)
        if reasons:
            raise SystemExit(str(reasons))
        for one in timed:
            lines[one.name].append(f"{one.ratio:.2f} ({one.low:.2f} to {one.high:.2f})")
        head = ["model", "first call", *(f"{texts} x {tokens}" for texts, tokens in SHAPES)]
        publish(TITLE, markdown(head, list(lines.values())), options)


if __name__ == "__main__":
    main()
