"""Writes the description of a model's factored layers, in the form that ``description`` reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kflats.common.errors import KflatsError
from kflats.matrices.conv import FactoredConv2d
from kflats.matrices.layers import FactoredEmbedding, FactoredHead, FactoredLinear
from kflats.matrices.registry import CodedMatrix, DenseMatrix
from kflats.model.description import FORMAT_VERSION, QUANT_METHOD
from kflats.model.roles import FactoredLayer
from kflats.model.ties import untied_places
from kflats.model.weights import factored_layers


def describe(model: nn.Module) -> dict[str, Any] | None:
    """The description of ``model``'s factored layers, JSON-able, or None where nothing is factored.

    Raises:
        KflatsError: a place whose owner is outside ``model``, or factors of the dense table's shape (a program without
            kflats would load them as if they were the table).
    """
    modules: dict[str, dict[str, Any]] = {}
    owners: dict[int, str] = {}
    for name, layer in factored_layers(model):
        matrix = layer.matrix
        if layer.owns_matrix and id(matrix) not in owners:
            owners[id(matrix)] = name
            rows = layer.matrix_rows if isinstance(layer, FactoredLinear | FactoredConv2d) else "in_features"
            _check_collision(name, layer)
            modules[name] = {
                "matrix": matrix.spec(),
                "dtype": _name(matrix.weight.dtype),
                "matrix_rows": rows,
                "places": [],
            }
            if isinstance(matrix, CodedMatrix):
                modules[name]["checksum"] = matrix.checksum()
        if id(matrix) not in owners:
            raise KflatsError(
                f"{name!r} borrows its matrix from a layer outside this {type(model).__name__}",
                cause="a part of a larger model is being saved",
                hint="save the whole model",
            )
        modules[owners[id(matrix)]]["places"].append(_described(name, layer))
    if not modules:
        return None
    for entry in modules.values():
        entry["untied"] = list(untied_places(model, [place["name"] for place in entry["places"]]))
    return {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        "dtype": _name(compute_dtype(model)),
        "modules": modules,
    }


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The type that ``model`` computes in. Its factors may be stored in another type."""
    for _, layer in factored_layers(model):
        if isinstance(layer, FactoredEmbedding) and layer.out_dtype is not None:
            return layer.out_dtype
    factored = {id(t) for _, layer in factored_layers(model) for t in layer.matrix.tensors().values()}
    own: torch.dtype | None = None
    for parameter in model.parameters():
        if parameter.is_floating_point():
            if id(parameter) not in factored:
                return parameter.dtype
            own = own or parameter.dtype
    return own or torch.get_default_dtype()


def _described(name: str, layer: FactoredLayer) -> dict[str, Any]:
    padding, scale = (layer.padding_idx, layer.scale) if isinstance(layer, FactoredEmbedding) else (None, None)
    place: dict[str, Any] = {"name": name, "role": _layer_role(layer), "padding_idx": padding, "scale": scale}
    if isinstance(layer, FactoredConv2d):
        place["kernel"] = [layer.in_channels, *layer.kernel_size]
    if isinstance(layer, FactoredLinear | FactoredConv2d) and layer.gained_bias:
        place["gained_bias"] = True
    return place


def _layer_role(layer: FactoredLayer) -> str:
    if isinstance(layer, FactoredEmbedding):
        return "embedding"
    if isinstance(layer, FactoredHead):
        return "head"
    if isinstance(layer, FactoredConv2d):
        return "conv2d"
    shell = layer.__dict__.get("_shell")
    return "linear" if shell is None or type(shell) is nn.Linear else "conv1d"


def _check_collision(name: str, layer: FactoredLayer) -> None:
    if isinstance(layer, FactoredConv2d):
        return  # a dense kernel has four dimensions
    if isinstance(layer.matrix, DenseMatrix):
        return  # its tensor is the table
    n, d = layer.matrix.shape
    # Conv1D stores M, and torch's linear layers store M.T. A matrix with output neurons as rows is M.T already.
    turned = isinstance(layer, FactoredLinear) and (_layer_role(layer) == "linear") == (
        layer.matrix_rows == "in_features"
    )
    dense = (d, n) if turned else (n, d)
    if tuple(layer.matrix.weight.shape) == dense:
        raise KflatsError(
            f"the factors of {name!r} are no smaller than the table itself",
            cause="its rank is the full dimension",
            hint="a smaller budget, or leave this weight dense",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
