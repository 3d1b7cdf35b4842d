"""Claim: on real convolutions (CIFAR-10 ResNet-20) and linear layers (MNIST LeNet-300-100), without fine-tuning,
importance with correlations, made of the logits' gradients and with ranks allocated by it, keeps accuracy at budgets
where FWSVD's row sums and plain SVD have lost it.

    python experiments/vision.py --write experiments/results

Networks from KFLATS_WEIGHTS (../shared/weights), images from KFLATS_DATA (../shared/data). Calibrated on training
images with the task's loss, judged on test images.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from _results import OBJECTIVES, Variant, data_folder, markdown, needs, parsed, publish, variants, weights_folder
from _small_networks import LeNet, ResNet20, accuracy, cifar, mnist
from safetensors.torch import load_file
from torch import Tensor, nn

from kflats import compress_, find_weights, measure

METHODS = (
    *("SVD", "InputGram", "RowFisher", "RowFisher@logits", "RowFisher+loss", "RowFisher@logits+loss"),
    *("KroneckerFisher", "KroneckerFisher@sampled", "KroneckerFisher@logits"),
    *("KroneckerFisher+loss", "KroneckerFisher@sampled+loss", "KroneckerFisher@logits+loss"),
)
BUDGETS = {"resnet20": "85%,70%,50%,35%", "lenet": "30%,15%,8%,4%"}

WHY = (
    "Why gradients of the loss serve badly here: the networks fit their training images almost perfectly (above), so "
    "the loss of all but a few has no gradient left, and those few decide alone. The logits' gradients do not vanish. "
    "Why a uniform share is worse at 30 % of LeNet than at 8 %: its last layer (100 x 10) gets rank 2 of 10 (1 at "
    "15 %), which ten classes do not survive; at 8 % its share holds no rank at all, and it is left dense."
)


def network(name: str) -> nn.Module:
    """The trained network."""
    if name == "lenet":
        return LeNet(load_file(weights_folder() / "lenet300100.safetensors")).eval()
    model = ResNet20()
    state = load_file(weights_folder() / "cifar10_resnet20.safetensors")
    # Counters of batches, which nothing here reads, are not in the file.
    model.load_state_dict({k: t for k, t in model.state_dict().items() if k.endswith("num_batches_tracked")} | state)
    return model.eval()


QUICK: dict[str, Any] = {"networks": "lenet", "samples": 64, "judged": 100}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", default="lenet,resnet20")
    parser.add_argument("--samples", type=int, default=512, help="training images to calibrate on")
    parser.add_argument("--judged", type=int, default=2000, help="test images of CIFAR-10 to judge on (MNIST: all)")
    asked = parsed(parser, argv, QUICK)
    rows: list[dict[str, Any]] = []
    about = []
    for name in asked.networks.split(","):
        model = network(name)
        learnt, tested = (
            (mnist("train", data_folder()), mnist("t10k", data_folder()))
            if name == "lenet"
            else (cifar("train20k", data_folder()), cifar("test10k", data_folder()))
        )
        (x, y), (test_x, test_y) = ((one.images, one.classes) for one in (learnt, tested))
        if name == "resnet20":
            test_x, test_y = test_x[: asked.judged], test_y[: asked.judged]
        chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: asked.samples]
        batches = [{"x": x[part], "labels": y[part]} for part in chosen.split(64)]
        word = "linear" if name == "lenet" else "conv"
        weights = [w for w in find_weights(model) if name == "lenet" or w.places[0].role == "conv2d"]
        fields = needs([v.importance for v in variants(METHODS)])
        found = {
            key: measure(model, weights, batches, needs=fields, objective=objective, quiet=True)
            for key, objective in OBJECTIVES.items()
        }
        before = accuracy(model, test_x, test_y)
        numbers = sum(w.shape[0] * w.shape[1] for w in weights)
        about.append(
            f"{name}: {len(weights)} {word} layers of {numbers:,} numbers, accuracy {before:.2%} before, judged on "
            f"{len(test_y):,} test images{'' if len(test_y) == 10_000 else ' (the first of 10,000)'}, calibrated on "
            f"{len(chosen)} training images, on which its accuracy is {accuracy(model, x[chosen], y[chosen]):.2%}."
        )
        print(about[-1], flush=True)
        for budget in BUDGETS[name].split(","):
            for variant in variants(METHODS):
                rows.append({"network": name, "budget": budget, "before": before})
                rows[-1] |= judged(model, word, variant, budget, found[variant.objective], test_x, test_y)
                print(rows[-1], flush=True)
    lines = [
        [r["network"], r["budget"], r["method"], f"{r['kept']:.1%}", r["dense"], f"{r['accuracy']:.2%}"] for r in rows
    ]
    head = ["network", "budget", "method", "kept", "layers left dense", "accuracy"]
    body = "\n\n".join(
        [
            *about,
            "No fine-tuning. One calibration sample. Gradients are of the task's loss, or, in brackets, of its loss "
            "with labels that the network draws itself, or of random projections of its logits.",
            markdown(head, lines),
            WHY,
            remarks(rows),
        ]
    )

    publish("vision", "Two small vision networks: accuracy by budget", body, {"rows": rows}, asked)


def judged(
    model: nn.Module, word: str, variant: Variant, budget: str, found: Any, images: Tensor, classes: Tensor
) -> dict[str, Any]:
    """One row: the method, what was kept, the accuracy."""
    other = copy.deepcopy(model)
    report = compress_(
        other, {word: variant.recipe}, keep=budget, statistics=found, allocation=variant.allocation, quiet=True
    )
    return {
        "method": variant.name,
        "kept": report.bytes_after / report.bytes_before,
        "dense": sum(w.bytes_after == w.bytes_before for w in report.weights),
        "accuracy": accuracy(other, images, classes),
    }


def remarks(rows: list[dict[str, Any]]) -> str:
    """Whether the orderings hold, from the numbers."""
    orders = [
        ("RowFisher", "SVD"),
        ("KroneckerFisher", "RowFisher"),
        ("KroneckerFisher", "InputGram"),
        ("KroneckerFisher (logits)", "RowFisher (logits)"),
        ("KroneckerFisher (logits)", "KroneckerFisher"),
        ("KroneckerFisher (logits)", "InputGram"),
        ("RowFisher, allocated", "RowFisher"),
        ("KroneckerFisher, allocated", "KroneckerFisher"),
        ("KroneckerFisher (logits), allocated", "KroneckerFisher (logits)"),
    ]
    lines = []
    for network_name in dict.fromkeys(r["network"] for r in rows):
        at = {(r["budget"], r["method"]): r["accuracy"] for r in rows if r["network"] == network_name}
        budgets = list(dict.fromkeys(budget for budget, _ in at))
        for better, worse in orders:
            fails = [budget for budget in budgets if at[budget, better] < at[budget, worse]]
            verdict = f"NOT at {', '.join(fails)}" if fails else "at every budget"
            lines.append(f"- {network_name}: {better} at or above {worse}: {verdict}.")
        best = [max((m for b, m in at if b == budget), key=lambda m: at[budget, m]) for budget in budgets]
        said = "; ".join(f"{budget} {name}" for budget, name in zip(budgets, best, strict=True))
        lines.append(f"- {network_name}, best by budget: {said}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
