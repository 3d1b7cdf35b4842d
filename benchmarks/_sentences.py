"""The sentences that benchmarks count and judge on, and how near a model's vectors of them are to the original's.

The data come from a local folder (environment variable KFLATS_DATA, default ../shared/data) in GLUE's TSV form, or from
the Hugging Face hub (``pip install datasets``) where there is no such folder.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kflats import read_texts
from kflats.calibration.counting import count_tokens, text_batches, zipf_prior
from kflats.common.sentences import undo_marks
from kflats.common.texts import packaged_texts
from kflats.demo import packaged_model
from kflats.evaluation.outputs import Fidelity, fidelity_of, load_tokenizer
from kflats.evaluation.running import encode, rare_words
from kflats.importance.protocol import Measured
from kflats.model.weights import Weight, find_weights
from kflats.tasks.batches import load_examples
from kflats.tasks.scoring import spearman

HEAD = ("mean cosine", "5th percentile", "rare words", "10 neighbours kept")
"""What ``cells`` shows."""
_RARE = 500


def data_folder() -> Path | None:
    """The local folder of data sets, None where there is none."""
    folder = Path(os.environ.get("KFLATS_DATA", Path(__file__).resolve().parents[1].parent / "shared" / "data"))
    return folder if folder.is_dir() else None


def sentences(name: str) -> list[str]:
    """wikitext2, or the sentences of stsb, mrpc, cola or conll2003."""
    folder = data_folder()
    if folder is not None and name == "conll2003":
        examples = load_examples(name, "dev", folder / name).inputs
        return [" ".join(words) for words in examples if len(words) > 3]
    if folder is not None:
        part = "train.txt.gz" if name == "wikitext2" else "dev.tsv.gz"
        with gzip.open(folder / name / part, "rt", encoding="utf-8", newline="\n") as file:
            lines = file.read().split("\n")
        if name == "wikitext2":
            return [line.strip() for line in lines if line.strip()]
        return [text for line in lines[1:] if line for text in line.split("\t")[:2] if text]
    from datasets import load_dataset  # type: ignore[import-not-found, unused-ignore]

    if name == "wikitext2":
        return [t for t in load_dataset("Salesforce/wikitext", "wikitext-2-v1", split="train")["text"] if t.strip()]
    data = load_dataset("nyu-mll/glue", name, split="validation")
    return [row[key] for row in data for key in ("sentence", "sentence1", "sentence2") if row.get(key)]


def paragraphs(split: str, count: int = 300) -> list[str]:
    """Paragraphs of WikiText-2 of 60 words or more, marks undone; ``split``: train, valid or test."""
    folder = data_folder()
    if folder is None:
        from datasets import load_dataset  # type: ignore[import-not-found, unused-ignore]

        named = {"valid": "validation"}.get(split, split)
        lines = load_dataset("Salesforce/wikitext", "wikitext-2-v1", split=named)["text"]
    else:
        lines = read_texts(folder / "wikitext2" / f"{split}.txt.gz")
    return [text for text in undo_marks(lines)[0] if len(text.split()) >= 60][:count]


def token_rows(rows: int, texts: Sequence[str] | None = None) -> Measured:
    """How often the packaged tokenizer's first ``rows`` tokens occur: by its Zipf prior, and counted in ``texts``."""
    tokenizer = load_tokenizer(packaged_model())
    counts = None if texts is None else count_tokens(texts, tokenizer, rows)
    return Measured(rows, counts, zipf_prior(tokenizer, rows))


def labelled_batches(samples: int, batch: int, length: int) -> list[dict[str, Tensor]]:
    """Batches of the package's sentences, again and again until there are enough, with labels 0 and 1 in turn."""
    texts = list(islice(cycle(packaged_texts("count")), samples))
    batches = text_batches(texts, load_tokenizer(packaged_model()), batch=batch, max_length=length)
    for one in batches:
        one["labels"] = torch.arange(len(one["input_ids"])) % 2
    return batches


def classifier() -> tuple[Any, list[Weight]]:
    """The packaged encoder with an untrained head for two classes, and its encoder's linear layers."""
    from transformers import AutoModelForSequenceClassification

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(packaged_model(), num_labels=2).eval()
    return model, [w for w in find_weights(model) if ".encoder." in f".{w.name}" and w.places[0].role == "linear"]


def cells(found: Fidelity) -> list[str]:
    """The figures under ``HEAD``."""
    figures = (found.mean_cosine, found.p5_cosine, found.rare_mean_cosine or 0.0, found.neighbour_overlap or 0.0)
    return [f"{figure:.4f}" for figure in figures]


@dataclass(frozen=True)
class Scores:
    """How near a version's vectors are to the original's, and its Spearman correlation on STS-B, if asked for."""

    fidelity: Fidelity
    spearman: float | None


class Evaluator:
    """Compares versions of ``original`` on ``texts`` and on rare words; each sentence is encoded once a version.

    Args:
        counted: rare words are those that neither these nor ``texts`` show.
        sts: whether to score STS-B (dev) by the cosine of the two sentences.
    """

    def __init__(
        self, original: nn.Module, tokenizer: Any, texts: Sequence[str], counted: Sequence[str] = (), sts: bool = False
    ) -> None:
        examples = load_examples("sts", "dev", data_folder()) if sts else None
        pairs = [text for example in examples.inputs for text in example] if examples else []
        rare = rare_words(tokenizer, [*texts, *counted], _RARE)
        self._tokenizer, self._labels = tokenizer, examples.labels if examples else None
        self._sentences = list(dict.fromkeys([*texts, *rare, *pairs]))
        place = {text: i for i, text in enumerate(self._sentences)}
        self._texts, self._rare, self._pairs = ([place[text] for text in part] for part in (texts, rare, pairs))
        self._vectors = self._encode(original, tokenizer)
        self.original = self._scores(self._vectors)

    def __call__(self, model: nn.Module, tokenizer: Any = None) -> Scores:
        """The scores of another version; ``tokenizer``: its own, where its vocabulary is another."""
        return self._scores(self._encode(model, tokenizer or self._tokenizer))

    def _encode(self, model: nn.Module, tokenizer: Any) -> Tensor:
        return encode(model, tokenizer, self._sentences, 32)

    def _scores(self, vectors: Tensor) -> Scores:
        known = self._vectors
        rare = (known[self._rare], vectors[self._rare]) if self._rare else None
        near = fidelity_of(known[self._texts], vectors[self._texts], rare)
        if self._labels is None:
            return Scores(near, None)
        cosines = (vectors[self._pairs[0::2]] * vectors[self._pairs[1::2]]).sum(1)
        return Scores(near, spearman(cosines.tolist(), self._labels))
