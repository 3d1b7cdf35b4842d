"""Question: how small can a whole encoder be on disk, and what does it lose? Goals: under 8 MB within 1 point of STS-B,
under 6 MB within 3 points; what rounding everything to 8 and 4 bits gives is beside it.

all-MiniLM-L6-v2, 90.9 MB in float32. Every line is a folder written and loaded again: embeddings, 36 linear layers,
the pooler; biases, norms and tokenizer as they are. Calibrated label-free on sentences of WikiText-2 (train), all its
tokens counted; judged on STS-B (dev), another domain: Spearman of the cosines, and the cosine of every sentence vector
to the original's. "all int8" and "all int4" (groups of 64) are given by their files, where integers are entropy coded,
and by what they take uncoded.

    python benchmarks/whole_model.py --write benchmarks/results/whole_model.md
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import arguments, publish, table
from _sentences import sentences
from linear_fidelity import calibration

from kflats import SVD, Auto, Integer, KeepDense, Recipe, Transform, Uniform, compress_folder, find_weights, score
from kflats.calibration.batches import text_batches
from kflats.calibration.collect import measure
from kflats.calibration.objectives import Projections
from kflats.demo import packaged_model
from kflats.evaluation.comparing import fidelity, load_tokenizer, weight_file_bytes
from kflats.importance import KroneckerFisher
from kflats.io import load_model

LINES: tuple[tuple[str, Any, str, bool], ...] = (
    ("best, calibrated", Auto(), "8MB", True),
    ("best, calibrated", Auto(), "6MB", True),
    ("all int8", Recipe(KeepDense(), Uniform(), Integer(bits=8)), "60MB", False),
    ("all int4", Recipe(KeepDense(), Uniform(), Integer(bits=4, group=64)), "60MB", False),
    ("best, no data but the tokenizer", Auto(), "8MB", False),
    ("transform, equal shares, every row alike", Recipe(SVD(), Uniform(), Transform()), "8MB", False),
)


def main() -> None:
    options = arguments(__doc__, samples=512, only="", data=os.environ.get("KFLATS_DATA", "../shared/data"))
    source = packaged_model()
    original, tokenizer = load_model(source), load_tokenizer(source)
    stsb = Path(options.data) / "stsb"
    judged = sentences("stsb")
    before = score(original, tokenizer, "sts", task_data=stsb, costs=False).value
    lines, statistics = [], None
    counted = sentences("wikitext2")
    for name, recipe, budget, calibrated in LINES:
        if options.only not in f"{name} {budget}":
            continue
        if calibrated and statistics is None:
            batches = text_batches(calibration(options.samples), tokenizer, batch=32, max_length=64)
            statistics = measure(
                original,
                find_weights(original),
                batches,
                needs=KroneckerFisher.needs,
                objective=Projections(),
                quiet=True,
            )
        out = Path(tempfile.mkdtemp()) / "model"
        began = time.perf_counter()
        given: dict[str, Any] = {"texts": counted, "statistics": statistics} if calibrated else {}
        report = compress_folder(
            source, out, keep=f"{budget} of all files", method=recipe, weights=("all",), quiet=True, **given
        )
        took = time.perf_counter() - began
        model = load_model(out)
        found = fidelity(original, model, tokenizer, judged)
        value = score(model, tokenizer, "sts", task_data=stsb, costs=False).value
        kinds = ", ".join(sorted({weight.codec["type"] for weight in report.weights if not weight.dense}))
        dense = sum(weight.dense for weight in report.weights)
        memory = sum(weight.memory_bytes or weight.bytes_after for weight in report.weights)
        file = weight_file_bytes(out)
        line = {
            "what": name,
            "budget": "" if "int" in name else budget,
            "file": f"{file / 1e6:.2f} MB",
            "memory": f"{(memory + file - report.bytes_after) / 1e6:.1f} MB",
            "codecs": kinds + (f", {dense} dense" if dense else ""),
            "STS-B dev": f"{100 * value:.2f}",
            "points": f"**{100 * (value - before):+.2f}**",
            "mean cosine": f"{found.mean_cosine:.4f}",
            "5th percentile": f"{found.p5_cosine:.4f}",
            "rare words": f"{found.rare_mean_cosine:.4f}",
            "time": f"{took:.0f} s",
        }
        lines.append(line)
        print(line, flush=True)
        shutil.rmtree(out.parent)
    title = f"A whole encoder, {weight_file_bytes(source) / 1e6:.1f} MB, STS-B dev {100 * before:.2f}"
    publish(title, table(lines), options)


if __name__ == "__main__":
    main()
