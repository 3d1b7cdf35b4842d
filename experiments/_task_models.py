"""Models trained on a task, once each, and what is done with them: scored, compressed copies trained again.

A share of the training set is held out by seed; nothing is trained on it, and all that is chosen is chosen there. The
judged split ("dev") chooses nothing.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from _algorithms import versions_of
from _runs import SHARED, Asked, Cell, Log, Run, digest_of, libraries
from _shared_layers import write_shared
from filelock import FileLock
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.common.hashing import sha256, sha256_of_file
from kflats.demo import packaged_model
from kflats.evaluation.outputs import load_tokenizer
from kflats.io import load_model, new_folder
from kflats.io.sources import resolve_model
from kflats.model.weights import Weight, find_weights
from kflats.recover.recover import Recovery, recover_
from kflats.tasks.batches import Examples, collate_features, feature_batches, features, load_examples
from kflats.tasks.scoring import score_features
from kflats.tasks.task import find_task

_BLOCK = re.compile(r"(^|\.)(layer|layers|albert_layers|block|blocks|h)\.\d+\.")
"""In the name of a layer of a transformer block."""
_HEADS = {"token": "TokenClassification", "language": "CausalLM"}


EPOCHS = {"rte": 6, "mrpc": 4, "wnli": 4}
"""Epochs of the originals of tasks with few examples; 3 for all others, as in FWSVD. After 3 epochs of RTE the packaged
MiniLM is still near chance."""
LIMITS = dict.fromkeys(("sst2", "conll2003", "qnli", "qqp", "mnli"), 10_000)
"""Training examples of tasks that have more."""


@dataclass(frozen=True)
class Training:
    """How task models are trained, and compressed ones again.

    FWSVD (section 5.2.2) trains BERT for 3 epochs with Adam at 2e-5 in batches of 32, and again after compression
    with the same settings. At 2e-5 the packaged MiniLM has hardly begun to learn MRPC after 3 epochs; at 1e-4 it has.

    Args:
        epochs, lr, batch, max_length: of the optimisation. split: the training split.
        limit: how many examples at most, drawn by seed 0; 0: all.
        held_out: the share of them that nothing is trained on.
        precision: of products while training, as ``kflats.recover_``; scores are always float32's.
    """

    epochs: int = 3
    lr: float = 1e-4
    batch: int = 32
    max_length: int = 128
    split: str = "train"
    limit: int = 0
    held_out: float = 0.1
    precision: str = "float32"


TRAINING = {"lr": 1e-4, "limit": 0, "train-split": "train", "original-epochs": 0, "precision": "float32"}
"""The options of experiments with task models. ``original-epochs`` 0: 3, or as in ``EPOCHS``; ``limit`` 0: all, or
as in ``LIMITS``."""


def training_of(asked: Asked) -> dict[str, Training]:
    """How each task's model is trained, by the options ``TRAINING``."""
    own = asked.more
    common = Training(lr=own.lr, limit=own.limit, split=own.train_split, precision=own.precision)
    if asked.quick:
        common = replace(common, epochs=5, batch=16, max_length=24)
        return dict.fromkeys(asked.tasks, common)
    return {
        task: replace(common, epochs=own.original_epochs or EPOCHS.get(task, 3), limit=own.limit or LIMITS.get(task, 0))
        for task in asked.tasks
    }


@dataclass(frozen=True)
class TaskData:
    """The examples of a task: for training, held out of it, and judged."""

    training: Examples
    held_out: Examples
    judged: Examples

    @cached_property
    def digest(self) -> str:
        """Of all examples."""
        parts = (json.dumps([e.inputs, e.labels]) for e in (self.training, self.held_out, self.judged))
        return sha256(parts)[:16]

    @property
    def texts(self) -> list[str]:
        """The sentences of the training examples, without labels."""
        words = self.training.task.kind == "token"
        return [" ".join(x) for x in self.training.inputs] if words else [t for x in self.training.inputs for t in x]


def task_data(task: str, training: Training, folder: Path | None) -> TaskData:
    """The examples of a task, from a folder or the hub.

    Raises:
        KflatsError: as ``load_examples``; fewer than ten training examples.
    """
    whole = load_examples(task, training.split, folder)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0)).tolist()
    order = order[: training.limit or len(order)]
    if len(order) < 10:
        raise KflatsError(f"{len(order)} training examples of {task} are too few", hint="at least 10")
    count = max(1, round(training.held_out * len(order)))
    return TaskData(_part(whole, order[count:]), _part(whole, order[:count]), load_examples(task, "dev", folder))


def _part(examples: Examples, places: Sequence[int]) -> Examples:
    places = sorted(places)
    return replace(
        examples,
        inputs=tuple(examples.inputs[i] for i in places),
        labels=tuple(examples.labels[i] for i in places),
    )


@dataclass(frozen=True)
class Source:
    """The generic model that is trained for tasks: its folder, name and digest."""

    folder: Path
    name: str

    @cached_property
    def digest(self) -> str:
        """Of its weights and configuration; of a model that is named also of its tokenizer, which the package of the
        usual one keeps as it is."""
        kinds = ["*.safetensors", "config.json"]
        if self.name not in ("MiniLM", "MiniLM-shared", "tiny", "tiny-shared"):
            kinds += ["*.bin", "tokenizer*", "vocab*", "merges.txt", "*.model"]
        files = sorted({path for kind in kinds for path in self.folder.glob(kind)})
        return sha256([sha256_of_file(file) for file in files])[:16]


def source_of(asked: Asked) -> Source:
    """The folder or hub name that the options name, the packaged MiniLM, or one that shares its blocks."""
    if asked.source is None:
        return Source(Path(packaged_model()), "MiniLM")
    if asked.source == SHARED:
        folder = asked.models / "MiniLM-shared"
        if not folder.is_dir():
            write_shared(Path(packaged_model()), folder)
        return Source(folder, folder.name)
    return Source(Path(resolve_model(asked.source)), Path(asked.source).name)


def with_head(task: str, seed: int, source: Path) -> Any:
    """The model in ``source`` with an untrained head for ``task``, drawn by ``seed``."""
    import transformers

    found = find_task(task)
    names = {"id2label": dict(enumerate(found.labels)), "label2id": {n: i for i, n in enumerate(found.labels)}}
    auto = getattr(transformers, "AutoModelFor" + _HEADS.get(found.kind, "SequenceClassification"))
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it remarks that the head is new, which is what was asked for
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return auto.from_pretrained(source, num_labels=len(found.labels) or 1, **(names if found.labels else {}))
    finally:
        transformers.logging.set_verbosity(verbosity)


class TaskModel:
    """One task's model, trained by one seed: read from the folder of trained models, or trained and kept there.

    Args:
        models: that folder. source, data, training, seed: decide what the model is; a model that others trained is
            its own source, with ``training.epochs`` 0.
    """

    def __init__(self, models: Path, source: Source, data: TaskData, training: Training, seed: int) -> None:
        self.models, self.source, self.data, self.training, self.seed = models, source, data, training, seed
        self.task = data.training.task.name

    @cached_property
    def tokenizer(self) -> Any:
        """The source's."""
        return load_tokenizer(self.source.folder)

    @cached_property
    def model(self) -> Any:
        """The trained model. Do not change it: ``copy`` gives one to change."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.training.epochs == 0:
            return load_model(self.source.folder).to(device)
        decides = {"task": self.task, "training": asdict(self.training), "seed": self.seed, "data": self.data.digest}
        decides |= {"source": self.source.digest, "libraries": libraries(), "algorithms": versions_of(["training"])}
        digest = digest_of(decides)[:12]
        folder = self.models / f"{self.source.name}-{self.task}-{self.seed}-{digest}"
        self.models.mkdir(parents=True, exist_ok=True)
        with FileLock(self.models / f".{folder.name}.lock"):  # another process may train it
            if not folder.is_dir():
                model = with_head(self.task, self.seed, self.source.folder).to(device)
                self.train_(model, self.training.epochs)
                with new_folder(folder) as aside:
                    model.save_pretrained(aside)
                    self.tokenizer.save_pretrained(aside)
        return load_model(folder).to(device)

    def copy(self) -> Any:
        """A copy of the trained model."""
        return copy.deepcopy(self.model)

    @property
    def metric(self) -> str:
        """The task's main metric."""
        return self.data.training.task.metrics[0]

    @cached_property
    def original(self) -> float:
        """The trained model's score on the judged split."""
        return self.score(self.model)

    @cached_property
    def original_held_out(self) -> float:
        """Its score on the held-out part."""
        return self.score(self.model, held_out=True)

    def score(self, model: Any, *, held_out: bool = False) -> float:
        """The main metric on the judged split, or on the held-out part of the training set; higher is better."""
        examples = self.data.held_out if held_out else self.data.judged
        length = self.training.max_length
        rows = features(examples, self.tokenizer, length, model=model)
        return score_features(model, self.tokenizer, examples, rows, 64, length)[0][self.metric]

    def batches(self, model: Any, limit: int | None = None, batch: int = 64) -> list[dict[str, Tensor]]:
        """Training examples with labels, as ``model`` numbers them; ``limit`` of them are drawn by the seed."""
        length = self.training.max_length
        rows = features(self.data.training, self.tokenizer, length, limit=limit, model=model, seed=self.seed)
        padding_id = self.tokenizer.pad_token_id or 0
        return [collate_features(part, padding_id) for _, part in feature_batches(rows, batch)]

    def train_(self, model: Any, epochs: int, train: str = "all") -> Recovery:
        """Train ``model`` in place on the training part; the last epoch is kept."""
        return recover_(
            model,
            self.batches(model),
            tokenizer=self.tokenizer,
            eval_split=None,
            patience=None,
            train=train,
            lr=self.training.lr,
            batch=self.training.batch,
            epochs=epochs,
            seed=self.seed,
            precision=self.training.precision,
            quiet=True,
        )


class TaskExperiment:
    """What experiments with task models have in common: their models, places in tables, and runs of the log.

    Args:
        name: of the log. asked: the options; those of ``TRAINING`` are among them.
    """

    name: str

    def __init__(self, asked: Asked) -> None:
        self.asked, self.own, self.source = asked, asked.more, source_of(asked)
        self.training = training_of(asked)
        for task in asked.tasks:
            if find_task(task).kind == "language":
                raise KflatsError(f"{task} is not supported: it has no labels", hint="cola, mrpc, rte or stsb")

    @property
    def page(self) -> str:
        """The name of page and pictures: that of the log, of the model if it is another than the usual one, and of the
        tasks if there are others than the usual ones."""
        model = () if self.source.name in ("MiniLM", "tiny") else (self.source.name,)
        return "_".join([self.name, *model, *(sorted(self.asked.tasks) if self.asked.other_tasks else ())])

    def model(self, task: str, seed: int) -> TaskModel:
        """Trained when it is first used."""
        training = self.training[task]
        return TaskModel(
            self.asked.models, self.source, task_data(task, training, self.asked.task_data), training, seed
        )

    def models(self) -> Iterator[TaskModel]:
        """Task by task, seed by seed."""
        for task, seed in itertools.product(self.asked.tasks, self.asked.seeds):
            yield self.model(task, seed)

    def place(
        self,
        model: TaskModel,
        method: str,
        size: str,
        epochs: int,
        recipe: Mapping[str, Any],
        algorithms: tuple[str, ...],
    ) -> Cell:
        """A cell; ``algorithms`` besides those of training and scores."""
        return Cell(
            task=model.task,
            model=self.source.name,
            method=method,
            size=size,
            seed=model.seed,
            epochs=epochs,
            training=asdict(model.training),
            recipe=recipe,
            algorithms=("scores", "training", *algorithms),
            data=f"{model.data.digest} {self.source.digest}",
        )

    def runs_of(self, log: Log, chosen: Callable[[Run], bool]) -> list[Run]:
        """Those of this model and training that are ``chosen``."""
        training = {task: asdict(one) for task, one in self.training.items()}
        return log.newest(
            lambda run: run.model == self.source.name and run.training == training.get(run.task) and chosen(run)
        )


def block_weights(model: Any) -> list[Weight]:
    """The linear layers inside a model's transformer blocks: what FWSVD compresses. Pooler, head and tables are not.

    Raises:
        KflatsError: the model has none.
    """
    found = [w for w in find_weights(model) if w.places[0].role in ("linear", "conv1d") and _BLOCK.search(w.name)]
    if not found:
        raise KflatsError(f"{type(model).__name__} has no linear layers in blocks", hint="kflats inspect MODEL")
    return found
