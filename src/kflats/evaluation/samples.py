"""What a model of any kind reads, one sample at a time: token ids, images, sounds; drawn by seed where there are none.

A sample is a mapping of tensors without a batch axis, and ``collate`` makes a batch of some. A sample of an
encoder-decoder with a language head has ``labels`` too: the text, which its decoder reads shifted by one position.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.common.texts import batches_by_length, padded_batch, tokenize_texts
from kflats.evaluation.encoding import MAX_TOKENS
from kflats.evaluation.running import is_encoder_decoder
from kflats.model.weights import vocabulary_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Sample: TypeAlias = Mapping[str, Tensor]
Medium: TypeAlias = Literal["input_ids", "pixel_values", "input_features", "input_values"]
"""The names under which models of transformers read texts, images, spectrograms and sounds."""

_SOUND = 16_000  # numbers: a second at the usual rate
_IMAGE = 224  # pixels of a side where the config does not say
_DECODED = 16  # tokens for the decoder of a model that does not read text


def medium_of(model: nn.Module) -> Medium:
    """What ``model`` reads, by the arguments of its forward.

    Raises:
        KflatsError: none of the inputs that transformers' models have.
    """
    arguments = inspect.signature(model.forward).parameters
    for medium in get_args(Medium):
        if medium in arguments:
            return medium  # type: ignore[no-any-return]
    raise KflatsError(
        f"the inputs of {type(model).__name__} are unknown",
        cause=f"its forward has none of {', '.join(get_args(Medium))}",
        hint="a model of transformers",
    )


def has_language_head(model: nn.Module) -> bool:
    """Whether the outputs are distributions over the vocabulary."""
    return vocabulary_end(model, "get_output_embeddings") is not None


def text_samples(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    texts: Sequence[str],
    max_tokens: int = MAX_TOKENS,
) -> list[Sample]:
    """One sample a text, cut at ``max_tokens`` and at the model's own limit.

    Raises:
        KflatsError: no tokenizer, or a tokenizer of another model.
    """
    rows = tokenize_texts(tokenizer, texts, max_tokens, model)
    return [_with_labels(model, {"input_ids": torch.tensor(row)}) for row in rows]


def drawn_samples(model: nn.Module, count: int, tokens: int = 32, seed: int = 0) -> list[Sample]:
    """``count`` samples of the shapes that the model's config has, drawn by ``seed``.

    Token ids are drawn uniformly from the vocabulary, ``tokens`` of them or as many as the model has positions. Images
    and sounds are noise whose amplitude falls with frequency, as that of pictures and speech does, of mean 0 and
    variance 1, as processors make them.

    Raises:
        KflatsError: inputs of an unknown name, or a config that lacks their shape.
    """
    medium, draws = medium_of(model), torch.Generator().manual_seed(seed)
    config = _config(model, medium)
    if medium == "input_ids":
        text = config.get_text_config()
        length = min(tokens, getattr(text, "max_position_embeddings", None) or tokens)
        ids = torch.randint(0, text.vocab_size, (count, length), generator=draws)
        if isinstance(end := getattr(text, "eos_token_id", None), int) and is_encoder_decoder(model):
            ids = torch.where(ids == end, (end + 1) % text.vocab_size, ids)
            ids[:, -1] = end  # classifiers of encoder-decoders read the one end of each text
        return [_with_labels(model, {"input_ids": row}) for row in ids]
    values = _noise((count, *_shape(config, medium)), draws)
    if not (is_encoder_decoder(model) and has_language_head(model)):
        return [{medium: one} for one in values]
    vocabulary = model.config.get_text_config(decoder=True).vocab_size  # type: ignore[union-attr, operator]
    labels = torch.randint(0, vocabulary, (count, _DECODED), generator=draws)
    return [{medium: one, "labels": row} for one, row in zip(values, labels, strict=True)]


def collate(samples: Sequence[Sample], filler: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """One batch: token ids padded at the right with ``filler``, labels with 0, and the attention mask of the ids.

    >>> collate([{"input_ids": torch.tensor([5, 6])}, {"input_ids": torch.tensor([7])}], 9)["input_ids"].tolist()
    [[5, 6], [7, 9]]
    """
    if "input_ids" in samples[0]:
        return padded_batch(samples, filler, device)
    return {name: torch.stack([one[name] for one in samples]).to(device) for name in samples[0]}


def batches(
    samples: Sequence[Sample], batch: int, filler: int, device: torch.device
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """The places of the samples of each batch, and the batch; the longest texts first."""
    for places in batches_by_length([length(one) for one in samples], batch):
        yield places, collate([samples[i] for i in places], filler, device)


def length(sample: Sample) -> int:
    """The number of a text's tokens, or of the first axis of another input."""
    return len(next(iter(sample.values())))


def _with_labels(model: nn.Module, sample: dict[str, Tensor]) -> Sample:
    if is_encoder_decoder(model) and has_language_head(model):
        sample["labels"] = sample["input_ids"]
    return sample


def _config(model: nn.Module, medium: Medium) -> Any:
    """The config of the part that reads: that of the image or sound encoder of a model of several parts."""
    config: Any = getattr(model, "config", None)
    if medium != "input_ids":
        inner = (getattr(config, name, None) for name in ("vision_config", "audio_config", "encoder"))
        config = next((one for one in inner if hasattr(one, "to_dict")), config)
    return config


def _shape(config: Any, medium: Medium) -> tuple[int, ...]:
    """The shape of one input; spectrograms have their numbers of bands and of frames in the config."""
    bands, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
    if medium == "pixel_values":
        side = getattr(config, "image_size", None) or _IMAGE
        sides = (side, side) if isinstance(side, int) else tuple(side)
        return (getattr(config, "num_channels", 3), *sides)
    if medium == "input_features" and (positions := getattr(config, "max_source_positions", None)) and bands:
        return (bands, 2 * positions)  # Whisper's encoder halves the number of frames
    if medium == "input_values":
        return (frames, bands) if bands and isinstance(frames, int) else (_SOUND,)
    raise KflatsError(
        f"the shape of the inputs of {type(config).__name__.removesuffix('Config')} is unknown",
        cause=f"its config has no shape of {medium}",
        hint="a model that reads texts, images, or sounds",
    )


def _noise(shape: tuple[int, ...], draws: torch.Generator) -> Tensor:
    """(count, ...) float32 noise, amplitude ~ 1 / frequency over the last one or two axes, mean 0 and variance 1."""
    white = torch.randn(shape, generator=draws)
    axes = tuple(range(-min(2, len(shape) - 1), 0))
    grids = [torch.fft.fftfreq(shape[axis]) for axis in axes[:-1]] + [torch.fft.rfftfreq(shape[-1])]
    frequency = sum(grid.square() for grid in torch.meshgrid(*grids, indexing="ij")).sqrt()  # type: ignore[union-attr]
    frequency.view(-1)[0] = torch.inf  # no constant
    pink: Tensor = torch.fft.irfftn(torch.fft.rfftn(white, dim=axes) / frequency, s=[shape[a] for a in axes], dim=axes)
    return pink / pink.flatten(1).std(1).view(-1, *[1] * (len(shape) - 1)).clamp_min(1e-12)
