"""The part of a model that is recorded: its inputs, its output, and the inputs of the check afterwards."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.calibration.running import is_encoder_decoder, task_output
from kflats.common.errors import KflatsError
from kflats.evaluation.encoding import last_hidden_state
from kflats.io import load_model, resolve_model
from kflats.model.weights import is_sentence_transformer, pretrained_models

TEXT_SHAPES = ((2, 7), (1, 1), (5, 1), (1, 12), (4, 23))
"""Batches and lengths of the check of a text model; the first is recorded."""


class Graph(nn.Module):
    """A model as a function of tensors with one output tensor, with the inputs to record and to check it.

    Args:
        model: the model.
        kind: "pooled" (masked mean, length 1), "sentence" (a SentenceTransformer), "text" (logits or last hidden
            states) or "any".
        names: the names of the inputs.
        example: one tensor for each input.
        axes: for each input, the names of the axes that vary.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: str,
        names: tuple[str, ...],
        example: tuple[Tensor, ...],
        axes: tuple[dict[int, str], ...],
        outputs: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.model, self.kind = model, kind
        self.names, self.example, self.axes, self.outputs = names, example, axes, outputs

    def forward(self, *tensors: Tensor) -> Tensor:
        given = dict(zip(self.names, tensors, strict=True))
        if self.kind == "sentence":
            found: Tensor = self.model(given)["sentence_embedding"]
            return found
        if self.kind == "pooled":
            hidden, mask = last_hidden_state(self.model, given), given["attention_mask"].unsqueeze(-1)
            total = (hidden * mask.to(hidden.dtype)).sum(1)
            return F.normalize(total / mask.sum(1).clamp(min=1).to(hidden.dtype), dim=1)
        return _output(self.model(**given, **_quiet(self.model)), self.outputs[0])

    def of(self, model: nn.Module) -> Graph:
        """The graph of ``model``, which is a copy in float32 on the CPU."""
        example = tuple(t.cpu().float() if t.is_floating_point() else t.cpu() for t in self.example)
        return Graph(model, self.kind, self.names, example, self.axes, self.outputs)

    def trials(self) -> Iterator[tuple[Tensor, ...]]:
        """Inputs of several batches and lengths, the same in every run."""
        if self.kind != "any":
            for batch, length in TEXT_SHAPES:
                yield _texts(self.model, self.names, batch, length)
            return
        yield self.example
        yield tuple(t[:1] for t in self.example)
        yield tuple(torch.cat([t, t.flip(0), t]) for t in self.example)
        if any("length" in axes.values() for axes in self.axes):
            pairs = list(zip(self.example, self.axes, strict=True))
            yield tuple(t[:, : -(-t.shape[1] // 2)] if "length" in axes.values() else t for t, axes in pairs)


def graph_of(model: nn.Module | str | os.PathLike[str], inputs: Mapping[str, Tensor] | None, pooled: bool) -> Graph:
    """The graph to record of a model or of a model folder.

    Raises:
        KflatsError: a module that does not read text, without ``inputs``; a model that generates with a decoder of
            its own.
    """
    if not isinstance(model, nn.Module):
        model = _loaded(resolve_model(model), pooled)
    if inputs is not None:
        if pooled:
            raise KflatsError(
                "pooled is not supported with inputs",
                cause="only models that read text are pooled",
                hint="leave one of them out",
            )
        return _any_graph(model, inputs)
    if is_sentence_transformer(model):
        return _text_graph(model, "sentence", ("input_ids", "attention_mask"), "sentence_embedding")
    if not any(part is model for _, part in pretrained_models(model)):
        raise KflatsError(
            f"a {type(model).__name__} cannot be recorded without examples of its inputs",
            cause="its inputs are unknown, because it is not a model of transformers",
            hint='inputs={"x": an example, ...}, as for model(**inputs)',
            command="--dense, and another exporter on that checkpoint",
        )
    if pooled:
        return _text_graph(model, "pooled", ("input_ids", "attention_mask"), "sentence_embedding")
    if is_encoder_decoder(model):
        raise KflatsError(
            f"{type(model).__name__} cannot be recorded as one graph",
            cause="its decoder runs once for each token, with a state",
            hint="pooled=True for its encoder, or an exporter of generation (optimum) on the dense checkpoint",
            command="--pooled for its encoder, or an exporter of generation (optimum) on the checkpoint of --dense",
        )
    taken = inspect.signature(model.forward).parameters
    if "input_ids" not in taken:
        raise KflatsError(
            f"{type(model).__name__} cannot be recorded without examples of its inputs",
            cause="its forward takes no input_ids: it reads no text",
            hint='inputs={"pixel_values": an example, ...}',
            command="--dense, and another exporter on that checkpoint",
        )
    names = ["input_ids", "attention_mask"]
    # Pairs of texts need token types; a table of one type has no information.
    if "token_type_ids" in taken and getattr(model.config, "type_vocab_size", 0) > 1:
        names.append("token_type_ids")
    return _text_graph(model, "text", tuple(names), "")


def _loaded(folder: Path, pooled: bool) -> nn.Module:
    if not pooled or not (folder / "modules.json").is_file():
        found: nn.Module = load_model(folder)
        return found
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise KflatsError(
            f"{folder} has sentence-transformers modules, and that library is not installed",
            hint="pip install 'kflats[st]', or pooled=False for last hidden states",
            command="pip install 'kflats[st]', or leave --pooled out for last hidden states",
        ) from error
    # Other arguments keep their defaults; no code of the folder is run.
    return SentenceTransformer(str(folder), device="cpu", trust_remote_code=False, local_files_only=True)


def _text_graph(model: nn.Module, kind: str, names: tuple[str, ...], output: str) -> Graph:
    example = _texts(model, names, *TEXT_SHAPES[0])
    if not output:
        device = next(model.parameters()).device
        with torch.no_grad():
            found = model(**{n: t.to(device) for n, t in zip(names, example, strict=True)}, **_quiet(model))
        output = "logits" if task_output(found) is not None else "last_hidden_state"
    axes = tuple({0: "batch", 1: "length"} for _ in names)
    return Graph(model, kind, names, example, axes, (output,))


def _any_graph(model: nn.Module, inputs: Mapping[str, Tensor]) -> Graph:
    if not inputs or not all(isinstance(t, Tensor) and t.ndim and len(t) > 1 for t in inputs.values()):
        raise KflatsError(
            "inputs must be tensors of two or more examples",
            hint='inputs={"x": torch.rand(2, 9)}',
            command="--dense, and another exporter on that checkpoint",
        )
    axes = tuple(
        {0: "batch", 1: "length"} if t.ndim == 2 and not t.is_floating_point() else {0: "batch"}
        for t in inputs.values()
    )
    return Graph(model, "any", tuple(inputs), tuple(inputs.values()), axes, ("output",))


def _texts(model: nn.Module, names: tuple[str, ...], batch: int, length: int) -> tuple[Tensor, ...]:
    """Random ids of the model's table, with padding at the right of every text but the first."""
    gen = torch.Generator().manual_seed(batch * 1000 + length)
    configs = [part.config for _, part in pretrained_models(model)]
    config = configs[0].get_text_config()
    length = min(length, getattr(config, "max_position_embeddings", None) or length)
    keep = torch.randint(1, length + 1, (batch, 1), generator=gen)
    keep[0] = length
    mask = (torch.arange(length) < keep).to(torch.int64)
    made = {
        "input_ids": torch.randint(0, config.vocab_size, (batch, length), generator=gen),
        "attention_mask": mask,
        "token_type_ids": (torch.arange(length) >= keep // 2).to(torch.int64) * mask,
    }
    return tuple(made[name] for name in names)


def _quiet(model: nn.Module) -> dict[str, Any]:
    """Arguments that turn off the cache, which would be a second output."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def _output(found: Any, name: str) -> Tensor:
    if isinstance(found, Tensor):
        return found
    value = found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)
    value = getattr(found, "logits", None) if value is None and name == "output" else value
    if not isinstance(value, Tensor):
        raise KflatsError(f"the model's output has no {name}", hint="a module around the model that returns one tensor")
    return value
