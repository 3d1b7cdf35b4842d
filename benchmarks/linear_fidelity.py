"""Claim: all 36 linear layers of a real encoder fit in the parameters of uniform rank 127 of 384 (half of what they
take), without fine-tuning and without labels, at a mean cosine of at least .88 to the original's sentence embeddings.

Calibrated on sentences of WikiText-2 (train), label-free: gradients of random projections of the pooled output. Judged
on STS-B (dev): another domain. Every line has at most 36 layers x rank 127: 5,266,944 numbers, "keep dense" and gained
biases counted. Rare words: 500 words of the vocabulary's tail, each alone.

    python benchmarks/linear_fidelity.py --write benchmarks/results/linear_fidelity.md
"""

from __future__ import annotations

import copy
import random
import time
from typing import Any

from _common import arguments, markdown, publish
from _sentences import HEAD, Evaluator, cells, sentences

from kflats import SVD, Recipe, Uniform, compress_, find_weights
from kflats.calibration.batches import text_batches
from kflats.calibration.collect import measure
from kflats.calibration.objectives import Projections
from kflats.demo import packaged_model
from kflats.evaluation.comparing import load_tokenizer
from kflats.importance import InputGram, KroneckerFisher, RowFisher, TwoSided
from kflats.io import load_model

NUMBERS = 5_266_944
LINES: dict[str, tuple[Any, str]] = {
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


def calibration(size: int) -> list[str]:
    """``size`` sentences of WikiText-2, drawn with a fixed seed; marks undone, none with unknown words."""
    text = "\n".join(sentences("wikitext2")).replace(" @-@ ", "-").replace(" @,@ ", ",").replace(" @.@ ", ".")
    parts = [part.strip() for line in text.split("\n") for part in line.split(" . ")]
    found = [f"{part} ." for part in parts if len(part) > 30 and "<unk>" not in part and not part.startswith("=")]
    random.Random(0).shuffle(found)
    return found[:size]


def main() -> None:
    options = arguments(__doc__, eval_split="stsb", samples=6000, limit=0)
    judged = sentences(options.eval_split)
    judged = judged[: options.limit] if options.limit else judged
    source = packaged_model()
    original, tokenizer = load_model(source), load_tokenizer(source)
    weights = [w for w in find_weights(original) if w.name.startswith("encoder.layer")]
    texts = calibration(options.samples)
    batches = text_batches(texts, tokenizer, batch=32, max_length=64)
    needs = frozenset().union(*(r.importance.needs for r, _ in LINES.values()))
    began = time.perf_counter()
    statistics = measure(
        original, weights, batches, needs=needs, objective=Projections(), quiet=True, memory_bytes=6_000_000_000
    )
    took = time.perf_counter() - began
    evaluator, lines = Evaluator(original, tokenizer, judged, texts[:2000]), []
    for name, (recipe, allocation) in LINES.items():
        model = copy.deepcopy(original)
        budget = "33.1% ranks" if allocation == "uniform" else f"{NUMBERS} params"
        began = time.perf_counter()
        report = compress_(
            model,
            {weight.name: recipe for weight in weights},
            keep=budget,
            statistics=statistics,
            allocation=allocation,
            quiet=True,
        )
        seconds = time.perf_counter() - began
        numbers = sum(weight.values_after for weight in report.weights)
        assert numbers <= NUMBERS, (name, numbers)
        lines.append([name, f"{numbers:,}", *cells(evaluator(model).fidelity), f"{seconds:.0f} s"])
        print(lines[-1], flush=True)
    head = ["method", "numbers", *HEAD, "factorizing"]
    before = sum(weight.shape[0] * weight.shape[1] for weight in weights)
    publish(
        f"Fidelity with all {len(weights)} linear layers factorized, no fine-tuning (all-MiniLM-L6-v2)",
        f"{len(judged)} sentences of {options.eval_split} judged; {options.samples} sentences of WikiText-2 "
        f"measured in {took:.0f} s. Dense: {before:,} numbers.\n\n" + markdown(head, lines),
        options,
    )


if __name__ == "__main__":
    main()
