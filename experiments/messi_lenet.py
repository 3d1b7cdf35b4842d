"""Claims (MESSI, figures 9 and 16): beyond 90 % compression of LeNet-300-100 on MNIST, k subspaces lose less accuracy
than one; and projective clustering loses less than k-means clusters with an SVD in each.

    python experiments/messi_lenet.py --resume

Each seed trains a network of its own (10 epochs), whose two hidden layers are compressed to the same share with the
same k; the last layer stays. Judged on the 10,000 test images before and after two epochs of fine-tuning. "SVD" is
k = 1. Beside them stands kflats' default for layers that are measured, by gradients of the logits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from _runs import Asked, Cell, Log, Run, Scores, asked_for, carry_out
from _small_networks import Images, LeNet, accuracy, blobs, lenet, mnist, train_
from _tables import Results, Value, by_method, drop, figure, orderings, publish, told, tuned_drop

import kflats
from kflats import MESSI, SVD, KMeansSVD, KroneckerFisher, Projections, Recipe, Uniform

OURS = "kflats"
HIDDEN = ("fc0", "fc1")
OWN: dict[str, Any] = {"saved": "96,90,80,94,92", "ks": "2,5", "train-epochs": 10, "epochs": 2, "restarts": 10}
QUICK: dict[str, Any] = {"saved": "90", "ks": "2", "train-epochs": 1, "epochs": 1, "restarts": 2, "seeds": "0,1"}
TITLE = "LeNet-300-100 covered by k flats"


def methods(ks: list[int], restarts: int) -> dict[str, tuple[Recipe, Mapping[str, Any], str]]:
    """Recipe, what decides it, and the name of its algorithm, by name in tables."""
    found: dict[str, tuple[Recipe, Mapping[str, Any], str]] = {"SVD": (Recipe(SVD(), Uniform()), {"k": 1}, "svd")}
    for k in ks:
        decides = {"k": k, "restarts": restarts}
        found[f"MESSI, k = {k}"] = Recipe(MESSI(k=k, restarts=restarts), Uniform()), decides, "messi"
        found[f"k-means, k = {k}"] = Recipe(KMeansSVD(k=k, restarts=restarts), Uniform()), decides, "k-means"
    found[OURS] = Recipe(SVD(), KroneckerFisher()), {"importance": "kronecker of the logits"}, "kronecker"
    return found


class Experiment:
    """The data, and a trained network for each seed."""

    def __init__(self, asked: Asked) -> None:
        self.asked, self.own = asked, asked.more
        self.training = {"epochs": self.own.train_epochs, "lr": 1e-3, "batch": 128, "images": "blobs"}
        if not asked.quick:
            self.training["images"] = "MNIST"
        self.original = cache(self._original)

    @property
    def digest(self) -> str:
        """Of all images."""
        return f"{self.data()[0].digest} {self.data()[1].digest}"

    @staticmethod
    @cache
    def images(quick: bool, folder: Any) -> tuple[Images, Images]:
        """For training, and judged."""
        return (blobs(2000, 0), blobs(1000, 1)) if quick else (mnist("train", folder), mnist("t10k", folder))

    def data(self) -> tuple[Images, Images]:
        """For training, and judged."""
        return self.images(self.asked.quick, self.asked.task_data)

    def _original(self, seed: int) -> tuple[LeNet, float]:
        learnt, judged = self.data()
        model = lenet(learnt, self.own.train_epochs, seed)
        return model, accuracy(model, judged.images, judged.classes)

    def compute(self, recipe: Recipe, keep: str, seed: int) -> Scores:
        """Compress, judge, train, judge."""
        learnt, judged = self.data()
        original, before = self.original(seed)
        model = copy.deepcopy(original)
        more: dict[str, Any] = {}
        if recipe.importance.needs:
            chosen = torch.randperm(len(learnt), generator=torch.Generator().manual_seed(seed))[:512]
            more = {"calibration": [{"x": learnt.images[i], "labels": learnt.classes[i]} for i in chosen.split(64)]}
            more |= {"objective": Projections(of="logits", seed=0, normalized=False)}
        else:
            more = {"allocation": "uniform"}
        report = kflats.compress_(model, dict.fromkeys(HIDDEN, recipe), keep=keep, seed=seed, quiet=True, **more)
        after = accuracy(model, judged.images, judged.classes)
        train_(model, learnt, self.own.epochs, seed=seed)
        whole = 4 * sum(p.numel() for p in original.parameters())
        return Scores(
            metric="accuracy",
            original=before,
            compressed=after,
            tuned=accuracy(model, judged.images, judged.classes),
            nbytes=report.bytes_after,
            error=sum(w.error_unweighted * w.shape[0] * w.shape[1] for w in report.weights)
            / sum(w.shape[0] * w.shape[1] for w in report.weights),
            more={"network_saved": (report.bytes_before - report.bytes_after) / whole},
        )

    def cells(self) -> Iterator[tuple[Cell, Callable[[], Scores]]]:
        """By rate, then by seed."""
        own = self.own
        named = methods([int(k) for k in own.ks.split(",")], own.restarts)
        for saved in own.saved.split(","):
            keep = f"{100 - float(saved):g}%"
            for seed in self.asked.seeds:
                for name, (recipe, decides, algorithm) in named.items():
                    place = Cell(
                        task="mnist",
                        model="LeNet-300-100",
                        method=name,
                        size=keep,
                        seed=seed,
                        epochs=own.epochs,
                        training=self.training,
                        recipe=decides,
                        algorithms=("small networks", algorithm),
                        data=self.digest,
                    )
                    yield place, partial(self.compute, recipe, keep, seed)

    def publish(self, log: Log) -> None:
        """The page and the figures of what has run."""
        own, asked = self.own, self.asked
        ks = [int(k) for k in own.ks.split(",")]
        runs = log.newest(self._same)
        rates = sorted(own.saved.split(","), key=float)
        sizes = [(f"{100 - float(rate):g}%", f"{rate} % saved") for rate in rates]
        places = [(size, float(rate)) for (size, _), rate in zip(sizes, rates, strict=True)]
        names = list(methods(ks, own.restarts))
        claims = [(f"MESSI, k = {k}", "SVD") for k in ks] + [(f"MESSI, k = {k}", f"k-means, k = {k}") for k in ks]
        claims += [(OURS, name) for name in ("SVD", *(f"MESSI, k = {k}" for k in ks))]
        parts = [
            "The two hidden layers (784 x 300 and 300 x 100, 99 % of the network) keep the same share; sizes are of "
            "them. Drops of the accuracy on test images in points, mean ± standard deviation over seeds.",
            told(runs) if runs else "",
        ]
        views: tuple[tuple[str, str, Value], ...] = (
            ("before", "Before fine-tuning", drop),
            ("after", f"After {own.epochs} epochs of fine-tuning", tuned_drop),
        )
        for when, title, value in views:
            results = Results(runs, value)
            picture = asked.results / f"messi_lenet_{when}.png"
            shown = ["SVD", *(f"MESSI, k = {k}" for k in ks), f"k-means, k = {ks[-1]}", OURS]
            parts += [f"## {title}", by_method(results, names, sizes, ["mnist"], len(asked.seeds))]
            if figure(picture, results, shown, places, ["mnist"], ("% of the layers saved", "drop, points")):
                parts.append(f"![{title}]({picture.name})")
            parts += ["What holds, over paired seeds:", orderings(results, claims, sizes, ["mnist"])]
        publish("messi_lenet", TITLE, parts, asked)

    def _same(self, run: Run) -> bool:
        restarts = run.recipe.get("restarts", self.own.restarts)
        return (dict(run.training), run.epochs, restarts) == (self.training, self.own.epochs, self.own.restarts)


def main(argv: list[str] | None = None) -> None:
    asked = asked_for(__doc__, "mnist", OWN, seeds="0,1,2,3,4", argv=argv, quick=QUICK)
    experiment, log = Experiment(asked), Log(asked.results / "messi_lenet.jsonl")
    if not asked.tables:
        carry_out(experiment.cells(), log, asked)
    experiment.publish(log)


if __name__ == "__main__":
    main()
