"""Parameters that are no table of a layer: experts of a mixture as one tensor, XLNet's projections, 1-d convolutions.

Their module reads the tensor itself, so it stays dense in memory. Its matrix is kept beside it, for files. A file has
the matrix in place of the tensor: ``experts.down_proj`` (coordinates or scales, of another shape than the dense
tensor), ``experts.down_proj_codes`` and the like. Loading decodes it. A tensor that was changed since, by training
for example, is saved as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.matrices.layers import mark_initialized
from kflats.matrices.registry import Matrix
from kflats.model.weights import Held, Weight, held_matrices, inputs_first, parameter, stored_name


def hold_(model: nn.Module, weight: Weight, matrix: Matrix, matrix_rows: str) -> None:
    """Give the parameter ``weight`` the values of ``matrix``, and keep the matrix beside it, on the CPU: no ``to`` of
    the model reaches it, and another device may decode other last digits."""
    module, key, table = _place(model, weight.name)
    matrix = matrix if matrix.weight.is_meta else matrix.cpu()
    with torch.no_grad():
        held = Held(matrix, matrix_rows, weight.places[0].role)
        new = nn.Parameter(_values(held, table, module), requires_grad=table.requires_grad)
    setattr(module, key, mark_initialized(new))
    _keep(module, key, held)


def begin_loading_(model: nn.Module, weight: Weight, matrix: Matrix, matrix_rows: str) -> None:
    """Let the parameter's module have the tensors of ``matrix`` in its place, until ``decode_`` has read them."""
    module, key, table = _place(model, weight.name)
    _keep(module, key, Held(matrix, matrix_rows, weight.places[0].role, table))
    for name, tensor in matrix.tensors().items():
        own = stored_name(key, name, "parameter")
        if tensor.is_floating_point():  # the first has the parameter's own name, and its place among the others
            module._parameters[own] = nn.Parameter(tensor, requires_grad=False)
        else:
            module.register_buffer(own, tensor)


def end_loading_(model: nn.Module, name: str) -> Matrix:
    """The matrix of the parameter ``name`` with the tensors that were loaded; its module loses them.

    Raises:
        KflatsError: a tensor that the checkpoint did not have.
    """
    module, key = _module_of(model, name)
    waiting: Held = module.__dict__["_kflats_held"][key]
    matrix = waiting.matrix
    for part, empty in matrix.tensors().items():
        own = stored_name(key, part, "parameter")
        held = module._parameters if own in module._parameters else module._buffers
        tensor = held[key] if own == key else held.pop(own)
        if tensor is None or tensor.is_meta or not tensor.__dict__.get("_is_hf_initialized"):  # transformers fills it
            raise KflatsError(
                f"the checkpoint has no {stored_name(name, part, 'parameter')} of shape {tuple(empty.shape)}",
                cause="a damaged folder: config.json and model.safetensors do not belong together",
                hint="restore the folder, or compress again",
            )
        module._non_persistent_buffers_set.discard(own)
        if part in matrix._parameters:
            matrix._parameters[part] = cast(nn.Parameter, tensor)
        else:
            matrix._buffers[part] = tensor
    return matrix


@contextmanager
def shown_dense(model: nn.Module) -> Iterator[None]:
    """Inside, each parameter that is being loaded has its dense shape, any values, and the mark of a loaded tensor."""
    places = [(*_module_of(model, name), held.empty) for name, held in held_matrices(model) if held.empty is not None]
    before = [module._parameters[key] for module, key, _ in places]
    try:
        for module, key, empty in places:
            shown = nn.Parameter(torch.empty_like(empty, device="cpu"))
            module._parameters[key] = cast(nn.Parameter, mark_initialized(shown))
        yield
    finally:
        for (module, key, _), tensor in zip(places, before, strict=True):
            module._parameters[key] = tensor


def decode_(model: nn.Module, name: str) -> None:
    """Put the values of the matrix of ``name`` where ``begin_loading_`` took the parameter out."""
    module, key = _module_of(model, name)
    held = module.__dict__["_kflats_held"][key]
    with torch.no_grad():
        values = _values(held, held.empty, module)
    setattr(module, key, mark_initialized(nn.Parameter(values)))
    _keep(module, key, Held(held.matrix, held.matrix_rows, held.role))


def forget_changed_(model: nn.Module) -> None:
    """Let go of matrices whose parameter has other values now: it is saved as it is."""
    for name, held in list(held_matrices(model)):
        table, (module, key) = parameter(model, name), _module_of(model, name)
        if table is None or table.is_meta or not torch.equal(_values(held, table, module), table):
            del module.__dict__["_kflats_held"][key]


def put_matrices_(tensors: dict[str, Tensor], model: nn.Module) -> None:
    """Replace each held parameter of ``model`` in its state by the tensors of its matrix."""
    for name, held in held_matrices(model):
        if tensors.pop(name, None) is not None:
            tensors.update({stored_name(name, key, "parameter"): t for key, t in held.matrix.tensors().items()})


def _keep(module: nn.Module, key: str, held: Held) -> None:
    module.__dict__.setdefault("_kflats_held", {})[key] = held


def _module_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str, nn.Parameter]:
    module, key = _module_of(model, name)
    table = module._parameters[key]
    assert table is not None
    return module, key, table


def _values(held: Held, like: Tensor, module: nn.Module) -> Tensor:
    """The values of the matrix in the shape and the type of ``like``, a tensor of ``module``."""
    dense = held.matrix.dense()
    dense = dense.T if held.matrix_rows == "out_features" else dense
    if held.role == "experts":  # side by side in the matrix, one below the other in the tensor
        experts, n = len(like), len(dense)
        dense = dense.reshape(n, experts, -1).transpose(0, 1) if inputs_first(module) else dense.T
    dense = dense.reshape(like.shape).to(like.dtype).contiguous()
    return dense if like.is_meta else dense.to(like.device)
