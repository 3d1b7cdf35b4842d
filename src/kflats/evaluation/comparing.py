"""A compressed model beside its original: sizes, fidelity of the outputs, latency.

The models' outputs are compared, because a table with a small squared error can change them much. Fidelity is the
cosine between the sentence vectors of both models, and the share of each sentence's nearest neighbours that stay. The
5th percentile and rare words stand beside the mean: a mean over common sentences hides damage to rare words.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.common.formatting import number, plain, share, size, table, visible
from kflats.common.texts import packaged_texts, pad_id, padded_batch, tokenize_texts
from kflats.evaluation.encoding import MAX_TOKENS, device_of, encode, evaluating, last_hidden_state, rare_words
from kflats.io import load_model, resolve_model, weights_folder
from kflats.io.sources import weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BLOCK = 1024  # sentences compared with all others at once
_NEIGHBOURS = 10
_WARMING = 2  # turns that are not counted
_RESAMPLES = 2000
_ALIKE = 0.2  # mean cosine: near 0 for unrelated models, above 0.3 for a badly compressed model
_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")


@dataclass(frozen=True)
class Fidelity:
    """The similarity of the compressed model's vectors to the original's; 1.0 everywhere for the same model.

    Args:
        mean_cosine: mean over sentences of the cosine between both models' vectors.
        p5_cosine: the 5th percentile of this cosine: one sentence in twenty is worse.
        neighbour_overlap: share of the 10 nearest other sentences that stay; None with fewer than 3 sentences.
        sentences: number of sentences.
        rare_mean_cosine: mean cosine over rare words, each encoded alone; None if the vocabulary has none.
        rare_words: number of rare words.
    """

    mean_cosine: float
    p5_cosine: float
    neighbour_overlap: float | None
    sentences: int
    rare_mean_cosine: float | None
    rare_words: int


@dataclass(frozen=True)
class Latency:
    """The time of one batch through both models, measured in pairs.

    ``ratio`` is the median over pairs of compressed / original, ``low`` and ``high`` its 95 % bootstrap interval. An
    interval that contains 1 shows no difference.
    """

    original_ms: float
    compressed_ms: float
    ratio: float
    low: float
    high: float
    pairs: int
    batch: int
    tokens: int


@dataclass(frozen=True)
class Comparison:
    """Two model folders side by side; printing it gives a table. Sizes are in bytes.

    ``disk`` counts weight files, those of a sentence-transformers folder's other modules too; ``memory`` parameters and
    buffers of the transformer once loaded (shared ones once).
    """

    original: str
    compressed: str
    disk: tuple[int, int]
    memory: tuple[int, int]
    fidelity: Fidelity
    latency: Latency

    def __str__(self) -> str:
        f, t = self.fidelity, self.latency
        overlap = f.neighbour_overlap
        sizes = [
            ["weight files", size(self.disk[0]), size(self.disk[1]), share(self.disk[1], self.disk[0])],
            ["weights in memory", size(self.memory[0]), size(self.memory[1]), share(self.memory[1], self.memory[0])],
            ["one batch, median", f"{t.original_ms:.1f} ms", f"{t.compressed_ms:.1f} ms", share(t.ratio)],
        ]
        values = [
            ["mean cosine", f"{f.sentences} sentences", cosine(f.mean_cosine)],
            ["5th percentile of cosine", "one sentence in twenty is worse", cosine(f.p5_cosine)],
            ["mean cosine, rare words", f"{f.rare_words} words, each alone", cosine(f.rare_mean_cosine)],
            ["neighbours kept", "of the 10 nearest sentences", "-" if overlap is None else share(overlap)],
        ]
        parts = [
            f"original:   {visible(self.original)}",
            f"compressed: {visible(self.compressed)}",
            "",
            plain(table(["whole model", "original", "compressed", "ratio"], sizes)),
            "",
            plain(table(["fidelity to the original", "", ""], values, left=2)),
            "",
            f"latency: {t.batch} texts of up to {t.tokens} tokens, {t.pairs} interleaved pairs; "
            f"median ratio {number(t.ratio)}, 95 % interval {number(t.low)} to {number(t.high)}",
        ]
        if f.mean_cosine < _ALIKE:
            parts += ["", "the outputs are hardly alike: is the second model a compressed version of the first?"]
        return "\n".join(parts)


def fidelity(
    original: nn.Module,
    compressed: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    counted: Sequence[str] = (),
    batch: int = 32,
    words: int = 500,
    compressed_tokenizer: PreTrainedTokenizerBase | None = None,
) -> Fidelity:
    """Compare the vectors of two models for ``texts``, and for up to ``words`` rare words.

    Args:
        counted: texts on which the importance was counted. Rare words come from the tail of the vocabulary, and occur
            neither in these texts nor in ``texts``.
        compressed_tokenizer: the second model's, if it has another vocabulary (``trim``). None: ``tokenizer``.

    Raises:
        KflatsError: no texts, or models whose vectors cannot be compared.
    """
    rare = rare_words(tokenizer, [*texts, *counted], words)
    both = ((original, tokenizer), (compressed, tokenizer if compressed_tokenizer is None else compressed_tokenizer))
    a, b = (encode(m, t, texts, batch) for m, t in both)
    alone = tuple(encode(m, t, rare, batch) for m, t in both) if rare else None
    return fidelity_of(a, b, alone)


def fidelity_of(a: Tensor, b: Tensor, rare: tuple[Tensor, ...] | None = None) -> Fidelity:
    """The fidelity of unit vectors ``b`` (n, d) to the original's ``a``; ``rare``: the vectors of rare words of both.

    Raises:
        KflatsError: vectors of different lengths.
    """
    if a.shape != b.shape:
        raise KflatsError(
            f"vectors of {a.shape[1]} and of {b.shape[1]} numbers cannot be compared",
            cause="the second model is not a compressed version of the first",
        )
    cosines = (a * b).sum(1)
    return Fidelity(
        mean_cosine=float(cosines.mean()),
        p5_cosine=float(cosines.quantile(0.05)),
        neighbour_overlap=neighbour_overlap(a, b),
        sentences=len(a),
        rare_mean_cosine=None if rare is None else float((rare[0] * rare[1]).sum(1).mean()),
        rare_words=0 if rare is None else len(rare[0]),
    )


def neighbour_overlap(a: Tensor, b: Tensor, block: int = _BLOCK) -> float | None:
    """Mean share of the 10 nearest other rows of each row of ``a`` that are among the nearest in ``b`` too.

    ``a`` and ``b`` are (n, d) unit vectors of the same n texts. With fewer than 12 texts the n - 2 nearest are
    compared, because all n - 1 would always agree. None for n < 3. Work n^2 d, memory block x n.
    """
    n = len(a)
    k = min(_NEIGHBOURS, n - 2)
    if k < 1:
        return None
    kept = 0
    for start in range(0, n, block):
        nearest = []
        for vectors in (a, b):
            similar = vectors[start : start + block] @ vectors.T
            similar.diagonal(start).fill_(-torch.inf)
            nearest.append(similar.topk(k, dim=1).indices)
        kept += int((nearest[0].unsqueeze(2) == nearest[1].unsqueeze(1)).sum())
    return kept / (n * k)


def latency(
    original: nn.Module,
    compressed: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    batch: int = 8,
    pairs: int = 20,
    compressed_tokenizer: PreTrainedTokenizerBase | None = None,
) -> Latency:
    """Time both models on the first ``batch`` texts, in ``pairs`` pairs; the two models take turns to go first.

    A machine that warms up or is shared thus slows both models alike. ``compressed_tokenizer``: as ``fidelity``; its
    segmentation of the texts may be longer.
    """
    if not texts or pairs < 1:
        raise KflatsError("latency needs at least one text and one pair", hint="give texts and pairs >= 1")
    models = (original, compressed)
    tokenizers = (tokenizer, tokenizer if compressed_tokenizer is None else compressed_tokenizer)
    inputs = []
    for model, own in zip(models, tokenizers, strict=True):
        rows = tokenize_texts(own, texts[:batch], MAX_TOKENS, model)
        inputs.append(padded_batch([{"input_ids": row} for row in rows], pad_id(own, model), device_of(model)))
    runs = [partial(last_hidden_state, model, batch) for model, batch in zip(models, inputs, strict=True)]
    with evaluating(*models), torch.inference_mode():
        before, after = take_turns(runs, pairs, inputs[0]["input_ids"].device)
    sentences, tokens = inputs[0]["input_ids"].shape
    return paired(before, after, batch=sentences, tokens=tokens)


def take_turns(runs: Sequence[Callable[[], object]], turns: int, device: torch.device) -> list[list[float]]:
    """Seconds of every run in every turn, ``[run][turn]``; in every other turn the order is reversed.

    >>> times = take_turns([lambda: None, lambda: None], 3, torch.device("cpu"))
    >>> [len(t) for t in times]
    [3, 3]
    """
    if turns < 1 or not runs:
        raise KflatsError(f"{turns} turns of {len(runs)} runs give no time", hint="at least one of each")
    times: list[list[float]] = [[] for _ in runs]
    order = list(range(len(runs)))
    for turn in range(-_WARMING, turns):
        for which in order if turn % 2 == 0 else order[::-1]:
            _settle(device)
            start = time.perf_counter()
            runs[which]()
            _settle(device)
            if turn >= 0:
                times[which].append(time.perf_counter() - start)
    return times


def paired(before: Sequence[float], after: Sequence[float], *, batch: int, tokens: int) -> Latency:
    """The medians of two models' seconds, turn by turn, and a bootstrap interval of their ratio."""
    first, second = (torch.tensor(t, dtype=torch.float64) for t in (before, after))
    ratios, pairs = second / first, len(before)
    draws = torch.randint(pairs, (_RESAMPLES, pairs), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = ratios[draws].quantile(0.5, dim=1).quantile(ends).tolist()
    medians = [float(values.quantile(0.5)) for values in (first, second, ratios)]
    return Latency(1000 * medians[0], 1000 * medians[1], medians[2], low, high, pairs, batch, tokens)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(
    original_folder: str | os.PathLike[str],
    compressed_folder: str | os.PathLike[str],
    texts: Sequence[str] | None = None,
    *,
    pairs: int = 20,
) -> Comparison:
    """Load two models and compare sizes, fidelity and latency.

    Args:
        original_folder: a local folder or a hub name.
        compressed_folder: what ``kflats compress`` or ``save_pretrained`` wrote; read with its own tokenizer if its
            vocabulary is another, else with the original's.
        texts: sentences to compare on; None: the sentences of the package.
        pairs: runs of each model in the latency test.

    Raises:
        KflatsError: a folder that holds no model or no tokenizer, or models that do not belong together.
    """
    folders = [resolve_model(os.fspath(f)) for f in (original_folder, compressed_folder)]
    original, compressed = (load_model(folder) for folder in folders)
    tokenizer = load_tokenizer(folders[0])
    own = _own_tokenizer(folders[1], tokenizer, original, compressed)
    both: dict[str, Any] = {"tokenizer": tokenizer, "compressed_tokenizer": own}
    judged = packaged_texts("judge") if texts is None else tuple(texts)
    return Comparison(
        original=os.fspath(original_folder),
        compressed=os.fspath(compressed_folder),
        disk=(weight_file_bytes(folders[0]), weight_file_bytes(folders[1])),
        memory=(memory_bytes(original), memory_bytes(compressed)),
        fidelity=fidelity(original, compressed, texts=judged, counted=packaged_texts("count"), **both),
        latency=latency(original, compressed, texts=judged, pairs=pairs, **both),
    )


def _own_tokenizer(
    folder: Path, tokenizer: PreTrainedTokenizerBase, original: nn.Module, compressed: nn.Module
) -> PreTrainedTokenizerBase:
    """The tokenizer of a trimmed model's folder; ``tokenizer`` if the folder has the same one, or has none."""
    try:
        own = load_tokenizer(folder)
    except KflatsError:
        before, after = (getattr(getattr(m, "config", None), "vocab_size", None) for m in (original, compressed))
        if before != after:
            raise
        return tokenizer
    return tokenizer if own.get_vocab() == tokenizer.get_vocab() else own


def load_tokenizer(folder: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's local folder; a clear error when it has none."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise KflatsError("transformers is not installed", hint="pip install 'kflats[hf]'") from error
    where = weights_folder(folder)
    lost = KflatsError(
        f"{where} has no tokenizer that can be loaded",
        cause="its tokenizer files are missing or damaged",
        hint="save one there: tokenizer.save_pretrained(folder)",
        command="put the tokenizer's files into the folder",
    )
    # Without any vocabulary transformers makes a tokenizer that knows no words, and says nothing.
    if not any(any(where.glob(pattern)) for pattern in _VOCABULARIES):
        raise lost
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            where, trust_remote_code=False, local_files_only=True
        )
        return tokenizer
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged file
        raise lost from error


def weight_file_bytes(folder: str | os.PathLike[str]) -> int:
    """Bytes of the weight files in a model's folder, those of all modules of a sentence-transformers folder."""
    return sum(file.stat().st_size for file in weight_files(folder))


def memory_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, shared ones counted once."""
    held = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return sum(t.numel() * t.element_size() for t in held.values())


def cosine(value: float | None) -> str:
    """A cosine with four decimals; a dash if it was not measured."""
    return "-" if value is None else f"{value:.4f}"
