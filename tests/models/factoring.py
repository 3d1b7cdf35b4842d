"""Factored models beside dense models that must compute the same: whole ones, each layer in another form, or parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import cycle
from typing import Any

import torch
from matrices import flats, interpolative, low_rank
from torch import Tensor, nn

from kflats.io import annotate_
from kflats.matrices.registry import Matrix
from kflats.model.swap import swap_
from kflats.model.weights import Weight, dense_weight, find_weight, find_weights

MAKERS = [low_rank, flats, interpolative]
FORMS = [(make, rows) for rows in ("in_features", "out_features") for make in MAKERS]
CONVOLVED = [form for form in FORMS if form[0] is not flats]


def factor(model: Any) -> Any:
    """Swap everything that ``find_weights`` offers; the dense model that must compute the same."""
    dense = copy.deepcopy(model)
    forms, convolved = cycle(FORMS), cycle(CONVOLVED)
    for i, weight in enumerate(find_weights(model)):
        role = weight.places[0].role
        if role == "parameter":
            matrix = low_rank(*weight.shape)
            table = dense.get_parameter(weight.name)
            table.data.copy_(matrix.dense().detach().reshape(table.shape))
            swap_(model, weight, matrix)
            continue
        if role == "embedding":
            make, rows = MAKERS[i % 3], "in_features"
        else:
            make, rows = next(convolved if role == "conv2d" else forms)
        if make is flats and min(weight.shape) < 16:  # too few rows for five bands
            make = low_rank
        matrix = make(*(weight.shape if rows == "in_features" else weight.shape[::-1]))
        shift = torch.randn(weight.shape[1]) if role != "embedding" and i % 3 == 0 else None
        table = matrix.dense() if rows == "in_features" else matrix.dense().T
        write(dense.get_submodule(weight.name), weight, table.detach(), shift)
        swap_(model, find_weight(model, weight.name), matrix, matrix_rows=rows, bias_shift=shift)
    annotate_(model)
    return dense


def factor_named(model: Any, names: Iterable[str], make_matrix: Callable[[int, int], Matrix]) -> Any:
    """Swap the named weights; the dense model that must compute the same."""
    dense = copy.deepcopy(model)
    for name in names:
        weight = find_weight(model, name)
        matrix = make_matrix(*weight.shape)
        with torch.no_grad():
            dense_weight(dense, find_weight(dense, name)).copy_(matrix.dense())
        swap_(model, weight, matrix)
    annotate_(model)
    return dense


def write(layer: nn.Module, weight: Weight, table: Tensor, shift: Tensor | None) -> None:
    with torch.no_grad():
        turned = table.T if weight.places[0].role in ("linear", "conv2d") else table
        layer.weight.copy_(turned.reshape(layer.weight.shape))
        if shift is not None and layer.bias is not None:
            layer.bias += shift
        elif shift is not None:
            layer.bias = nn.Parameter(shift.clone())
