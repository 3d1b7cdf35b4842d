"""Claims (MESSI, figures 9 and 16): beyond 90 % compression of LeNet-300-100 on MNIST, k subspaces lose less accuracy
than one; and projective clustering loses less than k-means clusters with an SVD in each.

    python experiments/messi_lenet.py --resume

Each seed trains a network of its own (10 epochs), whose two hidden layers are compressed to the same share with the
same k; the last layer stays. Judged on the 10,000 test images before and after two epochs of fine-tuning. "SVD" is
k = 1. Beside them stands kflats for layers that are measured, by gradients of the logits. Its default with labels are
gradients of the loss.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from _hidden_layers import HiddenLayers, Subject, Trained
from _runs import Asked, asked_for, conduct
from _small_networks import Images, blobs, lenet, mnist

OWN: dict[str, Any] = {"saved": "96,90,80,94,92", "ks": "2,3,4,5", "train-epochs": 10, "epochs": 2, "restarts": 10}
QUICK: dict[str, Any] = {"saved": "90", "ks": "2", "train-epochs": 1, "epochs": 1, "restarts": 2, "seeds": "0,1"}


def subject(asked: Asked) -> Subject:
    """LeNet-300-100, trained when it is first used."""
    folder, epochs = asked.task_data, asked.more.train_epochs

    @cache
    def data() -> tuple[Images, Images]:
        return (blobs(2000, 0), blobs(1000, 1)) if asked.quick else (mnist("train", folder), mnist("t10k", folder))

    @cache
    def trained(seed: int) -> Trained:
        model = lenet(data()[0], epochs, seed)
        return Trained(model, *data(), sum(p.numel() for p in model.parameters()))

    return Subject(
        name="messi_lenet",
        page="messi_lenet",
        task="mnist",
        model="LeNet-300-100",
        training={"epochs": epochs, "lr": 1e-3, "batch": 128, "images": "blobs" if asked.quick else "MNIST"},
        algorithm="small networks",
        digest=cache(lambda: f"{data()[0].digest} {data()[1].digest}"),
        trained=trained,
        title="LeNet-300-100 covered by k flats",
        about="The two hidden layers (784 x 300 and 300 x 100, 99 % of the network) keep the same share; sizes are of "
        "them. Drops of the accuracy on test images in points, mean ± standard deviation over seeds.",
    )


def main(argv: list[str] | None = None) -> None:
    asked = asked_for(__doc__, "mnist", OWN, seeds="0,1,2,3,4", argv=argv, quick=QUICK)
    conduct(partial(HiddenLayers, subject=subject(asked)), asked)


if __name__ == "__main__":
    main()
