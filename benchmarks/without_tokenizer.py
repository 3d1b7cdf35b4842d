"""Question: how should the rows of a token table count where batches are given, and no tokenizer?

The default is `KroneckerFisher(damping=1)`: the mean weight of a row is added to each, so that rows that no batch reads
have half of the mean. Beside it: other dampings, and `Uniform()`, by which errors have no units of the loss, and bytes
are shared by the sum of relative errors. The first line has texts and a tokenizer, and the default that goes with them.

"cosines": all-MiniLM-L6-v2 in 8 MB, measured on 512 windows of WikiText-2 (train) of at most 128 tokens; mean and 5th
percentile of the cosines to the original's vectors. The damping was chosen on sentences of CoLA (dev) and paragraphs of
WikiText-2 (valid) against .05 and .3, in another run; nothing was chosen on STS-B (dev) and WikiText-2 (test).
"a small Llama": all 36 weights of stories260K, whose table is its head too, in 16 % of its bytes, measured on 128 texts
of 192 tokens that it draws (it has no tokenizer here); judged on 128 others by the KL divergence in nats of next-token
distributions. Nothing was chosen on them.

    python benchmarks/without_tokenizer.py --write benchmarks/results/without_tokenizer.md
"""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from _common import arguments, publish, table
from _sentences import data_folder, paragraphs, sentences
from whole_model import evenly

sys.path.append(str(Path(__file__).resolve().parents[1] / "experiments"))
from _results import weights_folder
from language_model import divergence, llama, sampled

from kflats import Auto, KroneckerFisher, Recipe, Uniform, compress_, read_texts
from kflats.demo import packaged_model
from kflats.evaluation.outputs import fidelity_of, load_tokenizer
from kflats.evaluation.running import encode
from kflats.io import load_model


def damped(damping: float) -> Recipe:
    """What the default gives a token table, with another damping."""
    return Recipe(Auto(), KroneckerFisher(damping=damping, unreached="uniform"), matrix_rows="in_features")


def main() -> None:
    options = arguments(__doc__, size="8MB", keep="16%", dampings="0.05,0.3,1,3", judged=800, windows=512)
    torch.set_num_threads(1)
    data = data_folder()
    if data is None:
        raise SystemExit("no folder of data sets: set KFLATS_DATA")
    texts = read_texts(data / "wikitext2" / "train.txt.gz")
    tokenizer, encoder = load_tokenizer(packaged_model()), load_model(packaged_model())
    decoder = llama(weights_folder() / "stories260K.bin")
    drawn, others = (sampled(decoder, 128, 192, seed) for seed in (1, 2))
    of_decoder = [{"input_ids": part, "labels": part} for part in drawn.split(16)]
    chosen = evenly([text for text in texts if len(text.split()) > 20], options.windows)
    of_encoder: list[Any] = [
        dict(tokenizer(chosen[i : i + 16], padding=True, truncation=True, max_length=128, return_tensors="pt"))
        for i in range(0, len(chosen), 16)
    ]
    judged = {
        "cosines: CoLA": evenly(sentences("cola"), options.judged),
        "paragraphs, valid": paragraphs("valid", min(150, options.judged)),
        "STS-B": evenly(sentences("stsb"), options.judged),
        "paragraphs, test": paragraphs("test", min(150, options.judged)),
    }
    before = {kind: encode(encoder, tokenizer, them) for kind, them in judged.items()}
    tables: dict[str, Recipe | None] = {"with texts and a tokenizer": None, "Uniform()": Recipe(Auto(), Uniform())}
    for damping in map(float, options.dampings.split(",")):
        tables[f"KroneckerFisher(damping={damping:g})"] = damped(damping)
    lines = list[dict[str, object]]()
    for name, recipe in tables.items():
        line: dict[str, object] = {"token table": name}
        small = load_model(packaged_model())
        if recipe is None:
            compress_(small, {"all": Auto()}, size=options.size, texts=texts, tokenizer=tokenizer, quiet=True)
        else:
            recipes = {"all": Auto(), "embeddings.word_embeddings": recipe}
            compress_(small, recipes, size=options.size, calibration=of_encoder, quiet=True)
        for kind, them in judged.items():
            near = fidelity_of(before[kind], encode(small, tokenizer, them))
            line[kind] = f"{near.mean_cosine:.4f} / {near.p5_cosine:.4f}"
        line["a small Llama"] = "-"
        if recipe is not None:
            small_decoder = deepcopy(decoder)
            both = {"all": Auto(), "model.embed_tokens": recipe}
            compress_(small_decoder, both, keep=options.keep, calibration=of_decoder, quiet=True)
            line["a small Llama"] = f"{divergence(decoder, small_decoder, others)[0]:.4f} nats"
        lines.append(line)
        print(line, flush=True)
    publish("A token table that is measured without a tokenizer", table(lines), options)


if __name__ == "__main__":
    main()
