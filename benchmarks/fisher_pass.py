"""Claim: the Fisher pass costs at most 1.5 x a plain forward + backward; with all 36 layers factorized, at most 2 x.

Plain is what training runs over the same batches: all of the model's parameters get a gradient, of the batch's
mean loss. Ours has every sample's own squared gradients instead. Both in eval mode, in alternating order; the
model is all-MiniLM-L6-v2 with a classification head, the labels are 0 and 1 in turn, which no timing depends on.
Importances of wider Grams than RowFisher's are timed too, without a target.

    python benchmarks/fisher_pass.py --write benchmarks/results/fisher_pass.md
"""

from __future__ import annotations

from collections.abc import Callable

from _common import arguments, markdown, median_pair, publish
from _sentences import classifier, labelled_batches

from kflats.calibration.collect import measure
from kflats.calibration.measurements import Statistics
from kflats.calibration.objectives import Objective, Projections, TaskLoss
from kflats.importance import InputGram, KroneckerFisher, RowFisher, TwoSided
from kflats.methods.protocol import Problem
from kflats.methods.svd import SVD
from kflats.model.weights import dense_weight
from kflats.numerics.rows import TensorRows


def main() -> None:
    options = arguments(__doc__, samples=512, batch=16, length=128, rounds=5, ratio=1 / 3)
    model, weights = classifier()
    batches = labelled_batches(options.samples, options.batch, options.length)

    def plain() -> None:
        for batch in batches:
            model.zero_grad()
            model(**batch).loss.backward()

    def passing(needs: frozenset[str], objective: Objective) -> Callable[[], Statistics]:
        return lambda: measure(model, weights, batches, needs=needs, objective=objective, quiet=True)

    def factorizing() -> None:
        found = passing(RowFisher.needs, TaskLoss())()
        for weight in weights:
            n, d = weight.shape
            rank = int(options.ratio * n * d / (n + d))
            weighting = RowFisher().weigh(found.of(weight.name))
            problem = Problem(TensorRows(dense_weight(model, weight)), 4 * rank * (n + d), 4, weighting)
            SVD().fit(problem)

    cases: list[tuple[str, Callable[[], object], str]] = [
        ("RowFisher", passing(RowFisher.needs, TaskLoss()), "<= 1.5"),
        ("RowFisher, label-free", passing(RowFisher.needs, Projections()), "<= 1.5"),
        (f"RowFisher and SVD of all {len(weights)} at {options.ratio:.0%} of parameters", factorizing, "<= 2"),
        ("TwoSided", passing(TwoSided.needs, TaskLoss()), ""),
        ("InputGram", passing(InputGram.needs, TaskLoss()), ""),
        ("KroneckerFisher", passing(KroneckerFisher.needs, TaskLoss()), ""),
    ]
    rows = []
    for name, ours, target in cases:
        mine, base, ratio = median_pair(ours, plain, options.rounds)
        print(name, mine, base, ratio, flush=True)
        rows.append([name, f"{mine:.2f} s", f"{base:.2f} s", f"**{ratio:.2f}**", target])
    texts, tokens = options.samples, sum(int(batch["attention_mask"].sum()) for batch in batches)
    about = f"{len(weights)} linear layers of MiniLM, {texts} texts, {tokens:,} tokens, batches of {options.batch}"
    body = markdown([about, "kflats", "plain forward + backward", "ratio", "target"], rows)
    publish("Fisher pass", body, options)


if __name__ == "__main__":
    main()
