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

import fwsvd_groups
import fwsvd_tasks
import robust_scores
from _algorithms import VERSIONS
from _quick import write_model
from _robust import Known, approximations, row_weights_of
from _small_networks import accuracy, blobs, lenet, vgg19
from _task_models import with_head
from baselines.synflow import encoder_flow

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


def by_way(name: str, tiny: Path) -> list[float]:
    """As ``fwsvd_tasks.py`` compresses a task's model: its way's gradients, and how its layers share the budget."""
    model, way = with_head("sst2", 0, tiny), fwsvd_tasks.WAYS[name]
    report = fwsvd_tasks.compress(model, way, "33% ranks", batches(), way.objective)
    return [*probes_of_layers(model), *(weight.mean_rank / 32 for weight in report.weights)]


def without_labels(name: str, tiny: Path) -> list[float]:
    """As it compresses a generic model."""
    model, unlabelled = with_head("sst2", 0, tiny).base_model, [{"input_ids": b["input_ids"]} for b in batches()]
    fwsvd_tasks.compress(model, fwsvd_tasks.WAYS[name], "33% ranks", unlabelled, fwsvd_tasks.UNLABELLED)
    return probes_of_layers(model)


def probes_of_layers(model: Any) -> list[float]:
    """Of a first and a last layer; allocation by loss may leave them dense."""
    layers = model.base_model.encoder.layer
    places = layers[0].attention.self.value, layers[1].output.dense
    tables = [place.matrix.dense() if hasattr(place, "matrix") else place.weight.T for place in places]
    return [value for one in tables for value in probes(one)]


def left_out(weighted: bool) -> list[float]:
    """Two groups of singular values, and what all of them are, as ``fwsvd_groups.py`` leaves them out."""
    parts, means = fwsvd_groups.groups(table(), torch.linspace(0, 3, 240) if weighted else None)
    return probes(parts[0]) + probes(parts[9]) + means


def training(tiny: Path) -> list[float]:
    model = with_head("sst2", 0, tiny)
    done = recover_(model, batches(), eval_split=None, patience=None, lr=1e-3, epochs=2, batch=16, quiet=True)
    return [epoch.loss for epoch in done.epochs] + probes(model.classifier.weight)


def training_in_bfloat16(tiny: Path) -> list[float]:
    """The share of outputs in bfloat16, losses, and what a layer was changed by.

    Another order of examples changes that by a third, a learning rate a fifth larger by a fifth, and products in
    float32 by a hundredth.
    """
    model, dtypes = with_head("sst2", 0, tiny), list[torch.dtype]()
    layer = model.bert.encoder.layer[0].output.dense
    layer.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    before = probes(layer.weight)
    more = {"lr": 5e-3, "epochs": 2, "batch": 16, "precision": "bfloat16"}
    done = recover_(model, batches(), eval_split=None, patience=None, quiet=True, **more)
    share = dtypes.count(torch.bfloat16) / len(dtypes)
    return [share, *(e.loss for e in done.epochs), *(x - y for x, y in zip(probes(layer.weight), before, strict=True))]


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


def synflow(tiny: Path) -> list[float]:
    """What flows on from each column of a table, and the mask that it gives."""
    flow = encoder_flow(with_head("sst2", 0, tiny).base_model)
    known = Known(column_flow=flow[:16].float())
    kept = next(approximations("synflow bitmap", table(), [0.41], known))
    return [*(flow / flow.max()).tolist(), *probes(kept.matrix / 100)]


def counts(tiny: Path) -> list[float]:
    """What the vocabulary and texts weigh rows by."""
    from kflats.evaluation.outputs import load_tokenizer

    found = row_weights_of(load_tokenizer(tiny), 605, [f"w{i} w{i * i % 600} w{7 * i % 50}" for i in range(200)])
    return [value for name in sorted(found) for value in probes((found[name] / found[name].max())[:, None])]


ALGORITHMS: dict[str, Callable[[Path], list[float]]] = {
    "svd": lambda tiny: fitted(SVD()),
    "messi": lambda tiny: fitted(MESSI(k=3, restarts=3)),
    "messi l1": lambda tiny: fitted(MESSI(k=3, error=Power(1.0), restarts=1)),
    "k-means": lambda tiny: fitted(KMeansSVD(k=3)),
    "flats": default,
    "row-fisher": lambda tiny: by_fisher(RowFisher(), tiny),
    "row-fisher: without labels": lambda tiny: without_labels("FWSVD", tiny),
    "row-fisher: groups": lambda tiny: left_out(True),
    "svd: groups": lambda tiny: left_out(False),
    "kronecker": lambda tiny: by_fisher(KroneckerFisher(), tiny),
    "kronecker: allocation by loss": lambda tiny: by_way(fwsvd_tasks.DEFAULT, tiny),
    "kronecker: gradients of the logits": lambda tiny: by_way("kflats", tiny),
    "kronecker: without labels": lambda tiny: without_labels("kflats", tiny),
    "training": training,
    "training: bfloat16": training_in_bfloat16,
    "scores": scores,
    "small networks": small_networks,
    "vgg": vgg,
    "search": search,
    "robust": robust,
    "robust: synflow": synflow,
    "robust: counts": counts,
}
"""What each algorithm computes, by its name; behind a colon, more that the same version stands for."""
TOLERANCES = {"training: bfloat16": 0.04}
"""As a share of the largest value: processors round bfloat16 products differently. Others have .002."""


def test_every_algorithm_is_guarded() -> None:
    assert {name.split(":")[0] for name in ALGORITHMS} == set(VERSIONS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_gives_what_its_version_gave(name: str, tiny: Path) -> None:
    found, version = ALGORITHMS[name](tiny), VERSIONS[name.split(":")[0]]
    if RECORD:
        GOLDEN[name] = {"version": version, "values": found}
        FILE.write_text(json.dumps(dict(sorted(GOLDEN.items())), indent=1) + "\n", encoding="utf-8")
    recorded = GOLDEN[name]
    assert recorded["version"] == version, "a new version is recorded by KFLATS_GOLDEN=record"
    largest = max(map(abs, recorded["values"]))
    share = TOLERANCES.get(name, 2e-3)
    changed = f"{name} gives other results: raise its version in experiments/_algorithms.py, and record"
    assert found == pytest.approx(recorded["values"], rel=share, abs=share * largest), changed
