"""Surgery: put a Matrix in place of a dense table, everywhere the table is used, and take it out again."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.matrices.conv import FactoredConv2d
from kflats.matrices.layers import FactoredEmbedding, FactoredHead, FactoredLinear, check_matrix_rows
from kflats.matrices.registry import DenseMatrix, Matrix
from kflats.model.describe import compute_dtype
from kflats.model.description import is_kflats_config
from kflats.model.exchange import dense_layer_for, factored_layers_for, holders_of_bias, shift_bias_
from kflats.model.resizing import guard_resizing_, unguard_resizing_
from kflats.model.roles import FactoredLayer
from kflats.model.ties import recall_ties_, untie_
from kflats.model.weights import (
    Weight,
    dense_weight,
    factored_layers,
    find_weight,
    find_weights,
    own_matrix_rows,
    pretrained_models,
    submodule,
)

__all__ = [
    "Weight",
    "dense_weight",
    "find_weight",
    "find_weights",
    "restore_",
    "swap_",
    "unchanged_on_error",
]


def swap_(
    model: nn.Module,
    weight: Weight,
    matrix: Matrix,
    *,
    matrix_rows: str = "in_features",
    bias_shift: Tensor | None = None,
    scales: dict[str, float | None] | None = None,
) -> None:
    """Replace every place of ``weight`` by a layer on ``matrix``, in place; the first place owns the factors.

    Padding, sparse gradients, embedding scales, biases (the same parameter objects), hooks, device,
    ``requires_grad`` and training mode carry over; transformers' own lists of ties are kept true.

    Args:
        model: any module; transformers models keep working with everything transformers does.
        weight: of this model, from ``find_weight``.
        matrix: of ``weight.shape``; it is adopted, not copied.
        matrix_rows: "out_features" for a linear layer or convolution whose matrix has output neurons as rows (its
            shape is reversed).
        bias_shift: (d,), added to the layer's bias: the error of the factors on the mean input. A layer without
            a bias gets one, which is saved and loaded with it.
        scales: embedding scales by place, for a model on the meta device, where they cannot be read.

    Raises:
        KflatsError: another shape, a DenseMatrix in another orientation than the layer's own table, a model that has
            changed since ``find_weight``, sparse gradients with flats, flats in a convolution, a bias for an embedding
            or for a bias that two layers share, a layer that accelerate moves about. The model is then as it was.

    >>> from kflats.matrices.registry import LowRankMatrix
    >>> model = nn.ModuleDict({"words": nn.Embedding(9, 4)})
    >>> swap_(model, find_weight(model, "words"), LowRankMatrix(torch.ones(9, 1), torch.ones(1, 4)))
    >>> model["words"](torch.tensor([2])).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    if find_weight(model, weight.name).places != weight.places:
        raise KflatsError(f"the places of {weight.name!r} have changed", hint="find the weight again, then swap")
    _check_options(weight, matrix_rows, bias_shift)
    if matrix.shape != (weight.shape if matrix_rows == "in_features" else weight.shape[::-1]):
        raise KflatsError(
            f"a matrix of shape {matrix.shape} cannot replace {weight.name!r} of shape {weight.shape}",
            cause="the matrix was made for another weight, or in the other orientation",
        )
    if isinstance(matrix, DenseMatrix) and matrix_rows != own_matrix_rows(weight):
        raise KflatsError(
            f"the dense matrix of {weight.name!r} cannot have {matrix_rows} as rows",
            cause=f"the layer's own table has {own_matrix_rows(weight)}, and a program without kflats would load it",
            hint=f"the transpose of the matrix, with {own_matrix_rows(weight)} as rows",
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
    shared = [] if bias_shift is None else holders_of_bias(model, weight.name, old[0])
    layers = factored_layers_for(weight, old, matrix, matrix_rows, scales or {})
    for factor in matrix.tensors().values():
        if factor.is_floating_point():
            factor.requires_grad_(table.requires_grad)
    if bias_shift is not None:
        shift_bias_(cast(FactoredLinear | FactoredConv2d, layers[0]), bias_shift, table, shared)

    untie_(model, group)  # while the dense parameters are there: transformers looks their names up
    for name, layer in zip(group, layers, strict=True):
        _put(model, name, layer)
    for module in old:
        # restore_ puts the shell back. Without a table it takes no memory and is no second place of the weight.
        module._parameters["weight"] = None
    _check_swapped(model, group, layers, table)
    guard_resizing_(model, matrix, places=len(group))


def restore_(model: nn.Module) -> None:
    """Put the dense layers back, in place: every factored layer becomes dense, with ``matrix.dense()`` as its table.

    Ties are tied again. The original values do not return: the dense model computes the same as the factored one,
    biases included. Only a bias that a layer gained is removed, because the architecture has no place for it; the
    outputs move by that constant. The description of factors leaves transformers' configs, so that ``save_pretrained``
    writes an ordinary folder.

    >>> from kflats.matrices.registry import LowRankMatrix
    >>> model = nn.ModuleDict({"words": nn.Embedding(9, 4)})
    >>> swap_(model, find_weight(model, "words"), LowRankMatrix(torch.ones(9, 1), torch.ones(1, 4)))
    >>> restore_(model)
    >>> model
    ModuleDict(
      (words): Embedding(9, 4)
    )
    """
    computed = compute_dtype(model)
    tables: dict[int, nn.Parameter] = {}
    shells: dict[int, nn.Module] = {}
    for name, layer in list(factored_layers(model)):
        matrix = layer.matrix
        if id(matrix) not in tables:
            # Factors of a smaller type are widened before they are multiplied, as the layer does.
            dtype = _table_dtype(layer, computed)
            wide = matrix if matrix.weight.dtype == dtype else copy.deepcopy(matrix).to(dtype)
            with torch.no_grad():
                tables[id(matrix)] = nn.Parameter(wide.dense(), requires_grad=matrix.weight.requires_grad)
        if id(layer) not in shells:
            shells[id(layer)] = dense_layer_for(name, layer, tables[id(matrix)])
        _put(model, name, shells[id(layer)])
    recall_ties_(model)
    unguard_resizing_(model)
    for _, part in pretrained_models(model):
        if is_kflats_config(getattr(part.config, "quantization_config", None)):
            del part.config.quantization_config
        part.__dict__.pop("save_pretrained", None)  # see kflats.io.saving


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """After an exception inside, every module and config of ``model`` holds the same objects as before.

    Several swaps that belong together need this: the first is undone when the second is refused.

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


def _check_options(weight: Weight, matrix_rows: str, bias_shift: Tensor | None) -> None:
    check_matrix_rows(matrix_rows)
    embedding = weight.places[0].role == "embedding"
    if embedding and matrix_rows == "out_features":
        raise KflatsError(
            f"outputs as rows are not supported for the embedding {weight.name!r}",
            cause="the rows of an embedding are tokens",
            hint="inputs as rows",
        )
    if bias_shift is None:
        return
    if embedding:
        raise KflatsError(f"the embedding {weight.name!r} cannot have a bias shift", cause="an embedding has no bias")
    if tuple(bias_shift.shape) != weight.shape[1:]:
        raise KflatsError(
            f"a bias shift of shape {tuple(bias_shift.shape)} does not fit {weight.name!r}",
            cause=f"the layer has {weight.shape[1]} outputs",
        )
    if not bias_shift.is_meta and not bool(torch.isfinite(bias_shift).all()):
        raise KflatsError(
            f"the bias shift of {weight.name!r} is not finite", cause="infinite or NaN values in the data"
        )


def _table_dtype(layer: FactoredLayer, computed: torch.dtype) -> torch.dtype:
    """The type of the table that ``layer`` stands for, in a model that computes in ``computed``."""
    if isinstance(layer, FactoredEmbedding):
        return layer.out_dtype or layer.matrix.weight.dtype
    return computed if layer.bias is None or isinstance(layer, FactoredHead) else layer.bias.dtype


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Register ``layer`` at ``name``. Never ``setattr(model, "a.b", ...)``: that makes a ghost child."""
    parent, _, leaf = name.rpartition(".")
    model.get_submodule(parent)._modules[leaf] = layer


def _check_swapped(model: nn.Module, group: Sequence[str], layers: Sequence[nn.Module], table: Tensor) -> None:
    for name, layer in zip(group, layers, strict=True):
        if submodule(model, name) is not layer:
            raise KflatsError(
                f"the swap of {name!r} did not take",
                cause="the model overrides how it holds its layers",
                hint="leave this weight dense",
            )
    left = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is table]
    if left:
        raise KflatsError(
            f"the dense table of {group[0]!r} cannot be replaced",
            cause=f"the model still uses it as {left[0]!r}, which no layer holds",
            hint="leave this weight dense",
        )
