"""A model's score on a task, with what it costs beside it: parameters, bytes, latency, operations."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.evaluation.comparing import load_tokenizer, memory_bytes, weight_file_bytes
from kflats.evaluation.encoding import encode, evaluating
from kflats.evaluation.latency import paired, take_turns
from kflats.io import load_model, resolve_model
from kflats.report.analysis import stored_bytes
from kflats.tasks.batches import IGNORED, Feature, by_length, collate, features, length_limit, padding_id
from kflats.tasks.data import Examples, load_examples
from kflats.tasks.flops import count_flops
from kflats.tasks.metrics import measure, perplexity
from kflats.tasks.scores import Score, TaskReport
from kflats.tasks.task import Task, check_head, find_task, head_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Score", "TaskReport", "evaluate_folder", "judge", "score"]

_TIMED = 8  # examples of the batch that is timed and counted
_TURNS = 20


def score(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    task: str | Task,
    *,
    data: str | os.PathLike[str] | None = None,
    split: str = "dev",
    batch: int = 32,
    max_length: int = 128,
    limit: int | None = None,
    seed: int = 0,
    costs: bool = True,
) -> Score:
    """Judge ``model`` on one split of a task.

    Classes by the largest logit, regressions by the output, words by their first token (words beyond
    ``max_length`` count as "O"), "sts" by the cosine of mean token vectors, language by exp of the mean
    negative log-likelihood in blocks of ``max_length`` tokens, each read without what came before it (of a
    masked language model: over 15 % masked tokens, drawn by ``seed``; not comparable with a causal one's).

    Args:
        model: a transformers model with the head the task needs.
        task, data, split: as ``kflats.tasks.data.load_examples``.
        batch: examples at once. max_length: tokens an example.
        limit: judge this many examples only, drawn by ``seed``.
        costs: also time and count one batch of 8 examples.

    Raises:
        KflatsError: as ``load_examples``; a head or tokenizer that does not fit; outputs that are not
            finite; a package of the extra "tasks" that is missing.
    """
    if batch < 1:
        raise KflatsError(f"batches of {batch} examples judge nothing", hint="at least 1")
    examples = load_examples(task, split, data)
    made = features(examples, tokenizer, max_length, limit=limit, model=model, seed=seed)
    values, n = judge(model, tokenizer, examples, made, batch, max_length)
    found = examples.task
    longest = length_limit(tokenizer, model, max_length)
    return Score(
        task=found.name,
        split=examples.split,
        source=examples.source,
        metric=found.metrics[0],
        value=values[found.metrics[0]],
        values=tuple(values.items()),
        n=n,
        full=0 if found.kind == "language" else len({f.place for f in made if len(f) >= longest}),
        parameters=_parameters(model),
        size_bytes=stored_bytes(model),
        memory_bytes=memory_bytes(model),
        **(_costs(model, tokenizer, made) if costs else {}),
    )


def judge(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    examples: Examples,
    made: Sequence[Feature],
    batch: int = 32,
    max_length: int = 128,
) -> tuple[dict[str, float], int]:
    """Every metric of the task on ``made`` (of ``examples``), and how many examples or tokens were judged.

    Raises:
        KflatsError: outputs that are not finite, or a package that is missing.
    """
    task = examples.task
    filler = padding_id(tokenizer, model)
    if task.kind == "language":
        total, count = _losses(model, made, filler, batch)
        return {"perplexity": perplexity(total, count)}, count
    places = list(dict.fromkeys(f.place for f in made))
    true = [examples.labels[i] for i in places]
    predicted: Any
    if task.kind == "similarity":
        first, second = (
            encode(model, tokenizer, [examples.inputs[i][side] for i in places], batch, max_tokens=max_length)
            for side in (0, 1)
        )
        return measure(task.metrics, (first * second).sum(1).tolist(), true), len(places)
    order = torch.tensor(check_head(model, task))
    outputs = _outputs(model, made, filler, batch)
    if task.kind == "regression":
        predicted = [float(row) for row in outputs]
    elif task.kind == "classification":
        predicted = [int(row[order].argmax()) for row in outputs]
    else:
        predicted = []
        for feature, labels, row in zip(made, true, outputs, strict=True):
            tags = ["O"] * len(labels)  # a word that was cut off is in no entity
            kept = torch.tensor(feature.labels) != IGNORED
            for word, best in zip(feature.words, row[kept][:, order].argmax(1).tolist(), strict=True):
                tags[word] = task.labels[best]
            predicted.append(tags)
        true = [[task.labels[label] for label in labels] for labels in true]
    return measure(task.metrics, predicted, true), len(places)


def evaluate_folder(
    folder: str | os.PathLike[str],
    task: str | Task,
    *,
    original: str | os.PathLike[str] | None = None,
    data: str | os.PathLike[str] | None = None,
    split: str = "dev",
    batch: int = 32,
    max_length: int = 128,
    limit: int | None = None,
    seed: int = 0,
) -> TaskReport:
    """Load a model folder, and its original if there is one, and judge both on a task; see ``score``.

    ``size_bytes`` is that of the weight files here. With an original, latency is measured turn by turn.

    Raises:
        KflatsError: as ``score``; a folder that holds no model or no tokenizer.
    """
    found = find_task(task)
    folders = [resolve_model(os.fspath(f)) for f in (folder, original) if f is not None]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = [load_model(f).to(device) for f in folders]
    tokenizer = load_tokenizer(folders[-1])
    for model in models:
        check_head(model, found)
    chosen: dict[str, Any] = {"data": data, "split": split, "batch": batch, "max_length": max_length}
    chosen |= {"limit": limit, "seed": seed}
    scores = [
        replace(score(m, tokenizer, found, **chosen), size_bytes=weight_file_bytes(f))
        for m, f in zip(models, folders, strict=True)
    ]
    if len(scores) == 1:
        return TaskReport(scores[0])
    made = features(load_examples(found, split, data), tokenizer, max_length, limit=limit, model=models[0], seed=seed)
    inputs = [_timed_batch(model, tokenizer, made) for model in models]
    with evaluating(*models), torch.inference_mode():
        after, before = take_turns(
            [partial(_run, m, i) for m, i in zip(models, inputs, strict=True)], _TURNS, _device(models[0])
        )
    timing = paired(before, after, batch=scores[0].batch, tokens=scores[0].tokens)
    new, old = scores
    return TaskReport(
        replace(new, latency_ms=timing.compressed_ms), replace(old, latency_ms=timing.original_ms), timing
    )


def _outputs(model: nn.Module, made: Sequence[Feature], filler: int, batch: int) -> list[Tensor]:
    """Logits of every feature on the CPU, in float32: (labels,) or (tokens, labels), padding cut off."""
    found: list[Tensor] = [torch.empty(0)] * len(made)
    order = by_length(made)
    with evaluating(model), torch.inference_mode():
        for start in range(0, len(order), max(1, batch)):
            picked = order[start : start + max(1, batch)]
            inputs = collate([made[i] for i in picked], filler, _device(model))
            inputs.pop("labels", None)
            logits = _run(model, inputs).logits.float().cpu()
            if not torch.isfinite(logits).all():
                raise KflatsError(
                    "the model's outputs are not finite",
                    cause="overflow in float16, or damaged weights",
                    hint="use float32",
                )
            for i, row in zip(picked, logits, strict=True):
                found[i] = row[: len(made[i])] if row.ndim == 2 else row
    return found


def _losses(model: nn.Module, made: Sequence[Feature], filler: int, batch: int) -> tuple[float, int]:
    """Sum of the negative log-likelihoods of all labelled tokens, and how many they are."""
    causal = head_of(model) == "causal"
    total, count, order = 0.0, 0, by_length(made)
    with evaluating(model), torch.inference_mode():
        for start in range(0, len(order), max(1, batch)):
            inputs = collate([made[i] for i in order[start : start + max(1, batch)]], filler, _device(model))
            labels = inputs.pop("labels")
            logits = _run(model, inputs).logits
            if causal:
                logits, labels = logits[:, :-1], labels[:, 1:]
            known = labels != IGNORED
            total += float(F.cross_entropy(logits[known].float(), labels[known], reduction="sum"))
            count += int(known.sum())
    if not math.isfinite(total):
        raise KflatsError("the model's outputs are not finite", cause="overflow in float16, or damaged weights")
    return total, count


def _costs(model: nn.Module, tokenizer: PreTrainedTokenizerBase, made: Sequence[Feature]) -> dict[str, Any]:
    inputs = _timed_batch(model, tokenizer, made)
    with evaluating(model), torch.inference_mode():
        (times,) = take_turns([partial(_run, model, inputs)], _TURNS, _device(model))
    shape = inputs["input_ids"].shape
    median = float(torch.tensor(times, dtype=torch.float64).quantile(0.5))
    counted = count_flops(model, inputs)
    return {"latency_ms": 1000 * median, "flops": counted, "batch": shape[0], "tokens": shape[1]}


def _timed_batch(model: nn.Module, tokenizer: PreTrainedTokenizerBase, made: Sequence[Feature]) -> dict[str, Tensor]:
    inputs = collate(made[:_TIMED], padding_id(tokenizer, model), _device(model))
    inputs.pop("labels", None)
    return inputs


def _run(model: nn.Module, inputs: dict[str, Tensor]) -> Any:
    return model(**inputs)


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _parameters(model: nn.Module) -> int:
    held = {id(t): t for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
    return sum(t.numel() for t in held.values() if t.is_floating_point())
