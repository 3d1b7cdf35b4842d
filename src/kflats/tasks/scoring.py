"""A model's score on a task, and its costs: parameters, bytes, latency, operations."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.common.token_batches import IGNORED, pad_id, token_limit
from kflats.evaluation.comparing import load_tokenizer, memory_bytes, weight_file_bytes
from kflats.evaluation.encoding import check_finite, device_of, encode, evaluating
from kflats.evaluation.latency import paired, take_turns
from kflats.io import load_model, resolve_model
from kflats.report.analysis import stored_bytes
from kflats.tasks.batches import Feature, collate, feature_batches, features
from kflats.tasks.data import Examples, load_examples
from kflats.tasks.flops import count_flops
from kflats.tasks.metrics import measure, perplexity
from kflats.tasks.scores import Score, TaskReport
from kflats.tasks.task import Task, check_head, find_task, head_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Score", "TaskReport", "evaluate_folder", "score", "score_features"]

_TIMED = 8  # examples of the batch that is timed and counted
_TURNS = 20


def score(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
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
        token             the tag of each word's first token; words beyond ``max_length`` count as "O"
        similarity        the cosine of both texts' mean token vectors
        language          exp of the mean negative log-likelihood in blocks of ``max_length`` tokens, each read alone

    The perplexity of a masked language model is that of 15 % masked tokens, drawn by ``seed``; it is not comparable
    with that of a causal one.

    Args:
        model: a transformers model with the head that the task needs.
        task, task_data, split: as ``kflats.tasks.data.load_examples``.
        batch: examples at once. max_length: tokens per example.
        limit: number of examples, drawn by ``seed``; None: all.
        costs: also time one batch of 8 examples and count its operations.

    Raises:
        KflatsError: as ``load_examples``; a head or tokenizer that does not fit the task; outputs that are not
            finite; a missing package of the extra "tasks".
    """
    if batch < 1:
        raise KflatsError(f"a batch size of {batch} is not supported", hint="batch >= 1")
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
        parameters=_parameters(model),
        size_bytes=stored_bytes(model),
        memory_bytes=memory_bytes(model),
        **(_costs(model, tokenizer, rows) if costs else {}),
    )


def score_features(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
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
    filler = pad_id(tokenizer, model)
    if task.kind == "language":
        total, count = _losses(model, rows, filler, batch)
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
    outputs = _outputs(model, rows, filler, batch)
    if task.kind == "regression":
        predicted = [float(output) for output in outputs]
    elif task.kind == "classification":
        predicted = [int(output[order].argmax()) for output in outputs]
    else:
        predicted = []
        for row, labels, output in zip(rows, true, outputs, strict=True):
            tags = ["O"] * len(labels)  # a word that was cut off belongs to no entity
            labelled = torch.tensor(row.labels) != IGNORED
            for word, best in zip(row.words, output[labelled][:, order].argmax(1).tolist(), strict=True):
                tags[word] = task.labels[best]
            predicted.append(tags)
        true = [[task.labels[label] for label in labels] for labels in true]
    return measure(task.metrics, predicted, true), len(places)


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
    """Load a model folder, and its original where one is given, and score both on a task; see ``score``.

    ``size_bytes`` counts the weight files of the folder. With an original, the latency of both models is measured in
    turns.

    Raises:
        KflatsError: as ``score``; a folder that holds no model or no tokenizer.
    """
    task = find_task(task)
    folders = [resolve_model(os.fspath(f)) for f in (folder, original) if f is not None]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = [load_model(f).to(device) for f in folders]
    tokenizer = load_tokenizer(folders[-1])
    for model in models:
        check_head(model, task)
    scores = [
        replace(
            score(
                model,
                tokenizer,
                task,
                task_data=task_data,
                split=split,
                batch=batch,
                max_length=max_length,
                limit=limit,
                seed=seed,
            ),
            size_bytes=weight_file_bytes(f),
        )
        for model, f in zip(models, folders, strict=True)
    ]
    if len(scores) == 1:
        return TaskReport(scores[0])
    examples = load_examples(task, split, task_data)
    rows = features(examples, tokenizer, max_length, limit=limit, model=models[0], seed=seed)
    runs = [partial(model, **_timed_batch(model, tokenizer, rows)) for model in models]
    with evaluating(*models), torch.inference_mode():
        after, before = take_turns(runs, _TURNS, device_of(models[0]))
    new, old = scores
    timing = paired(before, after, batch=new.batch, tokens=new.tokens)
    return TaskReport(
        replace(new, latency_ms=timing.compressed_ms), replace(old, latency_ms=timing.original_ms), timing
    )


def _outputs(model: nn.Module, rows: Sequence[Feature], filler: int, batch: int) -> list[Tensor]:
    """Logits of every feature on the CPU, in float32: (labels,) or (tokens, labels), without padding."""
    outputs: list[Tensor] = [torch.empty(0)] * len(rows)
    with evaluating(model), torch.inference_mode():
        for places, part in feature_batches(rows, batch):
            inputs = collate(part, filler, device_of(model))
            inputs.pop("labels", None)
            logits = model(**inputs).logits.float().cpu()
            check_finite(logits)
            for i, output in zip(places, logits, strict=True):
                outputs[i] = output[: len(rows[i])] if output.ndim == 2 else output
    return outputs


def _losses(model: nn.Module, rows: Sequence[Feature], filler: int, batch: int) -> tuple[float, int]:
    """Sum of the negative log-likelihoods of all labelled tokens, and how many they are."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    with evaluating(model), torch.inference_mode():
        for _, part in feature_batches(rows, batch):
            inputs = collate(part, filler, device_of(model))
            labels = inputs.pop("labels")
            logits = model(**inputs).logits
            if head_of(model) == "causal":
                logits, labels = logits[:, :-1], labels[:, 1:]
            known = labels != IGNORED
            total += F.cross_entropy(logits[known].float(), labels[known], reduction="sum").cpu()
            count += int(known.sum())
    check_finite(total)
    return float(total), count


def _costs(model: nn.Module, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Feature]) -> dict[str, Any]:
    inputs = _timed_batch(model, tokenizer, rows)
    with evaluating(model), torch.inference_mode():
        (times,) = take_turns([partial(model, **inputs)], _TURNS, device_of(model))
    examples, tokens = inputs["input_ids"].shape
    latency_ms, flops = 1000 * statistics.median(times), count_flops(model, inputs)
    return {"latency_ms": latency_ms, "flops": flops, "batch": examples, "tokens": tokens}


def _timed_batch(model: nn.Module, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Feature]) -> dict[str, Tensor]:
    inputs = collate(rows[:_TIMED], pad_id(tokenizer, model), device_of(model))
    inputs.pop("labels", None)
    return inputs


def _parameters(model: nn.Module) -> int:
    held = {id(t): t for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
    return sum(t.numel() for t in held.values() if t.is_floating_point())
