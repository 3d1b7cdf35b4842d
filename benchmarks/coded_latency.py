"""Question: what does a whole encoder cost in time whose linear layers decode their integers in every call?

all-MiniLM-L6-v2 with every weight coded, against the original, in turns: one text of 20 tokens, 32 of 30, 32 of 128.
"restored" is the same model after ``kflats.restore_``: small on disk, dense in memory.

    python benchmarks/coded_latency.py --write benchmarks/results/coded_latency.md
"""

from __future__ import annotations

from typing import Any

from _common import arguments, markdown, publish

import kflats
from kflats import SVD, Integer, KeepDense, Recipe, Transform, Uniform
from kflats.demo import packaged_model
from kflats.evaluation.latency import SHAPES, TorchModel, latencies
from kflats.io import load_model

CODES: dict[str, tuple[Any, str]] = {
    "transform, 2.5 bits": (Recipe(SVD(), Uniform(), Transform()), "7.8%"),
    "int8": (Recipe(KeepDense(), Uniform(), Integer(bits=8)), "60%"),
}


def main() -> None:
    options = arguments(__doc__, turns=9)
    original = load_model(packaged_model())
    lines = []
    for name, (recipe, budget) in CODES.items():
        model = load_model(packaged_model())
        kflats.compress_(model, {"all": recipe}, keep=budget, quiet=True)
        for state in ("", ", restored"):
            if state:
                kflats.restore_(model)
            both = [TorchModel("original", original), TorchModel(name + state, model)]
            timed, _ = latencies(both, original, shapes=SHAPES, turns=options.turns)
            for one in timed[1::2]:
                lines.append([one.name, f"{one.samples} x {one.tokens} tokens", f"**{one.ratio:.2f}**"])
                print(lines[-1], flush=True)
    publish(
        "An encoder of coded linear layers: time, as a multiple of the original's",
        markdown(["every weight as", "read at once", "time / original"], lines),
        options,
    )


if __name__ == "__main__":
    main()
