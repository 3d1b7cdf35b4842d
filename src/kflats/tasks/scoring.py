"""Scores and costs of a model on a task: metrics, parameters, bytes, latency, operations.

Metrics are those of GLUE, CoNLL and the tables of FWSVD. scikit-learn, SciPy and seqeval compute them (``pip install
'kflats[tasks]'``). A metric that is undefined is 0, not NaN: a model with equal predictions for all examples scores 0.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kflats.common.errors import KflatsError
from kflats.common.formatting import number, plain, share, size, table, visible
from kflats.common.release import needed
from kflats.common.texts import IGNORED, Tokenizer, pad_id, token_limit
from kflats.evaluation.latency import Latency, take_turns
from kflats.evaluation.outputs import load_tokenizer, memory_bytes, weight_file_bytes
from kflats.evaluation.running import Batch, check_finite, device_of, encode, evaluating
from kflats.io import load_model, resolve_model
from kflats.io.static import StaticModel
from kflats.report.report import stored_bytes, stored_tensors
from kflats.tasks.batches import Examples, Feature, collate_features, feature_batches, features, load_examples
from kflats.tasks.task import Task, check_head, find_task


def accuracy(predicted: Sequence[int], true: Sequence[int]) -> float:
    """Share of equal labels.

    >>> accuracy([1, 0, 1], [1, 1, 1]) == 2 / 3
    True
    """
    return float(np.mean(np.asarray(predicted) == np.asarray(true)))


def f1(predicted: Sequence[int], true: Sequence[int]) -> float:
    """F1 of class 1, 2 P R / (P + R): MRPC and QQP. 0 if class 1 is never predicted."""
    return float(_library("sklearn.metrics").f1_score(true, predicted, zero_division=0.0))


def matthews(predicted: Sequence[int], true: Sequence[int]) -> float:
    """Matthews' correlation: CoLA. 0 if all predictions, or all labels, are one class."""
    return float(_library("sklearn.metrics").matthews_corrcoef(true, predicted))


def pearson(predicted: Sequence[float], true: Sequence[float]) -> float:
    """Pearson's correlation; 0 if either side is constant."""
    return _correlation("pearsonr", predicted, true)


def spearman(predicted: Sequence[float], true: Sequence[float]) -> float:
    """Spearman's rank correlation, with mean ranks for ties; 0 if either side is constant."""
    return _correlation("spearmanr", predicted, true)


def pearson_spearman(predicted: Sequence[float], true: Sequence[float]) -> float:
    """Mean of Pearson's and Spearman's correlation, as GLUE and FWSVD report it for STS-B."""
    return (pearson(predicted, true) + spearman(predicted, true)) / 2


def entity_f1(predicted: Sequence[Sequence[str]], true: Sequence[Sequence[str]]) -> float:
    """F1 over whole entities (micro average, span and kind must both agree), by seqeval: CoNLL-2003."""
    metrics = _library("seqeval.metrics")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # seqeval warns of the tag sequences of untrained models
        return float(metrics.f1_score([list(t) for t in true], [list(p) for p in predicted], zero_division=0))


def perplexity(total_loss: float, predictions: int) -> float:
    """exp of the mean negative log-likelihood of the predicted tokens; infinite if it exceeds the range of a float.

    >>> round(perplexity(2 * math.log(8), 2), 6)
    8.0
    """
    if predictions < 1:
        raise KflatsError("there is no token to predict", cause="texts of one token each")
    mean = total_loss / predictions
    return math.exp(mean) if mean < 700 else math.inf


METRICS: dict[str, Callable[[Any, Any], float]] = {
    metric.__name__: metric for metric in (accuracy, f1, matthews, pearson, spearman, pearson_spearman, entity_f1)
}
"""Metrics by name, each (predicted, true) -> float, higher is better. ``perplexity`` needs sums of losses instead."""


def measure(
    names: Sequence[str],
    predicted: Sequence[float] | Sequence[Sequence[str]],
    true: Sequence[float] | Sequence[Sequence[str]],
) -> dict[str, float]:
    """Every named metric of the same predictions.

    Raises:
        KflatsError: nothing to score, another number of labels, predictions that are not finite, or a
            package that is not installed.

    >>> measure(["accuracy"], [1, 0], [1, 1])
    {'accuracy': 0.5}
    """
    if len(true) == 0 or len(predicted) != len(true):
        raise KflatsError(
            f"{len(predicted)} predictions cannot be scored against {len(true)} labels",
            cause="each label needs one prediction",
        )
    if unknown := [name for name in names if name not in METRICS]:
        raise KflatsError(f"there is no metric {unknown[0]!r}", hint=f"one of: {', '.join(METRICS)}")
    if not isinstance(predicted[0], Sequence) and not np.isfinite(np.asarray(predicted, dtype=np.float64)).all():
        raise KflatsError("the model's outputs are not finite", cause="overflow in float16, or damaged weights")
    return {name: METRICS[name](predicted, true) for name in names}


def _correlation(name: str, predicted: Sequence[float], true: Sequence[float]) -> float:
    a, b = np.asarray(predicted, dtype=np.float64), np.asarray(true, dtype=np.float64)
    # Equal up to rounding counts as constant: a correlation of rounding errors means nothing.
    if len(a) < 2 or any(np.ptp(side) <= 1e-9 * max(1.0, float(np.abs(side).max())) for side in (a, b)):
        return 0.0
    return float(getattr(_library("scipy.stats"), name)(a, b).statistic)


def _library(name: str) -> ModuleType:
    return needed(name, "kflats[tasks]", "scoring tasks")


_TIMED = 8  # examples of the batch that is timed and counted
_TURNS = 20


@dataclass(frozen=True)
class Score:
    """The score of a model on one split of a task, and the costs of the model.

    Args:
        task, split, source: the examples of the score.
        metric, value: the task's main metric; ``values`` holds all metrics, the main one first.
        n: number of examples; for language tasks of predicted tokens.
        full: number of examples with ``max_length`` tokens: most of them were cut.
        parameters: stored floating-point numbers; integers of codes are not counted.
        size_bytes: bytes of a file with the model's weights. memory_bytes: bytes of its parameters and buffers.
        latency_ms: median time of one batch of ``batch`` examples with ``tokens`` tokens; None: not measured.
        flops: floating-point operations of that batch (``count_flops``); None: not counted.
    """

    task: str
    split: str
    source: str
    metric: str
    value: float
    values: tuple[tuple[str, float], ...]
    n: int
    full: int
    parameters: int
    size_bytes: int
    memory_bytes: int
    latency_ms: float | None = None
    flops: int | None = None
    batch: int = 0
    tokens: int = 0

    def __str__(self) -> str:
        return str(TaskReport(self))


@dataclass(frozen=True)
class TaskReport:
    """One model's score, or two side by side; printing it gives a table."""

    compressed: Score
    original: Score | None = None
    latency: Latency | None = None

    def __str__(self) -> str:
        scores = [s for s in (self.original, self.compressed) if s is not None]
        first = scores[0]
        rows = [_row(n, [dict(s.values)[n] for s in scores], "{:.4f}".format, score=True) for n, _ in first.values]
        judged = "tokens scored" if first.metric == "perplexity" else "examples scored"
        rows.append([judged, *(f"{s.n:,}" for s in scores), ""][: 2 * len(scores)])
        if first.full:
            rows.append(["of them as long as the limit", *(f"{s.full:,}" for s in scores), ""][: 2 * len(scores)])
        rows.append(_row("stored floating-point numbers", [s.parameters for s in scores], "{:,}".format))
        rows.append(_row("weight files", [s.size_bytes for s in scores], size))
        rows.append(_row("weights in memory", [s.memory_bytes for s in scores], size))
        if all(s.flops is not None and s.latency_ms is not None for s in scores):
            rows.append(_row("one batch, median", [s.latency_ms or 0.0 for s in scores], "{:.1f} ms".format))
            rows.append(_row("operations of it", [(s.flops or 0) / 1e9 for s in scores], "{:.4g} GFLOP".format))
        names = ["original", "compressed", "compared"] if len(scores) == 2 else ["model"]
        parts = [f"task {first.task}, {first.split} of {visible(first.source)}", "", plain(table(["", *names], rows))]
        if first.batch:
            parts += ["", f"one batch: {first.batch} examples of up to {first.tokens} tokens"]
        if self.latency is not None:
            t = self.latency
            parts[-1] += f"; median ratio {number(t.ratio)}, 95 % interval {number(t.low)} to {number(t.high)}"
        return "\n".join(parts)


def score(
    model: nn.Module,
    tokenizer: Tokenizer,
    task: str | Task,
    *,
    task_data: str | os.PathLike[str] | None = None,
    split: str = "dev",
    batch: int = 32,
    max_length: int = 128,
    limit: int | None = None,
    seed: int = 0,
    costs: bool = True,
) -> Score:
    """Score ``model`` on one split of a task.

        classification    the class of the largest logit
        regression        the output
        token             the tag of each word's first token; words beyond ``max_length`` have the tag "O"
        similarity        the cosine of both texts' mean token vectors
        language          exp of the mean negative log-likelihood in blocks of ``max_length`` tokens, each read alone

    Args:
        model: a transformers model with the head that the task needs.
        task, task_data, split: as ``kflats.tasks.batches.load_examples``.
        batch: examples at once. max_length: tokens per example.
        limit: number of examples, drawn by ``seed``; None: all.
        costs: also time one batch of 8 examples and count its operations.

    Raises:
        KflatsError: as ``task_batches``; a head or tokenizer that does not fit the task; outputs that are not
            finite; a missing package of the extra "tasks".
    """
    examples = load_examples(task, split, task_data)
    rows = features(examples, tokenizer, max_length, limit=limit, model=model, seed=seed)
    values, n = score_features(model, tokenizer, examples, rows, batch, max_length)
    scored = examples.task
    longest = token_limit(tokenizer, max_length, model)
    return Score(
        task=scored.name,
        split=examples.split,
        source=examples.source,
        metric=scored.metrics[0],
        value=values[scored.metrics[0]],
        values=tuple(values.items()),
        n=n,
        full=0 if scored.kind == "language" else len({row.place for row in rows if len(row) >= longest}),
        parameters=sum(t.numel() for t in stored_tensors(model) if t.is_floating_point()),
        size_bytes=stored_bytes(model),
        memory_bytes=memory_bytes(model),
        **(_costs([model], tokenizer, rows)[1][0] if costs and not isinstance(model, StaticModel) else {}),
    )


def score_features(
    model: nn.Module,
    tokenizer: Tokenizer,
    examples: Examples,
    rows: Sequence[Feature],
    batch: int = 32,
    max_length: int = 128,
) -> tuple[dict[str, float], int]:
    """Every metric of the task on ``rows``, features of ``examples``; and how many examples or tokens were scored.

    Raises:
        KflatsError: outputs that are not finite, or a missing package.
    """
    task = examples.task
    padding_id = pad_id(tokenizer, model)
    if task.kind == "language":
        total, count = _losses(model, rows, padding_id, batch)
        return {"perplexity": perplexity(total, count)}, count
    places = list(dict.fromkeys(row.place for row in rows))
    true = [examples.labels[i] for i in places]
    predicted: Any
    if task.kind == "similarity":
        first, second = (
            encode(model, tokenizer, [examples.inputs[i][side] for i in places], batch, max_tokens=max_length)
            for side in (0, 1)
        )
        return measure(task.metrics, (first * second).sum(1).tolist(), true), len(places)
    order = torch.tensor(check_head(model, task))
    outputs = _outputs(model, rows, padding_id, batch)
    if task.kind == "regression":
        predicted = [float(output) for output in outputs]
    elif task.kind == "classification":
        predicted = [int(output[order].argmax()) for output in outputs]
    else:
        predicted = []
        for row, labels, output in zip(rows, true, outputs, strict=True):
            tags = ["O"] * len(labels)  # words beyond the limit belong to no entity
            labelled = torch.tensor(row.labels) != IGNORED
            for word, best in zip(row.words, output[labelled][:, order].argmax(1).tolist(), strict=True):
                tags[word] = task.labels[best]
            predicted.append(tags)
        true = [[task.labels[label] for label in labels] for labels in true]
    return measure(task.metrics, predicted, true), len(places)


def count_flops(model: nn.Module, inputs: Batch) -> int:
    """The floating-point operations of one ``model(**inputs)`` in eval mode, by torch's own counter.

    A multiplication and the addition after it are 2 operations: a dense (n, d) layer takes 2 n d for each position, a
    pair of rank r 2 r (n + d). Matrix products and convolutions are counted, attention as its plain products even
    if a fused kernel would run. Element-wise work (biases, normalisation, activations) and lookups are not counted.

    >>> count_flops(nn.Linear(4, 3), {"input": torch.ones(5, 4)}) == 2 * 5 * 4 * 3
    True
    """
    counter = FlopCounterMode(display=False)
    # torch's counter has no formula for fused attention on a CPU, and would count nothing for it.
    with evaluating(model), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(**inputs)
    total: int = counter.get_total_flops()
    return total


def evaluate_folder(
    folder: str | os.PathLike[str],
    task: str | Task,
    *,
    original: str | os.PathLike[str] | None = None,
    task_data: str | os.PathLike[str] | None = None,
    split: str = "dev",
    batch: int = 32,
    max_length: int = 128,
    limit: int | None = None,
    seed: int = 0,
) -> TaskReport:
    """Load a model folder, and the folder ``original`` if there is one, and score both on a task; see ``score``.

    ``size_bytes`` counts the weight files of the folder. With an original, the latency of both models is measured in
    turns. Static models are not timed, and no operations are counted of them.

    Raises:
        KflatsError: as ``score``; a folder that holds no model or no tokenizer.
    """
    task = find_task(task)
    folders = [resolve_model(os.fspath(f)) for f in (original, folder) if f is not None]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = [load_model(f).to(device) for f in folders]
    tokenizer = load_tokenizer(folders[0])
    for model in models:
        check_head(model, task)
    options: dict[str, Any] = {"max_length": max_length, "limit": limit, "seed": seed}
    rows = features(load_examples(task, split, task_data), tokenizer, model=models[0], **options)
    timed, costs = list[Latency](), list[dict[str, Any]]([{}] * len(models))
    if not isinstance(models[0], StaticModel):  # no network runs: times would be those of the tokenizer
        timed, costs = _costs(models, tokenizer, rows)
    options |= {"task_data": task_data, "split": split, "batch": batch, "costs": False}
    scores = [
        replace(score(model, tokenizer, task, **options), size_bytes=weight_file_bytes(f), **cost)
        for model, f, cost in zip(models, folders, costs, strict=True)
    ]
    return TaskReport(scores[0]) if original is None else TaskReport(scores[1], scores[0], timed[1] if timed else None)


def _outputs(model: nn.Module, rows: Sequence[Feature], padding_id: int, batch: int) -> list[Tensor]:
    """Logits of every feature on the CPU, in float32: (labels,) or (tokens, labels), without padding."""
    outputs: list[Tensor] = [torch.empty(0)] * len(rows)
    with evaluating(model), torch.inference_mode():
        for places, part in feature_batches(rows, batch):
            inputs = collate_features(part, padding_id, device_of(model))
            inputs.pop("labels", None)
            logits = model(**inputs).logits.float().cpu()
            check_finite(logits)
            for i, output in zip(places, logits, strict=True):
                outputs[i] = output[: len(rows[i])] if output.ndim == 2 else output
    return outputs


def _losses(model: nn.Module, rows: Sequence[Feature], padding_id: int, batch: int) -> tuple[float, int]:
    """The sum of the negative log-likelihoods of all labelled tokens, and the number of these tokens."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    with evaluating(model), torch.inference_mode():
        for _, part in feature_batches(rows, batch):
            inputs = collate_features(part, padding_id, device_of(model))
            labels = inputs.pop("labels")
            logits, labels = model(**inputs).logits[:, :-1], labels[:, 1:]
            known = labels != IGNORED
            total += F.cross_entropy(logits[known].float(), labels[known], reduction="sum").cpu()
            count += int(known.sum())
    check_finite(total)
    return float(total), count


def _costs(
    models: Sequence[nn.Module], tokenizer: Tokenizer, rows: Sequence[Feature]
) -> tuple[list[Latency], list[dict[str, Any]]]:
    """The latencies of models that run one batch in turns, and of each model what the batch takes."""
    padding_id, device = pad_id(tokenizer, models[0]), device_of(models[0])
    # Of middle length, and the longest of them in every batch: all batches have one shape.
    some = min(len(rows), _TIMED * _TURNS)
    first = (len(rows) - some) // 2
    *others, longest = sorted(rows, key=len)[first : first + some]

    def drawn(number: int) -> dict[str, Tensor]:
        """Examples of one turn; others in each, because lookups keep rows of tokens that were read."""
        places = torch.randperm(len(others), generator=torch.Generator().manual_seed(number))[: _TIMED - 1].tolist()
        batch = collate_features([*(others[place] for place in places), longest], padding_id, device)
        batch.pop("labels", None)
        return batch

    turn = [drawn(0)]

    def next_turn(number: int) -> None:
        turn[0] = drawn(number)

    inputs = turn[0]
    examples, tokens = inputs["input_ids"].shape
    with evaluating(*models), torch.inference_mode():
        runs = {str(place): partial(_called, model, turn) for place, model in enumerate(models)}
        timed = take_turns(runs, _TURNS, (examples, tokens), device, prepare=next_turn)
    flops = [count_flops(model, inputs) for model in models]
    shape = {"batch": examples, "tokens": tokens}
    return timed, [{"latency_ms": t.ms, "flops": n, **shape} for t, n in zip(timed, flops, strict=True)]


def _called(model: nn.Module, turn: Sequence[Mapping[str, Tensor]]) -> object:
    return model(**turn[0])


def _row(label: str, values: Sequence[float], shown: Callable[[float], str], *, score: bool = False) -> list[str]:
    """One line of the table: the values, and of two values their difference or ratio."""
    row = [label, *(shown(value) for value in values)]
    if len(values) == 2:
        row.append(f"{values[1] - values[0]:+.4f}" if score else share(values[1], values[0]))
    return row
