"""A compressed model beside its original: sizes, fidelity of the outputs, latency.

Matrix error misleads (a table can be near in squared error and far in what the model says), so the
model itself is measured. Fidelity is the cosine between the two models' sentence vectors, and
whether each sentence keeps its nearest neighbours; always with the 5th percentile and with rare
words beside the mean, because a mean over common sentences hides a starved tail.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.common.formatting import number, plain, share, size, table, visible
from kflats.common.texts import packaged_texts
from kflats.common.token_batches import pad_id, padded_batch, tokenize_texts
from kflats.evaluation.encoding import MAX_TOKENS, device_of, encode, evaluating, last_hidden_state, rare_words
from kflats.evaluation.latency import Latency, paired, take_turns
from kflats.io import load_model, resolve_model, weights_folder
from kflats.io.sources import weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BLOCK = 1024  # sentences compared with all others at once
_ALIKE = 0.2  # mean cosine; of unrelated models it is near 0, of one that was spoilt by compression above .3
_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")


@dataclass(frozen=True)
class Fidelity:
    """How near the compressed model's vectors are to the original's; 1.0 everywhere is the same model.

    Args:
        mean_cosine: mean over sentences of the cosine between both models' vectors.
        p5_cosine: its 5th percentile: one sentence in twenty is worse.
        neighbour_overlap: share of each sentence's 10 nearest others that stay; None with fewer than 3 sentences.
        sentences: how many.
        rare_mean_cosine: mean cosine over rare words, each encoded alone; None if the vocabulary has none.
        rare_words: how many.
    """

    mean_cosine: float
    p5_cosine: float
    neighbour_overlap: float | None
    sentences: int
    rare_mean_cosine: float | None
    rare_words: int


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
            ["mean cosine", f"{f.sentences} sentences", _cosine(f.mean_cosine)],
            ["5th percentile of cosine", "one sentence in twenty is worse", _cosine(f.p5_cosine)],
            ["mean cosine, rare words", f"{f.rare_words} words, each alone", _cosine(f.rare_mean_cosine)],
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
            parts += ["", "the two hardly say the same: is the second a compressed version of the first?"]
        return "\n".join(parts)


def fidelity(
    original: nn.Module,
    compressed: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    counted: Sequence[str] = (),
    batch: int = 32,
    neighbours: int = 10,
    words: int = 500,
    compressed_tokenizer: PreTrainedTokenizerBase | None = None,
) -> Fidelity:
    """Compare what two models say about ``texts``, and about up to ``words`` rare words.

    Args:
        counted: texts the importance was counted on; rare words are words that neither these nor
            ``texts`` show, from the tail of the vocabulary.
        neighbours: how many nearest sentences should stay.
        compressed_tokenizer: the second model's, where its vocabulary is another (``trim``). None: ``tokenizer``.

    Raises:
        KflatsError: no texts, or models whose vectors cannot be compared.
    """
    rare = rare_words(tokenizer, [*texts, *counted], words)
    both = ((original, tokenizer), (compressed, tokenizer if compressed_tokenizer is None else compressed_tokenizer))
    a, b = (encode(m, t, texts, batch) for m, t in both)
    alone = tuple(encode(m, t, rare, batch) for m, t in both) if rare else None
    return fidelity_of(a, b, alone, neighbours=neighbours)


def fidelity_of(a: Tensor, b: Tensor, rare: tuple[Tensor, ...] | None = None, *, neighbours: int = 10) -> Fidelity:
    """How near the unit vectors ``b`` (n, d) are to ``a``, those of the original; ``rare``: both models' of rare words.

    Raises:
        KflatsError: vectors of different lengths.
    """
    if a.shape != b.shape:
        raise KflatsError(
            f"vectors of {a.shape[1]} and of {b.shape[1]} numbers cannot be compared",
            cause="the second model is not a compressed version of the first",
        )
    cosine = (a * b).sum(1)
    return Fidelity(
        mean_cosine=float(cosine.mean()),
        p5_cosine=float(cosine.quantile(0.05)),
        neighbour_overlap=neighbour_overlap(a, b, neighbours),
        sentences=len(a),
        rare_mean_cosine=None if rare is None else float((rare[0] * rare[1]).sum(1).mean()),
        rare_words=0 if rare is None else len(rare[0]),
    )


def neighbour_overlap(a: Tensor, b: Tensor, neighbours: int = 10, block: int = _BLOCK) -> float | None:
    """Mean share of each row's nearest other rows in ``a`` that are nearest in ``b`` too.

    ``a`` and ``b`` are (n, d) unit vectors of the same n texts. Fewer than ``neighbours`` others: all
    but one of them are asked for, since all would always agree. None for n < 3. Work n^2 d, memory
    block x n.
    """
    n = a.shape[0]
    k = min(neighbours, n - 2)
    if k < 1:
        return None
    kept = 0
    for start in range(0, n, block):
        rows = torch.arange(start, min(start + block, n))
        nearest = []
        for vectors in (a, b):
            similar = vectors[rows] @ vectors.T
            similar[torch.arange(len(rows)), rows] = -torch.inf
            nearest.append(
                torch.zeros(similar.shape, dtype=torch.bool).scatter_(1, similar.topk(k, dim=1).indices, True)
            )
        kept += int((nearest[0] & nearest[1]).sum())
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
    """Time both models on the first ``batch`` texts, in ``pairs`` pairs; which goes first alternates.

    Pairs and alternation, so that a machine that warms up or is shared slows both alike. ``compressed_tokenizer``: as
    ``fidelity``; what it makes of the texts may be longer.
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
        texts: sentences to judge on; None: those that come with kflats.
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


def _own_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase, original: nn.Module, compressed: nn.Module) -> Any:
    """The tokenizer of a trimmed model's folder; the given one where the folder has the same, or a model alone."""
    try:
        own = load_tokenizer(folder)
    except KflatsError:
        before, after = (getattr(getattr(m, "config", None), "vocab_size", None) for m in (original, compressed))
        if before != after:
            raise
        return tokenizer
    return tokenizer if own.get_vocab() == tokenizer.get_vocab() else own


def load_tokenizer(folder: str | os.PathLike[str]) -> Any:
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
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged file
        raise lost from error


def weight_file_bytes(folder: str | os.PathLike[str]) -> int:
    """Bytes of the weight files in a model's folder, those of all modules of a sentence-transformers folder."""
    return sum(file.stat().st_size for file in weight_files(folder))


def memory_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, shared ones counted once."""
    held = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return sum(t.numel() * t.element_size() for t in held.values())


def _cosine(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
