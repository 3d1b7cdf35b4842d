"""Trains the small networks that experiments compress, for whoever has no weights of them.

    python experiments/train_small.py --out FOLDER
    KFLATS_WEIGHTS=FOLDER python experiments/vision.py

Writes ``lenet300100.safetensors`` (10 epochs of MNIST: a minute of one core) and ``cifar10_resnet20.safetensors``. The
published ResNet-20 took 164 epochs of 50,000 images; by default this one gets as many epochs as an hour of two cores
allows, and the script prints what it reaches.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from _small_networks import ResNet20, accuracy, cifar, lenet, mnist, train_
from safetensors.torch import save_file


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the weights")
    parser.add_argument("--networks", default="lenet,resnet20")
    parser.add_argument("--task-data", help='folder with mnist/ and cifar10/, or "hub"; default: $KFLATS_DATA')
    parser.add_argument("--lenet-epochs", type=int, default=10)
    parser.add_argument("--resnet-epochs", type=int, default=30)
    parser.add_argument("--limit", type=int, default=0, help="train on this many images only (0: all)")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    data = asked.task_data or os.environ.get("KFLATS_DATA") or "hub"
    folder = None if data == "hub" else Path(data)
    asked.out.mkdir(parents=True, exist_ok=True)
    for name in asked.networks.split(","):
        began = time.monotonic()
        if name == "lenet":
            learnt, judged = mnist("train", folder), mnist("t10k", folder)
        else:
            learnt, judged = cifar("train20k", folder), cifar("test10k", folder)
        if asked.limit:
            learnt = learnt.part(torch.arange(asked.limit))
        if name == "lenet":
            model: torch.nn.Module = lenet(learnt, asked.lenet_epochs, asked.seed)
            state = {f"{kind[0]}{i}": getattr(model, f"fc{i}").get_parameter(kind) for i in range(3) for kind in _KINDS}
            file = "lenet300100.safetensors"
        else:
            with torch.random.fork_rng():
                torch.manual_seed(asked.seed)
                model = ResNet20()
            train_(model, learnt, asked.resnet_epochs, seed=asked.seed, lr=3e-3, augmented=True)
            state = {k: t for k, t in model.state_dict().items() if not k.endswith("num_batches_tracked")}
            file = "cifar10_resnet20.safetensors"
        save_file({k: t.detach().contiguous() for k, t in state.items()}, asked.out / file)
        reached = accuracy(model, judged.images, judged.classes)
        print(
            f"{file}: {reached:.2%} of {len(judged):,} test images, {len(learnt):,} training images, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )


_KINDS = ("weight", "bias")

if __name__ == "__main__":
    main()
