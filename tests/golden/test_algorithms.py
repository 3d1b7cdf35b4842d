"""The algorithms of the experiments give what they gave when their versions were written down.

Finished runs of experiments are used again as long as the versions in ``experiments/_algorithms.py`` are the same. Each
algorithm is run here on a small problem. Where its numbers have changed, raise its version there, and record:

    KFLATS_GOLDEN=record pytest tests/golden/test_algorithms.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kflats
from kflats import MESSI, SVD, KMeansSVD, KroneckerFisher, Recipe, RowFisher
from kflats.methods import Method, Problem
from kflats.numerics.loss import Power
from kflats.numerics.rows import TensorRows
from kflats.recover.recover import recover_
from kflats.tasks.scoring import measure

pytest.importorskip("_algorithms", reason="experiments/ is not here")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("seqeval")

import robust_scores
from _algorithms import VERSIONS
from _quick import write_model
from _robust import Known, approximations
from _small_networks import accuracy, blobs, lenet, vgg19
from _task_models import with_head

FILE = Path(__file__).with_name("algorithms.json")
GOLDEN = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
RECORD = os.environ.get("KFLATS_GOLDEN") == "record"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tiny") / "model"
    write_model(folder)
    return folder


def probes(dense: Tensor) -> list[float]:
    """Four seeded sums over a matrix."""
    gen = torch.Generator().manual_seed(1)
    rows, columns = (torch.randn(size, 4, generator=gen, dtype=torch.float64) for size in dense.shape)
    return [float(x @ dense.detach().double() @ y) for x, y in zip(rows.T, columns.T, strict=True)]


def table() -> Tensor:
    """Rows near three flats."""
    gen = torch.Generator().manual_seed(2)
    bases = torch.randn(3, 4, 16, generator=gen)
    rows = torch.einsum("nr,nrd->nd", torch.randn(240, 4, generator=gen), bases[torch.arange(240) % 3])
    return rows + 0.3 * torch.randn(240, 16, generator=gen)


def fitted(method: Method) -> list[float]:
    return probes(method.fit(Problem(TensorRows(table()), 4 * 1200, 4, seed=4)).matrix.dense())


def batches() -> list[dict[str, Tensor]]:
    gen = torch.Generator().manual_seed(5)
    ids = torch.randint(5, 600, (48, 10), generator=gen)
    return [{"input_ids": part, "labels": part[:, 0] % 2} for part in ids.split(16)]


def default(tiny: Path) -> list[float]:
    from kflats.evaluation.outputs import load_tokenizer
    from kflats.io import load_model

    model = load_model(tiny)
    texts = [f"w{i} w{i * i % 600} w{7 * i % 50}" for i in range(200)]
    kflats.compress_(model, None, keep="60%", texts=texts, tokenizer=load_tokenizer(tiny), quiet=True)
    return probes(model.embeddings.word_embeddings.matrix.dense())


def by_fisher(importance: Any, tiny: Path) -> list[float]:
    model = with_head("sst2", 0, tiny)
    recipes = {"bert.encoder.layer.1.*": Recipe(SVD(), importance)}
    kflats.compress_(model, recipes, keep="33% ranks", calibration=batches(), allocation="uniform", quiet=True)
    return probes(model.bert.encoder.layer[1].output.dense.matrix.dense())


def training(tiny: Path) -> list[float]:
    model = with_head("sst2", 0, tiny)
    done = recover_(model, batches(), eval_split=None, patience=None, lr=1e-3, epochs=2, batch=16, quiet=True)
    return [epoch.loss for epoch in done.epochs] + probes(model.classifier.weight)


def scores(tiny: Path) -> list[float]:
    gen = torch.Generator().manual_seed(6)
    true, guessed = torch.randint(0, 2, (2, 40), generator=gen).tolist()
    numbers = torch.randn(40, generator=gen)
    found = measure(["accuracy", "f1", "matthews"], guessed, true)
    found |= measure(["pearson_spearman"], (numbers + 0.5 * torch.randn(40, generator=gen)).tolist(), numbers.tolist())
    tags = [["O", "B-PER", "I-PER", "O"], ["B-LOC", "O", "B-PER", "O"]]
    found |= measure(["entity_f1"], [tags[0], ["B-LOC", "O", "O", "O"]], tags)
    return list(found.values())


def small_networks(tiny: Path) -> list[float]:
    learnt, judged = blobs(600, 0), blobs(100, 1)
    model = lenet(learnt, 1, 0)
    return [accuracy(model, judged.images, judged.classes), *probes(model.fc2.weight)]


def vgg(tiny: Path) -> list[float]:
    """In float64: Adam divides by the gradient's size, and makes a last digit of float32 a percent in 19 layers."""
    torch.set_default_dtype(torch.float64)
    try:
        model = vgg19(blobs(192, 0, (3, 1, 1), (3, 32, 32)), 1, 0, 4)
    finally:
        torch.set_default_dtype(torch.float32)
    return probes(model.head.fc0.weight) + probes(model.features[0].weight.flatten(1))


def search(tiny: Path) -> list[float]:
    """Which numbers of flats a search tries, and how well each is fitted."""
    words = torch.nn.Embedding.from_pretrained(table())

    def score(small: torch.nn.Module) -> float:
        return -float((small.get_submodule("words")(torch.arange(240)) - table()).square().sum())

    holder = torch.nn.ModuleDict({"words": words})
    found = kflats.search_flats(holder, MESSI(k=None, restarts=1), score, weights=["words"], keep="40%", quiet=True)
    return [number for k, value in found.scores.items() for number in (k, value)] + [found.k]


def robust(tiny: Path) -> list[float]:
    """One probe of each method; all of them have one version."""
    known = Known({"zipf": torch.linspace(1, 3, 240)})
    names = [name for name in robust_scores.METHODS if not name.startswith("synflow") and "counts" not in name]
    made = [next(approximations(name, table(), [0.41], known)).matrix for name in names]
    return [probes(matrix)[0] for matrix in made]


ALGORITHMS: dict[str, Callable[[Path], list[float]]] = {
    "svd": lambda tiny: fitted(SVD()),
    "messi": lambda tiny: fitted(MESSI(k=3, restarts=3)),
    "messi l1": lambda tiny: fitted(MESSI(k=3, error=Power(1.0), restarts=1)),
    "k-means": lambda tiny: fitted(KMeansSVD(k=3)),
    "flats": default,
    "row-fisher": lambda tiny: by_fisher(RowFisher(), tiny),
    "kronecker": lambda tiny: by_fisher(KroneckerFisher(), tiny),
    "training": training,
    "scores": scores,
    "small networks": small_networks,
    "vgg": vgg,
    "search": search,
    "robust": robust,
}


def test_every_algorithm_is_guarded() -> None:
    assert set(ALGORITHMS) == set(VERSIONS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_gives_what_its_version_gave(name: str, tiny: Path) -> None:
    found = ALGORITHMS[name](tiny)
    if RECORD:
        GOLDEN[name] = {"version": VERSIONS[name], "values": found}
        FILE.write_text(json.dumps(dict(sorted(GOLDEN.items())), indent=1) + "\n", encoding="utf-8")
    recorded = GOLDEN[name]
    assert recorded["version"] == VERSIONS[name], "a new version is recorded by KFLATS_GOLDEN=record"
    largest = max(map(abs, recorded["values"]))
    changed = f"{name} gives other results: raise its version in experiments/_algorithms.py, and record"
    assert found == pytest.approx(recorded["values"], rel=2e-3, abs=2e-3 * largest), changed
