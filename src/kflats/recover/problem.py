"""What a training minimises: the loss, over which parameters of a model, on which examples, by which schedule."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError, is_number, is_whole
from kflats.common.hashing import sha256
from kflats.common.texts import IGNORED, Tokenizer, pad_id
from kflats.evaluation.running import (
    Batch,
    ModelOutput,
    by_position,
    decoder_mask,
    device_of,
    entry,
    evaluating,
    explained,
    pooled,
    run,
    task_output,
)
from kflats.matrices.coded import CodedMatrix
from kflats.model.weights import factored_layers
from kflats.tasks.batches import Examples, Feature, collate_features, feature_batches, uncollate
from kflats.tasks.scoring import score_features
from kflats.tasks.task import head_of


@dataclass(frozen=True)
class TrainingObjective:
    """The loss of one batch:  labels_weight * task loss + (1 - labels_weight) * distance to the teacher.

    The distance, T the temperature:

        classes, words, tokens    T^2 KL(softmax(teacher / T) || softmax(student / T)), mean over examples,
                                  or over attended tokens; words without a label are left out
        regression                (student - teacher)^2
        no head                   1 - cos of both mean token vectors, or of the model's own sentence embeddings

    T^2 keeps the gradient's size as T grows (Hinton, Vinyals & Dean 2015, section 2.1).

    Args:
        teacher: the original model; None: the task's loss alone.
        temperature: > 0; above 1 the less likely classes count more.
        labels_weight: 0 to 1; for batches without labels it is 0.

    Raises:
        KflatsError: a temperature or weight out of range.
    """

    teacher: nn.Module | None = None
    temperature: float = 2.0
    labels_weight: float = 0.5

    def __post_init__(self) -> None:
        if not (0 < self.temperature < float("inf")) or not 0 <= self.labels_weight <= 1:
            raise KflatsError(
                f"temperature={self.temperature}, labels_weight={self.labels_weight} is out of range",
                hint="a temperature above 0, a labels_weight from 0 to 1",
            )

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """A scalar with a gradient. The teacher runs in eval mode, without gradients.

        Raises:
            KflatsError: neither labels nor a teacher, outputs of different shapes, or a model that these inputs do
                not suffice for.
        """
        labelled = "labels" in batch and head_of(model) != ""
        if not labelled and self.teacher is None:
            raise KflatsError("there are neither labels nor a teacher to train on", hint="teacher=ORIGINAL")
        inputs = dict(batch) if labelled else {k: v for k, v in batch.items() if k != "labels"}
        with explained(model, _OTHER_INPUTS):
            outputs: ModelOutput = model(**inputs) if labelled else run(model, inputs)
        if labelled and bool((batch["labels"] == IGNORED).all()):
            return 0.0 * _logits(model, outputs).sum()  # the mean over zero words would be NaN
        if self.teacher is None:
            return _task_loss(outputs)
        # FSMT writes into its inputs, which the gradients of ``model`` still need.
        own = {name: values.clone() for name, values in batch.items()}
        with torch.no_grad(), explained(self.teacher, _OTHER_INPUTS):
            target = run(self.teacher, own)  # labels serve only to feed a decoder
        soft = distance(model, outputs, target, batch, self.temperature)
        if not labelled or self.labels_weight == 0:
            return soft
        return self.labels_weight * _task_loss(outputs) + (1 - self.labels_weight) * soft


_OTHER_INPUTS = "a model that reads texts alone, such as the text encoder of this one"


def distance(model: nn.Module, outputs: ModelOutput, target: ModelOutput, batch: Batch, temperature: float) -> Tensor:
    """The distance of ``outputs`` of ``model`` from a teacher's ``target`` on one batch; see ``TrainingObjective``.

    Raises:
        KflatsError: outputs of different shapes, or neither logits nor hidden states.
    """
    if task_output(outputs) is None:
        ours, theirs = (pooled(model, batch, one).float() for one in (outputs, target))
        _check_equal(ours, theirs)
        return (1 - F.cosine_similarity(ours, theirs, dim=-1)).mean()
    ours, theirs = (by_position(_logits(model, one).float(), batch) for one in (outputs, target))
    _check_equal(ours, theirs)
    if ours.ndim == 2 and ours.shape[-1] == 1:
        return F.mse_loss(ours, theirs)
    if ours.ndim == 3:
        chosen = decoder_mask(model, batch, ours).bool()
        labels = batch.get("labels")
        if head_of(model) == "token" and isinstance(labels, Tensor):
            chosen = chosen & (labels != IGNORED)
        ours, theirs = ours[chosen], theirs[chosen]
    ours, theirs = ((x / temperature).log_softmax(-1) for x in (ours, theirs))
    return temperature**2 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)


def _logits(model: nn.Module, output: ModelOutput) -> Tensor:
    logits = task_output(output)
    if logits is None:
        raise KflatsError(f"{type(model).__name__} gives no logits", hint="a teacher of the same architecture")
    return logits


def _task_loss(outputs: ModelOutput) -> Tensor:
    loss = entry(outputs, "loss")
    if not isinstance(loss, Tensor):
        raise KflatsError(
            "the model gives no loss for its labels",
            hint="a model with a task head, or batches without labels and a teacher",
        )
    return loss


def _check_equal(ours: Tensor, theirs: Tensor) -> None:
    if ours.shape != theirs.shape:
        raise KflatsError(
            f"the teacher's outputs are {tuple(theirs.shape)}, the model's {tuple(ours.shape)}",
            cause="the teacher has another head or another vocabulary",
            hint="as teacher the model that was compressed",
        )


PRECISIONS = ("float32", "bfloat16")
CHOICES = ("all", "bases", "coordinates", "factors")


@contextmanager
def only(model: nn.Module, train: str) -> Iterator[list[nn.Parameter]]:
    """Inside, only the chosen parameters have ``requires_grad``; afterwards every flag is as it was before.

    Args:
        train: "bases" (the second factor of every factored layer), "coordinates" (the first), "factors"
            (both), or "all": every parameter that asks for gradients now.

    Yields:
        The parameters that train.

    Raises:
        KflatsError: no factored layer for factors to train, codes for bases to train, or nothing left to train.

    >>> model = nn.Linear(2, 3)
    >>> with only(model, "all") as chosen:
    ...     len(chosen)
    2
    """
    before = [(p, p.requires_grad) for p in model.parameters()]
    if train == "all":
        chosen = [p for p, wanted in before if wanted]
    else:
        names = {"bases": ("basis",), "coordinates": ("weight",), "factors": ("weight", "basis")}[train]
        matrices = [layer.matrix for _, layer in factored_layers(model) if layer.owns_matrix]
        if not matrices:
            raise KflatsError(
                f"the model has no factored layer of which {train} could train",
                hint='compress it first, or train="all"',
            )
        chosen = [p for matrix in matrices for name, p in matrix.named_parameters() if name in names]
        if not chosen and all(isinstance(matrix, CodedMatrix) for matrix in matrices):
            raise KflatsError(
                f"the model's codes have no {train} that could train",
                cause="it is stored as integers by a codec; only their scales and levels can be trained",
                hint='train="all"',
            )
    if not sum(p.numel() for p in chosen):
        raise KflatsError("nothing is left to train", cause="every parameter was frozen (requires_grad=False)")
    try:
        for p, _ in before:
            p.requires_grad_(False)
        for p in chosen:
            p.requires_grad_(True)
        yield chosen
    finally:
        for p, wanted in before:
            p.requires_grad_(wanted)
            p.grad = None


@contextmanager
def unchanged_on_failure(parameters: list[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Yields copies of ``parameters``; after an exception the parameters have these values again."""
    start = [p.detach().clone() for p in parameters]
    try:
        yield start
    except BaseException:
        put_back(parameters, start)
        raise


def put_back(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    """Set every parameter to its value."""
    with torch.no_grad():
        for p, value in zip(parameters, values, strict=True):
            p.copy_(value)


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Afterwards the global random states of Python, numpy and torch are as they were before."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


_EVALUATION_BATCH = 32
TaskRows: TypeAlias = tuple[Examples, Sequence[Feature]]
"""The examples of a split of a task, and their token ids."""


@dataclass(frozen=True)
class Schedule:
    """Settings of the optimisation; the defaults are those of FWSVD (Hsu et al., ICLR 2022, section 4.2).

    Args:
        train: the parameters that train, see ``kflats.recover.problem.only``.
        lr: Adam's first step size; it falls linearly to 0.
        batch: number of examples in a step.
        epochs: the largest number of epochs.
        patience: number of epochs without a better value after which training stops; None: all epochs run.
        seed: seed of the order of examples and of dropout.
        precision: of products, forward and backward, "float32" or "bfloat16" (``torch.autocast``). Parameters, Adam's
            moments and evaluations stay float32. bfloat16 is faster on some processors, slower on others.

    Raises:
        KflatsError: a value out of range.

    >>> Schedule().lr
    2e-05
    """

    train: str = "all"
    lr: float = 2e-5
    batch: int = 32
    epochs: int = 3
    patience: int | None = 2
    seed: int = 0
    precision: str = "float32"

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise KflatsError(f"precision={self.precision!r} is not known", hint=f"one of: {', '.join(PRECISIONS)}")
        if self.train not in CHOICES:
            raise KflatsError(f"train={self.train!r} is not known", hint=f"one of: {', '.join(CHOICES)}")
        if not (is_number(self.lr, 0) and self.lr > 0):
            raise KflatsError(f"a learning rate of {self.lr!r} does not train", hint="for example 2e-5")
        for name in ("batch", "epochs", "patience"):
            value = getattr(self, name)
            if not (is_whole(value, 1) or (name == "patience" and value is None)):
                raise KflatsError(f"{name}={value!r} is not supported", hint="a whole number from 1 on")
        if not is_whole(self.seed, 0, 2**31 - 1):
            raise KflatsError(f"seed={self.seed!r} is not supported", hint="a whole number from 0 to 2147483647")


@dataclass(frozen=True)
class TrainingData:
    """Training examples, and the evaluation after each epoch.

    Args:
        name, split, eval_split: the task and its splits; "batches" and "other batches" of prepared batches;
            ``eval_split`` is "" without an evaluation.
        rows: the training examples. padding_id: the id that pads them.
        metric: the name of the value that ``evaluate`` gives. higher_is_better: its direction.
        evaluate: model -> value; None: the last epoch is kept.
    """

    name: str
    split: str
    eval_split: str
    rows: tuple[Feature, ...]
    padding_id: int
    metric: str
    higher_is_better: bool
    evaluate: Callable[[nn.Module], float] | None

    def batch(self, rows: Sequence[Feature]) -> dict[str, Tensor]:
        """One batch of ``rows``, for the data loader."""
        return collate_features(rows, self.padding_id)

    @property
    def digest(self) -> str:
        """Digest of the examples: a run resumes only with the examples it began with."""
        return sha256(json.dumps([row.inputs, row.labels]) for row in self.rows)


def task_training_data(
    model: nn.Module, tokenizer: Tokenizer, learnt: TaskRows, judged: TaskRows | None, max_length: int
) -> TrainingData:
    """The rows of a task's split, evaluated on those of another split by the task's main metric."""
    examples, rows = learnt
    task, metric = examples.task, examples.task.metrics[0]
    evaluate = None
    if judged is not None:
        others, eval_rows = judged

        def evaluate(candidate: nn.Module) -> float:
            return score_features(candidate, tokenizer, others, eval_rows, _EVALUATION_BATCH, max_length)[0][metric]

    about = metric, task.higher_is_better, evaluate
    eval_split = "" if judged is None else judged[0].split
    return TrainingData(task.name, examples.split, eval_split, tuple(rows), pad_id(tokenizer, model), *about)


def batch_training_data(
    model: nn.Module,
    batches: Sequence[Batch],
    eval_batches: Sequence[Batch] | None,
    tokenizer: Tokenizer | None,
    objective: TrainingObjective,
) -> TrainingData:
    """The examples of prepared batches, evaluated by the mean of ``objective`` over other batches; lower is better.

    Raises:
        KflatsError: no batches, or something else than dicts of tensors.
    """
    padding_id = pad_id(tokenizer, model)
    evaluate = None
    if eval_batches is not None:
        eval_rows = uncollate(eval_batches)

        def evaluate(candidate: nn.Module) -> float:
            total, device = 0.0, device_of(candidate)
            with evaluating(candidate), torch.no_grad():
                for _, part in feature_batches(eval_rows, _EVALUATION_BATCH):
                    total += len(part) * float(objective(candidate, collate_features(part, padding_id, device)))
            return total / len(eval_rows)

    rows = tuple(uncollate(batches))
    eval_split = "" if eval_batches is None else "other batches"
    return TrainingData("batches", "batches", eval_split, rows, padding_id, "loss", False, evaluate)
