"""The fidelity of a compressed encoder, and what is read of a model's folder: its tokenizer, the bytes of its weights.

The models' outputs are compared, because a table with a small squared error can change them much. Fidelity is the
cosine between the sentence vectors of both models, and the share of each sentence's nearest neighbours that stay. The
5th percentile and rare words stand beside the mean: a mean over common sentences hides damage to rare words.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.evaluation.running import encode, rare_words
from kflats.io import weights_folder
from kflats.io.sources import weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BLOCK = 1024  # sentences compared with all others at once
_NEIGHBOURS = 10
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
