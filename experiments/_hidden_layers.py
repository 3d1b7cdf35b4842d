"""The hidden linear layers of a small network, covered by k flats: what MESSI's figures 9, 10 and 16 have in common.

Each seed has a network of its own, whose two hidden layers are compressed to the same share with the same k; the last
layer stays. Judged on test images before and after fine-tuning. "SVD" is k = 1. Beside them stands kflats for
layers that are measured, by gradients of the logits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _runs import Asked, Cell, Log, Run, Scores
from _small_networks import Dense, Images, accuracy, train_
from _tables import Results, Value, by_size, drop, figure, orderings, publish, told, tuned_drop

import kflats
from kflats import MESSI, SVD, KMeansSVD, KroneckerFisher, Projections, Recipe, Uniform
from kflats.calibration.objectives import describe
from kflats.common.errors import KflatsError
from kflats.recipe.recipe import brief

OURS = "kflats"
HIDDEN = ("fc0", "fc1")
OBJECTIVE, SAMPLES = Projections(of="logits", seed=0, normalized=False), 512
"""What kflats is measured by here: gradients of the logits, on so many training images."""


@dataclass(frozen=True)
class Trained:
    """One seed's layers and what they read.

    Args:
        model: hidden layers and the last one. learnt, judged: its inputs, for training and for scores.
        numbers: of the whole network, whose other layers stay.
    """

    model: Dense
    learnt: Images
    judged: Images
    numbers: int


@dataclass(frozen=True)
class Subject:
    """A network as tables and the log call it.

    Args:
        name: of the log. page: the name of page and pictures. task, model: of the log's runs.
        training, algorithm: decide what is trained.
        digest: of all data; read when the first cell is asked for, as the network of a seed (``trained``) is.
        title, about: of the page.
    """

    name: str
    page: str
    task: str
    model: str
    training: Mapping[str, Any]
    algorithm: str
    digest: Callable[[], str]
    trained: Callable[[int], Trained]
    title: str
    about: str


def methods(ks: list[int], restarts: int) -> dict[str, tuple[Recipe, Mapping[str, Any], str]]:
    """Recipe, what decides it, and the name of its algorithm, by name in tables."""
    found: dict[str, tuple[Recipe, Mapping[str, Any], str]] = {}
    uniform: dict[str, Any] = {"allocation": "uniform"}
    found["SVD"] = Recipe(SVD(), Uniform()), uniform | {"k": 1}, "svd"
    for k in ks:
        decides = uniform | {"k": k, "restarts": restarts}
        found[f"MESSI, k = {k}"] = Recipe(MESSI(k=k, restarts=restarts), Uniform()), decides, "messi"
        found[f"k-means, k = {k}"] = Recipe(KMeansSVD(k=k, restarts=restarts), Uniform()), decides, "k-means"
    ours = Recipe(SVD(), KroneckerFisher())
    measured = {"importance": brief(ours.importance), "objective": describe(OBJECTIVE), "samples": SAMPLES}
    found[OURS] = ours, {"allocation": "auto"} | measured, "kronecker"
    return found


class HiddenLayers:
    """The cells of one command, by its options ``saved``, ``ks``, ``epochs`` and ``restarts``.

    Raises:
        KflatsError: a model or a task that is not the subject's.
    """

    def __init__(self, asked: Asked, subject: Subject) -> None:
        if asked.source is not None:
            raise KflatsError(
                f"--source {asked.source} is not supported with {subject.name}.py",
                cause=f"it trains {subject.model} from nothing",
                hint="messi_tasks.py, for models of transformers",
            )
        if asked.tasks != (subject.task,):
            raise KflatsError(
                f"--tasks {asked.more.tasks} is not supported with {subject.name}.py",
                cause=f"{subject.model} has one task, {subject.task}",
                hint="leave --tasks out",
            )
        self.asked, self.own, self.subject = asked, asked.more, subject
        self.name, self.page = subject.name, subject.page
        self.ks = [int(k) for k in self.own.ks.split(",")]
        self.originals: dict[int, float] = {}

    def compute(self, recipe: Recipe, decides: Mapping[str, Any], keep: str, seed: int) -> Scores:
        """Compress, judge, train, judge."""
        trained = self.subject.trained(seed)
        learnt, judged = trained.learnt, trained.judged
        if seed not in self.originals:
            self.originals[seed] = accuracy(trained.model, judged.images, judged.classes)
        model = copy.deepcopy(trained.model)
        more: dict[str, Any] = {"allocation": decides["allocation"]}
        if recipe.importance.needs:
            chosen = torch.randperm(len(learnt), generator=torch.Generator().manual_seed(seed))[:SAMPLES]
            more["calibration"] = [{"x": learnt.images[i], "labels": learnt.classes[i]} for i in chosen.split(64)]
            more["objective"] = OBJECTIVE
        report = kflats.compress_(model, dict.fromkeys(HIDDEN, recipe), keep=keep, seed=seed, quiet=True, **more)
        after = accuracy(model, judged.images, judged.classes)
        train_(model, learnt, self.own.epochs, seed=seed)
        return Scores(
            metric="accuracy",
            original=self.originals[seed],
            compressed=after,
            tuned=accuracy(model, judged.images, judged.classes),
            nbytes=report.bytes_after,
            error=sum(w.error_unweighted * w.shape[0] * w.shape[1] for w in report.weights)
            / sum(w.shape[0] * w.shape[1] for w in report.weights),
            more={"network_saved": (report.bytes_before - report.bytes_after) / (4 * trained.numbers)},
        )

    def cells(self, log: Log) -> Iterator[tuple[Cell, Callable[[], Scores]]]:
        """By rate, then by seed."""
        named = methods(self.ks, self.own.restarts)
        for saved in self.own.saved.split(","):
            keep = f"{100 - float(saved):g}%"
            for seed in self.asked.seeds:
                for name, (recipe, decides, algorithm) in named.items():
                    place = Cell(
                        task=self.subject.task,
                        model=self.subject.model,
                        method=name,
                        size=keep,
                        seed=seed,
                        epochs=self.own.epochs,
                        training=self.subject.training,
                        recipe=decides,
                        algorithms=(self.subject.algorithm, algorithm),
                        data=self.subject.digest(),
                    )
                    yield place, partial(self.compute, recipe, decides, keep, seed)

    def publish(self, log: Log) -> None:
        """The page and the figures of what has run."""
        own, asked, ks, tasks = self.own, self.asked, self.ks, [self.subject.task]
        runs = log.newest(self._same)
        rates = sorted(own.saved.split(","), key=float)
        sizes = [(f"{100 - float(rate):g}%", f"{rate} % saved") for rate in rates]
        places = [(size, float(rate)) for (size, _), rate in zip(sizes, rates, strict=True)]
        names = list(methods(ks, own.restarts))
        claims = [(f"MESSI, k = {k}", "SVD") for k in ks] + [(f"MESSI, k = {k}", f"k-means, k = {k}") for k in ks]
        claims += [(OURS, name) for name in ("SVD", *(f"MESSI, k = {k}" for k in ks))]
        parts = [self.subject.about, told(runs) if runs else ""]
        views: tuple[tuple[str, str, Value], ...] = (
            ("before", "Before fine-tuning", drop),
            ("after", f"After {own.epochs} epochs of fine-tuning", tuned_drop),
        )
        for when, title, value in views:
            results = Results(runs, value)
            picture = asked.results / f"{self.subject.page}_{when}.png"
            shown = ["SVD", *(f"MESSI, k = {k}" for k in ks), f"k-means, k = {ks[-1]}", OURS]
            parts += [f"## {title}", by_size(results, names, sizes, tasks, len(asked.seeds))]
            if figure(picture, results, shown, places, tasks, ("% of the layers saved", "drop, points")):
                parts.append(f"![{title}]({picture.name})")
            parts += ["What holds:", orderings(results, claims, sizes, tasks)]
        publish(self.subject.page, self.subject.title, parts, asked, self.name)

    def _same(self, run: Run) -> bool:
        restarts = run.recipe.get("restarts", self.own.restarts)
        same = (dict(run.training), run.epochs, restarts)
        return same == (dict(self.subject.training), self.own.epochs, self.own.restarts)
