"""Claim: on a real encoder without any training data, whose rows count and how many flats there are matters more than
which norm is minimised: on the embedding table entrywise l1 fitting has far less l1 error than SVD and says less of
what the model said, while a Zipf prior on rows, which needs no text at all, brings plain SVD and flats much nearer.

    python experiments/robust_encoder.py --parts FOLDER --write experiments/results
    python experiments/robust_encoder.py --weights linear --parts FOLDER --write experiments/results

all-MiniLM-L6-v2, its embedding table (30522 x 384) or the 36 linear layers of its encoder; judged by the cosine of
sentence vectors with the original's and by STS-B (Spearman), without fine-tuning.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _results import ENCODER, data_folder, parsed, publish
from _robust import FAMILIES, HALF, L1_PCA, PRUNED, SYNFLOW, Known, options, row_weights_of
from _robust_tables import STORED, agreement, errors_cell, least, sweep, table, unfinished
from _sentences import sentences
from baselines.synflow import encoder_flow
from torch import nn

from kflats import find_weights
from kflats.demo import packaged_model
from kflats.evaluation.outputs import load_tokenizer
from kflats.evaluation.running import encode
from kflats.io import load_model
from kflats.tasks.batches import load_examples
from kflats.tasks.scoring import spearman

WEIGHED = [
    f"{name} + {by}" for by in ("zipf", "counts") for name in ("SVD", "ellipsoid 1", "entrywise 1", "subspace 1")
]
LOSSES = ["subspace huber 2 median", "subspace truncated 3 median"]
NORMS = [HALF, "SVD", *FAMILIES]
OTHERS = [*L1_PCA, "robust pca", *PRUNED]
LINEAR = [*NORMS, *OTHERS]
TABLE = [*NORMS, *LOSSES, *OTHERS, *SYNFLOW, *WEIGHED, "flats", "flats + zipf", "flats + counts"]
BEYOND = [
    *("SVD", "ellipsoid 1", "entrywise 1", "subspace 1", "magnitude csr", "magnitude bitmap"),
    *("SVD + zipf", "SVD + counts", "flats", "flats + zipf", "flats + counts"),
]
SQUARE = (
    "Two in three of these matrices are square and regular, and there the ellipsoid gives the SVD whatever p is (all "
    "Lewis weights are 1): its lines differ from SVD's by the layers that are longer than wide alone."
)


class Judge:
    """Sentence pairs of STS-B (dev): what a model says of them, beside the original."""

    def __init__(self, original: nn.Module, tokenizer: Any, pairs: int) -> None:
        examples = load_examples("stsb", "dev", data_folder())
        chosen = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))[:pairs].tolist()
        self.texts = [text for i in chosen for text in examples.inputs[i]]
        self.gold = [float(examples.labels[i]) for i in chosen]
        self.tokenizer = tokenizer
        self.vectors = encode(original, tokenizer, self.texts)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        found = encode(model, self.tokenizer, self.texts)
        said = (found[0::2] * found[1::2]).sum(1)
        return {
            "cosine": float((found * self.vectors).sum(1).mean()),
            "spearman": spearman(said.tolist(), self.gold),
        }


def wanted(name: str, rate: float) -> bool:
    """Beyond half of the bytes a selection: fits that take minutes and lines that say little there are left out."""
    return rate <= 0.5 or name in BEYOND


QUICK: dict[str, Any] = {"pairs": 20, "rates": "0.41", "methods": "SVD,magnitude csr"}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    options(parser)
    parser.set_defaults(rates="0.15,0.28,0.41,0.6,0.8")
    parser.add_argument("--weights", choices=("embeddings", "linear"), default="embeddings")
    parser.add_argument("--pairs", type=int, default=500, help="sentence pairs of STS-B (dev) to judge on, of 1500")
    asked = parsed(parser, argv, QUICK)
    source = packaged_model()
    model, tokenizer = load_model(source), load_tokenizer(source)
    judge = Judge(model, tokenizer, asked.pairs)
    embeddings = asked.weights == "embeddings"
    start = "embeddings.word_embeddings" if embeddings else ENCODER.removeprefix("bert.").rstrip("*")
    weights = [w for w in find_weights(model) if w.name.startswith(start)]
    known = Known()
    if embeddings:
        weighed = row_weights_of(tokenizer, weights[0].shape[0], sentences("wikitext2"))
        known = Known(row_weights=weighed, column_flow=encoder_flow(model))
    names = asked.methods.split(",") if asked.methods else TABLE if embeddings else LINEAR
    before = judge(model)["spearman"]
    rows = sweep(asked, asked.weights, {"pairs": asked.pairs}, model, weights, names, known, judge, wanted)
    numbers = sum(w.shape[0] * w.shape[1] for w in weights)
    pairs = len(judge.gold)
    said = (
        "its embedding table"
        if embeddings
        else f"the {len(weights)} linear layers of its encoder, each at the same rate"
    )
    body = "\n\n".join(
        [
            f"all-MiniLM-L6-v2, {said} ({numbers:,} numbers); no fine-tuning. Judged on {pairs:,} pairs of STS-B "
            f"(dev), {'a sample of 1,500' if pairs < 1500 else 'all of them'}; Spearman {before:.4f} before."
            f" {STORED} Beyond half of the bytes a selection.",
            (
                '"+ zipf" weighs rows by a prior that the vocabulary alone gives, "+ counts" by the tokens of '
                "WikiText-2: public text, none of it the judged task's."
                if embeddings
                else SQUARE
            ),
            "**Mean cosine of sentence vectors with the original's**",
            table(rows, lambda r: f"{r['cosine']:.4f}"),
            f"Nearest: {least(rows, 'cosine', max)}.",
            "**STS-B, Spearman**",
            table(rows, lambda r: f"{r['spearman']:.4f}"),
            "**Errors**, entrywise l1 / l2,1 / Frobenius, each relative to that of the zero matrix:",
            table(rows, errors_cell),
            f"Least entrywise l1: {least(rows, 'l1')}.",
            agreement(rows, "cosine", "the cosine"),
            unfinished(rows),
        ]
    )
    title = f"Without training data: {'the embedding table' if embeddings else 'linear layers'} of all-MiniLM-L6-v2"
    publish(f"robust_{asked.weights}", title, body, {"before": before, "rows": rows}, asked)


if __name__ == "__main__":
    main()
