"""What a compression did to a model's outputs: the same inputs through both models, compared by what outputs mean.

    encoder            loss = 1 - mean cosine of the pooled vectors
    classifiers        loss = mean total variation sum_c |p_c - q_c| / 2 of the distributions over labels
    regression         loss = mean square of the difference / variance of the original's values
    language models    loss = mean of KL(p || q) over tokens, in nats

``docs/proof.md`` justifies each. ``quality`` is 1 - loss. A *place* of a sample is a vector, a label, or a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from textwrap import shorten
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.common.formatting import number
from kflats.common.texts import check_texts, packaged_texts, pad_id
from kflats.evaluation.comparing import fidelity_of
from kflats.evaluation.encoding import check_finite, device_of, evaluating, last_hidden_state
from kflats.evaluation.running import is_encoder_decoder, pooled, run, task_output
from kflats.evaluation.samples import (
    Sample,
    batches,
    collate,
    drawn_samples,
    has_language_head,
    medium_of,
    text_samples,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind: TypeAlias = Literal[
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
_MASKED = 0.15
_NUMBERS = 2**26  # of the original's logits that are kept: 268 MB
_SHOWN = 3  # worst samples
_HEAVY, _VISIBLE = 4.0, 0.02
_LETTERS = 80  # of a worst text that is shown
_TAIL = 0.95
_TINY = 1e-12
_LARGEST = 700.0  # exp of more is infinite


@dataclass(frozen=True)
class Measure:
    """One measured number beside the loss; ``original`` is the original's own, where it has one (a perplexity)."""

    name: str
    value: float
    original: float | None = None


@dataclass(frozen=True)
class Worst:
    """A sample whose outputs changed most: its place among the samples, its loss, and the begin of its text.

    The text is shown and never saved: a folder may be published, and the texts may be private.
    """

    place: int
    loss: float
    text: str = field(default="", compare=False)


@dataclass(frozen=True)
class Outputs:
    """How far the outputs of a compressed model are from the original's.

    Args:
        kind: what the outputs are.
        inputs: what both models read; inputs are drawn if the model reads no text.
        samples: how many of them.
        places: vectors, labels or tokens that were compared.
        loss: 0 for equal outputs; ``docs/proof.md`` defines it for each kind. ``quality`` is 1 - ``loss``.
        tail_loss: the 95th percentile over samples of a sample's own loss.
        measures: further numbers, such as the agreement of labels.
        worst: the samples of the largest loss, if the tail is ``heavy``.
    """

    kind: Kind
    inputs: Literal["texts", "sentences of kflats", "drawn inputs"]
    samples: int
    places: int
    loss: float
    tail_loss: float
    measures: tuple[Measure, ...]
    worst: tuple[Worst, ...] = ()

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
        where = f"{self.kind}, {self.samples:,} {self.inputs}, {self.places:,} outputs compared"
        return (
            f"{where}: loss {number(self.loss)} (quality {self.quality:.4f}), 95th percentile {number(self.tail_loss)}"
        )

    def rows(self) -> list[list[str]]:
        """The measures as text: name, of the compressed model, of the original."""
        return [[m.name, f"{m.value:.4f}", "-" if m.original is None else f"{m.original:.4f}"] for m in self.measures]

    def without_texts(self) -> Outputs:
        """The same without the texts of the worst samples."""
        return replace(self, worst=tuple(replace(one, text="") for one in self.worst))


@dataclass(frozen=True)
class _Item:
    """A sample, the positions whose outputs are compared (None: all), and the true tokens there, if there are any."""

    inputs: Sample
    places: Tensor | None = None
    targets: Tensor | None = None


@dataclass(frozen=True)
class _Compared:
    """The loss of every place, the sample that it is of, and the other measures."""

    losses: Tensor
    sample: Tensor
    measures: tuple[Measure, ...]


class Judge:
    """Compares compressed models with one original, whose outputs are computed once.

        judge = Judge(original, tokenizer, texts)
        judge(compressed).quality

    Args:
        original: a model of transformers.
        tokenizer: its tokenizer; None for a model that reads no text.
        texts: that nothing was measured on; at most 256 evenly spaced ones are read. None: sentences of the package.
            A model that reads images or sounds gets drawn ones.
        batch: samples at once. The result does not depend on it, but for rounding.
        seed: of the masked tokens and of drawn samples.

    Raises:
        KflatsError: no texts, no tokenizer, or a model whose outputs are none that kflats compares.
    """

    kind: Kind

    def __init__(
        self,
        original: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        texts: Sequence[str] | None = None,
        *,
        batch: int = 32,
        seed: int = 0,
    ) -> None:
        self._tokenizer, self._batch, self._seed = tokenizer, batch, seed
        self._drawn = medium_of(original) != "input_ids"
        self._inputs: Literal["texts", "sentences of kflats", "drawn inputs"] = (
            "drawn inputs" if self._drawn else "sentences of kflats" if texts is None else "texts"
        )
        self._texts = () if self._drawn else _evenly(packaged_texts("judge") if texts is None else texts, JUDGED)
        if not self._drawn and not self._texts:
            raise KflatsError("there are no texts to compare outputs on", hint="give at least one sentence")
        samples = self._samples(original, tokenizer)
        self.kind, width = _kind_of(original, max(samples, key=_length))
        self._items = self._compared(samples, max(1, _NUMBERS // width))
        self._expected = dict(self._answers(original, self._items))

    def __call__(self, compressed: nn.Module, tokenizer: PreTrainedTokenizerBase | None = None) -> Outputs:
        """The outputs of ``compressed`` beside the original's.

        Args:
            compressed: a model of the same kind.
            tokenizer: its own, if it has another vocabulary than the original's.

        Raises:
            KflatsError: outputs of other shapes, outputs that are not finite, or tokens of two vocabularies.
        """
        items = self._items if tokenizer is None else self._retokenized(compressed, tokenizer)
        compared = self._compare(self._answers(compressed, items))
        counts = compared.sample.bincount(minlength=len(items))
        each = torch.zeros(len(items), dtype=torch.float64).index_add_(0, compared.sample, compared.losses)
        each = each / counts.clamp_min(1)
        outputs = Outputs(
            kind=self.kind,
            inputs=self._inputs,
            samples=int(counts.count_nonzero()),
            places=len(compared.losses),
            loss=float(compared.losses.mean()),
            tail_loss=float(each[counts > 0].quantile(_TAIL)),
            measures=compared.measures,
        )
        if not outputs.heavy:
            return outputs
        worst = each.topk(min(_SHOWN, len(each)))
        shown = zip(worst.indices.tolist(), worst.values.tolist(), strict=True)
        return replace(outputs, worst=tuple(Worst(i, loss, self._text(i)) for i, loss in shown))

    def _samples(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> list[Sample]:
        if self._drawn:
            return drawn_samples(model, _DRAWN, seed=self._seed)
        return text_samples(model, tokenizer, self._texts)

    def _retokenized(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[_Item]:
        """The samples in the vocabulary of ``tokenizer``, where that is another."""
        if self._tokenizer is None or tokenizer.get_vocab() == self._tokenizer.get_vocab():
            return self._items
        if any(item.places is not None for item in self._items):
            raise KflatsError(
                f"the outputs of a {self.kind} cannot be compared under two vocabularies",
                cause="the vocabulary of one of the models was trimmed",
                hint="the trimmed model as the original",
            )
        return [_Item(one) for one in self._samples(model, tokenizer)]

    def _text(self, place: int) -> str:
        return "" if self._drawn else shorten(self._texts[place], _LETTERS, placeholder=" ...")

    def _compared(self, samples: Sequence[Sample], most: int) -> list[_Item]:
        """The samples with the positions that are compared: ``most`` in sum, evenly spaced, where there are more."""
        draws = torch.Generator().manual_seed(self._seed)
        items = [self._item(one, draws) for one in samples]
        total = sum(len(item.places) for item in items if item.places is not None)
        if any(item.places is not None for item in items) and not total:
            raise KflatsError("the texts have too few tokens to compare outputs on", hint="texts of some words")
        return items if total <= most else list(_thinned(items, most, total))

    def _item(self, sample: Sample, draws: torch.Generator) -> _Item:
        if self._drawn:
            return _Item(sample, targets=sample.get("labels"))
        ids = sample["input_ids"]
        match self.kind:
            case "encoder" | "classifier" | "multi-label classifier" | "regression":
                return _Item(sample)
            case "token classifier":
                return _Item(sample, self._ordinary(ids))
            case "causal language model":
                return _Item(sample, torch.arange(len(ids) - 1), ids[1:])
            case "masked language model":
                return self._masked(sample, draws)
            case "encoder-decoder":
                return _Item(sample, torch.arange(len(ids)), ids)

    def _ordinary(self, ids: Tensor) -> Tensor:
        """The positions of a text's own tokens; those of special tokens are left out."""
        special = torch.tensor(sorted(getattr(self._tokenizer, "all_special_ids", ())), dtype=torch.long)
        return torch.isin(ids, special, invert=True).nonzero().flatten()

    def _masked(self, sample: Sample, draws: torch.Generator) -> _Item:
        """The sample with the mask token at 15 % of its own tokens; as it is if the tokenizer has no such token."""
        ids = sample["input_ids"]
        own = self._ordinary(ids)
        places = own[torch.randperm(len(own), generator=draws)[: max(1, round(_MASKED * len(own)))]].sort().values
        mask = getattr(self._tokenizer, "mask_token_id", None)
        masked = ids if mask is None else ids.index_fill(0, places, mask)
        return _Item({**sample, "input_ids": masked}, places, ids[places])

    def _answers(self, model: nn.Module, items: Sequence[_Item]) -> Iterator[tuple[int, Tensor]]:
        """Each sample's compared outputs, (places, width) float32 on the CPU, in batches of similar length."""
        config = getattr(model, "config", None)
        # Some classifiers read the last token, and know it by the padding.
        alone = not self._drawn and getattr(config, "pad_token_id", None) is None and items[0].places is None
        samples = [item.inputs for item in items]
        parts = batches(samples, 1 if alone else self._batch, pad_id(self._tokenizer, model), device_of(model))
        with _explained(model), evaluating(model), torch.inference_mode():
            for picked, batch in parts:
                if self.kind == "encoder":
                    output = F.normalize(_pooled(model, batch), dim=1)
                else:
                    logits = task_output(run(model, batch))
                    if logits is None:
                        raise KflatsError(f"{type(model).__name__} gives no logits, and the original does")
                    output = logits.float()
                for i, one in zip(picked, output, strict=True):
                    rows = self._rows(one, items[i].places).cpu()
                    check_finite(rows)
                    yield i, rows.clone()

    def _rows(self, output: Tensor, places: Tensor | None) -> Tensor:
        """(places, width) of one sample's output: logits of distributions, or numbers."""
        if self.kind == "multi-label classifier":
            return torch.stack([output, torch.zeros_like(output)], 1)  # sigmoid(x) is the softmax of (x, 0)
        if output.ndim == 1:
            return output.unsqueeze(0)
        rows = output.flatten(1).mT if output.ndim == 3 else output  # the logits of pixels: labels come first
        return rows if places is None else rows[places.to(rows.device)]

    def _compare(self, answers: Iterable[tuple[int, Tensor]]) -> _Compared:
        match self.kind:
            case "encoder":
                return _vectors(*self._whole(answers))
            case "regression":
                return _values(*self._whole(answers))
            case "classifier" | "multi-label classifier" | "token classifier":
                return _labels(self._shifts(answers))
            case "causal language model" | "masked language model" | "encoder-decoder":
                return _tokens(self._shifts(answers))

    def _whole(self, answers: Iterable[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
        """(samples, width) outputs of the original and of the compressed model."""
        rows = dict(answers)
        order = sorted(rows)
        before, after = (torch.cat([one[i] for i in order]).double() for one in (self._expected, rows))
        _check_shapes(before, after)
        return before, after

    def _shifts(self, answers: Iterable[tuple[int, Tensor]]) -> Tensor:
        """(places, 6): the sample, total variation, KL, whether the likeliest is the same, and both models' surprise
        at the true token (0 where there is none)."""
        parts = []
        for i, rows in answers:
            _check_shapes(self._expected[i], rows)
            before, after = (one.log_softmax(-1) for one in (self._expected[i], rows))
            p = before.exp()
            varied = (p - after.exp()).abs().sum(-1) / 2
            divergence = (p * (before - after)).sum(-1).clamp_min(0)
            same = before.argmax(-1) == after.argmax(-1)
            targets = self._items[i].targets
            surprise = [
                torch.zeros(len(rows)) if targets is None else -one.gather(1, targets.unsqueeze(1)).squeeze(1)
                for one in (before, after)
            ]
            sample = torch.full((len(rows),), i)
            parts.append(torch.stack([sample, varied, divergence, same, *surprise], 1).double())
        return torch.cat(parts)


def _kind_of(model: nn.Module, sample: Sample) -> tuple[Kind, int]:
    """The kind of the outputs and the width of one, by the config and by the outputs for one sample.

    Raises:
        KflatsError: outputs that kflats does not compare, or a model that cannot run on these inputs alone.
    """
    language, decodes = has_language_head(model), is_encoder_decoder(model)
    config = getattr(model, "config", None)
    batch = collate([sample], 0, device_of(model))
    with _explained(model), evaluating(model), torch.inference_mode():
        bare = decodes and not language and getattr(model, "base_model", model) is model
        logits = None if bare else task_output(run(model, batch))
        if logits is None:
            return "encoder", _pooled(model, batch).shape[1]
        width = logits.shape[1 if logits.ndim == 4 else -1]
        if decodes and language:
            return "encoder-decoder", width
        if logits.ndim == 2:
            by_token = width == len(sample.get("input_ids", ())) != getattr(config, "num_labels", None)
            if not by_token:
                problem = getattr(config, "problem_type", None)
                if problem == "multi_label_classification":
                    return "multi-label classifier", width
                return "regression" if width == 1 or problem == "regression" else "classifier", width
        elif logits.ndim in (3, 4):
            if not language or "input_ids" not in sample:
                return "token classifier", width
            # A later token changes no earlier output of a causal model.
            changed = batch["input_ids"].clone()
            changed[:, -1] = (changed[:, -1] + 1) % width
            other = task_output(run(model, {**batch, "input_ids": changed}))
            causal = other is not None and torch.allclose(other[:, :-1], logits[:, :-1], rtol=1e-4, atol=1e-5)
            return "causal language model" if causal else "masked language model", width
    raise KflatsError(
        f"the outputs of {type(model).__name__} are not compared",
        cause=f"logits of shape {tuple(logits.shape)} are neither of labels nor of tokens",
        hint="kflats.fidelity, which compares the vectors under the head",
        command="--no-proof",
    )


def _pooled(model: nn.Module, batch: Sample) -> Tensor:
    """(B, d) float32 means of the last hidden states, over the text's own tokens, or over all places of an image."""
    if "input_ids" in batch:
        return pooled(model, batch, None).float()
    hidden = last_hidden_state(model, {name: value for name, value in batch.items() if name != "labels"})
    return (hidden.flatten(2).mean(2) if hidden.ndim == 4 else hidden.mean(1)).float()


def _vectors(before: Tensor, after: Tensor) -> _Compared:
    fidelity = fidelity_of(before, after)
    measures = [Measure("mean cosine", fidelity.mean_cosine), Measure("5th percentile of cosine", fidelity.p5_cosine)]
    if fidelity.neighbour_overlap is not None:
        measures.append(Measure("neighbours kept", fidelity.neighbour_overlap))
    # |a - b|^2 / 2 is 1 - cosine for vectors of length 1, without rounding where they are equal.
    return _Compared((before - after).square().sum(1) / 2, torch.arange(len(before)), tuple(measures))


def _values(before: Tensor, after: Tensor) -> _Compared:
    variance = (before - before.mean(0)).square().sum(1).mean().clamp_min(_TINY)
    losses = (before - after).square().sum(1) / variance
    error = Measure("rms difference / standard deviation", float(losses.mean().sqrt()))
    return _Compared(losses, torch.arange(len(before)), (error,))


def _labels(shifts: Tensor) -> _Compared:
    sample, varied, divergence, same, _, _ = shifts.unbind(1)
    measures = Measure("labels kept", float(same.mean())), Measure("KL, nats", float(divergence.mean()))
    return _Compared(varied, sample.long(), measures)


def _tokens(shifts: Tensor) -> _Compared:
    sample, _, divergence, same, before, after = shifts.unbind(1)
    perplexity = Measure("perplexity", *(float(one.mean().clamp_max(_LARGEST).exp()) for one in (after, before)))
    measures = (
        Measure("KL of a token, nats", float(divergence.mean())),
        perplexity,
        Measure("likeliest token kept", float(same.mean())),
    )
    return _Compared(divergence, sample.long(), measures)


def _thinned(items: Sequence[_Item], most: int, total: int) -> Iterator[_Item]:
    """The items with ``most`` of all their ``total`` places, evenly spaced."""
    first = 0
    for item in items:
        assert item.places is not None
        count = torch.arange(first, first + len(item.places))
        kept = (count + 1) * most // total > count * most // total
        yield replace(item, places=item.places[kept], targets=None if item.targets is None else item.targets[kept])
        first += len(kept)


def _evenly(texts: Sequence[str], count: int) -> tuple[str, ...]:
    """``count`` evenly spaced texts: files are often sorted by topic."""
    check_texts(texts)
    count = min(count, len(texts))
    return tuple(texts[i * len(texts) // count] for i in range(count))


def _length(sample: Sample) -> int:
    return len(next(iter(sample.values())))


def _check_shapes(before: Tensor, after: Tensor) -> None:
    if before.shape != after.shape:
        raise KflatsError(
            f"outputs of shape {tuple(after.shape)} and of {tuple(before.shape)} cannot be compared",
            cause="the second model is not a compressed version of the first",
        )


@contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """Errors of the model's own code, for inputs that are not enough for it, become a KflatsError."""
    try:
        yield
    except KflatsError:
        raise
    except (ValueError, TypeError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise KflatsError(
            f"{type(model).__name__} cannot be run on these inputs alone: {reason[:200]}",
            cause="a model that reads several things at once, or texts that it cannot read",
            hint="kflats.fidelity, or a comparison of your own",
            command="--no-proof",
        ) from error
