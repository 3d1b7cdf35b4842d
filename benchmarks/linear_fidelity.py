"""Claim: all 36 linear layers of a real encoder fit in the parameters of uniform rank 127 of 384 (half of what they
take), without fine-tuning and without labels, at a mean cosine of at least .85 to the original's vectors of sentences
and of .89 of paragraphs.

Measured on 512 windows of WikiText-2 (train), label-free: gradients of random projections of the pooled output. Every
line has at most 36 layers x rank 127: 5,266,944 numbers, "keep dense" and gained biases counted. Cosines: mean, and 5th
percentile. Methods were chosen on CoLA (dev) and on paragraphs of WikiText-2 (valid); nothing was chosen on MRPC (dev),
CoNLL-2003 (dev) and the paragraphs of WikiText-2 (test).

    python benchmarks/linear_fidelity.py --write benchmarks/results/linear_fidelity.md
"""

from __future__ import annotations

import copy
import time
from typing import Any

from _common import arguments, publish, table
from _sentences import data_folder, paragraphs, sentences

from kflats import SVD, Recipe, Uniform, compress_, find_weights, read_texts
from kflats.calibration.collect import measure
from kflats.calibration.counting import text_batches
from kflats.calibration.objectives import Projections
from kflats.calibration.windows import windows
from kflats.demo import packaged_model
from kflats.evaluation.outputs import fidelity_of, load_tokenizer
from kflats.evaluation.running import encode
from kflats.importance import InputGram, KroneckerFisher, RowFisher, TwoSided
from kflats.io import load_model

NUMBERS = 5_266_944
LINES: dict[str, tuple[Any, Any]] = {
    "SVD": (Recipe(SVD(), Uniform()), "uniform"),
    "RowFisher (FWSVD)": (Recipe(SVD(), RowFisher()), "uniform"),
    "TwoSided": (Recipe(SVD(), TwoSided()), "uniform"),
    "InputGram": (Recipe(SVD(), InputGram()), "uniform"),
    "KroneckerFisher": (Recipe(SVD(), KroneckerFisher()), "uniform"),
    "RowFisher, allocated": (Recipe(SVD(), RowFisher()), "loss"),
    "TwoSided, allocated": (Recipe(SVD(), TwoSided()), "loss"),
    "KroneckerFisher, allocated": (Recipe(SVD(), KroneckerFisher()), "loss"),
    "KroneckerFisher, allocated, interpolative": (Recipe(SVD("interpolative"), KroneckerFisher()), "loss"),
}


def main() -> None:
    options = arguments(__doc__, samples=512)
    data = data_folder()
    if data is None:
        raise SystemExit("no folder of data sets: set KFLATS_DATA")
    source = packaged_model()
    original, tokenizer = load_model(source), load_tokenizer(source)
    judged = {name: sentences(name) for name in ("cola", "stsb", "mrpc", "conll2003")}
    judged |= {f"paragraphs, {split}": paragraphs(split) for split in ("valid", "test")}
    before = {name: encode(original, tokenizer, texts) for name, texts in judged.items()}
    weights = [w for w in find_weights(original) if w.name.startswith("encoder.layer")]
    texts = windows(read_texts(data / "wikitext2" / "train.txt.gz"), tokenizer, samples=options.samples)
    needs = frozenset().union(*(r.importance.needs for r, _ in LINES.values()))
    began = time.perf_counter()
    batches = text_batches(texts.calibration, tokenizer)
    statistics = measure(original, weights, batches, needs=needs, objective=Projections(), quiet=True)
    took = time.perf_counter() - began
    lines: list[dict[str, object]] = []
    for name, (recipe, allocation) in LINES.items():
        model = copy.deepcopy(original)
        budget = "33.1% ranks" if allocation == "uniform" else f"{NUMBERS} params"
        recipes = {weight.name: recipe for weight in weights}
        report = compress_(model, recipes, keep=budget, statistics=statistics, allocation=allocation, quiet=True)
        numbers = sum(weight.values_after for weight in report.weights)
        assert numbers <= NUMBERS, (name, numbers)
        line: dict[str, object] = {"method": name}
        for kind, those in judged.items():
            near = fidelity_of(before[kind], encode(model, tokenizer, those))
            line[kind] = f"{near.mean_cosine:.4f} / {near.p5_cosine:.4f}"
        lines.append(line)
        print(line, flush=True)
    dense = sum(weight.shape[0] * weight.shape[1] for weight in weights)
    publish(
        f"Fidelity with all {len(weights)} linear layers factorized, no fine-tuning (all-MiniLM-L6-v2)",
        f"Measured in {took:.0f} s. Dense: {dense:,} numbers.\n\n" + table(lines),
        options,
    )


if __name__ == "__main__":
    main()
