"""Claim: with 40 % of the embedding table's bytes gone, the default recipe keeps a mean cosine of at least .990 to
the original's sentence embeddings on text of another domain than the counted one, and of .970 without any data.

Counted: WikiText-2 (train). Judged: STS-B (dev) by default. Defaults are chosen on CoLA's sentences, of which
``defaults.py`` makes a table (``--eval-split cola`` judges on them here).
Rare words: 500 words of the vocabulary's tail
that neither text shows, each alone.

    python benchmarks/fidelity.py --write benchmarks/results/fidelity.md
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from _common import EMBEDDING, arguments, markdown, publish
from _sentences import HEAD, Evaluator, cells, sentences
from torch import nn

from kflats import MESSI, SVD, Flats, Float, KMeansSVD, Recipe, TokenCounts, Uniform, ZipfPrior, compress_
from kflats.demo import packaged_model
from kflats.evaluation.outputs import load_tokenizer
from kflats.io import load_model
from kflats.model.weights import dense_weight, find_weight
from kflats.numerics.coding.rounding import absmax_code
from kflats.numerics.rows import TensorRows

RECIPES: dict[str, tuple[Any, bool]] = {
    "SVD": (Recipe(SVD(), Uniform()), False),
    "k-means + SVD (k=5)": (Recipe(KMeansSVD(5), Uniform()), False),
    "MESSI from one start (k=5)": (Recipe(MESSI(5, restarts=1), Uniform()), False),
    "kflats, no data, every row alike": (Recipe(Flats(), Uniform()), False),
    "SVD + counts": (Recipe(SVD(), TokenCounts()), True),
    "kflats, no data: Zipf prior": (Recipe(Flats(), ZipfPrior()), False),
    "kflats default: counts": (Recipe(Flats(), TokenCounts()), True),
    "kflats default, float16 factors": (Recipe(Flats(), TokenCounts(), Float("float16")), True),
}
SMALL = (
    "SVD",
    "MESSI from one start (k=5)",
    "SVD + counts",
    "kflats default: counts",
    "kflats default, float16 factors",
)
"""What is measured at budgets other than the claim's."""


def round_rows_(model: nn.Module, name: str, bits: int = 8) -> int:
    """Round the named weight in place to ``bits`` a number and a float32 scale a row; the bytes of that in a file."""
    rows = dense_weight(model, find_weight(model, name))
    code = absmax_code(TensorRows(rows), bits, 1, torch.float32)
    with torch.no_grad():
        rows.copy_(code.levels * code.scales.wide)
    return -(-code.levels.numel() * bits // 8) + code.scales.values.nbytes


def main() -> None:
    options = arguments(__doc__, eval_split="stsb", budgets="60%,40%,26%,13.5%")
    counted, judged = sentences("wikitext2"), sentences(options.eval_split)
    source = packaged_model()
    original, tokenizer = load_model(source), load_tokenizer(source)
    # Rare words are looked for outside the judged texts; the counted ones are too long to tokenize all of them again.
    evaluator, lines = Evaluator(original, tokenizer, judged, counted[:2000]), []

    def judge(budget: str, name: str, model: Any, nbytes: int) -> None:
        lines.append([budget, name, f"{nbytes / 1e6:.2f} MB", *cells(evaluator(model).fidelity)])
        print(lines[-1], flush=True)

    for budget in options.budgets.split(","):
        for name, (recipe, texts) in RECIPES.items():
            # Half-sized factors at 60 % would be more numbers than the table has.
            if name not in SMALL if budget != "60%" else "float16" in name:
                continue
            model = copy.deepcopy(original)
            report = compress_(
                model,
                {EMBEDDING: recipe},
                keep=budget,
                texts=counted if texts else None,
                tokenizer=tokenizer,
                quiet=True,
            )
            judge(budget, name, model, report.bytes_after)
    rounded = copy.deepcopy(original)
    judge("26.0%", "8-bit rows (what a user picks today)", rounded, round_rows_(rounded, EMBEDDING))
    rounded = copy.deepcopy(original)
    judge("13.5%", "4-bit rows (what a user picks today)", rounded, round_rows_(rounded, EMBEDDING, bits=4))
    head = ["kept", "method", "table", *HEAD]
    publish(
        f"Fidelity of sentence embeddings (all-MiniLM-L6-v2, judged on {options.eval_split})",
        f"{len(judged)} sentences judged; the original table has 46.88 MB.\n\n" + markdown(head, lines),
        options,
    )


if __name__ == "__main__":
    main()
