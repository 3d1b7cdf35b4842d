"""Plain torch modules with factored layers on disk: one safetensors file with the description of its layers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.io.atomic_files import replaced
from kflats.io.coded import put_streams_
from kflats.io.headers import check_files, stamp_, warn_of_unchecked
from kflats.io.write_errors import explain
from kflats.matrices.registry import CodedMatrix, Matrix
from kflats.model.describe import describe
from kflats.model.description import Module, read_description
from kflats.model.matching import match, stored_dtype, swap_described_
from kflats.model.weights import Weight, is_sentence_transformer, pretrained_models


def save(model: nn.Module, folder: str | os.PathLike[str], *, streams: bool = True) -> None:
    """Save a plain torch module with factored layers as ``folder/model.safetensors``; ``load_`` reads it back.

    The description of the layers is in the file's header. The file is replaced in one step. Shared parameters are
    stored once.

    Args:
        model: a torch module; a transformers model has ``save_pretrained``.
        folder: created if missing; other files in it stay.
        streams: store codes as streams, which are decoded when they are loaded. False stores them at fixed rates, which
            take more bytes, and which load without the constriction library.

    Raises:
        KflatsError: a transformers or sentence-transformers model, a full disk, or streams without the constriction
            library. An earlier file then stays as it was.
    """
    if any(part is model for _, part in pretrained_models(model)):
        raise KflatsError(
            f"{type(model).__name__} is not supported here, because it is a transformers model",
            hint="model.save_pretrained(folder)",
            command="kflats compress",
        )
    if is_sentence_transformer(model):
        raise KflatsError(
            f"{type(model).__name__} is not supported here, because it saves itself",
            hint="model.save(folder)",
            command="kflats compress",
        )
    tensors, shared = _distinct(model)
    layers = describe(model)
    if streams and layers is not None:
        put_streams_(tensors, layers, required=True)
    path = Path(folder) / "model.safetensors"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as aside:
            save_file(tensors, aside, metadata={"kflats": json.dumps({"layers": layers, "shared": shared})})
            stamp_(aside)
    except (OSError, SafetensorError) as error:
        explain(error, path)
        raise


def load_(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Load what ``save`` wrote into ``model``, a dense module of the same architecture, in place.

    Every name, shape, size and checksum is checked before a layer is replaced or memory is allocated. A file without
    checksums, because another program wrote it again, is loaded with a warning.

    Raises:
        KflatsError: no such file, a damaged one, or one of another architecture; ``model`` is then as it was.
    """
    path = Path(folder) / "model.safetensors"
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            if "kflats" not in header:
                raise KflatsError(f"{path} has no description of layers", cause="kflats.save did not write this file")
            note = json.loads(header["kflats"])
            if not isinstance(note, dict) or note.keys() != {"layers", "shared"}:
                raise KflatsError(f"{path} has an unreadable description", cause="a damaged or hand-edited file")
            warn_of_unchecked(check_files([path]))
            _load_checked(model, note["layers"], note["shared"], shapes, file)
    except FileNotFoundError as error:
        raise KflatsError(
            f"there is no {path}", hint="a folder that kflats.save wrote", command="a model folder"
        ) from error
    except (SafetensorError, json.JSONDecodeError) as error:
        raise KflatsError(f"{path} cannot be read: {error}", cause="a damaged or incomplete file") from error


def _load_checked(model: nn.Module, layers: Any, shared: Any, shapes: dict[str, tuple[int, ...]], file: Any) -> None:
    chosen: list[tuple[Weight, Module, torch.dtype]] = []
    if layers is not None:
        description = read_description(layers)
        for weight, module in match(model, description, strict=True):
            dtype = stored_dtype(description, module, getattr(torch, weight.dtype))
            chosen.append((weight, module, dtype))
    expected = _expected(model, chosen)
    if not isinstance(shared, dict) or not all(isinstance(v, str) and v in shapes for v in shared.values()):
        raise KflatsError("the file's list of shared tensors is unreadable", cause="a damaged or hand-edited file")
    there = shapes | {alias: shapes[name] for alias, name in shared.items()}
    for name in sorted(expected.keys() ^ there.keys()):
        side = "lacks" if name in expected else "has an unknown tensor"
        raise KflatsError(f"the file {side} {name!r}", cause="it was saved from another architecture")
    for name, shape in expected.items():
        if there[name] != shape:
            raise KflatsError(
                f"{name!r} is {there[name]} in the file, {shape} in the model",
                cause="it was saved from another architecture, or is damaged",
            )
    matrices: list[Matrix] = []
    with torch.no_grad():
        for weight, module, dtype in chosen:
            device = model.get_parameter(f"{weight.name}.weight").device
            matrix = module.new(dtype, device)
            for key, tensor in matrix.tensors().items():
                stored = file.get_tensor(f"{weight.name}.{key}")
                if stored.dtype != tensor.dtype and not (stored.is_floating_point() and tensor.is_floating_point()):
                    raise KflatsError(
                        f"{weight.name}.{key} is of type {stored.dtype} in the file", cause="a damaged file"
                    )
                tensor.copy_(stored)
            module.finish_(matrix)
            matrices.append(matrix)
        for (weight, module, _), matrix in zip(chosen, matrices, strict=True):
            swap_described_(model, weight, module, matrix)
        done = {f"{weight.name}.{key}" for weight, module, _ in chosen if module.stream for key in _all_keys(module)}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in done:
                continue
            tensor.copy_(file.get_tensor(shared.get(name, name)))


def _expected(model: nn.Module, chosen: Sequence[tuple[Weight, Module, torch.dtype]]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the model's state after the ``chosen`` weights are swapped."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for weight, module, _ in chosen:
        for place in weight.places:
            del shapes[f"{place.name}.weight"]
        shapes |= {f"{weight.name}.{key}": tuple(value.shape) for key, value in module.empty.tensors().items()}
        if module.gained_bias:
            shapes[f"{weight.name}.bias"] = weight.shape[1:]
    return shapes


def _distinct(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model's state without repeats, and the name under which each repeat is stored."""
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise KflatsError(f"{name!r} cannot be stored", cause="it is not a tensor")
        if id(tensor) in first:
            shared[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            tensors[name] = tensor.detach().clone().contiguous()
    return tensors, shared


def _all_keys(module: Module) -> tuple[str, ...]:
    """Names of all tensors of a coded matrix, also of those inside a stream."""
    return tuple(module.empty.geometry.shapes) if isinstance(module.empty, CodedMatrix) else ()
