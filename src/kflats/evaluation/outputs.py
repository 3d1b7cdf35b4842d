"""What a compression did to a model's outputs: the same inputs through both models, compared by what outputs mean.

    encoder            loss = 1 - mean cosine of the pooled vectors
    classifiers        loss = mean total variation sum_c |p_c - q_c| / 2 of the distributions over labels
    regression         loss = mean square of the difference / variance of the original's values
    language models    loss = mean of KL(p || q) over tokens, in nats

``docs/proof.md`` justifies each. ``quality`` is 1 - loss. A *place* of a sample is a vector, a label, or a token.

The models' outputs are compared, because a table with a small squared error can change them much. The fidelity of an
encoder is the cosine between the sentence vectors of both models, and the share of each sentence's nearest neighbours
that stay. The 5th percentile and rare words stand beside the mean: a mean over common sentences hides damage to rare
words.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from textwrap import shorten
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.common.formatting import number
from kflats.common.release import needed
from kflats.common.texts import Tokenizer, check_texts, packaged_texts, pad_id
from kflats.evaluation import running as inputs
from kflats.evaluation.running import (
    Sample,
    by_position,
    check_finite,
    device_of,
    encode,
    evaluating,
    explained,
    is_encoder_decoder,
    pooled,
    rare_words,
    run,
    task_output,
)
from kflats.io import weights_folder
from kflats.io.sources import static_folder, trusts_remote_code, weight_files
from kflats.io.static import fast_tokenizer
from kflats.model.weights import factored_layers

OutputKind: TypeAlias = Literal[
    "encoder",
    "classifier",
    "multi-label classifier",
    "regression",
    "token classifier",
    "causal language model",
    "masked language model",
    "encoder-decoder",
]
"""What the outputs of a model are; of a model that reads images or sounds too."""

JUDGED = 256
"""Texts that are judged; evenly spaced ones of a longer list."""
_DRAWN = 32  # samples where the model reads no text
_MASKED = 0.15  # of a text's tokens
_NUMBERS = 2**26  # log-probabilities that are kept of a model, and logits of a batch: 268 MB
_TERMS = 2**22  # log-probabilities that are compared at once, in float64
_HEAVY, _VISIBLE = 4.0, 0.02
_SHOWN, _LETTERS = 3, 80  # of the worst samples
_OWN_COMPARISON = "a comparison of your own; kflats compress --size with --no-proof compares nothing"
_LEAST = -1e4  # log-probability: a model may exclude tokens
_LARGEST = 700.0  # exp of more is infinite


@dataclass(frozen=True)
class Measure:
    """One measured number beside the loss; ``original`` is the original's own, where it has one (a perplexity)."""

    name: str
    value: float
    original: float | None = None


@dataclass(frozen=True)
class Worst:
    """A sample whose outputs changed much: its loss, and the begin of its text or its number."""

    loss: float
    text: str


@dataclass(frozen=True)
class Outputs:
    """How far the outputs of a compressed model are from the original's.

    Args:
        kind: what the outputs are.
        inputs: what both models read: "texts", "sentences of kflats", or "drawn inputs" of a model that reads no text;
            "... with drawn images" of one that reads both in one call.
        samples: how many of them. places: vectors, labels or tokens that were compared.
        loss: 0 for equal outputs; ``docs/proof.md`` defines it for each kind.
        tail_loss: the 95th percentile over samples of a sample's own loss.
        measures: further numbers, such as the share of labels that stay.
        worst: the samples of the largest loss, if the tail is ``heavy``. They are shown, not saved: texts may be
            private, and a folder may be published.
    """

    kind: OutputKind
    inputs: str
    samples: int
    places: int
    loss: float
    tail_loss: float
    measures: tuple[Measure, ...]
    worst: tuple[Worst, ...] = field(default=(), compare=False)

    @property
    def quality(self) -> float:
        """1 - ``loss``: 1 for equal outputs."""
        return 1 - self.loss

    @property
    def heavy(self) -> bool:
        """Whether the tail is far below the mean: ``tail_loss`` > 4 ``loss``, and more than .02."""
        return self.tail_loss > max(_HEAVY * self.loss, _VISIBLE)

    @property
    def summary(self) -> str:
        """The loss and what it is of, in a line."""
        loss = f"loss {number(self.loss)} (quality {self.quality:.4f}), 95th percentile {number(self.tail_loss)}"
        return f"{self.kind}, {self.samples:,} {self.inputs}, {self.places:,} outputs compared: {loss}"

    def rows(self) -> list[list[str]]:
        """The measures as text: name, of the compressed model, of the original."""
        return [[m.name, f"{m.value:.4f}", "-" if m.original is None else f"{m.original:.4f}"] for m in self.measures]


@dataclass(frozen=True)
class _Item:
    """A sample, the positions whose outputs are compared (None: all), and the true tokens there, if there are any."""

    inputs: Sample
    places: Tensor | None = None
    targets: Tensor | None = None


class Judge:
    """Compares compressed models with one original, whose outputs are computed once.

        judge = Judge(original, tokenizer, texts)
        judge(compressed).quality

    Args:
        original: a model of transformers.
        tokenizer: its tokenizer; None for a model that reads no text.
        texts: that nothing was measured on; at most 256 evenly spaced ones are read. None: sentences of the package.
            A model that reads images or sounds gets drawn ones.
        batch: samples at once; fewer if the vocabulary is large. The result does not depend on it, but for rounding.
        seed: of the masked tokens and of drawn samples.

    Raises:
        KflatsError: no texts, no tokenizer, texts for a model that reads none, or a model whose outputs are none that
            kflats compares.
    """

    def __init__(
        self,
        original: nn.Module,
        tokenizer: Tokenizer | None = None,
        texts: Sequence[str] | None = None,
        *,
        batch: int = 32,
        seed: int = 0,
    ) -> None:
        self._tokenizer, self._seed = tokenizer, seed
        self._texts: tuple[str, ...] | None = None
        self._inputs = "drawn inputs"
        if inputs.modality_of(original) == "input_ids":
            self._inputs = "sentences of kflats" if texts is None else "texts"
            if len(inputs.read_together(original)) > 1:
                self._inputs += f" with drawn {inputs.spoken_modalities(original).removeprefix('texts and ')}"
            texts = packaged_texts("judge") if texts is None else texts
            check_texts(texts)
            count = min(JUDGED, len(texts))
            self._texts = tuple(texts[i * len(texts) // count] for i in range(count))
            if not count:
                raise KflatsError("there are no texts to compare outputs on", hint="give at least one sentence")
        elif texts is not None:
            raise KflatsError(
                f"texts are not supported with {type(original).__name__}, "
                f"which reads {inputs.spoken_modalities(original)}",
                hint="no texts: drawn inputs are compared",
            )
        samples = self._samples(original, tokenizer)
        longest = max(samples, key=inputs.length)
        self.kind, width = _kind_of(original, longest)
        """What the outputs are."""
        self._batch = max(1, min(batch, _NUMBERS // (width * inputs.length(longest))))  # logits of a batch
        draws = torch.Generator().manual_seed(seed)
        self._items = _thinned([self._item(one, draws) for one in samples], max(1, _NUMBERS // width))
        self._targets = [item.targets for item in self._items if item.targets is not None]
        self._expected, self._sample = self._answers(original, self._items)
        if not len(self._sample):
            raise KflatsError("the texts have too few tokens to compare outputs on", hint="texts of some words")

    def __call__(self, compressed: nn.Module, tokenizer: Tokenizer | None = None) -> Outputs:
        """The outputs of ``compressed`` beside the original's.

        Args:
            compressed: a model of the same kind.
            tokenizer: its own, if it has another vocabulary than the original's.

        Raises:
            KflatsError: outputs of other shapes, outputs that are not finite, or tokens of two vocabularies.
        """
        items = self._items if tokenizer is None else self._retokenized(compressed, tokenizer)
        after, sample = self._answers(compressed, items)
        if after.shape != self._expected.shape:
            raise _unlike(
                f"outputs of shapes {tuple(after.shape)} and {tuple(self._expected.shape)} cannot be compared"
            )
        losses, measures = _compared(self.kind, self._expected, after, self._targets)
        counts = sample.bincount(minlength=len(items))
        each = torch.zeros(len(items), dtype=losses.dtype).index_add_(0, sample, losses) / counts.clamp_min(1)
        outputs = Outputs(
            kind=self.kind,
            inputs=self._inputs,
            samples=int(counts.count_nonzero()),
            places=len(losses),
            loss=float(losses.mean()),
            tail_loss=float(each[counts > 0].quantile(0.95)),
            measures=measures,
        )
        worst = each.topk(min(_SHOWN, len(each))) if outputs.heavy else each[:0].sort()
        shown = zip(worst.values.tolist(), worst.indices.tolist(), strict=True)
        return replace(outputs, worst=tuple(Worst(loss, self._text(i)) for loss, i in shown))

    @property
    def text(self) -> Tensor | None:
        """(t,) the token ids of all texts one after the other; None without texts."""
        return None if self._texts is None else torch.cat([item.inputs["input_ids"].cpu() for item in self._items])

    def _samples(self, model: nn.Module, tokenizer: Tokenizer | None) -> list[Sample]:
        if self._texts is None:
            return inputs.drawn_samples(model, _DRAWN, seed=self._seed)
        return inputs.text_samples(model, tokenizer, self._texts)

    def _text(self, place: int) -> str:
        return f"input {place}" if self._texts is None else shorten(self._texts[place], _LETTERS, placeholder=" ...")

    def _retokenized(self, model: nn.Module, tokenizer: Tokenizer) -> list[_Item]:
        """The samples in the vocabulary of ``tokenizer``, where that is another."""
        if self._tokenizer is None or tokenizer.get_vocab() == self._tokenizer.get_vocab():
            return self._items
        if any(item.places is not None for item in self._items):
            raise KflatsError(
                f"the outputs of a {self.kind} cannot be compared under two vocabularies",
                hint="the trimmed model as the original",
            )
        return [_Item(one) for one in self._samples(model, tokenizer)]

    def _item(self, sample: Sample, draws: torch.Generator) -> _Item:
        ids = sample.get("input_ids")
        if ids is None:
            return _Item(sample, targets=sample.get("labels"))
        special = torch.tensor(sorted(getattr(self._tokenizer, "all_special_ids", ())), dtype=torch.long)
        own = torch.isin(ids, special, invert=True).nonzero().flatten()
        match self.kind:
            case "encoder" | "classifier" | "multi-label classifier" | "regression":
                return _Item(sample)
            case "token classifier":
                return _Item(sample, own)
            case "causal language model":
                return _Item(sample, torch.arange(len(ids) - 1), ids[1:])
            case "encoder-decoder":
                return _Item(sample, torch.arange(len(ids)), ids)
            case "masked language model":
                some = torch.randperm(len(own), generator=draws)[: max(1, round(_MASKED * len(own)))]
                places = own[some].sort().values
                mask = getattr(self._tokenizer, "mask_token_id", None)
                # Without a mask token the text stays as it is.
                masked = ids if mask is None else ids.index_fill(0, places, mask)
                return _Item({**sample, "input_ids": masked}, places, ids[places])

    def _answers(self, model: nn.Module, items: Sequence[_Item]) -> tuple[Tensor, Tensor]:
        """(P, width) float32 outputs at all places, in the order of the samples, and (P,) the sample of each place."""
        rows: list[Tensor] = [torch.empty(0)] * len(items)
        # Some classifiers read the last token, and know it by the padding.
        unpadded = getattr(getattr(model, "config", None), "pad_token_id", None) is None and items[0].places is None
        size = 1 if unpadded and self._texts is not None and self.kind != "encoder" else self._batch
        padding_id = pad_id(self._tokenizer, model)
        with explained(model, _OWN_COMPARISON), evaluating(model), torch.inference_mode():
            for picked, batch in inputs.batches([item.inputs for item in items], size, padding_id, device_of(model)):
                if self.kind == "encoder":
                    output: Tensor | None = F.normalize(_pooled(model, batch), dim=1)
                else:
                    output = task_output(run(model, batch))
                if output is None:
                    raise _unlike(f"{type(model).__name__} gives no logits, and the original does")
                output = by_position(output, batch).float()
                if len(output) != len(picked):
                    raise KflatsError(
                        f"outputs of {len(output)} parts for {len(picked)} samples are not supported with a comparison",
                        cause=f"{type(model).__name__} reads the samples of a batch as one",
                        hint="a size in place of a quality, and no proof",
                    )
                for i, one in zip(picked, output, strict=True):
                    rows[i] = self._rows(one, items[i].places).cpu()
        counts = torch.tensor([len(own) for own in rows])
        if len(widths := {own.shape[1] for own in rows}) > 1:
            raise KflatsError(
                f"outputs of {min(widths)} to {max(widths)} numbers are not supported with a comparison",
                cause=f"what {type(model).__name__} gives for a sample depends on the samples beside it",
                hint="a size in place of a quality, and no proof",
            )
        answers = torch.cat(rows).clone()
        check_finite(answers)
        return answers, torch.arange(len(rows)).repeat_interleave(counts)

    def _rows(self, output: Tensor, places: Tensor | None) -> Tensor:
        """(places, width) of one sample's output: numbers, or log-probabilities."""
        if self.kind in ("encoder", "regression"):
            return output.unsqueeze(0)
        if self.kind == "multi-label classifier":  # sigmoid(x) is the softmax of (x, 0)
            output = torch.stack([output, torch.zeros_like(output)], 1)
        elif output.ndim == 1:
            output = output.unsqueeze(0)
        logs = (output if places is None else output[places.to(output.device)]).log_softmax(-1)
        return logs.clamp_min(_LEAST)


def _unlike(symptom: str) -> KflatsError:
    return KflatsError(symptom, cause="the second model is not a compressed version of the first")


def _compared(
    kind: OutputKind, before: Tensor, after: Tensor, targets: Sequence[Tensor]
) -> tuple[Tensor, tuple[Measure, ...]]:
    """The loss of every place, and the other measures.

    Args:
        kind: of outputs. before, after: (P, width) numbers or log-probabilities.
        targets: the true tokens of a language model, P in sum.
    """
    match kind:
        case "encoder":
            fidelity, kept = fidelity_of(before, after), []
            if fidelity.neighbour_overlap is not None:
                kept.append(Measure("neighbours kept", fidelity.neighbour_overlap))
            mean, low = fidelity.mean_cosine, fidelity.p5_cosine
            # |a - b|^2 / 2 is 1 - cosine for vectors of length 1, without rounding where they are equal.
            losses = (before - after).double().square().sum(1) / 2
            return losses, (Measure("mean cosine", mean), Measure("5th percentile of cosine", low), *kept)
        case "regression":
            variance = (before - before.mean(0)).double().square().sum(1).mean().clamp_min(1e-12)
            losses = (before - after).double().square().sum(1) / variance
            return losses, (Measure("rms difference / standard deviation", float(losses.mean().sqrt())),)
    distance, divergence = _distances(before, after)
    kl = Measure("KL divergence, nats", float(divergence.mean()))
    same = float((before.argmax(1) == after.argmax(1)).double().mean())
    if not targets:
        return distance, (Measure("labels kept", same), kl)
    true = torch.cat(list(targets)).unsqueeze(1)
    surprise = (-one.gather(1, true).double().mean() for one in (after, before))
    new, old = (float(one.clamp_max(_LARGEST).exp()) for one in surprise)
    return divergence, (Measure("perplexity", new, old), kl, Measure("likeliest token kept", same))


def _distances(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """(P,) total variations and (P,) KL divergences of (P, width) log-probabilities, in float64.

    Each term of the divergence is p log(p / q) - p + q. These terms have the same sum as p log(p / q), because p and
    q sum to 1. None is negative, and an error of log q counts by q - p in place of p: the rounding of float32
    logits then hides no small divergence.
    """
    parts = []
    step = max(1, _TERMS // before.shape[1])
    for log_p, log_q in zip(before.split(step), after.split(step), strict=True):
        log_p, log_q = log_p.double(), log_q.double()
        p, q = log_p.exp(), log_q.exp()
        divergence = (p * (log_p - log_q) - p + q).sum(1).clamp_min(0)
        parts.append(torch.stack([(p - q).abs().sum(1) / 2, divergence]))
    distance, divergence = torch.cat(parts, 1)
    return distance, divergence


def _kind_of(model: nn.Module, sample: Sample) -> tuple[OutputKind, int]:
    """The kind of the outputs and the width of one, by the config and by the outputs for one sample.

    Raises:
        KflatsError: outputs that kflats does not compare, or a model that cannot run on these inputs alone.
    """
    language, decodes = inputs.has_language_head(model), is_encoder_decoder(model)
    config = getattr(model, "config", None)
    batch = inputs.collate([sample], 0, device_of(model))
    with explained(model, _OWN_COMPARISON), evaluating(model), torch.inference_mode():
        bare = decodes and not language and getattr(model, "base_model", model) is model
        logits = None if bare else task_output(run(model, batch))
        if logits is None:
            return "encoder", _pooled(model, batch).shape[1]
        logits = by_position(logits, batch)
        width = logits.shape[-1]
        if decodes and language:
            return "encoder-decoder", width
        if logits.ndim == 2:
            by_token = width == len(sample.get("input_ids", ())) != getattr(config, "num_labels", None)
            if not by_token:
                problem = getattr(config, "problem_type", None)
                if problem == "multi_label_classification":
                    return "multi-label classifier", width
                return "regression" if width == 1 or problem == "regression" else "classifier", width
        elif logits.ndim == 3:
            if not language or "input_ids" not in sample:
                return "token classifier", width
            # A later token changes no earlier output of a causal model.
            changed = batch["input_ids"].clone()
            changed[:, -1] = (changed[:, -1] + 1) % width
            other = task_output(run(model, {**batch, "input_ids": changed}))
            other = None if other is None else by_position(other, batch)
            causal = other is not None and torch.allclose(other[:, :-1], logits[:, :-1], rtol=1e-4, atol=1e-5)
            return "causal language model" if causal else "masked language model", width
    raise KflatsError(
        f"the outputs of {type(model).__name__} are not compared",
        cause=f"logits of shape {tuple(logits.shape)} are neither of labels nor of tokens",
        hint=_OWN_COMPARISON,
    )


def _pooled(model: nn.Module, batch: Sample) -> Tensor:
    """(B, d) float32 vectors of a model without its task head."""
    return pooled(model, batch, None).float()


def _thinned(items: list[_Item], most: int) -> list[_Item]:
    """The items with every n-th of their places, so that there are about ``most``."""
    step = -(-sum(len(item.places) for item in items if item.places is not None) // most)
    if step <= 1:
        return items
    parts = [[None if t is None else t[::step] for t in (item.places, item.targets)] for item in items]
    return [_Item(item.inputs, *part) for item, part in zip(items, parts, strict=True)]


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
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    counted: Sequence[str] = (),
    batch: int = 32,
    words: int = 500,
    compressed_tokenizer: Tokenizer | None = None,
) -> Fidelity:
    """Compare the vectors of two models for ``texts``, and for up to ``words`` rare words.

    Args:
        original, compressed: the models; tokenizer: of both. batch: texts at once.
        counted: texts on which the importance was counted. Rare words come from the tail of the vocabulary, and occur
            neither in these texts nor in ``texts``.
        compressed_tokenizer: the second model's, if it has another vocabulary (``trim``). None: ``tokenizer``.

    Returns:
        Cosines of the vectors, mean and 5th percentile, the share of nearest neighbours that stay, and the mean cosine
        of rare words.

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
        raise _unlike(f"vectors of {a.shape[1]} and of {b.shape[1]} numbers cannot be compared")
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


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a model's local folder; a clear error when it has none."""
    where = weights_folder(folder)
    if static_folder(folder) is not None:
        return fast_tokenizer(where)
    library = needed("transformers", "kflats[hf]", "a tokenizer")
    lost = KflatsError(
        f"{where} has no tokenizer that can be loaded",
        cause="its tokenizer files are missing or damaged, or the model reads no texts",
        hint="put the tokenizer's files into the folder",
    )
    # Without any vocabulary transformers makes a tokenizer that knows no words, and says nothing.
    if not any(any(where.glob(pattern)) for pattern in _VOCABULARIES):
        raise lost
    try:
        tokenizer: Tokenizer = library.AutoTokenizer.from_pretrained(
            where, trust_remote_code=trusts_remote_code(), local_files_only=True
        )
        return tokenizer
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged file
        raise lost from error


def weight_file_bytes(folder: str | os.PathLike[str]) -> int:
    """Bytes of the weight files in a model's folder, those of all modules of a sentence-transformers folder."""
    return sum(file.stat().st_size for file in weight_files(folder))


def memory_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, shared ones counted once; codes that are decoded late are decoded."""
    for _, layer in factored_layers(model):
        layer.complete_()
    held = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return sum(t.numel() * t.element_size() for t in held.values())
