"""Claim: integer codes keep the accuracy of a convolutional network at sizes where low-rank pairs, pruning and rounding
with fixed steps have lost it, without fine-tuning.

    python experiments/convolutions.py --write experiments/results

CIFAR-10 ResNet-20 (KFLATS_WEIGHTS), calibrated on training images without their labels, judged on test images
(KFLATS_DATA). Sizes are stored bytes of all convolutions and of the classifier, in shares of float32; codes with their
distributions, pruning as a bit for each number and the values of the others, rounding with fixed steps as its integers
and a 16-bit scale for each output.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from _results import data_folder, markdown, parsed, publish
from _small_networks import accuracy, cifar
from baselines.magnitude import magnitude_mask
from torch import Tensor, nn
from vision import network

from kflats import SVD, Auto, InputGram, KroneckerFisher, Projections, Recipe, compress_
from kflats.demo.gptq import Factor, gptq
from kflats.evaluation.latency import take_turns
from kflats.matrices.layers import Patches
from kflats.model.run_as import running_as
from kflats.model.weights import find_weights

LOGITS = Projections(of="logits", seed=0, normalized=False)
BY_SIZE: dict[str, Any] = {
    "low-rank pairs, KroneckerFisher of the logits": Recipe(SVD(), KroneckerFisher()),
    "kflats, no data": Auto(),
    "kflats, InputGram": Recipe(Auto(), InputGram()),
    "kflats, gradients of the logits": Recipe(Auto(), KroneckerFisher(damping=0.05), matrix_rows="out_features"),
}
"""What is made for each size; pairs and the last one measure gradients of the logits."""
_CLIPS = torch.linspace(0.5, 1.0, 11)
QUICK: dict[str, Any] = {"samples": 16, "judged": 40, "sizes": "15%", "rounds": 1}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="25%,20%,15%,12.5%,10%,8%,6%")
    parser.add_argument("--samples", type=int, default=256, help="training images to calibrate on")
    parser.add_argument("--judged", type=int, default=10_000, help="test images to judge on")
    parser.add_argument("--rounds", type=int, default=7, help="of measuring time")
    asked = parsed(parser, argv, QUICK)
    original = network("resnet20")
    learnt, tested = (cifar(name, data_folder()) for name in ("train20k", "test10k"))
    drawn = torch.randperm(len(learnt), generator=torch.Generator().manual_seed(0))[: asked.samples]
    batches = [{"x": learnt.images[part]} for part in drawn.split(64)]
    images, classes = tested.images[: asked.judged], tested.classes[: asked.judged]
    rows: list[dict[str, Any]] = []

    def judged(method: str, size: str, model: nn.Module, kept: float) -> None:
        rows.append({"method": method, "size": size, "kept": kept, "accuracy": accuracy(model, images, classes)})
        print(rows[-1], flush=True)

    judged("float32", "", original, 1.0)
    for bits in (8, 4, 3, 2):
        judged("rounding to the nearest", f"{bits} bits", *rounded(original, bits, None))
        judged("GPTQ", f"{bits} bits", *rounded(original, bits, batches))
    models: dict[str, nn.Module] = {}
    for size in asked.sizes.split(","):
        for name, recipe in BY_SIZE.items():
            model = copy.deepcopy(original)
            data: dict[str, Any] = {} if name.endswith("no data") else {"calibration": batches}
            if "logits" in name:
                data["objective"] = LOGITS
            report = compress_(model, {"all": recipe}, keep=size, allocation="loss", quiet=True, **data)
            judged(name, size, model, report.bytes_after / report.bytes_before)
            models[f"{name}, {size}"] = model
        judged("pruning by magnitude", size, *pruned(original, float(size.rstrip("%")) / 100))
    largest = models[f"kflats, gradients of the logits, {asked.sizes.split(',')[0]}"]
    forms = timed(original, largest, images, asked.rounds)
    lines = [[r["method"], r["size"] or "-", f"{r['kept']:.1%}", f"{r['accuracy']:.2%}"] for r in rows]
    numbers = sum(weight.shape[0] * weight.shape[1] for weight in find_weights(original))
    body = "\n\n".join(
        [
            f"{numbers:,} numbers; judged on {len(classes):,} test images, calibrated on {len(drawn)} training images "
            "without labels. No fine-tuning. One draw of the images.",
            markdown(["method", "size asked", "kept", "accuracy"], lines),
            markdown(["form", "images", "median", "time / float32"], forms),
            remarks(rows),
        ]
    )
    publish("convolutions", "A convolutional network in codes", body, {"rows": rows}, asked)


def rounded(original: nn.Module, bits: int, batches: list[dict[str, Tensor]] | None) -> tuple[nn.Module, float]:
    """Integers of fixed length and a scale for each output: to the nearest, or by GPTQ layer by layer, each behind the
    layers that are rounded already. And the share of bytes."""
    model = copy.deepcopy(original)
    most, stored, dense = 2 ** (bits - 1) - 1, 0.0, 0
    for weight in find_weights(model):
        held = model.get_submodule(weight.name).weight
        rows = held.detach().flatten(1)
        steps = output_steps(rows, most)
        if batches is None:
            levels = (rows / steps).round().clamp(-most - 1, most)
        else:
            levels = gptq(rows, Factor.of(gram_of(model, weight.name, batches), 0.01), steps, 0.5, most)
        held.data = (levels * steps).reshape(held.shape)
        stored += rows.numel() * bits / 8 + 2 * len(rows)
        dense += 4 * rows.numel()
    return model, stored / dense


def output_steps(rows: Tensor, most: int) -> Tensor:
    """(out, 1): of several shares of the largest number that of least error, in float16."""
    tried = (rows.abs().amax(1, keepdim=True) / most * _CLIPS.view(-1, 1, 1)).half().float().clamp_min(1e-7)
    lost = torch.stack([((rows / s).round().clamp(-most - 1, most) * s - rows).square().sum(1) for s in tried])
    best: Tensor = tried.gather(0, lost.argmin(0).view(1, -1, 1))[0]
    return best


@torch.no_grad()
def gram_of(model: nn.Module, name: str, batches: list[dict[str, Tensor]]) -> Tensor:
    """The Gram of the inputs of a layer, of the patches of a convolution."""
    sums: list[Tensor] = []

    def seen(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        x = given[0]
        if isinstance(layer, nn.Conv2d):
            patches = Patches.of(layer)
            x = patches.inside(patches.padded(x)).flatten(0, 1)
        sums.append(x.T @ x)

    handle = model.get_submodule(name).register_forward_pre_hook(seen)
    for batch in batches:
        model(**batch)
    handle.remove()
    return torch.stack(sums).sum(0)


def pruned(original: nn.Module, keep: float) -> tuple[nn.Module, float]:
    """The largest numbers of each weight, so many that they and a bit for each number take a share ``keep``."""
    model = copy.deepcopy(original)
    stored = dense = 0.0
    for weight in find_weights(model):
        held = model.get_submodule(weight.name).weight
        count = max(0, int(held.numel() * (keep - 1 / 32)))
        held.data *= magnitude_mask(held.detach(), count)
        stored += 4 * count + held.numel() / 8
        dense += 4 * held.numel()
    return model, stored / dense


def timed(original: nn.Module, model: nn.Module, images: Tensor, rounds: int) -> list[list[object]]:
    """Each run-time form beside the original, in turns."""
    lines: list[list[object]] = []
    for count in (1, 32):
        x = images[:count]
        for form in ("dense", "bfloat16", "int8", "compact"):
            with running_as(model, form), torch.no_grad():
                _, ours = take_turns({"float32": lambda x=x: original(x), form: lambda x=x: model(x)}, rounds)
            lines.append([form, count, f"{ours.ms:.1f} ms", f"{ours.ratio:.2f}"])
    return lines


def remarks(rows: list[dict[str, Any]]) -> str:
    """The least size at which each method is within one point of the original, from the numbers."""
    least = rows[0]["accuracy"] - 0.01
    lines = []
    for method in dict.fromkeys(r["method"] for r in rows[1:]):
        sizes = [r["kept"] for r in rows if r["method"] == method and r["accuracy"] >= least]
        lines.append(f"- {method}: {f'{min(sizes):.1%}' if sizes else 'none'}.")
    return "The least of these sizes at which accuracy is within a point of float32:\n\n" + "\n".join(lines)


if __name__ == "__main__":
    main()
