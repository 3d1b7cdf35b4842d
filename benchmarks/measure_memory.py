"""Question: does measuring take more memory than a plain forward + backward and the statistics in hand?

Each case runs in a fresh process. Its peak is the largest resident set after the model was loaded, less the resident
set before that (torch and transformers imported): it holds the model, a batch's activations, and all that measuring
allocates. "bound" is the peak of a plain forward + backward of all parameters over the same batches, that is the model,
one gradient and a batch's activations, and the sums that are kept at once. Linux only: it reads /proc.

    python benchmarks/measure_memory.py --write benchmarks/results/measure_memory.md
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import transformers.models.bert.modeling_bert  # noqa: F401  imported before memory is counted
from _common import arguments, markdown, publish, resident
from _sentences import classifier, labelled_batches

from kflats.calibration.accumulators import Accumulator
from kflats.calibration.collect import measure
from kflats.calibration.counting import BLOCK
from kflats.common.formatting import size
from kflats.importance import InputGram, KroneckerFisher, RowFisher, TwoSided

PLAIN = "plain forward + backward"
LITTLE = 100_000_000
CASES: dict[str, tuple[frozenset[str], int]] = {
    PLAIN: (frozenset(), 0),
    "RowFisher": (RowFisher.needs, 2_000_000_000),
    "TwoSided": (TwoSided.needs, 2_000_000_000),
    "InputGram": (InputGram.needs, 2_000_000_000),
    "KroneckerFisher": (KroneckerFisher.needs, 2_000_000_000),
    f"KroneckerFisher, memory_bytes={LITTLE // 10**6}e6": (KroneckerFisher.needs, LITTLE),
}


def main() -> None:
    options = arguments(__doc__, samples=128, batch=16, length=128, case="")
    if options.case:
        print(json.dumps(one(options.case, options.samples, options.batch, options.length)))
        return
    rows, plain = [], 0
    for case in CASES:
        asked = ["--case", case, *(f"--{name}={getattr(options, name)}" for name in ("samples", "batch", "length"))]
        done = subprocess.run([sys.executable, __file__, *asked], check=True, capture_output=True, text=True)
        about = json.loads(done.stdout.splitlines()[-1])
        plain = about["peak"] if case == PLAIN else plain
        bound = plain + about["sums"]
        shown = [size(value) for value in (2 * about["model"], about["sums"], bound, about["peak"])]
        rows.append([case, *shown, f"**{about['peak'] / bound:.2f}**", "<= 1"])
        print(case, about, flush=True)
    name = f"36 linear layers of MiniLM, {options.samples} texts in batches of {options.batch}"
    head = [name, "model and one gradient", "statistics in hand", "bound", "peak", "peak / bound", "target"]
    publish("Memory of measuring", markdown(head, rows), options)


def one(case: str, samples: int, batch: int, length: int) -> dict[str, int]:
    """Bytes of the model, of the sums that are kept at once, and of the peak, in this process."""
    needs, allowed = CASES[case]
    batches = labelled_batches(samples, batch, length)
    before = resident("VmRSS")
    model, weights = classifier()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here: loading has its own
    if needs:
        measure(model, weights, batches, needs=needs, memory_bytes=allowed, quiet=True)
    else:
        for one_batch in batches:
            model(**one_batch).loss.backward()
            model.zero_grad()
    copies = 1 if samples <= BLOCK else 2  # the sums of one block, and of the blocks before it
    sums = copies * sum(Accumulator.nbytes(weight, needs) for weight in weights) if needs else 0
    held = {id(p): p for p in (*model.parameters(), *model.buffers())}.values()
    model_bytes = sum(p.numel() * p.element_size() for p in held)
    return {"model": model_bytes, "sums": min(sums, allowed), "peak": resident("VmHWM") - before}


if __name__ == "__main__":
    main()
