"""Question: what does a whole encoder cost in time whose linear layers decode their integers in every call?

all-MiniLM-L6-v2 with every weight coded, against the original, in interleaved pairs: one short sentence, 32 of them,
and 32 long ones. "restored" is the same model after ``kflats.restore_``: small on disk, dense in memory.

    python benchmarks/coded_latency.py --write benchmarks/results/coded_latency.md
"""

from __future__ import annotations

from typing import Any

from _common import arguments, markdown, publish

import kflats
from kflats import SVD, Integer, KeepDense, Recipe, Transform, Uniform
from kflats.demo import packaged_model
from kflats.evaluation.comparing import latency, load_tokenizer
from kflats.io import load_model

SHORT = "A man with a hard hat is dancing."
LONG = " ".join([SHORT] * 12)
BATCHES = {"1 short sentence": [SHORT], "32 short": [SHORT] * 32, "32 of 120 tokens": [LONG] * 32}
CODES: dict[str, tuple[Any, str]] = {
    "transform, 2.5 bits": (Recipe(SVD(), Uniform(), Transform()), "7.8%"),
    "int8": (Recipe(KeepDense(), Uniform(), Integer(bits=8)), "60%"),
}


def main() -> None:
    options = arguments(__doc__, pairs=9)
    original, tokenizer = load_model(packaged_model()), load_tokenizer(packaged_model())
    lines = []
    for name, (recipe, budget) in CODES.items():
        model = load_model(packaged_model())
        kflats.compress_(model, {"all": recipe}, keep=budget, quiet=True)
        for state in ("", ", restored"):
            if state:
                kflats.restore_(model)
            for what, texts in BATCHES.items():
                found = latency(original, model, tokenizer, texts, batch=len(texts), pairs=options.pairs)
                lines.append([name + state, what, f"**{found.ratio:.2f}**"])
                print(lines[-1], flush=True)
    publish(
        "An encoder of coded linear layers: time, as a multiple of the original's",
        markdown(["every weight as", "read at once", "time / original"], lines),
        options,
    )


if __name__ == "__main__":
    main()
