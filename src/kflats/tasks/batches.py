"""Examples -> token ids -> batches: what training reads, what importance is measured on, what a score is made of."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.evaluation.encoding import Batch, pad_id, tokenize
from kflats.tasks.data import Examples, load_examples
from kflats.tasks.task import Task, check_head, head_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # labels that losses of torch and transformers pass over
_MASKED_SHARE = 0.15  # of the tokens of a masked language model, as it was trained


@dataclass(frozen=True)
class Feature:
    """One example in a model's own numbers, not padded.

    Args:
        inputs: token ids, and token types where the tokenizer gives them; equally long lists.
        labels: a class of the *model's* numbering, a float, a label a token (-100: none), or None.
        words: for token tasks the word that each labelled token stands for.
        place: which of the examples it is.
    """

    inputs: dict[str, list[int]]
    labels: Any = None
    words: tuple[int, ...] = ()
    place: int = 0

    def __len__(self) -> int:
        return len(self.inputs["input_ids"])


def task_batches(
    task: str | Task,
    tokenizer: PreTrainedTokenizerBase,
    split: str = "train",
    batch: int = 16,
    max_length: int = 128,
    limit: int | None = None,
    *,
    data: str | os.PathLike[str] | None = None,
    model: nn.Module | None = None,
    seed: int = 0,
) -> list[dict[str, Tensor]]:
    """Batches with labels, for ``model(**batch)``: what importance is measured on.

    Args:
        task, split, data: as ``kflats.tasks.data.load_examples``.
        tokenizer: the model's.
        batch: examples a batch. Examples of similar length stand together, the longest first.
        max_length: tokens an example; what is longer is cut. For language tasks the length of every block.
        limit: this many examples, drawn by ``seed``; None: all.
        model: give it, and its head is checked, labels follow its own numbering, and masked language models
            get masks.

    Returns:
        Dicts of ``input_ids``, ``attention_mask``, ``token_type_ids`` where the tokenizer makes them, all
        (examples, tokens), and ``labels``: (examples,) or (examples, tokens). "sts" has no labels: its
        texts stand alone.

    Raises:
        KflatsError: as ``load_examples``; a head that does not fit; a tokenizer of another model.
    """
    if batch < 1:
        raise KflatsError(f"batches of {batch} examples hold nothing", hint="at least 1")
    made = features(load_examples(task, split, data), tokenizer, max_length, limit=limit, model=model, seed=seed)
    order = by_length(made)
    filler = padding_id(tokenizer, model)
    return [collate([made[i] for i in order[s : s + batch]], filler) for s in range(0, len(order), batch)]


def features(
    examples: Examples,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 128,
    *,
    limit: int | None = None,
    model: nn.Module | None = None,
    seed: int = 0,
) -> list[Feature]:
    """``examples`` in token ids, in their order; arguments as ``task_batches``.

    Raises:
        KflatsError: no tokenizer, one of another model, a limit or length below 1, a head that does not fit.
    """
    task = examples.task
    if tokenizer is None:
        raise KflatsError("a tokenizer is needed", cause="the model's folder has none", hint="give tokenizer=")
    if max_length < 2 or (limit is not None and limit < 1):
        raise KflatsError(f"max_length={max_length}, limit={limit}: nothing would be left of the examples")
    order = tuple(range(len(task.labels) or 1)) if model is None else check_head(model, task)
    config = getattr(model, "config", None)
    if config is not None and task.kind in ("classification", "regression") and config.pad_token_id is None:
        raise KflatsError(
            "the model's config has no pad_token_id, without which its head cannot find the end of a text",
            hint="model.config.pad_token_id = tokenizer.pad_token_id (or eos_token_id)",
        )
    if task.kind == "language":
        return _sample(
            list(_blocks(examples, tokenizer, max_length, head_of(model) == "masked", model, seed)), limit, seed
        )
    picked = _sample(list(range(len(examples))), limit, seed)
    if task.kind == "token":
        return _token_features(examples, picked, tokenizer, max_length, order, model)
    if task.kind == "similarity":
        texts = [(i, text) for i in picked for text in examples.inputs[i]]
        rows = tokenize(model, tokenizer, [text for _, text in texts], max_length)
        return [Feature({"input_ids": row}, place=i) for row, (i, _) in zip(rows, texts, strict=True)]
    columns = list(zip(*(examples.inputs[i] for i in picked), strict=True))
    made = _tokenized(tokenizer, model, max_length, *(list(column) for column in columns))
    labels = [order[examples.labels[i]] if task.labels else examples.labels[i] for i in picked]
    return [Feature(row, label, place=i) for row, label, i in zip(made, labels, picked, strict=True)]


def text_features(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int = 128, model: nn.Module | None = None
) -> list[Feature]:
    """Plain texts without labels: what a headless encoder is distilled on."""
    if not texts:
        raise KflatsError("there are no texts", hint="give at least one sentence")
    return [Feature({"input_ids": row}) for row in tokenize(model, tokenizer, texts, max_length)]


def collate(rows: Sequence[Feature], filler: int = 0, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """One batch, padded at the right: ids with ``filler``, types with 0, labels with -100.

    >>> collate([Feature({"input_ids": [5, 6]}, 1), Feature({"input_ids": [7]}, 0)])["attention_mask"].tolist()
    [[1, 1], [1, 0]]
    """
    longest = max(map(len, rows))
    found = {}
    for name in rows[0].inputs:
        found[name] = _padded([row.inputs[name] for row in rows], longest, filler if name == "input_ids" else 0)
    found["attention_mask"] = _padded([[1] * len(row) for row in rows], longest, 0)
    labels = [row.labels for row in rows]
    if labels[0] is not None:
        listed = isinstance(labels[0], list)
        found["labels"] = _padded(labels, longest, IGNORED) if listed else torch.tensor(labels)
    return {name: tensor.to(device) for name, tensor in found.items()}


def uncollate(batches: Sequence[Batch]) -> list[Feature]:
    """Batches of somebody else as features, padding removed, so that they can be mixed anew in every epoch.

    Raises:
        KflatsError: no batches, or one without ``input_ids`` and rows of tokens.
    """
    found = []
    for batch in batches:
        tensors = {n: t for n, t in batch.items() if isinstance(t, Tensor)} if isinstance(batch, Mapping) else {}
        ids = tensors.pop("input_ids", torch.empty(0))
        if ids.ndim != 2 or not ids.numel():
            raise KflatsError(
                "a batch must be a dict of tensors with input_ids (examples, tokens)",
                hint="kflats.task_batches(...)",
            )
        keep = tensors.pop("attention_mask", torch.ones_like(ids)).bool()
        labels = tensors.pop("labels", None)
        inputs = {"input_ids": ids} | {n: t for n, t in tensors.items() if t.shape == ids.shape}
        for i in range(ids.shape[0]):
            label = None if labels is None else labels[i][keep[i]] if labels.shape == ids.shape else labels[i]
            found.append(
                Feature(
                    {n: t[i][keep[i]].tolist() for n, t in inputs.items()}, None if label is None else label.tolist()
                )
            )
    if not found:
        raise KflatsError("there are no batches", cause="an empty list")
    return found


def by_length(rows: Sequence[Feature]) -> list[int]:
    """Places of ``rows``, the longest first (memory peaks at once, not at the end); equal ones in their order."""
    return sorted(range(len(rows)), key=lambda i: -len(rows[i]))


def padding_id(tokenizer: PreTrainedTokenizerBase | None, model: nn.Module | None = None) -> int:
    """The id to pad with: the one the model's config names, else the tokenizer's."""
    found = getattr(getattr(model, "config", None), "pad_token_id", None)
    return found if isinstance(found, int) and found >= 0 else pad_id(tokenizer)


def length_limit(tokenizer: PreTrainedTokenizerBase, model: nn.Module | None, max_length: int) -> int:
    """``max_length``, or less where the tokenizer or the model's table of positions ends before."""
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    limits = [max_length, getattr(tokenizer, "model_max_length", None), positions - 2 if positions else None]
    return max(1, min(n for n in limits if isinstance(n, int) and n > 0))


def _tokenized(
    tokenizer: PreTrainedTokenizerBase, model: nn.Module | None, max_length: int, *texts: list[str]
) -> Iterator[dict[str, list[int]]]:
    limit = length_limit(tokenizer, model, max_length)
    made = tokenizer(*texts, truncation=True, max_length=limit, return_attention_mask=False)
    _check_ids(made["input_ids"], model)
    for i in range(len(texts[0])):
        yield {name: list(values[i]) for name, values in made.items()}


def _check_ids(rows: Sequence[Sequence[int]], model: nn.Module | None) -> None:
    table = getattr(getattr(model, "config", None), "vocab_size", None)
    largest = max((max(row) for row in rows if len(row)), default=0)
    if isinstance(table, int) and largest >= table:
        raise KflatsError(
            f"the tokenizer gives id {largest}, but the model's vocabulary has {table} entries",
            cause="a tokenizer of another model",
        )


def _token_features(
    examples: Examples,
    picked: list[int],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    order: tuple[int, ...],
    model: nn.Module | None,
) -> list[Feature]:
    """The first token of every word carries its label, the others none."""
    if not getattr(tokenizer, "is_fast", False):
        raise KflatsError("token tasks need a fast tokenizer", cause="a slow one does not say which word a token is of")
    limit = length_limit(tokenizer, model, max_length)
    made = tokenizer(
        [list(examples.inputs[i]) for i in picked],
        is_split_into_words=True,
        truncation=True,
        max_length=limit,
        return_attention_mask=False,
    )
    _check_ids(made["input_ids"], model)
    found = []
    for row, place in enumerate(picked):
        labels, words, before = [], [], None
        for word in made.word_ids(row):
            first = word is not None and word != before
            labels.append(order[examples.labels[place][word]] if first else IGNORED)
            words += [word] if first else []
            before = word
        inputs = {name: list(values[row]) for name, values in made.items()}
        found.append(Feature(inputs, labels, tuple(words), place))
    return found


def _blocks(
    examples: Examples,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    masked: bool,
    model: nn.Module | None,
    seed: int,
) -> Iterator[Feature]:
    """The split as one text, cut into blocks; without special tokens for a causal model, with them for a masked one."""
    text = "\n".join(paragraph for (paragraph,) in examples.inputs)
    ids = list(tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])
    _check_ids([ids], model)
    limit = length_limit(tokenizer, model, max_length)
    if not masked:
        for start in range(0, len(ids), limit):
            if len(block := ids[start : start + limit]) > 1:
                yield Feature({"input_ids": block}, list(block))
        return
    if (mask := tokenizer.mask_token_id) is None:
        raise KflatsError("the tokenizer has no mask token", cause="it is not of a masked language model")
    front, back = ([i] if i is not None else [] for i in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    generator = torch.Generator().manual_seed(seed)
    inner = max(1, limit - len(front) - len(back))
    for start in range(0, len(ids), inner):
        block = ids[start : start + inner]
        chosen = torch.rand(len(block), generator=generator) < _MASKED_SHARE
        if chosen.any():
            hidden = [mask if c else i for i, c in zip(block, chosen.tolist(), strict=True)]
            labels = [i if c else IGNORED for i, c in zip(block, chosen.tolist(), strict=True)]
            around = [IGNORED] * len(front), [IGNORED] * len(back)
            yield Feature({"input_ids": front + hidden + back}, around[0] + labels + around[1])


def _sample(items: list[Any], limit: int | None, seed: int) -> list[Any]:
    if limit is None or limit >= len(items):
        return items
    chosen = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed))[:limit]
    return [items[i] for i in sorted(chosen.tolist())]


def _padded(rows: Sequence[Sequence[int]], longest: int, filler: int) -> Tensor:
    out = torch.full((len(rows), longest), filler, dtype=torch.long)
    for place, row in enumerate(rows):
        out[place, : len(row)] = torch.tensor(row, dtype=torch.long)
    return out
