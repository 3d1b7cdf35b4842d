"""Surgery: put a Matrix in place of a dense table, everywhere the table is used, and take it out again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from kflats.errors import KflatsError
from kflats.nn.layers import FactoredEmbedding, FactoredHead, FactoredLinear
from kflats.nn.matrix import Matrix
from kflats.places import (
    FactoredLayer,
    Place,
    Weight,
    dense_weight,
    embedding_scale,
    factored_layers,
    find_weight,
    find_weights,
    submodule,
)
from kflats.resizing import guard_resizing_, unguard_resizing_
from kflats.ties import forget_ties_, recall_ties_

__all__ = ["Place", "Weight", "dense_weight", "find_weight", "find_weights", "restore_", "swap_", "unchanged_on_error"]

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


def swap_(
    model: nn.Module,
    weight: Weight,
    matrix: Matrix,
    *,
    rows: str = "inputs",
    scales: dict[str, float | None] | None = None,
) -> None:
    """Replace every place of ``weight`` by a layer on ``matrix``, in place; the first place owns the factors.

    Padding, sparse gradients, embedding scales, biases (the same parameter objects), hooks, device,
    ``requires_grad`` and training mode carry over; transformers' own lists of ties are kept true.

    Args:
        model: any module; transformers models keep working with everything transformers does.
        weight: what ``find_weight`` gave for this model.
        matrix: of ``weight.shape``; it is adopted, not copied.
        rows: "outputs" for a linear layer whose matrix has output neurons as rows (shape reversed).
        scales: embedding scales by place, for a model on the meta device, where they cannot be read.

    Raises:
        KflatsError: another shape, a model that has changed since ``find_weight``, sparse gradients with
            flats, a layer that accelerate moves about. The model is then as it was.

    >>> from kflats.nn.matrix import LowRankMatrix
    >>> model = nn.ModuleDict({"words": nn.Embedding(9, 4)})
    >>> swap_(model, find_weight(model, "words"), LowRankMatrix(torch.ones(9, 1), torch.ones(1, 4)))
    >>> model["words"](torch.tensor([2])).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    if find_weight(model, weight.name).places != weight.places:
        raise KflatsError(f"the places of {weight.name!r} have changed", hint="call find_weight again")
    reverse = rows == "outputs" and weight.places[0].role in ("linear", "conv1d")
    if matrix.shape != (weight.shape[::-1] if reverse else weight.shape):
        raise KflatsError(
            f"a matrix of shape {matrix.shape} cannot replace {weight.name!r} of shape {weight.shape}",
            cause="the matrix was made for another weight, or in the other orientation",
        )
    group = [place.name for place in weight.places]
    old = [model.get_submodule(name) for name in group]
    if moved := [name for name, module in zip(group, old, strict=True) if hasattr(module, "_hf_hook")]:
        raise KflatsError(
            f"{moved[0]!r} is managed by accelerate, which moves its tensors while the model runs",
            cause="the model was loaded with a device_map over several devices",
            hint="load it on one device, compress, save, and then load the small model with that device_map",
        )
    table = cast(nn.Parameter, old[0]._parameters["weight"])
    if matrix.weight.device != table.device:
        matrix.to(table.device)
    layers = _new_layers(weight, old, matrix, "outputs" if reverse else "inputs", scales or {})
    for parameter in matrix.parameters():
        parameter.requires_grad_(table.requires_grad)

    forget_ties_(model, group)  # while the dense parameters are there: transformers looks their names up
    for name, layer in zip(group, layers, strict=True):
        _put(model, name, layer)
    for module in old:
        # The shell stays with its layer for restore_; without a table it holds no memory and is no second place.
        module._parameters["weight"] = None
    _check_swapped(model, group, layers, table)
    guard_resizing_(model, matrix, places=len(group))


def restore_(model: nn.Module) -> None:
    """Put dense layers back, in place: every factored layer becomes what it was, with ``matrix.dense()`` as its table.

    Ties are tied again. Values do not return to what they were before compression.

    >>> from kflats.nn.matrix import LowRankMatrix
    >>> model = nn.ModuleDict({"words": nn.Embedding(9, 4)})
    >>> swap_(model, find_weight(model, "words"), LowRankMatrix(torch.ones(9, 1), torch.ones(1, 4)))
    >>> restore_(model)
    >>> model
    ModuleDict(
      (words): Embedding(9, 4)
    )
    """
    tables: dict[int, nn.Parameter] = {}
    shells: dict[int, nn.Module] = {}
    for name, layer in list(factored_layers(model)):
        matrix = layer.matrix
        if id(matrix) not in tables:
            with torch.no_grad():
                out = layer.out_dtype if isinstance(layer, FactoredEmbedding) else None
                table = matrix.dense().to(out or matrix.weight.dtype)
                tables[id(matrix)] = nn.Parameter(table, requires_grad=matrix.weight.requires_grad)
        if id(layer) not in shells:
            shells[id(layer)] = _dense_layer(name, layer, tables[id(matrix)])
        _put(model, name, shells[id(layer)])
    recall_ties_(model)
    unguard_resizing_(model)


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """After an exception inside, every module and config of ``model`` holds the same objects as before.

    For several swaps that belong together: the first must not stay when the second is refused.

    >>> model = nn.ModuleDict({"words": nn.Embedding(9, 4)})
    >>> try:
    ...     with unchanged_on_error(model):
    ...         _put(model, "words", nn.Identity())
    ...         raise RuntimeError
    ... except RuntimeError:
    ...     print(model["words"])
    Embedding(9, 4)
    """
    modules = dict.fromkeys(model.modules())
    owners: dict[int, Any] = {id(module): module for module in modules}
    owners |= {id(c): c for m in modules if hasattr(c := m.__dict__.get("config"), "__dict__")}
    before = [
        (owner, dict(vars(owner)), {k: dict(v) for k, v in vars(owner).items() if isinstance(v, dict)})
        for owner in owners.values()
    ]
    try:
        yield
    except BaseException:
        for owner, attributes, tables in before:
            vars(owner).clear()
            vars(owner).update(attributes)
            for name, table in tables.items():
                attributes[name].clear()
                attributes[name].update(table)
        raise


def _new_layers(
    weight: Weight, old: Sequence[nn.Module], matrix: Matrix, rows: str, scales: dict[str, float | None]
) -> list[FactoredLayer]:
    """A layer for every place, none of them in the model yet; one object where one module has two places."""
    made: dict[int, FactoredLayer] = {}
    layers = []
    for place, module in zip(weight.places, old, strict=True):
        if id(module) not in made:
            layer = _new_layer(place, module, matrix, rows, scales.get(place.name), own=not made)
            bias = getattr(module, "bias", None)
            if not isinstance(layer, FactoredEmbedding) and bias is not None:
                layer.bias = bias  # the parameter itself: it may be tied
            for name in _HOOKS:
                layer.__dict__[name] = module.__dict__[name]
            layer.train(module.training)
            layer.__dict__["_shell"] = module
            if not matrix.weight.is_meta:
                _mark_initialized(layer)
            made[id(module)] = layer
        layers.append(made[id(module)])
    return layers


def _new_layer(
    place: Place, module: nn.Module, matrix: Matrix, rows: str, scale: float | None, *, own: bool
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
    return FactoredLinear(matrix, rows=rows)


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Register ``layer`` at ``name``. Never ``setattr(model, "a.b", ...)``: that makes a ghost child."""
    parent, _, leaf = name.rpartition(".")
    model.get_submodule(parent)._modules[leaf] = layer


def _check_swapped(model: nn.Module, group: Sequence[str], layers: Sequence[nn.Module], table: Tensor) -> None:
    for name, layer in zip(group, layers, strict=True):
        if submodule(model, name) is not layer:
            raise KflatsError(f"the swap of {name!r} did not take", cause="the model overrides how it holds its layers")
    left = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is table]
    if left:
        raise KflatsError(f"the dense table of {group[0]!r} is still in use as {left[0]!r}")


def _mark_initialized(layer: nn.Module) -> None:
    """So that transformers' ``init_weights`` leaves fitted factors alone, as it does loaded ones."""
    layer.__dict__["_is_hf_initialized"] = True
    for parameter in layer.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]


def _dense_layer(name: str, layer: FactoredLayer, table: nn.Parameter) -> nn.Module:
    """The module that ``layer`` replaced, with a table again."""
    shell = layer.__dict__.get("_shell")
    if not isinstance(shell, nn.Module):
        raise KflatsError(f"{name!r} cannot be made dense", cause="it was not put there by kflats.surgery.swap_")
    # Conv1D keeps M, torch's linear layers M.T; a matrix whose rows are outputs is M.T already.
    if isinstance(layer, FactoredLinear) and (type(shell) is nn.Linear) == (layer.row_side == "inputs"):
        table = nn.Parameter(table.detach().T.contiguous(), requires_grad=table.requires_grad)
    if isinstance(layer, FactoredEmbedding) and isinstance(shell, nn.Embedding):
        shell.num_embeddings, shell.padding_idx = layer.num_embeddings, layer.padding_idx
        if isinstance(scale := getattr(shell, "embed_scale", None), Tensor):
            # The shell did not travel with the model: its scale may be on another device, or not in memory.
            shell.embed_scale = torch.full_like(scale, cast(float, layer.scale), device=table.device)
    elif not isinstance(layer, FactoredEmbedding):
        shell._parameters["bias"] = layer.bias
        if isinstance(shell, nn.Linear):
            shell.out_features = layer.out_features
    shell._parameters["weight"] = table
    shell.train(layer.training)
    return shell
