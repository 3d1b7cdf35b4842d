"""Coded layers, and flats, in graphs of ``torch.compile``: one operator each, which runs the layer as outside of them.

A graph of plain operators decodes the integers in every call, multiplies the bases of all flats for each row, and takes
its compiler minutes. Where no gradient passes, it holds an operator instead, which the compiler does not look into: the
layer keeps its run-time form, and makes it anew after its scales have changed. Graphs for training and for files
(``torch.export``) hold plain operators.

Operators take tensors and numbers, so each layer has a number, which stands in the graph.
"""

from __future__ import annotations

from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kflats.matrices.base import Matrix, is_exporting


class Numbered(Protocol):
    """A layer that graphs call by its number."""

    def computed(self, given: Tensor, bias: Tensor | None) -> Tensor:
        """``(*b, in)`` inputs, or ``(*b, 1)`` places of rows -> ``(*b, width)``, a new tensor."""


_LAYERS: WeakValueDictionary[int, Numbered] = WeakValueDictionary()
_NUMBERS = count()


def numbered(layer: Numbered) -> int:
    """A number for ``layer``, as long as it is in use."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return number


@torch.library.custom_op("kflats::computed", mutates_args=())
def computed(given: Tensor, bias: Tensor | None, layer: int, width: int, dtype: torch.dtype) -> Tensor:
    """What the layer of this number computes, in ``dtype``."""
    return _LAYERS[layer].computed(given, bias)


@computed.register_fake
def _as_computed(given: Tensor, bias: Tensor | None, layer: int, width: int, dtype: torch.dtype) -> Tensor:
    return given.new_empty(*given.shape[:-1], width, dtype=dtype)


def is_one_operator(matrix: Matrix, *given: Tensor | None) -> bool:
    """Whether the graph that is recorded calls a layer of ``matrix`` by its number, with these tensors as inputs."""
    if not matrix.one_operator or not torch.compiler.is_compiling() or is_exporting():
        return False
    tensors = [*matrix.parameters(), *(each for each in given if each is not None)]
    return not torch.is_grad_enabled() or not any(each.requires_grad for each in tensors)
