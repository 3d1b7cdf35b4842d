"""Coded layers, and flats, in graphs of ``torch.compile``: one operator each, which runs the layer as outside of them.

A graph of plain operators decodes the integers in every call, multiplies the bases of all flats for each row, and takes
its compiler minutes. Where no gradient passes, it holds an operator instead, which the compiler does not look into: the
layer keeps its run-time form, and makes it anew after its scales have changed. Graphs for training and for files
(``torch.export``) hold plain operators.

An operator takes tensors. So each layer has a number in a tensor, which no graph contains: graphs of equal layers are
one graph. The parameters of its matrix are arguments too, so that the compiler sees what the outputs depend on. Others
than the layer's own are used where it gives them: by ``torch.func.functional_call``, or because they change inside of
the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kflats.matrices.base import Matrix, is_exporting


class Numbered(Protocol):
    """A layer that graphs call by its number."""

    def computed(self, given: Tensor, bias: Tensor | None) -> Tensor:
        """``(*b, in)`` inputs, or ``(*b, 1)`` places of rows -> ``(*b, width)``, a new tensor."""

    def with_tensors(self, tensors: Sequence[Tensor]) -> Numbered:
        """This layer, or one like it if its matrix has other parameters than these."""


_LAYERS: WeakValueDictionary[int, Numbered] = WeakValueDictionary()
_NUMBERS = count()


def numbered(layer: Numbered) -> Tensor:
    """A number for ``layer``, as long as it is in use."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return torch.tensor(number, device="cpu")


# CUDA graphs would replay its kernels without asking whether scales have changed.
@torch.library.custom_op("kflats::computed", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def computed(
    given: Tensor, bias: Tensor | None, layer: Tensor, tensors: Sequence[Tensor], width: int, dtype: torch.dtype
) -> Tensor:
    """What the layer of this number computes, in ``dtype``."""
    return _LAYERS[int(layer)].with_tensors(tensors).computed(given, bias)


@computed.register_fake
def _as_computed(
    given: Tensor, bias: Tensor | None, layer: Tensor, tensors: Sequence[Tensor], width: int, dtype: torch.dtype
) -> Tensor:
    return given.new_empty(*given.shape[:-1], width, dtype=dtype)


def is_one_operator(matrix: Matrix) -> bool:
    """Whether the graph that is recorded calls a layer of ``matrix`` by its number: in calls without derivatives."""
    # ``is_compiling`` would be true while any thread compiles.
    if not torch.compiler.is_dynamo_compiling() or is_exporting():
        return False
    return matrix.one_operator and not torch.is_grad_enabled() and forward_ad._current_level < 0
