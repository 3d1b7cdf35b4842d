"""Question: what does a whole encoder of codes cost in time, in each run-time form?

all-MiniLM-L6-v2 with every weight coded, against the original, in turns: one text of 20 tokens, 32 of 30, 32 of 128.
"compact" decodes integers in every call; "dense", "bfloat16" and "int8" are made at the first one (``kflats.run_as_``).

    python benchmarks/coded_latency.py --write benchmarks/results/coded_latency.md
"""

from __future__ import annotations

from typing import Any, get_args

from _common import arguments, markdown, publish

import kflats
from kflats import SVD, Integer, KeepDense, Recipe, Transform, Uniform
from kflats.common.run_forms import RunForm
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
        for form in get_args(RunForm):
            kflats.run_as_(model, form)
            both = [TorchModel("original", original), TorchModel(f"{name}, {form}", model)]
            timed, _ = latencies(both, original, shapes=SHAPES, turns=options.turns)
            for one in timed[1::2]:
                lines.append([one.name, f"{one.samples} x {one.tokens} tokens", f"**{one.ratio:.2f}**"])
                print(lines[-1], flush=True)
    publish(
        "An encoder of codes by run-time form: time, as a multiple of the original's",
        markdown(["every weight as", "read at once", "time / original"], lines),
        options,
    )


if __name__ == "__main__":
    main()
