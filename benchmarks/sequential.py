"""Question: how much nearer to the original does sequential calibration bring an encoder, and at which sizes?

All weights of all-MiniLM-L6-v2, from one measurement and one plan. "one pass": each weight is coded by itself.
"sequential": tables, and layers of more than twice as many inputs as outputs, are coded by themselves; the others one
after another, in what is left of the file, for what they read behind coded tables and layers
(``kflats.compress.sequential``). Their target is a part of the way to the matrix of least squares.

Cosines of sentence vectors to the original's: mean / 5th percentile. What kflats does was chosen on CoLA (dev) and
paragraphs of WikiText-2 (valid). "took": seconds of coding all weights but those that one pass coded alike.

    python benchmarks/sequential.py --write benchmarks/results/sequential.md
    python benchmarks/sequential.py --sizes 4MB,8MB --parts 1 --windows 128,64 --wide 9

``--parts``: of the way. ``--windows``: of calibration text. ``--wide``: inputs an output up to which a layer has a
target. ``--texts 0``: without texts, with windows that are drawn.
"""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from _common import arguments, publish, table
from _sentences import data_folder, paragraphs, sentences

import kflats.calibration.sequential as calibrated
from kflats import Auto, read_texts
from kflats.compress import sequential
from kflats.compress.fitting import CompressedWeight, Partial, swapped
from kflats.compress.sequential import fitted
from kflats.demo import packaged_model
from kflats.evaluation.outputs import fidelity_of, load_tokenizer, weight_file_bytes
from kflats.evaluation.running import encode
from kflats.io import load_model
from kflats.planning.calibration_data import gather
from kflats.planning.decide import Sharing, decide
from kflats.recipe.budget import one_budget

BESIDE = Partial.beside


@dataclass(frozen=True)
class Way:
    """How layers are coded."""

    name: str
    in_order: bool = False
    part: float = sequential._PART
    windows: int = sequential._WINDOWS
    wide: int = sequential._WIDE


def main() -> None:
    options = arguments(__doc__, sizes="4MB,5MB,6MB,8MB", parts="", windows="", wide="", texts=1, judged=800)
    torch.set_num_threads(1)
    source, data = packaged_model(), data_folder()
    if data is None:
        raise SystemExit("no folder of data sets: set KFLATS_DATA")
    original, tokenizer = load_model(source), load_tokenizer(source)
    judged = {
        "cola": sentences("cola")[: options.judged],
        "paragraphs, valid": paragraphs("valid", options.judged // 6),
        "stsb": sentences("stsb")[: options.judged],
        "paragraphs, test": paragraphs("test", options.judged // 6),
    }
    before = {name: encode(original, tokenizer, texts) for name, texts in judged.items()}
    texts = read_texts(data / "wikitext2" / "train.txt.gz") if options.texts else None
    known = gather(texts, tokenizer, None, None, None).windowed(original)
    files = weight_file_bytes(source)
    lines: list[dict[str, object]] = []
    for size in options.sizes.split(","):
        budget = one_budget(None, size)
        decided = decide(original, {"all": Auto()}, budget, known, Sharing(file_bytes=files))
        known = decided.data
        with tempfile.TemporaryDirectory() as folder:
            for way in ways(options):
                model = load_model(source)
                done, seconds = coded(model, decided, way, Partial(Path(folder) / "out", size), int(budget.amount))
                layers = [one for one in done if one.decision.weight.name.startswith("encoder.layer.")]
                line: dict[str, object] = {"size": size, "what": way.name, "36 layers": bits(layers)}
                swapped(model, decided.plan, done, 0)
                for kind, texts in judged.items():
                    near = fidelity_of(before[kind], encode(model, tokenizer, texts))
                    line[kind] = f"{near.mean_cosine:.4f} / {near.p5_cosine:.4f}"
                line["took"] = f"{seconds:.0f} s"
                lines.append(line)
                print(line, flush=True)
    publish("Layers coded behind coded layers", table(lines), options)


def ways(options: Any) -> list[Way]:
    """One pass, the default, and what the command asks for."""
    found = [Way("one pass"), Way("sequential", True)]
    found += [Way(f"sequential, part {part}", True, part=float(part)) for part in options.parts.split(",") if part]
    found += [Way(f"sequential, {n} windows", True, windows=int(n)) for n in options.windows.split(",") if n]
    found += [Way(f"sequential, up to {n} inputs an output", True, wide=int(n)) for n in options.wide.split(",") if n]
    return found


def coded(model: Any, decided: Any, way: Way, partial: Partial, limit: int) -> tuple[list[CompressedWeight], float]:
    """The weights, and the seconds that it took; what one pass coded alike is kept in ``partial``."""
    began = time.perf_counter()
    # Under a name of its own, or the next way would take these codes for its own.
    with (
        patch.object(sequential, "_PART", way.part),
        patch.object(sequential, "_WINDOWS", way.windows),
        patch.object(sequential, "_WIDE", way.wide),
        patch.object(calibrated, "_TOKENS", 0),  # few windows are to be seen
        patch.object(Partial, "beside", lambda self, name: BESIDE(self, f"{name} {way}")),
    ):
        done = fitted(model, decided, 0, True, partial, limit, sequential=way.in_order)
    return done, time.perf_counter() - began


def bits(layers: list[CompressedWeight]) -> str:
    """Bits a number of these layers together."""
    numbers = sum(math.prod(one.decision.weight.shape) for one in layers)
    return f"{8 * sum(one.report.bytes_after for one in layers) / numbers:.2f} bits"


if __name__ == "__main__":
    main()
