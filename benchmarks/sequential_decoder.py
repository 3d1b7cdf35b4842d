"""Question: do gradients of its table, and sequential calibration, bring a small decoder nearer to the original?

All 36 weights of stories260K, a Llama of 260,032 parameters whose table is its head too (KFLATS_WEIGHTS). Calibrated
without a tokenizer on 128 texts of 192 tokens that the original draws, from each of two seeds; judged on 128 others:
the KL divergence in nats of next-token distributions, and how often both have the same likeliest token. "kept": of the
bytes of float32. "sequential": the defaults. "one pass": without sequential calibration. "rows alike": also with
`Uniform()` for the table, in place of `KroneckerFisher(damping=1)`; bytes are then shared by the sum of relative
errors. Nothing was chosen by this table.

    python benchmarks/sequential_decoder.py --write benchmarks/results/sequential_decoder.md
"""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path

import torch
from _common import arguments, publish, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "experiments"))
from _results import weights_folder
from language_model import divergence, llama, sampled

from kflats import Auto, Recipe, Uniform, compress_

WAYS: dict[str, tuple[dict[str, Auto | Recipe], bool]] = {
    "rows alike": ({"all": Auto(), "model.embed_tokens": Recipe(Auto(), Uniform())}, False),
    "one pass": ({"all": Auto()}, False),
    "sequential": ({"all": Auto()}, True),
}


def main() -> None:
    options = arguments(__doc__, keeps="20%,16%,14%,12%", seeds="1,3", texts=128, length=192)
    torch.set_num_threads(1)
    original = llama(weights_folder() / "stories260K.bin")
    judged = sampled(original, options.texts, options.length, 2)
    lines: list[dict[str, object]] = []
    for seed in map(int, options.seeds.split(",")):
        learnt = sampled(original, options.texts, options.length, seed)
        batches = [{"input_ids": part, "labels": part} for part in learnt.split(16)]
        for keep in options.keeps.split(","):
            line: dict[str, object] = {"kept": keep, "texts of seed": seed}
            for name, (recipes, sequential) in WAYS.items():
                small = deepcopy(original)
                compress_(small, recipes, keep=keep, calibration=batches, sequential=sequential, quiet=True)
                kl, same = divergence(original, small, judged)
                line[name] = f"{kl:.4f} nats, {same:.1%}"
            lines.append(line)
            print(line, flush=True)
    publish("A small Llama in codes, calibrated without a tokenizer", table(lines), options)


if __name__ == "__main__":
    main()
