"""The factored layer that stands for a dense one, and the dense layer again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from kflats.codecs.streams import decode
from kflats.common.errors import KflatsError
from kflats.matrices.conv import FactoredConv2d
from kflats.matrices.layers import FactoredEmbedding, FactoredHead, FactoredLinear, mark_initialized
from kflats.matrices.registry import CodedMatrix, Matrix
from kflats.model.roles import FactoredLayer, embedding_scale
from kflats.model.weights import Weight, WeightUse

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def factored_layers_for(
    weight: Weight, old: Sequence[nn.Module], matrix: Matrix, rows: str, scales: dict[str, float | None]
) -> list[FactoredLayer]:
    """A layer for every place, not yet in the model. A module with two places gets one layer."""
    by_module: dict[int, FactoredLayer] = {}
    layers = []
    for place, module in zip(weight.places, old, strict=True):
        if id(module) not in by_module:
            layer = _new_layer(place, module, matrix, rows, scales.get(place.name), own=not by_module)
            bias = getattr(module, "bias", None)
            if not isinstance(layer, FactoredEmbedding) and bias is not None:
                layer.bias = bias  # the parameter itself: it may be tied
            for name in _HOOKS:
                layer.__dict__[name] = module.__dict__[name]
            if layer.owns_matrix and isinstance(matrix, CodedMatrix):
                layer.register_load_state_dict_pre_hook(_decode_stream)  # type: ignore[no-untyped-call]
            layer.train(module.training)
            layer.__dict__["_shell"] = module
            # With this mark transformers does not call ``_init_weights``, which would overwrite factors like a table.
            layer.__dict__["_is_hf_initialized"] = True
            if not matrix.weight.is_meta:
                _mark_initialized(layer)
            by_module[id(module)] = layer
        layers.append(by_module[id(module)])
    return layers


def holders_of_bias(model: nn.Module, name: str, layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every other module that has ``layer``'s bias (BERT lists its decoder's bias twice), with the bias' name there."""
    bias = layer._parameters.get("bias")
    if bias is None:
        return []
    found = [(m, key) for m in model.modules() if m is not layer for key, p in m._parameters.items() if p is bias]
    if any(holder._parameters.get("weight") is not None for holder, _ in found):
        raise KflatsError(
            f"the bias of {name!r} cannot be shifted",
            cause="another layer has the same bias, and would be shifted, too",
        )
    return found


def shift_bias_(
    layer: FactoredLinear | FactoredConv2d, shift: Tensor, table: nn.Parameter, shared: list[tuple[nn.Module, str]]
) -> None:
    """Give ``layer`` a new bias. The old parameter stays as it is, so that the model can be put back after an error."""
    old = layer.bias
    layer.gained_bias = old is None
    like = table if old is None else old
    shift = shift.detach().to(like.device, like.dtype)
    layer.bias = nn.Parameter(shift.clone() if old is None else old.detach() + shift, requires_grad=like.requires_grad)
    if not layer.bias.is_meta:
        _mark_initialized(layer)
    for holder, key in shared:
        holder._parameters[key] = layer.bias


def dense_layer_for(name: str, layer: FactoredLayer, table: nn.Parameter) -> nn.Module:
    """The module that ``layer`` replaced, with a table again."""
    shell = layer.__dict__.get("_shell")
    if not isinstance(shell, nn.Module):
        raise KflatsError(f"{name!r} cannot be made dense", cause="kflats did not put this layer into the model")
    # Conv1D stores M, and torch's other layers store M.T. A matrix whose rows are outputs is M.T already.
    if isinstance(layer, FactoredLinear | FactoredConv2d):
        turned = isinstance(shell, nn.Linear | nn.Conv2d) == (layer.matrix_rows == "in_features")
        held = table.detach().T if turned else table.detach()
        if isinstance(layer, FactoredConv2d):
            held = held.reshape(layer.out_channels, layer.in_channels, *layer.kernel_size)
        table = nn.Parameter(held.contiguous(), requires_grad=table.requires_grad)
    if isinstance(layer, FactoredEmbedding) and isinstance(shell, nn.Embedding):
        shell.num_embeddings, shell.padding_idx = layer.num_embeddings, layer.padding_idx
        if isinstance(scale := getattr(shell, "embed_scale", None), Tensor):
            # The shell is no part of the model: its scale may be on another device, or on the meta device.
            shell.embed_scale = torch.full_like(scale, cast(float, layer.scale), device=table.device)
    elif not isinstance(layer, FactoredEmbedding):
        gained = not isinstance(layer, FactoredHead) and layer.gained_bias
        shell._parameters["bias"] = None if gained else layer.bias
        if isinstance(shell, nn.Linear):
            shell.out_features = cast(FactoredLinear | FactoredHead, layer).out_features
    shell._parameters["weight"] = table
    shell.train(layer.training)
    return shell


def _new_layer(
    place: WeightUse, module: nn.Module, matrix: Matrix, rows: str, scale: float | None, *, own: bool
) -> FactoredLayer:
    if isinstance(module, nn.Embedding):
        found = embedding_scale(module)
        if found is not None and math.isnan(found):
            if scale is None:
                raise KflatsError(
                    f"the scale of the embedding {place.name!r} is unknown", cause="the model is on the meta device"
                )
            found = scale
        out = module.weight.dtype
        return FactoredEmbedding(
            matrix,
            padding_idx=module.padding_idx,
            scale=found,
            sparse=module.sparse,
            own=own,
            dtype=None if out == matrix.weight.dtype else out,
        )
    if place.role == "head":
        return FactoredHead(matrix)
    if isinstance(module, nn.Conv2d):
        return FactoredConv2d(matrix, module, matrix_rows=rows)
    return FactoredLinear(matrix, matrix_rows=rows)


def _decode_stream(layer: FactoredLayer, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let ``load_state_dict`` read the state of a file, which holds a stream in place of the integers."""
    stream, matrix = state.get(prefix + "codes"), cast(CodedMatrix, layer.matrix)
    if stream is not None and prefix + "bits" not in state:
        state.update({prefix + name: value for name, value in decode(stream, matrix.geometry).items()})


def _mark_initialized(layer: nn.Module) -> None:
    """Mark fitted factors like loaded ones: transformers' ``init_weights`` then leaves them as they are."""
    for parameter in layer.parameters():
        mark_initialized(parameter)
