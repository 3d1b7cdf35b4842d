"""What models read and give: samples and batches, drawn by seed where there are none; runs, outputs, sentence vectors.

A sample is a mapping of tensors without a batch axis, and ``collate`` makes a batch of some. A sample of an
encoder-decoder with a language head has ``labels`` too: the text, which its decoder reads shifted by one position. Only
this module distinguishes encoders, decoders and encoder-decoders.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError, NotFiniteError, first_line
from kflats.common.machine import is_out_of_memory
from kflats.common.texts import Tokenizer, batches_by_length, pad_id, padded_batch, tokenize_texts
from kflats.matrices.layers import FactoredEmbedding
from kflats.model.weights import is_sentence_transformer, vocabulary_end

BatchValue: TypeAlias = Tensor | bool | int | float | str | None
Batch: TypeAlias = Mapping[str, BatchValue]
"""The keyword arguments of ``model(**batch)``: tensors of its samples, and settings that hold for all samples."""

ModelOutput: TypeAlias = object
"""What a model gives: a tensor, a mapping of tensors, or a value that has them as attributes."""

MAX_TOKENS = 256
"""Tokens of one text: enough for sentences and paragraphs."""
_MARKS = ("Ġ", "▁")  # how byte-level BPE and SentencePiece write the blank before a word


def encode(
    model: nn.Module,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    batch: int = 32,
    *,
    max_tokens: int = MAX_TOKENS,
) -> Tensor:
    """One unit vector a text: the mean of the last hidden states over the text's own tokens.

    An encoder-decoder runs its encoder alone. A task head is left out. Texts run in batches of similar length, padded
    at the right, in eval mode and without gradients. Afterwards each module has its own mode again. The tokenizer needs
    no padding token.

    Args:
        model: a transformers model.
        tokenizer: its tokenizer.
        texts: at least one.
        batch: texts at once.
        max_tokens: longer texts are cut (at the model's own limit if that is less).

    Returns:
        (texts, hidden) float32 on the CPU, in the order of ``texts``.

    Raises:
        KflatsError: no texts, a batch size below 1, no tokenizer, a tokenizer of another model, or outputs that are
            not finite.
    """
    if not texts:
        raise KflatsError("there are no texts to encode", hint="give at least one sentence")
    rows = tokenize_texts(tokenizer, texts, max_tokens, model)
    padding_id, device = pad_id(tokenizer, model), device_of(model)
    out: Tensor | None = None
    with evaluating(model), torch.inference_mode():
        for picked in batches_by_length([len(row) for row in rows], batch):
            inputs = padded_batch([{"input_ids": rows[i]} for i in picked], padding_id, device)
            hidden = last_hidden_state(model, inputs).float()
            mean = mean_over_tokens(hidden, inputs["attention_mask"])
            out = torch.empty(len(rows), mean.shape[1]) if out is None else out
            out[picked] = F.normalize(mean, dim=1).cpu()
    assert out is not None
    check_finite(out)
    return out.clone()  # an ordinary tensor, not one of inference mode


def check_finite(outputs: Tensor) -> None:
    """Raises KflatsError for outputs that hold NaN or infinity."""
    if not torch.isfinite(outputs).all():
        raise NotFiniteError(
            "the model's outputs are not finite", hint="the model in float32, or another copy of its weights"
        )


def last_hidden_state(model: nn.Module, inputs: Batch) -> Tensor:
    """(texts, tokens, hidden) of a transformers model without its task head."""
    hidden = entry(_without_head(model, inputs), "last_hidden_state")
    if not isinstance(hidden, Tensor):
        raise KflatsError(f"{type(model).__name__} gives no last hidden state", hint="a text model of transformers")
    return hidden


def _without_head(model: nn.Module, inputs: Batch) -> ModelOutput:
    """What a transformers model gives without its task head; an encoder-decoder runs its encoder alone."""
    bare: Any = model
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        bare = bare.get_encoder()
    else:
        base = getattr(bare, "base_model", bare)
        arguments = inspect.signature(base.forward).parameters
        # The base of some models (SLANet) is a part that reads what another part gives.
        bare = base if arguments.keys() >= {name for name in inputs if name in get_args(Modality)} else bare
    output: ModelOutput = bare(**inputs)
    return output


def rare_words(tokenizer: Tokenizer, seen: Sequence[str] = (), count: int = 500) -> tuple[str, ...]:
    """Whole words from the tail of the vocabulary, one token each, that do not occur in the texts ``seen``.

    Vocabularies are ordered by frequency, or nearly so; the tail is the last quarter. ``count`` words are taken from
    it at even steps, so that every call gives the same words. A word has three letters or more, and letters only; a
    vocabulary of characters has no such word.
    """
    shown = {i for row in tokenizer(list(seen), truncation=False)["input_ids"] for i in row} if seen else set()
    special = set(tokenizer.all_special_ids)
    size = len(tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
    marked = sum(str(t).startswith(_MARKS) for t in tokens) * 10 > size
    words = []
    for token_id in range(size - size // 4, size):
        token = str(tokens[token_id])
        word = token[1:] if token.startswith(_MARKS) else token
        whole = token.startswith(_MARKS) if marked else True
        if whole and len(word) >= 3 and word.isalpha() and token_id not in special | shown:
            words.append((token_id, f" {word}" if token.startswith(_MARKS[0]) else word))
    # The tokenizer never gives some entries (a word that it always splits).
    ids = tokenizer([word for _, word in words])["input_ids"] if words else []
    kept = [word for (token_id, word), row in zip(words, ids, strict=True) if token_id in row]
    step = max(1, len(kept) // count)
    return tuple(kept[::step][:count])


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter; the CPU where it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards each module has its own mode again (some may have been in eval mode before)."""
    before = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def widened(model: nn.Module, *dtypes: torch.dtype, changed: bool, without: Collection[int] = ()) -> Iterator[bool]:
    """Inside, parameters and buffers of the types ``dtypes`` are float32; afterwards they have their own types again.

    Args:
        changed: whether their numbers change inside, so that they are rounded afterwards. Otherwise the tensors of
            before return, which may be mapped files.
        without: ids of parameters that stay as they are.

    Yields:
        Whether a parameter was widened.
    """
    wide = [p for p in model.parameters() if p.dtype in dtypes and id(p) not in without]
    parameters = [(p, p.dtype, None if changed else p.data) for p in wide]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.dtype in dtypes
    ]
    tables = [m for m in model.modules() if isinstance(m, FactoredEmbedding) and m.out_dtype in dtypes]
    outs = [table.out_dtype for table in tables]
    try:
        for p in wide:
            p.data = p.data.float()
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.float()
        for table in tables:
            table.out_dtype = torch.float32
        yield bool(parameters)
    finally:
        for p, dtype, narrow in parameters:
            p.data = p.data.to(dtype) if narrow is None else narrow
        for module, name, buffer in buffers:
            module._buffers[name] = module.get_buffer(name).to(buffer.dtype) if changed else buffer
        for table, out in zip(tables, outs, strict=True):
            table.out_dtype = out


def batch_size(batch: Batch) -> int:
    """Samples of a batch: the length of its first tensor.

    >>> batch_size({"input_ids": torch.zeros(3, 7), "labels": torch.zeros(3)})
    3
    """
    for value in batch.values():
        if isinstance(value, Tensor) and value.ndim:
            return len(value)
    raise KflatsError("a calibration batch holds no tensors", hint="a dict of tensors")


def take(batch: Batch, index: Tensor) -> dict[str, BatchValue]:
    """The samples ``index`` of a batch; values that hold for all samples stay."""
    size = batch_size(batch)
    return {
        key: value[index.to(value.device)] if isinstance(value, Tensor) and value.ndim and len(value) == size else value
        for key, value in batch.items()
    }


def to_device(batch: Batch, device: torch.device) -> dict[str, BatchValue]:
    """The batch on ``device``; float16 becomes float32, as in a model that is ``frozen``."""
    tensors = {key: value.to(device) for key, value in batch.items() if isinstance(value, Tensor)}
    return {**batch, **{key: t.float() if t.dtype == torch.float16 else t for key, t in tensors.items()}}


@contextmanager
def explained(model: nn.Module, hint: str) -> Iterator[None]:
    """Errors of the model's own code, for inputs that are not enough for it, become a KflatsError with this hint.

    Errors raised by a line of kflats stay as they are: they are defects. So do errors of memory.
    """
    try:
        yield
    except KflatsError:
        raise
    except (ValueError, TypeError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError) as error:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        if is_out_of_memory(error):
            raise
        if len(frames) > 1 and str(frames[-1].f_globals.get("__name__")).startswith("kflats."):
            raise
        raise KflatsError(
            f"{type(model).__name__} cannot be run on these inputs alone: {first_line(error)[:200]}",
            cause="a model that reads several things at once, or texts that it cannot read",
            hint=hint,
        ) from error


def run(model: nn.Module, batch: Batch) -> ModelOutput:
    """``model(**batch)`` without computing the model's own loss: labels serve only to feed a decoder."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if is_sentence_transformer(model):
        return model(inputs)
    labels = batch.get("labels")
    if is_encoder_decoder(model) and "decoder_input_ids" not in inputs:
        if isinstance(labels, Tensor) and labels.ndim == 2:
            prepare: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
            if prepare is None:
                return model(**inputs, labels=labels)
            inputs["decoder_input_ids"] = prepare(labels=labels)
        elif "decoder_inputs_embeds" not in inputs:
            return _with_own_decoder_inputs(model, inputs)
    return model(**inputs)


def task_output(output: ModelOutput) -> Tensor | None:
    """The logits in a model's output, or None; an output that is one tensor counts as logits."""
    if isinstance(output, Tensor):
        return output
    logits = entry(output, "logits")
    return logits if isinstance(logits, Tensor) else None


def by_position(logits: Tensor, batch: Batch) -> Tensor:
    """Logits (samples, positions, classes) of a model that gives more axes; those of two and three stay as they are.

    Of images the classes come before height and width. A transducer gives them last, after frames and tokens.

    >>> by_position(torch.zeros(2, 5, 4, 3), {"pixel_values": None}).shape
    torch.Size([2, 12, 5])
    >>> by_position(torch.zeros(2, 5, 4, 3), {"input_features": None}).shape
    torch.Size([2, 20, 3])
    """
    if logits.ndim < 4:
        return logits
    return logits.flatten(2).mT if "pixel_values" in batch else logits.flatten(1, -2)


def entry(output: ModelOutput, name: str) -> ModelOutput:
    """The part of an output that has this name, or None."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def pooled(model: nn.Module, batch: Batch, output: ModelOutput) -> Tensor:
    """(B, d) the model's own sentence embeddings, or the means of its last hidden states: over the text's tokens, over
    all places of an image or a sound. A model of several encoders (CLIP) gives a vector of each, one beside the other;
    one without hidden states the first of its outputs that has a part for each sample.

    ``output`` is the model's output; None: the model runs here, without its task head.
    """
    hidden: object = None
    if is_sentence_transformer(model):
        output = run(model, batch) if output is None else output
        embedding = entry(output, "sentence_embedding")
        if isinstance(embedding, Tensor):
            return embedding
        hidden = entry(output, "token_embeddings")
    else:
        if output is None:
            kept = {k: v for k, v in batch.items() if k != "labels" and not k.startswith("decoder_")}
            output = _without_head(model, kept)
        hidden = entry(output, "last_hidden_state")
        vectors = [entry(output, f"{part}_embeds") for part in ("text", "image", "audio", "video")]
        own = [one for one in vectors if isinstance(one, Tensor) and one.ndim == 2]
        if own:
            return torch.cat([F.normalize(one, dim=1) for one in own], 1)
    if isinstance(hidden, Tensor) and hidden.ndim == 2:
        return hidden
    if isinstance(hidden, Tensor) and hidden.ndim == 4:  # of an image: channels come first
        return hidden.flatten(2).mean(2)
    if not isinstance(hidden, Tensor) and (other := _first_of_samples(output, batch_size(batch))) is not None:
        return other.flatten(1)
    if not isinstance(hidden, Tensor):
        raise KflatsError(
            f"{type(model).__name__} gives no logits and no last hidden state",
            hint="an objective of your own, or an importance without measurements: Uniform()",
        )
    mask = text_mask(batch, hidden)
    mask = mask if mask.shape == hidden.shape[:2] else decoder_mask(model, batch, hidden)
    return mean_over_tokens(hidden, mask)


def _first_of_samples(output: ModelOutput, samples: int) -> Tensor | None:
    """The first tensor of real numbers that has a part for each sample: depths, an embedding, a backbone's maps."""
    if isinstance(output, Tensor):
        fits = output.is_floating_point() and output.ndim > 1 and len(output) == samples
        return output if fits else None
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return next((found for part in parts if (found := _first_of_samples(part, samples)) is not None), None)


def mean_over_tokens(hidden: Tensor, mask: Tensor) -> Tensor:
    """(B, d) means of hidden states (B, T, d) over the tokens, which have a 1 in ``mask`` (B, T)."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp_min(1)


def text_mask(batch: Batch, like: Tensor) -> Tensor:
    """(B, T) ones where the input has a token; all ones without an attention mask."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask.to(like)
    return like.new_ones(like.shape[:2] if like.ndim == 3 else (len(like), 1))


def decoder_mask(model: nn.Module, batch: Batch, like: Tensor) -> Tensor:
    """(B, T) ones where the output has a token; in a model with a decoder, these are the decoder's positions."""
    if is_encoder_decoder(model):
        return decoder_positions(batch, like.new_ones(like.shape[:2]))
    mask = text_mask(batch, like)
    # Other positions than the text's (image patches, a prompt in front) all count.
    return mask if like.ndim == 3 and mask.shape == like.shape[:2] else like.new_ones(like.shape[:2])


def decoder_positions(batch: Batch, everything: Tensor) -> Tensor:
    """The decoder's mask: its own, else ones at labels, else that of the text, which it reads; else ``everything``."""
    mask, labels = batch.get("decoder_attention_mask"), batch.get("labels")
    if not isinstance(mask, Tensor):
        mask = labels != -100 if isinstance(labels, Tensor) else batch.get("attention_mask")
    return mask.to(everything) if isinstance(mask, Tensor) and mask.shape == everything.shape else everything


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether the model's own call runs a decoder on another sequence (its bare encoder does not)."""
    flag = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return bool(flag) and "decoder_input_ids" in inspect.signature(model.forward).parameters


def _with_own_decoder_inputs(model: nn.Module, inputs: Batch) -> ModelOutput:
    try:
        return model(**inputs)  # BART's classifier reads the text once more
    except (ValueError, TypeError) as error:  # NLLB-MoE looks None up in its table
        ids, config = inputs.get("input_ids"), getattr(model, "config", None)
        if not isinstance(ids, Tensor):
            raise KflatsError(
                f"{type(model).__name__} has a decoder, and the batches have nothing for it to read",
                hint="labels or decoder_input_ids in each batch, as the batches of a task have",
            ) from error
        # T5 gives its decoder nothing; like BART's, it reads the text, shifted by one position.
        starts = (getattr(config, f"{name}_token_id", None) for name in ("decoder_start", "pad"))
        first = ids.new_full((len(ids), 1), next((i for i in starts if isinstance(i, int)), 0))
        shifted: dict[str, BatchValue] = {"decoder_input_ids": torch.cat([first, ids[:, :-1]], 1)}
        if "attention_mask" in inputs:
            shifted["decoder_attention_mask"] = inputs["attention_mask"]
        return model(**inputs, **shifted)


Sample: TypeAlias = Mapping[str, Tensor]
Modality: TypeAlias = Literal["input_ids", "pixel_values", "input_features", "input_values"]
"""The names under which models of transformers read texts, images, spectrograms and sounds."""

_MODALITIES: dict[Modality, str] = {
    "input_ids": "texts",
    "pixel_values": "images",
    "input_features": "spectrograms",
    "input_values": "sounds",
}

_SOUND = 16_000  # numbers: a second at the usual rate
_IMAGE = 224  # pixels of a side where the config does not say
_DECODED = 16  # tokens for the decoder of a model that does not read text


def modalities_of(model: nn.Module) -> tuple[Modality, ...]:
    """All that ``model`` may read, by the arguments of its forward."""
    arguments = inspect.signature(model.forward).parameters
    return tuple(modality for modality in get_args(Modality) if modality in arguments)


def spoken_modalities(model: nn.Module) -> str:
    """What ``model`` may read, in words.

    >>> class Sees(nn.Module):
    ...     def forward(self, pixel_values): ...
    >>> spoken_modalities(Sees())
    'images'
    """
    return " and ".join(_MODALITIES[modality] for modality in modalities_of(model)) or "inputs of its own"


def modality_of(model: nn.Module) -> Modality:
    """What ``model`` reads, by the arguments of its forward.

    Raises:
        KflatsError: none of the inputs that transformers' models have.
    """
    for modality in modalities_of(model):
        return modality
    raise KflatsError(
        f"the inputs of {type(model).__name__} are unknown",
        cause=f"its forward has none of {', '.join(get_args(Modality))}",
    )


def read_together(model: nn.Module) -> tuple[Modality, ...]:
    """What one call of ``model`` must be given: what it reads first, or all that it may read where that is not enough
    (CLIP compares texts with images)."""
    modalities = modalities_of(model)
    if len(modalities) < 2:
        return (modality_of(model),)
    with evaluating(model), torch.no_grad():
        try:
            run(model, collate(_drawn(model, modalities[:1], 1, 4, 0), 0, device_of(model)))
        except Exception:  # a model's own code raises many kinds where an input is None
            return modalities
    return modalities[:1]


def has_language_head(model: nn.Module) -> bool:
    """Whether the outputs are distributions over the vocabulary."""
    return vocabulary_end(model, "get_output_embeddings") is not None


def text_samples(model: nn.Module, tokenizer: Tokenizer | None, texts: Sequence[str]) -> list[Sample]:
    """One sample a text, cut at ``MAX_TOKENS`` and at the model's own limit; beside it what else the model reads in
    one call, drawn.

    Raises:
        KflatsError: no tokenizer, or a tokenizer of another model.
    """
    rows = tokenize_texts(tokenizer, texts, MAX_TOKENS, model)
    others = read_together(model)[1:]
    drawn = _drawn(model, others, len(rows), 1, 0) if others else [{}] * len(rows)
    return [_with_labels(model, {"input_ids": torch.tensor(row)} | one) for row, one in zip(rows, drawn, strict=True)]


def drawn_samples(model: nn.Module, count: int, tokens: int = 32, seed: int = 0) -> list[Sample]:
    """``count`` samples of the shapes that the model's config has, drawn by ``seed``.

    Token ids are drawn uniformly from the vocabulary, ``tokens`` of them or as many as the model has positions. Images
    and sounds are noise whose amplitude falls with frequency, as that of pictures and speech does, of mean 0 and
    variance 1, as processors make them.

    Raises:
        KflatsError: inputs of an unknown name, or a config that lacks their shape.
    """
    return [_with_labels(model, one) for one in _drawn(model, read_together(model), count, tokens, seed)]


def _drawn(
    model: nn.Module, modalities: Sequence[Modality], count: int, tokens: int, seed: int
) -> list[dict[str, Tensor]]:
    """``count`` samples of ``modalities``; with ``labels`` where a language decoder has no text to read."""
    draws = torch.Generator().manual_seed(seed)
    columns: dict[str, Tensor] = {}
    for modality in modalities:
        config = _config(model, modality)
        if modality != "input_ids":
            columns[modality] = _noise((count, *_shape(config, modality)), draws)
            continue
        text = config.get_text_config()
        positions = getattr(text, "max_position_embeddings", None)  # XLNet's is -1: it has no table of positions
        length = min(tokens, positions) if isinstance(positions, int) and positions > 0 else tokens
        known = _vocabulary_size(model, text)
        ids = torch.randint(0, known, (count, length), generator=draws)
        if isinstance(end := getattr(text, "eos_token_id", None), int) and is_encoder_decoder(model):
            ids = torch.where(ids == end, (end + 1) % known, ids)
            ids[:, -1] = end  # classifiers of encoder-decoders read the one end of each text
        columns[modality] = ids
    if "input_ids" not in columns and is_encoder_decoder(model) and has_language_head(model):
        decoder = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
        length = min(_DECODED, getattr(decoder, "max_target_positions", None) or _DECODED)
        columns["labels"] = torch.randint(0, decoder.vocab_size, (count, length), generator=draws)
    return [{name: values[i] for name, values in columns.items()} for i in range(count)]


def collate(samples: Sequence[Sample], padding_id: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """One batch: token ids padded at the right with ``padding_id``, labels with 0, and the attention mask of the ids.

    Images and sounds are stacked.

    >>> collate([{"input_ids": torch.tensor([5, 6])}, {"input_ids": torch.tensor([7])}], 9)["input_ids"].tolist()
    [[5, 6], [7, 9]]
    """
    names = [name for name, value in samples[0].items() if "input_ids" in samples[0] and not value.is_floating_point()]
    batch = padded_batch([{name: one[name] for name in names} for one in samples], padding_id, device) if names else {}
    others = [name for name in samples[0] if name not in names]
    return batch | {name: torch.stack([one[name] for one in samples]).to(device) for name in others}


def batches(
    samples: Sequence[Sample], batch: int, padding_id: int, device: torch.device
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """The places of the samples of each batch, and the batch; the longest texts first."""
    for places in batches_by_length([length(one) for one in samples], batch):
        yield places, collate([samples[i] for i in places], padding_id, device)


def length(sample: Sample) -> int:
    """The number of a text's tokens, or of the first axis of another input."""
    return len(next(iter(sample.values())))


def _with_labels(model: nn.Module, sample: dict[str, Tensor]) -> Sample:
    if "input_ids" in sample and is_encoder_decoder(model) and has_language_head(model):
        sample["labels"] = sample["input_ids"]
    return sample


def _config(model: nn.Module, modality: Modality) -> Any:
    """The config of the part that reads: that of the image or sound encoder of a model of several parts."""
    config: Any = getattr(model, "config", None)
    if modality != "input_ids":
        inner = (getattr(config, name, None) for name in ("vision_config", "audio_config", "encoder"))
        config = next((one for one in inner if hasattr(one, "to_dict")), config)
    return config


def _vocabulary_size(model: nn.Module, config: Any) -> int:
    """How many tokens a model knows, by its ``config``, or else by its table of tokens.

    Raises:
        KflatsError: neither says so.
    """
    known = getattr(config, "vocab_size", None)
    known = (
        known if known is not None else getattr(vocabulary_end(model, "get_input_embeddings"), "num_embeddings", None)
    )
    if not isinstance(known, int) or known < 1:
        raise KflatsError(f"the number of tokens of {type(model).__name__} is unknown", hint="texts and a tokenizer")
    return known


def _shape(config: Any, modality: Modality) -> tuple[int, ...]:
    """The shape of one input; spectrograms have their numbers of bands and of frames in the config."""
    bands, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
    if modality == "pixel_values":
        side = getattr(config, "image_size", None) or _IMAGE
        sides = (side, side) if isinstance(side, int) else tuple(side)
        return (getattr(config, "num_channels", 3), *sides)
    if modality == "input_features" and (positions := getattr(config, "max_source_positions", None)) and bands:
        return (bands, 2 * positions)  # Whisper's encoder halves the number of frames
    if modality == "input_values":
        return (frames, bands) if bands and isinstance(frames, int) else (_SOUND,)
    raise KflatsError(
        f"the shape of the inputs of {type(config).__name__.removesuffix('Config')} is unknown",
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
