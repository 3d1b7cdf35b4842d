"""Claim (MESSI, figure 10): with the two hidden layers of VGG-19 compressed, k subspaces lose less accuracy than one at
high rates.

    python experiments/messi_vgg.py --resume
    python experiments/messi_vgg.py --width 64 --train-epochs 60 --resume        # the published width; wants a GPU

By default the network has the 16 convolutions of VGG-19 and its two hidden layers of 512 x 512 at a quarter of the
published channels (16 to 128 in place of 64 to 512), and is trained on 20,000 images of CIFAR-10: what one core does in
minutes. Each seed trains one, whose hidden layers are compressed to the same share with the same k; the last layer
stays. The convolutions stay as they are, so that their outputs are computed once, and the two epochs of fine-tuning
train linear layers alone. "SVD" is k = 1. Beside them stands kflats for layers that are measured, by gradients of the
logits. Its default with labels are gradients of the loss.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from _algorithms import versions_of
from _hidden_layers import HiddenLayers, Subject, Trained
from _runs import Asked, asked_for, conduct, digest_of, libraries
from _small_networks import VGG19, Images, blobs, cifar, vgg19
from safetensors.torch import load_file, save_file

from kflats.io.atomic import replaced

OWN: dict[str, Any] = {
    "saved": "90,80,96,60,98",
    "ks": "2,5",
    "train-epochs": 6,
    "epochs": 2,
    "restarts": 10,
    "width": 16,
}
QUICK: dict[str, Any] = {"saved": "90", "ks": "2", "train-epochs": 5, "restarts": 2, "width": 4, "seeds": "0,1"}


@torch.no_grad()
def outputs(model: VGG19, data: Images) -> Images:
    """What the hidden layers read: the outputs of the convolutions."""
    model.eval()
    return Images(torch.cat([model.features(x) for x in data.images.split(250)]), data.classes)


def subject(asked: Asked) -> Subject:
    """VGG-19, trained when it is first used and kept in the folder of trained models."""
    folder, own = asked.task_data, asked.more
    training = {"epochs": own.train_epochs, "lr": 1e-3, "batch": 128, "width": own.width, "images": "CIFAR-10"}
    if asked.quick:
        training["images"] = "blobs"

    @cache
    def data() -> tuple[Images, Images]:
        if asked.quick:
            return blobs(1000, 0, (3, 1, 1), (3, 32, 32)), blobs(500, 1, (3, 1, 1), (3, 32, 32))
        return cifar("train20k", folder), cifar("test10k", folder)

    @cache
    def digest() -> str:
        return f"{data()[0].digest} {data()[1].digest}"

    @cache
    def trained(seed: int) -> Trained:
        decides = {"training": training, "seed": seed, "data": digest(), "libraries": libraries()}
        path = asked.models / f"vgg19-{seed}-{digest_of(decides | versions_of(['vgg']))[:12]}.safetensors"
        model = VGG19(own.width)
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            model = vgg19(data()[0], own.train_epochs, seed, own.width)
            with replaced(path) as aside:
                save_file({k: t.contiguous() for k, t in model.state_dict().items()}, aside)
        model.load_state_dict(load_file(path))
        numbers = sum(p.numel() for p in model.parameters())
        learnt, judged = (outputs(model, images) for images in data())
        return Trained(model.head, learnt, judged, numbers)

    return Subject(
        name="messi_vgg",
        page="messi_vgg" if asked.quick or own.width == OWN["width"] else f"messi_vgg_width_{own.width}",
        task="cifar10",
        model="VGG-19" if own.width == 64 else f"VGG-19, width {own.width}",
        training=training,
        algorithm="vgg",
        digest=digest,
        trained=trained,
        title="The hidden layers of VGG-19 covered by k flats",
        about=f"A VGG-19 of width {own.width} (published: 64) and its two hidden layers of 512 x 512, which keep the "
        "same share; sizes are of them. Convolutions are not trained again. Drops of the accuracy on test images in "
        "points, mean ± standard deviation over seeds.",
    )


def main(argv: list[str] | None = None) -> None:
    asked = asked_for(__doc__, "cifar10", OWN, argv=argv, quick=QUICK)
    conduct(partial(HiddenLayers, subject=subject(asked)), asked)


if __name__ == "__main__":
    main()
