"""Inputs that a model may read, by the names of its forward's arguments and the sizes in its config."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from tiny_configs import WORDS
from torch import Tensor, nn

_TOKENS = 8


def outputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every floating-point tensor of what the model gives, by path; models that draw noise draw the same."""
    torch.manual_seed(0)
    with torch.no_grad():
        found = dict(_tensors(model(**batch), ""))
    return {name: value.detach().clone() for name, value in found.items()}


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _tensors(one, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for place, one in enumerate(value):
            yield from _tensors(one, f"{path}.{place}")


def runnable(model: nn.Module) -> dict[str, Any] | None:
    """The first of ``guesses`` that the model runs on; None where it runs on none."""
    for batch in guesses(model):
        try:
            if outputs(model, batch):
                return batch
        except Exception:  # a model refuses inputs in any way it likes
            continue
    return None


def guesses(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Batches of two samples, likeliest first."""
    arguments = inspect.signature(model.forward).parameters
    required = [
        n for n, p in arguments.items() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    main = [name for name in _MAIN if name in arguments]
    sets = [[name] for name in main] + [main[:2], main]
    if "input_ids" in arguments and "decoder_input_ids" in arguments:
        sets.insert(0, ["input_ids", "decoder_input_ids"])
    if "bbox" in arguments:
        sets.insert(0, ["input_ids", "bbox"])
    if "decoder_input_ids" in arguments:
        sets += [[name, "decoder_input_ids"] for name in main]
    sets += [[name for name in arguments if name in _SHAPES]]
    seen = []
    for names in [required, *sets] if required else sets:
        names = list(dict.fromkeys([*required, *names]))
        if names in seen or not names or any(name not in _SHAPES for name in names):
            continue
        seen.append(names)
        for values in list(product(*(_SHAPES[name](model) for name in names)))[:24]:
            yield dict(zip(names, values, strict=True))


def _settings(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            yield from _settings(value)


def setting(model: nn.Module, *names: str) -> list[Any]:
    """All values of a setting of these names in the config and its sub-configs, each once."""
    found: list[Any] = []
    for config in _settings(model.config):
        for name in names:
            value = getattr(config, name, None)
            if value is not None and value not in found:
                found.append(value)
    return found


def sizes(model: nn.Module, *names: str) -> list[int]:
    """As ``setting``, of whole numbers alone."""
    return [one for one in setting(model, *names) if isinstance(one, int) and not isinstance(one, bool)]


def _ids(model: nn.Module) -> list[Tensor]:
    vocabularies = sizes(model, "vocab_size") or [32]
    draws = torch.Generator().manual_seed(1)
    high = min(WORDS, *vocabularies)
    ids = torch.randint(min(5, high - 1), high, (2, _TOKENS), generator=draws)
    ends = [end for end in sizes(model, "eos_token_id") if 0 <= end < max(vocabularies)]
    made = [ids, *(torch.cat([ids[:, :-1], torch.full((2, 1), end)], 1) for end in ends)]
    codebooks = sizes(model, "num_codebooks", "num_channels", "n_codebooks")
    return made + [ids[:, :, None].expand(-1, -1, n).contiguous() for n in codebooks[:1]]


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _sides(model: nn.Module) -> list[tuple[int, int]]:
    made = []
    for size in [*setting(model, "image_size", "img_size", "input_size", "pretrain_image_size"), 64, 224]:
        pair = (size, size) if isinstance(size, int) else tuple(size)[-2:] if isinstance(size, list | tuple) else None
        if pair is not None and len(pair) == 2 and pair not in made:
            made.append(pair)
    return made[:4]


def _images(model: nn.Module) -> list[Tensor]:
    channels = (sizes(model, "num_channels", "in_channels", "in_chans") or [3])[0]
    images = [_drawn(2, channels, *side) for side in _sides(model)]
    frames = (sizes(model, "num_frames", "frames_per_clip") or [2])[0]
    videos = [_drawn(2, frames, channels, *side) for side in _sides(model)[:2]]
    return [*videos, *images] if setting(model, "tubelet_size", "num_frames") else [*images, *videos]


_BANDS = [
    *("num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size", "input_dim", "feature_projection_input_dim"),
    *("input_feat_size", "spectrogram_bins"),
]


def _spectra(model: nn.Module) -> list[Tensor]:
    bands = sizes(model, *_BANDS) or [80]
    frames = [2 * n for n in sizes(model, "max_source_positions")] + sizes(model, "max_length", "spec_size") + [128]
    shapes = [shape for b in bands[:2] for f in frames[:2] for shape in ((b, f), (f, b), (1, f, b))]
    return [_drawn(2, *shape) for shape in shapes]


def _sounds(model: nn.Module) -> list[Tensor]:
    return [_drawn(2, 4000), _drawn(2, 1, 4000), _drawn(2, 16000), *_spectra(model)[:4]]


def _past(model: nn.Module) -> list[Tensor]:
    length = (sizes(model, "context_length") or [64])[0]
    lags = max([max(n) for n in setting(model, "lags_sequence") if n] or [0])
    return [_drawn(2, length + lags), _drawn(2, length, (sizes(model, "num_input_channels") or [1])[0])]


def _time(model: nn.Module) -> list[Tensor]:
    counts = [*sizes(model, "num_time_features"), 1]
    return [_drawn(*_past(model)[0].shape, n) for n in {*counts, *(n + 1 for n in counts)} if n]


def _patches(model: nn.Module) -> list[Tensor]:
    """(patches, numbers) of images that a processor has cut, for a grid of 4 x 4."""
    patch, frames = (sizes(model, "patch_size") or [14])[0], (sizes(model, "temporal_patch_size") or [1])[0]
    channels = (sizes(model, "in_channels", "num_channels", "in_chans") or [3])[0]
    flat = _drawn(16, channels * frames * patch * patch)
    return [flat, _drawn(1, 16, channels * patch * patch), _drawn(16, channels, patch, patch)]


def _hidden(model: nn.Module) -> list[Tensor]:
    widths = sizes(model, "hidden_size", "d_model", "embed_dim", "input_dim", "dim") or [64]
    made = [_drawn(2, _TOKENS, width) for width in widths[:2]]
    made[:0] = _patches(model)[:1]
    return made


_MAIN = [
    *("input_ids", "pixel_values", "input_features", "input_values", "pixel_values_videos", "audio_values"),
    *("past_values", "inputs_embeds", "hidden_states", "inputs", "features"),
]
_SHAPES: dict[str, Any] = {
    "input_ids": _ids,
    "decoder_input_ids": lambda model: [_ids(model)[0], _ids(model)[-1]],
    "attention_mask": lambda model: [torch.ones(2, _TOKENS, dtype=torch.long)],
    "pixel_values": lambda model: [*_images(model), *_patches(model)],
    "pixel_values_videos": lambda model: list(reversed(_images(model))),
    "input_features": _spectra,
    "audio_values": _sounds,
    "input_values": _sounds,
    "bbox": lambda model: [torch.tensor([[[1, 2, 3, 4]] * _TOKENS] * 2)],
    "past_values": _past,
    "past_time_features": _time,
    "past_observed_mask": lambda model: [torch.ones_like(one) for one in _past(model)],
    "inputs_embeds": _hidden,
    "hidden_states": _hidden,
    "features": _hidden,
    "inputs": lambda model: [*_hidden(model), *_ids(model)],
    "grid_thw": lambda model: [torch.tensor([[1, 4, 4]]), torch.tensor([[4, 4]])],
    "image_grid_thw": lambda model: [torch.tensor([[1, 4, 4]])],
    "encoder_hidden_states": lambda model: _hidden(model)[-1:],
}
