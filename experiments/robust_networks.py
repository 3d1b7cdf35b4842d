"""Claim: on two real small networks, compressed without any data and without fine-tuning, no robust low rank is more
accurate than plain SVD throughout, and those with far less entrywise l1 error are less accurate; on convolutions
magnitude pruning is far above every low rank, its places stored as a bit each.

    python experiments/robust_networks.py --parts FOLDER --write experiments/results

LeNet-300-100 on MNIST and ResNet-20 on CIFAR-10 (KFLATS_WEIGHTS, KFLATS_DATA), judged on test images. All layers but
the classifier, each at the same rate; SynFlow shares the same bytes out over layers itself.
"""

from __future__ import annotations

import argparse
from typing import Any

from _results import data_folder, parsed, publish
from _robust import FAMILIES, HALF, L1_PCA, PRUNED, SYNFLOW, Known, options
from _robust_tables import STORED, agreement, errors_cell, least, sweep, table, unfinished
from _small_networks import accuracy, cifar, mnist
from vision import network

from kflats import find_weights

METHODS = [HALF, "SVD", *FAMILIES, *L1_PCA, "robust pca", *PRUNED, *SYNFLOW]


QUICK: dict[str, Any] = {"networks": "lenet", "rates": "0.41", "methods": "SVD,ellipsoid 1,magnitude bitmap"}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    options(parser)
    parser.set_defaults(rates="0.15,0.28,0.41,0.6,0.8")
    parser.add_argument("--networks", default="lenet,resnet20")
    parser.add_argument("--judged", type=int, default=2000, help="test images of CIFAR-10 to judge on (MNIST: all)")
    asked = parsed(parser, argv, QUICK)
    names = asked.methods.split(",") if asked.methods else METHODS
    rows: list[dict[str, Any]] = []
    parts: list[str] = []
    for name in asked.networks.split(","):
        model = network(name)
        folder = data_folder()
        judged = mnist("t10k", folder) if name == "lenet" else cifar("test10k", folder)
        images, classes = judged.images, judged.classes
        if name == "resnet20":
            images, classes = images[: asked.judged], classes[: asked.judged]
        weights = [w for w in find_weights(model) if w.name not in ("fc2", "linear")]

        def judge(other: Any, x: Any = images, y: Any = classes) -> dict[str, float]:
            return {"accuracy": accuracy(other, x, y)}

        known = Known(inputs=(784,) if name == "lenet" else (3, 32, 32))
        before = accuracy(model, images, classes)
        found = sweep(asked, name, {"judged": len(classes)}, model, weights, names, known, judge)
        rows += found
        numbers = sum(w.shape[0] * w.shape[1] for w in weights)
        sample = "" if len(classes) == 10_000 else ", **a sample**: the first of 10,000"
        parts += [
            f"## {name}",
            f"{len(weights)} layers of {numbers:,} numbers; accuracy {before:.2%} before, judged on {len(classes):,} "
            f"test images{sample}. The classifier stays as it is.",
            table(found, lambda r: f"{r['accuracy']:.2%}"),
            f"Most accurate: {least(found, 'accuracy', max)}.",
            "Errors over all layers, entrywise l1 / l2,1 / Frobenius, each relative to that of zeros:",
            table(found, errors_cell),
            f"Least entrywise l1: {least(found, 'l1')}.",
            agreement(found, "accuracy", "accuracy"),
            remarks(found),
            unfinished(found),
        ]
    body = "\n\n".join([ABOUT, *parts])
    publish("robust_networks", "Two networks compressed without data", body, {"rows": rows}, asked)


ABOUT = (
    f"No data, no fine-tuning. The same share of bytes is saved in every layer. {STORED} Rows are the longer side of "
    "each matrix."
)


def remarks(rows: list[dict[str, Any]]) -> str:
    """Whether robust factors are more accurate than SVD's, from the numbers."""
    at = {(r["method"], r["rate"]): r["accuracy"] for r in rows}
    rates = sorted({r["rate"] for r in rows})
    lines = []
    for name in dict.fromkeys(r["method"] for r in rows):
        if name in ("SVD", HALF) or ("SVD", rates[0]) not in at:
            continue
        above = [f"{rate:.0%}" for rate in rates if at[name, rate] > at["SVD", rate]]
        lines.append(f"- {name}: above SVD at {', '.join(above) if above else 'no rate'}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
