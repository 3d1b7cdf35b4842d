"""The weight of a model that each module of a description stands for, and the empty layer in its place."""

from __future__ import annotations

import torch
from torch import nn

from kflats.common.errors import KflatsError
from kflats.matrices.registry import Matrix
from kflats.model.description import DAMAGED, Description, Module
from kflats.model.swap import swap_
from kflats.model.weights import Weight, find_weights, parameter, spellings, submodule


def match(model: nn.Module, description: Description, *, strict: bool) -> list[tuple[Weight, Module]]:
    """Each described module with the weight of ``model`` it replaces, whose name may lack the base model's prefix.

    Args:
        model: still dense.
        description: of the file.
        strict: the model must have every described place, and no other place may share the weight. Otherwise
            described places that ``model`` lacks (a head) are passed over, and a head that only ``model`` ties joins.

    Raises:
        KflatsError: another shape, a tie that only the file or only the model has, a layer of another kind.
    """
    weights = {place.name: weight for weight in find_weights(model) for place in weight.places}
    found = []
    for module in description.modules:
        name = _resolve(model, module.name, weights)
        if name is None:
            if strict or any(submodule(model, s) is not None for s in spellings(model, module.name)):
                raise KflatsError(
                    f"the file has a factored layer {module.name!r} that {type(model).__name__} cannot take",
                    cause="the model class or its config is not the one that was saved",
                    hint="load the folder with the class that its config names",
                )
            continue
        weight = weights[name]
        shape = module.empty.shape if module.matrix_rows == "in_features" else module.empty.shape[::-1]
        if shape != weight.shape:
            raise KflatsError(
                f"{module.name!r} is {shape[0]} x {shape[1]} in the file, but {weight.shape[0]} x {weight.shape[1]} "
                "in the model",
                cause="the config was edited, or belongs to another model",
                hint="restore the folder, or compress again",
            )
        _check_places(model, module, weight, strict=strict)
        _check_layer(model, module, weight)
        found.append((weight, module))
    if len({weight.name for weight, _ in found}) != len(found):
        raise KflatsError("two factored modules of the file are one weight of the model", cause=DAMAGED)
    return found


def swap_described_(model: nn.Module, weight: Weight, module: Module, matrix: Matrix) -> None:
    """Swap ``matrix`` in for ``weight`` as ``module`` describes it; a bias that the layer gained starts at zero."""
    table, bias = parameter(model, f"{weight.name}.weight"), None
    if module.gained_bias and table is not None:
        bias = torch.zeros(weight.shape[1], dtype=table.dtype, device=table.device)
    swap_(model, weight, matrix, matrix_rows=module.matrix_rows, bias_shift=bias, scales=_scales(model, module))


def stored_dtype(description: Description, module: Module, dtype: torch.dtype) -> torch.dtype:
    """The type for a module's factors in a model of type ``dtype``: the type of the model, unless the file stores the
    factors in a type of their own."""
    return dtype if module.dtype == description.dtype else module.dtype


def _scales(model: nn.Module, module: Module) -> dict[str, float | None]:
    """Embedding scales by place, under both spellings of its name."""
    return {name: place.scale for place in module.places for name in spellings(model, place.name)}


def _resolve(model: nn.Module, name: str, weights: dict[str, Weight]) -> str | None:
    return next((spelling for spelling in spellings(model, name) if spelling in weights), None)


def _check_places(model: nn.Module, module: Module, weight: Weight, *, strict: bool) -> None:
    here = {place.name for place in weight.places}
    for place in module.places:
        names = spellings(model, place.name)
        if not here & set(names) and (strict or any(submodule(model, name) is not None for name in names)):
            raise KflatsError(
                f"the file ties {place.name!r} to {module.name!r}, but this {type(model).__name__} does not",
                cause="the model was built with tie_word_embeddings=False",
                hint="load it with the config it was saved with",
            )
    known = {name for place in module.places for name in spellings(model, place.name)}
    if strict and (more := here - known):
        raise KflatsError(
            f"this {type(model).__name__} ties {sorted(more)[0]!r} to {module.name!r}, but the file does not",
            cause="the model was built with tie_word_embeddings=True",
            hint="load it with the config it was saved with",
        )


def _check_layer(model: nn.Module, module: Module, weight: Weight) -> None:
    layer = model.get_submodule(weight.name)
    here = (layer.in_channels, *layer.kernel_size) if isinstance(layer, nn.Conv2d) else None
    if (there := module.places[0].kernel) != here:
        raise KflatsError(
            f"{module.name!r} is {_layer(there)} in the file, but {_layer(here)} in the model",
            cause="it was saved from another architecture",
        )
    if module.gained_bias and weight.bias:
        raise KflatsError(
            f"the file gives {module.name!r} a bias beside its own", cause="the model was built with another config"
        )


def _layer(kernel: tuple[int, ...] | None) -> str:
    return "no convolution" if kernel is None else f"a convolution of kernels {kernel}"
